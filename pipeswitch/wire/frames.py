"""The only module that knows bytes: frames of the client protocol, packets between processes.

Client protocol (docs/protocol.md): parts ``[b"PSW1"][msgpack header][tensor]…``, on a stream behind
a table of their sizes; with keys a ZeroMQ message.
Internal: one ``SOCK_SEQPACKET`` packet per message, msgpack of a tagged struct, descriptors by
``SCM_RIGHTS``. Nothing is ever unpickled. Decoders raise RemoteProtocolError and nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from struct import Struct, pack
from typing import Any, Final, Literal, TypeAlias, TypeVar

import msgspec

from ..base.codec import encoded
from ..base.errors import RemoteProtocolError
from .request_timing import RequestTiming

MAGIC: Final = b"PSW1"
VERSION: Final = 1
MAX_HEADER_BYTES: Final = 1 << 20  # a header is names and shapes; 1 MiB is already absurd
MAX_TENSORS: Final = 64
MAX_DIMS: Final = 8
BODY_TENSOR: Final = "body"  # what a body that is too large for a header travels as
CHUNK_BYTES: Final = 4 << 20  # of an upload, at most
MAX_NESTING: Final = 64  # of free-form fields: what was decoded must be encodable and printable

TRACEPARENT: Final = re.compile(
    "(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}"
)
"""W3C's: version, trace, span, flags."""
ZMTP: Final = "zmtp"  # the reason: the peer begins as libzmq does, not as a stream
INLINE: Final = (1 << 64) - 1  # a part's place: behind the table, and not in the share
_ZMTP_BYTE: Final = 0xFF
_STREAM: Final = Struct("<4sIQ")  # magic, how many parts, parts in the share that were taken
_PART: Final = Struct("<QQ")  # size and place

T = TypeVar("T")
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
    op: str  # the verb: frontend/verbs.py has them
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
    timing: RequestTiming | None = None  # of an inference
    outputs: tuple[WireTensor, ...] = ()
    body: dict[str, Any] = {}
    error: WireError | None = None


def plain(value: Any) -> Any:
    """Return the plain number or text of a numpy scalar."""
    plain = value.item() if hasattr(value, "item") else value
    if type(plain) in (bool, int, float, str):
        return plain
    raise TypeError(f"a {type(value).__name__} cannot be sent")


encoder = msgspec.msgpack.Encoder(enc_hook=plain)
encode_header: Callable[[RequestHeader | ReplyHeader], bytes] = partial(encoded, encoder)
pack_dict: Callable[[dict[str, Any]], bytes] = partial(encoded, encoder)
_request_decoder = msgspec.msgpack.Decoder(RequestHeader)
_reply_decoder = msgspec.msgpack.Decoder(ReplyHeader)


def decode_with(decoder: msgspec.msgpack.Decoder[T], data: Any, what: str) -> T:
    """One place that turns every way a decoder can fail into one typed error."""
    if len(data) > MAX_HEADER_BYTES:
        raise RemoteProtocolError(f"{what} of {len(data)} bytes is over {MAX_HEADER_BYTES}")
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, ValueError, RecursionError, OverflowError, TypeError) as error:
        raise RemoteProtocolError(f"malformed {what}: {error}") from None


def refuse_deep(value: Any, what: str, levels: int = MAX_NESTING) -> None:
    """Refuse deep nesting, because an encoder is called from deeper down than the decoder.

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
        refuse_deep(part, what, levels - 1)


def decode_request(frames: Sequence[Any]) -> RequestHeader:
    """Check magic, version, header and the frame numbers of a client's message.

    ``frames`` are buffers: magic, header, tensors. Tensor bytes are not looked at.

    Raises:
        RemoteProtocolError: anything that is not exactly a request of this protocol.
    """
    if len(frames) < 2 or bytes(frames[0]) != MAGIC:
        raise RemoteProtocolError(f"not a PipeSwitch message: the first frame must be {MAGIC!r}")
    header = decode_with(_request_decoder, frames[1], "request header")
    if header.v != VERSION:
        raise RemoteProtocolError(
            f"protocol version {header.v} is not supported; this server speaks version {VERSION}",
            hint="use the client of the server's own release",
        )
    tensor_count = len(frames) - 2
    if tensor_count > MAX_TENSORS or len(header.inputs) > MAX_TENSORS:
        raise RemoteProtocolError(f"{tensor_count} tensor frames are over {MAX_TENSORS}")
    if header.op != "put" and sorted([t.frame for t in header.inputs]) != [*range(tensor_count)]:
        raise RemoteProtocolError("every tensor frame must be named by exactly one input")
    if not header.id or len(header.id) > 64:
        raise RemoteProtocolError("a request id has 1 to 64 characters")
    if header.body:
        refuse_deep(header.body, "a request's body")
    return header


def decode_reply(frames: Sequence[Any]) -> ReplyHeader:
    """Decode a reply; the client's side of ``decode_request``."""
    if len(frames) < 2 or bytes(frames[0]) != MAGIC:
        raise RemoteProtocolError("the server's answer is not a PipeSwitch message")
    header = decode_with(_reply_decoder, frames[1], "reply header")
    for tensor in header.outputs:
        if not 0 <= tensor.frame < len(frames) - 2:
            raise RemoteProtocolError("an output names a missing frame")
    return header


Table: TypeAlias = tuple[int, int, Sequence[tuple[int, int]]]
"""What a message on a stream begins with: its own bytes; how many of the peer's parts in the share
were taken so far; each part's (the header first) size, and place in the sender's half."""


def pack_table(parts: Sequence[tuple[int, int]], taken_count: int = 0) -> bytes:
    """Inverse of ``read_table``. A message of no parts asks for a share, or brings it."""
    numbers = chain.from_iterable(parts)
    return pack(f"<4sIQ{2 * len(parts)}Q", MAGIC, len(parts), taken_count, *numbers)


def read_table(data: Any, max_part_bytes: int) -> Table | None:
    """Return the table that ``data`` begins with; None: more bytes of it are to come.

    Raises:
        RemoteProtocolError: it is none, or a part is too large.
    """
    if bytes(data[:4]) != MAGIC[: len(data)]:
        reason = ZMTP if data[0] == _ZMTP_BYTE else "magic"
        raise RemoteProtocolError("a message on a stream must begin with its magic", reason=reason)
    if len(data) < _STREAM.size:
        return None
    _, count, taken_count = _STREAM.unpack_from(data)
    if count > MAX_TENSORS + 1:
        raise RemoteProtocolError(f"{count} parts are over {MAX_TENSORS + 1}")
    end = _STREAM.size + count * _PART.size
    if len(data) < end:
        return None
    parts = list(_PART.iter_unpack(data[_STREAM.size : end]))
    for number, (size, place) in enumerate(parts):
        if size > (max_part_bytes if number else MAX_HEADER_BYTES):
            raise RemoteProtocolError(f"a part of {size} bytes is too large")
        if not number and place != INLINE:
            raise RemoteProtocolError(
                "a header must not be in shared memory, because it could change"
            )
    return end, taken_count, parts
