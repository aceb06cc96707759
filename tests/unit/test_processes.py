"""The controller's processes: hangs that count as deaths, log files, and stops."""

from __future__ import annotations

import logging
import os
import selectors
import signal
import subprocess
import threading
from pathlib import Path

import pytest

from pipeswitch.controller.processes import (
    LOOK_EVERY_S,
    STOPPED_LOOKS,
    URGENT_LOOK_EVERY_S,
    Child,
    Processes,
    StoppedLooks,
    open_log,
    rotate,
)
from pipeswitch.ipc.channel import cause, channel_pair, name_event
from pipeswitch.ipc.messages.base import Message, OpId, Pong
from pipeswitch.ipc.messages.fork_server import ChildExited, Forked
from tests.open_files import open_files

PID, OTHER = 71, 72


def test_descriptors_that_a_worker_sends_unasked_are_closed(tmp_path: Path) -> None:
    ours, theirs = channel_pair()
    heard: list[tuple[Message, list[int]]] = []
    child = Child("worker", "w", [ours], lambda *news: heard.append(news), lambda status: None)
    child.open_channels.add(ours.fileno())
    sent = os.memfd_create("sent-unasked")
    with selectors.DefaultSelector() as selector:
        processes = Processes(selector, tmp_path / "log", lambda reason: None)
        for _ in range(3):
            theirs.send(Pong(op_id=OpId(1)), [sent, sent])
            processes._read_one(child, ours)
        assert open_files("sent-unasked") == 1
    assert heard == [(Pong(op_id=OpId(1)), [])] * 3
    for channel in (ours, theirs):
        channel.close()
    os.close(sent)


@pytest.mark.parametrize("number", [1, 1 << 40])
def test_the_receiver_of_a_packet_logs_the_event_that_caused_it(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, right = channel_pair()
    monkeypatch.setattr(cause, "event", number)
    left.send(Pong(op_id=OpId(1)))
    cause.event = 0
    assert right.receive() == (Pong(op_id=OpId(1)), [])
    record = logging.makeLogRecord({})
    assert name_event(record)
    assert record.event == number  # type: ignore[attr-defined]
    for channel in (left, right):
        channel.close()


def test_a_log_that_others_write_to_is_started_anew_and_they_go_on_at_its_end(
    tmp_path: Path,
) -> None:
    path = tmp_path / "processes.log"
    with open_log(path) as writer:
        for line in (b"first\n", b"second\n", b"third\n", b"fourth\n"):
            writer.write(line)
            writer.flush()
            rotate(path, 6)
    last, older = tmp_path / "processes.log.1", tmp_path / "processes.log.2"
    assert path.read_bytes() == b""
    assert (older.read_bytes(), last.read_bytes()) == (b"econd\n", b"ourth\n")
    with open_log(path) as writer:
        writer.write(b"small\n")
    rotate(path, 6)
    assert path.read_bytes() == b"small\n"


def test_a_log_is_emptied_though_its_disk_takes_no_copy(tmp_path: Path) -> None:
    path = tmp_path / "processes.log"
    path.write_bytes(bytes(100))
    (tmp_path / "processes.log.1").mkdir()
    (tmp_path / "processes.log.2").touch()  # the folder cannot be renamed to this file's name
    rotate(path, 6)
    assert path.stat().st_size == 0
    rotate(tmp_path / "there-is-none", 6)


def test_the_log_is_looked_at_with_the_processes(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(bytes(100))
    with selectors.DefaultSelector() as selector:
        Processes(selector, path, lambda reason: None, log_bytes=10).look(None)
    assert path.stat().st_size == 0


def test_a_stop_also_ends_who_is_just_being_forked(tmp_path: Path) -> None:
    """Report a child's pid after the stop has begun: the stop must kill the child at once."""
    ours, theirs = channel_pair()
    exits: list[int] = []
    sleeper = subprocess.Popen(["sleep", "600"])

    def reap() -> None:  # reports the exit, like the fork server
        theirs.send(ChildExited(pid=sleeper.pid, status=sleeper.wait()))

    with selectors.DefaultSelector() as selector, subprocess.Popen(["sleep", "600"]) as server:
        processes = Processes(selector, tmp_path / "log", lambda reason: None)
        selector.register(ours, selectors.EVENT_READ, processes._from_server)
        processes._server_channel, processes._server = ours, server
        child = Child("worker", "w", [], lambda message, _: None, exits.append)
        processes._by_ticket[1] = child
        theirs.send(Forked(ticket=1, pid=sleeper.pid))
        reaper = threading.Thread(target=reap)
        reaper.start()
        try:
            processes.stop(30.0)
        finally:
            sleeper.kill()
            server.kill()
            reaper.join()
    assert exits == [-signal.SIGKILL]
    theirs.close()


def test_a_process_found_stopped_often_enough_is_given_up_once() -> None:
    looks = StoppedLooks()
    stopped = [looks.look([PID, OTHER] if turn else [PID], turn) for turn in range(STOPPED_LOOKS)]
    assert stopped == [[]] * (STOPPED_LOOKS - 1) + [[PID]]
    assert looks.look([OTHER], STOPPED_LOOKS) == [OTHER]


def test_a_process_that_goes_on_between_two_looks_starts_anew() -> None:
    looks = StoppedLooks()
    for _ in range(STOPPED_LOOKS - 1):
        assert looks.look([PID], 0.0) == []
    assert looks.look([], 0.0) == []
    for _ in range(STOPPED_LOOKS - 1):
        assert looks.look([PID], 0.0) == []
    assert looks.look([PID], 0.0) == [PID]


def test_looks_are_frequent_only_while_a_request_is_held_up() -> None:
    looks = StoppedLooks()
    looks.look([], 100.0)
    assert looks.due_at_s(None) == 100.0 + LOOK_EVERY_S
    held_up = looks.due_at_s(waited_since_s=90.0)
    assert held_up == 100.0 + URGENT_LOOK_EVERY_S
    looks.look([], held_up)
    assert looks.due_at_s(waited_since_s=90.0) == held_up + URGENT_LOOK_EVERY_S


def test_a_request_that_has_just_come_waits_for_no_look() -> None:
    looks = StoppedLooks()
    looks.look([], 100.0)
    just_now_s = 100.0 + LOOK_EVERY_S / 2
    assert looks.due_at_s(just_now_s) == just_now_s + URGENT_LOOK_EVERY_S
    late_s = 100.0 + LOOK_EVERY_S - URGENT_LOOK_EVERY_S / 2
    assert looks.due_at_s(late_s) == 100.0 + LOOK_EVERY_S  # never later than the regular look
