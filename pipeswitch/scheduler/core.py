"""The state the scheduler's parts share: records, the device's turn, and the commands to emit."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from ..errors import PipeSwitchError
from ..ipc.messages import Epoch, JobName, Message, ModelName, Slot
from ..planning.profile import UNKNOWN_DEVICE, Identity
from .events import Answer, Command, KillWorker, Publish, Span, SpawnWorker, ToDaemon, Token
from .policies import Policy
from .queue import Queue
from .records import Activation, ColdSwitch, EndedTrial, Job, Model, Request, Worker
from .states import WORKER_SERVES, WorkerEvent
from .wakeups import Wakeups


@dataclass(frozen=True, kw_only=True)
class SchedulerSettings:
    """Everything the scheduler needs to know; sizes in bytes, times in milliseconds."""

    device: str = "cpu"
    arena_bytes: int = 1 << 30
    store_bytes: int = 2 << 30
    words: int = 16384  # arrival words; each registered model takes one per group
    standby: int = 2  # beside the active one; at least one is kept, or none could step in
    max_queue: int = 512
    max_queue_per_model: int = 256
    max_builds: int = 1  # at once, one for each client
    max_waiting_builds: int = 256  # of one client
    max_waiting_builds_in_all: int = 1024  # clients without a key are as many as they connect
    training_cycle_ms: float = 1000.0  # round robin among several jobs
    commit_every_ms: float = 5000.0
    persist_every_ms: float = 30000.0
    stop_grace_ms: float = 30000.0  # a stop inside optimizer.step() may take this long
    evict_grace_ms: float = 30000.0  # commit and unwind, else the worker is killed
    max_compute_ms: float = 60000.0  # beyond a model's longest run it hangs; 0: it never does
    deadline_grace_ms: float = 5000.0  # a task still running this long after its deadline hangs
    restart_backoff_ms: float = 1000.0
    max_deaths: int = 3  # of workers in a row: per request, per model
    max_job_deaths: int = 10  # of a job's workers in a row without a commit in between
    max_daemon_restarts: int = 5  # in a row, without a model served in between
    prefix_bytes: int = 0  # of the arena, for prefixes of models that had to leave; 0: none
    identity: Identity = UNKNOWN_DEVICE  # what profiles are measured on
    unix_offset_ms: float = 0.0  # from the scheduler's clock to the calendar
    is_sandboxed: bool = False  # a process that runs programs can run no code afterwards (ADR 20)
    models_dir: str = "models"  # where programs, jobs' logs and commits lie: named to processes,
    logs_dir: str = "logs"  # opened by them
    commits_dir: str = "commits"

    def program_dir(self, digest: str) -> str:
        return f"{self.models_dir}/{digest}"


@dataclass
class Core:
    """Shared by the scheduler's parts; touched by the scheduler thread only.

    Invariants (``Scheduler.check``): ``current`` is the only inference task that may compute;
    ``upcoming`` is dispatched and waits for the turn; ``training`` names the job that holds the
    turn or is giving it up; at most one of ``current`` and a running ``training`` computes.
    """

    settings: SchedulerSettings
    policy: Policy
    models: dict[ModelName, Model] = field(default_factory=dict)
    requests: dict[Token, Request] = field(default_factory=dict)  # live ones
    queue: Queue = field(default_factory=Queue)  # QUEUED
    early: Queue = field(default_factory=Queue)  # QUEUED too: their model is STORING
    jobs: dict[JobName, Job] = field(default_factory=dict)
    workers: dict[Slot, Worker] = field(default_factory=dict)
    current: Activation | None = None
    upcoming: Activation | None = None
    training: JobName | None = None
    measuring: ModelName | None = None  # its groups are those of the current trial
    ended_trial: EndedTrial | None = None  # for Profiling to take
    cold_switches: list[ColdSwitch] = field(default_factory=list)  # the same
    daemon_generation: int = 0
    daemon_pid: int = 0
    is_daemon_ready: bool = False
    drain_at_ms: float | None = None
    drain_tokens: list[Token] = field(default_factory=list)
    has_left: bool = False
    now_ms: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    out: list[Command] = field(default_factory=list)
    last_epoch: int = 0
    wakeups: Wakeups = field(default_factory=Wakeups)

    def next_epoch(self) -> Epoch:
        """A number never used before: names a dispatch, lease, transfer or turn for ever."""
        self.last_epoch += 1
        return Epoch(self.last_epoch)

    def emit(self, command: Command) -> None:
        self.out.append(command)

    def answer(self, token: Token, /, **body: Any) -> None:
        """The final, good answer of a request that returns no tensors."""
        self.emit(Answer(token=token, body=body))

    def refuse(self, token: Token, error: PipeSwitchError) -> None:
        """The final, bad answer."""
        self.emit(Answer(token=token, error=error))

    def publish(self, topic: str, /, **body: Any) -> None:
        self.emit(Publish(topic=topic, body={"at_ms": self.now_ms, **body}))

    def span(
        self, track: str, name: str, begin_ms: float, end_ms: float, flow: int = 0, **args: Any
    ) -> None:
        """A finished interval for the timeline."""
        self.emit(
            Span(
                track=track,
                name=name,
                begin_ms=begin_ms,
                end_ms=max(begin_ms, end_ms),
                args=args,
                flow=flow,
            )
        )

    @property
    def is_ready(self) -> bool:
        """The daemon owns its memory and a worker can take a request."""
        return self.is_daemon_ready and any(
            worker.state.state in WORKER_SERVES for worker in self.workers.values()
        )

    @property
    def is_draining(self) -> bool:
        return self.drain_at_ms is not None

    def spawn(self, worker: Worker) -> None:
        """A fresh process for its slot; the one that is there is killed."""
        worker.generation += 1
        worker.respawn_at_ms = None
        worker.kill_reason = ""
        worker.is_blamed = True
        worker.pid = 0
        worker.warm.clear()
        worker.unpreparable.clear()
        worker.preparing = None
        worker.runs_code = None
        self.emit(SpawnWorker(slot=worker.slot, generation=worker.generation))

    def fits(self, worker: Worker, *, is_code: bool) -> bool:
        """Whether its process may run the operator's code, or else clients' programs (ADR 20)."""
        return not self.settings.is_sandboxed or worker.runs_code in (None, is_code)

    def claim(self, worker: Worker, *, is_code: bool) -> None:
        """Before it is given something to run: a process that does not fit is replaced."""
        if not self.fits(worker, is_code=is_code):
            self.spawn(worker)
        worker.runs_code = is_code

    def look_again(self, at_ms: float) -> None:
        """Ask for a Tick at that instant."""
        self.wakeups.add(at_ms)

    def job_of(self, worker: Worker, epoch: int) -> Job | None:
        """The job a message speaks of; None when it speaks of an older dispatch."""
        job = self.jobs.get(worker.job) if worker.job is not None else None
        return job if job is not None and job.epoch == epoch and job.slot == worker.slot else None

    def tell_daemon(self, message: Message, commits_of: JobName | None = None) -> None:
        """Send to the memory daemon; to one that is not ready, nothing.

        What a new daemon must know is sent again when it is ready, so that nothing reaches it
        twice and nothing is ordered from memory it has not taken yet.
        """
        if self.is_daemon_ready:
            self.emit(ToDaemon(message=message, commits_of=commits_of))

    def kill(self, worker: Worker, reason: str, *, blame: bool = True) -> None:
        """SIGKILL once; its memory is reused when WorkerExited says it is reaped.

        ``blame``: for what it did itself, so that its death counts against its task.
        """
        if worker.state.allows(WorkerEvent.KILLED):
            worker.state.apply(WorkerEvent.KILLED, reason)
            worker.kill_reason, worker.is_blamed = reason, blame
            self.emit(KillWorker(slot=worker.slot, generation=worker.generation, reason=reason))
