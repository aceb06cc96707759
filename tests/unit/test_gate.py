"""The gate, where a script stops: each row of its table, and its two threads in every order."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeswitch.base.errors import TaskPreempted
from pipeswitch.ipc.gate import Gate, GateState, Where

S = GateState


class Recorder:
    """Gate, with a list of the stops that it has acknowledged."""

    def __init__(self) -> None:
        self.parked: list[tuple[int, int, Where]] = []
        self.told = threading.Semaphore(0)
        self.gate = Gate(self._on_parked)

    def _on_parked(self, turn: int, next_turn: int, where: Where) -> None:
        self.parked.append((turn, next_turn, where))
        self.told.release()


@pytest.fixture
def box() -> Recorder:
    return Recorder()


def running(box: Recorder) -> Gate:
    box.gate.grant(1)
    box.gate.enter()
    assert box.gate.state is S.RUNNING
    return box.gate


class Main:
    """Thread with one blocking call; ``join`` returns the exception that the call raised."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.raised: BaseException | None = None
        self._call = call
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._call()
        except BaseException as error:
            self.raised = error

    def join(self) -> BaseException | None:
        self._thread.join(timeout=20)
        assert not self._thread.is_alive(), "the main thread is stuck"
        return self.raised


@pytest.mark.parametrize(
    ("steps", "parked", "state"),
    [
        ("check", "", S.RUNNING),
        ("leave check", "", S.RUNNING),  # the check takes the turn again
        ("leave stop:1 grant:3 check", "1 loader", S.RUNNING),  # AWAY, so it stops at once
        ("stop:1", "", S.STOPPING),
        ("stop:1 leave", "1 loader", S.STOPPED),  # ``leave`` does not block
        ("stop:1 stop:1 leave stop:1", "1 loader", S.STOPPED),  # a repeated stop counts once
        ("grant:5 grant:4 stop:1 stop:4 check", "", S.RUNNING),  # older turns are dropped
        # A stop that overtakes its grant is acknowledged when its turn begins, or dropped.
        ("leave stop:1 stop:3", "1 loader", S.STOPPED),
        ("leave stop:1 stop:3 grant:3", "1 loader, 3 loader", S.STOPPED),
        ("leave stop:2 grant:4", "", S.AWAY),
        # A grant that arrives before the stop is acknowledged is used afterwards; no check blocks.
        ("stop:1 grant:3", "", S.STOPPING),
        ("stop:1 grant:3 check", "1 forward", S.RUNNING),
        # In the optimizer's step, no check parks or raises. Leaving never raises.
        ("optimizer stop:1 check evict check", "", S.STOPPING),
        ("optimizer stop:1 check evict check over raises", "1 forward", S.STOPPED),
        ("evict leave stop:1", "1 loader", S.STOPPED),
        # A stop for another job takes effect at the step's end, or at a second stop or an evict.
        ("later:1 check grant:3 check", "", S.STOPPING),
        ("later:1 check boundary grant:3 leave", "1 loader", S.AWAY),
        ("later:1 check leave", "1 loader", S.STOPPED),
        ("leave later:1", "1 loader", S.STOPPED),
        ("later:1 grant:3 stop:1 check", "1 forward", S.RUNNING),
        ("stop:1 grant:3 later:1 check", "1 forward", S.RUNNING),
        ("later:1 evict raises", "1 forward", S.STOPPED),
        ("later:1 leave grant:3 stop:3 grant:5 check", "1 loader, 3 loader", S.RUNNING),
        # A device that stops in enqueued work does so at once, unless the queue must end.
        ("holds optimizer stop:1 check", "1 stream", S.HELD),
        ("holds stop:1 grant:3 stop:3 stop:3 grant:5 check", "1 stream, 3 stream", S.RUNNING),
        ("holds stop:3 grant:3", "3 stream", S.HELD),
        ("holds stop:1 leave", "1 stream", S.STOPPED),
        ("holds stop:1 leave grant:3 check", "1 stream", S.RUNNING),
        ("holds later:1 check", "", S.STOPPING),
        ("holds later:1 stop:1", "1 stream", S.HELD),
        ("holds stop:1 evict raises grant:3", "1 stream", S.AWAY),
        ("holds optimizer stop:1 evict check over raises", "1 stream", S.STOPPED),
        ("holds evict stop:1 raises", "1 forward", S.STOPPED),
    ],
)
def test_a_turn_is_given_up_where_it_is_asked_for(
    box: Recorder, steps: str, parked: str, state: GateState
) -> None:
    """``stop:1`` asks the job to give up turn 1 at once, ``later:1`` at the end of the step."""
    gate = running(box)
    for step in steps.split():
        what, _, turn = step.partition(":")
        match what:
            case "stop" | "later":
                gate.request_stop(int(turn), int(turn) + 1, at_boundary=what == "later")
            case "grant":
                gate.grant(int(turn))
            case "boundary":
                gate.check("boundary")
            case "optimizer" | "over":
                gate.in_optimizer_step = what == "optimizer"
            case "raises":
                with pytest.raises(TaskPreempted):
                    gate.check("forward")
            case "check":
                gate.check("forward")
            case "leave":
                gate.leave()
            case "holds":
                gate.holds = True
            case _:
                gate.request_evict()
    turns_parked = [(turn, next_turn, where) for turn, next_turn, where in box.parked]
    expected = [one.split() for one in parked.split(", ") if one]
    assert turns_parked == [(int(turn), int(turn) + 1, where) for turn, where in expected]
    assert gate.state is state


def test_one_that_was_away_says_once_that_it_is_back_or_that_others_go_first(box: Recorder) -> None:
    gate, calls, is_told = running(box), list[tuple[int, bool]](), threading.Semaphore(0)
    gate.on_back = lambda *arguments: (calls.append(arguments), is_told.release())
    gate.on_enter = lambda: calls.append((0, True))
    gate.pause(0.0)  # has no effect while the script computes
    gate.leave("copies")
    gate.pause(0.0)
    assert gate.allows_copies
    gate.request_stop(1, 2, at_boundary=True)
    assert gate.allows_copies  # another job computes, which copies do not disturb
    main = Main(gate.enter)
    for _ in range(2):
        assert is_told.acquire(timeout=20)
    gate.grant(3)
    assert main.join() is None
    gate.check()
    gate.leave("copies")
    gate.enter()
    gate.leave("copies")
    gate.request_stop(3, 4)
    assert not gate.allows_copies  # a request computes
    assert box.parked == [(1, 2, "copies"), (3, 4, "copies")]
    assert calls == [(1, True), (1, False), (0, True), (0, True)], "it entered twice"


def test_a_held_thread_waits_at_its_next_check_and_then_its_slice_can_be_hidden(
    box: Recorder,
) -> None:
    gate, hidden = running(box), threading.Semaphore(0)
    gate.holds, gate.on_back = True, lambda *_: box.parked.append((0, 0, "loader"))
    for turn in (1, 3):  # the second stop arrives while the thread waits for its wake-up
        gate.request_stop(turn, turn + 1)
        gate.request_hide(hidden.release)
        main = Main(lambda: gate.check("backward"))
        assert hidden.acquire(timeout=20), "it waits, so its slice is free"
        gate.request_hide(None)
        gate.grant(turn + 2)
        assert main.join() is None
    assert (gate.state, box.parked) == (S.RUNNING, [(1, 2, "stream"), (3, 4, "stream")])


@pytest.mark.parametrize("is_evicted", [False, True])
def test_a_parked_thread_goes_on_with_a_larger_turn_or_is_woken_by_its_eviction(
    box: Recorder, is_evicted: bool
) -> None:
    first = Main(box.gate.enter)  # blocks until the script's first grant
    box.gate.grant(1)
    assert first.join() is None
    gate = box.gate
    gate.request_stop(1, 2)
    main = Main(lambda: gate.check("backward"))
    assert box.told.acquire(timeout=20)
    if is_evicted:
        gate.request_evict()
        assert isinstance(main.join(), TaskPreempted)
        gate.grant(3)
        assert gate.state is S.AWAY
        gate.request_stop(3, 4)
        assert box.parked == [(1, 2, "backward"), (3, 4, "backward")]
    else:
        gate.grant(3)
        assert main.join() is None
        assert (gate.state, gate.turn) == (S.RUNNING, 3)
        assert box.parked == [(1, 2, "backward")]


def test_a_swallowed_preemption_comes_again_and_commits_once(box: Recorder) -> None:
    gate = running(box)
    commits: list[int] = []
    gate.before_unwind = lambda: commits.append(1)
    gate.request_evict()
    for call in (gate.check, gate.enter, lambda: gate.check("backward")):
        with pytest.raises(TaskPreempted):
            call()
    assert commits == [1]


operations = st.lists(
    st.sampled_from(
        [
            "stop",
            "stop later",
            "stop old",
            "stop future",
            "grant",
            "grant old",
            "check",
            "leave",
            "evict",
            "optimizer on",
            "optimizer off",
        ]
    ),
    max_size=40,
)


@given(operations, st.booleans())
def test_any_order_keeps_the_books(plan: list[str], holds: bool) -> None:
    """Make the moves of both threads in one thread, but skip checks that would block.

    Each turn must be acknowledged at most once, by no check in the optimizer's step. The gate
    must have a turn exactly in the states RUNNING, STOPPING and AWAY.
    """
    box = Recorder()
    gate = box.gate
    gate.holds = holds
    newest = 0
    evicted = False
    for step in plan:
        before = len(box.parked)
        match step:
            case "stop":
                gate.request_stop(gate.turn, newest + 1)
            case "stop later":
                gate.request_stop(gate.turn, newest + 1, at_boundary=True)
            case "stop old":
                gate.request_stop(gate.turn - 1, newest + 1)
            case "stop future":
                gate.request_stop(newest + 1, newest + 2)
            case "grant":
                newest += 2
                gate.grant(newest)
            case "grant old":
                gate.grant(newest - 1)
            case "leave":
                gate.leave()
            case "evict":
                evicted = True
                gate.request_evict()
            case "optimizer on":
                gate.in_optimizer_step = gate.state in (S.RUNNING, S.STOPPING, S.HELD)
            case "optimizer off":
                gate.in_optimizer_step = False
            case _:
                blocks = gate.state in (S.STOPPED, S.HELD) or (
                    gate.state is S.STOPPING and newest <= gate.turn
                )
                if gate.in_optimizer_step or evicted or not blocks:
                    try:
                        gate.check("forward")
                    except TaskPreempted:
                        assert evicted
                    if gate.in_optimizer_step:
                        assert len(box.parked) == before
        turns = [turn for turn, _, _ in box.parked]
        assert turns == sorted(set(turns)), "acknowledged twice, or out of order"
        is_held = gate.state in (S.RUNNING, S.STOPPING, S.AWAY)
        assert is_held == (gate.turn > 0 and gate.turn not in turns)


@pytest.mark.parametrize("holds", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_two_threads_racing_acknowledge_every_stop_once(seed: int, holds: bool) -> None:
    """One thread checks, leaves and enters, while the other one stops and grants continuously."""
    box = Recorder()
    gate = box.gate
    gate.holds, stops = holds, 100
    done = threading.Event()
    places: tuple[Where, ...] = ("forward", "backward", "boundary")

    def script() -> None:
        turn = seed
        while not done.is_set():
            turn += 1
            gate.check(places[turn % 3])
            if turn % (2 + seed) == 0:
                gate.leave()

    main = Main(script)
    for i in range(stops):
        gate.grant(2 * i + 1)
        gate.request_stop(2 * i + 1, 2 * i + 2)
        assert box.told.acquire(timeout=20), "a stop was lost"
    done.set()
    gate.grant(2 * stops + 1)
    assert main.join() is None
    assert [turn for turn, _, _ in box.parked] == [2 * i + 1 for i in range(stops)]


def test_an_evicted_thread_that_has_the_turn_goes_on_to_the_end_of_its_step(box: Recorder) -> None:
    gate, body = running(box), [True]
    gate.finishes_step = lambda: bool(body)
    gate.request_evict()
    gate.check("backward")
    assert not gate.is_unwinding
    gate.leave("copies")
    gate.enter()
    assert gate.state is S.RUNNING, "it computes, so it has the turn"
    body.clear()
    with pytest.raises(TaskPreempted):
        gate.check()
    assert gate.is_unwinding
    gate.finishes_step = lambda: True
    with pytest.raises(TaskPreempted):  # raised again, because the script caught the first one
        gate.check()


def test_an_evicted_thread_without_the_turn_computes_no_more(box: Recorder) -> None:
    gate = running(box)
    gate.finishes_step = lambda: True
    gate.request_stop(1, 2)
    gate.request_evict()
    with pytest.raises(TaskPreempted):
        gate.check()
    assert [turn for turn, *_ in box.parked] == [1]


# -- hiding of the slice -------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["parked", "stopped", "away"])
def test_a_slice_is_hidden_once_the_main_thread_waits(box: Recorder, where: str) -> None:
    gate, hidden = running(box), threading.Semaphore(0)
    if where == "parked":
        gate.request_stop(1, 0)
    else:
        gate.leave()
        if where == "stopped":
            gate.request_stop(1, 0)
        gate.request_hide(hidden.release)
        assert not hidden.acquire(blocking=False), "the script may use its slice"
        gate.request_stop(1, 0)
    main = Main(gate.enter if where != "parked" else gate.check)
    assert box.told.acquire(timeout=20)
    if where == "parked":
        gate.request_hide(hidden.release)
    assert hidden.acquire(timeout=20)
    gate.request_hide(None)
    gate.grant(2)
    assert main.join() is None
    assert gate.state is S.RUNNING
    assert not hidden.acquire(blocking=False)


@pytest.mark.parametrize("is_evicted", [False, True], ids=["granted", "evicted"])
def test_nothing_ends_the_wait_of_a_thread_whose_slice_is_hidden(
    box: Recorder, is_evicted: bool
) -> None:
    gate, hidden = running(box), threading.Semaphore(0)
    is_shown, goes_on = threading.Event(), []
    gate.before_unwind = lambda: goes_on.append(is_shown.is_set())

    def waits() -> None:
        gate.check()
        goes_on.append(is_shown.is_set())

    gate.request_stop(1, 0)
    gate.request_hide(hidden.release)
    main = Main(waits)
    assert hidden.acquire(timeout=20)
    if is_evicted:
        gate.request_evict()
    else:
        gate.grant(2)
    is_shown.set()
    gate.request_hide(None)
    assert isinstance(main.join(), TaskPreempted if is_evicted else type(None))
    assert goes_on == [True]


def test_a_hide_that_was_not_answered_can_be_taken_back(box: Recorder) -> None:
    gate, hidden = running(box), []
    gate.leave()
    gate.request_hide(lambda: hidden.append(1))
    gate.request_hide(None)
    gate.request_stop(1, 0)
    main = Main(gate.enter)
    assert box.told.acquire(timeout=20)
    gate.grant(2)
    assert main.join() is None
    assert not hidden


def test_an_exception_of_a_signal_handler_leaves_the_gate_only_when_the_slice_is_shown() -> None:
    """A script may set a timer whose handler raises, while its slice is hidden or could be."""

    class Alarm(Exception):
        pass

    class Alarming(threading.Condition):
        alarms = 0

        def wait(self, timeout: float | None = None) -> bool:
            is_woken = super().wait(timeout)
            if self.alarms:
                self.alarms -= 1
                raise Alarm
            return is_woken

    def alarm() -> None:
        with changed:
            changed.alarms += 1
            changed.notify_all()

    changed = Alarming(threading.RLock())
    seen: list[str] = []
    gate = Gate(lambda *_: seen.append("parked"), changed)
    gate.grant(1)
    gate.enter()
    gate.request_stop(1, 2)

    def script() -> None:
        try:
            gate.check()
        except Alarm:
            seen.append("alarm")

    for is_hidden in (True, False):
        thread = threading.Thread(target=script)
        thread.start()
        hidden = threading.Event()
        if is_hidden:
            gate.request_hide(hidden.set)
            assert hidden.wait(30.0)
        alarm()
        if is_hidden:
            thread.join(0.05)
            assert thread.is_alive()
            gate.request_hide(None)
        thread.join(30.0)
        assert not thread.is_alive()
        assert seen.pop() == "alarm"
        if not is_hidden:
            gate.request_hide(hidden.set)
            assert not hidden.is_set()
