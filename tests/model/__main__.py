"""``python -m tests.model``: explore the scopes, plant the bugs, print what was found."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..process.figures import facts
from .mutants import MUTANTS
from .scope import Scope
from .scopes import FULL, QUICK
from .search import Exploration, Report
from .story import tell


def main() -> int:
    """Return 0 if every scope is exhausted without a violation and every seeded bug is found."""
    parser = argparse.ArgumentParser(prog="python -m tests.model", description=__doc__)
    parser.add_argument("scopes", nargs="*", help="names; all of them when none is given")
    parser.add_argument("--quick", action="store_true", help="the small scopes only")
    parser.add_argument("--mutants", action="store_true", help="plant each bug, tell its story")
    parser.add_argument("--all", action="store_true", help="the scopes, then the bugs")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, help="a JSON file for what was found")
    arguments = parser.parse_args()
    scopes, content = QUICK if arguments.quick else (*QUICK, *FULL), _Found()
    if not arguments.mutants or arguments.all:
        names = arguments.scopes or [scope.name for scope in scopes]
        unknown = set(names) - {scope.name for scope in scopes}
        if unknown:
            parser.error(f"no scope is named {', '.join(sorted(unknown))}")
        content.explore((scope for scope in scopes if scope.name in names), arguments.processes)
    if arguments.mutants or arguments.all:
        content.plant()
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        about = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "facts": facts()}
        arguments.out.write_text(json.dumps(about | content.row, indent=1) + "\n")
    return 1 if content.failed else 0


class _Found:
    """Results of a run. ``row`` has them for the JSON report; its ``seconds`` are wall time."""

    def __init__(self) -> None:
        self.row: dict[str, Any] = {"scopes": [], "mutants": 0, "mutants_caught": 0}
        self.failed = 0

    def explore(self, scopes: Iterable[Scope], processes: int) -> None:
        """Explore every state of each scope, and print one line for each scope."""
        for scope in scopes:
            exploration = Exploration(scope, processes=processes)
            report = exploration.run(_progress if sys.stderr.isatty() else None)
            _say(report.line())
            if report.violation:
                _say(tell(scope, report.path, report.violation))
            self.failed += not report.is_exhausted or bool(report.violation)
            self.row["scopes"].append(
                {
                    "name": scope.name,
                    "states": report.states,
                    "transitions": report.transitions,
                    "seconds": round(report.wall_s, 1),
                    "cpu_seconds": round(report.cpu_s, 1),
                    "violation": report.violation or None,
                    "is_exhausted": report.is_exhausted,
                }
            )

    def plant(self) -> None:
        """For each seeded bug, explore its scope with it, and print the path to a violation."""
        missed = 0
        for mutant in MUTANTS:
            with mutant.planted():
                report = Exploration(mutant.scope).run()
                outcome = report.violation or "NOT FOUND"
                _say(f"\n{mutant.name}\n{'=' * len(mutant.name)}")
                _say(f"{report.states} states, {report.wall_s:.1f} s: {outcome}")
                if report.violation:
                    _say(tell(mutant.scope, report.path, report.violation))
            missed += not report.violation
        caught = len(MUTANTS) - missed
        _say(f"\n{caught} of {len(MUTANTS)} seeded bugs found")
        self.failed += missed
        self.row |= {"mutants": len(MUTANTS), "mutants_caught": caught}


def _progress(report: Report) -> None:
    sys.stderr.write(f"\r{report.scope.name}: depth {report.depth}, {report.states} states ")


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main())
