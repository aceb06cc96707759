"""Bad requests: each gets one clear typed error, and nothing else is affected."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from process_tools import Checked, checked_server, command, eager, is_bit_equal, mlp

from pipeswitch.base.errors import InvalidInput, RegistrationRefused, TaskFailed

X = torch.linspace(-1, 1, 16).reshape(1, 16)


@pytest.fixture(scope="module")
def module() -> torch.nn.Module:
    return mlp(16, 2, 1)


@pytest.fixture(scope="module")
def running(module: torch.nn.Module) -> Iterator[Checked]:
    with checked_server(arena="16MiB", host_store="32MiB") as checked:
        checked.client.register("good", module, example_inputs=(torch.zeros(1, 16),))
        yield checked


@pytest.fixture(autouse=True)
def _good_requests_before_and_after(running: Checked, module: torch.nn.Module) -> Iterator[None]:
    expected = eager(module, X)
    restarts = running.count("worker_restarts")
    assert is_bit_equal(running.client.infer("good", X)["y"], expected)
    yield
    assert is_bit_equal(running.client.infer("good", X)["y"], expected)
    stats = running.settle()
    assert stats["worker_restarts"] == restarts
    assert stats["daemon_restarts"] == 0
    assert [m["name"] for m in running.client.models() if m["state"] == "ready"] == ["good"]


# ------------------------------------------------------------------------------- requests


def test_what_is_over_the_limit_of_a_message_is_not_sent_and_cuts_no_connection(
    running: Checked,
) -> None:
    huge = np.broadcast_to(np.float32(0), (257, 1 << 18))
    with pytest.raises(InvalidInput, match=r"exceed the limit of 268435456 .*max_message"):
        running.client.infer("good", huge)


def test_inputs_by_place_and_by_name_are_not_chosen_among(running: Checked) -> None:
    with pytest.raises(InvalidInput, match=r'takes 1 inputs \("x"\), got 2'):
        running.client.infer("good", X, x=-X)


# ------------------------------------------------------------------------------- registrations


def register(running: Checked, name: str, network: torch.nn.Module, x: torch.Tensor = X) -> Any:
    return running.client.register(name, network, example_inputs=(x,))


def test_weights_of_another_model_are_refused(running: Checked, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"conv1.weight": torch.zeros(3, 3)}, tmp_path / "w.safetensors")
    with pytest.raises(RegistrationRefused, match=r"weights|conv1"):
        running.client.register(
            "bad", "torchvision:shufflenet_v2_x0_5", weights=tmp_path / "w.safetensors"
        )
    (tmp_path / "w.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises((RegistrationRefused, InvalidInput)):
        running.client.register(
            "bad", "torchvision:shufflenet_v2_x0_5", weights=tmp_path / "w.safetensors"
        )


# ------------------------------------------------------------------------------- code and jobs


def test_a_module_that_does_not_exist_fails_the_job(running: Checked) -> None:
    task = running.client.train("no_such_package.here:main")
    with pytest.raises(TaskFailed, match="no_such_package"):
        task.wait(60)


def test_a_factory_that_raises_or_returns_nonsense_is_refused(running: Checked) -> None:
    for source in ("os:getcwd", "os:no_such_thing", "json:dumps"):
        with pytest.raises(RegistrationRefused, match=source.split(":")[0]):
            running.client.register(
                "bad", source, weights="random:0", inputs={"x": ((1, 4), "float32")}
            )


# ------------------------------------------------------------------------------- other servers


def test_a_second_server_on_the_same_state_directory_is_refused(
    running: Checked, tmp_path: Path
) -> None:
    words = "--device=cpu", "--arena=16MiB", "--host-store=32MiB", "--listen=tcp://127.0.0.1:0"
    done = command("serve", *words, "--state-dir", str(running.running.state_dir), cwd=tmp_path)
    assert done.returncode == 1
    assert str(running.pid) in done.stderr
    assert "Traceback" not in done.stderr
