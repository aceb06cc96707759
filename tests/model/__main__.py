"""``python -m tests.model``: explore the scopes, plant the bugs, print what was found."""

from __future__ import annotations

import argparse
import os
import sys

from .mutants import MUTANTS
from .scopes import FULL, QUICK
from .search import Exploration, Report
from .story import tell


def main() -> int:
    """Exit status 0: no violation, every scope exhausted, every seeded bug found."""
    parser = argparse.ArgumentParser(prog="python -m tests.model", description=__doc__)
    parser.add_argument("scopes", nargs="*", help="names; all of them when none is given")
    parser.add_argument("--quick", action="store_true", help="the small scopes only")
    parser.add_argument("--mutants", action="store_true", help="plant each bug, tell its story")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    if arguments.mutants:
        return _mutants()
    scopes = [s for s in (QUICK if arguments.quick else (*QUICK, *FULL))
              if not arguments.scopes or s.name in arguments.scopes]  # fmt: skip
    failed = 0
    for scope in scopes:
        exploration = Exploration(scope, processes=arguments.processes)
        report = exploration.run(_progress if sys.stderr.isatty() else None)
        _say(report.line())
        if report.violation:
            _say(tell(scope, report.path, report.violation))
        failed += not report.is_exhausted or bool(report.violation)
    return 1 if failed or not scopes else 0


def _mutants() -> int:
    missed = 0
    for mutant in MUTANTS:
        with mutant.planted():
            report = Exploration(mutant.scope).run()
            found = report.violation or "NOT FOUND"
            _say(f"\n{mutant.name}\n{'=' * len(mutant.name)}")
            _say(f"{report.states} states, {report.wall_s:.1f} s: {found}")
            if report.violation:
                _say(tell(mutant.scope, report.path, report.violation))
        missed += not report.violation
    _say(f"\n{len(MUTANTS) - missed} of {len(MUTANTS)} seeded bugs found")
    return 1 if missed else 0


def _progress(report: Report) -> None:
    sys.stderr.write(f"\r{report.scope.name}: depth {report.depth}, {report.states} states ")


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main())
