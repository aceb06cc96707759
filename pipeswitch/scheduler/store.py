"""The host store's ledger: models' bytes, and the commit areas of jobs beside them. Pure."""

from __future__ import annotations

from ..errors import HostStoreFull, OutOfDeviceMemory
from ..programs.layout import REGION_ALIGN_BYTES, TENSOR_ALIGN_BYTES, aligned
from .arena import Arena
from .core import Core
from .records import Model
from .regions import Regions


class Store:
    """Each model's bytes lie here once, as they will lie on the device."""

    def __init__(self, core: Core, arena: Arena) -> None:
        self._arena = arena
        self.regions = Regions(core.settings.store_bytes, TENSOR_ALIGN_BYTES)

    def take(self, model: Model) -> None:
        """Reserve its place in the host store and its arrival words.

        Raises:
            OutOfDeviceMemory: larger than the arena; no request could ever run.
            HostStoreFull: no room beside the others.
        """
        manifest = model.manifest
        assert manifest is not None
        size = max(manifest.total_bytes, TENSOR_ALIGN_BYTES)
        largest = self._arena.leasable_bytes
        if aligned(size, REGION_ALIGN_BYTES) > largest:
            raise OutOfDeviceMemory(
                f'"{model.name}" needs {gib(size)}, the arena has {gib(largest)}',
                hint=f"start with --arena {aligned(2 * size, 1 << 30) >> 30}GiB",
                requested_bytes=size,
                largest_free_bytes=largest,
            )
        groups = max(1, len(manifest.groups))
        words = self._arena.words.reserve(model.owner, groups)
        region = self.regions.reserve(model.owner, size)
        if region is None or words is None:
            if words is not None:
                self._arena.words.release(model.owner)
            if region is not None:
                self.regions.release(model.owner)
            raise HostStoreFull(
                f'"{model.name}" needs {gib(size)}, the host store has '
                f"{gib(self.regions.largest_free_bytes)} left in one piece",
                hint="pipeswitch unregister a model, or start with a larger --host-store",
                requested_bytes=size,
                largest_free_bytes=self.regions.largest_free_bytes,
            )
        model.store_offset_bytes = region.offset_bytes
        model.first_word = words.offset_bytes

    def forget(self, model: Model) -> None:
        """Give back its place and its arrival words."""
        if self.regions.get(model.owner) is not None:
            self.regions.release(model.owner)
        if self._arena.words.get(model.owner) is not None:
            self._arena.words.release(model.owner)


def gib(size_bytes: int) -> str:
    """Bytes for people, as error texts show them."""
    if size_bytes >= 1 << 30:
        return f"{size_bytes / (1 << 30):.2f} GiB"
    return f"{size_bytes / (1 << 20):.1f} MiB"
