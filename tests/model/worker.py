"""Simulated worker that is copied before it changes, and can be frozen and thawed."""

from __future__ import annotations

import math
from collections import deque
from functools import partial
from typing import Any

from pipeswitch.extras.lab.clock import Move
from pipeswitch.extras.lab.device import ByteSpan, Image
from pipeswitch.extras.lab.simulated_script import BELL, SimulatedScript
from pipeswitch.extras.lab.simulated_worker import SimulatedInference, SimulatedWorker
from pipeswitch.ipc.gate import Gate, GateState
from pipeswitch.ipc.messages.base import Message, Turn
from pipeswitch.ipc.messages.worker import JobReport, JobSpec, RunInference, RunJob

from .channel import freeze_items, plain, thaw_items
from .frozen import Add, Kept, Next

TASK, SIGNAL = "task", "signal"
NO_TURN = Turn(0)
_STATES = {state.value: state for state in GateState}
# Moves that no other process can notice. They are made at once, together with the move before.
UNSEEN = frozenset({"answers", "cleans", "asks", "drops"})


class Worker(SimulatedWorker):
    """Worker process in a slot. Several states of the world may share the object.

    Attributes:
        kept: frozen form of a worker that several states share (it must not change); else None.
    """

    kept: Kept | None = None
    is_coarse = False

    def own(self) -> Worker:
        """Return a copy that one state of the world may change."""
        twin = _copy_of(self)
        twin.kept = None
        twin.inbox, twin.out = copied(self.inbox), copied(self.out)
        if self.inference is not None:
            task = twin.inference = _copy_of(self.inference)
            task.begins_at_ms, task.ends_at_ms = [*task.begins_at_ms], [*task.ends_at_ms]
        if self.script is not None:
            script = twin.script = _copy_of(self.script)
            script._say = twin.say
            script.gate = _copy_of(script.gate)
            script.gate._on_parked, script.gate.on_back = script._parked, script._back
            if isinstance(hide := script.gate._hide, partial):
                script.gate._hide = partial(script.hide, *hide.args)
        return twin

    def say(self, channel: str, message: Message) -> None:
        if not isinstance(message, JobReport):  # reports have no effect on decisions
            super().say(channel, plain(message))

    def hear(self, channel: str, message: Message) -> None:
        super().hear(channel, plain(message))
        if channel == TASK:
            self.settle()

    def end(self, status: int) -> None:
        super().end(status)
        self.inference = self.script = None

    def main_move(self) -> Move | None:
        """Return the main thread's next move; None while the thread waits."""
        steps = self.main_steps()
        return steps[0] if steps else None

    def settle(self) -> None:
        """Make the moves that no other process can notice."""
        while self.is_ready and self.runs and (move := self.main_move()) is not None:
            is_request = move.thread == TASK and isinstance(self.inbox[TASK][0], RunInference)
            is_half = self.is_coarse and move.what == "writes"
            if not (is_request or is_half or move.what in UNSEEN):
                return
            move.act()

    @property
    def is_idle(self) -> bool:
        """True if no task is in the worker and no message waits in its channels."""
        queues = (*self.inbox.values(), *self.out.values())
        return not any(queues) and self.inference is None and self.script is None


def _copy_of(one: Any) -> Any:
    twin = type(one).__new__(type(one))
    twin.__dict__.update(one.__dict__)
    return twin


def copied(queues: dict[str, deque[Message]]) -> dict[str, deque[Message]]:
    return {channel: queue.copy() for channel, queue in queues.items() if queue}


def freeze_worker(worker: Worker, e: Add) -> Any:
    e(worker.begun or 0)
    e(-worker._job_op_id)
    for op_id in worker.taken_back:
        e(op_id)
    task, script = worker.inference, worker.script
    return (
        worker.slot,
        len(worker.taken_back),
        worker.is_ready,
        worker.is_doomed,
        worker.status,
        None if worker.lease is None else tuple(worker.lease),
        tuple(
            [
                freeze_items(queue, e) if (queue := queues.get(channel)) else ()
                for queues in (worker.inbox, worker.out)
                for channel in (TASK, SIGNAL)
            ]
        ),
        None if task is None else (freeze_items((task.order,), e), task.has_begun, task.next_group),
        None if script is None else _freeze_script(script, e),
    )


def thaw_worker(frozen: Any, n: Next, worker: Worker) -> None:
    """Set the new object ``worker`` to a frozen state."""
    worker.begun, worker._job_op_id = n(), n()  # type: ignore[assignment]
    worker.taken_back = tuple([n() for _ in range(frozen[1])])  # type: ignore[misc]
    (_, _, worker.is_ready, worker.is_doomed, worker.status, lease, queues, task, script) = frozen
    worker.lease = None if lease is None else ByteSpan(*lease)
    queues_thawed = [deque(thaw_items(queue, n)) for queue in queues]
    worker.inbox = {TASK: queues_thawed[0], SIGNAL: queues_thawed[1]}
    worker.out = {TASK: queues_thawed[2], SIGNAL: queues_thawed[3]}
    if task is not None:
        (order,) = thaw_items(task[0], n)
        costs = worker.scene.programs[order.model].group_ms(order.plan, 1)
        worker.inference = SimulatedInference(order, costs, 0.0)
        worker.inference.has_begun = task[1]
        worker.inference.begins_at_ms = [0.0] * task[2]
        worker.inference.ends_at_ms = [0.0] * task[2]
    if script is not None:
        worker.script = _thaw_script(script, n, worker)


def _freeze_script(script: SimulatedScript, e: Add) -> Any:
    saved = script.saved
    e(-script.order.op_id)
    return (
        script.order.job,
        script.phase,
        None if script.lease is None else tuple(script.lease),
        None if saved is None else tuple(saved),
        script.committed,
        script.in_flight,
        script.number,
        script.is_read,
        script.is_acknowledged,
        script.is_held,
        None if script.hidden is None else tuple(script.hidden),
        _freeze_gate(script.gate, e),
    )


def _thaw_script(frozen: Any, n: Next, worker: Worker) -> SimulatedScript:
    order = RunJob(
        op_id=n(),
        turn=NO_TURN,
        spec=JobSpec(frozen[0], "", (), 1),
        log_path="",
        slot_bytes=0,
        commit_every_ms=math.inf,
    )
    saved = None if frozen[3] is None else Image(*frozen[3])
    script = SimulatedScript(order, worker.scene, worker.say, saved)
    (
        _,
        script.phase,
        lease,
        _,
        script.committed,
        script.in_flight,
        script.number,
        script.is_read,
        script.is_acknowledged,
        script.is_held,
        hidden,
        gate,
    ) = frozen
    script.hidden = None if hidden is None else Image(*hidden)
    script.lease = None if lease is None else ByteSpan(*lease)
    holds = script.gate.holds
    script.gate = _thaw_gate(gate, n, Gate(script._parked, BELL))
    script.gate.holds = holds
    if gate[-1]:
        script.gate._hide = partial(script.hide, n())
    return script


def _freeze_gate(gate: Gate, e: Add) -> Any:
    """Return the real gate's state; pass its turns, negated because they are ordered, to ``e``."""
    e(-gate._turn)
    e(-gate._granted)
    for pair in (gate._accepted, gate._future):
        if pair is not None:
            e(-pair[0])
            e(-pair[1])
    if isinstance(gate._hide, partial):
        e(gate._hide.args[0])
    return (
        gate._state.value,
        gate._accepted is not None,
        gate._future is not None,
        gate.is_evicting,
        gate.is_unwinding,
        gate.in_optimizer_step,
        gate._where,
        gate._at_boundary,
        gate._is_hidden,
        gate._hide is not None,
    )


def _thaw_gate(frozen: Any, n: Next, gate: Gate) -> Gate:
    state, has_accepted, has_future = frozen[:3]
    (
        gate.is_evicting,
        gate.is_unwinding,
        gate.in_optimizer_step,
        gate._where,
        gate._at_boundary,
        gate._is_hidden,
        _,
    ) = frozen[3:]
    gate._state, gate._is_waiting = _STATES[state], True  # in PARKED the main thread waits
    gate._turn, gate._granted = n(), n()
    gate._accepted = (n(), n()) if has_accepted else None
    gate._future = (n(), n()) if has_future else None
    gate._refresh()
    return gate


__all__ = ["SIGNAL", "TASK", "Worker", "copied", "freeze_worker", "thaw_worker"]
