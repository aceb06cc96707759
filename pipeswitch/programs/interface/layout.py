"""Manifest of a program for the rest of the system: groups, tensors, signature. Pure, no torch.

A program is a model cut into layer groups in execution order (PipeSwitch 4.2). The manifest has the
offset of every tensor, in its file and in the model's region. Regions of the arena and of the host
store have the same layout, so a group is one contiguous copy.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Final, Literal, Protocol

import msgspec

from ...base.bytes_tensors import ITEM_BYTES as ITEM_BYTES
from .dims import Dim, Shape, Values, batch_range, shape_at
from .packing import Precision

MAX_JOINED_BYTES: Final = 512 << 20  # maximum inputs of a padded batch; a worker copies them
BUNDLE_FILE: Final = "program.bundle"  # in the folder of a program in graph mode
ORIGIN: Final = ("file", "registered_at_s")  # fields of a spec that change no program
TENSOR_ALIGN_BYTES: Final = 512  # as in torch's caching allocator, so all kernels accept it
CACHE: Final = "cache"  # input with one row for each earlier place of a sequence
PADS: Final = {"length": "count", "past": "used"}  # ``Manifest.pads`` of a program with a cache
REGION_ALIGN_BYTES: Final = 2 << 20


class TensorSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One tensor of a program: contiguous, in row-major order."""

    name: str  # the placeholder's target: a parameter's, buffer's or constant's qualified name
    dtype: str  # a key of ITEM_BYTES
    shape: tuple[int, ...]
    offset_bytes: int  # from the start of the model's region; a multiple of TENSOR_ALIGN_BYTES
    size_bytes: int
    file_offset_bytes: int  # absolute position in the weights file
    digest: str = ""  # SHA-256 of its bytes; empty: built by an earlier release, shares no bytes


class GroupSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One layer group: one contiguous copy, one subgraph, one wait, one preemption point."""

    offset_bytes: int  # from the start of the model's region
    size_bytes: int  # 0 is allowed: a group without tensors
    tensors: tuple[int, ...]  # indices into Manifest.tensors, in order of first use
    first_node: int  # graph mode: index of its first call node; module mode: index of its trigger
    end_node: int  # one past its last node
    label: str  # for traces and errors, e.g. "layer3.0.conv1 … layer3.4.bn2"


class LayerSpec(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Smallest unit of a group: from one first use of weights to just before the next one."""

    first_node: int  # as in GroupSpec
    end_node: int
    tensor_count: int  # number of its tensors, which follow the previous layer's; 0 is allowed


class LookupSpec(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Table whose first reader takes only the rows that an input names (ADR 67)."""

    table: int  # index into Manifest.tensors
    index_input: int  # index into Manifest.inputs: numbers of rows
    next_reader: int  # node that reads the table next; one past the last node: none


class ValueSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An input or an output. Its extents are numbers, names of dimensions, or expressions."""

    name: str
    dtype: str
    shape: Shape

    def size_bytes(self, values: Values) -> int:
        """Return the bytes of the tensor for the dimensions ``values``.

        Raises:
            NoExtent: an extent cannot be computed from ``values``.
        """
        return ITEM_BYTES[self.dtype] * math.prod(shape_at(self.shape, values))


class Batching(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Batching of requests along the first dimension of each input and output (ADR 28)."""

    limit: int  # maximum size of the batch
    delay_ms: float  # how long a request waits for others although the device is free
    is_exact: bool  # each row of a batch has the bits of the row computed alone


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Description of a registered program, without its graph and weights."""

    digest: str  # sha256 hex over graph, weights and signature; identifies the program
    mode: Literal["graph", "module"]
    mode_reason: str  # reason for module mode; empty: graph mode
    source: str  # as registered: "torchvision:resnet152", "pkg.mod:factory", "bundle"
    total_bytes: int  # size of the region, before rounding to REGION_ALIGN_BYTES
    tensors: tuple[TensorSpec, ...]
    groups: tuple[GroupSpec, ...]  # from the build; ``groups.regrouped`` makes others from a plan
    inputs: tuple[ValueSpec, ...]  # in call order
    outputs: tuple[ValueSpec, ...]
    dims: tuple[Dim, ...] = ()  # dimensions that a request chooses
    takes: Any = None  # tree (pytree.py) of the arguments; None: each input is an argument
    returns: Any = None  # tree of the outputs' nesting; None: unknown, or a single tensor
    triggers: tuple[str, ...] = ()  # module mode: the submodule whose pre-hook opens group i
    layers: tuple[LayerSpec, ...] = ()
    lookups: tuple[LookupSpec, ...] = ()
    weights_sha256: str = ""  # hash of the region's image, checked if tensors have no digests
    head_sha256: str = ""  # digest of the bundle's head with the graph; empty: module mode
    batching: Batching | None = None  # None: each request runs alone
    precision: Precision | None = None  # of a derived program, which has these tensors; None: exact
    extra: dict[str, Any] = {}

    @property
    def batch(self) -> tuple[int, int]:
        """The smallest and the largest batch; (1, 1) without a batch dimension."""
        return batch_range(self.dims)

    @property
    def program(self) -> str:
        """Digest that is equal on all machines, unlike the ``digest`` of a derived program."""
        return str(self.extra.get("program", self.digest))

    @property
    def plain_weights(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Dtype and shape of each weight in the plain program, also if this program is derived."""
        if self.precision is None:
            return {spec.name: (spec.dtype, spec.shape) for spec in self.tensors}
        return {name: (dtype, tuple(shape)) for name, dtype, shape in self.precision.weights}

    @property
    def unsaved(self) -> Sequence[str]:
        """Weights that the module's state dict does not have: a version may keep their values."""
        unsaved: Sequence[str] = self.extra.get("unsaved", ())
        return unsaved

    @property
    def pads(self) -> Mapping[str, str]:
        """Dimensions that zeros at the end may pad without changing the answer.
        Each is mapped to the name of the input that has the size without padding."""
        pads: Mapping[str, str] = self.extra.get("pads", {})
        return pads


class KindSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings that a bundle has besides its graph. A subclass, in an extra, has the fields."""

    kind: ClassVar[str]  # name in ``SETTINGS`` and ``RUNNERS``; the metadata is ``pipeswitch.KIND``
    low_dims: ClassVar[tuple[str, ...]] = ()  # they are lowest in most runs

    @property
    def option(self) -> str:
        """Option of a registration that asks for such a program; empty: no option does."""
        return ""

    def check(self, values: Iterable[ValueSpec], dims: Iterable[Dim]) -> None:
        """Raise RegistrationRefused if a setting contradicts the graph's inputs and outputs."""

    def fits(self, outputs: Container[str]) -> bool:
        """Return False if a program with these outputs is registered without the settings."""
        return True

    def claims(self) -> Mapping[str, Any]:
        """Return what ``Manifest.extra`` has of them."""
        return {}


class Wrapper(Protocol):
    """Converter of clients' values, which an extra runs in processes beside the workers."""

    @property
    def kind(self) -> str:
        """Kind of the helper processes that convert."""

    @property
    def before(self) -> str:
        """Function that makes the model's inputs; empty: clients send them."""

    @property
    def after(self) -> str:
        """Function that makes the answer; empty: the model's outputs are the answer."""

    def raw(self, manifest: Manifest) -> Manifest:
        """Return the manifest of what clients send to ``before``."""

    def public(self, manifest: Manifest) -> Manifest:
        """Return the manifest that the model's clients see."""

    def row(self) -> dict[str, str]:
        """Return the functions as a row of the model shows them."""


class Composite(Protocol):
    """Name for several models; the frontend sends each its requests."""

    @property
    def kind(self) -> str:
        """Kind of such names, an entry of ``COMPOSITES``."""

    @property
    def first(self) -> str:
        """Name of the first model, in whose tenant's memory all values lie."""


def aligned(value_bytes: int, unit_bytes: int) -> int:
    """Return ``value_bytes`` rounded up to a multiple of ``unit_bytes``."""
    return -(-value_bytes // unit_bytes) * unit_bytes


def is_same_signature(one: Manifest, other: Manifest) -> bool:
    """Return True if both manifests have the same inputs, outputs and dimensions."""
    return (one.inputs, one.outputs, one.dims) == (other.inputs, other.outputs, other.dims)


def signature_text(dtype: str, shape: Iterable[object]) -> str:
    """Return a dtype and shape as text: ``float32[8,3,224,224]``."""
    return f"{dtype}[{','.join(map(str, shape))}]"
