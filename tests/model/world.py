"""Simulated world that can be frozen and thawed, and that changes by one action at a time."""

from __future__ import annotations

import marshal
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from pipeswitch.extras.lab import world as simulator
from pipeswitch.extras.lab.device import ByteSpan, Violation, require
from pipeswitch.extras.lab.process import Chance, Scene, SimulatedProcess
from pipeswitch.extras.lab.programs import program_of, variant_of
from pipeswitch.extras.lab.world import MOST_SLOTS, key_of
from pipeswitch.ipc.messages.base import JobName, Message, ModelName, Slot
from pipeswitch.ipc.messages.daemon import Scrub, TransmitModel
from pipeswitch.ipc.messages.worker import ModelPrepared, PrepareModel, RunInference
from pipeswitch.programs.interface.layout import Batching
from pipeswitch.scheduler.memory.allocators import FENCES
from pipeswitch.scheduler.scheduler import Scheduler
from pipeswitch.scheduler.server.device import Device
from pipeswitch.scheduler.state import events as ev
from pipeswitch.scheduler.state.core import SchedulerSettings
from pipeswitch.scheduler.state.queue import Queue
from pipeswitch.scheduler.state.records import Job
from pipeswitch.scheduler.state.regions import Owner
from pipeswitch.scheduler.training.jobs import Jobs

from .brain import Equal, Known
from .choices import Action
from .clients import DEADLINE_MS, JOBS, Clients, Generations
from .commits import EMPTY, Area
from .daemon import OUT, TO_HOST, Daemon, freeze_daemon, thaw_daemon
from .device import freeze_device, thaw_device
from .frozen import Kept, frozen_part, reader, renumbered
from .recall import Recall
from .scope import CYCLE_MS, GRACE_MS, Scope
from .thawed import Thawed
from .worker import SIGNAL, TASK, Worker, freeze_worker, thaw_worker

NO_DAEMON: Final = frozen_part(freeze_daemon, None)
OF_CLIENTS: Final = frozenset(
    {
        "train",
        "ask",
        "pause",
        "resume",
        "cancel",
        "hint",
        "pin",
        "drain",
        "move",
        "room",
    }
)


class World(simulator.World):
    """The simulated world in its current state; ``thaw`` sets it to another state.

    States share objects of processes, so an action changes a copy (``own``, ``own_daemon``).
    An action names a worker by ``key_of``, and a daemon by its device.
    ``scheduler`` is the only scheduler object; ``recall`` has the scheduler's state.
    """

    clients: Clients
    workers: dict[Slot, Worker]  # type: ignore[assignment]

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.areas = {job: Area(self, job) for job in JOBS[: scope.jobs]}
        self.kills, self.daemon_kills = scope.kills, scope.daemon_kills
        self.suspicions, self.late, self.repeats = scope.suspicions, scope.late, scope.repeats
        self.cycles, self.slice_errors = scope.cycles, scope.slice_errors
        self._fails_slice = False
        self._prepares: list[tuple[Worker, PrepareModel]] = []
        # Frozen form -> thawed object, which states share.
        self.known_workers: dict[tuple[Kept, Slot, int], Worker] = {}
        self.known_daemons: dict[tuple[Kept, int], Daemon] = {}
        self._known_devices: dict[Kept, dict[str, Any]] = {}
        self._thawed: tuple[Any, Thawed] | None = None
        # For each device, the values of its memory, and their frozen form.
        self.kept_devices: list[tuple[dict[str, Any], Kept]] = [({}, (b"", ()))] * scope.devices
        settings = SchedulerSettings(
            arena_bytes=scope.arena_bytes,
            store_bytes=scope.store_bytes,
            fence_count=scope.fence_count,
            standby=scope.standby,
            max_deaths=scope.max_deaths,
            max_swapped=scope.max_swapped,
            slices_move=scope.slices_move,
            training_cycle_ms=CYCLE_MS if scope.cycles else GRACE_MS,
            stop_grace_ms=GRACE_MS,
            evict_grace_ms=GRACE_MS,
            max_compute_ms=0.0,
            max_daemon_restarts=scope.daemon_restarts,
            placement=scope.placement,
            training=scope.training,
        )
        each = [replace(settings, device=f"cpu:{index}") for index in range(scope.devices)]
        scheduler = Scheduler(settings, devices=each)
        for device in scheduler.machine.devices:
            state = device.state
            state.predictions, state.accounts = Known(), Equal(bool(scope.callers))
            state.queue = Queue(scheduler.core.judge, state.accounts)
        _leave_the_disk_out(scheduler.machine.jobs)
        self.recall = Recall(scheduler)
        super().__init__(scheduler, choices=self)
        self.clients = Clients(self)
        scheduler.core.kind = Generations()
        self._start()
        self.recall.learn()
        if scope.is_coarse and scope.has_job:
            self.apply(("train",))

    def _start(self) -> None:
        """Go to the first state: daemons and workers are ready, and the models are registered."""
        self._rest()
        batching = Batching(limit=self.scope.batch, delay_ms=DEADLINE_MS, is_exact=True)
        for index in range(self.scope.models):
            name = self.model_name(index)
            size_bytes, groups = self.scope.size_of(name)
            program = program_of(
                f"d{name}",
                size_bytes,
                groups=groups,
                batching=batching if self.scope.batch else None,
            )
            if self.scope.are_variants:
                last = len(program.manifest.tensors) - 1
                program = variant_of(program, name, (last,))
            self.clients.register(name, program, devices=self._allowed(name))
            self._rest()

    def _allowed(self, model: str) -> tuple[str, ...]:
        """Return the devices that may serve a model; empty if all devices may."""
        return (f"cpu:{self.scope.devices - 1}",) if model in self.scope.limited else ()

    def _rest(self) -> None:
        while moves := self.moves():
            self.make(moves[0])

    def model_name(self, index: int) -> ModelName:
        return ModelName("ABC"[index % self.scope.models])

    def happens(self, what: Chance, name: str) -> bool:
        """Decide about events that are neither actions nor the scope's faults (see ``Choices``)."""
        match what:
            case "commit":
                scripts = [w.script for w in self.workers.values() if w.script is not None]
                (script,) = [one for one in scripts if one.order.job == name]
                return script.step in self.scope.commit_steps
            case "slice_error":
                is_so, self._fails_slice = self._fails_slice, False
                return is_so
            case "holds":
                return self.scope.holds
            case _:
                return what == "unclean"

    # -- the world's parts ---------------------------------------------------------------------

    def new_worker(self, address: ev.Address) -> Worker:
        scene = self.scenes[address.device]
        worker = Worker(address, scene, self.from_process, self.reap_worker)
        worker.is_coarse = self.scope.is_coarse
        return worker

    def new_daemon(self, address: ev.Address) -> Daemon:
        scene = self.scenes[address.device]
        return Daemon(self, address, scene, self.from_process, self.reap_daemon)

    def new_area(self, job: JobName) -> Area:
        self.areas[job].thaw(EMPTY, -1)
        return self.areas[job]

    # -- states --------------------------------------------------------------------------------

    def freeze(self) -> bytes:
        """Return this state as bytes; equal bytes mean equal states."""
        slots = sorted(self.workers)
        parts = [
            self.recall.moment.kept,
            *[_kept(self.workers[slot]) for slot in slots],
            *map(_kept, self.ghosts),
            *[_kept_daemon(self.daemons[scene.index]) for scene in self.scenes],
            *[self._frozen_device(scene) for scene in self.scenes],
        ]
        epochs: list[int] = []
        for _, its_epochs in parts:
            epochs += its_epochs
        rest = (
            tuple(slots),
            tuple(map(_key, self.ghosts)),
            tuple(
                [
                    area.freeze() if job in self.scene.commits else None
                    for job, area in self.areas.items()
                ]
            ),
            tuple(sorted((job, tuple(image)) for job, image in self.scene.images.items())),
            self.clients.freeze(),
            self.left,
            (
                self.kills,
                self.daemon_kills,
                self.suspicions,
                self.late,
                self.repeats,
                self.cycles,
                self.slice_errors,
            ),
            self._generations(),
        )
        state = (
            tuple([frozen for frozen, _ in parts]),
            tuple([len(e) for _, e in parts]),
            rest,
            renumbered(tuple(epochs)),
        )
        return marshal.dumps(state, 2)

    def _frozen_device(self, scene: Scene) -> Kept:
        """Return the frozen form of a device's memory, which most actions do not change."""
        before, packed = self.kept_devices[scene.index]
        return packed if vars(scene.device) == before else frozen_part(freeze_device, scene.device)

    def _generations(self) -> tuple[Any, ...]:
        """Return incarnations by device and slot, as ranks among those of live and dead workers."""
        return tuple(
            [
                tuple(
                    [
                        self._ranked(incarnation, key_of(index, Slot(slot)))
                        for slot, incarnation in enumerate(incarnations[1:])
                    ]
                )
                for index, incarnations in enumerate(self.recall.moment.incarnations)
            ]
        )

    def _ranked(self, incarnation: int, key: Slot) -> tuple[int, tuple[int, ...]]:
        ghosts = [ghost.address.incarnation for ghost in self.ghosts if _key(ghost) == key]
        order = {g: i for i, g in enumerate(sorted({incarnation, *ghosts}), start=1)}
        return order[incarnation], tuple([order[g] for g in ghosts])

    def thaw(self, frozen: Any) -> None:
        """Set the world to a state from ``marshal.loads``. Setting the current one is cheap."""
        if self._thawed is None or frozen is not self._thawed[0]:
            self._thawed = frozen, Thawed(self, frozen)
        self._thawed[1].becomes(self)
        self._prepares = []

    def worker_of(self, packed: Kept, key: Slot, incarnation: int) -> Worker:
        """Return the worker that has this frozen form."""
        worker = self.known_workers.get((packed, key, incarnation))
        if worker is None:
            index, slot = divmod(key, MOST_SLOTS)
            worker = self.new_worker(ev.Address("worker", index, Slot(slot), incarnation))
            thaw_worker(marshal.loads(packed[0]), reader(packed[1]), worker)
            worker.kept = packed
            self.known_workers[packed, key, incarnation] = worker
        return worker

    def daemon_of(self, packed: Kept, index: int) -> Daemon | None:
        """Return the device's memory daemon with this frozen form; None if it is dead."""
        if packed == NO_DAEMON:
            return None
        daemon = self.known_daemons.get((packed, index))
        if daemon is None:
            daemon = self.new_daemon(ev.Address("daemon", index, incarnation=1))
            thaw_daemon(marshal.loads(packed[0]), reader(packed[1]), daemon)
            daemon.kept = packed
            self.known_daemons[packed, index] = daemon
        return daemon

    def device_of(self, packed: Kept) -> dict[str, Any]:
        """Return the values of a device's memory from its frozen form."""
        fields = self._known_devices.get(packed)
        if fields is None:
            fields = vars(thaw_device(marshal.loads(packed[0]), reader(packed[1])))
            self._known_devices[packed] = fields
        return fields

    # -- copies that may be changed ------------------------------------------------------------

    def own(self, key: Slot) -> Worker:
        """Return the worker in a slot for changes; if states share it, a copy replaces it here."""
        worker = self.workers[key]
        if worker.kept is not None:
            worker = self.workers[key] = worker.own()
        return worker

    def own_daemon(self, index: int = 0) -> Daemon:
        """Return a device's memory daemon for changes; if states share it, a copy replaces it."""
        daemon: Daemon = self.daemons[index]
        if daemon.kept is not None:
            daemon = self.daemons[index] = daemon.own()
        return daemon

    # -- moves ---------------------------------------------------------------------------------

    def apply(self, action: Action) -> bool:
        """Perform an action; return False if it had no effect. Raise Violation for a defect."""
        try:
            kind, *rest = action
            act: Callable[..., Any]
            act = getattr(self.clients if kind in OF_CLIENTS else self, f"do_{kind}")
            is_something = act(*rest)
        except (Violation, KeyboardInterrupt):
            raise
        except Exception as error:
            raise Violation(f"{type(error).__name__}: {error}") from error
        if self.scope.is_coarse:
            self._hurry()
        self._check()
        return is_something is not False

    def _check(self) -> None:
        self.require_one()
        halves = [daemon for daemon in self.daemons.values() if daemon and daemon.parts_done]
        for job, area in self.areas.items():
            if halves and job in self.scene.commits:
                area.last()

    def _hurry(self) -> None:
        """Make every move that happens at once in a coarse scope."""
        for slot, worker in list(self.workers.items()):
            if not worker.is_ready:
                self.do_ready(slot)
                self.do_tells(slot, TASK)
            if not self.scope.hears_late:
                while slot in self.workers and self.workers[slot].may_hear:
                    self.do_hears(slot)
        for index in range(self.scope.devices):
            self._hurry_daemon(index)

    def _hurry_daemon(self, index: int) -> None:
        daemons = self.daemons
        if daemons[index] and not daemons[index].is_ready:
            self.do_daemon_ready(index)
        while daemons[index] and (daemons[index].parts_done or self._is_scrubbing(daemons[index])):
            self.do_daemon_works(index)
        while daemons[index] and daemons[index].out.get(OUT):
            self.do_daemon_tells(index)
            self._hurry()

    @staticmethod
    def _is_scrubbing(daemon: Daemon) -> bool:
        thread = daemon._queues.get(TO_HOST)
        return bool(thread) and isinstance(thread[0], Scrub)

    def do_clock(self, due_ms: float) -> None:
        self.clock.now_ms = due_ms
        self.handle(ev.Tick())

    do_passes = do_clock

    def do_suspect(self, due_ms: float) -> bool:
        self.suspicions -= 1
        self.do_clock(due_ms)
        is_suspected = any(worker.is_doomed for worker in self.workers.values())
        return is_suspected or not self.scope.is_coarse

    def do_cycle(self, due_ms: float) -> None:
        self.cycles -= 1
        self.do_clock(due_ms)

    def do_ready(self, slot: Slot) -> None:
        (move,) = self.own(slot).steps()
        move.act()

    def do_hears(self, slot: Slot) -> None:
        worker = self.own(slot)
        (move,) = worker._reads(SIGNAL, worker._hears)
        move.act()

    def do_moves(self, slot: Slot) -> None:
        worker = self.own(slot)
        move = worker.main_move()
        assert move is not None
        move.act()
        if move.what == "takes" and worker.script is not None and worker.script.computes:
            self._begins_a_step(worker)
        worker.settle()
        if not worker.runs:
            self._reap(worker)

    def do_tells(self, slot: Slot, channel: str) -> None:
        queue = self.own(slot).out[channel]
        self._hear(self.workers[slot], channel)
        while self.scope.is_coarse and queue:
            self._hear(self.workers[slot], channel)

    def do_tells_twice(self, slot: Slot, channel: str) -> None:
        self.repeats -= 1
        worker = self.own(slot)
        worker.out[channel].appendleft(worker.out[channel][0])
        self._hear(worker, channel)

    def do_hears_twice(self, slot: Slot) -> None:
        self.repeats -= 1
        worker = self.own(slot)
        worker.inbox[SIGNAL].appendleft(worker.inbox[SIGNAL][0])
        self.do_hears(slot)

    def do_late(self, index: int, channel: str) -> None:
        ghost = self.ghosts[index] = self.ghosts[index].own()  # type: ignore[attr-defined]
        message = ghost.out[channel].popleft()
        if not any(ghost.out.values()):
            self.ghosts.pop(index)
        self.from_process(ghost, message)

    def _hear(self, process: SimulatedProcess, channel: str) -> None:
        process._arrives(process.out[channel])

    def do_kill(self, slot: Slot) -> None:
        self.kills -= 1
        self.do_struck(slot)

    def do_struck(self, slot: Slot) -> None:
        """End and reap a worker after its messages were read, like ``Processes._exited``."""
        worker = self.own(slot)
        worker.end(-9)
        self._reap(worker)

    def do_kill_early(self, slot: Slot) -> None:
        self.kills -= 1
        self.do_struck_early(slot)

    def do_struck_early(self, slot: Slot) -> None:
        """End and reap a worker; its last messages are read only later."""
        self.late -= 1
        worker = self.own(slot)
        worker.end(-9)
        self.reap_worker(worker)

    def _reap(self, worker: Worker) -> None:
        """Deliver a worker's last messages, then its exit."""
        for channel in (TASK, SIGNAL):
            while worker.out.get(channel):
                self._hear(worker, channel)
        self.reap_worker(worker)

    def do_daemon_ready(self, index: int = 0) -> None:
        (move,) = self.own_daemon(index).steps()
        move.act()

    def do_daemon_copies(self, index: int = 0) -> None:
        self.own_daemon(index).work("copy")

    def do_daemon_works(self, index: int = 0) -> None:
        self.own_daemon(index).work(TO_HOST)

    def do_daemon_fails_slice(self, index: int = 0) -> None:
        self.slice_errors -= 1
        self._fails_slice = True
        while self._fails_slice:  # a copy in fails in its second half
            self.do_daemon_works(index)

    def do_daemon_tells(self, index: int = 0) -> None:
        self._hear(self.own_daemon(index), OUT)

    def do_daemon_tells_twice(self, index: int = 0) -> None:
        self.repeats -= 1
        daemon = self.own_daemon(index)
        daemon.out[OUT].appendleft(daemon.out[OUT][0])
        self.do_daemon_tells(index)

    def do_daemon_hears_again(self, index: int = 0) -> None:
        self.repeats -= 1
        daemon = self.own_daemon(index)
        assert daemon.last_order is not None
        daemon.hear("control", daemon.last_order)

    def do_kill_daemon(self, index: int = 0) -> None:
        self.daemon_kills -= 1
        daemon = self.own_daemon(index)
        daemon.end(-9)
        while daemon.out.get(OUT):
            self._hear(daemon, OUT)
        self.reap_daemon(daemon)

    # -- the scheduler -------------------------------------------------------------------------

    def handle(self, event: ev.Event) -> None:
        self._handle(event)

    def perform(self, commands: list[ev.Command]) -> None:
        self._dispatched = {
            command.message.model
            for command in commands
            if isinstance(command, ev.Send) and isinstance(command.message, RunInference)
        }
        if self.recall.is_live:  # a story records all commands
            super().perform(commands)
            return
        for command in commands:
            self._perform(command)

    def _handle(self, event: ev.Event) -> None:
        commands, broken, _ = self.recall.handle(event, self.now_ms)
        self.perform(list(commands))
        if broken is not None:
            raise broken
        while self._prepares:
            worker, order = self._prepares.pop(0)
            self.from_process(worker, ModelPrepared(model=order.model, digest=order.digest))

    def _perform(self, command: ev.Command) -> None:
        match command:
            case ev.Send() | ev.Reply() | ev.RaiseTurn():
                pass
            case ev.Kill(ev.Address("worker", index, slot)) if key_of(index, slot) in self.workers:
                self.own(key_of(index, slot))
            case ev.TakeBack(target):
                worker = self.own(key_of(target.device, target.slot))
                super()._perform(command)
                worker.settle()
                self.clients.taken_back()
                return
            case ev.Spawn(ev.Address("worker", index, slot)):
                is_free = key_of(index, slot) not in self.workers
                require(is_free, f"slot {slot} has two processes")
            case ev.DropCommits(job=job):
                is_last = self.areas[job].step == self.scope.steps
                require(is_last, "the job is over and its last step is not committed (I2)")
            case ev.Shutdown(reason=reason):
                self._leaves(reason)
            case _:
                pass
        super()._perform(command)

    def _to_worker(self, command: ev.Send) -> None:
        index = command.target.device
        key = key_of(index, command.target.slot)
        if key in self.workers:
            worker, message = self.own(key), command.message
            if isinstance(message, PrepareModel):  # preparing a model takes no time here
                self._prepares.append((worker, message))
                return
            if isinstance(message, RunInference):
                self.clients.check_dispatch(message)
                allowed, device = self._allowed(message.model), f"cpu:{index}"
                require(device in (allowed or device), f"{message.model} is not for {device}")
        super()._to_worker(command)

    def _take_slice(self, scene: Scene, span: ByteSpan) -> None:
        for key, worker in list(self.workers.items()):
            if worker.scene is scene and worker.lease == span:
                self.own(key)
        super()._take_slice(scene, span)

    def _to_daemon(self, message: Message, scene: Scene) -> None:
        if self.daemons[scene.index] is not None:
            self.own_daemon(scene.index)
        before = scene.device.contents
        super()._to_daemon(message, scene)
        # With several devices, the request may wait for its model on another device.
        is_ahead = isinstance(message, TransmitModel) and message.model not in self._dispatched
        if is_ahead and self.scope.devices == 1:
            for name in before.keys() - scene.device.contents.keys():
                is_wanted = self.clients.waits_for(name)
                require(not is_wanted, f"{name} is waited for, and {message.model} sent ahead")

    def _leaves(self, reason: str) -> None:
        """Check that the server may stop now; a stop kills all its processes."""
        drained = self.clients.drained
        is_grace_over = drained is not None and self.now_ms >= drained[1]
        require(reason == "drained" or is_grace_over, f"it leaves: {reason}")
        self.clients.leave()
        if reason == "drained":
            scripts = [w for w in self.workers.values() if w.script and w.script.phase != "over"]
            require(not scripts, "it left while a job was on a worker")
            readers = [
                one for daemon in self.daemons.values() if daemon for one in daemon.readers()
            ]
            require(
                not any("CommitCopy" in who for who, _ in readers),
                "it left while a commit was copied",
            )
            for job, area in self.areas.items():
                if job in self.scene.commits:
                    area.require_on_disk()

    # -- checks in every state -----------------------------------------------------------------

    def _begins_a_step(self, worker: Worker) -> None:
        """Check that a job that begins a step while a request waits has got a stop signal."""
        has_upcoming = self.recall.moment.seen.has_upcoming[worker.scene.index]
        is_told = bool(worker.inbox.get(SIGNAL)) or not has_upcoming
        require(
            is_told or worker.is_doomed,
            "training begins a step while a request waits, and was not told to stop",
        )

    def check_rest(self) -> None:
        """Check a state of rest: all tokens are answered, and no memory is leased (I1, I3)."""
        if self.left is not None:
            return
        machine = self.recall.scheduler.machine
        still_open = sorted(self.clients.open)
        require(not still_open, f"never answered: tokens {still_open} (I1)")
        models = {model.owner for model in machine.devices[0].state.replicas.values()}
        owners = {region.owner for region in machine.store.regions} - models
        require(not owners, f"at rest {sorted(owners)} hold the host store (I3)")
        require(not self.scene.commits, "a commit area is left over (I3)")
        is_free = not self.scene.images and not machine.store.images
        require(is_free, "an image of a slice is left over (I3)")
        for device in machine.devices:
            self._check_rest_of(device, models)

    def _check_rest_of(self, device: Device, models: set[Owner]) -> None:
        state = device.state
        owners = {region.owner for region in device.arena.regions} - {FENCES} - models
        require(not owners, f"at rest {sorted(owners)} hold device memory (I3)")
        require(state.owner.job is None and state.owner.running is None, "a task at rest")
        alive = [w for w in state.workers.values() if w.is_alive]
        is_missing = len(alive) <= self.scope.standby and not state.daemon.is_given_up
        require(not is_missing, "a worker is missing at rest")


def _key(ghost: Any) -> Slot:
    return key_of(ghost.scene.index, ghost.slot)


def _kept(worker: Any) -> Kept:
    return worker.kept or frozen_part(freeze_worker, worker)


def _kept_daemon(daemon: Daemon | None) -> Kept:
    return (daemon and daemon.kept) or frozen_part(freeze_daemon, daemon)


__all__ = ["Violation", "World"]


def _leave_the_disk_out(jobs: Jobs) -> None:
    """Disable the periodic writes of commits to disk. A write would be possible at any moment, and
    would double the number of states."""
    adopt = jobs.adopt

    def adopted(*args: Any, **options: Any) -> Job:
        job = adopt(*args, **options)
        job.memory.persist_due_at_ms = math.inf
        return job

    jobs.adopt = adopted  # type: ignore[method-assign]
