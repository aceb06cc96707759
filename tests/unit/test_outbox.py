"""What leaves: the loop does not stand still for those who do not read."""

from __future__ import annotations

from typing import Any, cast

import zmq

from pipeswitch.frontend.clients import Client, Outgoing
from pipeswitch.frontend.outbox import RELEASE_WAIT_MS, Outbox


class Unread:
    """A message that its reader leaves lying."""

    done = False
    waits = 0

    def wait(self, timeout: float) -> None:
        self.waits += 1
        raise zmq.NotDone


def test_the_loop_waits_once_and_not_at_every_question_for_a_reply_that_is_not_read() -> None:
    outbox, unread, client = Outbox(1 << 20), Unread(), cast(Client, object())
    tracker: Any = unread
    outbox._tracked.append((tracker, client, Outgoing(frames=[b"x"], since_ms=0.0)))
    for _ in range(100):
        outbox.release(RELEASE_WAIT_MS)
    assert unread.waits == 1
    assert not outbox.is_idle
