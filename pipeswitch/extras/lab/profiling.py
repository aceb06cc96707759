"""Measurement of a model by ``Client.profile``: it tries groups on the server, and plans the best.

The client chooses each run, and sends its request; the server times it (``scheduler/trials.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from datetime import UTC, datetime
from functools import partial
from queue import SimpleQueue
from typing import Any, Final

import msgspec

from ...base.errors import InvalidInput, ServerUnavailable, TaskFailed
from ...client.client import Client
from ...client.tensors import Signature
from ...client.verbs import Progress
from ...planning.planned_groups import Identity
from .measuring import MeasuredProgram, Measurement, RunInstants, Trial
from .profile import encode

MAX_BATCHES: Final = 8
MAX_RETRIES: Final = 20  # consecutive retries of one run


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


class Trials:
    """A model's trials on the server, of which the newest is open until the next one begins.

    Args:
        begin: sends a ``regroup`` request; takes its body and ``on_progress``.
    """

    def __init__(self, begin: Callable[..., Future[Any]]) -> None:
        self._begin = begin
        self._token = 0
        self._future: Future[Any] | None = None
        self._replies: SimpleQueue[dict[str, Any] | None] = SimpleQueue()

    def begin(self, plan: Sequence[int], *, is_cold: bool) -> dict[str, Any]:
        """Begin a trial and wait until the model has its groups; return the server's reply."""
        replies: SimpleQueue[dict[str, Any] | None] = SimpleQueue()
        body = {"plan": list(plan), "cold": is_cold, "trial": self._token}
        self._future, self._replies = self._begin(body=body, on_progress=replies.put), replies
        self._future.add_done_callback(lambda _: replies.put(None))
        reply = self._reply()
        self._token = reply["trial"]
        return reply

    def times(self, trial: Trial) -> RunInstants | None:
        """Wait for the times of the trial's run (``instants_of``)."""
        return instants_of(self._reply(), trial)

    def _reply(self) -> dict[str, Any]:
        """Return the next reply; raise the error with which the server ended the trial."""
        reply = self._replies.get()
        if reply is None:
            assert self._future is not None
            self._future.result()
            raise ServerUnavailable("the server ended the measurement")
        return reply

    def use(self, document: bytes) -> None:
        """End the trials: the server keeps and uses the planned groups."""
        self._begin(body={"planned": document.decode(), "trial": self._token}).result()

    def end(self) -> None:
        """End the trials, if they are not over: the model gets its former groups back."""
        if self._future is not None:
            self._future.cancel()


def instants_of(run: Mapping[str, Any], trial: Trial) -> RunInstants | None:
    """Return a run's times, or None if it had another batch or residency than planned."""
    if run["batch"] != trial.batch or run["is_cold"] != trial.is_cold:
        return None
    return RunInstants(
        run["copy_started_ms"],
        tuple(run["copy_ends_ms"]),
        tuple(run["begins_ms"]),
        tuple(run["ends_ms"]),
    )


def profile(
    client: Client,
    begin: Callable[..., Future[Any]],
    name: str,
    batches: Sequence[int],
    inputs: Callable[[int], Any] | None,
    progress: Progress | None,
) -> dict[str, Any]:
    """Measure a model and use its planned groups; return the profile (``Client.profile``)."""
    _check(batches, client.show(name).get("batch"), name)
    requests = MeasuringRequests(
        partial(client.infer, name), partial(client.signature, name), inputs
    )
    trials = Trials(begin)
    try:
        reply = trials.begin((), is_cold=True)
        measurement = Measurement(
            msgspec.convert(reply["program"], MeasuredProgram),
            batches or (reply["batch"],),
            msgspec.convert(reply["identity"], Identity),
        )
        retries, is_begun = 0, True
        while (trial := measurement.next) is not None:
            if not is_begun:
                reply = trials.begin(trial.plan, is_cold=trial.is_cold)
            if progress is not None:
                progress(trial.text, measurement.fraction)
            requests.send(trial.batch, reply["version"])
            retries = 0 if measurement.take(trials.times(trial)) else retries + 1
            if retries > MAX_RETRIES:
                raise ServerUnavailable(f'"{name}" could not be measured: the runs were disturbed')
            is_begun = False
        document = encode(measurement.profile(datetime.now(UTC).isoformat(timespec="seconds")))
        trials.use(document)
    finally:
        trials.end()
    row: dict[str, Any] = msgspec.json.decode(document)
    return row


def _check(batches: Sequence[int], limits: Sequence[int] | None, name: str) -> None:
    low, high = limits or (1, max(batches, default=1))  # the server refuses one that is not built
    if len(batches) > MAX_BATCHES or not all(low <= batch <= high for batch in batches):
        raise InvalidInput(
            f"{name} takes batches from {low} to {high}, at most {MAX_BATCHES} of them"
        )
