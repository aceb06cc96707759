"""Calculations of ``python -m benchmarks``."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
import pytest

from benchmarks import child, foreign, gateway
from benchmarks.__main__ import run
from benchmarks.gateway import infer_message
from benchmarks.train_script import REPLAYS, replay_ms
from benchmarks.trials import Arm, Run, interleave
from pipeswitch.base.errors import InvalidInput
from pipeswitch.base.quantiles import quantile
from pipeswitch.extras.grpc.protos import INFERENCE

FACTS = {"device": "cpu", "torch": "2.15.0", "commit": "0123456789ab"}


def test_arms_take_turns_and_the_warm_up_is_not_told():
    calls: list[str] = []

    def arm(name: str, **options: int) -> Arm:
        return Arm(name, lambda: calls.append(name) or {}, **options)

    arms = [arm("a"), arm("b"), arm("slow", every=2, warms_up=False)]
    rounds = [(each.name, number) for each, number, _ in interleave(arms, 3, warmup=1)]
    assert calls == ["a", "b", "a", "b", "slow", "a", "b", "a", "b", "slow"]
    assert rounds == [(name, n) for n in range(3) for name in ("a", "b", "slow")[: 3 - n % 2]]


def test_quantiles_are_interpolated():
    assert quantile([4.0, 1.0, 3.0, 2.0], 0.5) == 2.5
    assert quantile([7.0], 0.99) == 7.0


def test_each_trial_is_one_json_line_with_the_machine_in_it():
    lines: list[str] = []
    bench = Run("switch", "python -m benchmarks switch", True, 3, True, lines.append, FACTS)
    bench.record("m", "cold", 0, {"total_ms": 2.0})
    bench.say("progress is for people")
    (line,) = lines
    trial = json.loads(line)
    assert trial["arm"] == "cold"
    assert {"device", "torch", "commit", "seed", "threads"} <= trial.keys()


def test_a_missed_target_is_printed_as_missed():
    bench = Run("switch", "python -m benchmarks switch", True, 0, True, lambda line: None, FACTS)
    bench.record("m", "cold", 0, {"total_ms": 2.0})
    bench.find("ratio", 99.0, at_least=100.0)
    bench.find("other", 0.2, "ms", at_most=0.3)
    assert [finding.is_met for finding in bench.findings] == [False, True]
    assert "| ratio | 99 | ≥ 100 | **no** |" in bench.markdown()
    assert "| m | cold | total_ms | 2.000 | 2.000 | 2.000 | 1 |" in bench.markdown()


def test_an_unknown_benchmark_or_model_is_named():
    with pytest.raises(InvalidInput):
        run(["nonsense"])
    with pytest.raises(InvalidInput):
        run(["switch"], models=["vgg"])


def test_a_folder_that_cannot_be_written_to_is_told_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.import_module", lambda *_: pytest.fail("it measures"))
    with pytest.raises(FileNotFoundError):
        run(["switch"], out=Path("/proc/reports"))


def test_a_benchmarks_child_ends_in_silence_at_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(order: dict[str, str]) -> None:
        raise KeyboardInterrupt

    monkeypatch.setitem(child.VERBS, "ready", interrupted)
    with pytest.raises(SystemExit) as caught:
        child.main("ready", "{}")
    assert caught.value.code == 130


def test_the_gateways_benchmark_asks_what_protobuf_reads() -> None:
    x = np.arange(300, dtype=np.float32).reshape(1, 300)
    message = INFERENCE["ModelInferRequest"].FromString(infer_message("some-model", x, "x"))
    (tensor,) = message.inputs
    assert (message.model_name, tensor.name, tensor.datatype) == ("some-model", "x", "FP32")
    assert list(tensor.shape) == [1, 300]
    assert list(message.raw_input_contents) == [x.tobytes()]


@pytest.mark.parametrize("installed", [(), ("kserve",), gateway.RIVALS])
def test_rivals_that_are_not_installed_are_left_out_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installed: tuple[str, ...]
) -> None:
    for name in installed:
        (tmp_path / "lib/python3.11/site-packages" / name).mkdir(parents=True)
    bench = Run("gateway", "", is_quick=True, seed=0, as_json=True, emit=lambda _: None, facts={})
    usable = partial(foreign.usable, bench, foreign.RIVALS_FOLDER, gateway.RIVALS)
    monkeypatch.delenv(foreign.RIVALS_FOLDER, raising=False)
    assert usable() == []
    monkeypatch.setenv(foreign.RIVALS_FOLDER, str(tmp_path))
    bench.notes.clear()
    assert usable() == list(installed)
    assert [note.partition(":")[0] for note in bench.notes] == [
        name for name in gateway.RIVALS if name not in installed
    ]


def test_a_replayed_step_is_captured_once_and_only_its_replays_are_timed() -> None:
    calls: list[str] = []
    cuda = MagicMock()
    cuda.CUDAGraph.return_value.replay.side_effect = lambda: calls.append("replay")
    events = [MagicMock(), MagicMock()]
    for event, name in zip(events, ("begin", "end"), strict=True):
        event.record.side_effect = lambda name=name: calls.append(name)
    cuda.Event.side_effect = events
    events[0].elapsed_time.return_value = 5.0 * REPLAYS
    assert replay_ms(lambda: calls.append("step"), cuda) == 5.0
    assert calls == [*["step"] * 4, "begin", *["replay"] * REPLAYS, "end"]
