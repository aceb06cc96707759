"""Checks of a graph manifest's numbers before any process relies on them. Pure, no torch.

The builder of a client's program writes the manifest, and the program may have compromised the
builder. Scheduler, memory daemon and workers rely on the manifest. So its numbers must be those of
``partition.place``: tensors follow each other, and layers and groups cover all of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NoReturn

import msgspec

from ...base.errors import RegistrationRefused
from ...base.units import escape_control_chars
from ..interface import layout
from ..interface.dims import BATCH, names_in
from .bundle import MAX_NAME_CHARS, MAX_NODES, check_dtype_and_shape, is_name

MAX_TEXT_CHARS: Final = 4096
MAX_NOTES: Final = 64
_NUMBERS: Final = ("largest_value_bytes", "intermediate_bytes")  # keys of ``Manifest.extra``


def check_claims(manifest: layout.Manifest) -> None:
    """Refuse a graph's manifest whose numbers contradict each other.

    Raises:
        RegistrationRefused: a value is wrong; the error says which.
    """
    _check_texts(manifest)
    check_tensors(manifest.tensors, manifest.total_bytes)
    if not manifest.groups:
        _refuse("it has no groups")
    counts = [layer.tensor_count for layer in manifest.layers]
    if min(counts, default=-1) < 0 or sum(counts) != len(manifest.tensors):
        _refuse("its layers do not have each tensor once")
    _check_nodes(manifest.layers)
    _check_nodes(manifest.groups)
    _check_groups(manifest)
    readers = manifest.extra.get("last_readers")
    if not isinstance(readers, list) or len(readers) != len(manifest.tensors):
        _refuse("it does not say of each tensor which node reads it last")
    if any(type(node) is not int or not -1 <= node <= MAX_NODES for node in readers):
        _refuse("a tensor is read last by no node of it")
    for one in manifest.lookups:
        is_table = 0 <= one.table < len(manifest.tensors)
        indices = [value.dtype for value in manifest.inputs][one.index_input :]
        if not is_table or one.index_input < 0 or "int" not in "".join(indices[:1]):
            _refuse("the rows of a table are named by no input")
    if "pads" in manifest.extra:
        shapes = {value.name: value.shape for value in manifest.inputs}
        is_known = manifest.extra["pads"] == layout.PADS and manifest.mode == "graph"
        if not is_known or any(shapes.get(counted) != (BATCH,) for counted in layout.PADS.values()):
            _refuse("no inputs say how much of a padded one is real")
        if not {shape[1:2] for shape in shapes.values()} >= {(dim,) for dim in layout.PADS}:
            _refuse("it has not the dimensions that would be padded")
    if manifest.precision is not None:
        figures = msgspec.structs.astuple(manifest.precision)
        numbers = [one for one in figures if isinstance(one, int | float)]
        if not all(math.isfinite(one) and one >= 0 for one in numbers):
            _refuse("what its precision costs is not a number")
        for name, dtype, shape in manifest.precision.weights:
            check_dtype_and_shape(f"weight {escape_control_chars(name)[:80]!r}", dtype, shape)
    if manifest.batching is not None:
        limit, delay_ms = manifest.batching.limit, manifest.batching.delay_ms
        check_joinable(manifest, limit)
        if not (math.isfinite(delay_ms) and delay_ms >= 0):
            _refuse(f"requests would wait {delay_ms} ms for others")


def _check_texts(manifest: layout.Manifest) -> None:
    extra = manifest.extra
    notes = extra.get("notes", ())
    if not isinstance(notes, list | tuple) or len(notes) > MAX_NOTES:
        _refuse("its notes are no short list")
    unsaved = extra.get("unsaved", ())
    if not isinstance(unsaved, list | tuple) or len(unsaved) > len(manifest.tensors):
        _refuse("its unsaved weights are not a list of names")
    texts = [extra.get(key, "") for key in ("origin", "program")]
    for text in (manifest.source, manifest.mode_reason, *texts, *notes, *unsaved):
        if (
            not isinstance(text, str)
            or len(text) > MAX_TEXT_CHARS
            or escape_control_chars(text) != text
        ):
            _refuse("a text of it is too long, or has control characters")
    for key in _NUMBERS:
        if type(extra.get(key, 0)) is not int or extra.get(key, 0) < 0:
            _refuse(f"{key} is not a size")


def check_tensors(tensors: Sequence[layout.TensorSpec], total_bytes: int) -> None:
    """Refuse tensors with gaps or wrong sizes for their shapes, or bytes after the last tensor.

    Raises:
        RegistrationRefused: the error names the tensor.
    """
    position = 0
    for tensor in tensors:
        if not is_name(tensor.name):
            _refuse("the name of a tensor is empty, too long or has control characters")
        part = f"tensor {tensor.name!r}"
        if tensor.size_bytes != check_dtype_and_shape(part, tensor.dtype, tensor.shape):
            _refuse(f"{part} cannot have {tensor.size_bytes} bytes")
        if tensor.offset_bytes != position or tensor.file_offset_bytes < 0:
            _refuse(f"{part} does not follow the one before it")
        position += layout.aligned(tensor.size_bytes, layout.TENSOR_ALIGN_BYTES)
    if position != total_bytes:
        _refuse(f"its tensors take {position} bytes, it says {total_bytes}")


def _check_nodes(spans: Sequence[layout.LayerSpec | layout.GroupSpec]) -> None:
    node = 0
    for span in spans:
        if span.first_node != node or span.end_node < node:
            _refuse("layers or groups do not follow one another")
        node = span.end_node
    if node > MAX_NODES:
        _refuse(f"more than {MAX_NODES} nodes")


def _check_groups(manifest: layout.Manifest) -> None:
    """Refuse groups that leave gaps in the region, or do not contain its tensors in order."""
    position = index = 0
    for group in manifest.groups:
        end = position + group.size_bytes
        if group.offset_bytes != position or group.size_bytes < 0:
            _refuse("a group does not begin where the one before it ends")
        if group.tensors != tuple(range(index, index + len(group.tensors))):
            _refuse("its groups do not have the tensors in order")
        index += len(group.tensors)
        if index > len(manifest.tensors):
            _refuse("a group has a tensor that is not there")
        for tensor in manifest.tensors[index - len(group.tensors) : index]:
            if not position <= tensor.offset_bytes <= end - tensor.size_bytes:
                _refuse(f"tensor {tensor.name!r} does not lie in its group")
        if (
            len(group.label) > 2 * MAX_NAME_CHARS + 8
            or escape_control_chars(group.label) != group.label
        ):
            _refuse("the label of a group is too long or has control characters")
        position = end
    if (index, position) != (len(manifest.tensors), manifest.total_bytes):
        _refuse("its groups do not cover its tensors")


def check_joinable(manifest: layout.Manifest, limit: int) -> None:
    """Refuse a program whose requests cannot be batched up to ``limit``.

    Raises:
        RegistrationRefused: the batch is fixed, is not the first dimension, or does not allow
            ``limit``; or the program is in module mode.
    """
    low, high = manifest.batch
    if low == high or manifest.mode == "module":
        notes = "".join(f" ({note})" for note in manifest.extra.get("notes", ()))
        why = "a module may mix rows" if manifest.mode == "module" else f"it is fixed at {low}"
        raise RegistrationRefused(
            "batch",
            f"requests cannot be batched: {why}{notes}",
            hint=f"leave --batch out, or give the model a first dimension that requests choose "
            f"(--max-batch {max(limit, 2)})",
        )
    if limit > high:
        raise RegistrationRefused(
            "batch",
            f"{limit} is more than the model takes, {low} to {high}",
            hint=f"--batch {high}, or --max-batch {limit} where its source allows that",
        )
    if limit < 2 * low:
        raise RegistrationRefused(
            "batch",
            f"no two requests make a batch of {limit}: each brings {low} or more",
            hint=f"--batch {2 * low}, or leave it out",
        )
    for kind, values in (("input", manifest.inputs), ("output", manifest.outputs)):
        for value in values:
            first, *others = value.shape or (1,)
            if first != BATCH or any(BATCH in names_in(extent) for extent in others):
                raise RegistrationRefused(
                    f"{kind} {value.name!r}",
                    "requests cannot be batched: the batch must be the first dimension and no "
                    "other",
                    hint="leave --batch out",
                )


def _refuse(reason: str) -> NoReturn:
    raise RegistrationRefused("manifest", reason)
