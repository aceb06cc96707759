"""The server, as the gateway sees it: one connection to the owner's socket, awaited."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Callable
from typing import Any, Final

from ..client.calls import Reply
from ..client.looped import LoopConnection
from ..errors import ServerUnavailable
from ..wire.bill import Bill
from ..wire.frames import CHUNK_BYTES
from .oip import InferRequest, Output

HELLO_S: Final = 2.0  # a server that is there answers within this
EVENTS_AGAIN_S: Final = 0.5  # when the server is gone: it may come back
AGAIN: Final = "send again when it is back"

Take = Callable[[str, dict[str, Any]], None]
"""Called by the loop with an event's topic and record."""


class Upstream:
    """What callers ask the server through; it outlives servers."""

    def __init__(self, address: str) -> None:
        self._connection = LoopConnection(address, HELLO_S)
        self._events = LoopConnection(address, HELLO_S)
        self._following: asyncio.Task[None] | None = None

    def close(self) -> None:
        if self._following is not None:
            self._following.cancel()
        self._connection.close()
        self._events.close()

    async def infer(
        self, model: str, version: int, asked: InferRequest, tenant: str
    ) -> tuple[list[Output], dict[str, Any]]:
        """The outputs and the bill. To cancel this takes the request back.

        Version 0 is the current one; ``tenant`` is who asks.
        """
        reply = await self._ask(
            "infer",
            model=model,
            inputs=asked.inputs,
            frames=asked.frames,
            priority=asked.priority,
            deadline_ms=asked.deadline_ms,
            body=_body(version=version, tenant=tenant),
        )
        outputs = [
            Output(name=one.name, dtype=one.dtype, shape=one.shape, data=reply.frames[one.frame])
            for one in reply.outputs
        ]
        return outputs, (reply.timing or Bill()).as_dict()

    async def show(self, model: str, version: int = 0) -> dict[str, Any]:
        """A model's row; of the current version, or another."""
        reply = await self._ask("show", model=model, body=_body(version=version))
        row: dict[str, Any] = reply.body["model"]
        return row

    async def ask(
        self, op: str, model: str = "", *, body: dict[str, Any] | None = None, is_safe: bool = True
    ) -> dict[str, Any]:
        """The answer to a verb; ``is_safe``: it may be asked twice."""
        return (await self._ask(op, model=model, body=body, is_safe=is_safe)).body

    async def job(self, name: str, action: str, **fields: Any) -> dict[str, Any]:
        """One action on a job, as ``Client.job``."""
        body = {"name": name, "action": action, **fields}
        return await self.ask("job", body=body, is_safe=action in ("show", "logs"))

    async def upload(self, data: memoryview, kind: str, tenant: str) -> str:
        """Hand a file of that tenant's on, chunk after chunk; what ``register`` calls it."""
        digest = (await asyncio.to_thread(hashlib.sha256, data)).hexdigest()
        body = {"digest": digest, "size_bytes": len(data), "kind": kind, "tenant": tenant}
        found = await self.ask("put", body={**body, "offset_bytes": 0}, is_safe=False)
        for offset in range(0, 0 if found["complete"] else len(data), CHUNK_BYTES):
            chunk = data[offset : offset + CHUNK_BYTES]
            where = {**body, "offset_bytes": offset}
            await self._ask("put", body=where, frames=[chunk], is_safe=False)
        return f"put:{digest}"

    async def follow(self, take: Take) -> None:
        """Have ``take`` called with all events from now on; only the first call counts.

        Raises:
            ServerUnavailable: there is no server now.
        """
        if self._following is not None:
            return
        await self.ask("ping")
        if self._following is None:
            self._following = asyncio.create_task(self._follow(take))

    async def _follow(self, take: Take) -> None:
        """By a connection of their own: no answer waits behind them."""

        def took(record: dict[str, Any]) -> None:
            if record:
                take(str(record.pop("topic")), record)

        while True:
            with contextlib.suppress(ServerUnavailable):
                await self._events.ask("events", on_progress=took)
            await asyncio.sleep(EVENTS_AGAIN_S)

    async def _ask(self, op: str, **fields: Any) -> Reply:
        """
        Raises:
            ServerUnavailable: there is no server, or it leaves.
            PipeSwitchError: what it says.
        """
        try:
            reply: Reply = await self._connection.ask(op, **{"is_safe": True, **fields})
        except ServerUnavailable as error:
            raise ServerUnavailable("the server does not answer", hint=AGAIN) from error
        return reply


def _body(**fields: Any) -> dict[str, Any]:
    """Those that say something: of the owner's request for the current version none."""
    return {key: value for key, value in fields.items() if value}
