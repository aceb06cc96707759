"""Models that are like another: the same program with other weights. Pure."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pipeswitch.base import errors
from pipeswitch.scheduler.state import events as ev
from tests.unit.test_scheduler_rules import Rig, exited


def spec(**fields: Any) -> str:
    return msgspec.msgpack.encode(fields).decode("latin1")


OTHER = spec(name="other", source="hf:x", weights="w", precision="fast", max_error=0.5, part="p")
OWN = {"spec": spec(weights="f.safetensors", precision="", max_batch=0), "spec_digest": "own"}


def like(world: Rig, other: str = "other", **fields: Any) -> ev.Token:
    return world.ask_register("m", **{**OWN, "like": other, **fields})


def begun(world: Rig) -> dict[str, Any]:
    [build] = [one for one in world.commands(ev.StartBuild) if one.model == "m"]
    return msgspec.msgpack.decode(build.spec, type=dict[str, Any])


def registered(**fields: Any) -> Rig:
    world = Rig()
    _, op_id = world.begin("other", **{"spec": OTHER, **fields})
    world.built("other", 10, op_id)
    world.stored("other", op_id)
    return world


def test_it_takes_the_program_and_the_options_but_not_the_weights() -> None:
    world = registered()
    like(world)
    folder = world.scheduler.core.settings.program_dir("digest other")
    assert begun(world) == {
        "name": "m",
        "source": f"{folder}/program.bundle",
        "weights": "f.safetensors",
        "precision": "fast",
        "max_error": 0.5,
        "part": "",
    }


def test_a_variant_has_its_own_file_and_time() -> None:
    world = registered(spec=spec(source="hf:x", file={"name": "old.pt"}, registered_at_s=1))
    like(world, spec=spec(weights="w", registered_at_s=2))
    assert (begun(world).get("file"), begun(world)["registered_at_s"]) == (None, 2)


def test_it_may_have_another_precision_and_an_adapter_takes_the_first_source() -> None:
    world = registered()
    own = spec(weights="", adapter="lora", precision="bf16", max_error=0.0)
    like(world, spec=own)
    build = begun(world)
    assert (build["precision"], build["max_error"]) == ("bf16", 0.0)
    assert (build["weights"], build["adapter"], build["origin"]) == ("w", "lora", "hf:x")


def test_it_waits_for_the_others_program() -> None:
    world = Rig()
    _, op_id = world.begin("other", spec=OTHER)
    like(world)
    assert not any(one.model == "m" for one in world.commands(ev.StartBuild))
    world.built("other", 10, op_id)
    world.handle(exited(op_id, 0))
    assert begun(world)["weights"] == "f.safetensors"


def test_it_is_refused_when_the_other_is() -> None:
    world = Rig()
    world.begin("other", spec=OTHER)
    token = like(world)
    world.ask(ev.UnregisterRequest, model="other")
    assert isinstance(world.error(token), errors.RegistrationRefused)
    assert "m" not in world.scheduler.machine.models


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"other": "none"}, errors.ModelNotFound),
        ({"other": "other@7"}, errors.ModelNotFound),
        ({"tenant": "b"}, errors.PermissionDenied),
    ],
)
def test_an_unknown_model_and_another_tenants_are_refused(
    fields: dict[str, Any], error: type[Exception]
) -> None:
    world = registered(tenant="a")
    assert isinstance(world.error(like(world, **{"tenant": "a", **fields})), error)
    assert like(world, tenant="a") not in world.answers  # it is built


def test_the_same_request_again_is_a_no_op_and_another_names_the_weights() -> None:
    world = registered()
    like(world)
    assert like(world) not in world.answers  # it waits for the build, too
    token = like(world, spec=spec(weights="g"), spec_digest="another")
    assert world.error(token).data["differs"] == ["weights"]


def test_files_stay_until_a_waiting_build_has_read_them() -> None:
    world = registered()
    world.begin("busy")
    like(world)
    world.ask(ev.UnregisterRequest, model="other")
    assert not world.commands(ev.SweepPrograms)
