"""Admission by deadline: a request that cannot be in time, and no other, is refused at once."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from pipeswitch.base.errors import DeadlineExceeded, QueueFull
from pipeswitch.extras.lab.costs import Costs, Link
from pipeswitch.extras.lab.programs import SimulatedProgram, program_of
from pipeswitch.ipc.messages.base import ModelName
from pipeswitch.programs.interface.dims import Dim
from pipeswitch.scheduler.requests.forecast import MARGIN_MS
from pipeswitch.scheduler.scheduler import Scheduler
from pipeswitch.scheduler.state import events as ev
from pipeswitch.scheduler.state.core import SchedulerSettings
from pipeswitch.scheduler.state.predictions import OLD_MS, Predictions
from tests.extras.lab.unit.test_simulator import Answered

MIB = 1 << 20
LAYER_MS = (1.0, 2.0, 5.0, 3.0)  # time per layer of each model, which has two groups of two layers
COMPUTE_MS = tuple(4 * layer_ms for layer_ms in LAYER_MS)
COPY_MS = 8.0


class Server(Answered):
    """Server with four measured models. Runs take constant times, so predictions are exact."""

    def __init__(
        self,
        policy: str = "priority",
        arena_mib: int = 64,
        bytes_per_ms: float = MIB / 2,
        **settings: Any,
    ) -> None:
        all_settings: dict[str, Any] = {"admission": "deadline", **settings}
        chosen = SchedulerSettings(
            arena_bytes=arena_mib * MIB, store_bytes=64 * MIB, fence_count=64, **all_settings
        )
        link = Link(bytes_per_ms=bytes_per_ms)
        super().__init__(Scheduler(chosen, policy, 1e6), Costs(to_device=link))
        for index, layer_ms in enumerate(LAYER_MS):
            program = program_of(f"d{index}", 4 * MIB, layer_ms=layer_ms)
            self.clients.register(ModelName(f"m{index}"), program)
        self.run()
        for index in range(len(LAYER_MS)):
            self.clients.infer(ModelName(f"m{index}"))
            self.run(self.now_ms + 100.0)  # stops before the measurements become old

    def ask(self, model: int, deadline_ms: float | None, priority: int = 1) -> ev.Token:
        return self.clients.infer(
            ModelName(f"m{model}"), deadline_ms=deadline_ms, priority=priority
        )

    def error(self, token: ev.Token) -> Any:
        return self.answers[token][1].error if token in self.answers else None


def test_of_a_burst_as_many_are_accepted_as_can_be_in_time_and_the_others_told_at_once() -> None:
    server = Server()
    began_ms = server.now_ms
    tokens = [server.ask(0, deadline_ms=40.0) for _ in range(25)]  # each computes for 4 ms
    refused = [token for token in tokens if server.error(token) is not None]
    assert refused == tokens[10:], "before any has computed"
    error = server.error(refused[0])
    assert isinstance(error, DeadlineExceeded)
    assert error.data["predicted_ms"] == 44.0
    assert "take 44 ms" in str(error)
    server.run()
    ends = [server.answers[token][0] - began_ms for token in tokens[:10]]
    assert ends == [4.0 * n for n in range(1, 11)]


def test_what_waits_for_a_model_is_bounded_in_time() -> None:
    server = Server(admission="off", max_queue_time_ms=40.0)
    flood = [server.ask(2, deadline_ms=None) for _ in range(9)]  # each computes for 20 ms
    full = [server.error(token) for token in flood]
    assert [isinstance(error, QueueFull) for error in full] == [False] * 4 + [True] * 5
    assert str(full[-1]).startswith("40 ms of requests for m2 are waiting, 40 of them")
    assert not any(server.error(server.ask(0, deadline_ms=None)) for _ in range(8)), "4 ms each"


def test_what_waits_for_a_model_may_be_anothers_but_for_the_rest_of_the_time() -> None:
    server = Server(admission="off", max_queue_time_ms=80.0)
    tokens = [server.clients.infer(ModelName("m0"), caller="greedy") for _ in range(40)]
    # Two requests are dispatched, and one caller may have 15 of the queue's 20 places.
    assert [server.error(token) is None for token in tokens].index(False) == 2 + 15
    other = [server.clients.infer(ModelName("m0"), caller="modest") for _ in range(5)]
    assert [server.error(token) is None for token in other] == [True] * 4 + [False]


def test_without_admission_all_are_taken() -> None:
    server = Server(admission="off")
    tokens = [server.ask(0, deadline_ms=40.0) for _ in range(25)]
    assert not any(server.error(token) for token in tokens)


def test_a_model_that_must_be_sent_first_is_counted_with_its_copy() -> None:
    server = Server(arena_mib=8)  # room for one model
    assert server.error(server.ask(0, deadline_ms=COPY_MS - 1.0)) is not None
    in_time = server.ask(0, deadline_ms=COPY_MS + COMPUTE_MS[0])
    assert server.error(in_time) is None
    server.run()
    assert server.error(in_time) is None


def test_one_that_others_delay_is_told_as_soon_as_it_is_clear() -> None:
    server = Server()
    began_ms = server.now_ms
    waits = server.ask(0, deadline_ms=50.0, priority=2)
    for _ in range(5):
        server.ask(2, deadline_ms=None, priority=0)  # each computes for 20 ms
    urgent = [server.ask(0, deadline_ms=30.0, priority=2), waits]
    server.run()
    times_ms = [server.answers[token][0] - began_ms for token in urgent]
    assert server.error(waits) is None  # this request arrived first, so it ran at once
    assert isinstance(server.error(urgent[0]), DeadlineExceeded)
    assert times_ms[0] == pytest.approx(30.0 - COMPUTE_MS[0], abs=0.1)  # its latest start


def test_what_was_never_measured_is_not_refused() -> None:
    server = Server()
    server.clients.register(ModelName("new"), program_of("new", 4 * MIB, layer_ms=5.0))
    server.run()
    assert server.error(server.clients.infer(ModelName("new"), deadline_ms=0.5)) is None


def slow_once(server: Server, model: int, took_ms: float) -> None:
    """Make one slow run the only measurement of a model."""
    name = ModelName(f"m{model}")
    predictions = server.scheduler.machine.devices[0].state.predictions
    predictions.remove(name)
    predictions.computed(name, 1, took_ms, server.now_ms)


def test_one_slow_run_does_not_refuse_for_ever() -> None:
    """After a while, accept one request in any case, because otherwise no run would be measured."""
    server = Server()
    slow_once(server, 0, 900.0)
    refused = [server.error(server.ask(0, deadline_ms=500.0)) for _ in range(3)]
    assert all(isinstance(error, DeadlineExceeded) for error in refused)
    server.run(server.now_ms + OLD_MS)
    probe = server.ask(0, deadline_ms=500.0)
    assert server.error(probe) is None
    assert server.error(server.ask(0, deadline_ms=500.0)) is not None  # only one is accepted
    server.run()
    assert server.answers[probe][1].error is None
    assert server.error(server.ask(0, deadline_ms=COMPUTE_MS[0])) is None


def test_one_slow_copy_does_not_refuse_for_ever() -> None:
    server = Server(arena_mib=8)  # room for one model, the last one
    name = ModelName("m0")
    predictions = server.scheduler.machine.devices[0].state.predictions
    predictions.remove(name)
    predictions.sent(name, 900.0, server.now_ms)
    assert server.error(server.ask(0, deadline_ms=500.0)) is not None
    server.run(server.now_ms + OLD_MS)
    probe = server.ask(0, deadline_ms=500.0)
    server.run()
    assert server.answers[probe][1].error is None
    assert predictions.safe(name, 1).load_ms == COPY_MS


def test_one_slow_batch_does_not_refuse_for_ever_beside_one_that_is_measured() -> None:
    known = Predictions()
    known.computed("m", 8, 900.0, 0.0)
    known.computed("m", 1, 1.0, OLD_MS)
    assert known.is_due("m", 8, is_sent=False, now_ms=OLD_MS)
    assert not known.is_due("m", 1, is_sent=False, now_ms=OLD_MS)
    known.on_dispatched("m", 8, is_sent=False, now_ms=OLD_MS)
    assert not known.is_due("m", 8, is_sent=False, now_ms=OLD_MS)


def test_what_was_measured_often_is_believed_for_longer() -> None:
    known = Predictions()
    for _ in range(3):
        known.computed("m", 1, 900.0, 0.0)
    assert not known.is_due("m", 1, is_sent=False, now_ms=3 * OLD_MS - 1.0)
    assert known.is_due("m", 1, is_sent=False, now_ms=3 * OLD_MS)


def test_a_slow_run_among_others_refuses_none() -> None:
    server = Server()
    predictions = server.scheduler.machine.devices[0].state.predictions
    predictions.computed(ModelName("m0"), 1, 900.0, server.now_ms)
    assert predictions.predict("m0", 1).p95_ms == 900.0
    assert server.error(server.ask(0, deadline_ms=COMPUTE_MS[0])) is None


def test_a_long_text_says_nothing_of_a_short_one() -> None:
    """If a model has an open dimension besides the batch, its run time cannot be predicted."""
    server = Server()
    for dims, is_refused in ((("batch",), True), (("batch", "length"), False)):
        replica = server.scheduler.machine.devices[0].state.replicas[ModelName("m0")]
        assert replica.manifest is not None
        chosen = tuple(Dim(name, 1, 512) for name in dims)
        replica.manifest = msgspec.structs.replace(replica.manifest, dims=chosen)
        slow_once(server, 0, 900.0)
        token = server.ask(0, deadline_ms=500.0)
        assert (server.error(token) is not None) is is_refused


def arrivals_of(seed: int) -> list[tuple[float, int, float | None, int]]:
    """Return random arrivals: gap to the previous one in ms, model, deadline in ms, priority."""
    rng = random.Random(seed)
    return [
        (
            rng.choice((0.0, 0.0, 1.0, 10.0, 40.0)),
            rng.randrange(4),
            rng.choice((None, rng.uniform(1.0, 150.0), 60.0)),
            rng.choice((1, 1, 1, 0, 2)),
        )
        for _ in range(40)
    ]


def lived(policy: str, arena_mib: int, arrivals: Any, forced: int | None = None) -> Any:
    """Run the arrivals; return the server and the tokens. Request ``forced`` is always accepted."""
    server, tokens = Server(policy, arena_mib), []
    for number, (gap_ms, model, deadline_ms, priority) in enumerate(arrivals):
        server.run(server.now_ms + gap_ms)
        settings = server.scheduler.core.settings
        state = server.scheduler.machine.devices[0].state
        if number == forced:
            state.settings = replace(settings, admission="off")
        tokens.append((server.ask(model, deadline_ms, priority), server.now_ms))
        state.settings = settings
    return server, tokens


@pytest.mark.parametrize("arena_mib", [8, 64])
@pytest.mark.parametrize("policy", ["priority", "fifo", "edf", "sjf", "collate", "alternating"])
def test_none_is_refused_that_could_have_been_in_time(policy: str, arena_mib: int) -> None:
    """For each refused request, run the same arrivals again and accept it. Then it must be late, or
    make a request late that was accepted before it."""
    checked = 0
    for seed in range(6):
        arrivals = arrivals_of(seed)
        server, tokens = lived(policy, arena_mib, arrivals)
        for number, (token, at_ms) in enumerate(tokens):
            deadline_ms = arrivals[number][2]
            if deadline_ms is None or server.error(token) is None:
                continue
            if server.answers[token][0] > at_ms:
                continue  # it was refused later, after other requests had overtaken it
            other, others = lived(policy, arena_mib, arrivals[: number + 1], forced=number)
            other.run()
            ended_at_ms, answer = other.answers[others[number][0]]
            is_late = answer.error is not None or ended_at_ms > at_ms + deadline_ms
            had = {n for n, (t, _) in enumerate(others[:number]) if other.error(t) is not None}
            server_had = {
                n
                for n, (t, when) in enumerate(tokens[:number])
                if server.error(t) is not None and server.answers[t][0] <= at_ms
            }
            assert is_late or had - server_had, (seed, number, ended_at_ms - at_ms, deadline_ms)
            checked += 1
    assert checked > 10


@pytest.mark.parametrize("factor", [1.5, 4.0])
def test_at_overload_all_that_are_accepted_are_in_time_and_the_others_told_when_they_come(
    factor: float,
) -> None:
    """Send equally many requests to each of four models; they compute for 10 ms on average. Each
    request must be in time, or be refused when it arrives."""
    server, rng = Server("edf"), random.Random(11)
    began_ms, tokens = server.now_ms, []
    while server.now_ms < began_ms + 8_000.0:
        server.run(server.now_ms + rng.expovariate(factor / 10.0))
        deadline_ms = rng.uniform(87.0, 121.0)
        tokens.append((server.ask(rng.randrange(4), deadline_ms), server.now_ms, deadline_ms))
    server.run()
    ended = [(server.answers[token], at_ms, deadline) for token, at_ms, deadline in tokens]
    served = [one for one in ended if one[0][1].error is None]
    assert all(end_ms <= at_ms + deadline + MARGIN_MS for (end_ms, _), at_ms, deadline in served)
    at_once = [one for one in ended if one[0][1].error is not None and one[0][0] == one[1]]
    assert len(served) + len(at_once) == len(tokens), "none was accepted and then refused"
    spent_us = server.scheduler.machine.devices[0].state.spent_us
    assert sum(spent_us.values()) / 1000.0 >= 0.95 * 8_000.0


def test_what_is_accepted_is_in_time_though_runs_scatter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deadlines allow about 17 runs. Predictions by sums of medians made 1 request in 20 late."""
    rng, exact = random.Random(3), SimulatedProgram.group_ms

    def scattered(program: SimulatedProgram, *arguments: Any) -> tuple[float, ...]:
        factor = 0.9 + rng.expovariate(1 / 0.12)
        return tuple(factor * ms for ms in exact(program, *arguments))

    monkeypatch.setattr(SimulatedProgram, "group_ms", scattered)
    server, tokens, began_ms = Server("edf"), [], 1_000.0
    server.run(began_ms)
    while server.now_ms < began_ms + 10_000.0:
        server.run(server.now_ms + rng.expovariate(2.0 / 12.0))
        deadline_ms = rng.uniform(110.0, 230.0)
        tokens.append((server.ask(3, deadline_ms), server.now_ms, deadline_ms))
    server.run()
    ended = [(*server.answers[token], at_ms, deadline) for token, at_ms, deadline in tokens]
    accepted = [one for one in ended if one[1].error is None or one[0] > one[2]]
    in_time = [one[1].error is None and one[0] <= one[2] + one[3] for one in accepted]
    assert sum(in_time) >= 0.99 * len(in_time)
    spent_us = server.scheduler.machine.devices[0].state.spent_us
    assert sum(spent_us.values()) / 1000.0 >= 0.95 * 10_000.0


def test_copies_for_requests_that_wait_are_counted() -> None:
    server = Server("edf", arena_mib=12)  # room for two models, the last two
    first = server.ask(0, deadline_ms=13.0)
    late = server.ask(1, deadline_ms=17.0)  # it needs 24 ms: two copies, and 8 ms to compute
    assert isinstance(server.error(late), DeadlineExceeded)
    in_time = server.ask(1, deadline_ms=2 * COPY_MS + COMPUTE_MS[1])
    server.run()
    assert server.error(first) is None is server.error(in_time)


def test_one_that_overtakes_a_request_that_waits_for_the_link_may_not_make_it_late() -> None:
    server = Server("edf", arena_mib=12)
    began_ms = server.now_ms
    waits = [server.ask(1, deadline_ms=20.0), server.ask(0, deadline_ms=24.0)]
    overtakes = server.ask(2, deadline_ms=150.0)  # computes for 20 ms on a resident model
    server.run()
    for token, deadline_ms in zip(waits, (20.0, 24.0), strict=True):
        assert server.error(token) is None
        assert server.answers[token][0] <= began_ms + deadline_ms
    assert server.error(overtakes) is None or server.answers[overtakes][0] == began_ms


def test_while_a_model_comes_runs_that_end_before_go_first() -> None:
    server = Server("edf", arena_mib=12, bytes_per_ms=MIB / 10)  # a copy takes 40 ms
    server.ask(0, deadline_ms=None)
    server.run(server.now_ms + 100.0)
    began_ms = server.now_ms
    for _ in range(2):
        server.ask(0, deadline_ms=300.0)  # the first request computes, the second is dispatched
    comes = server.ask(1, deadline_ms=100.0)
    short = [server.ask(0, deadline_ms=200.0) for _ in range(3)]
    server.run()
    assert [server.answers[token][0] - began_ms for token in short] == [12.0, 16.0, 20.0]
    assert server.answers[comes][0] - began_ms == 40.0 + COMPUTE_MS[1] / 2, "none delayed it"


def test_one_that_would_make_an_accepted_one_late_is_refused() -> None:
    server = Server("edf")
    first = server.ask(2, deadline_ms=20.0)  # computes at once, for 20 ms
    later = server.ask(2, deadline_ms=43.0)
    urgent = server.ask(0, deadline_ms=30.0)  # would run before ``later`` and end after 24 ms
    assert isinstance(server.error(urgent), DeadlineExceeded)
    server.run()
    assert server.error(first) is None is server.error(later)
