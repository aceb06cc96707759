"""Conversion of a bundle's graph to callables: one per layer group.

Only names that ``operators.split_target`` accepts are looked up. The Python source that is compiled
here contains only numbers of values and checked names of keywords. Operators and constants are
passed in as objects.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch

from ...base.errors import RegistrationRefused
from ..interface.dims import (
    NoExtent,
    Values,
    all_values,
    corners,
    shape_at,
    shape_count,
    values_text,
)
from ..interface.layout import ITEM_BYTES
from ..interface.packing import NAMESPACE
from .bundle import Graph, Node, node_references, references
from .cached_attention import calls_in_place
from .contracts import contracted, guarded
from .operators import FRESH, OVERLOADS, ZEROED, split_target
from .schema_types import element, fits, returned
from .zeroed import on_zeros

Environment = dict[int, Any]
"""Number of a value -> value that later groups need; without weights."""

GroupCall = Callable[[Environment, Sequence[torch.Tensor]], None]
"""Function of a group: reads the environment, removes values not needed later, adds results."""

NO_WEIGHT: Final = 1 << 62  # larger than every value's number
MAX_VALUE_BYTES: Final = 64 << 30  # maximum size of one intermediate value
MAX_REMEMBERED: Final = 1 << 14  # maximum calls on meta whose results are kept during a check
MAX_CHECKS: Final = 1 << 16  # maximum nodes times shapes in a registration's check; takes seconds

_VIEWS_OR_COPIES: Final = frozenset(
    ("view", "view_as", "reshape", "reshape_as", "flatten", "unflatten", "contiguous", "to")
)


def _bounded(compute: Callable[..., Any]) -> Callable[..., int]:
    """Return ``compute`` limited to integers of 64 bits: repeated squaring could fill memory."""

    def checked(*operands: Any) -> int:
        if any(type(operand) is not int for operand in operands):
            raise RegistrationRefused("bundle graph", "integer arithmetic on something else")
        result = compute(*operands)
        if not -(1 << 63) <= result < 1 << 63:
            raise RegistrationRefused("bundle graph", "an integer does not fit 64 bits")
        return int(result)

    return checked


def behind_contract(target: str) -> Callable[..., Any]:
    """Return the callable of a node's target, with its contract checked first."""
    call = resolve(target)
    return contracted(call) if isinstance(call, torch._ops.OpOverload) else call


def _getitem(values: Any, index: Any) -> Any:
    if type(index) is not int or not isinstance(values, list | tuple):
        raise RegistrationRefused("bundle graph", "getitem takes a list and an integer")
    return values[index]


_OPERATORS: Final[Mapping[str, Callable[..., Any]]] = {
    "getitem": _getitem,
    "add": _bounded(operator.add),
    "sub": _bounded(operator.sub),
    "mul": _bounded(operator.mul),
    "floordiv": _bounded(operator.floordiv),
    "mod": _bounded(operator.mod),
    "neg": _bounded(operator.neg),
    "min": _bounded(min),
    "max": _bounded(max),
}


def resolve(target: str) -> Callable[..., Any]:
    """Return the callable of a node's target.

    Raises:
        RegistrationRefused: ``target`` is not on the closed list, or torch has no such overload.
    """
    namespace, name, overload = split_target(target)
    if namespace == "_operator":
        return _OPERATORS[name]
    try:
        overload_found = getattr(getattr(torch.ops.aten, name), overload)
    except (AttributeError, RuntimeError):
        overload_found = None
    if not isinstance(overload_found, torch._ops.OpOverload):
        raise RegistrationRefused(f"operator {target!r}", f"torch {torch.__version__} has none")
    return overload_found


def _signature(target: str, call: Any, node: Node) -> dict[str, tuple[Any, Any]]:
    """Return the node's arguments, name -> (schema entry, value); refuse a wrong set of them."""
    entries = call._schema.arguments
    positional = [entry for entry in entries if not entry.kwarg_only]
    if len(node.args) > len(positional):
        raise RegistrationRefused(f"operator {target!r}", "more arguments than it takes")
    arguments = {
        entry.name: (entry, value) for entry, value in zip(positional, node.args, strict=False)
    }
    by_name = {entry.name: entry for entry in entries}
    for key, value in node.kwargs.items():
        if key not in by_name or key in arguments:
            raise RegistrationRefused(f"operator {target!r}", f"no argument {key!r}, or twice")
        arguments[key] = (by_name[key], value)
    missing = [e.name for e in entries if e.name not in arguments and not e.has_default_value()]
    if missing:
        raise RegistrationRefused(f"operator {target!r}", f"missing {', '.join(missing)}")
    return arguments


def check_kinds(graph: Graph) -> None:
    """Refuse an argument whose kind its operator's schema does not allow.

    Raises:
        RegistrationRefused: the error names node, argument and kind.
    """
    kinds = ["Tensor"] * graph.first_node_value
    for position, node in enumerate(graph.nodes):
        namespace, name, _ = split_target(node.target)
        if namespace == "aten":
            call: Any = resolve(node.target)
            for key, (entry, value) in _signature(node.target, call, node).items():
                kind = str(entry.real_type)
                if not fits(kind, value, kinds):
                    raise RegistrationRefused(
                        f"node {position} ({node.target})",
                        f"its argument {key!r} is {kind}, not {str(value)[:80]}",
                    )
            kinds.append(returned(call._schema))
        elif namespace == NAMESPACE:
            kinds.append("Tensor")  # the build wrote its arguments
        elif name == "getitem":
            of = references(node.args[0]) if node.args else []
            kinds.append(element(kinds[of[0]]) if of else "nothing")
        else:
            kinds.append("int")


def mutations(graph: Graph) -> list[tuple[int, frozenset[int]]]:
    """Return (node position, inputs and weights that its in-place write may change).

    Only nodes that may change any are returned, with all such inputs but only the first such
    weight. A value may alias everything that its arguments may alias, unless its operator is known
    to return new memory. Schemas are not enough: several composite operators (``dropout``,
    ``meshgrid``, ``pad``) may return their argument although their schema does not say so.

    Raises:
        RegistrationRefused: this torch lacks an operator, or arguments do not fit their operator.
    """
    inputs = len(graph.inputs)
    # Two numbers for each value: the inputs and the first weight that it may alias. Sets would need
    # memory for nodes times weights.
    aliases = [
        (1 << value, NO_WEIGHT) if value < inputs else (0, value)
        for value in range(graph.first_node_value)
    ]
    written: list[tuple[int, frozenset[int]]] = []
    for position, node in enumerate(graph.nodes):
        namespace, name, _ = split_target(node.target)
        reached = _joined(aliases, node_references(node))
        if namespace == "aten":
            mask, weight = _joined(aliases, _written(node, name))
            touched = {value for value in range(inputs) if mask >> value & 1}
            if weight != NO_WEIGHT:
                touched.add(weight)
            if touched:
                written.append((position, frozenset(touched)))
            if name in FRESH:
                reached = (0, NO_WEIGHT)
        elif name != "getitem":
            reached = (0, NO_WEIGHT)  # integers alias nothing
        aliases.append(reached)
    return written


def _joined(aliases: Sequence[tuple[int, int]], values: Iterable[int]) -> tuple[int, int]:
    """Return the inputs (a bit mask) and the first weight that any of the values may alias."""
    mask, weight = 0, NO_WEIGHT
    for value in values:
        mask |= aliases[value][0]
        weight = min(weight, aliases[value][1])
    return mask, weight


def _written(node: Node, name: str) -> list[int]:
    arguments = _signature(node.target, resolve(node.target), node)
    written = [
        value
        for entry, argument in arguments.values()
        if entry.alias_info is not None and entry.alias_info.is_write
        for value in references(argument)
    ]
    # In training, batch_norm and instance_norm write running statistics; schemas do not say so.
    training = {"batch_norm": "training", "instance_norm": "use_input_stats"}.get(name)
    if training is not None and arguments.get(training, (None, False))[1] is not False:
        for key in ("running_mean", "running_var"):
            written += references(arguments[key][1]) if key in arguments else []
    return written


def aliases(graph: Graph) -> tuple[list[int], dict[int, int]]:
    """Return each value's memory number, equal if values may share memory, and the frozen numbers,
    each with the position of its last write. Memory is frozen if a call can only write in place, or
    if a later call reads an older value."""
    root = list(range(graph.first_node_value + len(graph.nodes)))

    def find(value: int) -> int:
        while root[value] != value:
            root[value] = root[root[value]]
            value = root[value]
        return value

    for position, node in enumerate(graph.nodes):
        namespace, name = node.target.split(".")[:2]
        is_fresh = name in FRESH if namespace == "aten" else name != "getitem"
        if not is_fresh:
            for value in node_references(node):
                root[find(value)] = find(graph.first_node_value + position)
    last_use = {v: at for at, node in enumerate(graph.nodes) for v in node_references(node)}
    last_use |= dict.fromkeys(graph.results, len(graph.nodes))
    members: dict[int, list[int]] = {}
    for value in range(len(root)):
        root[value] = find(value)
        members.setdefault(root[value], []).append(value)
    frozen = dict[int, int]()
    for position, node in enumerate(graph.nodes):
        name = node.target.split(".")[1]
        if not name.endswith("_") or name.startswith("__"):
            continue
        [written] = references(node.args[0])
        own = graph.first_node_value + position
        older = [value for value in members[root[written]] if value < own]
        if name[:-1] not in OVERLOADS or any(last_use.get(v, -1) > position for v in older):
            frozen[root[written]] = position
    return root, frozen


def last_readers(graph: Graph) -> list[int]:
    """Return, for each weight, the position of the last node that may read it or an alias of it.

    The position is one past the last node if an output may alias the weight.
    """
    last = [-1] * (graph.first_node_value + len(graph.nodes))
    for value in graph.results:
        last[value] = len(graph.nodes)
    for position in range(len(graph.nodes) - 1, -1, -1):
        node = graph.nodes[position]
        namespace, name, _ = split_target(node.target)
        is_fresh = name != "getitem" if namespace == "_operator" else name in FRESH
        is_fresh = is_fresh or namespace == NAMESPACE
        reads = position if is_fresh else max(position, last[graph.first_node_value + position])
        for value in node_references(node):
            last[value] = max(last[value], reads)
    return last[len(graph.inputs) : graph.first_node_value]


def check_no_mutation(graph: Graph) -> None:
    """Refuse a graph that may write to its weights or to the request's inputs.

    Raises:
        RegistrationRefused: the graph may write; the error names the first such weight or input.
    """
    names = [*(f"input {spec.name!r}" for spec in graph.inputs), *graph.weights]
    for position, touched in mutations(graph):
        target = graph.nodes[position].target
        raise RegistrationRefused(
            names[min(touched, key=lambda value: (value < len(graph.inputs), value))],
            f"node {position} ({target}) changes it in place; an eviction would lose the change",
        )


# --- compiling -----------------------------------------------------------------------------------


def has_layout_dependent_writes(graph: Graph) -> bool:
    """Return True if a write reaches another value only in layouts for which a call returns a
    view, not a copy."""
    root, frozen = aliases(graph)
    return any(
        node.target.split(".")[1] in _VIEWS_OR_COPIES
        and frozen.get(root[value], -1) > value - graph.first_node_value
        for value, node in enumerate(graph.nodes, graph.first_node_value)
    )


class CompiledGraph:
    """A graph as one callable per group, for one device.

    Attributes:
        group_weights: for each group, the indices of its weight arguments, in order.
    """

    def __init__(
        self,
        graph: Graph,
        spans: Sequence[tuple[int, int]],
        device: torch.device | str,
        look_up: Callable[[str], Callable[..., Any]] = resolve,
    ) -> None:
        """Compile ``graph`` cut at ``spans``: (first node, one past the last) of each group.

        ``look_up`` returns the callable of a node's target, such as ``resolve``.
        """
        check_kinds(graph)
        positions = [position for span in spans for position in range(*span)]
        if positions != list(range(len(graph.nodes))):
            raise RegistrationRefused("groups", "they do not cover the graph's nodes in order")
        self._graph = graph
        self._device = torch.device(device)
        self._look_up = look_up
        # On a GPU, attention returns layouts that ``view`` rejects. A copy would lose later writes.
        is_gpu = self._device.type == "cuda"
        self._may_copy_views = is_gpu and not has_layout_dependent_writes(graph)
        self._last_use = _last_uses(graph)
        self._calls: dict[str | int, Callable[..., Any]] = {**calls_in_place(graph, self._callable)}
        self.group_weights: list[tuple[int, ...]] = []
        self.calls: list[GroupCall] = [self._compile(*span) for span in spans]

    def start(self, inputs: Sequence[torch.Tensor]) -> Environment:
        return dict(enumerate(inputs))

    def finish(
        self, environment: Environment, weights: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Return the outputs without copies: an output may be an input or a weight itself."""
        first_weight = len(self._graph.inputs)
        return [
            weights[value - first_weight]
            if first_weight <= value < self._graph.first_node_value
            else environment[value]
            for value in self._graph.results
        ]

    def _compile(self, first_node: int, end_node: int) -> GroupCall:
        graph = self._graph
        scope: dict[str, Any] = {}
        used_weights: dict[int, int] = {}
        local: set[int] = set()
        lines: list[str] = []

        def name(value: int) -> str:
            if len(graph.inputs) <= value < graph.first_node_value:
                weight = value - len(graph.inputs)
                return f"w[{used_weights.setdefault(weight, len(used_weights))}]"
            if value not in local:
                keeps = self._last_use[value] >= end_node
                lines.append(f" v{value} = e[{value}]" if keeps else f" v{value} = e.pop({value})")
                local.add(value)
            return f"v{value}"

        def spell(argument: Any) -> str:
            if isinstance(argument, dict) and "v" in argument:
                return name(argument["v"])
            if isinstance(argument, list | tuple) and references(argument):
                return "[" + ", ".join(spell(item) for item in argument) + "]"
            constant = f"k{len(scope)}"
            scope[constant] = self._constant(argument)
            return constant

        for position in range(first_node, end_node):
            node, own = graph.nodes[position], graph.first_node_value + position
            key = position if position in self._calls else node.target
            call = self._calls.get(key) or self._callable(node.target)
            self._calls[key] = call
            spelt = [spell(argument) for argument in node.args]
            spelt += [f"{key}={spell(value)}" for key, value in node.kwargs.items()]
            function = f"o{len(scope)}"
            scope[function] = call
            lines.append(f" v{own} = {function}({', '.join(spelt)})")
            local.add(own)
            dead = {v for v in node_references(node) if self._last_use.get(v) == position} & local
            if own not in self._last_use:
                dead.add(own)  # no node reads this value, such as the result of an in-place call
            if dead:
                lines.append(" del " + ", ".join(f"v{value}" for value in sorted(dead)))
                local -= dead
        for value in sorted(local):
            if value >= graph.first_node_value + first_node:
                lines.append(f" e[{value}] = v{value}")
        source = "def group(e, w):\n" + "\n".join(lines or [" pass"]) + "\n"
        exec(compile(source, f"<layer group at node {first_node}>", "exec"), scope)
        self.group_weights.append(tuple(used_weights))
        group: GroupCall = scope["group"]
        return group

    def _callable(self, target: str) -> Callable[..., Any]:
        if target == "aten.view.default" and self._may_copy_views:
            target = "aten.reshape.default"
        call = self._look_up(target)
        namespace, name, _ = split_target(target)
        is_zeroed = self._device.type == "cpu" and namespace == "aten" and name in ZEROED
        return on_zeros(call) if is_zeroed else call

    def _constant(self, argument: Any) -> Any:
        match argument:
            case {"dtype": name} | {"layout": name} | {"memory_format": name}:
                return getattr(torch, name)  # a name of bundle.TAGS, checked when decoded
            case {"device": _}:
                return self._device
            case {"float": name}:
                return float(name)
            case list() | tuple():
                return [self._constant(item) for item in argument]
            case _:
                return argument


def _last_uses(graph: Graph) -> dict[int, int]:
    """Return the position of each value's last reader; results are read at the end."""
    last: dict[int, int] = {}
    for position, node in enumerate(graph.nodes):
        for value in node_references(node):
            last[value] = position
    for value in graph.results:
        last[value] = len(graph.nodes)
    return last


# --- checks of a graph on meta, without data ----------------------------------------------------


class RunMemory(NamedTuple):
    """Memory that one run needs, computed from extents."""

    largest_bytes: int  # size of the largest value
    peak_bytes: int  # size of all values alive at the same time


class Checked(NamedTuple):
    """Result of ``check_shapes``."""

    is_whole: bool  # every shape was checked
    run_memory: RunMemory  # maximum over the checked shapes


def check_shapes(graph: Graph, weights: Sequence[torch.Tensor]) -> Checked:
    """Run the graph without data at all valid shapes, or at the ranges' ends if they are too many.

    Integer arithmetic on extents can be right at the ends of a range and wrong inside it. So if a
    shape is not checked here, the first run with it checks the contract of each call
    (``behind_contract``).

    Raises:
        RegistrationRefused: as ``DryRun.at``.
    """
    is_whole = shape_count(graph.dims) * len(graph.nodes) <= MAX_CHECKS
    return Checked(
        is_whole,
        check_on_meta(graph, weights, all_values(graph.dims) if is_whole else corners(graph.dims)),
    )


def check_on_meta(
    graph: Graph, weights: Sequence[torch.Tensor], shapes: Iterable[Values]
) -> RunMemory:
    """Return the maximum memory over ``shapes``; raises as ``DryRun.at``."""
    dry_run = DryRun(graph, weights)
    memories = [dry_run.at(values) for values in shapes]
    return RunMemory(*map(max, zip(*memories, strict=True)))


class DryRun:
    """A graph on meta, to run at several shapes and to compare with its signature."""

    def __init__(self, graph: Graph, weights: Sequence[torch.Tensor]) -> None:
        """Compile the graph; ``weights`` may have data, which is not read."""
        self._graph = graph
        spans = [(i, i + 1) for i in range(len(graph.nodes))]
        self._compiled = CompiledGraph(graph, spans, "meta", _Rehearsed().look_up)
        self._weights = [torch.empty_like(weight, device="meta") for weight in weights]
        self._is_view = [_is_view(node.target) for node in graph.nodes]
        self._last_use = _last_uses(graph)

    def at(self, values: Values) -> RunMemory:
        """Run with the dimensions ``values``.

        Returns:
            An upper bound of the memory of the run's values. Values that share their argument's
            memory are counted, too, unless the operator's schema declares the sharing. The
            kernels' own temporary memory is not counted.

        Raises:
            RegistrationRefused: a call fails or breaks its operator's contract, a shape depends on
                data, or the outputs differ from the signature.
        """
        graph, compiled = self._graph, self._compiled
        environment = compiled.start(_inputs_on_meta(graph, values))
        ends: dict[int, int] = {}  # node position -> bytes that become free after it
        largest_bytes = live_bytes = peak_bytes = 0
        for position, call in enumerate(compiled.calls):
            own = graph.first_node_value + position
            try:
                with torch.no_grad():
                    call(environment, [self._weights[i] for i in compiled.group_weights[position]])
            except RegistrationRefused:
                raise
            except Exception as error:  # torch may raise anything for invalid arguments
                raise RegistrationRefused(
                    f"node {position} ({graph.nodes[position].target})",
                    f"at {values_text(values)} fails without data: {type(error).__name__}: "
                    f"{str(error)[:300]}",
                ) from None
            own_bytes = _bytes(environment.get(own))
            largest_bytes = max(largest_bytes, own_bytes)
            if largest_bytes > MAX_VALUE_BYTES:
                raise RegistrationRefused(
                    f"node {position} ({graph.nodes[position].target})",
                    f"its result has {largest_bytes} bytes at {values_text(values)}, limit "
                    f"{MAX_VALUE_BYTES}",
                )
            own_bytes = 0 if self._is_view[position] else own_bytes
            live_bytes += own_bytes
            peak_bytes = max(peak_bytes, live_bytes)
            end = self._last_use.get(own, position)
            ends[end] = ends.get(end, 0) + own_bytes
            live_bytes -= ends.pop(position, 0)
        self._compare(compiled.finish(environment, self._weights), values)
        return RunMemory(largest_bytes, peak_bytes)

    def _compare(self, outputs: Sequence[torch.Tensor], values: Values) -> None:
        for spec, output in zip(self._graph.outputs, outputs, strict=True):
            if not isinstance(output, torch.Tensor):
                raise RegistrationRefused(f"output {spec.name!r}", "it is not a tensor")
            try:
                declared = shape_at(spec.shape, values)
            except NoExtent as error:
                raise RegistrationRefused(f"output {spec.name!r}", str(error)) from None
            if tuple(output.shape) != declared or output.dtype != getattr(torch, spec.dtype):
                raise RegistrationRefused(
                    f"output {spec.name!r}",
                    f"at {values_text(values)} declared {spec.dtype}{list(declared)}, computed "
                    f"{output.dtype}{list(output.shape)}",
                )


def _is_view(target: str) -> bool:
    """Return True if the operator's schema says that a result shares its argument's memory."""
    call = resolve(target)
    return isinstance(call, torch._ops.OpOverload) and any(
        result.alias_info is not None for result in call._schema.returns
    )


def _inputs_on_meta(graph: Graph, values: Values) -> list[torch.Tensor]:
    return [
        torch.empty(shape_at(spec.shape, values), dtype=getattr(torch, spec.dtype), device="meta")
        for spec in graph.inputs
    ]


class _Rehearsed:
    """Operators on meta, with their contracts checked; calls with equal extents run once.

    A deep model repeats its layers. Results can be shared, because they have no data and no
    operator of the closed list changes a tensor's extents in place.
    """

    def __init__(self) -> None:
        self._known: dict[Any, Any] = {}

    def look_up(self, target: str) -> Callable[..., Any]:
        call = resolve(target)
        if not isinstance(call, torch._ops.OpOverload):
            return call
        behind_contract = guarded(call)

        def rehearse(*args: Any, **kwargs: Any) -> Any:
            key = (target, _extents_of(args), _extents_of(tuple(kwargs.items())))
            if key not in self._known:
                if len(self._known) >= MAX_REMEMBERED:
                    self._known.clear()
                self._known[key] = behind_contract(*args, **kwargs)
            return self._known[key]

        return rehearse


def _extents_of(argument: Any) -> Any:
    """Return a key of everything that a call on meta depends on; 1, 1.0 and True differ."""
    if isinstance(argument, torch.Tensor):
        return (argument.dtype, argument.shape, argument.stride())
    if isinstance(argument, list | tuple):
        return tuple(map(_extents_of, argument))
    return (type(argument), argument)


def _bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * ITEM_BYTES.get(str(value.dtype).removeprefix("torch."), 16)
    if isinstance(value, list | tuple):
        return sum(_bytes(item) for item in value)
    return 0
