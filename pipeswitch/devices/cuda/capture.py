"""Capturing CUDA graphs with torch, and what torch leaves behind when a capture fails."""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from .bindings import CudaError


class CaptureBroke(CudaError):
    """A capture failed and left this process's torch in a state that nothing mends."""

    @property
    def is_sticky(self) -> bool:
        """True, as for a broken context: the process must exit and be replaced."""
        return True


class CudaRecorder:
    """Captures CUDA graphs on the compute stream, all into one pool: they never overlap in time."""

    def __init__(
        self, stream: torch.cuda.Stream, index: int, slice_pool: torch.cuda.MemPool | None
    ) -> None:
        self._stream = stream
        self._index = index
        self._slice_pool = slice_pool
        self._pool: Any = torch.cuda.graph_pool_handle() if slice_pool is None else slice_pool.id
        self._spoiled: list[torch.cuda.CUDAGraph] = []  # torch may still look at them

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        """Around all captures of one program: a tensor that is freed meanwhile would spoil one."""
        self._stream.synchronize()
        gc.collect()
        with no_collector():
            yield

    def record(self, run: Callable[[], None]) -> Replayable:
        """Capture ``run`` instead of doing it.

        Not with ``torch.cuda.graph``: it empties the cache at every entry.

        Raises:
            CaptureBroke: this process must be replaced.
            RuntimeError, …: what ``run`` or the driver would not do; everything else goes on.
        """
        graph = torch.cuda.CUDAGraph()
        try:
            self._capture(graph, run)
        except Exception:
            self._spoiled.append(graph)
            self._mend()
            raise
        return graph

    def _capture(self, graph: torch.cuda.CUDAGraph, run: Callable[[], None]) -> None:
        with warnings.catch_warnings(), torch.cuda.stream(self._stream):
            warnings.filterwarnings("ignore", "The CUDA Graph is empty")  # a group of views only
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                run()
            except Exception:
                with contextlib.suppress(Exception):  # knows only that the capture was spoiled
                    graph.capture_end()
                raise
            graph.capture_end()

    def _mend(self) -> None:
        """Repair torch's allocators and its random generators after a failed capture.

        ``capture_end`` raises before it has told the allocators that the capture is over. From
        then on every use of its pool fails ("already recording to mempool_id"), every request in
        the slice with it; and random numbers fail until a capture has ended well. So: 1. tell the
        device's allocator what ``capture_end`` did not; 2. the host's cannot be told: captures go
        to another pool, outside of the slice, from now on; 3. capture nothing, which ends well;
        4. enter the slice as a task does.

        Raises:
            CaptureBroke: it did not help.
        """
        end = getattr(torch._C, "_cuda_endAllocateToPool", None)
        if end is not None:
            with contextlib.suppress(RuntimeError):  # "not currently recording": as it should be
                end(self._index, self._pool)
        try:
            self._stream.synchronize()
            self._pool = torch.cuda.graph_pool_handle()
            self._capture(torch.cuda.CUDAGraph(), lambda: None)
            if self._slice_pool is not None:
                with torch.cuda.use_mem_pool(self._slice_pool):
                    pass
        except Exception as error:
            raise CaptureBroke(
                "cudaStreamEndCapture", "broken", f"a failed capture cannot be mended: {error}"
            ) from error

    def free_bytes(self) -> int:
        """Free device memory, to see what captured work costs."""
        return int(torch.cuda.mem_get_info()[0])


@contextlib.contextmanager
def no_collector() -> Iterator[None]:
    """Within, no cycle is collected, on whatever thread: no other code frees a tensor.

    Torch may ask the slice's allocator, which is Python, under its own lock. A thread that
    collects garbage holds the interpreter and would wait for that lock: both for ever.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class Replayable(Protocol):
    """Captured work."""

    def replay(self) -> None:
        """Enqueue it on the current stream."""
        ...
