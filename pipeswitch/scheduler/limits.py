"""Which of several devices a model or a job may use: by name or by kind, as its user asked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..errors import InvalidInput, PipeSwitchError


def kind_of(name: str) -> str:
    """``cuda`` of ``cuda:1``."""
    return name.partition(":")[0]


def kinds_of(names: Iterable[str]) -> list[str]:
    """Each once, in their order."""
    return list(dict.fromkeys(map(kind_of, names)))


def limit(asked: Sequence[str], names: Sequence[str]) -> tuple[str, ...]:
    """The devices of ``names`` that are meant; empty: all of them.

    ``cuda`` means each cuda device, and what is not here is left out. Devices of two kinds answer
    with other last bits: there who asks for none gets those of the first one's kind.
    """
    found = tuple(name for name in names if name in asked or kind_of(name) in asked)
    if found or len(kinds_of(names)) == 1:
        return found
    return tuple(name for name in names if kind_of(name) == kind_of(names[0]))


def refusal(asked: Sequence[str], names: Sequence[str]) -> PipeSwitchError | None:
    """Error for a device this server does not have."""
    kinds = kinds_of(names)
    unknown = next((name for name in asked if name not in names and name not in kinds), None)
    if unknown is None:
        return None
    also = f"; {' or '.join(kinds)} for all of a kind" if len(names) > 1 else ""
    return InvalidInput(f'no device "{unknown}" here', hint=f"one of {', '.join(names)}{also}")
