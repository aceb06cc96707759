"""Numbers from samples: medians, spreads, the link's line. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from .profile import LinkProfile

MIB = 1 << 20
FLOOR_MS = 1e-3  # below, a clock's own noise would decide a relative fit


def spread(values: Sequence[float]) -> float:
    """The distance between the quartiles; 0 for fewer than two values."""
    return quantile(values, 0.75) - quantile(values, 0.25)


def quantile(values: Sequence[float], fraction: float) -> float:
    """By linear interpolation, as numpy does it."""
    ordered = sorted(values)
    position = fraction * (len(ordered) - 1)
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def fit_link(samples: Sequence[tuple[int, float]]) -> LinkProfile:
    """``alpha + beta * size`` through (bytes, ms), by least squares of the *relative* error.

    The relative one, because the sizes span five orders of magnitude: plain squares would let the
    largest groups decide alpha, which is what many small groups pay. Samples are medians
    already, so one hiccup does not bend the line. Neither number is negative.

    Raises:
        ValueError: no samples.
    """
    if not samples:
        raise ValueError("a link cannot be fitted without copies")
    points = [(size / MIB, ms, 1.0 / max(ms, FLOOR_MS) ** 2) for size, ms in samples]
    total = sum(w for _, _, w in points)
    mean_x = sum(w * x for x, _, w in points) / total
    mean_y = sum(w * y for _, y, w in points) / total
    variance = sum(w * (x - mean_x) ** 2 for x, _, w in points)
    slope = 0.0
    if variance > 0:
        slope = sum(w * (x - mean_x) * (y - mean_y) for x, y, w in points) / variance
    alpha, beta = mean_y - slope * mean_x, max(slope, 0.0)
    if beta == 0.0:
        alpha = mean_y
    if alpha < 0.0:  # through the origin
        alpha = 0.0
        beta = sum(w * x * y for x, y, w in points) / sum(w * x * x for x, _, w in points)
    residuals = [abs(y - alpha - beta * x) / max(y, FLOOR_MS) for x, y, _ in points]
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
