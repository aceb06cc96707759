"""Files of planned groups on disk, found by the program's digest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from ..base.plain_files import read_plain, write_whole
from .planned_groups import DIGEST_CHARS, MAX_BYTES, PlannedError, PlannedFile, decode


def find(folders: Sequence[Path], digest: str) -> Iterator[PlannedFile]:
    """Yield every file of the program with this digest, folder by folder. Never raises."""
    for folder in folders:
        for path in sorted(folder.glob(f"*.{digest[:DIGEST_CHARS]}.*.json")):
            try:
                yield PlannedFile(path.name, decode(read_plain(path, MAX_BYTES)))
            except OSError as error:
                yield PlannedFile(path.name, None, error.strerror or str(error))
            except PlannedError as error:
                yield PlannedFile(path.name, None, str(error))


def save(folder: Path, name: str, document: bytes) -> None:
    """Write a file atomically, indented for people; an older file of this name is replaced.

    Raises:
        OSError: the disk is full, or the folder may not be written.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_whole(folder / name, msgspec.json.format(document, indent=1) + b"\n")
