"""A script runs at most two groups ahead of its device."""

from __future__ import annotations

from fake_cuda import World

from pipeswitch.devices.cuda.bindings import Cuda
from pipeswitch.devices.cuda.view import GROUPS_AHEAD, LOOKS_PER_GROUP, RunAhead


def test_two_groups_are_queued_and_no_more() -> None:
    world = World()
    cuda = Cuda(world.runtime, world.driver)
    stream, block = cuda.stream(), cuda.malloc(64)
    ahead = RunAhead(cuda, lambda: stream)
    queue = world.streams[stream]
    for group in range(1, 12):
        for _ in range(LOOKS_PER_GROUP):
            cuda.fill(block, group, 64, stream)  # a layer's kernels
            ahead.look()
        assert queue.enqueued - queue.done <= GROUPS_AHEAD * LOOKS_PER_GROUP
        if group > GROUPS_AHEAD:
            assert queue.enqueued - queue.done == GROUPS_AHEAD * LOOKS_PER_GROUP, "it may run ahead"


def test_a_look_between_two_groups_costs_no_call() -> None:
    world = World()
    ahead = RunAhead(Cuda(world.runtime, world.driver), lambda: 0)
    before = len(world.calls)
    for _ in range(LOOKS_PER_GROUP - 1):
        ahead.look()
    assert len(world.calls) == before


def test_nothing_is_asked_while_the_script_captures_a_graph_of_its_own() -> None:
    world = World()
    stream: list[int | None] = [None]
    ahead = RunAhead(Cuda(world.runtime, world.driver), lambda: stream[0])
    before = len(world.calls)
    for _ in range(4 * LOOKS_PER_GROUP):
        ahead.look()
    assert len(world.calls) == before
    stream[0] = 0
    for _ in range(LOOKS_PER_GROUP):
        ahead.look()
    assert len(world.calls) > before
