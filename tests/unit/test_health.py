"""Deep pings: they reach the daemon and all workers, take up to a second, and flood no process."""

from __future__ import annotations

from typing import Any

import pytest

from pipeswitch.ipc.messages.base import Ping, Pong
from pipeswitch.ipc.messages.daemon import DaemonReady
from pipeswitch.scheduler.processes.health import SILENT_AFTER_MS
from pipeswitch.scheduler.state import events as ev
from tests.unit.test_scheduler_rules import Rig


class Server(Rig):
    """Server with a daemon and three workers, which answer pings when the test calls for it."""

    def __init__(self) -> None:
        self.daemon_pings: list[Ping] = []
        self.worker_pings: dict[int, list[Ping]] = {0: [], 1: [], 2: []}
        super().__init__()

    def _take(self, commands: list[ev.Command]) -> None:
        super()._take(commands)
        for command in commands:
            match command:
                case ev.Send(ev.Address("daemon"), Ping() as ping):
                    self.daemon_pings.append(ping)
                case ev.Send(ev.Address("worker", slot=slot), Ping() as ping, "signal"):
                    self.worker_pings[slot].append(ping)
                case _:
                    pass

    def ping(self, token: int) -> None:
        self.handle(ev.PingRequest(token=ev.Token(token)))

    def all_answer(self) -> None:
        op_id = self.daemon_pings[-1].op_id
        self.daemon(Pong(op_id=op_id))
        for slot in range(3):
            self.worker(slot, Pong(op_id=op_id))

    def wait(self) -> None:
        due = self.scheduler.next_wakeup_ms()
        assert due is not None
        self.tick(due)

    def body(self, token: int) -> dict[str, Any]:
        assert self.error(token) is None
        return self.answers[token].body


@pytest.fixture
def up() -> Server:
    return Server()


def test_everybody_is_asked_and_the_answer_has_each_time(up: Server) -> None:
    up.ping(1)
    op_id = up.daemon_pings[0].op_id
    assert [pings[0].op_id for pings in up.worker_pings.values()] == [op_id] * 3
    up.now_ms = 2.0
    up.daemon(Pong(op_id=op_id))
    up.now_ms = 3.0
    for slot in (0, 1):
        up.worker(slot, Pong(op_id=op_id))
    assert 1 not in up.answers
    up.now_ms = 5.0
    up.worker(2, Pong(op_id=op_id))
    body = up.body(1)
    assert (body["ready"], body["why"], body["daemon_ms"], body["engine_ms"]) == (True, "", 2, 5)
    assert [(row["worker"], row["state"], row["ms"]) for row in body["workers"]] == [
        (0, "standby", 3.0),
        (1, "standby", 3.0),
        (2, "standby", 5.0),
    ]


def test_one_silent_worker_is_told_and_the_server_is_ready(up: Server) -> None:
    up.ping(1)
    op_id = up.daemon_pings[0].op_id
    up.daemon(Pong(op_id=op_id))
    up.worker(0, Pong(op_id=op_id))
    up.worker(2, Pong(op_id=op_id))
    up.wait()
    assert up.now_ms == SILENT_AFTER_MS
    assert up.body(1)["ready"]
    assert [row["ms"] for row in up.body(1)["workers"]] == [0.0, None, 0.0]


def test_a_silent_daemon_is_not_ready_after_a_second(up: Server) -> None:
    up.ping(1)
    for slot in range(3):
        up.worker(slot, Pong(op_id=up.daemon_pings[0].op_id))
    up.wait()
    assert up.now_ms == SILENT_AFTER_MS
    assert (up.body(1)["ready"], up.body(1)["daemon_ms"]) == (False, None)
    assert "did not answer" in up.body(1)["why"]


def test_three_silent_workers_are_not_ready(up: Server) -> None:
    up.ping(1)
    up.daemon(Pong(op_id=up.daemon_pings[0].op_id))
    up.wait()
    assert not up.body(1)["ready"]


def test_a_dead_daemon_is_not_ready_at_once_and_nobody_is_asked(up: Server) -> None:
    up.daemon_exits()
    up.ping(1)
    assert (up.body(1)["ready"], up.now_ms) == (False, 0.0)
    assert not up.daemon_pings


def test_a_daemon_that_dies_while_it_is_asked_is_not_ready_at_once(up: Server) -> None:
    up.ping(1)
    up.daemon_exits()
    assert not up.body(1)["ready"]


def test_a_worker_that_dies_while_it_is_asked_is_not_waited_for(up: Server) -> None:
    up.ping(1)
    op_id = up.daemon_pings[0].op_id
    up.daemon(Pong(op_id=op_id))
    up.worker(0, Pong(op_id=op_id))
    up.worker(1, Pong(op_id=op_id))
    up.worker_exits(2)
    assert up.body(1)["ready"]
    assert [row["worker"] for row in up.body(1)["workers"]] == [0, 1]


def test_a_server_that_is_starting_is_not_ready(up: Server) -> None:
    up.daemon_exits()
    for slot in range(3):
        up.worker_exits(slot)
    up.ping(1)
    assert not up.body(1)["ready"]
    up.daemon(DaemonReady(pid=1))
    up.ping(2)
    up.daemon(Pong(op_id=up.daemon_pings[-1].op_id))
    assert (up.body(2)["ready"], up.body(2)["workers"]) == (False, [])


def test_a_thousand_askers_share_two_rounds(up: Server) -> None:
    for token in range(1, 1001):
        up.ping(token)
    assert len(up.daemon_pings) == 1
    up.all_answer()
    assert (len(up.answers), len(up.daemon_pings)) == (1, 2)
    up.all_answer()
    assert len(up.answers) == 1000
    assert len(up.daemon_pings) == 2
    assert {len(pings) for pings in up.worker_pings.values()} == {2}


def test_a_late_answer_of_an_earlier_round_counts_for_nothing(up: Server) -> None:
    up.ping(1)
    late = up.daemon_pings[0].op_id
    up.wait()
    up.ping(2)
    up.daemon(Pong(op_id=late))
    for slot in range(3):
        up.worker(slot, Pong(op_id=late))
    assert 2 not in up.answers
    up.all_answer()
    assert up.body(2)["ready"]


def test_who_waits_when_the_server_leaves_is_answered(up: Server) -> None:
    up.ping(1)
    up.ping(2)
    for _ in range(2):
        up.handle(ev.DrainRequest(token=None, grace_ms=1000.0))
    assert {token for token, answer in up.answers.items() if answer.error} == {1, 2}
