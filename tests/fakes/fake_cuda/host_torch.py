"""``CudaTorch`` for the fake GPU: its tensors are host tensors on the fake's memory."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pipeswitch.devices.cuda.capture import CudaRecorder
from pipeswitch.devices.cuda.torch import CudaTorch
from pipeswitch.programs.interface.layout import TensorSpec
from pipeswitch.programs.running.tensor_views import tensor_over

from . import Stream, World

SYNCHRONISE = frozenset(
    f"aten.{name}.default" for name in ("item", "_local_scalar_dense", "nonzero", "masked_select")
)
"""Operators whose result the host needs; a capture with such an operator fails."""


class LateCopies(TorchDispatchMode):
    """Dispatch mode that delays copies to pinned memory until the stream reaches them. Before that,
    the host reads nonsense, as it may with a real device."""

    def __init__(self, world: World, stream: int) -> None:
        super().__init__()
        self._world, self._queue = world, world.streams[stream]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func) != "aten.copy_.default":
            return func(*args, **(kwargs or {}))
        into, source = args[:2]
        place = (into.data_ptr(), into.nbytes)
        if not into.nbytes or not self._world.is_pinned(*place):
            return func(*args, **(kwargs or {}))
        computed = torch.empty(into.shape, dtype=into.dtype).copy_(source)

        def run() -> bool:
            ctypes.memmove(place[0], computed.data_ptr(), place[1])
            return True

        run.touched = [place]  # type: ignore[attr-defined]
        self._queue.put(run)
        ctypes.memset(into.data_ptr(), 0xFF, into.nbytes)
        return into


class HostTorch(CudaTorch):
    """``CudaTorch`` that computes at once, but delays copies; a real device delays both."""

    device = "cpu"

    def __init__(self, world: World) -> None:
        self._world = world
        world.enter()  # torch, too, creates the context in the thread that computes
        self.stream = world.new()
        world.streams[self.stream] = Stream()
        world.torch_streams.add(self.stream)
        world.reach("torch")
        self.slices: list[tuple[int, int]] = []
        self.in_slice: list[bool] = []

    def current_stream(self) -> int | None:
        return None if threading.get_ident() in self._world.capturing else self.stream

    def storage(self, pointer: int, size_bytes: int) -> torch.UntypedStorage:
        if pointer in self._world.opened:
            self._world.reach("ipc-tensor")
        raw = (ctypes.c_uint8 * size_bytes).from_address(pointer)
        return torch.frombuffer(raw, dtype=torch.uint8).untyped_storage()

    def tensor(
        self, storage: torch.UntypedStorage, spec: TensorSpec, offset_bytes: int
    ) -> torch.Tensor:
        return tensor_over(storage, spec, offset_bytes)

    @contextlib.contextmanager
    def computing(self, *, in_slice: bool) -> Iterator[None]:
        """Turn an index out of range into a device-side assertion, which destroys the context."""
        self.in_slice.append(in_slice)
        try:
            with LateCopies(self._world, self.stream):
                yield
        except IndexError as error:
            self._world.break_down("cudaErrorAssert")
            raise RuntimeError("CUDA error: device-side assert triggered") from error

    def take_slice(self, pointer: int, size_bytes: int) -> None:
        self._world.reach("slice")
        self.slices.append((pointer, size_bytes))

    def check_slice(self) -> str:
        return "not a real slice"

    def cap_private(self, size_bytes: int) -> None:
        pass

    def empty_cache(self) -> None:
        self._world.reach("empty-cache")

    def warm_up(self) -> None:
        self._world.reach("warm")

    def recorder(self) -> TapeRecorder:
        self._world.reach("capture")
        return TapeRecorder(self._world)


def is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


class Tape(TorchDispatchMode):
    """Fake CUDA graph: the recorded operators, with the same tensors that they read and wrote."""

    def __init__(self) -> None:
        super().__init__()
        self._entries: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func) in SYNCHRONISE:
            raise RuntimeError("operation not permitted when stream is capturing")
        is_in_place = func._schema.name.endswith("_")
        result = args[0] if is_in_place else func(*args, **(kwargs or {}))
        self._entries.append((func, args, kwargs or {}, result))
        return result

    def poison(self) -> None:
        """Fill the results with NaN, because a real capture computes nothing before a replay."""
        for _, args, kwargs, results in self._entries:
            pointers = {
                v.untyped_storage().data_ptr() for v in tree_leaves((args, kwargs)) if is_tensor(v)
            }
            for value in filter(is_tensor, tree_leaves(results)):
                if value.untyped_storage().data_ptr() not in pointers and value.is_floating_point():
                    value.fill_(torch.nan)

    def replay(self) -> None:
        """Run the same operators on the same addresses; write the results into the same tensors."""
        with torch.inference_mode():
            for func, args, kwargs, results in self._entries:
                again = func(*args, **kwargs)
                for place, value in zip(tree_leaves(results), tree_leaves(again), strict=True):
                    if is_tensor(place) and place.data_ptr() != value.data_ptr():
                        place.copy_(value)


class TapeRecorder(CudaRecorder):
    """``CudaRecorder`` that runs the operators once, and then overwrites their results with NaN."""

    def __init__(self, world: World | None = None) -> None:
        self._world = world or World()
        self.cost_bytes = 1 << 20  # memory that torch reserves in a session
        self.lost_bytes = 0  # what the driver and other processes take meanwhile
        self._free_bytes, self._reserved_bytes = 1 << 34, 0
        self.fails = False

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        yield
        self._free_bytes -= self.cost_bytes + self.lost_bytes
        self._reserved_bytes += self.cost_bytes

    def record(self, run: Callable[[], None]) -> Tape:
        if self.fails:
            raise RuntimeError("operation not permitted when stream is capturing")
        tape = Tape()
        self._world.capturing.add(threading.get_ident())
        try:
            with tape:
                run()
        finally:
            self._world.capturing.clear()
        tape.poison()
        return tape

    def memory_bytes(self) -> tuple[int, int]:
        return self._free_bytes, self._reserved_bytes
