"""Attention of a decode step that reads each sequence's cache in place, without a copy."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pipeswitch.programs.graphs.bundle import Graph, Node
from pipeswitch.programs.graphs.cached_attention import DecodeRows
from pipeswitch.programs.graphs.graph import CompiledGraph, behind_contract, resolve
from pipeswitch.programs.interface.layout import ValueSpec

HEADS, SIZE, PAST, WINDOW = 2, 4, 24, 5
WIDTH = HEADS * SIZE  # width of keys and of values
INPUTS = ("ids", "used", "cache")


class Drawn:
    """Model of two layers, built call by call; the second layer's attention has a window."""

    def __init__(
        self, *, bias: float = 0.0, shows_keys: bool = False, view: str = "view.default"
    ) -> None:
        """Add ``bias`` to all attention scores; with ``shows_keys``, also return all rows' keys.
        ``view`` is the operator that splits rows into heads; a lowered graph has ``reshape``."""
        self.nodes: list[Node] = []
        self.view = view
        call, (ids, used, cache, table) = self.call, [{"v": number} for number in range(4)]
        batch, past = call("sym_size.int", ids, 0), call("sym_size.int", cache, 1)
        age = call("sub.Tensor", call("unsqueeze.default", used, 1), call("arange.default", past))
        parts = call("split_with_sizes.default", cache, [WIDTH] * 4, -1)
        rows = [self.heads(call("_operator.getitem", parts, at), batch, past) for at in range(4)]
        hidden, new = call("embedding.default", table, ids), []
        for layer, window in enumerate((PAST, WINDOW)):
            hides = call("le.Scalar", age, 0)
            hides = call("__or__.Tensor", hides, call("ge.Scalar", age, window))
            zero = call("full.default", [], {"float": str(bias)})
            mask = call("masked_fill.Scalar", zero, hides, {"float": "-inf"})
            own = call("full.default", [batch, 1], {"float": str(bias)})
            mask = call("view.default", call("cat.default", [mask, own], 1), [batch, 1, 1, -1])
            query, key, value = (self.heads(hidden, batch, 1) for _ in range(3))
            value = call("mul.Scalar", value, 0.5 + layer)
            new += [key, value]
            pairs = zip(rows[2 * layer :], (key, value), strict=False)
            keys, values = (call("cat.default", [*pair], 2) for pair in pairs)
            found = call("scaled_dot_product_attention.default", query, keys, values, mask)
            hidden = call("view.default", found, [batch, 1, WIDTH])
        flat = [call("view.default", one, [batch, 1, WIDTH]) for one in new]
        results = [keys if shows_keys else hidden, call("cat.default", flat, -1)]
        specs = tuple(ValueSpec(name=name, dtype="int64", shape=()) for name in INPUTS)
        found, made = tuple(one["v"] for one in results), {"weights": ("table",), "outputs": ()}
        nodes = tuple(self.nodes)
        self.graph = Graph(version=1, inputs=specs, nodes=nodes, results=found, **made)

    def call(self, name: str, *arguments: Any) -> dict[str, int]:
        self.nodes.append(Node(name if name[:4] == "_ope" else f"aten.{name}", arguments))
        return {"v": len(INPUTS) + len(self.nodes)}

    def heads(self, value: Any, batch: Any, length: Any) -> dict[str, int]:
        split = self.call(self.view, value, [batch, length, HEADS, SIZE])
        return self.call("transpose.int", split, 1, 2)

    def run(self, used: list[int], cache: torch.Tensor, look_up: Any = resolve) -> Any:
        compiled = CompiledGraph(self.graph, [(0, len(self.nodes))], "cpu", look_up)
        table = torch.randn(PAST, WIDTH, generator=torch.Generator().manual_seed(7))
        environment = compiled.start([torch.tensor(used)[:, None], torch.tensor(used), cache])
        with torch.inference_mode():
            compiled.calls[0](environment, [table])
            return compiled.finish(environment, [table])


def caches(used: list[int], padding: float) -> torch.Tensor:
    chance = torch.Generator().manual_seed(3)
    found = torch.randn(len(used), PAST, 4 * WIDTH, generator=chance)
    is_used = torch.arange(PAST) < torch.tensor(used)[:, None]
    return torch.where(is_used[:, :, None], found, padding)


@pytest.mark.parametrize("view", ["view.default", "reshape.default"])
@pytest.mark.parametrize("look_up", [resolve, behind_contract])
@pytest.mark.parametrize("bias", [0.0, 0.25])
@pytest.mark.parametrize("used", [[9, 9, 9], [3, 20, 11, 6], [22, 5, 22], [1, 23]])
def test_a_step_reads_rows_in_use_alone_and_gives_each_sequence_its_own_bits(
    used: list[int], bias: float, look_up: Any, view: str
) -> None:
    drawn, plain, cache = Drawn(bias=bias, view=view), caches(used, 0.0), caches(used, float("nan"))
    expected = drawn.run(used, plain.clone())
    with DecodeRows(used):
        found = drawn.run(used, cache, look_up)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
    for row, count in enumerate(used):
        assert torch.equal(cache[row, :count], plain[row, :count])
        assert torch.equal(cache[row, count], found[1][row, 0])  # the step has added its row
        assert cache[row, count + 1 :].isnan().all()
        with DecodeRows([count]):
            alone = drawn.run([count], cache[row : row + 1])
        assert torch.equal(alone[0][0], found[0][row])


@pytest.mark.parametrize("is_step", [False, True])
def test_a_cache_changes_in_a_step_alone_and_if_nothing_else_reads_its_rows(is_step: bool) -> None:
    used = [4, 13]
    drawn, cache = Drawn(shows_keys=is_step), caches(used, 0.0)
    before = cache.clone()
    expected = drawn.run(used, cache)
    with DecodeRows(used if is_step else []):
        found = drawn.run(used, cache)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert torch.equal(cache, before)
