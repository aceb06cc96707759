"""State shared by all parts of the scheduler: settings, time, counters, commands to emit."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from ...base.errors import PipeSwitchError
from ...ipc.messages.base import ModelName, OpId
from ...planning.planned_groups import UNKNOWN_DEVICE, Identity
from ..policies.guard import PolicyGuard
from .events import ClientRequest, Command, Publish, Reply, Token
from .records import RunKind

E = TypeVar("E", bound=ClientRequest)
P = TypeVar("P")  # a part of the scheduler

# Kinds of state. A part is called if a kind that it waits for changed (docs/adr/0038-agenda.md).
QUEUE: Final = 1  # the waiting requests, and their order
TURN: Final = 2  # tasks that are dispatched, compute, or have ended
WORKERS: Final = 4  # the processes, and the programs that they have loaded
RESIDENCY: Final = 8  # models that are on a device, or are being copied there
JOBS: Final = 16  # training jobs
MEASURED: Final = 32  # trials of layer groups
HELPERS: Final = 64  # requests that helper processes serve
PINGS: Final = 128  # pings of processes
DUE: Final = 256  # time to dispatch or to refuse a request
HUNG: Final = 512  # time to check for a hanging task
REST: Final = 1024  # all other state
ALL: Final = 2 * REST - 1
URGENT: Final = QUEUE | TURN | WORKERS | RESIDENCY | JOBS | DUE  # they decide a device's next task


class Component:
    """Part of the scheduler that may have work after some kinds of changes.

    Attributes:
        ask: function that does the work, and returns the bits of the changes that it waits for.
        wants: the bits that ``ask`` returned last.
        is_urgent: whether ``Scheduler.decide`` also does this work, before ``run_deferred``.
    """

    __slots__ = ("ask", "is_urgent", "wants")

    def __init__(self, ask: Callable[[], int], *, is_urgent: bool = False) -> None:
        self.ask = ask
        self.is_urgent = is_urgent
        self.wants = ALL


@dataclass(frozen=True, kw_only=True)
class SchedulerSettings:
    """Settings of the scheduler; sizes in bytes, times in milliseconds."""

    device: str = "cpu"
    arena_bytes: int = 1 << 30
    store_bytes: int = 2 << 30
    fence_count: int = 16384  # each registered model needs a fence for each group
    standby: int = 2  # number of workers besides the active one; the pool keeps at least 1
    max_queue: int = 512
    max_queue_per_model: int = 256
    max_queue_time_ms: float = 0.0  # limit of a model's queued compute time; 0: no limit
    max_builds: int = 1  # number of builds at once; each client has at most one
    max_models_per_client: int = 1000
    max_waiting_builds: int = 1024  # limit for all clients; base/quotas.py limits each one
    training_cycle_ms: float = 1000.0  # length of a turn in the round robin of jobs
    commit_every_ms: float = 5000.0
    stop_grace_ms: float = 30000.0  # time limit of a stop
    evict_grace_ms: float = 30000.0  # time limit of an evicted job's commit and exit
    max_compute_ms: float = 60000.0  # a task that computes for longer is hung; 0: no limit
    deadline_grace_ms: float = 5000.0  # a task that runs this long past its deadline is hung
    restart_backoff_ms: float = 1000.0
    max_deaths: int = 3  # deaths of workers in a row, for each request and each model
    max_job_deaths: int = 10  # deaths of a job's workers in a row, with no commit between them
    max_swapped: int = 4  # number of jobs of a device that may wait without their memory
    slices_move: bool = True  # a slice may come back elsewhere (ADR 64); else streams may be held
    max_daemon_restarts: int = 5  # restarts in a row, with no served request between them
    keep_versions: int = 2  # number of kept versions of a model, including the current one
    keep_jobs: int = 20  # number of ended jobs that are kept, with their last state
    keep_jobs_ms: float = 0.0  # time for which ended jobs are kept; 0: ``keep_jobs`` decides
    move_after_ms: float = 0.0  # a job that requests suspend for longer moves; 0: it stays
    placement: str = "least-finish"  # choice of a device (policies/placement.py)
    admission: str = "off"  # "deadline": refuse requests that cannot be answered in time
    weights: Mapping[str, float] = field(default_factory=dict)  # weights of callers; default 1
    training: str = "rotate"  # order of jobs (policies/job_orders.py)
    activation_memory_bytes: int = 0  # limit for all jobs of a device; 0: each job has its own
    prepares: bool = True  # standby workers load programs before requests need them
    look_ahead: bool = True  # the next request's model is copied while the device computes
    identity: Identity = UNKNOWN_DEVICE  # identity of the device, for planned groups
    unix_offset_ms: float = 0.0  # Unix time minus the scheduler's time
    is_sandboxed: bool = False  # a process runs either the owner's code or programs (ADR 20)
    separates_tenants: bool = False  # a process serves the models of one tenant only (ADR 23)
    models_dir: str = "models"  # programs; other processes open this folder and the next ones
    logs_dir: str = "logs"  # folder of the jobs' logs
    job_log_bytes: int = 0  # maximum size of a job's log; 0: no limit
    commits_dir: str = "commits"
    published_dir: str = "published"

    def program_dir(self, digest: str) -> str:
        return f"{self.models_dir}/{digest}"


class Wakeups:
    """Instants, in milliseconds, at which the scheduler needs a Tick if no other event comes.
    Each has bits; at that instant, the parts that wait for one of these bits are called."""

    def __init__(self, instants: Iterable[tuple[float, int]] = ()) -> None:
        self._known: set[tuple[float, int]] = set()
        self.heap: list[tuple[float, int]] = []
        self._first: dict[int, float] = {}  # bits -> first instant with exactly these bits
        for at_ms, bits in instants:
            self.add(at_ms, bits)

    def __len__(self) -> int:
        return len(self.heap)

    def add(self, at_ms: float, bits: int = ALL) -> None:
        if (at_ms, bits) not in self._known:
            self._known.add((at_ms, bits))
            heapq.heappush(self.heap, (at_ms, bits))
            if at_ms < self.first_ms(bits):
                self._first[bits] = at_ms

    def forget_until(self, now_ms: float) -> int:
        """Remove the instants that have passed, and return all their bits."""
        due = 0
        while self.heap and self.heap[0][0] <= now_ms:
            at_ms, bits = entry = heapq.heappop(self.heap)
            self._known.remove(entry)
            due |= bits
            if self._first.get(bits) == at_ms:
                del self._first[bits]
        return due

    def first_ms(self, bits: int) -> float:
        """Return the first instant with exactly these bits; infinity when there is none."""
        return self._first.get(bits, math.inf)

    @property
    def all(self) -> tuple[tuple[float, int], ...]:
        """All instants with their bits, in order."""
        return tuple(sorted(self.heap))


@dataclass
class Core:
    """State that every part needs and no device owns: time, counters, commands, shutdown."""

    settings: SchedulerSettings
    judge: PolicyGuard
    drain_at_ms: float | None = None
    drain_tokens: list[Token] = field(default_factory=list)
    is_stopped: bool = False
    now_ms: float = 0.0
    event: int = 0  # number of the current event, set by the caller
    counts: Counter[str] = field(default_factory=Counter)
    out: list[Command] = field(default_factory=list)
    last_epoch: int = 0
    going_on: set[Token] = field(default_factory=set)  # requests that the frontend continues
    model_changes: int = 0  # grows when a model becomes ready or gets other groups
    dirty: int = ALL  # the bits of all changes since the parts were called
    pins: dict[ModelName, None] = field(default_factory=dict)  # models that are to be pinned
    wakeups: Wakeups = field(default_factory=Wakeups)
    kind: RunKind = field(init=False)  # set before the first request that needs several runs

    def next_op_id(self) -> OpId:
        """Return a new number, larger than all before, for a dispatch, lease, transfer or turn."""
        self.last_epoch += 1
        return OpId(self.last_epoch)

    def emit(self, command: Command) -> None:
        self.out.append(command)

    def answer(self, token: Token, /, **body: Any) -> None:
        """Send the final answer of a successful request that returns no tensors."""
        self.emit(Reply(token=token, body=body))

    def refuse(self, token: Token, error: PipeSwitchError) -> None:
        """Send the final answer of a failed request."""
        self.emit(Reply(token=token, error=error))

    def answer_all(self, tokens: list[Token], /, **body: Any) -> None:
        """Send the same final answer to all of ``tokens``, and clear them."""
        for token in tokens:
            self.answer(token, **body)
        tokens.clear()

    def refuse_all(self, error: PipeSwitchError, *waiting: list[Token]) -> None:
        for tokens in waiting:
            for token in tokens:
                self.refuse(token, error)
            tokens.clear()

    def publish(self, topic: str, /, **body: Any) -> None:
        self.emit(Publish(topic=topic, body={"at_ms": self.now_ms, **body}))

    def tenant_of(self, owner: str) -> str:
        """Return the tenant whose workers run this owner's programs; "": tenants share workers."""
        return owner if self.settings.separates_tenants else ""

    @property
    def is_draining(self) -> bool:
        return self.drain_at_ms is not None

    def wake_at(self, at_ms: float, bits: int = ALL) -> None:
        """Request a Tick at ``at_ms`` for the parts that wait for one of these bits."""
        self.wakeups.add(at_ms, bits)


def handles(kind: type[E]) -> Callable[[Callable[[P, E], None]], Callable[[P, E], None]]:
    """Decorate a part's method: it handles all events of this kind and answers their clients."""

    def marked(method: Callable[[P, E], None]) -> Callable[[P, E], None]:
        method.takes = kind  # type: ignore[attr-defined]
        return method

    return marked


def handler_table(*parts: object) -> dict[type[ClientRequest], Callable[[Any], None]]:
    """Return event type -> bound method, for the methods of these parts that ``handles`` marks."""
    return {
        method.takes: getattr(part, name)
        for part in parts
        for name, method in vars(type(part)).items()
        if hasattr(method, "takes")
    }
