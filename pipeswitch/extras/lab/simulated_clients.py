"""Simulated clients: their requests, and the check that each gets exactly one answer (I1)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Literal

from msgspec.structs import replace

from ...ipc.messages.base import JobName, ModelName
from ...ipc.messages.run import Run, SamplingParams
from ...scheduler.state import events as ev
from ...scheduler.state.records import Request
from .costs import Training
from .device import Violation, require
from .process import Scene
from .programs import SimulatedProgram

Action = Literal["show", "pause", "resume", "cancel", "wait"]


class SimulatedGenerations:
    """Generations (``RunKind``) without contents: a run has only the number of tokens left."""

    def ended(self, request: Request, answer: ev.Reply) -> ev.Reply:
        params = request.run.sampling_params
        assert params is not None
        left = SamplingParams(left=params.left - len(answer.body["tokens"]), seed=params.seed)
        request.run = replace(request.run, sampling_params=left)
        return answer

    def renew(self, request: Request) -> None:
        raise Violation(f"no request leads another one, so {request.run} is not out of date")

    def prepare(self, request: Request) -> Run | None:
        return request.run

    def poll(self, waiting: Mapping[ev.Token, Request]) -> Iterable[tuple[ev.Token, Run]]:
        return [(token, request.run) for token, request in waiting.items()]


class SimulatedClients:
    """All clients of the server; a token names one of their requests.

    Attributes:
        open: tokens that have no final answer yet.
        outcomes: number of requests by outcome: "ok", or the error's name.
    """

    def __init__(self, scene: Scene, handle: Callable[[ev.Event], None]) -> None:
        self.open: set[ev.Token] = set()
        self.outcomes: Counter[str] = Counter()
        self._scene, self._handle = scene, handle
        self.last_token = 0

    def token(self) -> ev.Token:
        """Return the token of a new request, which now needs an answer."""
        self.last_token += 1
        token = ev.Token(self.last_token)
        self.open.add(token)
        return token

    def answered(self, answer: ev.Reply) -> None:
        require(answer.token in self.open, f"token {answer.token} is answered twice (I1)")
        if not answer.more:
            self.open.discard(answer.token)
            error = answer.error
            self.outcomes["ok" if error is None else type(error).__name__] += 1

    def register(
        self,
        model: ModelName,
        program: SimulatedProgram,
        *,
        priority: int = 1,
        pin: bool = False,
        devices: tuple[str, ...] = (),
    ) -> ev.Token:
        """Register a model. A known name keeps its program, which never changes."""
        known = self._scene.programs.setdefault(model, program)
        spec, token = known.manifest.digest, self.token()
        self._handle(
            ev.RegisterModelRequest(
                token=token,
                model=model,
                spec=spec.encode(),
                spec_digest=spec,
                priority=priority,
                is_pinned=pin,
                devices=devices,
            )
        )
        return token

    def infer(
        self,
        model: ModelName,
        *,
        priority: int = 1,
        deadline_ms: float | None = None,
        caller: str = "",
        connection: str = "",
        sampling_params: SamplingParams | None = None,
    ) -> ev.Token:
        """Send an inference request, or a generation if it has ``sampling_params``.
        The deadline counts from now."""
        token, now_ms = self.token(), self._scene.clock.now_ms
        program = self._scene.programs.get(model)
        self._handle(
            ev.InferArrived(
                token=token,
                model=model,
                digest=program.manifest.digest if program is not None else "",
                run=Run(request_id=f"r{token}", sampling_params=sampling_params),
                origin=ev.Origin(
                    arrived_at_ms=now_ms,
                    priority=priority,
                    deadline_at_ms=None if deadline_ms is None else now_ms + deadline_ms,
                    caller=caller,
                    connection=connection,
                ),
            )
        )
        return token

    def train(
        self, job: JobName, training: Training, *, priority: int = 1, devices: tuple[str, ...] = ()
    ) -> ev.Token:
        """Submit a job; a job with a known name keeps its script."""
        self._scene.scripts.setdefault(job, training)
        token = self.token()
        self._handle(
            ev.TrainRequest(
                token=token,
                spec=ev.JobSpec(name=job, entry="", args=(), priority=priority, devices=devices),
            )
        )
        return token

    def ask(self, job: JobName, action: Action) -> ev.Token:
        """Send a request about a job, and return its token."""
        token = self.token()
        self._handle(ev.JobRequest(token=token, job=job, action=action))
        return token
