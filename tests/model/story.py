"""Stories: paths through the states, as numbered lines of text."""

from __future__ import annotations

from typing import Any, Final

from pipeswitch.extras.lab.device import Violation
from pipeswitch.ipc.messages.daemon import CommitCopy
from pipeswitch.scheduler.state import events as ev

from .choices import Action
from .daemon import OUT, TO_HOST
from .scope import MIB, Scope
from .worker import SIGNAL
from .world import World

_SCRIPTS: Final = {
    "begins": "has its slice, loads what was committed, and asks for a batch",
    "takes": "takes the device and begins a step",
    "trains": "has done forward and backward, and lets the optimizer write",
    "stops": "stops within the step, where it is asked to",
    "waits": "sees that the commit is over, and lets the optimizer write",
    "writes": "writes the other half of the parameters; the step is done",
    "fetches": "goes on after the boundary between two steps",
    "commits": "is through, or unwinds: commits what is not committed, or ends",
    "leaves": "leaves: its process exits",
}
_AGAIN: Final = ", and it will be heard again"
_PLAIN: Final = {
    "train": "A client submits a training job.",
    "pause": "The user pauses the job.",
    "resume": "The user resumes the job.",
    "drain": "The server is asked to finish what it has accepted, and to leave.",
    "pin": "The operator loads the first model.",
    "move": "The user moves the job.",
    "room": "The request pool has memory again.",
}


def describe(world: World, action: Action) -> str:
    """Return a sentence that describes ``action``, which the world has not made yet."""
    kind, *rest = action
    if kind in _PLAIN:
        return _PLAIN[kind]
    if kind == "ask":
        waits = ", which will wait for memory" if rest else ""
        return f"A client sends request r{world.clients.asked + 1}{waits}."
    if kind == "cancel":
        return f"The client of request r{rest[0]} takes it back."
    if kind == "hint":
        return f"A request for model {world.model_name(rest[0])} is announced."
    if kind in ("clock", "suspect", "passes", "cycle"):
        why = "nothing else happens" if kind == "clock" else "while all are merely slow"
        return f"The clock goes to {rest[0] / 1000:.0f} s: {why}."
    if "daemon" in kind:
        return _of_daemon(world, kind, rest[0])
    if kind == "late":
        ghost, channel = world.ghosts[rest[0]], rest[1]
        return f"Late, {_message(ghost.out[channel][0])} of dead {ghost.name} is heard."
    return _of_worker(world, kind, rest)


def _of_daemon(world: World, kind: str, index: int) -> str:
    who, daemon = f"The memory daemon{_of(world, index)}", world.own_daemon(index)
    again = _AGAIN if kind == "daemon_tells_twice" else ""
    match kind:
        case "daemon_ready":
            return f"{who} has taken its memory."
        case "daemon_copies":
            return f"{who} copies one layer group, then raises its fence."
        case "kill_daemon":
            return f"{who} dies."
        case "daemon_works":
            order = daemon._queues[TO_HOST][0]
            parts = (" (its first half)", " (the rest)", " (makes it current)")
            part = parts[daemon.parts_done] if isinstance(order, CommitCopy) else ""
            return f"{who} works on {_message(order)}{part}."
        case "daemon_fails_slice":
            return f"{who} fails at {_message(daemon._queues[TO_HOST][0])}."
        case "daemon_hears_again":
            return f"{who} is reached again by {_message(daemon.last_order)}."
        case _:
            return f"{who} is heard{again}: {_message(daemon.out[OUT][0])}."


def _of(world: World, index: int) -> str:
    """Return " of device N" if there are several devices, else an empty string."""
    return f" of device {index}" if world.scope.devices > 1 else ""


def _of_worker(world: World, kind: str, rest: list[Any]) -> str:
    worker = world.workers[rest[0]]
    who = f"Worker {worker.slot}{_of(world, worker.scene.index)}"
    if kind in ("tells", "tells_twice"):
        again = _AGAIN if kind == "tells_twice" else ""
        return f"{who} is heard{again}: {_message(worker.out[rest[1]][0])}."
    if kind in ("hears", "hears_twice"):
        again = ", and will hear it again" if kind == "hears_twice" else ""
        return f"{who} hears {_message(worker.inbox[SIGNAL][0])}{again}."
    if kind == "ready":
        return f"{who} is up."
    if kind in ("kill", "struck"):
        why = "is killed" if kind == "kill" else "is struck by the SIGKILL it was sent"
        return f"{who} {why}; what it had said is heard, then its exit."
    if kind in ("kill_early", "struck_early"):
        return f"{who} dies; its exit is heard before what it had said."
    move, task = worker.main_move(), worker.inference
    assert move is not None
    if worker.script is not None:
        return f"{who}: the script {_SCRIPTS[move.what]}."
    if task is None:
        return f"{who} starts the script, from the commit that is there now, and asks for a slice."
    if task.has_begun:
        return f"{who} computes group {task.next_group} of {task.order.model}."
    order = task.order
    return f"{who} sees its turn {order.op_id} and begins request {order.runs[0].request_id}."


def _message(message: Any) -> str:
    fields = ("model", "step", "number", "op_id", "turn", "next_turn", "outcome", "residency_id")
    fields += ("swap_id", "error")
    shown = [f"{name} {getattr(message, name)}" for name in fields if hasattr(message, name)]
    return f"{type(message).__name__}({', '.join(shown)})"


def order_of(world: World, command: Any) -> str | None:
    """Return a sentence for a command of the scheduler; None if the command only informs."""
    target = getattr(command, "target", None) or ev.Address("daemon")
    where = _of(world, target.device)
    who = "the memory daemon" if target.kind == "daemon" else f"{target.kind} {target.slot}"
    match command:
        case ev.Send(message=message):
            return f"to {who}{where}: {_message(message)}{_place(message)}"
        case ev.RaiseTurn(turn=turn):
            return f"the board{where}: its turn is {turn}"
        case ev.Interrupt():
            return f"the board{where}: {who} shall step aside"
        case ev.TakeBack(op_id=op_id):
            return f"the board{where}: {who} shall drop task {op_id}"
        case ev.Kill(reason=reason):
            return f"kill {who}{where}: {reason}"
        case ev.Spawn():
            return f"a new process for {who}{where}"
        case ev.Reply(token=token, error=error):
            return f"answer token {token}: {'ok' if error is None else error}"
        case ev.CreateCommits():
            return "make the job's commit area"
        case ev.DropCommits():
            return "drop the job's commit area"
        case ev.CreateImage(job=job):
            return f"make an image for the slice of {job}"
        case ev.DropImage(job=job):
            return f"drop the image of {job}"
        case _:
            return None


def _place(message: Any) -> str:
    for name in ("arena_offset_bytes", "slice_offset_bytes", "offset_bytes"):
        if hasattr(message, name):
            return f" at {getattr(message, name) // MIB} MiB"
    return ""


def tell(scope: Scope, path: list[Action], violation: str) -> str:
    """Return the story of a path, with the scheduler's real numbers.

    The path is replayed from the start, without freezing. If the violation does not occur again,
    the last line says so; then the model may renumber ids incorrectly.
    """
    world = World(scope)
    lines = [f"Tokens: requests 1 to {scope.requests}, 101 the job's acceptance, 102 its end."]
    problem = ""
    for number, action in enumerate(path, start=1):
        lines.append(f"{number:3}. {describe(world, action)}")
        world.story.clear()
        try:
            world.apply(action)
        except Violation as broken:
            problem = str(broken)
        orders = [order_of(world, command) for _, _, command in world.story]
        lines += [f"       → {text}" for text in orders if text]
    if not problem:
        try:
            world.check_rest()
        except Violation as broken:
            problem = str(broken)
    lines.append(f"  ✗  {violation}")
    if not problem:
        lines.append("     (played again it did not come: see frozen.py; or it never rests)")
    return "\n".join(lines)
