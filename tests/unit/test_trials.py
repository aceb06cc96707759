"""Runs that are only measured: made-up inputs, and leaving between two groups."""

# mypy: disable-error-code="arg-type"
# Stand-ins have what a trial uses of a program and of a device, no more.

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace

import pytest
import torch

from pipeswitch.errors import Cancelled
from pipeswitch.ipc.messages import RunInference
from pipeswitch.programs.dims import Dim
from pipeswitch.programs.layout import ValueSpec
from workers.inference.trials import MadeUpInputs, run_trial

GROUPS = 3
ROWS = 10  # of a table that made-up integers may miss


def order(epoch: int = 7, batch: int = 2) -> RunInference:
    return RunInference(
        epoch=epoch, request_id="trial 1", model="m", digest="d", directory="",
        arena_offset_bytes=0, first_word=0, residency_epoch=1, inputs=(), reply_offset_bytes=0,
        reply_bytes=0, trial_batch=batch,
    )  # fmt: skip


class Bound:
    """Looks its integers up in a table of ten rows, in the last group."""

    def __init__(self, *values: ValueSpec) -> None:
        self.manifest = SimpleNamespace(mode="graph", inputs=values, dims=(Dim("batch", 1, 8),))
        self.ran: list[list[torch.Tensor]] = []

    def run(self, inputs: Sequence[torch.Tensor], before_group: Callable[[int], None]) -> None:
        for index in range(GROUPS):
            before_group(index)
        for value in inputs:
            if not value.is_floating_point():
                torch.arange(ROWS)[value]
        self.ran.append(list(inputs))


class View:
    """A device whose board says stop after so many groups."""

    def __init__(self, stops_after: int | None = None) -> None:
        self.quiesced = 0
        self._stops_after = stops_after
        self.board = SimpleNamespace(stop=self._stop)

    def _stop(self, slot: int) -> int:
        return 7 if self._stops_after is not None and self.quiesced >= self._stops_after else 0

    def quiesce(self) -> None:
        self.quiesced += 1


FLOATS = ValueSpec(name="x", dtype="float32", shape=("batch", 3))
IDS = ValueSpec(name="ids", dtype="int64", shape=("batch", 64))


def test_made_up_inputs_have_the_trials_batch_and_stay_the_same() -> None:
    made, bound = MadeUpInputs(), Bound(FLOATS)
    for _ in range(2):
        run_trial(bound, order(batch=5), made, lambda index: None, View(), 0)
    first, second = bound.ran
    assert first[0].shape == (5, 3)
    assert torch.equal(first[0], second[0])


def test_a_trial_leaves_between_two_groups_when_the_board_says_so() -> None:
    view = View(stops_after=2)
    begun: list[int] = []
    with pytest.raises(Cancelled):
        run_trial(Bound(FLOATS), order(), MadeUpInputs(), begun.append, view, 0)
    assert begun == [0, 1]


def test_the_stop_of_another_trial_is_not_for_this_one() -> None:
    bound = Bound(FLOATS)
    run_trial(bound, order(epoch=8), MadeUpInputs(), lambda index: None, View(stops_after=0), 0)
    assert len(bound.ran) == 1


def test_integers_a_model_cannot_take_become_zeros_for_the_next_trial() -> None:
    made, bound = MadeUpInputs(), Bound(FLOATS, IDS)
    with pytest.raises(Cancelled, match="zeros"):
        run_trial(bound, order(), made, lambda index: None, View(), 0)
    run_trial(bound, order(), made, lambda index: None, View(), 0)
    floats, ids = bound.ran[0]
    assert floats.any()
    assert not ids.any()


def test_what_fails_with_zeros_too_is_the_models_own_failure() -> None:
    class Broken(Bound):
        def run(self, inputs: Sequence[torch.Tensor], before_group: Callable[[int], None]) -> None:
            raise ValueError("never")

    made, bound = MadeUpInputs(), Broken(IDS)
    with pytest.raises(Cancelled):
        run_trial(bound, order(), made, lambda index: None, View(), 0)
    with pytest.raises(ValueError, match="never"):
        run_trial(bound, order(), made, lambda index: None, View(), 0)
