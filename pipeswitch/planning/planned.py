"""Groups and predictions from a profile. Pure.

A machine is not always as fast as it was when it was measured. The optimum for one set of costs has
no slack: each group is as large as the computation before it allows, so a copy that is a little
late stalls the device. Planning for a slower link does not solve this: where the link is the
bottleneck, that plan takes up to 20 % longer. So the plan is chosen by its *regret*: the largest
ratio, over a few scenarios, of its makespan to the best plan's makespan.
"""

from __future__ import annotations

from typing import Final

from .costs import LayerCosts, LinkCost, makespan
from .exact import plan_groups
from .fit import MIB
from .grouping import Plan, per_layer
from .profile import Profile

SCENARIOS: Final = ((1.0, 1.0), (1.2, 1.0), (1.0, 1.2))
"""Factors of copy times and of compute times: as measured, a slower link, a slower device."""


def robust_plan(costs: LayerCosts) -> Plan:
    """Return the plan of least regret among each scenario's best plan and the finest plan."""
    worlds = [costs.scaled(*factors) for factors in SCENARIOS]
    optima = [plan_groups(world) for world in worlds]
    best_ms = [makespan(plan, world) for plan, world in zip(optima, worlds, strict=True)]

    def regret(plan: Plan) -> float:
        return max(
            makespan(plan, world) / least if least else 1.0
            for world, least in zip(worlds, best_ms, strict=True)
        )

    return min((*optima, per_layer(costs.layer_count)), key=regret)


def costs_of(profile: Profile, batch: int | None = None) -> LayerCosts:
    """Return the planner's input; ``batch`` defaults to the first that was measured.

    A layer's time was measured as a group of its own, so it includes one call of a subgraph. Each
    group pays for one such call, so that part moves to sigma. Sigma does not include the time that
    a waiting worker needs to wake up: the link continues meanwhile, so it delays a run only once.

    On the cpu device, copies take memory bandwidth and cores from the computation, so the times of
    a switch are used. A GPU's copy engine takes nothing from the computation, and the times of its
    switches include the GPU's waits for groups, so the times of resident runs are used.

    Raises:
        ValueError: ``batch`` was not measured.
    """
    times = profile.batches[0] if batch is None else profile.batch(batch)
    if times is None:
        raise ValueError(f"batch {batch} was not measured")
    layer_ms = times.switch_ms if profile.identity.device == "cpu" else times.resident_ms
    launch_ms = profile.overheads.launch_ms
    return LayerCosts(
        layer_bytes=tuple(layer.size_bytes for layer in profile.layers),
        compute_ms=tuple(max(0.0, ms - launch_ms) for ms in layer_ms),
        link=LinkCost(profile.link.alpha_ms, profile.link.beta_ms_per_mib / MIB),
        sigma_ms=profile.overheads.sigma_ms + launch_ms,
    )


def plan_of(profile: Profile) -> Plan:
    """Return the groups of least regret at the first batch (``robust_plan``)."""
    return robust_plan(costs_of(profile))


def predict(profile: Profile, plan: Plan, batch: int) -> float:
    """Return the time from the start of the first copy to the end of the last group, in ms."""
    return makespan(plan, costs_of(profile, batch)) + profile.overheads.wake_ms
