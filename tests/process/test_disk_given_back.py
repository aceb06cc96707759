"""Disk space of a model is freed when the model is removed."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest
import torch

import pipeswitch as ps
from pipeswitch.testing import RunningServer, server
from tests.process.tools import until

TURNS = 5


def resident_bytes(running: RunningServer) -> int:
    """Return the bytes of programs and uploads, without files that are removed meanwhile."""
    total_bytes = 0
    for folder in (running.state_dir / "models", running.state_dir / "uploads"):
        for path, _, names in os.walk(folder):
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    total_bytes += os.stat(os.path.join(path, name)).st_size
    return total_bytes


def settled_bytes(running: RunningServer) -> int:
    """Wait until uploads of registered models are removed; return ``resident_bytes``."""
    until(lambda: not any((running.state_dir / "uploads").iterdir()), "uploads are removed")
    return resident_bytes(running)


def module(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Linear(256, 256)


def test_registered_and_unregistered_leaves_nothing(tmp_path: Path) -> None:
    example = torch.zeros(1, 256)
    with server(state_dir=tmp_path) as running, running.client() as client:
        client.register("stays", module(0), example_inputs=example)
        before = settled_bytes(running)
        for turn in range(TURNS):
            client.register(
                "m", module(turn), example_inputs=example
            )  # in turn 0, the program equals that of the model "stays"
            client.unregister("m")
            until(lambda: resident_bytes(running) == before, f"given back in turn {turn}")
        with pytest.raises(ps.RegistrationRefused):
            client.register("bad", _damaged(tmp_path))
        until(lambda: resident_bytes(running) == before, "given back after a refusal")
        assert client.infer("stays", torch.zeros(1, 256)).outputs
    orphan = tmp_path / "models" / ("0" * 64)
    orphan.mkdir()
    (orphan / "program.bundle").write_bytes(b"x" * 4096)
    with server(state_dir=tmp_path) as running, running.client() as client:
        until(lambda: resident_bytes(running) == before, "the orphan is swept")
        assert client.infer("stays", torch.zeros(1, 256)).outputs


def _damaged(folder: Path) -> Path:
    path = folder / "damaged.bundle"
    path.write_bytes(b"\x00" * 4096)
    return path


def test_what_does_not_fit_a_clients_share_is_refused_before_it_is_written(tmp_path: Path) -> None:
    """Register models of 256 KiB, each stored twice (upload, program): only one fits the share."""
    example = torch.zeros(1, 256)
    environment = {"PIPESWITCH_SERVER__MAX_DISK_PER_CLIENT": "640KiB"}
    options = {"tcp_roles": ("infer", "register"), "environment": environment}
    with (
        server(state_dir=tmp_path, **options) as running,
        running.client(tcp=True) as client,
        running.client() as owner,
    ):
        client.register("one", module(0), example_inputs=example)
        before = settled_bytes(running)
        with pytest.raises(ps.HostStoreFull) as caught:
            client.register("two", module(1), example_inputs=example)
        assert caught.value.tenant == "*"
        assert caught.value.largest_free_bytes < caught.value.requested_bytes
        until(lambda: resident_bytes(running) == before, "what was refused is given back")
        owner.register("owners", module(1), example_inputs=example)  # the owner has no limit
        client.unregister("one")
        client.register("two", module(1), example_inputs=example)
        assert client.infer("two", example).outputs


def test_a_model_from_a_name_is_refused_before_it_is_written(tmp_path: Path) -> None:
    environment = {"PIPESWITCH_SERVER__MAX_DISK": "8MiB"}
    with server(state_dir=tmp_path, environment=environment) as running, running.client() as client:
        with pytest.raises(ps.HostStoreFull):
            client.register("large", "torchvision:resnet18", weights="random:0")
        assert resident_bytes(running) == 0
        assert client.models() == []


def test_what_jobs_and_builds_of_before_left_is_swept_at_the_start(tmp_path: Path) -> None:
    os.chmod(tmp_path, 0o700)
    for folder in ("commits/gone", "models/.build-7-abc"):
        remains = tmp_path / folder
        remains.mkdir(parents=True, mode=0o700)
        (remains / "file").write_bytes(b"x" * 4096)
    for folder in ("commits", "models"):
        (tmp_path / folder).chmod(0o700)
    with server(state_dir=tmp_path) as running, running.client() as client:
        assert client.models() == []
        assert [list((tmp_path / folder).iterdir()) for folder in ("commits", "models")] == [[], []]
