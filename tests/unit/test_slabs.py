"""Allocator of slabs: slabs never overlap, and freeing all of them leaves one free range."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeswitch.wire.slabs import SLAB_ALIGN_BYTES, SlabPool

PAGE = SLAB_ALIGN_BYTES


def test_a_slab_is_aligned_and_rounded_up_to_pages() -> None:
    pool = SlabPool(10 * PAGE)
    assert pool.take(1) == 0
    assert pool.take(PAGE + 1) == PAGE
    assert pool.free_bytes == 7 * PAGE


def test_the_smallest_hole_that_fits_is_taken() -> None:
    pool = SlabPool(10 * PAGE)
    first, _, third, _ = (pool.take(n * PAGE) for n in (3, 1, 2, 1))
    assert first is not None
    assert third is not None
    pool.free(first)
    pool.free(third)
    assert pool.take(2 * PAGE) == third


def test_a_full_pool_takes_nothing_and_says_what_is_left() -> None:
    pool = SlabPool(4 * PAGE)
    pool.take(3 * PAGE)
    assert pool.take(2 * PAGE) is None
    assert (pool.free_bytes, pool.largest_free_bytes) == (PAGE, PAGE)
    pool.check()


def test_a_slab_cannot_be_freed_twice() -> None:
    pool = SlabPool(4 * PAGE)
    offset = pool.take(PAGE)
    assert offset is not None
    pool.free(offset)
    with pytest.raises(KeyError):
        pool.free(offset)


def test_an_empty_request_still_gets_its_own_place() -> None:
    pool = SlabPool(4 * PAGE)
    assert pool.take(0) != pool.take(0)


@given(st.lists(st.tuples(st.sampled_from("tef"), st.integers(0, 20 * PAGE)), max_size=60))
def test_any_sequence_keeps_the_invariants_and_ends_in_one_hole(
    steps: list[tuple[str, int]],
) -> None:
    pool = SlabPool(64 * PAGE)
    live: list[int] = []
    for step, number in steps:
        if step in "te":
            does_fit = number <= pool.largest_free_bytes
            offset = pool.take(number, at_end=step == "e")
            assert (offset is not None) == does_fit
            if offset is not None:
                assert pool.size_of(offset) >= number
                live.append(offset)
        elif live:
            pool.free(live.pop(number % len(live)))
        pool.check()
    for offset in live:
        pool.free(offset)
    pool.check()
    assert pool.largest_free_bytes == pool.capacity_bytes
    assert pool.slab_count == 0
