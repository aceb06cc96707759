"""Names of a module's inputs and outputs, and a wrapper that takes inputs by position only."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...base.errors import RegistrationRefused
from ..interface.pytree import Tree, flatten, items_of
from ..running.factories import parameters_of, split_arguments, without_cache
from ..running.values import dtype_name, flatten_outputs, is_tensor


@dataclass(frozen=True)
class Example:
    """Example call of a module: its arguments, and the tensors in them."""

    arguments: dict[str, Any]  # tensors, or containers of tensors, by argument name
    keywords: frozenset[str]  # names of the arguments that are passed by keyword
    takes: Tree  # tree of the arguments over ``names``; None: each argument is a tensor
    names: list[str]  # names of the tensors in requests, in call order
    tensors: list[torch.Tensor]


class Flat(nn.Module):
    """Wrapper for the export that takes and returns flat tensors."""

    def __init__(self, module: nn.Module, example: Example) -> None:
        super().__init__()
        self.module = module
        self._example = example
        self.fixed = without_cache(module)

    def nested(self, inputs: Sequence[torch.Tensor]) -> Any:
        """Return the module's own result, with its nesting."""
        leaves = iter(inputs)
        arguments = _replaced(self._example.arguments, is_tensor, lambda _: next(leaves))
        places, named = split_arguments(arguments, self._example.keywords)
        return self.module(*places, **named, **self.fixed)

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(flatten_outputs(self.nested(inputs)).values())


def _parameter_names(module: nn.Module, count: int) -> list[str]:
    """Return the names of ``forward``'s first inputs, or ``x``, or ``x0``… if they have no names.

    The inputs of ``*args`` and of compiled or traced modules have no names. Torch's own modules,
    like ``Sequential``, name every input ``input``, so ``x`` is used.
    """
    if count == 1 and type(module).__module__.startswith("torch.nn."):
        return ["x"]
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [name for name, one in parameters_of(module).items() if one.kind in kinds][:count]
    if len(names) == count:
        return names
    return ["x"] if count == 1 else [f"x{index}" for index in range(count)]


def _replaced(value: Any, is_leaf: Callable[[Any], bool], make: Callable[[Any], Any]) -> Any:
    """Return a copy of ``value``, of the same classes, with ``make`` applied to each leaf."""
    if is_leaf(value):
        return make(value)
    inner = items_of(value)
    if inner is None:
        return value
    kind, items = inner
    parts = {key: _replaced(item, is_leaf, make) for key, item in items}
    if kind != "dict":
        is_named = hasattr(value, "_fields")
        return type(value)(*parts.values()) if is_named else type(value)(parts.values())
    if isinstance(value, Mapping) and not isinstance(value, MutableMapping):
        return parts
    filled = copy.copy(value)
    for key, item in parts.items():
        if isinstance(filled, MutableMapping):
            filled[key] = item
        else:
            object.__setattr__(filled, key, item)  # also works for a frozen dataclass
    return filled


def _is_array(value: Any) -> bool:
    return type(value).__module__ == "numpy"


def _as_tensors(value: Any) -> Any:
    return _replaced(value, _is_array, lambda array: torch.from_numpy(array.copy()))


def named_inputs(
    module: nn.Module, example_inputs: Any, input_names: Sequence[str] | None
) -> Example:
    """Return the arguments of an example, and the names of their tensors.

    A mapping's text keys are keywords, and its integer keys are positions: ``{0: a, "scale": b}``.

    Raises:
        RegistrationRefused: the example is invalid, names repeat, or a value is not supported.
    """
    example = example_inputs
    if is_tensor(example) or _is_array(example):
        example = {0: example}
    elif isinstance(example, Sequence) and not isinstance(example, str | bytes):
        example = dict(enumerate(example))
    elif not isinstance(example, Mapping):
        raise RegistrationRefused(
            "example inputs",
            f"a {type(example).__name__} is neither a tensor, nor a sequence nor a mapping of them",
        )
    values, places = list(example.values()), [key for key in example if not isinstance(key, str)]
    names = dict(zip(places, _parameter_names(module, len(places)), strict=True))
    roots = list(input_names or (names.get(key, key) for key in example))
    if len(roots) != len(values) or len(set(roots)) != len(roots):
        raise RegistrationRefused("inputs", f"names {', '.join(roots)} for {len(values)} of them")
    values = [_as_tensors(value) for value in values]
    takes, leaves = flatten(dict(zip(roots, values, strict=True)), "input", is_tensor)
    for name, value in leaves.items():
        dtype_name(value.dtype, f"input {name!r}")
    return Example(
        arguments={
            key if isinstance(key, str) else root: value
            for key, root, value in zip(example, roots, values, strict=True)
        },
        keywords=frozenset(key for key in example if isinstance(key, str)),
        takes=takes if list(leaves) != roots else None,
        names=list(leaves),
        tensors=list(leaves.values()),
    )
