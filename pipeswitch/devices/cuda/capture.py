"""Capture of CUDA graphs with torch, and repair of torch's state after a failed capture."""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from .bindings import CudaError


class CaptureBroke(CudaError):
    """Error of a failed capture after which torch in this process could not be repaired."""

    @property
    def is_sticky(self) -> bool:
        """True, as for a broken context: the process must exit and be replaced."""
        return True


class CudaRecorder:
    """Recorder of CUDA graphs on the compute stream. Graphs never overlap, so they share a pool."""

    def __init__(
        self, stream: torch.cuda.Stream, index: int, slice_pool: torch.cuda.MemPool | None
    ) -> None:
        self._stream = stream
        self._index = index
        self._slice_pool = slice_pool
        self._pool: Any = torch.cuda.graph_pool_handle() if slice_pool is None else slice_pool.id
        self._spoiled: list[torch.cuda.CUDAGraph] = []  # kept, because torch may still use them

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        """Enclose all captures of a program; prevent garbage collection, which would spoil them."""
        self._stream.synchronize()
        gc.collect()
        with no_collector():
            yield

    def record(self, run: Callable[[], None]) -> Replayable:
        """Return a graph of the work that ``run`` enqueues; the work itself is not executed.

        ``torch.cuda.graph`` is not used, because it empties the cache at every entry.

        Raises:
            CaptureBroke: this process must be replaced.
            RuntimeError, …: ``run`` or the driver refused; the process can still compute.
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
            warnings.filterwarnings("ignore", "The CUDA Graph is empty")  # if all nodes are views
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                run()
            except Exception:
                with contextlib.suppress(Exception):  # the error of ``run`` says more
                    graph.capture_end()
                raise
            graph.capture_end()

    def _mend(self) -> None:
        """Repair torch's allocators and its random generators after a failed capture.

        ``capture_end`` raises before it ends the capture in the allocators. Without repair, every
        use of the pool fails ("already recording to mempool_id"), and so does every request in the
        slice. Random numbers fail until another capture succeeds. Repair has four steps: 1. End the
        capture in the device's allocator. 2. Use a new pool, outside of the slice, because the
        host's allocator has no such call. 3. Capture an empty graph. 4. Enter the slice, as a test.

        Raises:
            CaptureBroke: one of the steps failed.
        """
        end = getattr(torch._C, "_cuda_endAllocateToPool", None)
        if end is not None:
            with contextlib.suppress(RuntimeError):  # "not currently recording": nothing to end
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

    def memory_bytes(self) -> tuple[int, int]:
        """Return the device's free bytes, and those that torch has reserved in this process."""
        return int(torch.cuda.mem_get_info()[0]), int(torch.cuda.memory_reserved(self._index))


@contextlib.contextmanager
def no_collector() -> Iterator[None]:
    """Turn off garbage collection on all threads, so that it frees no tensor in the block.

    Torch calls the slice's allocator, which is Python, with its own lock held. A thread that
    collects garbage has the interpreter lock and may wait for torch's lock: a deadlock.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class Replayable(Protocol):
    """Captured work that can be enqueued again and again."""

    def replay(self) -> None:
        """Enqueue the captured work on the current stream."""
        ...
