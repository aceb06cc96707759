"""Mutations that keep an input well-formed: they replace one of its values by another.

The first decoder refuses most inputs in which random bytes were flipped. This mutator splits an
input into parts, decodes a part to plain data, changes one place in it, and encodes all again.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from .target import Codec, Target

NATIVE_CHANCE = 0.25  # probability of the fuzzer's own mutation of the raw bytes
PART_CHANCE = 0.2  # probability of a change to the list of parts
TRIES = 3  # attempts to find a part that can be decoded
NUMBERS = (
    0,
    1,
    -1,
    2,
    3,
    4,
    5,
    7,
    8,
    16,
    63,
    64,
    65,
    127,
    128,
    255,
    256,
    511,
    512,
    4095,
    4096,
    65535,
    65536,
    1 << 20,
    1 << 21,
    (1 << 31) - 1,
    1 << 31,
    1 << 32,
    1 << 40,
    (1 << 53) + 1,
    (1 << 62),
    (1 << 63) - 1,
    1 << 63,
    (1 << 64) - 1,
    -(1 << 31),
    -(1 << 63),
)
FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-300, 1e300, float("inf"), float("-inf"), float("nan"))
TEXTS = ("", "a", "\0", "é", "\ud7ff", "x" * 65, "x" * 300, "../..", "/", "%s", "{0}", "\n")

Native = Callable[[bytes, int], bytes]
"""The fuzzer's own mutation of bytes; the second argument is the largest size of its result."""


class Mutator:
    """Mutator of one target, which also inserts parts of the target's seeds."""

    def __init__(self, target: Target, native: Native) -> None:
        self._codec: Codec = target.codec
        self._native = native
        self._texts = (*TEXTS, *target.words)
        self._chance: random.Random | None = None
        self._parts = [part for seed in target.seeds() for part in self._codec.split(seed)]

    def __call__(self, data: bytes, max_bytes: int, seed: int) -> bytes:
        if self._chance is None:  # created once, because creating one takes as long as a mutation
            self._chance = random.Random(seed)
        chance = self._chance
        if chance.random() < NATIVE_CHANCE:
            return self._native(data, max_bytes)
        parts = self._codec.split(data) or [b""]
        for _ in range(1 + (chance.random() < 0.3)):
            if chance.random() < PART_CHANCE:
                self._change_parts(parts, chance)
            else:
                self._change_part(parts, max_bytes, chance)
        changed = self._codec.join(parts)
        return changed if len(changed) <= max_bytes else self._native(data, max_bytes)

    def _change_parts(self, parts: list[bytes], chance: random.Random) -> None:
        index = chance.randrange(len(parts))
        match chance.randrange(5):
            case 0 if len(parts) > 1:
                del parts[index]
            case 1:
                parts.insert(index, parts[chance.randrange(len(parts))])
            case 2:
                other = chance.randrange(len(parts))
                parts[index], parts[other] = parts[other], parts[index]
            case 3:
                parts[index] = chance.choice(self._parts)
            case _:
                parts.insert(index + 1, chance.choice(self._parts))

    def _change_part(self, parts: list[bytes], max_bytes: int, chance: random.Random) -> None:
        """Change one part, preferably a part that can be decoded."""
        for _ in range(TRIES):
            index = chance.randrange(len(parts))
            try:
                value = self._codec.decode(parts[index])
                parts[index] = self._codec.encode(changed(value, chance, self._texts))
                return
            except Exception:  # the codec cannot decode the part, or encode the new value
                continue
        parts[index] = self._native(parts[index], max_bytes) if parts[index] else b"\xc0"


def changed(value: Any, chance: random.Random, texts: Sequence[str]) -> Any:
    """Return ``value`` with one place changed; dictionaries are changed in place."""
    if isinstance(value, list | tuple) and value and chance.random() < 0.8:
        items = list(value)
        _change_list(items, chance, texts)
        return items
    if isinstance(value, dict) and value and chance.random() < 0.85:
        _change_dict(value, chance, texts)
        return value
    return _other(value, chance, texts)


def _change_list(items: list[Any], chance: random.Random, texts: Sequence[str]) -> None:
    index = chance.randrange(len(items))
    match chance.randrange(8):
        case 0:
            del items[index]
        case 1:
            items.insert(index, items[chance.randrange(len(items))])
        case 2:
            items.append(_leaf(chance, texts))
        case _:
            items[index] = changed(items[index], chance, texts)


def _change_dict(value: dict[Any, Any], chance: random.Random, texts: Sequence[str]) -> None:
    key = chance.choice(list(value))
    match chance.randrange(12):
        case 0:
            del value[key]
        case 1:
            value[chance.choice(texts)] = value.pop(key)
        case 2:
            value[chance.choice(texts)] = _leaf(chance, texts)
        case 3:
            value[key] = value[chance.choice(list(value))]
        case _:
            value[key] = changed(value[key], chance, texts)


def _other(value: Any, chance: random.Random, texts: Sequence[str]) -> Any:
    """Return another value, in most cases of the same type."""
    if chance.random() < 0.12:
        return _leaf(chance, texts)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        near = value + chance.choice((-1, 1, -4096, 4096, value))
        return chance.choice((near, chance.choice(NUMBERS), chance.randrange(24)))
    if isinstance(value, float):
        return chance.choice((value * 2.0, value + 1.0, chance.choice(FLOATS)))
    if isinstance(value, str):
        return _other_text(value, chance, texts)
    if isinstance(value, bytes):
        return value[: chance.randrange(len(value) + 1)] + chance.randbytes(chance.randrange(4))
    return _leaf(chance, texts)


def _other_text(value: str, chance: random.Random, texts: Sequence[str]) -> str:
    at = chance.randrange(len(value) + 1)
    options = (chance.choice(texts), value[:at], value[:at] + chance.choice(texts) + value[at:])
    return chance.choice(options)


def _leaf(chance: random.Random, texts: Sequence[str]) -> Any:
    match chance.randrange(9):
        case 0:
            return chance.choice(NUMBERS)
        case 1:
            return chance.choice(FLOATS)
        case 2:
            return chance.choice(texts)
        case 3:
            return None
        case 4:
            return chance.random() < 0.5
        case 5:
            return [chance.randrange(8)] * chance.randrange(12)
        case 6:
            return {chance.choice(texts): chance.choice(NUMBERS)}
        case 7:
            return _nested(chance.choice((1, 3, 8, 70, 300, 900)), chance)
        case _:
            return chance.choice(texts).encode()


def _nested(depth: int, chance: random.Random) -> Any:
    value: Any = 1
    is_list = chance.random() < 0.5
    for _ in range(depth):
        value = [value] if is_list else {"a": value}
    return value
