"""Settings of hypothesis and of the garbage collector for unit tests."""

from __future__ import annotations

import gc
import os

from hypothesis import HealthCheck, settings

# The quick profile always tries the same examples, so that only a change of the code can fail a
# test. The deep profile (HYPOTHESIS_PROFILE=deep) finds new examples, which become named tests.
settings.register_profile(
    "quick",
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "deep", parent=settings.get_profile("quick"), max_examples=5000, derandomize=False
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))


def pytest_collection_finish() -> None:
    """Exclude torch's and test files' objects from garbage collection, to save 5 % of the time."""
    gc.freeze()
