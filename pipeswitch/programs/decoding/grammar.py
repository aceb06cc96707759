"""Answers that follow a JSON schema: the library llguidance computes the allowed next tokens.

A matcher depends only on the schema and the answer's tokens, so any worker can continue an answer.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ...base.errors import InvalidInput
from .generation_settings import tokenizer_json

# Intersecting regular expressions takes twice as long with each one, and llguidance has no limit.
EXPRESSIONS: Final = ("pattern", "patternProperties", "propertyNames", "format", "not")
MOST_EXPRESSIONS: Final = 8
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
            InvalidInput: llguidance is not installed, or cannot use the model's tokenizer.
        """
        try:
            import llguidance
        except (ImportError, OSError):
            raise InvalidInput(
                "a JSON schema needs the library llguidance: pip install 'pipeswitch[grammar]' "
                "where the server is, and start it again",
                param="response_format",
            ) from None
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
        from llguidance import LLMatcher

        self._matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_json_schema(schema))
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
            raise refusal(self._matcher.get_error()[:300])


def refusal(why: str) -> InvalidInput:
    """Return the error for a JSON schema that cannot be used."""
    return InvalidInput(f"the answer's JSON schema: {why}", param="response_format")


def ends_of(own: Sequence[int], stop: Sequence[int]) -> tuple[int, ...]:
    """Return the tokens that end a whole answer: those of ``own`` in ``stop``, else ``stop``."""
    return tuple([one for one in own if one in stop] or stop)


def check_schema(text: str, ends: Sequence[int]) -> None:
    """Raise InvalidInput if a schema is not a JSON object or too complex, or ``ends`` is empty."""
    names: list[str] = []

    def noted(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        for name, value in pairs:
            names.extend([name] * (len(value) if name == "patternProperties" else 1))
        return dict(pairs)

    try:
        is_schema = isinstance(json.loads(text, object_pairs_hook=noted), dict)
    except (ValueError, TypeError, RecursionError):
        is_schema = False
    if not is_schema:
        raise refusal("it is not a JSON object")
    if sum(name in EXPRESSIONS for name in names) > MOST_EXPRESSIONS:
        raise refusal(f"it has more than {MOST_EXPRESSIONS} of {', '.join(EXPRESSIONS)}")
    if not ends:
        raise refusal("no token ends the model's answers")
