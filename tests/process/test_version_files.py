"""Versions from the file that a module's own ``state_dict()`` writes."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from process_tools import checked_server, command
from safetensors.torch import save_file
from torch import nn

from pipeswitch.base.errors import RegistrationRefused
from pipeswitch.client.client import Client
from pipeswitch.programs.compiler.export import export_module_to_bundle
from pipeswitch.programs.compiler.program import build
from pipeswitch.programs.spec import BuildSpec, save_manifest
from pipeswitch.scheduler.introspection import came_from
from pipeswitch.testing import server


class Rotating(nn.Module):
    """Module with a buffer that no state dict has, and a plain tensor attribute."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layer = nn.Linear(8, 8)
        self.register_buffer("angles", torch.arange(8.0), persistent=False)
        self.scale = torch.full((8,), 2.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.angles + self.scale


def test_a_version_from_a_modules_own_file_keeps_what_no_state_dict_has(tmp_path: Path) -> None:
    with checked_server() as checked:
        client, x = checked.client, torch.randn(2, 8)
        client.register("own", Rotating(1).eval(), example_inputs=(x,))
        for number, suffix in enumerate(("safetensors", "pt"), start=2):
            state = Rotating(number).state_dict()
            assert state.keys() == {"layer.weight", "layer.bias"}
            path = tmp_path / f"own.{suffix}"
            save_file(state, path) if suffix == "safetensors" else torch.save(state, path)
            client.register("own", weights=path, as_version=True)
            assert client.show("own")["version"] == number
            with torch.no_grad():
                assert torch.equal(client.infer("own", x).value, Rotating(number).eval()(x))
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            assert client.show("own")["file"] == {"name": path.name, "sha256": digest}
        save_file({"layer.weight": torch.zeros(8, 8)}, tmp_path / "half.safetensors")
        with pytest.raises(RegistrationRefused, match=r"layer\.bias: missing"):
            client.register("own", weights=tmp_path / "half.safetensors", as_version=True)


FILE = """
[[model]]
name = "two"
like = "base"
weights = "{0}/two.safetensors"

[[model]]
name = "base"
source = "torchvision:squeezenet1_1"
weights = "{0}/one.safetensors"
"""


def test_each_model_says_where_it_came_from_also_after_a_restart(tmp_path: Path) -> None:
    torchvision = pytest.importorskip("torchvision")
    for name in ("one", "two"):
        module = torchvision.models.squeezenet1_1()
        save_file(module.state_dict(), tmp_path / f"{name}.safetensors")
    x, config, state = torch.randn(2, 8), tmp_path / "pipeswitch.toml", tmp_path / "state"
    config.write_text(FILE.format(tmp_path))
    torch.export.save(torch.export.export(Rotating(1).eval(), (x,)), tmp_path / "net.pt2")
    made_of = r"{}, 20\d\d-\d\d-\d\d \d\d:\d\d"
    expected = {
        "base": made_of.format(r"torchvision:squeezenet1_1; file one\.safetensors"),
        "two": made_of.format(r"file two\.safetensors"),
        "line": made_of.format(r"file net\.pt2"),
        "web": made_of.format(r"file by hand"),
        "sdk": "bundle",
    }

    def rows(client: Client) -> dict[str, dict[str, Any]]:
        return {row["name"]: row for row in client.models()}

    with server(state_dir=state, args=("--config", str(config))) as running:
        client = running.client()
        client.register("sdk", Rotating(2).eval(), example_inputs=(x,))
        export_module_to_bundle(Rotating(3).eval(), (x,), tmp_path / "web.bundle")
        body = {"source": client.upload(tmp_path / "web.bundle", "bundle")}
        client._ask("register", model="web", body={**body, "file": {"name": "by hand"}})
        done = command("--host", running.ipc_address, "register", "line", f"{tmp_path}/net.pt2")
        assert done.returncode == 0, done.stderr
        before = rows(client)
        assert before["line"]["file"]["sha256"]
    for name, text in expected.items():
        assert re.fullmatch(text, before[name]["source"]), before[name]
    with server(state_dir=state) as running:
        keys = "source", "file", "registered_at"
        for name, row in rows(running.client()).items():
            assert [row[key] for key in keys] == [before[name][key] for key in keys]


def test_a_program_that_is_built_again_keeps_its_origin(tmp_path: Path) -> None:
    export_module_to_bundle(Rotating(1).eval(), (torch.randn(2, 8),), tmp_path / "a.bundle")
    spec = BuildSpec(name="m", source=str(tmp_path / "a.bundle"))
    first = build(spec, tmp_path / "kept", lambda stage, fraction: None)
    origin = {"source": "hf:x", "extra": {**first.extra, "origin": "job:j@5:ema"}}
    save_manifest(tmp_path / "kept", msgspec.structs.replace(first, **origin))
    again = msgspec.structs.replace(spec, source=str(tmp_path / "kept" / "program.bundle"))
    row = came_from(build(again, tmp_path / "again", lambda stage, fraction: None), b"")
    assert row["source"] == "job j, step 5, part ema"
