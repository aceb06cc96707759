"""Transmissions of one device: one after the other, on a thread of their own, each ends once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue

from ..errors import RemoteProtocolError
from ..ipc.messages import Epoch, TransmitEnded, TransmitModel
from .orders import check_order
from .waiting import now_ms

OnEnd = Callable[[TransmitEnded], None]


class Transmission:
    """One order under way."""

    __slots__ = ("cancelled", "on_end", "order")

    def __init__(self, order: TransmitModel, on_end: OnEnd) -> None:
        self.order = order
        self.on_end = on_end
        self.cancelled = threading.Event()

    def ended(
        self, started_at_ms: float, group_ends_at_ms: Sequence[float], copied_bytes: int
    ) -> TransmitEnded:
        """What to report now; it is complete when every group has an end."""
        order = self.order
        return TransmitEnded(
            model=order.model,
            epoch=order.epoch,
            is_complete=len(group_ends_at_ms) == len(order.groups),
            group_count=len(group_ends_at_ms),
            copied_bytes=copied_bytes,
            started_at_ms=started_at_ms,
            ended_at_ms=now_ms(),
            group_ends_at_ms=tuple(group_ends_at_ms),
        )


class TransmissionQueue:
    """The copy thread and what waits for it. ``close`` ends it."""

    def __init__(
        self,
        perform: Callable[[Transmission], TransmitEnded],
        *,
        arena_bytes: int,
        store_bytes: int,
        words: int,
        prepare: Callable[[], None] | None = None,
        settle: Callable[[], None] | None = None,
    ) -> None:
        """Start the thread: it calls ``prepare`` once, then ``perform`` for each order, and
        ``settle`` when its end is told."""
        self._perform = perform
        self._prepare = prepare
        self._settle = settle
        self._arena_bytes = arena_bytes
        self._store_bytes = store_bytes
        self._words = words
        self._orders: SimpleQueue[Transmission | None] = SimpleQueue()
        self._live: dict[Epoch, Transmission] = {}
        self._live_lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="copy-to-device", daemon=True)
        self._thread.start()

    def put(self, order: TransmitModel, on_end: OnEnd) -> None:
        """Queue a transmission; ``on_end`` comes exactly once, on the copy thread.

        Raises:
            RemoteProtocolError: out of bounds, or this epoch is being transmitted already.
        """
        check_order(
            order,
            arena_bytes=self._arena_bytes,
            store_bytes=self._store_bytes,
            words=self._words,
        )
        job = Transmission(order, on_end)
        with self._live_lock:
            if order.epoch in self._live:
                raise RemoteProtocolError(f"epoch {order.epoch} is being transmitted already")
            self._live[order.epoch] = job
        self._orders.put(job)

    def cancel(self, epoch: Epoch) -> None:
        """Stop it within a chunk; unknown means that it has just ended, and is fine."""
        with self._live_lock:
            job = self._live.get(epoch)
        if job is not None:
            job.cancelled.set()

    def close(self) -> None:
        """Cancel what is under way and what waits, and end the thread."""
        with self._live_lock:
            for job in self._live.values():
                job.cancelled.set()
        self._orders.put(None)
        self._thread.join()

    def _run(self) -> None:
        if self._prepare is not None:
            self._prepare()
        while (job := self._orders.get()) is not None:
            ended = self._perform(job)
            with self._live_lock:
                del self._live[job.order.epoch]
            job.on_end(ended)
            if self._settle is not None:
                self._settle()
