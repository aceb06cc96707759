"""What the gateway has seen of each model: what Triton's ``statistics`` tell."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

_BILLED: Final[Mapping[str, str]] = {  # Triton's phases, by our bill's
    "queue": "queue_ms",
    "compute_input": "switch_ms",
    "compute_infer": "compute_ms",
}
_PHASES: Final = (
    "success", "fail", "queue", "compute_input", "compute_infer", "compute_output",
    "cache_hit", "cache_miss",
)  # fmt: skip


@dataclass
class _Duration:
    count: int = 0
    ns: int = 0

    def add(self, ms: float) -> None:
        self.count += 1
        self.ns += round(ms * 1e6)


@dataclass
class _Model:
    last_ms: int = 0
    rows: float = 0.0  # of joined runs each request counts its share
    runs: float = 0.0
    phases: dict[str, _Duration] = field(
        default_factory=lambda: {name: _Duration() for name in _PHASES}
    )


class Tally:
    """Counts since the gateway began, by model, for models that the server has."""

    def __init__(self) -> None:
        self._models: dict[str, _Model] = {}

    def succeeded(self, model: str, took_ms: float, bill: Mapping[str, Any]) -> None:
        seen = self._models.setdefault(model, _Model())
        seen.last_ms = round(time.time() * 1000)
        seen.phases["success"].add(took_ms)
        joined = bill.get("joined", 1)
        seen.rows += bill.get("batch", 1) / joined
        seen.runs += 1 / joined
        for phase, key in _BILLED.items():
            seen.phases[phase].add(float(bill.get(key, 0.0)))

    def failed(self, model: str, took_ms: float) -> None:
        self._models.setdefault(model, _Model()).phases["fail"].add(took_ms)

    def forget_others(self, models: set[str]) -> None:
        """Of models that are registered no more."""
        for name in self._models.keys() - models:
            del self._models[name]

    def row(self, model: str, version: int) -> dict[str, Any]:
        """One of ``model_stats``: what was counted of a name, at its current version."""
        seen = self._models.get(model, _Model())
        return {
            "name": model,
            "version": str(version),
            "last_inference": seen.last_ms,
            "inference_count": round(seen.rows),
            "execution_count": round(seen.runs),
            "inference_stats": {
                name: {"count": phase.count, "ns": phase.ns} for name, phase in seen.phases.items()
            },
            "batch_stats": [],
        }
