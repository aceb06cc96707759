"""Orders of training jobs, as in Salus: the choice of the next job, and the end of a turn. Pure.

An order applies to jobs of equal priority; ``leases`` decides how much memory a waiting job keeps.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

WORTH_MS: Final = 3.0  # shortest time without the device that is worth two switches


class JobView(NamedTuple):
    """A job, as an order sees it."""

    place: int  # position in the round robin: the smallest goes first
    share_ms: float  # its device time since any job was last added to the device
    left_ms: float  # device time until its script ends, at its current speed; 0: unknown
    state_bytes: int  # last size of its memory on the device; 0: unknown
    born: int = 0  # order of submission: the smallest is the oldest
    priority: int = 0  # the smallest goes first
    away_ms: float = -1.0  # time in each step without the device; negative: unknown


class JobOrder:
    """Round robin: each job trains for a cycle, then the next job. Base class of all orders."""

    shares = False  # True: a job that waits for copies inside a step stops for another job

    def rank(self, job: JobView) -> tuple[float, ...]:
        """Return the job's rank; the smallest goes next."""
        return (job.place,)

    def yields(self, running: JobView, waiting: JobView) -> bool:
        """Return True if the running job, after a whole cycle, stops for the waiting one."""
        return True

    def is_impatient(self, running: JobView, waiting: JobView) -> bool:
        """Return True if the waiting job waits for the end of a step only, not of a whole cycle."""
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
    """Least device time first, counted since any job was last added to the device."""

    def rank(self, job: JobView) -> tuple[float, ...]:
        return (job.share_ms, job.place)


class ShortestJobFirst(_Ranked):
    """Shortest remaining time first (srtf). A job goes first until its time is known."""

    def rank(self, job: JobView) -> tuple[float, ...]:
        return (job.left_ms, job.place)

    def is_impatient(self, running: JobView, waiting: JobView) -> bool:
        return True


class Pack(_Ranked):
    """Smallest job first, so that as many jobs as possible have their memory on the device."""

    def rank(self, job: JobView) -> tuple[float, ...]:
        return (job.state_bytes, job.place)


class Coshift(JobOrder):
    """Two jobs that share the device, as in Zico: one computes while the other does not need it."""

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
