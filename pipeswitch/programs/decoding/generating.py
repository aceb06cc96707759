"""What a server says of a language model, and when its answers end. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from ...base.errors import InvalidInput
from .answer import Decode, Ending
from .generation import tokenizer_json


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What the server says of a language model."""

    version: int  # of the model
    digest: str  # of its program
    vocabulary: int
    context: int  # tokens of prompt and answer together
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    chat_template: str = ""
    special: dict[str, str] = {}  # tokens that the template names
    tokenizer: bytes = b""  # compressed; empty: it has none, or it was not asked for
    has_tokenizer: bool = True
    sampling: dict[str, int | float] = {}  # what its author has where a request does not say


class Token(NamedTuple):
    """One token of an answer."""

    id: int
    text: str  # that may be shown now; empty where a character or a stop string is not whole


def ending_of(facts: Facts, prompt: Sequence[int], ending: Ending) -> Ending:
    """Return when the answer to a prompt ends: as asked, at the model's own end tokens, or where
    its context ends.

    Raises:
        InvalidInput: a token is none of the vocabulary, the prompt is empty or leaves no room, or a
            setting is out of its range.
    """
    ending.check()
    count = len(prompt)
    if not 0 < count < facts.context:
        raise InvalidInput(f"a prompt of {count} tokens: the model takes 1 to {facts.context - 1}")
    if odd := [one for one in prompt if type(one) is not int or not 0 <= one < facts.vocabulary]:
        raise InvalidInput(f"{odd[0]!r:.40} is no token from 0 to {facts.vocabulary - 1}")
    most = min(ending.max_new_tokens, facts.context - count)
    ends = (*facts.eos_ids, *ending.eos_ids)
    return msgspec.structs.replace(ending, max_new_tokens=most, eos_ids=ends)


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

    def decode(ids: Sequence[int]) -> str:
        return str(made.decode(list(ids), skip_special_tokens=True))

    return encode, decode
