"""Programs in other virtual environments, each stopped while another program is measured."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import psutil

from .trials import Arm, Numbers, Run

RIVALS_FOLDER: Final = "PIPESWITCH_BENCH_RIVALS"
PEERS_FOLDER: Final = "PIPESWITCH_BENCH_PEERS"
START_S: Final = 300.0
END_S: Final = 20.0
POLL_S: Final = 0.05


def usable(bench: Run, variable: str, names: Sequence[str]) -> list[str]:
    """Return the packages in ``variable``'s virtual environment; report the others as skipped."""
    folder = Path(os.environ.get(variable) or os.devnull)
    present = [name for name in names if [*folder.glob(f"lib/python*/site-packages/{name}")]]
    why = f"{variable} names no virtual environment that has it"
    bench.skip({name: why for name in names if name not in present})
    return present


def python_of(variable: str) -> str:
    """Return the Python interpreter of the virtual environment that ``variable`` names."""
    return str(Path(os.environ[variable], "bin", "python"))


def environment() -> dict[str, str]:
    """Return this process's environment without PYTHONPATH."""
    return {key: text for key, text in os.environ.items() if key != "PYTHONPATH"}


def free_port() -> int:
    """Return a TCP port of 127.0.0.1 on which no program listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def family(root: int) -> list[psutil.Process]:
    """Return a process and all its descendants; empty if the process has ended."""
    try:
        one = psutil.Process(root)
        return [one, *one.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def used_ms(root: int) -> float:
    """Return the processor time in ms that a process and its descendants have used."""
    total_ms = 0.0
    for one in family(root):
        with contextlib.suppress(psutil.NoSuchProcess):
            total_ms += sum(one.cpu_times()[:2]) * 1e3
    return total_ms


def send(processes: Sequence[psutil.Process], number: int) -> None:
    """Send a signal to each process that has not ended."""
    for one in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.send_signal(number)


@dataclass
class Foreign:
    """Program that can be stopped (SIGSTOP) while another program is measured."""

    name: str
    process: subprocess.Popen[str] | None = None  # None: the program is never stopped

    def signal(self, number: int) -> None:
        if self.process is not None:
            send(family(self.process.pid), number)


One = TypeVar("One", bound=Foreign)


def arms_of(
    programs: Sequence[One],
    measure: Callable[[One], Numbers],
    prepare: Callable[[One], object] = lambda _: None,
) -> list[Arm]:
    """Return an arm for each program; the other programs are stopped while one is measured."""

    def only(chosen: One) -> None:
        for one in programs:
            one.signal(signal.SIGCONT if one is chosen else signal.SIGSTOP)
        prepare(chosen)

    return [Arm(one.name, partial(measure, one), partial(only, one)) for one in programs]


@contextlib.contextmanager
def started(
    command: Sequence[str],
    answers: Callable[[subprocess.Popen[str]], object],
    env: Mapping[str, str],
    *,
    has_lines: bool = False,
    folder: Path | None = None,
) -> Iterator[subprocess.Popen[str]]:
    """Start a program, call ``answers`` until it returns without an error, then send SIGSTOP.

    Args:
        has_lines: True if the program reads standard input and answers on standard output.
    """
    pipe = subprocess.PIPE if has_lines else subprocess.DEVNULL
    process = subprocess.Popen(
        command,
        stdin=pipe,
        stdout=pipe,
        stderr=subprocess.DEVNULL,
        text=True,
        bufsize=1,
        start_new_session=True,
        env=env,
        cwd=folder,
    )
    try:
        until_s = time.monotonic() + START_S
        while True:
            try:
                answers(process)
                break
            except (OSError, RuntimeError, ValueError, http.client.HTTPException):
                if process.poll() is not None or time.monotonic() > until_s:
                    raise RuntimeError(f"it did not start: {command}") from None
                time.sleep(POLL_S)
        send(family(process.pid), signal.SIGSTOP)
        yield process
    finally:
        _end(process)


def _end(process: subprocess.Popen[Any]) -> None:
    """Terminate the program, so that it removes its shared memory; kill processes that remain."""
    members = family(process.pid)
    send(members, signal.SIGCONT)
    with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(END_S)
    send(members, signal.SIGKILL)
    process.wait()
