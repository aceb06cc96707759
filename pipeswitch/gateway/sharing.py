"""What callers share: bytes of memory, and one thread beside the loop. An address has its share."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

from ..errors import QueueFull

R = TypeVar("R")
AGAIN: Final = "send again in a moment"


class Room:
    """Bytes that are held for callers, by address.

    An address may take what leaves as much free for the others: alone it has half, two have a third
    each. So a crowd of one address never takes the place of another's requests.
    """

    def __init__(self, size_bytes: int, what: str) -> None:
        """``what``: is held there, as a refused caller reads it."""
        self.size_bytes = size_bytes
        self.held_bytes = 0
        self._what = what
        self._held: Counter[str] = Counter()

    def left_bytes(self, address: str) -> int:
        """How much more an address may take."""
        return (self.size_bytes - self.held_bytes - self._held[address]) // 2

    def take(self, address: str, size_bytes: int) -> None:
        """
        Raises:
            QueueFull: it would be more than the address may have. What is larger than any share is
                taken where nothing else is held.
        """
        if size_bytes > self.left_bytes(address) and self.held_bytes:
            raise QueueFull(f"too many bytes of {self._what} are held for this address", hint=AGAIN)
        self.held_bytes += size_bytes
        self._held[address] += size_bytes

    @contextlib.contextmanager
    def holding(self, address: str, size_bytes: int) -> Iterator[None]:
        """``take``, and ``give`` at the end."""
        self.take(address, size_bytes)
        try:
            yield
        finally:
            self.give(address, size_bytes)

    def give(self, address: str, size_bytes: int) -> None:
        """They are held no more."""
        self.held_bytes -= size_bytes
        self._held[address] -= size_bytes
        if not self._held[address]:
            del self._held[address]


class Shared:
    """By all callers, of whichever protocol."""

    def __init__(self, waiting_bytes: int, answer_bytes: int) -> None:
        self.aside = Aside()
        self.waiting = Room(waiting_bytes, "requests without an answer")  # that are whole
        self.answers = Room(answer_bytes, "answers that are not read")


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
