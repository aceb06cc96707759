"""Checks that a program computes the plain module's bits, for registration and tests."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from ...base.errors import RegistrationRefused
from ..interface.dims import Values
from ..interface.layout import Manifest, ValueSpec
from ..running.executor import BoundProgram
from .checking import on_clones, same_bits, to_tensors, workers_default_dtype

__all__ = ["Plain", "acceptable_inputs", "compare", "load_image", "same_bits", "to_tensors"]

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
    inputs = to_tensors(specs, values, seed)
    if all(value.is_floating_point() or value.dtype is torch.bool for value in inputs):
        return inputs
    constant = [
        [v if v.is_floating_point() else torch.full_like(v, number) for v in inputs]
        for number in (0, 1)
    ]
    return next((tried for tried in (inputs, constant[0]) if _takes(plain, tried)), constant[1])


def _takes(plain: Plain, inputs: Sequence[torch.Tensor]) -> bool:
    try:
        with torch.no_grad():
            plain([value.clone() for value in inputs])
    except Exception:  # a model's code may raise anything; the caller's next run raises it again
        return False
    return True


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
