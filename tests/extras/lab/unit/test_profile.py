"""Profiles of models: their numbers, their files, and reasons why a profile is not used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeswitch.base.quantiles import quantile, spread
from pipeswitch.extras.lab import profile as profiles
from pipeswitch.extras.lab.costs import MIB, makespan
from pipeswitch.extras.lab.measuring import fit_link
from pipeswitch.extras.lab.planner import costs_of, plan_of, predict
from pipeswitch.extras.lab.replay import paper_model
from pipeswitch.planning import planned_groups
from pipeswitch.planning.grouping import check_plan
from tests.unit.measured import HERE, batch_of, measured

DIGEST = "ab" * 32
SIZES = (MIB, 0, 4 * MIB, 8 * MIB)


def profile(**changes: Any) -> profiles.Profile:
    values = {
        "model": "net",
        "digest": DIGEST,
        "identity": HERE,
        "batches": (batch_of(8, (1.0, 0.5, 4.0, 8.0)),),
        "overheads": profiles.Overheads(sigma_ms=0.01, launch_ms=0.02, wake_ms=0.3),
    }
    return measured(SIZES, {"largest_bytes": 13 * MIB}, **{**values, **changes})


def test_what_a_further_row_adds_follows_from_the_batches_that_were_measured() -> None:
    """One row takes 13.5 ms; eight rows take 13.5 ms plus 7 x 2.7 ms."""
    one, eight = batch_of(1, (1.0, 0.5, 4.0, 8.0)), batch_of(8, (2.4, 1.2, 9.6, 19.2))
    overheads = profiles.Overheads(sigma_ms=0.01, launch_ms=0.0, wake_ms=0.3)
    both = profile(batches=(one, eight), overheads=overheads)
    assert paper_model("net", both).row_share == pytest.approx(0.2)
    assert paper_model("net", profile(batches=(one,))).row_share == 1.0
    assert paper_model("net", profile(batches=(eight,))).row_share == 1.0


# ---- the link ----------------------------------------------------------------------------------


@given(
    alpha=st.floats(0.0, 5.0),
    beta=st.floats(0.01, 10.0),
    sizes=st.lists(st.integers(0, 512 * MIB), min_size=2, max_size=50, unique=True),
)
def test_a_straight_link_is_found_again(alpha: float, beta: float, sizes: list[int]) -> None:
    sizes = [*sizes, 0, 300 * MIB]
    link = fit_link([(size, alpha + beta * size / MIB) for size in sizes])
    for size in sizes:
        fitted = link.alpha_ms + link.beta_ms_per_mib * size / MIB
        true = alpha + beta * size / MIB
        assert fitted == pytest.approx(true, rel=1e-3, abs=2e-3)
    assert link.samples == len(sizes)


@given(st.lists(st.tuples(st.integers(0, 1 << 40), st.floats(0.0, 1e6)), min_size=1, max_size=60))
def test_no_samples_make_a_negative_cost(samples: list[tuple[int, float]]) -> None:
    link = fit_link(samples)
    assert link.alpha_ms >= 0
    assert link.beta_ms_per_mib >= 0


def test_many_small_groups_decide_the_fixed_cost() -> None:
    # A copy takes 0.1 ms plus 1 ms per MiB, except that large copies take 1.2 ms per MiB.
    samples = [(size, 0.1 + size / MIB) for size in (1024, 2048, 4096, 8192)]
    samples += [(64 * MIB, 0.1 + 1.2 * 64), (128 * MIB, 0.1 + 1.2 * 128)]
    link = fit_link(samples)
    assert link.alpha_ms == pytest.approx(0.1, rel=0.05)
    assert link.residual_p90 < 0.25


def test_copies_made_in_what_others_overslept_do_not_decide() -> None:
    """A simulated link may wake up late on a busy machine; its next copy then takes no time."""
    samples = [(MIB, 2.25), (MIB, 0.02)] * 12 + [(8 * MIB, 8.6), (24 * MIB, 26.0)]
    link = fit_link(samples)
    assert link.alpha_ms + link.beta_ms_per_mib * 12 == pytest.approx(13.0, rel=0.15)


def test_a_link_without_copies_is_refused() -> None:
    with pytest.raises(ValueError, match="without copies"):
        fit_link([])


def test_spread_is_the_distance_between_the_quartiles() -> None:
    assert spread([1.0, 2.0, 3.0, 4.0, 100.0]) == 2.0
    assert spread([5.0]) == 0.0
    assert quantile([0.0, 10.0], 0.25) == 2.5


# ---- the file ----------------------------------------------------------------------------------


def test_a_profile_survives_its_file() -> None:
    assert profiles.decode(profiles.encode(profile())) == profile()


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"version": 2}, "version 2"),
        ({"layers": ()}, "no layers"),
        ({"batches": ()}, "no layers or no batch"),
        ({"batches": profile().batches * 2}, "twice"),
        ({"overheads": profiles.Overheads(sigma_ms=-1.0, launch_ms=0.0, wake_ms=0.0)}, "overheads"),
    ],
)
def test_numbers_that_contradict_each_other_are_refused(
    change: dict[str, Any], problem: str
) -> None:
    with pytest.raises(profiles.ProfileError, match=problem):
        profiles.decode(profiles.encode(profile(**change)))


def test_one_time_for_each_layer_is_required() -> None:
    batch = msgspec.structs.replace(profile().batches[0], switch_ms=(1.0,))
    with pytest.raises(profiles.ProfileError, match="not one time for each of 4 layers"):
        profiles.decode(profiles.encode(profile(batches=(batch,))))


@pytest.mark.parametrize("raw", [b"", b"{}", b"[1]", b"\xff\xfe"])
def test_what_is_no_profile_is_refused(raw: bytes) -> None:
    with pytest.raises(profiles.ProfileError):
        profiles.decode(raw)


@given(st.binary(max_size=200))
def test_the_decoder_raises_nothing_else(raw: bytes) -> None:
    with pytest.raises(profiles.ProfileError):
        profiles.decode(raw)


def test_the_profiles_that_come_along_have_the_groups_that_are_planned_from_them() -> None:
    folder = Path(__file__).parents[4] / "profiles"
    paths = list(folder.glob("*.json"))
    assert paths
    for path in paths:
        profile_read = profiles.decode(path.read_bytes())
        groups = planned_groups.decode(path.read_bytes())
        device = groups.identity.device
        assert path.name == planned_groups.file_name(profile_read.model, groups.digest, device)
        assert groups.plan == plan_of(profile_read)
        check_plan(groups.plan, len(profile_read.layers))


# ---- plans from a profile ----------------------------------------------------------------------


def test_the_plan_is_made_of_the_costs_and_the_wake_up_is_paid_once() -> None:
    profile_made = profile()
    plan = plan_of(profile_made)
    check_plan(plan, len(SIZES))
    expected = makespan(plan, costs_of(profile_made)) + 0.3
    assert predict(profile_made, plan, 8) == pytest.approx(expected)
    assert predict(profile_made, plan, 8) <= predict(profile_made, (0,), 8)


def test_calling_a_subgraph_is_paid_for_each_group_not_for_each_layer() -> None:
    costs = costs_of(profile())
    assert costs.sigma_ms == pytest.approx(0.03)
    assert costs.compute_ms == pytest.approx((0.98, 0.48, 3.98, 7.98))


def test_a_gpus_layers_cost_what_they_cost_when_resident() -> None:
    batch = msgspec.structs.replace(profile().batches[0], resident_ms=(2.0,) * 4)
    there = msgspec.structs.replace(HERE, device="cuda:0")
    costs = costs_of(profile(batches=(batch,), identity=there))
    assert costs.compute_ms == pytest.approx((1.98,) * 4)


def test_a_batch_that_was_not_measured_has_no_costs() -> None:
    with pytest.raises(ValueError, match="batch 3"):
        costs_of(profile(), 3)
