"""Clients' side of the controller: their bytes to typed events, answers to their bytes.

It owns the sockets and runs in the controller's one loop (docs/adr/0009). It decides nothing
about models or devices: a message that is well formed and allowed becomes an event for the
scheduler, an answer becomes a message. Its parts: ``RequestPool`` (the
memory of inputs and replies), ``Requests`` (what is owed), ``StreamPeer`` and ``Outbox`` (to whom,
and on its way), ``Connections`` (what strangers may hold). The protocol: docs/protocol.md.
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
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from ..config import Config
from ..errors import (
    Cancelled,
    InvalidInput,
    ModelNotFound,
    PermissionDenied,
    PipeSwitchError,
    QueueFull,
    RemoteProtocolError,
    ServerUnavailable,
    TaskFailed,
)
from ..failpoints import reach
from ..ipc.messages import ModelName
from ..lane import Lane
from ..roles import URGENT_PRIORITY, Role, Standing, in_order, parse_roles
from ..scheduler.events import (
    Announce,
    Answer,
    CancelAsked,
    Event,
    InferArrived,
    PrefetchHint,
    Prepared,
    Publish,
    RegisterAsked,
    Retract,
    TakeResult,
)
from ..scheduler.models.versions import split_name
from ..units import nearest
from ..wire.frames import VERSION, RequestHeader, WireTensor, decode_request
from . import admission
from .admission import Admitted, Body
from .clients import Client, Outgoing
from .complaints import Complaints
from .connections import Connections
from .disk import Disk
from .job_files import read_piece
from .listeners import Listener, Listeners, open_listeners
from .outbox import Outbox
from .peers import POOL_PARTS, Shares, StreamPeer, accept
from .replies import envelope_id, reply_frames, told, wrong_version
from .request_pool import RequestPool, Room
from .requests import Pending, Requests
from .uploads import CREDIT_CHUNKS, Uploads
from .verbs import VERBS, LogPiece, Rules, ask

_logger = logging.getLogger(__name__)

INLINE_COPY_BYTES: Final = 1 << 20  # about 0.1 ms: what a hop to another thread and back costs
MAX_CLIENT_REQUESTS: Final = 4096  # unanswered ones of one client
MAX_READINGS: Final = 16  # of events, by one client
READER_BYTES: Final = 1 << 20  # of events that wait for who does not read
MAX_FITTING: Final = 256  # shapes of all models that are not checked again
BACKLOG_LOOK_S: Final = 0.1  # at who does not read, though nothing happens
STOP_LOOK_MS: Final = 2.0
STOP_FLUSH_MS: Final = 1000
SLOW: Final = "slow or gone"  # why a client is dropped whose end was not read

Posted = Answer | Publish | Announce | Retract
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
        take: Callable[[Event], None],
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
        self._pool = RequestPool(pool_descriptor, pool_of)
        self._max_message_bytes = config.server.max_message_bytes
        state = Path(config.server.state_dir)
        self._state_directory = state
        self.disk = Disk(state, config.server.max_disk, config.server.max_disk_per_client)
        self._default_deadline_ms = config.scheduler.default_deadline_ms or None
        self._uploads = Uploads(state / "uploads", config.server.max_upload_bytes, self.disk)
        self._copier = Lane("pipeswitch-copy")
        self._rules = Rules(
            allow_code=config.server.allow_code, uploads_dir=str(self._uploads.directory)
        )
        self._models: dict[str, Announce] = {}  # the current versions
        self._versions: dict[tuple[str, int], Announce] = {}  # all of them
        self._fitting: dict[Hashable, Admitted] = {}  # shapes that were checked, by model and sizes
        self._clients: dict[str, Client] = {}  # by session
        self.connections = Connections(
            max_count=config.server.max_connections,
            client_bytes=config.server.pool_bytes,  # more than its requests could ever take
            total_bytes=2 * config.server.pool_bytes,
        )
        self.complaints = Complaints(now_ms)
        shares_bytes = self._pool.capacity_bytes // POOL_PARTS if config.server.shares else 0
        self._memory_shares = Shares(shares_bytes)
        self._outbox = Outbox(max(self._pool.share_bytes, self._max_message_bytes))
        self.requests = Requests(self._pool, now_ms)
        self._peers: set[StreamPeer] = set()
        self._turns: set[StreamPeer] = set()  # of them, those that may have something to read
        self._selector: selectors.BaseSelector | None = None  # that they are registered with
        self._readers: set[Client] = set()  # of events
        self._dropped_count = 0  # clients that did not read
        self._calls: deque[Callable[[], None]] = deque()  # from the copier and the upload writer
        self._ops: dict[str, Callable[[Client, RequestHeader, Sequence[Any]], None]] = {
            "infer": self._infer,
            "prefetch": self._prefetch,
            "cancel": self._cancel,
            "events": self._events,
            "caller": self._caller,
            "put": self._put,
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
        self._uploads.start()
        self._copier.start()
        return self._listeners

    def watch(self, selector: selectors.BaseSelector) -> None:
        """Register what ends a wait; each key's data is a callable, as the loop expects."""
        self._selector = selector
        for listener in self._listeners.ours:
            welcome = functools.partial(self._welcome, listener)
            selector.register(listener.sock, selectors.EVENT_READ, welcome)
        selector.register(self._wake, selectors.EVENT_READ, self._hear)

    def unwatch(self, selector: selectors.BaseSelector) -> None:
        """Before ``close``."""
        self._selector = None
        for listener in self._listeners.ours:
            selector.unregister(listener.sock)
        for peer in self._peers:
            selector.unregister(peer)
        selector.unregister(self._wake)

    def close(self) -> None:
        """Answer what is left with ServerUnavailable, flush, close everything."""
        self._uploads.stop()
        self._copier.stop()  # what they post is sent
        self._finish()
        for peer in list(self._peers):
            self._part(peer)
        self._listeners.close()
        os.close(self._wake)
        self._pool.close()

    def _hear(self) -> None:
        os.eventfd_read(self._wake)

    def _call_soon(self, call: Callable[[], None]) -> None:
        """From any thread; never blocks."""
        self._calls.append(call)
        with contextlib.suppress(BlockingIOError):  # the counter is full: it will wake anyway
            os.eventfd_write(self._wake, 1)

    # ---- the loop's part -----------------------------------------------------------------------

    def wait_s(self) -> float | None:
        """How long the loop may wait; None: until a descriptor wakes it."""
        if self._calls or self._turns:
            return 0.0
        until_s = self.connections.next_at_s
        waits_s = None if until_s == math.inf else max(0.0, until_s - self._now_ms() / 1000)
        if not self._outbox.backlogged:
            return waits_s
        if self._outbox.wants_turn:
            return 0.0
        return BACKLOG_LOOK_S if waits_s is None else min(waits_s, BACKLOG_LOOK_S)

    def step(self) -> None:
        """One turn."""
        while self._calls:
            self._calls.popleft()()
        for peer in list(self._turns):
            self._hear_peer(peer)
            if not peer.wants_turn:
                self._turns.discard(peer)
        if self._outbox.backlogged:
            for client in self._outbox.sweep(self._now_ms()):
                self._drop(client, SLOW)
        if self.connections.next_at_s != math.inf:
            self.connections.tick(self._now_ms() / 1000)

    def perform(self, posted: Posted) -> None:
        """Carry out a command of the scheduler's, now."""
        match posted:
            case Answer():
                self._answer(posted)
            case Publish():
                for client in list(self._readers):
                    self._tell(client, posted)
            case Announce():
                self._fitting.clear()
                base = posted.base or posted.model
                self._versions[base, posted.version] = posted
                if posted.is_current:
                    self._models[base] = posted
            case Retract(model=model):
                left = {k: one for k, one in self._versions.items() if one.model != model}
                self._versions = left
                self._models = {k: one for k, one in self._models.items() if one.model != model}

    def _tell(self, reader: Client, published: Publish) -> None:
        """An event, to each of its subscriptions; who does not read misses some."""
        for request_id, topics in list(reader.readings.items()):
            is_wanted = published.topic.startswith(topics) and reader.standing.may_operate
            if is_wanted and reader.unsent_bytes <= READER_BYTES:
                body = {"topic": published.topic, **published.body}
                self._reply(reader, request_id, body=body, more=True)

    def tidy_pool(self, tenant: str) -> None:
        """A worker of that tenant is reaped."""
        self._pool.tidy(tenant)

    def answer_soon(self, answer: Answer) -> None:
        """``perform`` from any thread; never blocks."""
        self._call_soon(lambda: self._answer(answer))

    def _finish(self) -> None:
        """Orderly end: what was posted, then an answer for everyone still waiting, then flush."""
        while self._calls:
            self._calls.popleft()()
        for token in self.requests.tokens():
            error = ServerUnavailable("the server stopped", hint="pipeswitch serve")
            self._answer(Answer(token=token, error=error))
        until_ms = self._now_ms() + STOP_FLUSH_MS
        while self._outbox.backlogged and self._now_ms() < until_ms:
            for client in self._outbox.sweep(self._now_ms()):
                self._drop(client, SLOW)
            waiting = select.poll()
            for peer in self._peers:
                if peer.wants_write:
                    waiting.register(peer, select.POLLOUT)
            waiting.poll(STOP_LOOK_MS)
        for client in self._clients.values():
            self._outbox.drop(client)

    # ---- in ------------------------------------------------------------------------------------

    def _hear_parts(self, peer: StreamPeer, parts: Sequence[Any], *, is_shared: bool) -> None:
        """One message. Nothing a client sends may raise out of here.

        ``is_shared``: its sender can still change tensors.
        """
        reach("frontend.message")
        request_id = ""
        client: Client | None = None
        try:
            try:
                header = decode_request(parts)
            except RemoteProtocolError as error:
                request_id = envelope_id(parts)
                raise wrong_version(parts) or error from None
            request_id = header.id
            if header.op not in VERBS:
                op = header.op[:40]
                raise RemoteProtocolError(f"no verb {op!r}{nearest(op, VERBS)}")
            if header.op == "hello":
                self._hello(peer, header)
            elif header.op == "ping" and not header.body:
                self._reply_now(peer, header.id, body=self._about(peer.standing))
            elif header.op == "caller" and peer.client is None:
                peer.standing = _caller_of(peer.standing, header)
            else:
                client = peer.client
                if client is None or client.session != header.session or client.is_gone:
                    client = None
                    raise RemoteProtocolError(
                        "this session is not known here: say hello first", reason="unknown_session"
                    )
                if is_shared and header.op != "infer":
                    raise RemoteProtocolError("only an inference's tensors lie in the share")
                self._dispatch(client, header, parts[2:])
        except PipeSwitchError as error:
            self._refuse(peer, client, request_id, error)

    # ---- connections ---------------------------------------------------------------------

    def _welcome(self, listener: Listener) -> None:
        """Connections that wait there."""
        if self._selector is None:
            return
        for peer in accept(listener, self._max_message_bytes, self._memory_shares):
            self._peers.add(peer)
            if not peer.is_owners:
                self.connections.add(peer, self._now_ms() / 1000)
            peer.on_change = functools.partial(self._follow, peer)
            self._selector.register(
                peer, selectors.EVENT_READ, functools.partial(self._turns.add, peer)
            )

    def _follow(self, peer: StreamPeer) -> None:
        """Have the loop woken when it can go on sending, as long as it has to."""
        if self._selector is not None and peer in self._peers:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.wants_write else 0)
            self._selector.modify(peer, events, functools.partial(self._turns.add, peer))

    def _hear_peer(self, peer: StreamPeer) -> None:
        """What came by one connection; who sends nonsense, or is gone, is forgotten."""
        cause = ""
        try:
            for message in peer.messages():
                if not (peer.is_owners or self.connections.took(peer, self._now_ms() / 1000)):
                    return  # it is being hung up: its end follows
                self._hear_parts(peer, message.parts, is_shared=bool(message.shared))
        except EOFError:
            cause = "disconnected"
        except RemoteProtocolError as error:
            self.complaints.add(peer.standing.tenant, error)
            cause = "nonsense"
        if cause:
            if peer.client is not None:
                self._drop(peer.client, cause)
            self._part(peer)

    def _part(self, peer: StreamPeer) -> None:
        """Its connection ends."""
        if peer in self._peers:
            self._peers.remove(peer)
            self._turns.discard(peer)
            self.connections.remove(peer)
            if self._selector is not None:
                self._selector.unregister(peer)
        peer.close()

    def _dispatch(self, client: Client, header: RequestHeader, tensors: Sequence[Any]) -> None:
        perform = self._ops.get(header.op, self._ask)
        if header.id in client.requests or header.id in client.readings:
            raise InvalidInput(f"request id {header.id!r} is already waiting for its answer")
        if len(client.requests) >= MAX_CLIENT_REQUESTS:
            raise QueueFull(f"{len(client.requests)} requests of this client wait already")
        try:
            client.standing.require(VERBS[header.op].role, header.op)
            perform(client, header, tensors)
        except PipeSwitchError as error:
            self.requests.reject(client, header.op, error)
            raise

    def _refuse(
        self, peer: StreamPeer, client: Client | None, request_id: str, error: PipeSwitchError
    ) -> None:
        """A typed error when there is an id to answer to; otherwise counted and dropped."""
        if isinstance(error, RemoteProtocolError):
            self.complaints.add(peer.standing.tenant, error)
        if not request_id:
            return
        if client is not None:
            self._reply(client, request_id, error=error)
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
        self._reply(client, header.id, body=self._about(client.standing))

    def _caller(self, client: Client, header: RequestHeader, _: Sequence[Any]) -> None:
        """The roles of one for whom the owner's process speaks are others now."""
        told = _caller_of(client.standing, header)
        for peer in self._peers:
            if peer.is_owners and peer.standing.tenant == told.tenant:
                peer.standing = told
                if peer.client is not None:
                    peer.client.standing = told
        self._reply(client, header.id)

    def _infer(self, client: Client, header: RequestHeader, tensors: Sequence[Any]) -> None:
        arrived_at_ms, version, caller = self._now_ms(), 0, client.standing.tenant
        if header.body:
            body = Body("infer", header.body)
            version = body.count("version", 0)
            caller = admission.tenant_of(body, caller)
            body.done()
        announced = admission.find_model(header.model, self._models)
        if version:
            announced = admission.find_version(header.model, version, self._versions)
        admitted = self._admit(header, [len(tensor) for tensor in tensors], announced)
        if header.priority == URGENT_PRIORITY:
            client.standing.require(Role.URGENT, "priority high")
        priority = admission.priority_number(header.priority, announced.priority)
        deadline_ms = header.deadline_ms
        if deadline_ms is None:
            deadline_ms = self._default_deadline_ms
        deadline_at_ms = admission.deadline_at_ms(deadline_ms, arrived_at_ms)
        room = self._reserve(caller, admitted, announced.tenant)
        payload = [tensors[item.frame] for item in admitted.inputs]
        pending = self.requests.accept(client, header, room)
        reach("frontend.accepted")
        event = InferArrived(
            token=pending.token,
            request_id=header.id,
            model=announced.model,
            digest=announced.manifest.digest,
            priority=priority,
            deadline_at_ms=deadline_at_ms,
            inputs=room.place(admitted.inputs),
            reply_offset_bytes=room.reply_offset_bytes,
            reply_bytes=room.reply_bytes,
            caller=caller,
            tenant=room.tenant,
            lineage=0 if version else announced.lineage,
            arrived_at_ms=arrived_at_ms,
        )
        if admitted.input_bytes <= INLINE_COPY_BYTES:
            self._pool.fill(event.inputs, payload, event.tenant)
            self._take(event)
        else:
            pending.is_copying = True
            self._take(PrefetchHint(model=event.model))  # its transfer need not wait for the copy
            self._copier.put(functools.partial(self._copy, payload, pending, event))

    def _admit(self, header: RequestHeader, sizes: Sequence[int], announced: Announce) -> Admitted:
        """As ``check_infer``, which answers the same to the same."""
        key = (announced.model, announced.stage is None, header.inputs, *sizes)
        admitted = self._fitting.get(key)
        if admitted is None:
            admitted = admission.check_infer(header, sizes, announced, self._max_message_bytes)
            if len(self._fitting) >= MAX_FITTING:
                self._fitting.clear()
            self._fitting[key] = admitted
        return admitted

    def _reserve(self, caller: str, admitted: Admitted, tenant: str) -> Room:
        """Room for a request and its reply, or QueueFull with the numbers."""
        return self._pool.reserve(caller, admitted.input_bytes, admitted.reply_bytes, tenant)

    def _copy(self, payload: Sequence[Any], pending: Pending, event: InferArrived) -> None:
        """On the copier's thread: a large payload into the pool."""
        self._pool.fill(event.inputs, payload, event.tenant)
        self._call_soon(lambda: self._copied(pending, event))

    def _copied(self, pending: Pending, event: InferArrived) -> None:
        """A large payload is in the pool. Only now can the scheduler be asked to take it back."""
        pending.is_copying = False
        reach("frontend.copied")
        if pending.is_cancelled:
            error = Cancelled(f"request {pending.request_id} was taken back")
            self._answer(Answer(token=pending.token, error=error))
        else:
            self._take(event)

    # ---- inputs that a function made -----------------------------------------------------------

    def take_result(self, command: TakeResult, memory: memoryview) -> None:
        """Into the pool, in place of what came, if the model takes it; then ``Prepared``.

        ``memory``: of the slot, whose process waits meanwhile.
        """
        pending = self.requests.find(command.token)
        prepared = Prepared(token=command.token, slot=command.slot)
        if pending is None:
            self._take(prepared)
            return
        try:
            tensors = [memory[one.offset_bytes :][: one.size_bytes] for one in command.outputs]
            admitted, announced = self._admit_result(command, [len(one) for one in tensors])
            holder = pending.room.holder if pending.room is not None else ""
            self.requests.clear(pending)  # it holds its share no longer
            pending.room = self._reserve(holder, admitted, announced.tenant)
        except PipeSwitchError as error:
            self._take(msgspec.structs.replace(prepared, error=error))
            return
        room = pending.room
        prepared = msgspec.structs.replace(
            prepared,
            inputs=room.place(admitted.inputs),
            reply_offset_bytes=room.reply_offset_bytes,
            reply_bytes=room.reply_bytes,
            digest=announced.manifest.digest,
        )
        payload = [tensors[item.frame] for item in admitted.inputs]
        if admitted.input_bytes <= INLINE_COPY_BYTES:
            self._pool.fill(prepared.inputs, payload, room.tenant)
            self._take(prepared)
        else:
            self._copier.put(functools.partial(self._copy_result, payload, prepared, room.tenant))

    def _admit_result(self, command: TakeResult, sizes: Sequence[int]) -> tuple[Admitted, Announce]:
        """Whether a model takes what its function returned.

        Raises:
            TaskFailed: it does not; with both signatures, and the function.
            InvalidInput: it left meanwhile.
        """
        announced = admission.find_version(*split_name(command.model), self._versions)
        announced = msgspec.structs.replace(announced, stage=None)
        inputs = tuple(
            WireTensor(name=one.name, dtype=one.dtype, shape=one.shape, frame=number)
            for number, one in enumerate(command.outputs)
        )
        header = RequestHeader(v=VERSION, op="infer", id="0", model=command.model, inputs=inputs)
        try:
            return self._admit(header, sizes, announced), announced
        except InvalidInput as error:
            raise TaskFailed(
                f"preprocess {command.function} returned what its model does not take: "
                f"{error.message}",
                hint=error.hint,
            ) from None

    def _copy_result(self, payload: Sequence[Any], prepared: Prepared, tenant: str) -> None:
        """On the copier's thread."""
        self._pool.fill(prepared.inputs, payload, tenant)
        self._call_soon(lambda: self._take(prepared))

    def _take_back(self, pending: Pending) -> None:
        if pending.is_copying:
            pending.is_cancelled = True
        else:
            self._take(CancelAsked(token=pending.token))

    def remove_files(self, paths: Sequence[Path]) -> None:
        """On the thread that does all file work."""
        self._uploads.remove(paths)

    def _prefetch(self, client: Client, header: RequestHeader, _: Sequence[Any]) -> None:
        """A hint; it has no answer."""
        if header.model in self._models:
            self._take(PrefetchHint(model=ModelName(header.model)))

    def _cancel(self, client: Client, header: RequestHeader, _: Sequence[Any]) -> None:
        body = Body("cancel", header.body)
        request_id = body.text("id")
        body.done()
        token = client.requests.get(request_id)
        is_reading = client.readings.pop(request_id, None) is not None
        if token is not None:
            self._take_back(self.requests.waiting(token))
        elif is_reading:
            self._reply(client, request_id, error=Cancelled("these events were cancelled"))
        self._reply(client, header.id, body={"found": token is not None or is_reading})

    def _events(self, client: Client, header: RequestHeader, _: Sequence[Any]) -> None:
        """From now on each is a reply of which more follow, until it is cancelled."""
        body = Body("events", header.body)
        topics = body.texts("topics")
        body.done()
        if len(client.readings) >= MAX_READINGS:
            raise QueueFull(f"this client reads events {MAX_READINGS} times already")
        client.readings[header.id] = topics or ("",)
        self._readers.add(client)
        self._reply(client, header.id, more=True)  # they begin

    def _put(self, client: Client, header: RequestHeader, tensors: Sequence[Any]) -> None:
        if len(tensors) > 1:
            raise InvalidInput("put: a chunk is one frame")
        if client.upload_chunks >= CREDIT_CHUNKS:
            raise InvalidInput(f"put: at most {CREDIT_CHUNKS} chunks may be unanswered")

        def reply(body: dict[str, Any], error: PipeSwitchError | None) -> None:
            def send() -> None:
                client.upload_chunks -= 1
                self._reply(client, header.id, body=body, error=error)

            self._call_soon(send)

        self._uploads.offer(
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
            self._reply(client, header.id, body=piece)
        else:
            pending = self.requests.accept(client, header)
            if isinstance(asked, RegisterAsked):
                pending.uploads = self._uploads.pin(asked.spec)
                asked = msgspec.structs.replace(asked, client=asked.tenant or client.session)
            self._take(asked)

    # ---- out -----------------------------------------------------------------------------------

    def _answer(self, answer: Answer) -> None:
        """One reply to an accepted request; a final one ends it."""
        pending = self.requests.find(answer.token)
        if pending is None:
            return  # it had its final answer
        client, verb = pending.client, VERBS[pending.op]
        if verb.is_cut and not client.is_gone:
            body = self._completed(answer.body) if pending.op == "stats" else answer.body
            body = told(pending.op, body, client.standing, client.counts.as_dict())
            answer = msgspec.structs.replace(answer, body=body)
        if verb.of_owner and isinstance(answer.error, PermissionDenied):
            what = f'{pending.op} of "{pending.model}", which is another client\'s,'
            refusal = client.standing.refusal(Role.OPERATE, what)
            answer = Answer(token=answer.token, error=refusal)
        elif verb.of_model and isinstance(answer.error, ModelNotFound):
            error = admission.model_not_found(pending.model, self._models)
            answer = Answer(token=answer.token, error=error)
        if not answer.more:
            self._uploads.unpin(pending.uploads)
            outgoing = self.requests.end(pending, answer)
            if outgoing is not None:
                self._send(client, outgoing)
        elif not client.is_gone:
            self._send(client, self.requests.progress(pending, answer))

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
            **self._pool.as_dict(),
            **self._memory_shares.as_dict(),
        }

    def _reply(self, client: Client, request_id: str, **fields: Any) -> None:
        """A reply that settles nothing; ``fields`` as of ``reply_frames``."""
        frames = reply_frames(request_id, client.session, **fields)
        self._send(client, Outgoing(frames=frames, since_ms=self._now_ms()))

    def _reply_now(self, peer: StreamPeer, request_id: str, **fields: Any) -> None:
        """To a connection, with a session or without.

        It takes nothing while an answer is on its way: a session's waits behind it.
        """
        if peer.client is not None and not peer.client.is_gone:
            self._reply(peer.client, request_id, **fields)
        else:
            peer.send_now(reply_frames(request_id, **fields))

    def _send(self, client: Client, outgoing: Outgoing) -> None:
        if client.is_gone:
            outgoing.on_lost()
            outgoing.on_released()
        elif not self._outbox.send(client, outgoing, self._now_ms()):
            self._drop(client, SLOW)

    def _drop(self, client: Client, cause: str) -> None:
        """The client is gone, or is to be: its waiting requests are taken back. Idempotent."""
        if client.is_gone:
            return
        client.is_gone = True  # late answers to it are undeliverable from now on
        del self._clients[client.session]
        self._readers.discard(client)
        self._outbox.drop(client)
        if cause == SLOW:
            if isinstance(client.peer, StreamPeer):
                self._part(client.peer)
            self._dropped_count += 1
        _logger.info(
            "client=%s gone cause=%s waiting=%d", client.session[:8], cause, len(client.requests)
        )
        self._uploads.forget(client.session)
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
