"""Frontend of the controller: converts clients' bytes to typed events, and answers to bytes.

It owns the sockets and runs in the controller's one loop (docs/adr/0009). It decides nothing about
models or devices. An allowed, well-formed message becomes an event for the scheduler, and an answer
becomes a message. Its parts: ``Sessions`` (clients, their connections and messages),
``Inference`` with the ``RequestPool`` (inputs and replies), ``Requests`` (pending answers),
``OwnVerbs`` (verbs handled here), ``VERBS`` (table of all verbs). See docs/protocol.md.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
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
    InvalidInput,
    ModelNotFound,
    PermissionDenied,
    PipeSwitchError,
    QueueFull,
    RemoteProtocolError,
    ServerUnavailable,
)
from ..base.extras import COMPOSITES
from ..base.failpoints import reach
from ..base.roles import Principal, Role, in_order
from ..base.units import nearest
from ..commits.commit_files import load_commit
from ..commits.progress import HANDED_ON, read_life
from ..scheduler.state import events as ev
from ..scheduler.state.versions import split_name
from ..wire.frames import VERSION, RequestHeader, decode_request
from ..wire.stream import WireMessage
from .disk import Disk
from .inference import Inference
from .intake.request_log import RequestLog, log_published
from .intake.request_pool import RequestPool
from .job_files import read_piece
from .kinds import KindContext, Kinds
from .own_verbs import OwnVerbs
from .requests import INFERS, Requests
from .sequences.manager import Sequences
from .transport.clients import Session
from .transport.connection_manager import POOL_PARTS, ClientConnection, ClientSegments
from .transport.listeners import Listeners, open_listeners
from .transport.replies import envelope_id, redact, wrong_version
from .transport.sessions import Sessions, caller_of
from .uploads import CREDIT_CHUNKS, Uploads
from .verbs import VERBS, LogPiece, Rules, ask

_logger = logging.getLogger(__name__)

MAX_CLIENT_REQUESTS: Final = 4096  # unanswered requests of one client
BACKLOG_LOOK_S: Final = 0.1  # interval between checks of clients that do not read replies
STOP_FLUSH_MS: Final = 1000
# Verbs that do not look up an alias.
OF_NAMES: Final = ("register", "unregister", *COMPOSITES.names())

Posted = ev.Reply | ev.Publish | ev.ModelAvailable | ev.ModelRemoved | ev.LoadCommits
"""Commands of the scheduler that the frontend performs."""


class Frontend:
    """Client traffic of one server. Threads other than the loop's may only call ``answer_soon``.

    ``open`` binds the listeners, and ``watch`` registers the descriptors to wait for. After each
    wait of at most ``wait_s``, call ``step``. ``close`` answers the remaining requests.
    """

    def __init__(
        self,
        config: Config,
        pool_descriptor: int,
        take: Callable[[ev.Event], None],
        *,
        facts: Mapping[str, Any] | None = None,
        why_not_ready: Callable[[], str] = lambda: "",
        pool_of: Callable[[str], int] | None = None,
        now_ms: Callable[[], float] = lambda: time.monotonic() * 1000,
    ) -> None:
        """Map the request pool. Open no socket yet.

        Args:
            config: settings, with absolute ``server.state_dir`` and ``server.runtime_dir``.
            pool_descriptor: a sealed memfd with the request pool; the caller still owns it.
            take: queues an event for the scheduler.
            facts: the server's facts in replies to ``hello`` and ``ping`` (device, arena_bytes…).
            why_not_ready: returns why no request would be served now; empty if it would.
            pool_of: returns a tenant's file of the pool, if tenants are separate.
            now_ms: the monotonic clock.
        """
        self._config, self._take, self._now_ms = config, take, now_ms
        self._facts = dict(facts or {})
        self.owner_facts: Mapping[str, Any] = {}  # more facts, for the owner alone
        self._why_not_ready = why_not_ready
        self.pool = RequestPool(pool_descriptor, pool_of)
        state = self._state_directory = Path(config.server.state_dir)
        self.disk = Disk(state, config.server.max_disk, config.server.max_disk_per_client)
        self.uploads = Uploads(state / "uploads", config.server.max_upload_bytes, self.disk)
        self._rules = Rules(
            allow_code=config.server.allow_code, uploads_dir=str(self.uploads.directory)
        )
        self.sessions = Sessions(
            config.server,
            ClientSegments(self.pool.capacity_bytes // POOL_PARTS if config.server.shares else 0),
            self.pool.share_bytes,
            hear=self._on_message,
            ended=self._ended,
            now_ms=now_ms,
        )
        self._outbox = self.sessions.outbox
        self._request_log = RequestLog(state / "logs", config.log, self.sessions.complaints)
        self.sequences = Sequences(self.pool, now_ms)
        self.requests = Requests(self.pool, self._request_log, self.sequences)
        self.inference = Inference(
            self.requests,
            take=take,
            answer=self._answer,
            call_soon=self.call_soon,
            now_ms=now_ms,
            max_bytes=config.server.max_message_bytes,
            deadline_ms=config.scheduler.default_deadline_ms or None,
        )
        self.sessions.peers.lend, self.pool.call_soon = self.inference.lend, self.call_soon
        self._calls: deque[Callable[[], None]] = deque()  # queued by the copier and upload writer
        context = KindContext(self.inference, self._outbox, state / "models")
        self.kinds = Kinds(context, self.inference)
        self._own = OwnVerbs(config, self.sessions, self.inference, self.uploads, self.kinds)

    # ---- life ----------------------------------------------------------------------------------

    def open(self) -> Listeners:
        """Bind all listeners, start the helper threads, and return the listeners.

        Raises:
            ConfigError: an address or folder cannot be used.
            PipeSwitchError: a port or the ipc name is in use.
        """
        self._listeners = open_listeners(self._config.server)
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.uploads.start()
        return self._listeners

    def watch(self, selector: selectors.BaseSelector) -> None:
        """Register the descriptors to wait for. Each key's data is a callable for the loop."""
        self.sessions.peers.watch(selector, self._listeners.ours)
        wake = self._wake
        selector.register(wake, selectors.EVENT_READ, lambda: os.eventfd_read(wake))

    def unwatch(self, selector: selectors.BaseSelector) -> None:
        """Unregister the descriptors, before ``close``."""
        self.sessions.peers.unwatch(selector, self._listeners.ours)
        selector.unregister(self._wake)

    def close(self) -> None:
        """Answer the remaining requests with ServerUnavailable, flush, close everything."""
        self.uploads.stop()
        self.inference.copier.shutdown()  # ``_finish`` runs calls that uploads and copier queued
        self._finish()
        for peer in list(self.sessions.peers.all):
            self.sessions.peers.part(peer)
        self._listeners.close()
        self._request_log.close()
        os.close(self._wake)
        self.pool.close()

    def call_soon(self, call: Callable[[], None]) -> None:
        """Schedule a call in the loop. Any thread may call this; it never blocks."""
        self._calls.append(call)
        with contextlib.suppress(BlockingIOError):  # the counter is full: the loop wakes anyway
            os.eventfd_write(self._wake, 1)

    # ---- the loop's part -----------------------------------------------------------------------

    def wait_s(self) -> float | None:
        """Return how many seconds the loop may wait; None: until a descriptor wakes it."""
        connections, peers = self.sessions.connections, self.sessions.peers
        if self._calls or self._own.unfinished or peers.turns:
            return 0.0
        until_s = min(connections.next_at_s, peers.rests_until_s)
        waits_s = None if until_s == math.inf else max(0.0, until_s - self._now_ms() / 1000)
        if self.sequences.held or self.sequences.blocks.cached_bytes:
            idle_s = self.sequences.expire() / 1000
            waits_s = idle_s if waits_s is None else min(waits_s, idle_s)
        if not self._outbox.backlogged:
            return waits_s
        if self._outbox.needs_poll:
            return 0.0
        return BACKLOG_LOOK_S if waits_s is None else min(waits_s, BACKLOG_LOOK_S)

    def step(self) -> None:
        """Do the work of one iteration of the loop."""
        while self._calls:
            self._calls.popleft()()
        if self._own.unfinished:
            self._own.in_pieces(self._own.unfinished.popleft())
        connections, peers = self.sessions.connections, self.sessions.peers
        if peers.turns:
            peers.turn()
        if self._outbox.backlogged:
            self._outbox.sweep()
        if peers.resting and self._now_ms() / 1000 >= peers.rests_until_s:
            peers.wake()
        if connections.next_at_s != math.inf:
            connections.tick(self._now_ms() / 1000)

    def perform(self, posted: Posted) -> None:
        """Execute a command of the scheduler now."""
        match posted:
            case ev.Reply():
                self._answer(posted)
            case ev.Publish():
                self.sessions.readers.publish(posted)
                log_published(posted)
            case ev.ModelAvailable():
                self.inference.models.announce(posted)
            case ev.ModelRemoved(model=model, failure=failure, aliases=aliases):
                self.inference.models.retract(model, failure, aliases)
                self.sequences.retract(model)
                self.requests.recent_ms.pop(split_name(model), None)
            case ev.LoadCommits(request=request):
                self._load(request, self._state_directory / "commits" / request.job)

    def answer_soon(self, answer: ev.Reply) -> None:
        """Queue an answer for the loop to send. Any thread may call this; it never blocks."""
        self.call_soon(lambda: self._answer(answer))

    def _finish(self) -> None:
        """Run the queued calls, then answer every waiting request, then flush all messages."""
        while self._calls:
            self._calls.popleft()()
        for token in self.requests.tokens():
            error = ServerUnavailable("the server stopped", hint="pipeswitch serve")
            self._answer(ev.Reply(token=token, error=error))
        self.sessions.finish(STOP_FLUSH_MS)

    # ---- in ------------------------------------------------------------------------------------

    def _on_message(self, peer: ClientConnection, message: WireMessage) -> None:
        """Handle one message. No message may make this method raise."""
        if failpoints.is_on:
            reach("frontend.message")
        parts, request_id = message.parts, ""
        client: Session | None = None
        try:
            try:
                header = decode_request(parts)
            except RemoteProtocolError as error:
                request_id = envelope_id(parts)
                raise wrong_version(parts) or error from None
            request_id, op = header.id, header.op
            if header.model in self.inference.models.aliases and op not in OF_NAMES:
                name = self.inference.models.aliases[header.model]
                header = msgspec.structs.replace(header, model=name)
            verb = VERBS.get(op)
            if verb is None:
                raise RemoteProtocolError(f"no verb {op[:40]!r}{nearest(op[:40], VERBS)}")
            if op == "hello":
                client = self.sessions.greet(peer)
                self._outbox.reply(client, header.id, body=self._about(client.principal))
                return
            if op == "ping" and not header.body:
                self.sessions.reply_now(peer, header.id, body=self._about(peer.principal))
                return
            if op == "caller" and peer.client is None:
                peer.principal = caller_of(peer.principal, header)
                return
            client = peer.client
            if client is None or client.session != header.session or client.is_gone:
                client = None
                raise RemoteProtocolError(
                    "unknown session: send hello first", reason="unknown_session"
                )
            if message.shared and op not in INFERS:  # the sender can still change the tensors
                raise RemoteProtocolError("only an inference may put tensors into shared memory")
            if header.id in client.requests or header.id in client.subscriptions:
                raise InvalidInput(f"request id {header.id!r} is already in use")
            if len(client.requests) >= MAX_CLIENT_REQUESTS:
                raise QueueFull(
                    f"{len(client.requests)} requests of this client are already waiting",
                    limit="client_requests",
                )
            try:
                if verb.role not in client.principal.roles:
                    raise client.principal.refusal(verb.role, op)
                self._own.handlers.get(op, self._ask)(client, header, parts[2:])
            except PipeSwitchError as error:
                self.requests.reject(client, header, error)
                raise
        except PipeSwitchError as error:
            self._refuse(peer, client, request_id, error)

    def _refuse(
        self,
        peer: ClientConnection,
        client: Session | None,
        request_id: str,
        error: PipeSwitchError,
    ) -> None:
        """Count a malformed message, and reply with the error if the request id is known."""
        if isinstance(error, RemoteProtocolError):
            self.sessions.complaints.add(peer.principal.tenant, error)
        if not request_id:
            return
        if client is not None:
            self._outbox.reply(client, request_id, error=error)
        else:
            self.sessions.reply_now(peer, request_id, error=error)

    # ---- verbs ---------------------------------------------------------------------------------

    def _about(self, principal: Principal) -> dict[str, Any]:
        """Return the server's facts that this client may read."""
        why = self._why_not_ready()
        is_code_named = principal.is_owner or bool(self._config.server.allow_code)
        return {
            "server": "pipeswitch",
            "protocol": VERSION,
            "pid": os.getpid(),
            "accepts_code": is_code_named and Role.CODE in principal.roles,
            "is_owner": principal.is_owner,
            "roles": in_order(principal.roles),
            "max_message_bytes": self._config.server.max_message_bytes,
            "credit": CREDIT_CHUNKS,
            "ready": not why,
            "why": why,
            **self._facts,
            **(self.owner_facts if principal.is_owner else {}),
        }

    def _ask(self, client: Session, header: RequestHeader, _: Sequence[Any]) -> None:
        """Handle a verb that is one event for the scheduler."""
        token = self.requests.next_token
        request = ask(header, token, client.principal, self._rules)
        if isinstance(request, LogPiece):  # read from disk, without the scheduler
            piece = read_piece(
                self._state_directory, request.job, request.kind, request.offset_bytes
            )
            self._outbox.reply(client, header.id, body=piece)
        else:
            pending = self.requests.accept(client, header)
            if isinstance(request, ev.RegisterModelRequest | ev.VersionRequest):
                pending.uploads = self.uploads.pin(request.spec)
            if isinstance(request, ev.RegisterModelRequest):
                request = msgspec.structs.replace(request, client=request.tenant or client.session)
            if isinstance(request, ev.TrainRequest) and request.resumes:
                self._load(request, self._state_directory / "jobs" / request.spec.name / "commit")
                return
            self._take(request)

    def _load(self, request: ev.TrainRequest | ev.JobRequest, folder: Path) -> None:
        """Read a commit on the upload writer's thread, then send the request to the scheduler."""
        self.uploads.run_later(
            functools.partial(self._read_commit, request, folder),
            lambda error: self.answer_soon(ev.Reply(token=request.token, error=error)),
        )

    def _read_commit(self, request: ev.TrainRequest | ev.JobRequest, folder: Path) -> None:
        pending = self.requests.find(request.token)
        if pending is None:
            return
        damage: list[str] = []
        try:
            commit = load_commit(folder, damage.append)
            if commit is None and isinstance(request, ev.JobRequest):
                raise FileNotFoundError(f"there is none in {folder}")
        except (RemoteProtocolError, OSError) as error:
            job = request.job if isinstance(request, ev.JobRequest) else request.spec.name
            refusal = ServerUnavailable(f'the commit of job "{job}" cannot be read: {error}')
            self.answer_soon(ev.Reply(token=request.token, error=refusal))
            return
        if commit is not None:
            pending.commit, slot_bytes, record = commit
            why = f"continues from step {record.step}: {'; '.join(damage)}" if damage else ""
            loaded = ev.LoadedCommit(slot_bytes, record.step, pending.commit, why)
            request = msgspec.structs.replace(request, loaded=loaded)
        if isinstance(request, ev.TrainRequest):
            before = read_life(folder.with_name(HANDED_ON))
            request = msgspec.structs.replace(
                request,
                restarts=before.restarts,
                steps_recomputed=before.steps_recomputed,
                last_step=before.step,
            )
        self.call_soon(lambda: self._take(request))

    # ---- out -----------------------------------------------------------------------------------

    def _answer(self, answer: ev.Reply) -> None:
        """Send a reply to an accepted request. A final reply ends the request."""
        pending = self.requests.find(answer.token)
        if pending is None:
            return  # the request had its final answer
        if pending.op == "infer" and (pending.after or pending.timing or pending.run):
            outcome = self.inference.advance(pending, answer)
            if outcome is None:
                return
            answer = outcome
        if pending.kind is not None and not answer.more:
            pending.kind.drop(pending)
        client, verb = pending.client, VERBS[pending.op]
        if pending.op == "ps":
            known = self.sequences.by_model()  # for the first of a model's rows (one per device)
            for row in answer.body.get("rows", ()):
                row |= known.pop(row["name"], {}) if row["kind"] == "model" else {}
        if pending.op in ("register", "models", "show"):
            self._add_notes(answer.body)
        if verb.is_cut and not client.is_gone:
            body = self._completed(answer.body) if pending.op == "stats" else answer.body
            body = redact(pending.op, body, client.principal, client.counts.as_dict())
            answer = msgspec.structs.replace(answer, body=body)
        if verb.of_owner and isinstance(answer.error, PermissionDenied):
            what = f'{pending.op} of "{pending.model}", which is another client\'s,'
            refusal = client.principal.refusal(Role.OPERATE, what)
            answer = ev.Reply(token=answer.token, error=refusal)
        elif isinstance(answer.error, ModelNotFound) and (
            "like" in answer.error.data or (verb.of_model and not answer.error.data)
        ):
            name = answer.error.data.get("like", pending.model)
            error = self.inference.models.missing(name, client.principal.tenant)
            answer = ev.Reply(token=answer.token, error=error)
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

    def _add_notes(self, body: dict[str, Any]) -> None:
        """Add the notes of the kinds to each model's row."""
        manifests = {
            one.manifest.digest: one.manifest for one in self.inference.models.current.values()
        }
        for row in (body, body.get("model"), *body.get("models", ())):
            manifest = manifests.get(row.get("digest", "")) if isinstance(row, dict) else None
            if manifest is not None and (notes := self.kinds.notes(manifest)):
                row["notes"] = [*row["notes"], *notes]

    def _completed(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return ``stats`` with the values that only this thread has: counters, clients, pool."""
        return {
            **body,
            **self.requests.counts.as_dict(),
            "inference": self.requests.inference.as_dict(),
            "last_error": self.requests.last_error,
            "latency": self.requests.latencies(),
            "clients": len(self.sessions.clients),
            "malformed": self.sessions.complaints.count,
            "queue_full": self.requests.queue_full_count,
            "slow_clients": self.sessions.slow_count,
            "connections": len(self.sessions.connections),
            "hung_up": dict(self.sessions.connections.hung_up),
            **self.pool.as_dict(),
            **self.sequences.as_dict(),
            **self.sessions.peers.shares.as_dict(),
        }

    def _ended(self, client: Session) -> None:
        """Cancel the pending requests of a client that is gone."""
        self.uploads.remove_session(client.session)
        self.sequences.remove_client(client)
        self._own.take_all_back(client)
