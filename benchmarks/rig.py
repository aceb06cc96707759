"""A switch without a server: this process owns the device memory, and a child computes.

Copy engine, fences, doorbells and grouped execution are the product's (``devices/cpu``,
``programs/executor``). This module only chooses the groups and when their copies start, so that a
benchmark can change one thing at a time. Only the child imports torch.
"""

from __future__ import annotations

import mmap
import os
import queue
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pipeswitch.devices.cpu.memory import CpuDeviceMemory
from pipeswitch.ipc.control_page import BOARD_BYTES, new_doorbell, sealed_memfd
from pipeswitch.ipc.messages.base import ModelName, OpId, ResourceLimits
from pipeswitch.ipc.messages.daemon import DaemonSettings, GroupCopy, TransmitEnded, TransmitModel
from pipeswitch.programs.interface.layout import REGION_ALIGN_BYTES, aligned

from .lane import fill, packed
from .setting import Setting, end, read_line, spawn, tell
from .trials import Numbers, now_ms

FENCE_COUNT: Final = 4096  # more than any model's number of layers
REGION_BYTES: Final = REGION_ALIGN_BYTES  # offset of the model's region, which follows the fences
MODEL: Final = ModelName("rig")


@dataclass(frozen=True)
class LayerSpan:
    """Layer of the program: offset and size of its weights, and its range of graph nodes."""

    offset_bytes: int
    size_bytes: int
    first_node: int
    end_node: int


@dataclass(frozen=True)
class Switch:
    """Measurements of one switch. Times are milliseconds of the monotonic clock."""

    began_at_ms: float
    arrivals_ms: tuple[float, ...]  # arrival of each group, at or before its computation's start
    begins_ms: tuple[float, ...]  # start of each group's computation
    ends_ms: tuple[float, ...]
    checksum: float
    copy_began_at_ms: float

    @property
    def makespan_ms(self) -> float:
        """Time from the order to copy until the last group has computed, in ms."""
        return self.ends_ms[-1] - self.began_at_ms

    @property
    def computes_ms(self) -> list[float]:
        return [b - a for a, b in zip(self.begins_ms, self.ends_ms, strict=True)]

    @property
    def transfers_ms(self) -> list[float]:
        starts = [self.copy_began_at_ms, *self.arrivals_ms[:-1]]
        return [b - a for a, b in zip(starts, self.arrivals_ms, strict=True)]

    def numbers(self) -> Numbers:
        """Return the times and the checksum that a trial records."""
        return {
            "makespan_ms": self.makespan_ms,
            "transfer_ms": sum(self.transfers_ms),
            "compute_ms": sum(self.computes_ms),
            "stall_ms": self.makespan_ms - sum(self.computes_ms),
            "groups": len(self.begins_ms),
        }


class Engine:
    """The product's device memory and copy engine, with a store, without a server."""

    def __init__(self, size_bytes: int) -> None:
        self.store_bytes = aligned(size_bytes, REGION_ALIGN_BYTES)
        self.doorbell, self.store = new_doorbell(), sealed_memfd("bench-store", self.store_bytes)
        self.op_id = 0
        self.ended: queue.SimpleQueue[TransmitEnded] = queue.SimpleQueue()
        self.memory = self.allocate()

    def allocate(self, link_gbps: float = 0.0) -> CpuDeviceMemory:
        """Return an arena for the model with allocated pages; a link speed of 0.0 is unlimited."""
        settings = DaemonSettings(
            device="cpu",
            limits=ResourceLimits(
                arena_bytes=REGION_BYTES + self.store_bytes,
                store_bytes=self.store_bytes,
                fence_count=FENCE_COUNT,
                link_bytes_per_s=link_gbps * 1e9,
            ),
        )
        return CpuDeviceMemory(settings, store=self.store, doorbells=[self.doorbell])

    def transmit(self, groups: Iterable[tuple[int, int]]) -> None:
        """Start copying groups (offset and size in bytes); the times go to the queue ``ended``."""
        copies = tuple(
            GroupCopy(
                store_offset_bytes=offset_bytes,
                arena_offset_bytes=REGION_BYTES + offset_bytes,
                size_bytes=size_bytes,
                fence=fence,
            )
            for fence, (offset_bytes, size_bytes) in enumerate(groups)
        )
        order = TransmitModel(
            model=MODEL,
            op_id=OpId(self.op_id),
            arena_offset_bytes=REGION_BYTES,
            region_bytes=self.store_bytes,
            groups=copies,
        )
        self.memory.transmit(order, self.ended.put)

    def close(self) -> None:
        """Close the memory, the store and the doorbell."""
        self.memory.close()
        os.close(self.store)
        os.close(self.doorbell)


class Rig(Engine):
    """A model in a store, an arena, and a child that computes on it; ``close`` ends the child."""

    def __init__(self, setting: Setting) -> None:
        """Build the program, which takes seconds; allocate the memory; start the child."""
        order = setting.order() | {"packed_path": f"{setting.order()['packed_path']}.graph"}
        self.layers = _build(order)
        self.manifest, self._weights = packed(order["packed_path"])
        super().__init__(self.manifest.total_bytes)
        self._control_page = sealed_memfd("bench-board", BOARD_BYTES)
        self.fill_store()
        self._child = spawn(
            "rig", order, module="rig_child", keep=(self.doorbell, self._control_page)
        )
        read_line(self._child)
        self.map_arena()

    @property
    def layer_bytes(self) -> list[int]:
        return [layer.size_bytes for layer in self.layers]

    def fill_store(self) -> None:
        """Read the model's weights from their file into the store."""
        view = self.memory.store_view(0, self.store_bytes)
        fill(view, self._weights, self.manifest)
        view.release()

    def use(self, memory: CpuDeviceMemory) -> CpuDeviceMemory:
        """Use another arena from now on; return the old one, which the caller closes."""
        old, self.memory = self.memory, memory
        return old

    def map_arena(self) -> None:
        """Make the child map the arena and bind the model's tensors in it."""
        models, work = self.memory.export_descriptors()
        folder = f"/proc/{os.getpid()}/fd"
        order = {"models": f"{folder}/{models}", "work": f"{folder}/{work}"}
        self._ask(
            "map",
            **order,
            doorbell=self.doorbell,
            control_page=self._control_page,
            fence_count=FENCE_COUNT,
            arena_bytes=self.memory.arena_bytes,
            region_bytes=REGION_BYTES,
        )

    def set_plan(self, plan: Sequence[int]) -> None:
        """Make the child divide the program into groups; ``plan`` has each group's first layer."""
        groups = self.groups(plan)
        self._ask("plan", plan=list(plan), nodes=[[g.first_node, g.end_node] for g in groups])

    def groups(self, plan: Sequence[int]) -> list[LayerSpan]:
        """Return the groups of a plan; a group is one span of its merged layers."""
        ends = [*plan[1:], len(self.layers)]
        return [_merged(self.layers[start:end]) for start, end in zip(plan, ends, strict=True)]

    def forget_store_pages(self) -> None:
        """Unmap the store's pages in this process, so that the next copy faults them in again."""
        self.memory._store_map.madvise(mmap.MADV_DONTNEED)

    def prefault(self) -> None:
        """Make the child fault in the arena's pages, like a standby worker."""
        self._ask("prefault")

    def switch(
        self,
        plan: Sequence[int],
        *,
        resident: int = 0,
        is_pipelined: bool = True,
        began_at_ms: float = 0.0,
    ) -> Switch:
        """Copy all groups but the first ``resident`` groups, and compute. Call ``set_plan`` first.

        Args:
            is_pipelined: if False, computing starts after the last group has arrived."""
        groups = self.groups(plan)
        self.op_id += 1
        began_at_ms = began_at_ms or now_ms()
        last = len(groups) - 1
        tell(self._child, verb="run", op_id=self.op_id, first_fence=0 if is_pipelined else last)
        self.transmit(
            (group.offset_bytes, 0 if index < resident else group.size_bytes)
            for index, group in enumerate(groups)
        )
        record = read_line(self._child)
        ended = self.ended.get()
        begins = record["begins_ms"]
        arrivals = [min(a, b) for a, b in zip(ended.group_ends_at_ms, begins, strict=True)]
        if not is_pipelined:
            arrivals = list(ended.group_ends_at_ms)
        return Switch(
            began_at_ms,
            tuple(arrivals),
            tuple(begins),
            tuple(record["ends_ms"]),
            record["checksum"],
            ended.started_at_ms,
        )

    def resident(self, plan: Sequence[int]) -> Switch:
        """Compute on the arena's contents without copying anything."""
        return self.switch(plan, resident=len(plan))

    def close(self) -> None:
        end(self._child)
        os.close(self._control_page)
        super().close()

    def _ask(self, verb: str, **values: Any) -> Numbers:
        tell(self._child, verb=verb, **values)
        return read_line(self._child)


def _merged(layers: Sequence[LayerSpan]) -> LayerSpan:
    size_bytes = sum(layer.size_bytes for layer in layers)
    return LayerSpan(layers[0].offset_bytes, size_bytes, layers[0].first_node, layers[-1].end_node)


def _build(order: dict[str, Any]) -> list[LayerSpan]:
    """Export and pack the model in a child; return its layers."""
    Path(order["packed_path"]).mkdir(exist_ok=True)
    child = spawn("build", order, module="rig_child")
    rows = read_line(child)["layers"]
    end(child)
    return [LayerSpan(*row) for row in rows]
