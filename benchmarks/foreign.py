"""Programs of other virtual environments: found, started, stopped while others are measured."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from .trials import Run

RIVALS_FOLDER: Final = "PIPESWITCH_BENCH_RIVALS"
PEERS_FOLDER: Final = "PIPESWITCH_BENCH_PEERS"
START_S: Final = 300.0
END_S: Final = 20.0
POLL_S: Final = 0.05


def usable(bench: Run, variable: str, names: Sequence[str]) -> list[str]:
    """Return those of these packages that are installed; say that the others are skipped."""
    folder = Path(os.environ.get(variable) or os.devnull)
    found = [name for name in names if [*folder.glob(f"lib/python*/site-packages/{name}")]]
    why = f"{variable} names no virtual environment that has it"
    bench.skip({name: why for name in names if name not in found})
    return found


def python_of(variable: str) -> str:
    """Return the interpreter of the virtual environment that a variable names."""
    return str(Path(os.environ[variable], "bin", "python"))


def environment() -> dict[str, str]:
    """Return this process's environment without its own path of packages."""
    return {key: text for key, text in os.environ.items() if key != "PYTHONPATH"}


def free_port() -> int:
    """Return a TCP port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def family(root: int) -> dict[int, int]:
    """Return a process and all that descend from it, each with its ticks of processor time."""
    found: dict[int, tuple[int, int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            words = path.read_text("utf-8").rpartition(")")[2].split()
            found[int(path.parent.name)] = int(words[1]), int(words[11]) + int(words[12])

    def descends(pid: int) -> bool:
        while pid != root and pid in found:
            pid, _ = found[pid]
        return pid == root

    return {pid: ticks for pid, (_, ticks) in found.items() if descends(pid)}


def send(process: subprocess.Popen[Any], number: int) -> None:
    """Send a signal to a program and all its descendants, whatever sessions they are in."""
    for pid in family(process.pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


@contextlib.contextmanager
def started(
    command: Sequence[str],
    answers: Callable[[subprocess.Popen[str]], object],
    env: Mapping[str, str],
    *,
    has_lines: bool = False,
    folder: Path | None = None,
) -> Iterator[subprocess.Popen[str]]:
    """Start a program, wait until ``answers`` raises nothing, and stop it with SIGSTOP.

    Args:
        has_lines: it is asked by lines at its standard input and answers at its output.
    """
    pipe = subprocess.PIPE if has_lines else subprocess.DEVNULL
    process = subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True, bufsize=1,
        start_new_session=True, env=env, cwd=folder,
    )  # fmt: skip
    try:
        until_s = time.monotonic() + START_S
        while True:
            try:
                answers(process)
                break
            except (OSError, RuntimeError, ValueError):
                if process.poll() is not None or time.monotonic() > until_s:
                    raise RuntimeError(f"it did not start: {command}") from None
                time.sleep(POLL_S)
        send(process, signal.SIGSTOP)
        yield process
    finally:
        _end(process)


def _end(process: subprocess.Popen[Any]) -> None:
    """Ask it to end, so that it leaves no shared memory; then kill what is left of it."""
    send(process, signal.SIGCONT)
    members = {process.pid, *family(process.pid)}
    with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(END_S)
    for pid in members:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()
