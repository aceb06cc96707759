"""One device: the parts that decide for it, and the messages of its processes to these parts."""

from __future__ import annotations

from ...ipc.messages import daemon as daemon_msg
from ...ipc.messages import worker as worker_msg
from ...ipc.messages.base import Message, OpId, Pong, SliceRead, StepCommitted
from ..memory.allocators import ArenaAllocator, HostStoreAllocator
from ..memory.commits import Commits
from ..memory.leases import Leases
from ..memory.plans import Plans
from ..memory.residency import Residents
from ..memory.slices import Slices
from ..memory.swaps import Swaps
from ..processes.health import Health
from ..processes.worker_pool import WorkerPool
from ..requests.completion import TaskCompletion
from ..requests.dispatch import Dispatch, Turns
from ..requests.taking_back import TakingBack
from ..state.core import HUNG, TURN, URGENT, Component, Core, SchedulerSettings
from ..state.device_state import DeviceState
from ..state.events import Address, Exited, Received
from ..state.records import Worker
from ..state.states import (
    MODEL_AWAITED,
    TASK_ON_WORKER,
    Residency,
    TaskState,
    WorkerEvent,
    WorkerState,
)
from ..training.jobs import Home, Jobs
from ..training.training import TrainingJobs


class Device:
    """Parts and state of one device; each part has one concern."""

    def __init__(
        self,
        core: Core,
        settings: SchedulerSettings,
        store: HostStoreAllocator,
        jobs: Jobs,
        label: str = "",
    ) -> None:
        self.core = core
        self.state = state = DeviceState(core, settings, len(jobs.homes), label)
        self.arena = ArenaAllocator(state)
        self.residents = Residents(state, self.arena)
        self.slices = Slices(state, self.arena, self.residents)
        self.commits = Commits(state, self.arena, store)
        jobs.homes.append(Home(state, self.commits))
        self.jobs = jobs  # jobs of all devices
        self.swaps = Swaps(state, self.arena, self.slices, store)
        self.leases = Leases(state, self.arena, self.slices, self.commits, store, self.swaps)
        self.training = TrainingJobs(state, self.swaps, self.jobs, self.leases, self.commits)
        self.turns = Turns(state)
        self.completion = TaskCompletion(state, self.residents)
        taking_back = TakingBack(state, self.completion)
        self.dispatch = Dispatch(
            state, self.arena, self.residents, self.training, self.turns, taking_back
        )
        self.plans = Plans(state, self.residents)
        self.worker_pool = WorkerPool(state)
        self.health = Health(state)

    def sender_of(self, source: Address) -> Worker | None:
        worker = self.state.workers.get(source.slot)
        is_it = worker is not None and worker.incarnation == source.incarnation and worker.is_alive
        return worker if is_it else None

    def from_worker(self, event: Received) -> None:
        worker = self.sender_of(event.source)
        if worker is None:
            self.core.counts["stale_messages"] += 1
            return
        match event.message:
            case worker_msg.InferenceDone() as message:
                self.completion.done(worker, message)
                self.turns.give()
                self.worker_pool.served_well()
                if message.is_clean:
                    self._cleaned(worker, message.op_id)
            case worker_msg.InferenceFailed() as message:
                self.completion.failed(worker, message)
                self.turns.give()
            case worker_msg.WorkerClean(op_id=op_id) as message:
                self._cleaned(worker, op_id)
                if message.captured:
                    self.worker_pool.captured(worker, message)
            case worker_msg.Yielded(op_id=op_id):
                self.turns.stepped_aside(worker, op_id)
                self.turns.give()
            case worker_msg.JobParked() as message:
                if self.training.parked(worker, message):
                    self.turns.passed(message.next_turn)
                self.turns.give()
            case worker_msg.JobReady() as message:
                self.training.back(worker, message)
            case worker_msg.WorkerReady(pid=pid):
                self.worker_pool.worker_ready(worker, pid)
            case Pong(op_id=op_id):
                self.health.worker_answered(worker, op_id)
            case worker_msg.ModelPrepared() as message:
                self.worker_pool.prepared(worker, message)
            case worker_msg.LeaseRequest() as message:
                self.leases.requested(worker, message)
            case worker_msg.HostRequest() as message:
                self.leases.host_requested(worker, message)
            case worker_msg.SliceHidden() as message:
                self.swaps.hidden(worker, message)
            case worker_msg.CommitStep() as message:
                self.commits.commit(worker, message)
            case worker_msg.JobReport() as message:
                job = self.state.job_of(worker, message.op_id)
                if job is not None:
                    self.jobs.report(job, message)
                    self.training.reported(job)
            case worker_msg.JobEnded() as message:
                self.training.ended(worker, message)
                self.turns.give()
            case _:
                self.state.kill(worker, f"it sent a {type(event.message).__name__}")

    def _cleaned(self, worker: Worker, op_id: OpId) -> None:
        if worker.dispatch_id == op_id and worker.state.state is WorkerState.CLEANING:
            worker.state.apply(WorkerEvent.CLEANED, f"operation {op_id}")

    def is_current_daemon(self, source: Address) -> bool:
        """Return True if this is the address of the live daemon."""
        return source == self.state.daemon.address and self.worker_pool.is_daemon_alive

    def from_daemon(self, message: Message) -> None:
        """Handle a message about this device from the current memory daemon."""
        match message:
            case daemon_msg.TransmitEnded():
                self.residents.transmit_ended(message)
            case daemon_msg.DaemonReady(pid=pid):
                self.worker_pool.daemon_ready(pid)
                self.commits.daemon_ready()
            case daemon_msg.Scrubbed(op_id=op_id):
                self.slices.scrubbed(op_id)
            case daemon_msg.SliceCopied():
                self.swaps.copied(message)
            case SliceRead():
                self.commits.slice_read(message)
            case StepCommitted():
                self.commits.committed(message)
                self.worker_pool.served_well()
            case Pong(op_id=op_id):
                self.health.daemon_answered(op_id)
            case daemon_msg.CommitPersisted():
                self.commits.persisted(message)
            case daemon_msg.DaemonFault():
                self.core.counts["daemon_faults"] += 1
                self.slices.refused(message.op_id)
                self.residents.refused(message.op_id, message.reason)
                self.commits.refused(message.op_id, message.reason)
                self.swaps.refused(message.op_id, message.reason)
            case _:
                self.core.counts["stale_messages"] += 1

    def worker_exited(self, event: Exited) -> None:
        """Handle a reaped worker: only now may another owner get its memory (invariant I4)."""
        worker = self.sender_of(event.source)
        if worker is None:
            return
        # A job's process exits after its JobEnded, which does not count as a death.
        ended_well = event.status == 0 and worker.state.state is WorkerState.RETIRING
        self.completion.worker_died(worker, event.status, event.begun_op_id)
        self.worker_pool.worker_exited(worker, event.status, ended_well=ended_well)
        self.training.worker_died(worker, event.status)
        self.turns.give()

    def daemon_exited(self, event: Exited) -> None:
        """Handle the exit of the memory daemon: its device memory and everything in it are lost."""
        self.completion.daemon_died()
        self.arena.device_lost()
        self.residents.device_lost()
        self.commits.daemon_died()
        self.worker_pool.daemon_died(event.status)

    # -- after every event --------------------------------------------------------------------

    def advance(self) -> int:
        """Give the device its next task; this is the device's only urgent part."""
        self.dispatch.expire()
        self.dispatch.pump()
        self.turns.give()
        return URGENT

    def parts(self) -> list[Component]:
        """Return all parts that may have something to do, in the order of their calls."""
        return [
            Component(self.advance, is_urgent=True),
            Component(self.dispatch.keep_order),
            Component(self.dispatch.look_ahead),
            Component(self.plans.apply),
            Component(self.training.pump),
            Component(self.residents.bring_pinned),
            Component(self.slices.scrub_again),
            Component(self._kill_hung),
            Component(self.worker_pool.pump),
        ]

    def _kill_hung(self) -> int:
        if (hung := self.turns.hung()) is not None:
            self.state.kill(self.state.workers[hung.slot], hung.hung_why)
        return TURN | HUNG

    # -- the end ------------------------------------------------------------------------------

    @property
    def is_quiet(self) -> bool:
        """True if no request is unfinished and no commit is being copied or written."""
        return not self.state.requests and self.commits.is_quiet

    # -- invariants ---------------------------------------------------------------------------

    def check(self) -> None:
        """Assert the invariants (docs/architecture.md) that the device's state can show."""
        state = self.state
        for part in (self.arena, self.residents, self.slices, self.swaps):
            part.check()
        if self.core.is_stopped:
            assert not state.requests, "left without an answer"
            return  # processes are killed next; nothing is decided any more
        self._check_requests()
        for replica in state.replicas.values():
            users = [task for task in state.owner.tasks if task.model == replica.name]
            assert replica.users == len(users), f"{replica.name}: {replica.users} users"
        for name, job in state.jobs.items():
            if job.state.state in (TaskState.RUNNING, TaskState.TRANSMITTING, TaskState.STOPPING):
                assert state.owner.job == name, f"{name} runs without the turn"
            is_on_worker = job.state.state in TASK_ON_WORKER
            assert (job.slot is not None) == is_on_worker, (name, job.slot, list(job.state.story))
            assert sum(w.job == name for w in state.workers.values()) <= 1, f"{name} runs twice"
            if job.slot is not None:
                assert state.workers[job.slot].job == name, f"{name} is not on its worker"
        state.owner.check()
        if state.owner.job is not None:
            assert state.jobs[state.owner.job].slot is not None, f"{state.owner.job} left"

    def _check_requests(self) -> None:
        state = self.state
        for queue in (state.queue, state.awaiting_model):
            queue.check()
        pinned = {n for n, r in state.replicas.items() if r.residency.state is Residency.PINNED}
        assert state.pinned.keys() == pinned, "another model is pinned"
        sending = {n for n, r in state.replicas.items() if r.is_being_sent}
        assert state.sending.keys() == sending, "another model is being sent"
        state.queue.check_heads(*state.queue_view)
        waiting = [*state.queue, *state.awaiting_model, *state.between.values()]
        assert len({one.token for one in waiting}) == len(waiting), "it waits in two places"
        for request in waiting:
            assert state.requests[request.token] is request, "it waits, and is not live"
            assert request.state.state is TaskState.QUEUED, request.state.story
        tasks = state.owner.tasks
        assert len({a.slot for a in tasks}) == len(tasks), "two tasks on one worker"
        for account in state.accounts:
            runs = sum(account in task.charge.parts for task in tasks if task.charge)
            assert account.running == runs, f"{account.caller!r} has {account.running} runs"
        dispatched = {token for a in tasks for token in a.tokens}
        assert set(state.requests) == {r.token for r in waiting} | dispatched, "a request is lost"
        for name in state.awaiting_model.models():
            assert state.replicas[name].model.state.state in MODEL_AWAITED, f"{name} not awaited"
        for activation in tasks:
            worker = state.workers[activation.slot]
            assert worker.is_alive, f"a request waits for dead worker {worker.slot}"
            assert worker.dispatch_id == activation.op_id, f"worker {worker.slot} has another task"
        if state.owner.running is not None:
            for token in state.owner.running.tokens:
                assert state.requests[token].state.state is TaskState.RUNNING
