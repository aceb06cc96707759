"""A job's tensors are a program's weights by name, or the error names each that is not."""

from __future__ import annotations

import pytest

from pipeswitch.errors import RegistrationRefused
from pipeswitch.programs.layout import TensorSpec
from pipeswitch.programs.matching import Given, match


def weights(**shapes: tuple[int, ...]) -> list[TensorSpec]:
    return [
        TensorSpec(name=name.replace("_", "."), dtype="float32", shape=shape, offset_bytes=0,
                   size_bytes=0, file_offset_bytes=0)
        for name, shape in shapes.items()
    ]  # fmt: skip


def given(**shapes: tuple[int, ...]) -> Given:
    return {name.replace("_", "."): ("float32", shape) for name, shape in shapes.items()}


FC = weights(fc_weight=(2, 3), fc_bias=(2,))


@pytest.mark.parametrize(
    ("names", "prefix"),
    [
        (given(fc_weight=(2, 3), fc_bias=(2,)), ""),
        (given(fc_weight=(2, 3), fc_bias=(2,), aux_weight=(9,)), ""),
        (given(g_fc_weight=(2, 3), g_fc_bias=(2,), d_fc_weight=(1, 3), d_fc_bias=(1,)), "g."),
    ],
)
def test_weights_are_found_whatever_else_a_job_trains(names: Given, prefix: str) -> None:
    wanted = {name: prefix + name for name in ("fc.weight", "fc.bias")}
    assert match(FC, names) == wanted


def test_a_program_of_an_hf_source_has_a_wrapper_in_its_names() -> None:
    assert match(weights(model_fc_weight=(2, 3)), given(fc_weight=(2, 3))) == {
        "model.fc.weight": "fc.weight"
    }


def test_constants_of_the_graph_are_no_weights() -> None:
    (constant,) = weights(x=())
    constant = TensorSpec(name="lifted_tensor_0", dtype="int64", shape=(), offset_bytes=0,
                          size_bytes=8, file_offset_bytes=0)  # fmt: skip
    assert set(match([*FC, constant], given(fc_weight=(2, 3), fc_bias=(2,)))) == {
        "fc.weight", "fc.bias",
    }  # fmt: skip


def test_each_weight_that_differs_is_named_with_both_shapes() -> None:
    with pytest.raises(RegistrationRefused) as error:
        match(FC, {"fc.weight": ("float16", (2, 3)), "other": ("float32", (2,))})
    assert error.value.data["part"] == "weights"
    assert error.value.data["reason"] == (
        "fc.weight: the model has float32[2,3], the job float16[2,3]; fc.bias: the job has none"
    )


def test_a_job_of_another_model_does_not_flood_the_error() -> None:
    many = weights(**{f"w{number}": (1,) for number in range(100)})
    with pytest.raises(RegistrationRefused, match="and 92 more"):
        match(many, {})
