"""Sampling of the next token from logits, settings and a random number. Pure, no clock.

The random number of a token depends only on (seed, position). Other sequences in the step, repeated
runs and restarts do not change it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from ....base.errors import InvalidInput

MAX_SEED: Final = (1 << 63) - 1
MAX_TEMPERATURE: Final = 100.0
MAX_BIASES: Final = 300  # OpenAI's limit
MAX_BIAS: Final = 100.0
MAX_HELD: Final = 128  # end tokens of a model and of a request
MAX_UNTIL: Final = 1 << 40  # longer than any context
MAX_SCHEMA_CHARS: Final = 8 << 10  # the message of each step contains the schema
MAX_LOGPROBS: Final = 20  # OpenAI's limit
BLOCK: Final = 64  # values a block; blocks' maxima are compared first
NO_TOKENS: Final[Mapping[int, int]] = {}

Chance = tuple[float, tuple[tuple[int, float], ...]]
"""A token's log probability, and (token, log probability) of the likeliest tokens at its place."""


class Options(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """Sampling options that few requests use. The defaults change nothing."""

    top_k: int = 0  # number of candidates; 0: all tokens
    min_p: float = 0.0  # minimum probability of a candidate, relative to the likeliest token's
    repetition_penalty: float = 1.0  # divides positive logits of earlier tokens, multiplies others
    presence_penalty: float = 0.0  # subtracted from the logits of tokens in the answer
    frequency_penalty: float = 0.0  # subtracted for each occurrence of the token in the answer
    logit_bias: dict[int, float] = {}  # token -> number added to its logit
    held: tuple[int, ...] = ()  # tokens that cannot be sampled before position ``until``
    until: int = 0
    logprobs: int | None = None  # report each token's ``Chance``, with this many likeliest tokens
    json_schema: str = ""  # schema of the answer
    scores_prompt: bool = False  # report the prompt's tokens first, each with its ``Chance``

    @property
    def needs_seen(self) -> bool:
        penalties = self.repetition_penalty - 1.0, self.presence_penalty, self.frequency_penalty
        return any(penalties)

    def check(self, vocabulary: int = 1 << 31) -> None:
        """Raise InvalidInput if a value is out of its range."""
        for name, low, high in (
            ("top_k", 0, vocabulary),
            ("min_p", 0.0, 1.0),
            ("repetition_penalty", 0.01, 100.0),
            ("presence_penalty", -2.0, 2.0),
            ("frequency_penalty", -2.0, 2.0),
            ("until", 0, MAX_UNTIL),
        ):
            if not low <= (value := getattr(self, name)) <= high:
                raise InvalidInput(f"{name} {value} is not from {low} to {high}", param=name)
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_LOGPROBS:
            raise InvalidInput(
                f"logprobs {self.logprobs} is not from 0 to {MAX_LOGPROBS}", param="logprobs"
            )
        if self.scores_prompt and self.logprobs is None:
            raise InvalidInput("scores_prompt needs logprobs", hint="logprobs=0", param="logprobs")
        contradicts = self.json_schema and (self.until or self.scores_prompt)
        if len(self.json_schema) > MAX_SCHEMA_CHARS or contradicts:
            words = f"a JSON schema has at most {MAX_SCHEMA_CHARS} characters, and no min_tokens"
            raise InvalidInput(words, param="response_format")
        biases = self.logit_bias
        is_small = all(-MAX_BIAS <= value <= MAX_BIAS for value in biases.values())
        if len(biases) > MAX_BIASES or not is_small:
            raise InvalidInput(
                f"logit_bias has at most {MAX_BIASES} tokens, with values from -100 to 100",
                param="logit_bias",
            )
        if len(self.held) > MAX_HELD:
            raise InvalidInput(f"held has at most {MAX_HELD} tokens", param="held")
        if odd := [token for token in (*biases, *self.held) if not 0 <= token < vocabulary]:
            name = "logit_bias" if odd[0] in biases else "stop_token_ids"
            raise InvalidInput(f"{name}: {odd[0]} is not a token of the model", param=name)

    def adjusted(
        self, logits: NDArray[np.floating], position: int, token_counts: Mapping[int, int]
    ) -> NDArray[np.float64]:
        """Return the logits with biases and penalties.

        ``token_counts`` has each token of the prompt and the answer, with its count in the answer.
        """
        values = logits.astype(np.float64)
        tokens = np.array([token for token in token_counts if token < len(values)], np.intp)
        if self.needs_seen and len(tokens):
            counts, own = np.array([token_counts[int(token)] for token in tokens]), values[tokens]
            by = np.where(own > 0, 1.0 / self.repetition_penalty, self.repetition_penalty)
            values[tokens] = own * by - self.frequency_penalty * counts
            values[tokens[counts > 0]] -= self.presence_penalty
        for token, bias in self.logit_bias.items():
            values[token] += bias
        if position < self.until:
            values[[*self.held]] = -np.inf
        return values

    def cut(self, weights: NDArray[np.float64]) -> None:
        """Set the weights of tokens that are not candidates to zero."""
        least = self.min_p * float(weights.max())
        if 0 < self.top_k < len(weights):
            least = max(least, _nth_largest(weights, self.top_k))
        weights[weights < least] = 0.0


class Sampling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings for sampling an answer's tokens."""

    temperature: float = 0.0  # 0: the likeliest token, the first one among equals
    top_p: float = 1.0  # total probability of the candidates; 0: the likeliest token
    seed: int = 0
    options: Options | None = None

    def check(self) -> None:
        for name, value, low, high in (
            ("temperature", self.temperature, 0.0, MAX_TEMPERATURE),
            ("top_p", self.top_p, 0.0, 1.0),
            ("seed", self.seed, 0, MAX_SEED),
        ):
            if not low <= value <= high:
                words = f"{name} {value} is not a number from {low} to {high}"
                raise InvalidInput(words, param=name)
        if self.options is not None:
            self.options.check()


def sampling_of(sampling_params: Any) -> Sampling:
    """Return the sampling settings from the fields of a message.

    Raises:
        InvalidInput: a field has the wrong type, or an option is unknown.
    """
    named = {name: getattr(sampling_params, name) for name in Sampling.__struct_fields__}
    try:
        return msgspec.convert(named, Sampling)
    except msgspec.ValidationError as error:
        raise InvalidInput(f"sampling: {error}") from None


def next_token(
    logits: NDArray[np.floating],
    sampling: Sampling,
    position: int,
    token_counts: Mapping[int, int] = NO_TOKENS,
) -> int:
    """Return the token at ``position`` of its sequence, counted from the prompt's first token.

    Args:
        logits: [vocabulary], as the program returned them.
        sampling: checked settings.
        position: position of the new token.
        token_counts: see ``Options.adjusted``.

    Raises:
        InvalidInput: the largest logit is not a finite number, so the model is broken.
    """
    if sampling.options is not None:
        logits = sampling.options.adjusted(logits, position, token_counts)
    best = int(np.argmax(logits))  # the index of a NaN, if there is one
    if has_nan := math.isnan(logits[best]):
        best = int(np.argmax(np.where(np.isnan(logits), -np.inf, logits)))
    if not math.isfinite(logits[best]):
        raise InvalidInput(f"its largest logit at position {position} is {logits[best]}")
    if sampling.temperature == 0.0:
        return best
    # In place: allocating costs more than computing. ``adjusted`` made a copy.
    weights = logits.astype(np.float64, copy=sampling.options is None)
    with np.errstate(over="ignore"):  # -inf is the right result for a tiny temperature
        weights -= float(logits[best])
        weights /= sampling.temperature
    np.exp(weights, out=weights)
    if has_nan:
        weights[np.isnan(weights)] = 0.0
    if sampling.options is not None:
        sampling.options.cut(weights)
    tokens = _top_filter(weights, sampling.top_p) if sampling.top_p < 1.0 else None
    chosen = weights if tokens is None else weights[tokens]
    upto = np.cumsum(chosen, out=chosen)
    drawn = uniform(sampling.seed, position) * upto[-1]
    place = min(int(np.searchsorted(upto, drawn, side="right")), len(upto) - 1)
    return place if tokens is None else int(tokens[place])


def chance_of(logits: NDArray[np.floating], token: int, count: int) -> Chance:
    """Return the chance of a token before temperature, biases and penalties.

    Args:
        logits: as in ``next_token``.
        count: number of likeliest tokens to return, in order.
    """
    values = logits.astype(np.float64)
    values[np.isnan(values)] = -np.inf
    values -= values.max()
    values -= math.log(float(np.exp(values).sum()))
    best = np.argpartition(-values, min(count, len(values) - 1))[:count]
    order = sorted([int(one) for one in best], key=lambda one: (-values[one], one))
    # JSON has no infinity; the smallest float32 also means a probability of 0.
    logs = np.maximum(values[[token, *order]], np.finfo(np.float32).min).tolist()
    return logs[0], tuple(zip(order, logs[1:], strict=True))


def _top_filter(weights: NDArray[np.float64], top_p: float) -> NDArray[np.intp]:
    """Return the smallest set of tokens that has ``top_p`` of the total weight, likeliest first."""
    total = float(weights.sum())
    # All tokens below this weight together have less than 1 - top_p, so none of them is needed.
    [heavy] = np.nonzero(weights >= (1.0 - top_p) * total / len(weights))
    tokens = heavy[np.argsort(-weights[heavy], kind="stable")]
    upto = np.cumsum(weights[tokens])
    return tokens[: int(np.searchsorted(upto, top_p * total)) + 1]


def _nth_largest(values: NDArray[np.float64], n: int) -> float:
    """Return the n-th largest value. It is at least the n-th largest of the blocks' maxima."""
    largest = values[: len(values) // BLOCK * BLOCK].reshape(-1, BLOCK).max(1)
    if n <= len(largest):
        values = values[values >= np.partition(largest, -n)[-n]]
    return float(np.partition(values, -n)[-n])


def uniform(seed: int, position: int) -> float:
    """Return a random number in [0, 1) from counter-based Philox, without state between calls."""
    word = np.random.Philox(key=seed, counter=position).random_raw()
    return float(int(word) >> 11) / float(1 << 53)
