"""A frozen state that is unpacked only once, although the world returns to it for each action."""

from __future__ import annotations

from typing import Any

from pipeswitch.extras.lab.device import Image
from pipeswitch.extras.lab.world import key_of
from pipeswitch.ipc.messages.base import Slot

from .frozen import Kept
from .recall import Moment


class Thawed:
    """Unpacked state, to which the world returns after each of the state's actions."""

    def __init__(self, world: Any, frozen: Any) -> None:
        bodies, counts, rest, epochs = frozen
        (slots, ghosts, self._areas, self._images, *others, self._budgets, incarnations) = rest
        self._clients, self._left = others
        parts: list[Kept] = []
        begin = 0
        for body, count in zip(bodies, counts, strict=True):
            parts.append((body, epochs[begin : begin + count]))
            begin += count
        self._moment: Moment = world.recall.moment_of(
            parts[0], tuple([(1, *[current for current, _ in of]) for of in incarnations])
        )
        ranked = {
            key_of(index, Slot(slot)): rank
            for index, of in enumerate(incarnations)
            for slot, rank in enumerate(of)
        }
        self._workers = {
            key: world.worker_of(parts[i], key, ranked[key][0])
            for i, key in enumerate(slots, start=1)
        }
        older = {key: list(names) for key, (_, names) in ranked.items()}
        self._ghosts = [
            world.worker_of(parts[i], key, older[key].pop(0))
            for i, key in enumerate(ghosts, start=1 + len(slots))
        ]
        count = len(incarnations)
        daemons, devices = parts[-2 * count : -count], parts[-count:]
        self._daemons = {i: world.daemon_of(packed, i) for i, packed in enumerate(daemons)}
        self._kept_devices = [(world.device_of(packed), packed) for packed in devices]

    def becomes(self, world: Any) -> None:
        """Set the world to this state."""
        world.recall.go_to(self._moment)
        world.clock.now_ms, world.left = self._moment.seen.now_ms, self._left
        world.workers, world.ghosts = self._workers.copy(), self._ghosts.copy()
        world.daemons = self._daemons.copy()
        commits, images = {}, {job: Image(*image) for job, image in self._images}
        for (job, area), frozen in zip(world.areas.items(), self._areas, strict=True):
            if frozen is not None:
                area.thaw(*frozen)
                commits[job] = area
        for scene, (values, _) in zip(world.scenes, self._kept_devices, strict=True):
            vars(scene.device).update(values)
            scene.commits, scene.images = commits, images
        world.kept_devices = self._kept_devices.copy()
        world.clients.thaw(self._clients)
        (
            world.kills,
            world.daemon_kills,
            world.suspicions,
            world.late,
            world.repeats,
            world.cycles,
            world.slice_errors,
        ) = self._budgets


__all__ = ["Thawed"]
