"""From a profile to groups and predictions: the bridge to the planner. Pure.

The groups are for a machine that is not always as fast as it was measured. The optimum for one set
of costs has no slack: each group is as large as the computation before it allows, to the last
microsecond, and a copy that is a little late stalls the device. Planning for a slower link is no
cure: where the link is the bottleneck it costs up to a fifth. So the plan is chosen by *regret*:
how much longer than the best plan it takes, at worst, over a few scenarios.
"""

from __future__ import annotations

from typing import Final

from .costs import LayerCosts, LinkCost, makespan
from .exact import plan_groups
from .fit import MIB
from .grouping import Plan, per_layer
from .profile import Profile

SCENARIOS: Final = ((1.0, 1.0), (1.2, 1.0), (1.0, 1.2))
"""Factors of copies and of computation: as measured, a late link, a late device."""


def robust_plan(costs: LayerCosts) -> Plan:
    """Return the plan of least regret among the optima of all scenarios and the finest one."""
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

    A layer's time was measured as a group of its own, so it includes one call of a subgraph: that
    part is paid once for each group, and belongs to sigma. The time that a waiting worker needs to
    wake up is not in sigma: the link continues meanwhile, so it delays all groups once, together.

    On the cpu device the copy takes memory bandwidth and cores from the computation, so its times
    are those of a switch. A GPU's copy engine takes nothing, and the GPU itself waits for a group,
    inside the measured time: its times are those of a resident run.

    Raises:
        ValueError: that batch was not measured.
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
    """From the start of the first copy to the end of the last group, in ms."""
    return makespan(plan, costs_of(profile, batch)) + profile.overheads.wake_ms
