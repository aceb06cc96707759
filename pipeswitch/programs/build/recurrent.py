"""Recurrent layers under export: one call each, whatever their length.

Torch's own trace writes LSTM, GRU and RNN out step by step, which fixes the length. While an export
runs, their calls go to operators that only say what shapes come out; the encoder puts torch's in
their place.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode

from ..contracts import recurrent_results

NAMESPACE: Final = "pipeswitch_export"
LAYERS: Final = ("lstm", "gru", "rnn_tanh", "rnn_relu")
_REST: Final = (
    "Tensor[] params, bool has_biases, int num_layers, float dropout, bool train, "
    "bool bidirectional, bool batch_first"
)


class OneCallEach(TorchFunctionMode):
    """Recurrent layers are traced as one call; packed sequences as torch does it."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        is_layer = name in LAYERS and func == getattr(torch, name)
        if is_layer and len(args) == 9 and isinstance(args[3], bool):  # not of packed sequences
            return _operators()[name](*args)
        return func(*args, **(kwargs or {}))


@functools.cache
def _operators() -> dict[str, Callable[..., Any]]:
    """Ours by torch's names; made once, and kept as long as the process."""
    make: Any = torch.library.Library
    library = make(NAMESPACE, "DEF")
    for name in LAYERS:
        states, results = ("Tensor[]", 3) if name == "lstm" else ("Tensor", 2)
        returned = ", ".join(["Tensor"] * results)
        library.define(f"{name}(Tensor input, {states} hx, {_REST}) -> ({returned})")
        torch.library.register_fake(f"{NAMESPACE}::{name}", _shapes, lib=library)
    ours = getattr(torch.ops, NAMESPACE)
    _KEPT.append(library)
    return {name: getattr(ours, name) for name in LAYERS}


_KEPT: Final[list[Any]] = []  # a library that is dropped takes its operators along


def _shapes(
    value: torch.Tensor, hx: Any, params: Any, biases: bool, layers: int, dropout: float,
    train: bool, is_bidirectional: bool, is_batch_first: bool,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    return recurrent_results(value, hx, is_bidirectional, is_batch_first)


def own_name(target: str) -> str:
    """Torch's name of an operator of ours: ``aten.lstm.input``."""
    return f"aten.{target.split('.')[1]}.input" if target.startswith(f"{NAMESPACE}.") else target
