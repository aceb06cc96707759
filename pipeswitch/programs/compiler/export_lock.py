"""Lock for exports: ``torch.export`` changes process-wide settings while it traces.

docs/adr/0017 says which settings are restored, and how other threads are affected meanwhile.
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
        "nnpack": torch._C._get_nnpack_enabled(),  # torch.backends.nnpack has no getter
        "cudnn": backends.cudnn.enabled,
    }


@contextlib.contextmanager
def one_export_at_a_time() -> Iterator[None]:
    """Hold the lock of exports in the block, and restore torch's backends at its end.

    Inside, modules of ``torch.compile`` run uncompiled, because compiled code has other last bits.
    Two traces at the same time fail, or leave mkldnn, nnpack and cudnn disabled in this process.
    During an export, other threads compute without these three: more slowly, and with other last
    bits. If that matters, hold this lock while you compute. The call blocks until the lock is free.
    Direct calls of ``torch.export`` do not wait for it.
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
    """Stream that discards text of the thread that created it, and forwards all other text."""

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
    """Disable a logger and this thread's ``sys.stderr`` for the block: torch dumps whole graphs."""
    noisy = logging.getLogger(logger_name)
    before = noisy.disabled
    noisy.disabled = True
    try:
        with contextlib.redirect_stderr(_OthersStderr(sys.stderr)):
            yield
    finally:
        noisy.disabled = before
