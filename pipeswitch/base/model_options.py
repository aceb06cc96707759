"""Options of a registration, declared once, with their help.

The SDK, ``pipeswitch register``, ``[[model]]`` in the configuration file, HTTP and the builder use
these structs. The types limit each field; ``frontend/registration.py`` checks the combinations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Annotated, Any, Final, TypeAlias

import msgspec
from msgspec import Meta

from .bytes_tensors import BYTES, ITEM_BYTES
from .codec import plain
from .settings import NAME_PATTERN, Name, in_ms

MAX_TENSORS: Final = 64
MAX_DIMS: Final = 8
PRIORITIES: Final[Mapping[str, int]] = {"high": 0, "normal": 1, "low": 2}  # 0 is the most urgent
PRECISIONS: Final = ("exact", "fast", "bf16", "int8")
DTYPES: Final = tuple(ITEM_BYTES)
# Size of a dimension, or the range of sizes that requests may use. It has no ``Meta`` bounds,
# because msgspec 0.22 reads wrong memory for a union of a bounded integer and a tuple.
Extent: TypeAlias = int | tuple[int, int]
Shape = Annotated[tuple[Extent, ...], Meta(max_length=MAX_DIMS)]
TensorName = Annotated[str, Meta(max_length=128)]


def parse_states(pairs: Iterable[str]) -> dict[str, tuple[str, int]]:
    """Parse ``state``, such as ``("h=h_out", "cache=rows+1")``, to input -> (output, dimension).

    The output is appended along the dimension; with -1 it replaces the input.

    Raises:
        ValueError: a text is not of that form, or an input appears twice.
    """
    states: dict[str, tuple[str, int]] = {}
    for text in pairs:
        name, _, source = text.partition("=")
        output, _, axis = source.rpartition("+")
        if not (name and source) or name in states:
            raise ValueError(f"{text!r} is not of the form h=h_out, or appears twice")
        states[name] = (output, int(axis)) if axis.isdecimal() and output else (source, -1)
    return states


def parse_input(
    text: str, number: int = 0, dtypes: tuple[str, ...] = DTYPES
) -> tuple[str, tuple[tuple[Extent, ...], str]]:
    """Return ``(name, (shape, dtype))`` of a text such as ``x=8x3x224x224:float32``.

    An extent that requests choose is a range: ``ids=1..8x1..512:int64``.

    Args:
        text: may lack the name, and the dtype, which then is float32.
        number: position among the inputs; an input without a name is called x, x1, x2…
        dtypes: allowed dtypes.

    Raises:
        ValueError: ``text`` is not of that form.
    """
    name, _, spec = text.rpartition("=")
    shape, _, dtype = spec.partition(":")
    dtype = dtype or "float32"
    ends = [part.split("..") for part in shape.split("x")] if shape else []
    is_short = len(text) < 4096  # int() refuses longer numbers
    is_sound = is_short and all(len(one) <= 2 and all(map(str.isdecimal, one)) for one in ends)
    if not is_sound or dtype not in dtypes:
        raise ValueError(
            f"input {text!r} is not of the form [NAME=]8x3x224x224:float32, or 1..8x1..512:int64 "
            f"for sizes that requests choose; dtypes: {', '.join(dtypes)}"
        )
    extents = tuple(int(one[0]) if len(one) == 1 else (int(one[0]), int(one[1])) for one in ends)
    return name or (f"x{number}" if number else "x"), (extents, dtype)


def _texts(parse: Callable[[list[str]], Any], metavar: str) -> Meta:
    """Return the rule for a mapping that people write as a list of texts, which ``parse`` reads."""

    def read(raw: Any) -> Any:
        if not isinstance(raw, list | tuple) or not all(isinstance(one, str) for one in raw):
            raise ValueError(f"{raw!r} is not a list of texts")
        return parse(list(raw))

    return Meta(extra={"read": read, "metavar": metavar})


def _signature(texts: list[str], dtypes: tuple[str, ...] = DTYPES) -> dict[str, Any]:
    return dict(parse_input(one, number, dtypes) for number, one in enumerate(texts))


def option(text: str, **command: Any) -> Meta:
    """Return the help of an option, and its form in the command line, where that differs."""
    return Meta(description=text, extra=command)


def _choice(choices: Iterable[str]) -> Meta:
    return Meta(extra_json_schema={"enum": ["", *choices]})


Text = Annotated[str, Meta(max_length=4096, pattern="^[^\0]*$")]
Source = Annotated[Text, option("torchvision:…, hf:…, a bundle file, package.module:factory")]
Count = Annotated[int, Meta(ge=0, le=1 << 50)]
Alias = Annotated[TensorName, Meta(extra_json_schema={"pattern": f"^{NAME_PATTERN.pattern}$"})]
_Signature = Annotated[dict[TensorName, tuple[Shape, str]], Meta(max_length=MAX_TENSORS)]
Signature = Annotated[_Signature, _texts(_signature, "[NAME=]8x3x224x224:float32")]
_raw_signature = partial(_signature, dtypes=(*DTYPES, BYTES))
RawSignature = Annotated[_Signature, _texts(_raw_signature, "[NAME=]1..64:bytes")]
_Output = Annotated[str, Meta(min_length=1, max_length=128)]
Function = Annotated[Text, Meta(extra={"metavar": "PACKAGE.MODULE:FUNCTION"})]
States = Annotated[
    dict[_Output, tuple[_Output, Annotated[int, Meta(ge=-1)]]],
    Meta(max_length=MAX_TENSORS),
    _texts(parse_states, "INPUT=OUTPUT"),
]


CONTROLS: Final = r"\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069"  # of a terminal


class SourceFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """File that a user registered, as ``models --versions`` names it."""

    name: Annotated[str, Meta(max_length=256, pattern=f"^[^/{CONTROLS}]+$")]
    sha256: Annotated[str, Meta(pattern="^([0-9a-f]{64})?$")] = ""


class BuildOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options that a build needs; an empty value means the default."""

    source: Source = ""
    weights: Annotated[
        Text,
        option(
            "FILE.safetensors, pretrained or random:SEED; from a client also FILE.pt (state dict)"
        ),
    ] = ""
    adapter: Annotated[
        Text,
        option(
            "folder of a peft adapter (LoRA), merged into the weights of a source hf: (owner only)",
            metavar="FOLDER",
        ),
    ] = ""
    inputs: Annotated[
        Signature,
        option(
            "shape and dtype of inputs, if the source lacks them: x=8x3x224x224:float32, or "
            "ids=1x1..512:int64 for a range of sizes",
            flag="--input",
        ),
    ] = {}
    max_batch: Annotated[Count, option("largest dynamic batch; 0: 64 (8 with generate)")] = 0
    batch: Annotated[
        Count,
        option(
            "maximum rows of waiting requests in one batch; 0: no batching, except with generate "
            "(max_batch)",
            metavar="ROWS",
        ),
    ] = 0
    batch_delay_ms: Annotated[
        float,
        Meta(ge=0, le=60_000),
        in_ms,
        option("with batch: how long a request waits for others", metavar="TIME"),
    ] = 0.0
    devices: Annotated[
        tuple[Text, ...],
        Meta(max_length=256),
        option(
            "allowed devices: cuda:1, or cuda for all GPUs; empty: all of the first device's kind",
            metavar="DEVICE,DEVICE",
        ),
    ] = ()
    preprocess: Annotated[
        Function,
        option(
            "function on the server (package.module:function) that makes inputs from what clients "
            "send"
        ),
    ] = ""
    raw: Annotated[
        RawSignature, option("with preprocess: what clients send, such as text=1..64:bytes")
    ] = {}
    postprocess: Annotated[
        Function,
        option(
            "function on the server (package.module:function) that makes the answer from outputs"
        ),
    ] = ""
    returns: Annotated[
        RawSignature, option("with postprocess: what clients get, such as label=1..64:bytes")
    ] = {}
    state: Annotated[
        States,
        option(
            "inputs that are outputs of a sequence's last request (h=h_out), or to which an "
            "output is appended along a dimension (cache=rows+1)"
        ),
    ] = {}
    generate: Annotated[
        bool,
        option("a causal language model (hf:NAME) that generates text with a cache on the server"),
    ] = False
    precision: Annotated[
        Text,
        _choice(PRECISIONS),
        option(
            "exact (the module's bits), fast (packed weights), bf16 or int8 (fewer bytes); empty: "
            "fast with generate, else exact"
        ),
    ] = ""
    max_error: Annotated[
        float,
        Meta(ge=0, le=1),
        option(
            "maximum error, relative to the largest output; 0: 0.001 (fast), 0.05 (bf16), "
            "0.1 (int8)"
        ),
    ] = 0.0


class ModelOptions(BuildOptions, frozen=True, kw_only=True):
    """Options of a registration: those of its build, and those of the model that is served."""

    aliases: Annotated[
        tuple[Alias, ...],
        Meta(max_length=16),
        option("further names of the model, such as gpt-3.5-turbo", flag="--alias", metavar="NAME"),
    ] = ()
    priority: Annotated[
        Text,
        _choice(PRIORITIES),
        option("high, normal or low; empty: unchanged (new models: normal)"),
    ] = ""
    like: Annotated[
        Text,
        option(
            "instead of a source: a registered model, whose program gets these weights or adapter",
            metavar="NAME",
        ),
    ] = ""
    pin: Annotated[bool, option("keep the model on the device; false does not unpin it")] = False


class RegisterRequest(ModelOptions, frozen=True, kw_only=True):
    """The body of ``register`` (docs/protocol.md)."""

    takes: Any = None  # nesting of the inputs in the arguments; None: one argument for each input
    example: Text = ""  # put:DIGEST of an upload with input values; empty: generated values
    as_version: bool = False  # the source has only weights, for the next version of this model
    file: SourceFile | None = None  # the file that was named; None: its name is not known

    def body(self) -> dict[str, Any]:
        """Return only the fields that are set."""
        fields = {key: value for key, value in msgspec.structs.asdict(self).items() if value}
        body: dict[str, Any] = msgspec.to_builtins(fields, enc_hook=plain)
        return body


class ModelConfig(ModelOptions, frozen=True, kw_only=True):
    """``[[model]]``: a model that is registered when the server starts."""

    name: Annotated[Name, option("name of the model")]
