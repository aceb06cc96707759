"""Source files of a script: a later life runs the files as they are then, and names edited ones."""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from .reachable import is_own
from .reports import Reports
from .script_cursor import ScriptCursor

MAX_FILES: Final = 1000
MAX_FILE_BYTES: Final = 4 << 20


class ScriptSources:
    """Digests of the script and of the modules of its project that it has imported."""

    def __init__(self, place: ScriptCursor, reports: Reports) -> None:
        self._place, self._reports = place, reports
        self._digests: Mapping[str, str] = {}  # by file, as the last commit or this life has it
        self._read: set[str] = set()  # files of this life
        self._module_count = 0  # modules when they were last searched

    def capture(self) -> Mapping[str, str]:
        """Return the digest of each file; name files that differ from those of the last commit."""
        if len(sys.modules) != self._module_count:
            self._module_count = len(sys.modules)
            now = {file: digest for file in self._new_files() if (digest := _digest(file))}
            edited = [file for file, one in now.items() if self._digests.get(file, one) != one]
            self._digests = {**self._digests, **now}
            if edited:
                names, step = ", ".join(map(os.path.basename, edited[:4])), self._place.step
                text = f"{names}: edited since step {step}, which the earlier version computed"
                self._reports.warn_once("edited", f"{text}. The job runs the edited files")
                self._reports.inexact("edited", text, step)
        return self._digests

    def restore(self, digests: Mapping[str, str]) -> None:
        """Compare with a commit's ``digests`` from the next ``capture`` on."""
        self._digests, self._module_count = digests, 0
        self._read.clear()

    def _new_files(self) -> Iterator[str]:
        roots = tuple(os.path.join(os.path.abspath(path), "") for path in sys.path)
        for name, module in [*sys.modules.items()]:
            file = getattr(module, "__dict__", {}).get("__file__")
            if not isinstance(file, str) or file in self._read or len(self._read) >= MAX_FILES:
                continue
            is_local = file.endswith(".py") and file.startswith(roots) and is_own(file)
            if is_local and not name.startswith("pipeswitch"):
                self._read.add(file)
                yield file


def _digest(file: str) -> str:
    """Return a source file's SHA-256; empty if it is missing or too large."""
    with contextlib.suppress(OSError):
        if os.path.getsize(file) <= MAX_FILE_BYTES:
            return hashlib.sha256(Path(file).read_bytes()).hexdigest()
    return ""
