"""Answers of language models: the loop over their tokens, and the processes that know their texts.

A model's template and tokenizer are in a confined process of their own (``text_process.py``), so
what they take is taken from that model's callers alone. What is asked of the server is what any
request asks: the same roles, queues and counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import subprocess
import sys
from collections import deque
from itertools import count
from typing import Final

import msgspec
import numpy as np

from ..client.tensors import to_frames
from ..errors import InvalidInput, PipeSwitchError, QueueFull, SequenceNotFound, ServerUnavailable
from ..programs import generating
from ..programs.generating import Facts, Token
from ..roles import Standing
from ..sandbox.environment import harmless
from ..shares import Shares
from .http import Head
from .oip import InferRequest
from .service import Service
from .text_process import (
    LENGTH_BYTES,
    Asked,
    Begin,
    Came,
    Drop,
    Lost,
    Step,
    Wrong,
    framed,
)

ANSWERS: Final = 256  # under way, of all callers; one holds a cache on the server
PROCESSES: Final = 8  # of models' texts; of more models the idlest one's ends
TEXT_S: Final = 10.0  # for one reply of such a process, those of its other answers before it
START_S: Final = 60.0  # for its first one: on a busy machine a process starts slowly
MAX_REPLY_BYTES: Final = 16 << 20
AGAIN: Final = "send again in a moment"
COMMAND: Final = (sys.executable, "-P", "-m", "pipeswitch.gateway.text_process")
_numbers = count(1)
_reply = msgspec.msgpack.Decoder(Step | Wrong)


class Talk:
    """With the process of one model's texts. Replies come in the order of what was asked."""

    def __init__(
        self, process: subprocess.Popen[bytes], reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:  # fmt: skip
        self._process, self._reader, self._writer = process, reader, writer
        self._waiting: deque[asyncio.Future[Step | Wrong]] = deque()
        self._reading = asyncio.create_task(self._read())
        self.answers = 0  # under way
        self.is_over = self._has_answered = False

    @staticmethod
    async def open(facts: Facts) -> Talk:
        with contextlib.ExitStack() as undo:
            try:
                ours, theirs = map(undo.enter_context, socket.socketpair())
                process = subprocess.Popen(
                    COMMAND, stdin=theirs.fileno(), stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env={**harmless(os.environ), "OPENBLAS_NUM_THREADS": "1"},
                )  # fmt: skip
            except OSError as error:
                raise ServerUnavailable(f"no process for texts: {error}", hint=AGAIN) from error
            undo.pop_all()
        theirs.close()
        talk = Talk(process, *await asyncio.open_connection(sock=ours))
        talk.tell(facts)
        return talk

    async def ask(self, asked: Asked) -> Step:
        """
        Raises:
            InvalidInput: it cannot be done.
            ServerUnavailable: the process took too long, or died.
        """
        loop = asyncio.get_running_loop()
        reply: asyncio.Future[Step | Wrong] = loop.create_future()
        self.tell(asked)
        self._waiting.append(reply)
        limit_s = TEXT_S if self._has_answered else START_S
        late = loop.call_later(limit_s, self._late, reply)  # also if who asked has hung up
        found = await reply
        late.cancel()
        if isinstance(found, Wrong):
            raise InvalidInput(found.message, hint=found.hint, param=found.param or None)
        return found

    def tell(self, asked: Asked | Facts) -> None:
        if self.is_over:
            raise self._gone()
        try:
            data = msgspec.msgpack.encode(asked)
        except (ValueError, OverflowError, RecursionError) as error:
            raise InvalidInput(f"a value of this request is none: {error}") from None
        self._writer.write(framed(data))

    async def close(self) -> None:
        """End the process; who waits for it is told."""
        self._process.kill()
        await self._reading

    def _late(self, reply: asyncio.Future[Step | Wrong]) -> None:
        if reply in self._waiting:
            self._process.kill()

    async def _read(self) -> None:
        try:
            while True:
                size = int.from_bytes(await self._reader.readexactly(LENGTH_BYTES), "big")
                if size > MAX_REPLY_BYTES:
                    return
                found = _reply.decode(await self._reader.readexactly(size))
                self._has_answered = True
                reply = self._waiting.popleft()
                if not reply.done():
                    reply.set_result(found)
        except (EOFError, OSError, IndexError, msgspec.DecodeError):
            pass  # it died, or lies
        finally:
            self.is_over = True
            self._process.kill()
            self._writer.close()
            for reply in self._waiting:
                if not reply.done():
                    reply.set_exception(self._gone())
            await asyncio.to_thread(self._process.wait)

    def _gone(self) -> ServerUnavailable:
        return ServerUnavailable(
            "the process of this model's texts died, or took too long",
            hint="its chat template or tokenizer may be why; a new one is started",
        )


class Answering:
    """One answer, token by token."""

    def __init__(
        self, texts: Texts, talk: Talk, caller: Standing, head: Head, model: str, version: int
    ) -> None:
        self.id = secrets.token_hex(12)  # of its sequence too
        self.step: Step
        self.tokens: list[int] = []
        self._came: deque[Token] = deque()
        self.model, self.version = model, version
        self._texts, self._talk, self._caller, self._head = texts, talk, caller, head
        self._number = next(_numbers)
        self._is_started = False
        talk.answers += 1

    async def begin(self, asked: Begin) -> None:
        """Raises InvalidInput: the prompt or a setting does not fit."""
        begun = msgspec.structs.replace(asked, answer=self._number)
        self.step = await self._talk.ask(begun)

    async def next(self) -> Token | None:
        """The next token; None: that was the last. A sequence that the server forgot is begun
        again, once for each step."""
        while not self._came and self.step.reason is None:
            step, self._is_started = self.step.next, True
            try:
                outputs, _ = await self._texts.service.infer(
                    self._caller, self.model, str(self.version), _request(self.id, step),
                    self._head.headers, self._head.peer,
                )  # fmt: skip
            except SequenceNotFound:
                if not step.used:
                    raise
                self.step = await self._talk.ask(Lost(answer=self._number))
                continue
            tokens = np.frombuffer(outputs[0].data, np.int64).tolist()
            self.step = await self._talk.ask(Came(answer=self._number, tokens=tokens))
            self._came.extend(self.step.tokens)
        if not self._came:
            return None
        token = self._came.popleft()
        self.tokens.append(token.id)
        return token

    async def close(self) -> None:
        """It is over, or nobody wants the rest: its cache on the server is given back. Once."""
        self._talk.answers -= 1
        with contextlib.suppress(PipeSwitchError):
            self._talk.tell(Drop(answer=self._number))
        if self._is_started:
            self._texts.answers.give(self._head.peer, 1)
            with contextlib.suppress(PipeSwitchError):  # it never began, or the server is gone
                await self._texts.service.end_sequence(self._caller, self.id)


class Texts:
    """All answers, and the processes that they need."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.answers = Shares(ANSWERS, "answers under way")
        self._talks: dict[str, Talk] = {}  # by program, the idlest first
        self._starting = asyncio.Lock()

    async def begin(
        self, caller: Standing, head: Head, model: str, asked: Begin, *, version: str = ""
    ) -> Answering:
        """An answer of that model, whose tokens ``next`` gives.

        Raises:
            QueueFull: too many are under way.
            InvalidInput: the model generates no text, or the request does not fit it.
        """
        with self.answers.holding(head.peer, 1):
            facts = await self.service.generation(caller, model, version)
            async with self._starting:
                talk = self._talks.pop(facts.digest, None)
                if talk is None or talk.is_over:
                    talk = await self._open(caller, model, facts)
                self._talks[facts.digest] = talk
            answering = Answering(self, talk, caller, head, model, facts.version)
            try:
                await answering.begin(asked)
            except BaseException:
                await answering.close()
                raise
            self.answers.add(head.peer, 1)  # until it is closed
            return answering

    async def _open(self, caller: Standing, model: str, facts: Facts) -> Talk:
        """Where there are too many one that is idle goes."""
        self._talks = {key: one for key, one in self._talks.items() if not one.is_over}
        if len(self._talks) >= PROCESSES:
            idle = [key for key, one in self._talks.items() if not one.answers]
            if not idle:
                raise QueueFull(f"{PROCESSES} language models answer already", hint=AGAIN)
            await self._talks.pop(idle[0]).close()
        version = str(facts.version)
        return await Talk.open(
            await self.service.generation(caller, model, version, with_texts=True)
        )


def _request(name: str, step: generating.Step) -> InferRequest:
    """A step, as the model takes it."""
    inputs, frames, _ = to_frames(step.inputs())
    sequence = {"sequence": name, "choose": step.choose, **({} if step.used else {"start": True})}
    return InferRequest(id="", inputs=inputs, frames=frames, sequence=sequence)
