"""Sequences: requests that go on from what the one before left, on the server."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from ..base.errors import InvalidInput, PipeSwitchError, SequenceNotFound, ServerUnavailable
from .tensors import Result


class Sequenced:
    """Sequence that ``Client.sequence`` returns; it takes one request at a time."""

    def __init__(
        self,
        step: Callable[..., Result],
        end: Callable[[str], None],
        model: str,
        id: str,
        version: int,
    ) -> None:
        self._step, self._end = step, end
        self.model, self.id, self._version = model, id, version
        self._is_started = self._is_over = False

    def infer(
        self,
        /,
        *inputs: Any,
        deadline_ms: float | None = None,
        priority: str = "",
        **named: Any,
    ) -> Result:
        """The next step: as ``Client.infer``, without the inputs that are its state.

        The first one may bring those too; else they begin as zeros. A step that fails can be sent
        again: the state is as it was. One whose answer got lost ends the sequence.

        Raises:
            SequenceNotFound: it is over, the server keeps it no longer.
        """
        if self._is_over:
            raise InvalidInput(f'sequence "{self.id}" is over', hint="open another one")
        first = {} if self._is_started else {"start": True}
        asked = (inputs, deadline_ms, priority, self._version, named)
        result = self._step(self.model, *asked, sequence=self.id, **first)
        self._is_started = True
        return result

    def close(self) -> None:
        """Give its state back. What the server has forgotten, or ended with, is over already."""
        if self._is_started and not self._is_over:
            with contextlib.suppress(SequenceNotFound, ServerUnavailable):
                self._end(self.id)
        self._is_over = True

    def __enter__(self) -> Sequenced:
        return self

    def __exit__(self, kind: object, error: object, _: object) -> None:
        if error is None:
            self.close()
            return
        with contextlib.suppress(PipeSwitchError):  # the block's own error is the one to see
            self.close()
