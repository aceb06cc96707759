"""``bench state``: time to bring a model's state to the device (SwitchFlow, table 1).

Arms, in turns: *packed* (ours: the layer groups as the copy engine sends them), *per-tensor*
(allocate and copy each tensor, what ``.to(device)`` and a framework's migration do),
*plain-copy* (the same number of bytes between two mappings: the machine's bound).
Models with many small tensors show the difference: DenseNet121 has a third of ResNet50's bytes
and more than twice its tensors.
"""

from __future__ import annotations

import os
import queue
from collections.abc import Sequence
from typing import Any, Final

from pipeswitch.devices.cpu.memory import CpuDeviceMemory
from pipeswitch.ipc.board import new_bell, sealed_memfd
from pipeswitch.ipc.messages import (
    DaemonSettings,
    Epoch,
    GroupCopy,
    ModelName,
    TransmitEnded,
    TransmitModel,
)
from pipeswitch.planning.fit import quantile
from pipeswitch.planning.grouping import bucket, spans
from pipeswitch.programs.layout import REGION_ALIGN_BYTES, TENSOR_ALIGN_BYTES, aligned

from .lane import PlainCopy
from .models import MIB
from .setting import end, next_answer, read_line, spawn
from .trials import Arm, Numbers, Run, now_ms

MODELS: Final = (
    "mobilenet_v2", "densenet121", "resnet50", "inception_v3", "densenet169", "vgg16", "vgg19",
)  # fmt: skip
QUICK_MODELS: Final = ("mobilenet_v2", "densenet121", "resnet50", "vgg16")
SKIPPED: Final = {"inception_resnet_v2": "torchvision has none"}
ROUNDS: Final = 100
QUICK_ROUNDS: Final = 20
WORDS: Final = 1024
MANY_TENSORS: Final = 500
MAX_OVER_PLAIN: Final = 1.25  # "time near bytes / bandwidth" for a model with so many


def run(bench: Run, _: Sequence[str] = ()) -> None:
    """Each model of SwitchFlow's table that torchvision has."""
    for name in QUICK_MODELS if bench.is_quick else MODELS:
        _one_model(bench, name)
    bench.skip(SKIPPED)
    bench.notes.append("packed: from the order until the copy engine says that all has arrived")


def _one_model(bench: Run, name: str) -> None:
    child = spawn("tensors", {"source": f"torchvision:{name}", "inputs": {}, "seed": 0})
    try:
        tensor_bytes: list[int] = read_line(child)["tensor_bytes"]
        packed = Packed(tensor_bytes)
        plain = PlainCopy(packed.size_bytes)
        arms = [
            Arm("packed", packed.measure),
            Arm("per-tensor", lambda: next_answer(child)),
            Arm("plain-copy", plain.measure),
        ]
        bench.say(f"{name}: {len(tensor_bytes)} tensors, {packed.size_bytes / MIB:.1f} MiB")
        bench.trial_loop(name, arms, bench.rounds(ROUNDS, QUICK_ROUNDS), warmup=2)
        packed.close()
    finally:
        end(child)
    mib = sum(tensor_bytes) / MIB
    bench.find(f"{name}: {mib:.2f} MiB, tensors", len(tensor_bytes))
    p50 = {arm.name: quantile(bench.values(name, arm.name, "transfer_ms"), 0.5) for arm in arms}
    for arm, value in p50.items():
        bench.find(f"{name}: {arm}, p50", value, "ms")
        bench.find(f"{name}: {arm}, p50 per MiB", value / mib, "ms/MiB")
    share = p50["packed"] / p50["plain-copy"]
    at_most = MAX_OVER_PLAIN if len(tensor_bytes) >= MANY_TENSORS else None
    bench.find(f"{name}: packed / plain copy, p50", share, at_most=at_most)
    bench.find(f"{name}: per-tensor / packed, p50", p50["per-tensor"] / p50["packed"])


class Packed:
    """A model's bytes in a store and an arena of ours, in layer groups."""

    def __init__(self, tensor_bytes: Sequence[int]) -> None:
        places = [aligned(size, TENSOR_ALIGN_BYTES) for size in tensor_bytes]
        self.size_bytes = sum(places)
        store_bytes = aligned(self.size_bytes, REGION_ALIGN_BYTES)
        plan = bucket(places)
        self._sizes = [sum(places[first:end]) for first, end in spans(plan, len(places))]
        self._epoch = 0
        self._ended: queue.SimpleQueue[TransmitEnded] = queue.SimpleQueue()
        self._store, self._bell = sealed_memfd("bench-store", store_bytes), new_bell()
        settings = DaemonSettings(
            device="cpu",
            arena_bytes=REGION_ALIGN_BYTES + store_bytes,
            store_bytes=store_bytes,
            words=WORDS,
            link_bytes_per_s=0.0,
        )
        self._memory = CpuDeviceMemory(settings, store=self._store, bells=[self._bell])
        view: Any = self._memory.store_view(0, store_bytes)
        view[:] = bytes(store_bytes)  # its pages are there, as after a registration
        view.release()

    def measure(self) -> Numbers:
        """Send all groups once."""
        self._epoch += 1
        began_ms = now_ms()
        self._memory.transmit(self._order(), self._ended.put)
        self._ended.get()
        return {"transfer_ms": now_ms() - began_ms}

    def close(self) -> None:
        self._memory.close()
        os.close(self._store)
        os.close(self._bell)

    def _order(self) -> TransmitModel:
        groups, offset_bytes = [], 0
        for word, size_bytes in enumerate(self._sizes):
            groups.append(
                GroupCopy(
                    store_offset_bytes=offset_bytes,
                    arena_offset_bytes=REGION_ALIGN_BYTES + offset_bytes,
                    size_bytes=size_bytes,
                    word=word,
                )
            )
            offset_bytes += size_bytes
        return TransmitModel(
            model=ModelName("state"),
            epoch=Epoch(self._epoch),
            arena_offset_bytes=REGION_ALIGN_BYTES,
            region_bytes=offset_bytes,
            groups=tuple(groups),
        )
