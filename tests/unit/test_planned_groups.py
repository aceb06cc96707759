"""Files of planned groups: which ones are read, and which ones are used."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from pipeswitch.controller.folders import find_planned, save_planned
from pipeswitch.planning import planned_groups
from tests.unit.measured import HERE

DIGEST = "ab" * 32
NAME = f"net.{DIGEST[:12]}.cpu.json"
SIZES = (1 << 20, 0, 4 << 20, 8 << 20)


def document(**changes: Any) -> bytes:
    fields = {
        "version": 1,
        "model": "net",
        "digest": DIGEST,
        "measured_at": "2026-01-01T00:00:00+00:00",
        "identity": HERE,
        "layers": [{"size_bytes": size, "copy_ms": 1.0} for size in SIZES],
        "checks": [
            {"plan": [0], "batch": 8, "predicted_ms": 9.0},
            {"plan": [0, 2], "batch": 8, "predicted_ms": 7.0},
        ],
        "predicted_ms": {"1": 3.0},
    }
    return msgspec.json.encode(fields | changes)


def groups() -> planned_groups.PlannedGroups:
    return planned_groups.decode(document())


def test_the_last_plan_that_was_tried_is_the_planned_one() -> None:
    one = groups()
    assert (one.plan, one.batch) == ((0, 2), 8)
    assert one.predicted_ms == {"8": 7.0, "1": 3.0}
    measurements = msgspec.msgpack.decode(one.measurements)
    assert measurements == msgspec.json.decode(document())


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"version": 2}, "version 2"),
        ({"layers": []}, "no layers"),
        ({"checks": []}, "no plan"),
        ({"checks": [{"plan": [1], "batch": 1, "predicted_ms": 1.0}]}, "rises from 0"),
        ({"checks": [{"plan": [0, 4], "batch": 1, "predicted_ms": 1.0}]}, "4 layers"),
        ({"note": 1 << 70}, "ints"),
    ],
)
def test_a_file_that_contradicts_itself_is_refused(change: dict[str, Any], problem: str) -> None:
    with pytest.raises(planned_groups.PlannedError, match=problem):
        planned_groups.decode(json.dumps({**msgspec.json.decode(document()), **change}).encode())


@given(st.binary(max_size=200))
def test_the_decoder_raises_nothing_else(raw: bytes) -> None:
    with pytest.raises(planned_groups.PlannedError):
        planned_groups.decode(raw)


def test_a_file_is_its_owners_alone_and_is_found_by_the_programs_digest(tmp_path: Path) -> None:
    folder = tmp_path / "profiles"
    assert planned_groups.file_name("net", DIGEST, "CPU") == NAME
    save_planned(folder, NAME, document())
    path = folder / NAME
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [file.groups for file in find_planned([folder], DIGEST)] == [groups()]
    assert list(find_planned([folder], "cd" * 32)) == []
    assert list(find_planned([tmp_path / "missing"], DIGEST)) == []
    assert [entry.name for entry in folder.iterdir()] == [NAME]


def test_saving_again_replaces_the_file(tmp_path: Path) -> None:
    save_planned(tmp_path, NAME, document())
    save_planned(tmp_path, NAME, document(measured_at="later"))
    (file,) = find_planned([tmp_path], DIGEST)
    assert file.groups is not None
    assert file.groups.measured_at == "later"


def test_a_damaged_file_is_found_with_its_problem(tmp_path: Path) -> None:
    save_planned(tmp_path, NAME, document())
    path = tmp_path / NAME
    path.write_bytes(path.read_bytes()[:100])
    (file,) = find_planned([tmp_path], DIGEST)
    assert file.groups is None
    assert file.problem
    path.unlink()
    path.mkdir()
    (file,) = find_planned([tmp_path], DIGEST)
    assert (file.groups, file.problem) == (None, "not a regular file")


def test_groups_of_this_program_on_this_device_are_used() -> None:
    assert groups().why_unusable(HERE, DIGEST, SIZES) == ""


@pytest.mark.parametrize(
    "change",
    [
        {"device": "cuda:0"},
        {"name": "another"},
        {"cores": 8},
        {"threads": 1},
        {"link_bytes_per_s": 1e9},
        {"pipeswitch": "2.0"},
        {"torch": "2.16.0"},
    ],
)
def test_groups_measured_elsewhere_are_not(change: dict[str, Any]) -> None:
    there = replace(HERE, **change)
    (value,) = change.values()
    assert f"was {value}, here" in replace(groups(), identity=there).why_unusable(
        HERE, DIGEST, SIZES
    )


def test_groups_of_another_program_are_not() -> None:
    assert "another program" in groups().why_unusable(HERE, "cd" * 32, SIZES)
    assert "layers" in groups().why_unusable(HERE, DIGEST, SIZES[:3])
