"""Dispatch from the queue to a worker: the best request, a place for its model, switch, turn."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from typing import Final

from ...base.errors import DeadlineExceeded, OutOfDeviceMemory
from ...ipc.messages.base import JobName, ModelName, OpId, Turn
from ...ipc.messages.worker import RunInference
from ...programs.interface.layout import Manifest
from ..memory.allocators import ArenaAllocator
from ..memory.residency import Residents
from ..policies import Waiting
from ..state import states
from ..state.core import DUE, HUNG, QUEUE, RESIDENCY, TURN
from ..state.device_state import DeviceState
from ..state.events import Interrupt, RaiseTurn
from ..state.fair_queue import Charge
from ..state.policy_queue import shown
from ..state.records import NO_OP_ID, DeviceModel, Request, RunningTask, Worker
from ..training.training import TrainingJobs
from . import forecast
from .batching import Batch, batch_for, batch_start_ms, should_wait_for_batch
from .completion import quarantined
from .taking_back import TakingBack


class Turns:
    """Turns of inference tasks: starts dispatched tasks, and finds hanging ones."""

    def __init__(self, device: DeviceState) -> None:
        self._core = device.core
        self._device = device

    def give(self) -> None:
        """Give the turn to the task that may have it, if there is one."""
        owner = self._device.owner
        if owner.pending is None and owner.yielded is None:
            return
        task = owner.next_task
        if task is not None:
            self._start(task, "has the turn")
            self._core.emit(RaiseTurn(self._device.address(task.slot), task.turn))

    def passed(self, turn: Turn) -> None:
        """Record that the parked worker has written the turn word itself."""
        owner = self._device.owner
        if owner.state is states.OwnerState.IDLE and owner.pending and owner.pending.turn == turn:
            self._start(owner.pending, "turn passed on")

    def _start(self, task: RunningTask, cause: str) -> None:
        now_ms, is_back = self._core.now_ms, task is self._device.owner.yielded
        self._device.owner.start(task, cause)
        if is_back:
            away_ms = now_ms - task.yielded_at_ms
            task.yielded_ms += away_ms
            task.began_at_ms += away_ms
            task.yielded_at_ms = 0.0
            self.request_yield()
            return
        task.began_at_ms = now_ms
        task.queued_until_ms = task.queued_until_ms or now_ms
        for token in task.tokens:
            self._device.requests[token].state.apply(states.TaskEvent.STARTED, cause)

    # -- a pass of a model that streams: it may take as long as its copy ---------------------------

    def request_yield(self) -> None:
        """Interrupt a streaming pass between two groups for the next task, if this needs no copy.
        The policy limits the total interruption, as if the pass were a request that waits for
        memory and is overtaken."""
        device, owner = self._device, self._device.owner
        passing, waiting = owner.running, owner.pending
        if passing is None or waiting is None or not passing.streamed:
            return
        if waiting.streamed or not waiting.was_resident:
            return
        view, request = device.view, device.requests[passing.tokens[0]]
        stands = shown(request)._replace(arrived_at_ms=view.now_ms - passing.yielded_ms)
        if self._core.judge.may_backfill(shown(device.requests[waiting.tokens[0]]), stands, view):
            self._core.emit(Interrupt(device.address(passing.slot), passing.op_id))

    def stepped_aside(self, worker: Worker, op_id: OpId) -> None:
        """Record that the pass has yielded: the next task gets the turn, then the pass again."""
        owner = self._device.owner
        passing = owner.running
        if passing is None or (passing.slot, passing.op_id) != (worker.slot, op_id):
            return
        if owner.yielded is not None:
            self._device.kill(worker, "it yielded while another yielded task waits")
            return
        passing.yielded_at_ms = self._core.now_ms
        owner.step_aside(f"operation {op_id}")

    def hung(self) -> RunningTask | None:
        """Return the task that computes for too long, if any; its ``hung_why`` says why.

        1. It still computes long after its deadline, or the last deadline of its batch.
        2. It has had the turn for ``max_compute_ms``. It may be in an endless loop, which would
           hold the device for ever. The model's earlier times do not count: a caller could raise
           the limit by ever larger requests.
        """
        core, device = self._core, self._device
        activation = device.owner.running
        if activation is None or activation.hung_why:
            return activation
        settings = core.settings
        last_at_ms = max([device.requests[token].due_ms for token in activation.tokens])
        late_at_ms = last_at_ms + settings.deadline_grace_ms
        endless_at_ms = activation.began_at_ms + (settings.max_compute_ms or math.inf)
        at_ms = min(late_at_ms, endless_at_ms)
        if core.now_ms < at_ms:
            # One timer serves many short tasks: when it fires, this check runs again.
            if at_ms < core.wakeups.first_ms(HUNG):
                core.wake_at(at_ms, HUNG)
            return None
        activation.hung_why = (
            "its task did not end after the deadline"
            if late_at_ms <= endless_at_ms
            else f"its task computed for {settings.max_compute_ms:.0f} ms"
        )
        return activation


IN_PLACE: Final = (states.Residency.RESIDENT, states.Residency.PINNED)
READY: Final = states.ModelState.READY


class Dispatch:
    """Dispatcher of a device. At most one task waits for its turn while another computes."""

    def __init__(
        self,
        device: DeviceState,
        arena: ArenaAllocator,
        residents: Residents,
        training: TrainingJobs,
        turns: Turns,
        taking_back: TakingBack,
    ) -> None:
        self._core = device.core
        self._device = device
        self._arena = arena
        self._residents = residents
        self._training = training
        self._turns = turns
        self._taking_back = taking_back

    def expire(self) -> None:
        """Answer requests without a turn whose deadline has passed, or can no longer be met."""
        core, device = self._core, self._device
        ahead = device.owner.pending
        if ahead is not None and Turn(ahead.op_id) not in device.owner.promised.values():
            self._taking_back.late(ahead)
        between = device.between
        if not device.queue.requests and not device.awaiting_model.requests and not between:
            return
        for request in (
            *device.queue.expired(core.now_ms),
            *device.awaiting_model.expired(core.now_ms),
            *([one for one in between.values() if one.due_ms <= core.now_ms] if between else ()),
        ):
            if core.now_ms < request.due_ms:
                device.refuse(
                    request, states.TaskEvent.EXPIRE, forecast.deadline_error(device, request)
                )
                continue
            waited = core.now_ms - request.origin.arrived_at_ms
            device.refuse(
                request,
                states.TaskEvent.EXPIRE,
                DeadlineExceeded(
                    f"the deadline passed after {waited:.0f} ms in the queue",
                    hint="raise the deadline or the priority",
                    waited_ms=waited,
                ),
            )

    def pump(self) -> None:
        """Dispatch all requests that can be dispatched. These are the outcomes for a request.

        0. The request was dispatched on arrival (``at_once``).
        1. Another task already waits for its turn, or nothing is queued: nothing to do, unless that
           task is taken back for a new request that goes first (``TakingBack``).
        2. The best request's model is on the device, or the link and a place for it are free or can
           be freed. An absent model is sent and the task dispatched in one step; a job must stop.
        3. A job's slice is in the model's place: the job is swapped out or evicted, and the request
           waits. It also waits for a range that is being zeroed, or a cancelled copy.
        4. Models that must stay are in the place, or another copy uses the link: the request waits.
        5. While a request waits for memory or the link, the next best one is tried if the policy
           lets it overtake: a lower priority never runs before a higher one, and no request is
           overtaken for ever. The search ends after ``MAX_BLOCKED`` models.
        6. The request waits for others to join its batch; the next best ones run first. If requests
           of the model's current run may return and join it, others overtake it only as in 5.
        7. The request's caller had a long run, or has a task while another caller may go first
           (``CallerQueue``).
        8. The model streams through the arena for another request: each request has its own pass.
        9. A run of several steps ends early when a request waits, dispatched or not.
        10. The model is being copied: a request that ends before the copy goes first, if the policy
            lets it overtake.
        """
        device = self._device
        owner, new = device.owner, device.queue.fresh
        if new:
            device.queue.fresh = []
        if not device.daemon.is_ready:
            return
        if device.queue.unchecked:
            self._refuse_the_impossible()
        ahead = owner.pending
        if new and ahead is not None and Turn(ahead.op_id) not in owner.promised.values():
            self._taking_back.overtaken(ahead, new)
            device.queue.fresh = []
        while device.queue.requests and owner.pending is None:
            if not self._dispatch_best():
                break
        running = owner.running
        if (
            running is not None
            and running.is_multi_step
            and (device.queue.requests or owner.pending)
        ):
            running.is_multi_step = False  # the run ends after its current step
            self._core.emit(Interrupt(device.address(running.slot), running.op_id))

    def _refuse_the_impossible(self) -> None:
        """Refuse requests whose model cannot fit because of pinned ones: they would never run."""
        device = self._device
        unchecked, device.queue.unchecked = device.queue.unchecked, {}
        if not device.pinned:
            return  # the store accepted only models that the arena can serve
        for name in unchecked:
            replica = device.replicas[name]
            size = replica.needs_bytes
            if self._arena.may_take(replica, size):
                continue
            pinned, largest = list(device.pinned), self._arena.largest_for_all_bytes
            for request in device.queue.of(name):
                error = OutOfDeviceMemory(
                    f'"{name}" needs {size} bytes, but pinned models ({", ".join(pinned)}) leave '
                    f"{largest} in one piece",
                    hint=f"pipeswitch unload {pinned[0]}",
                    requested_bytes=size,
                    largest_free_bytes=largest,
                )
                self._device.refuse(request, states.TaskEvent.ERROR, error)

    def _dispatch_best(self) -> bool:
        core, device = self._core, self._device
        if not self._has_worker():
            return False  # ``pump`` is called again when a worker is free
        now, is_link_busy, idle_ms = device.view, False, 0.0
        coming: tuple[Request, DeviceModel, bool] | None = None
        blocked: list[Waiting] = []
        for view, request in device.queue.heads(*device.queue_view):
            if any(view.model == other.model for other in blocked):
                continue
            if len(blocked) == forecast.MAX_BLOCKED or not all(
                core.judge.may_backfill(view, other, now) for other in blocked
            ):
                break  # 5.
            model = device.replicas[request.model].model
            if model.state.state is states.ModelState.QUARANTINED:  # on another device
                device.refuse(request, states.TaskEvent.ERROR, quarantined(model))
                return True
            if forecast.cannot_meet_deadline(device, request):
                device.refuse(
                    request, states.TaskEvent.EXPIRE, forecast.deadline_error(device, request)
                )
                return True  # another request is first now
            replica = device.replicas[request.model]
            if replica.built.batching is not None:
                batch = batch_for(device, replica, request)
                if should_wait_for_batch(device, replica, batch):
                    blocked.append(view)
                    continue  # 6.
                if self._is_held(replica, batch):
                    continue  # 6.
            is_there = replica.is_on_device and replica.staging is None
            if coming is not None:
                is_ready = is_there and not replica.is_being_sent
                if is_ready and forecast.fits_in(device, request, idle_ms):
                    coming = request, replica, False
                    break  # 10.
                blocked.append(view)
                continue
            is_sent = False
            if not replica.is_on_device and not is_link_busy:  # 8.
                is_sent = self._send(request, replica)
                is_link_busy = is_sent or self._is_link_busy()
            if is_there or is_sent:
                coming = request, replica, is_sent
                never_batch = len(device.queue.requests) == 1 or not replica.is_being_sent
                if never_batch or replica.staging is not None:
                    break
                if (idle_ms := forecast.waits_for_copy_ms(device, request)) <= 0.0:
                    break
            self._wake_at(forecast.absent_until_ms(device, request))
            blocked.append(view)
        if coming is not None:
            request, replica, is_sent = coming
            self.activate(request, replica, is_sent=is_sent)
            return True
        # Time alone may change the order, and which requests may overtake.
        again_at_ms = device.accounts.again_at_ms
        self._wake_at(min(again_at_ms, device.queue.until_ms) if blocked else again_at_ms)
        return False

    def _is_held(self, replica: DeviceModel, batch: Batch) -> bool:
        """Return True if the batch still waits for requests that could join it."""
        at_ms = batch_start_ms(self._device, replica, batch)
        self._wake_at(at_ms)
        return self._core.now_ms < at_ms

    def _wake_at(self, at_ms: float) -> None:
        if self._core.now_ms < at_ms < self._core.wakeups.first_ms(DUE):
            self._core.wake_at(at_ms, DUE)

    def keep_order(self) -> int:
        """Update the ranks, even while nothing can be dispatched."""
        if self._device.queue.requests:
            self._device.queue.reorder(*self._device.queue_view)
        return QUEUE | TURN | RESIDENCY

    def look_ahead(self) -> int:
        """Send the next request's model while another model computes."""
        if self._device.queue.requests:
            self._look_ahead()
        return QUEUE | TURN | RESIDENCY | DUE

    def _look_ahead(self) -> None:
        """Send the next absent model, if the link is idle, a task computes, and another one waits.
        The copy may evict no model that is used, pinned or awaited. The request itself is
        dispatched later, in its order."""
        device = self._device
        is_ahead = device.owner.running is not None and device.owner.pending is not None
        if not is_ahead or device.sending or not device.settings.look_ahead:
            return
        if not device.daemon.is_ready:
            return
        for view, _ in itertools.islice(
            device.queue.heads(*device.queue_view), forecast.MOST_AHEAD
        ):
            replica = device.replicas[ModelName(view.model)]
            if replica.is_on_device or replica.staging is not None:
                continue
            if self._core.now_ms < replica.transfer.retry_at_ms:
                self._core.wake_at(replica.transfer.retry_at_ms, RESIDENCY)
                continue
            window = self._arena.find_extent(replica, for_request=False)
            if window is not None and not self._arena.obstacles(window):
                self._residents.transmit(replica, window, "it is next")
                replica.transfer.ahead_id = replica.residency_id
            return

    def _has_worker(self) -> bool:
        """Return True if a worker could begin a task.
        A worker that loads a program, perhaps for seconds, counts only while no task runs. The
        worker of a running task could be free earlier."""
        free = [w for w in self._device.workers.values() if w.state.state in states.WORKER_FREE]
        return any(worker.preparing is None for worker in free) or (
            bool(free) and self._device.owner.running is None
        )

    def _send(self, request: Request, replica: DeviceModel) -> bool:
        """Send the model of a request if possible; return True if it is sent now."""
        arena = self._arena
        if replica.residency.state is states.Residency.ABANDONED:
            return False  # the model's region is in use until the copy has ended
        self._residents.cancel_prefetches()
        if self._is_link_busy():
            return False  # 4. A more urgent copy could not overtake one that waits for the link.
        window = arena.find_extent(replica, for_request=True)
        if window is None:
            return False  # 4.
        obstacles = arena.obstacles(window)
        for region in obstacles:
            if region.owner.kind == "slice":
                self._training.free_memory(JobName(region.owner.name), f"memory for {replica.name}")
        if obstacles:
            return False
        runs = []
        if replica.table is not None:
            runs = [one.run for one in batch_for(self._device, replica, request).requests]
        self._residents.transmit(replica, window, f"request {request.run.request_id}", runs)
        replica.transfer.ahead_id = replica.residency_id
        return True

    def _is_link_busy(self) -> bool:
        """Return True if a copy for a request is under way; a cancelled one does not count."""
        return any(self._device.replicas[name].is_on_device for name in self._device.sending)

    def _pick_worker(self, replica: DeviceModel) -> Worker:
        """Return a free worker. Prefer one that has loaded the model, then one that is loading it,
        then one that must load it. The last choice has another program, or must be replaced."""
        name, version, is_code = replica.name, replica.version, replica.is_code
        tenant = self._core.tenant_of(replica.model.tenant)

        def order(worker: Worker) -> tuple[int, bool, int]:
            is_warm = worker.warm.get(name) == version
            rank = 3
            if self._device.fits(worker, is_code=is_code, tenant=tenant):
                if worker.preparing is None:
                    rank = 0 if is_warm else 2
                elif worker.preparing == name and not is_warm:
                    rank = 1
            return rank, worker.state.state is states.WorkerState.CLEANING, worker.slot

        return min(
            [w for w in self._device.workers.values() if w.state.state in states.WORKER_FREE],
            key=order,
        )

    def _charge(self, replica: DeviceModel, batch: Batch) -> Charge:
        rows = Counter[str]()
        for one in batch.requests:
            rows[one.origin.caller] += one.batch
        accounts, now_ms = self._device.accounts, self._core.now_ms
        predicted = self._device.predictions.predict(replica.name, batch.size)
        charge = accounts.charge(rows, predicted.compute_ms, now_ms)
        for account in charge.parts:
            if account.connections is not None:
                shares = [
                    (one.origin.caller, one.origin.connection, one.batch) for one in batch.requests
                ]
                return accounts.charge_connections(charge, shares, now_ms)
        return charge

    def at_once(self, request: Request) -> bool:
        """Give a new request to a worker without ranking it: outcome 0 of ``pump``.

        Any policy would choose it, if nothing waits, computes or trains, the model is on the device
        and in a free worker, and the request waits for no batch. Otherwise return False.
        """
        core, device, replica = self._core, self._device, self._device.replicas[request.model]
        owner = device.owner
        if owner.state is not states.OwnerState.IDLE or owner.pending is not None or owner.promised:
            return False  # for ``promised`` see ``DeviceOwner.next_task``
        if device.queue.requests:
            return False
        if not device.daemon.is_ready:
            return False
        if replica.residency.state not in IN_PLACE or replica.model.state.state is not READY:
            return False
        batching = replica.built.batching
        may_wait = batching is not None and batching.delay_ms
        if may_wait or request.due_ms <= core.now_ms:
            return False
        if replica.transfer.ahead_id != NO_OP_ID:
            return False  # a model copied ahead counts as a switch
        account = device.accounts.of(request.origin.caller)
        if core.now_ms < max(account.throttled_until_ms, account.penalty_until_ms):
            return False
        name, version, idle_worker = request.model, replica.version, None
        for worker in device.workers.values():
            is_ready = worker.state.state is states.WorkerState.STANDBY and worker.preparing is None
            if idle_worker is None and is_ready and worker.warm.get(name) == version:
                idle_worker = worker
        # The process was bound to code and tenant when the program was loaded.
        if idle_worker is None:
            return False
        device.requests[request.token] = request
        median_ms = device.predictions.predict(name, request.batch).compute_ms
        charge = device.accounts.charge_alone(
            account, request.origin.priority, median_ms, request.origin.arrived_at_ms, core.now_ms
        )
        # Only the check for hanging tasks and other devices depend on this.
        core.dirty |= HUNG | (TURN if device.label else 0)
        self._begin([request], request.batch, replica, idle_worker, charge, is_switch=False)
        return True

    def activate(self, request: Request, replica: DeviceModel, *, is_sent: bool) -> RunningTask:
        """Give the request to a worker, with the requests that join it.

        ``is_sent``: whether the model was sent for this request just now. A model that was sent
        ahead of the request counts as a switch, too.
        """
        core, device = self._core, self._device
        batch = batch_for(device, replica, request)
        worker = self._pick_worker(replica)
        is_switch = is_sent or (
            replica.transfer.ahead_id != NO_OP_ID
            and replica.transfer.ahead_id == replica.residency_id
        )
        core.dirty |= QUEUE | TURN
        forecast.note_end(device, request)
        charge = self._charge(replica, batch)
        for one in batch.requests:
            device.queue.discard(one)
        return self._begin(batch.requests, batch.size, replica, worker, charge, is_switch=is_switch)

    def _begin(
        self,
        requests: list[Request],
        size: int,
        replica: DeviceModel,
        worker: Worker,
        charge: Charge | None,
        *,
        is_switch: bool,
    ) -> RunningTask:
        """Send queued requests to a worker, which computes them when it has the turn."""
        core, device, manifest, request = self._core, self._device, replica.manifest, requests[0]
        assert manifest is not None
        is_code, params = manifest.mode == "module", request.run.sampling_params
        is_multi_step = params is not None and params.steps > 1
        replica.transfer.ahead_id, replica.transfer.is_prefetch = NO_OP_ID, False
        op_id, owner = core.next_op_id(), device.owner
        chooses, due_ms = False, math.inf
        for one in requests:
            one.state.apply(states.TaskEvent.DISPATCHED, f"worker {worker.slot}")
            chooses = chooses or one.run.sampling_params is not None
            if one.origin.deadline_at_ms is not None:
                due_ms = min(due_ms, one.origin.deadline_at_ms)
        device.claim(worker, is_code=is_code, tenant=core.tenant_of(replica.model.tenant))
        worker.state.apply(states.WorkerEvent.ACTIVATED, f"request {request.run.request_id}")
        worker.dispatch_id = op_id
        replica.users += 1
        is_used = replica.computed_op_id == replica.residency_id != NO_OP_ID
        activation = RunningTask(
            op_id=op_id,
            slot=worker.slot,
            tokens=tuple([one.token for one in requests]),
            batch=size,
            model=replica.name,
            queued_until_ms=core.now_ms if owner.running is None else 0.0,
            event=core.event,
            was_resident=is_used or replica.residency.state in IN_PLACE,
            copied_at_ms=0.0 if is_used else replica.transfer.ended_at_ms,
            residency_id=replica.residency_id,
            resident_bytes=replica.resident_bytes if is_switch else 0,
            streamed=manifest.total_bytes - replica.resident_bytes if replica.staging else 0,
            is_multi_step=is_multi_step and replica.staging is None,  # there, a stop means: yield
            chooses=chooses,
            charge=charge,
        )
        owner.pending = activation
        self._turns.give()  # before the order: the worker must not find an old turn
        if due_ms < math.inf and owner.pending is not None:
            core.wake_at(due_ms, DUE)
        if owner.running is not None and owner.running.streamed:
            self._turns.request_yield()
        device.send(worker.slot, _run_order(device, replica, manifest, requests, op_id))
        if owner.job is not None:
            activation.preempted = owner.job
            self._training.stop(owner.job, activation.turn, activation.slot)
        kind = "resident" if not is_switch else "partial" if activation.resident_bytes else "cold"
        core.counts[f"{kind}_dispatches"] += 1
        if is_switch:
            self._note_switch(activation, request.run.request_id)
        return activation

    def _note_switch(self, activation: RunningTask, request_id: str) -> None:
        self._core.counts["switches"] += 1
        self._device.publish(
            "switch.started",
            model=activation.model,
            request=request_id,
            worker=activation.slot,
            preempts=activation.preempted,
        )


def _run_order(
    device: DeviceState,
    replica: DeviceModel,
    manifest: Manifest,
    requests: list[Request],
    op_id: OpId,
) -> RunInference:
    """Return the order to compute requests in one run."""
    runs, transfer = [request.run for request in requests], replica.transfer
    return RunInference(
        op_id=op_id,
        model=replica.name,
        digest=manifest.digest,
        directory=device.core.settings.program_dir(manifest.digest),
        arena_offset_bytes=replica.preferred_offset_bytes,
        first_fence=replica.first_fence,
        residency_id=replica.residency_id,
        runs=tuple(runs),
        plan=replica.grouping.plan,
        staging=replica.staging.offsets if replica.staging is not None else (),
        is_timed=device.trial.model == replica.name,
        is_code=manifest.mode == "module",
        last_group=transfer.order[-1] if transfer.order else -1,
        by_rows=bool(transfer.by_rows) and {*map(id, runs)} <= {*map(id, transfer.by_rows)},
    )
