"""Which token comes next: of its logits, its settings and a counted random number. Pure, no clock.

The random number of a token is a function of (seed, position) alone: who else is in a step, how
often it is run again, and after which restart, change nothing.
"""

from __future__ import annotations

import math
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from ...base.errors import InvalidInput

MAX_SEED: Final = (1 << 63) - 1
MAX_TEMPERATURE: Final = 100.0


class Sampling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How an answer's tokens are chosen."""

    temperature: float = 0.0  # 0: the likeliest, the first of equals
    top_p: float = 1.0  # of the likeliest that have this much together
    seed: int = 0

    def check(self) -> None:
        """Raises:
        InvalidInput: a number is out of its range.
        """
        for name, value, low, high in (
            ("temperature", self.temperature, 0.0, MAX_TEMPERATURE),
            ("top_p", self.top_p, 0.0, 1.0),
            ("seed", self.seed, 0, MAX_SEED),
        ):
            if not low <= value <= high or (name == "top_p" and value == 0.0):
                above = "above" if name == "top_p" else "from"
                raise InvalidInput(f"{name} {value} is not a number {above} {low} to {high}")


def next_token(logits: NDArray[np.floating], sampling: Sampling, position: int) -> int:
    """The token at ``position`` of its sequence, counted from the prompt's first.

    Args:
        logits: of every token, [vocabulary], as the program answered them.
        sampling: checked.
        position: of the token that is chosen.

    Raises:
        InvalidInput: no logit is a number, so the model computes nonsense.
    """
    best = int(np.argmax(logits))  # of one that is no number, where there is one
    if math.isnan(logits[best]):
        best = int(np.argmax(np.where(np.isnan(logits), -np.inf, logits)))
    if not math.isfinite(logits[best]):
        raise InvalidInput(f"its largest logit at position {position} is {logits[best]}")
    if sampling.temperature == 0.0:
        return best
    with np.errstate(over="ignore"):  # a tiny temperature: -inf is what is meant
        scaled = (logits.astype(np.float64) - float(logits[best])) / sampling.temperature
    weights = np.exp(np.where(np.isnan(scaled), -np.inf, scaled))
    tokens = np.arange(len(weights))
    if sampling.top_p < 1.0:
        tokens = _likeliest(weights, sampling.top_p)
    upto = np.cumsum(weights[tokens])
    drawn = uniform(sampling.seed, position) * upto[-1]
    return int(tokens[min(int(np.searchsorted(upto, drawn, side="right")), len(tokens) - 1)])


def _likeliest(weights: NDArray[np.float64], top_p: float) -> NDArray[np.intp]:
    """The fewest tokens that have ``top_p`` of all together, likeliest first."""
    total = float(weights.sum())
    # All that are lighter than this have less than the rest together, so no one asks their order.
    [heavy] = np.nonzero(weights >= (1.0 - top_p) * total / len(weights))
    tokens = heavy[np.argsort(-weights[heavy], kind="stable")]
    upto = np.cumsum(weights[tokens])
    return tokens[: int(np.searchsorted(upto, top_p * total)) + 1]


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1), by Philox: counted, so none depends on one before it."""
    word = np.random.Philox(key=seed, counter=position).random_raw()
    return float(int(word) >> 11) / float(1 << 53)
