"""Cutting a program into layer groups (PipeSwitch 4.2, model-aware grouping). Pure.

A *layer* is a part of a run: it starts where some weights are first used, and ends just before the
next first use. A cut inside a layer gains nothing: the rest of the layer needs no new weights. A
*plan* lists the first layers of all groups. ``bucket`` needs no profile; ``exact.py`` needs one.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

DEFAULT_BUCKET_BYTES: Final = 8 << 20  # makespans are then about 4 % above the optimum
FIRST_BUCKET_BYTES: Final = 2 << 20  # small: the first kernel waits for the first group's copy

Plan = tuple[int, ...]
"""Indices of the first layers of all groups, rising from 0; empty for a program without layers."""


def bucket(
    layer_bytes: Sequence[int],
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    first_bytes: int = FIRST_BUCKET_BYTES,
) -> Plan:
    """Return a plan whose groups have a limited size; this needs no profile.

    A layer larger than its bucket gets a group of its own; layers are never split.

    Args:
        layer_bytes: bytes of weights that each layer is the first to use, in execution order.
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
    """Return the plan with one group for each layer."""
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
    """Return (first layer, one past the last layer) of each group."""
    check_plan(plan, layer_count)
    return tuple(zip(plan, (*plan[1:], layer_count), strict=True)) if plan else ()
