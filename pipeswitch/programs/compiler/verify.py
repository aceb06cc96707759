"""Checks that a program computes the plain module's bits, for registration and tests."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec
import torch

from ...base.errors import RegistrationRefused
from ..graphs.bundle import Bundle
from ..interface.dims import Values
from ..interface.layout import Manifest, ValueSpec
from ..interface.synthetic_inputs import MAX_RANDOM_INTEGER
from ..running.executor import BoundProgram
from .checking import on_clones, resized, same_bits, to_tensors, workers_default_dtype

__all__ = ["Plain", "acceptable_inputs", "compare", "load_image", "same_bits", "to_tensors"]

UNLIKE: Final = 8.0  # columns of an example differ if their means vary by this ratio (1: by chance)
Plain = Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]


def compare(
    manifest: Manifest,
    bound: BoundProgram,
    plain: Plain,
    inputs: Sequence[torch.Tensor],
    is_same: Callable[[torch.Tensor, torch.Tensor], bool] = same_bits,
    expected: Sequence[torch.Tensor] | None = None,
) -> str:
    """Return how group-wise and plain execution differ, as text; empty if they are equal.

    ``expected`` is the result of ``plain``, if it is known.
    """
    opened: list[int] = []
    expected = on_clones(plain, inputs) if expected is None else expected
    # A module has its own torch settings; a graph runs with a worker's settings.
    with workers_default_dtype() if manifest.mode == "graph" else contextlib.nullcontext():
        outputs = bound.run([value.clone() for value in inputs], opened.append)
    if opened != list(range(len(manifest.groups))):
        return "its groups were not entered once each and in order"
    if len(outputs) != len(expected):
        return f"{len(outputs)} outputs instead of {len(expected)}"
    for index, (theirs, ours) in enumerate(zip(expected, outputs, strict=True)):
        if not is_same(ours, theirs):
            again = on_clones(plain, inputs)[index]
            name = manifest.outputs[index].name
            if not same_bits(theirs, again):
                return f"output {name!r} of the plain module differs from run to run"
            return f"output {name!r} differs from the plain module's"
    return ""


def acceptable_inputs(
    specs: Sequence[ValueSpec], values: Values, plain: Plain, seed: int = 0
) -> list[torch.Tensor]:
    """Return random inputs that ``plain`` accepts.

    A signature does not say what integers mean. If random integers are invalid (as indices into ten
    rows, as offsets of bags), zeros usually are valid, or ones (as lengths of sequences).
    """
    return _accepted(specs, values, plain, seed)[0]


def _accepted(
    specs: Sequence[ValueSpec], values: Values, plain: Plain, seed: int
) -> tuple[list[torch.Tensor], list[torch.Tensor] | None]:
    """Return ``acceptable_inputs``, and the answer to them if it was computed."""
    inputs = to_tensors(specs, values, seed)
    if all(value.is_floating_point() or value.dtype is torch.bool for value in inputs):
        return inputs, None
    zeros, ones = (
        [v if v.is_floating_point() else torch.full_like(v, number) for v in inputs]
        for number in (0, 1)
    )
    for tried in (inputs, zeros):
        with contextlib.suppress(Exception):  # a model's code may raise anything
            return tried, on_clones(plain, tried)
    return ones, None


def answered(
    specs: Sequence[ValueSpec],
    values: Values,
    examples: Sequence[torch.Tensor],
    plain: Plain,
    seed: int = 0,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return inputs like the examples, other ones for each ``seed``, and what ``plain`` answers.

    If ``plain`` refuses such inputs, they are the examples, or random ones (no examples, too).

    Raises:
        Exception: the module's own exception, if it refuses all of them.
    """
    if examples:
        sized = resized([spec.shape for spec in specs], examples, values)
        generator = torch.Generator().manual_seed(seed)
        drawn = [
            value if "mask" in spec.name else like(example, value, generator)
            for spec, example, value in zip(specs, examples, sized, strict=True)
        ]
        for inputs in (drawn, sized):
            with contextlib.suppress(Exception):  # the module's code refuses an index or a number
                return inputs, on_clones(plain, inputs)
    inputs, answers = _accepted(specs, values, plain, seed)
    return inputs, on_clones(plain, inputs) if answers is None else answers


def like(example: torch.Tensor, sized: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return random values in the range and at the scale of an example.

    Args:
        sized: the example, repeated or cut to the new extents.
    """
    numbers = example.double()
    if example.dtype is torch.bool or not example.numel() or not bool(numbers.isfinite().all()):
        return sized
    mean, deviation, low, high = _statistics(numbers, sized.shape)
    if not example.is_floating_point():
        low, high = low.round(), high.round()
        part = torch.rand(sized.shape, generator=generator, dtype=torch.float64)
        return (low + (part * (high - low + 1)).floor()).to(example.dtype)
    drawn = mean + deviation * torch.randn(sized.shape, generator=generator, dtype=torch.float64)
    # The model may take roots or logarithms; a constant says nothing about signs.
    has_sign = ((low >= 0) | (high <= 0)) & bool(numbers.amin() < numbers.amax())
    return torch.where(has_sign, drawn.clamp(low, high), drawn).to(example.dtype)


Statistics = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _statistics(numbers: torch.Tensor, shape: Sequence[int]) -> Statistics:
    """Return the mean, the deviation, and the ends of an example's numbers.

    They are those of each column (or channel) if these differ by more than their numbers do. A
    single row of numbers of very unequal sizes has columns, too, and varies by a tenth.
    """
    every = tuple(range(numbers.dim()))
    best, over = UNLIKE, every
    for axis in every[1:]:
        extent, others = shape[axis], tuple(one for one in every if one != axis)
        count = numbers.numel() // numbers.shape[axis]
        if numbers.shape[axis] == extent > 1 and count > 1:
            within = numbers.var(others).mean().clamp(min=1e-300)
            ratio = float(count * numbers.mean(others).var() / within)
            best, over = (ratio, others) if ratio > best else (best, over)
    low, high = numbers.amin(over, True), numbers.amax(over, True)
    mean, deviation = numbers.mean(over, True), numbers.std(over, correction=0, keepdim=True)
    sizes = numbers.abs()
    is_row = len(every) > 1 and numbers.numel() == numbers.shape[-1] == shape[-1]
    if is_row and float(sizes.max()) > UNLIKE * 2 * float(sizes.median()) > 0.0:
        mean, deviation = numbers, 0.1 * sizes
        return mean, deviation, mean - deviation, mean + deviation
    if over == every and bool((low == high).all()):  # a constant says little
        if float(sizes.max()) > 1.0:
            return mean, 0.1 * sizes.amax(over, True), low.clamp(max=0), low.clamp(min=0)
        one = torch.ones_like(low)
        return 0 * one, one, low.clamp(max=0), MAX_RANDOM_INTEGER * one
    return mean, deviation, low, high


def load_image(path: Path, manifest: Manifest) -> torch.Tensor:
    """Return the region's image as it will be in the host store, with zeros as padding."""
    image = torch.zeros(max(manifest.total_bytes, 1), dtype=torch.uint8)
    view = image.numpy().data
    with path.open("rb") as file:
        for tensor in manifest.tensors:
            file.seek(tensor.file_offset_bytes)
            end = tensor.offset_bytes + tensor.size_bytes
            if file.readinto(view[tensor.offset_bytes : end]) != tensor.size_bytes:
                raise RegistrationRefused(f"weight {tensor.name!r}", "the file is too short")
    return image[: manifest.total_bytes]


def with_digests(manifest: Manifest, path: Path) -> Manifest:
    """Return the manifest with the digest of each tensor's bytes in the weights file."""
    tensors = []
    with path.open("rb") as file:
        for tensor in manifest.tensors:
            file.seek(tensor.file_offset_bytes)
            digest = hashlib.sha256(file.read(tensor.size_bytes)).hexdigest()
            tensors.append(msgspec.structs.replace(tensor, digest=digest))
    return msgspec.structs.replace(manifest, tensors=tuple(tensors))


def load_examples(path: Path, bundle: Bundle) -> list[torch.Tensor]:
    """Return the example inputs that a bundle keeps; empty if it keeps none."""
    examples = []
    with path.open("rb") as file:
        for one in bundle.examples:
            file.seek(one.file_offset_bytes)
            data = torch.zeros(one.size_bytes, dtype=torch.uint8)
            if file.readinto(data.numpy().data) != one.size_bytes:
                raise RegistrationRefused(f"weight {one.name!r}", "the file is too short")
            examples.append(data.view(getattr(torch, one.dtype)).view(one.shape))
    return examples
