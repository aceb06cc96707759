"""Self-test of this machine's GPU: one check for each mechanism, without the server.

``python -m pipeswitch.devices.cuda.selftest '{"package": …, "index": 0, "tests": ["memory", …]}'``
prints one JSON line per check: first the device (or why there is none), then the requested checks.
This process makes no context; it forks a process for each check. So a hang or a crash fails only
that check and the checks that need it. A server's start and ``pipeswitch doctor``
run ``ladder.TESTS``; ``make gpu`` runs more (``benchmarks/gpu_mechanisms.py``).
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from ...base.errors import PipeSwitchError
from ...ipc.control_page import BOARD_BYTES, Board, sealed_memfd
from ...programs.interface.layout import TensorSpec
from ..cpu.arenas import Bytes
from .bindings import Cuda
from .fences import FenceWriter
from .ladder import Words
from .memory import CHUNK_BYTES
from .pinned import PinnedBuffer
from .stream_gate import StreamGate

if TYPE_CHECKING:
    import torch

    from .torch import CudaTorch

MIB: Final = 1 << 20
HEAD_BYTES: Final = 2 * MIB  # space for the fence, in front of the group
GROUP_BYTES: Final = 3 * CHUNK_BYTES  # several copies: a fence might overtake only the last one
LAST_BYTES: Final = HEAD_BYTES + GROUP_BYTES - MIB  # offset of the group's last MiB
SLICE_BYTES: Final = 512 * MIB
HELD_BYTES: Final = 16 * MIB
SCRATCH_BYTES: Final = 64 * MIB
HELD_S: Final = 0.05
ROUNDS: Final = 10  # rounds of each wait test; one wrong value fails the test
SILENCE_S: Final = 0.005  # long enough for the peer to enqueue, and to answer if it does not wait
LIMIT_S: Final = 15.0
LAST_WORDS_S: Final = 1.0
IMPORT_S: Final = 100.0  # limit for importing torch and making a context, on a cold disk


@dataclass(frozen=True)
class Rig:
    """The device under test, and the bindings that open it."""

    package: str
    index: int

    def cuda(self) -> Cuda:
        """Load the bindings, create a context in this process, and return the calls."""
        cuda = Cuda.load(self.package)
        cuda.set_device(self.index)
        return cuda

    def side(self) -> CudaTorch:
        """Return torch's side of the device in this process."""
        from .torch import torch_side

        return torch_side(self.package, self.index)


class Pipe:
    """One end of a connection between two processes; each message is a line of JSON."""

    def __init__(self, end: socket.socket) -> None:
        self._end, self._file = end, end.makefile("rw")

    def send(self, **values: Any) -> None:
        """Send values to the other end."""
        self._file.write(json.dumps(values, default=str) + "\n")
        self._file.flush()

    def hear(self) -> dict[str, Any]:
        """Return the next message from the other end.

        Raises:
            EOFError: the other process ended.
        """
        line = self._file.readline()
        if not line:
            raise EOFError("the other process ended")
        finding: dict[str, Any] = json.loads(line)
        return finding

    def ask(self, key: str) -> Any:
        """Return one value of the peer's next message (blocks).

        Raises:
            EOFError, RuntimeError: the peer ended or failed; a RuntimeError has the peer's text.
        """
        finding = self.hear()
        if "error" in finding:
            raise RuntimeError(f"the other process: {finding['error']}")
        return finding[key]

    def is_silent(self, for_s: float) -> bool:
        """Return True if the other end sends nothing for ``for_s`` seconds."""
        return not select.select([self._end], [], [], for_s)[0]


def fork(run: Callable[[Pipe], None]) -> tuple[int, Pipe]:
    """Fork a process for ``run``; return its pid and pipe. Call it before making a CUDA context."""
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid:
        theirs.close()
        return pid, Pipe(ours)
    ours.close()
    pipe = Pipe(theirs)
    try:
        run(pipe)
    except PipeSwitchError as error:
        pipe.send(**error.data, hint=error.hint, error=error.message)
    except BaseException as error:  # the other side reports it
        pipe.send(error=f"{type(error).__name__}: {error}"[:500])
    finally:
        os._exit(0)


def _device(rig: Rig) -> dict[str, Any]:
    cuda = Cuda.load(rig.package)
    count = cuda.device_count()
    if rig.index >= count:
        numbers = ", ".join(f"cuda:{number}" for number in range(count))
        raise PipeSwitchError(f"there is no cuda:{rig.index}, only {numbers}")
    name, uuid = cuda.name_and_uuid(rig.index)
    cuda.set_device(rig.index)
    free_bytes, total_bytes = cuda.memory_info()
    driver, runtime = cuda.versions()
    return {
        "text": name,
        "name": name,
        "uuid": uuid,
        "free_bytes": free_bytes,
        "device_bytes": total_bytes,
        "count": count,
        "driver": driver,
        "runtime": runtime,
    }


def _memory(rig: Rig) -> str:
    """Copy pinned memory to the device and back; check that scrubbed memory is zero."""
    cuda = rig.cuda()
    source = PinnedBuffer(cuda, MIB)
    block = round_trip(cuda, source.address, source.array)
    fill(cuda, block, 0, MIB)
    expect("a scrubbed MiB", total(cuda, block), 0)
    return "copied and scrubbed"


def _shared(run: Callable[[Rig, Pipe], None], rig: Rig) -> str:
    """Make another process map, read and write memory; check the memory after its death."""
    pid, peer = fork(partial(run, rig))
    cuda = rig.cuda()
    block = share(cuda, peer, MIB, 7)
    expect("the other process", peer.ask("found"), 7 * MIB)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    expect("the owner", total(cuda, block), 9 * MIB)
    return "1 MiB read and written by another process"


def _by_copies(rig: Rig, pipe: Pipe) -> None:
    cuda = rig.cuda()
    base = opened(cuda, pipe)
    sum_read = total(cuda, base)
    fill(cuda, base, 9, MIB)
    pipe.send(found=sum_read)
    pipe.hear()  # wait to be killed


def _by_kernels(rig: Rig, pipe: Pipe) -> None:
    side, cuda = rig.side(), rig.cuda()
    values = tensor_of(side, opened(cuda, pipe))
    sum_read = int(values.sum())
    values.fill_(9)
    pipe.send(found=sum_read, left=int(values.sum()))  # the second sum waits for the fill
    pipe.hear()


class Sender:
    """Sender that works like the daemon: it sends a group, then the fence, on a busy link."""

    def __init__(self, cuda: Cuda, base: int, words: Words) -> None:
        self._cuda, self._base = cuda, base
        self._source, self._noise = PinnedBuffer(cuda, GROUP_BYTES), cuda.malloc(GROUP_BYTES)
        self._stream, self._noise_stream = cuda.stream(), cuda.stream()
        self._fences, self._event = FenceWriter(cuda, words, self._stream), cuda.event()

    def send(self, turn: int) -> None:
        cuda, source, stream = self._cuda, self._source, self._stream
        source.array[GROUP_BYTES - MIB : GROUP_BYTES] = turn
        for _ in range(2):
            cuda.fill(self._noise, turn, GROUP_BYTES, self._noise_stream)
            cuda.copy_to_device(self._noise, source.address, GROUP_BYTES, self._noise_stream)
        for done in range(0, GROUP_BYTES, CHUNK_BYTES):
            target = self._base + HEAD_BYTES + done
            cuda.copy_to_device(target, source.address + done, CHUNK_BYTES, stream)
        self._fences.write(self._event, self._base, turn)
        self._fences.drain()


def _torch(rig: Rig) -> str:
    """Check that torch can be imported and computes."""
    side = rig.side()
    import torch

    square = torch.ones(64, 64, device=side.device)
    expect("a product", float((square @ square).sum()), 64**3)
    return f"torch {torch.__version__}"


def _slice(rig: Rig) -> str:
    side, cuda = rig.side(), rig.cuda()
    side.take_slice(cuda.malloc(SLICE_BYTES), SLICE_BYTES)
    return side.check_slice()


def _graph(rig: Rig) -> str:
    """Replay a captured product with new weights; check computing after a failed capture."""
    side, cuda = rig.side(), rig.cuda()
    import torch

    weights = tensor_of(side, cuda.malloc(MIB)).view(torch.float32).view(512, 512)
    x = torch.ones(512, device=side.device)
    products = []
    with torch.inference_mode(), side.computing(in_slice=False):
        weights.fill_(1)
        x @ weights  # loads the kernels, takes the workspaces
        recorder = side.recorder()
        before, _ = recorder.memory_bytes()
        with recorder.session():
            graph = recorder.record(lambda: products.append(x @ weights))
        cost = max(0, before - recorder.memory_bytes()[0])
        for turn in (2, 5):
            weights.fill_(turn)
            graph.replay()
            cuda.synchronize(side.stream)
            expect("a replay", float(products[0][-1]), 512 * turn)
        side.check_failed_capture(side.recorder())
    return f"{cost >> 10} KiB, a failed capture is mended"


def _waits(words: Words, rig: Rig) -> str:
    """Make another process enqueue a wait and a sum *before* the data is sent; check the sum."""
    _, peer = fork(partial(_read_behind_waits, rig))
    cuda = rig.cuda()
    sender = Sender(cuda, share(cuda, peer, HEAD_BYTES + GROUP_BYTES, 0), words)
    for turn in range(1, ROUNDS + 1):
        peer.ask("is_enqueuing")
        if not peer.is_silent(SILENCE_S):
            sum_read = peer.ask("found")
            raise RuntimeError(f"round {turn}: it did not wait for the word, and read {sum_read}")
        sender.send(turn)
        expect(f"round {turn}: the other process", peer.ask("found"), turn * MIB)
        peer.send()
    return f"{ROUNDS} rounds"


def _read_behind_waits(rig: Rig, pipe: Pipe) -> None:
    side, cuda = rig.side(), rig.cuda()
    base = opened(cuda, pipe)
    last = tensor_of(side, base, LAST_BYTES)
    with side.computing(in_slice=False):
        int(last.sum())  # loads the kernels, before any wait
        for turn in range(1, ROUNDS + 1):
            pipe.send(is_enqueuing=True)  # the next sum must not end before the data is sent
            cuda.wait_value(side.stream, base, turn)
            pipe.send(found=int(last.sum()))
            pipe.hear()


def _hold(rig: Rig) -> str:
    """Hold another process's stream: it must stop, continue, and free its memory if killed."""
    page = sealed_memfd("control-page", BOARD_BYTES)
    words = Board(page)
    pid, peer = fork(partial(_be_held, rig, page))
    _, third = fork(partial(_by_copies, rig))
    cuda = rig.cuda()
    block = share(cuda, peer, HELD_BYTES, 0)
    for is_last in (False, True):
        peer.ask("is_ready")
        passed = words.marks(0)[1]
        while words.marks(0)[1] == passed and peer.is_silent(0.0):
            pass
        words.write_run(0, False)
        if not peer.is_silent(HELD_S):
            peer.ask("missing")  # raises its error
        expect("marks at which it stands", np.subtract(*words.marks(0)), 1)
        before = words.marks(0), total(cuda, block)
        peer.send()  # it continues to ``.item()``, which must block
        if not peer.is_silent(HELD_S) or (words.marks(0), total(cuda, block)) != before:
            raise RuntimeError("a held stream computes")
        if not is_last:
            words.write_run(0, True)
            expect("what the released stream has not computed", peer.ask("missing"), 0)
    free_bytes = cuda.memory_info()[0]
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    share(cuda, third, MIB, 7)
    expect("a process after the kill", third.ask("found"), 7 * MIB)
    while cuda.memory_info()[0] < free_bytes + SCRATCH_BYTES // 2:  # the check's limit ends this
        time.sleep(SILENCE_S)
    return f"held at mark {before[0][0]}"


def _be_held(rig: Rig, page: int, pipe: Pipe) -> None:
    side, cuda = rig.side(), rig.cuda()
    values = tensor_of(side, opened(cuda, pipe), 0, HELD_BYTES)
    cuda.malloc(SCRATCH_BYTES)
    int(values.add_(1).sum())  # loads the kernels, before any wait
    gate, steps = StreamGate(cuda, Board(page), 0, side.current_stream), 1
    while True:
        pipe.send(is_ready=True)
        while pipe.is_silent(0.0):
            gate.mark()
            values.add_(1)
            steps += 1
        pipe.hear()
        pipe.send(missing=steps % 256 * HELD_BYTES - int(values.sum()))


def expect(what: str, actual: float, expected: float) -> None:
    """Raise RuntimeError if two values differ."""
    if actual != expected:
        raise RuntimeError(f"{what}: {actual}, not {expected}")


def fill(cuda: Cuda, address: int, value: int, size_bytes: int) -> None:
    """Fill device memory with a value (blocks)."""
    stream = cuda.stream()
    cuda.fill(address, value, size_bytes, stream)
    cuda.synchronize(stream)


def total(cuda: Cuda, address: int) -> int:
    """Return the sum of the bytes in one MiB of device memory."""
    buffer, stream = PinnedBuffer(cuda, MIB), cuda.stream()
    cuda.copy_to_host(buffer.address, address, MIB, stream)
    cuda.synchronize(stream)
    return int(buffer.array.sum(dtype=np.int64))


def round_trip(cuda: Cuda, address: int, source: Bytes) -> int:
    """Copy random bytes to a new MiB of the device and back, compare, and return its address."""
    block, stream, back = cuda.malloc(MIB), cuda.stream(), PinnedBuffer(cuda, MIB)
    source[:] = np.frombuffer(os.urandom(MIB), np.uint8)
    cuda.copy_to_device(block, address, MIB, stream)
    cuda.copy_to_host(back.address, block, MIB, stream)
    cuda.synchronize(stream)
    if not np.array_equal(source, back.array):
        raise RuntimeError("what was copied to the device came back different")
    return block


def share(cuda: Cuda, pipe: Pipe, size_bytes: int, value: int) -> int:
    """Allocate and fill a block, send its handle through the pipe, and return its address."""
    block = cuda.malloc(size_bytes)
    fill(cuda, block, value, size_bytes)
    pipe.send(handle=cuda.export_handle(block).hex())
    return block


def opened(cuda: Cuda, pipe: Pipe) -> int:
    """Map the block whose handle the other process sends, and return its address."""
    return cuda.open_handle(bytes.fromhex(pipe.hear()["handle"]))


def tensor_of(
    side: CudaTorch, base: int, offset_bytes: int = 0, size_bytes: int = MIB
) -> torch.Tensor:
    """Return a uint8 tensor over the bytes at an address of the device."""
    spec = TensorSpec(
        name="bytes",
        dtype="uint8",
        shape=(size_bytes,),
        offset_bytes=0,
        size_bytes=size_bytes,
        file_offset_bytes=0,
    )
    return side.tensor(side.storage(base, offset_bytes + size_bytes), spec, offset_bytes)


class SelfTestCheck(NamedTuple):
    """One check, and the checks that must pass before it can run."""

    run: Callable[[Rig], dict[str, Any] | str]
    needs: tuple[str, ...] = ()
    limit_s: float = LIMIT_S


CHECKS: Final[dict[str, SelfTestCheck]] = {
    "device": SelfTestCheck(_device),
    "memory": SelfTestCheck(_memory),
    "ipc": SelfTestCheck(partial(_shared, _by_copies), ("memory",)),
    "torch": SelfTestCheck(_torch, limit_s=IMPORT_S),
    "tensor": SelfTestCheck(partial(_shared, _by_kernels), ("ipc", "torch")),
    "wait-write": SelfTestCheck(partial(_waits, "write"), ("tensor",)),
    "wait-copy": SelfTestCheck(partial(_waits, "copy"), ("tensor",)),
    "slice": SelfTestCheck(_slice, ("memory", "torch")),
    "graph": SelfTestCheck(_graph, ("memory", "torch")),
    "hold": SelfTestCheck(_hold, ("tensor",)),
}


def main(order: dict[str, Any], checks: Mapping[str, SelfTestCheck] = CHECKS) -> None:
    """Run the device check and the requested ones; print each result as a line of JSON."""
    rig, passed = Rig(order["package"], int(order["index"])), set()
    for name in ("device", *order["tests"]):
        check = checks[name]
        lacks = [need for need in check.needs if need not in passed]
        finding: dict[str, Any] = {"is_ok": False, "text": f"not run: needs {', '.join(lacks)}"}
        finding = finding | {"lacks": lacks} if lacks else _outcome(check, rig)
        sys.stdout.write(json.dumps({"test": name, **finding}, default=str) + "\n")
        sys.stdout.flush()
        if finding["is_ok"]:
            passed.add(name)
            if name == "torch":
                from . import torch  # noqa: F401 - once, for all that are forked from here on
        elif finding.get("kind") in ("no driver", "no device"):
            return


def _outcome(check: SelfTestCheck, rig: Rig) -> dict[str, Any]:
    """Run a check in a new process group; end the group before returning its result."""
    began_s = time.monotonic()

    def work(pipe: Pipe) -> None:
        result = check.run(rig)
        pipe.send(**(result if isinstance(result, dict) else {"text": result}))

    pid, pipe = fork(work)
    os.setpgid(pid, pid)
    finding: dict[str, Any] = {"error": f"no answer within {check.limit_s:g} s"}
    if pipe.is_silent(check.limit_s):
        os.killpg(pid, signal.SIGABRT)  # each of its processes prints its stack
        pipe.is_silent(LAST_WORDS_S)
    else:
        try:
            finding = pipe.hear()
        except EOFError:  # it crashed; its exit status has the signal
            finding = {"error": ""}
    os.killpg(pid, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    error = finding.pop("error", None)
    if error is not None:
        finding["text"] = error or f"its process ended with status {status}"
    return {**finding, "is_ok": error is None, "seconds": round(time.monotonic() - began_s, 2)}


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
