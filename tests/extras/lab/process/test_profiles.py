"""Profiles on a real server: measured, kept, used, and refused."""

from __future__ import annotations

import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from process_tools import Checked, checked_server, eager, is_bit_equal, mlp, until

from pipeswitch.base import errors
from pipeswitch.extras.lab.profile import Profile, decode, encode
from pipeswitch.planning.grouping import spans

WIDTH = 256
DEPTH = 24  # layers of 257 KiB, together 6 MiB: more than one bucket


@pytest.fixture(scope="module")
def net() -> torch.nn.Module:
    module: torch.nn.Module = mlp(WIDTH, DEPTH, 0)
    return module


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Checked, Path]]:
    """Start a server; yield it and its ``--profiles-dir``, the folder of shipped profiles."""
    folder = tmp_path_factory.mktemp("profiles")
    with checked_server(arena="64MiB", args=("--profiles-dir", str(folder))) as checked:
        yield checked, folder


@pytest.fixture
def roomy(shared: tuple[Checked, Path]) -> Iterator[tuple[Checked, Path]]:
    """Yield the server and folder of ``shared``; afterwards remove all models and profiles."""
    yield shared
    checked, folder = shared
    checked.settle()
    checked.wait_until_whole()
    for row in checked.client.models():
        checked.client.unregister(row["name"])
    for path in (*folder.iterdir(), *(checked.running.state_dir / "profiles").glob("*")):
        path.unlink()


def register(checked: Checked, module: torch.nn.Module, name: str = "net") -> None:
    checked.client.register(name, module, example_inputs=(torch.zeros(1, WIDTH),))


def value(seed: int, batch: int = 2) -> torch.Tensor:
    return torch.randn(batch, WIDTH, generator=torch.Generator().manual_seed(seed))


def in_force(checked: Checked, grouping: str, name: str = "net") -> dict[str, Any]:
    """Wait until the model's row has this ``grouping``; return the row."""

    def look() -> dict[str, Any] | None:
        row = checked.client.show(name)
        return row if row["grouping"] == grouping else None

    row = until(look, f"the groups of {name} are {grouping}")
    assert row is not None
    return row


def sizes_of(profile: dict[str, Any], plan: list[int]) -> list[int]:
    sizes = [layer["size_bytes"] for layer in profile["layers"]]
    return [sum(sizes[first:end]) for first, end in spans(tuple(plan), len(sizes))]


def make_gone(checked: Checked) -> None:
    """Send a request to model ``other``; wait until all of this model is on the device."""
    checked.client.infer("other", value(0))
    until(lambda: checked.client.show("other")["residency"] == "resident", "the copy has ended")


def make_cold(checked: Checked, name: str = "net") -> None:
    """Evict a model by loading another one that needs its memory."""
    make_gone(checked)
    assert checked.client.show(name)["residency"] == "host"


def answers(checked: Checked, module: torch.nn.Module, batch: int = 2, seed: int = 1) -> None:
    result = checked.client.infer("net", value(seed, batch))
    assert is_bit_equal(result["y"], eager(module, value(seed, batch)))


def test_a_profile_is_measured_and_its_plan_is_what_the_device_then_does(
    net: torch.nn.Module,
) -> None:
    with checked_server(arena="10MiB") as checked:
        register(checked, net)
        register(checked, mlp(WIDTH, DEPTH, 1), "other")
        assert checked.client.show("net")["grouping"] == "buckets"
        stages: list[tuple[str, float]] = []
        profile = checked.client.profile("net", [2, 1], progress=lambda s, f: stages.append((s, f)))
        assert [fraction for _, fraction in stages] == sorted(fraction for _, fraction in stages)
        assert stages[-1][1] > 0.8  # 33 of 38 if the planned groups were tried before
        assert len(profile["layers"]) == DEPTH
        assert [batch["batch"] for batch in profile["batches"]] == [2, 1]
        assert all(ms > 0 for batch in profile["batches"] for ms in batch["switch_ms"])
        row = in_force(checked, "planned")
        planned = profile["checks"][-1]
        assert row["plan"] == planned["plan"]
        assert row["groups"] == len(planned["plan"])
        # The next cold switch copies and computes the plan's groups, in their order and sizes.
        make_cold(checked)
        answers(checked, net)
        until(lambda: checked.client.show("net")["residency"] == "resident", "the copy has ended")
        events = checked.client.trace(3600)["traceEvents"]
        ended = [e for e in events if e.get("ph") == "X"]
        ended.sort(key=lambda event: event["ts"])
        copies = [e for e in ended if e["name"].startswith("net group ")][-len(row["plan"]) :]
        assert [e["name"] for e in copies] == [f"net group {i}" for i in range(row["groups"])]
        assert [e["args"]["bytes"] for e in copies] == sizes_of(profile, row["plan"])
        computed = [e["name"] for e in ended if e["name"].startswith("group ")]
        assert computed[-row["groups"] :] == [f"group {i}" for i in range(row["groups"])]


def test_a_profile_is_its_owners_file_and_the_next_server_uses_it(
    net: torch.nn.Module, tmp_path: Path
) -> None:
    with checked_server(state_dir=tmp_path) as checked:
        register(checked, net)
        profile = checked.client.profile("net", [2])
        plan = in_force(checked, "planned")["plan"]
    (path,) = (tmp_path / "profiles").iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert decode(path.read_bytes()) == msgspec.convert(profile, Profile)
    with checked_server(state_dir=tmp_path) as checked:
        assert in_force(checked, "planned")["plan"] == plan  # from the journal and profile
        assert checked.stats()["transmissions"] == 0  # so nothing was measured
        answers(checked, net)
        assert "is not used" not in checked.running.log()


def _spoil(path: Path, how: str) -> None:
    if how == "corrupt":
        path.write_bytes(path.read_bytes()[:-200])
        return
    profile = decode(path.read_bytes())
    changes: dict[str, Any] = {
        "foreign": {"identity": msgspec.structs.replace(profile.identity, name="another one")},
        "other version": {"identity": msgspec.structs.replace(profile.identity, torch="1.0")},
        "other program": {"digest": profile.digest[:12] + "0" * 52},
        "unplanned": {"checks": ()},
    }[how]
    path.write_bytes(encode(msgspec.structs.replace(profile, **changes)))


@pytest.fixture(scope="module")
def measured(net: torch.nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a state directory with the model and its profile."""
    folder = tmp_path_factory.mktemp("measured")
    with checked_server(state_dir=folder) as checked:
        register(checked, net)
        checked.client.profile("net", [2])
    return folder


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("corrupt", "malformed|truncated"),
        ("foreign", "name was another one"),
        ("other version", "torch was 1.0"),
        ("other program", "another program"),
        ("unplanned", "no plan"),
    ],
)
def test_a_profile_that_is_not_true_here_is_one_warning_and_buckets(
    how: str, reason: str, net: torch.nn.Module, measured: Path, roomy: tuple[Checked, Path]
) -> None:
    checked, folder = roomy
    (source,) = (measured / "profiles").glob("net.*.json")
    (folder / source.name).write_bytes(source.read_bytes())
    _spoil(folder / source.name, how)

    def warnings() -> set[str]:
        return {
            line
            for line in checked.running.log().splitlines()
            if "WARNING" in line and "profile" in line
        }

    before = warnings()
    register(checked, net)
    row = checked.client.show("net")
    assert row["grouping"] == "buckets"
    assert any(word in row["grouping_why"].lower() for word in reason.split("|"))
    (warning,) = warnings() - before
    assert f'model "net": profile {source.name} is not used' in warning
    answers(checked, net)
    checked.client.profile("net", [2])  # the model can be measured again
    in_force(checked, "planned")
    answers(checked, net)


def test_requests_of_others_end_a_measurement_and_are_answered_right(
    net: torch.nn.Module, roomy: tuple[Checked, Path]
) -> None:
    checked, _ = roomy
    register(checked, net)
    stop, wrong, count = threading.Event(), [], 0
    expected = {seed: eager(net, value(seed)) for seed in range(4)}

    def ask() -> None:
        nonlocal count
        with checked.running.client() as client:
            while not stop.is_set():
                seed = count % 4
                if not is_bit_equal(client.infer("net", value(seed))["y"], expected[seed]):
                    wrong.append(seed)
                count += 1

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        with pytest.raises(errors.DeviceBusy) as busy:
            checked.client.profile("net", [2])
    finally:
        stop.set()
        asking.join()
    assert "no client sends requests" in busy.value.hint
    assert not wrong
    assert count > 0
    until(lambda: checked.client.show("net")["plan"] == [], "the groups are as before")
    checked.client.profile("net", [2])
    in_force(checked, "planned")
    answers(checked, net)


def test_a_model_that_takes_no_made_up_inputs_is_measured_with_the_clients(
    net: torch.nn.Module, roomy: tuple[Checked, Path]
) -> None:
    checked, _ = roomy
    register(checked, net)
    sent: list[int] = []

    def inputs(batch: int) -> Any:
        sent.append(batch)
        return value(0, batch)

    profile = checked.client.profile("net", [2, 3], inputs=inputs)
    assert sent == [2, 3]
    assert [batch["batch"] for batch in profile["batches"]] == [2, 3]
    with pytest.raises(errors.ServerUnavailable):  # ``inputs`` returns one row instead of two
        checked.client.profile("net", [2], inputs=lambda batch: value(0, 1))
    until(lambda: checked.client.show("net")["grouping"] == "planned", "they are as before")


def test_a_client_that_goes_away_takes_the_measurement_along(
    net: torch.nn.Module, roomy: tuple[Checked, Path]
) -> None:
    checked, _ = roomy
    register(checked, net)
    began = threading.Event()
    client = checked.running.client()

    def measure() -> None:
        with pytest.raises(errors.PipeSwitchError):
            client.profile("net", [2, 1, 3, 4], progress=lambda stage, part: began.set())

    measuring = threading.Thread(target=measure)
    measuring.start()
    assert began.wait(30)
    client.close()
    measuring.join(30)
    row = in_force(checked, "buckets")
    until(lambda: checked.client.show("net")["plan"] == [], "the groups are as before")
    assert row["profile"] == ""
    answers(checked, net)


def test_what_cannot_be_measured_is_refused(
    net: torch.nn.Module, roomy: tuple[Checked, Path]
) -> None:
    checked, _ = roomy
    register(checked, net)
    with pytest.raises(errors.ModelNotFound):
        checked.client.profile("absent")
    with pytest.raises(errors.InvalidInput):
        checked.client.profile("net", [65])
    with pytest.raises(errors.InvalidInput):
        checked.client.profile("net", [0])
