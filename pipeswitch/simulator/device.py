"""The device's memory: what lies where, who may write there (I4), and whose turn it is."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ..ipc.messages import Epoch, GroupCopy, ModelName, RunInference, TransmitModel
from .programs import Program
from .violation import require

WORD_BYTES = 4


class Span(NamedTuple):
    """A range of bytes."""

    start: int
    end: int

    def overlaps(self, other: Span) -> bool:
        return self.start < other.end and other.start < self.end


User = tuple[str, Span]  # who reads or writes now, for a sentence

NOWHERE = Span(0, 0)


class Device:
    """Bytes of models and slices, arrival words, and the two words of the board."""

    def __init__(self) -> None:
        self.turn = 0
        self.stop_words: dict[int, int] = {}  # of trials, by slot
        self.clear()

    def clear(self) -> None:
        """The memory is gone with the daemon that owned it."""
        self.words: dict[int, int] = {}
        self.contents: dict[ModelName, TransmitModel] = {}  # what lies there, or is on its way
        self.intact: dict[ModelName, Span] = {}  # what of a last complete copy is still there
        self.cancelled: set[Epoch] = set()  # copies that may end before all has arrived
        self.dirty: list[Span] = []  # a dead job's bytes, not zeroed yet

    def claim(self, span: Span, why: str, users: Iterable[User]) -> None:
        """A range gets a new owner: nothing alive may use it, and what lay there is gone."""
        for owner, other in users:
            require(not span.overlaps(other), f"{why} overlaps {owner} (I4)")
        for dirty in self.dirty:
            require(not span.overlaps(dirty), f"{why} overlaps a slice that is not zeroed (I4)")
        self.contents = {
            name: held for name, held in self.contents.items() if not span.overlaps(region_of(held))
        }
        for name, held in list(self.intact.items()):
            if held.overlaps(span):
                self.intact[name] = Span(held.start, min(held.end, max(held.start, span.start)))

    def send(
        self, order: TransmitModel, program: Program, word_count: int, users: Iterable[User]
    ) -> None:
        """A model's copy is ordered: what is not sent again must lie there."""
        start = order.arena_offset_bytes
        require(start >= word_count * WORD_BYTES, "a model over the arrival words")
        intact = self.intact.get(order.model, NOWHERE)
        for group in kept_groups(order):
            end = group.arena_offset_bytes + _true_size(order, group, program)
            require(
                intact.start == start and end <= intact.end,
                f"{order.model}: group at {group.arena_offset_bytes} is not there, and not sent",
            )
        self.claim(region_of(order), f"the copy of {order.model}", users)
        self.intact.pop(order.model, None)
        self.contents[order.model] = order

    def arrived(self, order: TransmitModel, group: GroupCopy) -> None:
        """A group's bytes are there, then its word."""
        self.words[group.word] = order.epoch

    def completed(self, order: TransmitModel) -> None:
        """All groups are there."""
        if self.contents.get(order.model) is order:
            self.intact[order.model] = region_of(order)

    def has_arrived(self, order: RunInference, group: int) -> bool:
        return self.words.get(order.first_word + group) == order.residency_epoch

    def check_order(self, order: RunInference, group_count: int) -> None:
        """A worker is sent to a model: it lies there, or is on its way, as the order says."""
        sent = self.contents.get(order.model)
        require(sent is not None, f"{order.model} does not lie in the arena")
        assert sent is not None
        require(sent.epoch == order.residency_epoch, f"stale epoch for {order.model}")
        is_whole = order.model in self.intact or sent.epoch not in self.cancelled
        require(is_whole, f"the copy of {order.model} was cancelled")
        require(sent.arena_offset_bytes == order.arena_offset_bytes, "another region")
        require(sent.groups[0].word == order.first_word, "other arrival words")
        require(len(sent.groups) == group_count, "it was sent in other groups")

    def check_read(self, order: RunInference) -> None:
        """A worker computes with a group: the model is still there."""
        sent = self.contents.get(order.model)
        is_there = sent is not None and sent.epoch == order.residency_epoch
        require(is_there, f"{order.model} is read after its eviction (I4)")


def region_of(order: TransmitModel) -> Span:
    start = order.arena_offset_bytes
    return Span(start, start + order.region_bytes)


def kept_groups(order: TransmitModel) -> list[GroupCopy]:
    """Those that are not sent again."""
    return [group for group in order.groups if not group.size_bytes]


def _true_size(order: TransmitModel, group: GroupCopy, program: Program) -> int:
    """Bytes of a group whose order says 0: up to where the next one begins."""
    begins = sorted(g.arena_offset_bytes for g in order.groups)
    begins.append(order.arena_offset_bytes + program.manifest.total_bytes)
    return begins[begins.index(group.arena_offset_bytes) + 1] - group.arena_offset_bytes
