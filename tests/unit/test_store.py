"""Loading of a model into the host store, and the guard that checks orders to copy."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path

import msgspec
import pytest

from pipeswitch.base.errors import RemoteProtocolError
from pipeswitch.ipc.messages.base import ModelName, OpId
from pipeswitch.ipc.messages.daemon import CopyPart, GroupCopy, TransmitModel
from pipeswitch.memory_daemon.store import Part, UnusableModel, load_model
from pipeswitch.memory_daemon.transmit import TransmitGuard
from pipeswitch.programs.interface.layout import Manifest, TensorSpec
from pipeswitch.programs.spec import BUNDLE_FILE, MANIFEST_FILE, WEIGHTS_FILE, save_manifest
from tests.unit.manifests import plain_manifest, plain_tensor

HEADER = b"HEADER--"
POISON = 0xA5


def tensor(name: str, offset: int, count: int, file_offset: int) -> TensorSpec:
    return plain_tensor(name, (count,), offset, file_bytes=len(HEADER) + file_offset)


WEIGHTS = random.Random(7).randbytes(1200)
TENSORS = (tensor("a", 0, 100, 0), tensor("b", 512, 150, 600), tensor("c", 1536, 50, 400))
TOTAL_BYTES = 1536 + 512
IMAGE = (
    (WEIGHTS[0:400]).ljust(512, b"\0")
    + (WEIGHTS[600:1200]).ljust(1024, b"\0")
    + (WEIGHTS[400:600]).ljust(512, b"\0")
)


def manifest(**changes: object) -> Manifest:
    base = plain_manifest(
        total_bytes=TOTAL_BYTES, tensors=TENSORS, weights_sha256=hashlib.sha256(IMAGE).hexdigest()
    )
    return msgspec.structs.replace(base, **changes)


def write_model(directory: Path, described: Manifest, weights: bytes = WEIGHTS) -> Path:
    save_manifest(directory, described)
    (directory / BUNDLE_FILE).write_bytes(HEADER + weights)
    return directory


def poisoned(size_bytes: int = TOTAL_BYTES) -> bytearray:
    return bytearray([POISON]) * size_bytes


def test_tensors_lie_at_their_offsets_with_zeros_between_and_behind(tmp_path: Path) -> None:
    image = poisoned(TOTAL_BYTES + 1000)
    load_model(write_model(tmp_path, manifest()), memoryview(image))
    assert bytes(image[:TOTAL_BYTES]) == IMAGE
    assert bytes(image[TOTAL_BYTES:]) == bytes(1000)


def test_a_module_mode_model_has_its_weights_in_another_file(tmp_path: Path) -> None:
    write_model(tmp_path, manifest(mode="module"))
    (tmp_path / BUNDLE_FILE).rename(tmp_path / WEIGHTS_FILE)
    image = poisoned()
    load_model(tmp_path, memoryview(image))
    assert bytes(image) == IMAGE


def test_every_truncation_of_the_weights_is_noticed(tmp_path: Path) -> None:
    write_model(tmp_path, manifest())
    for size in range(0, len(WEIGHTS), 37):
        (tmp_path / BUNDLE_FILE).write_bytes(HEADER + WEIGHTS[:size])
        with pytest.raises(UnusableModel, match="truncated"):
            load_model(tmp_path, memoryview(poisoned()))


def test_every_flipped_byte_is_noticed(tmp_path: Path) -> None:
    write_model(tmp_path, manifest())
    for position in range(0, len(WEIGHTS), 37):
        damaged = bytearray(WEIGHTS)
        damaged[position] ^= 0x10
        (tmp_path / BUNDLE_FILE).write_bytes(HEADER + damaged)
        with pytest.raises(UnusableModel, match="sha256"):
            load_model(tmp_path, memoryview(poisoned()))


def with_digests() -> Manifest:
    """Return a manifest of this release: its tensors have digests, and nothing checks the image."""
    tensors = [
        msgspec.structs.replace(
            one,
            digest=hashlib.sha256(
                IMAGE[one.offset_bytes : one.offset_bytes + one.size_bytes]
            ).hexdigest(),
        )
        for one in TENSORS
    ]
    return manifest(tensors=tuple(tensors), weights_sha256="")


def test_every_flipped_byte_is_noticed_by_its_tensors_digest(tmp_path: Path) -> None:
    write_model(tmp_path, with_digests())
    load_model(tmp_path, memoryview(image := poisoned()))
    assert bytes(image) == IMAGE
    for position in range(0, len(WEIGHTS), 37):
        damaged = bytearray(WEIGHTS)
        damaged[position] ^= 0x10
        (tmp_path / BUNDLE_FILE).write_bytes(HEADER + damaged)
        name = "b" if position >= 600 else "a" if position < 400 else "c"
        with pytest.raises(UnusableModel, match=f"'{name}' is corrupt"):
            load_model(tmp_path, memoryview(poisoned()))


@pytest.mark.parametrize("lie", ["0" * 64, "x"])
def test_a_builder_that_claims_another_models_tensor_is_refused(tmp_path: Path, lie: str) -> None:
    first, *others = with_digests().tensors
    for rest in (others, [msgspec.structs.replace(one, digest="") for one in others]):
        claimed = (msgspec.structs.replace(first, digest=lie), *rest)
        write_model(tmp_path, manifest(tensors=claimed))
        with pytest.raises(UnusableModel, match="'a' is corrupt"):
            load_model(tmp_path, memoryview(poisoned()))


@pytest.mark.parametrize("missing", [MANIFEST_FILE, BUNDLE_FILE])
def test_a_missing_file_is_named(tmp_path: Path, missing: str) -> None:
    (write_model(tmp_path, manifest()) / missing).unlink()
    with pytest.raises(UnusableModel, match=missing):
        load_model(tmp_path, memoryview(poisoned()))


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"{}", b"\xff", b"[" * 100_000])
def test_a_malformed_manifest_is_refused(tmp_path: Path, text: bytes) -> None:
    signed = text + b"\n" + hashlib.sha256(text).hexdigest().encode()
    (write_model(tmp_path, manifest()) / MANIFEST_FILE).write_bytes(signed)
    with pytest.raises(UnusableModel, match="manifest"):
        load_model(tmp_path, memoryview(poisoned()))


@pytest.mark.parametrize(
    "tensors",
    [
        (tensor("a", 0, 100, 0), tensor("b", 396, 10, 0)),
        (tensor("a", -512, 100, 0),),
        (tensor("a", TOTAL_BYTES - 396, 100, 0),),
        (tensor("a", 0, 100, -1000),),
        (msgspec.structs.replace(tensor("a", 0, 100, 0), shape=(101,)),),
        (msgspec.structs.replace(tensor("a", 0, 100, 0), shape=(-10, -10)),),
        (msgspec.structs.replace(tensor("a", 0, 100, 0), dtype="object"),),
    ],
)
def test_tensors_that_cannot_be_are_refused(
    tmp_path: Path, tensors: tuple[TensorSpec, ...]
) -> None:
    write_model(tmp_path, manifest(tensors=tensors))
    image = poisoned()
    with pytest.raises(UnusableModel):
        load_model(tmp_path, memoryview(image))
    assert image == poisoned(), "refused before anything was written"


def test_a_model_larger_than_its_place_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path, manifest())
    with pytest.raises(UnusableModel, match="do not fit"):
        load_model(tmp_path, memoryview(poisoned(TOTAL_BYTES - 1)))


def test_empty_tensors_take_no_place(tmp_path: Path) -> None:
    empty = tensor("nothing", 0, 0, 0)
    write_model(tmp_path, manifest(tensors=(empty, *TENSORS)))
    image = poisoned()
    load_model(tmp_path, memoryview(image))
    assert bytes(image) == IMAGE


# ---- the guard ------------------------------------------------------------------------------

ARENA_BYTES, STORE_BYTES, FENCE_COUNT = 1 << 20, 1 << 20, 64


def order(
    op_id: int, start: int, size: int, *, fence: int = 0, group: GroupCopy | None = None
) -> TransmitModel:
    whole = GroupCopy(store_offset_bytes=0, arena_offset_bytes=start, size_bytes=size, fence=fence)
    return TransmitModel(
        model=ModelName("m"),
        op_id=OpId(op_id),
        arena_offset_bytes=start,
        region_bytes=size,
        groups=(group or whole,),
    )


@pytest.fixture
def guard() -> TransmitGuard:
    return TransmitGuard(arena_bytes=ARENA_BYTES, store_bytes=STORE_BYTES, fence_count=FENCE_COUNT)


@pytest.mark.parametrize(
    "bad",
    [
        order(1, 0, 100),  # overlaps the fences
        order(1, FENCE_COUNT * 4 - 1, 100),
        order(1, ARENA_BYTES - 50, 100),
        order(1, 4096, -1),
        order(0, 4096, 100),
        order(1, 4096, 100, fence=FENCE_COUNT),
        order(1, 4096, 100, fence=-1),
        order(
            1,
            4096,
            100,
            group=GroupCopy(store_offset_bytes=0, arena_offset_bytes=4095, size_bytes=10, fence=0),
        ),
        order(
            1,
            4096,
            100,
            group=GroupCopy(store_offset_bytes=0, arena_offset_bytes=4096, size_bytes=101, fence=0),
        ),
        order(
            1,
            4096,
            100,
            group=GroupCopy(store_offset_bytes=0, arena_offset_bytes=4096, size_bytes=-1, fence=0),
        ),
        order(
            1,
            4096,
            100,
            group=GroupCopy(
                store_offset_bytes=STORE_BYTES - 1, arena_offset_bytes=4096, size_bytes=2, fence=0
            ),
        ),
        order(
            1,
            4096,
            100,
            group=GroupCopy(store_offset_bytes=-1, arena_offset_bytes=4096, size_bytes=2, fence=0),
        ),
        *[
            order(1, 4096, 100, group=GroupCopy(0, 4096, 100, 0, parts=parts))
            for parts in (
                (CopyPart(0, 60, 41),),  # beyond the group
                (CopyPart(0, -1, 10),),
                (CopyPart(0, 0, 50), CopyPart(50, 49, 10)),  # twice
                (CopyPart(0, 60, -10),),
                (CopyPart(STORE_BYTES - 1, 0, 2),),
                (CopyPart(-1, 0, 2),),
            )
        ],
    ],
)
def test_anything_out_of_bounds_is_refused(guard: TransmitGuard, bad: TransmitModel) -> None:
    with pytest.raises(RemoteProtocolError):
        guard.accept(bad)
    guard.accept(order(1, 4096, 100))  # a refused order has no effect


def test_overlapping_a_live_transmission_is_refused_until_it_ended(guard: TransmitGuard) -> None:
    guard.accept(order(1, 4096, 4096))
    for start in (1024, 4096, 6000):
        with pytest.raises(RemoteProtocolError, match="overlaps"):
            guard.accept(order(2, start, 4096, fence=1))
    guard.accept(order(3, 8192, 4096, fence=1))
    guard.end(OpId(1))
    guard.accept(order(2, 4096, 4096))


def test_a_word_of_a_live_transmission_is_refused(guard: TransmitGuard) -> None:
    guard.accept(order(1, 4096, 100, fence=5))
    with pytest.raises(RemoteProtocolError, match="fence"):
        guard.accept(order(2, 8192, 100, fence=5))


def test_an_older_epoch_is_refused_for_every_byte_a_newer_one_had(guard: TransmitGuard) -> None:
    guard.accept(order(5, 4096, 4096))
    guard.end(OpId(5))
    guard.accept(order(7, 6000, 1000))
    guard.end(OpId(7))
    with pytest.raises(RemoteProtocolError, match="stale"):
        guard.accept(order(4, 4096, 10))
    with pytest.raises(RemoteProtocolError, match="stale"):
        guard.accept(order(6, 6999, 10))
    with pytest.raises(RemoteProtocolError, match="stale"):
        guard.accept(order(4, 8191, 10))
    guard.accept(order(6, 7000, 10))
    guard.accept(order(4, 8192, 10, fence=1))


def test_the_store_knows_which_of_its_bytes_are_being_read(guard: TransmitGuard) -> None:
    guard.accept(order(1, 4096, 1000))
    assert guard.live_reads(999, 10) == 1
    assert guard.live_reads(1000, 10) is None
    guard.end(OpId(1))
    assert guard.live_reads(0, 1000) is None


def test_a_part_is_read_from_its_own_place_in_the_store(guard: TransmitGuard) -> None:
    parts = (CopyPart(7000, 0, 100), CopyPart(3000, 500, 200))
    guard.accept(order(1, 4096, 1000, group=GroupCopy(0, 4096, 1000, 0, parts=parts)))
    reads = [at for at in range(0, 8000, 100) if guard.live_reads(at, 100) is not None]
    assert reads == [3000, 3100, 7000]


def test_a_range_of_a_group_has_the_parts_that_it_shares() -> None:
    copy = GroupCopy(0, 0, 1000, 0, parts=(CopyPart(70, 0, 100), CopyPart(3000, 500, 200)))
    assert [*copy.within(50, 600)] == [CopyPart(120, 50, 50), CopyPart(3000, 500, 100)]
    assert [*copy.within(100, 500)] == []
    assert ([*copy.pieces()], copy.copied_bytes) == (list(copy.parts or ()), 300)
    assert [*GroupCopy(5, 0, 1000, 0).pieces()] == [CopyPart(5, 0, 1000)]
    assert [*GroupCopy(5, 0, 1000, 0, parts=()).pieces()] == []


def test_accepted_spans_stay_disjoint_and_few(guard: TransmitGuard) -> None:
    rng = random.Random(3)
    newest = [0] * 128  # for each 8 KiB of the arena, the op_id that the guard should know
    for op_id in range(1, 1500):
        first = rng.randrange(1, 127)
        count = rng.randrange(1, 128 - first + 1)
        claimed = rng.choice((op_id, max(1, op_id - 300)))
        is_stale = any(newest[page] > claimed for page in range(first, first + count))
        order_asked = order(claimed, first * 8192, count * 8192)
        if is_stale:
            with pytest.raises(RemoteProtocolError, match="stale"):
                guard.accept(order_asked)
        else:
            guard.accept(order_asked)
            guard.end(OpId(claimed))
            newest[first : first + count] = [claimed] * count
    assert len(guard._accepted) <= 128


@pytest.mark.parametrize("damage", [None, 3, 1600])
def test_a_variants_shared_bytes_are_compared_and_not_written(
    tmp_path: Path, damage: int | None
) -> None:
    other, own = bytearray(IMAGE), poisoned(1024)
    other[512:1536] = poisoned(1024)  # b is another one there
    if damage is not None:
        other[damage] ^= 1
    before, view = bytes(other), memoryview(other)
    parts = Part(0, view[:512], True), Part(512, memoryview(own)), Part(1536, view[1536:], True)
    write_model(tmp_path, with_digests())
    if damage is None:
        load_model(tmp_path, memoryview(own), parts)
        assert own == IMAGE[512:1536]
        assert other == before
        return
    with pytest.raises(UnusableModel, match="is corrupt"):
        load_model(tmp_path, memoryview(own), parts)
    write_model(tmp_path, with_digests(), bytes(len(WEIGHTS)))
    with pytest.raises(UnusableModel, match="is corrupt"):
        load_model(tmp_path, memoryview(own), parts, fills=True)
    assert other == before
    write_model(tmp_path, with_digests())
    load_model(tmp_path, memoryview(own), parts, fills=True)
    other[damage] ^= 1
    assert other == before
