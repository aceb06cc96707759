"""What the policies put first, and what they let go."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeswitch.scheduler.policies import Fifo, Priority, Resident, Waiting, make_policy

PRIORITY = Priority(max_wait_ms=2000.0)


def waiting(
    *,
    priority: int = 1,
    arrived_at_ms: float = 0.0,
    deadline_at_ms: float | None = None,
    is_resident: bool = False,
    is_current: bool = False,
) -> Waiting:
    return Waiting(
        token=1, model="m", priority=priority, deadline_at_ms=deadline_at_ms,
        arrived_at_ms=arrived_at_ms, is_resident=is_resident, is_current=is_current,
    )  # fmt: skip


def resident(*, size_bytes: int = 1 << 20, last_used_at_ms: float = 0.0, waiting_count: int = 0,
             priority: int = 1) -> Resident:  # fmt: skip
    return Resident(
        model="m", size_bytes=size_bytes, priority=priority, last_used_at_ms=last_used_at_ms,
        use_count=1, waiting_count=waiting_count,
    )  # fmt: skip


def test_a_higher_class_goes_first() -> None:
    high, low = waiting(priority=0, arrived_at_ms=9.0), waiting(priority=2, is_current=True)
    assert PRIORITY.rank(high, 10.0) < PRIORITY.rank(low, 10.0)


def test_inside_a_class_the_computing_model_goes_before_a_resident_before_a_cold_one() -> None:
    current = waiting(arrived_at_ms=3.0, is_resident=True, is_current=True)
    warm, cold = waiting(arrived_at_ms=2.0, is_resident=True), waiting(arrived_at_ms=1.0)
    ranked = sorted((cold, warm, current), key=lambda one: PRIORITY.rank(one, 10.0))
    assert ranked == [current, warm, cold]


def test_the_earlier_deadline_goes_first() -> None:
    early, late = waiting(deadline_at_ms=50.0, arrived_at_ms=5.0), waiting(deadline_at_ms=90.0)
    assert PRIORITY.rank(early, 10.0) < PRIORITY.rank(late, 10.0)
    assert PRIORITY.rank(late, 10.0) < PRIORITY.rank(waiting(), 10.0)


def test_who_waited_too_long_goes_before_any_reuse() -> None:
    old, fresh = waiting(priority=1), waiting(priority=0, arrived_at_ms=2400.0, is_current=True)
    assert PRIORITY.rank(old, 2500.0) < PRIORITY.rank(fresh, 2500.0)


def test_of_those_who_waited_too_long_the_oldest_goes_first() -> None:
    oldest = waiting()
    with_deadline = waiting(arrived_at_ms=1.0, deadline_at_ms=9000.0, is_current=True)
    assert PRIORITY.rank(oldest, 2500.0) < PRIORITY.rank(with_deadline, 2500.0)


@given(priority=st.integers(0, 2), fresh=st.integers(0, 2))
def test_nobody_starves(priority: int, fresh: int) -> None:
    """After three waits the lowest class is ahead of whatever arrives then."""
    now_ms = 4 * PRIORITY.patience_ms
    newcomer = waiting(priority=fresh, arrived_at_ms=now_ms, is_current=True, is_resident=True)
    assert PRIORITY.rank(waiting(priority=priority), now_ms) < PRIORITY.rank(newcomer, now_ms)


def test_a_lower_class_never_overtakes_one_that_waits_for_memory() -> None:
    assert not PRIORITY.may_overtake(waiting(priority=2), waiting(priority=0), 1.0)
    assert PRIORITY.may_overtake(waiting(priority=1), waiting(priority=1), 1.0)


def test_nobody_overtakes_one_that_waited_too_long() -> None:
    blocked = waiting(priority=1)
    assert not PRIORITY.may_overtake(waiting(priority=0, arrived_at_ms=1999.0), blocked, 2000.0)


def test_the_model_idle_for_longest_is_the_cheapest_to_evict() -> None:
    for policy in (PRIORITY, Fifo()):
        old = policy.eviction_cost(resident(last_used_at_ms=0.0), 1000.0)
        assert old < policy.eviction_cost(resident(last_used_at_ms=900.0), 1000.0)


def test_a_model_somebody_waits_for_costs_more() -> None:
    for policy in (PRIORITY, Fifo()):
        wanted = policy.eviction_cost(resident(waiting_count=1), 1000.0)
        assert wanted > policy.eviction_cost(resident(), 1000.0)


def test_fifo_keeps_the_order_of_arrival_strictly() -> None:
    first, second = waiting(priority=2), waiting(priority=0, arrived_at_ms=1.0, is_current=True)
    assert Fifo().rank(first, 9.0) < Fifo().rank(second, 9.0)
    assert not Fifo().may_overtake(second, first, 9.0)


def test_an_unknown_policy_is_named_with_those_there_are() -> None:
    assert make_policy("fifo", max_wait_ms=1.0).name == "fifo"
    assert make_policy("priority", max_wait_ms=1.0).name == "priority"
    with pytest.raises(KeyError, match="fifo, priority"):
        make_policy("best", max_wait_ms=1.0)
