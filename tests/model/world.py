"""The world around the real scheduler: processes, memory, clients, faults; and what must hold."""

from __future__ import annotations

import marshal
from typing import Any, Final

from pipeswitch.ipc.messages import (
    BuildDone,
    DaemonReady,
    LeaseGranted,
    Message,
    ModelName,
    ModelPrepared,
    ModelStored,
    PrepareModel,
    RunInference,
    Scrub,
    StoreModel,
    TransmitModel,
    WorkerReady,
)
from pipeswitch.scheduler import events as ev
from pipeswitch.scheduler.arena import WORDS
from pipeswitch.scheduler.core import SchedulerSettings
from pipeswitch.scheduler.scheduler import Scheduler
from pipeswitch.simulator.programs import program_of
from pipeswitch.simulator.violation import Violation, require

from .arena import Arena
from .channel import pack, unpack
from .choices import Action
from .clients import Clients
from .commits import JobCommits
from .daemon import DAEMON, Daemon
from .frozen import Kept, frozen_part, reader, renumbered
from .process import PROCESS, SIGNAL, TASK, Process
from .recall import Recall
from .scope import Scope
from .thawed import Thawed

GRACE_MS: Final = 30000.0  # one for all: a jump of the clock lets all of them run out
OF_CLIENTS: Final = frozenset({"train", "ask", "pause", "resume", "cancel", "hint"})


class World:
    """All of it in one state. ``freeze`` and ``thaw`` go from state to state.

    A process and the daemon are shared by all states they are in; whoever changes one takes his
    ``own`` before.
    """

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.daemon = Daemon()
        self.processes: dict[int, Process] = {}
        self.ghosts: list[Process] = []  # reaped, and some of what they said is still on its way
        self.arena, self.commits, self.clients = Arena(self), JobCommits(self), Clients(self)
        self.kills, self.daemon_kills = scope.kills, scope.daemon_kills
        self.suspicions, self.late, self.repeats = scope.suspicions, scope.late, scope.repeats
        self.tale: list[ev.Command] | None = None  # the scheduler's commands, for a story
        self._prepares: list[tuple[int, int, PrepareModel]] = []
        self._shared: dict[Any, Any] = {}  # processes and daemons, by what they were frozen to
        self._thawed: tuple[Any, Thawed] | None = None
        settings = SchedulerSettings(
            arena_bytes=scope.arena_bytes, store_bytes=scope.store_bytes, words=scope.words,
            standby=scope.standby, max_deaths=scope.max_deaths, persist_every_ms=1e9,
            training_cycle_ms=GRACE_MS, stop_grace_ms=GRACE_MS, evict_grace_ms=GRACE_MS,
        )  # fmt: skip
        scheduler = Scheduler(settings)
        self.recall = Recall(scheduler)
        self._starting = True
        self._start(scheduler)
        self._starting = False
        self.recall.learn()
        if scope.is_coarse:
            self.apply(("train",))

    def _start(self, scheduler: Scheduler) -> None:
        """Daemon and workers ready, the models registered: where every exploration begins."""
        self._perform(scheduler.start(0.0))
        self._hurry()
        for index in range(self.scope.models):
            name = self.model_name(index)
            self.handle(
                ev.RegisterAsked(
                    token=ev.Token(200 + index), model=ModelName(name), spec=name.encode(),
                    spec_digest=name, priority=1, is_pinned=False,
                )
            )  # fmt: skip
        self._hurry()

    @property
    def scheduler(self) -> Scheduler:
        """The real one, in this state."""
        return self.recall.scheduler

    @property
    def now_ms(self) -> float:
        """The scheduler's clock."""
        return self.scheduler.core.now_ms if self._starting else self.recall.moment.now_ms

    def model_name(self, index: int) -> str:
        return "AB"[index % self.scope.models]

    # -- states --------------------------------------------------------------------------------

    def freeze(self) -> bytes:
        """This state, as bytes: equal bytes are equal states."""
        slots = sorted(self.processes)
        parts = [self.recall.moment.kept, *[_kept(self.processes[slot]) for slot in slots],
                 *map(_kept, self.ghosts), self.daemon.kept or frozen_part(DAEMON.freeze,
                 self.daemon), frozen_part(Arena.freeze, self.arena)]  # fmt: skip
        epochs: list[int] = []
        for _, its_epochs in parts:
            epochs += its_epochs
        rest = (
            len(slots), self.commits.freeze(), self.clients.freeze(),
            (self.kills, self.daemon_kills, self.suspicions, self.late, self.repeats),
            self._generations(),
        )  # fmt: skip
        state = (
            tuple([frozen for frozen, _ in parts]), tuple([len(e) for _, e in parts]), rest,
            renumbered(tuple(epochs)),
        )  # fmt: skip
        return marshal.dumps(state, 2)

    def _generations(self) -> tuple[Any, ...]:
        """Generations by slot, ranked among those that anything still names."""
        generations = self.recall.moment.generations[1:]
        if not self.ghosts:
            return tuple([(1, ())] * len(generations))
        found = []
        for slot, generation in enumerate(generations):
            ghosts = [ghost.generation for ghost in self.ghosts if ghost.slot == slot]
            order = {g: i for i, g in enumerate(sorted({generation, *ghosts}), start=1)}
            found.append((order[generation], tuple([order[g] for g in ghosts])))
        return tuple(found)

    def thaw(self, frozen: Any) -> None:
        """Become the state that ``marshal.loads`` gave; the same one again is cheap."""
        if self._thawed is None or frozen is not self._thawed[0]:
            self._thawed = frozen, Thawed(self, frozen)
        self._thawed[1].becomes(self)
        self._prepares = []

    def shared(self, codec: Any, kept: Kept, generation: int = 0) -> Any:
        """The process or daemon that was frozen to this."""
        key = (codec, kept, generation)
        found = self._shared.get(key)
        if found is None:
            found = codec.thaw(marshal.loads(kept[0]), reader(kept[1]))
            found.kept, found.generation = kept, generation
            self._shared[key] = found
        return found

    # -- what can be changed -------------------------------------------------------------------

    def own(self, slot: int) -> Process:
        """The process in a slot, to be changed."""
        process = self.processes[slot]
        if process.kept is not None:
            process = self.processes[slot] = process.own(self)
        return process

    def own_daemon(self) -> Daemon:
        """The memory daemon, to be changed."""
        if self.daemon.kept is not None:
            self.daemon = self.daemon.own()
        return self.daemon

    # -- moves ---------------------------------------------------------------------------------

    def apply(self, action: Action) -> bool:
        """Let it happen; False when nothing came of it. Raises Violation."""
        try:
            kind, *rest = action
            owner, name = (self.clients, kind) if kind in OF_CLIENTS else (self, f"_do_{kind}")
            is_something = getattr(owner, name)(*rest)
        except (Violation, KeyboardInterrupt):
            raise
        except Exception as error:
            raise Violation(f"{type(error).__name__}: {error}") from error
        if self.scope.is_coarse:
            self._hurry()
        self._check()
        return is_something is not False

    def _hurry(self) -> None:
        """What takes no time in a coarse scope."""
        for slot, process in list(self.processes.items()):
            if process.life == "booting":
                self._do_ready(slot)
                self._do_tells(slot, TASK)
                process = self.processes[slot]
            if not self.scope.hears_late:
                while process.life == "up" and process.may_hear():
                    process = self.own(slot)
                    process.hears(self)
        if self.daemon.life == "booting":
            self._do_daemon_ready()
        while self.daemon.is_half or (self.daemon.lane and self.daemon.lane[0][0] == "Scrub"):
            self._do_daemon_works()
        while self.daemon.out:
            self._do_daemon_tells()
            self._hurry()

    def _do_clock(self, due_ms: float) -> None:
        self.handle(ev.Tick(), due_ms)

    def _do_passes(self, due_ms: float) -> None:
        self.handle(ev.Tick(), due_ms)

    def _do_drain(self) -> None:
        self.clients.drain(GRACE_MS)

    def _do_suspect(self, due_ms: float) -> bool:
        self.suspicions -= 1
        self._do_clock(due_ms)
        is_suspected = any(process.is_doomed for process in self.processes.values())
        return is_suspected or not self.scope.is_coarse

    def _do_ready(self, slot: int) -> None:
        process = self.own(slot)
        process.life = "up"
        process.say(TASK, WorkerReady(slot=slot, pid=100))  # type: ignore[arg-type]

    def _do_hears(self, slot: int) -> None:
        self.own(slot).hears(self)

    def _do_moves(self, slot: int) -> bool:
        return self.own(slot).moves(self)

    def _do_tells(self, slot: int, channel: int) -> None:
        process = self.own(slot)
        self._deliver(process, channel)
        while self.scope.is_coarse and (process.task_out, process.signal_out)[channel]:
            self._deliver(process, channel)

    def _do_tells_twice(self, slot: int, channel: int) -> None:
        self.repeats -= 1
        process = self.own(slot)
        if channel == TASK:
            process.task_out = (process.task_out[0], *process.task_out)
        else:
            process.signal_out = (process.signal_out[0], *process.signal_out)
        self._deliver(process, channel)

    def _do_hears_twice(self, slot: int) -> None:
        self.repeats -= 1
        process = self.own(slot)
        process.signal_in = (process.signal_in[0], *process.signal_in)
        process.hears(self)

    def _do_late(self, index: int, channel: int) -> None:
        ghost = self.ghosts[index] = self.ghosts[index].own(self)
        if len(ghost.task_out) + len(ghost.signal_out) == 1:
            self.ghosts.pop(index)
        self._deliver(ghost, channel)

    def _deliver(self, process: Process, channel: int) -> None:
        message = unpack(process.takes_out(channel))
        self.handle(
            ev.FromWorker(slot=process.slot, generation=process.generation, message=message)  # type: ignore[arg-type]
        )

    def _do_kill(self, slot: int) -> None:
        self.kills -= 1
        self._do_struck(slot)

    def _do_struck(self, slot: int) -> None:
        """Dead and reaped: what it had said is read first, as ``Processes._exited`` does."""
        process = self.own(slot)
        process.dies(-9)
        self.reap(process)

    def _do_kill_early(self, slot: int) -> None:
        self.kills -= 1
        self._do_struck_early(slot)

    def _do_struck_early(self, slot: int) -> None:
        """Its exit overtakes what it had said."""
        self.late -= 1
        process = self.own(slot)
        process.dies(-9)
        self.ghosts.append(process)
        self._exited(process)

    def reap(self, process: Process) -> None:
        """The last words, then the exit."""
        for channel in (TASK, SIGNAL):
            while (process.task_out, process.signal_out)[channel]:
                self._deliver(process, channel)
        self._exited(process)

    def _exited(self, process: Process) -> None:
        del self.processes[process.slot]
        self.handle(
            ev.WorkerExited(slot=process.slot, generation=process.generation,  # type: ignore[arg-type]
                            status=process.status, begun_epoch=process.begun)
        )  # fmt: skip

    def _do_daemon_ready(self) -> None:
        daemon = self.own_daemon()
        daemon.life = "up"
        daemon.say(DaemonReady(pid=1, arena_bytes=0, store_bytes=0, device="cpu"))

    def _do_daemon_copies(self) -> None:
        self.own_daemon().copy_group(self)

    def _do_daemon_works(self) -> None:
        self.own_daemon().work_lane(self)

    def _do_daemon_tells(self) -> None:
        daemon = self.own_daemon()
        message = unpack(daemon.out[0])
        daemon.out = daemon.out[1:]
        if type(message).__name__ == "DaemonFault":
            raise Violation(f"the memory daemon refuses an order: {message.reason}")
        self._from_daemon(message)

    def _do_daemon_tells_twice(self) -> None:
        self.repeats -= 1
        daemon = self.own_daemon()
        daemon.out = (daemon.out[0], *daemon.out)
        self._do_daemon_tells()

    def _do_daemon_hears_again(self) -> None:
        self.repeats -= 1
        daemon = self.own_daemon()
        daemon.takes(unpack(daemon.last_order[0]), self)

    def _from_daemon(self, message: Message) -> None:
        self.handle(ev.FromDaemon(generation=self._daemon_generation, message=message))

    @property
    def _daemon_generation(self) -> int:
        if self._starting:
            return self.scheduler.machine.device.state.daemon_generation
        return self.recall.moment.generations[0]

    def _do_kill_daemon(self) -> None:
        self.daemon_kills -= 1
        while self.daemon.out:
            self._do_daemon_tells()
        self.daemon = Daemon()
        self.handle(ev.DaemonExited(generation=self._daemon_generation, status=-9))

    # -- the scheduler -------------------------------------------------------------------------

    def handle(self, event: ev.Event, now_ms: float | None = None) -> None:
        """One event into the real scheduler, its commands into this world."""
        commands, broken, _ = self.recall.handle(event, now_ms)
        if self.tale is not None:
            self.tale += commands
        self._perform(commands)
        if broken is not None:
            raise broken
        while self._prepares:
            slot, generation, order = self._prepares.pop(0)
            prepared = ModelPrepared(model=order.model, digest=order.digest)
            self.handle(ev.FromWorker(slot=slot, generation=generation, message=prepared))  # type: ignore[arg-type]

    def _perform(self, commands: Any) -> None:
        for command in commands:
            match command:
                case ev.ToWorker():
                    self._to_worker(command)
                case ev.ToDaemon(message=message):
                    self._to_daemon(message)
                case ev.RaiseTurn(turn=turn):
                    self.arena.turn = turn
                case ev.Answer():
                    if not self._starting:
                        self.clients.answered(command)
                case ev.KillWorker(slot=slot, generation=generation):
                    self._kill_ordered(slot, generation)
                case ev.SpawnWorker(slot=slot, generation=generation):
                    require(slot not in self.processes, f"slot {slot} has two processes")
                    require(self.daemon.life == "up", "a worker without a memory daemon")
                    self.processes[slot] = Process(slot, generation)
                case ev.SpawnDaemon():
                    require(self.daemon.life == "none", "there are two memory daemons")
                    require(not self.processes, "workers outlive their memory daemon")
                    self.daemon = Daemon(life="booting")
                    self.arena.clear()
                case ev.CreateCommits():
                    self.commits.create()
                case ev.DropCommits():
                    self.commits.drop()
                case ev.Leave(reason=reason):
                    self._left(reason)
                case ev.StartBuild():
                    self._build(command)
                case _:
                    pass

    def _left(self, reason: str) -> None:
        """The server stops, and whatever still runs is killed."""
        require(reason == "drained" or self._is_grace_over, f"it leaves: {reason}")
        self.clients.leave()
        if reason == "drained":
            scripts = [p for p in self.processes.values() if p.job and p.phase != "over"]
            require(not scripts, "it left while a job was on a worker")
            is_copying = any(item[0] == "CommitCopy" for item in self.daemon.lane)
            require(not is_copying, "it left while a commit was copied")
            self.commits.require_on_disk()

    @property
    def _is_grace_over(self) -> bool:
        return self.clients.drained is not None and self.now_ms >= self.clients.drained[1]

    def _build(self, command: ev.StartBuild) -> None:
        """Part of the start: built and stored at once."""
        name = command.model
        program = program_of(f"d{name}", self.scope.model_bytes, groups=self.scope.groups)
        manifest = program.manifest
        done = BuildDone(model=name, epoch=command.epoch, digest=manifest.digest)
        self.handle(ev.FromBuilder(message=done, manifest=manifest))
        self.handle(ev.BuilderExited(model=name, epoch=command.epoch, status=0))

    def _kill_ordered(self, slot: int, generation: int) -> None:
        require(slot in self.processes, f"nobody is in slot {slot} to be killed")
        process = self.own(slot)
        require(process.generation == generation, "the wrong process is killed")
        process.is_doomed = True

    def _to_worker(self, command: ev.ToWorker) -> None:
        message = command.message
        require(command.slot in self.processes, f"slot {command.slot} is empty: {message}")
        process = self.own(command.slot)
        if isinstance(message, PrepareModel):
            self._prepares.append((process.slot, process.generation, message))
            return
        if isinstance(message, RunInference):
            self.arena.check_order(message)
            self.clients.check_dispatch(message)
        elif isinstance(message, LeaseGranted):
            self.arena.leased(process, message)
        if command.channel == "task":
            process.task_in += (pack(message),)
        else:
            process.signal_in += (pack(message),)

    def _to_daemon(self, message: Message) -> None:
        require(self.daemon.life == "up", f"no memory daemon for {message}")
        if isinstance(message, StoreModel):
            if self._starting:
                stored = ModelStored(model=message.model, epoch=message.epoch, load_ms=0.0)
                self._from_daemon(stored)
            return
        if isinstance(message, TransmitModel):
            self.arena.is_sent(message)
        elif isinstance(message, Scrub):
            self.arena.scrub_is_ordered(message)
        self.own_daemon().takes(message, self)

    # -- what holds in every state -------------------------------------------------------------

    def begins_a_step(self, process: Process) -> None:
        """Preemption: whoever was not told to stop while a request waits was forgotten."""
        is_told = bool(process.signal_in) or not self.recall.moment.has_upcoming
        require(
            is_told or process.is_doomed,
            "training begins a step while a request waits, and nobody has told it to stop",
        )

    def _check(self) -> None:
        computing = [p.slot for p in self.processes.values() if p.computes]
        if len(computing) > 1:
            raise Violation(f"workers {computing} compute at the same time (I5)")
        if self.commits.is_open and self.daemon.is_half:
            self.commits.last()

    def check_rest(self) -> None:
        """Nothing more can happen: all is answered, and nothing is held (I1, I3)."""
        if self.clients.has_left:
            return
        state = self.scheduler.machine.device.state
        still_open = sorted(self.clients.open)
        require(not still_open, f"never answered: tokens {still_open} (I1)")
        models = {model.owner for model in state.replicas.values()}
        owners = (
            {region.owner for region in self.scheduler.machine.device.arena.regions}
            - {WORDS}
            - models
        )
        require(not owners, f"at rest {sorted(owners)} hold device memory (I3)")
        kept = {region.owner for region in self.scheduler.machine.store.regions} - models
        require(not kept, f"at rest {sorted(kept)} hold the host store (I3)")
        require(state.training is None and state.current is None, "a task at rest")
        require(not self.commits.is_open, "a commit area is left over (I3)")
        alive = [w for w in state.workers.values() if w.is_alive]
        require(len(alive) > self.scope.standby, "a worker is missing at rest")


def _kept(process: Process) -> Kept:
    return process.kept or frozen_part(PROCESS.freeze, process)


__all__ = ["Violation", "World"]
