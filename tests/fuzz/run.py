"""Driver that fuzzes each target in a process, and reports figures and inputs with an escape."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from .target import CORPUS
from .targets import SHARES

RSS_LIMIT_MIB: Final = 2048
INPUT_TIMEOUT_S: Final = 30  # an input that takes longer is a hang, and so an escape
GRACE_S: Final = 90.0  # time for imports and the corpus, in addition to the requested time
WARM_SHARE: Final = 0.2  # memory is first read after this share of the time
LOOK_EVERY_S: Final = 0.5
PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
MIB: Final = 1 << 20

_EXECUTED = re.compile(r"stat::number_of_executed_units:\s*(\d+)")
_PULSE = re.compile(r"^#(\d+)\s", re.MULTILINE)
_COVERAGE = re.compile(r"\bcov: (\d+)")
_NEW = re.compile(r"stat::new_units_added:\s*(\d+)")


@dataclass
class Outcome:
    """Result of fuzzing one target."""

    executions: int = 0
    seconds: float = 0.0
    escapes: int = 0
    rss_from_mib: float = 0.0
    rss_to_mib: float = 0.0
    coverage: int = 0  # number of the instrumented modules' branches that inputs have taken
    new_entries: int = 0
    saved: list[str] = field(default_factory=list)  # files of the inputs with an escape

    def figures(self) -> dict[str, Any]:
        """Return the figures for the JSON report."""
        return {key: value for key, value in asdict(self).items() if key != "saved"}

    def line(self, name: str) -> str:
        rate = self.executions / self.seconds if self.seconds else 0.0
        return (
            f"{name:8} {self.executions:>11,} executions {rate:>9,.0f}/s  "
            f"coverage {self.coverage:>5}  new {self.new_entries:>4}  escapes {self.escapes}  "
            f"RSS {self.rss_from_mib:.0f} -> {self.rss_to_mib:.0f} MiB"
        )


def fuzz(name: str, seconds: float, corpus: Path, saved: Path) -> Outcome:
    """Run one target for ``seconds``. Write new inputs to ``corpus``, and escapes to ``saved``."""
    corpus.mkdir(parents=True, exist_ok=True)
    saved.mkdir(parents=True, exist_ok=True)
    before = set(saved.iterdir())
    with tempfile.TemporaryFile("w+") as log:
        command = [
            *(sys.executable, "-m", f"{__package__}.child", name, str(corpus)),
            f"-max_total_time={max(1, round(seconds))}",
            f"-rss_limit_mb={RSS_LIMIT_MIB}",
            f"-timeout={INPUT_TIMEOUT_S}",
            f"-artifact_prefix={saved}/",
            "-print_final_stats=1",
            "-reload=0",
        ]
        began_s = time.monotonic()
        child = subprocess.Popen(command, stdout=log, stderr=log, cwd=Path(__file__).parents[2])
        rss = _watch(child, began_s, seconds)
        took_s = time.monotonic() - began_s
        log.seek(0)
        text = log.read()
    outcome = read_log(text)
    outcome.seconds = round(min(took_s, max(seconds, 1.0)), 1)
    outcome.rss_from_mib, outcome.rss_to_mib = rss
    new = sorted(path for path in saved.iterdir() if path not in before)
    outcome.saved = [str(path) for path in new]
    outcome.escapes = len(new)
    if child.returncode and not new:  # the child failed to start, or died without saving an input
        outcome.escapes = 1
        (saved / "log.txt").write_text(text)
        outcome.saved = [str(saved / "log.txt")]
    elif new:
        (saved / f"{new[0].name}.log").write_text(text[-20_000:])
    return outcome


def _watch(child: subprocess.Popen[bytes], began_s: float, seconds: float) -> tuple[float, float]:
    """Wait for the child's end; return its resident memory in MiB when warmed up and at the end."""
    warm_at_s = began_s + max(2.0, WARM_SHARE * seconds)
    first = last = 0.0
    while True:
        try:
            child.wait(LOOK_EVERY_S)
            return first or last, last
        except subprocess.TimeoutExpired:
            now_s = time.monotonic()
        last = _rss_mib(child.pid) or last
        if not first and now_s >= warm_at_s:
            first = last
        if now_s > began_s + seconds + GRACE_S:
            child.kill()


def _rss_mib(pid: int) -> float:
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0.0
    return round(pages * PAGE_BYTES / MIB, 1)


def read_log(text: str) -> Outcome:
    """Return the last figures in libFuzzer's log, which even an aborted run prints."""
    outcome = Outcome()
    pulses = [int(number) for number in _PULSE.findall(text)]
    executed = _EXECUTED.search(text)
    outcome.executions = int(executed[1]) if executed else max(pulses, default=0)
    outcome.coverage = max(map(int, _COVERAGE.findall(text)), default=0)
    added = _NEW.search(text)
    outcome.new_entries = int(added[1]) if added else 0
    return outcome


def shares(names: Sequence[str], seconds: float) -> dict[str, float]:
    """Divide ``seconds`` among the targets by their weights; each gets at least 1."""
    weights = {name: SHARES.get(name, 1.0) for name in names}
    whole = sum(weights.values())
    return {name: max(1.0, seconds * weight / whole) for name, weight in weights.items()}


def minimise(name: str, corpus: Path) -> int:
    """Reduce the saved corpus to few inputs that reach the same branches; return their number."""
    case = CORPUS / name
    with tempfile.TemporaryDirectory(prefix="pipeswitch-fuzz-") as folder:
        merged = Path(folder)
        subprocess.run(
            [sys.executable, "-m", f"{__package__}.child", name, "-merge=1", folder, str(corpus)],
            cwd=Path(__file__).parents[2],
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        shutil.rmtree(case, ignore_errors=True)
        case.mkdir(parents=True)
        for path in sorted(merged.iterdir()):
            shutil.copy(path, case / path.name[:16])
    return sum(1 for _ in case.iterdir())


def merged(older: dict[str, Any], newer: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of two runs in one: sums, first and last memory, highest coverage."""
    targets = dict(older.get("targets", {}))
    for name, new in newer["targets"].items():
        old = targets.get(name)
        if old is None:
            targets[name] = new
            continue
        targets[name] = {
            **{
                key: old[key] + new[key]
                for key in ("executions", "seconds", "escapes", "new_entries")
            },
            "rss_from_mib": old["rss_from_mib"],
            "rss_to_mib": new["rss_to_mib"],
            "coverage": max(old["coverage"], new["coverage"]),
        }
    return totals(targets)


def totals(targets: dict[str, Any]) -> dict[str, Any]:
    """Return the whole report: the targets' figures, and sums over all targets."""
    return {
        "targets": targets,
        "executions": sum(one["executions"] for one in targets.values()),
        "escapes": sum(one["escapes"] for one in targets.values()),
    }
