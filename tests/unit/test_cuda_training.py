"""Scripts on cuda: they run at most two groups ahead, and tensors are aligned as by torch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_cuda import World

from pipeswitch.devices.cuda.bindings import Cuda
from pipeswitch.devices.cuda.stream_gate import LOOKS_PER_GROUP, RunAhead
from pipeswitch.devices.cuda.torch import tensor_at
from pipeswitch.workers.training.randomness import RandomState
from pipeswitch.workers.training.reports import Reports
from pipeswitch.workers.training.slice import TrainingSlice
from pipeswitch.workers.training.slice_layout import Area, padded_bytes
from pipeswitch.workers.training.timing import WriteWatch
from tests.unit.manifests import plain_tensor


def test_two_groups_are_queued_and_no_more() -> None:
    world = World()
    cuda = Cuda(world.runtime, world.driver)
    stream, block = cuda.stream(), cuda.malloc(64)
    ahead = RunAhead(cuda, lambda: stream)
    queue = world.streams[stream]
    for group in range(1, 12):
        for _ in range(LOOKS_PER_GROUP):
            cuda.fill(block, group, 64, stream)  # replaces the kernels of a layer
            ahead.look()
        assert queue.enqueued - queue.done <= RunAhead.ahead * LOOKS_PER_GROUP
        assert ahead.waits == max(0, group - RunAhead.ahead)
        if group > RunAhead.ahead:
            assert queue.enqueued - queue.done == RunAhead.ahead * LOOKS_PER_GROUP, (
                "it may run ahead"
            )


def test_a_look_between_two_groups_costs_no_call() -> None:
    world = World()
    ahead = RunAhead(Cuda(world.runtime, world.driver), lambda: 0)
    before = len(world.calls)
    for _ in range(LOOKS_PER_GROUP - 1):
        ahead.look()
    assert len(world.calls) == before
    for _ in range(20 * LOOKS_PER_GROUP):
        ahead.look()
    assert (ahead.waits, ahead.waited_ms) == (0, 0.0), "the device was never behind"


def test_nothing_is_asked_while_the_script_captures_a_graph_of_its_own() -> None:
    world = World()
    stream: list[int | None] = [None]
    ahead = RunAhead(Cuda(world.runtime, world.driver), lambda: stream[0])
    before = len(world.calls)
    for _ in range(4 * LOOKS_PER_GROUP):
        ahead.look()
    assert len(world.calls) == before
    stream[0] = 0
    for _ in range(LOOKS_PER_GROUP):
        ahead.look()
    assert len(world.calls) > before


@pytest.fixture
def arena() -> torch.Tensor:
    """Return a tensor on cuda:0 at an unused address; it is never read and needs no driver."""
    storage = torch._C._construct_storage_from_data_pointer(
        0x7F00_0000_0000, torch.device("cuda", 0), 1 << 20
    )
    return tensor_at(storage, plain_tensor("slice", (1 << 20,), dtype="uint8"), 0)


def test_a_slice_on_cuda_holds_its_devices_tensors_each_with_bytes_of_its_own(
    arena: torch.Tensor,
) -> None:
    memory = TrainingSlice.__new__(TrainingSlice)
    memory._memory = arena
    place = Area("parameters", 4096, 8192).place("weight", torch.empty(6, 4))
    view = memory.view(place)
    assert memory.holds(view)
    assert not memory.holds(torch.empty(4))
    assert (view.device, view.shape) == (arena.device, (6, 4))
    assert view.data_ptr() == arena.data_ptr() + 4096
    assert view.untyped_storage().nbytes() == 96, "torch.save would write the arena"


def test_a_number_on_the_device_is_read_only_when_a_report_is_due(arena: torch.Tensor) -> None:
    remembered: list[dict[str, float]] = []
    host: Any = SimpleNamespace(
        now_ms=lambda: -1.0, remember=lambda step, values: remembered.append(values)
    )
    loss = tensor_at(arena.untyped_storage(), plain_tensor("loss", ()), 0)
    known = Reports(host).log({"loss": loss, "rate": 0.5}, 3)
    assert known == {"rate": 0.5}, "reading the loss would wait for the device"
    assert remembered == [known]


def test_a_sum_at_a_point_stays_on_the_device() -> None:
    memory = TrainingSlice.__new__(TrainingSlice)
    memory._memory = torch.empty(4096, dtype=torch.uint8, device="meta")  # reading it would fail
    memory.parameters = Area("parameters", 0, 4096)
    memory.parameters.place("weight", torch.empty(6, 4))
    WriteWatch(was_watched=False, writes_unseen=False).at_point(
        memory.sum_of_parameters, is_due=True
    )


def test_a_job_without_parameters_has_a_sum() -> None:
    memory = TrainingSlice.__new__(TrainingSlice)
    memory._memory = torch.zeros(4096, dtype=torch.uint8)
    memory.parameters = Area("parameters", 0, 4096)
    assert memory.sum_of_parameters() == 0


def test_the_devices_generator_is_kept_with_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    states = {"cuda:0": torch.tensor([1, 2], dtype=torch.uint8)}
    module = SimpleNamespace(
        get_rng_state=lambda device: states[device].clone(),
        set_rng_state=lambda state, device: states.update({device: state}),
    )
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    state = RandomState.from_values(RandomState("cuda:0").values())
    states["cuda:0"] = torch.zeros(2, dtype=torch.uint8)
    state.restore("cuda:0")
    assert states["cuda:0"].tolist() == [1, 2]


def test_what_lies_behind_a_small_bias_is_aligned_as_torchs_own_allocator_would() -> None:
    """cuBLASLt chooses algorithms by operands' alignment, so another alignment changes bits."""
    area = Area("parameters", 0, 4096)
    places = [area.place(str(size), torch.empty(size)) for size in (8, 64, 3, 100)]
    assert [place.offset_bytes % 512 for place in places] == [0, 0, 0, 0]
    assert area.used_bytes == padded_bytes([torch.empty(size) for size in (8, 64, 3, 100)])
