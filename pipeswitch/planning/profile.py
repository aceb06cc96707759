"""A profile: what one program costs on one device, layer by layer. Data and its checks, pure.

A *layer* is the finest cut of a program (programs/interface/layout.py). Times are milliseconds;
each is a
median over trials with its spread, the distance between the quartiles. A profile says what it was
measured on: one of another program, device or version is not used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

VERSION: Final = 1
MAX_BYTES: Final = 32 << 20  # of a file: a program of 65 536 layers needs less
MAX_MS: Final = 1e9


class ProfileError(ValueError):
    """Not a profile, or one whose numbers contradict each other; the text says what is wrong."""


class _Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all parts: what is not known is refused."""


class Identity(_Part, frozen=True):
    """Facts that the times depend on besides the program."""

    device: str  # as configured: "cpu", "cuda:0"
    name: str  # of the processor or the GPU
    cores: int  # the server may run on
    threads: int  # that a worker computes with
    link_bytes_per_s: float  # of the modelled link; 0: as fast as it goes
    pipeswitch: str
    torch: str

    def difference(self, ours: Identity) -> str:
        """Return the first difference in words; empty if there is none."""
        for field in self.__struct_fields__:
            theirs, mine = getattr(self, field), getattr(ours, field)
            if theirs != mine:
                return f"{field.replace('_', ' ')} was {theirs}, here it is {mine}"
        return ""


UNKNOWN_DEVICE: Final = Identity(
    device="unknown", name="", cores=0, threads=0, link_bytes_per_s=0.0, pipeswitch="", torch=""
)


class LayerProfile(_Part, frozen=True):
    """One layer's bytes and its own copy."""

    label: str
    size_bytes: int
    copy_ms: float  # when it is a group by itself
    copy_spread_ms: float


class BatchProfile(_Part, frozen=True):
    """Compute times at one batch size; one number for each layer."""

    batch: int
    switch_ms: tuple[float, ...]  # while the model streams in: what a plan is made from
    switch_spread_ms: tuple[float, ...]
    resident_ms: tuple[float, ...]
    resident_spread_ms: tuple[float, ...]
    trials: int  # of each kind


class LinkProfile(_Part, frozen=True):
    """The time of one copy, fitted: ``alpha_ms + beta_ms_per_mib * size``."""

    alpha_ms: float
    beta_ms_per_mib: float
    residual_p50: float  # of |measured - fitted| / measured over all sizes
    residual_p90: float
    samples: int
    smallest_bytes: int
    largest_bytes: int


class Overheads(_Part, frozen=True):
    """Costs of a group beyond its copy and its compute."""

    sigma_ms: float  # looking at the word of a group that is there, and the time stamps
    launch_ms: float  # calling one more subgraph
    wake_ms: float  # from a word's rise to a waiting worker that computes


class PlanCheck(_Part, frozen=True):
    """A plan that was tried: what the model of the pipeline says, and what was measured."""

    plan: tuple[int, ...]
    batch: int
    predicted_ms: float
    measured_ms: float
    spread_ms: float
    trials: int


class Profile(_Part, frozen=True):
    """Everything that was measured of one program on one device."""

    version: int
    model: str  # the name it was registered by; the digest decides
    digest: str
    measured_at: str  # UTC, ISO 8601
    identity: Identity
    layers: tuple[LayerProfile, ...]
    batches: tuple[BatchProfile, ...]  # the first is the one plans are made for
    link: LinkProfile
    overheads: Overheads
    checks: tuple[PlanCheck, ...] = ()  # layer by layer, buckets, one shot; the planned groups last
    stale: str = ""  # why it is not used; earlier releases wrote it

    def batch(self, batch: int) -> BatchProfile | None:
        """Return the times at that batch size, if it was measured."""
        return next((one for one in self.batches if one.batch == batch), None)

    def why_unusable(self, identity: Identity, digest: str, layer_bytes: Sequence[int]) -> str:
        """Return why no plan can be made from it here and now; empty if one can."""
        if self.stale:
            return f"it is stale: {self.stale}"
        if self.digest != digest:
            return f"it is of another program ({self.digest[:12]}, not {digest[:12]})"
        if tuple(layer.size_bytes for layer in self.layers) != tuple(layer_bytes):
            return "its layers are not this program's"
        difference = self.identity.difference(identity)
        return f"it was measured elsewhere: {difference}" if difference else ""


@dataclass(frozen=True)
class ProfileFile:
    """A file that bears a program's digest in its name: its profile, or why there is none."""

    file_name: str
    profile: Profile | None
    problem: str = ""


def encode(profile: Profile) -> bytes:
    """JSON for a file, indented for people."""
    return msgspec.json.format(msgspec.json.encode(profile), indent=1) + b"\n"


def decode(raw: bytes) -> Profile:
    """Decode a profile from a file.

    Raises:
        ProfileError: no JSON, another shape, another version, or numbers that cannot be.
    """
    if len(raw) > MAX_BYTES:
        raise ProfileError(f"it has {len(raw)} bytes, the limit is {MAX_BYTES}")
    try:
        profile = msgspec.json.decode(raw, type=Profile)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise ProfileError(str(error)) from None
    if profile.version != VERSION:
        raise ProfileError(f"it has version {profile.version}, this release reads {VERSION}")
    _check(profile)
    return profile


def _check(profile: Profile) -> None:
    count = len(profile.layers)
    if not count or not profile.batches:
        raise ProfileError("it has no layers or no batch")
    for batch in profile.batches:
        columns = (
            batch.switch_ms,
            batch.switch_spread_ms,
            batch.resident_ms,
            batch.resident_spread_ms,
        )
        if batch.batch < 1 or any(len(column) != count for column in columns):
            raise ProfileError(f"batch {batch.batch}: not one time for each of {count} layers")
        _check_times(f"batch {batch.batch}", [ms for column in columns for ms in column])
    if len({batch.batch for batch in profile.batches}) != len(profile.batches):
        raise ProfileError("a batch appears twice")
    if min(layer.size_bytes for layer in profile.layers) < 0:
        raise ProfileError("a layer has a negative size")
    _check_times("copies", [layer.copy_ms for layer in profile.layers])
    _check_times("link", [profile.link.alpha_ms, profile.link.beta_ms_per_mib])
    overheads = profile.overheads
    _check_times("overheads", [overheads.sigma_ms, overheads.launch_ms, overheads.wake_ms])


def _check_times(what: str, times: Sequence[float]) -> None:
    if not all(0.0 <= ms < MAX_MS for ms in times):
        raise ProfileError(f"{what}: a time is negative or beyond {MAX_MS:g}")
