"""Fuzz target: packets between our processes. A packet is refused, or equal after a round trip."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import msgspec

from pipeswitch.base.errors import RemoteProtocolError
from pipeswitch.ipc.channel import decode_message, encode_message
from pipeswitch.ipc.messages.base import Exit, ResourceLimits, Slot
from pipeswitch.ipc.messages.daemon import DaemonSettings
from pipeswitch.ipc.messages.fork_server import Fork
from pipeswitch.ipc.messages.worker import WorkerSettings

from . import daemons, obeying, workers
from .target import Codec, Target, split_frames


def run(data: bytes) -> None:
    with contextlib.suppress(RemoteProtocolError):
        message = decode_message(data)
        if decode_message(encode_message(message)) != message and not _has_nan(message):
            raise AssertionError(f"{message} is another one when it is read again")


def _has_nan(value: Any) -> bool:
    """Return True if a value contains NaN, which is not equal to itself."""
    if isinstance(value, float):
        return math.isnan(value)
    if isinstance(value, dict):
        return any(map(_has_nan, (*value, *value.values())))
    if isinstance(value, list | tuple):
        return any(map(_has_nan, value))
    if isinstance(value, msgspec.Struct):
        return any(_has_nan(getattr(value, name)) for name in value.__struct_fields__)
    return False


def seeds() -> list[bytes]:
    """Return at least one packet of each kind."""
    settings = [
        DaemonSettings(
            device="cpu",
            limits=ResourceLimits(arena_bytes=1, store_bytes=1, fence_count=1, options=b"\x80"),
        ),
        WorkerSettings(
            slot=Slot(0),
            device="cpu",
            limits=ResourceLimits(
                arena_bytes=1, fence_count=1, pool_bytes=1, doorbell_count=1, options=b"\x80"
            ),
        ),
    ]
    fork = Fork(ticket=1, name="w", settings=encode_message(settings[1]))
    messages = [*settings, fork, Exit(), *workers.worker_messages()]
    others = [
        frame
        for part in (daemons, obeying)
        for seed in part.seeds()
        for frame in split_frames(seed)
    ]
    return sorted({*map(encode_message, messages), *others})


TARGET = Target(
    name="packet",
    run=run,
    seeds=seeds,
    codec=Codec(
        split=lambda data: [data],
        join=lambda parts: parts[0],
        decode=msgspec.msgpack.decode,
        encode=msgspec.msgpack.encode,
    ),
    words=("type", "op_id", "GroupCopy", "ByteRange", "values", "data"),
    max_bytes=1024,
)
