"""Families of a device's models: variants with one layout share bytes (ADR 68). Pure."""

from __future__ import annotations

from functools import partial

from ...programs.interface.layout import Manifest
from ..state.device_state import DeviceState
from ..state.records import DeviceModel
from ..state.states import Residency
from ..state.variants import Family, Layout, layout_of


class Variants:
    """The families of a device; the models of one family have the same layout."""

    def __init__(self, device: DeviceState) -> None:
        self._device = device
        self._families: dict[Layout, Family] = {}

    def join(self, replica: DeviceModel, manifest: Manifest) -> None:
        """Add a model that does not stream to the models with its layout. A module is not added:
        on cuda its code may have changed the bytes."""
        layout = layout_of(replica.model.tenant, manifest)
        if layout is None or manifest.mode == "module":
            return
        family = self._families.setdefault(layout, Family())
        family.members[replica.name] = manifest
        for name in family.members if len(family.members) > 1 else ():
            one = self._device.replicas[name]
            one.family = family
            self._device.predictions.shares[name] = partial(self._share, one)

    def leave(self, replica: DeviceModel) -> None:
        """Remove a model that leaves the host store."""
        for family in self._families.values():
            if replica.name in family.members:
                family.remove(replica.name)
        self._families = {layout: one for layout, one in self._families.items() if one.members}
        replica.family = None

    def _share(self, replica: DeviceModel) -> float:
        """Return the part of its bytes that a model's copy brings, or its next copy may bring."""
        family, replicas = replica.family, self._device.replicas
        if family is None or replica.residency.state is not Residency.HOST:
            return replica.transfer.share
        return min(
            [
                family.share(replica.name, name)
                for name in family.members
                if replicas[name].residency.state is Residency.RESIDENT
            ],
            default=1.0,
        )
