"""Stage ``link``: how fast the bytes of a model reach the GPU in 50 groups.

The arms differ in the host's memory (a registered memfd, as the store is, or the driver's own) and
in what follows each group: nothing, a fence that the copying stream writes, or one set by the
daemon's own code: written by a second stream behind an event, or copied. All arms take turns, first
on an idle GPU, then while another process computes. The best should reach the link's speed. If
copied fences beat the second stream, ``[device] words`` has the wrong default (ADR 12).
"""

from __future__ import annotations

import sys
from typing import Final

from pipeswitch.devices.cuda.bindings import INDEX, Cuda
from pipeswitch.devices.cuda.fences import FenceWriter
from pipeswitch.devices.cuda.pinned import PIN_BYTES, PinnedBuffer, PinnedMapping
from pipeswitch.devices.order_checks import FENCE_BYTES
from pipeswitch.ipc.control_page import sealed_memfd

from .gpu_common import is_fake, now_ms, package, percentiles, put, require_gpu
from .setting import end, read_line, spawn
from .trials import say

GROUPS: Final = 50
GROUP_BYTES: Final = 8_760_000  # 50 of them are the 438 MB of BERT-base
FENCES: Final = ("no fence", "written", "written by a second stream", "copied")
ROUNDS: Final = 20
WARM_UP_ROUNDS: Final = 3
HEAD_BYTES: Final = 4096  # the fences, before the groups


class Link:
    """Streams and device memory of all arms."""

    def __init__(self, cuda: Cuda, group_bytes: int) -> None:
        self._cuda, self._group_bytes = cuda, group_bytes
        self._base = cuda.malloc(HEAD_BYTES + GROUPS * group_bytes)
        self._copies = cuda.stream()
        self._events = [cuda.event() for _ in range(GROUPS)]
        self._writers = {
            "written by a second stream": FenceWriter(cuda, "write", self._copies),
            "copied": FenceWriter(cuda, "copy", self._copies),
        }

    def send(self, source: int, fences: str) -> float:
        """Copy all groups; return the milliseconds until everything has arrived."""
        cuda, writer, began_ms = self._cuda, self._writers.get(fences), now_ms()
        for index in range(GROUPS):
            offset, fence = index * self._group_bytes, self._base + index * FENCE_BYTES
            target = self._base + HEAD_BYTES + offset
            cuda.copy_to_device(target, source + offset, self._group_bytes, self._copies)
            if writer is not None:
                writer.write(self._events[index], fence, index)
                continue
            if fences == "written":
                cuda.write_value(self._copies, fence, index)
            cuda.record(self._events[index], self._copies)
        cuda.synchronize(self._copies)
        if writer is not None:
            writer.finish()
        return now_ms() - began_ms


def compute() -> None:
    """Multiply matrices until the parent kills this process."""
    import torch

    value = torch.randn(2048, 2048, device="cpu" if is_fake() else f"cuda:{INDEX}")
    say(ready=True)
    while True:
        value = torch.nn.functional.normalize(value @ value)
        value.sum().item()


def main() -> None:
    cuda = Cuda.load(package())
    cuda.set_device(INDEX)
    group_bytes = 4096 if is_fake() else GROUP_BYTES
    size = GROUPS * group_bytes
    room = -(-size // PIN_BYTES) * PIN_BYTES
    mapped = PinnedMapping(cuda, sealed_memfd("link", room), room)
    mapped.pin(0, room)
    own = PinnedBuffer(cuda, size)
    link = Link(cuda, group_bytes)
    put(link_bytes=size, groups=GROUPS, not_pinned=mapped.refusal)
    sources = {"a registered memfd": mapped.address, "the driver's memory": own.address}
    for load in ("idle", "another process computes"):
        times: dict[tuple[str, str], list[float]]
        times = {(memory, fences): [] for memory in sources for fences in FENCES}
        if child := None if load == "idle" else spawn("compute", {}, module="gpu_link"):
            read_line(child)
        for number in range(-WARM_UP_ROUNDS, ROUNDS):
            for (memory, fences), values in times.items():
                took_ms = link.send(sources[memory], fences)
                if number >= 0:
                    values.append(took_ms)
        end(child)
        for (memory, fences), values in times.items():
            total_ms, arm = percentiles(values), f"{memory}, {fences}"
            gb_s = round(size / 1e6 / total_ms["p50"], 1)
            put(case=f"link, {load}", arm=arm, total_ms=total_ms, gb_s=gb_s)


if __name__ == "__main__":
    require_gpu()
    compute() if sys.argv[1:2] == ["compute"] else main()
