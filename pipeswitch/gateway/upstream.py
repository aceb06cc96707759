"""The server, as the gateway sees it: one connection to the owner's socket, awaited."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from ..client.connection import Connection, Reply
from ..errors import ServerUnavailable
from ..wire.addresses import is_refused
from .oip import InferRequest, Output

HELLO_S: Final = 2.0  # a server that is there answers within this
AGAIN: Final = "send again when it is back"


class Upstream:
    """What callers ask the server through; it outlives servers."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._connection = Connection(address, HELLO_S)
        self._was_away = False  # when it was last asked

    def close(self) -> None:
        self._connection.close()

    async def infer(self, model: str, asked: InferRequest) -> tuple[list[Output], dict[str, Any]]:
        """The outputs and the bill. To cancel this takes the request back."""
        reply = await self._ask(
            "infer",
            model=model,
            inputs=asked.inputs,
            frames=asked.frames,
            priority=asked.priority,
            deadline_ms=asked.deadline_ms,
        )
        outputs = [
            Output(name=one.name, dtype=one.dtype, shape=one.shape, data=reply.frames[one.frame])
            for one in reply.outputs
        ]
        return outputs, reply.timing

    async def show(self, model: str) -> dict[str, Any]:
        """A model's row."""
        row: dict[str, Any] = (await self._ask("show", model=model)).body["model"]
        return row

    async def ask(self, op: str, model: str = "") -> dict[str, Any]:
        """The answer to a verb that may be asked twice."""
        return (await self._ask(op, model=model)).body

    async def _ask(self, op: str, **fields: Any) -> Reply:
        """
        Raises:
            ServerUnavailable: there is no server, or it leaves.
            PipeSwitchError: what it says.
        """
        if self._was_away and await asyncio.to_thread(is_refused, self._address):
            raise ServerUnavailable("the server is not there", hint=AGAIN)
        future = self._connection.request(op, is_safe=True, **fields)
        try:
            reply: Reply = await asyncio.wrap_future(future)
        except ServerUnavailable as error:
            self._was_away = True
            raise ServerUnavailable("the server does not answer", hint=AGAIN) from error
        self._was_away = False
        return reply
