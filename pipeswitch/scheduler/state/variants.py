"""Models of a device with the same layout, and the bytes in which they differ. Pure.

Such a model may take an idle variant's place: then only what differs is copied (ADR 68).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from operator import attrgetter, itemgetter
from typing import Final

from msgspec import structs

from ...ipc.messages.base import ModelName
from ...ipc.messages.daemon import CopyPart
from ...programs.interface.layout import TENSOR_ALIGN_BYTES, GroupSpec, Manifest, aligned

GAP_BYTES: Final = 64 << 10  # a call to copy takes as long as copying this much
MAX_RANGES: Final = 256  # maximum number of ranges in which two models differ
MAX_PAIRS: Final = 256  # number of pairs of a family whose ranges are kept
Layout = tuple[str, int, tuple[tuple[int, int], ...]]
Ranges = Sequence[tuple[int, int]]  # starts and ends in the region, ascending
Lent = Sequence[tuple[int, str]]  # tensors of a place that its user does not share: index, digest
Image = tuple[CopyPart, ...]  # where the host store has a model, ascending; offsets in the region
PLACE: Final = attrgetter("offset_bytes")
START, END = itemgetter(0), itemgetter(1)


def layout_of(tenant: str, manifest: Manifest) -> Layout | None:
    """Return a key that models of a tenant share if their tensors lie at the same places.

    None: it has no bytes, or an earlier release built it, without digests of tensors.
    """
    tensors = manifest.tensors
    if not manifest.total_bytes or not all(one.digest for one in tensors):
        return None
    places = tuple([(one.offset_bytes, one.size_bytes) for one in tensors])
    return tenant, manifest.total_bytes, places


def with_digests(manifest: Manifest, digests: Mapping[int, str]) -> Manifest:
    """Return a manifest whose tensors with these indices have other digests."""
    pairs = [(one, digests.get(at, one.digest)) for at, one in enumerate(manifest.tensors)]
    tensors = tuple([structs.replace(one, digest=digest) for one, digest in pairs])
    return structs.replace(manifest, tensors=tensors)


class Family:
    """Variants: models with one layout. It keeps the ranges in which two of them differ."""

    def __init__(self) -> None:
        self.members: dict[ModelName, Manifest] = {}
        self._ranges: dict[tuple[str, str], tuple[Ranges, float]] = {}  # the newest pairs

    def remove(self, name: ModelName) -> None:
        digest = self.members.pop(name).digest
        self._ranges = {pair: one for pair, one in self._ranges.items() if digest not in pair}

    def _of(self, name: ModelName, other: ModelName) -> tuple[Ranges, float]:
        new, old = self.members[name], self.members[other]
        if (known := self._ranges.get(pair := (new.digest, old.digest))) is None:
            ranges = difference(new, old)
            share = sum([end - start for start, end in ranges]) / new.total_bytes
            if len(self._ranges) >= MAX_PAIRS:
                del self._ranges[next(iter(self._ranges))]
            known = self._ranges[pair] = ranges, share
        return known

    def difference(self, name: ModelName, other: ModelName) -> Ranges:
        """Return the ranges that turn the other model's region into this model's."""
        return self._of(name, other)[0]

    def share(self, name: ModelName, other: ModelName) -> float:
        """Return the part of the bytes that ``difference`` has, from 0 to 1."""
        return self._of(name, other)[1]


def difference(new: Manifest, old: Manifest) -> Ranges:
    """Return the ranges that turn a region of ``old`` into one of ``new``, of the same layout.
    They are few, since the scheduler's loop walks through them for each copy."""
    gap_bytes, ranges = GAP_BYTES, list[tuple[int, int]]()
    for one, other in zip(new.tensors, old.tensors, strict=True):
        if one.digest != other.digest:
            ranges.append((one.offset_bytes, one.offset_bytes + one.size_bytes))
    ranges = _joined(ranges, gap_bytes)
    while len(ranges) > MAX_RANGES:
        gap_bytes *= 2
        ranges = _joined(ranges, gap_bytes)
    return ranges


def _joined(ranges: Ranges, gap_bytes: int) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    for start, end in ranges:
        if joined and start - joined[-1][1] < gap_bytes:
            start, _ = joined.pop()
        joined.append((start, end))
    return joined


def parts_of(group: GroupSpec, ranges: Ranges, image: Image) -> tuple[CopyPart, ...]:
    """Return the parts of a group that lie in the ranges. ``image``: where the store has them."""
    first, behind = group.offset_bytes, group.offset_bytes + group.size_bytes
    return tuple(
        [
            CopyPart(source + low - at, low - first, high - low)
            for begin, end in ranges[
                bisect_right(ranges, first, key=END) : bisect_left(ranges, behind, key=START)
            ]
            if (start := max(begin, first)) < (stop := min(end, behind))
            for source, at, size in image[
                max(0, bisect_right(image, start, key=PLACE) - 1) : bisect_left(
                    image, stop, key=PLACE
                )
            ]
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
