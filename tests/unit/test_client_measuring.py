"""Requests of ``Client.profile``: their inputs are valid, and a measurement always ends."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pipeswitch.base.errors import TaskFailed
from pipeswitch.client.profile_requests import MeasuringRequests, measure
from pipeswitch.client.tensors import Signature
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


def begun(*runs: dict[str, Any]) -> tuple[Future[Any], Callable[..., Future[Any]]]:
    """Return a measurement's future, and its call, which reports ``runs`` as progress."""
    future: Future[Any] = Future()

    def begin(on_progress: Callable[[dict[str, Any]], None]) -> Future[Any]:
        for run in runs:
            on_progress(run)
        return future

    return future, begin


RUN = {"stage": "batch 1", "fraction": 0.5, "batch": 1, "version": 3}


def test_each_run_that_is_asked_for_is_sent_and_the_profile_is_the_answer() -> None:
    future, begin = begun(RUN, RUN)
    model, reports = Model(), []

    def progress(stage: str, fraction: float) -> None:
        reports.append((stage, fraction))
        if len(reports) == 2:
            future.set_result(SimpleNamespace(body={"profile": {"model": "m"}}))

    assert measure(begin, requests(model), progress) == {"model": "m"}
    assert reports == [("batch 1", 0.5)] * 2
    assert len(model.sent) == 2


def test_a_run_that_fails_takes_the_question_back() -> None:
    future, begin = begun(RUN)
    with pytest.raises(TaskFailed):
        measure(begin, requests(Model(lambda inputs: True)), None)
    assert future.cancelled()
