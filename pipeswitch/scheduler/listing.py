"""Rows for people: ``ps``, ``models``, ``jobs``, ``stats``. Reads the records, changes nothing."""

from __future__ import annotations

from typing import Any

import msgspec

from ..programs.dims import extent_text
from ..programs.layout import Manifest, ValueSpec
from .core import Core
from .machine import Machine
from .records import Job, Model, Replica, Worker
from .regions import Owner
from .states import ModelState, Residency, TaskState, WorkerState
from .versions import Versions

DISPATCH_KINDS = ("cold", "prefix", "resident")  # by what of the model had to be sent
DEVICE_KINDS = ("infer", "switch", "train")
PRIORITY_NAMES = {0: "high", 1: "normal", 2: "low"}


def _shown(spec: ValueSpec) -> list[Any]:
    """An input or output as rows tell it: numbers, and texts for what requests choose."""
    return [[n if isinstance(n, int) else extent_text(n) for n in spec.shape], spec.dtype]


class Listing:
    """Answers queries from the scheduler's own state, so every listing is consistent."""

    def __init__(self, core: Core, machine: Machine, versions: Versions) -> None:
        device = machine.device
        self._core = core
        self._machine = machine
        self._versions = versions
        self._device = device.state
        self._arena = device.arena
        self._jobs = device.jobs
        self._plans = device.plans
        self.born_at_ms = 0.0  # the scheduler's start

    def models(self, all_versions: bool = False) -> list[dict[str, Any]]:
        """Each name's current version, or all there are."""
        models = self._machine.models.values()
        return [self.model(m) for m in models if all_versions or self._versions.is_current(m)]

    def model(self, model: Model) -> dict[str, Any]:
        """One model in full."""
        replica = self._device.replicas[model.name]
        manifest = replica.manifest or model.manifest  # in its groups, once it was built
        row: dict[str, Any] = {
            "name": model.base,
            "version": model.version,
            "current": self._versions.is_current(model),
            "versions": [one.version for one in self._versions.all_of(model.base)],
            "state": model.state.state.value,
            "residency": replica.residency.state.value,
            "priority": PRIORITY_NAMES.get(model.priority, str(model.priority)),
            "pinned": model.want_pinned,
            "requests": replica.use_count,
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
        }
        if manifest is not None:
            row |= {
                "digest": manifest.digest,
                "source": manifest.source,
                "mode": manifest.mode,
                "mode_reason": manifest.mode_reason,
                "bytes": manifest.total_bytes,
                "groups": len(manifest.groups),
                "inputs": {v.name: _shown(v) for v in manifest.inputs},
                "outputs": {v.name: _shown(v) for v in manifest.outputs},
                "dims": {dim.name: [dim.low, dim.high] for dim in manifest.dims},
                "notes": manifest.extra.get("notes", []),
                "intermediate_bytes": manifest.extra.get("intermediate_bytes", 0),
                "batch": list(manifest.batch),
            }
        return row | self._plans.row(replica)

    def plan(self) -> dict[str, Any]:
        """What ``pipeswitch plan`` reckons with: each model's profile, and the arena."""
        return {
            "arena_bytes": self._arena.leasable_bytes,
            "models": [
                {
                    "name": replica.name,
                    "bytes": replica.model.manifest.total_bytes,
                    "grouping": replica.plan_source,
                    "grouping_why": replica.plan_why,
                    "profile": None
                    if replica.profile is None
                    else msgspec.to_builtins(replica.profile),
                }
                for replica in self._device.replicas.values()
                if replica.model.manifest is not None
            ],
        }

    def jobs(self) -> list[dict[str, Any]]:
        return [self._jobs.row(job) for job in self._device.jobs.values()]

    def ps(self) -> list[dict[str, Any]]:
        """Models, jobs, workers and the memory daemon, with ``pid``."""
        device = self._device
        rows = [self._ps_model(replica) for replica in device.replicas.values()]
        rows += [self._ps_job(job) for job in device.jobs.values()]
        rows += [self._ps_worker(worker) for worker in device.workers.values()]
        rows.append(
            self._row(
                "memory-daemon",
                "daemon",
                "active" if device.is_daemon_ready else "starting",
                pid=device.daemon_pid,
                device=f"{self._arena.leasable_bytes - self._arena.regions.free_bytes}",
            )
        )
        return rows

    def _row(
        self,
        name: str,
        kind: str,
        state: str,
        *,
        worker: int | None = None,
        device: str = "",
        host: str = "",
        prio: int | None = None,
        last_used_at_ms: float = 0.0,
        why: str = "",
        pid: int = 0,
        owners: tuple[Owner, ...] = (),
        manifest: Manifest | None = None,
    ) -> dict[str, Any]:
        regions = [region for owner in owners if (region := self._arena.regions.get(owner))]
        idle_ms = self._core.now_ms - last_used_at_ms if last_used_at_ms else None
        return {
            "name": name,
            "kind": kind,
            "state": state,
            "worker": worker,
            "device": device,
            "host": host,
            "prio": "" if prio is None else PRIORITY_NAMES.get(prio, str(prio)),
            "last_used": None if idle_ms is None else round(idle_ms / 1000.0, 3),
            "why": why,
            "pid": pid,
            "regions": [[region.offset_bytes, region.size_bytes] for region in regions],
            "group_bytes": [group.size_bytes for group in manifest.groups] if manifest else [],
        }

    def _ps_model(self, replica: Replica) -> dict[str, Any]:
        device = self._device
        slot = next(
            (a.slot for a in (device.current, device.upcoming) if a and a.model == replica.name),
            None,
        )
        stored = self._machine.store.regions.get(replica.owner)
        return self._row(
            replica.name,
            "model",
            self._model_state(replica, slot is not None),
            worker=slot,
            device=f"{self._arena.held_bytes(replica)}",
            host=f"{stored.size_bytes if stored else 0}",
            prio=replica.model.priority,
            last_used_at_ms=replica.last_used_at_ms,
            why=self._model_why(replica),
            pid=device.workers[slot].pid if slot is not None else 0,
            owners=(replica.owner, replica.rest),
            manifest=replica.manifest,
        )

    def _model_state(self, replica: Replica, is_active: bool) -> str:
        if replica.model.state.state in (ModelState.QUARANTINED, ModelState.FAILED):
            return "failed"
        if replica.model.state.state not in (ModelState.READY, ModelState.LEAVING):
            return str(replica.model.state.state.value)
        if is_active and self._device.current and self._device.current.model == replica.name:
            return "active"
        if replica.is_being_sent:
            return "transmitting"
        if replica.residency.state in (Residency.RESIDENT, Residency.PINNED):
            return "resident"
        return "host"

    def _model_why(self, replica: Replica) -> str:
        if replica.model.reason:
            return replica.model.reason
        if replica.model.state.state is ModelState.LEAVING:
            return "being unregistered"
        waiting = self._device.queue.count(replica.name) + self._device.early.count(replica.name)
        if waiting:
            return f"{waiting} waiting"
        if replica.residency.state is Residency.PARTIAL:
            return "its prefix is kept"
        return "pinned" if replica.model.want_pinned else ""

    def _ps_job(self, job: Job) -> dict[str, Any]:
        worker = self._device.workers.get(job.slot) if job.slot is not None else None
        region = self._arena.regions.get(job.slice)
        words: dict[TaskState, str] = {TaskState.RUNNING: "active", TaskState.STOPPING: "active"}
        return self._row(
            job.name,
            "job",
            words.get(job.state.state, job.state.state.value),
            worker=job.slot,
            device=f"{region.size_bytes if region else 0}",
            host=f"{2 * job.commit_slot_bytes}",
            prio=job.priority,
            last_used_at_ms=job.last_ran_at_ms,
            why=job.error or job.why,
            pid=worker.pid if worker is not None else 0,
            owners=(job.slice,),
        )

    def _ps_worker(self, worker: Worker) -> dict[str, Any]:
        device = self._device
        task = worker.job or next(
            (a.model for a in (device.current, device.upcoming) if a and a.slot == worker.slot), ""
        )
        why = worker.kill_reason or (f"preparing {worker.preparing}" if worker.preparing else task)
        return self._row(
            f"worker-{worker.slot}",
            "worker",
            worker.state.state.value,
            worker=worker.slot,
            why=why if worker.state.state is not WorkerState.STANDBY or worker.preparing else "",
            pid=worker.pid,
        )

    def stats(self) -> dict[str, Any]:
        """Counters and sizes; the frontend adds accepted/ok/error/undeliverable/in_flight."""
        core, device, arena = self._core, self._device, self._arena
        store = self._machine.store.regions
        counts = core.counts
        return {
            "queued": len(device.queue) + len(device.early),
            "switches": counts["switches"],
            "dispatches": {kind: counts[f"{kind}_dispatches"] for kind in DISPATCH_KINDS},
            "device_s": self._device_s(),
            "up_s": round((core.now_ms - self.born_at_ms) / 1000.0, 6),
            "preemptions": counts["preemptions"],
            "evictions": counts["evictions"],
            "job_evictions": counts["job_evictions"],
            "inferences": counts["inferences"],
            "transmissions": counts["transmissions"],
            "transmitted_bytes": counts["transmitted_bytes"],
            "commits": counts["commits"],
            "worker_restarts": counts["worker_restarts"],
            "daemon_restarts": counts["daemon_restarts"],
            "stale_messages": counts["stale_messages"],
            "arena_capacity_bytes": arena.leasable_bytes,
            "arena_free_bytes": arena.regions.free_bytes,
            "arena_leases": self._leases(),
            "store_capacity_bytes": store.capacity_bytes,
            "store_free_bytes": store.free_bytes,
            "models": len(self._machine.models),
            "jobs": len(device.jobs),
            "workers": len(device.workers),
            "device": device.settings.device,
            "policy": core.judge.name,
            "draining": core.is_draining,
            "ready": device.is_ready,
        }

    def _device_s(self) -> dict[str, float]:
        """Seconds of each kind, with what is under way."""
        core, device = self._core, self._device
        spent_us = {kind: core.counts[f"{kind}_us"] for kind in DEVICE_KINDS}
        if device.training is not None:
            began_at_ms = device.jobs[device.training].cycle_began_at_ms
            spent_us["train"] += round((core.now_ms - began_at_ms) * 1000.0)
        return {kind: us / 1e6 for kind, us in spent_us.items()}

    def _leases(self) -> int:
        """Regions that a process computes in or copies into now: models in use, training slices."""
        replicas = self._device.replicas.values()
        in_use = sum(replica.users > 0 or replica.is_being_sent for replica in replicas)
        slices = sum(region.owner.kind in ("slice", "scrub") for region in self._arena.regions)
        return in_use + slices
