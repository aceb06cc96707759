"""Figures that the long tests measure; ``docs/reliability.md`` cites them.

``PIPESWITCH_FIGURES=folder pytest -m soak ...`` writes ``folder/<name>.json``; without the variable
nothing is written. Import this module as ``tests.process.figures``.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from benchmarks.machine import machine_facts

VARIABLE: Final = "PIPESWITCH_FIGURES"


def publish(name: str, figures: Mapping[str, object]) -> None:
    """Write ``<name>.json`` into the folder that the environment variable names, if it is set.

    Args:
        name: the file's name without suffix; a later run replaces the file.
        figures: the measurements. The file also has ``date`` (UTC) and ``facts`` (commit, whether
            it is dirty, cores, versions), unless ``figures`` contains them.
    """
    folder = os.environ.get(VARIABLE)
    if not folder:
        return
    date = datetime.now(UTC).isoformat(timespec="seconds")
    document = {"name": name, "date": date, "facts": facts(), **figures}
    target = Path(folder, f"{name}.json")
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_suffix(".part")
    temporary.write_text(json.dumps(document, indent=1) + "\n")
    temporary.replace(target)


@contextlib.contextmanager
def publishing(name: str) -> Iterator[dict[str, Any]]:
    """Yield a dictionary for figures and publish it at the end of the block, also after an error.

    The file also has ``seconds`` and ``passed``, which is false if the block raised.
    """
    figures: dict[str, Any] = {"facts": facts()}  # at the start: the commit may change later
    began_s = time.monotonic()
    passed = False
    try:
        yield figures
        passed = True
    finally:
        seconds = round(time.monotonic() - began_s, 1)
        publish(name, {"passed": passed, "seconds": seconds, **figures})


def facts() -> dict[str, Any]:
    """Return the facts of this machine and checkout, without the load, which is the test's own."""
    return {key: value for key, value in machine_facts().items() if key != "load_1m"}


def say(line: str) -> None:
    """Print the progress of a long test; ``pytest -s`` shows it."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
