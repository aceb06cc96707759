"""Training slices of the arena: leased, released when their process is reaped, zeroed. Pure."""

from __future__ import annotations

from typing import Literal

from ..errors import OutOfDeviceMemory
from ..ipc.messages import Epoch, JobName, Scrub
from .arena import Arena
from .core import PLACES
from .device_state import DeviceState
from .records import Job
from .regions import Owner, Region
from .residency import Residents
from .store import gib


class Slices:
    """No range of a slice is given to another owner before it reads as zeros."""

    def __init__(self, device: DeviceState, arena: Arena, residents: Residents) -> None:
        self._core = device.core
        self._device = device
        self._arena = arena
        self._residents = residents
        self._unscrubbed: dict[Epoch, float] = {}  # of a scrub that failed: when to try again

    def lease(self, owner: Owner, size_bytes: int) -> Region | Literal["soon"] | None:
        """A place for a job's state, throwing out idle models.

        Returns:
            "soon" when enough is about to be free; None when another job would have to leave.

        Raises:
            OutOfDeviceMemory: it would not fit in an empty arena beside what is pinned.
        """
        if not self._arena.can_ever_hold(size_bytes):
            largest = self._arena.largest_for_all_bytes
            raise OutOfDeviceMemory(
                f'job "{owner.name}" needs {gib(size_bytes)} for parameters, gradients and '
                f"optimizer state, the arena can give {gib(largest)}",
                hint="start with a larger --arena, or unpin a model (pipeswitch unload NAME)",
                requested_bytes=size_bytes,
                largest_free_bytes=largest,
            )
        window = self._arena.regions.cheapest_window(
            size_bytes, self._arena.costs(for_request=False)
        )
        if window is None:
            return None
        if self._arena.obstacles(window):
            return "soon"
        self._residents.clear(window, f"job {owner.name}")
        self._core.touched |= PLACES
        region = self._arena.regions.reserve(owner, size_bytes, at_bytes=window.offset_bytes)
        assert region is not None
        return region

    def arrived(self, job: Job) -> None:
        """What was copied to is the job's slice now."""
        region = self._arena.regions.release(job.moving)
        taken = self._arena.regions.reserve(job.slice, region.size_bytes, region.offset_bytes)
        assert taken is not None

    def release(self, owner: Owner) -> None:
        """No process writes there any more: zero the range, then it is free (another tenant may
        follow)."""
        if self._arena.regions.get(owner) is None:
            return
        self._core.touched |= PLACES
        region = self._arena.regions.release(owner)
        if not self._device.is_daemon_ready:
            return  # the memory went with its owner
        epoch = self._core.next_epoch()
        taken = self._arena.regions.reserve(
            Owner("scrub", str(epoch)), region.size_bytes, region.offset_bytes
        )
        assert taken is not None
        self._scrub(epoch, taken)

    def _scrub(self, epoch: Epoch, region: Region) -> None:
        self._device.tell_daemon(
            Scrub(epoch=epoch, offset_bytes=region.offset_bytes, size_bytes=region.size_bytes)
        )

    def scrub_again(self) -> int:
        """What the daemon failed to zero: no owner may have the range before it is."""
        for epoch, at_ms in list(self._unscrubbed.items()):
            region = self._arena.regions.get(Owner("scrub", str(epoch)))
            if region is None:  # the memory went with its owner
                del self._unscrubbed[epoch]
            elif self._core.now_ms < at_ms:
                self._core.look_again(at_ms, PLACES)
            else:
                del self._unscrubbed[epoch]
                self._scrub(epoch, region)
        return PLACES if self._unscrubbed else 0

    def scrubbed(self, epoch: Epoch) -> None:
        if self._arena.regions.get(Owner("scrub", str(epoch))) is not None:
            self._arena.regions.release(Owner("scrub", str(epoch)))

    def refused(self, epoch: Epoch) -> None:
        """The daemon could not zero a range: it is asked again."""
        if self._arena.regions.get(Owner("scrub", str(epoch))) is not None:
            self._unscrubbed[epoch] = self._core.now_ms + self._core.settings.restart_backoff_ms

    def check(self) -> None:
        """A slice is held by a process that lives."""
        for region in self._arena.regions:
            if region.owner.kind == "slice":
                name = JobName(region.owner.name)
                assert any(w.job == name for w in self._device.workers.values()), region
