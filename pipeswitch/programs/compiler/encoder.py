"""Encoder of a ``torch.export`` result: its graph, and its weights in order of first use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ...base.errors import RegistrationRefused
from ..graphs.bundle import VERSION, Graph, Node, check_graph
from ..graphs.graph import aliases, mutations
from ..graphs.operators import DROPPED_AT_EXPORT, split_target
from ..interface.dims import Extent
from ..interface.layout import KindSettings, ValueSpec
from ..interface.matching import uncompiled
from ..running.values import dtype_name
from .dynamic import Axes, NotDynamic
from .export_hints import DATA, OTHERS, SPARSE, WINDOWS, WRITES, advice, refuse_wrapped
from .recurrent import own_name
from .symbols import extent_of, suspects

_PREFIX: Final = "module."
_INNER: Final = torch.ops.export.access_subclass_inner_tensor.default
_SYMBOLIC: Final[dict[Any, str]] = {torch.sym_max: "_operator.max", torch.sym_min: "_operator.min"}
_INSTEAD: Final = {
    "aten.detach_.default": "aten.detach.default",  # called for constants made in forward
    "aten.unfold.default": "aten.unfold_copy.default",  # its windows share no memory
}
"""Operator -> allowed operator with the same result, if there are no gradients and no writes
(``_private_windows``)."""
_OF_GRADIENTS: Final[dict[str, tuple[int, tuple[str, ...]]]] = {
    "aten.embedding.default": (3, ("scale_grad_by_freq", "sparse")),
    "aten.gather.default": (3, ("sparse_grad",)),
}
"""Operator -> position of the first argument that only backward reads, and such keywords."""


@dataclass
class EncodedProgram:
    """An exported program: its graph, and the weights that the graph names.

    Attributes:
        graph: as in a bundle.
        weights: contiguous tensors on the host, one for each of ``graph.weights``.
        notes: decisions of the export (such as why the batch is fixed), for people.
        suspects: extents of the dimensions at which the graph may be wrong.
        settings: settings of the model's kind; None: a plain model.
        unsaved: names of weights that the module's state dict does not have, such as buffers with
            ``persistent=False``. A version from a file keeps their values.
        examples: the inputs of the export; empty: they say nothing about the model's requests.
    """

    graph: Graph
    weights: list[torch.Tensor]
    notes: list[str] = field(default_factory=list)
    suspects: list[dict[str, int]] = field(default_factory=list)
    settings: KindSettings | None = None
    unsaved: list[str] = field(default_factory=list)
    examples: list[torch.Tensor] = field(default_factory=list)


class Encoder:
    """Conversion of one exported program to an ``EncodedProgram``."""

    def __init__(
        self,
        exported: torch.export.ExportedProgram,
        names: list[str],
        output_names: list[str],
        axes: Axes,
    ) -> None:
        inline_regions(exported.graph_module)
        self._exported = exported
        self._names = names
        self._output_names = output_names
        self._axes = axes
        self._dims = tuple(dict.fromkeys(axes.values()))
        self._symbols: dict[Any, str] = {}  # symbol of the trace -> name of a dimension
        self._replaced: Any = {}  # symbol -> equal expression that the trace found
        self._conditions: list[Any] = []  # assumptions of the trace about the symbols
        self._needed = _needed(exported)
        self._first_names: dict[tuple[Any, ...], str] = {}  # weight -> name registered first
        for name, tensor in exported.state_dict.items():
            if not is_traceable_wrapper_subclass(tensor):
                self._first_names.setdefault(_identity(tensor), name)
        self._wrapped: dict[str, tuple[str, Any]] = {}  # weights that consist of other tensors
        self._values: dict[str, Any] = {}  # fx node name -> value key, before numbering
        self._tensors: dict[tuple[Any, ...], int] = {}
        self._permuted: dict[int, list[int]] = {}  # weight -> permutation that restores its shape
        self._permutation_nodes: dict[int, int] = {}
        self._weight_names: list[str] = []
        self._weights: list[torch.Tensor] = []
        self._nodes: list[tuple[str, list[Any], dict[str, Any]]] = []

    # Keys before numbering: ("i", n) an input, ("w", n) a weight, ("n", n) a node. Weights are
    # numbered by first use, which is known only when all nodes have been seen.

    def program(self) -> EncodedProgram:
        signature = self._exported.graph_signature
        if signature.buffers_to_mutate:
            names = sorted({n.removeprefix(_PREFIX) for n in signature.buffers_to_mutate.values()})
            raise RegistrationRefused(
                f"buffers {', '.join(names)}",
                "the module changes them in eval mode; an eviction would lose the change",
                hint=WRITES,
            )
        specs = {spec.arg.name: spec for spec in signature.input_specs if hasattr(spec.arg, "name")}
        inputs: list[ValueSpec] = []
        results: list[Any] = []
        outputs: list[ValueSpec] = []
        for node in self._exported.graph.nodes:
            if node.op == "placeholder":
                self._placeholder(node, specs[node.name], inputs)
            elif node.op == "call_function":
                self._call(node)
            elif node.op == "output":
                results, outputs = self._outputs(node)
            # A ``get_attr`` node is the body of a higher-order operator, which ``_call`` refuses.
        return self._numbered(inputs, results, outputs)

    def _placeholder(self, node: Any, spec: Any, inputs: list[ValueSpec]) -> None:
        kind = spec.kind.name
        if kind == "USER_INPUT":
            name = self._names[len(inputs)]
            value = node.meta["val"]
            self._open(len(inputs), name, value)
            self._values[node.name] = {"v": ("i", len(inputs))}
            inputs.append(self._value_spec(f"input {name!r}", name, value))
        elif kind in ("PARAMETER", "BUFFER", "CONSTANT_TENSOR"):
            tensor: Any = self._tensor(spec.target)  # may be a subclass
            if is_traceable_wrapper_subclass(tensor):
                self._wrapped[node.name] = (spec.target, tensor)
            elif node.users:
                self._values[node.name] = self._weight(spec.target, tensor)
        else:
            raise RegistrationRefused(f"{kind.lower()} {spec.target}", "it is not a tensor")

    def _open(self, number: int, name: str, value: torch.Tensor) -> None:
        """Record which symbols of the trace are dimensions of this input."""
        extents: list[Any] = list(value.shape)  # may contain symbols, unlike its declared type
        for axis, extent in enumerate(extents):
            dim = self._axes.get((number, axis))
            if dim is None:
                continue
            if not isinstance(extent, torch.SymInt):
                raise NotDynamic(f"the model fixes dimension {axis} of {name!r}, {dim.name}")
            environment: Any = extent.node.shape_env
            self._replaced = environment.replacements
            symbol = extent.node.expr.xreplace(self._replaced)
            if not symbol.is_Symbol or self._symbols.setdefault(symbol, dim.name) != dim.name:
                raise NotDynamic(f"dimension {axis} of {name!r} is {symbol}, not {dim.name} itself")
            asserted = [
                one.expr for of in environment.deferred_runtime_asserts.values() for one in of
            ]
            self._conditions = [*asserted, *(guard.expr for guard in environment.guards)]

    def _tensor(self, target: str) -> Any:
        exported = self._exported
        source = exported.state_dict if target in exported.state_dict else exported.constants
        return source[target].detach()

    def _weight(self, target: str, tensor: Any) -> Any:
        """Return a weight's value key, which tied tensors share.
        A permuted tensor is stored in the order of its bytes."""
        key = _identity(tensor)
        name = self._first_names.get(key, target).removeprefix(_PREFIX)
        dtype_name(tensor.dtype, f"weight {name!r}")
        if tensor.layout is not torch.strided:
            raise RegistrationRefused(f"weight {name!r}", "it is sparse", hint=SPARSE)
        if key not in self._tensors:
            # Convolutions choose their kernel by the weight's strides (channels_last), so bits
            # depend on them. Keep the order of the bytes, and permute the tensor in the graph.
            strides = tensor.stride()
            order = sorted(range(tensor.dim()), key=lambda d: -strides[d])
            is_permuted = not tensor.is_contiguous() and tensor.permute(order).is_contiguous()
            weight = self._tensors[key] = len(self._weights)
            self._weight_names.append(uncompiled(name))
            stored = tensor.permute(order) if is_permuted else tensor
            self._weights.append(stored.cpu().contiguous())
            if is_permuted:
                self._permuted[weight] = [order.index(d) for d in range(tensor.dim())]
        return {"v": ("w", self._tensors[key])}

    def _value(self, name: str) -> Any:
        """Return a node's value key; emit a weight's permutation just before its first use."""
        if name in self._wrapped:
            target, tensor = self._wrapped[name]
            refuse_wrapped(target, tensor)
        value = self._values[name]
        kind, index = value["v"]
        if kind != "w" or index not in self._permuted:
            return value
        if index not in self._permutation_nodes:
            self._permutation_nodes[index] = len(self._nodes)
            self._nodes.append(("aten.permute.default", [value, self._permuted[index]], {}))
        return {"v": ("n", self._permutation_nodes[index])}

    def _call(self, node: Any) -> None:
        target = node.target
        if node not in self._needed:
            return  # nothing reads the result, or only a dropped check does
        if target is _INNER:
            wrapper, part = node.args
            of, tensor = self._wrapped[wrapper.name]
            self._values[node.name] = self._weight(f"{of}.{part}", getattr(tensor, part))
            return
        if isinstance(target, torch._ops.OpOverload):
            name = own_name(str(target))
        elif getattr(target, "__module__", "") == "_operator":
            name = f"_operator.{target.__name__}"
        elif target in _SYMBOLIC:
            name = _SYMBOLIC[target]
        elif target is torch.ops.higher_order.wrap_with_autocast:
            raise RegistrationRefused("forward", "it computes under torch.autocast", hint=OTHERS)
        else:
            raise RegistrationRefused(
                f"operator {target}",
                "a graph can contain only torch's plain operators",
                hint=OTHERS,
            )
        try:
            split_target(_INSTEAD.get(name, name))
        except RegistrationRefused as refusal:
            raise RegistrationRefused(refusal.part, refusal.reason, hint=advice(name)) from None
        args = [self._argument(argument, name) for argument in node.args]
        kwargs = {key: self._argument(value, name) for key, value in node.kwargs.items()}
        kwargs.pop("pin_memory", None)  # only a hint about host memory
        if (of_gradients := _OF_GRADIENTS.get(name)) is not None:
            args = args[: of_gradients[0]]
            kwargs = {key: value for key, value in kwargs.items() if key not in of_gradients[1]}
        if _takes_default_dtype(node):
            kwargs["dtype"] = {"dtype": dtype_name(node.meta["val"].dtype, f"operator {name}")}
        self._values[node.name] = {"v": ("n", len(self._nodes))}
        self._nodes.append((name, args, kwargs))

    def _argument(self, argument: Any, part: str) -> Any:
        match argument:
            case None | bool() | int() | str():
                return argument
            case float():
                is_finite = argument - argument == 0.0
                return argument if is_finite else {"float": str(argument)}
            case torch.fx.Node():
                return self._value(argument.name)
            case list() | tuple():
                return [self._argument(item, part) for item in argument]
            case torch.dtype():
                return {"dtype": dtype_name(argument, f"operator {part}")}
            case torch.layout() | torch.memory_format():
                tag = "layout" if isinstance(argument, torch.layout) else "memory_format"
                return {tag: str(argument).removeprefix("torch.")}
            case torch.device():
                return {"device": "target"}
            case _:
                raise RegistrationRefused(
                    f"operator {part}",
                    f"an argument is a {type(argument).__name__}, which cannot be stored",
                )

    def _outputs(self, node: Any) -> tuple[list[Any], list[ValueSpec]]:
        results: list[Any] = []
        outputs: list[ValueSpec] = []
        for name, result in zip(self._output_names, node.args[0], strict=True):
            if not isinstance(result, torch.fx.Node) or not isinstance(
                result.meta["val"], torch.Tensor
            ):
                raise RegistrationRefused(f"output {name!r}", "it is not a tensor")
            results.append(self._value(result.name))
            outputs.append(self._value_spec(f"output {name!r}", name, result.meta["val"]))
        return results, outputs

    def _value_spec(self, part: str, name: str, value: torch.Tensor) -> ValueSpec:
        shape: list[Extent] = []
        extents: list[Any] = list(value.shape)  # may contain symbols, unlike its declared type
        for extent in extents:
            if isinstance(extent, int):
                shape.append(extent)
            elif self._dims:
                expression = extent.node.expr.xreplace(self._replaced)
                shape.append(extent_of(expression, self._symbols))
            else:
                raise RegistrationRefused(part, f"its shape depends on data ({extent})", hint=DATA)
        return ValueSpec(name=name, dtype=dtype_name(value.dtype, part), shape=tuple(shape))

    def _numbered(
        self, inputs: list[ValueSpec], results: list[Any], outputs: list[ValueSpec]
    ) -> EncodedProgram:
        order = _weights_by_first_use(self._nodes, results)
        first_node = len(inputs) + len(order)
        weight_number = {weight: len(inputs) + index for index, weight in enumerate(order)}

        def number(argument: Any) -> Any:
            if isinstance(argument, dict) and "v" in argument:
                kind, index = argument["v"]
                base = {"i": index, "w": weight_number.get(index), "n": first_node + index}
                return {"v": base[kind]}
            if isinstance(argument, list):
                return [number(item) for item in argument]
            return argument

        graph = Graph(
            version=VERSION,
            inputs=tuple(inputs),
            weights=tuple(self._weight_names[weight] for weight in order),
            nodes=tuple(
                Node(target, tuple(number(args)), {k: number(v) for k, v in kwargs.items()})
                for target, args, kwargs in self._nodes
            ),
            results=tuple(number(result)["v"] for result in results),
            outputs=tuple(outputs),
            dims=self._dims,
        )
        graph = _private_inputs(_private_windows(graph))
        check_graph(graph)
        conditions = [condition.xreplace(self._replaced) for condition in self._conditions]
        return EncodedProgram(
            graph,
            [self._weights[weight] for weight in order],
            suspects=suspects(conditions, self._symbols, self._dims),
        )


def inline_regions(module: torch.fx.GraphModule) -> None:
    """Inline the bodies of blocks without effect on inference, such as disabled autocast."""
    higher: Any = torch.ops.higher_order
    for node in list(module.graph.nodes):
        match node.args if node.op == "call_function" else ():
            case [_, _, False, _, body, *operands] if node.target is higher.wrap_with_autocast:
                pass
            case [_, body, *operands] if node.target is higher.wrap_with_set_grad_enabled:
                pass
            case _:
                continue
        inner: Any = getattr(module, body.target)
        inline_regions(inner)
        placeholders = (one for one in inner.graph.nodes if one.op == "placeholder")
        with module.graph.inserting_before(node):
            values = dict(zip(placeholders, operands, strict=True))
            results: Any = module.graph.graph_copy(inner.graph, values)
        for user in list(node.users):  # each is a getitem of one result
            user.replace_all_uses_with(results[user.args[1]])
            module.graph.erase_node(user)
        module.graph.erase_node(node)


def _identity(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return a key that all names of a tied weight share; export keeps any one of the names."""
    if tensor.layout is not torch.strided:
        return (id(tensor),)
    return (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)


def _needed(exported: torch.export.ExportedProgram) -> set[Any]:
    """Return the calls that write in place or that the outputs need, without dropped checks."""
    needed: set[Any] = set()
    for node in reversed(exported.graph.nodes):
        target = node.target
        is_operator = isinstance(target, torch._ops.OpOverload)
        is_kept = node.op == "output" or any(user in needed for user in node.users)
        if is_operator and target._schema.name.removeprefix("aten::") in DROPPED_AT_EXPORT:
            is_kept = False
        if is_kept or (is_operator and _writes(target)):
            needed.add(node)
    return needed


def _takes_default_dtype(node: Any) -> bool:
    """Return True if the node's dtype is this process's default, and a worker's default differs."""
    if torch.get_default_dtype() is torch.float32 or not isinstance(
        node.target, torch._ops.OpOverload
    ):
        return False
    takes_dtype = any(entry.name == "dtype" for entry in node.target._schema.arguments)
    has_tensors = any(
        isinstance(argument.meta.get("val"), torch.Tensor) for argument in node.all_input_nodes
    )
    return takes_dtype and not has_tensors and node.kwargs.get("dtype") is None


def _writes(target: Any) -> bool:
    return any(a.alias_info is not None and a.alias_info.is_write for a in target._schema.arguments)


def _weights_by_first_use(
    nodes: Sequence[tuple[str, list[Any], dict[str, Any]]], results: Sequence[Any]
) -> list[int]:
    """Return the used weights' indices by first use; weights that are only returned come last."""
    order: dict[int, None] = {}

    def visit(argument: Any) -> None:
        if isinstance(argument, dict) and "v" in argument:
            if argument["v"][0] == "w":
                order.setdefault(argument["v"][1])
        elif isinstance(argument, list):
            for item in argument:
                visit(item)

    for _, args, kwargs in nodes:
        visit([*args, *kwargs.values()])
    visit(list(results))
    return list(order)


def _private_windows(graph: Graph) -> Graph:
    """Name the operators that stand for an export's.
    Raises RegistrationRefused: a write reaches the memory of a window, and a copy would miss it."""
    if not any(node.target in _INSTEAD for node in graph.nodes):
        return graph
    root, written = aliases(graph)
    for value, node in enumerate(graph.nodes, graph.first_node_value):
        position = value - graph.first_node_value
        if node.target == "aten.unfold.default" and written.get(root[value], -1) > position:
            reason = "its windows, or the tensor that they show, are changed in place"
            raise RegistrationRefused("unfold", reason, hint=WINDOWS)
    nodes = (Node(_INSTEAD.get(n.target, n.target), n.args, n.kwargs) for n in graph.nodes)
    return msgspec.structs.replace(graph, nodes=tuple(nodes))


def _private_inputs(graph: Graph) -> Graph:
    """Return the graph with clones of the inputs that it changes in place.

    Inputs are in the request's own memory. A request whose worker dies runs again, so its inputs
    must not change.
    """
    touched = {v for _, values in mutations(graph) for v in values if v < len(graph.inputs)}
    if not touched:
        return graph
    clones = sorted(touched)
    first = graph.first_node_value
    moved = {value: first + index for index, value in enumerate(clones)}

    def number(argument: Any) -> Any:
        if isinstance(argument, dict) and "v" in argument:
            value = argument["v"]
            return {"v": value + len(clones) if value >= first else moved.get(value, value)}
        if isinstance(argument, list | tuple):
            return [number(item) for item in argument]
        return argument

    return msgspec.structs.replace(
        graph,
        nodes=(
            *(Node("aten.clone.default", ({"v": value},), {}) for value in clones),
            *(
                Node(n.target, tuple(number(n.args)), {k: number(v) for k, v in n.kwargs.items()})
                for n in graph.nodes
            ),
        ),
        results=tuple(number({"v": value})["v"] for value in graph.results),
    )
