"""Derivation of a graph with packed weights and fused calls from a verified graph.

A call is packed only if that is faster on this machine: both forms are timed on the example's
values. Positions are those of nodes in the plain graph; a new weight is named, ``{"w": name}``,
until the derived graph is numbered.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from msgspec.structs import replace

from ..graphs.bundle import Graph, Node, node_references, references
from ..graphs.graph import CompiledGraph, resolve
from ..interface.packing import CONVOLUTION, CONVOLUTION_ADD, LINEAR, LINEAR_ADD, PackedLayout
from ..running.executor import PackedKernels

ROUNDS: Final = 7  # rounds of a timing; the minimum counts
MIN_MS: Final = 0.2  # a round repeats a call until it takes this long
PRODUCTS: Final = {"aten.conv2d.default": 0, "aten.linear.default": 0, "aten.addmm.default": 1}
"""Calls that may be packed, and which of their arguments is the input."""

# What a fused call does after its product: attribute, scalars, algorithm.
_ACTIVATIONS: Final[Mapping[str, str]] = {
    "relu": "relu",
    "sigmoid": "sigmoid",
    "tanh": "tanh",
    "hardswish": "hardswish",
    "hardsigmoid": "hardsigmoid",
    "silu": "swish",
}
Activation = tuple[str, list[float], str]
NewWeights = dict[str, tuple[torch.Tensor, PackedLayout | None]]
NO_ACTIVATION: Final[Activation] = ("none", [], "")


@dataclass
class Derived:
    """A derived graph with its weights, in order of first use."""

    graph: Graph
    weights: list[torch.Tensor]  # uint8 where packed
    packed_count: int  # calls over packed weights
    plain_count: int  # calls that could be packed but are faster plain


@dataclass(frozen=True)
class _Chain:
    """A product and the calls that are fused into it, by position."""

    product: int
    norm: int | None = None
    addition: int | None = None
    other: Any = None  # the addition's other operand
    activation: int | None = None

    @property
    def members(self) -> tuple[int, ...]:
        found = (self.product, self.norm, self.addition, self.activation)
        return tuple(position for position in found if position is not None)


@dataclass(frozen=True)
class _Form:
    """A chain as one packed call."""

    node: Node
    weights: NewWeights  # its new ones
    run: Callable[[], object]  # on the example's input
    key: tuple[Any, ...]  # equal for forms that take equally long


def fused(
    graph: Graph,
    weights: Sequence[torch.Tensor],
    examples: Sequence[Sequence[torch.Tensor]],
    kernels: PackedKernels,
) -> Derived:
    """Derive a graph with packed weights.

    Args:
        graph: verified, without packed weights.
        weights: in the graph's order.
        examples: inputs at several shapes; calls are timed at the first.
        kernels: pack weights and compute over them.
    """
    traces = [_Trace(graph, weights, inputs) for inputs in examples]
    return _Fusing(graph, weights, traces, kernels).run()


class _Trace:
    """Run the graph once, call by call; record the shapes of all values and the inputs of
    products."""

    def __init__(
        self, graph: Graph, weights: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
    ) -> None:
        self.shapes = {value: tuple(given.shape) for value, given in enumerate(inputs)}
        self.taken: dict[int, torch.Tensor] = {}
        spans = [(position, position + 1) for position in range(len(graph.nodes))]
        compiled = CompiledGraph(graph, spans, "cpu")
        environment = compiled.start([value.clone() for value in inputs])
        with torch.inference_mode():
            for position, (node, call) in enumerate(zip(graph.nodes, compiled.calls, strict=True)):
                if node.target in PRODUCTS:
                    given = node.args[PRODUCTS[node.target]]
                    x = environment.get(given["v"]) if isinstance(given, dict) else None
                    if isinstance(x, torch.Tensor):
                        self.taken[position] = x.clone(memory_format=torch.preserve_format)
                call(environment, [weights[index] for index in compiled.group_weights[position]])
                result = environment.get(graph.first_node_value + position)
                if isinstance(result, torch.Tensor):
                    self.shapes[graph.first_node_value + position] = tuple(result.shape)


class _Fusing:
    """One graph on its way to a derived one."""

    def __init__(
        self,
        graph: Graph,
        weights: Sequence[torch.Tensor],
        traces: Sequence[_Trace],
        kernels: PackedKernels,
    ) -> None:
        self._graph, self._weights, self._kernels = graph, weights, kernels
        self._traces, self._taken = traces, traces[0].taken
        self._readers: dict[int, list[int]] = {}
        for position, node in enumerate(graph.nodes):
            for value in dict.fromkeys(node_references(node)):
                self._readers.setdefault(value, []).append(position)
        self._new: NewWeights = {}
        self._calls: dict[int, Node] = {}  # instead of the last member of a chain
        self._gone: set[int] = set()  # its other members
        self._times: dict[tuple[Any, ...], tuple[float, ...]] = {}
        self._plain_count = 0

    def run(self) -> Derived:
        """Return the derived graph."""
        for position, node in enumerate(self._graph.nodes):
            x = self._taken.get(position)
            if x is None or x.dtype != torch.float32 or not x.numel() or node.kwargs:
                continue
            chain = self._chain(position)
            make = self._convolution if node.target == "aten.conv2d.default" else self._linear
            form = make(chain, x)
            if form is None:
                continue
            plain_ms, packed_ms = self._timed(chain, form, x)
            if packed_ms > plain_ms:
                self._plain_count += 1
                continue
            self._new |= form.weights
            self._calls[chain.members[-1]] = form.node
            self._gone |= {*chain.members[:-1]}
        return self._numbered()

    # ---- which calls may be fused -------------------------------------------------------------

    def _chain(self, position: int) -> _Chain:
        nodes, chain = self._graph.nodes, _Chain(position)
        is_convolution = nodes[position].target == "aten.conv2d.default"
        at = self._reader(position)
        if at is not None and is_convolution and self._is_foldable(nodes[at]):
            chain, at = _Chain(position, norm=at), self._reader(at)
        if at is not None and (other := self._addend(chain, at)) is not None:
            chain = _Chain(position, chain.norm, at, other)
            at = self._reader(at)
        if (
            at is not None
            and nodes[at].args[:1] == ({"v": self._value(chain.members[-1])},)
            and (is_convolution or chain.addition is None)
            and _activation(nodes[at]) is not None
        ):
            chain = _Chain(position, chain.norm, chain.addition, chain.other, at)
        # The product moves to where its chain ends: nothing may be written in between.
        between = set(range(position, chain.members[-1])) - {*chain.members}
        is_written = any(nodes[one].target.split(".")[1].endswith("_") for one in between)
        return _Chain(position) if is_written else chain

    def _value(self, position: int) -> int:
        return self._graph.first_node_value + position

    def _reader(self, position: int) -> int | None:
        """Return the only call that reads a call's value, if it is not part of another chain."""
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
        """Return the other operand of a sum of equal shapes; None if it is not such a sum.

        ``x.add_(product)`` writes to ``x``, which others may read, so it is not fused.
        """
        node, own = self._graph.nodes[at], {"v": self._value(chain.members[-1])}
        if len(node.args) != 2 or node.kwargs or own not in node.args:
            return None
        if node.target != "aten.add.Tensor" and (
            node.target != "aten.add_.Tensor" or node.args[0] != own
        ):
            return None
        other = node.args[1] if node.args[0] == own else node.args[0]
        if not isinstance(other, dict) or "v" not in other or self._weight(other) is not None:
            return None
        shapes = [(one.shapes.get(other["v"]), one.shapes[own["v"]]) for one in self._traces]
        return other if all(theirs == ours for theirs, ours in shapes) and other != own else None

    # ---- one packed call ----------------------------------------------------------------------

    def _convolution(self, chain: _Chain, x: torch.Tensor) -> _Form | None:
        node = self._graph.nodes[chain.product]
        given = [*node.args, *[None] * (7 - len(node.args))]
        weight, bias = self._weight(given[1]), self._weight(given[2])
        is_known = weight is not None and (given[2] is None or bias is not None)
        if not is_known or x.dim() != 4 or weight is None or weight.dtype != torch.float32:
            return None
        stride, padding, dilation = (
            list(one) * (2 // len(one)) if one else default
            for one, default in zip(given[3:6], ([1, 1], [0, 0], [1, 1]), strict=True)
        )
        how = (padding, stride, dilation, given[6] or 1)
        if chain.norm is not None:
            weight, bias = self._folded(self._graph.nodes[chain.norm], weight, bias)
        layout, data = self._kernels.pack_convolution(weight, *how, x.shape)
        name = self._name_of(given[1])
        new: dict[str, tuple[torch.Tensor, PackedLayout | None]] = {
            f"{name}:packed": (data, layout)
        }
        if bias is not None:
            new[f"{name}:bias"] = (bias.contiguous(), None)
        rest = (*how, *self._after(chain))
        b = None if bias is None else {"w": f"{name}:bias"}
        return self._form(
            (CONVOLUTION, CONVOLUTION_ADD), chain, x, (node.args[0], {"w": f"{name}:packed"}, b),
            (self._kernels.wrap(data, layout), bias), rest, new,
        )  # fmt: skip

    def _linear(self, chain: _Chain, x: torch.Tensor) -> _Form | None:
        node = self._graph.nodes[chain.product]
        if node.target == "aten.addmm.default":
            bias_at, given, weight_at = node.args[:3]
            weight = self._weight(weight_at)
            weight = weight if weight is None else weight.t()
        else:
            given, weight_at, bias_at = (*node.args, None)[:3]
            weight = self._weight(weight_at)
        bias = self._weight(bias_at)
        if weight is None or weight.dtype != torch.float32 or weight.dim() != 2:
            return None
        if bias_at is not None and (bias is None or tuple(bias.shape) != (len(weight),)):
            return None
        layout, data = self._kernels.pack_linear(weight)
        name = f"{self._name_of(weight_at)}:packed"
        rest = () if chain.addition is not None else self._after(chain)
        return self._form(
            (LINEAR, LINEAR_ADD), chain, x, (given, {"w": name}, bias_at),
            (self._kernels.wrap(data, layout), bias), rest, {name: (data, layout)},
        )  # fmt: skip

    def _form(
        self,
        targets: tuple[str, str],
        chain: _Chain,
        x: torch.Tensor,
        arguments: tuple[Any, Any, Any],
        values: tuple[torch.Tensor, torch.Tensor | None],
        rest: tuple[Any, ...],
        new: NewWeights,
    ) -> _Form:
        """``arguments`` and ``values``: of input, weight and bias; of the last two."""
        operators, (given, w, b) = self._kernels.operators(), arguments
        keeps = torch.contiguous_format
        if x.dim() == 4 and self._is_channels_last(given):
            keeps = torch.channels_last
            x = x.contiguous(memory_format=keeps)
        key = (tuple(x.shape), x.stride(), tuple(values[0].shape), str(rest), b is None)
        if chain.addition is None:
            node = Node(targets[0], (given, w, b, *rest))
            call = operators[targets[0]]
            return _Form(node, new, lambda: call(x, *values, *rest), (*key, chain.norm is None))
        other = torch.zeros(self._traces[0].shapes[self._value(chain.product)])
        other = other.contiguous(memory_format=keeps)
        node = Node(targets[1], (given, chain.other, w, b, *rest))
        add = operators[targets[1]]
        run = lambda: add(x, other, *values, *rest)  # noqa: E731
        return _Form(node, new, run, (*key, "add", chain.norm is None))

    def _is_channels_last(self, argument: Any) -> bool:
        """Whether a packed convolution before it gives a value that layout: the calls in between
        keep it."""
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

    def _after(self, chain: _Chain) -> Activation:
        if chain.activation is None:
            return NO_ACTIVATION
        return _activation(self._graph.nodes[chain.activation]) or NO_ACTIVATION

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

    def _name_of(self, argument: Any) -> str:
        index: int = argument["v"] - len(self._graph.inputs)
        return self._graph.weights[index]

    def _timed(self, chain: _Chain, form: _Form, x: torch.Tensor) -> tuple[float, ...]:
        """Return the milliseconds of the chain's plain calls and of its packed call."""
        targets = tuple(self._graph.nodes[one].target for one in chain.members)
        key = (targets, *form.key)
        if key not in self._times:
            with torch.inference_mode():
                self._times[key] = least_ms([lambda: self._plain(chain, x), form.run])
        return self._times[key]

    def _plain(self, chain: _Chain, x: torch.Tensor) -> None:
        """Compute the chain's calls one after the other."""
        value = x
        for position in chain.members:
            node = self._graph.nodes[position]
            arguments = [
                argument if (weight := self._weight(argument)) is None else weight
                for argument in node.args
            ]
            if position == chain.product:
                arguments[PRODUCTS[node.target]] = value
            else:
                arguments[0] = value
            if position == chain.addition:
                arguments[1] = value
            value = resolve(node.target)(*arguments, **node.kwargs)

    # ---- the derived graph --------------------------------------------------------------------

    def _numbered(self) -> Derived:
        graph = self._graph
        kept = [
            (position, self._calls.get(position, node))
            for position, node in enumerate(graph.nodes)
            if position not in self._gone
        ]
        arguments = [one for _, node in kept for one in (*node.args, *node.kwargs.values())]
        arguments += [{"v": value} for value in graph.results]
        order = list(dict.fromkeys(self._names_in(arguments)))
        numbers = {name: len(graph.inputs) + index for index, name in enumerate(order)}
        moved = {value: value for value in range(len(graph.inputs))}
        for value, name in enumerate(graph.weights, len(graph.inputs)):
            moved[value] = numbers.get(name, -1)
        for value, (position, _) in enumerate(kept, len(graph.inputs) + len(order)):
            moved[self._value(position)] = value

        def argument_of(argument: Any) -> Any:
            match argument:
                case {"w": name}:
                    return {"v": numbers[name]}
                case {"v": value}:
                    return {"v": moved[value]}
                case list() | tuple() if references(argument):
                    return [argument_of(one) for one in argument]
            return argument

        nodes = tuple(
            Node(
                node.target,
                tuple(argument_of(one) for one in node.args),
                {key: argument_of(one) for key, one in node.kwargs.items()},
            )
            for _, node in kept
        )
        packed = {name: layout for name in order if (layout := self._new.get(name, (0, None))[1])}
        derived = replace(
            graph,
            weights=tuple(order),
            nodes=nodes,
            results=tuple(moved[value] for value in graph.results),
            packed=packed,
        )
        plain = dict(zip(graph.weights, self._weights, strict=True))
        weights = [self._new[name][0] if name in self._new else plain[name] for name in order]
        return Derived(derived, weights, len(packed), self._plain_count)

    def _names_in(self, argument: Any) -> Iterator[str]:
        match argument:
            case {"w": name}:
                yield name
            case {"v": value} if 0 <= value - len(self._graph.inputs) < len(self._weights):
                yield self._graph.weights[value - len(self._graph.inputs)]
            case list() | tuple():
                for one in argument:
                    yield from self._names_in(one)
            case _:
                pass


def _activation(node: Node) -> Activation | None:
    """Return how a packed call applies a node's activation; None if it cannot."""
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
        case "hardtanh" | "clamp" if len(rest) == 2:
            return ("hardtanh", [float(one) for one in rest], "")
        case "leaky_relu":
            return ("leaky_relu", [float(rest[0]) if rest else 0.01], "")
        case _:
            pass
    return (_ACTIVATIONS[name], [], "") if name in _ACTIVATIONS and not rest else None


def least_ms(calls: Sequence[Callable[[], object]]) -> tuple[float, ...]:
    """Return the least processor time of each call, measured in turns."""
    repeats = []
    for call in calls:
        call()
        began_s = time.thread_time()
        call()
        repeats.append(max(1, int(MIN_MS / max(1e-3, 1e3 * (time.thread_time() - began_s)))))
    least = [float("inf")] * len(calls)
    for _ in range(ROUNDS):
        for index, (call, repeat) in enumerate(zip(calls, repeats, strict=True)):
            began_s = time.thread_time()
            for _ in range(repeat):
                call()
            least[index] = min(least[index], 1e3 * (time.thread_time() - began_s) / repeat)
    return tuple(least)
