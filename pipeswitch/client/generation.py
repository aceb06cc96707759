"""Text from a language model, token by token, over a sequence of requests."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import msgspec

from ..base.errors import InvalidInput, SequenceNotFound
from ..programs.decoding.answer import Ending
from ..programs.decoding.generating import Facts, Generating, Token, tokenizer_of
from ..programs.decoding.generation import TOKENS
from ..programs.decoding.sampling import Sampling
from .sequence import Sequenced


class Generated(Iterator[Token]):
    """What ``Client.generate`` returns: iterate over it, or ask for ``text``.

    ``reason`` says why it is over: ``stop`` or ``length``; None: it goes on.
    """

    def __init__(
        self, generating: Generating, open_sequence: Callable[[], Sequenced], priority: str
    ) -> None:
        self._generating, self._open, self._priority = generating, open_sequence, priority
        self._sequence = open_sequence()
        self._began_s = time.monotonic()
        self._text: list[str] = []
        self._came: deque[Token] = deque()
        self.first_token_ms = 0.0

    @property
    def reason(self) -> str | None:
        return None if self._came else self._generating.reason

    @property
    def tokens(self) -> list[int]:
        """The ids, as far as it is read."""
        known = self._generating.tokens
        return known[: len(known) - len(self._came)]

    @property
    def text(self) -> str:
        """All of it: the rest is waited for."""
        for _ in self:
            pass
        return "".join(self._text)

    def __next__(self) -> Token:
        while not self._came and self._generating.reason is None:
            self._step()
        if not self._came:
            self.close()
            raise StopIteration
        if not self._text:
            self.first_token_ms = (time.monotonic() - self._began_s) * 1000.0
        token = self._came.popleft()
        self._text.append(token.text)
        return token

    def _step(self) -> None:
        """One request. A sequence that the server forgot is begun again, once for each step."""
        step = self._generating.step()
        try:
            found = self._sequence.choose(step.inputs(), step.choose, self._priority)
        except SequenceNotFound:
            if self._generating.starts:
                raise
            self._generating.lost()
            self._sequence = self._open()
        except BaseException:
            self.close()
            raise
        else:
            self._came.extend(self._generating.answered(found[TOKENS][0].tolist()))

    def close(self) -> None:
        """Give its state on the server back. Idempotent."""
        self._sequence.close()

    def __enter__(self) -> Generated:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def generated(
    client: Any, model: str, prompt: Any, *, version: int, priority: str, stop: tuple[str, ...],
    max_new_tokens: int, **sampling: Any,
) -> Generated:  # fmt: skip
    """As ``Client.generate``."""

    def facts_with(*, tokenizer: bool, version: int = version) -> Facts:
        body = {"version": version, "tokenizer": tokenizer}
        return msgspec.convert(client._ask("generation", model=model, body=body), Facts)

    facts = facts_with(tokenizer=False)
    encode = decode = None
    if isinstance(prompt, str):
        if facts.digest not in client.tokenizers:
            found = facts_with(tokenizer=True, version=facts.version)
            client.tokenizers[facts.digest] = tokenizer_of(found)
        encode, decode = client.tokenizers[facts.digest]
    try:
        chosen = msgspec.convert(sampling, Sampling)
        ending = msgspec.convert({"max_new_tokens": max_new_tokens, "stop": stop}, Ending)
    except msgspec.ValidationError as error:
        raise InvalidInput(f"generate: {error}") from None
    generating = Generating(facts, check_prompt(prompt, encode), chosen, ending, decode)
    return Generated(generating, partial(client.sequence, model, version=facts.version), priority)


def check_prompt(prompt: Any, encode: Callable[[str], list[int]] | None) -> list[int]:
    """A prompt's ids.

    Raises:
        InvalidInput: it is neither a text nor ids.
    """
    if isinstance(prompt, str):
        if encode is None:
            raise InvalidInput("this model has no tokenizer", hint="give the prompt as ids")
        return encode(prompt)
    try:
        return [int(one) for one in prompt]
    except (TypeError, ValueError):
        raise InvalidInput("a prompt is a text, or token ids", hint='"Once upon a time"') from None
