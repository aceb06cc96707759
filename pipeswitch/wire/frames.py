"""The only module that knows bytes: frames of the client protocol, packets between processes.

Client protocol (docs/protocol.md): ZeroMQ multipart ``[b"PSW1"][msgpack header][tensor]…``.
Internal: one ``SOCK_SEQPACKET`` packet per message, msgpack of a tagged struct, descriptors by
``SCM_RIGHTS``. Nothing is ever unpickled. Decoders raise RemoteProtocolError and nothing else.
"""

from __future__ import annotations

import array
import errno
import os
import socket
from collections.abc import Sequence
from typing import Any, Final, Literal

import msgspec

from ..errors import LocalProtocolError, RemoteProtocolError
from ..failpoints import garbled
from ..ipc.messages import (
    AnyMessage,
    BuildFailed,
    InferenceFailed,
    JobReport,
    LeaseRefused,
    Message,
)

MAGIC: Final = b"PSW1"
VERSION: Final = 1
MAX_HEADER_BYTES: Final = 1 << 20  # a header is names and shapes; 1 MiB is already absurd
MAX_TENSORS: Final = 64
MAX_DIMS: Final = 8
MAX_DESCRIPTORS: Final = 64
MAX_NESTING: Final = 64  # of free-form fields: what was decoded must be encodable and printable

Op = Literal[
    "hello", "infer", "prefetch", "cancel", "put", "register", "unregister", "load", "unload",
    "models", "show", "ps", "train", "job", "jobs", "stats", "trace", "profile", "plan",
    "ping", "stop",
]  # fmt: skip
Status = Literal["ok", "error", "progress"]


class WireTensor(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One tensor of a request or reply; its bytes are frame ``frame`` (0 = first after header)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    frame: int


class RequestHeader(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """client -> server."""

    v: int
    op: Op
    id: str
    session: str = ""
    model: str = ""
    priority: str = ""  # empty: the model's own
    deadline_ms: float | None = None
    inputs: tuple[WireTensor, ...] = ()
    body: dict[str, Any] = {}  # the op's own fields, checked by the op


class WireError(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A typed error as it travels."""

    type: str
    message: str
    hint: str = ""
    data: dict[str, Any] = {}


class ReplyHeader(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """server -> client. ``more`` announces further replies to the same request (progress)."""

    v: int
    id: str
    status: Status
    session: str = ""
    more: bool = False
    timing: dict[str, Any] | None = None
    outputs: tuple[WireTensor, ...] = ()
    body: dict[str, Any] = {}
    error: WireError | None = None


def _plain(value: Any) -> Any:
    """numpy's scalars travel as the numbers and texts they are."""
    plain = value.item() if hasattr(value, "item") else value
    if type(plain) in (bool, int, float, str):
        return plain
    raise TypeError(f"a {type(value).__name__} cannot travel")


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
_request_decoder = msgspec.msgpack.Decoder(RequestHeader)
_reply_decoder = msgspec.msgpack.Decoder(ReplyHeader)
_message_decoder = msgspec.msgpack.Decoder(AnyMessage)
_dict_decoder = msgspec.msgpack.Decoder(dict[str, Any])


def encode_header(header: RequestHeader | ReplyHeader) -> bytes:
    """msgpack of a client protocol header."""
    return _encoder.encode(header)


def _decode(decoder: msgspec.msgpack.Decoder[Any], data: Any, what: str) -> Any:
    """One place that turns every way a decoder can fail into one typed error."""
    if len(data) > MAX_HEADER_BYTES:
        raise RemoteProtocolError(f"{what} of {len(data)} bytes is over {MAX_HEADER_BYTES}")
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, ValueError, RecursionError, OverflowError, TypeError) as error:
        raise RemoteProtocolError(f"malformed {what}: {error}") from None


def _refuse_deep(value: Any, what: str, levels: int = MAX_NESTING) -> None:
    """The decoder stops at the interpreter's own limit; whoever encodes it again is deeper down.

    Raises:
        RemoteProtocolError: nested deeper than ``levels``, map keys included.
    """
    if isinstance(value, dict):
        parts: Any = (*value, *value.values())
    elif isinstance(value, list | tuple):
        parts = value
    else:
        return
    if not levels:
        raise RemoteProtocolError(f"{what} is nested deeper than {MAX_NESTING} levels")
    for part in parts:
        _refuse_deep(part, what, levels - 1)


def decode_request(frames: Sequence[Any]) -> RequestHeader:
    """Check magic, version, header and the frame numbers of a client's message.

    ``frames`` are buffers: magic, header, tensors. Tensor bytes are not looked at.

    Raises:
        RemoteProtocolError: anything that is not exactly a request of this protocol.
    """
    if len(frames) < 2 or bytes(frames[0]) != MAGIC:
        raise RemoteProtocolError(f"not a PipeSwitch message: the first frame must be {MAGIC!r}")
    header = _decode(_request_decoder, frames[1], "request header")
    assert isinstance(header, RequestHeader)
    if header.v != VERSION:
        raise RemoteProtocolError(
            f"protocol version {header.v} is not spoken here, this server speaks {VERSION}",
            hint="use the client of the server's own release",
        )
    tensor_count = len(frames) - 2
    if tensor_count > MAX_TENSORS or len(header.inputs) > MAX_TENSORS:
        raise RemoteProtocolError(f"{tensor_count} tensor frames are over {MAX_TENSORS}")
    if header.op != "put" and sorted(t.frame for t in header.inputs) != list(range(tensor_count)):
        raise RemoteProtocolError("every tensor frame must be named by exactly one input")
    if not header.id or len(header.id) > 64:
        raise RemoteProtocolError("a request id has 1 to 64 characters")
    _refuse_deep(header.body, "a request's body")
    return header


def decode_reply(frames: Sequence[Any]) -> ReplyHeader:
    """The client's side of ``decode_request``."""
    if len(frames) < 2 or bytes(frames[0]) != MAGIC:
        raise RemoteProtocolError("the server's answer is not a PipeSwitch message")
    header = _decode(_reply_decoder, frames[1], "reply header")
    assert isinstance(header, ReplyHeader)
    if any(not 0 <= t.frame < len(frames) - 2 for t in header.outputs):
        raise RemoteProtocolError("an output names a frame that is not there")
    return header


def pack_dict(value: dict[str, Any]) -> bytes:
    """msgpack of a plain mapping (event topics, opaque settings)."""
    return _encoder.encode(value)


def unpack_dict(data: Any) -> dict[str, Any]:
    """Inverse of ``pack_dict``; RemoteProtocolError on anything else."""
    value = _decode(_dict_decoder, data, "mapping")
    assert isinstance(value, dict)
    return value


def encode_message(message: Message) -> bytes:
    """msgpack of an internal message."""
    return _encoder.encode(message)


def decode_message(data: bytes | memoryview) -> Message:
    """Inverse of ``encode_message``; RemoteProtocolError on anything else."""
    message = _decode(_message_decoder, data, "internal message")
    assert isinstance(message, Message)
    if isinstance(message, JobReport):
        _refuse_deep(message.values, "a report")
    elif isinstance(message, InferenceFailed | LeaseRefused | BuildFailed):
        _refuse_deep(message.data, "an error's data")
    return message


PACKET_BYTES: Final = MAX_HEADER_BYTES


class Channel:
    """One end of a socketpair that carries internal messages and descriptors.

    ``send`` may be called from any thread: a packet is one system call. ``receive`` belongs to
    one thread. Never blocks on a peer that does not read: see ``send``.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self.point = ""  # the failpoint that each message passes
        self._packet = bytearray(PACKET_BYTES)  # pages are taken as packets touch them
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, 4 << 20)  # the kernel caps it

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Message, descriptors: Sequence[int] = ()) -> None:
        """Send one message; ``descriptors`` are duplicated into the peer.

        Raises:
            BrokenPipeError: the peer is gone.
            BlockingIOError: a non-blocking channel's peer does not read: it hangs.
            LocalProtocolError: larger than a packet can be.
        """
        data = encode_message(message)
        if self.point:
            data = garbled(self.point, data)
        control = []
        if descriptors:
            packed = array.array("i", descriptors).tobytes()
            control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, packed)]
        try:
            self._socket.sendmsg([data], control, socket.MSG_NOSIGNAL)
        except ConnectionError as error:
            raise BrokenPipeError(error.errno, "peer is gone") from None
        except OSError as error:
            if error.errno == errno.EMSGSIZE:
                raise LocalProtocolError(
                    f"{type(message).__name__} of {len(data)} bytes does not fit in a packet"
                ) from None
            raise

    def receive(self) -> tuple[Message, list[int]] | None:
        """The next message with its descriptors (the caller owns them); None at end of file.

        Raises:
            BlockingIOError: a non-blocking channel has nothing to read.
            RemoteProtocolError: the peer sent nonsense; its descriptors are closed.
        """
        try:
            # Into one buffer: a fresh one of this size costs 13 us of page faults each time.
            size, control, flags, _ = self._socket.recvmsg_into(
                [self._packet], socket.CMSG_SPACE(4 * MAX_DESCRIPTORS), socket.MSG_CMSG_CLOEXEC
            )
        except ConnectionError:
            return None
        descriptors = array.array("i")
        for level, kind, payload in control:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                descriptors.frombytes(payload[: len(payload) - len(payload) % 4])
        if not size:
            return None
        try:
            if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
                raise RemoteProtocolError("a packet was truncated")
            return decode_message(memoryview(self._packet)[:size]), list(descriptors)
        except RemoteProtocolError:
            for descriptor in descriptors:
                os.close(descriptor)
            raise

    def setblocking(self, blocking: bool) -> None:
        self._socket.setblocking(blocking)

    def close(self) -> None:
        self._socket.close()

    def detach(self) -> int:
        """Give the descriptor away (to a forked child); this object is unusable afterwards."""
        return self._socket.detach()


def channel_pair() -> tuple[Channel, Channel]:
    """Two connected channels; both blocking, both close-on-exec."""
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return Channel(left), Channel(right)


def channel_from(descriptor: int) -> Channel:
    """A channel over an inherited descriptor."""
    return Channel(socket.socket(fileno=descriptor))
