"""``bench state``: time to copy a model's state to the device (SwitchFlow, table 1).

README.md describes the arms, which differ most for models with many small tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Final

from pipeswitch.planning.grouping import bucket, spans
from pipeswitch.programs.interface.layout import TENSOR_ALIGN_BYTES, aligned

from .lane import PlainCopy
from .models import MIB
from .rig import Engine
from .setting import end, next_answer, read_line, spawn
from .trials import Arm, Numbers, Run, now_ms

MODELS: Final = (
    "mobilenet_v2",
    "densenet121",
    "resnet50",
    "inception_v3",
    "densenet169",
    "vgg16",
    "vgg19",
)
QUICK_MODELS: Final = ("mobilenet_v2", "densenet121", "resnet50", "vgg16")
SKIPPED: Final = {"inception_resnet_v2": "torchvision has none"}
ROUNDS: Final = 100
QUICK_ROUNDS: Final = 20
MANY_TENSORS: Final = 500
MAX_OVER_PLAIN: Final = 1.25  # limit of our time / a plain copy's, from MANY_TENSORS tensors up


def run(bench: Run, _: Sequence[str] = ()) -> None:
    """Measure the models of SwitchFlow's table that torchvision has."""
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
    p50 = {arm.name: bench.p50(name, arm.name, "transfer_ms") for arm in arms}
    for arm, value in p50.items():
        bench.find(f"{name}: {arm}, p50", value, "ms")
        bench.find(f"{name}: {arm}, p50 per MiB", value / mib, "ms/MiB")
    share = p50["packed"] / p50["plain-copy"]
    at_most = MAX_OVER_PLAIN if len(tensor_bytes) >= MANY_TENSORS else None
    bench.find(f"{name}: packed / plain copy, p50", share, at_most=at_most)
    bench.find(f"{name}: per-tensor / packed, p50", p50["per-tensor"] / p50["packed"])


class Packed(Engine):
    """A model's bytes in a store and an arena, in layer groups."""

    def __init__(self, tensor_bytes: Sequence[int]) -> None:
        places = [aligned(size, TENSOR_ALIGN_BYTES) for size in tensor_bytes]
        self.size_bytes = sum(places)
        super().__init__(self.size_bytes)
        groups = spans(bucket(places), len(places))
        sizes = [sum(places[first:end]) for first, end in groups]
        self._groups = [*zip(accumulate(sizes, initial=0), sizes, strict=False)]
        view: Any = self.memory.store_view(0, self.store_bytes)
        view[:] = bytes(self.store_bytes)  # allocate the pages, as after a registration
        view.release()

    def measure(self) -> Numbers:
        """Copy all groups once; return the time in ms."""
        self.op_id += 1
        began_ms = now_ms()
        self.transmit(self._groups)
        self.ended.get()
        return {"transfer_ms": now_ms() - began_ms}
