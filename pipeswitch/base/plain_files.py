"""Files that are opened only if they are regular, and read only if they are small enough.

A link, pipe, socket or device may lie in a file's place. To open a pipe would wait for its writer,
and to read a device or a file with a large hole would take all memory.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


class NotPlain(OSError):
    """Error for a path that is not a regular file, or is larger than its reader's limit."""


def open_plain(path: str | os.PathLike[str], flags: int) -> int:
    """Open a regular file, as the ``opener`` of ``open``; a new file has mode 0600. Never waits.

    Raises:
        NotPlain: there is a link, a folder, a pipe, a socket or a device.
        OSError: the file cannot be opened.
    """
    try:
        return open_regular(path, flags | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _not_plain(path) from None
        raise


def open_regular(path: str | os.PathLike[str], flags: int) -> int:
    """Open a regular file like ``open_plain``, but follow links."""
    try:
        descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    except OSError as error:
        if error.errno in (errno.ENXIO, errno.EISDIR):  # a pipe without a reader, or a socket
            raise _not_plain(path) from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _not_plain(path)
    return descriptor


def _not_plain(path: str | os.PathLike[str]) -> NotPlain:
    return NotPlain(errno.EINVAL, "not a regular file", os.fspath(path))


def read_plain(path: Path, max_bytes: int) -> bytes:
    """Return the content of a regular file.

    Raises:
        NotPlain: as in ``open_plain``, or the file has more than ``max_bytes``.
        OSError: the file cannot be read.
    """
    with open(path, "rb", opener=open_plain) as file:
        size_bytes = os.fstat(file.fileno()).st_size
        if size_bytes > max_bytes:
            raise NotPlain(errno.EFBIG, f"{size_bytes} bytes, at most {max_bytes}", str(path))
        return file.read(max_bytes)


def write_whole(path: Path, data: bytes, *, is_synced: bool = True) -> None:
    """Replace a file atomically, by one writer at a time; the new one has mode 0600.

    Raises:
        NotPlain: ``NAME.tmp`` exists and is not a regular file.
        OSError: the disk is full or gone; the file is unchanged.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        with open(temporary, "wb", opener=open_plain) as file:
            file.write(data)
            file.flush()
            if is_synced:
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except NotPlain:
        raise
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
