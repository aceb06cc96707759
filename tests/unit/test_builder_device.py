"""Settings of a builder, which computes on the CPU even if there is a GPU."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from pipeswitch.base.errors import RegistrationRefused
from pipeswitch.ipc.channel import Channel
from pipeswitch.ipc.messages.base import ModelName, OpId, ResourceLimits
from pipeswitch.ipc.messages.builder import BuildSettings
from pipeswitch.programs.compiler import program as build_module
from pipeswitch.programs.compiler.build_process import exports, run
from pipeswitch.programs.spec import BuildSpec


class Sent:
    """Channel that drops all messages."""

    def send(self, message: Any) -> None:
        pass


def settings_of(spec: bytes, folder: Path) -> BuildSettings:
    import torch

    return BuildSettings(
        model=ModelName("m"),
        op_id=OpId(1),
        directory=str(folder),
        spec=spec,
        limits=ResourceLimits(threads=torch.get_num_threads()),
    )


@pytest.mark.parametrize(
    ("spec", "is_exported"),
    [
        (msgspec.msgpack.encode(BuildSpec(name="m", source="torchvision:resnet18")), True),
        (msgspec.msgpack.encode(BuildSpec(name="m", source="/a/b.bundle")), False),
        (b"damaged on disk", False),
        (b"\x91" * 100_000, False),
    ],
    ids=["a source", "a bundle", "no spec", "a deep one"],
)
def test_the_fork_server_is_told_which_builds_export(
    spec: bytes, is_exported: bool, tmp_path: Path
) -> None:
    assert exports(settings_of(spec, tmp_path)) == is_exported


def test_a_builder_sees_no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    values: list[str | None] = []

    def build(*_: object, **__: object) -> None:
        values.append(os.environ.get("CUDA_VISIBLE_DEVICES"))
        raise RegistrationRefused("build", "far enough")

    monkeypatch.setattr(build_module, "build", build)
    spec = BuildSpec(name="m", source="torchvision:resnet18", weights="random:0", inputs={})
    settings = settings_of(msgspec.msgpack.encode(spec), tmp_path)
    assert run(settings, cast(Channel, Sent())) == 0
    assert values == [""]
