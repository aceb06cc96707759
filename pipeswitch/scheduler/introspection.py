"""Rows of ``ps``, ``models``, ``jobs`` and ``stats``. The records are read, never changed."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

import msgspec

from ..base.errors import InvalidInput, ModelNotFound, PipeSwitchError
from ..ipc.messages.base import ModelName
from ..programs.interface.dims import extent_text
from ..programs.interface.groups import plan_in_force
from ..programs.interface.layout import Manifest, ValueSpec
from .memory.allocators import gib
from .memory.plans import plan_row, stream_of
from .models.likes import decoded
from .models.names import Names
from .server.device import Device
from .server.server_state import ServerState
from .state.core import Core, handles
from .state.device_state import DeviceState
from .state.events import Query, Token
from .state.fair_queue import CallerShare
from .state.records import PRIORITY_NAMES, DeviceModel, HelperQueue, Job, Model, Worker
from .state.regions import Owner
from .state.states import ModelState, Residency, TaskState, WorkerState
from .state.versions import Versions, version_name
from .training.jobs import behind, memory_row

ROWS: Final = 64  # rows that are made at once, in about 3 ms
DISPATCH_KINDS = ("cold", "partial", "resident")  # all, a part or none of the model was copied
DEVICE_KINDS = ("infer", "switch", "train")
JOB_ORIGIN: Final = re.compile("job:(.+)@([0-9]+):?(.*)")  # in a manifest, of a job's commit
OWNER = "(owner)"  # the server's owner in ``tenant_s``; tenants' names have no parentheses


def shown_value(spec: ValueSpec) -> list[Any]:
    """Return shape and dtype of an input or output for a row; free dimensions are texts."""
    return [[n if isinstance(n, int) else extent_text(n) for n in spec.shape], spec.dtype]


def came_from(manifest: Manifest, spec: bytes) -> dict[str, Any]:
    """Return the values of a row that say where a version came from: a factory, a job, a file."""
    origin = dict[str, Any]()
    with contextlib.suppress(msgspec.DecodeError, UnicodeError):  # a build refuses it
        origin = decoded(spec)
    file, adapter = origin.get("file"), origin.get("adapter", "").rpartition("/")[2]
    at = datetime.fromtimestamp(origin.get("registered_at_s", 0)).astimezone()
    when = f", {at:%Y-%m-%d %H:%M}" if origin.get("registered_at_s") else ""
    job = JOB_ORIGIN.fullmatch(manifest.extra.get("origin", ""))
    texts = [] if manifest.source == "bundle" or job else [manifest.source]
    texts += [f"job {job[1]}, step {job[2]}" + (job[3] and f", part {job[3]}")] if job else []
    texts += [f"file {file['name']}{when}"] if file else []
    texts += [f"adapter {adapter}{when}"] if adapter else []
    when = at.isoformat(timespec="seconds") if when else ""
    source = "; ".join(texts) or manifest.source
    return {"source": source, "file": file, "registered_at": when or None}


def _staging(replica: DeviceModel) -> dict[str, Any] | None:
    """Return how a model that is larger than the arena is copied in a pass; None for others."""
    staging = replica.staging
    if staging is None:
        return None
    return {
        "plan": list(plan_in_force(replica.built)),
        "waits": list(staging.waits),
        "resident": sorted(staging.resident),
    }


@dataclass(frozen=True)
class Shown:
    """Row of ``ps`` for a model, a job or a process."""

    on: Device
    name: str
    kind: str
    state: str
    worker: int | None = None
    device: int | None = None  # number of bytes on the device
    host: int | None = None  # number of bytes in the host store
    prio: int | None = None
    last_used_at_ms: float = 0.0
    why: str = ""
    pid: int = 0
    owners: tuple[Owner, ...] = ()  # owners of its regions on the device
    manifest: Manifest | None = None

    def row(self, now_ms: float) -> dict[str, Any]:
        """Return one line of ``ps``."""
        regions = [one for owner in self.owners if (one := self.on.arena.regions.get(owner))]
        idle_ms = now_ms - self.last_used_at_ms if self.last_used_at_ms else None
        prio, groups = self.prio, self.manifest.groups if self.manifest else ()
        form = self.manifest.precision if self.manifest else None
        return {
            "name": self.name,
            "kind": self.kind,
            "state": self.state,
            "worker": self.worker,
            "device": self.device,
            "host": self.host,
            "prio": "" if prio is None else PRIORITY_NAMES.get(prio, str(prio)),
            "last_used": None if idle_ms is None else round(idle_ms / 1000.0, 3),
            "why": self.why,
            "pid": self.pid,
            "regions": [[region.offset_bytes, region.size_bytes] for region in regions],
            "group_bytes": [group.size_bytes for group in groups],
            **({"precision": form.name} if form else {}),
            **({"on": self.on.state.label} if self.on.state.label else {}),
        }


class Listings:
    """Listings that are made in pieces, one after each event."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self.unfinished: deque[tuple[Token, str, Iterator[dict[str, Any]], list[Any]]] = deque()

    def begin(self, token: Token, key: str, rows: Iterator[dict[str, Any]]) -> None:
        """Begin a listing, which is ``key`` of the answer's body; make its first piece now."""
        self.unfinished.append((token, key, rows, []))
        if len(self.unfinished) == 1:
            self.go_on()

    def go_on(self) -> None:
        """Make the next piece of the oldest listing, and answer it with its last piece."""
        token, key, rows, done = self.unfinished[0]
        count = len(done)
        done += itertools.islice(rows, ROWS)
        if len(done) < count + ROWS:
            self.unfinished.popleft()
            self._core.answer(token, **{key: done})
        if self.unfinished:
            self._core.wake_at(self._core.now_ms, 0)

    def refuse_all(self, error: PipeSwitchError) -> None:
        """Refuse the clients whose listings are not finished: the server stops."""
        while self.unfinished:
            self._core.refuse(self.unfinished.popleft()[0], error)


class Introspection:
    """Answers to queries, from the scheduler's own state.

    A listing of more than ROWS rows is made in pieces (``Listings``). Then each row is consistent,
    and those of models and jobs that were removed meanwhile are left out.
    """

    def __init__(
        self,
        core: Core,
        machine: ServerState,
        versions: Versions,
        helpers: Mapping[str, HelperQueue],
        names: Names,
    ) -> None:
        self._core = core
        self._names = names
        self._helpers = helpers
        self._machine = machine
        self._versions = versions
        self.born_at_ms = 0.0  # the scheduler's start
        self.listings = Listings(core)

    @handles(Query)
    def on_request(self, event: Query) -> None:
        core = self._core
        match event.what:
            case "models":
                self.listings.begin(event.token, "models", self.models(event.all_versions))
            case "show":
                self._show(event)
            case "ps":
                self.listings.begin(event.token, "rows", self.ps())
            case "jobs":
                self.listings.begin(event.token, "jobs", self.jobs())
            case "plan":
                core.answer(event.token, **self.plan())
            case "stats":
                core.answer(event.token, **self.stats())
            case "trace":  # the controller has the timeline and answers
                raise InvalidInput("trace is not answered here")

    def _show(self, event: Query) -> None:
        core, versions, name = self._core, self._versions, ModelName(event.name)
        model = self._machine.models.get(versions.resolve(name, event.version))
        if model is not None:
            core.answer(event.token, model=self._model(model, versions.all_of(model.base)))
        elif (model := self._names.failed.get(version_name(name, event.version))) is not None:
            core.answer(event.token, model=self._facts(model))
        elif name in self._machine.composites:
            core.answer(event.token, model=self._machine.composites[name].row(name))
        elif versions.served(name) is not None:
            raise versions.missing(name, str(event.version))
        else:
            raise ModelNotFound(f'no model "{name}"', hint="pipeswitch models")

    def models(self, all_versions: bool = False) -> Iterator[dict[str, Any]]:
        """Yield the rows of models (all, or current versions), of failed models and of others."""
        models, versions = self._machine.models, self._versions
        for model in [*models.values()]:
            is_there = models.get(model.name) is model
            if is_there and (all_versions or versions.is_current(model)):
                yield self._model(model, versions.all_of(model.base))
        yield from map(self._facts, [*self._names.failed.values()])
        others = self._machine.composites
        yield from (others[name].row(name) for name in [*others] if name in others)

    def _facts(self, model: Model) -> dict[str, Any]:
        """Return the row of a model without the values of its devices and its program."""
        return {
            "name": model.base,
            "aliases": list(self._versions.aliases.of(model.base)),
            "version": model.version,
            "current": False,
            "share": 0,
            "versions": [model.version],
            "state": model.state.state.value,
            "residency": "",
            "priority": PRIORITY_NAMES.get(model.priority, str(model.priority)),
            "pinned": model.want_pinned,
            "requests": 0,
            "reason": model.reason,
            "tenant": model.tenant,
            "digest": "",
            "source": "",
            "mode": "",
            "mode_reason": "",
            "bytes": 0,
            "groups": 0,
            "inputs": {},
            "outputs": {},
            "dims": {},
            "batch": [1, 1],
            "batching": None,
            "precision": None,
            "is_batch_invariant": None,
        }

    def _model(self, model: Model, versions: Sequence[Model]) -> dict[str, Any]:
        """Return a model's row. ``versions``: all versions of its name."""
        replica = self._machine.shown(model)
        manifest = replica.manifest or model.manifest  # the replica's has the groups in use
        row = self._facts(model) | {
            "current": self._versions.is_current(model),
            "share": self._versions.share(model),
            "versions": sorted(one.version for one in versions),
            "residency": replica.residency.state.value,
            "requests": sum(
                device.state.replicas[model.name].use_count for device in self._machine.devices
            ),
        }
        if manifest is not None:
            row |= {
                "digest": manifest.digest,
                "program": manifest.program,
                **came_from(manifest, self._names.registrations[model.name].spec),
                "mode": manifest.mode,
                "mode_reason": manifest.mode_reason,
                "bytes": manifest.total_bytes,
                "groups": len(manifest.groups),
                "inputs": {v.name: shown_value(v) for v in manifest.inputs},
                "outputs": {v.name: shown_value(v) for v in manifest.outputs},
                "dims": {dim.name: [dim.low, dim.high] for dim in manifest.dims},
                "notes": manifest.extra.get("notes", []),
                "intermediate_bytes": manifest.extra.get("intermediate_bytes", 0),
                "batch": list(manifest.batch),
                "batching": msgspec.to_builtins(manifest.batching),
                "precision": manifest.precision and manifest.precision.row(),
                "is_batch_invariant": _is_batch_invariant(manifest),
            }
            row |= {"embeds": True} if "embedding" in manifest.extra else {}
            row |= self._machine.store.sharing(model)
        if (streams := self._machine.stream_of(model)) is not None:
            row |= {"streams": streams, "notes": [*row["notes"], streams["text"]]}
        served = self._versions.served(model.base)
        if served is not None and served.note:
            row["notes"] = [*row.get("notes", []), served.note]
        if manifest is not None and model.wrapper is not None:
            public = model.wrapper.public(manifest)
            row |= {
                **model.wrapper.row(),
                "model_inputs": row["inputs"],
                "model_outputs": row["outputs"],
                "inputs": {v.name: shown_value(v) for v in public.inputs},
                "outputs": {v.name: shown_value(v) for v in public.outputs},
                "dims": row["dims"] | {dim.name: [dim.low, dim.high] for dim in public.dims},
                **({"batch": [1, 1]} if model.wrapper.before else {}),
            }
        if len(self._machine.devices) > 1:
            row["devices"] = list(model.devices)
            row["on"] = [
                device.state.label
                for device in self._machine.devices
                if device.state.replicas[model.name].is_on_device
            ]
        return row | plan_row(replica)

    def plan(self) -> dict[str, Any]:
        """Return the input of ``pipeswitch plan``: profiles, and the size of the first arena."""
        device = self._machine.devices[0]
        return {
            "arena_bytes": device.arena.leasable_bytes,
            "models": [
                {
                    "name": replica.name,
                    "bytes": replica.model.manifest.total_bytes,
                    "grouping": replica.grouping.source,
                    "grouping_why": replica.grouping.why,
                    "streams": stream_of(device.state, replica),
                    "staging": _staging(replica),
                    **(wrapper.row() if (wrapper := replica.model.wrapper) else {}),
                    "profile": planned and planned.measurements,
                    **self._machine.store.sharing(replica.model),
                }
                for replica in device.state.replicas.values()
                if replica.model.manifest is not None
                for planned in [replica.grouping.planned]
            ],
        }

    def jobs(self) -> Iterator[dict[str, Any]]:
        jobs = self._machine.jobs
        return (jobs.row(job) for job in [*jobs] if jobs.get(job.spec.name))

    def ps(self) -> Iterator[dict[str, Any]]:
        """Yield rows of models, jobs, workers, tenants, daemons and helper processes."""
        for device in self._machine.devices:
            state, arena = device.state, device.arena
            for name, replica in [*state.replicas.items()]:
                if state.replicas.get(name) is replica:
                    yield self._ps_model(device, replica)
            for job in [*state.jobs.values()]:
                if state.jobs.get(job.spec.name) is job:
                    yield self._ps_job(device, job)
            yield from (self._ps_worker(device, worker) for worker in [*state.workers.values()])
            yield from (self._ps_tenant(device, one) for one in [*state.accounts] if one.caller)
            yield Shown(
                device,
                "memory-daemon",
                "daemon",
                "active" if state.daemon.is_ready else "starting",
                pid=state.daemon.pid,
                device=arena.leasable_bytes - arena.regions.free_bytes,
                why="given up, because it died too often" if state.daemon.is_given_up else "",
            ).row(self._core.now_ms)
        device = self._machine.devices[0]
        for kind, helper in self._helpers.items():
            for process, helper_state, why, pid in helper.rows():
                row = Shown(device, process, kind, helper_state, why=why, pid=pid).row(
                    self._core.now_ms
                )
                yield {key: value for key, value in row.items() if key != "on"}  # it uses no device

    def _ps_model(self, on: Device, replica: DeviceModel) -> dict[str, Any]:
        device = on.state
        slot = next((task.slot for task in device.owner.tasks if task.model == replica.name), None)
        stored = self._machine.store.regions.get(replica.owner)
        streams = {"streamed_bytes": replica.sent_bytes} if replica.staging is not None else {}
        return streams | Shown(
            on,
            replica.name,
            "model",
            self._model_state(device, replica, slot is not None),
            worker=slot,
            device=on.arena.held_bytes(replica),
            host=stored.size_bytes if stored else 0,
            prio=replica.model.priority,
            last_used_at_ms=replica.last_used_at_ms,
            why=self._model_why(device, replica),
            pid=device.workers[slot].pid if slot is not None else 0,
            owners=(replica.owner, replica.rest),
            manifest=replica.manifest,
        ).row(self._core.now_ms)

    @staticmethod
    def _model_state(device: DeviceState, replica: DeviceModel, is_active: bool) -> str:
        if replica.model.state.state in (ModelState.QUARANTINED, ModelState.FAILED):
            return "failed"
        if replica.model.state.state not in (ModelState.READY, ModelState.LEAVING):
            return str(replica.model.state.state.value)
        running = device.owner.running
        if is_active and running is not None and running.model == replica.name:
            return "active"
        if replica.is_being_sent:
            return "transmitting"
        if replica.residency.state in (Residency.RESIDENT, Residency.PINNED):
            return "resident"
        return "host"

    def _model_why(self, device: DeviceState, replica: DeviceModel) -> str:
        if replica.model.reason:
            return replica.model.reason
        if replica.model.state.state is ModelState.LEAVING:
            return "being unregistered"
        waiting = device.queue.count(replica.name) + device.awaiting_model.count(replica.name)
        if waiting:
            return f"{waiting} waiting"
        raw = sum(helper.count(replica.name) for helper in self._helpers.values())
        if raw:
            return f"{raw} {TaskState.PREPROCESSING.value}"
        if replica.staging is not None:
            return f"larger than the arena: {gib(replica.sent_bytes)} are copied for each pass"
        return "pinned" if replica.model.want_pinned else ""

    def _ps_job(self, on: Device, job: Job) -> dict[str, Any]:
        worker = on.state.workers.get(job.slot) if job.slot is not None else None
        region = on.arena.regions.get(job.slice)
        words: dict[TaskState, str] = {TaskState.RUNNING: "active", TaskState.STOPPING: "active"}
        host_bytes = 2 * job.memory.commit_slot_bytes
        store = self._machine.store
        host_bytes += store.offloaded.get(job.spec.name, 0) + store.images.get(job.spec.name, 0)
        return memory_row(job) | Shown(
            on,
            job.spec.name,
            "job",
            words.get(job.state.state, job.state.state.value),
            worker=job.slot,
            device=region.size_bytes if region else 0,
            host=host_bytes,
            prio=job.spec.priority,
            last_used_at_ms=job.timing.last_ran_at_ms,
            why=job.progress.error or job.progress.why or behind(job, on.state),
            pid=worker.pid if worker is not None else 0,
            owners=(job.slice,),
        ).row(self._core.now_ms)

    def _ps_worker(self, on: Device, worker: Worker) -> dict[str, Any]:
        device = on.state
        task = worker.job or next(
            (task.model for task in device.owner.tasks if task.slot == worker.slot), ""
        )
        why = worker.kill_reason or (f"preparing {worker.preparing}" if worker.preparing else task)
        return Shown(
            on,
            f"worker-{worker.slot}",
            "worker",
            worker.state.state.value,
            worker=worker.slot,
            why=why if worker.state.state is not WorkerState.STANDBY or worker.preparing else "",
            pid=worker.pid,
        ).row(self._core.now_ms)

    def _ps_tenant(self, on: Device, account: CallerShare) -> dict[str, Any]:
        waiting = account.waiting.total()
        state = "active" if account.running else "waiting" if waiting else "idle"
        why = f"had the device for {account.used_ms / 1000:.1f} s, {waiting} waiting"
        return Shown(on, account.caller, "tenant", state, why=why).row(self._core.now_ms)

    def stats(self) -> dict[str, Any]:
        """Return counters and sizes; the frontend adds its own, about requests."""
        core, devices = self._core, self._machine.devices
        store = self._machine.store.regions
        counts = core.counts
        rows = [self._of_device(device) for device in devices]
        used_s = defaultdict[str, float](float)
        for device in devices:
            for caller, used_ms in device.state.accounts.used_ms().items():
                used_s[caller or OWNER] += used_ms / 1000.0
        return {
            "queued": sum(row["queued"] for row in rows),
            **{key: n for one in self._helpers.values() for key, n in one.stats().items()},
            "switches": counts["switches"],
            "dispatches": {kind: counts[f"{kind}_dispatches"] for kind in DISPATCH_KINDS},
            "device_s": {
                kind: round(sum(row["device_s"][kind] for row in rows), 6) for kind in DEVICE_KINDS
            },
            "tenant_s": {name: round(used, 6) for name, used in used_s.items()},
            "up_s": round((core.now_ms - self.born_at_ms) / 1000.0, 6),
            "preemptions": counts["preemptions"],
            "evictions": counts["evictions"],
            "job_swaps": counts["job_swaps"],
            "job_evictions": counts["job_evictions"],
            "inferences": counts["inferences"],
            "runs": counts["runs"],
            "transmissions": counts["transmissions"],
            "transmitted_bytes": counts["transmitted_bytes"],
            "commits": counts["commits"],
            "worker_restarts": counts["worker_restarts"],
            "daemon_restarts": counts["daemon_restarts"],
            "stale_messages": counts["stale_messages"],
            "arena_capacity_bytes": sum(row["arena_capacity_bytes"] for row in rows),
            "arena_free_bytes": sum(row["arena_free_bytes"] for row in rows),
            "arena_leases": sum(row["arena_leases"] for row in rows),
            "store_capacity_bytes": store.capacity_bytes,
            "store_free_bytes": store.free_bytes,
            "store_offloaded_bytes": store.withheld_bytes,
            "store_shared_bytes": self._machine.store.shared_bytes,
            "models": len(self._machine.models),
            "jobs": sum(row["jobs"] for row in rows),
            "workers": sum(row["workers"] for row in rows),
            "device": ",".join(device.state.settings.device for device in devices),
            "policy": core.judge.name,
            "policy_failure": core.judge.failure,
            "draining": core.is_draining,
            "ready": not core.is_draining and any(row["ready"] for row in rows),
            **({"devices": rows} if len(rows) > 1 else {}),
        }

    def _of_device(self, device: Device) -> dict[str, Any]:
        """Return the device's part of ``stats``."""
        state, arena = device.state, device.arena
        return {
            "device": state.settings.device,
            "queued": len(state.queue) + len(state.awaiting_model),
            "inferences": state.served,
            "device_s": self._device_s(state),
            "arena_capacity_bytes": arena.leasable_bytes,
            "arena_free_bytes": arena.regions.free_bytes,
            "arena_leases": self._leases(device),
            "jobs": len(state.jobs),
            "workers": len(state.workers),
            "ready": state.is_ready,
        }

    def _device_s(self, device: DeviceState) -> dict[str, float]:
        """Return device seconds for each kind of task, including the unfinished training cycle."""
        spent_us = {kind: device.spent_us[kind] for kind in DEVICE_KINDS}
        if device.owner.job is not None:
            began_at_ms = device.jobs[device.owner.job].timing.cycle_began_at_ms
            spent_us["train"] += round((self._core.now_ms - began_at_ms) * 1000.0)
        return {kind: us / 1e6 for kind, us in spent_us.items()}

    @staticmethod
    def _leases(device: Device) -> int:
        """Return the number of regions in use: models with tasks or copies, and training slices."""
        replicas = device.state.replicas.values()
        in_use = sum(replica.users > 0 or replica.is_being_sent for replica in replicas)
        kinds = ("slice", "scrub")
        slices = sum(region.owner.kind in kinds for region in device.arena.regions)
        return in_use + slices


def _is_batch_invariant(manifest: Manifest) -> bool | None:
    """Return True if an output row has the same bits in a batch as alone; None: not measured."""
    if manifest.precision is not None:
        return manifest.precision.is_batch_invariant
    return None if manifest.batching is None else manifest.batching.is_exact
