"""Answers that follow a JSON schema: the library llguidance computes the allowed next tokens.

A matcher depends only on the schema and the answer's tokens, so any worker can continue an answer.
Building one takes any time, so a process beside the device tries each schema first.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ....base.errors import InvalidInput
from ....ipc.channel import Channel
from ....ipc.messages.base import OpId
from ....ipc.messages.helper import HelperFailed, HelperReady
from ....sandbox.confine import confine_worker, missing
from .generation_settings import tokenizer_json

COSTLY: Final = re.compile(r'"(pattern|format|multipleOf|const|enum|\w+Of|m(?:in|ax)\w+)":')
SCHEMA_S: Final = 0.2  # processor time to prepare a schema and the first tokens of an answer
SCHEMA_BYTES: Final = 256 << 20
NICENESS: Final = 10  # lower priority than workers, like text processes
TRIED_TOKENS: Final = 32  # tokens of the answer with which a schema is tried
MAX_MATCHERS: Final = 16  # matchers kept between the steps of their answers
MOST_TOKENIZERS: Final = 2  # kept in memory; a tokenizer of 150,000 tokens needs 105 MiB and 2 s


class Tokenizers:
    """A worker's tokenizers and matchers, for models whose answers follow schemas."""

    def __init__(self) -> None:
        self.packed: dict[str, bytes] = {}  # program digest -> compressed ``tokenizer.json``
        self._made: dict[tuple[str, tuple[int, ...]], Any] = {}
        self._kept: list[Matcher] = []  # matchers of steps that succeeded, for the next steps

    def get(self, digest: str, size: int, ends: tuple[int, ...]) -> Any:
        """Return a program's tokenizer, of ``size`` tokens, as an object of llguidance.

        Raises:
            InvalidInput: llguidance cannot use the model's tokenizer.
        """
        import llguidance

        if (digest, ends) not in self._made:
            if len(self._made) >= MOST_TOKENIZERS:
                self._made.clear()
                self._kept.clear()  # matchers refer to their tokenizers
            try:
                text = tokenizer_json(self.packed.get(digest, b""))
                tokenizer = llguidance.LLTokenizer(text, n_vocab=size, eos_token=[*ends])
            except ValueError as error:
                raise refusal(f"the model's tokenizer cannot be used: {error!s:.200}") from None
            self._made[digest, ends] = tokenizer
        return self._made[digest, ends]

    def matcher(
        self, digest: str, size: int, ends: tuple[int, ...], schema: str, answer: Sequence[int]
    ) -> Matcher:
        """Return an answer's matcher: the kept one, or a new one that has taken its tokens."""
        key = digest, ends, schema, [*answer]
        for number, one in enumerate(self._kept):
            if (*one.key, one.answer) == key:
                return self._kept.pop(number)
        matcher = Matcher(self.get(digest, size, ends), schema, ends, answer, size)
        matcher.key = key[:3]
        return matcher

    def keep(self, matchers: Iterable[Matcher]) -> None:
        self._kept = [*self._kept, *matchers][-MAX_MATCHERS:]


class Matcher:
    """State of one answer in its schema."""

    key: tuple[str, tuple[int, ...], str]  # program, end tokens and schema; set by ``Tokenizers``

    def __init__(
        self, tokenizer: Any, schema: str, ends: Sequence[int], answer: Sequence[int], size: int
    ) -> None:
        """Take the tokens of ``answer``; ``ends`` are the tokens that end a whole answer."""
        from llguidance import LLMatcher, LLParserLimits

        # Warnings would fill the log of the processes, and errors would show the parser's state.
        limits, grammar = LLParserLimits(verbose_errors=False), LLMatcher.grammar_from_json_schema
        self._matcher = LLMatcher(tokenizer, grammar(schema), log_level=0, limits=limits)
        self.answer: list[int] = []
        self._ends, self._size = ends, size
        for token in answer:
            self.take(token)

    def allowed(self) -> NDArray[np.bool_]:
        """Return a mask of the tokens that may be next; end tokens only after a whole answer."""
        allowed = np.zeros(self._size, np.bool_)
        if self._matcher.is_stopped() and not self._matcher.is_error():
            allowed[[*self._ends]] = True
        else:
            bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
            self._check()
            allowed[:] = np.unpackbits(bits, count=self._size, bitorder="little")
        return allowed

    def take(self, token: int) -> None:
        """Append a token to the answer. Raise InvalidInput if the token breaks the schema."""
        self.answer.append(token)
        if token not in self._ends and not self._matcher.consume_token(token):
            self._check()
            raise refusal(f"token {token} does not follow it")

    def _check(self) -> None:
        if self._matcher.is_error():
            error = self._matcher.get_error().split("<")[0]
            is_empty = error.startswith("NoExtension")
            raise refusal("no text can follow it" if is_empty else " ".join(error.split())[:200])


def try_schema(schema: str) -> None:
    """Build a matcher whose tokens are bytes, and take some tokens of one answer.

    Raises:
        InvalidInput: the schema cannot be used, or llguidance is not installed.
    """
    try:
        from llguidance import LLTokenizer
    except (ImportError, OSError):
        raise InvalidInput(
            "a JSON schema needs the library llguidance: pip install 'pipeswitch[grammar]' "
            "where the server is, and start it again",
            param="response_format",
        ) from None
    tokenizer, chance = LLTokenizer("byte"), random.Random(0)
    try:
        matcher = Matcher(tokenizer, schema, tokenizer.eos_tokens, (), tokenizer.vocab_size)
    except ValueError as error:  # it is nested too deeply for llguidance
        raise refusal(f"{error!s:.200}") from None
    while len(matcher.answer) < TRIED_TOKENS:
        allowed = matcher.allowed()
        allowed[tokenizer.eos_tokens] = False
        if not len(tokens := np.flatnonzero(allowed)):
            return
        matcher.take(int(chance.choice(tokens)))


def schema_process(values: bytes, channel: Channel, _: object) -> int:
    """Report whether an answer can follow a schema; return the status. SIGPROF ends this process
    after ``SCHEMA_S`` of processor time."""
    os.nice(NICENESS)
    signal.setitimer(signal.ITIMER_PROF, SCHEMA_S)
    if "seccomp" not in missing():
        confine_worker(SCHEMA_BYTES)
    answer: HelperReady | HelperFailed = HelperReady(pid=os.getpid())
    try:
        try_schema(values.decode())
    except InvalidInput as problem:
        answer = HelperFailed(op_id=OpId(0), reason=problem.message)
    channel.send(answer)
    return 0


def costly_refusal(schema: str) -> InvalidInput:
    """Return the error for a schema that takes too long, with keywords that may be the reason."""
    names = ", ".join(dict.fromkeys(COSTLY.findall(schema))) or "its size"
    return refusal(f"it takes too much time or memory to prepare: make it simpler, look at {names}")


def refusal(why: str) -> InvalidInput:
    """Return the error for a JSON schema that cannot be used."""
    return InvalidInput(f"the answer's JSON schema: {why}", param="response_format")


def ends_of(own: Sequence[int], stop: Sequence[int]) -> tuple[int, ...]:
    """Return the tokens that end a whole answer: those of ``own`` in ``stop``, else ``stop``."""
    return tuple([one for one in own if one in stop] or stop)


def check_schema(text: str, ends: Sequence[int]) -> None:
    """Raise InvalidInput if a schema is not a JSON object, or ``ends`` is empty."""
    try:
        is_schema = isinstance(json.loads(text), dict)
    except (ValueError, TypeError, RecursionError):
        is_schema = False
    if not is_schema:
        raise refusal("it is not a JSON object")
    if not ends:
        raise refusal("no token ends the model's answers")
