"""Planned layer groups of programs: one JSON file for each program and device.

``pipeswitch profile`` measures a model and plans its groups. Its file also has the measurements,
which a server only hands on. Without a file, a program has byte buckets (``grouping.bucket``).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
from msgspec.structs import replace

from .grouping import Plan, check_plan

VERSION: Final = 1
MAX_BYTES: Final = 32 << 20  # size limit of a file; 65 536 layers need less
DIGEST_CHARS: Final = 12  # length of the digest in a file's name; the file has the whole digest


class PlannedError(ValueError):
    """Data is not a file of planned groups, or contradicts itself; the text says how."""


class Identity(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Device, settings and versions with which a program was measured: its times depend on them."""

    device: str  # name in the settings, such as "cpu" or "cuda:0"
    name: str  # product name of the processor or the GPU
    cores: int  # number of cores that the server may use
    threads: int  # number of threads with which a worker computes
    link_bytes_per_s: float  # speed of the modelled link; 0: no limit
    pipeswitch: str  # version
    torch: str  # version

    def difference(self, ours: Identity) -> str:
        """Describe the first difference from ``ours``; return an empty text if there is none."""
        for field in self.__struct_fields__:
            theirs, mine = getattr(self, field), getattr(ours, field)
            if theirs != mine:
                return f"{field.replace('_', ' ')} was {theirs}, here it is {mine}"
        return ""


UNKNOWN_DEVICE: Final = Identity(
    device="unknown", name="", cores=0, threads=0, link_bytes_per_s=0.0, pipeswitch="", torch=""
)


class _Layer(msgspec.Struct, frozen=True):
    size_bytes: int


class _Check(msgspec.Struct, frozen=True):
    plan: Plan
    batch: int
    predicted_ms: float


class PlannedGroups(msgspec.Struct, frozen=True):
    """Layer groups that were planned for one program on one device; other fields are not read."""

    version: int
    digest: str
    measured_at: str
    identity: Identity
    layers: tuple[_Layer, ...]
    checks: tuple[_Check, ...]  # plans that were tried, the chosen one last
    predicted_ms: dict[str, float] = {}  # batch size -> predicted time of a cold run
    measurements: msgspec.Raw = msgspec.Raw(b"")  # the whole file as MessagePack, for clients

    @property
    def plan(self) -> Plan:
        return self.checks[-1].plan

    @property
    def batch(self) -> int:
        """Batch size for which they were planned."""
        return self.checks[-1].batch

    def why_unusable(self, identity: Identity, digest: str, layer_bytes: Sequence[int]) -> str:
        """Return why this cannot be used for this device and program; empty if it can."""
        if self.digest != digest:
            return f"it is of another program ({self.digest[:12]}, not {digest[:12]})"
        if [layer.size_bytes for layer in self.layers] != list(layer_bytes):
            return "its layers are not this program's"
        difference = self.identity.difference(identity)
        return f"it was measured elsewhere: {difference}" if difference else ""


@dataclass(frozen=True)
class PlannedFile:
    """File with a program's digest in its name: its groups, or why it is unreadable."""

    file_name: str
    groups: PlannedGroups | None
    problem: str = ""


def decode(raw: bytes) -> PlannedGroups:
    """Decode planned groups from a file.

    Raises:
        PlannedError: not JSON, another version, no plan, or a plan for other layers.
    """
    if len(raw) > MAX_BYTES:
        raise PlannedError(f"it has {len(raw)} bytes, the limit is {MAX_BYTES}")
    try:
        groups = msgspec.json.decode(raw, type=PlannedGroups)
        measurements = msgspec.msgpack.encode(msgspec.json.decode(raw))
    except (msgspec.DecodeError, UnicodeError, RecursionError, OverflowError) as error:
        raise PlannedError(str(error)) from None
    if groups.version != VERSION:
        raise PlannedError(f"it has version {groups.version}, this release reads {VERSION}")
    if not groups.layers or not groups.checks:
        raise PlannedError("it has no layers or no plan")
    try:
        check_plan(groups.plan, len(groups.layers))
    except ValueError as error:
        raise PlannedError(str(error)) from None
    predicted = {str(groups.batch): groups.checks[-1].predicted_ms} | groups.predicted_ms
    return replace(groups, predicted_ms=predicted, measurements=msgspec.Raw(measurements))


def file_name(model: str, digest: str, device: str) -> str:
    """Return a file's name, such as ``resnet152.3f2a90c1d4e5.cpu.json``."""
    device = re.sub(r"[^a-z0-9]+", "-", device.lower())
    return f"{model}.{digest[:DIGEST_CHARS]}.{device}.json"
