"""Fixtures of the tests that need a CUDA device. Without one the tests are skipped."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pipeswitch.devices.cuda.bindings import Cuda, NoCudaDevice
from pipeswitch.devices.cuda.examine import has_driver_library


@pytest.fixture(scope="session")
def cuda() -> Cuda:
    """Return the real bindings; skip the test on a machine without a GPU."""
    if not has_driver_library():
        pytest.skip("no NVIDIA driver")
    bindings = Cuda.load()
    try:
        bindings.device_count()
    except NoCudaDevice as error:
        pytest.skip(error.message)
    bindings.set_device(0)
    return bindings


@pytest.fixture(autouse=True)
def _settled(cuda: Cuda) -> Iterator[None]:
    """Synchronise after each test, so that a failed kernel fails its own test."""
    yield
    cuda.synchronize_device()
