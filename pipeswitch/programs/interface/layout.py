"""Manifest of a program for the rest of the system: groups, tensors, signature. Pure, no torch.

A program is a model cut into layer groups in execution order (PipeSwitch 4.2). The manifest says
where every tensor of every group lies, both in its file and in a region of the arena or of the host
store: the two have the same layout, so a group is one contiguous copy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final, Literal

import msgspec

from .dims import Dim, Shape, Values, batch_range, shape_at
from .packing import Precision

MAX_JOINED_BYTES: Final = 512 << 20  # of padded requests' inputs together: a worker copies them
BUNDLE_FILE: Final = "program.bundle"  # in the folder of a program in graph mode
TENSOR_ALIGN_BYTES: Final = 512  # the caching allocator's unit: every torch kernel is happy with it
REGION_ALIGN_BYTES: Final = 2 << 20  # models start on a 2 MiB boundary

ITEM_BYTES: Final[dict[str, int]] = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
"""The dtypes that may cross the wire or lie in a bundle, with their item size in bytes."""


class TensorSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One tensor of a program: contiguous, in row-major order."""

    name: str  # the placeholder's target: a parameter's, buffer's or constant's qualified name
    dtype: str  # a key of ITEM_BYTES
    shape: tuple[int, ...]
    offset_bytes: int  # from the start of the model's region; a multiple of TENSOR_ALIGN_BYTES
    size_bytes: int
    file_offset_bytes: int  # absolute position in the weights file


class GroupSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One layer group: one contiguous copy, one subgraph, one wait, one preemption point."""

    offset_bytes: int  # from the start of the model's region; 0 size is allowed (no tensors)
    size_bytes: int
    tensors: tuple[int, ...]  # indices into Manifest.tensors, in order of first use
    first_node: int  # graph mode: index of its first call node; module mode: index of its trigger
    end_node: int  # one past its last
    label: str  # for traces and errors, e.g. "layer3.0.conv1 … layer3.4.bn2"


class LayerSpec(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The finest cut: from one first use of weights to just before the next."""

    first_node: int  # as GroupSpec's
    end_node: int
    tensor_count: int  # the next ones of Manifest.tensors; 0 is allowed


class ValueSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An input or an output. Extents are numbers, names of dimensions, or computed from them."""

    name: str
    dtype: str
    shape: Shape

    def size_bytes(self, values: Values) -> int:
        """Bytes of one value where the dimensions are ``values``.

        Raises:
            NoExtent: there is no such value.
        """
        return ITEM_BYTES[self.dtype] * math.prod(shape_at(self.shape, values))


class Batching(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Batching of requests along the first dimension of each input and output (ADR 28)."""

    limit: int  # of the joined batch
    delay_ms: float  # for which one waits for others though the device could begin it
    is_exact: bool  # each row comes out of a joined run as it does alone, bit for bit


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A registered program, as all but the executing worker see it."""

    digest: str  # sha256 hex over graph, weights and signature: equal means the same program
    mode: Literal["graph", "module"]
    mode_reason: str  # why module mode, or empty
    source: str  # as registered: "torchvision:resnet152", "pkg.mod:factory", "bundle"
    total_bytes: int  # of the region, before rounding to REGION_ALIGN_BYTES
    tensors: tuple[TensorSpec, ...]
    groups: tuple[GroupSpec, ...]  # as built; groups.py cuts the same layers anew
    inputs: tuple[ValueSpec, ...]  # in call order
    outputs: tuple[ValueSpec, ...]
    dims: tuple[Dim, ...] = ()  # those that a request chooses
    takes: Any = None  # a tree (pytree.py), the arguments by name; None: each input is one
    returns: Any = None  # a tree, how the outputs nest; None: not told, or a lone tensor
    triggers: tuple[str, ...] = ()  # module mode: the submodule whose pre-hook opens group i
    layers: tuple[LayerSpec, ...] = ()  # empty: of a build that did not tell them
    weights_sha256: str = ""  # of the packed region image, checked when loaded into the store
    head_sha256: str = ""  # digest of the bundle's head with the graph; empty: older release
    batching: Batching | None = None  # None: each request runs alone
    precision: Precision | None = None  # None: exact; else the tensors are those of a derived form
    extra: dict[str, Any] = {}

    @property
    def batch(self) -> tuple[int, int]:
        """The smallest and the largest batch; equal where it is fixed."""
        return batch_range(self.dims)

    @property
    def program(self) -> str:
        """The digest by which machines compare programs: each derives its own forms."""
        return str(self.extra.get("program", self.digest))

    @property
    def plain_weights(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Dtype and shape of each weight as the module has it, whatever the precision."""
        if self.precision is None:
            return {spec.name: (spec.dtype, spec.shape) for spec in self.tensors}
        return {name: (dtype, tuple(shape)) for name, dtype, shape in self.precision.weights}

    @property
    def pads(self) -> Mapping[str, str]:
        """Dimensions along which zeros at the end change no answer, each with the input that says
        how much of it is real."""
        pads: Mapping[str, str] = self.extra.get("pads", {})
        return pads


def aligned(value_bytes: int, unit_bytes: int) -> int:
    """``value_bytes`` rounded up to a multiple of ``unit_bytes``."""
    return -(-value_bytes // unit_bytes) * unit_bytes
