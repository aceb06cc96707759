"""Seeded bugs: the model must find each of them.

A bug changes the events that the scheduler gets, or the commands that it returns. The scheduler's
own code stays as it is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import msgspec

from pipeswitch.ipc.messages.base import JobName, SliceRead
from pipeswitch.ipc.messages.daemon import (
    CommitCopy,
    CopySliceIn,
    CopySliceOut,
    PersistCommit,
    Scrub,
    SliceCopied,
    TransmitModel,
)
from pipeswitch.ipc.messages.worker import CommitStep, GrantTurn, InferenceDone, StopTask
from pipeswitch.scheduler.scheduler import Scheduler
from pipeswitch.scheduler.state import events as ev

from .scope import Scope

Handle = Callable[[ev.Event], list[ev.Command]]

FAULTLESS = Scope(name="faultless", steps=1, requests=1, models=1)
PREEMPTED = replace(FAULTLESS, steps=2, is_coarse=True)
KILLED = replace(FAULTLESS, is_coarse=True, kills=1)
DAEMON_KILLED = replace(FAULTLESS, is_coarse=True, daemon_kills=1)
COMMITTED = replace(FAULTLESS, steps=2, requests=0)
GENERATED = replace(FAULTLESS, runs=2, is_coarse=True)
OVERTAKEN = replace(FAULTLESS, steps=0, requests=3, callers="ggm", is_coarse=True)
JOINED = replace(FAULTLESS, steps=0, requests=3, batch=2, is_coarse=True)


VARIANTS = replace(
    FAULTLESS, has_job=False, models=2, requests=2, groups=2, arena_mib=6, are_variants=True
)
SWAPPED = replace(PREEMPTED, arena_mib=6)
SWAPPED_IN_TURN = replace(PREEMPTED, jobs=2, requests=0, cycles=2, arena_mib=4)


def _kind(command: ev.Command) -> type:
    """Return the class of the message that a command sends, else the class of the command."""
    return type(getattr(command, "message", command))


def _without(kind: type) -> Callable[[Handle, ev.Event], list[ev.Command]]:
    return lambda handle, event: [one for one in handle(event) if _kind(one) is not kind]


def _answers_twice(handle: Handle, event: ev.Event) -> list[ev.Command]:
    commands = handle(event)
    return commands + [one for one in commands if isinstance(one, ev.Reply) and one.outputs]


def _suspects_are_dead(handle: Handle, event: ev.Event) -> list[ev.Command]:
    commands = handle(event)
    for command in list(commands):
        if isinstance(command, ev.Kill):
            commands += handle(ev.Exited(command.target, -9))
    return commands


def _names_the_next_step(handle: Handle, event: ev.Event) -> list[ev.Command]:
    match event:
        case ev.Received(message=CommitStep(step=step) as commit):
            commit = msgspec.structs.replace(commit, step=step + 1)
            event = msgspec.structs.replace(event, message=commit)
        case _:
            pass
    return handle(event)


def _reads_at_once(handle: Handle, event: ev.Event) -> list[ev.Command]:
    """Let the job write its slice as soon as the copy is ordered."""
    commands = handle(event)
    for one in list(commands):
        if isinstance(one, ev.Send) and isinstance(copy := one.message, CommitCopy):
            read = SliceRead(job=copy.job, op_id=copy.op_id, number=copy.number)
            commands += handle(ev.Received(one.target, read))
    return commands


def _exchanges_outputs(handle: Handle, event: ev.Event) -> list[ev.Command]:
    match event:
        case ev.Received(message=InferenceDone(outputs=[first, other, *others]) as done):
            done = msgspec.structs.replace(done, outputs=(other, first, *others))
            event = msgspec.structs.replace(event, message=done)
        case _:
            pass
    return handle(event)


def _forgets_deadlines(handle: Handle, event: ev.Event) -> list[ev.Command]:
    if isinstance(event, ev.InferArrived):
        origin = msgspec.structs.replace(event.origin, deadline_at_ms=None)
        event = msgspec.structs.replace(event, origin=origin)
    return handle(event)


def _without_memory(handle: Handle, event: ev.Event) -> list[ev.Command]:
    return [] if isinstance(event, ev.PoolFreed) else handle(event)


def _answers_early(handle: Handle, event: ev.Event) -> list[ev.Command]:
    commands: list[ev.Command] = []
    for command in handle(event):
        if isinstance(command, ev.Reply) and command.more and "tokens" in command.body:
            commands.append(msgspec.structs.replace(command, more=False))
        commands.append(command)
    return commands


def _ends_at_once(kind: type) -> Callable[[Handle, ev.Event], list[ev.Command]]:
    """Let the scheduler take the order of a copy for its end."""

    def alter(handle: Handle, event: ev.Event) -> list[ev.Command]:
        commands = handle(event)
        for one in list(commands):
            if isinstance(one, ev.Send) and _kind(one) is kind:
                op_id = one.message.op_id  # type: ignore[attr-defined]
                copied = SliceCopied(op_id=op_id, began_at_ms=0.0, ended_at_ms=0.0)
                commands += handle(ev.Received(one.target, copied))
        return commands

    return alter


def _exchanges_images(handle: Handle, event: ev.Event) -> list[ev.Command]:
    """Copy the image in of the job that was copied out just now, for which the other one waits."""
    is_out = isinstance(event, ev.Received) and isinstance(event.message, SliceCopied)
    other = {"job": JobName("other"), "other": JobName("job")}
    return [
        msgspec.structs.replace(one, image_of=other[one.image_of or ""])
        if is_out and isinstance(one, ev.Send) and _kind(one) is CopySliceIn
        else one
        for one in handle(event)
    ]


def _copies_nothing_over_a_variant(handle: Handle, event: ev.Event) -> list[ev.Command]:
    """Raise the fence of a group of which only a part was to be copied, without that part."""
    commands = handle(event)
    for index, one in enumerate(commands):
        if isinstance(one, ev.Send) and isinstance(order := one.message, TransmitModel):
            groups = [
                msgspec.structs.replace(group, parts=None if group.parts is None else ())
                for group in order.groups
            ]
            order = msgspec.structs.replace(order, groups=tuple(groups))
            commands[index] = msgspec.structs.replace(one, message=order)
    return commands


@dataclass(frozen=True)
class Mutant:
    """Seeded bug: its name, the scope in which it is found, and how it changes commands."""

    name: str
    scope: Scope
    alter: Callable[[Handle, ev.Event], list[ev.Command]]

    @contextlib.contextmanager
    def planted(self) -> Iterator[None]:
        """Put the bug into the scheduler while the context is open."""
        handle = Scheduler.handle

        def altered(scheduler: Scheduler, event: ev.Event, now_ms: float) -> list[Any]:
            return self.alter(lambda one: handle(scheduler, one, now_ms), event)

        with patch.object(Scheduler, "handle", altered):
            yield


MUTANTS = (
    Mutant("a job is not told to stop for a request", PREEMPTED, _without(StopTask)),
    Mutant("a job is not given its turn", PREEMPTED, _without(GrantTurn)),
    Mutant("a model is not sent before its request runs", PREEMPTED, _without(TransmitModel)),
    Mutant("a slice is not zeroed for its next owner", KILLED, _without(Scrub)),
    Mutant("a dead worker is not replaced", KILLED, _without(ev.Spawn)),
    Mutant("workers outlive their memory daemon", DAEMON_KILLED, _without(ev.Kill)),
    Mutant("a commit is not copied", COMMITTED, _without(CommitCopy)),
    Mutant(
        "a commit is not written to disk before the server leaves",
        replace(PREEMPTED, requests=0, drains=1),
        _without(PersistCommit),
    ),
    Mutant("a commit has the number of another step", COMMITTED, _names_the_next_step),
    Mutant("a slice is written before the commit has read it", COMMITTED, _reads_at_once),
    Mutant("a request is answered twice", PREEMPTED, _answers_twice),
    Mutant(
        "a suspect is taken for dead before it is reaped",
        replace(PREEMPTED, steps=1, suspicions=1),
        _suspects_are_dead,
    ),
    Mutant("a task that was taken back stays on its worker", OVERTAKEN, _without(ev.TakeBack)),
    Mutant("joined requests read each other's answers", JOINED, _exchanges_outputs),
    Mutant(
        "a generation that waits for memory is forgotten",
        replace(GENERATED, parks=1),
        _without_memory,
    ),
    Mutant("a generation is answered before its last token", GENERATED, _answers_early),
    Mutant(
        "a request is begun after its deadline",
        replace(PREEMPTED, requests=2, deadlines=1),
        _forgets_deadlines,
    ),
    Mutant("a range is lent before the copy out ended", SWAPPED, _ends_at_once(CopySliceOut)),
    Mutant("a job continues before the copy in ended", SWAPPED, _ends_at_once(CopySliceIn)),
    Mutant(
        "a fence is raised for a range that was not copied",
        VARIANTS,
        _copies_nothing_over_a_variant,
    ),
    Mutant("an image of another job is copied in", SWAPPED_IN_TURN, _exchanges_images),
)
