"""Cache of the scheduler's results by state and event.

The scheduler's result depends only on its state and the event. Many states of the world differ only
in facts that the scheduler does not know, and send it the same event. Then the cache has the
result, and it is not computed, frozen and checked again.
"""

from __future__ import annotations

import marshal
from typing import Any, Final
from zlib import crc32

from pipeswitch.scheduler.scheduler import Scheduler
from pipeswitch.scheduler.state import events as ev

from .brain import Brain, sight
from .frozen import Kept, frozen_part, reader

FIRST_EPOCH: Final = 1000  # new operation ids begin here, above all renumbered ids
# Commands that the world performs; all other commands only inform.
PERFORMED: Final = (
    ev.Spawn,
    ev.Send,
    ev.Kill,
    ev.RaiseTurn,
    ev.Interrupt,
    ev.TakeBack,
    ev.Reply,
    ev.CreateCommits,
    ev.DropCommits,
    ev.CreateImage,
    ev.DropImage,
    ev.StartBuild,
    ev.Shutdown,
)
Incarnations = tuple[tuple[int, ...], ...]  # for each device: of the daemon, then of each slot
# Result of an event: the commands, the error that ``check`` raised, and the state afterwards.
Consequence = tuple[tuple[ev.Command, ...], AssertionError | None, "Moment"]


class Moment:
    """One state of the scheduler, with the part of it that the world may read."""

    __slots__ = ("home", "incarnations", "kept", "last_epoch", "next", "seen")

    def __init__(
        self, packed: Kept, frozen: Any, incarnations: Incarnations, last_epoch: int
    ) -> None:
        self.kept = packed
        self.home = crc32(packed[0])  # chooses the process that has the results in its cache
        self.incarnations = incarnations
        self.last_epoch = last_epoch
        self.seen = sight(frozen)
        self.next: dict[Any, Consequence] = {}


class Recall:
    """The scheduler with a cache of its results.

    Until the first ``go_to`` the scheduler is live: it handles every event, so that a story (the
    replay of a path) does not depend on the cache. Then it handles only events that are not cached.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._brain: Brain | None = None
        self.is_live = True
        self._moments: dict[Any, Moment] = {}
        self._at: Moment | None = None  # None: the live scheduler has changed since it was frozen

    def learn(self) -> None:
        """Use the scheduler's present values for all unfrozen fields from now on."""
        self._brain = Brain(self._scheduler)

    @property
    def scheduler(self) -> Scheduler:
        """Real scheduler, set to the current moment."""
        if not self.is_live:
            self._load()
        return self._scheduler

    @property
    def moment(self) -> Moment:
        """Current state of the scheduler."""
        if self._at is None:
            self._at = self._freeze()
        return self._at

    def go_to(self, moment: Moment) -> None:
        """Make a known moment the current one."""
        self._at, self.is_live = moment, False

    def moment_of(self, packed: Kept, incarnations: Incarnations) -> Moment:
        """Return the moment that has this frozen form."""
        return self._moment(packed, None, incarnations, FIRST_EPOCH)

    def forget(self, beyond: int) -> None:
        """Clear the cache if it has more than ``beyond`` moments, to bound its memory."""
        if len(self._moments) > beyond:
            self._moments.clear()

    def handle(self, event: ev.Event, now_ms: float | None) -> Consequence:
        """Return the scheduler's result for one event, from the cache if possible."""
        if self.is_live:
            at_ms = self._scheduler.core.now_ms if now_ms is None else now_ms
            commands = self._scheduler.handle(event, at_ms)
            self._at = None
            return tuple(commands), self._checked(), None  # type: ignore[return-value]
        moment, question = self.moment, (event, now_ms)
        known = moment.next.get(question)
        if known is None:
            self._load()  # so that unfrozen values do not depend on the order of the search
            at_ms = moment.seen.now_ms if now_ms is None else now_ms
            commands = self._scheduler.handle(event, at_ms)
            broken = self._checked()
            after = self._freeze() if broken is None else moment  # the search ends at an error
            known = tuple([c for c in commands if isinstance(c, PERFORMED)]), broken, after
            moment.next[question] = known
        self._at = known[2]
        return known

    def _checked(self) -> AssertionError | None:
        try:
            self._scheduler.check()
        except AssertionError as error:
            return error
        return None

    def _freeze(self) -> Moment:
        assert self._brain is not None
        core, machine = self._scheduler.core, self._scheduler.machine
        frozen: list[Any] = []

        def freeze(brain: Brain, e: Any) -> Any:
            frozen.append(brain.freeze(e))
            return frozen[0]

        packed = frozen_part(freeze, self._brain)
        incarnations = tuple(
            [
                (state.daemon.incarnation, *[w.incarnation for w in state.workers.values()])
                for state in [device.state for device in machine.devices]
            ]
        )
        return self._moment(packed, frozen[0], incarnations, core.last_epoch)

    def _moment(
        self, packed: Kept, frozen: Any, incarnations: Incarnations, last_epoch: int
    ) -> Moment:
        key = (*packed, incarnations, last_epoch)
        moment = self._moments.get(key)
        if moment is None:
            moment = Moment(packed, frozen or marshal.loads(packed[0]), incarnations, last_epoch)
            self._moments[key] = moment
        return moment

    def _load(self) -> None:
        moment = self.moment
        assert self._brain is not None
        self._brain.thaw(
            marshal.loads(moment.kept[0]),
            reader(moment.kept[1]),
            moment.last_epoch,
            moment.incarnations,
        )


__all__ = ["Moment", "Recall"]
