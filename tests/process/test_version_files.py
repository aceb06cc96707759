"""Versions from the file that a module's own ``state_dict()`` writes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from process_tools import checked_server
from safetensors.torch import save_file
from torch import nn

from pipeswitch.base.errors import RegistrationRefused


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
        save_file({"layer.weight": torch.zeros(8, 8)}, tmp_path / "half.safetensors")
        with pytest.raises(RegistrationRefused, match=r"layer\.bias: missing"):
            client.register("own", weights=tmp_path / "half.safetensors", as_version=True)
