"""A script runs at most two groups ahead of its device; its tensors lie as torch's own would."""

from __future__ import annotations

import torch
from fake_cuda import World

from pipeswitch.devices.cuda.bindings import Cuda
from pipeswitch.devices.cuda.view import GROUPS_AHEAD, LOOKS_PER_GROUP, RunAhead
from workers.training.layout import Area, padded_bytes


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


def test_what_lies_behind_a_small_bias_is_aligned_as_torchs_own_allocator_would() -> None:
    """cuBLASLt takes an operand's alignment for its choice of an algorithm: bits would differ."""
    area = Area("parameters", 0, 4096)
    places = [area.place(str(size), torch.empty(size)) for size in (8, 64, 3, 100)]
    assert [place.offset_bytes % 512 for place in places] == [0, 0, 0, 0]
    assert area.used_bytes == padded_bytes([torch.empty(size) for size in (8, 64, 3, 100)])
