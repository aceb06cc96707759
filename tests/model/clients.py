"""Simulated clients that can be frozen, with checks of the answers that they get (I1)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from operator import attrgetter
from typing import Any, Final

import msgspec

from pipeswitch.base.errors import Cancelled, DeadlineExceeded, PipeSwitchError, ServerUnavailable
from pipeswitch.extras.lab.costs import Training
from pipeswitch.extras.lab.device import require
from pipeswitch.extras.lab.simulated_clients import (
    Action,
    SimulatedClients,
    SimulatedGenerations,
)
from pipeswitch.ipc.messages.base import JobName, ModelName
from pipeswitch.ipc.messages.run import Run, SamplingParams
from pipeswitch.ipc.messages.worker import RunInference
from pipeswitch.scheduler.state import events as ev
from pipeswitch.scheduler.state.records import Request

JOBS: Final = JobName("job"), JobName("other")
JOB: Final = JOBS[0]
# Tokens of messages: requests have 1, 2, …; OTHER: the second job's; REGISTER: all registrations'.
TRAIN, WAIT, PAUSE, RESUME, PIN, MOVE, OTHER, REGISTER = 101, 102, 103, 104, 105, 106, 107, 200
DEADLINE_MS: Final = 1000.0  # expires before a worker counts as hung, after a grace period


VALUES: Final = (
    *("asked", "is_trained", "is_paused", "pauses", "cancels", "hints", "drains", "pins", "moves"),
    *("deadlines", "cancelled", "drained", "turns", "waits", "last", "parking", "parked", "parks"),
)  # attributes that are frozen as they are
_values: Final = attrgetter(*VALUES)


class Generations(SimulatedGenerations):
    """Generations of which some wait for memory after their first run: those with a seed."""

    def prepare(self, request: Request) -> Run | None:
        params = request.run.sampling_params
        return None if params is not None and params.seed else request.run

    def poll(self, waiting: Mapping[ev.Token, Request]) -> list[tuple[ev.Token, Run]]:
        runs = []
        for token, request in waiting.items():
            params = request.run.sampling_params
            assert params is not None
            left = SamplingParams(left=params.left)
            runs.append((token, msgspec.structs.replace(request.run, sampling_params=left)))
        return runs


class Clients(SimulatedClients):
    """Requests and jobs of the clients. Attributes' values are replaced, never changed in place."""

    def __init__(self, world: Any) -> None:
        super().__init__(world.scene, world.handle)
        scope = world.scope
        self._world = world
        self._next_token = REGISTER
        # Set now, because this process may thaw a state in which another process sent the job.
        self._script = Training(
            steps=scope.steps, slice_bytes=scope.slice_bytes, state_bytes=scope.state_bytes
        )
        world.scene.scripts.update(dict.fromkeys(JOBS, self._script))
        self.asked = 0  # number of requests that were sent
        self.is_trained = not scope.has_job
        self.is_paused = False
        self.pauses, self.cancels = scope.pauses, scope.cancels
        self.hints, self.drains, self.pins = scope.hints, scope.drains, scope.pins
        self.moves = scope.moves
        self.deadlines: tuple[tuple[int, float], ...] = ()  # token and deadline of open requests
        self.cancelled: tuple[int, ...] = ()  # tokens of cancelled requests
        self.drained: tuple[int, float] | None = None  # last token before the drain, end of grace
        self.turns = ""  # callers of the requests that were dispatched, in order
        self.waits: tuple[tuple[int, int], ...] = ()  # token, length of ``turns`` when sent
        self.last = self.waits  # the request that was dispatched last, as it was in ``waits``
        self.parking = 0  # token of a generation that will wait for memory after its first run
        self.parked = False  # it waits
        self.parks = scope.parks
        self.left: dict[ev.Token, int] = {}  # number of tokens that each generation still needs

    def _count_tokens(self, answer: ev.Reply) -> None:
        """Check that a generation has more runs until it has all tokens."""
        if answer.more and "tokens" in answer.body:
            to_come = self.left[answer.token] - len(answer.body["tokens"])
            require(to_come > 0, f"r{answer.token} gets another run after its last token")
            self.left = {**self.left, answer.token: to_come}
            if answer.token == self.parking:
                self.parking, self.parked = 0, True
        elif answer.error is None and "tokens" in answer.body:
            is_whole = self.left[answer.token] == len(answer.body["tokens"])
            require(is_whole, f"r{answer.token} is answered before its last token")

    def token(self) -> ev.Token:
        token = ev.Token(self._next_token)
        self.open.add(token)
        return token

    def freeze(self) -> Any:
        left = tuple(sorted(self.left.items()))
        return tuple(sorted(self.open)), *_values(self), left

    def thaw(self, frozen: Any) -> None:
        still_open, *values, to_come = frozen
        vars(self).update(zip(VALUES, values, strict=True))
        self.left = dict(to_come)
        self.open = set(still_open)

    def actions(self) -> list[tuple[Any, ...]]:
        """Return all actions that are possible for the clients."""
        steps: list[tuple[Any, ...]] = []
        if not self.is_trained and self.drained is None:
            steps.append(("train",))
        if self.asked < self._world.scope.requests:
            steps += [("ask",), *[("ask", True)] * bool(self.parks)]
        if self.is_paused:
            steps.append(("resume",))
        elif self.pauses and WAIT in self.open:
            steps.append(("pause",))
        if self.moves and WAIT in self.open and MOVE not in self.open:
            steps.append(("move",))
        if self.drains:
            steps.append(("drain",))
        if self.hints:
            steps += [("hint", index) for index in range(self._world.scope.models)]
        if self.pins:
            steps.append(("pin",))
        if self.parked:
            steps.append(("room",))
        if self.cancels:
            steps += [("cancel", token) for token in sorted(self.open) if token < TRAIN]
        now_ms = self._world.now_ms
        return steps + [("passes", at_ms) for _, at_ms in self.deadlines if now_ms < at_ms]

    def do_train(self) -> None:
        self.is_trained = True
        self._next_token = TRAIN
        self.train(JOB, self._script)
        self._asks(WAIT, "wait")
        for job in JOBS[1 : self._world.scope.jobs]:
            self._next_token = OTHER
            self.train(job, self._script)

    def do_ask(self, is_parked: bool = False) -> None:
        """Send the next request; if ``is_parked``, it waits for memory after its first run."""
        scope = self._world.scope
        model = self._world.model_name(self.asked)
        if scope.asks:
            model = ModelName(scope.asks[self.asked])
        has_deadline = self.asked >= scope.requests - scope.deadlines
        self.asked += 1
        self._next_token = self.asked
        if has_deadline:
            self.deadlines += ((self.asked, self._world.now_ms + DEADLINE_MS),)
        caller = scope.callers[self.asked - 1] if scope.callers else ""
        if caller:
            self.waits += ((self.asked, len(self.turns)),)
        deadline_ms = DEADLINE_MS if has_deadline else None
        sampling_params = None
        if scope.runs:
            self.left = {**self.left, ev.Token(self.asked): scope.runs}
            sampling_params = SamplingParams(left=scope.runs, seed=int(is_parked))
        if is_parked:
            self.parks, self.parking = self.parks - 1, self.asked
        self.infer(model, deadline_ms=deadline_ms, caller=caller, sampling_params=sampling_params)

    def do_room(self) -> None:
        """Free memory of the request pool, for which a generation may wait."""
        self.parked = False
        self._world.handle(ev.PoolFreed())

    def do_pause(self) -> None:
        self.pauses, self.is_paused = self.pauses - 1, True
        self._asks(PAUSE, "pause")

    def do_move(self) -> None:
        """Move the job like ``pipeswitch jobs move``. The last of its moves is to device 1."""
        to = f"cpu:{self.moves % 2}"
        self.moves -= 1
        self._next_token = MOVE
        self._world.handle(ev.JobRequest(token=self.token(), job=JOB, action="move", to=to))

    def do_resume(self) -> None:
        self.is_paused = False
        self._asks(RESUME, "resume")

    def _asks(self, token: int, action: Action) -> None:
        self._next_token = token
        self.ask(JOB, action)

    def do_cancel(self, token: int) -> None:
        """Cancel a request, like a client that cancels it or disconnects."""
        self.cancels -= 1
        self.cancelled += (token,)
        self._world.handle(ev.CancelRequest(token=ev.Token(token)))

    def do_hint(self, index: int) -> None:
        """Announce a large request; the request itself may never arrive."""
        self.hints -= 1
        self._world.handle(ev.PrefetchHint(model=self._world.model_name(index)))

    def do_pin(self) -> None:
        """Pin the first model, like ``pipeswitch load``."""
        self.pins -= 1
        self._next_token = PIN
        self._world.handle(
            ev.PinRequest(token=self.token(), model=self._world.model_name(0), pin=True)
        )

    def do_drain(self) -> None:
        """Drain the server, like SIGTERM."""
        grace_ms = self._world.scope.grace_ms
        self.drains -= 1
        self.drained = (self.asked, self._world.now_ms + grace_ms)
        self._world.handle(ev.DrainRequest(token=None, grace_ms=grace_ms))

    def leave(self) -> None:
        """Check that every token is answered before the server stops."""
        require(not self.open, f"left, and never answered: tokens {sorted(self.open)} (I1)")

    def check_dispatch(self, order: RunInference) -> None:
        """Check that a request is dispatched before its deadline, and that callers take turns."""
        for one in order.runs:
            token = int(one.request_id.removeprefix("r"))
            at_ms = dict(self.deadlines).get(token, math.inf)
            require(self._world.now_ms < at_ms, f"request r{token} is begun after its deadline")
        if self._world.scope.callers:
            self._check_turn(int(order.runs[0].request_id.removeprefix("r")))

    def _check_turn(self, dispatched: int) -> None:
        """Check that no caller gets two turns ahead of one that waits; all runs cost the same."""
        callers = self._world.scope.callers
        caller = callers[dispatched - 1]
        self.last = tuple([pair for pair in self.waits if pair[0] == dispatched])
        self.waits = tuple([pair for pair in self.waits if pair[0] != dispatched])
        for token, before in self.waits:
            other = callers[token - 1]
            turns = self.turns[before:]
            is_fair = turns.count(caller) <= turns.count(other)
            require(is_fair, f"r{dispatched} of {caller} goes again, and r{token} waits")
        self.turns += caller

    def taken_back(self) -> None:
        """Record that the task that was dispatched last had no turn: its request waits again."""
        if self._world.scope.callers:
            self.turns, pairs = self.turns[:-1], self.waits + self.last
            self.waits = tuple([(one, min(at, len(self.turns))) for one, at in pairs])
            self.last = ()

    def waits_for(self, model: ModelName) -> bool:
        """Return True if a request for the model is open."""
        scope = self._world.scope
        return any(
            model == (scope.asks[token - 1] if scope.asks else self._world.model_name(token - 1))
            for token in self.open
            if token < TRAIN
        )

    def answered(self, answer: ev.Reply) -> None:
        """Check that an answer is correct, and the first answer for its token."""
        super().answered(answer)
        self._count_tokens(answer)
        token = int(answer.token)
        if answer.more or token >= REGISTER:
            return
        if answer.error is not None:
            is_allowed = self._may_refuse(token, answer.error)
            require(is_allowed, f"token {token} is refused: {answer.error}")
        elif token < TRAIN:
            others = {output.name for output in answer.outputs} ^ {f"r{token}"}
            require(not others, f"r{token} is answered with {answer.outputs}")
        self.deadlines = tuple([pair for pair in self.deadlines if pair[0] != token])

    def _may_refuse(self, token: int, error: PipeSwitchError) -> bool:
        """Return True if the token may get the error: 1. a pause or a resume after the job's end;
        2. a cancelled request; 3. an expired deadline; 4. during a drain, a new request or a wait
        for a job, and after the grace period also an earlier request."""
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


__all__ = ["JOB", "JOBS", "Clients"]
