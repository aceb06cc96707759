"""Declarations of chains of models: what names mean, which tensors match, texts of refusals."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pipeswitch.base.errors import AlreadyExists, InvalidInput
from pipeswitch.base.roles import OWNER
from pipeswitch.extras.stages.chain_registry import ChainRequest, Chains
from pipeswitch.extras.stages.chains import Chain, ChainStep, chain_of
from pipeswitch.frontend.verbs import Rules, ask
from pipeswitch.ipc.messages.base import ModelName
from pipeswitch.ipc.messages.builder import BuildDone
from pipeswitch.programs.interface.dims import BATCH, Dim, Expr
from pipeswitch.programs.interface.layout import Manifest, ValueSpec
from pipeswitch.scheduler.state.events import ModelAvailable, Token, UnregisterRequest
from pipeswitch.wire.frames import RequestHeader
from pipeswitch.wire.request_timing import RequestTiming, of_steps
from tests.unit.manifests import plain_manifest
from tests.unit.test_scheduler_rules import MIB, Rig, manifest_of, received

Values = dict[str, tuple[Any, ...]]


def model(inputs: Values, outputs: Values, *dims: Dim, dtype: str = "float32") -> Manifest:
    def specs(values: Values, dtype: str) -> tuple[ValueSpec, ...]:
        return tuple(ValueSpec(name=n, dtype=dtype, shape=shape) for n, shape in values.items())

    return plain_manifest(inputs=specs(inputs, dtype), outputs=specs(outputs, "float32"), dims=dims)


B = Dim(BATCH, 1, 8)
HALF = Expr("//", ("length", 2))
MODELS = {
    "encoder": model(
        {"ids": (BATCH, "length")},
        {"y": (BATCH, 16), "state": (BATCH, HALF)},
        B,
        Dim("length", 1, 512),
        dtype="int64",
    ),
    "head": model({"x": (BATCH, 16)}, {"label": (BATCH,)}, Dim(BATCH, 2, 64)),
    "fixed": model({"x": (4, 16)}, {"y": (4, 16)}),
    "wide": model({"x": (BATCH, 32)}, {"y": (BATCH,)}, B),
    "many": model({"x": (BATCH, 16)}, {"y": (BATCH,)}, Dim(BATCH, 9, 64)),
    "mixes": model({"state": (BATCH, "n"), "other": ("n",)}, {"y": (BATCH,)}, B, Dim("n", 1, 64)),
    "a": model({"x": (1,)}, {"b.c": (1,)}),
    "a.b": model({"x": (1,)}, {"c": (1,)}),
}
FROM = {"x": "encoder.y"}


def made(*steps: str | ChainStep, **returns: str) -> Chain:
    steps_ = [ChainStep(model=one) if isinstance(one, str) else one for one in steps]
    return chain_of("c", steps_, returns, MODELS)


def test_names_lead_to_inputs_and_earlier_outputs_and_ranges_are_what_all_take() -> None:
    chain = made("encoder", ChainStep(model="head", inputs=FROM))
    assert [step.inputs for step in chain.steps] == [{"ids": "ids"}, FROM]
    assert chain.returns == {"label": "head.label"}
    assert chain.inputs[0].shape == (BATCH, "length")
    assert chain.dims == (Dim(BATCH, 2, 8), Dim("length", 1, 512))
    assert chain.outputs[0].shape == (BATCH,)
    both = made("encoder", ChainStep(model="head", inputs=FROM), all="head.label", some="encoder.y")
    assert [one.name for one in both.outputs] == ["all", "some"]
    four = made("encoder", ChainStep(model="fixed", inputs=FROM))
    assert four.dims[0] == Dim(BATCH, 4, 4)
    assert both.needed(1) == {"encoder.y", "head.label"}
    assert both.manifest.inputs == chain.inputs


def test_what_is_computed_is_told_where_a_request_chooses_it() -> None:
    chain = made("encoder", ChainStep(model="mixes", inputs={"state": "encoder.state"}))
    assert [one.shape for one in chain.inputs] == [(BATCH, "length"), ("n",)]
    twice = made("head", ChainStep(model="head", name="again"), a="head.label", b="again.label")
    assert twice.dims == (Dim(BATCH, 2, 64),)  # both steps read the same input
    assert [one.name for one in twice.inputs] == ["x"]


@pytest.mark.parametrize(
    ("steps", "returns", "words"),
    [
        (["encodr"], {}, 'no model "encodr"; there are encoder, head'),
        (
            ["encoder", ChainStep(model="head", inputs={"z": "encoder.y"})],
            {},
            'no input "z"; it has x',
        ),
        (
            ["encoder", ChainStep(model="head", inputs={"x": "encoder.z"})],
            {},
            '"encoder.z", which no earlier step returns; there are encoder.y, encoder.state',
        ),
        (["encoder", ChainStep(model="head", inputs={"x": "encodr.y"})], {}, "no earlier step"),
        ([ChainStep(model="head", inputs=FROM), "encoder"], {}, "no earlier step.*none yet"),
        ([ChainStep(model="head", inputs={"x": "head.label"})], {}, "no earlier step"),
        (
            ["encoder", ChainStep(model="wide", inputs=FROM)],
            {},
            r"expects float32\[1\.\.8,32\], encoder\.y is float32\[1\.\.8,16\]",
        ),
        (
            ["encoder", ChainStep(model="many", inputs=FROM)],
            {},
            r"9\.\.64,16\], encoder.y is .*1\.\.8",
        ),
        (["encoder", ChainStep(model="head", inputs={"x": "ids"})], {}, r"ids is int64"),
        (["encoder", "head"], {}, 'nothing reads what step "encoder".*head:x=encoder.y'),
        (["encoder"], {"y": "head.label"}, "no earlier step"),
        (["encoder", "encoder"], {}, "two steps.*again=encoder"),
        (["a", "a.b"], {}, "two values have the name"),
    ],
)
def test_a_declaration_that_leads_nowhere_is_one_error_that_says_where(
    steps: list[str | ChainStep], returns: dict[str, str], words: str
) -> None:
    with pytest.raises(InvalidInput) as caught:
        made(*steps, **returns)
    assert caught.match(f"(?s){words}")


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"steps": []},
        {"steps": "encoder"},
        {"steps": [{"model": ""}]},
        {"steps": [{"model": "m", "what": 1}]},
        {"steps": [{"model": "m", "inputs": {"x": 1}}]},
        {"steps": [{"model": "m"}] * 17},
        {"steps": [{"model": "m"}], "outputs": ["y"]},
        {"steps": [{"model": "m", "name": "A B"}]},
        {"steps": [{"model": "m"}], "more": 1},
        {"steps": [{"model": "m", "inputs": {f"{n}": "x" for n in range(65)}}]},
        {"steps": [{"model": "m", "inputs": {"x": "x" * 129}}]},
        {"steps": [{"model": "m", "inputs": {"x": "a\x1bb"}}]},
    ],
)
def test_what_is_no_declaration_is_refused_before_it_is_asked(body: dict[str, Any]) -> None:
    header = RequestHeader(v=1, op="chain", id="1", model="c", body=body)
    with pytest.raises(InvalidInput, match=r"^chain|step name"):
        ask(header, Token(1), OWNER, Rules(allow_code=(), uploads_dir=""))


def test_the_list_is_the_schedulers_and_survives_it() -> None:
    rig = Rig(parts=[Chains])
    rig.register("m")
    token = Token(90)

    def reply_to(name: str, **fields: Any) -> Any:
        rig.handle(ChainRequest(token=token, model=ModelName(name), **fields))
        return rig.answers.pop(token)

    rig.scheduler.machine.models["m"].manifest = MODELS["fixed"]
    steps = (ChainStep(model="m"),)
    assert reply_to("c", steps=steps).error is None
    chain, tenant = rig.scheduler.machine.composites["c"].known["c"]
    assert (chain.returns, tenant) == ({"y": "m.y"}, "")
    assert isinstance(reply_to("c", steps=steps, tenant="other").error, AlreadyExists)
    again = Rig(parts=[Chains])
    packed = msgspec.msgpack.encode(chain)
    again.handle(
        ChainRequest(
            token=token, model=ModelName("c"), restored=msgspec.msgpack.decode(packed, type=Chain)
        )
    )
    assert again.scheduler.machine.composites["c"].known["c"][0] == chain
    (row,) = again.scheduler.listing.models()
    assert (row["name"], row["state"]) == ("c", "incomplete")


@pytest.mark.parametrize("member", ["wide", "many", "head", "encoder"])
def test_a_chain_has_the_shapes_of_a_model_that_was_replaced(member: str) -> None:
    rig, token, steps = Rig(parts=[Chains]), Token(90), (ChainStep(model="m"),)
    rig.register("m")
    rig.scheduler.machine.models["m"].manifest = MODELS["fixed"]
    rig.handle(ChainRequest(token=token, model=ModelName("c"), steps=steps))
    rig.ask(UnregisterRequest, model="m")
    _, op_id = rig.begin("m")
    new = MODELS[member]
    parts = {"inputs": new.inputs, "outputs": new.outputs, "dims": new.dims}
    manifest = msgspec.structs.replace(manifest_of("other", MIB, 2), **parts)
    done = BuildDone(model="m", op_id=op_id, digest=manifest.digest)
    rig.handle(received(done, manifest=manifest))
    announced = [one.model for one in rig.out if type(one) is ModelAvailable]
    rig.stored("m", op_id)
    (row,) = [one for one in rig.scheduler.listing.models() if one["name"] == "c"]
    fits = member in ("wide", "many")  # the others have no input x, or no output y
    assert ("c" in announced) is fits
    assert (row["inputs"]["x"] == [[4, 16], "float32"]) is not fits
    assert (row["state"], bool(row["reason"])) == (
        ("ready", False) if fits else ("incomplete", True)
    )


def test_a_bill_is_the_sum_of_its_parts() -> None:
    one = RequestTiming(
        compute_ms=1.0, total_ms=3.0, resident=True, preempted="job", resident_bytes=5
    )
    two = RequestTiming(compute_ms=2.0, total_ms=4.0, worker=1, op_id=9, version=2)
    timing = of_steps({"one": one, "two": two})
    assert (timing.compute_ms, timing.total_ms, timing.resident_bytes) == (3.0, 7.0, 5)
    assert (timing.resident, timing.preempted, timing.worker, timing.version) == (
        False,
        "job",
        1,
        2,
    )
    assert timing.as_dict()["steps"]["two"]["op_id"] == 9
    assert "steps" not in one.as_dict()
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(timing), type=RequestTiming) == timing
