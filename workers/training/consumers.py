"""Iterators between ``job.steps`` and the script's loop, which count from 0 in each run."""

from __future__ import annotations

import gc
import inspect
import itertools
import warnings
from types import FrameType, GeneratorType
from typing import Any

from pipeswitch.job import InexactResumeWarning, script_level


def batches_left(steps: FrameType, used: int) -> int:
    """Return how many batches the script will take from a generator after ``used`` ones; -1: all.

    ``islice(job.steps(...), 80)`` takes 80, although an earlier run of the script has taken some.
    Generators may wrap ``job.steps``, as that of ``tqdm`` does.
    """
    if not used:
        return -1
    by_frame = {one.gi_frame: one for one in gc.get_objects() if type(one) is GeneratorType}
    frame: FrameType | None = steps
    while frame is not None and frame in by_frame:
        one, frame = by_frame[frame], frame.f_back
        counting = gc.get_referrers(one)
        for inputs in [one for one in counting if type(one) is tuple]:
            counting += [one for one in gc.get_referrers(inputs) if isinstance(one, zip)]
        for consumer in counting:
            if isinstance(consumer, itertools.islice) and hasattr(consumer, "__reduce__"):
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", DeprecationWarning)
                    state: Any = consumer.__reduce__()
                _, first, last, step = state[1]
                if (first, step, one.gi_frame) == (0, 1, steps):
                    return -1 if last is None else max(0, last - used)
            if isinstance(consumer, (itertools.islice, enumerate, zip)):
                warnings.warn(
                    f"{type(consumer).__name__}(job.steps(…)) counts from 0 again, and this script "
                    f"resumes after {used} batches of the loop: count with job.step_in_epoch",
                    InexactResumeWarning,
                    stacklevel=script_level(),
                )
    return -1


def loops_of(frame: FrameType | None) -> set[int]:
    """Return the ids of the frames that may have the loop over a generator that ``frame`` reads:
    of generators around it, and of the function that reads these."""
    ids = set[int]()
    while frame is not None:
        ids.add(id(frame))
        frame = frame.f_back if frame.f_code.co_flags & inspect.CO_GENERATOR else None
    return ids
