"""Files of a script: ``job.open`` cuts them back; a file that a later life has emptied is named.

A later life runs the script again from its top. Until it reaches the last commit, its writes are
dropped, because the files have them. Then the files are cut back to their lengths at this commit.
Source files are run as they are then; edited ones are named.
"""

from __future__ import annotations

import builtins
import contextlib
import hashlib
import io
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, TextIO
from weakref import WeakSet

from pipeswitch.base.errors import InvalidInput
from pipeswitch.base.plain_files import read_plain

from .reachable import is_own
from .reports import Reports
from .script_cursor import ScriptCursor

SUFFIX: Final = ".files"
MAX_FILES: Final = 64  # each costs a system call at each step
MAX_RECORD_BYTES: Final = 1 << 20
MAX_SOURCES: Final = 1000
MAX_SOURCE_BYTES: Final = 4 << 20
_open: Final = io.open


class ScriptFiles:
    """Files of one life of a script.

    Args:
        record: file with the lengths that the files had before the job opened them; None: none.
    """

    def __init__(self, record: Path | None, place: ScriptCursor, reports: Reports) -> None:
        self._record, self._place, self._reports = record, place, reports
        self._first: dict[str, int] = {}
        if record is not None:
            with contextlib.suppress(OSError, ValueError):  # missing or damaged: rows may repeat
                self._first = json.loads(read_plain(record, MAX_RECORD_BYTES))
        self._known = set(self._first)
        self._texts: WeakSet[TextIO] = WeakSet()
        self._emptied: dict[str, int] = {}  # file that the script emptied -> its size before
        if self._is_replay():
            builtins.open = io.open = self._watched
        else:
            _cut(self._first)

    def _is_replay(self) -> bool:
        return self._place.saved is not None

    def open(self, file: str | os.PathLike[str]) -> TextIO:
        """See ``pipeswitch.job.open``."""
        path = os.path.realpath(file)
        if path not in self._known and len(self._known) >= MAX_FILES:
            raise InvalidInput(f"job.open: {file} is one more than {MAX_FILES} files")
        text = io.TextIOWrapper(io.BufferedWriter(_File(path, self._is_replay)), encoding="utf-8")
        if path not in self._first and not self._is_replay():
            self._first[path] = _size(path)
            if self._record is not None:
                new = self._record.with_suffix(f"{SUFFIX}.new")  # a kill leaves one of them whole
                new.write_text(json.dumps(self._first))
                new.replace(self._record)
        self._known.add(path)
        self._texts.add(text)
        return text

    def capture(self) -> dict[str, int]:
        """Return the lengths of all files that the job has opened, with all text written so far."""
        for text in self._texts:
            if not text.closed:
                text.flush()
        return {path: _size(path) for path in self._known}

    def restore(self, lengths: Mapping[str, int]) -> None:
        """Cut the files back to a commit's ``lengths``, and name those that have lost text."""
        self.capture()  # drops the text that was written again
        self.close()
        lengths = {**self._first, **lengths}
        self._known |= lengths.keys()
        _cut(lengths)
        before = {**self._emptied, **lengths}
        if shorter := [
            os.path.basename(path) for path, size in before.items() if _size(path) < size
        ]:
            text = f"{', '.join(shorter[:4])}: emptied since the last commit, so text is lost"
            self._reports.warn_once("files", f"{text}. Append to logs with job.open(name)")
            self._reports.inexact("files", text, self._place.step)

    def close(self) -> None:
        """Stop the watch of the script's own calls of ``open``."""
        builtins.open = io.open = _open

    def _watched(self, file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
        if "w" in mode and not isinstance(file, int):
            path = os.path.realpath(os.fsdecode(file))
            self._emptied.setdefault(path, _size(path))
        return _open(file, mode, *args, **options)


class _File(io.FileIO):
    """File whose writes are dropped until the script has reached the last commit."""

    def __init__(self, path: str, is_replay: Callable[[], bool]) -> None:
        super().__init__(path, "a")
        self._is_replay = is_replay

    def write(self, data: Any) -> int:
        return memoryview(data).nbytes if self._is_replay() else super().write(data)


def _size(path: str) -> int:
    """Return a file's size in bytes; 0 if it is missing."""
    with contextlib.suppress(OSError):
        return os.path.getsize(path)
    return 0


def _cut(lengths: Mapping[str, int]) -> None:
    for path, length in lengths.items():
        if _size(path) > length:
            os.truncate(path, length)


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
            if not isinstance(file, str) or file in self._read or len(self._read) >= MAX_SOURCES:
                continue
            is_local = file.endswith(".py") and file.startswith(roots) and is_own(file)
            if is_local and not name.startswith("pipeswitch"):
                self._read.add(file)
                yield file


def _digest(file: str) -> str:
    """Return a source file's SHA-256; empty if it is missing or too large."""
    with contextlib.suppress(OSError):
        if os.path.getsize(file) <= MAX_SOURCE_BYTES:
            return hashlib.sha256(Path(file).read_bytes()).hexdigest()
    return ""
