"""Packed weights: their layout, the calls that read them, their precision. Pure, no torch."""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec

NAMESPACE: Final = "packed"
LINEAR: Final = "packed.linear"
"""(input, weight, bias, activation, scalars, algorithm)"""
LINEAR_ADD: Final = "packed.linear_add"
"""(input, other, weight, bias): the sum."""
CONVOLUTION: Final = "packed.convolution"
"""(input, weight, bias, padding, stride, dilation, groups, activation, scalars, algorithm)"""
CONVOLUTION_ADD: Final = "packed.convolution_add"
"""(input, other, weight, bias, padding, stride, dilation, groups, activation, scalars, algorithm):
the activation of the sum."""
LINEAR_INT8: Final = "packed.linear_int8"
"""(input, weight, scales, bias): int8 rows of a weight, one scale for each; not packed."""
TARGETS: Final = frozenset({LINEAR, LINEAR_ADD, LINEAR_INT8, CONVOLUTION, CONVOLUTION_ADD})
"""Calls that only a derived graph may have: the build writes them; a client's bundle may not."""

PRECISIONS: Final = ("exact", "fast", "bf16", "int8")
HALF: Final = ("bf16", "int8")  # those whose products are computed in bfloat16
Half = Literal["packed", "plain", ""]  # how bfloat16 products are computed; "": not at all
DERIVED_FILE: Final = "derived.bundle"  # beside the plain bundle, in the folder of a program


class PackedLayout(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Layout of a packed weight's bytes."""

    dtype: str
    shape: tuple[int, ...]  # of the weight as the module has it
    description: bytes  # of the kernel library, opaque
    input_shape: tuple[int, ...] = ()  # a convolution's input, for which the layout was chosen


class Precision(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A derived form of a program, and how it compares with the plain one on this machine."""

    name: Literal["fast", "bf16", "int8"]
    fingerprint: str  # of the machine whose kernels can read it
    plain_ms: float  # processor time of one run of the plain program, on the example
    ms: float  # the same of this form
    plain_bytes: int
    max_error: float  # the largest difference, relative to the largest output
    mean_error: float
    agreement: float  # share of rows with the same largest class, or next token; 1.0: all
    is_batch_invariant: bool | None = None
    """Each row of a batch has the bits of the row alone; None: it has no batch."""
    weights: tuple[tuple[str, str, tuple[int, ...]], ...] = ()  # of the plain program
    packed_count: int  # calls over packed weights
    plain_count: int  # calls that could be packed but are faster plain

    def row(self) -> dict[str, Any]:
        """Return what people read."""
        fields = msgspec.structs.asdict(self)
        return {key: value for key, value in fields.items() if key != "weights"}
