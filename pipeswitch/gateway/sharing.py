"""What callers share: bytes of memory, and one thread beside the loop. An address has its share."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from ..shares import Shares

R = TypeVar("R")


class Shared:
    """By all callers, of whichever protocol."""

    def __init__(self, waiting_bytes: int, answer_bytes: int) -> None:
        self.aside = Aside()
        self.waiting = Shares(
            waiting_bytes, "bytes of requests without an answer"
        )  # that are whole
        self.answers = Shares(answer_bytes, "bytes of answers that are not read")


class Aside:
    """One thread for what takes long. Each address has one thing there at a time, so they take
    turns however many one of them has."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "pipeswitch-aside")
        self._turns: dict[str, asyncio.Lock] = {}
        self._waiting: Counter[str] = Counter()

    async def run(self, address: str, function: Callable[..., R], *args: object) -> R:
        """Its result, or what it raises."""
        turn = self._turns.setdefault(address, asyncio.Lock())
        self._waiting[address] += 1
        try:
            async with turn:
                loop = asyncio.get_running_loop()
                return await loop.run_in_executor(self._thread, function, *args)
        finally:
            self._waiting[address] -= 1
            if not self._waiting[address]:
                del self._waiting[address], self._turns[address]
