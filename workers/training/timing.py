"""Timing of a job's commits: when one is due, and if its copy may overlap the next body."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

FIRST_COMMIT_GAP_MS: Final = 50.0  # of each start of the script
COMMIT_SHARE: Final = 50  # a commit may take 1/50 of the time: the copy costs memory bandwidth
MIN_WAIT_FOR_STEP_MS: Final = 1000.0  # minimum wait of an eviction for a body that has begun


class CommitTiming:
    """The gap doubles up to the configured one: a worker that keeps dying early makes progress
    all the same, and no commit takes more than its share."""

    def __init__(self, every_ms: float, now_ms: Callable[[], float]) -> None:
        self._every_ms = every_ms
        self._now_ms = now_ms
        self._gap_ms = min(FIRST_COMMIT_GAP_MS, every_ms)
        self.committed_at_ms = now_ms()  # the last commit; before that the start
        self._next_at_ms = self.committed_at_ms + self._gap_ms
        self.grows_at_ms = 0.0  # when the state area grows, after it was too small
        self._evicted_at_ms: float | None = None  # seen in a body that cannot end without loss

    @property
    def is_due(self) -> bool:
        return self._now_ms() >= self._next_at_ms

    def committed(self, took_ms: float) -> None:
        """Record a successful commit."""
        self._gap_ms = min(2 * self._gap_ms, self._every_ms)
        self.committed_at_ms = self._now_ms()
        self._next_at_ms = self.committed_at_ms + max(self._gap_ms, COMMIT_SHARE * took_ms)

    def failed(self) -> None:
        self._next_at_ms = self._now_ms() + self._every_ms

    def hurry(self) -> None:
        """Make the next commit due now, because the present one may mix two states."""
        self._next_at_ms = self._now_ms()

    def waits_for_step(self) -> bool:
        """Return whether an evicted job may still wait for its next point. The limit is the time of
        the steps since the last commit, because the wait saves at most that time."""
        now_ms = self._now_ms()
        if self._evicted_at_ms is None:
            self._evicted_at_ms = now_ms
        since_commit_ms = self._evicted_at_ms - self.committed_at_ms
        return now_ms - self._evicted_at_ms < max(MIN_WAIT_FOR_STEP_MS, since_commit_ms)


class WriteWatch:
    """Watch for bodies that write parameters before the optimizer does.

    Version counters detect most writes, but not those through ``.data``. So the first bodies, and
    those after a commit, are watched by a sum over the parameters. A body that writes must not
    overlap a commit, and its point must not be committed within the step.

    Args:
        was_watched, writes_unseen: results of an earlier run of the script.
    """

    def __init__(self, was_watched: bool, writes_unseen: bool) -> None:
        self.was_watched = was_watched  # a body did not change its parameters
        self.writes_unseen = writes_unseen  # one did, and no version counter changed
        self.is_in_body = False
        self._is_clean = False  # the last body wrote nothing before its step
        self._sum: int | None = None  # at the last point; None: this body is not watched

    def begin_body(self) -> None:
        self._is_clean, self.is_in_body = False, True

    def at_point(self, sum_now: Callable[[], int], *, is_due: bool) -> None:
        """Watch the body after a captured point, if that is worth the time."""
        watch = (is_due or not self.was_watched) and not self.writes_unseen
        self._sum = sum_now() if watch else None

    def before_optimizer(self, is_intact: bool, sum_now: Callable[[], int]) -> bool:
        """Check a finished body; return False if it was caught writing unseen.

        Args:
            is_intact: True if no version counter changed.
        """
        self._is_clean = is_intact
        before, self._sum = self._sum, None
        if before is None or not is_intact:
            return True
        if before == sum_now():
            self.was_watched = True
            return True
        self.writes_unseen = True
        return False

    @property
    def is_trusted(self) -> bool:
        """A point may be committed while a body runs."""
        return self.was_watched and not self.writes_unseen

    @property
    def may_commit(self) -> bool:
        """Return whether a point may be committed now."""
        return self.is_trusted or not self.is_in_body

    @property
    def may_overlap(self) -> bool:
        """Return whether the next body will probably not change the parameters."""
        return self._is_clean and self.is_trusted
