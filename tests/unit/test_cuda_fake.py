"""The fake driver refuses the same calls as the real driver; else tests with it prove nothing."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_cuda import World
from fake_cuda.host_torch import TapeRecorder

from pipeswitch.devices.cuda.bindings import Cuda, CudaError


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def cuda(world: World) -> Cuda:
    bindings = Cuda(world.runtime, world.driver)
    bindings.set_device(0)
    return bindings


def refused(code: str, call: Callable[[], object]) -> None:
    with pytest.raises(CudaError) as caught:
        call()
    assert caught.value.data["code"] == code


def test_a_process_cannot_open_its_own_handle(cuda: Cuda) -> None:
    handle = cuda.export_handle(cuda.malloc(64))
    refused("cudaErrorDeviceUninitialized", lambda: cuda.open_handle(handle))


def test_a_handle_opened_twice_is_one_mapping_and_closed_twice(cuda: Cuda) -> None:
    handle = cuda.export_handle(cuda.malloc(64))
    other = World()
    there = Cuda(other.runtime, other.driver)
    first = there.open_handle(handle)
    assert there.open_handle(handle) == first
    for _ in range(2):
        there.close_handle(first)
    refused("cudaErrorInvalidValue", lambda: there.close_handle(first))


def test_the_driver_interface_wants_a_context_in_this_very_thread(cuda: Cuda) -> None:
    stream, block = cuda.stream(), cuda.malloc(64)
    errors: list[CudaError] = []

    def write(with_device: bool) -> None:
        try:
            if with_device:
                cuda.set_device(0)
            cuda.write_value(stream, block, 1)
        except CudaError as error:
            errors.append(error)

    for with_device in (False, True):
        thread = threading.Thread(target=write, args=(with_device,))
        thread.start()
        thread.join()
    assert [error.data["code"] for error in errors] == ["CUDA_ERROR_INVALID_CONTEXT"]


def test_what_was_destroyed_or_freed_is_no_more(cuda: Cuda) -> None:
    stream, event, block, pinned = cuda.stream(), cuda.event(), cuda.malloc(64), 0
    pinned = cuda.allocate_pinned(64)
    cuda.destroy_stream(stream)
    cuda.destroy_event(event)
    cuda.free(block)
    cuda.free_pinned(pinned)
    for call in (
        lambda: cuda.synchronize(stream),
        lambda: cuda.destroy_stream(stream),
        lambda: cuda.record(event, 0),
        lambda: cuda.wait(event),
        lambda: cuda.destroy_event(event),
    ):
        refused("cudaErrorInvalidResourceHandle", call)
    refused("cudaErrorInvalidValue", lambda: cuda.free(block))
    refused("cudaErrorInvalidValue", lambda: cuda.free_pinned(pinned))
    refused("cudaErrorInvalidValue", lambda: cuda.fill(block, 0, 64, 0))


def test_memory_is_not_unpinned_under_a_copy(cuda: Cuda) -> None:
    stream, block, pinned = cuda.stream(), cuda.malloc(64), cuda.allocate_pinned(64)
    cuda.copy_to_device(block, pinned, 64, stream)
    with pytest.raises(AssertionError, match="cudaFreeHost: a queued copy"):
        cuda.free_pinned(pinned)
    cuda.synchronize(stream)
    cuda.free_pinned(pinned)


def test_a_copy_into_pageable_memory_has_run_when_the_call_returns(cuda: Cuda) -> None:
    stream, block = cuda.stream(), cuda.malloc(4)
    cuda.fill(block, 7, 4, stream)
    target = ctypes.create_string_buffer(4)
    cuda.copy_to_host(ctypes.addressof(target), block, 4, stream)
    assert target.raw == bytes([7] * 4)


def test_a_capturing_thread_must_not_wait_and_others_may(world: World, cuda: Cuda) -> None:
    stream = cuda.stream()

    def capture() -> None:
        refused("cudaErrorStreamCaptureUnsupported", lambda: cuda.synchronize(stream))
        refused("cudaErrorStreamCaptureUnsupported", lambda: cuda.malloc(64))
        thread = threading.Thread(target=lambda: cuda.synchronize(stream))
        thread.start()
        thread.join()

    TapeRecorder(world).record(capture)
    cuda.synchronize(stream)


def test_after_a_kernels_assertion_no_call_of_either_interface_works(
    world: World, cuda: Cuda
) -> None:
    stream, block = cuda.stream(), cuda.malloc(64)
    world.break_down("cudaErrorAssert")
    refused("cudaErrorAssert", lambda: cuda.synchronize(stream))
    refused("CUDA_ERROR_ASSERT", lambda: cuda.wait_value(stream, block, 1))
    assert not cuda.still_works()


def test_what_another_process_has_allocated_is_not_free_until_it_is_gone(tmp_path: Path) -> None:
    worlds = [World(device_bytes=1 << 20) for _ in range(2)]
    cudas = [Cuda(world.runtime, world.driver) for world in worlds]
    block = cudas[0].malloc(600 << 10)
    for world in worlds:
        world.ledger = tmp_path
    worlds[0].note_use()
    (tmp_path / str(os.getpid())).rename(tmp_path / str(os.getppid()))  # as if by another process
    assert cudas[1].memory_info() == (424 << 10, 1 << 20)
    refused("cudaErrorMemoryAllocation", lambda: cudas[1].malloc(500 << 10))
    (tmp_path / str(os.getppid())).rename(tmp_path / "4194305")  # no process has such an id
    cudas[1].malloc(500 << 10)
    cudas[0].free(block)
