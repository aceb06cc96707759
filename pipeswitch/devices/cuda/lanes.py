"""Ways from the host store to the arena: this GPU's own link, and another GPU's (DeepPlan).

DeepPlan (EuroSys 2023), parallel transmission; we differ: chunks are shared out, not halves of the
model, so that groups arrive in their order, and the lane with less before it takes the next one.
"""

from __future__ import annotations

import contextlib
import logging
from typing import Final

from .bindings import Cuda, CudaError

log = logging.getLogger(__name__)

CHUNK_BYTES: Final = 16 << 20  # one copy call; a cancel takes effect between two
LANDING_SLOTS: Final = 4  # chunks that may lie on the other GPU at once
LANDING_BYTES: Final = LANDING_SLOTS * CHUNK_BYTES


class Lane:
    """Over this GPU's own link. What is put behind its copies on ``stream`` finds them done."""

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda
        self.stream = cuda.stream()
        self.serves = True  # False: no more copies this way

    def copy(self, target: int, source: int, size_bytes: int) -> None:
        """Host to arena, a chunk at most; the source must stay until it has run."""
        self._cuda.copy_to_device(target, source, size_bytes, self.stream)

    def settle(self) -> None:
        """Wait until all that was put on it has run."""
        self._cuda.synchronize(self.stream)

    def close(self) -> None:
        self.settle()
        self._cuda.destroy_stream(self.stream)


class PeerLane(Lane):
    """Over another GPU's link into a ring on that GPU, and from there across to the arena.

    The two GPUs wait for each other, the host for neither: the second stream for a chunk that has
    come, the first one for a slot that has been left. Our own device stays the current one: copies
    and waits may be put on a stream of another device, an event is recorded on a stream of its own.

    Believed of the driver, not measured: memory that was pinned here is pinned for the other GPU's
    context too (``Cuda.register``); with access in both directions a copy between GPUs never goes
    through the host; an arrival word behind such a copy is not seen before its bytes.
    """

    def __init__(self, cuda: Cuda, own: int, peer: int) -> None:
        """Take context and memory on the peer; what was taken is given back on an error.

        Raises:
            CudaError: the peer cannot be reached, or has no room.
        """
        with contextlib.ExitStack() as undo:
            super().__init__(cuda)
            undo.callback(cuda.destroy_stream, self.stream)
            self._own, self._peer = own, peer
            self._next = 0
            cuda.enable_peer_access(peer)
            self._left = self._events(undo)
            undo.callback(cuda.set_device, own)
            cuda.set_device(peer)
            cuda.enable_peer_access(own)
            self._landing = cuda.malloc(LANDING_BYTES)
            undo.callback(cuda.free, self._landing)
            self._inward = cuda.stream()
            undo.callback(cuda.destroy_stream, self._inward)
            self._come = self._events(undo)
            cuda.set_device(own)
            self._undo = undo.pop_all()

    def _events(self, undo: contextlib.ExitStack) -> list[int]:
        """One for each slot, of the current device."""
        events = []
        for _ in range(LANDING_SLOTS):
            events.append(self._cuda.event())
            undo.callback(self._cuda.destroy_event, events[-1])
        return events

    def copy(self, target: int, source: int, size_bytes: int) -> None:
        """As a lane's; after an error this one serves no more."""
        cuda, slot = self._cuda, self._next
        self._next = (slot + 1) % LANDING_SLOTS
        landing = self._landing + slot * CHUNK_BYTES
        try:
            cuda.wait_event(self._inward, self._left[slot])  # the slot's last chunk went on
            cuda.copy_to_device(landing, source, size_bytes, self._inward)
            cuda.record(self._come[slot], self._inward)
            cuda.wait_event(self.stream, self._come[slot])
            cuda.copy_peer(target, self._own, landing, self._peer, size_bytes, self.stream)
            cuda.record(self._left[slot], self.stream)
        except CudaError as error:
            self.serves = False
            log.warning("peer=off cause=%s", error)
            raise

    def settle(self) -> None:
        self._cuda.synchronize(self._inward)
        super().settle()

    def close(self) -> None:
        self.settle()
        self._cuda.set_device(self._peer)  # for what lies there
        self._undo.close()
