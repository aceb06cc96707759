"""Contract of every scheduling policy, checked by direct calls and by a simulated server."""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random
from typing import Final

from ...ipc.messages.base import ModelName
from ...scheduler.policies import Order, Policy, Prediction, Resident, View, Waiting
from ...scheduler.policies.guard import settings_of
from ...scheduler.scheduler import Scheduler
from ...scheduler.state.core import SchedulerSettings
from .costs import Costs, Link
from .programs import program_of
from .world import World

MIB: Final = 1 << 20
ROUNDS: Final = 200
REQUESTS: Final = 200
FAR_MS: Final = 1e9  # longer than any wait
FENCE_COUNT: Final = 64


def check_policy(make: Callable[..., Policy], *, max_wait_ms: float = 2000.0) -> None:
    """See ``pipeswitch.testing.check_policy``."""
    policy = make(max_wait_ms=max_wait_ms)
    assert isinstance(policy, Policy), f"{policy!r} is no Policy"
    try:
        settings_of(policy)
    except ValueError as error:
        raise AssertionError(str(error)) from error
    chance = Random(0)
    for _ in range(ROUNDS):
        now_ms = chance.uniform(0.0, 10 * max_wait_ms)
        view = View(now_ms, _predict, 4.0 * MIB, lambda: (("m0", MIB),))
        _check_order(policy.order, _request(chance, now_ms), view, chance)
        _check_patience(policy.order, _request(chance, now_ms), chance)
        _check_window(policy.order, view, chance)
        _check_costs(policy, view, chance)
    _check_life(policy, max_wait_ms, chance)


def _request(chance: Random, now_ms: float) -> Waiting:
    is_resident = chance.random() < 0.5
    arrived_at_ms = chance.uniform(0.0, now_ms)
    return Waiting(
        token=chance.randrange(1 << 30),
        model=f"m{chance.randrange(4)}",
        priority=chance.randrange(3),
        deadline_at_ms=chance.choice((None, arrived_at_ms + chance.uniform(1.0, 1e4))),
        arrived_at_ms=arrived_at_ms,
        batch=chance.choice((1, 1, 8)),
        size_bytes=MIB,
        is_resident=is_resident,
        is_current=is_resident and chance.random() < 0.3,
    )


def _predict(model: str, batch: int) -> Prediction:
    return Prediction(float(len(model)), 2.0 * batch, 3.0 * batch)


def _check_numbers(values: object, what: str) -> tuple[float, ...]:
    assert type(values) is tuple, f"{what}: {values!r} is not a tuple of numbers"
    for value in values:
        assert isinstance(value, int | float), f"{what}: {value!r} is not a number"
        assert value == value, f"{what}: {value!r} cannot be compared"
    return values


def _check_order(order: Order, one: Waiting, view: View, chance: Random) -> None:
    asleep = one._replace(is_resident=False, is_current=False)
    key = _check_numbers(order.key(asleep), f"key of {asleep}")
    assert order.key(asleep) == key, f"key of {asleep} changes"
    rank = _check_numbers(order.rank(one, view), f"rank of {one}")
    assert order.rank(one, view) == rank, f"rank of {one} changes"
    until_ms = min(order.stays_until_ms(one, view), view.now_ms + FAR_MS)
    assert until_ms >= view.now_ms, f"rank of {one} stays until {until_ms}, before {view.now_ms}"
    overdue_at_ms = one.arrived_at_ms + order.aging_ms  # the request is ranked again then
    if overdue_at_ms > view.now_ms:
        until_ms = min(until_ms, overdue_at_ms)
    later_ms = view.now_ms + chance.random() * 0.99 * (until_ms - view.now_ms)
    later = order.rank(one, View(later_ms, _predict))
    assert later == rank, f"rank of {one} changes before {until_ms}"


def _check_patience(order: Order, old: Waiting, chance: Random) -> None:
    """Check that a new request cannot overtake a very old one."""
    now_ms = old.arrived_at_ms + FAR_MS
    view = View(now_ms, _predict)
    new = _request(chance, 1.0)._replace(arrived_at_ms=now_ms, deadline_at_ms=now_ms + 1.0)
    assert order.rank(old, view) < order.rank(new, view), f"{new} goes before {old} for ever"
    if not order.window:
        assert not order.may_backfill(new, old, view), f"{new} overtakes {old} for ever"


def _check_window(order: Order, view: View, chance: Random) -> None:
    if order.window:
        heads = [_request(chance, view.now_ms)._replace(model=f"m{i}") for i in range(4)]
        arranged = list(order.arrange(heads, [1, 2, 3, 4], view))
        assert sorted(arranged) == [0, 1, 2, 3], f"arrange gave {arranged} for four heads"


def _check_costs(policy: Policy, view: View, chance: Random) -> None:
    costs = []
    for waiting_count in (0, 3):
        last_used_at_ms = chance.uniform(0.0, view.now_ms)
        resident = Resident("m0", MIB, chance.randrange(3), last_used_at_ms, 2, waiting_count)
        cost = _check_numbers(policy.eviction.cost(resident, view), f"cost of {resident}")
        assert all(0 <= part < math.inf for part in cost), f"cost of {resident}: {cost}"
        costs.append(cost)
    assert len({len(cost) for cost in costs}) == 1, f"costs of different lengths: {costs}"


def _check_life(policy: Policy, max_wait_ms: float, chance: Random) -> None:
    """Check that every request to six models is answered, although only two fit on the device."""
    settings = SchedulerSettings(
        arena_bytes=12 * MIB,
        store_bytes=64 * MIB,
        fence_count=FENCE_COUNT,
        max_queue=2 * REQUESTS,
        max_queue_per_model=2 * REQUESTS,
    )
    scheduler = Scheduler(settings, policy, max_wait_ms)
    world = World(scheduler, costs=Costs(to_device=Link(bytes_per_ms=MIB)))
    for index in range(6):
        program = program_of(f"d{index}", 4 * MIB, groups=2, layer_ms=1.0 + index)
        world.clients.register(ModelName(f"m{index}"), program)
    world.run()
    for _ in range(REQUESTS):
        world.clients.infer(ModelName(f"m{chance.randrange(6)}"), priority=chance.randrange(3))
        world.run(world.now_ms + chance.choice((0.0, 1.0, 10.0)))
    world.run()
    assert scheduler.core.judge.policy is policy, "it failed, and was replaced"
    assert not world.clients.open, f"never answered: {sorted(world.clients.open)}"
    assert world.clients.outcomes["ok"] >= REQUESTS, world.clients.outcomes
