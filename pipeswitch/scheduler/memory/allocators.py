"""Ledgers of memory: owners of ranges in the arena and in the host store. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from ...base.errors import HostStoreFull, OutOfDeviceMemory
from ...base.quotas import left
from ...ipc.messages.base import JobName, ModelName
from ...planning.streaming import StagingLayout, land, least_window
from ...programs.interface.groups import last_groups
from ...programs.interface.layout import REGION_ALIGN_BYTES, TENSOR_ALIGN_BYTES, Manifest, aligned
from ..policies import Resident, View
from ..state.core import Core
from ..state.device_state import FENCE_BYTES, DeviceState
from ..state.records import DeviceModel, Model
from ..state.regions import Cost, Costs, Extent, Owner, Region, RegionAllocator
from ..state.states import ModelState, Residency, TaskState, VersionState
from ..state.variants import Layout, Lent, Ranges, difference, image_of, layout_of, with_digests

FENCES = Owner("fences")

# Cost of a place: (bytes of running jobs, number of leaving jobs, number of ranges that are soon
# free, the policy's cost of models). Costs are compared as tuples: evicting idle models is better
# than waiting, and waiting for a job that already leaves is better than evicting another job.
FREE: Cost = (0.0, 0.0, 0.0, 0.0)
SOON_FREE: Cost = (0.0, 0.0, 1.0, 0.0)
JOB_LEAVES: Cost = (0.0, 1.0, 0.0, 0.0)
MAX_COMPARED = 8  # number of places with which a newcomer's tensors are compared
KEPT_WEIGHT = 4.0  # weight of the groups that a streaming model keeps: each pass reads them
HOME_WEIGHT = 0.5  # weight of a variant at a model's home, where its views and graphs are valid
MAX_SHARE = 0.95  # of a variant's bytes that differ; above, the policy alone chooses
WHOLE = (Residency.TRANSMITTING, Residency.ABANDONED, Residency.RESIDENT, Residency.PINNED)
STAYS = (  # states of a job whose slice stays unless it is ordered to leave
    TaskState.TRANSMITTING,
    TaskState.RUNNING,
    TaskState.STOPPING,
    TaskState.SUSPENDED,
    TaskState.SWAPPING_IN,
)


class RingPlace(Extent):
    """Place for the ring of a model that streams, right before the groups that it keeps."""


@dataclass(frozen=True)
class Streamed(Extent):
    """Place for a model that is larger than the arena, with the places of its groups."""

    staging: StagingLayout


@dataclass(frozen=True)
class VariantPlace(Extent):
    """Place of an idle variant, with the ranges in which it differs from the model."""

    ranges: Ranges


class ArenaAllocator:
    """Ledgers of one device: its memory, and the fences in it.

    A model that is larger than the arena holds two adjacent regions: first its ring
    (``DeviceModel.rest``), then the groups that it keeps (``DeviceModel.owner``). Between two
    passes it holds only the second region and is PARTIAL.
    """

    def __init__(self, device: DeviceState) -> None:
        self._core = device.core
        self._device = device
        self.regions = RegionAllocator(device.settings.arena_bytes, REGION_ALIGN_BYTES)
        self.fences = RegionAllocator(device.settings.fence_count, 1)
        self._reserve_words()

    def device_lost(self) -> None:
        """Drop all regions: the daemon died, and its memory with it."""
        self.regions.clear()
        self._reserve_words()

    def _reserve_words(self) -> None:
        size_bytes = self._device.settings.fence_count * FENCE_BYTES
        if self.regions.reserve(FENCES, size_bytes, at_bytes=0) is None:
            raise OutOfDeviceMemory(
                f"an arena of {self.regions.capacity_bytes} bytes is too small for fences",
                hint="start with --arena 64MiB or more",
                requested_bytes=size_bytes,
                largest_free_bytes=self.regions.capacity_bytes,
            )

    @property
    def leasable_bytes(self) -> int:
        """Size of the arena without its fences, for models and slices."""
        fences = self.regions.get(FENCES)
        return self.regions.capacity_bytes - (fences.size_bytes if fences is not None else 0)

    def model_of(self, region: Region) -> DeviceModel | None:
        if region.owner.kind not in ("model", "rest"):
            return None
        return self._device.replicas.get(ModelName(region.owner.name))

    def costs(self, *, for_request: bool, mover: DeviceModel | None = None) -> Costs:
        """Return the cost of taking each region's place; None when its owner must stay.

        1. Fences, models that are being copied, pinned models and models in use stay.
        2. The policy sets the cost of an idle model. A model with waiting requests is evicted only
           for a request that ranks before them, never for a prefetch or a job.
        3. A range being zeroed, an abandoned copy and the slice of a leaving job are soon free.
        4. A training job's slice is taken only for a request, and only as the last resort.
        5. Groups of ``mover``, the model to be placed, that are on the device cost nothing.
        """
        view, own = self._device.view, mover.owner if mover is not None else None  # 5.
        return [
            self._price(region, view, for_request=for_request) if region.owner != own else FREE
            for region in self.regions
        ]

    def _price(self, region: Region, view: View, *, for_request: bool) -> Cost | None:
        device = self._device
        kind, name = region.owner
        if kind == "fences":
            return None  # 1.
        if kind == "scrub":
            return SOON_FREE  # 3.
        if kind == "slice":
            job = device.jobs.get(JobName(name))  # None: it was removed
            if job is None or job.slot is None or job.state.state not in STAYS:
                return JOB_LEAVES  # 3.
            return (float(region.size_bytes), 0.0, 0.0, 0.0) if for_request else None  # 4.
        model_name = ModelName(name)
        replica = device.replicas[model_name]
        state = replica.residency.state
        if state is Residency.ABANDONED:
            return SOON_FREE  # 3.
        if replica.users or not (state is Residency.RESIDENT or state is Residency.PARTIAL):
            return None  # 1.
        waiting_count = device.queue.count(model_name)
        if waiting_count and not for_request:
            return None  # 2.
        resident = Resident(
            name,
            region.size_bytes,
            replica.model.priority,
            replica.last_used_at_ms,
            replica.use_count,
            waiting_count,
        )
        cost = self._core.judge.cost(resident, view)
        if replica.resident_groups > 0:
            cost = tuple(KEPT_WEIGHT * part for part in cost)
        return (0.0, 0.0, 0.0, *cost)

    def find_extent(self, replica: DeviceModel, *, for_request: bool) -> Extent | None:
        """Return the model's last place (its home) if no place is cheaper, else the cheapest place.

        At its home offset, cached parameter views (and CUDA graphs) stay valid. If there is room
        elsewhere, the model gets a new home and evicts no other model. Otherwise models whose homes
        overlap would evict each other for ever.

        A pinned model gets the highest possible place, so that the rest of the arena is one piece.
        A pinned model at a lower place moves if a request, a job or another pinned model would find
        no place otherwise.
        """
        costs = self.costs(for_request=for_request, mover=replica)
        if replica.staging is not None:
            return self._place_to_stream(replica, costs)
        assert replica.manifest is not None
        size, last = max(replica.manifest.total_bytes, 1), None
        if replica.model.want_pinned:
            last = self.regions.last_window(size, _without_jobs(costs))
        best = last or self.regions.cheapest_window(size, costs)
        if best is None:
            may_move = for_request or replica.model.want_pinned
            return self.window_after_packing(size, costs) if may_move else None
        if last is None and replica.preferred_offset_bytes >= 0:
            home = self.regions.window_at(replica.preferred_offset_bytes, size, costs)
            if home is not None and home.cost <= best.cost:
                best = home
        is_tried = self._device.trial.model == replica.name  # then its whole copy is timed
        if replica.family is not None and last is None and not is_tried:
            return self._in_place(replica, best, costs)
        return best

    def _in_place(self, replica: DeviceModel, best: Extent, costs: Costs) -> Extent:
        """Return an idle variant's place if the model costs less there.

        A variant costs the policy's price for the part of it that would have to be copied back,
        less at the model's home, and nothing if the model replaced that version: then the old one's
        tasks are awaited, if no request waits for it.
        """
        family, price, model = replica.family, (best.cost, 1.0), replica.model
        is_current = model.serving.state is VersionState.CURRENT
        for region, cost in zip(self.regions, costs, strict=True):
            other = self.model_of(region)
            if family is None or other is None or other.name not in family.members:
                continue
            if is_current and model.base == other.model.base:
                cost = () if cost or not self._device.queue.count(other.name) else None
            share = family.share(other.name, replica.name)
            is_there = other.residency.state is Residency.RESIDENT
            if cost is not None and is_there and share <= MAX_SHARE:
                is_home = region.offset_bytes == replica.preferred_offset_bytes
                cost = tuple([share * part * (HOME_WEIGHT if is_home else 1.0) for part in cost])
                if (cost, share) < price:
                    ranges, price = family.difference(replica.name, other.name), (cost, share)
                    best = VariantPlace(region.offset_bytes, (region,), cost, ranges)
        return best

    def window_after_packing(self, size_bytes: int, costs: Costs) -> Extent | None:
        """Return a window that will exist when pinned models have moved to the end of the arena.

        Its victims are the regions in the window and the pinned models that move; ``bring_pinned``
        copies these models again, to the places that were chosen here.

        1. If no pinned model can move (there is none, or tasks read them), return None.
        2. If a range will soon be free, that may be enough: the caller waits for it.
        3. First, only idle models leave for the pinned ones. If that is not enough, slices leave,
           too, where ``costs`` allows it.
        """
        device = self._device
        pinned = [
            replica
            for name in self._core.pins
            if name in device.pinned and not (replica := device.replicas[name]).users
        ]
        if not pinned:
            return None  # 1.
        for region, cost in zip(self.regions, costs, strict=True):
            if cost is not None and any(cost[1:3]):
                return Extent(region.offset_bytes, (region,), cost)  # 2.
        packed = self._packed(size_bytes, pinned, costs, are_jobs_moved=False)
        return packed or self._packed(size_bytes, pinned, costs, are_jobs_moved=True)  # 3.

    def _packed(
        self, size_bytes: int, pinned: list[DeviceModel], costs: Costs, *, are_jobs_moved: bool
    ) -> Extent | None:
        prices = {region.owner: cost for region, cost in zip(self.regions, costs, strict=True)}
        lifted = {replica.owner for replica in pinned}
        plan = RegionAllocator(self.regions.capacity_bytes, REGION_ALIGN_BYTES)
        leave = set[Region]()
        for region in self.regions:
            if region.owner not in lifted:
                plan.reserve(region.owner, region.size_bytes, region.offset_bytes)
        for replica in pinned:
            price: Costs = [prices[region.owner] for region in plan]
            price = price if are_jobs_moved else _without_jobs(price)
            place = plan.last_window(replica.region_bytes, price)
            if place is None:
                return None
            for victim in place.victims:
                plan.release(victim.owner)
                if victim.owner.kind == "slice":
                    leave.add(victim)
            plan.reserve(replica.owner, replica.region_bytes, place.offset_bytes)
            own = self.regions.get(replica.owner)
            if place.offset_bytes != replica.preferred_offset_bytes and own is not None:
                leave.add(own)
        window = plan.cheapest_window(size_bytes, [prices[region.owner] for region in plan])
        if window is None:
            return None
        leave.update(self.regions.overlapping(window.offset_bytes, max(1, size_bytes)))
        return Extent(window.offset_bytes, tuple(sorted(leave)), window.cost)

    def _place_to_stream(self, replica: DeviceModel, costs: Costs) -> Extent | None:
        """Return a window for a model that is larger than the arena.

        1. Its last place, if its kept groups are there and the ring's place is free.
        2. The longest hole; half of the arena if that is more and only idle models must leave.
        3. The smallest usable window, even if jobs must leave.
        """
        assert replica.staging is not None
        regions, least = self.regions, replica.min_bytes
        size, offset = regions.largest_hole(replica.owner)
        head = regions.get(replica.owner)
        if head is not None and size < 2 * replica.region_bytes:
            rest_bytes = replica.region_bytes - head.size_bytes
            rest = regions.window_at(replica.preferred_offset_bytes, rest_bytes, costs)
            if rest is not None and not rest.victims:
                return RingPlace(rest.offset_bytes, (), FREE)  # 1.
        window: Extent | None = Extent(offset, (), FREE)
        due = max(least, self.leasable_bytes // 2)
        if size < due:
            half = regions.cheapest_window(due, costs)
            if half is not None and not any(half.cost[:3]):
                window, size = half, due  # 2.
        if size < least:
            window, size = regions.cheapest_window(least, costs), least  # 3.
            window = window or self.window_after_packing(least, costs)
        staging = self.staging(replica.built, size)
        if window is None or staging is None:
            return None
        return Streamed(window.offset_bytes, window.victims, window.cost, staging)

    def staging(self, manifest: Manifest, window_bytes: int) -> StagingLayout | None:
        """Return the places of a model's groups in a window; None if they do not fit."""
        sizes = [group.size_bytes for group in manifest.groups]
        return land(sizes, last_groups(manifest), window_bytes, REGION_ALIGN_BYTES)

    def min_bytes(self, manifest: Manifest) -> int:
        """Return the smallest window in which a model can stream; 0: it fits, or cannot stream."""
        is_whole = aligned(manifest.total_bytes, REGION_ALIGN_BYTES) <= self.leasable_bytes
        if is_whole or manifest.mode == "module":
            return 0
        sizes = [group.size_bytes for group in manifest.groups]
        max_bytes = self.leasable_bytes
        return least_window(sizes, last_groups(manifest), max_bytes, REGION_ALIGN_BYTES)

    def obstacles(self, window: Extent) -> list[Region]:
        """Return the victims that must stay for now: slices, abandoned copies, models in use."""
        return [
            victim
            for victim in window.victims
            if victim.owner.kind in ("slice", "scrub") or self._is_in_use(victim)
        ]

    def _is_in_use(self, region: Region) -> bool:
        replica = self.model_of(region)
        is_left = replica and replica.residency.state is Residency.ABANDONED
        return bool(is_left or (replica and replica.users))

    def check_fits(self, model: Model, *, is_pinned: bool) -> None:
        """Check that the model can ever run: it fits, or its groups can stream through the arena.

        Raises:
            OutOfDeviceMemory: it can never run, or it must be pinned and cannot be.
        """
        size, largest = stored_bytes(model), self.leasable_bytes
        why = ""
        if aligned(size, REGION_ALIGN_BYTES) <= largest:
            return
        if model.built.mode == "module":
            why = "a module may read any weight at any time, so it cannot be streamed"
        elif is_pinned:
            why = "a streamed model cannot be pinned"
        elif (least := self.min_bytes(model.built)) > largest:
            group = max(group.size_bytes for group in model.built.groups)
            why = (
                f"streaming needs {gib(least)}: two groups (the largest has {gib(group)}) and the "
                "weights that are read again"
            )
        if why:
            raise OutOfDeviceMemory(
                f'"{model.name}" needs {gib(size)}, the arena has {gib(largest)}; {why}',
                hint=f"start with --arena {aligned(2 * size, 1 << 30) >> 30}GiB",
                requested_bytes=size,
                largest_free_bytes=largest,
            )

    def can_ever_hold(self, size_bytes: int) -> bool:
        """Return True if the size would fit if only the pinned models were on the device."""
        return aligned(size_bytes, REGION_ALIGN_BYTES) <= self.largest_for_all_bytes

    def may_take(self, replica: DeviceModel, size_bytes: int) -> bool:
        """Return True if the model is on the device, or ``can_ever_hold`` is true for its size."""
        return replica.residency.state in WHOLE or self.can_ever_hold(size_bytes)

    @property
    def largest_for_all_bytes(self) -> int:
        """Size of the arena without the pinned models, which can move into one piece."""
        pinned = (self._device.replicas[name] for name in self._device.pinned)
        return self.leasable_bytes - sum(replica.region_bytes for replica in pinned)

    def lease(self, owner: Owner, size_bytes: int, offset_bytes: int) -> Region:
        """Take a range that is free now."""
        region = self.regions.reserve(owner, size_bytes, at_bytes=offset_bytes)
        assert region is not None, "a window without its victims is free"
        return region

    def held_bytes(self, replica: DeviceModel) -> int:
        """Return the number of arena bytes that the model holds."""
        regions = (self.regions.get(replica.owner), self.regions.get(replica.rest))
        return sum(region.size_bytes for region in regions if region is not None)

    def release(self, replica: DeviceModel) -> None:
        """Free the regions that the model holds."""
        for owner in (replica.owner, replica.rest):
            if self.regions.get(owner) is not None:
                self.regions.release(owner)

    def check(self) -> None:
        self.regions.check()
        self.fences.check()


@dataclass(eq=False)
class Place:
    """Region of the host store that begins with a whole model, and the models with bytes there."""

    manifest: Manifest
    region: Region
    is_restored: bool = False  # that model left before a restart: users load what is missing
    users: dict[ModelName, int] = field(default_factory=dict)  # and how many bytes they share


class HostStoreAllocator:
    """Ledger of the host store, which has each model's bytes once, in the layout of the device.

    Variants, the models of one tenant with one layout, share the bytes that are equal: a newcomer
    takes only what differs from another's ``Place``. That place stays until the last of them
    leaves, and its tenant is charged for it.

    Offloaded activations lie in the memory of the jobs' processes, and images of slices in files of
    their own; both count toward the same limit. An image takes only what is free, and no model and
    no job's commits are refused because of it.
    """

    def __init__(self, core: Core) -> None:
        self.regions = RegionAllocator(core.settings.store_bytes, TENSOR_ALIGN_BYTES)
        self._held_bytes: Counter[str] = Counter()  # tenant -> bytes of its models
        self._places: dict[Layout, list[Place]] = {}  # of variants, by layout
        self._used: dict[ModelName, Place] = {}
        self.offloaded: dict[JobName, int] = {}  # job with a process -> its bytes
        self.images: dict[JobName, int] = {}  # swapped job -> size of its image

    def charge(self, name: JobName, size_bytes: int) -> None:
        """Set the host memory that a job may use for offloading; 0: its process uses none.

        Raises:
            HostStoreFull: that exceeds the free memory; the job keeps its former amount.
        """
        before = self.offloaded.get(name, 0)
        free = self.regions.free_bytes + before
        if size_bytes > free:
            store = aligned(self.regions.capacity_bytes + size_bytes - free, 1 << 20) >> 20
            raise HostStoreFull(
                f'job "{name}" offloads {gib(size_bytes)} of activations; the host store has '
                f"{gib(free)} left",
                hint=f"start with --host-store {store}MiB, unregister a model, or give the job a "
                "larger activation_memory",
                requested_bytes=size_bytes,
                largest_free_bytes=free,
            )
        self.offloaded[name] = size_bytes
        if not size_bytes:
            del self.offloaded[name]
        self.regions.withheld_bytes = sum(self.offloaded.values())

    @property
    def free_for_images_bytes(self) -> int:
        """Memory that neither the store's owners nor other images use."""
        return max(0, self.regions.free_bytes - sum(self.images.values()))

    def take(self, model: Model, lent: Lent = (), *, is_alone: bool = False) -> None:
        """Reserve the model's place; ``is_alone``: it shares no bytes.

        It shares them if at least half are equal, or if it would not fit otherwise. ``lent``, of
        ``lent()`` before a restart: it shares the same bytes, and the first such model also
        reserves their place.

        Raises:
            HostStoreFull: there is no room, or the tenant has used its share of the free bytes.
        """
        size, total_bytes = stored_bytes(model), model.built.total_bytes
        layout = None if is_alone else layout_of(model.tenant, model.built)
        places = self._places.get(layout, []) if layout is not None else []
        near = [(difference(model.built, one.manifest), one) for one in places[-MAX_COMPARED:]]
        ranges, place = min(near, key=lambda pair: _sizes(pair[0]), default=((), None))
        base, base_bytes = model.built, 0
        if is_restored := bool(lent and layout):
            base = with_digests(base, dict(lent))
            ranges = difference(model.built, base)
            place = next((one for one in places if not difference(base, one.manifest)), None)
            base_bytes = aligned(total_bytes, TENSOR_ALIGN_BYTES) if place is None else 0
        own_bytes = max(_sizes(ranges), TENSOR_ALIGN_BYTES)
        fits = size <= self.regions.largest_free_bytes and not self._over_share(model, size)
        if not is_restored and fits and 2 * own_bytes > size:
            place = None
        size = own_bytes if place is not None or is_restored else size
        if refusal := self._over_share(model, size):
            raise refusal
        region = self.regions.reserve(model.owner, size + base_bytes)
        if region is None:
            raise self.full(model)
        model.store_offset_bytes, model.image = region.offset_bytes, ()
        self._held_bytes[model.tenant] += region.size_bytes
        if place is None:
            place = Place(base, region, is_restored)
            if layout is not None:
                self._places.setdefault(layout, []).append(place)
        if is_restored or place.region is not region:
            own = region.offset_bytes + base_bytes
            model.image = image_of(total_bytes, ranges, own, place.region.offset_bytes)
        place.users[model.name] = total_bytes - own_bytes if model.image else 0
        self._used[model.name] = place

    @property
    def shared_bytes(self) -> int:
        """Number of bytes that sharing saves."""
        return sum([place.users[name] for name, place in self._used.items()])

    def fills(self, model: Model) -> bool:
        """Return True if a load of the model also fills a restored place."""
        return self._used[model.name].is_restored

    def lent(self, model: Model) -> Lent:
        """Return how the place with a model's bytes differs from the model."""
        pairs = zip(self._used[model.name].manifest.tensors, model.built.tensors, strict=True)
        return [(at, one.digest) for at, (one, own) in enumerate(pairs) if one.digest != own.digest]

    def sharing(self, model: Model) -> dict[str, Any]:
        """Return the fields of a model's row that say how many bytes it shares, and with whom."""
        if not model.image:
            return {}
        place = self._used[model.name]
        owner, size = place.region.owner, place.users[model.name]
        first = owner.name if owner.kind == "model" else next(iter(place.users))
        other = "" if first == model.name else first
        text = f"{gib(size)} with {other or 'a model that has left'}"
        return {"shared_bytes": size, "shares": text, "shares_with": other}

    def _over_share(self, model: Model, size: int) -> HostStoreFull | None:
        """Return the error if the model exceeds its tenant's share; None for the server's owner."""
        own, free, whole = self._held_bytes[model.tenant], self.regions.free_bytes, self.regions
        share = left(whole.capacity_bytes, whole.capacity_bytes - free, own)
        if not model.tenant or size <= share:
            return None
        return HostStoreFull(
            f'"{model.name}" needs {gib(size)}: models of "{model.tenant}" have {gib(own)} of the '
            f"host store; {gib(share)} more are allowed while {gib(free)} are free",
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

    def remove(self, model: Model) -> None:
        """Release the model's bytes, except those that variants use."""
        place = self._used.pop(model.name, None)
        if place is None:
            return
        del place.users[model.name]
        is_own = place.region.owner == model.owner
        freed = self._release(model.owner, model.tenant)
        if is_own and place.users:
            owner = Owner("shared", str(freed.offset_bytes))
            self.regions.reserve(owner, freed.size_bytes, freed.offset_bytes)
            place.region = freed._replace(owner=owner)
            self._held_bytes[model.tenant] += freed.size_bytes
        elif not place.users and not is_own:
            self._release(place.region.owner, model.tenant)
        is_wrong = model.state.state is not ModelState.LEAVING and not place.is_restored
        if not place.users or (is_own and is_wrong):
            for layout, places in [*self._places.items()]:  # the bytes are gone, or may be wrong
                self._places[layout] = [one for one in places if one is not place]
                if not self._places[layout]:
                    del self._places[layout]

    def _release(self, owner: Owner, tenant: str) -> Region:
        region = self.regions.release(owner)
        self._held_bytes[tenant] -= region.size_bytes
        return region


def _sizes(ranges: Ranges) -> int:
    return sum([aligned(end - start, TENSOR_ALIGN_BYTES) for start, end in ranges])


def _without_jobs(costs: Costs) -> Costs:
    """Return the same costs, but None for all regions except those of idle models."""
    return [None if cost is None or any(cost[:3]) else cost for cost in costs]


def stored_bytes(model: Model) -> int:
    """Return the number of bytes that a built model occupies."""
    assert model.manifest is not None
    return max(model.manifest.total_bytes, TENSOR_ALIGN_BYTES)


def gib(size_bytes: int) -> str:
    """Return a number of bytes as a text in GiB or MiB."""
    if size_bytes >= 1 << 30:
        return f"{size_bytes / (1 << 30):.2f} GiB"
    return f"{size_bytes / (1 << 20):.1f} MiB"
