"""Fuzz target: messages from malicious workers and builders to the real scheduler.

An input consists of frames. The low two bits of a frame's first byte choose a worker's slot (3
means a worker that has a job or a request). The other bits choose the sender:

* a malicious worker: the rest of the frame is its message. Operation ids and turns of 0 are
  replaced by the slot's current ones, so that the scheduler does not drop the message as late;
* an honest worker: it executes its orders;
* a malicious builder; a client; the clock; the death of a worker.

All other processes are honest and answer at once (``pipeswitch/simulator``), and a killed worker
dies at once. After each frame the invariants are checked. Each command of the scheduler is encoded,
as when it is sent to another process.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable
from typing import Any, Final

import msgspec

from pipeswitch.base.errors import RemoteProtocolError
from pipeswitch.extras.lab.clock import Move
from pipeswitch.extras.lab.costs import Training
from pipeswitch.extras.lab.programs import SimulatedProgram
from pipeswitch.extras.lab.simulated_worker import SimulatedWorker
from pipeswitch.extras.lab.world import World
from pipeswitch.frontend.transport.replies import output_outside, reply_frames
from pipeswitch.ipc.channel import decode_message, encode_message
from pipeswitch.ipc.messages import worker as worker_msg
from pipeswitch.ipc.messages.base import (
    ByteRange,
    JobName,
    Message,
    ModelName,
    OpId,
    Ping,
    Pong,
    SlabTensor,
    Slot,
    Turn,
)
from pipeswitch.ipc.messages.builder import BuildDone, BuildFailed, BuildProgress
from pipeswitch.ipc.messages.run import Run
from pipeswitch.scheduler.scheduler import Scheduler
from pipeswitch.scheduler.state import events as ev
from pipeswitch.scheduler.state.core import SchedulerSettings
from pipeswitch.scheduler.timeline import Timeline
from pipeswitch.wire.frames import pack_dict
from tests.unit.arrivals import done_of, parked_of

from .target import TAGGED_FRAMES, Target, join_frames, split_frames
from .worlds import manifest_of

MIB = 1 << 20
MODELS = (ModelName("m"), ModelName("n"))
JOBS = (JobName("j"), JobName("k"))
SLOT_BITS: Final = 2  # low bits of a frame's first byte; the other bits are a ``Who``
BUSY: Final = 3
MAX_STEPS = 400  # limit of consecutive steps of honest processes, within which they must rest


class Who(enum.IntEnum):
    """Sender of a frame."""

    HOSTILE = 0
    HONEST = 1
    BUILDER = 2
    CLIENT = 3
    CLOCK = 4
    DEATH = 5


class Told(SimulatedWorker):
    """Worker that only collects its orders; an input's frames are its messages."""

    told: list[Message]  # orders that the worker has not executed yet, oldest first

    def hear(self, channel: str, message: Message) -> None:
        self.told.append(message)

    def steps(self) -> list[Move]:
        return [] if self.is_ready else super().steps()


class Stage(World):
    """Server with two models and two jobs, in which only workers and builders may be malicious."""

    def __init__(self) -> None:
        settings = SchedulerSettings(
            arena_bytes=64 * MIB,
            store_bytes=64 * MIB,
            fence_count=64,
            standby=1,
            max_queue=4,
            restart_backoff_ms=100.0,
        )
        super().__init__(Scheduler(settings, "priority", 2000.0), is_checked=False)
        self.state = self.scheduler.machine.devices[0].state
        self._rest()
        for model in MODELS:
            manifest = manifest_of(digest=model * 64, total_bytes=3 * MIB)
            program = SimulatedProgram(manifest=manifest, plan=(0, 1), layer_ms=(1.0,) * 3)
            self.clients.register(model, program)
            self._rest()
        for job in JOBS:
            self.scene.scripts[job] = Training(steps=4, slice_bytes=MIB, state_bytes=MIB)

    def new_worker(self, address: ev.Address) -> Told:
        worker = Told(address, self.scenes[address.device], self.from_process, self.reap_worker)
        worker.told = []
        return worker

    # -- events in, commands out --------------------------------------------------------------

    def hear(self, event: ev.Event) -> None:
        """Handle an event, then make all moves of honest processes that result from it."""
        self.handle(event)
        self._rest()
        self.scheduler.check()

    def _rest(self) -> None:
        for _ in range(MAX_STEPS):
            move = next((move for process in self.processes() for move in process.moves()), None)
            if move is None or self.left is not None:
                return
            self.make(move)
        raise AssertionError("the server does not come to rest")

    def perform(self, commands: list[ev.Command]) -> None:
        for command in commands:
            _encode(command)
        super().perform(commands)

    def honest(self, slot: Slot) -> None:
        """Execute a worker's orders, and the orders that result from its answers."""
        for _ in range(MAX_STEPS):
            process = self.workers.get(slot)
            if not isinstance(process, Told) or not process.told:
                return
            has_job = self.state.workers[slot].job is not None
            for message in _obedience(process.told.pop(0), has_job):
                self.from_worker(slot, message)
        raise AssertionError("a worker does not come to rest")

    def from_worker(self, slot: Slot, message: Message) -> None:
        worker = self.state.workers.get(slot)
        incarnation = worker.incarnation if worker is not None else 1
        self.hear(ev.Received(ev.Address("worker", 0, slot, incarnation), message))

    # -- the frames of an input ---------------------------------------------------------------

    def take(self, frame: bytes) -> None:
        who, slot, rest = frame[0] >> SLOT_BITS, self._slot(frame[0] & BUSY), frame[1:]
        match who:
            case Who.HOSTILE:
                self._hostile(slot, rest)
            case Who.HONEST:
                self.honest(slot)
            case Who.BUILDER:
                self._builder(rest)
            case Who.CLIENT:
                self._client(rest)
            case Who.CLOCK:
                due = self.scheduler.next_wakeup_ms()
                self.clock.now_ms = max(self.now_ms + 1.0, due or 0.0)
                self.hear(ev.Tick())
            case Who.DEATH:
                self._dies(slot, rest)
            case _:
                pass

    def _slot(self, number: int) -> Slot:
        """Return the slot with a number; BUSY means the slot of a worker that has a task."""
        if number != BUSY:
            return Slot(number)
        state = self.state
        busy = [a.slot for a in (state.owner.running, state.owner.pending) if a is not None]
        busy += [worker.slot for worker in state.workers.values() if worker.job is not None]
        return busy[0] if busy else Slot(0)

    def _dies(self, slot: Slot, rest: bytes) -> None:
        process = self.workers.get(slot)
        if process is None:
            return
        dispatch_id = self.state.workers[slot].dispatch_id
        process.begun = None if not rest else OpId(dispatch_id if rest[0] & 1 else 0)
        process.end(-11)
        self.reap_worker(process)
        self._rest()
        self.scheduler.check()

    def _hostile(self, slot: Slot, packet: bytes) -> None:
        """Handle a packet like processes.py: an invalid packet ends the process that sent it."""
        try:
            message = decode_message(packet)
        except RemoteProtocolError:
            self._dies(slot, b"")
            return
        self.from_worker(slot, self._in_time(slot, message))

    def _in_time(self, slot: Slot, message: Any) -> Any:
        """Return a message with the slot's current ids and turns in place of 0."""
        worker = self.state.workers.get(slot)
        if worker is None:
            return message
        job = self.state.jobs.get(worker.job) if worker.job is not None else None
        now = {
            "op_id": worker.dispatch_id,
            "next_turn": self.state.owner.promised.get(slot, 0),
            "turn": job.turn if job is not None else 0,
        }
        fields = {key: number for key, number in now.items() if getattr(message, key, 1) == 0}
        return msgspec.structs.replace(message, **fields)

    def _builder(self, packet: bytes) -> None:
        try:
            message: Any = decode_message(packet)
        except RemoteProtocolError:
            return
        if isinstance(message, BuildDone):
            return  # left out, because a manifest would be read from disk
        registrations = self.scheduler.registry.registrations
        registration = registrations.get(getattr(message, "model", MODELS[0]))
        if registration is not None and getattr(message, "op_id", 1) == 0:
            message = msgspec.structs.replace(message, op_id=registration.build_id)
        self.hear(ev.Received(ev.Address("builder"), message))

    def _client(self, rest: bytes) -> None:
        """Handle a client's request: one byte is the verb, one the model, the job or the token."""
        verb, number = ([*rest[:2], 0, 0])[:2]
        model, job = MODELS[number % 2], JOBS[number % 2]
        token = self.clients.token()
        self.hear(_VERBS[verb % len(_VERBS)](token, model, job, ev.Token(number)))


def _encode(command: ev.Command) -> None:
    """Encode a command like effects.py and frontend.py."""
    match command:
        case ev.Send(message=message):
            encode_message(message)
        case ev.Publish(topic=topic, body=body):
            topic.encode()
            pack_dict(body)
        case ev.Span():
            _timeline().add(command)
        case ev.Journal(entry=entry):
            msgspec.json.encode(entry)
        case ev.Reply():
            output_outside(command.outputs, 4096, 4096)
            reply_frames(
                "id",
                body=command.body,
                timing=command.timing,
                error=command.error,
                more=command.more,
            )
        case _:
            pass


Make = Callable[[ev.Token, ModelName, JobName, ev.Token], ev.Event]


def _infer(token: ev.Token, model: ModelName, job: JobName, other: ev.Token) -> ev.Event:
    deadline_at_ms = 1e4 if other & 2 else None
    slab = SlabTensor(name="x", dtype="float32", shape=(1, 4), offset_bytes=0, size_bytes=16)
    return ev.InferArrived(
        token=token,
        model=model,
        digest=model * 64,
        run=Run(request_id=f"r{token}", inputs=(slab,), reply_offset_bytes=4096, reply_bytes=4096),
        origin=ev.Origin(arrived_at_ms=0.0, deadline_at_ms=deadline_at_ms),
    )


def _train(token: ev.Token, model: ModelName, job: JobName, other: ev.Token) -> ev.Event:
    return ev.TrainRequest(
        token=token, spec=ev.JobSpec(name=job, entry="/a.py", args=(), priority=2)
    )


def _asked(action: Any) -> Make:
    return lambda token, _, job, __: ev.JobRequest(token=token, job=job, action=action)


_VERBS: Final[tuple[Make, ...]] = (
    _infer,
    _train,
    lambda token, model, job, other: ev.CancelRequest(token=other),
    _asked("pause"),
    _asked("resume"),
    _asked("cancel"),
    _asked("wait"),
    lambda token, model, job, other: ev.UnregisterRequest(token=token, model=model),
    lambda token, model, job, other: ev.PinRequest(token=token, model=model, pin=bool(other & 2)),
    lambda token, model, job, other: ev.PingRequest(token=token),
    lambda token, model, job, other: ev.RegroupRequest(token=token, model=model),
    lambda token, model, job, other: ev.Query(token=token, what="stats"),
    lambda token, model, job, other: ev.Query(token=token, what="ps"),
    lambda token, model, job, other: ev.Query(token=token, what="show", name=model),
    lambda token, model, job, other: ev.Query(token=token, what="jobs"),
    lambda token, model, job, other: ev.PrefetchHint(model=model),
    lambda token, model, job, other: ev.RegisterModelRequest(
        token=token, model=model, spec=b"s", spec_digest="s", priority=1, is_pinned=False
    ),
    lambda token, model, job, other: ev.DrainRequest(token=token, grace_ms=1000.0),
)


def _obedience(message: Message, has_job: bool) -> list[Message]:
    """Return an honest worker's answers to an order."""
    match message:
        case worker_msg.RunInference(op_id=op_id, plan=plan):
            times = tuple(float(i) for i in range(len(plan) or 2))
            return [
                done_of(
                    op_id,
                    ended_at_ms=1.0,
                    is_clean=True,
                    group_begins_at_ms=times,
                    group_ends_at_ms=tuple(t + 1.0 for t in times),
                )
            ]
        case worker_msg.PrepareModel(model=model, digest=digest, plan=plan):
            return [worker_msg.ModelPrepared(model=model, digest=digest, plan=plan)]
        case worker_msg.RunJob(op_id=op_id):
            return [worker_msg.LeaseRequest(op_id=op_id, slice_bytes=MIB, state_bytes=MIB)]
        case worker_msg.StopTask(op_id=op_id, turn=turn, next_turn=next_turn) if has_job:
            return [parked_of(op_id, turn, next_turn)]
        case worker_msg.EvictTask(op_id=op_id) if has_job:
            return [worker_msg.JobEnded(op_id=op_id, outcome="preempted", step=1)]
        case Ping(op_id=op_id):
            return [Pong(op_id=op_id)]
        case _:
            return []


@functools.cache
def _timeline() -> Timeline:
    return Timeline()


def run(data: bytes) -> None:
    stage = Stage()
    for frame in split_frames(data):
        if frame:
            stage.take(frame)


# ---- seeds --------------------------------------------------------------------------------------


def _says(who: int, slot: int, rest: bytes = b"") -> bytes:
    return bytes([(who << SLOT_BITS) + slot]) + rest


def _hostile(slot: int, message: Message) -> bytes:
    return _says(Who.HOSTILE, slot, encode_message(message))


def _asks(verb: int, number: int = 0) -> bytes:
    return _says(Who.CLIENT, 0, bytes([verb, number]))


def worker_messages() -> list[Message]:
    """Return one message of each kind that a worker sends; 0 means the current id or turn."""
    op_id, model = OpId(0), MODELS[0]
    slab = SlabTensor(name="y", dtype="float32", shape=(1, 4), offset_bytes=4096, size_bytes=16)
    return [
        done_of(
            op_id,
            outputs=((slab,),),
            ended_at_ms=1.0,
            is_clean=True,
            group_begins_at_ms=(0.0, 1.0),
            group_ends_at_ms=(1.0, 2.0),
        ),
        worker_msg.InferenceFailed(
            op_id=op_id, error="TaskFailed", message="no", data={"type": "E"}
        ),
        worker_msg.InferenceFailed(op_id=op_id, error="Other", message="no", data={"text": "E"}),
        worker_msg.WorkerClean(op_id=op_id),
        parked_of(op_id, Turn(0)),
        worker_msg.WorkerReady(slot=Slot(0), pid=1),
        worker_msg.ModelPrepared(model=model, digest=model * 64),
        worker_msg.LeaseRequest(op_id=op_id, slice_bytes=MIB, state_bytes=MIB),
        worker_msg.HostRequest(op_id=op_id, size_bytes=MIB),
        worker_msg.CommitStep(
            op_id=op_id, number=1, step=1, ranges=(ByteRange(offset_bytes=0, size_bytes=8),)
        ),
        worker_msg.JobReport(
            op_id=op_id, kind="progress", values={"step": 3, "epoch": 1, "log": {"a": 1}}
        ),
        worker_msg.JobReport(op_id=op_id, kind="warning", values={"text": "careful", "step": 1}),
        worker_msg.JobReport(
            op_id=op_id, kind="nan_loss", values={"name": "l", "value": "nan", "step": 1}
        ),
        worker_msg.JobEnded(op_id=op_id, outcome="done", step=4),
        worker_msg.JobEnded(op_id=op_id, outcome="failed", step=4, error_type="E", error_text="t"),
        worker_msg.JobEnded(op_id=op_id, outcome="preempted", step=4),
        Pong(op_id=op_id),
    ]


def seeds() -> list[bytes]:
    """Return inputs with each message, during a request and during training, and other inputs."""
    infer, train = _asks(0), _asks(1)
    pressed = [_says(Who.HONEST, slot) for slot in range(2)]
    cases = []
    for message in worker_messages():
        frame = _hostile(BUSY, message)
        cases.append(join_frames([*pressed, infer, frame, *pressed, infer]))
        cases.append(join_frames([*pressed, train, *pressed, frame, infer, frame, *pressed]))
    failed = BuildFailed(model=MODELS[1], op_id=OpId(0), error="InvalidInput", message="no")
    progress = BuildProgress(model=MODELS[1], op_id=OpId(0), stage="s", fraction=0.5)
    builder = [_says(Who.BUILDER, 0, encode_message(message)) for message in (progress, failed)]
    cases.append(join_frames([*builder, _asks(7, 1), *builder]))
    every = [_asks(verb, 1) for verb in range(len(_VERBS) - 1)]
    cases.append(join_frames([train, *every, _says(Who.CLOCK, 0), _says(Who.DEATH, 1, b"\1")]))
    cases.append(join_frames([*pressed, _asks(10), *pressed, *pressed, _asks(17), *pressed]))
    return cases


TARGET = Target(
    name="worker",
    run=run,
    seeds=seeds,
    codec=TAGGED_FRAMES,
    words=(
        "topic",
        "self",
        "message",
        "hint",
        "data",
        "step",
        "op_id",
        "number",
        "log",
        "text",
        "progress",
        "warning",
        "nan_loss",
        "job",
        "m",
        "n",
        "j",
        "type",
        "Parked",
        "JobEnded",
        "InferenceDone",
        "JobReport",
        "LeaseRequest",
        "CommitStep",
        "forward",
        "done",
    ),
)
