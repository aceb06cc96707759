"""Choice of GPU mechanisms (rungs): which one is used, and why not the faster one above it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from pipeswitch.base.config import DeviceConfig as Wishes
from pipeswitch.base.errors import ConfigError
from pipeswitch.base.units import SizeSpec
from pipeswitch.devices.cuda.kind import arena_size, private_size, slice_size
from pipeswitch.devices.cuda.ladder import (
    REQUIRED,
    TESTS,
    Ladder,
    LadderOutcome,
    choose,
    needs_test,
)

ALL_GOOD = {name: LadderOutcome(True) for name in TESTS}
GIB = 1 << 30


def results(**bad: str) -> dict[str, LadderOutcome]:
    """Return results in which all tests pass except ``bad`` (names have underscores for dashes)."""
    return ALL_GOOD | {
        name.replace("_", "-"): LadderOutcome(False, text) for name, text in bad.items()
    }


def rungs(ladder: Ladder) -> tuple[str, ...]:
    return ladder.waits, ladder.words, ladder.activations, ladder.graphs


def test_what_works_is_used() -> None:
    ladder = choose(Wishes(), ALL_GOOD)
    assert rungs(ladder) == ("gpu", "write", "slice", "on")
    assert ladder.reasons == ()


@pytest.mark.parametrize("name", REQUIRED)
def test_without_memory_or_sharing_there_is_no_cuda_device(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}: invalid device context") as caught:
        choose(Wishes(), results(**{name: "invalid device context"}))
    assert "--device cpu" in caught.value.hint
    with pytest.raises(ConfigError, match="it did not run"):
        choose(Wishes(), {key: value for key, value in ALL_GOOD.items() if key != name})


def test_words_by_copies_serve_where_stream_writes_do_not() -> None:
    """Fall back to copies. They come second: CUDA documents that a stream write follows the data,
    but not that another process sees the data before a copied word."""
    ladder = choose(Wishes(), results(wait_write="a wrong value"))
    assert rungs(ladder) == ("gpu", "copy", "slice", "on")
    assert ladder.reasons == ("not words=write with waits=gpu: a wrong value",)


def test_a_wish_for_copies_is_tried_first() -> None:
    assert choose(Wishes(words="copy"), ALL_GOOD).words == "copy"
    ladder = choose(Wishes(words="copy"), results(wait_copy="not supported"))
    assert (ladder.waits, ladder.words) == ("gpu", "write")


def test_a_device_that_cannot_wait_leaves_it_to_the_cpu_and_keeps_the_rest() -> None:
    bad = results(wait_copy="no answer within 5 s", wait_write="it did not run")
    ladder = choose(Wishes(waits="gpu"), bad)
    assert rungs(ladder) == ("cpu", "copy", "slice", "on"), "a copy works on any driver"
    assert ladder.reasons[-1] == "waits=cpu: the device cannot wait for a word"


def test_a_hang_loses_the_tests_behind_it_and_no_more() -> None:
    outcomes = {name: LadderOutcome(True) for name in (*REQUIRED, "wait-write")}
    ladder = choose(Wishes(), outcomes)
    assert rungs(ladder) == ("gpu", "write", "private", "off")
    assert any("slice: it did not run" in reason for reason in ladder.reasons)


def test_a_lower_rung_is_had_by_asking() -> None:
    wishes = Wishes(waits="cpu", activations="private", graphs="off")
    assert rungs(choose(wishes, ALL_GOOD)) == ("cpu", "copy", "private", "off")


def test_a_wish_does_not_overrule_a_failed_test() -> None:
    ladder = choose(
        Wishes(activations="slice", graphs="on"), results(slice="asked for more", graph="no")
    )
    assert rungs(ladder) == ("gpu", "write", "private", "off")
    assert len(ladder.reasons) == 2


def test_wishes_that_name_every_rung_need_no_test() -> None:
    wishes = Wishes(waits="gpu", words="write", activations="slice", graphs="on")
    assert not needs_test(wishes)
    assert rungs(choose(wishes, None)) == ("gpu", "write", "slice", "on")
    lowest = Wishes(waits="cpu", words="copy", activations="private", graphs="off")
    assert rungs(choose(lowest, None)) == ("cpu", "copy", "private", "off")
    assert needs_test(Wishes(waits="gpu"))


def test_a_stream_is_held_only_if_the_test_passed_or_could_not_run_and_it_is_asked_for() -> None:
    assert choose(Wishes(), ALL_GOOD).holds == "stream"
    ladder = choose(Wishes(holds="stream"), results(hold="it computes"))
    assert (ladder.holds, ladder.reasons) == ("drain", ("not stream: hold: it computes",))
    assert choose(Wishes(holds="drain"), ALL_GOOD).holds == "drain"
    named = Wishes(waits="gpu", words="write", activations="slice", graphs="on")
    assert choose(named, None).holds == "drain"
    assert choose(replace(named, holds="stream"), None).holds == "stream"


@given(
    waits=st.sampled_from(["auto", "cpu", "gpu"]),
    words=st.sampled_from(["auto", "copy", "write"]),
    activations=st.sampled_from(["auto", "private", "slice"]),
    graphs=st.sampled_from(["auto", "off", "on"]),
    passed=st.sets(st.sampled_from(TESTS[len(REQUIRED) :])),
)
def test_only_what_passed_is_ever_chosen(
    waits: str, words: str, activations: str, graphs: str, passed: set[str]
) -> None:
    outcomes = {name: LadderOutcome(name in passed or name in REQUIRED, "no") for name in TESTS}
    wishes = Wishes(waits=waits, words=words, activations=activations, graphs=graphs)
    ladder = choose(wishes, outcomes)
    if ladder.waits == "gpu":
        assert f"wait-{ladder.words}" in passed
        assert waits != "cpu"
    assert (ladder.activations == "slice") == ("slice" in passed and activations != "private")
    assert (ladder.graphs == "on") == ("graph" in passed and graphs != "off")
    complete = (ladder.waits, ladder.activations, ladder.graphs) == ("gpu", "slice", "on")
    assert complete or ladder.reasons


@pytest.mark.parametrize("free_gib", [1, 4, 14, 70, 139])
def test_arena_and_private_memory_fit_beside_each_other(free_gib: int) -> None:
    free = free_gib * GIB
    arena = arena_size(SizeSpec(), free)
    assert 0 <= arena <= 0.9 * free
    assert arena % (2 << 20) == 0
    assert arena + private_size(free, arena) <= max(free, GIB)
    assert arena_size(SizeSpec(size_bytes=GIB), free) == GIB
    assert arena_size(SizeSpec(fraction=0.5), free) == free // 2


def test_the_slice_has_a_size_only_where_it_is_used() -> None:
    config = Wishes()
    assert slice_size(config, Ladder(), 100 * GIB) == 0
    assert slice_size(config, Ladder(activations="slice"), 100 * GIB) == 8 * GIB
    assert slice_size(config, Ladder(activations="slice"), 8 * GIB) == GIB
    config_with_slice = Wishes(slice=SizeSpec(size_bytes=3 * GIB + 1))
    assert slice_size(config_with_slice, Ladder(activations="slice"), 100 * GIB) == 3 * GIB
