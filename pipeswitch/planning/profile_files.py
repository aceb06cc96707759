"""Profiles on disk: one JSON file for each profile, found by the program's digest."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..base.plain_files import read_plain
from .profile import MAX_BYTES, Profile, ProfileError, ProfileFile, decode, encode

DIGEST_CHARS = 12  # length of the digest in a file's name; the file has the whole digest


def file_name(profile: Profile) -> str:
    """Return a profile's file name, such as ``resnet152.3f2a90c1d4e5.cpu.json``."""
    device = re.sub(r"[^a-z0-9]+", "-", profile.identity.device.lower())
    return f"{profile.model}.{profile.digest[:DIGEST_CHARS]}.{device}.json"


def find(folders: Sequence[Path], digest: str) -> Iterator[ProfileFile]:
    """Yield every profile file of the program with this digest, folder by folder. Never raises."""
    for folder in folders:
        for path in sorted(folder.glob(f"*.{digest[:DIGEST_CHARS]}.*.json")):
            try:
                yield ProfileFile(path.name, decode(read_plain(path, MAX_BYTES)))
            except OSError as error:
                yield ProfileFile(path.name, None, error.strerror or str(error))
            except ProfileError as error:
                yield ProfileFile(path.name, None, str(error))


def save(folder: Path, profile: Profile) -> Path:
    """Write a profile atomically and return its path; an older file of the program is replaced.

    Raises:
        OSError: the disk is full, or the folder may not be written.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / file_name(profile)
    descriptor, temporary = tempfile.mkstemp(prefix=".profile-", dir=folder)  # mode 0600
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(encode(profile))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    return path
