"""Answers of language models: the loop over their tokens.

To the server, an answer is a series of requests like any others, with the same roles, queues and
counts. The model's text process (``texts.py``) encodes and decodes text.
"""

from __future__ import annotations

import contextlib
import secrets
from array import array
from collections import deque
from collections.abc import Callable
from itertools import count
from typing import Final

import msgspec
import numpy as np

from ...base.errors import PipeSwitchError, SequenceNotFound
from ...base.roles import ANYONE, Standing
from ...base.shares import Shares
from ...client.tensors import to_frames
from ...programs.decoding import generating
from ...programs.decoding.generating import Facts, Token
from ..http.server import Head
from ..serving.oip import InferRequest
from ..serving.service import Service
from .text_process import Asked, Begin, Came, Drop, Lost, Step, check_length
from .texts import Inline, ProcessLost, Talk, Texts

ANSWERS: Final = 256  # maximum number under way; each holds a cache on the server
TRIES: Final = 3  # for a request whose processes end while they compute it
_numbers = count(1)


class Answers:
    """All answers under way."""

    def __init__(self, service: Service) -> None:
        self.service, self.texts = service, Texts(service)
        self.under_way = Shares(ANSWERS, "answers under way")

    async def begin(
        self,
        caller: Standing,
        head: Head,
        model: str,
        asked: Callable[..., Begin],
        version: str = "",
    ) -> Answering:
        """Return an answer of that model; ``next`` yields its tokens.

        ``asked(own=defaults)`` returns the request, given the defaults of the model's author.

        Raises:
            QueueFull: too many are under way.
            InvalidInput: the model generates no text, or the request does not fit it.
        """
        turn = turn_of(caller, head.peer)
        with self.under_way.holding(turn, 1):
            facts = await self.service.generation(caller, model, version)
            answering = Answering(self, caller, head, model, facts)
            try:
                await answering.begin(asked(own=facts.sampling))
            except BaseException:
                await answering.close()
                raise
            self.under_way.add(turn, 1)  # until it is closed
            return answering


class Answering:
    """One answer, token by token."""

    def __init__(
        self, answers: Answers, caller: Standing, head: Head, model: str, facts: Facts
    ) -> None:
        self.id = secrets.token_hex(12)  # of its sequence too
        self.step: Step
        self.tokens: list[int] = []
        self._came: deque[Token] = deque()
        self.model, self.version = model, facts.version
        self._answers, self._caller, self._head, self._facts = answers, caller, head, facts
        self._turn = turn_of(caller, head.peer)
        self._number = next(_numbers)
        self._is_started = False
        self._talk: Talk | Inline | None = None
        self._begin: Begin
        self._prompt = b""  # its ids, once they are known
        self._made: list[int] = []  # tokens of the model
        self._told = self._used = 0  # tokens with text; rows of the cache

    async def begin(self, asked: Begin) -> None:
        """Raises InvalidInput: the prompt or a setting does not fit."""
        check_length(asked.prompt, self._facts.context)
        self._begin = msgspec.structs.replace(asked, answer=self._number)
        await self._ask(self._begin)
        self._prompt = self.step.prompt
        self._begin = msgspec.structs.replace(self._begin, prompt="", messages=None)

    async def next(self) -> Token | None:
        """The next token; None: that was the last. A sequence that the server forgot is begun
        again, once for each step."""
        while not self._came and self.step.reason is None:
            step, self._is_started = self.step.next, True
            try:
                outputs, _ = await self._answers.service.infer(
                    self._caller, self.model, str(self.version), _request(self.id, step),
                    self._head.headers, self._head.peer,
                )  # fmt: skip
            except SequenceNotFound:
                if not step.used:
                    raise
                self._used = 0
                await self._ask(Lost(answer=self._number))
                continue
            tokens = np.frombuffer(outputs[0].data, np.int64).tolist()
            self._used = step.used + len(step.ids)
            if self._used >= self.step.prompt_count:  # else it is a piece of the prompt
                self._made += tokens
                self._used += len(tokens) - 1
            await self._ask(Came(answer=self._number, tokens=tokens))
            self._told += len(self.step.tokens)
            self._came.extend(self.step.tokens)
        if not self._came:
            return None
        token = self._came.popleft()
        self.tokens.append(token.id)
        return token

    async def _ask(self, asked: Asked) -> None:
        """Set ``step``. If the process has ended, start a new one and send it the answer so far."""
        tries = 0
        while True:
            if self._talk is None or self._talk.is_over:
                self._leave()
                self._talk = await self._answers.texts.enter(
                    self._caller, self._turn, self.model, self._facts
                )
                if self._prompt:
                    ids, made = array("i", self._prompt).tolist(), self._made
                    asked = msgspec.structs.replace(
                        self._begin, prompt=ids, so_far=made, told=self._told, used=self._used
                    )
            try:
                self.step = await self._talk.ask(asked, self._turn)
                return
            except ProcessLost as error:
                tries += error.was_computing
                if tries >= TRIES:
                    raise

    def _leave(self) -> None:
        talk, self._talk = self._talk, None
        if talk is not None:
            talk.tell(Drop(answer=self._number))
            if isinstance(talk, Talk):
                self._answers.texts.leave(talk)

    async def close(self) -> None:
        """It is over, or nobody wants the rest: its cache on the server is given back. Once."""
        self._leave()
        if self._is_started:
            self._answers.under_way.give(self._turn, 1)
            with contextlib.suppress(PipeSwitchError):  # it never began, or the server is gone
                await self._answers.service.end_sequence(self._caller, self.id)


def turn_of(caller: Standing, peer: str) -> str:
    """Return the name under which a caller takes turns: its token's name, else its address."""
    return f"address {peer}" if caller.tenant == ANYONE else f"token {caller.tenant}"


def _request(name: str, step: generating.Step) -> InferRequest:
    """A step, as the model takes it."""
    inputs, frames, _ = to_frames(step.inputs())
    sequence = {"sequence": name, "choose": step.choose, **({} if step.used else {"start": True})}
    return InferRequest(id="", inputs=inputs, frames=frames, sequence=sequence)
