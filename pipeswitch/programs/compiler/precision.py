"""Programs in another precision: derived from the verified program, and compared with it.

``fast`` packs the weights of linear layers and convolutions, folds a BatchNorm into the convolution
before it, and fuses activations and residual additions into convolutions and linear layers
(``fusing``). Clients cannot send packed weights: their bundles are plain, and this module packs.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

import msgspec
import torch

from ...base.errors import RegistrationRefused
from ..graphs.bundle import Bundle, Graph, read_bundle, write_bundle
from ..graphs.graph import last_readers
from ..graphs.indices import lookups
from ..graphs.partition import UnplacedWeight, default_plan, layers_of_graph, place
from ..interface.dims import BATCH, Values, corners, values_of, values_text
from ..interface.layout import BUNDLE_FILE, KindSettings, Manifest
from ..interface.packing import DERIVED_FILE, HALF, Precision
from ..running.executor import GraphProgram, PackedKernels
from ..running.tensor_views import tensor_over
from ..running.values import tensor_bytes
from ..spec import BuildSpec, fingerprint
from .batching_check import is_batch_invariant
from .checking import differences, workers_default_dtype
from .fusing import PRODUCTS, TIMED, Derived, Walk, call_times, fused, walk
from .lowering import MAX_COARSE, lowered
from .verify import answered, load_examples, load_image

MAX_ERROR: Final = {"bf16": 5e-2, "int8": 1e-1}
"""Default limits of the error, relative to the largest output; ``fast``: ``kernels.fast_error``."""
GROSS_ERROR: Final = 0.1  # limit of the mean error, relative to the largest output; cannot be set
MIN_GAIN: Final = 0.03  # ``fast`` must save this share of the plain time; less may be noise
MAX_LOSS: Final = 0.1  # ``fast`` may be slower at one shape by this share of the plain time
MAX_SHAPES: Final = 6  # maximum number of shapes at which the outputs of both programs are compared
SEVERAL: Final = 8  # rows of the batch at which both programs are timed
MAX_ROWS: Final = 16  # maximum batch of the comparison; more rows take long and show nothing new
MIN_INPUTS: Final = 3  # minimum number of further random inputs of the comparison, and the maximum;
MAX_INPUTS: Final = 16  # after the minimum, none begins when ``COMPARED_S`` have been computed
COMPARED_S: Final = 3.0
PLAIN_CALLS: Final = "plain_calls"
"""In ``Manifest.extra``: fingerprint -> positions of products that ``fast`` leaves plain there."""
MAX_MACHINES: Final = 8  # maximum number of these fingerprints
MAX_PROBED: Final = 4  # maximum number of inputs in which a NaN and an infinity are tried


Run = Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]
Times = tuple[float, ...]
# Inputs, and the plain program's answer.
Pair = tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]


def derive(
    manifest: Manifest,
    folder: Path,
    spec: BuildSpec,
    kernels: PackedKernels,
    known: Precision | None = None,
) -> Manifest:
    """Write the program in the precision of ``spec`` into ``folder`` and return its manifest.

    If the derived program is not faster (``fast``) or smaller (others), return the plain program's
    manifest with a note. With ``known``, an earlier build's times, none are measured.

    Raises:
        RegistrationRefused: an output is not finite, or its error is above ``max_error``.
    """
    name, bundle = spec.precision, read_bundle(folder / BUNDLE_FILE)
    max_error = spec.max_error or MAX_ERROR.get(name, kernels.fast_error)
    storage = load_image(folder / BUNDLE_FILE, manifest).untyped_storage()
    weights = [tensor_over(storage, spec, 0) for spec in manifest.tensors]
    plain = _runner(GraphProgram(manifest, bundle.graph, "cpu"), storage)
    examples = load_examples(folder / BUNDLE_FILE, bundle)
    shapes = _shapes(manifest, examples, bundle.settings)
    pairs = [answered(manifest.inputs, one, examples, plain) for one in shapes]
    pairs[:1] = [(examples, plain(examples))] if examples else pairs[:1]
    timed = [one for one, _ in pairs]
    here = fingerprint(kernels.layout, torch.get_num_threads())
    # The same calls as in an earlier build, so that a rebuild has the same bits.
    chosen = manifest.extra.get(PLAIN_CALLS, {}).get(here) if name == "fast" else None
    derived = fused(bundle.graph, weights, timed, kernels, name, chosen)
    if name == "fast" and not derived.packed_count:
        return _gains_nothing(manifest, bundle.graph, name, here, "nothing gets faster")
    path = folder / DERIVED_FILE
    draw = partial(answered, manifest.inputs, shapes[0], examples, plain)
    for max_coarse in (MAX_COARSE, 0.0) if name == "int8" else (0.0,):
        form = derived if name == "fast" else lowered(derived, timed[0], kernels, max_coarse)
        ours, image = _written(manifest, bundle, form, path, spec.bucket_bytes)
        fast = _runner(GraphProgram(ours, form.graph, "cpu", kernels), image.untyped_storage())
        try:
            errors = _compared(fast, itertools.chain(pairs, _more(draw)), name, max_error)
            _check_not_finite(plain, fast, timed[0], name)
            break
        except RegistrationRefused as refusal:
            if not max_coarse:
                raise _explained(refusal, bundle.graph.weights, weights) from None
        except RuntimeError as error:  # raised by torch for a call that needs another layout
            path.unlink()
            return stays_exact(manifest, name, str(error)[:200])
    walks = walk(bundle.graph, weights), walk(form.graph, form.weights, kernels)
    times = _times_ms(walks, timed[:TIMED], known) if kernels.computes_here else []
    why_exact, note = _gain(name, shapes, times, saves=ours.total_bytes < manifest.total_bytes)
    if why_exact and chosen is None:
        path.unlink()
        return _gains_nothing(manifest, bundle.graph, name, here, why_exact)
    ours = _with_copies(ours) if name in HALF else _with_plain_calls(ours, here, form.plain)
    ours = with_note(ours, note + (", as measured before" if known else ""))
    is_invariant = is_batch_invariant(ours, fast, spec, known) if times else None
    precision = _precision(name, manifest, form, kernels, is_invariant, times, errors)
    text = f"{manifest.digest} {name} {here} {ours.weights_sha256} {_digest(examples)}"
    text += "" if kernels.layout == "onednn" else f" {kernels.layout}"
    return _named(msgspec.structs.replace(ours, precision=precision), manifest, name, text)


def _digest(examples: Sequence[torch.Tensor]) -> str:
    return hashlib.sha256(b"".join(map(tensor_bytes, examples))).hexdigest()


def _precision(
    name: str,
    plain: Manifest,
    derived: Derived,
    kernels: PackedKernels,
    is_invariant: bool | None,
    times: Sequence[Times],
    errors: Sequence[float],
) -> Precision:
    """Return what was measured; times of 0: they were not."""
    plain_ms, ms = times[0] if times else (0.0, 0.0)
    max_error, mean_error, agreement = errors
    return Precision(
        plain_ms=plain_ms,
        ms=ms,
        max_error=max_error,
        mean_error=mean_error,
        agreement=agreement,
        name=cast(Any, name),
        fingerprint=fingerprint(kernels.layout, torch.get_num_threads()),
        plain_bytes=plain.total_bytes,
        is_batch_invariant=is_invariant,
        weights=tuple((one.name, one.dtype, one.shape) for one in plain.tensors),
        packed_count=derived.packed_count,
        plain_count=len(derived.plain),
        layout=kernels.layout,
    )


def _times_ms(
    walks: tuple[Walk, Walk], timed: Sequence[Sequence[torch.Tensor]], known: Precision | None
) -> list[Times]:
    """Return the milliseconds of a run of both graphs, for each of the inputs, or known ones."""
    if known is not None:
        return [(known.plain_ms, known.ms)]
    return [tuple(map(sum, call_times(*walks, inputs=one))) for one in timed]


def _with_copies(manifest: Manifest) -> Manifest:
    """Return the manifest with more ``intermediate_bytes``, for a run's copies in other dtypes."""
    held_bytes = manifest.extra.get("intermediate_bytes", 0)
    int8_bytes = [spec.size_bytes for spec in manifest.tensors if spec.dtype == "int8"]
    taken_bytes = held_bytes + held_bytes // 2 + 2 * max(int8_bytes, default=0)
    extra = {**manifest.extra, "intermediate_bytes": taken_bytes}
    return msgspec.structs.replace(manifest, extra=extra)


def _with_plain_calls(manifest: Manifest, here: str, plain: Sequence[int]) -> Manifest:
    """Return the manifest with the products that stay plain on this machine."""
    calls = [*manifest.extra.get(PLAIN_CALLS, {}).items(), (here, [*plain])][-MAX_MACHINES:]
    return msgspec.structs.replace(manifest, extra={**manifest.extra, PLAIN_CALLS: dict(calls)})


def _runner(program: GraphProgram, storage: torch.UntypedStorage) -> Run:
    bound = program.bind(lambda spec: tensor_over(storage, spec, 0))

    def run(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        with workers_default_dtype():
            return bound.run([value.clone() for value in inputs], lambda index: None)

    return run


def _shapes(
    manifest: Manifest, examples: Sequence[torch.Tensor], settings: KindSettings | None
) -> list[Values]:
    """Return the extents at which programs are compared: the example, a batch, the ranges' ends.

    Dimensions that most runs have at their lowest extents (``low_dims``) are so in the example.
    """
    extents = (spec.shape for spec in manifest.inputs)
    own = values_of(extents, (one.shape for one in examples)) if examples else None
    example: dict[str, int] = own or dict(manifest.extra["example_dims"])
    low_dims = () if settings is None else settings.low_dims
    example |= {dim.name: max(1, dim.low) for dim in manifest.dims if dim.name in low_dims}
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


def _gains_nothing(manifest: Manifest, graph: Graph, name: str, here: str, why: str) -> Manifest:
    """Return ``stays_exact``'s manifest; for ``fast``, record this: nothing is timed again."""
    products = [at for at, one in enumerate(graph.nodes) if one.target in PRODUCTS]
    noted = _with_plain_calls(manifest, here, products) if name == "fast" else manifest
    return stays_exact(noted, name, why)


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
    write_bundle(path, graph, tensors, data, bundle.settings)
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
        lookups=lookups(read.graph),
        extra={**manifest.extra, "last_readers": last_readers(read.graph)},
    )
    image = load_image(path, ours)
    sha256 = hashlib.sha256(tensor_bytes(image)).hexdigest()
    return msgspec.structs.replace(ours, weights_sha256=sha256), image


def _more(draw: Callable[[int], Pair]) -> Iterator[Pair]:
    """Yield further random inputs with their answers, as many as take some seconds."""
    began_s = time.thread_time()
    for seed in range(1, MAX_INPUTS + 1):
        if seed > MIN_INPUTS and time.thread_time() - began_s > COMPARED_S:
            return
        yield draw(seed)


def _compared(
    fast: Run, pairs: Iterable[Pair], name: str, limit: float
) -> tuple[float, float, float]:
    """Return a bound of the error, the mean error, and the agreement, for inputs with answers.

    Both errors are relative to the largest output. The bound is above the largest error that was
    seen, since other inputs have other errors: by more, the fewer inputs there were. Agreement is
    the share of rows of the first output whose largest element has the same index, or of integers.
    """
    errors, means, shares, rows, agreed, count = [0.0], [0.0], [0.0], 0, 0, 0
    for inputs, answers in pairs:
        count += 1
        for number, (theirs, ours) in enumerate(zip(answers, fast(inputs), strict=True)):
            is_number = theirs.is_floating_point()
            is_ranked = theirs.dim() > 0 and theirs.numel() > 0
            if (number == 0 and is_ranked) or not is_number:
                pair = (ours.argmax(-1), theirs.argmax(-1)) if is_number else (ours, theirs)
                rows, agreed = rows + pair[0].numel(), agreed + int((pair[0] == pair[1]).sum())
            if bool((ours.isfinite() != theirs.isfinite()).any()):
                raise _refused(name, f"output {number} is not finite")
            difference, scale = differences(ours, theirs)
            if not difference.numel():
                continue
            error, mean = (
                float(one) / (scale or 1.0) for one in (difference.max(), difference.mean())
            )
            errors.append(error)
            # Of integers that are choices, few may differ, by however much.
            share = error if is_number else min(error, float((difference > 0).double().mean()))
            means, shares = [*means, min(mean, share)], [*shares, share]
    margin = 1.0 + 2.0 / math.sqrt(count)
    bound = max(errors) * margin
    if max(shares) * margin > limit or max(means) > GROSS_ERROR:
        what = f"the error is {bound:.1e} of the largest output (mean {max(means):.1e}), the "
        what += f"limit {limit:g} (mean {GROSS_ERROR:g})"
        raise _refused(name, what, " or a larger max_error")
    return bound, max(means), agreed / rows if rows else 1.0


def _refused(name: str, why: str, or_: str = "") -> RegistrationRefused:
    hint = f"register it with precision exact{or_}"
    return RegistrationRefused(f"precision {name!r}", why, hint=hint)


def _explained(
    refusal: RegistrationRefused, names: Sequence[str], weights: Sequence[torch.Tensor]
) -> RegistrationRefused:
    """Return the refusal; its reason names weights that are not finite, or not in bfloat16."""
    pairs = [(n, w) for n, w in zip(names, weights, strict=True) if w.is_floating_point()]
    odd = [n for n, w in pairs if not bool(w.to(torch.bfloat16).isfinite().all())][:3]
    why = f"; {', '.join(odd)}: numbers that are not finite or overflow bfloat16" if odd else ""
    return RegistrationRefused(refusal.part, refusal.reason + why, hint=refusal.hint)


def _check_not_finite(plain: Run, fast: Run, inputs: Sequence[torch.Tensor], name: str) -> None:
    """Refuse a program that answers NaN or infinity in an input with more numbers than the plain
    one."""
    floats = [at for at, one in enumerate(inputs) if one.is_floating_point() and one.numel()]
    for at, odd in itertools.product(floats[:MAX_PROBED], (math.nan, math.inf)):
        probe = [value.clone() for value in inputs]
        probe[at].view(-1)[probe[at].numel() // 2] = odd
        answers: Sequence[torch.Tensor] = ()
        with contextlib.suppress(Exception):  # the plain model's code may refuse it
            answers = plain(probe)
        pairs = enumerate(zip(answers, fast(probe) if answers else (), strict=True))
        wrong = [at for at, (a, b) in pairs if bool((b.isfinite() & ~a.isfinite()).any())]
        if wrong:
            raise _refused(name, f"output {wrong[0]} has numbers where an input is {odd}")
