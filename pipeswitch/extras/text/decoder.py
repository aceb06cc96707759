"""A causal language model of transformers as one program with a state (ADR 49).

One graph computes a prompt and each later token. Its input ``cache`` has the keys and values of
earlier tokens, one row for each token, and an output has the rows of new tokens, to be appended.
The graph writes nothing in place, so a run can be repeated as with any other program.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional

from ...base.errors import RegistrationRefused
from ...base.units import format_bytes
from ...programs.compiler.checking import largest_number
from ...programs.compiler.dynamic import Dynamic
from ...programs.interface.layout import CACHE
from ...programs.running.factories import parameters_of
from . import attention
from .attention import UNUSUAL, AttentionStep, refuse
from .decoder_spec import decoder_spec, text_config
from .decoding.generation_settings import (
    CACHE_NEW,
    LOGITS,
    VERSION,
    GenerationSettings,
    author_defaults,
    packed_tokenizer,
    tokenizer_text,
)

MAX_CACHE_BYTES: Final = 1 << 30  # maximum cache of a sequence; the build runs one of this size
MAX_PIECE: Final = 512  # maximum tokens of one step; a longer prompt takes several steps
UNLIMITED: Final = 2048  # context of a model without a limit; BLOOM was trained with it
_CLOSE: Final = 0.02  # accepted error / largest logit: bfloat16 causes 0.01, a wrong mask 0.3
_BATCH_LENGTH_PAST: Final = (2, 5, 7)  # the example's; all differ, and none is 1: export fixes 1
_ROUNDING: Final = 1e-4  # effect of another order of a sum, relative to the largest logit
_CHECKED: Final = 8  # minimum tokens of ``check``; a window of up to ``_SHORT`` tokens needs more
_SHORT: Final = 64


class Decoder(nn.Module):
    """Causal language model with its cache as an input (shapes: ``generation_settings.py``)."""

    def __init__(self, model: Any) -> None:
        """Wrap ``model`` without changing it.

        Raises:
            RegistrationRefused: the model's state is not a cache of keys and values.
        """
        super().__init__()
        refuse_encoder(model.config)
        if not hasattr(model, "get_output_embeddings") or model.get_output_embeddings() is None:
            refuse(f"{type(model).__name__} has no logits for a next token", "hf:NAME#…ForCausalLM")
        attention.register()
        self.model = model
        takes = parameters_of(model)
        self._cache_keyword = "cache" if "cache" in takes else "past_key_values"
        self._takes_positions = "position_ids" in takes
        self.spec = decoder_spec(model, self._cache_keyword)
        self.dtype = self.spec.dtype
        self.width = sum(self.spec.sizes)  # elements of a token's cache row
        self.context, self.notes = self._context(text_config(model))
        if _ignores_cap(text_config(model)):
            self.notes.append("its attention scores are capped, unlike with transformers' sdpa")
        self.piece = min(MAX_PIECE, self.context)
        if not self.spec.has_our_attention and self._has_a_table():
            longest = self.context
            self.piece = min(MAX_PIECE, longest // 4)
            self.context -= self.piece
            self.notes.append(
                f"context is {self.context} tokens, not {longest}: its own attention has a table "
                f"of {longest} places, and {self.piece} of them are for new tokens"
            )

    def _context(self, config: Any) -> tuple[int, list[str]]:
        """Return the maximum number of tokens of a sequence, and notes that explain it."""
        names = ("max_position_embeddings", "max_seq_len", "seq_length")
        longest = next(filter(None, (getattr(config, name, None) for name in names)), UNLIMITED)
        if not isinstance(longest, int) or longest <= max(_BATCH_LENGTH_PAST):
            refuse("its configuration does not say how long a sequence may be")
        cache = MAX_CACHE_BYTES // (self.width * self.dtype.itemsize)
        limits = {cache: f"a sequence's cache has at most {format_bytes(MAX_CACHE_BYTES)}"}
        rope = getattr(config, "rope_parameters", None) or {}
        if rope.get("rope_type") == "longrope":
            short = rope["original_max_position_embeddings"]
            limits[short] = "a longer text would turn the keys of all its tokens (longrope)"
        context = min(longest, *limits)
        if context == longest:
            return context, []
        return context, [f"context is {context} tokens, not {longest}: {limits[context]}"]

    def _has_a_table(self) -> bool:
        """Return whether the model's own attention fails if padding extends past the context."""
        used = torch.tensor([self.context - 2])
        cache = torch.zeros(1, self.context, self.width, dtype=self.dtype)
        try:
            with torch.no_grad():
                self(torch.zeros(1, 2, dtype=torch.long), torch.tensor([2]), used, cache)
        except (RuntimeError, IndexError, ValueError):
            return True
        return False

    def forward(
        self, ids: torch.Tensor, count: torch.Tensor, used: torch.Tensor, cache: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        from transformers.cache_utils import Cache

        batch, length = ids.shape
        step = torch.arange(length, device=ids.device)
        # Padding may extend past a table of positions, so clamp; its results are ignored.
        position = (used[:, None] + step).clamp(0, self.context - 1)
        if self.spec.has_our_attention:
            mask = self._mask(step, used, cache)
        else:
            cache, mask = _without_gaps(cache, used, length)
        layers = [*self._past(cache)]
        keywords = {"position_ids": position} if self._takes_positions else {}
        current = AttentionStep(step, used, cache.shape[1], self.spec.windows)
        with self._as_decoder(count), current():
            logits = self.model(
                input_ids=ids,
                attention_mask=mask,
                use_cache=True,
                return_dict=True,
                **keywords,
                **{self._cache_keyword: Cache(layers)},
            ).logits
        new = [part for one in layers for part in getattr(one, "new", ())]
        rows = [part.transpose(1, 2).reshape(batch, length, -1) for part in new]
        return {LOGITS: logits[:, 0], CACHE_NEW: torch.cat(rows, -1)}

    def _past(self, cache: torch.Tensor) -> Iterator[Any]:
        """Yield each layer's cache for transformers; its keys and values are views of the rows."""
        from transformers import cache_utils

        no_cache = getattr(cache_utils, "DummyLayer", None)  # before 5.20: such layers are left out
        parts = iter(torch.split(cache, self.spec.sizes, -1))
        batch, past = cache.shape[:2]
        for layer in self.spec.layers:
            if layer.kind == "shared":
                if no_cache is not None:
                    yield no_cache()
                continue
            keys, values = (
                next(parts).view(batch, past, layer.heads, size).transpose(1, 2)
                for size in (layer.key_size, layer.value_size)
            )
            yield _past_layer()(keys, values)

    def _mask(self, step: torch.Tensor, used: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        """Return the mask of a layer without a window: [batch, 1, length, past + length]."""
        return AttentionStep(step, used, cache.shape[1]).full(cache.dtype)

    @contextlib.contextmanager
    def _as_decoder(self, count: torch.Tensor) -> Iterator[None]:
        """Use our attention and experts, and compute only last tokens' logits, inside the block."""

        def last(head: nn.Module, hidden: tuple[torch.Tensor]) -> torch.Tensor:
            batch = torch.arange(count.shape[0], device=count.device)
            return hidden[0][batch, count - 1][:, None]

        config = text_config(self.model)
        before = config._attn_implementation, config._experts_implementation
        hook = self.model.get_output_embeddings().register_forward_pre_hook(last)
        name = attention.NAME if self.spec.has_our_attention else before[0]
        # Within the context these rotations are constant, but their code looks at all positions.
        kinds = [(m, getattr(m, "rope_type", "")) for m in self.model.modules()]
        rotary = [one for one in kinds if one[1] in ("dynamic", "longrope")]
        config._attn_implementation, config._experts_implementation = name, attention.NAME
        for module, _ in rotary:
            module.rope_type = "default"
        try:
            yield
        finally:
            for module, rope_type in rotary:
                module.rope_type = rope_type
            config._attn_implementation, config._experts_implementation = before
            hook.remove()

    def example(self) -> dict[str, torch.Tensor]:
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
        return {"ids": {1: ("length", 1, self.piece)}, CACHE: {1: ("past", 1, self.context)}}

    @property
    def vocabulary(self) -> int:
        return int(self.model.get_output_embeddings().weight.shape[0])

    def generation(self, tokenizer: Any = None) -> GenerationSettings:
        """Return the settings for the bundle; ``tokenizer`` is a fast tokenizer or None."""
        own = getattr(self.model, "generation_config", None)
        settings = own or self.model.config
        eos, bos = settings.eos_token_id, settings.bos_token_id
        ends = [*eos] if isinstance(eos, list | tuple) else [] if eos is None else [eos]
        known = range(self.vocabulary)
        sampling, notes = author_defaults(own.to_diff_dict() if own else {}, self.context)
        if beyond := [one for one in ends if one not in known]:
            notes.append(f"eos_token_id {beyond} of its author: the model has no such token")
        text = tokenizer_text(tokenizer)
        template, unread = _chat_template(getattr(tokenizer, "chat_template", None))
        special = getattr(tokenizer, "special_tokens_map", {})
        return GenerationSettings(
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
        """Compare logits with the model's own, for a prompt in pieces and token by token.

        Raises:
            RegistrationRefused: they differ, so the cache is not the model's whole state.
        """
        short = [window for window in self.spec.windows if 0 < window <= _SHORT]
        total = max([_CHECKED, *(2 * window for window in short)])
        ids = torch.arange(1, total + 1)[None] % self.vocabulary
        with torch.no_grad(), self._capping():
            own = self.model(input_ids=ids, use_cache=False, return_dict=True).logits[0]
            self._check_causal(ids, own)
            rows = torch.zeros(1, 0, self.width, dtype=self.dtype)
            position = 0
            for length in (3, 1, 1, total - 6, 1):
                piece = ids[:, position : position + length]
                counts = torch.tensor([length]), torch.tensor([position])
                padding = torch.ones(1, 3, self.width, dtype=self.dtype)  # as in a batch
                outputs = self(piece, *counts, torch.cat([rows, padding], 1))
                rows = torch.cat([rows, outputs[CACHE_NEW]], 1)
                position += length
                difference = float((outputs[LOGITS][0] - own[position - 1]).abs().max())
                if not difference <= _CLOSE * largest_number(own[position - 1]):
                    refuse(
                        "with its keys and values as a state it answers other logits (they differ "
                        f"by {difference:.2g} at token {position}): it keeps other state, or its "
                        "attention is unusual",
                        UNUSUAL,
                    )

    @contextlib.contextmanager
    def _capping(self) -> Iterator[None]:
        """Use the model's eager attention inside the block if its attention ignores a soft cap."""
        config = text_config(self.model)
        before = config._attn_implementation
        config._attn_implementation = "eager" if _ignores_cap(config) else before
        try:
            yield
        finally:
            config._attn_implementation = before

    def _check_causal(self, ids: torch.Tensor, logits: torch.Tensor) -> None:
        """Refuse a model whose logits depend on a later token, such as an encoder.

        The limit is strict: with random weights, a later token may change logits very little.
        """
        changed = torch.cat([ids[:, :-1], ids[:, :1]], 1)
        others = self.model(input_ids=changed, use_cache=False, return_dict=True).logits[0]
        difference = float((others[:-1] - logits[:-1]).abs().max())
        # Sums over experts may be computed in another order, which matters more in bfloat16.
        limit = _ROUNDING if self.dtype == torch.float32 else _CLOSE
        if not difference <= limit * largest_number(logits):
            refuse(
                f"a token changes the logits of those before it (by {difference:.2g}): it is not "
                "a causal language model",
                "register it without generate; encoders can serve /v1/embeddings",
            )


def _ignores_cap(config: Any) -> bool:
    """Return True if transformers' sdpa computes attention: it ignores the soft cap."""
    cap = getattr(config, "attn_logit_softcapping", None)
    return cap is not None and config._attn_implementation == "sdpa"


def _chat_template(template: Any) -> tuple[str, list[str]]:
    """Return the template that transformers uses for a chat, and a note if there is none.

    With several templates, a chat with tools uses ``tool_use``, and other chats use ``default``.
    """
    named = template if isinstance(template, dict) else {"default": template or ""}
    if "default" in named and "tool_use" in named:
        both = [str(named[name]).removesuffix("\n") for name in ("tool_use", "default")]
        return "{{% if tools %}}{}{{% else %}}{}{{% endif %}}".format(*both), []
    if "default" in named or len(named) == 1:
        return str(named.get("default") or next(iter(named.values()))), []
    names = ", ".join(sorted(map(str, named)))
    note = f"its chat templates are named {names}, and none is named default, so it cannot chat"
    return "", [note] if named else []


@functools.cache
def _past_layer() -> Any:
    from transformers.cache_utils import DynamicLayer

    class Past(DynamicLayer):  # type: ignore[misc]  # untyped upstream
        """Keys and values of one layer; ``new`` has the keys and values of the new tokens."""

        def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
            super().__init__()
            self.keys, self.values, self.is_initialized = keys, values, True

        def update(self, keys: Any, values: Any, *more: Any, **named: Any) -> Any:
            self.new = (keys, values)
            return torch.cat([self.keys, keys], 2), torch.cat([self.values, values], 2)

    return Past


def _without_gaps(
    cache: torch.Tensor, used: torch.Tensor, length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Move the used rows to the end, next to the new ones, for a model's own attention.

    The model's own attention (ALiBi, local attention) computes distances from row numbers, as in a
    batch that is padded on the left.

    Returns:
        The cache, and a mask [batch, past + length]: 1 for a used or new row, else 0.
    """
    batch, past, width = cache.shape
    rows = torch.arange(past, device=cache.device)
    source = (rows + used[:, None]) % past
    moved = cache.gather(1, source[:, :, None].expand(batch, past, width))
    is_used = (rows >= past - used[:, None]).long()
    return moved, functional.pad(is_used, (0, length), value=1)


def refuse_encoder(config: Any) -> None:
    """Refuse models that have an encoder."""
    if config.is_encoder_decoder:
        refuse("it has an encoder, whose output is another kind of state")


def decoder(model: Any) -> Decoder:
    """Wrap ``model``, which must have its weights, in a checked ``Decoder``.

    Raises:
        RegistrationRefused: the model cannot be served with a state; the error says why.
    """
    if not hasattr(model, "config"):
        refuse(f"a {type(model).__name__} is not a language model of transformers")
    try:
        wrapped = Decoder(model)
        wrapped.check()
    except RegistrationRefused:
        raise
    except Exception as error:  # a model's own code
        reason = f"{type(error).__name__}: {str(error)[:200]}"
        refuse(f"with a state a {type(model).__name__} raised {reason}", UNUSUAL)
    return wrapped
