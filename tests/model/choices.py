"""Actions that are possible in a state of the world: moves, messages and faults."""

from __future__ import annotations

from typing import Any, Final

from pipeswitch.ipc.messages.daemon import CopySliceIn, CopySliceOut

from .daemon import OUT, TO_HOST
from .worker import SIGNAL, TASK, Worker

Action = tuple[Any, ...]
OF_COPIES: Final = CopySliceIn | CopySliceOut
FAR_MS: Final = 1e8  # the clock never jumps to this instant or later


def actions(world: Any) -> list[Action]:
    """Return every possible action except jumps of the clock (see ``jumps``)."""
    if world.left is not None:
        return []
    steps: list[Action] = world.clients.actions()
    for slot, worker in sorted(world.workers.items()):
        if not worker.is_ready:
            # A process that is not ready affects nothing: it first gets ready, or it dies.
            return [("ready", slot), *_deaths(world, slot, worker)]
        steps += _of_worker(world, slot, worker)
    for index, ghost in enumerate(world.ghosts):
        steps += [("late", index, channel) for channel in (TASK, SIGNAL) if ghost.out.get(channel)]
    for index in range(world.scope.devices):
        steps += _of_daemon(world, index)
    return steps


def jumps(world: Any) -> list[Action]:
    """Return the jumps of the clock to instants at which the scheduler asked for a wake-up."""
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
    """Return the possible deaths of a worker. Death and reaping are one action, because for
    the scheduler a dead process is like a slow one until it is reaped."""
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
        if world.slice_errors and isinstance(daemon._queues[TO_HOST][0], OF_COPIES):
            steps.append("daemon_fails_slice")
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
