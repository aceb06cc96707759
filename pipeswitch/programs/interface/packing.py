"""Packed weights: their layout, the operators that read them, their precision. Pure, no torch."""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec

NAMESPACE: Final = "packed"
LINEAR: Final = "packed.linear"
"""Arguments: (input, weight, bias, activation, scalars, algorithm)."""
LINEAR_ADD: Final = "packed.linear_add"
"""(input, other, weight, bias): the sum of ``other`` and the linear layer's result."""
CONVOLUTION: Final = "packed.convolution"
"""(input, weight, bias, padding, stride, dilation, groups, activation, scalars, algorithm)."""
CONVOLUTION_ADD: Final = "packed.convolution_add"
"""(input, other, weight, bias, padding, stride, dilation, groups, activation, scalars, algorithm):
the activation of the sum of ``other`` and the convolution's result."""
LINEAR_INT8: Final = "packed.linear_int8"
"""(input, weight, scales, sums, bias, activation, scalars, algorithm): a weight of int8 rows, each
with a scale and a scaled sum. Without ``sums``, activations become integers of 16 bits."""
TARGETS: Final = frozenset({LINEAR, LINEAR_ADD, LINEAR_INT8, CONVOLUTION, CONVOLUTION_ADD})
"""Operators that only derived graphs may call: the build writes these graphs, not a client."""

HALF: Final = ("bf16", "int8")  # precisions whose products are computed in bfloat16
Layout = Literal["onednn", "torch"]  # of weights; a server with a GPU uses torch's
PACKED_FORM: Final = "4"  # version of packed files; with another one, servers pack again
DERIVED_FILE: Final = "derived.bundle"  # in a program's folder, next to the plain bundle


class PackedLayout(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Layout of a packed weight's bytes."""

    dtype: str
    shape: tuple[int, ...]  # shape of the weight in the module
    description: bytes  # the kernel library's own description, opaque
    input_shape: tuple[int, ...] = ()  # input of the convolution for which the layout was chosen


class Precision(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Precision of a derived program, and its comparison with the plain one on this machine."""

    name: Literal["fast", "bf16", "int8"]
    fingerprint: str  # equal where workers can read the same packed bytes
    plain_ms: float  # processor time of one run of the plain program, on the example; 0: not timed
    ms: float  # processor time of one run of the derived program
    plain_bytes: int
    max_error: float  # largest difference between outputs, relative to the largest output
    mean_error: float
    agreement: float  # share of rows with the same most likely class or next token, 0 to 1
    is_batch_invariant: bool | None = None
    """True if each row of a batch has the same bits as the row alone; None: not measured."""
    weights: tuple[tuple[str, str, tuple[int, ...]], ...] = ()  # weights of the plain program
    packed_count: int  # calls that read packed weights
    plain_count: int  # calls that could read packed weights but are faster without
    plain_sha256: tuple[str, str] = ("", "")
    """Digests of the plain weights and of the plain bundle's header."""
    layout: Layout = "onednn"

    def row(self) -> dict[str, Any]:
        """Return the fields that are shown to people: all but ``weights`` and ``plain_sha256``."""
        fields = msgspec.structs.asdict(self)
        hidden = ("weights", "plain_sha256")
        return {key: value for key, value in fields.items() if key not in hidden}
