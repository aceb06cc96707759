"""When a request will be answered, as measured. Pure.

A request is accepted only if it will be in time, and if none that was accepted before is late for
it. So what is counted is not the least that was measured. Of what is dispatched that is what 95 of
100 did not exceed; of what goes before it and of itself the mean, and ``SURE`` times the root of
the sum of squares of what 95 of 100 took more; and a margin: how much later dispatched ones ended
than was predicted then. Of one that waits means alone count: it was promised an answer, and is
dropped when that will probably be late. What goes before it is known
where the policy sorts all of a caller's requests by one thing (``Order.sorts_by``), and other
callers have their turns; else those of its own line are counted, which is the least.

Measurements may all be of a bad moment. Where they refuse everything none is added, so a request
is taken as a probe once they are old.
"""

from __future__ import annotations

import math
from collections import Counter

from ...errors import DeadlineExceeded
from ...ipc.messages import ModelName
from ...programs.dims import BATCH
from ..device_state import DeviceState
from ..records import Request
from ..states import Residency

SURE = 2.0  # times what 95 of 100 sums do not exceed: a slow moment lasts for many runs together
MARGIN_MS = 0.01  # for sums of floating-point numbers; no prediction is that exact


def predicted_end_ms(device: DeviceState, request: Request) -> float:
    """Of one that comes now, or that waits and is next; without a margin."""
    ends_ms, square = _end(device, request)
    return ends_ms + SURE * math.sqrt(square)


def _end(device: DeviceState, request: Request) -> tuple[float, float]:
    """When it ends in the mean, and the squares of what runs until then take more (next: 0)."""
    now_ms, is_next = device.core.now_ms, request.token in device.queue
    own_ms, spread_ms = _run_ms(device, request.model, request.batch)
    ahead_ms, square = (0.0, 0.0) if is_next else _ahead_ms(device, request)
    ends_ms = free_at_ms(device, is_safe=not is_next) + ahead_ms + own_ms
    if _is_absent(device, request):
        # Groups are computed as they come: the first request ends after the last one came.
        load_ms = device.predictions.safe(request.model, request.batch).load_ms
        is_first = is_next or not device.queue.ahead(request)[0]
        ends_ms = max(ends_ms, now_ms + load_ms + (0.0 if is_first else own_ms))
    return ends_ms, 0.0 if is_next else square + spread_ms**2


def _ahead_ms(device: DeviceState, request: Request) -> tuple[float, float]:
    """What those that go before one that comes now will compute, and the squares."""
    queue, sorts_by = device.queue, device.core.judge.sorts_by
    if not sorts_by:
        count, batch = queue.ahead(request)
        runs = _runs(device, request.model, count * batch, count)
        mean_ms, spread_ms = _run_ms(device, request.model, batch)
        return runs * mean_ms, runs * spread_ms**2
    own_ms, square = _all_ms(device, queue.around(request, sorts_by)[0])
    return own_ms + _others_ms(device, request, own_ms), square


def _others_ms(device: DeviceState, request: Request, own_ms: float) -> float:
    """What other callers have before its turn: their part of the time, if so much of theirs waits;
    of a more urgent priority all that does. What they may yet send delays it, and refuses it not.
    """
    accounts, urgency, total_ms = device.accounts, request.priority, 0.0
    account = accounts.of(request.caller)
    turn = accounts.tag(account, urgency) + own_ms / account.weight
    waiting: dict[str, list[Request]] = {}
    for one in device.queue:
        waiting.setdefault(one.caller, []).append(one)
    for caller in waiting.keys() - {request.caller}:
        other, (ms, _) = accounts.of(caller), _all_ms(device, waiting[caller])
        if other.urgency == urgency:
            ms = min(ms, max(0.0, turn - other.tags[urgency]) * other.weight)
        total_ms += ms if other.urgency <= urgency else 0.0
    return total_ms


def _all_ms(device: DeviceState, requests: list[Request]) -> tuple[float, float]:
    """The device's time for all of them, and the squares: what can be joined is, at the best."""
    total_ms = square = 0.0
    for (model, batch), count in Counter((one.model, one.batch) for one in requests).items():
        mean_ms, spread_ms = _run_ms(device, model, batch)
        runs = _runs(device, model, count * batch, count)
        total_ms, square = total_ms + runs * mean_ms, square + runs * spread_ms**2
    return total_ms, square


def waiting_ms(device: DeviceState, model: ModelName, caller: str) -> tuple[int, int]:
    """What a model's requests that wait will compute, and this caller's of them."""
    requests = device.queue.of(model)
    own = [one for one in requests if one.caller == caller]
    return round(_all_ms(device, requests)[0]), round(_all_ms(device, own)[0])


def _runs(device: DeviceState, model: ModelName, rows: int, count: int) -> int:
    """In how many runs so many requests of a model are computed at the least."""
    manifest = device.replicas[model].manifest
    if manifest is None or manifest.batching is None:
        return count
    return -(-rows // manifest.batching.limit)


def delays_another(device: DeviceState, request: Request) -> bool:
    """Whether one of its caller's that was accepted before would be late if it went before that."""
    sorts_by = device.core.judge.sorts_by
    if not _is_asked(device, request) or sorts_by != "deadline":
        return False
    own_ms, _ = _run_ms(device, request.model, request.batch)
    ends_ms, square = _end(device, request)
    ends_ms += device.predictions.margin_ms
    for other in device.queue.around(request, sorts_by)[1]:
        mean_ms, spread_ms = _run_ms(device, other.model, other.batch)
        ends_ms, square = ends_ms + mean_ms, square + spread_ms**2
        late_ms = ends_ms + SURE * math.sqrt(square) - other.due_ms - MARGIN_MS
        if 0.0 < late_ms <= own_ms:
            return True
    return False


def hopeless_at_ms(device: DeviceState, request: Request) -> float | None:
    """From when on it will hardly be in time even if dispatched at once; None: no deadline."""
    if not _is_asked(device, request):
        return None
    assert request.deadline_at_ms is not None
    own_ms, _ = _run_ms(device, request.model, request.batch)
    return request.deadline_at_ms - own_ms + MARGIN_MS


def is_hopeless(device: DeviceState, request: Request) -> bool:
    """Whether its deadline will not be met; of one that comes, with a margin."""
    if not _is_asked(device, request):
        return False
    assert request.deadline_at_ms is not None
    is_waiting = request.token in device.queue
    margin_ms = 0.0 if is_waiting else device.predictions.margin_ms
    return predicted_end_ms(device, request) + margin_ms > request.deadline_at_ms + MARGIN_MS


def note_end(device: DeviceState, request: Request) -> None:
    """It is dispatched: its end is compared with what is predicted now. Not a copy's: that waits
    for its place, too."""
    is_warm = device.current is None or device.current.was_resident
    is_there = device.replicas[request.model].residency.state in (
        Residency.RESIDENT,
        Residency.PINNED,
    )
    if _is_asked(device, request) and is_warm and is_there:
        request.predicted_end_ms = predicted_end_ms(device, request)


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
    predicted_ms = predicted_end_ms(device, request) - request.arrived_at_ms
    return DeadlineExceeded(
        f"the answer would come after {predicted_ms:.0f} ms, or others' too late; the deadline is "
        f"{allowed_ms:.0f} ms",
        hint="allow more time, or ask again when fewer requests wait",
        predicted_ms=predicted_ms,
        waited_ms=device.core.now_ms - request.arrived_at_ms,
    )


def _is_asked(device: DeviceState, request: Request) -> bool:
    """Whether it is looked at when it could end."""
    is_on = device.settings.admission != "off"
    return is_on and request.deadline_at_ms is not None and not request.is_probe


def _is_absent(device: DeviceState, request: Request) -> bool:
    replica = device.replicas[request.model]
    return replica.residency.state is Residency.HOST or replica.landings is not None


def free_at_ms(device: DeviceState, *, is_safe: bool = True) -> float:
    """When the dispatched tasks have computed, in the mean or (safe) hardly later."""
    now_ms = free_ms = device.core.now_ms
    for task in (device.current, device.upcoming, device.aside):
        if task is not None:
            begins_ms = free_ms if task is device.upcoming else task.began_at_ms
            mean_ms, spread_ms = _run_ms(device, task.model, task.batch)
            free_ms = max(now_ms, begins_ms + mean_ms + is_safe * spread_ms)
            replica = device.replicas[task.model]
            if replica.is_being_sent:
                load_ms = device.predictions.safe(task.model, task.batch).load_ms
                free_ms = max(free_ms, replica.transmit_started_at_ms + load_ms)
    return free_ms


def _run_ms(device: DeviceState, model: ModelName, batch: int) -> tuple[float, float]:
    """One run in the mean, and how much longer 95 of 100 take at most; zeros: not known."""
    if not _is_known(device, model):
        return 0.0, 0.0
    safe = device.predictions.safe(model, batch)
    return safe.mean_ms, safe.compute_ms - safe.mean_ms


def _is_known(device: DeviceState, model: ModelName) -> bool:
    """What one length took says nothing of another, and measurements are by batch."""
    replica = device.replicas.get(model)
    if replica is None or replica.manifest is None:
        return False
    return all(dim.name == BATCH for dim in replica.manifest.dims)
