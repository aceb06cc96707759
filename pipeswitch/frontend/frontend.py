"""Clients' side of the controller: their bytes to typed events, answers to their bytes.

It owns the sockets and runs in the controller's one loop (docs/adr/0009). It decides nothing
about models or devices: a message that is well formed and allowed becomes an event for the
scheduler, an answer becomes a message. Its parts: ``Peers`` (the connections) and ``Connections``
(what strangers may hold), ``Inference`` with the ``RequestPool`` (inputs and replies), ``Requests``
(what is owed), ``Outbox`` (what leaves), ``VERBS`` (all else). The protocol: docs/protocol.md.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import select
import selectors
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from ..base import failpoints
from ..base.config import Config
from ..base.errors import (
    Cancelled,
    InvalidInput,
    ModelNotFound,
    PermissionDenied,
    PipeSwitchError,
    QueueFull,
    RemoteProtocolError,
    ServerUnavailable,
)
from ..base.failpoints import reach
from ..base.roles import Role, Standing, in_order, parse_roles
from ..base.units import nearest
from ..commits.files import load_commit
from ..programs.graphs.bundle import read_bundle
from ..programs.interface.layout import BUNDLE_FILE
from ..scheduler import events as ev
from ..wire.frames import VERSION, RequestHeader, decode_request
from ..wire.stream import Message
from . import admission
from .admission import Body
from .disk import Disk
from .inference import Inference
from .job_files import read_piece
from .request_log import Complaints, RequestLog, tell
from .request_pool import RequestPool
from .requests import Pending, Requests
from .sequences.manager import Sequences, longest
from .transport.clients import Client
from .transport.connections import Connections
from .transport.listeners import Listeners, open_listeners
from .transport.outbox import Outbox, Readers
from .transport.peers import POOL_PARTS, Peers, Shares, StreamPeer
from .transport.replies import envelope_id, reply_frames, told, wrong_version
from .uploads import CREDIT_CHUNKS, Uploads
from .verbs import VERBS, LogPiece, Rules, ask

_logger = logging.getLogger(__name__)

MAX_CLIENT_REQUESTS: Final = 4096  # unanswered ones of one client
BACKLOG_LOOK_S: Final = 0.1  # at who does not read, though nothing happens
STOP_LOOK_MS: Final = 2.0
STOP_FLUSH_MS: Final = 1000
SLOW: Final = "slow or gone"  # why a client is dropped whose end was not read

Posted = ev.Answer | ev.Publish | ev.Announce | ev.Retract | ev.LoadCommits
"""The scheduler's commands that are performed here."""


class Frontend:
    """All client traffic of one server. Everything but ``_call_soon`` belongs to the loop's thread.

    ``open`` binds, ``watch`` names the descriptors to wait for; then, after each wait of at most
    ``wait_s``, ``step`` does what there is to do. ``close`` answers what is left.
    """

    def __init__(
        self,
        config: Config,
        pool_descriptor: int,
        take: Callable[[ev.Event], None],
        *,
        facts: Mapping[str, Any] | None = None,
        is_ready: Callable[[], bool] = lambda: True,
        pool_of: Callable[[str], int] | None = None,
        now_ms: Callable[[], float] = lambda: time.monotonic() * 1000,
    ) -> None:
        """Map the pool; nothing is opened yet.

        Args:
            config: with absolute ``server.state_dir`` and ``server.runtime_dir``.
            pool_descriptor: a sealed memfd, the request pool; it stays the caller's.
            take: takes an event for the scheduler, to be handled later.
            facts: what ``hello`` and ``ping`` tell about the server (device, arena_bytes…).
            is_ready: whether a request would be served now.
            pool_of: where tenants are separate, each one's file of the pool.
            now_ms: the monotonic clock.
        """
        self._config = config
        self._take = take
        self._facts = dict(facts or {})
        self.owner_facts: Mapping[str, Any] = {}  # the same, for the owner alone
        self._is_ready = is_ready
        self._now_ms = now_ms
        self.pool = RequestPool(pool_descriptor, pool_of)
        self._max_message_bytes = config.server.max_message_bytes
        state = Path(config.server.state_dir)
        self._state_directory = state
        self.disk = Disk(state, config.server.max_disk, config.server.max_disk_per_client)
        self.uploads = Uploads(state / "uploads", config.server.max_upload_bytes, self.disk)
        self._rules = Rules(
            allow_code=config.server.allow_code, uploads_dir=str(self.uploads.directory)
        )
        self._clients: dict[str, Client] = {}  # by session
        self.connections = Connections(
            max_count=config.server.max_connections,
            client_bytes=config.server.pool_bytes,  # more than its requests could ever take
            total_bytes=2 * config.server.pool_bytes,
        )
        self.complaints = Complaints(now_ms)
        shares_bytes = self.pool.capacity_bytes // POOL_PARTS if config.server.shares else 0
        self.peers = Peers(
            self.connections,
            self.complaints,
            Shares(shares_bytes),
            self._max_message_bytes,
            hear=self._hear,
            gone=lambda client, cause: self._drop(client, cause),
            now_ms=now_ms,
        )
        self._outbox = Outbox(
            max(self.pool.share_bytes, self._max_message_bytes),
            now_ms,
            lambda client: self._drop(client, SLOW),
        )
        self._readers = Readers(self._outbox)
        self._request_log = RequestLog(state / "logs", config.log, self.complaints)
        self.sequences = Sequences(self.pool, now_ms)
        self.requests = Requests(self.pool, self._request_log, self.sequences)
        self.inference = Inference(
            self.pool,
            self.requests,
            self.sequences,
            take=take,
            answer=self._answer,
            call_soon=self._call_soon,
            now_ms=now_ms,
            max_bytes=self._max_message_bytes,
            deadline_ms=config.scheduler.default_deadline_ms or None,
        )
        self._dropped_count = 0  # clients that did not read
        self._calls: deque[Callable[[], None]] = deque()  # from the copier and the upload writer
        self._ops: dict[str, Callable[[Client, RequestHeader, Sequence[Any]], None]] = {
            "infer": self.inference.infer,
            "prefetch": self.inference.prefetch,
            "cancel": self._cancel,
            "events": self._readers.add,
            "caller": self._caller,
            "put": self._put,
            "sequences": self._ask_sequences,
            "generation": self._ask_generation,
            "nodes": self._ask_nodes,
        }

    # ---- life ----------------------------------------------------------------------------------

    def open(self) -> Listeners:
        """Bind all listeners, start the helper threads; the listeners' addresses.

        Raises:
            ConfigError: an address or folder cannot be used.
            PipeSwitchError: a port or the ipc name is in use.
        """
        self._listeners = open_listeners(self._config.server)
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.uploads.start()
        return self._listeners

    def watch(self, selector: selectors.BaseSelector) -> None:
        """Register what ends a wait; each key's data is a callable, as the loop expects."""
        self.peers.watch(selector, self._listeners.ours)
        wake = self._wake
        selector.register(wake, selectors.EVENT_READ, lambda: os.eventfd_read(wake))

    def unwatch(self, selector: selectors.BaseSelector) -> None:
        """Before ``close``."""
        self.peers.unwatch(selector, self._listeners.ours)
        selector.unregister(self._wake)

    def close(self) -> None:
        """Answer what is left with ServerUnavailable, flush, close everything."""
        self.uploads.stop()
        self.inference.copier.shutdown()  # what they post is sent
        self._finish()
        for peer in list(self.peers.all):
            self.peers.part(peer)
        self._listeners.close()
        self._request_log.close()
        os.close(self._wake)
        self.pool.close()

    def _call_soon(self, call: Callable[[], None]) -> None:
        """From any thread; never blocks."""
        self._calls.append(call)
        with contextlib.suppress(BlockingIOError):  # the counter is full: it will wake anyway
            os.eventfd_write(self._wake, 1)

    # ---- the loop's part -----------------------------------------------------------------------

    def wait_s(self) -> float | None:
        """How long the loop may wait; None: until a descriptor wakes it."""
        if self._calls or self.peers.turns:
            return 0.0
        until_s = min(self.connections.next_at_s, self.peers.rests_until_s)
        waits_s = None if until_s == math.inf else max(0.0, until_s - self._now_ms() / 1000)
        if self.sequences.held or self.sequences.spare:
            idle_s = self.sequences.expire() / 1000
            waits_s = idle_s if waits_s is None else min(waits_s, idle_s)
        if not self._outbox.backlogged:
            return waits_s
        if self._outbox.wants_turn:
            return 0.0
        return BACKLOG_LOOK_S if waits_s is None else min(waits_s, BACKLOG_LOOK_S)

    def step(self) -> None:
        """One turn."""
        while self._calls:
            self._calls.popleft()()
        if self.peers.turns:
            self.peers.turn()
        if self._outbox.backlogged:
            self._outbox.sweep()
        if self.peers.resting and self._now_ms() / 1000 >= self.peers.rests_until_s:
            self.peers.wake()
        if self.connections.next_at_s != math.inf:
            self.connections.tick(self._now_ms() / 1000)

    def perform(self, posted: Posted) -> None:
        """Carry out a command of the scheduler's, now."""
        match posted:
            case ev.Answer():
                self._answer(posted)
            case ev.Publish():
                self._readers.tell(posted)
                tell(posted)
            case ev.Announce():
                self.inference.announce(posted)
            case ev.Retract(model=model):
                self.inference.retract(model)
                self.sequences.retract(model)
            case ev.LoadCommits(asked=asked):
                self._load(asked, self._state_directory / "commits" / asked.job)

    def answer_soon(self, answer: ev.Answer) -> None:
        """``perform`` from any thread; never blocks."""
        self._call_soon(lambda: self._answer(answer))

    def _finish(self) -> None:
        """Orderly end: what was posted, then an answer for everyone still waiting, then flush."""
        while self._calls:
            self._calls.popleft()()
        for token in self.requests.tokens():
            error = ServerUnavailable("the server stopped", hint="pipeswitch serve")
            self._answer(ev.Answer(token=token, error=error))
        until_ms = self._now_ms() + STOP_FLUSH_MS
        while self._outbox.backlogged and self._now_ms() < until_ms:
            self._outbox.sweep()
            waiting = select.poll()
            for peer in self.peers.all:
                if peer.wants_write:
                    waiting.register(peer, select.POLLOUT)
            waiting.poll(STOP_LOOK_MS)
        for client in self._clients.values():
            self._outbox.forget(client)

    # ---- in ------------------------------------------------------------------------------------

    def _hear(self, peer: StreamPeer, message: Message) -> None:
        """One message. Nothing a client sends may raise out of here."""
        if failpoints.is_on:
            reach("frontend.message")
        parts, request_id = message.parts, ""
        client: Client | None = None
        try:
            try:
                header = decode_request(parts)
            except RemoteProtocolError as error:
                request_id = envelope_id(parts)
                raise wrong_version(parts) or error from None
            request_id, op = header.id, header.op
            verb = VERBS.get(op)
            if verb is None:
                raise RemoteProtocolError(f"no verb {op[:40]!r}{nearest(op[:40], VERBS)}")
            if op == "hello":
                self._hello(peer, header)
                return
            if op == "ping" and not header.body:
                self._reply_now(peer, header.id, body=self._about(peer.standing))
                return
            if op == "caller" and peer.client is None:
                peer.standing = _caller_of(peer.standing, header)
                return
            client = peer.client
            if client is None or client.session != header.session or client.is_gone:
                client = None
                raise RemoteProtocolError(
                    "this session is not known here: say hello first", reason="unknown_session"
                )
            if message.shared and op != "infer":  # its sender can still change them
                raise RemoteProtocolError("only an inference's tensors lie in the share")
            if header.id in client.requests or header.id in client.readings:
                raise InvalidInput(f"request id {header.id!r} is already waiting for its answer")
            if len(client.requests) >= MAX_CLIENT_REQUESTS:
                raise QueueFull(f"{len(client.requests)} requests of this client wait already")
            try:
                if verb.role not in client.standing.roles:
                    raise client.standing.refusal(verb.role, op)
                self._ops.get(op, self._ask)(client, header, parts[2:])
            except PipeSwitchError as error:
                self.requests.reject(client, header, error)
                raise
        except PipeSwitchError as error:
            self._refuse(peer, client, request_id, error)

    def _refuse(
        self, peer: StreamPeer, client: Client | None, request_id: str, error: PipeSwitchError
    ) -> None:
        """A typed error when there is an id to answer to; otherwise counted and dropped."""
        if isinstance(error, RemoteProtocolError):
            self.complaints.add(peer.standing.tenant, error)
        if not request_id:
            return
        if client is not None:
            self._outbox.reply(client, request_id, error=error)
        else:
            self._reply_now(peer, request_id, error=error)

    # ---- verbs ---------------------------------------------------------------------------------

    def _about(self, standing: Standing) -> dict[str, Any]:
        """What every client may know."""
        is_code_named = standing.is_owner or bool(self._config.server.allow_code)
        return {
            "server": "pipeswitch",
            "protocol": VERSION,
            "pid": os.getpid(),
            "accepts_code": is_code_named and Role.CODE in standing.roles,
            "is_owner": standing.is_owner,
            "roles": in_order(standing.roles),
            "max_message_bytes": self._max_message_bytes,
            "credit": CREDIT_CHUNKS,
            "ready": self._is_ready(),
            **self._facts,
            **(self.owner_facts if standing.is_owner else {}),
        }

    def _hello(self, peer: StreamPeer, header: RequestHeader) -> None:
        if peer.client is not None:
            # Its answer may have left by half: the rest points at the room that it would give back.
            raise RemoteProtocolError("this connection has said hello", hint="open another one")
        client = Client(peer=peer, standing=peer.standing)
        self._clients[client.session] = client
        peer.greeted(client)
        if not peer.is_owners:
            self.connections.greeted(peer, client.standing.tenant)
        self._outbox.reply(client, header.id, body=self._about(client.standing))

    def _caller(self, client: Client, header: RequestHeader, _: Sequence[Any]) -> None:
        """The roles of one for whom the owner's process speaks are others now."""
        told = _caller_of(client.standing, header)
        for peer in self.peers.all:
            if peer.is_owners and peer.standing.tenant == told.tenant:
                peer.standing = told
                if peer.client is not None:
                    peer.client.standing = told
        self._outbox.reply(client, header.id)

    def _take_back(self, pending: Pending) -> None:
        if pending.is_copying:
            pending.is_cancelled = True
            self.inference.look_again()
        else:
            pending.is_cancelled = pending.run is not None  # no step follows
            self._take(ev.CancelAsked(token=pending.token))

    def _cancel(self, client: Client, header: RequestHeader, _: Sequence[Any]) -> None:
        body = Body("cancel", header.body)
        request_id = body.text("id")
        body.done()
        token = client.requests.get(request_id)
        is_reading = client.readings.pop(request_id, None) is not None
        if token is not None:
            self._take_back(self.requests.waiting(token))
        elif is_reading:
            self._outbox.reply(client, request_id, error=Cancelled("these events were cancelled"))
        self._outbox.reply(client, header.id, body={"found": token is not None or is_reading})

    def _ask_sequences(self, client: Client, header: RequestHeader, _: Sequence[Any]) -> None:
        body = Body("sequences", header.body)
        caller = admission.tenant_of(body, client.standing.tenant)
        ends = body.text("end", "")
        body.done()
        if ends:
            self.sequences.end(ends, caller)
        is_all = client.standing.may_operate and not caller
        rows = self.sequences.rows(None if is_all else caller)
        self._outbox.reply(client, header.id, body={"sequences": rows})

    def _ask_nodes(self, client: Client, header: RequestHeader, _: Sequence[Any]) -> None:
        """Reply with the cluster's table, without the keys of gateways."""
        Body("nodes", header.body).done()
        if not (path := self._config.gateway.cluster):
            raise InvalidInput("this server is not part of a cluster", hint="pipeswitch models")
        try:
            table = msgspec.json.decode(Path(path).read_bytes(), type=dict[str, Any])
        except (OSError, msgspec.DecodeError):
            raise ServerUnavailable("this node has no table yet", hint="ask again") from None
        for facts in table["nodes"].values():
            del facts["gateway_keys"]
        self._outbox.reply(client, header.id, body=table)

    def _ask_generation(self, client: Client, header: RequestHeader, _: Sequence[Any]) -> None:
        body = Body("generation", header.body)
        version, wants_tokenizer = body.count("version", 0), body.flag("tokenizer")
        embeds = body.flag("embedding")
        body.done()
        announced = self.inference.find(header.model, version)
        facts = announced.manifest.extra.get("embedding" if embeds else "generation")
        if not facts and embeds:
            raise InvalidInput(
                f'"{header.model}" embeds no texts',
                hint="register an encoder, or hf:NAME#…Model for a decoder, whose source has a "
                "tokenizer, without --generate",
            )
        if not facts:
            raise InvalidInput(
                f'"{header.model}" generates no text',
                hint=f"pipeswitch register {header.model} hf:NAME --generate",
            )
        told = {key: facts[key] for key in ("vocabulary", "eos_ids", "bos_id")}
        told["context"] = told["piece"] = facts["context"]
        if not embeds:
            told["context"], told["piece"] = longest(announced.manifest, self.pool.share_bytes)
        if told["context"] < 2:
            raise InvalidInput(
                f'the request pool has no room for an answer of "{header.model}"',
                hint="raise [server] pool",
            )
        digest = announced.manifest.digest
        told |= {
            key: facts[key] for key in ("sampling", "has_tokenizer", "pooling") if key in facts
        }
        told |= {"version": announced.version, "digest": digest}
        file = self._state_directory / "models" / digest / BUNDLE_FILE

        def read() -> None:
            """On the copier's thread: a tokenizer may have 30 MB."""
            found = read_bundle(file).generation if wants_tokenizer else None
            if found is not None:
                told.update(
                    tokenizer=found.tokenizer,
                    chat_template=found.chat_template,
                    special=found.special,
                )
            reply(None)

        def reply(error: PipeSwitchError | None) -> None:
            if error is not None:
                error = ServerUnavailable(f'the tokenizer of "{header.model}" cannot be read')
            self._call_soon(lambda: self._outbox.reply(client, header.id, body=told, error=error))

        self.inference.copier.put(read, reply)

    def _put(self, client: Client, header: RequestHeader, tensors: Sequence[Any]) -> None:
        if len(tensors) > 1:
            raise InvalidInput("put: a chunk is one frame")
        if client.upload_chunks >= CREDIT_CHUNKS:
            raise InvalidInput(f"put: at most {CREDIT_CHUNKS} chunks may be unanswered")

        def reply(body: dict[str, Any], error: PipeSwitchError | None) -> None:
            def send() -> None:
                client.upload_chunks -= 1
                self._outbox.reply(client, header.id, body=body, error=error)

            self._call_soon(send)

        self.uploads.offer(
            client.session,
            header,
            tensors[0] if tensors else b"",
            reply,
            tenant=client.standing.tenant,
        )
        client.upload_chunks += 1

    def _ask(self, client: Client, header: RequestHeader, _: Sequence[Any]) -> None:
        """A verb that is one question to the scheduler."""
        token = self.requests.next_token
        asked = ask(header, token, client.standing, self._rules)
        if isinstance(asked, LogPiece):  # the only one that is answered here
            piece = read_piece(self._state_directory, asked.job, asked.kind, asked.offset_bytes)
            self._outbox.reply(client, header.id, body=piece)
        else:
            pending = self.requests.accept(client, header)
            if isinstance(asked, ev.RegisterAsked):
                pending.uploads = self.uploads.pin(asked.spec)
                asked = msgspec.structs.replace(asked, client=asked.tenant or client.session)
            if isinstance(asked, ev.TrainAsked) and asked.resumes:
                self._load(asked, self._state_directory / "jobs" / asked.job / "commit")
                return
            self._take(asked)

    def _load(self, asked: ev.TrainAsked | ev.JobAsked, folder: Path) -> None:
        """Read a commit on another thread, since a large one would block the loop; then
        continue."""
        self.uploads.run_later(
            functools.partial(self._read_commit, asked, folder),
            lambda error: self.answer_soon(ev.Answer(token=asked.token, error=error)),
        )

    def _read_commit(self, asked: ev.TrainAsked | ev.JobAsked, folder: Path) -> None:
        pending = self.requests.find(asked.token)
        if pending is None:
            return
        try:
            found = load_commit(folder)
            if found is None and isinstance(asked, ev.JobAsked):
                raise FileNotFoundError(f"there is none in {folder}")
        except (RemoteProtocolError, OSError) as error:
            refusal = ServerUnavailable(f'the commit of job "{asked.job}" cannot be read: {error}')
            self.answer_soon(ev.Answer(token=asked.token, error=refusal))
            return
        if found is not None:
            pending.commit, slot_bytes, record = found
            loaded = ev.LoadedCommit(slot_bytes, record.step, pending.commit)
            asked = msgspec.structs.replace(asked, loaded=loaded)
        self._call_soon(lambda: self._take(asked))

    # ---- out -----------------------------------------------------------------------------------

    def _answer(self, answer: ev.Answer) -> None:
        """One reply to an accepted request; a final one ends it."""
        pending = self.requests.find(answer.token)
        if pending is None:
            return  # it had its final answer
        if pending.op == "infer" and (pending.after or pending.bill or pending.run):
            found = self.inference.go_on(pending, answer)
            if found is None:
                return
            answer = found
        client, verb = pending.client, VERBS[pending.op]
        if pending.op == "ps":
            known = self.sequences.by_model()  # once each, where a model has a row for each device
            for row in answer.body.get("rows", ()):
                row |= known.pop(row["name"], {}) if row["kind"] == "model" else {}
        if pending.op in ("register", "models", "show"):
            self._note_lengths(answer.body)
        if verb.is_cut and not client.is_gone:
            body = self._completed(answer.body) if pending.op == "stats" else answer.body
            body = told(pending.op, body, client.standing, client.counts.as_dict())
            answer = msgspec.structs.replace(answer, body=body)
        if verb.of_owner and isinstance(answer.error, PermissionDenied):
            what = f'{pending.op} of "{pending.model}", which is another client\'s,'
            refusal = client.standing.refusal(Role.OPERATE, what)
            answer = ev.Answer(token=answer.token, error=refusal)
        elif verb.of_model and isinstance(answer.error, ModelNotFound):
            error = admission.model_not_found(pending.model, self.inference.models)
            answer = ev.Answer(token=answer.token, error=error)
        if answer.more:
            if not client.is_gone:
                self._outbox.send(client, self.requests.progress(pending, answer))
            return
        if pending.uploads:
            self.uploads.unpin(pending.uploads)
        if pending.commit >= 0:
            os.close(pending.commit)
        outgoing = self.requests.end(pending, answer)
        if outgoing is not None:
            self._outbox.send(client, outgoing)

    def _note_lengths(self, body: dict[str, Any]) -> None:
        """Add a note to language models whose answers the pool limits."""
        manifests = {one.manifest.digest: one.manifest for one in self.inference.models.values()}
        for row in (body, body.get("model"), *body.get("models", ())):
            manifest = manifests.get(row.get("digest", "")) if isinstance(row, dict) else None
            generation = manifest.extra.get("generation") if manifest is not None else None
            if manifest is None or not generation:
                continue
            count, context = longest(manifest, self.pool.share_bytes)[0], generation["context"]
            if count < context:
                most = f"{count} tokens with its prompt, of {context}"
                note = f"an answer has at most {most}: [server] pool has room for no more"
                row["notes"] = [*row["notes"], note]

    def _completed(self, body: dict[str, Any]) -> dict[str, Any]:
        """What ``stats`` tells, with what only this thread knows: counters, clients, pool."""
        return {
            **body,
            **self.requests.counts.as_dict(),
            "inference": self.requests.inference.as_dict(),
            "clients": len(self._clients),
            "malformed": self.complaints.count,
            "queue_full": self.requests.queue_full_count,
            "slow_clients": self._dropped_count,
            "connections": len(self.connections),
            "hung_up": dict(self.connections.hung_up),
            **self.pool.as_dict(),
            **self.sequences.as_dict(),
            **self.peers.shares.as_dict(),
        }

    def _reply_now(self, peer: StreamPeer, request_id: str, **fields: Any) -> None:
        """To a connection, with a session or without.

        It takes nothing while an answer is on its way: a session's waits behind it.
        """
        if peer.client is not None and not peer.client.is_gone:
            self._outbox.reply(peer.client, request_id, **fields)
        else:
            peer.send_now(reply_frames(request_id, **fields))

    def _drop(self, client: Client, cause: str) -> None:
        """The client is gone, or is to be: its waiting requests are taken back. Idempotent."""
        if client.is_gone:
            return
        client.is_gone = True  # late answers to it are undeliverable from now on
        del self._clients[client.session]
        self._readers.clients.discard(client)
        self._outbox.forget(client)
        if cause == SLOW:
            if isinstance(client.peer, StreamPeer):
                self.peers.part(client.peer)
            self._dropped_count += 1
        _logger.log(
            logging.WARNING if cause == SLOW else logging.DEBUG,
            "client=%s gone cause=%s waiting=%d", client.session[:8], cause, len(client.requests),
        )  # fmt: skip
        self.uploads.forget(client.session)
        self.sequences.forget(client)
        for token in client.requests.values():
            pending = self.requests.waiting(token)
            if VERBS[pending.op].ends_with_client:
                self._take_back(pending)
        client.requests.clear()


def _caller_of(standing: Standing, header: RequestHeader) -> Standing:
    """For whom the owner's process speaks from now on.

    Raises:
        PermissionDenied: another's does not.
    """
    if not standing.is_owner:
        raise PermissionDenied("only the owner's socket names another caller")
    body = Body("caller", header.body)
    tenant, roles = body.text("tenant"), parse_roles(body.texts("roles"))
    body.done()
    if not tenant:
        raise InvalidInput("caller: tenant must not be empty")
    return Standing(tenant=tenant, roles=roles)
