"""The sandbox's filter of system calls, executed like in the kernel, for each processor."""

from __future__ import annotations

import errno
import struct

import pytest

from pipeswitch.sandbox import seccomp
from pipeswitch.sandbox.seccomp import ALLOW, ARCHITECTURES, ERRNO, KILL_PROCESS, program
from pipeswitch.sandbox.system_calls import FILES, NUMBERS, OWN, THREADS, conditions

PID = 1234
MACHINES = sorted(ARCHITECTURES)
REFUSED = ERRNO | errno.EPERM


def verdict(
    machine: str, number: int, *arguments: int, allowed: frozenset[str] = OWN, architecture: int = 0
) -> int:
    """Return the filter's verdict on a system call."""
    architecture = architecture or ARCHITECTURES[machine][1]
    padded = [*arguments, *[0] * (6 - len(arguments))]
    data = struct.pack("<IIQ6Q", number, architecture, 0, *padded)
    value = at = 0
    lines = program(allowed, machine, PID)
    while True:
        code, if_true, if_false, operand = lines[at]
        at += 1
        if code == seccomp.LOAD:
            [value] = struct.unpack_from("<I", data, operand)
        elif code == seccomp.AND:
            value &= operand
        elif code == seccomp.JUMP:
            at += operand
        elif code == seccomp.JUMP_EQUAL:
            at += if_true if value == operand else if_false
        elif code == seccomp.JUMP_AT_LEAST:
            at += if_true if value >= operand else if_false
        else:
            assert code == seccomp.RETURN
            return operand


def call(machine: str, name: str, *arguments: int, allowed: frozenset[str] = OWN) -> int:
    number = NUMBERS[name][ARCHITECTURES[machine][0]]
    return verdict(machine, number, *arguments, allowed=allowed)


@pytest.mark.parametrize("machine", MACHINES)
def test_every_call_of_every_number_is_allowed_by_its_name_or_refused(machine: str) -> None:
    column = ARCHITECTURES[machine][0]
    by_number = {numbers[column]: name for name, numbers in NUMBERS.items()}
    free = OWN - conditions(PID).keys()
    for number in range(512):
        expected = ALLOW if by_number.get(number) in free else REFUSED
        if by_number.get(number) not in conditions(PID):
            assert verdict(machine, number) == expected, number


@pytest.mark.parametrize("machine", MACHINES)
def test_calls_that_can_do_more_are_told_by_their_arguments(machine: str) -> None:
    high = 1 << 32  # a filter reads 32 bits at a time, so it must also read an argument's high half
    assert call(machine, "tgkill", PID, PID, 6) == ALLOW
    assert call(machine, "tgkill", PID + high, PID, 6) == REFUSED
    assert call(machine, "tgkill", PID + 1, PID, 6) == REFUSED
    assert call(machine, "prlimit64", 0, 7, 0, 0xBEEF) == ALLOW
    assert call(machine, "prlimit64", 0, 7, 0xBEEF, 0) == REFUSED
    assert call(machine, "prlimit64", PID, 7, high, 0) == REFUSED
    assert call(machine, "prlimit64", 1, 7, 0, 0) == REFUSED
    assert call(machine, "madvise", 0, 4096, 4) == ALLOW
    assert call(machine, "madvise", 0, 4096, 9) == REFUSED
    assert call(machine, "fcntl", 3, 1) == ALLOW
    assert call(machine, "fcntl", 3, 8, PID + 1) == REFUSED
    assert call(machine, "prctl", 15) == ALLOW
    assert call(machine, "prctl", 22) == REFUSED
    builder = OWN | THREADS | FILES
    thread = 0x003D0F00  # glibc's flags for a new thread
    assert call(machine, "clone", thread, allowed=builder) == ALLOW
    assert call(machine, "clone", 17, allowed=builder) == REFUSED
    assert call(machine, "clone", thread) == REFUSED
    assert call(machine, "clone3", allowed=builder) == ERRNO | errno.ENOSYS


def test_calls_through_another_processors_table_end_the_process() -> None:
    assert verdict("x86_64", 0, architecture=0x40000003) == KILL_PROCESS  # a 32-bit table
    assert verdict("x86_64", 0x40000000) == KILL_PROCESS  # x32
    assert verdict("aarch64", 63, architecture=0x40000028) == KILL_PROCESS


@pytest.mark.parametrize("machine", MACHINES)
def test_the_filter_is_within_the_kernels_bounds(machine: str) -> None:
    lines = program(OWN | THREADS | FILES, machine, PID)
    assert len(lines) < 4096
    assert all(0 <= jump < 256 for line in lines for jump in line[1:3])


@pytest.mark.parametrize("machine", MACHINES)
def test_no_two_calls_have_one_number(machine: str) -> None:
    column = ARCHITECTURES[machine][0]
    numbers = [numbers[column] for numbers in NUMBERS.values() if numbers[column] >= 0]
    assert len(numbers) == len(set(numbers))
