"""The typed wrapper of cuda.bindings, with fake bindings: every error becomes a typed error."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from types import SimpleNamespace

import pytest
from fake_cuda import World

from pipeswitch.base.errors import ConfigError
from pipeswitch.devices.cuda import bindings
from pipeswitch.devices.cuda.examine import has_driver_library


def cuda_of(world: World) -> bindings.Cuda:
    return bindings.Cuda(world.runtime, world.driver)


def test_without_the_driver_library_the_error_names_the_driver() -> None:
    with pytest.raises(bindings.NoCudaDevice, match=r"no NVIDIA driver") as caught:
        cuda_of(World(has_driver=False)).device_count()
    assert caught.value.data["kind"] == "no driver"
    assert "--device cpu" in caught.value.hint
    assert isinstance(caught.value, ConfigError), "the command line exits with status 2"


def test_a_driver_without_a_device_is_told_apart() -> None:
    with pytest.raises(bindings.NoCudaDevice, match="shows this process no GPU") as caught:
        cuda_of(World(devices=0)).device_count()
    assert caught.value.data["kind"] == "no device"
    assert "CUDA_VISIBLE_DEVICES" in caught.value.hint


def test_a_driver_too_old_for_this_torch_names_its_own_version() -> None:
    world = World()
    world.fail("cudaGetDeviceCount", "cudaErrorInsufficientDriver")
    with pytest.raises(bindings.NoCudaDevice, match=r"CUDA 13\.0") as caught:
        cuda_of(world).device_count()
    assert "update the driver" in caught.value.hint


def test_missing_bindings_are_no_gpu_either() -> None:
    with pytest.raises(bindings.NoCudaDevice, match="not installed"):
        bindings.Cuda.load("no_such_package_of_bindings")


def test_a_driver_call_without_the_library_is_a_typed_error() -> None:
    with pytest.raises(bindings.CudaError) as caught:
        cuda_of(World(has_driver=False)).write_value(1, 2, 3)
    assert caught.value.data["code"] == "cudaErrorInsufficientDriver"


def test_the_real_bindings_import_and_answer_without_a_driver() -> None:
    """Run in a new process, in which no other code has loaded the bindings."""
    code = """
from pipeswitch.devices.cuda.bindings import Cuda, CudaError, NoCudaDevice
cuda = Cuda.load()
try:
    cuda.device_count()
except NoCudaDevice as error:
    print(error.data["kind"])
    try:
        cuda.wait_value(0, 0, 1)
    except CudaError as error:
        print(error.data["code"])
else:
    print("gpu")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() in (
        ["no", "driver", "cudaErrorInsufficientDriver"],
        ["no", "device", "cudaErrorInsufficientDriver"],
        ["gpu"],
    )


def test_every_error_code_that_is_named_exists() -> None:
    runtime, driver = (import_module(f"cuda.bindings.{name}") for name in ("runtime", "driver"))
    for code in bindings.HARMLESS_ERRORS | bindings.NO_GPU_ERRORS | {bindings.NOT_READY}:
        kind = runtime.cudaError_t if code.startswith("cuda") else driver.CUresult
        assert hasattr(kind, code), code


@pytest.mark.skipif(has_driver_library(), reason="the addresses are unused")
@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        ("malloc", (4096,)),
        ("free", (4096,)),
        ("fill", (4096, 0, 8, 1)),
        ("copy_to_device", (1, 2, 3, 4)),
        ("copy_to_host", (1, 2, 3, 4)),
        ("allocate_pinned", (4096,)),
        ("free_pinned", (4096,)),
        ("register", (4096, 4096)),
        ("unregister", (4096,)),
        ("export_handle", (4096,)),
        ("open_handle", (bytes(64),)),
        ("close_handle", (4096,)),
        ("stream", ()),
        ("synchronize", (1,)),
        ("destroy_stream", (1,)),
        ("event", ()),
        ("record", (1, 2)),
        ("wait", (1,)),
        ("is_done", (1,)),
        ("destroy_event", (1,)),
        ("wait_value", (1, 2, 3)),
        ("write_value", (1, 2, 3)),
        ("name_and_uuid", (0,)),
        ("set_device", (0,)),
        ("memory_info", ()),
        ("synchronize_device", ()),
    ],
)
def test_the_real_bindings_take_our_arguments(call: str, arguments: tuple[object, ...]) -> None:
    """Call each function without a driver: it must return an error code, not refuse a type."""
    with pytest.raises(bindings.CudaError):
        getattr(bindings.Cuda.load(), call)(*arguments)


@pytest.mark.parametrize(
    ("code", "is_sticky"),
    [
        ("cudaErrorIllegalAddress", True),
        ("cudaErrorUnknown", True),
        ("cudaErrorMemoryAllocation", False),
        ("cudaErrorNotPermitted", False),
    ],
)
def test_errors_that_break_the_context_are_recognised(code: str, is_sticky: bool) -> None:
    world = World()
    world.fail("cudaMalloc", code)
    with pytest.raises(bindings.CudaError) as caught:
        cuda_of(world).malloc(100)
    assert (caught.value.data["call"], caught.value.data["code"]) == ("cudaMalloc", code)
    assert caught.value.is_sticky is is_sticky


@pytest.mark.parametrize("code", sorted(bindings.NO_GPU_ERRORS))
def test_a_card_that_fell_off_the_bus_is_lost(code: str) -> None:
    assert bindings.CudaError("cudaMemcpyAsync", code, "").is_sticky


def test_a_code_that_these_bindings_cannot_name_is_a_cuda_error_too() -> None:
    """With a driver that is newer than the bindings, the enum of errors raises for a new code."""

    def unknown(*_: object) -> None:
        raise ValueError("999999 is not a valid cudaError_t")

    with pytest.raises(bindings.CudaError):
        bindings.Cuda(SimpleNamespace(cudaMalloc=unknown), None).malloc(1)


def test_a_broken_context_fails_every_later_call() -> None:
    world = World()
    cuda = cuda_of(world)
    stream = cuda.stream()
    world.fail("cudaStreamSynchronize", "cudaErrorIllegalAddress")
    for _ in range(2):
        with pytest.raises(bindings.CudaError):
            cuda.synchronize(stream)


def test_not_ready_is_an_answer_and_not_an_error() -> None:
    cuda = cuda_of(World())
    stream, event = cuda.stream(), cuda.event()
    block = cuda.malloc(64)
    assert cuda.is_done(event), "never recorded"
    cuda.fill(block, 1, 64, stream)
    cuda.record(event, stream)
    assert not cuda.is_done(event)
    cuda.wait(event)
    assert cuda.is_done(event)


def test_facts_of_a_device_need_no_context() -> None:
    name, uuid = cuda_of(World()).name_and_uuid(0)
    assert (name, uuid) == ("Fake GPU", "GPU-00010203-0405-0607-0809-0a0b0c0d0e00")


def test_an_ipc_handle_is_64_bytes_and_opens_the_same_memory() -> None:
    owner, other = cuda_of(World()), cuda_of(World())
    block = owner.malloc(4096)
    handle = owner.export_handle(block)
    assert len(handle) == bindings.HANDLE_BYTES
    here = other.open_handle(handle)
    stream = other.stream()
    other.fill(here, 7, 4096, stream)
    other.synchronize(stream)
    assert World().bytes_at(block, 4096) == bytes([7]) * 4096
    other.close_handle(here)
    with pytest.raises(bindings.CudaError):
        other.open_handle(handle[:-1])
    with pytest.raises(bindings.CudaError):
        other.open_handle(bytes(64))
    owner.free(block)
