"""Memory layout of a model that is larger than the arena; each of its runs is a pass. Pure.

The model's window (its range of the arena) has two parts. The first part is a ring: when a group
has computed, a later group uses its memory again. The second part keeps the other groups on the
device. Between passes the ring is free, and it borders on any free memory before the window. The
groups that stay are spread over the model: while one of them computes, the link copies later
groups, so a small ring is enough. The first group stays, so a pass begins at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class StagingLayout:
    """Places of a model's groups in its window; tuples have one entry for each group."""

    offsets: tuple[int, ...]  # distance of each group from the window's start, in bytes
    waits: tuple[int, ...]  # number of groups that must have computed before each group's copy
    resident: frozenset[int]  # indices of the groups that stay on the device
    resident_bytes: int  # size of the window's second part, which holds the resident groups
    size_bytes: int  # size of the window


def land(
    sizes_bytes: Sequence[int], until: Sequence[int], window_bytes: int, unit_bytes: int
) -> StagingLayout | None:
    """Return the layout in a window of ``window_bytes``, or None if the window is too small.

    The ring holds at least two groups, so a group can be copied while the previous one computes.

    Args:
        sizes_bytes: size of each group.
        until: for each group, the last group that reads its bytes: itself or a later one.
        unit_bytes: alignment; groups begin and end on its multiples.
    """
    sizes = [-(-size // unit_bytes) * unit_bytes for size in sizes_bytes]
    window_bytes -= window_bytes % unit_bytes
    needed = frozenset(i for i, last in enumerate(until) if last > i + 1)
    least = _least_ring(sizes, until, needed, window_bytes, unit_bytes)
    spare = window_bytes - sum(sizes[index] for index in needed) - least
    if spare < 0:
        return None
    third = max((size for i, size in enumerate(sizes) if i not in needed), default=0)
    spread = _spread(sizes, needed, max(0, spare - third))
    for fixed in (spread, needed):
        resident_bytes = sum(sizes[index] for index in fixed)
        for ring_bytes in (window_bytes - resident_bytes, least):
            ring = _ring(sizes, until, fixed, ring_bytes)
            if ring is not None:
                return _placed(sizes, fixed, resident_bytes, ring, window_bytes)
    raise AssertionError("the least ring was found, and is not found again")


def least_window(
    sizes_bytes: Sequence[int], until: Sequence[int], max_bytes: int, unit_bytes: int
) -> int:
    """Return a small window size that ``land`` accepts; above ``max_bytes`` if there is none."""
    sizes = [-(-size // unit_bytes) * unit_bytes for size in sizes_bytes]
    needed = frozenset(i for i, last in enumerate(until) if last > i + 1)
    least = _least_ring(sizes, until, needed, max_bytes, unit_bytes)
    return sum(sizes[index] for index in needed) + least


Ring = dict[int, tuple[int, int]]  # group in the ring -> (offset, wait)


def _ring(
    sizes: Sequence[int], until: Sequence[int], fixed: frozenset[int], ring_bytes: int
) -> Ring | None:
    """Place the groups one after the other; at the ring's end, continue at its start.
    Return None if a group does not fit, or must wait for itself or for the group before it."""
    lying: list[tuple[int, int, int]] = []  # placed groups: (start, end, last reader)
    ring: Ring = {}
    cursor = 0
    for index, size in enumerate(sizes):
        if index in fixed:
            continue
        start = cursor if cursor + size <= ring_bytes else 0
        cursor = start + size
        if cursor > ring_bytes:
            return None
        below = [last for low, high, last in lying if low < cursor and start < high]
        wait = max(below, default=-1) + 1
        if wait > max(0, index - 1):
            return None
        lying = [one for one in lying if one[1] <= start or one[0] >= cursor]
        lying.append((start, cursor, until[index]))
        ring[index] = (start, wait)
    return ring


def _least_ring(
    sizes: Sequence[int],
    until: Sequence[int],
    fixed: frozenset[int],
    max_bytes: int,
    unit_bytes: int,
) -> int:
    """Return a ring size that suffices for ``_ring``; above ``max_bytes`` if none was found.
    The search starts with the largest two neighbours and grows by 1/16, so it is always short."""
    streams = [size for index, size in enumerate(sizes) if index not in fixed]
    ring_bytes = max(map(sum, pairwise((0, *streams))), default=0)
    while ring_bytes <= max_bytes and _ring(sizes, until, fixed, ring_bytes) is None:
        ring_bytes += max(unit_bytes, ring_bytes // 16 // unit_bytes * unit_bytes)
    return ring_bytes


def _spread(sizes: Sequence[int], needed: frozenset[int], budget_bytes: int) -> frozenset[int]:
    """Return the groups that stay: ``needed``, and others within the budget.
    The others are spread evenly from the first group on; then the earliest that fit are added."""
    total = sum(size for index, size in enumerate(sizes) if index not in needed)
    fixed, resident_bytes, passed_bytes = set(needed), 0, 0
    for only_due in (True, False):
        for index, size in enumerate(sizes):
            if index in fixed:
                continue
            is_due = not only_due or resident_bytes * total <= budget_bytes * passed_bytes
            passed_bytes += size
            if is_due and resident_bytes + size <= budget_bytes:
                fixed.add(index)
                resident_bytes += size
    return frozenset(fixed)


def _placed(
    sizes: Sequence[int], fixed: frozenset[int], resident_bytes: int, ring: Ring, window_bytes: int
) -> StagingLayout:
    offsets, position = [], window_bytes - resident_bytes
    for index, size in enumerate(sizes):
        if index in fixed:
            offsets.append(position)
            position += size
        else:
            offsets.append(ring[index][0])
    waits = tuple(ring[index][1] if index in ring else 0 for index in range(len(sizes)))
    return StagingLayout(tuple(offsets), waits, fixed, resident_bytes, window_bytes)
