"""The daemon's cuda device, with a fake GPU: order of copies, bounds, lifetime, all error paths."""

from __future__ import annotations

import functools
import gc
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest
from fake_cuda import World

from memory_daemon import commit_areas
from memory_daemon.commit_areas import CommitAreas
from pipeswitch.commits.area import create_area
from pipeswitch.devices.cuda import memory as cuda_memory
from pipeswitch.devices.cuda import pinned as cuda_pinned
from pipeswitch.devices.cuda.bindings import Cuda, CudaError
from pipeswitch.devices.cuda.fences import RING_FENCES
from pipeswitch.devices.cuda.memory import CudaDeviceMemory, chunks
from pipeswitch.ipc.control_page import new_doorbell, sealed_memfd
from pipeswitch.ipc.messages import daemon as daemon_msg
from pipeswitch.ipc.messages.base import (
    ByteRange,
    JobName,
    ModelName,
    OpId,
    ResourceLimits,
    SliceRead,
)
from tests.open_files import open_files

MIB = 1 << 20
JOB = JobName("j")
ARENA_BYTES = STORE_BYTES = 8 * MIB
FENCE_COUNT = 64
SETTINGS = daemon_msg.DaemonSettings(
    device="cuda:0",
    limits=ResourceLimits(
        arena_bytes=ARENA_BYTES, store_bytes=STORE_BYTES, fence_count=FENCE_COUNT
    ),
)
DEADLINE_S = 30.0


class Rig:
    """A daemon's device with a fake GPU."""

    def __init__(self, world: World | None = None, **options: object) -> None:
        self.world = world or World()
        self.store = sealed_memfd("test-store", STORE_BYTES)
        self.doorbells = [new_doorbell()]
        self.lost: list[bool] = []
        self.ended: Queue[daemon_msg.TransmitEnded] = Queue()
        self.memory = CudaDeviceMemory(
            Cuda(self.world.runtime, self.world.driver),
            SETTINGS,
            store=self.store,
            doorbells=self.doorbells,
            on_lost=lambda: self.lost.append(True),
            **options,  # type: ignore[arg-type]
        )

    def run(self, order: daemon_msg.TransmitModel) -> daemon_msg.TransmitEnded:
        self.memory.transmit(order, self.ended.put)
        return self.ended.get(timeout=DEADLINE_S)

    def arena(self, start: int, size: int) -> bytes:
        return self.world.bytes_at(self.memory._base + start, size)

    def fences(self, count: int = FENCE_COUNT) -> list[int]:
        return memoryview(self.arena(0, 4 * count)).cast("I").tolist()

    def host_words(self) -> list[int]:
        raw = os.pread(self.memory.export_descriptors()[0], 4 * FENCE_COUNT, 0)
        return memoryview(raw).cast("I").tolist()

    def fill_store(self, offset: int, data: bytes) -> None:
        self.memory.store_view(offset, len(data))[:] = data

    def close(self) -> None:
        self.memory.close()
        for descriptor in (self.store, *self.doorbells):
            os.close(descriptor)


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig_made = Rig()
    yield rig_made
    rig_made.close()


def order(
    op_id: int,
    sizes: Sequence[int],
    *,
    start: int = MIB,
    store: int = 0,
    first_fence: int = 0,
) -> daemon_msg.TransmitModel:
    """Return an order to copy groups of ``sizes`` bytes, contiguous in the store and the arena."""
    groups, position = [], 0
    for index, size in enumerate(sizes):
        groups.append(
            daemon_msg.GroupCopy(
                store_offset_bytes=store + position,
                arena_offset_bytes=start + position,
                size_bytes=size,
                fence=first_fence + index,
            )
        )
        position += size
    return daemon_msg.TransmitModel(
        model=ModelName("m"),
        op_id=OpId(op_id),
        arena_offset_bytes=start,
        region_bytes=position,
        groups=tuple(groups),
    )


def group(store: int, size: int) -> daemon_msg.GroupCopy:
    return daemon_msg.GroupCopy(
        store_offset_bytes=store, arena_offset_bytes=0, size_bytes=size, fence=0
    )


def test_a_fresh_arena_reads_as_zeros(rig: Rig) -> None:
    assert not any(rig.arena(0, ARENA_BYTES))


@pytest.mark.parametrize("writer", ["copy", "write"])
def test_the_word_follows_its_data(writer: str) -> None:
    rig = Rig(fence_writer=writer)
    data = random.Random(1).randbytes(3 * MIB)
    rig.fill_store(0, data)
    states = watch(rig, data)
    assert rig.run(order(9, [MIB, MIB, MIB])).is_complete
    assert len(states) == 6  # one after each of three copies and three fence words
    assert rig.fences(4) == [9, 9, 9, 0]
    assert rig.host_words()[:4] == [9, 9, 9, 0]
    rig.close()


def watch(rig: Rig, data: bytes) -> list[list[int]]:
    """Return a list that gets the fences after each operation; check that their data is there."""
    states: list[list[int]] = []

    def watched(run: Callable[[], bool]) -> bool:
        has_run = run()
        if has_run and hasattr(run, "touched"):
            states.append(rig.fences(3))
            for index, words in enumerate(zip(states[-1], rig.host_words(), strict=False)):
                end = (index + 1) * MIB * any(words)
                assert rig.arena(MIB, end) == data[:end], "a word rose before its data"
        return has_run

    for stream in rig.world.streams.values():
        plain_put = stream.put
        stream.put = lambda run, put=plain_put: put(functools.partial(watched, run))
    return states


def test_copies_do_not_wait_for_fences(rig: Rig) -> None:
    data = random.Random(1).randbytes(3 * MIB)
    rig.fill_store(0, data)
    may_write, writes = threading.Event(), rig.world.streams[rig.memory._fence_writer._writes]
    plain_step = writes.step
    writes.step = lambda: may_write.is_set() and plain_step()
    rig.memory.transmit(order(9, [MIB, MIB, MIB]), rig.ended.put)
    ends_at = time.monotonic() + DEADLINE_S
    while rig.host_words()[:3] != [9, 9, 9] and time.monotonic() < ends_at:
        threading.Event().wait(0.001)
    assert (rig.host_words()[:4], rig.fences(3)) == ([9, 9, 9, 0], [0, 0, 0])
    assert rig.arena(MIB, 3 * MIB) == data
    assert rig.ended.empty(), "the end is reported after the fences"
    may_write.set()
    assert rig.ended.get(timeout=DEADLINE_S).is_complete
    assert rig.fences(4) == [9, 9, 9, 0]


CALLS = {
    "cudaSetDevice",
    "cudaEventCreateWithFlags",
    "cudaMemcpyAsync",
    "cudaEventRecord",
    "cudaEventQuery",
    "cudaEventSynchronize",
}
CALLS_OF = {"copy": CALLS, "write": CALLS | {"cudaStreamWaitEvent", "cuStreamWriteValue32"}}


@pytest.mark.parametrize("is_sticky", [False, True])
@pytest.mark.parametrize(
    ("writer", "call"), [(one, call) for one, calls in CALLS_OF.items() for call in sorted(calls)]
)
def test_a_fault_in_any_call_of_a_copy(writer: str, call: str, is_sticky: bool) -> None:
    """Let each of the calls fail once: no fence is without its data, and the next copy works."""
    code = "cudaErrorIllegalAddress" if is_sticky else "cudaErrorInvalidValue"
    if call == "cuStreamWriteValue32" and not is_sticky:
        code = "CUDA_ERROR_INVALID_VALUE"
    sizes, number, is_over = [MIB, MIB, MIB], 0, False
    while not is_over:
        rig, data = Rig(fence_writer=writer), random.Random(number).randbytes(3 * MIB)
        rig.fill_store(0, data)
        watch(rig, data)
        rig.world.fail(call, code, after=number)
        began = len(rig.world.calls)
        ended = rig.run(order(9, sizes))
        if is_over := bool(rig.world._failures.pop(call)):  # the path makes only ``number`` calls
            assert ended.is_complete
            assert {name for name, _ in rig.world.calls[began:]} == CALLS_OF[writer]
        assert rig.lost == [True] * (is_sticky and not is_over)
        if rig.lost:  # the daemon ends
            with pytest.raises(CudaError):
                rig.memory.scrub(MIB, 100)
        else:
            arrived = ended.group_count
            assert rig.host_words()[:3] == [9] * arrived + [0] * (3 - arrived)
            assert rig.fences(3)[:arrived] == [9] * arrived
            assert rig.arena(MIB, arrived * MIB) == data[: arrived * MIB]
            assert not any(stream.queue for stream in rig.world.streams.values())
            assert rig.run(order(10, sizes)).is_complete
            assert (rig.fences(3), rig.arena(MIB, 3 * MIB)) == ([10] * 3, data)
            rig.close()
            assert rig.world.events == {}
        number += 1


def test_a_cancelled_copy_leaves_nothing_behind_for_the_next_one_in_its_place(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_memory, "WINDOW_BYTES", MIB)  # groups arrive before the next is sent
    data, landed = random.Random(1).randbytes(3 * MIB), rig.memory._landed
    rig.fill_store(0, data)

    def cancel(fence: int, value: int) -> None:
        landed(fence, value)
        rig.memory.cancel(OpId(9))

    monkeypatch.setattr(rig.memory, "_landed", cancel)
    ended = rig.run(order(9, [MIB, MIB, MIB]))
    assert (ended.is_complete, ended.group_count, rig.fences(3)) == (False, 1, [9, 0, 0])
    events = len(rig.world.events)
    for op_id in range(10, 30):
        assert rig.run(order(op_id, [MIB, MIB, MIB])).is_complete
        assert (rig.fences(4), rig.arena(MIB, 3 * MIB)) == ([op_id] * 3 + [0], data)
    assert len(rig.world.events) <= events + 1, "events are used again"


def test_a_source_of_words_is_not_used_again_before_its_copy_has_run(rig: Rig) -> None:
    """Send groups without bytes: only the ring of fence words limits them, not the copy window."""
    for op_id in range(1, 2 * RING_FENCES // FENCE_COUNT + 3):
        assert rig.run(order(op_id, [0] * FENCE_COUNT)).is_complete
        assert rig.fences() == [op_id] * FENCE_COUNT


def test_no_copy_crosses_the_end_of_a_registration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_pinned, "PIN_BYTES", MIB)
    rig = Rig()
    data = random.Random(2).randbytes(5 * MIB)
    rig.fill_store(MIB // 2, data)  # the fake refuses a copy that crosses two registrations
    ended = rig.run(order(3, [3 * MIB + 17, 100, MIB], store=MIB // 2))
    assert ended.is_complete
    assert rig.arena(MIB, ended.copied_bytes) == data[: ended.copied_bytes]
    rig.close()


def test_chunks_cover_a_group_and_stop_at_registrations() -> None:
    pin = cuda_pinned.PIN_BYTES
    pieces = list(chunks(group(pin - 5, pin + 10)))
    assert pieces[0] == (pin - 5, 0, 5)
    assert sum(size for *_, size in pieces) == pin + 10
    assert [(source, offset) for source, offset, _ in pieces] == [
        (pin - 5 + done, done)
        for done in [sum(s for *_, s in pieces[:i]) for i in range(len(pieces))]
    ]
    assert list(chunks(group(0, 0))) == [(0, 0, 0)]


def test_a_refused_registration_costs_speed_and_nothing_else() -> None:
    rig = Rig()
    rig.world.fail("cudaHostRegister", "cudaErrorNotPermitted")
    data = random.Random(3).randbytes(2 * MIB)
    rig.fill_store(0, data)
    rig.fill_store(4 * MIB, b"x")  # the refused registration is not tried again at once
    assert [name for name, _ in rig.world.calls].count("cudaHostRegister") == 1
    assert rig.run(order(1, [2 * MIB])).is_complete
    assert rig.arena(MIB, 2 * MIB) == data
    assert not rig.lost
    rig.close()


def test_a_refused_registration_is_tried_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_pinned, "RETRY_S", 0.0)
    rig = Rig()
    rig.world.fail("cudaHostRegister", "cudaErrorMemoryAllocation")
    for _ in range(3):
        rig.fill_store(0, b"x")
    assert [name for name, _ in rig.world.calls].count("cudaHostRegister") == 2
    rig.close()


@pytest.mark.parametrize(
    "error", [ValueError("a bug"), CudaError("call", "cudaErrorInvalidValue", "")]
)
def test_ranges_are_pinned_after_one_could_not_be(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, tried = Rig(), Queue[int]()

    def pin(offset: int, _: int) -> None:
        tried.put(offset)
        raise error

    monkeypatch.setattr(rig.memory._store, "pin", pin)
    for op_id in (1, 2):
        assert rig.run(order(op_id, [MIB])).is_complete
        assert tried.get(timeout=DEADLINE_S) == 0
    assert not rig.lost
    rig.close()


def test_what_another_daemon_wrote_is_staged_once_and_pinned_for_the_next_time(rig: Rig) -> None:
    """Find bytes in the store, like a second device's daemon or a restarted daemon."""
    data = random.Random(4).randbytes(2 * MIB)
    os.pwrite(rig.store, data, 0)

    def pins() -> int:
        return [name for name, _ in rig.world.calls].count("cudaHostRegister")

    for op_id in (1, 2):
        assert rig.run(order(op_id, [MIB, MIB])).is_complete
        assert rig.arena(MIB, 2 * MIB) == data
        ends_at = time.monotonic() + DEADLINE_S
        while not pins() and time.monotonic() < ends_at:
            threading.Event().wait(0.001)
        assert pins() == 1


@pytest.mark.parametrize(
    "call", ["cudaSetDevice", "cudaMalloc", "cudaStreamCreateWithFlags", "cudaHostAlloc"]
)
def test_a_device_that_cannot_be_had_says_which_call_failed(call: str) -> None:
    world = World()
    world.fail(call, "cudaErrorMemoryAllocation")
    with pytest.raises(CudaError, match=call):
        Rig(world)


def test_an_arena_larger_than_the_device_is_an_error() -> None:
    with pytest.raises(CudaError):
        Rig(World(device_bytes=ARENA_BYTES // 2))


def test_the_arena_is_exported_once_as_one_handle(rig: Rig) -> None:
    other = Cuda(World().runtime, World().driver)
    here = other.open_handle(rig.memory.export_handle())
    rig.fill_store(0, b"through the handle")
    rig.run(order(1, [18]))
    assert World().bytes_at(here + MIB, 18) == b"through the handle"
    other.close_handle(here)


def test_reading_a_slice_never_shows_a_staging_buffer_too_early() -> None:
    rig = Rig()
    data = random.Random(4).randbytes(6 * MIB)
    rig.fill_store(0, data)
    rig.run(order(1, [6 * MIB]))
    pieces = [ByteRange(offset_bytes=o, size_bytes=s) for o, s in ((MIB, 3 * MIB), (7, 5), (0, 9))]
    into = bytearray(sum(piece.size_bytes for piece in pieces))
    rig.memory.read_slice(MIB, pieces, memoryview(into))
    expected = b"".join(data[p.offset_bytes : p.offset_bytes + p.size_bytes] for p in pieces)
    assert bytes(into) == expected
    rig.close()


def test_a_slice_is_copied_to_its_image_and_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_memory, "BOUNCE_BYTES", 1000)
    rig, size, whole = Rig(), 10_001, ByteRange(offset_bytes=0, size_bytes=10_001)
    data, into = random.Random(6).randbytes(size), bytearray(size)
    rig.fill_store(0, data)
    rig.run(order(1, [size]))
    image = sealed_memfd("test-image", size)
    rig.memory.save_slice(MIB, size, image)
    assert os.pread(image, size, 0) == data
    rig.memory.scrub(MIB, size)
    for copied in (3000, size):  # the first copy in is cancelled after three pieces
        pieces = iter(range(0, size + 1000, 1000))
        is_enough = functools.partial(lambda most, done: next(done) >= most, copied, pieces)
        rig.memory.load_slice(MIB, size, image, is_enough)
        rig.memory.read_slice(MIB, [whole], memoryview(into))
        assert bytes(into) == data[:copied].ljust(size, b"\0")
    os.close(image)
    rig.close()


def commit_order(number: int, size: int) -> daemon_msg.CommitCopy:
    return daemon_msg.CommitCopy(
        job=JOB,
        op_id=OpId(1),
        number=number,
        step=number,
        slice_offset_bytes=MIB,
        slice_bytes=size,
        ranges=(ByteRange(offset_bytes=0, size_bytes=size),),
    )


def committed(rig: Rig, areas: CommitAreas, number: int, size: int) -> bytes:
    """Commit the slice; return the bytes that the commit has."""
    order = commit_order(number, size)
    area = areas.area_for(order)
    assert areas.copy(order, area).error == ""
    commit = area.newest()
    assert commit is not None
    return bytes(area.image(commit))


def test_a_commit_needs_no_staging_once_its_slot_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_memory, "BOUNCE_BYTES", MIB)
    rig, sent = Rig(), list[SliceRead]()
    rig.fill_store(0, b"the store is pinned now")
    areas, size = CommitAreas(rig.memory, sent.append), 3 * MIB + 5
    descriptor = create_area(4 * MIB)
    areas.open(daemon_msg.OpenCommits(job=JOB, slot_bytes=4 * MIB), descriptor)
    pinned = len(rig.world.registered)
    for number in range(1, 5):
        data = random.Random(number).randbytes(size)
        rig.fill_store(0, data)
        rig.run(order(number, [size]))
        before = len(rig.world.calls)
        assert committed(rig, areas, number, size) == data
        names = [name for name, _ in rig.world.calls[before:]]
        assert names.count("cudaMemcpyAsync") == (1 if number > 2 else 4)
        assert len(rig.world.registered) == pinned + min(number, 2)
        assert len(sent) == number
    areas.close(JOB)
    assert len(rig.world.registered) == pinned, "unpinned before it is unmapped"
    rig.close()
    os.close(descriptor)


def test_a_commit_area_that_cannot_be_pinned_is_staged_and_asked_once() -> None:
    rig, size = Rig(), 5000
    rig.fill_store(0, bytes(range(250)) * 20)
    rig.run(order(1, [size]))
    rig.world.broken["cudaHostRegister"] = "cudaErrorNotPermitted"
    areas = CommitAreas(rig.memory, lambda _: None)
    descriptor = create_area(MIB)
    areas.open(daemon_msg.OpenCommits(job=JOB, slot_bytes=MIB), descriptor)
    for number in range(1, 6):
        assert committed(rig, areas, number, size) == bytes(range(250)) * 20
    assert [name for name, _ in rig.world.calls].count("cudaHostRegister") == 1 + 2
    areas.close(JOB)
    rig.close()
    os.close(descriptor)


def test_pinning_takes_none_of_a_commits_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(commit_areas, "now_ms", lambda: clock[0])
    device: Any = SimpleNamespace(
        arena_bytes=ARENA_BYTES,
        read_slice=lambda *_: clock.append(clock.pop() + 5.0),
        pin=lambda _: clock.append(clock.pop() + 900.0),
    )
    areas = CommitAreas(device, lambda _: None)
    descriptor = create_area(MIB)
    areas.open(daemon_msg.OpenCommits(job=JOB, slot_bytes=MIB), descriptor)
    order = commit_order(1, 100)
    assert areas.copy(order, areas.area_for(order)).copy_ms == 5.0
    os.close(descriptor)


def test_a_larger_image_pins_its_slot_again() -> None:
    rig = Rig()
    areas = CommitAreas(rig.memory, lambda _: None)
    descriptor = create_area(MIB)
    areas.open(daemon_msg.OpenCommits(job=JOB, slot_bytes=MIB), descriptor)
    rig.fill_store(0, b"x" * 9000)
    rig.run(order(1, [9000]))
    pinned = sum(rig.world.registered.values())
    for number, size in enumerate([100, 200, 9000, 50], 1):
        assert committed(rig, areas, number, size) == b"x" * size
    assert sum(rig.world.registered.values()) == pinned + 9000 + 200
    areas.close(JOB)
    rig.close()
    os.close(descriptor)


def test_closing_gives_everything_back() -> None:
    gc.collect()  # frees mappings that other tests have left
    descriptors = open_files("memfd")
    rig = Rig()
    rig.fill_store(0, bytes(MIB))
    rig.run(order(1, [MIB]))
    rig.close()
    world = rig.world
    assert (world.used_bytes, world.registered, world.streams, world.events) == (0, {}, {}, {})
    assert world.host_blocks == {}
    assert open_files("memfd") == descriptors
