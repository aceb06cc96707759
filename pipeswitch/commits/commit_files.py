"""A job's newest commit on disk: a safetensors file and a small JSON file that names it.

The data of the safetensors file is the commit's image, byte for byte. So any reader of safetensors
finds the parameters in it, and resuming needs no conversion (ADR 0008).

A crash leaves a complete commit. The image is written to a temporary file, synced and renamed; only
then ``commit.json`` is replaced in the same way. Each image has a new name, so the image that the
old ``commit.json`` names is intact until then.

The previous commit stays until the next one is written; a job resumes from it if the newest one is
damaged. An image's name has its step and digest, so it can be used without its record.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from ..base.codec import UNREADABLE
from ..base.errors import RemoteProtocolError
from ..base.failpoints import reach
from ..base.machine import available_bytes, sync_directory
from ..base.plain_files import NotPlain, open_plain
from ..ipc.sparse import BLOCK_BYTES
from .area import MAX_STEP, CommitArea, create_area
from .image import LENGTH, safetensors_head

RECORD_NAME: Final = "commit.json"
MAX_RECORD_BYTES: Final = 4096
PIECE_BYTES: Final = 4 << 20
_IMAGE: Final = re.compile(r"commit-(\d+)-(\d+)(?:-([0-9a-f]{64}))?\.safetensors(\.tmp|\.damaged)?")
_OURS: Final = re.compile(rf"{_IMAGE.pattern}|commit\.json\.tmp")


class CommitRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of ``commit.json``."""

    step: int
    size_bytes: int  # size of the image, which is the file without its head
    sha256: str  # digest of the whole file, in hex
    image: str  # name of the image's file in the same folder


class ImageChanged(Exception):
    """Error of ``write_commit``: newer commits overwrote the image before it was on disk."""


def write_commit(
    directory: Path,
    step: int,
    image: memoryview,
    *,
    is_still_whole: Callable[[], bool] = lambda: True,
    is_lasting: bool = True,
) -> CommitRecord:
    """Make ``image`` the commit on disk; return when it would survive a power loss. Blocks.

    ``is_still_whole``: called after all bytes were read; returns False if they changed meanwhile.
    ``is_lasting``: False if it need not survive a power loss; then the image is not synced.

    Raises:
        OSError: the disk is full, read-only, …; the previous commit is unchanged.
        ImageChanged: the image has changed; the previous commit is unchanged.
    """
    directory.mkdir(parents=True, exist_ok=True)
    remove_unnamed(directory, keeps_older=False)  # never more than two images at a time
    stem = f"commit-{step}-{_next_number(directory)}"
    temporary = directory / f"{stem}.safetensors.tmp"
    try:
        reach("persist.image.write")
        parts = memoryview(safetensors_head(image)), image
        digest = _write_synced(temporary, *parts, is_lasting=is_lasting)
        if not is_still_whole():
            raise ImageChanged(f"step {step}")
        reach("persist.image.written")
        name = f"{stem}-{digest}.safetensors"
        temporary.rename(directory / name)
        reach("persist.image.renamed")
        record = CommitRecord(step=step, size_bytes=len(image), sha256=digest, image=name)
        _write_synced(directory / f"{RECORD_NAME}.tmp", memoryview(msgspec.json.encode(record)))
        sync_directory(directory)  # the image's name must be on disk before the record names it
        reach("persist.record.written")
        (directory / f"{RECORD_NAME}.tmp").rename(directory / RECORD_NAME)
        reach("persist.record.renamed")
        sync_directory(directory)
    finally:
        remove_unnamed(directory)
    return record


def read_record(directory: Path) -> CommitRecord | None:
    """Return the record in ``commit.json``, or None if there is no commit.

    If the file is damaged or missing, make the record from the name of the newest image.

    Raises:
        RemoteProtocolError: the record is invalid, and no image's name has a step and a digest.
    """
    try:
        record = _read_record(directory)
        if record is not None and (directory / record.image).exists():
            return record
    except RemoteProtocolError:
        if named := _named_images(directory):
            return named[0]
        raise
    return next(iter(_named_images(directory)), record)


def _named_images(directory: Path) -> list[CommitRecord]:
    """Return the commits whose image has its digest in its name, the newest first."""
    records = []
    for path in directory.iterdir() if directory.is_dir() else ():
        match = _IMAGE.fullmatch(path.name)
        if match is not None and match[3] and not match[4] and int(match[1]) <= MAX_STEP:
            with contextlib.suppress(OSError, RemoteProtocolError):
                size_bytes = path.stat().st_size - _head_bytes(path)
                record = CommitRecord(
                    step=int(match[1]), size_bytes=size_bytes, sha256=match[3], image=path.name
                )
                if size_bytes >= 0:
                    records.append((int(match[2]), record))
    return [record for _, record in sorted(records, key=lambda one: -one[0])]


def _read_record(directory: Path) -> CommitRecord | None:
    try:
        with open(directory / RECORD_NAME, "rb", opener=open_plain) as file:
            data = file.read(MAX_RECORD_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:  # a script may have replaced the file
        raise RemoteProtocolError(str(error)) from None
    try:
        record = msgspec.json.decode(data, type=CommitRecord)
    except UNREADABLE as error:
        raise RemoteProtocolError(f"{directory / RECORD_NAME}: {error}") from None
    match = _IMAGE.fullmatch(record.image)
    if not match:
        raise RemoteProtocolError(f"{directory / RECORD_NAME} names {record.image!r}")
    if match[3] and (match[1], match[3]) != (str(record.step), record.sha256):
        raise RemoteProtocolError(f"{directory / RECORD_NAME} does not match its image")
    if not 0 <= record.step <= MAX_STEP or record.size_bytes < 0:
        raise RemoteProtocolError(f"{directory / RECORD_NAME} is of step {record.step}")
    return record


def load_commit(
    directory: Path, damaged: Callable[[str], None] | None = None
) -> tuple[int, int, CommitRecord] | None:
    """Create a commit area with the commit on disk; return (descriptor, slot_bytes, record).

    The caller owns the descriptor. Return None if there is no commit on disk.

    Args:
        damaged: called with a description of each damaged commit; the previous commit is then used.
            Without it, damage raises.

    Raises:
        RemoteProtocolError: the files are damaged: wrong size or digest.
        OSError: a file cannot be read, or there is no memory for the area.
    """
    newest = read_record(directory)
    if newest is None:
        return None
    records = [newest]
    if damaged is not None:
        with contextlib.suppress(RemoteProtocolError):
            records = [_read_record(directory) or newest]
        records += [one for one in (newest, *_named_images(directory)) if one not in records]
    problems: dict[str, RemoteProtocolError] = {}  # by image
    for record in records:
        try:
            loaded = _load(directory, record)
        except RemoteProtocolError as error:
            problems.setdefault(record.image, error)
            continue
        problems.pop(record.image, None)  # this image is undamaged; only a record of it was wrong
        if damaged is not None:
            for image, problem in problems.items():
                damaged(problem.message)
                with contextlib.suppress(OSError):  # else the next write would keep it alone
                    (directory / image).rename(directory / f"{image}.damaged")
        return loaded
    raise next(iter(problems.values()))


def _load(directory: Path, record: CommitRecord) -> tuple[int, int, CommitRecord]:
    slot_bytes = record.size_bytes
    path = directory / record.image
    head_bytes, facts = _head_bytes(path), path.stat()
    if facts.st_size != head_bytes + record.size_bytes:
        raise RemoteProtocolError(
            f"{path} has {facts.st_size} bytes, not {head_bytes} + {record.size_bytes}"
        )
    if slot_bytes > available_bytes():
        if facts.st_blocks * BLOCK_BYTES < slot_bytes:  # its holes would become memory
            raise RemoteProtocolError(f"{path} has a hole")
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM), str(path))
    descriptor = create_area(slot_bytes)
    try:
        area = CommitArea(descriptor, slot_bytes, is_writer=True)
        try:
            area.write(
                record.step,
                record.size_bytes,
                lambda view: _read_into(path, head_bytes, view, record),
            )
        finally:
            area.close()
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, slot_bytes, record


def remove_unnamed(directory: Path, *, keeps_older: bool = True) -> None:
    """Remove leftovers and old images; keep the newest image and, if ``keeps_older``, one more."""
    try:
        record = read_record(directory)
    except RemoteProtocolError:
        return  # the record is damaged: keep the images, so that a person can examine them
    if record is not None and not (directory / record.image).exists():
        return  # the record names an image that is not here
    named = {record.image} if record is not None else set()
    if record is not None and keeps_older:
        images = [*map(_IMAGE.fullmatch, (path.name for path in directory.iterdir()))]
        numbers = {int(one[2]): one[0] for one in images if one is not None and not one[4]}
        newest = next((number for number, name in numbers.items() if name == record.image), -1)
        named.add(numbers.get(max((n for n in numbers if n < newest), default=-1), ""))
    for path in directory.iterdir() if directory.is_dir() else ():
        if _OURS.fullmatch(path.name) and path.name not in named:
            with contextlib.suppress(OSError):  # it is gone, or a script has made it a folder
                path.unlink()


def _head_bytes(path: Path) -> int:
    """Return the size of a file's head, which is before the image."""
    try:
        with open(path, "rb", opener=open_plain) as file:
            start = file.read(LENGTH.size)
    except FileNotFoundError:
        raise RemoteProtocolError(f"{path} is missing") from None
    except NotPlain as error:
        raise RemoteProtocolError(f"{path}: {error.strerror}") from None
    return LENGTH.size + (LENGTH.unpack(start)[0] if len(start) == LENGTH.size else 0)


def _read_into(path: Path, head_bytes: int, image: memoryview, record: CommitRecord) -> None:
    digest = hashlib.sha256()
    position = 0
    with open(path, "rb", buffering=0, opener=open_plain) as file:
        digest.update(file.read(head_bytes))
        while position < len(image):
            count = file.readinto(image[position : position + PIECE_BYTES])
            if not count:
                raise RemoteProtocolError(f"{path} ended at byte {position} of the image")
            digest.update(image[position : position + count])
            position += count
    if digest.hexdigest() != record.sha256:
        raise RemoteProtocolError(f"{path} does not match its digest")


def _write_synced(path: Path, *parts: memoryview, is_lasting: bool = True) -> str:
    """Write a file and sync it if it must last; return the SHA-256 of the written bytes, in hex."""
    digest = hashlib.sha256()
    with open(path, "wb", buffering=0, opener=open_plain) as file:
        for part in parts:
            for start in range(0, len(part), PIECE_BYTES):
                piece = bytes(part[start : start + PIECE_BYTES])  # a copy, as the image may change
                digest.update(piece)
                written = 0
                while written < len(piece):
                    written += file.write(piece[written:])
        if is_lasting:
            os.fsync(file.fileno())
    return digest.hexdigest()


def _next_number(directory: Path) -> int:
    numbers = [
        int(match[2])
        for path in directory.iterdir()
        if (match := _IMAGE.fullmatch(path.name)) is not None
    ]
    return max(numbers, default=-1) + 1
