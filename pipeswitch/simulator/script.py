"""A training script in a worker, with the states of the gate (``ipc/gate.py``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from ..ipc.messages import (
    CommitStep,
    EvictTask,
    GrantTurn,
    JobEnded,
    JobReport,
    LeaseGranted,
    LeaseRefused,
    LeaseRequest,
    Message,
    Parked,
    RunJob,
    StepCommitted,
    StopTask,
    Turn,
)
from .clock import Move
from .process import Scene
from .violation import Violation, require

NO_TURN = Turn(0)
Say = Callable[[str, Message], None]
Outcome = Literal["done", "preempted", "failed"]


class SimulatedScript:
    """The main thread of a worker that runs a job, and what the termination thread tells it.

    Phases: *starting*, *leasing* (waits for its slice), *training*, *committing*, *unwinding*
    (evicted, its last commit under way), *over*. While training it is *away* when it needs no
    device: before its first step, or waiting for data.
    """

    def __init__(self, order: RunJob, scene: Scene, say: Say) -> None:
        self.order = order
        self.phase = "starting"
        self.step = max(0, scene.commits.get(order.job, 0))
        self.has_lease = False
        self.turn = NO_TURN
        self.holds = False  # the turn
        self.is_away = True
        self.is_evicted = False
        self.is_stubborn = scene.choices.happens("swallow", order.job)
        self._scene, self._say = scene, say
        self._plan = scene.scripts[order.job]
        self._stop: StopTask | None = None
        self._future_stop: StopTask | None = None
        self._commits = 0  # begun
        self._committed_at_ms = scene.clock.now_ms
        self._left_ms = self._plan.step_ms  # of the step under way
        self._computes_since_ms = 0.0
        self._grant(order.turn)

    @property
    def computes(self) -> bool:
        return self.holds and not self.is_away and self.phase == "training"

    # -- termination thread --------------------------------------------------------------------

    def hears(self, message: Message) -> None:
        match message:
            case StopTask(turn=turn) if turn > self.turn:
                self._future_stop = message
            case StopTask():
                self._asked_to_stop(message)
            case GrantTurn(turn=turn):
                self._grant(turn)
            case EvictTask():
                self.is_evicted = True
            case LeaseGranted():
                self.has_lease = True
            case LeaseRefused():
                if self.phase == "leasing":
                    self._ends("failed")
            case StepCommitted(step=step) if self.phase in ("committing", "unwinding"):
                self.step = max(self.step, step)
                if self.phase == "unwinding":
                    self._ends("preempted")
                else:
                    self._goes_on()
            case StepCommitted():
                pass
            case _:
                raise Violation(f"a script takes no {message}")

    def _grant(self, turn: Turn) -> None:
        self.turn, self.holds = turn, turn > 0
        self._computes_since_ms = self._scene.clock.now_ms
        stop = self._future_stop
        if stop is not None and stop.turn == turn:
            self._future_stop = None
            self._asked_to_stop(stop)

    def _asked_to_stop(self, stop: StopTask) -> None:
        """Answered at once where the script needs no device."""
        if stop.turn != self.turn or not self.holds:
            return
        self._stop = stop
        if self.is_away or self.phase == "over":
            self._park()

    def _park(self) -> None:
        stop, now_ms = self._stop, self._scene.clock.now_ms
        assert stop is not None
        if self.computes:
            self._left_ms = max(0.0, self._left_ms - (now_ms - self._computes_since_ms))
        self._stop, self.holds = None, False
        if stop.next_turn:
            self._scene.device.turn = stop.next_turn
        self._say("signal", Parked(
            epoch=self.order.epoch, turn=stop.turn, next_turn=stop.next_turn, where="forward",
            asked_at_ms=now_ms, parked_at_ms=now_ms))  # fmt: skip

    # -- main thread ---------------------------------------------------------------------------

    def steps(self) -> list[Move]:
        """What the main thread can do next; nothing while it waits."""
        park_ms = self._scene.costs.park_ms
        if self.phase == "over" or (self.is_stubborn and (self._stop or self.is_evicted)):
            return []  # the latter neither parks nor unwinds
        if self.phase == "unwinding":
            # A commit that was refused or lost is given up; the killed worker loses it anyway.
            return [Move("main", "gives up", self._plan.give_up_ms, self._gives_up)]
        if self._stop is not None:
            return [Move("main", "parks", park_ms, self._park)]
        if self.is_evicted:
            return [Move("main", "unwinds", park_ms, self._unwind)]
        if self.phase == "starting":
            return [Move("main", "asks", self._plan.start_ms, self._ask_lease)]
        if self.phase == "leasing" and self.has_lease:
            return [Move("main", "begins", 0.0, self._begins)]
        if self.phase == "training" and self.holds:
            if self.is_away:
                return [Move("main", "enters", self._plan.loader_ms, self._enters)]
            return [Move("main", "trains", self._left_ms, self._train)]
        return []

    def _ask_lease(self) -> None:
        self.phase = "leasing"
        self._say("task", LeaseRequest(
            epoch=self.order.epoch, slice_bytes=self._plan.slice_bytes,
            state_bytes=self._plan.state_bytes))  # fmt: skip

    def _begins(self) -> None:
        self._goes_on()
        self._say("task", JobReport(epoch=self.order.epoch, kind="started", values={}))

    def _goes_on(self) -> None:
        self.phase = "training"
        self._computes_since_ms = self._scene.clock.now_ms

    def _enters(self) -> None:
        self.is_away = False
        self._computes_since_ms = self._scene.clock.now_ms

    def _train(self) -> None:
        """One step, and what follows it; where chance says so, something else first."""
        happens, job = self._scene.choices.happens, self.order.job
        require(self.has_lease, "it trains without memory")
        if happens("loader", job):
            self.is_away = True
        elif happens("commit", job):
            self._commit("committing")
        elif happens("script_error", job):
            self._ends("failed")
        else:
            self._finish_step()

    def _finish_step(self) -> None:
        now_ms, plan = self._scene.clock.now_ms, self._plan
        self.step += 1
        self._left_ms, self._computes_since_ms = plan.step_ms, now_ms
        values = {"step": self.step, "steps_per_s": 1e3 / plan.step_ms if plan.step_ms else 1.0}
        self._say("task", JobReport(epoch=self.order.epoch, kind="step", values=values))
        if self.step >= plan.steps:
            self._ends("done")
        elif now_ms - self._committed_at_ms >= self.order.commit_every_ms:
            self._commit("committing")

    def _unwind(self) -> None:
        if self.has_lease and not self._scene.choices.happens("skips_commit", self.order.job):
            self._commit("unwinding")
        else:
            self._ends("preempted")

    def _gives_up(self) -> None:
        self._ends("preempted")

    def _commit(self, phase: str) -> None:
        self.phase = phase
        self._commits += 1
        self._committed_at_ms = self._scene.clock.now_ms
        self._say("task", CommitStep(epoch=self.order.epoch, number=self._commits, step=self.step,
                                     ranges=self._plan.ranges))  # fmt: skip

    def _ends(self, outcome: Outcome) -> None:
        self.phase = "over"
        self.is_stubborn = self._scene.choices.happens("linger", self.order.job)
        self._say("task", JobEnded(epoch=self.order.epoch, outcome=outcome, step=self.step))


__all__ = ["SimulatedScript"]
