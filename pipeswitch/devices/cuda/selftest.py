"""What works on this machine's GPU: a program of its own, run before a server takes the device.

``python -m pipeswitch.devices.cuda.selftest '{"package": …, "index": 0, "tests": true}'`` prints
one JSON line per finding: first the device (or that there is none), then each test of
``ladder.TESTS``. It uses the very classes that will serve, ``CudaDeviceMemory`` in one process
and ``CudaPoolView`` in another, on a few MiB. A process of its own, since a context cannot be given
back and a hang must cost only the tests behind it.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Final

from ...errors import PipeSwitchError
from ...ipc.board import BOARD_BYTES, new_bell, sealed_memfd
from ...ipc.messages import ByteRange, Epoch, GroupCopy, ModelName, TransmitEnded, TransmitModel
from ...programs.layout import TensorSpec
from .bindings import Cuda
from .memory import CudaDeviceMemory, WordWriter

if TYPE_CHECKING:
    from .capture import Replayable
    from .torch import CudaTorch
    from .view import CudaPoolView

MIB: Final = 1 << 20
ARENA_BYTES: Final = 32 * MIB
SLICE_BYTES: Final = 512 * MIB
STORE_BYTES: Final = 16 * MIB
WORDS: Final = 64
REGION_BYTES: Final = 2 * MIB  # where the test's weights lie
WIDTH: Final = 256  # of the weights, a float32 square
WEIGHTS_BYTES: Final = WIDTH * WIDTH * 4
ROUNDS: Final = 30  # of each wait test: a wrong value in one means no
ANSWER_S: Final = 5.0
SILENCE_S: Final = 0.005  # long enough for the peer to enqueue, and to be wrong
OPEN_S: Final = 60.0  # importing torch and making a context, on a cold disk


def main(order: dict[str, Any]) -> None:
    """Say what is found, line by line."""
    try:
        cuda = Cuda.load(order["package"])
        count = cuda.device_count()
        index = int(order["index"])
        if index >= count:
            numbers = ", ".join(f"cuda:{number}" for number in range(count))
            raise PipeSwitchError(f"there is no cuda:{index}, only {numbers}")
        name, uuid = cuda.name_and_uuid(index)
        cuda.set_device(index)
        free_bytes, total_bytes = cuda.memory_info()
        driver, runtime = cuda.versions()
    except PipeSwitchError as error:
        _say(test="device", is_ok=False, text=error.message, hint=error.hint, **error.data)
        return
    _say(
        test="device", is_ok=True, text=name, name=name, uuid=uuid, free_bytes=free_bytes,
        device_bytes=total_bytes, count=count, driver=driver, runtime=runtime,
    )  # fmt: skip
    if order["tests"]:
        _tests(cuda, order)


def _say(**values: Any) -> None:
    sys.stdout.write(json.dumps(values, default=str) + "\n")
    sys.stdout.flush()


def _attempt(test: str, run: Callable[[], str | None]) -> bool:
    """Run one test; what it returns or raises is its text."""
    began_s = time.monotonic()
    try:
        text, is_ok = run() or "", True
    except Exception as error:  # a failed test is a finding
        text, is_ok = f"{type(error).__name__}: {error}"[:500], False
    _say(test=test, is_ok=is_ok, text=text, seconds=round(time.monotonic() - began_s, 2))
    return is_ok


def _tests(cuda: Cuda, order: dict[str, Any]) -> None:
    with contextlib.ExitStack() as cleanup:
        rig = _Rig(cuda, order)
        if not _attempt("memory", lambda: rig.round_trip(cleanup)):
            return
        if not _attempt("ipc", rig.open_peer):
            return
        for writer in ("copy", "write"):
            _attempt(f"wait-{writer}", lambda writer=writer: rig.wait_test(writer))  # type: ignore[misc]
            rig.revive_peer()
        _attempt("slice", lambda: rig.peer_test("slice"))
        rig.revive_peer()
        _attempt("graph", rig.graph_test)


class _Rig:
    """A small daemon's device, and a peer process with a worker's view of it."""

    def __init__(self, cuda: Cuda, order: dict[str, Any]) -> None:
        self._cuda = cuda
        self._order = order
        self._peer: _Peer | None = None
        self._epoch = 0
        self._ended: SimpleQueue[TransmitEnded] = SimpleQueue()

    def round_trip(self, cleanup: contextlib.ExitStack) -> None:
        """Store to arena and back, with pinned memory or without."""
        self._store = sealed_memfd("selftest-store", STORE_BYTES)
        self._board = sealed_memfd("selftest-board", BOARD_BYTES)
        self._bells = [new_bell()]
        self.memory = CudaDeviceMemory(
            self._cuda,
            index=int(self._order["index"]),
            store=self._store,
            bells=self._bells,
            arena_bytes=ARENA_BYTES,
            store_bytes=STORE_BYTES,
            words=WORDS,
            extra_bytes=SLICE_BYTES,
        )
        cleanup.callback(self.memory.close)
        cleanup.callback(self.close_peer)
        data = os.urandom(9 * MIB + 123)
        self.memory.store_view(0, len(data))[:] = data
        self.send(len(data))
        into = bytearray(len(data))
        self.memory.read_slice(
            REGION_BYTES, [ByteRange(offset_bytes=0, size_bytes=len(data))], memoryview(into)
        )
        if bytes(into) != data:
            raise RuntimeError("what was copied to the device came back different")

    def send(self, size_bytes: int) -> None:
        """Transmit the store's first bytes under the next epoch, as three groups."""
        self._epoch += 1
        first = min(size_bytes, 4096)
        sizes = (first, size_bytes - first, 0)
        position = 0
        groups = []
        for word, size in enumerate(sizes):
            groups.append(
                GroupCopy(
                    store_offset_bytes=position,
                    arena_offset_bytes=REGION_BYTES + position,
                    size_bytes=size,
                    word=word,
                )
            )
            position += size
        order = TransmitModel(
            model=ModelName("selftest"), epoch=Epoch(self._epoch), region_bytes=size_bytes,
            arena_offset_bytes=REGION_BYTES, groups=tuple(groups),
        )  # fmt: skip
        self.memory.transmit(order, self._ended.put)
        ended = self._ended.get(timeout=ANSWER_S)
        if not ended.is_complete:
            raise RuntimeError(f"only {ended.group_count} of {len(sizes)} groups were copied")

    def fill(self, value: float) -> None:
        """The weights in the store: all the same number."""
        import numpy as np

        view = self.memory.store_view(0, WEIGHTS_BYTES)
        np.frombuffer(view, dtype=np.float32)[:] = value

    def open_peer(self) -> None:
        """Another process maps the arena and reads what lies there."""
        (words,) = self.memory.export_descriptors()
        self._peer = _Peer(
            {
                **self._order,
                "handle": self.memory.export_handle().hex(),
                "words": words,
                "board": self._board,
                "bell": self._bells[0],
            },
            (words, self._board, self._bells[0]),
        )
        self._peer.ask({"do": "open"}, OPEN_S)
        self.fill(3.0)
        self.send(WEIGHTS_BYTES)
        self._expect(self.peer.ask({"do": "read"})["sum"], 3.0)

    def close_peer(self) -> None:
        """It is ended, whatever it does."""
        if self._peer is not None:
            self._peer.close()

    @property
    def peer(self) -> _Peer:
        """The one that ``open_peer`` started last."""
        assert self._peer is not None
        return self._peer

    def revive_peer(self) -> None:
        """What hung or broke its context is replaced: it says nothing about the tests behind it."""
        if self.peer.is_fit:
            return
        self.peer.close()
        try:
            self.open_peer()
        except Exception as error:  # the next test says so, too
            sys.stderr.write(f"no second peer: {type(error).__name__}: {error}\n")

    @staticmethod
    def _expect(found: float, value: float) -> None:
        if found != value * WIDTH * WIDTH:
            raise RuntimeError(f"the peer read {found}, not {value * WIDTH * WIDTH}")

    def wait_test(self, writer: WordWriter) -> str:
        """The peer enqueues wait and read *before* the data is sent: it reads the new value."""
        self.memory.use_word_writer(writer)
        for turn in range(1, ROUNDS + 1):
            self.fill(float(turn))
            self.peer.ask({"do": "wait", "epoch": self._epoch + 1})
            if self.peer.has_answered(SILENCE_S):
                found = self.peer.answer("wait")
                raise RuntimeError(f"round {turn}: it did not wait for the word, and read {found}")
            self.send(WEIGHTS_BYTES)
            self._expect(self.peer.answer("wait")["sum"], float(turn))
        return f"{ROUNDS} rounds"

    def peer_test(self, name: str) -> str:
        """A test that the peer does alone."""
        return str(self.peer.ask({"do": name}, OPEN_S)["text"])

    def graph_test(self) -> str:
        """A captured product is replayed behind a wait, over weights that came since; and what
        cannot be captured leaves a process that can still compute."""
        text = self.peer_test("capture")
        for turn in (2, 5):
            self.fill(float(turn))
            self.send(WEIGHTS_BYTES)
            answer = self.peer.ask({"do": "replay", "epoch": self._epoch})
            if answer["found"] != turn * WIDTH:
                raise RuntimeError(f"a replay gave {answer['found']}, not {turn * WIDTH}")
        return f"{text}, {self.peer_test('spoil')}"


class _Peer:
    """The other process, at the end of two pipes; one that hangs is killed."""

    def __init__(self, order: dict[str, Any], descriptors: tuple[int, ...]) -> None:
        self.is_fit = True  # until a question failed
        self._process = subprocess.Popen(
            [
                sys.executable, "-P", "-X", "faulthandler", "-m", __spec__.name,
                json.dumps({**order, "peer": True}),
            ],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0,
            pass_fds=descriptors,
        )  # fmt: skip

    def ask(self, question: dict[str, Any], timeout_s: float = ANSWER_S) -> dict[str, Any]:
        """One question, one answer; ``wait`` answers at once and then once more."""
        process = self._process
        assert process.stdin is not None
        if process.poll() is not None:
            self.is_fit = False
            raise RuntimeError(f"the other process ended with status {process.returncode}")
        process.stdin.write(json.dumps(question).encode() + b"\n")
        return self.answer(question["do"], timeout_s)

    def has_answered(self, timeout_s: float) -> bool:
        """Whether something can be read within that time."""
        assert self._process.stdout is not None
        return bool(select.select([self._process.stdout.fileno()], [], [], timeout_s)[0])

    def answer(self, what: str, timeout_s: float = ANSWER_S) -> dict[str, Any]:
        """The next answer.

        Raises:
            TimeoutError: none came; the process was killed.
            RuntimeError: it says that it failed, or it ended.
        """
        if not self.has_answered(timeout_s):
            self.is_fit = False
            self._process.kill()
            raise TimeoutError(f"no answer to {what!r} within {timeout_s:g} s")
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self.is_fit = False
            raise RuntimeError(f"the other process ended with status {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            self.is_fit = False
            raise RuntimeError(answer["error"])
        return answer

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


def peer(order: dict[str, Any]) -> None:
    """Answer questions until the end of input; the first opens the view."""
    answers: _Answers | None = None
    for line in sys.stdin:
        question = json.loads(line)
        try:
            if answers is None:
                answers = _Answers(order)
            answer = answers.to(question)
        except Exception as error:  # the other side reports it
            answer = {"error": f"{type(error).__name__}: {error}"[:500]}
        _say(**answer)


class _Answers:
    """The peer's state: a worker's view, weights over it, what was computed and captured."""

    def __init__(self, order: dict[str, Any]) -> None:
        import torch

        from .torch import torch_side
        from .view import CudaPoolView

        self._side: CudaTorch = torch_side(order["package"], int(order["index"]))
        self._view: CudaPoolView = CudaPoolView(
            Cuda.load(order["package"]),
            self._side,
            index=int(order["index"]),
            handle=bytes.fromhex(order["handle"]),
            words_descriptor=order["words"],
            board=order["board"],
            bell=order["bell"],
            bells=[order["bell"]],
            arena_bytes=ARENA_BYTES,
            words=WORDS,
            waits="gpu",
        )
        self._side.warm_up()
        spec = TensorSpec(
            name="weights", dtype="float32", shape=(WIDTH, WIDTH), offset_bytes=0,
            size_bytes=WEIGHTS_BYTES, file_offset_bytes=0,
        )  # fmt: skip
        self._weights = self._view.tensor(spec, REGION_BYTES)
        self._x = torch.ones(WIDTH, device=self._side.device)
        float(self._weights.double().sum())  # loads the kernels, before any wait
        self._product = self._x @ self._weights
        self._graph: Replayable | None = None

    def to(self, question: dict[str, Any]) -> dict[str, Any]:
        """One answer."""
        import torch

        answers = {
            "open": lambda _: {"text": self._side.device},
            "read": self._read,
            "wait": self._wait,
            "slice": self._slice,
            "capture": self._capture,
            "replay": self._replay,
            "spoil": self._spoil,
        }
        with torch.inference_mode(), self._side.computing(in_slice=False):
            return answers[question["do"]](question)

    def _read(self, question: dict[str, Any]) -> dict[str, Any]:
        return {"sum": float(self._weights.double().sum())}

    def _wait(self, question: dict[str, Any]) -> dict[str, Any]:
        _say()  # heard: what follows must not end before the data comes
        for word in (0, 1):
            self._view.wait_group(word, question["epoch"])
        total = self._weights.double().sum()
        self._view.quiesce()
        return {"sum": float(total)}

    def _slice(self, question: dict[str, Any]) -> dict[str, Any]:
        self._view.take_slice(SLICE_BYTES)
        return {"text": self._side.check_slice()}

    def _capture(self, question: dict[str, Any]) -> dict[str, Any]:
        recorder = self._side.recorder()
        before = recorder.free_bytes()

        def run() -> None:
            self._product = self._x @ self._weights

        with recorder.session():
            self._graph = recorder.record(run)
        return {"text": f"{max(0, before - recorder.free_bytes()) >> 10} KiB"}

    def _spoil(self, question: dict[str, Any]) -> dict[str, Any]:
        self._side.check_failed_capture(self._side.recorder())
        return {"text": "a failed capture is mended"}

    def _replay(self, question: dict[str, Any]) -> dict[str, Any]:
        assert self._graph is not None
        self._view.wait_group(1, question["epoch"])
        self._graph.replay()
        self._view.quiesce()
        return {"found": float(self._product[-1])}


if __name__ == "__main__":
    _order = json.loads(sys.argv[1])
    (peer if _order.get("peer") else main)(_order)
