"""One export at a time: ``torch.export`` changes its whole process while it traces.

What is kept, and what a thread that computes beside it sees: docs/adr/0017.
"""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import threading
from collections.abc import Iterator
from typing import Any, Final, TextIO

import torch

logger = logging.getLogger(__name__)

_alone: Final = threading.RLock()


def _backends() -> dict[str, bool]:
    """Return the process-wide settings that ``torch.export`` switches off while it traces."""
    backends: Any = torch.backends
    return {
        "mkldnn": backends.mkldnn.enabled,
        "nnpack": torch._C._get_nnpack_enabled(),  # torch.backends.nnpack can only set it
        "cudnn": backends.cudnn.enabled,
    }


@contextlib.contextmanager
def one_export_at_a_time() -> Iterator[None]:
    """Run one export at a time, and restore torch's backends at its end.

    What ``torch.compile`` made runs as it was before: a compiled module has other last bits.
    Two traces at once fail, or leave mkldnn, nnpack and cudnn off in this process for ever. A
    thread that computes during an export does so without these: more slowly, and other in the last
    bits. Where that matters, hold this while you compute. A ``torch.export`` that the process calls
    by itself does not wait for it.
    """
    with _alone:
        before = _backends()
        try:
            with torch.compiler.set_stance("force_eager"):
                yield
        finally:
            after = _backends()
            if after != before:
                logger.warning("export changed_backends=%s put_back=%s", after, before)
                backends: Any = torch.backends
                for name, is_enabled in before.items():
                    getattr(backends, name).set_flags(is_enabled)


class _OthersStderr(io.TextIOBase):
    """``sys.stderr`` for every thread but the one that made it, whose own text goes nowhere."""

    def __init__(self, stderr: TextIO) -> None:
        self._stderr = stderr
        self._thread = threading.get_ident()

    def write(self, text: str) -> int:
        is_ours = threading.get_ident() == self._thread
        return len(text) if is_ours else self._stderr.write(text)

    def flush(self) -> None:
        self._stderr.flush()


@contextlib.contextmanager
def quiet(logger_name: str) -> Iterator[None]:
    """Pages of graph dumps beside the one error we raise do not help its reader."""
    noisy = logging.getLogger(logger_name)
    before = noisy.disabled
    noisy.disabled = True
    try:
        with contextlib.redirect_stderr(_OthersStderr(sys.stderr)):
            yield
    finally:
        noisy.disabled = before
