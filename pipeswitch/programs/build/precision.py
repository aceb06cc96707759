"""Programs in another precision: derived from the verified program, and compared with it.

``fast`` packs the weights of linear layers and convolutions, folds a BatchNorm into the convolution
before it, and fuses activations and residual additions into convolutions and linear layers
(``fusing``). Clients cannot send packed weights: their bundles are plain, and this module packs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, cast

import msgspec
import torch

from ...base.errors import RegistrationRefused
from ..graphs.bundle import Bundle, read_bundle, write_bundle
from ..graphs.graph import last_readers
from ..graphs.partition import UnplacedWeight, default_plan, layers_of_graph, place
from ..interface.dims import BATCH, Values, corners, values_text
from ..interface.layout import BUNDLE_FILE, Manifest
from ..interface.packing import DERIVED_FILE, HALF, Precision
from ..running.executor import GraphProgram, PackedKernels
from ..running.tensor_views import tensor_over
from ..running.values import tensor_bytes
from ..spec import fingerprint
from .batching_check import is_batch_invariant
from .checking import largest_number, workers_default_dtype
from .fusing import TIMED, Derived, Walk, call_times, fused, walk
from .lowering import lowered
from .verify import acceptable_inputs, load_image

MAX_ERROR: Final = {"bf16": 5e-2, "int8": 1e-1}
"""Default limits of the error, relative to the largest output; ``fast``: ``kernels.fast_error``."""
GROSS_ERROR: Final = 0.1  # limit of the mean error, relative to the largest output; cannot be set
MIN_GAIN: Final = 0.03  # ``fast`` must save this share of the plain time; less may be noise
MAX_LOSS: Final = 0.1  # ``fast`` may be slower at one shape by this share of the plain time
MAX_SHAPES: Final = 6  # maximum number of shapes at which the outputs of both programs are compared
SEVERAL: Final = 8  # rows of the batch at which both programs are timed
MAX_ROWS: Final = 16  # maximum batch of the comparison; more rows take long and show nothing new
SEEDS: Final = (1, 2)  # seeds of more inputs at the example's shape, for the comparison


Run = Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]
Times = tuple[float, ...]


def derive(
    manifest: Manifest,
    folder: Path,
    name: str,
    max_error: float,
    bucket_bytes: int,
    kernels: PackedKernels,
    limit: int = 0,
) -> Manifest:
    """Write the program in precision ``name`` into ``folder`` and return its manifest.

    If the derived program is not faster (``fast``) or smaller (others), return the plain program's
    manifest with a note. ``limit`` is the maximum batch of several requests; 0: none are batched.

    Raises:
        RegistrationRefused: an output of the derived program is not finite, or differs by more than
            ``max_error``, relative to the largest output.
    """
    bundle = read_bundle(folder / BUNDLE_FILE)
    image = load_image(folder / BUNDLE_FILE, manifest)
    storage = image.untyped_storage()
    weights = [tensor_over(storage, spec, 0) for spec in manifest.tensors]
    plain = _runner(GraphProgram(manifest, bundle.graph, "cpu"), storage)
    shapes = _shapes(manifest, is_decoder=bundle.generation is not None)
    first, *inputs = [acceptable_inputs(manifest.inputs, one, plain) for one in shapes]
    derived = fused(bundle.graph, weights, [first, *inputs], kernels, name)
    if name != "fast":
        derived = lowered(derived, first, kernels, computes=kernels.supports_bfloat16())
    elif not derived.packed_count:
        return stays_exact(manifest, name, "no call gains")
    path = folder / DERIVED_FILE
    ours, image = _written(manifest, bundle, derived, path, bucket_bytes)
    fast = _runner(GraphProgram(ours, derived.graph, "cpu", kernels), image.untyped_storage())
    more = [acceptable_inputs(manifest.inputs, shapes[0], plain, seed) for seed in SEEDS]
    try:
        errors = _compared(plain, fast, [first, *more, *inputs], name, max_error)
    except RuntimeError as error:  # raised by torch for a call that needs another memory layout
        path.unlink()
        return stays_exact(manifest, name, str(error)[:200])
    walks = walk(bundle.graph, weights), walk(derived.graph, derived.weights, kernels)
    times = _times(walks, [first, *inputs][:TIMED]) if kernels.computes_here else []
    refusal, note = _gain(name, shapes, times, saves=ours.total_bytes < manifest.total_bytes)
    if refusal:
        path.unlink()
        return stays_exact(manifest, name, refusal)
    ours = with_note(_with_copies(ours) if name in HALF else ours, note)
    precision = Precision(
        **_measured(times, errors),
        name=cast(Any, name),
        fingerprint=fingerprint(kernels.layout, torch.get_num_threads()),
        plain_bytes=manifest.total_bytes,
        is_batch_invariant=is_batch_invariant(ours, fast, limit) if times else None,
        weights=tuple((one.name, one.dtype, one.shape) for one in manifest.tensors),
        packed_count=derived.packed_count,
        plain_count=derived.plain_count,
        layout=kernels.layout,
    )
    text = f"{manifest.digest} {name} {precision.fingerprint} {ours.weights_sha256}"
    text += "" if kernels.layout == "onednn" else f" {kernels.layout}"
    return _named(msgspec.structs.replace(ours, precision=precision), manifest, name, text)


def _times(walks: tuple[Walk, Walk], timed: Sequence[Sequence[torch.Tensor]]) -> list[Times]:
    """Return the milliseconds of a run of both graphs, for each of the inputs."""
    return [tuple(map(sum, call_times(*walks, inputs=one))) for one in timed]


def _measured(times: Sequence[Times], errors: Sequence[float]) -> dict[str, Any]:
    """Return the measured fields of ``Precision``: both times (0: not measured) and the errors."""
    plain_ms, ms = times[0] if times else (0.0, 0.0)
    max_error, mean_error, agreement = errors
    return {
        "plain_ms": plain_ms,
        "ms": ms,
        "max_error": max_error,
        "mean_error": mean_error,
        "agreement": agreement,
    }


def _with_copies(manifest: Manifest) -> Manifest:
    """Return the manifest with more ``intermediate_bytes``, for a run's copies in other dtypes."""
    held_bytes = manifest.extra.get("intermediate_bytes", 0)
    int8_bytes = [spec.size_bytes for spec in manifest.tensors if spec.dtype == "int8"]
    taken_bytes = held_bytes + held_bytes // 2 + 2 * max(int8_bytes, default=0)
    extra = {**manifest.extra, "intermediate_bytes": taken_bytes}
    return msgspec.structs.replace(manifest, extra=extra)


def _runner(program: GraphProgram, storage: torch.UntypedStorage) -> Run:
    bound = program.bind(lambda spec: tensor_over(storage, spec, 0))

    def run(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        with workers_default_dtype():
            return bound.run([value.clone() for value in inputs], lambda index: None)

    return run


def _shapes(manifest: Manifest, is_decoder: bool) -> list[Values]:
    """Return the extents at which programs are compared: the example, a batch, the ranges' ends.

    For a language model the example is one token of one sequence, its most frequent step.
    """
    example: dict[str, int] = dict(manifest.extra["example_dims"])
    if is_decoder:
        lows = {dim.name: dim.low for dim in manifest.dims}
        example |= {name: max(1, lows[name]) for name in ("length", BATCH) if name in lows}
    shapes: list[Values] = [example]
    for dim in manifest.dims:
        if dim.name == BATCH and example[BATCH] != (several := min(SEVERAL, dim.high)):
            shapes.append({**example, BATCH: several})
    dims = [
        msgspec.structs.replace(dim, high=max(dim.low, min(dim.high, MAX_ROWS)))
        if dim.name == BATCH
        else dim
        for dim in manifest.dims
    ]
    shapes += [values for values in corners(dims) if values not in shapes]
    return shapes[:MAX_SHAPES]


def _gain(
    name: str, shapes: Sequence[Values], times: Sequence[tuple[float, ...]], *, saves: bool
) -> tuple[str, str]:
    """Return the reason to stay exact (empty: use the derived program), and a note of the times."""
    summary = " and ".join(
        f"{ours_ms:.3g} ms instead of {plain_ms:.3g} at {values_text(values)}"
        for values, (plain_ms, ours_ms) in zip(shapes, times, strict=False)
    )
    if not times:
        refusal = "" if saves or name == "fast" else "it saves no bytes"
        return refusal, f"precision {name}: not timed on the GPU"
    plain_sum_ms, sum_ms = map(sum, zip(*times, strict=True))
    is_slower = sum_ms >= plain_sum_ms
    if name == "fast":
        gains = sum_ms <= (1.0 - MIN_GAIN) * plain_sum_ms
        gains &= all(ours_ms <= (1.0 + MAX_LOSS) * plain_ms for plain_ms, ours_ms in times)
        return "" if gains else summary, f"precision {name}: {summary}"
    slower = ": slower" if is_slower else ""
    return "" if saves else "it saves no bytes", f"precision {name}: {summary}{slower}"


def stays_exact(manifest: Manifest, name: str, why: str) -> Manifest:
    """Return the plain program's manifest with a note and a new digest.
    The same program without a note may have been registered as exact under the old digest."""
    noted = with_note(manifest, f"precision {name}: {why}; it stays exact")
    return _named(noted, manifest, name, f"{manifest.digest} {name} stays exact")


def _named(ours: Manifest, plain: Manifest, name: str, text: str) -> Manifest:
    """Return ``ours`` with a digest of ``text``, and a ``program`` digest equal on all machines."""
    program, digest = (
        hashlib.sha256(one.encode()).hexdigest() for one in (f"{plain.digest} {name}", text)
    )
    extra = {**ours.extra, "program": program}
    return msgspec.structs.replace(ours, digest=digest, extra=extra)


def with_note(manifest: Manifest, note: str) -> Manifest:
    """Return a manifest with one more note."""
    notes = [*manifest.extra.get("notes", ()), note]
    return msgspec.structs.replace(manifest, extra={**manifest.extra, "notes": notes})


def _written(
    manifest: Manifest, bundle: Bundle, derived: Derived, path: Path, bucket_bytes: int
) -> tuple[Manifest, torch.Tensor]:
    """Write the derived bundle; return its manifest and the image of its region."""
    graph = derived.graph
    tensors = [
        (name, str(data.dtype).removeprefix("torch."), tuple(data.shape))
        for name, data in zip(graph.weights, derived.weights, strict=True)
    ]
    data = (tensor_bytes(weight.contiguous()) for weight in derived.weights)
    write_bundle(path, graph, tensors, data, bundle.generation)
    read = read_bundle(path, is_derived=True)
    weights = [UnplacedWeight(t.name, t.dtype, t.shape, t.size_bytes) for t in read.tensors]
    layers = layers_of_graph(read.graph)
    plan = default_plan(layers, weights, bucket_bytes)
    offsets = [tensor.file_offset_bytes for tensor in read.tensors]
    specs, layer_specs, groups, total_bytes = place(layers, weights, plan, offsets)
    ours = msgspec.structs.replace(
        manifest,
        tensors=specs,
        layers=layer_specs,
        groups=groups,
        total_bytes=total_bytes,
        extra={**manifest.extra, "last_readers": last_readers(read.graph)},
    )
    image = load_image(path, ours)
    sha256 = hashlib.sha256(tensor_bytes(image)).hexdigest()
    return msgspec.structs.replace(ours, weights_sha256=sha256), image


def _compared(
    plain: Run, fast: Run, inputs: Sequence[Sequence[torch.Tensor]], name: str, limit: float
) -> tuple[float, float, float]:
    """Return the maximum and the mean error, relative to the largest output, and the agreement.
    Agreement is the share of the first output's rows whose largest element has the same index."""
    errors, means, rows, agreed = [0.0], [0.0], 0, 0
    for batch in inputs:
        for number, (theirs, ours) in enumerate(zip(plain(batch), fast(batch), strict=True)):
            is_number = theirs.is_floating_point()
            is_ranked = theirs.dim() > 0 and theirs.numel() > 0
            if number == 0 and (is_ranked or not is_number):
                pair = (ours.argmax(-1), theirs.argmax(-1)) if is_number else (ours, theirs)
                rows, agreed = rows + pair[0].numel(), agreed + int((pair[0] == pair[1]).sum())
            if not is_number:
                continue
            if bool((ours.isfinite() != theirs.isfinite()).any()):
                raise RegistrationRefused(
                    f"precision {name!r}",
                    f"output {number} is not finite",
                    hint="register it with precision exact",
                )
            is_real = theirs.isfinite()
            difference = (ours - theirs).abs()[is_real].double()
            scale = largest_number(theirs)
            if difference.numel():
                errors.append(float(difference.max()) / (scale or 1.0))
                means.append(float(difference.mean()) / (scale or 1.0))
    if max(errors) > limit or max(means) > GROSS_ERROR:
        raise RegistrationRefused(
            f"precision {name!r}",
            f"the error is {max(errors):.1e} of the largest output (mean {max(means):.1e}), the "
            f"limit {limit:g} (mean {GROSS_ERROR:g})",
            hint="register it with precision exact or a larger max_error",
        )
    return max(errors), max(means), agreed / rows if rows else 1.0
