"""The scheduler: ``handle(event, now_ms) -> [command]``. No thread, clock, socket or torch.

The live server, the simulator and the model checker run this very object. It owns all
records; its parts each own one concern: ``arena``, ``store``, ``residents`` and ``slices`` (bytes),
``registry`` (models), ``admission``, ``dispatch``, ``turns`` and ``endings`` (requests and the
switch), ``jobs`` (the book of jobs), ``training`` (the device's idle time), ``leases`` and
``commits`` (slices and what is kept of them), ``profiling``, ``trials`` and ``plans`` (measured
times and the groups made from them), ``fleet`` (processes), ``listing`` (rows).
"""

from __future__ import annotations

import math
from os import EX_SOFTWARE

from ..errors import InvalidInput, ModelNotFound, ServerUnavailable
from ..ipc.messages import (
    BuildDone,
    BuildFailed,
    BuildProgress,
    Cleaned,
    CommitPersisted,
    CommitStep,
    DaemonFault,
    DaemonReady,
    Epoch,
    InferenceDone,
    InferenceFailed,
    JobEnded,
    JobReport,
    LeaseRequest,
    ModelName,
    ModelPrepared,
    ModelStored,
    Parked,
    Pong,
    Scrubbed,
    StepCommitted,
    StoreFailed,
    TransmitEnded,
    WorkerReady,
)
from .admission import Admission
from .arena import Arena
from .commits import Commits
from .core import Core, SchedulerSettings
from .dispatch import Dispatch
from .endings import Endings
from .events import (
    BuilderExited,
    CancelAsked,
    Command,
    DaemonExited,
    DrainAsked,
    Event,
    FromBuilder,
    FromDaemon,
    FromWorker,
    InferArrived,
    JobAsked,
    Leave,
    PinAsked,
    PingAsked,
    PrefetchHint,
    ProfileAsked,
    Query,
    RegisterAsked,
    Tick,
    TrainAsked,
    UnregisterAsked,
    WorkerExited,
)
from .fleet import Fleet
from .health import Health
from .jobs import Jobs
from .leases import Leases
from .listing import Listing
from .plans import Plans
from .policies import make_policy
from .profiling import Profiling
from .records import Worker
from .registry import Registry
from .residency import Residents
from .slices import Slices
from .states import MODEL_AWAITED, TASK_ON_WORKER, ModelState, TaskState, WorkerEvent, WorkerState
from .store import Store
from .training import Training
from .trials import Trials
from .turns import Turns
from .wakeups import Wakeups


class Scheduler:
    """Decides everything; performs nothing."""

    def __init__(self, settings: SchedulerSettings, policy: str = "priority",
                 max_wait_ms: float = 2000.0) -> None:  # fmt: skip
        self.core = Core(settings, make_policy(policy, max_wait_ms=max_wait_ms))
        self.arena = Arena(self.core)
        self.store = Store(self.core, self.arena)
        self.residents = Residents(self.core, self.arena)
        self.slices = Slices(self.core, self.arena, self.residents)
        self.commits = Commits(self.core, self.arena, self.store)
        self.jobs = Jobs(self.core, self.commits)
        self.leases = Leases(self.core, self.arena, self.slices, self.commits)
        self.training = Training(self.core, self.slices, self.jobs, self.leases, self.commits)
        self.admission = Admission(self.core)
        self.turns = Turns(self.core)
        self.dispatch = Dispatch(
            self.core, self.arena, self.residents, self.training, self.admission, self.turns
        )
        self.endings = Endings(self.core, self.residents, self.admission)
        self.registry = Registry(self.core, self.store, self.residents, self.admission)
        self.plans = Plans(self.core, self.residents)
        self.trials = Trials(self.core, self.arena, self.residents, self.dispatch)
        self.profiling = Profiling(self.core, self.plans, self.trials)
        self.fleet = Fleet(self.core)
        self.health = Health(self.core)
        self.listing = Listing(self.core, self.arena, self.store, self.jobs, self.plans)

    def start(self, now_ms: float) -> list[Command]:
        """The first commands: spawn the memory daemon."""
        self.core.now_ms = now_ms
        self.fleet.start()
        return self._take_out()

    def handle(self, event: Event, now_ms: float) -> list[Command]:
        """Take one event, return what must be done because of it, in order."""
        return [*self.decide(event, now_ms), *self.settle()]

    def decide(self, event: Event, now_ms: float) -> list[Command]:
        """The urgent half of ``handle``: answers, and what the device is to do next.

        ``settle`` must follow before the next event. Between the two the urgent commands can be
        on their way already, which saves a request some 0.05 ms.
        """
        self.core.now_ms = max(self.core.now_ms, now_ms)
        self.core.wakeups.forget_until(self.core.now_ms)
        if self.core.has_left:
            self._refuse_late(event)
        else:
            self._take(event)
            if isinstance(event, InferArrived | FromWorker):
                self._dispatch()
        return self._take_out()

    def settle(self) -> list[Command]:
        """The rest of ``handle``: the timeline, and everything that can wait for a moment."""
        self.endings.trace_ended()
        self._pump()
        return self._take_out()

    def next_wakeup_ms(self) -> float | None:
        """When a Tick is wanted at the latest; None when only events matter."""
        next_ms = self.core.wakeups.next_ms
        return next_ms if next_ms < math.inf else None

    @property
    def waited_since_ms(self) -> float | None:
        """When the oldest request came that has no answer yet; None when none waits."""
        oldest = next(iter(self.core.requests.values()), None)
        return oldest.arrived_at_ms if oldest is not None else None

    @property
    def is_ready(self) -> bool:
        """The daemon owns its memory and a worker can take a request."""
        return self.core.is_ready

    def _take_out(self) -> list[Command]:
        out, self.core.out = self.core.out, []
        return out

    # -- events -------------------------------------------------------------------------------

    def _take(self, event: Event) -> None:
        match event:
            case InferArrived():
                self.admission.arrived(event)
            case FromWorker():
                self._from_worker(event)
            case FromDaemon():
                self._from_daemon(event)
            case PrefetchHint():
                self.residents.prefetch(event.model)
            case CancelAsked():
                if not self.admission.cancel(event):
                    self.registry.cancel(event)
                    self.profiling.cancel(event.token)
            case RegisterAsked():
                self.registry.register(event)
            case UnregisterAsked():
                self.registry.unregister(event)
            case PinAsked():
                self.registry.pin(event)
            case TrainAsked():
                self.jobs.train(event)
            case JobAsked():
                self.jobs.asked(event)
            case ProfileAsked():
                self.profiling.asked(event)
            case Query():
                self._query(event)
            case PingAsked(token=token):
                self.health.asked(token)
            case DrainAsked():
                self._drain(event)
            case FromBuilder():
                self._from_builder(event)
            case BuilderExited():
                self.registry.builder_exited(event)
            case WorkerExited():
                self._worker_exited(event)
            case DaemonExited():
                self._daemon_exited(event)
            case Tick():
                pass

    def _from_worker(self, event: FromWorker) -> None:
        worker = self.core.workers.get(event.slot)
        if worker is None or worker.generation != event.generation:
            self.core.counts["stale_messages"] += 1
            return
        if not worker.is_alive:
            self.core.counts["stale_messages"] += 1
            return
        match event.message:
            case InferenceDone() as message:
                self.endings.done(worker, message)
                self.turns.give()
                self.fleet.served_well()
                if message.is_clean:
                    self._cleaned(worker, message.epoch)
            case InferenceFailed() as message:
                self.endings.failed(worker, message)
                self.turns.give()
            case Cleaned(epoch=epoch):
                self._cleaned(worker, epoch)
            case Parked() as message:
                if self.training.parked(worker, message):
                    self.turns.passed(message.next_turn)
                self.turns.give()
            case WorkerReady(pid=pid):
                self.fleet.worker_ready(worker, pid)
            case Pong(epoch=epoch):
                self.health.worker_answered(worker, epoch)
            case ModelPrepared() as message:
                self.fleet.prepared(worker, message)
            case LeaseRequest() as message:
                self.leases.requested(worker, message)
            case CommitStep() as message:
                self.commits.commit(worker, message)
            case JobReport() as message:
                self.jobs.report(worker, message)
            case JobEnded() as message:
                self.training.ended(worker, message)
                self.turns.give()
            case _:
                self.core.kill(worker, f"it sent a {type(event.message).__name__}")

    def _cleaned(self, worker: Worker, epoch: Epoch) -> None:
        if worker.task_epoch == epoch and worker.state.state is WorkerState.CLEANING:
            worker.state.apply(WorkerEvent.CLEANED, f"epoch {epoch}")

    def _from_daemon(self, event: FromDaemon) -> None:
        if event.generation != self.core.daemon_generation or not self.fleet.is_daemon_alive:
            self.core.counts["stale_messages"] += 1
            return
        match event.message:
            case TransmitEnded() as message:
                self.residents.transmit_ended(message)
            case DaemonReady(pid=pid):
                self.fleet.daemon_ready(pid)
                self.commits.daemon_ready()
                for model in self.core.models.values():
                    if model.state.state is ModelState.STORING:
                        self.registry.store_again(model)
            case ModelStored() as message:
                self.registry.stored(message)
            case StoreFailed() as message:
                self.registry.store_failed(message)
            case Scrubbed(epoch=epoch):
                self.slices.scrubbed(epoch)
            case StepCommitted() as message:
                self.commits.committed(message)
                self.fleet.served_well()
            case Pong(epoch=epoch):
                self.health.daemon_answered(epoch)
            case CommitPersisted() as message:
                self.commits.persisted(message)
            case DaemonFault() as message:
                self.core.counts["daemon_faults"] += 1
                self.slices.refused(message.epoch)
                self.residents.refused(message.epoch, message.reason)
                self.commits.refused(message.epoch, message.reason)
                self.registry.refused(message.epoch, message.reason)
                self.core.publish("worker.daemon_fault", reason=message.reason)
            case _:
                self.core.counts["stale_messages"] += 1

    def _from_builder(self, event: FromBuilder) -> None:
        match event.message:
            case BuildProgress() as message:
                self.registry.progress(message)
            case BuildDone() as message:
                assert event.manifest is not None
                model = self.registry.built(message, event.manifest)
                if model is not None:
                    self.plans.found(model, event.profiles)
            case BuildFailed() as message:
                self.registry.build_failed(message)
            case _:
                self.core.counts["stale_messages"] += 1

    def _worker_exited(self, event: WorkerExited) -> None:
        """Reaped: only now may another owner have what it could write (invariant I5)."""
        worker = self.core.workers.get(event.slot)
        if worker is None or worker.generation != event.generation or not worker.is_alive:
            return
        # A job's process leaves after its JobEnded: that is no death.
        ended_well = event.status == 0 and worker.state.state is WorkerState.RETIRING
        self.endings.worker_died(worker, event.status, event.begun_epoch)
        self.fleet.worker_exited(worker, event.status, ended_well=ended_well)
        self.training.worker_died(worker, event.status)
        self.turns.give()

    def _daemon_exited(self, event: DaemonExited) -> None:
        if event.generation != self.core.daemon_generation or not self.fleet.is_daemon_alive:
            return
        self.endings.daemon_died()
        self.arena.device_lost()
        self.residents.device_lost()
        self.commits.daemon_died()
        if not self.fleet.daemon_died(event.status):
            self._leave("the memory daemon died too often", status=EX_SOFTWARE)

    # -- queries ------------------------------------------------------------------------------

    def _query(self, event: Query) -> None:
        core = self.core
        if event.what == "models":
            core.answer(event.token, models=self.listing.models())
        elif event.what == "ps":
            core.answer(event.token, rows=self.listing.ps())
        elif event.what == "jobs":
            core.answer(event.token, jobs=self.listing.jobs())
        elif event.what == "plan":
            core.answer(event.token, **self.listing.plan())
        elif event.what == "stats":
            core.answer(event.token, **self.listing.stats())
        elif event.what == "show":
            model = core.models.get(ModelName(event.name))
            if model is None:
                core.refuse(
                    event.token,
                    ModelNotFound(f'no model "{event.name}"', hint="pipeswitch models"),
                )
            else:
                core.answer(event.token, model=self.listing.model(model))
        else:
            core.refuse(event.token, InvalidInput(f"{event.what} is not answered here"))

    # -- drain --------------------------------------------------------------------------------

    def _drain(self, event: DrainAsked) -> None:
        """First call: finish what was accepted, commit jobs, leave. Second: leave now."""
        core = self.core
        if event.token is not None:
            core.drain_tokens.append(event.token)
        if core.is_draining:
            self._leave("asked twice")
            return
        core.drain_at_ms = core.now_ms + event.grace_ms
        core.look_again(core.drain_at_ms)
        self.jobs.drain()
        self.profiling.refuse_all(ServerUnavailable("the server is draining"))
        core.publish("worker.draining", grace_ms=event.grace_ms)

    def _watch_drain(self) -> None:
        core = self.core
        if core.drain_at_ms is None or core.has_left:
            return
        if (
            not core.requests
            and self.jobs.is_quiet
            and self.commits.is_quiet
            and self.registry.is_quiet
        ):
            self._leave("drained")
        elif core.now_ms >= core.drain_at_ms:
            self._leave("the grace period is over")

    def _leave(self, reason: str, status: int = 0) -> None:
        """Answer every client that still waits, then stop the server."""
        core = self.core
        core.has_left = True
        error = ServerUnavailable(f"the server has stopped: {reason}")
        self.endings.refuse_all(error)
        self.registry.refuse_all(error)
        self.profiling.refuse_all(error)
        self.health.refuse_all(error)
        self.jobs.refuse_all(error)
        for token in core.drain_tokens:
            core.answer(token, reason=reason)
        core.drain_tokens.clear()
        core.wakeups = Wakeups()
        core.emit(Leave(status=status, reason=reason))

    def _refuse_late(self, event: Event) -> None:
        """A client that asks after the end is answered too; nothing is done any more."""
        match event:
            case (
                InferArrived(token=token)
                | RegisterAsked(token=token)
                | UnregisterAsked(token=token)
                | PinAsked(token=token)
                | TrainAsked(token=token)
                | JobAsked(token=token)
                | ProfileAsked(token=token)
                | PingAsked(token=token)
                | Query(token=token)
            ):
                self.core.refuse(token, ServerUnavailable("the server has stopped"))
            case DrainAsked(token=token) if token is not None:
                self.core.answer(token, reason="the server has stopped")
            case _:
                pass

    # -- after every event --------------------------------------------------------------------

    def _dispatch(self) -> None:
        self.admission.expire()
        self.dispatch.pump()
        self.turns.give()

    def _pump(self) -> None:
        if self.core.has_left:
            return
        self.registry.pump()
        self._dispatch()
        self.profiling.pump()
        self.training.pump()
        self.residents.bring_pinned()
        self.slices.scrub_again()
        self._kill_hung()
        self.fleet.pump()
        self.health.pump()
        self._watch_drain()

    def _kill_hung(self) -> None:
        hung = self.turns.hung()
        if hung is not None:
            self.core.kill(self.core.workers[hung.slot], hung.hung_why)

    # -- invariants ---------------------------------------------------------------------------

    def check(self) -> None:
        """Assert the invariants (docs/architecture.md) that the scheduler's state can show."""
        core = self.core
        for part in (self.arena, self.store.regions, self.residents, self.slices):
            part.check()
        self.profiling.check()
        if core.has_left:
            assert not core.requests, "left without an answer"
            return  # processes are killed next; nothing is decided any more
        self._check_requests()
        for model in core.models.values():
            users = [a for a in (core.current, core.upcoming) if a and a.model == model.name]
            assert model.users == len(users), f"{model.name}: {model.users} users"
        for name, job in core.jobs.items():
            if job.state.state in (TaskState.RUNNING, TaskState.TRANSMITTING, TaskState.STOPPING):
                assert core.training == name, f"{name} runs without the turn"
            is_on_worker = job.state.state in TASK_ON_WORKER
            assert (job.slot is not None) == is_on_worker, (name, job.slot, list(job.state.story))
            assert sum(w.job == name for w in core.workers.values()) <= 1, f"{name} runs twice"
            if job.slot is not None:
                assert core.workers[job.slot].job == name, f"{name} is not on its worker"
        if core.training is not None:
            assert core.jobs[core.training].slot is not None, f"{core.training} left with the turn"

    def _check_requests(self) -> None:
        core = self.core
        for queue in (core.queue, core.early):
            queue.check()
        waiting = [*core.queue, *core.early]
        for request in waiting:
            assert core.requests[request.token] is request, "it waits, and is not live"
            assert request.state.state is TaskState.QUEUED, request.state.story
        tasks = [a for a in (core.current, core.upcoming) if a is not None]
        assert len({a.slot for a in tasks}) == len(tasks), "two tasks on one worker"
        dispatched = {a.token for a in tasks}
        assert set(core.requests) == {r.token for r in waiting} | dispatched, "a request is lost"
        for name in core.early.models():
            assert core.models[name].state.state in MODEL_AWAITED, f"{name} is not awaited"
        for activation in tasks:
            worker = core.workers[activation.slot]
            assert worker.is_alive, f"a request waits for dead worker {worker.slot}"
            assert worker.task_epoch == activation.epoch, f"worker {worker.slot} has another task"
        if core.current is not None:
            assert core.requests[core.current.token].state.state is TaskState.RUNNING
            assert core.training is None, f"{core.training} computes beside {core.current.model}"


__all__ = ["Scheduler", "SchedulerSettings"]
