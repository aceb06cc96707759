"""Where the long tests leave what they measured; ``docs/reliability.md`` cites it.

``PIPESWITCH_FIGURES=folder pytest -m soak ...`` writes ``folder/<name>.json``; without the
variable nothing is written. Import it as ``tests.process.figures``.
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
    """Write ``<name>.json`` into the folder that the environment names, if it names one.

    Args:
        name: of the file; a later run replaces it.
        figures: what was measured; beside it the file says when (``date``, UTC) and on what
            (``facts``: commit, dirty or not, cores, versions), unless the figures do.
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
    """Collect figures in the dictionary this gives; published however the block ends.

    Beside them stand ``seconds`` and ``passed``; a run that failed says so, with what it had.
    """
    figures: dict[str, Any] = {"facts": facts()}  # of the code that runs, not of a later commit
    began_s = time.monotonic()
    passed = False
    try:
        yield figures
        passed = True
    finally:
        seconds = round(time.monotonic() - began_s, 1)
        publish(name, {"passed": passed, "seconds": seconds, **figures})


def facts() -> dict[str, Any]:
    """Of this machine and checkout; without the load, which is the test's own by now."""
    return {key: value for key, value in machine_facts().items() if key != "load_1m"}


def say(line: str) -> None:
    """Progress of a long test, seen under ``pytest -s``."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
