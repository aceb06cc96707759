"""Events over HTTP: numbered, resumable, and not stored for a client that does not read."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest

from pipeswitch.base.errors import PipeSwitchError, QueueFull
from pipeswitch.extras.page import event_stream as feeds
from pipeswitch.extras.page.event_stream import EventLog, Reader
from pipeswitch.gateway.serving import upstream as upstreams

T = TypeVar("T")


def now(awaitable: Awaitable[T]) -> T:
    async def run() -> T:
        return await asyncio.wait_for(awaitable, 5)

    return asyncio.run(run())


def parsed(piece: bytes) -> list[tuple[str, str, Any]]:
    """Return the id, name and data of each record in a piece."""
    events = []
    for record in piece.decode().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in record.split("\n") if ": " in line)
        if "data" in fields:
            name = fields.get("event", "")
            events.append((fields.get("id", ""), name, json.loads(fields["data"])))
    return events


async def pieces(reader: Reader, count: int) -> list[tuple[str, str, Any]]:
    return [record for _ in range(count) for record in parsed(await reader.next())]


def filled(count: int) -> EventLog:
    feed = EventLog()
    for number in range(count):
        feed.add("job.progress" if number % 2 else "switch.started", {"number": number})
    return feed


def test_a_reader_is_greeted_and_reads_what_comes_after_it() -> None:
    feed = filled(3)

    async def scenario() -> list[tuple[str, str, Any]]:
        reader = feed.read("10.0.0.1")
        greeting = await pieces(reader, 1)
        waiting = asyncio.create_task(pieces(reader, 1))
        await asyncio.sleep(0)
        feed.add("switch.evicted", {"model": "m"})
        return greeting + await waiting

    (_, name, hello), (_, _, event) = now(scenario())
    assert (name, hello["now_ms"] > 0) == ("hello", True)
    assert event == {"topic": "switch.evicted", "model": "m"}


def test_a_reader_goes_on_behind_its_last_event() -> None:
    feed = filled(1)
    first = feed.read("a")

    async def scenario() -> list[tuple[str, str, Any]]:
        await first.next()
        feed.add("job.done", {"number": 7})
        ((number, _, _),) = await pieces(first, 1)
        feed.add("job.done", {"number": 8})
        feed.add("job.done", {"number": 9})
        return await pieces(feed.read("a", last_id=number), 2)

    assert [data["number"] for _, name, data in now(scenario()) if not name] == [8, 9]


@pytest.mark.parametrize("last_id", ["another-5", "nonsense", "-", "x" * 500, "é-1"])
def test_an_id_of_another_life_is_told_as_a_gap(last_id: str) -> None:
    events = now(pieces(filled(3).read("a", last_id=last_id), 1))
    assert [(name, data) for _, name, data in events if name == "dropped"] == [
        ("dropped", {"count": None})
    ]


def test_events_are_followed_again_after_any_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstreams, "EVENTS_AGAIN_S", 0.0)
    errors = [PipeSwitchError("the connection failed"), KeyError("asked again")]

    async def ask(op: str, **_: Any) -> None:
        raise errors.pop(0)

    async def scenario() -> None:
        upstream = upstreams.Upstream("ipc://nowhere")
        monkeypatch.setattr(upstream, "_events", SimpleNamespace(ask=ask))
        await upstream._follow(lambda *_: None)

    with pytest.raises(KeyError):
        now(scenario())


def test_who_does_not_read_is_told_how_many_it_missed_and_holds_nothing() -> None:
    feed = EventLog()
    reader = feed.read("a")
    total = feeds.KEPT + 40
    for number in range(total):
        feed.add("job.progress", {"number": number})
    assert feed.first == 41

    async def scenario() -> list[tuple[str, str, Any]]:
        return await pieces(reader, 1 + feeds.KEPT // feeds.MAX_BATCH)

    _, (_, name, data), *events = now(scenario())
    assert (name, data) == ("dropped", {"count": 40})
    assert [event["number"] for _, _, event in events] == list(range(40, total))


def test_only_topics_that_were_asked_for_are_told() -> None:
    feed = EventLog()
    reader = feed.read("a", ["switch.", "model."])
    for topic in ("job.done", "switch.started", "model.registered", "worker.died"):
        feed.add(topic, {})
    events = now(pieces(reader, 2))
    assert [data["topic"] for _, name, data in events if not name] == [
        "switch.started",
        "model.registered",
    ]


def test_a_silent_stream_gives_signs_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeds, "KEEP_ALIVE_S", 0.0)
    reader = EventLog().read("a")

    async def scenario() -> bytes:
        await reader.next()
        return await reader.next()

    assert now(scenario()).startswith(b":")


def test_streams_of_an_address_and_of_all_are_counted() -> None:
    feed = EventLog()
    open_ones = [feed.read("a") for _ in range(feeds.MAX_READERS_PER_ADDRESS)]
    with pytest.raises(QueueFull):
        feed.read("a")
    open_ones.pop().close()
    feed.read("a")
    others = feeds.MAX_READERS - feeds.MAX_READERS_PER_ADDRESS
    for number in range(others):
        feed.read(f"b{number}")
    with pytest.raises(QueueFull):
        feed.enter("c")


def test_a_record_is_one_line_whatever_its_texts_are() -> None:
    feed = EventLog()
    reader = feed.read("a")
    feed.add("job.warning", {"text": "a\n\ndata: {}\r\nid: 1\u2028<img>", "value": float("nan")})
    _, (_, _, data) = now(pieces(reader, 2))
    assert data["text"] == "a\n\ndata: {}\r\nid: 1\u2028<img>"
    assert data["value"] is None
