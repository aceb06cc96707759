"""The protocol model: every state of small scopes keeps the invariants; seeded bugs are found."""

from __future__ import annotations

import marshal
import random
from typing import Any

import pytest

from tests.model import daemon, expand, worker
from tests.model.choices import actions, jumps
from tests.model.frozen import frozen_part
from tests.model.mutants import MUTANTS
from tests.model.scope import Scope
from tests.model.scopes import QUICK
from tests.model.search import Exploration
from tests.model.story import tell
from tests.model.world import World

LONG = {
    *("deadline", "evict", "pause", "signals", "prefetch", "daemon", "cancel", "kill"),
    *("swap-daemon", "swap-pause", "swap-two", "swap-one"),
}
"""Scopes with the most states; ``make model`` explores these, too, and larger scopes."""


def _some(rows: Any) -> list[Any]:
    """Return scopes as test parameters; the scopes in ``LONG`` are marked as slow."""
    return [
        pytest.param(row, id=row.name, marks=[pytest.mark.slow] if row.name in LONG else [])
        for row in rows
    ]


@pytest.mark.parametrize("scope", _some(QUICK))
def test_every_state_of_a_small_scope_keeps_the_invariants_and_leads_to_rest(scope: Any) -> None:
    report = Exploration(scope).run()
    story = tell(scope, report.path, report.violation) if report.violation else ""
    assert not report.violation, story
    assert report.is_exhausted


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_model_finds_the_seeded_bug(mutant: Any) -> None:
    with mutant.planted():
        report = Exploration(mutant.scope, most_states=50_000).run()
        assert report.violation, f"{report.states} states, and {mutant.name} was not found"
        story = tell(mutant.scope, report.path, report.violation)
    assert "played again it did not come" not in story


@pytest.mark.parametrize("devices", [1, 2])
def test_a_thawed_state_goes_on_as_the_one_that_was_frozen(devices: int) -> None:
    """Make the same moves in two worlds; freeze and thaw one of them before each move."""
    scope = Scope(
        name="both",
        steps=2,
        requests=2,
        kills=1,
        suspicions=1,
        daemon_kills=1,
        late=1,
        repeats=1,
        deadlines=1,
        cancels=1,
        hints=1,
        drains=1,
        pins=devices - 1,
        devices=devices,
    )
    for seed in range(20):
        chance = random.Random(seed)
        straight, renumbered = World(scope), World(scope)
        for _ in range(120):
            state = straight.freeze()
            assert renumbered.freeze() == state
            renumbered.thaw(marshal.loads(state))
            possible = actions(straight) or jumps(straight)[:1]
            assert (actions(renumbered) or jumps(renumbered)[:1]) == possible
            if not possible:
                break
            action = chance.choice(possible)
            assert straight.apply(action) == renumbered.apply(action)


def test_what_states_share_is_never_changed() -> None:
    """States share their workers and daemons, so a move must change a copy of one."""
    for scope in QUICK[:2]:
        Exploration(scope).run()
        world = expand._expander.world
        assert world.known_workers
        assert world.known_daemons
        for one in world.known_workers.values():
            assert frozen_part(worker.freeze_worker, one) == one.kept
        for other in world.known_daemons.values():
            assert frozen_part(daemon.freeze_daemon, other) == other.kept


def test_the_scheduler_is_asked_once_for_each_event_in_a_state() -> None:
    world: Any = World(Scope(name="one", models=1, is_coarse=True))
    start = marshal.loads(world.freeze())
    events = []
    handle = world.scheduler.handle
    world.scheduler.handle = lambda event, now_ms: events.append(event) or handle(event, now_ms)
    ends = set()
    for _ in range(3):
        world.thaw(start)
        assert world.apply(("ask",))
        ends.add(world.freeze())
    assert len(ends) == 1
    assert len(events) == len(set(events)) > 0


def test_a_server_leaves_when_the_commit_of_a_waiting_job_is_on_disk() -> None:
    world: Any = World(
        Scope(
            name="one",
            steps=1,
            requests=1,
            models=1,
            arena_mib=6,
            drains=1,
            max_swapped=0,
            is_coarse=True,
        )
    )  # the model needs the slice's memory, so the request evicts the job, which then waits
    for action in [
        ("moves", 1),
        ("tells", 1, "task"),
        ("moves", 1),
        ("ask",),
        ("moves", 1),
        ("moves", 1),
        ("tells", 1, "task"),
        ("daemon_works",),
        ("moves", 1),
        ("tells", 1, "task"),
        ("moves", 1),
    ]:
        world.apply(action)
    assert world.scheduler.machine.devices[0].state.jobs["job"].slot is None
    assert world.areas["job"].on_disk == -1
    for action in [
        ("drain",),
        ("moves", 0),
        ("daemon_copies",),
        ("moves", 0),
        ("tells", 0, "task"),
    ]:
        assert world.left is None
        world.apply(action)
    assert world.left == 0
    assert world.areas["job"].on_disk == 0


def test_a_job_starts_again_only_when_its_last_commit_is_copied() -> None:
    world: Any = World(Scope(name="one", steps=1, requests=0, models=1, kills=1, is_coarse=True))
    for action in [("moves", 1), ("tells", 1, "task"), ("moves", 1), ("moves", 1), ("moves", 1)]:
        world.apply(action)
    world.apply(("kill", 1))  # the killed worker's last message, a CommitStep, still arrives
    job = world.scheduler.machine.devices[0].state.jobs["job"]
    assert job.slot is None
    orders = [type(order).__name__ for order in world.daemon._queues["to-host"]]
    assert orders == ["CommitCopy", "Scrub"]
    world.apply(("daemon_works",))
    assert job.memory.committed_step == 1
    assert job.slot is not None
    world.apply(("moves", job.slot))
    assert world.workers[job.slot].script.saved == (1, 1, 1)


@pytest.mark.parametrize(("has_begun", "deaths"), [(False, 0), (True, 1)])
def test_a_death_is_blamed_on_a_task_only_when_it_had_begun(has_begun: bool, deaths: int) -> None:
    world: Any = World(Scope(name="one", models=1, kills=1))
    world.apply(("ask",))
    if has_begun:
        world.apply(("moves", 0))
    world.apply(("kill", 0))
    state = world.scheduler.machine.devices[0].state
    assert [request.batching.deaths for request in state.requests.values()] == [deaths]
    assert [replica.model.deaths for replica in state.replicas.values()] == [deaths]
