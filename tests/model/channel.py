"""Conversion of the messages that wait in a channel to plain values, for a frozen state."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any, Final

import msgspec
from msgspec.structs import astuple

from pipeswitch.ipc.messages import daemon as daemon_msg
from pipeswitch.ipc.messages import worker as worker_msg
from pipeswitch.ipc.messages.base import ByteRange, Message, SlabTensor, SliceRead, StepCommitted
from pipeswitch.ipc.messages.run import Run, SamplingParams

from .frozen import OP_IDS, Add, Next

Body = tuple[str, tuple[Any, ...]]  # a message's type and its fields except operation ids and turns

IMAGE_BYTES: Final = 3  # size of a job's training state; see ``commits``
_RANGES: Final = (ByteRange(offset_bytes=0, size_bytes=IMAGE_BYTES),)
# Fields without effect in the model are not packed; unpacked messages have these values instead.
_FIXED: Final[dict[type[Message], dict[str, Any]]] = {
    worker_msg.RunInference: {
        "digest": "",
        "directory": "",
    },
    worker_msg.RunJob: {
        "log_path": "",
        "commit_every_ms": float("inf"),
        "restarts": 0,
        "steps_recomputed": 0,
    },
    worker_msg.InferenceDone: {
        "turn_at_ms": 0.0,
        "first_group_at_ms": 0.0,
        "ended_at_ms": 0.0,
        "stall_ms": 0.0,
        "group_begins_at_ms": (),
        "group_ends_at_ms": (),
    },
    worker_msg.JobParked: {"asked_at_ms": 0.0, "parked_at_ms": 0.0},
    worker_msg.CommitStep: {"ranges": _RANGES},
    daemon_msg.CommitCopy: {"ranges": _RANGES},
    StepCommitted: {"copy_ms": 0.0},
    worker_msg.JobEnded: {"step": 0, "error_type": "", "error_text": ""},
    daemon_msg.TransmitEnded: {
        "copied_bytes": 0,
        "started_at_ms": 0.0,
        "ended_at_ms": 0.0,
        "group_ends_at_ms": (),
    },
    daemon_msg.SliceCopied: {"began_at_ms": 0.0, "ended_at_ms": 0.0},
    daemon_msg.DaemonReady: {"pid": 1},
}
_CARRIED: Final = (
    worker_msg.RunInference,
    worker_msg.RunJob,
    worker_msg.StopTask,
    worker_msg.GrantTurn,
    worker_msg.EvictTask,
    worker_msg.LeaseGranted,
    worker_msg.WorkerReady,
    worker_msg.InferenceDone,
    worker_msg.WorkerClean,
    worker_msg.JobParked,
    worker_msg.LeaseRequest,
    worker_msg.CommitStep,
    daemon_msg.CommitCopy,
    daemon_msg.Scrub,
    SliceRead,
    StepCommitted,
    worker_msg.JobEnded,
    daemon_msg.TransmitModel,
    daemon_msg.TransmitEnded,
    daemon_msg.Scrubbed,
    daemon_msg.DaemonReady,
    daemon_msg.CommitPersisted,
    worker_msg.Yielded,
    worker_msg.JobReady,
    worker_msg.HideSlice,
    worker_msg.SliceHidden,
    worker_msg.ShowSlice,
    daemon_msg.CopySliceOut,
    daemon_msg.CopySliceIn,
    daemon_msg.SliceCopied,
)
_NESTED: Final[dict[str, tuple[type, int]]] = {  # field -> type of elements, nesting of tuples
    "groups": (daemon_msg.GroupCopy, 1),
    "runs": (Run, 1),
    "outputs": (SlabTensor, 2),
    "spec": (worker_msg.JobSpec, 0),
}
_OF_COMMITS: Final = (
    worker_msg.CommitStep,
    daemon_msg.CommitCopy,
    SliceRead,
    StepCommitted,
)  # their ids are compared by size


class _Kind:
    """Fields of one type of message, by the way in which they are packed."""

    def __init__(self, kind: type[Message]) -> None:
        self.kind = kind
        self.fixed = _FIXED.get(kind, {})
        names = [name for name in kind.__struct_fields__ if name not in self.fixed]
        annotations = {
            k: v for base in kind.__mro__ for k, v in vars(base).get("__annotations__", {}).items()
        }
        self.epochs = tuple(name for name in names if annotations[name] in OP_IDS)
        self.is_ordered = tuple(
            annotations[name] == "Turn" or kind in _OF_COMMITS for name in self.epochs
        )
        self.plain = tuple(name for name in names if name not in (*self.epochs, *_NESTED))
        self.nested = tuple(name for name in names if name in _NESTED)


_KINDS: Final = {kind.__name__: _Kind(kind) for kind in _CARRIED}


def _packed(value: Any, depth: int) -> Any:
    if depth:
        return tuple([_packed(part, depth - 1) for part in value])
    if isinstance(value, worker_msg.JobSpec):
        return (value.name,)  # the rest has no effect in the model
    if (
        isinstance(value, daemon_msg.GroupCopy) and value.parts
    ):  # a value must be of a built-in type
        value = msgspec.structs.replace(value, parts=tuple(map(tuple, value.parts)))
    parts = astuple(value) if value is not None else ()
    return tuple([_packed(one, 0) if isinstance(one, SamplingParams) else one for one in parts])


def _unpacked(value: Any, kind: type, depth: int) -> Any:
    if depth:
        return tuple([_unpacked(part, kind, depth - 1) for part in value])
    if not value:
        return None
    if kind is worker_msg.JobSpec:
        return worker_msg.JobSpec(*value, "", (), 1)
    fields = dict(zip(kind.__struct_fields__, value, strict=True))  # type: ignore[attr-defined]
    if "sampling_params" in fields:
        fields["sampling_params"] = _unpacked(fields["sampling_params"] or (), SamplingParams, 0)
    return kind(**fields)


@cache
def _pack(message: Message) -> tuple[Body, tuple[int, ...]]:
    """Return a message as plain values, and its operation ids, negated if code orders them."""
    name = type(message).__name__
    known = _KINDS[name]
    fields = [getattr(message, field) for field in known.plain]
    for field in known.nested:
        fields.append(_packed(getattr(message, field), _NESTED[field][1]))
    epochs = [getattr(message, field) for field in known.epochs]
    signed = [
        -e if is_ordered else e for e, is_ordered in zip(epochs, known.is_ordered, strict=True)
    ]
    return (name, tuple(fields)), tuple(signed)


@cache
def _unpack(body: Body, epochs: tuple[int, ...]) -> Any:
    """Return the message that ``_pack`` packed."""
    name, values = body
    known = _KINDS[name]
    fields = dict(zip((*known.plain, *known.nested), values, strict=True))
    for field in known.nested:
        fields[field] = _unpacked(fields[field], *_NESTED[field])
    return known.kind(**fields, **dict(zip(known.epochs, epochs, strict=True)), **known.fixed)


@cache
def plain(message: Message) -> Any:
    """Return the message with fixed values (``_FIXED``) in the fields without effect."""
    if type(message).__name__ not in _KINDS:
        return message
    body, epochs = _pack(message)
    return _unpack(body, tuple(map(abs, epochs)))


def freeze_items(messages: Iterable[Message], e: Add) -> Any:
    """Return a channel's messages as plain values; pass their operation ids to ``e``."""
    frozen = []
    for message in messages:
        body, epochs = _pack(message)
        for op_id in epochs:
            e(op_id)
        frozen.append(body)
    return tuple(frozen)


def thaw_items(frozen: Any, n: Next) -> list[Any]:
    return [_unpack(body, tuple([n() for _ in _KINDS[body[0]].epochs])) for body in frozen]


__all__ = ["IMAGE_BYTES", "freeze_items", "plain", "thaw_items"]
