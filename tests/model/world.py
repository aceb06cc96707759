"""The world around the real scheduler: processes, memory, clients, faults; and what must hold."""

from __future__ import annotations

import marshal
from types import SimpleNamespace
from typing import Any

from pipeswitch.controller import events as ev
from pipeswitch.controller.core import SchedulerSettings
from pipeswitch.controller.scheduler import Scheduler
from pipeswitch.errors import RemoteProtocolError
from pipeswitch.messages import (
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

from .brain import Brain
from .channel import Data, pack, unpack
from .daemon import DAEMON, EMPTY_AREA, Area, Copy, Daemon
from .frozen import reader, renumbered
from .process import PROCESS, SIGNAL, TASK, Process
from .programs import manifest_of
from .scope import Scope
from .script import image_of

Action = tuple[Any, ...]
JOB = "job"
TRAIN, WAIT, PAUSE, RESUME = 101, 102, 103, 104  # tokens; requests have 1, 2, …
GRACE_MS = 30000.0  # one for all: a jump of the clock lets all of them run out
# Told twice it would copy a slice that its owner writes again: nothing in it tells a repetition
# from another commit of the same step. A socketpair repeats nothing; another transport might.
NEVER_TWICE = ("CommitStep",)
FAR_MS = 1e8  # no jump of the clock goes that far


class Violation(AssertionError):
    """An invariant does not hold."""


class World:
    """All of it in one state. ``freeze`` and ``thaw`` go from state to state."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.device: Any = SimpleNamespace(arena_bytes=scope.arena_bytes)
        self.area = Area()
        self.daemon = Daemon()
        self.processes: dict[int, Process] = {}
        self.ghosts: list[Process] = []  # reaped, and some of what they said is still on its way
        self.turn = 0  # the board's word
        self.words: dict[int, int] = {}
        self.contents: list[Copy] = []  # what was sent to the arena and not overwritten
        self.work: dict[int, tuple[int, int, int]] = {}  # slices that are not zeros, by offset
        self.has_commits = False
        self.open: set[int] = set()  # accepted, not answered
        self.asked = 0  # requests that were sent
        self.is_trained = False
        self.is_paused = False
        self.pauses = scope.pauses
        self.kills, self.daemon_kills = scope.kills, scope.daemon_kills
        self.suspicions, self.late, self.repeats = scope.suspicions, scope.late, scope.repeats
        self.tale: list[ev.Command] | None = None  # the scheduler's commands, for a story
        self._prepares: list[tuple[int, int, PrepareModel]] = []
        self._starting = True
        self._is_brain_new = True  # the scheduler was asked since the last thaw
        self._kept: tuple[Any, list[int]] | None = None
        self._thawed: Any = None
        self._rest_of_epochs: tuple[int, ...] = ()
        settings = SchedulerSettings(
            arena_bytes=scope.arena_bytes, store_bytes=scope.store_bytes, words=scope.words,
            standby=scope.standby, max_deaths=scope.max_deaths, persist_every_ms=1e9,
            training_cycle_ms=GRACE_MS, stop_grace_ms=GRACE_MS, evict_grace_ms=GRACE_MS,
        )  # fmt: skip
        self.scheduler = Scheduler(settings)
        self._start()
        self._starting = False
        self.brain = Brain(self.scheduler)
        if scope.is_coarse:
            self.apply(("train",))

    def _start(self) -> None:
        """Daemon and workers ready, the models registered: where every exploration begins."""
        self._perform(self.scheduler.start(0.0))
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

    def model_name(self, index: int) -> str:
        return "AB"[index % self.scope.models]

    def groups_of(self, model: str) -> int:
        return self.scope.groups

    # -- states --------------------------------------------------------------------------------

    def freeze(self) -> bytes:
        """This state, as bytes: equal bytes are equal states."""
        brain, epochs = self._frozen_brain()
        e = epochs.append
        processes = tuple([PROCESS.freeze(p, e) for _, p in sorted(self.processes.items())])
        ghosts = tuple([PROCESS.freeze(ghost, e) for ghost in self.ghosts])
        daemon = DAEMON.freeze(self.daemon, e)
        e(-self.turn)
        words = sorted(self.words.items())
        for _, epoch in words:
            e(epoch)
        contents = [(c.model, c.start, c.end, c.first_word, c.groups, c.done)
                    for c in self.contents]  # fmt: skip
        for copy in self.contents:
            e(copy.epoch)
        state = (
            brain, processes, ghosts, daemon, tuple([word for word, _ in words]), tuple(contents),
            tuple(sorted(self.work.items())), self.area.save() if self.has_commits else None,
            tuple(sorted(self.open)), self.asked, self.is_trained,
            self.is_paused, (self.pauses, self.kills, self.daemon_kills, self.suspicions,
            self.late, self.repeats), self._generations(),
        )  # fmt: skip
        # Version 2 writes no references, so the bytes depend on the values alone.
        return marshal.dumps((state, tuple(renumbered(epochs))), 2)

    def _frozen_brain(self) -> tuple[Any, list[int]]:
        """The scheduler's part, which is that of the state before when it was not asked."""
        if self._is_brain_new:
            epochs: list[int] = []
            return self.brain.freeze(epochs.append), epochs
        if self._kept is None:
            epochs = []
            self._kept = self.brain.freeze(epochs.append), epochs
        brain, epochs = self._kept
        return brain, epochs.copy()

    def _generations(self) -> tuple[Any, ...]:
        """Generations by slot, ranked among those that anything still names."""
        found = []
        for slot, worker in self.scheduler.core.workers.items():
            ghosts = [ghost.generation for ghost in self.ghosts if ghost.slot == slot]
            order = {g: i for i, g in enumerate(sorted({worker.generation, *ghosts}), start=1)}
            found.append((order[worker.generation], tuple([order[g] for g in ghosts])))
        return tuple(found)

    def thaw(self, frozen: Any) -> None:
        """Become the state ``marshal.loads`` gave."""
        state, epochs = frozen
        (brain, processes, ghosts, daemon, words, contents, work, area, still_open, self.asked,
         self.is_trained, self.is_paused, budgets, generations) = state  # fmt: skip
        (self.pauses, self.kills, self.daemon_kills, self.suspicions, self.late,
         self.repeats) = budgets  # fmt: skip
        if self._is_brain_new or frozen is not self._thawed:
            numbers = iter(epochs)
            last_epoch = max(epochs, default=0)
            self.brain.thaw(brain, numbers.__next__, last_epoch, [1, *[g for g, _ in generations]])
            self._rest_of_epochs = tuple(numbers)
            self._thawed, self._kept, self._is_brain_new = frozen, None, False
        n = reader(self._rest_of_epochs)
        self.processes = {t[0]: PROCESS.thaw(t, n) for t in processes}
        self.ghosts = [PROCESS.thaw(t, n) for t in ghosts]
        self._set_generations(generations)
        self.daemon = DAEMON.thaw(daemon, n)
        self.turn = n()
        self.words = {word: n() for word in words}
        self.contents = [
            Copy(model, n(), start, end, first, groups, done)  # type: ignore[arg-type]
            for model, start, end, first, groups, done in contents
        ]
        self.work = dict(work)
        self.has_commits = area is not None
        self.area.set(area or EMPTY_AREA)
        self.open = set(still_open)
        self._prepares = []

    def _set_generations(self, generations: Any) -> None:
        for slot, (current, older) in enumerate(generations):
            if slot in self.processes:
                self.processes[slot].generation = current
            ghosts = [ghost for ghost in self.ghosts if ghost.slot == slot]
            for ghost, generation in zip(ghosts, older, strict=True):
                ghost.generation = generation
        for process in self.processes.values():
            if process.gate is not None:
                process.hear_gate(self)

    # -- what can happen -----------------------------------------------------------------------

    def actions(self) -> list[Action]:
        """Everything that may happen next; the clock's jumps apart (``jumps``)."""
        found: list[Action] = []
        if not self.is_trained:
            found.append(("train",))
        if self.asked < self.scope.requests:
            found.append(("ask",))
        if self.is_paused:
            found.append(("resume",))
        elif self.pauses and WAIT in self.open:
            found.append(("pause",))
        for slot, process in sorted(self.processes.items()):
            if process.life == "booting":
                # Nobody sees whether it is up before it says so: first it gets ready, or dies.
                return [("ready", slot), *self._deaths(slot, process)]
            found += self._process_actions(slot, process)
        for index, ghost in enumerate(self.ghosts):
            if ghost.task_out:
                found.append(("late", index, TASK))
            if ghost.signal_out:
                found.append(("late", index, SIGNAL))
        return found + self._daemon_actions()

    def _process_actions(self, slot: int, process: Process) -> list[Action]:
        found = self._deaths(slot, process)
        if process.life == "up":
            if process.may_hear():
                found.append(("hears", slot))
            if process.may_move(self):
                found.append(("moves", slot))
        for channel, queue in ((TASK, process.task_out), (SIGNAL, process.signal_out)):
            if queue:
                found.append(("tells", slot, channel))
                if self.repeats and queue[0][0] not in NEVER_TWICE:
                    found.append(("tells_twice", slot, channel))
        return found

    def _deaths(self, slot: int, process: Process) -> list[Action]:
        """Death and reap are one: a process that is dead and not reaped does nothing that one
        which is merely slow would not do, and the scheduler cannot tell them apart.
        """
        has_words = self.late and bool(process.task_out or process.signal_out)
        if process.is_doomed:
            return [("struck", slot)] + ([("struck_early", slot)] if has_words else [])
        if self.kills and not (self.scope.is_coarse and process.is_idle):
            return [("kill", slot)] + ([("kill_early", slot)] if has_words else [])
        return []

    def _daemon_actions(self) -> list[Action]:
        daemon, found = self.daemon, []
        if daemon.life == "booting":
            found.append(("daemon_ready",))
        elif daemon.life == "up":
            if daemon.copies:
                found.append(("daemon_copies",))
            if daemon.lane:
                found.append(("daemon_works",))
        if daemon.life in ("booting", "up") and self.daemon_kills:
            found.append(("kill_daemon",))
        if daemon.out:
            found.append(("daemon_tells",))
        return found

    def jumps(self) -> list[Action]:
        """Instants at which the scheduler wants to look again."""
        core = self.scheduler.core
        return [("clock", due) for due in sorted(core.due_ms) if core.now_ms < due < FAR_MS]

    def apply(self, action: Action) -> bool:
        """Let it happen; False when nothing came of it. Raises Violation."""
        try:
            is_something = getattr(self, f"_do_{action[0]}")(*action[1:])
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
            is_quick = not self.scope.hears_late
            while is_quick and process.life == "up" and process.may_hear():
                process.hears(self)
        if self.daemon.life == "booting":
            self._do_daemon_ready()
        while self.daemon.is_half or (self.daemon.lane and self.daemon.lane[0][0] == "Scrub"):
            self._do_daemon_works()
        while self.daemon.out:
            self._do_daemon_tells()
            self._hurry()

    def _do_train(self) -> None:
        self.is_trained = True
        self.open |= {TRAIN, WAIT}
        self.handle(ev.TrainAsked(token=ev.Token(TRAIN), job=JOB, entry="", args=(), priority=1))  # type: ignore[arg-type]
        self.handle(ev.JobAsked(token=ev.Token(WAIT), job=JOB, action="wait"))  # type: ignore[arg-type]

    def _do_ask(self) -> None:
        model = self.model_name(self.asked)
        self.asked += 1
        self.open.add(self.asked)
        self.handle(
            ev.InferArrived(
                token=ev.Token(self.asked), request_id=f"r{self.asked}", model=ModelName(model),
                digest=f"d{model}", priority=1, deadline_at_ms=None, inputs=(),
                reply_offset_bytes=0, reply_bytes=0,
            )
        )  # fmt: skip

    def _do_pause(self) -> None:
        self.pauses, self.is_paused = self.pauses - 1, True
        self.open.add(PAUSE)
        self.handle(ev.JobAsked(token=ev.Token(PAUSE), job=JOB, action="pause"))  # type: ignore[arg-type]

    def _do_resume(self) -> None:
        self.is_paused = False
        self.open.add(RESUME)
        self.handle(ev.JobAsked(token=ev.Token(RESUME), job=JOB, action="resume"))  # type: ignore[arg-type]

    def _do_clock(self, due_ms: float) -> None:
        self.handle(ev.Tick(), due_ms)

    def _do_suspect(self, due_ms: float) -> bool:
        self.suspicions -= 1
        self._do_clock(due_ms)
        is_suspected = any(process.is_doomed for process in self.processes.values())
        return is_suspected or not self.scope.is_coarse

    def _do_ready(self, slot: int) -> None:
        process = self.processes[slot]
        process.life = "up"
        process.say(TASK, WorkerReady(slot=slot, pid=100))  # type: ignore[arg-type]

    def _do_hears(self, slot: int) -> None:
        self.processes[slot].hears(self)

    def _do_moves(self, slot: int) -> bool:
        return self.processes[slot].moves(self)

    def _do_tells(self, slot: int, channel: int) -> None:
        process = self.processes[slot]
        self._deliver(process, channel)
        while self.scope.is_coarse and (process.task_out, process.signal_out)[channel]:
            self._deliver(process, channel)

    def _do_tells_twice(self, slot: int, channel: int) -> None:
        self.repeats -= 1
        process = self.processes[slot]
        queue = process.task_out if channel == TASK else process.signal_out
        queue.insert(0, queue[0])
        self._deliver(process, channel)

    def _do_late(self, index: int, channel: int) -> None:
        ghost = self.ghosts[index]
        if len(ghost.task_out) + len(ghost.signal_out) == 1:
            self.ghosts.pop(index)
        self._deliver(ghost, channel)

    def _deliver(self, process: Process, channel: int) -> None:
        queue = process.task_out if channel == TASK else process.signal_out
        message = unpack(queue.pop(0))
        self.handle(
            ev.FromWorker(slot=process.slot, generation=process.generation, message=message)  # type: ignore[arg-type]
        )

    def _do_kill(self, slot: int) -> None:
        self.kills -= 1
        self._do_struck(slot)

    def _do_struck(self, slot: int) -> None:
        """Dead and reaped: what it had said is read first, as ``Processes._exited`` does."""
        process = self.processes[slot]
        process.dies(-9)
        self.reap(process)

    def _do_kill_early(self, slot: int) -> None:
        self.kills -= 1
        self._do_struck_early(slot)

    def _do_struck_early(self, slot: int) -> None:
        """Its exit overtakes what it had said."""
        self.late -= 1
        process = self.processes[slot]
        process.dies(-9)
        self.ghosts.append(process)
        self._exited(process)

    def reap(self, process: Process) -> None:
        """The last words, then the exit."""
        for channel, queue in ((TASK, process.task_out), (SIGNAL, process.signal_out)):
            while queue:
                self._deliver(process, channel)
        self._exited(process)

    def _exited(self, process: Process) -> None:
        del self.processes[process.slot]
        self.handle(
            ev.WorkerExited(slot=process.slot, generation=process.generation,  # type: ignore[arg-type]
                            status=process.status, begun_epoch=process.begun)
        )  # fmt: skip

    def _do_daemon_ready(self) -> None:
        self.daemon.life = "up"
        self.daemon.say(DaemonReady(pid=1, arena_bytes=0, store_bytes=0, device="cpu"))

    def _do_daemon_copies(self) -> None:
        self.daemon.copy_group(self)

    def _do_daemon_works(self) -> None:
        self.daemon.work_lane(self)

    def _do_daemon_tells(self) -> None:
        message = unpack(self.daemon.out.pop(0))
        if type(message).__name__ == "DaemonFault":
            raise Violation(f"the memory daemon refuses an order: {message.reason}")
        self._from_daemon(message)

    def _from_daemon(self, message: Message) -> None:
        generation = self.scheduler.core.daemon_generation
        self.handle(ev.FromDaemon(generation=generation, message=message))

    def _do_kill_daemon(self) -> None:
        self.daemon_kills -= 1
        while self.daemon.out:
            self._do_daemon_tells()
        self.daemon = Daemon()
        generation = self.scheduler.core.daemon_generation
        self.handle(ev.DaemonExited(generation=generation, status=-9))

    # -- the scheduler -------------------------------------------------------------------------

    def handle(self, event: ev.Event, now_ms: float | None = None) -> None:
        """One event into the real scheduler, its commands into this world."""
        scheduler = self.scheduler
        self._is_brain_new = True
        at_ms = scheduler.core.now_ms if now_ms is None else now_ms
        commands = scheduler.handle(event, at_ms)
        if self.tale is not None:
            self.tale += commands
        self._perform(commands)
        scheduler.check()
        while self._prepares:
            slot, generation, order = self._prepares.pop(0)
            prepared = ModelPrepared(model=order.model, digest=order.digest, prepare_ms=0.0)
            self.handle(ev.FromWorker(slot=slot, generation=generation, message=prepared))  # type: ignore[arg-type]

    def _perform(self, commands: list[ev.Command]) -> None:
        for command in commands:
            match command:
                case ev.ToWorker():
                    self._to_worker(command)
                case ev.ToDaemon(message=message):
                    self._to_daemon(message)
                case ev.RaiseTurn(turn=turn):
                    self.turn = turn
                case ev.Answer():
                    self._answered(command)
                case ev.KillWorker(slot=slot, generation=generation):
                    self._kill_ordered(slot, generation)
                case ev.SpawnWorker(slot=slot, generation=generation):
                    self._require(slot not in self.processes, f"slot {slot} has two processes")
                    self._require(self.daemon.life == "up", "a worker without a memory daemon")
                    self.processes[slot] = Process(slot, generation)
                case ev.SpawnDaemon():
                    self._require(self.daemon.life == "none", "there are two memory daemons")
                    self._require(not self.processes, "workers outlive their memory daemon")
                    self.daemon = Daemon(life="booting")
                    self.words, self.contents, self.work = {}, [], {}
                case ev.CreateCommits():
                    self.has_commits = True
                    self.area.set(EMPTY_AREA)
                case ev.DropCommits():
                    self._job_is_over()
                case ev.StartBuild():
                    self._build(command)
                case _:
                    pass

    def _require(self, is_so: bool, text: str) -> None:
        if not is_so:
            raise Violation(text)

    def _build(self, command: ev.StartBuild) -> None:
        """Part of the start: built and stored at once."""
        name = command.model
        manifest = manifest_of(f"d{name}", self.scope.model_bytes, self.scope.groups)
        done = BuildDone(model=name, epoch=command.epoch, digest=manifest.digest)
        self.handle(ev.FromBuilder(message=done, manifest=manifest))
        self.handle(ev.BuilderExited(model=name, epoch=command.epoch, status=0))

    def _kill_ordered(self, slot: int, generation: int) -> None:
        process = self.processes.get(slot)
        self._require(process is not None, f"nobody is in slot {slot} to be killed")
        assert process is not None
        self._require(process.generation == generation, "the wrong process is killed")
        process.is_doomed = True

    def _answered(self, answer: ev.Answer) -> None:
        token = int(answer.token)
        if self._starting or answer.more:
            return
        self._require(token in self.open, f"token {token} is answered twice (I1)")
        self.open.discard(token)
        if answer.error is not None:
            allowed = token in (PAUSE, RESUME)  # the job may be over by then
            self._require(allowed, f"token {token} is refused: {answer.error}")
        elif token < TRAIN:
            wanted: Any = (f"r{token}",)  # its name stands for its outputs
            self._require(answer.outputs == wanted, f"{wanted} is answered with {answer.outputs}")

    def _to_worker(self, command: ev.ToWorker) -> None:
        process = self.processes.get(command.slot)
        self._require(process is not None, f"slot {command.slot} is empty: {command.message}")
        assert process is not None
        message = command.message
        if isinstance(message, PrepareModel):
            self._prepares.append((process.slot, process.generation, message))
            return
        if isinstance(message, RunInference):
            self._check_order(message)
        elif isinstance(message, LeaseGranted):
            self._lease(process, message)
        queue = process.task_in if command.channel == "task" else process.signal_in
        queue.append(pack(message))

    def _to_daemon(self, message: Message) -> None:
        self._require(self.daemon.life == "up", f"no memory daemon for {message}")
        if isinstance(message, StoreModel):
            if self._starting:
                stored = ModelStored(model=message.model, epoch=message.epoch, load_ms=0.0)
                self._from_daemon(stored)
            return
        if isinstance(message, TransmitModel):
            start = message.arena_offset_bytes
            end = start + message.region_bytes
            self.claim(start, end, f"the copy of {message.model}")
            self.contents = [c for c in self.contents if c.end <= start or end <= c.start]
            first = message.groups[0].word
            self.contents.append(
                Copy(message.model, message.epoch, start, end, first, len(message.groups))
            )
        elif isinstance(message, Scrub):
            start = message.offset_bytes
            self.claim(start, start + message.size_bytes, "zeroing a slice", scrubs=True)
        self.daemon.takes(message, self)

    # -- memory --------------------------------------------------------------------------------

    def claim(self, start: int, end: int, who: str, *, scrubs: bool = False) -> None:
        """A range gets a new writer: nobody alive may still use it (invariant I4)."""
        for process in self.processes.values():
            if process.lease and _overlap(process.lease, start, end):
                raise Violation(f"{who} overlaps the slice of living worker {process.slot} (I4)")
            for order in process.readable_epochs:
                if order.arena_offset_bytes < end and start < (
                    order.arena_offset_bytes + self.scope.model_bytes
                ):
                    raise Violation(
                        f"{who} overwrites {order.model}, which worker {process.slot} reads (I4)"
                    )
        for copy in self.daemon.copies:
            if copy.start < end and start < copy.end:
                raise Violation(f"{who} overlaps the copy of {copy.model} under way (I4)")
        if scrubs:
            return
        for item in self.daemon.lane:
            order = unpack(item)
            offset = getattr(order, "slice_offset_bytes", getattr(order, "offset_bytes", 0))
            if _overlap((offset, self.scope.slice_bytes), start, end):
                raise Violation(f"{who} overlaps a {item[0]} that is not done (I4)")

    def _lease(self, process: Process, message: LeaseGranted) -> None:
        lease = (message.offset_bytes, message.size_bytes)
        if process.lease != lease:
            self.claim(lease[0], sum(lease), f"the slice of worker {process.slot}")
            process.lease = Data(lease)

    def _check_order(self, order: RunInference) -> None:
        held = [c for c in self.contents if c.model == order.model]
        is_right = any(
            (c.epoch, c.start, c.first_word)
            == (order.residency_epoch, order.arena_offset_bytes, order.first_word)
            for c in held
        )
        self._require(is_right, f"worker is sent to {order.model}, which does not lie there")

    def arrives(self, copy: Copy, group: int) -> None:
        """A group's bytes are in the arena, then its word."""
        for held in self.contents:
            if held.epoch == copy.epoch:
                held.done = group + 1
        self.words[copy.first_word + group] = copy.epoch

    def reads(self, process: Process, order: RunInference, group: int) -> None:
        """A worker computes with a group: it must be there."""
        is_there = any(
            held.model == order.model and held.epoch == order.residency_epoch and held.done > group
            for held in self.contents
        )
        self._require(
            is_there, f"worker {process.slot} computes with bytes that are not there (I4)"
        )

    def bytes_at(self, offset: int) -> tuple[int, int, int]:
        return self.work.get(offset, (0, 0, 0))

    def slice_of(self, process: Process) -> tuple[int, int, int]:
        return self.bytes_at(process.lease[0])

    def bind(self, process: Process) -> None:
        """The script takes its slice: zeros, then what it resumes from."""
        self._require(
            self.slice_of(process) == (0, 0, 0), "a slice holds its last owner's bytes (I4)"
        )
        if process.saved:
            self.write_slice(process, process.saved)

    def write_slice(self, process: Process, value: Any) -> None:
        self.work[process.lease[0]] = tuple(value)

    def scrubs(self, order: Scrub) -> None:
        self.claim(order.offset_bytes, order.offset_bytes + order.size_bytes, "zeroing a slice",
                   scrubs=True)  # fmt: skip
        self.work.pop(order.offset_bytes, None)

    def reads_slice(self, order: Any) -> None:
        """A commit copies a slice; what it finds there is checked when it is flipped."""

    # -- commits -------------------------------------------------------------------------------

    def last_commit(self) -> tuple[int, ...]:
        """The image a script resumes from; it must be whole, and no older than was said."""
        try:
            commit = self.area.newest()
        except RemoteProtocolError as error:
            raise Violation(f"no commit is whole (I2): {error}") from None
        promised = max(
            (job.committed_step for job in self.scheduler.core.jobs.values()), default=-1
        )
        if commit is None:
            self._require(promised < 0, f"the commit of step {promised} is lost (I2)")
            return ()
        image = tuple(self.area.image(commit))
        is_right = commit.step < 4 and image == image_of(commit.step)
        self._require(is_right, f"the commit of step {commit.step} holds {image} (I2)")
        self._require(commit.step >= promised, f"the commit of step {promised} is lost (I2)")
        return image

    def committed(self, order: Any) -> None:
        """A commit was flipped."""
        self._require(self.last_commit() != (), "a commit was flipped and is not there (I2)")

    def _job_is_over(self) -> None:
        self._require(
            self.last_commit() == image_of(self.scope.steps),
            "the job is over and its last step is not committed (I2)",
        )
        self.has_commits = False

    # -- what holds in every state -------------------------------------------------------------

    def begins_a_step(self, process: Process) -> None:
        """Preemption: whoever was not told to stop while a request waits was forgotten."""
        core = self.scheduler.core
        is_told = bool(process.signal_in) or core.upcoming is None
        self._require(
            is_told or process.is_doomed,
            "training begins a step while a request waits, and nobody has told it to stop",
        )

    def _check(self) -> None:
        computing = [p.slot for p in self.processes.values() if p.computes]
        if len(computing) > 1:
            raise Violation(f"workers {computing} compute at the same time (I5)")
        if self.has_commits and self.daemon.is_half:
            self.last_commit()

    def check_rest(self) -> None:
        """Nothing more can happen: all is answered, and nothing is held (I1, I3)."""
        core, memory = self.scheduler.core, self.scheduler.memory
        self._require(not self.open, f"never answered: tokens {sorted(self.open)} (I1)")
        owners = {region.owner for region in memory.arena} - {"#words"} - set(core.models)
        self._require(not owners, f"at rest {sorted(owners)} hold device memory (I3)")
        kept = {region.owner for region in memory.store} - set(core.models)
        self._require(not kept, f"at rest {sorted(kept)} hold the host store (I3)")
        self._require(core.training is None and core.current is None, "a task at rest")
        self._require(not self.has_commits, "a commit area is left over (I3)")
        alive = [w for w in core.workers.values() if w.is_alive]
        self._require(len(alive) > self.scope.standby, "a worker is missing at rest")


def _overlap(region: Any, start: int, end: int) -> bool:
    return bool(region[0] < end and start < region[0] + region[1])
