"""Where bytes live: the arena's ledger, residency of models, training slices, the host store.

Pure: leases are decided here, copies are commands to the memory daemon (DESIGN 6).
"""

from __future__ import annotations

from collections import Counter
from typing import Literal

from ..errors import HostStoreFull, OutOfDeviceMemory
from ..ipc.messages import (
    CancelTransmit,
    Epoch,
    GroupCopy,
    JobName,
    ModelName,
    Scrub,
    TransmitEnded,
    TransmitModel,
)
from ..planning.grouping import Plan
from ..programs.groups import regrouped
from ..programs.layout import REGION_ALIGN_BYTES, TENSOR_ALIGN_BYTES, aligned
from .core import Core
from .policies import Resident
from .records import Model
from .regions import Cost, Owner, Price, Region, Regions, Window
from .states import ModelState, Residency, ResidencyEvent, TaskState

WORDS = Owner("words")

# What a place costs: bytes of running jobs, leaving jobs, ranges soon free, the policy's price of
# models. The first difference decides: better any idle model goes than a wait, better a wait for a
# job that leaves already than one more commit.
FREE: Cost = (0.0, 0.0, 0.0, 0.0)
SOON_FREE: Cost = (0.0, 0.0, 1.0, 0.0)
JOB_LEAVES: Cost = (0.0, 1.0, 0.0, 0.0)
PREFIX_WEIGHT = 4.0  # a prefix is worth more per byte than what follows: it hides a whole copy
WHOLE = (Residency.TRANSMITTING, Residency.ABANDONED, Residency.RESIDENT, Residency.PINNED)
COMPUTING = (TaskState.TRANSMITTING, TaskState.RUNNING, TaskState.STOPPING, TaskState.SUSPENDED)


class Rest(Window):
    """A place for the rest of a model, right behind the prefix that is still there."""


class Memory:
    """The ledgers of arena, arrival words and host store.

    A model with a prefix holds two adjacent regions: ``Model.owner`` has the first, which ends
    on the alignment behind its first groups, ``Model.rest`` the other. So a window may take the
    rest and leave the prefix: the model is PARTIAL then, and only the rest is sent next time.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        settings = core.settings
        self.arena = Regions(settings.arena_bytes, REGION_ALIGN_BYTES)
        self.words = Regions(settings.words, 1)
        self.store = Regions(settings.store_bytes, TENSOR_ALIGN_BYTES)
        self._unscrubbed: dict[Epoch, float] = {}  # of a scrub that failed: when to try again
        self._reserve_words()

    def _reserve_words(self) -> None:
        if self.arena.reserve(WORDS, self._core.settings.words * 4, at_bytes=0) is None:
            raise OutOfDeviceMemory(
                f"an arena of {self.arena.capacity_bytes} bytes has no room for its arrival words",
                hint="start with --arena 64MiB or more",
                requested_bytes=self._core.settings.words * 4,
                largest_free_bytes=self.arena.capacity_bytes,
            )

    @property
    def leasable_bytes(self) -> int:
        """The arena without its arrival words: what models and slices can have."""
        words = self.arena.get(WORDS)
        return self.arena.capacity_bytes - (words.size_bytes if words is not None else 0)

    def device_lost(self) -> None:
        """The daemon died: every byte on the device is gone, the host store is not."""
        self.arena.clear()
        self._reserve_words()
        for model in self._core.models.values():
            model.residency.apply(ResidencyEvent.DEVICE_LOST, "daemon exited")
            model.users = 0
            model.is_prefetch = False
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
        words = self.words.reserve(model.owner, groups)
        region = self.store.reserve(model.owner, size)
        if region is None or words is None:
            if words is not None:
                self.words.release(model.owner)
            if region is not None:
                self.store.release(model.owner)
            raise HostStoreFull(
                f'"{model.name}" needs {_gib(size)}, the host store has '
                f"{_gib(self.store.largest_free_bytes)} left in one piece",
                hint="pipeswitch unregister a model, or start with a larger --host-store",
                requested_bytes=size,
                largest_free_bytes=self.store.largest_free_bytes,
            )
        model.store_offset_bytes = region.offset_bytes
        model.first_word = words.offset_bytes

    def cut_anew(self, model: Model, plan: Plan) -> bool:
        """Other groups over the same bytes, for a model whose bytes are in the host store only.

        False: there are not enough arrival words, and nothing has changed.
        """
        assert model.residency.state is Residency.HOST, model.residency.story
        assert model.built is not None
        manifest = regrouped(model.built, plan)
        model.prefix_groups = 0
        old = self.words.get(model.owner)
        if old is not None:
            self.words.release(model.owner)
            words = self.words.reserve(model.owner, max(1, len(manifest.groups)))
            if words is None:
                self.words.reserve(model.owner, old.size_bytes, at_bytes=old.offset_bytes)
                return False
            model.first_word = words.offset_bytes
        model.manifest, model.plan = manifest, plan
        return True

    def forget_model(self, model: Model) -> None:
        """Give back everything an idle model holds."""
        assert model.users == 0, f"{model.name} is in use"
        if self.arena.get(model.owner) is not None:
            self.evict(model, "unregistered")
        if self.store.get(model.owner) is not None:
            self.store.release(model.owner)
        if self.words.get(model.owner) is not None:
            self.words.release(model.owner)

    # -- residency ----------------------------------------------------------------------------

    def _model_of(self, region: Region) -> Model | None:
        if region.owner.kind not in ("model", "rest"):
            return None
        return self._core.models.get(ModelName(region.owner.name))

    def _prices(self, *, for_request: bool, mover: Model | None = None) -> Price:
        """What taking a region's place costs; None when its owner must stay.

        1. Arrival words, pinned models, models in use or being copied in: they stay.
        2. An idle model: what the policy says. One with waiting requests goes for a request
           that ranks before them, never for a guess or a job (SCHEDULING 3.5).
        3. A range being zeroed, an abandoned copy, the slice of a job that leaves: soon free.
        4. A job's slice: only for a request, and only when nothing else will do.
        5. The prefix of the model a place is sought for: it would come along for nothing.
        """
        core = self._core
        waiting = Counter(request.model for request in core.queue.values())
        known: dict[Owner, Cost | None] = {}

        def price(region: Region) -> Cost | None:
            if mover is not None and region.owner == mover.owner:
                return FREE  # 5.
            if region.owner not in known:
                known[region.owner] = self._price(region, waiting, for_request=for_request)
            return known[region.owner]

        return price

    def _price(
        self, region: Region, waiting: Counter[ModelName], *, for_request: bool
    ) -> Cost | None:
        core = self._core
        if region.owner == WORDS:
            return None  # 1.
        if region.owner.kind == "scrub":
            return SOON_FREE  # 3.
        if region.owner.kind == "slice":
            job = core.jobs[JobName(region.owner.name)]
            if job.slot is None or job.state.state not in COMPUTING:
                return JOB_LEAVES  # 3.
            return (float(region.size_bytes), 0.0, 0.0, 0.0) if for_request else None  # 4.
        model = self._model_of(region)
        assert model is not None, region
        if model.residency.state is Residency.ABANDONED:
            return SOON_FREE  # 3.
        if model.users or model.residency.state not in (Residency.RESIDENT, Residency.PARTIAL):
            return None  # 1.
        if waiting[model.name] and not for_request:
            return None  # 2.
        is_prefix = model.kept_groups > 0 and region.owner == model.owner
        resident = Resident(
            model=model.name,
            size_bytes=region.size_bytes,
            priority=model.priority,
            last_used_at_ms=model.last_used_at_ms,
            use_count=model.use_count,
            waiting_count=waiting[model.name],
        )
        cost = core.policy.eviction_cost(resident, core.now_ms)
        return (0.0, 0.0, 0.0, cost * (PREFIX_WEIGHT if is_prefix else 1.0))

    def find_place(self, model: Model, *, for_request: bool) -> Window | None:
        """Its home when nothing is cheaper, else the cheapest window anywhere.

        A model returns to its home offset so that cached parameter views (and CUDA graphs) stay
        valid. It gets a new home rather than evict somebody while there is room elsewhere:
        models whose homes overlap would throw each other out for ever.
        """
        assert model.manifest is not None
        size = max(model.manifest.total_bytes, 1)
        price = self._prices(for_request=for_request, mover=model)
        best = self.arena.cheapest_window(size, price)
        if model.residency.state is Residency.PARTIAL:
            head = self.arena.get(model.owner)
            assert head is not None
            rest = self.arena.window_at(head.end_bytes, size - head.size_bytes, price)
            if rest is not None and (best is None or rest.cost <= best.cost):
                return Rest(rest.offset_bytes, rest.victims, rest.cost)
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
            if victim.owner.kind in ("slice", "scrub") or self._is_abandoned(victim)
        ]

    def _is_abandoned(self, region: Region) -> bool:
        model = self._model_of(region)
        return model is not None and model.residency.state is Residency.ABANDONED

    def can_ever_hold(self, size_bytes: int) -> bool:
        """Whether it fits once everything that is not pinned has left."""
        return aligned(size_bytes, REGION_ALIGN_BYTES) <= self.largest_for_all_bytes

    @property
    def largest_for_all_bytes(self) -> int:
        """The longest range between what never leaves: arrival words and pinned models."""
        cursor = largest = 0
        for region in self.arena:
            model = self._model_of(region)
            is_pinned = model is not None and model.residency.state is Residency.PINNED
            if region.owner == WORDS or is_pinned:
                largest = max(largest, region.offset_bytes - cursor)
                cursor = region.end_bytes
        return max(largest, self.arena.capacity_bytes - cursor)

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
        self._clear(window, cause)
        size = aligned(max(model.manifest.total_bytes, 1), REGION_ALIGN_BYTES)
        if isinstance(window, Rest):
            head = self.arena.get(model.owner)
            assert head is not None
            self._lease(model.rest, size - head.size_bytes, window.offset_bytes)
            model.kept_bytes = self._prefix_bytes(model, model.kept_groups)
            return model.kept_groups  # 1.
        model.home_bytes, model.kept_bytes = window.offset_bytes, 0
        model.kept_groups = model.prefix_groups
        prefix = aligned(self._prefix_bytes(model, model.kept_groups), REGION_ALIGN_BYTES)
        if not 0 < prefix < size:
            model.kept_groups = prefix = 0
        self._lease(model.owner, prefix or size, window.offset_bytes)
        if prefix:
            self._lease(model.rest, size - prefix, window.offset_bytes + prefix)
        return 0  # 2.

    def _lease(self, owner: Owner, size_bytes: int, offset_bytes: int) -> None:
        region = self.arena.reserve(owner, size_bytes, at_bytes=offset_bytes)
        assert region is not None, "a window without its victims is free"

    @staticmethod
    def _prefix_bytes(model: Model, group_count: int) -> int:
        assert model.manifest is not None
        return sum(group.size_bytes for group in model.manifest.groups[:group_count])

    def _clear(self, window: Window, cause: str) -> None:
        """Evict the window's models; one of which only the rest is in the way keeps its prefix."""
        owners = {victim.owner for victim in window.victims}
        for victim in window.victims:
            model = self._model_of(victim)
            if model is None or self.arena.get(victim.owner) is None:
                continue  # it went with its other half
            is_rest = victim.owner.kind == "rest"
            if is_rest and model.owner not in owners and self._may_keep(model):
                model.residency.apply(ResidencyEvent.EVICTED_TO_PREFIX, cause)
                self.arena.release(victim.owner)
                self._evicted(model, cause)
            else:
                self.evict(model, cause)

    def _may_keep(self, model: Model) -> bool:
        """Whether its prefix fits into what may be kept of all models."""
        head = self.arena.get(model.owner)
        assert head is not None
        return self.kept_bytes + head.size_bytes <= self._core.settings.prefix_bytes

    @property
    def kept_bytes(self) -> int:
        """Held by prefixes whose rest is gone."""
        regions = (
            self.arena.get(model.owner)
            for model in self._core.models.values()
            if model.residency.state is Residency.PARTIAL
        )
        return sum(region.size_bytes for region in regions if region is not None)

    def held_bytes(self, model: Model) -> int:
        """Of the arena, its prefix and the rest."""
        regions = (self.arena.get(model.owner), self.arena.get(model.rest))
        return sum(region.size_bytes for region in regions if region is not None)

    def evict(self, model: Model, cause: str) -> None:
        """Bookkeeping, never a free: the bytes are simply up for reuse."""
        if model.residency.state is Residency.PINNED:
            model.residency.apply(ResidencyEvent.UNPIN, cause)
        model.residency.apply(ResidencyEvent.EVICTED, cause)
        self._release(model)
        self._evicted(model, cause)

    def _evicted(self, model: Model, cause: str) -> None:
        kept = model.residency.state is Residency.PARTIAL
        self._core.counts["evictions"] += 1
        self._core.publish("switch.evicted", model=model.name, cause=cause, keeps_prefix=kept)

    def _release(self, model: Model) -> None:
        for owner in (model.owner, model.rest):
            if self.arena.get(owner) is not None:
                self.arena.release(owner)

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

    def refused(self, epoch: Epoch, reason: str) -> None:
        """The daemon refused an order, or failed at it: no other answer to it will come."""
        if self.arena.get(Owner("scrub", str(epoch))) is not None:
            self._unscrubbed[epoch] = self._core.now_ms + self._core.settings.restart_backoff_ms
        for model in self._core.models.values():
            if model.is_being_sent and model.residency_epoch == epoch:
                self._broke_off(model, reason)

    def _broke_off(self, model: Model, cause: str) -> None:
        """Groups are missing: who waits for them would wait for ever.

        1. Nobody reads it: the place is free.
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
            self._release_broken(model, "nobody waits for it any more")

    def _release_broken(self, model: Model, cause: str) -> None:
        model.residency.apply(ResidencyEvent.RELEASED, cause)
        self._release(model)

    def cancel_prefetches(self) -> None:
        """A real request needs the link or the place: hints step back (they were a guess)."""
        core = self._core
        wanted = {request.model for request in core.queue.values()}
        for model in core.models.values():
            if model.is_prefetch and not model.users and model.name not in wanted:
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
        self._clear(window, f"job {job}")
        region = self.arena.reserve(Owner("slice", job), size_bytes, at_bytes=window.offset_bytes)
        assert region is not None
        return region

    def release_slice(self, job: JobName) -> None:
        """Its worker is reaped: zero the range, then it is free (another tenant may follow)."""
        if self.arena.get(Owner("slice", job)) is None:
            return
        region = self.arena.release(Owner("slice", job))
        if not self._core.is_daemon_ready:
            return  # the memory went with its owner
        epoch = self._core.next_epoch()
        taken = self.arena.reserve(
            Owner("scrub", str(epoch)), region.size_bytes, region.offset_bytes
        )
        assert taken is not None
        self._scrub(epoch, taken)

    def _scrub(self, epoch: Epoch, region: Region) -> None:
        self._core.tell_daemon(
            Scrub(epoch=epoch, offset_bytes=region.offset_bytes, size_bytes=region.size_bytes)
        )

    def scrub_again(self) -> None:
        """What the daemon failed to zero: nobody may have the range before it is."""
        for epoch, at_ms in list(self._unscrubbed.items()):
            region = self.arena.get(Owner("scrub", str(epoch)))
            if region is None:  # the memory went with its owner
                del self._unscrubbed[epoch]
            elif self._core.now_ms < at_ms:
                self._core.look_again(at_ms)
            else:
                del self._unscrubbed[epoch]
                self._scrub(epoch, region)

    def scrubbed(self, epoch: Epoch) -> None:
        if self.arena.get(Owner("scrub", str(epoch))) is not None:
            self.arena.release(Owner("scrub", str(epoch)))

    def check(self) -> None:
        """Invariants of DESIGN 10 that concern bytes."""
        for ledger in (self.arena, self.words, self.store):
            ledger.check()
        for model in self._core.models.values():
            holds = self.arena.get(model.owner) is not None
            assert holds == (model.residency.state is not Residency.HOST), model.residency.story
            assert model.users == 0 or holds, f"{model.name} is read but not there"
            head, rest = self.arena.get(model.owner), self.arena.get(model.rest)
            is_whole = model.residency.state in WHOLE
            assert (rest is not None) == (is_whole and model.kept_groups > 0), model.residency.story
            if rest is not None:
                assert head is not None
                assert head.end_bytes == rest.offset_bytes, f"{model.name} is torn apart"
            if is_whole and model.manifest is not None:
                assert self.held_bytes(model) >= model.manifest.total_bytes, model.name
        assert self.kept_bytes <= max(0, self._core.settings.prefix_bytes), "too much is kept"
        for region in self.arena:
            if region.owner.kind == "slice":
                name = JobName(region.owner.name)
                assert any(w.job == name for w in self._core.workers.values()), region


def _gib(size_bytes: int) -> str:
    """Bytes for people, as INTERFACE's error texts show them."""
    if size_bytes >= 1 << 30:
        return f"{size_bytes / (1 << 30):.2f} GiB"
    return f"{size_bytes / (1 << 20):.1f} MiB"
