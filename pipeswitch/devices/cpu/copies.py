"""Copies of a process's own tensors between the cpu device and the host. Both are host memory; the
bytes are copied as on a real device, at the speed of the simulated link."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from .memory import SimulatedLink

if TYPE_CHECKING:
    import torch

PIECE_BYTES: Final = 256 << 10  # the copying thread checks for other orders after each piece


class CpuCopies:
    """See ``HostCopies``."""

    def __init__(self, link_bytes_per_s: float) -> None:
        self._links = {to_host: SimulatedLink(link_bytes_per_s) for to_host in (True, False)}

    def mark(self) -> Any:
        """Return None: this device computes in the calling thread, so nothing is pending."""

    def target(self, size_bytes: int, *, on_host: bool, mark: Any) -> torch.Tensor:
        import torch

        return torch.empty(size_bytes, dtype=torch.uint8)

    def pieces(
        self, source: torch.Tensor, target: torch.Tensor, mark: Any, *, to_host: bool
    ) -> Iterator[int]:
        """Implement ``HostCopies.pieces`` with numpy, because torch would use more cores."""
        copied, into = source.numpy(), target.numpy()
        link = self._links[to_host]
        link.begin()
        for start in range(0, copied.size, PIECE_BYTES):
            piece = copied[start : start + PIECE_BYTES]
            np.copyto(into[start : start + PIECE_BYTES], piece)
            link.pace(piece.size)
            yield piece.size
