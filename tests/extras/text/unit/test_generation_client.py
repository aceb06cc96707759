"""Clients' side of a generation: prompts and options."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from click.testing import CliRunner

from pipeswitch.base.errors import InvalidInput
from pipeswitch.cli.main import main
from pipeswitch.client import Client
from pipeswitch.client.aio import AsyncClient
from pipeswitch.extras.text import generation_stream
from pipeswitch.extras.text.generation_stream import check_prompt
from tests.unit.test_cli import answering


def test_a_single_stop_text_is_one_and_not_its_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation_stream, "generated", lambda *_, stop, **__: stop)
    for given, stop in (("END", ("END",)), (["a", "b"], ("a", "b")), (None, ())):
        assert Client.generate(cast(Any, None), "m", "x", stop=cast(Any, given)) == stop


@pytest.mark.parametrize("prompt", [[float("inf")], [1.7], ["1"], b"ab", [None], 5, {"ids": [1]}])
def test_a_prompt_that_is_no_text_and_no_ids_is_refused(prompt: Any) -> None:
    with pytest.raises(InvalidInput):
        check_prompt(prompt, None)
    assert check_prompt(np.arange(3), None) == [0, 1, 2]
    tokenizers = pytest.importorskip("tokenizers")
    with pytest.raises(InvalidInput):  # a lone surrogate
        check_prompt("\ud83d", tokenizers.Tokenizer(tokenizers.models.BPE()).encode)


def test_a_prompt_that_is_not_utf8_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def generate(name: str, text: str, **_: Any) -> Any:
        return check_prompt(text, lambda one: [*one.encode()])

    answering(monkeypatch, generate=generate)
    result = CliRunner().invoke(main, ["generate", "m"], input=b"th\xe9")
    assert (result.exit_code, "valid Unicode" in result.stderr) == (1, True), result


class Answering:
    """Connection whose answers the test gives: one future and one callback for each request."""

    def __init__(self) -> None:
        self.requests: list[tuple[Future[Any], Callable[[Any], None]]] = []

    def request(self, op: str, **options: Any) -> Future[Any]:
        future: Future[Any] = Future()
        options["on_progress"]({})  # the server accepts it
        self.requests.append((future, options["on_progress"]))
        return future


def answering_client() -> tuple[AsyncClient, Answering]:
    facts = {"vocabulary": 100, "eos_ids": [], "bos_id": None, "context": 50, "sampling": {}}
    facts |= {"version": 1, "digest": "d", "has_tokenizer": False}
    plain, connection = Client.__new__(Client), Answering()
    vars(plain).update(_connection=connection, _ask=lambda *_, **__: facts, models=lambda: ["m"])
    client = AsyncClient.__new__(AsyncClient)
    vars(client)["_awaits"] = plain
    return client, connection


def test_many_waiting_answers_hold_no_thread_and_a_cancelled_one_ends_at_once() -> None:
    client, connection = answering_client()

    async def scenario() -> None:
        seen: dict[int, list[int]] = {number: [] for number in range(64)}

        async def read(number: int) -> None:
            async for token in client.generate("m", [1, 2], max_new_tokens=3):
                seen[number].append(token.id)

        tasks = [asyncio.create_task(read(number)) for number in range(64)]
        while len(connection.requests) < 64:
            await asyncio.sleep(0)
        async with asyncio.timeout(30):
            while any(one.name == "pipeswitch-await" for one in threading.enumerate()):
                await asyncio.sleep(0)
            tasks[0].cancel()
            await asyncio.gather(tasks[0], return_exceptions=True)
            (closed,) = [one for one, _ in connection.requests if one.cancelled()]
            for future, on_progress in connection.requests:
                if future is not closed:
                    on_progress({"tokens": [7]})
                    future.set_result(SimpleNamespace(body={"tokens": [8, 9]}, timing=None))
            await asyncio.gather(*tasks[1:])
        assert not seen[0]
        assert all(seen[number] == [7, 8, 9] for number in range(1, 64))

    asyncio.run(scenario())


def test_an_answer_that_begins_after_its_reader_was_cancelled_is_closed() -> None:
    client, connection = answering_client()
    gate = threading.Event()
    ask = vars(client._awaits)["_ask"]
    vars(client._awaits)["_ask"] = lambda *_, **__: (gate.wait(30), ask())[1]

    async def scenario() -> None:
        first = asyncio.create_task(anext(client.generate("m", [1, 2])))
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        gate.set()
        async with asyncio.timeout(30):
            while not (connection.requests and connection.requests[0][0].cancelled()):
                await asyncio.sleep(0)

    asyncio.run(scenario())


def test_an_error_ends_an_awaited_answer_with_itself() -> None:
    client, connection = answering_client()

    async def scenario() -> None:
        answer = client.generate("m", [1, 2])
        first = asyncio.create_task(anext(answer))
        while not connection.requests:
            await asyncio.sleep(0)
        connection.requests[0][0].set_exception(InvalidInput("no"))
        with pytest.raises(InvalidInput):
            await first

    asyncio.run(scenario())
