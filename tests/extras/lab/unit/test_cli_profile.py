"""Output of the commands ``profile`` and ``plan``."""

from __future__ import annotations

import io
import json
from typing import Any

import msgspec
import pytest
from rich.console import Console, RenderableType

from pipeswitch.base.errors import InvalidInput, ModelNotFound
from pipeswitch.extras.lab import profile_report as cli_profile
from pipeswitch.extras.lab.costs import MIB
from pipeswitch.extras.lab.measuring import MeasuredProgram, Measurement, RunInstants
from pipeswitch.extras.lab.profile import PlanCheck, Profile
from pipeswitch.planning.planned_groups import UNKNOWN_DEVICE

LAYERS = 6


def profile(name: str, layer_ms: float) -> Profile:
    """Return a profile in which ``layer_ms`` copies 1 MiB, or computes one layer."""
    program = MeasuredProgram(name, "ab" * 32, (MIB,) * LAYERS, ("l",) * LAYERS, (0, 3))
    measurement = Measurement(program, (8, 1), UNKNOWN_DEVICE)
    while (trial := measurement.next) is not None:
        ends = (*trial.plan[1:], LAYERS)
        arrives = tuple(layer_ms * end for end in ends)
        begins = tuple(layer_ms * (first + 1) for first in trial.plan)
        done = tuple(layer_ms * (end + 1) for end in ends)
        measurement.take(RunInstants(0.0, arrives if trial.is_cold else (), begins, done))
    return measurement.profile("2026-01-01T00:00:00+00:00")


def answer(*profiles: Profile | None) -> dict[str, Any]:
    return {
        "arena_bytes": 16 * MIB,
        "models": [
            {
                "name": f"m{number}",
                "bytes": LAYERS * MIB,
                "grouping": "planned",
                "grouping_why": "it has no profile",
                "staging": None,
                "profile": None if one is None else msgspec.to_builtins(one),
            }
            for number, one in enumerate(profiles)
        ],
    }


def text_of(view: RenderableType) -> str:
    console = Console(file=io.StringIO(), width=240)
    console.print(view)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_profile_in_a_screen_says_what_was_measured() -> None:
    text = text_of(cli_profile.profile_view(msgspec.to_builtins(profile("net", 10.0))))
    assert "net: 6 layers, 6.00 MiB" in text
    assert "ms/MiB" in text
    for word in ("planned", "one shot", "buckets"):
        assert word in text
    batches = [line.split()[0] for line in text.splitlines() if line[:2] in ("8 ", "1 ")]
    assert batches == ["8", "1"]


def test_a_link_that_costs_nothing_a_byte_has_no_bandwidth() -> None:
    profile_made = profile("net", 10.0)
    free = msgspec.structs.replace(profile_made.link, beta_ms_per_mib=0.0)
    text = text_of(
        cli_profile.profile_view(
            msgspec.to_builtins(msgspec.structs.replace(profile_made, link=free))
        )
    )
    assert "∞" in text


def test_every_tried_plan_has_its_name() -> None:
    profile_made = profile("net", 10.0)
    check = PlanCheck(plan=(0,), batch=8, predicted_ms=1, measured_ms=1, spread_ms=0, trials=5)
    fine = msgspec.structs.replace(check, plan=tuple(range(LAYERS)))
    profile_made = msgspec.structs.replace(
        profile_made, checks=(fine, check, msgspec.structs.replace(check, plan=(0, 1)))
    )
    text = text_of(cli_profile.profile_view(msgspec.to_builtins(profile_made)))
    for word in ("per layer", "one shot", "planned"):
        assert word in text


def test_the_plan_predicts_each_model_and_says_what_the_arena_holds() -> None:
    report = cli_profile.report(answer(profile("m0", 10.0), profile("m1", 20.0)), {})
    json.dumps(report)
    assert [model["name"] for model in report["models"]] == ["m0", "m1"]
    assert report["fit_count"] == 2
    assert report["models"][0]["cold_ms"] < report["models"][1]["cold_ms"]
    text = text_of(cli_profile.report_view(report))
    assert "2 of 2 profiled models are resident together" in text
    assert "DEADLINE" not in text  # the command was called without a deadline


def test_deadlines_are_for_all_or_for_one_model() -> None:
    limits = cli_profile.parse_deadlines(["1s", "m1=1ms"])
    assert limits == {"": 1000.0, "m1": 1.0}
    report = cli_profile.report(answer(profile("m0", 10.0), profile("m1", 20.0)), limits)
    assert [model["holds_cold"] for model in report["models"]] == [True, False]
    text = text_of(cli_profile.report_view(report))
    assert [line.split()[-1] for line in text.splitlines()[1:3]] == ["yes", "no"]


@pytest.mark.parametrize("profiled", [True, False])
def test_a_model_that_streams_has_its_pass_predicted(profiled: bool) -> None:
    facts = answer(profile("m0", 10.0) if profiled else None)
    facts["arena_bytes"] = 4 * MIB
    facts["models"][0]["streams"] = {"pass_ms": 77.0, "text": "streams: 5 of 6, about 77 ms a pass"}
    facts["models"][0]["staging"] = {"plan": [0, 2, 4], "waits": [0, 0, 1], "resident": [0]}
    report = cli_profile.report(facts, {"": 80.0})
    json.dumps(report)
    assert "about 77 ms a pass" in text_of(cli_profile.report_view(report))
    if profiled:
        (row,) = report["models"]
        assert (row["fits"], row["cold_ms"], row["holds_cold"]) == (
            False,
            pytest.approx(60.0, abs=15.0),
            True,
        )


def test_a_deadline_for_a_model_that_is_not_there_is_refused() -> None:
    with pytest.raises(ModelNotFound, match='did you mean "m0"'):
        cli_profile.report(answer(profile("m0", 10.0)), {"mm0": 5.0})


@pytest.mark.parametrize("text", ["", "soon", "m1=", "m1=-5ms"])
def test_what_is_no_deadline_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput):
        cli_profile.parse_deadlines([text])


def test_models_without_a_profile_are_listed_with_what_to_do() -> None:
    report = cli_profile.report(answer(None), {})
    assert report["without_profile"][0]["name"] == "m0"
    assert "pipeswitch profile m0" in text_of(cli_profile.report_view(report))


def test_a_server_without_models_says_so() -> None:
    assert "no models" in text_of(cli_profile.report_view(cli_profile.report(answer(), {})))


def test_a_plan_of_one_model_is_that_models() -> None:
    facts = answer(profile("m0", 10.0), profile("m1", 20.0), None)
    report = cli_profile.report(facts, {}, ["m1"])
    assert ([model["name"] for model in report["models"]], report["without_profile"]) == (
        ["m1"],
        [],
    )
    assert cli_profile.report(facts, {}, ["m0", "m1"])["fit_count"] == 2
    with pytest.raises(ModelNotFound, match='did you mean "m1"'):
        cli_profile.report(facts, {}, ["mm1"])
