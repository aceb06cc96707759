"""Allocations in the request pool: each holder has a share, and each allocation is freed once."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterator
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeswitch.base.errors import QueueFull
from pipeswitch.frontend.intake.request_pool import PoolAllocation, RequestPool
from pipeswitch.frontend.intake.validation import CheckedInput
from pipeswitch.ipc.control_page import sealed_memfd
from pipeswitch.programs.interface.layout import aligned
from pipeswitch.wire.slabs import SLAB_ALIGN_BYTES as PAGE

PAGES: Final = 16
SHARE_BYTES = 3 * PAGES * PAGE // 4  # bytes that a single holder may have


@pytest.fixture
def pool() -> Iterator[RequestPool]:
    pool_made = make_pool()
    yield pool_made
    pool_made.check()
    pool_made.close()


def make_pool() -> RequestPool:
    descriptor = sealed_memfd("pool", PAGES * PAGE)
    try:
        return RequestPool(descriptor)
    finally:
        os.close(descriptor)


def release(pool: RequestPool, allocation: PoolAllocation) -> None:
    pool.release_inputs(allocation)
    pool.release_reply(allocation)


def refusal(pool: RequestPool, holder: str, input_bytes: int, reply_bytes: int) -> QueueFull:
    with pytest.raises(QueueFull) as caught:
        pool.reserve(holder, input_bytes, reply_bytes)
    pool.check()
    return caught.value


# ---- bytes -------------------------------------------------------------------------------------


def test_inputs_lie_in_their_room_and_every_mapping_shows_them() -> None:
    descriptor = sealed_memfd("pool", PAGES * PAGE)
    pool = RequestPool(descriptor)
    pool.reserve("other", 1, 1)
    allocation = pool.reserve("a", 96, 8)
    x = CheckedInput(name="x", dtype="int8", shape=(3,), frame=1, offset_bytes=64, size_bytes=3)
    mask = CheckedInput(
        name="mask", dtype="bool", shape=(2,), frame=0, offset_bytes=0, size_bytes=2
    )
    placed = allocation.place((mask, x))
    assert [(tensor.name, tensor.dtype, tensor.shape) for tensor in placed] == [
        ("mask", "bool", (2,)),
        ("x", "int8", (3,)),
    ]
    pool.fill(placed, [b"de", memoryview(b"abc")])
    with mmap.mmap(descriptor, 0) as workers:
        at = allocation.input_offset_bytes
        for mapping in (workers, pool.memory):
            assert mapping[at : at + 2] == b"de"
            assert mapping[at + 64 : at + 67] == b"abc"
    pool.close()
    os.close(descriptor)


def test_pages_of_a_request_hold_nothing_of_the_one_before() -> None:
    descriptor = sealed_memfd("pool", PAGES * PAGE)
    pool = RequestPool(descriptor)
    pool.memory[:] = b"s" * (PAGES * PAGE)
    allocation = pool.reserve("a", PAGE + 70, 8)
    inputs = [
        CheckedInput(
            name=name, dtype="int8", shape=(size,), frame=i, offset_bytes=at, size_bytes=size
        )
        for i, (name, at, size) in enumerate([("empty", 0, 0), ("m", 0, 2), ("x", 64, PAGE + 6)])
    ]
    pool.fill(allocation.place(inputs), [b"", b"mm", b"x" * (PAGE + 6)])
    at = allocation.input_offset_bytes
    expected = b"mm" + bytes(62) + b"x" * (PAGE + 6) + bytes(PAGE - 70)
    assert pool.memory[at : at + 2 * PAGE] == expected
    assert pool.memory[at + 2 * PAGE] == ord("s")
    pool.close()
    os.close(descriptor)


def test_a_reply_that_is_still_on_its_way_outlives_the_pool() -> None:
    pool = make_pool()
    allocation = pool.reserve("a", 4, 4)
    one = CheckedInput(name="x", dtype="int8", shape=(4,), frame=0, offset_bytes=0, size_bytes=4)
    placed = allocation.place((one,))
    pool.fill(placed, [b"sent"])
    at = allocation.input_offset_bytes
    frame = pool.memory[at : at + 4]
    pool.close()
    assert bytes(frame) == b"sent"


# ---- shares ------------------------------------------------------------------------------------


def test_one_holder_cannot_have_more_than_its_share_and_another_still_has_its_own(
    pool: RequestPool,
) -> None:
    assert pool.share_bytes == SHARE_BYTES
    pool.reserve("greedy", SHARE_BYTES - PAGE, PAGE)
    refused = refusal(pool, "greedy", 1, 0)
    assert refused.data["requested_bytes"] == 1
    assert f"use {SHARE_BYTES} bytes" in refused.message
    rest_bytes = PAGES * PAGE - SHARE_BYTES
    pool.reserve("modest", 3 * rest_bytes // 4 - PAGE, PAGE)
    assert 0 < pool.as_dict()["pool_free_bytes"] < rest_bytes


def test_requests_of_no_bytes_hold_room_as_well(pool: RequestPool) -> None:
    allocations = [pool.reserve("a", 0, 0) for _ in range(3)]
    assert len({allocation.input_offset_bytes for allocation in allocations}) == 3
    for allocation in allocations:
        release(pool, allocation)
    assert pool.is_empty


def test_many_small_rooms_count_the_pages_that_they_take(pool: RequestPool) -> None:
    """Whole pages count: otherwise a holder of many single bytes could take all pages."""
    for _ in range(SHARE_BYTES // PAGE // 2):
        pool.reserve("many", 1, 1)
    refusal(pool, "many", 1, 1)
    release(pool, pool.reserve("other", PAGE, 1))
    with pytest.raises(QueueFull):
        pool.take_block("another", 1, PAGES * PAGE, "")
    block = pool.take_block("another", 1, 7, "")
    assert pool._shares.of("another") == PAGE + 7
    pool.free_block("another", block, 7, "")
    assert not pool._shares.of("another")
    with pytest.raises(KeyError):
        pool.free_block("another", block, 7, "")


# ---- exhaustion --------------------------------------------------------------------------------


def test_a_full_pool_is_refused_with_the_numbers(pool: RequestPool) -> None:
    allocations = [pool.reserve(holder, PAGE, PAGE) for holder in "abcdef"]
    for allocation in allocations:
        pool.release_inputs(allocation)
    free_bytes = pool.as_dict()["pool_free_bytes"]
    assert free_bytes == (PAGES - 6) * PAGE  # free bytes are in several pieces
    refused = refusal(pool, "g", 6 * PAGE - 5, 0)
    assert refused.data["requested_bytes"] == 6 * PAGE - 5
    assert PAGE <= refused.data["largest_free_bytes"] < 6 * PAGE
    assert f"{free_bytes} of {PAGES * PAGE} free" in refused.message


# ---- releasing ---------------------------------------------------------------------------------


def test_releasing_inputs_twice_takes_nobody_elses_slab(pool: RequestPool) -> None:
    allocation = pool.reserve("a", PAGE, PAGE)
    at = allocation.input_offset_bytes
    pool.release_inputs(allocation)
    other = pool.reserve("b", PAGE, PAGE)
    assert at in (other.input_offset_bytes, other.reply_offset_bytes)
    slabs = pool.as_dict()["pool_slabs"]
    with pytest.raises(KeyError):
        pool.release_inputs(allocation)
    assert pool.as_dict()["pool_slabs"] == slabs


def test_releasing_a_reply_twice_gives_nobody_a_larger_share(pool: RequestPool) -> None:
    first, second = pool.reserve("a", PAGE, PAGE), pool.reserve("a", PAGE, PAGE)
    release(pool, first)
    with pytest.raises(KeyError):
        pool.release_reply(first)
    assert pool._shares.of("a") == 2 * PAGE
    release(pool, second)
    assert pool.is_empty


@given(
    st.lists(
        st.one_of(
            st.tuples(st.sampled_from("abc"), st.integers(0, 6 * PAGE), st.integers(0, 3 * PAGE)),
            st.tuples(st.sampled_from(["inputs", "reply"]), st.integers(0, 99), st.just(0)),
            st.tuples(st.sampled_from(["lend", "drop"]), st.integers(0, 6 * PAGE), st.just(0)),
        ),
        max_size=40,
    )
)
def test_any_sequence_keeps_shares_and_slabs_and_ends_empty(
    steps: list[tuple[str, int, int]],
) -> None:
    pool = make_pool()
    whole: list[PoolAllocation] = []
    halves: list[PoolAllocation] = []  # allocations whose inputs, but not replies, are released
    lent: list[memoryview] = []
    for what, number, reply_bytes in steps:
        if what == "inputs":
            if whole:
                halves.append(whole.pop(number % len(whole)))
                pool.release_inputs(halves[-1])
        elif what == "reply":
            if halves:
                pool.release_reply(halves.pop(number % len(halves)))
        elif what == "lend":
            lent += filter(lambda one: one is not None, [pool.lend("a", number, "")])
        elif what == "drop":
            del lent[: number % 3]
        elif what == "a" and lent:
            with contextlib.suppress(QueueFull):
                whole.append(pool.reserve(what, len(lent[-1]), reply_bytes, "", lent[-1].obj))
            del lent[-1]
        else:
            try:
                whole.append(pool.reserve(what, number, reply_bytes))
            except QueueFull:
                pages = sum(aligned(max(size, 1), PAGE) for size in (number, reply_bytes))
                is_over = pool._shares.of(what) + pages > SHARE_BYTES
                assert is_over or not pool.is_empty
        pool.check()
        for holder in "abc":
            sizes = [
                allocation.counted_bytes
                for allocation in (*whole, *halves)
                if allocation.holder == holder
            ]
            if holder == "a":
                sizes += [pool._slabs.size_of(one.obj.offset_bytes) for one in lent]
            assert pool._shares.of(holder) == sum(sizes)
    lent.clear()
    for allocation in whole:
        pool.release_inputs(allocation)
    for allocation in (*whole, *halves):
        pool.release_reply(allocation)
    pool.check()
    assert pool.is_empty
    assert not pool._lent_bytes
    pool.close()


def test_a_slab_that_was_lent_to_another_holder_is_not_used(pool: RequestPool) -> None:
    """The gateway receives for callers whom it names: the slab counts toward the owner's share."""
    one = CheckedInput(
        name="x", dtype="uint8", shape=(PAGE,), frame=0, offset_bytes=0, size_bytes=PAGE
    )
    lent = pool.lend("owner", PAGE, "")
    assert lent is not None
    assert pool.lent_for([one], [lent], "owner", "") is lent.obj
    assert pool.lent_for([one], [lent], "a", "") is None
    assert pool.lent_for([one], [lent], "owner", "b") is None
    assert pool.lent_for([one], [bytes(PAGE)], "owner", "") is None
    more = [pool.lend(f"{n}", 4 * PAGE, "") for n in range(2)]
    assert [each is not None for each in more] == [True, False]  # at most half of 16 pages
    del lent, more
    assert pool.is_empty
    assert not pool._lent_bytes
