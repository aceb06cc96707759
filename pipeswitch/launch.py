"""Single-threaded fork server: the only module that imports ``pipeswitch.workers`` and
``pipeswitch.memory_daemon``.

It imports torch once (seconds) and then forks children in milliseconds; modules that only exports
and optimizers need are imported later. It never runs a tensor operation: after one OpenMP region a
forked child would hang for ever (ADR 3). It never opens a CUDA device, either. A child closes all
descriptors except its own: an inherited end of a socket would hide the end of file by which other
processes notice a death.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import selectors
import signal
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from typing import Final, NoReturn

from .base.extras import PROCESSES, functions
from .base.failpoints import enable, reach
from .ipc.channel import Channel, channel_from, decode_message, wake_when_orphaned
from .ipc.messages.base import Exit, Message
from .ipc.messages.builder import BuildSettings
from .ipc.messages.daemon import DaemonSettings
from .ipc.messages.fork_server import ChildExited, Fork, Forked, ForkServerReady
from .ipc.messages.helper import HelperSettings
from .ipc.messages.worker import WorkerSettings
from .sandbox.environment import take_environment
from .sandbox.system_calls import PR_SET_NAME

KEEP_BELOW: Final = 3  # stdin, stdout, stderr

FIRST: Final = (
    "torch",
    "torch.fx.experimental.symbolic_shapes",  # for the checks of a program's kernels
    "pipeswitch.workers.main",
    "pipeswitch.programs.compiler.build_process",
    "pipeswitch.programs.compiler.program",
)
ADDED: Final = ("PROCESSES", "RUNNERS", "SETTINGS")  # seams; a sandboxed worker cannot import
LATER: Final = ("torch._dynamo", "torchvision")
"""Imports of an export and of a process's first optimizer; they take half as long as ``FIRST``."""

IDLE_S: Final = 10.0
"""Idle time after which ``LATER`` is imported. A script that starts earlier imports it itself,
which is faster than waiting for the fork server."""


def set_process_name(name: str) -> None:
    """Set the name of this process's main thread in ``ps``, cut to 15 characters."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode()[:15], 0, 0, 0)


def command(descriptor: int) -> list[str]:
    """Return the command line of the fork server; ``-P`` keeps the current folder off its path."""
    return [sys.executable, "-P", "-m", "pipeswitch.launch", str(descriptor)]


def fork_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for a process that forks: OpenBLAS starts no threads in it, and texts
    have the same hashes in each server, so that a set has the same order in each life of a job."""
    return {"OPENBLAS_NUM_THREADS": "1", "PYTHONHASHSEED": "0", **environment}


class ForkServer:
    """Server that forks on request, reaps children and reports their exits, on one thread."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._children: dict[int, int] = {}  # pidfd -> pid
        self._is_whole = False  # True once LATER is imported
        self._selector = selectors.DefaultSelector()
        self._selector.register(channel, selectors.EVENT_READ)

    def run(self) -> None:
        """Serve until ``Exit`` arrives or the controller is gone."""
        while True:
            ready = self._selector.select(None if self._is_whole else IDLE_S)
            if not ready:
                self._import_later()
            for key, _ in ready:
                if key.fd == self._channel.fileno():
                    if not self._serve():
                        return
                else:
                    self._reap(key.fd)

    def _serve(self) -> bool:
        received = self._channel.receive()
        if received is None:
            return False
        message, descriptors = received
        if isinstance(message, Exit):
            return False
        if isinstance(message, Fork):
            self._fork(message, descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        return True

    def _fork(self, order: Fork, descriptors: Sequence[int]) -> None:
        reach("fork.order")
        settings = decode_message(order.settings)
        if isinstance(settings, BuildSettings) and not self._is_whole:
            from .programs.compiler.build_process import exports

            if exports(settings):
                self._import_later()
        pid = 0
        try:
            pid = os.fork()
            if pid == 0:
                _child(order.name, settings, descriptors)
            pidfd = os.pidfd_open(pid)
            self._children[pidfd] = pid
            self._selector.register(pidfd, selectors.EVENT_READ)
        except OSError:  # processes, descriptors or memory are short; the controller retries
            traceback.print_exc()
            if pid:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            pid = 0
        self._channel.send(Forked(ticket=order.ticket, pid=pid))

    def _import_later(self) -> None:
        self._is_whole = True
        try:
            import_for_children(LATER)
        except Exception:  # a build or script that needs the module will report the error
            traceback.print_exc()

    def _reap(self, pidfd: int) -> None:
        pid = self._children.pop(pidfd)
        self._selector.unregister(pidfd)
        os.close(pidfd)
        with contextlib.suppress(OSError):  # also end the processes that the child started; the
            os.killpg(pid, signal.SIGKILL)  # group's number is not reused before ``waitpid``
        _, status = os.waitpid(pid, 0)
        self._channel.send(ChildExited(pid=pid, status=os.waitstatus_to_exitcode(status)))


def import_for_children(names: Sequence[str]) -> None:
    """Import modules, and exclude torch's 190,000 objects from garbage collections of the children.

    Otherwise a collection would take 0.2 s in the middle of a task, and each child would copy the
    pages of these objects.
    """
    for name in names:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()


def _child(name: str, settings: Message, descriptors: Sequence[int]) -> NoReturn:
    """Run the forked child with only its own descriptors, then exit without unwinding the stack."""
    status = 70
    try:
        reach("fork.child")
        os.setpgid(0, 0)  # processes that it starts end with it (``_reap``)
        close_others(descriptors)
        wake_when_orphaned()
        set_process_name(name)
        status = _run(settings, descriptors)
    except BaseException:
        traceback.print_exc()
    finally:
        _leave(status)


def _leave(status: int) -> NoReturn:
    """Exit without unwinding, because shutting torch down takes a second."""
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


def close_others(descriptors: Sequence[int]) -> None:
    """Close all descriptors except these and the standard streams."""
    lowest = KEEP_BELOW
    for descriptor in sorted(descriptors):
        os.closerange(lowest, descriptor)
        lowest = descriptor + 1
    os.closerange(lowest, os.sysconf("SC_OPEN_MAX"))


def _run(settings: Message, descriptors: Sequence[int]) -> int:
    match settings:
        case WorkerSettings():
            from .workers.main import run as run_worker

            return run_worker(settings, descriptors)
        case DaemonSettings():
            from .memory_daemon.main import run as run_daemon

            run_daemon(settings, channel_from(descriptors[0]), descriptors[1:])
            return 0
        case BuildSettings():
            from .programs.compiler.build_process import run as run_builder

            channel, *environment = descriptors
            for descriptor in environment:
                take_environment(descriptor)
            return run_builder(settings, channel_from(channel))
        case HelperSettings(kind=kind, values=values):
            channel, *rest = descriptors
            return int(PROCESSES.load(kind)(values, channel_from(channel), rest))
        case _:
            raise ValueError(f"cannot fork for a {type(settings).__name__}")


def main(descriptor: int) -> None:
    """Import the modules that children need, report readiness, serve; exit at the end."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the controller decides when a process ends
    wake_when_orphaned()
    set_process_name("pipeswitch-fork")
    channel = channel_from(descriptor)
    enable(os.environ)
    began = time.monotonic()
    added = [place for table in ADDED for place in functions(table).values()]
    import_for_children([*FIRST, *(place.partition(":")[0] for place in added)])
    channel.send(ForkServerReady(pid=os.getpid(), import_ms=(time.monotonic() - began) * 1000.0))
    status = 70
    try:
        ForkServer(channel).run()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        _leave(status)


if __name__ == "__main__":
    main(int(sys.argv[1]))
