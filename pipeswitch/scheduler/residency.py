"""Models on the device: sent, evicted, kept in part, abandoned, brought back. Pure."""

from __future__ import annotations

from ..ipc.messages import CancelTransmit, Epoch, GroupCopy, ModelName, TransmitEnded, TransmitModel
from ..planning.grouping import Plan
from ..programs.groups import regrouped
from ..programs.layout import REGION_ALIGN_BYTES, aligned
from .arena import WHOLE, Arena, Rest
from .core import Core
from .records import Model
from .regions import Window
from .states import ModelState, Residency, ResidencyEvent


class Residents:
    """Leases are decided here, copies are commands to the memory daemon."""

    def __init__(self, core: Core, arena: Arena) -> None:
        self._core = core
        self._arena = arena

    def device_lost(self) -> None:
        """The daemon died: every byte on the device is gone, the host store is not."""
        for model in self._core.models.values():
            model.residency.apply(ResidencyEvent.DEVICE_LOST, "daemon exited")
            model.users = 0
            model.is_prefetch = False

    def cut_anew(self, model: Model, plan: Plan) -> bool:
        """Other groups over the same bytes, for a model whose bytes are in the host store only.

        False: there are not enough arrival words, and nothing has changed.
        """
        assert model.residency.state is Residency.HOST, model.residency.story
        assert model.built is not None
        manifest = regrouped(model.built, plan)
        model.prefix_groups = 0
        old = self._arena.words.get(model.owner)
        if old is not None:
            self._arena.words.release(model.owner)
            words = self._arena.words.reserve(model.owner, max(1, len(manifest.groups)))
            if words is None:
                self._arena.words.reserve(model.owner, old.size_bytes, at_bytes=old.offset_bytes)
                return False
            model.first_word = words.offset_bytes
        model.manifest, model.plan = manifest, plan
        return True

    def transmit(self, model: Model, window: Window, cause: str) -> Epoch:
        """Evict the window's models, lease it, and tell the daemon to send the groups.

        The window has no obstacles (the scheduler waits until they have left).
        """
        core, manifest = self._core, model.manifest
        assert manifest is not None
        sent_from = self._take(model, window, cause)
        region_bytes = aligned(max(manifest.total_bytes, 1), REGION_ALIGN_BYTES)
        model.residency.apply(ResidencyEvent.TRANSMIT, cause)
        model.residency_epoch = core.next_epoch()
        model.transmit_started_at_ms = core.now_ms
        model.transmit_ended_at_ms = 0.0
        core.tell_daemon(
            TransmitModel(
                model=model.name,
                epoch=model.residency_epoch,
                arena_offset_bytes=model.home_bytes,
                region_bytes=region_bytes,
                groups=tuple(
                    GroupCopy(
                        store_offset_bytes=model.store_offset_bytes + group.offset_bytes,
                        arena_offset_bytes=model.home_bytes + group.offset_bytes,
                        size_bytes=group.size_bytes if index >= sent_from else 0,
                        word=model.first_word + index,
                    )
                    for index, group in enumerate(manifest.groups)
                ),
            )
        )
        return model.residency_epoch

    def _take(self, model: Model, window: Window, cause: str) -> int:
        """Lease the window for a model; the first group that must be sent.

        1. The rest behind its prefix: the prefix' groups are there.
        2. A new place, or the first one: all groups.
        """
        assert model.manifest is not None
        if not isinstance(window, Rest) and model.residency.state is Residency.PARTIAL:
            self.evict(model, cause)
        self.clear(window, cause)
        size = aligned(max(model.manifest.total_bytes, 1), REGION_ALIGN_BYTES)
        if isinstance(window, Rest):
            head = self._arena.regions.get(model.owner)
            assert head is not None
            self._arena.lease(model.rest, size - head.size_bytes, window.offset_bytes)
            model.kept_bytes = self._prefix_bytes(model, model.kept_groups)
            return model.kept_groups  # 1.
        model.home_bytes, model.kept_bytes = window.offset_bytes, 0
        model.kept_groups = model.prefix_groups
        prefix = aligned(self._prefix_bytes(model, model.kept_groups), REGION_ALIGN_BYTES)
        if not 0 < prefix < size:
            model.kept_groups = prefix = 0
        self._arena.lease(model.owner, prefix or size, window.offset_bytes)
        if prefix:
            self._arena.lease(model.rest, size - prefix, window.offset_bytes + prefix)
        return 0  # 2.

    @staticmethod
    def _prefix_bytes(model: Model, group_count: int) -> int:
        assert model.manifest is not None
        return sum(group.size_bytes for group in model.manifest.groups[:group_count])

    def clear(self, window: Window, cause: str) -> None:
        """Evict the window's models; one of which only the rest is in the way keeps its prefix."""
        owners = {victim.owner for victim in window.victims}
        for victim in window.victims:
            model = self._arena.model_of(victim)
            if model is None or self._arena.regions.get(victim.owner) is None:
                continue  # it went with its other half
            is_rest = victim.owner.kind == "rest"
            if is_rest and model.owner not in owners and self._arena.may_keep(model):
                model.residency.apply(ResidencyEvent.EVICTED_TO_PREFIX, cause)
                self._arena.regions.release(victim.owner)
                self._evicted(model, cause)
            else:
                self.evict(model, cause)

    def evict(self, model: Model, cause: str) -> None:
        """Bookkeeping, never a free: the bytes are simply up for reuse."""
        if model.residency.state is Residency.PINNED:
            model.residency.apply(ResidencyEvent.UNPIN, cause)
        model.residency.apply(ResidencyEvent.EVICTED, cause)
        self._arena.release(model)
        self._evicted(model, cause)

    def _evicted(self, model: Model, cause: str) -> None:
        kept = model.residency.state is Residency.PARTIAL
        self._core.counts["evictions"] += 1
        self._core.publish("switch.evicted", model=model.name, cause=cause, keeps_prefix=kept)

    def transmit_ended(self, message: TransmitEnded) -> None:
        """The daemon writes no byte of that epoch any more."""
        core = self._core
        model = core.models.get(message.model)
        if model is None or model.residency_epoch != message.epoch:
            return
        if not model.is_being_sent:
            return
        model.transmit_ended_at_ms = message.ended_at_ms
        core.counts["transmitted_bytes"] += message.copied_bytes
        core.counts["transmissions"] += 1
        begin = message.started_at_ms
        groups = model.manifest.groups if model.manifest is not None else ()
        for index, (group, end) in enumerate(zip(groups, message.group_ends_at_ms, strict=False)):
            core.span("copy", f"{model.name} group {index}", begin, end, flow=message.epoch,
                      bytes=group.size_bytes)  # fmt: skip
            begin = end
        if message.is_complete:
            model.residency.apply(ResidencyEvent.ARRIVED, "all groups copied")
            if model.want_pinned:
                model.residency.apply(ResidencyEvent.PIN, "asked by the user")
            model.is_prefetch = False
            model.transmission = message
        else:
            self._broke_off(model, "transmission cancelled")

    def _broke_off(self, model: Model, cause: str) -> None:
        """Groups are missing: a task that waits for them would wait for ever.

        1. No task reads it: the place is free.
        2. A worker does: it is killed, and the place is free when it is reaped (``unused``).
        """
        core = self._core
        model.is_prefetch = False
        model.residency.apply(ResidencyEvent.ABANDONED, cause)
        model.retry_at_ms = core.now_ms + core.settings.restart_backoff_ms
        if not model.users:
            self._release_broken(model, cause)  # 1.
        for activation in (core.current, core.upcoming):
            if activation is not None and activation.model == model.name:
                core.kill(core.workers[activation.slot], cause, blame=False)  # 2.

    def unused(self, model: Model) -> None:
        """A task that read the model has ended, or its worker is reaped."""
        model.users -= 1
        model.last_used_at_ms = self._core.now_ms
        if model.residency.state is Residency.ABANDONED and not model.users:
            self._release_broken(model, "no task reads it any more")

    def _release_broken(self, model: Model, cause: str) -> None:
        model.residency.apply(ResidencyEvent.RELEASED, cause)
        self._arena.release(model)

    def prefetch(self, name: ModelName) -> None:
        """Send a model ahead of its request, if that disturbs no request (no answer is owed)."""
        core = self._core
        model = core.models.get(name)
        if model is None or model.state.state is not ModelState.READY or model.is_on_device:
            return
        if core.queue or core.upcoming is not None or not core.is_daemon_ready or core.is_draining:
            return
        if model.residency.state is Residency.ABANDONED:
            return
        window = self._arena.find_place(model, for_request=False)
        if window is not None and not self._arena.obstacles(window):
            self.transmit(model, window, "prefetch hint")
            model.is_prefetch = True

    def cancel_prefetches(self) -> None:
        """A real request needs the link or the place: hints step back (they were a guess)."""
        core = self._core
        for model in core.models.values():
            if model.is_prefetch and not model.users and not core.queue.count(model.name):
                model.is_prefetch = False
                model.residency.apply(ResidencyEvent.ABANDONED, "a request needs the link")
                core.tell_daemon(CancelTransmit(epoch=model.residency_epoch))

    def bring_pinned(self) -> None:
        """Pinned models that are not on the device come back when nothing waits for the link."""
        core = self._core
        if core.queue or core.upcoming is not None or not core.is_daemon_ready:
            return
        for model in core.models.values():
            if (
                model.want_pinned
                and model.state.state is ModelState.READY
                and model.residency.state in (Residency.HOST, Residency.PARTIAL)
            ):
                if core.now_ms < model.retry_at_ms:
                    core.look_again(model.retry_at_ms)
                    continue
                window = self._arena.find_place(model, for_request=False)
                if window is not None and not self._arena.obstacles(window):
                    self.transmit(model, window, "pinned")

    def refused(self, epoch: Epoch, reason: str) -> None:
        """The daemon refused a copy, or failed at it: no other answer to it will come."""
        for model in self._core.models.values():
            if model.is_being_sent and model.residency_epoch == epoch:
                self._broke_off(model, reason)

    def check(self) -> None:
        """What a model holds of the arena is what its state says."""
        arena = self._arena
        for model in self._core.models.values():
            head, rest = arena.regions.get(model.owner), arena.regions.get(model.rest)
            is_there = head is not None
            assert is_there == (model.residency.state is not Residency.HOST), model.residency.story
            assert model.users == 0 or is_there, f"{model.name} is read but not there"
            is_whole = model.residency.state in WHOLE
            assert (rest is not None) == (is_whole and model.kept_groups > 0), model.residency.story
            if head is not None and rest is not None:
                assert head.end_bytes == rest.offset_bytes, f"{model.name} is torn apart"
            if is_whole and model.manifest is not None:
                assert arena.held_bytes(model) >= model.manifest.total_bytes, model.name
