"""A fake of ``cuda.bindings``: a device in host memory that really holds bytes.

Device memory is a memfd, so another process that opens the fake's IPC handle maps the same bytes.
A stream is a queue: what is enqueued runs, in order, when a caller synchronises, queries or steps,
never at once. So a source that is overwritten too early, a word that overtakes its data, or a
wait that is forgotten shows up as wrong bytes.

Streams wait for each other's events; with a ``shuffle`` any of them may run on while one is waited
for, as they do on a GPU, so that what is ordered by chance only comes out of order.

``World`` is one machine; the modules ``runtime`` and ``driver`` speak for ``WORLD``, this process's
own. Errors are injected by call: ``world.fail("cudaHostRegister", "cudaErrorNotPermitted")``.

As strict as the driver, where a mistake would cost a day: a call of the driver interface in a
thread without a context; an IPC handle opened by its own maker; a handle that is no more; memory
unpinned or freed under a copy that is still queued; a copy over the end of a registration; what
must not be called while the thread captures; a kernel's assertion, after which nothing works; an
event recorded on another device's stream; work that is no copy on a stream of a device that is not
current. A copy between devices without access in both directions goes through the host, and counts.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import itertools
import mmap
import os
import random
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any
from uuid import UUID

MAGIC = b"FAKECUDA"
WAIT_DEADLINE_S = 30.0
_world_numbers = itertools.count()
POLL_S = 0.0005  # the fake GPU's own patience with a word


class cudaError_t(enum.IntEnum):
    """The codes that are met here; their numbers are the real ones."""

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
    cudaErrorPeerAccessAlreadyEnabled = 704
    cudaErrorAssert = 710
    cudaErrorHostMemoryAlreadyRegistered = 712
    cudaErrorHostMemoryNotRegistered = 713
    cudaErrorNotPermitted = 800
    cudaErrorNotSupported = 801
    cudaErrorStreamCaptureUnsupported = 900
    cudaErrorUnknown = 999


class CUresult(enum.IntEnum):
    """As ``cudaError_t``, of the driver interface."""

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
"""After one of these no call works any more, of either interface."""

WITHOUT_CONTEXT = frozenset(
    {
        "cudaGetDeviceCount", "cudaDriverGetVersion", "cudaRuntimeGetVersion",
        "cudaGetDeviceProperties", "cudaGetErrorString", "cudaDeviceCanAccessPeer",
    }
)  # fmt: skip
"""Calls of the runtime that need no context; every other one makes it, and makes it current."""

NOT_IN_A_CAPTURE = frozenset(
    {
        "cudaMalloc", "cudaFree", "cudaHostAlloc", "cudaFreeHost", "cudaHostRegister",
        "cudaHostUnregister", "cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventQuery",
        "cudaEventSynchronize", "cudaIpcOpenMemHandle", "cudaIpcCloseMemHandle",
    }
)  # fmt: skip
"""What a thread must not call while it captures (mode ``thread_local``)."""


class MemcpyKind(enum.IntEnum):
    cudaMemcpyHostToDevice = 1
    cudaMemcpyDeviceToHost = 2


class Handle:
    """An IPC handle: 64 bytes behind ``getPtr``."""

    def __init__(self, data: bytes = b"") -> None:
        self._raw = ctypes.create_string_buffer(data.ljust(64, b"\0"), 64)

    def getPtr(self) -> int:
        return ctypes.addressof(self._raw)

    @property
    def data(self) -> bytes:
        return self._raw.raw


class Block:
    """One allocation: a memfd and its mapping."""

    def __init__(self, size_bytes: int, descriptor: int = -1, device: int = 0) -> None:
        self.device = device
        self.is_own = descriptor < 0
        if self.is_own:
            descriptor = os.memfd_create("fake-device")
            os.ftruncate(descriptor, max(size_bytes, 1))
        self.descriptor = descriptor
        self.size_bytes = size_bytes
        self.map = mmap.mmap(descriptor, max(size_bytes, 1))
        self._hold = (ctypes.c_uint8 * max(size_bytes, 1)).from_buffer(self.map)
        self.address = ctypes.addressof(self._hold)
        self.open_count = 1  # of an imported one

    def close(self) -> None:
        del self._hold
        with contextlib.suppress(BufferError):  # a test's tensor may still look at it
            self.map.close()
        os.close(self.descriptor)


class Stream:
    """A queue of operations; ``done`` counts those that have run."""

    def __init__(self, device: int = 0) -> None:
        self.device = device
        self.queue: deque[Callable[[], bool]] = deque()
        self.enqueued = 0
        self.done = 0
        self.lock = threading.RLock()

    def put(self, run: Callable[[], bool]) -> None:
        with self.lock:
            self.queue.append(run)
            self.enqueued += 1

    def touches(self, address: int, size_bytes: int) -> bool:
        """Whether something queued reads or writes there (``touched`` of its operation)."""
        with self.lock:
            ranges = [part for run in self.queue for part in getattr(run, "touched", ())]
        return any(
            start < address + size_bytes and address < start + size for start, size in ranges
        )

    def step(self) -> bool:
        """Run the next operation; False when there is none, or it waits for a word."""
        with self.lock:
            if not self.queue or not self.queue[0]():
                return False
            self.queue.popleft()
            self.done += 1
            return True


class Event:
    """What was recorded: a stream and how many of its operations; None: nothing yet."""

    def __init__(self, device: int) -> None:
        self.device = device
        self.record: tuple[Stream, int] | None = None

    @property
    def is_done(self) -> bool:
        return self.record is None or self.record[0].done >= self.record[1]


class World:
    """A machine with (or without) a fake GPU.

    Args:
        bytes_per_s: how fast a copy runs; 0: at once.
        has_driver: without one the runtime says cudaErrorInsufficientDriver, the driver raises.
        devices: how many the driver shows.
        gpus: their numbers among the machine's.
        has_peers: whether they can access each other's memory.
        shuffle: while a stream is waited for, any of them goes on.
    """

    def __init__(
        self,
        *,
        device_bytes: int = 1 << 34,
        bytes_per_s: float = 0.0,
        has_driver: bool = True,
        devices: int = 1,
        gpus: Sequence[int] | None = None,
        has_peers: bool = True,
        shuffle: random.Random | None = None,
        blocking_waits: bool = False,
    ) -> None:
        self.device_bytes = device_bytes
        self.bytes_per_s = bytes_per_s
        self.has_driver = has_driver
        self.gpus = list(range(devices)) if gpus is None else list(gpus)
        self.has_peers = has_peers
        self.shuffle = shuffle
        self.peer_access: set[tuple[int, int]] = set()  # who may access whose memory
        self.through_host_bytes = 0  # of copies between devices
        self.blocking_waits = blocking_waits  # a wait runs at once: for processes that compute
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.blocks: dict[int, Block] = {}
        self.opened: dict[int, Block] = {}  # of other worlds, by address here
        self.opened_handles: dict[bytes, Block] = {}
        self.host_blocks: dict[int, Block] = {}
        self.registered: dict[int, int] = {}
        self.staged: list[Any] = []  # the driver's own copies of pageable sources
        self.streams: dict[int, Stream] = {}
        self.default_stream = Stream()
        self.events: dict[int, Event] = {}
        self.capturing: set[int] = set()  # threads
        self._current = threading.local()  # has_context: of this thread
        self._number = next(_world_numbers)
        self._failures: dict[str, list[tuple[int, str]]] = {}
        self._broken: str | None = None
        self._next = 1000
        self._lock = threading.RLock()
        self.runtime = Runtime(self)
        self.driver = Driver(self)

    def fail(self, call: str, code: str, *, after: int = 0) -> None:
        """The call of this name fails once, after ``after`` good ones."""
        self._failures.setdefault(call, []).append((after, code))

    def failure(self, call: str) -> str | None:
        """What this call must answer, if not success; a sticky code stays for good."""
        self.calls.append((call, ()))
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

    def break_down(self, code: str) -> None:
        """A kernel failed: the context is gone for good."""
        self._broken = code

    def enter(self) -> None:
        """This thread has a context from now on."""
        self._current.has_context = True

    @property
    def has_context(self) -> bool:
        return getattr(self._current, "has_context", False)

    @property
    def devices(self) -> int:
        return len(self.gpus)

    @property
    def current(self) -> int:
        """This thread's device."""
        return int(getattr(self._current, "device", 0))

    @current.setter
    def current(self, index: int) -> None:
        self._current.device = index

    @property
    def all_streams(self) -> list[Stream]:
        return [self.default_stream, *list(self.streams.values())]

    def stream_of(self, handle: int) -> Stream | None:
        """None: there is no such stream (any more). 0 is the default one."""
        return self.default_stream if handle == 0 else self.streams.get(handle)

    def must_be_idle(self, address: int, size_bytes: int, call: str) -> None:
        """What a driver would answer with a crash, later and elsewhere."""
        for stream in self.all_streams:
            if stream.touches(address, size_bytes):
                raise AssertionError(f"{call}: a queued copy still uses that memory")

    def new(self) -> int:
        with self._lock:
            self._next += 1
            return self._next

    @property
    def used_bytes(self) -> int:
        return sum(map(self.used_on, range(self.devices)))

    def used_on(self, device: int) -> int:
        return sum(b.size_bytes for b in list(self.blocks.values()) if b.device == device)

    def bytes_at(self, address: int, size_bytes: int) -> bytes:
        """Device bytes as they are now, whatever is still queued."""
        return ctypes.string_at(address, size_bytes)

    def drain(self, stream: Stream, until: int | None = None) -> None:
        """Run a stream up to its operation number ``until`` (all), and others as they please: those
        that it waits for must."""
        ends_at = time.monotonic() + WAIT_DEADLINE_S
        target = stream.enqueued if until is None else until
        while stream.done < target:
            streams = self.all_streams
            if self.shuffle is None:
                streams.insert(0, stream)
            else:
                self.shuffle.shuffle(streams)
            if any(each.step() for each in streams):
                continue
            if time.monotonic() > ends_at:
                raise AssertionError("a stream waits for a word that no stream writes")
            threading.Event().wait(POLL_S)

    def device_of(self, address: int, size_bytes: int) -> int | None:
        """Whose memory the range lies in, inside one allocation; None: no device's."""
        for b in [*self.blocks.values(), *self.opened.values()]:
            if b.address <= address and address + size_bytes <= b.address + b.size_bytes:
                return b.device
        return None

    def is_device(self, address: int, size_bytes: int) -> bool:
        return self.device_of(address, size_bytes) is not None

    def is_pinned(self, address: int, size_bytes: int) -> bool:
        """Whether the range lies inside *one* registration."""
        return any(
            start <= address and address + size_bytes <= start + size
            for start, size in list(self.registered.items())
        )


def _uuid(number: int) -> bytes:
    """Of the machine's GPU with that number."""
    return bytes(range(15)) + bytes([number])


class _Properties:
    def __init__(self, number: int) -> None:
        self.name = b"Fake GPU"
        self.uuid = type("Uuid", (), {"bytes": _uuid(number)})()


class Runtime:
    """``cuda.bindings.runtime``: every call returns ``(error, values…)``."""

    cudaMemcpyKind = MemcpyKind
    cudaIpcMemHandle_t = Handle

    def __init__(self, world: World) -> None:
        self._world = world

    def __getattribute__(self, name: str) -> Any:
        """Failures are looked up here, so that no call can forget them."""
        found = object.__getattribute__(self, name)
        if not name.startswith("cuda") or name in ("cudaMemcpyKind", "cudaIpcMemHandle_t"):
            return found
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
            values = found(*arguments)
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
        return (_Properties(self._world.gpus[index]),)

    def cudaSetDevice(self, index: int) -> Any:
        if not 0 <= index < self._world.devices:
            return cudaError_t.cudaErrorInvalidDevice
        self._world.current = index
        return ()

    def cudaMemGetInfo(self) -> Any:
        world = self._world
        return (world.device_bytes - world.used_on(world.current), world.device_bytes)

    def cudaDeviceSynchronize(self) -> Any:
        for stream in self._world.all_streams:
            if stream.device == self._world.current:
                self._world.drain(stream)
        return ()

    def cudaDeviceCanAccessPeer(self, device: int, peer: int) -> Any:
        if not {device, peer} <= set(range(self._world.devices)):
            return cudaError_t.cudaErrorInvalidDevice
        return (int(self._world.has_peers and device != peer),)

    def cudaDeviceEnablePeerAccess(self, peer: int, flags: int) -> Any:
        world = self._world
        pair = (world.current, peer)
        if flags:
            return cudaError_t.cudaErrorInvalidValue
        if not world.has_peers or peer == world.current or not 0 <= peer < world.devices:
            return cudaError_t.cudaErrorInvalidDevice
        if pair in world.peer_access:
            return cudaError_t.cudaErrorPeerAccessAlreadyEnabled
        world.peer_access.add(pair)
        return ()

    # -- memory

    def cudaMalloc(self, size: int) -> Any:
        if self._world.used_on(self._world.current) + size > self._world.device_bytes:
            return cudaError_t.cudaErrorMemoryAllocation
        block = Block(size, device=self._world.current)
        self._world.blocks[block.address] = block
        return (block.address,)

    def cudaFree(self, pointer: int) -> Any:
        if pointer == 0:
            return ()
        self.cudaDeviceSynchronize()
        block = self._world.blocks.pop(pointer, None)
        if block is None:
            return cudaError_t.cudaErrorInvalidValue
        self._world.must_be_idle(pointer, block.size_bytes, "cudaFree")
        block.close()
        return ()

    def cudaMemsetAsync(self, pointer: int, value: int, size: int, stream: int) -> Any:
        if not self._world.is_device(pointer, size):
            return cudaError_t.cudaErrorInvalidValue

        queue = self._world.stream_of(stream)
        if queue is None or queue.device != self._world.current:
            return cudaError_t.cudaErrorInvalidResourceHandle

        def run() -> bool:
            ctypes.memset(pointer, value, size)
            return True

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
            return cudaError_t.cudaErrorInvalidValue  # over the end of a registration
        queue = world.stream_of(stream)
        if queue is None:
            return cudaError_t.cudaErrorInvalidResourceHandle
        if not touched and threading.get_ident() in world.capturing:
            return cudaError_t.cudaErrorStreamCaptureUnsupported
        if device == target and not touched:  # pageable: staged before the call returns
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
        if device == source and not touched:  # into pageable memory: back when it has run
            world.drain(queue)
        return ()

    def cudaMemcpyPeerAsync(
        self, target: int, to: int, source: int, peer: int, size: int, stream: int
    ) -> Any:
        world = self._world
        if not {to, peer} <= set(range(world.devices)):
            return cudaError_t.cudaErrorInvalidDevice
        if (world.device_of(target, size), world.device_of(source, size)) != (to, peer):
            return cudaError_t.cudaErrorInvalidValue
        queue = world.stream_of(stream)
        if queue is None:
            return cudaError_t.cudaErrorInvalidResourceHandle
        if not {(to, peer), (peer, to)} <= world.peer_access:
            world.through_host_bytes += size

        def run() -> bool:
            ctypes.memmove(target, source, size)
            return True

        run.touched = [(target, size), (source, size)]  # type: ignore[attr-defined]
        queue.put(run)
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
        if any(start < pointer + size and pointer < start + held for start, held in known):
            return cudaError_t.cudaErrorHostMemoryAlreadyRegistered
        self._world.registered[pointer] = size
        return ()

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
            os.getpid(), self._world._number, block.descriptor, block.size_bytes,
            self._world.gpus[block.device],
        )  # fmt: skip
        return (Handle(MAGIC + packed),)

    def cudaIpcOpenMemHandle(self, handle: Handle, flags: int) -> Any:
        if not handle.data.startswith(MAGIC):
            return cudaError_t.cudaErrorInvalidValue
        pid, number, descriptor, size, gpu = struct.unpack_from("<qqqqq", handle.data, len(MAGIC))
        world = self._world
        if gpu not in world.gpus:  # one that this process does not see
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
        block = Block(size, opened, world.gpus.index(gpu))
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
        self._world.streams[handle] = Stream(self._world.current)
        return (handle,)

    def cudaStreamSynchronize(self, stream: int) -> Any:
        queue = self._world.stream_of(stream)
        if queue is None:
            return cudaError_t.cudaErrorInvalidResourceHandle
        self._world.drain(queue)
        return ()

    def cudaStreamDestroy(self, stream: int) -> Any:
        if self._world.streams.pop(stream, None) is None:
            return cudaError_t.cudaErrorInvalidResourceHandle
        return ()

    def cudaEventCreateWithFlags(self, flags: int) -> Any:
        handle = self._world.new()
        self._world.events[handle] = Event(self._world.current)
        return (handle,)

    def cudaEventRecord(self, event: int, stream: int) -> Any:
        target, known = self._world.stream_of(stream), self._world.events.get(event)
        if target is None or known is None or known.device != target.device:
            return cudaError_t.cudaErrorInvalidResourceHandle
        known.record = (target, target.enqueued)
        return ()

    def cudaStreamWaitEvent(self, stream: int, event: int, flags: int) -> Any:
        queue, known = self._world.stream_of(stream), self._world.events.get(event)
        if queue is None or known is None:
            return cudaError_t.cudaErrorInvalidResourceHandle
        now = Event(known.device)  # what is recorded later does not count
        now.record = known.record
        queue.put(lambda: now.is_done)
        return ()

    def cudaEventSynchronize(self, event: int) -> Any:
        known = self._world.events.get(event)
        if known is None:
            return cudaError_t.cudaErrorInvalidResourceHandle
        if known.record is not None:
            self._world.drain(*known.record)
        return ()

    def cudaEventQuery(self, event: int) -> Any:
        known = self._world.events.get(event)
        if known is None:
            return cudaError_t.cudaErrorInvalidResourceHandle
        return () if known.is_done else cudaError_t.cudaErrorNotReady

    def cudaEventDestroy(self, event: int) -> Any:
        if event not in self._world.events:
            return cudaError_t.cudaErrorInvalidResourceHandle
        del self._world.events[event]
        return ()


class Driver:
    """``cuda.bindings.driver``: without the library its calls raise."""

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
        if not self._world.is_device(pointer, 4) or flags != 1:
            return (CUresult.CUDA_ERROR_INVALID_VALUE,)
        queue = self._world.stream_of(stream)
        if queue is None or queue.device != self._world.current:
            return (CUresult.CUDA_ERROR_INVALID_HANDLE,)
        word = ctypes.c_uint32.from_address(pointer)

        def run() -> bool:
            return word.value == value

        queue.put(run)
        if self._world.blocking_waits:
            self._world.drain(queue)
        return (CUresult.CUDA_SUCCESS,)

    def cuStreamWriteValue32(self, stream: int, pointer: int, value: int, flags: int) -> Any:
        refused = self._refused("cuStreamWriteValue32")
        if refused is not None:
            return (refused,)
        if not self._world.is_device(pointer, 4):
            return (CUresult.CUDA_ERROR_INVALID_VALUE,)

        def run() -> bool:
            ctypes.c_uint32.from_address(pointer).value = value
            return True

        queue = self._world.stream_of(stream)
        if queue is None or queue.device != self._world.current:
            return (CUresult.CUDA_ERROR_INVALID_HANDLE,)
        queue.put(run)
        return (CUresult.CUDA_SUCCESS,)


def _world_of_environment() -> World:
    """This process's own machine: what ``CUDA_FAKE`` says of it, or a plain one."""
    wish = os.environ.get("CUDA_FAKE", "")
    known = {
        f"GPU-{UUID(bytes=_uuid(number))}": number
        for number in range(int(os.environ.get("CUDA_FAKE_DEVICES", "1")))
    }
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "") or ",".join(known)
    names = itertools.takewhile(known.__contains__, visible.split(","))  # as the driver reads it
    return World(
        device_bytes=int(os.environ.get("CUDA_FAKE_BYTES", str(2 << 30))),
        has_driver=wish != "no-driver",
        gpus=[] if wish == "no-device" else [known[name] for name in names],
        blocking_waits=True,
    )


WORLD = _world_of_environment()


def torch_side(index: int) -> Any:
    """What a worker gets instead of ``torch.cuda``: see ``host_torch.py``."""
    from .host_torch import HostTorch

    return HostTorch(WORLD, index)
