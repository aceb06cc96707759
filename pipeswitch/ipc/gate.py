"""The preemption gate: where a training script parks when another task needs the device.

Two threads use a gate. The *main thread* runs the script and calls ``check``, ``enter`` and
``leave``. The *termination thread* reads control messages and calls ``request_stop``, ``grant``
and ``request_evict``. A turn is a number; the task with the current turn may compute on the device
(invariant I5). Turns only grow, so a late message is recognised and dropped.

State      the main thread...                                        has the turn
=========  ========================================================  ==============
RUNNING    computes                                                  yes
STOPPING   computes, and has not seen the accepted stop yet          yes
PARKED     waits in ``check`` or ``enter`` until a turn is granted   no
AWAY       left the device on its own (loader, between loops, end)   yes, unused
STOPPED    is away as in AWAY, and a stop was acknowledged meanwhile no
HELD       only enqueues: a stop was acknowledged, its stream waits  no

State    | event                      | next     | action
=========|============================|==========|================================================
RUNNING  | stop(current turn)         | STOPPING |
RUNNING  | leave                      | AWAY     |
RUNNING  | grant(larger)              | RUNNING  | the turn grows
STOPPING | check outside optimizer    | PARKED   | main thread acknowledges
STOPPING | check in optimizer.step()  | STOPPING | nothing: parameters are half written
STOPPING | check                      | STOPPING | nothing, if the stop is for a boundary: a step's
         |                            |          | activations are freed there
STOPPING | stop, not for a boundary   | STOPPING | an earlier stop for a boundary counts at once
RUNNING, | stop, not for a boundary,  | HELD     | termination thread acknowledges at once, also
STOPPING | if ``holds``               |          | in optimizer.step(): the device finishes it later
HELD     | check outside optimizer    | PARKED   |
HELD     | leave                      | STOPPED  |
HELD     | grant(larger)              | RUNNING  |
STOPPING | leave                      | STOPPED  | main thread acknowledges
STOPPING | grant(larger)              | STOPPING | kept until the acknowledgement, then taken up
PARKED   | grant(larger)              | RUNNING  | the waiting thread continues
PARKED   | evict                      | STOPPED  | the waiting thread raises
AWAY     | stop(current turn)         | STOPPED  | termination thread acknowledges at once
AWAY     | enter, check               | RUNNING  |
STOPPED  | grant(larger)              | AWAY     |
STOPPED  | enter, check               | PARKED   | calls ``on_back``, then blocks
any      | grant(not larger)          | same     | dropped
any      | stop(older turn)           | same     | dropped
others   | stop(current turn)         | same     | dropped: accepted or acknowledged before
any      | stop(turn not granted yet) | same     | kept; accepted as soon as that turn is granted
any      | evict                      | same     | sticky: the next check or enter outside the
         |                            |          | optimizer answers a pending stop, then raises
PARKED   | hide                       | PARKED   | calls ``hide``; no eviction ends the wait before
         |                            |          | the slice is shown again
others   | hide                       | same     | sticky: ``hide`` is called when the main thread
         |                            |          | waits in PARKED
RUNNING  | check, evicted             | RUNNING  | nothing, while ``finishes_step`` is true
AWAY     | enter, evicted             | RUNNING  | nothing, while ``finishes_step`` is true

A stop for a boundary (``at_boundary``) takes effect when the script next leaves the device, usually
at the end of its step. A gate starts as STOPPED with turn 0: a script computes only after a grant.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from threading import Condition, RLock
from typing import Final, Literal

from ..base.errors import TaskPreempted

Where = Literal["forward", "backward", "boundary", "loader", "copies", "stream"]
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
    HELD = "held"


GIVEN_UP: Final = (GateState.STOPPED, GateState.PARKED, GateState.HELD)


class Gate:
    """Gate that decides whether the main thread may compute; see the module's table.

    Args:
        on_parked: called ``(turn, next_turn, where)`` exactly once per accepted stop, by the
            thread that acknowledges it, **with the gate's lock held**, so that no grant can
            overtake the acknowledgement. It must be short and must not wait for the other thread.
        changed: condition that has the gate's lock, and on which the main thread waits.

    Attributes:
        is_pending: false if the main thread may continue; the hot path tests only this.
        holds: true if ``on_parked`` can stop the device in enqueued work (``StreamGate``).
        before_leave: called by the main thread without the lock when it leaves the device.
        on_enter: called by the main thread with the lock when it may compute again.
        in_optimizer_step: set by the main thread around ``optimizer.step()``; while set, no
            check parks or raises.
        before_unwind: called once, by the main thread without the lock, before the first
            ``TaskPreempted``, to commit. An exception that it raises is raised by the check.
        finishes_step: called with the lock held when the main thread is evicted and has the turn;
            while it returns true, the thread continues to the end of its step, to lose no work.
        after_boundary: called by the main thread without the lock, at most once for each stop for
            a boundary, before the thread waits. Another job may compute by then.
        on_back: called ``(turn, is_blocked)`` with the lock held, by a main thread that was away.
            Either it has given ``turn`` up and now waits for the next one, or (``is_blocked``) it
            has the turn, but needs memory that other jobs must free first.
    """

    def __init__(self, on_parked: OnParked, changed: Condition | None = None) -> None:
        self.is_pending = True  # the first check must take the device
        self.holds = False
        self.before_leave: Callable[[Where], None] = lambda _: None
        self.on_enter: Callable[[], None] = _nothing
        self.in_optimizer_step = False
        self.before_unwind: Callable[[], None] | None = None
        self.finishes_step: Callable[[], bool] = lambda: False
        self.after_boundary: Callable[[], None] = _nothing
        self.on_back: Callable[[int, bool], None] = lambda *_: None
        self._on_parked = on_parked
        self._changed = changed or Condition(RLock())
        self._state = GateState.STOPPED
        self._turn = 0  # the newest turn taken up; in PARKED and STOPPED it is given up
        self._granted = 0  # the newest turn granted, >= _turn
        self._accepted: tuple[int, int] | None = None  # (turn, next_turn) of an unanswered stop
        self._at_boundary = False  # the accepted stop is for a boundary
        self._is_for_job = False  # the last answered stop was for a boundary, for another job
        self._is_after_boundary = False  # ``after_boundary`` must be called for the last stop
        self._future: tuple[int, int] | None = None  # a stop for a turn not granted yet
        self._where: Where = "loader"  # where the main thread last waited or left
        self.is_evicting = False  # an eviction was requested; never reset; read-only for callers
        self.is_unwinding = False  # a check has raised TaskPreempted; read-only for callers
        self._hide: Callable[[], None] | None = None  # to be called when the main thread waits
        self._is_waiting = False  # the main thread waits for a turn
        self._is_hidden = False  # ``hide`` was called, and the slice is not shown yet
        self._is_finishing = False  # evicted, but continues to the end of its step

    # ------------------------------------------------------------------ main thread

    def check(self, where: Where = "boundary") -> None:
        """Return if nothing is pending (an attribute test); park or raise otherwise.

        Raises:
            TaskPreempted: the task's memory is needed; every later check raises it again.
        """
        if self.is_pending:
            self.answer(where)

    def answer(self, where: Where) -> None:
        """Do the slow part of ``check``: a request is pending, or the device was left."""
        if self.in_optimizer_step:
            return
        while (call := self._answer(where)) is not None:
            call()
        if self.is_evicting and not self._is_finishing:
            self._unwind()

    def _answer(self, where: Where) -> Callable[[], None] | None:
        """Answer a stop and take the device; or return a function to call first, without lock."""
        with self._changed:
            if self._state is GateState.STOPPING and not self.waits_for_boundary:
                self._acknowledge(where, GateState.PARKED)
            is_after, self._is_after_boundary = self._is_after_boundary, False
            if is_after and self._state in (GateState.STOPPED, GateState.PARKED):
                return self.after_boundary
            self._take_device(where)
            self._refresh()
            return None

    def enter(self) -> None:
        """Take the device; block until a turn is granted. Do nothing if the thread has it.

        Raises:
            TaskPreempted: as in ``check``.
        """
        if self.is_pending:
            self.answer("loader")

    def leave(self, where: Where = "loader") -> None:
        """Give the device up until ``enter``; acknowledge a stop. Never raises."""
        self.before_leave(where)
        with self._changed:
            self._where = where
            if self._state is GateState.STOPPING:
                self._acknowledge(where, GateState.STOPPED)
                self._take_up_grant()
            elif self._state is GateState.RUNNING:
                self._state = GateState.AWAY
            elif self._state is GateState.HELD:
                self._state = GateState.STOPPED
            is_after, self._is_after_boundary = self._is_after_boundary, False
            self._refresh()
        if is_after:
            self.after_boundary()

    def pause(self, timeout_s: float) -> None:
        """Let others compute while AWAY: wait ``timeout_s``, or until the turn is given up."""
        with self._changed:
            if self._state is GateState.AWAY and not self.is_evicting:
                self.on_back(self._turn, True)
                self._changed.wait(timeout_s)

    # ------------------------------------------------------------------ termination thread

    def request_stop(self, turn: int, next_turn: int, *, at_boundary: bool = False) -> None:
        """Request the device from this task, which has ``turn``; ``next_turn`` gets it.

        Args:
            at_boundary: the script computes until it leaves the device, usually at the end of its
                step. A second request without this flag stops it at the next check.
        """
        with self._changed:
            if turn > self._turn:  # the stop overtook the grant of this turn
                if self._future is None or turn > self._future[0]:
                    self._future = (turn, next_turn)
            elif turn == self._turn:
                self._accept_stop(turn, next_turn, at_boundary=at_boundary)
                self._refresh()

    def grant(self, turn: int) -> None:
        """Give the device to this task under ``turn``; ignore a turn that is not larger."""
        with self._changed:
            if turn > self._granted:
                self._granted = turn
                self._take_up_grant()
                self._refresh()

    def request_evict(self) -> None:
        """Make the main thread unwind at its next check, even if it is parked. Cannot be undone."""
        with self._changed:
            self.is_evicting = True
            self._refresh()
            self._changed.notify_all()

    def request_hide(self, hide: Callable[[], None] | None) -> None:
        """Call ``hide`` as soon as the main thread waits for a turn, with the gate's lock held.

        It may not wait yet, if the task is away from the device. From then on it waits at least
        until ``request_hide(None)``, and for its next turn.
        """
        with self._changed:
            self._hide = hide
            self._is_hidden = self._is_hidden and hide is not None
            self._hide_if_waiting()
            self._changed.notify_all()

    # ------------------------------------------------------------------ any thread

    @property
    def waits_for_boundary(self) -> bool:
        """True if the script was asked to stop but continues until it leaves the device."""
        return self._state is GateState.STOPPING and self._at_boundary and not self.is_evicting

    @property
    def allows_copies(self) -> bool:
        """True if no request needs the device, even if another job computes on it."""
        if self._state is GateState.STOPPING:
            return self.waits_for_boundary
        is_leaving = self.is_evicting or self._is_hidden or self._hide is not None
        return not is_leaving and (self._is_for_job or self._state not in GIVEN_UP)

    @property
    def drains(self) -> bool:
        """True if ``on_parked`` must empty the device's queue: another job uses memory that the
        queue frees, or the main thread unwinds."""
        return self._is_for_job or self.is_evicting

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
        """Accept a stop for the current turn; drop it if the turn was given up already."""
        if self._state in GIVEN_UP:
            return
        if self._state is GateState.STOPPING:
            self._at_boundary = self._at_boundary and at_boundary
        else:
            self._accepted, self._at_boundary = (turn, next_turn), at_boundary
        if self._state is GateState.AWAY:
            self._acknowledge(self._where, GateState.STOPPED)
            self._take_up_grant()
        elif self.holds and not self._at_boundary and not self.is_evicting:
            self._acknowledge("stream", GateState.HELD)
            self._take_up_grant()
        else:
            self._state = GateState.STOPPING

    def _hide_if_waiting(self) -> None:
        if self._hide is not None and self._is_waiting and self._state is GateState.PARKED:
            hide, self._hide, self._is_hidden = self._hide, None, True
            hide()

    def _acknowledge(self, where: Where, then: GateState) -> None:
        """Answer the accepted stop, once; after that this task no longer has the turn."""
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
        """Take up the newest granted turn, unless a stop is still unanswered."""
        if self._granted <= self._turn or self._state is GateState.STOPPING:
            return
        self._turn = self._granted
        if self._state in (GateState.PARKED, GateState.HELD):
            self._state = GateState.RUNNING
            self._changed.notify_all()
        elif self._state is GateState.STOPPED:
            self._state = GateState.AWAY
        self._take_up_future_stop()

    def _take_up_future_stop(self) -> None:
        """Accept the stop, if there is one, that overtook the grant of the current turn."""
        if self._future is None or self._future[0] > self._turn:
            return
        (turn, next_turn), self._future = self._future, None
        if turn == self._turn:  # otherwise a newer turn was granted instead
            self._accept_stop(turn, next_turn)

    def _take_device(self, where: Where) -> None:
        """Block the main thread until its state is RUNNING, or until an eviction is requested."""
        self._take_up_grant()
        if self._state is GateState.STOPPED and not self.is_evicting:
            self._state = GateState.PARKED
            if self._turn:
                self.on_back(self._turn, False)
        interrupted: Exception | None = None
        while self._is_hidden or (
            self._state in GIVEN_UP and not (interrupted or self.is_evicting)
        ):
            if self._state is GateState.HELD:  # also if held between the grant and the wake-up
                self._state = GateState.PARKED
            self._where, self._is_waiting = where, True
            self._hide_if_waiting()
            try:
                self._changed.wait()
            except Exception as error:  # of the script's own signal handler
                interrupted = error
            # A stop may have been accepted between the grant and this thread's wake-up.
            if self._state is GateState.STOPPING and not self.waits_for_boundary:
                self._acknowledge(where, GateState.PARKED)
                self._take_up_grant()
        self._is_waiting = False
        if interrupted is not None:
            raise interrupted
        if self.is_evicting and self._state in (GateState.PARKED, GateState.HELD):
            self._state = GateState.STOPPED  # it unwinds now, so no grant may set it to RUNNING
        elif self._state is GateState.AWAY and (not self.is_evicting or self._may_finish):
            self._state = GateState.RUNNING
        self.on_enter()
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
