"""The server's shared memory: descriptors that outlive the processes which use them."""

from __future__ import annotations

import os
from dataclasses import dataclass

from ..ipc.board import Board, new_bell, sealed_memfd
from ..ipc.messages import (
    CudaOptions,
    JobName,
)


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What is taken of the machine, in bytes; ``threads`` compute on the cpu device."""

    arena_bytes: int
    store_bytes: int
    pool_bytes: int
    words: int
    bell_count: int
    threads: int
    build_threads: int
    build_timeout_s: float
    build_memory_bytes: int
    link_bytes_per_s: float
    cuda: CudaOptions | None = None  # of a cuda device


class Memory:
    """Descriptors of everything that is shared; the controller keeps them all alive."""

    def __init__(self, sizes: Sizes) -> None:
        self.store = sealed_memfd("pipeswitch-store", sizes.store_bytes)
        self.pool = sealed_memfd("pipeswitch-pool", sizes.pool_bytes)
        self.board_descriptor = sealed_memfd("pipeswitch-board", 4096)
        self.board = Board(self.board_descriptor)
        self.bells = [new_bell() for _ in range(sizes.bell_count)]
        self.arena: list[int] = []  # of DaemonReady: the daemon's, anew after its death
        self.arena_handle = b""
        self.commits: dict[JobName, int] = {}

    def take_arena(self, descriptors: list[int], handle: bytes) -> None:
        for old in self.arena:
            os.close(old)
        self.arena = descriptors
        self.arena_handle = handle

    def close(self) -> None:
        self.board.close()
        for descriptor in (
            self.store, self.pool, self.board_descriptor,
            *self.bells, *self.arena, *self.commits.values(),
        ):  # fmt: skip
            os.close(descriptor)
