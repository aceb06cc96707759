"""Answers that follow a JSON schema: which tokens may come next, by the library llguidance.

A matcher depends on the schema and the answer's tokens alone, so any worker can continue an answer.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ...base.errors import InvalidInput
from .generation import tokenizer_json

MOST_TOKENIZERS: Final = 4  # in memory; one of 150,000 words takes about 20 MB
MOST_TEXT: Final = 300  # of a library's error


class Matchers:
    """Makes a worker's matchers, and keeps the last tokenizers in the library's form."""

    def __init__(self) -> None:
        self.packed: dict[str, bytes] = {}  # tokenizers as bundles have them, by program
        self._made: dict[tuple[str, tuple[int, ...]], Any] = {}

    def matcher(
        self, digest: str, schema: str, ends: tuple[int, ...], answer: Sequence[int], size: int
    ) -> Matcher:
        """Return a matcher for the next token.

        Args:
            digest: of the program, whose tokenizer is in ``packed``.
            schema: JSON.
            ends: tokens that end an answer, and only a complete one.
            answer: its tokens so far.
            size: of the vocabulary.

        Raises:
            InvalidInput: the schema is not one, the model has no tokenizer, or the library is not
                installed.
        """
        library = imported()
        if not self.packed.get(digest):
            raise refusal("the model has no tokenizer")
        key = digest, ends
        if key not in self._made:
            if len(self._made) >= MOST_TOKENIZERS:
                self._made.clear()
            text = tokenizer_json(self.packed[digest])
            self._made[key] = library.LLTokenizer(text, n_vocab=size, eos_token=[*ends])
        return Matcher(library, self._made[key], schema, ends, answer, size)


class Matcher:
    """The place of one answer in its schema."""

    def __init__(
        self,
        library: Any,
        tokenizer: Any,
        schema: str,
        ends: tuple[int, ...],
        answer: Sequence[int],
        size: int,
    ) -> None:
        grammar = library.LLMatcher.grammar_from_json_schema(schema)
        self._matcher = library.LLMatcher(tokenizer, grammar)
        self._ends, self._size = ends, size
        self._check()
        for token in answer:
            self.take(token)

    def allowed(self) -> NDArray[np.bool_]:
        """Return a mask of the tokens that may come next."""
        found = np.zeros(self._size, np.bool_)
        if self._matcher.is_stopped():
            found[[*self._ends]] = True
        else:
            bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
            self._check()
            found[:] = np.unpackbits(bits, count=self._size, bitorder="little")
        return found

    def take(self, token: int) -> None:
        """Continue with a token.

        Raises:
            InvalidInput: it does not follow the schema.
        """
        if token not in self._ends and not self._matcher.consume_token(token):
            self._check()
            raise refusal(f"token {token} does not follow it")

    def _check(self) -> None:
        if self._matcher.is_error():
            raise refusal(self._matcher.get_error()[:MOST_TEXT])


def imported() -> Any:
    """Return the library.

    Raises:
        InvalidInput: it is not installed.
    """
    try:
        import llguidance
    except (ImportError, OSError):
        raise InvalidInput(
            "a JSON schema needs the library llguidance",
            hint="on the server: pip install 'pipeswitch[grammar]', then start it again",
            param="response_format",
        ) from None
    return llguidance


def refusal(why: str) -> InvalidInput:
    return InvalidInput(f"the answer's JSON schema: {why}", param="response_format")


def check_schema(text: str, ends: Sequence[int]) -> None:
    """Check what needs no library. ``ends`` are the tokens that end the answer.

    Raises:
        InvalidInput: it is not JSON of the form of a schema, or nothing ends the answer.
    """
    try:
        is_schema = isinstance(json.loads(text), dict | bool)
    except (ValueError, RecursionError):
        is_schema = False
    if not is_schema:
        raise refusal("it is not a JSON object")
    if not ends:
        raise refusal("no token ends the model's answers")
