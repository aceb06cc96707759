"""Models of a device with one layout, and the bytes in which they differ. Pure.

Such a model may take an idle variant's place: then only what differs is copied (ADR 68).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ...ipc.messages.base import ModelName
from ...ipc.messages.daemon import CopyPart
from ...programs.interface.layout import GroupSpec, Manifest

GAP_BYTES: Final = 64 << 10  # a call to copy takes as long as copying this much
Layout = tuple[str, int, tuple[tuple[int, int], ...]]
Ranges = Sequence[tuple[int, int]]  # starts and ends in the region, ascending


def layout_of(tenant: str, manifest: Manifest) -> Layout | None:
    """Return a key that models of a tenant share if their tensors lie at the same places.

    None: an earlier release built the program, without the digests that tell its tensors apart.
    """
    tensors = manifest.tensors
    if not tensors or not all(one.digest for one in tensors):
        return None
    places = tuple([(one.offset_bytes, one.size_bytes) for one in tensors])
    return tenant, manifest.total_bytes, places


class Family:
    """Variants: models with one layout. It keeps the ranges in which two of them differ."""

    def __init__(self) -> None:
        self.members: dict[ModelName, Manifest] = {}
        self._ranges: dict[tuple[str, str], Ranges] = {}

    def remove(self, name: ModelName) -> None:
        digest = self.members.pop(name).digest
        self._ranges = {pair: one for pair, one in self._ranges.items() if digest not in pair}

    def difference(self, name: ModelName, other: ModelName) -> Ranges:
        """Return the ranges that turn the other model's region into this model's."""
        new, old = self.members[name], self.members[other]
        ranges = self._ranges.get((new.digest, old.digest))
        if ranges is None:
            ranges = self._ranges[new.digest, old.digest] = _difference(new, old)
        return ranges

    def share(self, name: ModelName, other: ModelName) -> float:
        """Return the part of the bytes that ``difference`` has, from 0 to 1."""
        ranges = self.difference(name, other)
        return sum([end - start for start, end in ranges]) / self.members[name].total_bytes


def _difference(new: Manifest, old: Manifest) -> Ranges:
    ranges: list[tuple[int, int]] = []
    for one, other in zip(new.tensors, old.tensors, strict=True):
        if one.digest != other.digest:
            start, end = one.offset_bytes, one.offset_bytes + one.size_bytes
            if ranges and start - ranges[-1][1] < GAP_BYTES:
                start, _ = ranges.pop()
            ranges.append((start, end))
    return ranges


def parts_of(group: GroupSpec, ranges: Ranges, store_offset_bytes: int) -> tuple[CopyPart, ...]:
    """Return the parts of a group that lie in the ranges."""
    first, behind = group.offset_bytes, group.offset_bytes + group.size_bytes
    return tuple(
        [
            CopyPart(store_offset_bytes + low, low - first, high - low)
            for start, end in ranges
            if (low := max(start, first)) < (high := min(end, behind))
        ]
    )
