"""Named points at which a test makes a process die, fail, stop or wait.

They are off unless an environment variable names a folder when the server starts, and then cost one
comparison. If they are on, a file in the folder arms a point at run time::

    PIPESWITCH_FAILPOINTS=/tmp/points pipeswitch serve      # make the folder first
    echo crash > /tmp/points/daemon.transmit.group          # the next process that reaches it dies

The first process that reaches an armed point removes the file, then performs the action. The folder
``reached/`` gets a file for each point that any process has reached; tests require all of them.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import time
from collections.abc import Mapping
from typing import Final

VARIABLE: Final = "PIPESWITCH_FAILPOINTS"
REACHED: Final = "reached"

POINTS: Final[Mapping[str, str]] = {
    "build.begin": "a program is built",
    "build.done": "a program was built, it is taken over",
    "build.write": "a program is built, the controller was not told",
    "commit.acknowledge": "a commit has been flipped in, its job was not told",
    "commit.copied": "a commit is copied, its record is not written",
    "commit.flipped": "a commit has been flipped in",
    "commit.read": "a commit has read its slice, its job was not told",
    "commit.recorded": "a commit's record is written, the flip is not",
    "commit.struck": "a commit's slot is struck out, nothing is copied",
    "commits.create": "a job's commit area is made",
    "commits.drop": "a job's commits are removed",
    "controller.answer": "an answer leaves the scheduler",
    "controller.event": "an event is handled",
    "controller.exit": "a child's exit is known",
    "controller.fork": "a child is ordered",
    "controller.send.daemon": "an order is sent to the memory daemon",
    "controller.send.stage": "an order is sent to a process that makes inputs",
    "controller.send.worker": "an order is sent to a worker",
    "daemon.message": "the memory daemon obeys a message",
    "daemon.scrub": "a released slice is zeroed",
    "daemon.send": "the memory daemon sends a message",
    "daemon.slice.done": "a slice is copied, the controller was not told",
    "daemon.slice.in": "a slice is to be copied from its image",
    "daemon.slice.out": "a slice is to be copied to its image",
    "daemon.start": "the memory daemon tells that it is ready",
    "daemon.store.done": "a model lies in the host store, the controller does not know",
    "daemon.store.read": "a model is read into the host store",
    "daemon.transmit.begin": "a model's first group is copied",
    "daemon.transmit.end": "all groups are in place, the controller was not told",
    "daemon.transmit.group": "a group is in place, its word does not say so yet",
    "fork.child": "a child has been forked",
    "fork.order": "the fork server forks",
    "frontend.accepted": "a request was accepted",
    "frontend.copied": "a large payload is in the pool",
    "frontend.message": "a client's message is read",
    "frontend.reply": "a final answer is sent",
    "image.create": "the image of a slice is made",
    "job.commit": "a step is to be committed",
    "job.committed": "a job knows that its step is committed",
    "job.ended": "a script has ended, the controller was not told",
    "job.evicted": "a script was unwound for its memory",
    "job.hidden": "a job has hidden its slice, the controller was not told",
    "job.lease": "a job asks for its slice",
    "job.leased": "a job has its slice",
    "job.obey": "the termination thread obeys a message",
    "job.park": "a stopping job gives the device away",
    "job.parked": "a job has raised the next turn, the controller was not told",
    "job.report": "a job reports",
    "job.restore": "a job reads its last commit",
    "job.start": "a script is started or started again",
    "journal.write": "an entry is written to the journal",
    "journal.written": "an entry is in the journal, its client does not know",
    "persist.image.renamed": "an image has its name, commit.json names the one before",
    "persist.image.write": "an image is written to disk",
    "persist.image.written": "an image lies under its temporary name",
    "persist.record.renamed": "commit.json names the new image",
    "persist.record.written": "the new commit.json lies under its temporary name",
    "stage.call": "a function is called to make a request's inputs",
    "stage.done": "what a function returned lies in its memory, the controller was not told",
    "upload.publish": "a complete file gets its name",
    "upload.published": "a file has its name, its folder is not synced",
    "upload.write": "a chunk is written",
    "worker.infer.done": "outputs lie in the slab, the controller was not told",
    "worker.infer.group": "a group begins to compute",
    "worker.infer.outputs": "outputs are written into the reply slab",
    "worker.infer.received": "a worker has a request",
    "worker.infer.turn": "a worker has the device's turn",
    "worker.prepare": "a worker loads a program ahead of its request",
    "worker.send": "a worker sends a message",
    "worker.start": "a worker tells that it is ready",
}
"""Every point, with the state of affairs when a process reaches it."""

is_on = False  # for calls on a hot path: ``if failpoints.is_on: reach(name)``
_folder: str | None = None
_seen: set[str] = set()  # points that this process has reached


class Injected(RuntimeError):
    """Error that the action ``error`` raises. No code expects it, as it stands for any bug."""


def enable(environment: Mapping[str, str]) -> None:
    """Read the environment variable; called once when a process starts, and inherited by forks."""
    global is_on, _folder
    _folder = environment.get(VARIABLE) or None
    is_on = _folder is not None
    if _folder is not None:
        os.makedirs(os.path.join(_folder, REACHED), exist_ok=True)


def are_enabled() -> bool:
    """Return True if failpoints are on. A process in the sandbox could not read their files."""
    return is_on


def reach(name: str) -> None:
    """Record that the point ``name`` is reached, and perform its action if it is armed."""
    if _folder is not None:
        _come_by(_folder, name)


def _come_by(folder: str, name: str) -> str:
    """Return the action that was performed at the point, or an empty string."""
    if name not in POINTS:
        raise ValueError(f"{name} is not a failpoint")
    if name not in _seen:
        _seen.add(name)
        with contextlib.suppress(OSError):  # the test has ended and removed its folder
            os.close(os.open(os.path.join(folder, REACHED, name), os.O_CREAT | os.O_WRONLY, 0o600))
    armed = os.path.join(folder, name)
    own_path = f"{armed}.{os.getpid()}"
    try:
        os.rename(armed, own_path)  # only one process succeeds
    except OSError:
        return ""
    with open(own_path) as file:
        action = file.read().strip()
    os.unlink(own_path)
    if action != "garbage":
        act(action, name)
    return action


def garbled(name: str, data: bytes) -> bytes:
    """Reach a point at which a message passes; the action ``garbage`` replaces the message."""
    if _folder is None:
        return data
    return b"\xc1" + os.urandom(40) if _come_by(_folder, name) == "garbage" else data


def act(action: str, name: str) -> None:
    """Perform ``crash``, ``stop``, ``error``, ``memory``, ``disk`` or ``delay MILLISECONDS``."""
    match action.split():
        case ["crash"]:
            os.kill(os.getpid(), signal.SIGKILL)
        case ["stop"]:
            os.kill(os.getpid(), signal.SIGSTOP)
        case ["error"]:
            raise Injected(f"failpoint {name}")
        case ["memory"]:
            raise MemoryError(f"failpoint {name}")
        case ["disk"]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)
        case ["delay", milliseconds]:
            time.sleep(float(milliseconds) / 1000)  # the fault itself: this process is slow
        case _:
            raise ValueError(f"failpoint {name}: unknown action {action!r}")
