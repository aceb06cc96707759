"""Inference requests: from a client's message to the pool and the scheduler.

The models are those that the scheduler announced. A small payload is copied into the pool at once,
a large one by another thread; its request continues when the copy is done.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

import msgspec

from ..base.errors import Cancelled, InvalidInput, PipeSwitchError, TaskFailed
from ..base.failpoints import reach
from ..base.roles import URGENT_PRIORITY, Role
from ..base.worker_thread import WorkerThread
from ..ipc.messages.base import ModelName, OpId, SlabTensor
from ..scheduler.events import (
    CancelRequest,
    Event,
    InferArrived,
    ModelAvailable,
    PrefetchHint,
    Prepared,
    Reply,
    TakeResult,
)
from ..scheduler.state.versions import split_name
from ..wire.frames import VERSION, RequestHeader, WireTensor
from ..wire.request_timing import RequestTiming
from . import chains, validation
from .models import Models
from .request_pool import PoolAllocation
from .requests import Pending, Requests, Run
from .sequences.sequence import SequenceOptions, SequenceState, sequence_options
from .transport.clients import Client
from .validation import Body, ValidatedRequest

INLINE_COPY_BYTES: Final = 1 << 20  # about 0.1 ms: what a hop to another thread and back costs
_NO_RUN: Final = OpId(0)


class Arrival(msgspec.Struct, kw_only=True, eq=False):
    """Request between its message and its event: sender, arrival time, and fields."""

    client: Client
    at_ms: float
    caller: str  # the client's tenant, or the one that the gateway names
    connection: str
    version: int = 0  # 0: the current one
    trace_id: str = ""
    asked: SequenceOptions | None = None  # of its sequence
    held: SequenceState | None = None  # that sequence
    priority: int = 0
    deadline_at_ms: float | None = None

    def read(self, body: Body) -> None:
        """Read a request; raise InvalidInput or PermissionDenied."""
        self.read_asker(body)
        self.asked = sequence_options(body)
        body.done()

    def read_asker(self, body: Body) -> None:
        """Read the caller and the version. Raises InvalidInput, PermissionDenied."""
        self.version = body.count("version", 0)
        self.connection = validation.address_of(body, self.caller) or self.connection
        self.caller = validation.tenant_of(body, self.caller)
        self.trace_id = validation.trace_id_of(body)


class Inference:
    """Inference requests of all clients. Used by the loop's thread."""

    def __init__(
        self,
        requests: Requests,
        *,
        take: Callable[[Event], None],
        answer: Callable[[Reply], None],
        call_soon: Callable[[Callable[[], None]], None],
        now_ms: Callable[[], float],
        max_bytes: int,
        deadline_ms: float | None,
    ) -> None:
        """Args:
        take: takes an event for the scheduler.
        answer: ends a request.
        call_soon: has the loop's thread call, from any other.
        max_bytes: of all inputs of a request.
        deadline_ms: of requests that name none.
        """
        self.requests, self._pool, self._sequences = requests, requests.pool, requests.sequences
        self.take, self.answer, self.call_soon = take, answer, call_soon
        self.now_ms = now_ms
        self._deadline_ms = deadline_ms
        self.copier = WorkerThread("pipeswitch-copy")
        self.models = Models(max_bytes)

    def arrival_of(self, client: Client) -> Arrival:
        """Return a request that comes now."""
        return Arrival(
            client=client,
            at_ms=self.now_ms(),
            caller=client.principal.tenant,
            connection=client.session,
        )

    def read_urgency(
        self, arrival: Arrival, header: RequestHeader, announced: ModelAvailable
    ) -> None:
        """Read a request's priority and deadline. Raises InvalidInput, PermissionDenied."""
        arrival.priority = announced.priority
        if header.priority:
            if header.priority == URGENT_PRIORITY:
                arrival.client.principal.require(Role.URGENT, "priority high")
            arrival.priority = validation.priority_number(header.priority, announced.priority)
        deadline_ms = self._deadline_ms if header.deadline_ms is None else header.deadline_ms
        if deadline_ms is not None:
            arrival.deadline_at_ms = validation.deadline_at_ms(deadline_ms, arrival.at_ms)

    def infer(self, client: Client, header: RequestHeader, tensors: Sequence[Any]) -> None:
        """Accept a request."""
        arrival = self.arrival_of(client)
        if header.body:
            arrival.read(Body("infer", header.body))
        announced = self.models.current.get(header.model)
        if announced is None or arrival.version:
            announced = self.models.find(header.model, arrival.version)
        if announced.chain is not None:
            announced = chains.begins(announced, self.models.current)
        try:
            if arrival.asked is not None:
                announced, header, tensors = self._with_state(
                    arrival, arrival.asked, announced, header, tensors
                )
            admitted = self.models.admit(header, [*map(len, tensors)], announced)
            if arrival.held is not None:
                admitted = arrival.held.apart(admitted)
            arrival.priority = announced.priority
            if header.priority or (header.deadline_ms, self._deadline_ms) != (None, None):
                self.read_urgency(arrival, header, announced)
            room = self._pool.reserve(
                arrival.caller, admitted.input_bytes, admitted.reply_bytes, announced.tenant
            )
        except PipeSwitchError:
            if arrival.held is not None:
                self._sequences.refused(arrival.held)
            raise
        pending = self.requests.accept(client, header, room)
        self._begin(arrival, announced, header, pending, admitted, room, tensors)

    def _with_state(
        self,
        arrival: Arrival,
        asked: SequenceOptions,
        announced: ModelAvailable,
        header: RequestHeader,
        tensors: Sequence[Any],
    ) -> tuple[ModelAvailable, RequestHeader, Sequence[Any]]:
        """Return the version with which the request's sequence began, and its inputs with the
        state.

        Raises:
            PipeSwitchError: it has no such sequence, or does not fit it.
        """
        held = arrival.held = self._sequences.of(asked, arrival.client, arrival.caller, announced)
        announced = self._of_sequence(held, arrival.version)
        return announced, *self._sequences.given(held, asked, header, tensors)

    def _begin(
        self,
        arrival: Arrival,
        announced: ModelAvailable,
        header: RequestHeader,
        pending: Pending,
        admitted: ValidatedRequest,
        room: PoolAllocation,
        tensors: Sequence[Any],
    ) -> None:
        """Give an accepted request to the scheduler when its inputs lie in the pool."""
        held, payload = arrival.held, [tensors[item.frame] for item in admitted.inputs]
        pending.caller, pending.trace_id = arrival.caller, arrival.trace_id
        pending.bytes_in = sum(map(len, payload))
        if arrival.asked is not None and held is not None:
            pending.sequence = held
            self._sequences.begin(held, arrival.asked)
        placed = room.place(admitted.inputs)
        event = InferArrived(
            token=pending.token,
            request_id=header.id,
            model=announced.model,
            digest=announced.manifest.digest,
            priority=arrival.priority,
            deadline_at_ms=arrival.deadline_at_ms,
            inputs=placed if held is None else held.among(placed),
            reply_offset_bytes=room.reply_offset_bytes,
            reply_bytes=room.reply_bytes,
            caller=arrival.caller,
            connection=arrival.connection,
            tenant=room.tenant,
            registration_id=0 if arrival.version or held is not None else announced.registration_id,
            sequence=0 if held is None else held.number,
            after=_NO_RUN if held is None else held.op_id,
            arrived_at_ms=arrival.at_ms,
        )
        if announced.stage is not None and announced.stage.after:
            pending.after = event
        elif announced.chain is not None:
            own = arrival.priority if header.priority else None
            pending.run = chains.run_of(announced.chain, event, own, pending)
        state_bytes = 0 if held is None else held.copy_bytes
        if admitted.input_bytes + state_bytes > INLINE_COPY_BYTES:
            pending.is_copying = True
            first = event.model if pending.run is None else pending.run.chain.steps[0].model
            self.take(PrefetchHint(model=ModelName(first)))  # it need not wait for the copy
            copied = functools.partial(self._copied, pending, event)
            self._copy(placed, payload, event.tenant, copied, held)
            return
        if held is not None and state_bytes:
            held.copy(self._pool)
        self._pool.fill(placed, payload, event.tenant)
        if pending.run is None:
            self.take(event)
        else:
            self._next(pending, pending.run)

    def _of_sequence(self, held: SequenceState, version: int) -> ModelAvailable:
        """Return the version with which the sequence began, as it is now.

        Raises:
            InvalidInput: it is gone, or the request names another.
        """
        began = held.announced
        base = began.base or began.model
        if version not in (0, began.version):
            raise InvalidInput(f'sequence "{held.key[1]}" began with version {began.version}')
        return self.models.version(base, began.version)

    def prefetch(self, _: Client, header: RequestHeader, __: Sequence[Any]) -> None:
        """Handle a prefetch hint; it has no answer."""
        announced = self.models.current.get(header.model)
        if announced is not None:
            chain = announced.chain
            first = header.model if chain is None else chain.steps[0].model
            self.take(PrefetchHint(model=ModelName(first)))

    def _copy(
        self,
        placed: Sequence[SlabTensor],
        payload: Sequence[Any],
        tenant: str,
        then: Callable[[PipeSwitchError | None], None],
        held: SequenceState | None = None,
    ) -> None:
        """Copy a large payload into the pool, and what its sequence needs, on the copier's thread.

        Args:
            then: called on the loop's thread afterwards, with the error if the copy failed.
        """

        def copy() -> None:
            if held is not None:
                held.copy(self._pool)
            self._pool.fill(placed, payload, tenant)
            self.call_soon(functools.partial(then, None))

        self.copier.put(copy, lambda error: self.call_soon(functools.partial(then, error)))

    def _copied(self, pending: Pending, event: InferArrived, error: PipeSwitchError | None) -> None:
        """Continue a request whose payload is in the pool; it can be cancelled from now on."""
        pending.is_copying = False
        reach("frontend.copied")
        if pending.is_cancelled:
            error = Cancelled(f"request {pending.request_id} was cancelled")
        if error is not None:
            self.answer(Reply(token=pending.token, error=error))
        elif pending.run is None:
            self.take(event)
        else:
            self._next(pending, pending.run)

    # ---- what a function made ------------------------------------------------------------------

    def take_result(self, command: TakeResult, memory: memoryview) -> None:
        """Copy a function's result into the pool in place of the input, then send ``Prepared``,
        if the model takes it or it is the declared answer.

        ``memory``: of the slot, whose process waits in the meantime.
        """
        pending = self.requests.find(command.token)
        prepared = Prepared(token=command.token, slot=command.slot)
        if pending is None:
            self.take(prepared)
            return
        try:
            tensors = [memory[one.offset_bytes :][: one.size_bytes] for one in command.outputs]
            admit = self._admit_answer if command.is_postprocess else self._admit_result
            admitted, announced = admit(command, [len(one) for one in tensors])
            holder = pending.room.holder if pending.room is not None else ""
            self.requests.clear(pending)  # it holds its share no longer
            room = pending.room = self._pool.reserve(
                holder, admitted.input_bytes, admitted.reply_bytes, announced.tenant
            )
        except PipeSwitchError as error:
            self.take(msgspec.structs.replace(prepared, error=error))
            return
        prepared = msgspec.structs.replace(
            prepared,
            inputs=room.place(admitted.inputs, in_reply=command.is_postprocess),
            reply_offset_bytes=room.reply_offset_bytes,
            reply_bytes=room.reply_bytes,
            digest=announced.manifest.digest,
        )
        payload = [tensors[item.frame] for item in admitted.inputs]

        def taken(error: PipeSwitchError | None) -> None:
            self.take(msgspec.structs.replace(prepared, error=error))

        if sum(map(len, payload)) <= INLINE_COPY_BYTES:
            self._pool.fill(prepared.inputs, payload, room.tenant)
            taken(None)
        else:
            self._copy(prepared.inputs, payload, room.tenant, taken)

    def _admit_result(
        self, command: TakeResult, sizes: Sequence[int]
    ) -> tuple[ValidatedRequest, ModelAvailable]:
        """Check that a model takes the result of its function.

        Raises:
            TaskFailed: it does not; the message has both signatures and the function.
            InvalidInput: the model left in the meantime.
        """
        announced = self.models.version(*split_name(command.model))
        announced = msgspec.structs.replace(announced, stage=None)
        try:
            return self.models.admit(_as_request(command), sizes, announced), announced
        except InvalidInput as error:
            raise TaskFailed(
                f"preprocess {command.function} returned invalid inputs for its model: "
                f"{error.message}",
                hint=error.hint,
            ) from None

    def _admit_answer(
        self, command: TakeResult, sizes: Sequence[int]
    ) -> tuple[ValidatedRequest, ModelAvailable]:
        """Check that a function returned what it declared. The room is the reply's alone.

        Raises:
            TaskFailed, InvalidInput: see ``_admit_result``.
        """
        name, version = split_name(command.model)
        announced = self.models.versions.get((name, version)) or self.models.current.get(name)
        if announced is None or announced.stage is None or not announced.stage.after:
            raise TaskFailed(f'"{name}" was registered again in the meantime', hint="ask again")
        declared = announced.stage.answer(announced.manifest)
        as_model = msgspec.structs.replace(announced, stage=None, manifest=declared)
        try:
            found = validation.check_infer(
                _as_request(command), sizes, as_model, self.models.max_bytes
            )
        except InvalidInput as error:
            raise TaskFailed(
                f"postprocess {command.function} did not return what --returns declares: "
                f"{error.message}"
            ) from None
        return replace(found, input_bytes=0, reply_bytes=found.input_bytes), announced

    def go_on(self, pending: Pending, answer: Reply) -> Reply | None:
        """Pass a result to its postprocessing or next step; None: the answer follows later."""
        found = self._go_behind(pending, answer) if pending.after or pending.bill else answer
        if found is None or pending.run is None:
            return found
        pending.bill = None
        return self._step_done(pending, pending.run, found)

    def _step_done(self, pending: Pending, run: Run, answer: Reply) -> Reply | None:
        """End a step of a chain: its outputs stay in the pool until their last use."""
        step, number = run.chain.steps[len(run.bills)], len(run.bills) + 1
        answer = self.requests.checked(pending, answer)
        error, is_last = answer.error, number == len(run.chain.steps)
        if error is None and not is_last and (pending.is_cancelled or pending.client.is_gone):
            error = Cancelled("cancelled by the caller")
        if error is not None:
            self.take(CancelRequest(token=pending.token))
            return Reply(token=answer.token, error=chains.of_step(error, pending, step))
        run.bills[step.name] = answer.timing or RequestTiming()
        made = {f"{step.name}.{one.name}": one for one in answer.outputs}
        run.values |= made
        if pending.room is not None:
            run.rooms.append((pending.room, made.keys()))
            pending.room = None
        self.requests.read(run, run.chain.needed(number))
        if is_last:
            return chains.answer_of(pending.token, run)
        self._next(pending, run)
        return None

    def _next(self, pending: Pending, run: Run) -> None:
        """Send the next step's request as a client would; its inputs lie in the pool.

        Only a module's own code may write to them: it gets copies of inputs that another step reads
        too.
        """
        number = len(run.bills)
        step = run.chain.steps[number]
        try:
            announced = chains.model_of(step, self.models.current, run.event.tenant)
            values = [run.values[source] for source in step.inputs.values()]
            header = chains.as_request(step, values)
            admitted = self.models.admit(header, [one.size_bytes for one in values], announced)
            kept = run.chain.needed(number + 1).intersection(step.inputs.values())
            is_copied = bool(kept) and announced.manifest.mode == "module"
            room = pending.room = self._pool.reserve(
                run.event.caller,
                admitted.input_bytes if is_copied else 0,
                admitted.reply_bytes,
                run.event.tenant,
            )
        except PipeSwitchError as error:
            self._end_run(pending, error)
            return
        inputs = admitted.inputs
        placed = room.place(inputs) if is_copied else _as_inputs(inputs, values)
        event = msgspec.structs.replace(
            run.event,
            model=announced.model,
            digest=announced.manifest.digest,
            priority=announced.priority if run.priority is None else run.priority,
            inputs=tuple(placed),
            reply_offset_bytes=room.reply_offset_bytes,
            reply_bytes=room.reply_bytes,
            registration_id=announced.registration_id,
            arrived_at_ms=None if number else run.event.arrived_at_ms,
            is_chain_continuation=number > 0,
            follows=number + 1 < len(run.chain.steps),
        )
        if announced.stage is not None and announced.stage.after:
            pending.after = event
        if not is_copied:
            self.take(event)
            return
        memory = self._pool.memory_of(room)
        payload = [
            memory[values[item.frame].offset_bytes :][: item.size_bytes] for item in admitted.inputs
        ]

        def taken(error: PipeSwitchError | None) -> None:
            if error is None:
                self.take(event)
            else:
                self._end_run(pending, error)

        self._copy(event.inputs, payload, event.tenant, taken)

    def _end_run(self, pending: Pending, error: PipeSwitchError) -> None:
        """Answer a request whose step is not possible."""
        self.take(CancelRequest(token=pending.token))  # if it is waited for there
        self.answer(Reply(token=pending.token, error=error))

    def _go_behind(self, pending: Pending, answer: Reply) -> Reply | None:
        if pending.after is None:
            if pending.bill is None or answer.timing is None:
                return answer
            made_ms = answer.timing.postprocess_ms
            bill = msgspec.structs.replace(
                pending.bill, postprocess_ms=made_ms, total_ms=pending.bill.total_ms + made_ms
            )
            return msgspec.structs.replace(answer, timing=bill)
        answer = self.requests.checked(pending, answer)
        event, pending.after, pending.bill = pending.after, None, answer.timing
        if answer.error is not None:
            self.take(CancelRequest(token=pending.token))  # if it is waited for there
            return answer
        self.take(msgspec.structs.replace(event, is_postprocess=True, inputs=answer.outputs))
        return None


def _as_request(command: TakeResult) -> RequestHeader:
    """Return a function's result as a request, as if a client had sent it."""
    inputs = tuple(
        WireTensor(name=one.name, dtype=one.dtype, shape=one.shape, frame=number)
        for number, one in enumerate(command.outputs)
    )
    return RequestHeader(v=VERSION, op="infer", id="0", model=command.model, inputs=inputs)


def _as_inputs(inputs: Sequence[Any], values: Sequence[SlabTensor]) -> list[SlabTensor]:
    """Return a step's values under the names of the next step's inputs."""
    return [msgspec.structs.replace(values[item.frame], name=item.name) for item in inputs]
