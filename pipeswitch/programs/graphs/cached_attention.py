"""Attention of a decode step directly on the cache, without a copy of it.

A language model's graph appends each layer's new keys and values to the cached ones, which copies
the cache. In a decode step (``DecodeRows``) each layer writes its new row after the used rows, and
each sequence attends only to its own rows. So no padding is read, and a sequence's bits do not
depend on the other sequences of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar, Token
from typing import Any, Final

import torch

from ..interface.layout import CACHE
from .bundle import Graph, node_references

Call = Callable[..., Any]
Span = tuple[int, torch.Tensor | None]  # first row that a token attends to, and a mask if needed

APPEND: Final = "aten.cat.default"
ATTENTION: Final = "aten.scaled_dot_product_attention.default"
_VIEWS: Final = ("getitem", "reshape", "split_with_sizes", "transpose", "view")
_ROWS: ContextVar[DecodeRows | None] = ContextVar("rows", default=None)


class DecodeRows:
    """Context manager of one decode step: one token for each sequence of a batch."""

    def __init__(self, used: Sequence[int]) -> None:
        """Take each sequence's number of used rows; one more must be free. Empty: no decoding."""
        self.used, self.is_even = used, len({*used}) == 1
        if not self.is_even:
            self._places = torch.arange(len(used)), torch.tensor(used)
        self._spans: dict[int, tuple[torch.Tensor, list[Span]]] = {}

    def __enter__(self) -> None:
        self._token: Token[DecodeRows | None] = _ROWS.set(self if self.used else None)

    def __exit__(self, *_: object) -> None:
        _ROWS.reset(self._token)

    def put(self, past: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """Write ``new`` [batch, heads, 1, size] after the used rows of ``past``; return ``past``.
        ``past`` is a view of the cache: [batch, heads, rows, size]."""
        if self.is_even:
            past.narrow(2, self.used[0], 1).copy_(new)
        else:
            past.transpose(1, 2)[self._places] = new[:, :, 0].to(past.dtype)
        return past

    def spans(self, mask: torch.Tensor) -> list[Span]:
        """Return each sequence's span, or an empty list if one span without a mask fits all.

        One span fits if all tokens attend to the same number of rows, beginning at row 0. ``mask``
        is the graph's: [batch, 1, heads that share keys, rows + 1]. Layers share it.
        """
        if id(mask) not in self._spans:
            bias = mask if mask.is_floating_point() else mask.float().log()
            bias = bias.expand(len(self.used), *mask.shape[1:])
            first_seen = (bias > float("-inf")).flatten(1, -2).any(1).int().argmax(-1).tolist()
            firsts = [*map(min, first_seen, self.used)]
            counts, spans = (bias == 0).sum(-1).flatten(1).tolist(), list[Span]()
            for row, (first, count, end) in enumerate(zip(firsts, counts, self.used, strict=True)):
                is_plain = {*count} == {end + 1 - first}  # no mask needed: exactly these rows
                parts = bias[row : row + 1, ..., first:end], bias[row : row + 1, ..., -1:]
                spans.append((first, None if is_plain else torch.cat(parts, -1)))
            is_whole = self.is_even and spans.count((0, None)) == len(spans)
            self._spans[id(mask)] = mask, [] if is_whole else spans  # a live mask's id is unique
        return self._spans[id(mask)][1]


def calls_in_place(graph: Graph, look_up: Callable[[str], Call]) -> dict[str | int, Call]:
    """Return replacements by node position for calls that extend the cache or attend to the result.
    Return none if another call reads the extended cache."""
    views = {index for index, spec in enumerate(graph.inputs) if spec.name == CACHE}
    appended: dict[int, str | int] = {}  # value -> position of the node that appends
    attending: list[str | int] = []
    for position, node in enumerate(graph.nodes if views else ()):
        value, sources = graph.first_node_value + position, node_references(node)
        are_views = [one in views for one in sources]
        if reads := appended.keys() & {*sources}:
            is_plain = node.target == ATTENTION and {*node.kwargs} <= {"scale"}
            are_four = node.args == tuple([{"v": one} for one in sources]) and len(sources) == 4
            if not (is_plain and are_four and reads == {*sources[1:3]} - {*sources[::3]}):
                return {}
            attending.append(position)
        elif node.target.split(".")[1] in _VIEWS and are_views[:1] == [True]:
            views.add(value)
        elif node.target == APPEND and node.args[1:] == (2,) and are_views == [True, False]:
            appended[value] = position
    if not attending or appended.keys() & {*graph.results}:
        return {}
    cat, attend = look_up(APPEND), _attend(look_up(ATTENTION))
    append: Call = lambda parts, dim: cat(parts, dim) if _ROWS.get() is None else parts  # noqa: E731
    return dict.fromkeys(appended.values(), append) | dict.fromkeys(attending, attend)


def _attend(attention: Call) -> Call:
    def attend(query: torch.Tensor, key: Any, value: Any, mask: torch.Tensor, **scale: Any) -> Any:
        if (rows := _ROWS.get()) is None:
            return attention(query, key, value, mask, **scale)
        past = rows.put(*key), rows.put(*value)
        if not (spans := rows.spans(mask)):
            return attention(query, *[one[:, :, : rows.used[0] + 1] for one in past], **scale)
        outputs = []
        for row, (end, (first, own)) in enumerate(zip(rows.used, spans, strict=True)):
            pair = [one.narrow(0, row, 1).narrow(2, first, end + 1 - first) for one in past]
            outputs.append(attention(query.narrow(0, row, 1), *pair, own, **scale))
        return torch.cat(outputs)

    return attend
