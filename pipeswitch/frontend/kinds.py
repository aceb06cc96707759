"""Kinds of requests that extras add (seam ``KINDS``), and what the frontend offers to them.

A request of a kind needs one run after the other. The extra has a class, a ``requests.Kind``, whose
only argument is the ``KindContext``. Its handlers of verbs read a request, prepare the first run,
accept the request, and take its event. From then on the scheduler asks for the next run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec

from ..base.extras import KINDS
from ..ipc.messages.base import Message
from ..ipc.messages.run import Run
from ..programs.interface.layout import Manifest
from ..scheduler.state.events import InferArrived, ModelAvailable, Reply, Token
from ..scheduler.state.records import Request
from ..wire.frames import RequestHeader
from .inference import IncomingRequest, Inference
from .intake.validation import Body
from .requests import Handler, Kind, Pending
from .transport.clients import Session
from .transport.send_queue import SendQueue


class KindRequest(msgspec.Struct, eq=False):
    """A request before its acceptance. Its kind reads the rest of the body."""

    header: RequestHeader
    tensors: Sequence[Any]  # the bytes of its inputs
    body: Body
    arrival: IncomingRequest
    announced: ModelAvailable  # the version of the model that it names


class KindContext:
    """Part of the frontend that a kind may use, in the loop's thread.

    Attributes:
        take: queues an event for the scheduler.
        answer: sends a reply to an accepted request; a final reply ends it.
        reply: sends a reply to a request that is not accepted, such as a query.
        call_soon: schedules a call in the loop; any thread may call it.
        now_ms: returns the time.
        copier: thread for what takes long, such as reading a file.
        fork: starts a process with a name and settings (seam ``PROCESSES``); at its end, calls a
            function with its message, or None, and its exit status. The controller sets it.
        pool: shared memory for the inputs of runs.
        blocks: blocks of this memory, for what a request keeps between its runs.
        sequence_keys: caller and id of each sequence; other state's rows must not reuse them.
        models: models by name.
        models_dir: folder with a folder for each model, by digest.
    """

    fork: Callable[[str, Message, Callable[[Message | None, int], None]], None]

    def __init__(self, inference: Inference, outbox: SendQueue, models_dir: Path) -> None:
        requests = self._requests = inference.requests
        self.take, self.answer, self.reply = inference.take, inference.answer, outbox.reply
        self.call_soon, self.now_ms = inference.call_soon, inference.now_ms
        self.copier, self._inference = inference.copier, inference
        self.pool, self.blocks = requests.pool, requests.sequences.blocks
        self.sequence_keys = requests.sequences.held
        self.models, self.models_dir = inference.models, models_dir

    @property
    def next_token(self) -> Token:
        """Token of the request that is accepted next."""
        return self._requests.next_token

    def read(self, client: Session, header: RequestHeader, tensors: Sequence[Any]) -> KindRequest:
        """Read a request's sender, model and urgency.

        Raises:
            PipeSwitchError: a field is invalid or not allowed, or the model does not exist.
        """
        arrival, body = self._inference.arrival_of(client), Body(header.op, header.body)
        arrival.read_asker(body)
        announced = self.models.find(header.model, arrival.version, arrival.origin.caller)
        self._inference.read_urgency(arrival, header, announced)
        return KindRequest(header, tensors, body, arrival, announced)

    def accept(
        self, kind: Kind, request: KindRequest, run: Run, state: Any
    ) -> tuple[Pending, InferArrived]:
        """Accept a request, whose ``state`` only its kind uses; return its event for ``take``."""
        arrival, announced = request.arrival, request.announced
        pending = self._requests.accept(arrival.client, request.header)
        pending.kind, pending.state = kind, state
        pending.caller, pending.trace_id = arrival.origin.caller, arrival.trace_id
        pending.bytes_in = sum(map(len, request.tensors))
        return pending, InferArrived(
            token=pending.token,
            model=announced.model,
            digest=announced.manifest.digest,
            run=run,
            origin=arrival.origin,
            tenant=announced.tenant,
        )


class Kinds:
    """The scheduler's ``RunKind``: passes each of its calls on to the kind of that request."""

    def __init__(self, context: KindContext, inference: Inference) -> None:
        self.context, self._requests = context, inference.requests
        self.all: list[Kind] = [KINDS.load(name)(context) for name in KINDS.names()]
        self._requests.sequences.others += [one.states for one in self.all]

    @property
    def handlers(self) -> Mapping[str, Handler]:
        """Handlers of the kinds' verbs."""
        return {verb: handler for one in self.all for verb, handler in one.handlers.items()}

    def notes(self, manifest: Manifest) -> list[str]:
        """Return the kinds' notes for the users of a model."""
        return [note for one in self.all for note in one.notes(manifest)]

    def _of(self, request: Request) -> Kind:
        return cast(Kind, self._requests.waiting(request.token).kind)

    def ended(self, request: Request, answer: Reply) -> Reply:
        return self._of(request).ended(request, answer)

    def renew(self, request: Request) -> None:
        self._of(request).renew(request)

    def prepare(self, request: Request) -> Run | None:
        return self._of(request).prepare(request)

    def poll(self, waiting: Mapping[Token, Request]) -> Iterable[tuple[Token, Run]]:
        self._requests.sequences.expire()  # first, so that the kinds can use the freed memory
        for kind in self.all:
            yield from kind.poll(waiting)
