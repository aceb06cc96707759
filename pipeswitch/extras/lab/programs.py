"""Simulated programs: they have a layout and computing times, but no tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Sequence
from dataclasses import dataclass
from itertools import accumulate

from ...planning.planned_groups import PlannedFile
from ...programs.interface.groups import cut
from ...programs.interface.layout import Batching, LayerSpec, Manifest, TensorSpec
from ...scheduler.state.variants import with_digests

ALIGNMENT_BYTES = 512


@dataclass(frozen=True, kw_only=True)
class SimulatedProgram:
    """Program of a simulated model; its layers compute one after the other."""

    manifest: Manifest
    plan: tuple[int, ...]  # indices of the layers that begin a group in the built program
    layer_ms: tuple[float, ...]
    row_share: float = 1.0  # time of each further row of a batch, as a fraction of the first's
    planned: tuple[PlannedFile, ...] = ()  # an earlier server's groups, from disk

    def group_ms(self, plan: Sequence[int], batch: int, more: float = 0.0) -> tuple[float, ...]:
        """Return the computing time of each group; an empty ``plan`` means the built groups.
        ``more``: extra time for prompts, in units of one row's time."""
        begins = list(plan) or self.plan
        ends = (*begins[1:], len(self.layer_ms))
        rows = 1.0 + (batch - 1) * self.row_share + more
        return tuple(rows * sum(self.layer_ms[i:j]) for i, j in zip(begins, ends, strict=True))


def manifest_of(
    digest: str, layer_bytes: Sequence[int], plan: tuple[int, ...], batching: Batching | None = None
) -> Manifest:
    """Return a manifest with layers of one tensor each; sizes are multiples of ALIGNMENT_BYTES."""
    offsets = [0, *accumulate(layer_bytes)]
    tensors = tuple(
        TensorSpec(
            name=f"t{i}",
            dtype="uint8",
            shape=(size,),
            offset_bytes=offsets[i],
            size_bytes=size,
            file_offset_bytes=offsets[i],
        )
        for i, size in enumerate(layer_bytes)
    )
    layers = tuple(LayerSpec(i, i + 1, 1) for i in range(len(tensors)))
    return Manifest(
        digest=digest,
        mode="graph",
        mode_reason="",
        source="test",
        total_bytes=offsets[-1],
        tensors=tensors,
        groups=cut(layers, tensors, offsets[-1], plan),
        inputs=(),
        outputs=(),
        layers=layers,
        batching=batching,
        extra={"last_readers": list(range(len(tensors)))},
    )


def variant_of(
    program: SimulatedProgram, name: str, own: Container[int], family: str = ""
) -> SimulatedProgram:
    """Return a program in which only the tensors with these indices have bytes of their own."""
    names = [one.name for one in program.manifest.tensors]
    digests = {i: f"{one} of {name if i in own else family}" for i, one in enumerate(names)}
    return dataclasses.replace(program, manifest=with_digests(program.manifest, digests))


def program_of(
    digest: str,
    total_bytes: int,
    *,
    groups: int = 2,
    layers_per_group: int = 2,
    layer_ms: float = 0.0,
    planned: tuple[PlannedFile, ...] = (),
    batching: Batching | None = None,
) -> SimulatedProgram:
    """Return a program of equal groups of equal layers."""
    count = groups * layers_per_group
    size = total_bytes // count // ALIGNMENT_BYTES * ALIGNMENT_BYTES
    plan = tuple(range(0, count, layers_per_group))
    manifest = manifest_of(digest, (size,) * count, plan, batching)
    return SimulatedProgram(
        manifest=manifest, plan=plan, layer_ms=(layer_ms,) * count, planned=planned
    )
