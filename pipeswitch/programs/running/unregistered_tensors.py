"""Modules without data, and their loose tensors: plain attributes such as anchors and tables.

A module that is constructed on meta has no data for loose tensors. So in module mode they are
tensors of the program, like its weights. No hook can detect when a loose tensor is read. So loose
tensors belong to the first group, which is on the device before the module runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

import torch
from torch import nn

_MODULES_OWN: Final = ("_parameters", "_buffers", "_modules")
Make = Callable[[str, torch.Tensor], torch.Tensor]


def loose_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return loose tensors by their path, such as ``rpn.anchor_generator.cell_anchors.0``."""
    tensors: dict[str, torch.Tensor] = {}
    for _ in _attributes(module, tensors.setdefault):
        pass
    return tensors


def without_data(construct: Callable[[], nn.Module]) -> nn.Module:
    """Construct a module whose weights and loose tensors are on meta.

    A constructor that reads values (``.item()``, numpy, orthogonal initialization) cannot run on
    meta. It runs on the host, and its tensors are moved to meta afterwards.

    Raises:
        Exception: the constructor's own exception, from its run on the host.
    """
    try:
        with torch.device("meta"):
            return construct()
    except Exception:  # reading a tensor without data may raise anything
        module = construct()
    for owner in module.modules():
        for key, weight in [*owner._parameters.items(), *owner._buffers.items()]:
            if weight is not None and weight.layout is torch.strided:
                meta = weight.detach().to("meta")
                is_parameter = isinstance(weight, nn.Parameter)
                setattr(owner, key, nn.Parameter(meta, False) if is_parameter else meta)
    on_meta = {name: one.detach().to("meta") for name, one in loose_tensors(module).items()}
    for owner, key, value in slots(module, on_meta):
        setattr(owner, key, value)
    return module


def leave_behind(module: nn.Module, names: Iterable[str]) -> None:
    """Set the buffers, parameters and attributes with these names to None."""
    for name in names:
        path, _, key = name.rpartition(".")
        setattr(module.get_submodule(path), key, None)


def slots(
    module: nn.Module, tensors: Mapping[str, torch.Tensor]
) -> list[tuple[nn.Module, str, Any]]:
    """Return (owner, key, new value) of each attribute whose tensors ``tensors`` replaces."""
    return list(_attributes(module, lambda name, tensor: tensors.get(name, tensor)))


def _attributes(module: nn.Module, make: Make) -> Iterator[tuple[nn.Module, str, Any]]:
    for path, owner in module.named_modules():
        registered = {id(one) for one in (*owner.parameters(), *owner.buffers())}

        def own(name: str, tensor: torch.Tensor, registered: set[int] = registered) -> torch.Tensor:
            return tensor if id(tensor) in registered else make(name, tensor)

        for key, value in list(vars(owner).items()):
            if key not in _MODULES_OWN:
                replaced = _replaced(value, f"{path}.{key}" if path else key, own)
                if replaced is not value:
                    yield owner, key, replaced


def _replaced(value: Any, name: str, make: Make) -> Any:
    """Return a value with ``make`` applied to its tensors; the same object if nothing changed."""
    if isinstance(value, torch.Tensor):
        return make(name, value)
    if type(value) is dict:
        pairs = {key: _replaced(item, f"{name}.{key}", make) for key, item in value.items()}
        return pairs if any(pairs[key] is not value[key] for key in value) else value
    if type(value) in (list, tuple):
        items = [_replaced(item, f"{name}.{n}", make) for n, item in enumerate(value)]
        is_same = all(new is old for new, old in zip(items, value, strict=True))
        return value if is_same else type(value)(items)
    return value
