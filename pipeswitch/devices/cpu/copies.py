"""A process' own bytes on the cpu device: they lie in host memory all along, and are copied as if
they did not, at the pace of the link."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from .memory import SimulatedLink

if TYPE_CHECKING:
    import torch

PIECE_BYTES: Final = 256 << 10  # between two looks of the lane at what it is asked


class CpuCopies:
    """See ``HostCopies``."""

    def __init__(self, link_bytes_per_s: float) -> None:
        self._links = {to_host: SimulatedLink(link_bytes_per_s) for to_host in (True, False)}

    def mark(self) -> Any:
        """Return None: this device computes in the calling thread, so nothing is pending."""

    def target(self, size_bytes: int, *, on_host: bool, mark: Any) -> torch.Tensor:
        """See ``HostCopies``."""
        import torch

        return torch.empty(size_bytes, dtype=torch.uint8)

    def pieces(
        self, source: torch.Tensor, target: torch.Tensor, mark: Any, *, to_host: bool
    ) -> Iterator[int]:
        """Implement ``HostCopies.pieces`` with numpy: torch would use the other cores as well."""
        copied, into = source.numpy(), target.numpy()
        link = self._links[to_host]
        link.begin()
        for start in range(0, copied.size, PIECE_BYTES):
            piece = copied[start : start + PIECE_BYTES]
            np.copyto(into[start : start + PIECE_BYTES], piece)
            link.pace(piece.size)
            yield piece.size
