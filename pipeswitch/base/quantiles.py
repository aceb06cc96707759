"""Quantiles of samples. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def spread(values: Sequence[float]) -> float:
    """Return the distance between the quartiles of one or more values."""
    return quantile(values, 0.75) - quantile(values, 0.25)


def quantile(values: Sequence[float], fraction: float) -> float:
    """Return a quantile by linear interpolation, as numpy does."""
    ordered = sorted(values)
    position = fraction * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def percentile(values: Sequence[float], fraction: float) -> float:
    """Return the smallest value that is at least as large as ``fraction`` of all values."""
    ordered = sorted(values)
    rank = max(0, -(-len(ordered) * round(fraction * 1000) // 1000) - 1)
    return ordered[rank]
