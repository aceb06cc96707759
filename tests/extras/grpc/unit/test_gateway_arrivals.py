"""Fair shares of the memory for gRPC messages that have arrived only partly, by address."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

pytest.importorskip("grpc", reason="make installs it")

from pipeswitch.base.errors import QueueFull
from pipeswitch.base.quotas import FairQuota
from pipeswitch.extras.grpc.half_messages import Arrivals

SIZE = 400 << 20
ALONE = SIZE * 3 // 4


class Wire:
    """Connections, with the number of bytes that the kernel has received on each."""

    def __init__(self) -> None:
        self.arrived: dict[str, int] = {}
        self.shares = FairQuota(SIZE)
        self.arrivals = Arrivals(self.shares, lambda peers: self.arrived)

    def arrive(self, peer: str, size: int) -> None:
        self.arrived[peer] = self.arrived.get(peer, 0) + size
        self.arrivals.look()
        self.shares.check()


class Call:
    """gRPC call that waits for its next message."""

    def __init__(self, wire: Wire, peer: str) -> None:
        self._peer = peer
        self.came: asyncio.Queue[bytes] = asyncio.Queue()
        self.read = self.came.get  # the interface of gRPC's contexts
        self._call = wire.arrivals.call(cast(Any, self), peer.partition(":")[0])
        self.arriving = self._call.__enter__()
        self.task = asyncio.create_task(self.arriving.next())

    def peer(self) -> str:
        return self._peer

    async def ended(self) -> Any:
        """Leave the call after it has ended; return its message or its error."""
        try:
            return await self.task
        except QueueFull as error:
            return error
        finally:
            self._call.__exit__(None, None, None)


def test_an_address_with_more_than_its_share_of_half_messages_loses_the_largest() -> None:
    async def scenario() -> None:
        wire = Wire()
        calls = {peer: Call(wire, peer) for peer in ("a:1", "a:2", "b:1")}
        await asyncio.sleep(0)
        wire.arrive("a:1", ALONE // 3)
        wire.arrive("b:1", 1 << 20)
        assert not any(call.task.done() for call in calls.values())
        wire.arrive("a:2", ALONE - ALONE // 3)
        assert isinstance(await calls["a:2"].ended(), QueueFull)
        assert wire.shares.of("a") == ALONE // 3  # the other call of this address continues
        await asyncio.sleep(0)
        assert not calls["a:1"].task.done()
        assert not calls["b:1"].task.done()
        for peer in ("a:1", "b:1"):
            calls[peer].came.put_nowait(b"x" * 1000)
            assert len(await calls[peer].ended()) == 1000

    asyncio.run(scenario())


def test_all_calls_of_a_connection_with_too_many_half_messages_end() -> None:
    async def scenario() -> None:
        wire = Wire()
        calls = [Call(wire, "a:1") for _ in range(100)]
        await asyncio.sleep(0)
        for _ in range(50):
            wire.arrive("a:1", ALONE // 49)
        endings = [await call.ended() for call in calls]
        assert all(isinstance(one, QueueFull) for one in endings)
        wire.arrivals.look()
        assert not wire.shares.held

    asyncio.run(scenario())


@pytest.mark.parametrize("is_gone", [False, True])
def test_bytes_are_given_back_when_the_calls_or_the_connection_end(is_gone: bool) -> None:
    async def scenario() -> None:
        wire = Wire()
        call = Call(wire, "a:1")
        await asyncio.sleep(0)
        wire.arrive("a:1", ALONE // 2)
        assert wire.shares.of("a") == ALONE // 2
        call.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call.ended()
        if is_gone:
            wire.arrived.clear()
        wire.arrivals.look()
        assert not wire.shares.held
        again = Call(wire, "a:1")
        await asyncio.sleep(0)
        wire.arrive("a:1", 1 << 20)
        assert wire.shares.of("a") == 1 << 20  # only bytes since the call began count
        again.came.put_nowait(b"x")
        assert await again.ended() == b"x"

    asyncio.run(scenario())


def test_a_busy_connection_with_an_idle_stream_is_not_refused() -> None:
    """Send complete messages: bytes of headers and frames must not count as incomplete messages."""

    async def scenario() -> None:
        wire = Wire()
        idle = Call(wire, "a:1")
        message = bytes(1 << 20)
        around = 300 + 31 * len(message) // (16 << 10)  # bytes of headers, and of frames and TLS
        for _ in range(2000):
            call = Call(wire, "a:1")
            wire.arrived["a:1"] = wire.arrived.get("a:1", 0) + len(message) + around
            call.came.put_nowait(message)
            assert await call.ended() == message
            wire.arrivals.look()
        assert not wire.shares.held
        idle.came.put_nowait(b"x")
        assert await idle.ended() == b"x"

    asyncio.run(scenario())
