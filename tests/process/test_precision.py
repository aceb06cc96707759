"""Models in other precisions on a real server: equal bits after deaths and evictions."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import process_tools as tools
import pytest
import torch
from msgspec.structs import replace

from pipeswitch.client.tensors import Result
from pipeswitch.devices.cpu.packed import KERNELS, missing
from pipeswitch.programs.interface.packing import DERIVED_FILE
from pipeswitch.programs.spec import load_manifest, save_manifest
from tests.models import loading

pytestmark = pytest.mark.skipif(bool(missing()), reason=f"packed weights: {missing()}")


class Network(torch.nn.Module):
    """Convolutions and a linear layer of 11 MiB; packed weights make it faster on any machine."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        layers: list[torch.nn.Module] = []
        for number in range(5):
            layers += [
                torch.nn.Conv2d(64 if number else 3, 64, 3, padding=1, bias=False),
                torch.nn.BatchNorm2d(64),
                torch.nn.ReLU(inplace=True),
            ]
        self.body = torch.nn.Sequential(*layers)
        self.shrink = torch.nn.Conv2d(64, 64, 1, stride=2)
        self.head = torch.nn.Linear(64 * 14 * 14, 200)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.shrink(torch.nn.functional.max_pool2d(self.body(x), 2))
        logits: torch.Tensor = self.head(y.flatten(1))
        return logits


class Small(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.up, self.down = torch.nn.Linear(64, 512), torch.nn.Linear(512, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(torch.relu(self.up(x)))
        return y


TRAINS = """
    import sys
    import torch
    from pipeswitch import job
    class Small(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(4)
            self.up, self.down = torch.nn.Linear(64, 512), torch.nn.Linear(512, 64)
        def forward(self, x):
            return self.down(torch.relu(self.up(x)))
    net = Small()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in job.steps(range(6), model=net, optimizer=optimizer):
        net(torch.ones(2, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if job.step == 3:
            job.publish("live")
"""
X = torch.linspace(-1, 1, 3 * 56 * 56).reshape(1, 3, 56, 56)
ARENA = "24MiB"  # the fences and one model fit, but not two models
FORMS = {"fast": "fast", "exact": "exact", "other": "fast", "half": "bf16", "quarter": "int8"}


@pytest.fixture(scope="module")
def state_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("precision") / "state"


@pytest.fixture(scope="module")
def running(state_dir: Path) -> Iterator[tools.Checked]:
    environment = tools.ENVIRONMENT
    with tools.checked_server(arena=ARENA, state_dir=state_dir, environment=environment) as checked:
        for name, precision in FORMS.items():
            checked.client.register(
                name, Network().eval(), example_inputs=(X,), precision=precision
            )
        yield checked


def bits(result: Result) -> bytes:
    [output] = result.outputs.values()
    return bytes(output.tobytes())


def alone(state_dir: Path, digest: str, x: torch.Tensor) -> bytes:
    """Run the stored program in this process with one thread; return the bytes of its output."""
    folder = state_dir / "models" / digest
    manifest = load_manifest(folder)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        [output] = loading.bound(folder, manifest, KERNELS).run([x.clone()], lambda index: None)
    finally:
        torch.set_num_threads(threads)
    return output.numpy().tobytes()


def test_a_fast_model_answers_within_rounding_and_says_what_it_measured(
    running: tools.Checked,
) -> None:
    row = running.client.show("fast")
    assert row["precision"]["name"] == "fast"
    assert row["precision"]["ms"] < row["precision"]["plain_ms"]
    assert running.client.show("exact")["precision"] is None
    theirs = tools.eager(Network().eval(), X)
    [ours] = running.client.infer("fast", {"x": X.numpy()}).outputs.values()
    error = (torch.from_numpy(ours.copy()) - theirs).abs().max() / theirs.abs().max()
    assert error < 1e-5
    assert bits(running.client.infer("exact", {"x": X.numpy()})) == theirs.numpy().tobytes()


def test_a_form_in_fewer_bytes_says_what_it_is(running: tools.Checked) -> None:
    client = running.client
    theirs = tools.eager(Network().eval(), X)
    plain_bytes = client.show("exact")["bytes"]
    for name, share in (("half", 0.55), ("quarter", 0.35)):
        row = client.show(name)
        assert row["precision"]["name"] == FORMS[name]
        assert row["bytes"] < share * plain_bytes
        assert row["precision"]["plain_bytes"] == plain_bytes
        assert row["is_batch_invariant"] in (True, False)
        result = client.infer(name, {"x": X.numpy()})
        assert result.timing.as_dict()["precision"] == FORMS[name]
        [ours] = result.outputs.values()
        error = (torch.from_numpy(ours.copy()) - theirs).abs().max() / theirs.abs().max()
        assert error <= max(3 * row["precision"]["max_error"], 0.01)
    shown = {row["name"]: row.get("precision") for row in client.ps() if row["kind"] == "model"}
    assert (shown["half"], shown["quarter"], shown["exact"]) == ("bf16", "int8", None)
    assert "precision" not in client.infer("exact", {"x": X.numpy()}).timing.as_dict()


def test_a_chain_has_models_of_several_precisions(running: tools.Checked) -> None:
    client = running.client
    client.register(
        "tail",
        torch.nn.Linear(200, 64).eval(),
        example_inputs=(torch.ones(1, 200),),
        precision="bf16",
    )
    output = next(iter(client.show("half")["outputs"]))
    [input_name] = client.show("tail")["inputs"]
    client.register_chain(
        "both",
        [
            {"name": "first", "model": "half", "inputs": {"x": "x"}},
            {"name": "last", "model": "tail", "inputs": {input_name: f"first.{output}"}},
        ],
    )
    middle = client.infer("half", {"x": X.numpy()}).outputs[output]
    assert bits(client.infer("both", {"x": X.numpy()})) == bits(
        client.infer("tail", {input_name: middle})
    )


def test_bits_of_every_form_survive_eviction_and_dead_workers(
    running: tools.Checked, state_dir: Path
) -> None:
    client = running.client
    rows = {name: client.show(name) for name in FORMS}
    expected = {name: alone(state_dir, row["digest"], X) for name, row in rows.items()}
    for number in range(20):
        name = [*FORMS][number * 3 % len(FORMS)]  # copying this model evicts another one
        if number % 3 == 0:
            for pid in running.worker_pids().values():
                tools.kill(pid, signal.SIGKILL)
        assert bits(client.infer(name, {"x": X.numpy()})) == expected[name]


@pytest.mark.parametrize("form", ["fast", "bf16", "int8"])
def test_a_jobs_weights_are_packed_on_their_way_and_the_old_ones_come_back(
    form: str, tmp_path: Path
) -> None:
    net, x = Small().eval(), torch.linspace(-1, 1, 64).reshape(1, 64)
    script = tools.write_script(tmp_path, "small.py", TRAINS)
    state = tmp_path / "state"
    with tools.checked_server(state_dir=state) as checked:
        client = checked.client
        first = client.register("live", net, example_inputs=(x,), precision=form)
        if first["precision"] is None:
            assert form == "fast"
            assert "stays exact" in first["notes"][-1]
        task = client.train(script, name="trains", args=[str(Path(__file__).parent)])
        tools.finish(task)
        tools.until(lambda: client.show("live")["version"] > 1, "the script's version serves")
        row = client.show("live")
        assert (row["precision"] or {"name": "fast"})["name"] == form
        assert bits(client.infer("live", {"x": x.numpy()})) == alone(state, row["digest"], x)
        client.rollback("live")
        assert bits(client.infer("live", {"x": x.numpy()})) == alone(state, first["digest"], x)


@pytest.mark.parametrize("form", ["bf16", "int8"])
def test_a_form_that_is_larger_than_the_arena_streams(form: str, tmp_path: Path) -> None:
    torch.manual_seed(5)
    layers = [torch.nn.Linear(1024, 1024) for _ in range(24)]
    x = torch.linspace(-1, 1, 1024).reshape(1, 1024)
    arena = {"bf16": "24MiB", "int8": "20MiB"}[form]
    state = tmp_path / "state"
    with tools.checked_server(arena=arena, state_dir=state) as checked:
        row = checked.client.register(
            "deep", torch.nn.Sequential(*layers).eval(), example_inputs=(x,), precision=form
        )
        input_name = next(iter(checked.client.show("deep")["inputs"]))
        assert any(note.startswith("streams: ") for note in row["notes"])
        expected = alone(state, row["digest"], x)
        for _ in range(3):
            result = checked.client.infer("deep", {input_name: x.numpy()})
            assert result.timing.streamed > 0
            assert bits(result) == expected


def test_its_bits_survive_a_restart_and_damage(tmp_path: Path) -> None:
    state = tmp_path / "state"
    with tools.checked_server(arena=ARENA, state_dir=state) as checked:
        row = checked.client.register(
            "fast", Network().eval(), example_inputs=(X,), precision="fast"
        )
        first = bits(checked.client.infer("fast", {"x": X.numpy()}))
    with tools.checked_server(arena=ARENA, state_dir=state) as checked:
        assert checked.client.show("fast")["precision"] == row["precision"]
        assert bits(checked.client.infer("fast", {"x": X.numpy()})) == first
    [file] = state.glob(f"models/*/{DERIVED_FILE}")
    with file.open("r+b") as damaged:
        damaged.seek(-1000, os.SEEK_END)
        byte = damaged.read(1)
        damaged.seek(-1, os.SEEK_CUR)
        damaged.write(bytes([byte[0] ^ 1]))
    with tools.checked_server(arena=ARENA, state_dir=state) as checked:
        assert checked.client.show("fast")["state"] == "ready"  # derived again, from plain weights
        assert bits(checked.client.infer("fast", {"x": X.numpy()})) == first


def test_a_server_with_other_threads_packs_again(tmp_path: Path) -> None:
    answers: list[bytes] = []
    rows: list[dict[str, Any] | None] = []
    for threads in (1, 1, 2):
        options = {"state_dir": tmp_path / "state", "args": ("--threads", str(threads))}
        with tools.checked_server(arena=ARENA, **options) as checked:
            if not rows:
                checked.client.register(
                    "m", Network().eval(), example_inputs=(X,), precision="fast"
                )
            answers.append(bits(checked.client.infer("m", {"x": X.numpy()})))
            rows.append(checked.client.show("m")["precision"])
    # A build on a busy machine may measure that it gains nothing: then the model stays exact.
    prints = [(row or {}).get("fingerprint") for row in rows]
    assert prints[0] == prints[1]
    assert prints[2] is None or prints[2] != prints[1]
    assert answers[0] == answers[1]
    first, last = (np.frombuffer(one, np.float32) for one in (answers[0], answers[2]))
    assert abs(first - last).max() < 1e-3 * abs(first).max()


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_two_hundred_evictions_kills_and_rebuilds_change_no_bit(tmp_path: Path) -> None:
    """Evict, kill and register again; answers must equal those of the program in this process."""
    state, draw = tmp_path / "state", random.Random(39)
    done, expected = 0, dict[str, bytes]()
    while done < 200:
        with tools.checked_server(arena=ARENA, state_dir=state) as checked:
            client = checked.client
            for name, form in FORMS.items():
                if name not in {row["name"] for row in client.models()}:
                    client.register(name, Network().eval(), example_inputs=(X,), precision=form)
            for name in FORMS:  # so that programs from another machine are rebuilt
                client.infer(name, {"x": X.numpy()})
            rows = {row["name"]: row for row in client.models()}
            expected = {name: alone(state, row["digest"], X) for name, row in rows.items()}
            for _ in range(50):
                name = draw.choice([*FORMS])
                match draw.randrange(10):
                    case 0 | 1 | 2:
                        tools.kill(draw.choice([*checked.worker_pids().values()]), signal.SIGKILL)
                    case 3:  # register it again in another precision
                        client.unregister(name)
                        form = draw.choice(["exact", "fast", "bf16", "int8"])
                        row = client.register(
                            name, Network().eval(), example_inputs=(X,), precision=form
                        )
                        expected[name] = alone(state, row["digest"], X)
                    case _:  # only infer, which evicts another model
                        pass
                assert bits(client.infer(name, {"x": X.numpy()})) == expected[name]
                done += 1
        for folder in (state / "models").iterdir():  # as if the next server ran on another machine
            if folder.is_dir() and draw.random() < 0.5:
                as_if_packed_elsewhere(folder)


def as_if_packed_elsewhere(folder: Path) -> None:
    manifest = load_manifest(folder)
    if manifest.precision is not None:
        elsewhere = replace(manifest.precision, fingerprint="another")
        save_manifest(folder, replace(manifest, precision=elsewhere))


def test_a_program_that_was_packed_elsewhere_is_built_again_before_it_serves(
    tmp_path: Path,
) -> None:
    state = tmp_path / "state"
    with tools.checked_server(arena=ARENA, state_dir=state) as checked:
        for form in ("bf16", "int8"):
            checked.client.register(form, Network().eval(), example_inputs=(X,), precision=form)
        before = {f: bits(checked.client.infer(f, {"x": X.numpy()})) for f in ("bf16", "int8")}
    for folder in (state / "models").iterdir():
        if folder.is_dir():
            as_if_packed_elsewhere(folder)
    with tools.checked_server(arena=ARENA, state_dir=state) as checked:
        for form, expected in before.items():
            assert bits(checked.client.infer(form, {"x": X.numpy()})) == expected
            assert checked.client.show(form)["precision"]["name"] == form


def test_a_program_is_built_again_when_the_kind_of_its_device_changes(tmp_path: Path) -> None:
    state = tmp_path / "state"
    machines = (("cpu", {}), ("cuda:0", tools.fake_gpu(tmp_path)), ("cpu", {}))
    answers: list[bytes] = []
    for device, environment in machines:
        with tools.checked_server(
            arena=ARENA, state_dir=state, devices=(device,), environment=environment
        ) as checked:
            if not answers:
                options: dict[str, str] = {"precision": "fast"}
                checked.client.register("m", Network().eval(), example_inputs=(X,), **options)
            answers.append(bits(checked.client.infer("m", {"x": X.numpy()})))
            precision = checked.client.show("m")["precision"]
            assert precision["name"] == "fast"
            assert precision["layout"] == ("onednn" if device == "cpu" else "torch")
    assert answers[0] == answers[2]
