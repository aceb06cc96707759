"""Models and listeners in a configuration file: errors end the start, or are shown later."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from process_tools import COMMAND, command, free_port, until

from pipeswitch.base.errors import ServerUnavailable
from pipeswitch.base.model_options import parse_states
from pipeswitch.testing import server

FACTORIES = """
import time
from torch import nn

def slow():
    time.sleep(1)
    return nn.Sequential(nn.Linear(4, 4))

class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
    def forward(self, x, h):
        h_out = self.layer(x) + h
        return {"y": h_out * 2, "h_out": h_out}
"""
MODELS = """
[[model]]
name = "slow"
source = "own_configured:slow"
weights = "random:1"
inputs = ["x=1x4:float32"]

[[model]]
name = "cell"
source = "own_configured:Cell"
weights = "random:1"
inputs = ["x=1x4:float32", "h=1x4:float32"]
state = ["h=h_out"]

[[model]]
name = "typo"
source = "torchvision:resnet5"
weights = "random:1"

[[model]]
name = "forgotten"
source = "torchvision:resnet18"

[[model]]
name = "text"
source = "own_configured:slow"
weights = "random:1"
inputs = ["x=1x4:float32"]
generate = true
"""


def test_ready_comes_after_the_first_attempt_at_each_and_what_failed_is_shown(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own_configured.py").write_text(FACTORIES)
    path = tmp_path / "pipeswitch.toml"
    path.write_text(MODELS)
    environment = {"PYTHONPATH": str(tmp_path)}
    with (
        server(http=True, args=("--config", str(path)), environment=environment) as running,
        running.client() as client,
    ):
        rows = {row["name"]: row for row in client.models()}  # without waiting for them
        assert {name: row["state"] for name, row in rows.items()} == {
            "slow": "ready",
            "cell": "ready",
            "typo": "failed",
            "forgotten": "failed",
            "text": "failed",
        }
        assert "resnet5" in rows["typo"]["reason"]
        assert "needs weights" in rows["forgotten"]["reason"]
        with client.sequence("cell") as sequence:
            x = torch.ones(1, 4)
            first, second = sequence.infer(x)["y"], sequence.infer(x)["y"]
        assert torch.allclose(second, 2 * first)
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(f"http://{running.http_address}/v2/models/typo/ready")
        body = json.loads(refused.value.read())
        assert "is failed" in body["error"]
        assert "[[model]]" in body["hint"]
        for ask in (lambda: client.infer("typo", x), lambda: client.generate("typo", "Once")):
            with pytest.raises(ServerUnavailable, match=r'"typo" is failed: .*resnet5') as failed:
                ask()
            assert failed.value.hint == body["hint"]
        request = urllib.request.Request(f"http://{running.http_address}/v1/completions")
        request.data = b'{"model": "typo", "prompt": "Once"}'
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request)
        answer = refused.value.read()
        assert (b"is failed" in answer, b"resnet5" in answer) == (True, False)  # no operator
        client.register("typo", torch.nn.Linear(4, 4), example_inputs=x)  # its name is still free
        assert client.infer("typo", x).value.shape == (1, 4)


def test_a_changed_entry_of_a_known_model_is_applied_or_reported(tmp_path: Path) -> None:
    path, rows, logs = tmp_path / "pipeswitch.toml", [], []
    entry = '[[model]]\nname = "a"\nsource = "torchvision:squeezenet1_1"\nweights = "random:0"\n'
    options = 'priority = "low"\npin = true\n'
    for text in (entry, entry + options, entry.replace("random:0", "random:1"), entry):
        path.write_text(text)
        with server(args=("--config", str(path)), state_dir=tmp_path / "state") as running:
            with running.client() as client:
                rows.append(client.show("a"))
            logs.append(running.log())
    assert [row["priority"] for row in rows] == ["normal", "low", "low", "low"]
    assert [row["pinned"] for row in rows] == [False, True, True, True], "it is not named now"
    assert len({row["digest"] for row in rows}) == 1
    warnings = ["weights ('random:1', not 'random:0')" in log for log in logs]
    assert warnings == [False, False, True, True], "one log of all four servers"
    notes = ["unregister a first" in str(row["notes"]) for row in rows]
    assert notes == [False, False, True, False]


def test_a_state_is_written_as_the_command_line_does() -> None:
    assert parse_states(["h=h_out", "cache=rows+1"]) == {"h": ("h_out", -1), "cache": ("rows", 1)}


def certificate(folder: Path) -> None:
    run = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "1",
        "-subj",
        "/CN=x",
    ]
    subprocess.run(
        [*run, "-keyout", folder / "key", "-out", folder / "cert"], check=True, capture_output=True
    )


def tokens(folder: Path, mode: int) -> None:
    (folder / "tokens").write_text("me 0123456789abcdef0123 infer\n")
    (folder / "tokens").chmod(mode)


A_MODEL = '[[model]]\nname = "a"\nsource = "x:y"\n'
WRONG: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "a certificate without its key": ('tls_cert = "cert"', certificate, "need each other"),
    "no tokens file": ('tokens = "none"', lambda f: None, "none"),
    "others may read its tokens": ('tokens = "tokens"', lambda f: tokens(f, 0o644), "tokens"),
    "open to all": ('http = "0.0.0.0:8000"', lambda f: None, "need tokens"),
    "a key that is none": (
        'tls_cert = "cert"\ntls_key = "key"',
        lambda f: (certificate(f), (f / "key").write_text("no key")),
        "PEM",
    ),
    "a model's input": (A_MODEL + 'inputs = ["x=0x4"]', lambda f: None, "[[model]] a"),
    "a model's state": (A_MODEL + 'state = ["h"]', lambda f: None, "h=h_out"),
    "a model's batch": (A_MODEL + 'batch_delay = "2ms"', lambda f: None, "batch"),
    "a model's file": (A_MODEL.replace("x:y", "no.bundle"), lambda f: None, "no.bundle"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_check_finds_what_serve_would_refuse(name: str, tmp_path: Path) -> None:
    text, prepare, text_expected = WRONG[name]
    prepare(tmp_path)
    path = tmp_path / "p.toml"
    path.write_text(f"[gateway]\n{text}\n" if "model" not in text else f"{text}\n")
    done = command("config", "check", str(path), cwd=tmp_path)
    assert done.returncode == 2, done.stdout
    assert text_expected in done.stderr.replace("\n", " ")


def test_a_check_names_every_problem_and_passes_a_good_file(tmp_path: Path) -> None:
    certificate(tmp_path)
    tokens(tmp_path, 0o600)
    path = tmp_path / "p.toml"
    doors = '[gateway]\ntls_cert = "cert"\ntls_key = "key"\ntokens = "tokens"\n'
    path.write_text(doors + MODELS)
    (tmp_path / "own_configured.py").write_text(FACTORIES)
    more: dict[str, Any] = {"cwd": tmp_path, "environment": {"PYTHONPATH": str(tmp_path)}}
    done = command("config", "check", str(path), **more)
    assert "[[model]] forgotten: torchvision:resnet18 needs weights" in done.stderr
    assert "[[model]] typo: torchvision has no model" in done.stderr
    assert "own_configured" not in done.stderr
    for wrong in ("torchvision:resnet18", "torchvision:resnet5"):
        path.write_text(path.read_text().replace(wrong, "own_configured:slow"))
    done = command("config", "check", str(path), "--json", **more)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["models"]) == 5
    path.write_text('[gateway]\ntls_cert = "cert"\n[[model]]\nname = "a"\nsource = "no.bundle"')
    done = command("config", "check", str(path), cwd=tmp_path)
    assert "need each other" in done.stderr
    assert "[[model]] a" in done.stderr


HELD = """
import os, time
from torch import nn

def held():
    while not os.path.exists(os.environ["HELD_UNTIL"]):
        time.sleep(0.01)
    return nn.Sequential(nn.Linear(4, 4))
"""


def test_a_start_says_everywhere_which_model_it_builds(tmp_path: Path) -> None:
    (tmp_path / "own_configured.py").write_text(HELD)
    model = '[[model]]\nname = "{}"\nsource = "own_configured:held"\nweights = "random:1"\n'
    model += 'inputs = ["x=1x4:float32"]\n'
    (tmp_path / "pipeswitch.toml").write_text("".join(map(model.format, ("one", "two"))))
    tcp, http = (free_port() for _ in range(2))
    held_until, where = tmp_path / "go", ["--host", f"tcp://127.0.0.1:{tcp}"]
    args = ["--listen", where[1], "--http", f"127.0.0.1:{http}", "--state-dir", str(tmp_path / "s")]
    environment = {
        "PYTHONPATH": str(tmp_path),
        "HELD_UNTIL": str(held_until),
        "NOTIFY_SOCKET": str(tmp_path / "notify"),
        "XDG_RUNTIME_DIR": str(tmp_path),
    }
    words = re.compile(r"building 1 of 2: one \(\w+, \d+ s\)")

    def body() -> str:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{http}/v2/health/ready") as answer:
                return str(answer.read())
        except urllib.error.HTTPError as refused:
            return str(json.loads(refused.read())["error"])
        except OSError:
            return ""

    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(environment["NOTIFY_SOCKET"])
        manager.settimeout(60)
        serve = subprocess.Popen(
            [*COMMAND, "serve", "--device", "cpu", "--arena", "64MiB", *args],
            cwd=tmp_path,
            env=os.environ | environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        try:
            until(lambda: words.search(body()), "the health endpoint says it")
            early = command(*where, "ping", "--wait", "1s")
            assert (early.returncode, bool(words.search(early.stdout))) == (1, True), early
            assert words.search(early.stderr), early
            while not words.search(told := manager.recv(4000).decode()):
                pass
            assert "EXTEND_TIMEOUT_USEC=" in told
            held_until.touch()
            assert command(*where, "ping", "--wait", "2m").returncode == 0
            assert "true" in body()
        finally:
            serve.send_signal(signal.SIGTERM)
            output, errors = serve.communicate(timeout=60)
    assert words.search(errors)
    assert "is ready" in output
