"""Conversion of an answer's tokens to text as they arrive, and detection of its end. Pure.

Text that was shown is never changed. So a character is shown when all its bytes are there, and text
that may be the beginning of a stop string is held back until it cannot be one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Literal

import msgspec

from ....base.errors import InvalidInput

Decode = Callable[[Sequence[int]], str]
"""A tokenizer's decoding, without special tokens; U+FFFD stands for incomplete characters."""

FinishReason = Literal["stop", "length"]

MAX_STOPS: Final = 16
MAX_STOP_CHARS: Final = 256
_MISSING: Final = "\ufffd"
_MAX_WAIT: Final = 16  # maximum tokens to wait for a whole character, which has at most 4 bytes
_CONTEXT: Final = 6  # number of prompt tokens to decode: enough for a whole character
_MARKS: Final = range(0xD800, 0xE000)  # surrogates, which no text has, stand for special tokens


class StopCriteria(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Conditions that end an answer; the first one that is met applies."""

    max_new_tokens: int
    eos_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()  # strings that end the answer and are not shown
    min_new_tokens: int = 0  # end tokens and stop strings end no answer with fewer tokens
    ignore_eos: bool = False  # True: the model's own end tokens do not end the answer

    def check(self) -> None:
        if self.max_new_tokens < 1:
            raise InvalidInput(f"max_new_tokens {self.max_new_tokens} is below 1")
        if not 0 <= self.min_new_tokens <= self.max_new_tokens:
            raise InvalidInput(
                f"min_tokens {self.min_new_tokens} is not from 0 to max_tokens", param="min_tokens"
            )
        lengths = [len(one) for one in self.stop]
        if len(lengths) > MAX_STOPS or not all(0 < n <= MAX_STOP_CHARS for n in lengths):
            raise InvalidInput(
                f"stop has at most {MAX_STOPS} texts, each of 1 to {MAX_STOP_CHARS} characters"
            )


class Detokenizer:
    """Incremental decoder: the text that each new token adds."""

    def __init__(self, decode: Decode, prompt: Sequence[int] = ()) -> None:
        """Start after the tokens ``prompt``: the first new token's space may depend on them."""
        self._decode = decode
        self._tokens = list(prompt[-_CONTEXT:])
        self._shown = len(self._tokens)  # number of tokens whose text was returned
        self._context = 0  # first token to decode again, as context for the next ones

    def push(self, token: int) -> str:
        """Return the text that this token adds; empty while a character is incomplete."""
        self._tokens.append(token)
        is_late = len(self._tokens) - self._shown > _MAX_WAIT
        return self._new(is_last=is_late)

    def flush(self) -> str:
        """Return the remaining text, with U+FFFD for an incomplete character."""
        return self._new(is_last=True)

    def _new(self, *, is_last: bool) -> str:
        text = self._decode(self._tokens[self._context :])
        before = self._decode(self._tokens[self._context : self._shown])
        if len(text) <= len(before) or (text.endswith(_MISSING) and not is_last):
            return ""
        # The text ends with a whole character, so the next part can be decoded from here on.
        self._context, self._shown = self._shown, len(self._tokens)
        return text[len(before) :]


class OutputProcessor:
    """Processor of one answer: takes its tokens, returns the text to show, and finds its end."""

    def __init__(
        self, ending: StopCriteria, decode: Decode | None = None, prompt: Sequence[int] = ()
    ) -> None:
        """Start; without ``decode`` there is no text, and stop strings raise InvalidInput."""
        if decode is None and ending.stop:
            raise InvalidInput("stop strings need a tokenizer, which this model does not have")
        self._ending = ending
        named = [
            (text, id)
            for text, id in getattr(decode, "specials", {}).items()
            if any(text in stop for stop in ending.stop)
        ]
        self._marks = {id: chr(mark) for (_, id), mark in zip(named, _MARKS, strict=False)}
        self._hidden = str.maketrans("", "", "".join(self._marks.values()))
        self._stops = [*ending.stop]
        # Longer texts first, because the text of a special token may begin with another's.
        for text, id in sorted(named, key=lambda one: -len(one[0])):
            self._stops = [stop.replace(text, self._marks.get(id, text)) for stop in self._stops]
        self._detokenizer = Detokenizer(decode, prompt) if decode else None
        self._held = ""  # text that may be a stop string's beginning
        self.tokens: list[int] = []
        self.reason: FinishReason | None = None
        self.stopped_by = ""  # the stop string that ended the answer

    def push(self, token: int) -> str:
        """Return the text that may be shown now; ``reason`` is set if this was the last token."""
        self.tokens.append(token)
        is_end = token in self._ending.eos_ids
        is_full = len(self.tokens) >= self._ending.max_new_tokens
        text = ""
        if self._detokenizer is not None:
            text = "" if is_end else self._detokenizer.push(token)
            if is_end or is_full or token in self._marks:
                text += self._detokenizer.flush() + self._marks.get(token, "")
        shown, is_stopped = self._upto_stop(self._held + text)
        if is_end or is_stopped:
            self.reason = "stop"
        elif is_full:
            self.reason = "length"
        if self.reason is not None and not is_stopped:
            shown, self._held = shown + self._held, ""
        return shown.translate(self._hidden) if self._marks else shown

    def _upto_stop(self, text: str) -> tuple[str, bool]:
        """Return the text before the first stop string, or before its possible beginning.

        The flag says whether a stop string was found. A special token has no text, so a mark stands
        for it, both in stop strings and in ``text``.
        """
        if len(self.tokens) < self._ending.min_new_tokens:
            return text, False
        pairs = zip(self._stops, self._ending.stop, strict=True)
        places = [(place, own) for stop, own in pairs if (place := text.find(stop)) >= 0]
        if places:
            place, self.stopped_by = min(places)
            self._held = ""
            return text[:place], True
        overlap = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - overlap :]
        return text[: len(text) - overlap], False


def _overlap(text: str, stop: str) -> int:
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
