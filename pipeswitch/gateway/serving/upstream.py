"""The gateway's connection to the owner's socket of the server, for asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

from ...base.errors import PipeSwitchError, ServerUnavailable
from ...base.extras import UPSTREAMS
from ...client.calls import Call, FinalReply
from ...client.looped import LoopConnection
from ...client.verbs import SAFE_JOB_ACTIONS
from ...wire.frames import CHUNK_BYTES
from ...wire.request_timing import RequestTiming
from .oip import InferRequest, Output

HELLO_S: Final = 2.0  # a running server answers within this time
EVENTS_AGAIN_S: Final = 0.5  # pause before the next try to follow events of a lost server
AGAIN: Final = "try again when the server is back"

Take = Callable[[str, dict[str, Any]], None]
"""Callback with an event's topic and record, called by the loop."""


class _Connection(LoopConnection):
    """Connection to one server that may be absent; its errors do not reveal the address."""

    def _fail(self, call: Call, error: PipeSwitchError) -> None:
        if isinstance(error, ServerUnavailable) and self.address in error.message:
            error = ServerUnavailable("the server does not answer", hint=AGAIN)
        super()._fail(call, error)


class Upstream:
    """Connections to the server, which survive its restart.

    Every call raises the server's own error, or ServerUnavailable if it is absent or shutting down.
    """

    def __init__(self, address: str, cluster: str = "") -> None:
        """Create the connections; ``cluster`` is the file of the table of nodes, or empty."""
        self._connection: LoopConnection = _Connection(address, HELLO_S)
        if cluster:
            self._connection = UPSTREAMS.load("cluster")(self._connection, Path(cluster))
        self._events = _Connection(address, HELLO_S)
        self._following: asyncio.Task[None] | None = None

    def close(self) -> None:
        if self._following is not None:
            self._following.cancel()
        self._connection.close()
        self._events.close()

    def infer(
        self,
        model: str,
        version: int,
        request: InferRequest,
        tenant: str,
        address: str = "",
        traceparent: str = "",
    ) -> Awaitable[tuple[list[Output], dict[str, Any]]]:
        """Return the outputs and the timing. Cancelling this cancels the request.

        Version 0 is the current one; ``tenant`` and ``address`` are the caller's.
        """
        body: dict[str, Any] = {"tenant": tenant} if tenant else {}  # no tenant: the owner
        if address:
            body["address"] = address
        if version:
            body["version"] = version
        if traceparent:
            body["traceparent"] = traceparent
        if request.sequence:
            body |= request.sequence
            if request.outputs:
                body["outputs"] = [one.name for one in request.outputs]
        return self._connection.ask(
            "infer",
            model=model,
            inputs=request.inputs,
            frames=request.frames,
            priority=request.priority,
            deadline_ms=request.deadline_ms,
            body=body,
            is_safe=not request.sequence,  # a repeated step of a sequence would be computed twice
            convert=_outputs,
        )

    def request(
        self, verb: str, model: str, **options: Any
    ) -> Awaitable[tuple[dict[str, Any], dict[str, Any]]]:
        """Return the final reply's body and the timing. Cancelling this cancels the request."""
        return self._connection.ask(verb, model=model, convert=_body, **options)

    async def show(self, model: str, version: int = 0) -> dict[str, Any]:
        """Return a model's row, of the current version or another."""
        body = {"version": version} if version else None
        return dict((await self.ask("show", model, body=body))["model"])

    async def ask(
        self, op: str, model: str = "", *, body: dict[str, Any] | None = None, is_safe: bool = True
    ) -> dict[str, Any]:
        """Return the answer to a verb; ``is_safe``: it may be sent twice."""
        return dict((await self._connection.ask(op, model=model, body=body, is_safe=is_safe)).body)

    async def job(self, name: str, action: str, **fields: Any) -> dict[str, Any]:
        """Perform one action on a job, like ``Client.job``."""
        body = {"name": name, "action": action, **fields}
        return await self.ask("job", body=body, is_safe=action in SAFE_JOB_ACTIONS)

    async def upload(self, data: memoryview, kind: str, tenant: str) -> str:
        """Send a tenant's file to the server in chunks; return its source for ``register``."""
        digest = (await asyncio.to_thread(hashlib.sha256, data)).hexdigest()
        body = {"digest": digest, "size_bytes": len(data), "kind": kind, "tenant": tenant}
        state = await self.ask("put", body={**body, "offset_bytes": 0}, is_safe=False)
        offset = 0
        while not state["complete"]:
            where = {**body, "offset_bytes": offset}
            chunk = data[offset : offset + CHUNK_BYTES]
            state = (await self._connection.ask("put", body=where, frames=[chunk])).body
            offset = state["offset_bytes"]  # another upload of the same file may be ahead
        return f"put:{digest}"

    async def follow(self, take: Take) -> None:
        """Call ``take`` with all events from now on; only the first call has an effect.

        Raises:
            ServerUnavailable: there is no server now.
        """
        if self._following is not None:
            return
        await self.ask("ping")
        if self._following is None:
            self._following = asyncio.create_task(self._follow(take))

    async def _follow(self, take: Take) -> None:
        """Follow events on a connection of their own, so that no answer waits behind them."""

        def took(record: dict[str, Any]) -> None:
            if record:
                take(str(record.pop("topic")), record)

        while True:
            with contextlib.suppress(PipeSwitchError):
                await self._events.ask("events", on_progress=took)
            await asyncio.sleep(EVENTS_AGAIN_S)


def _body(reply: FinalReply) -> tuple[dict[str, Any], dict[str, Any]]:
    return reply.body, (reply.timing or RequestTiming()).as_dict()


def _outputs(reply: FinalReply) -> tuple[list[Output], dict[str, Any]]:
    outputs = []
    for one in reply.outputs:
        data = reply.frames[one.frame]
        outputs.append(Output(name=one.name, dtype=one.dtype, shape=one.shape, data=data))
    return outputs, (reply.timing or RequestTiming()).as_dict()
