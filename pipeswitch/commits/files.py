"""A job's newest commit on disk: a safetensors file and a small JSON file that names it.

The data of the safetensors file is the commit's image, byte for byte: any reader of safetensors
finds the parameters in it, and resuming needs no conversion (ADR 0008).

Crash-safe by order: the image is written to a temporary name,
fsynced and renamed; only then is ``commit.json`` replaced the same way, which is the flip. The
image's name is new each time, so the image that the old ``commit.json`` names is never touched
before the flip. Images that no record names any more are removed afterwards.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from ..errors import RemoteProtocolError
from ..failpoints import reach
from ..ipc.sparse import open_plain
from ..machine import sync_directory
from .area import MAX_STEP, CommitArea, create_area
from .image import LENGTH, safetensors_head

RECORD_NAME: Final = "commit.json"
MAX_RECORD_BYTES: Final = 4096
PIECE_BYTES: Final = 4 << 20
_IMAGE: Final = re.compile(r"commit-\d+-\d+\.safetensors(\.tmp)?")
_OURS: Final = re.compile(r"commit-\d+-\d+\.safetensors(\.tmp)?|commit\.json\.tmp")


class CommitRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of ``commit.json``."""

    step: int
    size_bytes: int  # of the image: the file without its head
    sha256: str  # hex, of the whole file
    image: str  # file name beside this one


class ImageChanged(Exception):
    """The image was overwritten by newer commits while it was being written; nothing was kept."""


def write_commit(
    directory: Path,
    step: int,
    image: memoryview,
    *,
    is_still_whole: Callable[[], bool] = lambda: True,
) -> CommitRecord:
    """Make ``image`` the commit on disk; returns when it would survive a power loss. Blocks.

    ``is_still_whole`` is asked once all bytes have been read: a live image may change meanwhile.

    Raises:
        OSError: disk full, read-only, …; the commit before stays.
        ImageChanged: see there; the commit before stays.
    """
    directory.mkdir(parents=True, exist_ok=True)
    name = f"commit-{step}-{_next_generation(directory)}.safetensors"
    temporary = directory / f"{name}.tmp"
    try:
        reach("persist.image.write")
        digest = _write_synced(temporary, memoryview(safetensors_head(image)), image)
        if not is_still_whole():
            raise ImageChanged(f"step {step}")
        reach("persist.image.written")
        temporary.rename(directory / name)
        reach("persist.image.renamed")
        record = CommitRecord(step=step, size_bytes=len(image), sha256=digest, image=name)
        _write_synced(directory / f"{RECORD_NAME}.tmp", memoryview(msgspec.json.encode(record)))
        sync_directory(directory)  # the image's name must be on disk before anything names it
        reach("persist.record.written")
        (directory / f"{RECORD_NAME}.tmp").rename(directory / RECORD_NAME)
        reach("persist.record.renamed")
        sync_directory(directory)
    finally:
        remove_unnamed(directory)
    return record


def read_record(directory: Path) -> CommitRecord | None:
    """What ``commit.json`` says; None when there is none.

    Raises:
        RemoteProtocolError: it is not one of ours.
    """
    try:
        with open(directory / RECORD_NAME, "rb", opener=open_plain) as file:
            data = file.read(MAX_RECORD_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:  # a script may have put something else there
        raise RemoteProtocolError(str(error)) from None
    try:
        record = msgspec.json.decode(data, type=CommitRecord)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise RemoteProtocolError(f"{directory / RECORD_NAME}: {error}") from None
    if not _IMAGE.fullmatch(record.image):
        raise RemoteProtocolError(f"{directory / RECORD_NAME} names {record.image!r}")
    if not 0 <= record.step <= MAX_STEP or record.size_bytes < 0:
        raise RemoteProtocolError(f"{directory / RECORD_NAME} is of step {record.step}")
    return record


def load_commit(directory: Path) -> tuple[int, int, CommitRecord] | None:
    """A new commit area that holds the commit on disk: (descriptor, slot_bytes, record).

    The caller owns the descriptor. None when nothing has been persisted there.

    Raises:
        RemoteProtocolError: the files are damaged: wrong size or digest.
        OSError: unreadable, or no memory for the area.
    """
    record = read_record(directory)
    if record is None:
        return None
    slot_bytes = record.size_bytes
    path = directory / record.image
    head_bytes = _head_bytes(path, record)
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


def remove_unnamed(directory: Path) -> None:
    """Remove our files that ``commit.json`` does not name: leftovers of crashes, older images."""
    try:
        record = read_record(directory)
    except RemoteProtocolError:
        return  # a damaged record: leave the images for a person to look at
    kept = record.image if record is not None else ""
    for path in directory.iterdir():
        if _OURS.fullmatch(path.name) and path.name != kept:
            with contextlib.suppress(OSError):  # it is gone, or a script made a folder of it
                path.unlink()


def _head_bytes(path: Path, record: CommitRecord) -> int:
    """What stands in front of the image; the file must end with the image."""
    try:
        actual_bytes = path.stat().st_size
        with open(path, "rb", opener=open_plain) as file:
            start = file.read(LENGTH.size)
    except FileNotFoundError:
        raise RemoteProtocolError(f"{path} is missing") from None
    head_bytes = LENGTH.size + (LENGTH.unpack(start)[0] if len(start) == LENGTH.size else 0)
    if actual_bytes != head_bytes + record.size_bytes:
        raise RemoteProtocolError(
            f"{path} has {actual_bytes} bytes, not {head_bytes} + {record.size_bytes}"
        )
    return head_bytes


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


def _write_synced(path: Path, *parts: memoryview) -> str:
    """Write a whole file and fsync it; returns the sha256 of the bytes that were written."""
    digest = hashlib.sha256()
    with path.open("wb", buffering=0) as file:
        for part in parts:
            for start in range(0, len(part), PIECE_BYTES):
                piece = bytes(part[start : start + PIECE_BYTES])  # digest and file see the same
                digest.update(piece)
                written = 0
                while written < len(piece):
                    written += file.write(piece[written:])
        os.fsync(file.fileno())
    return digest.hexdigest()


def _next_generation(directory: Path) -> int:
    """A number no image in ``directory`` has."""
    found = [
        int(path.name.split("-")[2].split(".")[0])
        for path in directory.iterdir()
        if _IMAGE.fullmatch(path.name)
    ]
    return max(found, default=-1) + 1
