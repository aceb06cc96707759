"""Caches of model hubs, separate for the owner and for clients.

The owner's ``pretrained`` downloads stay in the caches of the server's user. A client's downloads
use no token of the owner, go to the folder of the client's build, are limited while they run, and
are deleted with the build. Otherwise clients could fill the owner's disk, or get models that only
the owner may have.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

FOLDER: Final = "hub"  # name of the hub folder inside a build's folder
LOOK_EVERY_S: Final = 0.1
_TOKENS: Final = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
_CACHES: Final = (
    "HF_HUB_CACHE",
    "HUGGINGFACE_HUB_CACHE",
    "HF_XET_CACHE",
    "HF_ASSETS_CACHE",
    "TRANSFORMERS_CACHE",
    "PYTORCH_TRANSFORMERS_CACHE",
)


def readable(source: str) -> list[Path]:
    """Return the host paths that a confined build of this source may read.

    This is the hub cache, but not the token file next to it, or the folder that the owner named.
    """
    scheme, _, name = source.partition(":")
    if scheme != "hf":
        return []
    if os.path.isabs(name):
        return [Path(name.partition("#")[0])]
    environ = os.environ
    home = environ.get("HF_HOME") or f"{environ.get('XDG_CACHE_HOME') or '~/.cache'}/huggingface"
    cache = environ.get("HF_HUB_CACHE") or environ.get("HUGGINGFACE_HUB_CACHE") or f"{home}/hub"
    return [Path(os.path.expanduser(cache))]


def without_token(work: Path) -> None:
    """Hide the token from the hub's library, so that it does not try to read it.

    Call this before the library is imported.
    """
    for name in _TOKENS:
        os.environ.pop(name, None)
    os.environ["HF_TOKEN_PATH"] = str(work / "no-token")


def of_its_own(work: Path) -> Path:
    """Make this process use a new hub folder in ``work`` and no token; return the folder."""
    without_token(work)
    for name in _CACHES:
        os.environ.pop(name, None)
    folder = work / FOLDER
    os.environ["HF_HOME"] = os.environ["TORCH_HOME"] = str(folder)
    return folder


class Meter:
    """Thread that measures the bytes of a folder every ``LOOK_EVERY_S`` seconds until closed."""

    def __init__(self, folder: Path, limit_bytes: int, on_over: Callable[[int], None]) -> None:
        """Start; the thread calls ``on_over(bytes)`` once if the bytes exceed the limit."""
        self._folder = folder
        self._limit_bytes = limit_bytes
        self._on_over = on_over
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hub meter", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._is_closed.wait(LOOK_EVERY_S):
            held_bytes = folder_bytes(self._folder)
            if held_bytes > self._limit_bytes:
                self._on_over(held_bytes)
                return

    def close(self) -> None:
        self._is_closed.set()
        self._thread.join()


def folder_bytes(folder: Path) -> int:
    """Return the bytes of a folder's files; a link counts as itself, not as its target."""
    total_bytes = 0
    for path, _, names in os.walk(folder):
        for name in names:
            try:
                total_bytes += os.lstat(os.path.join(path, name)).st_size
            except FileNotFoundError:  # the file was renamed meanwhile
                continue
    return total_bytes
