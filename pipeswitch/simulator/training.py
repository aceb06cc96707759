"""Training jobs on paper, and what became of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .costs import Training


@dataclass(frozen=True, kw_only=True)
class PaperJob:
    """A script of equal steps, submitted ``at_ms`` after the trace begins."""

    name: str
    steps: int
    step_ms: float
    memory_bytes: int  # of the device; a commit copies all of it
    at_ms: float = 0.0

    def script(self) -> Training:
        """As the simulated world takes it."""
        return Training(steps=self.steps, step_ms=self.step_ms, slice_bytes=self.memory_bytes,
                        state_bytes=self.memory_bytes)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A job's end; milliseconds of the virtual clock.

    Attributes:
        jct_ms: from its submission to its end (job completion time).
        trained_ms: of that, it had the device.
        preempted_ms: of that, it waited in place, its memory kept, for requests or other jobs.
        evictions: how often it had to leave its memory.
    """

    name: str
    at_ms: float
    jct_ms: float
    trained_ms: float
    preempted_ms: float
    evictions: int

    @property
    def share(self) -> float:
        """Of the device's time while it was there."""
        return self.trained_ms / self.jct_ms if self.jct_ms else 1.0


def trained(job: PaperJob, jct_ms: float, row: Mapping[str, Any]) -> Trained:
    """``row``: of ``pipeswitch jobs``, as it ended."""
    return Trained(
        name=job.name, at_ms=job.at_ms, jct_ms=jct_ms, trained_ms=1000.0 * row["trained_s"],
        preempted_ms=1000.0 * row["preempted_s"], evictions=row["evictions"],
    )  # fmt: skip
