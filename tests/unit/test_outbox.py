"""What leaves: the loop does not stand still for those who do not read."""

from __future__ import annotations

from pipeswitch.frontend.clients import Client, Outgoing
from pipeswitch.frontend.outbox import SLOW_CLIENT_MS, Outbox
from pipeswitch.roles import OWNER


class FullPeer:
    """A connection whose reader leaves everything lying, until it reads."""

    wants_turn = False
    is_full = True

    def transmit(self, outgoing: Outgoing) -> bool:
        return not self.is_full

    def close(self) -> None:
        pass


class Rig:
    """An outbox with one client, and a clock."""

    def __init__(self) -> None:
        self.now_ms, self.peer, self.said = 0.0, FullPeer(), list[bool]()
        self.client = Client(peer=self.peer, standing=OWNER)
        self.dropped: list[Client] = []
        self.outbox = Outbox(100, lambda: self.now_ms, self.dropped.append)

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
    rig.outbox.forget(rig.client)
    assert rig.state == (False, 0, [False] * 3)
    rig = Rig()
    rig.send()
    rig.now_ms = SLOW_CLIENT_MS
    rig.outbox.sweep()
    assert not rig.dropped
    rig.now_ms += 1
    rig.outbox.sweep()
    assert rig.dropped == [rig.client]
