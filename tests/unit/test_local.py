"""Messages on the owner's plain socket: their tables of frames, and shared memory of a peer."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeswitch.base.errors import RemoteProtocolError
from pipeswitch.ipc.control_page import sealed_memfd
from pipeswitch.wire.frames import INLINE, MAX_HEADER_BYTES, MAX_TENSORS, pack_table, read_table
from pipeswitch.wire.stream import ShmSegment, Stream

MAX_BYTES = 1 << 20
HALF = 1 << 20

parts = st.lists(
    st.tuples(st.integers(0, MAX_BYTES), st.integers(0, INLINE)), max_size=MAX_TENSORS
).map(lambda tensors: [(10, INLINE), *tensors])


@pytest.fixture
def share() -> Iterator[tuple[ShmSegment, ShmSegment]]:
    """Yield the client's and the server's view of one shared segment."""
    descriptor = sealed_memfd("share", 2 * HALF)
    yield ShmSegment(descriptor, is_servers=False), ShmSegment(descriptor, is_servers=True)
    os.close(descriptor)


@given(parts, st.integers(0, INLINE), st.binary(max_size=40))
def test_a_table_is_read_as_it_was_packed_whatever_follows(
    table: list[tuple[int, int]], taken_places: int, rest: bytes
) -> None:
    data = pack_table(table, taken_places)
    assert read_table(data + rest, MAX_BYTES) == (len(data), taken_places, table)
    assert read_table(data[:-1], MAX_BYTES) is None


@given(st.binary(max_size=200))
def test_a_table_of_any_bytes_is_one_or_is_refused(data: bytes) -> None:
    for begin in (b"", b"PSW1", b"PSW1\x01\0\0\0"):
        try:
            read_table(begin + data, MAX_BYTES)
        except RemoteProtocolError:
            continue


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"PSW2" + bytes(12), "magic"),
        (pack_table([(1, INLINE)] * (MAX_TENSORS + 2)), "parts are over"),
        (pack_table([(1, INLINE), (MAX_BYTES + 1, INLINE)]), "too large"),
        (pack_table([(1, INLINE), (MAX_BYTES + 1, 0)]), "too large"),
        (pack_table([(MAX_HEADER_BYTES + 1, INLINE)]), "too large"),
        (pack_table([(1, 0)]), "header"),
    ],
)
def test_a_table_that_is_none_is_refused_before_anything_is_allocated(
    data: bytes, text: str
) -> None:
    with pytest.raises(RemoteProtocolError, match=text):
        read_table(data, MAX_BYTES)


def test_what_one_side_writes_in_its_half_the_other_finds(
    share: tuple[ShmSegment, ShmSegment],
) -> None:
    for one, other, text in ((*share, b"x" * 5000), (*share[::-1], b"y" * 5000)):
        place = one.place(5000)
        one.own(place, 5000)[:] = text
        assert bytes(other.find(place, 5000)) == text


def test_a_part_outside_of_the_peers_half_is_refused(share: tuple[ShmSegment, ShmSegment]) -> None:
    for place, size in ((HALF, 1), (HALF - 1, 2), (0, HALF + 1), (INLINE - 1, 5), (1 << 63, 1)):
        with pytest.raises(RemoteProtocolError):
            share[1].find(place, size)
    assert len(share[1].find(0, HALF)) == HALF


def test_a_full_half_has_no_room_until_a_part_is_taken(
    share: tuple[ShmSegment, ShmSegment],
) -> None:
    client, _ = share
    first = client.place(HALF - 4096)
    assert client.place(8192) == INLINE
    client.free(first)
    assert client.place(HALF) != INLINE


@pytest.fixture
def ends() -> Iterator[tuple[Stream, Stream]]:
    one, other = socket.socketpair()
    with one, other:
        yield Stream(one, 1 << 46), Stream(other, 1 << 46)


def put(stream: Stream, *parts: bytes) -> None:
    stream.put(pack_table([(len(part), INLINE) for part in parts]), parts)


def test_more_buffers_wait_than_the_kernel_takes_in_one_call(ends: tuple[Stream, Stream]) -> None:
    sender, receiver = ends
    for number in range(2_000):
        put(sender, number.to_bytes(2, "little"), b"x" * 50)
    messages = []
    while len(messages) < 2_000:
        sender.flush()
        messages += receiver.receive(16)
    assert [int.from_bytes(message.parts[1], "little") for message in messages] == [*range(2_000)]


def test_what_came_before_the_end_is_heard_before_the_end(ends: tuple[Stream, Stream]) -> None:
    sender, receiver = ends
    for _ in range(20):
        put(sender, b"header")
    assert sender.flush()
    sender.close()
    assert [len(receiver.receive(16)) for _ in range(2)] == [16, 4]
    with pytest.raises(EOFError):
        receiver.receive(16)


def test_a_table_that_promises_much_takes_no_memory(ends: tuple[Stream, Stream]) -> None:
    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    sender, receiver = ends
    sender.put(pack_table([(1, INLINE), *[(64 << 20, INLINE)] * 4]), [b"h", b"begin"])
    sender.flush()
    before_bytes = resident_bytes()
    assert not receiver.receive(1)
    assert resident_bytes() - before_bytes < 32 << 20


def test_a_table_that_promises_more_than_there_is_ends_the_peer(
    ends: tuple[Stream, Stream],
) -> None:
    sender, receiver = ends
    sender.put(pack_table([(1, INLINE), (1 << 46, INLINE)]), [b"h"])
    sender.flush()
    with pytest.raises(RemoteProtocolError, match="memory"):
        receiver.receive(1)
