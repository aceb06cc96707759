"""Where a request's time went: what its answer says, and what the timeline shows."""

from __future__ import annotations

from ..ipc.messages import InferenceDone
from .device_state import DeviceState
from .records import Activation, Replica, Request


def bill(
    device: DeviceState,
    activation: Activation,
    request: Request,
    replica: Replica,
    message: InferenceDone,
    now_ms: float,
) -> dict[str, object]:
    """Where the time went; all in milliseconds. Of a joined run each request is told all of it."""
    copy_ms = 0.0
    if not activation.was_resident:
        ended = replica.transmit_ended_at_ms or message.ended_at_ms
        copy_ms = max(0.0, ended - replica.transmit_started_at_ms)
    compute_ms = message.ended_at_ms - message.turn_at_ms - message.stall_ms
    made_ms = request.preprocess_ms
    return {
        "queue_ms": activation.dispatched_at_ms - request.arrived_at_ms - (made_ms or 0.0),
        "switch_ms": max(0.0, message.first_group_at_ms - activation.dispatched_at_ms),
        "copy_ms": copy_ms,
        "stall_ms": message.stall_ms,
        "compute_ms": max(0.0, compute_ms),
        "total_ms": now_ms - request.arrived_at_ms,
        "resident": activation.was_resident,
        "preempted": activation.preempted,
        "worker": activation.slot,
        "epoch": activation.epoch,
        "version": replica.model.version,
        "batch": activation.batch,
        "joined": len(activation.tokens),
        **({"device": device.label, "placed": request.placed} if device.label else {}),
        **({} if made_ms is None else {"preprocess_ms": made_ms}),
        **({"kept_bytes": activation.kept_bytes} if activation.kept_bytes else {}),
    }


def trace(
    device: DeviceState, activation: Activation, requests: list[Request], message: InferenceDone
) -> None:
    """Its intervals on the timeline; what is joined waits for itself."""
    track = f"worker {activation.slot}"
    flow = activation.epoch
    for request in requests:
        name = f"queue {request.request_id} {activation.model}"
        device.span("scheduler", name, request.arrived_at_ms, activation.dispatched_at_ms)
    more = f" and {len(activation.joined)} more" if activation.joined else ""
    name = f"{requests[0].request_id}{more} {activation.model}"
    device.span(
        "scheduler",
        f"switch {name}",
        activation.dispatched_at_ms,
        message.first_group_at_ms,
        flow=flow,
        preempted=activation.preempted,
        resident=activation.was_resident,
    )
    device.span(
        track, name, message.turn_at_ms, message.ended_at_ms, flow=flow, stall_ms=message.stall_ms
    )
    pairs = zip(message.group_begins_at_ms, message.group_ends_at_ms, strict=False)
    for index, (begin, end) in enumerate(pairs):
        device.span(track, f"group {index}", begin, end)
