"""Freed memory: a process returns it to the system, whatever it has allocated before."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import threading
from pipeswitch.base.machine import RETURN_BYTES, FreedMemory

def leave_garbage():
    circle = [bytearray(b"x" * (RETURN_BYTES * 4))]
    circle.append(circle)
    small = [bytes(600) for _ in range(RETURN_BYTES // 100)]

def in_thread(function):
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()

def fail_to_allocate():
    large = bytearray(b"x" * (31 << 20))  # when it is freed, glibc keeps more at the top of a heap
    del large
    in_thread(leave_garbage)
    try:
        bytearray(1 << 55)
    except MemoryError:
        pass

memory = FreedMemory()
BEFORE
garbage_bytes = memory._private_bytes() - memory._own_bytes
memory.give_back(memory._next_s)
print(garbage_bytes, memory._private_bytes() - memory._own_bytes)
"""


@pytest.mark.parametrize(
    "before",
    [
        "leave_garbage()",
        "fail_to_allocate(); leave_garbage()",
        "in_thread(leave_garbage)",
        "fail_to_allocate(); in_thread(leave_garbage)",
        "in_thread(fail_to_allocate); leave_garbage()",
    ],
)
def test_garbage_in_circles_and_free_lists_is_given_back(before: str) -> None:
    command = [sys.executable, "-c", SCRIPT.replace("BEFORE", before)]
    run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=250)
    garbage_bytes, left_bytes = map(int, run.stdout.split())
    assert garbage_bytes > 32 << 20
    assert left_bytes < garbage_bytes / 4
