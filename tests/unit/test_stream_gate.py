"""A held stream over fake bindings: the GPU stops between two marks, and no CUDA call opens it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from fake_cuda import Stream, World

from pipeswitch.controller.device_effects import DeviceEffects
from pipeswitch.devices.cuda.bindings import Cuda
from pipeswitch.devices.cuda.stream_gate import LOOKS_PER_GROUP, StreamGate
from pipeswitch.ipc.control_page import BOARD_BYTES, MARKS, MAX_SLOTS, RUN, Board, sealed_memfd
from pipeswitch.ipc.messages.base import OpId, Slot, Turn
from pipeswitch.scheduler.state import events as ev

SLOT = 3


class Script:
    """Training script's thread whose kernels fill one byte: ``done`` is the last one that ran."""

    def __init__(self) -> None:
        self.world = World()
        self.cuda = Cuda(self.world.runtime, self.world.driver)
        self.board = Board(sealed_memfd("page", BOARD_BYTES))
        self.stream: int | None = self.cuda.stream()
        advance = self.world.advance
        self.gate = StreamGate(self.cuda, self.board, SLOT, lambda: self.stream, advance)
        self._memory = self.cuda.malloc(1)
        self.enqueued = 0

    def group(self) -> None:
        """Enqueue a mark and the kernel behind it."""
        self.gate.mark()
        self.enqueued += 1
        self.cuda.fill(self._memory, self.enqueued, 1, self.stream or 0)

    @property
    def done(self) -> int:
        return self.world.bytes_at(self._memory, 1)[0]

    def queue(self, stream: int | None = None) -> Stream:
        return self.world.streams[stream or self.stream or 0]


@pytest.fixture
def script() -> Iterator[Script]:
    made = Script()
    yield made
    made.gate.release()
    made.cuda.synchronize_device()
    made.cuda.unregister(made.board.address)


def test_the_words_of_all_slots_are_on_the_page_and_the_halves_do_not_mix() -> None:
    board = Board(sealed_memfd("page", BOARD_BYTES))
    assert (MARKS + MAX_SLOTS) * 8 <= BOARD_BYTES
    board._words[MARKS + 1] = (0xFFFF_FFFE << 32 | 0xFFFF_FFFF) - (1 << 64)
    assert board.marks(1) == (0xFFFF_FFFF, 0xFFFF_FFFE)
    assert board.marks(0) == board.marks(2) == (0, 0)


def test_a_mark_is_a_write_a_wait_and_a_write_and_only_every_fourth_look_makes_one(
    script: Script,
) -> None:
    script.world.calls.clear()
    for _ in range(2 * LOOKS_PER_GROUP):
        script.gate.look()
    write, wait = "cuStreamWriteValue32", "cuStreamWaitValue32"
    assert [name for name, _ in script.world.calls] == 2 * [write, wait, write]
    assert script.board.marks(SLOT) == (0, 0)
    script.world.advance()
    assert script.board.marks(SLOT) == (2, 2)
    script.stream = None  # the script captures a graph
    script.gate.look()
    script.gate.leave("loader")
    assert len(script.world.calls) == 6


@pytest.mark.parametrize("steps", range(30))
def test_a_stop_lets_the_running_group_end_and_calls_no_cuda(script: Script, steps: int) -> None:
    """With a full launch queue a call would wait until somebody else opens the stream."""
    for _ in range(9):
        script.group()
    for _ in range(steps):  # of a mark's three operations and its kernel, again and again
        script.queue().step()
    passed, calls = (steps + 2) // 4, len(script.world.calls)
    assert script.gate.hold()
    assert (script.done, script.board.marks(SLOT)) == (passed, (passed + 1, passed))
    script.gate.release()
    assert len(script.world.calls) == calls
    script.world.advance()
    assert script.done == 9


def test_a_group_longer_than_the_limit_ends_later_and_the_gpu_stops_behind_it(
    script: Script,
) -> None:
    """A replayed graph of a whole step, for example, is one group: it has no mark inside."""
    script.gate.enter()
    script.gate.mark()
    word = script.cuda.malloc(4)
    script.cuda.wait_value(script.stream or 0, word, 1)  # a kernel that does not end yet
    script.group()
    script.world.advance()
    assert not script.gate.hold(limit_s=0.0), "the request gets its turn all the same"
    other = script.cuda.stream()
    script.cuda.write_value(other, word, 1)
    assert script.gate.hold()
    assert (script.done, script.board.marks(SLOT)) == (0, (2, 1))


def test_a_stop_that_the_controller_had_to_help_holds_the_stream_again(script: Script) -> None:
    """The script's thread kept the interpreter's lock while it waited for its full queue."""
    script.gate.enter()
    script.gate._pause = lambda _: script.board.write_run(SLOT, True)
    assert not script.gate.hold(limit_s=0.001)
    script.group()
    script.world.advance()
    assert (script.done, script.board.marks(SLOT)) == (0, (1, 0))


@pytest.mark.parametrize(("now", "of_script"), [(7, 7), (8, 7), (8, 0)])
def test_the_controller_opens_no_stream_that_has_stopped_in_time(now: int, of_script: int) -> None:
    board, target = Board(sealed_memfd("page", BOARD_BYTES)), ev.Address("worker", 0, Slot(SLOT))
    board.write_turn(now)  # 8: the script has passed its turn on
    context: Any = SimpleNamespace(
        shares=[SimpleNamespace(control_page=board)], memory=None, children=None, take=None
    )
    sizes: Any = None
    interrupt = ev.Interrupt(target, OpId(5), Turn(of_script))
    DeviceEffects(context, 0, sizes, "cuda:0").perform(interrupt)
    assert (board.stop(SLOT), board._words[RUN + SLOT]) == (5, of_script in (0, now))


def test_a_script_that_is_away_is_held_when_its_queue_is_empty(script: Script) -> None:
    assert script.gate.hold(limit_s=0.0), "it has enqueued nothing"
    script.gate.release()
    script.gate.enter()
    script.gate.mark()
    script.world.advance()
    assert not script.gate.hold(limit_s=0.0), "it may enqueue a kernel now"
    script.gate.release()
    script.gate.leave("copies")
    assert script.gate.has_queue()
    script.world.advance()
    assert script.gate.hold(limit_s=0.0)
    assert not script.gate.has_queue()
    script.gate.enter()
    assert not script.gate.hold(limit_s=0.0), "it is back, though no layer has run"


def test_reading_a_value_while_held_blocks_until_the_release(script: Script) -> None:
    for _ in range(3):
        script.group()
    script.gate.hold()
    item = threading.Thread(target=script.cuda.synchronize, args=(script.stream,), daemon=True)
    item.start()
    script.world.advance()
    assert (script.done, item.is_alive()) == (0, True)
    script.gate.release()
    item.join(20)
    assert (script.done, item.is_alive()) == (3, False)


def test_a_script_runs_one_step_ahead_of_the_gpu_and_no_more(script: Script) -> None:
    for step in range(1, 6):
        script.group()
        script.gate.leave("copies")
        script.gate.leave("loader")
        assert script.done == step - 1
    assert script.gate.waits == 4


def test_every_stream_on_which_layers_run_is_held(script: Script) -> None:
    first = script.stream
    script.group()
    script.stream = script.cuda.stream()
    script.group()
    other = script.stream
    script.stream = first
    script.group()
    assert script.gate.hold()
    assert script.done == 0
    assert script.queue(other).done == 0
    script.gate.release()
    script.world.advance()
    assert script.done == 3
    assert script.board.marks(SLOT) == (2, 2), "only the first stream reports"


def test_a_process_ends_though_its_stream_is_held(script: Script) -> None:
    script.group()
    script.gate.hold()
    script.gate.release(for_good=True)
    script.gate.hold()  # a stop that arrives at the end
    script.cuda.synchronize_device()
    assert script.done == 1
