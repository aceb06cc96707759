"""Weights and bundles that clients send in chunks: hashed, written and named by their digest.

One writer thread does all file work, so that a slow disk never blocks the poll loop. A file is
visible under its sha256 only when every byte arrived, matched and was fsynced. Nothing here is
parsed: what the bytes mean is the builder's business.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from ..errors import InvalidInput, PipeSwitchError, QueueFull
from ..failpoints import reach
from ..lane import Lane
from ..machine import sync_directory
from ..roles import ANYONE
from ..wire.frames import CHUNK_BYTES, RequestHeader
from .admission import Body, tenant_of
from .disk import PARTIAL, Disk
from .permissions import DIGEST

_logger = logging.getLogger(__name__)

CREDIT_CHUNKS: Final = 4  # unanswered chunks a client may have: 16 MiB of our memory
MAX_QUEUED_CHUNKS: Final = 64  # of all clients together: 256 MiB
MAX_PARTIALS: Final = 64  # unfinished files of all clients: each holds a descriptor
MAX_PARTIALS_PER_CLIENT: Final = 16
MAX_FILES: Final = 1024  # of all clients, whole ones: the oldest go
MAX_FILES_PER_CLIENT: Final = 256  # of one, before its own oldest go
KEPT_UPLOADS: Final = 4  # all files together are at most so many of the largest allowed
MIN_FREE_SHARE: Final = 0.02  # of the disk: commits, journal and logs need it more
MIN_FREE_BYTES: Final = 256 << 20  # enough for them, however large the disk is
KEEP_S: Final = 24 * 3600.0  # an upload that was not touched for a day is removed at the next start
KINDS: Final = ("bundle", "safetensors")  # the file's suffix: how the builder reads it

Reply = Callable[[dict[str, Any], PipeSwitchError | None], None]
"""Called on the writer thread: the answer to one chunk."""


_Key = tuple[str, str, str]
"""Session, client and file name. A client is a key's or token's name, with all its sessions; one
without is its session. The gateway's one session has many clients."""


@dataclass
class _Partial:
    """A file that is being received. Owned by the writer thread."""

    path: Path
    size_bytes: int
    file: Any
    written_bytes: int = 0
    hash: Any = field(default_factory=hashlib.sha256)


@dataclass(frozen=True)
class _Chunk:
    key: _Key
    digest: str
    size_bytes: int
    offset_bytes: int
    data: Any  # a buffer that keeps its memory alive
    reply: Reply
    tenant: str  # whose share of the disk it takes


def _remove(paths: Sequence[Path]) -> None:
    """What the disk does not give back now, the next start sweeps."""
    for path in paths:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                path.unlink()


class Uploads:
    """The upload folder. ``offer`` and ``forget`` belong to the loop and never block."""

    def __init__(self, directory: Path, max_upload_bytes: int, disk: Disk) -> None:
        self.directory = directory
        self._disk = disk
        self._max_upload_bytes = max_upload_bytes
        self._queued = 0  # chunks handed over and not answered; counted under the lock
        self._lock = threading.Lock()
        self._partials: dict[_Key, _Partial] = {}
        self._files: dict[str, deque[Path]] = {}  # by client, whole ones, the oldest first
        self._writer = Lane("pipeswitch-uploads")

    def start(self) -> None:
        """Make the folder, drop what is half written or old, start the writer."""
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        horizon = time.time() - KEEP_S  # wall clock: file times are
        for path in self.directory.iterdir():
            if path.name.startswith(PARTIAL) or path.stat().st_mtime < horizon:
                path.unlink(missing_ok=True)
        self._writer.start()

    def stop(self) -> None:
        """Finish what is queued, drop partial files, join the writer."""
        self._writer.put(self._drop_all)
        self._writer.stop()

    def offer(
        self, session: str, header: RequestHeader, data: Any, reply: Reply, *, tenant: str
    ) -> None:
        """Take one ``put`` message; ``reply`` is called exactly once, later or now.

        Raises:
            InvalidInput: a field is wrong.
            PermissionDenied: it is for another client, and ``tenant`` is not the owner.
            QueueFull: too many chunks wait for the disk; safe to send again.
        """
        body = Body("put", header.body)
        digest, kind = body.text("digest"), body.text("kind", "bundle")
        size, offset = body.count("size_bytes"), body.count("offset_bytes", 0)
        tenant = tenant_of(body, tenant)
        body.done()
        if not DIGEST.fullmatch(digest):
            raise InvalidInput("put: digest must be a sha256 in hexadecimal")
        if kind not in KINDS:
            raise InvalidInput(f"put: kind is one of {', '.join(KINDS)}")
        if size > self._max_upload_bytes:
            raise InvalidInput(
                f"a file of {size} bytes is over the limit of {self._max_upload_bytes}",
                hint="raise [server] max_upload",
            )
        if len(data) > CHUNK_BYTES or offset + len(data) > size:
            raise InvalidInput(
                f"put: a chunk has at most {CHUNK_BYTES} bytes and ends within the file"
            )
        with self._lock:
            if self._queued >= MAX_QUEUED_CHUNKS:
                raise QueueFull(f"{self._queued} upload chunks already wait for the disk")
            self._queued += 1
        key = (session, session if tenant in ("", ANYONE) else tenant, f"{digest}.{kind}")
        chunk = _Chunk(key, digest, size, offset, data, reply, tenant)
        self._writer.put(functools.partial(self._answer, chunk))

    def remove(self, paths: Sequence[Path]) -> None:
        """Files and folders that are of no use any more."""
        if paths:
            self._writer.put(functools.partial(_remove, tuple(paths)))

    def forget(self, session: str) -> None:
        """The client is gone: its partial files are removed."""
        self._writer.put(functools.partial(self._drop_all, session))

    # ---- writer thread -----------------------------------------------------------------------

    def _drop_all(self, session: str | None = None) -> None:
        """The partial files of one client, or of all."""
        for key in [key for key in self._partials if session in (None, key[0])]:
            self._drop(key)
        if session is not None:
            self._files.pop(session, None)

    def _answer(self, chunk: _Chunk) -> None:
        body: dict[str, Any] = {}
        error: PipeSwitchError | None = None
        try:
            body = self._take(chunk)
        except PipeSwitchError as refused:
            self._drop(chunk.key)
            error = refused
        except OSError as failed:  # disk full, read-only: this upload fails, the server lives
            _logger.warning("upload=%s failed cause=%s", chunk.digest[:12], failed)
            self._drop(chunk.key)
            error = PipeSwitchError(
                f"the server could not store the upload: {failed.strerror}",
                hint="free space in its state directory",
            )
        except Exception:  # a bug of ours; the writer has others to serve
            _logger.exception("upload=%s failed", chunk.digest[:12])
            self._drop(chunk.key)
            error = PipeSwitchError(
                "the server could not store the upload: internal error", hint="see its log"
            )
        with self._lock:
            self._queued -= 1
        chunk.reply(body, error)

    def _take(self, chunk: _Chunk) -> dict[str, Any]:
        """Append one chunk; the reply says how far the file is.

        1. The whole file is there already: nothing to send.
        2. Offset 0 opens (or opens anew) a partial file.
        3. Any other offset must continue where the file stands: chunks come in order.
        4. The last byte: compare the digest, fsync, rename.
        """
        digest = chunk.digest
        final = self.directory / chunk.key[-1]
        if final.is_file():
            self._drop(chunk.key)
            os.utime(final)
            return self._progress(chunk.size_bytes, is_complete=True)
        if chunk.offset_bytes == 0:
            self._drop(chunk.key)
            if len(self._partials) >= MAX_PARTIALS:
                raise QueueFull(f"{len(self._partials)} uploads are unfinished already")
            if sum(key[1] == chunk.key[1] for key in self._partials) >= MAX_PARTIALS_PER_CLIENT:
                raise QueueFull(f"{MAX_PARTIALS_PER_CLIENT} uploads of this client are unfinished")
            self._open(chunk)
        partial = self._partials.get(chunk.key)
        if partial is None or partial.written_bytes != chunk.offset_bytes:
            at = partial.written_bytes if partial else 0
            raise InvalidInput(f"put: chunk at {chunk.offset_bytes}, the file stands at {at}")
        reach("upload.write")
        partial.file.write(chunk.data)
        partial.file.flush()  # a full disk is this chunk's error
        partial.hash.update(chunk.data)
        partial.written_bytes += len(chunk.data)
        if partial.written_bytes < partial.size_bytes:
            return self._progress(partial.written_bytes, is_complete=False)
        if partial.hash.hexdigest() != digest:
            raise InvalidInput(
                f"the upload's digest is {partial.hash.hexdigest()[:12]}…, not {digest[:12]}…"
            )
        self._publish(chunk.key, final, chunk.tenant)
        return self._progress(chunk.size_bytes, is_complete=True)

    @staticmethod
    def _progress(offset_bytes: int, is_complete: bool) -> dict[str, Any]:
        return {"offset_bytes": offset_bytes, "complete": is_complete, "credit": CREDIT_CHUNKS}

    def _open(self, chunk: _Chunk) -> None:
        self._make_room(chunk.size_bytes, chunk.tenant)
        session, client, name = chunk.key
        path = self.directory / f"{PARTIAL}{session}-{client}-{name}"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        file = os.fdopen(descriptor, "wb")
        self._partials[chunk.key] = _Partial(path, chunk.size_bytes, file)
        os.ftruncate(descriptor, chunk.size_bytes)  # it counts as what it is going to be
        self._disk.keep_upload(path.name, chunk.tenant)

    def _make_room(self, size_bytes: int, tenant: str) -> None:
        """For one more file of this size: those that no registration named for longest go.

        Raises:
            QueueFull: unfinished ones have taken all of it.
            HostStoreFull: the server's disk, or this tenant's share of it, has no room.
            PipeSwitchError: the disk has none.
        """
        limit_bytes = KEPT_UPLOADS * self._max_upload_bytes
        promised_bytes = size_bytes + sum(p.size_bytes for p in self._partials.values())
        unwritten_bytes = promised_bytes - sum(p.written_bytes for p in self._partials.values())
        if promised_bytes > limit_bytes:
            raise QueueFull(f"unfinished uploads have {limit_bytes} bytes between them")

        def has_room() -> bool:
            disk = shutil.disk_usage(self.directory)
            kept_free_bytes = min(MIN_FREE_SHARE * disk.total, MIN_FREE_BYTES)
            is_free = disk.free - unwritten_bytes >= kept_free_bytes
            is_few = len(kept) < MAX_FILES
            return (
                is_free
                and is_few
                and promised_bytes + sum(size for _, size, _ in kept) <= limit_bytes
            )

        kept = [
            (facts.st_mtime_ns, facts.st_size, entry.path)
            for entry in os.scandir(self.directory)
            if not entry.name.startswith(PARTIAL) and (facts := entry.stat())
        ]
        kept.sort(reverse=True)
        while not has_room():
            if not kept:
                raise PipeSwitchError(
                    f"No space left for an upload of {size_bytes} bytes",
                    hint="free space in the server's state directory",
                )
            os.unlink(kept.pop()[2])
        while refusal := self._disk.refusal(tenant, size_bytes, "an upload"):
            may_go = [
                entry
                for entry in kept
                if not refusal.tenant or self._disk.owns_upload(tenant, os.path.basename(entry[2]))
            ]
            if not may_go:
                raise refusal
            kept.remove(may_go[-1])
            os.unlink(may_go[-1][2])

    def _publish(self, key: _Key, final: Path, tenant: str) -> None:
        """fsync, rename, fsync the folder: after this the name always means these bytes."""
        partial = self._partials.pop(key)
        os.fsync(partial.file.fileno())
        partial.file.close()
        reach("upload.publish")
        os.replace(partial.path, final)
        self._disk.keep_upload(final.name, tenant)
        reach("upload.published")
        files = self._files.setdefault(key[1], deque())
        files.append(final)
        if len(files) > MAX_FILES_PER_CLIENT:
            files.popleft().unlink(missing_ok=True)
        sync_directory(self.directory)

    def _drop(self, key: _Key) -> None:
        partial = self._partials.pop(key, None)
        if partial is not None:
            with contextlib.suppress(OSError):  # on a full disk close fails as well
                partial.file.close()
            with contextlib.suppress(OSError):  # read-only by now; the next start removes it
                partial.path.unlink()
