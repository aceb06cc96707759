"""The scheduler: ``handle(event, now_ms) -> [command]``. No thread, clock, socket or torch.

The live server, the simulator and the model checker run this same class. It owns all records:
``Core`` has the time, counters and commands; ``ServerState`` has the models and the host store;
each ``Device`` has its workers, requests, jobs and memory. Each part has one concern, for example
``admission`` (requests), ``registry`` (models) and ``listing`` (rows); the parts of one device are
in ``Device``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from os import EX_IOERR, EX_SOFTWARE
from typing import Final

from ..base.errors import InvalidTransition, PipeSwitchError, ServerUnavailable, draining
from ..ipc.messages import daemon as daemon_msg
from ..ipc.messages import worker as worker_msg
from ..ipc.messages.base import Pong, SliceRead
from ..ipc.messages.builder import BuildDone, BuildFailed, BuildProgress
from .introspection import Introspection
from .migrations import JobMigrations
from .models.build_queue import BuildQueue
from .models.model_registry import Registry
from .models.publishing import Publishing
from .policies import Policy, make_policy
from .policies.guard import PolicyGuard
from .processes.health import Pings
from .requests.admission import Admission
from .server.server_state import ServerState
from .state import events as ev
from .state.core import (
    ALL,
    JOBS,
    PINGS,
    QUEUE,
    REST,
    TURN,
    URGENT,
    WORKERS,
    Component,
    Core,
    SchedulerSettings,
    Wakeups,
    handler_table,
)
from .state.records import HelperQueue
from .state.versions import Versions
from .training.job_requests import JobRequests
from .trials import Trials

# Type of event or message -> bits of the state that it always changes. Parts add bits where they
# change state. All types that are not listed count as a change of everything.
CHANGES: Final[Mapping[type, int]] = {
    ev.InferArrived: 0,
    ev.PoolFreed: 0,
    ev.Query: 0,
    ev.Tick: 0,
    ev.PrefetchHint: 0,
    ev.PingRequest: PINGS,
    Pong: PINGS,
    worker_msg.InferenceDone: QUEUE | TURN,
    worker_msg.InferenceFailed: QUEUE | TURN,
    worker_msg.WorkerClean: TURN,
    daemon_msg.TransmitEnded: 0,
    SliceRead: 0,
    worker_msg.JobReport: 0,
    worker_msg.CommitStep: 0,
    worker_msg.JobParked: TURN | WORKERS | JOBS,
    worker_msg.JobReady: JOBS,
}
URGENT_EVENTS: Final = (ev.InferArrived, ev.PoolFreed, ev.Prepared, ev.Tick)


class Scheduler:
    """All decisions of the server; it performs nothing itself."""

    def __init__(
        self,
        settings: SchedulerSettings,
        policy: str | Policy = "priority",
        max_wait_ms: float = 2000.0,
        devices: Sequence[SchedulerSettings] = (),
        queues: Mapping[str, Callable[[Core], HelperQueue]] = {},
        parts: Sequence[Callable[[Core, ServerState, Versions], object]] = (),
    ) -> None:
        """``devices``: the settings of each device; if empty, one device with ``settings``.
        ``queues``: by kind of helper processes. ``parts``: handle their own kinds of requests."""
        if isinstance(policy, str):
            policy = make_policy(policy, max_wait_ms=max_wait_ms)
        judge = PolicyGuard(policy, max_wait_ms)
        judge.when_failed(self._policy_failed)
        self.core = Core(settings, judge)
        self.machine = ServerState(self.core, devices)
        self.versions = Versions(self.core, self.machine.models, self.machine.served)
        self.admission = Admission(
            self.core,
            self.versions,
            self.machine.placement,
            [device.dispatch for device in self.machine.devices],
            {kind: queue(self.core) for kind, queue in queues.items()},
        )
        self.builds = BuildQueue(self.core, self.machine)
        self.registry = Registry(
            self.core, self.machine, self.admission, self.versions, self.builds
        )
        self.publishing = Publishing(self.core, self.machine, self.registry, self.versions)
        self.job_requests = JobRequests(self.core, self.machine.jobs)
        self.moves = JobMigrations(self.core, self.machine.devices, self.machine.jobs)
        self.pings = Pings(self.core, [device.health for device in self.machine.devices])
        self.trials = Trials(self.core, self.machine, self.versions)
        self.listing = Introspection(
            self.core,
            self.machine,
            self.versions,
            self.admission.helpers,
            self.registry.names,
        )
        self._takers = handler_table(
            self.registry,
            self.registry.names,
            *(part(self.core, self.machine, self.versions) for part in parts),
            self.publishing,
            self.job_requests,
            self.pings,
            self.trials,
            self.listing,
        )
        self._parts = self._in_order()
        self._seen = 0  # the bits that only the urgent parts have seen so far

    def _in_order(self) -> tuple[Component, ...]:
        """Return all parts that may have work after an event, in the order of their calls."""
        admission = self.admission
        return (
            Component(self.publishing.pump),
            Component(self.registry.pump),
            *(Component(helper.advance) for helper in admission.helpers.values()),
            Component(admission.reassign),
            Component(admission.rebalance),
            Component(self.moves.reassign),
            Component(self.moves.pump),
            *(part for device in self.machine.devices for part in device.parts()),
            Component(self.trials.pump),
            Component(self.job_requests.pump),
            Component(self.pings.pump),
            Component(self._watch_drain),
        )

    def start(self, now_ms: float) -> list[ev.Command]:
        """Return the first commands: spawn the memory daemon of each device."""
        self.core.now_ms = self.listing.born_at_ms = now_ms
        for device in self.machine.devices:
            device.worker_pool.start()
        out, self.core.out = self.core.out, []
        return out

    def handle(self, event: ev.Event, now_ms: float) -> list[ev.Command]:
        """Handle one event, and return the resulting commands in order."""
        return [*self.decide(event, now_ms), *self.run_deferred()]

    def decide(self, event: ev.Event, now_ms: float) -> list[ev.Command]:
        """Return the urgent commands of ``handle``: answers, and the next work of the device.

        The caller performs them and must call ``run_deferred`` before the next event. The split
        saves a request about 0.05 ms.
        """
        core = self.core
        core.now_ms = max(core.now_ms, now_ms)
        core.dirty |= core.wakeups.forget_until(core.now_ms) | self._changes(event)
        if core.is_stopped:
            self._refuse_late(event)
        else:
            self._take(event)
            if isinstance(event, ev.Received):
                is_urgent = event.source.kind == "worker"
            else:
                is_urgent = isinstance(event, URGENT_EVENTS)
            if is_urgent and core.dirty & URGENT:
                self._seen, core.dirty = core.dirty, 0
                for device in self.machine.devices:
                    device.advance()
        out, core.out = core.out, []
        return out

    def _changes(self, event: ev.Event) -> int:
        """Return the bits of the state that the event may change."""
        if self.core.drain_at_ms is not None:
            return ALL
        message = event.message if isinstance(event, ev.Received) else event
        return CHANGES.get(type(message), ALL)

    def run_deferred(self) -> list[ev.Command]:
        """Return the other commands of ``handle``: the timeline, and all that is not urgent."""
        for device in self.machine.devices:
            device.completion.trace_ended()
        self._pump()
        if self.listing.listings.unfinished:
            self.listing.listings.go_on()
        out, self.core.out = self.core.out, []
        return out

    def next_wakeup_ms(self) -> float | None:
        """Return the latest instant for the next Tick; None if no Tick is needed."""
        heap = self.core.wakeups.heap
        return heap[0][0] if heap else None

    @property
    def waited_since_ms(self) -> float | None:
        """Arrival time in ms of the oldest unanswered request; None if there is none."""
        oldest = [
            next(iter(device.state.requests.values())).origin.arrived_at_ms
            for device in self.machine.devices
            if device.state.requests
        ]
        return min(oldest, default=None)

    @property
    def is_ready(self) -> bool:
        """True if a device's daemon owns its memory and one of its workers can take a request."""
        return any(device.state.is_ready for device in self.machine.devices)

    @property
    def is_whole(self) -> bool:
        """True if each device is ready or given up."""
        return all(d.state.is_ready or d.state.daemon.is_given_up for d in self.machine.devices)

    # -- events -------------------------------------------------------------------------------

    def _take(self, event: ev.Event) -> None:
        machine = self.machine
        match event:
            case ev.InferArrived():
                self.admission.arrived(event)
            case ev.ClientRequest():
                self._ask(event)
            case ev.Prepared():
                self.admission.prepared(event)
            case ev.PoolFreed():
                self.admission.pool_freed()
            case ev.Received(ev.Address("worker", index), worker_msg.PublishStep() as message) if (
                worker := machine.devices[index].sender_of(event.source)
            ):
                self.publishing.script_asked(machine.devices[index].state, worker, message)
            case ev.Received(ev.Address("worker", index)):
                machine.devices[index].from_worker(event)
            case ev.Received(ev.Address("daemon")):
                self._from_daemon(event)
            case ev.Received(ev.Address(kind)) if kind in self.admission.helpers:
                self.admission.helpers[kind].received(event)
            case ev.Received():
                self._from_builder(event)
            case ev.PrefetchHint(model=name):
                machine.prefetch(self.versions.resolve(name))
            case ev.CancelRequest():
                if not self.admission.cancel(event):
                    self.registry.cancel(event)
                    self.publishing.cancel(event.token)
                    self.trials.cancel(event.token)
                    self.job_requests.cancel(event.token)
            case ev.DrainRequest():
                self._drain(event)
            case ev.Exited(ev.Address("worker", index)):
                machine.devices[index].worker_exited(event)
            case ev.Exited(ev.Address("daemon")):
                self._daemon_exited(event)
            case ev.Exited(ev.Address(kind)) if kind in self.admission.helpers:
                self.admission.helpers[kind].exited(event)
            case ev.Exited():
                self.registry.builder_exited(event)
            case ev.Tick():
                pass  # ``decide`` handles the time of every event

    def _ask(self, event: ev.ClientRequest) -> None:
        """Pass a request to its part; send errors to the client, but raise InvalidTransition."""
        try:
            self._takers[type(event)](event)
        except InvalidTransition:
            raise
        except PipeSwitchError as error:
            self.core.refuse(event.token, error)

    def _from_daemon(self, event: ev.Received) -> None:
        device = self.machine.devices[event.source.device]
        if not device.is_current_daemon(event.source):
            self.core.counts["stale_messages"] += 1
            return
        match event.message:
            case daemon_msg.ModelStored() as message:
                self.registry.stored(message)
            case daemon_msg.CommitPersisted() as message if self.publishing.persisted(message):
                pass
            case daemon_msg.StoreFailed() as message:
                self.registry.store_failed(message)
            case daemon_msg.DaemonReady() as message:
                device.from_daemon(message)
                self.registry.store_from(None)
            case daemon_msg.DaemonFault() as message:
                device.from_daemon(message)
                self.registry.refused(message.op_id, message.reason)
                self.publishing.refused(message.op_id, message.reason)
                device.state.publish("worker.daemon_fault", reason=message.reason)
            case message:
                device.from_daemon(message)

    def _from_builder(self, event: ev.Received) -> None:
        match event.message:
            case BuildProgress() as message:
                self.registry.progress(message)
            case BuildDone() as message:
                assert event.manifest is not None
                self.registry.built(message, event.manifest, event.planned)
            case BuildFailed() as message:
                self.registry.build_failed(message)
            case _:
                self.core.counts["stale_messages"] += 1

    def _daemon_exited(self, event: ev.Exited) -> None:
        index = event.source.device
        device = self.machine.devices[index]
        if not device.is_current_daemon(event.source):
            return
        self.publishing.daemon_died(index)
        device.daemon_exited(event)
        self.registry.store_from(index)
        if all(one.state.daemon.is_given_up for one in self.machine.devices):
            self._leave("the memory daemon died too often", status=EX_SOFTWARE)

    def _policy_failed(self, name: str, why: str) -> None:
        text = f'policy "{name}" failed and is replaced by "priority": {why}'
        self.core.emit(ev.LogWarning(text=text))
        self.core.publish("queue.policy_failed", policy=name, reason=why)

    # -- drain --------------------------------------------------------------------------------

    def _drain(self, event: ev.DrainRequest) -> None:
        """Finish accepted requests, commit jobs and stop; on a second call stop at once."""
        core = self.core
        if event.token is not None:
            core.drain_tokens.append(event.token)
        if core.is_draining:
            self._leave("asked twice")
            return
        core.drain_at_ms = core.now_ms + event.grace_ms
        core.wake_at(core.drain_at_ms)
        self.machine.jobs.drain()
        self.trials.refuse_all(draining())
        core.publish("worker.draining", grace_ms=event.grace_ms)

    def _watch_drain(self) -> int:
        core = self.core
        if core.drain_at_ms is None:
            return 0
        is_quiet = not core.going_on and not any(map(len, self.admission.helpers.values()))
        is_quiet = is_quiet and all(device.is_quiet for device in self.machine.devices)
        if is_quiet and self.machine.jobs.is_quiet and self.registry.is_quiet:
            self._leave("drained")
        elif core.now_ms >= core.drain_at_ms:
            self._leave("the grace period is over")
        return ALL

    def _leave(self, reason: str, status: int = 0) -> None:
        """Answer every waiting client, then stop the server."""
        core = self.core
        core.is_stopped = True
        losses = self.machine.jobs.lost_steps() if not status else []
        if losses:
            status, reason = EX_IOERR, f"{reason}, but {'; '.join(losses)}"
        error = ServerUnavailable(f"the server has stopped: {reason}")
        for device in self.machine.devices:
            device.completion.refuse_all(error)
        for helper in self.admission.helpers.values():
            helper.refuse_all(error)
        self.registry.refuse_all(error)
        self.publishing.refuse_all(error)
        self.trials.refuse_all(error)
        self.pings.refuse_all(error)
        self.listing.listings.refuse_all(error)
        self.job_requests.refuse_all(error)
        core.answer_all(core.drain_tokens, reason=reason, lost=losses)
        core.wakeups = Wakeups()
        core.emit(ev.Shutdown(status=status, reason=reason))

    def _refuse_late(self, event: ev.Event) -> None:
        """Refuse a request that arrives after the server has stopped; ignore other events."""
        match event:
            case ev.ClientRequest(token=token):
                self.core.refuse(token, ServerUnavailable("the server has stopped"))
            case ev.DrainRequest(token=token) if token is not None:
                self.core.answer(token, reason="the server has stopped")
            case _:
                pass

    # -- after every event --------------------------------------------------------------------

    def _pump(self) -> None:
        """Call the parts that depend on changed state, until nothing changes any more."""
        core = self.core
        while core.dirty or self._seen:
            changed, self._seen = self._seen, 0
            dirty, core.dirty = core.dirty, 0
            for part in self._parts:
                if core.is_stopped:
                    core.dirty = 0
                    return
                new = dirty | core.dirty
                if part.wants & (new if part.is_urgent else new | changed):
                    part.wants = part.ask() | REST

    # -- invariants ---------------------------------------------------------------------------

    def check_settled(self) -> None:
        """Assert that no part was missed: call each one again; it must have nothing to do."""
        core = self.core
        for part in self._parts if not core.is_stopped else ():
            known = len(core.wakeups)
            part.wants = part.ask() | REST
            assert not core.out, f"{part.ask} was not asked: {core.out}"
            assert not core.dirty, f"{part.ask} was not asked: {core.dirty:b} changed"
            assert known == len(core.wakeups), f"{part.ask} was not asked: it waits for an instant"

    def check(self) -> None:
        """Assert the invariants (docs/architecture.md) that the scheduler's state can show."""
        self.check_settled()
        store, devices = self.machine.store, self.machine.devices
        store.regions.check()
        for device in devices:
            device.check()
        jobs = {worker.job for device in devices for worker in device.state.workers.values()}
        assert store.offloaded.keys() <= jobs, "a process that is gone has something on the host"
        tokens = [token for device in devices for token in device.state.requests]
        for helper in self.admission.helpers.values():
            tokens += helper.waits
            helper.check()
        assert len(tokens) == len(set(tokens)), "a request is in two places"


__all__ = ["Scheduler", "SchedulerSettings"]
