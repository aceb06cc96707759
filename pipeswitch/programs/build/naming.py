"""What a module's inputs and outputs are called, and the module called by position alone."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ...errors import RegistrationRefused
from ..values import dtype_name, flatten_outputs


class Flat(nn.Module):
    """Calls a module with flat tensors and returns flat tensors: what export sees."""

    def __init__(self, module: nn.Module, keywords: Sequence[str] | None) -> None:
        super().__init__()
        self.module = module
        self._keywords = keywords
        self.fixed = _without_cache(module)

    def named_outputs(self, inputs: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        if self._keywords is None:
            return flatten_outputs(self.module(*inputs, **self.fixed))
        named = dict(zip(self._keywords, inputs, strict=True))
        return flatten_outputs(self.module(**named, **self.fixed))

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(self.named_outputs(inputs).values())


def _without_cache(module: nn.Module) -> dict[str, bool]:
    """``use_cache=False`` for a decoder of transformers: a request stands alone."""
    is_asked = getattr(getattr(module, "config", None), "use_cache", False)
    return {"use_cache": False} if is_asked and "use_cache" in _parameters(module) else {}


def _parameters(module: nn.Module) -> Mapping[str, inspect.Parameter]:
    """Those of ``forward``; none where it is silent."""
    try:
        return inspect.signature(module.forward).parameters
    except (TypeError, ValueError):
        return {}


def _parameter_names(module: nn.Module, count: int) -> list[str]:
    """What ``forward`` calls its first inputs; ``x``, or ``x0``…, where it is silent.

    ``*args`` and modules that were compiled or traced have no names of their own; torch's, like
    ``Sequential``, call everything ``input``.
    """
    if count == 1 and type(module).__module__.startswith("torch.nn."):
        return ["x"]
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [name for name, one in _parameters(module).items() if one.kind in kinds][:count]
    if len(names) == count:
        return names
    return ["x"] if count == 1 else [f"x{index}" for index in range(count)]


def _as_tensor(value: Any) -> Any:
    """A numpy array as the tensor it is; everything else unchanged."""
    return torch.from_numpy(value.copy()) if type(value).__module__ == "numpy" else value


def named_inputs(
    module: nn.Module,
    example_inputs: Mapping[str, torch.Tensor] | Sequence[torch.Tensor] | torch.Tensor,
    input_names: Sequence[str] | None,
) -> tuple[list[str], list[torch.Tensor], list[str] | None]:
    keywords: list[str] | None = None
    example: Any = _as_tensor(example_inputs)
    if isinstance(example, torch.Tensor):
        inputs = [example]
    elif isinstance(example, Mapping):
        keywords, inputs = list(example), [_as_tensor(value) for value in example.values()]
    elif isinstance(example, Sequence) and not isinstance(example, str | bytes):
        inputs = [_as_tensor(value) for value in example]
    else:
        raise RegistrationRefused(
            "example inputs",
            f"a {type(example).__name__} is neither a tensor, nor a sequence nor a mapping of them",
        )
    names = list(input_names or keywords or _parameter_names(module, len(inputs)))
    if len(names) != len(inputs):
        raise RegistrationRefused("inputs", f"{len(names)} names for {len(inputs)} inputs")
    for name, value in zip(names, inputs, strict=True):
        if not isinstance(value, torch.Tensor):
            raise RegistrationRefused(
                f"input {name!r}",
                f"it is a {type(value).__name__}; only tensors can travel",
                hint="wrap the module in one whose forward takes tensors and sets the rest",
            )
        dtype_name(value.dtype, f"input {name!r}")
    return names, inputs, keywords
