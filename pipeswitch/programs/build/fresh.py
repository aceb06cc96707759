"""A module as it was before its first call: what a call leaves in it shows against that.

A module that keeps something of a call (a cache, a hidden state, the scale of the first data) has
no one answer to a request. Two runs on the same inputs may well agree, and a graph that is traced
after them holds what they left as a constant.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ...errors import RegistrationRefused
from .checking import all_same, on_clones, program_on_cpu

if TYPE_CHECKING:
    from .encoder import Program


class Fresh:
    """Runs a module each time as it is now, whatever it keeps by then."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._then = _copied([(child, vars(child)) for child in module.modules()], {})

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        now = [(child, vars(child)) for child, _ in self._then]
        try:
            for child, kept in _copied(self._then, {}):
                object.__setattr__(child, "__dict__", kept)  # a module's own looks at what it sets
            return list(self._module(*inputs))
        finally:
            for child, kept in now:
                object.__setattr__(child, "__dict__", kept)


def _copied(value: Any, copies: dict[int, Any]) -> Any:
    """Containers and tensors anew, each once; parameters and other objects as they are.

    Weights that a run writes into are found by their bytes, and are too large to be kept twice.
    """
    if id(value) in copies:
        return copies[id(value)]
    if isinstance(value, torch.Tensor):
        found: Any = value if isinstance(value, nn.Parameter) else value.detach().clone()
        copies[id(value)] = found
    elif type(value) is tuple:
        found = tuple(_copied(item, copies) for item in value)
    elif isinstance(value, dict):
        found = copies[id(value)] = copy.copy(value)
        for key, item in value.items():
            found[key] = _copied(item, copies)
    elif isinstance(value, list | deque):
        found = copies[id(value)] = copy.copy(value)
        for index, item in enumerate(value):
            found[index] = _copied(item, copies)
    else:
        found = copy.copy(value) if isinstance(value, set) else value
    return found


def check_keeps_nothing(program: Program, fresh: Fresh, inputs: Sequence[torch.Tensor]) -> None:
    """Compare the program with the module as it was, on values that it was not traced with.

    Raises:
        RegistrationRefused: they differ.
    """
    others = [_other_values(value) for value in inputs]
    try:
        # The program first: the module's run may write the weights that both have.
        found = on_clones(program_on_cpu(program.graph, program.weights), others)
        expected = on_clones(fresh, others)
    except Exception:  # values that the module's code, or an index, does not take
        return
    if not all_same(expected, found) and all(value.device.type == "cpu" for value in expected):
        raise RegistrationRefused(
            "module",
            "its answers to other values than the example's differ from its exported graph's: it "
            "keeps state between calls",
            hint="make forward depend on its inputs and weights alone; if the first call sets "
            "something for good, call the module before you register it",
        )


def _other_values(value: torch.Tensor) -> torch.Tensor:
    """The same values in other places, and, where they may have fractions, halves of them."""
    moved = value.flatten().roll(1).reshape(value.shape)
    return moved * 0.5 if value.is_floating_point() else moved
