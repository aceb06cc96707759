"""Budgets for calls of Python functions, mostly the scheduler's; each run has equally many."""

# mypy: disable-error-code="arg-type, union-attr, misc"

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, cast

import pytest

from pipeswitch.base.config import LogConfig
from pipeswitch.base.roles import OWNER
from pipeswitch.frontend.intake.request_log import RateLimitedLog, RequestLog
from pipeswitch.frontend.requests import Requests
from pipeswitch.frontend.transport.clients import Session
from pipeswitch.ipc.messages import worker as worker_msg
from pipeswitch.scheduler.state import events as ev
from pipeswitch.scheduler.state.events import Reply
from pipeswitch.wire.frames import RequestHeader
from tests.unit.arrivals import done_of, parked_of
from tests.unit.request_rig import clients_calls, gateways_calls, workers_calls
from tests.unit.test_scheduler_rules import MIB, Rig


@dataclass
class Spent:
    """Number of calls between two points, and the files that have the called functions."""

    calls: int = 0
    files: set[str] = field(default_factory=set)

    def note(self, frame: FrameType, what: str, _: Any) -> None:
        name = frame.f_code.co_filename
        if what == "call" and "pipeswitch/scheduler" in name:
            self.calls += 1
            self.files.add(Path(name).name)

    @contextmanager
    def counting(self) -> Iterator[None]:
        before = sys.getprofile()
        sys.setprofile(self.note)
        try:
            yield
        finally:
            sys.setprofile(before)


class Counted(Rig):
    """Server with ``models`` models, which all workers have loaded; "a" is resident."""

    def __init__(self, models: int = 1) -> None:
        self.spent = Spent()
        self.is_counting = False
        super().__init__(
            arena_bytes=256 * MIB, store_bytes=16 * MIB * (models + 1), fence_count=64 + 4 * models
        )
        for name in ("a", *(f"m{index}" for index in range(models - 1))):
            self.register(name)
        self.prepared()
        self.make_resident("a")

    def handle(self, event: ev.Event, at_ms: float | None = None) -> None:
        if not self.is_counting:
            super().handle(event, at_ms)
            return
        with self.spent.counting():
            commands = self.scheduler.decide(event, self.now_ms) + self.scheduler.run_deferred()
        self._take(commands)

    @contextmanager
    def counted(self) -> Iterator[Spent]:
        """Count the scheduler's calls while the context is open, but not the calls of checks."""
        self.spent, self.is_counting = Spent(), True
        yield self.spent
        self.is_counting = False
        self.scheduler.check()

    def computed(self) -> None:
        """End the task that computes; its worker is free at once."""
        task = self.state.owner.running
        self.worker(
            task.slot,
            done_of(
                task.op_id,
                ended_at_ms=1.0,
                is_clean=True,
                group_begins_at_ms=(0.0, 0.5),
                group_ends_at_ms=(0.5, 1.0),
            ),
        )

    def switch(self, name: str, job: Any) -> None:
        """Suspend a job for a request whose model must be copied, then continue the job."""
        self.infer(name)
        turn = self.state.owner.pending.turn
        self.worker(job.slot, parked_of(job.op_id, job.turn, turn))
        self.arrived(name)
        self.computed()


@pytest.mark.parametrize("models", [1, 300])
def test_a_warm_request_touches_what_it_needs(models: int) -> None:
    rig = Counted(models)
    rig.infer("a")
    rig.computed()
    with rig.counted() as spent:
        rig.infer("a")
        rig.computed()
    assert rig.answers[rig.last_token].error is None
    assert spent.calls <= 108  # earlier 416
    assert len(spent.files) <= 16  # earlier 34


def test_a_cold_request_that_preempts_a_job_touches_what_it_needs() -> None:
    rig = Counted(models=20)
    job = rig.start_training()
    rig.switch("m6", job)  # while the job is suspended, the server needs one more worker
    rig.worker(3, worker_msg.WorkerReady(slot=3, pid=13))
    rig.prepared()
    with rig.counted() as spent:
        rig.switch("m7", job)
    assert job.state.state.value == "running"
    assert spent.calls <= 476  # earlier 909
    assert len(spent.files) <= 28  # earlier 40


@pytest.mark.parametrize("models", [1, 300])
def test_a_training_report_concerns_nobody(models: int) -> None:
    rig = Counted(models)
    job = rig.start_training()
    with rig.counted() as spent:
        rig.worker(
            job.slot, worker_msg.JobReport(op_id=job.op_id, kind="progress", values={"step": 3})
        )
    assert spent.calls <= 35  # earlier 159


def test_a_request_over_http_costs_the_gateways_loop_so_many_calls(tmp_path: Path) -> None:
    pytest.importorskip("httptools", reason="make installs it")
    assert gateways_calls(tmp_path) <= 103  # in 2 iterations of the loop; earlier 293, in 5


def test_a_log_of_requests_that_is_off_costs_them_no_call_and_no_file(tmp_path: Path) -> None:
    log = RequestLog(tmp_path, LogConfig(), RateLimitedLog(lambda: 0.0))
    files: list[str] = []

    def note(frame: FrameType, what: str, _: Any) -> None:
        files.append(Path(frame.f_code.co_filename).name)

    client = Session(peer=SimpleNamespace(), principal=OWNER)
    requests = Requests(SimpleNamespace(memory_of=lambda _: memoryview(b"")), log, cast(Any, None))
    before = sys.getprofile()
    sys.setprofile(note)
    try:
        pending = requests.accept(client, RequestHeader(v=1, op="infer", id="1", model="m"))
        outgoing = requests.end(pending, Reply(token=pending.token))
        outgoing.on_end(True)
    finally:
        sys.setprofile(before)
    assert requests.inference.ok == 1
    assert "requests.py" in files
    assert "request_log.py" not in files
    assert not [*tmp_path.iterdir()]


def test_a_request_costs_its_caller_so_many_calls(tmp_path: Path) -> None:
    assert clients_calls(tmp_path) <= 42  # earlier 98


def test_a_request_costs_its_worker_so_many_calls() -> None:
    assert workers_calls() <= 68  # earlier 75
