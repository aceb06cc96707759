"""What was kept on disk for a model alone goes with it."""

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


def kept_bytes(running: RunningServer) -> int:
    """Of programs and uploads; what is removed while we look is no longer kept."""
    found = 0
    for folder in (running.state_dir / "models", running.state_dir / "uploads"):
        for path, _, names in os.walk(folder):
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    found += os.stat(os.path.join(path, name)).st_size
    return found


def module(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Linear(256, 256)


def test_registered_and_unregistered_leaves_nothing(tmp_path: Path) -> None:
    example = torch.zeros(1, 256)
    with server(state_dir=tmp_path) as running, running.client() as client:
        client.register("stays", module(0), example_inputs=example)
        before = kept_bytes(running)
        for turn in range(TURNS):
            client.register(
                "m", module(turn), example_inputs=example
            )  # the first is the one that stays
            client.unregister("m")
            until(lambda: kept_bytes(running) == before, f"given back in turn {turn}")
        with pytest.raises(ps.RegistrationRefused):
            client.register("bad", _damaged(tmp_path))
        until(lambda: kept_bytes(running) == before, "given back after a refusal")
        assert client.infer("stays", torch.zeros(1, 256)).outputs
    orphan = tmp_path / "models" / ("0" * 64)
    orphan.mkdir()
    (orphan / "program.bundle").write_bytes(b"x" * 4096)
    with server(state_dir=tmp_path) as running, running.client() as client:
        until(lambda: kept_bytes(running) == before, "the orphan is swept")
        assert client.infer("stays", torch.zeros(1, 256)).outputs


def _damaged(folder: Path) -> Path:
    path = folder / "damaged.bundle"
    path.write_bytes(b"\x00" * 4096)
    return path
