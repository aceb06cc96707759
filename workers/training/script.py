"""Run a user's training script in this worker and report how it ended."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib
import logging
import os
import runpy
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Final, Literal, NoReturn

from pipeswitch import job as job_api
from pipeswitch.base.errors import InvalidInput, TaskPreempted
from pipeswitch.base.failpoints import reach
from pipeswitch.base.machine import available_bytes
from pipeswitch.base.plain_files import open_plain
from pipeswitch.ipc.gate import Gate
from pipeswitch.ipc.messages.base import OpId
from pipeswitch.ipc.messages.worker import JobEnded, RunJob

from .entropy import repeatable_seeds
from .host import JobHost
from .script_files import SUFFIX
from .session import TrainingSession

log = logging.getLogger(__name__)

Outcome = Literal["done", "preempted", "failed"]
KEPT_BYTES: Final = 1 << 30  # malloc keeps blocks and free heap up to this size
SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
STOP_ORDER_S: Final = 2.0  # the server's order to stop follows within this time, also under load
MALLOPT_CODES: Final = {"M_MMAP_THRESHOLD": -3, "M_TRIM_THRESHOLD": -1}  # malloc.h

_forking = threading.local()  # ``mask`` is the signal mask to restore after a fork


def run_script(message: RunJob, host: JobHost, gate: Gate) -> JobEnded:
    """Run ``message.spec.entry`` from its start. Only this function catches ``TaskPreempted``."""
    session = TrainingSession(
        host,
        gate,
        commit_every_ms=message.commit_every_ms,
        files=Path(message.log_path).with_suffix(SUFFIX) if message.log_path else None,
        defaults=message.spec.defaults,
    )
    job_api._install(session)
    outcome: Outcome = "done"
    kind, text = "", ""
    try:
        _redirect_output(message.log_path)
        _let_children_be_ended()
        keep_freed_memory()
        reach("job.start")
        session.begin()
        saved = session.place.saved
        host.resumes_at(0 if saved is None else saved.position.step)
        with (
            _clean_exit(),
            _server_stops_first(gate),
            _end_by_exit(session, host, message.op_id),
            repeatable_seeds(),
        ):
            os.environ.update(dict(one.split("=", 1) for one in message.spec.env))
            run_entry(message.spec.entry, message.spec.args, message.spec.folder)
        if not gate.is_evicting:
            _join_threads()
        if gate.is_evicting:
            gate.check()  # raises TaskPreempted; the job resumes near its end
        session.finish()
    except TaskPreempted:
        reach("job.evicted")
        outcome = "preempted"
    except BaseException as error:  # user code may raise anything, even KeyboardInterrupt
        outcome, kind, text = "failed", type(error).__name__, str(error)[:2000]
        if isinstance(error, SystemExit):
            text = f"exit status {error.code}"[:2000]
        elif not gate.is_evicting:
            _print_error(error)
            session.fail()
        # Perhaps the script caught TaskPreempted and raised this instead, or the signal that stops
        # the server has ended a child process of the script.
        if gate.is_evicting:
            outcome = "preempted"
    finally:
        session.close()
    if outcome != "preempted":
        _run_exit_hooks()
    _flush()
    return JobEnded(
        op_id=message.op_id, outcome=outcome, step=session.step, error_type=kind, error_text=text
    )


def _print_error(error: BaseException) -> None:
    """Print the traceback as for the plain script: without this project's frames."""
    frames = error.__traceback__
    while frames and frames.tb_frame.f_code.co_filename.startswith((__file__, "<frozen ")):
        frames = frames.tb_next
    traceback.print_exception(error.with_traceback(frames))


@contextlib.contextmanager
def _clean_exit() -> Iterator[None]:
    """Treat ``sys.exit(0)`` as the normal end of a script."""
    try:
        yield
    except SystemExit as leaving:
        if leaving.code not in (None, 0):
            raise


@contextlib.contextmanager
def _server_stops_first(gate: Gate) -> Iterator[None]:
    """Call the script's handler of a signal in ``SIGNALS`` only if the server does not stop.

    A service manager sends the signal to the server and all its processes. If the script then left
    its loop, the job would count as done. So this thread first waits for the server's own order.
    """
    ours: Any = signal  # mypy knows the types of its functions
    install, show, pid = ours.signal, ours.getsignal, os.getpid()
    handlers: dict[int, Any] = dict.fromkeys(SIGNALS, _stay)  # the script's

    def wait_first(number: int, frame: FrameType | None) -> None:
        ends_at_s = time.monotonic() + STOP_ORDER_S
        while not gate.is_evicting and time.monotonic() < ends_at_s:
            time.sleep(0.01)  # this thread may hold any lock, so it must not wait for one
        if not gate.is_evicting:
            handlers[number](number, frame)

    def shown(number: int) -> Any:
        handler = show(number)
        return handlers[number] if handler is wait_first else handler

    def take(number: int, handler: Any) -> Any:
        former = shown(number)
        if number in SIGNALS and callable(handler) and os.getpid() == pid:
            handlers[number], handler = handler, wait_first
        install(number, handler)
        return former

    for number in SIGNALS:
        take(number, _stay)
    ours.signal, ours.getsignal = take, shown
    try:
        yield
    finally:
        ours.signal, ours.getsignal = install, show
        for number in SIGNALS:
            install(number, _stay)


@contextlib.contextmanager
def _end_by_exit(session: TrainingSession, host: JobHost, op_id: OpId) -> Iterator[None]:
    """Make ``os._exit(0)`` the end of a script that has left its loops, not a death to recover."""
    leave, pid = os._exit, os.getpid()

    def end(status: int) -> NoReturn:
        is_own = os.getpid() == pid and threading.current_thread() is threading.main_thread()
        if is_own and status == 0 and not session.is_in_loop:
            session.finish()
            _flush()
            host.end(JobEnded(op_id=op_id, outcome="done", step=session.step))
        leave(status)

    os._exit = end
    try:
        yield
    finally:
        os._exit = leave


def run_entry(entry: str, args: Sequence[str], folder: str) -> None:
    """Run ``SCRIPT.py`` or ``package.module:main`` as if a user had started it in ``folder``.

    Raises:
        InvalidInput: the folder is gone.
    """
    path = Path(entry).resolve()
    own_folder = str(path.parent) if entry.endswith(".py") else folder
    try:
        if folder or own_folder:
            os.chdir(folder or own_folder)
    except OSError as error:
        raise InvalidInput(
            f"the job's folder {folder or own_folder!r} cannot be entered: {error.strerror}",
            hint="make it again, or run pipeswitch train in another one",
        ) from None
    if own_folder:
        sys.path.insert(0, own_folder)
    if entry.endswith(".py"):
        sys.argv = [str(path), *args]
        runpy.run_path(str(path), run_name="__main__")
        return
    module_name, _, attribute = entry.partition(":")
    sys.argv = [entry, *args]
    function = getattr(importlib.import_module(module_name), attribute or "main")
    function()


def keep_freed_memory() -> None:
    """Make this process reuse freed memory instead of returning it; no-op without glibc.

    A step frees memory that the next step allocates again. By default glibc returns large blocks,
    and the top of the heap, to the kernel, so each step faults these pages in again. An MLP of
    4 x 512 x 512 with batch 448 has up to 800 such faults in each step: 3 % of its time, and as
    much variation between runs. The process ends with its job and then returns all memory. CUDA's
    caching allocator keeps freed blocks for the same reason.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        log.debug("heap=default cause=no mallopt")
        return
    for name, code in MALLOPT_CODES.items():
        if not mallopt(code, KEPT_BYTES):
            log.debug("heap=%s refused", name)


def give_freed_memory_back() -> None:
    """Return freed memory to the kernel between two steps if memory is short.

    For a step with 190 MiB of activations it costs 75 ms of CPU to return the memory and to fault
    it in again (glibc 2.36), so the process keeps it while enough memory is available.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None and available_bytes() < KEPT_BYTES:
        trim(0)


def _join_threads() -> None:
    """Wait for the script's threads, as the interpreter does at exit: a thread may train."""
    shutdown = getattr(threading, "_shutdown", None)  # private name; it also ends idle thread pools
    if shutdown is not None:
        shutdown()


def _run_exit_hooks() -> None:
    """Run the script's ``atexit`` hooks, as a worker exits without the interpreter's shutdown."""
    run = getattr(atexit, "_run_exitfuncs", None)
    if run is not None:
        with contextlib.suppress(BaseException):  # atexit has printed the traceback
            run()


def _let_children_be_ended() -> None:
    """Allow ``SIGNALS`` to end the script's child processes; this process ignores them.

    An ignored signal stays ignored across exec, so a pool that ends its children with SIGTERM would
    wait for ever. So this process installs a handler that does nothing: exec resets the signal to
    its default, and a forked child restores the default itself. From the fork until then, the
    signals are blocked.
    """
    for number in SIGNALS:
        signal.signal(number, _stay)
        signal.siginterrupt(number, False)
    os.register_at_fork(
        before=_hold_signals, after_in_parent=_take_signals, after_in_child=_obey_signals
    )


def _stay(number: int, frame: object) -> None:
    """Ignore the signal, because the controller decides when a process exits."""


def _hold_signals() -> None:
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


def _take_signals() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _obey_signals() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    _take_signals()


def _redirect_output(path: str) -> None:
    """Redirect stdout and stderr of the job, including its C code, to its log."""
    _flush()
    descriptor = open_plain(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def _flush() -> None:
    """Flush stdout and stderr; a full disk may lose text, but not the job's outcome."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
