"""What a connection may make the server hold, on real TCP connections and a clock of the test's."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from pipeswitch.frontend.connections import (
    HELLO_S,
    SESSIONLESS_BYTES,
    SESSIONLESS_MESSAGES,
    Connections,
    connection_inode,
    hang_up,
    received_bytes,
    socket_inode,
)


class Rig:
    """A listening socket, connections to it, and the connections that watch them."""

    def __init__(self, **limits: int) -> None:
        limits = {"max_count": 8, "client_bytes": 1 << 20, "total_bytes": 2 << 20, **limits}
        self.connections = Connections(**limits)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.open: list[socket.socket] = []

    def connect(self, now_s: float = 0.0, **options: bool) -> tuple[socket.socket, socket.socket]:
        """Both ends of a new connection: the connection's, and the one libzmq would have."""
        theirs = socket.create_connection(("127.0.0.1", self.port))
        ours, _ = self.listener.accept()
        ours.settimeout(10)
        self.open += [theirs, ours]
        self.connections.accepted(ours.fileno(), self.port, now_s, **options)
        return theirs, ours

    def send(self, pair: tuple[socket.socket, socket.socket], size: int) -> None:
        pair[0].sendall(bytes(size))
        left = size
        while left:
            left -= len(pair[1].recv(left))

    def rounds(self, now_s: float) -> None:
        """Two whole rounds: the second one sees the sums of the first."""
        for step in range(4):
            self.connections.tick(now_s + step)

    def is_open(self, pair: tuple[socket.socket, socket.socket]) -> bool:
        pair[0].settimeout(0.2)
        try:
            return pair[0].recv(1) != b""
        except TimeoutError:
            return True
        except ConnectionError:
            return False


@pytest.fixture
def rig() -> Iterator[Rig]:
    found = Rig()
    yield found
    for sock in [found.listener, *found.open]:
        sock.close()


def test_the_kernel_counts_what_a_connection_sent(rig: Rig) -> None:
    pair = rig.connect()
    rig.send(pair, 100_000)
    assert received_bytes(pair[1].fileno()) == 100_000
    assert received_bytes(rig.listener.fileno()) == 0
    assert received_bytes(10_000) == 0


def test_what_comes_out_as_messages_is_not_held(rig: Rig) -> None:
    pair = rig.connect()
    rig.connections.greeted(pair[1].fileno(), "anyone")
    for _ in range(40):
        rig.send(pair, 100_000)
        assert rig.connections.took(pair[1].fileno(), 100_000, 1.0)
    rig.rounds(2.0)
    assert rig.is_open(pair)


def test_a_peer_without_a_session_may_have_little_held(rig: Rig) -> None:
    small, large = rig.connect(), rig.connect()
    rig.send(small, 1000)
    rig.send(large, SESSIONLESS_BYTES + 4096)
    rig.rounds(1.0)
    assert rig.is_open(small)
    assert not rig.is_open(large)
    assert rig.connections.hung_up == {"unfinished messages": 1}


def test_a_session_may_have_its_budget_held_and_no_more(rig: Rig) -> None:
    pairs = [rig.connect(), rig.connect()]
    for pair, size in zip(pairs, (1 << 19, (1 << 20) + (1 << 16)), strict=True):
        rig.connections.greeted(pair[1].fileno(), "anyone")
        rig.send(pair, size)
    rig.rounds(1.0)
    assert [rig.is_open(pair) for pair in pairs] == [True, False]


def test_all_together_may_hold_the_total_and_the_largest_goes_first(rig: Rig) -> None:
    pairs = [rig.connect() for _ in range(3)]
    for pair, size in zip(pairs, (600 << 10, 1000 << 10, 900 << 10), strict=True):
        rig.connections.greeted(pair[1].fileno(), "anyone")
        rig.send(pair, size)
    rig.rounds(1.0)
    assert [rig.is_open(pair) for pair in pairs] == [True, False, True]


def test_heartbeats_over_a_long_time_are_not_held_against_a_peer(rig: Rig) -> None:
    pair = rig.connect(0.0)
    rig.connections.greeted(pair[1].fileno(), "anyone")
    for _ in range(20):
        rig.send(pair, 100_000)  # a day of pings
    rig.rounds(86_400.0)
    assert rig.is_open(pair)


def test_a_peer_that_says_no_hello_goes(rig: Rig) -> None:
    silent, greeted = rig.connect(), rig.connect()
    rig.connections.greeted(greeted[1].fileno(), "anyone")
    rig.rounds(HELLO_S - 5)
    assert not rig.connections.hung_up
    rig.rounds(HELLO_S + 1)
    assert not rig.is_open(silent)
    assert rig.is_open(greeted)


def test_a_flood_without_a_session_is_not_listened_to(rig: Rig) -> None:
    pair = rig.connect()
    heard = [rig.connections.took(pair[1].fileno(), 1, 0.0) for _ in range(100)]
    assert heard.count(True) == SESSIONLESS_MESSAGES
    assert not rig.is_open(pair)


def test_over_the_limit_the_one_that_waits_longest_to_say_hello_goes(rig: Rig) -> None:
    good = [rig.connect() for _ in range(7)]
    for pair in good:
        rig.connections.greeted(pair[1].fileno(), "anyone")
    idle = rig.connect()
    late = rig.connect()
    assert not rig.is_open(idle)
    assert rig.is_open(late)
    assert all(rig.is_open(pair) for pair in good)


def test_over_the_limit_of_sessions_the_newest_goes_of_whom_has_most(rig: Rig) -> None:
    pairs = [rig.connect() for _ in range(8)]
    for number, pair in enumerate(pairs):
        rig.connections.greeted(pair[1].fileno(), "modest" if number == 7 else "greedy")
    late = rig.connect()
    assert rig.is_open(late)  # whose it is is not known yet
    rig.connections.greeted(late[1].fileno(), "modest")
    assert [rig.is_open(pair) for pair in pairs] == [True] * 6 + [False, True]
    for _ in range(3):
        again = rig.connect()
        rig.connections.greeted(again[1].fileno(), "greedy")
        assert not rig.is_open(again)
    assert rig.is_open(late)


def test_the_largest_goes_of_whom_holds_most(rig: Rig) -> None:
    pairs = [rig.connect() for _ in range(4)]
    sizes = (900 << 10, 600 << 10, 600 << 10, 400 << 10)
    for pair, size, who in zip(pairs, sizes, ("modest", *["greedy"] * 3), strict=True):
        rig.connections.greeted(pair[1].fileno(), who)
        rig.send(pair, size)
    rig.rounds(1.0)
    assert rig.is_open(pairs[0])
    assert sum(map(rig.is_open, pairs)) == 3


def test_a_number_that_means_something_else_now_is_left_alone(rig: Rig) -> None:
    theirs, ours = rig.connect()
    number, inode = ours.fileno(), socket_inode(ours.fileno())
    left, right = socket.socketpair()
    ours.close()
    os.dup2(left.fileno(), number)  # a worker's channel took the number
    rig.connections.accepted(number, rig.port, 0.0)
    assert connection_inode(number, rig.port) == 0
    hang_up(number, inode)
    rig.rounds(HELLO_S + 1)
    assert right.send(b"x") == 1
    assert left.recv(1) == b"x"
    assert len(rig.connections) == 0
    os.close(number)
    left.close()
    right.close()
    theirs.close()
