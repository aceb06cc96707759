"""What must not be."""

from __future__ import annotations


class Violation(AssertionError):
    """An invariant does not hold."""


def require(is_so: bool, text: str) -> None:
    """Raise Violation unless it is so."""
    if not is_so:
        raise Violation(text)


__all__ = ["Violation", "require"]
