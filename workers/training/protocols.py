"""What the training side needs of the worker process; ``host.py`` has it, tests have others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from pipeswitch.inputs.ring import Ring


class CommitHost(Protocol):
    """The part that commits."""

    def begin_commit(self, step: int, ranges: Sequence[tuple[int, int]]) -> None:
        """Start to copy these (offset, size) of the slice, in order, as the next commit."""
        ...

    def wait_commit(self) -> float:
        """Block until the last ``begin_commit`` was acknowledged; its duration in ms."""
        ...

    def now_ms(self) -> float:
        """Monotonic."""
        ...


class TrainingHost(CommitHost, Protocol):
    """What a training session needs of the worker process."""

    device: str

    def lease(self, slice_bytes: int, state_bytes: int) -> torch.Tensor:
        """A zeroed, writable uint8 tensor over the slice; blocks until granted.

        A second call (the next phase) gives the first slice back: nothing refers to it any more.
        The last commit stays what it was until the next one.

        Args:
            slice_bytes: of parameters, buffers, gradients, optimizer state and the state area.
            state_bytes: of the largest commit image.

        Raises:
            OutOfDeviceMemory: it can never fit.
        """
        ...

    def restore(self) -> memoryview | None:
        """The last commit, read-only; valid until the next ``begin_commit``."""
        ...

    def report(self, kind: str, /, **values: Any) -> None:
        """Tell the controller: progress, log, warnings, events. Does not block."""
        ...

    @property
    def is_publishing(self) -> bool:
        """What was published is not copied yet: no commit may take its place."""
        ...

    def await_copy(self) -> None:
        """Until nothing is publishing."""
        ...

    def publish(
        self, model: str, step: int, tensors: Sequence[tuple[str, str, tuple[int, ...]]]
    ) -> None:
        """Ask that the commit of ``step``, or the first after it, be a model's next version.

        Raises:
            PipeSwitchError: why that cannot be.
        """
        ...

    def remember(self, step: int, values: Mapping[str, float]) -> None:
        """Add what the script logged to the job's history. Does not block."""
        ...

    def reached(self, step: int) -> None:
        """So many steps are done: the next server tells by it which are done again."""
        ...

    def flush(self) -> None:
        """What was remembered is for others to read."""
        ...

    @property
    def ring(self) -> Ring | None:
        """Where the batches of the job's group lie; None: it is in none."""
        ...
