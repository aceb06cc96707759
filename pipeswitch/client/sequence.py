"""Sequences: requests with a state that the server keeps from one request to the next."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from ..base.errors import InvalidInput, PipeSwitchError, SequenceNotFound, ServerUnavailable
from .tensors import Result


class RequestSequence:
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
        self, /, *inputs: Any, deadline_ms: float | None = None, priority: str = "", **named: Any
    ) -> Result:
        """Send the next step and wait for its result, like ``Client.infer``. Omit state inputs.

        The first step may set the state inputs; otherwise they begin as zeros. After an error you
        can send the step again, because the state is unchanged. A lost result ends the sequence.

        Raises:
            SequenceNotFound: the server no longer keeps the sequence.
        """
        if self._is_over:
            raise InvalidInput(f'sequence "{self.id}" has ended', hint="open another one")
        first = {} if self._is_started else {"start": True}
        arguments = (inputs, deadline_ms, priority, self._version, named)
        result = self._step(self.model, *arguments, sequence=self.id, **first)
        self._is_started = True
        return result

    def close(self) -> None:
        """Free the state on the server. Do nothing if the state or the server is gone."""
        if self._is_started and not self._is_over:
            with contextlib.suppress(SequenceNotFound, ServerUnavailable):
                self._end(self.id)
        self._is_over = True

    def __enter__(self) -> RequestSequence:
        return self

    def __exit__(self, kind: object, error: object, _: object) -> None:
        if error is None:
            self.close()
            return
        with contextlib.suppress(PipeSwitchError):  # do not replace the block's own error
            self.close()
