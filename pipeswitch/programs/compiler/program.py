"""Registration: from a source to a verified program on disk (graph mode, or module mode).

This runs in a builder, a short-lived process with torch. All errors of a model become
``RegistrationRefused``. A program must compute the module's bits; texts may differ by rounding.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ...base.errors import HostStoreFull, PipeSwitchError, RegistrationRefused
from ...base.units import format_bytes
from ...commits.weights import Weight, load_weights
from ...devices.cpu import packed
from ...devices.torch_kernels import TorchKernels
from ..graphs.bundle import Bundle, Graph, read_bundle, read_safetensors_header
from ..graphs.graph import check_no_mutation, check_shapes, last_readers
from ..graphs.indices import lookups
from ..graphs.operators import checked_by
from ..graphs.partition import UnplacedWeight as GraphWeight
from ..graphs.partition import default_plan, layers_of_graph, place
from ..interface.dims import BATCH, Values, at_batch, batch_range, values_of, values_text
from ..interface.groups import regrouped
from ..interface.layout import KindSettings, Manifest
from ..interface.matching import match
from ..interface.odd_files import check_file
from ..interface.packing import DERIVED_FILE
from ..interface.pytree import argument_names
from ..running.executor import BoundProgram, GraphProgram, PackedKernels
from ..running.tensor_views import tensor_over
from ..running.torch_settings import TorchSettings
from ..running.values import dtype_name, tensor_bytes
from ..spec import (
    BUNDLE_FILE,
    BuildSpec,
    batched_as,
    fingerprint,
    load_manifest,
    save_manifest,
    weights_file,
    with_state,
)
from . import checking
from .batching_check import with_batching
from .dynamic import NotDynamic, working_end
from .encoder import EncodedProgram
from .export import export_module, write_program
from .model_folder import listed
from .module_mode import build_module
from .precision import PLAIN_CALLS, derive, stays_exact
from .sources import Loaded, example_specs, load_source
from .statefulness import Fresh
from .verify import Plain, acceptable_inputs, compare, load_image, with_digests

__all__ = ["BuildSpec", "build", "load_manifest"]

Progress = Callable[[str, float], None]
ROWS: Final = 'export it with the rows that it takes: dynamic={{"{}": {{0: (2, 64)}}}}'


def build(
    spec: BuildSpec,
    out_dir: Path,
    progress: Progress,
    disk_bytes: int = 0,
    *,
    packs_weights: bool = True,
) -> Manifest:
    """Build a model into ``out_dir``: program.bundle (or weights.safetensors), manifest.json.

    Args:
        spec: the specification of the model.
        out_dir: an existing or new folder; the caller must delete it, also if this raises.
        progress: called with (stage, finished fraction) when the stages "build", "export",
            "partition", "verify" and "pack" begin or end.
        disk_bytes: maximum bytes to write; 0: no limit.
        packs_weights: True if only this processor computes: its packed weights can be read, and
            measured times and bits are valid.

    Raises:
        RegistrationRefused: the model cannot be served; the error says which part and why.
        HostStoreFull: the model needs more than ``disk_bytes``; nothing was written.
    """
    kernels = packed.KERNELS if packs_weights else TorchKernels(rounds=True)
    threads = torch.get_num_threads()
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        if os.path.isdir(spec.weights):
            manifest = _build_version(spec, out_dir, progress, disk_bytes)
        elif spec.source.endswith(".bundle"):
            manifest = _build_bundle(spec, out_dir, progress)
        else:
            manifest = _build_module(spec, out_dir, progress, disk_bytes)
        if spec.precision != "exact":
            torch.set_num_threads(threads)  # a factory may have set another number
            manifest = _in_precision(manifest, spec, out_dir, kernels)
        if (batched := batched_as(manifest, spec)) is not None:
            manifest = with_batching(manifest, *batched, out_dir, kernels)
        if state := spec.state or manifest.extra.get("state"):
            manifest = with_state(manifest, state)
        if manifest.mode == "graph":
            *_, head_sha256 = read_safetensors_header(out_dir / weights_file(manifest))
            manifest = msgspec.structs.replace(manifest, head_sha256=head_sha256)
        manifest = with_digests(manifest, out_dir / weights_file(manifest))
        save_manifest(out_dir, manifest)
        progress("pack", 1.0)
        return manifest
    except PipeSwitchError:
        raise
    except Exception as error:  # a model's own code or torch may raise anything
        why, hint = f"{type(error).__name__}: {str(error)[:500]}", ""
        for full in (errno.ENOSPC, errno.EDQUOT):
            if os.strerror(full) in why:  # safetensors raises its own class, without errno
                why = f"its program cannot be written: {os.strerror(full)}"
                hint = "free space on the disk of the state directory, or unregister models"
        raise RegistrationRefused(f"model {spec.name!r}", why, hint=hint) from error


def _in_precision(
    manifest: Manifest, spec: BuildSpec, out_dir: Path, kernels: PackedKernels
) -> Manifest:
    name = spec.precision
    why = packed.missing() if name == "fast" and kernels.computes_here else ""
    if manifest.mode == "module":
        why = "module mode has no graph to change"
    if why:
        return stays_exact(manifest, name, why)
    source, known = Path(spec.source), None
    if source.name == BUNDLE_FILE:  # of this model, or of one with other weights
        with contextlib.suppress(RegistrationRefused):  # its manifest is missing or damaged
            other = load_manifest(source.parent)
            extra, known = {PLAIN_CALLS: other.extra.get(PLAIN_CALLS, {})}, other.precision
            manifest = msgspec.structs.replace(manifest, extra=manifest.extra | extra)
    here = name, fingerprint(kernels.layout, torch.get_num_threads())
    if known and (not known.ms or (known.name, known.fingerprint) != here):
        known = None
    try:
        ours = derive(manifest, out_dir, spec, kernels, known)
    except RegistrationRefused as error:
        if name != "fast" or spec.max_error:  # ``fast`` may be a default that nobody asked for
            raise
        (out_dir / DERIVED_FILE).unlink(missing_ok=True)
        return stays_exact(manifest, name, error.reason)
    if ours.precision is None:
        return ours
    *_, head_sha256 = read_safetensors_header(out_dir / BUNDLE_FILE)
    plain_sha256 = manifest.weights_sha256, head_sha256
    precision = msgspec.structs.replace(ours.precision, plain_sha256=plain_sha256)
    return msgspec.structs.replace(ours, precision=precision)


def _build_bundle(
    spec: BuildSpec, out_dir: Path, progress: Progress, weights: Mapping[str, Weight] | None = None
) -> Manifest:
    progress("build", 0.0)
    path = out_dir / BUNDLE_FILE
    try:
        shutil.copyfile(spec.source, path)  # nobody can change the copy during the build
    except OSError as error:
        raise RegistrationRefused(f"source {spec.source!r}", str(error)) from error
    bundle = read_bundle(path)
    if spec.generate and (bundle.settings is None or bundle.settings.option != "generate"):
        raise RegistrationRefused(
            "generate",
            "the bundle is not that of a language model",
            hint="give the model itself, with generate=True",
        )
    unused: list[str] = []
    if spec.adapter:
        weights = _merged(msgspec.structs.replace(spec, source=spec.origin))
    if spec.weights and weights is None:
        if not spec.weights.endswith(".safetensors"):
            raise RegistrationRefused(
                f"weights {spec.weights!r}", "a bundle has its own weights", hint="omit weights"
            )
        weights = _weights_in(Path(spec.weights))
        unused = _unused(weights, _write_weights(path, bundle, weights, spec.part))
    elif weights is not None:
        _write_weights(path, bundle, weights, spec.part)
    shapes = _shapes_of(spec, bundle.graph)
    manifest = _finish_graph(bundle, spec, path, None, shapes, progress)
    if Path(spec.source).name == BUNDLE_FILE and weights is None:  # the program is built again
        manifest = _as_before(manifest, Path(spec.source).parent)
    notes = [*bundle.notes, *unused, *manifest.extra.get("notes", ())]
    return msgspec.structs.replace(manifest, extra={**manifest.extra, "notes": notes})


def _as_before(manifest: Manifest, folder: Path) -> Manifest:
    """Return the manifest with the model's origin from the earlier build's manifest."""
    with contextlib.suppress(RegistrationRefused):  # it is missing or damaged
        before = load_manifest(folder)
        extra = {**manifest.extra, "origin": before.extra.get("origin", "")}
        manifest = msgspec.structs.replace(manifest, source=before.source, extra=extra)
    return manifest


def _weights_in(path: Path) -> dict[str, Weight]:
    """Return the weights of a safetensors file, named like the weights of a job with one part."""
    check_file(path, "weights")
    return {
        f"file.{one.name}": Weight(
            one.dtype,
            one.shape,
            np.fromfile(path, np.uint8, one.size_bytes, offset=one.file_offset_bytes),
        )
        for one in read_safetensors_header(path)[0]
    }


def _merged(spec: BuildSpec) -> dict[str, Weight]:
    """Return the weights of a spec's source with its adapter."""
    weights = {}
    for name, one in load_source(spec).module.state_dict().items():
        values = np.frombuffer(tensor_bytes(one.contiguous()), np.uint8)
        weights[f"it.{name}"] = Weight(dtype_name(one.dtype, name), tuple(one.shape), values)
    return weights


def _unused(weights: Mapping[str, Weight], used: Collection[str]) -> list[str]:
    """Return a note on a file's tensors that the program lacks, except counts of BatchNorm."""
    names = [name.removeprefix("file.") for name in weights if name not in used]
    names = [name for name in names if not name.endswith("num_batches_tracked")]
    return [listed(names)] if names else []


def _write_weights(
    path: Path, bundle: Bundle, weights: Mapping[str, Weight], part: str
) -> Collection[str]:
    """Overwrite a bundle's weights in the file; names, dtypes, shapes and offsets stay the same.
    Return the names of ``weights`` that it has."""
    specs = {tensor.name: (tensor.dtype, tensor.shape) for tensor in bundle.tensors}
    own = {name: (one.dtype, one.shape) for name, one in weights.items()}
    names = match(specs, own, part, bundle.unsaved)
    with path.open("r+b") as file:
        for tensor in bundle.tensors:
            if tensor.name in names:
                file.seek(tensor.file_offset_bytes)
                file.write(np.ascontiguousarray(weights[names[tensor.name]].values).data)
    return {*names.values()}


def _build_version(spec: BuildSpec, out_dir: Path, progress: Progress, disk_bytes: int) -> Manifest:
    """Build a program with the weights that a job committed.

    A bundle keeps its graph and is checked again. Another source is built again from its module.
    """
    record, weights = load_weights(Path(spec.weights))
    job = Path(spec.weights).name.partition("@")[0]
    if spec.source.endswith(".bundle"):
        manifest = _build_bundle(spec, out_dir, progress, weights)
    else:
        manifest = _build_module(spec, out_dir, progress, disk_bytes)
    part = f":{spec.part}" if spec.part else ""
    origin = f"job:{job}@{record.step}{part}"
    return msgspec.structs.replace(manifest, extra={**manifest.extra, "origin": origin})


def _build_module(spec: BuildSpec, out_dir: Path, progress: Progress, disk_bytes: int) -> Manifest:
    progress("build", 0.0)
    loaded = load_source(spec)
    _check_disk(loaded.module, disk_bytes)
    settings = TorchSettings.now()  # as the constructor set them; no call has changed them
    specs = example_specs(loaded.inputs)
    examples = loaded.examples or acceptable_inputs(specs, {}, loaded.outputs)
    progress("export", 0.0)
    is_factory = not spec.source.startswith(("torchvision:", "hf:"))
    try:
        return _export(spec, loaded, examples, out_dir, progress)
    except RegistrationRefused as refusal:
        reason = refusal
    if not (is_factory or spec.allow_module_mode) or reason.part == "example inputs":
        raise reason
    if not is_factory:
        raise RegistrationRefused(
            reason.part,
            f"{reason.reason}; module mode needs package.module:factory",
            hint=reason.hint,
        )
    (out_dir / BUNDLE_FILE).unlink(missing_ok=True)
    settings.apply()
    return build_module(spec, loaded, examples, out_dir, reason, progress)


def _check_disk(module: nn.Module, limit_bytes: int) -> None:
    """Raise HostStoreFull if a module's tensors exceed the limit; programs add few constants."""
    tensors: list[Any] = [*module.parameters(), *module.buffers()]
    plain = (one for one in tensors if not is_traceable_wrapper_subclass(one))
    storages = [one.untyped_storage() for one in plain if one.layout is torch.strided]
    size_bytes = sum({one.data_ptr(): one.nbytes() for one in storages}.values())
    if limit_bytes and size_bytes > limit_bytes:
        raise HostStoreFull(
            f"a program of {format_bytes(size_bytes)} does not fit: {format_bytes(limit_bytes)} "
            "are left on the server's disk for this client",
            hint="pipeswitch unregister models that are not used, or raise [server] max_disk or "
            "max_disk_per_client",
            requested_bytes=size_bytes,
            largest_free_bytes=limit_bytes,
        )


def _export(
    spec: BuildSpec, loaded: Loaded, examples: list[torch.Tensor], out_dir: Path, progress: Progress
) -> Manifest:
    path = out_dir / BUNDLE_FILE
    manifests: list[Manifest] = []

    def verify(program: EncodedProgram) -> None:
        outputs = [one.name for one in program.graph.outputs]
        settings = loaded.settings
        program.settings = settings if settings is None or settings.fits(outputs) else None
        program.examples = [] if settings is not None else list(loaded.examples or [])
        write_program(path, program)
        bundle = read_bundle(path)  # checks that our reader accepts the file
        if program.graph.dims:
            checking.dry_run_ends(program.graph, program.weights)
        own = values_of(
            (value.shape for value in program.graph.inputs), (value.shape for value in examples)
        )
        assert own is not None
        others = checking.shapes_to_try(program.graph.dims, own, program.suspects)
        manifests[:] = [
            _finish_graph(
                bundle, spec, path, loaded.fresh, [own, *others], progress, loaded.examples
            )
        ]

    keywords = loaded.keywords()
    options: dict[int | str, Any] = {
        name if name in keywords else place: value
        for place, (name, value) in enumerate(loaded.arguments(examples).items())
    }
    with loaded.fresh.inside():  # discards state that the export leaves in the module
        program = export_module(
            loaded.module,
            options,
            input_names=argument_names(loaded.takes, loaded.inputs),
            max_batch=spec.max_batch,
            dynamic=loaded.dynamic,
            is_wish=loaded.is_wish,
            verify=verify,
        )
    [manifest] = manifests
    return msgspec.structs.replace(
        manifest,
        extra={
            **manifest.extra,
            "notes": [*loaded.notes, *manifest.extra.get("notes", ()), *program.notes],
        },
    )


def _finish_graph(
    bundle: Bundle,
    spec: BuildSpec,
    path: Path,
    fresh: Fresh | None,
    shapes: Sequence[Values],
    progress: Progress,
    examples: Sequence[torch.Tensor] = (),
) -> Manifest:
    graph = bundle.graph
    progress("partition", 0.0)
    check_no_mutation(graph)
    manifest = _graph_manifest(spec, bundle)
    image = load_image(path, manifest)
    program = GraphProgram(manifest, graph, "cpu")
    bound = program.bind(lambda tensor: tensor_over(image.untyped_storage(), tensor, 0))
    weights = [tensor_over(image.untyped_storage(), tensor, 0) for tensor in manifest.tensors]
    checked = check_shapes(graph, weights)
    progress("verify", 0.0)
    digest_before = hashlib.sha256(tensor_bytes(image)).hexdigest()
    if fresh is None:
        whole = GraphProgram(regrouped(manifest, (0,)), graph, "cpu")
        everything = whole.bind(lambda t: tensor_over(image.untyped_storage(), t, 0))
        fresh = Fresh(nn.Module(), _without_waiting(everything))  # a graph keeps no state
    # Bits may depend on the address of a weight. A model that was wrapped may differ by rounding.
    settings = bundle.settings
    is_same = checking.is_rounded if settings and settings.option else checking.same_bits
    _verify_graph(manifest, bound, fresh, shapes, progress, examples, is_same)
    if hashlib.sha256(tensor_bytes(image)).hexdigest() != digest_before:
        raise RegistrationRefused("weights", "running the program changes them")
    progress("pack", 0.0)
    return msgspec.structs.replace(
        manifest,
        digest=_digest(manifest, graph, digest_before, settings),
        weights_sha256=digest_before,
        lookups=lookups(graph),
        extra={
            **manifest.extra,
            "largest_value_bytes": checked.run_memory.largest_bytes,
            "intermediate_bytes": checked.run_memory.peak_bytes,
            "is_whole": checked.is_whole,
            "example_dims": dict(shapes[0]),
            "last_readers": last_readers(graph),
            "checked_by": checked_by(),
            **({"unsaved": list(bundle.unsaved)} if bundle.unsaved else {}),
            **(settings.claims() if settings else {}),
        },
    )


def _graph_manifest(spec: BuildSpec, bundle: Bundle) -> Manifest:
    graph = bundle.graph
    layers = layers_of_graph(graph)
    weights = [GraphWeight(t.name, t.dtype, t.shape, t.size_bytes) for t in bundle.tensors]
    plan = default_plan(layers, weights, spec.bucket_bytes)
    offsets = [tensor.file_offset_bytes for tensor in bundle.tensors]
    tensors, specs, groups, total_bytes = place(layers, weights, plan, offsets)
    if tuple(tensor.name for tensor in tensors) != graph.weights:
        raise RegistrationRefused("bundle weights", "they are not in order of first use")
    return Manifest(
        digest="",
        mode="graph",
        mode_reason="",
        source="bundle" if spec.source.endswith(".bundle") else spec.source,
        total_bytes=total_bytes,
        tensors=tensors,
        groups=groups,
        inputs=graph.inputs,
        outputs=graph.outputs,
        dims=graph.dims,
        takes=graph.takes,
        returns=graph.returns,
        layers=specs,
    )


def _without_waiting(bound: BoundProgram) -> Plain:
    return lambda inputs: bound.run(inputs, lambda index: None)


def _verify_graph(
    manifest: Manifest,
    bound: BoundProgram,
    fresh: Fresh,
    shapes: Sequence[Values],
    progress: Progress,
    examples: Sequence[torch.Tensor],
    is_same: Callable[[torch.Tensor, torch.Tensor], bool],
) -> None:
    """Compare the program with the fresh module at each of ``shapes``.

    Raises:
        RegistrationRefused: they differ at the first shape, or because the module keeps state.
        NotDynamic: they differ only at another shape, or at one with an extent of 1, or the module
            refuses that shape.
    """
    own_shapes, is_bundle = shapes[0], manifest.source == "bundle"
    # An extent of 1 was exported as 2, on which the module may take another path.
    may_be_narrower = not is_bundle and 1 in own_shapes.values()

    def differs(values: Values) -> str:
        expected = None
        try:
            if examples and values is own_shapes:
                inputs = list(examples)
            elif examples:
                inputs, expected = checking.on_other_values(
                    fresh, manifest.inputs, values, examples
                )
            else:
                inputs = acceptable_inputs(manifest.inputs, values, fresh)
            difference = compare(manifest, bound, fresh, inputs, is_same, expected)
        except Exception as error:  # a model's own code
            if values is own_shapes and (not is_bundle or isinstance(error, PipeSwitchError)):
                raise
            return f"the module raised {type(error).__name__}: {str(error)[:200]}"
        if difference and is_same is checking.same_bits:
            outputs = bound.run([value.clone() for value in inputs], lambda index: None)
            checking.refuse_state(fresh.now, inputs, outputs, values)
        return difference

    for done, values in enumerate(shapes):
        difference = differs(values)
        if difference and not is_bundle and (values is not own_shapes or may_be_narrower):
            works = working_end(values, own_shapes, lambda at: not differs(at))
            raise NotDynamic(f"at {values_text(values)} {difference}", works)
        if difference:
            has_rows, why = is_bundle and BATCH in values, f"at {values_text(values)} {difference}"
            hint = ROWS.format(manifest.inputs[0].name) if has_rows else ""
            raise RegistrationRefused("verification", why, hint=hint)
        progress("verify", (done + 1) / len(shapes))


def _shapes_of(spec: BuildSpec, graph: Graph) -> list[dict[str, int]]:
    """Return the shapes at which a bundle is compared: with the declared batch and another."""
    low, high = batch_range(graph.dims)
    declared = next((shape[0] for shape, _ in spec.inputs.values() if shape), 1)
    first = min(max(declared if isinstance(declared, int) else 1, low), high)
    batches = [first, 2 if first == 1 else 1]
    return [at_batch(graph.dims, batch) for batch in batches if low <= batch <= high]


def _digest(
    manifest: Manifest, graph: Graph, weights_sha256: str, settings: KindSettings | None
) -> str:
    """Return the program's digest; it changes with the version of the contracts, too."""
    digest = hashlib.sha256(msgspec.json.encode(graph, order="deterministic"))
    digest.update(checked_by().encode())
    digest.update(weights_sha256.encode())
    digest.update(msgspec.json.encode([manifest.inputs, manifest.outputs, manifest.dims]))
    if settings is not None:  # another tokenizer makes another program
        digest.update(msgspec.json.encode(settings))
    return digest.hexdigest()
