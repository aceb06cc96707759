"""Requests to chains: each step is a request to one model; the client gets one answer.

For each step, the scheduler gets an ordinary request to the step's model, with the token of the
whole request. ``chains.py`` declares chains.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import msgspec
from msgspec.structs import replace

from ...base import errors
from ...base.units import escape_control_chars
from ...frontend.inference import Inference
from ...frontend.intake.request_pool import PoolAllocation
from ...frontend.intake.validation import check_name, tenant_of
from ...frontend.requests import Pending
from ...frontend.verbs import Question
from ...ipc.messages.base import ModelName, SlabTensor
from ...ipc.messages.run import Run
from ...scheduler.state.events import CancelRequest, InferArrived, ModelAvailable, Reply, Token
from ...wire.frames import VERSION, RequestHeader, WireTensor
from ...wire.request_timing import RequestTiming, of_steps
from .chain_registry import ChainRequest
from .chains import Chain, ChainStep, Sources, Steps


class ChainRun:
    """Progress of one request of a chain. It takes over the request's allocation.

    Attributes:
        allocations: allocations in the pool, each with the names of its values.
    """

    def __init__(
        self,
        chain: Chain,
        inference: Inference,
        pending: Pending,
        event: InferArrived,
        priority: int | None,
    ) -> None:
        """Begin without a step. The request's inputs may not be copied yet.

        Args:
            event: the request as it arrived; each step's event is a changed copy.
            priority: the requested priority; None: each model's own.
        """
        self._chain, self._inference, self._pending = chain, inference, pending
        self._pool = inference.requests.pool
        self._event, self._priority = event, priority
        self._values = {one.name: one for one in event.run.inputs}  # for later steps, by name
        self.allocations: list[tuple[PoolAllocation, Set[str]]] = []
        if pending.allocation is not None:
            self.allocations.append((pending.allocation, {*self._values}))
            pending.allocation = None
        self._timings: dict[str, RequestTiming] = {}  # timings of the finished steps, by name

    @property
    def allocation(self) -> PoolAllocation | None:
        return self.allocations[0][0] if self.allocations else None

    def free(self, needed: Set[str] = frozenset()) -> None:
        """Free those allocations whose values are not in ``needed``."""
        for allocation, names in self.allocations:
            if needed.isdisjoint(names):
                self._pool.release_inputs(allocation)
                self._pool.release_reply(allocation)
        self.allocations = [one for one in self.allocations if not needed.isdisjoint(one[1])]

    def ended(self, answer: Reply) -> Reply | None:
        """End a step: its outputs stay in the pool until their last use."""
        pending, inference, chain = self._pending, self._inference, self._chain
        step, number = chain.steps[len(self._timings)], len(self._timings) + 1
        answer = inference.requests.checked(pending, answer)
        error, is_last = answer.error, number == len(chain.steps)
        if error is None and not is_last and (pending.is_cancelled or pending.client.is_gone):
            error = errors.Cancelled("cancelled by the caller")
        if error is not None:
            inference.take(CancelRequest(token=pending.token))
            return Reply(token=answer.token, error=_of_step(error, pending, step))
        self._timings[step.name] = answer.timing or RequestTiming()
        outputs = {f"{step.name}.{one.name}": one for one in answer.outputs}
        self._values |= outputs
        if pending.allocation is not None:
            self._pool.clear_beside(pending.allocation, answer.outputs)
            self.allocations.append((pending.allocation, outputs.keys()))
            pending.allocation = None
        self.free(chain.needed(number))
        if is_last:
            return self._answer()
        self.next()
        return None

    def next(self) -> None:
        """Send the event of the next step, with inputs that lie in the pool.

        Only the code of a ``module`` program may write to its inputs. Such a program gets copies of
        the inputs that a later step reads, too.
        """
        inference, pending, pool, chain = self._inference, self._pending, self._pool, self._chain
        number, models = len(self._timings), inference.models
        step = chain.steps[number]
        try:
            announced = _model_of(step, models.current, self._event.tenant)
            values = [self._values[source] for source in step.inputs.values()]
            header = as_request(step.model, zip(step.inputs, values, strict=True))
            admitted = models.admit(header, [one.size_bytes for one in values], announced)
            reused = chain.needed(number + 1).intersection(step.inputs.values())
            is_copied = bool(reused) and announced.manifest.mode == "module"
            allocation = pending.allocation = pool.reserve(
                self._event.origin.caller,
                admitted.input_bytes if is_copied else 0,
                admitted.reply_bytes,
                self._event.tenant,
            )
        except errors.PipeSwitchError as error:
            self._fail(error)
            return
        inputs = admitted.inputs
        placed = allocation.place(inputs) if is_copied else _as_inputs(inputs, values)
        own = Run(
            request_id=self._event.run.request_id,
            inputs=tuple(placed),
            reply_offset_bytes=allocation.reply_offset_bytes,
            reply_bytes=allocation.reply_bytes,
        )
        event = self._event_of(own, announced)
        if announced.wrapper is not None and announced.wrapper.after:
            pending.after, event = event, replace(event, follows=True)
        if not is_copied:
            inference.take(event)
            return
        memory = pool.memory_of(allocation)
        payload = [
            memory[values[item.frame].offset_bytes :][: item.size_bytes] for item in admitted.inputs
        ]

        def on_copied(error: errors.PipeSwitchError | None) -> None:
            if error is None:
                inference.take(event)
            else:
                self._fail(error)

        inference.copy(event.run.inputs, payload, event.tenant, on_copied)

    def _event_of(self, own: Run, announced: ModelAvailable) -> InferArrived:
        """Return the event of the next step, whose run is ``own``."""
        number, event = len(self._timings), self._event
        origin = replace(
            event.origin,
            priority=announced.priority if self._priority is None else self._priority,
            arrived_at_ms=self._inference.now_ms() if number else event.origin.arrived_at_ms,
        )
        return InferArrived(
            token=event.token,
            model=announced.model,
            digest=announced.manifest.digest,
            run=own,
            origin=origin,
            tenant=event.tenant,
            registration_id=announced.registration_id,
            continues=number > 0,
            follows=number + 1 < len(self._chain.steps),
        )

    def _fail(self, error: errors.PipeSwitchError) -> None:
        """Answer a request whose next step cannot begin."""
        token = self._pending.token
        self._inference.take(CancelRequest(token=token))  # the scheduler may wait for this step
        self._inference.answer(Reply(token=token, error=error))

    def _answer(self) -> Reply:
        """Return the answer; all steps have finished."""
        outputs = [
            replace(self._values[source], name=name) for name, source in self._chain.returns.items()
        ]
        timing = of_steps(self._timings)
        return Reply(token=self._pending.token, outputs=tuple(outputs), timing=timing)

    @staticmethod
    def parse(q: Question) -> ChainRequest:
        """Return the event of the verb ``chain``."""
        steps: Any = q.body.of_type("steps", Steps)
        returns: dict[str, str] = q.body.of_type("outputs", Sources, {})
        for step in steps:
            check_name(step.name or step.model, "step")
        named = [name for step in steps for name in step.inputs.values()]
        odd = [one for one in (*named, *returns) if escape_control_chars(one, keep="") != one]
        if odd:
            raise errors.InvalidInput(f"chain: name {odd[0]!r} has control characters")
        return ChainRequest(
            token=q.token,
            model=ModelName(check_name(q.model, "chain")),
            steps=steps,
            returns=returns,
            tenant=tenant_of(q.body, q.principal.tenant),
        )

    @staticmethod
    def restored(name: ModelName, entry: Mapping[str, Any], token: Token) -> ChainRequest:
        """Return the event of an entry of the journal."""
        chain = msgspec.msgpack.decode(entry["spec"], type=Chain)
        return ChainRequest(token=token, model=name, tenant=entry["tenant"], restored=chain)


def _model_of(step: ChainStep, models: Mapping[str, ModelAvailable], tenant: str) -> ModelAvailable:
    """Return the model of a step.
    Raises ModelNotFound: the model was unregistered in the meantime; InvalidInput: clients are
    separate, and the model now belongs to another client."""
    model = models.get(step.model)
    if model is None or model.composite is not None:
        raise errors.ModelNotFound(
            f'no model "{step.model}"', hint=f"pipeswitch register {step.model} SOURCE"
        )
    if model.tenant != tenant:
        raise errors.InvalidInput("it belongs to another client than the first step's model")
    return model


def as_request(model: str, values: Iterable[tuple[str, SlabTensor]]) -> RequestHeader:
    """Return named values as a request, as if a client had sent them."""
    inputs = tuple(
        WireTensor(name=name, dtype=one.dtype, shape=one.shape, frame=number)
        for number, (name, one) in enumerate(values)
    )
    return RequestHeader(v=VERSION, op="infer", id="0", model=model, inputs=inputs)


def _as_inputs(inputs: Sequence[Any], values: Sequence[SlabTensor]) -> list[SlabTensor]:
    """Return a step's values under the names of the next step's inputs."""
    return [replace(values[item.frame], name=item.name) for item in inputs]


def _of_step(
    error: errors.PipeSwitchError, pending: Pending, step: ChainStep
) -> errors.PipeSwitchError:
    """Return a step's error with the names of the chain, the step and its model."""
    wire = errors.to_wire(error)
    where = f'chain "{pending.model}", step "{step.name}" (model "{step.model}")'
    data = {**wire["data"], "step": step.name, "model": step.model}
    return errors.from_wire(wire["type"], f"{where}: {wire['message']}", wire["hint"], data)
