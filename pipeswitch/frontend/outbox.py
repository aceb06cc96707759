"""Replies on their way out."""

from __future__ import annotations

from typing import Final

from .clients import Client, Outgoing

SLOW_CLIENT_MS: Final = 30_000.0  # a reply that is not read for so long: the client is dropped


class Outbox:
    """Sends without ever blocking; what a client does not read waits under its byte budget."""

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self.backlogged: set[Client] = set()  # whose socket is full

    @property
    def wants_turn(self) -> bool:
        """A message would go on without waiting for its socket."""
        return any(one.peer.wants_turn for one in self.backlogged)

    def send(self, client: Client, outgoing: Outgoing, now_ms: float) -> bool:
        """Send a message, or keep it. False: over budget or gone, drop the client."""
        client.backlog.append(outgoing)
        client.unsent_bytes += outgoing.size_bytes
        return self._flush(client) and self._is_fast_enough(client, now_ms)

    def _is_fast_enough(self, client: Client, now_ms: float) -> bool:
        is_stuck = client.backlog and now_ms - client.backlog[0].since_ms > SLOW_CLIENT_MS
        return client.unsent_bytes <= self._budget_bytes and not is_stuck

    def _flush(self, client: Client) -> bool:
        """Send in order until the client's socket is full; False: its connection is gone."""
        while client.backlog:
            outgoing = client.backlog[0]
            try:
                if not client.peer.transmit(outgoing):
                    self.backlogged.add(client)
                    return True
            except OSError:
                return False
            client.backlog.popleft()
            client.unsent_bytes -= outgoing.size_bytes
            outgoing.on_sent()
            outgoing.on_released()
        self.backlogged.discard(client)
        return True

    def drop(self, client: Client) -> None:
        """The client is gone: what it did not take is lost."""
        self.backlogged.discard(client)
        while client.backlog:
            outgoing = client.backlog.popleft()
            client.unsent_bytes -= outgoing.size_bytes
            outgoing.on_lost()
            outgoing.on_released()

    def sweep(self, now_ms: float) -> list[Client]:
        """Retry what was refused; the clients that are to be dropped."""
        return [
            client
            for client in list(self.backlogged)
            if not (self._flush(client) and self._is_fast_enough(client, now_ms))
        ]
