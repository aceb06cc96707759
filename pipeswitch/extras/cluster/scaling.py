"""Target number of nodes. Pure: the nodes' predictions go in, a number comes out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

LONG_MS: Final = 500.0  # a node with a longer queue is overloaded
SHORT_MS: Final = 100.0  # limit on the mean queue of the remaining nodes if one is removed
MORE_ROUNDS: Final = 5  # overloaded rounds in a row before a node is added; bursts are shorter
FEWER_ROUNDS: Final = 60  # idle rounds in a row before a node is removed; adding takes minutes


class Scale:
    """Target size of a cluster whose machines Ray adds and removes."""

    def __init__(self, least: int, most: int, target: int) -> None:
        self._least, self._most = least, most
        self.wanted = max(least, min(most, target))
        self._run = 0  # rounds in a row that need more nodes; negative: fewer nodes

    def look(self, queues_ms: Sequence[float], jobs: int) -> int:
        """Return the wanted number of nodes; call it once a round with the nodes' predicted queues.

        1. Add one after MORE_ROUNDS in which all wanted nodes run and are overloaded.
        2. Subtract one after FEWER_ROUNDS in which the remaining nodes would have short queues, and
           no more jobs than nodes.
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
