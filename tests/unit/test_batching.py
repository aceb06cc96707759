"""Batching: requests that wait together are computed together, but each ends on its own."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from msgspec import structs

from pipeswitch.base import errors
from pipeswitch.extras.lab.programs import program_of
from pipeswitch.extras.lab.world import World
from pipeswitch.ipc.messages.base import ModelName, SlabTensor
from pipeswitch.ipc.messages.run import Run, SamplingParams
from pipeswitch.ipc.messages.worker import RunInference
from pipeswitch.programs.interface.dims import Dim
from pipeswitch.programs.interface.layout import PADS, Batching, ValueSpec
from pipeswitch.scheduler.requests import batching
from pipeswitch.scheduler.scheduler import Scheduler
from pipeswitch.scheduler.state import events as ev
from pipeswitch.scheduler.state.core import SchedulerSettings
from pipeswitch.scheduler.state.predictions import Predictions
from pipeswitch.scheduler.state.records import Request
from pipeswitch.scheduler.state.states import TaskState
from tests.unit.arrivals import arrival, done_of

MIB = 1 << 20
LIMIT, DELAY_MS = 4, 5.0
COMPUTE_MS = 8.0  # time for one row; a batch of n rows takes n times as long
IDS = (ValueSpec(name="ids", dtype="int64", shape=("batch", "length")),)


class Server(World):
    """Server with three resident models: ``joins`` batches requests that already wait, ``waits``
    delays a batch for further requests, and ``other`` does not batch."""

    def __init__(
        self, policy: str = "priority", *, max_wait_ms: float = 2000.0, **settings: Any
    ) -> None:
        self.answers: dict[ev.Token, tuple[float, ev.Reply]] = {}
        self.runs: list[tuple[float, RunInference]] = []
        self.faults: dict[str, list[str]] = {}  # kind of fault -> models whose next runs have it
        self.unjoined: list[str] = []
        self.interrupts: list[ev.Interrupt] = []
        all_settings = {
            "arena_bytes": 64 * MIB,
            "store_bytes": 64 * MIB,
            "fence_count": 64,
        } | settings
        chosen = SchedulerSettings(**all_settings)
        super().__init__(Scheduler(chosen, policy, max_wait_ms), choices=self)
        for name, delay_ms in (("joins", 0.0), ("waits", DELAY_MS), ("other", None)):
            batching = None
            if delay_ms is not None:
                batching = Batching(limit=LIMIT, delay_ms=delay_ms, is_exact=True)
            program = program_of(name, 4 * MIB, layer_ms=COMPUTE_MS / 4, batching=batching)
            if name == "joins":
                dims = (Dim("batch", 1, 8), Dim("length", 1, 9))
                manifest = structs.replace(program.manifest, inputs=IDS, dims=dims)
                program = replace(program, manifest=manifest)
            self.clients.register(ModelName(name), program)
        self.run()
        for name in ("joins", "waits", "other"):
            self.ask(name)
            self.run(self.now_ms + 100.0)
        self.runs.clear()
        self.began_ms = self.now_ms

    def happens(self, what: str, name: str) -> bool:
        if what == "poison" and self.deadly is not None:
            return any(
                f"r{self.deadly}" in [one.request_id for one in run.runs]
                for worker in self.workers.values()
                if worker.computes
                for run in worker.orders
            )
        names = self.faults.get(what, [])
        if name in names:
            names.remove(name)
            return True
        return False

    def perform(self, commands: list[ev.Command]) -> None:
        super().perform(commands)
        for command in commands:
            match command:
                case ev.Reply(more=False):
                    self.answers[command.token] = (self.now_ms - self.began_ms, command)
                case ev.Send(message=RunInference() as message):
                    self.runs.append((self.now_ms - self.began_ms, message))
                case ev.Interrupt():
                    self.interrupts.append(command)
                case ev.Publish(topic="model.not_joined"):
                    self.unjoined.append(command.body["model"])

    began_ms = 0.0
    deadly: ev.Token | None = None  # request that kills every worker that computes it

    def ask(self, name: str, *, rows: int = 1, length: int = 3, **values: Any) -> ev.Token:
        token = self.clients.token()
        deadline_ms = values.pop("deadline_ms", None)
        ids = SlabTensor(
            name="ids", dtype="int64", shape=(rows, length), offset_bytes=0, size_bytes=8
        )
        self.handle(
            arrival(
                token,
                name,
                self.now_ms,
                digest=name,
                deadline_at_ms=None if deadline_ms is None else self.now_ms + deadline_ms,
                inputs=(ids,),
                **values,
            )
        )
        return token

    def ask_behind(self, count: int, name: str = "joins", **values: Any) -> list[ev.Token]:
        """Send requests that wait together until two requests of another model have run."""
        for _ in range(2):
            self.ask("other", priority=0)
        tokens = [self.ask(name, **values) for _ in range(count)]
        self.runs.clear()
        return tokens

    def batched(self) -> list[list[int]]:
        """Return, for each run, the tokens of its requests."""
        return [[int(one.request_id[1:]) for one in run.runs] for _, run in self.runs]

    def error(self, token: ev.Token) -> Any:
        return self.answers[token][1].error

    def end_ms(self, token: ev.Token) -> float:
        return self.answers[token][0]


def test_what_waits_together_is_one_run_up_to_the_limit_and_each_has_its_own_answer() -> None:
    server = Server()
    tokens = server.ask_behind(10)
    server.run(server.now_ms + 1000.0)
    assert server.batched() == [tokens[:4], tokens[4:8], tokens[8:]]
    for token in tokens:
        _, answer = server.answers[token]
        assert [output.name for output in answer.outputs] == [f"r{token}"]
    timings = [server.answers[token][1].timing for token in tokens]
    assert [(b.batch, b.batched, b.compute_ms) for b in timings if b] == [
        *[(4, 4, 4 * COMPUTE_MS)] * 8,
        *[(2, 2, 2 * COMPUTE_MS)] * 2,
    ]
    counts = server.scheduler.core.counts
    assert (counts["runs"], counts["inferences"]) == (3 + 5, 10 + 5)
    spent_us = server.scheduler.machine.devices[0].state.spent_us
    assert spent_us["infer"] == (10 + 5) * COMPUTE_MS * 1000  # the device's time is counted once


PARTS = ("preprocess_ms", "queue_ms", "switch_ms", "stall_ms", "compute_ms", "postprocess_ms")


def test_the_parts_of_a_bill_never_exceed_its_total() -> None:
    """Check requests that were cold, resident, delayed by other requests, and batched."""
    server = Server()
    for n in range(4):
        program = program_of(f"cold{n}", (4 + 4 * n) * MIB, layer_ms=1.0 + 3.0 * n)
        server.clients.register(ModelName(f"cold{n}"), program)
    server.run()
    tokens = [server.ask(name) for name in ("cold0", "cold3", "cold1", "other", "cold2", "cold1")]
    tokens += server.ask_behind(6)
    server.run(server.now_ms + 5000.0)
    timings = [server.answers[token][1].timing for token in tokens]
    assert {timing.resident for timing in timings if timing} == {True, False}
    for timing in timings:
        assert timing is not None
        assert sum(getattr(timing, part) for part in PARTS) <= timing.total_ms + 1e-6, timing
        assert timing.compute_ms > 0.0


def test_a_request_alone_has_a_batch_and_is_not_joined() -> None:
    server = Server()
    token = server.ask("other")
    server.run()
    timing = server.answers[token][1].timing
    assert (timing.batch, timing.batched) == (1, 1)


def test_other_lengths_are_passed_over_and_a_batch_that_is_too_large_ends_it() -> None:
    server = Server()
    server.ask_behind(0)
    first, long, third = server.ask("joins"), server.ask("joins", length=4), server.ask("joins")
    large, after = server.ask("joins", rows=3), server.ask("joins")
    server.run()
    assert server.batched() == [[first, third], [long], [large, after]]
    assert [run.runs[-1].inputs[0].shape for _, run in server.runs if len(run.runs) > 1] == [
        (1, 3)
    ] * 2


def test_priorities_are_not_joined() -> None:
    server = Server()
    server.ask_behind(0)
    low, high = server.ask("joins", priority=2), server.ask("joins", priority=0)
    server.run()
    assert server.batched() == [[high], [low]]


def test_one_waits_for_others_as_long_as_its_owner_allows_and_no_longer() -> None:
    server = Server()
    alone = server.ask("waits")
    server.run(server.now_ms + 1000.0)
    assert server.end_ms(alone) == DELAY_MS + COMPUTE_MS
    server.began_ms = server.now_ms
    first = server.ask("waits")
    server.run(server.now_ms + 3.0)
    second = server.ask("waits")
    server.run(server.now_ms + 1000.0)
    assert server.end_ms(first) == server.end_ms(second) == DELAY_MS + 2 * COMPUTE_MS


def test_the_delay_and_the_bill_count_from_when_a_request_was_read_from_its_client() -> None:
    server = Server()
    token = server.ask("waits", arrived_at_ms=server.now_ms - 3.0)
    server.run()
    timing = server.answers[token][1].timing
    assert (timing.queue_ms, timing.total_ms) == pytest.approx((DELAY_MS, DELAY_MS + COMPUTE_MS))
    assert server.end_ms(token) == pytest.approx(DELAY_MS - 3.0 + COMPUTE_MS)


def test_a_full_batch_waits_for_nothing_nor_does_one_that_waited_for_the_device() -> None:
    server = Server()
    full = [server.ask("waits") for _ in range(LIMIT)]
    assert server.batched() == [full]
    server.run()
    server.began_ms = server.now_ms
    late = server.ask_behind(1, "waits")
    server.run()
    assert server.end_ms(late[0]) == 3 * COMPUTE_MS


def test_while_one_waits_for_others_the_device_computes_what_else_there_is() -> None:
    server = Server()
    waits = server.ask("waits", priority=0)
    other = server.ask("other", priority=2)
    assert server.batched() == [[other]]
    server.run()
    assert (server.end_ms(other), server.end_ms(waits)) == (COMPUTE_MS, 2 * COMPUTE_MS)


def test_one_waits_no_longer_than_its_deadline_allows() -> None:
    server = Server()
    token = server.ask("waits", deadline_ms=COMPUTE_MS + 2.0)
    server.run()
    assert server.error(token) is None
    assert server.end_ms(token) == COMPUTE_MS + 2.0


def test_before_a_model_is_measured_a_deadline_within_the_delay_is_kept() -> None:
    server = Server()
    server.scheduler.machine.devices[0].state.predictions.remove("waits")
    token = server.ask("waits", deadline_ms=DELAY_MS - 1.0)
    server.run(server.now_ms + 100.0)
    assert server.error(token) is None
    assert [at_ms for at_ms, _ in server.runs] == [0.0]


def test_before_a_model_is_measured_one_without_a_deadline_waits_for_others_all_the_same() -> None:
    server = Server()
    server.scheduler.machine.devices[0].state.predictions.remove("waits")
    tokens = [server.ask("waits") for _ in range(LIMIT)]
    server.run(server.now_ms + 100.0)
    assert server.batched() == [tokens]


def test_few_rows_are_taken_to_cost_at_most_what_more_did() -> None:
    predictions = Predictions()
    predictions.computed("m", 4, 8.0, now_ms=0.0)
    costs_ms = [predictions.at_most_ms("m", batch) for batch in (1, 4, 6)]
    assert costs_ms == [8.0, 8.0, 12.0]


def test_none_is_joined_that_would_make_another_late() -> None:
    server = Server()
    server.ask_behind(0)
    first = server.ask("joins", deadline_ms=4 * COMPUTE_MS)
    rest = [server.ask("joins") for _ in range(3)]
    server.run()  # two requests of "other" run first; a batch of four would miss the deadline
    assert server.batched() == [[first, rest[0]], rest[1:]]
    assert server.end_ms(first) == 4 * COMPUTE_MS


@pytest.mark.parametrize("fault", ["infer_error", "early_error"])
def test_a_request_that_fails_fails_alone(fault: str) -> None:
    server = Server()
    tokens = server.ask_behind(3)
    server.faults[fault] = ["joins", "joins"]  # in the batch, then in its first request alone
    server.run()
    assert server.batched() == [tokens, *[[token] for token in tokens]]
    assert isinstance(server.error(tokens[0]), errors.TaskFailed)
    assert [server.error(token) for token in tokens[1:]] == [None, None]


def test_of_joined_requests_whose_worker_died_none_is_blamed_and_each_runs_alone() -> None:
    server = Server(max_deaths=2)
    tokens = server.ask_behind(3)
    server.faults["poison"] = ["joins"]
    server.run(server.now_ms + 5000.0)
    assert server.batched() == [tokens, *[[token] for token in tokens]]
    assert not any(server.error(token) for token in tokens)


def test_one_that_kills_its_worker_alone_too_is_given_up_after_the_usual_number_of_deaths() -> None:
    server = Server()
    server.deadly, *others = server.ask_behind(3)
    server.run(server.now_ms + 60000.0)
    assert isinstance(server.error(server.deadly), errors.WorkerLost)
    assert not any(server.error(token) for token in others)
    assert server.batched().count([server.deadly]) == 3


def test_a_joined_run_whose_death_is_one_too_many_says_how_many_there_were() -> None:
    server = Server(max_deaths=1)
    tokens = server.ask_behind(2)
    server.faults["poison"] = ["joins"]
    server.run(server.now_ms + 5000.0)
    for token in tokens:
        assert isinstance(server.error(token), errors.WorkerLost)
        assert "died 1 times" in str(server.error(token))
        assert server.error(token).data["deaths"] == 1


def test_a_worker_that_died_before_its_turn_has_separated_none() -> None:
    server = Server()
    tokens = server.ask_behind(3)
    server.run(server.now_ms + COMPUTE_MS)  # the second request of "other" computes
    upcoming = server.scheduler.machine.devices[0].state.owner.pending
    server.workers[upcoming.slot].end(-9)
    server.run(server.now_ms + 5000.0)
    assert server.batched() == [tokens, tokens]


def test_a_model_whose_joined_runs_keep_failing_is_joined_no_more() -> None:
    server = Server(max_deaths=2)
    for _ in range(2):
        server.faults["infer_error"] = ["joins"]
        server.ask_behind(2)
        server.run()
    assert server.unjoined == ["joins"]
    tokens = server.ask_behind(2)
    server.run()
    assert server.batched() == [[token] for token in tokens]
    server.handle(ev.PinRequest(token=server.clients.token(), model=ModelName("joins"), pin=True))
    pardoned = server.ask_behind(2)
    server.run()
    assert server.batched() == [pardoned]


def test_an_answer_with_a_schema_joins_and_its_failures_do_not_end_batching() -> None:
    server, how = Server(max_deaths=2), SamplingParams(options={"json_schema": "{}"}, answer=(1,))
    for _ in range(3):
        server.faults["infer_error"] = ["joins"]
        server.ask_behind(2, sampling_params=how)
        server.run()
        assert [len(one) for one in server.batched()] == [2, 1, 1]
    assert server.unjoined == []


def test_a_joined_run_that_ends_well_forgets_those_that_did_not() -> None:
    server = Server(max_deaths=2)
    for faults in (["joins"], [], ["joins"]):
        server.faults["infer_error"] = faults
        server.ask_behind(2)
        server.run()
    assert server.unjoined == []


def test_one_that_is_taken_back_while_it_waits_is_not_computed_and_one_that_computes_is() -> None:
    server = Server()
    first, second, third = server.ask_behind(3)
    server.handle(ev.CancelRequest(token=second))
    assert isinstance(server.error(second), errors.Cancelled)
    server.run(server.now_ms + 2 * COMPUTE_MS)
    server.handle(ev.CancelRequest(token=third))  # too late: the request already computes
    server.run()
    assert server.batched() == [[first, third]]
    assert not server.error(first)
    assert not server.error(third)


def test_a_deadline_that_passes_while_it_waits_takes_it_out_of_the_batch() -> None:
    server = Server()
    server.ask_behind(0)
    late, other = server.ask("joins", deadline_ms=1.0), server.ask("joins")
    server.run()
    assert isinstance(server.error(late), errors.DeadlineExceeded)
    assert server.batched() == [[other]]


def test_a_joined_run_is_hung_when_the_last_deadline_is_long_past() -> None:
    server = Server(deadline_grace_ms=100.0, max_compute_ms=0.0)
    tokens = [*server.ask_behind(1, deadline_ms=500.0), server.ask("joins", deadline_ms=900.0)]
    server.faults["hang"] = ["joins"]
    server.run(server.now_ms + 950.0)
    assert not any(token in server.answers for token in tokens)
    server.run(server.now_ms + 5000.0)
    assert all(isinstance(server.error(token), errors.DeadlineExceeded) for token in tokens)


def test_an_endless_joined_run_is_killed_and_each_is_tried_alone() -> None:
    server = Server(max_compute_ms=1000.0)
    tokens = server.ask_behind(2)
    server.faults["hang"] = ["joins"]
    server.run(server.now_ms + 10000.0)
    assert server.batched() == [tokens, *[[token] for token in tokens]]
    assert not any(server.error(token) for token in tokens)


def test_when_the_memory_daemon_dies_all_of_a_run_are_queued_again() -> None:
    server = Server()
    tokens = server.ask_behind(3)
    server.run(server.now_ms + 2 * COMPUTE_MS)
    server.daemon.end(-9)
    server.run(server.now_ms + 5000.0)
    assert server.batched() == [tokens, tokens]
    assert not any(server.error(token) for token in tokens)


def test_a_worker_that_answers_other_requests_than_it_was_given_is_killed() -> None:
    server = Server()
    tokens = server.ask_behind(2)
    server.run(server.now_ms + 2 * COMPUTE_MS + 1.0)
    task = server.scheduler.machine.devices[0].state.owner.running
    worker = server.workers[task.slot]
    server.handle(ev.Received(worker.address, done_of(task.op_id)))
    server.run(server.now_ms + 5000.0)
    assert server.batched() == [tokens, *[[token] for token in tokens]]
    assert not any(server.error(token) for token in tokens)


def test_admission_counts_joined_runs_and_refuses_none_that_can_be_in_time() -> None:
    """Two runs of ``other`` come first, then eight rows in two runs; each takes one row's time."""
    server = Server("fifo", admission="deadline")
    server.ask_behind(8, "waits")
    ends_ms = 2 * COMPUTE_MS + 2 * COMPUTE_MS + COMPUTE_MS
    assert server.ask("waits", deadline_ms=ends_ms) not in server.answers
    refused = server.ask("waits", deadline_ms=ends_ms - 1.0)
    assert isinstance(server.error(refused), errors.DeadlineExceeded)


def test_a_server_that_drains_waits_for_no_others() -> None:
    server = Server()
    token = server.ask("waits")
    server.handle(ev.DrainRequest(token=None, grace_ms=1000.0))
    server.run()
    assert server.end_ms(token) == DELAY_MS + COMPUTE_MS
    assert server.left == 0


def test_requests_keep_their_order_inside_a_run() -> None:
    server = Server()
    tokens = server.ask_behind(9)
    server.run()
    flat = [token for run in server.batched() for token in run]
    assert flat == tokens
    assert all(first < second for first, second in pairwise(flat))


def test_what_has_waited_long_enough_begins_in_the_urgent_half_of_the_decision() -> None:
    server = Server()
    server.ask("waits")
    commands = server.scheduler.decide(ev.Tick(), server.now_ms + DELAY_MS)
    orders = [command.message for command in commands if isinstance(command, ev.Send)]
    assert [type(order) for order in orders] == [RunInference]


class Steps(Server):
    """Server with ``lm``, which generates tokens and batches requests of unequal lengths. This
    class also acts as their ``RunKind``: it returns the next run, or keeps a request waiting."""

    run_of = 1  # the maximum number of steps of a run

    def __init__(self, **settings: Any) -> None:
        self.to_come: dict[ev.Token, int] = {}  # request -> number of tokens still to compute
        self.past: dict[ev.Token, int] = {}
        self.parked: set[ev.Token] = set()  # requests that wait for room in the pool
        self.renewed: set[ev.Token] = set()  # requests whose run the scheduler had prepared again
        super().__init__(**settings)
        joins = Batching(limit=8, delay_ms=0.0, is_exact=False)
        program = program_of("lm", 4 * MIB, layer_ms=COMPUTE_MS / 4, batching=joins)
        inputs = [("ids", "length"), ("count",), ("used",), ("cache", "past", 3)]
        manifest = structs.replace(
            program.manifest,
            extra={**program.manifest.extra, "pads": PADS},
            inputs=tuple(
                ValueSpec(name=name, dtype="int64", shape=("batch", *more))
                for name, *more in inputs
            ),
            dims=(Dim("batch", 1, 8), Dim("length", 1, 512), Dim("past", 1, 512)),
        )
        self.clients.register(ModelName("lm"), replace(program, manifest=manifest, row_share=0.1))
        self.scheduler.core.kind = self
        self.run()
        self.step(past=1)
        self.run(self.now_ms + 100.0)
        self.runs.clear()

    def step(self, *, past: int, length: int = 1, tokens: int = 1, **values: Any) -> ev.Token:
        """Send a request that generates ``tokens`` tokens; return the request's token."""
        token = self.clients.token()
        self.to_come[token], self.past[token] = tokens, past
        self.handle(
            arrival(
                token,
                "lm",
                self.now_ms,
                digest="lm",
                cache=token,
                inputs=inputs_of(past, length),
                sampling_params=self.sampling_params(token),
                **values,
            )
        )
        return token

    def sampling_params(self, token: ev.Token) -> SamplingParams:
        remaining = self.to_come[token]
        return SamplingParams(steps=min(remaining, self.run_of), left=remaining)

    # ``RunKind``

    def ended(self, request: Request, answer: ev.Reply) -> ev.Reply:
        count = len(answer.body["tokens"])
        self.to_come[answer.token] -= count
        self.past[answer.token] += count
        return answer

    def renew(self, request: Request) -> None:
        self.renewed.add(request.token)

    def prepare(self, request: Request) -> Run | None:
        return None if request.token in self.parked else self.run_for(request.token)

    def poll(self, waiting: Mapping[ev.Token, Request]) -> list[tuple[ev.Token, Run]]:
        return [(token, self.run_for(token)) for token in waiting if token not in self.parked]

    def run_for(self, token: ev.Token) -> Run:
        inputs, params = inputs_of(self.past[token], 1), self.sampling_params(token)
        return Run(request_id=f"r{token}", inputs=inputs, sampling_params=params, cache=token)

    @property
    def sizes(self) -> list[int]:
        return [len(run.runs) for _, run in self.runs]


def inputs_of(past: int, length: int) -> tuple[SlabTensor, ...]:
    shapes = {"ids": (1, length), "count": (1,), "used": (1,), "cache": (1, past, 3)}
    return tuple(
        SlabTensor(
            name=name, dtype="int64", shape=shape, offset_bytes=0, size_bytes=8 * math.prod(shape)
        )
        for name, shape in shapes.items()
    )


def test_generations_are_one_run_however_they_began() -> None:
    """Begin eight generations at different times; they must not split into two batches for good."""
    for starts in ([0.0] * 8, [n * 3.1 for n in range(8)], [9.0 * (n % 2) for n in range(8)]):
        server = Steps()
        tokens = []
        for at_ms, before_ms in zip(sorted(starts), [0.0, *sorted(starts)], strict=False):
            server.run(server.now_ms + at_ms - before_ms)
            tokens.append(server.step(past=40, tokens=20))
        server.run()
        assert sum(server.sizes) == 8 * 20
        assert server.sizes[6:17] == [8] * 11, starts
        assert all(server.answers[token][1].error is None for token in tokens)


def test_the_next_run_begins_in_the_moment_in_which_the_last_one_ended() -> None:
    server = Steps()
    for _ in range(8):
        server.step(past=40, tokens=10)
    server.run()
    begins = [at_ms for at_ms, _ in server.runs][2:]
    gaps = [later - earlier for earlier, later in pairwise(begins)]
    assert max(gaps) - min(gaps) < 1e-6
    server, alone = Steps(), 0.0
    server.step(past=40, tokens=2)
    server.run()
    (first, _), (second, _) = server.runs
    alone = second - first
    server = Steps()
    token = server.step(past=40, tokens=10)
    server.run()
    assert server.sizes == [1] * 10
    assert server.runs[-1][0] - server.runs[0][0] == pytest.approx(9 * alone)
    timing = server.answers[token][1].timing
    assert timing is not None
    assert timing.queue_ms == 0.0
    assert timing.compute_ms == pytest.approx(10 * COMPUTE_MS, rel=0.01)
    assert timing.total_ms >= timing.compute_ms


def test_one_that_waits_for_room_costs_the_others_nothing_and_joins_again() -> None:
    server = Steps()
    tokens = [server.step(past=40, tokens=8) for _ in range(4)]
    server.run(server.now_ms + 0.5)
    server.parked.add(tokens[1])
    while server.to_come[tokens[0]] > 4:
        server.run(server.now_ms + 0.5)
    assert server.sizes[-1] == 3
    server.parked.clear()
    server.handle(ev.PoolFreed())
    server.run()
    assert server.sizes[5:7] == [4, 4]
    assert all(server.answers[token][1].error is None for token in tokens)


@pytest.mark.parametrize("when", ["waits", "computes", "is parked"])
def test_a_generation_that_is_cancelled_ends_with_its_run_at_the_latest(when: str) -> None:
    server = Steps()
    if when == "waits":
        server.ask_behind(0)
    token, other = (server.step(past=40, tokens=200) for _ in range(2))
    server.run(server.now_ms + 0.5)
    if when == "is parked":
        server.parked.add(token)
        server.run(server.now_ms + 3 * COMPUTE_MS)
        assert server.to_come[token] < 200
    server.handle(ev.CancelRequest(token=token))
    before = server.to_come[token]
    server.run(server.now_ms + 5 * COMPUTE_MS)
    assert isinstance(server.answers[token][1].error, errors.Cancelled)
    assert server.to_come[token] == before
    assert other not in server.answers
    server.handle(ev.CancelRequest(token=other))
    server.run()


def test_an_urgent_request_of_another_model_goes_between_two_runs() -> None:
    server = Steps()
    server.run_of = 8
    for _ in range(3):
        server.step(past=40, tokens=64)
    server.run(server.now_ms + 1.0)
    token = server.ask("other", priority=0)
    server.run()
    models = [run.model for _, run in server.runs]
    assert models.index("other") <= 2
    assert server.answers[token][1].error is None


@pytest.mark.parametrize(("max_wait_ms", "switches"), [(2000.0, [1]), (20.0, [1, 2, 3])])
def test_a_generation_keeps_its_model_on_a_full_device_until_others_have_waited(
    max_wait_ms: float, switches: list[int]
) -> None:
    server = Steps(arena_bytes=7 * MIB, max_wait_ms=max_wait_ms)
    tokens = [server.step(past=40, tokens=60)]
    server.run(server.now_ms + 1.5)
    tokens += [server.ask("other") for _ in range(2)]
    server.run()
    models = [run.model for _, run in server.runs]
    assert sum(one != after for one, after in pairwise(models)) in switches
    assert (models.index("other") < models.count("lm")) == (max_wait_ms < 1000.0)
    assert all(server.answers[token][1].error is None for token in tokens)


def test_a_generation_waits_for_room_until_its_deadline_and_keeps_nobody_waiting() -> None:
    server = Steps(arena_bytes=7 * MIB)
    token = server.step(past=40, tokens=60)
    late = server.step(past=40, tokens=60, deadline_at_ms=server.now_ms + 50.0)
    server.run(server.now_ms + 0.5)
    server.parked.update((token, late))
    other_token = server.ask("other")
    server.run()
    assert server.answers[other_token][1].error is None
    assert isinstance(server.answers[late][1].error, errors.DeadlineExceeded)
    server.parked.clear()
    server.handle(ev.PoolFreed())
    server.run()
    assert server.answers[token][1].error is None


@pytest.mark.parametrize("waits", [False, True])
def test_a_generation_whose_model_leaves_reads_why(waits: bool) -> None:
    server = Steps()
    token = server.step(past=40, tokens=50)
    server.run(server.now_ms + 0.5)
    if waits:
        server.parked.add(token)
        server.run(server.now_ms + 3 * COMPUTE_MS)
    server.handle(ev.UnregisterRequest(token=server.clients.token(), model=ModelName("lm")))
    server.run()
    assert isinstance(server.answers[token][1].error, errors.ModelNotFound)


@pytest.mark.parametrize(
    ("tokens", "ms"),
    [((), 0), (((),), 0), (((1, 1),), 0), (((1,), (1,)), 0)]
    + [(((1,),), ms) for ms in (math.nan, math.inf, -1e300, 1e306)],
)
def test_a_worker_that_chooses_too_many_tokens_or_none_is_killed(tokens: Any, ms: float) -> None:
    server = Steps()
    token = server.step(past=40, tokens=3)
    [device] = server.scheduler.machine.devices
    task = device.state.owner.running
    assert task is not None
    done = done_of(task.op_id, ended_at_ms=1.0, stall_ms=ms, tokens=tokens)
    worker = device.state.workers[task.slot]
    device.completion.done(worker, done)
    assert worker.kill_reason
    assert device.state.requests[token].state.state is TaskState.RUNNING


def test_each_run_has_its_own_deaths_and_its_own_deadline() -> None:
    """A generation may lose more workers in sum than a single run may lose."""
    server = Steps()
    token = server.step(past=40, tokens=12)
    for _ in range(5):
        server.faults["poison"] = ["lm"]
        before = server.to_come[token]
        while server.to_come[token] > before - 2:
            server.run(server.now_ms + 5.0)
    server.run()
    assert server.answers[token][1].error is None


def test_lengths_are_joined_as_far_as_padding_pays() -> None:
    server = Steps()
    server.ask_behind(0)
    shapes = [(40, 1), (60, 1), (400, 1), (64, 1), (390, 1), (1, 33), (1, 40), (64, 1)]
    tokens = [server.step(past=past, length=length) for past, length in shapes]
    server.run()
    groups = [one for one in server.batched() if set(one) <= set(tokens)]
    assert groups == [[tokens[n] for n in one] for one in ([0, 1, 3, 7], [2, 4], [5, 6])]


def test_what_is_joined_together_has_room_in_a_workers_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(batching, "MAX_JOINED_BYTES", 3 * 8 * (3 * 40 + 3))  # fits three requests
    server = Steps()
    server.ask_behind(0)
    for _ in range(7):
        server.step(past=40)
    server.run()
    assert [len(run.runs) for _, run in server.runs if run.model == "lm"] == [3, 3, 1]


def test_the_requests_of_a_run_that_failed_are_tried_alone_and_the_next_ones_joined() -> None:
    server = Steps()
    server.ask_behind(0)
    for _ in range(8):
        server.step(past=40, tokens=8)
    server.run(server.now_ms + 3 * COMPUTE_MS)
    server.runs.clear()
    server.faults["infer_error"] = ["lm"]
    server.run()
    sizes = server.sizes[server.sizes.index(1) :]
    assert sizes[:8] == [1] * 8
    assert sizes[-3:] == [8] * 3


def test_steps_that_follow_one_another_end_when_another_request_waits() -> None:
    """Interrupt each run once, even for a request of its own model, which may join the next run."""
    for other in ("lm", "other"):
        server = Steps()
        server.run_of = 8
        server.step(past=40, tokens=8)
        server.run(server.now_ms + 1.0)
        assert not server.interrupts
        server.run_of = 1
        for _ in range(2):
            server.step(past=40) if other == "lm" else server.ask(other)
        server.run(server.now_ms + 1.0)
        (_, run), *_ = server.runs
        assert [one.op_id for one in server.interrupts] == [run.op_id]
        server.run()
        assert len({one.op_id for one in server.interrupts}) == len(server.interrupts)


def test_a_model_is_expected_to_take_a_step_and_not_a_run_of_several() -> None:
    server = Steps()
    server.run_of = 4
    for _ in range(30):
        server.step(past=40, tokens=4)
        server.run(server.now_ms + 100.0)
    [device] = server.scheduler.machine.devices
    known = device.state.predictions.predict("lm", 1)
    assert known.compute_ms == pytest.approx(COMPUTE_MS / 4, rel=0.05)


@pytest.mark.parametrize("event", ["", "cancelled", "dead"])
@pytest.mark.parametrize("others", [1, 9])
def test_generations_run_after_the_leader_with_their_tokens(others: int, event: str) -> None:
    server = Steps()
    server.ask_behind(0)
    leader = server.step(past=1, length=40, tokens=3)
    led = [server.step(past=1, length=40, tokens=3, leader=leader) for _ in range(others)]
    server.faults["poison"] = ["lm"] * (event == "dead")
    if event == "cancelled":
        server.handle(ev.CancelRequest(token=leader))
    server.run()
    assert not any(map(server.error, led))
    if not event:  # the inputs of the requests in ``led`` were requested again
        pieces = [run for _, run in server.runs if run.runs[0].inputs[0].shape[1] > 1]
        assert all(len(run.runs) == 1 for run in pieces)
        assert server.renewed == {*led}
