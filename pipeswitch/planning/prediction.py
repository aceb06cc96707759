"""When the run of a plan ends, and what no plan can beat. Pure."""

from __future__ import annotations

from .costs import LayerCosts
from .grouping import Plan, spans


def makespan(plan: Plan, costs: LayerCosts, resident_groups: int = 0) -> float:
    """From the start of the first copy to the end of the last group, in ms.

    Args:
        plan: the groups that it runs in.
        costs: of its layers.
        resident_groups: so many of the first are on the device: neither copied nor signalled.

    Raises:
        ValueError: ``plan`` is not a plan for these layers.
    """
    link_ms = device_ms = 0.0
    for index, (first, end) in enumerate(spans(plan, costs.layer_count)):
        if index >= resident_groups:
            link_ms += costs.transfer_ms(first, end)
            device_ms = max(device_ms, link_ms) + costs.sigma_ms
        device_ms += sum(costs.compute_ms[first:end])
    return device_ms


def bound(costs: LayerCosts) -> float:
    """M*: no plan ends earlier, in ms.

    Whatever the groups are, layer *i* starts after layers 0 to *i* have been sent, and all layers
    from *i* on compute after that. One copy's fixed cost and one signal are unavoidable too.
    """
    if not costs.layer_count:
        return 0.0
    latest_ms = max(
        costs.link(sent_bytes) + remaining_ms  # one copy is never dearer than two
        for sent_bytes, remaining_ms in zip(
            costs.offsets_bytes[1:], costs.remaining_ms, strict=False
        )
    )
    return costs.sigma_ms + max(costs.resident_ms, latest_ms)
