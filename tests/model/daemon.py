"""Simulated memory daemon that can be frozen; the real daemon's code accepts or refuses orders."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

from pipeswitch.base.errors import RemoteProtocolError
from pipeswitch.devices.order_checks import check_range
from pipeswitch.extras.lab.device import Violation
from pipeswitch.extras.lab.simulated_daemon import SimulatedDaemon, SimulatedTransmission
from pipeswitch.ipc.messages import daemon as daemon_msg
from pipeswitch.ipc.messages.base import Message
from pipeswitch.memory_daemon.commit_areas import CommitAreas
from pipeswitch.memory_daemon.transmit import TransmitGuard

from .channel import freeze_items, plain, thaw_items
from .frozen import Add, Kept, Next
from .worker import copied

OF_SLICES = daemon_msg.Scrub | daemon_msg.CopySliceOut | daemon_msg.CopySliceIn
OUT, TO_HOST = "out", "to-host"


class Daemon(SimulatedDaemon):
    """Memory daemon. Several states of the world may share the object, as with ``Worker``."""

    kept: Kept | None = None

    def __init__(self, world: Any, *of_process: object) -> None:
        super().__init__(*of_process)
        self._world = world
        self.last_order: Message | None = None  # kept while it may still arrive a second time

    def own(self) -> Daemon:
        twin = Daemon.__new__(Daemon)
        twin.__dict__.update(self.__dict__)
        twin.kept = None
        twin.inbox, twin.out, twin._queues = map(copied, (self.inbox, self.out, self._queues))
        twin._areas = self._areas.copy()
        twin.copies = deque(map(_copy_of, self.copies))
        return twin

    def say(self, channel: str, message: Message) -> None:
        if isinstance(message, daemon_msg.CommitPersisted):
            self._world.areas[message.job].on_disk = message.step
        super().say(channel, plain(message))

    def hear(self, channel: str, message: Message) -> None:
        """Begin an order at once, like the control thread. Raise Violation if it is refused."""
        message = plain(message)
        is_kept = self._world.repeats and isinstance(message, daemon_msg.CommitCopy)
        self.last_order = message if is_kept else None
        try:
            if isinstance(message, daemon_msg.TransmitModel):
                self._guard(message)
                super().hear(channel, message)
            else:
                if isinstance(message, OF_SLICES):
                    arena_bytes = self._world.scope.arena_bytes
                    check_range("slice", message.offset_bytes, message.size_bytes, arena_bytes)
                self._control(message)
        except RemoteProtocolError as error:
            raise Violation(f"the memory daemon refuses an order: {error.message}") from None
        if isinstance(message, daemon_msg.PersistCommit):  # the model's disk takes no time
            self.work("disk")

    def work(self, thread: str) -> None:
        """Make a thread's next move. Copying the last group also ends the transmission."""
        (move,) = [move for move in self.steps() if move.thread == thread]
        move.act()
        if move.what == "copies" and self.copies[0].done == len(self.copies[0].order.groups):
            self._end_copy()

    def _guard(self, order: daemon_msg.TransmitModel) -> None:
        """Check an order with a new real guard. No order is late, so it needs no earlier ones."""
        scope = self._world.scope
        guard = TransmitGuard(
            arena_bytes=scope.arena_bytes,
            store_bytes=scope.store_bytes,
            fence_count=scope.fence_count,
        )
        guard._live = {copy.order.op_id: copy.order for copy in self.copies}
        guard.accept(order)

    def accepts(self, order: daemon_msg.CommitCopy) -> bool:
        device: Any = SimpleNamespace(arena_bytes=self._world.scope.arena_bytes)
        commits = CommitAreas(device, lambda _: None)
        if order.job in self._areas:
            commits._areas[order.job] = self._world.areas[order.job].real
            commits._newest[order.job] = self._areas[order.job]
        if commits.was_accepted(order):
            return False
        commits.area_for(order)
        return True


def _copy_of(copy: SimulatedTransmission) -> SimulatedTransmission:
    twin = SimulatedTransmission(copy.order, copy.asked_at_ms)
    twin.is_cancelled, twin.ends_at_ms = copy.is_cancelled, [*copy.ends_at_ms]
    return twin


def freeze_daemon(daemon: Daemon | None, e: Add) -> Any:
    if daemon is None:
        return None
    areas = sorted(daemon._areas.items())
    for _, (op_id, _) in areas:
        e(-op_id)
    last = daemon.last_order
    return (
        daemon.is_ready,
        daemon.parts_done,
        tuple([(job, number) for job, (_, number) in areas]),
        freeze_items([copy.order for copy in daemon.copies], e),
        tuple([(copy.is_cancelled, copy.done) for copy in daemon.copies]),
        freeze_items(daemon._queues.get(TO_HOST, ()), e),
        tuple([daemon._is_cancelled(order) for order in daemon._queues.get(TO_HOST, ())]),
        freeze_items(daemon.out.get(OUT, ()), e),
        freeze_items(() if last is None else (last,), e),
    )


def thaw_daemon(frozen: Any, n: Next, daemon: Daemon) -> None:
    """Set the new object ``daemon`` to a frozen state."""
    daemon.is_ready, daemon.parts_done, areas, orders, progress, thread, ends, out, last = frozen
    daemon._areas = {job: (n(), number) for job, number in areas}  # type: ignore[misc]
    for order, (is_cancelled, done) in zip(thaw_items(orders, n), progress, strict=True):
        copy = SimulatedTransmission(order, 0.0)
        copy.is_cancelled, copy.ends_at_ms = is_cancelled, [0.0] * done
        daemon.copies.append(copy)
    queue = daemon._queues[TO_HOST] = deque(thaw_items(thread, n))
    ending = [order.op_id for order, is_ending in zip(queue, ends, strict=True) if is_ending]
    daemon.cancelled = frozenset(ending)
    daemon.out = {OUT: deque(thaw_items(out, n))}
    (daemon.last_order,) = thaw_items(last, n) or (None,)


__all__ = ["OUT", "TO_HOST", "Daemon", "freeze_daemon", "thaw_daemon"]
