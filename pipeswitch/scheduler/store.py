"""The host store's ledger: models' bytes, and the commit areas of jobs beside them. Pure."""

from __future__ import annotations

from collections import Counter

from ..errors import HostStoreFull
from ..programs.layout import TENSOR_ALIGN_BYTES
from ..shares import left
from .core import Core
from .records import Model
from .regions import Regions


class Store:
    """Each model's bytes lie here once, as they will lie on the device."""

    def __init__(self, core: Core) -> None:
        self.regions = Regions(core.settings.store_bytes, TENSOR_ALIGN_BYTES)
        self._held_bytes: Counter[str] = Counter()  # by tenant

    def take(self, model: Model) -> None:
        """Reserve its place.

        Raises:
            HostStoreFull: no room beside the others, or over its tenant's share of what is free.
        """
        size = stored_bytes(model)
        if refusal := self._over_share(model, size):
            raise refusal
        region = self.regions.reserve(model.owner, size)
        if region is None:
            raise self.full(model)
        model.store_offset_bytes = region.offset_bytes
        self._held_bytes[model.tenant] += region.size_bytes

    def _over_share(self, model: Model, size: int) -> HostStoreFull | None:
        """The owner is bounded by the store alone."""
        own, free, whole = self._held_bytes[model.tenant], self.regions.free_bytes, self.regions
        share = left(whole.capacity_bytes, whole.capacity_bytes - free, own)
        if not model.tenant or size <= share:
            return None
        return HostStoreFull(
            f'"{model.name}" needs {gib(size)}: models of "{model.tenant}" have {gib(own)} of the '
            f"host store, and may have {gib(share)} more while {gib(free)} are free",
            hint="pipeswitch unregister a model, or start with a larger --host-store",
            requested_bytes=size,
            largest_free_bytes=share,
        )

    def full(self, model: Model) -> HostStoreFull:
        size, largest = stored_bytes(model), self.regions.largest_free_bytes
        return HostStoreFull(
            f'"{model.name}" needs {gib(size)}, the host store has '
            f"{gib(largest)} left in one piece",
            hint="pipeswitch unregister a model, or start with a larger --host-store",
            requested_bytes=size,
            largest_free_bytes=largest,
        )

    def forget(self, model: Model) -> None:
        """Give back its place."""
        if self.regions.get(model.owner) is not None:
            self._held_bytes[model.tenant] -= self.regions.release(model.owner).size_bytes


def stored_bytes(model: Model) -> int:
    """What a model takes; it has a manifest."""
    assert model.manifest is not None
    return max(model.manifest.total_bytes, TENSOR_ALIGN_BYTES)


def gib(size_bytes: int) -> str:
    """Bytes for people, as error texts show them."""
    if size_bytes >= 1 << 30:
        return f"{size_bytes / (1 << 30):.2f} GiB"
    return f"{size_bytes / (1 << 20):.1f} MiB"
