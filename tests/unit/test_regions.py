"""Allocator of regions: regions never overlap, no byte is lost, the cheapest window is found."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeswitch.scheduler.state.regions import Cost, Owner, Region, RegionAllocator

OWNERS = [Owner("model", f"o{index}") for index in range(8)]
A, B, C, NEW = (Owner("model", name) for name in ("a", "b", "c", "new"))
STEPS = st.lists(
    st.tuples(st.sampled_from(OWNERS), st.integers(1, 40), st.none() | st.integers(0, 12)),
    max_size=40,
)


def filled(steps: list[tuple[Owner, int, int | None]], capacity: int = 100) -> RegionAllocator:
    """Return an allocator after these steps, each of which reserves or releases a region."""
    regions = RegionAllocator(capacity, 8)
    for owner, size, at in steps:
        if regions.get(owner) is not None:
            regions.release(owner)
        else:
            regions.reserve(owner, size, None if at is None else at * 8)
        regions.check()
    return regions


@given(STEPS)
def test_free_and_reserved_are_the_capacity(steps: list[tuple[Owner, int, int | None]]) -> None:
    regions = filled(steps)
    assert regions.free_bytes + sum(r.size_bytes for r in regions) == regions.capacity_bytes == 96


@given(STEPS)
def test_freeing_all_leaves_one_hole(steps: list[tuple[Owner, int, int | None]]) -> None:
    regions = filled(steps)
    for region in list(regions):
        regions.release(region.owner)
    assert len(regions) == 0
    assert regions.largest_free_bytes == regions.free_bytes == 96


@given(STEPS, st.integers(1, 96))
def test_what_fits_the_longest_hole_is_granted(
    steps: list[tuple[Owner, int, int | None]], size: int
) -> None:
    regions = filled(steps)
    fits = -(-size // 8) * 8 <= regions.largest_free_bytes
    assert (regions.reserve(NEW, size) is not None) == fits
    regions.check()


@given(STEPS, st.integers(1, 96), st.dictionaries(st.sampled_from(OWNERS), st.integers(0, 9)))
def test_the_cheapest_window_is_the_cheapest_of_all_places(
    steps: list[tuple[Owner, int, int | None]], size: int, prices: dict[Owner, int]
) -> None:
    regions = filled(steps)

    def cost(region: Region) -> Cost | None:
        price = prices.get(region.owner)
        return (
            None if price is None else (float(price // 5), float(price % 5))
        )  # None means that the region cannot be evicted

    costs = [cost(region) for region in regions]
    places = [regions.window_at(start, size, costs) for start in range(0, 96, 8)]
    possible = [place.cost for place in places if place is not None]
    best = regions.cheapest_window(size, costs)
    if best is None:
        assert not possible
        return
    assert best.cost == min(possible)
    for victim in best.victims:
        regions.release(victim.owner)
    assert regions.reserve(NEW, size, at_bytes=best.offset_bytes) is not None


@given(STEPS, st.integers(0, 96), st.integers(1, 96))
def test_overlapping_finds_who_shares_a_byte(
    steps: list[tuple[Owner, int, int | None]], start: int, size: int
) -> None:
    regions = filled(steps)
    expected = [r for r in regions if r.offset_bytes < start + size and start < r.end_bytes]
    assert regions.overlapping(start, size) == expected


def test_an_owner_has_one_region_at_a_time() -> None:
    regions = RegionAllocator(64, 8)
    regions.reserve(A, 8)
    with pytest.raises(ValueError, match="already holds"):
        regions.reserve(A, 8)
    regions.release(A)
    with pytest.raises(KeyError):
        regions.release(A)


def test_a_place_that_is_taken_or_not_aligned_is_not_granted() -> None:
    regions = RegionAllocator(64, 8)
    assert regions.reserve(A, 8, at_bytes=16) is not None
    assert regions.reserve(B, 8, at_bytes=16) is None
    assert regions.reserve(B, 8, at_bytes=4) is None
    assert regions.reserve(B, 8, at_bytes=64) is None
    assert len(regions) == 1


def test_the_smallest_hole_that_fits_is_taken() -> None:
    regions = RegionAllocator(96, 8)
    for owner, at in ((A, 16), (B, 32), (C, 88)):
        assert regions.reserve(owner, 8, at_bytes=at) is not None
    region = regions.reserve(NEW, 8)
    assert region.offset_bytes == 24


def test_clear_forgets_everything() -> None:
    regions = RegionAllocator(64, 8)
    regions.reserve(A, 8)
    regions.clear()
    regions.check()
    assert regions.free_bytes == 64
