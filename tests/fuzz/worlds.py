"""Small programs and profiles that several targets use."""

from __future__ import annotations

from typing import Any

from pipeswitch.extras.lab import profile
from pipeswitch.programs.interface.dims import Dim
from pipeswitch.programs.interface.groups import cut
from pipeswitch.programs.interface.layout import LayerSpec, Manifest, ValueSpec
from tests.unit.manifests import plain_tensor
from tests.unit.measured import batch_of, measured

LAYER_BYTES = 4096


def value(name: str, width: int | None = 4, dtype: str = "float32") -> ValueSpec:
    return ValueSpec(name=name, dtype=dtype, shape=("batch", width))


def manifest_of(layer_count: int = 3, **fields: Any) -> Manifest:
    """Return a manifest with inputs ``x`` and ``mask``, one tensor per layer, and two groups."""
    tensors = tuple(
        plain_tensor(f"t{index}", (LAYER_BYTES,), at, dtype="uint8", file_bytes=at)
        for index, at in enumerate(range(0, layer_count * LAYER_BYTES, LAYER_BYTES))
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
    return measured(
        (LAYER_BYTES,) * layer_count,
        batches=tuple(batch_of(batch, (2.0,) * layer_count) for batch in (1, 4)),
        checks=(
            profile.PlanCheck(
                plan=(0,), batch=1, predicted_ms=5.0, measured_ms=6.0, spread_ms=0.1, trials=5
            ),
        ),
    )
