"""Durations as data: links, latencies and jobs; costs of a model's layers and of a plan. Pure."""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Final

from ...ipc.messages.base import ByteRange
from ...planning.grouping import Plan, spans

MIB: Final = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Link:
    """Link that copies one piece at a time: each takes a fixed time, plus a time per byte."""

    bytes_per_ms: float = math.inf
    fixed_ms: float = 0.0

    def copy_ms(self, size_bytes: int) -> float:
        """Return the time of a copy; 0 for no bytes, since such a group is already there."""
        return self.fixed_ms + size_bytes / self.bytes_per_ms if size_bytes else 0.0


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Costs of one server, in milliseconds."""

    to_device: Link = field(default_factory=Link)
    to_host: Link = field(default_factory=Link)
    to_store: Link = field(default_factory=Link)
    to_disk: Link = field(default_factory=Link)
    message_ms: float = 0.0  # one message between the controller and a process
    start_ms: float = 0.0  # start of a process
    reap_ms: float = 0.0
    build_ms: float = 0.0
    prepare_ms: float = 0.0
    park_ms: float = 0.0  # time from the stop of a job to the end of its layer


@dataclass(frozen=True, kw_only=True)
class Training:
    """Script of a job: equal steps, each of which needs the device."""

    steps: int
    step_ms: float = 0.0
    start_ms: float = 0.0  # time from the start of the script to its lease request
    loader_ms: float = 0.0  # time that each batch takes to arrive
    slice_bytes: int
    state_bytes: int  # size of one commit

    @property
    def ranges(self) -> tuple[ByteRange, ...]:
        """Ranges of the slice that a commit copies."""
        return (ByteRange(offset_bytes=0, size_bytes=self.state_bytes),)


@dataclass(frozen=True, slots=True)
class LinkCost:
    """Time of one copy: ``alpha_ms + beta_ms_per_byte * bytes``. Both parts are at least 0."""

    alpha_ms: float
    beta_ms_per_byte: float

    def __post_init__(self) -> None:
        for value in (self.alpha_ms, self.beta_ms_per_byte):
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"a link's costs are finite and not negative, got {self}")

    def __call__(self, size_bytes: int) -> float:
        return self.alpha_ms + self.beta_ms_per_byte * size_bytes


@dataclass(frozen=True)
class LayerCosts:
    """Costs of a model's layers on one link and one device; both process layers in order.

    Group *k* of a plan arrives at ``l[k] = l[k-1] + link(bytes)`` and its computation ends at
    ``c[k] = max(c[k-1], l[k]) + sigma_ms + compute_ms``; ``l`` and ``c`` begin at 0.

    Attributes:
        layer_bytes: bytes of the weights that each layer is the first to use; may be 0.
        compute_ms: compute time of each layer when its weights are on the device.
        link: time of one copy as a function of its size.
        sigma_ms: fixed compute-side time of each group: reading its fence, calling its subgraph.
    """

    layer_bytes: tuple[int, ...]
    compute_ms: tuple[float, ...]
    link: LinkCost
    sigma_ms: float = 0.0

    def __post_init__(self) -> None:
        if len(self.layer_bytes) != len(self.compute_ms):
            raise ValueError(
                f"{len(self.layer_bytes)} layers have bytes, {len(self.compute_ms)} have times"
            )
        times_ms = (*self.compute_ms, self.sigma_ms)
        if not all(math.isfinite(ms) and ms >= 0 for ms in times_ms):
            raise ValueError("times must be finite and not negative")
        if any(size_bytes < 0 for size_bytes in self.layer_bytes):
            raise ValueError("a layer has a negative number of bytes")

    def scaled(self, copy_factor: float, compute_factor: float) -> LayerCosts:
        """Return costs with the times of copies and of computation multiplied by these factors."""
        link = self.link
        slower = LinkCost(link.alpha_ms * copy_factor, link.beta_ms_per_byte * copy_factor)
        compute_ms = tuple(ms * compute_factor for ms in self.compute_ms)
        return replace(self, link=slower, compute_ms=compute_ms)

    @property
    def layer_count(self) -> int:
        return len(self.layer_bytes)

    @cached_property
    def offsets_bytes(self) -> tuple[int, ...]:
        """Bytes before each layer, and last the bytes of all layers: ``layer_count + 1`` values."""
        return tuple(accumulate(self.layer_bytes, initial=0))

    @cached_property
    def remaining_ms(self) -> tuple[float, ...]:
        """Compute time from each layer's start to the end, then 0: ``layer_count + 1`` values."""
        return tuple(accumulate(reversed(self.compute_ms), initial=0.0))[::-1]

    @property
    def total_bytes(self) -> int:
        return self.offsets_bytes[-1]

    @property
    def resident_ms(self) -> float:
        """Compute time in ms if the whole model is on the device; switches are compared with it."""
        return self.remaining_ms[0]

    def transfer_ms(self, first: int, end: int) -> float:
        """Return the time of one copy of the layers ``first`` to ``end - 1``."""
        return self.link(self.offsets_bytes[end] - self.offsets_bytes[first])


def makespan(plan: Plan, costs: LayerCosts) -> float:
    """Return the time from the start of the first copy to the end of the last group, in ms.

    Raises:
        ValueError: ``plan`` is not a plan for these layers.
    """
    link_ms = device_ms = 0.0
    for first, end in spans(plan, costs.layer_count):
        link_ms += costs.transfer_ms(first, end)
        device_ms = max(device_ms, link_ms) + costs.sigma_ms
        device_ms += sum(costs.compute_ms[first:end])
    return device_ms


def bound(costs: LayerCosts) -> float:
    """Return M*, in ms: no plan can have a smaller makespan.

    In every plan, layer *i* starts after layers 0 to *i* have been copied; then all layers from *i*
    on must still compute. Every plan also pays the fixed costs of at least one copy and one signal.
    """
    if not costs.layer_count:
        return 0.0
    latest_ms = max(
        costs.link(sent_bytes) + remaining_ms  # one copy of these bytes is the fastest way
        for sent_bytes, remaining_ms in zip(
            costs.offsets_bytes[1:], costs.remaining_ms, strict=False
        )
    )
    return costs.sigma_ms + max(costs.resident_ms, latest_ms)


def pass_ms(plan: Plan, costs: LayerCosts, waits: Sequence[int], resident: Container[int]) -> float:
    """Return the time of a pass of a model that is larger than the arena, in ms.

    Args:
        waits: number of groups that must have computed before each group's copy.
        resident: indices of the groups that are already on the device.
    """
    link_ms = device_ms = 0.0
    ends_ms = [0.0]  # entry n: when n groups have computed
    for index, (first, end) in enumerate(spans(plan, costs.layer_count)):
        if index not in resident:
            link_ms = max(link_ms, ends_ms[waits[index]])
            link_ms += costs.transfer_ms(first, end)
            device_ms = max(device_ms, link_ms)
        device_ms += costs.sigma_ms + sum(costs.compute_ms[first:end])
        ends_ms.append(device_ms)
    return device_ms
