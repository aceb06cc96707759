"""Facts about a language model that a server sends to clients, and limits of its answers. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Final, NamedTuple

import msgspec

from ....base.errors import InvalidInput
from .generation_settings import tokenizer_json
from .output import StopCriteria
from .sampling import Options, Sampling

TOO_LONG: Final = "context_length_exceeded"  # OpenAI's code; some clients then shorten a chat
LONGEST: Final = "this model's maximum context length is {} tokens"  # OpenAI's words, for clients


class LanguageModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about a language model that the server sends to clients."""

    version: int  # version of the model
    digest: str  # digest of its program
    vocabulary: int
    context: int  # maximum tokens of prompt and answer together
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    chat_template: str = ""
    special: dict[str, str] = {}  # special tokens that the template uses, by name
    pooling: str = ""  # as in ``GenerationSettings``
    tokenizer: bytes = b""  # compressed; empty: the model has none, or it was not requested
    has_tokenizer: bool = True
    sampling: dict[str, int | float] = {}  # the author's defaults for requests


class Token(NamedTuple):
    """One token of an answer."""

    id: int
    text: str  # text to show now; empty while a character or a possible stop string is incomplete
    logprob: float | None = None  # log probability of the token, if ``logprobs`` is set
    top: Sequence[tuple[int, float]] = ()  # likeliest tokens in its place, with log probabilities


def ending_of(
    facts: LanguageModelConfig, prompt: Sequence[int], ending: StopCriteria
) -> StopCriteria:
    """Return ``ending`` with the model's own end tokens, and limited to the model's context.

    Raises:
        InvalidInput: a token is not in the vocabulary, the prompt is empty or fills the context,
            or a setting is out of its range.
    """
    ending.check()
    count = len(prompt)
    if not 0 < count < facts.context:
        words = f"a prompt of {count} tokens: the model takes 1 to {facts.context - 1}"
        if not count:
            raise InvalidInput(words)
        words = f"{words}; {LONGEST.format(facts.context)}"
        raise InvalidInput(words, hint="shorten the prompt", code=TOO_LONG)
    if odd := [one for one in prompt if type(one) is not int or not 0 <= one < facts.vocabulary]:
        raise InvalidInput(f"{odd[0]!r:.40} is not a token from 0 to {facts.vocabulary - 1}")
    check_stop_ids(ending.eos_ids, facts.vocabulary)
    most = min(ending.max_new_tokens, facts.context - count)
    ends = ending.eos_ids if ending.ignore_eos else (*facts.eos_ids, *ending.eos_ids)
    return msgspec.structs.replace(ending, max_new_tokens=most, eos_ids=ends)


def check_stop_ids(ids: Sequence[int], vocabulary: int) -> None:
    """Raise InvalidInput if one of a request's end tokens is not in the vocabulary."""
    if odd := [one for one in ids if not 0 <= one < vocabulary]:
        raise InvalidInput(
            f"{odd[0]} is not a token from 0 to {vocabulary - 1}", param="stop_token_ids"
        )


def fitted(
    sampling: Sampling, facts: LanguageModelConfig, prompt_count: int, ending: StopCriteria
) -> Sampling:
    """Return ``sampling``, changed to sample no end token before ``ending.min_new_tokens``.

    Raises:
        InvalidInput: a token is not in the vocabulary, or a setting is out of its range.
    """
    sampling.check()
    options = sampling.options
    if ending.min_new_tokens:
        until = prompt_count + ending.min_new_tokens
        options = msgspec.structs.replace(options or Options(), held=ending.eos_ids, until=until)
    if options is None:
        return sampling
    options.check(facts.vocabulary)
    return msgspec.structs.replace(sampling, options=options)


def seen_of(ids: Sequence[int], prompt_count: int) -> dict[int, int]:
    """Return, for each token of prompt and answer, its count in the answer."""
    return {**dict.fromkeys(ids[:prompt_count], 0), **Counter(ids[prompt_count:])}


_PLAIN: Final = [*range(33, 127), *range(161, 173), *range(174, 256)]  # in a byte-level alphabet
_OTHERS: Final = [one for one in range(256) if one not in _PLAIN]
BYTE_OF: Final = {chr(b): b for b in _PLAIN} | {chr(256 + n): b for n, b in enumerate(_OTHERS)}

Tokenizer = tuple[Callable[..., list[int]], "Decoding"]
"""Functions that encode a text as ids, and decode ids to a text."""
MOST_TRIED: Final = 4096  # tokens that are looked at to find one from within a word
TokenName = tuple[str, bytes | None]  # text, and bytes, which may be a part of a character


def tokenizer_of(facts: LanguageModelConfig) -> Tokenizer:
    """Return the model's own tokenizer, from the library ``tokenizers``.

    Raises:
        InvalidInput: the model has no tokenizer, or the library is not installed.
    """
    if not facts.tokenizer:
        raise InvalidInput("the model has no tokenizer", hint="give the prompt as token ids")
    try:
        import tokenizers
    except ImportError:
        raise InvalidInput(
            "a text needs the library tokenizers", hint="pip install 'pipeswitch[text]'"
        ) from None
    tokenizer = tokenizers.Tokenizer.from_str(tokenizer_json(facts.tokenizer))

    def encode(prompt: str, *, with_special: bool = True) -> list[int]:
        return [int(one) for one in tokenizer.encode(prompt, add_special_tokens=with_special).ids]

    return encode, Decoding(tokenizer)


class Decoding:
    """A tokenizer's ``decode``, and the ids of its special tokens, which it does not show."""

    def __init__(self, tokenizer: Any) -> None:
        self._decode = tokenizer.decode
        known = tokenizer.get_added_tokens_decoder().items()
        self._piece, self._added = tokenizer.id_to_token, {id for id, _ in known}
        self._size = tokenizer.get_vocab_size()
        self._is_byte_level = b"ByteLevel" in (tokenizer.decoder.__getstate__() or b"")
        self.specials = {one.content: id for id, one in known if one.special}

    def __call__(self, ids: Sequence[int]) -> str:
        return str(self._decode(list(ids), skip_special_tokens=True))

    @cached_property
    def _beside(self) -> tuple[list[int], int, int]:
        """A token from within a word, and the lengths of its text at the start and later."""
        for id in range(min(self._size, MOST_TRIED)):
            one, two, three = (self([id] * count) for count in (1, 2, 3))
            unit = two[len(one) :]
            if unit.isalnum() and two.startswith(one) and three == two + unit:
                return [id], len(one), len(unit)
        return [], 0, 0

    def name(self, id: int) -> TokenName:
        """Return the text and the bytes of one token within a text, also of a special token.
        For the complement ``~id``, it is a token at the start of a text."""
        beside, before, after = self._beside
        ids = [~id, *beside] if id < 0 else [*beside, id, *beside]
        before, id = 0 if id < 0 else before, max(id, ~id)
        ids = [id] if id in self._added else ids
        text, piece = str(self._decode(ids, skip_special_tokens=False)), self._piece(id)
        if piece is None or id in self._added:
            return text, piece and piece.encode()
        text = text[before : len(text) - after]
        if self._is_byte_level and BYTE_OF.keys() >= {*piece}:
            return text, bytes([BYTE_OF[one] for one in piece])
        if re.fullmatch("<0x[0-9A-F]{2}>", piece):  # SentencePiece's fallback
            return text, bytes.fromhex(piece[3:5])
        return text, None if "\ufffd" in text else text.encode()
