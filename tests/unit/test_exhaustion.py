"""Shortages of system resources, which must neither end a process nor block it for ever."""

from __future__ import annotations

import asyncio
import errno
import os
import selectors
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeswitch import launch
from pipeswitch.base.errors import ServerUnavailable
from pipeswitch.client.connection import Connection
from pipeswitch.controller import processes as controller_processes
from pipeswitch.controller.processes import MAX_FAILED_STARTS, Child, Processes
from pipeswitch.extras.text.tokenizers import TokenizerClient
from pipeswitch.ipc.channel import Channel, channel_pair, encode_message
from pipeswitch.ipc.messages.base import OpId, Ping
from pipeswitch.ipc.messages.fork_server import Fork, Forked, ForkServerReady
from pipeswitch.ipc.messages.helper import HelperSettings
from tests.open_files import open_files

SETTINGS = HelperSettings(kind="stage")
PING = Ping(op_id=OpId(1))
LOOP_SOCKETS = 2  # sockets of asyncio's loop itself
SHORTAGES = (errno.EMFILE, errno.EAGAIN, errno.ENOMEM)


class Parent:
    """The controller's record of its processes; the test acts as the fork server."""

    def __init__(self, folder: Path) -> None:
        self.selector = selectors.DefaultSelector()
        self.hopeless: list[str] = []
        self.processes = Processes(self.selector, folder / "log", self.hopeless.append)
        self.exits: list[int] = []
        ours, self.server = channel_pair()
        ours.setblocking(False)
        self.processes._server_channel = ours
        self.selector.register(ours, selectors.EVENT_READ, self.processes._from_server)
        self.server.send(ForkServerReady(pid=1, import_ms=0.0))
        self.processes._from_server()

    def fork(self) -> Child:
        return self.processes.fork(
            "worker", "w", SETTINGS, 2, [0], lambda *_: None, self.exits.append
        )

    def forked(self, pid: int) -> None:
        """Send the fork server's answer to the last order."""
        received = self.server.receive()
        assert received is not None
        order, descriptors = received
        assert isinstance(order, Fork)
        for one in descriptors:
            os.close(one)
        self.server.send(Forked(ticket=order.ticket, pid=pid))
        self.processes._from_server()

    def is_usable(self, child: Child) -> bool:
        """Send messages and a kill to a child; return True if one exit, by SIGKILL, is reported."""
        for index in (0, 1):
            self.processes.send(child, index, PING)
        self.processes.kill(child)
        return self.exits == [-signal.SIGKILL]


@pytest.fixture
def parent(tmp_path: Path) -> Iterator[Parent]:
    parent_made = Parent(tmp_path)
    yield parent_made
    for key in list(parent_made.selector.get_map().values()):
        assert isinstance(key.fileobj, Channel)
        key.fileobj.close()
    parent_made.selector.close()
    parent_made.server.close()


def refuse(number: int) -> Any:
    def refuses(*_: Any, **__: Any) -> Any:
        raise OSError(number, os.strerror(number))

    return refuses


@pytest.mark.parametrize("pairs", [0, 1])
def test_a_child_without_descriptors_has_exited_and_is_sent_nothing(
    parent: Parent, monkeypatch: pytest.MonkeyPatch, pairs: int
) -> None:
    """Use a child at once, because the scheduler spawns a worker and sends a task in one step."""
    pairs_made = [channel_pair() for _ in range(pairs)]
    monkeypatch.setattr(
        controller_processes,
        "channel_pair",
        lambda: pairs_made.pop() if pairs_made else refuse(24)(),
    )
    before = open_files("socket")
    assert parent.is_usable(parent.fork())
    assert open_files("socket") == before - 2 * pairs


@pytest.mark.parametrize("number", SHORTAGES)
def test_a_child_that_the_fork_server_could_not_fork_has_exited(
    parent: Parent, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    before = open_files("socket")
    child = parent.fork()
    parent.forked(0)
    assert parent.is_usable(child)
    assert open_files("socket") == before


def test_an_order_that_cannot_be_sent_is_an_exit(
    parent: Parent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Channel, "send", refuse(errno.ETOOMANYREFS))
    child = parent.fork()
    monkeypatch.undo()
    assert parent.is_usable(child)


def test_a_child_that_cannot_be_watched_is_killed(
    parent: Parent, monkeypatch: pytest.MonkeyPatch
) -> None:
    with subprocess.Popen(["sleep", "600"]) as sleeper:
        monkeypatch.setattr(os, "pidfd_open", refuse(errno.EMFILE))
        parent.fork()
        parent.forked(sleeper.pid)
        assert sleeper.wait(20) == -signal.SIGKILL


def test_a_child_that_cannot_be_sent_a_message_is_killed(
    parent: Parent, monkeypatch: pytest.MonkeyPatch
) -> None:
    with subprocess.Popen(["sleep", "600"]) as sleeper:
        child = parent.fork()
        parent.forked(sleeper.pid)
        monkeypatch.setattr(Channel, "send", refuse(errno.ETOOMANYREFS))
        parent.processes.send(child, 0, PING)
        assert sleeper.wait(20) == -signal.SIGKILL


@pytest.mark.parametrize(
    ("number", "cannot_meet_deadline"), [(errno.EAGAIN, False), (errno.ENOENT, True)]
)
def test_a_fork_server_is_tried_again_as_long_as_something_is_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, cannot_meet_deadline: bool
) -> None:
    monkeypatch.setattr(subprocess, "Popen", refuse(number))
    hopeless: list[str] = []
    with selectors.DefaultSelector() as selector:
        processes = Processes(selector, tmp_path / "log", hopeless.append)
        for _ in range(2 * MAX_FAILED_STARTS):
            if not hopeless:
                processes.start_server()
    assert bool(hopeless) == cannot_meet_deadline


def test_a_text_process_that_cannot_be_started_is_an_error_and_holds_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(subprocess, "Popen", refuse(errno.EAGAIN))
    before = open_files("socket")

    async def opens() -> None:
        with pytest.raises(ServerUnavailable):
            await TokenizerClient.open(None)  # type: ignore[arg-type]
        assert open_files("socket") == before + LOOP_SOCKETS

    asyncio.run(opens())


@pytest.mark.parametrize("call", ["fork", "pidfd_open"])
def test_the_fork_server_reports_what_it_could_not_fork_and_lives_on(
    monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    ours, theirs = channel_pair()
    ours.setblocking(False)
    server = launch.ForkServer(theirs)
    sleeper = subprocess.Popen(["sleep", "600"])
    monkeypatch.setattr(os, "fork", lambda: sleeper.pid)
    monkeypatch.setattr(os, call, refuse(errno.EAGAIN))
    order = Fork(ticket=7, name="s", settings=encode_message(SETTINGS))
    ours.send(order)
    assert server._serve()
    monkeypatch.undo()
    assert ours.receive() == (Forked(ticket=7, pid=0), [])
    sleeper.kill()
    sleeper.wait()
    for channel in (ours, theirs):
        channel.close()


def test_a_client_whose_thread_cannot_start_keeps_no_descriptor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail)
    before = open_files("eventfd")
    for _ in range(3):
        with pytest.raises(RuntimeError):
            Connection("tcp://127.0.0.1:9", 1.0)
    assert open_files("eventfd") == before
