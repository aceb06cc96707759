"""How a process moves bytes of its own, not the arena's, out of its device and back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch


class HostCopies(Protocol):
    """One for each device kind, of flat uint8 tensors.

    ``mark`` is called by the thread that computes: what it has enqueued comes before the copy.
    Two others, one for each way, take memory (``target``) and copy; ``pieces`` tells of each that
    has come.
    """

    def mark(self) -> Any: ...

    def target(self, size_bytes: int, *, on_host: bool, mark: Any) -> torch.Tensor: ...

    def pieces(
        self, source: torch.Tensor, target: torch.Tensor, mark: Any, *, to_host: bool
    ) -> Iterator[int]: ...
