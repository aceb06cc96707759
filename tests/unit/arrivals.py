"""Arrivals of requests, and reports of workers, from the fields that matter to a test."""

# mypy: disable-error-code="arg-type"

from __future__ import annotations

from typing import Any

from pipeswitch.ipc.messages.run import Run
from pipeswitch.ipc.messages.worker import InferenceDone, JobParked
from pipeswitch.scheduler.state import events as ev
from pipeswitch.scheduler.state.records import Request


def arrival(token: int, model: str, now_ms: float = 0.0, **fields: Any) -> ev.InferArrived:
    """Return the event of a request; ``fields`` are those of the event, its run or its origin."""
    run = {"request_id": f"r{token}"} | _own(Run, fields)
    origin = {"arrived_at_ms": now_ms} | _own(ev.Origin, fields)
    own = {"digest": "", **fields}
    return ev.InferArrived(
        token=token, model=model, run=Run(**run), origin=ev.Origin(**origin), **own
    )


def request_of(token: int, model: str = "m", now_ms: float = 0.0, **fields: Any) -> Request:
    """Return an accepted request, as ``arrival`` does."""
    run = {"request_id": f"r{token}"} | _own(Run, fields)
    origin = {"arrived_at_ms": now_ms} | _own(ev.Origin, fields)
    return Request(token, model, Run(**run), ev.Origin(**origin), **fields)


def done_of(op_id: Any, **fields: Any) -> InferenceDone:
    """Return a worker's report of a computed task."""
    times = dict.fromkeys(("turn_at_ms", "first_group_at_ms", "ended_at_ms", "stall_ms"), 0.0)
    return InferenceDone(**{"op_id": op_id, "outputs": ((),), **times, **fields})


def parked_of(op_id: Any, turn: Any, next_turn: Any = 0, where: Any = "forward") -> JobParked:
    """Return a worker's report that its job has given a turn up."""
    return JobParked(op_id, turn, next_turn, where, asked_at_ms=0.0, parked_at_ms=1.0)


def _own(kind: Any, fields: dict[str, Any]) -> dict[str, Any]:
    return {name: fields.pop(name) for name in kind.__struct_fields__ if name in fields}
