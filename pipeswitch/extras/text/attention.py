"""Attention and experts of served language models, for all model families.

Models of transformers call both through an interface of that library. These implementations can be
exported with open lengths: the attention supports windows, soft caps and sinks, and the shapes of
the experts' tensors do not depend on data.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any, Final, NoReturn

import torch
from torch import nn
from torch.nn import functional

from ...base.errors import RegistrationRefused

NAME: Final = "pipeswitch"  # name of these implementations in transformers
UNUSUAL: Final = "register it without generate; each request then computes the whole text"
_READ: Final = frozenset({"sliding_window", "softcap", "s_aux"})
# Keywords without effect here: keys contain their positions already, and nothing is dropped out.
_UNREAD: Final = frozenset(
    ("dropout", "is_causal", "position_ids", "cache_position", "use_cache", "return_dict")
)
EXPERTS_TOGETHER: Final = 8  # experts per product, to limit the memory of its result


class AttentionStep:
    """Attention masks for one forward pass over several sequences with a cache."""

    def __init__(
        self, step: torch.Tensor, used: torch.Tensor, past: int, windows: Sequence[int] = ()
    ) -> None:
        """Describe a pass.

        Args:
            step: [length], the new tokens' numbers: 0, 1, ...
            used: [batch], number of used rows of the cache.
            past: number of rows of the cache.
            windows: for each layer, the tokens to which a token attends, itself included; 0: all.
        """
        self._step, self._used, self._past, self._windows = step, used, past, windows
        self.asked: dict[int, int] = {}  # layer -> window that the model's own code requested
        self._masks: dict[tuple[int, int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        token = _STEP.set(self)
        try:
            yield
        finally:
            _STEP.reset(token)

    def full(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the mask without a window: [batch, 1, length, past + length].

        It is added to the scores: 0 for used rows, the token and earlier new tokens, else -inf.
        """
        batch, length = self._used.shape[0], self._step.shape[0]
        rows = torch.arange(self._past, device=self._step.device)
        is_used = (rows < self._used[:, None])[:, None].expand(batch, length, self._past)
        is_before = (self._step <= self._step[:, None])[None].expand(batch, length, length)
        return self._added(torch.cat([is_used, is_before], -1), dtype)

    def mask(self, full: torch.Tensor, window: int, groups: int) -> torch.Tensor:
        """Return the mask for layers with this window and ``groups`` heads for each key."""
        key = (id(full), window, groups)
        if key not in self._masks:
            mask = full + self._within(window, full.dtype) if window else full
            mask = mask if groups == 1 else mask.repeat(1, 1, groups, 1)
            self._masks[key] = (mask, full)  # keeps ``full`` alive, so that its id stays unique
        return self._masks[key][0]

    def window(self, layer: int, requested: int) -> int:
        """Return a layer's window; record ``requested``, the window of the model's own code."""
        self.asked[layer] = requested
        return self._windows[layer] if layer < len(self._windows) else requested

    def _within(self, window: int, dtype: torch.dtype) -> torch.Tensor:
        batch, length = self._used.shape[0], self._step.shape[0]
        rows = torch.arange(self._past, device=self._step.device)
        oldest = self._used[:, None] + self._step - window  # newest row outside the window
        is_past = rows > oldest[:, :, None]
        is_new = (self._step > self._step[:, None] - window)[None].expand(batch, length, length)
        return self._added(torch.cat([is_past, is_new], -1), dtype)

    @staticmethod
    def _added(sees: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        bias = torch.zeros((), dtype=dtype, device=sees.device)
        return bias.masked_fill(~sees, float("-inf"))[:, None]


_STEP: ContextVar[AttentionStep] = ContextVar("step")


def register() -> None:
    """Register ``attention`` and ``experts`` in transformers as ``NAME``."""
    try:
        from transformers import AttentionInterface
        from transformers.integrations.moe import ExpertsInterface
    except ImportError:
        refuse("this transformers is too old for generate", "pip install 'transformers>=5.17'")
    AttentionInterface.register(NAME, attention)
    ExpertsInterface.register(NAME, experts)


def attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scaling: float | None = None,
    **more: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention with the masks of the current ``AttentionStep``.

    Heads that share keys are computed as one head with more rows. So no keys are repeated, and
    torch's fused kernel accepts every length.

    Args:
        query: [batch, heads, length, size]; ``key`` and ``value`` have the same or fewer heads.
        mask: the result of ``AttentionStep.full``.
        scaling: factor of the scores; None: ``size ** -0.5``.
        more: ``sliding_window`` of this layer in the model's own code; ``softcap``, the bound of
            the scores; ``s_aux`` [heads], scores of a token without a value (attention sinks);
            and ignored keywords (``_UNREAD`` and ``output_*``).

    Raises:
        RegistrationRefused: another keyword has a value, so it may change the result.
    """
    for keyword, argument in more.items():
        is_known = keyword in _READ | _UNREAD or keyword.startswith("output_")
        if not is_known and argument is not None and argument is not False:
            refuse(f"its attention takes {keyword}, which is not supported", UNUSUAL)
    softcap, sinks = more.get("softcap"), more.get("s_aux")
    batch, heads, length, size = query.shape
    shared = key.shape[1]
    step = _STEP.get()
    layer = int(getattr(module, "layer_idx", 0))
    window = step.window(layer, more.get("sliding_window") or 0)
    bias = step.mask(mask, window, heads // shared)
    packed = query.reshape(batch, shared, -1, size)
    if softcap is None and sinks is None:
        values = functional.scaled_dot_product_attention(
            packed, key, value, attn_mask=bias, scale=scaling
        )
    else:
        scores = packed @ key.transpose(-1, -2) * (size**-0.5 if scaling is None else scaling)
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        scores = scores + bias
        if sinks is not None:
            column = sinks.reshape(1, shared, -1, 1, 1).to(scores.dtype)
            column = column.expand(batch, shared, heads // shared, length, 1)
            scores = torch.cat([scores, column.reshape(batch, shared, -1, 1)], -1)
        weights = torch.softmax(scores, -1, dtype=torch.float32).to(query.dtype)
        values = weights[..., : key.shape[2]] @ value
    return values.reshape(batch, heads, length, value.shape[-1]).transpose(1, 2), None


def experts(
    module: Any, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Compute all experts for all tokens, and add up the results of the chosen experts.

    Gathering the chosen experts' weights would copy them for each token. That takes gigabytes for a
    prompt, and is slower even for one token: 22 ms for 8 of 32 experts, against 13 ms for all 32.

    Args:
        module: the experts of transformers, with the weights of all experts in one tensor.
        hidden: [tokens, size].
        chosen: [tokens, top_k], numbers of experts.
        weights: [tokens, top_k], factors of the results.
    """
    share = torch.zeros(hidden.shape[0], module.num_experts, dtype=weights.dtype)
    share = share.to(hidden.device).scatter(1, chosen, weights).t()[:, :, None]
    result = torch.zeros_like(hidden)
    for first in range(0, module.num_experts, EXPERTS_TOGETHER):
        some = slice(first, min(first + EXPERTS_TOGETHER, module.num_experts))
        inner = _product(module, hidden, "gate_up_proj" if module.has_gate else "up_proj", some)
        inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
        outer = _product(module, inner, "down_proj", some)
        if getattr(module, "has_post_expert_norm", False):  # transformers 5.17 has no such norm
            outer = module.post_expert_norm(outer)
        result = result + (outer * share[some]).sum(0).to(hidden.dtype)
    return result


def _product(module: Any, source: torch.Tensor, name: str, some: slice) -> torch.Tensor:
    weight = getattr(module, name)[some]
    product: torch.Tensor = source @ (weight if module.is_transposed else weight.transpose(1, 2))
    return product + getattr(module, f"{name}_bias")[some][:, None] if module.has_bias else product


def refuse(reason: str, hint: str = "") -> NoReturn:
    """Raise ``RegistrationRefused`` for a language model."""
    raise RegistrationRefused("generate", reason, hint=hint)
