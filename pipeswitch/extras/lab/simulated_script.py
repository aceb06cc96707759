"""Training script in a worker, with the real gate (``ipc/gate.py``).

The script's state is three numbers in its slice (``device.Image``). It writes them one after the
other, so an unfinished, lost or repeated step is visible in the slice.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final, Literal

from ...base.errors import TaskPreempted
from ...ipc.gate import Gate, GateState, Where
from ...ipc.messages import worker as worker_msg
from ...ipc.messages.base import Message, OpId, SliceRead, StepCommitted, Turn
from .clock import Move
from .device import ZEROS, ByteSpan, Image, Violation, after_step, image_of, require
from .process import Scene

Say = Callable[[str, Message], None]
Outcome = Literal["done", "preempted", "failed"]
Phase = Literal[
    "starting",
    "leasing",  # waits for its slice
    "taking",  # has a batch, and waits for the device
    "training",  # forward and backward
    "waiting",  # waits for a commit that still reads the parameters
    "writing",  # half of the parameters are written
    "fetching",  # between two steps
    "unwinding",
    "finishing",  # commits its last steps, then ends
    "over",
]
COMPUTES: Final = (GateState.RUNNING, GateState.STOPPING)


class Halt(BaseException):
    """Exception that ends a move when the main thread must wait inside the gate."""


class Bell:
    """Stand-in for the gate's condition. A wait ends the move, which is repeated later."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None

    def wait(self) -> None:
        raise Halt

    def notify_all(self) -> None:
        return None


BELL: Final[Any] = Bell()


class SimulatedScript:
    """Main thread of a worker that runs a job, and the handling of the termination thread's orders.

    Args:
        saved: the image from which it resumes; None: it starts from the beginning.
    """

    def __init__(
        self, order: worker_msg.RunJob, scene: Scene, say: Say, saved: Image | None
    ) -> None:
        self.order = order
        self.phase: Phase = "starting"
        self.lease: ByteSpan | None = None
        self.saved = saved
        self.hidden: Image | None = None  # content of its slice while it may not use it
        self.committed = -1  # last committed step
        self.in_flight = -1  # step of the commit that is being copied; -1: none
        self.number = 0  # number of the last commit that began
        self.is_read = False  # the commit ``number`` has read the slice
        self.is_acknowledged = False  # whether the commit ``number`` was acknowledged
        self.is_stubborn = scene.choices.happens("swallow", order.job)
        self.gate = Gate(self._parked, BELL)
        self.gate.on_back = self._back
        self.gate.holds = scene.choices.happens("holds", order.job)
        self.is_held = False  # the device does not compute what the script enqueues
        self._scene, self._say = scene, say
        self._plan = scene.scripts[order.job]
        self._committed_at_ms = scene.clock.now_ms
        self._left_ms = 0.0  # rest of the current step
        self._computes_since_ms = 0.0
        if order.turn:
            self.gate.grant(order.turn)

    @property
    def computes(self) -> bool:
        return self.phase != "over" and self.gate.state in COMPUTES

    @property
    def step(self) -> int:
        """Number of finished steps, according to the slice."""
        return self._image.step

    @property
    def _image(self) -> Image:
        require(self.hidden is None, f"{self.order.job} uses a slice that it has hidden (I4)")
        return ZEROS if self.lease is None else self._scene.device.slice_at(self.lease)

    # -- termination thread --------------------------------------------------------------------

    def hears(self, message: Message) -> None:
        self.is_held &= not isinstance(message, worker_msg.OPENING)
        match message:
            case worker_msg.StopTask(turn=turn, next_turn=next_turn, at_boundary=at_boundary):
                self.gate.request_stop(turn, next_turn, at_boundary=at_boundary)
            case worker_msg.GrantTurn(turn=turn):
                computed = self.computes
                self.gate.grant(turn)
                if not computed:
                    self._computes_since_ms = self._scene.clock.now_ms
            case worker_msg.EvictTask():
                self.gate.request_evict()
            case worker_msg.LeaseGranted(offset_bytes=start, size_bytes=size):
                self.lease = ByteSpan(start, start + size)
            case worker_msg.HideSlice(swap_id=swap_id):
                self.gate.request_hide(partial(self.hide, swap_id))
            case worker_msg.ShowSlice(offset_bytes=start):
                assert self.lease is not None
                hidden, self.hidden = self.hidden, None
                self.lease = ByteSpan(start, start + self.lease.end - self.lease.start)
                text = f"{self.order.job} hid {hidden} and gets {self._image} back (I4)"
                require(hidden in (None, self._image), text)
                self.gate.request_hide(None)
            case worker_msg.LeaseRefused():
                if self.phase == "leasing":
                    self._end("failed")
            case SliceRead(number=number):
                self.is_read |= number == self.number
            case StepCommitted(number=number):
                self.is_acknowledged |= number == self.number
            case _:
                raise Violation(f"a script takes no {message}")

    def hide(self, swap_id: OpId) -> None:
        """Stop using the slice; the main thread waits in the gate."""
        self.hidden = self._image
        message = worker_msg.SliceHidden(op_id=self.order.op_id, swap_id=swap_id)
        self._say("task", message)

    def _parked(self, turn: int, next_turn: int, where: Where) -> None:
        """Write the next turn, if one is ordered, and report that the script has parked."""
        now_ms, self.is_held = self._scene.clock.now_ms, where == "stream"
        self._left_ms = max(0.0, self._left_ms - (now_ms - self._computes_since_ms))
        if next_turn:
            self._scene.device.turn = next_turn
        self._say(
            "signal",
            worker_msg.JobParked(
                op_id=self.order.op_id,
                turn=Turn(turn),
                next_turn=Turn(next_turn),
                where=where,
                asked_at_ms=now_ms,
                parked_at_ms=now_ms,
            ),
        )

    def _back(self, turn: int, is_blocked: bool) -> None:
        self._say(
            "signal",
            worker_msg.JobReady(op_id=self.order.op_id, turn=Turn(turn), is_blocked=is_blocked),
        )

    # -- main thread ---------------------------------------------------------------------------

    def steps(self) -> list[Move]:
        """Return the next steps of the main thread; none while it waits."""
        gate, plan, costs = self.gate, self._plan, self._scene.costs
        state, is_evicting = gate.state, gate.is_evicting
        is_stubborn = self.is_stubborn and (state is GateState.STOPPING or is_evicting)
        if is_stubborn or (self.is_held and self.phase in ("waiting", "writing")):
            return []  # a stubborn script neither parks nor unwinds
        what, cost_ms, act, is_possible = "", 0.0, self._take, True
        match self.phase:
            case "starting":
                what, cost_ms, act = "asks", plan.start_ms, self._ask_lease
            case "leasing":
                is_possible = self.lease is not None or is_evicting
                what, act = "begins", self._begin
            case "taking" | "fetching" | "training":
                is_possible = state is not GateState.PARKED or (is_evicting and self.hidden is None)
                if self.phase == "fetching":
                    what, act = "fetches", self._fetch
                elif self.phase == "taking":
                    what, cost_ms = "takes", 0.0 if state in COMPUTES else plan.loader_ms
                elif gate.is_pending and not gate.waits_for_boundary:
                    what, cost_ms, act = "stops", costs.park_ms, self._train
                else:
                    what, cost_ms, act = "trains", self._left_ms, self._train
            case "writing":
                what, act = "writes", self._write
            case "waiting" | "unwinding" | "finishing":
                is_possible = self.is_commit_over or (self.phase == "waiting" and self.is_read)
                what, act = (
                    ("waits", self._wait)
                    if self.phase == "waiting"
                    else ("commits", self._commit_and_end)
                )
            case "over":
                is_possible = False
        return [Move("main", what, cost_ms, lambda: self._do(act))] if is_possible else []

    def _do(self, act: Callable[[], None]) -> None:
        try:
            act()
        except Halt:
            return
        except TaskPreempted:
            self.phase = "unwinding"

    def _ask_lease(self) -> None:
        self.phase = "leasing"
        self._say(
            "task",
            worker_msg.LeaseRequest(
                op_id=self.order.op_id,
                slice_bytes=self._plan.slice_bytes,
                state_bytes=self._plan.state_bytes,
            ),
        )

    def _begin(self) -> None:
        if self.lease is None:  # the job was evicted while it waited for the lease
            self._end("preempted")
            return
        require(self._image == ZEROS, "a slice holds its last owner's bytes (I4)")
        if self.saved is not None:
            is_whole = self.saved == image_of(self.saved.step)
            require(is_whole, f"it resumes from {self.saved} (I2)")
            self._set(self.saved)
            self.committed = self.saved.step
        self._say("task", worker_msg.JobReport(op_id=self.order.op_id, kind="started", values={}))
        if self.gate.is_evicting:
            self.gate.check("boundary")
        self._next_batch()

    def _fetch(self) -> None:
        self.gate.check("boundary")
        self._next_batch()

    def _next_batch(self) -> None:
        if self.step == self._plan.steps:
            self.phase = "finishing"
            return
        self.gate.leave("loader")
        self.phase = "taking"

    def _take(self) -> None:
        self.gate.enter()
        self.phase = "training"
        self._left_ms, self._computes_since_ms = self._plan.step_ms, self._scene.clock.now_ms

    def _train(self) -> None:
        self.gate.check("forward")
        if self._scene.choices.happens("script_error", self.order.job):
            self._end("failed")
            return
        self.phase = "waiting"
        if self.is_commit_over or self.is_read:
            self._wait()

    @property
    def is_commit_over(self) -> bool:
        """True if no commit is under way."""
        return self.in_flight < 0 or self.is_acknowledged

    def _wait(self) -> None:
        self._finish_commit()
        image = self._image
        self.gate.in_optimizer_step = True
        self._set(image._replace(first=after_step(image.first, image.step)))
        self.phase = "writing"

    def _write(self) -> None:
        first, second, step = self._image
        self.gate.in_optimizer_step = False
        self._set(Image(first, after_step(second, step), step + 1))
        self.phase = "fetching"
        values = {
            "step": step + 1,
            "left": self._plan.steps - step - 1,
            "away_ms": round(self._plan.loader_ms),
        }
        self._say(
            "task", worker_msg.JobReport(op_id=self.order.op_id, kind="progress", values=values)
        )
        if self.is_due and self.is_commit_over:
            self._begin_commit()
        self._fetch()

    @property
    def is_due(self) -> bool:
        """True if the step that has just ended must be committed."""
        is_late = self._scene.clock.now_ms - self._committed_at_ms >= self.order.commit_every_ms
        return is_late or self._scene.choices.happens("commit", self.order.job)

    def _begin_commit(self) -> None:
        self._finish_commit()
        self.in_flight, self.is_read, self.is_acknowledged = self.step, False, False
        self.number += 1
        self._committed_at_ms = self._scene.clock.now_ms
        self._say(
            "task",
            worker_msg.CommitStep(
                op_id=self.order.op_id,
                number=self.number,
                step=self.in_flight,
                ranges=self._plan.ranges,
            ),
        )

    def _finish_commit(self) -> None:
        if self.in_flight >= 0 and self.is_acknowledged:
            self.committed, self.in_flight = self.in_flight, -1

    def _commit_and_end(self) -> None:
        self._finish_commit()
        is_evicted, job = self.gate.is_evicting, self.order.job
        skips = is_evicted and self._scene.choices.happens("skips_commit", job)
        if self.committed != self.step and not skips:
            self._begin_commit()
            return
        self._end("preempted" if is_evicted else "done")

    def _end(self, outcome: Outcome) -> None:
        self.gate.leave()
        self.is_stubborn = self._scene.choices.happens("linger", self.order.job)
        self._say(
            "task", worker_msg.JobEnded(op_id=self.order.op_id, outcome=outcome, step=self.step)
        )
        self.phase = "over"

    def _set(self, image: Image) -> None:
        assert self.lease is not None
        require(self.hidden is None, f"{self.order.job} writes a slice that it has hidden (I4)")
        self._scene.device.write_slice(self.lease, image)
