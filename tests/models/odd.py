"""Modules that are hard to export: experts, graphs, sounds, int8, loops, TorchScript."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

T = torch.Tensor
rand = torch.randn


class Does(nn.Module):
    """Module whose ``forward`` calls a given function, which uses a few layers."""

    def __init__(self, does: Callable[..., Any], **layers: nn.Module) -> None:
        super().__init__()
        self.does = does
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, *inputs: T) -> Any:
        return self.does(self, *inputs)


def found(m: Any, x: T) -> T:
    h = m.layer(x)
    rows, columns = torch.where(h > 0)
    return torch.zeros_like(h).index_put((rows, columns), h[rows, columns] * 2)


def experts(m: Any, x: T) -> T:
    flat = x.reshape(-1, 16)
    weights, chosen = torch.topk(m.gate(flat).softmax(-1), 2)
    out = torch.zeros_like(flat)
    for number, expert in enumerate(m.experts):
        token, place = torch.where(chosen == number)
        out.index_add_(0, token, expert(flat[token]) * weights[token, place, None])
    return out.reshape(x.shape)


def masked_experts(m: Any, x: T) -> T:
    chosen, out = m.gate(x).argmax(-1), torch.zeros_like(x)
    for number, expert in enumerate(m.experts):
        if (mask := chosen == number).any():
            out[mask] = expert(x[mask])
    return out


def nonzero_experts(m: Any, x: T) -> T:
    flat = x.reshape(-1, 16)
    chosen, out = m.gate(flat).argmax(-1), torch.zeros_like(flat)
    for number, expert in enumerate(m.experts):
        rows = torch.nonzero(chosen == number).squeeze(-1)
        out.index_add_(0, rows, expert(flat.index_select(0, rows)))
    return out.reshape(x.shape)


def of_experts(does: Callable[..., Any]) -> nn.Module:
    layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
    return Does(does, gate=nn.Linear(16, 4), experts=layers)


def all_experts(m: Any, x: T) -> T:
    weights = m.gate(x).softmax(-1)
    every = torch.stack([expert(x) for expert in m.experts], -1)
    answer: T = (every * weights.unsqueeze(-2)).sum(-1)
    return answer


def spectrum(m: Any, x: T) -> T:
    return torch.stft(x, 64, 16, window=torch.hann_window(64), return_complex=True)


def heard(m: Any, x: T) -> T:
    answer: T = m.layer(spectrum(m, x).abs().transpose(1, 2))
    return answer


def denoised(m: Any, x: T) -> T:
    z = spectrum(m, x)
    mask = m.layer(z.abs().transpose(1, 2)).sigmoid().transpose(1, 2)
    return torch.istft(z * mask, 64, 16, window=torch.hann_window(64), length=x.shape[-1])


def packed(m: Any, x: T, lengths: T) -> T:
    rows = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    padded, _ = pad_packed_sequence(m.layer(rows)[0], batch_first=True, total_length=x.shape[1])
    return padded


def convolved_graph(m: Any, x: T, edges: T) -> T:
    h = m.layer(x)
    return torch.zeros_like(h).index_add(0, edges[1], h[edges[0]])


def attended_graph(m: Any, x: T, edges: T) -> T:
    h = m.layer(x)
    score = functional.leaky_relu((h[edges[0]] * h[edges[1]]).sum(-1)).exp()
    total = torch.zeros(len(x)).index_add(0, edges[1], score)
    share = (score / total[edges[1]]).unsqueeze(-1)
    return torch.zeros_like(h).index_add(0, edges[1], h[edges[0]] * share)


def in_int8(m: Any, x: T) -> T:
    return functional.linear(x, m.q.weight.to(x.dtype) * m.q.scale)


def int8() -> nn.Module:
    module, weight = nn.Module(), rand(8, 16)
    scale = weight.abs().amax(1, keepdim=True) / 127
    module.register_buffer("weight", (weight / scale).round().to(torch.int8))
    module.register_buffer("scale", scale)
    return Does(in_int8, q=module)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))


def quantized() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.ao.quantization.quantize_dynamic(mlp(), {nn.Linear}, dtype=torch.qint8)


def scripted(make: Callable[[nn.Module], Any]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make(mlp().eval())


def until_sure(m: Any, x: T) -> T:
    for layer in m.layers:
        x = torch.tanh(layer(x))
        if x.abs().max() > 0.9:
            break
    return x


def greedy(m: Any, ids: T) -> T:
    for _ in range(4):
        last = m.layer(m.table(ids))[0][:, -1]
        ids = torch.cat([ids, m.head(last).argmax(-1, keepdim=True)], 1)
        if bool((ids[:, -1] == 0).all()):
            break
    return ids


def nearest(m: Any, x: T) -> T:
    codes = torch.cdist(x, m.book.weight.unsqueeze(0)).argmin(-1)
    answer: T = m.book(codes)
    return answer


def nearest_by_products(m: Any, x: T) -> T:
    book = m.book.weight
    answer: T = m.book((book.square().sum(-1) - 2 * x @ book.t()).argmin(-1))
    return answer


def spectral(m: Any, x: T) -> T:
    modes = torch.fft.rfft(m.lift(x).transpose(1, 2))[..., :6]
    return m.drop(torch.fft.irfft(modes, n=x.shape[1]).transpose(1, 2))


def pooled(m: Any, x: T, mask: T) -> T:
    h = m.layer(x) * mask.unsqueeze(-1)
    answer: T = m.head(h.sum(1) / mask.sum(1, keepdim=True).clamp_min(1))
    return answer


def causal(m: Any, x: T) -> T:
    size = x.shape[1]
    mask = torch.full((size, size), float("-inf")).triu(1)
    answer: T = m.layer(x, x, tgt_mask=mask)
    return answer


def decoder() -> nn.Module:
    layer = nn.TransformerDecoderLayer(32, 4, 64, batch_first=True)
    return Does(causal, layer=nn.TransformerDecoder(layer, 2))


def cells(m: Any, x: T) -> T:
    h = c = torch.zeros(x.shape[0], 24)
    for step in x.unbind(1):
        h, c = m.cell(step, (h, c))
    return h


class Table(nn.Module):
    """Module with rotary angles that are a plain tensor instead of a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.angles = torch.outer(torch.arange(64.0), 0.5 ** torch.arange(8.0))

    def forward(self, x: T) -> T:
        a, b = self.layer(x).chunk(2, -1)
        cos, sin = self.angles[: x.shape[1]].cos(), self.angles[: x.shape[1]].sin()
        return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


def edges(count: int = 9, nodes: int = 6) -> T:
    return torch.randint(0, nodes, (2, count))


ODD: Final[dict[str, Callable[[], tuple[nn.Module, Any]]]] = {
    "where": lambda: (Does(found, layer=nn.Linear(8, 8)), (rand(1, 8),)),
    "experts": lambda: (of_experts(experts), (rand(1, 5, 16),)),
    "experts-masked": lambda: (of_experts(masked_experts), (rand(1, 5, 16),)),
    "experts-nonzero": lambda: (of_experts(nonzero_experts), (rand(1, 5, 16),)),
    "experts-all": lambda: (of_experts(all_experts), (rand(1, 5, 16),)),
    "stft": lambda: (Does(heard, layer=nn.Linear(33, 8)), (rand(1, 400),)),
    "istft": lambda: (Does(denoised, layer=nn.Linear(33, 33)), (rand(1, 400),)),
    "stft-complex": lambda: (Does(spectrum), (rand(1, 400),)),
    "packed-lstm": lambda: (
        Does(packed, layer=nn.LSTM(8, 16, batch_first=True)),
        (rand(2, 7, 8), torch.tensor([7, 3])),
    ),
    "packed-gru": lambda: (
        Does(packed, layer=nn.GRU(8, 16, batch_first=True, bidirectional=True)),
        (rand(2, 7, 8), torch.tensor([2, 6])),
    ),
    "graph-convolution": lambda: (
        Does(convolved_graph, layer=nn.Linear(8, 8)),
        (rand(6, 8), edges()),
    ),
    "graph-attention": lambda: (Does(attended_graph, layer=nn.Linear(8, 8)), (rand(6, 8), edges())),
    "int8-weights": lambda: (int8(), (rand(1, 16),)),
    "int8-engine": lambda: (quantized(), (rand(1, 16),)),
    "scripted": lambda: (scripted(torch.jit.script), (rand(1, 16),)),
    "traced": lambda: (scripted(lambda m: torch.jit.trace(m, rand(2, 16))), (rand(1, 16),)),
    "early-exit": lambda: (
        Does(until_sure, layers=nn.ModuleList(nn.Linear(16, 16) for _ in range(6))),
        (rand(1, 16),),
    ),
    "greedy": lambda: (
        Does(
            greedy,
            table=nn.Embedding(40, 16),
            head=nn.Linear(24, 40),
            layer=nn.GRU(16, 24, batch_first=True),
        ),
        (torch.randint(1, 40, (1, 5)),),
    ),
    "codebook": lambda: (Does(nearest, book=nn.Embedding(32, 8)), (rand(1, 5, 8),)),
    "codebook-products": lambda: (
        Does(nearest_by_products, book=nn.Embedding(32, 8)),
        (rand(1, 5, 8),),
    ),
    "spectral": lambda: (
        Does(spectral, lift=nn.Linear(3, 8), drop=nn.Linear(8, 1)),
        (rand(1, 32, 3),),
    ),
    "pooled": lambda: (
        Does(pooled, layer=nn.Linear(8, 8), head=nn.Linear(8, 2)),
        (rand(1, 6, 8), torch.ones(1, 6)),
    ),
    "decoder": lambda: (decoder(), (rand(1, 7, 32),)),
    "cells": lambda: (Does(cells, cell=nn.LSTMCell(16, 24)), (rand(1, 6, 16),)),
    "table": lambda: (Table(), (rand(1, 9, 16),)),
}
