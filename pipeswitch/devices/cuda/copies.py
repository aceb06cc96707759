"""Copies of a process's own tensors between a GPU and the host, on one stream per direction.

This code has never run on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch


class CudaCopies:
    """See ``HostCopies``. Host memory is pinned; torch caches it after a free."""

    def __init__(self, index: int) -> None:
        make_stream: Any = torch.cuda.Stream  # untyped in torch
        self._index = index
        self._streams = {to_host: make_stream(device=index) for to_host in (True, False)}

    def mark(self) -> Any:
        """Return this thread's compute stream, and an event recorded after its enqueued work."""
        stream = torch.cuda.current_stream(self._index)
        return stream, stream.record_event()

    def target(self, size_bytes: int, *, on_host: bool, mark: Any) -> torch.Tensor:
        """Implement ``HostCopies.target``.

        Device memory is allocated on the stream that copies to the device. A block that the compute
        stream has freed could still be read by kernels that are enqueued there.
        """
        if on_host:
            return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
        with torch.cuda.stream(self._streams[False]):
            tensor = torch.empty(size_bytes, dtype=torch.uint8, device=f"cuda:{self._index}")
        tensor.record_stream(mark[0])
        return tensor

    def pieces(
        self, source: torch.Tensor, target: torch.Tensor, mark: Any, *, to_host: bool
    ) -> Iterator[int]:
        """Implement ``HostCopies.pieces`` with a single piece."""
        stream = self._streams[to_host]
        with torch.cuda.stream(stream):
            stream.wait_event(mark[1])
            target.copy_(source, non_blocking=True)
        stream.synchronize()
        yield source.numel()
