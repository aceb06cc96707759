"""One answer of a language model, token by token: what is asked next, and what came. Pure.

Whoever has a connection drives it: each step is a request of a sequence, whose cache stays on the
server (ADR 49, 50). A sequence that is lost costs its cache alone: the next step brings all that
was said until then, and the tokens go on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from ...base.errors import InvalidInput
from .answer import Answer, Decode, Ending, Reason
from .generation import COUNT, IDS, MOST_STEPS, USED, tokenizer_json
from .sampling import Options, Sampling

TOO_LONG: Final = "context_length_exceeded"  # OpenAI's word, by which clients shorten a chat
LONGEST: Final = "this model's maximum context length is {} tokens"  # others read OpenAI's text


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What the server says of a language model."""

    version: int  # of the model
    digest: str  # of its program
    vocabulary: int
    context: int  # tokens of prompt and answer together
    piece: int  # tokens of one step
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    chat_template: str = ""
    special: dict[str, str] = {}  # tokens that the template names
    pooling: str = ""  # as of ``Generation``
    tokenizer: bytes = b""  # compressed; empty: it has none, or it was not asked for
    has_tokenizer: bool = True
    sampling: dict[str, int | float] = {}  # what its author has where a request does not say


class Token(NamedTuple):
    """One token of an answer."""

    id: int
    text: str  # that may be shown now; empty where a character or a stop string is not whole


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked next: the tokens to compute, and how those that follow are chosen."""

    ids: list[int]
    used: int  # tokens before these
    choose: dict[str, Any]  # as the body of ``infer`` has it

    def inputs(self) -> dict[str, NDArray[np.int64]]:
        """Of the request, less the cache."""
        values = {IDS: [self.ids], COUNT: [len(self.ids)], USED: [self.used]}
        return {name: np.array(value, np.int64) for name, value in values.items()}


class Generating:
    """The state of one answer."""

    def __init__(
        self,
        facts: Facts,
        prompt: Sequence[int],
        sampling: Sampling,
        ending: Ending,
        decode: Decode | None = None,
    ) -> None:
        """
        Raises:
            InvalidInput: a token is none of the vocabulary, the prompt is empty or leaves no room,
                or a setting is out of its range.
        """
        sampling.check()
        ending.check()
        if not 0 < len(prompt) < facts.context:
            count, context = len(prompt), facts.context
            words = f"a prompt of {count} tokens: the model takes 1 to {context - 1}"
            if not count:
                raise InvalidInput(words)
            raise InvalidInput(f"{words}; {LONGEST.format(context)}", code=TOO_LONG)
        if odd := [
            one for one in prompt if type(one) is not int or not 0 <= one < facts.vocabulary
        ]:
            raise InvalidInput(f"{odd[0]!r:.40} is no token from 0 to {facts.vocabulary - 1}")
        most = min(ending.max_new_tokens, facts.context - len(prompt))
        ends = ending.eos_ids if ending.ignore_eos else (*facts.eos_ids, *ending.eos_ids)
        ending = msgspec.structs.replace(ending, max_new_tokens=most, eos_ids=ends)
        sampling = fitted(sampling, facts, len(prompt), ending)
        self._facts, self._most = facts, most
        self._choose: dict[str, Any] = msgspec.to_builtins(sampling)
        if sampling.options is None:
            del self._choose["options"]
        self._needs_seen = sampling.options is not None and sampling.options.needs_seen
        self._ids, self._prompt_count = list(prompt), len(prompt)
        self._answer = Answer(ending, decode, prompt)
        self._used = self._asked = 0
        self._came = 1  # tokens, with the last step

    @property
    def starts(self) -> bool:
        """The next step begins a sequence."""
        return not self._used

    @property
    def tokens(self) -> list[int]:
        """Of the answer, so far."""
        return self._ids[self._prompt_count :]

    @property
    def reason(self) -> Reason | None:
        """Why it is over; None: it is not."""
        return self._answer.reason

    def step(self) -> Step:
        """Return the next request. It asks for up to twice as many tokens as the last one, and
        reserves the memory for their rows. A running answer waits for that memory; an answer that
        starts again reserves more at once, so that it restarts only a few times."""
        piece = self._ids[self._used : self._used + self._facts.piece]
        self._asked = len(piece)
        steps = min(2 * self._came, MOST_STEPS, self._most - len(self.tokens))
        is_token = len(piece) == 1 and self._used + 1 == len(self._ids)  # no piece of a prompt
        choose = {**self._choose, "steps": max(steps, 1) if is_token else 1}
        if self.starts:
            ahead = max(len(self._ids) // 2, MOST_STEPS) if self.tokens else 0
            choose["rows"] = min(len(self._ids) + ahead, self._prompt_count + self._most)
        if self.tokens:
            choose["waits"] = True
        if self._needs_seen:
            choose["seen"] = seen_of(self._ids, self._prompt_count)
        return Step(ids=piece, used=self._used, choose=choose)

    def answered(self, tokens: Sequence[int]) -> list[Token]:
        """Those that the step's worker chose; none: more of the prompt goes first."""
        self._used += self._asked
        if self._used < len(self._ids):
            return []
        self._came = len(tokens)
        self._used += self._came - 1
        return self._take(tokens)

    def resume(self, tokens: Sequence[int], used: int) -> list[Token]:
        """Continue an answer that another process began, from its tokens so far and the rows of the
        cache that the server has."""
        self._used = used
        return self._take(tokens)

    def _take(self, tokens: Sequence[int]) -> list[Token]:
        found = []
        for token in tokens:
            self._ids.append(token)
            found.append(Token(token, self._answer.push(token)))
            if self.reason is not None:
                break
        return found

    def lost(self) -> None:
        """The sequence is gone: the next step begins another one."""
        self._used = 0


def fitted(sampling: Sampling, facts: Facts, prompt_count: int, ending: Ending) -> Sampling:
    """Return the sampling of an answer, whose end tokens cannot come too early.

    Raises:
        InvalidInput: it names tokens that the model does not have.
    """
    options = sampling.options
    if ending.min_new_tokens:
        until = prompt_count + ending.min_new_tokens
        options = msgspec.structs.replace(options or Options(), held=ending.eos_ids, until=until)
    if options is None:
        return sampling
    options.check(facts.vocabulary)
    return msgspec.structs.replace(sampling, options=options)


def seen_of(ids: Sequence[int], prompt_count: int) -> dict[int, int]:
    """Return how often each token of prompt and answer came in the answer."""
    return {**dict.fromkeys(ids[:prompt_count], 0), **Counter(ids[prompt_count:])}


Tokenizer = tuple[Callable[..., list[int]], Decode]
"""What makes ids of a text, and a text of ids."""


def tokenizer_of(facts: Facts) -> Tokenizer:
    """The model's own, by the library ``tokenizers``.

    Raises:
        InvalidInput: it has none; the library is not installed.
    """
    if not facts.tokenizer:
        raise InvalidInput("the model has no tokenizer", hint="give the prompt as token ids")
    try:
        import tokenizers
    except ImportError:
        raise InvalidInput(
            "a text needs the library tokenizers", hint="pip install 'pipeswitch[text]'"
        ) from None
    made = tokenizers.Tokenizer.from_str(tokenizer_json(facts.tokenizer))

    def encode(prompt: str, *, with_special: bool = True) -> list[int]:
        return [int(one) for one in made.encode(prompt, add_special_tokens=with_special).ids]

    return encode, Decoding(made)


class Decoding:
    """A tokenizer's ``decode``, and the ids of its special tokens, which have no text."""

    def __init__(self, tokenizer: Any) -> None:
        self._decode = tokenizer.decode
        known = tokenizer.get_added_tokens_decoder().items()
        self.specials = {one.content: id for id, one in known if one.special}

    def __call__(self, ids: Sequence[int]) -> str:
        return str(self._decode(list(ids), skip_special_tokens=True))
