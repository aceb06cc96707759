"""When a request could be answered at the earliest, if predictions are exact. Pure.

What is counted is certain: the tasks that are dispatched, requests of its own line that go before
it, its model's copy, itself. What may yet go before it is not, nor is the time a job takes to step
aside; so a request that is refused for its deadline would have missed it.
"""

from __future__ import annotations

from ..errors import DeadlineExceeded
from .device_state import DeviceState
from .records import Activation, Request
from .states import Residency

MARGIN_MS = 0.01  # for sums of floating-point numbers; no prediction is that exact


def earliest_end_ms(device: DeviceState, request: Request) -> float:
    """Of one that comes now, or that waits and is first in its line."""
    now_ms, predict = device.core.now_ms, device.predictions.predict
    own = predict(request.model, request.batch)
    is_waiting = request.token in device.queue
    count, batch = (0, 1) if is_waiting else device.queue.ahead(request)
    one_ms = predict(request.model, batch).compute_ms
    free_ms = _free_at_ms(device)
    ends_ms = free_ms + count * one_ms + own.p95_ms
    if device.replicas[request.model].residency.state is Residency.HOST:
        # Groups are computed as they come: the first request ends after the last one came.
        rest_ms = (count - 1) * one_ms + own.p95_ms if count else 0.0
        ends_ms = max(ends_ms, now_ms + own.load_ms + rest_ms)
    return ends_ms


def hopeless_at_ms(device: DeviceState, request: Request) -> float | None:
    """From when on it cannot be in time even if it was dispatched at once; None: no deadline."""
    if request.deadline_at_ms is None or device.settings.admission == "off":
        return None
    own = device.predictions.predict(request.model, request.batch)
    return request.deadline_at_ms - own.p95_ms + MARGIN_MS


def is_hopeless(device: DeviceState, request: Request) -> bool:
    """Whether its deadline cannot be met any more."""
    if request.deadline_at_ms is None or device.settings.admission == "off":
        return False
    return earliest_end_ms(device, request) > request.deadline_at_ms + MARGIN_MS


def too_late(device: DeviceState, request: Request) -> DeadlineExceeded:
    """What its client reads; ``predicted_ms`` counts from its arrival."""
    assert request.deadline_at_ms is not None
    allowed_ms = request.deadline_at_ms - request.arrived_at_ms
    predicted_ms = earliest_end_ms(device, request) - request.arrived_at_ms
    return DeadlineExceeded(
        f"the answer would come after {predicted_ms:.0f} ms at the earliest, "
        f"the deadline is {allowed_ms:.0f} ms",
        hint="allow more time, or ask again when fewer requests wait",
        predicted_ms=predicted_ms,
        waited_ms=device.core.now_ms - request.arrived_at_ms,
    )


def _free_at_ms(device: DeviceState) -> float:
    """When the dispatched tasks have computed."""
    now_ms = free_ms = device.core.now_ms
    for task in (device.current, device.upcoming):
        if task is not None and not task.is_trial:
            begins_ms = task.began_at_ms if task is device.current else free_ms
            free_ms = max(now_ms, begins_ms + _compute_ms(device, task))
    return free_ms


def _compute_ms(device: DeviceState, task: Activation) -> float:
    return device.predictions.predict(task.model, device.requests[task.token].batch).compute_ms
