"""Checks whether a program's requests can be batched, and how that changes their answers."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final

import msgspec
import torch

from ...base.errors import RegistrationRefused
from ...devices.cpu.packed import KERNELS
from ..graphs.bundle import read_bundle
from ..graphs.manifest_check import check_joinable
from ..interface.dims import BATCH, Values, at_batch, largest, shape_at
from ..interface.layout import MAX_JOINED_BYTES, Batching, Manifest, ValueSpec
from ..interface.packing import HALF, Precision
from ..running.executor import GraphProgram, PackedKernels
from ..running.tensor_views import cut, padded, tensor_over
from ..spec import BuildSpec, batched_as, weights_file
from .checking import ROUNDING, is_rounded, same_bits, workers_default_dtype
from .verify import Plain, acceptable_inputs, load_image

MAX_COMPARED: Final = 16  # rows of a batch that are compared with the same rows computed alone
BATCHES: Final = (2, 3, 5, 8, 13)  # sizes of batches that are compared with single rows
MAX_KEPT_BYTES: Final = 64 << 20  # answers to single rows that are kept for the next size


def with_batching(
    manifest: Manifest,
    limit: int,
    delay_ms: float,
    folder: Path,
    kernels: PackedKernels = KERNELS,
) -> Manifest:
    """Return the manifest of a program whose requests are batched, up to ``limit``.

    Rows of a batch are compared with the same rows computed alone, for a batch of two requests and
    for one of ``limit``. If the program pads requests, the compared requests have unequal extents.

    Args:
        kernels: the server's operators. For GPUs, ``Batching.is_exact`` is False.

    Raises:
        RegistrationRefused: ``check_joinable`` refuses the program, or the answer to a request
            depends on the other requests of its batch by more than rounding.
    """
    check_joinable(manifest, limit)
    path = folder / weights_file(manifest)
    image = load_image(path, manifest)
    is_derived = manifest.precision is not None
    graph = read_bundle(path, is_derived=is_derived).graph
    program = GraphProgram(manifest, graph, "cpu", kernels if is_derived else None)
    bound = program.bind(lambda tensor: tensor_over(image.untyped_storage(), tensor, 0))

    def compute(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        with torch.no_grad(), workers_default_dtype():
            return [value.clone() for value in bound.run(inputs, lambda index: None)]

    low = manifest.batch[0]
    rows = limit // low * low
    most = 0.0
    if manifest.precision is not None:
        is_half = manifest.precision.name in HALF
        most = ROUNDING[torch.bfloat16] if is_half else kernels.fast_error
    is_exact = _are_exact(manifest, {2 * low, rows}, compute, most)
    batching = Batching(limit=limit, delay_ms=delay_ms, is_exact=is_exact and kernels.computes_here)
    at_most = largest(manifest.dims) | {BATCH: limit}
    batched_bytes = sum(value.size_bytes(at_most) for value in manifest.inputs)
    taken_bytes = manifest.extra.get("intermediate_bytes", 0) + (
        min(batched_bytes, MAX_JOINED_BYTES) if manifest.pads else batched_bytes
    )
    digest = hashlib.sha256(manifest.digest.encode() + msgspec.json.encode(batching))
    return msgspec.structs.replace(
        manifest,
        batching=batching,
        digest=digest.hexdigest(),
        extra={**manifest.extra, "intermediate_bytes": taken_bytes},
    )


def is_batch_invariant(
    manifest: Manifest, compute: Plain, spec: BuildSpec, known: Precision | None
) -> bool | None:
    """Return whether a batch's rows have the bits of rows computed alone; None without batches.

    With an invariant ``known`` only the largest batch is tried, otherwise its verdict is returned.
    """
    if known is not None and not known.is_batch_invariant:
        return known.is_batch_invariant
    low, high = manifest.batch
    limit, _ = batched_as(manifest, spec) or (high, 0.0)
    limit = min(limit, MAX_COMPARED * low)
    try:
        check_joinable(manifest, limit)
    except RegistrationRefused:
        return None
    more = () if known else BATCHES
    sizes = {size * low for size in (*more, limit // low) if 1 < size <= limit // low}
    try:
        return _are_exact(manifest, sizes, compute, 0.0)
    except RegistrationRefused:  # rows differ by more than rounding, or integers differ
        return False


def _are_exact(manifest: Manifest, sizes: Iterable[int], compute: Plain, most: float) -> bool:
    """Return whether rows in batches of these sizes equal the rows computed alone, bit for bit.

    A difference beyond rounding is refused. ``most`` is the accepted rounding, relative to the
    largest number; ``ROUNDING`` of the dtype counts instead if it is larger.
    """
    low, sizes = manifest.batch[0], sorted(sizes)
    if manifest.pads:
        verdicts = [_is_exact_padded(manifest, low, size, compute, most) for size in sizes]
    else:
        inputs = acceptable_inputs(manifest.inputs, at_batch(manifest.dims, sizes[-1]), compute)

        def alone(start: int) -> Sequence[torch.Tensor]:
            return compute([value[start : start + low].contiguous() for value in inputs])

        answer_bytes = sum(one.size_bytes(at_batch(manifest.dims, low)) for one in manifest.outputs)
        keeps = answer_bytes * MAX_COMPARED <= MAX_KEPT_BYTES
        own = functools.cache(alone) if keeps else alone
        verdicts = [_is_exact(manifest, inputs, low, size, compute, own, most) for size in sizes]
    return all(verdicts)


def _is_exact(
    manifest: Manifest,
    inputs: Sequence[torch.Tensor],
    low: int,
    size: int,
    compute: Plain,
    own: Callable[[int], Sequence[torch.Tensor]],
    most: float,
) -> bool:
    """Return True if rows of a batch of ``size`` equal those of batches of ``low``, bit for bit.

    ``own`` returns the answer to the ``low`` rows from a row on, computed alone.
    """
    together = compute([value[:size].contiguous() for value in inputs])
    is_exact = True
    step = -(-size // low // MAX_COMPARED) * low
    for start in range(0, size, step):
        for spec, batched, alone in zip(manifest.outputs, together, own(start), strict=True):
            rows = batched[start : start + low]
            if not same_bits(rows.contiguous(), alone.contiguous()):
                is_exact = False
                _check_rounding(spec, rows, alone, most)
    return is_exact


def _is_exact_padded(manifest: Manifest, low: int, size: int, compute: Plain, most: float) -> bool:
    """Return the same as ``_is_exact`` for padded requests with extents near their low ends."""
    requests, extents = [], []
    for number in range(size // low):
        values = {
            d.name: d.low + number * (2 * k + 1) % min(9, d.high - d.low + 1)
            for k, d in enumerate(manifest.dims)
        }
        values[BATCH] = low
        count = functools.partial(_with_counts, manifest, values)
        inputs = acceptable_inputs(
            manifest.inputs, values, functools.partial(_counted, compute, count)
        )
        requests.append(count(inputs))
        extents.append(values)
    together = compute([padded(column) for column in zip(*requests, strict=True)])
    is_exact = True
    for number, (inputs, values) in enumerate(zip(requests, extents, strict=True)):
        for spec, batched, own in zip(manifest.outputs, together, compute(inputs), strict=True):
            rows = cut(batched[number * low :][:low], shape_at(spec.shape, values))
            if not same_bits(rows.contiguous(), own.contiguous()):
                is_exact = False
                _check_rounding(spec, rows, own, most)
    return is_exact


def _counted(compute: Plain, count: Plain, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return compute(count(inputs))


def _with_counts(
    manifest: Manifest, values: Values, inputs: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Return the inputs; inputs named in ``Manifest.pads`` are set to sizes before padding."""
    counted = {name: values[dim] for dim, name in manifest.pads.items()}
    return [
        torch.full_like(x, counted[spec.name]) if spec.name in counted else x
        for spec, x in zip(manifest.inputs, inputs, strict=True)
    ]


def _check_rounding(spec: ValueSpec, rows: torch.Tensor, own: torch.Tensor, most: float) -> None:
    if is_rounded(rows, own, most):
        return
    raise RegistrationRefused(
        f"output {spec.name!r}",
        "requests cannot be batched: an answer depends on the other requests of its batch",
        hint="leave --batch out",
    )
