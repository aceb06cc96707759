"""Recurrent layers and short-time transforms under export.

Torch traces LSTM, GRU and RNN step by step, which fixes the length. During an export, their calls
go to stand-in operators that only compute shapes, and the encoder replaces these by torch's
operators. ``torch.stft`` is not an allowed operator, because its windows share memory. It is traced
as copies of the windows and a transform of each, which compute the same bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from ...base.errors import RegistrationRefused
from ..graphs.contracts import recurrent_results
from .export_hints import PACKED

_WINDOWS: Final = (
    torch.hann_window,
    torch.hamming_window,
    torch.blackman_window,
    torch.bartlett_window,
    torch.kaiser_window,
)
NAMESPACE: Final = "pipeswitch_export"
LAYERS: Final = ("lstm", "gru", "rnn_tanh", "rnn_relu")
_REST: Final = (
    "Tensor[] params, bool has_biases, int num_layers, float dropout, bool train, "
    "bool bidirectional, bool batch_first"
)


class OneCallEach(TorchFunctionMode):
    """Mode during an export: calls that torch would not trace as allowed operators are replaced.

    A recurrent layer becomes one call, ``stft`` becomes windows and transforms, and attention gets
    keys for each head. A call that packs sequences raises RegistrationRefused.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        is_layer = name in LAYERS and func == getattr(torch, name)
        if is_layer and len(args) == 9 and isinstance(args[3], bool):  # no packed sequences
            return _operators()[name](*args)
        if func is torch.stft:
            return _stft(*args, **(kwargs or {}))
        if func in _WINDOWS:  # computed now as a constant, because no bundle may call them
            with _disable_current_modes():
                return func(*args, **(kwargs or {}))
        if name == "_pack_padded_sequence":
            raise RegistrationRefused(
                "pack_padded_sequence", "its shapes depend on the lengths", hint=PACKED
            )
        if name == "scaled_dot_product_attention" and len(args) >= 3:
            return _attention(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def _attention(fused: Any, args: Sequence[Any], kwargs: Any) -> Any:
    """Compute attention without a broadcast: expand shared keys to a view per head."""
    query, key, value, *rest = args
    if query.dim() != 4 or key.shape[1] != 1 or query.shape[1] == 1:
        return fused(*args, **kwargs)
    key, value = (one.expand(-1, query.shape[1], -1, -1) for one in (key, value))
    if kwargs.get("enable_gqa") or _broadcasts_in_kernel():
        return fused(query, key, value, *rest, **kwargs)
    # With five dimensions torch uses the same kernel as for a broadcast: equal bits.
    return fused(query[None], key[None], value[None], *rest, **kwargs)[0]


@functools.cache
def _broadcasts_in_kernel() -> bool:
    """Return whether torch's fused kernel broadcasts keys over heads; torch 2.11's does not."""
    with _disable_current_modes():
        heads = torch.ones(1, 2, 1, 8)
        return torch._fused_sdp_choice(heads, heads[:, :1], heads[:, :1]) != 0


def _stft(
    input: torch.Tensor,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: torch.Tensor | None = None,
    center: bool = True,
    pad_mode: str = "reflect",
    normalized: bool = False,
    onesided: bool | None = None,
    return_complex: bool | None = None,
    **rest: Any,
) -> torch.Tensor:
    """Return ``torch.stft`` of real numbers, from operators that a bundle may call."""
    width = n_fft if win_length is None else win_length
    if window is None and width < n_fft:
        window = input.new_ones(width)
    if window is not None and width < n_fft:
        left = (n_fft - width) // 2
        window = functional.pad(window, (left, n_fft - width - left))
    rows = input if input.dim() == 2 else input.unsqueeze(0)
    if center:
        half = n_fft // 2
        rows = functional.pad(rows.unsqueeze(0), (half, half), mode=pad_mode).squeeze(0)
    frames = rows.unfold(-1, n_fft, hop_length or n_fft // 4)
    frames = frames if window is None else frames * window
    transform = torch.fft.fft if onesided is False else torch.fft.rfft
    spectrum = transform(frames, norm="ortho" if normalized else "backward").transpose(1, 2)
    spectrum = spectrum if input.dim() == 2 else spectrum.squeeze(0)
    return spectrum if return_complex else torch.view_as_real(spectrum)


@functools.cache
def _operators() -> dict[str, Callable[..., Any]]:
    """Return the stand-in operators by torch's names; they are made once per process."""
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


_KEPT: Final[list[Any]] = []  # torch removes the operators of a library that is deleted


def _shapes(value: torch.Tensor, hx: Any, *rest: Any) -> tuple[torch.Tensor, ...]:
    *_, is_bidirectional, is_batch_first = rest
    return recurrent_results(value, hx, is_bidirectional, is_batch_first)


def own_name(target: str) -> str:
    """Return torch's name for a stand-in operator, such as ``aten.lstm.input``; else ``target``."""
    return f"aten.{target.split('.')[1]}.input" if target.startswith(f"{NAMESPACE}.") else target
