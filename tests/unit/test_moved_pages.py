"""A slice that moves to another cpu device: same addresses, same bytes, other memory."""

from __future__ import annotations

import mmap
import os

import pytest
import torch

from pipeswitch.devices.cpu.view import CpuPoolView
from pipeswitch.errors import RemoteProtocolError
from pipeswitch.ipc.board import BOARD_BYTES, new_bell, sealed_memfd
from pipeswitch.ipc.messages import Epoch, MoveTask, Slot, WorkerSettings

PAGE = mmap.PAGESIZE
PAGES = 16  # of each device
SLICE = 3 * PAGE
HERE, THERE = 2 * PAGE, 5 * PAGE


def device() -> list[int]:
    """Training slices, board, a bell."""
    return [sealed_memfd("w", PAGES * PAGE), sealed_memfd("b", BOARD_BYTES), new_bell()]


@pytest.fixture
def view() -> CpuPoolView:
    work, board, bell = device()
    settings = WorkerSettings(slot=Slot(0), device="cpu", arena_bytes=PAGES * PAGE, words=16,
                              pool_bytes=0, threads=1, bell_count=1)  # fmt: skip
    arena = sealed_memfd("models", PAGES * PAGE), work
    return CpuPoolView(settings, arena, board=board, bells=[bell])


def order(size_bytes: int) -> MoveTask:
    return MoveTask(epoch=Epoch(1), device=1, offset_bytes=THERE, size_bytes=size_bytes)


def test_tensors_stay_where_they_are_and_their_bytes_lie_on_the_other_device(
    view: CpuPoolView,
) -> None:
    part = view.slice_bytes(HERE, SLICE)
    part[:] = expected = torch.arange(SLICE) % 251
    address, other = part.data_ptr(), device()
    assert view.move(order(SLICE), other) == SLICE
    assert part.data_ptr() == address
    assert torch.equal(part, expected.to(torch.uint8))
    part[PAGE + 1] = 255
    assert os.pread(other[0], 2, THERE + PAGE) == bytes([PAGE % 251, 255])
    assert os.pread(other[0], THERE, 0) == bytes(THERE)  # nothing beside it
    assert os.pread(other[0], PAGE, THERE + SLICE) == bytes(PAGE)


def test_a_place_that_is_too_small_is_refused_before_anything_is_written(
    view: CpuPoolView,
) -> None:
    view.slice_bytes(HERE, SLICE)[:] = 7
    other = device()
    with pytest.raises(RemoteProtocolError):
        view.move(order(SLICE - PAGE), other)
    assert os.pread(other[0], PAGES * PAGE, 0) == bytes(PAGES * PAGE)
