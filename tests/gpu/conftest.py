"""Tests that need a CUDA device skip themselves without one; what they share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pipeswitch.devices.cuda.bindings import Cuda, NoCudaDevice
from pipeswitch.devices.cuda.examine import has_driver_library


@pytest.fixture(scope="session")
def cuda() -> Cuda:
    """The real bindings, on a machine with a GPU."""
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
    """A failed kernel fails its own test, not the next one."""
    yield
    cuda.synchronize_device()
