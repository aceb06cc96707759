"""What all processes have in common: channels, a life, and an end that may come at any time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ..ipc.messages import JobName, Message, ModelName
from .choices import Choices
from .clock import Clock, Move, Plans
from .costs import Costs, Training
from .device import Device, SimulatedArea
from .programs import Program


@dataclass(kw_only=True)
class Scene:
    """What the processes of one device share; all but the device is the server's."""

    choices: Choices
    costs: Costs
    clock: Clock = field(default_factory=Clock)
    device: Device = field(default_factory=Device)  # theirs
    index: int = 0  # of that device
    programs: dict[ModelName, Program] = field(default_factory=dict)
    scripts: dict[JobName, Training] = field(default_factory=dict)
    commits: dict[JobName, SimulatedArea] = field(default_factory=dict)  # memfds
    devices: list[Device] = field(default_factory=list)  # all of the server's


class Process:
    """Anything with a life. What it says and hears waits in channels, in order.

    Args:
        tell: takes what it has said, when that arrives.
        reap: takes its end.
    """

    def __init__(
        self, name: str, generation: int, scene: Scene,
        tell: Callable[[Any, Message], None], reap: Callable[[Any], None],
    ) -> None:  # fmt: skip
        self.name = name
        self.generation = generation
        self.scene = scene
        self.status: int | None = None  # set when it has ended, perhaps not yet reaped
        self.is_reaped = False
        self.is_doomed = False  # SIGKILL was sent and has not struck yet
        self.may_lose = False  # killed: what it had said may arrive after its exit, or never
        self.inbox: dict[str, deque[Message]] = {}
        self.out: dict[str, deque[Message]] = {}
        self.plans: Plans = {}  # by the clock
        self._tell, self._reap = tell, reap

    @property
    def runs(self) -> bool:
        return self.status is None

    def say(self, channel: str, message: Message) -> None:
        """Into a channel to the controller."""
        self.out.setdefault(channel, deque()).append(message)

    def hear(self, channel: str, message: Message) -> None:
        """Into a channel from the controller; nothing is kept for the dead."""
        if self.runs:
            self.inbox.setdefault(channel, deque()).append(message)

    def kill(self) -> None:
        """It goes on until the signal strikes."""
        self.is_doomed = self.runs

    def end(self, status: int) -> None:
        """It is gone. What it has said is still on its way."""
        if self.status is None:
            self.status = status
            self.may_lose, self.is_doomed = status != 0, False
            self.inbox.clear()

    def moves(self) -> list[Move]:
        """Everything that may happen to it next."""
        costs = self.scene.costs
        found = [
            Move(f"from {channel}", "arrives", costs.message_ms, partial(self._arrives, queue))
            for channel, queue in self.out.items()
            if queue
        ]
        if self.status is None:
            found += self.steps()
            if self.is_doomed:
                found.append(Move("end", "is struck", 0.0, partial(self.end, -9)))
        elif not self.is_reaped and (self.may_lose or not found):
            found.append(Move("end", "reap", costs.reap_ms, partial(self._reap, self)))
        return found

    def steps(self) -> list[Move]:
        """What it can do itself."""
        raise NotImplementedError

    def _arrives(self, queue: deque[Message]) -> None:
        self._tell(self, queue.popleft())

    def _reads(self, channel: str, take: Callable[[Message], None]) -> list[Move]:
        """The move that reads a channel's oldest message."""
        queue = self.inbox.get(channel)
        if not queue:
            return []
        act = partial(_read, queue, take)
        return [Move(channel, "reads", self.scene.costs.message_ms, act)]


def _read(queue: deque[Message], take: Callable[[Message], None]) -> None:
    take(queue.popleft())
