"""Conversion of the real scheduler to a tuple (freezing), and back in place (thawing; ``frozen``).

The tuple begins with the state that all devices share; the state of each device follows.
"""

# mypy: disable-error-code="no-any-return, attr-defined, arg-type, call-arg"

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from pipeswitch.ipc.messages.run import Run
from pipeswitch.scheduler.scheduler import Scheduler
from pipeswitch.scheduler.server.device import Device
from pipeswitch.scheduler.state import records
from pipeswitch.scheduler.state.core import Wakeups
from pipeswitch.scheduler.state.device_owner import DeviceOwner
from pipeswitch.scheduler.state.device_state import DeviceState
from pipeswitch.scheduler.state.events import JobSpec, Origin
from pipeswitch.scheduler.state.fair_queue import CallerQueue, Charge
from pipeswitch.scheduler.state.predictions import Predictions
from pipeswitch.scheduler.state.queue import Queue
from pipeswitch.scheduler.state.regions import Owner, Region, RegionAllocator
from pipeswitch.scheduler.state.states import OwnerState, Residency

from .frozen import Add, Codec, Next, Still

SHOWN_OF_JOB = (
    "progress.step",
    "progress.epoch_index",
    "progress.suspensions",
    "progress.evictions",
    "progress.swaps",
    "progress.restarts",
    "progress.beside",
    "progress.reported_op_id",
    "progress.steps_recomputed",
    "progress.last_log",
    "progress.steps_per_s",
    "progress.error",
    "progress.why",
    "progress.missed_at",  # has an effect only after a hundred stops, which no scope has
    "memory.blocked_at_ms",
    "memory.beside_blocked",  # has an effect only after five steps, which no scope has
    "timing.last_ran_at_ms",
    "timing.parked_at_ms",
    "timing.preempted_ms",
    "timing.reported_trained_ms",
    # The default training policy does not read these.
    "progress.steps_left",
    "timing.trained_ms",
    "timing.counted_from_ms",
    "created_op_id",  # distinguishes jobs of one name, but here each name has only one job
)
ORDERED_OF_JOB = ("place", "op_id", "memory.persist_id", "memory.copy_id", "swap.swap_id")
SHOWN_OF_REPLICA = (
    "transfer.started_at_ms",
    "transfer.ended_at_ms",
    "transfer.report",  # only trials of layer groups read it; the model has no trials
)

MODEL = Codec(records.Model, drop=("reason", "last_batch"))
REPLICA = Codec(
    records.DeviceModel,
    drop=("model", *SHOWN_OF_REPLICA),
    parts=(records.Grouping, records.Transfer),
)
REQUEST = Codec(
    records.Request,
    drop=("batching.number",),  # see ``_places``
    parts=(records.BatchingFacts, records.RequestForecast, records.Steps),
)
JOB = Codec(
    records.Job,
    drop=SHOWN_OF_JOB,
    ordered=ORDERED_OF_JOB,
    parts=(
        JobSpec,
        records.JobProgress,
        records.JobMemory,
        records.JobTiming,
        records.JobSwap,
    ),
)
WORKER = Codec(records.Worker, drop=("incarnation",))
SHOWN_OF_TASK = ("queued_until_ms", "charge")  # only times and the callers' accounts read them
ACTIVATION = Codec(records.RunningTask, drop=SHOWN_OF_TASK)

OF_CORE = ("is_stopped", "drain_at_ms", "now_ms", "counts", "last_epoch", "wakeups", "pins")
OF_STATE = (
    "replicas",
    "requests",
    "queue",
    "awaiting_model",
    "between",
    "jobs",
    "workers",
    "owner",
    "predictions",  # constant (see ``Known``)
    "accounts",
    "served",
    "spent_us",  # like ``served``, it is only shown
    "pinned",
    "sending",  # like ``pinned``, it follows from the replicas
)
OF_FLEET = ("is_daemon_alive", "_daemon_deaths", "_daemon_respawn_at_ms")


STRIDE = 16  # difference of the numbers of two waiting requests: dispatched ones lie between


class Known(Predictions):
    """Constant predictions of run times, which batching needs to delay requests.

    No run changes them, so a request's placement depends only on the devices' current tasks.
    """

    def sent(self, model: str, took_ms: float, now_ms: float) -> None:
        pass

    def computed(self, model: str, batch: int, took_ms: float, now_ms: float) -> None:
        pass

    def at_most_ms(self, model: str, batch: int) -> float:
        return 1.0


class Equal(CallerQueue):
    """Fair queue in which all runs cost the same. With one caller it has no state to freeze."""

    def __init__(self, is_shared: bool) -> None:
        super().__init__({}, max_wait_ms=1.0)
        self.is_shared = is_shared

    def reconcile_cost(
        self, charge: Charge, took_ms: float, now_ms: float, steps: int = 1
    ) -> float:
        return super().reconcile_cost(charge, charge.ms, now_ms, steps)

    def refund(self, charge: Charge, now_ms: float) -> None:
        super().reconcile_cost(charge, 0.0, now_ms)

    def died(self, charge: Charge, now_ms: float) -> float:
        return -math.inf  # no penalty, because no time passes in which it could end

    def freeze(self, *tasks: records.RunningTask | None) -> Any:
        charges = [task.charge if task is not None else None for task in tasks]
        return self.is_shared and (
            tuple([(one.caller, tuple(one.tags.items()), one.running) for one in self]),
            tuple(self._clock.items()),
            tuple(
                [
                    c and (*c[:2], tuple([(a.caller, p) for a, p in c.parts.items()]), c.clock)
                    for c in charges
                ]
            ),
        )

    def thaw(self, frozen: Any, *tasks: records.RunningTask | None) -> None:
        """Restore the accounts of callers. Restore the queue first: it defines who waits."""
        accounts, clock, charges = frozen or ((), (), ())
        for caller, tags, running in accounts:
            account = self.of(caller)
            account.tags.update(tags)
            account.running, account.seen_at_ms = running, 0.0  # constant: no time passes
        self._clock.update(clock)
        for task, charge in zip(tasks, charges, strict=False):
            if task is not None and charge is not None:
                parts = {self.of(caller): part for caller, part in charge[2]}
                task.charge = Charge(*charge[:2], parts, charge[3])


class _Records:
    """Codec of one kind of record, with example records for the values of unfrozen fields."""

    def __init__(self, codec: Codec, *examples: tuple[Any, Any]) -> None:
        self._freeze, self._thaw = codec.freeze, codec.thaw
        self._templates: dict[Any, Any] = {}
        self._still: dict[Any, list[tuple[str, Still]]] = {}
        for key, example in examples:
            self._templates[key], self._still[key] = {}, []
            for path, kind in codec.parts.items():
                part = getattr(example, path) if path else example
                names, still = (
                    {field for field in kind.__annotations__ if f"{path}.{field}".lstrip(".") in of}
                    for of in ({*codec.drop, *codec.still}, codec.still)
                )
                self._templates[key][path] = {name: getattr(part, name) for name in names}
                if still:
                    known = set(kind.__annotations__) - still
                    self._still[key].append((path, Still(part, *known)))

    def freeze(self, record: Any, e: Add, key: Any = None) -> Any:
        for path, still in self._still[key]:
            still.check(getattr(record, path) if path else record)
        return self._freeze(record, e)

    def thaw(self, frozen: Any, n: Next, key: Any = None) -> Any:
        return self._thaw(frozen, n, self._templates[key])


def _freeze_regions(regions: RegionAllocator, e: Add) -> Any:
    frozen = []
    for region in regions:
        owner = region.owner
        name: str | None = owner.name
        if owner.kind == "scrub":
            e(-int(owner.name))  # negative, so that different owners get different numbers
            name = None
        frozen.append((region.offset_bytes, region.size_bytes, owner.kind, name))
    return tuple(frozen)


def _thaw_regions(regions: RegionAllocator, frozen: Any, n: Next) -> None:
    regions.clear()
    total = 0
    for offset, size, kind, name in frozen:
        region = Region(offset, size, Owner(kind, str(n()) if name is None else name))
        regions._regions.append(region)
        regions._by_owner[region.owner] = region
        total += size
    regions._reserved_bytes = total


class Brain:
    """Scheduler object that can be set to any state that it has had before."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        machine = scheduler.machine
        known = {
            "core": OF_CORE,
            "state": OF_STATE,
            "worker_pool": OF_FLEET,
            "machine": ("models",),
            "versions": ("models",),
            "admission": ("_models",),
            "store": ("images",),
            "daemon": ("incarnation", "pid", "is_ready", "is_given_up"),
        }
        parts = [*vars(scheduler).items(), ("store", machine.store)]
        parts = [(name, part) for name, part in parts if not name.startswith("_")]
        for device in machine.devices:
            state = device.state
            parts += [*vars(device).items(), ("daemon", state.daemon), ("", state.trial)]
        self._still = [(part, Still(part, *known.get(name, ()))) for name, part in parts]
        self._models = _Records(MODEL, *machine.models.items())
        self._replicas = [_Records(REPLICA, *one.state.replicas.items()) for one in machine.devices]
        self._requests = _Records(
            REQUEST, (None, records.Request(0, "", Run(request_id=""), Origin(arrived_at_ms=0.0)))
        )
        self._jobs = _Records(JOB, (None, records.Job(JobSpec("", "", (), 1))))
        self._workers = _Records(WORKER, (None, records.Worker(0)))
        self._tasks = _Records(ACTIVATION, (None, records.RunningTask(0, 0, (), "", 0.0, False)))

    def freeze(self, e: Add) -> Any:
        """Return the scheduler's state as a tuple; pass its operation ids to ``e``.

        Incarnations of processes are not included: only the caller knows which late messages exist.
        """
        core, machine = self.scheduler.core, self.scheduler.machine
        for part, still in self._still:
            still.check(part)
        models = self._models
        return (
            core.now_ms,
            core.wakeups.all,
            core.is_stopped,
            core.drain_at_ms,
            tuple([models.freeze(model, e, name) for name, model in machine.models.items()]),
            _freeze_regions(machine.store.regions, e),
            tuple(machine.store.images.items()),
            tuple([self._freeze_device(device, e) for device in machine.devices]),
        )

    def _freeze_device(self, device: Device, e: Add) -> Any:
        state, worker_pool = device.state, device.worker_pool
        requests, jobs, replicas = self._requests, self._jobs, self._replicas[state.index]
        workers, tasks, owner = self._workers, self._tasks, state.owner
        promised = sorted(owner.promised.items())
        return (
            tuple([requests.freeze(request, e) for request in state.requests.values()]),
            tuple([request.token for request in state.queue]),
            tuple([jobs.freeze(job, e) for job in state.jobs.values()]),
            tuple([workers.freeze(worker, e) for worker in state.workers.values()]),
            None if owner.running is None else tasks.freeze(owner.running, e),
            None if owner.pending is None else tasks.freeze(owner.pending, e),
            None if owner.yielded is None else tasks.freeze(owner.yielded, e),
            (owner.state._value_, owner.job, tuple([(slot, e(-t)) for slot, t in promised])),
            state.daemon.is_ready,
            state.daemon.is_given_up,
            _freeze_regions(device.arena.regions, e),
            worker_pool.is_daemon_alive,
            worker_pool._daemon_deaths,
            worker_pool._daemon_respawn_at_ms,
            tuple([request.token for request in state.awaiting_model]),
            tuple([replicas.freeze(one, e, name) for name, one in state.replicas.items()]),
            state.accounts.freeze(owner.running, owner.pending, owner.yielded),
            tuple(state.between),
            _places(state),
        )

    def thaw(
        self, frozen: Any, n: Next, last_epoch: int, incarnations: Sequence[Sequence[int]]
    ) -> None:
        """Set the scheduler to a frozen state. ``incarnations`` has a tuple for each device: the
        incarnation of the daemon, then the incarnation of each worker slot."""
        core, machine = self.scheduler.core, self.scheduler.machine
        core.now_ms, due_ms, core.is_stopped, core.drain_at_ms, models, store, images, devices = (
            frozen
        )
        machine.models.clear()
        machine.models.update({t[0]: self._models.thaw(t, n, t[0]) for t in models})
        core.wakeups = Wakeups(due_ms)
        core.last_epoch = last_epoch
        core.counts = Counter()
        core.out = []
        _thaw_regions(machine.store.regions, store, n)
        machine.store.images = dict(images)
        core.pins = {name: None for name, model in machine.models.items() if model.want_pinned}
        for device, one, numbers in zip(machine.devices, devices, incarnations, strict=True):
            self._thaw_device(device, one, n, numbers)
        if not core.is_stopped:
            self.scheduler.check_settled()

    def _thaw_device(
        self, device: Device, frozen: Any, n: Next, incarnations: Sequence[int]
    ) -> None:
        core, state, worker_pool = self.scheduler.core, device.state, device.worker_pool
        (
            requests,
            queue,
            jobs,
            workers,
            running,
            pending,
            yielded,
            holder,
            state.daemon.is_ready,
            state.daemon.is_given_up,
            arena,
            worker_pool.is_daemon_alive,
            worker_pool._daemon_deaths,
            worker_pool._daemon_respawn_at_ms,
            awaiting_model,
            replicas,
            accounts,
            between,
            places,
        ) = frozen
        state.requests = {t[0]: self._requests.thaw(t, n) for t in requests}
        state.accounts = Equal(state.accounts.is_shared)
        state.queue, state.awaiting_model = Queue(core.judge, state.accounts), Queue()
        for caller, *_ in accounts[0] if accounts else ():
            state.accounts.of(caller)  # in their order, which decides between equal tags
        for token in queue:
            state.queue._added += STRIDE - 1
            state.queue.add(state.requests[token])
        state.queue._added += STRIDE
        state.queue.fresh = []  # the dispatcher has looked at all of them
        for index, (token, place) in enumerate(places, start=1):
            state.requests[token].batching.number = STRIDE * place + index
        state.between = {token: state.requests[token] for token in between}
        for token in awaiting_model:
            state.awaiting_model.add(state.requests[token])
        state.jobs = {t[0]: self._jobs.thaw(t, n) for t in jobs}
        state.workers = {t[0]: self._workers.thaw(t, n) for t in workers}
        for worker, incarnation in zip(state.workers.values(), incarnations[1:], strict=True):
            worker.incarnation = incarnation
        state.daemon.incarnation = incarnations[0]
        state.owner = owner = DeviceOwner()
        owner.running = None if running is None else self._tasks.thaw(running, n)
        owner.pending = None if pending is None else self._tasks.thaw(pending, n)
        owner.yielded = None if yielded is None else self._tasks.thaw(yielded, n)
        owner.state, owner.job = OwnerState(holder[0]), holder[1]
        owner.promised = {slot: n() for slot, _ in holder[2]}
        state.accounts.thaw(accounts, owner.running, owner.pending, owner.yielded)
        state.predictions = Known()
        _thaw_regions(device.arena.regions, arena, n)
        state.replicas = {}
        for (name, model), one in zip(self.scheduler.machine.models.items(), replicas, strict=True):
            state.replicas[name] = self._replicas[state.index].thaw(one, n, name)
            state.replicas[name].model = model
        pinned = [n for n, r in state.replicas.items() if r.residency.state is Residency.PINNED]
        state.pinned = dict.fromkeys(pinned)
        state.sending = {n: None for n, r in state.replicas.items() if r.is_being_sent}


def _places(state: DeviceState) -> tuple[tuple[int, int], ...]:
    """Return the dispatched requests that have waited, in their order. Each is followed by the
    number of waiting requests that go before it if it is queued again."""
    numbers = [number for number, _ in state.queue.requests.values()]
    tokens = [token for task in state.owner.tasks for token in task.tokens]
    own = [(state.requests[token].batching.number, token) for token in tokens]
    waited = [(number, token) for number, token in own if number]
    return tuple([(one, sum([n < own for n in numbers])) for own, one in sorted(waited)])


_COMMITTED_STEP = JOB.position("memory.committed_step")


class Sight(NamedTuple):
    """Part of a frozen scheduler that the simulated world may read."""

    now_ms: float
    due_ms: tuple[float, ...]  # instants at which the scheduler asked for a wake-up
    has_upcoming: tuple[bool, ...]  # for each device, True if a task waits for its turn
    promised: dict[str, int]  # job -> newest step that counts as committed; -1: none


def sight(frozen: Any) -> Sight:
    """Return the part of a frozen scheduler that the simulated world may read."""
    now_ms, due_ms, *_, devices = frozen
    jobs = [job for device in devices for job in device[2]]
    promised = {job[0]: job[_COMMITTED_STEP] for job in jobs}
    return Sight(now_ms, due_ms, tuple([device[5] is not None for device in devices]), promised)


__all__ = ["Brain", "Known", "Sight", "sight"]
