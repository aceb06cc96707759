"""Messages between the controller and the fork server.

``Fork`` carries the descriptors for the child. The exit of a child is reported once, after the
child was reaped.
"""

from __future__ import annotations

from .base import Message


class Fork(Message, frozen=True):
    """controller -> fork server: fork a child (descriptors: its channels, then the others)."""

    ticket: int
    name: str  # process name, e.g. "pipeswitch-worker-0"
    settings: bytes  # msgpack of a settings struct, opaque to the fork server


class ForkServerReady(Message, frozen=True):
    """fork server -> controller: torch is imported, and children can be forked."""

    pid: int
    import_ms: float


class Forked(Message, frozen=True):
    """fork server -> controller: the child's pid."""

    ticket: int
    pid: int  # 0: the system refused another process


class ChildExited(Message, frozen=True):
    """fork server -> controller: the child was reaped, so its memory can be used again."""

    pid: int
    status: int  # as from os.waitstatus_to_exitcode: a negative number is a signal
