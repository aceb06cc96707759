"""Requests to chains: each step is a request to one model; the client gets one answer. Pure.

For each step, ``Inference`` sends the scheduler an ordinary request to the step's model, with the
token of the whole request. ``programs/interface/chains.py`` declares chains.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from ..base.errors import InvalidInput, ModelNotFound, PipeSwitchError, from_wire, to_wire
from ..ipc.messages.base import SlabTensor
from ..ipc.messages.run import Run
from ..programs.interface.chains import Chain, ChainStep
from ..scheduler.state.events import InferArrived, ModelAvailable, Reply, Token
from ..wire.frames import VERSION, RequestHeader, WireTensor
from ..wire.request_timing import of_steps
from .requests import ChainRun, Pending


def begins(announced: ModelAvailable, models: Mapping[str, ModelAvailable]) -> ModelAvailable:
    """Return a chain's announcement with its models' tenant, in whose pool file its values lie."""
    first = models.get(announced.chain.steps[0].model) if announced.chain is not None else None
    return announced if first is None else msgspec.structs.replace(announced, tenant=first.tenant)


def run_of(chain: Chain, event: InferArrived, priority: int | None, pending: Pending) -> ChainRun:
    """Return a run that takes over the request's allocation. Its inputs may not be copied yet."""
    values = {one.name: one for one in event.run.inputs}
    allocations = [(pending.allocation, values.keys())] if pending.allocation is not None else []
    pending.allocation = None
    return ChainRun(
        chain=chain, event=event, priority=priority, values=dict(values), allocations=[*allocations]
    )


def model_of(step: ChainStep, models: Mapping[str, ModelAvailable], tenant: str) -> ModelAvailable:
    """Return the model of a step.

    Raises:
        ModelNotFound: the model was unregistered in the meantime.
        InvalidInput: clients are separate, and the model now belongs to another client.
    """
    model = models.get(step.model)
    if model is None or model.chain is not None:
        raise ModelNotFound(
            f'no model "{step.model}"', hint=f"pipeswitch register {step.model} SOURCE"
        )
    if model.tenant != tenant:
        raise InvalidInput("it belongs to another client than the first step's model")
    return model


def as_request(step: ChainStep, values: Sequence[SlabTensor]) -> RequestHeader:
    """Return a step's inputs as a request, as if a client had sent them."""
    inputs = tuple(
        WireTensor(name=name, dtype=one.dtype, shape=one.shape, frame=number)
        for number, (name, one) in enumerate(zip(step.inputs, values, strict=True))
    )
    return RequestHeader(v=VERSION, op="infer", id="0", model=step.model, inputs=inputs)


def event_of(run: ChainRun, own: Run, announced: ModelAvailable, now_ms: float) -> InferArrived:
    """Return the event of a chain's next step, whose run is ``own``."""
    number, event = len(run.timings), run.event
    origin = msgspec.structs.replace(
        event.origin,
        priority=announced.priority if run.priority is None else run.priority,
        arrived_at_ms=now_ms if number else event.origin.arrived_at_ms,
    )
    return InferArrived(
        token=event.token,
        model=announced.model,
        digest=announced.manifest.digest,
        run=own,
        origin=origin,
        tenant=event.tenant,
        registration_id=announced.registration_id,
        is_chain_continuation=number > 0,
        follows=number + 1 < len(run.chain.steps),
    )


def of_step(error: PipeSwitchError, pending: Pending, step: ChainStep) -> PipeSwitchError:
    """Return a step's error with the names of the chain, the step and its model."""
    wire = to_wire(error)
    where = f'chain "{pending.model}", step "{step.name}" (model "{step.model}")'
    data = {**wire["data"], "step": step.name, "model": step.model}
    return from_wire(wire["type"], f"{where}: {wire['message']}", wire["hint"], data)


def answer_of(token: Token, run: ChainRun) -> Reply:
    """Return the answer of a chain whose steps have all finished."""
    outputs = [
        msgspec.structs.replace(run.values[source], name=name)
        for name, source in run.chain.returns.items()
    ]
    return Reply(token=token, outputs=tuple(outputs), timing=of_steps(run.timings))
