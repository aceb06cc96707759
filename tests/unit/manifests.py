"""Manifests of programs, from the fields that matter to a test."""

from __future__ import annotations

from typing import Any

from pipeswitch.programs.interface.layout import Manifest


def plain_manifest(**fields: Any) -> Manifest:
    """Return the manifest of a graph; without ``fields`` it has no tensors, inputs or outputs."""
    text = {"digest": "d", "mode": "graph", "mode_reason": "", "source": "bundle"}
    empty = dict.fromkeys(("tensors", "groups", "inputs", "outputs"), ())
    return Manifest(**{**text, "total_bytes": 0, **empty, **fields})
