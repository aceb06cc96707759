"""Each accepted request gets one final message, and is counted once (invariant I1)."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from pipeswitch.base.config import LogConfig
from pipeswitch.base.errors import Cancelled, InvalidInput, QueueFull, TaskFailed
from pipeswitch.base.roles import OWNER
from pipeswitch.frontend.intake.request_log import (
    FILE_NAME,
    LINES_PER_MINUTE,
    RateLimitedLog,
    RequestLog,
)
from pipeswitch.frontend.intake.request_pool import RequestPool
from pipeswitch.frontend.requests import Pending, Requests
from pipeswitch.frontend.sequences.manager import Sequences
from pipeswitch.frontend.transport.clients import Outgoing, Session
from pipeswitch.ipc.control_page import sealed_memfd
from pipeswitch.ipc.messages.base import SlabTensor
from pipeswitch.scheduler.state.events import Reply, Token
from pipeswitch.wire.frames import RequestHeader, decode_reply
from pipeswitch.wire.request_timing import RequestTiming

POOL_BYTES = 1 << 20
LARGE_BYTES = 128 << 10


@pytest.fixture
def pool() -> Iterator[RequestPool]:
    descriptor = sealed_memfd("pool", POOL_BYTES)
    pool_made = RequestPool(descriptor)
    os.close(descriptor)
    yield pool_made
    pool_made.check()


@pytest.fixture
def requests(pool: RequestPool, tmp_path: Path) -> Iterator[Requests]:
    log = RequestLog(tmp_path, LogConfig(requests=1.0), RateLimitedLog(lambda: 0.0))
    yield Requests(pool, log, Sequences(pool, lambda: 0.0))
    log.close()


@pytest.fixture
def client() -> Session:
    peer: Any = None
    return Session(peer=peer, session="s", principal=OWNER)


def infer(requests: Requests, client: Session, request_id: str = "1", size: int = 4) -> Pending:
    allocation = requests.pool.reserve(client.session, size, size)
    header = RequestHeader(v=1, op="infer", id=request_id, model="m")
    return requests.accept(client, header, allocation)


def output(pending: Pending, size: int = 4, at: int = 0) -> Reply:
    y = SlabTensor(
        name="y",
        dtype="uint8",
        shape=(size,),
        offset_bytes=pending.allocation.reply_offset_bytes + at,
        size_bytes=size,
    )
    return Reply(token=pending.token, outputs=(y,))


def ended(requests: Requests, pending: Pending, answer: Reply) -> Outgoing:
    outgoing = requests.end(pending, answer)
    assert outgoing is not None
    return outgoing


def sent(outgoing: Outgoing) -> None:
    if outgoing.on_end is not None:
        outgoing.on_end(True)


def test_a_request_is_owed_its_answer_until_it_has_one(requests: Requests, client: Session) -> None:
    pending = infer(requests, client)
    assert requests.find(pending.token) is pending
    assert client.requests == {"1": pending.token}
    sent(ended(requests, pending, output(pending)))
    assert requests.find(pending.token) is None
    assert requests.tokens() == []
    assert client.requests == {}


def test_it_is_counted_when_its_message_has_left(requests: Requests, client: Session) -> None:
    pending = infer(requests, client)
    outgoing = ended(requests, pending, output(pending))
    assert (requests.counts.ok, requests.counts.in_flight) == (0, 1)
    sent(outgoing)
    assert (requests.counts.ok, requests.counts.in_flight) == (1, 0)
    assert requests.inference == requests.counts


def test_its_inputs_are_free_at_its_end_and_its_reply_when_that_has_left(
    requests: Requests, client: Session, pool: RequestPool
) -> None:
    pending = infer(requests, client, size=LARGE_BYTES)
    outgoing = ended(requests, pending, output(pending, LARGE_BYTES))
    assert sum(map(len, outgoing.frames)) > LARGE_BYTES
    assert pool.as_dict()["pool_slabs"] == 1
    sent(outgoing)
    assert pool.is_empty


def test_a_message_that_is_lost_is_undeliverable_and_keeps_nothing(
    requests: Requests, client: Session, pool: RequestPool
) -> None:
    pending = infer(requests, client)
    outgoing = ended(requests, pending, output(pending))
    outgoing.on_end(False)
    assert (requests.counts.undeliverable, requests.counts.in_flight) == (1, 0)
    assert pool.is_empty


def test_a_client_that_is_gone_gets_no_message_and_holds_nothing(
    requests: Requests, client: Session, pool: RequestPool
) -> None:
    pending = infer(requests, client)
    client.is_gone = True
    assert requests.end(pending, output(pending)) is None
    assert (requests.counts.undeliverable, requests.counts.in_flight) == (1, 0)
    assert pool.is_empty


def test_progress_settles_nothing(requests: Requests, client: Session) -> None:
    pending = requests.accept(client, RequestHeader(v=1, op="register", id="r", model="m"))
    outgoing = requests.progress(pending, Reply(token=pending.token, body={"n": 1}, more=True))
    sent(outgoing)
    assert decode_reply(outgoing.frames[:2]).more
    assert requests.find(pending.token) is pending
    assert requests.counts.in_flight == 1
    sent(ended(requests, pending, Reply(token=pending.token)))
    assert requests.counts.ok == 1
    assert requests.inference.accepted == 0


@pytest.mark.parametrize("at", [-1, 1, POOL_BYTES])
def test_bytes_outside_of_its_own_reply_are_an_error_and_not_sent(
    requests: Requests, client: Session, at: int
) -> None:
    pending = infer(requests, client)
    outgoing = ended(requests, pending, output(pending, at=at))
    error = decode_reply(outgoing.frames).error
    assert error.type == TaskFailed.__name__
    sent(outgoing)
    assert requests.counts.error == 1


def test_pages_of_a_sequences_state_hold_nothing_of_the_reply_before(
    requests: Requests, client: Session, pool: RequestPool
) -> None:
    pool.memory[:] = b"s" * POOL_BYTES
    pending: Any = infer(requests, client)
    pending.sequence = SimpleNamespace(answered=lambda answer: answer)
    at = pending.allocation.reply_offset_bytes
    h = SlabTensor(name="h", dtype="int8", shape=(3,), offset_bytes=at, size_bytes=3)
    requests.end(pending, Reply(token=pending.token, outputs=(h,)))
    assert pool.memory[at : at + 4097] == b"sss" + bytes(4093) + b"s"


def test_a_request_without_room_may_name_no_bytes_at_all(
    requests: Requests, client: Session
) -> None:
    other = infer(requests, client)
    pending = requests.accept(client, RequestHeader(v=1, op="models", id="q"))
    outgoing = ended(requests, pending, output(other))
    assert decode_reply(outgoing.frames).error is not None


def test_refusals_are_counted_apart_and_want_of_room_by_itself(
    requests: Requests, client: Session
) -> None:
    for op, error in (("infer", QueueFull("full")), ("train", InvalidInput("no"))):
        requests.reject(client, RequestHeader(v=1, op=op, id="1"), error)
    assert client.counts.rejected == 2
    assert (requests.counts.rejected, requests.inference.rejected) == (2, 1)
    assert requests.queue_full_count == 1
    pending = infer(requests, client)
    sent(ended(requests, pending, Reply(token=pending.token, error=QueueFull("too many wait"))))
    assert requests.queue_full_count == 2
    assert (requests.counts.accepted, requests.counts.error) == (1, 1)
    for counts in (client.counts, requests.counts, requests.inference):
        assert (counts.queue_full, counts.in_flight) == (1, 0)


def logged(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / FILE_NAME).read_text().splitlines()]


def test_the_end_of_each_inference_is_a_line(
    requests: Requests, client: Session, tmp_path: Path
) -> None:
    good, bad, gone = (infer(requests, client, name) for name in ("good", "bad", "gone"))
    good.caller, good.bytes_in, good.trace_id = "kim", 4, "ab" * 16
    timing = RequestTiming(queue_ms=0.12345, total_ms=2.0, version=3)
    answer = msgspec.structs.replace(output(good), timing=timing)
    sent(ended(requests, good, answer))
    sent(ended(requests, bad, Reply(token=bad.token, error=TaskFailed("no"))))
    assert requests.last_error == {"model": bad.model, "error": "TaskFailed: no"}
    assert requests.latencies() == {"m@3": {"p50_ms": 2.0, "p99_ms": 2.0}}
    ended(requests, gone, output(gone)).on_end(False)
    listing = requests.accept(client, RequestHeader(v=1, op="models", id="models"))
    sent(ended(requests, listing, Reply(token=listing.token)))
    requests.reject(
        client, RequestHeader(v=1, op="infer", id="\x1b", model="x" * 999), QueueFull("full")
    )
    lines = logged(tmp_path)
    outcomes = {line["request_id"]: line["outcome"] for line in lines}
    assert outcomes == {
        "good": "ok",
        "bad": "TaskFailed",
        "gone": "undeliverable",
        "\x1b": "QueueFull",
    }
    assert lines[-1]["model"] == "x" * 64
    known = {
        "op": "infer",
        "tenant": "kim",
        "model": "m",
        "trace_id": "ab" * 16,
        "version": 3,
        "bytes_in": 4,
        "bytes_out": 4,
        "queue_ms": 0.123,
        "total_ms": 2.0,
    }
    assert known.items() <= lines[0].items()
    assert abs(lines[0]["time"] - time.time()) < 60
    assert "\x1b" not in (tmp_path / FILE_NAME).read_text()


def test_a_share_of_them_is_written_and_the_files_have_a_bound(tmp_path: Path) -> None:
    log = RequestLog(
        tmp_path, LogConfig(requests=0.5, max_bytes=1 << 18), RateLimitedLog(lambda: 0.0)
    )
    answer = Reply(token=Token(1))
    for number in range(2_300):
        log.note(answer, op="infer", request_id=str(number), model="m" * 500)
    log.close()
    files = sorted(tmp_path.iterdir())
    assert [one.name for one in files] == [FILE_NAME, f"{FILE_NAME}.1", f"{FILE_NAME}.2"]
    assert all(one.stat().st_size <= 1 << 18 for one in files)
    written = [int(line["request_id"]) for line in logged(tmp_path)]
    assert written
    assert len(written) < 0.75 * (max(written) - min(written))  # not all requests are written


def test_a_disk_that_is_full_ends_no_request(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = RequestLog(tmp_path / "none", LogConfig(requests=1.0), RateLimitedLog(lambda: 0.0))
    for _ in range(100):
        log.note(Reply(token=Token(1)), op="infer")
    log.close()
    assert len(caplog.messages) == LINES_PER_MINUTE
    assert "a line is lost" in caplog.text


def test_the_servers_log_has_a_few_lines_of_each_kind_of_failure(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    now_ms = 0.0
    log = RequestLog(tmp_path, LogConfig(), RateLimitedLog(lambda: now_ms))
    errors = [QueueFull("full", limit="max_queue"), InvalidInput("bad"), Cancelled("taken back")]
    for number in range(100):
        for error in errors:
            answer = Reply(token=Token(1), error=error)
            log.note(answer, op="infer", request_id=str(number), tenant="kim")
    assert len(caplog.messages) == 2 * LINES_PER_MINUTE
    first = "op=infer request_id=0 tenant=kim limit=max_queue cause=QueueFull: full unsaid=0"
    assert caplog.messages[0] == first
    now_ms = 61_000.0
    log.note(Reply(token=Token(1), error=errors[0]), op="infer")
    unsaid = 100 - LINES_PER_MINUTE
    last = f"op=infer limit=max_queue cause=QueueFull: full unsaid={unsaid}"
    assert caplog.messages[-1] == last
    assert not [*tmp_path.iterdir()]
