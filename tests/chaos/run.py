"""A chaos run, which injects every fault of the grid once, then random faults until time is up."""

from __future__ import annotations

import contextlib
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import psutil

from pipeswitch.base.errors import PipeSwitchError

from ..process.tools import until
from .faults import Cell, grid
from .history import LANES, Fault, History, lane_of
from .load import Load
from .stage import DEVICES, Stage, staged

WORKERS: Final = 3  # per device
PAUSE_S: Final = (0.05, 0.6)
RECOVERS_WITHIN_S: Final = 60.0
# Weights of random faults: most for components that die most often in practice.
WEIGHTS: Final = {"active worker": 4.0, "standby worker": 3.0, "daemon": 1.5, "client": 1.0}
ENDING_WEIGHT: Final = 0.1  # low, because a controller takes seconds to start again

NUMBER: Final = re.compile(r"\d+")  # number of an inode or a port
PIDFD: Final = "anon_inode:[pidfd]"
CHANNEL: Final = "socket:[] SOCK_SEQPACKET  NONE"
PROGRAM: Final = ("manifest.json", "program.bundle", "null")  # files of a program; null: none yet

Say = Callable[[str], object]


def chaos(
    folder: Path,
    seconds: float,
    seed: int,
    say: Say,
    keep_log: Say = lambda _: None,
    *,
    policy: str = "priority",
    faults: int = 0,
) -> dict[str, Any]:
    """Run the chaos test, check its records, and return the report for the JSON file.

    Args:
        keep_log: function that gets the text of the server's log.
        policy: scheduling policy of the server.
        faults: number of faults; 0 means the whole grid, then random faults for ``seconds``.
    """
    generator = random.Random(seed)
    history = History()
    with staged(folder, history, policy) as stage:
        load = Load(stage, seed)
        load.prepare()
        _settle(stage, history)
        before, rss_kib = _held(stage), _rss_kib(stage)
        load.start()
        for lane in ("probe", *LANES.values()):
            _wait_for_answers(history, 0, lane)
        began_s = time.monotonic()
        todo, tried_again = grid(), list[Cell]()
        generator.shuffle(todo)

        def is_over() -> bool:
            if faults:
                return len(history.faults) == faults
            return not todo and time.monotonic() >= began_s + seconds

        while not is_over():
            cell = todo.pop() if todo else _draw(generator)
            try:
                if not _inject(stage, history, cell, generator, say) and cell not in tried_again:
                    tried_again.append(cell)  # a busy machine may not have come to it in time
                    todo.insert(0, cell)
            except AssertionError as error:
                text = f"{cell.component} x {cell.fault}: {error}"
                history.violations.append(text)
                say(text)
                keep_log(stage.running.log())
                stage.kill_all()
                return _report(history, seed, began_s)
            threading.Event().wait(generator.uniform(*PAUSE_S))
        load.stop()
        jobs = load.finish_jobs()
        _settle(stage, history)
        leaks = _left(stage, before)
        history.violations += [f"the controller holds {leaks} more"] if leaks else []
        grown_kib = _rss_kib(stage) - rss_kib
        _judge_log(stage, history)
        keep_log(stage.running.log())
        status = stage.end()
        if status:
            history.violations.append(f"it left with status {status}")
    report = _report(history, seed, began_s)
    return {**report, "jobs": jobs, "leaks": leaks, "controller_grown_kib": grown_kib}


def _report(history: History, seed: int, began_s: float) -> dict[str, Any]:
    report = history.report()
    cells = {f"{cell.component} x {cell.fault}" for cell in grid()}
    return {
        "seed": seed,
        "seconds": round(time.monotonic() - began_s, 1),
        **report,
        "cells": len(cells),
        "cells_exercised": len(cells & set(report["recovery"])),
        "cells_missed": sorted(cells - set(report["recovery"])),
    }


def _draw(generator: random.Random) -> Cell:
    cells = grid()
    weights = [
        ENDING_WEIGHT if cell.ends_controller else WEIGHTS.get(cell.component, 0.5)
        for cell in cells
    ]
    return generator.choices(cells, weights)[0]


def _inject(stage: Stage, history: History, cell: Cell, generator: random.Random, say: Say) -> bool:
    """Inject a fault, and wait for answers after it; return False if it did not happen."""
    answers = len(history.outcomes)
    at_s = time.monotonic()
    try:
        happened = cell.inject(stage, generator)
    except PipeSwitchError as error:
        say(f"{cell.component} x {cell.fault}: could not be injected: {error}")
        happened = False
    if cell.ends_controller and happened:
        stage.running.process.wait(30)
    if not stage.is_up:
        if not cell.ends_controller:
            status = stage.running.process.returncode
            tail = stage.running.log()[-3000:]
            history.violations.append(f"{cell.component} x {cell.fault} ended it: {status} {tail}")
        stage.revive(at_s)
    if not happened:
        took_s = time.monotonic() - at_s
        say(f"     {cell.component} x {cell.fault}: did not happen ({took_s:.1f} s)")
        return False
    history.faults.append(Fault(cell.component, cell.fault, at_s, cell.ends_controller))
    _wait_for_answers(history, answers, lane_of(history.faults[-1]))
    seconds = history.recovery_s(history.faults[-1])
    shown = "not yet" if seconds is None else f"{seconds * 1000:.0f} ms"
    took_s = time.monotonic() - at_s
    number = len(history.faults)
    say(f"{number:4d} {cell.component} x {cell.fault}: answers after {shown} ({took_s:.1f} s)")
    return True


def _wait_for_answers(history: History, known: int, lane: str) -> None:
    """Wait until a request that this lane sends after this call has a good answer."""
    from_s = time.monotonic()

    def answered() -> bool:
        return any(
            o.lane == lane and o.kind == "ok" and o.sent_at_s >= from_s
            for o in history.outcomes[known:]
        )

    try:
        until(answered, f"a request of {lane} is answered", RECOVERS_WITHIN_S)
    except AssertionError:
        raise AssertionError(f"no answer to {lane} for {RECOVERS_WITHIN_S} s") from None


def _settle(stage: Stage, history: History) -> None:
    try:
        stage.checked.wait_until_whole(WORKERS * len(DEVICES))
        stage.checked.settle()
    except AssertionError as error:
        history.violations.append(f"not settled: {error}")


def _judge_log(stage: Stage, history: History) -> None:
    log = stage.running.log()
    for word in ("InvalidTransition", "AssertionError"):
        at = log.find(word)
        if at >= 0:
            history.violations.append(log[max(0, at - 2000) : at + 300])


def _left(stage: Stage, before: Counter[str]) -> dict[str, int]:
    """Wait until the controller rests; return its threads and descriptors beyond ``before``."""
    with contextlib.suppress(AssertionError):
        until(lambda: _held(stage) <= before, "all is given back")
    return dict(_held(stage) - before)


def _held(stage: Stage) -> Counter[str]:
    """Return the controller's threads and descriptors, but not the descriptors of workers, because
    a device keeps as many workers as it has ever needed."""
    workers = sum(bool(row["pid"]) for row in stage.checked.rows("worker"))
    return held(stage.running.pid) - Counter({PIDFD: workers, CHANNEL: 2 * workers})


def held(pid: int) -> Counter[str]:
    """Return the numbers of a process's threads and descriptors, by kind."""
    process, proc = psutil.Process(pid), Path("/proc", str(pid))
    entries = [f"thread {path.read_text().strip()}" for path in proc.glob("task/*/comm")]
    ends = process.net_connections("all")
    sockets = {end.fd: f"{end.type.name} {Path(str(end.laddr)).name} {end.status}" for end in ends}
    for path in (proc / "fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            name = path.readlink().name
            kind = "a program" if name in PROGRAM else name
            entries.append(NUMBER.sub("", f"{kind} {sockets.get(int(path.name), '')}".strip()))
    return Counter(entries)


def _rss_kib(stage: Stage) -> int:
    return int(psutil.Process(stage.running.pid).memory_info().rss) >> 10
