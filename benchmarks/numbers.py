"""The arithmetic of trials: ratios, differences of pairs."""

from __future__ import annotations

from collections.abc import Sequence


def ratio(over: float, under: float) -> float:
    """``over / under`` where a difference that drowned in noise may be nothing."""
    return over / max(under, 1e-3)


def paired_differences(over: Sequence[float], under: Sequence[float]) -> list[float]:
    """Round by round: drift that both arms of a round saw cancels out."""
    return [a - b for a, b in zip(over, under, strict=True)]
