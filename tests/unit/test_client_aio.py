"""The asyncio client has every verb of the blocking client, and calls it."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable
from typing import Any

import pytest

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
