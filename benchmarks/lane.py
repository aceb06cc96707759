"""Host store, arena and copies between them for the baselines, without the memory daemon or torch.

Memory is mapped, and copied in pieces, as in ``devices/cpu/memory.py``. The caller decides when to
copy which range.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import numpy as np

from pipeswitch.devices.cpu.memory import CHUNK_BYTES
from pipeswitch.ipc.control_page import sealed_memfd
from pipeswitch.programs.interface.layout import Manifest
from pipeswitch.programs.spec import load_manifest, weights_file

from .trials import Numbers, now_ms

Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]


class Lane:
    """Store with one packed model, and an arena with room for it. Sizes and offsets are bytes."""

    def __init__(self, size_bytes: int) -> None:
        self._descriptors = [sealed_memfd(name, size_bytes) for name in ("store", "arena")]
        self._maps = [
            mmap.mmap(descriptor, size_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
            for descriptor in self._descriptors
        ]
        self.store, self.arena = (bytes_of(mapping) for mapping in self._maps)

    def paths(self) -> tuple[str, str]:
        """Return the paths of store and arena, for child processes, while this process lives."""
        store, arena = (f"/proc/{os.getpid()}/fd/{number}" for number in self._descriptors)
        return store, arena

    def fill(self, weights: Path, manifest: Manifest) -> None:
        """Read a model's tensors from the file ``weights`` to their places in the store."""
        view = memoryview(self._maps[0])
        fill(view, weights, manifest)
        view.release()

    def copy(self, offset_bytes: int, size_bytes: int) -> None:
        """Copy a range from the store to the arena."""
        copy_in_pieces(self.store, self.arena, offset_bytes, size_bytes)


class PlainCopy:
    """Copy between two memfds, whose time is the reference for other copies."""

    def __init__(self, size_bytes: int) -> None:
        self._source, self._target = mapping(size_bytes), mapping(size_bytes)
        self._source[:] = 1
        self._target[:] = 0

    def measure(self) -> Numbers:
        """Copy all bytes once, in pieces of the copy engine's size; return the time in ms."""
        began_ms = now_ms()
        copy_in_pieces(self._source, self._target, 0, len(self._source))
        return {"transfer_ms": now_ms() - began_ms}


def mapping(size_bytes: int) -> Bytes:
    """Return a new memfd, mapped as an array of zeros; a page is allocated at its first write."""
    descriptor = os.memfd_create("bench", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, size_bytes)
    mapped = mmap.mmap(descriptor, size_bytes)
    os.close(descriptor)
    return bytes_of(mapped)


def packed(folder: str) -> tuple[Manifest, Path]:
    """Return a packed model's manifest, and the file of its tensors."""
    manifest = load_manifest(folder)
    return manifest, Path(folder) / weights_file(manifest)


def copy_in_pieces(source: Bytes, target: Bytes, offset_bytes: int, size_bytes: int) -> None:
    """Copy a range of ``source`` to the same range of ``target``."""
    end = offset_bytes + size_bytes
    for start in range(offset_bytes, end, CHUNK_BYTES):
        stop = min(start + CHUNK_BYTES, end)
        np.copyto(target[start:stop], source[start:stop])


def fill(view: memoryview, weights: Path, manifest: Manifest) -> None:
    """Copy each tensor from the file ``weights`` to its place in a store, mapped at ``view``."""
    with weights.open("rb") as file:
        for tensor in manifest.tensors:
            file.seek(tensor.file_offset_bytes)
            file.readinto(view[tensor.offset_bytes : tensor.offset_bytes + tensor.size_bytes])


def bytes_of(mapping: mmap.mmap) -> Bytes:
    """Return a mapping as a uint8 array."""
    return np.frombuffer(mapping, dtype=np.uint8)


def open_descriptor(path: str) -> int:
    """Open a path of another process's ``Lane.paths`` for reading and writing."""
    return os.open(path, os.O_RDWR)


def open_mapping(path: str, size_bytes: int) -> mmap.mmap:
    """Open a path of another process's ``Lane.paths``, and map it for reading."""
    descriptor = open_descriptor(path)
    try:
        return mmap.mmap(descriptor, size_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    finally:
        os.close(descriptor)
