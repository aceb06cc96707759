"""Exact encoding of state dicts as JSON, without pickle, for a closed list of types with tags.

``encode`` turns a value into JSON-able data plus *attachments* (bytes of tensors and arrays, which
are too large for JSON); ``decode`` is its inverse. ``None``, ``bool``, ``str``, small ``int``,
finite ``float`` and ``list`` are stored as themselves. Every other type is an object whose only key
is the tag. A plain JSON object is never data, so no value of a script can be mistaken for a tag.

A value of any other type is refused, with its path: state that cannot be stored exactly must not be
stored approximately. Encoding and decoding run no code that the data names. Importing this module
imports neither torch nor numpy.
"""

from __future__ import annotations

import base64
import math
import re
import struct
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from .errors import InvalidInput

if TYPE_CHECKING:
    import torch

MAX_DEPTH: Final = 64  # a state dict has few levels; a value that contains itself has no end
MAX_EXACT_INT: Final = 1 << 53  # JSON readers other than Python's round larger integers to a double
NUMPY_KINDS: Final = frozenset("biufcmMSU")  # no objects ("O"), no records ("V")
_NUMPY_DTYPE: Final = re.compile(r"[<>=|][biufcmMSU][0-9]{1,9}(\[[0-9]{0,9}[a-zA-Z]{1,9}\])?")
TORCH_DTYPES: Final = frozenset(
    {
        "float64",
        "float32",
        "float16",
        "bfloat16",
        "float8_e4m3fn",
        "float8_e5m2",
        "int64",
        "int32",
        "int16",
        "int8",
        "uint64",
        "uint32",
        "uint16",
        "uint8",
        "bool",
        "complex64",
        "complex128",
    }
)
_Blobs: TypeAlias = "Sequence[bytes | memoryview | torch.Tensor]"


class Attachment:
    """Bytes of one tensor or array, stored outside of the JSON.

    Attributes:
        source: the tensor or array itself, not a copy; the caller decides when to read it.
        size_bytes: number of bytes that ``read`` returns.
    """

    def __init__(self, source: Any, size_bytes: int) -> None:
        self.source = source
        self.size_bytes = size_bytes

    def read(self) -> bytes:
        """Return a copy of the current bytes in row-major order, also of a tensor on a device."""
        if hasattr(self.source, "detach"):
            return _torch_bytes(self.source)
        return bytes(self.source.tobytes(order="C"))


def encode(value: Any) -> tuple[Any, list[Attachment]]:
    """Return ``value`` as JSON-able data, and its attachments in the order of their references.

    Raises:
        InvalidInput: a type is not on the list, or values nest too deeply; the text has the path.
    """
    attachments: list[Attachment] = []
    return _encode(value, "$", 0, attachments), attachments


def decode(data: Any, attachments: _Blobs) -> Any:
    """Return a copy of the value that ``encode`` encoded; tensors are on the cpu, arrays writable.

    A uint8 tensor as an attachment is not copied: the decoded tensor shares its memory.

    Raises:
        InvalidInput: the data does not have this format.
    """
    return _decode(data, "$", 0, attachments)


# ---------------------------------------------------------------------------------- encode


def _encode(value: Any, path: str, depth: int, out: list[Attachment]) -> Any:
    if depth > MAX_DEPTH:
        raise InvalidInput(f"{path[:80]}…: nested deeper than {MAX_DEPTH} levels")
    kind = type(value)  # not isinstance: a subclass may have state that would be lost
    if value is None or kind is bool or kind is str:
        return value
    if kind is int:
        return value if abs(value) < MAX_EXACT_INT else {"int": hex(value)}
    if kind is float:
        if math.isfinite(value):
            return value  # repr round-trips exactly
        return {"float": struct.pack(">d", value).hex()}
    if kind is bytes:
        return {"bytes": base64.b64encode(value).decode()}
    if kind is list:
        return _items(value, path, depth, out)
    if kind in _SEQUENCE_TAGS:
        return {_SEQUENCE_TAGS[kind]: _items(value, path, depth, out)}
    if kind is deque:
        return {"deque": [value.maxlen, _items(value, path, depth, out)]}
    if kind in _MAPPING_TAGS:
        return {_MAPPING_TAGS[kind]: _pairs(value, path, depth, out)}
    if kind is defaultdict:
        make = value.default_factory
        name = next((name for name, one in _FACTORIES.items() if one is make), None)
        return {"defaultdict": [name, _pairs(value, path, depth, out)]}
    if isinstance(value, tuple) and _named_tuple(kind.__module__, kind.__qualname__) is kind:
        items = _items(value, path, depth, out)
        return {"namedtuple": [kind.__module__, kind.__qualname__, items]}
    if kind is type(Path()):
        return {"path": str(value)}
    return _encode_foreign(value, path, depth, out)


def _items(value: Any, path: str, depth: int, out: list[Attachment]) -> list[Any]:
    kinds = {*map(type, value)}
    if kinds <= {str, bool} or (kinds == {float} and all(map(math.isfinite, value))):
        return [*value]
    return [_encode(item, f"{path}[{i}]", depth + 1, out) for i, item in enumerate(value)]


def _pairs(value: Any, path: str, depth: int, out: list[Attachment]) -> list[Any]:
    return [
        [
            key if type(key) is str else _encode(key, f"{path}.<key {key!r}>", depth + 1, out),
            _encode(item, f"{path}[{key!r}]", depth + 1, out),
        ]
        for key, item in value.items()
    ]


def _encode_foreign(value: Any, path: str, depth: int, out: list[Attachment]) -> Any:
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    kind = type(value)
    if torch is not None:
        if kind is torch.Size:
            return {"size": [int(extent) for extent in value]}
        if kind in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided:
            dtype = str(value.dtype).removeprefix("torch.")
            if dtype in TORCH_DTYPES and not value.is_quantized:
                out.append(Attachment(value, value.numel() * value.element_size()))
                body = [dtype, list(value.shape), len(out) - 1]
                is_parameter = kind is torch.nn.Parameter
                return (
                    {"parameter": [*body, value.requires_grad]}
                    if is_parameter
                    else {"tensor": body}
                )
    if numpy is not None:
        if kind is numpy.ndarray and value.dtype.kind in NUMPY_KINDS:
            out.append(Attachment(value, value.nbytes))
            return {"array": [value.dtype.str, list(value.shape), len(out) - 1]}
        if isinstance(value, numpy.generic) and value.dtype.kind in NUMPY_KINDS:
            return {"scalar": [value.dtype.str, value.tobytes().hex()]}
    raise InvalidInput(
        f"{path}: a {kind.__module__}.{kind.__qualname__} cannot be stored exactly",
        hint="keep state in None, bool, int, float, str, bytes, Path, list, tuple, dict, set, "
        "numpy arrays and torch tensors",
        path=path,
    )


def _named_tuple(module: str, name: str) -> type | None:
    """Return a class of a loaded module if it is a named tuple; no ``__getattr__`` is called."""
    kind: Any = sys.modules.get(module)
    for part in name.split("."):
        kind = getattr(kind, "__dict__", {}).get(part)
    is_one = isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields")
    return kind if is_one else None


_FACTORIES: Final[dict[str, Any]] = {
    one.__name__: one for one in (int, float, bool, str, list, dict, set, tuple)
}
"""Default factories that a commit can name; another one is taken from the script's own object."""
_SEQUENCE_TAGS: Final[dict[type, str]] = {tuple: "tuple", set: "set", frozenset: "frozenset"}
_MAPPING_TAGS: Final[dict[type, str]] = {dict: "dict", OrderedDict: "odict", Counter: "counter"}


def _torch_bytes(tensor: Any) -> bytes:
    import torch

    # A single element counts as contiguous with any strides, but ``view`` checks the strides.
    dense = tensor.detach().to("cpu").contiguous().as_strided((tensor.numel(),), (1,))
    return bytes(dense.view(torch.uint8).numpy().tobytes()) if dense.numel() else b""


# ---------------------------------------------------------------------------------- decode


def _decode(data: Any, path: str, depth: int, blobs: _Blobs) -> Any:
    if depth > 2 * MAX_DEPTH:
        raise InvalidInput(f"{path[:80]}…: nested too deeply")
    if data is None or type(data) in (bool, str, int, float):
        return data
    if type(data) is list:
        return [_decode(v, f"{path}[{i}]", depth + 1, blobs) for i, v in enumerate(data)]
    if type(data) is not dict or len(data) != 1:
        raise InvalidInput(f"{path}: not one tag")
    ((tag, body),) = data.items()
    if tag not in _DECODERS:
        raise InvalidInput(f"{path}: unknown tag {tag!r}")
    try:
        return _DECODERS[tag](body, f"{path}.{tag}", depth, blobs)
    except _MALFORMED as error:
        raise InvalidInput(f"{path}.{tag}: {error}") from error


_MALFORMED: Final = (
    TypeError,
    ValueError,
    IndexError,
    KeyError,
    OverflowError,
    MemoryError,
    struct.error,
    RuntimeError,  # such as from torch's reshape
)


def _decode_pairs(body: Any, path: str, depth: int, blobs: _Blobs) -> list[tuple[Any, Any]]:
    return [
        (_decode(key, path, depth + 1, blobs), _decode(item, f"{path}[{key!r}]", depth + 1, blobs))
        for key, item in body
    ]


def _decode_array(body: Any, path: str, depth: int, blobs: _Blobs) -> Any:
    import numpy as np

    name, shape, index = body
    blob, dtype = _blob(blobs, index), _numpy_dtype(name)
    raw = blob if isinstance(blob, bytes | memoryview) else blob.numpy()
    return np.frombuffer(raw, dtype=dtype).reshape(shape).copy()


def _decode_scalar(body: Any, path: str, depth: int, blobs: _Blobs) -> Any:
    import numpy as np

    name, hexdigits = body
    dtype, raw = _numpy_dtype(name), bytes.fromhex(hexdigits)
    if not dtype.itemsize:  # an empty text, which frombuffer cannot read
        return dtype.type()
    return np.frombuffer(raw, dtype=dtype)[0]


def _decode_tensor(body: Any, path: str, depth: int, blobs: _Blobs) -> Any:
    import torch

    name, shape, index = body
    if name not in TORCH_DTYPES:
        raise ValueError(f"unknown dtype {name!r}")
    blob, dtype = _blob(blobs, index), getattr(torch, name)
    if isinstance(blob, torch.Tensor):
        return blob.view(dtype).reshape(shape)
    raw = bytearray(blob)
    flat = torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)
    return flat.reshape(shape)


def _decode_parameter(body: Any, path: str, depth: int, blobs: _Blobs) -> Any:
    import torch

    *tensor, needs_gradient = body
    return torch.nn.Parameter(_decode_tensor(tensor, path, depth, blobs), bool(needs_gradient))


def _decode_named_tuple(body: Any, path: str, depth: int, blobs: _Blobs) -> Any:
    module, name, items = body
    values = [_decode(v, f"{path}[{i}]", depth + 1, blobs) for i, v in enumerate(items)]
    kind: Any = _named_tuple(str(module), str(name))
    if kind is None or len(kind._fields) != len(values):  # a program that only looks at a commit
        return tuple(values)
    return tuple.__new__(kind, values)


def _decode_default_dict(body: Any, path: str, depth: int, blobs: _Blobs) -> Any:
    name, pairs = body
    if name is not None and name not in _FACTORIES:
        raise ValueError(f"unknown default {name!r}")
    make = None if name is None else _FACTORIES[name]
    return defaultdict(make, _decode_pairs(pairs, path, depth, blobs))


def _numpy_dtype(name: Any) -> Any:
    import numpy as np

    # Checked first, because numpy parses parts of a text with commas as Python literals.
    if not isinstance(name, str) or not _NUMPY_DTYPE.fullmatch(name):
        raise ValueError(f"dtype {name!r} is not allowed")
    return np.dtype(name)


def _blob(blobs: _Blobs, index: Any) -> bytes | memoryview | torch.Tensor:
    if type(index) is not int or not 0 <= index < len(blobs):
        raise ValueError(f"attachment {index!r} is missing")
    return blobs[index]


def _decode_float(body: Any, path: str, depth: int, blobs: _Blobs) -> float:
    (value,) = struct.unpack(">d", bytes.fromhex(body))
    return float(value)


def _decode_size(body: Any, path: str, depth: int, blobs: _Blobs) -> Any:
    import torch

    return torch.Size([int(extent) for extent in body])


def _sequence(make: Callable[[Any], Any]) -> Callable[..., Any]:
    def build(body: Any, path: str, depth: int, blobs: _Blobs) -> Any:
        return make(_decode(v, f"{path}[{i}]", depth + 1, blobs) for i, v in enumerate(body))

    return build


def _mapping(make: Callable[[Any], Any]) -> Callable[..., Any]:
    def build(body: Any, path: str, depth: int, blobs: _Blobs) -> Any:
        return make(dict(_decode_pairs(body, path, depth, blobs)))

    return build


_DECODERS: Final[dict[str, Callable[..., Any]]] = {
    "int": lambda body, path, depth, blobs: int(body, 16),
    "float": _decode_float,
    "bytes": lambda body, path, depth, blobs: base64.b64decode(body, validate=True),
    "tuple": _sequence(tuple),
    "set": _sequence(set),
    "frozenset": _sequence(frozenset),
    "dict": _mapping(dict),
    "odict": _mapping(OrderedDict),
    "deque": lambda body, path, depth, blobs: deque(
        (_decode(v, f"{path}[{i}]", depth + 1, blobs) for i, v in enumerate(body[1])), body[0]
    ),
    "counter": _mapping(Counter),
    "defaultdict": _decode_default_dict,
    "namedtuple": _decode_named_tuple,
    "path": lambda body, path, depth, blobs: Path(body),
    "size": _decode_size,
    "array": _decode_array,
    "scalar": _decode_scalar,
    "tensor": _decode_tensor,
    "parameter": _decode_parameter,
}
