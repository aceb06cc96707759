"""Residency of models on the device: transmission, eviction, partial copies. Pure."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Final

from ...ipc.messages.base import ModelName, OpId
from ...ipc.messages.daemon import CancelTransmit, GroupCopy, TransmitEnded, TransmitModel
from ...ipc.messages.run import Run
from ...planning.grouping import Plan
from ...planning.streaming import StagingLayout
from ...programs.interface.groups import regrouped, table_by_rows
from ...programs.interface.layout import ITEM_BYTES, REGION_ALIGN_BYTES, aligned
from ..state.core import MEASURED, QUEUE, RESIDENCY, TURN, WORKERS
from ..state.device_state import DeviceState
from ..state.events import Span, Spans
from ..state.records import DeviceModel
from ..state.regions import Extent
from ..state.states import ModelState, Residency, ResidencyEvent
from ..state.variants import parts_of
from .allocators import WHOLE, ArenaAllocator, RingPlace, Streamed, VariantPlace
from .variants import Variants

ROW_COST_BYTES: Final = 256 << 10  # on a GPU, a row's call takes as long as copying this much
MAX_ROWS: Final = 4096  # the controller's loop reads their numbers


class Residents:
    """Models on a device. This class decides on their leases; the memory daemon copies them."""

    def __init__(self, device: DeviceState, arena: ArenaAllocator) -> None:
        self._core = device.core
        self._device = device
        self._arena = arena
        self._variants = Variants(device)

    def take(self, replica: DeviceModel) -> bool:
        """Take fences for a built model's groups. Return False if too few are left."""
        manifest = replica.model.manifest
        assert manifest is not None
        count = max(1, len(manifest.groups) + bool(manifest.lookups))
        fences = self._arena.fences.reserve(replica.owner, count)
        if fences is not None:
            replica.table = table_by_rows(manifest)
            replica.manifest, replica.first_fence = manifest, fences.offset_bytes
            replica.region_bytes = aligned(max(manifest.total_bytes, 1), REGION_ALIGN_BYTES)
            replica.min_bytes = self._arena.min_bytes(manifest)
            if replica.min_bytes:
                self._land(replica, self._arena.staging(manifest, self._arena.leasable_bytes))
            else:
                self._variants.join(replica, manifest)
        return fences is not None

    @staticmethod
    def _land(replica: DeviceModel, staging: StagingLayout | None) -> None:
        """Set the places of a streaming model's groups; None: this device cannot serve it."""
        replica.staging = staging
        if staging is not None:
            replica.region_bytes = staging.size_bytes

    def is_idle(self, replica: DeviceModel) -> bool:
        """Return True if no request waits for the model, no task reads it, and no copy runs."""
        is_wanted = replica.users or self._device.queue.count(replica.name)
        return not is_wanted and not replica.is_being_sent

    def release(self, replica: DeviceModel) -> None:
        """Release the fences of a model that is only in the host store."""
        self._variants.leave(replica)
        if self._arena.fences.get(replica.owner) is not None:
            self._arena.fences.release(replica.owner)

    def remove(self, replica: DeviceModel) -> None:
        """Release the place and the fences of an unregistered model."""
        if replica.residency.state is not Residency.HOST:
            self.evict(replica, "unregistered")
        self.release(replica)
        del self._device.replicas[replica.name]
        self._device.predictions.remove(replica.name)

    def device_lost(self) -> None:
        """Handle the daemon's death: all bytes on the device are lost; the host store is kept."""
        for replica in self._device.replicas.values():
            self._device.move(replica, ResidencyEvent.DEVICE_LOST, "daemon exited")
            replica.users = 0
            replica.transfer.is_prefetch = False

    def cut_anew(self, replica: DeviceModel, plan: Plan) -> bool:
        """Divide a model, which must be only in the host store, into other groups.

        Return False if there are not enough fences; then nothing has changed.
        """
        assert replica.residency.state is Residency.HOST, replica.residency.story
        assert replica.model.manifest is not None
        manifest = regrouped(replica.model.manifest, plan)
        old = self._arena.fences.get(replica.owner)
        if old is not None:
            self._arena.fences.release(replica.owner)
            count = max(1, len(manifest.groups) + bool(manifest.lookups))
            fences = self._arena.fences.reserve(replica.owner, count)
            if fences is None:
                self._arena.fences.reserve(replica.owner, old.size_bytes, at_bytes=old.offset_bytes)
                return False
            replica.first_fence = fences.offset_bytes
        replica.manifest, replica.grouping.plan = manifest, plan
        replica.table = table_by_rows(manifest)
        self._core.model_changes += 1
        self._core.dirty |= WORKERS
        return True

    def transmit(
        self, replica: DeviceModel, window: Extent, cause: str, runs: Sequence[Run] = ()
    ) -> OpId:
        """Evict the window's models, lease the window, and order the daemon to copy the groups.

        The window must have no obstacles. Return the operation id of the copy. Rows of a table that
        ``runs`` look up are copied first, if they are few, and the table as late as possible.
        """
        core, device, manifest = self._core, self._device, replica.manifest
        assert manifest is not None
        transfer, ranges, store = replica.transfer, None, replica.model.store_offset_bytes
        whole, model = ((0, manifest.total_bytes),), replica.model
        if isinstance(window, VariantPlace):
            ranges = window.ranges
            self.clear(window, f"{replica.name} takes its place and reuses equal bytes")
        there = self._take(replica, window, cause)
        staging = replica.staging
        self._device.move(replica, ResidencyEvent.TRANSMIT, cause)
        replica.residency_id = core.next_op_id()
        transfer.started_at_ms, transfer.ended_at_ms = core.now_ms, 0.0
        if ranges is not None and (table := replica.table) is not None:
            runs = runs if parts_of(manifest.groups[table.group], ranges, model.pieces) else ()
        order, rows = [*range(len(manifest.groups))], self._rows(replica, runs) if runs else []
        transfer.by_rows = tuple(runs) if rows else ()
        if rows and (table := replica.table) is not None:
            order.insert(table.before - 1, order.pop(table.group))
            order.insert(0, table.group - len(order))
        chosen = ranges if ranges is not None else whole if model.image else None
        groups = [
            GroupCopy(
                store_offset_bytes=store + (group := manifest.groups[index]).offset_bytes,
                arena_offset_bytes=replica.preferred_offset_bytes
                + (staging.offsets[index] if staging else group.offset_bytes),
                size_bytes=group.size_bytes,
                fence=replica.first_fence + index,
                parts=()
                if index in there
                else (None if chosen is None else parts_of(group, chosen, model.pieces)),
            )
            for index in order[len(rows) :]
        ]
        transfer.order, transfer.share = tuple(order), 1.0
        if ranges is not None:
            copied_bytes = sum([one.copied_bytes for one in groups])
            replica.resident_bytes = manifest.total_bytes - copied_bytes
            transfer.share = copied_bytes / manifest.total_bytes
        device.daemon.send(
            TransmitModel(
                model=replica.name,
                op_id=replica.residency_id,
                arena_offset_bytes=replica.preferred_offset_bytes,
                region_bytes=replica.region_bytes,
                waits=staging.waits if staging is not None else (),
                tenant=core.tenant_of(replica.model.tenant),
                groups=(*rows, *groups),
            )
        )
        return replica.residency_id

    def _rows(self, replica: DeviceModel, runs: Sequence[Run]) -> list[GroupCopy]:
        """Return the copy of the rows that the runs look up; [] if they are too many."""
        manifest, table, device = replica.built, replica.table, self._device
        if table is None or replica.staging is not None or device.trial.model == replica.name:
            return []
        indices = tuple([run.inputs[table.index_input] for run in runs])
        count = sum([one.size_bytes // ITEM_BYTES[one.dtype] for one in indices])
        is_long = count > min(MAX_ROWS, table.size_bytes // ROW_COST_BYTES)
        if is_long or any(one.pieces for one in indices):
            return []
        group, model = manifest.groups[table.group], replica.model
        whole = ((0, manifest.total_bytes),)
        return [
            GroupCopy(
                store_offset_bytes=replica.model.store_offset_bytes + group.offset_bytes,
                arena_offset_bytes=replica.preferred_offset_bytes + group.offset_bytes,
                size_bytes=group.size_bytes,  # with padding, which the daemon also fills
                fence=replica.first_fence + len(manifest.groups),
                parts=parts_of(group, whole, model.image) if model.image else None,
                row_bytes=table.size_bytes // table.rows,
                indices=indices,
            )
        ]

    def _take(self, replica: DeviceModel, window: Extent, cause: str) -> Container[int]:
        """Lease the window for a model; return the groups that are already on the device.

        1. The window is the ring of a streaming model: the groups that it keeps are there.
        2. The window is a new place: no group is there.
        """
        if not isinstance(window, RingPlace) and replica.residency.state is Residency.PARTIAL:
            self.evict(replica, cause)
        self.clear(window, cause)
        if isinstance(window, Streamed):
            self._land(replica, window.staging)
        arena, start, size = self._arena, window.offset_bytes, replica.region_bytes
        staging = replica.staging
        if staging is None:
            replica.preferred_offset_bytes, replica.resident_bytes = start, 0
            arena.lease(replica.owner, size, start)
        elif isinstance(window, RingPlace):
            replica.resident_bytes = replica.built.total_bytes - replica.sent_bytes
            arena.lease(replica.rest, size - staging.resident_bytes, start)
            return staging.resident  # 1.
        else:
            replica.preferred_offset_bytes, replica.resident_bytes = start, 0
            resident_bytes = staging.resident_bytes if staging.resident_bytes < size else 0
            replica.resident_groups = len(staging.resident) if resident_bytes else 0
            ring_bytes = size - resident_bytes if resident_bytes else 0
            arena.lease(replica.owner, size - ring_bytes, start + ring_bytes)
            if ring_bytes:
                arena.lease(replica.rest, ring_bytes, start)
        return ()  # 2.

    def clear(self, window: Extent, cause: str) -> None:
        """Evict the window's models."""
        for victim in window.victims:
            replica = self._arena.model_of(victim)
            if replica is not None and self._arena.regions.get(victim.owner) is not None:
                self.evict(replica, cause)

    def evict(self, replica: DeviceModel, cause: str) -> None:
        """Evict the model. Only the ledger changes; after that the bytes may be overwritten."""
        if replica.residency.state is Residency.PINNED:
            self._device.move(replica, ResidencyEvent.UNPIN, cause)
        self._device.move(replica, ResidencyEvent.EVICTED, cause)
        self._arena.release(replica)
        self._core.counts["evictions"] += 1
        self._device.publish("switch.evicted", model=replica.name, cause=cause)

    def transmit_ended(self, message: TransmitEnded) -> None:
        """Handle the end of a copy: the daemon writes nothing more for this operation id."""
        core, device = self._core, self._device
        replica = device.replicas.get(message.model)
        if replica is None or replica.residency_id != message.op_id:
            return
        if not replica.is_being_sent:
            return
        replica.transfer.ended_at_ms, replica.transfer.by_rows = message.ended_at_ms, ()
        core.counts["transmitted_bytes"] += message.copied_bytes
        core.counts["transmissions"] += 1
        groups, order = replica.built.groups, replica.transfer.order
        ends_ms, track = message.group_ends_at_ms, device.track("copy")
        begins_ms, is_whole = (message.started_at_ms, *ends_ms), replica.transfer.share == 1.0
        core.emit(
            Spans(
                spans=[
                    Span(
                        track=track,
                        name=f"{message.model} group {index % len(groups)}"
                        + ", rows" * (index < 0),
                        begin_ms=begin,
                        end_ms=max(begin, end),
                        args={"bytes": groups[index].size_bytes} if index >= 0 and is_whole else {},
                        flow=message.op_id,
                    )
                    for index, begin, end in zip(order, begins_ms, ends_ms, strict=False)
                ]
            )
        )
        if message.is_complete:
            self._device.move(replica, ResidencyEvent.ARRIVED, "all groups copied")
            if replica.staging is not None:
                self._pass_ended(replica)
            elif replica.model.want_pinned:
                self._device.move(replica, ResidencyEvent.PIN, "requested by the user")
            replica.transfer.is_prefetch = False
            replica.transfer.report = message
            took_ms = message.ended_at_ms - message.started_at_ms
            device.predictions.sent(replica.name, took_ms, core.now_ms)
            device.queue.changed(replica.name)
        else:
            self._broke_off(replica, "transmission cancelled")

    def _broke_off(self, replica: DeviceModel, cause: str) -> None:
        """Handle a copy that ended early: a task would wait for the missing groups for ever.

        1. No task reads the model: its place is free.
        2. A worker reads it: kill that worker. The place is free when it is reaped (``unused``).
        """
        core, device = self._core, self._device
        replica.transfer.is_prefetch = False
        self._device.move(replica, ResidencyEvent.ABANDONED, cause)
        replica.transfer.retry_at_ms = core.now_ms + core.settings.restart_backoff_ms
        if not replica.users:
            self._release_broken(replica, cause)  # 1.
        for activation in device.owner.tasks:
            if activation.model == replica.name:
                device.kill(device.workers[activation.slot], cause, blame=False)  # 2.

    def unused(self, replica: DeviceModel) -> None:
        """Record that a task that read the model has ended, or that its worker was reaped."""
        replica.users -= 1
        replica.last_used_at_ms = self._core.now_ms
        if replica.residency.state is Residency.ABANDONED and not replica.users:
            self._release_broken(replica, "no task needs it any more")
        elif replica.staging is not None:
            self._pass_ended(replica)

    def _pass_ended(self, replica: DeviceModel) -> None:
        """Free the ring of a streaming model that no task reads any more.

        1. The end of its copy is not reported yet. If the task failed, the copy waits for a
           computation that will not come: cancel it. The cancel of a finished copy has no effect.
        2. Only the groups that the model keeps stay.
        """
        cause = "its pass has ended"
        if replica.users:
            return
        if replica.residency.state is Residency.TRANSMITTING:
            self._device.daemon.send(CancelTransmit(op_id=replica.residency_id))  # 1.
        elif replica.resident_groups:
            self._device.move(replica, ResidencyEvent.RING_FREED, cause)  # 2.
            self._arena.regions.release(replica.rest)
        else:
            self._device.move(replica, ResidencyEvent.EVICTED, cause)
            self._arena.release(replica)

    def _release_broken(self, replica: DeviceModel, cause: str) -> None:
        self._device.move(replica, ResidencyEvent.RELEASED, cause)
        self._arena.release(replica)

    def prefetch(self, name: ModelName) -> bool:
        """Send a model ahead of its request, if the copy disturbs no request.

        Return False if it is not sent now.
        """
        core, device = self._core, self._device
        replica = device.replicas.get(name)
        if (
            replica is None
            or replica.model.state.state is not ModelState.READY
            or replica.is_on_device
            or replica.staging is not None  # the copy would wait in the ring for a request
            or device.trial.model == name  # the copy is timed with the request that needs it
            or not device.may_serve(replica.model)
        ):
            return False
        if (
            device.queue
            or device.owner.pending is not None
            or not device.daemon.is_ready
            or core.is_draining
        ):
            return False
        if replica.residency.state is Residency.ABANDONED:
            return False
        replica.transfer.is_prefetch = self._send(replica, "prefetch hint")
        return replica.transfer.is_prefetch

    def _send(self, replica: DeviceModel, cause: str) -> bool:
        """Send a model although no request waits for it. Return False if there is no room now."""
        window = self._arena.find_extent(replica, for_request=False)
        if window is None or self._arena.obstacles(window):
            return False
        self.transmit(replica, window, cause)
        return True

    def cancel_prefetches(self) -> None:
        """Cancel prefetches, which are only guesses: a request needs the link or the memory."""
        device = self._device
        for name in list(device.sending):
            replica = device.replicas[name]
            if not replica.transfer.is_prefetch:
                continue
            if not replica.users and not device.queue.count(replica.name):
                replica.transfer.is_prefetch = False
                self._device.move(replica, ResidencyEvent.ABANDONED, "a request needs the link")
                device.daemon.send(CancelTransmit(op_id=replica.residency_id))

    def bring_pinned(self) -> int:
        """Send pinned models that are not on the device, while no request needs the link."""
        core, device = self._core, self._device
        if not core.pins:
            return 0
        if device.queue or device.owner.pending is not None or not device.daemon.is_ready:
            return QUEUE | TURN | RESIDENCY
        for name in core.pins:
            replica = device.replicas.get(name)
            if (
                replica is not None
                and replica.model.want_pinned
                and replica.staging is None
                and device.trial.model != name
                and device.may_serve(replica.model)
                and replica.model.state.state is ModelState.READY
                and replica.residency.state is Residency.HOST
            ):
                if core.now_ms < replica.transfer.retry_at_ms:
                    core.wake_at(replica.transfer.retry_at_ms, RESIDENCY)
                    continue
                self._send(replica, "pinned")
        return QUEUE | TURN | RESIDENCY | MEASURED

    def refused(self, op_id: OpId, reason: str) -> None:
        """Handle a copy that the daemon refused or failed: no other answer to it will come."""
        for replica in self._device.replicas.values():
            if replica.is_being_sent and replica.residency_id == op_id:
                self._broke_off(replica, reason)

    def check(self) -> None:
        """Assert that each model's regions in the arena agree with its state."""
        arena = self._arena
        for replica in self._device.replicas.values():
            head, rest = arena.regions.get(replica.owner), arena.regions.get(replica.rest)
            is_there = head is not None
            assert is_there == (replica.residency.state is not Residency.HOST), (
                replica.residency.story
            )
            assert replica.users == 0 or is_there, f"{replica.name} is read but not there"
            is_whole = replica.residency.state in WHOLE
            assert (rest is not None) == (is_whole and replica.resident_groups > 0), (
                replica.residency.story
            )
            if head is not None and rest is not None:
                assert rest.end_bytes == head.offset_bytes, f"{replica.name} is torn apart"
            if is_whole and replica.manifest is not None:
                assert arena.held_bytes(replica) >= replica.region_bytes, replica.name
            if replica.staging is not None and replica.residency.state is Residency.RESIDENT:
                assert replica.users, f"{replica.name} is larger than the arena, and stays"
