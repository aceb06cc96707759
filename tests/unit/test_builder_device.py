"""A builder computes on the CPU, also where there is a GPU."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, cast

import pytest

from pipeswitch.errors import RegistrationRefused
from pipeswitch.ipc.channel import Channel
from pipeswitch.ipc.messages import BuildSettings, Epoch, ModelName
from pipeswitch.programs.build import program as build_module
from pipeswitch.programs.build.builder import run
from pipeswitch.programs.spec import BuildSpec


class Sent:
    """A channel without a reader."""

    def send(self, message: Any) -> None:
        pass


def test_a_builder_sees_no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import msgspec
    import torch

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    seen: list[str | None] = []

    def build(*_: object) -> None:
        seen.append(os.environ.get("CUDA_VISIBLE_DEVICES"))
        raise RegistrationRefused("build", "far enough")

    monkeypatch.setattr(build_module, "build", build)
    spec = BuildSpec(name="m", source="torchvision:resnet18", weights="random:0", inputs={})
    settings = BuildSettings(
        model=ModelName("m"), epoch=Epoch(1), directory=str(tmp_path),
        spec=msgspec.msgpack.encode(spec),
        threads=torch.get_num_threads(),  # it sets them for good: here they stay what they are
    )  # fmt: skip
    assert run(settings, cast(Channel, Sent())) == 0
    assert seen == [""]
