"""Groups and predictions from a profile. Pure.

A machine is not always as fast as during the measurement. The best plan for one set of costs has no
slack: each group is as large as the computation before it allows, so a copy that is a little late
stalls the device. Planning for a slower link does not solve this: if the link is the bottleneck,
such a plan takes up to 20 % longer. So the plan with the least *regret* is chosen: the largest
ratio, over a few scenarios, of its makespan to the makespan of the scenario's best plan.
"""

from __future__ import annotations

from typing import Final

from .costs import LayerCosts, LinkCost, makespan
from .exact import plan_groups
from .fit import MIB
from .grouping import Plan, per_layer
from .profile import Profile

SCENARIOS: Final = ((1.0, 1.0), (1.2, 1.0), (1.0, 1.2))
"""(Copy time factor, compute time factor): as measured, with a slower link, a slower device."""


def robust_plan(costs: LayerCosts) -> Plan:
    """Return the plan with the least regret among the scenarios' best plans and the finest plan."""
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
    """Return the planner's input; ``batch`` defaults to the first measured batch size.

    Each layer was measured as a group of its own, so its time includes one call of a subgraph. A
    plan has only one such call for each group, so the call's time becomes part of sigma. Sigma does
    not include the wake-up of a waiting worker: the link keeps copying, so it delays a run once.

    On the cpu device, copies take memory bandwidth and cores from the computation, so the compute
    times during switches are used. A GPU's copy engine takes nothing from the computation, and its
    times during switches include waits for groups, so the times of resident runs are used.

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
    """Return the plan with the least regret (``robust_plan``) at the profile's first batch size."""
    return robust_plan(costs_of(profile))


def predict(profile: Profile, plan: Plan, batch: int) -> float:
    """Return the predicted time from the first copy's start to the last group's end, in ms."""
    return makespan(plan, costs_of(profile, batch)) + profile.overheads.wake_ms
