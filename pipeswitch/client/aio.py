"""``AsyncClient``: the verbs of ``Client`` as coroutines. A background thread does the I/O."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from typing import Any

from .calls import as_wait_s
from .client import CONNECT_TIMEOUT_S, Client, Task
from .sequence import RequestSequence
from .tensors import Result
from .verbs import AsyncVerbs, AsyncWrapper, as_async, in_thread


class AsyncClient(AsyncVerbs[Client]):
    """Connection to a server for asyncio. Arguments and errors are those of ``Client``.

    If you cancel a task that awaits ``infer``, the server cancels the request.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        timeout_s: float = CONNECT_TIMEOUT_S,
        key: str | os.PathLike[str] | None = None,
        server_key: str | os.PathLike[str] | None = None,
        shared_memory: bool = True,
    ) -> None:
        client = Client(
            address,
            timeout_s=timeout_s,
            key=key,
            server_key=server_key,
            shared_memory=shared_memory,
        )
        super().__init__(client)
        self.address = self._awaits.address

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    close = as_async(Client.close)
    register = as_async(Client.register)
    upload = as_async(Client.upload)
    profile = as_async(Client.profile)
    subscribe = as_async(Client.subscribe)
    sequences = as_async(Client.sequences)
    end_sequence = as_async(Client.end_sequence)

    def submit(self, model: str, /, *inputs: Any, **options: Any) -> asyncio.Future[Result]:
        """Send a request now; await the future for its Result."""
        return asyncio.wrap_future(self._awaits.submit(model, *inputs, **options))

    async def infer(self, model: str, /, *inputs: Any, **options: Any) -> Result:
        """Send a request and await its result."""
        return await self.submit(model, *inputs, **options)

    def sequence(self, model: str, *, id: str = "", version: int = 0) -> AsyncRequestSequence:
        """Return a sequence, like ``Client.sequence``. Use ``async with`` and await ``infer``."""
        return AsyncRequestSequence(self._awaits.sequence(model, id=id, version=version))

    async def generate(self, model: str, prompt: Any, **options: Any) -> AsyncIterator[Any]:
        """Yield tokens like ``Client.generate``, until the caller stops; no thread waits."""
        loop, news = asyncio.get_running_loop(), asyncio.Event()
        answer = await in_thread(self._awaits.generate, model, prompt, **options)
        answer.on_news.append(lambda: loop.call_soon_threadsafe(news.set))
        try:
            while True:
                news.clear()
                while (token := answer.take()) is not None:
                    yield token
                if answer.reason is not None:
                    return
                await news.wait()
        finally:
            answer.close()

    def prefetch(self, model: str) -> None:
        """Hint to the server that requests for ``model`` will follow."""
        self._awaits.prefetch(model)

    async def train(self, entry: str | os.PathLike[str], **options: Any) -> AsyncTask:
        """Start a training script as a background job."""
        return AsyncTask(await in_thread(self._awaits.train, entry, **options))

    def task(self, name: str) -> AsyncTask:
        """Return the handle of an existing job."""
        return AsyncTask(self._awaits.task(name))

    async def events(self, *topics: str) -> AsyncIterator[dict[str, Any]]:
        """Yield records as the server publishes them, until the caller stops; use ``async for``."""
        loop, news = asyncio.get_running_loop(), asyncio.Event()

        def on_news() -> None:
            loop.call_soon_threadsafe(news.set)

        subscription = await self.subscribe(*topics, on_news=on_news)
        try:
            while not subscription.is_over:
                news.clear()
                while (record := subscription.take(0)) is not None:
                    yield record
                if not subscription.is_over:
                    await news.wait()
        finally:
            await in_thread(subscription.close)


class AsyncRequestSequence(AsyncWrapper[RequestSequence]):
    """Sequence of requests, as ``AsyncClient.sequence`` returns it."""

    infer = as_async(RequestSequence.infer)
    close = as_async(RequestSequence.close)

    async def __aenter__(self) -> AsyncRequestSequence:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class AsyncTask(AsyncWrapper[Task]):
    """Handle of a training job for asyncio."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.name = task.name

    status = as_async(Task.status)
    pause = as_async(Task.pause)
    move = as_async(Task.move)
    resume = as_async(Task.resume)
    cancel = as_async(Task.cancel)
    history = as_async(Task.history)
    export = as_async(Task.export)
    remove = as_async(Task.remove)

    async def wait(self, timeout_s: float | None = None) -> dict[str, Any]:
        """Wait until the job is over, like ``Task.wait``, without a thread."""
        end = asyncio.wrap_future(self._awaits._end())
        return dict((await asyncio.wait_for(end, as_wait_s(timeout_s))).body["job"])

    async def logs(self, follow: bool = False) -> AsyncIterator[str]:
        """Yield the log from its start, in pieces, like ``Task.logs``."""
        pieces = self._awaits.logs(follow)
        while (piece := await in_thread(next, pieces, None)) is not None:
            yield piece
