"""How the unit tests are tried."""

from __future__ import annotations

import gc
import os

from hypothesis import HealthCheck, settings

# The quick profile always tries the same examples: a change is judged by what it changed. The
# deep one looks for new ones (HYPOTHESIS_PROFILE=deep); what it finds becomes a named test.
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
    """No search for a test's garbage looks at all that torch and the test files have made: that
    was a twentieth of the time."""
    gc.freeze()
