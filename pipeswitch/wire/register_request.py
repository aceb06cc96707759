"""One registration as it travels: the SDK, the command line, HTTP and the configuration fill it.

The types are the limits of each field; ``frontend/registration.py`` checks what goes together.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import Meta

from .frames import MAX_DIMS, MAX_TENSORS, plain

Text = Annotated[str, Meta(max_length=4096, pattern="^[^\0]*$")]
Name = Annotated[str, Meta(max_length=128)]
Count = Annotated[int, Meta(ge=0, le=1 << 50)]
Devices = Annotated[tuple[Text, ...], Meta(max_length=256)]
# An extent, or the range that requests choose from. Without bounds here: msgspec 0.22 reads wrong
# memory where an integer with bounds stands beside a tuple.
Extent: TypeAlias = int | tuple[int, int]
Shape = Annotated[tuple[Extent, ...], Meta(max_length=MAX_DIMS)]
Signature = Annotated[dict[Name, tuple[Shape, str]], Meta(max_length=MAX_TENSORS)]
_Output = Annotated[str, Meta(min_length=1, max_length=128)]
_Axis = Annotated[int, Meta(ge=-1)]
States = Annotated[dict[_Output, tuple[_Output, _Axis]], Meta(max_length=MAX_TENSORS)]


class RegisterRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of ``register`` (docs/protocol.md); ``Client.register`` explains each field."""

    source: Text
    weights: Text = ""
    inputs: Signature = {}
    takes: Any = None  # a tree of input names that makes up the arguments; None: each is one
    example: Text = ""  # put:DIGEST of the inputs' values; empty: they are made up
    priority: Text = ""
    pin: bool = False
    devices: Devices = ()
    max_batch: Count = 0  # 0: the server's default
    batch: Count = 0  # 0: requests are not joined
    batch_delay_ms: Annotated[float, Meta(ge=0, le=60_000)] = 0.0
    preprocess: Text = ""
    raw: Signature = {}
    postprocess: Text = ""
    returns: Signature = {}
    state: States = {}  # by input: the output, and the dimension to append along; -1: replace
    generate: bool = False
    precision: Text = ""  # empty: exact
    max_error: Annotated[float, Meta(ge=0, le=1)] = 0.0

    def body(self) -> dict[str, Any]:
        """Return the fields that are set: an older server knows no newer ones."""
        fields = {key: value for key, value in msgspec.structs.asdict(self).items() if value}
        body: dict[str, Any] = msgspec.to_builtins(fields, enc_hook=plain)
        return body
