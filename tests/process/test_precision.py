"""Models in another precision on a real server: whatever dies or leaves, the same bits."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import process_tools as tools
import pytest
import torch

from pipeswitch.client.tensors import Result
from pipeswitch.devices.cpu.packed import missing
from pipeswitch.programs.interface.packing import DERIVED_FILE

pytestmark = pytest.mark.skipif(bool(missing()), reason=f"packed weights: {missing()}")


class Network(torch.nn.Module):
    """Convolutions of 11 MiB, large enough that packed weights are faster on any machine."""

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
        self.head = torch.nn.Linear(64 * 14 * 14, 200)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.nn.functional.max_pool2d(self.body(x), 4)
        logits: torch.Tensor = self.head(y.flatten(1))
        return logits


X = torch.linspace(-1, 1, 3 * 56 * 56).reshape(1, 3, 56, 56)
ARENA = "24MiB"  # two of the models do not fit beside each other, nor beside the words


@pytest.fixture(scope="module")
def state_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("precision") / "state"


@pytest.fixture(scope="module")
def running(state_dir: Path) -> Iterator[tools.Checked]:
    environment = tools.ENVIRONMENT
    with tools.checked_server(arena=ARENA, state_dir=state_dir, environment=environment) as checked:
        for name, precision in (("fast", "fast"), ("exact", "exact"), ("other", "fast")):
            checked.client.register(
                name, Network().eval(), example_inputs=(X,), precision=precision
            )
        yield checked


def bits(result: Result) -> bytes:
    [output] = result.outputs.values()
    return bytes(output.tobytes())


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


def test_its_bits_survive_eviction_and_dead_workers(running: tools.Checked) -> None:
    client = running.client
    first = bits(client.infer("fast", {"x": X.numpy()}))
    for number in range(12):
        client.infer(("exact", "other")[number % 2], {"x": X.numpy()})  # takes its place
        if number % 3 == 0:
            for pid in running.worker_pids().values():
                tools.kill(pid, signal.SIGKILL)
        assert bits(client.infer("fast", {"x": X.numpy()})) == first


def test_its_bits_survive_a_restart_and_damage_is_found(tmp_path: Path) -> None:
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
        assert checked.client.show("fast")["state"] != "ready"
