"""``make gpu`` without a GPU: every stage's program starts, limits hold, results stay."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from process_tools import command_of, until

from benchmarks import gpu

ROOT = Path(__file__).resolve().parents[2]
FAKES = ROOT / "tests/fakes"


def command(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", *words], cwd=ROOT,
        env={**os.environ, **environment}, capture_output=True, text=True, timeout=250,
    )  # fmt: skip


@pytest.mark.slow  # ten processes that import torch; it fails when a stage is renamed, if ever
def test_a_dry_run_starts_every_stage_and_each_says_that_it_needs_a_gpu() -> None:
    done = command("--dry-run", PIPESWITCH_DEVICE__BINDINGS="fake_cuda", CUDA_FAKE="no-device")
    assert done.returncode == gpu.NEEDS_A_GPU, done.stdout + done.stderr
    for stage in gpu.STAGES:
        after = done.stdout.split(f"== {stage.name} ")[1].split("== ")[0]
        assert "needs a GPU after" in after, stage.name
        assert "needs: needs a GPU: the NVIDIA driver is loaded, but shows this" in after


def test_without_a_gpu_the_command_ends_after_its_first_stage(tmp_path: Path) -> None:
    done = command(
        "--out", str(tmp_path), PIPESWITCH_DEVICE__BINDINGS="fake_cuda", CUDA_FAKE="no-driver"
    )
    assert done.returncode == gpu.NEEDS_A_GPU
    assert done.stdout.count("== ") == 1
    (written,) = tmp_path.glob("gpu-none-*.json")
    assert json.loads(written.read_text())["stages"][0]["status"] == "needs a GPU"


@pytest.mark.soak
def test_switches_and_soak_run_over_a_fake_gpu(tmp_path: Path) -> None:
    """The stages' own code, with servers and baselines; the numbers mean nothing."""
    done = command(
        "--dry-run", "environment", "switch-resnet152", "soak",
        PIPESWITCH_DEVICE__BINDINGS="fake_cuda", CUDA_FAKE_BYTES=str(8 << 30),
        TMPDIR=str(tmp_path), PYTHONPATH=str(FAKES),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "is_correct: True" in done.stdout
    assert "is_clean: True" in done.stdout
    assert "captures_refused: []" in done.stdout


def stage(tmp_path: Path, limit_s: float, code: str) -> object:
    program = tmp_path / "stage.py"
    program.write_text(code)
    return gpu.Stage("a-stage", limit_s, (str(program),))


def test_a_stage_that_hangs_is_ended_with_its_children_and_what_it_found_stays(
    tmp_path: Path,
) -> None:
    code = """
import subprocess, sys
print('RESULT {"found": 1}', flush=True)
child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
print('RESULT {"pid": %d}' % child.pid, flush=True)
child.wait()
"""
    outcome = gpu.run_stage(stage(tmp_path, 3.0, code), 100.0, dict(os.environ))
    assert outcome.status == "timed out"
    assert outcome.first("found") == 1
    pid = outcome.first("pid")
    until(lambda: not command_of(pid), "the child of a killed stage is gone")


def test_a_stage_that_fails_shows_its_last_words_and_the_next_one_runs(tmp_path: Path) -> None:
    broken = stage(tmp_path, 30.0, "raise ValueError('no such kernel')")
    status = gpu.run_all([broken, broken], tmp_path, 60.0, stops_early=True)
    assert status == 1
    (written,) = tmp_path.glob("gpu-none-*.json")
    stages = json.loads(written.read_text())["stages"]
    assert [s["status"] for s in stages] == ["failed", "failed"]
    assert "no such kernel" in stages[0]["tail"]
    (table,) = tmp_path.glob("gpu-none-*.md")
    assert "no such kernel" in table.read_text()


def test_what_left_the_stages_process_group_is_ended_and_its_log_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a server's fork server and daemon: the next stage needs the device that they hold."""
    monkeypatch.setattr(gpu, "LEAVE_S", 0.2)
    code = """
import pathlib, subprocess, sys, tempfile
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"],
                         stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                         stderr=subprocess.DEVNULL, start_new_session=True)
print('RESULT {"pid": %d}' % child.pid, flush=True)
log = pathlib.Path(tempfile.mkdtemp(prefix="pipeswitch-", dir="/tmp"), "state", "processes.log")
log.parent.mkdir()
log.write_text("the daemon's last words")
print('RESULT {"folder": "%s"}' % log.parent.parent, flush=True)
sys.exit(1)
"""
    outcome = gpu.run_stage(stage(tmp_path, 30.0, code), 100.0, dict(os.environ))
    shutil.rmtree(outcome.first("folder"))
    assert outcome.status == "failed"
    assert [word.split()[0] for word in outcome.first("processes_that_had_to_be_killed")] == [
        str(outcome.first("pid"))
    ]
    until(lambda: not command_of(outcome.first("pid")), "it is gone")
    assert "the daemon's last words" in outcome.tail


def test_no_stage_is_begun_when_the_time_is_over(tmp_path: Path) -> None:
    fine = stage(tmp_path, 30.0, "pass")
    gpu.run_all([fine], tmp_path, gpu.LEAST_S / 2, stops_early=True)
    (written,) = tmp_path.glob("gpu-none-*.json")
    assert json.loads(written.read_text())["stages"][0]["status"] == "skipped"


def test_a_devices_name_becomes_part_of_the_files(tmp_path: Path) -> None:
    report = gpu.Report(tmp_path, "a command")
    found = {"device": {"name": "NVIDIA H200"}}
    report.add(gpu.Outcome("environment", "ok", results=[found]))
    times = {"p50": 1.0, "p99": 2.0, "min": 0.5, "n": 3}
    rows = [
        {"case": "r/8", "arm": "cold", "total_ms": times},
        {"case": "r/8", "cold_over_ready": 0.7, "target": 0.8, "link_gb_s": 50.0},
        {"training_tax": 0.004, "target": 0.01},
    ]
    report.add(gpu.Outcome("switch", "ok", results=rows))
    (table,) = tmp_path.glob("gpu-nvidia-h200-*.md")
    text = table.read_text()
    assert "| r/8 | cold | 1.0 | 2.0 | 0.5 | 3 |" in text
    assert "| r/8: cold / ready-eager | 0.7 | 0.8 |" in text
    assert "| training_tax | 0.004 | 0.01 |" in text
