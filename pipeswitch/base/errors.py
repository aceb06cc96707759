"""All errors of PipeSwitch, in one tree.

PipeSwitchError
├── the caller can correct it
│   ├── InvalidInput           the request does not fit the model's declared signature or a limit
│   │   └── SharedInputRefused  jobs cannot share this input, or a script wrote to it
│   ├── ModelNotFound          no model or job has this name; names the nearest one
│   ├── SequenceNotFound       the server keeps no sequence with this id
│   ├── AlreadyExists          the name belongs to something with another digest
│   ├── RegistrationRefused    the model cannot be served; says which part and why
│   └── PermissionDenied       the key is not admitted, or the client lacks a role
├── a later attempt may succeed
│   ├── DeadlineExceeded       the deadline passed
│   ├── QueueFull              too many or too large requests are waiting
│   ├── DeviceBusy             the operation needs the device alone
│   ├── Cancelled              the caller cancelled the request
│   └── ServerUnavailable      no server answers, it is draining, or the model is failed
├── the model or its code
│   ├── WorkerLost             the worker died on each try of this request
│   ├── TaskFailed             the model's or script's own code raised
│   └── ModelQuarantined       the model killed too many workers
├── sizes
│   ├── OutOfDeviceMemory      larger than the arena can ever hold
│   └── HostStoreFull          the host store, or the server's disk, has no room
└── the server itself
    ├── ConfigError            a file or flag is wrong; says which, and which values are right
    ├── LocalProtocolError     this process tried to send a malformed message: a bug here
    ├── RemoteProtocolError    the peer sent a malformed message
    └── InvalidTransition      a state table has no row for this event: a bug here

``TaskPreempted`` is outside the tree: it is a ``BaseException``, so that ``except Exception`` in a
training script does not catch a preemption. An error's values are attributes (``error.data``), also
of an error that came over the wire; ``.hint`` says what to type next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final


class PipeSwitchError(Exception):
    """Base class of all errors that a caller may catch.

    Attributes:
        hint: what to type or change next; may be empty.
        request_id: id of the request that failed, if there is one.
        data: values of the error by name, in types that JSON has.
        exit_code: exit status of the command line (1 failed, 3 no server, 4 not found, 5 busy).
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, hint: str = "", request_id: str = "", **data: Any) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.request_id = request_id
        self.data: dict[str, Any] = data

    def __getattr__(self, name: str) -> Any:
        """Return a value of ``data``: ``error.requested_bytes``; else raise AttributeError."""
        data = self.__dict__.get("data", {})
        if name in data:
            return data[name]
        raise AttributeError(f"{type(self).__name__} has no value {name!r}")

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class InvalidInput(PipeSwitchError):
    """The request does not fit: wrong name, dtype, shape, size or value. Nothing was run."""


class SharedInputRefused(InvalidInput):
    """A training script's input cannot be shared, or the script wrote to it."""


class ModelNotFound(PipeSwitchError):
    """No model or job has that name. ``data["nearest"]`` is a similar name, if there is one."""

    exit_code = 4


class SequenceNotFound(PipeSwitchError):
    """The server keeps no such sequence: it has never started, or it is over."""

    exit_code = 4


class AlreadyExists(PipeSwitchError):
    """The name belongs to something else; registering the same digest again is a no-op."""


class RegistrationRefused(PipeSwitchError):
    """The model cannot be served. ``part`` names the refused part, ``reason`` says why."""

    def __init__(self, part: str, reason: str, **kw: Any) -> None:
        kw.pop("message", None)
        super().__init__(f"{part}: {reason}", **{"part": part, "reason": reason, **kw})


class PermissionDenied(PipeSwitchError):
    """The client's key is missing or not admitted, or the client lacks a role."""


class DeadlineExceeded(PipeSwitchError):
    """The deadline passed before the request began to compute, or its task still hung after it."""

    exit_code = 5


class QueueFull(PipeSwitchError):
    """Too many requests, or too many payload bytes, are waiting. Safe to retry later.
    ``data["limit"]`` names the limit: a setting such as ``max_queue``, or a part of the server."""

    exit_code = 5


class DeviceBusy(PipeSwitchError):
    """Requests or a job use the device, but the operation needs it alone."""

    exit_code = 5


class Cancelled(PipeSwitchError):
    """The caller cancelled the request, and nothing runs for it any more."""


class ServerUnavailable(PipeSwitchError):
    """No server answers there, it went away or is draining, or the model is failed."""

    exit_code = 3


class WorkerLost(PipeSwitchError):
    """The worker process died while it ran this request, on every try."""


class TaskFailed(PipeSwitchError):
    """The model's or the script's own code raised. ``type`` and ``text`` are the original's."""


class ModelQuarantined(PipeSwitchError):
    """Model that killed too many workers and is no longer dispatched."""


class OutOfDeviceMemory(PipeSwitchError):
    """The device has no room: ``requested_bytes`` exceed the possible ``largest_free_bytes``."""


class HostStoreFull(PipeSwitchError):
    """``requested_bytes`` do not fit into the host store, or into the client's share of
    the disk with the server's state directory; ``largest_free_bytes`` are left."""


class ConfigError(PipeSwitchError):
    """A configuration file, environment variable or flag is wrong."""

    exit_code = 2


class LocalProtocolError(PipeSwitchError):
    """A message that the protocol forbids was about to be sent: a bug in PipeSwitch."""


class RemoteProtocolError(PipeSwitchError):
    """The peer sent a message that does not follow the protocol."""


class InvalidTransition(PipeSwitchError):
    """A state table has no row for (state, event). Nothing changed; the text has the history."""


class TaskPreempted(BaseException):
    """Exception that unwinds an evicted training script; the script resumes from its last commit.

    It is a BaseException, so that ``except Exception`` does not catch it. If you catch it, raise it
    again. If a script suppresses it, it is raised again, and after a grace period the script is
    killed."""


def _tree(root: type[PipeSwitchError]) -> dict[str, type[PipeSwitchError]]:
    classes = {root.__name__: root}
    for child in root.__subclasses__():
        classes.update(_tree(child))
    return classes


ERRORS_BY_NAME: Mapping[str, type[PipeSwitchError]] = _tree(PipeSwitchError)


DRAINING: Final = "the server is draining"


def draining() -> ServerUnavailable:
    """Return the error for a request that arrives while the server drains."""
    return ServerUnavailable(DRAINING, hint="try again when it is back")


def model_failed(name: str, reason: str, versions: Sequence[int] = ()) -> ServerUnavailable:
    """Return the error for a registered model that is failed; ``reason`` may be empty.
    ``versions``: numbers of its versions that are not failed."""
    hint = "register it again, or correct its [[model]] and restart the server"
    if versions:
        numbers = ", ".join(map(str, versions))
        hint = f"restore its files and restart the server, or pipeswitch models rollback {name} "
        hint += f"(it has version {numbers})"
    text = f'"{name}" is failed{reason and ": "}{reason}'
    return ServerUnavailable(text, hint=hint, state="failed")


def to_wire(error: PipeSwitchError) -> dict[str, Any]:
    """Return the error as ``{type, message, hint, data}``, with integers limited to 64 bits."""
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
    """Return the typed error from the wire; an unknown type becomes the base class."""
    cls = ERRORS_BY_NAME.get(name, PipeSwitchError)
    error = cls.__new__(cls)
    safe = {key: value for key, value in data.items() if isinstance(key, str)}
    PipeSwitchError.__init__(error, message, hint=hint, request_id=request_id)
    error.data = safe
    return error
