"""The baselines of the benchmarks with a tiny model: real processes, equal answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.__main__ import NAMES
from benchmarks.baselines import BASELINES
from benchmarks.models import BenchModel
from benchmarks.rig import Rig
from benchmarks.rival import PUBLISHED, Rival
from benchmarks.setting import Setting

TEXT = {
    "model_type": "bert",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 2000,
}
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def found_by_children():
    """Let child processes import the benchmarks' package, like ``python -m benchmarks``."""
    with pytest.MonkeyPatch.context() as changes:
        changes.setenv("PYTHONPATH", str(Path(__file__).parents[2]), prepend=os.pathsep)
        yield


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    """Return the setting of a model that returns a mapping, like transformers' models."""
    folder = tmp_path_factory.mktemp("bench")
    (folder / "config.json").write_text(json.dumps(TEXT))
    model = BenchModel("tiny", f"hf:{folder}", 1 << 20, {"input_ids": ((4, 16), "int64")})
    setting_made = Setting(model, folder, threads=1, seed=0)
    setting_made.write_files()
    return setting_made


@pytest.fixture(scope="module")
def expected(setting):
    """Return the checksum of the ready model's answer."""
    ready = BASELINES["ready"](setting)
    try:
        return ready.measure()["checksum"]
    finally:
        ready.close()


@pytest.mark.parametrize("name", [name for name in BASELINES if name != "ready"])
def test_every_baseline_preempts_training_and_answers_like_the_ready_model(setting, expected, name):
    baseline = BASELINES[name](setting)
    try:
        for _ in range(2):
            baseline.prepare()
            assert baseline.measure()["checksum"] == pytest.approx(expected, rel=1e-5)
    finally:
        baseline.close()


def test_the_published_behaviour_sends_all_weights_on_each_request(setting, expected):
    rival = Rival(setting, PUBLISHED)
    try:
        rival.prepare()
        first, second = rival.measure(), rival.measure()  # the second preempts no training
    finally:
        rival.close()
    assert min(first["copy_ms"], second["copy_ms"]) > 0.0
    assert first["acknowledge_ms"] > second["acknowledge_ms"]
    assert second["checksum"] == pytest.approx(expected, rel=1e-5)


def test_the_rig_answers_alike_however_a_model_is_cut_and_sent(setting, expected):
    rig = Rig(setting)
    try:
        for plan in ((0,), (0, 1, 2), (0, 2)):
            rig.set_plan(plan)
            rig.prefault()
            switches = [
                rig.switch(plan),
                rig.switch(plan, is_pipelined=False),
                rig.switch(plan, resident=1),
                rig.resident(plan),
            ]
            for switch in switches:
                assert switch.checksum == pytest.approx(expected, rel=1e-5)
                assert len(switch.begins_ms) == len(plan)
                pairs = zip(switch.arrivals_ms, switch.begins_ms, strict=True)
                assert all(arrived <= began for arrived, began in pairs)
        rig.map_arena()  # a new mapping of the same arena, with the same weights
        assert rig.resident((0, 2)).checksum == pytest.approx(expected, rel=1e-5)
    finally:
        rig.close()


def test_the_process_that_measures_never_imports_torch():
    names = ", ".join(f"benchmarks.{name.replace('-', '_')}" for name in NAMES)
    code = f"import sys, {names}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
