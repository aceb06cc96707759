"""A training script in a worker, around the real gate: what ``training/session.py`` does to it.

Its state is three bytes in its slice: two halves of the parameters and the data position. Step
*k* appends digit *k* to each half, one half after the other, so that every half-done, lost or
repeated step shows in the bytes. The committed image of step *k* is right if and only if it is
``image_of(k)`` (invariant I2).
"""

from __future__ import annotations

from typing import Any, Final

from pipeswitch.errors import TaskPreempted
from pipeswitch.ipc.gate import Gate, GateState
from pipeswitch.ipc.messages import CommitStep, JobEnded, LeaseRequest

from .frozen import Add, Next

BASE: Final = 4  # of the digits
COMPUTES: Final = (GateState.RUNNING, GateState.STOPPING)


def after_step(half: int, step: int) -> int:
    """One half of the parameters after batch number ``step`` was applied to it."""
    return half * BASE + step + 1


def image_of(step: int) -> tuple[int, int, int]:
    """The state after steps 1…step of an undisturbed run."""
    half = 0
    for index in range(step):
        half = after_step(half, index)
    return (half, half, step)


class Halt(Exception):
    """The main thread waits inside the gate."""


class _Bell:
    """Stands for the gate's condition: waiting ends the move, it is tried again later."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None

    def wait(self) -> None:
        raise Halt

    def notify_all(self) -> None:
        return None


_BELL: Final[Any] = _Bell()
_STATES: Final = {state.value: state for state in GateState}


class GateCodec:
    """The real gate's state; its epochs are turns."""

    @staticmethod
    def freeze(gate: Gate | None, e: Add) -> Any:
        if gate is None:
            return None
        e(-gate._turn)
        e(-gate._granted)
        for pair in (gate._accepted, gate._future):
            if pair is not None:
                e(-pair[0])
                e(-pair[1])
        return (
            gate._state.value, gate._accepted is not None, gate._future is not None,
            gate._evicting, gate._unwinding, gate.in_optimizer_step, gate._where,
        )  # fmt: skip

    @staticmethod
    def thaw(frozen: Any, n: Next) -> Gate | None:
        if frozen is None:
            return None
        gate = new_gate()
        state, has_accepted, has_future = frozen[:3]
        gate._evicting, gate._unwinding, gate.in_optimizer_step, gate._where = frozen[3:]
        gate._state = _STATES[state]
        gate._turn, gate._granted = n(), n()
        gate._accepted = (n(), n()) if has_accepted else None
        gate._future = (n(), n()) if has_future else None
        gate._refresh()
        return gate


def new_gate() -> Gate:
    """A real gate whose waits end the move. ``on_parked`` is set by the process."""
    gate = Gate(lambda turn, next_turn, where: None)
    gate._changed = _BELL
    return gate


def copy_gate(gate: Gate) -> Gate:
    """One that can be changed without changing the other."""
    twin = Gate.__new__(Gate)
    twin.__dict__.update(gate.__dict__)
    return twin


class Script:
    """The main thread of a worker that runs a job; mixed into the worker process.

    Phases: *lease* (waits for its slice), *take* (a batch is there, the device is not), *step*
    (forward and backward), *wait* (the commit under way reads the parameters), *half* (half of
    them are written), *fetch* (between two bodies), *unwind* and *finish* (commit what is not
    committed, then end), *over*.
    """

    def script_waits(self: Any) -> bool:
        """Whether the main thread certainly cannot move now; sparing a try."""
        gate, phase = self.gate, self.phase
        if phase == "lease":
            return not self.has_lease and not gate._evicting
        if phase in ("wait", "unwind", "finish"):
            return bool(self.in_flight >= 0 and not self.is_acknowledged)
        if phase in ("take", "step", "fetch") and not gate._evicting:
            return gate._state is GateState.PARKED and gate._granted <= gate._turn
        return False

    def script_moves(self: Any, world: Any) -> bool:
        """One move of the main thread; False when it waits and nothing changed."""
        before = (self.phase, self.gate._state)
        try:
            getattr(self, f"_{self.phase}")(world)
        except Halt:
            return bool((self.phase, self.gate._state) != before)
        except TaskPreempted:
            self.phase = "unwind"
        return True

    def ask_for_slice(self: Any, world: Any) -> None:
        """The loop begins: wait for the slice."""
        self.say(0, LeaseRequest(epoch=self.job_epoch, slice_bytes=world.scope.slice_bytes,
                                 state_bytes=world.scope.state_bytes))  # fmt: skip
        self.phase = "lease"

    def _lease(self: Any, world: Any) -> None:
        if not self.has_lease:  # evicted while it waited
            self._end(world, "preempted")
            return
        world.arena.bind(self)
        self.committed = self.saved[2] if self.saved else -1
        if self.gate.is_evicting:
            self.gate.check("boundary")
        self._next_batch(world)

    def _fetch(self: Any, world: Any) -> None:
        self.gate.check("boundary")
        self._next_batch(world)

    def _next_batch(self: Any, world: Any) -> None:
        if world.arena.slice_of(self)[2] == world.scope.steps:
            self.phase = "finish"
            return
        self.gate.leave("loader")
        self.phase = "take"

    def _take(self: Any, world: Any) -> None:
        self.gate.enter()
        world.begins_a_step(self)
        self.phase = "step"

    def _step(self: Any, world: Any) -> None:
        self.gate.check("forward")
        self.phase = "wait"
        if self.is_commit_over(world):
            self._wait(world)

    def is_commit_over(self: Any, world: Any) -> bool:
        """Whether the optimizer may write: no commit reads the parameters."""
        return bool(self.in_flight < 0 or self.is_acknowledged)

    def _wait(self: Any, world: Any) -> None:
        self._finish_commit()
        first, second, step = world.arena.slice_of(self)
        self.gate.in_optimizer_step = True
        world.arena.write_slice(self, (after_step(first, step), second, step))
        self.phase = "half"
        if world.scope.is_coarse:
            self._half(world)

    def _half(self: Any, world: Any) -> None:
        first, second, step = world.arena.slice_of(self)
        self.gate.in_optimizer_step = False
        world.arena.write_slice(self, (first, after_step(second, step), step + 1))
        self.phase = "fetch"
        if step + 1 in world.scope.commit_steps:
            self._begin_commit(world)
        self._fetch(world)

    def _begin_commit(self: Any, world: Any) -> None:
        step = world.arena.slice_of(self)[2]
        self.in_flight, self.is_acknowledged = step, False
        self.commit_number += 1
        self.say(0, CommitStep(epoch=self.job_epoch, number=self.commit_number, step=step,
                               ranges=()))  # fmt: skip

    def _finish_commit(self: Any) -> None:
        if self.in_flight >= 0:
            self.committed, self.in_flight = self.in_flight, -1

    def _unwind(self: Any, world: Any) -> None:
        self._commit_and_end(world, "preempted")

    def _finish(self: Any, world: Any) -> None:
        self._commit_and_end(world, "preempted" if self.gate.is_evicting else "done")

    def _commit_and_end(self: Any, world: Any, outcome: Any) -> None:
        self._finish_commit()
        if self.committed != world.arena.slice_of(self)[2]:
            self._begin_commit(world)
            return
        self._end(world, outcome)

    def _end(self: Any, world: Any, outcome: Any) -> None:
        self.gate.leave()
        self.say(0, JobEnded(epoch=self.job_epoch, outcome=outcome, step=0))
        self.phase = "over"

    def _over(self: Any, world: Any) -> None:
        self.dies(0)
        world.reap(self)

    # -- the termination thread ----------------------------------------------------------------

    def obey(self: Any, message: Any) -> None:
        """``workers.main.Worker._obey``, with the real gate."""
        if message.epoch != self.job_epoch:
            return
        match type(message).__name__:
            case "StopTask":
                self.next_slot = message.next_slot
                self.gate.request_stop(message.turn, message.next_turn)
            case "GrantTurn":
                self.gate.grant(message.turn)
            case "EvictTask":
                self.gate.request_evict()
            case "LeaseGranted":
                self.has_lease = True
            case "StepCommitted":
                self.is_acknowledged |= message.number == self.commit_number
            case other:
                raise AssertionError(f"a worker cannot obey a {other}")


__all__ = ["COMPUTES", "GateCodec", "Script", "copy_gate", "image_of", "new_gate"]
