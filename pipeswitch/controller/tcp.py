"""The TCP thread: client bytes to typed events, answers to client bytes (docs/protocol.md).

It owns the sockets, the request/reply pool's slabs and the request counters. One poll loop;
other threads give it work through ``post``. It decides nothing about models or devices: what is
well formed and allowed goes to the scheduler as an event, and each accepted request gets exactly
one final answer, or is counted ``undeliverable`` (invariant I1).
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import zmq
from zmq.utils.monitor import recv_monitor_message

from ..config import Config
from ..errors import (
    InvalidInput,
    ModelNotFound,
    PipeSwitchError,
    QueueFull,
    RemoteProtocolError,
    ServerUnavailable,
    TaskFailed,
    to_wire,
)
from ..messages import JobName, ModelName, SlabTensor
from ..programs.layout import ITEM_BYTES
from ..wire import (
    MAGIC,
    MAX_TENSORS,
    VERSION,
    ReplyHeader,
    RequestHeader,
    WireError,
    WireTensor,
    decode_request,
    encode_header,
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
    hang_up,
)
from .doors import Door, Doors, open_doors
from .events import (
    Announce,
    Answer,
    CancelAsked,
    DrainAsked,
    Event,
    InferArrived,
    JobAsked,
    PinAsked,
    PrefetchHint,
    Publish,
    Query,
    RegisterAsked,
    Retract,
    Token,
    TrainAsked,
    UnregisterAsked,
)
from .job_logs import read_piece
from .slabs import SlabPool
from .uploads import CREDIT_CHUNKS, Uploads

_logger = logging.getLogger(__name__)

BURST_MESSAGES: Final = 64  # from one door before the other and the answers get their turn
MAX_CLIENT_REQUESTS: Final = 4096  # unanswered ones of one client
INLINE_BODY_BYTES: Final = 256 << 10  # a larger body travels as a tensor named BODY_TENSOR
BODY_TENSOR: Final = "body"
IDLE_POLL_MS: Final = 1000
BUSY_POLL_MS: Final = 2  # while a socket is full or libzmq still reads from the pool
STOP_FLUSH_MS: Final = 1000
SLOW: Final = "slow or gone"  # why a client is dropped that the monitor has not reported
COMPLAINTS_PER_MINUTE: Final = 10
_ROUTING_ID: Final = re.compile(rb"\0[\s\S]{4}")  # as libzmq makes them itself

MODEL_VERBS: Final = ("show", "load", "unload", "unregister")
Posted = Answer | Publish | Announce | Retract


class _Envelope(msgspec.Struct):
    """What can be had of a header that is otherwise wrong."""

    id: str = ""
    v: int = 0


class TcpThread:
    """All client traffic of one server.

    ``start`` binds (so its errors reach the caller), then the thread runs until ``stop``.
    """

    def __init__(
        self,
        config: Config,
        pool_descriptor: int,
        inbox: Callable[[Event], None],
        *,
        facts: Mapping[str, Any] | None = None,
        now_ms: Callable[[], float] = lambda: time.monotonic() * 1000,
    ) -> None:
        """Nothing is opened yet.

        Args:
            config: with absolute ``server.state_dir`` and ``server.runtime_dir``.
            pool_descriptor: a sealed memfd, the request/reply pool; duplicated by the mapping.
            inbox: takes an event for the scheduler; must not block.
            facts: what ``hello`` and ``ping`` tell about the server (device, arena_bytes…).
            now_ms: the monotonic clock.
        """
        self._config = config
        self._pool_descriptor = pool_descriptor
        self._inbox = inbox
        self._facts = dict(facts or {})
        self._now_ms = now_ms
        self._max_message_bytes = config.server.max_message_bytes
        state = Path(config.server.state_dir)
        self._log_directory = state / "logs"
        self._uploads = Uploads(state / "uploads", config.server.max_upload_bytes)
        self._models: dict[str, Announce] = {}
        self._clients = ClientTable()
        self._pending: dict[Token, Pending] = {}
        self._last_token = 0
        self.requests = Counters()  # every accepted request, whatever its verb
        self.inference = Counters()  # the ones of verb infer among them
        self._malformed_count = 0
        self._complaints: deque[float] = deque()
        self._posts: deque[Posted | Callable[[], None]] = deque()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="pipeswitch-tcp", daemon=True)
        self._ops: dict[str, Callable[[Client, RequestHeader, Sequence[Any]], None]] = {
            "infer": self._infer,
            "prefetch": self._prefetch,
            "cancel": self._cancel,
            "put": self._put,
            "register": self._register,
            "unregister": self._unregister,
            "load": self._pin,
            "unload": self._pin,
            "train": self._train,
            "job": self._job,
            "models": self._query,
            "show": self._query,
            "ps": self._query,
            "jobs": self._query,
            "stats": self._query,
            "trace": self._query,
            "stop": self._stop_server,
        }

    # ---- any thread ----------------------------------------------------------------------------

    def start(self) -> Doors:
        """Bind both doors, map the pool, start the thread; returns the doors' addresses.

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
        self._uploads.start()
        self._thread.start()
        return self._doors

    def post(self, command: Posted) -> None:
        """Give the thread a command; from any thread, never blocks."""
        self._posts.append(command)
        self._rouse()

    def _rouse(self) -> None:
        with contextlib.suppress(BlockingIOError):  # the counter is full: it will wake anyway
            os.eventfd_write(self._wake, 1)

    def stop(self) -> None:
        """Send what is posted, answer what is left with ServerUnavailable, close everything."""
        self._is_stopping = True
        self._rouse()
        self._thread.join()
        self._uploads.stop()
        os.close(self._wake)
        del self._pool
        with contextlib.suppress(BufferError):  # a frame still held elsewhere frees it later
            self._pool_view.release()
            self._map.close()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    # ---- the loop ------------------------------------------------------------------------------

    def _run(self) -> None:
        poller = zmq.Poller()
        for door in self._doors.all:
            poller.register(door.router, zmq.POLLIN)
            poller.register(door.monitor, zmq.POLLIN)
        poller.register(self._doors.publisher, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        try:
            while not self._is_stopping:
                ready = dict(poller.poll(self._poll_ms()))
                self._step(ready)
            self._finish()
        finally:
            self._doors.close()
            self._context.term()

    def _poll_ms(self) -> int:
        if self._posts:
            return 0
        is_quiet = self._outbox.is_idle and not self._clients.has_suspects
        return IDLE_POLL_MS if is_quiet else BUSY_POLL_MS

    def _step(self, ready: Mapping[Any, int]) -> None:
        """One turn. Who left is learnt before anything is sent or received."""
        self._watch_connections()
        if self._wake in ready:
            os.eventfd_read(self._wake)
        self._perform_posts()
        for door in self._doors.all:
            if door.router in ready:
                self._receive(door)
        if self._doors.publisher in ready:
            self._read_subscriptions()
        for client in self._outbox.sweep(self._now_ms()):
            self._drop(client, SLOW)

    def _watch_connections(self) -> None:
        now_ms = self._now_ms()
        gone = self._clients.settle_suspects(now_ms) if self._clients.has_suspects else []
        for door in self._doors.all:
            # Asked first: the exception of an empty socket costs more than the whole look.
            while int(door.monitor.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                event = recv_monitor_message(door.monitor, zmq.DONTWAIT)
                gone += self._clients.disconnected(door, event["value"], now_ms)
        for client in gone:
            self._drop(client, "disconnected")

    def _read_subscriptions(self) -> None:
        """XPUB hands us subscriptions; libzmq applies them itself, nothing else is to be done."""
        with contextlib.suppress(zmq.Again):
            for _ in range(BURST_MESSAGES):
                self._doors.publisher.recv(zmq.DONTWAIT)

    def _perform_posts(self) -> None:
        for _ in range(len(self._posts)):
            self._perform(self._posts.popleft())

    def _perform(self, posted: Posted | Callable[[], None]) -> None:
        match posted:
            case Answer():
                self._answer(posted)
            case Publish(topic=topic, body=body):
                with contextlib.suppress(zmq.Again):
                    frames = [topic.encode(), pack_dict(body)]
                    self._doors.publisher.send_multipart(frames, zmq.DONTWAIT)
            case Announce(model=model):
                self._models[model] = posted
            case Retract(model=model):
                self._models.pop(model, None)
            case _:
                posted()

    def _finish(self) -> None:
        """Orderly end: posted answers, then an answer for everyone still waiting, then flush."""
        while self._posts:
            self._perform(self._posts.popleft())
        for token in list(self._pending):
            error = ServerUnavailable("the server stopped", hint="pipeswitch serve")
            self._answer(Answer(token=token, error=error))
        until_ms = self._now_ms() + STOP_FLUSH_MS
        while not self._outbox.is_idle and self._now_ms() < until_ms:
            for client in self._outbox.sweep(self._now_ms()):
                self._drop(client, SLOW)
            self._doors.tcp.monitor.poll(BUSY_POLL_MS)  # a client that leaves ends the wait
        for client in self._clients.all():
            self._outbox.drop(client)
        for door in self._doors.all:
            door.router.setsockopt(zmq.LINGER, STOP_FLUSH_MS)

    # ---- in ------------------------------------------------------------------------------------

    def _receive(self, door: Door) -> None:
        for _ in range(BURST_MESSAGES):
            try:
                frames = [door.router.recv(zmq.DONTWAIT, copy=False)]
            except zmq.Again:
                return
            while frames[-1].more:
                frame = door.router.recv(copy=False)
                if len(frames) < MAX_TENSORS + 4:
                    frames.append(frame)
                else:
                    frames[-1] = frame  # too many: only the last one's `more` matters now
            self._perform_posts()  # what was posted before this was sent comes before it
            self._take(door, frames)

    def _take(self, door: Door, frames: Sequence[zmq.Frame]) -> None:
        """One message. Nothing a client sends may raise out of here."""
        routing_id = bytes(frames[0].buffer)
        parts = [frame.buffer for frame in frames[1:]]
        request_id = ""
        client: Client | None = None
        try:
            if not _ROUTING_ID.fullmatch(routing_id):
                request_id = _envelope_id(parts)
                raise RemoteProtocolError(
                    "a client must not choose its routing id", hint="leave ZMQ_ROUTING_ID unset"
                )
            try:
                header = decode_request(parts)
            except RemoteProtocolError as error:
                request_id = _envelope_id(parts)
                raise _wrong_version(parts) or error from None
            request_id = header.id
            if header.op == "hello":
                self._hello(door, routing_id, frames[0], header)
            elif header.op == "ping":
                self._send_now(door, routing_id, self._reply(header.id, body=self._about(door)))
            else:
                client = self._clients.find(door, routing_id, header.session)
                if client is None:
                    raise RemoteProtocolError(
                        "this session is not known here: say hello first", reason="unknown_session"
                    )
                self._dispatch(client, header, parts[2:])
        except PipeSwitchError as error:
            self._refuse(door, routing_id, client, request_id, error)

    def _dispatch(self, client: Client, header: RequestHeader, tensors: Sequence[Any]) -> None:
        perform = self._ops.get(header.op)
        if perform is None:
            raise InvalidInput(f"{header.op} is not served by this release")
        if header.id in client.requests:
            raise InvalidInput(f"request id {header.id!r} is already waiting for its answer")
        if len(client.requests) >= MAX_CLIENT_REQUESTS:
            raise QueueFull(f"{len(client.requests)} requests of this client wait already")
        try:
            perform(client, header, tensors)
        except PipeSwitchError:
            self.requests.rejected += 1
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
            self._send(client, self._outgoing(self._reply(request_id, client, error=error)))
        else:
            self._send_now(door, routing_id, self._reply(request_id, error=error))

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
            **self._facts,
        }

    def _hello(
        self, door: Door, routing_id: bytes, frame: zmq.Frame, header: RequestHeader
    ) -> None:
        client, replaced = self._clients.greet(door, routing_id, int(frame.get(zmq.SRCFD)))
        if replaced is not None:
            self._drop(replaced, "said hello again")
        self._send(client, self._outgoing(self._reply(header.id, client, body=self._about(door))))

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
        announced = admission.find_model(header.model, self._models)
        admitted = admission.check_infer(
            header, [len(tensor) for tensor in tensors], announced, self._max_message_bytes
        )
        priority = admission.priority_number(header.priority, announced.priority)
        deadline_at_ms = admission.deadline_at_ms(header.deadline_ms, self._now_ms())
        request_offset, reply_offset = self._take_slabs(client, admitted)
        inputs = []
        for item in admitted.inputs:
            at = request_offset + item.offset_bytes
            source = np.frombuffer(tensors[item.frame], dtype=np.uint8)
            np.copyto(self._pool[at : at + item.size_bytes], source)
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
        self._inbox(
            InferArrived(
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
        )

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
            self._inbox(PrefetchHint(model=ModelName(header.model)))

    def _cancel(self, client: Client, header: RequestHeader, _: Sequence[Any]) -> None:
        body = Body("cancel", header.body)
        request_id = body.text("id")
        body.done()
        pending = client.requests.get(request_id)
        if pending is not None:
            self._inbox(CancelAsked(token=pending.token))
        reply = self._reply(header.id, client, body={"found": pending is not None})
        self._send(client, self._outgoing(reply))

    def _put(self, client: Client, header: RequestHeader, tensors: Sequence[Any]) -> None:
        if len(tensors) > 1:
            raise InvalidInput("put: a chunk is one frame")
        if client.upload_chunks >= CREDIT_CHUNKS:
            raise InvalidInput(f"put: at most {CREDIT_CHUNKS} chunks may be unanswered")

        def reply(body: dict[str, Any], error: PipeSwitchError | None) -> None:
            def send() -> None:
                client.upload_chunks -= 1
                self._send(
                    client, self._outgoing(self._reply(header.id, client, body=body, error=error))
                )

            self._posts.append(send)
            self._rouse()

        self._uploads.offer(client.session, header, tensors[0] if tensors else b"", reply)
        client.upload_chunks += 1

    def _register(self, client: Client, header: RequestHeader, _: Sequence[Any]) -> None:
        name = admission.check_name(header.model, "model")
        body = Body("register", header.body)
        source = admission.check_source(
            body.text("source"),
            body.text("weights", ""),
            is_owner=client.door.is_owner,
            allow_code=self._config.server.allow_code,
            uploads_dir=str(self._uploads.directory),
        )
        inputs = body.signature("inputs")
        priority = admission.priority_number(body.text("priority", ""), default=1)
        is_pinned = body.flag("pin")
        spec, digest = admission.encode_spec(name, source, inputs, body.count("max_batch", 0))
        body.done()
        self._inbox(
            RegisterAsked(
                token=self._accept(client, header).token,
                model=ModelName(name),
                spec=spec,
                spec_digest=digest,
                priority=priority,
                is_pinned=is_pinned,
            )
        )

    def _unregister(self, client: Client, header: RequestHeader, _: Sequence[Any]) -> None:
        token = self._accept(client, header).token
        self._inbox(UnregisterAsked(token=token, model=ModelName(header.model)))

    def _pin(self, client: Client, header: RequestHeader, _: Sequence[Any]) -> None:
        token = self._accept(client, header).token
        pin = header.op == "load"
        self._inbox(PinAsked(token=token, model=ModelName(header.model), pin=pin))

    def _train(self, client: Client, header: RequestHeader, _: Sequence[Any]) -> None:
        body = Body("train", header.body)
        name = admission.check_name(body.text("name"), "job")
        entry = admission.check_entry(
            body.text("entry"),
            is_owner=client.door.is_owner,
            allow_code=self._config.server.allow_code,
        )
        args = body.texts("args")
        priority = admission.priority_number(body.text("priority", ""), default=2)
        body.done()
        token = self._accept(client, header).token
        self._inbox(
            TrainAsked(token=token, job=JobName(name), entry=entry, args=args, priority=priority)
        )

    def _job(self, client: Client, header: RequestHeader, _: Sequence[Any]) -> None:
        body = Body("job", header.body)
        name = JobName(admission.check_name(body.text("name"), "job"))
        action = body.text("action")
        match action:
            case "logs":
                offset = body.count("offset_bytes", 0)
                body.done()
                piece = read_piece(self._log_directory, name, offset)
                self._send(client, self._outgoing(self._reply(header.id, client, body=piece)))
            case "show" | "pause" | "resume" | "cancel" | "wait":
                body.done()
                token = self._accept(client, header).token
                self._inbox(JobAsked(token=token, job=name, action=action))
            case _:
                raise InvalidInput(
                    f"job: action {action[:40]!r} is none of "
                    "show, pause, resume, cancel, wait, logs"
                )

    def _query(self, client: Client, header: RequestHeader, _: Sequence[Any]) -> None:
        body = Body(header.op, header.body)
        seconds = body.number("seconds", 10.0, 3600.0) if header.op == "trace" else 0.0
        body.done()
        token = self._accept(client, header).token
        what: Any = header.op
        self._inbox(Query(token=token, what=what, name=header.model, seconds=seconds))

    def _stop_server(self, client: Client, header: RequestHeader, _: Sequence[Any]) -> None:
        body = Body("stop", header.body)
        grace_ms = body.number("drain_ms", 30_000.0, 86_400_000.0)
        body.done()
        token = self._accept(client, header).token
        _logger.info("stop asked door=%s grace_ms=%.0f", client.door.address, grace_ms)
        self._inbox(DrainAsked(token=token, grace_ms=grace_ms))

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
        del self._pending[answer.token]
        client.requests.pop(pending.request_id, None)
        if pending.request_offset is not None:
            self._slabs.free(pending.request_offset)
        if client.is_gone:
            self._settle(pending, "undeliverable")
            self._release(pending)
            return
        if isinstance(answer.error, ModelNotFound) and pending.op in MODEL_VERBS:
            answer = Answer(
                token=answer.token, error=admission.model_not_found(pending.model, self._models)
            )
        bad_output = _output_outside(answer.outputs, pending)
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
        frames = self._reply(
            pending.request_id,
            pending.client,
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
        self._outbox.release(RELEASE_WAIT_MS)  # who asks after an answer sees it counted
        return {
            **body,
            **self.requests.as_dict(),
            "inference": self.inference.as_dict(),
            "clients": len(self._clients),
            "malformed": self._malformed_count,
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

    def _reply(
        self,
        request_id: str,
        client: Client | None = None,
        *,
        body: dict[str, Any] | None = None,
        outputs: tuple[WireTensor, ...] = (),
        timing: dict[str, Any] | None = None,
        error: PipeSwitchError | None = None,
        more: bool = False,
    ) -> list[bytes]:
        """Magic and header; a body too large for a header follows as a tensor of its own."""
        header = ReplyHeader(
            v=VERSION,
            id=request_id,
            status="error" if error is not None else "progress" if more else "ok",
            session=client.session if client is not None else "",
            more=more,
            timing=timing,
            outputs=outputs,
            body=body or {},
            error=WireError(**to_wire(error)) if error is not None else None,
        )
        packed = encode_header(header)
        if len(packed) <= INLINE_BODY_BYTES or outputs:
            return [MAGIC, packed]
        large = pack_dict(header.body)
        tensor = WireTensor(name=BODY_TENSOR, dtype="uint8", shape=(len(large),), frame=0)
        header = msgspec.structs.replace(header, body={}, outputs=(tensor,))
        return [MAGIC, encode_header(header), large]

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
        if client.is_gone:
            outgoing.on_lost()
            outgoing.on_released()
        elif not self._outbox.send(client, outgoing, self._now_ms()):
            self._drop(client, SLOW)

    @staticmethod
    def _send_now(door: Door, routing_id: bytes, frames: list[bytes]) -> None:
        """To a peer without a session: now or never, nothing is kept for it."""
        with contextlib.suppress(zmq.ZMQError):
            door.router.send(routing_id, zmq.SNDMORE | zmq.DONTWAIT)
            door.router.send_multipart(frames, zmq.DONTWAIT)

    def _drop(self, client: Client, cause: str) -> None:
        """The client is gone, or is to be: its waiting requests are taken back. Idempotent."""
        if client.is_gone:
            return
        self._clients.remove(client)
        self._outbox.drop(client)
        if cause == SLOW:
            hang_up(client)
        _logger.info(
            "client=%s gone cause=%s waiting=%d", client.session[:8], cause, len(client.requests)
        )
        self._uploads.forget(client.session)
        for pending in client.requests.values():
            if pending.op in ("infer", "register"):
                self._inbox(CancelAsked(token=pending.token))
        client.requests.clear()


def _nothing() -> None:
    """For replies that hold no slab and settle no request."""


def _envelope_id(parts: Sequence[Any]) -> str:
    """The request id of a message that is otherwise wrong; empty when there is none."""
    return envelope.id if (envelope := _envelope(parts)) and len(envelope.id) <= 64 else ""


def _envelope(parts: Sequence[Any]) -> _Envelope | None:
    if len(parts) < 2 or bytes(parts[0][:4]) != MAGIC or len(parts[1]) > INLINE_BODY_BYTES:
        return None
    try:
        return msgspec.msgpack.decode(parts[1], type=_Envelope)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None


def _wrong_version(parts: Sequence[Any]) -> RemoteProtocolError | None:
    """Another version may have other fields: say that, not which field was unknown."""
    envelope = _envelope(parts)
    if envelope is None or envelope.v == VERSION:
        return None
    return RemoteProtocolError(
        f"protocol version {envelope.v} is not spoken here, this server speaks {VERSION}",
        hint="use the client of the server's own release",
    )


def _output_outside(outputs: Sequence[SlabTensor], pending: Pending) -> str:
    """Why a worker's claim about its outputs is refused: it may only name its own reply slab."""
    start = pending.reply_offset or 0
    end = start + pending.reply_bytes
    for tensor in outputs:
        size = ITEM_BYTES.get(tensor.dtype, 0)
        for extent in tensor.shape:
            size *= extent
        if size != tensor.size_bytes or min(tensor.shape, default=0) < 0:
            return f"{tensor.name} claims {tensor.size_bytes} bytes for {size}"
        if not start <= tensor.offset_bytes <= tensor.offset_bytes + size <= end:
            return f"{tensor.name} lies outside of its slab"
    return ""
