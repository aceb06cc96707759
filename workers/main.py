"""Entry of a worker process, which runs model code and may die at any time.

Two threads (PipeSwitch 3): the main thread executes; the termination thread reads the signal
channel and sets the gate's flag. The two channels are not ordered relative to each other, so every
message carries the operation id that it refers to.
"""

from __future__ import annotations

import faulthandler
import functools
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence

from pipeswitch.base.extras import JOBS
from pipeswitch.base.failpoints import are_enabled, reach
from pipeswitch.base.machine import FreedMemory
from pipeswitch.base.units import PrintableFormatter, escape_control_chars
from pipeswitch.devices.registry import kind_of
from pipeswitch.devices.worker_device import Pacer, WorkerDevice, now_ms
from pipeswitch.ipc.channel import Channel, channel_from, name_event
from pipeswitch.ipc.gate import Gate, Where
from pipeswitch.ipc.messages import worker as worker_msg
from pipeswitch.ipc.messages.base import Exit, Message, OpId, Ping, Pong, SliceRead, StepCommitted
from pipeswitch.sandbox.confine import confine_worker
from pipeswitch.sandbox.environment import take_environment

from .inference.pool import MappedPool
from .inference.task import Programs, infer, warm_up
from .training.host import JobHost
from .training.script import give_freed_memory_back, run_script

STATUS_FAILED = 70  # exit status of each child that an exception ends (launch.py)
REST_S = 5.0  # idle time after which a worker returns freed memory
PREFAULT_BYTES = 8 << 20  # faulting in a piece holds the GIL for less than a millisecond


def run(settings: worker_msg.WorkerSettings, descriptors: Sequence[int]) -> int:
    """Set up the process, report readiness, serve until told to exit; return the exit status.

    ``descriptors``: task channel, signal channel, control page and wake-up descriptors; then pool
    and arena, which a worker that serves a single tenant gets with ``BindTenant`` instead.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the controller decides when a process exits
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    faulthandler.enable()
    import torch

    limits = settings.limits
    torch.set_num_threads(limits.threads)
    task, control = channel_from(descriptors[0]), channel_from(descriptors[1])
    task.point = control.point = "worker.send"
    _log_to_stderr(settings.slot)
    control_page, *others = descriptors[2:]
    doorbells, shared = others[: limits.doorbell_count], others[limits.doorbell_count :]
    worker = WorkerProcess(settings, task, control, control_page, doorbells)
    if shared:
        worker.map_memory(shared)
    worker.start()
    return worker.serve()


def _log_to_stderr(slot: int) -> None:
    """Log to stderr, which is the server's ``processes.log``; do not change a script's logging."""
    handler = logging.StreamHandler()
    form = f"worker={slot} %(levelname)s event=%(event)d %(name)s %(message)s"
    handler.setFormatter(PrintableFormatter(form))
    handler.addFilter(name_event)
    ours = logging.getLogger("pipeswitch")
    ours.addHandler(handler)
    ours.setLevel(logging.INFO)
    ours.propagate = False


class WorkerProcess:
    """State shared by the two threads: channels, gate, and the job's host."""

    def __init__(
        self,
        settings: worker_msg.WorkerSettings,
        task: Channel,
        control: Channel,
        control_page: int,
        doorbells: Sequence[int],
    ) -> None:
        self._settings, self._limits = settings, settings.limits
        self._task = task
        self._control = control
        self._control_page = control_page
        self._bells = doorbells
        self._view: WorkerDevice  # ``map_memory`` sets this and the next two
        self._pool: MappedPool
        self._programs: Programs
        self._gate = Gate(self._on_parked)
        self._host: JobHost | None = None
        self._stop_asked_at_ms = 0.0
        self._next_slot = 0
        self._job_op_id = 0
        self._job_known = threading.Event()
        self._is_confined = False
        self._freed = FreedMemory()

    def map_memory(self, descriptors: Sequence[int]) -> None:
        """Map the pool and the arena; ``descriptors`` has the pool's first, then the arena's."""
        pool, *arena = descriptors
        kind = kind_of(self._settings.device)
        self._view = kind.open_view(
            self._settings, arena, control_page=self._control_page, doorbells=self._bells
        )
        is_hidden = kind.is_host
        self._pool = MappedPool(pool, self._limits.pool_bytes, is_hidden=is_hidden)
        self._view.pin(self._pool.address, self._pool.size_bytes)
        self._programs = Programs(self._view)

    def start(self) -> None:
        threading.Thread(target=self._listen_or_leave, name="termination", daemon=True).start()
        reach("worker.start")
        if self._limits.separates_tenants:
            warm_up()  # now, so that no tenant waits for it
        self._task.send(worker_msg.WorkerReady(slot=self._settings.slot, pid=os.getpid()))
        if not self._limits.separates_tenants:  # otherwise ``BindTenant`` brings the memory later
            threading.Thread(target=self._prefault, name="prefault", daemon=True).start()

    def _prefault(self) -> None:
        """Map the arena's pages before the first switch, so that no request waits 95 ms per GiB."""
        for offset in range(0, self._limits.arena_bytes, PREFAULT_BYTES):
            size = min(PREFAULT_BYTES, self._limits.arena_bytes - offset)
            self._view.prefault(offset, size)

    # -- main thread ---------------------------------------------------------------------------

    def serve(self) -> int:
        """Receive and execute one task at a time until ``Exit``; return the exit status."""
        self._task.set_limit(REST_S)
        while True:
            try:
                received = self._task.receive()
            except BlockingIOError:
                self._freed.give_back(time.monotonic())
                if not self._limits.separates_tenants:  # else perhaps no memory is mapped yet
                    self._view.trim()
                continue
            if received is None:
                os._exit(0)  # the controller is gone, so nobody needs a clean exit
            message, descriptors = received
            match message:
                case worker_msg.BindTenant():
                    self.map_memory(descriptors)
                case worker_msg.RunInference():
                    self._make_ready_for(message, descriptors)
                    slot, op_id = self._settings.slot, message.op_id
                    # A task that was taken back loads no program, and opens no memory.
                    is_taken_back = self._view.control_page.is_taken_back(slot, op_id)
                    if is_taken_back or not infer(
                        message, self._programs, self._pool, self._view, self._task, slot
                    ):
                        captured, self._programs.captured = self._programs.captured, ()
                        model = message.model
                        self._task.send(
                            worker_msg.WorkerClean(op_id=op_id, model=model, captured=captured)
                        )
                case worker_msg.PrepareModel():
                    self._make_ready_for(message, descriptors)
                    self._prepare(message)
                case worker_msg.ForgetModel(model=model):
                    self._programs.remove(model)
                case worker_msg.RunJob():
                    return self._run_job(message, descriptors)
                case Exit():
                    return 0
                case _:
                    raise ValueError(f"a worker cannot take a {type(message).__name__}")

    def _make_ready_for(
        self, message: worker_msg.RunInference | worker_msg.PrepareModel, descriptors: list[int]
    ) -> None:
        """Enter the sandbox before any part of a client's program is examined."""
        if message.is_code:
            if self._is_confined:
                raise ValueError(f"{message.model} is code, but this worker is in the sandbox")
            for environment in descriptors:
                take_environment(environment)
            return
        if descriptors:
            self._programs.take_files(message.model, descriptors)
        if self._limits.is_sandboxed and not self._is_confined:
            if not self._limits.separates_tenants:
                warm_up()
            if not are_enabled():
                confine_worker(self._limits.task_memory_bytes)
            self._is_confined = True

    def _prepare(self, message: worker_msg.PrepareModel) -> None:
        error = ""
        try:
            reach("worker.prepare")
            self._programs.prepare(message)
        except Exception as problem:  # the model's own code: the request will load it again
            error = f"{type(problem).__name__}: {problem}"[:2000]
        if message.shapes and not error:
            self._programs.warm_up(message)
            self._view.trim()
        self._task.send(
            worker_msg.ModelPrepared(
                model=message.model, digest=message.digest, plan=message.plan, error=error
            )
        )

    def _run_job(self, message: worker_msg.RunJob, descriptors: Sequence[int]) -> int:
        """Run a training script; this process ends afterwards.

        A script leaves modules, threads and patches behind. A fresh fork costs 10 ms, so a worker
        that ran user code is replaced instead of cleaned (ADR 0005).
        """
        if self._is_confined:
            raise ValueError(f"{message.job} is a script, but this worker is in the sandbox")
        self._programs.clear()
        self._view.leave()
        self._view.unmap_inputs()
        *descriptors, environment = descriptors
        take_environment(environment)
        self._host = JobHost(message, self._task, self._view, descriptors)
        if message.activation_bytes:
            self._host.tiles = JOBS.load("activation_budget")(
                self._view, self._settings.slot, message.activation_bytes
            )
        self._keep_in_step()
        self._job_op_id = message.op_id
        self._job_known.set()
        if message.turn:
            self._gate.grant(message.turn)
        self._gate.after_boundary = give_freed_memory_back
        self._gate.on_back = self._on_back
        try:
            self._host.end(run_script(message, self._host, self._gate))
        finally:
            if Pacer.current is not None:
                Pacer.current.release(for_good=True)  # the process's exit waits for the device
        return 0

    def _keep_in_step(self) -> None:
        """Limit how far the script runs ahead of the device, and run backward in this thread."""
        Pacer.current = self._view.pacer()
        if Pacer.current is not None:
            import torch

            torch.autograd.set_multithreading_enabled(False)
            self._gate.holds = Pacer.current.holds
            self._gate.before_leave, self._gate.on_enter = Pacer.current.leave, Pacer.current.enter

    # -- termination thread --------------------------------------------------------------------

    def _listen_or_leave(self) -> None:
        """Listen; on any error end the process at once, because a worker needs this thread.

        For example, the device context may break while the thread waits for the queue to drain.
        """
        try:
            self._listen()
        except BaseException:
            sys.stderr.write(escape_control_chars(traceback.format_exc()))
            sys.stderr.flush()
            os._exit(STATUS_FAILED)

    def _listen(self) -> None:
        """Handle messages of the signal channel; exit at end of file: the controller is gone."""
        while True:
            received = self._control.receive()
            if received is None:
                os._exit(0)
            message, descriptors = received
            if isinstance(message, Ping):
                self._control.send(Pong(op_id=message.op_id))
            else:
                self._obey(message, descriptors)

    def _obey(self, message: Message, descriptors: Sequence[int]) -> None:
        # A signal may overtake its RunJob on the other channel: wait until the job is known.
        self._job_known.wait()
        host = self._host
        assert host is not None
        if getattr(message, "op_id", self._job_op_id) != self._job_op_id:
            return
        reach("job.obey")
        if Pacer.current is not None and isinstance(message, worker_msg.OPENING):
            Pacer.current.release()
        match message:
            case worker_msg.StopTask():
                self._stop_asked_at_ms = now_ms()
                self._next_slot = message.next_slot
                self._gate.request_stop(
                    message.turn, message.next_turn, at_boundary=message.at_boundary
                )
            case worker_msg.GrantTurn():
                self._gate.grant(message.turn)
            case worker_msg.EvictTask():
                self._gate.request_evict()
                host.wake()
            case worker_msg.LeaseGranted() | worker_msg.LeaseRefused() | worker_msg.HostGranted():
                host.lease_answered(message, descriptors)
            case SliceRead() | StepCommitted():
                host.commit_answered(message)
            case worker_msg.HideSlice(swap_id=swap_id):
                self._gate.request_hide(functools.partial(self._hide, swap_id))
                host.call()
            case worker_msg.ShowSlice(offset_bytes=offset):
                self._view.show_slice(offset)
                self._gate.request_hide(None)
            case worker_msg.PublishAnswered() | worker_msg.PublishCopied():
                host.publish_answered(message)
            case _:
                raise ValueError(f"a worker cannot obey a {type(message).__name__}")

    def _on_back(self, turn: int, is_blocked: bool) -> None:
        self._control.send(
            worker_msg.JobReady(op_id=self._job_op_id, turn=turn, is_blocked=is_blocked)  # type: ignore[arg-type]
        )

    def _hide(self, swap_id: OpId) -> None:
        """Stop using the slice; called while the main thread waits, with the gate's lock held."""
        self._view.synchronize()
        self._view.hide_slice()
        reach("job.hidden")
        # On the task's channel: a CommitStep that the main thread has sent arrives before it.
        self._task.send(worker_msg.SliceHidden(op_id=self._job_op_id, swap_id=swap_id))  # type: ignore[arg-type]
        give_freed_memory_back()

    def _on_parked(self, turn: int, next_turn: int, where: Where) -> None:
        """Give the device to the next task; the acknowledging thread calls this with the lock."""
        if Pacer.current is None or not Pacer.current.holds or self._gate.drains:
            self._view.synchronize()
        else:
            Pacer.current.hold()
            if Pacer.current.has_queue():
                where = "stream"  # the script may wait for its queue, so it is not away
        reach("job.park")
        parked_at_ms = now_ms()  # before the wake-up: the woken worker may take this thread's core
        if next_turn:
            self._view.raise_turn(next_turn, self._next_slot)
        reach("job.parked")
        self._control.send(
            worker_msg.JobParked(
                op_id=self._job_op_id,  # type: ignore[arg-type]
                turn=turn,  # type: ignore[arg-type]
                next_turn=next_turn,  # type: ignore[arg-type]
                where=where,
                asked_at_ms=self._stop_asked_at_ms,
                parked_at_ms=parked_at_ms,
            )
        )
