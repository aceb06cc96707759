"""Execution of a program, group by group, in workers and in the build's verification.

A program is bound to a region once, and workers cache the bound program. So a switch costs nothing
here: the argument tuples of the groups already refer to the region.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Protocol

import torch
from torch import nn

from ...base.errors import InvalidInput, LocalProtocolError, RegistrationRefused
from ..graphs.bundle import Graph
from ..graphs.contracts import BrokenContract
from ..graphs.graph import CompiledGraph, Environment, GroupCall, behind_contract, resolve
from ..interface import packing
from ..interface.dims import NoExtent, Values, shape_at, values_of, values_text
from ..interface.layout import Manifest, TensorSpec
from ..interface.pytree import argument_names, arguments
from .factories import keywords_of, split_arguments, without_cache
from .torch_settings import TorchSettings, run_branches_eagerly
from .unregistered_tensors import leave_behind, slots
from .values import flatten_outputs

TensorFor = Callable[[TensorSpec], torch.Tensor]
BeforeGroup = Callable[[int], None]
Shapes = tuple[tuple[int, ...], ...]

FLOATS: Final = ("float32", "bfloat16")  # dtypes of packed weights of products in floats
MAX_TRIED: Final = 1 << 14  # tried combinations of dimensions to remember per program: 5 MiB


class BoundProgram(Protocol):
    """A program that is bound to the weights in one region."""

    manifest: Manifest

    def run(self, inputs: Sequence[torch.Tensor], before_group: BeforeGroup) -> list[torch.Tensor]:
        """Run once; call ``before_group(i)`` right before group ``i``, once for each in order.

        ``before_group`` blocks until the group is on the device, and may raise ``TaskPreempted``,
        which is not caught. Copy the outputs: an output may be an input or a weight itself.
        """


class Program(Protocol):
    """The structure of a loaded program, without weights."""

    manifest: Manifest

    def bind(self, tensor_for: TensorFor) -> BoundProgram:
        """Bind to the tensors of one region, without reading them."""


class PackedKernels(Protocol):
    """Operators over packed weights for one kind of device.

    ``layout``: of the weights that they read.
    ``computes_here``: True if this processor runs these operators, so measurements are valid.
    ``fast_error``: default limit of the error in ``fast``, relative to the largest output.
    """

    layout: packing.Layout
    computes_here: bool
    fast_error: float

    def pack_linear(self, weight: torch.Tensor) -> tuple[packing.PackedLayout, torch.Tensor]:
        """Pack a weight ``[out, in]``; return its layout and bytes."""

    def pack_convolution(
        self,
        weight: torch.Tensor,
        padding: Sequence[int],
        stride: Sequence[int],
        dilation: Sequence[int],
        groups: int,
        input_shape: Sequence[int],
    ) -> tuple[packing.PackedLayout, torch.Tensor]:
        """Pack a weight ``[out, in / groups, height, width]``; return its layout and bytes.

        The layout is the fastest one for ``input_shape`` and gives correct results for all shapes.
        """

    def pack_int8(self, weight: torch.Tensor) -> tuple[packing.PackedLayout | None, torch.Tensor]:
        """Pack an int8 weight ``[out, in]``; without a layout, its bytes stay as they are."""

    def wrap(self, data: torch.Tensor, layout: packing.PackedLayout) -> torch.Tensor:
        """Return packed bytes as a weight, without copying; the bytes must outlive the weight."""

    def supports_bfloat16(self) -> bool:
        """Return True if products can be computed in bfloat16."""

    def operators(self) -> Mapping[str, Callable[..., torch.Tensor]]:
        """Return the operators by target (see ``packing``)."""


def _check_packed(
    graph: Graph, kernels: PackedKernels | None, sizes_bytes: Mapping[str, int]
) -> None:
    """Refuse packed weights whose layout differs from the layout that these kernels make.

    Kernels do not check a layout, and a compromised builder may have written it. So each layout is
    computed again, from a weight of zeros.
    """
    if kernels is None:
        raise RegistrationRefused("weights", "this device cannot read packed weights")
    first, packed = len(graph.inputs), set[str]()
    for node in graph.nodes:
        if node.target not in packing.TARGETS:
            continue
        is_int8 = node.target == packing.LINEAR_INT8
        at = 2 if node.target in (packing.LINEAR_ADD, packing.CONVOLUTION_ADD) else 1
        index = node.args[at]["v"] - first
        name = graph.weights[index] if 0 <= index < len(graph.weights) else ""
        layout = graph.packed.get(name)
        if is_int8 and layout is None:
            continue  # a plain tensor, and its kernel checks all extents
        if layout is None or (layout.dtype not in (("int8",) if is_int8 else FLOATS)):
            raise RegistrationRefused("weights", f"{node.target} needs a packed weight")
        zeros = torch.zeros(layout.shape, dtype=getattr(torch, layout.dtype))
        expected: packing.PackedLayout | None
        if is_int8:
            expected, data = kernels.pack_int8(zeros.t().contiguous())
        elif node.target in (packing.LINEAR, packing.LINEAR_ADD):
            expected, data = kernels.pack_linear(zeros)
        else:
            how = (*node.args[at + 2 : at + 6], layout.input_shape)
            try:
                expected, data = kernels.pack_convolution(zeros, *how)
            except (RuntimeError, TypeError) as error:  # torch refuses numbers that do not fit
                refusal = f"its layout cannot be made: {str(error)[:200]}"
                raise RegistrationRefused(f"weight {name!r}", refusal) from None
        if expected != layout or data.nbytes != sizes_bytes.get(name):
            raise RegistrationRefused(f"weight {name!r}", "its packed layout is not this machine's")
        packed.add(name)
    if packed != graph.packed.keys():
        raise RegistrationRefused("weights", "some packed weights are read by no packed call")


def fitting(call: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return a packed operator that refuses inputs whose dtype or extents do not fit the weight."""

    def checked(x: torch.Tensor, *rest: Any) -> torch.Tensor:
        weight = next(
            (w for w in rest if getattr(w, "layout", torch.strided) is not torch.strided), None
        )
        if weight is None:
            return call(x, *rest)  # the kernels of int8 and of torch's layouts check themselves
        is_int8 = weight.dtype is torch.int8  # packed as [in, out]
        if x.dtype is not weight.dtype and not is_int8:
            raise BrokenContract(f"input is {x.dtype}, the packed weight {weight.dtype}")
        is_linear = weight.dim() == 2
        groups = 1 if is_linear else next(one for one in rest if type(one) is int)
        is_known = x.dim() >= 1 if is_linear else x.dim() == 4
        channels = x.shape[-1 if is_linear else 1] if is_known else -1
        if channels != weight.shape[0 if is_int8 else 1] * groups:
            raise BrokenContract(
                f"input {list(x.shape)} does not match weight {list(weight.shape)}"
            )
        return call(x, *rest)

    return checked


# --- graph mode ----------------------------------------------------------------------------------


class GraphProgram:
    """A bundle's graph, compiled for one device: one callable per layer group."""

    def __init__(
        self,
        manifest: Manifest,
        graph: Graph,
        device: torch.device | str,
        kernels: PackedKernels | None = None,
    ) -> None:
        """Compile a graph; refuse a manifest that does not belong to it.

        ``kernels`` has the operators over packed weights, which a graph with such weights needs.
        """
        if graph.packed or kernels is not None:
            _check_packed(graph, kernels, {one.name: one.size_bytes for one in manifest.tensors})
        self._kernels = kernels
        self._packed = {} if kernels is None else kernels.operators()
        if graph.weights != tuple(spec.name for spec in manifest.tensors):
            raise RegistrationRefused("manifest", "its tensors are not the graph's weights")
        self.manifest = manifest
        self.graph = graph
        spans = [(group.first_node, group.end_node) for group in manifest.groups]
        self.compiled = CompiledGraph(graph, spans, device, self._look_up)
        self._spans, self._device = spans, device
        self._is_whole = bool(manifest.extra.get("is_whole"))
        self._tried: set[tuple[int, ...]] = set()  # dimensions of runs that succeeded
        self._asking: CompiledGraph | None = None  # the same graph, but calls check contracts
        arrived = 0
        for index, group in enumerate(manifest.groups):
            arrived += len(group.tensors)
            if any(weight >= arrived for weight in self.compiled.group_weights[index]):
                raise RegistrationRefused("manifest", f"group {index} uses weights of a later one")

    def bind(self, tensor_for: TensorFor) -> BoundGraph:
        weights = [tensor_for(spec) for spec in self.manifest.tensors]
        if self._kernels is not None:
            for index, name in enumerate(self.graph.weights):
                if (layout := self.graph.packed.get(name)) is not None:
                    weights[index] = self._kernels.wrap(weights[index], layout)
        return BoundGraph(self, weights)

    def _look_up(self, target: str) -> Callable[..., Any]:
        return self._packed.get(target) or resolve(target)

    def _look_up_asking(self, target: str) -> Callable[..., Any]:
        call = self._packed.get(target)
        return behind_contract(target) if call is None else fitting(call)

    def is_tried(self, shapes: Shapes) -> bool:
        """Return True if every call is known to keep its contract at these input shapes."""
        return self._is_whole or _key(self._values(shapes)) in self._tried

    def asking(self) -> Sequence[GroupCall]:
        """Return the groups' calls for untried shapes: each operator checks its contract first."""
        if self._asking is None:
            self._asking = CompiledGraph(
                self.graph, self._spans, self._device, self._look_up_asking
            )
        return self._asking.calls

    def returned(self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
        """Record that a run with these shapes succeeded; later such runs skip the contracts.

        Raises:
            InvalidInput: the outputs do not match the signature.
        """
        values = self._values(_shapes(inputs))
        for spec, output in zip(self.manifest.outputs, outputs, strict=True):
            try:
                declared = list(shape_at(spec.shape, values))
            except NoExtent as error:
                raise InvalidInput(f'output "{spec.name}": {error}') from None
            dtype = str(output.dtype).removeprefix("torch.")
            if (dtype, list(output.shape)) != (spec.dtype, declared):
                raise InvalidInput(
                    f'output "{spec.name}" is {dtype}{list(output.shape)} at '
                    f"{values_text(values)}, its signature says {spec.dtype}{declared}"
                )
        if len(self._tried) >= MAX_TRIED:
            self._tried.clear()
        self._tried.add(_key(values))

    def _values(self, shapes: Shapes) -> Values:
        """Return the dimensions' sizes; raise InvalidInput if ``shapes`` violate the signature."""
        values = values_of((spec.shape for spec in self.manifest.inputs), shapes)
        if values is None:
            raise InvalidInput(f"the inputs' shapes {list(shapes)} are not of the signature")
        return values


def _key(values: Values) -> tuple[int, ...]:
    """Return the sizes in the order in which the inputs' shapes name the dimensions."""
    return tuple(values.values())


def _shapes(inputs: Sequence[torch.Tensor]) -> Shapes:
    return tuple([tuple(value.shape) for value in inputs])


class BoundGraph:
    """A graph program over one region. CUDA graph capture calls the steps of ``run`` separately."""

    def __init__(self, program: GraphProgram, weights: Sequence[torch.Tensor]) -> None:
        self.manifest = program.manifest
        self.graph = program.graph
        self._program = program
        self._compiled = program.compiled
        self._weights = weights
        self._arguments = [
            tuple(weights[index] for index in indices) for indices in program.compiled.group_weights
        ]
        self._once: dict[int, tuple[torch.Tensor, ...]] = {}  # group -> arguments of its next call

    def replace_once(self, group: int, weight: int, tensor: torch.Tensor) -> None:
        """Let the group's next run read ``tensor`` instead of a weight."""
        used = self._compiled.group_weights[group]
        self._once[group] = tuple([tensor if i == weight else self._weights[i] for i in used])

    def start(self, inputs: Sequence[torch.Tensor]) -> Environment:
        """Return a new environment: the values that later groups still need."""
        if len(inputs) != len(self.manifest.inputs):
            raise LocalProtocolError(
                f"{len(inputs)} inputs given, the program takes {len(self.manifest.inputs)}"
            )
        return self._compiled.start(inputs)

    def is_tried(self, shapes: Shapes) -> bool:
        """Return True if ``run_group``, which checks no contract, may run at these shapes."""
        return self._program.is_tried(shapes)

    def run_group(self, index: int, environment: Environment) -> None:
        """Run one group with gradients disabled.

        Its weights must be on the device, and the run's shapes must be tried (``is_tried``).
        """
        self._compiled.calls[index](environment, self._arguments[index])

    def finish(self, environment: Environment) -> list[torch.Tensor]:
        return self._compiled.finish(environment, self._weights)

    def run(self, inputs: Sequence[torch.Tensor], before_group: BeforeGroup) -> list[torch.Tensor]:
        """Run the program like ``BoundProgram.run``."""
        with torch.inference_mode():
            environment = self.start(inputs)
            is_tried = self._program.is_tried(_shapes(inputs))
            try:
                calls = self._compiled.calls if is_tried else self._program.asking()
                for index, call in enumerate(calls):
                    before_group(index)
                    call(environment, self._once.pop(index, self._arguments[index]))
            except BrokenContract as error:
                raise InvalidInput(f"not at shapes {list(_shapes(inputs))}: {error}") from None
            outputs = self.finish(environment)
            if not is_tried:
                self._program.returned(inputs, outputs)
            return outputs


# --- module mode ---------------------------------------------------------------------------------


class _Awaited(dict[str, Any]):
    """A submodule's parameters or buffers; reading an item first waits for the item's group.

    Pre-hooks wait for groups in the order of the measured run. If the module takes another path, a
    weight may be read before its submodule runs, or by another submodule (a tied table, a
    functional call). Until a group is copied, its memory contains another model's bytes.
    """

    def __init__(
        self, tensors: Mapping[str, Any], groups: Mapping[str, int], open_group: BeforeGroup
    ) -> None:
        super().__init__(tensors)
        self._groups = groups
        self._open_group = open_group

    def __getitem__(self, key: str) -> Any:
        if key in self._groups:
            self._open_group(self._groups[key])
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        return self[key] if super().__contains__(key) else default

    def __iter__(self) -> Iterator[str]:
        return super().__iter__()  # overridden so that dict() and ** call ``__getitem__``

    def values(self) -> Any:
        return [self[key] for key in self]

    def items(self) -> Any:
        return [(key, self[key]) for key in self]


class ModuleProgram:
    """The operator's own module, constructed without data, with pre-hooks that wait for groups.

    ``manifest.extra["needs"]`` maps a submodule to the group that must be on the device before it
    runs. ``manifest.extra["aliases"]`` maps further names of a tensor to its name.
    """

    def __init__(
        self,
        manifest: Manifest,
        module: nn.Module,
        device: torch.device | str = "cpu",
        settings: TorchSettings | None = None,
    ) -> None:
        """Add hooks to ``module``, which this program owns from now on."""
        run_branches_eagerly()
        self.manifest = manifest
        self._inputs = [spec.name for spec in manifest.inputs]
        # A request runs again after its worker died, so a run must not change the request's inputs.
        self._writes_inputs = bool(manifest.extra.get("writes_inputs"))
        self._settings = settings or TorchSettings.now()
        self.device = torch.device(device)
        self.module = module
        self._fixed = without_cache(module)
        self._keywords = keywords_of(module, argument_names(manifest.takes, self._inputs))
        self._bound: BoundModule | None = None
        self._before_group: BeforeGroup | None = None
        self._opened = 0
        needs: Mapping[str, int] = manifest.extra["needs"]
        leave_behind(module, manifest.extra.get("left_behind", ()))
        modules = dict(module.named_modules())
        for name, group in needs.items():
            if name not in modules:
                raise RegistrationRefused(
                    f"module {name!r}", "the factory does not create it any more"
                )
            modules[name].register_forward_pre_hook(self._hook(group))
        for child in module.modules():
            child.training = False
        self._await_reads()

    def _await_reads(self) -> None:
        """Make each read of a weight wait for its group, on any path through the module."""
        tensors, aliases = self.manifest.tensors, self.manifest.extra["aliases"]
        groups = {
            tensors[index].name: number
            for number, group in enumerate(self.manifest.groups)
            for index in group.tensors
        }
        for path, owner in self.module.named_modules():
            for attribute in ("_parameters", "_buffers"):
                attributes = vars(owner)[attribute]
                names = {key: f"{path}.{key}" if path else key for key in attributes}
                of_keys = {key: groups.get(aliases.get(n, n)) for key, n in names.items()}
                known = {key: group for key, group in of_keys.items() if group is not None}
                vars(owner)[attribute] = _Awaited(attributes, known, self._open)

    def bind(self, tensor_for: TensorFor) -> BoundModule:
        """Create parameters over one region; each run sets them in the module."""
        tensors = {spec.name: tensor_for(spec) for spec in self.manifest.tensors}
        return BoundModule(self, tensors)

    def _hook(self, group: int) -> Callable[[nn.Module, Any], None]:
        def enter(module: nn.Module, inputs: Any) -> None:
            self._open(group)

        return enter

    def _open(self, group: int) -> None:
        while self._before_group is not None and self._opened <= group:
            self._before_group(self._opened)
            self._opened += 1

    def run_bound(
        self, bound: BoundModule, inputs: Sequence[torch.Tensor], before_group: BeforeGroup
    ) -> list[torch.Tensor]:
        """Run with the weights of ``bound``."""
        if self._bound is not bound:
            for owner, key, tensor in bound.slots:
                setattr(owner, key, tensor)  # not a dictionary entry: nn.LSTM overrides setattr
            self._bound = bound
        for owner, key, value in bound.loose:  # in each run: a module may replace its attributes
            setattr(owner, key, value)
        self._before_group, self._opened = before_group, 0
        try:
            # Not inference_mode: a module may compute gradients in forward, such as forces.
            with self._settings.inside(), torch.no_grad():
                if self._writes_inputs:
                    inputs = [value.clone() for value in inputs]
                named = dict(zip(self._inputs, inputs, strict=True))
                nested = arguments(self.manifest.takes, named)
                places, by_name = split_arguments(nested, self._keywords)
                answer = self.module(*places, **by_name, **self._fixed)
                outputs = self._in_order(flatten_outputs(answer))
            self._open(len(self.manifest.groups) - 1)  # groups that the path did not need
        finally:
            self._before_group = None
        return outputs

    def _in_order(self, outputs: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """Return the outputs in declared order; other paths may return other keys or orders."""
        declared = [value.name for value in self.manifest.outputs]
        if set(declared) != outputs.keys():
            raise ValueError(f"it returned {', '.join(outputs)} instead of {', '.join(declared)}")
        return [outputs[name] for name in declared]


class BoundModule:
    """A module program over one region."""

    def __init__(self, program: ModuleProgram, tensors: Mapping[str, torch.Tensor]) -> None:
        self.manifest = program.manifest
        self._program = program
        self.slots: list[tuple[nn.Module, str, torch.Tensor]] = []
        aliases: Mapping[str, str] = program.manifest.extra["aliases"]
        parameters = {
            name: nn.Parameter(tensor, requires_grad=False) for name, tensor in tensors.items()
        }
        self.loose = slots(program.module, tensors)
        for path, owner in program.module.named_modules():
            for key, is_parameter in [
                *((key, True) for key, value in owner._parameters.items() if value is not None),
                *((key, False) for key, value in owner._buffers.items() if value is not None),
            ]:
                name = f"{path}.{key}" if path else key
                name = aliases.get(name, name)
                if name not in tensors:
                    raise RegistrationRefused(f"weight {name!r}", "the manifest does not have it")
                tensor = parameters[name] if is_parameter else tensors[name]
                self.slots.append((owner, key, tensor))

    def run(self, inputs: Sequence[torch.Tensor], before_group: BeforeGroup) -> list[torch.Tensor]:
        return self._program.run_bound(self, inputs, before_group)
