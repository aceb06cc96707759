"""Orders of training jobs: the next job, and the end of a turn, as in Salus. Pure.

Orders apply within a priority; ``leases`` decides how much memory a waiting job keeps.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

WORTH_MS: Final = 3.0  # from the device's leaving one job to its coming back: two switches


class JobView(NamedTuple):
    """A job, as an order sees it."""

    place: int  # behind all that had a whole cycle later
    share_ms: float  # of the device's time, since a job came to it last
    left_ms: float  # of it until its script ends, as it goes now; 0: not known yet
    state_bytes: int  # of its memory on the device, as it was last; 0: not known yet
    born: int = 0  # the smaller, the earlier it was submitted
    priority: int = 0  # the smaller, the earlier
    away_ms: float = -1.0  # of a step in which it does without the device; negative: not known yet


class JobOrder:
    """Round robin: each job has a cycle, then the next one. Derive from it."""

    shares = False  # one may stop for another in its step, while it waits for copies

    def rank(self, job: JobView) -> tuple[float, ...]:
        """Return the job's rank; the smallest goes next."""
        return (job.place,)

    def yields(self, running: JobView, waiting: JobView) -> bool:
        """Return True if the running job, after a whole cycle, stops for the waiting one."""
        return True

    def is_impatient(self, running: JobView, waiting: JobView) -> bool:
        """Return True if the waiting job waits only for the end of a step, not of a cycle."""
        return False


class _Ranked(JobOrder):
    """Order in which a job continues until a waiting job ranks before it."""

    def yields(self, running: JobView, waiting: JobView) -> bool:
        return self.rank(waiting) < self.rank(running)


class Fifo(_Ranked):
    """Order of submission; while a job cannot continue, the next one runs."""

    def rank(self, job: JobView) -> tuple[float, ...]:
        return (job.born,)


class Fair(_Ranked):
    """Least device time first, counted since the last of the jobs came."""

    def rank(self, job: JobView) -> tuple[float, ...]:
        return (job.share_ms, job.place)


class ShortestJobFirst(_Ranked):
    """Shortest remaining time first (srtf). A job with an unknown time runs until it is known."""

    def rank(self, job: JobView) -> tuple[float, ...]:
        return (job.left_ms, job.place)

    def is_impatient(self, running: JobView, waiting: JobView) -> bool:
        return True


class Pack(_Ranked):
    """Smallest job first: the most jobs have their memory on the device at the same time."""

    def rank(self, job: JobView) -> tuple[float, ...]:
        return (job.state_bytes, job.place)


class Coshift(JobOrder):
    """Two jobs phase by phase, as in Zico: one has the device while the other does without."""

    shares = True

    def is_impatient(self, running: JobView, waiting: JobView) -> bool:
        return any(not 0 <= job.away_ms < WORTH_MS for job in (running, waiting))


JOB_ORDERS: Final[Mapping[str, JobOrder]] = {
    "rotate": JobOrder(),
    "fair": Fair(),
    "srtf": ShortestJobFirst(),
    "fifo": Fifo(),
    "pack": Pack(),
    "coshift": Coshift(),
}
