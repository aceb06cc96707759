"""Answers of language models: each is one request of verb ``generate`` with many replies.

The model's text process (``tokenizer_worker.py``) encodes the prompt and decodes the tokens. At a
stop string the request is cancelled.
"""

from __future__ import annotations

import asyncio
import secrets
from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any, Final

import msgspec

from ...base.errors import ServerUnavailable
from ...base.quotas import FairQuota
from ...base.roles import ANYONE, Principal
from ...gateway.http.http_parser import Head
from ...gateway.serving.service import Service
from .decoding.model_config import LanguageModelConfig, Token, ending_of, fitted
from .generation_stream import GenerateRequest, chances_in
from .tokenizer_worker import Abort, DecodedText, StartGeneration, TokensGenerated, check_length
from .tokenizer_worker import TokenizerRequest as TextAsked
from .tokenizers import Inline, ProcessLost, TokenizerClient, TokenizerPool, config_of

ANSWERS: Final = 256  # maximum number of answers under way; each holds a cache on the server
TRIES: Final = 3  # tries of a request, if the text process ends while computing it
_numbers = count(1)


class Answers:
    """All answers under way."""

    def __init__(self, service: Service) -> None:
        self.service, self.texts = service, TokenizerPool(service)
        self.under_way = FairQuota(ANSWERS, "answers under way", "answers")

    async def begin(
        self,
        caller: Principal,
        head: Head,
        model: str,
        begin_of: Callable[..., StartGeneration],
        version: str = "",
    ) -> AnswerStream:
        """Return an answer of that model; ``next`` yields its tokens.

        ``begin_of(own=defaults)`` returns the request, given the defaults of the model's author.

        Raises:
            QueueFull: too many answers are under way.
            InvalidInput: the model generates no text, or the request does not fit it.
        """
        turn = turn_of(caller, head.peer)
        with self.under_way.holding(turn, 1):
            facts = await config_of(self.service, caller, model, version)
            answering = AnswerStream(self, caller, head, model, facts)
            try:
                await answering.begin(begin_of(own=facts.sampling))
            except BaseException:
                await answering.close()
                raise
            self.under_way.add(turn, 1)  # until the answer is closed
            answering.is_counted = True
            return answering


class AnswerStream:
    """One answer, token by token."""

    def __init__(
        self,
        answers: Answers,
        caller: Principal,
        head: Head,
        model: str,
        facts: LanguageModelConfig,
    ) -> None:
        self.id = secrets.token_hex(12)
        self.step: DecodedText
        self.tokens: list[Token] = []
        self.scored: list[Token] = []  # the prompt's tokens, if their logprobs are requested
        self.names: dict[int, tuple[str, bytes | None]] = {}  # texts and bytes, for logprobs
        self.unused: Sequence[str] = ()  # settings that the chat's template does not read
        self.is_counted = False  # it is counted in ``Answers.under_way``
        self._came: deque[Token] = deque()
        self.model, self.version = model, facts.version
        self._answers, self._caller, self._head, self._facts = answers, caller, head, facts
        self._turn = turn_of(caller, head.peer)
        self._number = next(_numbers)
        self._request: asyncio.Future[dict[str, Any]] | None = None
        self._replies: asyncio.Queue[Mapping[str, Any] | None] = asyncio.Queue()
        self._talk: TokenizerClient | Inline | None = None
        self._begin: StartGeneration
        self._prompt = b""  # the prompt's ids (int32), once they are known
        self._made: list[int] = []  # tokens that the model generated
        self._chances: list[tuple[Any, ...]] = []  # their log probabilities, if requested
        self._told = 0  # generated tokens whose text is known
        self._first: Sequence[int] = ()  # first token of a scored prompt
        self._unscored = 0  # tokens of the prompt that are still to be reported

    async def begin(self, begin: StartGeneration) -> None:
        """Start the answer; raise InvalidInput if the prompt or a setting does not fit."""
        check_length(begin.prompt, self._facts.context)
        self._begin = msgspec.structs.replace(begin, answer=self._number)
        await self._ask(self._begin)
        self._prompt, self.unused = self.step.prompt, self.step.unused
        self._begin = msgspec.structs.replace(
            self._begin, prompt="", messages=None, tools=b"", settings=b""
        )
        options = self._begin.sampling.options
        if options is not None and options.scores_prompt:
            self._first, self._unscored = array("i", self._prompt)[:1], self.step.prompt_count - 1
            # It has no log probability; its complement stands for a token at a text's start.
            self.scored.append(Token(~self._first[0], ""))

    async def next(self) -> Token | None:
        """Return the next token, or None after the last."""
        while not self._came and self.step.reason is None:
            if self._request is None:
                self._request = self._sent()
            body = await self._replies.get()
            if body is None:  # the final reply, or an error
                body = self._request.result()
            if tokens := body.get("tokens", []):
                await self._take(tokens, chances_in(body))
            elif self._request.done():
                raise ServerUnavailable("the answer ended without a reason")
        if self.step.reason is not None:
            self._end()
        if not self._came:
            return None
        token = self._came.popleft()
        self.tokens.append(token)
        return token

    async def _take(self, tokens: list[int], chances: list[list[Any]]) -> None:
        """Fetch the text of a reply's tokens; the first ones may be the prompt's."""
        pairs, count = [*zip(*chances, strict=True)], min(len(tokens), self._unscored)
        ids_needed = {id for _, top in pairs for id, _ in top}.union(
            tokens, [~one for one in self._first]
        )
        names = sorted(ids_needed - self.names.keys()) if pairs else []
        if count:
            scored = zip(tokens[:count], pairs, strict=False)
            self.scored += [Token(id, "", *chance) for id, chance in scored]
            self._unscored -= count
        self._made += tokens[count:]
        self._chances += pairs[count:]
        await self._ask(TokensGenerated(answer=self._number, tokens=tokens[count:], names=names))
        self.names.update(zip(names, self.step.names, strict=True))
        for token in self.step.tokens:
            chance = self._chances[self._told] if self._chances else ()
            self._came.append(Token(token.id, token.text, *chance))
            self._told += 1

    def _sent(self) -> asyncio.Future[dict[str, Any]]:
        """Send the request; its replies arrive in ``_replies``."""
        ids, facts, put = array("i", self._prompt), self._facts, self._replies.put_nowait
        ending = ending_of(facts, ids, self._begin.ending)
        sampling = fitted(self._begin.sampling, facts, len(ids), ending)
        options, version = GenerateRequest(ids, sampling, ending, put).options, str(self.version)
        caller, head = self._caller, self._head
        work = self._answers.service.request(
            caller, "generate", self.model, version, options, head.headers, head.peer
        )
        request = asyncio.ensure_future(work)
        request.add_done_callback(lambda _: put(None))
        return request

    def _end(self) -> None:
        request = self._request
        if request is not None and not request.cancel() and not request.cancelled():
            request.exception()  # otherwise asyncio logs an unread error

    async def _ask(self, message: TextAsked) -> None:
        """Send a message, and set ``step``. If the process has ended, continue with a new one."""
        tries = 0
        while True:
            if self._talk is None or self._talk.is_over:
                self._leave()
                self._talk = await self._answers.texts.enter(
                    self._caller, self._turn, self.model, self._facts
                )
                if self._prompt:
                    ids = array("i", self._prompt).tolist()
                    names = message.names if isinstance(message, TokensGenerated) else []
                    message = msgspec.structs.replace(
                        self._begin, prompt=ids, so_far=self._made, told=self._told, names=names
                    )
            try:
                self.step = await self._talk.ask(message, self._turn)
                return
            except ProcessLost as error:
                tries += error.was_computing
                if tries >= TRIES:
                    raise

    def _leave(self) -> None:
        talk, self._talk = self._talk, None
        if talk is not None:
            talk.send(Abort(answer=self._number))
            if isinstance(talk, TokenizerClient):
                self._answers.texts.leave(talk)

    async def close(self) -> None:
        """Release the answer's resources when it ends or its caller leaves; call it once."""
        self._leave()
        self._end()
        if self.is_counted:
            self._answers.under_way.give(self._turn, 1)


def turn_of(caller: Principal, peer: str) -> str:
    """Return the name under which a caller takes turns: its token's name, else its address."""
    return f"address {peer}" if caller.tenant == ANYONE else f"token {caller.tenant}"
