"""When each group of a plan arrives, starts and ends, and what no plan can beat. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from .costs import LayerCosts
from .grouping import Plan, spans


@dataclass(frozen=True, slots=True)
class GroupTimes:
    """One group's times, from the start of the first copy on."""

    first_layer: int
    end_layer: int  # one past its last
    size_bytes: int
    is_resident: bool  # was on the device already
    arrived_ms: float  # 0 for a resident one
    started_ms: float  # signalling included: the compute side takes it up
    finished_ms: float


@dataclass(frozen=True, slots=True)
class Prediction:
    """A plan's timeline.

    ``total_ms = ready_ms + compute_ms + signal_ms + stall_ms``.
    """

    groups: tuple[GroupTimes, ...]
    total_ms: float
    ready_ms: float
    compute_ms: float
    signal_ms: float  # sigma of every transmitted group
    stall_ms: float  # the device was ready and waited for the link

    @property
    def overhead_ms(self) -> float:
        """Start-up overhead: more than the same run with everything resident takes."""
        return self.signal_ms + self.stall_ms


def makespan(plan: Plan, costs: LayerCosts, resident_groups: int = 0) -> Prediction:
    """Predict the run of ``plan`` whose first ``resident_groups`` groups are on the device.

    Raises:
        ValueError: ``plan`` is not a plan for these layers.
    """
    link_ms, device_ms, stall_ms, signal_ms = 0.0, costs.ready_ms, 0.0, 0.0
    groups: list[GroupTimes] = []
    for index, (first, end) in enumerate(spans(plan, costs.layer_count)):
        is_resident = index < resident_groups
        started_ms = device_ms
        if not is_resident:
            link_ms += costs.transfer_ms(first, end)
            started_ms = max(device_ms, link_ms)
            stall_ms += started_ms - device_ms
            signal_ms += costs.sigma_ms
        sigma_ms = 0.0 if is_resident else costs.sigma_ms
        device_ms = started_ms + sigma_ms + sum(costs.compute_ms[first:end])
        groups.append(
            GroupTimes(
                first_layer=first,
                end_layer=end,
                size_bytes=costs.offsets_bytes[end] - costs.offsets_bytes[first],
                is_resident=is_resident,
                arrived_ms=0.0 if is_resident else link_ms,
                started_ms=started_ms,
                finished_ms=device_ms,
            )
        )
    return Prediction(
        groups=tuple(groups),
        total_ms=device_ms,
        ready_ms=costs.ready_ms,
        compute_ms=costs.total_compute_ms,
        signal_ms=signal_ms,
        stall_ms=stall_ms,
    )


def bound(costs: LayerCosts) -> float:
    """M*: no plan ends earlier, in ms.

    Whatever the groups are, layer *i* starts after layers 0 to *i* have been sent, and all layers
    from *i* on compute after that. One copy's fixed cost and one signal are unavoidable too.
    """
    if not costs.layer_count:
        return costs.ready_ms
    latest_ms = max(
        costs.link(sent_bytes) + remaining_ms  # one copy is never dearer than two
        for sent_bytes, remaining_ms in zip(
            costs.offsets_bytes[1:], costs.remaining_ms, strict=False
        )
    )
    return costs.sigma_ms + max(costs.resident_ms, latest_ms)
