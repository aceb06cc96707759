"""``python -m tests.fuzz``: run the targets one after the other, print a line for each.

Exit 0 when nothing escaped, else 1; the inputs lie in ``WORK/escapes/TARGET``.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from .run import fuzz, merged, minimise, shares, totals
from .targets import MODULES, load

WHAT_TO_DO = """
{count} inputs made something escape: see {first} and the log beside it.
Replay one:  python -m tests.fuzz --replay TARGET FILE
Mend the code, then move the file to tests/fuzz/regressions/TARGET/ under a name that says what it
shows: tests/unit/test_fuzz_targets.py replays it from then on."""


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="in all, over the targets")
    parser.add_argument("--targets", default=",".join(MODULES), help="names, comma between them")
    parser.add_argument("--out", type=Path, help="write the figures there, as JSON")
    parser.add_argument("--add", action="store_true", help="add them to what OUT has already")
    parser.add_argument("--work", type=Path, default=Path("out/fuzz"), help="corpus and escapes")
    parser.add_argument("--keep", action="store_true", help="minimise the corpus into the checkout")
    parser.add_argument("--replay", nargs=2, metavar=("TARGET", "FILE"), help="one input, no fuzz")
    options = parser.parse_args()
    if options.replay:
        name, path = options.replay
        load(name).run(Path(path).read_bytes())
        _say("nothing escaped")
        return 0
    names = [name for name in options.targets.split(",") if name]
    unknown = [name for name in names if name not in MODULES]
    if unknown:
        parser.error(f"no target {unknown[0]!r}; there are {', '.join(MODULES)}")
    return _run(names, options)


def _run(names: list[str], options: argparse.Namespace) -> int:
    work: Path = options.work.absolute()
    figures, saved = {}, []
    for name, seconds in shares(names, options.seconds).items():
        outcome = fuzz(name, seconds, work / "corpus" / name, work / "escapes" / name)
        _say(outcome.line(name))
        figures[name] = outcome.figures()
        saved += outcome.saved
        if options.keep:
            _say(f"{name:8} {minimise(name, work / 'corpus' / name)} inputs kept")
    report = totals(figures)
    if options.out:
        if options.add and options.out.exists():
            report = merged(json.loads(options.out.read_text()), report)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    _say(f"{report['executions']:,} executions, {report['escapes']} escapes")
    if saved:
        _say(WHAT_TO_DO.format(count=len(saved), first=saved[0]))
    return 1 if saved else 0


if __name__ == "__main__":
    sys.exit(main())
