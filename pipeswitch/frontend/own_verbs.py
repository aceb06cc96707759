"""Verbs that the frontend handles itself, instead of sending one event to the scheduler."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from ..base.config import Config
from ..base.errors import Cancelled, InvalidInput, PipeSwitchError
from ..base.extras import KINDS, REPLIES
from ..scheduler.state.events import CancelRequest
from ..wire.frames import RequestHeader
from .inference import Inference
from .intake import validation
from .intake.validation import Body
from .kinds import Kinds
from .requests import Handler, Pending
from .transport.clients import Session
from .transport.sessions import Sessions
from .uploads import CREDIT_CHUNKS, Uploads
from .verbs import VERBS

CANCELS: Final = 32  # requests that are cancelled at once, each in 0.1 ms


class OwnVerbs:
    """Handlers of the frontend's own verbs. Used by the loop's thread."""

    def __init__(
        self,
        config: Config,
        sessions: Sessions,
        inference: Inference,
        uploads: Uploads,
        kinds: Kinds,
    ) -> None:
        self._config, self._outbox = config, sessions.outbox
        self._inference, self._uploads = inference, uploads
        self._requests, self._sequences = inference.requests, inference.requests.sequences
        self._call_soon, self._take = inference.call_soon, inference.take
        self.unfinished: deque[Iterator[None]] = deque()  # work that is done in pieces
        self.handlers: Mapping[str, Handler] = {
            "infer": inference.infer,
            "prefetch": inference.prefetch,
            "cancel": self._cancel,
            "events": sessions.readers.add,
            "caller": sessions.change_caller,
            "put": self._put,
            "sequences": self._ask_sequences,
            **dict.fromkeys(REPLIES.names(), self._ask_extra),
            **{name: self._refuse_kind for name, verb in VERBS.items() if verb.kind},
            **kinds.handlers,
        }

    def take_back(self, pending: Pending) -> None:
        """Cancel a pending request."""
        if pending.is_copying:
            pending.is_cancelled = True
        else:
            pending.is_cancelled = pending.run is not None  # no further step starts then
            self._take(CancelRequest(token=pending.token))

    def take_all_back(self, client: Session) -> None:
        """Cancel the pending requests of a client that is gone."""
        tokens = [*client.requests.values()]
        client.requests.clear()

        def cancel() -> Iterator[None]:
            for number, token in enumerate(tokens, 1):
                pending = self._requests.find(token)
                if pending is not None and VERBS[pending.op].ends_with_client:
                    self.take_back(pending)
                if not number % CANCELS:
                    yield

        self.in_pieces(cancel())

    def in_pieces(self, work: Iterator[None]) -> None:
        """Do the next piece of some work, and one more in each later iteration of the loop."""
        for _ in work:
            self.unfinished.append(work)
            return

    def _cancel(self, client: Session, header: RequestHeader, _: Sequence[Any]) -> None:
        body = Body("cancel", header.body)
        request_id = body.text("id")
        body.done()
        token = client.requests.get(request_id)
        is_reading = client.subscriptions.pop(request_id, None) is not None
        if token is not None:
            self.take_back(self._requests.waiting(token))
        elif is_reading:
            self._outbox.reply(client, request_id, error=Cancelled("these events were cancelled"))
        self._outbox.reply(client, header.id, body={"found": token is not None or is_reading})

    def _ask_sequences(self, client: Session, header: RequestHeader, _: Sequence[Any]) -> None:
        body = Body("sequences", header.body)
        caller = validation.tenant_of(body, client.principal.tenant)
        ends = body.text("end", "")
        body.done()
        if ends:
            token = self._sequences.end(ends, caller)
            if token is not None:
                self.take_back(self._requests.waiting(token))
        is_all = client.principal.may_operate and not caller

        def list_rows() -> Iterator[None]:
            rows = []
            for piece in self._sequences.rows(None if is_all else caller):
                rows += piece
                yield
            self._outbox.reply(client, header.id, body={"sequences": rows})

        self.in_pieces(list_rows())

    def _ask_extra(self, client: Session, header: RequestHeader, _: Sequence[Any]) -> None:
        """Reply to a verb of an extra, whose body is empty."""
        Body(header.op, header.body).done()
        self._outbox.reply(client, header.id, body=REPLIES.load(header.op)(self._config))

    def _refuse_kind(self, _: Session, header: RequestHeader, __: Sequence[Any]) -> None:
        KINDS.load(VERBS[header.op].kind)

    def _put(self, client: Session, header: RequestHeader, tensors: Sequence[Any]) -> None:
        if len(tensors) > 1:
            raise InvalidInput("put: a chunk must be one frame")
        if client.upload_chunks >= CREDIT_CHUNKS:
            raise InvalidInput(f"put: at most {CREDIT_CHUNKS} chunks may be unanswered")

        def reply(body: dict[str, Any], error: PipeSwitchError | None) -> None:
            def send() -> None:
                client.upload_chunks -= 1
                self._outbox.reply(client, header.id, body=body, error=error)

            self._call_soon(send)

        self._uploads.offer(
            client.session,
            header,
            tensors[0] if tensors else b"",
            reply,
            tenant=client.principal.tenant,
        )
        client.upload_chunks += 1
