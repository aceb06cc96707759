"""Request pool as mapped in a worker: tensors over slabs, and copies of batched inputs.

Runs that an extra computes, for models of its kind (``RUNNERS``), read and write there, too.
"""

from __future__ import annotations

import ctypes
import functools
import math
import mmap
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Final, Protocol

import torch

from pipeswitch.base.errors import InvalidInput
from pipeswitch.devices.cpu.page_protection import map_by_chance
from pipeswitch.ipc.messages.base import SlabTensor
from pipeswitch.ipc.messages.worker import RunInference
from pipeswitch.programs.interface.layout import ITEM_BYTES, KindSettings, ValueSpec, aligned
from pipeswitch.programs.running.executor import BoundProgram
from pipeswitch.programs.running.tensor_views import bytes_over, padded, padded_shape

REPLY_ALIGN_BYTES = 64
Chances = tuple[tuple[tuple[float, tuple[tuple[int, float], ...]], ...], ...]
KEPT_VIEWS: Final = 64  # cached tensors over slabs: a new request often reuses an earlier slab


class MappedPool:
    """Mapping of the pool memfd. On a host device our own copies use a second, hidden mapping."""

    def __init__(self, descriptor: int, size_bytes: int, *, is_hidden: bool = False) -> None:
        self.size_bytes = size_bytes
        self._storage = torch.frombuffer(
            mmap.mmap(descriptor, size_bytes), dtype=torch.uint8
        ).untyped_storage()
        self._own = self._storage
        if is_hidden:  # so that our own copies work without opening a slab
            address = map_by_chance(descriptor, size_bytes, mmap.PROT_READ | mmap.PROT_WRITE)
            self._own = bytes_over((ctypes.c_char * size_bytes).from_address(address))
        self._bytes = torch.empty(0, dtype=torch.uint8).set_(self._own)
        self.batched_for, self._joined = "", torch.empty(0, dtype=torch.uint8)
        # Creating a tensor takes two of the five torch operations of a small request.
        self._kept = functools.lru_cache(KEPT_VIEWS)(functools.partial(self._view, self._storage))
        self._reply = functools.lru_cache(KEPT_VIEWS)(functools.partial(self._view, self._own))

    @property
    def address(self) -> int:
        """Address of the pool in this process."""
        return self._storage.data_ptr()

    def tensor(self, slab: SlabTensor, *, is_code: bool) -> torch.Tensor:
        """Return a tensor over a request's slab, valid until the reply is sent.

        ``is_code``: the operator's own module may change the tensor, so each call makes a new one.
        """
        if slab.pieces:
            return self.own(slab)
        return self._view(self._storage, slab) if is_code else self._kept(slab)

    def own(self, slab: SlabTensor) -> torch.Tensor:
        """Return the tensor of a slab, like ``tensor``, for copies by our own code."""
        if not slab.pieces:
            return self._view(self._own, slab)
        gathered = torch.empty(slab.shape, dtype=getattr(torch, slab.dtype))
        self.gather(slab, gathered)
        return gathered

    def gather(self, slab: SlabTensor, into: torch.Tensor) -> None:
        """Copy a tensor that lies in pieces to the start of ``into``; fill the rest with zeros."""
        flat, at = into.view(torch.uint8).view(-1), 0
        for start, size in slab.places(0, slab.size_bytes):
            flat[at : at + size] = self._bytes[start : start + size]
            at += size
        flat[at:].zero_()

    def extend(self, slab: SlabTensor, rows: torch.Tensor) -> None:
        """Append rows, on any device, to a tensor in pieces; valid when the run ends."""
        flat, at = rows.contiguous().view(torch.uint8).view(-1), 0
        for start, size in slab.places(slab.size_bytes, len(flat)):
            self._bytes[start : start + size] = flat[at : at + size]
            at += size

    def number(self, slab: SlabTensor) -> int:
        """Return the value of an int64 input with one element."""
        return int(self._bytes[slab.offset_bytes :][:8].view(torch.int64).item())

    def batched(self, columns: Iterable[Sequence[SlabTensor]], model: str) -> list[torch.Tensor]:
        """Return each input's rows of several requests in one tensor, in private memory.

        The model's next requests reuse that memory: fresh pages cost five times the copy's time.
        """
        inputs = [[self.own(slab) for slab in slabs] for slabs in columns]
        shapes = [padded_shape(parts) for parts in inputs]
        sizes = [math.prod(s) * p[0].itemsize for s, p in zip(shapes, inputs, strict=True)]
        starts = [0, *accumulate(aligned(size, REPLY_ALIGN_BYTES) for size in sizes)]
        if starts[-1] > len(self._joined):
            self.let_go()  # else old and new memory would exist at once
            self._joined = torch.empty(starts[-1], dtype=torch.uint8)
        self.batched_for = model
        return [
            padded(parts, self._joined[at:][:size].view(parts[0].dtype).view(shape))
            for parts, at, size, shape in zip(inputs, starts, sizes, shapes, strict=False)
        ]

    def let_go(self) -> None:
        """Free the memory of the last batch, because another model's run has its own limit."""
        self.batched_for, self._joined = "", torch.empty(0, dtype=torch.uint8)

    def _view(self, storage: torch.UntypedStorage, slab: SlabTensor) -> torch.Tensor:
        dtype_name, shape = slab.dtype, slab.shape
        offset_bytes, size_bytes = slab.offset_bytes, slab.size_bytes
        item = ITEM_BYTES[dtype_name]
        if offset_bytes % item or not 0 <= offset_bytes <= self.size_bytes - size_bytes:
            raise ValueError(f"slab at {offset_bytes}+{size_bytes} lies outside of the pool")
        dtype = getattr(torch, dtype_name)
        strides, step = [], 1
        for extent in reversed(shape):
            strides.append(step)
            step *= max(1, extent)
        tensor = torch.empty(0, dtype=dtype)
        return tensor.set_(storage, offset_bytes // item, tuple(shape), strides[::-1])

    def write(
        self,
        values: Sequence[ValueSpec],
        outputs: Sequence[torch.Tensor],
        offset_bytes: int,
        reply_bytes: int,
    ) -> tuple[SlabTensor, ...]:
        """Copy outputs into a reply slab; a copy from a device may be unfinished on return.

        Raises:
            InvalidInput: an output has an unknown dtype, or more bytes than its declared shape.
        """
        slabs, cursor = [], 0
        for value, output in zip(values, outputs, strict=True):
            dtype_name = str(output.dtype).removeprefix("torch.")
            size = output.numel() * output.element_size()
            if dtype_name not in ITEM_BYTES or cursor + size > reply_bytes:
                raise InvalidInput(
                    f'output "{value.name}" is {dtype_name}{list(output.shape)}: it does not fit '
                    f"into the {reply_bytes} bytes of its declared shape"
                )
            slab = SlabTensor(
                name=value.name,
                dtype=dtype_name,
                shape=tuple(output.shape),
                offset_bytes=offset_bytes + cursor,
                size_bytes=size,
            )
            self._reply(slab).copy_(output, non_blocking=True)
            slabs.append(slab)
            cursor += -(-size // REPLY_ALIGN_BYTES) * REPLY_ALIGN_BYTES
        return tuple(slabs)


class KindRun(Protocol):
    """One run, which may compute several steps."""

    @property
    def most(self) -> int:
        """Maximum number of steps; 0: one step with the request's inputs as they are."""

    def inputs(self) -> list[torch.Tensor]:
        """Return the first step's inputs; call it only if ``most`` is not 0."""

    def run(
        self, inputs: Sequence[torch.Tensor], before_group: Callable[[int], None]
    ) -> list[torch.Tensor]:
        """Compute all steps; return the last step's outputs."""

    def outputs_of(
        self, number: int, own: Sequence[torch.Tensor]
    ) -> tuple[Sequence[ValueSpec], Sequence[torch.Tensor]]:
        """Return the outputs of a request's reply; ``own`` is its part of the last outputs."""

    def tokens(self) -> tuple[tuple[int, ...], ...]:
        """Return the tokens that were chosen for each request, in the order of the steps."""

    def chances(self) -> Chances:
        """Return each token's log probabilities by request; empty if none has ``logprobs``."""


class Runner(Protocol):
    """State that a worker keeps between the runs of models of a kind."""

    def take(self, digest: str, settings: KindSettings) -> None:
        """Keep the settings of a program that this worker may run."""

    def remove(self, digest: str) -> None:
        """Drop the settings of a program."""

    def let_go(self, digest: str = "") -> None:
        """Free the memory of the runs of other programs."""

    def begin(
        self,
        message: RunInference,
        bound: BoundProgram,
        pool: MappedPool,
        device: str,
        is_over: Callable[[], bool],
    ) -> KindRun | None:
        """Return a run, or None if it is computed like any other program's.

        Args:
            is_over: returns True if the run must end after its current step.
        """

    def ended(self, message: RunInference, run: KindRun, ms: float) -> None:
        """Keep the state of a successful run that took ``ms``."""
