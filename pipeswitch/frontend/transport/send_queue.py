"""Outgoing messages: replies, and events for their subscribers."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Final

from ...base.errors import QueueFull
from ...scheduler.state.events import Publish
from ...wire.frames import RequestHeader
from ..intake.validation import Body
from .clients import Outgoing, Session
from .replies import reply_frames

SLOW_CLIENT_MS: Final = 30_000.0  # a client that leaves a reply unread for longer is dropped
MAX_SUBSCRIPTIONS: Final = 16  # event subscriptions of one client
MAX_READERS: Final = 128  # clients with subscriptions: an event to all takes up to 40 ms
READER_BYTES: Final = 1 << 20  # a client with more unsent bytes gets no events
SHORT_BYTES: Final = 64 << 10  # a message up to this size may overtake longer replies
SWEPT: Final = 64  # clients whose messages are retried in one iteration of the loop


class SendQueue:
    """Queue of outgoing messages. Sending never blocks; a client has a budget of unsent bytes."""

    def __init__(
        self, budget_bytes: int, now_ms: Callable[[], float], drop: Callable[[Session], None]
    ) -> None:
        """Create an empty queue; ``drop`` gets each client that is over budget, slow or gone."""
        self._budget_bytes = budget_bytes
        self._now_ms = now_ms
        self._drop = drop
        self.backlogged: OrderedDict[Session, None] = OrderedDict()  # clients with a full socket

    @property
    def needs_poll(self) -> bool:
        """True if a message can continue without waiting for its socket."""
        return any(one.peer.needs_poll for one in self.backlogged)

    def send(self, client: Session, outgoing: Outgoing) -> None:
        """Send or queue a message.

        Many callers may share a connection, so long final replies wait for all other messages. No
        message of the same request follows its final reply, so each request's messages stay in
        order.
        """
        if client.is_gone:
            if outgoing.on_end is not None:
                outgoing.on_end(False)
            return
        outgoing.size_bytes = sum(map(len, outgoing.frames))
        is_long_answer = outgoing.on_end is not None and outgoing.size_bytes > SHORT_BYTES
        (client.long_answers if is_long_answer else client.backlog).append(outgoing)
        client.unsent_bytes += outgoing.size_bytes
        if not self._flush(client):
            self._drop(client)
        elif client.sending:
            now_ms = outgoing.since_ms = self._now_ms()
            if self._is_too_slow(client, now_ms):
                self._drop(client)

    def reply(self, client: Session, request_id: str, **fields: Any) -> None:
        """Send a reply that is not final; ``reply_frames`` explains ``fields``."""
        frames = reply_frames(request_id, client.session, **fields)
        self.send(client, Outgoing(frames=frames))

    def _is_too_slow(self, client: Session, now_ms: float) -> bool:
        is_stuck = client.sending and now_ms - client.sending[0].since_ms > SLOW_CLIENT_MS
        return bool(is_stuck) or client.unsent_bytes > self._budget_bytes

    def _flush(self, client: Session) -> bool:
        """Send in order until the socket is full; return False if the connection is gone."""
        while queue := client.sending or client.backlog or client.long_answers:
            outgoing = queue[0]
            try:
                if not client.peer.transmit(outgoing):
                    client.sending = queue
                    self.backlogged[client] = None
                    return True
            except OSError:
                return False
            queue.popleft()
            client.sending = None
            client.unsent_bytes -= outgoing.size_bytes
            if outgoing.on_end is not None:
                outgoing.on_end(True)
        self.backlogged.pop(client, None)
        return True

    def remove(self, client: Session) -> None:
        """Drop the messages of a client that is gone."""
        self.backlogged.pop(client, None)
        client.sending = None
        while queue := client.backlog or client.long_answers:
            outgoing = queue.popleft()
            client.unsent_bytes -= outgoing.size_bytes
            if outgoing.on_end is not None:
                outgoing.on_end(False)

    def sweep(self) -> None:
        """Retry messages that a socket refused, and drop clients that are gone or too slow.
        At most SWEPT clients have a turn; those that wait for longest are first."""
        for client in [*itertools.islice(self.backlogged, SWEPT)]:
            self.backlogged.move_to_end(client)
            if not self._flush(client) or self._is_too_slow(client, self._now_ms()):
                self._drop(client)


class EventSubscribers:
    """Clients that subscribe to events. Each event is a reply that is not final."""

    def __init__(self, outbox: SendQueue) -> None:
        self._outbox = outbox
        self.clients: set[Session] = set()

    def add(self, client: Session, header: RequestHeader, _: Sequence[Any]) -> None:
        """Handle the verb ``events``.

        Raises:
            QueueFull: the client has the maximum number of subscriptions, or too many others have.
        """
        body = Body("events", header.body)
        topics = body.texts("topics")
        body.done()
        if len(client.subscriptions) >= MAX_SUBSCRIPTIONS:
            raise QueueFull(
                f"this client already has {MAX_SUBSCRIPTIONS} event subscriptions", limit="events"
            )
        self.clients = {one for one in self.clients if one.subscriptions}
        if client not in self.clients and len(self.clients) >= MAX_READERS:
            raise QueueFull(
                f"{MAX_READERS} clients already follow events",
                hint="try again later",
                limit="events",
            )
        client.subscriptions[header.id] = topics or ("",)
        self.clients.add(client)
        self._outbox.reply(client, header.id, more=True)  # confirms the subscription

    def publish(self, published: Publish) -> None:
        """Send an event to its subscribers, except those with too many unsent bytes."""
        for reader in list(self.clients):
            for request_id, topics in list(reader.subscriptions.items()):
                is_wanted = published.topic.startswith(topics) and reader.principal.may_operate
                if is_wanted and reader.unsent_bytes <= READER_BYTES:
                    body = {"topic": published.topic, **published.body}
                    self._outbox.reply(reader, request_id, body=body, more=True)
