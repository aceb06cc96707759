"""Batches of waiting requests, and the time that a batch waits for more requests. Pure.

If the model's owner has enabled batching (ADR 28), requests are joined along the batch dimension.
A batch has requests of one line (same model, version and priority), in the line's order.

The worker pads requests of unequal extents if the program allows it (``Manifest.pads``, ADR 53).
When a run ends, requests that need more runs are queued at once, and all that wait at that
time form the next batch (ADR 62).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Container, Sequence
from operator import add
from typing import Final, NamedTuple

from ...ipc.messages.base import ModelName
from ...programs.interface.dims import BATCH, values_of
from ...programs.interface.layout import MAX_JOINED_BYTES, Manifest
from ..state.device_state import DeviceState
from ..state.records import DeviceModel, Request
from .forecast import free_at_ms

MOST_LOOKED_AT: Final = 256  # requests of a line that are searched for the batch
MAX_PADDING: Final = 1.5  # limit of padded / real size in a dimension; at 2, batches save no time


class Batch(NamedTuple):
    """Requests that one run computes."""

    requests: list[Request]
    is_full: bool  # a later request would not change the batch

    @property
    def size(self) -> int:
        return sum([request.batch for request in self.requests])


class Joined:
    """Requests of one batch: their extents are equal, or need little padding."""

    def __init__(self, head: Request) -> None:
        self._key, self._rows = _key(head), head.batch
        self._sums = [extent * head.batch for extent in head.batching.padded]
        self._most = head.batching.padded
        self._sizes = [tensor.size_bytes for tensor in head.run.inputs]

    def take(self, request: Request) -> bool:
        """Add a request. Return False if it does not fit the batch."""
        if _key(request) != self._key:
            return False
        rows = self._rows + request.batch
        if request.batching.padded:
            most = tuple(map(max, self._most, request.batching.padded))
            sums = [*map(add, self._sums, [n * request.batch for n in request.batching.padded])]
            sizes = [*map(max, self._sizes, [one.size_bytes for one in request.run.inputs])]
            is_thin = any(rows * n > MAX_PADDING * m for n, m in zip(most, sums, strict=True))
            if is_thin or rows * sum(sizes) > MAX_JOINED_BYTES:
                return False
            self._most, self._sums, self._sizes = most, sums, sizes
        self._rows = rows
        return True


def _key(request: Request) -> object:
    """Return the properties that must be equal within a batch."""
    return (
        request.batching.fixed
        if request.batching.padded
        else [tensor.shape[1:] for tensor in request.run.inputs]
    )


def batch_for(device: DeviceState, replica: DeviceModel, head: Request) -> Batch:
    """Return the head with the requests of its line that join it.

    The batch ends

    1. at the first request that is too large for the rest of the limit;
    2. at the first request with which the predicted end would miss a deadline in the batch.

    Requests with other extents, with a leader in the batch, or that run alone are skipped.
    """
    members, size = [head], head.batch
    limit = _limit(device, replica, head)
    if limit <= size:
        return Batch(members, is_full=True)
    due_ms, batched, tokens = head.due_ms, Joined(head), {head.token}
    free_ms = free_at_ms(device)
    line = itertools.islice(device.queue.of_line(head), MOST_LOOKED_AT)
    for other in line:
        is_led = other.run.leader in tokens
        if other is head or other.batching.never_batch or is_led or not batched.take(other):
            continue
        size, due_ms = size + other.batch, min(due_ms, other.due_ms)
        is_late = due_ms < math.inf and free_ms + _compute_ms(device, replica, size) > due_ms
        if size > limit or is_late:
            return Batch(members, is_full=True)
        members.append(other)
        tokens.add(other.token)
        if size == limit:
            return Batch(members, is_full=True)
    return Batch(members, is_full=False)


def batch_start_ms(device: DeviceState, replica: DeviceModel, batch: Batch) -> float:
    """Return the instant until which a batch waits for more requests.
    It is the arrival of the oldest request plus the delay, or earlier to meet each deadline.
    A batch with a deadline does not wait if no run was measured yet."""
    batching = replica.built.batching
    compute_ms = _compute_ms(device, replica, batch.size)
    due_ms = min(request.due_ms for request in batch.requests)
    is_unknown = due_ms < math.inf and not compute_ms
    if batch.is_full or batching is None or not replica.is_on_device or is_unknown:
        return device.core.now_ms
    begins_ms = min(request.origin.arrived_at_ms for request in batch.requests) + batching.delay_ms
    return min(begins_ms, due_ms - compute_ms)


def should_wait_for_batch(device: DeviceState, replica: DeviceModel, batch: Batch) -> bool:
    """Return True if the batch must wait for the current run, which takes no more requests.
    Requests of that run may join the batch afterwards, or the batch needs tokens of the run."""
    running = device.owner.running
    is_same = running is not None and running.model == replica.name
    if running is not None and any(one.run.leader in running.tokens for one in batch.requests):
        return True
    return bool(replica.built.pads) and not batch.is_full and is_same


def take_led(device: DeviceState, model: ModelName, leaders: Container[int]) -> list[Request]:
    """Take the requests of these leaders out of the queue.
    Their inputs are out of date: the leaders' runs have computed tokens of their prompts."""
    led = [one for one in device.queue.of(model) if one.run.leader in leaders]
    for one in led:
        device.queue.discard(one)
    return led


def measure(request: Request, built: Manifest) -> None:
    """Record the extents of a request's inputs, by which padded requests are batched."""
    shapes = (tensor.shape for tensor in request.run.inputs)
    values = values_of((spec.shape for spec in built.inputs), shapes) or {}
    request.batching.padded = tuple([values.pop(name) for name in built.pads])
    request.batching.fixed = tuple([values[name] for name in values if name != BATCH])


def failed(device: DeviceState, replica: DeviceModel, requests: Sequence[Request]) -> None:
    """Record a failed batch. The cause is a request or the batching, so all are retried alone.

    A batch with a schema does not count, because the schema may be the cause. A client's schema
    must not end the batching of a model.
    """
    hows = [one.run.sampling_params for one in requests]
    replica.model.failed_batches += not any(how is not None and how.schema for how in hows)
    for request in requests:
        request.batching.never_batch = True
    if replica.model.failed_batches == device.core.settings.max_deaths:
        device.publish(
            "model.not_joined",
            model=replica.name,
            reason=f"{replica.model.failed_batches} batched runs in a row failed",
        )


def _limit(device: DeviceState, replica: DeviceModel, head: Request) -> int:
    """Return the maximum size of the joined batch; 1 if the request runs alone."""
    batching = replica.built.batching
    fails = replica.model.failed_batches >= device.core.settings.max_deaths
    return 1 if batching is None or head.batching.never_batch or fails else batching.limit


def _compute_ms(device: DeviceState, replica: DeviceModel, batch: int) -> float:
    return device.predictions.at_most_ms(replica.name, batch)
