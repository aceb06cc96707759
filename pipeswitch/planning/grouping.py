"""Cutting a program into layer groups (PipeSwitch 4.2, model-aware grouping). Pure.

A *layer* is a run of execution from one first use of weights to just before the next: nothing
between two first uses can start earlier or later, so no cut there could help. A *plan* is the
list of layers at which a group starts: ``bucket`` needs no profile; the
planner (``planning/``), which has measured times, returns the same kind of value.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

DEFAULT_BUCKET_BYTES: Final = 8 << 20  # about 4 % over the optimum without a profile
FIRST_BUCKET_BYTES: Final = 2 << 20  # it decides the time to the first kernel, so it is small

Plan = tuple[int, ...]
"""Indices of the layers that open a group, rising; the first is 0. Empty for no layers."""


def bucket(
    layer_bytes: Sequence[int],
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    first_bytes: int = FIRST_BUCKET_BYTES,
) -> Plan:
    """Group consecutive layers up to a size: the plan that needs no profile.

    A layer larger than its bucket gets a group of its own; layers are never split.

    Args:
        layer_bytes: bytes that each layer is the first to use, in execution order.
        bucket_bytes: a group's size limit in bytes.
        first_bytes: the first group's size limit in bytes.
    """
    if bucket_bytes <= 0 or first_bytes <= 0:
        raise ValueError(f"bucket sizes must be positive, got {bucket_bytes} and {first_bytes}")
    starts: list[int] = []
    filled_bytes = 0
    for index, size_bytes in enumerate(layer_bytes):
        limit_bytes = first_bytes if len(starts) <= 1 else bucket_bytes
        is_full = filled_bytes > 0 and filled_bytes + size_bytes > limit_bytes
        if not starts or is_full:
            starts.append(index)
            filled_bytes = 0
        filled_bytes += size_bytes
    return tuple(starts)


def per_layer(layer_count: int) -> Plan:
    """Each layer a group of its own."""
    return tuple(range(layer_count))


def check_plan(plan: Plan, layer_count: int) -> None:
    """Raise ValueError unless ``plan`` is a plan for ``layer_count`` layers."""
    if not layer_count:
        if plan:
            raise ValueError(f"a program without layers has the empty plan, got {plan}")
        return
    is_rising = all(a < b for a, b in pairwise(plan))
    if not plan or plan[0] != 0 or plan[-1] >= layer_count or not is_rising:
        raise ValueError(f"a plan for {layer_count} layers rises from 0, got {plan[:20]}")


def spans(plan: Plan, layer_count: int) -> tuple[tuple[int, int], ...]:
    """Each group as (first layer, one past the last)."""
    check_plan(plan, layer_count)
    return tuple(zip(plan, (*plan[1:], layer_count), strict=True)) if plan else ()
