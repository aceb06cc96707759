"""Profile data and their checks: the costs of one program on one device, layer by layer. Pure.

A *layer* is the smallest unit into which a program is cut (``programs/interface/layout.py``). Times
are medians over trials, in milliseconds; a spread is the distance between the quartiles. A profile
names the program, device and versions that were measured, and is used only for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from ...planning.planned_groups import MAX_BYTES, VERSION, Identity

MAX_MS: Final = 1e9


class ProfileError(ValueError):
    """Data is not a profile, or its numbers contradict each other; the text says how."""


class _Part(msgspec.Struct, frozen=True, kw_only=True):
    """Base class of a profile and its parts."""


class LayerProfile(_Part, frozen=True):
    """One layer's bytes and the time of its copy."""

    label: str
    size_bytes: int
    copy_ms: float  # time of the copy if the layer is a group of its own
    copy_spread_ms: float


class BatchProfile(_Part, frozen=True):
    """Compute times at one batch size; each tuple has one number for each layer."""

    batch: int
    switch_ms: tuple[float, ...]  # compute times while later layers are copied
    switch_spread_ms: tuple[float, ...]
    resident_ms: tuple[float, ...]  # compute times with all layers on the device
    resident_spread_ms: tuple[float, ...]
    trials: int  # number of trials of each kind (switch and resident)


class LinkProfile(_Part, frozen=True):
    """Fitted time of one copy: ``alpha_ms + beta_ms_per_mib * size``, with the size in MiB."""

    alpha_ms: float
    beta_ms_per_mib: float
    residual_p50: float  # median of |measured - fitted| / measured over all samples
    residual_p90: float  # 90th percentile of the same ratio
    samples: int
    smallest_bytes: int
    largest_bytes: int


class Overheads(_Part, frozen=True):
    """Costs of a group besides the copy and the computation of its layers."""

    sigma_ms: float  # time to read the fence of a copied group, and to take the time stamps
    launch_ms: float  # time to call one more subgraph
    wake_ms: float  # time from setting a fence until the worker that waits for it computes


class PlanCheck(_Part, frozen=True):
    """Predicted and measured makespan of a plan that was tried."""

    plan: tuple[int, ...]
    batch: int
    predicted_ms: float
    measured_ms: float
    spread_ms: float
    trials: int


class Profile(_Part, frozen=True):
    """All measurements of one program on one device."""

    version: int
    model: str  # registered name, for people; the program is identified by the digest
    digest: str
    measured_at: str  # UTC, ISO 8601
    identity: Identity
    layers: tuple[LayerProfile, ...]
    batches: tuple[BatchProfile, ...]  # plans are made for the first batch size
    link: LinkProfile
    overheads: Overheads
    checks: tuple[PlanCheck, ...] = ()  # one for each plan that was tried, the chosen plan last
    predicted_ms: dict[str, float] = {}  # batch size -> predicted time of a cold run, as planned

    def batch(self, batch: int) -> BatchProfile | None:
        """Return the times at this batch size, or None if it was not measured."""
        return next((one for one in self.batches if one.batch == batch), None)


def encode(profile: Profile) -> bytes:
    """Return a profile as JSON for a file (``planning/planned_groups.py``)."""
    return msgspec.json.encode(profile)


def decode(raw: bytes) -> Profile:
    """Decode a profile from a file.

    Raises:
        ProfileError: not JSON, unexpected fields, another version, or impossible numbers.
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
