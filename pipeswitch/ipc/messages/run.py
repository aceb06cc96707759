"""Run: what a worker computes for one request in one task. It is passed on whole.

The frontend writes the inputs to the request pool and creates the run. The scheduler decides when
and with which other runs it computes (``RunInference``). A request of a kind (``RunKind``) has one
run after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from .base import OpId, SlabTensor

LARGE_BYTES: Final = 3000  # size of one request's parameters; a packet has space for 64 requests


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sampling of an answer's tokens (``extras/text/decoding``), and the number of
    steps that a worker may continue in one run (ADR 54)."""

    steps: int = 1
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    options: dict[str, Any] | None = None
    seen: tuple[tuple[int, int], ...] = ()  # earlier tokens, each with its count in the answer
    stop: tuple[int, ...] = ()  # tokens that end the answer
    left: int = 1  # maximum number of further tokens, those of this run included
    answer: tuple[int, ...] = ()  # the answer's tokens so far, if it follows a schema
    forced: tuple[int, ...] = ()  # prompt tokens that replace sampled tokens, to score the prompt
    is_piece: bool = False  # the run computes a part of the prompt, so it chooses no token

    @property
    def schema(self) -> str:
        """JSON schema that the answer follows; empty if there is none."""
        return "" if self.options is None else self.options.get("json_schema", "")

    @property
    def never_batch(self) -> bool:
        """True if a request with a schema must run alone: before its first token, because its
        schema may be unusable, and if it is large, because a packet must hold the whole batch."""
        if self.options is None or not self.schema:
            return False
        return not self.answer or len(self.schema) + 5 * len(self.answer) > LARGE_BYTES

    def ends_with(self, tokens: Sequence[int]) -> str:
        """Return why the answer ends after this run's tokens: ``stop`` or ``length``; empty if
        it continues."""
        if tokens and tokens[-1] in self.stop:
            return "stop"
        return "length" if not self.is_piece and len(tokens) >= self.left else ""

    def allows(self, tokens: Sequence[int]) -> bool:
        """Return whether a worker may have chosen this number of tokens in one run."""
        most = 0 if self.is_piece else min(self.steps, self.left)
        return min(1, most) <= len(tokens) <= most


class Run(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Inputs of one request, the place of its reply in the request pool, and its sampling."""

    request_id: str
    inputs: tuple[SlabTensor, ...] = ()
    reply_offset_bytes: int = 0
    reply_bytes: int = 0
    sampling_params: SamplingParams | None = None  # None: the outputs are the model's own
    cache: int = 0  # number of the KV cache that this run continues; 0: none
    after: OpId = OpId(0)  # the run that wrote the cache's newest rows; its worker may have them
    leader: int | None = None  # token of a request whose next run computes a part of this one
