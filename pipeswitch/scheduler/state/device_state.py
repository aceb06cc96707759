"""State of one device: its processes, models, requests and jobs, and its turn."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal

from ...base.errors import PipeSwitchError
from ...ipc.messages.base import JobName, Message, ModelName, Slot
from ...ipc.messages.worker import BindTenant
from ..policies import View
from .core import QUEUE, RESIDENCY, TURN, WORKERS, Core, SchedulerSettings
from .device_owner import DeviceOwner
from .events import Address, Kill, Send, Span, Spans, Spawn, Token
from .fair_queue import CallerQueue
from .policy_queue import IsResident
from .predictions import Predictions
from .queue import Queue
from .records import DeviceModel, Job, MeasuredRun, Model, Request, Worker
from .states import WORKER_SERVES, Residency, ResidencyEvent, TaskEvent, WorkerEvent

FENCE_BYTES = 4  # size of one group's fence


@dataclass
class Daemon:
    """Memory daemon of one device: the live process, or the one that died last."""

    core: Core
    index: int  # index of its device
    incarnation: int = 0
    pid: int = 0
    is_ready: bool = False
    is_given_up: bool = False  # the daemon died too often and is not started again

    @property
    def address(self) -> Address:
        return Address("daemon", self.index, incarnation=self.incarnation)

    def send(
        self,
        message: Message,
        commits_of: JobName | None = None,
        image_of: JobName | None = None,
    ) -> None:
        """Send a message to the daemon; drop the message if the daemon is not ready.

        A new daemon gets the necessary state when it becomes ready. So no message reaches it
        twice, and no order concerns memory that it does not own yet.
        """
        if self.is_ready:
            self.core.emit(Send(self.address, message, commits_of=commits_of, image_of=image_of))


@dataclass
class ModelTrial:
    """Model whose layer groups a client tries (``Trials``), and the timed runs so far."""

    model: ModelName | None = None
    runs: list[MeasuredRun] = field(default_factory=list)


@dataclass
class DeviceState:
    """State shared by the parts of one device (``Device``)."""

    core: Core
    settings: SchedulerSettings
    index: int = 0  # index among the server's devices
    label: str = ""  # name of the device; empty: it is the only one
    replicas: dict[ModelName, DeviceModel] = field(default_factory=dict)
    requests: dict[Token, Request] = field(default_factory=dict)  # unfinished requests
    accounts: CallerQueue = field(init=False)
    queue: Queue = field(init=False)  # QUEUED requests that may be dispatched
    awaiting_model: Queue = field(default_factory=Queue)  # QUEUED, until their model is stored
    between: dict[Token, Request] = field(default_factory=dict)  # QUEUED, without memory to go on
    jobs: dict[JobName, Job] = field(default_factory=dict)  # jobs that are placed here
    workers: dict[Slot, Worker] = field(default_factory=dict)
    owner: DeviceOwner = field(default_factory=DeviceOwner)  # owner of the device's turn
    trial: ModelTrial = field(default_factory=ModelTrial)
    daemon: Daemon = field(init=False)
    predictions: Predictions = field(default_factory=Predictions)
    pinned: dict[ModelName, None] = field(default_factory=dict)  # models in the state PINNED
    sending: dict[ModelName, None] = field(default_factory=dict)  # the daemon may write to them
    served: int = 0  # number of requests answered with outputs
    spent_us: Counter[str] = field(default_factory=Counter)  # kind of use -> device time

    def __post_init__(self) -> None:
        self.daemon = Daemon(self.core, self.index)
        self.accounts = CallerQueue(self.settings.weights, self.core.judge.max_wait_ms)
        self.queue = Queue(self.core.judge, self.accounts)

    @property
    def is_ready(self) -> bool:
        """True if the daemon owns its memory and a worker can take a request."""
        return self.daemon.is_ready and any(
            worker.state.state in WORKER_SERVES for worker in self.workers.values()
        )

    def may_serve(self, model: Model) -> bool:
        """Return True if the model is registered for this device."""
        return not model.devices or self.settings.device in model.devices

    def job_of(self, worker: Worker, op_id: int) -> Job | None:
        """Return the worker's job if ``op_id`` is its current dispatch, else None."""
        job = self.jobs.get(worker.job) if worker.job is not None else None
        return job if job is not None and job.op_id == op_id and job.slot == worker.slot else None

    @property
    def is_busy(self) -> bool:
        """True if a task has the turn or is dispatched, or a request waits."""
        owner = self.owner
        return owner.running is not None or owner.pending is not None or bool(self.queue)

    @property
    def last_waiting(self) -> Request | None:
        """Newest request that could be dispatched here."""
        live = reversed(self.requests.values())
        return next((request for request in live if request.token in self.queue), None)

    @property
    def has_processes(self) -> bool:
        """True if a worker is not reaped yet: it may still write to all the memory that it has."""
        return any(worker.is_alive for worker in self.workers.values())

    def address(self, slot: Slot) -> Address:
        """Return the address of the process in a worker's slot."""
        return Address("worker", self.index, slot, self.workers[slot].incarnation)

    def send(
        self,
        slot: Slot,
        message: Message,
        channel: Literal["task", "signal"] = "task",
        commits_of: JobName | None = None,
    ) -> None:
        """Send a message to a worker."""
        self.core.out.append(Send(self.address(slot), message, channel, commits_of))

    def publish(self, topic: str, /, **body: Any) -> None:
        """Publish an event of this device, with the device's name where there are several."""
        self.core.publish(topic, **(body | {"device": self.label} if self.label else body))

    def span(
        self, track: str, name: str, begin_ms: float, end_ms: float, flow: int = 0, **args: Any
    ) -> None:
        """Emit a finished interval for the timeline, on a track of this device."""
        one = Span(
            track=self.track(track),
            name=name,
            begin_ms=begin_ms,
            end_ms=max(begin_ms, end_ms),
            args=args,
            flow=flow,
            event=self.core.event,
        )
        self.core.emit(Spans(spans=[one]))

    def track(self, name: str) -> str:
        """Return the timeline track's name, with the device's label if there are several."""
        return f"{self.label} {name}" if self.label else name

    def spend(self, kind: str, ms: float) -> None:
        """Add finished device time of one kind: train, infer, or switch (waiting for a model)."""
        self.spent_us[kind] += round(ms * 1000.0)

    @property
    def view(self) -> View:
        """Device as a policy sees it."""
        capacity_bytes = self.settings.arena_bytes - FENCE_BYTES * self.settings.fence_count
        return View(self.core.now_ms, self.predictions.predict, capacity_bytes, self._residents)

    def _residents(self) -> tuple[tuple[str, int], ...]:
        return tuple(
            (name, replica.manifest.total_bytes)
            for name, replica in self.replicas.items()
            if replica.is_on_device and replica.manifest is not None
        )

    @property
    def queue_view(self) -> tuple[IsResident, ModelName | None, View]:
        """Inputs of the ranking: the test for models on the device, the running model, the view."""
        running = self.owner.running
        model = running.model if running is not None else None
        return lambda name: self.replicas[name].is_on_device, model, self.view

    def move(self, replica: DeviceModel, event: ResidencyEvent, cause: str) -> None:
        """Change a model's residency, and mark its requests for ranking."""
        before = replica.residency.state
        after = replica.residency.apply(event, cause)
        self.core.dirty |= RESIDENCY | QUEUE
        self.queue.changed(replica.name)
        for name in replica.family.members if replica.family is not None else ():
            self.queue.changed(name)  # its next copy may bring more or less
        self.sending.pop(replica.name, None)
        if replica.is_being_sent:
            self.sending[replica.name] = None
        if (before is Residency.PINNED) != (after is Residency.PINNED):
            self.pinned.pop(replica.name, None)
            if after is Residency.PINNED:
                self.pinned[replica.name] = None
            self.queue.pins_changed()

    def take(self, request: Request, *, is_early: bool = False) -> None:
        """Queue the request; if it is early, it waits until its model is in the host store."""
        self.requests[request.token] = request
        self.core.dirty |= QUEUE
        (self.awaiting_model if is_early else self.queue).add(request)

    def refuse(self, request: Request, event: TaskEvent, error: PipeSwitchError) -> None:
        """End a request with an error: remove it from the queue and answer its client."""
        request.state.apply(event, type(error).__name__)
        self.core.dirty |= QUEUE
        self.queue.discard(request)
        self.awaiting_model.discard(request)
        self.between.pop(request.token, None)
        self.requests.pop(request.token)
        error.request_id = request.run.request_id
        self.core.refuse(request.token, error)

    def spawn(self, worker: Worker) -> None:
        """Spawn a new process for a slot; the previous one is killed."""
        worker.incarnation += 1
        worker.respawn_at_ms = None
        worker.kill_reason = ""
        worker.is_blamed = True
        worker.pid = 0
        worker.warm.clear()
        worker.unpreparable.clear()
        worker.graphs.clear()
        worker.complete_at = -1
        worker.preparing = None
        worker.runs_code = worker.tenant = None
        self.core.dirty |= WORKERS
        self.core.emit(Spawn(self.address(worker.slot)))

    def fits(self, worker: Worker, *, is_code: bool, tenant: str) -> bool:
        """Return True if the worker may run code or a program (ADR 20) for a tenant (ADR 23)."""
        is_of_the_kind = not self.core.settings.is_sandboxed or worker.runs_code in (None, is_code)
        return is_of_the_kind and worker.tenant in (None, tenant)

    def claim(self, worker: Worker, *, is_code: bool, tenant: str) -> None:
        """Prepare a worker for a task: replace it if it does not fit, and bind it to the tenant."""
        if not self.fits(worker, is_code=is_code, tenant=tenant):
            self.spawn(worker)
        worker.runs_code = is_code
        if self.core.settings.separates_tenants and worker.tenant is None:
            worker.tenant = tenant
            self.send(worker.slot, BindTenant(tenant=tenant, is_code=is_code))

    def kill(self, worker: Worker, reason: str, *, blame: bool = True) -> None:
        """Kill a worker with SIGKILL, once; its memory is reused after ``Exited``.

        ``blame``: whether the worker is at fault, so that its death counts against its task.
        """
        if worker.state.allows(WorkerEvent.KILLED):
            worker.state.apply(WorkerEvent.KILLED, reason)
            worker.kill_reason, worker.is_blamed = reason, blame
            self.core.dirty |= WORKERS | TURN
            self.core.emit(Kill(self.address(worker.slot), reason))
