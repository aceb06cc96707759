"""Scopes to explore: every test run explores the small scopes, and ``make model`` explores all."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, Final

from .scope import Scope

COARSE: Final[Any] = partial(Scope, is_coarse=True)
JOB: Final[Any] = partial(COARSE, steps=1, requests=1, models=1)
TRAIN: Final[Any] = partial(COARSE, steps=2, requests=0, models=1)
SERVE: Final[Any] = partial(COARSE, has_job=False, requests=2)
JOIN: Final[Any] = partial(COARSE, steps=0, models=1)
MOVE: Final[Any] = partial(COARSE, steps=2, models=1, devices=2)
COSHIFT: Final[Any] = partial(COARSE, jobs=2, steps=1, models=1, training="coshift")
# Larger than the arena: it is streamed.
STREAM: Final = SERVE(name="stream", models=1, groups=6, model_mib=12, arena_mib=12, kills=1)
ASIDE: Final = replace(STREAM, name="aside", models=2, groups=4, small_mib=2, kills=0)
# The model and the slice do not both fit in the arena, nor do the slices of two jobs.
SWAP: Final = JOB(name="swap", arena_mib=6)
SWAP_TWO: Final = replace(SWAP, jobs=2, steps=2, requests=0, cycles=2, arena_mib=4)

QUICK: Final = (
    JOB(name="kill", kills=1),
    JOB(name="suspect", suspicions=1),
    JOB(name="daemon", daemon_kills=1),
    JOB(name="evict", steps=2, kills=1, arena_mib=6),
    TRAIN(name="pause", pauses=1, kills=1),
    JOB(name="signals", requests=2, hears_late=True),
    JOB(name="repeat", repeats=1),
    TRAIN(name="repeat-commit", repeats=1, is_coarse=False),
    JOB(name="deadline", requests=2, deadlines=1),
    JOB(name="cancel", requests=2, cancels=1),
    JOB(name="drain", steps=2, arena_mib=6, drains=1),
    JOB(name="prefetch", models=2, groups=2, hints=1),
    JOIN(name="join", requests=3, batch=3),
    JOB(name="generate", requests=2, runs=2, cancels=1, parks=1),
    SERVE(name="generate-kill", models=2, runs=2, kills=1),
    STREAM,
    replace(ASIDE, requests=4, asks="BABB"),
    SERVE(name="turns", requests=7, asks="AAAABAB", callers="ggggmkm", models=2, arena_mib=14),
    SERVE(
        name="variants",
        requests=3,
        asks="ABA",
        models=2,
        groups=2,
        arena_mib=6,
        are_variants=True,
        kills=1,
        daemon_kills=1,
    ),
    JOB(name="fine", groups=2, is_coarse=False),
    SERVE(name="device-lost", models=2, devices=2, daemon_kills=1, daemon_restarts=0),
    SERVE(name="place", asks="CB", models=3, limited="A", devices=2, pins=1),
    TRAIN(name="jobs", jobs=2, cycles=2),
    COSHIFT(name="jobs-coshift", steps=2, requests=0),
    MOVE(name="move", requests=0, moves=1, kills=1),
    replace(SWAP, name="swap-kill", kills=1),
    replace(SWAP, name="swap-turn", requests=2),
    replace(SWAP, name="swap-hold", holds=True, slices_move=False),
    replace(SWAP, name="evict-hold", holds=True, max_swapped=0),
    JOB(name="hold", steps=2, kills=1, holds=True),
    JOB(name="jobs-hold", jobs=2, holds=True),
    replace(SWAP, name="swap-late", steps=2, hears_late=True),
    replace(SWAP, name="swap-suspect", suspicions=1),
    replace(SWAP, name="swap-repeat", repeats=1),
    replace(SWAP, name="swap-fails", slice_errors=1),
    replace(SWAP, name="swap-full", store_mib=5, kills=1),  # evicts instead
    replace(SWAP, name="swap-fixed", requests=2, slices_move=False),
    replace(SWAP, name="swap-fine", is_coarse=False),
    replace(SWAP, name="swap-daemon", daemon_kills=1),
    replace(SWAP, name="swap-pause", pauses=1),
    replace(SWAP_TWO, name="swap-two"),
    replace(SWAP_TWO, name="swap-one", max_swapped=1),
    replace(SWAP, name="evict-kill", max_swapped=0, kills=1),
    replace(SWAP, name="evict-drain", max_swapped=0, drains=1),
)
FULL: Final = (
    JOB(name="generate-daemon", requests=2, runs=2, daemon_kills=1, drains=1),
    JOIN(name="generate-join", requests=3, runs=2, batch=2, kills=1, parks=1),
    JOIN(name="join-kill", requests=4, batch=2, kills=1),
    JOIN(name="ahead-full", requests=4, asks="AABC", models=3, arena_mib=10),
    JOIN(name="ahead", requests=3, models=3, arena_mib=18),
    JOB(name="two-models", steps=2, requests=2, models=2, kills=1),
    JOB(name="late", kills=1, late=1),
    JOB(name="fine-kill", requests=0, kills=1, is_coarse=False),
    JOB(name="fine-repeat", repeats=1, is_coarse=False),
    TRAIN(name="repeat-kill", repeats=1, kills=1, is_coarse=False),
    JOB(name="repeat-daemon", requests=0, repeats=1, daemon_kills=1, is_coarse=False),
    JOB(name="daemon-kill", kills=1, daemon_kills=1),
    JOB(name="drain-kill", steps=2, arena_mib=6, drains=1, kills=1),
    JOB(name="device-dies", devices=2, daemon_kills=1),
    SERVE(name="place-kill", models=1, placement="spread", devices=2, kills=1, daemon_kills=1),
    SERVE(
        name="place-pinned",
        requests=3,
        asks="CBA",
        models=3,
        limited="A",
        devices=2,
        pins=1,
        daemon_kills=1,
    ),
    MOVE(name="move-daemon", requests=1, moves=1, daemon_kills=1),
    MOVE(name="move-pause", requests=0, moves=2, kills=1, pauses=1),
    JOB(name="jobs-request", jobs=2, cycles=1),
    JOB(name="jobs-kill", jobs=2, requests=0, cycles=2, kills=1),
    COSHIFT(name="coshift-request", requests=1),
    COSHIFT(name="coshift-kill", requests=0, kills=1),
    COSHIFT(name="coshift-cycles", requests=0, cycles=1, hears_late=True),
    replace(STREAM, name="stream-kill", daemon_kills=1),
    replace(ASIDE, name="aside-kill", requests=3, asks="BAB", kills=1),
    JOB(name="large", steps=3, requests=2, kills=2, suspicions=1, commit_steps=(2,)),
    replace(SWAP, name="swap-turn-kill", steps=2, requests=2, kills=1),
    replace(SWAP, name="swap-late-kill", kills=1, late=1),
    replace(SWAP, name="swap-turn-fails", steps=2, requests=2, slice_errors=1),
    replace(SWAP, name="swap-fixed-kill", steps=2, requests=2, slices_move=False, kills=1),
    replace(SWAP, name="swap-pause-kill", steps=2, pauses=1, kills=1),
    replace(SWAP, name="swap-drain-kill", requests=2, drains=1, kills=1),
    replace(SWAP, name="swap-cancel", requests=2, deadlines=1, cancels=1),
    replace(SWAP, name="swap-move", steps=2, limited="A", devices=2, moves=1),
    replace(SWAP, name="swap-fine-kill", is_coarse=False, kills=1),
    replace(SWAP, name="swap-coshift", jobs=2, training="coshift"),
    replace(SWAP, name="swap-two-request", jobs=2, cycles=1),
    replace(SWAP_TWO, name="swap-two-kill", kills=1),
    replace(SWAP_TWO, name="swap-two-fixed", slices_move=False),
)
