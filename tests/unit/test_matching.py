"""Matching of a job's tensors to a program's weights by name; an error lists every mismatch."""

from __future__ import annotations

import pytest

from pipeswitch.base.errors import InvalidInput, RegistrationRefused
from pipeswitch.programs.interface.matching import Given, match


def of(part: str = "", /, **shapes: tuple[int, ...]) -> Given:
    return {part + name.replace("_", "."): ("float32", shape) for name, shape in shapes.items()}


FC = of(fc_weight=(2, 3), fc_bias=(2,))
JOB = of("model.", fc_weight=(2, 3), fc_bias=(2,))
NET = of("net.", fc_weight=(2, 3), fc_bias=(2,))
EMA = of("ema.module.", fc_weight=(2, 3), fc_bias=(2,)) | of("ema.", averaged=())


@pytest.mark.parametrize(
    ("names", "prefix"),
    [
        (JOB, "model."),
        ({**JOB, **of("model.", aux_weight=(9,))}, "model."),
        ({**NET, **of("d.", fc_weight=(1, 3), fc_bias=(1,))}, "net."),
        (of("0.", fc_weight=(2, 3), fc_bias=(2,)), "0."),
        (EMA, "ema.module."),
        (of("model._orig_mod.", fc_weight=(2, 3), fc_bias=(2,)), "model._orig_mod."),
        (FC, ""),  # the job's names equal the program's
    ],
)
def test_weights_are_found_whatever_else_a_job_trains(names: Given, prefix: str) -> None:
    expected = {name: prefix + name for name in ("fc.weight", "fc.bias")}
    assert match(FC, names) == expected


def test_where_several_parts_fit_one_is_named() -> None:
    job = NET | EMA | of("head.", weight=(1,))
    with pytest.raises(InvalidInput, match='fit the model: "ema", "net"') as error:
        match(FC, job)
    assert error.value.hint == 'name one: --part ema, in Python part="ema"'
    assert match(FC, job, "net") == {"fc.weight": "net.fc.weight", "fc.bias": "net.fc.bias"}
    assert match(FC, job, "ema")["fc.bias"] == "ema.module.fc.bias"
    with pytest.raises(RegistrationRefused):
        match(FC, job, "head")
    with pytest.raises(InvalidInput, match='no part "emma"; it has "ema", "head", "net"'):
        match(FC, job, "emma")


def test_parts_may_be_the_program_together() -> None:
    """The program may be a Sequential of two models, which the job has in a list."""
    both = of("0.", w=(1,)) | of("1.", w=(1,))
    assert match(both, both) == {"0.w": "0.w", "1.w": "1.w"}
    copied = both | of("2.0.", w=(1,)) | of("2.1.", w=(1,))
    with pytest.raises(InvalidInput, match=r'"2", "\*" \(all in one\)'):
        match(both, copied)
    assert match(both, copied, "*") == {"0.w": "0.w", "1.w": "1.w"}
    assert match(both, copied, "2") == {"0.w": "2.0.w", "1.w": "2.1.w"}


def test_a_program_of_an_hf_source_has_a_wrapper_in_its_names() -> None:
    wrapped = of("model.", fc_weight=(2, 3))
    assert match(wrapped, of("model.", fc_weight=(2, 3))) == {"model.fc.weight": "model.fc.weight"}
    assert match(wrapped, EMA) == {"model.fc.weight": "ema.module.fc.weight"}


def test_constants_of_the_graph_are_no_weights() -> None:
    assert set(match({**FC, "lifted_tensor_0": ("int64", ())}, JOB)) == set(FC)


def test_each_weight_that_differs_is_named_with_both_shapes() -> None:
    with pytest.raises(RegistrationRefused) as error:
        match(FC, {"model.fc.weight": ("float16", (2, 3)), "model.other": ("float32", (2,))})
    assert error.value.data["part"] == "weights"
    assert "state_dict" in error.value.hint
    assert error.value.data["reason"] == (
        "fc.weight: the model has float32[2,3], here it is float16[2,3]; fc.bias: missing"
    )


def test_a_job_of_another_model_does_not_flood_the_error() -> None:
    many = of(**{f"w{number}": (1,) for number in range(100)})
    with pytest.raises(RegistrationRefused, match="and 92 more"):
        match(many, {})


def test_weights_that_no_state_dict_has_may_be_missing() -> None:
    program = FC | of(inv=(4,))
    assert match(program, of("file.", fc_weight=(2, 3), fc_bias=(2,)), "", ["inv"]) == {
        "fc.weight": "file.fc.weight",
        "fc.bias": "file.fc.bias",
    }
    job = of("model.", fc_weight=(2, 3), fc_bias=(2,), inv=(4,))
    assert match(program, job, "", ["inv"])["inv"] == "model.inv"  # a job has all its tensors
    wrong = of("file.", fc_weight=(2, 3), fc_bias=(2,), inv=(5,))
    with pytest.raises(RegistrationRefused, match=r"^weights: inv: the model has"):
        match(program, wrong, "", ["inv"])
    with pytest.raises(RegistrationRefused, match=r"^weights: inv: missing"):
        match(program, of("file.", fc_weight=(2, 3), fc_bias=(2,)))


def test_an_error_names_a_weight_as_its_module_does() -> None:
    """A program from ``hf:`` has a prefix of ours before each name."""
    program = of("model.model.", embed_weight=(2,), norm_weight=(3,))
    with pytest.raises(RegistrationRefused, match=r"^weights: model\.norm\.weight: missing"):
        match(program, of("file.model.", embed_weight=(2,)))
