"""Iterators between ``job.steps`` and the script's loop, which count from 0 in each run."""

from __future__ import annotations

import gc
import itertools
import warnings
from types import FrameType, GeneratorType
from typing import Any

from pipeswitch.job import InexactResumeWarning, script_level


def batches_left(steps: FrameType, used: int) -> int:
    """Return how many batches the script will take from a generator after ``used`` ones; -1: all.

    ``islice(job.steps(...), 80)`` takes 80, although an earlier run of the script has taken some.
    """
    if not used:
        return -1
    for one in [one for one in gc.get_objects() if type(one) is GeneratorType]:
        counting = gc.get_referrers(one) if one.gi_frame is steps else []
        for inputs in [one for one in counting if type(one) is tuple]:
            counting += [one for one in gc.get_referrers(inputs) if isinstance(one, zip)]
        for consumer in counting:
            if isinstance(consumer, itertools.islice) and hasattr(consumer, "__reduce__"):
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", DeprecationWarning)
                    state: Any = consumer.__reduce__()
                _, first, last, step = state[1]
                if (first, step) == (0, 1):
                    return -1 if last is None else max(0, last - used)
            if isinstance(consumer, (itertools.islice, enumerate, zip)):
                warnings.warn(
                    f"{type(consumer).__name__}(job.steps(…)) counts from 0 again, and this script "
                    f"resumes after {used} batches of the loop: count with job.step_in_epoch",
                    InexactResumeWarning,
                    stacklevel=script_level(),
                )
    return -1
