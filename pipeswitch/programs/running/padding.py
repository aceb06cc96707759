"""Requests of unequal shapes in one batch: zeros fill the shorter ones (``Manifest.pads``)."""

from __future__ import annotations

from collections.abc import Sequence

import torch


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
