"""Whatever is wrong with a request: one clear typed error, and nothing else is disturbed."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from process_tools import Checked, checked_server, eager, is_bit_equal, mlp

from pipeswitch.errors import (
    AlreadyExists,
    HostStoreFull,
    InvalidInput,
    OutOfDeviceMemory,
    RegistrationRefused,
    TaskFailed,
)

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


@pytest.mark.parametrize(
    ("inputs", "says"),
    [
        (torch.zeros(1, 16, dtype=torch.float64), r"expects float32\[.*16\], got float64"),
        (torch.zeros(1, 17), r"expects float32\[.*16\], got float32\[1,17\]"),
        (torch.zeros(16), r"got float32\[16\]"),
        (torch.zeros(1, 16, 1), r"got float32\[1,16,1\]"),
        (torch.zeros(0, 16), r"got float32\[0,16\]|batch"),
        (torch.zeros(1_000, 16), r"1000|batch"),
        ({"z": torch.zeros(1, 16)}, r'no input "z"'),
        ({}, r'"?x"?'),
        ([torch.zeros(1, 16), torch.zeros(1, 16)], r"2"),
    ],
    ids=["dtype", "shape", "rank-1", "rank-3", "no-rows", "rows", "name", "missing", "too-many"],
)
def test_inputs_that_do_not_fit_are_refused_with_what_would(
    running: Checked, inputs: Any, says: str
) -> None:
    before = running.count("inferences")
    with pytest.raises(InvalidInput, match=says):
        running.client.infer("good", inputs)
    assert running.count("inferences") == before  # it never reached a worker


def test_what_is_over_the_limit_of_a_message_is_not_sent_and_cuts_no_connection(
    running: Checked,
) -> None:
    huge = np.broadcast_to(np.float32(0), (257, 1 << 18))
    with pytest.raises(InvalidInput, match=r"over the limit of 268435456 .*max_message"):
        running.client.infer("good", huge)


def test_inputs_by_place_and_by_name_are_not_chosen_among(running: Checked) -> None:
    with pytest.raises(InvalidInput, match=r"by place and by name \(x\)"):
        running.client.infer("good", X, x=-X)


# ------------------------------------------------------------------------------- registrations


def register(running: Checked, name: str, made: torch.nn.Module, x: torch.Tensor = X) -> Any:
    return running.client.register(name, made, example_inputs=(x,))


def test_a_model_larger_than_the_arena_is_refused_with_both_sizes(running: Checked) -> None:
    wide = mlp(1024, 5, 2)  # 20 MiB
    with pytest.raises(OutOfDeviceMemory) as caught:
        register(running, "wide", wide, torch.zeros(1, 1024))
    assert caught.value.requested_bytes > caught.value.largest_free_bytes > 0
    assert re.search(r"[0-9.]+ MiB.*[0-9.]+ MiB", str(caught.value))


def test_a_full_store_refuses_and_a_freed_one_accepts(running: Checked) -> None:
    x = torch.zeros(1, 1024)
    register(running, "first", mlp(1024, 3, 3), x)  # 12 MiB each
    register(running, "second", mlp(1024, 3, 4), x)
    with pytest.raises(HostStoreFull) as caught:
        register(running, "third", mlp(1024, 3, 5), x)
    assert caught.value.requested_bytes > caught.value.largest_free_bytes
    running.client.unregister("first")
    register(running, "third", mlp(1024, 3, 5), x)
    for name in ("second", "third"):
        running.client.unregister(name)


def test_a_taken_name_is_refused_and_the_same_model_again_is_no_news(
    running: Checked, module: torch.nn.Module
) -> None:
    register(running, "good", module, torch.zeros(1, 16))
    with pytest.raises(AlreadyExists, match="good"):
        register(running, "good", mlp(16, 2, 99), torch.zeros(1, 16))


@pytest.mark.parametrize(
    ("source", "weights", "says"),
    [
        ("torchvision:resnet1888", "random:0", "resnet18"),
        ("torchvision:resnet18", "", "weights"),
        ("torchvision:resnet18", "random:many", "random"),
        ("hub:resnet-18", "random:0", "torchvision:"),
        ("put:" + "0" * 64, "", "upload|put|bundle"),
    ],
    ids=["unknown", "no-weights", "bad-seed", "bad-scheme", "never-uploaded"],
)
def test_a_source_that_is_none_is_refused(
    running: Checked, source: str, weights: str, says: str
) -> None:
    with pytest.raises((RegistrationRefused, InvalidInput), match=says):
        running.client.register("bad", source, weights=weights)


class Branches(torch.nn.Module):
    """Its way depends on its data: it cannot be exported, and there is no submodule to hook."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1 if bool(x.sum() > 0) else x - 1


class Counts(torch.nn.Module):
    """Changes a buffer whenever it answers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(16, 16)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        out: torch.Tensor = self.linear(x) + self.calls
        return out


class Sees(torch.nn.Module):
    """Reaches past its tensor: an operator that is outside the list."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_strided(self.linear(x), (4, 4), (4, 1))


class Draws(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand_like(x)


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (Branches(), r"(?i)export|control flow|data"),
        (Counts(), r"calls"),
        (Sees(), r"as_strided"),
        (Draws(), r"rand"),
    ],
    ids=["data-dependent", "mutates-a-buffer", "as_strided", "random"],
)
def test_a_module_that_cannot_be_served_is_refused_with_the_reason(
    running: Checked, made: torch.nn.Module, says: str
) -> None:
    with pytest.raises(RegistrationRefused, match=says):
        register(running, "bad", made.eval())


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


# ------------------------------------------------------------------------------- code, and jobs


def test_a_script_that_does_not_exist_is_refused_at_once(running: Checked, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"nowhere\.py"):
        running.client.train(tmp_path / "nowhere.py")


def test_a_module_that_does_not_exist_fails_the_job(running: Checked) -> None:
    task = running.client.train("no_such_package.here:main")
    with pytest.raises(TaskFailed, match="no_such_package"):
        task.wait(20)


def test_a_factory_that_raises_or_returns_nonsense_is_refused(running: Checked) -> None:
    for source in ("os:getcwd", "os:no_such_thing", "json:dumps"):
        with pytest.raises(RegistrationRefused, match=source.split(":")[0]):
            running.client.register(
                "bad", source, weights="random:0", inputs={"x": ((1, 4), "float32")}
            )


# ------------------------------------------------------------------------------- garbage


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"\xff" + b"\x00" * 8 + b"\x7f" + b"\xff" * 200,
        b"\x00" * 4096,
        bytes(range(256)) * 64,
        b"",
    ],
    ids=["http", "half-a-handshake", "zeros", "noise", "nothing"],
)
def test_raw_bytes_on_the_port_disturb_nobody(running: Checked, said: bytes) -> None:
    host, port = running.running.tcp_address.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as sock:
        sock.sendall(said)
        assert running.client.infer("good", X)["y"].shape == (1, 16)


# ------------------------------------------------------------------------------- other servers


def serve_once(tmp_path: Path, *args: str) -> tuple[int, str]:
    """Run a server that cannot start; its status and what it said."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", "from pipeswitch.cli.main import main; main()", "serve",
         "--device", "cpu", "--arena", "16MiB", "--host-store", "32MiB", *args],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
        check=False,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def test_a_second_server_on_the_same_state_directory_is_refused(
    running: Checked, tmp_path: Path
) -> None:
    state = str(running.running.state_dir)
    status, said = serve_once(tmp_path, "--listen", "tcp://127.0.0.1:0", "--state-dir", state)
    assert status == 1
    assert str(running.pid) in said
    assert "Traceback" not in said
