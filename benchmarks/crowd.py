"""``bench crowd``: one modest client while other clients (attackers) send expensive requests.

The modest client is measured over all protocols: alone, during each kind of attack, and during all
attacks at once for ten minutes. The memory of each server process is measured before and after
these ten minutes, while no client sends. Each attack runs in its own process.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import struct
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import psutil

from pipeswitch.base.quantiles import quantile
from pipeswitch.client.client import Client
from pipeswitch.testing import server

from .gateway import infer_message, infer_path, json_request
from .lm_child import letters
from .models import SMALL
from .trials import Arm, Numbers, Run, now_ms

TURN_S: Final = 4.0
QUICK_TURN_S: Final = 1.5
SETTLE_S: Final = 0.5  # unmeasured time in which earlier requests end and an attack begins
PAUSE_S: Final = 0.003  # pause between two requests of a caller
MODEST, GREEDY = "modest", "greedy"
TOWER: Final = "benchmarks.factories:tower_24"  # one run takes about 2 ms
X: Final = np.ones((1, 512), np.float32)
ATTACKER, INNOCENT = "127.0.0.2", "127.0.0.3"  # callers' addresses over HTTP; gRPC uses 127.0.0.1
LONG_IDS: Final = 6 << 20  # number of token ids in a long input, which takes 48 MiB
TEXT_MODELS: Final = 8  # number of models with an endless chat template; as many have a good one
ENDLESS: Final = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
TEMPLATE: Final = "{% for one in messages %}{{ one.content }}{% endfor %}"
SOAK_S: Final = 600.0
REST_S: Final = 20.0
MAX_TIMES: Final = 5.0  # limit of the modest client's p99 during an attack / its p99 alone
MAX_GROWTH: Final = 1.5  # limit of a process's memory at rest after all attacks / before them


class Addresses(NamedTuple):
    """Addresses on which a server listens."""

    http: str
    grpc: str
    tcp: str


Act = Callable[[Addresses, int], Awaitable[None]]
"""Function that sends one attacking request, given the server's addresses and a caller's number."""


async def post(to: Addresses, path: str, body: bytes, lines: str = "") -> None:
    """Send a request from the attacker's address over a new connection, and read the answer."""
    host, _, port = to.http.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port), local_addr=(ATTACKER, 0))
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n{lines}"
    try:
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        await reader.read()
    finally:
        writer.close()


def chat(model: str, more: str = "") -> bytes:
    """Return the body of a chat request; ``more`` has further JSON fields of its only message."""
    message = f'{{"role":"user","content":"ab"{more}}}'
    return f'{{"model":"{model}","max_tokens":4,"messages":[{message}]}}'.encode()


async def _many_parts(to: Addresses, _: int) -> None:
    parts = "{}," * 340_000 + "{}"
    await post(to, "/v1/chat/completions", chat("chat", f',"x":[{parts}]'))


async def _unread_stream(to: Addresses, _: int) -> None:
    import grpc.aio

    message = infer_message("echo", np.zeros((1, 1 << 18), np.float32), "x")
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(to.grpc, options) as channel:
        call = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")()
        while True:
            await call.write(message)


async def _long_prompt(to: Addresses, _: int) -> None:
    body = {"model": "chat", "prompt": "ab " * 43_690, "max_tokens": 4}
    await post(to, "/v1/completions", json.dumps(body).encode())


async def _long_ids(to: Addresses, number: int) -> None:
    count, used = np.array([LONG_IDS]), np.array([0])
    values: dict[str, Any] = {
        "ids": np.zeros((1, LONG_IDS), np.int64),
        "count": count,
        "used": used,
    }
    if number % 2:
        with Client(to.tcp) as client, client.sequence("chat") as sequence:
            await asyncio.to_thread(sequence.infer, **values)
    rows = [
        {
            "name": name,
            "datatype": "INT64",
            "shape": value.shape,
            "parameters": {"binary_data_size": value.nbytes},
        }
        for name, value in values.items()
    ]
    head = json.dumps({"inputs": rows, "parameters": {"sequence_id": 1, "sequence_start": True}})
    body = b"".join([head.encode(), *values.values()])
    line = f"Inference-Header-Content-Length: {len(head)}\r\n"
    await post(to, "/v2/models/chat/infer", body, line)


async def _many_texts(to: Addresses, number: int) -> None:
    kind = "words" if number % 2 else "endless"
    await post(to, "/v1/chat/completions", chat(f"{kind}-{number // 2}"))


async def _open_requests(to: Addresses, _: int) -> None:
    async def one() -> None:
        while True:
            await asyncio.wrap_future(client.submit(GREEDY, X))

    with Client(to.tcp) as client:
        await asyncio.gather(*(one() for _ in range(150)))


ATTACKS: Final[dict[str, tuple[int, Act]]] = {  # attack -> number of callers, and their action
    "JSON of many parts": (60, _many_parts),
    "unread gRPC streams": (16, _unread_stream),
    "8 long prompts": (8, _long_prompt),
    "45 long prompts": (45, _long_prompt),
    "long ids": (4, _long_ids),
    "texts of many models": (2 * TEXT_MODELS, _many_texts),
    "150 open requests": (1, _open_requests),
}


def run(bench: Run, _: Any = ()) -> None:
    """Measure a modest client alone and during each attack, then during all attacks for minutes."""
    options: Any = {"arena": "256MiB", "http": True, "tcp_roles": ("infer", "register")}
    with (
        server(**options) as running,
        running.client() as owner,
        running.client(tcp=True) as stranger,
    ):
        register(owner, stranger, running.state_dir)
        to = Addresses(running.http_address, running.grpc_address, running.tcp_address)
        with innocent(to) as asks:
            for name in ATTACKS:
                _beside_one_kind(bench, name, to, asks)
            soak(bench, to, asks, running.pid)


def register(owner: Client, stranger: Client, folder: Path) -> None:
    """Register the models of the modest client and of the attackers."""
    import torch
    import transformers

    owner.register(SMALL.name, SMALL.source, weights="random:0", inputs=SMALL.inputs)
    for name in (MODEST, GREEDY):
        owner.register(name, TOWER, weights="random:0", inputs={"input": (X.shape, "float32")})
    owner.register("echo", torch.nn.Hardtanh(), example_inputs=(torch.zeros(1, 1 << 18),))
    config = transformers.GPT2Config(
        vocab_size=700,
        n_positions=2048,
        n_embd=32,
        n_layer=1,
        n_head=4,
        bos_token_id=None,
        eos_token_id=None,
    )
    tokenizer = letters(config.vocab_size)
    tokenizer.chat_template = TEMPLATE
    model = transformers.GPT2LMHeadModel(config).eval()
    row = owner.register("chat", model, generate=True, tokenizer=tokenizer)
    bundle = (folder / "models" / row["digest"] / "program.bundle").read_bytes()
    for kind, template in (("words", TEMPLATE), ("endless", ENDLESS)):
        for number in range(TEXT_MODELS):
            copy = folder.parent / "copy.bundle"
            copy.write_bytes(_with_template(bundle, f"{{# {number} #}}{template}"))
            stranger.register(f"{kind}-{number}", copy)


def _with_template(bundle: bytes, template: str) -> bytes:
    """Return a language model's bundle with another chat template."""
    (size,) = struct.unpack_from("<Q", bundle)
    head = json.loads(bundle[8 : 8 + size])
    metadata, key = head["__metadata__"], "pipeswitch.generation"
    metadata[key] = json.dumps(json.loads(metadata[key]) | {"chat_template": template})
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + bundle[8 + size :]


Asks = Mapping[str, Callable[[], object]]


@contextlib.contextmanager
def innocent(to: Addresses) -> Iterator[Asks]:
    """Yield a function for each protocol; it sends one request of the modest client."""
    import grpc

    host, _, port = to.http.rpartition(":")
    caller = http.client.HTTPConnection(host, int(port), 60, source_address=(INNOCENT, 0))

    def post_to(path: str, body: bytes) -> None:
        try:
            caller.request("POST", path, body)
            answer = caller.getresponse()
            text = answer.read()
        except OSError:
            caller.close()  # the next request connects again
            raise
        if answer.status != 200:
            raise RuntimeError(f"{answer.status} {text[:100]!r}")

    x = np.ones((1, 64), np.float32)
    tensor = json_request({"input": x}, infer_path(SMALL.name)).partition(b"\r\n\r\n")[2]
    message = infer_message(SMALL.name, x, "input")
    channel = grpc.insecure_channel(to.grpc)
    infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
    with contextlib.closing(caller), Client(to.tcp) as client, channel:
        yield {
            "json": lambda: post_to(infer_path(SMALL.name), tensor),
            "chat": lambda: post_to("/v1/chat/completions", chat("chat")),
            "tcp": lambda: client.infer(MODEST, X),
            "grpc": lambda: infer(message, timeout=60),
        }


def turn(asks: Asks, seconds: float) -> Numbers:
    """Send requests over each protocol in turn for some seconds; return p99 times and refusals."""
    times_ms: dict[str, list[float]] = defaultdict(list)
    refused: Counter[str] = Counter()
    until_ms = now_ms() + seconds * 1000
    while now_ms() < until_ms:
        for name, ask in asks.items():
            began_ms = now_ms()
            try:
                ask()
            except Exception as error:
                refused[f"{name} {type(error).__name__}: {str(error)[:100]}"] += 1
            times_ms[name].append(now_ms() - began_ms)
        time.sleep(PAUSE_S)
    tails = {f"{name}_tail_ms": quantile(times, 0.99) for name, times in times_ms.items()}
    return {**tails, "refused": refused.total(), "refusals": dict(refused)}


@contextlib.contextmanager
def attacked(to: Addresses, name: str) -> Iterator[None]:
    """Run one attack, or with ``all`` every attack, in another process during the block."""
    command = [sys.executable, "-m", __name__, json.dumps(to), name]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline(), "the attack did not start"
        yield
        child.kill()


async def attack(to: Addresses, chosen_name: str) -> None:
    """Run one attack, or with ``all`` every attack, until the process is killed."""

    async def again(act: Act, number: int) -> None:
        while True:
            with contextlib.suppress(Exception):  # refused or disconnected: try again
                await act(to, number)
            await asyncio.sleep(PAUSE_S)

    chosen = [one for name, one in ATTACKS.items() if chosen_name in (name, "all")]
    sys.stdout.write("so\n")
    sys.stdout.flush()
    await asyncio.gather(*(again(act, n) for count, act in chosen for n in range(count)))


def _beside_one_kind(bench: Run, name: str, to: Addresses, asks: Asks) -> None:
    def measured(*, is_attacked: bool) -> Numbers:
        with attacked(to, name) if is_attacked else contextlib.nullcontext():
            turn(asks, SETTLE_S)
            return turn(asks, 2 * (QUICK_TURN_S if bench.is_quick else TURN_S))

    bench.say(f"{name}: measuring")
    arms = [
        Arm("alone", partial(measured, is_attacked=False)),
        Arm("beside", partial(measured, is_attacked=True)),
    ]
    bench.trial_loop(name, arms, bench.rounds(4, 1), warmup=0)
    for what in asks:
        times = [bench.p50(name, arm.name, f"{what}_tail_ms") for arm in arms]
        bench.find(f"{name}: p99 of {what} / alone", times[1] / times[0], at_most=MAX_TIMES)
    bench.find(f"{name}: refused", sum(bench.values(name, "beside", "refused")), at_most=0.0)


def soak(bench: Run, to: Addresses, asks: Asks, server_pid: int) -> None:
    """Run all attacks at once for minutes; compare the processes' memory before and after them."""
    seconds = SOAK_S / 10 if bench.is_quick else SOAK_S
    bench.say(f"all at once: {seconds:.0f} s")
    turn(asks, QUICK_TURN_S)
    before = _memory_mib(server_pid)
    with attacked(to, "all"):
        bench.record("all at once", "beside", 0, turn(asks, seconds))
    turn(asks, REST_S)
    time.sleep(REST_S)
    after = _memory_mib(server_pid)
    bench.record("all at once", "memory", 0, {"before_mib": before, "after_mib": after})
    for name, mib in after.items():
        growth = mib / before.get(name, mib)
        bench.find(f"{name}: memory at rest after / before", growth, at_most=MAX_GROWTH)


def _memory_mib(server_pid: int) -> dict[str, float]:
    """Return, for each kind of server process, the largest private memory of one process in MiB.

    Shared memory (arena, pool, store, shares) is left out: its sizes are fixed, and it counts for a
    process only while no other process has mapped it.
    """
    private_mib: dict[str, float] = {}
    for one in [psutil.Process(server_pid), *psutil.Process(server_pid).children(recursive=True)]:
        with contextlib.suppress(psutil.Error):  # the process has ended
            kind = "controller" if one.pid == server_pid else one.name().rstrip("0123456789")
            kind = next((word for word in one.cmdline() if ".gateway." in word), kind)
            maps = [m for m in one.memory_maps() if not m.path.startswith("/memfd:")]
            private = sum(m.private_clean + m.private_dirty for m in maps)
            private_mib[kind] = max(private_mib.get(kind, 0.0), private / (1 << 20))
    return private_mib


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(attack(Addresses(*json.loads(sys.argv[1])), sys.argv[2]))
