"""Versions from the file that a module's own ``state_dict()`` writes."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec
import pytest
import torch
from process_tools import checked_server
from safetensors.torch import save_file
from torch import nn

from pipeswitch.base.errors import RegistrationRefused
from pipeswitch.programs.compiler.export import export_module_to_bundle
from pipeswitch.programs.compiler.program import build
from pipeswitch.programs.spec import BuildSpec, save_manifest
from pipeswitch.scheduler.introspection import came_from


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


def test_a_program_that_is_built_again_keeps_its_origin(tmp_path: Path) -> None:
    export_module_to_bundle(Rotating(1).eval(), (torch.randn(2, 8),), tmp_path / "a.bundle")
    spec = BuildSpec(name="m", source=str(tmp_path / "a.bundle"))
    first = build(spec, tmp_path / "kept", lambda stage, fraction: None)
    origin = {"source": "hf:x", "extra": {**first.extra, "origin": "job:j@5:ema"}}
    save_manifest(tmp_path / "kept", msgspec.structs.replace(first, **origin))
    again = msgspec.structs.replace(spec, source=str(tmp_path / "kept" / "program.bundle"))
    row = came_from(build(again, tmp_path / "again", lambda stage, fraction: None), b"")
    assert row["source"] == "job j, step 5, part ema"
