"""Fixtures of the unit tests. Helper modules are loaded here, since tests are no package."""

from __future__ import annotations

import gc
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest
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


@pytest.fixture(scope="session")
def fleet_model() -> ModuleType:
    """Random lives of the simulated world."""
    name = "pipeswitch_test_fleet_model"
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name("fleet_model.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
