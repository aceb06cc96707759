"""The arithmetic of trials: quantiles, ratios, differences of pairs."""

from __future__ import annotations

from collections.abc import Sequence


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which ``share`` of the others lie, interpolated."""
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def ratio(over: float, under: float) -> float:
    """``over / under`` where a difference that drowned in noise may be nothing."""
    return over / max(under, 1e-3)


def paired_differences(over: Sequence[float], under: Sequence[float]) -> list[float]:
    """Round by round: drift that both arms of a round saw cancels out."""
    return [a - b for a, b in zip(over, under, strict=True)]
