"""Inputs of trials: on a device where a wrong index ends the process, integers begin as zeros."""

from __future__ import annotations

import pytest
import torch

from pipeswitch.ipc.messages import Epoch, ModelName, RunInference
from pipeswitch.programs.dims import Dim
from pipeswitch.programs.layout import Manifest, ValueSpec
from workers.inference.trials import MadeUpInputs

MANIFEST = Manifest(
    digest="d", mode="graph", mode_reason="", source="bundle", total_bytes=0, tensors=(), groups=(),
    inputs=(
        ValueSpec(name="ids", dtype="int64", shape=("batch", 50)),
        ValueSpec(name="x", dtype="float32", shape=("batch", 3)),
    ),
    outputs=(), dims=(Dim("batch", 1, 8),),
)  # fmt: skip


def trial(batch: int) -> RunInference:
    return RunInference(
        epoch=Epoch(1), request_id="", model=ModelName("m"), digest="d", directory="",
        arena_offset_bytes=0, first_word=0, residency_epoch=Epoch(1), inputs=(),
        reply_offset_bytes=0, reply_bytes=0, trial_batch=batch,
    )  # fmt: skip


@pytest.mark.parametrize("zero_integers", [False, True])
def test_integers_are_random_only_where_a_wrong_index_is_an_exception(zero_integers: bool) -> None:
    inputs = MadeUpInputs(zero_integers=zero_integers)
    ids, x = inputs.of(trial(4), MANIFEST)
    assert ids.shape == (4, 50)
    assert bool(ids.any()) is not zero_integers
    assert x.any()
    assert inputs.be_zeros() is not zero_integers, "zeros are tried once"
    assert torch.equal(inputs.of(trial(4), MANIFEST)[0], torch.zeros(4, 50, dtype=torch.int64))
