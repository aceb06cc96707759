"""Where bytes live: the arena's ledger, residency of models, training slices, the host store.

Pure: leases are decided here, copies are commands to the memory daemon (DESIGN 6).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Literal

from ..errors import HostStoreFull, OutOfDeviceMemory
from ..messages import (
    CancelTransmit,
    Epoch,
    GroupCopy,
    JobName,
    ModelName,
    Scrub,
    TransmitEnded,
    TransmitModel,
)
from ..policies import Resident
from ..programs.layout import REGION_ALIGN_BYTES, TENSOR_ALIGN_BYTES, aligned
from ..regions import Region, Regions, Window
from ..states import ModelState, Residency, ResidencyEvent, TaskState
from .core import Core
from .records import BYSTANDER, Model

WORDS_OWNER = "#words"  # no model can have this name
SLICE = "slice:"  # owner prefix of a training slice; after it the job's name
SCRUB = "scrub:"  # owner prefix of a released slice until it reads as zeros

# What a place costs in time before it is free, above any price a policy puts on a model: better
# any idle model goes than a wait, better a wait for who leaves already than one more commit.
SCRUB_COST = 1e14
LEAVING_COST = 2e14
SLICE_COST = 1e15
COMPUTING = (TaskState.TRANSMITTING, TaskState.RUNNING, TaskState.STOPPING, TaskState.SUSPENDED)


class Memory:
    """The ledgers of arena, arrival words and host store."""

    def __init__(self, core: Core) -> None:
        self._core = core
        settings = core.settings
        self.arena = Regions(settings.arena_bytes, REGION_ALIGN_BYTES)
        self.words = Regions(settings.words, 1)
        self.store = Regions(settings.store_bytes, TENSOR_ALIGN_BYTES)
        self._reserve_words()

    def _reserve_words(self) -> None:
        if self.arena.reserve(WORDS_OWNER, self._core.settings.words * 4, at_bytes=0) is None:
            raise OutOfDeviceMemory(
                f"an arena of {self.arena.capacity_bytes} bytes has no room for its arrival words",
                hint="start with --arena 64MiB or more",
                requested_bytes=self._core.settings.words * 4,
                largest_free_bytes=self.arena.capacity_bytes,
            )

    @property
    def leasable_bytes(self) -> int:
        """The arena without its arrival words: what models and slices can have."""
        words = self.arena.get(WORDS_OWNER)
        return self.arena.capacity_bytes - (words.size_bytes if words is not None else 0)

    def device_lost(self) -> None:
        """The daemon died: every byte on the device is gone, the host store is not."""
        self.arena.clear()
        self._reserve_words()
        for model in self._core.models.values():
            model.residency.apply(ResidencyEvent.DEVICE_LOST, "daemon exited")
            model.users = 0
            model.is_prefetch = model.is_abandoned = False
        for job in self._core.jobs.values():
            job.lease_bytes = 0
            job.lease_asked_bytes = 0

    # -- host store ---------------------------------------------------------------------------

    def store_model(self, model: Model) -> None:
        """Reserve its place in the host store and its arrival words.

        Raises:
            OutOfDeviceMemory: larger than the arena; no request could ever run.
            HostStoreFull: no room beside the others.
        """
        manifest = model.manifest
        assert manifest is not None
        size = max(manifest.total_bytes, TENSOR_ALIGN_BYTES)
        largest = self.leasable_bytes
        if aligned(size, REGION_ALIGN_BYTES) > largest:
            raise OutOfDeviceMemory(
                f'"{model.name}" needs {_gib(size)}, the arena has {_gib(largest)}',
                hint=f"start with --arena {aligned(2 * size, 1 << 30) >> 30}GiB",
                requested_bytes=size,
                largest_free_bytes=largest,
            )
        groups = max(1, len(manifest.groups))
        words = self.words.reserve(model.name, groups)
        region = self.store.reserve(model.name, size)
        if region is None or words is None:
            if words is not None:
                self.words.release(model.name)
            if region is not None:
                self.store.release(model.name)
            raise HostStoreFull(
                f'"{model.name}" needs {_gib(size)}, the host store has '
                f"{_gib(self.store.largest_free_bytes)} left in one piece",
                hint="pipeswitch unregister a model, or start with a larger --host-store",
                requested_bytes=size,
                largest_free_bytes=self.store.largest_free_bytes,
            )
        model.store_offset_bytes = region.offset_bytes
        model.first_word = words.offset_bytes

    def forget_model(self, model: Model) -> None:
        """Give back everything an idle model holds."""
        assert model.users == 0, f"{model.name} is in use"
        if self.arena.get(model.name) is not None:
            self.evict(model, "unregistered")
        if self.store.get(model.name) is not None:
            self.store.release(model.name)
        if self.words.get(model.name) is not None:
            self.words.release(model.name)

    # -- residency ----------------------------------------------------------------------------

    def _prices(self, *, for_request: bool) -> Callable[[Region], float | None]:
        """What taking a region's place costs; None when its owner must stay.

        1. Arrival words, pinned models, models in use or being copied in: they stay.
        2. An idle model: what the policy says. One with waiting requests goes for a request
           that ranks before them, never for a guess or a job (SCHEDULING 3.5).
        3. A range being zeroed, an abandoned copy, the slice of a job that leaves: soon free.
        4. A job's slice: only for a request, and only when nothing else will do.
        """
        core = self._core
        waiting = Counter(request.model for request in core.queue.values())
        known: dict[str, float | None] = {}

        def price(region: Region) -> float | None:
            if region.owner not in known:
                known[region.owner] = self._price(region, waiting, for_request=for_request)
            return known[region.owner]

        return price

    def _price(
        self, region: Region, waiting: Counter[ModelName], *, for_request: bool
    ) -> float | None:
        core = self._core
        if region.owner == WORDS_OWNER:
            return None  # 1.
        if region.owner.startswith(SCRUB):
            return SCRUB_COST  # 3.
        if region.owner.startswith(SLICE):
            job = core.jobs[JobName(region.owner.removeprefix(SLICE))]
            if job.slot is None or job.state.state not in COMPUTING:
                return LEAVING_COST  # 3.
            return SLICE_COST + region.size_bytes if for_request else None  # 4.
        model = core.models[ModelName(region.owner)]
        if model.is_abandoned:
            return SCRUB_COST  # 3.
        if model.users or model.residency.state is not Residency.RESIDENT:
            return None  # 1.
        if waiting[model.name] and not for_request:
            return None  # 2.
        return core.policy.eviction_cost(
            Resident(
                model=model.name,
                size_bytes=region.size_bytes,
                priority=model.priority,
                last_used_at_ms=model.last_used_at_ms,
                use_count=model.use_count,
                waiting_count=waiting[model.name],
            ),
            core.now_ms,
        )

    def find_place(self, model: Model, *, for_request: bool) -> Window | None:
        """Its home when nothing is cheaper, else the cheapest window anywhere.

        A model returns to its home offset so that cached parameter views (and CUDA graphs) stay
        valid. It gets a new home rather than evict somebody while there is room elsewhere:
        models whose homes overlap would throw each other out for ever.
        """
        assert model.manifest is not None
        size = max(model.manifest.total_bytes, 1)
        price = self._prices(for_request=for_request)
        best = self.arena.cheapest_window(size, price)
        if best is not None and model.home_bytes >= 0:
            home = self.arena.window_at(model.home_bytes, size, price)
            if home is not None and home.cost <= best.cost:
                return home
        return best

    def obstacles(self, window: Window) -> list[Region]:
        """What in the window cannot be taken now: slices, ranges being zeroed, broken copies."""
        return [
            victim
            for victim in window.victims
            if victim.owner.startswith((SLICE, SCRUB))
            or self._core.models[ModelName(victim.owner)].is_abandoned
        ]

    def can_ever_hold(self, size_bytes: int) -> bool:
        """Whether it fits once everything that is not pinned has left."""
        return aligned(size_bytes, REGION_ALIGN_BYTES) <= self.largest_for_all_bytes

    @property
    def largest_for_all_bytes(self) -> int:
        """The longest range between what never leaves: arrival words and pinned models."""
        models = self._core.models
        cursor = largest = 0
        for region in self.arena:
            model = models.get(ModelName(region.owner))
            is_pinned = model is not None and model.residency.state is Residency.PINNED
            if region.owner == WORDS_OWNER or is_pinned:
                largest = max(largest, region.offset_bytes - cursor)
                cursor = region.end_bytes
        return max(largest, self.arena.capacity_bytes - cursor)

    def transmit(self, model: Model, window: Window, cause: str) -> Epoch:
        """Evict the window's models, lease it, and tell the daemon to send the groups.

        The window has no obstacles (the scheduler waits until they have left).
        """
        core, manifest = self._core, model.manifest
        assert manifest is not None
        for victim in window.victims:
            self.evict(core.models[ModelName(victim.owner)], cause)
        size = max(manifest.total_bytes, 1)
        region = self.arena.reserve(model.name, size, at_bytes=window.offset_bytes)
        assert region is not None, "a window without its victims is free"
        model.home_bytes = region.offset_bytes
        model.residency.apply(ResidencyEvent.TRANSMIT, cause)
        model.residency_epoch = core.next_epoch()
        model.transmit_started_at_ms = core.now_ms
        model.transmit_ended_at_ms = 0.0
        core.tell_daemon(
            TransmitModel(
                model=model.name,
                epoch=model.residency_epoch,
                arena_offset_bytes=region.offset_bytes,
                region_bytes=region.size_bytes,
                groups=tuple(
                    GroupCopy(
                        store_offset_bytes=model.store_offset_bytes + group.offset_bytes,
                        arena_offset_bytes=region.offset_bytes + group.offset_bytes,
                        size_bytes=group.size_bytes,
                        word=model.first_word + index,
                    )
                    for index, group in enumerate(manifest.groups)
                ),
            )
        )
        return model.residency_epoch

    def evict(self, model: Model, cause: str) -> None:
        """Bookkeeping, never a free: the bytes are simply up for reuse."""
        if model.residency.state is Residency.PINNED:
            model.residency.apply(ResidencyEvent.UNPIN, cause)
        model.residency.apply(ResidencyEvent.EVICTED, cause)
        self.arena.release(model.name)
        self._core.counts["evictions"] += 1
        self._core.publish("switch.evicted", model=model.name, cause=cause)

    def transmit_ended(self, message: TransmitEnded) -> None:
        """The daemon writes no byte of that epoch any more."""
        core = self._core
        model = core.models.get(message.model)
        if model is None or model.residency_epoch != message.epoch:
            return
        if model.residency.state is not Residency.TRANSMITTING:
            return
        model.transmit_ended_at_ms = message.ended_at_ms
        core.counts["transmitted_bytes"] += message.copied_bytes
        core.counts["transmissions"] += 1
        begin = message.started_at_ms
        for index, end in enumerate(message.group_ends_at_ms):
            core.span("copy", f"{model.name} group {index}", begin, end, flow=message.epoch)
            begin = end
        if message.is_complete:
            model.residency.apply(ResidencyEvent.ARRIVED, "all groups copied")
            if model.want_pinned:
                model.residency.apply(ResidencyEvent.PIN, "asked by the user")
            model.is_prefetch = model.is_abandoned = False
        else:
            self._broke_off(model, "transmission cancelled")

    def refused(self, epoch: Epoch, reason: str) -> None:
        """The daemon refused an order: a bug here; a transmission of that epoch never begins."""
        for model in self._core.models.values():
            is_sent = model.residency.state is Residency.TRANSMITTING
            if is_sent and model.residency_epoch == epoch:
                self._broke_off(model, reason)

    def _broke_off(self, model: Model, cause: str) -> None:
        """Groups are missing: who waits for them would wait for ever.

        1. Nobody reads it: the place is free.
        2. A worker does: it is killed, and the place is free when it is reaped (``unused``).
        """
        core = self._core
        model.is_prefetch = False
        model.is_abandoned = True
        model.retry_at_ms = core.now_ms + core.settings.restart_backoff_ms
        if not model.users:
            self._release_broken(model, cause)  # 1.
        for activation in (core.current, core.upcoming):
            if activation is not None and activation.model == model.name:
                core.kill(core.workers[activation.slot], f"{BYSTANDER}{cause}")  # 2.

    def unused(self, model: Model) -> None:
        """A task that read the model has ended, or its worker is reaped."""
        model.users -= 1
        model.last_used_at_ms = self._core.now_ms
        if model.is_abandoned and not model.users:
            self._release_broken(model, "nobody waits for it any more")

    def _release_broken(self, model: Model, cause: str) -> None:
        model.residency.apply(ResidencyEvent.ABANDONED, cause)
        model.is_abandoned = False
        self.arena.release(model.name)

    def cancel_prefetches(self) -> None:
        """A real request needs the link or the place: hints step back (they were a guess)."""
        core = self._core
        wanted = {request.model for request in core.queue.values()}
        for model in core.models.values():
            if model.is_prefetch and not model.users and model.name not in wanted:
                model.is_prefetch = False
                model.is_abandoned = True  # until TransmitEnded says how it came out
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
                and model.residency.state is Residency.HOST
                and not model.unregister_tokens
            ):
                if core.now_ms < model.retry_at_ms:
                    core.look_again(model.retry_at_ms)
                    continue
                window = self.find_place(model, for_request=False)
                if window is not None and not self.obstacles(window):
                    self.transmit(model, window, "pinned")

    # -- training slices ----------------------------------------------------------------------

    def lease_slice(self, job: JobName, size_bytes: int) -> Region | Literal["soon"] | None:
        """A place for a job's state, throwing out idle models.

        Returns:
            "soon" when enough is about to be free; None when another job would have to leave.

        Raises:
            OutOfDeviceMemory: it would not fit in an empty arena beside what is pinned.
        """
        core = self._core
        if not self.can_ever_hold(size_bytes):
            largest = self.largest_for_all_bytes
            raise OutOfDeviceMemory(
                f'job "{job}" needs {_gib(size_bytes)} for parameters, gradients and optimizer '
                f"state, the arena can give {_gib(largest)}",
                hint="start with a larger --arena, or unpin a model (pipeswitch unload NAME)",
                requested_bytes=size_bytes,
                largest_free_bytes=largest,
            )
        window = self.arena.cheapest_window(size_bytes, self._prices(for_request=False))
        if window is None:
            return None
        if self.obstacles(window):
            return "soon"
        for victim in window.victims:
            self.evict(core.models[ModelName(victim.owner)], f"job {job}")
        region = self.arena.reserve(SLICE + job, size_bytes, at_bytes=window.offset_bytes)
        assert region is not None
        return region

    def release_slice(self, job: JobName) -> None:
        """Its worker is reaped: zero the range, then it is free (another tenant may follow)."""
        if self.arena.get(SLICE + job) is None:
            return
        region = self.arena.release(SLICE + job)
        if not self._core.is_daemon_ready:
            return  # the memory went with its owner
        epoch = self._core.next_epoch()
        taken = self.arena.reserve(f"{SCRUB}{epoch}", region.size_bytes, region.offset_bytes)
        assert taken is not None
        self._core.tell_daemon(
            Scrub(epoch=epoch, offset_bytes=region.offset_bytes, size_bytes=region.size_bytes)
        )

    def scrubbed(self, epoch: Epoch) -> None:
        if self.arena.get(f"{SCRUB}{epoch}") is not None:
            self.arena.release(f"{SCRUB}{epoch}")

    def check(self) -> None:
        """Invariants of DESIGN 10 that concern bytes."""
        for ledger in (self.arena, self.words, self.store):
            ledger.check()
        for model in self._core.models.values():
            holds = self.arena.get(model.name) is not None
            assert holds == (model.residency.state is not Residency.HOST), model.residency.story
            assert model.users == 0 or holds, f"{model.name} is read but not there"
            assert not model.is_abandoned or holds, f"{model.name} is abandoned but not there"
        for region in self.arena:
            if region.owner.startswith(SLICE):
                name = JobName(region.owner.removeprefix(SLICE))
                assert any(w.job == name for w in self._core.workers.values()), region


def _gib(size_bytes: int) -> str:
    """Bytes for people, as INTERFACE's error texts show them."""
    if size_bytes >= 1 << 30:
        return f"{size_bytes / (1 << 30):.2f} GiB"
    return f"{size_bytes / (1 << 20):.1f} MiB"
