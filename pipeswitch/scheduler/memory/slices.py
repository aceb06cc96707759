"""Slices of the arena: each is zeroed before its range gets another owner. Pure."""

from __future__ import annotations

from typing import Literal

from ...base.errors import OutOfDeviceMemory
from ...ipc.messages.base import JobName, OpId
from ...ipc.messages.daemon import Scrub
from ..state.core import RESIDENCY
from ..state.device_state import DeviceState
from ..state.regions import Owner, Region
from .allocators import ArenaAllocator, gib
from .residency import Residents


class Slices:
    """Slices of a device. A range gets another owner only after it has been zeroed."""

    def __init__(self, device: DeviceState, arena: ArenaAllocator, residents: Residents) -> None:
        self._core = device.core
        self._device = device
        self._arena = arena
        self._residents = residents
        self._unscrubbed: dict[OpId, float] = {}  # failed scrub -> time of the next try

    def lease(
        self, owner: Owner, size_bytes: int, at_bytes: int | None = None
    ) -> Region | Literal["soon"] | None:
        """Take a place for a job's state, anywhere or at ``at_bytes``; idle models are evicted.

        Returns:
            The region; "soon" if enough will soon be free; None if another job would have to leave.

        Raises:
            OutOfDeviceMemory: it would not fit even if only the pinned models were in the arena.
        """
        self.refuse_too_large(owner, size_bytes)
        costs = self._arena.costs(for_request=False)
        if at_bytes is None:
            window = self._arena.regions.cheapest_window(size_bytes, costs)
            window = window or self._arena.window_after_packing(size_bytes, costs)
        else:
            window = self._arena.regions.window_at(at_bytes, size_bytes, costs)
        if window is None:
            return None
        if self._arena.obstacles(window):
            return "soon"
        self._residents.clear(window, f"job {owner.name}")
        self._core.dirty |= RESIDENCY
        region = self._arena.regions.reserve(owner, size_bytes, at_bytes=window.offset_bytes)
        assert region is not None
        return region

    def refuse_too_large(self, owner: Owner, size_bytes: int) -> None:
        """Raise OutOfDeviceMemory if the slice does not fit in an arena with only pinned models."""
        if not self._arena.can_ever_hold(size_bytes):
            largest = self._arena.largest_for_all_bytes
            raise OutOfDeviceMemory(
                f'job "{owner.name}" needs {gib(size_bytes)} for parameters, gradients and '
                f"optimizer state; the arena has {gib(largest)}",
                hint="start with a larger --arena, or unpin a model (pipeswitch unload NAME)",
                requested_bytes=size_bytes,
                largest_free_bytes=largest,
            )

    def release(self, owner: Owner) -> None:
        """Order a slice that has no writer to be zeroed; then its range is free for any tenant."""
        if self._arena.regions.get(owner) is None:
            return
        self._core.dirty |= RESIDENCY
        region = self._arena.regions.release(owner)
        if not self._device.daemon.is_ready:
            return  # the memory was lost with the daemon
        op_id = self._core.next_op_id()
        scrubbed = self._arena.regions.reserve(
            Owner("scrub", str(op_id)), region.size_bytes, region.offset_bytes
        )
        assert scrubbed is not None
        self._scrub(op_id, scrubbed)

    def _scrub(self, op_id: OpId, region: Region) -> None:
        self._device.daemon.send(
            Scrub(op_id=op_id, offset_bytes=region.offset_bytes, size_bytes=region.size_bytes)
        )

    def scrub_again(self) -> int:
        """Retry ranges that the daemon failed to zero; until they are zero, nobody may own them."""
        for op_id, at_ms in list(self._unscrubbed.items()):
            region = self._arena.regions.get(Owner("scrub", str(op_id)))
            if region is None:  # the memory was lost with the daemon
                del self._unscrubbed[op_id]
            elif self._core.now_ms < at_ms:
                self._core.wake_at(at_ms, RESIDENCY)
            else:
                del self._unscrubbed[op_id]
                self._scrub(op_id, region)
        return RESIDENCY if self._unscrubbed else 0

    def scrubbed(self, op_id: OpId) -> None:
        if self._arena.regions.get(Owner("scrub", str(op_id))) is not None:
            self._arena.regions.release(Owner("scrub", str(op_id)))

    def refused(self, op_id: OpId) -> None:
        """Schedule another try for a range that the daemon could not zero."""
        if self._arena.regions.get(Owner("scrub", str(op_id))) is not None:
            self._unscrubbed[op_id] = self._core.now_ms + self._core.settings.restart_backoff_ms

    def check(self) -> None:
        """Assert that each slice is held by a live process."""
        for region in self._arena.regions:
            if region.owner.kind == "slice":
                name = JobName(region.owner.name)
                assert any(w.job == name for w in self._device.workers.values()), region
