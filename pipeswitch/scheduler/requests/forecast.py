"""Predicted end of a request, from measurements. Pure.

A new request is accepted only if it will be in time and makes no accepted request late. Its
prediction is therefore the sum of

1. the 95th percentile of each dispatched task;
2. the mean time of the request and of each request before it, plus ``SURE`` times the root of the
   sum of the squares of (95th percentile - mean);
3. a margin: how much later dispatched requests ended than was predicted.

The prediction of a waiting request uses only means: it was accepted, so it is dropped only if its
answer will probably be late.

If the policy sorts a caller's requests by one key (``Order.sorts_by``), all requests before a new
one are known, and other callers' turns are added. Otherwise only the requests of its own line are
counted, which gives a lower bound.

If all measurements come from a slow moment, every request may be refused, and nothing is measured
any more. So once the measurements are old, a request is accepted as a probe.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from itertools import islice
from typing import Final

from ...base.errors import DeadlineExceeded
from ...ipc.messages.base import ModelName
from ...programs.interface.dims import BATCH
from ..state.device_state import DeviceState
from ..state.events import Token
from ..state.records import Request
from ..state.states import Residency

SURE = 2.0  # factor for the spread of a sum, because slow moments last for many runs
MOST_AHEAD: Final = 4  # number of heads or models that are searched for one to send ahead
MAX_BLOCKED: Final = 8  # number of models without memory that are skipped; each costs a search
MOST_LOOKED_AT: Final = 64  # number of requests that are searched for models to send ahead
ROUNDING_MS: Final = 1e-6  # a check must come just after the limit, not exactly at it
MARGIN_MS = 0.01  # tolerance for rounding; predictions are less exact than this


def predicted_end_ms(device: DeviceState, request: Request) -> float:
    """Return the predicted end of a new request, or of the next queued one, without a margin."""
    is_next, sorts_by = request.token in device.queue, device.core.judge.sorts_by
    if sorts_by and not is_next:
        return _ends_ms(device, device.queue.around(request, sorts_by)[0], [request])[request.token]
    own_ms, spread_ms = _run_ms(device, request.model, request.batch)
    count, batch = (0, 1) if is_next else device.queue.ahead(request)
    runs = _runs(device, request.model, count * batch, count)
    mean_ms, more_ms = _run_ms(device, request.model, batch)
    ends_ms = free_at_ms(device, is_safe=not is_next) + runs * mean_ms + own_ms
    if _is_absent(device, request):
        link_ms = device.core.now_ms if is_next else _link_free_at_ms(device)
        ends_ms = max(ends_ms, link_ms + _sent_ms(device, request) + (own_ms if count else 0.0))
    square = 0.0 if is_next else runs * more_ms**2 + spread_ms**2
    return ends_ms + SURE * math.sqrt(square)


def _ends_ms(device: DeviceState, before: list[Request], then: list[Request]) -> dict[Token, float]:
    """Return the predicted end of each request if no other request arrives.

    This simulates dispatcher and link for one caller, whose requests are sorted. When a request
    begins, the next one is dispatched: the first whose model is on the device, is being copied, or
    can be copied because the link is free. Meanwhile, absent models that are needed next are
    copied. Requests of ``before`` are batched in the best possible way.
    """
    overtakes = device.core.judge.sorts_by == "deadline"
    at_ms = begins_ms = device.core.now_ms
    free_ms, link_ms = free_at_ms(device), _link_free_at_ms(device)
    if (pending := device.owner.pending) is not None:
        begins_ms = free_ms - _run_ms(device, pending.model, pending.batch)[0]
    free_ms += _others_ms(device, [*then, *before][0], _all_ms(device, before)[0])
    waiting, alone, square = deque([*before, *then]), {one.token for one in then}, 0.0
    kinds = {(one.model, one.batch): one for one in waiting}
    times = {key: (*_run_ms(device, *key), _sent_ms(device, one)) for key, one in kinds.items()}
    load_ms = {name: device.predictions.safe(name, 1).load_ms for name, _ in times}
    comes_ms: dict[ModelName, float] = {}  # model -> its copy's end; 0: it is there
    for name in load_ms:
        replica = device.replicas[name]
        if replica.is_on_device and replica.staging is None:
            is_coming = replica.is_being_sent
            comes_ms[name] = replica.transfer.started_at_ms + load_ms[name] if is_coming else 0.0
    counts, ends_ms = Counter[tuple[ModelName, int]](), dict[Token, float]()
    while True:
        if device.settings.look_ahead and len(comes_ms) < len(load_ms):
            ahead = dict.fromkeys([one.model for one in islice(waiting, MOST_LOOKED_AT)])
            for name in islice(ahead, MOST_AHEAD):
                if name not in comes_ms and max(link_ms, at_ms) < begins_ms:
                    comes_ms[name] = link_ms = max(link_ms, at_ms) + load_ms[name]
        if not waiting:
            return ends_ms
        place, at_ms = 0, begins_ms
        if link_ms > at_ms and waiting[0].model not in comes_ms:
            looked_at = enumerate(islice(waiting, MAX_BLOCKED if overtakes else 0))
            place = next((index for index, one in looked_at if one.model in comes_ms), 0)
            at_ms = at_ms if place else link_ms
        one, may_begin_ms = waiting[place], max(free_ms, at_ms)
        if one.model not in comes_ms:
            comes_ms[one.model] = link_ms = at_ms + load_ms[one.model]
        mean_ms, _, sent_ms = times[one.model, one.batch]
        idle_ms = comes_ms[one.model] - load_ms[one.model] + sent_ms - mean_ms - may_begin_ms
        if overtakes and idle_ms > 0.0:
            for index, other in enumerate(islice(waiting, MAX_BLOCKED)):
                is_there = comes_ms.get(other.model, math.inf) <= at_ms
                if is_there and 0.0 < sum(times[other.model, other.batch][:2]) <= idle_ms:
                    place, one = index, other
                    break
        del waiting[place]
        key, runs = (one.model, one.batch), 1
        mean_ms, spread_ms, sent_ms = times[key]
        if one.token not in alone:
            rows, counts[key] = counts[key] * one.batch, counts[key] + 1
            known = _runs(device, one.model, rows, counts[key] - 1)
            runs = _runs(device, one.model, rows + one.batch, counts[key]) - known
        begins_ms = max(free_ms, at_ms)
        arrives_ms = comes_ms[one.model] - load_ms[one.model] + sent_ms
        free_ms, square = max(begins_ms + runs * mean_ms, arrives_ms), square + runs * spread_ms**2
        ends_ms[one.token] = free_ms + SURE * math.sqrt(square)


def _others_ms(device: DeviceState, request: Request, own_ms: float) -> float:
    """Return the device time of other callers before the request's turn.
    It counts their waiting work: all of a more urgent priority, and at most their share of equal
    priority. Requests that may still arrive do not count: no request is refused for them."""
    accounts, effective_priority, total_ms = device.accounts, request.origin.priority, 0.0
    account = accounts.of(request.origin.caller)
    turn = accounts.tag(account, effective_priority) + own_ms / account.weight
    waiting: dict[str, list[Request]] = {}
    for one in device.queue:
        waiting.setdefault(one.origin.caller, []).append(one)
    for caller in waiting.keys() - {request.origin.caller}:
        other, (ms, _) = accounts.of(caller), _all_ms(device, waiting[caller])
        if other.effective_priority == effective_priority:
            ms = min(ms, max(0.0, turn - other.tags[effective_priority]) * other.weight)
        total_ms += ms if other.effective_priority <= effective_priority else 0.0
    return total_ms


def _all_ms(device: DeviceState, requests: list[Request]) -> tuple[float, float]:
    """Return the device time of all requests, and the sum of squared spreads."""
    total_ms = square = 0.0
    for (model, batch), count in Counter((one.model, one.batch) for one in requests).items():
        mean_ms, spread_ms = _run_ms(device, model, batch)
        runs = _runs(device, model, count * batch, count)
        total_ms, square = total_ms + runs * mean_ms, square + runs * spread_ms**2
    return total_ms, square


def waiting_ms(device: DeviceState, model: ModelName, caller: str) -> tuple[int, int]:
    """Return the computing time of a model's waiting requests, and the caller's part, in ms."""
    requests = device.queue.of(model)
    own = [one for one in requests if one.origin.caller == caller]
    return round(_all_ms(device, requests)[0]), round(_all_ms(device, own)[0])


def _runs(device: DeviceState, model: ModelName, rows: int, count: int) -> int:
    """Return the smallest number of runs that compute these requests of a model."""
    manifest = device.replicas[model].manifest
    if manifest is None or manifest.batching is None:
        return count
    return -(-rows // manifest.batching.limit)


def is_refused(device: DeviceState, request: Request) -> bool:
    """Return True if a new request would be late, or would delay an accepted one too much."""
    sorts_by = device.core.judge.sorts_by
    if not sorts_by or not _is_asked(device, request):
        return cannot_meet_deadline(device, request)
    before, behind = device.queue.around(request, sorts_by)
    may_end_ms = MARGIN_MS - device.predictions.margin_ms
    ends_ms = _ends_ms(device, before, [request, *behind])
    if ends_ms[request.token] > request.due_ms + may_end_ms:
        return True
    late = [one for one in (*before, *behind) if ends_ms[one.token] > one.due_ms + may_end_ms]
    ends_ms = _ends_ms(device, before, behind) if late else {}
    return any(ends_ms[one.token] <= one.due_ms + may_end_ms for one in late)


def infeasible_after_ms(device: DeviceState, request: Request) -> float | None:
    """Return the last instant for a dispatch in time; None: the request's end is not predicted."""
    if not _is_asked(device, request):
        return None
    assert request.origin.deadline_at_ms is not None
    own_ms, _ = _run_ms(device, request.model, request.batch)
    return request.origin.deadline_at_ms - own_ms + MARGIN_MS


def absent_until_ms(device: DeviceState, request: Request) -> float:
    """Return the last useful start of an absent model's copy; infinity if there is no such copy."""
    if not _is_asked(device, request) or not _is_absent(device, request):
        return math.inf
    return request.due_ms - _sent_ms(device, request) + MARGIN_MS + ROUNDING_MS


def waits_for_copy_ms(device: DeviceState, request: Request) -> float:
    """Return the time for which the device would wait for the model of the next request."""
    arrives_ms = device.replicas[request.model].transfer.started_at_ms + _sent_ms(device, request)
    own_ms, _ = _run_ms(device, request.model, request.batch)
    return arrives_ms - own_ms - free_at_ms(device)


def fits_in(device: DeviceState, request: Request, idle_ms: float) -> bool:
    """Return True if the run surely takes at most ``idle_ms``; False if others may join it."""
    run_ms = sum(_run_ms(device, request.model, request.batch))
    is_batched = device.replicas[request.model].built.batching is not None
    return not is_batched and 0.0 < run_ms <= idle_ms


def cannot_meet_deadline(device: DeviceState, request: Request) -> bool:
    """Return True if the deadline will not be met; a new request gets a margin."""
    if not _is_asked(device, request):
        return False
    assert request.origin.deadline_at_ms is not None
    is_waiting = request.token in device.queue
    margin_ms = 0.0 if is_waiting else device.predictions.margin_ms
    return predicted_end_ms(device, request) + margin_ms > request.origin.deadline_at_ms + MARGIN_MS


def note_end(device: DeviceState, request: Request) -> None:
    """Store the predicted end of a dispatched request, to compare it with the real end.
    Requests whose model is being copied are left out, because the copy also waits for memory."""
    running = device.owner.running
    is_warm = running is None or running.was_resident
    is_there = device.replicas[request.model].residency.state in (
        Residency.RESIDENT,
        Residency.PINNED,
    )
    if _is_asked(device, request) and is_warm and is_there:
        request.forecast.predicted_end_ms = predicted_end_ms(device, request)


def is_worth_a_probe(device: DeviceState, request: Request) -> bool:
    """Return True if a request that seems late should be accepted, to measure its model again."""
    return device.predictions.is_due(
        request.model, request.batch, is_sent=_is_absent(device, request), now_ms=device.core.now_ms
    )


def will_be_measured(device: DeviceState, request: Request) -> None:
    """Record that the request is accepted: the next one that seems late is not a probe."""
    device.predictions.on_dispatched(
        request.model, request.batch, is_sent=_is_absent(device, request), now_ms=device.core.now_ms
    )


def deadline_error(device: DeviceState, request: Request) -> DeadlineExceeded:
    """Return the client's error; ``predicted_ms`` counts from the request's arrival."""
    assert request.origin.deadline_at_ms is not None
    allowed_ms = request.origin.deadline_at_ms - request.origin.arrived_at_ms
    predicted_ms = predicted_end_ms(device, request) - request.origin.arrived_at_ms
    return DeadlineExceeded(
        f"the answer would take {predicted_ms:.0f} ms, or delay others too much; the deadline is "
        f"{allowed_ms:.0f} ms",
        hint="allow more time, or try again when fewer requests wait",
        predicted_ms=predicted_ms,
        waited_ms=device.core.now_ms - request.origin.arrived_at_ms,
    )


def _is_asked(device: DeviceState, request: Request) -> bool:
    is_on = device.settings.admission != "off"
    return is_on and request.origin.deadline_at_ms is not None and not request.forecast.is_probe


def _is_absent(device: DeviceState, request: Request) -> bool:
    replica = device.replicas[request.model]
    return replica.residency.state is Residency.HOST or replica.staging is not None


def _sent_ms(device: DeviceState, request: Request) -> float:
    """Return the time of copy and computation on an idle device, and of the copy of a slice out.
    Groups compute as they arrive; the last one (of average size) computes after the copy."""
    manifest, own_ms = (
        device.replicas[request.model].manifest,
        _run_ms(device, request.model, request.batch)[0],
    )
    last_ms = own_ms / len(manifest.groups) if manifest is not None and manifest.groups else own_ms
    load_ms = device.predictions.safe(request.model, request.batch).load_ms
    return _free_memory_ms(device, request) + load_ms + last_ms


def _free_memory_ms(device: DeviceState, request: Request) -> float:
    """Return the time to copy the largest slice out if the model does not fit beside all slices."""
    slices = [job.memory.lease_bytes for job in device.jobs.values() if job.memory.lease_bytes]
    if not slices:
        return 0.0
    pinned_bytes = sum(device.replicas[name].region_bytes for name in device.pinned)
    left_bytes = device.settings.arena_bytes - pinned_bytes - sum(slices)
    if device.replicas[request.model].region_bytes <= left_bytes:
        return 0.0
    return device.predictions.swap_out_ms(max(slices))


def _link_free_at_ms(device: DeviceState) -> float:
    """Return the instant at which the running copies end."""
    free_ms = device.core.now_ms
    for name in device.sending:
        load_ms = device.predictions.safe(name, 1).load_ms
        free_ms = max(free_ms, device.replicas[name].transfer.started_at_ms + load_ms)
    return free_ms


def free_at_ms(device: DeviceState, *, is_safe: bool = True) -> float:
    """Return the instant at which the dispatched tasks end: on average, or (``is_safe``) surely."""
    now_ms = free_ms = device.core.now_ms
    for task in device.owner.tasks:
        begins_ms = free_ms if task is device.owner.pending else task.began_at_ms
        mean_ms, spread_ms = _run_ms(device, task.model, task.batch)
        free_ms = max(now_ms, begins_ms + mean_ms + is_safe * spread_ms)
        replica = device.replicas[task.model]
        if replica.is_being_sent:
            load_ms = device.predictions.safe(task.model, task.batch).load_ms
            free_ms = max(free_ms, replica.transfer.started_at_ms + load_ms)
    return free_ms


def _run_ms(device: DeviceState, model: ModelName, batch: int) -> tuple[float, float]:
    """Return a run's mean time, and the spread to its 95th percentile; zeros: unknown."""
    if not _is_known(device, model):
        return 0.0, 0.0
    safe = device.predictions.safe(model, batch)
    return safe.mean_ms, safe.compute_ms - safe.mean_ms


def _is_known(device: DeviceState, model: ModelName) -> bool:
    """Return True if only the model's batch varies: measurements are kept by batch alone."""
    replica = device.replicas.get(model)
    if replica is None or replica.manifest is None:
        return False
    return all(dim.name == BATCH for dim in replica.manifest.dims)
