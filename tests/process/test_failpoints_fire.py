"""Each failpoint fires once in a server under load, and nothing is lost (goal G2)."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tests.process.failpoint_tour import TOUR, Stop, Tour
from tests.process.figures import publish, say
from tests.process.tools import shm_names, until

ACTIONS = ("crash", "error", "memory", "disk", "delay 300")
ONCE_FATAL = ("daemon.send", "daemon.transmit.end", "commit.copied", "job.obey", "upload.write")
"""Points at which an exception once ended a thread, so that a request, a commit or a job hung."""


class Guide:
    """Runner of batches of failpoints, on one server, which is replaced only after a failure."""

    def __init__(self, folders: pytest.TempPathFactory) -> None:
        self._folders = folders
        self._tour: Tour | None = None
        self._began_s = time.monotonic()
        self._fired: Counter[str] = Counter()
        self._points: set[str] = set()
        self._reached: set[str] = set()
        self._survived = 0

    def lead(self, stops: Sequence[Stop], action: str) -> None:
        """Fire these points one after the other, then compare bits and check for leaks."""
        if self._tour is None:
            self._tour = Tour(self._folders.mktemp("tour") / "stage")
        tour = self._tour
        try:
            with tour.load():
                for stop in stops:
                    began_s = time.monotonic()
                    self._points.add(stop.point)
                    self._fired[action.split()[0]] += 1
                    tour.fire(stop, action)
                    self._survived += 1
                    self._reached.add(stop.point)
                    say(f"{stop.point} x {action}: {time.monotonic() - began_s:.1f} s")
        except BaseException:
            self._tour = None
            tour.abandon()
            raise

    def end(self) -> None:
        if self._points:
            publish("failpoints", self._figures())
        if self._tour is not None:
            self._tour.end()

    def _figures(self) -> dict[str, Any]:
        return {
            "points": len(self._points),
            "reached": len(self._reached),
            "actions": dict(self._fired),
            "fired": self._fired.total(),
            "survived": self._survived,
            "seconds": round(time.monotonic() - self._began_s, 1),
        }


@pytest.fixture(scope="module")
def guide(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guide]:
    names = shm_names()
    guide = Guide(tmp_path_factory)
    yield guide
    guide.end()
    until(lambda: shm_names() <= names, "nothing is left in /dev/shm")


@pytest.mark.slow
@pytest.mark.parametrize("batch", TOUR)
def test_a_crash_at_each_point_loses_nothing(guide: Guide, batch: str) -> None:
    guide.lead(TOUR[batch], "crash")


@pytest.mark.slow
def test_an_exception_where_nobody_expects_one_leaves_no_half_dead_process(guide: Guide) -> None:
    guide.lead([s for batch in TOUR.values() for s in batch if s.point in ONCE_FATAL], "error")


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("batch", TOUR)
def test_each_fault_at_each_point_loses_nothing(guide: Guide, batch: str, action: str) -> None:
    stops = [stop for stop in TOUR[batch] if action != "disk" or stop.writes]
    if not stops:
        pytest.skip("nothing is written there")
    guide.lead(stops, action)
