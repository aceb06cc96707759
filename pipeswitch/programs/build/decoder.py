"""A causal language model of transformers as one program with a state (ADR 49).

One graph serves a prompt and each token after it: the keys and values of earlier tokens come in as
``cache``, one row for each token, and the rows of the new ones go out to be appended. Nothing is
written in place, so the program is as any other: it may be run again.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any, Final, NoReturn

import torch
from torch import nn
from torch.nn import functional

from ...base.errors import RegistrationRefused
from ...base.units import format_bytes
from ..decoding.generation import (
    CACHE,
    CACHE_NEW,
    LOGITS,
    VERSION,
    Generation,
    author_defaults,
    packed_tokenizer,
)
from ..running.factories import parameters_of
from .dynamic import Dynamic

LARGEST_CACHE_BYTES: Final = 1 << 30  # of one sequence: the longest is computed in the build
LONGEST_PIECE: Final = 512  # tokens of one step: a longer prompt is several
_ATTENTION: Final = "pipeswitch"  # our name among those of transformers
_CLOSE: Final = 0.02  # of the largest logit: bfloat16 differs by 0.01, a wrong mask by 0.3
_BATCH_LENGTH_PAST: Final = (2, 5, 7)  # of the example: all unlike, none 1


class Decoder(nn.Module):
    """A causal language model with its cache as an input; see ``generation.py`` for the shapes."""

    def __init__(self, model: Any) -> None:
        """Wrap ``model``, which stays as it is.

        Raises:
            RegistrationRefused: its state is not a cache of keys and values of all tokens.
        """
        super().__init__()
        self.model = model
        self._cache_keyword = "cache" if "cache" in parameters_of(model) else "past_key_values"
        layers = _cache_layers(model, self._cache_keyword)
        self.shapes = [(k.shape[1], k.shape[3], v.shape[3]) for k, v in layers]
        self.dtype = layers[0][0].dtype
        self._sizes = [heads * size for heads, *both in self.shapes for size in both]
        self.width = sum(self._sizes)  # of a token's row
        said = getattr(_text_config(model), "max_position_embeddings", None)
        if not isinstance(said, int) or said <= max(_BATCH_LENGTH_PAST):
            _refuse("its configuration does not say how long a sequence may be")
        self.context = min(said, LARGEST_CACHE_BYTES // (self.width * self.dtype.itemsize))
        self.notes = [] if self.context == said else [
            f"context is {self.context} tokens, not {said}: a sequence's cache has at most "
            f"{format_bytes(LARGEST_CACHE_BYTES)}"
        ]  # fmt: skip
        from transformers import AttentionInterface

        AttentionInterface.register(_ATTENTION, _attention)

    def forward(
        self, ids: torch.Tensor, count: torch.Tensor, used: torch.Tensor, cache: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        from transformers.cache_utils import Cache

        batch, length = ids.shape
        step = torch.arange(length, device=ids.device)
        # Padding may run past the end of a table of positions; what it gives is not looked at.
        position = (used[:, None] + step).clamp(0, self.context - 1)
        layers = [_past_layer()(keys, values) for keys, values in self._past(cache)]
        with self._as_decoder(count):
            logits = self.model(
                input_ids=ids,
                position_ids=position,
                attention_mask=self._mask(step, used, cache),
                use_cache=True,
                return_dict=True,
                **{self._cache_keyword: Cache(layers)},
            ).logits
        rows = [new.transpose(1, 2).reshape(batch, length, -1) for one in layers for new in one.new]
        return {LOGITS: logits[:, 0], CACHE_NEW: torch.cat(rows, -1)}

    def _past(self, cache: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield each layer's keys and values, [batch, heads, past, size], as views."""
        parts = iter(torch.split(cache, self._sizes, -1))
        batch, past = cache.shape[:2]
        for heads, key_size, value_size in self.shapes:
            keys = next(parts).view(batch, past, heads, key_size).transpose(1, 2)
            yield keys, next(parts).view(batch, past, heads, value_size).transpose(1, 2)

    def _mask(self, step: torch.Tensor, used: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        """Return the attention mask: new tokens see the rows in use, themselves and earlier
        ones.

        It is added to the scores: [batch, 1, length, past + length].
        """
        batch, past = cache.shape[:2]
        length = step.shape[0]
        rows = torch.arange(past, device=cache.device)
        is_used = (rows < used[:, None])[:, None].expand(batch, length, past)
        is_before = (step <= step[:, None])[None].expand(batch, length, length)
        sees = torch.cat([is_used, is_before], -1)
        bias = torch.zeros((), dtype=cache.dtype, device=cache.device)
        return bias.masked_fill(~sees, float("-inf"))[:, None]

    @contextlib.contextmanager
    def _as_decoder(self, count: torch.Tensor) -> Iterator[None]:
        """Run the model with our attention, and with logits of each last real token only."""

        def last(head: nn.Module, hidden: tuple[torch.Tensor]) -> torch.Tensor:
            batch = torch.arange(count.shape[0], device=count.device)
            return hidden[0][batch, count - 1][:, None]

        config = _text_config(self.model)
        before = config._attn_implementation
        hook = self.model.get_output_embeddings().register_forward_pre_hook(last)
        config._attn_implementation = _ATTENTION
        try:
            yield
        finally:
            config._attn_implementation = before
            hook.remove()

    def example(self) -> dict[str, torch.Tensor]:
        """Return the example inputs for the export."""
        batch, length, past = _BATCH_LENGTH_PAST
        return {
            "ids": torch.arange(batch * length).view(batch, length) % self.vocabulary,
            "count": torch.tensor([length, length - 2]),
            "used": torch.tensor([past, past - 3]),
            CACHE: torch.linspace(-1, 1, batch * past * self.width, dtype=self.dtype).view(
                batch, past, self.width
            ),
        }

    def dynamic(self) -> Dynamic:
        longest = min(LONGEST_PIECE, self.context)
        return {"ids": {1: ("length", 1, longest)}, CACHE: {1: ("past", 1, self.context)}}

    @property
    def vocabulary(self) -> int:
        return int(self.model.get_output_embeddings().weight.shape[0])

    def generation(self, tokenizer: Any = None) -> Generation:
        """Return the bundle's data beside the graph; ``tokenizer`` is a fast tokenizer or None."""
        own = getattr(self.model, "generation_config", None)
        settings = own or self.model.config
        eos, bos = settings.eos_token_id, settings.bos_token_id
        ends = [*eos] if isinstance(eos, list | tuple) else [] if eos is None else [eos]
        known = range(self.vocabulary)
        sampling, notes = author_defaults(own.to_diff_dict() if own else {}, self.context)
        if beyond := [one for one in ends if one not in known]:
            notes.append(f"eos_token_id {beyond} of its author: the model has no such token")
        text = tokenizer.backend_tokenizer.to_str() if tokenizer is not None else ""
        template, unread = _chat_template(getattr(tokenizer, "chat_template", None))
        special = getattr(tokenizer, "special_tokens_map", {})
        return Generation(
            version=VERSION,
            vocabulary=self.vocabulary,
            context=self.context,
            eos_ids=tuple(one for one in ends if one in known),
            bos_id=bos if bos in known else None,
            chat_template=template,
            special={key: one for key, one in special.items() if isinstance(one, str)},
            tokenizer=packed_tokenizer(text) if text else b"",
            sampling=sampling,
            notes=(*notes, *unread),
        )

    def check(self) -> None:
        """Compare with the model's own answer, a prompt in pieces and token by token.

        Raises:
            RegistrationRefused: what it remembers of a sequence is not in the cache alone.
        """
        ids = torch.arange(1, 9)[None] % self.vocabulary
        with torch.no_grad():
            own = self.model(input_ids=ids, use_cache=False, return_dict=True).logits[0]
            cache = torch.zeros(1, 1, self.width, dtype=self.dtype)
            seen = 0
            for length in (3, 1, 1, 3):
                piece = ids[:, seen : seen + length]
                given = torch.tensor([length]), torch.tensor([seen])
                found = self(piece, *given, cache)
                cache = torch.cat([cache[:, :seen], found[CACHE_NEW]], 1)
                seen += length
                difference = float((found[LOGITS][0] - own[seen - 1]).abs().max())
                if not difference <= _CLOSE * float(own[seen - 1].abs().max()):
                    _refuse(
                        "with its keys and values as a state it answers other logits (they differ "
                        f"by {difference:.2g} at token {seen}): it keeps something else, or its "
                        "attention is not the usual one"
                    )


def _chat_template(given: Any) -> tuple[str, list[str]]:
    """Return the template that transformers uses for a chat: the default one, or the only one.

    If there is none among several, a note says so.
    """
    named = given if isinstance(given, dict) else {"default": given or ""}
    if "default" in named or len(named) == 1:
        return str(named.get("default") or next(iter(named.values()))), []
    names = ", ".join(sorted(map(str, named)))
    note = f"its chat templates are named {names}, and none of them default: no chat is served"
    return "", [note] if named else []


def _text_config(model: Any) -> Any:
    return model.config.get_text_config(decoder=True)


def _cache_layers(model: Any, keyword: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return each layer's keys and values of two tokens; refuse layers that keep anything else."""
    from transformers.cache_utils import DynamicCache, DynamicLayer

    refuse_encoder(model.config)
    if not hasattr(model, "get_output_embeddings") or model.get_output_embeddings() is None:
        _refuse(f"{type(model).__name__} has no logits of a next token", "hf:NAME#…ForCausalLM")
    cache = DynamicCache(config=_text_config(model))
    others = {type(layer).__name__ for layer in cache.layers if type(layer) is not DynamicLayer}
    if others:
        _refuse(
            f"it has layers of {', '.join(sorted(others))}: a state is the keys and values of all "
            "tokens, not of a window, and nothing recurrent"
        )
    with torch.no_grad():
        model(input_ids=torch.zeros(1, 2, dtype=torch.long), use_cache=True, **{keyword: cache})
    layers = [(layer.keys, layer.values) for layer in cache.layers]
    if not layers or any(keys is None or keys.shape[2] != 2 for keys, _ in layers):
        _refuse("it does not keep keys and values of each layer and token")
    return layers


@functools.cache
def _past_layer() -> Any:
    from transformers.cache_utils import DynamicLayer

    class Past(DynamicLayer):  # type: ignore[misc]  # untyped upstream
        """A layer's keys and values; the new ones are kept apart."""

        def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
            super().__init__()
            self.keys, self.values, self.is_initialized = keys, values, True

        def update(self, keys: Any, values: Any, *more: Any, **named: Any) -> Any:
            self.new = (keys, values)
            return torch.cat([self.keys, keys], 2), torch.cat([self.values, values], 2)

    return Past


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scaling: float | None = None,
    **more: Any,
) -> tuple[torch.Tensor, None]:
    """Heads that share keys are asked as one with more rows: nothing is repeated, and torch's
    fused kernel takes it at every length."""
    for name in ("softcap", "sliding_window", "s_aux", "position_bias"):
        if more.get(name) is not None:
            _refuse(f"its attention has {name}")
    batch, heads, length, _ = query.shape
    groups = heads // key.shape[1]
    packed = query.reshape(batch, key.shape[1], -1, query.shape[-1])
    found = functional.scaled_dot_product_attention(
        packed, key, value, attn_mask=_packed(mask, groups), scale=scaling
    )
    return found.reshape(batch, heads, length, value.shape[-1]).transpose(1, 2), None


def _packed(mask: torch.Tensor, groups: int) -> torch.Tensor:
    """Return the mask of packed heads, made once for all layers and kept on the call's own mask."""
    if groups == 1:
        return mask
    made: dict[int, torch.Tensor] = vars(mask).setdefault("of_groups", {})
    if groups not in made:
        made[groups] = mask.repeat(1, 1, groups, 1)
    return made[groups]


def refuse_encoder(config: Any) -> None:
    if config.is_encoder_decoder:
        _refuse("an encoder answers before its decoder, and its output is state of another kind")


def decoder(model: Any) -> Decoder:
    """``model``, whose weights are in place, as a module with a state.

    Raises:
        RegistrationRefused: it cannot be one; says why.
    """
    if not hasattr(model, "config"):
        _refuse(f"a {type(model).__name__} is no language model of transformers")
    try:
        found = Decoder(model)
        found.check()
    except RegistrationRefused:
        raise
    except Exception as error:  # a model's own code
        _refuse(f"with a state it raised {type(error).__name__}: {str(error)[:200]}")
    return found


def _refuse(reason: str, hint: str = "") -> NoReturn:
    raise RegistrationRefused("generate", reason, hint=hint)
