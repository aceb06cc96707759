"""Messages between the controller and the fork server.

Descriptors of a child's sockets travel beside ``Fork``. The exit of a child is reported once,
after the child was reaped.
"""

from __future__ import annotations

from typing import Literal

from .base import Message


class Fork(Message, frozen=True):
    """controller -> fork server: fork a child; the descriptors of its sockets come along."""

    ticket: int
    kind: Literal["worker", "builder", "daemon", "stage"]
    name: str  # process name, e.g. "pipeswitch-worker-0"
    settings: bytes  # msgpack of the kind's own settings struct, opaque here


class ForkServerReady(Message, frozen=True):
    """fork server -> controller: torch is imported, children can be had."""

    pid: int
    import_ms: float


class Forked(Message, frozen=True):
    """fork server -> controller: the child's pid."""

    ticket: int
    pid: int  # 0: the system had no room for another process


class ChildExited(Message, frozen=True):
    """fork server -> controller: reaped; its memory is gone for good."""

    pid: int
    status: int  # as os.waitstatus_to_exitcode: negative is a signal
