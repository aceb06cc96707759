"""The second lane, over another GPU's link: its bytes, their order, and its failures.

The fake's streams run on in any order that their waits allow, so each wait is needed, and shows it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
from collections.abc import Callable, Iterator

import pytest
from fake_cuda import World

from pipeswitch.devices import choosing
from pipeswitch.devices.cuda import lanes as cuda_lanes
from pipeswitch.devices.cuda import memory as cuda_memory
from pipeswitch.devices.cuda import selftest
from pipeswitch.devices.cuda.bindings import Cuda, CudaError
from pipeswitch.devices.cuda.lanes import LANDING_SLOTS, PeerLane
from pipeswitch.devices.opening import open_memory
from pipeswitch.ipc.board import sealed_memfd
from pipeswitch.ipc.messages import CudaOptions, DaemonSettings, Epoch, TransmitModel
from tests.unit.cuda_rig import MIB, Rig, order

CHUNK = 4096
SEEDS = range(12)
Dropped = Callable[[PeerLane, int, int], bool]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (cuda_lanes, cuda_memory):
        monkeypatch.setattr(module, "CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(cuda_lanes, "LANDING_BYTES", LANDING_SLOTS * CHUNK)


@contextlib.contextmanager
def peered(seed: int, **options: object) -> Iterator[Rig]:
    """A device with a peer's lane; streams run on by chance."""
    rig = Rig(World(devices=2, shuffle=random.Random(seed)), window_bytes=4 * CHUNK, **options)
    rig.memory.add_peer(1)
    assert rig.world.current == 0, "of this thread, as before"
    yield rig
    rig.close()


def peer_of(rig: Rig) -> PeerLane:
    lane = rig.memory._lanes[1]
    assert isinstance(lane, PeerLane)
    return lane


def count(rig: Rig, call: str) -> int:
    return [name for name, _ in rig.world.calls].count(call)


class Watched:
    """After each operation of any stream: no word, of the device or the host, before its data."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.epoch = 0
        self.order: TransmitModel | None = None
        self.data = b""
        self.failures: list[str] = []
        for stream in rig.world.all_streams:
            stream.put = self._watching(stream.put)  # type: ignore[method-assign]

    def _watching(self, put: Callable[..., None]) -> Callable[..., None]:
        def watched_put(run: Callable[[], bool]) -> None:
            def watched() -> bool:
                has_run = run()
                self._look()
                return has_run

            watched.touched = getattr(run, "touched", ())  # type: ignore[attr-defined]
            put(watched)

        return watched_put

    def _look(self) -> None:
        assert self.order is not None
        words, host_words = self.rig.words(), self.rig.host_words()
        for group in self.order.groups:
            start = group.store_offset_bytes
            found = self.rig.arena(group.arena_offset_bytes, group.size_bytes)
            has_risen = self.epoch in (words[group.word], host_words[group.word])
            if has_risen and found != self.data[start : start + group.size_bytes]:
                self.failures.append(f"word {group.word} rose before its data")

    def send(self, sizes: list[int], chance: random.Random) -> None:
        """Fresh bytes for the groups; they must all be there in the end."""
        self.epoch += 1
        self.order = order(self.epoch, sizes)
        self.data = chance.randbytes(sum(sizes))
        self.rig.fill_store(0, self.data)
        ended = self.rig.run(self.order)
        assert ended.is_complete
        assert ended.copied_bytes == len(self.data)
        assert list(ended.group_ends_at_ms) == sorted(ended.group_ends_at_ms)
        assert self.rig.arena(MIB, len(self.data)) == self.data, "wrong bytes"
        assert self.rig.words(len(sizes)) == [self.epoch] * len(sizes)
        assert self.rig.host_words()[: len(sizes)] == [self.epoch] * len(sizes)
        assert not self.failures


def groups_of(chance: random.Random) -> list[int]:
    largest = chance.choice([CHUNK // 2, 3 * CHUNK, 9 * CHUNK])
    return [chance.choice([0, chance.randrange(largest)]) for _ in range(chance.randrange(1, 9))]


def transmissions(seed: int, rounds: int = 6, **options: object) -> None:
    chance = random.Random(seed)
    with peered(seed, **options) as rig:
        watched = Watched(rig)
        for _ in range(rounds):
            watched.send(groups_of(chance), chance)
        watched.send([12 * CHUNK], chance)
        assert count(rig, "cudaMemcpyPeerAsync") >= 6, "the peer has its share"
        assert rig.world.through_host_bytes == 0


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("writer", ["copy", "write"])
def test_all_bytes_arrive_before_their_words_however_streams_interleave(
    seed: int, writer: str
) -> None:
    transmissions(seed, word_writer=writer)


def test_bytes_that_could_not_be_pinned_arrive_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise CudaError("cudaHostRegister", "cudaErrorNotPermitted", "")

    monkeypatch.setattr(Cuda, "register", refuse)
    transmissions(1)


@pytest.mark.parametrize(
    "is_dropped",
    [
        lambda peer, stream, event: stream == peer._inward,
        lambda peer, stream, event: stream == peer.stream and event in peer._come,
        lambda peer, stream, event: stream == peer.stream and event not in peer._come,
    ],
    ids=["until a slot is left", "until a chunk has come", "for our own lane's chunks"],
)
def test_without_any_one_of_the_waits_bytes_are_wrong(
    monkeypatch: pytest.MonkeyPatch, is_dropped: Dropped
) -> None:
    lanes: list[PeerLane] = []
    make, wait = PeerLane.__init__, Cuda.wait_event

    def made(self: PeerLane, *arguments: object) -> None:
        make(self, *arguments)  # type: ignore[arg-type]
        lanes[:] = [self]

    def forgetful(self: Cuda, stream: int, event: int) -> None:
        if not is_dropped(lanes[0], stream, event):
            wait(self, stream, event)

    monkeypatch.setattr(PeerLane, "__init__", made)
    monkeypatch.setattr(Cuda, "wait_event", forgetful)

    def all_seeds() -> None:
        for seed in SEEDS:
            transmissions(seed)

    with pytest.raises(AssertionError, match=r"before its data|wrong bytes"):
        all_seeds()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_cancel_in_the_middle_of_a_group_leaves_nothing_under_way(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    chance = random.Random(seed)
    with peered(seed) as rig:
        sizes = [5 * CHUNK, 0, 7 * CHUNK, CHUNK]
        data = chance.randbytes(sum(sizes))
        rig.fill_store(0, data)
        left = chance.randrange(1, 13)  # copies until the cancel
        for lane in rig.memory._lanes:

            def copy(*arguments: int, plain: Callable[..., None] = lane.copy) -> None:
                nonlocal left
                left -= 1
                plain(*arguments)
                if left == 0:
                    rig.memory.cancel(Epoch(3))

            monkeypatch.setattr(lane, "copy", copy)
        ended = rig.run(order(3, sizes))
        assert not any(stream.queue for stream in rig.world.all_streams)
        raised = [3] * ended.group_count + [0] * (4 - ended.group_count)
        assert not ended.is_complete
        assert rig.words(4) == rig.host_words()[:4] == raised
        assert rig.arena(MIB, sum(sizes[: ended.group_count])) == data[: sum(sizes[: ended.group_count])]  # fmt: skip # noqa: E501
        assert rig.run(order(4, sizes)).is_complete
        assert rig.arena(MIB, len(data)) == data


def test_a_window_for_each_lane_is_under_way_and_chunks_are_shared_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    most: list[int] = []
    plain = cuda_memory._Flight.enqueued

    def enqueued(flight: cuda_memory._Flight, lane: object, size: int, word: int) -> int:
        event = plain(flight, lane, size, word)  # type: ignore[arg-type]
        most.append(flight._bytes.total())
        return event

    monkeypatch.setattr(cuda_memory._Flight, "enqueued", enqueued)
    with peered(0) as rig:
        rig.world.shuffle = None  # a lane runs when it is waited for: both about as fast
        assert rig.run(order(1, [64 * CHUNK])).is_complete
        assert max(most) == 8 * CHUNK
        assert 24 <= count(rig, "cudaMemcpyPeerAsync") <= 32
        peer_of(rig).serves = False
        most.clear()
        assert rig.run(order(2, [64 * CHUNK])).is_complete
        assert max(most) == 4 * CHUNK, "one lane, one window"


@pytest.mark.parametrize(
    ("call", "after"),
    [
        ("cudaStreamWaitEvent", 0),  # for the slot
        ("cudaMemcpyAsync", 2),  # behind our own chunk and its word: to the peer
        ("cudaEventRecord", 2),  # the same: a chunk has come
        ("cudaStreamWaitEvent", 1),
        ("cudaMemcpyPeerAsync", 0),
        ("cudaEventRecord", 3),  # the slot is left; the chunk is on its way to the arena
    ],
)
def test_a_peer_that_fails_costs_one_transmission_and_is_not_used_again(
    caplog: pytest.LogCaptureFixture, call: str, after: int
) -> None:
    with peered(0) as rig:
        data = random.Random(0).randbytes(4 * CHUNK)
        rig.fill_store(0, data)
        rig.world.shuffle = None
        rig.world.fail(call, "cudaErrorInvalidValue", after=after)
        ended = rig.run(order(1, [CHUNK] * 4))
        assert (ended.is_complete, ended.group_count) == (False, 1)
        assert rig.words(4) == [1, 0, 0, 0]
        assert not any(stream.queue for stream in rig.world.all_streams), "all of it has run"
        assert not peer_of(rig).serves
        assert not rig.lost
        before = count(rig, "cudaMemcpyPeerAsync")
        for epoch in (2, 3):
            assert rig.run(order(epoch, [CHUNK] * 4)).is_complete
        assert rig.arena(MIB, len(data)) == data
        assert count(rig, "cudaMemcpyPeerAsync") == before
    assert [r.message for r in caplog.records if r.levelno == logging.WARNING].count(
        f"peer=off cause={call}: cudaErrorInvalidValue (code 1)"
    ) == 1


def test_our_own_lanes_failure_is_not_the_peers() -> None:
    with peered(0) as rig:
        rig.world.fail("cudaMemcpyAsync", "cudaErrorInvalidValue")
        assert not rig.run(order(1, [CHUNK])).is_complete
        assert peer_of(rig).serves


def test_a_broken_context_of_the_peer_ends_the_daemon() -> None:
    """It is started again, and goes on alone if the peer cannot be had."""
    rig = Rig(World(devices=2))
    rig.memory.add_peer(1)
    rig.fill_store(0, bytes(MIB))
    rig.world.fail("cudaMemcpyPeerAsync", "cudaErrorIllegalAddress")
    assert not rig.run(order(1, [CHUNK] * 2)).is_complete
    assert rig.lost == [True]


@pytest.mark.parametrize(
    ("call", "after"),
    [
        ("cudaStreamCreateWithFlags", 0), ("cudaDeviceEnablePeerAccess", 0),
        ("cudaEventCreateWithFlags", 1), ("cudaSetDevice", 0), ("cudaDeviceEnablePeerAccess", 1),
        ("cudaMalloc", 0), ("cudaStreamCreateWithFlags", 1), ("cudaEventCreateWithFlags", 5),
    ],
)  # fmt: skip
def test_a_peer_that_cannot_be_had_leaves_nothing_behind(call: str, after: int) -> None:
    rig = Rig(World(devices=2))
    world = rig.world
    before = (set(world.streams), set(world.events), world.used_bytes)
    world.fail(call, "cudaErrorMemoryAllocation", after=after)
    with pytest.raises(CudaError, match=call):
        rig.memory.add_peer(1)
    assert (set(world.streams), set(world.events), world.used_bytes) == before
    assert world.current == 0
    assert rig.run(order(1, [CHUNK])).is_complete
    rig.close()


def test_a_daemon_whose_peer_cannot_be_had_goes_on_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """This process's fake machine has one GPU."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    settings = DaemonSettings(
        device="cuda:0", arena_bytes=MIB, store_bytes=MIB, words=8, link_bytes_per_s=0,
        bell_count=0,
        cuda=CudaOptions(package="fake_cuda", visible="GPU-1", peer="GPU-2"),
    )  # fmt: skip
    store = sealed_memfd("test-store", MIB)
    memory = open_memory(settings, [store])
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-1,GPU-2"
    assert "peer=off cause=cudaDeviceEnablePeerAccess: cudaErrorInvalidDevice" in caplog.text
    memory.scrub(64, 64)
    memory.close()
    os.close(store)


def test_gpus_that_cannot_reach_each_other_are_no_peers() -> None:
    rig = Rig(World(devices=2, has_peers=False))
    with pytest.raises(CudaError, match="cudaDeviceEnablePeerAccess"):
        rig.memory.add_peer(1)
    rig.close()


def test_the_self_test_says_why_there_is_no_peer() -> None:
    for world, peers, text in (
        (World(), [], "no other GPU is served"),
        (World(devices=3, has_peers=False), [2, 0], "cuda:1 and cuda:2, cuda:0 cannot access each"),
    ):
        rig = selftest._Rig(Cuda(world.runtime, world.driver), {"index": 1})
        with pytest.raises(RuntimeError, match=text):
            rig.other_gpu_test(peers, [])


def test_closing_gives_both_devices_everything_back() -> None:
    with peered(0) as rig:
        assert rig.world.used_on(1) == LANDING_SLOTS * CHUNK
        rig.run(order(1, [6 * CHUNK]))
    world = rig.world
    assert (world.used_bytes, world.streams, world.events) == (0, {}, {})


def test_what_a_peer_takes_of_the_other_device_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert choosing.LANDING_BYTES == cuda_lanes.LANDING_BYTES
