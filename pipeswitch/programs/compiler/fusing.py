"""Derivation of a graph with packed weights and fused calls from a verified graph.

In ``fast`` on a CPU, only calls that become faster are packed. Runs of the plain graph and of a
graph with all calls packed are timed call by call, at the example's shape and at a batch. So each
call finds the caches as in a request, after the model's other weights. A position is the index of a
node in the plain graph. The reference of a new weight is ``{"w": name}`` until the values of the
derived graph are numbered.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

import torch
from msgspec.structs import replace

from ..graphs.bundle import Graph, Node, node_references
from ..graphs.graph import CompiledGraph, has_layout_dependent_writes, resolve
from ..interface import packing
from ..running.executor import PackedKernels

TIMED: Final = 2  # number of shapes at which calls are timed
RUNS: Final = 3  # minimum number of runs whose calls are timed
MAX_RUNS: Final = 9
RUNS_S: Final = 1.5  # no new run begins after this processor time
COPY: Final = "aten.contiguous.default"
MAX_LOSS: Final = 0.05  # packing may slow down one shape by this share of the time of all products
SMALL_LOSS: Final = 0.005  # linear layers may lose this share of all products' time: torch, unlike
# packed calls, sums one row in another order than several
MAX_PADDED: Final = 1.1  # a packed weight may have this many times its bytes in plain bfloat16,
PADDED_BYTES: Final = 64 << 10  # or this many bytes more, whichever is larger
PRODUCTS: Final = {"aten.conv2d.default": 0, "aten.linear.default": 0, "aten.addmm.default": 1}
"""Calls that may be packed -> position of their input among the arguments."""
# Operator -> name of the activation that a packed call can apply to its product.
_ACTIVATIONS: Final[Mapping[str, str]] = {
    "relu": "relu",
    "sigmoid": "sigmoid",
    "tanh": "tanh",
    "hardswish": "hardswish",
    "hardsigmoid": "hardsigmoid",
    "silu": "swish",
}
Activation = tuple[str, list[float], str]
NewWeights = dict[str, tuple[torch.Tensor, packing.PackedLayout | None]]
_Times = list[tuple[float, ...]]  # for each shape, ms of a chain's plain calls and its packed call
NO_ACTIVATION: Final[Activation] = ("none", [], "")
_VIEW: Final = ("aten.view.default", 2)  # target and number of arguments


@dataclasses.dataclass
class Derived:
    """A derived graph with its weights, in order of first use."""

    graph: Graph
    weights: list[torch.Tensor]  # packed weights are uint8
    packed_count: int  # calls that read packed weights
    plain: tuple[int, ...]  # positions of products that are faster without packed weights
    halves: frozenset[int] = frozenset()  # values that are bfloat16 in the plain graph, too


@dataclasses.dataclass(frozen=True)
class _Chain:
    """Positions of a product (matrix product or convolution) and of the calls fused into it."""

    product: int
    norm: int | None = None
    addition: int | None = None
    other: Any = None  # the addition's other operand
    activation: int | None = None
    after: Activation = NO_ACTIVATION
    absorbed: tuple[int, ...] = ()  # views around the product, dropouts, parts of an activation
    source: Any = None  # input of the view before the product; None: the product's own input

    @property
    def members(self) -> tuple[int, ...]:
        parts = (self.product, self.norm, self.addition, self.activation, *self.absorbed)
        return tuple(sorted(position for position in parts if position is not None))


@dataclasses.dataclass(frozen=True)
class _Form:
    """The packed call that replaces a chain."""

    node: Node
    weights: NewWeights  # new weights of the call
    key: tuple[Any, ...]  # forms with equal keys take the same time


def fused(
    graph: Graph,
    weights: Sequence[torch.Tensor],
    examples: Sequence[Sequence[torch.Tensor]],
    kernels: PackedKernels,
    precision: str = "fast",
    plain: Collection[int] | None = None,
) -> Derived:
    """Derive a graph with packed weights.

    Args:
        graph: verified, without packed weights.
        weights: in the graph's order.
        examples: inputs at several shapes; calls are timed at the first two.
        kernels: operators that pack weights and read packed weights.
        precision: ``fast``: pack float32 weights if that is faster. ``bf16`` or ``int8``: pack in
            this precision if that saves bytes; packed calls may take bfloat16 (``lowering``).
        plain: positions of products that stay plain in ``fast``; None: those that times show.
    """
    traces = [_Trace(graph, weights, inputs) for inputs in examples]
    return _Fusing(graph, weights, traces, kernels, precision).run(plain)


class _Trace:
    """Shapes of all values, and inputs of all products, from one run of the graph."""

    def __init__(
        self, graph: Graph, weights: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
    ) -> None:
        self.inputs = inputs
        self.shapes = {value: tuple(tensor.shape) for value, tensor in enumerate(inputs)}
        self.taken: dict[int, torch.Tensor] = {}  # position of a product -> its input (meta device)
        self.floats = {value for value, one in enumerate(inputs) if one.dtype is torch.float32}
        self.halves = {value for value, one in enumerate(inputs) if one.dtype is torch.bfloat16}
        spans = [(position, position + 1) for position in range(len(graph.nodes))]
        compiled = CompiledGraph(graph, spans, "cpu")
        environment = compiled.start([value.clone() for value in inputs])
        with torch.inference_mode():
            for position, (node, call) in enumerate(zip(graph.nodes, compiled.calls, strict=True)):
                if node.target in PRODUCTS:
                    arguments = node.args[PRODUCTS[node.target]]
                    x = environment.get(arguments["v"]) if isinstance(arguments, dict) else None
                    if isinstance(x, torch.Tensor):
                        self.taken[position] = x.to("meta")
                call(environment, [weights[index] for index in compiled.group_weights[position]])
                result = environment.get(graph.first_node_value + position)
                if isinstance(result, torch.Tensor):
                    self.shapes[value := graph.first_node_value + position] = tuple(result.shape)
                    self.floats |= {value} if result.dtype is torch.float32 else set()
                parts = result if isinstance(result, list | tuple) else [result]
                if {getattr(one, "dtype", None) for one in parts} == {torch.bfloat16}:
                    self.halves.add(graph.first_node_value + position)


class _Fusing:
    """Derivation of one graph with packed weights."""

    def __init__(
        self,
        graph: Graph,
        weights: Sequence[torch.Tensor],
        traces: Sequence[_Trace],
        kernels: PackedKernels,
        precision: str,
    ) -> None:
        self._graph, self._weights, self._kernels = graph, weights, kernels
        self._precision, self._is_fast = precision, precision == "fast"
        self._dtype = torch.float32 if self._is_fast else torch.bfloat16  # dtype of packed weights
        self._packs = self._is_fast or kernels.supports_bfloat16()
        # A packed convolution's result is channels-last.
        self._needs_layout = has_layout_dependent_writes(graph)
        self._traces, self._taken = traces, traces[0].taken
        self._readers: dict[int, list[int]] = {}
        for position, node in enumerate(graph.nodes):
            for value in dict.fromkeys(node_references(node)):
                self._readers.setdefault(value, []).append(position)
        self._new: NewWeights = {}
        self._uses: dict[str, list[Any]] = {}  # convolution weight -> forms in which it is packed
        self._calls: dict[int, Node] = {}  # position of a chain's last member -> packed call
        self._gone: set[int] = set()  # positions of the chains' other members, which are removed
        self._plain: list[int] = []  # positions of products that stay plain

    def run(self, plain: Collection[int] | None) -> Derived:
        """Return the derived graph."""
        forms: dict[tuple[int, ...], _Form] = {}  # positions of a chain -> its packed call
        for position, node in enumerate(self._graph.nodes):
            x = self._taken.get(position)
            if x is None or not x.numel() or node.kwargs:
                continue
            make = self._convolution if node.target == "aten.conv2d.default" else self._linear
            is_int8 = self._precision == "int8" and make == self._linear
            if x.dtype != torch.float32 and not (is_int8 and x.is_floating_point()):
                continue
            chain = self._chain(position)
            may_pack = self._packs and not (self._needs_layout and make == self._convolution)
            form = make(chain, x) if is_int8 or may_pack else None
            if form is None or (not self._is_fast and _wastes(form)):
                continue
            forms[chain.members] = form
            self._new |= form.weights
            self._calls[chain.members[-1]] = form.node
            self._gone |= {*chain.members[:-1]}
        if self._is_fast and forms and self._kernels.computes_here:
            if plain is None:
                self._undo_slow(self._timed(forms))
            for members in [one for one in forms if {*one} & {*(plain or ())}]:
                self._undo(members)
        return self._numbered()

    def _undo_slow(self, times: dict[tuple[int, ...], _Times]) -> None:
        """Undo packed calls that lose time (linear layers: more than ``SMALL_LOSS`` together), and
        then those with the least gain per loss, until no shape loses more than ``MAX_LOSS``."""
        gain_ms = {one: sum(a - b for a, b in both) for one, both in times.items()}
        left_ms = SMALL_LOSS * sum(plain_ms for both in times.values() for plain_ms, _ in both)
        losing = [one for one, gained_ms in gain_ms.items() if gained_ms < 0.0]
        for one in sorted(losing, key=lambda one: -gain_ms[one]):
            is_linear = self._calls[one[-1]].target in (packing.LINEAR, packing.LINEAR_ADD)
            if is_linear and -gain_ms[one] <= left_ms:
                left_ms += gain_ms[one]
            else:
                self._undo(one)
        for at in range(len(next(iter(times.values())))):
            most_ms = MAX_LOSS * sum(both[at][0] for both in times.values())
            packed = [one for one in times if one[-1] in self._calls]
            lost_ms = {one: times[one][at][1] - times[one][at][0] for one in packed}
            for one in sorted(packed, key=lambda one: gain_ms[one] / max(lost_ms[one], 1e-9)):
                if sum(lost_ms.values()) <= most_ms:
                    break
                del lost_ms[one]
                self._undo(one)

    def _undo(self, members: tuple[int, ...]) -> None:
        del self._calls[members[-1]]
        self._gone -= {*members[:-1]}
        self._plain.append(next(one for one in members if one in self._taken))

    # ---- which calls may be fused -------------------------------------------------------------

    def _chain(self, position: int) -> _Chain:
        nodes, chain = self._graph.nodes, _Chain(position)
        is_convolution = nodes[position].target == "aten.conv2d.default"
        if not is_convolution:
            chain = self._without_views(chain)
        at = self._reader(chain.members[-1])
        if at is not None and is_convolution and self._is_foldable(nodes[at]):
            chain, at = _Chain(position, norm=at), self._reader(at)
        # In bfloat16 only convolutions without groups add: transformers' residuals stay float32.
        is_lone = is_convolution and (*nodes[position].args, 1)[6:7] in ((), (1,))
        may_add = self._is_fast or is_lone
        if at is not None and may_add and (other := self._addend(chain, at)) is not None:
            chain = dataclasses.replace(chain, addition=at, other=other)
            at = self._reader(at)
        if is_convolution or chain.addition is None:
            chain = self._with_activation(chain, at)
        # A chain runs at its last call's position, so no call in between may write in place.
        between = set(range(chain.members[0], chain.members[-1])) - {*chain.members}
        is_written = any(nodes[one].target.split(".")[1].endswith("_") for one in between)
        return _Chain(position) if is_written else chain

    def _without_views(self, chain: _Chain) -> _Chain:
        """Absorb the views that flatten and restore a product's rows, and an inactive dropout.

        transformers' ``Conv1D`` flattens the rows, because ``addmm`` takes two dimensions.
        """
        nodes, (position,) = self._graph.nodes, chain.members
        flat = nodes[position].args[PRODUCTS[nodes[position].target]]
        before, after = flat["v"] - self._graph.first_node_value, self._reader(position)
        views = [one for one in (before, after) if one is not None and one >= 0]
        if before in self._gone or before in self._calls:
            views = []  # the view is another chain's end
        if [(nodes[one].target, len(nodes[one].args)) for one in views] == [_VIEW] * 2:
            x, y = nodes[before].args[0], self._value(views[1])
            shapes = [
                (t.shapes.get(x["v"], ()), t.shapes[flat["v"]], t.shapes[y]) for t in self._traces
            ]
            if all(x[-1:] == flat[-1:] and x[:-1] == y[:-1] for x, flat, y in shapes):
                is_lone = (
                    self._readers[flat["v"]] == [position] and flat["v"] not in self._graph.results
                )
                absorbed = (*((before,) if is_lone else ()), views[1])
                chain = dataclasses.replace(chain, absorbed=absorbed, source=x)
        at = self._reader(chain.members[-1])
        if (
            at is not None
            and nodes[at].target == "aten.dropout.default"
            and nodes[at].args[2:3] == (False,)
        ):
            chain = dataclasses.replace(chain, absorbed=(*chain.absorbed, at))
        return chain

    def _with_activation(self, chain: _Chain, at: int | None) -> _Chain:
        """Add the activation that reads a chain's value. ``at``: its only reader, or None."""
        own = {"v": self._value(chain.members[-1])}
        # oneDNN applies no other activation to a sum.
        only_relu = chain.addition is not None and self._kernels.computes_here
        if at is None:
            parts = () if only_relu else self._tanh_gelu(own["v"])
            chain = dataclasses.replace(chain, absorbed=(*chain.absorbed, *parts))
            return dataclasses.replace(chain, after=("gelu", [], "tanh")) if parts else chain
        after = _activation(self._graph.nodes[at])
        if after is None or self._graph.nodes[at].args[:1] != (own,):
            return chain
        if only_relu and after[0] != "relu":
            return chain
        return dataclasses.replace(chain, activation=at, after=after)

    def _tanh_gelu(self, value: int) -> tuple[int, ...]:
        """Return the positions of the eight calls of transformers' ``NewGELUActivation``, or ()."""
        parts: list[int] = []

        def call(name: str, value: int, *rest: Any) -> int:
            """Return the result's number of ``name(value, *rest)``; -1 if there is none."""
            for at in self._readers.get(value, ()):
                node = self._graph.nodes[at]
                own = (node.target.split(".")[1], *node.args)
                if own == (name, {"v": value}, *rest) and not node.kwargs:
                    parts.append(at)
                    return self._value(at)
            return -1

        cube = call("mul", call("pow", value, 3.0), 0.044715)
        inner = call("mul", call("add", value, {"v": cube}), 0.7978845608028654)
        ramp = call("add", call("tanh", inner), 1.0)
        end = call("mul", call("mul", value, 0.5), {"v": ramp})
        values = {value} | {self._value(at) for at in parts} - {end}
        read_by = {at for one in values for at in self._readers.get(one, ())}
        is_whole = len(parts) == 8 and read_by == {*parts} and not values & {*self._graph.results}
        return tuple(parts) if is_whole else ()

    def _value(self, position: int) -> int:
        return self._graph.first_node_value + position

    def _reader(self, position: int) -> int | None:
        """Return the only reader's position; None if there are others, or a chain contains it."""
        readers = self._readers.get(self._value(position), [])
        if len(readers) != 1 or self._value(position) in self._graph.results:
            return None
        return None if readers[0] in self._gone or readers[0] in self._calls else readers[0]

    def _weight(self, argument: Any) -> torch.Tensor | None:
        if not isinstance(argument, dict) or "v" not in argument:
            return None
        index = argument["v"] - len(self._graph.inputs)
        return self._weights[index] if 0 <= index < len(self._weights) else None

    def _is_foldable(self, node: Node) -> bool:
        return (
            node.target == "aten.batch_norm.default"
            and node.args[5] is False
            and all(self._weight(one) is not None for one in node.args[3:5])
            and all(one is None or self._weight(one) is not None for one in node.args[1:3])
        )

    def _addend(self, chain: _Chain, at: int) -> Any:
        """Return the value that a call adds to the chain's; None if it is no sum of equal float32s.

        ``x.add_(product)`` writes to ``x``, which other calls may read, so it is not fused.
        """
        node, own = self._graph.nodes[at], {"v": self._value(chain.members[-1])}
        if len(node.args) != 2 or node.kwargs or own not in node.args:
            return None
        if node.target != "aten.add.Tensor" and (
            node.target != "aten.add_.Tensor" or node.args[0] != own
        ):
            return None
        other = node.args[1] if node.args[0] == own else node.args[0]
        if not isinstance(other, dict) or other.get("v") not in self._traces[0].floats:
            return None
        shapes = [(one.shapes.get(other["v"]), one.shapes[own["v"]]) for one in self._traces]
        return other if all(theirs == ours for theirs, ours in shapes) and other != own else None

    # ---- one packed call ----------------------------------------------------------------------

    def _convolution(self, chain: _Chain, x: torch.Tensor) -> _Form | None:
        node = self._graph.nodes[chain.product]
        arguments = [*node.args, *[None] * (7 - len(node.args))]
        weight, bias = self._weight(arguments[1]), self._weight(arguments[2])
        is_known = weight is not None and (arguments[2] is None or bias is not None)
        if not is_known or x.dim() != 4 or weight is None or weight.dtype != torch.float32:
            return None
        stride, padding, dilation = (
            list(one) * (2 // len(one)) if one else default
            for one, default in zip(arguments[3:6], ([1, 1], [0, 0], [1, 1]), strict=True)
        )
        how = (padding, stride, dilation, arguments[6] or 1)
        if chain.norm is not None:
            weight, bias = self._folded(self._graph.nodes[chain.norm], weight, bias)
        layout, data = self._kernels.pack_convolution(weight.to(self._dtype), *how, x.shape)
        # Another use of the weight may have another norm, or strides and groups of its own.
        form = (*how, chain.norm, chain.norm is not None and arguments[2])
        forms = self._uses.setdefault(self._name_of(arguments[1]), [])
        forms += [form] if form not in forms else []
        name = f"{self._name_of(arguments[1])}:packed{forms.index(form) or ''}"
        new: NewWeights = {name: (data, layout)}
        b = arguments[2]
        if chain.norm is not None and bias is not None:
            b, new[f"{name}:bias"] = {"w": f"{name}:bias"}, (bias.contiguous(), None)
        return self._form(
            (packing.CONVOLUTION, packing.CONVOLUTION_ADD),
            chain,
            (node.args[0], {"w": name}, b),
            (*how, *chain.after),
            new,
        )

    def _linear(self, chain: _Chain, x: torch.Tensor) -> _Form | None:
        node = self._graph.nodes[chain.product]
        if node.target == "aten.addmm.default":
            bias_at, source, weight_at = node.args[:3]
            weight = self._weight(weight_at)
            weight = weight if weight is None else weight.t()
        else:
            source, weight_at, bias_at = (*node.args, None)[:3]
            weight = self._weight(weight_at)
        bias = self._weight(bias_at)
        if weight is None or weight.dim() != 2:
            return None
        if weight.dtype != torch.float32 and self._precision != "int8":
            return None
        if bias_at is not None and (bias is None or tuple(bias.shape) != (len(weight),)):
            return None
        if self._precision == "int8":
            return self._int8(chain, (chain.source or source, weight_at, bias_at), weight)
        layout, data = self._kernels.pack_linear(weight.to(self._dtype))
        name = f"{self._name_of(weight_at, node)}:packed"
        rest = () if chain.addition is not None else chain.after
        return self._form(
            (packing.LINEAR, packing.LINEAR_ADD),
            chain,
            (chain.source or source, {"w": name}, bias_at),
            rest,
            {name: (data, layout)},
        )

    def _int8(self, chain: _Chain, arguments: tuple[Any, Any, Any], weight: torch.Tensor) -> _Form:
        """Return a product with an int8 weight, quantized symmetrically with a scale per output."""
        source, weight_at, bias_at = arguments
        name = f"{self._name_of(weight_at, self._graph.nodes[chain.product])}:int8"
        scales, rows = quantized(weight)
        layout, data = self._kernels.pack_int8(rows)
        new: NewWeights = {name: (data, layout), f"{name}:scales": (scales, None)}
        references, sums = ({"w": name}, {"w": f"{name}:scales"}), None
        if layout is not None:
            sums = {"w": f"{name}:sums"}
            new[f"{name}:sums"] = (rows.double().sum(1) * scales).float(), None
        call = Node(packing.LINEAR_INT8, (source, *references, sums, bias_at, *chain.after))
        return _Form(call, new, ())

    def _form(
        self,
        targets: tuple[str, str],
        chain: _Chain,
        arguments: tuple[Any, Any, Any],
        rest: tuple[Any, ...],
        new: NewWeights,
    ) -> _Form:
        """Return a chain's packed call; ``arguments`` refer to input, weight and bias."""
        source, w, b = arguments
        layout = new[w["w"]][1]
        assert layout is not None
        key = (layout.shape, str(rest), b is None, chain.norm is None, chain.addition is None)
        if chain.addition is None:
            return _Form(Node(targets[0], (source, w, b, *rest)), new, key)
        return _Form(Node(targets[1], (source, chain.other, w, b, *rest)), new, key)

    def _is_channels_last(self, argument: Any) -> bool:
        """Return True if a value may have the channels-last layout of a packed convolution."""
        value = argument["v"]
        while value >= self._graph.first_node_value:
            node = self._graph.nodes[value - self._graph.first_node_value]
            if node.target == "aten.conv2d.default":
                return True
            sources = list(node_references(node))
            if not sources or any(len(self._traces[0].shapes.get(v, ())) != 4 for v in sources[:1]):
                return False
            value = sources[0]
        return False

    def _folded(
        self, node: Node, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return weight and bias of a convolution with its BatchNorm folded in."""
        gamma, beta, mean, variance = (
            None if one is None else self._weights[one["v"] - len(self._graph.inputs)].double()
            for one in node.args[1:5]
        )
        assert mean is not None
        assert variance is not None
        scale = (variance + node.args[7]).rsqrt() * (1.0 if gamma is None else gamma)
        shift = ((0.0 if bias is None else bias.double()) - mean) * scale
        shift = shift + (0.0 if beta is None else beta)
        folded = weight.double() * scale.reshape(-1, 1, 1, 1)
        return folded.to(weight.dtype), shift.to(weight.dtype)

    def _name_of(self, argument: Any, node: Node | None = None) -> str:
        """Return a weight's name; it differs if ``node`` reads the weight transposed."""
        index: int = argument["v"] - len(self._graph.inputs)
        is_transposed = node is not None and node.target == "aten.addmm.default"
        return self._graph.weights[index] + (":t" if is_transposed else "")

    def _timed(self, forms: dict[tuple[int, ...], _Form]) -> dict[tuple[int, ...], _Times]:
        """Return the times of each chain's plain calls and of its packed call, at each shape.

        Equal chains get their mean times.
        """
        derived = self._numbered()
        walks = (
            walk(self._graph, self._weights),
            walk(derived.graph, derived.weights, self._kernels),
        )
        places = {value: at for at, (value, _) in enumerate(self._kept()[0])}
        times: dict[tuple[int, ...], _Times] = {one: [] for one in forms}
        for trace in self._traces[:TIMED]:
            plain_ms, packed_ms = call_times(*walks, inputs=trace.inputs)
            alike: dict[tuple[Any, ...], list[tuple[int, ...]]] = {}
            for one, form in forms.items():
                x = next(trace.taken[position] for position in one if position in trace.taken)
                alike.setdefault((tuple(x.shape), x.stride(), *form.key), []).append(one)
            for group in alike.values():
                plain = sum(plain_ms[position] for one in group for position in one)
                ours = sum(packed_ms[places[self._value(one[-1])]] for one in group)
                for one in group:
                    times[one].append((plain / len(group), ours / len(group)))
        return times

    # ---- the derived graph --------------------------------------------------------------------

    def _numbered(self) -> Derived:
        graph = self._graph
        plain = zip(graph.weights, self._weights, strict=True)
        weights = {name: (data, None) for name, data in plain} | self._new
        nodes, results = self._kept()
        derived = renumbered(graph, nodes, results, weights, tuple(self._plain))
        first, halves = derived.graph.first_node_value, self._traces[0].halves
        moved = enumerate((value for value, _ in nodes), first)
        own = {new for new, value in moved if value in halves}
        inputs = {value for value in halves if value < len(graph.inputs)}
        return dataclasses.replace(derived, halves=frozenset(own | inputs))

    def _kept(self) -> tuple[list[tuple[int, Node]], list[dict[str, Any]]]:
        """Return the derived graph's calls, each with its value's number, and the results."""
        graph = self._graph
        nodes: list[tuple[int, Node]] = []
        copies: dict[int, int] = {}  # value -> its copy, which later calls read

        def read(argument: dict[str, Any]) -> dict[str, Any]:
            value = argument.get("v", -1)
            return {"v": copies[value]} if value in copies else argument

        for position, node in enumerate(graph.nodes):
            if self._needs_copy(position):
                source = read(node.args[0])
                copies[node.args[0]["v"]] = self._value(len(graph.nodes) + len(copies))
                nodes.append((copies[node.args[0]["v"]], Node(COPY, (source,))))
            if position not in self._gone:
                call = self._calls.get(position, node)
                nodes.append((self._value(position), _mapped(call, read)))
        return nodes, [read({"v": value}) for value in graph.results]

    def _needs_copy(self, position: int) -> bool:
        """Return True if a call makes a view that is impossible for channels-last memory."""
        node = self._graph.nodes[position]
        source = node.args[0] if node.args else None
        if node.target != "aten.view.default" or not isinstance(source, dict) or "v" not in source:
            return False
        if not self._calls or not self._is_channels_last(source):
            return False
        for trace in self._traces:
            value = torch.empty(trace.shapes[source["v"]], device="meta")
            try:
                value.to(memory_format=torch.channels_last).view(
                    trace.shapes[self._value(position)]
                )
            except RuntimeError:
                return True
        return False


def renumbered(
    graph: Graph,
    nodes_kept: Sequence[tuple[int, Node]],
    results: Sequence[Any],
    weights: NewWeights,
    plain: tuple[int, ...],
) -> Derived:
    """Return a graph of the calls ``nodes_kept`` with new value numbers.

    Args:
        graph: the former graph.
        nodes_kept: the calls in order, each with the value number by which other calls refer to it.
        results: references of the outputs.
        weights: all weights by name. Calls refer to them by ``{"w": name}`` or the old number.
        plain: ``Derived.plain`` of the result.
    """
    first, order = len(graph.inputs), dict[str, int]()

    def named(argument: dict[str, Any]) -> dict[str, Any]:
        if first <= argument.get("v", -1) < graph.first_node_value:
            argument = {"w": graph.weights[argument["v"] - first]}
        if "w" in argument:
            order.setdefault(argument["w"], first + len(order))
        return argument

    nodes = [_mapped(node, named) for _, node in nodes_kept]
    outputs = [named(one) for one in results]
    moved = {value: value for value in range(first)}
    moved |= {value: at for at, (value, _) in enumerate(nodes_kept, first + len(order))}

    def numbered(argument: dict[str, Any]) -> dict[str, Any]:
        if "w" in argument:
            return {"v": order[argument["w"]]}
        return {"v": moved[argument["v"]]} if "v" in argument else argument

    packed = {name: layout for name in order if (layout := weights[name][1]) is not None}
    new = replace(
        graph,
        weights=tuple(order),
        nodes=tuple(_mapped(node, numbered) for node in nodes),
        results=tuple(numbered(one)["v"] for one in outputs),
        packed=packed,
    )
    return Derived(new, [weights[name][0] for name in order], len(packed), plain)


def _mapped(node: Node, of: Callable[[dict[str, Any]], Any]) -> Node:
    """Return a call with ``of`` applied to each reference and tagged argument."""

    def mapped(argument: Any) -> Any:
        if isinstance(argument, list | tuple):
            return [mapped(one) for one in argument]
        return of(argument) if isinstance(argument, dict) else argument

    named = {key: mapped(one) for key, one in node.kwargs.items()}
    return Node(node.target, tuple(map(mapped, node.args)), named)


def quantized(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scale of each row of a weight, in float32, and its rows in int8."""
    scales = weight.abs().amax(1).float().clamp(min=1e-30) / 127.0
    rows = (weight.float() / scales[:, None]).round().clamp(-127, 127)
    return scales, rows.to(torch.int8).contiguous()


def _wastes(form: _Form) -> bool:
    """Return whether padding makes a packed weight too large: ``MAX_PADDED``, ``PADDED_BYTES``."""
    pairs = [(data.nbytes, layout) for data, layout in form.weights.values() if layout is not None]
    packed_bytes = sum(size_bytes for size_bytes, _ in pairs)
    stored_bytes = sum(2 * math.prod(layout.shape) for _, layout in pairs)
    return packed_bytes > max(MAX_PADDED * stored_bytes, stored_bytes + PADDED_BYTES)


def _activation(node: Node) -> Activation | None:
    """Return a packed call's arguments for a node's activation; None if it is not supported."""
    name = node.target.split(".")[1].removesuffix("_")
    rest = [*node.args[1:], *node.kwargs.values()]
    if not all(isinstance(one, int | float | str) for one in rest):
        return None
    match name:
        case "gelu":
            return ("gelu", [], str(rest[0] if rest else "none"))
        case "hardtanh" if not rest:
            return ("hardtanh", [-1.0, 1.0], "")
        case "relu6":
            return ("hardtanh", [0.0, 6.0], "")
        case "hardtanh" | "clamp" if len(rest) == 2 and rest[0] <= rest[1]:
            return ("hardtanh", [float(one) for one in rest], "")
        case "leaky_relu":
            return ("leaky_relu", [float(rest[0]) if rest else 0.01], "")
        case _:
            pass
    return (_ACTIVATIONS[name], [], "") if name in _ACTIVATIONS and not rest else None


Walk = tuple[Graph, Sequence[torch.Tensor], Callable[[str], Callable[..., Any]]]
"""A graph, its weights, and the function that returns the callable of a call's target."""


def walk(
    graph: Graph, weights: Sequence[torch.Tensor], kernels: PackedKernels | None = None
) -> Walk:
    """Return an argument of ``call_times``; a graph with packed weights needs their kernels."""
    if kernels is None:
        return graph, weights, resolve
    operators, wrap = kernels.operators(), kernels.wrap
    wrapped = [
        wrap(data, graph.packed[name]) if name in graph.packed else data
        for name, data in zip(graph.weights, weights, strict=True)
    ]
    return graph, wrapped, lambda target: operators.get(target) or resolve(target)


def call_times(*walks: Walk, inputs: Sequence[torch.Tensor]) -> list[list[float]]:
    """Return each call's least processor time in ms, for each graph. The graphs alternate."""
    least = [[math.inf] * len(graph.nodes) for graph, _, _ in walks]
    compiled = [
        CompiledGraph(graph, [(at, at + 1) for at in range(len(graph.nodes))], "cpu", look_up)
        for graph, _, look_up in walks
    ]
    began_s = time.thread_time()
    with torch.inference_mode():
        for number in range(MAX_RUNS):
            if number >= RUNS and time.thread_time() - began_s > RUNS_S:
                break
            for one, (_, weights, _), times_ms in zip(compiled, walks, least, strict=True):
                environment = one.start([value.clone() for value in inputs])
                for at, call in enumerate(one.calls):
                    needed = [weights[index] for index in one.group_weights[at]]
                    call_s = time.thread_time()
                    call(environment, needed)
                    times_ms[at] = min(times_ms[at], 1e3 * (time.thread_time() - call_s))
    return least
