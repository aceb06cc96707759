"""The chaos test: every fault in every component once, then random faults; no answer is lost."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.chaos.__main__ import is_bad
from tests.chaos.run import chaos

SECONDS, SEED = 60.0, 20


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_minute_of_every_fault_loses_and_doubles_nothing(tmp_path: Path) -> None:
    report = chaos(tmp_path, SECONDS, SEED, _say, _say)
    summary = {name: value for name, value in report.items() if name != "recovery"}
    assert not is_bad(report), json.dumps(summary, indent=1)
    assert report["cells_missed"] == []


def _say(line: str) -> None:
    """Print a line, which pytest shows when the test fails."""
    sys.stdout.write(line + "\n")
