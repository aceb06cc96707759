"""A memory daemon's cuda device over a fake GPU, and transmissions to it."""

from __future__ import annotations

import os
from queue import Queue

from fake_cuda import World

from pipeswitch.devices.cuda.bindings import Cuda
from pipeswitch.devices.cuda.memory import CudaDeviceMemory
from pipeswitch.ipc.board import new_bell, sealed_memfd
from pipeswitch.ipc.messages import Epoch, GroupCopy, ModelName, TransmitEnded, TransmitModel

MIB = 1 << 20
ARENA_BYTES = STORE_BYTES = 8 * MIB
WORDS = 64
DEADLINE_S = 30.0


class Rig:
    """A daemon's device over a fake world."""

    def __init__(self, world: World | None = None, **options: object) -> None:
        self.world = world or World()
        self.store = sealed_memfd("test-store", STORE_BYTES)
        self.bells = [new_bell()]
        self.lost: list[bool] = []
        self.ended: Queue[TransmitEnded] = Queue()
        self.memory = CudaDeviceMemory(
            Cuda(self.world.runtime, self.world.driver),
            index=0, store=self.store, bells=self.bells, arena_bytes=ARENA_BYTES,
            store_bytes=STORE_BYTES, words=WORDS, on_lost=lambda: self.lost.append(True),
            **options,  # type: ignore[arg-type]
        )  # fmt: skip

    def run(self, order: TransmitModel) -> TransmitEnded:
        self.memory.transmit(order, self.ended.put)
        return self.ended.get(timeout=DEADLINE_S)

    def arena(self, start: int, size: int) -> bytes:
        return self.world.bytes_at(self.memory.base + start, size)

    def words(self, count: int = WORDS) -> list[int]:
        raw = self.arena(0, 4 * count)
        return [int.from_bytes(raw[i : i + 4], "little") for i in range(0, len(raw), 4)]

    def host_words(self) -> list[int]:
        raw = os.pread(self.memory.export_descriptors()[0], 4 * WORDS, 0)
        return [int.from_bytes(raw[i : i + 4], "little") for i in range(0, len(raw), 4)]

    def fill_store(self, offset: int, data: bytes) -> None:
        self.memory.store_view(offset, len(data))[:] = data

    def close(self) -> None:
        self.memory.close()
        for descriptor in (self.store, *self.bells):
            os.close(descriptor)


def order(epoch: int, sizes: list[int], *, start: int = MIB, first_word: int = 0) -> TransmitModel:
    groups, position = [], 0
    for index, size in enumerate(sizes):
        groups.append(
            GroupCopy(
                store_offset_bytes=position, arena_offset_bytes=start + position,
                size_bytes=size, word=first_word + index,
            )
        )  # fmt: skip
        position += size
    return TransmitModel(
        model=ModelName("m"), epoch=Epoch(epoch), arena_offset_bytes=start,
        region_bytes=position, groups=tuple(groups),
    )  # fmt: skip
