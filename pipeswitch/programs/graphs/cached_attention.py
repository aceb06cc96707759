"""Attention of a decode step to the rows of a cache where they lie.

A language model's graph appends each layer's new keys and values to the cached ones, and attends to
the result: that copies the whole cache in each step. In a decode step (``DecodeRows``) each layer
writes its new row behind those in use instead, and each sequence attends to its own rows. Nothing
else is copied, no padding is read, and a sequence's bits do not depend on its batch.

The calls write to the cache alone, and only while its owner has entered ``DecodeRows``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar, Token
from typing import Any, Final

import torch

from ..decoding.generation import CACHE
from .bundle import Graph, node_references

Call = Callable[..., Any]
Span = tuple[int, torch.Tensor | None]  # first row that a token attends to, and its mask if needed

APPEND: Final = "aten.cat.default"
ATTENTION: Final = "aten.scaled_dot_product_attention.default"
_VIEWS: Final = frozenset(
    {
        "_operator.getitem",
        "aten.split_with_sizes.default",
        "aten.transpose.int",
        "aten.view.default",
    }
)
_ROWS: ContextVar[DecodeRows | None] = ContextVar("rows", default=None)


class DecodeRows:
    """One step of one token for each sequence of a batch, while it is entered."""

    def __init__(self, used: Sequence[int]) -> None:
        """``used``: rows of each sequence in the cache, which has room for one more."""
        self.used = used
        self.is_even = len({*used}) == 1
        if not self.is_even:
            self._places = torch.arange(len(used)), torch.tensor(used)
        self._spans: dict[int, tuple[torch.Tensor, list[Span]]] = {}

    def __enter__(self) -> None:
        self._token: Token[DecodeRows | None] = _ROWS.set(self)

    def __exit__(self, *_: object) -> None:
        _ROWS.reset(self._token)

    def put(self, past: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """Write each sequence's new row behind those in use, and return the cache.

        Args:
            past: [batch, heads, rows, size], a view of the cache.
            new: [batch, heads, 1, size].
        """
        if self.is_even:
            past.narrow(2, self.used[0], 1).copy_(new)
        else:
            past.transpose(1, 2)[self._places] = new[:, :, 0].to(past.dtype)
        return past

    def spans(self, mask: torch.Tensor) -> list[Span]:
        """Return what each sequence's token attends to; empty if all attend to equally many rows.

        Args:
            mask: the graph's, which all layers of a kind have in common: [batch, 1, heads that
                share keys, rows + 1].
        """
        if id(mask) not in self._spans:
            own = mask.expand(len(self.used), *mask.shape[1:])
            sees = own if mask.dtype is torch.bool else own == 0
            counts = sees.sum(-1).flatten(1).tolist()
            spans = [
                (0, None) if {*count} == {end + 1} else _span(own[row : row + 1], end)
                for row, (count, end) in enumerate(zip(counts, self.used, strict=True))
            ]
            found = [] if self.is_even and spans.count((0, None)) == len(spans) else spans
            self._spans[id(mask)] = mask, found  # the mask too: its id is not given to another
        return self._spans[id(mask)][1]


def _span(mask: torch.Tensor, end: int) -> Span:
    """Return what a token attends to that sees not all rows, or not all of them alike."""
    own = torch.cat([mask[..., :end], mask[..., -1:]], -1)
    is_bool = own.dtype is torch.bool
    sees = own if is_bool else own > float("-inf")
    first = int(sees.flatten(0, -2).any(0).int().argmax())
    own = own[..., first:]
    is_plain = bool(own.all()) if is_bool else not bool(own.any())
    return first, None if is_plain else own


def calls_in_place(graph: Graph, look_up: Callable[[str], Call]) -> Mapping[int, Call]:
    """Return the calls, by position, that differ in a decode step: those that append to the cache,
    and those that attend to the result. None, if anything else reads that."""
    names = [spec.name for spec in graph.inputs]
    views = {names.index(CACHE)} if CACHE in names else set[int]()
    appended: dict[int, int] = {}  # positions by value
    attending: list[int] = []
    for position, node in enumerate(graph.nodes if views else ()):
        value, first = graph.first_node_value + position, _value(node.args[:1])
        reads = appended.keys() & {*node_references(node)}
        if node.target in _VIEWS and first in views:
            views.add(value)
        elif node.target == APPEND and len(node.args) == 2 and node.args[1] == 2:
            parts = node.args[0]
            if len(parts) == 2 and _value(parts) in views and _value(parts[1:]) not in views:
                appended[value] = position
        if not reads:
            continue
        sources = [_value(node.args[at:]) for at in range(4)]
        is_ours = node.target == ATTENTION and len(node.args) == 4 and {*node.kwargs} <= {"scale"}
        if not is_ours or reads != {*sources[1:3]} or reads & {sources[0], sources[3]}:
            return {}
        attending.append(position)
    if None in [_value(graph.nodes[at].args[3:]) for at in attending]:
        return {}
    if appended.keys() & {*graph.results} or not attending:
        return {}
    append, attend = _append(look_up(APPEND)), _attend(look_up(ATTENTION))
    return dict.fromkeys(appended.values(), append) | dict.fromkeys(attending, attend)


def _value(arguments: Any) -> int | None:
    first = arguments[0] if arguments else None
    return first.get("v") if isinstance(first, dict) else None


def _append(cat: Call) -> Call:
    def append(parts: Sequence[torch.Tensor], dim: int) -> Any:
        return cat(parts, dim) if _ROWS.get() is None else parts

    return append


def _attend(attention: Call) -> Call:
    def attend(query: torch.Tensor, key: Any, value: Any, mask: torch.Tensor, **scale: Any) -> Any:
        rows = _ROWS.get()
        if rows is None:
            return attention(query, key, value, mask, **scale)
        keys, values = rows.put(*key), rows.put(*value)
        if not (spans := rows.spans(mask)):
            count = rows.used[0] + 1
            pair = keys.narrow(2, 0, count), values.narrow(2, 0, count)
            return attention(query, *pair, **scale)
        found = []
        for row, (end, (first, own)) in enumerate(zip(rows.used, spans, strict=True)):
            count = end + 1 - first
            pair = (one.narrow(0, row, 1).narrow(2, first, count) for one in (keys, values))
            found.append(attention(query.narrow(0, row, 1), *pair, own, **scale))
        return torch.cat(found)

    return attend
