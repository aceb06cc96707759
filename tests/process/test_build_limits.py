"""A build that never ends or takes all memory affects only its own registration."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

import pipeswitch as ps
from pipeswitch.testing import server

SOURCE = """
import torch

def endless():
    while True:
        pass

def greedy():
    return torch.nn.Linear(1 << 16, 1 << 14)  # 4 GiB

def small():
    return torch.nn.Linear(4, 4)
"""
INPUTS = {"x": ((1, 4), "float32")}


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "limited.py").write_text(SOURCE)
    return {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}


def test_a_build_has_a_limit_of_time_and_of_memory(environment: dict[str, str]) -> None:
    limits = {
        "PIPESWITCH_WORKERS__BUILD_TIMEOUT": "15s",
        "PIPESWITCH_WORKERS__BUILD_MEMORY": "1GiB",
    }
    with server(environment={**environment, **limits}) as running, running.client() as client:
        with pytest.raises(ps.RegistrationRefused, match="memory"):
            client.register("greedy", "limited:greedy", inputs=INPUTS)
        with pytest.raises(ps.RegistrationRefused, match="build_timeout"):
            client.register("endless", "limited:endless", inputs=INPUTS)
        assert client.register("small", "limited:small", inputs=INPUTS)["mode"] == "graph"


def test_an_endless_build_keeps_no_other_client_out_and_its_owner_ends_it(
    environment: dict[str, str],
) -> None:
    with server(environment=environment) as running, running.client() as enemy:
        begun, refused = threading.Event(), []

        def register() -> None:
            try:
                enemy.register(
                    "endless", "limited:endless", inputs=INPUTS, progress=lambda *_: begun.set()
                )
            except ps.PipeSwitchError as error:
                refused.append(error)

        registering = threading.Thread(target=register)
        registering.start()
        assert begun.wait(60)
        with running.client() as friend:
            assert friend.register("small", "limited:small", inputs=INPUTS)["mode"] == "graph"
            assert friend.unregister("endless")["model"] == "endless"
            registering.join(60)
            assert [type(error) for error in refused] == [ps.Cancelled]
            assert [row["name"] for row in friend.models()] == ["small"]
