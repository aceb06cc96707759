"""Replies on their way out: zero-copy, and when a reply's memory is free again."""

from __future__ import annotations

import time
from collections import deque
from typing import Final

import zmq

from ..wire.sockets import DONTWAIT, MORE, send_frames
from .clients import Client, Outgoing

SLOW_CLIENT_MS: Final = 30_000.0  # a reply that is not read for so long: the client is dropped
RELEASE_WAIT_MS: Final = 20.0  # for a reply on its way out, before its bytes are missed
VAIN_PAUSE_S: Final = 0.5  # then nobody is waited for: a reader that reads nothing cannot ask again


class Outbox:
    """Sends without ever blocking; what a client does not read waits under its byte budget."""

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self._tracked: deque[tuple[zmq.MessageTracker, Client, Outgoing]] = deque()
        self._backlogged: set[Client] = set()
        self._waits_from_s = 0.0

    @property
    def is_idle(self) -> bool:
        return not self._tracked and not self._backlogged

    @property
    def wants_turn(self) -> bool:
        """A message would go on without waiting for its socket."""
        return any(one.peer is not None and one.peer.wants_turn for one in self._backlogged)

    def send(self, client: Client, outgoing: Outgoing, now_ms: float) -> bool:
        """Hand a message to libzmq, or keep it. False: over budget or gone, drop the client."""
        client.backlog.append(outgoing)
        client.unsent_bytes += outgoing.size_bytes
        return self._flush(client) and self._is_fast_enough(client, now_ms)

    def _is_fast_enough(self, client: Client, now_ms: float) -> bool:
        is_stuck = client.backlog and now_ms - client.backlog[0].since_ms > SLOW_CLIENT_MS
        return client.unsent_bytes <= self._budget_bytes and not is_stuck

    def _flush(self, client: Client) -> bool:
        """Send in order until the client's queue is full; False: its connection is gone."""
        while client.backlog:
            outgoing = client.backlog[0]
            try:
                tracker = self._transmit(client, outgoing)
            except zmq.Again:
                self._backlogged.add(client)
                return True
            except zmq.ZMQError:  # EHOSTUNREACH: ROUTER_MANDATORY tells us
                return False
            client.backlog.popleft()
            if tracker is not None:
                self._tracked.append((tracker, client, outgoing))
            else:
                client.unsent_bytes -= outgoing.size_bytes
                outgoing.on_sent()
                outgoing.on_released()
        self._backlogged.discard(client)
        return True

    @staticmethod
    def _transmit(client: Client, outgoing: Outgoing) -> zmq.MessageTracker | None:
        """All frames of a message; only the first part can be refused (libzmq router.cpp).

        At the plain socket all of it can: what is refused goes on with the same message.
        """
        if client.peer is not None:
            client.peer.transmit(outgoing)
            return None
        router = client.listener.router
        assert router is not None
        router.send(client.routing_id, MORE | DONTWAIT)
        is_tracked = outgoing.is_zero_copy
        tracker = send_frames(
            router, outgoing.frames, DONTWAIT, copy=not is_tracked, track=is_tracked
        )
        return tracker if is_tracked else None

    def drop(self, client: Client) -> None:
        """The client is gone: what it did not take is lost."""
        self._backlogged.discard(client)
        if any(owner is client for _, owner, _ in self._tracked):
            self.release(RELEASE_WAIT_MS)  # it may have read its reply and left at once
        for _, owner, outgoing in self._tracked:
            if owner is client and not outgoing.is_lost:
                outgoing.is_lost = True
                outgoing.on_lost()
        while client.backlog:
            outgoing = client.backlog.popleft()
            client.unsent_bytes -= outgoing.size_bytes
            outgoing.on_lost()
            outgoing.on_released()

    def release(self, wait_ms: float = 0.0) -> None:
        """Give back what libzmq has sent; ``wait_ms`` grants the oldest message that much time.

        libzmq reports a sent message a little after its reader has it, so a client that asks
        again at once may find its own last reply still in the pool.
        """
        if wait_ms and self._tracked and time.monotonic() >= self._waits_from_s:
            try:
                self._tracked[0][0].wait(wait_ms / 1000)
            except zmq.NotDone:
                self._waits_from_s = time.monotonic() + VAIN_PAUSE_S
        for _ in range(len(self._tracked)):
            tracker, client, outgoing = self._tracked.popleft()
            if not tracker.done:
                self._tracked.append((tracker, client, outgoing))
                continue
            client.unsent_bytes -= outgoing.size_bytes
            if not outgoing.is_lost:
                outgoing.on_sent()
            outgoing.on_released()

    def sweep(self, now_ms: float) -> list[Client]:
        """Release what was sent, retry what was refused; the clients that are to be dropped."""
        self.release()
        slow = {c for _, c, out in self._tracked if now_ms - out.since_ms > SLOW_CLIENT_MS}
        return [
            client
            for client in [*self._backlogged, *slow]
            if client in slow or not (self._flush(client) and self._is_fast_enough(client, now_ms))
        ]
