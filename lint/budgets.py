"""Check the sizes of all rooms: ``python lint/budgets.py`` (part of ``make lint``).

``budgets.toml`` has the ceilings. A file belongs to the longest name with which its path begins. A
ceiling may rise only in a commit that lowers others of its table by as much. ``--fit`` does so: it
sets each ceiling just above the present size, and takes the difference from ``reserve``.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
FILE: Final = "lint/budgets.toml"
STEPS: Final = {"lines": 10, "words": 50}  # ceilings are multiples, so that few commits change them
RESERVE: Final = "reserve"
Table = Mapping[str, Mapping[str, int]]
"""Room -> measure -> ceiling or size."""


def sizes(table: Table) -> dict[str, Counter[str]]:
    """Return what each room of a table has of each measure."""
    found = {room: Counter[str]() for room in table}
    for path in files():
        place = path.relative_to(ROOT).as_posix()
        place = f"docs/{place}" if path.parent == ROOT else place
        rooms = [room for room in table if place.startswith(f"{room}/")]
        if not rooms:
            continue
        size, text = found[max(rooms, key=len)], path.read_text("utf-8")
        if path.suffix == ".md":
            size["words"] += len(text.split())
        else:
            size["lines"] += len(text.splitlines())
            size["modules"] += 1
    if "pipeswitch/base" in found:
        from pipeswitch.base.config import SECTIONS
        from pipeswitch.base.settings import settings
        from pipeswitch.frontend.verbs import VERBS

        found["pipeswitch/base"]["settings"] = sum(len(settings(one)) for one in SECTIONS.values())
        found["pipeswitch/frontend"]["verbs"] = len(VERBS)
    return found


def files() -> Iterator[Path]:
    for top in ("pipeswitch", "workers", "memory_daemon", "benchmarks", "tests"):
        yield from (ROOT / top).rglob("*.py")
    yield from (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"))


def over(table: Table) -> Iterator[str]:
    """Yield what exceeds its ceiling."""
    for room, size in sizes(table).items():
        for measure, ceiling in table[room].items():
            if room == RESERVE and ceiling < 0:
                yield f"the reserve of {measure} is used up"
            elif room != RESERVE and size[measure] > ceiling:
                yield f"{room} has {size[measure]} {measure}, its ceiling is {ceiling}"


def sums(tables: Mapping[str, Table]) -> Counter[tuple[str, str]]:
    """Return the sum of each measure's ceilings in each table."""
    total: Counter[tuple[str, str]] = Counter()
    for name, table in tables.items():
        for room in table.values():
            total.update({(name, measure): ceiling for measure, ceiling in room.items()})
    return total


def raised(before: Mapping[str, Table], now: Mapping[str, Table]) -> Iterator[str]:
    """Yield the sums of ceilings that rise."""
    allowed = sums(before)
    for key, total in sums(now).items():
        if total > allowed[key]:
            yield f"{key[1]} of [{key[0]}]: {total} in all, {allowed[key]} before: lower another"


def parent(text: str) -> dict[str, Table] | None:
    """Return the tables before this change; None without git, or if there were none."""
    for commit in ("HEAD", "HEAD~1"):
        command = ["git", "-C", str(ROOT), "show", f"{commit}:{FILE}"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError:
            return None
        if done.returncode:
            return None
        if done.stdout != text:
            return tomllib.loads(done.stdout)
    return None


def problems() -> list[str]:
    """Return one line for each ceiling that is exceeded, or that rises at nobody's cost."""
    text = (ROOT / FILE).read_text("utf-8")
    tables: dict[str, Table] = tomllib.loads(text)
    before = parent(text)
    found = [one for table in tables.values() for one in over(table)]
    return found + ([] if before is None else list(raised(before, tables)))


def fit(tables: Mapping[str, Table]) -> dict[str, dict[str, dict[str, int]]]:
    """Return the tables with each ceiling just above the size; ``reserve`` has the difference."""
    fitted = {
        name: {room: dict(row) for room, row in table.items()} for name, table in tables.items()
    }
    for table in fitted.values():
        for room, size in sizes(table).items():
            for measure in table[room] if room != RESERVE else ():
                step = STEPS.get(measure, 1)
                ceiling = -(-size[measure] // step) * step
                slack = step if step > 1 else 0
                if size[measure] > table[room][measure] or ceiling < table[room][measure] - slack:
                    table[RESERVE][measure] += table[room][measure] - ceiling
                    table[room][measure] = ceiling
    return fitted


def written(text: str, tables: Mapping[str, Table]) -> str:
    """Return the file's text with the ceilings of ``tables``; comments stay."""
    lines, table = [], ""
    for line in text.splitlines():
        if match := re.fullmatch(r"\[(\w+)\].*", line):
            table = match[1]
        elif match := re.match(r'"?([\w/]+)"? = \{', line):
            row = ", ".join(f"{key} = {value}" for key, value in tables[table][match[1]].items())
            line = f"{match[0]} {row} }}"
        lines.append(line)
    return "\n".join(lines) + "\n"


def main() -> int:
    """Print what is wrong; with ``--fit``, correct the file before."""
    if "--fit" in sys.argv:
        text = (ROOT / FILE).read_text("utf-8")
        (ROOT / FILE).write_text(written(text, fit(tomllib.loads(text))), "utf-8")
    wrong = problems()
    for line in wrong:
        sys.stdout.write(f"{FILE}: {line}\n")
    if wrong:
        sys.stdout.write("shorten it, or: python lint/budgets.py --fit, which takes from reserve\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
