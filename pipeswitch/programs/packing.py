"""What a packed weight is, and which calls take one. Pure, no torch."""

from __future__ import annotations

from typing import Final

import msgspec

NAMESPACE: Final = "packed"
LINEAR: Final = "packed.linear"  # (input, weight, bias, activation, scalars, algorithm)
LINEAR_ADD: Final = "packed.linear_add"  # (input, other, weight, bias): their sum
CONVOLUTION: Final = "packed.convolution"
"""(input, weight, bias, padding, stride, dilation, groups, activation, scalars, algorithm)"""
CONVOLUTION_ADD: Final = "packed.convolution_add"
"""(input, other, weight, bias, padding, stride, dilation, groups, activation, scalars, algorithm):
the activation of their sum."""
TARGETS: Final = frozenset({LINEAR, LINEAR_ADD, CONVOLUTION, CONVOLUTION_ADD})
"""Calls that only a derived graph has: the build writes them, a client's bundle may not."""


class PackedLayout(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the bytes of a packed weight are to be read."""

    dtype: str
    shape: tuple[int, ...]  # of the weight as the module has it
    description: bytes  # of the kernel library, opaque
