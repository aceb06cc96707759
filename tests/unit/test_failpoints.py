"""Failpoints, at which tests inject faults: table and code agree, and each point fires once."""

from __future__ import annotations

import ast
import os
import signal
from collections import Counter
from pathlib import Path

import pytest

from pipeswitch.base import failpoints
from pipeswitch.base.failpoints import POINTS, REACHED, VARIABLE, Injected
from tests.process.failpoint_tour import TOUR

ROOT = Path(__file__).resolve().parents[2]
SENT_TO = ("worker", "daemon", "stage")  # kinds of children, which f-strings put into names


def points_in_code() -> Counter[str]:
    """Count each literal name that is passed to ``reach`` or set as a channel's ``point``."""
    points: Counter[str] = Counter()
    for package in ("pipeswitch", "workers", "memory_daemon"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                    if node.func.id == "reach" and isinstance(node.args[0], ast.Constant):
                        points[str(node.args[0].value)] += 1
                elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
                    targets = [t for t in node.targets if isinstance(t, ast.Attribute)]
                    if node.value.value and any(t.attr == "point" for t in targets):
                        points[str(node.value.value)] += 1
    points.update(f"controller.send.{kind}" for kind in SENT_TO)
    return points


def test_every_point_of_the_table_stands_at_one_place_in_the_code_and_no_other() -> None:
    assert points_in_code() == Counter(POINTS.keys())
    assert len(POINTS) >= 40


def test_the_tour_stops_once_at_every_point() -> None:
    stops = Counter(stop.point for batch in TOUR.values() for stop in batch)
    assert stops == Counter(POINTS.keys())


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(failpoints, "_folder", None)
    monkeypatch.setattr(failpoints, "is_on", False)
    monkeypatch.setattr(failpoints, "_seen", set())
    failpoints.enable({VARIABLE: str(tmp_path)})
    return tmp_path


NAME = "worker.infer.group"


def test_off_is_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failpoints, "_folder", None)
    monkeypatch.setattr(failpoints, "is_on", False)
    failpoints.enable({})
    failpoints.reach("no such point at all")
    assert failpoints.garbled("nor this", b"data") == b"data"


def test_an_armed_point_fires_once(folder: Path) -> None:
    (folder / NAME).write_text("error")
    with pytest.raises(Injected, match=NAME):
        failpoints.reach(NAME)
    failpoints.reach(NAME)
    assert [path.name for path in folder.iterdir()] == [REACHED]
    assert [path.name for path in (folder / REACHED).iterdir()] == [NAME]


@pytest.mark.parametrize(
    ("action", "error"), [("memory", MemoryError), ("disk", OSError), ("nonsense", ValueError)]
)
def test_actions_that_raise(folder: Path, action: str, error: type[Exception]) -> None:
    (folder / NAME).write_text(action)
    with pytest.raises(error):
        failpoints.reach(NAME)


def test_a_delay_returns(folder: Path) -> None:
    (folder / NAME).write_text("delay 0.1")
    failpoints.reach(NAME)


def test_garbage_is_no_message(folder: Path) -> None:
    (folder / "worker.send").write_text("garbage")
    assert failpoints.garbled("worker.send", b"data") != b"data"
    assert failpoints.garbled("worker.send", b"data") == b"data"


def test_a_crash_is_a_kill(folder: Path) -> None:
    (folder / NAME).write_text("crash")
    pid = os.fork()
    if pid == 0:
        failpoints.reach(NAME)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


def test_a_name_that_is_not_in_the_table_is_a_mistake(folder: Path) -> None:
    with pytest.raises(ValueError, match="not a failpoint"):
        failpoints.reach("worker.infer.gruop")
