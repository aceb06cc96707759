"""Callers take turns by the device's time that they had, whatever a policy does with their own."""

from __future__ import annotations

from collections import Counter
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeswitch.ipc.messages import JobName, ModelName
from pipeswitch.programs.layout import Batching
from pipeswitch.scheduler import events as ev
from pipeswitch.scheduler.accounts import LONG_MS, Accounts
from pipeswitch.scheduler.core import SchedulerSettings
from pipeswitch.scheduler.policies import MAKERS
from pipeswitch.scheduler.scheduler import Scheduler
from pipeswitch.simulator.costs import Costs, Link, Training
from pipeswitch.simulator.programs import program_of
from pipeswitch.simulator.world import World

MIB = 1 << 20
RUN_MS = 2.0
LOAD_MS = 40.0
MAX_WAIT_MS = 100.0
OPEN = 100  # of a greedy caller: they wait for longer than MAX_WAIT_MS
MODELS = {"a": RUN_MS, "b": RUN_MS, "long": 5 * LONG_MS, "joined": RUN_MS}


class Server(World):
    """The real scheduler, the models measured, and clients that have so many requests open."""

    def __init__(self, policy: str = "priority", arena_mib: int = 64, **values: Any) -> None:
        self.loops: dict[str, dict[str, Any]] = {}  # by client: its requests
        self.of: dict[ev.Token, tuple[str, float]] = {}  # client, and when it asked
        self.answers: list[str] = []  # of whom
        self.took_ms: dict[str, list[float]] = {}
        chosen = SchedulerSettings(
            arena_bytes=arena_mib * MIB, store_bytes=64 * MIB, words=64, **values
        )
        link = Link(bytes_per_ms=4 * MIB / LOAD_MS)
        super().__init__(
            Scheduler(chosen, policy, MAX_WAIT_MS), costs=Costs(to_device=link), is_checked=False
        )
        for name, run_ms in MODELS.items():
            joins = Batching(limit=4, delay_ms=0.0, is_exact=True) if name == "joined" else None
            program = program_of(name, 4 * MIB, layer_ms=run_ms / 4, batching=joins)
            self.clients.register(ModelName(name), program)
            self.run()
            self.clients.infer(ModelName(name))
            self.run()
        self.pass_ms(2 * MAX_WAIT_MS)

    think_ms = 0.1  # between an answer and the next request

    def loop(self, client: str, model: str, count: int = 1, **options: Any) -> None:
        """It always has so many requests open."""
        self.loops[client] = {"model": ModelName(model), "caller": client, **options}
        for _ in range(count):
            self.ask(client)

    def ask(self, client: str) -> None:
        self.of[ev.Token(self.clients.last_token + 1)] = (client, self.now_ms)
        self.clients.infer(**self.loops[client])

    def perform(self, commands: list[ev.Command]) -> None:
        super().perform(commands)
        for command in commands:
            if isinstance(command, ev.Answer) and command.token in self.of:
                assert command.error is None
                client, asked_at_ms = self.of.pop(command.token)
                self.answers.append(client)
                self.took_ms.setdefault(client, []).append(self.now_ms - asked_at_ms)
                self.clock.at(self.now_ms + self.think_ms, partial(self.ask, client))

    def pass_ms(self, ms: float) -> dict[str, float]:
        """Of each caller the device's time that it has in it."""
        before = {one.caller: one.used_ms for one in self.accounts}
        self.run(self.now_ms + ms)
        return {one.caller: one.used_ms - before.get(one.caller, 0.0) for one in self.accounts}

    @property
    def accounts(self) -> Accounts:
        return self.scheduler.machine.devices[0].state.accounts


def between(server: Server, client: str) -> int:
    """The most answers of others between two of a client's."""
    places = [n for n, other in enumerate(server.answers) if other == client]
    return max(second - first - 1 for first, second in pairwise(places))


@pytest.mark.parametrize("model", ["a", "b"])
@pytest.mark.parametrize("policy", MAKERS)
def test_a_modest_caller_waits_for_what_is_dispatched_and_for_nothing_that_waits(
    policy: str, model: str
) -> None:
    server = Server(policy)
    server.loop("greedy", "a", OPEN)
    server.pass_ms(2 * MAX_WAIT_MS)
    server.answers.clear()
    server.loop("modest", model)
    used_ms = server.pass_ms(2 * MAX_WAIT_MS)
    assert between(server, "modest") <= 1
    assert max(server.took_ms["modest"][1:]) <= 2 * RUN_MS
    assert server.took_ms["modest"][0] <= 3 * RUN_MS  # nobody was there when it came: one is ahead
    assert sum(used_ms.values()) >= 2 * MAX_WAIT_MS - 2 * RUN_MS  # nothing was left idle


def test_time_is_shared_by_weight_and_not_by_requests_or_their_length() -> None:
    server = Server(weights={"heavy": 3.0})
    server.loop("heavy", "a", 20)
    server.loop("light", "b", 20)
    server.loop("other", "joined", OPEN)
    used_ms = server.pass_ms(1000.0)
    assert used_ms["heavy"] == pytest.approx(600.0, abs=20.0)
    assert used_ms["light"] == pytest.approx(used_ms["other"], abs=20.0)


def test_idle_time_earns_nothing() -> None:
    server = Server()
    server.loop("always", "a", OPEN)
    server.pass_ms(1000.0)
    server.loop("new", "b", OPEN)
    used_ms = server.pass_ms(200.0)
    assert used_ms["new"] == pytest.approx(used_ms["always"], abs=2 * RUN_MS)


def test_a_lower_priority_has_a_turn_when_it_had_none_for_max_wait() -> None:
    server = Server()
    server.loop("high", "a", OPEN, priority=0)
    server.loop("normal", "b", OPEN, priority=1)
    used_ms = server.pass_ms(1000.0)
    assert used_ms["normal"] == pytest.approx(1000.0 / MAX_WAIT_MS * RUN_MS, abs=RUN_MS)


def test_an_old_request_of_low_priority_does_not_hold_up_its_callers_urgent_ones() -> None:
    server = Server()
    server.loop("greedy", "a", OPEN, priority=1)
    server.loop("idle work", "b", 2, priority=2, caller="modest")
    server.pass_ms(2 * MAX_WAIT_MS)
    server.loop("modest", "b", priority=1)
    server.pass_ms(MAX_WAIT_MS)
    assert max(server.took_ms["modest"]) <= 3 * 2 * RUN_MS + RUN_MS


def test_a_joined_run_takes_a_row_of_each_caller_before_a_second_of_one() -> None:
    server = Server()
    server.loop("greedy", "joined", OPEN)
    server.pass_ms(2 * MAX_WAIT_MS)
    server.loop("modest", "joined", 2)
    used_ms = server.pass_ms(400 * RUN_MS)
    assert max(server.took_ms["modest"]) <= 3 * 4 * RUN_MS  # four rows take four times as long
    assert used_ms["modest"] == RUN_MS * len(server.took_ms["modest"])  # for its rows alone


@pytest.mark.parametrize("policy", ["fifo", "edf"])
def test_admission_refuses_nobody_for_what_another_caller_waits_with(policy: str) -> None:
    server = Server(policy, admission="deadline")
    for _ in range(OPEN):
        server.clients.infer(ModelName("a"), caller="greedy", deadline_ms=OPEN * RUN_MS + 1.0)
    refused = Counter(server.clients.outcomes)
    for wanted_ms in (4 * RUN_MS, 5 * RUN_MS):  # every other turn is its own
        server.clients.infer(ModelName("b"), caller="modest", deadline_ms=wanted_ms)
    assert server.clients.outcomes == refused
    server.clients.infer(ModelName("b"), caller="modest", deadline_ms=2 * RUN_MS)
    assert server.clients.outcomes - refused == {"DeadlineExceeded": 1}
    server.pass_ms(5 * RUN_MS)
    assert server.clients.outcomes["DeadlineExceeded"] == 1


def test_models_that_do_not_fit_together_take_no_more_turns_than_their_copies_are_worth() -> None:
    server = Server(arena_mib=7)
    server.loop("one", "a", OPEN)
    server.loop("two", "b", OPEN)
    server.pass_ms(10 * LOAD_MS)
    server.answers.clear()
    server.pass_ms(50 * LOAD_MS)
    assert len(server.answers) * RUN_MS >= 0.4 * 50 * LOAD_MS
    assert max(server.took_ms["two"]) <= 50 * LOAD_MS


def test_who_computes_for_long_rests_as_long_while_others_ask() -> None:
    server = Server(max_compute_ms=0.0)
    server.loop("attacker", "long", 4)
    alone = server.pass_ms(20 * MODELS["long"])
    assert alone["attacker"] >= 18 * MODELS["long"], "nobody else is there"
    server.loop("modest", "a")
    shared = server.pass_ms(20 * MODELS["long"])
    assert 0.4 <= shared["attacker"] / (20 * MODELS["long"]) <= 0.6
    took_ms = sorted(server.took_ms["modest"])
    assert took_ms[-1] <= 2 * MODELS["long"] + RUN_MS  # that it found dispatched when it came
    assert took_ms[-2] <= MODELS["long"] + RUN_MS
    assert took_ms[len(took_ms) * 9 // 10] <= RUN_MS


def test_a_job_trains_while_all_that_wait_rest() -> None:
    server = Server()
    script = Training(steps=10**6, step_ms=1.0, slice_bytes=MIB, state_bytes=MIB)
    server.clients.train(JobName("job"), script)
    server.pass_ms(100.0)
    server.think_ms = 50.0
    server.loop("attacker", "long", 4)
    server.loop("modest", "a")
    server.pass_ms(20 * MODELS["long"])
    state = server.scheduler.machine.devices[0].state
    assert state.jobs[JobName("job")].step >= 0.3 * 20 * MODELS["long"]


@settings(max_examples=200)
@given(
    weights=st.lists(st.sampled_from((0.5, 1.0, 3.0)), min_size=2, max_size=4),
    asks=st.lists(st.tuples(st.integers(0, 3), st.floats(0.5, 20.0), st.floats(0.0, 30.0))),
)
def test_of_two_that_both_wait_neither_has_more_than_a_run_before_the_other(
    weights: list[float], asks: list[tuple[int, float, float]]
) -> None:
    """One task computes and one is dispatched; each takes as long as was predicted."""
    accounts = Accounts({str(n): weight for n, weight in enumerate(weights)}, 1e9)
    waiting: dict[str, list[float]] = {str(n): [] for n in range(len(weights))}
    had: dict[tuple[str, str], float] = {}  # what one had while the other waited as well
    arrivals, at_ms = [], 0.0
    for number, run_ms, gap_ms in asks:
        at_ms += gap_ms
        arrivals.append((at_ms, str(number % len(weights)), run_ms))
    now_ms = 0.0
    while arrivals or any(waiting.values()):
        if not any(waiting.values()):
            now_ms = max(now_ms, arrivals[0][0])
        while arrivals and arrivals[0][0] <= now_ms:
            arrived_at_ms, caller, run_ms = arrivals.pop(0)
            accounts.waits(accounts.of(caller), 1, arrived_at_ms)
            waiting[caller].append(run_ms)
        ((first, *_),) = accounts.in_turns(
            [accounts.of(caller) for caller in waiting if waiting[caller]], lambda _: 0.0, now_ms
        )
        run_ms = waiting[first.caller].pop(0)
        charges = accounts.charge([(first.caller, 1)], run_ms, now_ms)
        accounts.leaves(first, 1)
        now_ms += run_ms
        accounts.settle(charges, run_ms, now_ms)
        for other in waiting:
            for pair in ((first.caller, other), (other, first.caller)):
                both = waiting[pair[0]] and waiting[pair[1]] and pair[0] != pair[1]
                had.setdefault(pair, 0.0)
                had[pair] = (
                    had[pair] + (pair[0] == first.caller) * run_ms / first.weight if both else 0.0
                )
            if other != first.caller and waiting[other]:
                ahead = had[first.caller, other] - had[other, first.caller]
                assert ahead <= 20.0 / first.weight + 20.0 / accounts.of(other).weight + 1e-6
