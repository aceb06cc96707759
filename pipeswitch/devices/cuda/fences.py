"""Writer of fences, which follow their groups on the device without delaying the next copy.

``write``: a second stream waits for an event behind the group, then writes. On the copy stream
it would delay the next copy, probably until the GPU schedules this process. ``copy``: a 4-byte copy
follows the group; CUDA does not promise this order to other processes.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from ..order_checks import FENCE_BYTES
from .bindings import Cuda
from .ladder import Words
from .pinned import PinnedBuffer

RING_FENCES: Final = 4096  # sources of fence copies; a slot is reused only after its copy has run


class FenceWriter:
    """Sets fences behind the copies of one stream; used by one thread."""

    def __init__(self, cuda: Cuda, words: Words, copies: int) -> None:
        """Create the second stream; ``copies`` is the copy stream, which stays the caller's."""
        self._cuda, self._words, self._copies = cuda, words, copies
        self._writes, self._event = cuda.stream(), cuda.event()
        self._ring = PinnedBuffer(cuda, RING_FENCES * FENCE_BYTES)
        self._values = self._ring.array.view(np.uint32)
        self._next = 0

    def write(self, event: int, target: int, value: int) -> None:
        """Enqueue a fence behind all earlier copies, and record the event, which runs when they
        have run. A second stream may write the fence a moment later (see ``finish``)."""
        cuda = self._cuda
        if self._words == "copy":
            slot, self._next = self._next, (self._next + 1) % RING_FENCES
            self._values[slot] = value
            source = self._ring.address + slot * FENCE_BYTES
            cuda.copy_to_device(target, source, FENCE_BYTES, self._copies)
        cuda.record(event, self._copies)
        if self._words == "write":
            cuda.wait_event(self._writes, event)
            cuda.write_value(self._writes, target, value)

    def finish(self) -> None:
        """Block until the fences of all events that have run are written; this thread sleeps."""
        if self._words == "write":
            self._cuda.record(self._event, self._writes)
            self._cuda.wait(self._event)

    def drain(self) -> None:
        """Block until all copies and fences have run, also those without an event."""
        self._cuda.synchronize(self._copies)
        self._cuda.synchronize(self._writes)

    def close(self) -> None:
        """Free everything, after all copies and fences have run."""
        self.drain()
        self._cuda.destroy_event(self._event)
        self._cuda.destroy_stream(self._writes)
        del self._values
        self._ring.close()
