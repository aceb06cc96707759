"""Language model data that a bundle has besides its graph: tokenizer, end tokens, defaults. Pure.

One program computes the prompt and each later token (ADR 49). Its inputs are ``ids`` [batch,
length], ``count`` [batch] (number of ids without padding), ``used`` [batch] (number of cache rows
in use) and ``cache`` [batch, past, width], one row for each earlier token. Its outputs are
``logits`` [batch, vocabulary] of each sequence's last token, and ``cache_new`` [batch, length,
width], the rows to append. All padding is on the right.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Container, Iterable, Mapping
from typing import Any, ClassVar, Final, NoReturn

import msgspec

from ....base.codec import UNREADABLE
from ....base.errors import InvalidInput, RegistrationRefused
from ....programs.graphs.bundle import MAX_NOTE_CHARS, MAX_NOTES
from ....programs.interface.dims import BATCH, Dim
from ....programs.interface.layout import CACHE, PADS, KindSettings, ValueSpec
from .sampling import Options, Sampling

VERSION: Final = 1
IDS: Final = "ids"
COUNT: Final = "count"
USED: Final = "used"
LOGITS: Final = "logits"
CACHE_NEW: Final = "cache_new"
STATE: Final = {CACHE: (CACHE_NEW, 1)}  # ``BuildSpec.state``
HIDDEN: Final = "last_hidden_state"  # output of a model that embeds texts
POOLINGS: Final = ("cls", "max", "mean", "mean_sqrt_len", "weightedmean", "last")
MOST_STEPS: Final = 32  # maximum number of steps that a worker computes in one run

MAX_VOCABULARY: Final = 1 << 21
MAX_EOS: Final = 64
MAX_TEMPLATE_CHARS: Final = 1 << 16  # the longest known template has 9,000
MAX_SPECIALS: Final = 64  # special tokens that a template uses
RARE: Final = ("top_k", "min_p", "repetition_penalty")
DEFAULTS: Final = ("temperature", "top_p", "max_new_tokens", *RARE)  # author's settings in use
# Settings of a generation_config that do not affect the tokens, or that other code reads.
SILENT: Final = re.compile(
    "(_|output_|use_|cache_|return_|assistant_|num_assistant|is_assistant|speculation|prompt_lookup|compile|disable_compile|continuous_batching|max_cache|max_matching|target_lookbehind|prefill|low_memory|renormalize|remove_invalid|decoder_start|(eos|bos|pad)_token_id$|do_sample$|transformers_version$)"
)
# Value -> settings that change no token with it. None, False and empty values change none, either.
NEUTRAL: Final = {
    1: "repetition_penalty encoder_repetition_penalty length_penalty num_beams num_beam_groups "
    "num_return_sequences guidance_scale typical_p top_h",
    0: "top_k min_p min_length min_new_tokens no_repeat_ngram_size encoder_no_repeat_ngram_size "
    "epsilon_cutoff eta_cutoff penalty_alpha diversity_penalty",
}
MAX_TOKENIZER_BYTES: Final = 64 << 20  # the largest known one, for 262,000 tokens, has 33 MB


class GenerationSettings(KindSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A language model's own settings, as its author published them."""

    kind: ClassVar[str] = "generation"
    low_dims: ClassVar[tuple[str, ...]] = ("length", BATCH)  # one token of one sequence

    version: int
    vocabulary: int  # number of logits for one token
    context: int  # maximum tokens of prompt and answer together
    eos_ids: tuple[int, ...] = ()  # each of them ends an answer
    bos_id: int | None = None
    chat_template: str = ""  # Jinja of the model's author; it must be rendered in a sandbox
    # name in the template, such as ``eos_token`` -> token's text
    special: dict[str, str] = msgspec.field(default_factory=dict)
    tokenizer: bytes = b""  # tokenizer.json, compressed by zlib; empty: prompts are ids
    # defaults for requests; keys are in ``DEFAULTS``
    sampling: dict[str, int | float] = msgspec.field(default_factory=dict)
    # ``POOLINGS`` joined by ``+``, if the model embeds texts; empty: it generates text
    pooling: str = ""
    notes: tuple[str, ...] = ()  # settings of its author that are not supported, for people

    @property
    def option(self) -> str:
        return "" if self.pooling else "generate"

    def check(self, values: Iterable[ValueSpec], dims: Iterable[Dim]) -> None:
        """Raise RegistrationRefused if a setting exceeds its limit or contradicts the graph."""
        if self.version != VERSION:
            _refuse(f"version {self.version}, we read {VERSION}")
        vocabulary, ids = self.vocabulary, [*self.eos_ids, self.bos_id or 0]
        if not 1 <= vocabulary <= MAX_VOCABULARY or len(self.eos_ids) > MAX_EOS:
            _refuse(f"a vocabulary of {vocabulary}, or more than {MAX_EOS} ends")
        if not all(0 <= token < vocabulary for token in ids):
            _refuse(f"a special token lies outside the vocabulary of {vocabulary}")
        texts = [self.chat_template, *self.special, *self.special.values()]
        if max(map(len, texts)) > MAX_TEMPLATE_CHARS or len(texts) > 2 * MAX_SPECIALS:
            _refuse(f"a chat template of more than {MAX_TEMPLATE_CHARS} characters, or its tokens")
        for name, value in self.sampling.items():
            if name not in DEFAULTS or not _is_default(name, value):
                _refuse(f"a default {name[:40]!r} has the invalid value {value}")
        notes = self.notes
        if len(notes) > MAX_NOTES or any(len(one) > MAX_NOTE_CHARS for one in notes):
            _refuse(f"more than {MAX_NOTES} notes of {MAX_NOTE_CHARS} characters")
        specs = {one.name: (one.dtype, one.shape) for one in values}
        if self.pooling:
            if not {*POOLINGS} >= {*self.pooling.split("+")} or HIDDEN not in specs:
                _refuse(f"no pooling {self.pooling[:40]!r} of an output {HIDDEN}")
            return
        dtype, (*_, width) = specs.get(CACHE, ("", (0,)))
        needed = {
            "ids": ("int64", ("batch", "length")),
            "count": ("int64", ("batch",)),
            "used": ("int64", ("batch",)),
            CACHE: (dtype, ("batch", "past", width)),
            LOGITS: (specs.get(LOGITS, ("",))[0], ("batch", vocabulary)),
            CACHE_NEW: (dtype, ("batch", "length", width)),
        }
        if specs != needed:
            _refuse(
                f"the graph's inputs and outputs are not those of a decoder of {vocabulary} tokens"
            )
        if ("past", 1, self.context) not in [(dim.name, dim.low, dim.high) for dim in dims]:
            _refuse(f"the graph does not take a past of 1 to {self.context} tokens")

    def fits(self, outputs: Container[str]) -> bool:
        return not self.pooling or HIDDEN in outputs

    def claims(self) -> dict[str, Any]:
        own = {"embedding": self.numbers()}
        if not self.pooling:
            own = {self.kind: self.numbers(), "pads": PADS, "state": STATE}
        return own | ({"notes": self.notes} if self.notes else {})

    def numbers(self) -> dict[str, Any]:
        """Return the fields for the manifest; the long texts stay in the bundle."""
        fields = msgspec.to_builtins(self)
        numbers = {key: fields[key] for key in ("vocabulary", "context", "eos_ids", "bos_id")}
        numbers |= {"sampling": self.sampling} if self.sampling else {}
        numbers |= {"pooling": self.pooling} if self.pooling else {}
        return numbers | ({} if self.tokenizer else {"has_tokenizer": False})


def read_settings(text: str) -> GenerationSettings:
    """Decode the settings from a bundle's metadata; raise RegistrationRefused if they are invalid.
    The caller must call ``check``."""
    try:
        return msgspec.json.decode(text, type=GenerationSettings)
    except UNREADABLE as error:
        _refuse(str(error)[:200])


def author_defaults(
    settings: Mapping[str, Any], context: int
) -> tuple[dict[str, float], list[str]]:
    """Read an author's ``generation_config``.

    Returns:
        The defaults for requests, and a note on each setting that is not followed.
    """
    sampling: dict[str, float] = {}
    notes = []
    for name, value in sorted(settings.items()):
        if name in RARE and _is_neutral(name, value, context):
            continue
        if name in DEFAULTS and _is_default(name, value):
            sampling[name] = value
            if name == "repetition_penalty":  # it changes greedy answers too
                notes.append(f"generation_config: {name} = {value!r} applies only to HTTP")
        elif not SILENT.match(name) and not _is_neutral(name, value, context):
            notes.append(f"generation_config: {name} = {value!r:.200} is not supported")
    if settings.get("do_sample") is False:
        sampling["temperature"] = 0.0
    return sampling, notes[:MAX_NOTES]


def _is_neutral(name: str, value: Any, context: int) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return not value
    if name == "max_length":
        return value >= context  # the context ends an answer earlier
    return value in NEUTRAL and name in NEUTRAL[int(value)].split()


def _is_default(name: str, value: Any) -> bool:
    if name == "max_new_tokens":
        return type(value) is int and value >= 1
    try:
        kind: type[Options] | type[Sampling] = Options if name in RARE else Sampling
        msgspec.convert({name: value}, kind).check()
    except (InvalidInput, msgspec.ValidationError):
        return False
    return True


def tokenizer_text(tokenizer: Any) -> str:
    """Return the ``tokenizer.json`` of a tokenizer of transformers; empty for None.

    Raises:
        RegistrationRefused: it is Python code, which the library tokenizers cannot hold.
    """
    if tokenizer is not None and not hasattr(tokenizer, "backend_tokenizer"):
        _refuse(
            f"its tokenizer, {type(tokenizer).__name__}, is Python code and has no tokenizer.json; "
            "register the model without it and send token ids"
        )
    return "" if tokenizer is None else str(tokenizer.backend_tokenizer.to_str())


def packed_tokenizer(text: str) -> bytes:
    """Return ``tokenizer.json`` in the compressed form of a bundle.

    Raises:
        RegistrationRefused: the text is larger than ``MAX_TOKENIZER_BYTES``.
    """
    data = text.encode()
    if len(data) > MAX_TOKENIZER_BYTES:
        _refuse(f"its tokenizer has {len(data)} bytes, at most {MAX_TOKENIZER_BYTES}")
    return zlib.compress(data, 9)


def tokenizer_json(packed: bytes) -> str:
    """Return the text of ``tokenizer.json``; empty if ``packed`` is empty.

    Raises:
        RegistrationRefused: ``packed`` is damaged, or its text exceeds ``MAX_TOKENIZER_BYTES``.
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
