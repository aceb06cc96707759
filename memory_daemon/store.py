"""Loader of a built program's tensors into the host store, verified by digests.

A model's image in the store has the layout of its region (``programs/interface/layout.py``):
tensors at their offsets, zeros between and after them. So a layer group is one contiguous copy,
unless bytes are shared. Models share bytes of equal digests, and a client's builder writes these:
each tensor is checked (ADR 68).
"""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from pipeswitch.base.errors import RegistrationRefused
from pipeswitch.base.plain_files import open_plain
from pipeswitch.programs.graphs.bundle import read_bundle
from pipeswitch.programs.graphs.manifest_check import check_tensors
from pipeswitch.programs.interface.layout import Manifest, TensorSpec
from pipeswitch.programs.spec import load_manifest, weights_file

PIECE_BYTES: Final = 16 << 20  # size of one read, which releases the interpreter lock
_ZEROS: Final = bytes(1 << 20)


class UnusableModel(Exception):
    """Error for a directory without a complete, undamaged program; its text says what is wrong."""


class Part(NamedTuple):
    """Range of a model in the store; each tensor lies in one part."""

    offset_bytes: int  # from the start of the model's region
    view: memoryview
    is_shared: bool = False  # another model's bytes: compared, not written


def load_model(
    directory: Path, image: memoryview, parts: Sequence[Part] = (), *, fills: bool = False
) -> Manifest:
    """Fill ``image`` (the model's range of the store) from ``directory``. Blocks.

    ``parts``: where the model lies, if other models have some of its bytes. ``fills``: others load
    the same bytes, perhaps now: write only those that are missing, and only if the file is sound.

    Raises:
        UnusableModel: the program is damaged, incomplete or larger than ``image``. The image may
            be half filled, and must not be used.
    """
    try:
        manifest = load_manifest(directory)
        file_name = weights_file(manifest)
        check_tensors(manifest.tensors, manifest.total_bytes)
        if manifest.head_sha256:
            is_derived = manifest.precision is not None
            read_bundle(directory / file_name, manifest.head_sha256, is_derived=is_derived)
    except RegistrationRefused as error:
        raise UnusableModel(error.message) from None
    parts = parts or (Part(0, image),)
    size_bytes = parts[-1].offset_bytes + len(parts[-1].view)
    if manifest.total_bytes > size_bytes:
        raise UnusableModel(f"{manifest.total_bytes} bytes do not fit in a place of {size_bytes}")
    try:
        descriptor = open_plain(directory / file_name, os.O_RDONLY)
    except OSError as error:
        raise UnusableModel(f"{file_name}: {error.strerror}") from None
    try:
        left = deque(manifest.tensors)
        for first, view, is_shared in parts:
            position = 0
            while left and (start := left[0].offset_bytes - first) < len(view):
                tensor = left.popleft()
                target = view[start : start + tensor.size_bytes]
                place = f"{file_name}, {tensor.name!r}"
                if not is_shared:
                    _zero(view[position:start])
                digest = hashlib.sha256(target).hexdigest() if is_shared or fills else ""
                is_missing = digest != tensor.digest if fills else not is_shared
                if fills and is_missing:
                    _check(place, _read(descriptor, file_name, tensor), tensor.digest)
                if is_missing:
                    digest = _read(descriptor, file_name, tensor, target)
                if tensor.digest:
                    _check(place, digest, tensor.digest)
                position = start + tensor.size_bytes
            if not is_shared:
                _zero(view[position:])
    finally:
        os.close(descriptor)
    if not all(tensor.digest for tensor in manifest.tensors):  # built by an earlier release
        digest = hashlib.sha256(image[: manifest.total_bytes]).hexdigest()
        _check(file_name, digest, manifest.weights_sha256)
    return manifest


def _check(place: str, digest: str, expected: str) -> None:
    if digest != expected:
        raise UnusableModel(f"{place} is corrupt: sha256 is {digest}, the manifest says {expected}")


def _read(
    descriptor: int, file_name: str, tensor: TensorSpec, target: memoryview | None = None
) -> str:
    """Read a tensor into ``target``, if given. Return the digest of its bytes in the file."""
    size, sha256 = tensor.size_bytes, hashlib.sha256()
    scratch = memoryview(bytearray(min(size, PIECE_BYTES) if target is None else 0))
    done = 0
    while done < size:
        piece = scratch[: size - done] if target is None else target[done : done + PIECE_BYTES]
        try:
            count = os.preadv(descriptor, [piece], tensor.file_offset_bytes + done)
        except OSError as error:
            raise UnusableModel(f"{file_name}, {tensor.name!r}: {error.strerror}") from None
        if count == 0:
            raise UnusableModel(
                f"{file_name} is truncated: it ends at byte {tensor.file_offset_bytes + done}, "
                f"tensor {tensor.name!r} goes on to {tensor.file_offset_bytes + size}"
            )
        sha256.update(piece[:count])
        done += count
    return sha256.hexdigest()


def _zero(target: memoryview) -> None:
    for start in range(0, len(target), len(_ZEROS)):
        piece = target[start : start + len(_ZEROS)]
        piece[:] = _ZEROS[: len(piece)]
