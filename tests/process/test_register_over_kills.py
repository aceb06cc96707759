"""Registrations over a server that is killed: the client sends its files again, and is answered."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from process_tools import eager, is_bit_equal, mlp, until
from safetensors.torch import save_file

from pipeswitch.base.failpoints import VARIABLE
from pipeswitch.client import Client
from pipeswitch.client.aio import AsyncClient
from pipeswitch.testing import RunningServer, server

WIDTH = 1100  # so that the weights need two chunks
X = torch.linspace(-1, 1, WIDTH)[None]
PHASES = (
    "upload.write",
    "upload.publish",
    "upload.published",
    "journal.write",
    "journal.written",
    "controller.answer",
)


class Revived:
    """Server that starts again in the same folders whenever it was killed."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.points = folder, folder / "points"
        self.points.mkdir()
        self.lives = 0
        self._running: RunningServer | None = None
        self._is_ready, self._is_over = threading.Event(), False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        self._is_ready.wait(60)
        assert self._running is not None

    @property
    def running(self) -> RunningServer:
        assert self._running is not None
        return self._running

    def _run(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:  # the port names the ipc address, too
            address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
        options: dict[str, Any] = {
            "state_dir": self.folder / "state",
            "environment": {VARIABLE: str(self.points), "XDG_RUNTIME_DIR": str(self.folder)},
            "args": ("--listen", address),
        }
        while not self._is_over:
            with server(**options) as self._running:
                self.lives += 1
                self._is_ready.set()
                self.running.process.wait()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.running.pid, signal.SIGKILL)

    def close(self) -> None:
        self._is_over = True
        while self._thread.is_alive():  # a new life may begin just now
            self.kill()
            self._thread.join(0.5)


@pytest.fixture
def revived(tmp_path: Path) -> Iterator[Revived]:
    one = Revived(tmp_path)
    yield one
    one.close()


@pytest.mark.parametrize("phase", PHASES)
def test_a_server_that_is_killed_in_any_phase_serves_the_model_in_its_next_life(
    revived: Revived, phase: str
) -> None:
    module = mlp(WIDTH, 1, 7)
    with revived.running.client(timeout_s=100) as client:
        (revived.points / phase).write_text("crash")
        row = client.register("m", module, example_inputs=(X,))
        assert not (revived.points / phase).exists(), "the server was not killed"
        assert row["version"] == 1
        until(lambda: client.show("m")["state"] == "ready", "it is restored")
        assert is_bit_equal(client.infer("m", X)["y"], eager(module, X))
        assert [one["name"] for one in client.models()] == ["m"]
        until(lambda: revived.lives == 2, "the server was killed")


def sources(folder: Path) -> dict[str, tuple[Any, dict[str, Any]]]:
    """Return source and options of each kind of registration that sends files."""
    module = mlp(8, 1, 3)
    x = torch.ones(1, 8)
    torch.export.save(torch.export.export(module, (x,)), folder / "m.pt2")
    (folder / "factories.py").write_text(
        "import torch\ndef made():\n    return torch.nn.Sequential(torch.nn.Linear(8, 8))\n"
    )
    weights = torch.nn.Sequential(torch.nn.Linear(8, 8)).state_dict()
    save_file(weights, folder / "w.safetensors")
    torch.save(weights, folder / "w.pt")
    example = {"example_inputs": {"input": np.ones((1, 8), np.float32)}}
    factory = "factories:made"
    return {
        "module": (module, {"example_inputs": (x,)}),
        "pt2": (str(folder / "m.pt2"), {}),
        "safetensors and an example": (
            factory,
            {"weights": str(folder / "w.safetensors"), **example},
        ),
        "state dict": (factory, {"weights": str(folder / "w.pt"), **example}),
    }


@pytest.mark.parametrize("kind", ["module", "pt2", "safetensors and an example", "state dict"])
def test_every_kind_of_file_is_sent_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    source, options = sources(tmp_path)[kind]
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    revived = Revived(tmp_path)
    with contextlib.closing(revived), revived.running.client(timeout_s=100) as client:
        (revived.points / "journal.write").write_text("crash")
        client.register("m", source, **options)
        until(lambda: revived.lives == 2, "the server was killed")
        assert client.infer("m", torch.ones(1, 8))["y"].shape == (1, 8)


def test_a_version_a_chain_and_awaited_registrations_over_a_kill(
    revived: Revived, tmp_path: Path
) -> None:
    module, other = mlp(8, 1, 3), mlp(8, 1, 4)
    save_file(
        {name: one.clone() for name, one in other.state_dict().items()}, tmp_path / "v2.safetensors"
    )
    x = torch.ones(1, 8)

    async def awaited() -> None:
        async with AsyncClient(revived.running.ipc_address, timeout_s=100) as client:
            (revived.points / "upload.write").write_text("crash")
            await client.register("m", module, example_inputs=(x,))

    asyncio.run(awaited())
    until(lambda: revived.lives == 2, "the server was killed")
    with Client(revived.running.ipc_address, timeout_s=100) as client:
        (revived.points / "journal.write").write_text("crash")
        client.register("m", as_version=True, weights=tmp_path / "v2.safetensors")
        assert is_bit_equal(client.infer("m", x)["y"], eager(other, x))
        (revived.points / "journal.written").write_text("crash")
        client.register_chain("c", ["m"])
        until(lambda: client.show("c")["state"] == "ready", "its models are restored")
        assert is_bit_equal(client.infer("c", x)["y"], eager(other, x))
        until(lambda: revived.lives == 4, "the server was killed")
