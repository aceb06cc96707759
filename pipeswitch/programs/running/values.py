"""Values of a model: flattening of outputs, names of dtypes, bytes of tensors."""

from __future__ import annotations

from typing import Any, Final

import torch

from ...base.errors import RegistrationRefused
from ..interface.layout import ITEM_BYTES
from ..interface.pytree import Tree, flatten


def dtype_name(dtype: torch.dtype, part: str) -> str:
    """Return a dtype's name, such as ``float32``; raise RegistrationRefused if not supported."""
    name = str(dtype).removeprefix("torch.")
    if name not in ITEM_BYTES:
        hint = _PAIRS.get(part.partition(" ")[0], "") if dtype.is_complex else ""
        reason = f"dtype {name} is not one of {', '.join(ITEM_BYTES)}"
        raise RegistrationRefused(part, reason, hint=hint)
    return name


_PAIRS: Final = {
    "output": "return torch.view_as_real(y), pairs of numbers",
    "input": "take torch.view_as_real(x), pairs of numbers, and view_as_complex(x) in forward",
    "operator": "torch.view_as_complex(torch.stack([x, torch.zeros_like(x)], -1)) makes one of "
    "pairs of numbers",
    "weight": "keep it as pairs of numbers: torch.view_as_real(table) in the constructor, "
    "torch.view_as_complex(self.table) in forward",
}
"""Hints for replacing complex numbers, by the kind of value that has them."""


def is_tensor(value: Any) -> bool:
    """Return True for a tensor, the leaf of a module's value tree."""
    return isinstance(value, torch.Tensor)


def flatten_outputs(outputs: Any) -> dict[str, torch.Tensor]:
    """Return a module's result as tensors by name (``y``; ``y0``, ``y1``…; keys), without Nones.

    Raises:
        RegistrationRefused: a part is not a tensor, or there is no tensor.
    """
    return nested_outputs(outputs)[1]


def nested_outputs(outputs: Any) -> tuple[Tree, dict[str, torch.Tensor]]:
    """Return a result's tree (None for a single tensor), and the result of ``flatten_outputs``."""
    tree, leaves = flatten(outputs, "output", is_tensor)
    if not leaves:
        raise RegistrationRefused("outputs", "the module returns no tensor")
    return (None if is_tensor(outputs) else tree), leaves


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a contiguous tensor as uint8, without a copy.

    A tensor of one element is contiguous with any strides, but ``view`` needs stride 1.
    """
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous host tensor, without a copy."""
    return memoryview(bytes_of(tensor).numpy().data) if tensor.numel() else memoryview(b"")
