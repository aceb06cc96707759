"""What a bundle says of a language model, beside its graph: how its answers become text. Pure.

The program is one, for a prompt and for each token after it (ADR 49). Its inputs: ``ids``
[batch, length], ``count`` [batch] (how many of them are real), ``used`` [batch] (how many rows of
the cache are) and ``cache`` [batch, past, width], one row for each token so far. Its outputs:
``logits`` [batch, vocabulary] of each sequence's last real token, and ``cache_new``
[batch, length, width], the rows to append. All padding is on the right.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Any, Final, NoReturn

import msgspec

from ..errors import RegistrationRefused
from .dims import Dim
from .layout import ValueSpec

VERSION: Final = 1
METADATA_KEY: Final = "pipeswitch.generation"
IDS: Final = "ids"
COUNT: Final = "count"
USED: Final = "used"
CACHE: Final = "cache"
LOGITS: Final = "logits"
CACHE_NEW: Final = "cache_new"
STATE: Final = {CACHE: (CACHE_NEW, 1)}  # as a registration says it
PADS: Final = {"length": "count", "past": "used"}  # ``Manifest.pads``
TOKENS: Final = "tokens"  # that a worker chose, [batch, steps]: they come instead of the logits
MOST_STEPS: Final = 32  # that it may go on for

MAX_VOCABULARY: Final = 1 << 21
MAX_EOS: Final = 64
MAX_TEMPLATE_CHARS: Final = 1 << 16  # the longest known has 9,000
MAX_SPECIALS: Final = 64  # tokens that a template names
MAX_TOKENIZER_BYTES: Final = 64 << 20  # the largest known, of 262,000 words, has 33 MB


class Generation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A language model's own settings, as its author published them."""

    version: int
    vocabulary: int  # logits of one token
    context: int  # tokens of prompt and answer together
    eos_ids: tuple[int, ...] = ()  # any of them ends an answer
    bos_id: int | None = None
    chat_template: str = ""  # Jinja, of the model's author: to be rendered in a sandbox alone
    special: dict[str, str] = {}  # what the template calls tokens, such as ``eos_token``
    tokenizer: bytes = b""  # tokenizer.json, compressed by zlib; empty: prompts are ids

    def numbers(self) -> dict[str, Any]:
        """What a manifest says of it; the long texts are in the bundle."""
        kept = msgspec.to_builtins(self)
        return {key: kept[key] for key in ("vocabulary", "context", "eos_ids", "bos_id")}


def decode_generation(text: str) -> Generation:
    """From a bundle's metadata; ``check_generation`` comes next.

    Raises:
        RegistrationRefused: it is not one.
    """
    try:
        return msgspec.json.decode(text, type=Generation)
    except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
        _refuse(str(error)[:200])


def check_generation(
    generation: Generation, values: Iterable[ValueSpec], dims: Iterable[Dim]
) -> None:
    """Refuse what is not bounded, or says other things than its graph.

    ``values`` are the graph's inputs and outputs.
    """
    if generation.version != VERSION:
        _refuse(f"version {generation.version}, we read {VERSION}")
    vocabulary, ids = generation.vocabulary, [*generation.eos_ids, generation.bos_id or 0]
    if not 1 <= vocabulary <= MAX_VOCABULARY or len(generation.eos_ids) > MAX_EOS:
        _refuse(f"a vocabulary of {vocabulary}, or more than {MAX_EOS} ends")
    if not all(0 <= token < vocabulary for token in ids):
        _refuse(f"a special token lies outside the vocabulary of {vocabulary}")
    texts = [generation.chat_template, *generation.special, *generation.special.values()]
    if max(map(len, texts)) > MAX_TEMPLATE_CHARS or len(texts) > 2 * MAX_SPECIALS:
        _refuse(f"a chat template of more than {MAX_TEMPLATE_CHARS} characters, or its tokens")
    found = {one.name: (one.dtype, one.shape) for one in values}
    dtype, (*_, width) = found.get(CACHE, ("", (0,)))
    wanted = {
        "ids": ("int64", ("batch", "length")),
        "count": ("int64", ("batch",)),
        "used": ("int64", ("batch",)),
        CACHE: (dtype, ("batch", "past", width)),
        LOGITS: (found.get(LOGITS, ("",))[0], ("batch", vocabulary)),
        CACHE_NEW: (dtype, ("batch", "length", width)),
    }
    if found != wanted:
        _refuse(f"the graph's inputs and outputs are not those of a decoder of {vocabulary} tokens")
    if ("past", 1, generation.context) not in [(dim.name, dim.low, dim.high) for dim in dims]:
        _refuse(f"the graph does not take a past of 1 to {generation.context} tokens")


def packed_tokenizer(text: str) -> bytes:
    """``tokenizer.json`` as a bundle carries it.

    Raises:
        RegistrationRefused: it is larger than a reader accepts.
    """
    data = text.encode()
    if len(data) > MAX_TOKENIZER_BYTES:
        _refuse(f"its tokenizer has {len(data)} bytes, at most {MAX_TOKENIZER_BYTES}")
    return zlib.compress(data, 9)


def tokenizer_json(packed: bytes) -> str:
    """The text of ``tokenizer.json``; empty where there is none.

    Raises:
        RegistrationRefused: it is damaged, or unfolds to more than is accepted.
    """
    if not packed:
        return ""
    unpacker = zlib.decompressobj()
    try:
        data = unpacker.decompress(packed, MAX_TOKENIZER_BYTES)
        if not unpacker.eof or unpacker.unused_data:
            _refuse(f"its tokenizer is cut off, or larger than {MAX_TOKENIZER_BYTES} bytes")
        return data.decode()
    except (zlib.error, UnicodeError) as error:
        _refuse(f"its tokenizer is damaged: {error}")


def _refuse(reason: str) -> NoReturn:
    raise RegistrationRefused("bundle generation", reason)
