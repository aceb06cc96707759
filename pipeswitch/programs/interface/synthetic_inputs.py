"""Random inputs for warm-up, verification and ``infer --random``. Numpy only, no torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ...base.bytes_tensors import BYTES
from .dims import Values, shape_at
from .layout import ValueSpec

MAX_RANDOM_INTEGER = 100  # a valid index into almost every embedding


def random_value(spec: ValueSpec, values: Values, seed: int = 0) -> NDArray[np.generic]:
    """Return a random value of ``spec`` at these dimensions; equal seeds give equal values.

    Integers are 0 to 100: valid indices of most embeddings. A mask is 1, and 0 at its end. numpy
    has no bfloat16, so such values are returned as uint16: the upper halves of float32 values.
    """
    generator = np.random.default_rng([seed, *spec.name.encode()])
    shape = shape_at(spec.shape, values)
    if spec.dtype == BYTES:
        return np.full(shape, b"a text", dtype=object)
    if spec.dtype == "bool":
        return generator.integers(0, 2, shape).astype(np.bool_)
    if "mask" in spec.name:
        ones = np.ones(shape, dtype=np.dtype(spec.dtype))
        ones[..., -1:] = 0  # one padded position: models may treat a mask without zeros specially
        return ones
    if spec.dtype == "bfloat16":
        bits = generator.standard_normal(shape, dtype=np.float32).view(np.uint32)
        return (bits >> np.uint32(16)).astype(np.uint16)
    dtype = np.dtype(spec.dtype)
    if dtype.kind == "f":
        return generator.standard_normal(shape).astype(dtype)
    return generator.integers(0, MAX_RANDOM_INTEGER + 1, shape).astype(dtype)


def random_inputs(
    specs: Sequence[ValueSpec], values: Values, seed: int = 0
) -> list[NDArray[np.generic]]:
    """Return one random value for each input of a manifest, in call order."""
    return [random_value(spec, values, seed) for spec in specs]
