"""Queue of messages to clients: a client that does not read never blocks the server's loop."""

from __future__ import annotations

from pipeswitch.base.roles import OWNER
from pipeswitch.frontend.transport.clients import Outgoing, Session
from pipeswitch.frontend.transport.send_queue import SHORT_BYTES, SLOW_CLIENT_MS, SendQueue


class FullPeer:
    """Connection to a peer that reads nothing until the test lets it read."""

    needs_poll = False
    is_full = True

    def __init__(self) -> None:
        self.sent: list[Outgoing] = []

    def transmit(self, outgoing: Outgoing) -> bool:
        if not self.is_full:
            self.sent.append(outgoing)
        return not self.is_full

    def close(self) -> None:
        pass


class Rig:
    """Send queue with one client and a clock."""

    def __init__(self) -> None:
        self.now_ms, self.peer, self.said = 0.0, FullPeer(), list[bool]()
        self.client = Session(peer=self.peer, principal=OWNER)
        self.dropped: list[Session] = []
        self.outbox = SendQueue(100, lambda: self.now_ms, self.dropped.append)

    def send(self) -> None:
        self.outbox.send(self.client, Outgoing(frames=[b"x" * 40], on_end=self.said.append))

    @property
    def state(self) -> tuple[bool, int, list[bool]]:
        return bool(self.outbox.backlogged), self.client.unsent_bytes, self.said


def test_what_does_not_leave_waits_in_order_and_leaves_when_it_is_read() -> None:
    rig = Rig()
    rig.send()
    rig.send()
    assert rig.state == (True, 80, [])
    rig.peer.is_full = False
    rig.outbox.sweep()
    assert (rig.state, rig.dropped) == ((False, 0, [True, True]), [])


def test_a_client_over_its_budget_or_too_slow_is_dropped_and_its_answers_are_lost() -> None:
    rig = Rig()
    rig.send()
    rig.send()
    assert not rig.dropped
    rig.send()
    assert rig.dropped == [rig.client]
    rig.outbox.remove(rig.client)
    assert rig.state == (False, 0, [False] * 3)
    rig = Rig()
    rig.send()
    rig.now_ms = SLOW_CLIENT_MS
    rig.outbox.sweep()
    assert not rig.dropped
    rig.now_ms += 1
    rig.outbox.sweep()
    assert rig.dropped == [rig.client]


def order(*sent: tuple[int, bool]) -> list[int]:
    """Return the order in which messages leave; each has a size, and True for an answer."""
    peer = FullPeer()
    client, outbox = Session(peer=peer, principal=OWNER), SendQueue(1 << 30, lambda: 0.0, print)
    messages = [
        Outgoing(frames=[bytes(size)], on_end=(lambda _: None) if is_answer else None)
        for size, is_answer in sent
    ]
    for one in messages:
        outbox.send(client, one)
    peer.is_full = False
    outbox.sweep()
    return [messages.index(one) for one in peer.sent]


LONG, SHORT = SHORT_BYTES + 1, SHORT_BYTES


def test_short_messages_leave_before_long_answers_but_the_one_that_has_begun() -> None:
    answers = [(size, True) for size in (LONG, LONG, LONG, SHORT, LONG, SHORT)]
    assert order(*answers) == [0, 3, 5, 1, 2, 4]
    assert order((LONG, True), (LONG, True), (SHORT, False)) == [0, 2, 1]  # SHORT reports progress


def test_nothing_overtakes_a_message_that_more_may_follow() -> None:
    assert order((LONG, True), (LONG, False), (SHORT, True)) == [0, 1, 2]
    assert order((SHORT, True), (SHORT, True), (SHORT, False)) == [0, 1, 2]
    assert order((LONG, True), (LONG, True), (LONG, False), (SHORT, True)) == [0, 2, 3, 1]
