"""The worker's cuda device: tensors at fake addresses, graphs, the slice, and waits for groups."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import fake_cuda
import pytest
import torch
from fake_cuda import Stream, World
from fake_cuda.host_torch import HostTorch, TapeRecorder

from pipeswitch.base.errors import InvalidInput, LocalProtocolError, RemoteProtocolError
from pipeswitch.devices.cuda import worker_device as cuda_view
from pipeswitch.devices.cuda.activation_slice import SEGMENT_BYTES, Segments
from pipeswitch.devices.cuda.bindings import Cuda, CudaError
from pipeswitch.devices.cuda.capture import CaptureBroke
from pipeswitch.devices.cuda.graphs import GRAPH_BYTES, DeviceProgram, GraphBudget, _shapes
from pipeswitch.devices.cuda.ladder import CudaOptions, Waits
from pipeswitch.devices.cuda.torch import tensor_at
from pipeswitch.devices.cuda.worker_device import CudaWorkerDevice
from pipeswitch.ipc.control_page import BOARD_BYTES, Board, new_doorbell, sealed_memfd
from pipeswitch.ipc.messages.base import OpId, ResourceLimits
from pipeswitch.ipc.messages.worker import WorkerSettings
from pipeswitch.programs.graphs.bundle import Graph, Node
from pipeswitch.programs.graphs.contracts import CONTRACTS, BrokenContract
from pipeswitch.programs.interface.dims import Dim
from pipeswitch.programs.interface.layout import GroupSpec, TensorSpec, ValueSpec
from pipeswitch.programs.running.executor import BoundGraph, GraphProgram
from pipeswitch.workers.training.torch_private import bytes_of_their_own
from tests.unit.manifests import plain_manifest, plain_tensor

MIB = 1 << 20
OP = OpId(7)
FENCE_COUNT = 64
FAKE_ADDRESS = 0x7F00_0000_0000


def spec(dtype: str, shape: tuple[int, ...], offset: int, size: int) -> TensorSpec:
    return TensorSpec(
        name="t",
        dtype=dtype,
        shape=shape,
        offset_bytes=offset,
        size_bytes=size,
        file_offset_bytes=0,
    )


# ---- real cuda tensors at an unused address, which are never read and need no driver -----------


@pytest.fixture
def storage() -> torch.UntypedStorage:
    construct = torch._C._construct_storage_from_data_pointer
    storage_made: torch.UntypedStorage = construct(FAKE_ADDRESS, torch.device("cuda", 0), 4 * MIB)
    return storage_made


@pytest.mark.parametrize(
    ("dtype", "shape", "size"),
    [
        ("float32", (2, 3, 4), 96),
        ("bfloat16", (10,), 20),
        ("int64", (), 8),
        ("bool", (7,), 7),
        ("float16", (0, 5), 0),
        ("uint8", (512,), 512),
        ("float64", (1, 1), 8),
    ],
)
def test_a_tensor_lies_where_its_spec_says(
    storage: torch.UntypedStorage, dtype: str, shape: tuple[int, ...], size: int
) -> None:
    tensor = tensor_at(storage, spec(dtype, shape, 512, size), MIB)
    assert tensor.shape == shape
    assert tensor.dtype is getattr(torch, dtype)
    assert tensor.device == torch.device("cuda", 0)
    assert tensor.is_contiguous()
    if size:
        assert tensor.data_ptr() == FAKE_ADDRESS + MIB + 512


def test_tensors_over_one_storage_have_version_counters_of_their_own(
    storage: torch.UntypedStorage,
) -> None:
    one, other = (tensor_at(storage, spec("float32", (4,), 0, 16), MIB) for _ in range(2))
    torch._C._autograd._unsafe_set_version_counter((one,), (5,))
    assert (one._version, other._version) == (5, 0)


@pytest.mark.parametrize(
    ("bad", "region"),
    [
        (spec("float32", (4,), 0, 16), -512),
        (spec("float32", (4,), 0, 16), 4 * MIB - 12),
        (spec("float32", (4,), 0, 20), MIB),
        (spec("float32", (4,), 2, 16), MIB),
        (spec("complex64", (4,), 0, 32), MIB),
    ],
)
def test_the_constructor_without_bounds_checks_is_never_asked_for_nonsense(
    storage: torch.UntypedStorage, bad: TensorSpec, region: int
) -> None:
    with pytest.raises(LocalProtocolError):
        tensor_at(storage, bad, region)


def test_a_torch_without_the_private_constructor_is_served_by_the_public_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(torch._C, "_construct_CUDA_Tensor_From_Storage_And_Metadata")
    host = torch.zeros(4096, dtype=torch.uint8)
    tensor = tensor_at(host.untyped_storage(), spec("float32", (4,), 64, 16), 512)
    assert tensor.data_ptr() == host.data_ptr() + 576


# ---- the view ---------------------------------------------------------------------------------


class Rig:
    """A worker's view of a block that a fake daemon owns."""

    def __init__(self, waits: Waits = "gpu", **options: Any) -> None:
        self.owner, self.world = World(), World()
        self.block = Cuda(self.owner.runtime, self.owner.driver).malloc(4 * MIB)
        self.handle = Cuda(self.owner.runtime, self.owner.driver).export_handle(self.block)
        self.fences = sealed_memfd("test-fences", 4 * FENCE_COUNT)
        self.control_page = sealed_memfd("test-board", BOARD_BYTES)
        self.doorbell = new_doorbell()
        self.side = HostTorch(self.world)
        self.view = CudaWorkerDevice(
            Cuda(self.world.runtime, self.world.driver),
            self.side,
            WorkerSettings(
                slot=0,
                device="cuda:0",
                handle=self.handle,
                limits=ResourceLimits(
                    arena_bytes=3 * MIB, fence_count=FENCE_COUNT, doorbell_count=1
                ),
            ),
            CudaOptions(package="", waits=waits, **{"graph_bytes": 1 << 30, **options}),
            fences_descriptor=self.fences,
            control_page=self.control_page,
            doorbells=[self.doorbell],
        )

    @property
    def stream(self) -> Stream:
        return self.world.streams[self.side.stream]

    def close(self) -> None:
        self.view.close()
        for descriptor in (self.fences, self.control_page, self.doorbell):
            os.close(descriptor)


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig_made = Rig()
    yield rig_made
    rig_made.close()


def test_a_view_opens_the_handle_once_and_closes_it(rig: Rig) -> None:
    for _ in range(5):
        rig.view.tensor(spec("float32", (4,), 0, 16), MIB)
    names = [name for name, _ in rig.world.calls]
    assert names.count("cudaIpcOpenMemHandle") == 1
    assert len(rig.world.opened) == 1


def test_a_handle_that_cannot_be_opened_is_a_typed_error() -> None:
    world = World()
    world.fail("cudaIpcOpenMemHandle", "cudaErrorOperatingSystem")
    with pytest.raises(CudaError):
        Cuda(world.runtime, world.driver).open_handle(bytes(64))


def test_tensors_over_words_or_behind_the_arena_are_refused(rig: Rig) -> None:
    with pytest.raises(RemoteProtocolError):
        rig.view.tensor(spec("float32", (4,), 0, 16), 0)
    with pytest.raises(LocalProtocolError):
        rig.view.tensor(spec("float32", (4,), 0, 16), 3 * MIB)  # a slice has no model's bytes
    with pytest.raises(LocalProtocolError):
        rig.view.slice_bytes(3 * MIB - 1, 2)


def test_the_device_is_told_to_wait_for_exactly_the_epoch(rig: Rig) -> None:
    rig.view._running = SimpleNamespace(is_replaying=True)  # type: ignore[assignment]
    assert rig.view.wait_group(3, 7) == 0.0
    assert rig.stream.step(), "the time before the wait"
    assert not rig.stream.step(), "the word is not there"
    word = rig.view.slice_bytes(12, 4)
    word.copy_(torch.tensor([8, 0, 0, 0], dtype=torch.uint8))
    assert not rig.stream.step(), "a later epoch is another lease"
    word.copy_(torch.tensor([7, 0, 0, 0], dtype=torch.uint8))
    rig.view.quiesce()
    assert rig.stream.done == 3


def test_the_time_for_which_the_device_waited_is_known_per_run(rig: Rig) -> None:
    replay: Any = SimpleNamespace(is_replaying=True)
    for run, waits_ms in enumerate([(3.0, 4.0, 0.0), (2.0,), ()], 7):
        with rig.view.computing(replay):
            for fence in range(len(waits_ms)):
                rig.view.wait_group(fence, run)
            for fence, wait_ms in enumerate(waits_ms):
                rig.stream.step()
                rig.world.now_ms += wait_ms
                rig.view.slice_bytes(4 * fence, 1).fill_(run)
                rig.stream.step()
                rig.stream.step()
                rig.world.now_ms += 10.0  # computing
            rig.view.quiesce()
        assert rig.view.waited_ms == sum(waits_ms)
    assert len(rig.world.stamps) == 6, "events are used again"


@pytest.mark.parametrize("places", [1, 2, 3])
def test_a_streamed_model_computes_while_the_next_group_is_copied(rig: Rig, places: int) -> None:
    """A group is copied to the place of an earlier one, after that one is reported as computed."""
    replay: Any = SimpleNamespace(is_replaying=True)
    board, count = Board(rig.control_page), 9

    def copy_groups() -> None:
        for group in range(count):
            while not board.has_computed(OP, max(0, group + 1 - places)):
                os.eventfd_read(rig.doorbell)
            rig.view.slice_bytes(4 * group, 1).fill_(7)

    copier = threading.Thread(target=copy_groups)
    copier.start()
    with rig.view.computing(replay):
        before = len(rig.world.calls)
        for group in range(count):
            rig.view.report_computed(OP, group)
            rig.view.wait_group(group, OP)
        names = [name for name, _ in rig.world.calls[before:]]
        assert "cudaStreamSynchronize" not in names
        rig.view.quiesce()
    copier.join(30)
    assert not copier.is_alive()
    assert len(rig.world.events) - len(rig.world.stamps) <= 2, "events are used again"
    board.close()


def test_reports_of_a_run_that_failed_are_not_made_in_the_next_one(rig: Rig) -> None:
    replay: Any = SimpleNamespace(is_replaying=True)
    board = Board(rig.control_page)
    with rig.view.computing(replay):
        rig.view.report_computed(OP, 5)
    with rig.view.computing(replay):
        rig.view.quiesce()
    assert not board.has_computed(OP, 5)
    board.close()


def test_nothing_is_enqueued_for_a_group_that_the_host_knows_to_be_there(rig: Rig) -> None:
    os.pwrite(rig.fences, (9).to_bytes(4, "little"), 4 * 5)
    assert rig.view.wait_group(5, 9) == 0.0
    assert rig.stream.enqueued == 0


def test_settling_waits_for_every_stream_and_quiescing_for_one(rig: Rig) -> None:
    cuda = Cuda(rig.world.runtime, rig.world.driver)
    other = cuda.stream()
    block = cuda.malloc(16)
    cuda.fill(block, 1, 16, other)
    rig.view.quiesce()
    assert rig.world.streams[other].done == 0
    rig.view.synchronize()
    assert rig.world.streams[other].done == 1


def test_a_broken_context_is_told_from_a_models_own_error() -> None:
    rig = Rig()  # never closed, because closing fails in a broken context
    assert not rig.view.is_lost(ValueError("the model's"))
    rig.world.fail("cudaEventRecord", "cudaErrorIllegalAddress")
    assert rig.view.is_lost(RuntimeError("CUDA error: an illegal memory access"))


def test_a_kernels_assertion_is_the_tasks_own_fault_and_nothing_else_is() -> None:
    rig = Rig()  # never closed, because closing fails in a broken context
    assert rig.view.fault() is None
    rig.world.fail("cudaEventRecord", "cudaErrorAssert")
    assert rig.view.is_lost(RuntimeError("CUDA error: device-side assert triggered"))
    fault = rig.view.fault()
    assert fault.data["type"] == "DeviceAssert"
    other = Rig()
    other.world.fail("cudaEventRecord", "cudaErrorIllegalAddress")
    assert other.view.is_lost(RuntimeError("CUDA error"))
    assert other.view.fault() is None, "it is tried again on another worker"


def test_an_eager_run_waits_on_the_host_and_leaves_nothing_behind_a_wait(rig: Rig) -> None:
    """The host waits: if the stream waited, the driver would block kernel loads and allocations."""
    rig.view._running = None
    waited = threading.Thread(target=rig.view.wait_group, args=(3, 7))
    waited.start()
    os.pwrite(rig.fences, (7).to_bytes(4, "little"), 4 * 3)
    os.eventfd_write(rig.doorbell, 1)
    waited.join(30)
    assert not waited.is_alive()
    assert rig.stream.enqueued == 0


def test_only_a_replay_lets_the_device_wait(rig: Rig) -> None:
    bound, _ = program()
    os.pwrite(rig.fences, b"".join((5).to_bytes(4, "little") for _ in range(3)), 0)
    device = DeviceProgram(bound, "cpu", TapeRecorder(), GraphBudget(1 << 30))
    x = torch.randn(2, 4)
    for op_id in (5, 6):  # the host's words have reached 5, but not 6
        with rig.view.computing(device):
            device.run([x], lambda group, op_id=op_id: rig.view.wait_group(group, op_id))  # type: ignore[misc]
            device.improve()
        assert rig.stream.enqueued == (0 if op_id == 5 else 9)  # each wait between two events
    rig.stream.queue.clear()


def test_a_queue_that_waits_for_ever_is_left_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_view, "ENDING_S", 0.02)
    monkeypatch.setattr(fake_cuda, "WAIT_DEADLINE_S", 1.0)
    rig = Rig()
    rig.view._running = SimpleNamespace(is_replaying=True)  # type: ignore[assignment]
    rig.view.wait_group(3, 7)
    events = len(rig.world.events)
    assert rig.view.is_lost(ValueError("the model's"))
    assert rig.view.fault() is None
    assert len(rig.world.events) == events


def test_a_slice_that_is_too_small_is_left_for_good() -> None:
    rig = Rig()
    bound, _ = program()
    device = DeviceProgram(bound, "cpu", None, GraphBudget(0))
    rig.view.take_slice(MIB)
    for expected_slice in (True, False):
        with rig.view.computing(device):
            assert rig.side.in_slice[-1] is expected_slice
        assert rig.view.leave_slice(device) is expected_slice, "without one it is the task's own"


def test_a_refusal_of_unknown_name_counts_as_one_while_the_context_works(rig: Rig) -> None:
    rig.world.fail("cudaHostRegister", "cudaErrorNotReady")  # not a harmless error
    rig.view.pin(rig.block, 4096)
    assert rig.world.registered == {}
    rig.world.fail("cudaHostRegister", "cudaErrorUnknown")  # breaks the fake's context
    with pytest.raises(CudaError):
        rig.view.pin(rig.block, 4096)
    rig.world._broken = None


def test_a_jobs_tensor_has_a_storage_of_its_own_in_the_arena(storage: torch.UntypedStorage) -> None:
    memory = tensor_at(storage, spec("uint8", (2 * MIB,), 0, 2 * MIB), MIB)
    part = bytes_of_their_own(memory, 4096, 64)
    assert part.data_ptr() == FAKE_ADDRESS + MIB + 4096
    assert part.untyped_storage().nbytes() == 64, "torch.save would write the arena"
    assert part.device == memory.device


def test_an_idle_workers_cache_is_emptied_only_if_memory_is_short(rig: Rig) -> None:
    rig.world.broken["empty-cache"] = "it is empty"
    rig.world.device_bytes = 8 << 30
    assert [rig.view.trim(needed << 30) for needed in (0, 5)] == [True, True]
    rig.world.broken.clear()
    assert not rig.view.trim(8 << 30)
    rig.world.broken["empty-cache"] = "it is empty"
    rig.world.device_bytes = MIB
    with pytest.raises(RuntimeError):
        rig.view.trim()


def test_a_pool_that_cannot_be_pinned_still_serves(rig: Rig) -> None:
    rig.world.fail("cudaHostRegister", "cudaErrorNotPermitted")
    rig.view.pin(rig.block, 4096)
    assert rig.world.registered == {}
    rig.view.pin(rig.block, 4096)
    assert rig.world.registered == {rig.block: 4096}


def test_an_answer_is_in_its_slab_when_the_stream_has_come_to_it_and_not_before(rig: Rig) -> None:
    slab = torch.zeros(1024)
    rig.view.pin(slab.data_ptr(), slab.nbytes)
    with rig.view.computing(None):
        slab.copy_(torch.ones(1024), non_blocking=True)
        assert slab.isnan().all(), "who reads now reads nonsense"
        rig.view.quiesce()
    assert torch.equal(slab, torch.ones(1024))


def test_a_capture_computes_nothing_and_refuses_what_the_host_must_see(rig: Rig) -> None:
    x, results = torch.ones(4), list[torch.Tensor]()
    recorder = rig.side.recorder()
    graph = recorder.record(lambda: results.append(x * 2))
    assert results[0].isnan().all()
    graph.replay()
    assert torch.equal(results[0], x * 2)
    for run in (lambda: x.sum().item(), lambda: x.nonzero()):
        with pytest.raises(RuntimeError, match="when stream is capturing"):
            recorder.record(run)  # type: ignore[arg-type]
    rig.side.check_failed_capture(recorder)


def test_a_mapping_is_not_closed_under_a_fill_that_is_queued(rig: Rig) -> None:
    cuda = Cuda(rig.world.runtime, rig.world.driver)
    stream = cuda.stream()
    cuda.fill(rig.view._base, 0, 64, stream)
    with pytest.raises(AssertionError):
        cuda.close_handle(rig.view._base)
    cuda.synchronize(stream)
    rig.world.opened[rig.view._base].open_count = 1


def test_a_slice_lies_behind_the_arena(rig: Rig) -> None:
    rig.view.take_slice(MIB)
    ((pointer, size),) = rig.side.slices
    assert rig.view._base + 3 * MIB == pointer
    assert size == MIB
    assert not rig.view.can_yield, "another task would overwrite what this one has computed"


# ---- segments ---------------------------------------------------------------------------------


def test_segments_are_handed_out_in_units_and_come_back() -> None:
    segments = Segments(1000 * SEGMENT_BYTES, 4 * SEGMENT_BYTES)
    first = segments.take(1)
    second = segments.take(SEGMENT_BYTES + 1)
    assert (first, second) == (1000 * SEGMENT_BYTES, 1001 * SEGMENT_BYTES)
    assert segments.take(2 * SEGMENT_BYTES) == 0, "torch tells it as out of memory"
    segments.give_back(second, SEGMENT_BYTES + 1)
    assert segments.take(2 * SEGMENT_BYTES) == second
    assert segments.holds(second)
    assert not segments.holds(1004 * SEGMENT_BYTES)


# ---- programs ---------------------------------------------------------------------------------


def program(groups: int = 3) -> tuple[BoundGraph, list[torch.Tensor]]:
    """Return a program ((x + w0) * w1) + w2 …, with a group per weight; and return the weights."""
    graph = Graph(
        version=2,
        inputs=(ValueSpec(name="x", dtype="float32", shape=("batch", 4)),),
        weights=tuple(f"w{i}" for i in range(groups)),
        nodes=tuple(
            Node(
                target=f"aten.{'add' if i % 2 == 0 else 'mul'}.Tensor",
                args=({"v": 0 if i == 0 else groups + i}, {"v": 1 + i}),
                kwargs={},
            )
            for i in range(groups)
        ),
        outputs=(ValueSpec(name="y", dtype="float32", shape=("batch", 4)),),
        results=(2 * groups,),
    )
    manifest = plain_manifest(
        total_bytes=512 * groups,
        tensors=tuple(plain_tensor(f"w{i}", (4,), 512 * i) for i in range(groups)),
        groups=tuple(
            GroupSpec(
                offset_bytes=512 * i,
                size_bytes=16,
                tensors=(i,),
                first_node=i,
                end_node=i + 1,
                label=str(i),
            )
            for i in range(groups)
        ),
        inputs=graph.inputs,
        outputs=graph.outputs,
        dims=(Dim("batch", 1, 8),),
    )
    weights = [torch.full((4,), float(i + 1)) for i in range(groups)]
    bound = GraphProgram(manifest, graph, "cpu").bind(lambda s: weights[int(s.name[1:])])
    return bound, weights


def expected(x: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
    for index, weight in enumerate(weights):
        x = x + weight if index % 2 == 0 else x * weight
    return x


def made(bound: BoundGraph, limit: int = 1 << 30) -> tuple[DeviceProgram, TapeRecorder]:
    recorder = TapeRecorder()
    return DeviceProgram(bound, "cpu", recorder, GraphBudget(limit)), recorder


def is_captured(device: DeviceProgram, inputs: list[torch.Tensor]) -> bool:
    return _shapes(inputs) in device._captured


def test_a_replay_reads_new_inputs_and_new_weights_at_the_same_addresses() -> None:
    bound, weights = program()
    device, _ = made(bound)
    x = torch.randn(2, 4)
    assert torch.equal(device.run([x], lambda _: None)[0], expected(x, weights))
    assert not is_captured(device, [x])
    device.improve()
    assert is_captured(device, [x])
    for _ in range(3):
        x = torch.randn(2, 4)
        for weight in weights:
            weight.copy_(torch.randn(4))  # as if another copy had changed the bytes in place
        assert torch.equal(device.run([x], lambda _: None)[0], expected(x, weights))


def test_every_group_is_waited_for_in_order_in_a_replay_too() -> None:
    bound, weights = program(4)
    device, _ = made(bound)
    x = torch.randn(1, 4)
    device.run([x], lambda _: None)
    device.improve()
    for weight in weights:
        weight.fill_(torch.nan)
    groups: list[int] = []

    def arrive(group: int) -> None:
        groups.append(group)
        weights[group].fill_(2.0)

    result = device.run([x], arrive)[0]
    assert groups == [0, 1, 2, 3]
    assert torch.equal(result, expected(x, weights)), "a group ran before its weights came"


def test_other_shapes_run_eagerly_until_they_are_captured_themselves() -> None:
    bound, weights = program()
    device, _ = made(bound)
    for batch in (1, 5, 1, 5):
        x = torch.randn(batch, 4)
        assert torch.equal(device.run([x], lambda _: None)[0], expected(x, weights))
        device.improve()
    assert is_captured(device, [torch.zeros(1, 4)])
    assert is_captured(device, [torch.zeros(5, 4)])


def test_a_capture_that_fails_is_not_tried_again_and_the_program_serves() -> None:
    bound, weights = program()
    device, recorder = made(bound)
    recorder.fails = True
    x = torch.randn(2, 4)
    device.run([x], lambda _: None)
    assert device.is_capture_wanted
    device.improve()
    recorder.fails = False
    assert torch.equal(device.run([x], lambda _: None)[0], expected(x, weights))
    assert not device.is_capture_wanted


def test_what_breaks_a_contract_is_not_captured_and_does_not_pass_as_a_replay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Capture a shape only after an eager run at it: a capture does not check calls' contracts."""
    bound, weights = program()
    device, _ = made(bound)
    good, bad = torch.randn(2, 4), torch.randn(3, 4)

    def not_three(arguments: Any) -> None:
        if arguments["self"].shape[0] == 3:
            raise BrokenContract("not three")

    monkeypatch.setitem(CONTRACTS, "add", not_three)  # type: ignore[index]
    device.run([good], lambda _: None)
    device.improve()
    for _ in range(2):
        with pytest.raises(InvalidInput, match="not three"):
            device.run([bad], lambda _: None)
        assert torch.equal(device.run([good], lambda _: None)[0], expected(good, weights))
        assert not device.is_capture_wanted
        device.improve()
        assert not is_captured(device, [bad])


def test_shapes_that_were_forgotten_are_not_captured_and_may_be_later() -> None:
    bound, _ = program()
    device, _ = made(bound)
    x = torch.randn(2, 4)
    device.run([x], lambda _: None)
    bound._program._tried.clear()
    device.improve()
    assert not is_captured(device, [x])
    device.run([x], lambda _: None)
    device.improve()
    assert is_captured(device, [x])


def test_a_capture_that_broke_the_process_is_not_taken_for_a_refusal() -> None:
    bound, _ = program()
    device, recorder = made(bound)
    device.run([torch.randn(2, 4)], lambda _: None)

    def broken(run: object) -> None:
        raise CaptureBroke("cudaStreamEndCapture", "broken", "cannot be mended")

    recorder.record = broken  # type: ignore[method-assign,assignment]
    with pytest.raises(CaptureBroke):
        device.improve()


def test_graphs_stay_within_their_budget_the_least_recently_used_go() -> None:
    bound, weights = program()
    device, recorder = made(bound, limit=2 * MIB)
    assert recorder.cost_bytes == MIB
    for batch in (1, 2):
        device.run([torch.zeros(batch, 4)], lambda _: None)
        device.improve()
    device.run([torch.zeros(1, 4)], lambda _: None)  # batch 2 is now the least recently used
    device.run([torch.zeros(3, 4)], lambda _: None)
    device.improve()
    batches = [batch for batch in (1, 2, 3) if is_captured(device, [torch.zeros(batch, 4)])]
    assert batches == [1, 3]
    x = torch.randn(2, 4)
    assert torch.equal(device.run([x], lambda _: None)[0], expected(x, weights))


def test_a_graph_larger_than_the_budget_is_refused_for_good() -> None:
    bound, _ = program()
    device, _ = made(bound, limit=MIB - 1)
    x = torch.zeros(2, 4)
    device.run([x], lambda _: None)
    device.improve()
    device.run([x], lambda _: None)
    assert not is_captured(device, [x])
    assert not device.is_capture_wanted


@pytest.mark.parametrize(
    ("lost_bytes", "driver_bytes"),
    [(0, 0), (100_000, 100_000), (3 << 30, 3 * GRAPH_BYTES), (-(1 << 30), 0)],
)
def test_memory_of_other_processes_is_no_cost_of_a_graph(
    lost_bytes: int, driver_bytes: int
) -> None:
    bound, _ = program()
    device, recorder = made(bound, limit=2 * MIB)
    recorder.lost_bytes = lost_bytes  # taken from the device during the capture of three groups
    x = torch.zeros(2, 4)
    device.run([x], lambda _: None)
    device.improve()
    assert is_captured(device, [x])
    assert device._budget.used_bytes == MIB + driver_bytes


def test_closing_gives_the_budget_back() -> None:
    bound, _ = program()
    budget = GraphBudget(1 << 30)
    device = DeviceProgram(bound, "cpu", TapeRecorder(), budget)
    device.run([torch.zeros(2, 4)], lambda _: None)
    device.improve()
    assert budget.used_bytes == MIB
    device.close()
    assert budget.used_bytes == 0
    assert not is_captured(device, [torch.zeros(2, 4)])


def test_only_graph_programs_compute_in_the_slice(rig: Rig) -> None:
    bound, _ = program()
    with rig.view.computing(rig.view.program(bound)):
        pass
    with rig.view.computing(None):
        pass
    assert rig.side.in_slice == [True, False]
