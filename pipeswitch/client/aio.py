"""``AsyncClient``: the verbs of ``Client`` for asyncio. The same I/O thread does the work."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from typing import Any

import zmq
import zmq.asyncio

from ..wire.frames import unpack_dict
from .client import CONNECT_TIMEOUT_S, Client, Progress, Task
from .tensors import Result


class AsyncClient:
    """A connection to a server, awaited. Arguments and errors are those of ``Client``.

    Cancelling a task that awaits ``infer`` takes the request back from the server.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        timeout_s: float = CONNECT_TIMEOUT_S,
        key: str | os.PathLike[str] | None = None,
        server_key: str | os.PathLike[str] | None = None,
    ) -> None:
        self._client = Client(address, timeout_s=timeout_s, key=key, server_key=server_key)
        self.address = self._client.address

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End the connection."""
        await asyncio.to_thread(self._client.close)

    def submit(self, model: str, inputs: Any = None, /, **options: Any) -> asyncio.Future[Result]:
        """Send a request now; await the future for its Result."""
        return asyncio.wrap_future(self._client.submit(model, inputs, **options))

    async def infer(self, model: str, inputs: Any = None, /, **options: Any) -> Result:
        """Send a request and await its result."""
        return await self.submit(model, inputs, **options)

    def prefetch(self, model: str) -> None:
        """A hint that requests for ``model`` follow."""
        self._client.prefetch(model)

    async def register(
        self, name: str, source: Any, *, progress: Progress | None = None, **options: Any
    ) -> dict[str, Any]:
        """Make a model servable; ``progress`` is called on the event loop."""
        return await asyncio.to_thread(
            self._client.register, name, source, progress=_on_this_loop(progress), **options
        )

    async def unregister(self, name: str) -> dict[str, Any]:
        return await asyncio.to_thread(self._client.unregister, name)

    async def load(self, name: str) -> dict[str, Any]:
        return await asyncio.to_thread(self._client.load, name)

    async def unload(self, name: str) -> dict[str, Any]:
        return await asyncio.to_thread(self._client.unload, name)

    async def models(self) -> list[dict[str, Any]]:
        return await asyncio.to_thread(self._client.models)

    async def show(self, name: str) -> dict[str, Any]:
        return await asyncio.to_thread(self._client.show, name)

    async def profile(
        self, name: str, batches: Sequence[int] = (), *, progress: Progress | None = None
    ) -> dict[str, Any]:
        """Measure a model layer by layer; ``progress`` is called on the event loop."""
        return await asyncio.to_thread(
            self._client.profile, name, batches, progress=_on_this_loop(progress)
        )

    async def plan(self) -> dict[str, Any]:
        return await asyncio.to_thread(self._client.plan)

    async def train(self, entry: str, *, name: str = "", args: Sequence[str] = ()) -> AsyncTask:
        """Start a training script as a background job."""
        task = await asyncio.to_thread(self._client.train, entry, name=name, args=args)
        return AsyncTask(task)

    async def jobs(self) -> list[dict[str, Any]]:
        return await asyncio.to_thread(self._client.jobs)

    async def ps(self) -> list[dict[str, Any]]:
        return await asyncio.to_thread(self._client.ps)

    async def stats(self) -> dict[str, Any]:
        return await asyncio.to_thread(self._client.stats)

    async def ping(self, *, deep: bool = False) -> dict[str, Any]:
        return await asyncio.to_thread(self._client.ping, deep=deep)

    async def trace(self, seconds: float = 10.0) -> dict[str, Any]:
        return await asyncio.to_thread(self._client.trace, seconds)

    async def events(self, *topics: str) -> AsyncIterator[dict[str, Any]]:
        """Records as the server publishes them; ``async for``, until the caller stops."""
        plain = await asyncio.to_thread(self._client.subscribe, *topics)
        subscriber: zmq.asyncio.Socket = zmq.asyncio.Socket.from_socket(plain)
        try:
            while True:
                topic, body = await subscriber.recv_multipart()
                yield {"topic": topic.decode("utf-8", "replace"), **unpack_dict(body)}
        except zmq.ContextTerminated:
            return  # the client was closed
        finally:
            subscriber.close(0)
            plain.close(0)


class AsyncTask:
    """A training job's handle, awaited."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self.name = task.name

    async def status(self) -> dict[str, Any]:
        return await asyncio.to_thread(self._task.status)

    async def pause(self) -> dict[str, Any]:
        return await asyncio.to_thread(self._task.pause)

    async def resume(self) -> dict[str, Any]:
        return await asyncio.to_thread(self._task.resume)

    async def cancel(self) -> dict[str, Any]:
        return await asyncio.to_thread(self._task.cancel)

    async def wait(self, timeout_s: float | None = None) -> dict[str, Any]:
        return await asyncio.to_thread(self._task.wait, timeout_s)


def _on_this_loop(progress: Progress | None) -> Progress | None:
    """Called from any thread, it calls ``progress`` on the loop that runs now."""
    if progress is None:
        return None
    loop = asyncio.get_running_loop()

    def report(stage: str, fraction: float) -> None:
        loop.call_soon_threadsafe(progress, stage, fraction)

    return report
