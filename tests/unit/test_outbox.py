"""What leaves: the loop does not stand still for those who do not read."""

from __future__ import annotations

from typing import Any

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


def rig(budget_bytes: int = 100) -> tuple[Outbox, FullPeer, Client, list[str], Any]:
    outbox, peer, said = Outbox(budget_bytes), FullPeer(), list[str]()
    client = Client(peer=peer, standing=OWNER)

    def send(now_ms: float = 0.0) -> bool:
        outgoing = Outgoing(
            frames=[b"x" * 40],
            since_ms=now_ms,
            on_sent=lambda: said.append("sent"),
            on_lost=lambda: said.append("lost"),
        )
        return outbox.send(client, outgoing, now_ms)

    return outbox, peer, client, said, send


def test_what_does_not_leave_waits_in_order_and_leaves_when_it_is_read() -> None:
    outbox, peer, client, said, send = rig()
    assert [send(), send()] == [True, True]
    assert (bool(outbox.backlogged), client.unsent_bytes, said) == (True, 80, [])
    peer.is_full = False
    assert outbox.sweep(1.0) == []
    assert (bool(outbox.backlogged), client.unsent_bytes, said) == (False, 0, ["sent", "sent"])


def test_a_client_over_its_budget_or_too_slow_is_dropped_and_its_answers_are_lost() -> None:
    outbox, _, client, said, send = rig()
    assert [send(), send(), send()] == [True, True, False]
    outbox.drop(client)
    assert (bool(outbox.backlogged), client.unsent_bytes, said) == (False, 0, ["lost"] * 3)
    outbox, _, client, said, send = rig()
    assert send(0.0)
    assert outbox.sweep(SLOW_CLIENT_MS) == []
    assert outbox.sweep(SLOW_CLIENT_MS + 1) == [client]
