"""Arrivals of requests, from fields that the product keeps in three records."""

# mypy: disable-error-code="arg-type"

from __future__ import annotations

from typing import Any

from pipeswitch.ipc.messages.run import Run
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


def _own(kind: Any, fields: dict[str, Any]) -> dict[str, Any]:
    return {name: fields.pop(name) for name in kind.__struct_fields__ if name in fields}
