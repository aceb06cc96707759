"""Clients' side of the controller: their bytes to typed events, answers to their bytes.

It owns the sockets, the request/reply pool's slabs and the request counters, and runs in the
controller's one loop (docs/adr/0009). It decides nothing about models or devices: what is well
formed and allowed goes to the scheduler as an event, and each accepted request gets exactly one
final answer, or is counted ``undeliverable`` (invariant I1). The protocol: docs/protocol.md.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import mmap
import os
import re
import selectors
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import zmq

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
from ..messages import ModelName, SlabTensor
from ..sockets import DONTWAIT, is_readable, next_events, send_frames
from ..wire import (
    MAX_TENSORS,
    VERSION,
    RequestHeader,
    WireTensor,
    decode_request,
    pack_dict,
)
from . import admission
from .admission import Body
from .clients import (
    RELEASE_WAIT_MS,
    ZERO_COPY_BYTES,
    Client,
    ClientTable,
    Counters,
    Outbox,
    Outgoing,
    Pending,
)
from .copying import INLINE_COPY_BYTES, Copier, Piece, copy_pieces
from .doors import ACCEPTED, Door, Doors, open_doors
from .events import (
    Announce,
    Answer,
    CancelAsked,
    Event,
    InferArrived,
    PrefetchHint,
    Publish,
    Retract,
    Token,
)
from .job_logs import read_piece
from .peers import Peers, hang_up
from .replies import envelope_id, output_outside, reply_frames, wrong_version
from .slabs import SlabPool
from .uploads import CREDIT_CHUNKS, Uploads
from .verbs import LogPiece, Verbs

_logger = logging.getLogger(__name__)

BURST_EVENTS: Final = 32  # of connections, from one door: a third of a millisecond
BURST_PARTS: Final = 1_000  # of one message: libzmq bounds neither their number nor their memory
BURST_MESSAGES: Final = 16  # from one door before the other and the answers get their turn
MAX_CLIENT_REQUESTS: Final = 4096  # unanswered ones of one client
BUSY_POLL_MS: Final = 2.0  # while a socket is full or libzmq still reads from the pool
STOP_FLUSH_MS: Final = 1000
SLOW: Final = "slow or gone"  # why a client is dropped that the monitor has not reported
REVOKED: Final = "its key was revoked"
KEYS_LOOK_MS: Final = 1000.0  # between looks at the allow-list, for clients that are in already
_SRCFD: Final = int(zmq.SRCFD)
COMPLAINTS_PER_MINUTE: Final = 10
_ROUTING_ID: Final = re.compile(rb"\0[\s\S]{4}")  # as libzmq makes them itself

MODEL_VERBS: Final = ("show", "load", "unload", "unregister")
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
        now_ms: Callable[[], float] = lambda: time.monotonic() * 1000,
    ) -> None:
        """Nothing is opened yet.

        Args:
            config: with absolute ``server.state_dir`` and ``server.runtime_dir``.
            pool_descriptor: a sealed memfd, the request/reply pool; duplicated by the mapping.
            take: takes an event for the scheduler, to be handled later.
            facts: what ``hello`` and ``ping`` tell about the server (device, arena_bytes…).
            is_ready: whether a request would be served now.
            now_ms: the monotonic clock.
        """
        self._config = config
        self._pool_descriptor = pool_descriptor
        self._take = take
        self._facts = dict(facts or {})
        self._is_ready = is_ready
        self._now_ms = now_ms
        self._max_message_bytes = config.server.max_message_bytes
        state = Path(config.server.state_dir)
        self._log_directory = state / "logs"
        self._uploads = Uploads(state / "uploads", config.server.max_upload_bytes)
        self._copier = Copier()
        self._verbs = Verbs(
            allow_code=config.server.allow_code, uploads_dir=str(self._uploads.directory)
        )
        self._models: dict[str, Announce] = {}
        self._clients = ClientTable()
        self._peers = Peers(
            max_count=config.server.max_connections,
            client_bytes=config.server.pool_bytes,  # more than its requests could ever take
            total_bytes=2 * config.server.pool_bytes,
        )
        self._dropped_count = 0  # clients that did not read
        self._queue_full_count = 0
        self._keys_look_at_ms = 0.0
        self._admitted: frozenset[bytes] = frozenset()  # when it was last looked at
        self._pending: dict[Token, Pending] = {}
        self._last_token = 0
        self.requests = Counters()  # every accepted request, whatever its verb
        self.inference = Counters()  # the ones of verb infer among them
        self._malformed_count = 0
        self._overlong: dict[zmq.Socket[bytes], list[zmq.Frame]] = {}  # still being read
        self._complaints: deque[float] = deque()
        self._calls: deque[Callable[[], None]] = deque()  # from the copier and the upload writer
        self._ops: dict[str, Callable[[Client, RequestHeader, Sequence[Any]], None]] = {
            "infer": self._infer,
            "prefetch": self._prefetch,
            "cancel": self._cancel,
            "put": self._put,
        }

    # ---- life ----------------------------------------------------------------------------------

    def open(self) -> Doors:
        """Bind both doors, map the pool, start the helper threads; the doors' addresses.

        Raises:
            ConfigError: an address or folder cannot be used.
            PipeSwitchError: a port or the ipc name is in use.
        """
        self._map = mmap.mmap(self._pool_descriptor, 0)
        self._pool_view = memoryview(self._map)
        self._pool = np.frombuffer(self._pool_view, dtype=np.uint8)
        self._slabs = SlabPool(len(self._map))
        # Half the pool: one client can fill its half, never everybody's.
        self._client_budget_bytes = max(self._slabs.capacity_bytes // 2, 1)
        self._outbox = Outbox(max(self._client_budget_bytes, self._max_message_bytes))
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._context: zmq.Context[Any] = zmq.Context()
        try:
            self._doors = open_doors(self._context, self._config.server)
        except PipeSwitchError:
            self._context.term()
            os.close(self._wake)
            raise
        self._sockets = self._doors.sockets
        self._stirred = set(self._sockets)  # may have something to read: see wait_s
        self._uploads.start()
        self._copier.start()
        return self._doors

    def watch(self, selector: selectors.BaseSelector) -> None:
        """Register what ends a wait; each key's data is a callable, as the loop expects."""
        for sock in self._sockets:
            stir = functools.partial(self._stirred.add, sock)
            selector.register(sock, selectors.EVENT_READ, stir)
        selector.register(self._wake, selectors.EVENT_READ, self._hear)

    def unwatch(self, selector: selectors.BaseSelector) -> None:
        """Before ``close``."""
        for sock in self._sockets:
            selector.unregister(sock)
        selector.unregister(self._wake)

    def close(self) -> None:
        """Answer what is left with ServerUnavailable, flush, close everything."""
        self._uploads.stop()
        self._copier.stop()  # what they post is sent
        self._finish()
        self._doors.close()
        self._context.term()
        os.close(self._wake)
        del self._pool
        with contextlib.suppress(BufferError):  # a frame still held elsewhere frees it later
            self._pool_view.release()
            self._map.close()

    def _hear(self) -> None:
        os.eventfd_read(self._wake)

    def _call_soon(self, call: Callable[[], None]) -> None:
        """From any thread; never blocks."""
        self._calls.append(call)
        with contextlib.suppress(BlockingIOError):  # the counter is full: it will wake anyway
            os.eventfd_write(self._wake, 1)

    # ---- the loop's part -----------------------------------------------------------------------

    def wait_s(self) -> float | None:
        """How long the loop may wait; None: until a descriptor wakes it.

        A libzmq descriptor tells of a *change*, and any use of its socket may swallow that: a
        socket that was used since the last wait has to be asked (zmq_getsockopt(3), ZMQ_FD).
        """
        is_quiet = self._outbox.is_idle and not self._clients.has_suspects
        if not is_quiet:
            self._stirred.update(self._sockets)
        for sock in [sock for sock in self._stirred if not is_readable(sock)]:
            self._stirred.discard(sock)
        if self._calls or self._stirred:
            return 0.0
        return self._peers.wait_s(self._now_ms() / 1000) if is_quiet else BUSY_POLL_MS / 1000

    def step(self) -> None:
        """One turn. Who left is learnt before anything is sent or received."""
        if self._stirred or self._clients.has_suspects:
            self._watch_connections()
        while self._calls:
            self._calls.popleft()()
        for door in self._doors.all:
            if door.router in self._stirred:
                self._receive(door)
            if door.publisher in self._stirred:
                self._read_subscriptions(door)
        if not self._outbox.is_idle:
            for client in self._outbox.sweep(self._now_ms()):
                self._drop(client, SLOW)
        if self._peers:
            now_ms = self._now_ms()
            self._peers.tick(now_ms / 1000)
            if self._doors.tcp.allowed is not None and now_ms > self._keys_look_at_ms:
                self._keys_look_at_ms = now_ms + KEYS_LOOK_MS
                self._look_at_keys(self._doors.tcp.allowed.keys())

    def _watch_connections(self) -> None:
        """News of connections, a burst at a time: a storm of them must not hold up the rest."""
        now_ms = self._now_ms()
        gone = self._clients.settle_suspects(now_ms) if self._clients.has_suspects else []
        for door in self._doors.all:
            for event, fd in next_events(door.monitor, BURST_EVENTS):
                if event != ACCEPTED:
                    gone += self._clients.disconnected(door, fd, now_ms)
                self._note(door, event, fd, now_ms)
            for event, fd in next_events(door.readers, BURST_EVENTS):
                self._note(door, event, fd, now_ms, is_subscriber=True)
        for client in gone:
            self._drop(client, "disconnected")

    def _note(
        self, door: Door, event: int, fd: int, now_ms: float, *, is_subscriber: bool = False
    ) -> None:
        """A connection came or went; the owner's own are not limited."""
        if door.is_owner:
            return
        if event == ACCEPTED:
            self._peers.accepted(
                fd,
                int(door.events_local if is_subscriber else door.local),
                now_ms / 1000,
                is_subscriber=is_subscriber,
                is_keyed=door.allowed is not None,
            )
        else:
            self._peers.disconnected(fd)

    def _look_at_keys(self, admitted: frozenset[bytes]) -> None:
        """End the connections of keys that were revoked."""
        for client in self._clients.all():
            if client.user_id and client.user_id.encode() not in admitted:
                self._drop(client, REVOKED)
        if self._admitted - admitted:
            self._peers.end_subscribers()
        self._admitted = admitted

    @staticmethod
    def _read_subscriptions(door: Door) -> None:
        """XPUB hands us subscriptions; libzmq applies them itself, nothing else is to be done."""
        with contextlib.suppress(zmq.Again):
            for _ in range(BURST_MESSAGES):
                door.publisher.recv(DONTWAIT)

    def perform(self, posted: Posted) -> None:
        """Carry out a command of the scheduler's, now."""
        match posted:
            case Answer():
                self._answer(posted)
            case Publish(topic=topic, body=body):
                frames = [topic.encode(), pack_dict(body)]
                for door in self._doors.all:
                    self._stirred.add(door.publisher)
                    with contextlib.suppress(zmq.Again):
                        send_frames(door.publisher, frames, DONTWAIT)
            case Announce(model=model):
                self._models[model] = posted
            case Retract(model=model):
                self._models.pop(model, None)

    def answer_soon(self, answer: Answer) -> None:
        """``perform`` from any thread; never blocks."""
        self._call_soon(lambda: self._answer(answer))

    def _finish(self) -> None:
        """Orderly end: what was posted, then an answer for everyone still waiting, then flush."""
        while self._calls:
            self._calls.popleft()()
        for token in list(self._pending):
            error = ServerUnavailable("the server stopped", hint="pipeswitch serve")
            self._answer(Answer(token=token, error=error))
        until_ms = self._now_ms() + STOP_FLUSH_MS
        while not self._outbox.is_idle and self._now_ms() < until_ms:
            for client in self._outbox.sweep(self._now_ms()):
                self._drop(client, SLOW)
            self._doors.tcp.monitor.poll(int(BUSY_POLL_MS))  # a client that leaves ends the wait
        for client in self._clients.all():
            self._outbox.drop(client)
        for door in self._doors.all:
            door.router.setsockopt(zmq.LINGER, STOP_FLUSH_MS)

    # ---- in ------------------------------------------------------------------------------------

    def _receive(self, door: Door) -> None:
        for _ in range(BURST_MESSAGES):
            if not is_readable(door.router):
                return
            begun = self._overlong.pop(door.router, None)
            frames = begun or [_next_frame(door)]
            for _ in range(BURST_PARTS):
                if not frames[-1].more:
                    break
                frame = _next_frame(door)  # a message comes whole
                if len(frames) < MAX_TENSORS + 4:
                    frames.append(frame)
                else:
                    frames[-1] = frame  # too many: only the last one's `more` matters now
            if frames[-1].more:
                self._overlong[door.router] = frames  # the others get their turn
                if begun is None:  # once: its descriptor's number may be another's by and by
                    self._hang_up(door, frames[0], "too many parts")
                return
            self._hear_message(door, frames)

    def _hang_up(self, door: Door, frame: zmq.Frame, cause: str) -> None:
        """End the connection this frame came from; the owner's own are not judged."""
        fd = -1 if door.is_owner else _descriptor(frame)
        if fd >= 0:
            now_ms = self._now_ms()
            if not self._peers.knows(fd):
                self._note(door, ACCEPTED, fd, now_ms)
            self._peers.end(fd, cause)

    def _hear_message(self, door: Door, frames: Sequence[zmq.Frame]) -> None:
        """One message. Nothing a client sends may raise out of here."""
        reach("frontend.message")
        routing_id = bytes(frames[0].buffer)
        parts = [frame.buffer for frame in frames[1:]]
        request_id = ""
        client: Client | None = None
        fd = 0
        if not door.is_owner:
            fd = _descriptor(frames[0])
            if fd < 0:
                self._refuse(door, routing_id, None, "", _old_peer())
                return
            now_ms = self._now_ms()
            if not self._peers.knows(fd):
                self._note(door, ACCEPTED, fd, now_ms)
            if not self._peers.took(fd, frames[1:], now_ms / 1000) and self._peers.knows(fd):
                return  # it is being hung up
        try:
            if not _ROUTING_ID.fullmatch(routing_id):
                request_id = envelope_id(parts)
                raise RemoteProtocolError(
                    "a client must not choose its routing id", hint="leave ZMQ_ROUTING_ID unset"
                )
            try:
                header = decode_request(parts)
            except RemoteProtocolError as error:
                request_id = envelope_id(parts)
                raise wrong_version(parts) or error from None
            request_id = header.id
            if header.op == "hello":
                self._hello(door, routing_id, frames[0], header)
            elif header.op == "ping" and not header.body:
                self._send_now(door, routing_id, reply_frames(header.id, body=self._about(door)))
            else:
                user_id = _user_id(door, frames[0])
                client = self._clients.find(door, routing_id, header.session, user_id)
                if client is None:
                    raise RemoteProtocolError(
                        "this session is not known here: say hello first", reason="unknown_session"
                    )
                self._dispatch(client, header, parts[2:])
        except PipeSwitchError as error:
            self._refuse(door, routing_id, client, request_id, error)

    def _dispatch(self, client: Client, header: RequestHeader, tensors: Sequence[Any]) -> None:
        perform = self._ops.get(header.op, self._ask)
        if perform == self._ask and header.op not in self._verbs:
            raise InvalidInput(f"{header.op} is not served by this release")
        if header.id in client.requests:
            raise InvalidInput(f"request id {header.id!r} is already waiting for its answer")
        if len(client.requests) >= MAX_CLIENT_REQUESTS:
            raise QueueFull(f"{len(client.requests)} requests of this client wait already")
        try:
            perform(client, header, tensors)
        except PipeSwitchError as error:
            self.requests.rejected += 1
            self._queue_full_count += isinstance(error, QueueFull)
            self.inference.rejected += header.op == "infer"
            raise

    def _refuse(
        self,
        door: Door,
        routing_id: bytes,
        client: Client | None,
        request_id: str,
        error: PipeSwitchError,
    ) -> None:
        """A typed error when there is an id to answer to; otherwise counted and dropped."""
        if isinstance(error, RemoteProtocolError):
            self._malformed_count += 1
            self._complain(door, error)
        if not request_id:
            return
        if client is not None:
            self._reply(client, request_id, error=error)
        else:
            self._send_now(door, routing_id, reply_frames(request_id, error=error))

    def _complain(self, door: Door, error: PipeSwitchError) -> None:
        """At most COMPLAINTS_PER_MINUTE lines, whatever a client sends."""
        now_ms = self._now_ms()
        while self._complaints and now_ms - self._complaints[0] > 60_000:
            self._complaints.popleft()
        if len(self._complaints) < COMPLAINTS_PER_MINUTE:
            self._complaints.append(now_ms)
            _logger.warning(
                "refused door=%s malformed=%d cause=%r",
                door.address,
                self._malformed_count,
                error.message[:200],
            )

    # ---- verbs ---------------------------------------------------------------------------------

    def _about(self, door: Door) -> dict[str, Any]:
        """What anybody may know."""
        return {
            "server": "pipeswitch",
            "protocol": VERSION,
            "pid": os.getpid(),
            "events": door.events_address,
            "accepts_code": door.is_owner or bool(self._config.server.allow_code),
            "is_owner": door.is_owner,
            "max_message_bytes": self._max_message_bytes,
            "credit": CREDIT_CHUNKS,
            "ready": self._is_ready(),
            **self._facts,
        }

    def _hello(
        self, door: Door, routing_id: bytes, frame: zmq.Frame, header: RequestHeader
    ) -> None:
        fd = _descriptor(frame)
        if fd < 0:
            raise _old_peer()
        client, replaced = self._clients.greet(door, routing_id, fd, _user_id(door, frame))
        if not door.is_owner:
            self._peers.greeted(fd)
        if replaced is not None:
            self._drop(replaced, "said hello again")
        self._reply(client, header.id, body=self._about(door))

    def _accept(self, client: Client, header: RequestHeader) -> Pending:
        """From here on exactly one final answer is owed."""
        self._last_token += 1
        pending = Pending(
            token=Token(self._last_token),
            request_id=header.id,
            op=header.op,
            model=ModelName(header.model),
            client=client,
        )
        self._pending[pending.token] = pending
        client.requests[header.id] = pending
        self.requests.accepted += 1
        self.inference.accepted += header.op == "infer"
        return pending

    def _infer(self, client: Client, header: RequestHeader, tensors: Sequence[Any]) -> None:
        if header.body:
            Body("infer", header.body).done()
        announced = admission.find_model(header.model, self._models)
        admitted = admission.check_infer(
            header, [len(tensor) for tensor in tensors], announced, self._max_message_bytes
        )
        priority = admission.priority_number(header.priority, announced.priority)
        deadline_at_ms = admission.deadline_at_ms(header.deadline_ms, self._now_ms())
        request_offset, reply_offset = self._take_slabs(client, admitted)
        inputs: list[SlabTensor] = []
        pieces: list[Piece] = []
        for item in admitted.inputs:
            at = request_offset + item.offset_bytes
            pieces.append((at, tensors[item.frame]))
            inputs.append(
                SlabTensor(
                    name=item.name,
                    dtype=item.dtype,
                    shape=item.shape,
                    offset_bytes=at,
                    size_bytes=item.size_bytes,
                )
            )
        pending = self._accept(client, header)
        pending.request_offset, pending.reply_offset = request_offset, reply_offset
        pending.reply_bytes = admitted.reply_bytes
        pending.held_bytes = admitted.input_bytes + admitted.reply_bytes
        client.held_bytes += pending.held_bytes
        reach("frontend.accepted")
        event = InferArrived(
            token=pending.token,
            request_id=header.id,
            model=ModelName(header.model),
            digest=announced.manifest.digest,
            priority=priority,
            deadline_at_ms=deadline_at_ms,
            inputs=tuple(inputs),
            reply_offset_bytes=reply_offset,
            reply_bytes=admitted.reply_bytes,
        )
        if admitted.input_bytes <= INLINE_COPY_BYTES:
            copy_pieces(self._pool, pieces)
            self._take(event)
        else:
            pending.is_copying = True
            self._take(PrefetchHint(model=event.model))  # its transfer need not wait for the copy
            self._copier.copy(
                self._pool, pieces, lambda: self._call_soon(lambda: self._copied(pending, event))
            )

    def _copied(self, pending: Pending, event: InferArrived) -> None:
        """A large payload is in the pool. Only now can the scheduler be asked to take it back."""
        pending.is_copying = False
        reach("frontend.copied")
        if pending.is_cancelled:
            error = Cancelled(f"request {pending.request_id} was taken back")
            self._answer(Answer(token=pending.token, error=error))
        else:
            self._take(event)

    def _take_back(self, pending: Pending) -> None:
        if pending.is_copying:
            pending.is_cancelled = True
        else:
            self._take(CancelAsked(token=pending.token))

    def _take_slabs(self, client: Client, admitted: admission.Admitted) -> tuple[int, int]:
        """Room for the request and for its reply, or QueueFull with the numbers."""
        wanted = admitted.input_bytes + admitted.reply_bytes
        if (
            client.held_bytes + wanted > self._client_budget_bytes
            or wanted > self._slabs.largest_free_bytes
        ):
            self._outbox.release(RELEASE_WAIT_MS)
        if client.held_bytes + wanted > self._client_budget_bytes:
            raise QueueFull(
                f"this client's waiting requests hold {client.held_bytes} bytes of the pool, "
                f"{wanted} more are over its share of {self._client_budget_bytes}",
                hint="wait for answers, or raise [server] pool",
                requested_bytes=wanted,
            )
        request_offset = self._slabs.take(admitted.input_bytes)
        reply_offset = self._slabs.take(admitted.reply_bytes)
        if request_offset is not None and reply_offset is not None:
            return request_offset, reply_offset
        for offset in (request_offset, reply_offset):
            if offset is not None:
                self._slabs.free(offset)
        raise QueueFull(
            f"the request pool is full: {wanted} bytes wanted, {self._slabs.free_bytes} of "
            f"{self._slabs.capacity_bytes} free",
            hint="try again, or raise [server] pool",
            requested_bytes=wanted,
            largest_free_bytes=self._slabs.largest_free_bytes,
        )

    def _prefetch(self, client: Client, header: RequestHeader, _: Sequence[Any]) -> None:
        """A hint; it has no answer."""
        if header.model in self._models:
            self._take(PrefetchHint(model=ModelName(header.model)))

    def _cancel(self, client: Client, header: RequestHeader, _: Sequence[Any]) -> None:
        body = Body("cancel", header.body)
        request_id = body.text("id")
        body.done()
        pending = client.requests.get(request_id)
        if pending is not None:
            self._take_back(pending)
        self._reply(client, header.id, body={"found": pending is not None})

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

        self._uploads.offer(client.session, header, tensors[0] if tensors else b"", reply)
        client.upload_chunks += 1

    def _ask(self, client: Client, header: RequestHeader, _: Sequence[Any]) -> None:
        """A verb that is one question to the scheduler."""
        asked = self._verbs.parse(header, is_owner=client.door.is_owner)
        if isinstance(asked, LogPiece):  # the only one that is answered here
            piece = read_piece(self._log_directory, asked.job, asked.offset_bytes)
            self._reply(client, header.id, body=piece)
        else:
            self._take(asked(self._accept(client, header).token))

    # ---- out -----------------------------------------------------------------------------------

    def _answer(self, answer: Answer) -> None:
        """One reply to an accepted request; a final one settles it and frees its slabs."""
        pending = self._pending.get(answer.token)
        if pending is None:
            _logger.debug("answer token=%d dropped cause=not_owed", answer.token)
            return
        client = pending.client
        if answer.more:
            if not client.is_gone:
                self._send(client, self._outgoing(self._answer_frames(pending, answer)))
            return
        reach("frontend.reply")
        del self._pending[answer.token]
        client.requests.pop(pending.request_id, None)
        if pending.request_offset is not None:
            self._slabs.free(pending.request_offset)
        if client.is_gone:
            self._settle(pending, "undeliverable")
            self._release(pending)
            return
        self._queue_full_count += isinstance(answer.error, QueueFull)
        if isinstance(answer.error, ModelNotFound) and pending.op in MODEL_VERBS:
            answer = Answer(
                token=answer.token, error=admission.model_not_found(pending.model, self._models)
            )
        bad_output = output_outside(answer.outputs, pending.reply_offset or 0, pending.reply_bytes)
        if bad_output:
            _logger.error("request=%s output refused cause=%s", pending.request_id, bad_output)
            error = TaskFailed(f"{pending.model}: the worker's output does not fit: {bad_output}")
            answer = Answer(token=answer.token, error=error)
        self._send(client, self._final(pending, answer))

    def _final(self, pending: Pending, answer: Answer) -> Outgoing:
        frames = self._answer_frames(pending, answer)
        outcome: Any = "ok" if answer.error is None else "error"
        return Outgoing(
            frames=frames,
            size_bytes=sum(map(len, frames)),
            since_ms=self._now_ms(),
            on_sent=lambda: self._settle(pending, outcome),
            on_lost=lambda: self._settle(pending, "undeliverable"),
            on_released=lambda: self._release(pending),
            is_zero_copy=any(len(frame) >= ZERO_COPY_BYTES for frame in frames),
        )

    def _answer_frames(self, pending: Pending, answer: Answer) -> list[Any]:
        """Header and outputs; small outputs are copied out of the pool, large ones are not."""
        body = self._completed(pending, answer.body)
        outputs = []
        tensors: list[Any] = []
        for number, tensor in enumerate(answer.outputs):
            outputs.append(
                WireTensor(name=tensor.name, dtype=tensor.dtype, shape=tensor.shape, frame=number)
            )
            at = tensor.offset_bytes
            tensors.append(self._pool_view[at : at + tensor.size_bytes])
        frames = reply_frames(
            pending.request_id,
            pending.client.session,
            body=body,
            outputs=tuple(outputs),
            timing=answer.timing,
            error=answer.error,
            more=answer.more,
        )
        return [*frames, *tensors]

    def _completed(self, pending: Pending, body: dict[str, Any]) -> dict[str, Any]:
        """``stats`` gets what only this thread knows: counters, clients, pool."""
        if pending.op != "stats":
            return body
        allowed = self._doors.tcp.allowed
        self._outbox.release(RELEASE_WAIT_MS)  # who asks after an answer sees it counted
        return {
            **body,
            **self.requests.as_dict(),
            "inference": self.inference.as_dict(),
            "clients": len(self._clients),
            "malformed": self._malformed_count,
            "queue_full": self._queue_full_count,
            "slow_clients": self._dropped_count,
            "connections": len(self._peers),
            "hung_up": dict(self._peers.hung_up),
            "refused_keys": allowed.refused_count if allowed is not None else 0,
            "pool_capacity_bytes": self._slabs.capacity_bytes,
            "pool_free_bytes": self._slabs.free_bytes,
            "pool_slabs": self._slabs.slab_count,
        }

    def _settle(self, pending: Pending, outcome: Any) -> None:
        self.requests.settle(outcome)
        if pending.op == "infer":
            self.inference.settle(outcome)

    def _release(self, pending: Pending) -> None:
        if pending.reply_offset is not None:
            self._slabs.free(pending.reply_offset)
        pending.client.held_bytes -= pending.held_bytes

    def _reply(self, client: Client, request_id: str, **fields: Any) -> None:
        """A reply that settles nothing; ``fields`` as of ``reply_frames``."""
        self._send(client, self._outgoing(reply_frames(request_id, client.session, **fields)))

    def _outgoing(self, frames: list[Any]) -> Outgoing:
        """A reply that settles nothing and holds nothing."""
        return Outgoing(
            frames=frames,
            size_bytes=sum(map(len, frames)),
            since_ms=self._now_ms(),
            on_sent=_nothing,
            on_lost=_nothing,
            on_released=_nothing,
        )

    def _send(self, client: Client, outgoing: Outgoing) -> None:
        self._stirred.add(client.door.router)
        if client.is_gone:
            outgoing.on_lost()
            outgoing.on_released()
        elif not self._outbox.send(client, outgoing, self._now_ms()):
            self._drop(client, SLOW)

    def _send_now(self, door: Door, routing_id: bytes, frames: list[bytes]) -> None:
        """To a peer without a session: now or never, nothing is kept for it."""
        self._stirred.add(door.router)
        with contextlib.suppress(zmq.ZMQError):
            door.router.send(routing_id, zmq.SNDMORE | zmq.DONTWAIT)
            door.router.send_multipart(frames, zmq.DONTWAIT)

    def _drop(self, client: Client, cause: str) -> None:
        """The client is gone, or is to be: its waiting requests are taken back. Idempotent."""
        if client.is_gone:
            return
        self._clients.remove(client)
        self._outbox.drop(client)
        if cause in (SLOW, REVOKED):
            hang_up(client.fd, client.inode)
            self._dropped_count += cause == SLOW
        _logger.info(
            "client=%s gone cause=%s waiting=%d", client.session[:8], cause, len(client.requests)
        )
        self._uploads.forget(client.session)
        for pending in client.requests.values():
            if pending.op in ("infer", "register", "profile"):
                self._take_back(pending)
        client.requests.clear()


def _user_id(door: Door, frame: zmq.Frame) -> str:
    """The key this message's sender proved to have; empty where none is asked for.

    Raises:
        PermissionDenied: libzmq does not say: it must not happen, and nothing is served then.
    """
    if door.allowed is None:
        return ""
    try:
        return str(frame.get("User-Id"))
    except (zmq.ZMQError, KeyError):
        raise PermissionDenied("this connection has not proved a key") from None


def _nothing() -> None:
    """For replies that hold no slab and settle no request."""


def _old_peer() -> RemoteProtocolError:
    return RemoteProtocolError("the peer speaks ZMTP 1 or 2, or none at all")


def _next_frame(door: Door) -> zmq.Frame:
    frame: zmq.Frame = door.router.recv(DONTWAIT, copy=False)
    return frame


def _descriptor(routing_frame: zmq.Frame) -> int:
    """Of the connection a message came by; -1 where libzmq does not know it.

    It knows for ZMTP 3 only. Bytes that do not begin as a greeting are taken for a peer of ZMTP 1,
    so anybody can send messages without one.
    """
    try:
        return int(routing_frame.get(_SRCFD))
    except zmq.ZMQError:
        return -1
