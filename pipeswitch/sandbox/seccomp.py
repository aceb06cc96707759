"""Seccomp filter of allowed system calls, as a BPF program; permanent, for all threads."""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Iterable
from typing import Final

from .system_calls import AARCH64, NUMBERS, REFUSED_WITH, X86_64, Condition, conditions

ARCHITECTURES: Final = {"x86_64": (X86_64, 0xC000003E), "aarch64": (AARCH64, 0xC00000B7)}
SECCOMP: Final = {"x86_64": 317, "aarch64": 277}
SET_MODE_FILTER: Final = 1
GET_ACTION_AVAIL: Final = 2
FLAG_TSYNC: Final = 1
X32_BIT: Final = 0x40000000  # marks a second set of numbers for x86-64's calls

ALLOW: Final = 0x7FFF0000
ERRNO: Final = 0x00050000
KILL_PROCESS: Final = 0x80000000

LOAD: Final = 0x20  # BPF_LD | BPF_W | BPF_ABS
AND: Final = 0x54  # BPF_ALU | BPF_AND | BPF_K
JUMP: Final = 0x05
JUMP_EQUAL: Final = 0x15
JUMP_AT_LEAST: Final = 0x35
RETURN: Final = 0x06
NUMBER_AT, ARCHITECTURE_AT, ARGUMENTS_AT = 0, 4, 16  # struct seccomp_data, little endian

Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, operand

PR_SET_NO_NEW_PRIVS: Final = 38


def machine() -> str:
    """Return the processor's architecture."""
    return os.uname().machine


def is_available() -> bool:
    """Return True if this kernel supports filters that let calls fail with an error number."""
    if machine() not in ARCHITECTURES:
        return False
    action = ctypes.c_uint32(ERRNO)
    return system_call(SECCOMP[machine()], GET_ACTION_AVAIL, 0, ctypes.byref(action)) == 0


def restrict_calls(allowed: Iterable[str]) -> None:
    """Limit all threads of this process to these system calls, permanently.

    Raises:
        OSError: the kernel refused the filter.
    """
    code = b"".join(
        struct.pack("=HBBI", *line) for line in program(allowed, machine(), os.getpid())
    )
    buffer = ctypes.create_string_buffer(code, len(code))

    class FilterProgram(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_void_p))

    filter_ = FilterProgram(len(code) // 8, ctypes.addressof(buffer))
    forbid_new_privileges()
    result = system_call(SECCOMP[machine()], SET_MODE_FILTER, FLAG_TSYNC, ctypes.byref(filter_))
    if result:  # a positive result is the id of a thread that has its own filter
        number = ctypes.get_errno() if result < 0 else errno.EACCES
        raise OSError(number, f"seccomp: {os.strerror(number)}")


def forbid_new_privileges() -> None:
    """Set no_new_privs, which the kernel requires before a process may confine itself."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "PR_SET_NO_NEW_PRIVS")


def system_call(*arguments: object) -> int:
    """Make a system call and return its result; -1 after an error, which is in ``errno``."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    return int(libc.syscall(*arguments))


def program(allowed: Iterable[str], machine: str, pid: int) -> list[Instruction]:
    """Return the filter's instructions; all calls except ``allowed`` fail with EPERM."""
    column, architecture = ARCHITECTURES[machine]
    own_conditions = conditions(pid)
    lines: list[Instruction] = [
        (LOAD, 0, 0, ARCHITECTURE_AT),
        (JUMP_EQUAL, 1, 0, architecture),
        (RETURN, 0, 0, KILL_PROCESS),
        (LOAD, 0, 0, NUMBER_AT),
    ]
    if column == X86_64:
        lines += [(JUMP_AT_LEAST, 0, 1, X32_BIT), (RETURN, 0, 0, KILL_PROCESS)]
    for name in sorted(allowed):
        number = NUMBERS[name][column]
        if number < 0:
            continue
        body = _body(own_conditions.get(name, ()), REFUSED_WITH.get(name))
        lines += [(JUMP_EQUAL, 0, len(body), number), *body]
    return [*lines, (RETURN, 0, 0, ERRNO | errno.EPERM)]


def _body(checks: tuple[Condition, ...], refused_with: int | None) -> list[Instruction]:
    """Return the instructions that decide about one call; each path ends in a RETURN."""
    if refused_with is not None:
        return [(RETURN, 0, 0, ERRNO | refused_with)]
    body: list[Instruction] = []
    for check in checks:
        tries: list[Instruction] = []
        for value in reversed(check.values):
            instructions = _compare(check, value)
            beyond_the_refusal = len(tries) + 1
            tries = [*instructions, (JUMP, 0, 0, beyond_the_refusal), *tries]
        body += [*tries, (RETURN, 0, 0, ERRNO | errno.EPERM)]
    return [*body, (RETURN, 0, 0, ALLOW)]


def _compare(check: Condition, value: int) -> list[Instruction]:
    """Return instructions that skip the instruction after them unless the argument is ``value``."""
    halves = [shift for shift in (0, 32) if check.mask >> shift & 0xFFFFFFFF]
    lines: list[Instruction] = []
    for remaining, shift in zip(reversed(range(len(halves))), halves, strict=True):
        at = ARGUMENTS_AT + 8 * check.argument + shift // 8
        lines += [
            (LOAD, 0, 0, at),
            (AND, 0, 0, check.mask >> shift & 0xFFFFFFFF),
            (JUMP_EQUAL, 0, 3 * remaining + 1, value >> shift & 0xFFFFFFFF),
        ]
    return lines
