"""Device memory: what lies where, who may write and who reads it (invariant I4)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pipeswitch.ipc.messages import LeaseGranted, RunInference, Scrub, TransmitModel
from pipeswitch.simulator.violation import Violation, require

from .channel import Data, unpack
from .daemon import Copies, Copy
from .frozen import Add, Next
from .process import Process

Image = tuple[int, int, int]
ZEROS: Image = (0, 0, 0)


class Arena:
    """The bytes of models and slices, the arrival words, and the turn on the board.

    Its values are replaced, never changed: states share them.
    """

    def __init__(self, world: Any) -> None:
        self._world = world
        self.clear()
        self.turn = 0  # the board's word

    def clear(self) -> None:
        """A new memory daemon has taken new memory."""
        self.words: dict[int, int] = {}
        self.contents: Copies = ()  # what was sent to the arena and not overwritten
        self.work: dict[int, Image] = {}  # slices that are not zeros, by offset

    def freeze(self, e: Add) -> Any:
        """All of it as plain values."""
        e(-self.turn)
        words = sorted(self.words.items())
        for _, epoch in words:
            e(epoch)
        for copy in self.contents:
            e(copy.epoch)
        return (
            tuple([word for word, _ in words]),
            tuple([(c.model, c.start, c.end, c.first_word, c.groups, c.done)
                   for c in self.contents]),
            tuple(sorted(self.work.items())),
        )  # fmt: skip

    def thaw(self, frozen: Any, n: Next) -> None:
        """As it was when it was frozen."""
        words, contents, work = frozen
        self.turn = n()
        self.words = {word: n() for word in words}
        self.contents = tuple([
            Copy(model, n(), start, end, first, groups, done)  # type: ignore[arg-type]
            for model, start, end, first, groups, done in contents
        ])  # fmt: skip
        self.work = dict(work)

    def set(self, other: Arena) -> None:
        """Become equal to another one."""
        self.turn, self.words = other.turn, other.words
        self.contents, self.work = other.contents, other.work

    # -- who may write -------------------------------------------------------------------------

    def claim(self, start: int, end: int, who: str, *, scrubs: bool = False) -> None:
        """A range gets a new writer: nobody alive may still use it."""
        for process in self._world.processes.values():
            if process.lease and _overlap(process.lease, start, end):
                raise Violation(f"{who} overlaps the slice of living worker {process.slot} (I4)")
            for order in process.readable_epochs:
                if order.arena_offset_bytes < end and start < (
                    order.arena_offset_bytes + self._world.scope.model_bytes
                ):
                    raise Violation(
                        f"{who} overwrites {order.model}, which worker {process.slot} reads (I4)"
                    )
        for copy in self._world.daemon.copies:
            if copy.start < end and start < copy.end:
                raise Violation(f"{who} overlaps the copy of {copy.model} under way (I4)")
        if scrubs:
            return
        for item in self._world.daemon.lane:
            order = unpack(item)
            offset = getattr(order, "slice_offset_bytes", getattr(order, "offset_bytes", 0))
            if _overlap((offset, self._world.scope.slice_bytes), start, end):
                raise Violation(f"{who} overlaps a {item[0]} that is not done (I4)")

    def leased(self, process: Process, message: LeaseGranted) -> None:
        """A slice is promised to a worker."""
        lease = (message.offset_bytes, message.size_bytes)
        if process.lease != lease:
            self.claim(lease[0], sum(lease), f"the slice of worker {process.slot}")
            process.lease = Data(lease)

    def is_sent(self, message: TransmitModel) -> None:
        """A model's copy is ordered."""
        start = message.arena_offset_bytes
        end = start + message.region_bytes
        self.claim(start, end, f"the copy of {message.model}")
        kept = [c for c in self.contents if c.end <= start or end <= c.start]
        first = message.groups[0].word
        self.contents = (
            *kept, Copy(message.model, message.epoch, start, end, first, len(message.groups)),
        )  # fmt: skip

    # -- models --------------------------------------------------------------------------------

    def check_order(self, order: RunInference) -> None:
        """Whoever is sent to a model finds it there, or on its way."""
        place = (order.residency_epoch, order.arena_offset_bytes, order.first_word)
        is_right = any(
            c.model == order.model and (c.epoch, c.start, c.first_word) == place
            for c in self.contents
        )
        require(is_right, f"worker is sent to {order.model}, which does not lie there")

    def arrives(self, copy: Copy, group: int) -> None:
        """A group's bytes are in the arena, then its word."""
        self.contents = tuple([
            replace(held, done=group + 1) if held.epoch == copy.epoch else held
            for held in self.contents
        ])  # fmt: skip
        self.words = {**self.words, copy.first_word + group: copy.epoch}

    def reads(self, process: Process, order: RunInference, group: int) -> None:
        """A worker computes with a group: it must be there."""
        is_there = any(
            held.model == order.model and held.epoch == order.residency_epoch and held.done > group
            for held in self.contents
        )
        require(is_there, f"worker {process.slot} computes with bytes that are not there (I4)")

    # -- slices --------------------------------------------------------------------------------

    def bytes_at(self, offset: int) -> Image:
        return self.work.get(offset, ZEROS)

    def slice_of(self, process: Process) -> Image:
        return self.bytes_at(process.lease[0])

    def bind(self, process: Process) -> None:
        """The script takes its slice: zeros, then what it resumes from."""
        require(self.slice_of(process) == ZEROS, "a slice holds its last owner's bytes (I4)")
        if process.saved:
            self.write_slice(process, process.saved)

    def write_slice(self, process: Process, value: Any) -> None:
        self.work = {**self.work, process.lease[0]: tuple(value)}

    def scrub_is_ordered(self, order: Scrub) -> None:
        """A range will be zeroed: nobody may use it from now on."""
        start = order.offset_bytes
        self.claim(start, start + order.size_bytes, "zeroing a slice", scrubs=True)

    def scrubs(self, order: Scrub) -> None:
        """It is zeroed now."""
        self.scrub_is_ordered(order)
        self.work = {at: image for at, image in self.work.items() if at != order.offset_bytes}


def _overlap(region: Any, start: int, end: int) -> bool:
    return bool(region[0] < end and start < region[0] + region[1])


__all__ = ["Arena"]
