"""``WorkerThread``: it does work in order on its own thread, and keeps no reference to the work."""

from __future__ import annotations

import functools
import os
import threading
import weakref
from typing import Any

import pytest

from pipeswitch.base.errors import HostStoreFull, PipeSwitchError, ServerUnavailable
from pipeswitch.base.worker_thread import WorkerThread
from pipeswitch.controller.effects import Tracer
from pipeswitch.controller.server_memory import close_soon
from pipeswitch.scheduler.state.events import Token
from pipeswitch.scheduler.timeline import Timeline
from tests.open_files import open_files


def test_what_is_put_before_the_end_is_done_in_order() -> None:
    thread, done = WorkerThread("test-lane"), list[tuple[int, str]]()

    def work(number: int) -> None:
        done.append((number, threading.current_thread().name))

    thread.put(functools.partial(work, 1))
    thread.put(functools.partial(work, 2))
    thread.shutdown()
    assert done == [(1, "test-lane_0"), (2, "test-lane_0")]


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("a bug"), SystemExit(), HostStoreFull("full")]
)
def test_work_that_fails_is_answered_and_the_next_is_done(error: BaseException) -> None:
    thread, answers = WorkerThread("test-lane"), list[PipeSwitchError]()
    done: list[str] = []

    def fails() -> None:
        raise error

    thread.put(fails, answers.append)
    thread.put(fails)
    thread.put(functools.partial(done.append, "next"))
    thread.shutdown()
    assert done == ["next"]
    expected = HostStoreFull if isinstance(error, HostStoreFull) else ServerUnavailable
    assert [type(one) for one in answers] == [expected]


def test_work_that_no_thread_could_begin_is_not_done_later(monkeypatch: pytest.MonkeyPatch) -> None:
    thread, done, answers = WorkerThread("test-lane"), list[str](), list[PipeSwitchError]()
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", no_thread)
        thread.put(functools.partial(done.append, "refused"), answers.append)
    thread.put(functools.partial(done.append, "next"), answers.append)
    thread.shutdown()
    assert done == ["next"]
    assert [type(one) for one in answers] == [ServerUnavailable]


def test_work_for_a_lane_that_is_shut_down_is_answered() -> None:
    thread, answers = WorkerThread("test-lane"), list[PipeSwitchError]()
    thread.put(lambda: None)
    thread.shutdown()
    thread.put(lambda: None, answers.append)
    assert [type(one) for one in answers] == [ServerUnavailable]


def test_an_answer_that_fails_reaches_the_process_and_the_lane_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reports: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", reports.append)
    thread, done = WorkerThread("test-lane"), list[str]()

    def fails(*_: object) -> None:
        raise MemoryError

    thread.put(fails, fails)
    thread.put(functools.partial(done.append, "next"))
    thread.shutdown()
    assert [report.exc_type for report in reports] == [MemoryError]
    assert done == ["next"]


def test_a_timeline_without_a_thread_is_an_error_and_the_next_one_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers: list[Any] = []
    tracer = Tracer(Timeline(), answers.append)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", no_thread)
        tracer.ask(Token(1), 0.0)
    traces = iter([no_thread, lambda *_: {}])
    monkeypatch.setattr(Timeline, "chrome_trace", lambda *_: next(traces)())
    tracer.ask(Token(2), 0.0)
    tracer.ask(Token(3), 0.0)
    tracer.stop()
    errors = [type(one.error) for one in answers]
    assert errors == [ServerUnavailable, ServerUnavailable, type(None)]


def no_thread(*_: Any) -> None:
    raise RuntimeError("can't start new thread")


def test_without_a_thread_files_are_closed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    descriptor = os.memfd_create("closed-soon")
    close_soon([descriptor])
    assert open_files("closed-soon") == 0


def test_work_that_is_done_holds_its_payload_no_longer() -> None:
    class Payload:
        """Stand-in for a large object."""

    thread, is_done, is_looking = WorkerThread("test-lane"), threading.Event(), threading.Event()
    payload = Payload()
    gone = threading.Event()
    weakref.finalize(payload, gone.set)
    thread.put(functools.partial(lambda payload_held: is_done.set(), payload))
    del payload
    assert is_done.wait(10)
    assert gone.wait(10), "nothing else was put, and it is free"
    thread.put(is_looking.set)
    thread.shutdown()
    assert is_looking.is_set()
