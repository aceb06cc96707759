"""The memory daemon: copies, commits and scrubs, each step a move; its checks are the real ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, Final

from memory_daemon.commits import Commits
from memory_daemon.transmit import TransmitGuard
from pipeswitch.commits.area import _RECORD_WORDS, HEADER_BYTES, MAGIC, CommitArea
from pipeswitch.devices.orders import check_range
from pipeswitch.errors import RemoteProtocolError
from pipeswitch.ipc.messages import (
    CommitCopy,
    CommitPersisted,
    DaemonFault,
    Epoch,
    GroupCopy,
    Message,
    Scrub,
    Scrubbed,
    StepCommitted,
    TransmitEnded,
    TransmitModel,
)
from pipeswitch.scheduler.records import NO_EPOCH

from .channel import IMAGE_BYTES, Items, ItemsCodec, pack, unpack
from .frozen import Add, Codec, Kept, Next

_SEQUENCE: Final = 2  # word of the header


class Paused(Exception):
    """Raised in the middle of a copy: the other half is another move."""


class Area(CommitArea):
    """The real commit area over plain memory, so that it can be saved and set."""

    def __init__(self) -> None:
        self.slot_bytes = IMAGE_BYTES
        self._bytes = memoryview(bytearray(HEADER_BYTES + 2 * IMAGE_BYTES))
        self._words = self._bytes[:HEADER_BYTES].cast("Q")
        self._words[0], self._words[1] = MAGIC, IMAGE_BYTES

    def save(self) -> tuple[Any, ...]:
        """All of it that can differ."""
        words = self._words
        records = tuple([tuple(words[i : i + 4].tolist()) for i in _RECORD_WORDS])
        return (words[_SEQUENCE], records, bytes(self._bytes[HEADER_BYTES:]))

    def set(self, saved: tuple[Any, ...]) -> None:
        """As it was when it was saved."""
        sequence, records, slots = saved
        self._words[_SEQUENCE] = sequence
        for first, record in zip(_RECORD_WORDS, records, strict=True):
            for index, value in enumerate(record):
                self._words[first + index] = value
        self._bytes[HEADER_BYTES:] = slots


EMPTY_AREA: Final = Area().save()


@dataclass(frozen=True)
class Copy:
    """A transmission under way."""

    model: str
    epoch: Epoch
    start: int
    end: int
    first_word: int
    groups: int
    done: int = 0
    is_cancelled: bool = False


Copies = tuple[Copy, ...]


class CopiesCodec:
    """For fields that are copies (see ``frozen.Codec``)."""

    @staticmethod
    def freeze(copies: Copies, e: Add) -> Any:
        return tuple([COPY.freeze(copy, e) for copy in copies])

    @staticmethod
    def thaw(frozen: Any, n: Next) -> Copies:
        return tuple([COPY.thaw(copy, n) for copy in frozen])


@dataclass
class Daemon:
    """``life``: none, booting, up. ``lane`` is the one that copies to the host and scrubs."""

    life: str = "none"
    copies: Copies = ()
    lane: Items = ()
    is_half: bool = False  # the first order of the lane is half done
    half: int = 0  # what was copied in that half
    out: Items = ()
    has_area: bool = False
    newest_commit: Epoch = NO_EPOCH
    newest_number: int = 0
    last_order: Items = ()  # as long as it may come again
    kept: Kept | None = None  # as ``Process.kept``

    def own(self) -> Daemon:
        """A copy that may be changed, for one state of the world."""
        twin = Daemon.__new__(Daemon)
        twin.__dict__.update(self.__dict__)
        twin.kept = None
        return twin

    def say(self, message: Message) -> None:
        self.out += (pack(message),)

    # -- orders --------------------------------------------------------------------------------

    def takes(self, message: Message, world: Any) -> None:
        """The control thread: begins what is asked for, or refuses it."""
        is_kept = world.repeats and isinstance(message, CommitCopy)
        self.last_order = (pack(message),) if is_kept else ()
        try:
            self._handle(message, world)
        except RemoteProtocolError as error:
            self.say(DaemonFault(epoch=getattr(message, "epoch", Epoch(0)), reason=error.message))

    def _handle(self, message: Any, world: Any) -> None:
        match type(message).__name__:
            case "TransmitModel":
                self._accept(message, world)
            case "Scrub":
                check_range("scrub", message.offset_bytes, message.size_bytes,
                            world.scope.arena_bytes)  # fmt: skip
                self.lane += (pack(message),)
            case "OpenCommits":
                self.has_area = True
            case "CloseCommits":
                self.has_area, self.newest_commit, self.newest_number = False, NO_EPOCH, 0
            case "CommitCopy":
                if self._is_new(message, world):
                    self.lane += (pack(message),)
            case "PersistCommit":  # at once: the disk is not modelled
                self.say(CommitPersisted(job=message.job, epoch=message.epoch,
                                         step=world.commits.persist()))  # fmt: skip
            case "CancelTransmit":  # perhaps it has ended already
                self.copies = tuple([
                    replace(copy, is_cancelled=True) if copy.epoch == message.epoch else copy
                    for copy in self.copies
                ])  # fmt: skip
            case name:
                raise RemoteProtocolError(f"a memory daemon takes no {name}")

    def _accept(self, order: TransmitModel, world: Any) -> None:
        guard = TransmitGuard(
            arena_bytes=world.scope.arena_bytes, store_bytes=world.scope.store_bytes,
            words=world.scope.words,
        )  # fmt: skip
        guard._live = {copy.epoch: _order_of(copy) for copy in self.copies}
        guard.accept(order)  # orders arrive in order here, so it needs no memory of older ones
        start = order.arena_offset_bytes
        self.copies += (
            Copy(order.model, order.epoch, start, start + order.region_bytes,
                 order.groups[0].word, len(order.groups)),
        )  # fmt: skip

    def _is_new(self, order: CommitCopy, world: Any) -> bool:
        commits = Commits(SimpleNamespace(arena_bytes=world.scope.arena_bytes))
        if self.has_area:
            commits._areas[order.job] = world.commits.area
        if self.newest_commit:
            commits._newest[order.job] = (self.newest_commit, self.newest_number)
        if commits.was_accepted(order):
            return False
        commits.area_for(order)
        self.newest_commit, self.newest_number = commits._newest[order.job]
        return True

    # -- work ----------------------------------------------------------------------------------

    def copy_group(self, world: Any) -> None:
        """One more group of the oldest transmission; with the last one, or a cancel, its end."""
        copy = self.copies[0]
        if not copy.is_cancelled:
            world.arena.arrives(copy, copy.done)
            copy = replace(copy, done=copy.done + 1)
            self.copies = (copy, *self.copies[1:])
        if copy.is_cancelled or copy.done == copy.groups:
            self.copies = self.copies[1:]
            self.say(
                TransmitEnded(
                    model=copy.model, epoch=copy.epoch, is_complete=not copy.is_cancelled,  # type: ignore[arg-type]
                    group_count=copy.done, copied_bytes=0, started_at_ms=0.0, ended_at_ms=0.0,
                )
            )  # fmt: skip

    def work_lane(self, world: Any) -> None:
        """Half a commit's copy, its other half and the flip, or a scrub."""
        order = unpack(self.lane[0])
        if isinstance(order, Scrub):
            self.lane = self.lane[1:]
            world.arena.scrubs(order)
            self.say(Scrubbed(epoch=order.epoch))
            return
        if not self.is_half:
            self._write(world, order, self._first_half(world, order))
            return
        self.lane = self.lane[1:]
        self._write(world, order, self._second_half(world, order))
        self.is_half, self.half = False, 0
        world.commits.flipped()
        self.say(acknowledgement(order))

    def _write(self, world: Any, order: CommitCopy, fill: Callable[[memoryview], None]) -> None:
        try:
            world.commits.area.write(order.step, IMAGE_BYTES, fill)
        except Paused:
            self.is_half = True

    def _first_half(self, world: Any, order: CommitCopy) -> Callable[[memoryview], None]:
        def fill(image: memoryview) -> None:
            image[0] = self.half = world.arena.bytes_at(order.slice_offset_bytes)[0]
            raise Paused

        return fill

    def _second_half(self, world: Any, order: CommitCopy) -> Callable[[memoryview], None]:
        # The real copy is one call of ``write``; it starts over here, from what it had read.
        def fill(image: memoryview) -> None:
            image[0] = self.half
            image[1:] = bytes(world.arena.bytes_at(order.slice_offset_bytes)[1:])

        return fill


def acknowledgement(order: CommitCopy) -> StepCommitted:
    """The answer to an order that was carried out."""
    return StepCommitted(
        job=order.job, epoch=order.epoch, number=order.number, step=order.step, copy_ms=0.0
    )


def _order_of(copy: Copy) -> TransmitModel:
    """The order of a live copy, as far as the guard looks at it."""
    groups = tuple(
        GroupCopy(store_offset_bytes=0, arena_offset_bytes=copy.start, size_bytes=0,
                  word=copy.first_word + index)
        for index in range(copy.groups)
    )  # fmt: skip
    return TransmitModel(
        model=copy.model, epoch=copy.epoch, arena_offset_bytes=copy.start,  # type: ignore[arg-type]
        region_bytes=copy.end - copy.start, groups=groups,
    )  # fmt: skip


COPY = Codec(Copy)
DAEMON = Codec(
    Daemon,
    drop=("kept",),
    own={"copies": CopiesCodec, "lane": ItemsCodec, "out": ItemsCodec, "last_order": ItemsCodec},  # type: ignore[dict-item]
    ordered=("newest_commit",),
)
