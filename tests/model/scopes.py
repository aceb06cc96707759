"""The scopes that are explored: small ones with every test run, all of them by ``make model``."""

from __future__ import annotations

from typing import Final

from .scope import Scope

QUICK: Final = (
    Scope(name="kill", steps=1, requests=1, models=1, kills=1, is_coarse=True),
    Scope(name="suspect", steps=1, requests=1, models=1, suspicions=1, is_coarse=True),
    Scope(name="daemon", steps=1, requests=1, models=1, daemon_kills=1, is_coarse=True),
    Scope(name="evict", steps=2, requests=1, models=1, kills=1, arena_mib=6, is_coarse=True),
    Scope(name="pause", steps=2, requests=0, models=1, pauses=1, kills=1, is_coarse=True),
    Scope(name="signals", steps=1, requests=2, models=1, is_coarse=True, hears_late=True),
    Scope(name="repeat", steps=1, requests=1, models=1, repeats=1, is_coarse=True),
    Scope(name="repeat-commit", steps=2, requests=0, models=1, repeats=1),
    Scope(name="deadline", steps=1, requests=2, models=1, deadlines=1, is_coarse=True),
    Scope(name="cancel", steps=1, requests=2, models=1, cancels=1, is_coarse=True),
    Scope(name="drain", steps=2, requests=1, models=1, arena_mib=6, drains=1, is_coarse=True),
    Scope(name="prefetch", steps=1, requests=1, models=2, groups=2, hints=1, is_coarse=True),
    Scope(name="join", steps=0, requests=3, models=1, batch=3, is_coarse=True),
    Scope(name="stream", has_job=False, requests=2, models=1, groups=6, model_mib=12, arena_mib=12,
          kills=1, is_coarse=True),
    Scope(name="turns", has_job=False, requests=7, asks="AAAABAB", callers="ggggmkm",
          models=2, arena_mib=14, is_coarse=True),
    Scope(name="fine", steps=1, requests=1, models=1, groups=2),
    Scope(name="device-lost", has_job=False, requests=2, models=2, devices=2, daemon_kills=1,
          daemon_restarts=0, is_coarse=True),
    Scope(name="place", has_job=False, requests=2, asks="CB", models=3, limited="A", devices=2,
          pins=1, is_coarse=True),
    Scope(name="move", steps=2, requests=0, models=1, devices=2, moves=1, kills=1, is_coarse=True),
)  # fmt: skip
FULL: Final = (
    Scope(name="join-kill", steps=0, requests=4, models=1, batch=2, kills=1, is_coarse=True),
    Scope(name="ahead-full", steps=0, requests=4, asks="AABC", models=3, arena_mib=10,
          is_coarse=True),
    Scope(name="ahead", steps=0, requests=3, models=3, arena_mib=18, is_coarse=True),
    Scope(name="two-models", steps=2, requests=2, models=2, kills=1, is_coarse=True),
    Scope(name="late", steps=1, requests=1, models=1, kills=1, late=1, is_coarse=True),
    Scope(name="fine-kill", steps=1, requests=0, models=1, kills=1),
    Scope(name="fine-repeat", steps=1, requests=1, models=1, repeats=1),
    Scope(name="repeat-kill", steps=2, requests=0, models=1, repeats=1, kills=1),
    Scope(name="repeat-daemon", steps=1, requests=0, models=1, repeats=1, daemon_kills=1),
    Scope(name="daemon-kill", steps=1, requests=1, models=1, kills=1, daemon_kills=1,
          is_coarse=True),
    Scope(name="drain-kill", steps=2, requests=1, models=1, arena_mib=6, drains=1, kills=1,
          is_coarse=True),
    Scope(name="device-dies", steps=1, requests=1, models=1, devices=2, daemon_kills=1,
          is_coarse=True),
    Scope(name="place-kill", has_job=False, requests=2, models=1, placement="spread", devices=2,
          kills=1, daemon_kills=1, is_coarse=True),
    Scope(name="place-pinned", has_job=False, requests=3, asks="CBA", models=3, limited="A",
          devices=2, pins=1, daemon_kills=1, is_coarse=True),
    Scope(name="move-daemon", steps=2, requests=1, models=1, devices=2, moves=1, daemon_kills=1,
          is_coarse=True),
    Scope(name="move-pause", steps=2, requests=0, models=1, devices=2, moves=2, kills=1, pauses=1,
          is_coarse=True),
    Scope(name="stream-kill", has_job=False, requests=2, models=1, groups=6, model_mib=12,
          arena_mib=12, kills=1, daemon_kills=1, is_coarse=True),
    Scope(name="large", steps=3, requests=2, models=1, kills=2, suspicions=1, commit_steps=(2,),
          is_coarse=True),
)  # fmt: skip
