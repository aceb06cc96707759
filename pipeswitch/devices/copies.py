"""How a process moves bytes of its own, not the arena's, out of its device and back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch


class HostCopies(Protocol):
    """One for each device kind; ``pieces`` is iterated by one thread, ``mark`` called by another.

    Tensors are uint8 and contiguous.
    """

    def mark(self) -> Any:
        """What the calling thread has enqueued so far: a copy that is given this comes after it."""
        ...

    def target(self, size_bytes: int, *, on_host: bool, mark: Any) -> torch.Tensor:
        """Memory for a copy, not initialised; the caller's.

        Raises:
            RuntimeError: there is none left.
        """
        ...

    def pieces(self, source: torch.Tensor, target: torch.Tensor, mark: Any) -> Iterator[int]:
        """Copy; yields the bytes of each piece when it has arrived."""
        ...
