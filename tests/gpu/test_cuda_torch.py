"""The real ``torch.cuda`` side: tensors over raw memory, the slice, graphs, private symbols."""

from __future__ import annotations

import copy
import io
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pipeswitch.devices.cuda.bindings import Cuda
from pipeswitch.devices.cuda.graphs import DeviceProgram, GraphBudget
from pipeswitch.devices.cuda.torch import CudaTorch
from pipeswitch.programs.interface.layout import TensorSpec
from pipeswitch.programs.running.executor import BoundProgram
from pipeswitch.workers.training.slice import rebind
from pipeswitch.workers.training.torch_private import bytes_of_their_own

pytestmark = pytest.mark.gpu

MIB = 1 << 20


def spec(dtype: str, shape: tuple[int, ...], size: int) -> TensorSpec:
    return TensorSpec(
        name="t", dtype=dtype, shape=shape, offset_bytes=0, size_bytes=size, file_offset_bytes=0
    )


@pytest.fixture(scope="module")
def side() -> CudaTorch:
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    return CudaTorch(0)


def test_tensors_over_a_raw_pointer_read_and_write_it(cuda: Cuda, side: CudaTorch) -> None:
    block = cuda.malloc(4 * MIB)
    storage = side.storage(block, 4 * MIB)
    assert storage.data_ptr() == block
    for dtype, size in (("float32", 4096), ("bfloat16", 2048), ("int64", 8192), ("bool", 1024)):
        tensor = side.tensor(storage, spec(dtype, (1024,), size), 2 * MIB)
        other = side.tensor(storage, spec(dtype, (1024,), size), 2 * MIB)
        tensor.fill_(1)
        torch.cuda.synchronize()
        assert bool((other == 1).all())
        assert tensor._version == other._version + 1
    del storage, tensor, other
    cuda.free(block)


def test_a_kernel_waits_for_a_word_and_reads_what_came_with_it(cuda: Cuda, side: CudaTorch) -> None:
    block = cuda.malloc(4 * MIB)
    copies = cuda.stream()
    cuda.fill(block, 0, 4 * MIB, copies)
    cuda.synchronize(copies)
    values = side.tensor(side.storage(block, 4 * MIB), spec("uint8", (MIB,), MIB), 2 * MIB)
    with side.computing(in_slice=False):
        int(values.sum())  # loads the kernel before anything waits
        cuda.wait_value(side.stream, block, 7)
        total = values.sum()
    done = cuda.event()
    cuda.record(done, side.stream)
    assert not cuda.is_done(done)
    cuda.fill(block + 2 * MIB, 1, MIB, copies)
    cuda.write_value(copies, block, 7)
    cuda.wait(done)
    assert int(total) == MIB


def test_a_jobs_tensor_has_a_storage_of_its_own(cuda: Cuda, side: CudaTorch) -> None:
    block = cuda.malloc(4 * MIB)
    memory = side.tensor(side.storage(block, 4 * MIB), spec("uint8", (MIB,), MIB), MIB)
    part = bytes_of_their_own(memory, 4096, 64).view(torch.float32)
    part.fill_(2.0)
    parameter = torch.nn.Parameter(torch.zeros(16, device=side.device))
    with torch.no_grad():
        rebind(parameter, part)
    torch.cuda.synchronize()
    assert bool((parameter == 2).all())
    assert copy.deepcopy(part).untyped_storage().nbytes() == 64
    file = io.BytesIO()
    torch.save(parameter, file)
    assert len(file.getvalue()) < MIB
    del memory, part, parameter
    cuda.free(block)


def bound_resnet(side: CudaTorch, folder: Path) -> BoundProgram:
    """Return ResNet-18 as a worker binds it: built, packed, with its region on the device."""
    from pipeswitch.memory_daemon.store import load_model
    from pipeswitch.programs.compiler.program import build
    from pipeswitch.programs.spec import BUNDLE_FILE, BuildSpec
    from pipeswitch.workers.inference.task import make_program, read_program

    inputs = {"x": ((2, 3, 64, 64), "float32")}
    resnet_spec = BuildSpec(
        name="r", source="torchvision:resnet18", weights="random:0", inputs=inputs
    )
    manifest = build(resnet_spec, folder, lambda *_: None)
    image = bytearray(manifest.total_bytes)
    load_model(folder, memoryview(image))
    region = torch.frombuffer(image, dtype=torch.uint8).to(side.device).untyped_storage()
    bundle = read_program(manifest, folder / BUNDLE_FILE)
    assert bundle is not None
    program = make_program(manifest, bundle.graph, side.device)
    return program.bind(lambda tensor: side.tensor(region, tensor, 0))


def test_groups_replayed_as_graphs_equal_the_eager_program(side: CudaTorch, tmp_path: Path) -> None:
    check_replays(side, tmp_path)


def check_replays(side: CudaTorch, folder: Path) -> None:
    program = DeviceProgram(
        bound_resnet(side, folder), side.device, side.recorder(), GraphBudget(1 << 30)
    )
    x = torch.randn(2, 3, 64, 64)
    with side.computing(in_slice=False):
        eager = program.run([x], lambda _: None)[0].cpu()
        program.improve()
    assert len(program._captured) == 1
    for _ in range(3):
        with side.computing(in_slice=False):
            assert torch.equal(program.run([x], lambda _: None)[0].cpu(), eager)
    other = torch.randn(2, 3, 64, 64)
    with side.computing(in_slice=False):
        assert not torch.equal(program.run([other], lambda _: None)[0].cpu(), eager)


def test_a_step_is_one_graph_that_writes_its_inputs(side: CudaTorch, tmp_path: Path) -> None:
    bound = bound_resnet(side, tmp_path)
    program = DeviceProgram(bound, side.device, side.recorder(), GraphBudget(1 << 30))
    x = torch.randn(2, 3, 64, 64, device=side.device)
    rows, used = (torch.zeros(2, *more, device=side.device) for more in ((6, 1000), ()))
    used, each = used.long(), torch.arange(2, device=side.device)

    def then(outputs: list[torch.Tensor]) -> list[torch.Tensor]:
        rows[each, used] = outputs[0]
        used.add_(1)
        highest, places = outputs[0].max(-1)
        return [torch.stack([highest.double(), places.double()])]

    for number in range(4):
        with side.computing(in_slice=False):
            [best] = program.run([x], lambda _: None, then)
            assert best[1].tolist() == rows[:, number].argmax(-1).tolist()
            assert torch.equal(rows[:, number], rows[:, 0])
            program.improve()
    assert (len(program._captured), used.tolist()) == (1, [4, 4])
    assert not rows[:, 4:].any(), "a capture computes nothing"


def test_the_slice_serves_in_a_process_of_its_own_also_after_a_failed_capture() -> None:
    """Run in a subprocess, because a slice's cap and pool last until the process exits."""
    code = f"""
import torch
from pipeswitch.devices.cuda.bindings import Cuda
from pipeswitch.devices.cuda.torch import CudaTorch
cuda = Cuda.load()
cuda.set_device(0)
side = CudaTorch(0)
side.warm_up()
side.take_slice(cuda.malloc({512 * MIB}), {512 * MIB})
side.cap_private({256 * MIB})
print(side.check_slice())
side.check_failed_capture(side.recorder())
print(side.check_slice())
with side.computing(in_slice=True):
    try:
        torch.empty({1024 * MIB}, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError:
        print("refused")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == "refused"
