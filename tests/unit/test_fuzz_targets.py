"""Replay of every saved input of the fuzz targets, so that fixed bugs stay fixed.

The replay works without atheris. ``make fuzz`` searches for new inputs.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.fuzz.mutate import Mutator
from tests.fuzz.run import merged, read_log, shares, totals
from tests.fuzz.target import (
    CORPUS,
    MAX_FRAMES,
    REGRESSIONS,
    TAGGED_FRAMES,
    join_frames,
    split_frames,
)
from tests.fuzz.targets import MODULES, load

KEPT_BYTES = 512 << 10  # limit of the size of all saved inputs together
FOUND = sorted(path.relative_to(REGRESSIONS) for path in REGRESSIONS.glob("*/*"))


@pytest.mark.parametrize("name", MODULES)
def test_nothing_escapes_from_the_seeds_and_the_kept_corpus(name: str) -> None:
    target = load(name)
    for seed in target.seeds():
        target.run(seed)
    for path in target.kept():
        target.run(path.read_bytes())


@pytest.mark.parametrize("path", FOUND, ids=str)
def test_what_once_escaped_does_not_any_more(path: Path) -> None:
    load(path.parts[0]).run((REGRESSIONS / path).read_bytes())


def test_the_kept_corpus_is_small_and_belongs_to_targets() -> None:
    files = [path for path in CORPUS.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < KEPT_BYTES
    assert {path.parent.name for path in files} <= set(MODULES)
    assert {path.parts[0] for path in FOUND} <= set(MODULES)


BROKEN = {
    "request": "pipeswitch.frontend.frontend.decode_request",
    "reply": "tests.fuzz.replies.decode_reply",
    "bundle": "pipeswitch.programs.graphs.bundle._json_object",
    "graph": "pipeswitch.programs.graphs.bundle.check_graph",
    "commit": "pipeswitch.commits.image.json.loads",
    "profile": "pipeswitch.extras.lab.profile._check",
    "packet": "tests.fuzz.packets.decode_message",
    "daemon": "pipeswitch.memory_daemon.transmit.check_order",
    "worker": "pipeswitch.scheduler.state.device_state.DeviceState.job_of",
    "order": "pipeswitch.ipc.gate.Gate.grant",
    "gateway": "pipeswitch.gateway.http.http_parser.HttpParser.look",
}
"""Fuzz target -> a patch that makes the tested code raise an error that it must not raise."""


@pytest.mark.parametrize("name", MODULES)
def test_a_target_lets_an_escape_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError

    target = load(name)
    seeds = target.seeds()
    target.run(seeds[0])
    with monkeypatch.context() as broken:
        broken.setattr(BROKEN[name], breaks)
        with pytest.raises(ZeroDivisionError):  # noqa: PT012 - one of them gets there
            for seed in seeds:
                target.run(seed)
    target.run(seeds[0])  # the escaped error does not affect the next input


def test_an_error_that_the_gateway_answers_with_500_is_an_escape(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def breaks(*_: Any) -> None:
        raise ZeroDivisionError

    target = load("gateway")
    monkeypatch.setattr("tests.fuzz.gateways.Upstream.infer", breaks)
    with pytest.raises(AssertionError, match="an answer of 500"):
        target.run(target.seeds()[0])


# ---- each target reaches the code that it should test -------------------------------------------


def test_a_good_request_is_admitted_and_its_bytes_lie_in_the_pool() -> None:
    from pipeswitch.scheduler.state.events import InferArrived
    from tests.fuzz import requests

    events = requests._gate().hear(split_frames(requests.seeds()[0]))
    assert [type(event) for event in events] == [InferArrived]


def test_each_verb_gets_past_its_checks() -> None:
    from tests.fuzz import requests

    names = {
        type(event).__name__
        for seed in requests.seeds()
        for event in requests._gate().hear(split_frames(seed))
    }
    assert names == {
        "InferArrived",
        "PrefetchHint",
        "CancelRequest",
        "RegisterModelRequest",
        "UnregisterRequest",
        "PinRequest",
        "TrainRequest",
        "JobRequest",
        "Query",
        "RegroupRequest",
        "PingRequest",
        "DrainRequest",
    }


def test_a_worker_of_the_stage_computes_and_trains() -> None:
    from pipeswitch.ipc.messages.worker import JobEnded
    from pipeswitch.scheduler.state.states import TaskState
    from tests.fuzz import workers

    stage = workers.Stage()
    train, infer = workers._asks(1), workers._asks(0)
    for frame in (workers._says(workers.Who.HONEST, 0), workers._says(workers.Who.HONEST, 1)):
        stage.take(frame)
    stage.take(train)
    stage.take(workers._says(workers.Who.HONEST, workers.BUSY))
    assert stage.state.jobs[workers.JOBS[0]].state.state is TaskState.RUNNING
    stage.take(infer)
    assert stage.state.owner.pending is not None
    ended = next(m for m in workers.worker_messages() if isinstance(m, JobEnded))
    for slot in range(2):
        stage.take(workers._hostile(slot, ended))
    assert stage.state.jobs[workers.JOBS[0]].state.state is TaskState.DONE


# ---- mutations ----------------------------------------------------------------------------------


def test_frames_are_any_bytes_and_any_bytes_are_frames() -> None:
    frames = [b"", b"a", bytes(300)]
    assert split_frames(join_frames(frames)) == frames
    assert split_frames(b"\xff\xff" + b"short") == [b"short"]
    assert len(split_frames(bytes(1000))) == MAX_FRAMES


def test_a_tagged_frame_keeps_its_tag() -> None:
    frame = b"\x05" + b"\x81\xa1a\x01"
    assert TAGGED_FRAMES.decode(frame) == [5, {"a": 1}]
    assert TAGGED_FRAMES.encode([5, {"a": 1}]) == frame


@pytest.mark.parametrize("name", MODULES)
def test_mutations_stay_small_and_mostly_well_formed(name: str) -> None:
    target = load(name)
    mutator = Mutator(target, lambda data, max_bytes: data[:max_bytes])
    well_formed = different = 0
    for number, seed in enumerate(target.seeds() * 40):
        mutant = mutator(seed, target.max_bytes, number)
        assert len(mutant) <= target.max_bytes
        different += mutant != seed
        well_formed += _decodes(target.codec.decode, target.codec.split(mutant))
    count = number + 1
    assert different > count // 4
    assert well_formed > count // 4


def _decodes(decode: Any, parts: list[bytes]) -> bool:
    for part in parts:
        try:
            decode(part)
        except Exception:
            continue
        return True
    return False


def test_the_same_seed_mutates_the_same_way() -> None:
    target = load("packet")
    mutants = [
        [Mutator(target, lambda data, _: data)(seed, 1024, 7) for seed in target.seeds()]
        for _ in range(2)
    ]
    assert mutants[0] == mutants[1]
    assert random.Random(7).random() != random.Random(8).random()


# ---- the driver's reading of atheris's output ---------------------------------------------------

LOG = """#2\tINITED cov: 9 ft: 9 corp: 1/1b exec/s: 0 rss: 40Mb
#4096\tpulse  cov: 33 ft: 40 corp: 7/70b lim: 4096 exec/s: 2048 rss: 41Mb
"""
STATS = "stat::number_of_executed_units: 5000\nstat::new_units_added:          6\n"


def test_figures_are_read_from_what_libfuzzer_says() -> None:
    outcome = read_log(LOG + STATS)
    assert (outcome.executions, outcome.coverage, outcome.new_entries) == (5000, 33, 6)


def test_of_a_run_that_broke_off_the_last_pulse_counts() -> None:
    assert read_log(LOG).executions == 4096
    assert read_log("").executions == 0


def test_time_is_shared_out_and_every_target_gets_some() -> None:
    parts = shares(list(MODULES), 110.0)
    assert sum(parts.values()) == pytest.approx(110.0)
    assert parts["packet"] == pytest.approx(2 * parts["worker"])
    assert min(shares(list(MODULES), 1.0).values()) == 1.0


def test_runs_add_up() -> None:
    first = {
        "executions": 5,
        "seconds": 1.0,
        "escapes": 0,
        "rss_from_mib": 10.0,
        "rss_to_mib": 11.0,
        "coverage": 7,
        "new_entries": 1,
    }
    second = {**first, "executions": 6, "escapes": 1, "rss_from_mib": 3.0, "rss_to_mib": 12.0}
    both = merged(totals({"a": first}), totals({"a": second, "b": first}))
    assert both["executions"] == 16
    assert both["escapes"] == 1
    assert both["targets"]["a"] == {
        **first,
        "executions": 11,
        "seconds": 2.0,
        "escapes": 1,
        "rss_to_mib": 12.0,
        "new_entries": 2,
    }
    assert json.loads(json.dumps(both)) == both
