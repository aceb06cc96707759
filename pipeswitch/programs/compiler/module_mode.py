"""Build in module mode, for code of the operator that cannot be exported.

There is no graph. A worker constructs the module without data and sets its parameters over the
region. Pre-hooks on submodules wait for the group with the submodule's weights. The build runs the
module once to measure the order of submodules.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import mmap
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ...base.errors import RegistrationRefused
from ..graphs.bundle import FileTensor, check_signature, read_safetensors_header, write_safetensors
from ..graphs.partition import Layer, UnplacedWeight, default_plan, place
from ..interface.dims import Dim, Extent, Values, values_of, values_text
from ..interface.groups import needs
from ..interface.layout import Manifest, ValueSpec
from ..interface.pytree import Tree
from ..running.executor import ModuleProgram
from ..running.factories import code_of
from ..running.tensor_views import bytes_over, tensor_over
from ..running.torch_settings import TorchSettings, run_branches_eagerly, seeded
from ..running.unregistered_tensors import leave_behind, loose_tensors, without_data
from ..running.values import dtype_name, nested_outputs, tensor_bytes
from ..spec import WEIGHTS_FILE, BuildSpec
from .checking import all_same, keeps_state, moved, on_clones, on_other_values, same_bits
from .dynamic import asked_axes
from .export_hints import SPARSE, WRITES, refuse_wrapped
from .sources import Loaded
from .verify import compare, load_image


def build_module(
    spec: BuildSpec,
    loaded: Loaded,
    examples: Sequence[torch.Tensor],
    out_dir: Path,
    why: RegistrationRefused,
    progress: Callable[[str, float], None],
) -> Manifest:
    """Build ``loaded`` in module mode into ``out_dir``; ``why`` is the refusal of its export.

    Raises:
        RegistrationRefused: no submodule has weights, the module changes its weights or keeps
            state, or its outputs are not tensors.
    """
    progress("partition", 0.0)
    loaded, sparse_names = _without_sparse(loaded, examples)
    tensors, aliases = _tensors(loaded.module)
    tensors |= loaded.loose
    before = _hash_tensors(tensors)
    with loaded.fresh.inside():
        order, returns, outputs = _measure(loaded, examples)
        after = _hash_tensors({**tensors, **loose_tensors(loaded.module)})
    _refuse_writes([name for name, digest in before.items() if digest != after[name]])
    loaded.output_names = [spec.name for spec in outputs]
    inputs, dims, outputs, tried = _opened(loaded, examples, outputs)
    check_signature(inputs, outputs, dims)
    names, layers, triggers = _layers(tensors, aliases, order, why, set(loaded.loose))
    notes = [f"{name} is sparse and not read, so it is left out" for name in sparse_names]
    facts = {"seed": loaded.seed, "left_behind": sparse_names, "notes": notes}
    path = out_dir / WEIGHTS_FILE
    file_tensors = _write_weights(path, {name: tensors[name] for name in names})
    weights = [UnplacedWeight(t.name, t.dtype, t.shape, t.size_bytes) for t in file_tensors]
    plan = default_plan(layers, weights, spec.bucket_bytes)
    specs, layer_specs, groups, total_bytes = place(
        layers, weights, plan, [t.file_offset_bytes for t in file_tensors]
    )
    manifest = Manifest(
        digest="",
        mode="module",
        mode_reason=why.message,
        source=spec.source,
        total_bytes=total_bytes,
        tensors=specs,
        groups=groups,
        inputs=inputs,
        outputs=outputs,
        dims=dims,
        takes=loaded.takes,
        returns=returns,
        triggers=tuple(triggers[group.first_node] for group in groups),
        layers=layer_specs,
        extra={"aliases": aliases, "needs": needs(triggers, groups), **facts},
    )
    progress("verify", 0.0)
    manifest = _verify(manifest, loaded, [*tried, examples], path)
    progress("pack", 0.0)
    return _with_digest(manifest, code_of(spec.source, loaded.imported_before))


def _write_weights(path: Path, tensors: Mapping[str, torch.Tensor]) -> Sequence[FileTensor]:
    named = [(n, dtype_name(t.dtype, f"weight {n!r}"), tuple(t.shape)) for n, t in tensors.items()]
    write_safetensors(path, named, (tensor_bytes(t.contiguous()) for t in tensors.values()), {})
    return read_safetensors_header(path)[0]


def _with_digest(manifest: Manifest, code: dict[str, Any]) -> Manifest:
    """Return the manifest with the digests of its factory's code and of the whole program."""
    sha256 = manifest.weights_sha256
    seed = manifest.extra["seed"]
    facts = [manifest.source, manifest.inputs, manifest.takes, manifest.dims, sha256, code, seed]
    digest = hashlib.sha256(msgspec.json.encode(facts)).hexdigest()
    return msgspec.structs.replace(manifest, digest=digest, extra={**manifest.extra, "code": code})


def _without_sparse(loaded: Loaded, examples: Sequence[torch.Tensor]) -> tuple[Loaded, list[str]]:
    """Return the module without sparse tensors that forward does not read, and their names.
    Raises RegistrationRefused: forward reads a sparse tensor."""
    module = loaded.module
    named = {**dict(module.named_parameters()), **dict(module.named_buffers()), **loaded.loose}
    sparse = [name for name, tensor in named.items() if tensor.layout is not torch.strided]
    if not sparse:
        return loaded, []
    expected = on_clones(loaded.outputs, examples)
    with contextlib.suppress(Exception):  # forward may raise anything if a tensor is None
        leave_behind(module, sparse)
        loaded = dataclasses.replace(
            loaded, loose={n: t for n, t in loaded.loose.items() if n not in sparse}
        )
        if all_same(expected, on_clones(loaded.outputs, examples)):
            return loaded, sparse
    raise RegistrationRefused(
        f"weight {', '.join(sparse[:8])}",
        "it is sparse, and forward reads it; weights are dense in the device's memory",
        hint=SPARSE,
    )


def _refuse_writes(names: Sequence[str]) -> None:
    if names:
        raise RegistrationRefused(
            f"weights {', '.join(names[:8])}",
            "the module writes to them in eval mode; weights are read-only, and an eviction would "
            "lose what was written",
            hint=WRITES,
        )


def _tensors(module: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return parameters and buffers by first name, and further name -> first name if tied."""
    tensors: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    first_name: dict[int, str] = {}
    for name, tensor in [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]:
        dtype_name(tensor.dtype, f"weight {name!r}")
        refuse_wrapped(name, tensor)
        if id(tensor) in first_name:
            aliases[name] = first_name[id(tensor)]
        else:
            first_name[id(tensor)] = name
            tensors[name] = tensor.detach()
    return tensors, aliases


def _hash_tensors(tensors: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {
        name: hashlib.sha256(tensor_bytes(tensor.contiguous())).digest()
        for name, tensor in tensors.items()
    }


def _measure(
    loaded: Loaded, examples: Sequence[torch.Tensor]
) -> tuple[list[str], Tree, tuple[ValueSpec, ...]]:
    """Return the submodules in order of their first call, and the outputs' tree and specs."""
    order: dict[str, None] = {}
    run_branches_eagerly()

    def hook(name: str) -> Callable[[nn.Module, Any], None]:
        return lambda entered, inputs: order.setdefault(name)

    handles = [
        child.register_forward_pre_hook(hook(name)) for name, child in loaded.module.named_modules()
    ]
    try:
        with TorchSettings.now().inside(), torch.no_grad():
            returns, outputs = nested_outputs(loaded.nested([value.clone() for value in examples]))
    finally:
        for handle in handles:
            handle.remove()
    specs = tuple(
        ValueSpec(name=n, dtype=dtype_name(v.dtype, f"output {n!r}"), shape=tuple(v.shape))
        for n, v in outputs.items()
    )
    return list(order), returns, specs


def _layers(
    tensors: dict[str, torch.Tensor],
    aliases: dict[str, str],
    order: list[str],
    why: RegistrationRefused,
    loose: Collection[str],
) -> tuple[list[str], list[Layer], list[str]]:
    """Return names of weights by first use, layers, and the submodule that opens each layer.

    A weight belongs to the submodule that owns it. If it is never called (attention reads its
    projection's weight without a call), it belongs to the nearest ancestor that is called. A tied
    weight belongs to its first called owner, and ``loose`` tensors belong to the root.
    """
    position = {name: index for index, name in enumerate(order)}
    first_owner: dict[str, str] = {}
    for name in (*tensors, *aliases):
        owner = "" if name in loose else name.rpartition(".")[0]
        while owner not in position:
            owner = owner.rpartition(".")[0]  # ends at the root, which is always called
        tensor = aliases.get(name, name)
        if tensor not in first_owner or position[owner] < position[first_owner[tensor]]:
            first_owner[tensor] = owner
    by_trigger: dict[str, list[str]] = {}
    for name in tensors:
        by_trigger.setdefault(first_owner[name], []).append(name)
    triggers = [name for name in order if name in by_trigger]
    if not any(triggers):
        raise RegistrationRefused(
            "submodules",
            f"there are none with weights to hook, so no groups to stream ({why.message})",
        )
    if len(triggers) and triggers[0] != order[0]:
        triggers.insert(0, order[0])  # the root opens the first group, before all submodules
    names: list[str] = []
    layers: list[Layer] = []
    for index, trigger in enumerate(triggers):
        own = by_trigger.get(trigger, [])
        layers.append(Layer(index, index + 1, tuple(range(len(names), len(names) + len(own)))))
        names += own
    return names, layers, triggers


def _opened(
    loaded: Loaded, examples: Sequence[torch.Tensor], outputs: Sequence[ValueSpec]
) -> tuple[tuple[ValueSpec, ...], tuple[Dim, ...], tuple[ValueSpec, ...], list[list[torch.Tensor]]]:
    """Return the signature with open dimensions, and inputs for checks.

    The inputs have other values than the example. Their extents are the example's, and the ends
    and the middle of each range. If an output's extent always equals a dimension, it becomes that
    dimension; otherwise it is the largest extent in these runs.

    Raises:
        RegistrationRefused: the module fails at the end or in the middle of a range.
    """
    shapes = [tuple(shape) for shape, _ in loaded.inputs.values()]
    axes = asked_axes(list(loaded.inputs), shapes, {} if loaded.is_wish else loaded.dynamic)
    inputs = tuple(
        ValueSpec(
            name=name,
            dtype=dtype,
            shape=tuple(axes[n, a].name if (n, a) in axes else e for a, e in enumerate(shape)),
        )
        for n, (name, (shape, dtype)) in enumerate(loaded.inputs.items())
    )
    dims = tuple(dict.fromkeys(axes.values()))
    specs = [spec.shape for spec in inputs]
    own = values_of(specs, shapes) or {}
    results: list[tuple[Values, list[Any]]] = [(own, [spec.shape for spec in outputs])]
    tried = []
    ends = [(dim.name, n) for dim in dims for n in (dim.high, dim.low, (dim.low + dim.high) // 2)]
    for values in (own, *({**own, name: extent} for name, extent in ends)):
        try:
            at, answer = on_other_values(loaded.outputs, inputs, values, examples)
        except Exception as error:  # a model's own code
            raise RegistrationRefused(
                f"at {values_text(values)}",
                f"the module raised {type(error).__name__}: {str(error)[:200]}",
                hint="give a range that the model supports",
            ) from None
        tried.append(at)
        results.append((values, [tuple(value.shape) for value in answer]))

    def extent(output: int, axis: int) -> Extent:
        extents = [(values, shapes[output][axis]) for values, shapes in results]
        same = (dim.name for dim in dims if all(v[dim.name] == n for v, n in extents))
        return next(same, max(n for _, n in extents))

    opened = tuple(
        msgspec.structs.replace(spec, shape=tuple(extent(n, a) for a in range(len(spec.shape))))
        for n, spec in enumerate(outputs)
    )
    return inputs, dims, opened, tried


class _Writes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode that records the addresses of all tensors to which operators write."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.addresses: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(func, HigherOrderOperator):  # weights are also read-only, and inputs compared
            return func(*args, **(kwargs or {}))
        named = {
            **dict(zip((a.name for a in func._schema.arguments), args, strict=False)),
            **(kwargs or {}),
        }
        for argument in func._schema.arguments:
            is_write = argument.alias_info is not None and argument.alias_info.is_write
            # In training, a batch norm writes running statistics; its schema does not say so.
            is_write |= argument.name.startswith("running_") and named.get("training") is True
            for value in tree_leaves(named.get(argument.name)) if is_write else ():
                if isinstance(value, torch.Tensor):
                    self.addresses.add(value.data_ptr())
        return func(*args, **(kwargs or {}))


class _OneCopy:
    """Copy of a module that keeps its state from call to call, as in a worker."""

    def __init__(self, manifest: Manifest, loaded: Loaded, image: torch.Tensor) -> None:
        self.manifest = manifest
        self._image = image.numpy()
        self._requests: dict[Any, list[torch.Tensor]] = {}  # shapes and dtypes -> reused tensors
        self.writes_inputs = False
        try:
            with seeded(loaded.seed):
                module = without_data(loaded.construct)
        except Exception as error:
            raise RegistrationRefused(
                "factory",
                f"a second call raises {type(error).__name__}: {str(error)[:300]}",
                hint="workers call the factory several times: each call must create a new module",
            ) from error
        self._program = ModuleProgram(manifest, module)
        arena = torch.full_like(image, 0xFF)
        self.arena = arena.numpy()
        self.lie_over(arena.untyped_storage())

    def lie_over(self, storage: torch.UntypedStorage) -> None:
        """Use the weights in ``storage`` for all later runs."""
        self._first_address = storage.data_ptr()
        self._bound = self._program.bind(lambda tensor: tensor_over(storage, tensor, 0))

    def run(
        self, inputs: Sequence[torch.Tensor], before_group: Callable[[int], None]
    ) -> list[torch.Tensor]:
        """Run as ``BoundProgram.run``; copy a group into ``arena`` when the run waits for it.

        Raises:
            RegistrationRefused: the module writes to its weights.
        """

        def arrive(index: int) -> None:
            before_group(index)
            group = self.manifest.groups[index]
            part = slice(group.offset_bytes, group.offset_bytes + group.size_bytes)
            self.arena[part] = self._image[part]  # with numpy, because writes of torch are recorded

        key = tuple((tuple(value.shape), value.dtype) for value in inputs)
        request = self._requests.setdefault(key, [torch.empty_like(value) for value in inputs])
        for own_input, value in zip(request, inputs, strict=True):
            own_input.data.copy_(value)  # .data: the module sees no new tensor version
        with _Writes() as writes:
            answer = [value.clone() for value in self._bound.run(request, arrive)]
        places = {address - self._first_address for address in writes.addresses}
        _refuse_writes(
            [
                tensor.name
                for tensor in self.manifest.tensors
                if any(0 <= at - tensor.offset_bytes < tensor.size_bytes for at in places)
            ]
        )
        is_same = all(map(same_bits, request, inputs))
        self.writes_inputs |= not is_same
        return answer


def _verify(
    manifest: Manifest, loaded: Loaded, tried: Sequence[Sequence[torch.Tensor]], path: Path
) -> Manifest:
    """Run as a worker does: one module without data, whose weights are copied group by group.

    In the first run, memory of later groups is filled with 0xFF (NaN, or an invalid index), so a
    weight that is read before its group changes the answer. In later runs the weights are in
    read-only memory. Each answer is compared with that of the module in its initial state. The
    last run repeats the first inputs.

    Returns:
        The manifest with the digest of its weights.
    """
    image = load_image(path, manifest)
    sha256 = hashlib.sha256(tensor_bytes(image)).hexdigest()
    copy = _OneCopy(manifest, loaded, image)
    settings = TorchSettings.now()

    def plain(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        # As in a worker, each run starts with these settings. Gradients would change kernels.
        with settings.inside(), torch.no_grad():
            return loaded.outputs(inputs)

    # Larger floats of the other sign, which would change a running maximum or minimum.
    louder = [v * -2 if v.is_floating_point() else moved(v) for v in tried[0]]

    def differs(copy: _OneCopy, inputs: Sequence[torch.Tensor]) -> str:
        try:
            expected = on_clones(plain, inputs)
        except Exception:  # the module refuses these values, or returns other names
            return ""
        try:
            return compare(manifest, copy, plain, inputs, expected=expected)
        except RegistrationRefused:
            raise
        except Exception as error:  # the module's own code
            return f"it raised {type(error).__name__}: {str(error)[:200]}"

    for index, inputs in enumerate([*tried, louder, tried[0]]):
        difference = differs(copy, inputs)
        if difference:
            shapes = [list(value.shape) for value in inputs]
            reason = f"in module mode, at {shapes} {difference}"
            if index and not differs(_OneCopy(manifest, loaded, image), inputs):
                raise keeps_state(f"{reason} after other requests")
            raise RegistrationRefused("verification", reason)
        if index == 0:
            if hashlib.sha256(copy.arena.data).hexdigest() != sha256:
                raise RegistrationRefused("weights", "running the module changes them")
            copy.lie_over(_read_only(image))
    return msgspec.structs.replace(
        manifest,
        weights_sha256=sha256,
        extra={**manifest.extra, "writes_inputs": copy.writes_inputs},
    )


def _read_only(image: torch.Tensor) -> torch.UntypedStorage:
    """Return a copy of the image in read-only memory."""
    descriptor = os.memfd_create("weights")
    try:
        os.truncate(descriptor, max(1, image.nbytes))
        with mmap.mmap(descriptor, 0) as writable:
            writable[: image.nbytes] = tensor_bytes(image)
        return bytes_over(mmap.mmap(descriptor, 0, prot=mmap.PROT_READ))
    finally:
        os.close(descriptor)
