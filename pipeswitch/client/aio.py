"""``AsyncClient``: the verbs of ``Client`` for asyncio. The same I/O thread does the work."""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from .client import CONNECT_TIMEOUT_S, Client, Progress, Task
from .tensors import Result

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")


class _Awaited(Generic[S]):
    """What has the verbs of an object of the SDK, awaited."""

    def __init__(self, awaits: S) -> None:
        self._awaits = awaits


def _awaited(
    verb: Callable[Concatenate[S, P], R],
) -> Callable[Concatenate[_Awaited[S], P], Coroutine[Any, Any, R]]:
    """The verb on a thread of its own; ``progress`` is called on the event loop."""
    signature = inspect.signature(verb)

    @functools.wraps(verb)
    async def call(self: _Awaited[S], /, *args: P.args, **options: P.kwargs) -> R:
        if "progress" not in signature.parameters:
            return await asyncio.to_thread(verb, self._awaits, *args, **options)
        given = signature.bind(self._awaits, *args, **options)
        given.arguments["progress"] = _on_this_loop(given.arguments.get("progress"))
        return await asyncio.to_thread(verb, *given.args, **given.kwargs)

    return call


class AsyncClient(_Awaited[Client]):
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

    close = _awaited(Client.close)
    register = _awaited(Client.register)
    upload = _awaited(Client.upload)
    publish = _awaited(Client.publish)
    rollback = _awaited(Client.rollback)
    split = _awaited(Client.split)
    unregister = _awaited(Client.unregister)
    load = _awaited(Client.load)
    unload = _awaited(Client.unload)
    models = _awaited(Client.models)
    show = _awaited(Client.show)
    profile = _awaited(Client.profile)
    plan = _awaited(Client.plan)
    signature = _awaited(Client.signature)
    jobs = _awaited(Client.jobs)
    job = _awaited(Client.job)
    ps = _awaited(Client.ps)
    stats = _awaited(Client.stats)
    trace = _awaited(Client.trace)
    about = _awaited(Client.about)
    ping = _awaited(Client.ping)
    stop_server = _awaited(Client.stop_server)
    subscribe = _awaited(Client.subscribe)

    def submit(self, model: str, inputs: Any = None, /, **options: Any) -> asyncio.Future[Result]:
        """Send a request now; await the future for its Result."""
        return asyncio.wrap_future(self._awaits.submit(model, inputs, **options))

    async def infer(self, model: str, inputs: Any = None, /, **options: Any) -> Result:
        """Send a request and await its result."""
        return await self.submit(model, inputs, **options)

    def prefetch(self, model: str) -> None:
        """A hint that requests for ``model`` follow."""
        self._awaits.prefetch(model)

    async def train(self, entry: str | os.PathLike[str], **options: Any) -> AsyncTask:
        """Start a training script as a background job."""
        return AsyncTask(await asyncio.to_thread(self._awaits.train, entry, **options))

    def task(self, name: str) -> AsyncTask:
        """The handle of a job that is there already."""
        return AsyncTask(self._awaits.task(name))

    async def events(self, *topics: str) -> AsyncIterator[dict[str, Any]]:
        """Records as the server publishes them; ``async for``, until the caller stops."""
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
            await asyncio.to_thread(subscription.close)


class AsyncTask(_Awaited[Task]):
    """A training job's handle, awaited."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.name = task.name

    status = _awaited(Task.status)
    pause = _awaited(Task.pause)
    move = _awaited(Task.move)
    resume = _awaited(Task.resume)
    cancel = _awaited(Task.cancel)
    wait = _awaited(Task.wait)
    history = _awaited(Task.history)
    export = _awaited(Task.export)
    remove = _awaited(Task.remove)

    async def logs(self, follow: bool = False) -> AsyncIterator[str]:
        """The log from its start, in pieces, as ``Task.logs``."""
        pieces = self._awaits.logs(follow)
        while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
            yield piece


def _on_this_loop(progress: Progress | None) -> Progress | None:
    """Called from any thread, it calls ``progress`` on the loop that runs now."""
    if progress is None:
        return None
    loop = asyncio.get_running_loop()

    def report(stage: str, fraction: float) -> None:
        loop.call_soon_threadsafe(progress, stage, fraction)

    return report
