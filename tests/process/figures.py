"""Files of the figures that long tests measure; ``docs/reliability.md`` cites the figures.

``PIPESWITCH_FIGURES=folder pytest -m soak ...`` writes ``folder/<name>.json``. Without the variable
no file is written. Import this module as ``tests.process.figures``.
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
        name: file name without suffix; a later run replaces the file.
        figures: measurements. The file also has ``date`` (UTC) and ``facts`` (commit, ``dirty`` if
            files differ from it, cores, versions), unless ``figures`` has these keys.
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
    """Yield a dictionary for figures; publish it when the block ends, even with an error.

    The file also has ``seconds`` and ``passed``, which is false if the block has raised.
    """
    figures: dict[str, Any] = {"facts": facts()}  # read now, because the commit may change later
    began_s = time.monotonic()
    passed = False
    try:
        yield figures
        passed = True
    finally:
        seconds = round(time.monotonic() - began_s, 1)
        publish(name, {"passed": passed, "seconds": seconds, **figures})


def facts() -> dict[str, Any]:
    """Return facts of this machine and checkout; omit the load, which the test itself causes."""
    return {key: value for key, value in machine_facts().items() if key != "load_1m"}


def say(line: str) -> None:
    """Print the progress of a long test; ``pytest -s`` shows it."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
