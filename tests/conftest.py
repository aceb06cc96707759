"""Every test leaves torch as it found it: servers' answers are compared with this process's own."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest


def _settings() -> Any:
    """torch's settings now; None while this process has not imported torch."""
    if "torch" not in sys.modules:
        return None
    from pipeswitch.programs.torch_settings import TorchSettings

    return TorchSettings.now()


def _left_as_found() -> Iterator[None]:
    before = _settings()
    yield
    if before is not None:
        assert _settings() == before, "torch's settings are not what they were"


@pytest.fixture(autouse=True)
def _torch_after_a_test() -> Iterator[None]:
    yield from _left_as_found()


@pytest.fixture(autouse=True, scope="module")
def _torch_after_a_module() -> Iterator[None]:
    """Shared fixtures too leave torch as they found it."""
    yield from _left_as_found()
