"""Models of a device with the same layout, and the bytes in which they differ. Pure.

Such a model may take an idle variant's place: then only what differs is copied (ADR 68).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from operator import attrgetter
from typing import Final

from ...ipc.messages.base import ModelName
from ...ipc.messages.daemon import CopyPart
from ...programs.interface.layout import TENSOR_ALIGN_BYTES, GroupSpec, Manifest, aligned

GAP_BYTES: Final = 64 << 10  # a call to copy takes as long as copying this much
Layout = tuple[str, int, tuple[tuple[int, int], ...]]
Ranges = Sequence[tuple[int, int]]  # starts and ends in the region, ascending
Image = tuple[CopyPart, ...]  # where the host store has a model, ascending; offsets in the region
PLACE: Final = attrgetter("offset_bytes")


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
            ranges = self._ranges[new.digest, old.digest] = difference(new, old)
        return ranges

    def share(self, name: ModelName, other: ModelName) -> float:
        """Return the part of the bytes that ``difference`` has, from 0 to 1."""
        ranges = self.difference(name, other)
        return sum([end - start for start, end in ranges]) / self.members[name].total_bytes


def difference(new: Manifest, old: Manifest) -> Ranges:
    """Return the ranges that turn a region of ``old`` into one of ``new``, of the same layout."""
    ranges: list[tuple[int, int]] = []
    for one, other in zip(new.tensors, old.tensors, strict=True):
        if one.digest != other.digest:
            start, end = one.offset_bytes, one.offset_bytes + one.size_bytes
            if ranges and start - ranges[-1][1] < GAP_BYTES:
                start, _ = ranges.pop()
            ranges.append((start, end))
    return ranges


def parts_of(group: GroupSpec, ranges: Ranges, image: Image) -> tuple[CopyPart, ...]:
    """Return the parts of a group that lie in the ranges. ``image``: where the store has them."""
    first, behind = group.offset_bytes, group.offset_bytes + group.size_bytes
    return tuple(
        [
            CopyPart(source + low - at, low - first, high - low)
            for begin, end in ranges
            if (start := max(begin, first)) < (stop := min(end, behind))
            for source, at, size in image[max(0, bisect_right(image, start, key=PLACE) - 1) :]
            if (low := max(start, at)) < (high := min(stop, at + size))
        ]
    )


def image_of(total_bytes: int, ranges: Ranges, own: int, shared: int) -> Image:
    """Return where a model lies that has only the ranges at ``own``, one after the other, and all
    else in the place of a variant at ``shared``."""
    parts, done = list[CopyPart](), 0
    for start, end in (*ranges, (total_bytes, total_bytes)):
        if done < start:
            parts.append(CopyPart(shared + done, done, start - done))
        if start < end:
            parts.append(CopyPart(own, start, end - start))
        own, done = own + aligned(end - start, TENSOR_ALIGN_BYTES), end
    return tuple(parts)
