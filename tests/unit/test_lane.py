"""A lane does its work in order, on its own thread, and keeps none of it."""

from __future__ import annotations

import functools
import threading
import weakref

from pipeswitch.lane import Lane


def test_what_is_put_before_the_start_and_before_the_end_is_done_in_order() -> None:
    lane, done = Lane("test-lane"), list[tuple[int, str]]()

    def work(number: int) -> None:
        done.append((number, threading.current_thread().name))

    lane.put(functools.partial(work, 1))
    assert not lane.is_started
    lane.start()
    lane.put(functools.partial(work, 2))
    lane.stop()
    assert lane.is_started
    assert done == [(1, "test-lane"), (2, "test-lane")]


def test_work_that_is_done_holds_its_payload_no_longer() -> None:
    class Payload:
        """Something large."""

    lane, is_done, is_looking = Lane("test-lane"), threading.Event(), threading.Event()
    payload = Payload()
    gone = threading.Event()
    weakref.finalize(payload, gone.set)
    lane.put(functools.partial(lambda held: is_done.set(), payload))
    del payload
    lane.start()
    assert is_done.wait(10)
    assert gone.wait(10), "nothing else was put, and it is free"
    lane.put(is_looking.set)
    lane.stop()
    assert is_looking.is_set()
