"""Requests of ``Client.profile``. The server says when to send each one, and times it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

from ..base.errors import TaskFailed
from .tensors import Signature
from .verbs import Progress


class MeasuringRequests:
    """Sender of requests with inputs that the model accepts; equal batch sizes get equal inputs.

    Args:
        infer: sends a request to the model and waits for its answer.
        signature: returns the model's signature.
        inputs: returns the inputs of a request with that batch size; None: random inputs.
    """

    def __init__(
        self,
        infer: Callable[..., Any],
        signature: Callable[[], Signature],
        inputs: Callable[[int], Any] | None,
    ) -> None:
        self._infer, self._signature, self._inputs = infer, signature, inputs
        self._known: dict[int, Any] = {}

    def send(self, batch: int, version: int) -> None:
        """Send a request of this batch size and wait for its result.

        Raises:
            PipeSwitchError: the model refused all inputs that were tried.
        """
        if batch in self._known:
            self._infer(self._known[batch], version=version)
            return
        *others, last = self._made_up(batch) if self._inputs is None else [self._inputs(batch)]
        for inputs in others:
            try:
                self._infer(inputs, version=version)
            except TaskFailed:
                continue
            self._known[batch] = inputs
            return
        self._infer(last, version=version)
        self._known[batch] = last

    def _made_up(self, batch: int) -> Iterator[list[Any]]:
        """Yield candidate inputs, as no signature says which integers are indices. Zeros
        come first, because on cuda an index that is out of range ends the worker process."""
        import numpy as np

        signature = self._signature()
        inputs = signature.random(batch=batch)
        are_numbers = [
            spec.dtype.startswith(("int", "uint")) and "mask" not in spec.name
            for spec in signature.inputs
        ]
        yield [
            np.zeros_like(value) if is_number else value
            for value, is_number in zip(inputs, are_numbers, strict=True)
        ]
        if any(are_numbers):
            yield inputs


def measure(
    begin: Callable[..., Future[Any]], requests: MeasuringRequests, progress: Progress | None
) -> dict[str, Any]:
    """Send a request whenever the server asks for one; return the profile."""
    progress_queue: SimpleQueue[dict[str, Any] | None] = SimpleQueue()
    future = begin(on_progress=progress_queue.put)
    future.add_done_callback(lambda _: progress_queue.put(None))
    try:
        while (run := progress_queue.get()) is not None:
            if progress is not None:
                progress(run["stage"], run["fraction"])
            requests.send(run["batch"], run["version"])
    finally:
        future.cancel()  # if the measurement is not over, the server stops waiting for a request
    row: dict[str, Any] = future.result().body["profile"]
    return row
