"""``pipeswitch.job`` in a plain process without a server, where its loops are plain loops."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch

from pipeswitch import job
from pipeswitch.base.errors import InvalidInput
from pipeswitch.workers.training.snapshot import named


def test_what_has_no_state_cannot_be_trained() -> None:
    for value in ([None], {"a": None}, "adam", 5):
        with pytest.raises(InvalidInput, match="has no state_dict"):
            named(value, "scheduler")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    job._install(None)
    yield
    job._install(None)


def test_epochs_and_steps_are_ordinary_loops() -> None:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = [
        (epoch, batch, job.step, job.step_in_epoch)
        for epoch in job.epochs(2)
        for batch in job.steps(["a", "b"], model=model, optimizer=optimizer)
    ]
    assert steps == [(0, "a", 0, 0), (0, "b", 1, 1), (1, "a", 2, 0), (1, "b", 3, 1)]
    assert job.step == 4


def test_the_device_is_a_name_that_torch_understands() -> None:
    assert torch.device(job.device).type in ("cpu", "cuda")


def test_publishing_only_logs(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        job.publish("net")
    assert "would publish as 'net'" in caplog.text


def test_logging_a_nan_warns_and_training_goes_on() -> None:
    with pytest.warns(job.NonFiniteLossWarning, match="loss=nan"):
        job.log(loss=torch.tensor(float("nan")))
    job.log(loss=1.0)


def test_numbers_are_logged_by_name(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        job.log({"train/loss": 2.0}, values=3.0)
    assert "train/loss=2 values=3" in caplog.text
    with pytest.raises(InvalidInput):
        job.log(cast(Any, {1: 2.0}))


def test_an_unknown_attribute_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nothing_here"):
        job.nothing_here  # noqa: B018


def test_an_installed_session_answers_instead() -> None:
    class Elsewhere(job._PlainSession):
        device = "cuda:7"

    job._install(Elsewhere())
    assert job.device == "cuda:7"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"offload": "fast"}, "offload='fast' is none of auto, all, conv, none"),
        ({"offload": "al"}, 'did you mean "all"'),
        ({"activation_memory": "2 gigs"}, "is not of the form 512MiB or 20GiB"),
        ({"activation_memory": "0MiB"}, "is zero"),
        ({"activation_memory": True}, "is not of the form"),
    ],
)
def test_a_wrong_limit_of_activations_is_refused_by_hand_too(
    options: dict[str, str], says: str
) -> None:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(InvalidInput, match=says):
        job.steps(["a"], model=model, optimizer=optimizer, **options)  # type: ignore[arg-type]
    limits = {"offload": "conv", "activation_memory": 1 << 20}
    assert list(job.steps(["a"], model=model, optimizer=optimizer, **limits)) == ["a"]  # type: ignore[arg-type]
