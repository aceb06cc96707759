"""Conformance of every device, with real memory and real processes.

``cuda`` runs with fake bindings, but real processes: once with waits on the CPU, once with waits on
the device. tests/gpu runs the same tests on a real GPU."""

from __future__ import annotations

import mmap
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from queue import Queue
from typing import Any, Final

import msgspec
import numpy as np
import pytest
import torch
from fake_cuda import World
from fake_cuda.host_torch import HostTorch
from process_tools import shm_names, until

from pipeswitch.base.errors import LocalProtocolError, RemoteProtocolError
from pipeswitch.devices import worker_device as view_module
from pipeswitch.devices.cpu.memory import CpuDeviceMemory
from pipeswitch.devices.cpu.worker_device import CpuWorkerDevice
from pipeswitch.devices.cuda import memory as cuda_memory
from pipeswitch.devices.cuda.bindings import Cuda, NoCudaDevice
from pipeswitch.devices.cuda.examine import has_driver_library
from pipeswitch.devices.cuda.ladder import CudaOptions, Waits
from pipeswitch.devices.cuda.memory import CudaDeviceMemory
from pipeswitch.devices.cuda.torch import CudaTorch
from pipeswitch.devices.cuda.worker_device import CudaWorkerDevice
from pipeswitch.devices.memory import DeviceMemory
from pipeswitch.devices.worker_device import WorkerDevice
from pipeswitch.ipc.control_page import BOARD_BYTES, new_doorbell, ring, sealed_memfd
from pipeswitch.ipc.messages.base import ByteRange, OpId, ResourceLimits
from pipeswitch.ipc.messages.daemon import CopyPart, DaemonSettings, TransmitEnded, TransmitModel
from pipeswitch.ipc.messages.worker import WorkerSettings
from pipeswitch.programs.interface.layout import TensorSpec, aligned
from tests.unit.test_cuda_memory import order as order_of
from tests.unit.test_cuda_view import spec

ROOT: Final = Path(__file__).resolve().parents[2]
MIB: Final = 1 << 20
ARENA_BYTES: Final = 48 * MIB
STORE_BYTES: Final = 48 * MIB
FENCE_COUNT: Final = 256
BELL_COUNT: Final = 3
DEADLINE_S: Final = 60.0
POISON: Final = 0xA5
ROWS: Final = (0, 7, 8, 2303)  # of a table of 9 MiB


def settings(link_bytes_per_s: float = 0.0) -> DaemonSettings:
    return DaemonSettings(
        device="",
        limits=ResourceLimits(
            arena_bytes=ARENA_BYTES,
            store_bytes=STORE_BYTES,
            fence_count=FENCE_COUNT,
            link_bytes_per_s=link_bytes_per_s,
        ),
    )


class CpuRig:
    """A cpu device with its store, doorbells and control page; ``view`` makes a worker's device."""

    is_sealed = True  # workers cannot write to models
    waits_on_the_host = True

    def __init__(self, link_bytes_per_s: float = 0.0) -> None:
        self.store_fd = sealed_memfd("test-store", STORE_BYTES)
        self.control_page_fd = sealed_memfd("test-board", BOARD_BYTES)
        self.doorbells = [new_doorbell() for _ in range(BELL_COUNT)]  # the last one: the daemon's
        self.memory = self._open(link_bytes_per_s)
        self.ended: Queue[TransmitEnded] = Queue()
        self._views: list[WorkerDevice] = []
        self._deadlines: list[threading.Timer] = []

    def _open(self, link_bytes_per_s: float) -> DeviceMemory:
        memory = CpuDeviceMemory(settings(link_bytes_per_s), **self.descriptors())
        self.models_fd, self.work_fd = memory.export_descriptors()
        return memory

    def descriptors(self) -> dict[str, Any]:
        *workers, own = self.doorbells
        return {
            "store": self.store_fd,
            "control_page": self.control_page_fd,
            "doorbells": workers,
            "doorbell": own,
        }

    def _look(self, slot: int) -> WorkerDevice:
        settings = WorkerSettings(
            slot=slot,
            device="cpu",
            limits=ResourceLimits(
                arena_bytes=ARENA_BYTES, fence_count=FENCE_COUNT, doorbell_count=BELL_COUNT
            ),
        )
        arena = self.models_fd, self.work_fd
        return CpuWorkerDevice(
            settings, arena, control_page=self.control_page_fd, doorbells=self.doorbells
        )

    def view(self, slot: int = 0) -> WorkerDevice:
        self._views.append(self._look(slot))
        return self._views[-1]

    def arena(self, start: int, size: int) -> bytes:
        """Return device bytes as another process would read them."""
        return os.pread(self.models_fd, size, start)

    def fence(self, index: int) -> int:
        return int.from_bytes(self.arena(4 * index, 4), "little")

    def fill_store(self, offset: int, data: bytes) -> None:
        self.memory.store_view(offset, len(data))[:] = data

    def transmit(self, order: TransmitModel) -> None:
        self.memory.transmit(order, self.ended.put)

    def run(self, order: TransmitModel) -> TransmitEnded:
        self.transmit(order)
        return self.ended.get(timeout=DEADLINE_S)

    def _child_needs(self) -> tuple[str, list[int], list[str]]:
        """Return the child's first lines, its inherited descriptors, and its first arguments."""
        descriptors = [self.models_fd, self.work_fd, self.control_page_fd, *self.doorbells]
        return CHILD, descriptors, list(map(str, descriptors))

    def child(self, code: str, *arguments: object) -> subprocess.Popen[str]:
        """Start a new process that has slot 0's device as ``view`` and the mapping as ``arena``."""
        prelude, descriptors, first = self._child_needs()
        path = os.pathsep.join([str(ROOT / "tests/fakes"), os.environ.get("PYTHONPATH", "")])
        child = subprocess.Popen(
            [sys.executable, "-c", prelude + code, *first, *map(str, arguments)],
            pass_fds=descriptors,
            cwd=ROOT,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        deadline = threading.Timer(DEADLINE_S, child.kill)
        deadline.start()
        self._deadlines.append(deadline)
        return child

    def close(self) -> None:
        for deadline in self._deadlines:
            deadline.cancel()
            deadline.join()
        for view in self._views:
            view.close()
        self.memory.close()
        for descriptor in (self.store_fd, self.control_page_fd, *self.doorbells):
            os.close(descriptor)


class FakeCudaRig(CpuRig):
    """The cuda device with fake bindings. Each process has its own fake runtime. As with the real
    bindings, the processes share the device's bytes through the IPC handle."""

    is_sealed = False  # all workers trust each other
    waits: Waits = "cpu"
    package = "fake_cuda"  # the bindings of the child

    def _open(self, link_bytes_per_s: float) -> DeviceMemory:
        self.world = World(bytes_per_s=link_bytes_per_s)
        self._cuda_memory = CudaDeviceMemory(
            Cuda(self.world.runtime, self.world.driver), settings(), **self.descriptors()
        )
        (self.words_fd,) = self._cuda_memory.export_descriptors()
        return self._cuda_memory

    def _look(self, slot: int) -> WorkerDevice:
        world = World(blocking_waits=True)
        cuda = Cuda(world.runtime, world.driver)
        return self._view_over(cuda, HostTorch(world), slot)

    def _view_over(self, cuda: Cuda, side: CudaTorch, slot: int) -> WorkerDevice:
        settings = WorkerSettings(
            slot=slot,
            device="cuda:0",
            handle=self._cuda_memory.export_handle(),
            limits=ResourceLimits(
                arena_bytes=ARENA_BYTES, fence_count=FENCE_COUNT, doorbell_count=BELL_COUNT
            ),
        )
        options = CudaOptions(package=self.package, waits=self.waits)
        return CudaWorkerDevice(
            cuda,
            side,
            settings,
            options,
            fences_descriptor=self.words_fd,
            control_page=self.control_page_fd,
            doorbells=self.doorbells,
        )

    def arena(self, start: int, size: int) -> bytes:
        return self.world.bytes_at(self._cuda_memory._base + start, size)

    def _child_needs(self) -> tuple[str, list[int], list[str]]:
        descriptors = [self.words_fd, self.control_page_fd, *self.doorbells]
        handle = self._cuda_memory.export_handle().hex()
        return CUDA_CHILD, descriptors, [handle, self.waits, self.package, *map(str, descriptors)]


class WaitingCudaRig(FakeCudaRig):
    """``FakeCudaRig`` in which the device itself waits for words."""

    waits: Waits = "gpu"
    waits_on_the_host = False


class _OwnHandle(Cuda):
    """Substitute for opening an IPC handle, which is impossible in the process that created it."""

    def __init__(self, cuda: Cuda, base: int) -> None:
        super().__init__(cuda._runtime, cuda._driver)
        self._base = base

    def open_handle(self, data: bytes) -> int:
        return self._base

    def close_handle(self, pointer: int) -> None:
        pass


class GpuRig(FakeCudaRig):
    """The cuda device on a real GPU."""

    package = "cuda.bindings"

    def _open(self, link_bytes_per_s: float) -> DeviceMemory:
        if link_bytes_per_s:
            pytest.skip("a real link cannot be slowed down")
        self._cuda = Cuda.load()
        try:
            self._cuda.device_count()
        except NoCudaDevice as error:
            pytest.skip(error.message)
        self._cuda_memory = CudaDeviceMemory(self._cuda, settings(), **self.descriptors())
        (self.words_fd,) = self._cuda_memory.export_descriptors()
        return self._cuda_memory

    def _look(self, slot: int) -> WorkerDevice:
        from pipeswitch.devices.cuda.torch import CudaTorch

        cuda = _OwnHandle(self._cuda, self._cuda_memory._base)
        return self._view_over(cuda, CudaTorch(0), slot)

    def arena(self, start: int, size: int) -> bytes:
        into = bytearray(size)
        whole = [ByteRange(offset_bytes=0, size_bytes=size)]
        self.memory.read_slice(start, whole, memoryview(into))
        return bytes(into)


class WaitingGpuRig(GpuRig):
    """``GpuRig`` in which the GPU itself waits for words."""

    waits: Waits = "gpu"
    waits_on_the_host = False


CHILD: Final = f"""
import mmap, os, random, signal, sys
from pipeswitch.devices.cpu.worker_device import CpuWorkerDevice
from pipeswitch.ipc.messages.base import ResourceLimits
from pipeswitch.ipc.messages.worker import WorkerSettings
models, work, board, *doorbells = map(int, sys.argv[1:{4 + BELL_COUNT}])
arguments = sys.argv[{4 + BELL_COUNT}:]
limits = ResourceLimits(arena_bytes={ARENA_BYTES}, fence_count={FENCE_COUNT},
                        doorbell_count=len(doorbells))
settings = WorkerSettings(slot=0, device="cpu", limits=limits)
view = CpuWorkerDevice(settings, [models, work], control_page=board, doorbells=doorbells)
arena = mmap.mmap(models, {ARENA_BYTES}, prot=mmap.PROT_READ)
def say(text):
    print(text, flush=True)
"""

CUDA_CHILD: Final = f"""
import os, random, signal, sys
from pipeswitch.devices.cuda.bindings import Cuda
from pipeswitch.devices.cuda.torch import torch_side
from pipeswitch.devices.cuda.ladder import CudaOptions
from pipeswitch.devices.cuda.worker_device import CudaWorkerDevice
from pipeswitch.ipc.messages.base import ResourceLimits
from pipeswitch.ipc.messages.worker import WorkerSettings
handle, waits, package = bytes.fromhex(sys.argv[1]), sys.argv[2], sys.argv[3]
words, board, *doorbells = map(int, sys.argv[4:{6 + BELL_COUNT}])
arguments = sys.argv[{6 + BELL_COUNT}:]
side = torch_side(package, 0)
limits = ResourceLimits(arena_bytes={ARENA_BYTES}, fence_count={FENCE_COUNT},
                        doorbell_count=len(doorbells))
settings = WorkerSettings(slot=0, device="cuda:0", limits=limits, handle=handle)
options = CudaOptions(package=package, waits=waits)
view = CudaWorkerDevice(Cuda.load(package), side, settings, options,
                    fences_descriptor=words, control_page=board, doorbells=doorbells)
class Arena:
    def __getitem__(self, place):
        with side.computing(in_slice=False):  # behind the waits
            size = place.stop - place.start
            return view.slice_bytes(place.start, size).cpu().numpy().tobytes()
arena = Arena()
def say(text):
    print(text, flush=True)
"""

DEVICES: Final[dict[str, type[CpuRig]]] = {
    "cpu": CpuRig,
    "cuda": FakeCudaRig,
    "cuda-waits": WaitingCudaRig,
}
if has_driver_library():
    DEVICES |= {"gpu": GpuRig, "gpu-waits": WaitingGpuRig}
MakeRig = Callable[..., CpuRig]


@pytest.fixture(params=sorted(DEVICES))
def make_rig(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeRig]:
    rigs: list[CpuRig] = []

    def make(link_bytes_per_s: float = 0.0) -> CpuRig:
        if link_bytes_per_s:
            monkeypatch.setattr(cuda_memory, "WINDOW_BYTES", 4 * MIB)  # small, as the link is slow
        rigs.append(DEVICES[request.param](link_bytes_per_s))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()


@pytest.fixture
def rig(make_rig: MakeRig) -> CpuRig:
    return make_rig()


def order(op_id: int, start: int, sizes: Sequence[int], **places: int) -> TransmitModel:
    return order_of(op_id, sizes, start=start, **places)


def in_whole_units(sent: TransmitModel) -> TransmitModel:
    """Return the same order with the region size that the scheduler leases."""
    return msgspec.structs.replace(sent, region_bytes=aligned(sent.region_bytes, 2 * MIB))


def on_host(tensor: torch.Tensor) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Return the bytes of a device tensor, on the cpu device without a copy."""
    return tensor.cpu().numpy()  # type: ignore[no-any-return]


def finish(child: subprocess.Popen[str], expected: int = 0) -> str:
    """Wait for a child; return its output, or fail with its error output."""
    out, err = child.communicate()  # the deadline kills a child that hangs
    assert child.returncode == expected, err
    return out


def expect(child: subprocess.Popen[str], text: str) -> None:
    line = child.stdout.readline().strip()
    if not line:  # the child ended, or its deadline killed it
        finish(child)
    assert line == text


# ---- transmissions --------------------------------------------------------------------------


def test_copies_land_at_their_offsets_and_nothing_else_changes(rig: CpuRig) -> None:
    rig.fill_store(0, bytes([POISON]) * (32 * MIB))
    rig.run(order(1, MIB, [32 * MIB]))  # poisons the region and both sides of it
    data = random.Random(1).randbytes(20 * MIB)
    rig.fill_store(0, data)
    sizes = [1, 511, 512, 4097, 9 * MIB + 3, 0, 8 * MIB]
    start = 2 * MIB + 512
    before = rig.arena(FENCE_COUNT * 4, ARENA_BYTES - FENCE_COUNT * 4)
    ended = rig.run(order(2, start, sizes, first_fence=10))
    total = sum(sizes)
    assert (ended.is_complete, ended.group_count, ended.copied_bytes) == (True, len(sizes), total)
    after = rig.arena(FENCE_COUNT * 4, ARENA_BYTES - FENCE_COUNT * 4)
    at = start - FENCE_COUNT * 4
    assert after[at : at + total] == data[:total]
    assert after[:at] == before[:at]
    assert after[at + total :] == before[at + total :]
    fences = [rig.fence(index) for index in range(FENCE_COUNT)]
    assert fences == [1] + [0] * 9 + [2] * len(sizes) + [0] * (FENCE_COUNT - 10 - len(sizes))


def by_rows(op_id: int) -> TransmitModel:
    """Return an order for rows of a table, for the groups around it, and last for the table."""
    sent = in_whole_units(order(op_id, 2 * MIB, [1000, 9 * MIB, 5000, MIB]))
    first, table, *others = sent.groups
    rows = msgspec.structs.replace(table, fence=4, row_bytes=4096, rows=ROWS)
    return msgspec.structs.replace(sent, groups=(rows, first, *others, table))


def test_rows_of_a_table_arrive_before_its_neighbours_and_the_table_last(make_rig: MakeRig) -> None:
    rig = make_rig(20 * MIB)
    data = random.Random(1).randbytes(12 * MIB)
    rig.fill_store(0, data)
    view = rig.view()
    rig.transmit(by_rows(2))
    view.wait_group(4, OpId(2))
    for at in (1000 + 4096 * row for row in ROWS):
        assert rig.arena(2 * MIB + at, 4096) == data[at : at + 4096]
    view.wait_group(3, OpId(2))
    assert rig.fence(1) != 2, "the link is slow, so the table is not there"
    start = 8 * MIB if rig.is_sealed else 1000 + 9 * MIB  # on cpu also the rest of the unit
    assert rig.arena(2 * MIB + start, 10 * MIB - start) == data[start : 10 * MIB]


def test_a_copy_in_place_brings_the_parts_and_opens_no_unit_with_the_old_bytes(
    make_rig: MakeRig,
) -> None:
    rig, sizes, rng = (
        make_rig(40 * MIB),
        [MIB, 1000, 5 * MIB, 0, 300_000, 2 * MIB],
        random.Random(5),
    )
    old, new = rng.randbytes(9 * MIB), bytearray()
    whole, groups = in_whole_units(order(2, 2 * MIB, sizes)), []
    new += old
    for index, group in enumerate(whole.groups):
        parts, start = [], group.arena_offset_bytes - 2 * MIB
        for at in range(0, group.size_bytes, 40_000)[index % 2 :: 9]:
            size = min(30_000, group.size_bytes - at)
            new[start + at : start + at + size] = rng.randbytes(size)
            parts.append(CopyPart(start + at, at, size))
        groups.append(msgspec.structs.replace(group, parts=tuple(parts)))
    rig.fill_store(0, old)
    rig.run(in_whole_units(order(1, 2 * MIB, sizes)))
    rig.fill_store(0, bytes(new))
    view = rig.view()
    rig.transmit(msgspec.structs.replace(whole, groups=tuple(groups)))
    for group in whole.groups:
        view.wait_group(group.fence, OpId(2))
        end = group.arena_offset_bytes - 2 * MIB + group.size_bytes
        end = min(aligned(end, 2 * MIB), sum(sizes)) if rig.is_sealed and group.size_bytes else end
        assert rig.arena(2 * MIB, end) == new[:end]
    ended = rig.ended.get(timeout=DEADLINE_S)
    assert ended.copied_bytes == sum(group.copied_bytes for group in groups) < 2 * MIB


def test_the_bill_names_every_group_in_order(rig: CpuRig) -> None:
    ended = rig.run(order(1, MIB, [MIB] * 5))
    instants = [ended.started_at_ms, *ended.group_ends_at_ms, ended.ended_at_ms]
    assert len(instants) == 7
    assert instants == sorted(instants)


def test_a_reader_in_another_process_sees_the_data_when_it_sees_the_word(rig: CpuRig) -> None:
    rounds, sizes = 30, [4096, 700_001, 64, 2 * MIB, 123]
    child = rig.child(
        f"""
sizes, start = {sizes}, {2 * MIB}
say("ready")
for epoch in range(1, {rounds} + 1):
    position = start
    for word, size in enumerate(sizes):
        view.wait_group(word, epoch)
        # Later groups of this epoch may be there already, this and earlier ones must be.
        if arena[position:position + size] != bytes([epoch]) * size:
            sys.exit(f"epoch {{epoch}} group {{word}}: word before data")
        position += size
    say(epoch)
"""
    )
    expect(child, "ready")
    for op_id in range(1, rounds + 1):
        rig.fill_store(0, bytes([op_id]) * sum(sizes))
        rig.transmit(order(op_id, 2 * MIB, sizes))
        assert rig.ended.get(timeout=DEADLINE_S).is_complete
        expect(child, str(op_id))
    finish(child)


def test_words_rise_in_the_order_of_the_groups(make_rig: MakeRig) -> None:
    rig = make_rig(400 * MIB)
    counts: list[int] = []
    view = rig.view()

    def watch() -> None:
        for group in range(16):
            view.wait_group(group, OpId(1))  # on cuda this is the host's fence
            words = list(memoryview(rig.arena(0, 64)).cast("I"))
            counts.append(sum(words))
            assert words == sorted(words, reverse=True)

    watcher = threading.Thread(target=watch)
    watcher.start()
    rig.run(order(1, MIB, [MIB] * 16))
    watcher.join(DEADLINE_S)
    assert len(counts) == 16
    assert counts == sorted(counts)


@pytest.mark.parametrize("stale", [4, 6, 2**32 + 4])
def test_only_exactly_the_epoch_satisfies_a_wait(
    rig: CpuRig, monkeypatch: pytest.MonkeyPatch, stale: int
) -> None:
    class StillWaiting(Exception):
        pass

    def give_up(_: int) -> None:
        raise StillWaiting

    if not rig.waits_on_the_host:
        pytest.skip("the device waits by itself")
    view = rig.view()
    rig.run(order(stale, MIB, [100]))
    with monkeypatch.context() as patch:
        patch.setattr(view_module.os, "eventfd_read", give_up)
        with pytest.raises(StillWaiting):
            view.wait_group(0, OpId(5))
    rig.run(order(5, MIB, [100]))
    assert view.wait_group(0, OpId(5)) == 0.0


def test_a_copy_of_no_bytes_raises_its_word(rig: CpuRig) -> None:
    assert rig.run(order(9, MIB, [0, 0])).is_complete
    assert (rig.fence(0), rig.fence(1), rig.fence(2)) == (9, 9, 0)


def test_a_cancelled_transmission_stops_where_it_says(make_rig: MakeRig) -> None:
    rig = make_rig(20 * MIB)  # at this speed, all groups would take two seconds
    rig.fill_store(0, bytes([7]) * (40 * MIB))
    rig.transmit(order(3, MIB, [4 * MIB] * 10))
    rig.view(slot=1).wait_group(0, OpId(3))
    rig.memory.cancel(OpId(3))
    ended = rig.ended.get(timeout=DEADLINE_S)
    assert not ended.is_complete
    assert 1 <= ended.group_count < 10
    fences = [rig.fence(index) for index in range(10)]
    assert fences == [3] * ended.group_count + [0] * (10 - ended.group_count)
    untouched = rig.arena(MIB + ended.copied_bytes, 40 * MIB - ended.copied_bytes)
    assert not any(untouched), "bytes were written beyond what was reported"
    rig.memory.cancel(OpId(3))  # too late, so it has no effect
    assert rig.run(order(4, MIB, [100])).is_complete


def test_a_transmission_cancelled_in_the_queue_writes_nothing(make_rig: MakeRig) -> None:
    rig = make_rig(4 * MIB)  # bytes per second: the first takes 2 s once it has begun
    rig.fill_store(0, bytes([7]) * (8 * MIB))
    rig.transmit(order(1, MIB, [8 * MIB]))
    rig.transmit(order(2, 20 * MIB, [MIB], first_fence=20))
    rig.memory.cancel(OpId(2))
    rig.memory.cancel(OpId(1))
    ended = [rig.ended.get(timeout=DEADLINE_S) for _ in range(2)]
    assert [e.op_id for e in ended] == [1, 2]
    assert (ended[1].is_complete, ended[1].copied_bytes) == (False, 0)
    assert not any(rig.arena(20 * MIB, MIB))


# ---- a ring of memory (ADR 43), which one group after the other uses ------------------------

RING: Final = 4 * MIB  # two places of one allocation unit each
GROUP: Final = 2 * MIB - 1000


def through_a_ring(op_id: int, count: int) -> TransmitModel:
    """Return an order for groups of almost a unit, copied alternately to 2 and 4 MiB."""
    sent = order(op_id, 2 * MIB, [GROUP] * count)
    groups = tuple(
        msgspec.structs.replace(group, arena_offset_bytes=2 * MIB + index % 2 * 2 * MIB)
        for index, group in enumerate(sent.groups)
    )
    waits = tuple(max(0, index - 1) for index in range(count))
    return msgspec.structs.replace(sent, groups=groups, waits=waits, region_bytes=RING)


def test_no_group_lands_before_what_lay_there_has_computed(rig: CpuRig) -> None:
    count, view = 9, rig.view()
    for index in range(count):
        rig.fill_store(index * GROUP, bytes([index + 1]) * GROUP)
    for op_id in (1, 2):
        rig.transmit(through_a_ring(op_id, count))
        for index in range(count):
            view.report_computed(OpId(op_id), index)
            view.wait_group(index, OpId(op_id))
            view.quiesce()
            if index + 2 < count:
                assert rig.fence(index + 2) == op_id - 1, "its landing is read"
            assert rig.arena(2 * MIB + index % 2 * 2 * MIB, GROUP) == bytes([index + 1]) * GROUP
        ended = rig.ended.get(timeout=DEADLINE_S)
        assert (ended.is_complete, ended.copied_bytes) == (True, count * GROUP)


def test_a_copy_that_waits_believes_no_word_of_another_pass_and_ends_when_it_is_cancelled(
    rig: CpuRig,
) -> None:
    rig.fill_store(0, b"A" * (9 * GROUP))
    view = rig.view()
    rig.transmit(through_a_ring(7, 9))
    view.wait_group(1, OpId(7))
    view.report_computed(OpId(6), 9)  # a late report of an earlier operation
    rig.memory.cancel(OpId(7))
    ended = rig.ended.get(timeout=DEADLINE_S)
    assert (ended.is_complete, ended.group_count) == (False, 2)
    rig.transmit(through_a_ring(8, 9))  # still running when the memory is closed
    view.wait_group(1, OpId(8))


# ---- waiting --------------------------------------------------------------------------------


def test_no_wake_up_is_lost_in_ten_thousand_random_interleavings(rig: CpuRig) -> None:
    """Wait for groups and for the turn in random order; a lost wake-up would hang the child."""
    rounds = 10_000
    child = rig.child(
        f"""
rng = random.Random(2)
say("ready")
for epoch in range(1, {rounds} + 1):
    for _ in range(rng.randrange(2000) if rng.random() < 0.5 else 0):
        pass
    view.wait_group(epoch % 7, epoch)
    if epoch % 3 == 0:
        view.wait_turn(epoch)
    os.write(1, b".")
"""
    )
    expect(child, "ready")
    rng = random.Random(1)
    giver = rig.view(slot=1)
    turns = 0
    for op_id in range(1, rounds + 1):
        for _ in range(rng.randrange(2000) if rng.random() < 0.5 else 0):
            pass
        if rng.random() < 0.2:
            ring(rig.doorbells[0])  # wakes the child up without a reason
        has_turn = op_id % 3 == 0
        is_turn_first = rng.random() < 0.5
        if has_turn and is_turn_first:
            giver.raise_turn(op_id, 0)
        rig.transmit(order(op_id, MIB, [rng.randrange(200)], first_fence=op_id % 7))
        if has_turn and not is_turn_first:
            giver.raise_turn(op_id, 0)
        # The child may lag, but no word that it waits for may be overwritten.
        allowed_lag = rng.randrange(3)
        while turns < op_id - allowed_lag:
            assert child.stdout.read(1) == ".", "the child hangs: a wake-up was lost"
            turns += 1
    finish(child)


def test_the_turn_is_taken_by_the_slot_it_is_given_to(rig: CpuRig) -> None:
    child = rig.child("""
say("ready")
view.wait_turn(5)
view.raise_turn(6, 1)
""")
    expect(child, "ready")
    mine = rig.view(slot=1)
    mine.raise_turn(5, 0)
    mine.wait_turn(6)
    finish(child)


# ---- isolation and death --------------------------------------------------------------------


def test_a_worker_cannot_map_models_for_writing(rig: CpuRig) -> None:
    if not rig.is_sealed:
        pytest.skip("on cuda workers and daemon are one trust domain")
    child = rig.child(
        """
again = os.open(f"/proc/self/fd/{models}", os.O_RDWR)  # the file mode is no guard, the seal is
for descriptor in (models, again):
    attempts = [
        lambda: mmap.mmap(descriptor, 4096),
        lambda: os.pwrite(descriptor, b"x", 0),
        lambda: os.ftruncate(descriptor, 0),
    ]
    for attempt in attempts:
        try:
            attempt()
        except PermissionError:
            continue
        sys.exit("it was allowed")
"""
    )
    finish(child)


def test_a_write_to_a_parameter_kills_the_writer_and_changes_nothing(rig: CpuRig) -> None:
    if not rig.is_sealed:
        pytest.skip("on cuda workers and daemon are one trust domain")
    rig.fill_store(0, bytes([7]) * 4096)
    rig.run(order(1, MIB, [4096]))
    child = rig.child(
        f"""
from pipeswitch.programs.interface.layout import TensorSpec
spec = TensorSpec(name="w", dtype="float32", shape=(1024,), offset_bytes=0, size_bytes=4096,
                  file_offset_bytes=0)
tensor = view.tensor(spec, {MIB})
view.enter({MIB}, 4096, 0, 1)
view.show(4096)
say(tensor[0].item() != 0)
tensor.fill_(1.0)
"""
    )
    expect(child, "True")
    finish(child, -signal.SIGSEGV)
    assert rig.arena(MIB, 4096) == bytes([7]) * 4096


def test_a_reader_killed_in_mid_transfer_disturbs_nothing(make_rig: MakeRig) -> None:
    rig = make_rig(100 * MIB)
    before = shm_names()
    data = random.Random(5).randbytes(16 * MIB)
    rig.fill_store(0, data)
    child = rig.child(
        """
say("ready")
view.wait_group(1, 1)
say("in the middle")
view.wait_group(200, 1)
"""
    )
    expect(child, "ready")
    rig.transmit(order(1, MIB, [2 * MIB] * 8))
    expect(child, "in the middle")
    child.kill()
    assert rig.ended.get(timeout=DEADLINE_S).is_complete
    assert rig.arena(MIB, 16 * MIB) == data
    finish(child, -signal.SIGKILL)
    until(lambda: shm_names() <= before, "nothing is left in /dev/shm")
    assert rig.run(order(2, MIB, [100])).is_complete


def test_closing_gives_back_threads_and_descriptors() -> None:
    for kind in DEVICES.values():
        if kind in (GpuRig, WaitingGpuRig):
            continue  # the driver keeps some threads and descriptors
        threads, descriptors = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))
        rig = kind(50 * MIB)
        rig.view()
        rig.transmit(order(1, MIB, [40 * MIB]))  # still running when the rig is closed
        rig.close()
        assert not rig.ended.get(timeout=DEADLINE_S).is_complete
        assert set(threading.enumerate()) <= threads
        assert len(os.listdir("/proc/self/fd")) <= descriptors


# ---- tensors, slices ------------------------------------------------------------------------


def test_tensors_have_the_transmitted_values(rig: CpuRig) -> None:
    values = torch.arange(24, dtype=torch.float32).reshape(2, 3, 4)
    halves = torch.linspace(-1, 1, 10, dtype=torch.bfloat16)
    rig.fill_store(512, values.numpy().tobytes())
    rig.fill_store(1024, halves.view(torch.int16).numpy().tobytes())
    rig.run(order(1, 2 * MIB, [2048]))
    view = rig.view()
    view.enter(2 * MIB, 2048, 0, OpId(1))
    view.show(2048)
    assert torch.equal(view.tensor(spec("float32", (2, 3, 4), 512, 96), 2 * MIB).cpu(), values)
    assert torch.equal(view.tensor(spec("bfloat16", (10,), 1024, 20), 2 * MIB).cpu(), halves)
    assert view.tensor(spec("float32", (0, 7), 0, 0), 2 * MIB).shape == (0, 7)
    assert view.tensor(spec("int64", (), 512, 8), 2 * MIB).shape == ()


def test_each_tensor_has_a_version_counter_of_its_own(rig: CpuRig) -> None:
    view = rig.view()
    one, other = view.slice_bytes(0, 64), view.slice_bytes(0, 64)
    before = other._version
    one.fill_(3)
    assert bytes(on_host(other)) == bytes([3]) * 64
    assert other._version == before


@pytest.mark.parametrize(
    ("bad", "region"),
    [
        (spec("float32", (4,), 0, 16), 0),  # overlaps the fences
        (spec("float32", (4,), 0, 16), -512),
        (spec("float32", (4,), -MIB, 16), MIB),
        (spec("float32", (4,), 0, 16), ARENA_BYTES - 12),
        (spec("float32", (4,), 0, 20), MIB),
        (spec("float32", (4,), 2, 16), MIB),
        (spec("float32", (-4,), 0, -16), MIB),
        (spec("complex64", (4,), 0, 32), MIB),
    ],
)
def test_a_tensor_out_of_bounds_is_refused(rig: CpuRig, bad: TensorSpec, region: int) -> None:
    with pytest.raises((LocalProtocolError, RemoteProtocolError)):
        rig.view().tensor(bad, region)


def test_a_slice_out_of_bounds_is_refused(rig: CpuRig) -> None:
    view = rig.view()
    for offset, size in ((-1, 10), (0, -1), (ARENA_BYTES - 5, 6)):
        with pytest.raises((LocalProtocolError, RemoteProtocolError)):
            view.slice_bytes(offset, size)


def test_pieces_of_a_slice_are_read_in_order(rig: CpuRig) -> None:
    view = rig.view()
    data = np.frombuffer(bytearray(random.Random(6).randbytes(20 * MIB)), dtype=np.uint8)
    view.slice_bytes(3 * MIB, 20 * MIB).copy_(torch.from_numpy(data))
    view.synchronize()
    pieces = [(19 * MIB, MIB), (5, 17), (0, 0), (100, 10 * MIB)]
    into = bytearray(sum(size for _, size in pieces))
    ranges = [ByteRange(offset_bytes=offset, size_bytes=size) for offset, size in pieces]
    rig.memory.read_slice(3 * MIB, ranges, memoryview(into))
    expected = b"".join(data[offset : offset + size].tobytes() for offset, size in pieces)
    assert bytes(into) == expected


@pytest.mark.parametrize("can_punch", [True, False])
@pytest.mark.parametrize(
    ("offset", "size"),
    [(4096, 8192), (5000, 10), (4000, 200), (5000, 3 * MIB + 17), (0, ARENA_BYTES), (7, 0)],
)
def test_a_scrubbed_range_reads_as_zeros_and_its_neighbours_do_not(
    rig: CpuRig, monkeypatch: pytest.MonkeyPatch, offset: int, size: int, can_punch: bool
) -> None:
    if not can_punch:
        monkeypatch.setattr(mmap, "MADV_REMOVE", 9999)
    view = rig.view()
    memory = view.slice_bytes(0, ARENA_BYTES)
    memory.fill_(POISON)
    view.synchronize()
    rig.memory.scrub(offset, size)
    everything = on_host(memory)
    assert not everything[offset : offset + size].any()
    assert (everything[:offset] == POISON).all()
    assert (everything[offset + size :] == POISON).all()


# ---- windows: memory that kernels reach on cpu ---------------------------------------------

PAGE = mmap.PAGESIZE

PEEK: Final = """
import numpy as np
from pipeswitch.devices.cpu.page_protection import address_of
from pipeswitch.programs.interface.layout import TensorSpec
def at(offset, size=1):
    spec = TensorSpec(name="w", dtype="uint8", shape=(size,), offset_bytes=0, size_bytes=size,
                      file_offset_bytes=0)
    return view.tensor(spec, offset)
def read(offset, size=1):
    return bytes(at(offset, size).tolist())
def touch(offset):
    say("touching")
    say(read(offset))
"""


@pytest.fixture
def cpu() -> Iterator[CpuRig]:
    rig = CpuRig()
    yield rig
    rig.close()


def two_models(rig: CpuRig) -> None:
    """Copy model A to 2 MiB, and model B behind it to 6 MiB; both end in the middle of a page."""
    for op_id, start, value, size in ((1, 2, b"A", 4 * MIB - 100), (2, 6, b"B", 3 * MIB + 100)):
        rig.fill_store(0, value * size)
        sizes = [MIB // 2, 10_000, size - MIB // 2 - 10_000]
        rig.run(order(op_id, start * MIB, sizes, first_fence=3 * op_id))


ENTER_A = f"view.enter({2 * MIB}, {4 * MIB - 100}, 5, 1); view.show({4 * MIB - 100})\n"
ENTER_B = f"view.enter({6 * MIB}, {3 * MIB + 100}, 8, 2); view.show({3 * MIB + 100})\n"


def test_a_worker_reads_the_model_of_its_task(cpu: CpuRig) -> None:
    two_models(cpu)
    code = f"""
for _ in range(3):
    {ENTER_A}
    if read({2 * MIB}, {4 * MIB - 100}) != b"A" * {4 * MIB - 100}:
        sys.exit("A is damaged")
    {ENTER_B}
    if read({6 * MIB}, {3 * MIB + 100}) != b"B" * {3 * MIB + 100}:
        sys.exit("B is damaged")
"""
    finish(cpu.child(PEEK + code))


@pytest.mark.parametrize(
    ("code", "offset"),
    [
        ("", 2 * MIB),  # no region was entered
        (ENTER_A, 6 * MIB),  # the neighbour's first byte
        (ENTER_A, 9 * MIB),
        (ENTER_A, ARENA_BYTES - 1),
        (ENTER_B, 6 * MIB - 1),
        (ENTER_B, 9 * MIB + PAGE),  # after the page with its last byte
        (ENTER_A + ENTER_B, 2 * MIB),  # A's first byte, after B was entered
        (ENTER_A + "view.leave()\n", 2 * MIB),
        (f"view.enter({2 * MIB}, {4 * MIB}, 5, 1)\n", 2 * MIB),  # no group has been shown
        (f"view.enter({2 * MIB}, {4 * MIB}, 9, 1); view.show({MIB})\n", 4 * MIB),  # not shown yet
        (f"view.prefault(0, {ARENA_BYTES})\n", 6 * MIB),
        (f"{ENTER_A}view.prefault(0, {ARENA_BYTES})\n{ENTER_B}", 2 * MIB),
    ],
)
def test_a_read_past_the_windows_edge_kills_the_reader(cpu: CpuRig, code: str, offset: int) -> None:
    two_models(cpu)
    child = cpu.child(f"{PEEK}{code}touch({offset})\n")
    expect(child, "touching")
    finish(child, -signal.SIGSEGV)


def test_the_page_behind_a_models_last_byte_holds_nothing_of_another(cpu: CpuRig) -> None:
    cpu.fill_store(0, b"S" * (8 * MIB))
    cpu.run(order(1, 2 * MIB, [8 * MIB]))
    size = MIB + 100
    cpu.fill_store(0, b"A" * size)
    cpu.run(in_whole_units(order(2, 2 * MIB, [MIB, 100])))
    slack = aligned(size, PAGE) - size
    assert cpu.arena(2 * MIB + size - 1, slack + 2) == b"A" + bytes(slack) + b"S"


def test_when_a_groups_word_rises_its_last_unit_holds_nothing_of_another() -> None:
    """A worker opens whole units of memory, so a last unit must not have another model's bytes."""
    rig = CpuRig(20 * MIB)
    try:
        rig.fill_store(0, b"S" * (8 * MIB))
        rig.run(in_whole_units(order(1, 2 * MIB, [8 * MIB])))
        rig.fill_store(0, b"A" * (8 * MIB))
        sizes = [1000, 3000, MIB, 7 * MIB - 4000]
        rig.transmit(in_whole_units(order(2, 2 * MIB, sizes, first_fence=1)))
        view = rig.view()
        view.wait_group(1, OpId(2))
        assert rig.arena(2 * MIB, 2 * MIB) == b"A" * (2 * MIB)
        view.wait_group(4, OpId(2))
        assert rig.arena(2 * MIB, 8 * MIB) == b"A" * (8 * MIB)
    finally:
        rig.close()


@pytest.mark.parametrize("offset", [2 * MIB - 1, 4 * MIB, 6 * MIB])
def test_of_a_ring_what_has_landed_can_be_read_and_its_last_unit_is_nobody_elses(
    cpu: CpuRig, offset: int
) -> None:
    cpu.fill_store(0, b"S" * (20 * MIB))
    cpu.run(order(1, 2 * MIB, [20 * MIB], first_fence=20))
    cpu.fill_store(0, b"A" * (2 * GROUP))
    sent = through_a_ring(2, 2)
    cpu.run(msgspec.structs.replace(sent, groups=sent.groups[:1], waits=(0,)))
    assert cpu.arena(2 * MIB, 2 * MIB) == b"A" * GROUP + bytes(1000)
    child = cpu.child(f"""{PEEK}
view.enter({2 * MIB}, {RING}, 1, 2); view.show_landing(0, {GROUP}); view.show_landing(0, {GROUP})
if read({2 * MIB}, {2 * MIB}) != b"A" * {GROUP} + bytes(1000):
    sys.exit("another's bytes")
touch({offset})
""")
    expect(child, "touching")
    finish(child, -signal.SIGSEGV)


def test_a_run_by_rows_reads_the_rows_and_its_kernels_reach_no_other_byte(cpu: CpuRig) -> None:
    data = random.Random(2).randbytes(12 * MIB)
    cpu.fill_store(0, data)
    cpu.run(by_rows(1))
    end = 1000 + 9 * MIB
    child = cpu.child(
        f"""{PEEK}
import torch
view.enter({2 * MIB}, {10 * MIB + 6000}, -1, 1)
view.show_landing(0, 1000); view.show_landing({end}, 5000)
view.show_landing({4 * MIB + 512}, 0)  # an empty group
spec = TensorSpec(name="t", dtype="int32", shape=(2304, 1024), offset_bytes=1000,
                  size_bytes={9 * MIB}, file_offset_bytes=0)
table = view.table_of(spec, {2 * MIB}, torch.tensor({ROWS}))
say(bytes(table[list({ROWS})].view(torch.uint8).flatten().tolist()).hex())
say(read({2 * MIB + end}, 5000).hex())
touch({6 * MIB})
"""
    )
    expect(child, b"".join(data[1000 + 4096 * row :][:4096] for row in ROWS).hex())
    expect(child, data[end : end + 5000].hex())
    expect(child, "touching")
    finish(child, -signal.SIGSEGV)


def test_a_slice_can_be_touched_when_it_was_asked_for(cpu: CpuRig) -> None:
    cpu.view().slice_bytes(2 * MIB, 4 * MIB).fill_(7)
    touches = f"""
mine = view.slice_bytes({2 * MIB}, 100)
say(int(mine[99]))
wider = mine.as_strided((1,), (1,), {4 * MIB})
say("touching")
wider.item()
"""
    child = cpu.child(touches)
    expect(child, "7")
    expect(child, "touching")
    finish(child, -signal.SIGSEGV)


def test_a_hidden_slice_cannot_be_touched_until_it_is_shown_elsewhere(cpu: CpuRig) -> None:
    """A slice keeps its addresses when it moves; the next owner's bytes in its old range stay."""
    code = f"""
mine = view.slice_bytes({2 * MIB + PAGE}, {4 * MIB + 5})
mine.copy_(torch.arange(len(mine)) % 251)
view.hide_slice()
say("hidden")
if "touching" in arguments:
    mine[0].item()
view.show_slice(int(input()))
say(bool((mine == torch.arange(len(mine)) % 251).all()))
mine += 1
say("written")
"""
    child = cpu.child("import torch" + code, "touching")
    expect(child, "hidden")
    finish(child, -signal.SIGSEGV)
    child = cpu.child("import torch" + code)
    expect(child, "hidden")
    size, image = 4 * MIB + 5, sealed_memfd("test-image", 5 * MIB)
    cpu.memory.save_slice(2 * MIB + PAGE, size, image)
    everything = cpu.view().slice_bytes(0, ARENA_BYTES)
    everything.fill_(POISON)
    cpu.memory.load_slice(11 * MIB + PAGE, size, image, lambda: False)
    os.close(image)
    child.stdin.write(f"{11 * MIB + PAGE}\n")
    child.stdin.flush()
    expect(child, "True")
    expect(child, "written")
    finish(child, 0)
    end = 11 * MIB + PAGE + size
    assert (everything[: 11 * MIB + PAGE] == POISON).all()
    assert (everything[end:] == POISON).all()
    assert torch.equal(everything[end - size : end], torch.arange(size).remainder(251).byte() + 1)


def test_a_slice_grows_after_a_swap_over_addresses_of_an_earlier_one(cpu: CpuRig) -> None:
    view = cpu.view()
    everything = cpu.view().slice_bytes(0, ARENA_BYTES)
    for number, (offset, size, to) in enumerate(
        ((2, 1, 2), (4, 2, 20), (2, 4, 8), (8, 5, 8), (1, 9, 30), (30, 10, 2)), 1
    ):
        mine = view.slice_bytes(offset * MIB, size * MIB)
        mine.fill_(number)
        assert (everything[offset * MIB : (offset + size) * MIB] == number).all()
        if to != offset:
            view.hide_slice()
            view.show_slice(to * MIB)
        mine.fill_(number + 50)
        assert (everything[to * MIB : (to + size) * MIB] == number + 50).all()


def test_a_forked_child_reads_the_slice_and_writes_to_pages_of_its_own(cpu: CpuRig) -> None:
    """The child, of a data loader, say, lives on while the slice's range belongs to others."""
    child = cpu.child(f"""
import torch
torch.set_num_threads(1)  # a forked child has no other threads
mine = view.slice_bytes({2 * MIB}, {MIB})
mine.fill_(7)
before, after = os.pipe(), os.pipe()
if os.fork() == 0:
    os.read(before[0], 1)
    assert mine.sum().item() == 7 * {MIB}
    mine.fill_(9)
    assert mine.sum().item() == 9 * {MIB}
    os.write(after[1], b".")
    os._exit(0)
view.hide_slice()
os.write(before[1], b".")
os.read(after[0], 1)
assert os.wait()[1] == 0
view.show_slice({2 * MIB})
say(int(mine.max()))
if os.fork() == 0:
    os._exit(0)
view.hide_slice()
if os.fork() == 0:
    mine[0].item()
say(os.WTERMSIG(os.wait()[1]) or os.WTERMSIG(os.wait()[1]))
""")
    expect(child, "7")
    expect(child, str(int(signal.SIGSEGV)))
    finish(child)
    assert (cpu.view().slice_bytes(2 * MIB, MIB) == 7).all()


def test_only_a_lent_slab_can_be_touched(cpu: CpuRig) -> None:
    code = f"""
pool = mmap.mmap(-1, {16 * PAGE})
pool[:] = b"p" * {16 * PAGE}
from pipeswitch.devices.cpu.page_protection import address_of
view.pin(address_of(pool), len(pool))
view.map_inputs((({2 * PAGE}, {3 * PAGE + 1}), ({9 * PAGE}, {9 * PAGE + 1})), writable=False)
last = pool[{4 * PAGE} - 1]
view.map_inputs((({6 * PAGE}, {6 * PAGE + 10}),), writable=True)
pool[{6 * PAGE}] = last
view.map_inputs((({2 * PAGE}, {2 * PAGE + 1}),), writable=False)
say(pool[{2 * PAGE}])
match arguments[0]:
    case "behind":
        pool[{3 * PAGE}]
    case "before":
        pool[{2 * PAGE} - 1]
    case "taken back":
        pool[{6 * PAGE}]
    case "written":
        pool[{2 * PAGE}] = 1
"""
    for where in ("behind", "before", "taken back", "written"):
        child = cpu.child(code, where)
        expect(child, "112")
        finish(child, -signal.SIGSEGV)
