"""What can happen next in a state of the world: every move, every message, every fault."""

from __future__ import annotations

from typing import Any, Final

from .daemon import OUT, TO_HOST
from .worker import SIGNAL, TASK, Worker

Action = tuple[Any, ...]
FAR_MS: Final = 1e8  # no jump of the clock goes that far


def actions(world: Any) -> list[Action]:
    """Everything that may happen next; the clock's jumps apart (``jumps``)."""
    if world.left is not None:
        return []
    steps: list[Action] = world.clients.actions()
    for slot, worker in sorted(world.workers.items()):
        if not worker.is_ready:
            # Nothing else depends on a process that is not up yet: first it gets ready, or dies.
            return [("ready", slot), *_deaths(world, slot, worker)]
        steps += _of_worker(world, slot, worker)
    for index, ghost in enumerate(world.ghosts):
        steps += [("late", index, channel) for channel in (TASK, SIGNAL) if ghost.out.get(channel)]
    for index in range(world.scope.devices):
        steps += _of_daemon(world, index)
    return steps


def jumps(world: Any) -> list[Action]:
    """Instants at which the scheduler wants to look again."""
    moment = world.recall.moment.seen
    if world.left is not None:
        return []
    instants = dict.fromkeys(at_ms for at_ms, _ in moment.due_ms)
    return [("clock", at_ms) for at_ms in instants if moment.now_ms < at_ms < FAR_MS]


def _of_worker(world: Any, slot: int, worker: Worker) -> list[Action]:
    steps = _deaths(world, slot, worker)
    if worker.may_hear:
        steps.append(("hears", slot))
        if world.repeats:
            steps.append(("hears_twice", slot))
    if worker.main_move() is not None:
        steps.append(("moves", slot))
    for channel in (TASK, SIGNAL):
        if worker.out.get(channel):
            steps.append(("tells", slot, channel))
            if world.repeats:
                steps.append(("tells_twice", slot, channel))
    return steps


def _deaths(world: Any, slot: int, worker: Worker) -> list[Action]:
    """Death and reap are one: a process that is dead and not reaped does nothing that one
    which is merely slow would not do, and the scheduler cannot tell them apart.
    """
    has_words = world.late and any(worker.out.values())
    if worker.is_doomed:
        return [("struck", slot)] + ([("struck_early", slot)] if has_words else [])
    if world.kills and not (world.scope.is_coarse and worker.is_idle):
        return [("kill", slot)] + ([("kill_early", slot)] if has_words else [])
    return []


def _of_daemon(world: Any, index: int) -> list[Action]:
    daemon, steps = world.daemons[index], []
    if daemon is None:
        return []
    if not daemon.is_ready:
        steps.append("daemon_ready")
    if daemon.copies and daemon._next_copy(daemon.copies[0]):
        steps.append("daemon_copies")
    if daemon._queues.get(TO_HOST):
        steps.append("daemon_works")
    if world.repeats and daemon.last_order:
        steps.append("daemon_hears_again")
    if world.daemon_kills:
        steps.append("kill_daemon")
    if daemon.out.get(OUT):
        steps.append("daemon_tells")
        if world.repeats:
            steps.append("daemon_tells_twice")
    return [(what, index) for what in steps]


__all__ = ["Action", "actions", "jumps"]
