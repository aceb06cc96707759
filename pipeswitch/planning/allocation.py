"""Sharing a byte budget among many models' prefixes: a knapsack with one choice per model. Pure."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np

CELLS: Final = 2048  # a hundred models of a hundred layers take a fraction of a second

Option = tuple[int, float]
"""(bytes kept, value); a model's options rise in both and begin with (0, 0.0)."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """Which option each model got.

    Attributes:
        choices: index of each model's option.
        used_bytes: of all of them.
        value: of all of them.
        most_value: what no allocation exceeds (a model may keep a part of a step in it); the
            best one lies between ``value`` and this.
    """

    choices: tuple[int, ...]
    used_bytes: int
    value: float
    most_value: float


def allocate(models: Sequence[Sequence[Option]], budget_bytes: int) -> Allocation:
    """Choose one option per model within the budget, for the most value.

    A knapsack, solved in cells of ``budget / CELLS`` bytes: exact where a cell is one byte, else
    never worse than the best allocation of a budget that is smaller by one cell per model.
    Taking steps by value per byte, which loses a quarter of the value in bad cases with few
    models, is only the second opinion; its bound, ``most_value``, tells how far off the answer
    can be at most.
    """
    for options in models:
        _check(options)
    by_density, most_value = _by_density(models, budget_bytes)
    candidates = [_by_cells(models, budget_bytes), by_density]
    for choices in candidates:
        _fill(models, choices, budget_bytes)
    choices = max(candidates, key=lambda choices: _value(models, choices))
    value = _value(models, choices)
    return Allocation(tuple(choices), _used_bytes(models, choices), value, max(value, most_value))


def _check(options: Sequence[Option]) -> None:
    if not options or options[0] != (0, 0.0):
        raise ValueError("a model's options begin with keeping nothing, (0, 0.0)")
    for (size_bytes, value), (next_bytes, next_value) in pairwise(options):
        if next_bytes < size_bytes or next_value < value:
            raise ValueError("a model's options rise in bytes and in value")


def _by_cells(models: Sequence[Sequence[Option]], budget_bytes: int) -> list[int]:
    """The best choices when each option's bytes are rounded up to whole cells."""
    cell_bytes = max(1, -(-budget_bytes // CELLS))
    cells = budget_bytes // cell_bytes
    best = np.zeros(cells + 1)  # value by cells that may be used, for the models so far
    chosen: list[np.ndarray[Any, np.dtype[np.int64]]] = []
    for options in models:
        after, picks = best.copy(), np.zeros(cells + 1, dtype=np.int64)
        for option, (size_bytes, value) in enumerate(options):
            used = -(-size_bytes // cell_bytes)
            if used > cells:
                break
            offered = best[: cells + 1 - used] + value
            is_better = offered > after[used:]
            after[used:][is_better] = offered[is_better]
            picks[used:][is_better] = option
        best = after
        chosen.append(picks)
    choices: list[int] = []
    left = cells
    for options, picks in zip(reversed(models), reversed(chosen), strict=True):
        choices.append(int(picks[left]))
        left += -options[choices[-1]][0] // cell_bytes
    return choices[::-1]


@dataclass(frozen=True, slots=True)
class _Step:
    """From one corner of a model's hull to the next."""

    value_per_byte: float
    model: int
    option: int  # after it
    size_bytes: int
    gain: float


def _by_density(models: Sequence[Sequence[Option]], budget_bytes: int) -> tuple[list[int], float]:
    """The choices, and the value were the first step that does not fit taken in part."""
    steps = [
        step
        for model, options in enumerate(models)
        for step in _hull_steps(model, options, budget_bytes)
    ]
    steps.sort(key=lambda step: -step.value_per_byte)  # a model's own steps stay in order
    choices, closed = [0] * len(models), set[int]()
    left_bytes, value, most_value = budget_bytes, 0.0, None
    for step in steps:
        if step.size_bytes > left_bytes and most_value is None:
            most_value = value + step.value_per_byte * left_bytes
        if step.model in closed or step.size_bytes > left_bytes:
            closed.add(step.model)
            continue
        choices[step.model] = step.option
        left_bytes -= step.size_bytes
        value += step.gain
    return choices, value if most_value is None else most_value


def _hull_steps(model: int, options: Sequence[Option], budget_bytes: int) -> list[_Step]:
    """Steps of falling value per byte that together lie above all options."""
    steps: list[_Step] = []
    start_bytes, start_value = 0, 0.0
    for option, (size_bytes, value) in enumerate(options):
        if size_bytes > budget_bytes or value <= start_value:
            continue
        step = _step(model, option, size_bytes - start_bytes, value - start_value)
        while steps and steps[-1].value_per_byte <= step.value_per_byte:
            last = steps.pop()
            step = _step(model, option, last.size_bytes + step.size_bytes, last.gain + step.gain)
        steps.append(step)
        start_bytes, start_value = size_bytes, value
    return steps


def _step(model: int, option: int, size_bytes: int, gain: float) -> _Step:
    per_byte = gain / size_bytes if size_bytes else math.inf
    return _Step(per_byte, model, option, size_bytes, gain)


def _fill(models: Sequence[Sequence[Option]], choices: list[int], budget_bytes: int) -> None:
    """Use what is left: the change of one model that gains most, until none gains."""
    while True:
        left_bytes = budget_bytes - _used_bytes(models, choices)
        gain, model, option = _best_change(models, choices, left_bytes)
        if gain <= 0:
            return
        choices[model] = option


def _best_change(
    models: Sequence[Sequence[Option]], choices: Sequence[int], left_bytes: int
) -> tuple[float, int, int]:
    """(gain, model, option): of all changes that need at most ``left_bytes`` more."""
    best = (0.0, 0, 0)
    for model, (options, chosen) in enumerate(zip(models, choices, strict=True)):
        size_bytes, value = options[chosen]
        # Options rise in both, so the largest that fits is worth most.
        largest = bisect_right(options, (size_bytes + left_bytes, math.inf)) - 1
        best = max(best, (options[largest][1] - value, model, largest))
    return best


def _used_bytes(models: Sequence[Sequence[Option]], choices: Sequence[int]) -> int:
    return sum(options[chosen][0] for options, chosen in zip(models, choices, strict=True))


def _value(models: Sequence[Sequence[Option]], choices: Sequence[int]) -> float:
    return sum(options[chosen][1] for options, chosen in zip(models, choices, strict=True))
