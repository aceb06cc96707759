"""Checks that the content of weights and program files matches their names. Pure, no torch."""

from __future__ import annotations

import json
import os
import zipfile
from typing import Final

from ...base.errors import RegistrationRefused

AGAIN: Final = "copy or download the file again"
_LENGTH_BYTES: Final = 8  # a safetensors file begins with its header's length
_MAX_HEADER_BYTES: Final = 100 << 20  # limit of the safetensors format
_BEGINNINGS: Final = (
    (
        b"version https://git-lfs",
        "it is a Git LFS pointer of a few lines, not the file that it stands for",
        "git lfs pull, in the folder that was cloned",
    ),
    (b"<!doctype", "it is a web page, not a file of tensors", "download the file itself"),
    (b"<html", "it is a web page, not a file of tensors", "download the file itself"),
    (b"\x1f\x8b", "it is compressed by gzip", "unpack it first: gunzip, or tar -xzf"),
)


def check_file(path: str | os.PathLike[str], part: str) -> None:
    """Refuse a file that is empty, cut short, or of another format.

    Raises:
        RegistrationRefused: the file is unusable; the error says why.
        OSError: the file cannot be read.
    """
    with open(path, "rb") as file:
        head = file.read(64)
        size_bytes = os.fstat(file.fileno()).st_size
    if not head:
        raise RegistrationRefused(part, "it is empty (0 bytes)", hint=AGAIN)
    for beginning, reason, hint in _BEGINNINGS:
        if head.lower().startswith(beginning):
            raise RegistrationRefused(part, reason, hint=hint)
    if os.fspath(path).endswith((".safetensors", ".bundle")):
        if not head.startswith(b"PK"):
            _check_safetensors(path, part, size_bytes)
            return
        raise RegistrationRefused(
            part, "it was written by torch.save, not as safetensors", hint="name it FILE.pt"
        )
    if head.startswith(b"PK") and not zipfile.is_zipfile(path):
        raise RegistrationRefused(
            part, f"it is cut short at {size_bytes} bytes: its end is missing", hint=AGAIN
        )


def _check_safetensors(path: str | os.PathLike[str], part: str, size_bytes: int) -> None:
    with open(path, "rb") as file:
        header_bytes = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if header_bytes > _MAX_HEADER_BYTES:
            raise RegistrationRefused(
                part, "it is not a safetensors file", hint="save_file(module.state_dict(), FILE)"
            )
        text = file.read(header_bytes)
    try:
        rows = json.loads(text) if len(text) == header_bytes else {}
        ends = [row["data_offsets"][1] for name, row in rows.items() if name != "__metadata__"]
        needed_bytes = _LENGTH_BYTES + header_bytes + max(ends, default=0)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError):
        return  # the safetensors reader raises an error that says what is wrong
    if size_bytes < needed_bytes:
        raise RegistrationRefused(
            part, f"it is cut short: {size_bytes} of {needed_bytes} bytes are there", hint=AGAIN
        )


def holds_program(path: str | os.PathLike[str]) -> bool:
    """Return whether a file of torch contains a TorchScript program, not only weights."""
    try:
        with zipfile.ZipFile(path) as archive:
            return any(name.endswith("/constants.pkl") for name in archive.namelist())
    except (OSError, zipfile.BadZipFile):
        return False
