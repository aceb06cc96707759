"""Conversion of a graph with packed calls to a graph that computes in bfloat16, like autocast.

Matrix products and convolutions compute in bfloat16, and so do calls that only move or activate
their results. Norms, softmax, reductions and the residual stream stay in float32: a sum of a
float32 and a bfloat16 tensor is float32. Weights of two or more dimensions are stored in bfloat16.

The graph is run once on the example, call by call, so every dtype comes from a real run. A call
that refuses bfloat16 gets float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import torch
from msgspec.structs import replace

from ..graphs.bundle import Node, node_references, references
from ..graphs.graph import aliases, resolve
from ..graphs.operators import OVERLOADS
from ..interface.packing import LINEAR_INT8, TARGETS
from ..running.executor import PackedKernels
from .fusing import Derived, quantized, renumbered

MIN_STORED: Final = 1024  # minimum elements of a weight that is stored in bfloat16
MAX_COARSE: Final = (
    0.02  # maximum error of a row's product with 8-bit activations, relative to its norm
)

_PRODUCTS: Final = """
matmul mm bmm baddbmm addmm linear einsum conv1d conv2d conv3d convolution conv_transpose1d
conv_transpose2d conv_transpose3d
"""
_MOVES: Final = """
view reshape permute transpose t mT swapaxes swapdims movedim unsqueeze squeeze slice select split
split_with_sizes chunk unbind narrow flatten unflatten contiguous clone expand expand_as
broadcast_to detach alias dropout getitem sym_size sym_numel roll
"""
_FOLLOWERS: Final = """
add sub mul div relu relu6 gelu silu hardswish hardsigmoid hardtanh sigmoid tanh leaky_relu elu mish
clamp max_pool2d avg_pool2d adaptive_avg_pool2d cat concat stack channel_shuffle
scaled_dot_product_attention
"""
PRODUCTS: Final = frozenset(_PRODUCTS.split())
MOVES: Final = frozenset(_MOVES.split())
"""Operators that change no number."""
FOLLOWERS: Final = frozenset(_FOLLOWERS.split())
"""Operators that compute in the dtype of their arguments."""
LOOK_UPS: Final = frozenset({"embedding", "index", "index_select"})
"""Operators that take a few rows out of a table: the rows are converted, not the table."""

NEW: Final = 1 << 32  # first value number of new calls; larger than any number of the old graph
_HALF: Final = torch.bfloat16
_Made = tuple[Any, Any]  # an argument of the new graph, and its value in the run on the example


def lowered(
    derived: Derived, inputs: Sequence[torch.Tensor], kernels: PackedKernels, max_coarse: float
) -> Derived:
    """Return the derived graph, converted to bfloat16.

    Args:
        derived: a graph whose packed weights are bfloat16 or int8 already.
        inputs: the inputs of the example.
        kernels: if they lack products in bfloat16, weights are only stored in bfloat16.
        max_coarse: above this error a product's activations have 16 bits, not 8.
    """
    return _Lowering(derived, kernels, max_coarse).run(inputs)


class _Lowering:
    def __init__(self, derived: Derived, kernels: PackedKernels, max_coarse: float) -> None:
        self._derived, self._graph = derived, derived.graph
        self._computes, self._max_coarse = kernels.supports_bfloat16(), max_coarse
        self._operators, self._wrap = kernels.operators(), kernels.wrap
        self._nodes: list[Node] = []  # new calls; their value numbers begin at NEW
        self._made: dict[int, _Made] = {}  # value number of the old graph -> argument and value
        self._cast: dict[tuple[int, torch.dtype], _Made] = {}
        self._weights: dict[str, torch.Tensor] = {}
        self._rows: set[int] = set()  # values that are views of a weight
        first = len(derived.graph.inputs)
        self._named = {name: first + index for index, name in enumerate(derived.graph.weights)}
        weights = zip(self._named.items(), derived.weights, strict=True)
        # Values that are bfloat16 in the plain graph, too, stay as they are.
        self._own = derived.halves | {
            value
            for (name, value), weight in weights
            if weight.dtype is _HALF and name not in derived.graph.packed
        }
        self._root, self._frozen = aliases(self._graph)
        self._half = partial(self._as, dtype=_HALF)
        self._float = partial(self._as, dtype=torch.float32)

    def run(self, inputs: Sequence[torch.Tensor]) -> Derived:
        """Return the new graph."""
        graph = self._graph
        for value, tensor in enumerate(inputs):
            self._made[value] = {"v": value}, tensor.clone()
        for (name, value), weight in zip(self._named.items(), self._derived.weights, strict=True):
            layout = graph.packed.get(name)
            self._made[value] = {"w": name}, self._wrap(weight, layout) if layout else weight
        last_use = {v: at for at, node in enumerate(graph.nodes) for v in node_references(node)}
        last_use |= dict.fromkeys(graph.results, len(graph.nodes))
        with torch.inference_mode():
            for position, node in enumerate(graph.nodes):
                own = graph.first_node_value + position
                self._made[own] = self._lower(node, own)
                for value in {*node_references(node), own}:
                    if last_use.get(value, -1) <= position and value >= graph.first_node_value:
                        self._forget(value)
            dtypes = [getattr(torch, one.dtype) for one in graph.outputs]
            pairs = zip(graph.results, dtypes, strict=True)
            results = [self._as(value, dtype)[0] for value, dtype in pairs]
        calls = _needed(list(enumerate(self._nodes, NEW)), results)
        plain = zip(graph.weights, self._derived.weights, strict=True)
        weights = {name: (data, graph.packed.get(name)) for name, data in plain}
        weights |= {name: (data, None) for name, data in self._weights.items()}
        return renumbered(graph, calls, results, weights, self._derived.plain)

    def _forget(self, value: int) -> None:
        """Drop the data of a value that no later call reads."""
        for dtype in (_HALF, torch.float32):
            self._cast.pop((value, dtype), None)
        self._made.pop(value, None)

    # ---- one call -----------------------------------------------------------------------------

    def _lower(self, node: Node, own: int) -> _Made:
        target, name = node.target, node.target.split(".")[1]
        if target == LINEAR_INT8 and node.args[3] is not None:
            return self._thawed(own, self._emit_int8(node))
        if target in TARGETS:
            return self._thawed(own, self._emit(target, node, self._half))
        if name.endswith("_") and not name.startswith("_"):
            is_lowered = any(map(self._is_lowered, node_references(node)))
            if is_lowered and name[:-1] in OVERLOADS:
                # not in place: no later call reads the argument (``aliases``)
                name = name[:-1]
                target = f"aten.{name}.{target.split('.')[2]}"
            else:
                self._changed(node)
                return self._emit(target, node, self._float)
        if self._root[own] in self._frozen:
            return self._thawed(own, self._emit(target, node, self._float))
        if target == "aten.view.default":
            target = "aten.reshape.default"  # a packed convolution's result may be channels-last
        ways: tuple[Callable[[int], _Made], ...] = (self._float,)
        if name in PRODUCTS and self._computes and self._takes_float(node):
            ways = (self._half, self._float)
        elif name in MOVES:
            ways = (self._kept, self._float)
            if any(self._is_row(value) for value in node_references(node)):
                self._rows.add(own)
        elif name in FOLLOWERS:
            ways = (self._followed, self._float)
        elif name == "embedding" and (rows := self._int8_rows(node)) is not None:
            return self._converted(rows, _HALF) if own in self._own else rows
        elif name in LOOK_UPS:
            value = self._emit(target, node, self._kept)
            is_own = own in self._own or not _is_half(value[1])
            return value if is_own else self._converted(value, torch.float32)
        for way in ways[:-1]:
            count = len(self._nodes)
            try:
                return self._emit(target, node, way)
            except (RuntimeError, TypeError):
                del self._nodes[count:]
                self._rows.discard(own)
                casts = {k: cast for k, cast in self._cast.items() if cast[0]["v"] < NEW + count}
                self._cast = casts
        return self._emit(target, node, ways[-1])

    def _emit_int8(self, node: Node) -> _Made:
        """Return a product of activations of 8 bits; of 16 if the example's rows have outliers."""
        coarse = self._emit(node.target, node, self._kept)
        without_sums = (*node.args[:3], None, *node.args[4:])
        fine = self._emit(node.target, replace(node, args=without_sums), self._kept)
        error = (coarse[1].float() - fine[1]).norm(dim=-1)
        is_close = bool((error <= self._max_coarse * fine[1].float().norm(dim=-1)).all())
        return coarse if is_close else fine

    def _int8_rows(self, node: Node) -> _Made | None:
        """Return an embedding's rows from the int8 copy of a tied product; None without a copy."""
        table = node.args[0]["v"]
        if not len(self._graph.inputs) <= table < self._graph.first_node_value:
            return None
        name = f"{self._name(table)}:int8"
        if name not in self._named:
            return None
        weight = self._made[self._named[name]]
        if name in self._graph.packed:  # a lookup needs rows
            rows_name = f"{self._name(table)}:rows"
            self._weights[rows_name] = quantized(self._made[table][1])[1]
            weight = {"w": rows_name}, self._weights[rows_name]
        scales = self._made[self._named[f"{name}:scales"]]
        column = self._added("aten.unsqueeze.default", [scales[0], 1], scales[1].unsqueeze(1))
        rows = self._emit(node.target, node, lambda v: weight if v == table else self._made[v])
        steps = self._emit(node.target, node, lambda v: column if v == table else self._made[v])
        rows = self._converted(rows, torch.float32)
        return self._added("aten.mul.Tensor", [rows[0], steps[0]], rows[1] * steps[1])

    def _thawed(self, own: int, value: _Made) -> _Made:
        """Return a result, converted to float32 if it shares memory that is changed in place."""
        is_frozen = self._root[own] in self._frozen and own not in self._own
        if is_frozen and _is_half(value[1]):
            return self._converted(value, torch.float32)
        return value

    def _emit(self, target: str, node: Node, way: Callable[[int], _Made]) -> _Made:
        values: list[Any] = []

        def spelt(argument: Any) -> tuple[Any, Any]:
            match argument:
                case {"v": value}:
                    return way(value)
                case {"dtype": name} | {"layout": name} | {"memory_format": name}:
                    return argument, getattr(torch, name)
                case {"device": _}:
                    return argument, torch.device("cpu")
                case {"float": name}:
                    return argument, float(name)
                case list() | tuple():
                    pairs = [spelt(one) for one in argument]
                    return [one for one, _ in pairs], [value for _, value in pairs]
                case _:
                    return argument, argument

        arguments = []
        for argument in node.args:
            spelling, value = spelt(argument)
            arguments.append(spelling)
            values.append(value)
        named = {key: spelt(argument) for key, argument in node.kwargs.items()}
        call = self._operators.get(target) or resolve(target)
        result = call(*values, **{key: value for key, (_, value) in named.items()})
        return self._added(
            target, arguments, result, {k: spelling for k, (spelling, _) in named.items()}
        )

    def _added(self, target: str, arguments: list[Any], result: Any, named: Any = None) -> _Made:
        self._nodes.append(Node(target, tuple(arguments), named or {}))
        return {"v": NEW + len(self._nodes) - 1}, result

    def _converted(self, value: _Made, dtype: torch.dtype) -> _Made:
        name = str(dtype).removeprefix("torch.")
        return self._added("aten.to.dtype", [value[0], {"dtype": name}], value[1].to(dtype))

    # ---- ways to pass arguments to a call -----------------------------------------------------

    def _as(self, value: int, dtype: torch.dtype) -> _Made:
        entry = self._made[value]
        weight = self._weight(value, dtype is torch.float32)
        if weight is not None:
            entry = weight
        tensor = entry[1]
        if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
            return entry
        if tensor.dtype is dtype or {tensor.dtype, dtype} != {_HALF, torch.float32}:
            return entry
        if dtype is torch.float32 and value in self._own:
            return entry
        key = (value, dtype)
        if key not in self._cast:
            if weight is not None and dtype is _HALF:
                name = f"{self._name(value)}:bf16"
                self._weights[name] = entry[1].to(_HALF)
                return {"w": name}, self._weights[name]
            self._cast[key] = self._converted(entry, dtype)
        return self._cast[key]

    def _kept(self, value: int) -> _Made:
        """Return a value in its present dtype; a weight in the dtype in which it is stored."""
        return self._weight(value, is_stored=True) or self._made[value]

    def _followed(self, value: int) -> _Made:
        """Return a value in its dtype; a weight in float32, so that sums with it stay float32."""
        return self._float(value) if self._is_row(value) else self._made[value]

    def _weight(self, value: int, is_stored: bool) -> _Made | None:
        """Return a weight, in its stored dtype if ``is_stored``; None for other values."""
        if not len(self._graph.inputs) <= value < self._graph.first_node_value:
            return None
        entry = self._made[value]
        if not (is_stored and _is_stored_half(entry[1])):
            return entry
        name = f"{self._name(value)}:bf16"
        self._weights.setdefault(name, entry[1].to(_HALF))
        return {"w": name}, self._weights[name]

    def _name(self, value: int) -> str:
        return self._graph.weights[value - len(self._graph.inputs)]

    def _is_lowered(self, value: int) -> bool:
        return value not in self._own and _is_half(self._made[value][1])

    def _is_row(self, value: int) -> bool:
        first = len(self._graph.inputs)
        return value in self._rows or first <= value < self._graph.first_node_value

    def _takes_float(self, node: Node) -> bool:
        """Return whether all tensors that a product takes are float32 or bfloat16."""
        tensors = [self._made[value][1] for value in node_references(node)]
        kinds = [one.dtype for one in tensors if isinstance(one, torch.Tensor)]
        return bool(kinds) and all(kind in (_HALF, torch.float32) for kind in kinds)

    def _changed(self, node: Node) -> None:
        """Drop converted copies of all values that may share memory with a call's arguments."""
        roots = {self._root[value] for value in node_references(node)}
        for key in [key for key in self._cast if self._root[key[0]] in roots]:
            del self._cast[key]


def _is_half(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_is_half, value))
    return isinstance(value, torch.Tensor) and value.dtype is _HALF


def _is_stored_half(weight: torch.Tensor) -> bool:
    """Return whether a weight is stored in bfloat16: a large matrix that does not overflow."""
    if weight.dtype is not torch.float32 or weight.dim() < 2 or weight.numel() < MIN_STORED:
        return False
    return bool((weight.to(_HALF).isfinite() == weight.isfinite()).all())


def _needed(calls: Sequence[tuple[int, Node]], results: Sequence[Any]) -> list[tuple[int, Node]]:
    """Return the calls whose value is read, or that change a value in place."""
    read = set(references(results))
    nodes = []
    for value, node in reversed(calls):
        if value in read or node.target.endswith("_", 0, node.target.rindex(".")):
            nodes.append((value, node))
            read |= set(node_references(node))
    return nodes[::-1]
