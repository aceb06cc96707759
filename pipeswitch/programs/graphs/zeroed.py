"""Zeroed memory for operators whose kernels might not write all of their results.

A new tensor is uninitialised heap memory, which may contain bytes of another request. Torch zeroes
it first for the operators in ``operators.ZEROED``. ADR 19 says why not for all operators.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch

log = logging.getLogger(__name__)

SWITCH: Final = "FLAGS_caffe2_cpu_allocator_do_zero_fill"  # True: libc10 zeroes cpu memory


def on_zeros(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``call`` wrapped so that all memory it allocates on the cpu is zeroed first."""
    switch = allocator_switch()
    if switch is None:
        return call

    def stand_in(*args: Any, **kwargs: Any) -> Any:
        switch.value = True
        try:
            return call(*args, **kwargs)
        finally:
            switch.value = False

    return stand_in


@functools.cache
def allocator_switch() -> ctypes.c_bool | None:
    """Return the allocator's switch, or None; torch has no function that sets it.

    The first call opens a library. The switch may be set at any time.
    """
    library = Path(torch.__file__).parent / "lib" / "libc10.so"
    try:
        return ctypes.c_bool.in_dll(ctypes.CDLL(str(library)), SWITCH)
    except (OSError, ValueError) as error:
        log.warning("zeroed memory=none cause=%s: contracts alone say what is written", error)
        return None
