"""What the world raises when the scheduler broke an invariant."""

from __future__ import annotations


class Violation(AssertionError):
    """The scheduler broke an invariant of docs/architecture.md."""


def require(is_so: bool, text: str) -> None:
    """Raise Violation unless it is so."""
    if not is_so:
        raise Violation(text)
