"""Durations as data: links, latencies and jobs."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from ...ipc.messages.base import ByteRange


@dataclass(frozen=True, kw_only=True)
class Link:
    """Link that copies one piece at a time: each takes a fixed time, plus a time per byte."""

    bytes_per_ms: float = math.inf
    fixed_ms: float = 0.0

    def copy_ms(self, size_bytes: int) -> float:
        """Return the time of a copy; 0 for no bytes, since such a group is already there."""
        return self.fixed_ms + size_bytes / self.bytes_per_ms if size_bytes else 0.0


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Costs of one server, in milliseconds."""

    to_device: Link = field(default_factory=Link)
    to_host: Link = field(default_factory=Link)
    to_store: Link = field(default_factory=Link)
    to_disk: Link = field(default_factory=Link)
    message_ms: float = 0.0  # one message between the controller and a process
    start_ms: float = 0.0  # start of a process
    reap_ms: float = 0.0
    build_ms: float = 0.0
    prepare_ms: float = 0.0
    park_ms: float = 0.0  # time from the stop of a job to the end of its layer


@dataclass(frozen=True, kw_only=True)
class Training:
    """Script of a job: equal steps, each of which needs the device."""

    steps: int
    step_ms: float = 0.0
    start_ms: float = 0.0  # time from the start of the script to its lease request
    loader_ms: float = 0.0  # time that each batch takes to arrive
    slice_bytes: int
    state_bytes: int  # size of one commit

    @property
    def ranges(self) -> tuple[ByteRange, ...]:
        """Ranges of the slice that a commit copies."""
        return (ByteRange(offset_bytes=0, size_bytes=self.state_bytes),)
