"""World around the real scheduler: it performs the scheduler's commands and sends it events."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec

from ...ipc.messages import daemon as daemon_msg
from ...ipc.messages.base import JobName, Message, Slot
from ...ipc.messages.builder import BuildDone
from ...ipc.messages.worker import LeaseGranted, PrepareModel, RunInference, RunJob, ShowSlice
from ...scheduler.scheduler import Scheduler
from ...scheduler.state import events as ev
from .clock import Act, Move
from .costs import Costs
from .device import (
    ZEROS,
    ByteSpan,
    SimulatedArea,
    SimulatedDevice,
    User,
    Violation,
    require,
    require_unused,
)
from .process import Choices, Faithful, Scene, SimulatedBuilder, SimulatedProcess
from .simulated_clients import SimulatedClients, SimulatedGenerations
from .simulated_daemon import SimulatedDaemon, slice_of
from .simulated_worker import SimulatedWorker

MOST_SLOTS = 64  # maximum number of slots of a device
TOLD = 200  # number of last events and commands in the note of a violation
SHOWN = 300  # maximum number of characters of an event or command in that note
INFORMING = (ev.Publish, ev.Spans, ev.Journal)


def key_of(device: int, slot: Slot) -> Slot:
    """Return a worker's key in ``workers``; on the first device it is the slot number."""
    return Slot(device * MOST_SLOTS + slot)


class SimulatedProcesses(ABC):
    """Live processes, the memory that they use, and messages of dead processes on their way.

    ``scene``, ``device`` and ``daemon`` belong to the first device; there may be more.
    """

    def __init__(self, scheduler: Scheduler, choices: Choices, costs: Costs) -> None:
        self.scheduler = scheduler
        self.scene = Scene(choices=choices, costs=costs)
        others = range(1, len(scheduler.machine.devices))
        self.scenes = [
            self.scene,
            *(replace(self.scene, device=SimulatedDevice(), index=index) for index in others),
        ]
        self.clock, self.device = self.scene.clock, self.scene.device
        self.daemons: dict[int, Any] = {}  # SimulatedDaemon of each device, or None
        self.workers: dict[Slot, SimulatedWorker] = {}  # ``key_of`` a worker -> worker
        self.dying: list[SimulatedWorker] = []  # killed, and replaced in their slots
        self.builders: list[SimulatedBuilder] = []
        self.ghosts: list[SimulatedProcess] = []  # reaped, with messages that have not arrived

    @abstractmethod
    def handle(self, event: ev.Event) -> None:
        """Pass a process's message or exit to the scheduler."""

    @property
    def daemon(self) -> Any:
        """Memory daemon of the first device; None if it has exited."""
        return self.daemons.get(0)

    @daemon.setter
    def daemon(self, daemon: Any) -> None:
        self.daemons[0] = daemon

    def new_worker(self, address: ev.Address) -> SimulatedWorker:
        """Start the process in a slot."""
        scene = self.scenes[address.device]
        return SimulatedWorker(address, scene, self.from_process, self.reap_worker)

    def new_daemon(self, address: ev.Address) -> SimulatedDaemon:
        scene = self.scenes[address.device]
        return SimulatedDaemon(address, scene, self.from_process, self.reap_daemon)

    def workers_of(self, index: int) -> list[SimulatedWorker]:
        """Return the processes in a device's slots."""
        return [worker for worker in self.workers.values() if worker.scene.index == index]

    def processes(self) -> Iterator[SimulatedProcess]:
        """Yield all processes that may still take a step or have messages on their way."""
        yield from list(self.workers.values())
        yield from list(self.dying)
        yield from self.ghosts
        yield from [daemon for daemon in self.daemons.values() if daemon is not None]
        yield from self.builders

    def require_one(self) -> None:
        """Check that at most one worker of each device computes."""
        computing = [worker for worker in self.workers.values() if worker.computes]
        devices = {worker.scene.index for worker in computing}
        names = [worker.name for worker in computing]
        require(len(computing) <= len(devices), f"{names} compute at the same time (I5)")

    def users(self, index: int) -> list[User]:
        """Return every range of a device that is read or written now, with its user."""
        users = [user for worker in self.workers_of(index) for user in worker.users()]
        daemon = self.daemons.get(index)
        return users + daemon.users() if daemon is not None else users

    def claims(self, index: int) -> list[User]:
        """Return the users, and every slice that the daemon still has to copy or zero."""
        daemon = self.daemons.get(index)
        return self.users(index) + (daemon.readers() if daemon is not None else [])

    def _to_daemon(self, message: Message, scene: Scene) -> None:
        daemon = self.daemons.get(scene.index)
        if daemon is None or not daemon.is_ready:
            raise Violation(f"{message} to a daemon not ready")
        match message:
            case daemon_msg.OpenCommits(job=job):
                require(job in self.scene.commits, "opened commits that do not exist")
            case daemon_msg.TransmitModel():
                fence_count = self.scheduler.core.settings.fence_count
                claims = self.claims(scene.index)
                scene.device.send(message, fence_count, claims)
            case daemon_msg.StoreModel(store_offset_bytes=start, size_bytes=size):
                image = ByteSpan(start, start + size)
                for other in self.daemons.values():
                    for span in other.stores if other is not None else ():
                        require(not image.overlaps(span), "two daemons write the host store (I4)")
            case daemon_msg.CancelTransmit(op_id=op_id):
                scene.device.cancelled |= {op_id}
            case daemon_msg.Scrub():
                require_unused(slice_of(message), "zeroing a slice", self.users(scene.index))
            case daemon_msg.CopySliceOut(job=job):
                require(job in self.scene.images, f"there is no image of {job}")
                self._take_slice(scene, slice_of(message))
            case daemon_msg.CopySliceIn(job=job):
                require(job in self.scene.images, f"there is no image of {job}")
                span = slice_of(message)
                scene.device.claim(span, f"the slice of {job}", self.claims(scene.index))
                scene.device.leave(span)
            case _:
                pass
        daemon.hear("control", message)

    def _take_slice(self, scene: Scene, span: ByteSpan) -> None:
        """Take a slice, which is to be copied out, from its process; the process may have died."""
        for worker in self.workers_of(scene.index):
            if worker.lease == span:
                uses = worker.runs and worker.script is not None and worker.script.hidden is None
                require(not uses, f"{worker.name} uses the slice that is copied out (I4)")
                worker.lease = None
                scene.device.leave(span)

    def reap_daemon(self, daemon: SimulatedDaemon) -> None:
        scene = daemon.scene
        self.daemons[scene.index] = None
        scene.device.dirty = ()  # the next daemon gets new memory
        for worker in self.workers_of(scene.index):
            if self.scene.choices.happens("takes_along", worker.name):
                worker.end(70)
        self._reaped(daemon)

    def _to_worker(self, command: ev.Send) -> None:
        device = command.target.device
        worker = self.workers.get(key_of(device, command.target.slot))
        if worker is None or worker.address != command.target:
            raise Violation(f"{command} to a process that is gone")
        message = command.message
        if isinstance(message, RunInference | PrepareModel | RunJob):
            is_code = isinstance(message, RunJob) or message.is_code
            fits = worker.runs_code in (None, is_code)
            is_sandboxed = self.scheduler.core.settings.is_sandboxed
            require(fits or not is_sandboxed, f"code and programs in {worker.name}")
            worker.runs_code = is_code
        match message:
            case RunInference():
                self._require_one_writer(message)
            case RunJob(job=job):
                names = [w.script.order.job for w in self.workers.values() if w.script is not None]
                require(job not in names, f"two processes of {job}")
            case LeaseGranted(offset_bytes=start, size_bytes=size):
                lease = ByteSpan(start, start + size)
                if worker.lease != lease:
                    claims = self.claims(device)
                    worker.scene.device.claim(lease, f"the slice of {worker.name}", claims)
                worker.lease = lease
            case ShowSlice(offset_bytes=start) if worker.script is not None:
                self._shows_slice(worker, start)
            case _:
                pass
        worker.hear(command.channel, command.message)

    def _shows_slice(self, worker: SimulatedWorker, start: int) -> None:
        """Give a slice that was copied in, or not copied out, to its process."""
        assert worker.script is not None
        hidden = worker.script.lease
        assert hidden is not None
        lease = ByteSpan(start, start + hidden.end - hidden.start)
        if worker.lease != lease:  # else it was not hidden yet
            require_unused(lease, f"the slice of {worker.name}", self.claims(worker.scene.index))
            worker.scene.device.take(lease)
        worker.lease = lease

    def _require_one_writer(self, order: RunInference) -> None:
        """Require that only one process at a time writes a reply."""
        written = _replies_of(order)
        for other in (*self.workers.values(), *self.dying):
            for one in other.orders if other.runs else ():
                both = written & _replies_of(one)
                require(not both, f"{other.name} may still write the reply of {sorted(both)} (I4)")

    def _replace(self, before: SimulatedWorker, worker: SimulatedWorker) -> None:
        """Replace an idle worker by a process that may run other programs or code."""
        is_idle = before.script is None and not before.orders and before.lease is None
        require(is_idle, f"{before.name} is replaced with a task in it")
        worker.is_replacement = True
        before.end(-9)
        self.dying.append(before)

    def from_process(self, process: SimulatedProcess, message: Message) -> None:
        self.handle(ev.Received(process.address, message))

    def reap_worker(self, worker: SimulatedWorker) -> None:
        """Remove a worker, and report its exit to the scheduler."""
        if worker in self.dying:
            self.dying.remove(worker)
        else:
            del self.workers[key_of(worker.scene.index, worker.slot)]
        scene = worker.scene
        if worker.lease is not None and self.daemons.get(scene.index) is not None:
            scene.device.leave(worker.lease)
        self._reaped(worker)

    def _reaped(self, process: SimulatedProcess) -> None:
        process.is_reaped = True
        self.ghosts = [ghost for ghost in self.ghosts if any(ghost.out.values())]
        if any(process.out.values()):
            self.ghosts.append(process)
        self.handle(ev.Exited(process.address, process.status or 0, process.begun))

    def _from_builder(self, builder: SimulatedBuilder, message: Message) -> None:
        if not isinstance(message, BuildDone):
            self.from_process(builder, message)
            return
        program = self.scene.programs[message.model]
        self.handle(ev.Received(builder.address, message, program.manifest, program.planned))

    def _reap_builder(self, builder: SimulatedBuilder) -> None:
        self.builders.remove(builder)
        self.handle(ev.Exited(builder.address, builder.status or 0))


class World(SimulatedProcesses):
    """World of one server; it starts the scheduler.

    Args:
        is_checked: call ``Scheduler.check`` after each event; it is slow.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        choices: Choices | None = None,
        costs: Costs | None = None,
        is_checked: bool = True,
    ) -> None:
        super().__init__(scheduler, choices or Faithful(), costs or Costs())
        self.clients = SimulatedClients(self.scene, self.handle)
        scheduler.core.kind = SimulatedGenerations()
        self.on_disk: dict[JobName, SimulatedArea] = {}  # commits of ended jobs
        self._asked_again: list[ev.JobRequest] = []  # requests to repeat, with a commit from disk
        self.slot_bytes: dict[JobName, int] = {}  # slot size of each job's newest commit area
        self.left: int | None = None  # exit status of the server; None: it runs
        self.story: deque[tuple[float, str, Any]] = deque(maxlen=TOLD)
        self._is_checked = is_checked
        self._touched: set[int] = set()  # devices whose processes may have new moves
        self.perform(scheduler.start(0.0))

    @property
    def now_ms(self) -> float:
        return self.clock.now_ms

    # -- by the clock --------------------------------------------------------------------------

    def run(self, until_ms: float = math.inf) -> None:
        """Run the clock's entries in order, up to the instant ``until_ms``."""
        clock, everywhere = self.clock, range(len(self.scenes))
        self._touched.update(everywhere)
        while self.left is None:
            for process in self.processes():
                if process.plans.device in self._touched:
                    clock.plan(process.plans, process.moves())
            self._touched.clear()
            due_ms, wake_ms = clock.next_ms(), self.scheduler.next_wakeup_ms()
            is_tick = wake_ms is not None and (due_ms is None or wake_ms < due_ms)
            next_ms = wake_ms if is_tick else due_ms
            if next_ms is None or next_ms > until_ms:
                break
            if is_tick:
                clock.now_ms = max(clock.now_ms, next_ms)
                self.handle(ev.Tick())
            else:
                act, plans = clock.take()
                self._touched.update(everywhere if plans is None else (plans.device,))
                self._do(act)
        if until_ms < math.inf:
            clock.now_ms = max(clock.now_ms, until_ms)

    # -- move by move --------------------------------------------------------------------------

    def moves(self) -> list[Move]:
        """Return every move of a process that may happen next."""
        if self.left is not None:
            return []
        return [move for process in self.processes() for move in process.moves()]

    def make(self, move: Move) -> None:
        """Execute a move now."""
        self._do(move.act)

    def pass_time(self, ms: float) -> None:
        self.clock.now_ms += ms
        self.handle(ev.Tick())

    def to_next_wakeup(self) -> bool:
        """Advance the clock to the scheduler's next wakeup. Return False if there is none."""
        due_ms = self.scheduler.next_wakeup_ms()
        if due_ms is None or self.left is not None:
            return False
        self.pass_time(max(0.0, due_ms - self.now_ms))
        return True

    # -- events in, commands out ---------------------------------------------------------------

    def handle(self, event: ev.Event) -> None:
        """Pass one event to the scheduler, and perform the resulting commands."""
        self.story.append((self.now_ms, ">", event))
        self._do(partial(self._handle, event))

    def _handle(self, event: ev.Event) -> None:
        self.perform(self.scheduler.handle(event, self.now_ms))
        if self._is_checked:
            self.scheduler.check()
        while self._asked_again:
            self._handle(self._asked_again.pop())

    def _do(self, act: Act) -> None:
        """Execute an act and check the turn (I5); an error gets a note with the last events."""
        try:
            act()
            self.require_one()
        except Exception as error:
            if not hasattr(error, "__notes__"):
                lines = [f"{at_ms:.0f} {way} {what}"[:SHOWN] for at_ms, way, what in self.story]
                error.add_note("\n".join(lines))
            raise

    def perform(self, commands: list[ev.Command]) -> None:
        """Perform commands like the controller's ``effects.py``."""
        for command in commands:
            if not isinstance(command, INFORMING):
                self.story.append((self.now_ms, "  <", command))
            self._perform(command)

    def _perform(self, command: ev.Command) -> None:
        commits = self.scene.commits
        target = getattr(command, "target", None)
        self._touched.add(target.device if target is not None else 0)
        match command:
            case ev.Reply():
                self.clients.answered(command)
            case ev.Send(ev.Address("daemon", index), message):
                # ``image_of`` names the job whose image is copied.
                if isinstance(message, daemon_msg.CopySliceOut | daemon_msg.CopySliceIn):
                    message = msgspec.structs.replace(message, job=command.image_of)
                self._to_daemon(message, self.scenes[index])
            case ev.Send(ev.Address("worker")):
                self._to_worker(command)
            case ev.RaiseTurn() | ev.Interrupt() | ev.TakeBack():
                self._write_word(command)
            case ev.Spawn(ev.Address("daemon", index) as target):
                require(self.daemons.get(index) is None, "there are two memory daemons")
                require(not self.workers_of(index), "workers outlive their memory daemon")
                self.scenes[index].device.clear()
                self.daemons[index] = self.new_daemon(target)
            case ev.Spawn(ev.Address("worker", index, slot) as target):
                daemon, key = self.daemons.get(index), key_of(index, slot)
                require(daemon is not None and daemon.is_ready, "no daemon yet")
                before = self.workers.get(key)
                self.workers[key] = self.new_worker(target)
                if before is not None:
                    self._replace(before, self.workers[key])
            case ev.Kill(ev.Address("worker", index, slot) as target):
                worker = self.workers[key_of(index, slot)]
                require(worker.address == target, "the wrong process is killed")
                worker.kill()
            case ev.StartBuild():
                require(not self.builders, "two builds at once")
                self.builders.append(
                    SimulatedBuilder(command, self.scene, self._from_builder, self._reap_builder)
                )
            case ev.Kill(ev.Address("builder") as target):
                for builder in self.builders:
                    if builder.address == target:
                        builder.end(-9)
            case ev.CreateCommits(job=job):
                commits[job] = self.on_disk[job] if command.is_on_disk else self.new_area(job)
                self.slot_bytes[job] = command.slot_bytes
            case ev.CreateImage(job=job) | ev.DropImage(job=job):
                self._keep_image(job, is_new=isinstance(command, ev.CreateImage))
            case ev.DropCommits(job=job):
                self.on_disk[job] = commits.pop(job)
            case ev.LoadCommits(request=request):
                loaded = ev.LoadedCommit(
                    self.slot_bytes[request.job], self.on_disk[request.job].step
                )
                again = msgspec.structs.replace(request, loaded=loaded)
                self._asked_again.append(again)
            case ev.Shutdown(status=status):
                require(self.left is None, "it leaves twice")
                self.left = status
            case _:
                pass

    def _keep_image(self, job: JobName, *, is_new: bool) -> None:
        images = self.scene.images
        require(is_new != (job in images), f"an image of {job} is created twice, or dropped twice")
        if is_new:
            images[job] = ZEROS
        else:
            del images[job]

    def _write_word(self, command: ev.RaiseTurn | ev.Interrupt | ev.TakeBack) -> None:
        """Write a word of the control page."""
        target = command.target
        device = self.scenes[target.device].device
        match command:
            case ev.RaiseTurn(turn=turn):
                device.turn = turn
            case ev.Interrupt(op_id=op_id):
                device.stop_words = {**device.stop_words, target.slot: op_id}
            case ev.TakeBack(op_id=op_id):
                worker = self.workers[key_of(target.device, target.slot)]
                require(worker.address == target, "a task of another process is taken back")
                worker.take_back(op_id)

    def new_area(self, job: JobName) -> SimulatedArea:
        """Return a new commit area for a job."""
        return SimulatedArea()


def _replies_of(order: RunInference) -> set[str]:
    return {run.request_id for run in order.runs}
