"""The preemption gate: where a training script parks when the device is asked for.

Two threads meet here. The *main thread* runs the script and calls ``check``, ``enter`` and
``leave``; the *termination thread* reads control messages and calls ``request_stop``, ``grant``
and ``request_evict``. A turn is a number: its holder may compute on the device (invariant
I5). Turns only grow, so a late message is recognised and dropped.

State      the main thread...                                        holds the turn
=========  ========================================================  ==============
RUNNING    computes                                                  yes
STOPPING   computes, and has not seen the accepted stop yet          yes
PARKED     waits in ``check`` or ``enter`` until a turn is granted   no
AWAY       gave the device up by itself (loader, between loops, end) yes, lent
STOPPED    as AWAY, and a stop was acknowledged meanwhile            no

State    | event                      | next     | done
=========|============================|==========|================================================
RUNNING  | stop(current turn)         | STOPPING |
RUNNING  | leave                      | AWAY     |
RUNNING  | grant(larger)              | RUNNING  | the turn grows
STOPPING | check outside optimizer    | PARKED   | main thread acknowledges
STOPPING | check in optimizer.step()  | STOPPING | nothing: parameters are half written
STOPPING | check                      | STOPPING | nothing, if it is for the next leave and there is
         |                            |          | no call: what a step computes with is free there
STOPPING | stop(current turn), now    | STOPPING | one for the next leave is for the next check
STOPPING | leave                      | STOPPED  | main thread acknowledges
STOPPING | grant(larger)              | STOPPING | kept: taken up right after the acknowledgement
PARKED   | grant(larger)              | RUNNING  | the waiting thread goes on
PARKED   | evict                      | STOPPED  | the waiting thread raises
AWAY     | stop(current turn)         | STOPPED  | termination thread acknowledges at once
AWAY     | enter, check               | RUNNING  |
STOPPED  | grant(larger)              | AWAY     |
STOPPED  | enter, check               | PARKED   | blocks; says that it is back
any      | grant(not larger)          | same     | dropped
any      | stop(older turn)           | same     | dropped
the rest | stop(current turn)         | same     | dropped: accepted or acknowledged before
any      | stop(a turn not yet here)  | same     | kept; accepted as soon as that turn is granted
any      | move                       | same     | the next check or enter outside the optimizer,
         |                            |          | which may be waiting, calls it and looks again
any      | evict                      | same     | sticky: the next check or enter outside the
         |                            |          | optimizer answers a pending stop, then raises;
         |                            |          | a move that was not called yet is dropped
RUNNING  | check, evicted             | RUNNING  | nothing, while ``finishes_step`` is true
AWAY     | enter, evicted             | RUNNING  | as above

A gate starts as STOPPED with turn 0: a script computes only after its first grant.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from threading import Condition, RLock
from typing import Literal

from ..base.errors import TaskPreempted

Where = Literal["forward", "backward", "boundary", "loader", "copies"]
OnParked = Callable[[int, int, Where], None]


def _nothing() -> None:
    pass


class GateState(enum.Enum):
    """See the module's table."""

    RUNNING = "running"
    STOPPING = "stopping"
    PARKED = "parked"
    AWAY = "away"
    STOPPED = "stopped"


class Gate:
    """Decides whether the main thread may compute; see the table above.

    Args:
        on_parked: called ``(turn, next_turn, where)`` exactly once per accepted stop, by the
            thread that acknowledges it, **with the gate's lock held**: no grant can overtake
            the acknowledgement. It must be short and must not wait for the other thread.
        changed: what the main thread waits at, with the gate's lock.

    Attributes:
        is_pending: false while there is nothing to look at; the hot path tests only this.
        in_optimizer_step: set by the main thread around ``optimizer.step()``; while set, no
            check parks or raises.
        before_unwind: called once, by the main thread without the lock, before the first
            ``TaskPreempted``: the place to commit. What it raises is raised.
        finishes_step: asked with the lock held by a main thread that is evicted and has the turn;
            while true, it goes on to the end of its step, where nothing would be lost.
        after_boundary: called by the main thread without the lock, at most once for each stop that
            was for a boundary, before it waits: another job computes now.
        on_back: called ``(turn, is_blocked)`` with the lock held, by a main thread that was away
            when that turn was given up, and waits for the next one now; or that has it, and cannot
            go on before others have let go of memory.
    """

    def __init__(self, on_parked: OnParked, changed: Condition | None = None) -> None:
        self.is_pending = True  # away: the first check must take the device
        self.in_optimizer_step = False
        self.before_unwind: Callable[[], None] | None = None
        self.finishes_step: Callable[[], bool] = lambda: False
        self.after_boundary: Callable[[], None] = _nothing
        self.on_back: Callable[[int, bool], None] = lambda *_: None
        self._on_parked = on_parked
        self._changed = changed or Condition(RLock())
        self._state = GateState.STOPPED
        self._turn = 0  # the newest turn taken up; given up already in PARKED and STOPPED
        self._granted = 0  # the newest turn granted, >= _turn
        self._accepted: tuple[int, int] | None = None  # (turn, next_turn), unanswered: STOPPING
        self._at_boundary = False  # that one is for the end of the step
        self._is_for_job = False  # the last one that was answered was so
        self._is_after_boundary = False  # it was answered, and that was not called yet
        self._future: tuple[int, int] | None = None  # a stop for a turn not granted yet
        self._where: Where = "loader"  # where the main thread last waited or left
        self.is_evicting = False  # an eviction was requested; never reset. Others only read it
        self.is_unwinding = False  # the main thread leaves by TaskPreempted. Others only read it
        self._is_finishing = False  # evicted, and goes on to the end of its step

    # ------------------------------------------------------------------ main thread

    def check(self, where: Where = "boundary") -> None:
        """Go on if nothing is asked (an attribute test); park or raise otherwise.

        Raises:
            TaskPreempted: the task's memory is needed; raised again at every later check.
        """
        if self.is_pending:
            self.answer(where)

    def answer(self, where: Where) -> None:
        """Handle the slow half of ``check``: a request is pending, or the device was left."""
        if self.in_optimizer_step:
            return
        while (call := self._answer(where)) is not None:
            call()
        if self.is_evicting and not self._is_finishing:
            self._unwind()

    def _answer(self, where: Where) -> Callable[[], None] | None:
        """Return the function to call without the lock before the next look, if there is one."""
        with self._changed:
            if self._state is GateState.STOPPING and not self.waits_for_boundary:
                self._acknowledge(where, GateState.PARKED)
            is_postprocess, self._is_after_boundary = self._is_after_boundary, False
            if is_postprocess and self._state in (GateState.STOPPED, GateState.PARKED):
                return self.after_boundary
            self._take_device(where)
            self._refresh()
            return None

    def enter(self) -> None:
        """Take the device; blocks until a turn is granted. Nothing happens if it is held.

        Raises:
            TaskPreempted: as ``check``.
        """
        if self.is_pending:
            self.answer("loader")

    def leave(self, where: Where = "loader") -> None:
        """Give the device up until ``enter``; counts as stopped. Never blocks, never raises."""
        with self._changed:
            self._where = where
            if self._state is GateState.STOPPING:
                self._acknowledge(where, GateState.STOPPED)
                self._take_up_grant()
            elif self._state is GateState.RUNNING:
                self._state = GateState.AWAY
            is_postprocess, self._is_after_boundary = self._is_after_boundary, False
            self._refresh()
        if is_postprocess:
            self.after_boundary()

    def pause(self, timeout_s: float) -> None:
        """Away: others may compute first. Wait until the turn is given up, or so long."""
        with self._changed:
            if self._state is GateState.AWAY and not self.is_evicting:
                self.on_back(self._turn, True)
                self._changed.wait(timeout_s)

    # ------------------------------------------------------------------ termination thread

    def request_stop(self, turn: int, next_turn: int, *, at_boundary: bool = False) -> None:
        """Ask for the device held under ``turn``; it goes to ``next_turn``.

        Args:
            at_boundary: not before the device is left (at the end of the step, as a rule), unless
                it is asked for again.
        """
        with self._changed:
            if turn > self._turn:  # it overtook its grant
                if self._future is None or turn > self._future[0]:
                    self._future = (turn, next_turn)
            elif turn == self._turn:
                self._accept_stop(turn, next_turn, at_boundary=at_boundary)
                self._refresh()

    def grant(self, turn: int) -> None:
        """Give the device to this task under ``turn``; not larger than the newest: dropped."""
        with self._changed:
            if turn > self._granted:
                self._granted = turn
                self._take_up_grant()
                self._refresh()

    def request_evict(self) -> None:
        """Make the main thread unwind at its next check, also when it is parked. Sticky."""
        with self._changed:
            self.is_evicting = True
            self._refresh()
            self._changed.notify_all()

    # ------------------------------------------------------------------ any thread

    @property
    def waits_for_boundary(self) -> bool:
        """True if the script was asked to stop but continues until it leaves the device."""
        return self._state is GateState.STOPPING and self._at_boundary and not self.is_evicting

    @property
    def allows_copies(self) -> bool:
        """No request has asked for the device: at most another job computes."""
        if self._state is GateState.STOPPING:
            return self.waits_for_boundary
        return not self.is_evicting and (self._is_for_job or not self._is_given_up)

    @property
    def state(self) -> GateState:
        """State, for display and tests; a decision based on it is a race."""
        with self._changed:
            return self._state

    @property
    def turn(self) -> int:
        """The newest turn taken up."""
        with self._changed:
            return self._turn

    # ------------------------------------------------------------------ with the lock held

    def _accept_stop(self, turn: int, next_turn: int, *, at_boundary: bool = False) -> None:
        """Accept a stop for the current turn; drop it if that turn is given up or asked back."""
        if self._state is GateState.RUNNING:
            self._accepted, self._at_boundary = (turn, next_turn), at_boundary
            self._state = GateState.STOPPING
        elif self._state is GateState.STOPPING:
            self._at_boundary = self._at_boundary and at_boundary
        elif self._state is GateState.AWAY:
            self._accepted, self._at_boundary = (turn, next_turn), at_boundary
            self._acknowledge(self._where, GateState.STOPPED)
            self._take_up_grant()

    @property
    def _is_given_up(self) -> bool:
        return self._state in (GateState.STOPPED, GateState.PARKED)

    def _acknowledge(self, where: Where, then: GateState) -> None:
        """Answer the accepted stop, once; from here on the turn is no longer ours."""
        assert self._accepted is not None
        (turn, next_turn), self._accepted = self._accepted, None
        self._state = then
        self._where = where
        self._is_for_job = self._at_boundary
        self._is_after_boundary = self._at_boundary and where != "copies"
        self._at_boundary = False
        self._changed.notify_all()
        self._on_parked(turn, next_turn, where)

    def _take_up_grant(self) -> None:
        """Take up the newest granted turn; a stop still unanswered goes first."""
        if self._granted <= self._turn or self._state is GateState.STOPPING:
            return
        self._turn = self._granted
        if self._state is GateState.PARKED:
            self._state = GateState.RUNNING
            self._changed.notify_all()
        elif self._state is GateState.STOPPED:
            self._state = GateState.AWAY
        self._take_up_future_stop()

    def _take_up_future_stop(self) -> None:
        """Answer the stop that overtook the grant of the turn which has just come."""
        if self._future is None or self._future[0] > self._turn:
            return
        (turn, next_turn), self._future = self._future, None
        if turn == self._turn:  # else it named a turn that never came
            self._accept_stop(turn, next_turn)

    def _take_device(self, where: Where) -> None:
        """Block the main thread until running, or until an eviction is requested."""
        self._take_up_grant()
        if self._state is GateState.STOPPED and not self.is_evicting:
            self._state = GateState.PARKED
            if self._turn:
                self.on_back(self._turn, False)
        while not self.is_evicting and self._is_given_up:
            self._where = where
            self._changed.wait()
            # asked back before this thread woke up
            if self._state is GateState.STOPPING and not self.waits_for_boundary:
                self._acknowledge(where, GateState.PARKED)
                self._take_up_grant()
        if self.is_evicting and self._state is GateState.PARKED:
            self._state = GateState.STOPPED  # it unwinds now: no turn may set it running
        elif self._state is GateState.AWAY and (not self.is_evicting or self._may_finish):
            self._state = GateState.RUNNING
        self._is_finishing = self._state is GateState.RUNNING and self._may_finish
        self._refresh()

    @property
    def _may_finish(self) -> bool:
        return self.is_evicting and not self.is_unwinding and self.finishes_step()

    def _refresh(self) -> None:
        self.is_pending = self.is_evicting or self._state is not GateState.RUNNING

    # ------------------------------------------------------------------ without the lock

    def _unwind(self) -> None:
        if not self.is_unwinding:
            self.is_unwinding = True
            if self.before_unwind is not None:
                self.before_unwind()
        raise TaskPreempted("the device memory of this task is needed")
