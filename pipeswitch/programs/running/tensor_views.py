"""Tensors over raw memory (weights in a region, requests in the pool, slices of jobs), and batches
of requests of unequal shapes, in which zeros fill the shorter ones (``Manifest.pads``)."""

from __future__ import annotations

import ctypes
import mmap
import warnings
from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from ...base.errors import LocalProtocolError
from ..interface.layout import ITEM_BYTES, TensorSpec


def bytes_over(
    buffer: mmap.mmap | bytearray | memoryview | ctypes.Array[Any],
    offset_bytes: int = 0,
    size_bytes: int = -1,
) -> torch.UntypedStorage:
    """Return a host buffer, or a part of it, as a storage; the storage keeps the buffer alive.

    Mappings of a model's weights are read-only, so that no worker can write to them. Programs that
    write to weights are refused at registration. So torch's warning about such mappings is ignored.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
        return torch.frombuffer(
            buffer, dtype=torch.uint8, offset=offset_bytes, count=size_bytes
        ).untyped_storage()


def tensor_over(
    storage: torch.UntypedStorage, spec: TensorSpec, region_offset_bytes: int
) -> torch.Tensor:
    """Return the tensor of ``spec`` in the region at ``region_offset_bytes`` of a storage.

    Views of one base share one version counter: after an in-place update of a BatchNorm statistic,
    backward would fail for all other parameters. ``set_`` gives each tensor its own counter.

    Raises:
        LocalProtocolError: the spec's numbers contradict each other or the storage.
    """
    first_item, strides = place_in(storage.nbytes(), spec, region_offset_bytes)
    empty = torch.empty(0, dtype=getattr(torch, spec.dtype), device=storage.device)
    return empty.set_(storage, first_item, spec.shape, strides)


def place_in(
    storage_bytes: int, spec: TensorSpec, region_offset_bytes: int
) -> tuple[int, list[int]]:
    """Return the index of a tensor's first item in a storage, and its (contiguous) strides.

    Raises:
        LocalProtocolError: the spec's numbers contradict each other or the storage.
    """
    item_bytes = ITEM_BYTES.get(spec.dtype, 0)
    start = region_offset_bytes + spec.offset_bytes
    is_sound = (
        item_bytes > 0
        and min((region_offset_bytes, spec.offset_bytes, *spec.shape)) >= 0
        and prod(spec.shape) * item_bytes == spec.size_bytes
        and start % item_bytes == 0
        and start + spec.size_bytes <= storage_bytes
    )
    if not is_sound:
        raise LocalProtocolError(
            f"tensor {spec.name!r}: {spec.dtype}{list(spec.shape)} of {spec.size_bytes} bytes "
            f"does not fit at {start} of {storage_bytes}"
        )
    strides = [1] * len(spec.shape)
    for axis in range(len(spec.shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * max(spec.shape[axis + 1], 1)
    return start // item_bytes, strides


def padded_shape(parts: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """Return the smallest shape that holds the rows of all parts, one part after the other."""
    extents = (max(sizes) for sizes in zip(*(part.shape[1:] for part in parts), strict=True))
    return (sum(part.shape[0] for part in parts), *extents)


def padded(parts: Sequence[torch.Tensor], out: torch.Tensor | None = None) -> torch.Tensor:
    """Return the rows of all parts, padded; written to ``out`` (of ``padded_shape``) if given."""
    if out is None:
        out = parts[0].new_empty(padded_shape(parts))
    counts = [part.shape[0] for part in parts]
    for rows, part in zip(torch.split(out, counts), parts, strict=True):
        for axis, extent in enumerate(part.shape[1:], 1):
            rows.narrow(axis, extent, rows.shape[axis] - extent).zero_()
        cut(rows, part.shape).copy_(part)
    return out


def cut(value: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Return a view of the part of ``value`` that has this shape, without the padding."""
    return value[tuple(map(slice, shape))]
