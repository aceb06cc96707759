"""Landlock: limits the files that a thread and its later threads can access (Linux 5.13)."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from .seccomp import forbid_new_privileges, system_call

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446  # system calls; equal on all processors
ASK_VERSION: Final = 1
PATH_BENEATH: Final = 1

READ_FILE: Final = 1 << 2
READ_DIR: Final = 1 << 3
READ: Final = READ_FILE | READ_DIR
WRITE_FILE, REMOVE_DIR, REMOVE_FILE, MAKE_DIR, MAKE_FILE = 1 << 1, 1 << 4, 1 << 5, 1 << 7, 1 << 8
TRUNCATE: Final = 1 << 14  # from version 3
# Links, pipes and devices are excluded: a later reader of the folder would follow or wait for them.
WRITE: Final = READ | WRITE_FILE | REMOVE_DIR | REMOVE_FILE | MAKE_DIR | MAKE_FILE | TRUNCATE
BITS_BY_VERSION: Final = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}  # version -> count of rights
CONNECT_AND_BIND_TCP: Final = 0b11  # from version 4
SCOPES: Final = 0b11  # from version 6: abstract sockets, signals


def version() -> int:
    """Return the kernel's version of Landlock; 0 if it has none."""
    return max(0, system_call(CREATE_RULESET, None, ctypes.c_size_t(0), ASK_VERSION))


def restrict_files(readable: Iterable[Path], writable: Iterable[Path]) -> None:
    """Limit this thread, and threads that it starts later, to these files, permanently.

    Args:
        readable: files, and folders with all their contents; missing ones are ignored.
        writable: folders.

    Raises:
        OSError: the kernel refused the rules, or has no Landlock (``version()`` is 0).
    """
    known = version()
    every = (1 << BITS_BY_VERSION[min(known, max(BITS_BY_VERSION))]) - 1
    handled = (ctypes.c_uint64 * 3)(
        every, CONNECT_AND_BIND_TCP if known >= 4 else 0, SCOPES if known >= 6 else 0
    )
    size = 8 if known < 4 else 16 if known < 6 else 24
    ruleset = _checked(CREATE_RULESET, ctypes.byref(handled), ctypes.c_size_t(size), 0)
    try:
        for path in readable:
            _allow(ruleset, path, READ)
        for path in writable:
            _allow(ruleset, path, WRITE & every)
        forbid_new_privileges()
        _checked(RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)


class _Beneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("access", ctypes.c_uint64), ("parent", ctypes.c_int32))


def _allow(ruleset: int, path: Path, access: int) -> None:
    try:
        parent = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        if not path.is_dir():
            access &= READ_FILE
        rule = _Beneath(access, parent)
        _checked(ADD_RULE, ruleset, PATH_BENEATH, ctypes.byref(rule), 0)
    finally:
        os.close(parent)


def _checked(*arguments: object) -> int:
    result = system_call(*arguments)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"Landlock: {os.strerror(number)}")
    return result
