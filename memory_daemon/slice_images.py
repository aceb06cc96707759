"""The daemon's side of swaps: copies slices to their jobs' images, and back (ADR 64)."""

from __future__ import annotations

import logging
import os
import threading
from dataclasses import dataclass, field

from pipeswitch.base.errors import RemoteProtocolError
from pipeswitch.base.failpoints import reach
from pipeswitch.devices.memory import DeviceMemory
from pipeswitch.devices.order_checks import check_range
from pipeswitch.devices.worker_device import now_ms
from pipeswitch.ipc.messages.base import OpId
from pipeswitch.ipc.messages.daemon import CopySliceIn, CopySliceOut, SliceCopied

log = logging.getLogger(__name__)


@dataclass
class SliceCopy:
    """An accepted order, and a duplicate of its image's descriptor."""

    order: CopySliceOut | CopySliceIn
    image: int
    cancelled: threading.Event = field(default_factory=threading.Event)


class SliceImages:
    """Copies of slices. The control thread accepts and cancels; the to-host thread copies."""

    def __init__(self, device: DeviceMemory) -> None:
        self._device = device
        self._live: dict[OpId, SliceCopy] = {}

    def accept(self, order: CopySliceOut | CopySliceIn, descriptors: list[int]) -> SliceCopy:
        """Check an order.

        Raises:
            RemoteProtocolError: the range is outside of the arena, or the image is too small.
        """
        check_range("slice", order.offset_bytes, order.size_bytes, self._device.arena_bytes)
        if len(descriptors) != 1:
            raise RemoteProtocolError(f"{len(descriptors)} images for one slice")
        check_range("image", 0, order.size_bytes, os.fstat(descriptors[0]).st_size)
        try:
            image = os.dup(descriptors[0])
        except OSError as error:
            raise RemoteProtocolError(f"no descriptor for the image: {error}") from None
        copy = self._live[order.op_id] = SliceCopy(order, image)
        return copy

    def cancel(self, op_id: OpId) -> None:
        """Stop a copy in within a chunk; ignore a copy that has ended."""
        copy = self._live.get(op_id)
        if copy is not None:
            copy.cancelled.set()

    def copy(self, copy: SliceCopy) -> SliceCopied:
        """Copy a slice. Blocks; called on the to-host thread."""
        order, device, began_at_ms, error = copy.order, self._device, now_ms(), ""
        try:
            if isinstance(order, CopySliceOut):
                reach("daemon.slice.out")
                device.save_slice(order.offset_bytes, order.size_bytes, copy.image)
            else:
                reach("daemon.slice.in")
                device.load_slice(
                    order.offset_bytes, order.size_bytes, copy.image, copy.cancelled.is_set
                )
                error = "cancelled" if copy.cancelled.is_set() else ""
        except (RemoteProtocolError, OSError) as problem:
            log.warning("job=%s slice=not copied cause=%s", order.job, problem)
            error = str(problem)
        finally:
            self._live.pop(order.op_id, None)
            os.close(copy.image)
        needs_scrub = isinstance(order, CopySliceOut) and not error
        try:
            if needs_scrub:
                device.scrub(order.offset_bytes, order.size_bytes)
                needs_scrub = False
            reach("daemon.slice.done")
        except Exception as problem:  # part of the range may be zero, but the copy is whole
            log.warning("job=%s slice=not zeroed cause=%s", order.job, problem)
        return SliceCopied(
            op_id=order.op_id,
            began_at_ms=began_at_ms,
            ended_at_ms=now_ms(),
            error=error,
            needs_scrub=needs_scrub,
        )
