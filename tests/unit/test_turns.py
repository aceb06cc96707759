"""Turns: each caller gets its share of device time; a policy orders only one caller's requests."""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from functools import partial
from itertools import combinations, pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeswitch.extras.lab.costs import Costs, Link, Training
from pipeswitch.extras.lab.programs import program_of
from pipeswitch.extras.lab.world import World
from pipeswitch.ipc.messages.base import JobName, ModelName
from pipeswitch.programs.interface.layout import Batching
from pipeswitch.scheduler.policies import MAKERS
from pipeswitch.scheduler.scheduler import Scheduler
from pipeswitch.scheduler.state import events as ev
from pipeswitch.scheduler.state import fair_queue
from pipeswitch.scheduler.state.core import SchedulerSettings

MIB = 1 << 20
RUN_MS = 2.0
LOAD_MS = 40.0
MAX_WAIT_MS = 100.0
OPEN = 100  # requests of a greedy caller, some of which wait longer than MAX_WAIT_MS
MODELS = {"a": RUN_MS, "b": RUN_MS, "long": 5 * fair_queue.LONG_MS, "batched": RUN_MS}


class Server(World):
    """The real scheduler with measured models, and clients that always send the next request."""

    think_ms = 0.1  # time between an answer and the client's next request

    def __init__(self, policy: str = "priority", arena_mib: int = 64, **values: Any) -> None:
        self.loops: dict[str, dict[str, Any]] = {}  # client -> options of its requests
        self.of: dict[ev.Token, tuple[str, float]] = {}  # request -> client, time of sending
        self.answers: list[str] = []  # client of each answer, in order
        self.took_ms: dict[str, list[float]] = {}
        chosen = SchedulerSettings(
            arena_bytes=arena_mib * MIB, store_bytes=64 * MIB, fence_count=64, **values
        )
        costs = Costs(to_device=Link(bytes_per_ms=4 * MIB / LOAD_MS))
        super().__init__(Scheduler(chosen, policy, MAX_WAIT_MS), costs=costs, is_checked=False)
        for name, run_ms in MODELS.items():
            joins = Batching(limit=4, delay_ms=0.0, is_exact=True) if name == "batched" else None
            program = program_of(name, 4 * MIB, layer_ms=run_ms / 4, batching=joins)
            self.clients.register(ModelName(name), program)
            self.run()
            self.clients.infer(ModelName(name))
            self.run()
        self.pass_ms(2 * MAX_WAIT_MS)

    def loop(self, client: str, model: str, count: int = 1, **options: Any) -> None:
        """Start a client that always has ``count`` open requests."""
        self.loops[client] = {"model": ModelName(model), "caller": client, **options}
        for _ in range(count):
            self.ask(client)

    def ask(self, client: str) -> None:
        self.of[ev.Token(self.clients.last_token + 1)] = (client, self.now_ms)
        self.clients.infer(**self.loops[client])

    def perform(self, commands: list[ev.Command]) -> None:
        super().perform(commands)
        for command in commands:
            if isinstance(command, ev.Reply) and command.token in self.of:
                client, asked_at_ms = self.of.pop(command.token)
                self.answers.append(client)
                self.took_ms.setdefault(client, []).append(self.now_ms - asked_at_ms)
                self.clock.at(self.now_ms + self.think_ms, partial(self.ask, client))

    def pass_ms(self, ms: float) -> dict[str, float]:
        """Run for ``ms``; return the device time in ms that each caller has got meanwhile."""
        accounts = self.scheduler.machine.devices[0].state.accounts
        before = {one.caller: one.used_ms for one in accounts}
        self.run(self.now_ms + ms)
        return {one.caller: one.used_ms - before.get(one.caller, 0.0) for one in accounts}


@pytest.mark.parametrize("model", ["a", "b"])
@pytest.mark.parametrize("policy", MAKERS)
def test_a_modest_caller_waits_for_one_run_and_its_own_however_many_wait(
    policy: str, model: str
) -> None:
    server = Server(policy)
    server.loop("greedy", "a", OPEN)
    server.pass_ms(2 * MAX_WAIT_MS)
    server.answers.clear()
    server.loop("modest", model)
    used_ms = server.pass_ms(2 * MAX_WAIT_MS)
    first_ms, *took_ms = server.took_ms["modest"]
    assert first_ms <= 3 * RUN_MS  # two runs of the greedy caller were already dispatched
    assert max(took_ms) <= 2 * RUN_MS
    own = [place for place, client in enumerate(server.answers) if client == "modest"]
    assert max(second - first for first, second in pairwise(own)) == 2
    assert sum(used_ms.values()) >= 2 * MAX_WAIT_MS - 2 * RUN_MS  # the device is never idle


@given(
    weights=st.lists(st.sampled_from((0.5, 1.0, 3.0)), min_size=2, max_size=4),
    runs_ms=st.lists(st.floats(0.5, 20.0), min_size=30, max_size=60),
    error=st.floats(0.0, 1.0),
)
def test_while_two_wait_neither_has_more_than_a_run_before_the_other(
    weights: list[float], runs_ms: list[float], error: float
) -> None:
    """Add a caller after every five runs, and predict run times wrongly by the factor ``error``."""
    accounts = fair_queue.CallerQueue({str(n): weight for n, weight in enumerate(weights)}, 1e9)
    leads: dict[tuple[fair_queue.CallerShare, fair_queue.CallerShare], list[float]] = {}
    had: defaultdict[fair_queue.CallerShare, float] = defaultdict(float)
    now_ms = 0.0
    for number, run_ms in enumerate(runs_ms):
        if number % 5 == 0 and number // 5 < len(weights):
            accounts.count(accounts.of(str(number // 5)), 1, 1)  # it always has a waiting request
        ((first, *_),) = accounts.in_rounds(lambda _: 0.0, now_ms)
        charge = accounts.charge(Counter({first.caller: 1}), run_ms * error, now_ms)
        now_ms += run_ms
        accounts.reconcile_cost(charge, run_ms, now_ms)
        had[first] += run_ms / first.weight
        for one, other in combinations(accounts, 2):
            leads.setdefault((one, other), []).append(had[one] - had[other])
    for (one, other), known in leads.items():
        assert max(known) - min(known) <= 20.0 / one.weight + 20.0 / other.weight + 1e-6


def test_of_priorities_the_lower_has_a_turn_when_it_had_none_for_max_wait() -> None:
    server = Server()
    server.loop("high", "a", OPEN, priority=0)
    server.loop("normal", "b", OPEN, priority=1)
    used_ms = server.pass_ms(1000.0)
    assert used_ms["normal"] == pytest.approx(1000.0 / MAX_WAIT_MS * RUN_MS, abs=RUN_MS)
    # A caller's turn depends on its most urgent request, even if its older request runs first.
    server.loop("idle work", "b", 2, priority=2, caller="modest")
    server.pass_ms(2 * MAX_WAIT_MS)
    server.loop("modest", "b", priority=0)
    server.pass_ms(MAX_WAIT_MS)
    assert max(server.took_ms["modest"]) <= 3 * 2 * RUN_MS + RUN_MS


def test_a_joined_run_takes_a_row_of_each_caller_before_a_second_of_one() -> None:
    server = Server()
    server.loop("greedy", "batched", OPEN)
    server.pass_ms(2 * MAX_WAIT_MS)
    server.loop("modest", "batched", 2)
    used_ms = server.pass_ms(400 * RUN_MS)
    assert max(server.took_ms["modest"]) <= 3 * 4 * RUN_MS  # four rows take four times as long
    assert used_ms["modest"] == RUN_MS * len(server.took_ms["modest"])  # only its own rows count


@pytest.mark.parametrize("policy", ["fifo", "edf"])
def test_admission_refuses_nobody_for_what_another_caller_waits_with(policy: str) -> None:
    server = Server(policy, admission="deadline")
    for _ in range(OPEN):
        server.clients.infer(ModelName("a"), caller="greedy", deadline_ms=OPEN * RUN_MS + 1.0)
    refused = Counter(server.clients.outcomes)
    for wanted_ms in (4 * RUN_MS, 5 * RUN_MS):  # the caller gets every second turn
        server.clients.infer(ModelName("b"), caller="modest", deadline_ms=wanted_ms)
    assert server.clients.outcomes == refused
    server.clients.infer(ModelName("b"), caller="modest", deadline_ms=2 * RUN_MS)
    assert server.clients.outcomes - refused == {"DeadlineExceeded": 1}
    server.pass_ms(5 * RUN_MS)
    assert server.clients.outcomes["DeadlineExceeded"] == 1


SORTING = ("fifo", "edf")  # policies that sort all requests of a caller
TAKING_TURNS = [name for name in MAKERS if name not in SORTING]


@pytest.mark.parametrize("model", ["a", "b"])
@pytest.mark.parametrize("policy", TAKING_TURNS)
def test_connections_of_one_caller_take_turns(policy: str, model: str) -> None:
    server = Server(policy)
    server.loop("greedy", "a", OPEN, caller="", connection="1")
    server.pass_ms(2 * MAX_WAIT_MS)
    server.answers.clear()
    server.loop("modest", model, caller="", connection="2")
    used_ms = server.pass_ms(2 * MAX_WAIT_MS)
    assert max(server.took_ms["modest"]) <= 3 * RUN_MS  # two runs were already dispatched
    assert server.answers.count("modest") >= 2 * MAX_WAIT_MS / (3 * RUN_MS) - 1
    assert used_ms[""] >= 2 * MAX_WAIT_MS - 2 * RUN_MS  # the device is never idle


@pytest.mark.parametrize("policy", SORTING)
def test_a_policy_that_sorts_all_requests_sorts_those_of_all_connections(policy: str) -> None:
    server = Server(policy)
    server.loop("first", "a", OPEN, caller="", connection="1", deadline_ms=1e5)
    server.loop("second", "b", caller="", connection="2", deadline_ms=1e5)
    server.pass_ms((OPEN - 1) * RUN_MS)
    assert "second" not in server.answers
    server.pass_ms(2 * RUN_MS)
    assert "second" in server.answers


def test_turns_by_connection_are_below_the_turns_by_caller() -> None:
    """A caller with many connections gets no more device time than one with a single connection."""
    server = Server()
    for number in range(9):
        server.loop(f"many {number}", "a", 10, caller="many", connection=str(number))
    server.loop("one", "b", OPEN, caller="one", connection="0")
    used_ms = server.pass_ms(20 * MAX_WAIT_MS)
    assert used_ms["one"] == pytest.approx(10 * MAX_WAIT_MS, abs=4 * RUN_MS)
    own = [server.answers.count(f"many {number}") for number in range(9)]
    assert max(own) - min(own) <= 3  # the first requests ran before the other clients began


def test_a_connection_that_asks_one_at_a_time_has_as_many_turns_as_others() -> None:
    server = Server()
    for number in range(8):
        server.loop(f"backlog {number}", "a", 5, caller="", connection=str(number))
    server.loop("quick", "a", caller="", connection="quick")
    server.pass_ms(20 * MAX_WAIT_MS)
    counts = Counter(server.answers)
    assert max(counts.values()) - min(counts.values()) <= 3
    assert counts["quick"] < 20 * MAX_WAIT_MS / RUN_MS / 9


def test_a_connection_with_a_lower_priority_has_a_turn_when_it_had_none_for_max_wait() -> None:
    server = Server()
    server.loop("high", "a", OPEN, caller="", connection="1", priority=0)
    server.loop("low", "b", OPEN, caller="", connection="2", priority=2)
    server.pass_ms(20 * MAX_WAIT_MS)
    low = server.answers.count("low")
    assert 20 / 2 - 2 <= low <= 20 / 2 + 2  # priority 2 waits for two MAX_WAIT_MS behind 0


def test_connections_whose_models_do_not_fit_together_do_not_switch_for_each_request() -> None:
    server = Server(arena_mib=7)
    server.loop("one", "a", OPEN, caller="", connection="1")
    server.loop("two", "b", OPEN, caller="", connection="2")
    server.pass_ms(50 * LOAD_MS)
    assert len(server.answers) * RUN_MS >= 0.4 * 50 * LOAD_MS
    assert max(server.took_ms["two"]) <= 50 * LOAD_MS


def test_a_joined_run_takes_a_row_of_each_connection_before_a_second_of_one() -> None:
    server = Server()
    server.loop("greedy", "batched", OPEN, caller="", connection="1")
    server.pass_ms(2 * MAX_WAIT_MS)
    server.loop("modest", "batched", 2, caller="", connection="2")
    server.pass_ms(400 * RUN_MS)
    assert max(server.took_ms["modest"]) <= 3 * 4 * RUN_MS  # four rows take four times as long


def test_admission_counts_the_turns_of_other_connections_not_their_queue() -> None:
    server = Server(admission="deadline")

    def refused() -> int:
        return server.clients.outcomes["DeadlineExceeded"]

    for _ in range(OPEN):
        server.clients.infer(ModelName("a"), connection="1", deadline_ms=1e5)
    server.clients.infer(ModelName("a"), connection="2", deadline_ms=4 * RUN_MS)
    assert not refused(), "one computes, one is dispatched, then it is its turn"
    server.clients.infer(ModelName("a"), connection="2", deadline_ms=5 * RUN_MS)
    assert refused() == 1, "the other connection has a turn in between"
    server.pass_ms(5 * RUN_MS)
    assert refused() == 1


def test_a_decision_looks_at_those_that_have_turns_not_at_all_callers() -> None:
    server, calls = Server("fifo", max_queue=10_000, max_queue_per_model=10_000), Counter[str]()

    def decided() -> int:
        """Return how many calls the scheduler makes for ten answers and the ten next requests."""

        def note(frame: Any, what: str, _: Any) -> None:
            calls[what] += what == "call" and "pipeswitch/scheduler" in frame.f_code.co_filename

        calls.clear()
        sys.setprofile(note)
        server.pass_ms(10 * RUN_MS)
        sys.setprofile(None)
        return calls["call"]

    for number in range(20):
        server.loop(f"few {number}", "a")
    server.pass_ms(MAX_WAIT_MS)
    few = decided()
    for number in range(500):
        server.loop(f"waits {number}", "a", caller=f"waits {number}")
        server.clients.infer(ModelName("a"), caller=f"asked once {number}")
    server.pass_ms(MAX_WAIT_MS)
    assert decided() <= 1.2 * few


def test_callers_that_have_nothing_are_forgotten_and_the_time_they_used_is_not() -> None:
    server = Server()
    accounts = server.scheduler.machine.devices[0].state.accounts
    for number in range(3 * fair_queue.MAX_IDLE):
        server.clients.infer(ModelName("a"), caller=f"guest {number}")
        server.pass_ms(2 * RUN_MS)
    server.pass_ms(2 * MAX_WAIT_MS)
    server.loop("", "a", 3)
    server.pass_ms(10 * RUN_MS)
    assert len([*accounts]) <= fair_queue.MAX_IDLE + 2
    used_ms = accounts.used_ms()
    assert [used_ms[f"guest {number}"] for number in range(3 * fair_queue.MAX_IDLE)] == [
        RUN_MS
    ] * 3 * fair_queue.MAX_IDLE
    assert accounts.of("guest 0").used_ms == RUN_MS
    assert accounts.used_ms()["guest 0"] == RUN_MS


def test_a_caller_that_is_barred_or_rests_or_owes_is_not_forgotten() -> None:
    accounts = fair_queue.CallerQueue({}, MAX_WAIT_MS)
    (charge,) = [accounts.charge_alone(accounts.of("barred"), 1, 1.0, 0.0, 0.0)]
    accounts.reconcile_cost(charge, 1.0, 1.0)
    for _ in range(fair_queue.MAX_DEATHS + 1):
        accounts.died(charge, 1.0)
    charge = accounts.charge_alone(accounts.of("long"), 1, 1.0, 0.0, 0.0)
    accounts.reconcile_cost(charge, 30_000.0, 1.0)
    for number in range(2 * fair_queue.MAX_IDLE):
        accounts.of(str(number))
    accounts.in_rounds(lambda _: 0.0, 1.0 + 2 * MAX_WAIT_MS)
    assert {"barred", "long"} <= {account.caller for account in accounts}
    accounts.in_rounds(lambda _: 0.0, 10 * fair_queue.HALF_MS)
    assert len([*accounts]) == fair_queue.MAX_IDLE


@pytest.mark.parametrize(("steps", "pauses"), [(1, True), (3, False)])
def test_a_caller_pauses_after_a_long_step_but_not_after_many_short_ones(
    steps: int, pauses: bool
) -> None:
    accounts = fair_queue.CallerQueue({}, MAX_WAIT_MS)
    charge = accounts.charge_alone(accounts.of("streams"), 1, 1.0, 0.0, 0.0)
    ends_ms = accounts.reconcile_cost(charge, 1.25 * fair_queue.LONG_MS, 200.0, steps)
    assert (ends_ms > 200.0) is pauses


def test_models_that_do_not_fit_together_take_no_more_turns_than_their_copies_are_worth() -> None:
    server = Server(arena_mib=7)
    server.loop("one", "a", OPEN)
    server.loop("two", "b", OPEN)
    server.pass_ms(50 * LOAD_MS)
    assert len(server.answers) * RUN_MS >= 0.4 * 50 * LOAD_MS
    assert max(server.took_ms["two"]) <= 50 * LOAD_MS


def test_who_computes_for_long_rests_as_long_while_others_ask_and_jobs_train_then() -> None:
    server, span_ms = Server(max_compute_ms=0.0), 20 * MODELS["long"]
    server.clients.train(
        JobName("job"), Training(steps=10**6, step_ms=1.0, slice_bytes=MIB, state_bytes=MIB)
    )
    server.pass_ms(100.0)
    server.loop("attacker", "long", 4)
    assert server.pass_ms(span_ms)["attacker"] >= 0.9 * span_ms, "nobody else is there"
    job = server.scheduler.machine.devices[0].state.jobs[JobName("job")]
    step, server.think_ms = job.progress.step, 20.0
    server.loop("modest", "a")
    assert 0.4 <= server.pass_ms(span_ms)["attacker"] / span_ms <= 0.6
    first_ms, *took_ms = server.took_ms["modest"]
    assert first_ms <= 2 * MODELS["long"] + RUN_MS
    assert max(took_ms) <= MODELS["long"] + RUN_MS
    assert sorted(took_ms)[len(took_ms) * 9 // 10] <= 2 * RUN_MS
    assert job.progress.step - step >= 0.3 * span_ms
