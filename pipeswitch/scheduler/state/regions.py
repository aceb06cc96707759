"""Arithmetic on bytes: owners of ranges in an arena or a store. Pure.

The accounting identity always holds: free + reserved = capacity; a live region has one owner;
regions never overlap (invariant I3).
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from operator import add, attrgetter
from typing import Literal, NamedTuple

from ...programs.interface.layout import aligned


class Owner(NamedTuple):
    """Owner of a range: a model, a streaming model's ring, a job's slice or commit area, fences,
    variants of a model that has left ("shared", by its place).
    The owner of a range that is being zeroed ("scrub") is named by the operation id."""

    kind: Literal["model", "rest", "shared", "slice", "scrub", "commits", "fences"]
    name: str = ""


class Region(NamedTuple):
    """A reserved range, in bytes from the start."""

    offset_bytes: int
    size_bytes: int
    owner: Owner

    @property
    def end_bytes(self) -> int:
        return self.offset_bytes + self.size_bytes


Cost = tuple[float, ...]  # compared as a tuple; empty: nothing is evicted
Costs = Sequence[Cost | None]  # cost of each region, in order; None: its owner must stay


@dataclass(frozen=True)
class Extent:
    """A place where a region would fit if its victims, the regions there, left."""

    offset_bytes: int
    victims: tuple[Region, ...]
    cost: Cost


BEGIN = attrgetter("offset_bytes")


def _plus(one: Cost, other: Cost) -> Cost:
    """Return the sum of two costs, element by element; the shorter one is extended with zeros."""
    if len(one) == len(other):
        return tuple(map(add, one, other))
    return tuple(a + b for a, b in zip_longest(one, other, fillvalue=0.0))


def _total(costs: Iterable[Cost | None]) -> Cost | None:
    """Return the sum of the costs; None if one of the owners must stay."""
    total: Cost = ()
    for cost in costs:
        if cost is None:
            return None
        total = _plus(total, cost) if total else cost
    return total


class RegionAllocator:
    """A ledger of one contiguous range of bytes.

    Sizes are rounded up to ``align_bytes`` and offsets are multiples of it.
    """

    def __init__(self, capacity_bytes: int, align_bytes: int) -> None:
        if capacity_bytes < 0 or align_bytes <= 0:
            raise ValueError(f"capacity {capacity_bytes} and alignment {align_bytes} make no arena")
        self.capacity_bytes = capacity_bytes - capacity_bytes % align_bytes
        self.align_bytes = align_bytes
        self._regions: list[Region] = []  # sorted by offset
        self._by_owner: dict[Owner, Region] = {}
        self._reserved_bytes = 0
        self.withheld_bytes = 0  # part of the capacity that is used outside this range

    def __iter__(self) -> Iterator[Region]:
        return iter(self._regions)

    def __len__(self) -> int:
        return len(self._regions)

    def get(self, owner: Owner) -> Region | None:
        """Return the owner's region, if it has one."""
        return self._by_owner.get(owner)

    @property
    def free_bytes(self) -> int:
        return self.capacity_bytes - self._reserved_bytes - self.withheld_bytes

    @property
    def largest_free_bytes(self) -> int:
        """Size of the longest hole, limited by the free bytes."""
        longest = max((end - start for start, end in self._holes()), default=0)
        return min(longest, self.free_bytes)

    def _holes(self) -> Iterator[tuple[int, int]]:
        cursor = 0
        for region in self._regions:
            if region.offset_bytes > cursor:
                yield cursor, region.offset_bytes
            cursor = region.end_bytes
        if cursor < self.capacity_bytes:
            yield cursor, self.capacity_bytes

    def largest_hole(self, without: Owner) -> tuple[int, int]:
        """Return size and offset of the longest hole, as if the region of ``without`` were free."""
        cursor, largest = 0, (0, 0)
        for region in (*self._regions, Region(self.capacity_bytes, 0, without)):
            if region.owner != without or not region.size_bytes:
                largest = max(largest, (region.offset_bytes - cursor, -cursor))
                cursor = region.end_bytes
        return largest[0], -largest[1]

    def overlapping(self, offset_bytes: int, size_bytes: int) -> list[Region]:
        """Return the regions that share a byte with the range, in order."""
        first, behind = self._places(offset_bytes, size_bytes)
        return self._regions[first:behind]

    def _places(self, offset_bytes: int, size_bytes: int) -> tuple[int, int]:
        """Return the index of the first overlapping region, and the index after the last one."""
        regions, end = self._regions, offset_bytes + size_bytes
        first = bisect.bisect_left(regions, offset_bytes, key=BEGIN)
        if first and regions[first - 1].end_bytes > offset_bytes:
            first -= 1
        return first, bisect.bisect_left(regions, end, first, key=BEGIN)

    def reserve(self, owner: Owner, size_bytes: int, at_bytes: int | None = None) -> Region | None:
        """Take a range for ``owner``: at ``at_bytes``, else in the smallest hole that fits.

        Returns:
            The new region; None if it does not fit there now, and nothing has changed.

        Raises:
            ValueError: the owner already holds a region, or the size is not positive.
        """
        if owner in self._by_owner:
            raise ValueError(f"{owner} already holds a region")
        size = aligned(size_bytes, self.align_bytes)
        if size <= 0:
            raise ValueError(f"{owner} asks for {size_bytes} bytes")
        if self._reserved_bytes + self.withheld_bytes + size > self.capacity_bytes:
            return None
        offset = self._best_fit(size) if at_bytes is None else at_bytes
        if offset is None or offset % self.align_bytes or offset < 0:
            return None
        if offset + size > self.capacity_bytes or self.overlapping(offset, size):
            return None
        region = Region(offset, size, owner)
        bisect.insort(self._regions, region)
        self._by_owner[owner] = region
        self._reserved_bytes += size
        return region

    def _best_fit(self, size: int) -> int | None:
        fitting = [(end - start, start) for start, end in self._holes() if end - start >= size]
        return min(fitting)[1] if fitting else None

    def release(self, owner: Owner) -> Region:
        """Release the owner's range.

        Raises:
            KeyError: the owner has no range.
        """
        region = self._by_owner.pop(owner)
        del self._regions[bisect.bisect_left(self._regions, region)]
        self._reserved_bytes -= region.size_bytes
        return region

    def clear(self) -> None:
        """Drop every region, because the memory itself is lost."""
        self._regions.clear()
        self._by_owner.clear()
        self._reserved_bytes = 0

    def cheapest_window(self, size_bytes: int, costs: Costs) -> Extent | None:
        """Return the place for a region at which the evicted owners cost least in total.

        Candidates start where a region ends: any other window can slide down to such a place
        without touching another owner. Ties go to the lower offset.
        """
        size = aligned(size_bytes, self.align_bytes)
        regions, last_start = self._regions, self.capacity_bytes - size
        begins = [*map(BEGIN, regions), self.capacity_bytes]
        best: tuple[Cost, int, int, int] | None = None  # cost, start, range of victims' indices
        start = behind = 0
        for first in range(len(begins)):
            if first:
                start, length, _ = regions[first - 1]
                start += length
            if start > last_start or (best is not None and not best[0]):
                break
            while begins[behind] < start + size:
                behind += 1
            total = costs[first] if behind == first + 1 else _total(costs[first:behind])
            if total is not None and (best is None or total < best[0]):
                best = (total, start, first, behind)
        if best is None:
            return None
        total, start, first, behind = best
        return Extent(start, tuple(regions[first:behind]), total)

    def last_window(self, size_bytes: int, costs: Costs) -> Extent | None:
        """Return the highest place where a region fits, at any cost of its victims.

        Candidates end where a region begins: a window can be slid up to such a place.
        """
        for end_bytes in (self.capacity_bytes, *map(BEGIN, reversed(self._regions))):
            start = end_bytes - aligned(size_bytes, self.align_bytes)
            window = self.window_at(start, size_bytes, costs)
            if window is not None:
                return window
        return None

    def window_at(self, offset_bytes: int, size_bytes: int, costs: Costs) -> Extent | None:
        """Return the window at exactly this offset; None if an owner there must stay."""
        size = aligned(size_bytes, self.align_bytes)
        if offset_bytes < 0 or offset_bytes + size > self.capacity_bytes:
            return None
        first, behind = self._places(offset_bytes, size)
        total = _total(costs[first:behind])
        if total is None:
            return None
        return Extent(offset_bytes, tuple(self._regions[first:behind]), total)

    def check(self) -> None:
        """Assert the accounting identity and that no two regions overlap."""
        cursor = 0
        for region in self._regions:
            assert region.offset_bytes >= cursor, f"{region} overlaps its neighbour"
            assert region.offset_bytes % self.align_bytes == 0, f"{region} is not aligned"
            assert self._by_owner[region.owner] is region, f"{region} has another owner"
            cursor = region.end_bytes
        assert cursor <= self.capacity_bytes, "a region ends beyond the capacity"
        reserved = sum(region.size_bytes for region in self._regions)
        assert reserved == self._reserved_bytes, f"{reserved} != {self._reserved_bytes}"
        assert 0 <= self.withheld_bytes <= self.capacity_bytes - reserved, self.withheld_bytes
        assert len(self._by_owner) == len(self._regions), "an owner without a region"
