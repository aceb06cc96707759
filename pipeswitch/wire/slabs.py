"""Allocator of slabs in the request pool, and in one half of a shared-memory segment. Pure.

A slab is one aligned range of bytes. Best fit keeps large holes whole. A freed slab merges with
its free neighbours at once, so freeing everything leaves one hole. The holes are sorted by offset
and by size, so that no operation scans them: there may be ten thousands.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Final

SLAB_ALIGN_BYTES: Final = 4096  # a page, so that each slab can be pinned or unmapped separately
LAST_HOLES: Final = 64  # holes at the end that ``take(at_end=True)`` looks at, before the best fit


class SlabPool:
    """Allocator of the pool's bytes. Offsets and sizes are bytes.

    Invariants (``check``): holes are sorted and do not touch each other; holes and slabs cover the
    whole pool without overlap.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = self.free_bytes = capacity_bytes - capacity_bytes % SLAB_ALIGN_BYTES
        self._taken: dict[int, int] = {}  # offset -> size
        self._holes: list[tuple[int, int]] = []  # (offset, size), sorted
        self._sizes: list[tuple[int, int]] = []  # (size, offset) of the same holes, sorted
        if self.capacity_bytes:
            self._holes.append((0, self.capacity_bytes))
            self._sizes.append((self.capacity_bytes, 0))

    @property
    def largest_free_bytes(self) -> int:
        return self._sizes[-1][0] if self._sizes else 0

    @property
    def slab_count(self) -> int:
        return len(self._taken)

    def size_of(self, offset_bytes: int) -> int:
        """Return the size of the slab at an offset. Raises KeyError if there is none."""
        return self._taken[offset_bytes]

    def take(self, size_bytes: int, *, at_end: bool = False) -> int | None:
        """Allocate at least ``size_bytes``; return the offset, or None if no hole is large enough.
        ``at_end``: use the end of one of the last holes, if one is large enough."""
        size = -(-max(size_bytes, 1) // SLAB_ALIGN_BYTES) * SLAB_ALIGN_BYTES
        index = bisect_left(self._sizes, (size, 0))
        if index == len(self._sizes):
            return None
        hole_bytes, start = self._sizes[index]
        if at_end:
            last = reversed(self._holes[-LAST_HOLES:])
            start, hole_bytes = next((one for one in last if one[1] >= size), (start, hole_bytes))
            index = bisect_left(self._sizes, (hole_bytes, start))
        rest_bytes, place = hole_bytes - size, bisect_left(self._holes, (start, 0))
        del self._sizes[index], self._holes[place]
        offset, rest_at = (start + rest_bytes, start) if at_end else (start, start + size)
        if rest_bytes:
            self._holes.insert(place, (rest_at, rest_bytes))
            insort(self._sizes, (rest_bytes, rest_at))
        self._taken[offset] = size
        self.free_bytes -= size
        return offset

    def free(self, offset_bytes: int) -> None:
        """Free the slab at an offset. Raises KeyError if there is none."""
        size = self._taken.pop(offset_bytes)
        self.free_bytes += size
        index = bisect_left(self._holes, (offset_bytes, 0))
        start, end = offset_bytes, offset_bytes + size
        if index < len(self._holes) and self._holes[index][0] == end:
            _, hole_bytes = self._holes.pop(index)
            del self._sizes[bisect_left(self._sizes, (hole_bytes, end))]
            end += hole_bytes
        if index and sum(self._holes[index - 1]) == start:
            index -= 1
            start, hole_bytes = self._holes.pop(index)
            del self._sizes[bisect_left(self._sizes, (hole_bytes, start))]
        self._holes.insert(index, (start, end - start))
        insort(self._sizes, (end - start, start))

    def check(self) -> None:
        """Assert the invariants (I3 of docs/architecture.md: free + taken = capacity)."""
        pieces = sorted([*self._holes, *self._taken.items()])
        position = 0
        for offset, size in pieces:
            assert offset == position, f"gap or overlap at {position}"
            assert size > 0
            assert size % SLAB_ALIGN_BYTES == 0
            position += size
        assert position == self.capacity_bytes
        assert self._sizes == sorted((size, offset) for offset, size in self._holes)
        assert self.free_bytes == sum(size for _, size in self._holes)
        ends = {offset + size for offset, size in self._holes}
        assert not ends & {offset for offset, _ in self._holes}, "two holes touch"
