"""The asyncio client has every verb of the blocking client, and calls it."""

from __future__ import annotations

import asyncio
import inspect
import io
import threading
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pipeswitch.base.errors import InvalidInput
from pipeswitch.client import Client, Task
from pipeswitch.client.aio import AsyncClient, AsyncTask
from pipeswitch.client.verbs import AsyncWrapper, as_async


def public_verbs(kind: type) -> set[str]:
    return {name for name, member in vars(kind).items() if callable(member) and name[0] != "_"}


@pytest.mark.parametrize(("plain", "awaited"), [(Client, AsyncClient), (Task, AsyncTask)])
def test_every_verb_is_there_under_its_own_name(plain: type, awaited: type) -> None:
    assert public_verbs(plain) == public_verbs(awaited)
    for name in public_verbs(plain):
        wrapped = getattr(getattr(awaited, name), "__wrapped__", None)
        assert wrapped is None or wrapped is getattr(plain, name)


class Source:
    """Client with a verb that reports its progress."""

    def upload(
        self, path: str, kind: str, progress: Callable[[str, float], None] | None = None
    ) -> tuple[str, str, str]:
        if progress is not None:
            progress("upload", 1.0)
        return path, kind, threading.current_thread().name


class AwaitedSource(AsyncWrapper[Source]):
    upload = as_async(Source.upload)


@pytest.mark.parametrize("is_named", [False, True])
def test_a_verb_runs_on_another_thread_and_its_progress_on_the_loop(is_named: bool) -> None:
    heard: list[Any] = []

    def progress(stage: str, fraction: float) -> None:
        assert asyncio.get_running_loop()
        heard.append((stage, fraction))

    async def scenario() -> None:
        source = AwaitedSource(Source())
        if is_named:
            source_name = await source.upload("p", kind="bundle", progress=progress)
        else:
            source_name = await source.upload("p", "bundle", progress)
        assert source_name[:2] == ("p", "bundle")
        assert source_name[2] != threading.current_thread().name
        assert (await source.upload("p", "bundle"))[0] == "p"
        await asyncio.sleep(0)  # lets the loop run the callback that the other thread scheduled
        assert heard == [("upload", 1.0)]

    asyncio.run(scenario())


def test_a_single_text_is_one_and_not_its_characters() -> None:
    fake: Any = SimpleNamespace(_register=lambda name, request, *_: request)
    request: Any = Client.register(fake, "m", aliases="abc", devices="cpu")
    assert (request.aliases, request.devices) == (("abc",), ("cpu",))


def test_a_file_that_becomes_shorter_while_it_is_sent_ends_the_upload() -> None:
    sent: Future[Any] = Future()
    sent.set_result(SimpleNamespace(body={"credit": 1, "complete": False}))
    fake: Any = SimpleNamespace(_connection=SimpleNamespace(request=lambda *_, **__: sent))
    with pytest.raises(InvalidInput):
        Client._send_file(fake, io.BytesIO(b"ab"), "digest", 9, "bundle", None)


def test_a_wait_that_is_given_up_leaves_no_request_and_no_thread() -> None:
    futures: list[Future[Any]] = []

    def request(*_: Any, **__: Any) -> Future[Any]:
        futures.append(Future())
        return futures[-1]

    task = Task(cast(Any, SimpleNamespace(_connection=SimpleNamespace(request=request))), "job")
    with pytest.raises(TimeoutError):
        task.wait(0)

    async def scenario() -> None:
        before = set(threading.enumerate())
        with pytest.raises(TimeoutError):
            await AsyncTask(task).wait(0)
        waiting = asyncio.create_task(AsyncTask(task).wait())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert set(threading.enumerate()) <= before

    asyncio.run(scenario())
    assert [one.cancelled() for one in futures] == [True] * 3


def test_verbs_are_awaited() -> None:
    for name in public_verbs(Client) - {
        "submit",
        "prefetch",
        "task",
        "events",
        "sequence",
        "generate",
    }:
        assert inspect.iscoroutinefunction(getattr(AsyncClient, name)), name


def test_waiting_verbs_leave_threads_for_others() -> None:
    """More verbs wait than asyncio's default pool has threads; another one is still served."""
    gate = threading.Event()

    class Waits:
        def wait(self) -> bool:
            return gate.wait(30)

        def ask(self) -> str:
            return "answer"

    class Awaits(AsyncWrapper[Waits]):
        wait = as_async(Waits.wait)
        ask = as_async(Waits.ask)

    async def scenario() -> None:
        verbs = Awaits(Waits())
        tasks = [asyncio.create_task(verbs.wait()) for _ in range(64)]
        assert await verbs.ask() == "answer"
        tasks[0].cancel()
        await asyncio.gather(tasks[0], return_exceptions=True)
        assert not gate.is_set()
        gate.set()
        assert await asyncio.gather(*tasks[1:]) == [True] * 63

    asyncio.run(scenario())
