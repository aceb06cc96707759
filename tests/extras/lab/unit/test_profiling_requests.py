"""Requests of ``Client.profile``: their inputs are valid, and a measurement always ends."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from pipeswitch.base.errors import DeviceBusy, InvalidInput, TaskFailed
from pipeswitch.client.tensors import Signature
from pipeswitch.extras.lab.profiling import MeasuringRequests, profile
from pipeswitch.planning.planned_groups import UNKNOWN_DEVICE, decode
from pipeswitch.programs.interface.dims import Dim
from pipeswitch.programs.interface.layout import ValueSpec

SIGNATURE = Signature(
    (
        ValueSpec(name="ids", dtype="int64", shape=("batch", 50)),
        ValueSpec(name="attention_mask", dtype="int64", shape=("batch", 50)),
        ValueSpec(name="x", dtype="float32", shape=("batch", 3)),
    ),
    (Dim("batch", 1, 8),),
)


class Model:
    """Model that collects its inputs, and may refuse all-zero integers, or all inputs."""

    def __init__(self, refuses: Callable[[Any], bool] = lambda inputs: False) -> None:
        self.sent: list[Any] = []
        self._refuses = refuses

    def infer(self, inputs: Any, *, version: int) -> None:
        assert version == 3
        self.sent.append(inputs)
        if self._refuses(inputs):
            raise TaskFailed("it does not take them")


def requests(model: Model, inputs: Callable[[int], Any] | None = None) -> MeasuringRequests:
    return MeasuringRequests(model.infer, lambda: SIGNATURE, inputs)


def test_integers_are_zeros_since_a_wrong_index_may_cost_a_process() -> None:
    model = Model()
    one = requests(model)
    for batch in (2, 2, 4):
        one.send(batch, 3)
    first, second, other = model.sent
    ids, mask, x = first
    assert first is second, "runs of one batch are alike"
    assert [value.shape[0] for value in other] == [4, 4, 4]
    assert not ids.any()
    assert mask.any()
    assert x.any()


def test_a_model_that_takes_no_zeros_gets_others_and_these_from_then_on() -> None:
    model = Model(lambda inputs: not np.asarray(inputs[0]).any())
    one = requests(model)
    one.send(1, 3)
    one.send(1, 3)
    assert [bool(ids.any()) for ids, _, _ in model.sent] == [False, True, True]


def test_a_model_that_takes_nothing_says_so() -> None:
    with pytest.raises(TaskFailed):
        requests(Model(lambda inputs: True)).send(1, 3)


def test_the_callers_inputs_are_made_once_for_each_batch() -> None:
    model = Model()
    one = requests(model, lambda batch: ("mine", batch))
    for batch in (1, 1, 2):
        one.send(batch, 3)
    assert model.sent == [("mine", 1), ("mine", 1), ("mine", 2)]


class Server:
    """Server that answers each trial with its groups, and runs whose times it makes up."""

    def __init__(self, error: Exception | None = None) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.futures: list[Future[Any]] = []
        self._error = error

    def begin(self, body: dict[str, Any], on_progress: Callable[[Any], None] = print) -> Any:
        self.bodies.append(body)
        future: Future[Any] = Future()
        self.futures.append(future)
        if self._error is not None and len(self.bodies) > 1:
            future.set_exception(self._error)
        elif "planned" in body:
            future.set_result(None)
        else:
            on_progress(self._ready(len(self.bodies)))
            on_progress(self._times(body["plan"] or [0, 1], is_cold=body["cold"]))
        return future

    @staticmethod
    def _ready(number: int) -> dict[str, Any]:
        program = {
            "model": "m",
            "digest": "ab" * 32,
            "layer_bytes": [1 << 20, 1 << 20],
            "labels": ["a", "b"],
            "built_plan": [0],
        }
        identity = msgspec.to_builtins(UNKNOWN_DEVICE)
        return {
            "trial": number,
            "version": 3,
            "batch": 1,
            "program": program,
            "identity": identity,
        }

    @staticmethod
    def _times(plan: list[int], *, is_cold: bool) -> dict[str, Any]:
        begins = [float(1000 * index + 100) for index in range(len(plan))]
        return {
            "batch": 1,
            "is_cold": is_cold,
            "copy_started_ms": 0.0,
            "copy_ends_ms": [begin - 50 for begin in begins] if is_cold else [],
            "begins_ms": begins,
            "ends_ms": [begin + 800 for begin in begins],
        }


def measure(server: Server, model: Model, progress: Any = None) -> dict[str, Any]:
    client: Any = SimpleNamespace(
        show=lambda name: {"batch": [1, 8]},
        infer=lambda name, inputs, version: model.infer(inputs, version=version),
        signature=lambda name: SIGNATURE,
    )
    return profile(client, server.begin, "m", (), None, progress)


def test_each_trial_has_one_request_and_the_last_one_brings_the_planned_groups() -> None:
    server, model, reports = Server(), Model(), []
    row = measure(server, model, lambda stage, fraction: reports.append(fraction))
    *trials, last = server.bodies
    assert len(model.sent) == len(trials) == len(reports)
    assert reports == sorted(reports)
    assert [body["trial"] for body in server.bodies] == list(range(len(server.bodies)))
    assert trials[0]["plan"] == []
    assert decode(last["planned"].encode()).plan == tuple(row["checks"][-1]["plan"])


def test_a_request_that_fails_ends_the_trials() -> None:
    server = Server()
    with pytest.raises(TaskFailed):
        measure(server, Model(lambda inputs: True))
    assert server.futures[-1].cancelled()


def test_an_error_of_the_server_is_raised() -> None:
    with pytest.raises(DeviceBusy):
        measure(Server(DeviceBusy("another client")), Model())


def test_batches_that_the_model_does_not_take_are_refused() -> None:
    client: Any = SimpleNamespace(show=lambda name: {"batch": [1, 8]})
    for batches in ((9,), (0,), tuple(range(1, 10))):
        with pytest.raises(InvalidInput):
            profile(client, Server().begin, "m", batches, None, None)
