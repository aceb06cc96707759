"""Fuzz target: orders to a worker, with tensors in the request pool, the gate, answers to a job.

The controller is honest, but may have bugs. The worker must refuse an impossible order with an
ordinary exception, before it accesses a byte outside of the pool.
"""

from __future__ import annotations

import functools
import os
import threading
from typing import Any

from pipeswitch.base.errors import RemoteProtocolError
from pipeswitch.commits.area import create_area
from pipeswitch.ipc.channel import decode_message, encode_message
from pipeswitch.ipc.control_page import sealed_memfd
from pipeswitch.ipc.gate import Gate, GateState
from pipeswitch.ipc.messages import worker as worker_msg
from pipeswitch.ipc.messages.base import (
    Exit,
    JobName,
    Message,
    ModelName,
    OpId,
    SlabTensor,
    SliceRead,
    Slot,
    StepCommitted,
    Turn,
)
from pipeswitch.ipc.messages.run import Run
from pipeswitch.workers.inference.pool import MappedPool
from pipeswitch.workers.training.host import JobHost

from .target import MSGPACK_FRAMES, Target, join_frames, split_frames

POOL_BYTES = 1 << 16
SLOT_BYTES = 4096
REFUSED = (ValueError, KeyError, TypeError, RuntimeError, OverflowError)
"""Exceptions for errors in a request, which fails without its worker (inference/task.py)."""


class _View:
    device = "cpu"

    def settle(self) -> None:
        """Return at once, because no computation is queued."""


@functools.cache
def _pool() -> MappedPool:
    return MappedPool(sealed_memfd("fuzz-pool", POOL_BYTES), POOL_BYTES)


@functools.cache
def _area() -> int:
    return create_area(SLOT_BYTES)


class _Worker:
    """The part of workers/main.py that its termination thread runs, without the thread."""

    def __init__(self) -> None:
        self.parked: list[tuple[int, int]] = []
        self.gate = Gate(lambda turn, next_turn, where: self.parked.append((turn, next_turn)))
        parts: Any = (_RUN_JOB, None, _View(), [])
        self.host = JobHost(*parts)

    def obey(self, message: Message) -> None:
        match message:
            case worker_msg.StopTask():
                self.gate.request_stop(message.turn, message.next_turn)
            case worker_msg.GrantTurn():
                self.gate.grant(message.turn)
            case worker_msg.EvictTask():
                self.gate.request_evict()
                self.host.wake()
            case worker_msg.LeaseGranted():
                self.host.lease_answered(message, [os.dup(_area())])
            case worker_msg.LeaseRefused():
                self.host.lease_answered(message, [])
            case SliceRead() | StepCommitted():
                self.host.commit_answered(message)
            case worker_msg.RunInference():
                _request(message)
            case _:
                pass
        if len({turn for turn, _ in self.parked}) != len(self.parked):
            raise AssertionError("one turn is given up twice")
        if self.gate.state in (GateState.RUNNING, GateState.PARKED):
            raise AssertionError("the main thread does something that it has not been asked to")

    def close(self) -> None:
        self.host.restore()
        if self.host._commits >= 0:
            os.close(self.host._commits)


def _request(order: worker_msg.RunInference) -> None:
    pool = _pool()
    for slab in [one for run in order.runs for one in run.inputs]:
        try:
            tensor = pool.tensor(slab, is_code=order.is_code)
        except REFUSED:
            continue
        start = tensor.data_ptr() - pool.address
        size = tensor.numel() * tensor.element_size()
        if size and not 0 <= start <= start + size <= POOL_BYTES:
            raise AssertionError(f"an input reads {start}…{start + size} of the pool")


def run(data: bytes) -> None:
    thread_count = threading.active_count()
    worker = _Worker()
    try:
        for packet in split_frames(data):
            try:
                message = decode_message(packet)
            except RemoteProtocolError:
                return  # a worker ends in this case
            worker.obey(message)
    finally:
        worker.close()
    if threading.active_count() > thread_count:
        raise AssertionError("a thread was left")


_RUN_JOB = worker_msg.RunJob(
    op_id=OpId(1),
    turn=Turn(0),
    spec=worker_msg.JobSpec(JobName("j"), "a.py", (), 1),
    log_path="",
    slot_bytes=SLOT_BYTES,
    commit_every_ms=1.0,
)


def seeds() -> list[bytes]:
    """Return two inputs: all orders to a job, and all orders for a request."""
    op_id = OpId(1)
    x = SlabTensor(name="x", dtype="float32", shape=(2, 4), offset_bytes=4096, size_bytes=32)
    mask = SlabTensor(name="mask", dtype="bool", shape=(2, 2), offset_bytes=4608, size_bytes=4)
    infer = worker_msg.RunInference(
        op_id=OpId(2),
        model=ModelName("m"),
        digest="d",
        directory="",
        arena_offset_bytes=0,
        first_fence=0,
        residency_id=op_id,
        runs=(Run(request_id="r", inputs=(x, mask), reply_offset_bytes=8192, reply_bytes=4096),),
    )
    job: list[Message] = [
        worker_msg.GrantTurn(op_id=op_id, turn=Turn(2)),
        worker_msg.StopTask(op_id=op_id, turn=Turn(2), next_turn=Turn(3), next_slot=Slot(1)),
        worker_msg.StopTask(op_id=op_id, turn=Turn(4), next_turn=Turn(5), next_slot=Slot(0)),
        worker_msg.GrantTurn(op_id=op_id, turn=Turn(4)),
        worker_msg.LeaseGranted(op_id=op_id, offset_bytes=0, size_bytes=4096),
        worker_msg.LeaseRefused(op_id=op_id, error="OutOfDeviceMemory", message="no"),
        StepCommitted(job=JobName("j"), op_id=op_id, number=0, step=1, copy_ms=1.0),
        worker_msg.EvictTask(op_id=op_id),
    ]
    requests: list[Message] = [infer, worker_msg.ForgetModel(model=ModelName("m")), Exit()]
    return [join_frames([encode_message(one) for one in part]) for part in (job, requests)]


TARGET = Target(
    name="order",
    run=run,
    seeds=seeds,
    codec=MSGPACK_FRAMES,
    words=(
        "GrantTurn",
        "StopTask",
        "EvictTask",
        "LeaseGranted",
        "RunInference",
        "SlabTensor",
        "float32",
        "bool",
        "bfloat16",
        "inputs",
        "type",
    ),
)
