"""Processes of a device: their number, the programs that idle workers load, and restarts."""

from __future__ import annotations

from ...ipc.messages.base import ModelName, Slot
from ...ipc.messages.worker import ForgetModel, ModelPrepared, PrepareModel, Shapes, WorkerClean
from ..state.core import MEASURED, QUEUE, TURN, WORKERS
from ..state.device_state import DeviceState
from ..state.events import LogWarning, Spawn
from ..state.records import NO_OP_ID, Worker
from ..state.states import WORKER_FREE, WORKER_LEAVES, ModelState, WorkerEvent, WorkerState
from ..training.training import MAX_IN_PLACE

MIN_TO_KEEP_ONE_UNBOUND = 3  # with fewer workers, two alternating tenants would lose theirs
MOST_GRAPHS = 32  # pairs (model, shapes) that a worker captures or has captured
MAX_DOUBLINGS = 3  # doublings of the restart delay: 8 s with the default of 1 s


def max_workers(standby: int) -> int:
    """Return the number of slots that a device may have: one active, standbys, suspended jobs."""
    return 1 + max(1, standby) + MAX_IN_PLACE


class WorkerPool:
    """The memory daemon and the worker slots of a device."""

    def __init__(self, device: DeviceState) -> None:
        self._core = device.core
        self._device = device
        self.is_daemon_alive = False
        self._daemon_deaths = 0
        self._daemon_respawn_at_ms: float | None = None

    # -- memory daemon ------------------------------------------------------------------------

    def start(self) -> None:
        """Start the daemon; workers follow when it owns its memory."""
        device = self._device
        device.daemon.incarnation += 1
        device.daemon.is_ready = False
        self.is_daemon_alive = True
        self._daemon_respawn_at_ms = None
        self._core.emit(Spawn(device.daemon.address))

    def daemon_ready(self, pid: int) -> None:
        device = self._device
        device.daemon.is_ready, device.daemon.pid = True, pid
        device.publish("worker.daemon_ready", pid=pid)

    def daemon_died(self, status: int) -> None:
        """Kill every worker: none may outlive the owner of its memory. Then restart in order.

        1. Workers are killed and reaped (``Exited`` of each).
        2. The daemon is spawned again, with back-off, and takes its memory.
        3. Workers are spawned; requests were queued again, jobs resume from their commits.

        A device whose daemon died too often is given up.
        """
        core, device = self._core, self._device
        device.daemon.is_ready = self.is_daemon_alive = False
        device.daemon.pid = 0
        self._daemon_deaths += 1
        core.counts["daemon_restarts"] += 1
        device.publish("worker.daemon_died", status=status)
        for worker in device.workers.values():
            device.kill(worker, "the memory daemon exited", blame=False)
        if self._daemon_deaths > core.settings.max_daemon_restarts:
            device.daemon.is_given_up = True
            if device.label:  # with a single device, the server stops and says why
                text = (
                    f"device {device.label} is given up, because its memory daemon died too often"
                )
                core.emit(LogWarning(text=text))
            return
        delay_ms = 0.0
        if self._daemon_deaths > 1:
            delay_ms = core.settings.restart_backoff_ms * 2 ** (self._daemon_deaths - 2)
        self._daemon_respawn_at_ms = core.now_ms + delay_ms

    def served_well(self) -> None:
        """Reset the daemon's count of deaths: a request was answered or a step committed."""
        self._daemon_deaths = 0

    # -- workers ------------------------------------------------------------------------------

    def pump(self) -> int:
        """Respawn missing processes when due; order standby workers to load further programs."""
        core, device = self._core, self._device
        if not self.is_daemon_alive and self._daemon_respawn_at_ms is not None:
            if device.has_processes:
                return WORKERS
            if core.now_ms >= self._daemon_respawn_at_ms:
                self.start()
            else:
                core.wake_at(self._daemon_respawn_at_ms, WORKERS)
            return WORKERS
        if not device.daemon.is_ready:
            return WORKERS
        self._spawn_missing()
        if core.settings.prepares:
            self._prepare_idle()
        self._keep_one_unbound()
        has_job, lacks_graphs = False, False
        for worker in device.workers.values() if core.settings.prepares else ():
            if worker.job is None and worker.complete_at != core.model_changes:
                return WORKERS | QUEUE | TURN | MEASURED
            has_job |= worker.job is not None
            lacks_graphs |= not all(worker.graphs.values())
        may_soon = core.settings.separates_tenants or (lacks_graphs and not has_job)
        return WORKERS | QUEUE | TURN if may_soon else WORKERS

    def _wanted_slots(self) -> int:
        """Return the number of slots: 1 active + N standby, plus suspended workers."""
        workers = self._device.workers.values()
        suspended = sum([worker.state.state is WorkerState.SUSPENDED for worker in workers])
        return max_workers(self._device.settings.standby) - MAX_IN_PLACE + suspended

    def _spawn_missing(self) -> None:
        core, device = self._core, self._device
        for number in range(len(device.workers), self._wanted_slots()):
            device.workers[Slot(number)] = Worker(Slot(number))
        for worker in device.workers.values():
            if worker.state.state is not WorkerState.DEAD:
                continue
            if worker.respawn_at_ms is not None and core.now_ms < worker.respawn_at_ms:
                core.wake_at(worker.respawn_at_ms, WORKERS)
                continue
            worker.state.apply(WorkerEvent.RESPAWNED, f"incarnation {worker.incarnation + 1}")
            device.spawn(worker)

    def worker_ready(self, worker: Worker, pid: int) -> None:
        if worker.pid:
            self._device.kill(worker, "it was ready twice")
            return
        worker.pid = pid
        if worker.state.allows(WorkerEvent.READY):  # else it has a task already (ADR 20)
            worker.state.apply(WorkerEvent.READY, f"pid {pid}")
        self._device.publish("worker.ready", worker=worker.slot, pid=pid)

    def worker_exited(self, worker: Worker, status: int, *, ended_well: bool) -> None:
        """Handle a reaped worker: replace it at once, or after several deaths in a row, later.

        Only deaths before the process is ready count for this growing delay: then the machine is at
        fault, and an immediate retry would only load it. A death during a task counts against the
        model or the job, which have their own limits. Idle processes die only if they are killed.
        """
        core = self._core
        was_starting = not worker.pid
        worker.state.apply(WorkerEvent.EXITED, f"status {status} {worker.kill_reason}")
        worker.pid = 0
        worker.preparing = None
        self._device.owner.promised.pop(worker.slot, None)
        worker.respawn_at_ms = core.now_ms
        if ended_well:
            return
        core.counts["worker_restarts"] += 1
        worker.deaths = worker.deaths + 1 if was_starting and worker.is_blamed else 0
        if worker.deaths > core.settings.max_deaths:
            doubling = min(worker.deaths - core.settings.max_deaths - 1, MAX_DOUBLINGS)
            worker.respawn_at_ms += core.settings.restart_backoff_ms * 2**doubling
        self._device.publish(
            "worker.died", worker=worker.slot, status=status, reason=worker.kill_reason or "died"
        )

    def _keep_one_unbound(self) -> None:
        """Keep one worker without a tenant for the next tenant, if tenants are separate.
        The standby whose tenant has been idle longest is replaced, unless there are only two."""
        core, device = self._core, self._device
        if not core.settings.separates_tenants or len(device.workers) < MIN_TO_KEEP_ONE_UNBOUND:
            return
        if device.queue or device.owner.tasks:
            return
        workers = device.workers.values()
        if any(w.tenant is None or w.state.state in WORKER_LEAVES for w in workers):
            return  # a worker is unbound, or soon will be
        idle = [w for w in workers if w.state.state is WorkerState.STANDBY and w.preparing is None]
        if idle:
            device.spawn(min(idle, key=lambda worker: worker.dispatch_id))

    # -- warm programs ------------------------------------------------------------------------

    def _prepare_idle(self) -> None:
        """Order standbys to load programs, one at a time each, while no request waits.

        A program may take seconds to load, and its worker takes no task until then. So if two
        workers are free, one of them stays ready for the next request.
        """
        core, device = self._core, self._device
        if device.queue or device.owner.pending is not None or device.trial.model is not None:
            return
        free = [one for one in device.workers.values() if one.state.state in WORKER_FREE]
        ready = [worker for worker in free if worker.preparing is None]
        spare = len(ready) - (len(free) > 1)
        for worker in ready:
            if spare <= 0:
                return
            if worker.state.state is not WorkerState.STANDBY:
                continue
            name, shapes = None, Shapes()
            if worker.complete_at != core.model_changes:  # else a check of all models is in vain
                name = self._next_to_prepare(worker)
            if name is None and not all(worker.graphs.values()):
                name, shapes = self._next_to_capture(worker)
            if name is None:
                continue
            spare -= 1
            replica = device.replicas[name]
            assert replica.manifest is not None
            worker.preparing = name
            tenant = core.tenant_of(replica.model.tenant)
            device.claim(worker, is_code=replica.is_code, tenant=tenant)
            self._device.send(
                worker.slot,
                PrepareModel(
                    model=name,
                    digest=replica.manifest.digest,
                    directory=core.settings.program_dir(replica.manifest.digest),
                    arena_offset_bytes=replica.preferred_offset_bytes,
                    plan=replica.grouping.plan,
                    staging=replica.staging.offsets if replica.staging else (),
                    is_code=replica.is_code,
                    shapes=shapes,
                    op_id=core.next_op_id() if shapes else NO_OP_ID,
                ),
            )

    def captured(self, worker: Worker, message: WorkerClean) -> None:
        """Record what a worker has captured; the others capture it when the device is idle."""
        for shapes in message.captured:
            for one in self._device.workers.values():
                if len(one.graphs) < MOST_GRAPHS:
                    key = message.model, shapes
                    one.graphs[key] = one is worker or one.graphs.get(key, False)
        self._core.dirty |= WORKERS

    def _next_to_capture(self, worker: Worker) -> tuple[ModelName | None, Shapes]:
        """Return graphs of a resident model that the worker has not captured; each only once. The
        run takes no time from a task or a job: it waits until the device has neither."""
        device = self._device
        if not device.owner.is_free or any(one.job for one in device.workers.values()):
            return None, ()
        for (name, shapes), is_over in worker.graphs.items():
            replica = device.replicas.get(name)
            worker.graphs[name, shapes] = True
            is_there = replica is not None and replica.is_on_device and not replica.is_being_sent
            if is_there and not is_over and name in worker.warm:
                return name, shapes
        return None, ()

    def _next_to_prepare(self, worker: Worker) -> ModelName | None:
        """Return the last used model that the worker can still load; None if there is none."""
        if self._core.settings.separates_tenants and worker.tenant is None:
            return None
        missing = [
            replica
            for replica in self._device.replicas.values()
            if replica.model.state.state is ModelState.READY
            and self._device.may_serve(replica.model)
            and replica.manifest is not None
            and worker.warm.get(replica.name) != replica.version
            and self._device.fits(
                worker, is_code=replica.is_code, tenant=self._core.tenant_of(replica.model.tenant)
            )
            and (replica.name, replica.version) not in worker.unpreparable
        ]
        latest = max(
            missing, key=lambda m: (m.last_used_at_ms, m.model.registered_at_ms), default=None
        )
        if latest is None:
            worker.complete_at = self._core.model_changes
            return None
        return latest.name

    def prepared(self, worker: Worker, message: ModelPrepared) -> None:
        """Record that the worker has loaded a program, or could not load it."""
        if worker.preparing == message.model:
            worker.preparing = None
        if message.error:
            worker.unpreparable.add((message.model, (message.digest, message.plan)))
            self._device.publish(
                "model.prepare_failed", model=message.model, worker=worker.slot, error=message.error
            )
        elif self._is_known(message):
            worker.warm[message.model] = (message.digest, message.plan)
        else:  # the model was unregistered meanwhile
            self._device.send(worker.slot, ForgetModel(model=message.model))

    def remove(self, name: ModelName) -> None:
        """Drop an unregistered model's program from all workers."""
        for worker in self._device.workers.values():
            worker.unpreparable = {key for key in worker.unpreparable if key[0] != name}
            if name in worker.warm and worker.is_alive:
                del worker.warm[name]
                if worker.job is None:
                    self._device.send(worker.slot, ForgetModel(model=name))

    def _is_known(self, message: ModelPrepared) -> bool:
        replica = self._device.replicas.get(message.model)
        manifest = replica.manifest if replica is not None else None
        return manifest is not None and manifest.digest == message.digest
