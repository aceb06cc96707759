"""Base class of simulated processes (channels, an exit at any time), and the simulated builder."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Protocol

from ...ipc.messages.base import JobName, Message, ModelName, OpId
from ...ipc.messages.builder import BuildDone, BuildFailed, BuildProgress
from ...scheduler.state.events import Address, StartBuild
from .clock import Clock, Move, ProcessPlans
from .costs import Costs, Training
from .device import Image, SimulatedArea, SimulatedDevice
from .programs import SimulatedProgram

Chance = Literal[
    "build_error",
    "builder_dies",
    "store_error",
    "copy_error",
    "persist_error",
    "slice_error",  # a slice cannot be copied out, or in
    "prepare_error",
    "early_error",  # a request fails before it has the device
    "infer_error",
    "hang",  # a request begins and never ends
    "poison",  # a request kills its worker
    "unclean",  # a worker reports only later that it has cleaned up after a task
    "commit",  # a script commits before a commit is due
    "skips_commit",  # an evicted script unwinds without a commit
    "script_error",
    "swallow",  # a script neither parks nor unwinds
    "holds",  # a script's stop holds the device between two kernels; always or never
    "linger",  # a process does not exit after its script
    "takes_along",  # a worker dies with its memory daemon
]


class Choices(Protocol):
    """Decisions on random events; the only source of randomness."""

    def happens(self, what: Chance, name: str) -> bool:
        """Return True if the event happens now to the model, job or process ``name``."""
        ...


class Faithful:
    """Choices under which nothing goes wrong."""

    def happens(self, what: Chance, name: str) -> bool:
        return False


@dataclass(kw_only=True)
class Scene:
    """State that the processes of one device share; devices share all but ``device``, ``index``."""

    choices: Choices
    costs: Costs
    clock: Clock = field(default_factory=Clock)
    device: SimulatedDevice = field(default_factory=SimulatedDevice)  # the processes' device
    index: int = 0  # index of the device
    programs: dict[ModelName, SimulatedProgram] = field(default_factory=dict)
    scripts: dict[JobName, Training] = field(default_factory=dict)
    commits: dict[JobName, SimulatedArea] = field(default_factory=dict)  # commit areas
    images: dict[JobName, Image] = field(default_factory=dict)  # swapped slices
    prompts: dict[str, float] = field(default_factory=dict)  # request -> extra time, in rows


class SimulatedProcess:
    """Simulated process. Its messages in both directions wait in channels, in order.

    Args:
        deliver: called when one of its messages arrives.
        reap: called when it is reaped.
    """

    begun: OpId | None = None  # the last task that a worker began to compute

    def __init__(
        self,
        name: str,
        address: Address,
        scene: Scene,
        deliver: Callable[[Any, Message], None],
        reap: Callable[[Any], None],
    ) -> None:
        self.name = name
        self.address = address
        self.scene = scene
        self.status: int | None = None  # exit status; None: the process runs
        self.is_reaped = False
        self.is_doomed = False  # SIGKILL was sent, but has not ended the process yet
        self.may_lose = False  # after a failure, messages may arrive after the exit, or never
        self.inbox: dict[str, deque[Message]] = {}
        self.out: dict[str, deque[Message]] = {}
        self.plans = ProcessPlans()  # the clock's entries for this process
        self.plans.device = scene.index
        self._deliver, self._reap = deliver, reap

    @property
    def runs(self) -> bool:
        return self.status is None

    def say(self, channel: str, message: Message) -> None:
        """Send a message on a channel to the controller."""
        self.out.setdefault(channel, deque()).append(message)

    def hear(self, channel: str, message: Message) -> None:
        """Queue a message from the controller; a dead process gets none."""
        if self.runs:
            self.inbox.setdefault(channel, deque()).append(message)

    def kill(self) -> None:
        """Send SIGKILL to the process, which runs on until the signal ends it."""
        self.is_doomed = self.runs

    def end(self, status: int) -> None:
        """End the process. Its messages are still on their way to the controller."""
        if self.status is None:
            self.status = status
            self.may_lose, self.is_doomed = status != 0, False
            self.inbox.clear()

    def moves(self) -> list[Move]:
        """Return every move of the process that may happen next."""
        costs = self.scene.costs
        moves = [
            Move(f"from {channel}", "arrives", costs.message_ms, partial(self._arrives, queue))
            for channel, queue in self.out.items()
            if queue
        ]
        if self.status is None:
            moves += self.steps()
            if self.is_doomed:
                moves.append(Move("end", "is struck", 0.0, partial(self.end, -9)))
        elif not self.is_reaped and (self.may_lose or not moves):
            moves.append(Move("end", "reap", costs.reap_ms, partial(self._reap, self)))
        return moves

    def steps(self) -> list[Move]:
        """Return the steps that the process can take itself."""
        raise NotImplementedError

    def _arrives(self, queue: deque[Message]) -> None:
        self._deliver(self, queue.popleft())

    def _reads(self, channel: str, take: Callable[[Message], None]) -> list[Move]:
        """Return the move that reads a channel's oldest message."""
        queue = self.inbox.get(channel)
        if not queue:
            return []
        cost_ms = self.scene.costs.message_ms
        return [Move(channel, "reads", cost_ms, lambda: take(queue.popleft()))]


class SimulatedBuilder(SimulatedProcess):
    """Simulated builder; it finds the model's program in ``Scene.programs``."""

    def __init__(self, order: StartBuild, *of_process: object) -> None:
        address = Address("builder", incarnation=order.op_id)
        super().__init__("builder", address, *of_process)  # type: ignore[arg-type]
        self.order = order

    def steps(self) -> list[Move]:
        return [Move("main", "builds", self.scene.costs.build_ms, self._build)]

    def _build(self) -> None:
        model, op_id = self.order.model, self.order.op_id
        happens = self.scene.choices.happens
        if happens("builder_dies", model):
            self.end(1)
            return
        if happens("build_error", model):
            self.say(
                "out",
                BuildFailed(model=model, op_id=op_id, error="RegistrationRefused", message="no"),
            )
        else:
            digest = self.scene.programs[model].manifest.digest
            self.say("out", BuildProgress(model=model, op_id=op_id, stage="export", fraction=0.5))
            self.say("out", BuildDone(model=model, op_id=op_id, digest=digest))
        self.end(0)
