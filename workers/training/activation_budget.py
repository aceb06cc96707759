"""Activation memory that a device's jobs share: each job claims tiles on the control page.

Only the job that has the turn may increase its claim; one that waits for copies or parks can only
release memory. So no two words grow at once, and no messages are needed: memory that no other job
claims is free to the job that has the turn. A job in its step claims what it holds, and at least
what it can finish with (``least``), so it can always finish. A job between two steps claims
nothing; as long as all of them could be in their steps at once, room to begin is left for it.
"""

from __future__ import annotations

from typing import Final

from pipeswitch.devices.worker_device import WorkerDevice

TILE_BYTES: Final = 64 << 10


class ActivationBudget:
    """Tiles of one job.

    Attributes:
        least: tiles that a step can finish with; until known all, so that the job steps alone.
        most: the most tiles that all jobs held at once, at any increase by this one.
    """

    def __init__(self, view: WorkerDevice, slot: int, total_bytes: int) -> None:
        self._view, self._slot = view, slot
        self._total = total_bytes // TILE_BYTES
        self.is_known = self._is_in_step = self.is_stuck = False
        self.least, self.held, self.most = self._total, 0, 0

    @property
    def total_bytes(self) -> int:
        return self._total * TILE_BYTES

    @property
    def may_begin(self) -> bool:
        """A step could be finished, whatever those that are in theirs do."""
        return self._total - sum(self._others()[0]) >= self.least

    @property
    def free_bytes(self) -> int:
        """Number of bytes that this job may hold, with room left for jobs between two steps."""
        claims, leasts = self._others()
        if self.least + sum(map(abs, leasts)) <= self._total and not self.is_stuck:
            claims = [max(claim, abs(least)) for claim, least in zip(claims, leasts, strict=True)]
        return (self._total - sum(claims)) * TILE_BYTES

    @property
    def can_wait(self) -> bool:
        """True if a job in its step will continue, and release memory."""
        return any(claim and least >= 0 for claim, least in zip(*self._others(), strict=True))

    def learn(self, min_bytes: int) -> None:
        """Set ``least`` from a measured step."""
        self.least = min(self._total, _tiles(min_bytes))
        self.is_known = True

    def remove(self) -> None:
        """Reset ``least`` to all tiles: the steps changed, so the job is to have them alone."""
        self.least, self.is_known = self._total, False

    def enter_step(self, *, is_in: bool = True) -> None:
        self._is_in_step = is_in
        self.hold(self.held * TILE_BYTES)

    def hold(self, size_bytes: int) -> None:
        """Set the bytes that the job holds."""
        before, self.held = self.held, _tiles(size_bytes)
        claim = max(self.held, self.least) if self._is_in_step else self.held
        least = self.least * self.is_known
        self._view.control_page.write_tiles(self._slot, claim, -least if self.is_stuck else least)
        if self.held > before:
            self.most = max(self.most, claim + sum(self._others()[0]))

    def _others(self) -> tuple[list[int], list[int]]:
        claims, leasts = self._view.control_page.tiles()
        claims[self._slot] = leasts[self._slot] = 0
        return claims, leasts


def _tiles(size_bytes: int) -> int:
    return -(-size_bytes // TILE_BYTES)
