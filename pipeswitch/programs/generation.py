"""What a bundle says of a language model, beside its graph: how its answers become text. Pure.

The program is one, for a prompt and for each token after it (ADR 49). Its inputs: ``ids``
[batch, length], ``count`` [batch] (how many of them are real), ``used`` [batch] (how many rows of
the cache are) and ``cache`` [batch, past, width], one row for each token so far. Its outputs:
``logits`` [batch, vocabulary] of each sequence's last real token, and ``cache_new``
[batch, length, width], the rows to append. All padding is on the right.
"""

from __future__ import annotations

import zlib
from typing import Any, Final, NoReturn, Protocol

import msgspec

from ..errors import RegistrationRefused
from .dims import Dim
from .layout import ValueSpec

VERSION: Final = 1
METADATA_KEY: Final = "pipeswitch.generation"
CACHE: Final = "cache"
INPUTS: Final = {
    "ids": ("batch", "length"),
    "count": ("batch",),
    "used": ("batch",),
    CACHE: ("batch", "past"),  # and its width
}
LOGITS: Final = "logits"
CACHE_NEW: Final = "cache_new"

MAX_VOCABULARY: Final = 1 << 21
MAX_EOS: Final = 64
MAX_TEMPLATE_CHARS: Final = 1 << 16  # the longest known has 9,000
MAX_TOKENIZER_BYTES: Final = 64 << 20  # the largest known, of 262,000 words, has 33 MB


class Generation(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """A language model's own settings, as its author published them."""

    version: int
    vocabulary: int  # logits of one token
    context: int  # tokens of prompt and answer together
    eos_ids: tuple[int, ...] = ()  # any of them ends an answer
    bos_id: int | None = None
    chat_template: str = ""  # Jinja, of the model's author: to be rendered in a sandbox alone
    tokenizer: bytes = b""  # tokenizer.json, compressed by zlib; empty: prompts are ids

    def summary(self) -> dict[str, Any]:
        """What a manifest says of it: all but the long texts, which are in the bundle."""
        return {
            "vocabulary": self.vocabulary,
            "context": self.context,
            "eos_ids": list(self.eos_ids),
            "bos_id": self.bos_id,
            "has_tokenizer": bool(self.tokenizer),
            "has_chat": bool(self.chat_template),
        }


class Signature(Protocol):
    """A graph's."""

    @property
    def inputs(self) -> tuple[ValueSpec, ...]: ...

    @property
    def outputs(self) -> tuple[ValueSpec, ...]: ...

    @property
    def dims(self) -> tuple[Dim, ...]: ...


def decode_generation(text: str, graph: Signature) -> Generation:
    """From a bundle's metadata, checked against its graph.

    Raises:
        RegistrationRefused: it is not bounded, or not of this graph.
    """
    try:
        generation = msgspec.json.decode(text, type=Generation)
    except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
        _refuse(str(error)[:200])
    check_generation(generation, graph)
    return generation


def check_generation(generation: Generation, graph: Signature) -> None:
    """Refuse what is not bounded, or says other things than the graph."""
    if generation.version != VERSION:
        _refuse(f"version {generation.version}, we read {VERSION}")
    vocabulary, ids = generation.vocabulary, [*generation.eos_ids, generation.bos_id or 0]
    if not 1 <= vocabulary <= MAX_VOCABULARY or len(generation.eos_ids) > MAX_EOS:
        _refuse(f"a vocabulary of {vocabulary}, or more than {MAX_EOS} ends")
    if not all(0 <= token < vocabulary for token in ids):
        _refuse(f"a special token lies outside the vocabulary of {vocabulary}")
    if len(generation.chat_template) > MAX_TEMPLATE_CHARS:
        _refuse(f"a chat template of more than {MAX_TEMPLATE_CHARS} characters")
    inputs = {spec.name: spec for spec in graph.inputs}
    outputs = {spec.name: spec for spec in graph.outputs}
    highest = {dim.name: dim.high for dim in graph.dims}
    if set(inputs) != set(INPUTS) or not {LOGITS, CACHE_NEW} <= set(outputs):
        _refuse("the graph's inputs and outputs are not a decoder's")
    width = inputs[CACHE].shape[2:]
    found = {name: spec.shape[: len(INPUTS[name])] for name, spec in inputs.items()}
    integers = {spec.dtype for name, spec in inputs.items() if name != CACHE}
    is_decoder = found == INPUTS and integers == {"int64"} and len(width) == 1
    is_appended = (
        outputs[CACHE_NEW].shape == ("batch", "length", *width)
        and outputs[CACHE_NEW].dtype == inputs[CACHE].dtype
    )
    if not (is_decoder and is_appended and isinstance(width[0], int)):
        _refuse("its state is not [batch, past, width] to which [batch, length, width] is added")
    if outputs[LOGITS].shape != ("batch", vocabulary):
        _refuse(f"its logits are not [batch, {vocabulary}]")
    if generation.context != highest["past"]:
        _refuse(f"a context of {generation.context}, the graph takes {highest['past']}")


def packed_tokenizer(text: str) -> bytes:
    """``tokenizer.json`` as a bundle carries it.

    Raises:
        RegistrationRefused: it is larger than a reader accepts.
    """
    data = text.encode()
    if len(data) > MAX_TOKENIZER_BYTES:
        _refuse(f"its tokenizer has {len(data)} bytes, at most {MAX_TOKENIZER_BYTES}")
    return zlib.compress(data, 9)


def tokenizer_json(generation: Generation) -> str:
    """The text of ``tokenizer.json``; empty where it has none.

    Raises:
        RegistrationRefused: it is damaged, or unfolds to more than is accepted.
    """
    if not generation.tokenizer:
        return ""
    unpacker = zlib.decompressobj()
    try:
        data = unpacker.decompress(generation.tokenizer, MAX_TOKENIZER_BYTES)
        if not unpacker.eof or unpacker.unused_data:
            _refuse(f"its tokenizer is cut off, or larger than {MAX_TOKENIZER_BYTES} bytes")
        return data.decode()
    except (zlib.error, UnicodeError) as error:
        _refuse(f"its tokenizer is damaged: {error}")


def _refuse(reason: str) -> NoReturn:
    raise RegistrationRefused("bundle generation", reason)
