"""Policies: which request runs first, and which model is evicted."""

from __future__ import annotations

import itertools
import math
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeswitch.base.config import POLICIES, parse
from pipeswitch.base.errors import ConfigError
from pipeswitch.extras.lab.costs import Costs, Link
from pipeswitch.extras.lab.programs import program_of
from pipeswitch.extras.lab.world import World
from pipeswitch.policies import find_policy
from pipeswitch.scheduler.policies import (
    MAKERS,
    Eviction,
    Order,
    Policy,
    Prediction,
    Priority,
    Resident,
    View,
    Waiting,
    make_policy,
)
from pipeswitch.scheduler.policies.guard import PolicyGuard
from pipeswitch.scheduler.scheduler import Scheduler
from pipeswitch.scheduler.state import events as ev
from pipeswitch.scheduler.state.core import SchedulerSettings
from pipeswitch.scheduler.state.predictions import KEPT_BATCHES, Predictions
from pipeswitch.testing import check_policy

MIB = 1 << 20

PRIORITY = Priority(max_wait_ms=2000.0)
FIFO = make_policy("fifo", max_wait_ms=2000.0)
BOTH = (make_policy("priority", max_wait_ms=2000.0), FIFO)


def waiting(
    *,
    priority: int = 1,
    arrived_at_ms: float = 0.0,
    deadline_at_ms: float | None = None,
    is_resident: bool = False,
    is_current: bool = False,
) -> Waiting:
    return Waiting(
        token=1,
        model="m",
        priority=priority,
        deadline_at_ms=deadline_at_ms,
        arrived_at_ms=arrived_at_ms,
        is_resident=is_resident,
        is_current=is_current,
    )


def resident(
    *,
    size_bytes: int = 1 << 20,
    last_used_at_ms: float = 0.0,
    waiting_count: int = 0,
    priority: int = 1,
) -> Resident:
    return Resident(
        model="m",
        size_bytes=size_bytes,
        priority=priority,
        last_used_at_ms=last_used_at_ms,
        use_count=1,
        waiting_count=waiting_count,
    )


def test_a_higher_class_goes_first() -> None:
    high, low = waiting(priority=0, arrived_at_ms=9.0), waiting(priority=2, is_current=True)
    assert PRIORITY.rank(high, View(10.0)) < PRIORITY.rank(low, View(10.0))


def test_inside_a_class_a_resident_model_goes_before_a_cold_one_whether_it_computes_or_not() -> (
    None
):
    current = waiting(arrived_at_ms=3.0, is_resident=True, is_current=True)
    warm, cold = waiting(arrived_at_ms=2.0, is_resident=True), waiting(arrived_at_ms=1.0)
    ranked = sorted((cold, warm, current), key=lambda one: PRIORITY.rank(one, View(10.0)))
    assert ranked == [warm, current, cold]


def test_the_earlier_deadline_goes_first() -> None:
    early, late = waiting(deadline_at_ms=50.0, arrived_at_ms=5.0), waiting(deadline_at_ms=90.0)
    assert PRIORITY.rank(early, View(10.0)) < PRIORITY.rank(late, View(10.0))
    assert PRIORITY.rank(late, View(10.0)) < PRIORITY.rank(waiting(), View(10.0))


def test_who_waited_too_long_goes_before_any_reuse() -> None:
    old, fresh = waiting(priority=1), waiting(priority=0, arrived_at_ms=2400.0, is_current=True)
    assert PRIORITY.rank(old, View(2500.0)) < PRIORITY.rank(fresh, View(2500.0))


def test_of_those_who_waited_too_long_the_oldest_goes_first() -> None:
    oldest = waiting()
    with_deadline = waiting(arrived_at_ms=1.0, deadline_at_ms=9000.0, is_current=True)
    assert PRIORITY.rank(oldest, View(2500.0)) < PRIORITY.rank(with_deadline, View(2500.0))


@given(priority=st.integers(0, 2), fresh=st.integers(0, 2))
def test_nobody_starves(priority: int, fresh: int) -> None:
    """After three aging times, a request of the lowest priority is ahead of any new request."""
    now_ms = 4 * PRIORITY.aging_ms
    newcomer = waiting(priority=fresh, arrived_at_ms=now_ms, is_current=True, is_resident=True)
    assert PRIORITY.rank(waiting(priority=priority), View(now_ms)) < PRIORITY.rank(
        newcomer, View(now_ms)
    )


def test_a_lower_class_never_overtakes_one_that_waits_for_memory() -> None:
    assert not PRIORITY.may_backfill(waiting(priority=2), waiting(priority=0), View(1.0))
    assert PRIORITY.may_backfill(waiting(priority=1), waiting(priority=1), View(1.0))


def test_nobody_overtakes_one_that_waited_too_long() -> None:
    blocked = waiting(priority=1)
    assert not PRIORITY.may_backfill(
        waiting(priority=0, arrived_at_ms=1999.0), blocked, View(2000.0)
    )


def test_the_model_idle_for_longest_is_the_cheapest_to_evict() -> None:
    for policy in BOTH:
        old = policy.eviction.cost(resident(last_used_at_ms=0.0), View(1000.0))
        assert old < policy.eviction.cost(resident(last_used_at_ms=900.0), View(1000.0))


def test_a_model_somebody_waits_for_costs_more() -> None:
    for policy in BOTH:
        cost = policy.eviction.cost(resident(waiting_count=1), View(1000.0))
        assert cost > policy.eviction.cost(resident(), View(1000.0))


def test_fifo_keeps_the_order_of_arrival_strictly() -> None:
    first, second = waiting(priority=2), waiting(priority=0, arrived_at_ms=1.0, is_current=True)
    assert FIFO.order.rank(first, View(9.0)) < FIFO.order.rank(second, View(9.0))
    assert not FIFO.order.may_backfill(second, first, View(9.0))


def test_an_unknown_policy_is_named_with_those_there_are() -> None:
    for name in MAKERS:
        assert make_policy(name, max_wait_ms=1.0).name == name
    with pytest.raises(KeyError, match=", ".join(POLICIES)):
        make_policy("best", max_wait_ms=1.0)
    assert tuple(MAKERS) == POLICIES, "[scheduler] policy takes others than there are"


@pytest.mark.parametrize("name", MAKERS)
def test_each_policy_keeps_the_contract(name: str) -> None:
    check_policy(MAKERS[name])


def ranked(name: str, *requests: Waiting, at_ms: float = 10.0) -> list[int]:
    order = make_policy(name, max_wait_ms=2000.0).order
    view = View(at_ms, predict)
    return [one.token for one in sorted(requests, key=lambda one: order.rank(one, view))]


def predict(model: str, batch: int) -> Prediction:
    load_ms, compute_ms = {"short": (5.0, 1.0), "long": (5.0, 20.0), "far": (50.0, 1.0)}[model]
    return Prediction(load_ms, compute_ms, compute_ms)


def named(token: int, model: str, **values: Any) -> Waiting:
    return waiting(**values)._replace(token=token, model=model)


def test_edf_takes_the_earliest_deadline_and_gives_one_to_those_without() -> None:
    late = named(1, "a", deadline_at_ms=19_999.0)
    none = named(2, "a")  # due 20 s after its arrival
    very_late = named(3, "a", deadline_at_ms=1e9, arrived_at_ms=1.0)
    soon = named(4, "a", deadline_at_ms=50.0, arrived_at_ms=9.0)
    assert ranked("edf", very_late, none, late, soon) == [4, 1, 2, 3]


@pytest.mark.parametrize("unit_ms", [1.0, 1e3, 60e3, 3.6e6, 86.4e6, 1e12])
def test_edf_orders_deadlines_at_any_distance(unit_ms: float) -> None:
    """The later request arrived first, in each unit from milliseconds to years."""
    far = named(1, "a", deadline_at_ms=9.0 + 3 * unit_ms, arrived_at_ms=1.0)
    near = named(2, "a", deadline_at_ms=9.0 + 2 * unit_ms, arrived_at_ms=8.0)
    assert ranked("edf", far, near) == [2, 1]


def test_sjf_counts_the_copy_of_a_model_that_is_not_there() -> None:
    short, long = named(1, "short"), named(2, "long", is_resident=True)
    far, near = named(3, "far"), named(4, "far", is_resident=True)
    assert ranked("sjf", far, long, short, near) == [4, 1, 2, 3]
    assert ranked("sjf", far, short, at_ms=1999.0) == [1, 3]
    assert ranked("sjf", far._replace(arrived_at_ms=-1.0), short, at_ms=1999.0) == [3, 1]


def test_collate_goes_on_with_a_model_until_one_has_waited_too_long() -> None:
    current = named(1, "a", arrived_at_ms=5.0, is_resident=True, is_current=True)
    warm, cold = named(2, "b", arrived_at_ms=4.0, is_resident=True), named(3, "c")
    assert ranked("collate", cold, warm, current) == [1, 2, 3]
    assert ranked("collate", cold, warm, current, at_ms=2000.0) == [3, 1, 2]


def test_a_window_is_put_in_the_order_that_the_thesis_gives_it() -> None:
    """The thesis's example has loads of 120, 125, 125 and 62.5 ms, and computations of 500, 400,
    560 and 482.5 ms."""
    times = {"A": (120.0, 500.0), "B": (125.0, 400.0), "C": (125.0, 560.0), "D": (62.5, 482.5)}

    def known(model: str, batch: int) -> Prediction:
        load_ms, compute_ms = times[model]
        return Prediction(load_ms, compute_ms, compute_ms)

    heads = [named(index, model) for index, model in enumerate(times)]
    order = make_policy("alternating", max_wait_ms=2000.0).order
    arranged = order.arrange(heads, [1, 1, 1, 1], View(0.0, known))
    assert "".join("ABCD"[index] for index in arranged) == "DBCA"


class Fails(Order):
    """Order whose method ``where`` fails after some calls."""

    window = 3

    def __init__(self, where: str, after: int, how: Any) -> None:
        self.where, self.left, self.how = where, after, how

    def _answer(self, where: str, answer: Any) -> Any:
        self.left -= where == self.where
        if where == self.where and self.left < 0:
            if isinstance(self.how, BaseException):
                raise self.how
            return self.how
        return answer

    def key(self, request: Waiting) -> tuple[float, ...]:
        value: tuple[float, ...] = self._answer("key", super().key(request))
        return value

    def rank(self, head: Waiting, view: View) -> tuple[float, ...]:
        value: tuple[float, ...] = self._answer("rank", super().rank(head, view))
        return value

    def stays_until_ms(self, head: Waiting, view: View) -> float:
        value: float = self._answer("stays_until_ms", super().stays_until_ms(head, view))
        return value

    def may_backfill(self, request: Waiting, blocked: Waiting, view: View) -> bool:
        value: bool = self._answer("may_backfill", True)
        return value

    def arrange(self, heads: Any, counts: Any, view: View) -> Any:
        return self._answer("arrange", super().arrange(heads, counts, view))


class CostFails(Eviction):
    def cost(self, resident: Resident, view: View) -> tuple[float, ...]:
        raise KeyError(resident.model)


class CostIsHuge(Eviction):
    def cost(self, resident: Resident, view: View) -> tuple[float, ...]:
        return (10**400,)  # a sum with a float raises OverflowError


class CostIsNegative(Eviction):
    def cost(self, resident: Resident, view: View) -> tuple[float, ...]:
        return (0.0, -1.0)


class Heard(World):
    """Simulated server that collects warnings and topics for the operator."""

    def __init__(self, policy: Policy, arena_mib: int) -> None:
        self.warnings: list[str] = []
        self.topics: list[str] = []
        settings = SchedulerSettings(
            arena_bytes=arena_mib * MIB, store_bytes=64 * MIB, fence_count=64
        )
        super().__init__(Scheduler(settings, policy), costs=Costs(to_device=Link(fixed_ms=1.0)))

    def perform(self, commands: list[ev.Command]) -> None:
        super().perform(commands)
        self.warnings += [one.text for one in commands if isinstance(one, ev.LogWarning)]
        self.topics += [one.topic for one in commands if isinstance(one, ev.Publish)]


def live(policy: Policy, arena_mib: int = 12) -> Heard:
    """Run sixty requests for six models; by default two models fit the arena."""
    world = Heard(policy, arena_mib)
    for index in range(6):
        world.clients.register(f"m{index}", program_of(f"d{index}", 4 * MIB, layer_ms=1.0))  # type: ignore[arg-type]
    world.run()
    for index in range(60):
        world.clients.infer(f"m{index * 5 % 6}", priority=index % 3)  # type: ignore[arg-type]
        if index % 7 == 0:
            world.run(world.now_ms + 3.0)
    world.run()
    return world


def raises(*_: object) -> Any:
    raise KeyboardInterrupt


def odd(kind: type, *methods: str) -> type:
    """Return a subclass of ``kind`` in which these methods raise."""
    return type("Odd", (kind,), dict.fromkeys(methods, raises))


USED = ["lt", "le", "gt", "ge", "eq", "ne", "add", "radd", "hash", "bool", "repr", "str"]
OfMine, WholeOfMine = (odd(kind, *(f"__{name}__" for name in USED)) for kind in (float, int))


HOW = [
    ValueError("no"),
    SystemExit(3),
    (math.nan,),
    "text",
    [3, 3, 3],
    KeyboardInterrupt(),
    GeneratorExit(),
    odd(Exception, "__str__", "__repr__")(),
    (odd(float, "__float__")(1.0),),
    (10**400,),
    Waiting,
]


@pytest.mark.parametrize("how", HOW, ids=lambda how: type(how).__name__)
@pytest.mark.parametrize("after", [0, 3])
@pytest.mark.parametrize("where", ["key", "rank", "stays_until_ms", "arrange"])
def test_a_policy_that_fails_is_replaced_once_and_nothing_is_lost(
    where: str, after: int, how: Any
) -> None:
    world = live(Policy("mine", Fails(where, after, how), Eviction()))
    assert world.scheduler.core.judge.name == "priority"
    (warning,) = world.warnings
    assert warning.startswith(f'policy "mine" failed and is replaced by "priority": {where} raised')
    assert world.topics.count("queue.policy_failed") == 1
    assert world.clients.outcomes["ok"] == 66  # 60 requests and 6 registrations
    assert not world.clients.open


class OddCost(Eviction):
    def cost(self, resident: Resident, view: View) -> tuple[float, ...]:
        return (OfMine(1.0), WholeOfMine(2), True)


def test_numbers_of_a_policys_own_classes_are_compared_as_plain_ones() -> None:
    numbers, one = (OfMine(1.0), WholeOfMine(2), True), waiting()
    judges = {
        where: PolicyGuard(Policy("mine", Fails(where, 0, how), OddCost()), 3.0)
        for where, how in (
            ("key", numbers),
            ("rank", numbers),
            ("stays_until_ms", OfMine(7.0)),
            ("arrange", iter([WholeOfMine(0)])),
        )
    }
    view = View(0.0)
    plain_numbers = (
        *judges["key"].key(one),
        *judges["rank"].rank(one, view),
        *judges["key"].cost(resident(), view),
        judges["stays_until_ms"].stays_until_ms(one, view),
        *judges["arrange"].arrange([one], [1], view),
    )
    assert plain_numbers == (1.0, 2, 1) * 3 + (7.0, 0)
    assert {type(number) for number in plain_numbers} == {float, int}
    assert {judge.name for judge in judges.values()} == {"mine"}


def test_an_arrangement_without_end_is_none() -> None:
    judge = PolicyGuard(Policy("mine", Fails("arrange", 0, itertools.count()), Eviction()), 3.0)
    assert judge.arrange([waiting(), waiting()], [1, 1], View(0.0)) == [0, 1]
    assert judge.name == "priority"


def test_a_policy_that_fails_when_memory_is_short_is_replaced_too() -> None:
    for policy in (
        Policy("mine", Order(), CostFails()),
        Policy("mine", Order(), CostIsHuge()),
        Policy("mine", Order(), CostIsNegative()),
        Policy("mine", Fails("may_backfill", 0, ValueError("no")), Eviction()),
    ):
        world = live(policy, arena_mib=8)  # one model fits the arena
        assert world.scheduler.core.judge.name == "priority"
        assert len(world.warnings) == 1
        assert world.clients.outcomes["ok"] == 66


def test_an_order_of_places_that_are_no_whole_numbers_is_none() -> None:
    judge = PolicyGuard(Policy("mine", Fails("arrange", 0, [1.0, 0.0]), Eviction()), 3.0)
    assert judge.arrange([waiting(), waiting()], [1, 1], View(0.0)) == [0, 1]
    assert judge.name == "priority"


def test_the_contract_finds_what_is_wrong() -> None:
    class Starves(Order):
        def rank(self, head: Waiting, view: View) -> tuple[float, ...]:
            return (-head.arrived_at_ms,)

    class Drifts(Order):
        def rank(self, head: Waiting, view: View) -> tuple[float, ...]:
            return (head.arrived_at_ms - view.now_ms,)

    for order, text in (
        (Starves(), "goes before"),
        (Drifts(), "changes before"),
        (Fails("arrange", 0, [0, 0]), "arrange gave"),
        (Fails("rank", 0, (math.nan,)), "rank of"),
    ):
        with pytest.raises(AssertionError, match=text):
            check_policy(lambda max_wait_ms, order=order: Policy("mine", order, Eviction()))


def test_predictions_are_of_the_last_runs_of_that_batch() -> None:
    known = Predictions()
    assert known.predict("m", 1) == (0.0, 0.0, 0.0)
    for took_ms in range(1, 101):
        known.computed("m", 4, float(took_ms), 0.0)
    known.sent("m", 7.0, 0.0)
    assert known.predict("m", 4) == (7.0, 68.0, 97.0)  # from the last 64 values, 37 to 100
    assert known.predict("m", 8) == known.predict("m", 4)  # from the largest measured batch
    assert known.predict("m", 1) == (7.0, 0.0, 0.0)
    assert known.safe("m", 8) == (7.0, 96.0, 68.5)
    known.remove("m")
    assert known.predict("m", 4) == (0.0, 0.0, 0.0)


def test_many_batches_cost_neither_memory_nor_time() -> None:
    known = Predictions()
    tracemalloc.start()
    for batch in range(1, 20_001):
        known.computed("m", 1, 1.0, 0.0)
        known.computed("m", batch, float(batch), 0.0)
    held_bytes = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert held_bytes < 1 << 20  # 19 MiB if all batch sizes were kept
    entries = KEPT_BATCHES - 1  # one entry is batch 1, which is measured again and again
    assert known.safe("m", 1 << 23).compute_ms == 20_000.0
    assert known.safe("m", 20_001 - entries).compute_ms == 20_001.0 - entries
    assert known.safe("m", 20_000 - entries).compute_ms == 1.0  # from the nearest smaller batch


@pytest.mark.parametrize(
    "setting",
    [
        ("window", 2.5),
        ("window", "8"),
        ("window", -1),
        ("window", True),
        ("aging_ms", "soon"),
        ("aging_ms", math.nan),
        ("aging_ms", None),
        ("aging_ms", -1.0),
    ],
)
def test_a_window_or_patience_that_cannot_be_used_is_refused_at_the_start(
    setting: tuple[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, value = setting
    odd = Policy("odd", type("Odd", (Order,), {name: value})(), Eviction())
    monkeypatch.setitem(MAKERS, "odd", lambda max_wait_ms: odd)
    with pytest.raises(ConfigError, match=f"{name} is {value!r}"):
        find_policy("odd", max_wait_ms=3.0)
    with pytest.raises(AssertionError, match=f"{name} is {value!r}"):
        check_policy(MAKERS["odd"])
    with pytest.raises(ValueError, match=f"{name} is {value!r}"):
        PolicyGuard(odd, 3.0)


def test_what_the_scheduler_hears_is_what_a_policy_may_predict_from() -> None:
    world = live(make_policy("fifo", max_wait_ms=2000.0))
    predict = world.scheduler.machine.devices[0].state.predictions.predict
    assert predict("m0", 1) == (2.0, 4.0, 4.0)  # copies of two groups; computation of four layers


def test_the_owners_own_policy_is_found_by_module_and_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "of_mine.py").write_text(
        "from pipeswitch.scheduler.policies import Eviction, Order, Policy\n"
        "def make(*, max_wait_ms):\n"
        "    return Policy(f'mine {max_wait_ms}', Order(), Eviction())\n"
        "def nothing(*, max_wait_ms):\n"
        "    return Order()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert find_policy("of_mine:make", max_wait_ms=3.0).name == "mine 3.0"
    assert find_policy("edf", max_wait_ms=3.0).name == "edf"
    for name, why in (
        ("of_mine:other", "no attribute 'other'"),
        ("no_such:make", "No module named 'no_such'"),
        ("of_mine:nothing", "returned a Order, not a Policy"),
    ):
        with pytest.raises(ConfigError, match=why):
            find_policy(name, max_wait_ms=3.0)


def test_an_installed_policy_is_found_by_its_entry_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "theirs-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1\n")
    (info / "entry_points.txt").write_text(
        "[pipeswitch.policies]\ntheirs = pipeswitch.scheduler.policies:make_fair\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert parse({"scheduler": {"policy": "theirs"}}).scheduler.policy == "theirs"
    with pytest.raises(ConfigError, match="make_fair"):  # the entry point names no function
        find_policy("theirs", max_wait_ms=3.0)
    with pytest.raises(ConfigError, match=f"{POLICIES[-1]}, theirs"):
        parse({"scheduler": {"policy": "their"}})
