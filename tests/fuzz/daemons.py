"""Fuzz target: orders to the memory daemon, with the real guard and real commit areas.

The device is a few pages of this process. It performs each order at once, without checks of its
own. An access outside of its range is an escape, and so is an exception in a daemon's thread.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from pipeswitch.base.errors import RemoteProtocolError
from pipeswitch.base.worker_thread import Failed, Work
from pipeswitch.commits.area import HEADER_BYTES, create_area
from pipeswitch.ipc.channel import decode_message, encode_message
from pipeswitch.ipc.messages import daemon as daemon_msg
from pipeswitch.ipc.messages.base import ByteRange, Exit, JobName, Message, ModelName, OpId, Ping
from pipeswitch.memory_daemon import daemon as daemon_module
from pipeswitch.memory_daemon.daemon import MemoryDaemon

from .target import MSGPACK_FRAMES, Target, join_frames, split_frames

ARENA_BYTES = 1 << 16
STORE_BYTES = 1 << 14
FENCE_COUNT = 16
SLOT_BYTES = 4096
NOWHERE = "/proc/self/nowhere"  # a folder that cannot be created, so that no file is written


class _Pages:
    """Device (``DeviceMemory``) that performs orders without checking them."""

    arena_bytes = ARENA_BYTES
    store_bytes = STORE_BYTES

    def __init__(self) -> None:
        self._arena = bytearray(ARENA_BYTES)
        self._store = bytearray(STORE_BYTES)
        self._live: dict[
            OpId, tuple[daemon_msg.TransmitModel, Callable[[daemon_msg.TransmitEnded], None]]
        ] = {}

    def export_descriptors(self) -> list[int]:
        return []

    def export_handle(self) -> bytes:
        return b""

    def store_view(self, offset_bytes: int, size_bytes: int) -> memoryview:
        if not 0 <= offset_bytes <= offset_bytes + size_bytes <= STORE_BYTES or size_bytes < 0:
            raise RemoteProtocolError("outside of the store")  # as in devices/cpu/memory.py
        return memoryview(self._store)[offset_bytes : offset_bytes + size_bytes]

    def open_tenant(self, tenant: str, descriptor: int) -> None:
        raise RemoteProtocolError("tenants share this arena")

    def pin(self, place: memoryview) -> None:
        """Pin nothing, as on the cpu."""

    def transmit(
        self, order: daemon_msg.TransmitModel, on_end: Callable[[daemon_msg.TransmitEnded], None]
    ) -> None:
        """Check each group's ranges. The order ends when it is cancelled or finished."""
        for group in order.groups:
            _within("copy", group.arena_offset_bytes, group.size_bytes, ARENA_BYTES)
            _within("read", group.store_offset_bytes, group.size_bytes, STORE_BYTES)
            _within("word", group.fence, 1, FENCE_COUNT)
            if group.arena_offset_bytes < FENCE_COUNT * 4:
                raise AssertionError("a copy over the fences")
        self._live[order.op_id] = (order, on_end)

    def cancel(self, op_id: OpId) -> None:
        if op_id in self._live:
            self._end(op_id, is_complete=False)

    def finish(self) -> None:
        for op_id in list(self._live):
            self._end(op_id, is_complete=True)

    def _end(self, op_id: OpId, *, is_complete: bool) -> None:
        order, on_end = self._live.pop(op_id)
        ended = daemon_msg.TransmitEnded(
            model=order.model,
            op_id=op_id,
            is_complete=is_complete,
            group_count=len(order.groups),
            copied_bytes=0,
            started_at_ms=0.0,
            ended_at_ms=0.0,
        )
        on_end(ended)

    def read_slice(self, offset_bytes: int, ranges: Sequence[ByteRange], into: memoryview) -> None:
        position = 0
        for piece in ranges:
            start = offset_bytes + piece.offset_bytes
            _within("piece", start, piece.size_bytes, ARENA_BYTES)
            end = position + piece.size_bytes
            into[position:end] = self._arena[start : start + piece.size_bytes]
            position = end

    def scrub(self, offset_bytes: int, size_bytes: int) -> None:
        _within("scrub", offset_bytes, size_bytes, ARENA_BYTES)

    def close(self) -> None:
        for op_id in list(self._live):
            self._end(op_id, is_complete=False)


def _within(what: str, start: int, size: int, limit: int) -> None:
    if start < 0 or size < 0 or start + size > limit:
        raise AssertionError(f"{what} {start}+{size} is not within {limit}")


class _Lane:
    """Stand-in for WorkerThread: ``put`` does the work at once, and its exceptions are escapes."""

    def __init__(self, name: str) -> None:
        """Accept the same argument as ``WorkerThread``."""

    def put(self, work: Work, failed: Failed = lambda _: None) -> None:
        work()

    def shutdown(self) -> None:
        """Return at once: no work is left."""


class _Control:
    """Daemon's end of its channel, which returns an input's packets, and counts encoded answers."""

    def __init__(self) -> None:
        self.point = ""
        self.packets: list[bytes] = []
        self.send_count = 0

    def send(self, message: Message, descriptors: Sequence[int] = ()) -> None:
        encode_message(message)
        self.send_count += 1

    def receive(self) -> tuple[Message, list[int]] | None:
        if not self.packets:
            return None
        message = decode_message(self.packets.pop(0))
        if isinstance(message, daemon_msg.PersistCommit | daemon_msg.StoreModel):
            # Replace the path by one that cannot exist, but keep its odd characters.
            odd = message.directory[-64:].replace("/", "")
            message = msgspec.structs.replace(message, directory=f"{NOWHERE}/{odd}")
        is_open = isinstance(message, daemon_msg.OpenCommits)
        return message, [os.dup(_area())] if is_open else []


@functools.cache
def _area() -> int:
    return create_area(SLOT_BYTES)


def run(data: bytes) -> None:
    device, control = _Pages(), _Control()
    control.packets = split_frames(data)
    os.pwrite(_area(), bytes(HEADER_BYTES), 0)  # a new area's header: it has no commit
    lane, daemon_module.WorkerThread = daemon_module.WorkerThread, _Lane  # type: ignore[misc, assignment]
    try:
        parts: Any = (device, control)
        served = MemoryDaemon(*parts, fence_count=FENCE_COUNT)
    finally:
        daemon_module.WorkerThread = lane  # type: ignore[misc]
    served.run()
    device.finish()
    if served._guard.live_reads(0, STORE_BYTES) is not None:
        raise AssertionError("a transmission that has ended is still taken for live")


def _input(*messages: Message) -> bytes:
    return join_frames([encode_message(message) for message in messages])


def seeds() -> list[bytes]:
    """Return inputs that store and copy a model, and inputs that copy a job's commits."""
    model, job = ModelName("m"), JobName("j")
    groups = tuple(
        daemon_msg.GroupCopy(
            store_offset_bytes=i * 512, arena_offset_bytes=4096 + i * 512, size_bytes=512, fence=i
        )
        for i in range(3)
    )
    transmit = daemon_msg.TransmitModel(
        model=model, op_id=OpId(3), arena_offset_bytes=4096, region_bytes=2048, groups=groups
    )
    store = daemon_msg.StoreModel(
        model=model, op_id=OpId(2), directory="d", store_offset_bytes=0, size_bytes=1536
    )
    commit = daemon_msg.CommitCopy(
        job=job,
        op_id=OpId(5),
        number=1,
        step=1,
        slice_offset_bytes=8192,
        slice_bytes=4096,
        ranges=tuple(ByteRange(offset_bytes=at, size_bytes=8) for at in (0, 128)),
    )
    persist = daemon_msg.PersistCommit(job=job, op_id=OpId(5), directory="d")
    opened = daemon_msg.OpenCommits(job=job, slot_bytes=SLOT_BYTES)
    return [
        _input(store, transmit, daemon_msg.CancelTransmit(op_id=OpId(3)), Ping(op_id=OpId(4))),
        _input(transmit, msgspec.structs.replace(transmit, op_id=OpId(9)), store),
        _input(
            opened,
            commit,
            msgspec.structs.replace(commit, number=2, step=2),
            commit,
            persist,
            daemon_msg.CloseCommits(job=job),
            commit,
        ),
        _input(daemon_msg.Scrub(op_id=OpId(7), offset_bytes=8192, size_bytes=4096), Exit()),
    ]


TARGET = Target(
    name="daemon",
    run=run,
    seeds=seeds,
    codec=MSGPACK_FRAMES,
    words=(
        "TransmitModel",
        "CommitCopy",
        "OpenCommits",
        "PersistCommit",
        "StoreModel",
        "Scrub",
        "CancelTransmit",
        "CloseCommits",
        "Ping",
        "Exit",
        "m",
        "j",
        "type",
        "op_id",
        "number",
        "groups",
        "ranges",
    ),
)
