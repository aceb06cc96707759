"""Description of the state that each layer of a language model keeps for a sequence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch

from .attention import NAME, UNUSUAL, AttentionStep, refuse

Kind = Literal["full", "window", "shared"]  # shared: it reads another layer's keys and values
_STATES: Final[Mapping[str, str]] = {
    "linear_attention": "a recurrent state (Mamba, linear attention)",
    "conv": "the last inputs of a convolution",
    "hybrid": "a recurrent state beside keys and values",
    "hybrid_sliding": "a recurrent state beside keys and values",
    "chunked_attention": "keys and values of one chunk (chunked attention)",
    "indexed_attention": "an index of its keys (sparse attention)",
}  # transformers' layer type -> its state, for layers without a cache row for each token
_NO_ATTENTION: Final = ("moe", "mlp")  # transformers' types of layers that need no cache


@dataclass(frozen=True)
class DecoderLayer:
    """Layer of a model, with the sizes of its keys and values in a token's cache row."""

    kind: Kind
    window: int = 0  # number of tokens to which a token attends, including itself; 0: all
    heads: int = 0
    key_size: int = 0
    value_size: int = 0

    @property
    def sizes(self) -> tuple[int, int]:
        return self.heads * self.key_size, self.heads * self.value_size


@dataclass(frozen=True)
class DecoderSpec:
    """All layers of a model, in order, and the attention that they use."""

    layers: tuple[DecoderLayer, ...]
    dtype: torch.dtype
    has_our_attention: bool  # False: the model's own attention, which needs rows without gaps

    @property
    def sizes(self) -> list[int]:
        """Numbers of elements of each layer's keys and values, in the order of a token's row."""
        return [size for layer in self.layers if layer.kind != "shared" for size in layer.sizes]

    @property
    def windows(self) -> list[int]:
        return [layer.window for layer in self.layers]


def text_config(model: Any) -> Any:
    """Return the configuration of a model's part that generates text."""
    return model.config.get_text_config(decoder=True)


def decoder_spec(model: Any, cache_keyword: str) -> DecoderSpec:
    """Return a model's layers, read from its configuration and from a run on two tokens.

    Raises:
        RegistrationRefused: a layer keeps another state than a cache row for each token.
    """
    from transformers.cache_utils import DynamicCache

    config = text_config(model)
    kinds = _kinds(model)
    cache = DynamicCache(config=config)
    step = AttentionStep(torch.arange(2), torch.zeros(1, dtype=torch.long), 0)
    ids, before = torch.zeros(1, 2, dtype=torch.long), config._attn_implementation
    config._attn_implementation = NAME
    try:
        with torch.no_grad(), step():
            mask = step.full(model.dtype)
            model(input_ids=ids, attention_mask=mask, use_cache=True, **{cache_keyword: cache})
        keeps = {number for number, (kind, _) in enumerate(kinds) if kind != "shared"}
        has_our_attention = {*step.asked} >= keeps
    except (TypeError, ValueError, RuntimeError, IndexError):  # the model cannot use such a mask
        has_our_attention = False
    finally:
        config._attn_implementation = before
    if has_our_attention:
        for number, requested in step.asked.items():
            if requested != (window := kinds[number][1]):
                reason = f"layer {number} attends to {requested or 'all'} tokens"
                refuse(f"{reason}, and its configuration says {window or 'all'}", UNUSUAL)
    else:
        cache = DynamicCache(config=config)
        with torch.no_grad():
            model(input_ids=ids, use_cache=True, **{cache_keyword: cache})
    layers = []
    for number, (kind, window) in enumerate(kinds):
        if kind == "shared":
            layers.append(DecoderLayer(kind, window))
            continue
        keys, values = cache.layers[number].keys, cache.layers[number].values
        if keys is None or keys.dim() != 4 or keys.shape[2] != 2:
            refuse(f"a {type(model).__name__} keeps no keys and values of each token", UNUSUAL)
        else:
            layers.append(DecoderLayer(kind, window, keys.shape[1], keys.shape[3], values.shape[3]))
    dtypes = {layer.keys.dtype for layer in cache.layers if layer.keys is not None}
    if len(dtypes) != 1:
        refuse("its layers keep keys and values of several types", UNUSUAL)
    return DecoderSpec(tuple(layers), dtypes.pop(), has_our_attention)


def _kinds(model: Any) -> list[tuple[Kind, int]]:
    """Return each layer's kind and window; refuse a layer without a cache row for each token."""
    from transformers.cache_utils import DynamicCache

    config = text_config(model)
    stored = DynamicCache(config=config).layers
    types, sharing = _layer_types(config), getattr(config, "kv_sharing_modes", None)
    kinds: list[tuple[Kind, int]] = []
    for number, name in enumerate(types):
        # transformers before 5.20 creates no cache for the last layers if they share keys.
        reuses = sharing[number] == "reuse" if sharing else number >= len(stored)
        if reuses or name in _NO_ATTENTION:
            kinds.append(("shared", config.sliding_window if name == "sliding_attention" else 0))
        elif name in ("full_attention", "sliding_attention"):
            window = getattr(stored[number], "sliding_window", 0) or 0
            kinds.append(("window" if window else "full", window))
        else:
            numbers = [at for at, kind in enumerate(types) if kind == name]
            which = ", ".join(map(str, numbers[:4])) + (", ..." if len(numbers) > 4 else "")
            reason = f"{type(model).__name__} keeps in layers {which} {_STATES.get(name, name)}"
            refuse(f"{reason}; a sequence here has keys and values of each token", UNUSUAL)
    return kinds


def _layer_types(config: Any) -> list[str]:
    """Return transformers' type of each layer; many configurations name none."""
    if named := getattr(config, "layer_types", None):
        return list(named)
    if getattr(config, "sliding_window", None) is not None:
        name = "sliding_attention"
    elif getattr(config, "attention_chunk_size", None) is not None:
        name = "chunked_attention"
    else:
        name = "full_attention"
    return [name] * int(config.num_hidden_layers)
