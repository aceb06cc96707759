"""Messages at rest in a channel: packed, so that a state is made of plain values."""

from __future__ import annotations

from functools import cache
from typing import Any, Final, NewType

from pipeswitch.ipc import messages as m

from .frozen import EPOCHS, Add, Next

Data = NewType("Data", tuple)  # type: ignore[type-arg]  # plain values only
Item = tuple[str, tuple[Any, ...], tuple[int, ...]]  # name, plain fields, epochs and turns
Items = tuple[Item, ...]  # a channel: never changed, so a copy of its owner may share it

IMAGE_BYTES: Final = 3  # of the model's training state: see ``script``
# What never matters here is not carried: these values stand for it.
_FIXED: Final[dict[type[m.Message], dict[str, Any]]] = {
    m.RunInference: {
        "digest": "", "directory": "", "inputs": (), "reply_offset_bytes": 0, "reply_bytes": 0,
    },
    m.RunJob: {"entry": "", "args": (), "log_path": "", "commit_every_ms": 0.0},
    m.InferenceDone: {
        "turn_at_ms": 0.0, "first_group_at_ms": 0.0, "ended_at_ms": 0.0,
        "stall_ms": 0.0, "group_begins_at_ms": (), "group_ends_at_ms": (),
    },
    m.Parked: {"asked_at_ms": 0.0, "parked_at_ms": 0.0},
    m.CommitStep: {"ranges": (m.ByteRange(offset_bytes=0, size_bytes=IMAGE_BYTES),)},
    m.CommitCopy: {"ranges": (m.ByteRange(offset_bytes=0, size_bytes=IMAGE_BYTES),)},
    m.StepCommitted: {"copy_ms": 0.0},
    m.JobEnded: {"error_type": "", "error_text": ""},
    m.TransmitEnded: {
        "copied_bytes": 0, "started_at_ms": 0.0, "ended_at_ms": 0.0, "group_ends_at_ms": (),
    },
    m.DaemonReady: {"pid": 1, "arena_bytes": 0, "store_bytes": 0, "device": "cpu"},
}  # fmt: skip
_CARRIED: Final = (
    m.RunInference, m.RunJob, m.StopTask, m.GrantTurn, m.EvictTask, m.LeaseGranted, m.WorkerReady,
    m.InferenceDone, m.Cleaned, m.Parked, m.LeaseRequest, m.CommitStep, m.CommitCopy, m.Scrub,
    m.StepCommitted, m.JobEnded, m.TransmitEnded, m.Scrubbed, m.DaemonReady, m.DaemonFault,
    m.CommitPersisted,
)  # fmt: skip


_OF_COMMITS: Final = (m.CommitStep, m.CommitCopy, m.StepCommitted)  # their epochs are compared


class _Kind:
    """How one type of message is packed."""

    def __init__(self, kind: type[m.Message]) -> None:
        self.kind = kind
        self.fixed = _FIXED.get(kind, {})
        names = [name for name in kind.__struct_fields__ if name not in self.fixed]
        annotations = {k: v for base in kind.__mro__ for k, v in vars(base).get(
            "__annotations__", {}).items()}  # fmt: skip
        self.epochs = tuple(name for name in names if annotations[name] in EPOCHS)
        self.is_ordered = tuple(
            annotations[name] == "Turn" or kind in _OF_COMMITS for name in self.epochs
        )
        self.plain = tuple(name for name in names if name not in self.epochs)


_KINDS: Final = {kind.__name__: _Kind(kind) for kind in _CARRIED}


def pack(message: m.Message) -> Item:
    """The message as plain values."""
    name = type(message).__name__
    known = _KINDS[name]
    return (
        name,
        tuple([getattr(message, field) for field in known.plain]),
        tuple([getattr(message, field) for field in known.epochs]),
    )


@cache
def unpack(item: Item) -> Any:
    """The message that was packed."""
    name, plain, epochs = item
    known = _KINDS[name]
    return known.kind(
        **dict(zip(known.plain, plain, strict=True)),
        **dict(zip(known.epochs, epochs, strict=True)),
        **known.fixed,
    )


class ItemsCodec:
    """For fields that are channels (see ``frozen.Codec``)."""

    @staticmethod
    def freeze(items: Items, e: Add) -> Any:
        for name, _, epochs in items:
            for epoch, is_ordered in zip(epochs, _KINDS[name].is_ordered, strict=True):
                e(-epoch if is_ordered else epoch)
        return tuple([(name, plain) for name, plain, _ in items])

    @staticmethod
    def thaw(frozen: Any, n: Next) -> Items:
        return tuple(
            [(name, plain, tuple([n() for _ in _KINDS[name].epochs])) for name, plain in frozen]
        )
