"""Timing of a job's commits: when one is due, and whether it may overlap the next body.

A *body* is the loop's code for one batch; a *point* is a boundary of steps, which can be committed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch

FIRST_COMMIT_GAP_MS: Final = 50.0  # gap before the first commit of each run of the script
COMMIT_SHARE: Final = 50  # a commit may take 1/50 of the time, as copies cost memory bandwidth
MIN_WAIT_FOR_STEP_MS: Final = 1000.0  # an eviction may wait at least this long for a step to end


class CommitTiming:
    """Times at which commits are due. The gap between commits doubles up to ``every_ms``: a worker
    that keeps dying early still makes progress, and commits take a limited share of the time."""

    def __init__(self, every_ms: float, now_ms: Callable[[], float]) -> None:
        self._every_ms = every_ms
        self._now_ms = now_ms
        self._gap_ms = min(FIRST_COMMIT_GAP_MS, every_ms)
        self.committed_at_ms = now_ms()  # time of the last commit, or of the start
        self._next_at_ms = self.committed_at_ms + self._gap_ms
        self.grows_at_ms = 0.0  # time before which the state area must not grow again
        self._evicted_at_ms: float | None = None  # when an eviction was first seen in a step

    @property
    def is_due(self) -> bool:
        return self.is_due_within(0.0)

    def is_due_within(self, ms: float) -> bool:
        return self._now_ms() + ms >= self._next_at_ms

    def committed(self, took_ms: float) -> None:
        """Record a successful commit."""
        self._gap_ms = min(2 * self._gap_ms, self._every_ms)
        self.committed_at_ms = self._now_ms()
        self._next_at_ms = self.committed_at_ms + max(self._gap_ms, COMMIT_SHARE * took_ms)

    def failed(self) -> None:
        self._next_at_ms = self._now_ms() + self._every_ms

    def hurry(self) -> None:
        """Make the next commit due now, because the latest commit may mix two states."""
        self._next_at_ms = self._now_ms()

    def waits_for_step(self) -> bool:
        """Return True while an evicted job may continue to its next point. The limit is the time of
        the steps since the last commit, because waiting saves at most that time."""
        now_ms = self._now_ms()
        if self._evicted_at_ms is None:
            self._evicted_at_ms = now_ms
        since_commit_ms = self._evicted_at_ms - self.committed_at_ms
        return now_ms - self._evicted_at_ms < max(MIN_WAIT_FOR_STEP_MS, since_commit_ms)


class WriteWatch:
    """Detector of bodies that write parameters before the optimizer does.

    Version counters show most writes, but not writes through ``.data``. So the first bodies, and
    bodies after a commit, are checked with a sum of the parameters. A commit must end
    before a body that writes begins, and no commit may begin during such a body.

    Args:
        was_watched, writes_unseen: results of the job's earlier runs of the script.
    """

    def __init__(self, was_watched: bool, writes_unseen: bool) -> None:
        self.was_watched = was_watched  # a watched body left its parameters unchanged
        self.writes_unseen = writes_unseen  # a body wrote without changing a version counter
        self.is_in_body = False
        self._is_clean = False  # the last body wrote no parameters before its optimizer step
        self._sum: torch.Tensor | None = None  # the last point's, on the device; None: not watched

    def begin_body(self) -> None:
        self._is_clean, self.is_in_body = False, True

    def at_point(self, sum_now: Callable[[], torch.Tensor], *, is_due: bool) -> None:
        """Decide whether to watch the next body; watching costs two sums over the parameters."""
        watch = (is_due or not self.was_watched) and not self.writes_unseen
        self._sum = sum_now() if watch else None

    def before_optimizer(self, is_intact: bool, sum_now: Callable[[], torch.Tensor]) -> bool:
        """Check a finished body; return False if it wrote without changing a version counter.

        Args:
            is_intact: True if no version counter changed.
        """
        self._is_clean = is_intact
        before, self._sum = self._sum, None
        if before is None or not is_intact:
            return True
        if torch.equal(before, sum_now()):
            self.was_watched = True
            return True
        self.writes_unseen = True
        return False

    @property
    def is_trusted(self) -> bool:
        """True if a point may be committed while a body runs."""
        return self.was_watched and not self.writes_unseen

    @property
    def may_commit(self) -> bool:
        """True if a point may be committed now."""
        return self.is_trusted or not self.is_in_body

    @property
    def may_overlap(self) -> bool:
        """True if the next body will probably not change the parameters."""
        return self._is_clean and self.is_trusted
