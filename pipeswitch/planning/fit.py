"""Statistics of samples: quantiles, spreads, and the line through a link's copy times. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from .profile import LinkProfile

MIB = 1 << 20
ROUNDS = 4  # rounds of the fit; the line changes little after the second
FLOOR_MS = 1e-3  # in shorter times, the clocks' noise would dominate the relative error


def spread(values: Sequence[float]) -> float:
    """Return the distance between the quartiles of one or more values."""
    return quantile(values, 0.75) - quantile(values, 0.25)


def quantile(values: Sequence[float], fraction: float) -> float:
    """Return a quantile by linear interpolation, as numpy does."""
    ordered = sorted(values)
    position = fraction * (len(ordered) - 1)
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def percentile(values: Sequence[float], fraction: float) -> float:
    """Return the smallest value that is at least as large as ``fraction`` of all values."""
    ordered = sorted(values)
    rank = max(0, -(-len(ordered) * round(fraction * 1000) // 1000) - 1)
    return ordered[rank]


def _line(points: Sequence[tuple[float, float]], weights: Sequence[float]) -> tuple[float, float]:
    """Fit a line by weighted least squares; return its intercept and slope, each at least 0."""
    weighted = [(x, y, w) for (x, y), w in zip(points, weights, strict=True)]
    total = sum(weights)
    mean_x = sum(w * x for x, _, w in weighted) / total
    mean_y = sum(w * y for _, y, w in weighted) / total
    variance = sum(w * (x - mean_x) ** 2 for x, _, w in weighted)
    slope = 0.0
    if variance > 0:
        slope = sum(w * (x - mean_x) * (y - mean_y) for x, y, w in weighted) / variance
    if slope <= 0.0:
        return mean_y, 0.0
    alpha = mean_y - slope * mean_x
    if alpha >= 0.0:
        return alpha, slope
    return 0.0, sum(w * x * y for x, y, w in weighted) / sum(w * x * x for x, _, w in weighted)


def fit_link(samples: Sequence[tuple[int, float]]) -> LinkProfile:
    """Fit ``alpha + beta * size`` to (bytes, ms) by least squares of the *relative* error.

    Sizes span five orders of magnitude. With absolute errors the largest groups would determine
    alpha, but alpha matters most for many small groups. Each error is divided by the time on the
    fitted line, so the fit needs several rounds. If errors were divided by the samples' own times,
    a copy with a time near zero would outweigh all others. (On a busy machine a modelled link has
    such copies.) Samples are medians, so one outlier has no effect. Alpha and beta are at least 0.

    Raises:
        ValueError: no samples.
    """
    if not samples:
        raise ValueError("a link cannot be fitted without copies")
    points = [(size / MIB, ms) for size, ms in samples]
    share = sum(ms for _, ms in points) / max(sum(x for x, _ in points), FLOOR_MS)
    expected = [max(ms, share * x) for x, ms in points]
    for _ in range(ROUNDS):
        alpha, beta = _line(points, [1.0 / max(ms, FLOOR_MS) ** 2 for ms in expected])
        expected = [alpha + beta * x for x, _ in points]
    residuals = [abs(y - alpha - beta * x) / max(y, FLOOR_MS) for x, y in points]
    sizes = [size for size, _ in samples]
    return LinkProfile(
        alpha_ms=alpha,
        beta_ms_per_mib=beta,
        residual_p50=median(residuals),
        residual_p90=quantile(residuals, 0.9),
        samples=len(samples),
        smallest_bytes=min(sizes),
        largest_bytes=max(sizes),
    )
