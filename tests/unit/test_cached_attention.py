"""Attention of a decode step: each sequence reads its own rows of the cache, where they lie."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pipeswitch.programs.graphs.bundle import Graph, Node
from pipeswitch.programs.graphs.cached_attention import DecodeRows
from pipeswitch.programs.graphs.graph import CompiledGraph, behind_contract, resolve
from pipeswitch.programs.interface.layout import ValueSpec

WORDS, HEADS, SIZE, PAST, WINDOW = 11, 2, 4, 24, 5
WIDTH = HEADS * SIZE  # of keys, and of values
INPUTS = ("ids", "count", "used", "cache")


class Drawn:
    """A model of two layers, drawn call by call: the second one has a window."""

    def __init__(self, *, bias: float = 0.0, shows_keys: bool = False) -> None:
        """``bias``: added to the scores of all rows. ``shows_keys``: all keys are an output."""
        self.nodes: list[Node] = []
        ids, used, cache, table = ({"v": number} for number in (0, 2, 3, 4))
        batch, past = self.call("sym_size.int", ids, 0), self.call("sym_size.int", cache, 1)
        old = self.call("lt.Tensor", self.call("arange.default", past), self.unsqueezed(used))
        age = self.call("sub.Tensor", self.unsqueezed(used), self.call("arange.default", past))
        near = self.call("lt.Scalar", age, WINDOW)
        near = self.call("mul.Tensor", near, old)
        parts = self.call("split_with_sizes.default", cache, [WIDTH] * 4, -1)
        rows = [self.heads(self.item(parts, at), batch, past) for at in range(4)]
        hidden, new = self.call("embedding.default", table, ids), []
        for layer, seen in enumerate((old, near)):
            own = self.call("ones.default", [batch, 1])
            seen = self.call("cat.default", [seen, own], 1)
            hides = self.call("eq.Scalar", seen, 0)
            zero = self.call("full.default", [], {"float": str(bias)})
            mask = self.call("masked_fill.Scalar", zero, hides, {"float": "-inf"})
            mask = self.call("view.default", mask, [batch, 1, 1, -1])
            query, key, value = (self.heads(hidden, batch, 1) for _ in range(3))
            value = self.call("mul.Scalar", value, 0.5 + layer)
            new += [key, value]
            pairs = zip(rows[2 * layer :], (key, value), strict=False)
            keys, values = (self.call("cat.default", [*pair], 2) for pair in pairs)
            found = self.call("scaled_dot_product_attention.default", query, keys, values, mask)
            hidden = self.call("view.default", found, [batch, 1, WIDTH])
        flat = [self.call("view.default", one, [batch, 1, WIDTH]) for one in new]
        results = [keys if shows_keys else hidden, self.call("cat.default", flat, -1)]
        self.graph = Graph(
            version=1,
            inputs=tuple(ValueSpec(name=name, dtype="int64", shape=()) for name in INPUTS),
            weights=("table",),
            nodes=tuple(self.nodes),
            results=tuple(one["v"] for one in results),
            outputs=(),
        )

    def call(self, name: str, *arguments: Any) -> dict[str, int]:
        namespace = "" if name.startswith("_operator") else "aten."
        self.nodes.append(Node(namespace + name, arguments))
        return {"v": len(INPUTS) + len(self.nodes)}

    def item(self, value: Any, at: int) -> dict[str, int]:
        return self.call("_operator.getitem", value, at)

    def unsqueezed(self, value: Any) -> dict[str, int]:
        return self.call("unsqueeze.default", value, 1)

    def heads(self, value: Any, batch: Any, length: Any) -> dict[str, int]:
        split = self.call("view.default", value, [batch, length, HEADS, SIZE])
        return self.call("transpose.int", split, 1, 2)

    def run(self, used: list[int], cache: torch.Tensor, look_up: Any = resolve) -> Any:
        compiled = CompiledGraph(self.graph, [(0, len(self.nodes))], "cpu", look_up)
        ids = torch.arange(len(used))[:, None] + torch.tensor(used)[:, None]
        generator = torch.Generator().manual_seed(7)
        table = torch.randn(WORDS * PAST, WIDTH, generator=generator)
        environment = compiled.start([ids, torch.ones_like(ids)[:, 0], torch.tensor(used), cache])
        with torch.inference_mode():
            compiled.calls[0](environment, [table])
            return compiled.finish(environment, [table])


def caches(used: list[int], padding: float = 0.0) -> torch.Tensor:
    chance = torch.Generator().manual_seed(3)
    found = torch.randn(len(used), PAST, 4 * WIDTH, generator=chance)
    for row, count in enumerate(used):
        found[row, count:] = padding
    return found


@pytest.mark.parametrize("look_up", [resolve, behind_contract])
@pytest.mark.parametrize("bias", [0.0, 0.25])
@pytest.mark.parametrize("used", [[9], [9, 9, 9], [3, 20, 11, 6], [1, 23]])
def test_a_step_reads_the_rows_of_each_sequence_alone_and_no_padding(
    used: list[int], bias: float, look_up: Any
) -> None:
    drawn, plain = Drawn(bias=bias), caches(used)
    expected = drawn.run(used, plain)
    cache = caches(used, float("nan"))
    with DecodeRows(used):
        found = drawn.run(used, cache, look_up)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
    for row, count in enumerate(used):
        assert torch.equal(cache[row, :count], plain[row, :count])
        assert torch.equal(cache[row, count], found[1][row, 0])  # its new row is there
        assert cache[row, count + 1 :].isnan().all()


@pytest.mark.parametrize("threads", [1, 2])
def test_a_sequence_has_the_bits_that_it_has_alone_whatever_its_batch_is(threads: int) -> None:
    drawn, before = Drawn(), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for used in ([5, 5, 5, 5], [5, 2, 17, 9], [22, 5, 22]):
            cache = caches(used, 1.0)
            alone = []
            for row, count in enumerate(used):
                own, whole = cache[row : row + 1].clone(), [0] * row + [count]
                with DecodeRows(whole):  # the last one has the id that it has in the batch
                    cut = torch.cat([torch.zeros(row, PAST, 4 * WIDTH), own])
                    alone.append(drawn.run(whole, cut)[0][-1])
            with DecodeRows(used):
                found = drawn.run(used, cache)[0]
            assert all(torch.equal(a, b) for a, b in zip(found, alone, strict=True))
    finally:
        torch.set_num_threads(before)


def test_a_graph_that_reads_its_keys_otherwise_computes_as_ever_and_changes_no_cache() -> None:
    used = [4, 13]
    drawn, cache = Drawn(shows_keys=True), caches(used)
    expected, before = drawn.run(used, cache), cache.clone()
    with DecodeRows(used):
        found = drawn.run(used, cache)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert torch.equal(cache, before)


def test_outside_of_a_step_a_cache_is_not_changed() -> None:
    used = [4, 13]
    cache = caches(used)
    before = cache.clone()
    Drawn().run(used, cache)
    assert torch.equal(cache, before)
