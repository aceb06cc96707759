"""Matrix products and convolutions over packed weights; only this module uses the private operators
of ``torch.ops.mkldnn``.

A packed weight is stored in oneDNN's own layout, so no call has to reorder it. The rest of the
system copies, evicts and streams its bytes like any other weight. A worker wraps these bytes in
place as an opaque tensor of torch, as AOTInductor does with packed constants.

The layout depends on torch's oneDNN, the processor and the threads (``spec.fingerprint``).
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch
from msgspec.structs import replace

from ...base.errors import RegistrationRefused
from ...programs.interface import packing
from ..torch_kernels import activated, linear_int8

_After = tuple[str, Sequence[float], str]
_NOTHING: Final[_After] = ("none", [], "")
_MKLDNN_LAYOUT: Final = 3  # c10::Layout::Mkldnn
_SCALAR_TYPES: Final = {"int8": 1, "float32": 6, "bfloat16": 15}  # c10::ScalarType
_FAST_ROWS: Final = 4  # oneDNN reads weights from memory faster for 4 rows than for fewer
_LONG_ROW: Final = 1024  # oneDNN sums a single row longer than this in another order than several
_LARGE_WEIGHT: Final = 1 << 20  # elements; smaller weights often fit into the processor's cache
_LOSSY: Final = ("relu", "hardtanh", "hardsigmoid", "leaky_relu")
"""Activations in which oneDNN turns NaN into a number (leaky ReLU: with slope 0): torch's own ones
follow the product instead. A pass over a result costs less than a check of the input for NaN."""
_MINUS_INF_BITS: Final = (
    -128
)  # bits of bfloat16's -inf as int16; NaN and positive numbers have more
_LARGEST_CODE: Final = 127 * 256  # of an activation in ``int8``: two bytes, each with an own sum
_MAX_INT8_WIDTH: Final = (1 << 31) // (255 * 127)  # products that an int32 can sum
_MAX_PADDED: Final = 4  # a tiny int8 weight stays plain if it would be larger than in float32
_ZERO: Final = torch.zeros(1, dtype=torch.int64)  # zero point of all weights
_PADDING: Final = (slice(108, 112), slice(316, 320), slice(420, 424))
"""Padding in oneDNN's descriptor. It is never initialized, so it differs between processes."""
_SELF_TEST_ERROR: Final = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # relative to largest output


class CpuKernels:
    """Packed operators of the cpu device. Stateless; see ``executor.PackedKernels``."""

    layout: packing.Layout = "onednn"
    computes_here = True
    fast_error = 1e-3

    def pack_linear(self, weight: torch.Tensor) -> tuple[packing.PackedLayout, torch.Tensor]:
        return _taken_apart(torch.ops.mkldnn._reorder_linear_weight(weight.contiguous()))

    def pack_convolution(
        self,
        weight: torch.Tensor,
        padding: Sequence[int],
        stride: Sequence[int],
        dilation: Sequence[int],
        groups: int,
        input_shape: Sequence[int],
    ) -> tuple[packing.PackedLayout, torch.Tensor]:
        """Implement ``PackedKernels``.

        Without the input's shape, oneDNN guesses a shape, and often chooses a layout that a call
        must reorder.
        """
        packed = torch.ops.mkldnn._reorder_convolution_weight(
            weight.contiguous(), padding, stride, dilation, groups, input_shape
        )
        layout, data = _taken_apart(packed)
        return replace(layout, input_shape=tuple(input_shape)), data

    def pack_int8(self, weight: torch.Tensor) -> tuple[packing.PackedLayout | None, torch.Tensor]:
        if weight.shape[1] >= _MAX_INT8_WIDTH or missing_int8():
            return None, weight
        layout, data = _taken_apart(torch.ops.onednn.qlinear_prepack(weight, None))
        is_padded = data.nbytes > _MAX_PADDED * weight.nbytes
        return (None, weight) if is_padded else (layout, data)

    def wrap(self, data: torch.Tensor, layout: packing.PackedLayout) -> torch.Tensor:
        """Implement ``PackedKernels``; ``data`` is uint8, contiguous and aligned to 64 bytes."""
        create, new_capsule = _library()
        dims = len(layout.shape)
        handle = ctypes.c_void_p()
        status = create(
            ctypes.c_void_p(data.data_ptr()),
            ctypes.c_int64(dims),
            (ctypes.c_int64 * dims)(*layout.shape),
            (ctypes.c_int64 * dims)(*[0] * dims),
            ctypes.c_int64(0),
            ctypes.c_int32(_SCALAR_TYPES[layout.dtype]),
            ctypes.c_int32(0),  # the host
            ctypes.c_int32(0),
            ctypes.byref(handle),
            ctypes.c_int32(_MKLDNN_LAYOUT),
            ctypes.c_char_p(layout.description),
            ctypes.c_int64(len(layout.description)),
        )
        if status:
            raise RegistrationRefused("weights", "torch cannot wrap them where they are packed")
        capsule = new_capsule(handle.value, None, None)
        tensor: torch.Tensor = torch._C._aoti.alloc_tensor_by_stealing_from_void_ptr(capsule)
        return tensor

    def supports_bfloat16(self) -> bool:
        return not missing_half()

    def operators(self) -> Mapping[str, Callable[..., torch.Tensor]]:
        return {
            packing.LINEAR_INT8: _linear_int8,
            packing.LINEAR: _linear,
            packing.LINEAR_ADD: _linear_add,
            packing.CONVOLUTION: _convolution,
            packing.CONVOLUTION_ADD: _convolution_add,
        }


KERNELS: Final = CpuKernels()


def _linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *after: Any
) -> torch.Tensor:
    call = torch.ops.mkldnn._linear_pointwise.default
    result: torch.Tensor
    own, later = _split(*after)
    if not (missing_rows := _missing_rows(x, weight)):
        result = call(x, weight, bias, *own)
        return _finished(result, *later)
    result = call(_with_rows(x, missing_rows), weight, bias, *own)
    return _finished(_own_rows(result, x, missing_rows), *later)


def _linear_add(
    x: torch.Tensor, other: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    call = torch.ops.mkldnn._linear_pointwise.binary
    result: torch.Tensor
    if not (missing_rows := _missing_rows(x, weight)):
        result = call(x, other, weight, bias, "add")
        return result
    wide = _with_rows(x, missing_rows), _with_rows(other, missing_rows)
    return _own_rows(call(*wide, weight, bias, "add"), x, missing_rows)


def _missing_rows(x: torch.Tensor, weight: torch.Tensor) -> int:
    """Return how many rows to add to an input, for speed or for the bits that a row has in
    a batch; 0: none."""
    rows = math.prod(x.shape[:-1])
    is_few = 0 < rows < _FAST_ROWS
    gains = weight.numel() >= _LARGE_WEIGHT or (rows == 1 and x.shape[-1] > _LONG_ROW)
    return _FAST_ROWS - rows if is_few and gains else 0


def _with_rows(x: torch.Tensor, count: int) -> torch.Tensor:
    if count == _FAST_ROWS - 1 and x.dim() > 1:  # the only row is repeated: one call fewer
        return x.expand(_FAST_ROWS, *x.shape[1:])
    return torch.nn.functional.pad(x.reshape(-1, x.shape[-1]), (0, 0, 0, count))


def _own_rows(result: torch.Tensor, x: torch.Tensor, count: int) -> torch.Tensor:
    rows = result[:-count]
    return rows if rows.dim() == x.dim() else rows.view(*x.shape[:-1], result.shape[-1])


def _linear_int8(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    sums: torch.Tensor | None,
    bias: torch.Tensor | None,
    *after: Any,
) -> torch.Tensor:
    """Multiply activations by int8 weights in integers.

    Sums of integers are exact, so a row has the same bits beside any other rows, in any kernel.
    With ``sums``, a row of activations becomes integers of 8 bits, else of 16 bits.
    """
    if weight.layout is torch.strided:
        return linear_int8(x, weight, scales, sums, bias, *after)
    if not x.numel():
        return x.new_zeros(*x.shape[:-1], weight.shape[1])  # it was packed as [in, out]
    rows, bias = x.float(), bias if bias is None else bias.float()
    if sums is None:
        result = _multiply_words(rows, weight, scales, bias)
    else:
        result = _multiply_bytes(rows, weight, scales, sums, bias)
    return _finished(result.to(x.dtype), *after)


def _multiply_bytes(
    rows: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    sums: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Multiply rows as 8-bit offsets from each row's least element.

    FBGEMM quantizes all rows in one call: codes, then each row's step and least element. It drops
    NaN, ``amin`` does not. It adds 1e-8 to a row's range, so codes of a smaller range are coarse.
    """
    width = rows.shape[-1]
    quantize = torch.ops.quantized.embedding_bag_byte_prepack.default
    codes, step, _ = quantize(rows).split_with_sizes([width, 4, 4], -1)
    if width % 4:  # misaligned for float32
        step = step.clone(memory_format=torch.contiguous_format)
    step = step.view(torch.float32)
    low = rows.amin(-1, keepdim=True)
    multiply = torch.ops.onednn.qlinear_pointwise.default
    product = multiply(
        *(codes, 1.0, 0, weight, scales, _ZERO, None, 1.0, 0, torch.float32, "none", [], "")
    )
    base = low * sums if bias is None else torch.addcmul(bias, low, sums)
    return base.addcmul_(product, step)


def _multiply_words(
    x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Multiply rows as 16-bit integers, whose high and low bytes are rows of one product."""
    rows = x.reshape(-1, x.shape[-1])
    largest = rows.abs().amax(1, keepdim=True)
    largest = largest + (largest - largest)  # infinite values make this and the row NaN
    step = largest.clamp_(min=torch.finfo(torch.float32).tiny * _LARGEST_CODE) / _LARGEST_CODE
    codes = (rows / step).round_().to(torch.int32)
    high = (codes + 128) >> 8
    both = torch.cat([high, codes.sub_(high << 8)]).add_(128).to(torch.uint8)
    multiply = torch.ops.onednn.qlinear_pointwise.default
    product = multiply(
        *(both, 1.0, 128, weight, torch.ones(1), _ZERO, None, 1.0, 0),
        *(torch.float32, "none", [], ""),
    )
    high, low = product.chunk(2)
    result = torch.add(low, high, alpha=256.0).mul_(step).mul_(scales)
    result = result if bias is None else result + bias
    return result.view(*x.shape[:-1], weight.shape[1])


def _split(name: str, scalars: Sequence[float], algorithm: str) -> tuple[_After, _After]:
    """Return the activation of oneDNN's call, and the one that torch applies to its result."""
    after = name, scalars, algorithm
    is_lossy = name in _LOSSY and (name != "leaky_relu" or not scalars[0])
    return (_NOTHING, after) if is_lossy else (after, _NOTHING)


def _finished(y: torch.Tensor, name: str, *how: Any) -> torch.Tensor:
    """Apply an activation in place. torch's own ReLU of bfloat16 takes three times as long."""
    if name == "relu" and y.dtype is torch.bfloat16:
        torch.threshold_(y.view(torch.int16), _MINUS_INF_BITS, 0)
        return y
    return activated(y, name, *how)


def _convolution(x: torch.Tensor, *rest: Any) -> torch.Tensor:
    own, later = _split(*rest[-3:])
    call = torch.ops.mkldnn._convolution_pointwise.default
    return _finished(call(x, *rest[:-3], *own), *later)


def _convolution_add(
    x: torch.Tensor,
    other: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    padding: list[int],
    stride: list[int],
    dilation: list[int],
    groups: int,
    *after: Any,
) -> torch.Tensor:
    fused = torch.ops.mkldnn._convolution_pointwise.binary
    result: torch.Tensor = fused(
        *(x, other, weight, bias, padding, stride, dilation, groups),
        *("add", 1.0, None, [], None),  # oneDNN applies only ReLU to a sum, and ReLU is lossy
    )
    return _finished(result, *after)


def _taken_apart(packed: torch.Tensor) -> tuple[packing.PackedLayout, torch.Tensor]:
    size_bytes = int(torch.ops.mkldnn._nbytes(packed))
    data = torch.empty(size_bytes, dtype=torch.uint8)
    ctypes.memmove(data.data_ptr(), int(torch.ops.mkldnn.data_ptr(packed)), size_bytes)
    description = torch.ops.mkldnn._get_mkldnn_serialized_md(packed)
    for one in _PADDING:
        description[one] = 0
    layout = packing.PackedLayout(
        dtype=str(packed.dtype).removeprefix("torch."),
        shape=tuple(packed.shape),
        description=bytes(description.tolist()),
    )
    return layout, data


@cache
def _library() -> tuple[Any, Any]:
    library = ctypes.CDLL(str(Path(torch.__path__[0]) / "lib" / "libtorch_cpu.so"))
    new_capsule = ctypes.pythonapi.PyCapsule_New
    new_capsule.restype = ctypes.py_object
    new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    return library.aoti_torch_create_tensor_from_blob_v2, new_capsule


@cache
def missing() -> str:
    """Pack, wrap and compute one linear layer and one convolution.

    Returns:
        The reason why packed weights cannot be used here; empty if they can.
    """
    return _missing(torch.float32)


@cache
def missing_int8() -> str:
    """Return why products of int8 weights cannot be summed in integers; empty if they can.

    Processors without instructions for it add pairs of products in 16 bits, which overflow.
    """
    weight, x = torch.full((16, 64), 127, dtype=torch.int8), torch.full((1, 64), 255.0)
    try:
        layout, data = _taken_apart(torch.ops.onednn.qlinear_prepack(weight, None))
        own = _multiply_words(x, KERNELS.wrap(data, layout), torch.ones(16), None)
    except (AttributeError, OSError, RuntimeError, RegistrationRefused) as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    is_right = bool(((own / (255.0 * 127 * 64) - 1.0).abs() < 1e-5).all())
    return "" if is_right else "sums of products overflow"


@cache
def missing_half() -> str:
    """Return why products over packed weights cannot use bfloat16; empty if they can."""
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return "this processor has no instructions for it (AVX-512 or AMX)"
    return missing() or _missing(torch.bfloat16)


def _missing(dtype: torch.dtype) -> str:
    try:
        largest_error = _self_test(dtype)
    except (AttributeError, OSError, RuntimeError, RegistrationRefused) as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    limit = _SELF_TEST_ERROR[dtype]
    return "" if largest_error <= limit else f"results differ by {largest_error:.1e} of the largest"


def _self_test(dtype: torch.dtype) -> float:
    values = torch.linspace(-1.0, 1.0, 16 * 8 * 3 * 3)
    operators, error = KERNELS.operators(), 0.0
    with torch.no_grad():
        weight, x = values[:512].reshape(32, 16), values[:64].reshape(4, 16)
        layout, data = KERNELS.pack_linear(weight.to(dtype))
        ours = operators[packing.LINEAR](
            x.to(dtype), KERNELS.wrap(data, layout), None, "none", [], ""
        )
        theirs = torch.nn.functional.linear(x, weight)
        error = max(error, float((ours - theirs).abs().max() / theirs.abs().max()))
        weight, x = values.reshape(16, 8, 3, 3), values[:512].reshape(1, 8, 8, 8)
        how = [1, 1], [1, 1], [1, 1], 1
        layout, data = KERNELS.pack_convolution(weight.to(dtype), *how, x.shape)
        wrapped = KERNELS.wrap(data, layout)
        ours = operators[packing.CONVOLUTION](x.to(dtype), wrapped, None, *how, "none", [], "")
        theirs = torch.nn.functional.conv2d(x, weight, None, 1, 1)
        return max(error, float((ours - theirs).abs().max() / theirs.abs().max()))
