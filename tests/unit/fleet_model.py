"""A simulated fleet: daemon, workers and builders as small state machines, in random order.

The scheduler under test is the real one. Everything around it is modelled after its contract
(docs/architecture.md): every message waits in its channel, channels are delivered in random order,
processes are killed at random, time jumps. The model itself checks what a scheduler can break:

I1  exactly one final answer per token.
I4  no byte has two live owners; nothing is sent into a region that is read or leased.
I5  at most one task computes; a process is replaced only after it was reaped.
    Orders name the region, words and epoch that the model's bytes really have.
"""

# mypy: disable-error-code="arg-type, misc, exhaustive-match, no-any-return"
# Names are plain strings and numbers here: their NewTypes would hide what the model says.

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pipeswitch.ipc.messages import (
    BuildDone,
    BuildFailed,
    BuildProgress,
    CancelTransmit,
    Cleaned,
    CloseCommits,
    CommitCopy,
    CommitPersisted,
    CommitStep,
    DaemonReady,
    EvictTask,
    ForgetModel,
    GrantTurn,
    GroupCopy,
    InferenceDone,
    InferenceFailed,
    JobEnded,
    JobReport,
    LeaseGranted,
    LeaseRefused,
    LeaseRequest,
    Message,
    ModelPrepared,
    ModelStored,
    OpenCommits,
    Parked,
    PersistCommit,
    Ping,
    Pong,
    PrepareModel,
    RunInference,
    RunJob,
    Scrub,
    Scrubbed,
    StepCommitted,
    StopTask,
    StoreFailed,
    StoreModel,
    TransmitEnded,
    TransmitModel,
    WorkerReady,
)  # fmt: skip
from pipeswitch.planning.profile import (
    UNKNOWN_DEVICE,
    VERSION,
    BatchProfile,
    Found,
    LayerProfile,
    LinkProfile,
    Overheads,
    Profile,
)
from pipeswitch.programs.groups import cut, layer_bytes
from pipeswitch.programs.layout import LayerSpec, Manifest, TensorSpec
from pipeswitch.scheduler import events as ev
from pipeswitch.scheduler.core import SchedulerSettings
from pipeswitch.scheduler.scheduler import Scheduler

MIB = 1 << 20
LAYERS_PER_GROUP = 2
GROUP_MS = 100.0  # a computed one's; a copied one's is a tenth
PRIORITIES = (0, 1, 1, 2)


class Violation(AssertionError):
    """The scheduler broke an invariant."""


def manifest_of(digest: str, total_bytes: int, group_count: int) -> Manifest:
    """A program that exists on paper: groups of two layers each, a tensor in each layer."""
    count = LAYERS_PER_GROUP * group_count
    size = total_bytes // count // 512 * 512
    tensors = tuple(
        TensorSpec(name=f"t{i}", dtype="uint8", shape=(size,), offset_bytes=i * size,
                   size_bytes=size, file_offset_bytes=i * size)
        for i in range(count)
    )  # fmt: skip
    layers = tuple(LayerSpec(i, i + 1, 1) for i in range(count))
    plan = tuple(range(0, count, LAYERS_PER_GROUP))
    return Manifest(
        digest=digest, mode="graph", mode_reason="", source="test", total_bytes=total_bytes,
        tensors=tensors, groups=cut(layers, tensors, total_bytes, plan), inputs=(), outputs=(),
        layers=layers,
    )  # fmt: skip


def profile_of(name: str, manifest: Manifest, layer_ms: float) -> Profile:
    """Found on disk: each layer is copied in 10 ms and computes in ``layer_ms``."""
    sizes = layer_bytes(manifest)
    times, zeros = (layer_ms,) * len(sizes), (0.0,) * len(sizes)
    return Profile(
        version=VERSION, model=name, digest=manifest.digest, measured_at="before",
        identity=UNKNOWN_DEVICE,
        layers=tuple(LayerProfile(label="l", size_bytes=size, copy_ms=10.0, copy_spread_ms=0.0)
                     for size in sizes),
        batches=(BatchProfile(batch=1, switch_ms=times, switch_spread_ms=zeros, resident_ms=times,
                              resident_spread_ms=zeros, trials=5),),
        link=LinkProfile(alpha_ms=0.1, beta_ms_per_mib=10.0 * MIB / max(1, max(sizes)),
                         residual_p50=0.0, residual_p90=0.0, samples=2, smallest_bytes=0,
                         largest_bytes=1),
        overheads=Overheads(sigma_ms=0.01, launch_ms=0.0, wake_ms=0.0),
    )  # fmt: skip


@dataclass
class Faults:
    """Chances per step or per decision; all zero once the world settles."""

    kill_worker: float = 0.0
    kill_daemon: float = 0.0
    copy_error: float = 0.0
    store_error: float = 0.0
    build_error: float = 0.1
    infer_error: float = 0.1
    early_error: float = 0.02
    hang: float = 0.0
    pings: bool = False  # somebody asks for everybody's health now and then
    swallow: float = 0.0  # a script that neither parks nor unwinds
    linger: float = 0.0  # a process that does not leave after its script
    persist_error: float = 0.1


@dataclass
class Span:
    start: int
    end: int

    def overlaps(self, other: Span) -> bool:
        return self.start < other.end and other.start < self.end


@dataclass
class Process:
    """Anything with a life: its messages wait in channels until they are delivered."""

    name: str
    generation: int
    status: int | None = None  # set when it has ended, not yet reaped
    is_reaped: bool = False
    may_lose: bool = False  # killed: what it had sent may arrive after its exit, or never
    inbox: dict[str, deque[Message]] = field(default_factory=dict)
    out: dict[str, deque[Message]] = field(default_factory=dict)

    @property
    def runs(self) -> bool:
        return self.status is None

    def say(self, channel: str, message: Message) -> None:
        self.out.setdefault(channel, deque()).append(message)

    def end(self, status: int) -> None:
        if self.status is None:
            self.status = status
            self.may_lose = status != 0
            self.inbox.clear()


@dataclass
class Script:
    """A training script in a worker, with the gate's states (workers/training/gate.py)."""

    order: RunJob
    slot: int
    step: int
    total: int
    slice_bytes: int
    is_stubborn: bool
    phase: str = "starting"  # leasing, training, committing, unwinding, over
    turn: int = 0
    holds: bool = False
    is_away: bool = True
    stop: StopTask | None = None
    future_stop: StopTask | None = None
    evict: bool = False
    lease: Span | None = None
    commits: int = 0  # begun

    @property
    def computes(self) -> bool:
        return self.holds and not self.is_away and self.phase == "training"


@dataclass
class WorkerProcess(Process):
    slot: int = 0
    is_ready: bool = False
    inference: RunInference | None = None
    has_begun: bool = False
    next_group: int = 0
    hangs: bool = False
    cleaning: int = 0
    script: Script | None = None
    early: list[Message] = field(default_factory=list)  # signals for a job not read yet
    sent_job: int = 0  # epoch of the RunJob on its way to it or in it
    lease: Span | None = None  # promised; its own from LeaseGranted until it is reaped

    @property
    def computes(self) -> bool:
        if not self.runs:
            return False
        return self.has_begun or (self.script is not None and self.script.computes)


@dataclass
class Transmission:
    order: TransmitModel
    done: int = 0
    is_cancelled: bool = False

    @property
    def span(self) -> Span:
        start = self.order.arena_offset_bytes
        return Span(start, start + self.order.region_bytes)


@dataclass
class DaemonProcess(Process):
    is_ready: bool = False
    copies: deque[Transmission] = field(default_factory=deque)
    lanes: dict[str, deque[Message]] = field(default_factory=dict)
    areas: set[str] = field(default_factory=set)


@dataclass
class BuilderProcess(Process):
    order: ev.StartBuild | None = None


class World:
    """One server's life. ``act`` does one random thing; ``settle`` ends all faults."""

    def __init__(
        self,
        seed: int,
        *,
        policy: str = "priority",
        faults: Faults | None = None,
        standby: int = 2,
        arena_mib: int = 64,
        prefix_mib: int = 0,
        profiled: float = 0.0,
        max_compute_ms: float = 0.0,
        scheduler: Scheduler | None = None,
    ) -> None:
        self.random = random.Random(seed)
        self.faults = faults or Faults()
        self.settings = SchedulerSettings(
            arena_bytes=arena_mib * MIB, store_bytes=256 * MIB, words=64, standby=standby,
            max_queue=16, restart_backoff_ms=100.0, max_daemon_restarts=10**6,
            max_compute_ms=max_compute_ms, prefix_bytes=prefix_mib * MIB,
        )  # fmt: skip
        self.scheduler = scheduler or Scheduler(self.settings, policy, 2000.0)
        self.now_ms = 0.0
        self.profiled = profiled  # chance that a profile of a built program is on the disk
        self.turn = 0  # the board
        self.daemon: DaemonProcess | None = None
        self.workers: dict[int, WorkerProcess] = {}
        self.builders: list[BuilderProcess] = []
        self.ghosts: list[WorkerProcess] = []  # reaped, with late messages
        self.words: dict[int, int] = {}
        self.stop_words: dict[int, int] = {}
        self.contents: dict[str, tuple[Span, TransmitModel]] = {}  # what lies in the arena
        self.intact: dict[str, Span] = {}  # what of a model's last complete copy is still there
        self.dirty: list[Span] = []  # a dead job's bytes, not zeroed yet
        self.commits: dict[str, int] = {}  # the controller keeps the memfds
        self.open: set[int] = set()
        self.waiting_jobs: dict[int, str] = {}
        self.manifests: dict[str, Manifest] = {}
        self.sizes: dict[str, int] = {}
        self.poison: set[str] = set()
        self.announced: set[str] = set()
        self.job_names: list[str] = []
        self.last_token = 0
        self.left: int | None = None
        self.trace: deque[str] = deque(maxlen=200)
        self.counts: dict[str, int] = {}
        self._perform(self.scheduler.start(0.0))

    # -- the loop ------------------------------------------------------------------------------

    def fail(self, text: str) -> None:
        raise Violation(text + "\n" + "\n".join(self.trace))

    def expect(self, is_so: bool, text: str) -> None:
        if not is_so:
            self.fail(text)

    def handle(self, event: ev.Event) -> None:
        self.trace.append(f"{self.now_ms:.0f} > {event}"[:260])
        try:
            commands = self.scheduler.handle(event, self.now_ms)
            self._perform(commands)
            self.scheduler.check()
        except Violation:
            raise
        except Exception as error:
            self.trace.append(f"{type(error).__name__}: {error}")
            raise Violation("\n".join(self.trace)) from error
        self.expect(
            sum(worker.computes for worker in self.workers.values()) <= 1, "two tasks compute"
        )
        for known in self.scheduler.core.workers.values():
            if known.state.state.value not in ("starting", "doomed", "dead"):
                process = self.workers[known.slot]
                self.expect(process.is_ready, f"{process.name} is used before it is ready")

    def act(self) -> bool:
        """Do one random thing that is possible now; False when nothing is."""
        actions = self.actions()
        if not actions:
            return False
        self.random.choice(actions)()
        self.expect(
            sum(worker.computes for worker in self.workers.values()) <= 1, "two tasks compute"
        )
        return True

    def actions(self) -> list[Callable[[], None]]:
        found: list[Callable[[], None]] = []
        if self.left is not None:
            return found
        for worker in (*self.workers.values(), *self.ghosts):
            found += self._deliveries(worker, self._from_worker)
        for worker in self.workers.values():
            if worker.runs:
                found += self._worker_steps(worker)
            elif self._can_reap(worker):
                found.append(lambda worker=worker: self._reap_worker(worker))
        daemon = self.daemon
        if daemon is not None:
            found += self._deliveries(daemon, self._from_daemon)
            if daemon.runs:
                found += self._daemon_steps(daemon)
            elif not daemon.is_reaped and self._can_reap(daemon):
                found.append(lambda: self._reap_daemon(daemon))
        for builder in self.builders:
            found += self._deliveries(builder, self._from_builder)
            if builder.runs:
                found.append(lambda builder=builder: self._build(builder))
            elif not any(builder.out.values()):
                found.append(lambda builder=builder: self._reap_builder(builder))
        return found

    def _deliveries(
        self, process: Any, deliver: Callable[[Any, Message], None]
    ) -> list[Callable[[], None]]:
        return [
            lambda queue=queue: deliver(process, queue.popleft())
            for queue in process.out.values()
            if queue
        ]

    def _can_reap(self, process: Process) -> bool:
        return not process.is_reaped and (process.may_lose or not any(process.out.values()))

    def pass_time(self, ms: float) -> None:
        self.now_ms += ms
        self.handle(ev.Tick())

    def to_next_wakeup(self) -> bool:
        due = self.scheduler.next_wakeup_ms()
        if due is None or self.left is not None:
            return False
        self.pass_time(max(0.0, due - self.now_ms))
        return True

    def inject_faults(self) -> None:
        alive = [worker for worker in self.workers.values() if worker.runs]
        if alive and self.random.random() < self.faults.kill_worker:
            self.kill_worker(self.random.choice(alive))
        daemon = self.daemon
        if daemon is not None and daemon.runs and self.random.random() < self.faults.kill_daemon:
            self.trace.append("daemon is killed")
            daemon.end(-9)

    def kill_worker(self, worker: WorkerProcess) -> None:
        self.trace.append(f"worker {worker.slot} is killed")
        worker.end(-9)

    def settle(self, limit: int = 6000) -> None:
        """No more faults: everything must come to its end in bounded steps."""
        self.faults = Faults(build_error=0, infer_error=0, early_error=0, persist_error=0)
        for worker in self.workers.values():
            worker.hangs = False
        for name in self.job_names:
            self.job_asked(name, "resume")
        for _ in range(limit):
            if not self.act() and not self.to_next_wakeup():
                break
            if self.is_settled():
                break
        else:
            self.fail(f"stuck: {self.describe()}")
        self.expect(not self.open, f"never answered: {sorted(self.open)} {self.describe()}")

    def is_settled(self) -> bool:
        jobs = self.scheduler.core.jobs.values()
        return (
            not self.open
            and all(job.state.state.value in FINAL for job in jobs)
            and not self.actions()
            and not any(worker.script for worker in self.workers.values())
        )

    def describe(self) -> str:
        core = self.scheduler.core
        jobs = [(j.name, j.state.state.value, j.lease_asked_bytes) for j in core.jobs.values()]
        workers = [(w.slot, w.state.state.value, w.job, w.may_raise) for w in core.workers.values()]
        return (
            f"current={core.current} upcoming={core.upcoming} training={core.training} "
            f"queue={[r.model for r in core.queue.values()]} jobs={jobs} workers={workers} "
            f"arena={list(self.scheduler.arena.regions)} turn={self.turn}"
        )

    def check_rest(self) -> None:
        """I3 at rest: the arena holds arrival words and idle models, nothing else."""
        core = self.scheduler.core
        for region in self.scheduler.arena.regions:
            is_idle_model = (
                region.owner.kind in ("model", "rest") and region.owner.name in core.models
            )
            is_known = region.owner.kind == "words" or is_idle_model
            self.expect(is_known, f"leaked {region}")
        for region in self.scheduler.store.regions:
            self.expect(region.owner.name in core.models, f"leaked {region} in the store")
        self.expect(all(m.users == 0 for m in core.models.values()), "a lease at rest")
        self.expect(core.training is None and core.current is None, "a task at rest")

    def leave(self, limit: int = 6000) -> None:
        """A drain that was asked for comes to its end, and nobody is left without an answer."""
        self.faults = Faults()
        for _ in range(limit):
            if self.left is not None:
                break
            if not self.act() and not self.to_next_wakeup():
                break
        self.expect(self.left == 0, f"drain did not end: {self.left} {self.describe()}")
        self.expect(not self.open, f"never answered: {sorted(self.open)}")

    # -- clients -------------------------------------------------------------------------------

    def token(self) -> Any:
        self.last_token += 1
        self.open.add(self.last_token)
        return ev.Token(self.last_token)

    def register(self, name: str, total_bytes: int, *, pin: bool = False, groups: int = 2) -> int:
        if name not in self.sizes:
            self.sizes[name] = total_bytes
        token = self.token()
        spec = f"{name}:{self.sizes[name]}:{groups}"
        self.handle(
            ev.RegisterAsked(
                token=token, model=name, spec=spec.encode(), spec_digest=spec, priority=1,
                is_pinned=pin,
            )
        )  # fmt: skip
        return int(token)

    def infer(self, name: str, *, priority: int = 1, deadline_ms: float | None = None) -> int:
        token = self.token()
        manifest = self.manifests.get(name)
        self.handle(
            ev.InferArrived(
                token=token, request_id=f"r{token}", model=name,
                digest=manifest.digest if manifest else "", priority=priority,
                deadline_at_ms=None if deadline_ms is None else self.now_ms + deadline_ms,
                inputs=(), reply_offset_bytes=0, reply_bytes=0,
            )
        )  # fmt: skip
        return int(token)

    def profile(self, name: str, batches: tuple[int, ...] = ()) -> int:
        token = self.token()
        self.handle(ev.ProfileAsked(token=token, model=name, batches=batches))
        return int(token)

    def train(self, name: str, *, priority: int = 1) -> None:
        self.handle(
            ev.TrainAsked(token=self.token(), job=name, entry="t.py", args=(), priority=priority)
        )
        if name not in self.job_names:
            self.job_names.append(name)

    def job_asked(self, name: str, action: Any) -> None:
        self.handle(ev.JobAsked(token=self.token(), job=name, action=action))

    def random_client(self) -> None:
        """One random thing a client may do."""
        rng = self.random
        name = f"m{rng.randrange(4)}"
        job = f"j{rng.randrange(3)}"
        deadline = rng.choice((None, None, 5.0, 500.0, 20000.0))
        choice = rng.randrange(25)
        if choice < 10:
            if self.announced and rng.random() < 0.95:
                name = rng.choice(sorted(self.announced))
            self.infer(name, priority=rng.choice(PRIORITIES), deadline_ms=deadline)
        elif choice < 13:
            self.register(name, rng.choice((1, 7, 15, 30, 40)) * MIB, pin=rng.random() < 0.1)
        elif choice < 15:
            self.train(job, priority=rng.choice(PRIORITIES))
        elif choice == 15:
            self.job_asked(job, rng.choice(("pause", "resume", "show", "wait", "cancel")))
        elif choice == 16:
            self.job_asked(job, rng.choice(("pause", "resume")))
        elif choice == 17 and rng.random() < 0.3:
            self.handle(ev.UnregisterAsked(token=self.token(), model=name))
        elif choice == 18:
            pin = rng.random() < 0.5
            self.handle(ev.PinAsked(token=self.token(), model=name, pin=pin))
        elif choice == 19 or (choice == 22 and self.announced):
            if choice == 22:
                name = rng.choice(sorted(self.announced))
            self.handle(ev.PrefetchHint(model=name))
            if rng.random() < 0.5 and self.announced:
                self.infer(rng.choice(sorted(self.announced)))
                self.infer(name)
        elif choice == 20 and self.open:
            self.handle(ev.CancelAsked(token=ev.Token(rng.choice(sorted(self.open)))))
        elif choice == 21:
            if self.faults.pings:
                self.handle(ev.PingAsked(token=self.token()))
            what: Any = rng.choice(("models", "ps", "jobs", "stats", "show", "trace", "plan"))
            self.handle(ev.Query(token=self.token(), what=what, name=name))
        elif choice == 24:
            self.profile(name, rng.choice(((), (1,), (7,))))
        else:
            self.pass_time(rng.choice((0.0, 1.0, 40.0, 900.0, 3000.0)))

    # -- commands ------------------------------------------------------------------------------

    def _perform(self, commands: list[ev.Command]) -> None:
        for command in commands:
            kind = type(command).__name__
            self.counts[kind] = self.counts.get(kind, 0) + 1
            if not isinstance(command, ev.Publish | ev.Span | ev.Journal):
                self.trace.append(f"   < {command}"[:300])
            match command:
                case ev.Answer():
                    self._answered(command)
                case ev.ToDaemon(message=message):
                    self._to_daemon(message)
                case ev.ToWorker():
                    self._to_worker(command)
                case ev.RaiseTurn(turn=turn):
                    self.turn = turn
                case ev.StopTrial(slot=slot, epoch=epoch):
                    self.stop_words[slot] = epoch
                case ev.SpawnDaemon(generation=generation):
                    self.expect(self.daemon is None or self.daemon.is_reaped, "two daemons")
                    self.expect(not self.workers, "workers outlive their daemon")
                    self.daemon = DaemonProcess("daemon", generation)
                case ev.SpawnWorker(slot=slot, generation=generation):
                    self.expect(slot not in self.workers, f"worker {slot} spawned before its reap")
                    self.expect(self.daemon is not None and self.daemon.is_ready, "no daemon yet")
                    self.workers[slot] = WorkerProcess(f"worker {slot}", generation, slot=slot)
                case ev.KillWorker(slot=slot, generation=generation):
                    worker = self.workers[slot]
                    self.expect(worker.generation == generation, "the wrong process is killed")
                    worker.end(-9)
                case ev.StartBuild():
                    self.expect(not self.builders, "two builds at once")
                    self.builders.append(BuilderProcess("builder", 0, order=command))
                case ev.KillBuild(epoch=epoch):
                    for builder in self.builders:
                        if builder.order is not None and builder.order.epoch == epoch:
                            builder.end(-9)
                case ev.Announce(model=model):
                    self.announced.add(model)
                case ev.Retract(model=model):
                    self.announced.discard(model)
                case ev.CreateCommits(job=job):
                    self.commits[job] = -1
                case ev.DropCommits(job=job):
                    del self.commits[job]
                case ev.Leave(status=status):
                    self.expect(self.left is None, "left twice")
                    self.left = status

    def _answered(self, answer: ev.Answer) -> None:
        self.expect(answer.token in self.open, f"token {answer.token} answered twice (I1)")
        if not answer.more:
            self.open.discard(answer.token)
            outcome = "ok" if answer.error is None else type(answer.error).__name__
            self.counts[outcome] = self.counts.get(outcome, 0) + 1

    def _live_spans(self) -> list[tuple[str, Span]]:
        """Every range somebody reads or writes now."""
        spans = [(f"scrub {span}", span) for span in self.dirty]
        if self.daemon is not None and self.daemon.runs:
            spans += [(f"copy {copy.order.model}", copy.span) for copy in self.daemon.copies]
        for worker in self.workers.values():
            if worker.lease is not None:
                spans.append((f"lease of {worker.name}", worker.lease))
            for order in (worker.inference, *worker.inbox.get("task", ())):
                if isinstance(order, RunInference):
                    spans.append((f"{worker.name} reads {order.model}",
                                  self.contents[order.model][0]))  # fmt: skip
        return spans

    def _claim(self, span: Span, why: str) -> None:
        """``span`` gets a new owner: nobody may use it, and what lay there is gone."""
        for owner, other in self._live_spans():
            self.expect(not span.overlaps(other), f"{why} overlaps {owner} (I4)")
        self.contents = {
            name: held for name, held in self.contents.items() if not held[0].overlaps(span)
        }
        for name, held in list(self.intact.items()):
            if held.overlaps(span):
                self.intact[name] = Span(held.start, min(held.end, max(held.start, span.start)))

    def _to_daemon(self, message: Message) -> None:
        daemon = self.daemon
        self.expect(daemon is not None and daemon.is_ready, f"{message} to a daemon not ready")
        assert daemon is not None
        if isinstance(message, OpenCommits):
            self.expect(message.job in self.commits, "opened commits that do not exist")
        if isinstance(message, TransmitModel):
            start = message.arena_offset_bytes
            span = Span(start, start + message.region_bytes)
            self.expect(start >= self.settings.words * 4, "a model over the arrival words")
            intact = self.intact.get(message.model, Span(0, 0))
            for group in self._kept(message):
                kept = group.arena_offset_bytes
                self.expect(
                    intact.start == start and kept + self._true_size(message, group) <= intact.end,
                    f"{message.model}: group at {kept} is not there, and not sent",
                )
                self.counts["kept"] = self.counts.get("kept", 0) + 1
            self._claim(span, f"copy of {message.model}")
            self.intact.pop(message.model, None)
            self.contents[message.model] = (span, message)
            for copy in daemon.copies:
                used = {group.word for group in copy.order.groups}
                self.expect(not used & {g.word for g in message.groups}, "two copies, one word")
            if daemon.runs:
                daemon.copies.append(Transmission(message))
        elif daemon.runs:
            daemon.inbox.setdefault("control", deque()).append(message)

    @staticmethod
    def _kept(order: TransmitModel) -> list[GroupCopy]:
        return [group for group in order.groups if not group.size_bytes]

    def _true_size(self, order: TransmitModel, group: GroupCopy) -> int:
        """Bytes of a group whose order says 0: up to where the next one begins."""
        begins = sorted(g.arena_offset_bytes for g in order.groups)
        begins.append(order.arena_offset_bytes + self.manifests[order.model].total_bytes)
        after = begins[begins.index(group.arena_offset_bytes) + 1]
        return after - group.arena_offset_bytes

    def _to_worker(self, command: ev.ToWorker) -> None:
        worker = self.workers.get(command.slot)
        self.expect(worker is not None, f"{command} to nobody")
        assert worker is not None
        message = command.message
        if isinstance(message, RunInference):
            self._check_order(worker, message)
        elif isinstance(message, RunJob):
            names = [w.script.order.job for w in self.workers.values() if w.script]
            self.expect(message.job not in names, f"two processes of {message.job}")
            self.expect(worker.inference is None and not worker.sent_job, "the worker is taken")
            worker.sent_job = message.epoch
        elif isinstance(message, StopTask | GrantTurn | EvictTask | LeaseGranted | LeaseRefused):
            self.expect(message.epoch == worker.sent_job, f"{message} names another dispatch")
            if isinstance(message, GrantTurn) and worker.runs and worker.script is not None:
                self.expect(not worker.script.computes, "granted what it never gave up")
        if isinstance(message, LeaseGranted):
            start = message.offset_bytes
            lease = Span(start, start + message.size_bytes)
            if worker.lease != lease:
                self._claim(lease, f"lease of {worker.name}")
            worker.lease = lease
        if worker.runs:
            worker.inbox.setdefault(command.channel, deque()).append(message)

    def _check_order(self, worker: WorkerProcess, order: RunInference) -> None:
        self.expect(not worker.sent_job, "a request for a job's process")
        self.expect(worker.inference is None, "two tasks on one worker")
        held = self.contents.get(order.model)
        self.expect(held is not None, f"{order.model} does not lie in the arena")
        assert held is not None
        sent = held[1]
        self.expect(sent.epoch == order.residency_epoch, f"stale epoch for {order.model}")
        self.expect(sent.arena_offset_bytes == order.arena_offset_bytes, "another region")
        self.expect(sent.groups[0].word == order.first_word, "other arrival words")
        self.expect(len(sent.groups) == self._group_count(order), "it was sent in other groups")

    def _group_count(self, order: RunInference) -> int:
        return len(order.plan) or len(self.manifests[order.model].groups)

    # -- the daemon ----------------------------------------------------------------------------

    def _from_daemon(self, daemon: DaemonProcess, message: Message) -> None:
        if daemon is self.daemon:
            self.handle(ev.FromDaemon(generation=daemon.generation, message=message))

    def _daemon_steps(self, daemon: DaemonProcess) -> list[Callable[[], None]]:
        if not daemon.is_ready:
            return [lambda: self._daemon_becomes_ready(daemon)]
        steps: list[Callable[[], None]] = []
        if daemon.inbox.get("control"):
            steps.append(lambda: self._daemon_reads(daemon))
        if daemon.copies:
            steps.append(lambda: self._copy(daemon))
        steps += [
            lambda lane=lane, queue=queue: self._daemon_works(daemon, lane, queue.popleft())
            for lane, queue in daemon.lanes.items()
            if queue
        ]
        return steps

    def _daemon_becomes_ready(self, daemon: DaemonProcess) -> None:
        daemon.is_ready = True
        ready = DaemonReady(pid=1, arena_bytes=0, store_bytes=0, device="cpu")
        daemon.say("control", ready)
        # Ready is the first thing it says; nothing is ordered before it is heard.
        self._from_daemon(daemon, daemon.out["control"].popleft())

    def _daemon_reads(self, daemon: DaemonProcess) -> None:
        message = daemon.inbox["control"].popleft()
        match message:
            case CancelTransmit(epoch=epoch):
                for copy in daemon.copies:
                    if copy.order.epoch == epoch:
                        copy.is_cancelled = True
            case Ping(epoch=epoch):
                daemon.say("control", Pong(epoch=epoch))
            case OpenCommits(job=job):
                daemon.areas.add(job)
            case CloseCommits(job=job):
                daemon.areas.discard(job)
            case StoreModel():
                daemon.lanes.setdefault("store", deque()).append(message)
            case Scrub() | CommitCopy():
                if isinstance(message, CommitCopy):
                    self.expect(message.job in daemon.areas, "a commit without an area")
                daemon.lanes.setdefault("to-host", deque()).append(message)
            case PersistCommit(job=job):
                self.expect(job in daemon.areas, "nothing to persist")
                daemon.lanes.setdefault("disk", deque()).append(message)
            case _:
                self.fail(f"a daemon takes no {message}")

    def _copy(self, daemon: DaemonProcess) -> None:
        """One more group of the oldest transmission, or its end."""
        copy = daemon.copies[0]
        order = copy.order
        if self.random.random() < self.faults.copy_error:
            copy.is_cancelled = True
        is_complete = copy.done == len(order.groups)
        if not is_complete and not copy.is_cancelled:
            group = order.groups[copy.done]
            self.words[group.word] = order.epoch
            copy.done += 1
            return
        daemon.copies.popleft()
        if is_complete:
            held = self.contents.get(order.model)
            if held is not None and held[1] is order:
                self.intact[order.model] = copy.span
        daemon.say(
            "copy",
            TransmitEnded(
                model=order.model, epoch=order.epoch, is_complete=is_complete,
                group_count=copy.done, copied_bytes=0, started_at_ms=self.now_ms,
                ended_at_ms=self.now_ms,
                group_ends_at_ms=tuple(
                    self.now_ms + GROUP_MS / 10 * (i + 1) for i in range(copy.done)
                ),
            ),
        )  # fmt: skip

    def _daemon_works(self, daemon: DaemonProcess, lane: str, message: Message) -> None:
        match message:
            case StoreModel(model=model, epoch=epoch):
                if self.random.random() < self.faults.store_error:
                    daemon.say(lane, StoreFailed(model=model, epoch=epoch, reason="corrupt"))
                else:
                    daemon.say(lane, ModelStored(model=model, epoch=epoch, load_ms=1.0))
            case Scrub(epoch=epoch, offset_bytes=start, size_bytes=size):
                self.dirty = [span for span in self.dirty if span != Span(start, start + size)]
                daemon.say(lane, Scrubbed(epoch=epoch))
            case CommitCopy(job=job, epoch=epoch, number=number, step=step):
                if job in self.commits:
                    self.commits[job] = max(self.commits[job], step)
                daemon.say(lane, StepCommitted(
                    job=job, epoch=epoch, number=number, step=step, copy_ms=0.1))  # fmt: skip
            case PersistCommit(job=job, epoch=epoch):
                error = "disk full" if self.random.random() < self.faults.persist_error else ""
                step = self.commits.get(job, -1)
                daemon.say(lane, CommitPersisted(job=job, epoch=epoch, step=step, error=error))

    def _reap_daemon(self, daemon: DaemonProcess) -> None:
        daemon.is_reaped = True
        self.contents.clear()
        self.intact.clear()
        self.dirty.clear()
        self.words.clear()
        for worker in self.workers.values():
            worker.lease = None  # the memory is gone with its owner
            worker.inbox.clear()
            if worker.runs and self.random.random() < 0.5:
                worker.end(70)
            elif worker.runs:
                worker.inference, worker.has_begun = None, False  # it faults, and waits for its end
                worker.script = None
        self.handle(ev.DaemonExited(generation=daemon.generation, status=daemon.status or 0))

    # -- workers -------------------------------------------------------------------------------

    def _from_worker(self, worker: WorkerProcess, message: Message) -> None:
        self.handle(ev.FromWorker(slot=worker.slot, generation=worker.generation, message=message))

    def _reap_worker(self, worker: WorkerProcess) -> None:
        worker.is_reaped = True
        del self.workers[worker.slot]
        if any(worker.out.values()):
            self.ghosts.append(worker)
        if worker.lease is not None:
            self.dirty.append(worker.lease)
        self.handle(
            ev.WorkerExited(
                slot=worker.slot,
                generation=worker.generation,
                status=worker.status or 0,
            )
        )

    def _worker_steps(self, worker: WorkerProcess) -> list[Callable[[], None]]:
        if not worker.is_ready:
            return [lambda: self._worker_becomes_ready(worker)]
        steps: list[Callable[[], None]] = []
        if worker.inbox.get("signal"):
            steps.append(lambda: self._signal(worker, worker.inbox["signal"].popleft()))
        if worker.inference is not None:
            if self._can_compute(worker, worker.inference):
                steps.append(lambda: self._compute(worker))
        elif worker.script is not None:
            steps += self._script_steps(worker, worker.script)
        elif worker.cleaning:
            steps.append(lambda: self._cleaned(worker))
        elif worker.inbox.get("task"):
            steps.append(lambda: self._task(worker, worker.inbox["task"].popleft()))
        return steps

    def _worker_becomes_ready(self, worker: WorkerProcess) -> None:
        worker.is_ready = True
        worker.say("task", WorkerReady(slot=worker.slot, pid=100 + worker.slot))

    def _cleaned(self, worker: WorkerProcess) -> None:
        worker.say("task", Cleaned(epoch=worker.cleaning))
        worker.cleaning = 0

    def _task(self, worker: WorkerProcess, message: Message) -> None:
        match message:
            case PrepareModel(model=model, digest=digest, plan=plan):
                error = "no" if self.random.random() < 0.1 else ""
                prepared = ModelPrepared(model=model, digest=digest, plan=plan, error=error)
                worker.say("task", prepared)
            case ForgetModel():
                pass
            case RunInference():
                worker.inference, worker.next_group, worker.has_begun = message, 0, False
                worker.hangs = self.random.random() < self.faults.hang
                if self.random.random() < self.faults.early_error:
                    text = "it does not load"
                    failed = InferenceFailed(epoch=message.epoch, error="TaskFailed", message=text)
                    self._inference_ends(worker, failed)
            case RunJob():
                worker.script = self._start_script(worker, message)
                for signal in worker.early:
                    self._signal(worker, signal)
                worker.early.clear()
            case _:
                self.fail(f"a worker takes no {message}")

    def _can_compute(self, worker: WorkerProcess, order: RunInference) -> bool:
        if worker.hangs and worker.has_begun:
            return False
        if not worker.has_begun:
            return self.turn == order.epoch
        if worker.next_group == self._group_count(order):
            return True
        return self.words.get(order.first_word + worker.next_group) == order.residency_epoch

    def _compute(self, worker: WorkerProcess) -> None:
        order = worker.inference
        assert order is not None
        if not worker.has_begun:
            worker.has_begun = True
        elif order.trial_batch and self.stop_words.get(worker.slot) == order.epoch:
            self._inference_ends(
                worker, InferenceFailed(epoch=order.epoch, error="Cancelled", message="stopped")
            )
        elif worker.next_group < self._group_count(order):
            held = self.contents.get(order.model)
            self.expect(held is not None and held[1].epoch == order.residency_epoch,
                        f"{order.model} is read after its eviction (I4)")  # fmt: skip
            worker.next_group += 1
            if order.model in self.poison:
                self.kill_worker(worker)
        elif self.random.random() < self.faults.infer_error:
            self._inference_ends(
                worker, InferenceFailed(epoch=order.epoch, error="TaskFailed", message="NaN")
            )
        else:
            is_clean = self.random.random() < 0.5
            groups = range(self._group_count(order))
            self._inference_ends(worker, InferenceDone(
                epoch=order.epoch, outputs=(), turn_at_ms=self.now_ms,
                first_group_at_ms=self.now_ms, ended_at_ms=self.now_ms + GROUP_MS * len(groups),
                stall_ms=0.0, is_clean=is_clean,
                group_begins_at_ms=tuple(self.now_ms + GROUP_MS * i for i in groups),
                group_ends_at_ms=tuple(self.now_ms + GROUP_MS * (i + 1) for i in groups),
            ))  # fmt: skip
            if is_clean:
                worker.cleaning = 0

    def _inference_ends(self, worker: WorkerProcess, message: Message) -> None:
        assert worker.inference is not None
        worker.cleaning = worker.inference.epoch
        worker.inference, worker.has_begun = None, False
        worker.say("task", message)

    # -- training scripts ----------------------------------------------------------------------

    def _start_script(self, worker: WorkerProcess, order: RunJob) -> Script:
        size = sum(order.job.encode()) % 3  # each job has its own size
        script = Script(
            order, worker.slot, step=max(0, self.commits.get(order.job, 0)), total=6,
            slice_bytes=(6, 18, 30)[size] * MIB,
            is_stubborn=self.random.random() < self.faults.swallow,
        )  # fmt: skip
        self._grant(worker, script, order.turn)
        return script

    def _grant(self, worker: WorkerProcess, script: Script, turn: int) -> None:
        script.turn, script.holds = turn, turn > 0
        stop = script.future_stop
        if stop is not None and stop.turn == turn:
            script.future_stop = None
            self._stop(worker, script, stop)

    def _signal(self, worker: WorkerProcess, message: Message) -> None:
        if isinstance(message, Ping):  # whatever its task does
            worker.say("signal", Pong(epoch=message.epoch))
            return
        script = worker.script
        if script is None or getattr(message, "epoch", 0) > script.order.epoch:
            worker.early.append(message)
            return
        match message:
            case StopTask() as stop:
                if stop.turn > script.turn:
                    script.future_stop = stop
                else:
                    self._stop(worker, script, stop)
            case GrantTurn(turn=turn):
                self._grant(worker, script, turn)
            case EvictTask():
                script.evict = True
            case LeaseGranted(offset_bytes=start, size_bytes=size):
                script.lease = Span(start, start + size)
            case LeaseRefused():
                if script.phase == "leasing":
                    self._script_ends(worker, script, "failed")
            case StepCommitted():
                if script.phase in ("committing", "unwinding"):
                    script.step = max(script.step, message.step)
                    if script.phase == "unwinding":
                        self._script_ends(worker, script, "preempted")
                    else:
                        script.phase = "training"
            case _:
                self.fail(f"a script takes no {message}")

    def _stop(self, worker: WorkerProcess, script: Script, stop: StopTask) -> None:
        """The termination thread: at once where the script needs no device."""
        if stop.turn != script.turn or not script.holds:
            return
        script.stop = stop
        if script.is_away or script.phase == "over":
            self._park(worker, script)

    def _park(self, worker: WorkerProcess, script: Script) -> None:
        stop = script.stop
        assert stop is not None
        script.stop, script.holds = None, False
        if stop.next_turn:
            self.turn = stop.next_turn
        worker.say("signal", Parked(
            epoch=script.order.epoch, turn=stop.turn, next_turn=stop.next_turn, where="forward",
            asked_at_ms=0.0, parked_at_ms=0.0))  # fmt: skip

    def _script_steps(self, worker: WorkerProcess, script: Script) -> list[Callable[[], None]]:
        if script.phase == "over":
            return [] if script.is_stubborn else [lambda: worker.end(0)]
        if script.is_stubborn and (script.stop or script.evict):
            return []  # neither parks nor unwinds
        if script.phase == "unwinding":
            # A commit that was refused or lost is given up; the killed worker loses it anyway.
            return [lambda: self._script_ends(worker, script, "preempted")]
        if script.stop is not None or script.evict:
            return [lambda: self._answer_gate(worker, script)]
        if script.phase == "starting":
            return [lambda: self._ask_lease(worker, script)]
        if script.phase == "leasing":
            return [lambda: self._begin_training(worker, script)] if script.lease else []
        if script.phase == "committing":
            return []
        if script.is_away:
            can_take = script.holds
            return [lambda: setattr(script, "is_away", False)] if can_take else []
        if script.holds:
            return [lambda: self._train(worker, script)]
        return []

    def _answer_gate(self, worker: WorkerProcess, script: Script) -> None:
        if script.stop is not None:
            self._park(worker, script)
            return
        if script.lease is not None and self.random.random() < 0.7:
            self._commit(worker, script, "unwinding")
        else:
            self._script_ends(worker, script, "preempted")

    def _ask_lease(self, worker: WorkerProcess, script: Script) -> None:
        script.phase = "leasing"
        worker.say(
            "task",
            LeaseRequest(epoch=script.order.epoch, slice_bytes=script.slice_bytes, state_bytes=MIB),
        )

    def _begin_training(self, worker: WorkerProcess, script: Script) -> None:
        script.phase = "training"
        worker.say("task", JobReport(epoch=script.order.epoch, kind="started", values={}))

    def _train(self, worker: WorkerProcess, script: Script) -> None:
        self.expect(script.lease is not None, "it trains without memory")
        chance = self.random.random()
        if chance < 0.2:
            script.is_away = True
        elif chance < 0.5:
            self._commit(worker, script, "committing")
        elif chance < 0.6 and self.faults.infer_error:
            self._script_ends(worker, script, "failed")
        else:
            script.step += 1
            values = {"step": script.step, "steps_per_s": 1.0}
            worker.say("task", JobReport(epoch=script.order.epoch, kind="step", values=values))
            if script.step >= script.total:
                self._script_ends(worker, script, "done")

    def _commit(self, worker: WorkerProcess, script: Script, phase: str) -> None:
        script.phase = phase
        script.commits += 1
        worker.say("task", CommitStep(epoch=script.order.epoch, number=script.commits,
                                      step=script.step, ranges=()))  # fmt: skip

    def _script_ends(self, worker: WorkerProcess, script: Script, outcome: Any) -> None:
        script.phase = "over"
        script.is_stubborn = self.random.random() < self.faults.linger
        worker.say("task", JobEnded(epoch=script.order.epoch, outcome=outcome, step=script.step))

    # -- builders ------------------------------------------------------------------------------

    def _from_builder(self, builder: BuilderProcess, message: Message) -> None:
        manifest = None
        if isinstance(message, BuildDone):
            manifest = self.manifests[message.model]
        profiles: tuple[Found, ...] = ()
        if manifest is not None and self.random.random() < self.profiled:
            layer_ms = self.random.choice((1.0, 12.0, 40.0))
            profile = profile_of(str(message.model), manifest, layer_ms)
            profiles = (Found("found.json", profile),)
        self.handle(ev.FromBuilder(message=message, manifest=manifest, profiles=profiles))

    def _build(self, builder: BuilderProcess) -> None:
        order = builder.order
        assert order is not None
        name, size, groups = order.spec.decode().split(":")
        chance = self.random.random()
        if chance < self.faults.build_error:
            if chance < self.faults.build_error / 2:
                builder.end(1)
                return
            builder.say("out", BuildFailed(model=order.model, epoch=order.epoch,
                                           error="RegistrationRefused", message="no"))  # fmt: skip
        else:
            self.manifests[name] = manifest_of(f"d-{name}", int(size), int(groups))
            builder.say("out", BuildProgress(
                model=order.model, epoch=order.epoch, stage="export", fraction=0.5))  # fmt: skip
            builder.say("out", BuildDone(model=order.model, epoch=order.epoch, digest=f"d-{name}"))
        builder.end(0)

    def _reap_builder(self, builder: BuilderProcess) -> None:
        assert builder.order is not None
        self.builders.remove(builder)
        self.handle(
            ev.BuilderExited(
                model=builder.order.model, epoch=builder.order.epoch, status=builder.status or 0
            )
        )


FINAL = ("done", "failed", "cancelled", "expired")


def live(world: World, steps: int) -> None:
    """Random clients, random order, faults; then peace, an orderly end, and an empty arena."""
    for name, mib in (("m0", 7), ("m1", 15), ("m2", 30)):
        world.register(name, mib * MIB)
        if world.random.random() < 0.1:
            world.profile(name)  # mostly refused: it is not ready yet
    leaves_at = world.random.choice((None, None, None, world.random.randrange(steps)))
    for step in range(steps):
        if step == leaves_at:
            world.handle(ev.DrainAsked(token=None, grace_ms=world.random.choice((10.0, 1e6))))
        if world.left is None and world.random.random() < 0.12:
            world.random_client()
        else:
            world.inject_faults()
            if not world.act() and world.random.random() < 0.5:
                world.to_next_wakeup()
    if world.left is not None or world.scheduler.core.is_draining:
        world.leave()
        return
    world.settle()
    world.check_rest()
    world.handle(ev.DrainAsked(token=world.token(), grace_ms=1e9))
    world.leave()


def random_world(seed: int, *, pings: bool = False) -> World:
    """A world with settings and faults drawn from the seed."""
    rng = random.Random(f"world {seed}")
    faults = Faults(
        kill_worker=rng.choice((0.0, 0.01, 0.05)), kill_daemon=rng.choice((0.0, 0.0, 0.004)),
        copy_error=rng.choice((0.0, 0.02)), store_error=0.03, hang=rng.choice((0.0, 0.03)),
        swallow=rng.choice((0.0, 0.15)), linger=rng.choice((0.0, 0.15)), pings=pings,
    )  # fmt: skip
    world = World(
        seed, policy=rng.choice(("priority", "priority", "fifo")), faults=faults,
        standby=rng.choice((0, 1, 2, 2)), arena_mib=rng.choice((48, 64, 96)),
        prefix_mib=rng.choice((0, 8, 64)), profiled=rng.choice((0.0, 0.7, 1.0)),
        max_compute_ms=rng.choice((0.0, 60000.0)),
    )  # fmt: skip
    if rng.random() < 0.2:
        world.poison.add("m1")
    return world
