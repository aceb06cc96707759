"""Copy lanes: one thread copies saved tensors to the host, a second one copies them back.

Each lane copies in the order of submission, and both directions run at once. While the job is
suspended, the lanes pause: each checks the gate between two pieces, and waits until the main thread
continues. If the main thread waits for a copy meanwhile, it parks, as in a layer's hook.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from pipeswitch.devices.worker_device import HostCopies
from pipeswitch.ipc.gate import Gate, Where


@dataclass(eq=False, slots=True)
class Copy:
    """Copy of all bytes of one storage; the main thread creates it, a lane sets its result."""

    of: Any  # the main thread's object for the storage
    source: torch.Tensor
    to_host: bool
    mark: Any
    target: torch.Tensor | None = None
    is_begun: bool = False
    is_cancelled: bool = False  # ``take_ended`` also returns a cancelled copy that had begun
    error: BaseException | None = None


class CopyStreams:
    """Two executors of one thread each, one for each direction. The main thread calls the methods.

    A work item takes the copy at the head of its lane's queue only when it runs. So a cancelled
    copy leaves the queue at once, and its tensors are freed.
    """

    def __init__(self, copies: HostCopies, gate: Gate) -> None:
        self._copies, self._gate = copies, gate
        self._changed = threading.Condition()
        self._queues: dict[bool, deque[Copy]] = {True: deque(), False: deque()}
        self._under_way = 0
        self._ended: deque[Copy] = deque()
        self._is_closed = False
        self._aside: set[bool] = set()  # lanes that pause because a stop was requested
        self._carried_bytes, self._busy_ms = {True: 0, False: 0}, {True: 0.0, False: 0.0}
        self._threads = {
            True: ThreadPoolExecutor(1, "copy-out"),
            False: ThreadPoolExecutor(1, "copy-in"),
        }
        for executor in self._threads.values():
            executor.submit(int)  # starts the thread now, and raises if the system refuses

    def submit(self, of: Any, source: torch.Tensor, *, to_host: bool) -> Copy:
        """Queue a copy and return at once."""
        copy = Copy(of, source, to_host, self._copies.mark())
        with self._changed:
            self._queues[to_host].append(copy)
        if self._is_closed:  # backward uses an earlier loop's graph
            self._carry_next(to_host)
        else:
            self._threads[to_host].submit(self._carry_next, to_host)
        return copy

    def cancel(self, copy: Copy) -> bool:
        """Cancel a copy; return True if it had not begun and will not be reported."""
        with self._changed:
            copy.is_cancelled = True
            if copy.is_begun:
                return False
            self._queues[copy.to_host].remove(copy)
            return True

    @property
    def is_busy(self) -> bool:
        """True if a copy is queued, under way, or not yet taken by ``take_ended``."""
        with self._changed:
            return any(self._queues.values()) or bool(self._under_way or self._ended)

    def bytes_per_ms(self, *, to_host: bool) -> float:
        """Return the lane's measured bytes per ms; before its first copy, the other lane's."""
        way = to_host if self._busy_ms[to_host] else not to_host
        return self._carried_bytes[way] / self._busy_ms[way] if self._busy_ms[way] else 1.0

    def take_ended(self) -> list[Copy]:
        """Return the copies that have ended since the last call."""
        return [self._ended.popleft() for _ in range(len(self._ended))]

    def wait(self, where: Where) -> float:
        """Wait until a copy has ended or all lanes pause; return the ms waited for copies.

        If all lanes pause, check the gate, which may park. The caller then checks its copy again.

        Raises:
            TaskPreempted: the gate's ``check`` found an eviction."""
        began_s = time.monotonic()
        with self._changed:
            self._changed.wait_for(lambda: self._ended or self._is_quiet)
        waited_ms = (time.monotonic() - began_s) * 1e3
        if self._is_quiet:
            self._gate.check(where)
            self.resume()
        return waited_ms

    def wait_away(self) -> bool:
        """Wait without the device until a copy has ended; return False if all lanes pause."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or self._is_quiet)
        return bool(self._ended)

    def resume(self) -> None:
        """Continue paused copies, unless a stop is requested. Call it before computing."""
        if self._aside and not self._must_stand_aside():
            with self._changed:
                self._aside.clear()
                self._changed.notify_all()

    def close(self) -> None:
        """Request that each thread ends after its last copy; return without waiting."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for executor in self._threads.values():
            executor.shutdown(wait=False)

    @property
    def _is_quiet(self) -> bool:
        return bool(self._aside) and len(self._aside) == self._under_way

    # -- a lane's thread -------------------------------------------------------------------------

    def _carry_next(self, to_host: bool) -> None:
        with self._changed:
            if not self._queues[to_host]:
                return  # the copy was cancelled
            copy = self._queues[to_host].popleft()
            copy.is_begun = True
            self._under_way += 1
        try:
            self._carry(copy)
        except BaseException as error:  # such as MemoryError; the main thread raises it
            copy.error = error
        with self._changed:
            self._under_way -= 1
            self._ended.append(copy)
            self._changed.notify_all()

    def _carry(self, copy: Copy) -> None:
        way = copy.to_host
        self._stand_aside(way)
        size_bytes = copy.source.numel()
        target = self._copies.target(size_bytes, on_host=way, mark=copy.mark)
        began_s = time.monotonic()
        for piece_bytes in self._copies.pieces(copy.source, target, copy.mark, to_host=way):
            self._carried_bytes[way] += piece_bytes
            self._busy_ms[way] += (time.monotonic() - began_s) * 1e3
            self._stand_aside(way)
            if copy.is_cancelled:
                return
            began_s = time.monotonic()
        copy.target = target

    def _stand_aside(self, way: bool) -> None:
        if not self._must_stand_aside():
            return
        with self._changed:
            self._aside.add(way)
            self._changed.notify_all()
            self._changed.wait_for(lambda: way not in self._aside or self._is_closed)
            self._aside.discard(way)

    def _must_stand_aside(self) -> bool:
        """Return True if a lane must pause: a stop is requested outside of an optimizer step."""
        gate = self._gate
        is_stopping = gate.is_pending and not gate.allows_copies
        return is_stopping and not (gate.in_optimizer_step or self._is_closed)
