"""The memory daemon as a real process: answers, refusals, and the state that survives it."""

from __future__ import annotations

import hashlib
import mmap
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, TypeVar

import msgspec
import pytest
from process_tools import shm_names, until

from pipeswitch.base import failpoints
from pipeswitch.commits.area import CommitArea, create_area
from pipeswitch.commits.commit_files import load_commit
from pipeswitch.ipc.channel import EVENT_BYTES, channel_pair, encode_message
from pipeswitch.ipc.control_page import BOARD_BYTES, new_doorbell, sealed_memfd
from pipeswitch.ipc.messages import base as base_msg
from pipeswitch.ipc.messages import daemon as daemon_msg
from pipeswitch.ipc.messages.base import ResourceLimits
from pipeswitch.ipc.messages.daemon import SliceCopied
from pipeswitch.ipc.messages.worker import ForgetModel
from pipeswitch.programs.interface.layout import TENSOR_ALIGN_BYTES, aligned
from pipeswitch.programs.spec import BUNDLE_FILE, save_manifest
from tests.unit.manifests import plain_manifest, plain_tensor

ROOT: Final = Path(__file__).resolve().parents[2]
MIB: Final = 1 << 20
ARENA_BYTES: Final = 24 * MIB
STORE_BYTES: Final = 24 * MIB
FENCE_COUNT: Final = 64
SLOT_BYTES: Final = 2 * MIB
DEADLINE_S: Final = 60.0
MODEL: Final = base_msg.ModelName("m")
JOB: Final = base_msg.JobName("j")

DAEMON: Final = """
import os
import sys
import msgspec
from pipeswitch.base import failpoints
from pipeswitch.memory_daemon.main import run
from pipeswitch.ipc.messages.daemon import DaemonSettings
from pipeswitch.ipc.channel import channel_from
failpoints.enable(os.environ)
settings, control, *descriptors = sys.argv[1:]
run(msgspec.json.decode(settings, type=DaemonSettings), channel_from(int(control)),
    [int(d) for d in descriptors])
"""

M = TypeVar("M", bound=base_msg.Message)


class DaemonRig:
    """A running daemon. Its store and its commit areas are the test's, and exist longer."""

    def __init__(self, store: int, *, rate: float = 0.0) -> None:
        self.doorbells = [new_doorbell(), new_doorbell()]
        settings = daemon_msg.DaemonSettings(
            device="cpu",
            limits=ResourceLimits(
                arena_bytes=ARENA_BYTES,
                store_bytes=STORE_BYTES,
                fence_count=FENCE_COUNT,
                link_bytes_per_s=rate,
            ),
        )
        self.control, theirs = channel_pair()
        self.control_page, self.doorbell = sealed_memfd("test-board", BOARD_BYTES), new_doorbell()
        passed = [theirs.fileno(), store, self.control_page, *self.doorbells, self.doorbell]
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                DAEMON,
                msgspec.json.encode(settings).decode(),
                *map(str, passed),
            ],
            pass_fds=passed,
            cwd=ROOT,
        )
        theirs.close()
        self._deadline = threading.Timer(DEADLINE_S, self.process.kill)
        self._deadline.start()
        packet = self.control.receive()
        assert packet is not None, "the daemon did not start"
        ready, (self.models, self.work) = packet
        assert isinstance(ready, daemon_msg.DaemonReady)
        assert ready.pid == self.process.pid

    def ask(self, message: base_msg.Message, kind: type[M], *descriptors: int) -> M:
        self.control.send(message, descriptors)
        return self.answer(kind)

    def answer(self, kind: type[M]) -> M:
        packet = self.control.receive()
        if kind is base_msg.StepCommitted and packet and isinstance(packet[0], base_msg.SliceRead):
            packet = self.control.receive()
        assert packet is not None, "the daemon is gone"
        assert isinstance(packet[0], kind), packet[0]
        return packet[0]

    def open_commits(self, area: int) -> None:
        self.control.send(daemon_msg.OpenCommits(job=JOB, slot_bytes=SLOT_BYTES), [area])

    def end(self) -> int:
        """Close the channel; return the daemon's exit status."""
        self.control.close()
        status = self.process.wait()
        self.close()
        return status

    def close(self) -> None:
        self.control.close()
        self.process.kill()
        self.process.wait()
        self._deadline.cancel()
        self._deadline.join()
        for descriptor in (
            self.models,
            self.work,
            self.control_page,
            *self.doorbells,
            self.doorbell,
        ):
            os.close(descriptor)
        self.models = self.work = -1
        self.doorbells = []


Start = Callable[..., DaemonRig]


@pytest.fixture
def store() -> Iterator[int]:
    descriptor = sealed_memfd("test-store", STORE_BYTES)
    yield descriptor
    os.close(descriptor)


@pytest.fixture
def area() -> Iterator[int]:
    descriptor = create_area(SLOT_BYTES)
    yield descriptor
    os.close(descriptor)


@pytest.fixture
def start(store: int) -> Iterator[Start]:
    rigs: list[DaemonRig] = []

    def make(*, rate: float = 0.0) -> DaemonRig:
        rigs.append(DaemonRig(store, rate=rate))
        return rigs[-1]

    yield make
    for rig in rigs:
        if rig.models >= 0:
            rig.close()


@pytest.fixture
def daemon(start: Start) -> DaemonRig:
    return start()


def transmit(
    op_id: int, start: int, size: int, *, groups: int = 1, fence: int = 0
) -> daemon_msg.TransmitModel:
    piece = size // groups
    return daemon_msg.TransmitModel(
        model=MODEL,
        op_id=base_msg.OpId(op_id),
        arena_offset_bytes=start,
        region_bytes=size,
        groups=tuple(
            daemon_msg.GroupCopy(
                store_offset_bytes=piece * index,
                arena_offset_bytes=start + piece * index,
                size_bytes=piece,
                fence=fence + index,
            )
            for index in range(groups)
        ),
    )


def commit_copy(op_id: int, step: int, *ranges: tuple[int, int]) -> daemon_msg.CommitCopy:
    pieces = tuple(
        base_msg.ByteRange(offset_bytes=o, size_bytes=s) for o, s in ranges or ((0, MIB),)
    )
    return daemon_msg.CommitCopy(
        job=JOB,
        op_id=base_msg.OpId(op_id),
        number=step,
        step=step,
        slice_offset_bytes=4096,
        slice_bytes=2 * MIB,
        ranges=pieces,
    )


def image_of(step: int) -> bytes:
    return random.Random(step).randbytes(MIB)


def put_slice(daemon: DaemonRig, step: int) -> None:
    """Write the bytes that a job's slice would have after ``step``."""
    os.pwrite(daemon.work, image_of(step), 4096)


def committed(area: int, slot_bytes: int = SLOT_BYTES) -> tuple[int, bytes] | None:
    """Return the (step, image) that a resuming worker would find, or None."""
    reader = CommitArea(area, slot_bytes)
    newest = reader.newest()
    commit = None if newest is None else (newest.step, bytes(reader.image(newest)))
    reader.close()
    return commit


def persisted(directory: Path) -> tuple[int, bytes] | None:
    """Return the (step, image) that a restarted server would find, or None."""
    loaded = load_commit(directory)
    if loaded is None:
        return None
    commit = committed(loaded[0], loaded[1])
    os.close(loaded[0])
    return commit


def write_model(directory: Path, data: bytes) -> Path:
    """Write a program with one tensor and padding after it; return its folder."""
    tensor = plain_tensor("w", (len(data),), dtype="uint8")
    manifest = plain_manifest(
        tensors=(tensor,),
        total_bytes=aligned(len(data), TENSOR_ALIGN_BYTES),
        weights_sha256=hashlib.sha256(data + bytes(-len(data) % TENSOR_ALIGN_BYTES)).hexdigest(),
    )
    save_manifest(directory, manifest)
    (directory / BUNDLE_FILE).write_bytes(data)
    return directory


def store_model(
    directory: Path, size: int, *, op_id: int = 1, offset: int = 0
) -> daemon_msg.StoreModel:
    return daemon_msg.StoreModel(
        model=MODEL,
        op_id=base_msg.OpId(op_id),
        directory=str(directory),
        store_offset_bytes=offset,
        size_bytes=size,
    )


# ---- orders ---------------------------------------------------------------------------------


def test_a_model_goes_from_its_files_to_the_arena(daemon: DaemonRig, tmp_path: Path) -> None:
    data = random.Random(1).randbytes(5 * MIB)
    write_model(tmp_path, data)
    assert daemon.ask(store_model(tmp_path, 6 * MIB), daemon_msg.ModelStored).load_ms > 0
    ended = daemon.ask(transmit(2, 8 * MIB, 6 * MIB, groups=6), daemon_msg.TransmitEnded)
    assert (ended.op_id, ended.is_complete, ended.group_count) == (2, True, 6)
    assert os.pread(daemon.models, 6 * MIB, 8 * MIB) == data + bytes(MIB)
    assert os.pread(daemon.models, 28, 0) == (2).to_bytes(4, "little") * 6 + bytes(4)
    for doorbell in daemon.doorbells:
        assert os.eventfd_read(doorbell) == 6


def test_the_memory_it_hands_out_is_sealed(daemon: DaemonRig) -> None:
    with pytest.raises(PermissionError):
        mmap.mmap(daemon.models, 4096)
    for descriptor in (daemon.models, daemon.work):
        for size in (0, 2 * ARENA_BYTES):
            with pytest.raises(PermissionError):
                os.ftruncate(descriptor, size)


def test_a_cancelled_transmission_is_answered_and_its_range_is_free_again(start: Start) -> None:
    daemon = start(rate=4 * MIB)
    daemon.control.send(transmit(1, MIB, 16 * MIB, groups=16))
    assert os.eventfd_read(daemon.doorbells[0]) >= 1
    ended = daemon.ask(daemon_msg.CancelTransmit(op_id=base_msg.OpId(1)), daemon_msg.TransmitEnded)
    assert not ended.is_complete
    assert ended.group_count < 16
    daemon.control.send(
        daemon_msg.CancelTransmit(op_id=base_msg.OpId(1))
    )  # the transmission has ended already, so the daemon ignores this order
    assert daemon.ask(transmit(2, MIB, 1024), daemon_msg.TransmitEnded).is_complete


def test_loading_a_model_does_not_hold_up_a_transmission(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(failpoints.VARIABLE, str(tmp_path))
    daemon = start()
    write_model(tmp_path, b"x" * MIB)
    point = tmp_path / "daemon.store.read"
    os.mkfifo(point)  # reading the point's action blocks until a writer opens the FIFO
    daemon.control.send(store_model(tmp_path, MIB, offset=8 * MIB))
    assert daemon.ask(transmit(2, MIB, MIB), daemon_msg.TransmitEnded).is_complete
    (at,) = until(lambda: [*tmp_path.glob(f"{point.name}.*")], "the store thread reads")
    at.write_text("delay 0")
    assert daemon.answer(daemon_msg.ModelStored).op_id == 1


def test_an_unusable_model_is_refused_with_a_reason_and_others_are_not(
    daemon: DaemonRig, tmp_path: Path
) -> None:
    weights = write_model(tmp_path, random.Random(2).randbytes(10_000)) / BUNDLE_FILE
    good = weights.read_bytes()
    weights.write_bytes(b"\0\0\0" + good[3:])
    assert "sha256" in daemon.ask(store_model(tmp_path, MIB), daemon_msg.StoreFailed).reason
    weights.write_bytes(good)
    daemon.ask(store_model(tmp_path, MIB, op_id=2), daemon_msg.ModelStored)


def test_a_scrubbed_slice_reads_as_zeros(daemon: DaemonRig) -> None:
    os.pwrite(daemon.work, b"\xa5" * MIB, 0)
    scrub = daemon_msg.Scrub(op_id=base_msg.OpId(4), offset_bytes=5000, size_bytes=100_000)
    assert daemon.ask(scrub, daemon_msg.Scrubbed).op_id == 4
    expected = b"\xa5" * 5000 + bytes(100_000) + b"\xa5" * (MIB - 105_000)
    assert os.pread(daemon.work, MIB, 0) == expected


# ---- swaps of slices ------------------------------------------------------------------------


@pytest.fixture
def image() -> Iterator[int]:
    descriptor = sealed_memfd("test-image", 4 * MIB)
    yield descriptor
    os.close(descriptor)


def copy_out(op: int, offset_bytes: int, size_bytes: int) -> daemon_msg.CopySliceOut:
    return daemon_msg.CopySliceOut(
        job=JOB, op_id=base_msg.OpId(op), offset_bytes=offset_bytes, size_bytes=size_bytes
    )


def copy_in(op: int, offset_bytes: int, size_bytes: int) -> daemon_msg.CopySliceIn:
    return daemon_msg.CopySliceIn(
        job=JOB, op_id=base_msg.OpId(op), offset_bytes=offset_bytes, size_bytes=size_bytes
    )


@pytest.mark.parametrize("size_bytes", [1, 4096, MIB + 77, 4 * MIB])
@pytest.mark.parametrize("offset_bytes", [0, 4096, MIB + 5, ARENA_BYTES - 4 * MIB])
def test_a_slice_goes_out_reads_as_zeros_and_comes_in_elsewhere(
    daemon: DaemonRig, image: int, offset_bytes: int, size_bytes: int
) -> None:
    state, around, to = random.Random(7).randbytes(size_bytes), b"\xa5" * ARENA_BYTES, 9 * MIB + 64
    before, after = around[:offset_bytes], around[offset_bytes + size_bytes :]
    os.pwrite(daemon.work, before + state + after, 0)
    assert not daemon.ask(copy_out(1, offset_bytes, size_bytes), SliceCopied, image).error
    assert os.pread(image, size_bytes, 0) == state
    assert os.pread(daemon.work, ARENA_BYTES, 0) == before + bytes(size_bytes) + after
    assert not daemon.ask(copy_in(2, to, size_bytes), SliceCopied, image).error
    assert os.pread(daemon.work, size_bytes, to) == state
    assert os.pread(image, size_bytes, 0) == state


def test_a_cancelled_copy_ends_early_and_leaves_the_image_whole(start: Start, image: int) -> None:
    daemon, state = start(rate=4 * MIB), random.Random(8).randbytes(4 * MIB)
    os.pwrite(image, state, 0)
    daemon.control.send(copy_in(1, 0, 4 * MIB), [image])
    daemon.control.send(daemon_msg.CancelSlice(op_id=base_msg.OpId(1)))
    answer = daemon.answer(SliceCopied)
    assert (answer.op_id, answer.error) == (1, "cancelled")
    assert answer.ended_at_ms - answer.began_at_ms < 900  # of 1000 at this rate
    assert os.pread(image, 4 * MIB, 0) == state
    daemon.control.send(daemon_msg.CancelSlice(op_id=base_msg.OpId(1)))  # it has ended
    assert not daemon.ask(copy_in(2, 0, MIB), SliceCopied, image).error


def test_copies_out_of_bounds_or_without_their_image_are_refused(
    daemon: DaemonRig, image: int, store: int
) -> None:
    refused: list[tuple[base_msg.Message, list[int]]] = [
        (make(5, offset_bytes, size_bytes), images)
        for make in (copy_out, copy_in)
        for offset_bytes, size_bytes, images in (
            (-1, 10, [image]),
            (0, -1, [image]),
            (ARENA_BYTES, 1, [image]),
            (ARENA_BYTES - 99, 100, [image]),
            (0, 4 * MIB + 1, [image]),
            (0, 10, []),
            (0, 10, [image, store]),
        )
    ]
    os.pwrite(daemon.work, b"\xa5" * MIB, 0)
    before = len(os.listdir(f"/proc/{daemon.process.pid}/fd"))
    for message, images in refused:
        fault = daemon.ask(message, daemon_msg.DaemonFault, *images)
        assert fault.op_id == 5
        assert fault.reason
    assert os.pread(daemon.work, MIB, 0) == b"\xa5" * MIB
    assert not daemon.ask(copy_out(6, 0, MIB), SliceCopied, image).error
    until(lambda: len(os.listdir(f"/proc/{daemon.process.pid}/fd")) <= before, "all are closed")


def test_it_ignores_the_terminals_signals_and_has_a_name(daemon: DaemonRig) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        daemon.process.send_signal(number)
    assert daemon.ask(transmit(1, MIB, MIB), daemon_msg.TransmitEnded).is_complete
    comm = Path(f"/proc/{daemon.process.pid}/comm").read_text()
    assert comm.startswith("pipeswitch-mem")


# ---- refusals -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "bad",
    [
        transmit(5, 0, 100),
        transmit(5, ARENA_BYTES - 99, 100),
        transmit(5, MIB, ARENA_BYTES),
        transmit(5, MIB, 100, fence=FENCE_COUNT),
        daemon_msg.Scrub(op_id=base_msg.OpId(5), offset_bytes=-1, size_bytes=10),
        daemon_msg.Scrub(op_id=base_msg.OpId(5), offset_bytes=ARENA_BYTES, size_bytes=1),
        commit_copy(5, 1),  # no commit area is open for this job
        daemon_msg.PersistCommit(job=JOB, op_id=base_msg.OpId(5), directory="/nowhere"),
    ],
    ids=lambda message: type(message).__name__,
)
def test_nonsense_is_refused_by_name_and_the_daemon_goes_on(
    daemon: DaemonRig, bad: base_msg.Message
) -> None:
    fault = daemon.ask(bad, daemon_msg.DaemonFault)
    assert fault.op_id == 5
    assert fault.reason
    assert daemon.ask(transmit(6, MIB, MIB), daemon_msg.TransmitEnded).is_complete


def test_overlapping_and_stale_transmissions_are_refused(start: Start) -> None:
    daemon = start(rate=4 * MIB)
    daemon.control.send(transmit(10, 4 * MIB, 4 * MIB, groups=4))
    assert (
        "overlaps"
        in daemon.ask(transmit(11, 7 * MIB, 2 * MIB, fence=9), daemon_msg.DaemonFault).reason
    )
    assert daemon.answer(daemon_msg.TransmitEnded).is_complete
    assert "stale" in daemon.ask(transmit(9, 7 * MIB, 2 * MIB), daemon_msg.DaemonFault).reason
    assert daemon.ask(transmit(11, 7 * MIB, MIB), daemon_msg.TransmitEnded).is_complete


@pytest.mark.parametrize(
    "packet", [b"\xc1", b"\x80", encode_message(ForgetModel(model=MODEL))[:-1], b""], ids=repr
)
def test_an_order_that_cannot_be_read_ends_the_daemon(daemon: DaemonRig, packet: bytes) -> None:
    """Send a malformed order. The daemon must exit, or its sender would wait for ever.
    After the exit, the sender gives the order to the next daemon."""
    raw = socket.socket(fileno=os.dup(daemon.control.fileno()))
    raw.send(bytes(EVENT_BYTES) + packet)
    raw.close()
    assert daemon.control.receive() is None
    assert daemon.process.wait() == 1


def test_a_message_for_somebody_else_is_refused(daemon: DaemonRig) -> None:
    assert "ForgetModel" in daemon.ask(ForgetModel(model=MODEL), daemon_msg.DaemonFault).reason
    assert daemon.ask(transmit(1, MIB, MIB), daemon_msg.TransmitEnded).is_complete


def test_commit_copies_out_of_bounds_or_stale_are_refused(daemon: DaemonRig, area: int) -> None:
    daemon.open_commits(area)
    assert daemon.ask(commit_copy(7, 1), base_msg.StepCommitted).error == ""
    before = committed(area)
    for bad in (
        commit_copy(8, 2, (0, 2 * MIB + 1)),
        commit_copy(8, 2, (-1, 10)),
        commit_copy(8, 2, (0, 2 * MIB), (0, 1)),  # the pieces are larger than a slot
        commit_copy(6, 2),  # an old operation id
        msgspec.structs.replace(commit_copy(8, 2), slice_offset_bytes=ARENA_BYTES - MIB),
        msgspec.structs.replace(commit_copy(8, 2), slice_offset_bytes=-4096),
    ):
        assert daemon.ask(bad, daemon_msg.DaemonFault).op_id == bad.op_id
    assert committed(area) == before
    daemon.control.send(daemon_msg.CloseCommits(job=JOB))
    assert "no open commit area" in daemon.ask(commit_copy(9, 2), daemon_msg.DaemonFault).reason


def test_refused_descriptors_are_not_kept(daemon: DaemonRig, area: int, store: int) -> None:
    folder = Path(f"/proc/{daemon.process.pid}/fd")
    before = len(list(folder.iterdir()))
    for _ in range(20):
        daemon.control.send(daemon_msg.OpenCommits(job=JOB, slot_bytes=SLOT_BYTES + 1), [area])
        daemon.control.send(daemon_msg.OpenCommits(job=JOB, slot_bytes=SLOT_BYTES), [store])
        daemon.control.send(daemon_msg.OpenCommits(job=JOB, slot_bytes=SLOT_BYTES), [area, area])
        daemon.control.send(daemon_msg.CancelTransmit(op_id=base_msg.OpId(1)), [area])
        for _ in range(3):
            daemon.answer(daemon_msg.DaemonFault)
    # Another thread answers this order, after the control thread has handled the orders above.
    daemon.ask(transmit(1, MIB, MIB), daemon_msg.TransmitEnded)
    assert len(list(folder.iterdir())) == before


# ---- commits --------------------------------------------------------------------------------


def test_a_commit_gathers_the_pieces_and_flips(daemon: DaemonRig, area: int) -> None:
    daemon.open_commits(area)
    for step in range(1, 5):
        put_slice(daemon, step)
        pieces = ((MIB // 2, 1000), (0, 4096), (17, 3))
        done = daemon.ask(commit_copy(3, step, *pieces), base_msg.StepCommitted)
        assert (done.job, done.op_id, done.step, done.error) == (JOB, 3, step, "")
        data = image_of(step)
        expected = b"".join(data[offset : offset + size] for offset, size in pieces)
        assert committed(area) == (step, expected)


def test_a_slice_may_be_written_as_soon_as_it_is_read(daemon: DaemonRig, area: int) -> None:
    daemon.open_commits(area)
    for step in range(1, 5):
        put_slice(daemon, step)
        read = daemon.ask(commit_copy(3, step), base_msg.SliceRead)
        put_slice(daemon, step + 1)
        done = daemon.answer(base_msg.StepCommitted)
        assert (read.number, done.number, done.error) == (step, step, "")
        assert committed(area) == (step, image_of(step))


def test_a_commit_that_is_ordered_again_is_neither_copied_nor_answered(
    daemon: DaemonRig, area: int
) -> None:
    daemon.open_commits(area)
    for number in (1, 2):
        put_slice(daemon, number)
        assert daemon.ask(commit_copy(3, number), base_msg.StepCommitted).number == number
    put_slice(daemon, 7)  # after the answer, the job trains on and changes its slice
    for number in (2, 1):
        daemon.control.send(commit_copy(3, number))
    daemon.ask(
        base_msg.Ping(op_id=base_msg.OpId(1)), base_msg.Pong
    )  # Pong is the first answer, so there was no fault, which would end a copy
    assert committed(area) == (2, image_of(2))
    answer = daemon.ask(
        commit_copy(4, 1), base_msg.StepCommitted
    )  # one thread makes all copies, so it would have answered the repeated orders before
    assert (answer.op_id, answer.number) == (4, 1)


def test_a_disk_that_takes_no_more_keeps_the_old_commit_and_says_so(
    daemon: DaemonRig, area: int, tmp_path: Path
) -> None:
    daemon.open_commits(area)
    order = daemon_msg.PersistCommit(job=JOB, op_id=base_msg.OpId(1), directory=str(tmp_path))
    assert "nothing" in daemon.ask(order, daemon_msg.CommitPersisted).error
    put_slice(daemon, 1)
    daemon.ask(commit_copy(1, 1), base_msg.StepCommitted)
    assert daemon.ask(order, daemon_msg.CommitPersisted).error == ""
    put_slice(daemon, 2)
    daemon.ask(commit_copy(1, 2), base_msg.StepCommitted)
    unlimited = resource.RLIM_INFINITY
    limit = (MIB // 2, unlimited)
    resource.prlimit(daemon.process.pid, resource.RLIMIT_FSIZE, limit)
    assert "File too large" in daemon.ask(order, daemon_msg.CommitPersisted).error
    assert persisted(tmp_path) == (1, image_of(1))
    assert len(list(tmp_path.iterdir())) == 2
    resource.prlimit(daemon.process.pid, resource.RLIMIT_FSIZE, (unlimited, unlimited))
    assert daemon.ask(order, daemon_msg.CommitPersisted).error == ""
    assert persisted(tmp_path) == (2, image_of(2))


# ---- endings --------------------------------------------------------------------------------


def test_exit_finishes_accepted_commits_and_leaves_with_status_0(
    start: Start, area: int, tmp_path: Path
) -> None:
    daemon = start(rate=4 * MIB)
    daemon.open_commits(area)
    put_slice(daemon, 1)
    daemon.control.send(transmit(1, 4 * MIB, 16 * MIB, groups=4))
    daemon.control.send(commit_copy(1, 1))
    daemon.control.send(base_msg.Exit())
    assert daemon.process.wait() == 0
    assert committed(area) == (1, image_of(1))
    answers: list[base_msg.Message] = []
    while (packet := daemon.control.receive()) is not None:
        answers.append(packet[0])
    assert {type(answer) for answer in answers} == {
        base_msg.SliceRead,
        base_msg.StepCommitted,
        daemon_msg.TransmitEnded,
    }
    assert not any(a.is_complete for a in answers if isinstance(a, daemon_msg.TransmitEnded))


def test_when_the_controller_is_gone_it_leaves_at_once(start: Start) -> None:
    idle = start()
    assert idle.end() == 1
    busy = start(rate=1 * MIB)  # the transmission takes 16 s
    busy.control.send(transmit(1, MIB, 16 * MIB))
    assert busy.end() == 1


def test_kill_9_leaves_nothing_behind_but_the_store(start: Start, tmp_path: Path) -> None:
    before = shm_names()
    daemon = start(rate=4 * MIB)
    data = random.Random(1).randbytes(MIB)
    write_model(tmp_path, data)
    daemon.ask(store_model(tmp_path, 2 * MIB), daemon_msg.ModelStored)
    inode = os.fstat(daemon.models).st_ino
    daemon.control.send(transmit(2, MIB, 16 * MIB, groups=16))
    os.eventfd_read(daemon.doorbells[0])
    daemon.process.kill()
    assert daemon.process.wait() == -signal.SIGKILL
    while (packet := daemon.control.receive()) is not None:
        assert not isinstance(packet[0], daemon_msg.TransmitEnded)
    daemon.close()
    until(lambda: shm_names() <= before, "nothing is left in /dev/shm")
    assert not any(f" {inode} " in line and "pipeswitch-models" in line for line in all_maps())

    successor = start()
    assert successor.ask(transmit(3, MIB, MIB), daemon_msg.TransmitEnded).is_complete
    assert os.pread(successor.models, MIB, MIB) == data, "the store outlived the daemon"
    assert os.pread(successor.models, 8, 0) == (3).to_bytes(4, "little") + bytes(4)


def all_maps() -> Iterator[str]:
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            yield from maps.read_text().splitlines()
        except OSError:  # the process has exited, or is another user's
            continue
