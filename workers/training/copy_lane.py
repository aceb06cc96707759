"""The copy lanes: a thread that carries saved tensors to the host, and one that brings them back,
each in the order asked. A link carries both ways at once.

They are quiet while the job is suspended: between two pieces each looks at the gate, and stands
aside until the main thread is through. A main thread that waits for a copy then parks, as in a
layer's hook.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch

from pipeswitch.devices.view import HostCopies
from pipeswitch.ipc.gate import Gate, Where


@dataclass(eq=False, slots=True)
class Copy:
    """Of all bytes of one storage. The main thread makes it, the lane fills in the rest."""

    of: Any  # what the main thread knows it by
    source: torch.Tensor
    to_host: bool
    mark: Any
    target: torch.Tensor | None = None
    is_begun: bool = False
    is_cancelled: bool = False  # if begun, it still comes back from ``take_ended``
    error: BaseException | None = None


class CopyLanes:
    """Methods are the main thread's. What there are two of is known by ``Copy.to_host``."""

    def __init__(self, copies: HostCopies, gate: Gate) -> None:
        self._copies, self._gate = copies, gate
        self._changed = threading.Condition()
        self._queues: dict[bool, deque[Copy]] = {True: deque(), False: deque()}
        self._under_way = 0
        self._ended: deque[Copy] = deque()
        self._is_closed = False
        self._aside: set[bool] = set()  # of lanes that have seen that the gate is asked
        self._carried_bytes, self._busy_ms = {True: 0, False: 0}, {True: 0.0, False: 0.0}
        for to_host, name in ((True, "copy-out"), (False, "copy-in")):
            threading.Thread(target=self._run, args=(to_host,), name=name, daemon=True).start()

    def submit(self, of: Any, source: torch.Tensor, *, to_host: bool) -> Copy:
        """Returns at once."""
        copy = Copy(of, source, to_host, self._copies.mark())
        with self._changed:
            self._queues[to_host].append(copy)
            self._changed.notify_all()
            is_closed = self._is_closed
        if is_closed:  # a graph of an earlier loop is used
            self._carry_all(to_host)
        return copy

    def cancel(self, copy: Copy) -> bool:
        """True: it never began, and will not be told of. A begun one ends with its next piece."""
        with self._changed:
            copy.is_cancelled = True
            if copy.is_begun:
                return False
            self._queues[copy.to_host].remove(copy)
            return True

    @property
    def is_busy(self) -> bool:
        """There is something to wait for."""
        with self._changed:
            return any(self._queues.values()) or bool(self._under_way or self._ended)

    def bytes_per_ms(self, *, to_host: bool) -> float:
        """What this lane has shown; that of the other one, if it has carried nothing yet."""
        way = to_host if self._busy_ms[to_host] else not to_host
        return self._carried_bytes[way] / self._busy_ms[way] if self._busy_ms[way] else 1.0

    def take_ended(self) -> list[Copy]:
        """What has ended since."""
        return [self._ended.popleft() for _ in range(len(self._ended))]

    def wait(self, where: Where) -> float:
        """Until a copy has ended, or the gate was answered: look again. Milliseconds waited for
        copies.

        Raises:
            TaskPreempted: as the gate's ``check``.
        """
        began_s = time.monotonic()
        with self._changed:
            self._changed.wait_for(lambda: self._ended or self._is_quiet)
        waited_ms = (time.monotonic() - began_s) * 1e3
        if self._is_quiet:
            self._gate.check(where)
            self.go_on()
        return waited_ms

    def wait_away(self) -> bool:
        """Without the device, until a copy has ended; False: they stand aside."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or self._is_quiet)
        return bool(self._ended)

    def go_on(self) -> None:
        """The main thread computes: what stood aside goes on, unless it is asked again."""
        if self._aside and not self._must_stand_aside():
            with self._changed:
                self._aside.clear()
                self._changed.notify_all()

    def close(self) -> None:
        """The threads end when they have carried what they were asked to."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    @property
    def _is_quiet(self) -> bool:
        """All that is under way stands aside."""
        return bool(self._aside) and len(self._aside) == self._under_way

    # -- a lane's thread -------------------------------------------------------------------------

    def _run(self, to_host: bool) -> None:
        queue = self._queues[to_host]
        while not self._is_closed:
            with self._changed:
                self._changed.wait_for(lambda: queue or self._is_closed)
            self._carry_all(to_host)

    def _carry_all(self, to_host: bool) -> None:
        while True:
            with self._changed:
                if not self._queues[to_host]:
                    return
                copy = self._queues[to_host].popleft()
                copy.is_begun = True
                self._under_way += 1
            try:
                self._carry(copy)
            except Exception as error:  # no memory: the main thread raises it
                copy.error = error
            with self._changed:
                self._under_way -= 1
                self._ended.append(copy)
                self._changed.notify_all()
            del copy  # its tensors are the main thread's to drop

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
        """A task in ``optimizer.step()`` cannot park: what its closure waits for must come."""
        gate = self._gate
        is_stopping = gate.asked and not gate.lets_copy
        return is_stopping and not (gate.in_optimizer_step or self._is_closed)
