"""Rival systems: PipeSwitch as published, implemented again here, and variants of it.

A rival has real processes: a coordinator that owns store and arena and serves one client, and two
workers. One worker trains when a request arrives. A request runs as in the published system:

1. The client sends the input to the coordinator, pickled.
2. The coordinator orders the training worker to terminate. After every leaf module, forward and
   backward, the worker checks for this order, with the device synchronised (the cpu device always
   is). It acknowledges the order, and loses its progress: the next training starts from scratch.
3. Then the coordinator sends the input, pickled again, to the standby worker, and starts copying.
4. All weights are copied, even those in the arena. For each group, the host waits for the copy and
   then sends a message on a pipe. The worker's hook reads it before the group's first layer.
5. The output travels back the same way, pickled.

``Style`` changes one or two of these points. Only processes of this benchmark exchange pickles.
"""

from __future__ import annotations

import multiprocessing
from dataclasses import dataclass, field
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from typing import Any, Final

import numpy as np

from .lane import Lane, packed
from .setting import Baseline, Setting, Style
from .trials import Numbers, now_ms

PRELOADED: Final = "benchmarks.rival_worker"
WORKERS: Final = 2  # one active, one standby
START_TIMEOUT_S: Final = 120.0


PUBLISHED: Final = Style("pipeswitch-style")
SERIAL: Final = Style("serial", transfer="whole")
TO_DEVICE: Final = Style("to-device", transfer="tensors")
ONE_PROCESS: Final = Style("one-process", workers="one")
TWO_PROCESSES: Final = Style("two-processes", workers="new")
STYLES: Final = (PUBLISHED, SERIAL, TO_DEVICE, ONE_PROCESS, TWO_PROCESSES)


class Rival(Baseline):
    """Baseline that sends requests to the coordinator of a rival with one ``Style``."""

    def __init__(self, setting: Setting, style: Style = PUBLISHED) -> None:
        self.name = style.name
        self._inputs = setting.arrays()
        context = multiprocessing.get_context("spawn")
        self._client, theirs = context.Pipe()
        arguments = (setting.order(), style, theirs)
        self._process = context.Process(target=coordinate, args=arguments, name=style.name)
        self._process.start()
        theirs.close()
        self._receive()  # the coordinator is ready

    def prepare(self) -> None:
        """Start training; return when the first steps have been computed."""
        self._client.send(("train", None))
        self._receive()

    def measure(self) -> Numbers:
        """Measure a request by this process's clock, and parts of it in coordinator and worker."""
        began_ms = now_ms()
        self._client.send(("infer", self._inputs))
        outputs, parts = self._receive()
        total_ms = now_ms() - began_ms
        numbers: Numbers = {"total_ms": total_ms} | parts
        return numbers | {"checksum": float(outputs[0].sum(dtype=np.float64))}

    def close(self) -> None:
        """End the coordinator and its workers."""
        self._client.close()  # the coordinator reads the end of file and leaves; so do its workers
        self._process.join(START_TIMEOUT_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._process.close()

    def _receive(self) -> Any:
        try:
            return self._client.recv()
        except EOFError:
            self._process.join()
            code = self._process.exitcode
            raise RuntimeError(f"{self.name}'s coordinator ended with status {code}") from None


@dataclass
class WorkerHandle:
    """Worker process with three pipes, as published: for work, termination and arrived groups."""

    process: Any  # a process of a multiprocessing context
    work: Connection
    stop: Connection
    groups: Connection
    is_training: bool = field(default=False)

    def end(self) -> None:
        """Kill the process without waiting for its work, because it has no state to keep."""
        self.process.kill()
        self.process.join()
        for pipe in (self.work, self.stop, self.groups):
            pipe.close()


def coordinate(order: dict[str, Any], style: Style, client: Connection) -> None:
    """Serve one client until it closes the connection."""
    coordinator = Coordinator(order, style)
    client.send("ready")
    try:
        while (command := _next_order(client)) is not None:
            verb, inputs = command
            if verb == "train":
                coordinator.train()
                client.send("training")
            else:
                client.send(coordinator.infer(inputs))
    finally:
        coordinator.close()


def _next_order(client: Connection) -> tuple[str, Any] | None:
    """Return the client's next order, or None if the client has closed the connection.

    The end of a worker's pipe, in contrast, raises EOFError in the caller.
    """
    try:
        verb, inputs = client.recv()
    except EOFError:
        return None
    return verb, inputs


class Coordinator:
    """Scheduler and memory daemon in one process, as in the published system."""

    def __init__(self, order: dict[str, Any], style: Style) -> None:
        self._order, self._style = order, style
        self._manifest, weights = packed(order["packed_path"])
        self._lane = Lane(self._manifest.total_bytes)
        self._lane.fill(weights, self._manifest)
        self._context: BaseContext = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([PRELOADED])
        count = 1 if style.workers == "one" else WORKERS
        self._workers = [self._start() for _ in range(count)]
        for worker in self._workers:
            worker.work.recv()  # ready
        self._active = 0

    def train(self) -> None:
        """Start training in the next worker; return after the first steps."""
        worker = self._next()
        worker.work.send(("train", None))
        worker.work.recv()
        worker.is_training = True

    def infer(self, inputs: list[Any]) -> tuple[list[Any], Numbers]:
        """Serve one request (steps 2 to 5 in the module's docstring); return outputs and times."""
        received_ms = now_ms()
        fresh = self._start() if self._style.workers == "new" else None
        old = self._workers[self._active]
        if old.is_training:
            old.stop.send("terminate")
            old.stop.recv()
        acknowledged_ms = now_ms()
        if fresh is not None:
            fresh.work.recv()
        worker = fresh or self._next()
        worker.work.send(("infer", inputs))
        copy_began_ms = now_ms()
        self._transmit(worker)
        copy_ms = now_ms() - copy_began_ms
        outputs, ended_at_ms, numbers = worker.work.recv()
        if old.is_training:  # the old worker has cleaned up while the request was served
            if worker is not old:
                old.work.recv()
            old.is_training = False
        if fresh is not None:
            fresh.end()
        return outputs, numbers | {
            "acknowledge_ms": acknowledged_ms - received_ms,
            "start_ms": copy_began_ms - acknowledged_ms,
            "copy_ms": copy_ms if self._style.transfer != "tensors" else numbers["copy_ms"],
            "wait_ms": ended_at_ms - received_ms - numbers["compute_ms"],
        }

    def close(self) -> None:
        """End the workers, and reap the fork server, so that its CPU time counts as ours."""
        for worker in self._workers:
            worker.end()
        forkserver._forkserver._stop()  # type: ignore[attr-defined]

    def _transmit(self, worker: WorkerHandle) -> None:
        """Copy, wait for the copy and notify the worker, for each group or for the whole model."""
        match self._style.transfer:
            case "groups":
                for index, group in enumerate(self._manifest.groups):
                    self._lane.copy(group.offset_bytes, group.size_bytes)
                    worker.groups.send(index)
            case "whole":
                self._lane.copy(0, self._manifest.total_bytes)
                worker.groups.send(0)
            case "tensors":
                pass  # the worker copies the tensors

    def _next(self) -> WorkerHandle:
        self._active = (self._active + 1) % len(self._workers)
        return self._workers[self._active]

    def _start(self) -> WorkerHandle:
        pairs = [self._context.Pipe() for _ in range(3)]
        pipes = (theirs for _, theirs in pairs)
        arguments = (self._order, self._style, self._lane.paths(), *pipes)
        process = self._context.Process(target=_work, args=arguments)  # type: ignore[attr-defined]
        process.start()
        for _, theirs in pairs:
            theirs.close()
        work, stop, groups = (ours for ours, _ in pairs)
        return WorkerHandle(process, work, stop, groups)


def _work(*arguments: Any) -> None:
    """Run the worker. Its import is in this function, to keep torch out of the coordinator."""
    from .rival_worker import main

    main(*arguments)
