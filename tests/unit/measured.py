"""Profiles of models, from the fields that matter to a test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pipeswitch.extras.lab.profile import (
    BatchProfile,
    LayerProfile,
    LinkProfile,
    Overheads,
    Profile,
)
from pipeswitch.planning.planned_groups import UNKNOWN_DEVICE, VERSION, Identity

HERE = Identity(
    device="cpu",
    name="a processor",
    cores=4,
    threads=3,
    link_bytes_per_s=0.0,
    pipeswitch="1.0",
    torch="2.15.0",
)


def batch_of(batch: int, layer_ms: Sequence[float]) -> BatchProfile:
    """Return the times of a batch, which are the same during switches and in resident runs."""
    times, zeros = tuple(layer_ms), (0.0,) * len(layer_ms)
    spread = {"switch_spread_ms": zeros, "resident_spread_ms": zeros}
    return BatchProfile(batch=batch, switch_ms=times, resident_ms=times, trials=5, **spread)


def measured(sizes: Sequence[int], link: Mapping[str, Any] = {}, **fields: Any) -> Profile:
    """Return the profile of a model with layers of these sizes, each of which is copied in 1 ms."""
    layers = tuple(
        LayerProfile(label=f"l{i}", size_bytes=size, copy_ms=1.0, copy_spread_ms=0.0)
        for i, size in enumerate(sizes)
    )
    counts = {"samples": 2, "smallest_bytes": 0, "largest_bytes": 1}
    errors = {"residual_p50": 0.0, "residual_p90": 0.0}
    values = {"alpha_ms": 0.1, "beta_ms_per_mib": 1.0, **errors, **counts, **link}
    known = {
        "version": VERSION,
        "model": "m",
        "digest": "d" * 64,
        "measured_at": "before",
        "identity": UNKNOWN_DEVICE,
        "layers": layers,
        "link": LinkProfile(**values),
        "overheads": Overheads(sigma_ms=0.01, launch_ms=0.01, wake_ms=0.1),
    }
    return Profile(**{**known, **fields})
