"""Each accepted request gets one final message, and is counted once (invariant I1)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from pipeswitch.errors import InvalidInput, QueueFull, TaskFailed
from pipeswitch.frontend.clients import Client, Outgoing
from pipeswitch.frontend.request_pool import RequestPool
from pipeswitch.frontend.requests import Pending, Requests
from pipeswitch.ipc.board import sealed_memfd
from pipeswitch.ipc.messages import SlabTensor
from pipeswitch.roles import OWNER
from pipeswitch.scheduler.events import Answer
from pipeswitch.wire.frames import RequestHeader, decode_reply

POOL_BYTES = 1 << 20
LARGE_BYTES = 128 << 10


@pytest.fixture
def pool() -> Iterator[RequestPool]:
    descriptor = sealed_memfd("pool", POOL_BYTES)
    made = RequestPool(descriptor)
    os.close(descriptor)
    yield made
    made.check()


@pytest.fixture
def requests(pool: RequestPool) -> Requests:
    return Requests(pool)


@pytest.fixture
def client() -> Client:
    peer: Any = None
    return Client(peer=peer, session="s", standing=OWNER)


def infer(requests: Requests, client: Client, request_id: str = "1", size: int = 4) -> Pending:
    room = requests._pool.reserve(client.session, size, size)
    header = RequestHeader(v=1, op="infer", id=request_id, model="m")
    return requests.accept(client, header, room)


def output(pending: Pending, size: int = 4, at: int = 0) -> Answer:
    y = SlabTensor(
        name="y",
        dtype="uint8",
        shape=(size,),
        offset_bytes=pending.room.reply_offset_bytes + at,
        size_bytes=size,
    )
    return Answer(token=pending.token, outputs=(y,))


def ended(requests: Requests, pending: Pending, answer: Answer) -> Outgoing:
    outgoing = requests.end(pending, answer)
    assert outgoing is not None
    return outgoing


def sent(outgoing: Outgoing) -> None:
    if outgoing.on_end is not None:
        outgoing.on_end(True)


def test_a_request_is_owed_its_answer_until_it_has_one(requests: Requests, client: Client) -> None:
    pending = infer(requests, client)
    assert requests.find(pending.token) is pending
    assert client.requests == {"1": pending.token}
    sent(ended(requests, pending, output(pending)))
    assert requests.find(pending.token) is None
    assert requests.tokens() == []
    assert client.requests == {}


def test_it_is_counted_when_its_message_has_left(requests: Requests, client: Client) -> None:
    pending = infer(requests, client)
    outgoing = ended(requests, pending, output(pending))
    assert (requests.counts.ok, requests.counts.in_flight) == (0, 1)
    sent(outgoing)
    assert (requests.counts.ok, requests.counts.in_flight) == (1, 0)
    assert requests.inference == requests.counts


def test_its_inputs_are_free_at_its_end_and_its_reply_when_that_has_left(
    requests: Requests, client: Client, pool: RequestPool
) -> None:
    pending = infer(requests, client, size=LARGE_BYTES)
    outgoing = ended(requests, pending, output(pending, LARGE_BYTES))
    assert sum(map(len, outgoing.frames)) > LARGE_BYTES
    assert pool.as_dict()["pool_slabs"] == 1
    sent(outgoing)
    assert pool.is_empty


def test_a_message_that_is_lost_is_undeliverable_and_keeps_nothing(
    requests: Requests, client: Client, pool: RequestPool
) -> None:
    pending = infer(requests, client)
    outgoing = ended(requests, pending, output(pending))
    outgoing.on_end(False)
    assert (requests.counts.undeliverable, requests.counts.in_flight) == (1, 0)
    assert pool.is_empty


def test_a_client_that_is_gone_gets_no_message_and_holds_nothing(
    requests: Requests, client: Client, pool: RequestPool
) -> None:
    pending = infer(requests, client)
    client.is_gone = True
    assert requests.end(pending, output(pending)) is None
    assert (requests.counts.undeliverable, requests.counts.in_flight) == (1, 0)
    assert pool.is_empty


def test_progress_settles_nothing(requests: Requests, client: Client) -> None:
    pending = requests.accept(client, RequestHeader(v=1, op="register", id="r", model="m"))
    outgoing = requests.progress(pending, Answer(token=pending.token, body={"n": 1}, more=True))
    sent(outgoing)
    assert decode_reply(outgoing.frames[:2]).more
    assert requests.find(pending.token) is pending
    assert requests.counts.in_flight == 1
    sent(ended(requests, pending, Answer(token=pending.token)))
    assert requests.counts.ok == 1
    assert requests.inference.accepted == 0


@pytest.mark.parametrize("at", [-1, 1, POOL_BYTES])
def test_bytes_outside_of_its_own_reply_are_an_error_and_not_sent(
    requests: Requests, client: Client, at: int
) -> None:
    pending = infer(requests, client)
    outgoing = ended(requests, pending, output(pending, at=at))
    error = decode_reply(outgoing.frames).error
    assert error.type == TaskFailed.__name__
    sent(outgoing)
    assert requests.counts.error == 1


def test_a_request_without_room_may_name_no_bytes_at_all(
    requests: Requests, client: Client
) -> None:
    other = infer(requests, client)
    pending = requests.accept(client, RequestHeader(v=1, op="models", id="q"))
    outgoing = ended(requests, pending, output(other))
    assert decode_reply(outgoing.frames).error is not None


def test_refusals_are_counted_apart_and_want_of_room_by_itself(
    requests: Requests, client: Client
) -> None:
    requests.reject(client, "infer", QueueFull("full"))
    requests.reject(client, "train", InvalidInput("no"))
    assert client.counts.rejected == 2
    assert (requests.counts.rejected, requests.inference.rejected) == (2, 1)
    assert requests.queue_full_count == 1
    pending = infer(requests, client)
    sent(ended(requests, pending, Answer(token=pending.token, error=QueueFull("too many wait"))))
    assert requests.queue_full_count == 2
    assert (requests.counts.accepted, requests.counts.error) == (1, 1)
