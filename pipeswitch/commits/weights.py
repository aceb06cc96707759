"""Weights of a job's models in a commit, by their ``state_dict()`` names. Does not need torch.

An image also has optimizer state, gradients and the script's objects, and its tensors have the
strides that the script gave them. This module returns only parameters and buffers. Their names are
those of ``state_dict()``, after the name of the job's part. They are saved in row-major order.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ..base.errors import InvalidInput, RemoteProtocolError
from ..base.plain_files import open_plain
from .commit_files import CommitRecord, read_record
from .image import LENGTH, SAFETENSORS_DTYPES, packed_head, parse_image

OPTIMIZER: Final = "optimizer."  # prefix of the names of optimizer state
AVERAGES: Final = "n_averaged"  # buffer that only an averaged model has
GRADIENT: Final = ".grad"  # suffix of a gradient's name, after its parameter's name


class Weight(NamedTuple):
    """One parameter or buffer."""

    dtype: str  # torch's name
    shape: tuple[int, ...]
    values: npt.NDArray[np.unsignedinteger]  # its bits as integers; a view of the image


def weights_of(image: memoryview) -> dict[str, Weight]:
    """Return the parameters and buffers of an image by name: ``PART.fc.weight``.

    Raises:
        InvalidInput: the bytes are not an image, or a tensor does not match its entry.
    """
    content, ranges = parse_image(image)
    tensors = content["tensors"]
    weights = {}
    for name, entry in tensors.items():
        is_gradient = name.endswith(GRADIENT) and name.removesuffix(GRADIENT) in tensors
        if not is_gradient and not name.startswith(OPTIMIZER):
            start, size = ranges[name]
            weights[name] = _weight(name, entry, image[start : start + size])
    return weights


def for_anybody(weights: Mapping[str, Weight]) -> Mapping[str, Weight]:
    """Return the weights; if the job has only one part, without that part's name in the names."""
    if len({name.partition(".")[0] for name in weights}) > 1:
        return weights
    return {name.partition(".")[2]: weight for name, weight in weights.items()}


def of_part(weights: Mapping[str, Weight], part: str) -> Mapping[str, Weight]:
    """Return the weights of one part of a job, by the names of its model's ``state_dict()``; for an
    averaged model (``torch.optim.swa_utils``), by the names of the model that it averages.

    Raises:
        InvalidInput: the job has no such part.
    """
    own_weights = {n.partition(".")[2]: w for n, w in weights.items() if n.startswith(f"{part}.")}
    if not own_weights:
        parts = sorted({name.partition(".")[0] for name in weights})
        raise InvalidInput(f"the job has no part {part[:80]!r}", hint=f"one of {', '.join(parts)}")
    if own_weights.pop(AVERAGES, None) is not None:
        return {name.removeprefix("module."): weight for name, weight in own_weights.items()}
    return own_weights


def _weight(name: str, entry: Mapping[str, Any], data: memoryview) -> Weight:
    dtype: Any = entry.get("dtype")
    shape: Any = entry.get("shape")
    stride: Any = entry.get("stride")
    known = SAFETENSORS_DTYPES.get(dtype) if isinstance(dtype, str) else None
    is_told = all(
        isinstance(numbers, list) and all(type(n) is int and n >= 0 for n in numbers)
        for numbers in (shape, stride)
    )
    if known is None or not is_told or prod(shape) * known[1] != len(data):
        raise InvalidInput(f"the commit's {name} cannot be {dtype}{shape} of {len(data)} bytes")
    item_bytes = known[1]
    strides = tuple(n * item_bytes for n in stride)
    try:
        values: npt.NDArray[np.unsignedinteger] = np.ndarray(
            tuple(shape), f"u{item_bytes}", data, 0, strides
        )
    except (ValueError, TypeError) as error:  # the strides lead outside of the tensor's bytes
        raise InvalidInput(f"the commit's {name}: {error}") from None
    return Weight(dtype, tuple(shape), values)


def save_weights(weights: Mapping[str, Weight], path: Path) -> None:
    """Write a safetensors file; it replaces ``path`` only when it is complete."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, weight in weights.items():
        end = position + weight.values.nbytes
        header[name] = {
            "dtype": SAFETENSORS_DTYPES[weight.dtype][0],
            "shape": list(weight.shape),
            "data_offsets": [position, end],
        }
        position = end
    temporary = path.with_name(f"{path.name}.part-{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(packed_head(header))
            for weight in weights.values():
                file.write(np.ascontiguousarray(weight.values).data)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def load_weights(directory: Path) -> tuple[CommitRecord, dict[str, Weight]]:
    """Return a commit's record and its weights, mapped; ``directory``: see ``commit_files``.

    Raises:
        InvalidInput: there is no commit, or it is damaged.
    """
    try:
        record = read_record(directory)
        if record is None:
            raise InvalidInput(f"{directory} has no commit")
        return record, weights_of(read_image(directory / record.image, record.sha256))
    except (OSError, RemoteProtocolError) as error:
        raise InvalidInput(f"{directory}: {error}") from None


def read_image(path: Path, sha256: str = "") -> memoryview:
    """Return the image in a file that ``commit_files`` has written, mapped.

    Raises:
        InvalidInput: the file is not a commit, or does not match its digest ``sha256``.
        OSError: the file cannot be read.
    """
    with open(path, "rb", opener=open_plain) as file:
        size_bytes = os.fstat(file.fileno()).st_size
        start = file.read(LENGTH.size)
        head_bytes = LENGTH.size + (LENGTH.unpack(start)[0] if len(start) == LENGTH.size else 0)
        if len(start) < LENGTH.size or head_bytes > size_bytes:
            raise InvalidInput(f"{path} is no commit")
        mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    if sha256 and hashlib.sha256(mapped).hexdigest() != sha256:
        why = "the newest commit on disk is damaged: it does not match its digest"
        raise InvalidInput(why, hint="pipeswitch jobs resume continues from the one before it")
    return memoryview(mapped)[head_bytes:]
