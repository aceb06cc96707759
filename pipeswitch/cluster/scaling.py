"""Target number of nodes. Pure: the nodes' predictions go in, a number comes out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

LONG_MS: Final = 500.0  # a node that has accepted more than this is behind
SHORT_MS: Final = 100.0  # less than this for each node of one fewer, and one fewer is enough
MORE_ROUNDS: Final = 5  # in a row: a burst is over by then
FEWER_ROUNDS: Final = 60  # a machine takes minutes to come back


class Scale:
    """Scale of a cluster whose machines Ray adds and removes."""

    def __init__(self, least: int, most: int, target: int) -> None:
        self._least, self._most = least, most
        self.wanted = max(least, min(most, target))
        self._run = 0  # rounds in a row that spoke for more; below zero: for fewer

    def look(self, queues_ms: Sequence[float], jobs: int) -> int:
        """Return the wanted number of nodes; call it once a round with the nodes' predicted queues.

        1. All are behind, and none is on its way: one more.
        2. One fewer would have short queues, and each job a node of its own: one fewer.
        """
        is_behind = len(queues_ms) >= self.wanted and min(queues_ms, default=0.0) > LONG_MS
        fewer = self.wanted - 1
        is_idle = sum(queues_ms) <= SHORT_MS * fewer and jobs <= fewer
        turn = is_behind - is_idle
        self._run = self._run + turn if self._run * turn > 0 else turn
        if self._run == MORE_ROUNDS:
            self.wanted, self._run = min(self.wanted + 1, self._most), 0
        elif self._run == -FEWER_ROUNDS:
            self.wanted, self._run = max(fewer, min(self.wanted, self._least)), 0
        return self.wanted
