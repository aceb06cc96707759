"""Errors that only the gateway raises, and the HTTP status and gRPC code of every error."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from ...base import errors
from ...base.machine import SHORTAGES

RETRY_AFTER_S: Final = 1  # a queue drains, and a server restarts, in about this time


class Unauthenticated(errors.PipeSwitchError):
    """Missing token where one is required, or a token that is not in the file."""


class NotFound(errors.PipeSwitchError):
    """Unknown path, or unknown version of a model."""


class MethodNotAllowed(errors.PipeSwitchError):
    """The path lacks this method; ``allow`` lists its methods, like the header ``Allow``."""

    def __init__(self, method: str, path: str, allow: str) -> None:
        methods = allow.replace(", ", " or ")
        super().__init__(
            f"{path[:200]} does not support {method}", hint=f"use {methods}", allow=allow
        )


class UnknownCoding(errors.PipeSwitchError):
    """The compression of the body is not supported."""

    def __init__(self, coding: str) -> None:
        super().__init__(f"Content-Encoding {coding[:40]!r} is not read here", hint="gzip, deflate")


class RequestTimeout(errors.PipeSwitchError):
    """The request's head or body came too slowly."""


class TooLarge(errors.PipeSwitchError):
    """The body is larger than one request may be."""


class HeadTooLarge(errors.PipeSwitchError):
    """The request line and the headers exceed their limit."""


class WrongHost(errors.PipeSwitchError):
    """The ``Host`` is not this address: another site's page may have sent the request."""


@dataclass(frozen=True)
class Status:
    """HTTP and gRPC status of one kind of error."""

    http: int
    grpc: str  # a name of grpc.StatusCode
    may_retry: bool = False  # nothing was done; the answer has ``Retry-After``


_STATUSES: Final[Mapping[type[errors.PipeSwitchError], Status]] = {
    errors.InvalidInput: Status(400, "INVALID_ARGUMENT"),
    errors.RegistrationRefused: Status(400, "INVALID_ARGUMENT"),
    Unauthenticated: Status(401, "UNAUTHENTICATED"),
    errors.PermissionDenied: Status(403, "PERMISSION_DENIED"),
    WrongHost: Status(403, "PERMISSION_DENIED"),
    errors.ModelNotFound: Status(404, "NOT_FOUND"),
    errors.SequenceNotFound: Status(404, "NOT_FOUND"),
    NotFound: Status(404, "NOT_FOUND"),
    MethodNotAllowed: Status(405, "UNIMPLEMENTED"),
    RequestTimeout: Status(408, "DEADLINE_EXCEEDED"),
    errors.AlreadyExists: Status(409, "ALREADY_EXISTS"),
    errors.DeviceBusy: Status(409, "FAILED_PRECONDITION"),
    TooLarge: Status(413, "RESOURCE_EXHAUSTED"),
    UnknownCoding: Status(415, "UNIMPLEMENTED"),
    errors.QueueFull: Status(429, "RESOURCE_EXHAUSTED", may_retry=True),
    HeadTooLarge: Status(431, "RESOURCE_EXHAUSTED"),
    errors.Cancelled: Status(499, "CANCELLED"),
    errors.ServerUnavailable: Status(503, "UNAVAILABLE", may_retry=True),
    errors.ModelQuarantined: Status(503, "FAILED_PRECONDITION"),  # until it is loaded again
    errors.DeadlineExceeded: Status(504, "DEADLINE_EXCEEDED"),
    errors.OutOfDeviceMemory: Status(507, "RESOURCE_EXHAUSTED"),
    errors.HostStoreFull: Status(507, "RESOURCE_EXHAUSTED"),
}
_OURS: Final = Status(500, "INTERNAL")  # the model's own code, or a bug: WorkerLost, TaskFailed, …


def status_of(error: errors.PipeSwitchError) -> Status:
    """Return the status of the nearest class of ``error`` in the table.

    The error's traceback is dropped, because its frames would keep the request and the answer in
    memory until a garbage collection.
    """
    error.__traceback__ = None
    for cls in type(error).__mro__:
        if cls in _STATUSES:
            return _STATUSES[cls]
    return _OURS


def body_of(error: errors.PipeSwitchError) -> dict[str, Any]:
    """Return the JSON object of an error; its form is the same for every status."""
    return {
        "error": error.message,
        "code": type(error).__name__,
        "hint": error.hint,
        **limit_of(error),
    }


def limit_of(error: errors.PipeSwitchError) -> dict[str, str]:
    """Return the limit that refused a request, by the name of its field; {} for other errors."""
    return {"limit": str(error.data["limit"])} if "limit" in error.data else {}


def as_ours(error: Exception) -> errors.PipeSwitchError:
    """Return a PipeSwitchError for any exception: a temporary shortage, or a bug of the gateway."""
    if isinstance(error, errors.PipeSwitchError):
        return error
    if isinstance(error, MemoryError) or getattr(error, "errno", None) in SHORTAGES:
        text = f"the gateway is short of memory or descriptors: {type(error).__name__}"
        return errors.ServerUnavailable(text, hint="send again in a moment")
    return errors.PipeSwitchError(
        f"the gateway failed: {type(error).__name__}", hint="its log has the details"
    )
