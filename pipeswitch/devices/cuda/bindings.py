"""Typed CUDA calls: the only module that uses the conventions of ``cuda.bindings``.

Every call returns plain integers and bytes, or raises. ``CudaError`` names the call and the code.
``NoCudaDevice`` means that there is no usable GPU. Without a driver library, calls of ``driver``
raise; with a driver that sees no device, calls of ``runtime`` return an error. The bindings are
passed in, so tests can use a fake of them. Importing this module or ``cuda.bindings`` needs no
driver.

cuda-bindings 13.0 and 13.5 differ in two places: ``cudaIpcMemHandle_t`` lost ``reserved`` (so its
64 bytes are read through ``getPtr``), and a missing driver raises another exception type.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
from collections.abc import Callable
from typing import Any, Final

from ...base.errors import ConfigError, PipeSwitchError

REAL_PACKAGE: Final = "cuda.bindings"
PACKAGE: Final = os.environ.get("PIPESWITCH_CUDA_BINDINGS", REAL_PACKAGE)  # tests name a fake
INDEX: Final = 0  # index of the device in daemon and workers, which see no other device
HANDLE_BYTES: Final = 64  # size of an IPC handle

STREAM_NON_BLOCKING: Final = 0x1  # does not wait for the legacy default stream
EVENT_BLOCKING_SYNC: Final = 0x1  # a waiting thread sleeps instead of spinning
EVENT_DISABLE_TIMING: Final = 0x2
IPC_LAZY_PEER_ACCESS: Final = 0x1
WAIT_VALUE_EQ: Final = 0x1  # CU_STREAM_WAIT_VALUE_EQ: until the word equals the operation id

NOT_READY: Final = "cudaErrorNotReady"
DEVICE_ASSERT: Final = "cudaErrorAssert"
NO_GPU_ERRORS: Final = frozenset(
    {
        "cudaErrorInsufficientDriver",  # also: no driver library at all
        "cudaErrorNoDevice",
        "cudaErrorInitializationError",
        "cudaErrorSystemDriverMismatch",
        "cudaErrorSystemNotReady",
        "cudaErrorStubLibrary",
        "cudaErrorDevicesUnavailable",
    }
)
HARMLESS_ERRORS: Final = frozenset(
    {
        "cudaErrorInvalidValue",
        "cudaErrorMemoryAllocation",
        "cudaErrorInvalidDevice",
        "cudaErrorNotSupported",
        "cudaErrorNotPermitted",
        "cudaErrorHostMemoryAlreadyRegistered",
        "cudaErrorHostMemoryNotRegistered",
        "cudaErrorAlreadyMapped",
        "cudaErrorInvalidResourceHandle",
        "cudaErrorOperatingSystem",
        "cudaErrorMapBufferObjectFailed",
        "cudaErrorDeviceUninitialized",
        "CUDA_ERROR_INVALID_VALUE",
        "CUDA_ERROR_NOT_SUPPORTED",
        "CUDA_ERROR_NOT_PERMITTED",
        "CUDA_ERROR_OUT_OF_MEMORY",
        "CUDA_ERROR_INVALID_HANDLE",
        "CUDA_ERROR_INVALID_CONTEXT",
    }
)
"""Errors after which the context still works. All other errors count as *sticky*: each later call
fails too, and only a new process gets a working context."""


class NoCudaDevice(ConfigError):
    """Missing GPU; ``kind`` is ``no driver``, ``no device`` or ``no bindings``."""


def no_driver(**data: Any) -> NoCudaDevice:
    """Return the error for a machine without a driver."""
    return NoCudaDevice(
        "no NVIDIA driver on this machine (its library libcuda.so.1 is not found)",
        hint="install the driver, in a container give it the GPU (--gpus all); "
        "or serve --device cpu",
        kind="no driver",
        **data,
    )


class CudaError(PipeSwitchError):
    """Error of a CUDA call; ``data`` has the ``call`` and its error ``code``."""

    def __init__(self, call: str, code: str, text: str, **data: Any) -> None:
        super().__init__(f"{call}: {code} ({text})", call=call, code=code, **data)

    @property
    def is_sticky(self) -> bool:
        """True if CUDA is unusable in this process, which must exit and be replaced."""
        return str(self.data["code"]) not in HARMLESS_ERRORS


class CheckedBindings:
    """The two interfaces of the bindings, with a check of each call's error code.

    Args:
        runtime: ``cuda.bindings.runtime`` or a fake of it.
        driver: ``cuda.bindings.driver`` or a fake of it.
    """

    def __init__(self, runtime: Any, driver: Any) -> None:
        self._runtime = runtime
        self._driver = driver

    def _do(self, name: str, *arguments: Any) -> None:
        self._checked(name, getattr(self._runtime, name), arguments)

    def _ask(self, name: str, *arguments: Any) -> Any:
        values = self._checked(name, getattr(self._runtime, name), arguments)
        return values[0] if len(values) == 1 else values

    def _drive(self, name: str, *arguments: Any) -> None:
        self._checked(name, getattr(self._driver, name), arguments)

    def _checked(
        self, name: str, call: Callable[..., Any], arguments: tuple[Any, ...], expected: str = ""
    ) -> Any:
        """Make a call, which returns ``(error, values…)``. Return the values, or None if the error
        has the ``expected`` code. Raise CudaError for any other, or without a driver library.
        """
        try:
            error, *values = call(*arguments)
        except RuntimeError as problem:  # DynamicLibNotFoundError is one
            raise CudaError(name, "cudaErrorInsufficientDriver", str(problem)) from None
        except ValueError as problem:  # the bindings do not know this code of a newer driver
            raise CudaError(name, "unnamed", str(problem)) from None
        if int(error) == 0:
            return values
        if expected and getattr(error, "name", "") == expected:
            return None
        raise CudaError(name, str(getattr(error, "name", error)), self._text_of(name, error))

    def _text_of(self, name: str, error: Any) -> str:
        """Return the runtime's own text; for the driver interface, only the code."""
        explain = getattr(self._runtime, "cudaGetErrorString", None)
        if explain is None or not name.startswith("cuda"):
            return f"code {int(error)}"
        return bytes(explain(error)[1]).decode(errors="replace")


class Queues(CheckedBindings):
    """Streams and events, as plain integers."""

    def stream(self) -> int:
        return int(self._ask("cudaStreamCreateWithFlags", STREAM_NON_BLOCKING))

    def synchronize(self, stream: int) -> None:
        self._do("cudaStreamSynchronize", stream)

    def destroy_stream(self, stream: int) -> None:
        self._do("cudaStreamDestroy", stream)

    def event(self, *, is_timed: bool = False) -> int:
        """Create an event on which a thread waits without spinning."""
        timing = 0 if is_timed else EVENT_DISABLE_TIMING
        return int(self._ask("cudaEventCreateWithFlags", EVENT_BLOCKING_SYNC | timing))

    def elapsed_ms(self, begin: int, end: int) -> float:
        """Return the time between two timed events that have run."""
        return float(self._ask("cudaEventElapsedTime", begin, end))

    def record(self, event: int, stream: int) -> None:
        self._do("cudaEventRecord", event, stream)

    def wait(self, event: int) -> None:
        """Block this thread until the event's last record has run."""
        self._do("cudaEventSynchronize", event)

    def is_done(self, event: int) -> bool:
        """Return True if the event's last record has run."""
        query = self._runtime.cudaEventQuery
        return self._checked("cudaEventQuery", query, (event,), expected=NOT_READY) is not None

    def destroy_event(self, event: int) -> None:
        self._do("cudaEventDestroy", event)

    def wait_event(self, stream: int, event: int) -> None:
        """Make the stream wait until the event's last record has run."""
        self._do("cudaStreamWaitEvent", stream, event, 0)

    def wait_value(self, stream: int, pointer: int, value: int) -> None:
        """Make the stream wait until the word at ``pointer`` is exactly ``value``."""
        self._drive("cuStreamWaitValue32", stream, pointer, value, WAIT_VALUE_EQ)

    def write_value(self, stream: int, pointer: int, value: int) -> None:
        """Make the stream write a word, after its earlier work."""
        self._drive("cuStreamWriteValue32", stream, pointer, value, 0)


class Cuda(Queues):
    """All CUDA calls that PipeSwitch makes. Pointers are plain integers."""

    @classmethod
    def load(cls, package: str = PACKAGE) -> Cuda:
        """Import the bindings and return the calls.

        Raises:
            NoCudaDevice: the bindings are not installed.
        """
        try:
            runtime = importlib.import_module(f"{package}.runtime")
            driver = importlib.import_module(f"{package}.driver")
        except ImportError as error:
            raise NoCudaDevice(
                f"the CUDA bindings are not installed ({error})",
                hint="pip install torch from the default index brings them; or --device cpu",
                kind="no bindings",
            ) from None
        return cls(runtime, driver)

    # -- devices -------------------------------------------------------------------------------

    def device_count(self) -> int:
        """Return the number of devices that CUDA sees, at least 1.

        Raises:
            NoCudaDevice: there is no driver or no device; the text explains which.
        """
        try:
            count = int(self._ask("cudaGetDeviceCount"))
        except CudaError as error:
            if error.data["code"] not in NO_GPU_ERRORS:
                raise
            raise self._no_device(str(error.data["code"])) from None
        if count == 0:
            raise self._no_device("cudaErrorNoDevice")
        return count

    def _no_device(self, code: str) -> NoCudaDevice:
        """Return the error for a missing driver, a driver without a device, or an old driver."""
        version = 0
        with contextlib.suppress(CudaError):
            version = int(self._ask("cudaDriverGetVersion"))
        if code == "cudaErrorNoDevice":
            return NoCudaDevice(
                "the NVIDIA driver is loaded, but shows this process no GPU",
                hint="look at nvidia-smi and CUDA_VISIBLE_DEVICES; in a container give it the GPU "
                "(--gpus all); or serve --device cpu",
                kind="no device",
                code=code,
            )
        if version == 0:
            return no_driver(code=code)
        return NoCudaDevice(
            f"the NVIDIA driver (for CUDA {version // 1000}.{version % 1000 // 10}) cannot be used "
            f"with this torch: {code}",
            hint="update the driver, or install a torch built for this CUDA; or serve --device cpu",
            kind="no driver",
            code=code,
        )

    def name_and_uuid(self, index: int) -> tuple[str, str]:
        """Return the name and UUID of the device at ``index``, without creating a context."""
        properties = self._ask("cudaGetDeviceProperties", index)
        name = properties.name
        raw = bytes(properties.uuid.bytes)[:16].hex()
        parts = (raw[:8], raw[8:12], raw[12:16], raw[16:20], raw[20:])
        shown = name.decode(errors="replace") if isinstance(name, bytes) else str(name)
        return shown, "GPU-" + "-".join(parts)

    def versions(self) -> tuple[int, int]:
        """Return the driver's and the runtime's version, as 1000 * major + 10 * minor."""
        return int(self._ask("cudaDriverGetVersion")), int(self._ask("cudaRuntimeGetVersion"))

    def set_device(self, index: int) -> None:
        """Make the device current in this *thread*; create its context if there is none."""
        self._do("cudaSetDevice", index)

    def memory_info(self) -> tuple[int, int]:
        """Return the free and the total bytes of the current device."""
        free, total = self._ask("cudaMemGetInfo")
        return int(free), int(total)

    def synchronize_device(self) -> None:
        """Block until all work of this process's context has run. It is too slow for requests."""
        self._do("cudaDeviceSynchronize")

    def still_works(self) -> bool:
        """Return True if the context survived an unknown error. Blocks until the device is idle.

        If a driver refuses to pin memory, its error code depends on kernel, container and virtual
        machine. So an unknown code alone does not mean that the context is broken.
        """
        try:
            self.synchronize_device()
        except CudaError:
            return False
        return True

    # -- memory --------------------------------------------------------------------------------

    def malloc(self, size_bytes: int) -> int:
        return int(self._ask("cudaMalloc", size_bytes))

    def free(self, pointer: int) -> None:
        """Free memory; blocks until the device is idle."""
        self._do("cudaFree", pointer)

    def fill(self, pointer: int, value: int, size_bytes: int, stream: int) -> None:
        """Enqueue a fill of device memory on the stream."""
        if size_bytes:
            self._do("cudaMemsetAsync", pointer, value, size_bytes, stream)

    def copy_to_device(self, target: int, source: int, size_bytes: int, stream: int) -> None:
        """Enqueue a copy to the device; the source must stay unchanged until the copy has run."""
        kind = self._runtime.cudaMemcpyKind.cudaMemcpyHostToDevice
        self._do("cudaMemcpyAsync", target, source, size_bytes, kind, stream)

    def copy_to_host(self, target: int, source: int, size_bytes: int, stream: int) -> None:
        """Enqueue a copy to the host on the stream."""
        kind = self._runtime.cudaMemcpyKind.cudaMemcpyDeviceToHost
        self._do("cudaMemcpyAsync", target, source, size_bytes, kind, stream)

    def allocate_pinned(self, size_bytes: int) -> int:
        """Return the address of new pinned host memory, allocated by the driver."""
        return int(self._ask("cudaHostAlloc", size_bytes, 0))

    def free_pinned(self, pointer: int) -> None:
        self._do("cudaFreeHost", pointer)

    def register(self, pointer: int, size_bytes: int) -> None:
        """Pin host memory that this process has mapped."""
        self._do("cudaHostRegister", pointer, size_bytes, 0)

    def device_pointer(self, pointer: int) -> int:
        """Return the GPU's address of registered host memory."""
        return int(self._ask("cudaHostGetDevicePointer", pointer, 0))

    def unregister(self, pointer: int) -> None:
        """Unpin memory; call this before the memory is unmapped, never after."""
        self._do("cudaHostUnregister", pointer)

    # -- other processes -----------------------------------------------------------------------

    def export_handle(self, pointer: int) -> bytes:
        """Return 64 bytes with which another process on this machine can map this ``malloc``."""
        handle = self._ask("cudaIpcGetMemHandle", pointer)
        return ctypes.string_at(int(handle.getPtr()), HANDLE_BYTES)

    def open_handle(self, data: bytes) -> int:
        """Map another process's allocation; return its address in this process.

        Raises:
            CudaError: for example, this process or one of another IPC namespace made the handle.
        """
        if len(data) != HANDLE_BYTES:
            raise CudaError(
                "cudaIpcOpenMemHandle", "cudaErrorInvalidValue", f"a handle of {len(data)} bytes"
            )
        handle = self._runtime.cudaIpcMemHandle_t()
        ctypes.memmove(int(handle.getPtr()), data, HANDLE_BYTES)
        return int(self._ask("cudaIpcOpenMemHandle", handle, IPC_LAZY_PEER_ACCESS))

    def close_handle(self, pointer: int) -> None:
        self._do("cudaIpcCloseMemHandle", pointer)
