"""``make gpu`` without a GPU: every stage starts, time limits hold, results are saved."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from process_tools import command_of, until

from benchmarks import gpu
from benchmarks.gpu_mechanisms import MECHANISMS
from pipeswitch.devices.cuda.ladder import REQUIRED

ROOT = Path(__file__).resolve().parents[2]
FAKES = ROOT / "tests/fakes"


def command(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", *words],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=250,
    )


@pytest.mark.slow  # ten processes that import torch; it fails only if a stage is renamed
def test_a_dry_run_starts_every_stage_and_each_says_that_it_needs_a_gpu() -> None:
    done = command("--dry-run", PIPESWITCH_CUDA_BINDINGS="fake_cuda", CUDA_FAKE="no-device")
    assert done.returncode == gpu.NEEDS_A_GPU, done.stdout + done.stderr
    for stage in gpu.STAGES:
        after = done.stdout.split(f"== {stage.name} ")[1].split("== ")[0]
        if stage.name == "facts":
            continue
        assert "needs a GPU after" in after, stage.name
        assert "needs: needs a GPU: the NVIDIA driver is loaded, but shows this" in after


@pytest.mark.parametrize("has_nodes", [False, True])
def test_a_machine_without_a_gpu_is_told_from_one_whose_gpu_cannot_be_had(
    tmp_path: Path, has_nodes: bool
) -> None:
    """Inject a fault, with and without device nodes of a GPU: only without them, it needs a GPU."""
    nodes = tmp_path / "dev"
    nodes.mkdir()
    if has_nodes:
        (nodes / "nvidia0").touch()
    done = command(
        "--out",
        str(tmp_path),
        PIPESWITCH_CUDA_BINDINGS="fake_cuda",
        CUDA_FAKE="no-driver",
        PIPESWITCH_GPU_DEV=str(nodes),
    )
    (written,) = tmp_path.glob("gpu-none-*.json")
    statuses = [stage["status"] for stage in json.loads(written.read_text())["stages"]]
    if not has_nodes:
        assert done.returncode == gpu.NEEDS_A_GPU
        assert statuses == ["ok", "needs a GPU"], "it ends there"
        return
    assert done.returncode == 1
    assert "needs a GPU" not in done.stdout
    assert "device_nodes: ['nvidia0']" in done.stdout
    assert "first broken rung: device: no NVIDIA driver on this machine" in done.stdout
    assert statuses == ["ok", "failed", *["not run"] * (len(gpu.STAGES) - 2)]


BEHIND_IPC = {"tensor", "wait-write", "wait-copy", "hold"}
BEHIND_TORCH = {"warm", "slice", "graph", *BEHIND_IPC}
BEHIND_MEMORY = {"pinned", "ipc", "slice", "graph", *BEHIND_IPC}
BROKEN = {  # broken call -> mechanisms that fail (in order), and mechanisms that then cannot run
    "cudaSetDevice=cudaErrorUnknown": (["device", "memory"], BEHIND_MEMORY),
    "cudaMalloc=cudaErrorMemoryAllocation": (["memory"], BEHIND_MEMORY),
    "cudaHostRegister=cudaErrorNotPermitted": (["pinned", "hold"], set()),
    "cudaIpcGetMemHandle=cudaErrorNotSupported": (["ipc"], BEHIND_IPC),
    "cudaIpcOpenMemHandle=cudaErrorOperatingSystem": (["ipc"], BEHIND_IPC),
    "cuStreamWaitValue32=CUDA_ERROR_NOT_SUPPORTED": (["wait-write", "wait-copy", "hold"], set()),
    "cuStreamWriteValue32=CUDA_ERROR_NOT_SUPPORTED": (["wait-write", "hold"], set()),
    "host-wait=ignored": (["hold"], set()),
    "torch=crash": (["torch"], BEHIND_TORCH),
    "warm=cudaErrorUnknown": (["warm"], set()),
    "ipc-tensor=cudaErrorInvalidValue": (["tensor"], BEHIND_IPC - {"tensor"}),
    "slice=cudaErrorMemoryAllocation": (["slice"], set()),
    "capture=hang": (["graph"], set()),
}


@pytest.mark.parametrize(
    "broken",
    [
        pytest.param(name, marks=() if "OpenMemHandle" in name else pytest.mark.slow)
        for name in BROKEN
    ],
)
def test_one_broken_mechanism_is_named_and_hides_nothing_that_does_not_need_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], broken: str
) -> None:
    failed, behind = BROKEN[broken]
    monkeypatch.setenv("PIPESWITCH_CUDA_BINDINGS", "fake_cuda")
    monkeypatch.setenv("CUDA_FAKE_BREAK", broken)
    monkeypatch.setenv("CUDA_FAKE_LEDGER", str(tmp_path / "allocated"))
    stages = [
        stage
        if stage.name == "mechanisms"
        else dataclasses.replace(stage, command=("-c", "pass"))  # only the order is tested
        for stage in gpu.STAGES
    ]
    assert gpu.run_all(stages, tmp_path, gpu.BUDGET_S, stops_early=True) == 1
    (written,) = tmp_path.glob("gpu-*.json")
    outcomes = json.loads(written.read_text())["stages"]
    rows = [row for stage in outcomes for row in stage["results"] if "mechanism" in row]
    outcome_by_name = {row["mechanism"]: row["outcome"] for row in rows}
    expected = {
        name: "FAILED" if name in failed else "not run" if name in behind else "ok"
        for name in MECHANISMS
    }
    assert outcome_by_name == expected, rows
    assert f"first broken rung: {failed[0]}: " in capsys.readouterr().out
    bad = {*failed, *behind}
    for stage, outcome in zip(stages, outcomes, strict=True):
        if stage.name != "mechanisms":
            lacks = [name for name in stage.needs if name in bad]
            assert outcome["status"] == ("not run" if lacks else "ok"), stage.name
            assert outcome["tail"] == (f"needs {', '.join(lacks)}" if lacks else "")


def test_stages_need_what_servers_need() -> None:
    assert ("device", *REQUIRED) == gpu.SERVED
    assert {need for stage in gpu.STAGES for need in stage.needs} <= {*MECHANISMS}


@pytest.mark.soak
def test_switches_and_soak_run_over_a_fake_gpu(tmp_path: Path) -> None:
    """Run the code of the stages, with servers and baselines; the numbers are meaningless."""
    done = command(
        "--dry-run",
        "facts",
        "mechanisms",
        "link",
        "switch-resnet152",
        "precision",
        "soak",
        PIPESWITCH_CUDA_BINDINGS="fake_cuda",
        CUDA_FAKE_BYTES=str(8 << 30),
        CUDA_FAKE_LEDGER=str(tmp_path / "allocated"),
        TMPDIR=str(tmp_path),
        PYTHONPATH=str(FAKES),
    )
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
    """End a stage's remaining processes, such as a daemon, because the next stage needs the GPU."""
    monkeypatch.setattr(gpu, "LEAVE_S", 0.2)
    code = """
import pathlib, subprocess, sys, tempfile
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"],
                         stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                         stderr=subprocess.DEVNULL, start_new_session=True)
print('RESULT {"pid": %d}' % child.pid, flush=True)
log = pathlib.Path(tempfile.mkdtemp(prefix="pipeswitch-"), "state", "processes.log")
log.parent.mkdir()
log.write_text("the daemon's last words")
sys.exit(1)
"""
    outcome = gpu.run_stage(stage(tmp_path, 30.0, code), 100.0, dict(os.environ))
    assert outcome.status == "failed"
    assert [word.split()[0] for word in outcome.first("processes_that_had_to_be_killed")] == [
        str(outcome.first("pid"))
    ]
    until(lambda: not command_of(outcome.first("pid")), "it is gone")
    assert "the daemon's last words" in outcome.tail


def test_no_stage_is_begun_when_the_time_is_over(tmp_path: Path) -> None:
    fine = stage(tmp_path, 30.0, "pass")
    gpu.run_all([fine], tmp_path, gpu.MIN_S / 2, stops_early=True)
    (written,) = tmp_path.glob("gpu-none-*.json")
    assert json.loads(written.read_text())["stages"][0]["status"] == "not run"


def test_a_devices_name_becomes_part_of_the_files(tmp_path: Path) -> None:
    report = gpu.Report(tmp_path, "a command")
    document = {"device": {"name": "NVIDIA H200"}}
    report.add(gpu.Outcome("environment", "ok", results=[document]))
    times = {"p50": 1.0, "p90": 2.0, "max": 3.0, "min": 0.5, "n": 3}
    rows = [
        {"case": "r/8", "arm": "cold", "total_ms": times},
        {
            "case": "r/8",
            "cold_over": {"ready-eager": 0.7, "ready-graph": 2.0},
            "target": 0.8,
            "link_gb_s": 50.0,
        },
        {"training_tax": 0.004, "target": 0.01},
    ]
    report.add(gpu.Outcome("switch", "ok", results=rows))
    (table,) = tmp_path.glob("gpu-nvidia-h200-*.md")
    text = table.read_text()
    assert "| r/8 | cold | 1.0 | 2.0 |  | 3.0 | 0.5 | 3 |" in text
    assert "| r/8: cold / ready-graph | 2.0 |  |" in text
    assert "| r/8: cold / ready-eager | 0.7 | 0.8 |" in text
    assert "| training_tax | 0.004 | 0.01 |" in text
