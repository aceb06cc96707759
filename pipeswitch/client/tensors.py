"""Conversion of arrays and tensors to wire frames and back. numpy is imported late, torch never.

numpy has no bfloat16. bfloat16 outputs become float32, which represents them exactly, or
torch.bfloat16 if the inputs were torch tensors.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Iterator, KeysView, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from ..base.bytes_tensors import BYTES, packed, unpacked
from ..base.errors import InvalidInput, RegistrationRefused, RemoteProtocolError
from ..programs.interface.dims import Dim, at_batch, batch_range
from ..programs.interface.layout import ITEM_BYTES, ValueSpec
from ..programs.interface.pytree import Tree, check_tree, flatten, unflatten
from ..wire.frames import MAX_DIMS, MAX_TENSORS, WireTensor
from ..wire.request_timing import RequestTiming

if TYPE_CHECKING:
    from .calls import FinalReply


@dataclass(frozen=True)
class Bits:
    """An array that holds the bits of a dtype that numpy lacks (``bfloat16`` as uint16)."""

    array: Any
    dtype: str


class Result(msgspec.Struct, frozen=True):
    """Result of one request: ``r["y"]``, ``r.value``, ``r.timing.switch_ms``."""

    model: str
    request_id: str
    outputs: dict[str, Any]  # name -> array, without nesting
    timing: RequestTiming
    returns: Tree = None  # how the outputs are nested; None: they are not

    def __getitem__(self, name: str) -> Any:
        return self.outputs[name]

    def keys(self) -> KeysView[str]:
        """Return the names of the outputs, so that ``dict(r)`` equals ``r.outputs``."""
        return self.outputs.keys()

    def __iter__(self) -> Iterator[str]:
        return iter(self.outputs)

    @property
    def value(self) -> Any:
        """Output of the module: a single tensor, or dicts, lists, tuples and None as in the module.

        Dataclasses, and output classes of transformers, become dicts.
        """
        if self.returns is not None:
            return unflatten(self.returns, self.outputs)
        return self.outputs["y"] if [*self.outputs] == ["y"] else self.outputs


@dataclass(frozen=True)
class Signature:
    """Inputs of a model, as ``show`` lists them."""

    inputs: tuple[ValueSpec, ...]
    dims: tuple[Dim, ...] = ()  # dimensions whose extents a request chooses

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Signature:
        inputs = tuple(
            ValueSpec(name=name, dtype=dtype, shape=tuple(shape))
            for name, (shape, dtype) in row["inputs"].items()
        )
        return cls(inputs, tuple(Dim(name, *ends) for name, ends in row["dims"].items()))

    @property
    def batch_min(self) -> int:
        return batch_range(self.dims)[0]

    @property
    def batch_max(self) -> int:
        """Largest batch; ``batch_min`` if the batch is fixed."""
        return batch_range(self.dims)[1]

    def random(self, batch: int = 0, seed: int = 0, **extents: int) -> list[Any]:
        """Return random inputs in call order.

        Args:
            batch: batch size; 0: one, or the model's minimum.
            seed: equal seeds give equal inputs.
            extents: sizes of other dimensions by name (``length=7``); default: 128 or the nearest.
        """
        from ..programs.interface.synthetic_inputs import random_value

        chosen = {**at_batch(self.dims, batch or self.batch_min), **extents}
        values = [(spec, random_value(spec, chosen, seed)) for spec in self.inputs]
        return [Bits(v, s.dtype) if s.dtype == "bfloat16" else v for s, v in values]


def to_frames(inputs: Any) -> tuple[tuple[WireTensor, ...], list[Any], bool]:
    """Return headers and buffers of the inputs, and True if torch tensors were among them.

    An array is copied only if it is not contiguous, or not in native byte order. A mapping has the
    arguments by name, a list or tuple of (nested) arrays in call order. Others are one array.

    Raises:
        InvalidInput: a dtype is not supported, or there are too many inputs.
    """
    try:
        named = _named(inputs)
    except RecursionError:  # a list that contains itself
        raise InvalidInput("the inputs contain themselves") from None
    if len(named) > MAX_TENSORS:
        raise InvalidInput(f"{len(named)} inputs are more than {MAX_TENSORS}")
    headers, frames, wants_torch = [], [], False
    for number, (name, value) in enumerate(named):
        if _is_torch(value):
            wants_torch, value = True, _torch_as_numpy(value)
        dtype, shape, buffer = _as_bytes(name, value)
        headers.append(WireTensor(name=name, dtype=dtype, shape=shape, frame=number))
        frames.append(buffer)
    return tuple(headers), frames, wants_torch


def _named(inputs: Any) -> list[tuple[str, Any]]:
    """Return (name, array) pairs for all inputs. A name is a key or a position, with the path to a
    nested array; it is empty for a list or tuple of plain arrays."""
    if hasattr(inputs, "dtype"):
        return [("", inputs)]
    if isinstance(inputs, list | tuple) and all(hasattr(v, "dtype") for v in inputs):
        return [("", value) for value in inputs]
    is_nested = isinstance(inputs, list | tuple) and _nests(inputs)
    arguments = dict(enumerate(inputs)) if is_nested else inputs
    if not isinstance(arguments, Mapping):
        return [("", inputs)]
    by_name = {str(name): value for name, value in arguments.items()}
    if len(by_name) != len(arguments):  # 1 and "1"
        raise InvalidInput("two inputs have the same name; a name is a text or a position")
    if all(hasattr(v, "dtype") for v in by_name.values()):
        return list(by_name.items())
    try:
        _, named = flatten(by_name, "input", _is_leaf)
    except RegistrationRefused as error:
        raise InvalidInput(f"{error.part}: {error.reason}") from None
    return list(named.items())


def _is_leaf(value: Any) -> bool:
    """Return True if a value is one array, like a list of numbers, but not a list of arrays."""
    return hasattr(value, "dtype") or not (_is_record(value) or _nests(value))


def _nests(value: Any) -> bool:
    """Return True for a list with arrays, mappings, dataclasses or None: it is not one array."""
    return isinstance(value, list | tuple) and any(
        not isinstance(one, int | float)
        and (getattr(one, "ndim", 0) or _is_record(one) or _nests(one))
        for one in value
    )


def _is_record(value: Any) -> bool:
    return value is None or isinstance(value, Mapping) or is_dataclass(value)


def _is_torch(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _as_bytes(name: str, value: Any) -> tuple[str, tuple[int, ...], memoryview]:
    import numpy as np

    part = f'input "{name}"' if name else "an input"
    if isinstance(value, Bits):
        array, dtype = np.asarray(value.array, order="C"), value.dtype
    else:
        try:
            plain = np.asarray(value)
        except (ValueError, TypeError, OverflowError) as error:
            raise InvalidInput(f"{part} is not an array: {error}") from error
        if not plain.dtype.isnative:
            plain = plain.astype(plain.dtype.newbyteorder("="))
        if not plain.flags.c_contiguous:
            plain = np.ascontiguousarray(plain)
        array, dtype = plain, _dtype_name(plain.dtype)
    if dtype not in ITEM_BYTES:
        if (texts := packed(value)) is not None:
            shape, data = texts
            return BYTES, shape, memoryview(data)
        raise InvalidInput(
            f"{part} has dtype {dtype}, which is not supported",
            hint=f"one of {', '.join(ITEM_BYTES)}",
        )
    raw: Any = array.reshape(-1).view(np.uint8)
    return dtype, tuple(array.shape), memoryview(raw)


@functools.lru_cache(64)
def _dtype_name(dtype: Any) -> str:
    return str(dtype.name)


def _torch_as_numpy(tensor: Any) -> Any:
    torch: Any = sys.modules["torch"]
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise InvalidInput(
            f"a {tensor.layout} tensor cannot be sent", hint="send a dense one: x.to_dense()"
        )
    name = str(tensor.dtype).removeprefix("torch.")
    if tensor.is_meta or name not in ITEM_BYTES:
        reason = "has no data" if tensor.is_meta else f"has dtype {name}, which is not supported"
        raise InvalidInput(f"an input {reason}", hint=f"one of {', '.join(ITEM_BYTES)}")
    tensor = tensor.detach().resolve_neg().cpu().contiguous()
    if tensor.dtype is torch.bfloat16:
        return Bits(tensor.view(torch.int16).numpy(), "bfloat16")
    return tensor.numpy()


def from_reply(model: str, wants_torch: bool, reply: FinalReply) -> Result:
    """Return the result as numpy arrays or torch tensors, which share the message's memory.

    Raises:
        RemoteProtocolError: an output's size, shape or nesting contradicts the reply's header.
    """
    outputs: dict[str, Any] = {}
    for tensor in reply.outputs:
        buffer = reply.frames[tensor.frame]
        if tensor.dtype == BYTES:
            outputs[tensor.name] = _texts(tensor, buffer)
            continue
        size = math.prod(tensor.shape) * ITEM_BYTES.get(tensor.dtype, 0)
        if size != len(buffer) or tensor.dtype not in ITEM_BYTES:
            raise RemoteProtocolError(f"output {tensor.name} is {len(buffer)} bytes, not {size}")
        if len(tensor.shape) > MAX_DIMS or min(tensor.shape, default=0) < 0:
            raise RemoteProtocolError(
                f"output {tensor.name} has no shape: {tensor.shape[:MAX_DIMS]}"
            )
        make = _torch_tensor if wants_torch else _numpy_array
        try:
            outputs[tensor.name] = make(buffer, tensor.dtype, tensor.shape)
        except (ValueError, TypeError, RuntimeError, OverflowError) as error:  # shape [2**63, 0]
            raise RemoteProtocolError(f"output {tensor.name}: {error}") from None
    returns = reply.body.get("returns")
    if returns is not None:
        try:
            check_tree(returns, "output", outputs)
        except RegistrationRefused as error:
            raise RemoteProtocolError(f"the structure of the answer is invalid: {error}") from None
    return Result(model, reply.request_id, outputs, reply.timing or RequestTiming(), returns)


def _texts(tensor: WireTensor, buffer: Any) -> Any:
    try:
        return unpacked(buffer, tensor.shape)
    except (InvalidInput, ValueError) as error:
        raise RemoteProtocolError(f"output {tensor.name}: {error}") from None


def _numpy_array(buffer: Any, dtype: str, shape: Sequence[int]) -> Any:
    import numpy as np

    if dtype == "bfloat16":
        bits = np.frombuffer(buffer, dtype=np.uint16).astype(np.uint32) << np.uint32(16)
        return bits.view(np.float32).reshape(shape)
    return np.frombuffer(buffer, dtype=np.dtype(dtype)).reshape(shape)


def _torch_tensor(buffer: Any, dtype: str, shape: Sequence[int]) -> Any:
    torch: Any = sys.modules["torch"]
    if not len(buffer):
        return torch.empty(tuple(shape), dtype=getattr(torch, dtype))
    return torch.frombuffer(buffer, dtype=getattr(torch, dtype)).reshape(tuple(shape))
