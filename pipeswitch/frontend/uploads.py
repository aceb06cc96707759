"""Weights and bundles that clients send in chunks: hashed, written and named by their digest.

One writer thread does all file work, so that a slow disk never blocks the poll loop. A file is
visible under its sha256 only after all its bytes were received, checked and fsynced. Nothing is
parsed here: the builder interprets the bytes.

If a ``put`` reply reports a file as present, the file stays until one registration of it is
answered; the built program has a copy. A file that is never registered is removed if its client
needs the space, or at the server's next start. A client's files count toward its own share of the
folder, and never displace another client's finished files.
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
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from ..base.errors import HostStoreFull, InvalidInput, PipeSwitchError, QueueFull
from ..base.failpoints import reach
from ..base.machine import sync_directory
from ..base.plain_files import open_plain
from ..base.quotas import FairQuota
from ..base.worker_thread import Failed, Work, WorkerThread
from ..programs.spec import files_of
from ..wire.frames import CHUNK_BYTES, UPLOAD_LOST, RequestHeader
from .disk import PARTIAL, Disk
from .intake.validation import Body, tenant_of
from .permissions import DIGEST

_logger = logging.getLogger(__name__)

CREDIT_CHUNKS: Final = 4  # unanswered chunks a client may have: 16 MiB of our memory
MAX_QUEUED_CHUNKS: Final = 64  # queued chunks of all clients: 256 MiB
MAX_PARTIALS: Final = 64  # unfinished files of all clients: each holds a descriptor
MAX_FILES: Final = 1024  # files of all clients, finished or not
KEPT_UPLOADS: Final = 4  # all files together are at most this many times [server] max_upload
FRESH_S: Final = 60.0  # a finished file is kept this long, even if its client needs the space
PROMISE_S: Final = 10.0  # an unfinished file without a new chunk for this long may be removed
MIN_FREE_SHARE: Final = 0.02  # part of the disk that stays free for commits, journal and logs
MIN_FREE_BYTES: Final = 256 << 20  # enough for commits, journal and logs on any disk
KINDS: Final = ("bundle", "safetensors")  # file suffixes; they tell the builder how to read a file

Reply = Callable[[dict[str, Any], PipeSwitchError | None], None]
"""Callback with the answer to one chunk, called on the writer thread."""


_Key = tuple[str, str, int, str]
"""Session, client (its tenant), size and file name. The gateway's one session has many clients.

Several uploads of one file at a time have the same key. They fill one file: bytes that another
upload has sent already are not written again.
"""


@dataclass
class _Partial:
    """A file that is being received. Owned by the writer thread."""

    path: Path
    size_bytes: int
    file: Any
    written_bytes: int = 0
    uploads: int = 0  # uploads that have sent their first bytes
    hash: Any = field(default_factory=hashlib.sha256)
    touched_s: float = field(default_factory=time.monotonic)


@dataclass
class _Whole:
    """A file that may be registered. Owned by the writer thread."""

    client: str
    size_bytes: int
    touched_s: float = field(default_factory=time.monotonic)
    puts: int = 1  # ``put`` replies that reported it, minus answered registrations


@dataclass(frozen=True)
class _Chunk:
    key: _Key
    digest: str
    size_bytes: int
    offset_bytes: int
    data: Any  # a buffer that keeps its memory alive
    reply: Reply


def _remove(paths: Sequence[Path]) -> None:
    """Remove files and folders. Ignore errors: the next start tries again."""
    for path in paths:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                path.unlink()


class Uploads:
    """The upload folder. The loop calls its methods; only ``start`` and ``stop`` block."""

    def __init__(self, directory: Path, max_upload_bytes: int, disk: Disk) -> None:
        self.directory = directory
        self._disk = disk
        self._max_upload_bytes = max_upload_bytes
        self._queued = 0  # chunks without an answer; changed under the lock
        self._lock = threading.Lock()
        self._pins: Counter[str] = Counter()  # file name -> registrations; changed under the lock
        self._partials: dict[_Key, _Partial] = {}
        self._whole: dict[str, _Whole] = {}  # by name, in order of upload
        self._bytes = FairQuota(KEPT_UPLOADS * max_upload_bytes, "bytes of uploads", "upload_bytes")
        self._places = FairQuota(MAX_FILES, "uploads", "uploads")
        self._open_places = FairQuota(MAX_PARTIALS, "unfinished uploads", "unfinished_uploads")
        self._writer = WorkerThread("pipeswitch-uploads")

    def start(self) -> None:
        """Create the folder, and remove an earlier server's files."""
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        _remove(list(self.directory.iterdir()))

    def stop(self) -> None:
        """Finish the queued work, drop partial files, and join the writer."""
        self._writer.put(self._drop_all)
        self._writer.shutdown()

    def offer(
        self, session: str, header: RequestHeader, data: Any, reply: Reply, *, tenant: str
    ) -> None:
        """Queue a ``put`` message's chunk. The writer calls ``reply`` once, unless this raises.

        Raises:
            InvalidInput: a field is wrong.
            PermissionDenied: the message names a client, and ``tenant`` is not the owner.
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
                f"a file of {size} bytes exceeds the limit of {self._max_upload_bytes}",
                hint="raise [server] max_upload",
            )
        if len(data) > CHUNK_BYTES or offset + len(data) > size:
            raise InvalidInput(
                f"put: a chunk has at most {CHUNK_BYTES} bytes and ends within the file"
            )
        with self._lock:
            if self._queued >= MAX_QUEUED_CHUNKS:
                raise QueueFull(f"{self._queued} upload chunks wait for the disk", limit="chunks")
            self._queued += 1
        key = (session, tenant, size, f"{digest}.{kind}")
        chunk = _Chunk(key, digest, size, offset, data, reply)
        self._writer.put(
            functools.partial(self._answer, chunk), functools.partial(self._end, chunk, {})
        )

    def run_later(self, work: Work, failed: Failed = lambda _: None) -> None:
        """Queue other file work for the writer's thread, like ``WorkerThread.put``."""
        self._writer.put(work, failed)

    def remove(self, paths: Sequence[Path]) -> None:
        """Remove files and folders that are not needed any more."""
        if paths:
            self._writer.put(functools.partial(_remove, tuple(paths)))

    def pin(self, spec: bytes) -> tuple[str, ...]:
        """Keep the files that a registration names until ``unpin``; return their names."""
        names = tuple(path.name for path in files_of(spec) if path.parent == self.directory)
        with self._lock:
            self._pins.update(names)
        return names

    def unpin(self, names: Sequence[str]) -> None:
        """Unpin the files of an answered registration: its program is a copy, or there is none."""
        if names:
            self._writer.put(functools.partial(self._unpin, names))

    def remove_session(self, session: str) -> None:
        """Remove the partial files of a client that is gone."""
        self._writer.put(functools.partial(self._drop_all, session))

    # ---- writer thread -----------------------------------------------------------------------

    def _drop_all(self, session: str | None = None) -> None:
        for key in [key for key in self._partials if session in (None, key[0])]:
            self._drop(key)

    def _unpin(self, names: Sequence[str]) -> None:
        for name in names:
            with self._lock:
                self._pins[name] -= 1
                is_free = not self._pins[name]
                if is_free:
                    del self._pins[name]
            whole = self._whole.get(name)
            if whole is not None:
                whole.puts -= 1
                if is_free and whole.puts <= 0:  # else another registration is still expected
                    self._remove_whole(name)

    def _remove_whole(self, name: str) -> None:
        upload = self._whole.pop(name, None)
        if upload is not None:
            self._bytes.give(upload.client, upload.size_bytes)
            self._places.give(upload.client, 1)
            _remove([self.directory / name])

    def _answer(self, chunk: _Chunk) -> None:
        body: dict[str, Any] = {}
        error: PipeSwitchError | None = None
        try:
            body = self._take(chunk)
        except PipeSwitchError as refused:  # another upload of the file may go on
            error = refused
        except OSError as failed:  # for example, a full disk: only this upload fails
            _logger.warning("upload=%s failed cause=%s", chunk.digest[:12], failed)
            self._drop(chunk.key)
            error = PipeSwitchError(
                f"the server could not store the upload: {failed.strerror}",
                hint="free space in its state directory",
            )
        except Exception:  # a bug: the writer still serves other uploads
            _logger.exception("upload=%s failed", chunk.digest[:12])
            self._drop(chunk.key)
            error = PipeSwitchError(
                "the server could not store the upload: internal error", hint="see its log"
            )
        self._end(chunk, body, error)

    def _end(self, chunk: _Chunk, body: dict[str, Any], error: PipeSwitchError | None) -> None:
        with self._lock:
            self._queued -= 1
        chunk.reply(body, error)

    def _take(self, chunk: _Chunk) -> dict[str, Any]:
        """Append one chunk; return the reply's body, with the number of bytes received so far.

        1. If the whole file is there already, nothing is written.
        2. Offset 0 opens a partial file, if there is none.
        3. Other chunks follow without a gap; bytes that are there already are skipped.
        4. After the last byte: compare the digest, fsync, rename.
        """
        digest, is_first = chunk.digest, not chunk.offset_bytes
        final = self.directory / chunk.key[-1]
        if chunk.key[-1] in self._whole and final.is_file():
            self._drop(chunk.key)
            whole = self._whole[chunk.key[-1]]
            whole.touched_s = time.monotonic()
            whole.puts += is_first
            return self._progress(whole.size_bytes, is_complete=True)
        partial = self._partials.get(chunk.key) or (self._open(chunk) if is_first else None)
        if partial is None or partial.written_bytes < chunk.offset_bytes:
            at = partial.written_bytes if partial else 0
            raise InvalidInput(
                f"put: chunk at {chunk.offset_bytes}, but the file has {at} bytes",
                hint="send the chunks in order, from 0 on, all with the same size_bytes",
                reason=UPLOAD_LOST,
            )
        reach("upload.write")
        data = chunk.data[partial.written_bytes - chunk.offset_bytes :]
        partial.file.write(data)
        partial.file.flush()  # reports a full disk as this chunk's error
        partial.hash.update(data)
        partial.written_bytes += len(data)
        partial.uploads += is_first and len(chunk.data) > 0
        partial.touched_s = time.monotonic()
        if partial.written_bytes < partial.size_bytes:
            return self._progress(partial.written_bytes, is_complete=False)
        if partial.hash.hexdigest() != digest:
            self._drop(chunk.key)
            raise InvalidInput(
                f"the upload's digest is {partial.hash.hexdigest()[:12]}…, not {digest[:12]}…"
            )
        self._publish(chunk.key, final)
        return self._progress(chunk.size_bytes, is_complete=True)

    @staticmethod
    def _progress(offset_bytes: int, is_complete: bool) -> dict[str, Any]:
        return {"offset_bytes": offset_bytes, "complete": is_complete, "credit": CREDIT_CHUNKS}

    def _open(self, chunk: _Chunk) -> _Partial:
        """Open a partial file.
        Raises QueueFull: the client's share of the folder is used up; HostStoreFull: the client's
        share of the disk is used up, or the disk is full."""
        client = chunk.key[1]
        self._make_room(client, chunk.size_bytes)
        path = self.directory / "-".join([PARTIAL + chunk.key[0], *map(str, chunk.key[1:])])
        descriptor = open_plain(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        file = os.fdopen(descriptor, "wb")
        partial = self._partials[chunk.key] = _Partial(path, chunk.size_bytes, file)
        self._bytes.take(client, chunk.size_bytes)
        self._places.take(client, 1)
        self._open_places.take(client, 1)
        os.ftruncate(descriptor, chunk.size_bytes)  # so its final size counts as disk use
        self._disk.keep_upload(path.name, client)
        return partial

    def _make_room(self, client: str, size_bytes: int) -> None:
        """Make room for one more file. Each step follows only if the steps before were not enough.

        1. Check the client's share of folder and disk.
        2. Remove unfinished files of all clients that had no new chunk for PROMISE_S.
        3. Remove the client's unpinned files that had no ``put`` for FRESH_S, oldest first.
        4. Raise the refusal.
        """
        if self._refusal(client, size_bytes) is None:
            return
        now_s = time.monotonic()
        for key, partial in list(self._partials.items()):
            if now_s - partial.touched_s >= PROMISE_S:
                self._drop(key)
        for name, whole in list(self._whole.items()):
            if (refusal := self._refusal(client, size_bytes)) is None:
                return
            is_fresh = now_s - whole.touched_s < FRESH_S
            if whole.client == client and not is_fresh and name not in self._pins:
                self._remove_whole(name)
        if refusal := self._refusal(client, size_bytes):
            raise refusal

    def _refusal(self, client: str, size_bytes: int) -> PipeSwitchError | None:
        quotas = ((self._open_places, 1), (self._places, 1), (self._bytes, size_bytes))
        for shares, amount in quotas:
            if refusal := shares.refusal(client, amount):
                return refusal
        disk = shutil.disk_usage(self.directory)
        unwritten_bytes = sum(p.size_bytes - p.written_bytes for p in self._partials.values())
        kept_free_bytes = min(MIN_FREE_SHARE * disk.total, MIN_FREE_BYTES)
        if disk.free - unwritten_bytes - size_bytes < kept_free_bytes:
            return HostStoreFull(
                f"No space left for an upload of {size_bytes} bytes",
                hint="free space in the server's state directory",
                requested_bytes=size_bytes,
            )
        return self._disk.refusal(client, size_bytes, "an upload")

    def _publish(self, key: _Key, final: Path) -> None:
        """Publish a file (fsync, rename, fsync the folder): its name now means these bytes."""
        partial, (_, client, _, name) = self._partials[key], key
        os.fsync(partial.file.fileno())
        partial.file.close()
        reach("upload.publish")
        os.replace(partial.path, final)
        partial.path = final  # so that ``_drop`` removes it if an error follows
        self._disk.keep_upload(final.name, client)
        reach("upload.published")
        sync_directory(self.directory)
        del self._partials[key]
        self._open_places.give(client, 1)
        self._whole[name] = _Whole(client, partial.size_bytes, puts=max(partial.uploads, 1))

    def _drop(self, key: _Key) -> None:
        partial = self._partials.pop(key, None)
        if partial is not None:
            self._open_places.give(key[1], 1)
            self._places.give(key[1], 1)
            self._bytes.give(key[1], partial.size_bytes)
            with contextlib.suppress(OSError):  # on a full disk close fails as well
                partial.file.close()
            with contextlib.suppress(OSError):  # the folder is read-only; the next start removes it
                partial.path.unlink()
