"""Linear layers and convolutions in ``fast``, ``bf16`` and ``int8`` on a GPU, in torch's layouts.

In ``fast`` a GPU multiplies in TF32: inputs have 10 mantissa bits, accumulation is float32.
Convolutions do so by cuDNN's default. Their weights are channels-last, as tensor cores read them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch.nn import functional

from ..programs.graphs.contracts import contracted
from ..programs.interface import packing

ROWS: Final = b"rows"  # ``PackedLayout.description`` of a linear layer's weight
CHANNELS_LAST: Final = b"channels last"  # description of a convolution's weight
_LINEAR: Final = contracted(torch.ops.aten.linear.default)  # checked: the numbers are the file's
_CONV2D: Final = contracted(torch.ops.aten.conv2d.default)
_CUT_BITS: Final = 13  # bits of a float32 that TF32 does not have


class TorchKernels:
    """See ``executor.PackedKernels``.

    Args:
        rounds: round inputs and weights to TF32, as a GPU does. The build measures the error of
            ``fast`` this way, without a GPU.
    """

    layout: packing.Layout = "torch"
    computes_here = False
    fast_error = 1e-2  # TF32 rounds by up to 5e-4, in each layer

    def __init__(self, *, rounds: bool = False) -> None:
        self._rounded = to_tf32 if rounds else _same

    def pack_linear(self, weight: torch.Tensor) -> tuple[packing.PackedLayout, torch.Tensor]:
        return _laid_out(weight, weight, ROWS)

    def pack_convolution(
        self, weight: torch.Tensor, *how: Any
    ) -> tuple[packing.PackedLayout, torch.Tensor]:
        return _laid_out(weight, weight.permute(0, 2, 3, 1), CHANNELS_LAST)

    def pack_int8(self, weight: torch.Tensor) -> tuple[packing.PackedLayout | None, torch.Tensor]:
        return None, weight

    def wrap(self, data: torch.Tensor, layout: packing.PackedLayout) -> torch.Tensor:
        values = data.view(getattr(torch, layout.dtype))
        if layout.description == ROWS:
            return values.view(layout.shape)
        count, channels, height, width = layout.shape
        return values.view(count, height, width, channels).permute(0, 3, 1, 2)

    def supports_bfloat16(self) -> bool:
        return True

    def operators(self) -> Mapping[str, Callable[..., torch.Tensor]]:
        return {
            packing.LINEAR: self._linear,
            packing.LINEAR_ADD: self._linear_add,
            packing.LINEAR_INT8: linear_int8,
            packing.CONVOLUTION: self._convolution,
            packing.CONVOLUTION_ADD: self._convolution_add,
        }

    def _linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *after: Any
    ) -> torch.Tensor:
        matmul: Any = torch.backends.cuda.matmul
        before, matmul.fp32_precision = matmul.fp32_precision, "tf32"
        try:
            result = _LINEAR(self._rounded(x), self._rounded(weight), bias)
        finally:
            matmul.fp32_precision = before
        return activated(result, *after)

    def _linear_add(
        self, x: torch.Tensor, other: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        return self._linear(x, weight, bias, "none", [], "") + other

    def _convolution(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        padding: list[int],
        stride: list[int],
        dilation: list[int],
        groups: int,
        *after: Any,
    ) -> torch.Tensor:
        x, weight = self._rounded(x), self._rounded(weight)
        result = _CONV2D(x, weight, bias, stride, padding, dilation, groups)
        return activated(result, *after)

    def _convolution_add(self, x: torch.Tensor, other: torch.Tensor, *rest: Any) -> torch.Tensor:
        result = self._convolution(x, *rest[:-3], "none", [], "")
        return activated(result.add_(other), *rest[-3:])


def _laid_out(
    weight: torch.Tensor, values: torch.Tensor, description: bytes
) -> tuple[packing.PackedLayout, torch.Tensor]:
    layout = packing.PackedLayout(
        dtype=str(weight.dtype).removeprefix("torch."),
        shape=tuple(weight.shape),
        description=description,
    )
    return layout, values.contiguous().view(-1).view(torch.uint8)


def _same(factor: torch.Tensor) -> torch.Tensor:
    return factor


def to_tf32(factor: torch.Tensor) -> torch.Tensor:
    """Round float32 to the nearest TF32 value; keep other dtypes."""
    if factor.dtype is not torch.float32:
        return factor
    bits = factor.view(torch.int32) + (1 << (_CUT_BITS - 1)) & -(1 << _CUT_BITS)
    return torch.where(factor.isfinite(), bits.view(torch.float32), factor)


def activated(x: torch.Tensor, name: str, scalars: Sequence[float], algorithm: str) -> torch.Tensor:
    """Apply a packed call's activation to its result, in place except GELU."""
    return x if name == "none" else _ACTIVATIONS[name](x, *scalars, algorithm)


_ACTIVATIONS: Final[Mapping[str, Callable[..., torch.Tensor]]] = {
    "relu": lambda x, _: x.relu_(),
    "sigmoid": lambda x, _: x.sigmoid_(),
    "tanh": lambda x, _: x.tanh_(),
    "swish": lambda x, _: functional.silu(x, inplace=True),
    "hardswish": lambda x, _: functional.hardswish(x, inplace=True),
    "hardsigmoid": lambda x, _: functional.hardsigmoid(x, inplace=True),
    "hardtanh": lambda x, low, high, _: x.clamp_(low, high),
    "leaky_relu": lambda x, slope, _: functional.leaky_relu(x, slope, inplace=True),
    "gelu": lambda x, algorithm: functional.gelu(x, approximate=algorithm),
}


def linear_int8(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    _: torch.Tensor | None,
    bias: torch.Tensor | None,
    *after: Any,
) -> torch.Tensor:
    """Multiply activations by int8 weights, which are converted first, for any number of rows."""
    half = x.bfloat16() if x.dtype is torch.float16 else x  # sums before scaling are large
    result = functional.linear(half, weight.to(half.dtype)) * scales
    return activated((result if bias is None else result + bias).to(x.dtype), *after)
