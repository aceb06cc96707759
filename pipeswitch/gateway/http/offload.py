"""Resources that callers share: memory, and one worker thread. Each address has a share."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Final, TypeVar

from ...base.quotas import FairQuota, TurnQueue

R = TypeVar("R")
CROWD: Final = 8  # above this number of connections or calls, an address's requests take turns
PASS_REQUESTS: Final = 4  # requests of such an address per pass of the loop


class Shared:
    """Resources that callers of all protocols share. ``waiting`` counts complete requests."""

    def __init__(self, waiting_bytes: int, answer_bytes: int) -> None:
        self.aside = OffloadThread()
        self.passes = Passes()
        self.waiting = FairQuota(
            waiting_bytes, "bytes of requests without an answer", "request_bytes"
        )
        self.answers = FairQuota(answer_bytes, "bytes of answers that are not read", "answer_bytes")
        self.queue_full_count = 0  # requests refused with QueueFull
        self.errors: Counter[str] = Counter()  # answers with an error, by HTTP or gRPC status


class OffloadThread:
    """One thread for long work. Each address has at most one item there at a time.
    So addresses take turns, regardless of their number of items."""

    def __init__(self) -> None:
        self._thread = started_pool(1, "pipeswitch-aside")
        self._turns: dict[str, asyncio.Lock] = {}
        self._waiting: Counter[str] = Counter()

    async def run(self, address: str, function: Callable[..., R], *args: object) -> R:
        """Run a function on the thread; return its result, or raise its error."""
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


def started_pool(count: int, name: str) -> ThreadPoolExecutor:
    """Return a pool whose threads are all running.

    If ``submit`` cannot start a thread, it raises, but keeps the work item and runs it much later.
    Then the memory that the item writes may belong to another request.
    """
    pool, barrier = ThreadPoolExecutor(count, name), Barrier(count)
    for _ in range(count):
        pool.submit(barrier.wait)
    return pool


class Passes:
    """Turns of addresses above ``CROWD``: in each pass of the loop, only a few of their requests
    begin, so that these do not delay other addresses."""

    def __init__(self) -> None:
        self._lines: dict[str, TurnQueue[asyncio.Future[None]]] = {}  # address -> waiting requests

    async def turn(self, address: str, caller: str = "") -> None:
        """Wait until a request may begin; the callers of an address take turns."""
        loop = asyncio.get_running_loop()
        if (line := self._lines.get(address)) is None:
            line = self._lines[address] = TurnQueue()
            loop.call_soon(self._begin_some, address)
        line.put(caller, request := loop.create_future())
        await request

    def _begin_some(self, address: str) -> None:
        line, begun = self._lines[address], 0
        while begun < PASS_REQUESTS:
            if (request := line.take()) is None:
                del self._lines[address]
                return
            if not request.done():  # else its peer has hung up
                request.set_result(None)
                begun += 1
        asyncio.get_running_loop().call_soon(self._begin_some, address)
