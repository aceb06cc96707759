"""Command line of the chaos test: ``python -m tests.chaos --minutes 10`` (``make chaos``)."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pipeswitch.base.config import POLICIES

from ..process.figures import facts
from .run import chaos


def main() -> int:
    """Run the chaos test; return 0 if it has found no defect."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos")
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--policy", default="priority", help="the server's; each: all in turns")
    parser.add_argument("--faults", type=int, default=0, help="so many, whatever the time is")
    parser.add_argument("--out", type=Path, default=Path("out/chaos.json"))
    options = parser.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    about = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "facts": facts()}
    log = options.out.with_suffix(".log")
    policies = POLICIES if options.policy == "each" else (options.policy,)
    reports: dict[str, dict[str, Any]] = {}
    for policy in policies:
        _say(f"policy {policy}")
        with tempfile.TemporaryDirectory(prefix="pipeswitch-chaos-") as folder:
            report = reports[policy] = chaos(
                Path(folder),
                options.minutes * 60,
                options.seed,
                _say,
                log.write_text,
                policy=policy,
                faults=options.faults,
            )
        _say(json.dumps({k: v for k, v in report.items() if k != "recovery"}, indent=1))
        if is_bad(report):
            _say(f"what the server said is in {log}")
            break
    content = reports[policies[0]] if len(policies) == 1 else {"policies": reports}
    options.out.write_text(json.dumps(about | content, indent=1) + "\n")
    return int(any(map(is_bad, reports.values())))


def is_bad(report: dict[str, object]) -> bool:
    """Return True if the run has found a defect."""
    return bool(
        report["lost"]
        or report["duplicated"]
        or report["wrong"]
        or report["violations"]
        or report["faults_survived"] != report["faults_injected"]
    )


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
