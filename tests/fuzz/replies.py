"""Fuzz target: replies that a server, or a malicious peer in its place, sends to a client."""

from __future__ import annotations

from typing import Any

from pipeswitch.base.errors import PipeSwitchError, RemoteProtocolError
from pipeswitch.client.calls import _error, _reply
from pipeswitch.client.tensors import from_reply
from pipeswitch.wire.frames import (
    MAGIC,
    ReplyHeader,
    WireError,
    WireTensor,
    decode_reply,
    encode_header,
    pack_dict,
)
from pipeswitch.wire.request_timing import RequestTiming

from .target import MSGPACK_FRAMES, Target, join_frames, split_frames

BILL = RequestTiming(queue_ms=1.0, switch_ms=2.0, resident=True, preempted="job", worker=1)


def run(data: bytes) -> None:
    """Decode the frames of one reply like a client."""
    frames = split_frames(data)
    try:
        header = decode_reply(frames)
        if header.error is not None:
            error = _error(header)
            if not isinstance(error, PipeSwitchError):
                raise TypeError(f"{type(error).__name__} is no error of ours")
            str(error)
            error.data.get("reason")
        else:
            result = from_reply("m", False, _reply(header, frames[2:]))
            result.timing.as_dict()
    except RemoteProtocolError:
        pass


def _frames(*tensors: bytes, **fields: Any) -> bytes:
    header = ReplyHeader(**{"v": 1, "id": "1", "status": "ok", **fields})
    return join_frames([MAGIC, encode_header(header), *tensors])


def seeds() -> list[bytes]:
    """Return replies: outputs of several dtypes, an error, progress, and a tensor as body."""
    outputs = tuple(
        WireTensor(name=dtype, dtype=dtype, shape=(2, 2), frame=number)
        for number, dtype in enumerate(("float32", "bfloat16", "int64", "bool"))
    )
    error = WireError(type="QueueFull", message="full", hint="wait", data={"requested_bytes": 4})
    empty = WireTensor(name="none", dtype="int8", shape=(0, 3), frame=0)
    body = WireTensor(name="body", dtype="uint8", shape=(9,), frame=0)
    event = join_frames([b"switch.", pack_dict({"at_ms": 1.0, "model": "m"})])
    return [
        _frames(bytes(16), bytes(8), bytes(32), bytes(4), outputs=outputs, timing=BILL),
        _frames(b"", outputs=(empty,)),
        _frames(status="error", error=error),
        _frames(status="progress", more=True, body={"stage": "export", "fraction": 0.5}),
        _frames(pack_dict({"a": [1, 2]}), outputs=(body,)),
        _frames(session="s" * 32, body={"server": "pipeswitch", "protocol": 1}),
        event,
    ]


TARGET = Target(
    name="reply",
    run=run,
    seeds=seeds,
    codec=MSGPACK_FRAMES,
    words=("PSW1", "body", "float32", "bfloat16", "uint8", "error", "outputs", "shape", "frame"),
)
