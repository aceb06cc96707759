"""A worker's use of ``torch.cuda``, and the private names of torch that it needs.

A fake of the bindings (``fake_cuda`` of the tests) has its own ``torch_side``, so that the whole
system runs on a fake GPU. The fake's tensors are host tensors over its memory.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

import torch

from ...programs.interface.layout import TensorSpec
from ...programs.running.tensor_views import place_in, tensor_over
from .activation_slice import Segments, make_pool, reserve
from .capture import CudaRecorder, no_collector


def torch_side(package: str, index: int) -> CudaTorch:
    """Return the torch side that a fake of the bindings has, else the real one."""
    maker = getattr(importlib.import_module(package), "torch_side", None)
    side: CudaTorch = CudaTorch(index) if maker is None else maker(index)
    return side


class _Mapped:
    """Object with ``__cuda_array_interface__`` over a raw pointer. Torch's storage holds a
    reference to this object, but does not own the memory."""

    def __init__(self, pointer: int, size_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size_bytes,),
            "typestr": "|u1",
            "data": (pointer, False),
            "strides": None,
            "version": 3,
        }


class CudaTorch:
    """Torch on one worker's device. Create it after the fork; it creates the process's context.

    ``stream`` is the handle of the only stream on which this worker computes.
    """

    def __init__(self, index: int) -> None:
        torch.cuda.set_device(index)
        self.device = f"cuda:{index}"
        self._index = index
        make_stream: Any = torch.cuda.Stream  # untyped in torch
        self._stream: torch.cuda.Stream = make_stream(device=index)
        self.stream = int(self._stream.cuda_stream)
        self._pool: torch.cuda.MemPool | None = None
        self._segments: Segments | None = None

    def current_stream(self) -> int | None:
        """Return the handle of this thread's compute stream, which a script may change.

        Return None while the script captures its own graph there; a capture forbids queries.
        """
        if torch.cuda.is_current_stream_capturing():
            return None
        return int(torch.cuda.current_stream(self._index).cuda_stream)

    def storage(self, pointer: int, size_bytes: int) -> torch.UntypedStorage:
        """Return all of a mapping as one storage, which does not copy or own the memory."""
        mapped = _Mapped(pointer, size_bytes)
        return torch.as_tensor(mapped, device=self.device).untyped_storage()

    def tensor(
        self, storage: torch.UntypedStorage, spec: TensorSpec, offset_bytes: int
    ) -> torch.Tensor:
        """Return the tensor of ``spec``; bounds are checked."""
        return tensor_at(storage, spec, offset_bytes)

    @contextlib.contextmanager
    def computing(self, *, in_slice: bool) -> Iterator[None]:
        """Enqueue the block's work on ``stream``, with memory from the slice if ``in_slice``."""
        with torch.cuda.stream(self._stream):
            if self._pool is None or not in_slice:
                yield
                return
            with torch.cuda.use_mem_pool(self._pool), no_collector():
                yield

    def take_slice(self, pointer: int, size_bytes: int) -> None:
        """Make ``computing(in_slice=True)`` allocate in this range from now on."""
        segments = Segments(pointer, size_bytes)
        pool = make_pool(segments)
        reserve(pool, segments, self._stream)
        self._pool, self._segments = pool, segments

    def check_slice(self) -> str:
        """Compute convolutions and products of several sizes in the slice; return a report.

        Raises:
            RuntimeError: a result is wrong or outside of the slice, or torch requested more memory.
        """
        assert self._segments is not None
        before = self._segments.calls
        torch.manual_seed(0)
        image = torch.randn(4, 8, 64, 64, device=self.device)
        weight = torch.randn(8, 8, 3, 3, device=self.device)
        results = []
        for in_slice in (False, True):
            with self.computing(in_slice=in_slice), torch.inference_mode():
                value = image
                for _ in range(4):
                    value = torch.relu(torch.nn.functional.conv2d(value, weight, padding=1))
                results.append(value @ value.transpose(2, 3))
            self._stream.synchronize()
        if not self._segments.holds(results[1].data_ptr()):
            raise RuntimeError("a result lies outside of the slice")
        if self._segments.calls != before:
            raise RuntimeError(f"torch asked {self._segments.calls - before} times for more")
        if not torch.allclose(results[0], results[1], rtol=1e-3, atol=1e-3):
            raise RuntimeError("results in the slice differ from those outside")
        return f"{self._segments.calls} segments"

    def check_failed_capture(self, recorder: CudaRecorder) -> None:
        """Attempt a capture that must fail, then compute as a task does.

        Raises:
            RuntimeError: the capture succeeded, or computing fails after it.
        """
        ones = torch.ones(8, device=self.device)
        try:
            with recorder.session():
                recorder.record(lambda: ones.sum().item())  # type: ignore[arg-type]
        except RuntimeError:  # expected; a ``CaptureBroke`` is not a RuntimeError and is raised
            pass
        else:
            raise RuntimeError("a copy to the host was captured")
        with self.computing(in_slice=True):
            total = float((torch.ones(1024, device=self.device) * 2).sum())
            torch.rand(8, device=self.device)  # checks that the generator's capture has ended too
        if total != 2048:
            raise RuntimeError(f"after a failed capture 1024 twos are {total}")

    def cap_private(self, size_bytes: int) -> None:
        """Limit the memory that this process may allocate outside of the slice; 0: no limit.

        Torch counts the slice's segments as allocated, so their size is added to its limit.
        """
        if size_bytes:
            total = torch.cuda.get_device_properties(self._index).total_memory
            slice_bytes = 0 if self._segments is None else self._segments.size_bytes
            share = (size_bytes + slice_bytes) / total
            torch.cuda.set_per_process_memory_fraction(min(1.0, share), self._index)

    def empty_cache(self) -> None:
        """Free memory outside of the slice that no tensor uses; blocks until enqueued work has run.

        Torch keeps the segments of the slice's pool while the pool exists.
        """
        torch.cuda.empty_cache()

    def warm_up(self) -> None:
        """Load libraries and allocate their workspaces, so that no request has to.

        Call this before ``take_slice``: cached workspaces are never freed.
        """
        with torch.cuda.stream(self._stream), torch.inference_mode():
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                square = torch.ones(64, 64, device=self.device, dtype=dtype)
                torch.addmm(square[0], square, square)  # cuBLASLt, with its own workspace
                torch.mm(square, square)  # cuBLAS
                torch.bmm(square[None], square[None])
                image = torch.ones(1, 8, 16, 16, device=self.device, dtype=dtype)
                weight = torch.ones(8, 8, 3, 3, device=self.device, dtype=dtype)
                torch.nn.functional.conv2d(image, weight)
        self._stream.synchronize()

    def recorder(self) -> CudaRecorder:
        """Return the recorder that captures this worker's graphs."""
        return CudaRecorder(self._stream, self._index, self._pool)


def tensor_at(storage: torch.UntypedStorage, spec: TensorSpec, offset_bytes: int) -> torch.Tensor:
    """Return the same tensor as ``tensor_over``, in a third of the time and without driver calls.

    ``_construct_CUDA_Tensor_From_Storage_And_Metadata`` is private and checks no bounds, so they
    are checked here. If torch does not have it, ``tensor_over`` is used.

    Raises:
        LocalProtocolError: the spec's numbers contradict each other or the storage.
    """
    construct = getattr(torch._C, "_construct_CUDA_Tensor_From_Storage_And_Metadata", None)
    if construct is None:
        return tensor_over(storage, spec, offset_bytes)
    first_item, strides = place_in(storage.nbytes(), spec, offset_bytes)
    tensor: torch.Tensor = construct(
        {
            "size": spec.shape,
            "stride": tuple(strides),
            "dtype": getattr(torch, spec.dtype),
            "storage_offset": first_item,
        },
        storage,
    )
    return tensor
