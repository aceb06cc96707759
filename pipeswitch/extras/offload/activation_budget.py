"""Activation memory that a device's jobs share: each job claims tiles on the control page.

A tile is a unit of memory. Only the job that has the turn on the device may increase its claim; a
job that waits for copies or parks can only lower it. So only one claim grows at a time, and no
messages are needed: the job that has the turn may take all tiles that no job claims. During a step
a job claims the tiles that it uses, but at least ``least``, with which it can always finish.
Between steps it claims none. If all jobs' ``least`` fit together, each leaves room for others.
"""

from __future__ import annotations

from typing import Final

from pipeswitch.devices.worker_device import WorkerDevice

TILE_BYTES: Final = 64 << 10


class ActivationBudget:
    """Tiles that one job claims.

    Attributes:
        least: tiles with which a step can finish; before it is measured: all, so it runs alone.
        most: the most tiles that all jobs together claimed when this job's claim grew.
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
        """True if a step could finish now in the tiles that other jobs' current steps leave."""
        return self._total - sum(self._others()[0]) >= self.least

    @property
    def free_bytes(self) -> int:
        """Number of bytes that this job may hold; it leaves room for jobs between two steps."""
        claims, leasts = self._others()
        if self.least + sum(map(abs, leasts)) <= self._total and not self.is_stuck:
            claims = [max(claim, abs(least)) for claim, least in zip(claims, leasts, strict=True)]
        return (self._total - sum(claims)) * TILE_BYTES

    @property
    def can_wait(self) -> bool:
        """True if another job is in its step and not stuck, so it will release memory."""
        return any(claim and least >= 0 for claim, least in zip(*self._others(), strict=True))

    def learn(self, min_bytes: int) -> None:
        """Set ``least`` to the bytes with which a measured step could finish."""
        self.least = min(self._total, _tiles(min_bytes))
        self.is_known = True

    def remove(self) -> None:
        """Reset ``least`` to all tiles, because the steps have changed: they run alone again."""
        self.least, self.is_known = self._total, False

    def enter_step(self, *, is_in: bool = True) -> None:
        self._is_in_step = is_in
        self.hold(self.held * TILE_BYTES)

    def hold(self, size_bytes: int) -> None:
        """Set the bytes that the job holds, and write its claim to the control page."""
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
