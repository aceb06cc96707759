"""The gate's table, row by row, and its two threads in every order."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeswitch.errors import TaskPreempted
from pipeswitch.ipc.gate import Gate, GateState, Where

S = GateState


class Recorder:
    """A gate with what it acknowledged."""

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
    """Runs one blocking call of the main thread; joined, with what it raised."""

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


def test_nothing_asked_means_nothing_happens(box: Recorder) -> None:
    gate = running(box)
    assert not gate.asked
    gate.check("forward")
    assert gate.state is S.RUNNING


def test_a_script_computes_only_after_its_first_grant(box: Recorder) -> None:
    main = Main(box.gate.enter)
    box.gate.grant(1)
    assert main.join() is None
    assert box.gate.state is S.RUNNING


def test_a_stop_parks_at_the_next_check_and_a_larger_turn_goes_on(box: Recorder) -> None:
    gate = running(box)
    gate.request_stop(1, 2)
    assert gate.state is S.STOPPING
    assert box.parked == []
    main = Main(lambda: gate.check("backward"))
    assert box.told.acquire(timeout=20)
    assert box.parked == [(1, 2, "backward")]
    gate.grant(3)
    assert main.join() is None
    assert gate.turn == 3


def test_away_a_stop_is_acknowledged_at_once(box: Recorder) -> None:
    gate = running(box)
    gate.leave("loader")
    gate.request_stop(1, 2)
    assert box.parked == [(1, 2, "loader")]
    assert gate.state is S.STOPPED
    main = Main(gate.enter)
    gate.grant(3)
    assert main.join() is None
    assert gate.state is S.RUNNING


def test_leaving_acknowledges_a_pending_stop_and_does_not_block(box: Recorder) -> None:
    gate = running(box)
    gate.request_stop(1, 2)
    gate.leave()
    assert box.parked == [(1, 2, "loader")]
    assert gate.state is S.STOPPED


def test_a_check_after_leaving_takes_the_device_again(box: Recorder) -> None:
    gate = running(box)
    gate.leave()
    gate.check("forward")
    assert gate.state is S.RUNNING


def test_a_stop_is_acknowledged_once_however_often_it_comes(box: Recorder) -> None:
    gate = running(box)
    gate.request_stop(1, 2)
    gate.request_stop(1, 2)
    gate.leave()
    gate.request_stop(1, 2)
    assert box.parked == [(1, 2, "loader")]


def test_stops_and_grants_of_older_turns_are_dropped(box: Recorder) -> None:
    gate = running(box)
    gate.grant(5)
    gate.grant(4)
    gate.request_stop(1, 2)
    gate.request_stop(4, 6)
    assert gate.turn == 5
    assert gate.state is S.RUNNING
    assert not gate.asked


def test_a_stop_that_overtakes_its_grant_is_acknowledged_when_the_turn_comes(box: Recorder) -> None:
    gate = running(box)
    gate.leave()
    gate.request_stop(1, 2)
    gate.request_stop(3, 4)
    assert box.parked == [(1, 2, "loader")]
    gate.grant(3)
    assert box.parked == [(1, 2, "loader"), (3, 4, "loader")]
    assert gate.state is S.STOPPED


def test_a_kept_stop_for_a_turn_that_never_came_is_forgotten(box: Recorder) -> None:
    gate = running(box)
    gate.leave()
    gate.request_stop(2, 3)
    gate.grant(4)
    assert box.parked == []
    assert gate.state is S.AWAY


def test_a_grant_that_overtakes_the_acknowledgement_is_taken_up_after_it(box: Recorder) -> None:
    gate = running(box)
    gate.request_stop(1, 2)
    gate.grant(3)
    assert gate.state is S.STOPPING
    gate.check("forward")  # does not block
    assert box.parked == [(1, 2, "forward")]
    assert (gate.state, gate.turn) == (S.RUNNING, 3)


def test_no_check_parks_or_raises_inside_the_optimizer_step(box: Recorder) -> None:
    gate = running(box)
    gate.in_optimizer_step = True
    gate.request_stop(1, 2)
    gate.check("forward")
    assert box.parked == []
    gate.request_evict()
    gate.check("forward")
    gate.in_optimizer_step = False
    with pytest.raises(TaskPreempted):
        gate.check("boundary")
    assert box.parked == [(1, 2, "boundary")]


def test_an_eviction_wakes_a_parked_thread(box: Recorder) -> None:
    gate = running(box)
    gate.request_stop(1, 2)
    main = Main(lambda: gate.check("forward"))
    assert box.told.acquire(timeout=20)
    gate.request_evict()
    assert isinstance(main.join(), TaskPreempted)
    gate.grant(3)
    assert gate.state is S.AWAY
    gate.request_stop(3, 4)
    assert box.parked == [(1, 2, "forward"), (3, 4, "forward")]


def test_a_swallowed_preemption_comes_again_and_commits_once(box: Recorder) -> None:
    gate = running(box)
    commits: list[int] = []
    gate.before_unwind = lambda: commits.append(1)
    gate.request_evict()
    for call in (gate.check, gate.enter, lambda: gate.check("backward")):
        with pytest.raises(TaskPreempted):
            call()
    assert commits == [1]


def test_leaving_never_raises_while_the_script_unwinds(box: Recorder) -> None:
    gate = running(box)
    gate.request_evict()
    gate.leave()
    gate.request_stop(1, 2)
    assert box.parked == [(1, 2, "loader")]


operations = st.lists(
    st.sampled_from(
        ["stop", "stop old", "stop future", "grant", "grant old", "check", "leave", "evict",
         "optimizer on", "optimizer off"]
    ),
    max_size=40,
)  # fmt: skip


@given(operations)
def test_any_order_keeps_the_books(plan: list[str]) -> None:
    """One thread plays both; a check that would block is skipped.

    Each turn is acknowledged at most once; no acknowledgement inside the optimizer; a turn is
    held exactly in RUNNING, STOPPING and AWAY.
    """
    box = Recorder()
    gate = box.gate
    newest = 0
    evicted = False
    for step in plan:
        before = len(box.parked)
        match step:
            case "stop":
                gate.request_stop(gate.turn, newest + 1)
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
                gate.in_optimizer_step = gate.state in (S.RUNNING, S.STOPPING)
            case "optimizer off":
                gate.in_optimizer_step = False
            case _:
                blocks = gate.state is S.STOPPED or (
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
        held = gate.state in (S.RUNNING, S.STOPPING, S.AWAY)
        assert held == (gate.turn > 0 and gate.turn not in turns)


@pytest.mark.parametrize("seed", range(4))
def test_two_threads_racing_acknowledge_every_stop_once(seed: int) -> None:
    """The main thread checks, leaves, enters; the other stops and grants without a pause."""
    box = Recorder()
    gate = box.gate
    stops = 100
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


def test_a_parked_thread_is_called_for_a_move_and_goes_on_waiting(box: Recorder) -> None:
    gate, moved = running(box), threading.Semaphore(0)
    gate.request_stop(1, 2)
    main = Main(gate.check)
    assert box.told.acquire(timeout=20)
    for _ in range(2):
        gate.request_move(lambda: moved.release())
        assert moved.acquire(timeout=20)
    assert gate.state is S.PARKED
    gate.grant(3)
    assert main.join() is None
    assert [turn for turn, *_ in box.parked] == [1]


def test_one_that_computes_is_called_for_a_move_at_its_next_check_outside_the_optimizer(
    box: Recorder,
) -> None:
    gate, calls = running(box), list[int]()
    gate.request_move(lambda: calls.append(gate.turn))
    gate.in_optimizer_step = True
    gate.check()
    assert not calls
    gate.in_optimizer_step = False
    gate.check()
    gate.check()
    assert calls == [1]
    assert not gate.asked


def test_an_eviction_drops_a_move_that_was_not_called(box: Recorder) -> None:
    gate, calls = running(box), list[int]()
    gate.request_move(lambda: calls.append(1))
    gate.request_evict()
    gate.request_move(lambda: calls.append(2))
    with pytest.raises(TaskPreempted):
        gate.check()
    assert not calls
