"""Attempts of a malicious process to leave its sandbox; each returns the name of an errno, or "".

The attempts are raw system calls, by their numbers on x86-64 and aarch64, without a library.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import struct
from collections.abc import Callable

LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.syscall.restype = ctypes.c_long
AT_FDCWD = -100
COLUMN = {"x86_64": 0, "aarch64": 1}[os.uname().machine]

NUMBERS = {
    "open": (2, -1),
    "openat": (257, 56),
    "openat2": (437, 437),
    "creat": (85, -1),
    "open_by_handle_at": (304, 265),
    "name_to_handle_at": (303, 264),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "mknodat": (259, 33),
    "mkdirat": (258, 34),
    "symlinkat": (266, 36),
    "linkat": (265, 37),
    "unlinkat": (263, 35),
    "renameat2": (316, 276),
    "truncate": (76, 45),
    "ftruncate": (77, 46),
    "fallocate": (285, 47),
    "fchmodat": (268, 53),
    "fchownat": (260, 54),
    "utimensat": (280, 88),
    "setxattr": (188, 5),
    "getxattr": (191, 8),
    "statx": (332, 291),
    "newfstatat": (262, 79),
    "readlinkat": (267, 78),
    "faccessat": (269, 48),
    "getdents64": (217, 61),
    "chdir": (80, 49),
    "fchdir": (81, 50),
    "chroot": (161, 51),
    "pivot_root": (155, 41),
    "mount": (165, 40),
    "umount2": (166, 39),
    "fsopen": (430, 430),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "socket": (41, 198),
    "socketpair": (53, 199),
    "connect": (42, 203),
    "bind": (49, 200),
    "listen": (50, 201),
    "accept4": (288, 242),
    "sendto": (44, 206),
    "fork": (57, -1),
    "vfork": (58, -1),
    "clone": (56, 220),
    "clone3": (435, 435),
    "execve": (59, 221),
    "execveat": (322, 281),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    "pidfd_send_signal": (424, 424),
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "kcmp": (312, 272),
    "io_uring_setup": (425, 425),
    "io_setup": (206, 0),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "unshare": (272, 97),
    "setns": (308, 268),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "seccomp": (317, 277),
    "setuid": (105, 146),
    "setgid": (106, 144),
    "capset": (126, 91),
    "setpriority": (141, 140),
    "sched_setaffinity": (203, 122),
    "sched_setscheduler": (144, 119),
    "setrlimit": (160, 164),
    "prlimit64": (302, 261),
    "prctl": (157, 167),
    "personality": (135, 92),
    "ioctl": (16, 29),
    "fcntl": (72, 25),
    "fanotify_init": (300, 262),
    "inotify_init1": (294, 26),
    "eventfd2": (290, 19),
    "epoll_create1": (291, 20),
    "timerfd_create": (283, 85),
    "signalfd4": (289, 74),
    "pipe2": (293, 59),
    "dup3": (292, 24),
    "splice": (275, 76),
    "tee": (276, 77),
    "vmsplice": (278, 75),
    "sendfile": (40, 71),
    "copy_file_range": (326, 285),
    "pwrite64": (18, 68),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    "remap_file_pages": (216, 234),
    "mbind": (237, 235),
    "move_pages": (279, 239),
    "migrate_pages": (256, 238),
    "mlock": (149, 228),
    "madvise": (28, 233),
    "sethostname": (170, 161),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "adjtimex": (159, 171),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "quotactl": (179, 60),
    "acct": (163, 89),
    "syslog": (103, 116),
    "vhangup": (153, 58),
    "setsid": (112, 157),
    "setpgid": (109, 154),
    "getpgid": (121, 155),
    "landlock_restrict_self": (446, 446),
    "setitimer": (38, 103),
    "timer_create": (222, 107),
    "set_mempolicy": (238, 237),
    "quotactl_fd": (443, 443),
    "mount_setattr": (442, 442),
    "statmount": (457, 457),
    "lookup_dcookie": (212, 18),
    "setsockopt": (54, 208),
    "shutdown": (48, 210),
    "recvmmsg": (299, 243),
}


def call(name: str, *arguments: object) -> str:
    """Return the errno's name, or "" on success; a call that does not exist counts as EPERM."""
    number = NUMBERS[name][COLUMN]
    if number < 0:
        return "EPERM"
    passed = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    ctypes.set_errno(0)
    result = LIBC.syscall(ctypes.c_long(number), *passed)
    if name in ("fork", "vfork", "clone", "clone3") and result == 0:
        os._exit(0)  # only a child gets here, so the call has succeeded
    return errno.errorcode[ctypes.get_errno()] if result < 0 else ""


def python(action: Callable[[], object]) -> str:
    """Run Python code; return the name of its error's errno, or "" on success."""
    try:
        action()
    except OSError as error:
        return errno.errorcode.get(error.errno or 0, str(error))
    except ImportError:
        return "EPERM"
    return ""


def attempts(victim: int, a_file: str) -> dict[str, str]:
    """Make all attempts; return the results by name.

    Args:
        victim: process id of another process of the same user.
        a_file: path of a file that this user may read and write.
    """
    me = os.getpid()
    path, folder = a_file.encode(), os.path.dirname(a_file).encode()
    buffer = ctypes.create_string_buffer(64)
    here = ctypes.cast(buffer, ctypes.c_void_p)
    vector = struct.pack("QQ", ctypes.addressof(buffer), 8)
    far = struct.pack("QQ", 0x400000, 8)
    unix = struct.pack("H14s", socket.AF_UNIX, b"\0hidden")
    inet = struct.pack("!HHI8x", socket.AF_INET << 8, 22, 0x7F000001)
    nothing = ctypes.c_void_p(0)
    tried = {
        name: call(name, *arguments)
        for name, arguments in {
            "open": (path, 0),
            "openat": (AT_FDCWD, path, 0),
            "openat2": (AT_FDCWD, path, b"\0" * 24, 24),
            "creat": (path + b".new", 0o600),
            "open_by_handle_at": (AT_FDCWD, here, 0),
            "name_to_handle_at": (AT_FDCWD, path, here, here, 0),
            "memfd_secret": (0,),
            "memfd_create": (b"mine", 0),
            "mknodat": (AT_FDCWD, path + b".node", 0o100600, 0),
            "mkdirat": (AT_FDCWD, path + b".dir", 0o700),
            "symlinkat": (b"/etc/passwd", AT_FDCWD, path + b".link"),
            "linkat": (AT_FDCWD, path, AT_FDCWD, path + b".hard", 0),
            "unlinkat": (AT_FDCWD, path, 0),
            "renameat2": (AT_FDCWD, path, AT_FDCWD, path + b".moved", 0),
            "truncate": (path, 0),
            "ftruncate": (1, 0),
            "fallocate": (1, 0, 0, 1),
            "fchmodat": (AT_FDCWD, path, 0o666),
            "fchownat": (AT_FDCWD, path, 1, 1, 0),
            "utimensat": (AT_FDCWD, path, nothing, 0),
            "setxattr": (path, b"user.x", b"x", 1, 0),
            "getxattr": (path, b"user.x", here, 8),
            "statx": (AT_FDCWD, path, 0, 0xFFF, ctypes.create_string_buffer(256)),
            "newfstatat": (AT_FDCWD, path, ctypes.create_string_buffer(256), 0),
            "readlinkat": (AT_FDCWD, b"/proc/self/exe", here, 64),
            "faccessat": (AT_FDCWD, path, 0),
            "getdents64": (0, here, 64),
            "chdir": (folder,),
            "fchdir": (0,),
            "chroot": (folder,),
            "pivot_root": (folder, folder),
            "mount": (b"none", folder, b"tmpfs", 0, nothing),
            "umount2": (b"/proc", 2),
            "fsopen": (b"tmpfs", 0),
            "open_tree": (AT_FDCWD, b"/", 0),
            "move_mount": (AT_FDCWD, b"/", AT_FDCWD, folder, 0),
            "socketpair": (socket.AF_UNIX, 1, 0, here),
            "connect": (0, inet, 16),
            "bind": (0, unix, 16),
            "listen": (0, 1),
            "accept4": (0, nothing, nothing, 0),
            "sendto": (0, b"x", 1, 0, inet, 16),
            "setsockopt": (0, 1, 2, here, 4),
            "shutdown": (0, 2),
            "recvmmsg": (0, here, 1, 0, nothing),
            "fork": (),
            "clone": (17, 0, 0, 0, 0),
            "clone3": (struct.pack("Q32xQ40x", 0, 17), 88),
            "execve": (b"/bin/true", nothing, nothing),
            "execveat": (AT_FDCWD, b"/bin/true", nothing, nothing, 0),
            "ptrace": (16, victim, 0, 0),
            "process_vm_readv": (victim, vector, 1, far, 1, 0),
            "process_vm_writev": (victim, vector, 1, far, 1, 0),
            "process_madvise": (0, vector, 1, 4, 0),
            "pidfd_open": (victim, 0),
            "pidfd_getfd": (0, 0, 0),
            "pidfd_send_signal": (0, 0, nothing, 0),
            "kill": (victim, 0),
            "tkill": (victim, 0),
            "tgkill": (victim, victim, 0),
            "rt_sigqueueinfo": (victim, 0, here),
            "rt_tgsigqueueinfo": (victim, victim, 0, here),
            "kcmp": (me, victim, 0, 0, 0),
            "io_uring_setup": (1, ctypes.create_string_buffer(256)),
            "io_setup": (1, here),
            "bpf": (0, ctypes.create_string_buffer(128), 128),
            "perf_event_open": (ctypes.create_string_buffer(b"\1", 128), 0, -1, -1, 0),
            "userfaultfd": (1,),
            "unshare": (0x10000000,),
            "setns": (0, 0),
            "keyctl": (0, -3, 0),
            "add_key": (b"user", b"x", b"x", 1, -3),
            "request_key": (b"user", b"x", nothing, -3),
            "setuid": (0,),
            "setgid": (0,),
            "capset": (here, nothing),
            "setpriority": (0, victim, 0),
            "sched_setaffinity": (victim, 8, b"\xff" * 8),
            "sched_setscheduler": (victim, 0, b"\0" * 8),
            "setrlimit": (2, b"\xff" * 16),
            "prlimit64": (0, 2, b"\xff" * 16, nothing),
            "prctl": (23, 0),
            "personality": (0x0040000,),
            "ioctl": (0, 0x5412, b"x"),
            "fcntl": (0, 8, victim),
            "fanotify_init": (0, 0),
            "inotify_init1": (0,),
            "eventfd2": (0, 0),
            "epoll_create1": (0,),
            "timerfd_create": (1, 0),
            "signalfd4": (-1, here, 8, 0),
            "pipe2": (here, 0),
            "dup3": (0, 100, 0),
            "splice": (0, nothing, 1, nothing, 1, 0),
            "tee": (0, 1, 1, 0),
            "vmsplice": (0, vector, 1, 0),
            "sendfile": (1, 0, nothing, 1),
            "copy_file_range": (0, nothing, 1, nothing, 1, 0),
            "pwrite64": (1, b"", 0, 0),
            "shmget": (0, 4096, 0o1600),
            "shmat": (0, nothing, 0),
            "msgget": (0, 0o1600),
            "semget": (0, 1, 0o1600),
            "mq_open": (b"x", 0o100, 0o600, nothing),
            "remap_file_pages": (0, 0, 0, 0, 0),
            "mbind": (0, 0, 0, nothing, 0, 0),
            "move_pages": (victim, 0, nothing, nothing, nothing, 0),
            "migrate_pages": (victim, 1, here, here),
            "mlock": (here, 8),
            "madvise": (0, 0, 9),
            "sethostname": (b"x", 0),
            "settimeofday": (nothing, here),
            "clock_settime": (0, here),
            "adjtimex": (ctypes.create_string_buffer(256),),
            "init_module": (here, 8, b""),
            "finit_module": (0, b"", 0),
            "delete_module": (b"x", 0),
            "kexec_load": (0, 0, nothing, 0),
            "reboot": (0, 0, 0, nothing),
            "swapon": (path, 0),
            "quotactl": (0, nothing, 0, nothing),
            "acct": (b"/nowhere",),
            "syslog": (3, here, 8),
            "vhangup": (),
            "setsid": (),
            "setpgid": (0, 0),
            "getpgid": (victim,),
            "landlock_restrict_self": (0, 0),
            "setitimer": (0, here, nothing),
            "timer_create": (0, nothing, here),
            "set_mempolicy": (0, nothing, 0),
            "quotactl_fd": (0, 0, 0, nothing),
            "mount_setattr": (0, path, 0, here, 0),
            "statmount": (here, here, 8, 0),
            "lookup_dcookie": (0, here, 8),
            "seccomp": (1, 0, here),
        }.items()
    }
    for family in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX, socket.AF_NETLINK, 17, 38, 40):
        for kind in (1, 2, 3):
            tried[f"socket {family} {kind}"] = call("socket", family, kind, 0)
    for name in (
        a_file,
        "/etc/passwd",
        f"/proc/{victim}/mem",
        f"/proc/{victim}/maps",
        f"/proc/{victim}/environ",
        "/proc/self/mem",
        "/proc/self/fd/0",
        "/dev/null",
        "/dev/shm",
        ".",
        "/",
    ):
        tried[f"Python opens {name}"] = python(lambda name=name: os.open(name, os.O_RDONLY))
    tried["Python writes"] = python(lambda: os.open(a_file + ".py", os.O_CREAT | os.O_WRONLY))
    tried["Python lists"] = python(lambda: os.listdir("/"))
    tried["Python forks"] = python(os.fork)
    tried["Python runs"] = python(lambda: os.posix_spawn("/bin/true", ["true"], {}))
    tried["Python imports"] = python(lambda: __import__("tabnanny"))
    tried["Python connects"] = python(socket.socket)
    return tried
