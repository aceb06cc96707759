"""Every way PipeSwitch can fail, in one tree.

PipeSwitchError
├── the caller can mend it
│   ├── InvalidInput           the request does not fit the model's declared signature or a limit
│   │   └── SharedInputRefused  jobs cannot share this input, or one of them wrote to it
│   ├── ModelNotFound          no such model or job; names the nearest one
│   ├── AlreadyExists          the name is taken by something with another digest
│   ├── RegistrationRefused    a model cannot be accepted; says which part and why
│   └── PermissionDenied       a key the server does not admit, or code at a door that takes none
├── try again, or later
│   ├── DeadlineExceeded       the answer would have come too late
│   ├── QueueFull              too many or too large requests are waiting
│   ├── Cancelled              the caller took the request back
│   └── ServerUnavailable      no server answers, or it is draining
├── the model or its code
│   ├── WorkerLost             the worker died on this request more often than we retry
│   ├── TaskFailed             the model's or script's own code raised
│   └── ModelQuarantined       the model killed too many workers
├── sizes
│   ├── OutOfDeviceMemory      larger than the arena can ever hold
│   └── HostStoreFull          the host store, or the server's disk, has no room for it
└── the server's own
    ├── ConfigError            a file or flag is wrong: says which, and what would be right
    ├── LocalProtocolError     we tried to send nonsense: a bug here
    ├── RemoteProtocolError    the peer sent nonsense
    └── InvalidTransition      a state table has no row for this event: a bug here

``TaskPreempted`` stands outside the tree on purpose: it is a ``BaseException``, so that
``except Exception`` in a training script cannot swallow a preemption.

Values are attributes (``error.data``) and survive the wire; ``.hint`` says what to type next.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar


class PipeSwitchError(Exception):
    """Base of everything a caller may catch.

    Attributes:
        hint: what to type or change next; empty when there is nothing to add.
        request_id: the request this answers, when there is one.
        data: the error's values, JSON-able, by name.
        exit_code: what the CLI exits with (1 failed, 3 no server, 4 not found, 5 busy).
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, hint: str = "", request_id: str = "", **data: Any) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.request_id = request_id
        self.data: dict[str, Any] = data

    def __getattr__(self, name: str) -> Any:
        """Values by name: ``error.requested_bytes``; AttributeError when there is none."""
        data = self.__dict__.get("data", {})
        if name in data:
            return data[name]
        raise AttributeError(f"{type(self).__name__} has no value {name!r}")

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class InvalidInput(PipeSwitchError):
    """The request does not fit: wrong name, dtype, shape, size or value. Nothing was run."""


class SharedInputRefused(InvalidInput):
    """A training script's input cannot be shared, or was written in place."""


class ModelNotFound(PipeSwitchError):
    """No model or job of that name. ``data["nearest"]`` is the closest name, when one is close."""

    exit_code = 4


class SequenceNotFound(PipeSwitchError):
    """No sequence of that name: it was never started, or it is over."""

    exit_code = 4


class AlreadyExists(PipeSwitchError):
    """The name is taken by something else; the same digest again would have been a no-op."""


class RegistrationRefused(PipeSwitchError):
    """The model cannot be served. ``part`` names what was refused, ``reason`` why."""

    def __init__(self, part: str, reason: str, **kw: Any) -> None:
        kw.pop("message", None)
        super().__init__(f"{part}: {reason}", **{"part": part, "reason": reason, **kw})


class PermissionDenied(PipeSwitchError):
    """The client's key is missing or not admitted, or code was sent to a listener without code."""


class DeadlineExceeded(PipeSwitchError):
    """The deadline passed before the request was computed, or its task hung beyond it."""

    exit_code = 5


class QueueFull(PipeSwitchError):
    """Too many requests, or too many payload bytes, are waiting. Safe to retry later."""

    exit_code = 5


class DeviceBusy(PipeSwitchError):
    """Requests or a job use the device, but the operation needs it alone."""

    exit_code = 5


class Cancelled(PipeSwitchError):
    """The caller cancelled; nothing is running for it any more."""


class ServerUnavailable(PipeSwitchError):
    """No server answers at that address, it went away, or it is draining."""

    exit_code = 3


class WorkerLost(PipeSwitchError):
    """The worker process died while it ran this request, on every try."""


class TaskFailed(PipeSwitchError):
    """The model's or the script's own code raised. ``type`` and ``text`` are the original's."""


class ModelQuarantined(PipeSwitchError):
    """Model that killed too many workers and is no longer dispatched."""


class OutOfDeviceMemory(PipeSwitchError):
    """Needs ``requested_bytes``; the largest the arena can give is ``largest_free_bytes``."""


class HostStoreFull(PipeSwitchError):
    """``requested_bytes`` more do not fit in the host store, or on the disk of the server's state
    directory (within a client's share of it); ``largest_free_bytes`` are left."""


class ConfigError(PipeSwitchError):
    """A configuration file, environment variable or flag is wrong."""

    exit_code = 2


class LocalProtocolError(PipeSwitchError):
    """We tried to send something a peer must not get: a bug in PipeSwitch."""


class RemoteProtocolError(PipeSwitchError):
    """The peer sent something that is not of the protocol."""


class InvalidTransition(PipeSwitchError):
    """A state table has no row for (state, event); nothing was changed. Prints the story."""


class TaskPreempted(BaseException):
    """Unwinds a training script whose memory is needed; it resumes from its last commit.

    A BaseException: ``except Exception`` must not catch it. Do not catch it at all, or re-raise
    it; a script that swallows it gets it again and is killed after a grace period.
    """


def _tree(root: type[PipeSwitchError]) -> dict[str, type[PipeSwitchError]]:
    classes = {root.__name__: root}
    for child in root.__subclasses__():
        classes.update(_tree(child))
    return classes


ERRORS_BY_NAME: Mapping[str, type[PipeSwitchError]] = _tree(PipeSwitchError)


def no_server(address: str) -> ServerUnavailable:
    """Return the error for an address at which no server answers."""
    return ServerUnavailable(f"no server answers at {address}", hint="start one: pipeswitch serve")


def to_wire(error: PipeSwitchError) -> dict[str, Any]:
    """Return the error for the wire: ``{type, message, hint, data}``; its integers have 64 bits."""
    return {
        "type": type(error).__name__,
        "message": error.message,
        "hint": error.hint,
        "data": _clamped(error.data),
    }


def _clamped(value: Any) -> Any:
    """Limit integers to 64 bits, because an encoder raises on larger ones."""
    if isinstance(value, int) and not isinstance(value, bool):
        return max(-(1 << 63), min(value, (1 << 63) - 1))
    if isinstance(value, Mapping):
        return {key: _clamped(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_clamped(item) for item in value]
    return value


def from_wire(
    name: str, message: str, hint: str, data: Mapping[str, Any], request_id: str = ""
) -> PipeSwitchError:
    """Rebuild a typed error from the wire; an unknown type becomes the base class."""
    cls = ERRORS_BY_NAME.get(name, PipeSwitchError)
    error = cls.__new__(cls)
    safe = {key: value for key, value in data.items() if isinstance(key, str)}
    PipeSwitchError.__init__(error, message, hint=hint, request_id=request_id)
    error.data = safe
    return error
