"""Which sequences of a language model begin with the same tokens. Pure.

A history has a hash of each whole block of its tokens and of all before it: two that have one in
common had the same tokens so far, which is compared again. Only within a *scope*: who asks, and
which program.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Final

import msgspec

BLOCK: Final = 16  # tokens


class History(msgspec.Struct, eq=False):
    """The tokens that a sequence has the rows of."""

    scope: Hashable
    of: Any = None  # what its owner knows it by
    tokens: list[int] = []
    chain: list[int] = []

    def hashes(self, tokens: Sequence[int]) -> list[int]:
        """Of the whole blocks that ``tokens`` complete."""
        made = list[int]()
        rest = [*self.tokens[BLOCK * len(self.chain) :], *tokens]
        last = self.chain[-1] if self.chain else hash(self.scope)
        for at in range(0, len(rest) - BLOCK + 1, BLOCK):
            last = hash((last, *rest[at : at + BLOCK]))
            made.append(last)
        return made


class Prefixes:
    """All histories."""

    def __init__(self) -> None:
        self._with: dict[int, dict[History, None]] = {}

    def extend(self, history: History, tokens: Sequence[int]) -> None:
        """It has the rows of these too."""
        made = history.hashes(tokens)
        history.tokens.extend(tokens)
        history.chain.extend(made)
        for one in made:
            self._with.setdefault(one, {})[history] = None

    def remove(self, history: History) -> None:
        """It has none any more. Idempotent."""
        for one in history.chain:
            owners = self._with[one]
            del owners[history]
            if not owners:
                del self._with[one]
        history.tokens, history.chain = [], []

    def find(self, history: History, tokens: Sequence[int]) -> tuple[History, int] | None:
        """One with the same tokens and the most of those to come, and how many both have."""
        found: History | None = None
        for one in history.hashes(tokens):
            if one not in self._with:
                break
            found = next(reversed(self._with[one]))
        whole = [*history.tokens, *tokens]
        if found is None or found.scope != history.scope:
            return None
        count = common(whole, found.tokens)
        return (found, count) if count > len(history.tokens) else None


def common(these: Sequence[int], those: Sequence[int]) -> int:
    """How many they begin with alike."""
    pairs = enumerate(zip(these, those, strict=False))
    unlike = next((at for at, (one, other) in pairs if one != other), None)
    return min(len(these), len(those)) if unlike is None else unlike
