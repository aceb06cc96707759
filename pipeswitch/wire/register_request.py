"""Registration request of the SDK, the command line, HTTP and the configuration.

The types limit each field; ``frontend/registration.py`` checks the combinations.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import Meta

from .frames import MAX_DIMS, MAX_TENSORS, plain

Text = Annotated[str, Meta(max_length=4096, pattern="^[^\0]*$")]
Name = Annotated[str, Meta(max_length=128)]
Count = Annotated[int, Meta(ge=0, le=1 << 50)]
Aliases = Annotated[tuple[Name, ...], Meta(max_length=16)]
Devices = Annotated[tuple[Text, ...], Meta(max_length=256)]
# Size of a dimension, or the range of sizes that requests may use. It has no ``Meta`` bounds,
# because msgspec 0.22 reads wrong memory for a union of a bounded integer and a tuple.
Extent: TypeAlias = int | tuple[int, int]
Shape = Annotated[tuple[Extent, ...], Meta(max_length=MAX_DIMS)]
Signature = Annotated[dict[Name, tuple[Shape, str]], Meta(max_length=MAX_TENSORS)]
_Output = Annotated[str, Meta(min_length=1, max_length=128)]
_Axis = Annotated[int, Meta(ge=-1)]
States = Annotated[dict[_Output, tuple[_Output, _Axis]], Meta(max_length=MAX_TENSORS)]


class BuildRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fields of a registration that a build needs (``programs/spec.py``)."""

    source: Text = ""
    weights: Text = ""
    inputs: Signature = {}
    takes: Any = None  # nesting of the inputs in the arguments; None: one argument for each input
    example: Text = ""  # put:DIGEST of an upload with input values; empty: generated values
    devices: Devices = ()
    max_batch: Count = 0  # 0: the server's default
    batch: Count = 0  # 0: requests are not batched
    batch_delay_ms: Annotated[float, Meta(ge=0, le=60_000)] = 0.0
    preprocess: Text = ""
    raw: Signature = {}
    postprocess: Text = ""
    returns: Signature = {}
    state: States = {}  # input -> (output that continues it, dimension to append to or -1: replace)
    generate: bool = False
    precision: Text = ""  # empty: exact
    max_error: Annotated[float, Meta(ge=0, le=1)] = 0.0


class RegisterRequest(BuildRequest, frozen=True, kw_only=True):
    """The body of ``register`` (docs/protocol.md); ``Client.register`` explains each field."""

    as_version: bool = False  # the source has only weights, for the next version of this model
    priority: Text = ""
    pin: bool = False
    aliases: Aliases = ()  # further names of the model

    def body(self) -> dict[str, Any]:
        """Return only the fields that are set."""
        fields = {key: value for key, value in msgspec.structs.asdict(self).items() if value}
        body: dict[str, Any] = msgspec.to_builtins(fields, enc_hook=plain)
        return body
