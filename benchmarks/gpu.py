"""One command that tests the cuda device on a GPU: ``make gpu``.

    python -m benchmarks.gpu [--out DIR] [--budget 540] [--dry-run] [stage …]

Each stage is a process with its own time limit, so that a stage that hangs or crashes does not harm
the next one. The stages: facts of the machine; each mechanism (rung) alone, without a server;
measurements, those that are least known first; tests of torch, of the device and of a server with
only the mechanisms that it cannot do without. If a mechanism is broken, or the time is over, the
remaining stages are reported as not run. Stages do not run side by side: on one GPU, servers slow
each other down.
After each stage the files ``gpu-<name>-<date>.json`` and ``.md`` are written again into ``--out``
(benchmarks/results).
The exit status is 0 if every stage succeeded, 3 without a GPU. ``--dry-run`` runs every stage's
program; without a GPU, each stage reports that it needs a GPU. docs/gpu.md explains the results.

The machine needs torch >= 2.11 with CUDA, torchvision, numpy, safetensors, click, rich, pytest,
pytest-timeout, hypothesis; without a package index, also wheels of pyzmq and msgspec. BERT-base is
transformers' model if that is installed, else an encoder of its shape. A fresh clone needs no
installation: this command puts the checkout on the path.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .gpu_common import MARK, NEEDS_A_GPU, ROOT, RUNGS

BUDGET_S = 540.0
MIN_S = 8.0  # a stage is not begun with less time left
TAIL = 3000  # kept characters of a failed stage's output, apart from its findings
LOG_TAIL = 4000  # kept characters of each log of a failed server
MARK_OF_A_STAGE = "PIPESWITCH_GPU_STAGE"  # variable in the environment of all processes of a stage
LEAVE_S = 10.0  # time for a killed stage's processes to end; each frees a CUDA context


@dataclass(frozen=True)
class Stage:
    """A program in its own process; ``limit_s`` is its maximum time."""

    name: str
    limit_s: float
    command: tuple[str, ...]
    needs: tuple[str, ...] = ()  # mechanisms without which the stage would fail


def _test(suite: str, *needs: str) -> Stage:
    return Stage(suite, 120, ("-m", "benchmarks.gpu_tests", suite), needs)


SERVED = ("device", "memory", "ipc", "torch", "tensor")  # mechanisms that every server needs


def _serving(limit_s: float, *words: str) -> Stage:
    return Stage("-".join(words), limit_s, ("-m", "benchmarks.gpu_servers", *words), SERVED)


STAGES = (
    # The first stage imports torch, perhaps from a cold disk, which may take a minute.
    Stage("facts", 150, ("-m", "benchmarks.gpu_environment")),
    Stage("mechanisms", 240, ("-m", "benchmarks.gpu_mechanisms")),
    # What is least known comes first: a GPU can often be had for ten minutes only.
    Stage("link", 40, ("-m", "benchmarks.gpu_link"), ("device", "memory")),
    _serving(60, "switch", "bert-base"),
    _serving(45, "switch", "bert-base", "copy"),
    _serving(110, "training"),
    _test("server-highest", *SERVED, "graph", "wait-write", "slice"),
    _serving(60, "switch", "inception_v3"),
    _serving(50, "switch", "vit_4_blocks"),
    _serving(120, "generation"),
    _serving(60, "soak"),
    _serving(90, "switch", "resnet152"),
    _serving(150, "precision"),
    _serving(120, "switch", "vit_l_16"),
    _test("raw", "device", "memory", "torch"),
    _test("conformance", *SERVED),
    _test("server-lowest", *SERVED),
)


@dataclass
class Outcome:
    """Result of a stage: its status and its findings."""

    name: str
    status: str  # ok, failed, timed out, not run, needs a GPU
    seconds: float = 0.0
    exit_status: int | None = None
    results: list[dict[str, Any]] = field(default_factory=list)
    tail: str = ""

    def first(self, key: str) -> Any:
        """Return the value of a key in the first finding that has the key; None without one."""
        return next((result[key] for result in self.results if key in result), None)


def run_stage(stage: Stage, left_s: float, environment: dict[str, str]) -> Outcome:
    """Run one stage until it ends or its time is over; return the findings that it has printed."""
    limit_s = min(stage.limit_s, left_s)
    began_s = time.monotonic()
    mark = f"{os.getpid()}-{stage.name}-{time.time()}"
    with (
        tempfile.TemporaryFile("w+") as output,
        tempfile.TemporaryDirectory(prefix="gpu-") as folder,
    ):
        process = subprocess.Popen(
            [sys.executable, *stage.command],
            cwd=ROOT,
            # The folder holds its servers' GPU lock, and what a killed server leaves.
            env={**environment, MARK_OF_A_STAGE: mark, "TMPDIR": folder},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            process.wait(limit_s)
            timed_out = False
        except subprocess.TimeoutExpired:
            timed_out = True
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # ends the stage's servers and children, too
            process.wait()
            stayed = end_leftovers(mark)
        output.seek(0)
        text, logs = output.read(), server_logs(Path(folder))
    results, rest = _split(text)
    status, tail = "failed" if process.returncode else "ok", ""
    if timed_out:
        status = "timed out"
    elif process.returncode == NEEDS_A_GPU or any("needs" in result for result in results):
        status = "needs a GPU"
    if stayed:
        results.append({"processes_that_had_to_be_killed": stayed})
    if status not in ("ok", "needs a GPU"):
        tail = "\n".join([*logs, rest[-TAIL:]])
    seconds = round(time.monotonic() - began_s, 1)
    return Outcome(stage.name, status, seconds, process.returncode, results, tail)


def end_leftovers(mark: str) -> list[str]:
    """Wait until a stage's processes outside its process group have ended (a server's fork server
    and children end after the controller). Then kill those still alive, and return their names."""
    ends_at_s = time.monotonic() + LEAVE_S
    entry = f"{MARK_OF_A_STAGE}={mark}".encode()
    while pids := _with_environment(entry):
        if time.monotonic() > ends_at_s:
            names = []
            for pid in pids:
                with contextlib.suppress(OSError):
                    names.append(f"{pid} {Path('/proc', str(pid), 'comm').read_text().strip()}")
                    os.kill(pid, signal.SIGKILL)
            return names
        time.sleep(0.1)
    return []


def _with_environment(entry: bytes) -> list[int]:
    """Return the ids of processes that were started with this entry (``NAME=value``) of environ."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if entry in path.read_bytes().split(b"\0"):
                pids.append(int(path.parent.name))
    return pids


def server_logs(folder: Path) -> list[str]:
    """Return the ends of logs that failed servers left behind; a clean stop removes the logs."""
    lines = []
    for path in sorted(folder.glob("pipeswitch-*/state/**/*.log")):
        with contextlib.suppress(OSError):
            lines += [f"-- {path.name}", path.read_text(errors="replace")[-LOG_TAIL:]]
    return lines


def _split(text: str) -> tuple[list[dict[str, Any]], str]:
    results, rest = [], []
    for line in text.splitlines():
        if line.startswith(MARK):
            with contextlib.suppress(ValueError):  # a killed stage may leave half a line
                results.append(json.loads(line[len(MARK) :]))
                continue
        rest.append(line)
    return results, "\n".join(rest)


class Report:
    """The report files in ``--out``, written again after every stage."""

    def __init__(self, folder: Path, command: str) -> None:
        self._folder = folder
        self._command = command
        self._written: list[Path] = []
        self.outcomes: list[Outcome] = []
        self.name = "none"  # part of the files' names, until the device is known

    def add(self, outcome: Outcome) -> list[Path]:
        """Add a stage's outcome and write the files; return their paths."""
        self.outcomes.append(outcome)
        device = outcome.first("device")
        if isinstance(device, dict):
            self.name = re.sub(r"[^a-z0-9]+", "-", str(device["name"]).lower()).strip("-")
        self._folder.mkdir(parents=True, exist_ok=True)
        stem = f"gpu-{self.name}-{time.strftime('%Y-%m-%d')}"
        data, table = self._folder / f"{stem}.json", self._folder / f"{stem}.md"
        document = {
            "command": self._command,
            "commit": _commit(),
            "stages": [vars(each) for each in self.outcomes],
        }
        for old in {*self._written} - {data, table}:  # written before the device's name was known
            old.unlink(missing_ok=True)
        self._written = [data, table]
        text = json.dumps(document, indent=1, default=str).replace(str(ROOT), ".")
        data.write_text(text + "\n")
        table.write_text(self.markdown().replace(str(ROOT), "."))
        return self._written

    @property
    def broken(self) -> dict[str, str]:
        """Mechanisms that failed or could not be tried, each with the reason, in test order."""
        if any(outcome.status == "needs a GPU" for outcome in self.outcomes):
            return {}  # no mechanism was tried; a dry run still runs every stage
        rows = self._results("mechanism")
        return {row["mechanism"]: str(row["text"]) for row in rows if row["outcome"] != "ok"}

    def verdict(self) -> str:
        """Return the first broken rung (mechanism) or, if all work, the first stage that failed."""
        for name, why in self.broken.items():
            return f"first broken rung: {name}: {why}"
        for outcome in self.outcomes:
            if outcome.status == "needs a GPU":
                return "there is no GPU here"
            if outcome.status not in ("ok", "not run"):
                return f"no mechanism is known to be broken; first: {outcome.name} {outcome.status}"
        return "every rung holds"

    def markdown(self) -> str:
        """Return the report as Markdown: the verdict, then mechanisms, stages and switches."""
        lines = [f"# GPU run on {self.name}", "", f"`{self._command}`, commit {_commit()}", ""]
        lines += [f"**{self.verdict()}**", "", "| mechanism | outcome | finding | s |"]
        lines += ["|---|---|---|---|"]
        for row in self._results("mechanism"):
            text = str(row["text"]).replace("|", "/").replace("\n", " ")
            lines.append(f"| {row['mechanism']} | {row['outcome']} | {text} | {row.get('s', '')} |")
        lines += ["", "| stage | outcome | s |", "|---|---|---|"]
        for o in self.outcomes:
            why = f": {o.tail}" if o.status == "not run" else ""
            lines.append(f"| {o.name} | {o.status}{why} | {o.seconds} |")
        keys = ("p50", "p90", "p99", "max", "min", "n")
        lines += ["", f"| case | arm, ms | {' | '.join(keys)} |", "|---" * 8 + "|"]
        for row in self._results("total_ms"):
            t = row["total_ms"]
            case, arm = row.get("case", "soak"), row.get("arm", "cold")
            lines.append(f"| {case} | {arm} | {' | '.join(str(t.get(key, '')) for key in keys)} |")
        lines += ["", "| finding | value | target |", "|---|---|---|"]
        for row in self._results("cold_over"):
            for arm, ratio in row["cold_over"].items():
                target = (row["target"] or "") if arm == "ready-eager" else ""
                lines.append(f"| {row['case']}: cold / {arm} | {ratio} | {target} |")
            lines.append(f"| {row['case']}: link, GB/s | {row['link_gb_s']} | |")
        for row in self._results("gb_s"):
            lines.append(f"| {row['case']}: {row['arm']}, GB/s | {row['gb_s']} | |")
        for row in self._results("precision"):
            size = f"{row['bytes'] / 1e6:.0f} MB, error {row['error']:.1e}"
            times = f"copy {row['cold_copy_ms']:.1f} ms, compute {row['compute_ms']['p50']} ms"
            lines.append(f"| {row['case']}, {row['precision']} | {size}, {times} | |")
        for row in self._results("tokens_per_s"):
            name = f"{row['case']}, {row['arm']}: tokens/s"
            lines.append(f"| {name} | {row['tokens_per_s']} | |")
        for key in ("training_tax", "gpu_step_ms", "leaked_device_bytes", "rungs"):
            for row in self._results(key):
                target = row.get("target", "") if key == "training_tax" else ""
                lines.append(f"| {key} | {row[key]} | {target} |")
        for outcome in self.outcomes:
            if outcome.status not in ("ok", "not run") and outcome.tail:
                lines += ["", f"## {outcome.name}: {outcome.status}", "", "```"]
                lines += [*outcome.tail.splitlines()[-25:], "```"]
        return "\n".join(lines) + "\n"

    def _results(self, key: str) -> list[dict[str, Any]]:
        return [row for outcome in self.outcomes for row in outcome.results if key in row]


def _commit() -> str:
    done = subprocess.run(
        ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*", "--abbrev=12"],
        capture_output=True,
        text=True,
    )
    return done.stdout.strip() or "unknown"


def child_environment() -> dict[str, str]:
    """Return an environment in which children can import the checkout and the tests' stand-ins."""
    path = [str(ROOT), str(ROOT / "tests/fakes"), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(part for part in path if part),
        "PYTHONUNBUFFERED": "1",
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="prove the cuda device on a GPU")
    parser.add_argument("stages", nargs="*", help=" ".join(stage.name for stage in STAGES))
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results")
    parser.add_argument("--budget", type=float, default=BUDGET_S, help="seconds in all")
    parser.add_argument("--dry-run", action="store_true", help="try the plumbing")
    options = parser.parse_args()
    unknown = set(options.stages) - {stage.name for stage in STAGES}
    if unknown:
        parser.error(f"no stage {', '.join(sorted(unknown))}")
    stages = [stage for stage in STAGES if not options.stages or stage.name in options.stages]
    with contextlib.ExitStack() as cleanup:
        folder = options.out
        if options.dry_run:  # files of a dry run must not look like results
            folder = Path(cleanup.enter_context(tempfile.TemporaryDirectory()))
        return run_all(stages, folder, options.budget, stops_early=not options.dry_run)


def run_all(stages: Sequence[Stage], folder: Path, budget_s: float, *, stops_early: bool) -> int:
    """Run all stages in order; return the exit status."""
    ends_at_s = time.monotonic() + budget_s
    report = Report(folder, " ".join(["python -m benchmarks.gpu", *(s.name for s in stages)]))
    environment = child_environment()
    heartbeat = threading.Timer(budget_s + 30, os._exit, (124,))  # in case a stage hangs
    heartbeat.daemon = True
    heartbeat.start()
    paths: list[Path] = []
    for stage in stages:
        left_s = ends_at_s - time.monotonic()
        lacks = [name for name in stage.needs if name in report.broken]
        if lacks:
            outcome = Outcome(stage.name, "not run", tail=f"needs {', '.join(lacks)}")
        elif left_s < MIN_S:
            outcome = Outcome(stage.name, "not run", tail="no time left")
        else:
            print(f"== {stage.name} (at most {min(stage.limit_s, left_s):.0f} s)", flush=True)
            outcome = run_stage(stage, left_s, environment)
        paths = report.add(outcome)
        _tell(outcome)
        rungs = outcome.first("rungs")
        if isinstance(rungs, dict):
            environment[RUNGS] = json.dumps(rungs)
        if outcome.status == "needs a GPU" and stage.name == "mechanisms" and stops_early:
            break
    heartbeat.cancel()
    print(report.verdict())
    for path in paths:
        print(f"wrote {path}")
    statuses = {outcome.status for outcome in report.outcomes}
    if "needs a GPU" in statuses:
        return NEEDS_A_GPU
    return 0 if statuses <= {"ok", "not run"} else 1


def _tell(outcome: Outcome) -> None:
    if outcome.status == "not run":
        print(f"== {outcome.name} is not run: {outcome.tail}", flush=True)
        return
    print(f"   {outcome.status} after {outcome.seconds} s", flush=True)
    for result in outcome.results:
        if "mechanism" in result:
            print(f"   {result['mechanism']:11}{result['outcome']:8} {result['text']}", flush=True)
            continue
        for key, value in result.items():
            text = str(value)
            print(f"   {key}: {text if len(text) < 400 else text[-400:]}", flush=True)
    if outcome.tail:
        print("   " + "\n   ".join(outcome.tail.splitlines()[-15:]), flush=True)


if __name__ == "__main__":
    sys.exit(main())
