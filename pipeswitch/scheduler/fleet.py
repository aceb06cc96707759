"""Processes: how many workers, what they prepare, what follows a death (``rest_for_one``)."""

from __future__ import annotations

from ..ipc.messages import ForgetModel, ModelName, ModelPrepared, PrepareModel, Slot
from .core import Core
from .events import SpawnDaemon, ToWorker
from .records import NO_TURN, Worker
from .states import ModelState, WorkerEvent, WorkerState

MAX_DOUBLINGS = 3  # of the restart delay: 8 s at the default of 1 s


class Fleet:
    """The memory daemon and the worker slots."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self.is_daemon_alive = False
        self._daemon_deaths = 0
        self._daemon_respawn_at_ms: float | None = None

    # -- memory daemon ------------------------------------------------------------------------

    def start(self) -> None:
        """First the daemon; workers follow when it owns its memory."""
        self._spawn_daemon()

    def _spawn_daemon(self) -> None:
        core = self._core
        core.daemon_generation += 1
        core.is_daemon_ready = False
        self.is_daemon_alive = True
        self._daemon_respawn_at_ms = None
        core.emit(SpawnDaemon(generation=core.daemon_generation))

    def daemon_ready(self, pid: int) -> None:
        core = self._core
        core.is_daemon_ready = True
        core.daemon_pid = pid
        core.publish("worker.daemon_ready", pid=pid)

    def daemon_died(self, status: int) -> bool:
        """Kill every worker: none may outlive the owner of its memory. Then restart in order.

        1. workers are killed and reaped (WorkerExited of each);
        2. the daemon is spawned again, with back-off, and takes its memory;
        3. workers are spawned; requests were queued again, jobs resume from their commits.

        Returns:
            False when it died too often: the server cannot go on.
        """
        core = self._core
        core.is_daemon_ready = False
        core.daemon_pid = 0
        self.is_daemon_alive = False
        self._daemon_deaths += 1
        core.counts["daemon_restarts"] += 1
        core.publish("worker.daemon_died", status=status)
        for worker in core.workers.values():
            core.kill(worker, "the memory daemon exited", blame=False)
        if self._daemon_deaths > core.settings.max_daemon_restarts:
            return False
        delay_ms = 0.0
        if self._daemon_deaths > 1:
            delay_ms = core.settings.restart_backoff_ms * 2 ** (self._daemon_deaths - 2)
        self._daemon_respawn_at_ms = core.now_ms + delay_ms
        return True

    def served_well(self) -> None:
        """A request was answered or a step committed: the daemon's deaths are forgiven."""
        self._daemon_deaths = 0

    # -- workers ------------------------------------------------------------------------------

    def pump(self) -> None:
        """Respawn what is missing and due; let standbys prepare what they do not know yet."""
        core = self._core
        if not self.is_daemon_alive and self._daemon_respawn_at_ms is not None:
            if any(worker.is_alive for worker in core.workers.values()):
                return
            if core.now_ms >= self._daemon_respawn_at_ms:
                self._spawn_daemon()
            else:
                core.look_again(self._daemon_respawn_at_ms)
            return
        if core.is_daemon_ready:
            self._spawn_missing()
            self._prepare_idle()

    def _wanted_slots(self) -> int:
        """1 active + N standby; a suspended worker does not count as a standby."""
        suspended = sum(
            worker.state.state is WorkerState.SUSPENDED for worker in self._core.workers.values()
        )
        return 1 + max(1, self._core.settings.standby) + min(1, suspended)

    def _spawn_missing(self) -> None:
        core = self._core
        while len(core.workers) < self._wanted_slots():
            slot = Slot(len(core.workers))
            core.workers[slot] = Worker(slot)
        for worker in core.workers.values():
            if worker.is_alive:
                continue
            if worker.respawn_at_ms is not None and core.now_ms < worker.respawn_at_ms:
                core.look_again(worker.respawn_at_ms)
                continue
            worker.state.apply(WorkerEvent.RESPAWNED, f"generation {worker.generation + 1}")
            core.spawn(worker)

    def worker_ready(self, worker: Worker, pid: int) -> None:
        if worker.pid:
            self._core.kill(worker, "it was ready twice")
            return
        worker.pid = pid
        if worker.state.allows(WorkerEvent.READY):  # else it has a task already (ADR 20)
            worker.state.apply(WorkerEvent.READY, f"pid {pid}")
        self._core.publish("worker.ready", worker=worker.slot, pid=pid)

    def worker_exited(self, worker: Worker, status: int, *, ended_well: bool) -> None:
        """Reaped. The first death is replaced at once, a row of them with growing delay.

        Only processes that die before they are ready count for the delay: then the machine is at
        fault, and trying again at once would only load it. A death under a task is the model's
        or the job's, which have limits of their own; one that was ready and idle was killed.
        """
        core = self._core
        was_starting = not worker.pid
        worker.state.apply(WorkerEvent.EXITED, f"status {status} {worker.kill_reason}")
        worker.pid = 0
        worker.preparing = None
        worker.may_raise = NO_TURN
        worker.respawn_at_ms = core.now_ms
        if ended_well:
            return
        core.counts["worker_restarts"] += 1
        worker.deaths = worker.deaths + 1 if was_starting and worker.is_blamed else 0
        if worker.deaths > core.settings.max_deaths:
            doubling = min(worker.deaths - core.settings.max_deaths - 1, MAX_DOUBLINGS)
            worker.respawn_at_ms += core.settings.restart_backoff_ms * 2**doubling
        core.publish(
            "worker.died", worker=worker.slot, status=status, reason=worker.kill_reason or "died"
        )

    # -- warm programs ------------------------------------------------------------------------

    def _prepare_idle(self) -> None:
        """One program at a time per standby, while no request waits.

        A program may take seconds to load, and its worker takes no task meanwhile: so where two
        workers are free, one of them always stays ready for the next request.
        """
        core = self._core
        if core.queue or core.upcoming is not None or core.measuring is not None:
            return
        free = [worker for worker in core.workers.values() if worker.is_free]
        ready = [worker for worker in free if worker.preparing is None]
        spare = len(ready) - (len(free) > 1)
        for worker in ready:
            if spare <= 0:
                return
            if worker.state.state is not WorkerState.STANDBY:
                continue
            name = self._next_to_prepare(worker)
            if name is None:
                continue
            spare -= 1
            model = core.models[name]
            assert model.manifest is not None
            worker.preparing = name
            core.claim(worker, is_code=model.is_code)
            core.emit(
                ToWorker(
                    slot=worker.slot,
                    message=PrepareModel(
                        model=name,
                        digest=model.manifest.digest,
                        directory=core.settings.program_dir(model.manifest.digest),
                        arena_offset_bytes=model.home_bytes,
                        plan=model.plan,
                        is_code=model.is_code,
                    ),
                )
            )

    def _next_to_prepare(self, worker: Worker) -> ModelName | None:
        missing = [
            model
            for model in self._core.models.values()
            if model.state.state is ModelState.READY
            and model.manifest is not None
            and worker.warm.get(model.name) != model.version
            and self._core.fits(worker, is_code=model.is_code)
            and (model.name, model.version) not in worker.unpreparable
        ]
        latest = max(missing, key=lambda m: (m.last_used_at_ms, m.registered_at_ms), default=None)
        return latest.name if latest is not None else None

    def prepared(self, worker: Worker, message: ModelPrepared) -> None:
        """The worker knows one more program, or says why it cannot."""
        core = self._core
        if worker.preparing == message.model:
            worker.preparing = None
        if message.error:
            worker.unpreparable.add((message.model, (message.digest, message.plan)))
            core.publish(
                "model.prepare_failed", model=message.model, worker=worker.slot, error=message.error
            )
        elif self._is_known(message):
            worker.warm[message.model] = (message.digest, message.plan)
        else:  # unregistered meanwhile
            core.emit(ToWorker(slot=worker.slot, message=ForgetModel(model=message.model)))

    def _is_known(self, message: ModelPrepared) -> bool:
        model = self._core.models.get(message.model)
        manifest = model.manifest if model is not None else None
        return manifest is not None and manifest.digest == message.digest
