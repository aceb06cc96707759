"""Index of a language model's sequences by their first tokens. Pure.

A history has hashes of its first tokens at some lengths. Two histories with a common hash have the
same tokens so far; the tokens are compared again. Histories match only within a *scope*: the caller
and the program.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable
from typing import Any, Final

import msgspec
import numpy as np

BLOCK: Final = 16  # tokens
FINE_BLOCKS: Final = 64  # each of these blocks has a hash, later ones only some
TOKEN_BYTES: Final = 4  # memory of each token of a history

Tokens = array  # array of C ints: no vocabulary has more than 2**21


def tokens_of(ids: Any) -> Tokens[int]:
    """Return ids, an array or a sequence, as packed tokens."""
    return array("i", np.asarray(ids).astype(np.int32).tobytes())


class History(msgspec.Struct, eq=False):
    """Tokens whose rows a sequence has."""

    scope: Hashable
    of: Any = None  # what its owner knows it by
    tokens: Tokens[int] = msgspec.field(default_factory=lambda: array("i"))
    chain: list[int] = []
    hashed: int = 0  # tokens that the last hash of the chain is of

    def hashes(self, tokens: Tokens[int]) -> tuple[list[int], int]:
        """Return the hashes that ``tokens`` add to the chain, and its new length in tokens."""
        made, at = list[int](), self.hashed
        rest = self.tokens[at:] + tokens
        last = self.chain[-1] if self.chain else hash(self.scope)
        while (end := at + _span(at)) - self.hashed <= len(rest):
            last = hash((last, rest[at - self.hashed : end - self.hashed].tobytes()))
            made.append(last)
            at = end
        return made, at


class Prefixes:
    """All histories."""

    def __init__(self) -> None:
        self._with: dict[int, dict[History, None]] = {}

    def extend(self, history: History, tokens: Tokens[int]) -> None:
        """Add tokens to a history; its sequence has their rows."""
        made, history.hashed = history.hashes(tokens)
        history.tokens.extend(tokens)
        history.chain.extend(made)
        for one in made:
            self._with.setdefault(one, {})[history] = None

    def remove(self, history: History) -> None:
        """Remove all tokens of a history. Idempotent."""
        for one in history.chain:
            owners = self._with[one]
            del owners[history]
            if not owners:
                del self._with[one]
        history.tokens, history.chain, history.hashed = array("i"), [], 0

    def find(self, history: History, tokens: Tokens[int]) -> tuple[History, int] | None:
        """Return the history that shares the most leading tokens, and their number."""
        found: History | None = None
        for one in history.hashes(tokens)[0]:
            if one not in self._with:
                break
            found = next(reversed(self._with[one]))
        if found is None or found.scope != history.scope:
            return None
        count = common(history.tokens + tokens, found.tokens)
        return (found, count) if count > len(history.tokens) else None


def common(these: Tokens[int], those: Tokens[int]) -> int:
    """Return the number of leading tokens that both have."""
    count = min(len(these), len(those))
    if not count:
        return 0
    is_unlike = np.frombuffer(these, np.int32, count) != np.frombuffer(those, np.int32, count)
    first = int(is_unlike.argmax())
    return first if is_unlike[first] else count


def _span(at: int) -> int:
    """Return the number of tokens from ``at`` to the next hash: a long history has few hashes."""
    return BLOCK << max(0, (at // BLOCK).bit_length() - FINE_BLOCKS.bit_length() + 1)
