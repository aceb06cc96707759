"""Values of a model: how outputs are flattened and how a dtype is called."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..errors import RegistrationRefused
from .layout import ITEM_BYTES


def dtype_name(dtype: torch.dtype, part: str) -> str:
    """``"float32"`` for ``torch.float32``; refused when it cannot travel."""
    name = str(dtype).removeprefix("torch.")
    if name not in ITEM_BYTES:
        raise RegistrationRefused(part, f"dtype {name} is not one of {', '.join(ITEM_BYTES)}")
    return name


def flatten_outputs(outputs: Any) -> dict[str, torch.Tensor]:
    """A module's result as named tensors: ``y``; ``y0``, ``y1``…; or a mapping's own keys.

    Raises:
        RegistrationRefused: something in it is not a tensor. ``None`` is left out.
    """
    found: dict[str, torch.Tensor] = {}

    def visit(value: Any, name: str) -> None:
        if isinstance(value, torch.Tensor):
            if name in found:
                raise RegistrationRefused("outputs", f"two are called {name!r}")
            found[name] = value
        elif isinstance(value, Mapping):
            for key, item in value.items():
                visit(item, f"{name}.{key}" if name else str(key))
        elif isinstance(value, list | tuple):
            for index, item in enumerate(value):
                visit(item, f"{name}.{index}" if name else f"y{index}")
        elif value is not None:
            raise RegistrationRefused(
                f"output {name or 'y'!r}", f"it is a {type(value).__name__}, not a tensor"
            )

    if isinstance(outputs, torch.Tensor):
        return {"y": outputs}
    visit(outputs, "")
    if not found:
        raise RegistrationRefused("outputs", "the module returns no tensor")
    return found


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous host tensor, without a copy."""
    flat = tensor.detach().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy().data) if flat.numel() else memoryview(b"")
