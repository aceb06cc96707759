"""``bench peers``: our server with language models, compared with llama-cpp-python and vLLM.

Each peer is measured twice: as a server over HTTP, and as a library in a process, its best case.
Our server is measured in each precision; the library of llama.cpp also in its nearest types.
README.md says what is equal for all peers. transformers' ``generate()`` gives the right tokens.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from pipeswitch.base.quantiles import quantile

from . import lm
from .foreign import PEERS_FOLDER, arms_of, environment, free_port, python_of, started, usable
from .lm_child import FIRST_LETTER
from .setting import read_line
from .trials import Numbers, Run, now_ms

PEERS: Final = ("llama_cpp", "vllm")
OURS: Final = "pipeswitch {}, HTTP"
KINDS: Final = {"exact": "F32", "fast": "F32", "bf16": "F16", "int8": "Q8_0"}
"""Type of llama.cpp's weights that is nearest to each of our precisions."""
RIGHT: Final = "generate()"
TWO: Final = 2  # number of models; the device has room for one
ROUNDS, QUICK_ROUNDS = 5, 2
F32: Final = 0  # ggml's number for float32; keys and values are float16 by default


def run(bench: Run, _: Sequence[str] = ()) -> None:
    """Measure each model size: tokens a second, first tokens, and a switch to another model."""
    present = usable(bench, PEERS_FOLDER, PEERS)
    for size in lm.SIZES[:1] if bench.is_quick else lm.SIZES:
        with lm.placed(bench, size, TWO, has_letters=True) as place:
            if "llama_cpp" in present:
                files = [
                    (folder, file, kind)
                    for kind in sorted({*KINDS.values()})
                    for folder, file in zip(place.folders, _files(place, kind), strict=True)
                ]
                subprocess.run(
                    _child_command("gguf", {"files": files}),
                    check=True,
                    env=_environment(place),
                    stdout=subprocess.DEVNULL,
                )
            with contextlib.ExitStack() as stack:
                peers = [
                    peer for one in _everyone(place, present) for peer in stack.enter_context(one)
                ]
                for case in lm.speed(bench, size, peers, bench.rounds(ROUNDS, QUICK_ROUNDS)):
                    _compare(bench, case, peers, "tokens_per_s", "cpu_per_token_ms")
                _first(place, peers)
            if "vllm" in present:
                _processes(place)
    bench.notes.append(
        "another model wanted: ours holds one of two in its arena; llama.cpp frees one and loads "
        "the other's file, which the page cache has; of vLLM a process is started, with its "
        "compiled graphs on disk"
    )


def _files(place: lm.Place, kind: str = "F32") -> list[str]:
    return [f"{folder}.{kind}.gguf" for folder in place.folders]


def _child_command(verb: str, order: Mapping[str, Any]) -> list[str]:
    script = str(Path(__file__).with_name("peer_child.py"))
    return [python_of(PEERS_FOLDER), "-P", script, verb, json.dumps(order)]


def _environment(place: lm.Place) -> dict[str, str]:
    """Return an environment in which libraries use no network and write only to the folder."""
    return environment() | {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "TMPDIR": str(place.folder),
        "VLLM_CACHE_ROOT": str(place.folder / "cache"),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(place.bench.threads),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the library runs in one process
    }


@dataclass
class OverHttp(lm.Peer):
    """Server with the path ``/v1/completions``; each prompt has its own connection and thread."""

    address: str = ""
    more: Mapping[str, Any] = field(default_factory=dict)  # further fields of the request's body

    def ask(self, model: int, prompts: lm.Prompts, new: int) -> Numbers:
        def ask(number: int) -> tuple[list[int], float]:
            text = "".join(chr(FIRST_LETTER + token) for token in prompts[number])
            body = {
                "model": f"lm-{model}",
                "prompt": text,
                "max_tokens": new,
                "temperature": 0,
                "stream": True,
                **self.more,
            }
            answer, first_ms = _stream(self.address, json.dumps(body))
            return [ord(letter) - FIRST_LETTER for letter in answer], first_ms

        return lm.side_by_side(ask, len(prompts))


def _stream(address: str, body: str) -> tuple[str, float]:
    """Request a completion; return its text, and the time in ms until its first letter."""
    connection, began_ms, first_ms = http.client.HTTPConnection(address), now_ms(), 0.0
    try:
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        answer, texts = connection.getresponse(), []
        if answer.status != http.HTTPStatus.OK:
            raise RuntimeError(f"{answer.status}: {answer.read(300)!r}")
        for line in answer:
            if line.startswith(b"data: {"):
                chunk = json.loads(line[6:])
                texts += [choice["text"] for choice in chunk["choices"]]
                if not first_ms and any(texts):
                    first_ms = now_ms() - began_ms
        return "".join(texts), first_ms
    finally:
        connection.close()


def _everyone(
    place: lm.Place, present: Sequence[str]
) -> Iterator[contextlib.AbstractContextManager[list[lm.Peer]]]:
    """Yield contexts that start the peers; the first peer's answers are the right ones."""
    yield _transformers(place)
    for precision in KINDS:
        yield _ours(place, precision)
    for name, start in (("llama_cpp", _llama_server), ("vllm", _vllm_server)):
        if name in present:
            place.bench.say(f"{place.size.name}: starting {name}")
            yield start(place)
            for kind in sorted({*KINDS.values()}) if name == "llama_cpp" else ("F32",):
                yield _library(place, name, kind)


@contextlib.contextmanager
def _transformers(place: lm.Place) -> Iterator[list[lm.Peer]]:
    with lm.transformers_child(place) as child:
        yield [lm.Lines(RIGHT, root=child.pid, child=child)]


@contextlib.contextmanager
def _ours(place: lm.Place, precision: str) -> Iterator[list[lm.Peer]]:
    place.bench.say(f"{place.size.name}: starting pipeswitch {precision}")
    with lm.served(place, http=True, precision=precision) as (running, client):
        yield [
            OverHttp(OURS.format(precision), root=running.pid, address=running.http_address),
            lm.OwnSocket(f"pipeswitch {precision}, own socket", root=running.pid, client=client),
        ]


def _llama_server(place: lm.Place) -> contextlib.AbstractContextManager[list[lm.Peer]]:
    threads, port = place.bench.threads, free_port()
    models = [
        {
            "model": file,
            "model_alias": f"lm-{number}",
            "n_ctx": place.size.context,
            "n_threads": threads,
            "n_threads_batch": threads,
            "type_k": F32,
            "type_v": F32,
            "flash_attn": True,
            "verbose": False,
        }
        for number, file in enumerate(_files(place))
    ]
    config = place.folder / "llama.json"
    config.write_text(
        json.dumps(
            {"host": "127.0.0.1", "port": port, "models": models, "interrupt_requests": False}
        ),
        "utf-8",
    )
    command = ["llama_cpp.server", "--config_file", str(config)]
    # The server's default for repeat_penalty, 1.1, would penalize repeated tokens.
    return _http("llama-cpp-python, HTTP", place, command, port, {"repeat_penalty": 1.0})


def _vllm_server(place: lm.Place) -> contextlib.AbstractContextManager[list[lm.Peer]]:
    port = free_port()
    command = [
        "vllm.entrypoints.openai.api_server",
        "--model",
        place.folders[0],
        "--served-model-name",
        "lm-0",
        "--dtype",
        "float32",
        "--max-model-len",
        str(place.size.context),
        "--max-num-seqs",
        str(lm.MANY),
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    return _http("vLLM, HTTP", place, command, port, {})


@contextlib.contextmanager
def _http(
    name: str, place: lm.Place, command: Sequence[str], port: int, more: Mapping[str, Any]
) -> Iterator[list[lm.Peer]]:
    """Start a server (a module with arguments), wait for its first answer, and send SIGSTOP."""
    peer = OverHttp(name, address=f"127.0.0.1:{port}", more=more)
    prompts = place.size.prompts(1, lm.PROMPTS[0], 0)
    words = [python_of(PEERS_FOLDER), "-P", "-m", *command]
    with started(
        words, lambda _: peer.ask(0, prompts, 1), _environment(place), folder=place.folder
    ) as peer.process:
        yield [peer]


@contextlib.contextmanager
def _library(place: lm.Place, name: str, kind: str) -> Iterator[list[lm.Peer]]:
    order = {
        "folders": place.folders,
        "files": _files(place, kind),
        "threads": place.bench.threads,
        "context": place.size.context,
        "together": lm.MANY,
    }
    title = {"llama_cpp": "llama.cpp", "vllm": "vLLM"}[name] + f" {kind}, in process"
    with started(
        _child_command(name, order),
        read_line,
        _environment(place),
        has_lines=True,
        folder=place.folder,
    ) as child:
        yield [lm.Lines(title, child, child=child)]


def _first(place: lm.Place, peers: Sequence[lm.Peer]) -> None:
    """Measure first tokens of new prompts, after a request to the same or to another model."""
    bench, size = place.bench, place.size
    peers = [one for one in peers if _kind(one.name) == "F32"]
    holders = [one for one in peers if not one.name.startswith(("vLLM", RIGHT))]
    for words, before, chosen in (("first token", 0, peers), ("another model wanted", 1, holders)):
        for count in lm.PROMPTS:
            case = f"{size.name}, {words}, prompt of {count}"
            seeds = itertools.count(count << 16 | before << 15)  # so that each prompt is new
            bench.say(f"{case}: measuring")

            def prepare(peer: lm.Peer, before: int = before, seeds: Any = seeds) -> None:
                peer.ask(before, size.prompts(1, lm.PROMPT, next(seeds)), 1)

            def measure(peer: lm.Peer, count: int = count, seeds: Any = seeds) -> Numbers:
                costs = peer.costing(0, size.prompts(1, count, next(seeds)), 1)
                assert [len(tokens) for tokens in costs["tokens"]] == [1]
                first_ms = costs.get("first_ms", costs["took_ms"])
                return {"first_ms": first_ms, "cpu_ms": costs["cpu_ms"]}

            rounds = bench.rounds(2 * ROUNDS, QUICK_ROUNDS)
            bench.trial_loop(case, arms_of(chosen, measure, prepare), rounds)
            _compare(bench, case, chosen, "first_ms")


def _processes(place: lm.Place) -> None:
    """Measure vLLM's switch to another model, for which it needs a new process."""
    bench, size = place.bench, place.size
    case = f"{size.name}, another model wanted, prompt of {lm.PROMPTS[0]}"
    for number in range(bench.rounds(2, 1)):
        bench.say(f"{case}: a process of vLLM")
        began_ms = now_ms()
        with _vllm_server(place):
            bench.record(case, "vLLM, HTTP", number, {"first_ms": now_ms() - began_ms})


def _compare(bench: Run, case: str, peers: Sequence[lm.Peer], *keys: str) -> None:
    """Report our forms over HTTP, each divided by the others with the same type of weights."""
    names = [one.name for one in peers]
    ours = [precision for precision in KINDS if OURS.format(precision) in names]
    for precision, other, key in itertools.product(ours, names, keys):
        own = OURS.format(precision)
        if other != own and _kind(other) == KINDS[precision]:
            both = (bench.values(case, name, key) for name in (own, other))
            share = quantile([a / b for a, b in zip(*both, strict=True)], 0.5)
            words = ", processor's time" if key.startswith("cpu") else ""
            bench.find(f"{case}: {own} / {other}{words}, by pairs, p50", share)


def _kind(name: str) -> str:
    """Return llama.cpp's name for the type of the weights that this peer computes with."""
    kinds = KINDS | {kind: kind for kind in KINDS.values()}
    return next((kind for word, kind in kinds.items() if f" {word}," in name), "F32")
