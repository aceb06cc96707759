"""How close an order of transfers is to the ideal one (TicTac, MLSys '19). Pure.

TicTac's point: parameters should travel in the order in which computation needs them; frameworks
that send them in another (registration order, hash order) wait for what comes late. A program's
tensors here lie in order of first use already; this measures what that is worth, and how well a
run used link and device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .costs import LayerCosts


@dataclass(frozen=True, slots=True)
class OrderScore:
    """One order of transfers, layer by layer.

    Attributes:
        total_ms: with this order.
        first_use_ms: with the order of first use, which no other order beats.
        efficiency: TicTac's, of this order.
        first_use_efficiency: of the order of first use; 1 only where all is perfectly hidden.
        speedup_potential: how much longer the worst schedule takes than the bound, as a share.
    """

    total_ms: float
    first_use_ms: float
    efficiency: float
    first_use_efficiency: float
    speedup_potential: float


def ordering_efficiency(total_ms: float, link_ms: float, device_ms: float) -> float:
    """TicTac's efficiency of a run: (U - total) / (U - L).

    U is everything one after the other, L the busier of the two resources alone. 1: that one never
    waited; 0: nothing overlapped; below: something waited for neither. 1 where nothing could
    overlap.

    Args:
        total_ms: measured or predicted.
        link_ms: all transfers of the run.
        device_ms: all computation of the run.
    """
    worst_ms, least_ms = link_ms + device_ms, max(link_ms, device_ms)
    return 1.0 if worst_ms == least_ms else (worst_ms - total_ms) / (worst_ms - least_ms)


def score_order(order: Sequence[int], costs: LayerCosts) -> OrderScore:
    """Score sending the layers one by one in ``order`` while they compute in layer order.

    Raises:
        ValueError: ``order`` does not name each layer once.
    """
    count = costs.layer_count
    if sorted(order) != list(range(count)):
        raise ValueError(f"an order names each of {count} layers once, got {list(order)[:20]}")
    link_ms = sum(costs.link(size_bytes) for size_bytes in costs.layer_bytes)
    device_ms = costs.resident_ms + count * costs.sigma_ms
    total_ms, first_use_ms = _total_ms(order, costs), _total_ms(range(count), costs)
    busier_ms = max(link_ms, device_ms)
    return OrderScore(
        total_ms=total_ms,
        first_use_ms=first_use_ms,
        efficiency=ordering_efficiency(total_ms, link_ms, device_ms),
        first_use_efficiency=ordering_efficiency(first_use_ms, link_ms, device_ms),
        speedup_potential=min(link_ms, device_ms) / busier_ms if busier_ms else 0.0,
    )


def _total_ms(order: Sequence[int], costs: LayerCosts) -> float:
    arrived_ms = [0.0] * costs.layer_count
    link_ms = 0.0
    for layer in order:
        link_ms += costs.link(costs.layer_bytes[layer])
        arrived_ms[layer] = link_ms
    device_ms = costs.ready_ms
    for arrival_ms, compute_ms in zip(arrived_ms, costs.compute_ms, strict=True):
        device_ms = max(device_ms, arrival_ms) + costs.sigma_ms + compute_ms
    return device_ms
