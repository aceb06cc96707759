"""Matrix products and convolutions over packed weights: the one place with private operators of torch.

A packed weight lies in oneDNN's own layout, so that no call reorders it. To the rest of the system it
is a row of bytes: it is copied, evicted and streamed as any other weight. A worker wraps those bytes,
where they lie, as an opaque tensor of torch (that is how AOTInductor binds packed constants).

The layout depends on torch's oneDNN and on the processor: ``fingerprint`` names both, and bytes of
another fingerprint must be packed again.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch

from ...errors import RegistrationRefused
from ...programs.packing import (
    CONVOLUTION,
    CONVOLUTION_ADD,
    LINEAR,
    LINEAR_ADD,
    PackedLayout,
)

ALIGN_BYTES: Final = 64  # oneDNN's kernels load whole cache lines
_MKLDNN_LAYOUT: Final = 3  # c10::Layout::Mkldnn
_DTYPES: Final = {torch.float32: 6, torch.bfloat16: 15}  # c10::ScalarType
_LARGEST_ERROR: Final = 1e-5  # of the self-test, relative to the largest output


def pack_linear(weight: torch.Tensor, rows: int) -> tuple[PackedLayout, torch.Tensor]:
    """Pack the weight of a linear layer, ``[out, in]``, for about ``rows`` rows of input.

    Returns:
        Its layout, and its bytes (uint8, on the host).
    """
    return _taken_apart(torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), rows))


def pack_convolution(
    weight: torch.Tensor,
    padding: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    input_shape: Sequence[int],
) -> tuple[PackedLayout, torch.Tensor]:
    """Pack the weight of a two-dimensional convolution, ``[out, in / groups, height, width]``."""
    packed = torch.ops.mkldnn._reorder_convolution_weight(
        weight.contiguous(), padding, stride, dilation, groups, input_shape
    )
    return _taken_apart(packed)


def _taken_apart(packed: torch.Tensor) -> tuple[PackedLayout, torch.Tensor]:
    size_bytes = int(torch.ops.mkldnn._nbytes(packed))
    data = torch.empty(size_bytes, dtype=torch.uint8)
    ctypes.memmove(data.data_ptr(), int(torch.ops.mkldnn.data_ptr(packed)), size_bytes)
    layout = PackedLayout(
        dtype=str(packed.dtype).removeprefix("torch."),
        shape=tuple(packed.shape),
        description=bytes(torch.ops.mkldnn._get_mkldnn_serialized_md(packed).tolist()),
    )
    return layout, data


def wrap(data: torch.Tensor, layout: PackedLayout) -> torch.Tensor:
    """Wrap packed bytes, where they lie, as a weight that the packed operators take.

    The result is a view: ``data``'s memory must outlive it, which a worker's arena does.

    Args:
        data: uint8, contiguous, ``ALIGN_BYTES``-aligned.
    """
    create, new_capsule = _library()
    dims = len(layout.shape)
    handle = ctypes.c_void_p()
    status = create(
        ctypes.c_void_p(data.data_ptr()),
        ctypes.c_int64(dims),
        (ctypes.c_int64 * dims)(*layout.shape),
        (ctypes.c_int64 * dims)(*[0] * dims),
        ctypes.c_int64(0),
        ctypes.c_int32(_DTYPES[getattr(torch, layout.dtype)]),
        ctypes.c_int32(0),
        ctypes.c_int32(0),
        ctypes.byref(handle),
        ctypes.c_int32(_MKLDNN_LAYOUT),
        ctypes.c_char_p(layout.description),
        ctypes.c_int64(len(layout.description)),
    )
    if status:
        raise RegistrationRefused("weights", "torch cannot wrap packed ones")
    capsule = new_capsule(handle.value, None, None)
    tensor: torch.Tensor = torch._C._aoti.alloc_tensor_by_stealing_from_void_ptr(capsule)
    return tensor


@cache
def _library() -> tuple[Any, Any]:
    library = ctypes.CDLL(str(Path(torch.__path__[0]) / "lib" / "libtorch_cpu.so"))
    new_capsule = ctypes.pythonapi.PyCapsule_New
    new_capsule.restype = ctypes.py_object
    new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    return library.aoti_torch_create_tensor_from_blob_v2, new_capsule


@cache
def fingerprint() -> str:
    """Name what a layout depends on: torch, its oneDNN, and what the processor can do."""
    said = [torch.__version__, torch.__config__.show(), torch.backends.cpu.get_cpu_capability()]
    flags = [line for line in _cpu_facts() if line.startswith(("flags", "model name"))]
    return hashlib.sha256("\n".join([*said, *sorted(set(flags))]).encode()).hexdigest()[:16]


def _cpu_facts() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []


def operators() -> dict[str, Any]:
    """Return the packed operators by their targets in a derived graph."""
    linear = torch.ops.mkldnn._linear_pointwise
    convolution = torch.ops.mkldnn._convolution_pointwise

    def linear_add(
        x: torch.Tensor, other: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        return linear.binary(x, other, weight, bias, "add")

    def convolution_add(
        x: torch.Tensor, other: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None,
        padding: list[int], stride: list[int], dilation: list[int], groups: int,
        activation: str, scalars: list[float], algorithm: str,
    ) -> torch.Tensor:  # fmt: skip
        unary = None if activation == "none" else activation
        return convolution.binary(
            x, other, weight, bias, padding, stride, dilation, groups, "add", 1.0, unary, scalars,
            algorithm or None,
        )  # fmt: skip

    return {
        LINEAR: linear.default,
        LINEAR_ADD: linear_add,
        CONVOLUTION: convolution.default,
        CONVOLUTION_ADD: convolution_add,
    }
