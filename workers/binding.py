"""Tensors over the arena: the worker's view of a model's region."""

from __future__ import annotations

import mmap
import warnings
from collections.abc import Callable

import torch

from pipeswitch.programs.executor import tensor_over
from pipeswitch.programs.layout import TensorSpec


class PoolTensors:
    """Makes tensors inside one arena, each with its own version counter.

    Keeps the arena's storage alive; live tensors keep a host mapping from being closed, so drop
    them first.
    """

    def __init__(self, arena: torch.Tensor) -> None:
        """``arena``: [capacity_bytes] uint8, contiguous, on the device it lies on."""
        if arena.dtype is not torch.uint8 or arena.dim() != 1 or not arena.is_contiguous():
            raise ValueError("an arena is a contiguous tensor of bytes")
        self._storage = arena.untyped_storage()

    @classmethod
    def over_buffer(cls, buffer: mmap.mmap | bytearray | memoryview) -> PoolTensors:
        """An arena in host memory: a mapping of a memfd, which may be read-only."""
        return cls(bytes_tensor(buffer))

    @property
    def capacity_bytes(self) -> int:
        """Size of the arena."""
        return self._storage.nbytes()

    def tensor(self, spec: TensorSpec, region_offset_bytes: int) -> torch.Tensor:
        """The tensor of ``spec`` in the region at ``region_offset_bytes``; bounds are checked."""
        return tensor_over(self._storage, spec, region_offset_bytes)

    def region(self, offset_bytes: int) -> Callable[[TensorSpec], torch.Tensor]:
        """For ``Program.bind``: tensors of the region at ``offset_bytes``."""
        return lambda spec: self.tensor(spec, offset_bytes)


def bytes_tensor(buffer: mmap.mmap | bytearray | memoryview) -> torch.Tensor:
    """A uint8 tensor over a host buffer, without a copy.

    torch warns that a tensor over a read-only mapping can be written to. That a worker cannot
    write to a model's weights is what we want: programs that would are refused when they are
    registered, and the mapping stops what got past.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(buffer, dtype=torch.uint8)
