"""Child of ``rig.py`` that imports torch: it builds a program, or computes it as groups arrive."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import msgspec
import torch

from pipeswitch.devices.cpu.worker_device import CpuWorkerDevice
from pipeswitch.ipc.messages.base import OpId, ResourceLimits, Slot
from pipeswitch.ipc.messages.worker import WorkerSettings
from pipeswitch.programs.compiler.program import build
from pipeswitch.programs.graphs.bundle import read_bundle
from pipeswitch.programs.graphs.partition import layers_of_graph
from pipeswitch.programs.interface.layout import GroupSpec
from pipeswitch.programs.running.executor import BoundGraph, GraphProgram
from pipeswitch.programs.spec import BUNDLE_FILE, load_manifest

from . import plain
from .lane import open_descriptor
from .trials import now_ms, say


def write_program(order: plain.Order) -> None:
    """Build the program in the order's folder; print each layer's offset, bytes and nodes."""
    folder = Path(order["packed_path"])
    manifest = build(plain.build_spec(order), folder, lambda stage, share: None)
    rows = []
    for layer in layers_of_graph(read_bundle(folder / BUNDLE_FILE).graph):
        offset = manifest.tensors[layer.weights[0]].offset_bytes if layer.weights else 0
        rows.append([offset, 0, layer.first_node, layer.end_node])
    ends = [*(row[0] for row in rows[1:]), manifest.total_bytes]
    for row, end in zip(rows, ends, strict=True):
        row[1] = end - row[0]  # a layer ends where the next layer begins
    say(layers=rows)


class Runner:
    """Runner that reads one verb per line from standard input and answers each with JSON."""

    def __init__(self, order: plain.Order) -> None:
        folder = Path(order["packed_path"])
        self._manifest = load_manifest(folder)
        self._graph = read_bundle(folder / BUNDLE_FILE).graph
        self._inputs = plain.inputs_of(order)
        self._programs: dict[tuple[int, ...], GraphProgram] = {}
        self._bound: dict[tuple[int, ...], BoundGraph] = {}
        self._pool: CpuWorkerDevice | None = None
        self._old: list[CpuWorkerDevice] = []
        self._plan: tuple[int, ...] = ()
        self._region_bytes = 0

    def map(self, **numbers: Any) -> None:
        """Map another arena, and bind the current plan's program in it."""
        if self._pool is not None:
            self._old.append(self._pool)
        models, work = (open_descriptor(numbers[name]) for name in ("models", "work"))
        self._region_bytes = numbers["region_bytes"]
        settings = WorkerSettings(
            slot=Slot(0),
            device="cpu",
            limits=ResourceLimits(
                arena_bytes=numbers["arena_bytes"],
                fence_count=numbers["fence_count"],
                doorbell_count=1,
            ),
        )
        control_page, doorbells = numbers["control_page"], [numbers["doorbell"]]
        self._pool = CpuWorkerDevice(
            settings, (models, work), control_page=control_page, doorbells=doorbells
        )
        os.close(models)
        os.close(work)
        self._bound = {}
        if self._plan:
            self._bind()
        say()

    def plan(self, plan: list[int], nodes: list[list[int]]) -> None:
        """Set the groups for the next runs."""
        self._plan = tuple(plan)
        if self._plan not in self._programs:
            groups = self._groups(nodes)
            manifest = msgspec.structs.replace(self._manifest, groups=groups)
            self._programs[self._plan] = GraphProgram(manifest, self._graph, "cpu")
        self._bind()
        say()

    def prefault(self) -> None:
        """Fault in the region's pages now, and close earlier mappings."""
        assert self._pool is not None
        while self._old:
            self._old.pop().close()
        self._pool.prefault(self._region_bytes, self._manifest.total_bytes)
        say()

    def run(self, op_id: int, first_fence: int) -> None:
        """Compute each group after its fence has ``op_id``; group 0 waits for ``first_fence``."""
        pool, bound = self._pool, self._bound[self._plan]
        assert pool is not None
        begins_ms: list[float] = []
        ends_ms: list[float] = []
        tensors, groups = self._manifest.tensors, bound.manifest.groups
        last_fence = max(first_fence, len(groups) - 1)
        pool.enter(self._region_bytes, self._manifest.total_bytes, last_fence, op_id)

        def before(index: int) -> None:
            if begins_ms:
                ends_ms.append(now_ms())
            pool.wait_group(first_fence if not begins_ms else index, OpId(op_id))
            for number in groups[index].tensors[-1:]:
                pool.show(tensors[number].offset_bytes + tensors[number].size_bytes)
            begins_ms.append(now_ms())

        outputs = bound.run(self._inputs, before)
        ends_ms.append(now_ms())
        say(begins_ms=begins_ms, ends_ms=ends_ms, checksum=plain.checksum(outputs))

    def _bind(self) -> None:
        pool = self._pool
        assert pool is not None
        if self._plan not in self._bound:
            self._bound[self._plan] = self._programs[self._plan].bind(
                lambda spec: pool.tensor(spec, self._region_bytes)
            )

    def _groups(self, nodes: list[list[int]]) -> tuple[GroupSpec, ...]:
        """Return groups with tensors and nodes; only the parent process needs their byte ranges."""
        layers = layers_of_graph(self._graph)
        return tuple(
            GroupSpec(
                offset_bytes=0,
                size_bytes=0,
                tensors=tuple(
                    weight
                    for layer in layers
                    if first <= layer.first_node < end
                    for weight in layer.weights
                ),
                first_node=first,
                end_node=end,
                label="",
            )
            for first, end in nodes
        )


def main() -> None:
    """Run ``build ORDER`` or ``rig ORDER``."""
    verb, order = sys.argv[1], json.loads(sys.argv[2])
    torch.set_num_threads(order["threads"])
    if verb == "build":
        write_program(order)
        return
    runner = Runner(order)
    say()
    for line in sys.stdin:
        message: dict[str, Any] = json.loads(line)
        getattr(runner, message.pop("verb"))(**message)


if __name__ == "__main__":
    main()
