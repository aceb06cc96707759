"""What can happen next in a state of the world: every move, every message, every fault."""

from __future__ import annotations

from typing import Any, Final

from .process import SIGNAL, TASK, Process

Action = tuple[Any, ...]
FAR_MS: Final = 1e8  # no jump of the clock goes that far


def actions(world: Any) -> list[Action]:
    """Everything that may happen next; the clock's jumps apart (``jumps``)."""
    if world.clients.has_left:
        return []
    found: list[Action] = world.clients.actions()
    for slot, process in sorted(world.processes.items()):
        if process.life == "booting":
            # Nobody sees whether it is up before it says so: first it gets ready, or dies.
            return [("ready", slot), *_deaths(world, slot, process)]
        found += _of_process(world, slot, process)
    for index, ghost in enumerate(world.ghosts):
        if ghost.task_out:
            found.append(("late", index, TASK))
        if ghost.signal_out:
            found.append(("late", index, SIGNAL))
    return found + _of_daemon(world)


def jumps(world: Any) -> list[Action]:
    """Instants at which the scheduler wants to look again."""
    moment = world.recall.moment
    if world.clients.has_left:
        return []
    return [("clock", due) for due in moment.due_ms if moment.now_ms < due < FAR_MS]


def _of_process(world: Any, slot: int, process: Process) -> list[Action]:
    found = _deaths(world, slot, process)
    if process.life == "up":
        if process.may_hear():
            found.append(("hears", slot))
            if world.repeats:
                found.append(("hears_twice", slot))
        if process.may_move(world):
            found.append(("moves", slot))
    for channel, queue in ((TASK, process.task_out), (SIGNAL, process.signal_out)):
        if queue:
            found.append(("tells", slot, channel))
            if world.repeats:
                found.append(("tells_twice", slot, channel))
    return found


def _deaths(world: Any, slot: int, process: Process) -> list[Action]:
    """Death and reap are one: a process that is dead and not reaped does nothing that one
    which is merely slow would not do, and the scheduler cannot tell them apart.
    """
    has_words = world.late and bool(process.task_out or process.signal_out)
    if process.is_doomed:
        return [("struck", slot)] + ([("struck_early", slot)] if has_words else [])
    if world.kills and not (world.scope.is_coarse and process.is_idle):
        return [("kill", slot)] + ([("kill_early", slot)] if has_words else [])
    return []


def _of_daemon(world: Any) -> list[Action]:
    daemon, found = world.daemon, []
    if daemon.life == "booting":
        found.append(("daemon_ready",))
    elif daemon.life == "up":
        if daemon.copies:
            found.append(("daemon_copies",))
        if daemon.lane:
            found.append(("daemon_works",))
        if world.repeats and daemon.last_order:
            found.append(("daemon_hears_again",))
    if daemon.life in ("booting", "up") and world.daemon_kills:
        found.append(("kill_daemon",))
    if daemon.out:
        found.append(("daemon_tells",))
        if world.repeats:
            found.append(("daemon_tells_twice",))
    return found


__all__ = ["Action", "actions", "jumps"]
