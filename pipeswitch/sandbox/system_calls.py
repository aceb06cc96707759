"""The system calls that confined processes may make; all other calls fail with EPERM.

The lists contain the calls that workers and builders were observed to make, and fallbacks of their
libraries (glibc, libgomp, Python). The arguments of a call with conditions must meet all of them.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

X86_64: Final = 0
AARCH64: Final = 1
NONE: Final = -1  # the processor does not have this call


@dataclass(frozen=True)
class Condition:
    """Condition on one argument: its bits in ``mask`` equal one of ``values``."""

    argument: int
    values: tuple[int, ...]
    mask: int = (1 << 64) - 1


Conditions = tuple[Condition, ...]  # all conditions must hold

_OWN: Final[dict[str, tuple[int, int]]] = {
    "read": (0, 63),
    "write": (1, 64),
    "readv": (19, 65),
    "writev": (20, 66),
    "close": (3, 57),
    "lseek": (8, 62),
    "pread64": (17, 67),
    "poll": (7, NONE),
    "ppoll": (271, 73),
    "select": (23, NONE),
    "pselect6": (270, 72),
    "sendmsg": (46, 211),
    "recvmsg": (47, 212),
    "mmap": (9, 222),
    "mprotect": (10, 226),
    "munmap": (11, 215),
    "mremap": (25, 216),
    "brk": (12, 214),
    "madvise": (28, 233),
    "futex": (202, 98),
    "futex_waitv": (449, 449),
    "set_robust_list": (273, 99),
    "rseq": (334, 293),
    "sched_yield": (24, 124),
    "sched_getaffinity": (204, 123),
    "getcpu": (309, 168),
    "membarrier": (324, 283),
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "sigaltstack": (131, 132),
    "tgkill": (234, 131),
    "restart_syscall": (219, 128),
    "exit": (60, 93),
    "exit_group": (231, 94),
    "getrandom": (318, 278),
    "time": (201, NONE),
    "gettimeofday": (96, 169),
    "clock_gettime": (228, 113),
    "clock_getres": (229, 114),
    "clock_nanosleep": (230, 115),
    "nanosleep": (35, 101),
    "getpid": (39, 172),
    "gettid": (186, 178),
    "getppid": (110, 173),
    "getuid": (102, 174),
    "geteuid": (107, 175),
    "getgid": (104, 176),
    "getegid": (108, 177),
    "getrusage": (98, 165),
    "times": (100, 153),
    "sysinfo": (99, 179),
    "uname": (63, 160),
    "prctl": (157, 167),
    "fcntl": (72, 25),
    "prlimit64": (302, 261),
}
"""Calls for the process's own memory, threads, descriptors and clock."""

_THREADS: Final[dict[str, tuple[int, int]]] = {
    "clone": (56, 220),
    "clone3": (435, 435),
    "set_tid_address": (218, 96),
}

_FILES: Final[dict[str, tuple[int, int]]] = {  # which Landlock restricts
    "open": (2, NONE),
    "openat": (257, 56),
    "stat": (4, NONE),
    "lstat": (6, NONE),
    "fstat": (5, 80),
    "newfstatat": (262, 79),
    "statx": (332, 291),
    "access": (21, NONE),
    "faccessat": (269, 48),
    "faccessat2": (439, 439),
    "readlink": (89, NONE),
    "readlinkat": (267, 78),
    "getdents64": (217, 61),
    "getcwd": (79, 17),
    "statfs": (137, 43),
    "fstatfs": (138, 44),
    "mkdir": (83, NONE),
    "mkdirat": (258, 34),
    "unlink": (87, NONE),
    "unlinkat": (263, 35),
    "rmdir": (84, NONE),
    "rename": (82, NONE),
    "renameat": (264, 38),
    "renameat2": (316, 276),
    "ftruncate": (77, 46),
    "fsync": (74, 82),
    "fdatasync": (75, 83),
    "fadvise64": (221, 223),
    "fallocate": (285, 47),
    "copy_file_range": (326, 285),
    "sendfile": (40, 71),
    "pwrite64": (18, 68),
    "dup": (32, 23),
    "ioctl": (16, 29),
    "umask": (95, 166),
}

NUMBERS: Final = {**_OWN, **_THREADS, **_FILES}
OWN, THREADS, FILES = map(frozenset, (_OWN, _THREADS, _FILES))

MADV_HARMLESS: Final = (
    mmap.MADV_NORMAL,
    mmap.MADV_RANDOM,
    mmap.MADV_SEQUENTIAL,
    mmap.MADV_WILLNEED,
    mmap.MADV_DONTNEED,
    mmap.MADV_FREE,
    mmap.MADV_HUGEPAGE,
    mmap.MADV_NOHUGEPAGE,
    22,
    23,  # POPULATE_READ and POPULATE_WRITE; not REMOVE, which empties shared memory
)
PR_SET_NAME: Final = 15
PR_GET_NAME: Final = 16
PR_SET_VMA: Final = 0x53564D41  # used by glibc to name its memory
CLONE_THREAD: Final = 0x00010000
CLONE_VM: Final = 0x00000100
TCGETS: Final = 0x5401  # isatty, which Python calls for each file that it opens
FIOCLEX: Final = 0x5451


def conditions(pid: int) -> Mapping[str, Conditions]:
    """Return conditions for calls that are needed with some arguments only."""
    of_a_thread = CLONE_THREAD | CLONE_VM
    return {
        "tgkill": (Condition(0, (pid,)),),  # abort() and raise()
        "prlimit64": (Condition(0, (0, pid)), Condition(2, (0,))),  # may read limits, not set them
        "madvise": (Condition(2, MADV_HARMLESS),),
        "prctl": (Condition(0, (PR_SET_NAME, PR_GET_NAME, PR_SET_VMA)),),
        "fcntl": (
            Condition(
                1, (fcntl.F_GETFD, fcntl.F_SETFD, fcntl.F_GETFL, fcntl.F_DUPFD_CLOEXEC), 0xFFFFFFFF
            ),
        ),
        "clone": (Condition(0, (of_a_thread,), of_a_thread),),
        "ioctl": (Condition(1, (TCGETS, FIOCLEX), 0xFFFFFFFF),),
    }


REFUSED_WITH: Final[Mapping[str, int]] = {
    "clone3": errno.ENOSYS  # a filter cannot read its flags in memory; glibc then uses clone
}
