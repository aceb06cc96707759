"""Inference requests: from a client's message to the pool and the scheduler.

A small payload is copied into the pool at once. A large one is copied by another thread, and its
request continues after the copy.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from ..base.errors import Cancelled, InvalidInput, PipeSwitchError, RemoteProtocolError
from ..base.extras import COMPOSITES
from ..base.failpoints import reach
from ..base.roles import URGENT_PRIORITY, Role
from ..base.worker_thread import WorkerThread
from ..ipc.messages.base import ModelName, SlabTensor
from ..ipc.messages.run import Run
from ..scheduler.state import events as ev
from ..wire.frames import RequestHeader, decode_request
from .announced_models import AnnouncedModels
from .intake import validation
from .intake.request_pool import PoolAllocation
from .intake.validation import Body, ValidatedRequest
from .requests import Pending, Requests
from .sequences.sequence_state import SequenceOptions, SequenceState, sequence_options
from .transport.clients import Session
from .transport.connection_manager import ClientConnection

INLINE_COPY_BYTES: Final = 1 << 20  # copied in 0.1 ms, as long as two thread switches take
FIELDS_OF_COPIES: Final = frozenset({"sequence", "tenant", "version"})  # of a request's body


class IncomingRequest(msgspec.Struct, kw_only=True, eq=False):
    """Origin and other fields of a request that is not yet an event."""

    client: Session
    origin: ev.Origin  # its caller is the client's tenant, or the one that the gateway names
    version: int = 0  # 0: the current version
    trace_id: str = ""
    options: SequenceOptions | None = None  # the request's fields about its sequence
    sequence: SequenceState | None = None  # the sequence that the request continues

    def read(self, body: Body) -> None:
        """Read the body of ``infer``. Raises InvalidInput, PermissionDenied."""
        self.read_asker(body)
        self.options = sequence_options(body)
        body.done()

    def read_asker(self, body: Body) -> None:
        """Read version, caller, address and trace id. Raises InvalidInput, PermissionDenied."""
        self.version = body.count("version", 0)
        caller, connection = self.origin.caller, self.origin.connection
        self.origin = replace(
            self.origin,
            connection=validation.address_of(body, caller) or connection,
            caller=validation.tenant_of(body, caller),
        )
        self.trace_id = validation.trace_id_of(body)


class Inference:
    """Handler of all clients' inference requests. Only the loop's thread uses it."""

    def __init__(
        self,
        requests: Requests,
        *,
        take: Callable[[ev.Event], None],
        answer: Callable[[ev.Reply], None],
        call_soon: Callable[[Callable[[], None]], None],
        now_ms: Callable[[], float],
        max_bytes: int,
        deadline_ms: float | None,
    ) -> None:
        """Create the handler, without models and requests.

        Args:
            take: queues an event for the scheduler.
            answer: sends a request's reply.
            call_soon: schedules a call in the loop; any thread may call it.
            max_bytes: limit for all inputs of a request.
            deadline_ms: deadline of requests that name none.
        """
        self.requests, self._pool, self._sequences = requests, requests.pool, requests.sequences
        self.take, self.answer, self.call_soon = take, answer, call_soon
        self.now_ms = now_ms
        self._deadline_ms = deadline_ms
        self.copier = WorkerThread("pipeswitch-copy")
        self.models = AnnouncedModels(max_bytes)

    def arrival_of(self, client: Session) -> IncomingRequest:
        """Return the fields of a request that arrives now from this client."""
        return IncomingRequest(
            client=client,
            origin=ev.Origin(
                arrived_at_ms=self.now_ms(),
                caller=client.principal.tenant,
                connection=client.session,
            ),
        )

    def read_urgency(
        self, arrival: IncomingRequest, header: RequestHeader, announced: ev.ModelAvailable
    ) -> None:
        """Read a request's priority and deadline. Raises InvalidInput, PermissionDenied."""
        priority, deadline_at_ms = announced.priority, None
        if header.priority:
            if header.priority == URGENT_PRIORITY:
                arrival.client.principal.require(Role.URGENT, "priority high")
            priority = validation.priority_number(header.priority, announced.priority)
        deadline_ms = self._deadline_ms if header.deadline_ms is None else header.deadline_ms
        if deadline_ms is not None:
            deadline_at_ms = validation.deadline_at_ms(deadline_ms, arrival.origin.arrived_at_ms)
        arrival.origin = replace(arrival.origin, priority=priority, deadline_at_ms=deadline_at_ms)

    def infer(self, client: Session, header: RequestHeader, tensors: Sequence[Any]) -> None:
        """Handle the verb ``infer``: check and accept the request, and copy its inputs."""
        arrival = self.arrival_of(client)
        if header.body:
            arrival.read(Body("infer", header.body))
        announced = self.models.current.get(header.model)
        if announced is None or arrival.version:
            announced = self.models.find(header.model, arrival.version, arrival.origin.caller)
        composite = announced.composite
        if composite is not None and (first := self.models.current.get(composite.first)):
            announced = replace(announced, tenant=first.tenant)
        try:
            if arrival.options is not None:
                announced, header, tensors = self._with_state(
                    arrival, arrival.options, announced, header, tensors
                )
            admitted = self.models.admit(header, [*map(len, tensors)], announced)
            if arrival.sequence is not None:
                admitted = arrival.sequence.apart(admitted)
            if header.priority or (header.deadline_ms, self._deadline_ms) != (None, None):
                self.read_urgency(arrival, header, announced)
            elif announced.priority != arrival.origin.priority:
                arrival.origin = replace(arrival.origin, priority=announced.priority)
            caller, tenant, lent = arrival.origin.caller, announced.tenant, None
            if admitted.input_bytes > INLINE_COPY_BYTES and arrival.sequence is None:
                lent = self._pool.lent_for(admitted.inputs, tensors, caller, tenant)
            allocation = self._pool.reserve(
                caller, admitted.input_bytes, admitted.reply_bytes, tenant, lent
            )
        except PipeSwitchError:
            if arrival.sequence is not None:
                self._sequences.refused(arrival.sequence)
            raise
        pending = self.requests.accept(client, header, allocation)
        self._begin(arrival, announced, header, pending, admitted, allocation, tensors)

    def _with_state(
        self,
        arrival: IncomingRequest,
        options: SequenceOptions,
        announced: ev.ModelAvailable,
        header: RequestHeader,
        tensors: Sequence[Any],
    ) -> tuple[ev.ModelAvailable, RequestHeader, Sequence[Any]]:
        """Return the version with which the sequence began, and the inputs with its state.
        Raises PipeSwitchError: the sequence does not exist, or the request does not fit it."""
        sequence = arrival.sequence = self._sequences.of(
            options, arrival.client, arrival.origin.caller, announced
        )
        sequence.check_outputs(options.outputs)
        announced = self._of_sequence(sequence, arrival.version)
        return announced, *self._sequences.with_state(sequence, options, header, tensors)

    def _begin(
        self,
        arrival: IncomingRequest,
        announced: ev.ModelAvailable,
        header: RequestHeader,
        pending: Pending,
        admitted: ValidatedRequest,
        allocation: PoolAllocation,
        tensors: Sequence[Any],
    ) -> None:
        """Copy an accepted request's inputs into the pool, then send its event."""
        sequence, payload = arrival.sequence, [tensors[item.frame] for item in admitted.inputs]
        pending.caller, pending.trace_id = arrival.origin.caller, arrival.trace_id
        pending.bytes_in = sum(map(len, payload))
        if arrival.options is not None and sequence is not None:
            pending.sequence = sequence
            self._sequences.begin(sequence, arrival.options)
        placed = allocation.place(admitted.inputs)
        event = ev.InferArrived(
            token=pending.token,
            model=announced.model,
            digest=announced.manifest.digest,
            run=Run(
                request_id=header.id,
                inputs=placed if sequence is None else sequence.among(placed),
                reply_offset_bytes=allocation.reply_offset_bytes,
                reply_bytes=allocation.reply_bytes,
            ),
            origin=arrival.origin,
            tenant=allocation.tenant,
            registration_id=0
            if arrival.version or sequence is not None
            else announced.registration_id,
        )
        if announced.wrapper is not None and announced.wrapper.after:
            pending.after, event = event, replace(event, follows=True)
        elif announced.composite is not None:
            own = arrival.origin.priority if header.priority else None
            begin = COMPOSITES.load(announced.composite.kind)
            pending.run = begin(announced.composite, self, pending, event, own)
        state_bytes = 0 if sequence is None else sequence.copy_bytes
        if not allocation.has_inputs and admitted.input_bytes + state_bytes > INLINE_COPY_BYTES:
            pending.is_copying = True
            self._prefetch(announced)  # the switch need not wait for the copy
            copied = functools.partial(self._copied, pending, event)
            self.copy(placed, payload, event.tenant, copied, sequence)
            return
        if sequence is not None and state_bytes:
            sequence.copy(self._pool)
        if allocation.has_inputs:
            self._pool.clear_beside(allocation, placed)
        else:
            self._pool.fill(placed, payload, event.tenant)
        if pending.run is None:
            self.take(event)
        else:
            pending.run.next()

    def lend(
        self, peer: ClientConnection, frames: Sequence[Any], size_bytes: int
    ) -> memoryview | None:
        """Return pool memory for the tensors of a large request that begins to arrive.

        None: they are received elsewhere, and then copied if the request is accepted: for less
        than INLINE_COPY_BYTES, which takes no longer, and for another layout, caller or version.
        """
        client, model = peer.client, None
        if size_bytes <= INLINE_COPY_BYTES:
            return None
        with contextlib.suppress(RemoteProtocolError):  # it is refused when it has arrived
            header = decode_request(frames)
            if header.op == "infer" and not FIELDS_OF_COPIES & {*header.body}:
                name = self.models.aliases.get(header.model, header.model)
                model = self.models.current.get(name)
        if client is None or model is None or model.composite is not None:
            return None
        if not (Role.INFER in client.principal.roles and _is_in_order(header, model)):
            return None
        lent = self._pool.lend(client.principal.tenant, size_bytes, model.tenant)
        if lent is not None:
            self._prefetch(model)  # the switch need not wait for the rest
        return lent

    def _of_sequence(self, sequence: SequenceState, version: int) -> ev.ModelAvailable:
        """Return the current announcement of the version with which the sequence began.
        Raises InvalidInput: the request names another version; ModelNotFound: the version was
        removed."""
        began = sequence.announced
        base = began.base or began.model
        if version not in (0, began.version):
            raise InvalidInput(f'sequence "{sequence.key[1]}" began with version {began.version}')
        return self.models.version(base, began.version)

    def prefetch(self, _: Session, header: RequestHeader, __: Sequence[Any]) -> None:
        """Handle the verb ``prefetch``, which has no answer."""
        announced = self.models.current.get(header.model)
        if announced is not None:
            self._prefetch(announced)

    def _prefetch(self, announced: ev.ModelAvailable) -> None:
        composite = announced.composite
        first = announced.model if composite is None else composite.first
        self.take(ev.PrefetchHint(model=ModelName(first)))

    def copy(
        self,
        placed: Sequence[SlabTensor],
        payload: Sequence[Any],
        tenant: str,
        then: Callable[[PipeSwitchError | None], None],
        sequence: SequenceState | None = None,
    ) -> None:
        """Copy a payload, on another thread if it is large or starts a sequence.

        Args:
            then: called on the loop's thread afterwards, with the error if the copy failed.
        """
        if sequence is None and sum(map(len, payload)) <= INLINE_COPY_BYTES:
            self._pool.fill(placed, payload, tenant)
            then(None)
            return

        def copy() -> None:
            if sequence is not None:
                sequence.copy(self._pool)
            self._pool.fill(placed, payload, tenant)
            self.call_soon(functools.partial(then, None))

        self.copier.put(copy, lambda error: self.call_soon(functools.partial(then, error)))

    def _copied(
        self, pending: Pending, event: ev.InferArrived, error: PipeSwitchError | None
    ) -> None:
        """Send the event of a request whose payload was copied, or answer with the error."""
        pending.is_copying = False
        reach("frontend.copied")
        if pending.is_cancelled:
            error = Cancelled(f"request {pending.request_id} was cancelled")
        if error is not None:
            self.answer(ev.Reply(token=pending.token, error=error))
        elif pending.run is None:
            self.take(event)
        else:
            pending.run.next()

    def advance(self, pending: Pending, answer: ev.Reply) -> ev.Reply | None:
        """Return the answer; None: its postprocessing or its next step was started."""
        outcome = self._go_behind(pending, answer) if pending.after or pending.timing else answer
        if outcome is None or pending.run is None:
            return outcome
        pending.timing = None
        return pending.run.ended(outcome)

    def _go_behind(self, pending: Pending, answer: ev.Reply) -> ev.Reply | None:
        if pending.after is None:
            if pending.timing is None or answer.timing is None:
                return answer
            made_ms = answer.timing.postprocess_ms
            timing = replace(
                pending.timing, postprocess_ms=made_ms, total_ms=pending.timing.total_ms + made_ms
            )
            return replace(answer, timing=timing)
        answer = self.requests.checked(pending, answer)
        event, pending.after, pending.timing = pending.after, None, answer.timing
        if answer.error is not None:
            # The scheduler may wait for the function.
            self.take(ev.CancelRequest(token=pending.token))
            return answer
        run = replace(event.run, inputs=answer.outputs)
        self.take(replace(event, is_computed=True, run=run))
        return None


def _is_in_order(header: RequestHeader, model: ev.ModelAvailable) -> bool:
    """Return True if a request's tensors have the order of the model's inputs."""
    names, own = [[one.name for one in each] for each in (header.inputs, model.manifest.inputs)]
    in_order = [one.frame for one in header.inputs] == [*range(len(own))]
    return in_order and model.wrapper is None and (names == own or not any(names))
