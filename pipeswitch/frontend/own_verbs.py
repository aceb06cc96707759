"""Verbs that the frontend handles itself, instead of sending one event to the scheduler."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from ..base.config import Config
from ..base.errors import Cancelled, InvalidInput, PipeSwitchError, ServerUnavailable
from ..base.extras import REPLIES
from ..programs.graphs.bundle import read_bundle
from ..programs.interface.layout import BUNDLE_FILE
from ..scheduler.state.events import CancelRequest
from ..wire.frames import RequestHeader
from .generations import Generations
from .inference import Inference
from .intake import validation
from .intake.validation import Body, tenant_of
from .requests import Pending
from .sequences.generation_state import facts_of
from .transport.clients import Session
from .transport.sessions import Sessions
from .uploads import CREDIT_CHUNKS, Uploads
from .verbs import VERBS

CANCELS: Final = 32  # requests that are cancelled at once, each in 0.1 ms
Handler = Callable[[Session, RequestHeader, Sequence[Any]], None]


class OwnVerbs:
    """Handlers of the frontend's own verbs. Used by the loop's thread."""

    def __init__(
        self,
        config: Config,
        sessions: Sessions,
        inference: Inference,
        uploads: Uploads,
        generations: Generations,
    ) -> None:
        self._config, self._outbox = config, sessions.outbox
        self._inference, self._uploads = inference, uploads
        self._requests, self._sequences = inference.requests, inference.requests.sequences
        self._call_soon, self._take = inference.call_soon, inference.take
        self.unfinished: deque[Iterator[None]] = deque()  # work that is done in pieces
        self.handlers: Mapping[str, Handler] = {
            "infer": inference.infer,
            "generate": generations.generate,
            "prefetch": inference.prefetch,
            "cancel": self._cancel,
            "events": sessions.readers.add,
            "caller": sessions.change_caller,
            "put": self._put,
            "sequences": self._ask_sequences,
            "generation": self._ask_generation,
            **dict.fromkeys(REPLIES.names(), self._ask_extra),
        }

    def take_back(self, pending: Pending) -> None:
        """Cancel a pending request."""
        if pending.is_copying:
            pending.is_cancelled = True
        else:
            pending.is_cancelled = pending.run is not None  # a chain starts no further step then
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

    def _ask_generation(self, client: Session, header: RequestHeader, _: Sequence[Any]) -> None:
        body = Body("generation", header.body)
        version, wants_tokenizer = body.count("version", 0), body.flag("tokenizer")
        embeds, caller = body.flag("embedding"), tenant_of(body, client.principal.tenant)
        body.done()
        announced = self._inference.models.find(header.model, version, caller)
        if embeds:
            facts = announced.manifest.extra.get("embedding", {})
            context = facts.get("context", 0)
            if not facts:
                raise InvalidInput(
                    f'"{header.model}" does not embed texts',
                    hint="register an encoder, or hf:NAME#…Model for a decoder, whose source has a "
                    "tokenizer, without --generate",
                )
        else:
            share_bytes = self._requests.pool.share_bytes
            facts, context = facts_of(announced, header.model, share_bytes)[:2]
        result: dict[str, Any] = {key: facts[key] for key in ("vocabulary", "eos_ids", "bos_id")}
        result["context"] = context
        digest = announced.manifest.digest
        result |= {
            key: facts[key] for key in ("sampling", "has_tokenizer", "pooling") if key in facts
        }
        result |= {"version": announced.version, "digest": digest}
        file = Path(self._config.server.state_dir) / "models" / digest / BUNDLE_FILE

        def read() -> None:
            """Read the tokenizer on the copier's thread, because it may have 30 MB."""
            text = read_bundle(file).generation if wants_tokenizer else None
            if text is not None:
                result.update(
                    tokenizer=text.tokenizer, chat_template=text.chat_template, special=text.special
                )
            reply(None)

        def reply(error: PipeSwitchError | None) -> None:
            if error is not None:
                error = ServerUnavailable(f'the tokenizer of "{header.model}" cannot be read')
            self._call_soon(lambda: self._outbox.reply(client, header.id, body=result, error=error))

        self._inference.copier.put(read, reply)

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
