"""Fake of ``cuda.bindings``: a device whose memory is host memory with real bytes.

Device memory is a memfd. Another process that opens the fake's IPC handle maps the same bytes. A
stream is a queue. Its operations do not run at once, but in order when a caller synchronises,
queries or steps. So a source that is overwritten too early, a word that is written before its data,
or a forgotten wait leads to wrong bytes.

``World`` is one machine. The modules ``runtime`` and ``driver`` use ``WORLD``, the machine of this
process. Tests inject errors per call: ``world.fail("cudaHostRegister", "cudaErrorNotPermitted")``.

The fake is as strict as the driver where mistakes are hard to find. It rejects a driver call in a
thread without a context; an IPC handle that the process itself has created; a destroyed handle;
unpinning or freeing memory that a queued copy uses; a copy across the end of a registration; and
calls that are not allowed while the thread captures. After a kernel's assertion every call fails.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import itertools
import math
import mmap
import os
import signal
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import UUID

MAGIC = b"FAKECUDA"
WAIT_DEADLINE_S = 30.0
EVENT_DISABLE_TIMING = 2
_world_numbers = itertools.count()
POLL_S = 0.0005  # how often the fake GPU polls a word


class cudaError_t(enum.IntEnum):
    """Error codes that the fake returns, with the numbers of the real codes."""

    cudaSuccess = 0
    cudaErrorInvalidValue = 1
    cudaErrorMemoryAllocation = 2
    cudaErrorInitializationError = 3
    cudaErrorInsufficientDriver = 35
    cudaErrorNoDevice = 100
    cudaErrorInvalidDevice = 101
    cudaErrorDeviceUninitialized = 201
    cudaErrorOperatingSystem = 304
    cudaErrorInvalidResourceHandle = 400
    cudaErrorNotReady = 600
    cudaErrorIllegalAddress = 700
    cudaErrorAssert = 710
    cudaErrorHostMemoryAlreadyRegistered = 712
    cudaErrorHostMemoryNotRegistered = 713
    cudaErrorNotPermitted = 800
    cudaErrorNotSupported = 801
    cudaErrorStreamCaptureUnsupported = 900
    cudaErrorUnknown = 999


class CUresult(enum.IntEnum):
    """Error codes of the driver interface that the fake returns."""

    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_INVALID_CONTEXT = 201
    CUDA_ERROR_INVALID_HANDLE = 400
    CUDA_ERROR_ILLEGAL_ADDRESS = 700
    CUDA_ERROR_ASSERT = 710
    CUDA_ERROR_NOT_SUPPORTED = 801


STICKY = {
    "cudaErrorIllegalAddress": CUresult.CUDA_ERROR_ILLEGAL_ADDRESS,
    "cudaErrorAssert": CUresult.CUDA_ERROR_ASSERT,
    "cudaErrorUnknown": CUresult.CUDA_ERROR_ILLEGAL_ADDRESS,
}
"""Sticky errors: after such an error, every call of both interfaces fails."""

WITHOUT_CONTEXT = frozenset(
    {
        "cudaGetDeviceCount",
        "cudaDriverGetVersion",
        "cudaRuntimeGetVersion",
        "cudaGetDeviceProperties",
        "cudaGetErrorString",
    }
)
"""Runtime calls that need no context. Every other call creates the context for its thread."""

NOT_IN_A_CAPTURE = frozenset(
    {
        "cudaMalloc",
        "cudaFree",
        "cudaHostAlloc",
        "cudaFreeHost",
        "cudaHostRegister",
        "cudaHostUnregister",
        "cudaStreamSynchronize",
        "cudaDeviceSynchronize",
        "cudaEventQuery",
        "cudaEventSynchronize",
        "cudaIpcOpenMemHandle",
        "cudaIpcCloseMemHandle",
    }
)
"""Calls that a thread must not make while it captures a CUDA graph (mode ``thread_local``)."""


class MemcpyKind(enum.IntEnum):
    cudaMemcpyHostToDevice = 1
    cudaMemcpyDeviceToHost = 2


class Handle:
    """IPC handle: ``getPtr`` returns the address of its 64 bytes."""

    def __init__(self, data: bytes = b"") -> None:
        self._raw = ctypes.create_string_buffer(data.ljust(64, b"\0"), 64)

    def getPtr(self) -> int:
        return ctypes.addressof(self._raw)

    @property
    def data(self) -> bytes:
        return self._raw.raw


class Block:
    """One allocation: a memfd and its mapping."""

    def __init__(self, size_bytes: int, descriptor: int = -1) -> None:
        self.is_own = descriptor < 0
        if self.is_own:
            descriptor = os.memfd_create("fake-device")
            os.ftruncate(descriptor, max(size_bytes, 1))
        self.descriptor = descriptor
        self.size_bytes = size_bytes
        self.map = mmap.mmap(descriptor, max(size_bytes, 1))
        self._hold = (ctypes.c_uint8 * max(size_bytes, 1)).from_buffer(self.map)
        self.address = ctypes.addressof(self._hold)
        self.open_count = 1  # how often an imported block is open

    def close(self) -> None:
        del self._hold
        with contextlib.suppress(BufferError):  # a test's tensor may still use it
            self.map.close()
        os.close(self.descriptor)


class Stream:
    """A queue of operations; ``done`` counts those that have run."""

    def __init__(self) -> None:
        self.queue: deque[Callable[[], bool]] = deque()
        self.enqueued = 0
        self.done = 0
        self.lock = threading.RLock()

    def put(self, run: Callable[[], bool]) -> None:
        with self.lock:
            self.queue.append(run)
            self.enqueued += 1

    def touches(self, address: int, size_bytes: int) -> bool:
        """Return True if a queued operation reads or writes in this range (by its ``touched``)."""
        with self.lock:
            ranges = [part for run in self.queue for part in getattr(run, "touched", ())]
        return any(
            start < address + size_bytes and address < start + size for start, size in ranges
        )

    def step(self) -> bool:
        """Run the next operation; return False if there is none or it still waits for a word."""
        with self.lock:
            if not self.queue or not self.queue[0]():
                return False
            self.queue.popleft()
            self.done += 1
            return True


class World:
    """Machine with or without a fake GPU.

    Args:
        bytes_per_s: speed of a copy; with 0, a copy takes no time.
        has_driver: if False, the runtime returns cudaErrorInsufficientDriver and the driver raises.
        devices: number of devices that this process sees.
        first: index of the first of them among the machine's devices.
    """

    def __init__(
        self,
        *,
        device_bytes: int = 1 << 34,
        bytes_per_s: float = 0.0,
        has_driver: bool = True,
        devices: int = 1,
        first: int = 0,
        blocking_waits: bool = False,
    ) -> None:
        self.device_bytes = device_bytes
        self.bytes_per_s = bytes_per_s
        self.has_driver = has_driver
        self.devices = devices
        self.first = first
        self.blocking_waits = blocking_waits  # a wait on torch's stream blocks the host
        self.torch_streams: set[int] = set()
        self.ledger: Path | None = None  # folder with the bytes that each process has allocated
        self.broken: dict[str, str] = {}  # call or torch operation -> its permanent error code
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.blocks: dict[int, Block] = {}
        self.opened: dict[int, Block] = {}  # blocks of other worlds, by address in this process
        self.opened_handles: dict[bytes, Block] = {}
        self.host_blocks: dict[int, Block] = {}
        self.registered: dict[int, int] = {}
        self.staged: list[Any] = []  # the driver's own copies of pageable sources
        self.streams: dict[int, Stream] = {}
        self.default_stream = Stream()
        self.events: dict[int, tuple[Stream, int] | None] = {}
        self.now_ms = 0.0  # the device's clock, which a test moves
        self.stamps: dict[int, float] = {}  # timed event -> time at which the stream reached it
        self.capturing: set[int] = set()  # ids of threads that capture a graph
        self._current = threading.local()  # has_context, per thread
        self._number = next(_world_numbers)
        self._failures: dict[str, list[tuple[int, str]]] = {}
        self._broken: str | None = None
        self._next = 1000
        self._lock = threading.RLock()
        self.runtime = Runtime(self)
        self.driver = Driver(self)

    def fail(self, call: str, code: str, *, after: int = 0) -> None:
        """Make the call with this name fail once, after ``after`` successful calls."""
        self._failures.setdefault(call, []).append((after, code))

    def failure(self, call: str) -> str | None:
        """Return the error code that this call must return, or None; keep a sticky error code."""
        self.calls.append((call, ()))
        if call in self.broken:
            return self.must_hang_or(self.broken[call])
        if self._broken is not None:
            return self._broken
        waiting = self._failures.get(call, [])
        for index, (after, code) in enumerate(waiting):
            if after == 0:
                del waiting[index]
                if code in STICKY:
                    self._broken = code
                return code
            waiting[index] = (after - 1, code)
            break
        return None

    @staticmethod
    def must_hang_or(code: str) -> str:
        """Return the code. With ``hang``, never return; with ``crash``, die from SIGSEGV."""
        if code == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        while code == "hang":
            threading.Event().wait()
        return code

    def reach(self, name: str) -> None:
        """Raise RuntimeError if torch's operation ``name`` is broken."""
        if name in self.broken:
            raise RuntimeError(f"CUDA error: {self.must_hang_or(self.broken[name])}")

    def break_down(self, code: str) -> None:
        """Fail every later call with the code of a failed kernel: the context is lost."""
        self._broken = code

    def enter(self) -> None:
        """Give this thread a context."""
        self._current.has_context = True

    @property
    def has_context(self) -> bool:
        return getattr(self._current, "has_context", False)

    def stream_of(self, handle: int) -> Stream | None:
        """Return the stream of a handle (0: the default stream); None for an unknown handle."""
        return self.default_stream if handle == 0 else self.streams.get(handle)

    def must_be_idle(self, address: int, size_bytes: int, call: str) -> None:
        """Raise AssertionError if a queued copy uses the range; a real driver would crash later."""
        for stream in [self.default_stream, *self.streams.values()]:
            if stream.touches(address, size_bytes):
                raise AssertionError(f"{call}: a queued copy still uses that memory")

    def new(self) -> int:
        with self._lock:
            self._next += 1
            return self._next

    @property
    def used_bytes(self) -> int:
        return sum(block.size_bytes for block in self.blocks.values())

    @property
    def free_bytes(self) -> int:
        """Free bytes of the device; allocations of other processes count until these have ended."""
        used = self.used_bytes
        for entry in self.ledger.iterdir() if self.ledger else ():
            if entry.name != str(os.getpid()) and Path("/proc", entry.name).exists():
                used += int(entry.read_text() or 0)
        return self.device_bytes - used

    def note_use(self) -> None:
        """Write the bytes that this process uses to the ledger, where other processes read them."""
        if self.ledger:
            (self.ledger / str(os.getpid())).write_text(str(self.used_bytes))

    def bytes_at(self, address: int, size_bytes: int) -> bytes:
        """Return the device's present bytes; queued operations have no effect yet."""
        return ctypes.string_at(address, size_bytes)

    def drain(self, stream: Stream, until: int | None = None) -> None:
        """Block until a stream has run its operation number ``until``, or all its operations."""
        ends_at = time.monotonic() + WAIT_DEADLINE_S
        target = stream.enqueued if until is None else until
        while stream.done < target:
            if stream.step():
                continue
            if time.monotonic() > ends_at:
                raise AssertionError("a stream waits for a word that no stream writes")
            threading.Event().wait(POLL_S)

    def is_device(self, address: int, size_bytes: int) -> bool:
        """Return True if the range is inside one allocation of the device."""
        known = [*self.blocks.values(), *self.opened.values()]
        return any(
            b.address <= address and address + size_bytes <= b.address + b.size_bytes for b in known
        )

    def advance(self, _: float = 0.0) -> None:
        """Run what does not wait, as a GPU does while the host does something else."""
        while sum(stream.step() for stream in [self.default_stream, *self.streams.values()]):
            pass

    def is_pinned(self, address: int, size_bytes: int) -> bool:
        """Return True if the range is inside *one* registration."""
        return any(
            start <= address and address + size_bytes <= start + size
            for start, size in list(self.registered.items())
        )


def _uuid(number: int) -> bytes:
    """Return the UUID of the machine's GPU with this number."""
    return bytes(range(15)) + bytes([number])


class _Properties:
    def __init__(self, number: int) -> None:
        self.name = b"Fake GPU"
        self.uuid = type("Uuid", (), {"bytes": _uuid(number)})()


class Runtime:
    """Fake of ``cuda.bindings.runtime``, in which every call returns ``(error, values…)``."""

    cudaMemcpyKind = MemcpyKind
    cudaIpcMemHandle_t = Handle

    def __init__(self, world: World) -> None:
        self._world = world

    def __getattribute__(self, name: str) -> Any:
        """Return the attribute; wrap a call, so that it first checks for injected failures."""
        value = object.__getattribute__(self, name)
        if not name.startswith("cuda") or name in ("cudaMemcpyKind", "cudaIpcMemHandle_t"):
            return value
        world = object.__getattribute__(self, "_world")

        def call(*arguments: Any) -> Any:
            code = world.failure(name)
            if code is None and not world.has_driver and "Version" not in name:
                code = "cudaErrorInsufficientDriver"
            is_capturing = threading.get_ident() in world.capturing
            if code is None and is_capturing and name in NOT_IN_A_CAPTURE:
                code = "cudaErrorStreamCaptureUnsupported"
            if code is not None:
                return cudaError_t[code], None
            if name not in WITHOUT_CONTEXT:
                world.enter()
            values = value(*arguments)
            if isinstance(values, cudaError_t):
                return (values, None)
            return (cudaError_t.cudaSuccess, *values)

        return call

    # -- devices

    def cudaGetDeviceCount(self) -> Any:
        if self._world.devices == 0:
            return cudaError_t.cudaErrorNoDevice
        return (self._world.devices,)

    def cudaDriverGetVersion(self) -> Any:
        return (13000 if self._world.has_driver else 0,)

    def cudaRuntimeGetVersion(self) -> Any:
        return (13000,)

    def cudaGetDeviceProperties(self, index: int) -> Any:
        if not 0 <= index < self._world.devices:
            return cudaError_t.cudaErrorInvalidDevice
        return (_Properties(self._world.first + index),)

    def cudaSetDevice(self, index: int) -> Any:
        return () if 0 <= index < self._world.devices else cudaError_t.cudaErrorInvalidDevice

    def cudaMemGetInfo(self) -> Any:
        return (self._world.free_bytes, self._world.device_bytes)

    def cudaDeviceSynchronize(self) -> Any:
        for stream in [self._world.default_stream, *self._world.streams.values()]:
            self._world.drain(stream)
        return ()

    # -- memory

    def cudaMalloc(self, size: int) -> Any:
        if size > self._world.free_bytes:
            return cudaError_t.cudaErrorMemoryAllocation
        block = Block(size)
        self._world.blocks[block.address] = block
        self._world.note_use()
        return (block.address,)

    def cudaFree(self, pointer: int) -> Any:
        if pointer == 0:
            return ()
        self.cudaDeviceSynchronize()
        block = self._world.blocks.pop(pointer, None)
        if block is None:
            return cudaError_t.cudaErrorInvalidValue
        block.close()
        self._world.note_use()
        return ()

    def cudaMemsetAsync(self, pointer: int, value: int, size: int, stream: int) -> Any:
        if not self._world.is_device(pointer, size):
            return cudaError_t.cudaErrorInvalidValue

        queue = self._world.stream_of(stream)
        if queue is None:
            return cudaError_t.cudaErrorInvalidResourceHandle

        def run() -> bool:
            ctypes.memset(pointer, value, size)
            return True

        run.touched = [(pointer, size)]  # type: ignore[attr-defined]
        queue.put(run)
        return ()

    def cudaMemcpyAsync(
        self, target: int, source: int, size: int, kind: MemcpyKind, stream: int
    ) -> Any:
        device = target if kind is MemcpyKind.cudaMemcpyHostToDevice else source
        host = source if device == target else target
        world = self._world
        if not world.is_device(device, size):
            return cudaError_t.cudaErrorInvalidValue
        touched = [s for s, n in list(world.registered.items()) if s < host + size and host < s + n]
        if touched and not world.is_pinned(host, size):
            return cudaError_t.cudaErrorInvalidValue  # the copy crosses the end of a registration
        queue = world.stream_of(stream)
        if queue is None:
            return cudaError_t.cudaErrorInvalidResourceHandle
        if not touched and threading.get_ident() in world.capturing:
            return cudaError_t.cudaErrorStreamCaptureUnsupported
        if device == target and not touched:  # a pageable source is staged before the call returns
            staged = ctypes.create_string_buffer(ctypes.string_at(source, size), size)
            world.staged.append(staged)
            source = ctypes.addressof(staged)

        def run() -> bool:
            if world.bytes_per_s:
                threading.Event().wait(size / world.bytes_per_s)
            ctypes.memmove(target, source, size)
            return True

        run.touched = [(target, size), (source, size)]  # type: ignore[attr-defined]
        queue.put(run)
        if device == source and not touched:  # a copy to pageable memory returns after it has run
            world.drain(queue)
        return ()

    def cudaHostAlloc(self, size: int, flags: int) -> Any:
        block = Block(size)
        self._world.host_blocks[block.address] = block
        self._world.registered[block.address] = size
        return (block.address,)

    def cudaFreeHost(self, pointer: int) -> Any:
        block = self._world.host_blocks.get(pointer)
        if block is None:
            return cudaError_t.cudaErrorInvalidValue
        self._world.must_be_idle(pointer, block.size_bytes, "cudaFreeHost")
        del self._world.registered[pointer]
        self._world.host_blocks.pop(pointer).close()
        return ()

    def cudaHostRegister(self, pointer: int, size: int, flags: int) -> Any:
        known = list(self._world.registered.items())
        if any(start < pointer + size and pointer < start + length for start, length in known):
            return cudaError_t.cudaErrorHostMemoryAlreadyRegistered
        self._world.registered[pointer] = size
        return ()

    def cudaHostGetDevicePointer(self, pointer: int, flags: int) -> Any:
        return (pointer,) if pointer in self._world.registered else cudaError_t(1)

    def cudaHostUnregister(self, pointer: int) -> Any:
        size = self._world.registered.get(pointer)
        if size is None or pointer in self._world.host_blocks:
            return cudaError_t.cudaErrorHostMemoryNotRegistered
        self._world.must_be_idle(pointer, size, "cudaHostUnregister")
        del self._world.registered[pointer]
        return ()

    # -- other processes

    def cudaIpcGetMemHandle(self, pointer: int) -> Any:
        block = self._world.blocks.get(pointer)
        if block is None:
            return cudaError_t.cudaErrorInvalidValue
        packed = struct.pack(
            "<qqqqq",
            os.getpid(),
            self._world._number,
            block.descriptor,
            block.size_bytes,
            self._world.first,
        )
        return (Handle(MAGIC + packed),)

    def cudaIpcOpenMemHandle(self, handle: Handle, flags: int) -> Any:
        if not handle.data.startswith(MAGIC):
            return cudaError_t.cudaErrorInvalidValue
        pid, number, descriptor, size, gpu = struct.unpack_from("<qqqqq", handle.data, len(MAGIC))
        world = self._world
        if gpu != world.first:  # memory of a GPU that this process cannot see
            return cudaError_t.cudaErrorInvalidValue
        if (pid, number) == (os.getpid(), world._number):
            return cudaError_t.cudaErrorDeviceUninitialized  # "invalid device context"
        known = world.opened_handles.get(handle.data)
        if known is not None:
            known.open_count += 1
            return (known.address,)
        try:
            opened = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return cudaError_t.cudaErrorOperatingSystem
        block = Block(size, opened)
        world.opened[block.address] = world.opened_handles[handle.data] = block
        return (block.address,)

    def cudaIpcCloseMemHandle(self, pointer: int) -> Any:
        world = self._world
        block = world.opened.get(pointer)
        if block is None:
            return cudaError_t.cudaErrorInvalidValue
        block.open_count -= 1
        if not block.open_count:
            world.must_be_idle(block.address, block.size_bytes, "cudaIpcCloseMemHandle")
            del world.opened[pointer]
            world.opened_handles = {h: b for h, b in world.opened_handles.items() if b is not block}
            block.close()
        return ()

    # -- streams and events

    def cudaStreamCreateWithFlags(self, flags: int) -> Any:
        handle = self._world.new()
        self._world.streams[handle] = Stream()
        return (handle,)

    def cudaStreamSynchronize(self, stream: int) -> Any:
        queue = self._world.stream_of(stream)
        if queue is None:
            return cudaError_t.cudaErrorInvalidResourceHandle
        self._world.drain(queue)
        return ()

    def cudaStreamWaitEvent(self, stream: int, event: int, flags: int) -> Any:
        target = self._world.stream_of(stream)
        if target is None or event not in self._world.events:
            return cudaError_t.cudaErrorInvalidResourceHandle
        record = self._world.events[event]

        def run() -> bool:
            if record is not None and record[0].done < record[1]:
                record[0].step()
                return False
            return True

        target.put(run)
        return ()

    def cudaStreamDestroy(self, stream: int) -> Any:
        if self._world.streams.pop(stream, None) is None:
            return cudaError_t.cudaErrorInvalidResourceHandle
        return ()

    def cudaEventCreateWithFlags(self, flags: int) -> Any:
        handle = self._world.new()
        self._world.events[handle] = None
        if not flags & EVENT_DISABLE_TIMING:
            self._world.stamps[handle] = math.nan
        return (handle,)

    def cudaEventRecord(self, event: int, stream: int) -> Any:
        target = self._world.stream_of(stream)
        if target is None or event not in self._world.events:
            return cudaError_t.cudaErrorInvalidResourceHandle
        if event in self._world.stamps:

            def run() -> bool:
                self._world.stamps[event] = self._world.now_ms
                return True

            target.put(run)
        self._world.events[event] = (target, target.enqueued)
        return ()

    def cudaEventElapsedTime(self, begin: int, end: int) -> Any:
        stamps = self._world.stamps
        if begin not in stamps or end not in stamps:
            return cudaError_t.cudaErrorInvalidResourceHandle
        records = [self._world.events[one] for one in (begin, end)]
        if any(one is None or one[0].done < one[1] for one in records):
            return cudaError_t.cudaErrorNotReady
        return (stamps[end] - stamps[begin],)

    def cudaEventSynchronize(self, event: int) -> Any:
        if event not in self._world.events:
            return cudaError_t.cudaErrorInvalidResourceHandle
        record = self._world.events[event]
        if record is not None:
            self._world.drain(*record)
        return ()

    def cudaEventQuery(self, event: int) -> Any:
        if event not in self._world.events:
            return cudaError_t.cudaErrorInvalidResourceHandle
        record = self._world.events[event]
        if record is not None and record[0].done < record[1]:
            return cudaError_t.cudaErrorNotReady
        return ()

    def cudaEventDestroy(self, event: int) -> Any:
        if event not in self._world.events:
            return cudaError_t.cudaErrorInvalidResourceHandle
        del self._world.events[event]
        return ()


class Driver:
    """Fake of ``cuda.bindings.driver``; if the machine has no driver, its calls raise."""

    def __init__(self, world: World) -> None:
        self._world = world

    def _refused(self, name: str) -> CUresult | None:
        code = self._world.failure(name)
        if not self._world.has_driver:
            raise RuntimeError("Failed to dlopen libcuda.so.1")
        if code in STICKY:
            return STICKY[code]
        if code is None and not self._world.has_context:
            return CUresult.CUDA_ERROR_INVALID_CONTEXT
        return None if code is None else CUresult[code]

    def cuStreamWaitValue32(self, stream: int, pointer: int, value: int, flags: int) -> Any:
        refused = self._refused("cuStreamWaitValue32")
        if refused is not None:
            return (refused,)
        is_device = self._world.is_device(pointer, 4)
        if not (is_device or self._world.is_pinned(pointer, 4)) or flags != 1:
            return (CUresult.CUDA_ERROR_INVALID_VALUE,)
        queue = self._world.stream_of(stream)
        if queue is None:
            return (CUresult.CUDA_ERROR_INVALID_HANDLE,)
        word = ctypes.c_uint32.from_address(pointer)
        is_ignored = "host-wait" in self._world.broken and not is_device

        def run() -> bool:
            return word.value == value or is_ignored

        queue.put(run)
        if self._world.blocking_waits and stream in self._world.torch_streams:
            self._world.drain(queue)
        return (CUresult.CUDA_SUCCESS,)

    def cuStreamWriteValue32(self, stream: int, pointer: int, value: int, flags: int) -> Any:
        refused = self._refused("cuStreamWriteValue32")
        if refused is not None:
            return (refused,)
        is_pinned = self._world.is_pinned(pointer, 4)
        if not (self._world.is_device(pointer, 4) or is_pinned) or flags:
            return (CUresult.CUDA_ERROR_INVALID_VALUE,)

        def run() -> bool:
            ctypes.c_uint32.from_address(pointer).value = value
            return True

        run.touched = [(pointer, 4)]  # type: ignore[attr-defined]
        queue = self._world.stream_of(stream)
        if queue is None:
            return (CUresult.CUDA_ERROR_INVALID_HANDLE,)
        queue.put(run)
        if self._world.blocking_waits and stream in self._world.torch_streams:
            self._world.drain(queue)
        return (CUresult.CUDA_SUCCESS,)


def _world_of_environment() -> World:
    """Return this process's machine, as the environment variable ``CUDA_FAKE`` describes it."""
    wish = os.environ.get("CUDA_FAKE", "")
    devices, first = int(os.environ.get("CUDA_FAKE_DEVICES", "1")), 0
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):  # one device, by its UUID
        first = int(visible[-2:], 16)
        devices = int(visible == f"GPU-{UUID(bytes=_uuid(first))}" and first < devices)
    world = World(
        device_bytes=int(os.environ.get("CUDA_FAKE_BYTES", str(2 << 30))),
        has_driver=wish != "no-driver",
        devices=0 if wish == "no-device" else devices,
        first=first,
        blocking_waits=True,
    )
    if ledger := os.environ.get("CUDA_FAKE_LEDGER"):
        world.ledger = Path(ledger)
        world.ledger.mkdir(exist_ok=True)
    if wish := os.environ.get("CUDA_FAKE_BREAK"):  # "cudaMalloc=cudaErrorUnknown,slice=hang"
        world.broken = dict(part.split("=") for part in wish.split(","))
    return world


WORLD = _world_of_environment()


def torch_side(index: int) -> Any:
    """Return the substitute for ``torch.cuda`` that a worker uses (see ``host_torch.py``)."""
    from .host_torch import HostTorch

    return HostTorch(WORLD)
