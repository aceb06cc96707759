"""Callers take turns by the device's time that they had, whatever a policy does with their own."""

from __future__ import annotations

from collections import Counter, defaultdict
from functools import partial
from itertools import combinations, pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeswitch.ipc.messages import JobName, ModelName
from pipeswitch.programs.layout import Batching
from pipeswitch.scheduler import events as ev
from pipeswitch.scheduler.core import SchedulerSettings
from pipeswitch.scheduler.policies import MAKERS
from pipeswitch.scheduler.requests.accounts import LONG_MS, Account, Accounts
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
    """The real scheduler, models that were measured, and clients that ask again and again."""

    think_ms = 0.1  # between an answer and the next request

    def __init__(self, policy: str = "priority", arena_mib: int = 64, **values: Any) -> None:
        self.loops: dict[str, dict[str, Any]] = {}  # by client: its requests
        self.of: dict[ev.Token, tuple[str, float]] = {}  # client, and when it asked
        self.answers: list[str] = []  # of whom
        self.took_ms: dict[str, list[float]] = {}
        chosen = SchedulerSettings(
            arena_bytes=arena_mib * MIB, store_bytes=64 * MIB, words=64, **values
        )
        costs = Costs(to_device=Link(bytes_per_ms=4 * MIB / LOAD_MS))
        super().__init__(Scheduler(chosen, policy, MAX_WAIT_MS), costs=costs, is_checked=False)
        for name, run_ms in MODELS.items():
            joins = Batching(limit=4, delay_ms=0.0, is_exact=True) if name == "joined" else None
            program = program_of(name, 4 * MIB, layer_ms=run_ms / 4, batching=joins)
            self.clients.register(ModelName(name), program)
            self.run()
            self.clients.infer(ModelName(name))
            self.run()
        self.pass_ms(2 * MAX_WAIT_MS)

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
                client, asked_at_ms = self.of.pop(command.token)
                self.answers.append(client)
                self.took_ms.setdefault(client, []).append(self.now_ms - asked_at_ms)
                self.clock.at(self.now_ms + self.think_ms, partial(self.ask, client))

    def pass_ms(self, ms: float) -> dict[str, float]:
        """Of each caller the device's time that it has in it."""
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
    assert first_ms <= 3 * RUN_MS  # nobody else was there: one more was dispatched
    assert max(took_ms) <= 2 * RUN_MS
    own = [place for place, client in enumerate(server.answers) if client == "modest"]
    assert max(second - first for first, second in pairwise(own)) == 2
    assert sum(used_ms.values()) >= 2 * MAX_WAIT_MS - 2 * RUN_MS  # nothing was left idle


@given(
    weights=st.lists(st.sampled_from((0.5, 1.0, 3.0)), min_size=2, max_size=4),
    runs_ms=st.lists(st.floats(0.5, 20.0), min_size=30, max_size=60),
    error=st.floats(0.0, 1.0),
)
def test_while_two_wait_neither_has_more_than_a_run_before_the_other(
    weights: list[float], runs_ms: list[float], error: float
) -> None:
    """Each comes when the ones before it have had five runs; predictions may be wrong."""
    accounts = Accounts({str(n): weight for n, weight in enumerate(weights)}, 1e9)
    leads: dict[tuple[Account, Account], list[float]] = {}
    had: defaultdict[Account, float] = defaultdict(float)
    now_ms = 0.0
    for number, run_ms in enumerate(runs_ms):
        if number % 5 == 0 and number // 5 < len(weights):
            accounts.count(accounts.of(str(number // 5)), 1, 1)  # and always waits with another one
        ((first, *_),) = accounts.in_turns(lambda _: 0.0, now_ms)
        charge = accounts.charge(Counter({first.caller: 1}), run_ms * error, now_ms)
        now_ms += run_ms
        accounts.settle(charge, run_ms, now_ms)
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
    # Its own old ones go first, and the caller waits with its most urgent one all the same.
    server.loop("idle work", "b", 2, priority=2, caller="modest")
    server.pass_ms(2 * MAX_WAIT_MS)
    server.loop("modest", "b", priority=0)
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
    step, server.think_ms = job.step, 20.0
    server.loop("modest", "a")
    assert 0.4 <= server.pass_ms(span_ms)["attacker"] / span_ms <= 0.6
    first_ms, *took_ms = server.took_ms["modest"]
    assert first_ms <= 2 * MODELS["long"] + RUN_MS
    assert max(took_ms) <= MODELS["long"] + RUN_MS
    assert sorted(took_ms)[len(took_ms) * 9 // 10] <= 2 * RUN_MS
    assert job.step - step >= 0.3 * span_ms
