"""Models that take another's program with the weights of a file: sources, precisions, restarts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from process_tools import checked_server, command
from safetensors.torch import save_file
from torch import nn

from pipeswitch.base.errors import ModelNotFound, RegistrationRefused
from pipeswitch.testing import server


def net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    layers = nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(576, 10)
    module = nn.Sequential(*layers).eval()
    module[1].running_var.uniform_(0.5, 2.0)
    return module


X = torch.randn(2, 3, 8, 8)


@pytest.mark.parametrize("precision", ["exact", "fast", "bf16", "int8"])
def test_it_answers_as_if_it_were_registered_alone(precision: str, tmp_path: Path) -> None:
    torch.save(net(2).state_dict(), tmp_path / "two.pt")
    with checked_server() as checked:
        client = checked.client
        options: dict[str, Any] = {"precision": precision, "batch": 4}
        client.register("base", net(1), example_inputs=(X,), **options)
        done = client.register("two", like="base", weights=tmp_path / "two.pt", aliases=["2"])
        alone = client.register("alone", net(2), example_inputs=(X,), **options)
        with pytest.raises(ModelNotFound) as refusal:
            client.register("three", like="bas", weights=tmp_path / "two.pt")
        assert refusal.value.data == {"nearest": "base"}
        client.unregister("base")
        assert not any("not used" in note for note in done["notes"])
        assert (done["precision"] and done["precision"]["name"]) == (
            alone["precision"] and alone["precision"]["name"]
        )
        assert done["batching"]["limit"] == 4
        ours, plain = client.infer("2", X).value, client.infer("alone", X).value
        if precision in ("exact", "bf16", "int8"):
            assert torch.equal(ours, plain)
        torch.testing.assert_close(ours, plain, rtol=1e-3, atol=1e-3)


def test_the_second_of_a_hub_takes_other_names_and_a_version(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.DistilBertConfig(dim=32, hidden_dim=64, n_layers=1, n_heads=2)
    models = []
    for seed in range(3):
        torch.manual_seed(seed)
        models.append(transformers.DistilBertForSequenceClassification(config).eval())
        models[-1].save_pretrained(tmp_path / str(seed))
    files = [str(tmp_path / f"{seed}/model.safetensors") for seed in range(3)]
    ids = torch.randint(0, 100, (1, 9))
    with checked_server() as checked:
        client = checked.client
        client.register("base", f"hf:{tmp_path / '0'}", weights="pretrained")
        client.register("base", weights=files[1], as_version=True)
        client.register("two", like="base@2", weights=files[2])
        client.register("three", like="two", weights=files[0])
        for name, module in (("base", models[1]), ("two", models[2]), ("three", models[0])):
            answer = client.infer(name, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})
            torch.testing.assert_close(answer["logits"], module(ids).logits)


def test_wrong_files_are_refused_with_the_tensors_names(tmp_path: Path) -> None:
    state = net(2).state_dict()
    bias = state.pop("4.bias")
    save_file(state, tmp_path / "missing.safetensors")
    save_file({**state, "4.bias": bias[:3].clone()}, tmp_path / "shape.safetensors")
    save_file({**state, "4.bias": bias, "head": bias + 1}, tmp_path / "more.safetensors")
    with checked_server() as checked:
        client = checked.client
        client.register("base", net(1), example_inputs=(X,))
        for name, text in (("missing", "4.bias: missing"), ("shape", r"4.bias: the model has")):
            with pytest.raises(RegistrationRefused, match=text):
                client.register("v", like="base", weights=tmp_path / f"{name}.safetensors")
        done = client.register("v", like="base", weights=tmp_path / "more.safetensors")
        assert "not used: head" in done["notes"]


FILE = """
[[model]]
name = "two"
like = "base"
weights = "{0}/two.safetensors"

[[model]]
name = "lost"
like = "none"
weights = "{0}/two.safetensors"

[[model]]
name = "base"
source = "torchvision:squeezenet1_1"
weights = "random:1"
"""


def test_a_file_and_a_command_name_it_and_it_survives_a_restart(tmp_path: Path) -> None:
    torchvision = pytest.importorskip("torchvision")
    torch.manual_seed(2)
    module = torchvision.models.squeezenet1_1().eval()
    weights, config = str(tmp_path / "two.safetensors"), tmp_path / "pipeswitch.toml"
    save_file(module.state_dict(), weights)
    config.write_text(FILE.format(tmp_path))
    x, state = torch.randn(1, 3, 224, 224), tmp_path / "state"
    with (
        server(args=("--config", str(config)), state_dir=state) as running,
        running.client() as client,
    ):
        rows = {row["name"]: row for row in client.models()}
        assert 'no model "none"' in rows["lost"]["reason"]
        assert re.fullmatch(r"file two.safetensors, 20[-0-9]{8} [0-9:]{5}", rows["two"]["source"])
        words = "register", "three", "--like", "two", "--weights", weights
        done = command("--host", running.ipc_address, *words)
        assert done.returncode == 0, done.stderr
        client.unregister("base")
        client.unregister("two")
        before = client.show("three")
    with server(state_dir=state) as running, running.client() as client, torch.no_grad():
        for key in ("source", "file", "registered_at"):
            assert client.show("three")[key] == before[key]
        torch.testing.assert_close(client.infer("three", x).value, module(x))
