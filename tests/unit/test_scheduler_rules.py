"""Rules of the scheduler, one at a time."""

from __future__ import annotations

import dataclasses
import json
import math
import signal
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from pipeswitch.base import errors
from pipeswitch.ipc.messages.base import ModelName, StepCommitted
from pipeswitch.ipc.messages.builder import BuildDone, BuildFailed
from pipeswitch.ipc.messages.daemon import (
    CommitCopy,
    CommitPersisted,
    DaemonFault,
    DaemonReady,
    ModelStored,
    PersistCommit,
    Scrub,
    Scrubbed,
    StoreFailed,
    StoreModel,
    TransmitEnded,
    TransmitModel,
)
from pipeswitch.ipc.messages.worker import (
    BindTenant,
    CommitStep,
    EvictTask,
    GrantTurn,
    HostGranted,
    HostRequest,
    InferenceFailed,
    JobEnded,
    JobReady,
    JobReport,
    LeaseGranted,
    LeaseRefused,
    LeaseRequest,
    ModelPrepared,
    PrepareModel,
    PublishAnswered,
    PublishCopied,
    PublishStep,
    RunInference,
    RunJob,
    StopTask,
    WorkerClean,
    WorkerReady,
)
from pipeswitch.programs.interface.layout import ValueSpec
from pipeswitch.scheduler.models.publishing import MAX_COPIES
from pipeswitch.scheduler.scheduler import Scheduler
from pipeswitch.scheduler.state import events as ev
from pipeswitch.scheduler.state.core import SchedulerSettings
from pipeswitch.scheduler.state.events import JobSpec
from pipeswitch.scheduler.state.records import DeviceModel
from pipeswitch.scheduler.state.regions import Owner
from pipeswitch.scheduler.state.states import ModelState, Residency, TaskState, WorkerState
from pipeswitch.scheduler.training.jobs import RestoredJob
from pipeswitch.scheduler.training.training import (
    FORGIVEN_AFTER,
    MAX_MISSED,
    STARVED_CYCLES,
    STARVED_STEPS,
)
from tests.unit.arrivals import arrival, done_of, parked_of
from tests.unit.fleet_model import manifest_of

MIB = 1 << 20


def tenant_of(model: str) -> str:
    """Return a model's tenant: ``ada`` for ``ada.m``, and empty (the owner) for ``m``."""
    return model.rpartition(".")[0]


def test_one_part_takes_each_question() -> None:
    takers = Rig().scheduler._takers
    own = {one for one in ev.ClientRequest.__subclasses__() if one.__module__ == ev.__name__}
    assert {*takers} == own - {ev.InferArrived}  # extras have requests, and parts, of their own


def builder(op_id: Any) -> ev.Address:
    return ev.Address("builder", incarnation=op_id)


def received(message: Any, **read: Any) -> ev.Received:
    """Return a builder's message as an event; ``read`` has the values that were read from disk."""
    return ev.Received(builder(message.op_id), message, **read)


def exited(op_id: Any, status: int) -> ev.Exited:
    return ev.Exited(builder(op_id), status)


class Rig:
    """Scheduler that gets events from a test; ``out`` has the commands for the last event."""

    def __init__(self, **settings: Any) -> None:
        values = {
            "arena_bytes": 64 * MIB,
            "store_bytes": 256 * MIB,
            "fence_count": 64,
            "standby": 2,
            "restart_backoff_ms": 100.0,
            **settings,
        }
        policy, queues = values.pop("policy", "priority"), values.pop("queues", {})
        parts = values.pop("parts", ())
        own = {key: values.pop(key) for key in ("slices_move", "max_swapped") if key in values}
        each = SchedulerSettings(**values)
        devices = [dataclasses.replace(each, **own)]
        self.scheduler = Scheduler(each, policy, 2000.0, devices, queues, parts)
        self.core = self.scheduler.core
        self.state = self.scheduler.machine.devices[0].state
        self.now_ms = 0.0
        self.last_token = 0
        self.answers: dict[int, ev.Reply] = {}
        self.out: list[ev.Command] = []
        self._take(self.scheduler.start(0.0))
        self.daemon(DaemonReady(pid=1))
        for slot in list(self.state.workers):
            self.worker(slot, WorkerReady(slot=slot, pid=10 + slot))

    def _take(self, commands: list[ev.Command]) -> None:
        self.out = commands
        for command in commands:
            if isinstance(command, ev.Reply) and not command.more:
                assert command.token not in self.answers, "answered twice"
                self.answers[command.token] = command

    def handle(self, event: ev.Event, at_ms: float | None = None) -> None:
        self.now_ms = self.now_ms if at_ms is None else at_ms
        self._take(self.scheduler.handle(event, self.now_ms))
        self.scheduler.check()

    def daemon(self, message: Any) -> None:
        self.handle(ev.Received(self.state.daemon.address, message))

    def worker(self, slot: int, message: Any) -> None:
        self.handle(ev.Received(self.state.address(slot), message))

    def worker_exits(self, slot: int, status: int = -9) -> None:
        self.handle(ev.Exited(self.state.address(slot), status))

    def daemon_exits(self) -> None:
        self.handle(ev.Exited(self.state.daemon.address, -9))

    def daemon_returns(self) -> None:
        """Report the exits of the dead daemon's workers, and make the next daemon ready."""
        for slot in list(self.state.workers):
            self.worker_exits(slot)
        self.daemon(DaemonReady(pid=2))

    def worker_restarts(self, slot: int, status: int = -9) -> None:
        """Report a worker's exit, and make the next process in its slot ready."""
        self.worker_exits(slot, status)
        while self.state.workers[slot].state.state is WorkerState.DEAD:
            due = self.scheduler.next_wakeup_ms()
            assert due is not None
            self.tick(due)
        self.worker(slot, WorkerReady(slot=slot, pid=99))

    def tick(self, at_ms: float) -> None:
        self.handle(ev.Tick(), at_ms)

    def token(self) -> ev.Token:
        self.last_token += 1
        return ev.Token(self.last_token)

    def ask(self, kind: type, **fields: Any) -> ev.Token:
        """Send an event that gets an answer; return the event's token."""
        token = self.token()
        self.handle(kind(token=token, **fields))
        return token

    def sent(self, kind: type) -> list[Any]:
        """Return the messages of one kind, to any process, among the last commands."""
        return [
            command.message
            for command in self.out
            if isinstance(command, ev.Send) and isinstance(command.message, kind)
        ]

    def commands(self, kind: type) -> list[Any]:
        return [command for command in self.out if isinstance(command, kind)]

    def error(self, token: int) -> Any:
        return self.answers[token].error

    # -- steps of several events ---------------------------------------------------------------

    def ask_register(
        self, name: str, *, spec: str = "", pin: bool = False, **fields: Any
    ) -> ev.Token:
        spec = spec or f"spec of {name}"
        fields = {"spec_digest": spec, "tenant": tenant_of(name), "priority": 1, **fields}
        return self.ask(
            ev.RegisterModelRequest,
            model=name,
            spec=spec.encode("latin1"),
            is_pinned=pin,
            **fields,
        )

    def begin(self, name: str, **fields: Any) -> tuple[ev.Token, Any]:
        """Register a model, whose build begins; return the request's token and the build's id."""
        token = self.ask_register(name, **fields)
        return token, self.commands(ev.StartBuild)[0].op_id

    def register(self, name: str, mib: int = 10, *, pin: bool = False) -> None:
        token, op_id = self.begin(name, pin=pin)
        self.built(name, mib, op_id)
        self.stored(name, op_id)
        assert self.error(token) is None
        self.prepared()

    def prepared(self) -> None:
        """Finish all preparations, until no worker prepares a model."""
        while busy := [w for w in self.state.workers.values() if w.preparing is not None]:
            for worker in busy:
                name = worker.preparing
                self.worker(worker.slot, ModelPrepared(model=name, digest=f"digest {name}"))

    def built(self, name: str, mib: int, op_id: Any) -> None:
        manifest = manifest_of(f"digest {name}", mib * MIB, 2)
        if name.startswith("code"):
            manifest = msgspec.structs.replace(manifest, mode="module")
        done = BuildDone(model=name, op_id=op_id, digest=manifest.digest)
        self.handle(received(done, manifest=manifest))

    def stored(self, name: str, op_id: Any) -> None:
        """Finish a registration: report its builder's exit, and its bytes as stored."""
        self.handle(exited(op_id, 0))
        self.daemon(ModelStored(model=name, op_id=op_id, load_ms=1.0))

    def infer(self, name: str, *, deadline_ms: float | None = None, **fields: Any) -> ev.Token:
        at_ms = None if deadline_ms is None else self.now_ms + deadline_ms
        token = self.token()
        own = {"digest": f"digest {name}", "tenant": self.pool_of(name), "deadline_at_ms": at_ms}
        self.handle(arrival(token, name, self.now_ms, **(own | fields)))
        return token

    def pool_of(self, name: str) -> str:
        """Return the tenant whose request pool file has a model's requests."""
        replica = self.state.replicas.get(name)
        return "" if replica is None else self.core.tenant_of(replica.model.tenant)

    def arrived(self, name: str, *, is_complete: bool = True) -> None:
        op_id = self.state.replicas[name].residency_id
        self.daemon(
            TransmitEnded(
                model=name,
                op_id=op_id,
                is_complete=is_complete,
                group_count=2,
                copied_bytes=1,
                started_at_ms=0.0,
                ended_at_ms=self.now_ms,
            )
        )

    def done(self) -> None:
        """End the task that computes, without an error; its worker then cleans up."""
        task = self.state.owner.running
        self.worker(task.slot, done_of(task.op_id))
        out = self.out
        self.worker(task.slot, WorkerClean(op_id=task.op_id))
        self.out = out + self.out

    def make_resident(self, *names: str) -> None:
        for name in names:
            self.infer(name)
            self.arrived(name)
            self.done()

    def train(self, name: str, *, priority: int = 1) -> Any:
        """Submit a job; return its record."""
        self.handle(
            ev.TrainRequest(
                token=self.token(),
                spec=ev.JobSpec(name=name, entry="t.py", args=(), priority=priority),
            )
        )
        return self.state.jobs[name]

    def lease(self, job: Any, mib: int = 10) -> None:
        request = LeaseRequest(op_id=job.op_id, slice_bytes=mib * MIB, state_bytes=MIB)
        self.worker(job.slot, request)

    def start_training(self, name: str = "cifar", mib: int = 10) -> Any:
        job = self.train(name)
        self.lease(job, mib)
        assert self.sent(LeaseGranted)
        assert job.state.state is TaskState.RUNNING
        return job

    def commit(self, job: Any, number: int, step: int) -> None:
        """Send a job's request for a commit, to which the daemon does not answer yet."""
        message = CommitStep(op_id=job.op_id, number=number, step=step, ranges=())
        self.worker(job.slot, message)

    def flip(self, job: Any, number: int, step: int) -> None:
        """Send the memory daemon's answer to a commit."""
        self.daemon(
            StepCommitted(job=job.spec.name, op_id=job.op_id, number=number, step=step, copy_ms=1.0)
        )

    def committed(self, job: Any, number: int, step: int) -> None:
        """Finish a commit in the host store; if a write to disk is due, the scheduler orders it."""
        self.commit(job, number, step)
        self.flip(job, number, step)

    def written(self, job: Any, step: int) -> None:
        """Report a commit as written to disk."""
        self.daemon(CommitPersisted(job=job.spec.name, op_id=job.op_id, step=step))

    def scrubbed(self) -> None:
        """Report the released range as zeroed."""
        (scrub,) = self.sent(Scrub)
        self.daemon(Scrubbed(op_id=scrub.op_id))

    def park(self, job: Any, next_turn: int = 0, where: Any = "forward") -> None:
        self.worker(job.slot, parked_of(job.op_id, job.turn, next_turn, where))

    def switch(self, job: Any, model: str = "a") -> None:
        """Suspend the job, and serve one request to a resident model."""
        self.infer(model)
        self.park(job, self.state.owner.pending.turn)
        self.done()

    def job_ends(self, job: Any, outcome: Any, step: int = 3) -> int:
        slot = int(job.slot)
        self.worker(
            slot,
            JobEnded(
                op_id=job.op_id,
                outcome=outcome,
                step=step,
                error_type="ValueError",
                error_text="nan",
            ),
        )
        return slot

    def job_asked(self, name: str, action: Any) -> ev.Token:
        return self.ask(ev.JobRequest, job=name, action=action)

    def residency(self, name: str) -> Any:
        return self.state.replicas[name].residency.state


@pytest.fixture
def rig(request: Any) -> Rig:
    return Rig(**getattr(request, "param", {}))


# -- a request that arrives before its model's bytes (after a restart) --------------------------


def awaited(rig: Rig, name: str = "a") -> int:
    """Build a model whose bytes are not stored yet; return its operation id."""
    _, op_id = rig.begin(name)
    rig.built(name, 10, op_id)
    assert [command.model for command in rig.commands(ev.ModelAvailable)] == [name]
    rig.handle(exited(op_id, 0))
    return int(op_id)


def test_requests_wait_for_a_model_that_is_being_stored(rig: Rig) -> None:
    op_id = awaited(rig)
    first, second = rig.infer("a"), rig.infer("a")
    assert not rig.sent(RunInference)
    assert not rig.answers
    rig.daemon(ModelStored(model="a", op_id=op_id, load_ms=1.0))
    runs = rig.sent(RunInference)
    assert [run.runs[0].request_id for run in runs] == [f"r{first}", f"r{second}"]
    rig.done()
    rig.done()
    assert rig.error(first) is None
    assert rig.error(second) is None


def test_a_request_that_waits_for_its_model_holds_nobody_up(rig: Rig) -> None:
    job = rig.start_training()
    rig.register("b")
    awaited(rig)
    rig.infer("a", priority=0)
    assert job.state.state is TaskState.RUNNING
    rig.infer("b", priority=2)
    (run,) = rig.sent(RunInference)
    assert run.model == "b"


def test_who_waited_for_a_model_that_cannot_be_stored_reads_why(rig: Rig) -> None:
    op_id = awaited(rig)
    token = rig.infer("a")
    rig.daemon(StoreFailed(model="a", op_id=op_id, reason="the digest does not match"))
    assert isinstance(rig.error(token), errors.RegistrationRefused)
    assert [command.model for command in rig.commands(ev.ModelRemoved)] == ["a"]
    assert isinstance(rig.error(rig.infer("a")), errors.ModelNotFound)


def test_a_request_that_waits_for_its_model_expires_and_is_taken_back(rig: Rig) -> None:
    awaited(rig)
    late, unwanted = rig.infer("a", deadline_ms=50.0), rig.infer("a")
    rig.tick(51.0)
    rig.handle(ev.CancelRequest(token=unwanted))
    assert isinstance(rig.error(late), errors.DeadlineExceeded)
    assert isinstance(rig.error(unwanted), errors.Cancelled)


def test_requests_that_wait_for_their_model_are_bounded_too() -> None:
    rig = Rig(max_queue_per_model=2)
    awaited(rig)
    tokens = [rig.infer("a") for _ in range(3)]
    assert isinstance(rig.error(tokens[2]), errors.QueueFull)


def test_a_server_that_leaves_answers_who_waits_for_a_model(rig: Rig) -> None:
    awaited(rig)
    token = rig.infer("a")
    rig.handle(ev.DrainRequest(token=None, grace_ms=10.0))
    rig.tick(11.0)
    assert isinstance(rig.error(token), errors.ServerUnavailable)


# -- a request ----------------------------------------------------------------------


def test_a_cold_request_transmits_and_activates_in_the_same_breath(rig: Rig) -> None:
    rig.register("a")
    rig.infer("a")
    (order,), (run,) = rig.sent(TransmitModel), rig.sent(RunInference)
    assert (run.residency_id, run.arena_offset_bytes) == (order.op_id, order.arena_offset_bytes)
    assert run.first_fence == order.groups[0].fence
    assert [command.turn for command in rig.commands(ev.RaiseTurn)] == [run.op_id]


def test_a_request_during_training_transmits_activates_and_stops_in_one_call(rig: Rig) -> None:
    rig.register("a")
    job = rig.start_training()
    rig.infer("a")
    assert rig.sent(TransmitModel)
    (run,), (stop,) = rig.sent(RunInference), rig.sent(StopTask)
    assert (stop.turn, stop.next_turn) == (job.turn, run.op_id)
    assert not rig.commands(ev.RaiseTurn), "the parking worker raises it, not the controller"


def test_a_suspended_job_resumes_in_place_when_the_queue_is_empty(rig: Rig) -> None:
    rig.register("a")
    job = rig.start_training()
    slot, op_id, turn = job.slot, job.op_id, job.turn
    token = rig.infer("a")
    rig.park(job, rig.state.owner.pending.turn)
    assert job.state.state is TaskState.SUSPENDED
    assert not rig.commands(ev.RaiseTurn), "the parked worker has raised it itself"
    rig.done()
    assert rig.answers[token].timing.preempted == "cifar"
    (grant,) = rig.sent(GrantTurn)
    assert (grant.op_id, job.slot, job.op_id) == (op_id, slot, op_id)
    assert grant.turn > turn
    assert not rig.sent(RunJob)


def test_a_job_that_waits_behind_requests_says_so(rig: Rig) -> None:
    def why() -> list[str]:
        listed = rig.answers[rig.ask(ev.Query, what="ps")].body["rows"]
        shown = rig.answers[rig.job_asked("cifar", "show")].body["job"]["why"]
        return [shown, *(row["why"] for row in listed if row["name"] == "cifar")]

    rig.register("a")
    rig.make_resident("a")
    job = rig.start_training()
    assert why() == ["", ""]
    rig.infer("a")
    assert why() == 2 * ["waits behind 1 request"]
    rig.park(job, rig.state.owner.pending.turn)
    rig.infer("a")
    assert why() == 2 * ["waits behind 2 requests"]
    rig.done()
    rig.done()
    assert why() == ["", ""]


def test_what_a_task_does_before_its_first_group_belongs_to_the_switch_alone(rig: Rig) -> None:
    """The time from turn (10 ms) to first group (50 ms) is switch time. A later wait takes 5 ms."""
    rig.register("a")
    token = rig.infer("a")
    rig.arrived("a")
    task, began_ms = rig.state.owner.running, rig.now_ms
    rig.now_ms += 90.0
    at = {"turn_at_ms": 10.0, "first_group_at_ms": 50.0, "ended_at_ms": 85.0}
    times = {name: began_ms + ms for name, ms in at.items()}
    rig.worker(task.slot, done_of(task.op_id, stall_ms=45.0, **times))
    timing = rig.answers[token].timing
    assert (timing.switch_ms, timing.stall_ms, timing.compute_ms) == (50.0, 5.0, 30.0)
    assert timing.total_ms == 90.0


def test_the_answer_may_arrive_before_the_parked_of_the_job_it_preempted(rig: Rig) -> None:
    rig.register("a")
    job = rig.start_training()
    token = rig.infer("a")
    task = rig.state.owner.pending
    rig.worker(task.slot, done_of(task.op_id))
    assert rig.error(token) is None
    rig.park(job, task.turn)
    assert rig.sent(GrantTurn), "nobody waits: training goes on"


def test_a_stop_that_names_a_dead_worker_s_turn_does_not_lose_the_next_request(rig: Rig) -> None:
    rig.register("a")
    job = rig.start_training()
    token = rig.infer("a")
    first = rig.state.owner.pending
    rig.worker_exits(first.slot)
    second = rig.state.owner.pending
    assert second.op_id > first.op_id
    rig.park(job, first.turn)  # the turn of a dead worker
    assert [command.turn for command in rig.commands(ev.RaiseTurn)] == [second.turn]
    rig.done()
    assert rig.error(token) is None


def test_a_parked_that_is_late_behind_its_own_end_frees_the_board(rig: Rig) -> None:
    rig.register("a")
    job = rig.start_training()
    rig.infer("a")
    first = rig.state.owner.pending
    op_id, turn, slot = job.op_id, job.turn, rig.job_ends(job, "done")
    rig.infer("a")
    rig.done()
    rig.worker(slot, parked_of(op_id, turn, first.turn, "loader"))
    assert len(rig.commands(ev.RaiseTurn)) == 1


def test_the_next_request_is_sent_while_the_first_computes(rig: Rig) -> None:
    rig.register("a")
    rig.register("b")
    rig.infer("a")
    rig.infer("b")
    assert not rig.sent(TransmitModel), "behind a's copy no other could overtake it"
    rig.arrived("a")
    assert rig.sent(TransmitModel)
    assert rig.sent(RunInference)
    assert not rig.commands(ev.RaiseTurn)
    rig.done()
    assert rig.state.owner.running.model == "b"


def test_low_priority_requests_do_not_protect_their_model_from_a_high_one() -> None:
    rig = Rig(arena_bytes=96 * MIB)
    for name in "abc":
        rig.register(name, 30)
    rig.make_resident("a", "b", "c")
    rig.infer("a")
    rig.infer("b")
    rig.infer("c", priority=2)
    rig.register("big", 30)
    rig.infer("big", priority=0)
    assert [order.model for order in rig.sent(TransmitModel)] == ["big"]


def test_a_lower_priority_does_not_slip_in_front_of_one_that_waits_for_memory(rig: Rig) -> None:
    rig.register("small", 5)
    rig.register("other", 5)
    rig.register("big", 60)
    rig.infer("small")
    rig.infer("big", priority=0)
    rig.infer("other", priority=2)
    assert rig.state.owner.pending is None, "'other' would keep the place of 'big' in use"
    rig.arrived("small")
    rig.done()
    assert rig.state.owner.running.model == "big"


def test_small_models_overtake_a_large_one_only_until_it_has_waited_too_long(rig: Rig) -> None:
    rig.register("small", 5)
    rig.register("other", 5)
    rig.register("big", 60)
    rig.infer("small")
    rig.arrived("small")
    rig.infer("big")
    rig.infer("other")
    assert rig.state.owner.pending.model == "other"
    rig.now_ms = 2000.0
    rig.done()
    rig.infer("small")
    assert rig.state.owner.pending is None
    rig.arrived("other")
    rig.done()
    assert rig.state.owner.running.model == "big"


def test_a_model_moves_rather_than_evict_another_while_there_is_room(rig: Rig) -> None:
    rig.register("a", 20)
    rig.register("b", 40)
    rig.register("c", 20)
    rig.make_resident("a", "b")  # "a" gets the lowest address
    rig.make_resident("c")  # evicts "a", which was used before "b"
    assert rig.residency("a") is Residency.HOST
    rig.ask(ev.UnregisterRequest, model="b")
    rig.make_resident("a")
    assert rig.residency("c") is Residency.RESIDENT, "a's home is taken, but there is room"


def test_any_idle_model_leaves_rather_than_a_request_waits_for_a_range_being_zeroed() -> None:
    rig = Rig(arena_bytes=24 << 30, store_bytes=64 << 30)
    rig.register("small")
    rig.register("hot", 11 << 10)
    rig.register("b", 11 << 10)
    job = rig.start_training(mib=11 << 10)
    rig.job_asked("cifar", "cancel")
    rig.worker_exits(rig.job_ends(job, "preempted"))  # the daemon now zeroes the job's slice
    rig.make_resident("small", "hot")
    hot = rig.state.replicas["hot"]
    hot.priority, hot.use_count = 0, 8
    rig.infer("small"), rig.infer("small")
    rig.infer("hot")
    hot.last_used_at_ms = rig.now_ms
    rig.infer("b", priority=0)
    rig.done()
    assert rig.residency("b") is Residency.TRANSMITTING
    assert rig.residency("hot") is Residency.HOST


def test_messages_name_their_files_in_full() -> None:
    rig = Rig(
        models_dir="/s/models", logs_dir="/s/logs", commits_dir="/s/commits", commit_every_ms=0.0
    )
    rig.built("a", 4, (rig.ask_register("a"), rig.commands(ev.StartBuild)[0].op_id)[1])
    (store,) = rig.sent(StoreModel)
    assert store.directory == "/s/models/digest a"
    job = rig.train("cifar")
    assert [m.log_path for m in rig.sent(RunJob)] == ["/s/logs/job-cifar.log"]
    rig.lease(job)
    rig.commit(job, 1, 1)
    rig.flip(job, 1, 1)
    assert [m.directory for m in rig.sent(PersistCommit)] == ["/s/commits/cifar"]
    rig.daemon(ModelStored(model="a", op_id=store.op_id, load_ms=1.0))
    assert [m.directory for m in rig.sent(PrepareModel)] == ["/s/models/digest a"]
    rig.prepared()
    rig.infer("a")
    assert [m.directory for m in rig.sent(RunInference)] == ["/s/models/digest a"]


def test_a_server_whose_workers_all_start_is_not_ready_in_its_statistics_either(rig: Rig) -> None:
    for slot in list(rig.state.workers):
        rig.worker_exits(slot)
    rig.tick(1000.0)
    assert {w.state.state for w in rig.state.workers.values()} == {WorkerState.STARTING}
    token = rig.ask(ev.Query, what="stats")
    assert rig.answers[token].body["ready"] is False is rig.scheduler.is_ready


def test_a_queued_request_can_be_taken_back_and_a_dispatched_one_is_answered(rig: Rig) -> None:
    rig.register("a")
    running, waiting, queued = rig.infer("a"), rig.infer("a"), rig.infer("a")
    for token in (running, waiting, queued):
        rig.handle(ev.CancelRequest(token=token))
    assert isinstance(rig.error(queued), errors.Cancelled)
    assert running not in rig.answers
    rig.done()
    rig.done()
    assert rig.error(running) is None
    assert rig.error(waiting) is None


def test_a_deadline_that_passes_in_the_queue_is_answered(rig: Rig) -> None:
    rig.register("a")
    rig.infer("a")
    rig.infer("a")
    token = rig.infer("a", deadline_ms=50.0)
    assert rig.scheduler.next_wakeup_ms() == 50.0
    rig.tick(50.0)
    assert isinstance(rig.error(token), errors.DeadlineExceeded)


def test_a_task_that_hangs_after_its_deadline_is_killed_and_answered_when_reaped(rig: Rig) -> None:
    rig.register("a")
    token = rig.infer("a", deadline_ms=50.0)
    task = rig.state.owner.running
    rig.tick(60.0)
    assert not rig.commands(ev.Kill)
    rig.tick(50.0 + rig.core.settings.deadline_grace_ms)
    assert rig.commands(ev.Kill)
    assert token not in rig.answers
    rig.worker_exits(task.slot)
    assert isinstance(rig.error(token), errors.DeadlineExceeded)


def test_a_task_that_computes_for_the_limit_is_killed_whatever_its_model_took_before(
    rig: Rig,
) -> None:
    limit_ms = rig.core.settings.max_compute_ms
    rig.register("a")
    rig.make_resident("a")
    rig.infer("a")
    rig.now_ms = limit_ms - 1.0
    rig.done()
    token = rig.infer("a")
    task = rig.state.owner.running
    while not rig.commands(ev.Kill):
        due = rig.scheduler.next_wakeup_ms()
        assert due is not None
        rig.tick(due)
    assert rig.now_ms == limit_ms - 1.0 + limit_ms
    assert token not in rig.answers, "its worker still writes"
    rig.worker_exits(task.slot)
    assert isinstance(rig.error(token), errors.DeadlineExceeded)
    assert "max_compute" in rig.error(token).hint
    assert not rig.sent(RunInference), "an endless loop is not tried again"


def test_a_run_that_ends_with_its_worker_is_charged_to_its_caller(rig: Rig) -> None:
    rig.register("a")
    rig.make_resident("a")
    rig.now_ms += 1.0
    rig.infer("a", caller="greedy")
    rig.now_ms += 50.0
    rig.worker_exits(rig.state.owner.running.slot)
    assert rig.state.accounts.of("greedy").used_ms == 50.0


@pytest.mark.parametrize("caller", ["mallory", ""])
def test_a_caller_whose_models_go_on_killing_workers_has_no_turn_for_a_while(
    rig: Rig, caller: str
) -> None:
    """Bar the caller, even if it registers new models; serve others. Never bar the owner."""
    rig.register("other", 1)
    rig.make_resident("other")
    bars_s = []
    for name in "abc":
        rig.register(name, 1)
        token = rig.infer(name, caller=caller)
        rig.arrived(name)
        while token not in rig.answers:
            if rig.state.owner.running is None:
                until_ms = rig.state.accounts.of(caller).penalty_until_ms
                bars_s.append(math.ceil((until_ms - rig.now_ms) / 1000.0))
                rig.infer("other", caller="alice")
                rig.done()
                rig.tick(until_ms)
            rig.worker_restarts(rig.state.owner.running.slot)
        assert isinstance(rig.error(token), errors.WorkerLost)
    assert bars_s == ([1, 2, 4, 8, 8] if caller else [])


def test_a_model_that_hangs_every_time_is_quarantined(rig: Rig) -> None:
    rig.register("a")
    for _ in range(rig.core.settings.max_deaths):
        token = rig.infer("a")
        task = rig.state.owner.running
        rig.tick(rig.now_ms + rig.core.settings.max_compute_ms)
        rig.worker_restarts(task.slot)
        assert isinstance(rig.error(token), errors.DeadlineExceeded)
    assert isinstance(rig.error(rig.infer("a")), errors.ModelQuarantined)


def test_many_short_tasks_leave_one_look_at_the_clock(rig: Rig) -> None:
    rig.register("a")
    rig.make_resident("a")
    for number in range(100):
        rig.now_ms = float(number)
        rig.infer("a")
        rig.done()
    assert len(rig.core.wakeups) == 1


def test_time_in_the_queue_and_before_the_turn_is_not_computing(rig: Rig) -> None:
    limit_ms = rig.core.settings.max_compute_ms
    rig.register("a")
    rig.infer("a")
    rig.infer("a")
    rig.now_ms = limit_ms - 1
    rig.done()
    assert rig.state.owner.running is not None
    rig.tick(2 * limit_ms - 2)
    assert not rig.commands(ev.Kill)


def test_without_a_limit_a_task_may_compute_for_ever() -> None:
    rig = Rig(max_compute_ms=0.0)
    rig.register("a")
    rig.infer("a")
    rig.tick(1e9)
    assert not rig.commands(ev.Kill)


@pytest.mark.parametrize("limit", ["max_queue", "max_queue_per_model"])
def test_a_caller_that_fills_the_queue_leaves_places_for_another(limit: str) -> None:
    rig = Rig(**{limit: 16})
    rig.register("a")
    flood = [rig.infer("a", caller="greedy") for _ in range(40)]
    assert [isinstance(rig.error(t), errors.QueueFull) for t in flood if t in rig.answers] == [
        True
    ] * 26
    modest = [rig.infer("a", caller="modest") for _ in range(4)]
    assert [token in rig.answers for token in modest] == [False, False, False, True]
    # The first one took the place of a task that was dispatched ahead, so it does not wait.
    assert "2 of them this client's" in rig.error(modest[-1]).message


def test_a_tenants_models_leave_another_room_in_the_host_store() -> None:
    rig = Rig(store_bytes=64 * MIB)
    refused = []
    for name in (*(f"greedy.{number}" for number in range(6)), "modest.0"):
        token, op_id = rig.begin(name)
        rig.built(name, 10, op_id)
        if token not in rig.answers:
            rig.stored(name, op_id)
        else:
            assert isinstance(rig.error(token), errors.HostStoreFull)
            refused.append(name)
            rig.handle(exited(op_id, 0))
        rig.prepared()
    assert refused == ["greedy.4", "greedy.5"]


def test_a_flood_for_one_model_leaves_room_for_the_others() -> None:
    rig = Rig(max_queue=8, max_queue_per_model=2)
    rig.register("a")
    rig.register("b")
    flood = [rig.infer("a") for _ in range(6)]
    refused = [rig.error(token) for token in flood if token in rig.answers]
    assert refused
    assert all(isinstance(error, errors.QueueFull) for error in refused)
    assert "max_queue_per_model" in refused[0].hint
    token = rig.infer("b")
    assert token not in rig.answers


def test_an_unknown_model_or_another_digest_is_refused(rig: Rig) -> None:
    assert isinstance(rig.error(rig.infer("a")), errors.ModelNotFound)
    _, op_id = rig.begin("a")
    assert isinstance(rig.error(rig.infer("a")), errors.ModelNotFound)
    rig.built("a", 10, op_id)
    token = rig.infer("a", digest="of the one before")
    assert isinstance(rig.error(token), errors.ModelNotFound)


def test_an_error_of_the_model_is_the_request_s_alone(rig: Rig) -> None:
    rig.register("a")
    token = rig.infer("a")
    task = rig.state.owner.running
    data = {"type": "ValueError"}
    failed = InferenceFailed(op_id=task.op_id, error="TaskFailed", message="boom", data=data)
    rig.worker(task.slot, failed)
    assert isinstance(rig.error(token), errors.TaskFailed)
    assert rig.error(token).request_id == f"r{token}"
    assert not rig.commands(ev.Kill)


def test_a_request_that_fails_before_its_turn_leaves_the_turn_alone(rig: Rig) -> None:
    rig.register("a")
    rig.infer("a")
    token = rig.infer("a")
    current, upcoming = rig.state.owner.running, rig.state.owner.pending
    rig.worker(
        upcoming.slot, InferenceFailed(op_id=upcoming.op_id, error="TaskFailed", message="x")
    )
    assert isinstance(rig.error(token), errors.TaskFailed)
    assert rig.state.owner.running is current
    assert not rig.commands(ev.RaiseTurn)


# -- faults ----------------------------------------------------------------------


def test_a_request_whose_worker_dies_is_dispatched_again_at_once(rig: Rig) -> None:
    rig.register("a")
    token = rig.infer("a")
    task = rig.state.owner.running
    rig.worker_exits(task.slot)
    (run,) = rig.sent(RunInference)
    assert run.op_id > task.op_id
    assert not rig.sent(TransmitModel), "its groups are still on their way"
    rig.done()
    assert rig.error(token) is None


def test_three_deaths_in_a_row_while_computing_quarantine_the_model(rig: Rig) -> None:
    rig.register("a")
    first, second, third = rig.infer("a"), rig.infer("a"), rig.infer("a")
    for _ in range(3):
        rig.worker_restarts(rig.state.owner.running.slot)
    assert isinstance(rig.error(rig.infer("a")), errors.ModelQuarantined)
    refused = [token for token in (first, second, third) if token in rig.answers]
    assert refused
    assert all(
        isinstance(rig.error(one), errors.WorkerLost | errors.ModelQuarantined) for one in refused
    )
    while rig.state.owner.running is not None:  # requests that were dispatched before may still end
        rig.done()
    assert {first, second, third} <= set(rig.answers)
    rig.ask(ev.PinRequest, model="a", pin=True)
    token = rig.infer("a")
    assert token not in rig.answers, "load pardons it"


def test_a_death_while_waiting_for_the_turn_counts_for_nobody(rig: Rig) -> None:
    rig.register("a")
    job = rig.start_training()
    token = rig.infer("a")
    for _ in range(5):
        rig.worker_restarts(rig.state.owner.pending.slot)
    rig.park(job, rig.state.owner.pending.turn if rig.state.owner.pending else 0)
    rig.done()
    assert rig.error(token) is None


def test_a_success_in_between_forgives_the_deaths_before(rig: Rig) -> None:
    rig.register("a")
    for _ in range(4):
        token = rig.infer("a")
        for _ in range(2):
            rig.worker_restarts(rig.state.owner.running.slot)
        rig.done()
        assert rig.error(token) is None


def test_what_a_dead_daemon_still_says_is_dropped(rig: Rig) -> None:
    rig.daemon_exits()
    rig.daemon(DaemonReady(pid=1))
    assert not rig.state.daemon.is_ready


def test_a_wait_for_a_job_that_is_taken_back_is_answered_and_forgotten(rig: Rig) -> None:
    job = rig.train("cifar")
    waiting, other = rig.job_asked("cifar", "wait"), rig.job_asked("cifar", "wait")
    rig.handle(ev.CancelRequest(token=waiting))
    assert isinstance(rig.error(waiting), errors.Cancelled)
    assert job.waiters == [other]


def test_a_daemon_that_dies_too_often_ends_the_server_and_answers_everybody(rig: Rig) -> None:
    rig.register("a")
    registering = rig.ask_register("b")
    job = rig.train("cifar")
    waiting = rig.job_asked(job.spec.name, "wait")
    token = rig.infer("a")
    for _ in range(rig.core.settings.max_daemon_restarts + 1):
        rig.daemon_exits()
        for slot, worker in rig.state.workers.items():
            if worker.is_alive:
                rig.worker_exits(slot)
        if rig.commands(ev.Shutdown) or rig.core.is_stopped:
            break
        rig.tick(rig.now_ms + 1e5)
    assert rig.core.is_stopped
    for each in (registering, waiting, token, rig.infer("a"), rig.job_asked("cifar", "wait")):
        assert isinstance(rig.error(each), errors.ServerUnavailable)


def test_a_copy_that_breaks_off_kills_who_waits_for_it_and_is_sent_again(rig: Rig) -> None:
    rig.register("a")
    token = rig.infer("a")
    task = rig.state.owner.running
    rig.arrived("a", is_complete=False)
    assert [command.target.slot for command in rig.commands(ev.Kill)] == [task.slot]
    rig.worker_exits(task.slot)
    assert rig.sent(TransmitModel)
    rig.done()
    assert rig.error(token) is None
    assert rig.state.replicas["a"].model.deaths == 0


def test_a_transmission_the_daemon_refuses_is_not_waited_for(rig: Rig) -> None:
    rig.register("a")
    rig.infer("a")
    op_id = rig.state.replicas["a"].residency_id
    rig.daemon(DaemonFault(op_id=op_id, reason="overlaps"))
    assert rig.commands(ev.Kill)


def test_workers_that_die_before_they_are_ready_are_respawned_with_growing_delay(rig: Rig) -> None:
    rig.worker_exits(0, 1)  # a worker that was ready is replaced at once; its exit does not count
    for _ in range(rig.core.settings.max_deaths):
        rig.worker_exits(0, 1)
        assert rig.commands(ev.Spawn)
    rig.worker_exits(0, 1)
    assert not rig.commands(ev.Spawn)
    assert rig.scheduler.next_wakeup_ms() == 100.0


def test_a_standby_that_is_killed_again_and_again_is_replaced_at_once(rig: Rig) -> None:
    for _ in range(10):
        rig.worker_exits(0)
        assert rig.commands(ev.Spawn)
        rig.worker(0, WorkerReady(slot=0, pid=99))


# -- prefetch ------------------------------------------------------------------------------------


def test_a_hint_sends_the_model_ahead_and_its_request_uses_that(rig: Rig) -> None:
    rig.register("a")
    rig.handle(ev.PrefetchHint(model="a"))
    assert rig.sent(TransmitModel)
    rig.infer("a")
    assert rig.sent(RunInference)
    assert not rig.sent(TransmitModel)


# -- training -------------------------------------------------------------------------


def test_a_slice_that_fits_nowhere_is_refused(rig: Rig) -> None:
    job = rig.train("cifar")
    rig.lease(job, 64)
    (refused,) = rig.sent(LeaseRefused)
    assert refused.error == "OutOfDeviceMemory"
    assert refused.data["requested_bytes"] == 64 * MIB


def test_a_commit_area_that_does_not_fit_is_refused_and_leaves_the_books_right(rig: Rig) -> None:
    job = rig.start_training()
    rig.worker(job.slot, LeaseRequest(op_id=job.op_id, slice_bytes=1, state_bytes=1 << 40))
    (refused,) = rig.sent(LeaseRefused)
    assert refused.error == "HostStoreFull"
    rig.job_ends(job, "failed")
    assert rig.scheduler.machine.store.regions.free_bytes == rig.core.settings.store_bytes


def test_the_stream_of_a_job_that_does_not_answer_a_stop_is_opened_once() -> None:
    rig = Rig(slices_move=False)
    job = rig.start_training()
    rig.register("a")
    rig.infer("a")
    assert rig.scheduler.next_wakeup_ms() == 50.0
    opened = [ev.Interrupt(rig.state.address(job.slot), job.op_id, job.turn)]
    for at_ms, expected in ((49.0, []), (50.0, opened), (9999.0, [])):
        rig.tick(at_ms)
        assert rig.commands(ev.Interrupt) == expected


def test_the_slots_of_a_commit_area_share_no_page_because_each_is_pinned(rig: Rig) -> None:
    job = rig.train("cifar")
    rig.worker(job.slot, LeaseRequest(op_id=job.op_id, slice_bytes=MIB, state_bytes=5001))
    assert [one.slot_bytes for one in rig.commands(ev.CreateCommits)] == [8192]


def test_what_a_job_offloads_counts_in_the_host_store_while_its_process_lives(rig: Rig) -> None:
    job, store = rig.start_training(), rig.scheduler.machine.store.regions
    free = store.free_bytes

    def ask(size_bytes: int) -> type:
        rig.worker(job.slot, HostRequest(op_id=job.op_id, size_bytes=size_bytes))
        (answer,) = rig.sent(HostGranted) or rig.sent(LeaseRefused)
        return type(answer)

    for size_bytes in (10 * MIB, free, free - 4 * MIB):
        assert ask(size_bytes) is HostGranted
        assert store.free_bytes == free - size_bytes
    token, op_id = rig.begin("large")
    rig.built("large", 5, op_id)
    assert "has 4.0 MiB left" in str(rig.error(token))
    assert ask(free + 1) is LeaseRefused
    (refused,) = rig.sent(LeaseRefused)
    assert f"--host-store {(rig.core.settings.store_bytes >> 20) + 1}MiB" in refused.message
    assert store.free_bytes == 4 * MIB, "it keeps what it had"
    assert ask(0) is ask(-MIB) is HostGranted
    assert store.free_bytes == free
    assert ask(free) is HostGranted
    rig.worker_exits(job.slot)
    assert store.free_bytes == free


def test_asking_for_the_slice_again_gives_the_same_one_or_a_larger_one(rig: Rig) -> None:
    job = rig.start_training()
    first = rig.scheduler.machine.devices[0].arena.regions.get(Owner("slice", "cifar"))
    rig.lease(job)
    assert rig.sent(LeaseGranted)[0].offset_bytes == first.offset_bytes
    rig.lease(job, 40)
    assert rig.sent(Scrub)[0].size_bytes == first.size_bytes
    rig.scrubbed()
    rig.lease(job, 40)
    assert rig.sent(LeaseGranted)[0].size_bytes == 40 * MIB


def test_jobs_share_the_device_in_turns_of_training_cycle_ms(rig: Rig) -> None:
    one = rig.start_training("one")
    two = rig.train("two")
    rig.tick(999.0)
    assert not rig.sent(StopTask)
    rig.tick(1000.0)
    (stop,) = rig.sent(StopTask)
    assert (stop.op_id, stop.next_turn, stop.at_boundary) == (one.op_id, 0, True)
    rig.park(one)
    (run,) = rig.sent(RunJob)
    assert run.job == "two"
    rig.lease(two)
    rig.tick(2000.0)
    rig.park(two)
    assert one.state.state is TaskState.RUNNING


def test_a_job_that_needs_what_another_holds_has_the_device_after_that_one() -> None:
    """The job that has the activations' memory runs first, although its priority is lower."""
    rig = Rig(training="coshift", activation_memory_bytes=1 << 20)
    low = rig.train("low", priority=2)
    rig.lease(low)
    high = rig.train("high", priority=0)
    assert [stop.at_boundary for stop in rig.sent(StopTask)] == [True]
    rig.park(low, where="copies")
    (run,) = rig.sent(RunJob)
    assert (run.job, run.activation_bytes) == ("high", 1 << 20)
    rig.lease(high)
    rig.worker(low.slot, JobReady(op_id=low.op_id, turn=low.turn))
    assert not rig.sent(StopTask)  # the returning job has a lower priority
    rig.worker(high.slot, JobReady(op_id=high.op_id, turn=high.turn, is_blocked=True))
    assert [stop.op_id for stop in rig.sent(StopTask)] == [high.op_id]
    rig.park(high, where="copies")
    assert low.state.state is TaskState.RUNNING
    rig.worker(high.slot, JobReady(op_id=high.op_id, turn=high.turn))
    assert [stop.op_id for stop in rig.sent(StopTask)] == [low.op_id]
    rig.park(low, where="loader")
    assert high.state.state is TaskState.RUNNING


def starved() -> tuple[Rig, Any, Any]:
    """Return two jobs under coshift; ``other`` waits for memory of ``keeper``'s activations."""
    rig = Rig(training="coshift", activation_memory_bytes=1 << 20)
    keeper = rig.train("keeper")
    rig.lease(keeper)
    other = rig.train("other")
    rig.park(keeper, where="loader")
    rig.lease(other)
    rig.worker(keeper.slot, JobReady(op_id=keeper.op_id, turn=keeper.turn))
    rig.worker(other.slot, JobReady(op_id=other.op_id, turn=other.turn, is_blocked=True))
    rig.park(other, where="copies")
    assert rig.state.owner.job == "keeper"
    return rig, keeper, other


@pytest.mark.parametrize("comes_late", [True, False])
def test_a_job_that_keeps_activations_leaves_for_one_that_waits_for_them(comes_late: bool) -> None:
    rig, keeper, other = starved()

    def steps(count: int) -> None:
        values = {"step": keeper.progress.step + count, "left": 100}
        rig.worker(keeper.slot, JobReport(op_id=keeper.op_id, kind="progress", values=values))

    def why(job: Any) -> str:
        return str(rig.answers[rig.job_asked(job.spec.name, "show")].body["job"]["why"])

    due_ms = STARVED_CYCLES * rig.core.settings.training_cycle_ms
    if comes_late:
        rig.tick(2 * due_ms)
    steps(STARVED_STEPS - 1)
    assert not rig.sent(EvictTask), "a long step holds its activations until its end"
    assert why(other) == ""
    steps(1)
    assert "job keeper keeps" in other.progress.why
    while not comes_late and rig.now_ms < due_ms:
        assert not rig.sent(EvictTask), "only when it has waited for some cycles"
        rig.tick(rig.scheduler.next_wakeup_ms())
    assert [order.op_id for order in rig.sent(EvictTask)] == [keeper.op_id]
    assert "job keeper keeps" in why(other)
    assert "job other waits" in why(keeper)
    rig.worker_exits(rig.job_ends(keeper, "preempted"), 0)
    assert rig.state.owner.job == "other"
    rig.worker(other.slot, JobReport(op_id=other.op_id, kind="progress", values={"step": 1}))
    assert why(other) == ""


@pytest.mark.parametrize("comes", ["request", "late"])
def test_a_job_that_ends_its_step_for_another_is_told_again_by_what_cannot_wait(
    rig: Rig, comes: str
) -> None:
    """Stop a job in the middle of a step: for a request, or because the step outlasts a cycle."""
    rig.register("a")
    one = rig.start_training("one")
    rig.train("two")
    rig.tick(1000.0)
    assert [stop.at_boundary for stop in rig.sent(StopTask)] == [True]
    rig.tick(1999.0)
    assert not rig.sent(StopTask)
    if comes == "request":
        rig.infer("a")
    else:
        rig.tick(2000.0)
    (again,) = rig.sent(StopTask)
    assert (again.turn, again.next_turn, again.at_boundary) == (one.turn, 0, False)
    rig.infer("a")
    assert not rig.sent(StopTask)
    rig.park(one)
    assert rig.state.owner.running is not None
    assert not rig.state.owner.promised


def test_a_job_that_parks_again_while_another_one_trains_gives_nobody_a_turn(rig: Rig) -> None:
    """Fixed bug: a request got the turn that another job still had (invariant I5)."""
    rig.register("a")
    rig.make_resident("a")
    one, two = rig.start_training("one"), rig.train("two")
    rig.tick(2000.0)
    rig.park(one)
    rig.job_asked("one", "pause")
    rig.infer("a")
    task = rig.state.owner.pending
    rig.park(one, task.turn)
    assert (rig.state.owner.job, rig.state.owner.pending) == ("two", task)
    rig.park(two, task.turn)
    assert rig.state.owner.running is task


def test_the_timeline_and_the_accounts_have_all_of_a_turn_that_outlasts_its_cycles(
    rig: Rig,
) -> None:
    rig.register("a")
    job = rig.start_training()
    spans = []
    for at_ms in (1000.0, 2000.0, 2500.0):
        rig.now_ms = at_ms
        rig.worker(job.slot, JobReport(op_id=job.op_id, kind="progress", values={}))
        spans += [span for one in rig.commands(ev.Spans) for span in one.spans]
    rig.infer("a")
    rig.park(job, rig.state.owner.pending.turn)
    spans += [span for one in rig.commands(ev.Spans) for span in one.spans]
    trained = [(span.begin_ms, span.end_ms) for span in spans if span.name == "train cifar"]
    assert trained == [(0.0, 1000.0), (1000.0, 2000.0), (2000.0, 2500.0)]
    assert rig.scheduler.listing.stats()["device_s"]["train"] == 2.5
    assert job.timing.parked_at_ms == 2500.0


def test_a_lower_priority_job_does_not_interrupt_a_higher_one(rig: Rig) -> None:
    rig.train("high", priority=0)
    rig.train("low", priority=2)
    rig.tick(5000.0)
    assert not rig.sent(StopTask)


def test_jobs_whose_slices_fit_stay_suspended_side_by_side(rig: Rig) -> None:
    rig.register("a")
    one = rig.start_training("one")
    two = rig.train("two")
    rig.tick(1000.0)
    rig.park(one)
    rig.lease(two)
    rig.infer("a")
    rig.park(two, rig.state.owner.pending.turn)
    assert one.state.state is two.state.state is TaskState.SUSPENDED
    assert not rig.sent(EvictTask)
    assert len(rig.state.workers) == 5  # one active worker, two standbys, and each job's worker


@pytest.mark.parametrize("rig", [{"max_swapped": 0}], indirect=True)
def test_a_job_keeps_its_memory_for_ten_times_its_start(rig: Rig) -> None:
    one = rig.train("one")
    rig.tick(500.0)
    rig.lease(one, 40)  # the script has taken half a second to start
    two = rig.train("two")
    rig.tick(1500.0)
    rig.park(one)
    rig.lease(two, 40)
    assert not rig.sent(EvictTask)
    assert "memory" in two.progress.why
    rig.park(two)  # job two gives the device away, because it waits for memory
    assert one.state.state is TaskState.RUNNING
    rig.tick(6000.0)
    rig.park(one)
    assert [order.op_id for order in rig.sent(EvictTask)] == [one.op_id]


def test_a_later_phase_of_a_script_does_not_count_as_its_start(rig: Rig) -> None:
    one = rig.train("one")
    rig.tick(500.0)
    rig.lease(one, 20)
    rig.tick(100_000.0)
    rig.lease(one, 40)  # the script's next loop needs more memory
    assert one.timing.start_ms == 500.0


@pytest.mark.parametrize("rig", [{"max_swapped": 0}], indirect=True)
def test_a_job_that_waits_for_another_s_memory_gets_it_when_its_time_comes(rig: Rig) -> None:
    one = rig.start_training("one", 40)
    two = rig.train("two")
    rig.tick(1000.0)
    rig.park(one)
    rig.lease(two, 40)  # the suspended job one still has the memory
    (evict,) = rig.sent(EvictTask)
    assert evict.op_id == one.op_id
    slot = rig.job_ends(one, "preempted")
    assert not rig.sent(LeaseGranted), "its process may still write"
    rig.worker_exits(slot, 0)
    assert not rig.sent(LeaseGranted), "another tenant's bytes are not zeroed yet"
    rig.scrubbed()
    assert rig.sent(LeaseGranted)


@pytest.mark.parametrize("rig", [{"max_swapped": 0}], indirect=True)
def test_a_running_job_does_not_keep_one_that_waits_for_its_memory_out_for_ever(rig: Rig) -> None:
    """Job two requests memory only after its turn is over, because its imports take so long."""
    one = rig.start_training("one", 40)
    two = rig.train("two")
    rig.tick(1000.0)
    rig.park(one)
    rig.tick(2000.0)
    rig.park(two)
    assert one.state.state is TaskState.RUNNING
    rig.lease(two, 40)
    rig.tick(3000.0)
    assert rig.sent(StopTask)
    rig.park(one)
    assert [order.op_id for order in rig.sent(EvictTask)] == [one.op_id]


@pytest.mark.parametrize("rig", [{"max_swapped": 0}], indirect=True)
def test_a_request_whose_place_is_a_slice_evicts_the_job_and_waits_for_the_scrub(rig: Rig) -> None:
    rig.register("big", 40)
    job = rig.start_training(mib=40)
    rig.infer("big")
    assert [order.op_id for order in rig.sent(EvictTask)] == [job.op_id]
    assert not rig.sent(TransmitModel)
    slot = rig.job_ends(job, "preempted")
    rig.worker_exits(slot, 0)
    assert not rig.sent(TransmitModel)
    rig.scrubbed()
    assert rig.sent(TransmitModel)
    assert job.state.state is TaskState.QUEUED


def test_a_request_is_served_before_a_job_that_is_being_evicted_has_unwound(rig: Rig) -> None:
    rig.register("a")
    job = rig.start_training()
    rig.job_asked("cifar", "pause")
    rig.infer("a")
    assert rig.sent(StopTask)
    rig.park(job, rig.state.owner.pending.turn)
    assert rig.state.owner.running is not None


def test_a_script_that_does_not_stop_or_unwind_is_killed_after_its_grace(rig: Rig) -> None:
    rig.register("a")
    job = rig.start_training()
    rig.infer("a")
    rig.tick(rig.core.settings.stop_grace_ms)
    assert [command.target.slot for command in rig.commands(ev.Kill)] == [job.slot]


@pytest.mark.parametrize("has_yielded", [False, True])
def test_a_job_that_never_stepped_aside_says_so(rig: Rig, has_yielded: bool) -> None:
    rig.register("a")
    job = rig.start_training()
    job.progress.suspensions = int(has_yielded)
    rig.infer("a")
    rig.tick(rig.core.settings.stop_grace_ms)
    rig.worker_exits(job.slot)
    (row,) = rig.scheduler.listing.jobs()
    assert ("never been suspended" in row["why"]) != has_yielded


def hangs(rig: Rig, job: Any) -> float:
    """Send a request while a script ignores its stop; return how long the request waits, in ms."""
    token, began_ms = rig.infer("a"), rig.now_ms
    while (
        job.slot is not None and rig.state.workers[job.slot].state.state is not WorkerState.DOOMED
    ):
        rig.tick(rig.scheduler.next_wakeup_ms())
    waited_ms, slot = rig.now_ms - began_ms, job.slot
    assert rig.commands(ev.Kill)[0].reason.startswith("did not stop within")
    rig.worker_exits(slot)
    scrubs = rig.sent(Scrub)
    if rig.residency("a") is Residency.TRANSMITTING:
        rig.arrived("a")
    rig.done()
    assert rig.error(token) is None
    for scrub in scrubs:
        rig.daemon(Scrubbed(op_id=scrub.op_id))
    return waited_ms


def trains_again(rig: Rig, job: Any) -> None:
    """Make replacements of killed workers ready; one of them resumes the job."""
    while starting := [
        w for w in rig.state.workers.values() if w.state.state is WorkerState.STARTING
    ]:
        for worker in starting:
            rig.worker(worker.slot, WorkerReady(slot=worker.slot, pid=99))
    rig.prepared()
    assert job.slot is not None
    rig.lease(job)


@pytest.mark.parametrize("stop_grace_ms", [30000.0, 2000.0, 400.0])
def test_a_script_that_does_not_stop_again_costs_requests_less_and_is_paused(
    stop_grace_ms: float,
) -> None:
    rig = Rig(stop_grace_ms=stop_grace_ms)
    rig.register("a")
    job, waits = rig.start_training(), []
    for _ in range(3):
        waits.append(hangs(rig, job))
        trains_again(rig, job)
    waits.append(hangs(rig, job))
    min_ms = min(1000.0, stop_grace_ms)
    assert waits == [max(min_ms, stop_grace_ms / 4**missed) for missed in range(4)]
    assert job.state.state is TaskState.PAUSED
    assert (
        "pipeswitch jobs resume cifar"
        in rig.answers[rig.job_asked("cifar", "show")].body["job"]["why"]
    )
    rig.job_asked("cifar", "resume")
    trains_again(rig, job)
    assert hangs(rig, job) == stop_grace_ms


def test_a_script_that_stopped_a_hundred_times_since_is_forgiven(rig: Rig) -> None:
    rig.register("a")
    job = rig.start_training()
    for _ in range(2 * MAX_MISSED):
        assert hangs(rig, job) == rig.core.settings.stop_grace_ms
        trains_again(rig, job)
        for _ in range(FORGIVEN_AFTER):
            rig.switch(job)
    assert job.state.state is TaskState.RUNNING


def test_a_script_that_does_not_unwind_is_counted_and_one_that_is_cancelled_is_not_paused(
    rig: Rig,
) -> None:
    job = rig.start_training()
    rig.job_asked("cifar", "cancel")
    rig.job_asked("cifar", "pause")
    rig.tick(rig.core.settings.evict_grace_ms)
    assert job.progress.stops_missed == 1
    rig.worker_exits(job.slot)
    assert job.state.state is TaskState.CANCELLED


def test_a_process_that_does_not_leave_after_its_script_is_killed(rig: Rig) -> None:
    job = rig.start_training()
    slot = rig.job_ends(job, "done")
    rig.tick(rig.core.settings.evict_grace_ms)
    assert [command.target.slot for command in rig.commands(ev.Kill)] == [slot]


def test_after_a_crash_the_job_starts_again_and_without_progress_it_fails(rig: Rig) -> None:
    job = rig.start_training()
    token = rig.job_asked("cifar", "wait")
    for _ in range(rig.core.settings.max_job_deaths - 1):
        slot = job.slot
        rig.worker_exits(slot)
        for scrub in rig.sent(Scrub):
            rig.daemon(Scrubbed(op_id=scrub.op_id))
        assert rig.state.owner.job == "cifar"
        assert rig.state.workers[slot].state.state is WorkerState.STARTING, (
            "no delay: it had a task"
        )
        rig.worker(slot, WorkerReady(slot=slot, pid=99))
    rig.worker_exits(job.slot)
    assert isinstance(rig.error(token), errors.TaskFailed)


@pytest.mark.parametrize("end", ["evicted", "killed"])
def test_steps_that_are_lost_are_counted_once_however_the_process_ended(rig: Rig, end: str) -> None:
    job = rig.start_training()
    rig.committed(job, 1, step=4)
    for steps_lost in (5, 10):
        slot = int(job.slot)
        if end == "evicted":
            rig.job_asked("cifar", "pause")
            rig.job_ends(job, "preempted", step=9)
            rig.job_asked("cifar", "resume")
            rig.worker_exits(slot, 0)
        else:
            report = JobReport(op_id=job.op_id, kind="progress", values={"step": 9})
            rig.worker(slot, report)
            rig.worker_exits(slot)
        assert [order.last_step for order in rig.sent(RunJob)] == [9]
        rig.scrubbed()
        rig.lease(job)
        assert (job.progress.steps_recomputed, job.progress.step) == (steps_lost, 4)
    rig.worker(int(job.slot), JobReport(op_id=job.op_id, kind="unseen", values={"steps": 3}))
    assert job.progress.steps_recomputed == 13, "it knows better than its last report"


def test_a_commit_counts_when_the_daemon_flipped_it_and_forgives_deaths(rig: Rig) -> None:
    job = rig.start_training()
    rig.commit(job, 1, step=7)
    (copy,) = rig.sent(CommitCopy)
    assert (copy.number, copy.step, copy.op_id) == (1, 7, job.op_id)
    assert job.memory.committed_step == -1
    job.progress.deaths_without_progress = 2
    rig.flip(job, 1, step=7)
    assert (job.memory.committed_step, job.progress.deaths_without_progress) == (7, 0)
    assert rig.sent(StepCommitted), "the worker is told"
    (row,) = rig.scheduler.listing.jobs()
    assert row["step"] == 7, "though the script has not told of it yet"


def test_a_commit_that_is_told_again_or_late_is_counted_and_not_copied(rig: Rig) -> None:
    """The job already writes to its slice again, so a copy would mix bytes of two steps."""
    job = rig.start_training()
    for number, late in ((1, (1,)), (2, (2, 1, 0, -1, -(1 << 63)))):
        rig.commit(job, number, step=number)
        assert [copy.number for copy in rig.sent(CommitCopy)] == [number]
        rig.flip(job, number, step=number)
        for repeated in late:
            rig.commit(job, repeated, step=number)
            assert not rig.sent(CommitCopy)
    assert rig.core.counts["stale_messages"] == 6
    assert not job.memory.copy_id, "nothing is waited for"


def test_numbers_that_leap_shut_out_their_own_sender_alone(rig: Rig) -> None:
    job = rig.start_training()
    rig.commit(job, (1 << 64) - 1, step=1)
    assert rig.sent(CommitCopy)
    rig.flip(job, (1 << 64) - 1, step=1)
    rig.commit(job, 2, step=2)
    assert not rig.sent(CommitCopy)
    rig.worker_exits(job.slot)
    rig.scrubbed()
    rig.lease(job)
    rig.commit(job, 1, step=2)
    assert rig.sent(CommitCopy), "each dispatch counts anew"


def test_a_commit_that_found_no_memory_daemon_has_not_used_its_number_up(rig: Rig) -> None:
    job = rig.start_training()
    rig.daemon_exits()
    rig.commit(job, 1, step=1)
    assert not rig.sent(CommitCopy)
    assert (job.memory.commit_number, job.memory.copy_id) == (0, 0)
    assert not rig.core.counts["stale_messages"], "it was not late"
    assert rig.state.workers[job.slot].kill_reason, "who waits for the answer is ended"


def test_the_first_commit_goes_to_disk_at_once_and_each_one_that_the_disk_has_time_for(
    rig: Rig,
) -> None:
    job = rig.start_training()
    rig.committed(job, 1, 1)
    (order,) = rig.sent(PersistCommit)
    rig.committed(job, 2, 2)
    assert not rig.sent(PersistCommit), "one at a time"
    rig.now_ms += 10.0
    rig.daemon(CommitPersisted(job=job.spec.name, op_id=order.op_id, step=1))
    assert not rig.sent(PersistCommit), "it took 10 ms: the disk rests for twenty times as long"
    due_ms = rig.scheduler.next_wakeup_ms()
    assert due_ms == pytest.approx(rig.now_ms + 200.0)
    rig.tick(due_ms)
    (order,) = rig.sent(PersistCommit)
    rig.daemon(CommitPersisted(job=job.spec.name, op_id=order.op_id, step=2))
    rig.committed(job, 3, 3)
    assert rig.sent(PersistCommit), "written within an instant: so is the next one"


def test_a_disk_that_takes_no_commit_is_asked_again_after_the_interval(rig: Rig) -> None:
    job = rig.start_training()
    rig.committed(job, 1, 1)
    (order,) = rig.sent(PersistCommit)
    rig.daemon(CommitPersisted(job=job.spec.name, op_id=order.op_id, step=-1, error="disk full"))
    due_ms = rig.now_ms + rig.core.settings.commit_every_ms
    rig.tick(due_ms - 1.0)
    assert not rig.sent(PersistCommit)
    rig.tick(due_ms)
    assert rig.sent(PersistCommit)


def test_what_a_job_wants_on_disk_at_once_is_written_right_behind_the_write_under_way(
    rig: Rig,
) -> None:
    job = rig.start_training()
    rig.committed(job, 1, 1)
    (order,) = rig.sent(PersistCommit)
    rig.now_ms += 1000.0
    rig.committed(job, 2, 2)
    rig.job_asked("cifar", "export")
    rig.daemon(CommitPersisted(job=job.spec.name, op_id=order.op_id, step=1))
    assert rig.sent(PersistCommit), "not after twenty seconds"


def test_a_commit_of_an_older_job_of_the_same_name_does_not_count(rig: Rig) -> None:
    old = rig.start_training()
    rig.commit(old, 1, step=500)
    slot = rig.job_ends(old, "done")
    rig.worker_exits(slot, 0)
    new = rig.train("cifar")
    assert new is not old
    rig.flip(old, 1, step=500)
    assert new.memory.committed_step == -1


def test_pause_is_answered_when_the_job_holds_no_worker_and_is_on_its_way_to_disk(rig: Rig) -> None:
    job = rig.start_training()
    rig.committed(job, 1, 2)
    token = rig.job_asked("cifar", "pause")
    assert token not in rig.answers
    rig.job_ends(job, "preempted")
    assert rig.answers[token].body["job"]["state"] == "paused"
    rig.written(job, 2)
    assert job.memory.persisted_step == 2


def test_a_pause_is_on_record_before_it_is_answered_and_holds_in_the_next_server(rig: Rig) -> None:
    job = rig.start_training()
    token = rig.job_asked("cifar", "pause")
    rig.job_ends(job, "preempted")
    hold = ev.Journal(entry={"kind": "hold", "name": "cifar", "why": "paused"})
    assert rig.out.index(hold) < rig.out.index(rig.answers[token])

    again = Rig()
    again.scheduler.machine.jobs.restore(
        JobSpec("cifar", "x.py", (), 2), RestoredJob(is_paused=True)
    )
    again.tick(1.0)
    assert again.state.jobs["cifar"].state.state is TaskState.PAUSED
    assert not again.sent(RunJob)
    again.job_asked("cifar", "resume")
    assert again.sent(RunJob)
    assert ev.Journal(entry={"kind": "hold-over", "name": "cifar"}) in again.out


def failed(rig: Rig, step: int = 7) -> tuple[Any, Any]:
    """Return a job that failed after it had committed step 4 to disk, and the job's record."""
    job = rig.start_training()
    job.spec = replace(job.spec, defaults=(("offload", "all"),))
    rig.committed(job, 1, step=4)
    slot = rig.job_ends(job, "failed", step=step)
    (journal,) = rig.commands(ev.Journal)
    rig.worker_exits(slot, 0)
    rig.scrubbed()
    rig.written(job, 4)
    assert rig.commands(ev.DropCommits)
    return job, journal.entry["record"]


def test_a_failed_job_starts_again_from_its_commit_on_disk(rig: Rig) -> None:
    job, _ = failed(rig)
    token = rig.job_asked("cifar", "resume")
    (load,) = rig.commands(ev.LoadCommits)
    assert token not in rig.answers
    rig.handle(msgspec.structs.replace(load.request, loaded=ev.LoadedCommit(MIB, 4, 9, "damage")))
    (command,) = rig.commands(ev.CreateCommits)
    assert (command.loaded, command.is_on_disk) == (9, True)
    (order,) = rig.sent(RunJob)
    assert (order.slot_bytes, order.spec.defaults) == (MIB, (("offload", "all"),))
    row = rig.answers[token].body["job"]
    assert (row["error"], row["why"], row["committed_step"]) == ("", "damage", 4)
    assert (job.progress.steps_recomputed, job.progress.step) == (3, 4)
    kinds = [one.entry["kind"] for one in rig.commands(ev.Journal)]
    assert kinds == ["job", "hold-over"], "the next server goes on with it, too"


def test_a_failed_job_whose_commit_is_in_memory_or_that_has_none_starts_again_at_once(
    rig: Rig,
) -> None:
    job = rig.start_training()
    slot = rig.job_ends(job, "failed", step=2)
    rig.worker_exits(slot, 0)
    rig.scrubbed()
    rig.job_asked("cifar", "resume")
    assert rig.sent(RunJob)
    rig.lease(job)
    rig.committed(job, 1, step=5)
    slot = rig.job_ends(job, "failed", step=5)
    rig.job_asked("cifar", "resume")  # the commit is still being written to disk
    assert not rig.commands(ev.LoadCommits)
    rig.worker_exits(slot, 0)
    assert rig.sent(RunJob)
    assert (job.memory.committed_step, job.progress.steps_recomputed) == (5, 2)


@pytest.mark.parametrize("outcome", ["done", "cancelled"])
def test_a_job_that_is_done_or_cancelled_does_not_start_again(rig: Rig, outcome: str) -> None:
    job = rig.start_training()
    if outcome == "cancelled":
        rig.job_asked("cifar", "cancel")
    rig.job_ends(job, "done" if outcome == "done" else "preempted")
    assert isinstance(rig.error(rig.job_asked("cifar", "resume")), errors.InvalidInput)


def test_a_failed_job_whose_commit_finds_no_room_stays_as_it_is(rig: Rig) -> None:
    job, _ = failed(rig)
    token = rig.job_asked("cifar", "resume")
    (load,) = rig.commands(ev.LoadCommits)
    rig.handle(msgspec.structs.replace(load.request, loaded=ev.LoadedCommit(1 << 40, 4, 9)))
    assert isinstance(rig.error(token), errors.HostStoreFull)
    assert job.state.state is TaskState.FAILED
    assert job.memory.persisted_step == 4
    assert not rig.commands(ev.Journal)


def test_a_job_that_failed_under_another_server_starts_again_with_what_it_was_given(
    rig: Rig,
) -> None:
    job, record = failed(rig)
    again = Rig()
    again.scheduler.machine.jobs.restore_ended(job.spec.name, json.loads(json.dumps(record)), 4)
    again.job_asked("cifar", "resume")
    (load,) = again.commands(ev.LoadCommits)
    again.handle(msgspec.structs.replace(load.request, loaded=ev.LoadedCommit(MIB, 4, 9)))
    (order,) = again.sent(RunJob)
    assert (order.spec.entry, order.spec.defaults) == (job.spec.entry, job.spec.defaults)


def test_cancel_ends_a_job_in_any_state(rig: Rig) -> None:
    rig.train("one")
    two = rig.train("two")
    token = rig.job_asked("two", "cancel")
    assert rig.answers[token].body["job"]["state"] == "cancelled"
    token = rig.job_asked("one", "cancel")
    assert rig.sent(EvictTask)
    rig.job_ends(rig.state.jobs["one"], "preempted")
    assert rig.answers[token].body["job"]["state"] == "cancelled"
    assert isinstance(rig.error(rig.job_asked("two", "resume")), errors.InvalidInput)
    assert two.state.state is TaskState.CANCELLED


def test_a_job_killed_with_the_daemon_has_done_nothing_wrong(rig: Rig) -> None:
    job = rig.start_training()
    rig.committed(job, 1, 4)
    rig.daemon_exits()
    rig.worker_exits(job.slot)
    assert job.progress.deaths_without_progress == 0
    assert job.state.state is TaskState.QUEUED
    assert not rig.scheduler.machine.devices[0].arena.regions.get(Owner("slice", "cifar"))
    assert job.memory.persist_due_at_ms == rig.now_ms, "the next daemon does not write it at once"


def test_a_slice_asked_for_while_the_daemon_is_dead_is_not_granted(rig: Rig) -> None:
    job = rig.train("cifar")
    rig.daemon_exits()
    rig.lease(job)
    assert not rig.sent(LeaseGranted)
    for slot in (0, 1, 2):
        rig.worker_exits(slot)
    assert len(rig.scheduler.machine.devices[0].arena.regions) == 1  # only the fences' region


# -- registration --------------------------------------------------------------------------------


def test_the_same_name_and_spec_again_is_a_no_op_and_another_spec_an_error(rig: Rig) -> None:
    rig.register("a")
    again = rig.ask_register("a")
    assert rig.error(again) is None
    assert not rig.commands(ev.StartBuild)
    assert isinstance(rig.error(rig.ask_register("a", spec="other")), errors.AlreadyExists)


def test_a_repeated_registration_sets_priority_and_pin_without_a_build(rig: Rig) -> None:
    rig.register("a")
    notes = rig.answers[rig.ask_register("a", priority=0, pin=True)].body["notes"]
    assert "is high, and it is pinned" in notes[-1]
    assert not rig.commands(ev.StartBuild)
    assert rig.sent(TransmitModel)
    assert [command.priority for command in rig.commands(ev.ModelAvailable)] == [0]
    entries = [command.entry for command in rig.commands(ev.Journal)]
    assert [(one["priority"], one["pin"]) for one in entries] == [(0, True)]
    assert rig.answers[rig.ask_register("a", priority=None)].body["notes"] == []
    model = rig.scheduler.machine.models["a"]
    assert (model.priority, model.want_pinned) == (0, True), "options that are not given stay"
    rig.ask_register("b", is_known=True, restored=manifest_of("digest b", 100 * MIB, 2))
    assert isinstance(rig.error(rig.ask_register("b", pin=True)), errors.OutOfDeviceMemory)
    assert not rig.scheduler.machine.models["b"].want_pinned


def test_a_repeated_registration_sets_the_priority_of_all_versions(rig: Rig) -> None:
    publish(rig, net_and_job(rig))
    rig.ask_register("net", spec=SPEC, spec_digest="first", priority=2, pin=True)
    models = [rig.scheduler.machine.models[name] for name in ("net", "net@2")]
    assert [(one.priority, one.want_pinned) for one in models] == [(2, False), (2, True)]
    error = rig.error(rig.ask_register("net", spec=spec_of(source="x", max_batch=8)))
    assert error.data["differs"] == [], "the journal has only the source of the current version"


def spec_of(**options: Any) -> str:
    known = {"name": "a", "source": "hf:x", "weights": "random:0", "max_batch": 64, "inputs": {}}
    return msgspec.msgpack.encode(known | options).decode("latin1")


@pytest.mark.parametrize(
    ("options", "words", "differs"),
    [
        ({"weights": "random:1"}, "weights ('random:1', not 'random:0')", ["weights"]),
        ({"source": "/srv/uploads/b.bundle"}, "differs: source", ["source"]),
        ({"max_batch": 8, "inputs": {"x": [[1] * 40, "float32"]}}, "64)", ["inputs", "max_batch"]),
        ({}, "contents of a file", []),
    ],
)
def test_a_registration_with_other_options_is_refused_with_their_names(
    rig: Rig, options: dict[str, Any], words: str, differs: list[str]
) -> None:
    rig.begin("a", spec=spec_of())
    error = rig.error(rig.ask_register("a", spec=spec_of(**options), spec_digest="other"))
    assert isinstance(error, errors.AlreadyExists)
    assert error.data["differs"] == differs
    assert words in error.message
    assert "/srv" not in error.message
    assert ("--as-version" in error.hint) == ("max_batch" not in options)


def test_a_configured_model_that_is_known_gets_what_the_file_names_or_a_note(rig: Rig) -> None:
    restored = manifest_of("digest a", 10 * MIB, 2)
    known = {"is_known": True, "restored": restored, "priority": 0, "pin": True}
    rig.ask_register("a", spec=spec_of(), **known)
    (build,) = rig.commands(ev.StartBuild)
    token = rig.ask_register("a", spec=spec_of(), is_configured=True)
    assert rig.error(token) is None, "the server's start does not wait for the bytes"
    model = rig.scheduler.machine.models["a"]
    assert (model.priority, model.want_pinned) == (1, True)
    token = rig.ask_register("a", spec=spec_of(weights="random:1"), is_configured=True)
    names = rig.scheduler.registry.names
    names.mark_refused("a", str(rig.error(token)), "[[model]]")
    names.mark_lost(lost := ModelName("c"), "no program")
    for name in ("b", lost):
        names.mark_refused(name, "no file", "[[model]]")
    rig.built("a", 10, build.op_id)
    rows = {row["name"]: row for row in rig.scheduler.listing.models()}
    assert (rows["a"]["state"], rows["b"]["state"]) == ("storing", "failed")
    assert "random:1" in rows["a"]["notes"][-1]
    for name in ("a", "b"):
        names.mark_refused(name, "", "folder")
    assert {row["name"]: row for row in rig.scheduler.listing.models()} == rows
    for name in ("a", "b", lost):
        names.mark_refused(name, "", "[[model]]")
    rows = {row["name"]: row for row in rig.scheduler.listing.models()}
    assert rows.keys() == {"a", "c"}
    assert (rows["a"]["notes"], rows["c"]["reason"]) == ([], "no program")


def test_another_clients_name_is_taken_though_it_asks_for_the_same(rig: Rig) -> None:
    """If it were a no-op, this client could use, and unregister, the other client's model."""
    rig.register("enemy.m")
    token = rig.ask_register("enemy.m", client="friend", tenant="friend")
    error = rig.error(token)
    assert isinstance(error, errors.AlreadyExists)
    assert "another client's" in error.message


def test_builds_run_one_after_the_other_until_the_process_is_gone(rig: Rig) -> None:
    first, op_id = rig.begin("a")
    rig.ask_register("b")
    assert not rig.commands(ev.StartBuild)
    rig.handle(ev.CancelRequest(token=first))
    assert rig.commands(ev.Kill)
    assert not rig.commands(ev.StartBuild)
    rig.handle(exited(op_id, -9))
    assert [command.model for command in rig.commands(ev.StartBuild)] == ["b"]
    assert isinstance(rig.error(first), errors.Cancelled)


def test_a_running_build_is_cancelled_by_an_unregister_of_anyone(rig: Rig) -> None:
    token, op_id = rig.begin("a")
    gone = rig.ask(ev.UnregisterRequest, model="a")
    assert [command.target.incarnation for command in rig.commands(ev.Kill)] == [op_id]
    assert rig.error(gone) is None
    assert isinstance(rig.error(token), errors.Cancelled)
    rig.handle(exited(op_id, -9))
    rig.register("a")  # the name is free again


def test_a_build_that_waits_is_cancelled_without_a_kill(rig: Rig) -> None:
    rig.ask_register("a")
    token = rig.ask_register("b")
    gone = rig.ask(ev.UnregisterRequest, model="b")
    assert not rig.commands(ev.Kill)
    assert rig.error(gone) is None
    assert isinstance(rig.error(token), errors.Cancelled)
    assert "b" not in rig.state.replicas


def test_one_clients_endless_build_leaves_the_other_lane_to_others() -> None:
    rig = Rig(max_builds=2)
    rig.ask_register("endless", client="enemy")
    assert len(rig.commands(ev.StartBuild)) == 1
    rig.ask_register("more", client="enemy")
    assert not rig.commands(ev.StartBuild)
    rig.ask_register("a", client="friend")
    assert [command.model for command in rig.commands(ev.StartBuild)] == ["a"]


def test_clients_take_turns_at_builds(rig: Rig) -> None:
    for number in range(3):
        rig.ask_register(f"enemy-{number}", client="enemy")
        if number == 0:
            op_id = rig.commands(ev.StartBuild)[0].op_id
    rig.ask_register("friend", client="friend")
    order = []
    for _ in range(3):
        rig.handle(exited(op_id, -9))
        (started,) = rig.commands(ev.StartBuild)
        op_id = started.op_id
        order.append(started.model)
    assert order == ["friend", "enemy-1", "enemy-2"]


def test_a_clients_builds_that_wait_leave_others_their_share() -> None:
    rig = Rig(max_waiting_builds=8)
    for number in range(7):  # one build runs, six wait
        assert rig.ask_register(f"enemy-{number}", client="enemy") not in rig.answers
    assert isinstance(rig.error(rig.ask_register("enemy-7", client="enemy")), errors.QueueFull)
    assert rig.ask_register("friend", client="friend") not in rig.answers
    assert rig.ask_register("owners") not in rig.answers


def test_a_client_has_so_many_models_and_no_more_and_the_owner_any() -> None:
    rig = Rig(max_models_per_client=2)
    for number in range(2):
        rig.register(f"enemy.{number}")
    error = rig.error(rig.ask_register("enemy.2", client="enemy"))
    assert isinstance(error, errors.HostStoreFull)
    assert "2 models" in error.message
    assert "unregister" in error.hint
    for name in ("friend.0", "owners-0", "owners-1", "owners-2"):
        rig.register(name)
    assert rig.error(rig.ask_register("enemy.1", client="enemy")) is None  # a no-op: it exists
    rig.ask(ev.UnregisterRequest, model="enemy.0", tenant="enemy")
    assert rig.ask_register("enemy.2", client="enemy") not in rig.answers


def test_a_registration_that_is_being_stored_cannot_be_taken_back(rig: Rig) -> None:
    token, op_id = rig.begin("a")
    rig.built("a", 10, op_id)
    rig.handle(ev.CancelRequest(token=token))
    assert token not in rig.answers
    rig.daemon(ModelStored(model="a", op_id=op_id, load_ms=1.0))
    assert rig.error(token) is None


@pytest.mark.parametrize(("number", "words"), [(11, ""), (signal.SIGALRM, "build_timeout")])
def test_a_builder_that_dies_without_a_word_refuses_its_model(
    rig: Rig, number: int, words: str
) -> None:
    token, op_id = rig.begin("a")
    rig.handle(exited(op_id, -number))
    assert isinstance(rig.error(token), errors.RegistrationRefused)
    assert words in rig.error(token).message
    assert "a" not in rig.state.replicas


@pytest.mark.parametrize(
    ("mib", "store_mib", "error"),
    [(64, 256, errors.OutOfDeviceMemory), (40, 30, errors.HostStoreFull)],
)
def test_a_model_too_large_for_the_arena_or_the_store_is_refused(
    mib: int, store_mib: int, error: type[Exception]
) -> None:
    rig = Rig(store_bytes=store_mib * MIB)
    token = rig.ask_register("a")
    rig.built("a", mib, rig.commands(ev.StartBuild)[0].op_id)
    assert isinstance(rig.error(token), error)
    assert rig.error(token).requested_bytes == mib * MIB
    assert len(rig.scheduler.machine.store.regions) == 0


def test_a_store_that_fails_in_a_way_nobody_expected_refuses_the_registration(rig: Rig) -> None:
    token, op_id = rig.begin("a")
    rig.built("a", 10, op_id)
    rig.handle(exited(op_id, 0))
    rig.daemon(DaemonFault(op_id=op_id, reason="RuntimeError: no idea"))
    assert "no idea" in rig.error(token).message
    assert len(rig.scheduler.machine.store.regions) == 0


def test_a_slice_that_could_not_be_zeroed_is_nobodys_until_it_was(rig: Rig) -> None:
    job = rig.start_training()
    rig.lease(job)
    rig.lease(job, 40)  # asks for another size, so the first slice is released
    (scrub,) = rig.sent(Scrub)
    rig.daemon(DaemonFault(op_id=scrub.op_id, reason="RuntimeError: no idea"))
    assert not rig.sent(Scrub), "not at once: it would fail again"
    due = rig.scheduler.next_wakeup_ms()
    assert due is not None
    rig.tick(due)
    assert [again.op_id for again in rig.sent(Scrub)] == [scrub.op_id]
    rig.daemon(Scrubbed(op_id=scrub.op_id))
    arena = rig.scheduler.machine.devices[0].arena
    assert arena.regions.get(Owner("scrub", str(scrub.op_id))) is None


def test_a_model_that_was_being_stored_when_the_daemon_died_is_stored_again(rig: Rig) -> None:
    token, op_id = rig.begin("a")
    rig.daemon_exits()
    rig.built("a", 10, op_id)
    assert not rig.sent(StoreModel), "nobody is there to take it"
    rig.daemon_returns()
    assert len(rig.sent(StoreModel)) == 1
    rig.daemon(ModelStored(model="a", op_id=op_id, load_ms=1.0))
    assert rig.error(token) is None


def test_unregister_waits_for_its_requests_and_refuses_new_ones(rig: Rig) -> None:
    rig.register("a")
    first, queued, last = rig.infer("a"), rig.infer("a"), rig.infer("a")
    token = rig.ask(ev.UnregisterRequest, model="a")
    assert rig.commands(ev.ModelRemoved)
    assert isinstance(rig.error(rig.infer("a")), errors.ModelNotFound)
    rig.arrived("a")
    for _ in range(3):
        assert token not in rig.answers
        rig.done()
    assert rig.error(token) is None
    assert all(rig.error(one) is None for one in (first, queued, last))
    assert len(rig.scheduler.machine.devices[0].arena.regions) == 1
    assert rig.scheduler.machine.store.regions.free_bytes == rig.core.settings.store_bytes


def test_a_pinned_model_comes_to_the_device_and_is_never_a_victim(rig: Rig) -> None:
    rig.register("a", 40, pin=True)
    assert rig.residency("a") is Residency.TRANSMITTING
    rig.arrived("a")
    assert rig.residency("a") is Residency.PINNED
    rig.register("b", 40)
    error = rig.error(rig.infer("b"))
    assert isinstance(error, errors.OutOfDeviceMemory)
    assert error.hint == "pipeswitch unload a"
    rig.ask(ev.PinRequest, model="a", pin=False)
    rig.infer("b")
    assert rig.sent(TransmitModel)


def test_a_request_that_can_never_fit_is_refused_though_a_job_trains(rig: Rig) -> None:
    rig.register("a", 40, pin=True)
    rig.arrived("a")
    rig.register("b", 40)
    rig.start_training(mib=5)
    assert isinstance(rig.error(rig.infer("b")), errors.OutOfDeviceMemory)


def stored(rig: Rig, name: str) -> None:
    """Register a model that no worker has prepared yet."""
    token, op_id = rig.begin(name)
    rig.built(name, 10, op_id)
    rig.stored(name, op_id)
    assert rig.error(token) is None


def preparing(rig: Rig) -> list[int]:
    return [slot for slot, worker in rig.state.workers.items() if worker.preparing is not None]


def test_standbys_prepare_models_they_do_not_know_and_one_stays_ready(rig: Rig) -> None:
    stored(rig, "a")
    assert preparing(rig) == [0, 1]
    rig.worker(0, ModelPrepared(model="a", digest="digest a"))
    assert preparing(rig) == [1, 2]
    rig.prepared()
    assert all(worker.warm for worker in rig.state.workers.values())


def test_a_worker_that_knows_all_programs_is_not_asked_about_each_at_each_event(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a thousand models, looking at each one took milliseconds per event."""
    for name in "abc":
        stored(rig, name)
    rig.prepared()
    looks: list[str] = []
    version = DeviceModel.version.fget
    monkeypatch.setattr(
        DeviceModel, "version", property(lambda self: looks.append(self.name) or version(self))
    )
    for _ in range(20):
        rig.scheduler.handle(ev.Tick(), rig.now_ms)
    assert not looks
    stored(rig, "d")
    assert preparing(rig) == [0, 1]


def test_the_only_free_worker_prepares_too() -> None:
    rig = Rig(standby=1)
    job = rig.start_training()
    stored(rig, "a")
    assert preparing(rig) == [slot for slot in rig.state.workers if slot != job.slot]


def test_a_request_for_another_model_meets_a_worker_that_is_ready(rig: Rig) -> None:
    rig.register("a")
    rig.make_resident("a")
    stored(rig, "b")
    rig.infer("a")
    assert rig.state.owner.running.slot == 2
    assert preparing(rig) == [0, 1]


def test_a_request_goes_to_who_is_just_learning_its_model(rig: Rig) -> None:
    stored(rig, "a")
    rig.infer("a")
    assert rig.state.owner.running.slot == 0
    rig.worker(0, ModelPrepared(model="a", digest="digest a"))
    rig.done()


def test_a_second_request_waits_for_the_first_rather_than_for_a_program(rig: Rig) -> None:
    """A free worker is loading a program; if it got the request, the device would have to wait."""
    rig.register("a")
    rig.make_resident("a")
    stored(rig, "b")
    first, second = rig.infer("a"), rig.infer("a")
    assert (rig.state.owner.running.tokens[0], rig.state.owner.pending) == (first, None)
    rig.done()
    assert (rig.state.owner.running.tokens[0], rig.state.owner.running.slot) == (second, 2)
    assert preparing(rig) == [0, 1]


def test_what_was_prepared_is_given_a_task_at_once(rig: Rig) -> None:
    rig.register("a")
    rig.make_resident("a")
    stored(rig, "b")
    rig.infer("a")
    second = rig.infer("a")
    rig.worker(1, ModelPrepared(model="b", digest="digest b"))
    assert (rig.state.owner.pending.tokens[0], rig.state.owner.pending.slot) == (second, 1)


def test_where_nobody_computes_a_worker_that_prepares_is_given_the_task() -> None:
    rig = Rig(standby=1)
    rig.start_training()
    rig.register("a")
    stored(rig, "b")
    rig.infer("a")
    assert rig.sent(RunInference)


def test_a_worker_that_knows_the_model_is_preferred(rig: Rig) -> None:
    rig.register("a")
    for slot in (0, 1):
        rig.state.workers[slot].warm.clear()
    rig.infer("a")
    assert rig.state.owner.running.slot == 2


# -- drain ---------------------------------------------------------------------------------------


def test_drain_finishes_what_was_accepted_evicts_jobs_and_leaves(rig: Rig) -> None:
    rig.register("a")
    job = rig.start_training()
    rig.committed(job, 1, 4)
    assert rig.sent(PersistCommit)
    request, waiting = rig.infer("a"), rig.job_asked("cifar", "wait")
    token = rig.ask(ev.DrainRequest, grace_ms=60000.0)
    assert rig.sent(EvictTask)
    assert isinstance(rig.error(rig.infer("a")), errors.ServerUnavailable)
    rig.park(job, rig.state.owner.pending.turn)
    rig.done()
    assert rig.error(request) is None
    rig.job_ends(job, "preempted")
    assert not rig.commands(ev.Shutdown), "its last commit is not on disk yet"
    rig.daemon(CommitPersisted(job=job.spec.name, op_id=job.op_id, step=4))
    assert [command.status for command in rig.commands(ev.Shutdown)] == [0]
    assert rig.error(token) is None
    assert isinstance(rig.error(waiting), errors.ServerUnavailable)


def test_a_second_drain_or_the_end_of_the_grace_leaves_at_once() -> None:
    for second in (ev.DrainRequest(token=None, grace_ms=0.0), ev.Tick()):
        rig = Rig()
        rig.register("a")
        token = rig.infer("a")
        rig.handle(ev.DrainRequest(token=None, grace_ms=100.0))
        assert not rig.commands(ev.Shutdown)
        rig.handle(second, 100.0)
        assert rig.commands(ev.Shutdown)
        assert isinstance(rig.error(token), errors.ServerUnavailable)


def test_a_user_s_cancel_survives_the_drain(rig: Rig) -> None:
    job = rig.start_training()
    token = rig.job_asked("cifar", "cancel")
    rig.handle(ev.DrainRequest(token=None, grace_ms=60000.0))
    rig.job_ends(job, "preempted")
    assert rig.answers[token].body["job"]["state"] == "cancelled"


def test_an_idle_server_leaves_at_once(rig: Rig) -> None:
    rig.handle(ev.DrainRequest(token=None, grace_ms=60000.0))
    assert rig.commands(ev.Shutdown)


# -- listings ------------------------------------------------------------------------------------


def restored(rig: Rig, outputs: tuple[Any, ...] = ()) -> tuple[ev.Token, Any]:
    """Restore a model, and send it a request while it is built again; return the request's token
    and the build's operation id."""
    manifest = manifest_of("digest a", 10 * MIB, 2)
    rig.ask_register("a", restored=msgspec.structs.replace(manifest, outputs=outputs))
    [start] = rig.commands(ev.StartBuild)
    assert rig.commands(ev.ModelAvailable)
    return rig.infer("a"), start.op_id


def test_a_request_for_a_model_that_is_checked_again_waits_for_it(rig: Rig) -> None:
    token, op_id = restored(rig)
    assert token not in rig.answers
    rig.built("a", 10, op_id)
    rig.daemon(ModelStored(model="a", op_id=op_id, load_ms=1.0))
    rig.prepared()
    rig.arrived("a")
    rig.done()
    assert rig.error(token) is None


def test_a_request_for_a_model_that_is_refused_when_checked_again_reads_why(rig: Rig) -> None:
    token, op_id = restored(rig)
    rig.handle(exited(op_id, -9))
    assert isinstance(rig.error(token), errors.RegistrationRefused)
    assert rig.commands(ev.ModelRemoved)


def test_a_request_for_a_model_that_comes_back_with_another_signature_is_refused(rig: Rig) -> None:
    other = ValueSpec(name="y", dtype="float32", shape=(7,))
    token, op_id = restored(rig, outputs=(other,))
    rig.built("a", 10, op_id)
    assert isinstance(rig.error(token), errors.ModelNotFound)


def test_a_model_that_is_unregistered_while_it_is_checked_again_stays_away(rig: Rig) -> None:
    restored(rig)
    rig.ask(ev.UnregisterRequest, model=ModelName("a"))
    [journal] = rig.commands(ev.Journal)
    assert journal.entry == {"kind": "model-gone", "name": "a"}


# -- programs that may share a process (ADR 20) ----------------------------------------------------


def test_a_job_is_given_a_fresh_process_when_all_have_run_clients_programs() -> None:
    rig = Rig(is_sandboxed=True)
    rig.register("a")
    assert [worker.runs_code for worker in rig.state.workers.values()] == [False] * 3
    job = rig.train("cifar")
    [spawned] = rig.commands(ev.Spawn)
    assert spawned.target.slot == job.slot
    assert [type(c) for c in rig.commands(ev.Spawn | ev.Send)] == [ev.Spawn, ev.Send]
    assert len(rig.sent(RunJob)) == 1
    # The old process's exit is reported before the new process is ready; it must not end the job.
    rig.handle(ev.Exited(ev.Address("worker", 0, job.slot, 1), -9, 0))
    worker = rig.state.workers[job.slot]
    assert (worker.state.state, worker.warm) == (WorkerState.ACTIVE, {})
    rig.worker(job.slot, WorkerReady(slot=job.slot, pid=99))
    assert worker.pid == 99
    assert job.slot is not None
    rig.worker(job.slot, WorkerReady(slot=job.slot, pid=100))
    assert [command.target.slot for command in rig.commands(ev.Kill)] == [job.slot]


def test_without_a_sandbox_a_job_runs_where_programs_did() -> None:
    rig = Rig()
    rig.register("a")
    rig.train("cifar")
    assert rig.commands(ev.Spawn) == []
    assert len(rig.sent(RunJob)) == 1


def test_code_and_programs_are_never_prepared_in_one_process() -> None:
    rig = Rig(is_sandboxed=True)
    rig.register("code")
    assert all("code" in worker.warm for worker in rig.state.workers.values())
    rig.register("a")
    assert not any("a" in worker.warm for worker in rig.state.workers.values())
    # The first request for "a" replaces one process; other processes keep their prepared models.
    rig.infer("a")
    [spawned] = rig.commands(ev.Spawn)
    [order] = rig.sent(RunInference)
    assert not order.is_code
    workers = [w for w in rig.state.workers.values() if w.slot != spawned.target.slot]
    assert all(list(worker.warm) == ["code"] for worker in workers)


def test_a_request_goes_to_a_process_that_fits_before_one_that_is_to_be_replaced() -> None:
    rig = Rig(is_sandboxed=True)
    rig.register("code")
    rig.register("a")
    rig.infer("a")
    [spawned] = rig.commands(ev.Spawn)
    rig.worker(spawned.target.slot, WorkerReady(slot=spawned.target.slot, pid=99))
    rig.arrived("a")
    rig.done()
    rig.infer("code")
    assert rig.commands(ev.Spawn) == []
    [order] = rig.sent(RunInference)
    assert order.is_code


# -- tenants that share no process (ADR 23) --------------------------------------------------------


@pytest.fixture
def apart() -> Rig:
    return Rig(is_sandboxed=True, separates_tenants=True)


def tenants(rig: Rig) -> list[str | None]:
    return [worker.tenant for worker in rig.state.workers.values()]


def asked(rig: Rig, name: str) -> tuple[list[str], list[int]]:
    """Serve one request; return the tenants that were bound to a worker, and the replaced slots."""
    rig.infer(name)
    bound = [message.tenant for message in rig.sent(BindTenant)]
    spawned = [command.target.slot for command in rig.commands(ev.Spawn)]
    if rig.residency(name) is Residency.TRANSMITTING:
        rig.arrived(name)
    rig.done()
    return bound, spawned


def test_a_process_serves_one_tenant_and_standbys_wait_for_any(apart: Rig) -> None:
    for name in ("ada.m", "bob.m", "own"):
        apart.register(name)
    assert tenants(apart) == [None] * 3, "a standby chose its tenant before there was a request"
    apart.infer("ada.m")
    kinds = [c.message for c in apart.commands(ev.Send) if c.target.kind == "worker"]
    assert isinstance(kinds[0], BindTenant), "the program came before its tenant's memory"
    assert (kinds[0].tenant, kinds[0].is_code) == ("ada", False)
    assert isinstance(kinds[1], RunInference)
    apart.arrived("ada.m")
    apart.done()
    assert asked(apart, "bob.m") == (["bob"], [])
    assert tenants(apart) == ["ada", "bob", None]
    for name in ("ada.m", "bob.m", "ada.m"):
        assert asked(apart, name) == ([], []), "two tenants in turns keep their processes"


def test_a_tenants_process_prepares_its_tenants_programs_alone(apart: Rig) -> None:
    for name in ("ada.m", "ada.n", "bob.m"):
        apart.register(name)
    asked(apart, "ada.m")
    apart.prepared()
    assert [sorted(w.warm) for w in apart.state.workers.values()] == [["ada.m", "ada.n"], [], []]


def test_when_no_process_waits_for_a_new_tenant_the_one_idle_longest_makes_way(apart: Rig) -> None:
    for name in ("ada.m", "bob.m", "own"):
        apart.register(name)
    asked(apart, "ada.m")
    asked(apart, "bob.m")
    asked(apart, "ada.m")
    apart.infer("own")
    assert [message.tenant for message in apart.sent(BindTenant)] == [""]
    apart.arrived("own")
    assert not apart.commands(ev.Spawn), "a process is replaced while a request computes"
    apart.done()
    [replaced] = apart.commands(ev.Spawn)
    assert (replaced.target.slot, tenants(apart)) == (1, ["ada", None, ""])
    apart.worker(1, WorkerReady(slot=1, pid=99))
    assert asked(apart, "bob.m")[0] == ["bob"]
    assert apart.state.workers[1].tenant == "bob", "the fresh process was not taken"


def test_where_all_are_busy_or_others_the_request_replaces_one() -> None:
    apart = Rig(is_sandboxed=True, separates_tenants=True, standby=1)
    for name in ("ada.m", "bob.m", "cyd.m"):
        apart.register(name)
    asked(apart, "ada.m")
    asked(apart, "bob.m")
    assert tenants(apart) == ["ada", "bob"], "of two workers none waits for another tenant"
    apart.infer("cyd.m")
    both = apart.commands(ev.Spawn | ev.Send)
    sent = [c for c in both if c.target.kind == "worker"]
    assert [type(c) for c in sent] == [ev.Spawn, ev.Send, ev.Send]
    assert [type(c.message) for c in sent[1:]] == [BindTenant, RunInference]
    worker = apart.state.workers[sent[0].target.slot]
    assert (worker.tenant, list(worker.warm)) == ("cyd", [])


def test_a_dead_processs_tenant_does_not_outlive_it(apart: Rig) -> None:
    apart.register("ada.m")
    asked(apart, "ada.m")
    apart.worker_restarts(0)
    assert tenants(apart) == [None] * 3


def test_a_job_gets_a_process_that_served_no_other_tenant(apart: Rig) -> None:
    for name in ("ada.m", "bob.m", "cyd.m"):
        apart.register(name)
    asked(apart, "ada.m")
    asked(apart, "bob.m")
    job = apart.train("cifar")
    assert job.slot == 2
    [bind] = apart.sent(BindTenant)
    assert (bind.tenant, bind.is_code) == ("", True)


def test_a_model_is_sent_to_its_tenants_file_and_announced_with_it(apart: Rig, rig: Rig) -> None:
    for one, tenant in ((apart, "ada"), (rig, "")):
        token, op_id = one.begin("ada.m")
        one.built("ada.m", 10, op_id)
        announced = one.commands(ev.ModelAvailable)
        one.stored("ada.m", op_id)
        assert one.error(token) is None
        assert [command.tenant for command in announced] == [tenant]
        one.infer("ada.m")
        assert [order.tenant for order in one.sent(TransmitModel)] == [tenant]


def test_a_request_in_another_tenants_file_is_refused(apart: Rig) -> None:
    """Send a request that was written while the name was another tenant's. The program is equal."""
    apart.register("ada.m")
    token = apart.infer("ada.m", tenant="bob")
    assert isinstance(apart.error(token), errors.ModelNotFound)


# ----------------------------------------------------------------------------- jobs that have ended


def test_the_last_state_of_a_job_is_written_and_then_leaves_the_host_store(rig: Rig) -> None:
    job = rig.start_training()
    rig.committed(job, 1, 3)
    assert rig.sent(PersistCommit)
    free_bytes = rig.scheduler.machine.store.regions.free_bytes
    rig.job_ends(job, "done")
    assert not rig.commands(ev.DropCommits), "its only copy"
    token = rig.job_asked("cifar", "export")
    assert token not in rig.answers
    rig.daemon(CommitPersisted(job=job.spec.name, op_id=job.op_id, step=3))
    assert rig.answers[token].body["job"]["persisted_step"] == 3
    assert rig.commands(ev.DropCommits)
    assert rig.scheduler.machine.store.regions.free_bytes > free_bytes
    assert rig.state.jobs["cifar"] is job


def test_a_disk_that_does_not_take_the_last_state_is_asked_again(rig: Rig) -> None:
    job = rig.start_training()
    rig.committed(job, 1, 3)
    rig.job_ends(job, "failed")
    token = rig.job_asked("cifar", "export")
    rig.daemon(CommitPersisted(job=job.spec.name, op_id=job.op_id, step=-1, error="disk full"))
    assert "disk full" in rig.error(token).message
    assert not rig.commands(ev.DropCommits)
    due_ms = rig.scheduler.next_wakeup_ms()
    assert due_ms is not None
    while not rig.sent(PersistCommit):
        rig.tick(due_ms)
        due_ms = rig.scheduler.next_wakeup_ms() or due_ms + 1000.0


def test_a_job_that_runs_again_waits_until_the_one_before_it_is_on_disk(rig: Rig) -> None:
    """Both jobs write to the folder of their common name; the newer job's state must remain."""
    old = rig.start_training()
    rig.committed(old, 1, 3)
    rig.job_ends(old, "done")
    assert old.memory.is_persisting
    assert rig.train("cifar") is old
    rig.daemon(CommitPersisted(job=old.spec.name, op_id=old.op_id, step=3))
    new = rig.state.jobs["cifar"]
    assert new is not old
    removed = rig.out.index(ev.RemoveJob(job=old.spec.name))
    accepted = next(i for i, c in enumerate(rig.out) if isinstance(c, ev.Journal))
    assert removed < accepted
    assert rig.answers[rig.last_token].body["job"]["state"] == "queued"


def test_ended_jobs_go_when_there_are_more_or_older_ones_than_are_kept() -> None:
    rig = Rig(keep_jobs=2)
    for number in range(4):
        rig.now_ms += 1.0
        rig.train(f"j{number}")
        rig.job_asked(f"j{number}", "pause")
        rig.job_asked(f"j{number}", "cancel")
        for slot in list(rig.state.workers):
            if rig.state.workers[slot].job is not None:
                rig.job_ends(rig.state.jobs[f"j{number}"], "preempted")
                rig.worker_restarts(slot, 0)
    assert list(rig.state.jobs) == ["j2", "j3"]

    rig = Rig(keep_jobs_ms=1000.0)
    job = rig.train("j")
    rig.job_ends(job, "done")
    rig.tick(rig.now_ms + 500.0)
    assert "j" in rig.state.jobs
    rig.tick(rig.now_ms + 500.0)
    assert "j" not in rig.state.jobs
    assert ev.Journal(entry={"kind": "job-over", "name": "j"}) in rig.out


def test_only_a_job_that_is_over_is_removed(rig: Rig) -> None:
    job = rig.start_training()
    assert "running" in rig.error(rig.job_asked("cifar", "rm")).message
    rig.job_ends(job, "failed")
    assert rig.error(rig.job_asked("cifar", "rm")) is None
    assert ev.RemoveJob(job=job.spec.name) in rig.out
    assert isinstance(rig.error(rig.job_asked("cifar", "show")), errors.ModelNotFound)
    assert isinstance(rig.error(rig.job_asked("cifar", "rm")), errors.ModelNotFound)


def test_a_removed_jobs_slice_is_in_the_way_until_its_process_is_reaped(rig: Rig) -> None:
    job = rig.start_training(mib=40)
    slot = rig.job_ends(job, "failed")
    assert rig.error(rig.job_asked("cifar", "rm")) is None
    rig.register("a", 40)
    token = rig.infer("a")  # the removed job's slice is in the way of the model
    assert not rig.sent(TransmitModel)
    rig.worker_exits(slot, 0)
    rig.scrubbed()
    assert rig.sent(TransmitModel)
    assert token not in rig.answers


def test_the_next_server_has_the_record_of_an_ended_job(rig: Rig) -> None:
    job = rig.start_training()
    rig.job_ends(job, "failed")
    (entry,) = [c.entry for c in rig.commands(ev.Journal) if c.entry["kind"] == "ended"]

    again = Rig()
    again.scheduler.machine.jobs.restore_ended("cifar", entry["record"], 5)
    row = again.answers[again.job_asked("cifar", "show")].body["job"]
    assert (row["state"], row["error"], row["persisted_step"]) == ("failed", job.progress.error, 5)
    assert again.error(again.job_asked("cifar", "export")) is None
    assert not again.sent(RunJob)
    with pytest.raises(ValueError, match="no end"):
        again.scheduler.machine.jobs.restore_ended("x", {**entry["record"], "state": "running"}, -1)


# -------------------------------------------------------------------------------------- versions


def trained(rig: Rig, name: str = "cifar", step: int = 3) -> Any:
    """Return a job that has a commit on disk and continues to train."""
    job = rig.start_training(name)
    rig.committed(job, 1, step)
    rig.written(job, step)
    return job


SPEC = msgspec.msgpack.encode({"name": "net", "source": "x.bundle", "weights": ""}).decode("latin1")


def register_net(rig: Rig, *, pin: bool = False) -> None:
    _, op_id = rig.begin("net", spec=SPEC, spec_digest="first", pin=pin)
    rig.built("net", 10, op_id)
    rig.stored("net", op_id)
    rig.prepared()


def net_and_job(rig: Rig) -> Any:
    """Register a model; return a job that can be published as its next version."""
    register_net(rig)
    return trained(rig)


def ask_publish(rig: Rig, job: Any, step: int = -1) -> ev.Token:
    return rig.ask(ev.PublishRequest, model="net", job=job.spec.name, step=step)


def publication(rig: Rig) -> Any:
    """Return the order that copies a commit for a publication, not an order for the job itself."""
    (order,) = [one for one in rig.sent(PersistCommit) if one.directory.startswith("published/")]
    return order


def copied(rig: Rig, job: Any, step: int = 3) -> Any:
    """Report the publication's commit as copied; return the order to build the version."""
    order = publication(rig)
    rig.daemon(CommitPersisted(job=job.spec.name, op_id=order.op_id, step=step))
    (build,) = rig.commands(ev.StartBuild)
    return build


def comes(rig: Rig, build: Any, digest: str = "") -> None:
    """Finish a version's build, store and prepare the version; ``rig.seen`` has the commands."""
    manifest = manifest_of(digest or f"digest {build.model}", 10 * MIB, 2)
    done = BuildDone(model=build.model, op_id=build.op_id, digest=manifest.digest)
    rig.handle(received(done, manifest=manifest))
    rig.stored(build.model, build.op_id)
    rig.seen = rig.out
    rig.prepared()


def publish(rig: Rig, job: Any) -> None:
    token = ask_publish(rig, job)
    comes(rig, copied(rig, job))
    assert rig.error(token) is None


def versions_of(rig: Rig) -> list[tuple[int, bool]]:
    token = rig.ask(ev.Query, what="models", all_versions=True)
    rows = rig.answers[token].body["models"]
    return [(row["version"], row["current"]) for row in rows if row["name"] == "net"]


def test_a_model_is_resident_for_the_next_request_though_its_answer_overtook_the_daemon() -> None:
    """Send the worker's answer before the daemon's report that the copy has ended."""
    rig = Rig(arena_bytes=16 * MIB)
    rig.register("a")
    rig.register("b")
    first = rig.infer("a")
    rig.done()
    second = rig.infer("a")
    rig.arrived("a")
    rig.done()
    third = rig.infer("a")
    rig.done()
    rig.make_resident("b")  # evicts "a"
    fourth = rig.infer("a")
    rig.arrived("a")
    rig.done()
    residency = [rig.answers[token].timing.resident for token in (first, second, third, fourth)]
    assert residency == [False, True, True, False]


def test_a_request_whose_copy_ended_before_a_worker_was_free_is_not_called_resident() -> None:
    rig = Rig(arena_bytes=32 * MIB)
    rig.register("a")
    rig.register("b")
    rig.make_resident("b")
    tokens = [rig.infer("b"), rig.infer("b"), rig.infer("a")]  # "a" is sent ahead, beside "b"
    rig.now_ms += 3
    rig.arrived("a")
    rig.now_ms += 2
    tokens.append(rig.infer("a"))  # it waits for no copy
    for _ in tokens:
        rig.done()
    timings = [rig.answers[token].timing for token in tokens]
    assert [one.resident for one in timings] == [True, True, False, True]
    assert [one.copy_ms for one in timings] == [0, 0, 3, 0]


def infer_of(rig: Rig, registration_id: int) -> ev.Token:
    """Send a request for version 1, like a frontend that does not know of its removal yet."""
    token = rig.token()
    fields = {"digest": "digest net", "registration_id": registration_id}
    rig.handle(arrival(token, "net", rig.now_ms, **fields))
    return token


def rollback(rig: Rig, version: int = 0, tenant: str | None = None) -> ev.Token:
    return rig.ask(ev.RollbackRequest, model="net", version=version, tenant=tenant)


def test_a_publication_is_a_copy_of_the_commit_a_build_and_then_the_current_version(
    rig: Rig,
) -> None:
    job = net_and_job(rig)
    token = ask_publish(rig, job)
    (order,) = rig.sent(PersistCommit)
    assert (order.directory, order.is_lasting) == (f"published/cifar@{order.op_id}", False)
    build = copied(rig, job)
    spec = msgspec.msgpack.decode(build.spec)
    assert spec == {
        "name": "net 2",
        "source": "models/digest net/program.bundle",
        "weights": order.directory,
        "part": "",
    }
    assert not job.memory.is_persisting
    assert versions_of(rig) == [(1, True), (2, False)]
    comes(rig, build)
    assert rig.answers[token].body["version"] == 2
    assert versions_of(rig) == [(1, False), (2, True)]
    kinds = [c.entry["kind"] for c in rig.seen if isinstance(c, ev.Journal)]
    assert kinds == ["model", "serving"], "a crash in between leaves the old version current"
    announcements = [c for c in rig.seen if isinstance(c, ev.ModelAvailable) and c.is_current]
    assert [(c.model, c.base, c.version) for c in announcements] == [("net@2", "net", 2)]
    assert ev.DropPublished(directory=order.directory) in rig.seen


def test_versions_that_nothing_keeps_leave_when_no_request_wants_them(rig: Rig) -> None:
    job = net_and_job(rig)
    publish(rig, job)
    waits = rig.infer("net")  # for version 1: the frontend does not know version 2 yet
    publish(rig, job)
    notes = [rig.answers[token].body.get("notes") for token in sorted(rig.answers)]
    assert notes[-2:] == [[], ["version 1 was removed ([jobs] keep_versions)"]]
    assert versions_of(rig) == [(1, False), (2, False), (3, True)]
    assert rig.scheduler.machine.models["net"].state.state is ModelState.LEAVING
    rig.job_ends(job, "done")
    rig.arrived("net")
    rig.done()
    assert rig.error(waits) is None
    assert versions_of(rig) == [(2, False), (3, True)]
    registration_id = rig.scheduler.machine.served["net"].born
    late = infer_of(rig, registration_id)
    assert rig.state.requests[late].model == "net@3", "nobody reads of a version that has left"
    assert isinstance(rig.error(infer_of(rig, 0)), errors.ModelNotFound), "it asked for version 1"
    assert isinstance(rig.error(infer_of(rig, registration_id - 1)), errors.ModelNotFound), (
        "another model's"
    )


def test_rolling_back_changes_the_current_version_and_the_pin(rig: Rig) -> None:
    register_net(rig, pin=True)
    job = trained(rig)
    publish(rig, job)
    models = rig.scheduler.machine.models
    assert (models["net"].want_pinned, models["net@2"].want_pinned) == (False, True)
    token = rollback(rig)
    assert rig.answers[token].body == {"model": "net", "version": 1, "before": 2}
    assert versions_of(rig) == [(1, True), (2, False)]
    assert models["net"].want_pinned
    assert "before 1" in rig.error(rollback(rig)).message
    assert "no version 7" in rig.error(rollback(rig, 7)).message
    assert isinstance(rig.error(rollback(rig, 2, tenant="ada")), errors.PermissionDenied)
    assert rig.error(rollback(rig, 2)) is None
    publish(rig, job)
    assert versions_of(rig)[-1] == (3, True), "a number is given once"


def test_the_same_weights_again_are_the_version_that_is_there(rig: Rig) -> None:
    job = net_and_job(rig)
    publish(rig, job)
    token = ask_publish(rig, job)
    comes(rig, copied(rig, job), digest="digest net@2")
    assert rig.answers[token].body["version"] == 2
    assert versions_of(rig) == [(1, False), (2, True)]
    publish(rig, job)
    assert versions_of(rig)[-1] == (3, True)


def test_a_publication_that_is_refused_leaves_everything_as_it_was(rig: Rig) -> None:
    job = net_and_job(rig)
    assert "step 3" in rig.error(ask_publish(rig, job, step=2)).message
    token = ask_publish(rig, job, step=3)
    (order,) = rig.sent(PersistCommit)
    rig.daemon(CommitPersisted(job=job.spec.name, op_id=order.op_id, step=4))
    assert "step 4" in rig.error(token).message
    assert ev.DropPublished(directory=order.directory) in rig.out

    token = ask_publish(rig, job)
    (order,) = rig.sent(PersistCommit)
    rig.daemon(DaemonFault(op_id=order.op_id, reason="no area"))
    assert "no area" in rig.error(token).message

    token = ask_publish(rig, job)
    build = copied(rig, job)
    failed = BuildFailed(
        model=build.model, op_id=build.op_id, error="RegistrationRefused", message="w differs"
    )
    rig.handle(received(failed))
    assert "w differs" in rig.error(token).message
    assert any(isinstance(c, ev.DropPublished) for c in rig.out)
    rig.handle(exited(build.op_id, 0))
    assert versions_of(rig) == [(1, True)]
    publish(rig, job)
    assert versions_of(rig) == [(1, False), (2, True)]


def test_a_copy_that_a_dead_daemon_had_is_made_by_the_next(rig: Rig) -> None:
    job = net_and_job(rig)
    token = ask_publish(rig, job)
    (order,) = rig.sent(PersistCommit)
    rig.daemon_exits()
    assert ev.DropPublished(directory=order.directory) in rig.out
    (one,) = rig.scheduler.publishing._lines["net"]
    assert (one.stage, one.directory) == ("waits", ""), "it is not read"
    rig.daemon_returns()
    comes(rig, copied(rig, job))
    assert rig.answers[token].body["version"] == 2


def test_a_share_of_requests_goes_to_a_version_until_another_one_is_chosen(rig: Rig) -> None:
    job = net_and_job(rig)
    publish(rig, job)
    versions = rig.scheduler.versions

    def split(share: int, version: int = 1) -> ev.Token:
        return rig.ask(ev.RollbackRequest, model="net", version=version, share=share)

    def came(registration_id: int) -> int:
        """Return how many of 2,000 requests went to version 1."""
        fields = {"digest": "digest net@2", "registration_id": registration_id}
        event = arrival(rig.token(), "net@2", **fields)
        went = [rig.scheduler.admission._of_a_version_that_is_there(event) for _ in range(2000)]
        return sum((one.model, one.digest) == ("net", "digest net") for one in went)

    born = versions.served("net").born
    assert came(born) == 0
    assert rig.error(split(10)) is None
    assert rig.commands(ev.Journal)[0].entry["shares"] == [(1, 10)]
    assert abs(came(born) - 200) <= 2
    assert came(0) == came(born + 1) == 0, "it named a version, or another registration's"
    assert [versions.share(model) for model in versions.all_of("net")] == [10, 90]
    assert "version 2 is the current one" in rig.error(split(10, version=2)).message
    assert rig.error(split(0)) is None
    assert came(born) == 0
    split(50)
    publish(rig, job)
    assert versions.served("net").shares == {}
    for registration_id, model in {0: "net@2", born: "net@3"}.items():
        event = arrival(rig.token(), "net@2", registration_id=registration_id)
        went = rig.scheduler.admission._of_a_version_that_is_there(event)
        assert went.model == model, "a frontend may not know the current version yet"


def test_a_split_with_a_quarantined_version_answers_from_the_current_one(rig: Rig) -> None:
    register_net(rig)
    job = trained(rig)
    publish(rig, job)
    rig.job_ends(job, "done")
    versions = rig.scheduler.versions
    assert rig.error(rig.ask(ev.RollbackRequest, model="net", version=1, share=50)) is None
    registration_id = versions.served("net").born

    def answers(count: int) -> list[str]:
        """Serve ``count`` requests without a version; return the sorted names of their models."""
        tokens = [rig.infer("net@2", registration_id=registration_id) for _ in range(count)]
        of = []
        while rig.state.owner.running is not None:
            of.append(rig.state.owner.running.model)
            if rig.state.replicas[of[-1]].is_being_sent:
                rig.arrived(of[-1])
            rig.done()
        assert [rig.error(token) for token in tokens] == count * [None]
        return sorted(of)

    assert answers(10) == 5 * ["net"] + 5 * ["net@2"]
    tokens = [rig.infer("net") for _ in range(3)]
    for _ in tokens:
        rig.worker_restarts(rig.state.owner.running.slot)
    assert isinstance(rig.error(rig.infer("net")), errors.ModelQuarantined)
    answers(0)  # requests that were dispatched before may still end
    assert answers(10) == 10 * ["net@2"]
    assert [versions.share(model) for model in versions.all_of("net")] == [50, 50]


def test_a_job_that_is_over_is_published_from_its_state_on_disk(rig: Rig) -> None:
    job = net_and_job(rig)
    rig.job_ends(job, "done")
    rig.daemon(CommitPersisted(job=job.spec.name, op_id=job.op_id, step=3))
    ask_publish(rig, job)
    (build,) = rig.commands(ev.StartBuild)
    assert msgspec.msgpack.decode(build.spec)["weights"] == "commits/cifar"
    comes(rig, build)
    assert not [c for c in rig.seen if isinstance(c, ev.DropPublished)]
    assert versions_of(rig) == [(1, False), (2, True)]


def test_a_model_and_all_its_versions_are_unregistered_together(rig: Rig) -> None:
    job = net_and_job(rig)
    publish(rig, job)
    rollback(rig)
    token = rig.ask(ev.UnregisterRequest, model="net")
    assert rig.error(token) is None
    assert versions_of(rig) == []
    gone = [c.entry for c in rig.commands(ev.Journal)]
    assert {"kind": "model-gone", "name": "net@2"} in gone or not rig.scheduler.machine.models
    assert not rig.scheduler.machine.served
    register_net(rig)
    assert versions_of(rig) == [(1, True)]


class Recording(Rig):
    """Scheduler, with the entries that its journal got."""

    def __init__(self) -> None:
        self.written: list[tuple[str, str]] = []
        super().__init__()

    def _take(self, commands: list[ev.Command]) -> None:
        super()._take(commands)
        entries = [one.entry for one in commands if isinstance(one, ev.Journal)]
        self.written += [(one["kind"], one["name"]) for one in entries]


def restored_net(current: int = 3, *, fails: tuple[int, ...] = (3,)) -> Recording:
    """Return a restored server with the versions 2 and 3, some of which have damaged files."""
    again = Recording()
    again.scheduler.versions.restore("net", current, 4, "first", there=[2, 3])
    for number in (2, 3):
        name = f"net@{number}"
        manifest = manifest_of(f"digest {name}", 10 * MIB, 2)
        again.ask_register(name, spec=SPEC, spec_digest="first", is_known=True, restored=manifest)
        op_id = again.scheduler.registry.registrations[name].build_id
        if number in fails:
            fields = {"error": "RegistrationRefused", "message": "damaged"}
            again.handle(received(BuildFailed(model=name, op_id=op_id, **fields)))
            again.handle(exited(op_id, 1))
        else:
            again.built(name, 10, op_id)
            again.stored(name, op_id)
    return again


def test_the_next_server_serves_the_version_that_the_journal_names() -> None:
    again = restored_net(fails=())
    assert versions_of(again) == [(2, False), (3, True)]
    again.ask_register("net", spec_digest="first")
    assert isinstance(again.error(again.ask_register("net")), errors.AlreadyExists)


def test_no_start_changes_the_served_version() -> None:
    again = restored_net()
    assert ("serving", "net") not in again.written
    [failed] = again.scheduler.listing.models()
    assert (failed["version"], failed["state"], failed["reason"]) == (3, "failed", "damaged")
    assert versions_of(again) == [(2, False), (3, False)]
    for token in (
        again.ask_register("net", spec_digest="first"),
        again.ask(ev.VersionRequest, model="net", spec=b"\x81\xa7weights\xa1f"),
        again.ask(ev.RollbackRequest, model="net", version=2, share=10),
        again.ask(ev.PinRequest, model="net", pin=True),
    ):
        assert isinstance(again.error(token), errors.ModelNotFound)  # the frontend says why


def test_its_owner_replaces_a_failed_version() -> None:
    again = restored_net()
    assert again.answers[rollback(again)].body == {"model": "net", "version": 2, "before": 3}
    assert (versions_of(again)[0], again.written[-1]) == ((2, True), ("serving", "net"))
    again = restored_net()
    unregister(again, "net@3")
    assert versions_of(again) == [(2, True)]
    assert again.written[-2:] == [("model-gone", "net@3"), ("serving", "net")]
    again = restored_net(2)  # another than the served version is failed
    assert versions_of(again)[0] == (2, True)
    unregister(again, "net@3")
    assert again.written[-1] == ("model-gone", "net@3")


@pytest.mark.parametrize("fails", [(3,), (2, 3)])
def test_a_name_with_failed_versions_is_unregistered_as_a_whole(fails: tuple[int, ...]) -> None:
    again = restored_net(fails=fails)
    assert again.error(unregister(again)) is None
    gone = again.written
    assert {("model-gone", "net@2"), ("model-gone", "net@3"), ("serving-gone", "net")} <= {*gone}
    assert gone.index(("serving-gone", "net")) > max(
        (at for at, key in enumerate(gone) if key == ("serving", "net")), default=-1
    )
    assert versions_of(again) == []


def test_a_new_model_takes_the_name_of_failed_versions() -> None:
    again = restored_net(fails=(2, 3))
    again.register("net")
    assert {("model-gone", "net@2"), ("model-gone", "net@3"), ("serving-gone", "net")} <= {
        *again.written
    }
    assert versions_of(again) == [(1, True)]


def script_publishes(
    rig: Rig,
    job: Any,
    step: int,
    *,
    model: str = "net",
    wide: bool = False,
    parts: tuple[str, ...] = ("model",),
    part: str = "",
) -> Any:
    """Publish a job's model from its script, perhaps with wider tensors; return the answer."""
    served = rig.scheduler.versions.current(model)
    weights = served.manifest.tensors if served is not None and served.manifest else ()
    more = (9,) if wide else ()
    tensors = tuple(
        (f"{part}.{w.name}", w.dtype, (*w.shape, *more)) for part in parts for w in weights
    )
    message = PublishStep(op_id=job.op_id, model=model, step=step, tensors=tensors, part=part)
    rig.worker(job.slot, message)
    (answer,) = rig.sent(PublishAnswered)
    return answer


def test_a_script_publishes_the_commit_of_its_step_and_commits_again_when_it_is_copied(
    rig: Rig,
) -> None:
    job = net_and_job(rig)
    assert not script_publishes(rig, job, step=5).error
    assert not rig.sent(PersistCommit), "step 3 is not what it publishes"
    rig.committed(job, 2, 5)
    build = copied(rig, job, step=5)
    assert [m.op_id for m in rig.sent(PublishCopied)] == [job.op_id]
    comes(rig, build)
    assert versions_of(rig) == [(1, False), (2, True)]


def script_publishes_and_commits(rig: Rig, job: Any, number: int, step: int) -> None:
    assert not script_publishes(rig, job, step=step).error
    rig.committed(job, number, step)


def is_copied(rig: Rig, job: Any, step: int) -> str:
    """Report the publication's commit as copied; return its folder."""
    order = publication(rig)
    rig.daemon(CommitPersisted(job=job.spec.name, op_id=order.op_id, step=step))
    return str(order.directory)


def weights_of(builds: list[Any]) -> list[str]:
    return [msgspec.msgpack.decode(build.spec)["weights"] for build in builds]


def test_each_publication_of_a_script_becomes_a_version_in_order(rig: Rig) -> None:
    job, folders, built, builds = net_and_job(rig), [], [], []
    for number, step in enumerate((5, 6, 7, 8), 2):
        script_publishes_and_commits(rig, job, number, step)
        folders.append(is_copied(rig, job, step))
        assert [m.op_id for m in rig.sent(PublishCopied)] == [job.op_id], "it trains on"
        builds += rig.commands(ev.StartBuild)
    while builds:
        built += builds
        comes(rig, builds[0])
        builds = [c for c in rig.seen if isinstance(c, ev.StartBuild)]
    assert weights_of(built) == folders
    assert [build.model for build in built] == ["net@2", "net@3", "net@4", "net@5"]
    assert versions_of(rig) == [(4, False), (5, True)]
    assert job.progress.why == ""


def test_a_script_that_publishes_faster_than_versions_are_built_waits(rig: Rig) -> None:
    job = net_and_job(rig)
    for number in range(2, MAX_COPIES + 3):
        script_publishes_and_commits(rig, job, number, number + 3)
        is_copied(rig, job, number + 3)
        if number == 2:
            (build,) = rig.commands(ev.StartBuild)
    script_publishes_and_commits(rig, job, 40, 40)
    assert not [o for o in rig.sent(PersistCommit) if o.directory.startswith("published/")]
    assert not rig.sent(PublishCopied), "its next publication waits"
    comes(rig, build)
    rig.out = rig.seen
    is_copied(rig, job, 40)
    assert rig.sent(PublishCopied)
    assert len(rig.scheduler.publishing._lines["net"]) == MAX_COPIES + 1


def test_a_publication_whose_commit_does_not_come_holds_up_nobody(rig: Rig) -> None:
    """Publish step 9 of a job that never ends this step."""
    job = net_and_job(rig)
    script_publishes(rig, job, step=9)
    token = ask_publish(rig, job)
    comes(rig, copied(rig, job))
    assert rig.answers[token].body["version"] == 2
    script_publishes(rig, job, step=7)
    rig.committed(job, 2, 7)
    build = copied(rig, job, step=7)
    rig.committed(job, 3, 9)
    is_copied(rig, job, 9)
    assert not rig.commands(ev.StartBuild), "one is built at a time"
    comes(rig, build)
    assert [c.model for c in rig.seen if isinstance(c, ev.StartBuild)] == ["net@4"]


def test_a_clients_publication_waits_for_a_scripts_and_none_takes_its_place(rig: Rig) -> None:
    job = net_and_job(rig)
    script_publishes(rig, job, step=3)
    first = copied(rig, job)
    token = ask_publish(rig, job)
    assert not rig.sent(PersistCommit), "it is of what is newest at its turn"
    script_publishes(rig, job, step=5)
    rig.committed(job, 2, 5)
    order = publication(rig)
    rig.daemon(CommitPersisted(job=job.spec.name, op_id=order.op_id, step=5))
    comes(rig, first)
    rig.out = rig.seen
    comes(rig, copied(rig, job, step=5))
    assert rig.answers[token].body["version"] == 3
    (last,) = [c for c in rig.seen if isinstance(c, ev.StartBuild)]
    assert msgspec.msgpack.decode(last.spec)["weights"].endswith(f"@{order.op_id}")


def test_a_publication_waits_until_its_model_is_there(rig: Rig) -> None:
    rig.ask_register("net", spec=SPEC, spec_digest="first")
    (build,) = rig.commands(ev.StartBuild)
    job = trained(rig)
    assert "building" in script_publishes(rig, job, step=3).message, "no shapes to compare with"
    token = ask_publish(rig, job)
    order = publication(rig)
    rig.daemon(CommitPersisted(job=job.spec.name, op_id=order.op_id, step=3))
    rig.built("net", 10, build.op_id)
    assert token not in rig.answers
    rig.stored("net", build.op_id)
    comes(rig, rig.commands(ev.StartBuild)[0])
    assert rig.answers[token].body["version"] == 2


def test_a_script_publishes_over_models_of_its_owner_alone(rig: Rig) -> None:
    rig.register("ada.m")
    job = trained(rig)
    answer = script_publishes(rig, job, step=3, model="ada.m")
    assert (answer.error, job.progress.why) == ("PermissionDenied", "")
    assert script_publishes(rig, job, step=3, model="mine").error == "ModelNotFound"
    assert not rig.scheduler.publishing._lines
    job.spec = replace(job.spec, tenant="ada")
    assert not script_publishes(rig, job, step=3, model="ada.m").error


def test_a_script_reads_which_shapes_differ(rig: Rig) -> None:
    register_net(rig)
    answer = script_publishes(rig, trained(rig), step=3, wide=True)
    assert answer.error == "RegistrationRefused"
    assert ",9]" in answer.data["reason"]


def test_a_script_says_which_part_where_several_fit(rig: Rig) -> None:
    register_net(rig)
    job, parts = trained(rig), ("net", "ema")
    answer = script_publishes(rig, job, step=3, parts=parts)
    assert (answer.error, answer.message) == (
        "InvalidInput",
        'several parts of the job fit the model: "ema", "net"',
    )
    assert not rig.scheduler.publishing._lines
    assert not script_publishes(rig, job, step=3, parts=parts, part="ema").error
    assert msgspec.msgpack.decode(copied(rig, job).spec)["part"] == "ema"


def test_a_script_whose_worker_died_is_not_told_of_its_copy(rig: Rig) -> None:
    job = net_and_job(rig)
    script_publishes(rig, job, step=3)
    (order,) = rig.sent(PersistCommit)
    rig.worker_exits(job.slot)
    rig.daemon(CommitPersisted(job=job.spec.name, op_id=order.op_id, step=3))
    assert not [m for m in rig.sent(PublishCopied) if m.op_id != job.op_id]
    assert rig.commands(ev.StartBuild)


def test_a_publication_ends_with_its_job(rig: Rig) -> None:
    job = net_and_job(rig)
    script_publishes(rig, job, step=9)
    rig.job_ends(job, "failed")
    assert "ended before step 9" in job.progress.why
    assert not rig.scheduler.publishing._lines


def registers(rig: Rig, tenant: str) -> None:
    """Register the name ``net`` for a tenant."""
    token = rig.ask_register("net", spec=SPEC, spec_digest=tenant, client=tenant, tenant=tenant)
    comes(rig, rig.commands(ev.StartBuild)[0])
    assert rig.error(token) is None


def unregister(rig: Rig, model: str = "net") -> ev.Token:
    return rig.ask(ev.UnregisterRequest, model=model)


def test_a_publication_is_of_the_registration_it_was_accepted_for(rig: Rig) -> None:
    registers(rig, "ada")
    job = trained(rig)
    job.spec = replace(job.spec, tenant="ada")
    assert not script_publishes(rig, job, step=9).error
    assert rig.error(unregister(rig)) is None
    registers(rig, "bob")
    rig.committed(job, 2, 9)
    order = publication(rig)
    rig.daemon(CommitPersisted(job=job.spec.name, op_id=order.op_id, step=9))
    assert not rig.commands(ev.StartBuild)
    assert ev.DropPublished(directory=order.directory) in rig.out
    assert versions_of(rig) == [(1, True)]
    assert "as another model" in job.progress.why


def over(rig: Rig) -> Any:
    """Return a job that is done and has its state on disk."""
    job = trained(rig)
    rig.job_ends(job, "done")
    rig.daemon(CommitPersisted(job=job.spec.name, op_id=job.op_id, step=3))
    return job


def replaced(rig: Rig, job: Any) -> Any:
    """Submit another job of the same name; return its record."""
    rig.handle(
        ev.TrainRequest(
            token=rig.token(), spec=ev.JobSpec(name=job.spec.name, entry="e:f", args=(), priority=2)
        )
    )
    assert rig.state.jobs[job.spec.name] is not job
    return rig.state.jobs[job.spec.name]


def test_a_job_of_another_server_counts_on(rig: Rig) -> None:
    past = {"resumes": True, "restarts": 2, "steps_recomputed": 30, "last_step": 7}
    rig.handle(
        ev.TrainRequest(
            token=rig.token(), spec=ev.JobSpec(name="j", entry="e:f", args=(), priority=2), **past
        )
    )
    progress, [run] = rig.state.jobs["j"].progress, rig.sent(RunJob)
    # This server has no commit of the job, so the job repeats its seven steps.
    assert (progress.restarts, progress.steps_recomputed) == (2, 37)
    assert (run.restarts, run.steps_recomputed, run.last_step) == (2, 37, 7)


def test_a_build_that_reads_a_jobs_state_ends_with_the_job(rig: Rig) -> None:
    register_net(rig)
    job = over(rig)
    token = ask_publish(rig, job)
    (build,) = rig.commands(ev.StartBuild)
    new = replaced(rig, job)
    assert ev.Kill(builder(build.op_id)) in rig.out
    assert "no job" in rig.error(token).message
    rig.handle(exited(build.op_id, -9))
    assert versions_of(rig) == [(1, True)]
    assert new.progress.why == ""


def test_a_publication_that_waits_for_another_build_ends_with_its_job(rig: Rig) -> None:
    register_net(rig)
    job = over(rig)
    ask_publish(rig, job)
    (build,) = rig.commands(ev.StartBuild)
    token = ask_publish(rig, job)
    replaced(rig, job)
    rig.handle(exited(build.op_id, -9))
    assert "no job" in rig.error(token).message
    assert not rig.commands(ev.StartBuild)


def test_one_version_is_unregistered_alone_and_the_one_before_serves_at_once(rig: Rig) -> None:
    """The server also does this with a new version that it cannot write to the journal."""
    register_net(rig, pin=True)
    job = trained(rig)
    publish(rig, job)
    waits = rig.infer("net@2")
    token = unregister(rig, "net@2")
    models = rig.scheduler.machine.models
    assert rig.scheduler.versions.current("net") is models["net"]
    assert models["net"].want_pinned
    announcements = [c for c in rig.out if isinstance(c, ev.ModelAvailable | ev.ModelRemoved)]
    assert [(type(c), c.model) for c in announcements] == [
        (ev.ModelAvailable, "net"),
        (ev.ModelRemoved, "net@2"),
    ], "a request between the two finds a current version"
    written = [(c.entry["kind"], c.entry["name"]) for c in rig.commands(ev.Journal)]
    assert ("model", "net@2") not in written
    assert token not in rig.answers
    rig.job_ends(job, "done")
    rig.arrived("net@2")
    rig.done()
    assert rig.error(waits) is None
    assert rig.answers[token].body == {"model": "net@2"}
    assert versions_of(rig) == [(1, True)]
    assert isinstance(rig.error(unregister(rig, "net@2")), errors.ModelNotFound)


def test_a_name_and_one_of_its_versions_are_unregistered_at_a_time(rig: Rig) -> None:
    job = net_and_job(rig)
    publish(rig, job)
    waits = rig.infer("net@2")
    one, name = unregister(rig, "net@2"), unregister(rig)
    assert not {one, name} & {*rig.answers}
    rig.job_ends(job, "done")
    rig.arrived("net@2")
    rig.done()
    assert rig.error(waits) is None
    assert rig.answers[one].body == {"model": "net@2"}
    assert rig.answers[name].body == {"model": "net"}
    assert not rig.scheduler.machine.models
    assert {"kind": "model-gone", "name": "net@2"} in [c.entry for c in rig.commands(ev.Journal)]


def test_a_name_whose_current_version_the_journal_lacks_has_none() -> None:
    again = restored_net(4, fails=())
    again.scheduler.versions.restore("gone", 2, 2, "first", there=[])
    assert versions_of(again) == [(2, False), (3, False)]
    assert again.scheduler.machine.served["net"].last == 4, "a number is given once"
    assert "gone" not in again.scheduler.machine.served


def test_the_version_that_was_just_current_is_kept_not_the_one_that_was_rolled_back(
    rig: Rig,
) -> None:
    job = net_and_job(rig)
    publish(rig, job)
    rollback(rig)
    publish(rig, job)
    assert versions_of(rig) == [(1, False), (3, True)]
    assert rig.answers[rollback(rig)].body == {"model": "net", "version": 1, "before": 3}


@pytest.mark.parametrize("stage", ["waits", "copies", "copied", "builds"])
def test_a_publication_that_is_cancelled_changes_nothing(rig: Rig, stage: str) -> None:
    job = net_and_job(rig)
    other = None
    if stage == "copied":  # this publication waits for another publication's build
        ask_publish(rig, job)
        other = copied(rig, job)
    if stage == "waits":
        rig.state.daemon.is_ready = False
    token = ask_publish(rig, job, step=3)
    build = copied(rig, job) if stage == "builds" else None
    orders = rig.sent(PersistCommit)
    if stage == "copied":
        rig.daemon(CommitPersisted(job=job.spec.name, op_id=orders[0].op_id, step=3))
    rig.handle(ev.CancelRequest(token=token))
    assert isinstance(rig.error(token), errors.Cancelled)
    rig.state.daemon.is_ready = True
    if stage == "copies":
        assert not rig.commands(ev.DropPublished), "the daemon still writes there"
        rig.daemon(CommitPersisted(job=job.spec.name, op_id=orders[0].op_id, step=3))
        assert rig.commands(ev.DropPublished)
    for one in filter(None, (build, other)):
        rig.handle(exited(one.op_id, -9))
    rig.tick(rig.now_ms + 1.0)
    assert not rig.commands(ev.StartBuild)
    assert not rig.scheduler.publishing._lines
    assert versions_of(rig) == [(1, True)]


def test_a_job_from_another_server_begins_at_its_commit(rig: Rig) -> None:
    """A paused job stays paused. A job without room for its commits is refused without a trace."""
    job = over(rig)  # an older job of the same name; its files are removed first
    for step, slot_bytes, is_paused in ((7, MIB, True), (9, 1 << 40, False)):
        token, loaded = rig.token(), ev.LoadedCommit(slot_bytes, step, 5)
        name = job.spec.name if is_paused else "large"
        rig.handle(
            ev.TrainRequest(
                token=token,
                spec=ev.JobSpec(name=name, entry="t.py", args=(), priority=1),
                resumes=True,
                is_paused=is_paused,
                loaded=loaded,
            )
        )
        if not is_paused:
            assert isinstance(rig.error(token), errors.HostStoreFull)
            assert name not in rig.state.jobs
            continue
        kinds = [
            type(one)
            for one in rig.out
            if isinstance(one, ev.RemoveJob | ev.CreateCommits | ev.Journal)
        ]
        assert kinds == [ev.RemoveJob, ev.CreateCommits, ev.Journal, ev.Journal]
        new_job = rig.state.jobs[name]
        assert (new_job.state.state, new_job.memory.persisted_step) == (TaskState.PAUSED, 7)
