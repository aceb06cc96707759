"""Every test leaves torch and the environment as it found them: what it computes itself is compared
with what servers answer, and a server that it starts inherits the environment. It meets the
warnings that it would meet alone, whichever test was first."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest

# pytest's own, and what torch and scikit-learn set when they are imported.
KMP = {"KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK"}
MAY_CHANGE = {"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR", *KMP}


def _settings() -> Any:
    """torch's settings now; None while this process has not imported torch."""
    if "torch" not in sys.modules:
        return None
    from pipeswitch.programs.running.torch_settings import TorchSettings

    return TorchSettings.now()


def _environment() -> set[tuple[str, str]]:
    return {item for item in os.environ.items() if item[0] not in MAY_CHANGE}


def _left_as_found() -> Iterator[None]:
    before, environment = _settings(), _environment()
    if "torch" in sys.modules:
        sys.modules["torch"].set_warn_always(True)  # some it would give once in a process
    yield
    if before is not None:
        assert _settings() == before, "torch's settings are not what they were"
    changed = {name for name, _ in _environment() ^ environment}
    assert not changed, "the environment is not what it was"


@pytest.fixture(autouse=True)
def _as_found_after_a_test() -> Iterator[None]:
    yield from _left_as_found()


@pytest.fixture(autouse=True, scope="module")
def _as_found_after_a_module() -> Iterator[None]:
    """Shared fixtures too leave them as they found them."""
    yield from _left_as_found()
