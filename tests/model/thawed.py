"""Going back to a state: once for each of its actions, so it is taken apart only once."""

from __future__ import annotations

from typing import Any

from .clients import JOB
from .frozen import Kept
from .recall import Moment


class Thawed:
    """A frozen state taken apart once, to be gone back to after each of its actions."""

    def __init__(self, world: Any, frozen: Any) -> None:
        bodies, counts, rest, epochs = frozen
        (slots, ghosts, self._area, self._clients, self._left, self._budgets,
         generations) = rest  # fmt: skip
        parts: list[Kept] = []
        begin = 0
        for body, count in zip(bodies, counts, strict=True):
            parts.append((body, epochs[begin : begin + count]))
            begin += count
        self._moment: Moment = world.recall.moment_of(
            parts[0], (1, *[current for current, _ in generations])
        )
        self._workers = {
            slot: world.worker_of(parts[i], slot, generations[slot][0])
            for i, slot in enumerate(slots, start=1)
        }
        older = {slot: list(names) for slot, (_, names) in enumerate(generations)}
        self._ghosts = [
            world.worker_of(parts[i], slot, older[slot].pop(0))
            for i, slot in enumerate(ghosts, start=1 + len(slots))
        ]
        self._daemon = world.daemon_of(parts[-2])
        self._device = world.device_of(parts[-1])
        self._kept_device = self._device, parts[-1]

    def becomes(self, world: Any) -> None:
        """Set the world to this state."""
        world.recall.go_to(self._moment)
        world.clock.now_ms, world.left = self._moment.now_ms, self._left
        world.workers, world.ghosts = self._workers.copy(), self._ghosts.copy()
        world.daemon = self._daemon
        vars(world.device).update(self._device)
        world.kept_device = self._kept_device
        world.scene.commits = {}
        if self._area is not None:
            world.area.thaw(*self._area)
            world.scene.commits = {JOB: world.area}
        world.clients.thaw(self._clients)
        (world.kills, world.daemon_kills, world.suspicions, world.late,
         world.repeats) = self._budgets  # fmt: skip


__all__ = ["Thawed"]
