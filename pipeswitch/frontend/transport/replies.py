"""Replies to clients as frames, and the readable parts of invalid messages. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from ...base.bytes_tensors import BYTES
from ...base.codec import UNREADABLE
from ...base.errors import PipeSwitchError, RemoteProtocolError, to_wire
from ...base.roles import Principal
from ...base.units import printed
from ...ipc.messages.base import SlabTensor
from ...programs.interface.layout import ITEM_BYTES
from ...scheduler.state.events import Reply
from ...wire.frames import (
    BODY_TENSOR,
    MAGIC,
    VERSION,
    ReplyHeader,
    WireError,
    WireTensor,
    encode_header,
    encoder,
    pack_dict,
)
from ...wire.request_timing import RequestTiming

INLINE_BODY_BYTES: Final = 256 << 10  # a larger body travels as a tensor named BODY_TENSOR


def reply_frames(
    request_id: str,
    session: str = "",
    *,
    body: dict[str, Any] | None = None,
    outputs: tuple[WireTensor, ...] = (),
    timing: RequestTiming | None = None,
    error: PipeSwitchError | None = None,
    more: bool = False,
) -> list[Any]:
    """Return the frames of a reply. A body that is too large for the header becomes a tensor."""
    header = ReplyHeader(
        v=VERSION,
        id=request_id,
        status="error" if error is not None else "progress" if more else "ok",
        session=session,
        more=more,
        timing=timing,
        outputs=outputs,
        body=body or {},
        error=WireError(**printed(to_wire(error))) if error is not None else None,
    )
    try:
        encoder.encode_into(header, packed := bytearray())  # saves a call of ``encode_header``
    except (TypeError, ValueError, OverflowError, RecursionError):
        if header.error is None:
            raise
        bare = msgspec.structs.replace(header.error, data={})  # without data, it can always be sent
        encoder.encode_into(msgspec.structs.replace(header, error=bare), packed := bytearray())
    if len(packed) <= INLINE_BODY_BYTES or outputs:
        return [MAGIC, bytes(packed)]
    large = pack_dict(header.body)
    tensor = WireTensor(name=BODY_TENSOR, dtype="uint8", shape=(len(large),), frame=0)
    header = msgspec.structs.replace(header, body={}, outputs=(tensor,))
    return [MAGIC, encode_header(header), large]


def answer_frames(request_id: str, session: str, answer: Reply, memory: memoryview) -> list[Any]:
    """Return a reply with its outputs, which lie in ``memory`` and are not copied here."""
    outputs: list[WireTensor] = []
    tensors: list[Any] = []
    for number, tensor in enumerate(answer.outputs):
        outputs.append(
            WireTensor(name=tensor.name, dtype=tensor.dtype, shape=tensor.shape, frame=number)
        )
        at = tensor.offset_bytes
        tensors.append(memory[at : at + tensor.size_bytes])
    frames = reply_frames(
        request_id,
        session,
        body=answer.body,
        outputs=tuple(outputs),
        timing=answer.timing,
        error=answer.error,
        more=answer.more,
    )
    return [*frames, *tensors]


def redact(
    op: str, body: dict[str, Any], principal: Principal, counts: Mapping[str, int]
) -> dict[str, Any]:
    """Return a reply's body without the facts for operators: paths, and other clients' data.

    Args:
        counts: counters of the caller's own requests.
    """
    if principal.may_operate or not body:
        return body
    match op:
        case "stats":
            return dict(counts)
        case "models":
            return {"models": [principal.visible(row) for row in body["models"]]}
        case "show":
            return {"model": principal.visible(body["model"])}
        case _:
            return body


class _Envelope(msgspec.Struct):
    """Readable fields of a header that is otherwise invalid."""

    id: str = ""
    v: int = 0


def envelope_id(parts: Sequence[Any]) -> str:
    """Return the request id of an otherwise invalid message; empty when there is none."""
    return envelope.id if (envelope := _envelope(parts)) and len(envelope.id) <= 64 else ""


def wrong_version(parts: Sequence[Any]) -> RemoteProtocolError | None:
    """Return the error if a message has another protocol version, else None."""
    envelope = _envelope(parts)
    if envelope is None or envelope.v == VERSION:
        return None
    return RemoteProtocolError(
        f"protocol version {envelope.v} is not supported; this server speaks version {VERSION}",
        hint="use the client of the server's own release",
    )


def _envelope(parts: Sequence[Any]) -> _Envelope | None:
    if len(parts) < 2 or bytes(parts[0][:4]) != MAGIC or len(parts[1]) > INLINE_BODY_BYTES:
        return None
    try:
        return msgspec.msgpack.decode(parts[1], type=_Envelope)
    except UNREADABLE:
        return None


def output_outside(outputs: Sequence[SlabTensor], start_bytes: int, size_bytes: int) -> str:
    """Return why a worker's outputs are refused, or "". They must lie in their own reply slab."""
    end_bytes = start_bytes + size_bytes
    for tensor in outputs:
        size = ITEM_BYTES.get(tensor.dtype, 0)
        for extent in tensor.shape:
            size *= extent
        if tensor.dtype == BYTES:  # a function's texts: the size is that of the packed bytes
            size = tensor.size_bytes
        if tensor.pieces:
            return f"{tensor.name} claims pieces of the pool"
        if size != tensor.size_bytes or min(tensor.shape, default=0) < 0:
            return f"{tensor.name} claims {tensor.size_bytes} bytes for {size}"
        if not start_bytes <= tensor.offset_bytes <= tensor.offset_bytes + size <= end_bytes:
            return f"{tensor.name} lies outside of its slab"
    return ""
