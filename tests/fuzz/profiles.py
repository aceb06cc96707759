"""Fuzz target: profile files, from which a server reads the plan, and the lab makes one."""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path

from pipeswitch.extras.lab.planner import plan_of, predict
from pipeswitch.extras.lab.profile import Profile, ProfileError, decode, encode
from pipeswitch.planning import planned_groups
from pipeswitch.planning.grouping import check_plan

from .target import JSON_TEXT, Target
from .worlds import profile_of


def run(raw: bytes) -> None:
    with contextlib.suppress(planned_groups.PlannedError):
        groups = planned_groups.decode(raw)
        groups.why_unusable(_usual().identity, groups.digest, [4096])
        check_plan(groups.plan, len(groups.layers))
    try:
        profile = decode(raw)
    except ProfileError:
        return
    if decode(encode(profile)) != profile:
        raise AssertionError("a profile is another one when it is read again")
    try:
        plan = plan_of(profile)
    except ValueError:  # the scheduler handles this error: the profile has no plan
        return
    for batch in profile.batches:
        predict(profile, plan, batch.batch)


@functools.cache
def _usual() -> Profile:
    return profile_of(layer_count=3)


def seeds() -> list[bytes]:
    shipped = sorted((Path(__file__).parents[2] / "profiles").glob("*.json"))
    small = [path.read_bytes() for path in shipped if path.stat().st_size < 4096]
    return [encode(_usual()), encode(profile_of(layer_count=1)), *small]


TARGET = Target(
    name="profile",
    run=run,
    seeds=seeds,
    codec=JSON_TEXT,
    words=("version", "layers", "batches", "cpu", "NaN", "Infinity", "checks"),
    max_bytes=6000,
)
