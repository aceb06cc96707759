"""The answers to one request: one for each of its prompts, or several of a prompt (``n``).

Their log probabilities have two of OpenAI's forms: one for chats, an older one for completions.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from ...base.errors import InvalidInput
from .answer_stream import AnswerStream
from .decoding.model_config import Token, TokenName

MAX_CHOICES = 64
Names = Mapping[int, TokenName]


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


def logprob_count(logprobs: bool | int | None, top: int | None, *, is_chat: bool) -> int | None:
    """Return the number of likeliest tokens to report for each token; None: report nothing.

    ``logprobs`` is a flag for a chat, and a number for a completion; only a chat has ``top``.
    """
    is_absent = logprobs is None or logprobs is False
    if top and (is_absent or not is_chat):
        raise InvalidInput("top_logprobs needs a chat with logprobs: true", param="top_logprobs")
    if not is_absent and is_chat is not isinstance(logprobs, bool):
        form = "true or false, together with top_logprobs" if is_chat else "a number from 0 to 20"
        raise InvalidInput(f"logprobs is {form}", param="logprobs")
    return None if is_absent else top or 0 if is_chat else logprobs


def chat_logprobs(tokens: Sequence[Token], names: Names) -> dict[str, Any]:
    """Return the ``logprobs`` of a chat's choice. ``names`` has each token's text and bytes."""

    def entry(id: int, logprob: float | None) -> dict[str, Any]:
        text, data = names[id]
        return {"token": text, "logprob": logprob, "bytes": None if data is None else [*data]}

    rows = [
        {**entry(one.id, one.logprob), "top_logprobs": [entry(*other) for other in one.top]}
        for one in tokens
    ]
    return {"content": rows, "refusal": None}


def text_logprobs(tokens: Sequence[Token], names: Names, offset: int) -> dict[str, Any]:
    """Return the ``logprobs`` of a completion's choice, whose first token begins at ``offset``.

    The prompt's first token has no log probability, so its entry is null.
    """
    texts, offsets, tops = [names[one.id][0] for one in tokens], [], []
    for text, one in zip(texts, tokens, strict=True):
        offsets.append(offset)
        offset += len(text)
        top: dict[str, float] = {}
        own = [] if one.logprob is None else [(one.id, one.logprob)]
        for id, logprob in (*one.top, *own):  # the likelier one of two equal texts comes first
            top.setdefault(names[id][0], logprob)
        tops.append(top or None)
    return {
        "tokens": texts,
        "token_logprobs": [one.logprob for one in tokens],
        "top_logprobs": tops,
        "text_offset": offsets,
    }
