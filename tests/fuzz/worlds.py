"""Small programs and profiles that several targets use."""

from __future__ import annotations

from typing import Any

from pipeswitch.extras.lab import profile
from pipeswitch.planning.planned_groups import UNKNOWN_DEVICE, VERSION
from pipeswitch.programs.interface.dims import Dim
from pipeswitch.programs.interface.groups import cut
from pipeswitch.programs.interface.layout import LayerSpec, Manifest, TensorSpec, ValueSpec

LAYER_BYTES = 4096


def value(name: str, width: int | None = 4, dtype: str = "float32") -> ValueSpec:
    return ValueSpec(name=name, dtype=dtype, shape=("batch", width))


def manifest_of(layer_count: int = 3, **fields: Any) -> Manifest:
    """Return a manifest with inputs ``x`` and ``mask``, one tensor per layer, and two groups."""
    tensors = tuple(
        TensorSpec(
            name=f"t{index}",
            dtype="uint8",
            shape=(LAYER_BYTES,),
            offset_bytes=index * LAYER_BYTES,
            size_bytes=LAYER_BYTES,
            file_offset_bytes=index * LAYER_BYTES,
        )
        for index in range(layer_count)
    )
    layers = tuple(LayerSpec(index, index + 1, 1) for index in range(layer_count))
    total_bytes = layer_count * LAYER_BYTES
    known: dict[str, Any] = {
        "digest": "d" * 64,
        "mode": "graph",
        "mode_reason": "",
        "source": "bundle",
        "total_bytes": total_bytes,
        "tensors": tensors,
        "groups": cut(layers, tensors, total_bytes, (0, *range(1, min(2, layer_count)))),
        "inputs": (value("x"), value("mask", 2, "bool")),
        "outputs": (value("y"),),
        "dims": (Dim("batch", 1, 8),),
        "layers": layers,
    }
    return Manifest(**{**known, **fields})


def profile_of(layer_count: int) -> profile.Profile:
    """Return a profile for ``manifest_of(layer_count)``."""
    times, zeros = (2.0,) * layer_count, (0.0,) * layer_count
    layer = profile.LayerProfile(label="l", size_bytes=LAYER_BYTES, copy_ms=1.0, copy_spread_ms=0.0)
    return profile.Profile(
        version=VERSION,
        model="m",
        digest="d" * 64,
        measured_at="before",
        identity=UNKNOWN_DEVICE,
        layers=(layer,) * layer_count,
        batches=tuple(
            profile.BatchProfile(
                batch=batch,
                switch_ms=times,
                switch_spread_ms=zeros,
                resident_ms=times,
                resident_spread_ms=zeros,
                trials=5,
            )
            for batch in (1, 4)
        ),
        link=profile.LinkProfile(
            alpha_ms=0.1,
            beta_ms_per_mib=1.0,
            residual_p50=0.0,
            residual_p90=0.0,
            samples=2,
            smallest_bytes=0,
            largest_bytes=1,
        ),
        overheads=profile.Overheads(sigma_ms=0.01, launch_ms=0.01, wake_ms=0.1),
        checks=(
            profile.PlanCheck(
                plan=(0,), batch=1, predicted_ms=5.0, measured_ms=6.0, spread_ms=0.1, trials=5
            ),
        ),
    )
