"""Limits on the memory that clients' connections occupy in the server, with the test's clock."""

from __future__ import annotations

import pytest

from pipeswitch.frontend.transport import connection_limits


class Fake(connection_limits.LimitedConnection):
    """Connection that occupies as many bytes as the test says."""

    holds = 0
    is_open = True

    def held_bytes(self, now_s: float) -> int:
        return self.holds

    def hang_up(self) -> None:
        self.is_open = False


class Rig:
    def __init__(self, **limits: int) -> None:
        limits = {"max_count": 8, "client_bytes": 1 << 20, "total_bytes": 2 << 20, **limits}
        self.connections = connection_limits.ConnectionLimits(**limits)

    def connect(self, tenant: str = "", holds: int = 0) -> Fake:
        """Add a connection, with a session if a tenant is given."""
        one = Fake()
        one.holds = holds
        self.connections.add(one, 0.0)
        if tenant:
            self.connections.on_hello(one, tenant)
        return one

    def rounds(self, now_s: float) -> None:
        """Run two whole rounds, because a round uses the sums of the round before it."""
        for step in range(4):
            self.connections.tick(now_s + step)


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_a_peer_without_a_session_may_have_little_held(rig: Rig) -> None:
    small, large = (
        rig.connect(holds=1000),
        rig.connect(holds=connection_limits.SESSIONLESS_BYTES + 1),
    )
    rig.rounds(1.0)
    assert small.is_open
    assert not large.is_open
    assert rig.connections.hung_up == {"unfinished messages": 1}


def test_a_session_may_have_its_budget_held_and_no_more(rig: Rig) -> None:
    sessions = [rig.connect("anyone", size) for size in (1 << 19, (1 << 20) + 1)]
    rig.rounds(1.0)
    assert [one.is_open for one in sessions] == [True, False]


def test_all_together_may_hold_the_total_and_the_largest_goes_first(rig: Rig) -> None:
    sessions = [rig.connect("anyone", size << 10) for size in (600, 1000, 900)]
    rig.rounds(1.0)
    assert [one.is_open for one in sessions] == [True, False, True]


def test_a_peer_that_says_no_hello_goes(rig: Rig) -> None:
    silent, on_hello = rig.connect(), rig.connect("anyone")
    rig.rounds(connection_limits.HELLO_S - 5)
    assert not rig.connections.hung_up
    rig.rounds(connection_limits.HELLO_S + 1)
    assert not silent.is_open
    assert on_hello.is_open


def test_a_flood_without_a_session_is_not_listened_to(rig: Rig) -> None:
    one, on_hello = rig.connect(), rig.connect("anyone")
    heard = [rig.connections.took(one, 0.0) for _ in range(100)]
    assert heard.count(True) == connection_limits.SESSIONLESS_MESSAGES
    assert not one.is_open
    assert all(rig.connections.took(on_hello, 0.0) for _ in range(100))


def test_over_the_limit_the_one_that_waits_longest_to_say_hello_goes(rig: Rig) -> None:
    good = [rig.connect("anyone") for _ in range(7)]
    idle, late = rig.connect(), rig.connect()
    assert not idle.is_open
    assert late.is_open
    assert all(one.is_open for one in good)


def test_over_the_limit_of_sessions_the_newest_goes_of_whom_has_most(rig: Rig) -> None:
    sessions = [rig.connect("modest" if number == 7 else "greedy") for number in range(8)]
    late = rig.connect()
    assert late.is_open  # the connection's tenant is not known yet
    rig.connections.on_hello(late, "modest")
    assert [one.is_open for one in sessions] == [True] * 6 + [False, True]
    assert not any(rig.connect("greedy").is_open for _ in range(3))
    assert late.is_open


def test_the_largest_goes_of_whom_holds_most(rig: Rig) -> None:
    sizes = (900, 600, 600, 400)
    sessions = [
        rig.connect(who, size << 10)
        for who, size in zip(("modest", *["greedy"] * 3), sizes, strict=True)
    ]
    rig.rounds(1.0)
    assert sessions[0].is_open
    assert sum(one.is_open for one in sessions) == 3


def test_one_that_has_ended_counts_no_more(rig: Rig) -> None:
    session, ended = rig.connect("anyone"), rig.connect(holds=-1)
    rig.connections.remove(session)
    rig.connections.remove(session)
    rig.rounds(1.0)
    assert ended.is_open  # the limits have not closed the connection
    assert len(rig.connections) == 0
    assert all(rig.connect("anyone").is_open for _ in range(8))
