"""Fuzz target: profile files, which are read, checked, and used for a plan if they are valid."""

from __future__ import annotations

import functools
from pathlib import Path

from pipeswitch.extras.lab.planner import plan_of, predict
from pipeswitch.extras.lab.profile import Profile, ProfileError, decode, encode

from .target import JSON_TEXT, Target
from .worlds import profile_of


def run(raw: bytes) -> None:
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
    words=("version", "layers", "batches", "cpu", "NaN", "Infinity", "stale"),
    max_bytes=6000,
)
