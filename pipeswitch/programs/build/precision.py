"""From a verified graph to a faster one that computes the same within rounding.

``fast`` packs the weights of linear layers and convolutions, folds a BatchNorm into the convolution
before it, and fuses activations and residual additions into both. Each call is packed only if that is
faster on this machine: both forms are timed on what the example computes. Nothing of this is taken
from a client: a bundle stays plain, and what is packed is derived from it here.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import torch

from ...errors import RegistrationRefused
from ..bundle import Bundle, Graph, Node, node_references, read_bundle, references, write_bundle
from ..dims import Values, corners
from ..executor import GraphProgram, PackedKernels
from ..graph import CompiledGraph, last_readers
from ..layout import BUNDLE_FILE, Manifest
from ..packing import (
    CONVOLUTION,
    CONVOLUTION_ADD,
    DERIVED_FILE,
    LINEAR,
    LINEAR_ADD,
    PackedLayout,
    Precision,
    fingerprint,
)
from ..partition import Weight, default_plan, layers_of_graph, place
from ..values import tensor_bytes
from ..views import tensor_over
from .checking import workers_default_dtype
from .verify import acceptable_inputs, load_image

ROUNDS: Final = 7  # of a timing; the least counts
GAIN: Final = 0.97  # of the plain time that a packed call may take at most
MIN_MS: Final = 0.2  # a round repeats a call until it takes this long
MAX_ERROR: Final = {"fast": 1e-3}  # relative to the largest output, where no option says another
MAX_SHAPES: Final = 6  # at which the two forms are compared


Run = Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]


def derive(
    manifest: Manifest, folder: Path, name: str, max_error: float, bucket_bytes: int,
    kernels: PackedKernels,
) -> Manifest:  # fmt: skip
    """Return the manifest of the program in that precision, whose file is written into ``folder``.

    Where nothing becomes faster it is the plain program's, with a note.

    Raises:
        RegistrationRefused: the derived form differs from the plain one by more than
            ``max_error`` (0: the default) of the largest output, or is not a number.
    """
    bundle = read_bundle(folder / BUNDLE_FILE)
    image = load_image(folder / BUNDLE_FILE, manifest)
    storage = image.untyped_storage()
    weights = [tensor_over(storage, spec, 0) for spec in manifest.tensors]
    plain = _runner(GraphProgram(manifest, bundle.graph, "cpu"), storage)
    shapes = _shapes(manifest)
    inputs = [acceptable_inputs(manifest.inputs, values, plain) for values in shapes]
    derived = Rewriter(bundle.graph, weights, inputs[0], kernels).run()
    if not derived.packed_count:
        return with_note(manifest, f"precision {name}: no call becomes faster; it stays exact")
    path = folder / DERIVED_FILE
    ours, image = _written(manifest, bundle, derived, path, bucket_bytes)
    fast = _runner(GraphProgram(ours, derived.graph, "cpu", kernels), image.untyped_storage())
    found = _compared(plain, fast, inputs, name, max_error or MAX_ERROR[name])
    plain_ms, ms = least_ms([lambda: plain(inputs[0]), lambda: fast(inputs[0])])
    if ms >= plain_ms:
        path.unlink()
        why = f"it takes {ms:.2f} ms in place of {plain_ms:.2f}"
        return with_note(manifest, f"precision {name}: {why}; it stays exact")
    precision = Precision(
        name="fast", fingerprint=fingerprint(), plain_ms=plain_ms, ms=ms,
        plain_bytes=manifest.total_bytes, max_error=found[0], mean_error=found[1],
        agreement=found[2], packed_count=derived.packed_count, plain_count=derived.plain_count,
    )  # fmt: skip
    digest = hashlib.sha256(
        f"{manifest.digest} {name} {precision.fingerprint} {ours.weights_sha256}".encode()
    )
    return msgspec.structs.replace(ours, precision=precision, digest=digest.hexdigest())


def _runner(program: GraphProgram, storage: torch.UntypedStorage) -> Run:
    bound = program.bind(lambda spec: tensor_over(storage, spec, 0))

    def run(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        with workers_default_dtype():
            return bound.run([value.clone() for value in inputs], lambda index: None)

    return run


def _shapes(manifest: Manifest) -> list[Values]:
    """Return the example's dimensions, then others at the ends of the ranges."""
    example: Values = manifest.extra["example_dims"]
    others = [values for values in corners(manifest.dims) if values != example]
    return [example, *others[: MAX_SHAPES - 1]]


def with_note(manifest: Manifest, note: str) -> Manifest:
    notes = [*manifest.extra.get("notes", ()), note]
    return msgspec.structs.replace(manifest, extra={**manifest.extra, "notes": notes})


def _written(
    manifest: Manifest, bundle: Bundle, derived: Derived, path: Path, bucket_bytes: int
) -> tuple[Manifest, torch.Tensor]:
    """Write the derived bundle; its manifest, and the image of its region."""
    graph = derived.graph
    tensors = [
        (name, str(data.dtype).removeprefix("torch."), tuple(data.shape))
        for name, data in zip(graph.weights, derived.weights, strict=True)
    ]
    data = (tensor_bytes(weight.contiguous()) for weight in derived.weights)
    write_bundle(path, graph, tensors, data, bundle.generation)
    read = read_bundle(path, is_derived=True)
    weights = [Weight(t.name, t.dtype, t.shape, t.size_bytes) for t in read.tensors]
    layers = layers_of_graph(read.graph)
    plan = default_plan(layers, weights, bucket_bytes)
    offsets = [tensor.file_offset_bytes for tensor in read.tensors]
    specs, layer_specs, groups, total_bytes = place(layers, weights, plan, offsets)
    ours = msgspec.structs.replace(
        manifest, tensors=specs, layers=layer_specs, groups=groups, total_bytes=total_bytes,
        extra={**manifest.extra, "last_readers": last_readers(read.graph)},
    )  # fmt: skip
    image = load_image(path, ours)
    sha256 = hashlib.sha256(tensor_bytes(image)).hexdigest()
    return msgspec.structs.replace(ours, weights_sha256=sha256), image


def _compared(
    plain: Run, fast: Run, inputs: Sequence[Sequence[torch.Tensor]], name: str, limit: float
) -> tuple[float, float, float]:
    """Return the largest and the mean error, relative to the largest output, and the share of rows
    whose largest element is the same."""
    errors, means, agreed = [0.0], [0.0], [1.0]
    for given in inputs:
        for number, (theirs, ours) in enumerate(zip(plain(given), fast(given), strict=True)):
            if not theirs.is_floating_point():
                agreed.append(float((theirs == ours).float().mean()) if theirs.numel() else 1.0)
                continue
            if bool((ours.isfinite() != theirs.isfinite()).any()):
                raise RegistrationRefused(
                    f"precision {name!r}", f"output {number} is no longer finite",
                    hint="register it with precision exact",
                )  # fmt: skip
            is_real = theirs.isfinite()
            difference = (ours - theirs).abs()[is_real].double()
            scale = float(theirs[is_real].abs().max()) if bool(is_real.any()) else 0.0
            if difference.numel():
                errors.append(float(difference.max()) / (scale or 1.0))
                means.append(float(difference.mean()) / (scale or 1.0))
            if theirs.dim() and theirs.shape[-1] > 1 and theirs.numel():
                agreed.append(float((ours.argmax(-1) == theirs.argmax(-1)).double().mean()))
    if max(errors) > limit:
        raise RegistrationRefused(
            f"precision {name!r}",
            f"its answers differ by {max(errors):.1e} of the largest output, the limit is {limit:g}",
            hint="register it with precision exact, or with a larger max_error",
        )
    return max(errors), max(means), min(agreed)


@dataclass
class Derived:
    """A derived graph with its weights, in order of first use."""

    graph: Graph
    weights: list[torch.Tensor]  # uint8 where packed
    packed_count: int = 0
    plain_count: int = 0  # calls that could be packed, and are faster plain
    saved_ms: float = 0.0


# What a fused call does after its product. Arguments: (attribute, scalars, algorithm).
_ACTIVATIONS: Final[Mapping[str, tuple[str, list[float], str]]] = {
    "aten.relu.default": ("relu", [], ""),
    "aten.relu_.default": ("relu", [], ""),
    "aten.sigmoid.default": ("sigmoid", [], ""),
    "aten.tanh.default": ("tanh", [], ""),
    "aten.hardswish.default": ("hardswish", [], ""),
    "aten.hardswish_.default": ("hardswish", [], ""),
    "aten.hardsigmoid.default": ("hardsigmoid", [], ""),
    "aten.silu.default": ("swish", [], ""),
    "aten.silu_.default": ("swish", [], ""),
}
_ADDITIONS: Final = ("aten.add.Tensor", "aten.add_.Tensor")


def _activation(node: Node) -> tuple[str, list[float], str] | None:
    match node.target:
        case "aten.gelu.default":
            how = node.kwargs.get("approximate", node.args[1] if len(node.args) > 1 else "none")
            return ("gelu", [], str(how))
        case "aten.hardtanh.default" | "aten.hardtanh_.default" | "aten.clamp.default":
            bounds = [*node.args[1:], *node.kwargs.values()]
            if node.target.startswith("aten.hardtanh") and not bounds:
                bounds = [-1.0, 1.0]
            is_plain = len(bounds) == 2 and all(type(one) in (int, float) for one in bounds)
            return ("hardtanh", [float(one) for one in bounds], "") if is_plain else None
        case "aten.leaky_relu.default" | "aten.leaky_relu_.default":
            slope = node.args[1] if len(node.args) > 1 else 0.01
            return ("leaky_relu", [float(slope)], "")
        case target:
            return _ACTIVATIONS.get(target) if len(node.args) == 1 else None


@dataclass
class _Chain:
    """A product and the calls that may be fused into it; positions of nodes."""

    product: int
    norm: int | None = None
    addition: int | None = None
    other: Any = None  # the addition's other operand
    activation: int | None = None

    @property
    def last(self) -> int:
        return next(
            position
            for position in (self.activation, self.addition, self.norm, self.product)
            if position is not None
        )


class Rewriter:
    """One graph on its way to a derived one."""

    def __init__(
        self, graph: Graph, weights: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor],
        kernels: PackedKernels,
    ) -> None:  # fmt: skip
        """``inputs``: an example, at the shape for which calls are timed."""
        self._graph, self._weights, self._kernels = graph, weights, kernels
        self._inputs = inputs
        self._readers: dict[int, list[int]] = {}
        for position, node in enumerate(graph.nodes):
            for value in dict.fromkeys(node_references(node)):
                self._readers.setdefault(value, []).append(position)
        self._results = set(graph.results)
        self._fused: dict[int, _Chain] = {}  # by the position of its last node
        self._gone: set[int] = set()
        self._new: dict[str, tuple[torch.Tensor, PackedLayout | None]] = {}
        self._calls: dict[int, Node] = {}  # by position; weights are named: {"w": name}
        self._verdicts: dict[Any, float] = {}
        self._found = Derived(graph, [])

    # ---- what may be fused -------------------------------------------------------------------

    def _own(self, position: int) -> int:
        return self._graph.first_node_value + position

    def _next(self, position: int) -> int | None:
        """The one node that reads this one's value, if nothing else does."""
        value = self._own(position)
        readers = self._readers.get(value, [])
        if len(readers) != 1 or value in self._results:
            return None
        if readers[0] in self._gone or readers[0] in self._calls:
            return None  # it is part of another chain
        return readers[0]

    def _weight(self, argument: Any) -> torch.Tensor | None:
        if not isinstance(argument, dict) or "v" not in argument:
            return None
        index = argument["v"] - len(self._graph.inputs)
        return self._weights[index] if 0 <= index < len(self._weights) else None

    def _skip_dropout(self, position: int | None) -> int | None:
        while position is not None and self._graph.nodes[position].target == "aten.dropout.default":
            position = self._next(position)
        return position

    def _chain(self, position: int) -> _Chain:
        chain, nodes = _Chain(position), self._graph.nodes
        is_convolution = nodes[position].target == "aten.conv2d.default"
        at = self._next(position)
        if is_convolution and at is not None and self._is_foldable(nodes[at]):
            chain.norm, at = at, self._next(at)
        if at is not None and self._is_addition(chain, at):
            chain.addition = at
            at = self._next(at)
        if at is not None and nodes[at].args[:1] == ({"v": self._own(chain.last)},):
            can_fuse = is_convolution or chain.addition is None
            if can_fuse and _activation(nodes[at]) is not None:
                chain.activation = at
        return chain

    def _is_foldable(self, node: Node) -> bool:
        if node.target != "aten.batch_norm.default" or node.args[5] is not False:
            return False
        return all(one is None or self._weight(one) is not None for one in node.args[1:5])

    def _is_addition(self, chain: _Chain, at: int) -> bool:
        """Whether a sum of equal shapes, with nothing written in between, can be fused."""
        node = self._graph.nodes[at]
        if node.target not in _ADDITIONS or len(node.args) != 2 or node.kwargs:
            return False
        own = {"v": self._own(chain.last)}
        others = [one for one in node.args if one != own]
        if len(others) != 1 or not isinstance(others[0], dict) or "v" not in others[0]:
            return False
        if self._weight(others[0]) is not None:
            return False
        if self._shapes.get(others[0]["v"]) != self._shapes[self._own(chain.last)]:
            return False
        between = self._graph.nodes[chain.product + 1 : at]
        if any(node.target.split(".")[1].endswith("_") for node in between):
            return False
        chain.other = others[0]
        return True

    # ---- what comes of it ---------------------------------------------------------------------

    def run(self) -> Derived:
        """Return the derived graph."""
        self._trace()
        for position, node in enumerate(self._graph.nodes):
            if position in self._gone:
                continue
            if node.target == "aten.conv2d.default":
                self._try(position, self._convolution)
            elif node.target in ("aten.linear.default", "aten.addmm.default"):
                self._try(position, self._linear)
        return self._assembled()

    def _trace(self) -> None:
        """Run the example call by call: shapes of all values, and inputs of what may be packed."""
        graph = self._graph
        compiled = CompiledGraph(graph, [(i, i + 1) for i in range(len(graph.nodes))], "cpu")
        environment = compiled.start(self._inputs)
        self._shapes: dict[int, tuple[int, ...]] = {}
        self._traced: dict[int, torch.Tensor] = {}
        with torch.inference_mode():
            for position, call in enumerate(compiled.calls):
                node = graph.nodes[position]
                if node.target in (
                    "aten.conv2d.default", "aten.linear.default", "aten.addmm.default",
                ):  # fmt: skip
                    given = node.args[1 if "addmm" in node.target else 0]
                    value = environment.get(given["v"]) if isinstance(given, dict) else None
                    if isinstance(value, torch.Tensor):
                        self._traced[position] = value
                taken = [self._weights[index] for index in compiled.group_weights[position]]
                call(environment, taken)
                result = environment.get(self._own(position))
                if isinstance(result, torch.Tensor):
                    self._shapes[self._own(position)] = tuple(result.shape)
        for value, given in enumerate(self._inputs):
            self._shapes[value] = tuple(given.shape)

    def _try(self, position: int, make: Callable[[_Chain, torch.Tensor], Any]) -> None:
        x = self._traced.get(position)
        if x is None or x.dtype != torch.float32 or not x.numel():
            return
        chain = self._chain(position)
        made = make(chain, x)
        if made is None:
            return
        node, names, plain_ms, packed_ms = made
        if packed_ms > GAIN * plain_ms:
            self._found.plain_count += 1
            for name in names:
                del self._new[name]
            return
        self._found.packed_count += 1
        self._found.saved_ms += plain_ms - packed_ms
        self._calls[chain.last] = node
        self._gone |= {
            one
            for one in (chain.product, chain.norm, chain.addition, chain.activation)
            if one is not None and one != chain.last
        }

    def _keep(self, name: str, data: torch.Tensor, layout: PackedLayout | None) -> dict[str, str]:
        self._new[name] = (data, layout)
        return {"w": name}

    def _convolution(self, chain: _Chain, x: torch.Tensor) -> Any:
        node = self._graph.nodes[chain.product]
        given = [*node.args, *[None] * (7 - len(node.args))]
        weight, bias = self._weight(given[1]), self._weight(given[2])
        if weight is None or weight.dtype != torch.float32 or x.dim() != 4 or node.kwargs:
            return None
        if given[2] is not None and bias is None:
            return None
        pair = [[1, 1], [0, 0], [1, 1]]
        stride, padding, dilation = (
            list(one) * (2 // len(one)) if one else default
            for one, default in zip(given[3:6], pair, strict=True)
        )
        groups = given[6] or 1
        plain_weight, plain_bias = weight, bias
        if chain.norm is not None:
            weight, bias = self._folded(self._graph.nodes[chain.norm], weight, bias)
        layout, data = self._kernels.pack_convolution(
            weight, padding, stride, dilation, groups, list(x.shape)
        )
        how = None
        if chain.activation is not None:
            how = _activation(self._graph.nodes[chain.activation])
        how = how or ("none", [], "")
        name = self._name_of(given[1])
        w = self._keep(f"{name}:packed", data, layout)
        b: Any = None
        if bias is not None:
            b = self._keep(f"{name}:bias", bias.contiguous(), None)
        rest = [padding, stride, dilation, groups, how[0], how[1], how[2]]
        wrapped = self._kernels.wrap(data, layout)
        operators = self._kernels.operators()
        other = None
        if chain.addition is not None:
            other = torch.rand(self._shapes[self._own(chain.product)])
            call = Node(CONVOLUTION_ADD, (node.args[0], chain.other, w, b, *rest))
        else:
            call = Node(CONVOLUTION, (node.args[0], w, b, *rest))

        def packed() -> None:
            if other is not None:
                operators[CONVOLUTION_ADD](x, other, wrapped, bias, *rest)
            else:
                operators[CONVOLUTION](x, wrapped, bias, *rest)

        plain = self._plain(
            chain, plain_weight, plain_bias, x, other, (stride, padding, dilation, groups)
        )
        key = (
            "c", tuple(x.shape), x.is_contiguous(), tuple(weight.shape), str(rest), other is None,
            chain.norm is None,
        )  # fmt: skip
        plain_ms, packed_ms = self._timed(key, plain, packed)
        names = [w["w"], *([b["w"]] if b else [])]
        return call, names, plain_ms, packed_ms

    def _plain(
        self, chain: _Chain, weight: torch.Tensor, bias: torch.Tensor | None, x: torch.Tensor,
        other: torch.Tensor | None, how: Any,
    ) -> Callable[[], None]:  # fmt: skip
        nodes = self._graph.nodes
        norm = None
        if chain.norm is not None:
            given = nodes[chain.norm].args
            norm = [self._weight(one) for one in given[1:5]], given[7]
        activation = None
        if chain.activation is not None:
            activation = nodes[chain.activation]

        def run() -> None:
            if isinstance(how, tuple):
                stride, padding, dilation, groups = how
                y = torch.ops.aten.conv2d.default(
                    x, weight, bias, stride, padding, dilation, groups
                )
            else:
                y = torch.ops.aten.linear.default(x, weight, bias)
            if norm is not None:
                (gamma, beta, mean, var), eps = norm
                y = torch.ops.aten.batch_norm.default(
                    y, gamma, beta, mean, var, False, 0.1, eps, False
                )
            if other is not None:
                y = y.add_(other)
            if activation is not None:
                name, overload = activation.target.split(".")[1:]
                getattr(getattr(torch.ops.aten, name), overload)(
                    y, *activation.args[1:], **activation.kwargs
                )

        return run

    def _folded(
        self, node: Node, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        gamma, beta, mean, var = (self._weight(one) for one in node.args[1:5])
        assert mean is not None and var is not None
        scale = (var.double() + node.args[7]).rsqrt()
        if gamma is not None:
            scale = scale * gamma.double()
        shift = (bias.double() if bias is not None else 0.0) - mean.double()
        shift = shift * scale + (beta.double() if beta is not None else 0.0)
        folded = weight.double() * scale.reshape(-1, 1, 1, 1)
        return folded.to(weight.dtype), shift.to(weight.dtype)

    def _linear(self, chain: _Chain, x: torch.Tensor) -> Any:
        node = self._graph.nodes[chain.product]
        if node.kwargs:
            return None
        if node.target == "aten.addmm.default":
            given, weight = node.args[1], self._weight(node.args[2])
            bias_at, weight_at = node.args[0], node.args[2]
            if weight is not None:
                weight = weight.t()
        else:
            given, weight_at = node.args[0], node.args[1]
            weight = self._weight(weight_at)
            bias_at = node.args[2] if len(node.args) > 2 else None
        bias = self._weight(bias_at)
        if weight is None or weight.dtype != torch.float32 or weight.dim() != 2:
            return None
        if bias_at is not None and (bias is None or bias.dim() != 1 or len(bias) != len(weight)):
            return None
        rows = x.numel() // x.shape[-1]
        layout, data = self._kernels.pack_linear(weight, rows)
        how = None
        if chain.activation is not None:
            how = _activation(self._graph.nodes[chain.activation])
        attribute, scalars, algorithm = how or ("none", [], "")
        w = self._keep(f"{self._name_of(weight_at)}:packed", data, layout)
        wrapped = self._kernels.wrap(data, layout)
        operators = self._kernels.operators()
        other = None
        if chain.addition is not None:
            other = torch.rand(self._shapes[self._own(chain.product)])
            call = Node(LINEAR_ADD, (given, chain.other, w, bias_at))
        else:
            call = Node(LINEAR, (given, w, bias_at, attribute, scalars, algorithm))

        def packed() -> None:
            if other is not None:
                operators[LINEAR_ADD](x, other, wrapped, bias)
            else:
                operators[LINEAR](x, wrapped, bias, attribute, scalars, algorithm)

        plain = self._plain(chain, weight, bias, x, other, "linear")
        key = (
            "l", tuple(x.shape), tuple(weight.shape), attribute, other is None, bias is None,
            node.target,
        )  # fmt: skip
        plain_ms, packed_ms = self._timed(key, plain, packed)
        return call, [w["w"]], plain_ms, packed_ms

    def _name_of(self, argument: Any) -> str:
        return self._graph.weights[argument["v"] - len(self._graph.inputs)]

    def _timed(
        self, key: Any, plain: Callable[[], None], packed: Callable[[], None]
    ) -> tuple[float, float]:
        if key not in self._verdicts:
            with torch.inference_mode():
                self._verdicts[key] = least_ms([plain, packed])
        return self._verdicts[key]

    # ---- numbering ------------------------------------------------------------------------------

    def _assembled(self) -> Derived:
        graph = self._graph
        order: list[str] = []  # weights by first use
        own = {name: index for index, name in enumerate(graph.weights)}

        def names_of(argument: Any) -> list[str]:
            if isinstance(argument, dict):
                if "w" in argument:
                    return [argument["w"]]
                index = argument.get("v", -1) - len(graph.inputs)
                return [graph.weights[index]] if 0 <= index < len(graph.weights) else []
            if isinstance(argument, list | tuple):
                return [name for item in argument for name in names_of(item)]
            return []

        kept = [
            (position, self._calls.get(position, node))
            for position, node in enumerate(graph.nodes)
            if position not in self._gone
        ]
        for _, node in kept:
            order += names_of([*node.args, *node.kwargs.values()])
        for value in graph.results:
            order += names_of({"v": value})
        order = list(dict.fromkeys(order))
        numbers = {name: len(graph.inputs) + index for index, name in enumerate(order)}
        first = len(graph.inputs) + len(order)
        renumbered = {value: value for value in range(len(graph.inputs))}
        renumbered |= {
            len(graph.inputs) + own[name]: number for name, number in numbers.items() if name in own
        }
        renumbered |= {self._own(at): first + index for index, (at, _) in enumerate(kept)}

        def moved(argument: Any) -> Any:
            if isinstance(argument, dict):
                if "w" in argument:
                    return {"v": numbers[argument["w"]]}
                return {"v": renumbered[argument["v"]]} if "v" in argument else argument
            if isinstance(argument, list | tuple) and (references(argument)):
                return [moved(item) for item in argument]
            return argument

        nodes = tuple(
            Node(
                node.target,
                tuple(moved(one) for one in node.args),
                {key: moved(one) for key, one in node.kwargs.items()},
            )
            for _, node in kept
        )
        found = self._found
        found.graph = Graph(
            version=graph.version, inputs=graph.inputs, weights=tuple(order), nodes=nodes,
            results=tuple(renumbered[value] for value in graph.results), outputs=graph.outputs,
            dims=graph.dims, takes=graph.takes, returns=graph.returns,
            packed={name: one[1] for name in order if (one := self._new.get(name)) and one[1]},
        )  # fmt: skip
        for name in order:
            found.weights.append(
                self._new[name][0] if name in self._new else self._weights[own[name]]
            )
        return found


def least_ms(calls: Sequence[Callable[[], None]]) -> tuple[float, ...]:
    """Return the least processor time of each call, in turns."""
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
