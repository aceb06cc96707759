"""Which waiting requests are computed together, and how long one waits for others. Pure.

Requests are joined along the batch, where the model's owner has asked for it (ADR 28): those of one
line, which have one model, one version and one priority, in the line's order.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Final, NamedTuple

from ..device_state import DeviceState
from ..records import Replica, Request
from .forecast import free_at_ms

MOST_LOOKED_AT: Final = 256  # of a line, for those whose other dimensions are the same


class Batch(NamedTuple):
    """Requests that one run computes."""

    requests: list[Request]
    is_full: bool  # another one that comes would not change it

    @property
    def size(self) -> int:
        return sum([request.batch for request in self.requests])


def batch_for(device: DeviceState, replica: Replica, head: Request) -> Batch:
    """The head, and what of its line is joined with it. It ends

    1. at the first request that is too large for what the limit leaves;
    2. where the run, as far as is predicted, would end after the deadline of one that is in it.

    Requests of other lengths are passed over, and those that run alone.
    """
    found, size = [head], head.batch
    limit = _limit(device, replica, head)
    if limit <= size:
        return Batch(found, is_full=True)
    due_ms, other_extents = head.due_ms, _other_extents(head)
    free_ms = free_at_ms(device)
    for other in itertools.islice(device.queue.of_line(head), MOST_LOOKED_AT):
        if other is head or other.is_alone or _other_extents(other) != other_extents:
            continue
        size, due_ms = size + other.batch, min(due_ms, other.due_ms)
        if size > limit or free_ms + _compute_ms(device, replica, size) > due_ms:
            return Batch(found, is_full=True)
        found.append(other)
        if size == limit:
            return Batch(found, is_full=True)
    return Batch(found, is_full=False)


def begins_at_ms(device: DeviceState, replica: Replica, batch: Batch) -> float:
    """Until when it waits for others: its oldest request for the delay, and none so long that its
    deadline could not be met: before it was measured none with a deadline waits."""
    batching = replica.built.batching
    compute_ms = _compute_ms(device, replica, batch.size)
    due_ms = min(request.due_ms for request in batch.requests)
    is_unknown = due_ms < math.inf and not compute_ms
    if batch.is_full or batching is None or not replica.is_on_device or is_unknown:
        return device.core.now_ms
    oldest_ms = min(request.arrived_at_ms for request in batch.requests)
    return min(oldest_ms + batching.delay_ms, due_ms - compute_ms)


def failed(device: DeviceState, replica: Replica, requests: Sequence[Request]) -> None:
    """Their run ended badly, by one of them or by being joined: each is tried alone."""
    replica.model.failed_joins += 1
    for request in requests:
        request.is_alone = True
    if replica.model.failed_joins == device.core.settings.max_deaths:
        device.publish(
            "model.not_joined", model=replica.name,
            reason=f"{replica.model.failed_joins} joined runs in a row ended badly",
        )  # fmt: skip


def _limit(device: DeviceState, replica: Replica, head: Request) -> int:
    """Of the joined batch; 1: it runs alone."""
    batching = replica.built.batching
    fails = replica.model.failed_joins >= device.core.settings.max_deaths
    return 1 if batching is None or head.is_alone or fails else batching.limit


def _other_extents(request: Request) -> list[tuple[int, ...]]:
    return [tensor.shape[1:] for tensor in request.inputs]


def _compute_ms(device: DeviceState, replica: Replica, batch: int) -> float:
    return device.predictions.at_most_ms(replica.name, batch)
