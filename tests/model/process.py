"""A worker process: two threads, four channels, and an end that may come at any time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pipeswitch.ipc.gate import Gate
from pipeswitch.ipc.messages import Cleaned, Epoch, InferenceDone, Message, Parked
from pipeswitch.scheduler.records import NO_EPOCH

from .channel import Data, Item, Items, ItemsCodec, pack, unpack
from .frozen import Codec, Kept
from .script import COMPUTES, GateCodec, Script, copy_gate, new_gate

TASK, SIGNAL = 0, 1
NOTHING = Data(())


@dataclass
class Process(Script):
    """The process in a slot. ``life``: booting, up, dead (its last words are on their way)."""

    slot: int
    generation: int
    life: str = "booting"
    status: int = 0
    is_doomed: bool = False  # SIGKILL was sent and has not struck yet
    begun: Epoch = NO_EPOCH  # its word on the board
    task_in: Items = ()
    signal_in: Items = ()
    task_out: Items = ()
    signal_out: Items = ()
    request: Items = ()  # the RunInference it computes
    group: int = 0
    job: str = ""
    job_epoch: Epoch = NO_EPOCH
    phase: str = ""
    gate: Gate | None = None
    next_slot: int = 0
    saved: Data = NOTHING  # the image it resumes from
    lease: Data = NOTHING  # promised or held: offset and size
    has_lease: bool = False
    committed: int = -1
    in_flight: int = -1  # step of the commit it has begun and not finished
    commit_number: int = 0  # of the last one it has begun
    is_acknowledged: bool = False
    kept: Kept | None = None  # as frozen: shared by all states it is in, so not to be changed

    def own(self, world: Any) -> Process:
        """A copy that may be changed, for one state of the world."""
        twin = Process.__new__(Process)
        twin.__dict__.update(self.__dict__)
        twin.kept = None
        if self.gate is not None:
            twin.gate = copy_gate(self.gate)
            twin.hear_gate(world)
        return twin

    @property
    def computes(self) -> bool:
        """Whether it uses the device now (invariant I5)."""
        if self.life != "up":
            return False
        if self.request:
            return True
        return bool(self.job) and self.phase != "over" and _holds(self.gate)

    @property
    def is_idle(self) -> bool:
        """Nothing is in it, on its way to it or from it."""
        queues = (self.task_in, self.signal_in, self.task_out, self.signal_out, self.request)
        return self.life == "up" and not self.job and not any(queues)

    @property
    def readable_epochs(self) -> list[Any]:
        """The requests in it or on their way to it."""
        return [unpack(i) for i in (*self.request, *self.task_in) if i[0] == "RunInference"]

    def say(self, channel: int, message: Message) -> None:
        """Put a message into a channel to the controller."""
        if channel == TASK:
            self.task_out += (pack(message),)
        else:
            self.signal_out += (pack(message),)

    def takes_out(self, channel: int) -> Item:
        """The oldest message of a channel leaves it."""
        if channel == TASK:
            item, *rest = self.task_out
            self.task_out = tuple(rest)
        else:
            item, *rest = self.signal_out
            self.signal_out = tuple(rest)
        return item

    def dies(self, status: int) -> None:
        """It is gone; what it has said is still in its channels."""
        self.life, self.status, self.is_doomed = "dead", status, False
        self.task_in = self.signal_in = self.request = ()
        self.gate, self.phase, self.job = None, "", ""
        self.saved, self.has_lease, self.commit_number = NOTHING, False, 0

    # -- main thread ---------------------------------------------------------------------------

    def may_move(self, world: Any) -> bool:
        """Whether the main thread can do something now (or it must be tried to know)."""
        if self.job:
            return not self.script_waits()
        if self.request:
            order = unpack(self.request[0])
            word = world.arena.words.get(order.first_word + self.group)
            return bool(word == order.residency_epoch)
        if not self.task_in:
            return False
        name, _, epochs = self.task_in[0]
        return name != "RunInference" or world.arena.turn == epochs[0]

    def moves(self, world: Any) -> bool:
        """One move of the main thread; False when it turned out to wait."""
        if self.job:
            return self.script_moves(world)
        if self.request:
            self._compute_group(world)
            return True
        order = unpack(self.task_in[0])
        self.task_in = self.task_in[1:]
        if type(order).__name__ == "RunInference":
            self.request, self.group, self.begun = (pack(order),), 0, order.epoch
        else:
            self._start_script(world, order)
        return True

    def _compute_group(self, world: Any) -> None:
        order = unpack(self.request[0])
        world.arena.reads(self, order, self.group)
        self.group += 1
        if self.group == world.scope.groups:
            self.request, self.group = (), 0
            self.say(TASK, InferenceDone(
                epoch=order.epoch, outputs=(order.request_id,),
                turn_at_ms=0.0, first_group_at_ms=0.0, ended_at_ms=0.0, stall_ms=0.0))  # fmt: skip
            self.say(TASK, Cleaned(epoch=order.epoch))

    def _start_script(self, world: Any, order: Any) -> None:
        self.job, self.job_epoch, self.phase = order.job, order.epoch, ""
        self.gate = new_gate()
        self.hear_gate(world)
        if order.turn:
            self.gate.grant(order.turn)
        self.saved = Data(world.commits.last() if order.slot_bytes else ())
        self.ask_for_slice(world)

    # -- termination thread --------------------------------------------------------------------

    def may_hear(self) -> bool:
        """A signal waits, and the job it speaks of is known."""
        return bool(self.signal_in) and bool(self.job)

    def hears(self, world: Any) -> None:
        message = unpack(self.signal_in[0])
        self.signal_in = self.signal_in[1:]
        self.obey(message)

    def hear_gate(self, world: Any) -> None:
        """Let the gate's acknowledgements pass the device on (``Worker._on_parked``)."""

        def on_parked(turn: Any, next_turn: Any, where: Any) -> None:
            if next_turn:
                world.arena.turn = next_turn
            self.say(SIGNAL, Parked(
                epoch=self.job_epoch, turn=turn, next_turn=next_turn, where=where,
                asked_at_ms=0.0, parked_at_ms=0.0))  # fmt: skip

        assert self.gate is not None
        self.gate._on_parked = on_parked


def _holds(gate: Gate | None) -> bool:
    return gate is not None and gate._state in COMPUTES


_ITEMS = ("task_in", "signal_in", "task_out", "signal_out", "request")
PROCESS = Codec(
    Process,
    drop=("generation", "kept"),
    ordered=("job_epoch",),
    own={**dict.fromkeys(_ITEMS, ItemsCodec), "gate": GateCodec},  # type: ignore[arg-type, dict-item]
)
