"""The answers to one request: one for each of its prompts, or several of a prompt (``n``)."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

from ...base.errors import InvalidInput
from ...programs.decoding.model_config import Token
from .answer_stream import AnswerStream

MAX_CHOICES = 64


class ParallelAnswers:
    """Answers that are read in parallel; if one fails, all fail."""

    def __init__(self, answerings: Sequence[AnswerStream], per_prompt: int = 1) -> None:
        self.answerings, self._per_prompt = answerings, per_prompt
        self._ready: deque[tuple[int, Token | None]] = deque()
        self._reading: dict[asyncio.Task[Token | None], int] = {}
        self._is_over = False  # used for a single answer: it has ended

    @staticmethod
    async def begin(
        begins: Sequence[Callable[[], Awaitable[AnswerStream]]], per_prompt: int
    ) -> ParallelAnswers:
        """Begin the answers one after the other; if one is refused, close the earlier ones."""
        answerings: list[AnswerStream] = []
        async with contextlib.AsyncExitStack() as undo:
            for one in begins:
                answerings.append(await one())
                undo.push_async_callback(answerings[-1].close)
            undo.pop_all()
        return ParallelAnswers(answerings, per_prompt)

    @property
    def first(self) -> AnswerStream:
        return self.answerings[0]

    @property
    def prompt_count(self) -> int:
        """Number of tokens of all prompts; each prompt counts once."""
        return sum(one.step.prompt_count for one in self.answerings[:: self._per_prompt])

    @property
    def token_count(self) -> int:
        return sum(len(one.tokens) for one in self.answerings)

    async def start(self) -> None:
        """Wait for each answer's first token, which decides whether it is refused."""
        firsts = await asyncio.gather(*[one.next() for one in self.answerings])
        for index, token in enumerate(firsts):
            self._came(index, token)

    async def next(self) -> tuple[int, Token | None] | None:
        """Return an answer's index and its next token (None: its end); None when all have ended."""
        if len(self.answerings) == 1 and not self._ready:
            if self._is_over:
                return None
            token = await self.first.next()
            self._is_over = token is None
            return 0, token
        while not self._ready and self._reading:
            done, _ = await asyncio.wait(self._reading, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                self._came(self._reading.pop(task), task.result())
        return self._ready.popleft() if self._ready else None

    def _came(self, index: int, token: Token | None) -> None:
        self._ready.append((index, token))
        if len(self.answerings) == 1:
            self._is_over = token is None
        elif token is not None:
            reading = asyncio.create_task(self.answerings[index].next())
            self._reading[reading] = index

    async def close(self) -> None:
        for reading in self._reading:
            reading.cancel()
        await asyncio.gather(*self._reading, return_exceptions=True)
        for one in self.answerings:
            await one.close()


def check_count(prompts: int, n: int) -> None:
    """Raise InvalidInput if a request asks for too many answers."""
    if n < 1 or prompts * n > MAX_CHOICES:
        raise InvalidInput(
            f"{prompts} prompts with n = {n}: a request has 1 to {MAX_CHOICES} answers", param="n"
        )
