"""Failed captures of CUDA graphs, which must not affect later code; torch's state is modelled."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipeswitch.devices.cuda.capture import CaptureBroke, CudaRecorder, no_collector

SLICE = (0, 7)


class Allocators:
    """Model of torch's device and host allocators. Only one capture may record to a pool, and
    ``capture_end`` releases it only if the driver ends the capture (ATen/cuda/CUDAGraph.cpp)."""

    def __init__(self) -> None:
        self.device: set[Any] = set()
        self.host: set[Any] = set()
        self.is_random_usable = True
        self.handles = 100
        self.end_helps = True

    def begin(self, pool: Any) -> None:
        for known in (self.device, self.host):
            if pool in known:
                raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
            known.add(pool)

    def end_device(self, index: int, pool: Any) -> None:
        if pool not in self.device:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        if self.end_helps:
            self.device.discard(pool)

    def new_handle(self) -> Any:
        self.handles += 1
        return (0, self.handles)

    @contextlib.contextmanager
    def use(self, pool: Any) -> Iterator[None]:
        if pool.id in self.device:
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
        yield


@pytest.fixture
def torch_state(monkeypatch: pytest.MonkeyPatch) -> Allocators:
    state = Allocators()

    class Graph:
        def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
            assert capture_error_mode == "thread_local"
            state.begin(pool)
            self.pool, self.is_spoiled = pool, False
            state.is_random_usable = False
            state.current = self  # type: ignore[attr-defined]

        def capture_end(self) -> None:
            if self.is_spoiled:
                raise RuntimeError("operation failed due to a previous error during capture")
            state.device.discard(self.pool)
            state.host.discard(self.pool)
            state.is_random_usable = True

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", state.new_handle)
    monkeypatch.setattr(torch.cuda, "use_mem_pool", state.use)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", state.end_device, raising=False)
    return state


def recorder_over(state: Allocators) -> CudaRecorder:
    stream: Any = SimpleNamespace(synchronize=lambda: None)
    pool: Any = SimpleNamespace(id=SLICE)
    return CudaRecorder(stream, 0, pool)


def spoil(state: Any) -> None:
    state.current.is_spoiled = True
    raise ValueError("a copy to the host")


def test_after_a_failed_capture_the_slice_serves_and_the_next_capture_works(
    torch_state: Allocators,
) -> None:
    recorder = recorder_over(torch_state)
    with pytest.raises(ValueError, match="a copy to the host"):
        recorder.record(lambda: spoil(torch_state))
    assert SLICE not in torch_state.device, "every request in the slice would fail"
    assert torch_state.is_random_usable, "a job's dropout would fail"
    recorder.record(lambda: None)
    assert torch_state.device == set()


def test_a_model_that_fails_in_an_unspoiled_capture_is_mended_too(torch_state: Allocators) -> None:
    recorder = recorder_over(torch_state)

    def fail() -> None:
        raise KeyError("the model's own")

    with pytest.raises(KeyError):
        recorder.record(fail)
    assert torch_state.device == torch_state.host == set()
    recorder.record(lambda: None)


def test_what_cannot_be_mended_ends_the_process(torch_state: Allocators) -> None:
    torch_state.end_helps = False
    with pytest.raises(CaptureBroke) as caught:
        recorder_over(torch_state).record(lambda: spoil(torch_state))
    assert caught.value.is_sticky


def test_nobody_collects_garbage_while_a_task_allocates_in_the_slice() -> None:
    assert gc.isenabled()
    with no_collector():
        assert not gc.isenabled()
        with no_collector():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
