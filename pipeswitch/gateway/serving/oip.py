"""Encoding and decoding of the Open Inference Protocol's requests and answers. Pure: no socket.

A body is JSON, followed by the bytes of the tensors that have a ``binary_data_size``, in order
(Triton's ``binary_tensor_data``). A decoded tensor is a ``WireTensor`` with dense little-endian
bytes, which is the form that the server gets. So binary tensors are not converted.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping, Sequence
from itertools import chain, repeat
from mmap import MAP_PRIVATE, mmap
from typing import Any, Final

import msgspec
import numpy as np

from ...base.bytes_tensors import BYTES, LENGTH_BYTES, pack, packed, unpack
from ...base.codec import MEMORY_OF_A_BYTE, RESERVE_BYTES, UNREADABLE, json_encoder
from ...base.errors import InvalidInput
from ...base.units import format_bytes, nearest
from ...programs.interface.dims import BATCH
from ...programs.interface.layout import ITEM_BYTES
from ...wire.frames import MAX_DIMS, MAX_TENSORS, WireTensor
from ..http.http_errors import TooLarge

DATATYPES: Final[Mapping[str, str]] = {
    "BOOL": "bool",
    "UINT8": "uint8",
    "INT8": "int8",
    "INT16": "int16",
    "INT32": "int32",
    "INT64": "int64",
    "FP16": "float16",
    "BF16": "bfloat16",
    "FP32": "float32",
    "FP64": "float64",
    "BYTES": BYTES,
}
"""Protocol's name -> dtype, for models and their preprocessing and postprocessing functions."""
DATATYPE_OF: Final = {dtype: name for name, dtype in DATATYPES.items()}
FIRST_VERSION: Final = 1  # for a timing without a version
PRIORITIES: Final = ("", "high", "normal", "low")  # by number; 0 is the model's own
MAX_JSON_BYTES: Final = 8 << 20  # numbers in Python take ten times their text
MAX_NUMBERS: Final = MAX_JSON_BYTES // 4  # same limit for gRPC's typed contents, and for answers
LONG_BYTES: Final = 64 << 10  # longer JSON or typed contents are decoded on another thread
LONG_NUMBERS: Final = LONG_BYTES // 4  # answers with more numbers are encoded on another thread
ANY_SIZE: Final = -1  # size of a tensor that its shape does not determine
MAX_PARAMETERS: Final = 64  # limit for a request, and for each tensor
MAX_MARKS: Final = 1 << 16  # limit for each of ``MARKS``: a list takes 30 times a number's memory
MARKS: Final = (b"[", b"{", b":")  # these begin a list, an object, and a value of an object
MAX_TIMEOUT_US: Final = 1 << 53
# By kind of numpy's dtypes: accepted kinds of JSON values, and names of the others in errors.
_TAKES: Final[Mapping[str, str]] = {"b": "biu", "u": "iu", "i": "iu", "f": "iuf"}
_GIVEN: Final[Mapping[str, str]] = {"b": "true or false", "f": "with fractions"}
BINARY_EXTENSION: Final = "binary_tensor_data"
BINARY_TYPE: Final = "application/octet-stream"


class RequestedOutput(msgspec.Struct, kw_only=True):
    """Requested output: its name, and how it is to be returned."""

    name: str
    parameters: dict[str, Any] | None = None

    @property
    def place(self) -> RegionPlace | None:
        """Place of an output in shared memory; None: it is sent with the answer.

        Raises:
            InvalidInput: the parameters do not name a valid place.
        """
        return place_of(self.name, self.parameters or {})


class RegionPlace(msgspec.Struct, frozen=True, kw_only=True):
    """Place of a tensor in a region of shared memory (Triton's ``system_shared_memory``)."""

    region: str
    offset_bytes: int
    size_bytes: int

    def parameters(self) -> dict[str, Any]:
        """Return the parameters that name this place in an answer."""
        return {
            "shared_memory_region": self.region,
            "shared_memory_offset": self.offset_bytes,
            "shared_memory_byte_size": self.size_bytes,
        }


class _Input(msgspec.Struct, kw_only=True):
    name: str
    datatype: str
    shape: tuple[int, ...]
    parameters: dict[str, Any] | None = None
    data: Any = None


class _Body(msgspec.Struct, kw_only=True):
    """Request body. Optional fields may be null, as clients generated from a schema send null."""

    inputs: list[_Input]
    id: str | None = None
    parameters: dict[str, Any] | None = None
    outputs: list[RequestedOutput] | None = None


class InferRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Inference request, independent of the protocol."""

    id: str
    inputs: tuple[WireTensor, ...]
    frames: Sequence[Any]  # the inputs' buffers, or their places in regions
    priority: str = ""
    deadline_ms: float | None = None
    sequence: Mapping[str, Any] = {}  # fields for the body of ``infer``; empty: no sequence
    outputs: tuple[RequestedOutput, ...] | None = None  # None: all of them
    is_binary: bool = False  # default for outputs without ``binary_data``


class Output(msgspec.Struct, frozen=True, kw_only=True):
    """Tensor of an answer."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: Any  # its bytes
    place: RegionPlace | None = None  # where the bytes were written instead


_decoder = msgspec.json.Decoder(_Body)


def decode_request(body: Any, json_bytes: int | None) -> InferRequest:
    """Decode a request's body.

    Args:
        body: a buffer; the frames of the result share its memory.
        json_bytes: length of its JSON (``Inference-Header-Content-Length``); None: all.

    Raises:
        InvalidInput: the body violates the protocol, or a tensor contradicts its shape or dtype.
        TooLarge: the JSON is too long.
    """
    whole = memoryview(body)
    end = len(whole) if json_bytes is None else json_bytes
    parsed, rest = _parsed(whole, end), whole[end:]
    check_count(len(parsed.inputs))
    if parsed.outputs:
        check_outputs(parsed.outputs)
    check_parameters(parsed.parameters)
    tensors, frames = list[WireTensor](), list[Any]()
    for number, tensor in enumerate(parsed.inputs):
        dtype = dtype_of(tensor.name, tensor.datatype)
        size = check_shape(tensor.name, dtype, tensor.shape)
        binary = place = None
        if tensor.parameters:
            check_parameters(tensor.parameters)
            binary = tensor.parameters.get("binary_data_size")
            place = place_of(tensor.name, tensor.parameters)
        if place is not None:
            check_bytes(tensor.name, dtype, tensor.shape, place, size)
            frames.append(place)
        elif binary is None:
            if tensor.data is None:
                raise InvalidInput(
                    f'input "{tensor.name}" has no data',
                    hint='"data": […], or parameters.binary_data_size and its bytes behind the '
                    "JSON",
                )
            frames.append(from_numbers(tensor.name, dtype, tensor.shape, tensor.data))
        else:
            if type(binary) is not int or not 0 <= binary <= len(rest):
                raise InvalidInput(
                    f'input "{tensor.name}" says binary_data_size {binary!r}, and {len(rest)} '
                    "bytes follow the JSON",
                    hint="Inference-Header-Content-Length says where the JSON ends",
                )
            data, rest = rest[:binary], rest[binary:]
            check_bytes(tensor.name, dtype, tensor.shape, data, size)
            frames.append(data)
        tensors.append(WireTensor(name=tensor.name, dtype=dtype, shape=tensor.shape, frame=number))
    if len(rest):
        raise InvalidInput(f"{len(rest)} bytes after the last binary input belong to no input")
    parameters = parsed.parameters or {}
    return InferRequest(
        id=parsed.id or "",
        inputs=tuple(tensors),
        frames=frames,
        outputs=None if parsed.outputs is None else tuple(parsed.outputs),
        is_binary=bool(parameters) and flag("binary_data_output", parameters),
        **(schedule(parameters) if parameters else {}),
    )


def _parsed(whole: memoryview, end: int) -> _Body:
    """Return the decoded JSON of the first ``end`` bytes; raises like ``decode_request``."""
    if not 0 <= end <= len(whole):
        raise InvalidInput(
            f"Inference-Header-Content-Length is {end}, the body has {len(whole)} bytes"
        )
    text = whole[:end]
    if len(text) > MAX_JSON_BYTES:
        raise TooLarge(
            f"{format_bytes(len(text))} of JSON are more than {format_bytes(MAX_JSON_BYTES)}",
            hint=f"send tensors as binary data; /v2 lists the extension: {BINARY_EXTENSION}",
        )
    if len(text) > LONG_BYTES:
        raw = bytes(text)
        if any(raw.count(mark) > MAX_MARKS for mark in MARKS):
            raise TooLarge(
                f"more than {MAX_MARKS} lists or names in one body",
                hint="send a tensor's numbers as one flat list, or as binary data",
            )
    try:  # like ``check_memory``, but without another call
        mmap(-1, RESERVE_BYTES + MEMORY_OF_A_BYTE * len(text), MAP_PRIVATE).close()
        return _decoder.decode(text)
    except (*UNREADABLE, OSError) as error:
        # Python's parser also reads NaN, Infinity and 1e999, and works when memory is short.
        if isinstance(error, msgspec.DecodeError | OSError):
            with contextlib.suppress(ValueError, RecursionError, msgspec.ValidationError):
                parsed = msgspec.convert(json.loads(str(text, "utf-8")), _Body)
                inputs = (*parsed.inputs, *(parsed.outputs or ()))
                named = [(one.name, one.parameters) for one in inputs]
                # Python's parser also reads lone surrogates, which no answer can repeat.
                json.dumps([parsed.id, parsed.parameters, named], ensure_ascii=False).encode()
                return parsed
        if isinstance(error, OSError):
            raise
        raise InvalidInput(
            f"the body is not an inference request: {error}",
            hint='{"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": […]}]}',
        ) from None


def raw_request(body: Any, row: Mapping[str, Any]) -> InferRequest:
    """Decode a body that is only the bytes of a model's single input.
    Triton calls it a raw binary request.

    Args:
        body: a buffer.
        row: the model's row, with ``inputs`` by name.
    """
    if len(row["inputs"]) != 1:
        raise InvalidInput(
            f"a raw request needs a model with one input; this one has {len(row['inputs'])}",
            hint="Inference-Header-Content-Length: the length of the JSON before the tensors",
        )
    ((name, (extents, dtype)),) = row["inputs"].items()
    if dtype == BYTES:  # like Triton: one text, without its length
        text = WireTensor(name=name, dtype=dtype, shape=(1,) * len(extents), frame=0)
        return InferRequest(
            id="", inputs=(text,), frames=[memoryview(pack([bytes(body)]))], is_binary=True
        )
    chosen = [extent for extent in extents if isinstance(extent, str)]
    if len(chosen) > 1:
        raise InvalidInput(
            f'input "{name}" is {DATATYPE_OF[dtype]}{shown(extents)}: a body does not say '
            f"its {' and '.join(chosen)}",
            hint="Inference-Header-Content-Length: the length of the JSON before the tensors",
        )
    fixed = math.prod(extent for extent in extents if extent not in chosen) * ITEM_BYTES[dtype]
    extent, odd = divmod(len(body), fixed) if fixed else (0, len(body))
    shape = tuple(extent if one in chosen else one for one in extents)
    if odd or (extent != 1 and not chosen):
        each = f" for each of its {chosen[0]}" if chosen else ""
        raise InvalidInput(
            f'input "{name}" is {DATATYPE_OF[dtype]}{shown(extents)}, {fixed} bytes{each}; '
            f"the body has {len(body)}"
        )
    tensor = WireTensor(name=name, dtype=dtype, shape=shape, frame=0)
    return InferRequest(id="", inputs=(tensor,), frames=[memoryview(body)], is_binary=True)


def encode_answer(
    model: str, request: InferRequest, outputs: Sequence[Output], timing: Mapping[str, Any]
) -> tuple[list[Any], int | None]:
    """Return an answer's body in parts, and the length of its JSON; None: all of it is JSON.

    Raises:
        InvalidInput, TooLarge: a requested output does not exist, or is too long for JSON.
    """
    rows, binary = [], []
    chosen = requested_outputs(request, outputs)
    if _numbers_of(chosen) > MAX_NUMBERS:
        raise TooLarge(
            f"{_numbers_of(chosen)} numbers; JSON answers have at most {MAX_NUMBERS}",
            hint='request bytes: "parameters": {"binary_data_output": true}',
        )
    for output, wants_binary in chosen:
        row: dict[str, Any] = {
            "name": output.name,
            "datatype": DATATYPE_OF[output.dtype],
            "shape": output.shape,
        }
        if output.place is not None:
            row["parameters"] = output.place.parameters()
        elif wants_binary:
            row["parameters"] = {"binary_data_size": len(output.data)}
            binary.append(output.data)
        else:
            row["data"] = as_numbers(output)
        rows.append(row)
    version = str(timing.get("version", FIRST_VERSION))
    answer: dict[str, Any] = {"model_name": model, "model_version": version}
    if request.id:
        answer["id"] = request.id
    if timing:
        answer["parameters"] = timing
    json_encoder.encode_into({**answer, "outputs": rows}, head := bytearray())
    return [head, *binary], len(head) if binary else None


def is_long(request: InferRequest, outputs: Sequence[Output]) -> bool:
    """Return True if ``encode_answer`` is slow because it writes many numbers as text."""
    size_bytes = 0  # a number has at least one byte
    for output in outputs:
        size_bytes += len(output.data)
    return (
        size_bytes > LONG_NUMBERS
        and _numbers_of(requested_outputs(request, outputs)) > LONG_NUMBERS
    )


def _numbers_of(chosen: Sequence[tuple[Output, bool]]) -> int:
    """Return how many of an answer's numbers are written as text."""
    count = 0
    for output, is_binary in chosen:
        if not is_binary and output.place is None:
            count += len(output.data) // ITEM_BYTES.get(output.dtype, LENGTH_BYTES)
    return count


def requested_outputs(
    request: InferRequest, outputs: Sequence[Output]
) -> list[tuple[Output, bool]]:
    """Return the requested outputs in their order; each with True if it is sent as bytes.

    Raises:
        InvalidInput: a requested output does not exist, or is requested as classification.
    """
    if not request.outputs:
        return [*zip(outputs, repeat(request.is_binary), strict=False)]
    by_name = {output.name: output for output in outputs}
    chosen = []
    for one in request.outputs:
        if one.name not in by_name:
            raise InvalidInput(
                f'no output "{one.name}"{nearest(one.name, by_name)}',
                hint=f"outputs: {', '.join(by_name)}",
            )
        parameters = one.parameters or {}
        if parameters.get("classification"):
            raise InvalidInput("classification is not supported", hint="request the plain output")
        is_binary = flag("binary_data", parameters, default=request.is_binary)
        chosen.append((by_name[one.name], is_binary))
    return chosen


def schedule(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sequence, priority (1: highest, 0: the model's) and deadline of a request.

    Raises:
        InvalidInput: a value is not valid; ``timeout`` is a number of microseconds.
    """
    priority = _whole("priority", parameters, high=(1 << 64) - 1)
    timeout_us = _whole("timeout", parameters, high=MAX_TIMEOUT_US)
    sequence: dict[str, Any] = {}
    if named := parameters.get("sequence_id"):  # a number or a text; 0 and "" mean none
        sequence = {"sequence": str(named)} | {
            word: True for word in ("start", "end") if flag(f"sequence_{word}", parameters)
        }
    return {
        "sequence": sequence,
        "priority": PRIORITIES[min(priority, len(PRIORITIES) - 1)],
        "deadline_ms": timeout_us / 1000.0 if timeout_us else None,
    }


def _whole(name: str, parameters: Mapping[str, Any], high: int) -> int:
    value = parameters.get(name, 0)
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= 20:
        value = int(value)  # some clients send large numbers as text
    if type(value) is not int or not 0 <= value <= high:
        raise InvalidInput(f"{name} must be a whole number from 0, got {value!r:.80}")
    return value


def flag(name: str, parameters: Mapping[str, Any], *, default: bool = False) -> bool:
    """Return a boolean parameter.

    Raises:
        InvalidInput: it is neither true nor false.
    """
    value = parameters.get(name, default)
    if type(value) is not bool:
        raise InvalidInput(f"{name} must be true or false, got {value!r:.80}")
    return value


def check_count(count: int, what: str = "inputs") -> None:
    """Raise InvalidInput if there are more tensors than a message can have."""
    if count > MAX_TENSORS:
        raise InvalidInput(f"{count} {what} are more than {MAX_TENSORS}")


def check_outputs(outputs: Sequence[RequestedOutput]) -> None:
    """Raise InvalidInput if an output is requested twice, or if there are too many."""
    check_count(len(outputs), "outputs")
    names = {one.name for one in outputs}
    if len(names) < len(outputs):
        raise InvalidInput("an output is requested twice", hint="name each output once")
    for one in outputs:
        check_parameters(one.parameters)


def check_parameters(parameters: Mapping[str, Any] | None) -> None:
    """Raise InvalidInput if there are more than MAX_PARAMETERS."""
    if parameters is not None and len(parameters) > MAX_PARAMETERS:
        raise InvalidInput(f"{len(parameters)} parameters are more than {MAX_PARAMETERS}")


def dtype_of(name: str, datatype: str) -> str:
    """Return the dtype of a protocol's datatype.

    Raises:
        InvalidInput: no model can have this datatype.
    """
    if datatype not in DATATYPES:
        raise InvalidInput(
            f'input "{name}": datatype {datatype[:40]!r} is not supported'
            f"{nearest(datatype.upper(), DATATYPES)}",
            hint=f"one of {', '.join(DATATYPES)}",
        )
    return DATATYPES[datatype]


def check_shape(name: str, dtype: str, shape: Sequence[int]) -> int:
    """Return the size in bytes of a tensor of this shape; ANY_SIZE for texts.

    Raises:
        InvalidInput: the shape is not valid.
    """
    if len(shape) > MAX_DIMS or min(shape, default=0) < 0 or max(shape, default=0) >> 63:
        raise InvalidInput(
            f'input "{name}" has no shape: {list(shape[:MAX_DIMS])}',
            hint=f"at most {MAX_DIMS} numbers, none below 0 or of more than 63 bits",
        )
    return math.prod(shape) * ITEM_BYTES[dtype] if dtype != BYTES else ANY_SIZE


def place_of(name: str, parameters: Mapping[str, Any]) -> RegionPlace | None:
    """Return a tensor's place in shared memory, or None if it has none.

    Raises:
        InvalidInput: the place is not valid.
    """
    region = parameters.get("shared_memory_region")
    if region is None:
        return None
    if not isinstance(region, str):
        raise InvalidInput(f'"{name}": shared_memory_region must be a text')
    return RegionPlace(
        region=region,
        offset_bytes=_whole("shared_memory_offset", parameters, high=1 << 50),
        size_bytes=_whole("shared_memory_byte_size", parameters, high=1 << 50),
    )


def check_bytes(name: str, dtype: str, shape: Sequence[int], data: Any, size: int) -> None:
    """Raise InvalidInput if the size of the data, or of its place, does not match the shape."""
    is_placed = isinstance(data, RegionPlace)
    data_bytes = data.size_bytes if is_placed else len(data)
    where = "are in shared memory" if is_placed else "came"
    if data_bytes != size and size != ANY_SIZE:
        raise InvalidInput(
            f'input "{name}" is {DATATYPE_OF[dtype]}{list(shape)}, which is {size} bytes; '
            f"{data_bytes} {where}"
        )


def from_numbers(name: str, dtype: str, shape: Sequence[int], values: Any) -> memoryview:
    """Return the bytes of flat or nested numbers in row-major order.

    A float that is too large becomes infinite. None becomes NaN, which JSON cannot express.

    Raises:
        InvalidInput: the numbers are ragged, of another kind than the dtype, too large for an
            integer, or their number does not match the shape.
    """
    if isinstance(values, list) and len(values) > max(math.prod(shape), LONG_NUMBERS):
        raise _other_count(name, len(values), shape)
    if dtype == BYTES:
        return _from_texts(name, shape, values)
    rest = values if isinstance(values, list) else []
    while kinds := {*map(type, rest)}:
        if str in kinds:  # numpy would make each element as long as the longest text
            raise InvalidInput(f'input "{name}" is {DATATYPE_OF[dtype]}, its data is no numbers')
        rest = [*chain(*[one for one in rest if type(one) is list])] if list in kinds else []
    try:
        array = np.asarray(values)
        if array.dtype == object and "float" in dtype and _are_numbers(array):
            array = array.astype(np.float64)
    except (ValueError, OverflowError):
        raise InvalidInput(f'input "{name}": its data is not a regular list of numbers') from None
    if array.size != math.prod(shape):
        raise _other_count(name, array.size, shape)
    if not array.size:
        return memoryview(b"")
    target = np.dtype("float32" if dtype == "bfloat16" else dtype)
    if array.dtype.kind not in _TAKES[target.kind]:
        exact = np.asarray(values, object)  # numpy makes floats of integers in a wide range
        if target.kind not in "iu" or any(type(one) is not int for one in exact.flat):
            kind = _GIVEN.get(array.dtype.kind, "no numbers")
            raise InvalidInput(f'input "{name}" is {DATATYPE_OF[dtype]}, its data is {kind}')
        array = exact
    if dtype == "bfloat16":
        with np.errstate(over="ignore"):
            return _dense(_to_bfloat16(array.astype(target)))
    if target.kind in "iu":
        limits = np.iinfo(target)
        if int(array.min()) < limits.min or int(array.max()) > limits.max:
            raise InvalidInput(
                f'input "{name}" is {DATATYPE_OF[dtype]}: from {limits.min} to {limits.max}'
            )
    with np.errstate(over="ignore"):
        return _dense(array.astype(target))


def _from_texts(name: str, shape: Sequence[int], values: Any) -> memoryview:
    array = np.asarray(values, object)
    if array.size != math.prod(shape):
        raise _other_count(name, array.size, shape)
    if not array.size:
        return memoryview(b"")
    texts = packed(array)
    if texts is None:
        raise InvalidInput(
            f'input "{name}" is BYTES, so its data must be texts', hint='"data": ["a text"]'
        )
    return memoryview(texts[1])


def _other_count(name: str, count: int, shape: Sequence[int]) -> InvalidInput:
    return InvalidInput(
        f'input "{name}" has {count} values, its shape {list(shape)} needs {math.prod(shape)}'
    )


def _are_numbers(array: Any) -> bool:
    return all(one is None or type(one) in (int, float) for one in array.flat)


def as_numbers(output: Output) -> list[Any]:
    """Return an output's values, flat, in row-major order.

    A number that is not finite becomes null, which every client's parser accepts: orjson and
    rapidjson refuse 1e999, most others refuse Infinity.

    Raises:
        InvalidInput: a byte string is not UTF-8.
    """
    if output.dtype == BYTES:
        try:
            return [one.decode() for one in unpack(output.data, math.prod(output.shape))]
        except UnicodeDecodeError:
            raise InvalidInput(
                f'output "{output.name}" is not UTF-8, and JSON has only texts',
                hint='request bytes: "parameters": {"binary_data_output": true}',
            ) from None
    if output.dtype == "bfloat16":
        bits = np.frombuffer(output.data, np.uint16).astype(np.uint32) << np.uint32(16)
        array: Any = bits.view(np.float32)
    else:
        array = np.frombuffer(output.data, np.dtype(output.dtype))
    values: list[Any] = array.tolist()
    return values


def _to_bfloat16(values: Any) -> Any:
    """Return float32 values as bfloat16 bits, rounded to nearest even; NaN stays NaN."""
    bits = values.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(values), np.uint32(0x7FC0), rounded).astype(np.uint16)


def _dense(array: Any) -> memoryview:
    raw: Any = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return memoryview(raw)


def shown(extents: Sequence[int | str]) -> list[int]:
    """Return a signature's shape in the protocol's form, where -1 means any extent."""
    return [extent if isinstance(extent, int) else -1 for extent in extents]


# ---- descriptions of models --------------------------------------------------------------------


def metadata(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body of ``/v2/models/M`` for a model's row."""

    def tensors(values: Mapping[str, Any]) -> list[dict[str, Any]]:
        return [
            {"name": name, "datatype": DATATYPE_OF[dtype], "shape": shown(shape)}
            for name, (shape, dtype) in values.items()
        ]

    return {
        "name": row["name"],
        "versions": [str(version) for version in row["versions"]],
        "platform": "pipeswitch",
        "inputs": tensors(row["inputs"]),
        "outputs": tensors(row["outputs"]),
    }


def config(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body of ``/v2/models/M/config`` for a model's row.

    If each input and output begins with the batch, ``max_batch_size`` is above 0, and the shapes
    omit that dimension.
    """
    values = [*row["inputs"].values(), *row["outputs"].values()]
    is_batched = bool(values) and all(
        shape and shape[0] == BATCH and BATCH not in shape[1:] for shape, _ in values
    )

    def tensors(side: Mapping[str, Any]) -> list[dict[str, Any]]:
        return [
            {
                "name": name,
                "data_type": f"TYPE_{'STRING' if dtype == BYTES else DATATYPE_OF[dtype]}",
                "dims": shown(shape[1:] if is_batched else shape),
            }
            for name, (shape, dtype) in side.items()
        ]

    batching = row["batching"] if is_batched else None
    return {
        "name": row["name"],
        "platform": "pipeswitch",
        "backend": "pipeswitch",
        "version_policy": {"latest": {"num_versions": 1}},
        "max_batch_size": row["batch"][1] if is_batched else 0,
        "input": tensors(row["inputs"]),
        "output": tensors(row["outputs"]),
        **({} if batching is None else {"dynamic_batching": _dynamic(batching)}),
        **({"ensemble_scheduling": _ensemble(row)} if "steps" in row else {}),
        "model_transaction_policy": {"decoupled": False},
    }


def _ensemble(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a chain's steps, in which a step's result is named ``STEP.OUTPUT``."""
    return {
        "step": [
            {"model_name": step["model"], "model_version": -1, "input_map": step["inputs"]}
            for step in row["steps"]
        ]
    }


def _dynamic(batching: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "preferred_batch_size": [batching["limit"]],
        "max_queue_delay_microseconds": round(batching["delay_ms"] * 1000),
    }
