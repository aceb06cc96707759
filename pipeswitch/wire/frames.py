"""Encoding and decoding of the client protocol's frames.

A message has the parts ``[b"PSW1"][msgpack header][tensor]…`` (docs/protocol.md). On a stream a
table of their sizes precedes them; a client with keys sends them as one ZeroMQ message. Messages
between our processes are msgpack too (``ipc/channel.py``). Nothing is ever unpickled. Decoders
raise only RemoteProtocolError.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from struct import Struct, pack
from typing import Any, Final, Literal, TypeAlias, TypeVar

import msgspec

from ..base.codec import UNREADABLE, encoded, plain
from ..base.errors import RemoteProtocolError
from ..base.model_options import MAX_DIMS as MAX_DIMS
from ..base.model_options import MAX_TENSORS as MAX_TENSORS
from .request_timing import RequestTiming

MAGIC: Final = b"PSW1"
VERSION: Final = 1
MAX_HEADER_BYTES: Final = 1 << 20  # a header has names and shapes, which are much smaller
BODY_TENSOR: Final = "body"  # name of the tensor that carries a body too large for a header
CHUNK_BYTES: Final = 4 << 20  # maximum size of a chunk of an upload
UPLOAD_LOST: Final = "upload_lost"  # ``reason`` of an error after which a file is to be sent again
MAX_NESTING: Final = 64  # limit for free-form fields, so that they can be encoded and printed again

TRACEPARENT: Final = re.compile(
    "(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}"
)
"""W3C's traceparent header: version, trace, span, flags."""
ZMTP: Final = "zmtp"  # ``reason`` of an error: the peer's first byte is libzmq's, not a stream's
INLINE: Final = (1 << 64) - 1  # place of a part that follows the table; others are in shared memory
_ZMTP_BYTE: Final = 0xFF
_STREAM: Final = Struct("<4sIQ")  # magic, number of parts, ``taken_count`` of ``Table``
_PART: Final = Struct("<QQ")  # size and place of a part

T = TypeVar("T")
Status = Literal["ok", "error", "progress"]


class WireTensor(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Tensor of a request or reply. ``frame``: index among the frames with tensors, from 0."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    frame: int


class RequestHeader(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Header of a request, client -> server."""

    v: int
    op: str  # a verb of frontend/verbs.py
    id: str
    session: str = ""
    model: str = ""
    priority: str = ""  # empty: the model's priority
    deadline_ms: float | None = None
    inputs: tuple[WireTensor, ...] = ()
    body: dict[str, Any] = {}  # further fields, which the verb checks


class WireError(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Encoded typed error."""

    type: str
    message: str
    hint: str = ""
    data: dict[str, Any] = {}


class ReplyHeader(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Header of a reply, server -> client. ``more``: further replies to this request follow."""

    v: int
    id: str
    status: Status
    session: str = ""
    more: bool = False
    timing: RequestTiming | None = None  # only for inference
    outputs: tuple[WireTensor, ...] = ()
    body: dict[str, Any] = {}
    error: WireError | None = None


encoder = msgspec.msgpack.Encoder(enc_hook=plain)
encode_header: Callable[[RequestHeader | ReplyHeader], bytes] = partial(encoded, encoder)
pack_dict: Callable[[dict[str, Any]], bytes] = partial(encoded, encoder)
_request_decoder = msgspec.msgpack.Decoder(RequestHeader)
_reply_decoder = msgspec.msgpack.Decoder(ReplyHeader)


def decode_with(decoder: msgspec.msgpack.Decoder[T], data: Any, what: str) -> T:
    """Decode ``data``, which errors call ``what``; turn all errors into RemoteProtocolError."""
    if len(data) > MAX_HEADER_BYTES:
        raise RemoteProtocolError(f"{what} of {len(data)} bytes is over {MAX_HEADER_BYTES}")
    try:
        return decoder.decode(data)
    except (*UNREADABLE, ValueError, OverflowError, TypeError) as error:
        raise RemoteProtocolError(f"malformed {what}: {error}") from None


def refuse_deep(value: Any, what: str, levels: int = MAX_NESTING) -> None:
    """Refuse deep nesting: the encoder has less stack left than the decoder, and would fail.

    Raises:
        RemoteProtocolError: values or map keys are nested deeper than ``levels``.
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
    """Decode a client's request; check magic, version, header and the tensors' frame numbers.

    ``frames`` are buffers: magic, header, tensors. The tensors' bytes are not read.

    Raises:
        RemoteProtocolError: the frames are not a valid request.
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
    """Decode a reply in the client; raise RemoteProtocolError if it is not valid."""
    if len(frames) < 2 or bytes(frames[0]) != MAGIC:
        raise RemoteProtocolError("the server's answer is not a PipeSwitch message")
    header = decode_with(_reply_decoder, frames[1], "reply header")
    for tensor in header.outputs:
        if not 0 <= tensor.frame < len(frames) - 2:
            raise RemoteProtocolError("an output names a missing frame")
    return header


Table: TypeAlias = tuple[int, int, Sequence[tuple[int, int]]]
"""Start of a message on a stream: the table's size in bytes; ``taken_count``, the number of parts
that its sender took from shared memory so far; each part's size and place, the header first."""


def pack_table(parts: Sequence[tuple[int, int]], taken_count: int = 0) -> bytes:
    """Encode a table for ``read_table``. One without parts requests or announces shared memory."""
    numbers = chain.from_iterable(parts)
    return pack(f"<4sIQ{2 * len(parts)}Q", MAGIC, len(parts), taken_count, *numbers)


def read_table(data: Any, max_part_bytes: int) -> Table | None:
    """Return the table at the start of ``data``; None if ``data`` has only a part of it.

    Raises:
        RemoteProtocolError: ``data`` does not begin with a valid table, or a part is too large.
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
