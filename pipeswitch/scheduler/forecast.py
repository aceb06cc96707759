"""When a request could be answered at the earliest, if predictions are exact. Pure.

What is counted is certain: the tasks that are dispatched, requests of its own line that go before
it, its model's copy, itself, each with the least that was measured. What may yet go before it is
not, nor is the time a job takes to step aside, nor a computation whose length depends on more than
the batch; so a request that is refused for its deadline would have missed it.

Measurements may all be of a bad moment. Where they refuse everything none is added, so a request
is taken as a probe once they are old.
"""

from __future__ import annotations

from ..errors import DeadlineExceeded
from ..ipc.messages import ModelName
from ..programs.dims import BATCH
from .device_state import DeviceState
from .records import Request
from .states import Residency

MARGIN_MS = 0.01  # for sums of floating-point numbers; no prediction is that exact


def earliest_end_ms(device: DeviceState, request: Request) -> float:
    """Of one that comes now, or that waits and is first in its line."""
    now_ms = device.core.now_ms
    own_ms = _compute_ms(device, request.model, request.batch)
    is_waiting = request.token in device.queue
    count, batch = (0, 1) if is_waiting else device.queue.ahead(request)
    manifest = device.replicas[request.model].manifest
    if manifest is not None and manifest.batching is not None:
        # At the best all runs before its own are full.
        count = (count * batch + request.batch - 1) // manifest.batching.limit
    one_ms = _compute_ms(device, request.model, batch)
    free_ms = free_at_ms(device)
    ends_ms = free_ms + count * one_ms + own_ms
    if _is_absent(device, request):
        # Groups are computed as they come: the first request ends after the last one came.
        rest_ms = (count - 1) * one_ms + own_ms if count else 0.0
        load_ms = device.predictions.least(request.model, request.batch).load_ms
        ends_ms = max(ends_ms, now_ms + load_ms + rest_ms)
    return ends_ms


def hopeless_at_ms(device: DeviceState, request: Request) -> float | None:
    """From when on it cannot be in time even if it was dispatched at once; None: no deadline."""
    if not _is_asked(device, request):
        return None
    assert request.deadline_at_ms is not None
    own_ms = _compute_ms(device, request.model, request.batch)
    return request.deadline_at_ms - own_ms + MARGIN_MS


def is_hopeless(device: DeviceState, request: Request) -> bool:
    """Whether its deadline cannot be met any more."""
    if not _is_asked(device, request):
        return False
    assert request.deadline_at_ms is not None
    return earliest_end_ms(device, request) > request.deadline_at_ms + MARGIN_MS


def is_worth_a_probe(device: DeviceState, request: Request) -> bool:
    """Whether one that seems hopeless is to be taken all the same, to be measured."""
    return device.predictions.is_due(
        request.model, request.batch,
        is_sent=_is_absent(device, request), now_ms=device.core.now_ms,
    )  # fmt: skip


def will_be_measured(device: DeviceState, request: Request) -> None:
    """It is taken: the next one that seems hopeless is no probe."""
    device.predictions.taken(
        request.model, request.batch,
        is_sent=_is_absent(device, request), now_ms=device.core.now_ms,
    )  # fmt: skip


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


def _is_asked(device: DeviceState, request: Request) -> bool:
    """Whether it is looked at when it could end."""
    is_on = device.settings.admission != "off"
    return is_on and request.deadline_at_ms is not None and not request.is_probe


def _is_absent(device: DeviceState, request: Request) -> bool:
    return device.replicas[request.model].residency.state is Residency.HOST


def free_at_ms(device: DeviceState) -> float:
    """When the dispatched tasks have computed."""
    now_ms = free_ms = device.core.now_ms
    for task in (device.current, device.upcoming):
        if task is not None and not task.is_trial:
            begins_ms = task.began_at_ms if task is device.current else free_ms
            free_ms = max(now_ms, begins_ms + _compute_ms(device, task.model, task.batch))
    return free_ms


def _compute_ms(device: DeviceState, model: ModelName, batch: int) -> float:
    """At the least. What one length took says nothing of another, and measurements are by batch."""
    replica = device.replicas.get(model)
    if replica is None or replica.manifest is None:
        return 0.0
    if any(dim.name != BATCH for dim in replica.manifest.dims):
        return 0.0
    return device.predictions.least(model, batch).compute_ms
