"""Random runs of simulated servers: any order of events keeps the invariants, and all runs end."""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from typing import Any

import pytest
from hypothesis import event, example, given, settings
from hypothesis import strategies as st

from pipeswitch.scheduler.requests.dispatch import Dispatch
from pipeswitch.scheduler.scheduler import Scheduler
from pipeswitch.scheduler.state.events import InferArrived
from tests.unit.fleet_model import MIB, QUIET, Faults, World, live, random_world

SEEDS = st.integers(0, 2**32)
lives = settings(max_examples=settings().max_examples // 3)  # an example takes 0.1 s


@lives
@given(seed=SEEDS)
@example(seed=375985)  # here the grace period of a drain ends before a commit is on disk
def test_any_life_keeps_the_invariants_and_ends(seed: int) -> None:
    """Run a random life; in half of the lives, clients also ask for all processes' health."""
    live(random_world(seed, pings=seed % 2 == 0), 500)


@lives
@given(seed=SEEDS)
def test_without_faults_nothing_is_lost_or_restarted(seed: int) -> None:
    world = World(seed, faults=Faults(**QUIET))
    core = world.scheduler.core
    # Time jumps by seconds in this world, so a deadline must not make a task count as hung.
    core.settings = dataclasses.replace(core.settings, deadline_grace_ms=1e12)
    live(world, 500)
    assert core.counts["worker_restarts"] == world.left_swapped
    assert world.scheduler.core.counts["daemon_restarts"] == 0
    assert "WorkerLost" not in world.counts


@given(
    seed=SEEDS,
    requests=st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(0, 2)), min_size=1, max_size=16
    ),
)
def test_models_that_do_not_fit_together_do_not_block_each_other(
    seed: int, requests: list[tuple[str, int]]
) -> None:
    quiet = Faults(**QUIET)
    world = World(seed, faults=quiet, arena_mib=48)
    for name in "abc":
        world.register(name, 30 * MIB)
    while world.act():
        pass
    for name, priority in requests:
        world.infer(name, priority=priority)
        world.act()
    world.settle()
    assert world.counts["ok"] >= len(requests)


@given(seed=SEEDS)
def test_endless_loops_give_the_device_back(seed: int) -> None:
    """Make every request hang, without a deadline: each one must still be answered in the end."""
    faults = Faults(**QUIET, hang=1.0)
    world = World(seed, faults=faults, max_compute_ms=60000.0)
    world.register("a", MIB)
    while world.act():
        pass
    for _ in range(2):
        world.infer("a")
    for _ in range(400):
        if world.open and not world.act():
            assert world.to_next_wakeup(), world.describe()
    assert not world.open, world.describe()
    assert world.counts["DeadlineExceeded"] == 2


@lives
@given(seed=SEEDS)
@example(seed=39)  # here a worker that must be replaced leaves before it answers a ping
def test_any_life_on_two_devices_keeps_the_invariants_and_ends(seed: int) -> None:
    live(random_world(seed, pings=seed % 2 == 1, devices=2), 500)


@lives
@given(seed=SEEDS)
@example(seed=24)  # here a caller's penalty ends, so another model is next and may be copied
def test_any_life_with_a_model_that_streams_keeps_the_invariants_and_ends(seed: int) -> None:
    world = random_world(seed, devices=1 + seed % 2)
    world.register("m6", 120 * MIB, groups=12)
    live(world, 500)


@lives
@given(seed=SEEDS)
def test_any_life_of_variants_computes_each_with_its_own_bytes(seed: int) -> None:
    """The simulated device knows which tensors it has, and checks each group that is read."""
    world = random_world(seed, devices=1 + seed % 2)
    for name in ("v3", "v4", "v5", "v6", "v7", "v8"):
        world.register(name, 20 * MIB, groups=3)
    live(world, 500)
    event("in place" if world.scheduler.core.counts["partial_dispatches"] else "whole")


def _seen(scheduler: Any) -> Any:
    """Return, for each device, the facts that later decisions depend on."""
    return [
        (
            {r.token: r.state.state for r in state.requests.values()},
            {w.slot: (w.state.state, w.dispatch_id) for w in state.workers.values()},
            [(a.caller, dict(a.tags), a.running, a.waiting, a.seen_at_ms) for a in state.accounts],
            dict(state.accounts._clock),
            state.accounts._had_at_ms,
            repr((state.owner.running, state.owner.pending)),
        )
        for state in (device.state for device in scheduler.machine.devices)
    ]


def test_a_request_that_is_dispatched_at_once_is_the_one_that_the_order_would_have_put_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counts = Counter[bool]()
    at_once, handle = Dispatch.at_once, Scheduler.handle

    def noted(self: Dispatch, request: Any) -> bool:
        is_taken = at_once(self, request)
        counts[is_taken] += 1
        return is_taken

    def both_ways(self: Scheduler, event: Any, now_ms: float) -> list[Any]:
        if not isinstance(event, InferArrived):
            return handle(self, event, now_ms)
        other = copy.deepcopy(self)
        commands = handle(self, event, now_ms)
        with monkeypatch.context() as patch:
            patch.setattr(Dispatch, "at_once", lambda *_: False)
            ordered = handle(other, event, now_ms)
        assert (repr(commands), _seen(self)) == (repr(ordered), _seen(other))
        return commands

    monkeypatch.setattr(Dispatch, "at_once", noted)
    monkeypatch.setattr(Scheduler, "handle", both_ways)
    for seed in range(6):
        live(random_world(seed, devices=1 + seed % 2), 200)
    assert min(counts[True], counts[False]) > 10, counts
