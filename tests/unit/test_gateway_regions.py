"""Shared memory of callers: names, rights, and changes by the caller during a request."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeswitch.base.errors import AlreadyExists, InvalidInput, PermissionDenied, QueueFull
from pipeswitch.base.roles import OWNER, Principal, Role
from pipeswitch.gateway.http.http_errors import NotFound, TooLarge
from pipeswitch.gateway.serving.oip import (
    InferRequest,
    Output,
    RegionPlace,
    RequestedOutput,
    place_of,
)
from pipeswitch.gateway.serving.shared_memory import FOLDER, MAX_REGIONS, SharedMemoryRegions
from tests.open_files import open_files

SIZE = 10_000
KEY = f"/pipeswitch-test-{os.getpid()}"
PATH = Path(f"{FOLDER}{KEY}")
OTHER = Principal(tenant="other", roles=frozenset(Role))


@pytest.fixture
def regions() -> Iterator[SharedMemoryRegions]:
    PATH.write_bytes(bytes(range(250)) * 40)
    regions_made = SharedMemoryRegions(max_bytes=SIZE)
    regions_made.register(OWNER, "all", {"key": KEY, "offset": 0, "byte_size": SIZE})
    regions_made.register(OWNER, "part", {"key": KEY, "offset": 250, "byte_size": 500})
    yield regions_made
    regions_made.close()
    PATH.unlink(missing_ok=True)


def asked(place: RegionPlace | None = None, *, output: RegionPlace | None = None) -> InferRequest:
    outputs = output and (RequestedOutput(name="y", parameters=output.parameters()),)
    return InferRequest(
        id="", inputs=(), frames=[] if place is None else [place], outputs=outputs or None
    )


def at(offset: int, size: int, region: str = "part") -> RegionPlace:
    return RegionPlace(region=region, offset_bytes=offset, size_bytes=size)


def test_an_input_is_read_where_it_lies_and_an_output_written_there(
    regions: SharedMemoryRegions,
) -> None:
    (frame,) = regions.filled(OWNER, asked(at(10, 20))).frames
    assert bytes(frame) == bytes(range(10, 30))
    y = Output(name="y", dtype="uint8", shape=(3,), data=memoryview(b"abc"))
    z = Output(name="z", dtype="uint8", shape=(1,), data=memoryview(b"z"))
    written, output = regions.placed(OWNER, asked(output=at(100, 4)), [y, z])
    assert PATH.read_bytes()[349:354] == bytes([99]) + b"abc" + bytes([103])
    assert (written.data, written.place) == (b"", at(100, 3))
    assert output is z
    assert bytes(frame) == bytes(range(10, 30))  # a copy, which the caller cannot change


def test_regions_are_listed_and_forgotten_by_name_or_all(regions: SharedMemoryRegions) -> None:
    part = {"name": "part", "key": KEY, "offset": 250, "byte_size": 500}
    assert regions.rows(OWNER, "part") == [part]
    regions.unregister(OWNER, "part")
    assert [row["name"] for row in regions.rows(OWNER)] == ["all"]
    with pytest.raises(NotFound):
        regions.rows(OWNER, "part")
    regions.unregister(OWNER)
    assert regions.rows(OWNER) == []


def test_a_region_that_is_forgotten_while_it_is_read_is_read_to_its_end(
    regions: SharedMemoryRegions, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """If unregistering closed the descriptor during a read, another file could get its number."""
    preadv, begun = os.preadv, []

    def in_pieces(descriptor: int, buffers: Any, offset: int) -> int:
        if not begun:
            regions.unregister(OWNER, "part")
            begun.append((tmp_path / "other").open("wb+"))
            os.truncate(tmp_path / "other", SIZE)
        return preadv(descriptor, [buffers[0][:10]], offset)

    monkeypatch.setattr(os, "preadv", in_pieces)
    (frame,) = regions.filled(OWNER, asked(at(0, 30))).frames
    begun[0].close()
    assert bytes(frame) == bytes(range(30))


def test_the_files_of_regions_are_closed(regions: SharedMemoryRegions) -> None:
    before = open_files(KEY)
    regions.register(OWNER, "another", {"key": KEY, "byte_size": 1})
    assert open_files(KEY) == before + 1
    regions.unregister(OWNER, "another")
    assert open_files(KEY) == before
    regions.close()
    assert open_files(KEY) == before - 2


def test_no_caller_sees_anothers_region(regions: SharedMemoryRegions) -> None:
    assert regions.rows(OTHER) == []
    for request in (asked(at(0, 1)), asked(output=at(0, 1))):
        with pytest.raises(NotFound):
            regions.filled(OTHER, request)
    regions.unregister(OTHER)
    regions.register(OTHER, "part", {"key": KEY, "byte_size": 1})
    assert len(regions.rows(OWNER)) == 2


@pytest.mark.parametrize("role", [role for role in Role if role is not Role.CODE])
def test_every_verb_takes_the_role_that_has_the_machine(
    regions: SharedMemoryRegions, role: Role
) -> None:
    caller = Principal(tenant="", roles=frozenset({role}))  # the owner's tenant, but not its role
    for verb in (
        lambda: regions.register(caller, "x", {"key": KEY, "byte_size": 1}),
        lambda: regions.rows(caller),
        lambda: regions.unregister(caller),
        lambda: regions.filled(caller, asked(at(0, 1))),
        lambda: regions.filled(caller, asked(output=at(0, 1))),
    ):
        with pytest.raises(PermissionDenied):
            verb()


@pytest.mark.parametrize(
    "key",
    [
        "",
        "/",
        "..",
        "/..",
        "/.",
        "../etc/passwd",
        "/../etc/passwd",
        "//x",
        "a/b",
        "/a/b",
        "x\0",
        "é",
        "/x\n",
        "x" * 201,
        None,
        7,
        ["/x"],
    ],
)
def test_a_key_that_could_lead_elsewhere_is_refused(regions: SharedMemoryRegions, key: Any) -> None:
    with pytest.raises(InvalidInput):
        regions.register(OWNER, "x", {"key": key, "byte_size": 1})


def test_what_is_no_plain_file_is_refused(regions: SharedMemoryRegions, tmp_path: Path) -> None:
    beside = Path(f"{PATH}-beside")
    try:
        beside.symlink_to("/etc/hostname")
        with pytest.raises(InvalidInput):
            regions.register(OWNER, "x", {"key": beside.name, "byte_size": 1})
        beside.unlink()
        beside.mkdir()
        with pytest.raises(InvalidInput):
            regions.register(OWNER, "x", {"key": beside.name, "byte_size": 1})
        beside.rmdir()
        os.mkfifo(beside)
        with pytest.raises(InvalidInput):
            regions.register(OWNER, "x", {"key": beside.name, "byte_size": 1})
        beside.unlink()
        with pytest.raises(InvalidInput):
            regions.register(OWNER, "x", {"key": beside.name, "byte_size": 1})
    finally:
        beside.unlink(missing_ok=True)


@pytest.mark.parametrize(
    "fields",
    [
        {"byte_size": SIZE + 1},
        {"offset": 1, "byte_size": SIZE},
        {"byte_size": 0},
        {},
        {"offset": -1, "byte_size": 1},
        {"offset": True, "byte_size": 1},
        {"byte_size": "1"},
        {"offset": 1 << 70, "byte_size": 1},
    ],
)
def test_a_stretch_that_the_file_does_not_have_is_refused(
    regions: SharedMemoryRegions, fields: dict[str, Any]
) -> None:
    before = open_files(KEY)
    with pytest.raises(InvalidInput):
        regions.register(OWNER, "x", {"key": KEY, **fields})
    assert open_files(KEY) == before


@pytest.mark.parametrize("place", [at(0, 501), at(500, 1), at(1 << 50, 1), at(0, 1 << 50)])
def test_a_place_outside_of_its_region_is_refused(
    regions: SharedMemoryRegions, place: RegionPlace
) -> None:
    for request in (asked(place), asked(output=place)):
        with pytest.raises((InvalidInput, TooLarge)):
            regions.filled(OWNER, request)


def test_a_region_that_shrank_is_an_error_and_no_signal(regions: SharedMemoryRegions) -> None:
    os.truncate(PATH, 300)
    with pytest.raises(InvalidInput):
        regions.filled(OWNER, asked(at(0, 100)))
    y = Output(name="y", dtype="uint8", shape=(60,), data=memoryview(bytes(60)))
    with pytest.raises(InvalidInput):
        regions.placed(OWNER, asked(output=at(0, 60)), [y])
    assert PATH.stat().st_size == 300


def test_an_output_larger_than_its_place_is_not_written(regions: SharedMemoryRegions) -> None:
    before = PATH.read_bytes()
    y = Output(name="y", dtype="uint8", shape=(5,), data=memoryview(bytes(5)))
    with pytest.raises(InvalidInput, match="5 bytes, its shared memory 4"):
        regions.placed(OWNER, asked(output=at(0, 4)), [y])
    assert PATH.read_bytes() == before


def test_names_and_counts_are_bounded(regions: SharedMemoryRegions) -> None:
    for name in ("", "x" * 257, "a\nb"):
        with pytest.raises(InvalidInput):
            regions.register(OWNER, name, {"key": KEY, "byte_size": 1})
    with pytest.raises(AlreadyExists):
        regions.register(OWNER, "part", {"key": KEY, "byte_size": 1})
    places = [at(0, SIZE - 1, "all"), at(0, 2, "all")]
    with pytest.raises(TooLarge):
        regions.filled(OWNER, InferRequest(id="", inputs=(), frames=places))
    for number in range(MAX_REGIONS - 2):
        regions.register(OWNER, str(number), {"key": KEY, "byte_size": 1})
    with pytest.raises(QueueFull):
        regions.register(OWNER, "one more", {"key": KEY, "byte_size": 1})


def test_what_is_said_of_a_place_must_be_one() -> None:
    assert place_of("x", {}) is None
    place = place_of("x", {"shared_memory_region": "r", "shared_memory_byte_size": 5})
    assert place == at(0, 5, "r")
    for odd in ({"region": 7}, {"region": "r", "offset": -1}, {"region": "r", "byte_size": 1.5}):
        with pytest.raises(InvalidInput):
            place_of("x", {f"shared_memory_{key}": value for key, value in odd.items()})
