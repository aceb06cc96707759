"""The whole demo: a real server, real training and both baselines, with small models."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from process_tools import COMMAND, command, until

from pipeswitch.extras.demo.run import DemoModel, Plan, run

pytestmark = pytest.mark.slow

HEARING = ("env", "--default-signal=INT")  # a shell's background jobs ignore SIGINT

IMAGE = {"x": ((1, 3, 64, 64), "float32")}
TEXT = {
    "model_type": "bert",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 2000,
}
SMALL = Plan(
    models={
        "resnet18": DemoModel("torchvision:resnet18", IMAGE),
        "resnet34": DemoModel("torchvision:resnet34", IMAGE),
    },
    fast="resnet18",
    arena="112MiB",  # resnet18 (45 MiB) and resnet34 (84 MiB) do not both fit beside the job
    host_store="512MiB",
    requests=8,
    alone_s=0.5,
)


def test_the_demo_fills_its_table_and_loses_no_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TEXT))
    text = DemoModel(f"hf:{tmp_path}", {"input_ids": ((1, 16), "int64")})  # its outputs have names
    plan = replace(SMALL, models={**SMALL.models, "text": text})
    assert run(tmp_path, as_json=True, plan=plan) == 0
    result = json.loads((tmp_path / "demo.json").read_text())
    printed = capsys.readouterr()
    assert json.loads(printed.out) == result
    assert "stop-and-start" in printed.err
    assert result["problems"] == []
    fast = result["fast"]["pipeswitch"]["count"]
    assert fast == result["ready_model_in_fast_turns"]["count"] == SMALL.requests / 4
    assert result["pipeswitch"]["count"] == result["ready_model"]["count"] == SMALL.requests - fast
    assert result["stop_and_start"]["count"] == len(plan.models)
    assert result["pipeswitch"]["resident_count"] < SMALL.requests, "no model was switched in"
    assert result["pipeswitch"]["preempted_count"] > 0
    assert result["fast"]["largest_error"] < 1e-3
    training = result["training"]
    assert (training["state"], training["steps_lost"]) == ("done", 0)
    assert training["suspensions"] > 0
    assert training["accuracy_percent"] > 50.0, "it learned: guessing would be 10"
    trace = json.loads((tmp_path / "demo-timeline.json").read_text())
    assert any("resnet34 group" in event["name"] for event in trace["traceEvents"])


@pytest.fixture
def folder() -> Iterator[Path]:
    """Yield a folder with a short path, because pytest's paths are too long for sockets."""
    with tempfile.TemporaryDirectory(prefix="psw-") as name:
        yield Path(name)


def test_control_c_in_the_middle_leaves_no_process_and_no_file_behind(folder: Path) -> None:
    demo = subprocess.Popen(
        [*HEARING, *COMMAND, "demo", "--out", str(folder / "out")],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "TMPDIR": str(folder)},
        start_new_session=True,
    )
    try:
        for line in demo.stdout:
            if "✔ device" in line:
                break
        family = psutil.Process(demo.pid).children(recursive=True)
        assert len(family) >= 4, "server, fork server, daemon, workers"
        os.killpg(demo.pid, signal.SIGINT)  # a terminal, too, signals the whole group
        rest, _ = demo.communicate(timeout=60)
        assert demo.returncode == 130, rest
        _, alive = psutil.wait_procs(family, timeout=10)
        assert alive == []
        assert not list(folder.glob("pipeswitch*")), "its folders are gone"
    finally:
        demo.kill()
        demo.wait()
        if demo.stdout is not None:
            demo.stdout.close()


def test_a_folder_that_cannot_be_written_is_said_before_anything_starts(tmp_path: Path) -> None:
    file = tmp_path / "taken"
    file.write_text("")
    ended = command("demo", "--out", str(file / "below"))
    assert ended.returncode == 1
    assert "cannot write to" in ended.stderr
    assert "Traceback" not in ended.stderr


SHOW = """
import sys
from pipeswitch.extras.demo.run import DemoModel, Plan, show

image = {"x": ((1, 3, 64, 64), "float32")}
models = {name: DemoModel(f"torchvision:{name}", image) for name in ("resnet18", "resnet34")}
sys.exit(show(Plan(models=models, arena="112MiB", host_store="512MiB")))
"""


def test_the_demo_that_is_looked_at_serves_until_control_c(folder: Path) -> None:
    demo = subprocess.Popen(
        [*HEARING, sys.executable, "-P", "-c", SHOW],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "TMPDIR": str(folder), "BROWSER": "true"},
        start_new_session=True,
    )
    try:
        url = next(line.strip() for line in demo.stdout if "#token=" in line)
        page, _, token = url.partition("#token=")
        request = urllib.request.Request(
            page.replace("/ui", "/api/jobs"), headers={"Authorization": f"Bearer {token}"}
        )

        def suspensions() -> int:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return int(json.load(answer)["jobs"][0]["suspensions"])

        until(lambda: suspensions() > 1, "training is suspended, again and again")
        os.killpg(demo.pid, signal.SIGINT)
        assert demo.wait(60) == 130
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(demo.pid, signal.SIGKILL)
        demo.wait()
        demo.stdout.close()
