"""One allocator for the memory files of all tenants: pages of files, and who may write (ADR 23)."""

from __future__ import annotations

import mmap
import os
import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from pipeswitch.base.errors import QueueFull, RemoteProtocolError
from pipeswitch.devices.cpu.arenas import FilePerTenant, OneFile
from pipeswitch.frontend.intake.request_pool import RequestPool
from pipeswitch.ipc import sparse
from pipeswitch.ipc.control_page import sealed_memfd
from pipeswitch.ipc.messages.base import ModelName, OpId, SlabTensor
from pipeswitch.ipc.messages.daemon import TransmitModel

MIB = 1 << 20
PAGE = mmap.PAGESIZE
FENCE_COUNT = 64


@pytest.fixture
def new_file() -> Iterator[Callable[[int], int]]:
    descriptors: list[int] = []

    def make(size_bytes: int) -> int:
        descriptors.append(sealed_memfd("tenant", size_bytes))
        return descriptors[-1]

    yield make
    for descriptor in descriptors:
        os.close(descriptor)


def order(tenant: str, start: int, size: int, op_id: int = 1) -> TransmitModel:
    return TransmitModel(
        model=ModelName("m"),
        op_id=OpId(op_id),
        arena_offset_bytes=start,
        region_bytes=size,
        groups=(),
        tenant=tenant,
    )


def pages(value: int, size: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.full(size, value, dtype=np.uint8)


# -- one file --------------------------------------------------------------------------------------


def test_a_reader_cannot_write_by_any_way_that_needs_no_file_to_be_opened(
    new_file: Callable[[int], int],
) -> None:
    writer = new_file(PAGE)
    os.pwrite(writer, b"theirs", 0)
    reader = sparse.read_only(writer)
    with mmap.mmap(reader, PAGE, prot=mmap.PROT_READ) as view:
        assert view[:6] == b"theirs"
        sparse.give_back(writer, 0, PAGE)
        assert view[:6] == bytes(6), "a hole that its reader does not see"
    with pytest.raises(PermissionError):
        mmap.mmap(reader, PAGE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    for write in (lambda: os.pwrite(reader, b"x", 0), lambda: sparse.give_back(reader, 0, PAGE)):
        with pytest.raises(OSError, match="Bad file descriptor"):
            write()
    os.close(reader)


def test_pages_outside_of_what_is_kept_are_given_back(new_file: Callable[[int], int]) -> None:
    descriptor = new_file(8 * PAGE)
    os.pwrite(descriptor, b"x" * 8 * PAGE, 0)
    sparse.keep_only(descriptor, [(4 * PAGE, 5 * PAGE), (PAGE, PAGE + 1)], 8 * PAGE)
    assert sparse.held_bytes(descriptor) == 2 * PAGE
    data = os.pread(descriptor, 8 * PAGE, 0)
    assert data.strip(b"\0").replace(b"\0", b"") == b"x" * 2 * PAGE


@pytest.mark.parametrize("seed", range(6))
def test_dropping_ranges_gives_all_other_pages_back_and_never_a_kept_one(
    new_file: Callable[[int], int], seed: int
) -> None:
    """A worker touches every page again and again, while ranges come and go."""
    count, chance = 200, random.Random(seed)
    descriptor, used = new_file(count * PAGE), set[int]()
    ranges = sparse.UsedRanges(descriptor, count * PAGE)
    for step in range(400):
        page = chance.randrange(count)
        if page not in used:
            used.add(page)
            ranges.keep(page * PAGE, PAGE)
            os.pwrite(descriptor, page.to_bytes(2, "little"), page * PAGE)
        elif len(used) > 1:
            used.remove(page)
            ranges.drop(page * PAGE)
        if step % 50 == 0:
            for stray in set(range(count)) - used:
                os.pwrite(descriptor, b"!", stray * PAGE)
        for one in used:
            assert os.pread(descriptor, 2, one * PAGE) == one.to_bytes(2, "little")
    for page in sorted(used):
        ranges.drop(page * PAGE)
    assert sparse.held_bytes(descriptor) == 0


@pytest.mark.parametrize("is_touched", [False, True])
def test_dropping_a_range_costs_the_same_with_ten_and_with_ten_thousand_others(
    new_file: Callable[[int], int], monkeypatch: pytest.MonkeyPatch, is_touched: bool
) -> None:
    calls = list[int]()
    give = sparse.give_back
    monkeypatch.setattr(sparse, "give_back", lambda *place: (calls.append(1), give(*place))[1])
    for count in (10, 10_000):
        descriptor = new_file(2 * count * PAGE)
        ranges = sparse.UsedRanges(descriptor, 2 * count * PAGE)
        for page in range(0, 2 * count, 2):
            ranges.keep(page * PAGE, PAGE)
        if is_touched:
            os.pwrite(descriptor, b"x" * 2 * count * PAGE, 0)
        calls.clear()
        ranges.drop(0)
        assert len(calls) <= 1 + sparse.GAPS * is_touched


# -- the arena -------------------------------------------------------------------------------------


@pytest.fixture
def arena(new_file: Callable[[int], int]) -> Iterator[tuple[FilePerTenant, dict[str, int]]]:
    arena_made = FilePerTenant(16 * MIB, FENCE_COUNT)
    files = {name: new_file(16 * MIB) for name in ("ada", "bob")}
    for name, descriptor in files.items():
        arena_made.open_tenant(name, descriptor)
    yield arena_made, files
    arena_made.close()


def test_a_place_that_changes_tenants_leaves_nothing_and_takes_nothing_twice(
    arena: tuple[FilePerTenant, dict[str, int]],
) -> None:
    tenants, files = arena
    for turn in range(6):
        tenant, other = ("ada", "bob") if turn % 2 else ("bob", "ada")
        tenants.take(order(tenant, 2 * MIB, 8 * MIB, turn + 1))
        tenants.write(tenant, 2 * MIB, pages(turn + 1, 8 * MIB))
        tenants.signal_fence(tenant, 3, turn + 1)
        tenants.tidy()
        assert os.pread(files[tenant], 8 * MIB, 2 * MIB) == bytes([turn + 1]) * (8 * MIB)
        assert int.from_bytes(os.pread(files[tenant], 4, 12), "little") == turn + 1
        assert not os.pread(files[other], 14 * MIB, 2 * MIB).strip(b"\0")
        assert sum(map(sparse.held_bytes, files.values())) <= 8 * MIB + 2 * PAGE


def test_of_a_place_that_is_taken_in_part_the_rest_stays(
    arena: tuple[FilePerTenant, dict[str, int]],
) -> None:
    tenants, files = arena
    tenants.take(order("ada", 2 * MIB, 6 * MIB))
    tenants.write("ada", 2 * MIB, pages(1, 6 * MIB))
    tenants.take(order("bob", 4 * MIB, 2 * MIB))
    tenants.tidy()
    data = os.pread(files["ada"], 6 * MIB, 2 * MIB)
    assert data == b"\1" * (2 * MIB) + bytes(2 * MIB) + b"\1" * (2 * MIB)
    tenants.clear("ada", 2 * MIB, 2 * MIB + 5)
    assert os.pread(files["ada"], 6, 2 * MIB) == bytes(5) + b"\1"


def test_pages_that_a_worker_touched_where_it_has_no_place_are_given_back(
    arena: tuple[FilePerTenant, dict[str, int]],
) -> None:
    tenants, files = arena
    reader = sparse.read_only(files["ada"])
    with mmap.mmap(reader, 16 * MIB, prot=mmap.PROT_READ) as all_of_it:
        assert not any(all_of_it[::PAGE])
    os.close(reader)
    assert sparse.held_bytes(files["ada"]) == 16 * MIB, "to read a hole takes a page"
    tenants.take(order("bob", 2 * MIB, 2 * MIB))
    tenants.tidy()
    assert sparse.held_bytes(files["ada"]) <= PAGE


def test_a_tenant_without_a_file_a_second_file_and_a_wrong_one_are_refused(
    arena: tuple[FilePerTenant, dict[str, int]], new_file: Callable[[int], int]
) -> None:
    tenants, files = arena
    with pytest.raises(RemoteProtocolError):
        tenants.take(order("cyd", 2 * MIB, 2 * MIB))
    with pytest.raises(RemoteProtocolError):
        tenants.open_tenant("ada", files["ada"])
    with pytest.raises(RemoteProtocolError):
        tenants.open_tenant("cyd", new_file(2 * MIB))
    shared = OneFile(4 * MIB, FENCE_COUNT)
    with pytest.raises(RemoteProtocolError):
        shared.open_tenant("ada", files["ada"])
    with pytest.raises(RemoteProtocolError):
        shared.take(order("ada", 2 * MIB, 2 * MIB))
    shared.close()


# -- the request pool ------------------------------------------------------------------------------


@pytest.fixture
def divided(new_file: Callable[[int], int]) -> Iterator[tuple[RequestPool, dict[str, int]]]:
    files = {name: new_file(16 * PAGE) for name in ("", "ada", "bob")}
    pool = RequestPool(files[""], files.__getitem__)
    yield pool, files
    pool.close()


def tensor(at: int, size: int) -> SlabTensor:
    return SlabTensor(name="x", dtype="int8", shape=(size,), offset_bytes=at, size_bytes=size)


def test_a_request_lies_in_its_tenants_file_and_is_gone_with_its_answer(
    divided: tuple[RequestPool, dict[str, int]],
) -> None:
    pool, files = divided
    allocations = {name: pool.reserve("client", 3, 3, name) for name in files}
    for name, allocation in allocations.items():
        pool.fill([tensor(allocation.input_offset_bytes, 3)], [b"ask"], name)
        os.pwrite(files[name], b"say", allocation.reply_offset_bytes)
        assert pool.memory_of(allocation)[allocation.reply_offset_bytes :][:3] == b"say"
    assert len({allocation.input_offset_bytes for allocation in allocations.values()}) == 3, (
        "two ledgers"
    )
    for name, allocation in allocations.items():
        data = os.pread(files[name], 16 * PAGE, 0)
        assert data.replace(b"\0", b"") in (b"asksay", b"sayask")
        assert sparse.held_bytes(files[name]) == 2 * PAGE
        pool.release_inputs(allocation)
        assert os.pread(files[name], 16 * PAGE, 0).replace(b"\0", b"") == b"say"
        pool.release_reply(allocation)
        assert sparse.held_bytes(files[name]) == 0
        pool.check()


def test_what_a_worker_touched_beside_its_slabs_is_given_back_when_it_is_gone(
    divided: tuple[RequestPool, dict[str, int]],
) -> None:
    pool, files = divided
    allocation = pool.reserve("client", 3, 3, "ada")
    pool.fill([tensor(allocation.input_offset_bytes, 3)], [b"ask"], "ada")
    with mmap.mmap(files["ada"], 0) as workers:
        workers[:] = workers[:].replace(b"\0", b"!")
    pool.tidy("ada")
    assert sparse.held_bytes(files["ada"]) == 2 * PAGE
    assert os.pread(files["ada"], 3, allocation.input_offset_bytes) == b"ask"
    pool.tidy("bob")  # has no effect for a tenant without requests
    pool.release_inputs(allocation)
    pool.release_reply(allocation)


def test_a_tenants_file_that_cannot_be_had_is_that_requests_refusal(
    new_file: Callable[[int], int],
) -> None:
    def none_left(tenant: str) -> int:
        raise OSError(24, "Too many open files")

    pool = RequestPool(new_file(16 * PAGE), none_left)
    with pytest.raises(QueueFull, match="Too many open files"):
        pool.reserve("client", 3, 3, "ada")
    assert pool.is_empty
    pool.close()
