"""The clients: what they ask for, and that each of them is answered once (invariant I1)."""

from __future__ import annotations

import math
from typing import Any, Final, Literal

from pipeswitch.errors import Cancelled, DeadlineExceeded, PipeSwitchError, ServerUnavailable
from pipeswitch.ipc.messages import JobName, ModelName, RunInference
from pipeswitch.scheduler import events as ev
from pipeswitch.simulator.violation import require

JOB: Final = JobName("job")
TRAIN, WAIT, PAUSE, RESUME = 101, 102, 103, 104  # tokens; requests have 1, 2, …
DEADLINE_MS: Final = 1000.0  # shorter than any grace: nobody is suspected when one passes


class Clients:
    """Who has asked for what. Its values are replaced, never changed."""

    def __init__(self, world: Any) -> None:
        self._world = world
        self.open: frozenset[int] = frozenset()  # accepted, not answered
        self.asked = 0  # requests that were sent
        self.is_trained = False
        self.is_paused = False
        self.pauses, self.cancels = world.scope.pauses, world.scope.cancels
        self.hints, self.drains = world.scope.hints, world.scope.drains
        self.deadlines: tuple[tuple[int, float], ...] = ()  # token and instant, of open ones
        self.cancelled: tuple[int, ...] = ()  # tokens
        self.drained: tuple[int, float] | None = None  # requests before it, end of the grace
        self.has_left = False

    def freeze(self) -> Any:
        return (
            tuple(sorted(self.open)), self.asked, self.is_trained, self.is_paused, self.pauses,
            self.cancels, self.hints, self.drains, self.deadlines, self.cancelled, self.drained,
            self.has_left,
        )  # fmt: skip

    def thaw(self, frozen: Any) -> None:
        (still_open, self.asked, self.is_trained, self.is_paused, self.pauses, self.cancels,
         self.hints, self.drains, self.deadlines, self.cancelled, self.drained,
         self.has_left) = frozen  # fmt: skip
        self.open = frozenset(still_open)

    def actions(self) -> list[tuple[Any, ...]]:
        """What they may do next."""
        found: list[tuple[Any, ...]] = []
        if not self.is_trained and self.drained is None:
            found.append(("train",))
        if self.asked < self._world.scope.requests:
            found.append(("ask",))
        if self.is_paused:
            found.append(("resume",))
        elif self.pauses and WAIT in self.open:
            found.append(("pause",))
        if self.drains:
            found.append(("drain",))
        if self.hints:
            found += [("hint", index) for index in range(self._world.scope.models)]
        if self.cancels:
            found += [("cancel", token) for token in sorted(self.open) if token < TRAIN]
        now_ms = self._world.recall.moment.now_ms
        return found + [("passes", at_ms) for _, at_ms in self.deadlines if now_ms < at_ms]

    def train(self) -> None:
        self.is_trained = True
        self.open |= {TRAIN, WAIT}
        self._world.handle(
            ev.TrainAsked(token=ev.Token(TRAIN), job=JOB, entry="", args=(), priority=1)
        )
        self._job_asked(WAIT, "wait")

    def ask(self) -> None:
        """The next request."""
        world, model = self._world, self._world.model_name(self.asked)
        deadline_at_ms = None
        if self.asked >= world.scope.requests - world.scope.deadlines:
            deadline_at_ms = world.now_ms + DEADLINE_MS
            self.deadlines += ((self.asked + 1, deadline_at_ms),)
        self.asked += 1
        self.open |= {self.asked}
        world.handle(
            ev.InferArrived(
                token=ev.Token(self.asked), request_id=f"r{self.asked}", model=ModelName(model),
                digest=f"d{model}", priority=1, deadline_at_ms=deadline_at_ms, inputs=(),
                reply_offset_bytes=0, reply_bytes=0,
            )
        )  # fmt: skip

    def pause(self) -> None:
        self.pauses, self.is_paused = self.pauses - 1, True
        self._job_asked(PAUSE, "pause")

    def resume(self) -> None:
        self.is_paused = False
        self._job_asked(RESUME, "resume")

    def _job_asked(self, token: int, action: Literal["wait", "pause", "resume"]) -> None:
        self.open |= {token}
        self._world.handle(ev.JobAsked(token=ev.Token(token), job=JOB, action=action))

    def cancel(self, token: int) -> None:
        """A client takes its request back, or has gone."""
        self.cancels -= 1
        self.cancelled += (token,)
        self._world.handle(ev.CancelAsked(token=ev.Token(token)))

    def hint(self, index: int) -> None:
        """A large request is on its way; perhaps it never comes."""
        self.hints -= 1
        self._world.handle(ev.PrefetchHint(model=ModelName(self._world.model_name(index))))

    def drain(self, grace_ms: float) -> None:
        """SIGTERM."""
        self.drains -= 1
        self.drained = (self.asked, self._world.now_ms + grace_ms)
        self._world.handle(ev.DrainAsked(token=None, grace_ms=grace_ms))

    def leave(self) -> None:
        """The server stops: everybody was answered before."""
        require(not self.open, f"left, and never answered: tokens {sorted(self.open)} (I1)")
        self.has_left = True

    def check_dispatch(self, order: RunInference) -> None:
        """A request is sent to a worker: not when its client has given up on it."""
        token = int(order.request_id.removeprefix("r"))
        at_ms = dict(self.deadlines).get(token, math.inf)
        require(self._world.now_ms < at_ms, f"request r{token} is begun after its deadline")

    def answered(self, answer: ev.Answer) -> None:
        """An answer goes out: the first for its token, and the right one."""
        token = int(answer.token)
        if answer.more:
            return
        require(token in self.open, f"token {token} is answered twice (I1)")
        self.open -= {token}
        if answer.error is not None:
            is_allowed = self._may_refuse(token, answer.error)
            require(is_allowed, f"token {token} is refused: {answer.error}")
        elif token < TRAIN:
            wanted: Any = (f"r{token}",)  # its name stands for its outputs
            require(answer.outputs == wanted, f"{wanted} is answered with {answer.outputs}")
        self.deadlines = tuple([pair for pair in self.deadlines if pair[0] != token])

    def _may_refuse(self, token: int, error: PipeSwitchError) -> bool:
        """Whether that token may end so: 1. the job is over by then; 2. and 3. as its client
        wanted; 4. the server leaves: what it had accepted before is refused only when the grace
        is over, who waits for a job is told to come back.
        """
        now_ms = self._world.now_ms
        match error:
            case Cancelled():
                return token in self.cancelled  # 2.
            case DeadlineExceeded():
                return bool(dict(self.deadlines).get(token, math.inf) <= now_ms)  # 3.
            case ServerUnavailable() if self.drained is not None:
                accepted, end_at_ms = self.drained
                return token > accepted or now_ms >= end_at_ms  # 4.
            case _:
                return token in (PAUSE, RESUME)  # 1.


__all__ = ["Clients"]
