"""Stages: processes that run functions of the model's owner before or after the model (ADR 34).

A stage uses no device: a request is here before its device is chosen, or after its model has
computed, while other models compute. A process has one request at a time. It reads the inputs in
the request pool and writes its result to its slot's memory, from which ``TakeResult`` copies it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from ...base.config import Config
from ...base.errors import Cancelled, DeadlineExceeded, PipeSwitchError, TaskFailed, WorkerLost
from ...ipc.messages.base import ModelName, OpId, Slot
from ...ipc.messages.helper import HelperCall, HelperDone, HelperFailed, HelperReady
from ...programs.interface.layout import Wrapper
from ...scheduler.state import events as ev
from ...scheduler.state.core import HELPERS, QUEUE, Core
from ...scheduler.state.records import NO_OP_ID, Request
from ...scheduler.state.states import (
    WORKER_TRANSITIONS,
    StateMachine,
    TaskEvent,
    WorkerEvent,
    WorkerState,
)


@dataclass
class StageSlot:
    """Slot for a preprocessing process, and the process in it."""

    slot: Slot
    state: StateMachine[WorkerState, WorkerEvent] = field(init=False)
    incarnation: OpId = NO_OP_ID  # id of its start; it lacks functions registered later
    pid: int = 0
    op_id: OpId = NO_OP_ID  # operation id of the current call
    token: ev.Token | None = None  # request of the call, or of the result that is being copied
    function: str = ""  # name of the function of the last call
    began_at_ms: float = 0.0  # start of the last call
    respawn_at_ms: float = 0.0
    is_copied: bool = False  # its result is being copied: nothing may write to its memory

    def __post_init__(self) -> None:
        name = f"stage {self.slot}"
        self.state = StateMachine(name, WorkerState.DEAD, WORKER_TRANSITIONS)

    @property
    def address(self) -> ev.Address:
        return ev.Address("stage", slot=self.slot, incarnation=self.incarnation)


@dataclass
class Raw:
    """Request whose inputs or answer a function has to make."""

    request: Request
    function: str
    born: OpId  # registration id of its model
    tenant: str
    error: PipeSwitchError | None = None  # set if it was cancelled while its result was copied


class StageQueue:
    """All PREPROCESSING requests, and the processes that serve them.

    Processes are started with the first request that needs one.

    Attributes:
        waits: the requests, in order of arrival.
    """

    def __init__(self, config: Config, core: Core) -> None:
        self._core, self._options = core, config.preprocess
        self.waits: dict[ev.Token, Raw] = {}
        slots = range(self._options.processes)
        self.processes = [StageSlot(Slot(slot)) for slot in slots]

    def __len__(self) -> int:
        return len(self.waits)

    def count(self, name: ModelName) -> int:
        return sum(raw.request.model == name for raw in self.waits.values())

    def held_by(self, caller: str, model: str = "") -> int:
        raws = [raw.request for raw in self.waits.values() if raw.request.origin.caller == caller]
        return sum(not model or request.model == model for request in raws)

    # -- requests -----------------------------------------------------------------------------

    def take(self, request: Request, wrapper: Wrapper, born: OpId, tenant: str) -> None:
        """Queue an admitted request, or one whose model has computed; ``prepared`` returns it."""
        function = wrapper.after if request.steps.is_computed else wrapper.before
        self.waits[request.token] = Raw(request, function, born, tenant)
        if request.origin.deadline_at_ms is not None:
            self._core.wake_at(request.origin.deadline_at_ms, HELPERS)
        self.advance()

    def prepared(self, event: ev.Prepared) -> Request | None:
        request = self._prepared(event)
        self.advance()
        return request

    def _prepared(self, event: ev.Prepared) -> Request | None:
        process = self.processes[event.source.slot]
        process.is_copied, process.token = False, None
        if process.state.state is WorkerState.CLEANING:
            process.state.apply(WorkerEvent.CLEANED, "its result was copied")
        raw = self.waits.get(event.token)
        if raw is None:  # the server is stopping
            return None
        error = raw.error or event.error
        if error is not None:
            is_cancelled = isinstance(error, Cancelled)
            self._refuse(raw, TaskEvent.CANCEL if is_cancelled else TaskEvent.ERROR, error)
            return None
        del self.waits[event.token]
        request = raw.request
        outcome = TaskEvent.FINISHED if request.steps.is_computed else TaskEvent.PREPARED
        request.state.apply(outcome, raw.function)
        request.steps.preprocess_ms = self._core.now_ms - process.began_at_ms
        request.run = event.run or request.run
        return request

    def cancel(self, token: ev.Token) -> bool:
        """Cancel a request, but not its running function. Return False if it is not here."""
        raw = self.waits.get(token)
        if raw is None:
            return False
        error = Cancelled("cancelled by the caller")
        if self._is_copied(token):
            raw.error = error
        else:
            self._refuse(raw, TaskEvent.CANCEL, error)
        return True

    def refuse_all(self, error: PipeSwitchError) -> None:
        """Refuse every waiting client; the frontend answers those whose result is being copied."""
        for token, raw in list(self.waits.items()):
            if not self._is_copied(token):
                self._refuse(raw, TaskEvent.ERROR, error)

    def _is_copied(self, token: ev.Token) -> bool:
        return any(process.is_copied and process.token == token for process in self.processes)

    def _refuse(self, raw: Raw, event: TaskEvent, error: PipeSwitchError) -> None:
        request = raw.request
        request.state.apply(event, type(error).__name__)
        self._core.dirty |= QUEUE
        del self.waits[request.token]
        error.request_id = request.run.request_id
        self._core.refuse(request.token, error)

    # -- processes ----------------------------------------------------------------------------

    def received(self, event: ev.Received) -> None:
        process = self.processes[event.source.slot]
        if event.source != process.address:
            self._core.counts["stale_messages"] += 1
            return
        match event.message:
            case HelperReady(pid=pid):
                process.pid = pid
                process.state.apply(WorkerEvent.READY, f"pid {pid}")
            case HelperDone(op_id=op_id, outputs=outputs) if op_id == process.op_id:
                raw = self._ended(process)
                if raw is not None and process.state.state is WorkerState.CLEANING:
                    process.is_copied = True
                    request = raw.request
                    self._core.emit(
                        ev.TakeResult(
                            token=request.token,
                            target=process.address,
                            model=request.model,
                            function=raw.function,
                            outputs=outputs,
                            is_computed=request.steps.is_computed,
                        )
                    )
                    return
                self._cleaned(process)
            case HelperFailed(op_id=op_id, reason=reason) if op_id == process.op_id:
                raw = self._ended(process)
                if raw is not None:
                    self._refuse(raw, TaskEvent.ERROR, failed(raw, reason))
                self._cleaned(process)
            case _:
                self._core.counts["stale_messages"] += 1
        self.advance()

    def _ended(self, process: StageSlot) -> Raw | None:
        """End a call; return its request if the request still waits for the result."""
        process.state.apply(WorkerEvent.TASK_ENDED, f"operation {process.op_id}")
        process.op_id = NO_OP_ID
        return None if process.token is None else self.waits.get(process.token)

    def _cleaned(self, process: StageSlot) -> None:
        process.token = None
        if process.state.state is WorkerState.CLEANING:
            process.state.apply(WorkerEvent.CLEANED)

    def exited(self, event: ev.Exited) -> None:
        """Handle a reaped process: retry its request, or refuse it with the cause of death."""
        core, process = self._core, self.processes[event.source.slot]
        if event.source != process.address:
            return
        is_blamed, was_called = process.state.state is not WorkerState.DOOMED, process.op_id
        process.state.apply(WorkerEvent.EXITED, f"status {event.status}")
        process.op_id, process.pid = NO_OP_ID, 0
        raw = self.waits.get(process.token) if process.token is not None else None
        if was_called and raw is not None:
            request = raw.request
            request.state.apply(TaskEvent.WORKER_DIED, f"status {event.status}")
            request.batching.deaths += is_blamed
            if request.batching.deaths >= core.settings.max_deaths:
                self._refuse(raw, TaskEvent.ERROR, _lost(raw, event.status))
        elif is_blamed and not was_called:  # the process died without a call
            process.respawn_at_ms = core.now_ms + core.settings.restart_backoff_ms
            core.wake_at(process.respawn_at_ms, HELPERS)
        if not process.is_copied:
            process.token = None
        core.counts["stage_restarts"] += 1
        self.advance()

    def advance(self) -> int:
        """Give each free process the most urgent request that waits."""
        self._expire()
        tokens = {process.token for process in self.processes}
        waiting = [raw for token, raw in self.waits.items() if token not in tokens]
        waiting.sort(key=lambda raw: raw.request.origin.priority)  # stable: older ones first
        for process in self.processes:
            if process.state.state is WorkerState.STANDBY and waiting:
                if process.incarnation > waiting[0].born:
                    self._call(process, waiting.pop(0))
                else:  # the process may have imported an older function
                    self._kill(process, "something was registered since")
        for process in self.processes:
            is_free = process.state.state is WorkerState.DEAD and not process.is_copied
            if is_free and waiting and process.respawn_at_ms <= self._core.now_ms:
                process.incarnation = self._core.next_op_id()
                process.state.apply(WorkerEvent.RESPAWNED)
                self._core.emit(ev.Spawn(process.address))
        return HELPERS

    def _call(self, process: StageSlot, raw: Raw) -> None:
        core = self._core
        process.state.apply(WorkerEvent.ACTIVATED, raw.request.run.request_id)
        process.op_id, process.token = core.next_op_id(), raw.request.token
        process.function, process.began_at_ms = raw.function, core.now_ms
        call = HelperCall(op_id=process.op_id, function=raw.function, inputs=raw.request.run.inputs)
        core.emit(ev.Send(process.address, call, tenant=raw.tenant))
        if self._options.max_time_ms:
            core.wake_at(core.now_ms + self._options.max_time_ms, HELPERS)

    def _expire(self) -> None:
        """End hung calls, and requests past their deadline whose result is not being copied."""
        now_ms = self._core.now_ms
        limit_ms = self._options.max_time_ms or math.inf
        for token, raw in list(self.waits.items()):
            if raw.request.due_ms <= now_ms and not self._is_copied(token):
                self._refuse(raw, TaskEvent.EXPIRE, _late(raw, now_ms))
        for process in self.processes:
            if process.state.state is WorkerState.ACTIVE:
                if now_ms < process.began_at_ms + limit_ms:
                    continue
                self._kill(process, "it hangs")
                hung = self.waits.get(process.token) if process.token is not None else None
                if hung is not None:
                    self._refuse(hung, TaskEvent.EXPIRE, _hung(hung, limit_ms))

    def _kill(self, process: StageSlot, why: str) -> None:
        process.state.apply(WorkerEvent.KILLED, why)
        self._core.emit(ev.Kill(process.address))

    def rows(self) -> Iterator[tuple[str, str, str, int]]:
        for process in self.processes:
            if process.pid:
                state = process.state.state
                why = process.function if state is WorkerState.ACTIVE else ""
                yield f"stage-{process.slot}", state.value, why, process.pid

    def stats(self) -> dict[str, int]:
        restarts = self._core.counts["stage_restarts"]
        return {"preprocessing": len(self), "stage_restarts": restarts}

    def check(self) -> None:
        for process in self.processes:
            assert bool(process.op_id) <= (process.token is not None), process.state.story
            if process.is_copied:
                assert process.token is not None
        tokens = [process.token for process in self.processes if process.token is not None]
        assert len(tokens) == len(set(tokens)), "two processes make one request's inputs"


def kind(raw: Raw) -> str:
    """Return which function of a model a request runs."""
    return "postprocess" if raw.request.steps.is_computed else "preprocess"


def failed(raw: Raw, reason: str) -> TaskFailed:
    """Return the client's error for a function that failed, or whose result is invalid."""
    return TaskFailed(
        f'{kind(raw)} {raw.function} of "{raw.request.model}": {reason}',
        hint=f"pipeswitch show {raw.request.model} says what the model takes",
    )


def _lost(raw: Raw, status: int) -> WorkerLost:
    return WorkerLost(
        f'{kind(raw)} {raw.function} of "{raw.request.model}": its process died '
        f"{raw.request.batching.deaths} times (last status {status})",
        hint=f"pipeswitch show {raw.request.model}",
        deaths=raw.request.batching.deaths,
    )


def _late(raw: Raw, now_ms: float) -> DeadlineExceeded:
    waited_ms = now_ms - raw.request.origin.arrived_at_ms
    product = "answer" if raw.request.steps.is_computed else "inputs"
    return DeadlineExceeded(
        f"{raw.function} had not returned the {product} after {waited_ms:.0f} ms",
        hint="raise the deadline, or [preprocess] processes",
        waited_ms=waited_ms,
    )


def _hung(raw: Raw, limit_ms: float) -> DeadlineExceeded:
    return DeadlineExceeded(
        f'{kind(raw)} {raw.function} of "{raw.request.model}" was killed: it ran for '
        f"{limit_ms / 1000.0:g} s",
        hint="raise [preprocess] max_time",
    )
