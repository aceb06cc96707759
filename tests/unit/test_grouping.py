"""Groups of layers: by bytes (buckets) and from plans."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeswitch.planning.grouping import bucket, check_plan, per_layer, spans

SIZES = st.lists(st.integers(0, 1 << 30), max_size=200)


def test_the_first_group_is_small_and_the_others_fill_their_bucket() -> None:
    assert bucket([1, 1, 1, 4, 4, 4, 4], bucket_bytes=8, first_bytes=2) == (0, 2, 4, 6)


def test_a_layer_larger_than_its_bucket_stands_alone() -> None:
    assert bucket([1, 100, 1], bucket_bytes=8, first_bytes=2) == (0, 1, 2)


def test_layers_without_weights_never_open_a_group_by_themselves() -> None:
    assert bucket([0, 0, 5, 0], bucket_bytes=8, first_bytes=8) == (0,)


def test_no_layers_make_no_groups() -> None:
    assert bucket([]) == ()
    assert spans((), 0) == ()


def test_per_layer_is_a_group_for_each() -> None:
    assert [per_layer(3), per_layer(0)] == [(0, 1, 2), ()]


def test_a_bucket_of_no_bytes_is_refused() -> None:
    with pytest.raises(ValueError, match="positive"):
        bucket([1], bucket_bytes=0)


@pytest.mark.parametrize("plan", [(), (1,), (0, 0), (0, 3), (0, 2, 1)])
def test_a_plan_that_does_not_rise_from_zero_within_the_layers_is_refused(
    plan: tuple[int, ...],
) -> None:
    with pytest.raises(ValueError, match="plan for 3 layers"):
        check_plan(plan, 3)


@given(SIZES, st.integers(1, 1 << 28), st.integers(1, 1 << 28))
def test_every_layer_is_in_one_group_and_only_single_layers_exceed_a_bucket(
    sizes: list[int], bucket_bytes: int, first_bytes: int
) -> None:
    plan = bucket(sizes, bucket_bytes, first_bytes)
    groups = spans(plan, len(sizes))
    assert [layer for span in groups for layer in range(*span)] == list(range(len(sizes)))
    for index, (first, end) in enumerate(groups):
        used = [size for size in sizes[first:end] if size]
        assert len(used) <= 1 or sum(used) <= (first_bytes if index == 0 else bucket_bytes)
