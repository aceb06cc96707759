"""Work of one turn of the controller's loop is bounded by a constant, not by what somebody stores.

Work is counted as executed lines (each iteration of a loop is one), so that no test reads a clock.
"""

# mypy: disable-error-code="arg-type"

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import FrameType, SimpleNamespace
from typing import Any, Final

import pytest

from pipeswitch.base.config import Config, ServerConfig
from pipeswitch.base.errors import ModelNotFound, QueueFull, SequenceNotFound
from pipeswitch.base.roles import OWNER
from pipeswitch.base.units import MAX_COMPARED
from pipeswitch.frontend.announced_models import AnnouncedModels
from pipeswitch.frontend.frontend import Frontend
from pipeswitch.frontend.intake.request_pool import RequestPool
from pipeswitch.frontend.sequences.manager import IDLE_MS, Sequences
from pipeswitch.frontend.sequences.sequence_state import SequenceOptions
from pipeswitch.frontend.transport import send_queue
from pipeswitch.frontend.transport.clients import Outgoing, Session
from pipeswitch.ipc.control_page import sealed_memfd
from pipeswitch.scheduler.introspection import ROWS
from pipeswitch.scheduler.memory.blocks import tokens_of
from pipeswitch.scheduler.state import events as ev
from pipeswitch.wire.frames import RequestHeader
from tests.unit.sequence_world import MODEL, MOST, ROW
from tests.unit.test_budgets import Counted

MANY: Final = 20_000
LINES: Final = 15_000  # of one turn; they take a few milliseconds


@contextmanager
def counting() -> Iterator[list[int]]:
    """Count the lines that are executed in the context; the list's only item is their number."""
    lines = [0]

    def note(frame: FrameType, what: str, _: Any) -> Any:
        lines[0] += what == "line"
        return note

    before = sys.gettrace()
    sys.settrace(note)
    try:
        yield lines
    finally:
        sys.settrace(before)


def work_of(call: Callable[[], object]) -> int:
    with counting() as lines:
        call()
    return lines[0]


def turns(turn: Callable[[], float]) -> int:
    """Call ``turn`` until it has nothing left to do (it returns more than 0); return the number of
    calls, each of which did bounded work."""
    count = 1
    while True:
        with counting() as lines:
            wait = turn()
        assert lines[0] <= LINES, f"{lines[0]} lines in turn {count}"
        if wait > 0:
            return count
        count += 1


def test_the_count_sees_every_loop() -> None:
    assert work_of(lambda: [one for one in range(MANY)]) >= MANY  # noqa: C416
    assert work_of(lambda: max(one for one in range(MANY))) >= MANY


class Room:
    """Sequences in a pool whose tenants are separate."""

    def __init__(self) -> None:
        self.now_ms, self.tenant = 0.0, sealed_memfd("tenant", 1 << 28)
        shared = sealed_memfd("pool", 1 << 28)
        self.pool = RequestPool(shared, lambda _: self.tenant)
        os.close(shared)
        self.sequences = Sequences(self.pool, lambda: self.now_ms)
        self.model: Any = SimpleNamespace(
            **{name: getattr(MODEL, name) for name in ("model", "base", "version", "manifest")},
            tenant="t",
        )
        self.clients = [Session(peer=SimpleNamespace(), principal=OWNER) for _ in range(2)]

    def cache_blocks(self, count: int, callers: int = 1) -> None:
        """Close tables that leave this number of cached blocks."""
        blocks = self.sequences.blocks
        for number in range(count // (MOST // 16)):
            caller, ids = f"caller {number % callers}", [number % 9, *divmod(number, 997)] * 134
            one = blocks.open(caller, "m", "t", ROW, "program")
            blocks.resize(one, MOST)
            blocks.extend(one, MOST, tokens_of(ids[:MOST]))
            blocks.close(one)

    def keep_sequences(self, count: int) -> None:
        """Store idle sequences, each with a slab in the pool, of one client."""
        for number in range(count):
            options = SequenceOptions(id=str(number), starts=True, ends=False)
            one = self.sequences.of(options, self.clients[0], "caller", self.model)
            self.sequences.begin(one, options)
            one.allocation = self.pool.reserve("caller", 0, 0, "t")
            self.pool.release_inputs(one.allocation)
            one.steps = 1
            self.sequences.ended(one, None, is_ok=False, is_sent=True)


@pytest.fixture(scope="module")
def room() -> Iterator[Room]:
    """Room that each test leaves empty."""
    room_made = Room()
    yield room_made
    room_made.pool.check()
    assert room_made.pool.is_empty
    room_made.pool.close()
    os.close(room_made.tenant)


@pytest.mark.parametrize("callers", [1, 400])
@pytest.mark.parametrize("how", ["expire", "model gone", "evict"])
def test_cached_blocks_are_freed_in_pieces(room: Room, how: str, callers: int) -> None:
    room.cache_blocks(MANY, callers)
    assert room.sequences.by_model()["m"]["spare_bytes"] == room.sequences.blocks.cached_bytes > 0
    assert work_of(room.sequences.as_dict) < LINES
    if how == "expire":
        room.now_ms += IDLE_MS
        assert turns(room.sequences.expire) > MANY // 100
    elif how == "model gone":
        assert work_of(lambda: room.sequences.retract("m")) <= LINES
        assert "m" not in room.sequences.by_model()
        assert turns(room.sequences.expire) > MANY // 100
    else:
        assert work_of(room.sequences.blocks.evict) < 500
        while room.sequences.blocks.evict():
            pass
    assert room.pool.is_empty


@pytest.mark.parametrize("how", ["expire", "model gone", "client gone"])
def test_sequences_end_in_pieces_and_none_continues_after_its_model_or_client(
    room: Room, how: str
) -> None:
    room.keep_sequences(MANY)
    rows = room.sequences.rows(None)
    assert turns(lambda: float(next(rows, None) is None)) > MANY // 1000
    assert sum(map(len, room.sequences.rows("caller"))) == MANY
    assert sum(map(len, room.sequences.rows("other"))) == 0
    assert work_of(room.sequences.as_dict) < LINES
    if how == "expire":
        room.now_ms += IDLE_MS
    else:
        gone = {
            "model gone": lambda: room.sequences.retract("m"),
            "client gone": lambda: room.sequences.remove_client(room.clients[0]),
        }[how]
        assert work_of(gone) <= LINES
        for name in ("0", str(MANY // 2), str(MANY - 1)):
            options = SequenceOptions(id=name, starts=False, ends=False)
            with pytest.raises(SequenceNotFound):
                room.sequences.of(options, room.clients[1], "caller", room.model)
        assert not sum(map(len, room.sequences.rows(None)))
    assert turns(room.sequences.expire) > MANY // 1000
    assert not room.sequences.held
    assert room.pool.is_empty


def test_a_removed_model_leaves_what_another_of_its_name_has_cached(room: Room) -> None:
    room.cache_blocks(2 * MOST)
    room.sequences.retract("m")
    room.cache_blocks(MOST)
    turns(room.sequences.expire)
    assert len(room.sequences.blocks.unlocked) == MOST
    room.sequences.retract("m")
    turns(room.sequences.expire)


def test_a_request_does_the_same_work_beside_many_blocks_and_holes(room: Room) -> None:
    def request() -> None:
        allocation = room.pool.reserve("a", 5000, 70, "t")
        room.pool.release_inputs(allocation)
        room.pool.release_reply(allocation)
        room.pool.free_block("a", room.pool.take_block("a", 5000, 0, "t"), 0, "t")

    alone = work_of(request)
    blocks = [room.pool.take_block("b", 1, 0, "t") for _ in range(MANY)]
    for block in blocks[::2]:  # a hole beside each block
        room.pool.free_block("b", block, 0, "t")
    assert work_of(request) <= 2 * alone
    assert work_of(room.pool.as_dict) < 50
    for block in blocks[1::2]:
        room.pool.free_block("b", block, 0, "t")


def test_the_requests_of_a_client_that_is_gone_are_cancelled_in_pieces(tmp_path: Any) -> None:
    taken: list[ev.Event] = []
    descriptor = sealed_memfd("pool", 1 << 20)
    folders = {"state_dir": str(tmp_path), "runtime_dir": str(tmp_path)}
    frontend = Frontend(Config(server=ServerConfig(**folders)), descriptor, taken.append)
    os.close(descriptor)
    client, other = (Session(peer=SimpleNamespace(), principal=OWNER) for _ in range(2))
    for number in range(4000):
        header = RequestHeader(v=1, op="infer", id=str(number), model="m")
        frontend.requests.accept(client, header)
    frontend.requests.accept(other, header)
    frontend.sessions.clients[client.session] = client

    def turn() -> float:
        frontend.step()
        return 1.0 if frontend.wait_s() is None else 0.0

    assert work_of(lambda: frontend.sessions.drop(client, "gone")) <= LINES
    assert turns(turn) > 50
    assert sorted(one.token for one in taken) == [*range(1, 4001)]


@pytest.mark.parametrize("base", ["model", "alias"])
def test_the_error_for_an_unknown_name_compares_few_names(base: str) -> None:
    models = AnnouncedModels(1 << 20)
    for number in range(MANY):
        names = {"model": f"m-{number}", "alias": f"n-{number}"}
        announced: Any = SimpleNamespace(
            model=ev.ModelName(names["model"]),
            base=names["model"],
            version=1,
            is_current=True,
            aliases=(names["alias"],),
            composite=None,
        )
        with counting() as lines:
            models.announce(announced)
        assert lines[0] < 100
    wrong = f"{base}-{MANY}"
    for ask in (
        lambda: models.find(wrong, 0, "caller"),
        lambda: models.find("x" * 1_000_000, 0, "caller"),
        lambda: models.find("m-7", 9, "caller"),
    ):
        with pytest.raises(ModelNotFound):
            work_of(ask)
    assert work_of(lambda: models.missing(wrong, "caller")) < 10 * MANY + 2000 * MAX_COMPARED
    assert work_of(lambda: models.retract(ev.ModelName("m-7"))) < 50
    assert "m-7" not in models.current
    assert "n-7" not in models.aliases


@pytest.mark.parametrize("what", ["models", "ps"])
def test_a_listing_is_made_in_pieces(what: Any) -> None:
    rig = Counted(3 * ROWS)
    rig.infer("a")
    token = rig.token()
    rig.handle(
        ev.Query(token=token, what=what, name="", seconds=0.0, version=0, all_versions=False)
    )
    assert token not in rig.answers
    gone = rig.ask(ev.UnregisterRequest, model="m5", tenant=None)
    count = 0
    while token not in rig.answers:
        assert rig.scheduler.next_wakeup_ms() == rig.now_ms
        assert len(rig.scheduler.listing.listings.unfinished[0][-1]) <= (count + 4) * ROWS
        rig.tick(rig.now_ms)
        count += 1
    (rows,) = rig.answers[token].body.values()
    names = [row["name"] for row in rows]
    assert len({*names} & {"a", *(f"m{number}" for number in range(3 * ROWS - 1))}) >= 3 * ROWS - 1
    assert rig.answers[gone].error is None


def test_messages_of_one_client_and_clients_that_do_not_read_cost_one_turn_little() -> None:
    peer: Any = SimpleNamespace(needs_poll=False, transmit=lambda _: False, close=print)
    outbox = send_queue.SendQueue(1 << 40, lambda: 0.0, print)
    clients = [Session(peer=peer, principal=OWNER) for _ in range(MANY // 10)]
    long = bytes(send_queue.SHORT_BYTES + 1)
    for _ in range(MANY):
        outbox.send(clients[0], Outgoing(frames=[long], on_end=lambda _: None))
    short = Outgoing(frames=[b""], on_end=lambda _: None)
    assert work_of(lambda: outbox.send(clients[0], short)) < 100
    for client in clients:
        outbox.send(client, Outgoing(frames=[long]))
    assert work_of(outbox.sweep) < 5000
    sent: list[Outgoing] = []
    peer.transmit = lambda one: not sent.append(one)
    while outbox.backlogged:
        outbox.sweep()
    assert [one for one in sent if one.on_end].index(short) == 1


def test_events_go_to_a_limited_number_of_clients() -> None:
    sent: list[Outgoing] = []
    peer: Any = SimpleNamespace(transmit=lambda one: not sent.append(one), close=print)
    readers = send_queue.EventSubscribers(send_queue.SendQueue(1 << 40, lambda: 0.0, print))
    for number in range(send_queue.MAX_READERS + 1):
        client = Session(peer=peer, principal=OWNER)
        refused = pytest.raises(QueueFull) if number == send_queue.MAX_READERS else nullcontext()
        for name in "ab":
            with refused:
                readers.add(client, RequestHeader(v=1, op="events", id=name), ())
    sent.clear()
    readers.publish(ev.Publish(topic="job.done", body={}))
    assert len(sent) == 2 * send_queue.MAX_READERS
