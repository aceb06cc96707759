"""Table of batches in the ring and of their subscribers: all decisions about shared input (ADR 32).

A batch's number is the job's step at which its pass began, plus its index in the pass. A subscriber
takes batches with rising numbers. So the ring keeps the batches that a subscriber will need
soonest, and never overwrites a batch that a live subscriber still maps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import msgspec

from ...base.errors import SharedInputRefused

MAX_ENTRIES: Final = 512  # a table of this many entries fits in half of the header
READY: Final = -1
SHARERS_BYTE: Final = 8  # offset in a ring: the controller writes how many jobs share it


class Label(msgspec.Struct, frozen=True):
    """Identity of a batch: its loader, pass and index."""

    loader: str
    begins: tuple[int, int]  # job's step when the pass began, number of earlier passes at that step
    index: int  # index in the pass
    order: str  # hash of the batch's sample indices and of the loader's facts

    @property
    def number(self) -> int:
        return self.begins[0] + self.index

    @property
    def place(self) -> tuple[str, tuple[int, int], int]:
        return self.loader, self.begins, self.index


class Entry(msgspec.Struct):
    """A batch in the ring, or on its way into it."""

    id: int
    label: Label
    job: str  # name of the job that loads or has loaded it
    loading: int = READY  # number of the subscriber that loads or writes it now
    offset_bytes: int = 0
    size_bytes: int = 0  # 0: no place yet


class Row(msgspec.Struct):
    """Position of one subscriber in one loader."""

    subscriber: int
    job: str
    loader: str
    facts: dict[str, str]
    number: int
    held: list[int]  # ids of the entries that the subscriber maps


class BatchTable(msgspec.Struct):
    """State that all subscribers read and write in turn; ``capacity_bytes`` covers all batches."""

    capacity_bytes: int
    last_id: int = 0
    rows: list[Row] = []
    entries: list[Entry] = []

    def subscribers(self) -> set[int]:
        """Return the numbers of all subscribers that have a row or are loading a batch."""
        loading = {entry.loading for entry in self.entries} - {READY}
        return loading | {row.subscriber for row in self.rows}

    def drop(self, subscriber: int) -> None:
        """Remove a subscriber whose process ended. Batches that it finished loading stay."""
        self.rows = [row for row in self.rows if row.subscriber != subscriber]
        self.entries = [entry for entry in self.entries if entry.loading != subscriber]

    def take(
        self, subscriber: int, job: str, label: Label, facts: dict[str, str], own: Sequence[int]
    ) -> Entry:
        """Return the batch's entry; if it is not READY, ``loading`` loads it, perhaps the caller.

        ``own`` are ids of entries that the caller still maps.

        Raises:
            SharedInputRefused: the subscriber's loader differs from that of another subscriber.
        """
        others = [
            row for row in self.rows if row.loader == label.loader and row.subscriber != subscriber
        ]
        same_place = [entry for entry in self.entries if entry.label.place == label.place]
        entry = next((entry for entry in same_place if entry.label.order == label.order), None)
        if others:
            _refuse_others(label, facts, others[0])
            if same_place and entry is None:
                raise differs(label, others[0].job, f"the samples of batch {label.index}")
        self.rows = [
            row for row in self.rows if (row.subscriber, row.loader) != (subscriber, label.loader)
        ]
        row = Row(subscriber, job, label.loader, facts, label.number, list(own))
        self.rows.append(row)
        if entry is None:
            self.last_id += 1
            self.entries.append(entry := Entry(self.last_id, label, job, loading=subscriber))
        elif entry.loading == READY:
            row.held.append(entry.id)
        return entry

    def has_from(self, label: Label) -> bool:
        """Return True if there is a batch that a subscriber at ``label`` may still need."""
        return any(
            entry.label.loader == label.loader and entry.label.number >= label.number
            for entry in self.entries
        )

    def place(self, id: int, size_bytes: int) -> int | None:
        """Return the offset for a loaded batch, and remove the batches that it overwrites.

        Return None, and do not share the batch, if mapped or sooner needed batches take all places.
        """
        new = self.entry(id)
        distance = self._distance(new)
        staying = [entry for entry in self.entries if entry.size_bytes]
        going = sorted(
            (entry for entry in staying if self._may_go(entry, distance)),
            key=lambda entry: (-self._distance(entry), entry.label.number),
        )
        while (offset := self._gap(staying, size_bytes)) is None and going:
            staying.remove(going.pop(0))
        if offset is None:
            self.entries.remove(new)
            return None
        stays = {entry.id for entry in staying}
        self.entries = [e for e in self.entries if not e.size_bytes or e.id in stays]
        new.offset_bytes, new.size_bytes = offset, size_bytes
        return offset

    def done(self, id: int) -> Entry:
        """Mark the batch as written, and as mapped by the subscriber that loaded it."""
        entry = self.entry(id)
        for row in self.rows:
            if (row.subscriber, row.loader) == (entry.loading, entry.label.loader):
                row.held.append(id)
        entry.loading = READY
        return entry

    def abandon(self, id: int) -> None:
        """Remove the entry of a batch that was not loaded, so that a waiting job loads it."""
        self.entries = [entry for entry in self.entries if entry.id != id]

    def entry(self, id: int) -> Entry:
        return next(entry for entry in self.entries if entry.id == id)

    def _may_go(self, entry: Entry, distance: float) -> bool:
        is_held = any(entry.id in row.held for row in self.rows)
        theirs = self._distance(entry)
        is_less_wanted = theirs > distance or theirs == math.inf
        return entry.loading == READY and not is_held and is_less_wanted

    def _distance(self, entry: Entry) -> float:
        """Return in how many batches a subscriber needs this one; infinity if none needs it."""
        number = entry.label.number
        return min(
            (
                number - row.number
                for row in self.rows
                if row.loader == entry.label.loader
                and row.number <= number
                and entry.id not in row.held
                and row.subscriber != entry.loading
            ),
            default=math.inf,
        )

    def _gap(self, staying: Sequence[Entry], size_bytes: int) -> int | None:
        """Return the first offset with enough space between the batches that stay, or None."""
        offset = 0
        for entry in sorted(staying, key=lambda entry: entry.offset_bytes):
            if entry.offset_bytes - offset >= size_bytes:
                break
            offset = entry.offset_bytes + entry.size_bytes
        fits = offset + size_bytes <= self.capacity_bytes and len(staying) < MAX_ENTRIES
        return offset if fits else None


def differs(label: Label, job: str, what: str) -> SharedInputRefused:
    """Return the error for a loader that differs from that of another job."""
    return SharedInputRefused(
        f'the shared input "{label.loader}" differs from the one in job "{job}": {what}',
        hint="give both jobs the same data, order and seed; or this input another name: "
        'job.shared(loader, "other")',
    )


def _refuse_others(label: Label, facts: dict[str, str], other: Row) -> None:
    unlike = [
        f"{name} {value} here, {other.facts.get(name)} there"
        for name, value in facts.items()
        if other.facts.get(name) != value
    ]
    if unlike:
        raise differs(label, other.job, ", ".join(unlike))
