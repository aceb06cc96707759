"""The simulated clients as a state: what they may ask next, and which answers are right (I1)."""

from __future__ import annotations

import math
from typing import Any, Final

from pipeswitch.base.errors import Cancelled, DeadlineExceeded, PipeSwitchError, ServerUnavailable
from pipeswitch.ipc.messages.base import JobName, ModelName
from pipeswitch.ipc.messages.worker import RunInference, SamplingParams
from pipeswitch.scheduler import events as ev
from pipeswitch.simulator.costs import Training
from pipeswitch.simulator.device import require
from pipeswitch.simulator.simulated_clients import Action, SimulatedClients

JOBS: Final = JobName("job"), JobName("other")
JOB: Final = JOBS[0]
# Tokens; requests have 1, 2, …, and the second job its own.
TRAIN, WAIT, PAUSE, RESUME, PIN, MOVE, OTHER, REGISTER = 101, 102, 103, 104, 105, 106, 107, 200
DEADLINE_MS: Final = 1000.0  # shorter than any grace: no worker is suspected when one passes


class Clients(SimulatedClients):
    """Who has asked for what. Its values are replaced, never changed."""

    def __init__(self, world: Any) -> None:
        super().__init__(world.scene, world.handle)
        scope = world.scope
        self._world = world
        self._next_token = REGISTER
        # Known before it is asked for: a process may thaw a state in which another one has asked.
        self._script = Training(
            steps=scope.steps, slice_bytes=scope.slice_bytes, state_bytes=scope.state_bytes
        )
        world.scene.scripts.update(dict.fromkeys(JOBS, self._script))
        self.asked = 0  # requests that were sent
        self.is_trained = not scope.has_job
        self.is_paused = False
        self.pauses, self.cancels = scope.pauses, scope.cancels
        self.hints, self.drains, self.pins = scope.hints, scope.drains, scope.pins
        self.moves = scope.moves
        self.deadlines: tuple[tuple[int, float], ...] = ()  # token and instant, of open ones
        self.cancelled: tuple[int, ...] = ()  # tokens
        self.drained: tuple[int, float] | None = None  # requests before it, end of the grace
        self.turns = ""  # the callers of the requests that were dispatched, in order
        self.waits: tuple[tuple[int, int], ...] = ()  # token, and how many turns were before it
        # Of generations: runs that have ended, each with tokens and what is left of them; those
        # that wait for room; how many still may.
        self.ended: tuple[tuple[tuple[int, int], ...], ...] = ()
        self.parked: tuple[tuple[int, int], ...] = ()
        self.parks = scope.parks

    def token(self) -> ev.Token:
        token = ev.Token(self._next_token)
        self.open.add(token)
        return token

    def freeze(self) -> Any:
        return (
            tuple(sorted(self.open)),
            self.asked,
            self.is_trained,
            self.is_paused,
            self.pauses,
            self.cancels,
            self.hints,
            self.drains,
            self.pins,
            self.moves,
            self.deadlines,
            self.cancelled,
            self.drained,
            self.turns,
            self.waits,
            self.ended,
            self.parked,
            self.parks,
            tuple(self.left.items()),
        )

    def thaw(self, frozen: Any) -> None:
        (
            still_open,
            self.asked,
            self.is_trained,
            self.is_paused,
            self.pauses,
            self.cancels,
            self.hints,
            self.drains,
            self.pins,
            self.moves,
            self.deadlines,
            self.cancelled,
            self.drained,
            self.turns,
            self.waits,
            self.ended,
            self.parked,
            self.parks,
            to_come,
        ) = frozen
        self.left = dict(to_come)
        self.open = set(still_open)

    def actions(self) -> list[tuple[Any, ...]]:
        """What they may do next."""
        steps: list[tuple[Any, ...]] = []
        if not self.is_trained and self.drained is None:
            steps.append(("train",))
        if self.asked < self._world.scope.requests:
            steps.append(("ask",))
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
        if self.ended:
            steps += [("next_runs", False)] + ([("next_runs", True)] if self.parks else [])
        steps += [("room", index) for index in range(len(self.parked))]
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

    def do_ask(self) -> None:
        """The next request."""
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
        sampling_params = SamplingParams(left=scope.runs) if scope.runs else None
        self.infer(model, deadline_ms=deadline_ms, caller=caller, sampling_params=sampling_params)

    def run_ended(self, command: ev.RunEnded) -> None:
        """The frontend hears of it later: other events may come before."""
        runs = []
        for answer in command.answers:
            require(answer.token in self.open, f"r{answer.token} goes on after its answer")
            to_come = self.left[answer.token] - len(answer.body["tokens"])
            require(to_come > 0, f"r{answer.token} goes on after its last token")
            self.left = {**self.left, answer.token: to_come}
            runs.append((int(answer.token), to_come))
        self.ended += (tuple(runs),)

    def do_next_runs(self, is_parked: bool) -> None:
        """The frontend says what they compute next; one of them may have no room."""
        (runs, *rest) = self.ended
        self.ended = tuple(rest)
        next_runs = [
            ev.NextRun(token=ev.Token(t), sampling_params=SamplingParams(left=n)) for t, n in runs
        ]
        if is_parked:
            self.parks -= 1
            self.parked += (runs[0],)
            next_runs[0] = ev.NextRun(token=next_runs[0].token)
        self._world.handle(ev.NextRuns(runs=tuple(next_runs)))

    def do_room(self, index: int) -> None:
        """One that waited for room has it, even if it was taken back meanwhile."""
        token, to_come = self.parked[index]
        self.parked = self.parked[:index] + self.parked[index + 1 :]
        run = ev.NextRun(token=ev.Token(token), sampling_params=SamplingParams(left=to_come))
        self._world.handle(ev.NextRuns(runs=(run,)))

    def do_pause(self) -> None:
        self.pauses, self.is_paused = self.pauses - 1, True
        self._asks(PAUSE, "pause")

    def do_move(self) -> None:
        """``pipeswitch jobs move``: the last time to the second device."""
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
        """A client takes its request back, or has gone."""
        self.cancels -= 1
        self.cancelled += (token,)
        self._world.handle(ev.CancelRequest(token=ev.Token(token)))

    def do_hint(self, index: int) -> None:
        """A large request is on its way; perhaps it never comes."""
        self.hints -= 1
        self._world.handle(ev.PrefetchHint(model=self._world.model_name(index)))

    def do_pin(self) -> None:
        """``pipeswitch load``."""
        self.pins -= 1
        self._next_token = PIN
        self._world.handle(
            ev.PinRequest(token=self.token(), model=self._world.model_name(0), pin=True)
        )

    def do_drain(self) -> None:
        """SIGTERM."""
        grace_ms = self._world.scope.grace_ms
        self.drains -= 1
        self.drained = (self.asked, self._world.now_ms + grace_ms)
        self._world.handle(ev.DrainRequest(token=None, grace_ms=grace_ms))

    def leave(self) -> None:
        """The server stops: every token was answered before."""
        require(not self.open, f"left, and never answered: tokens {sorted(self.open)} (I1)")

    def check_dispatch(self, order: RunInference) -> None:
        """Requests are sent to a worker: not when their clients have given up on them."""
        for one in (order, *order.batched):
            token = int(one.request_id.removeprefix("r"))
            at_ms = dict(self.deadlines).get(token, math.inf)
            require(self._world.now_ms < at_ms, f"request r{token} is begun after its deadline")
        if self._world.scope.callers:
            self._check_turn(int(order.request_id.removeprefix("r")))

    def _check_turn(self, dispatched: int) -> None:
        """While a caller waits for a turn no other one has two: each takes as long."""
        callers = self._world.scope.callers
        caller = callers[dispatched - 1]
        self.waits = tuple([pair for pair in self.waits if pair[0] != dispatched])
        for token, before in self.waits:
            other = callers[token - 1]
            has_turn = caller in self.turns[max(before, self.turns.rfind(other) + 1) :]
            is_fair = other == caller or not has_turn
            require(is_fair, f"r{dispatched} of {caller} goes again, and r{token} waits")
        self.turns += caller

    def waits_for(self, model: ModelName) -> bool:
        """Whether a request for a model is open."""
        scope = self._world.scope
        return any(
            model == (scope.asks[token - 1] if scope.asks else self._world.model_name(token - 1))
            for token in self.open
            if token < TRAIN
        )

    def answered(self, answer: ev.Reply) -> None:
        """An answer goes out: the first for its token, and the right one."""
        super().answered(answer)
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


__all__ = ["JOB", "JOBS", "Clients"]
