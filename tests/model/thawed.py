"""Going back to a state: once for each of its actions, so it is taken apart only once."""

from __future__ import annotations

import marshal
from typing import Any

from .arena import Arena
from .daemon import DAEMON, Daemon
from .frozen import Kept, reader
from .process import PROCESS
from .recall import Moment


class Thawed:
    """A frozen state taken apart once, to be gone back to after each of its actions."""

    def __init__(self, world: Any, frozen: Any) -> None:
        bodies, counts, rest, epochs = frozen
        process_count, self._commits, self._clients, self._budgets, generations = rest
        parts: list[Kept] = []
        begin = 0
        for body, count in zip(bodies, counts, strict=True):
            parts.append((body, epochs[begin : begin + count]))
            begin += count
        self._moment: Moment = world.recall.moment_of(
            parts[0], (1, *[current for current, _ in generations])
        )
        self._processes = {}
        for kept in parts[1 : 1 + process_count]:
            slot = marshal.loads(kept[0])[0]
            self._processes[slot] = world.shared(PROCESS, kept, generations[slot][0])
        older = {slot: list(names) for slot, (_, names) in enumerate(generations)}
        self._ghosts = []
        for kept in parts[1 + process_count : -2]:
            slot = marshal.loads(kept[0])[0]
            self._ghosts.append(world.shared(PROCESS, kept, older[slot].pop(0)))
        self._daemon: Daemon = world.shared(DAEMON, parts[-2])
        self._arena = Arena(world)
        self._arena.thaw(marshal.loads(parts[-1][0]), reader(parts[-1][1]))

    def becomes(self, world: Any) -> None:
        """Set the world to this state."""
        world.recall.go_to(self._moment)
        world.processes, world.ghosts = self._processes.copy(), self._ghosts.copy()
        world.daemon = self._daemon
        world.arena.set(self._arena)
        world.commits.thaw(self._commits)
        world.clients.thaw(self._clients)
        (world.kills, world.daemon_kills, world.suspicions, world.late,
         world.repeats) = self._budgets  # fmt: skip


__all__ = ["Thawed"]
