"""``bench crowd``: who uses little beside a thousand connections, and beside a greedy tenant.

A caller of the gateway, in turns alone and beside a crowd of all kinds in a process of its own
(idle, heads and bodies that are slow, bodies without an end, huge heads, garbage, answers that are
not read, HTTP/2 where it is not spoken, calls that are reset). What is cut comes again. The crowd
is of one address.

Then a modest client, with a key and a token of its own, beside 1, 8 and 64 greedy ones of another
tenant (``greedy.py``): it asks once and waits for the answer, each tenth time with JSON, and
registers and unregisters a small model in each turn. Everything runs on this machine's cores, niced
alike: ``greedy_cores`` and ``controller_cores`` say who had them.

Then an innocent client over all protocols, alone and beside callers of one kind, each of whose
requests is made to cost much; and beside all kinds for ten minutes, with the memory of each process
at rest before and after.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import http.client
import itertools
import json
import os
import re
import select
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import psutil

from pipeswitch.client.client import Client
from pipeswitch.errors import PipeSwitchError
from pipeswitch.planning.fit import quantile
from pipeswitch.programs.generation import METADATA_KEY
from pipeswitch.testing import RunningServer, server
from pipeswitch.wire.keys import KeyFolder, make_pair

from .gateway import SMALL, Http, grpc_caller, infer_message, json_request
from .greedy import MODELS, Doors, X
from .lm_child import letters
from .trials import Arm, Numbers, Run, now_ms

COUNT: Final = 1000
TICK_S: Final = 0.5  # each connection of the crowd does something once in so long
SLICES: Final = 25  # of a tick: not all at once
TURN_S: Final = 4.0
QUICK_TURN_S: Final = 1.5
PAUSE_S: Final = 0.003  # the caller's, between two requests
MAX_P99: Final = 2.0  # of the caller's alone
MAX_MORE_MIB: Final = 64.0
GREEDY: Final = (0, 1, 8, 64)
PROCESSES: Final = 8  # of the greedy ones
MODEST: Final = "modest"
PADDING: Final = "x" * 16  # of a token
TOWER: Final = "benchmarks.factories:tower_24"  # about 2 ms

Child = subprocess.Popen[str]

_HOST: Final = b"Host: localhost\r\n"
_POST: Final = b"POST /v2/models/small/infer HTTP/1.1\r\n" + _HOST


def run(bench: Run, _: Any = ()) -> None:
    """Both cases."""
    _callers(bench)
    _tenants(bench)
    _costly(bench)


def _callers(bench: Run) -> None:
    """One case, two arms."""
    with (
        server(arena="64MiB", host_store="64MiB", http=True) as running,
        running.client() as client,
    ):
        client.register(SMALL.name, SMALL.source, weights="random:0", inputs=SMALL.inputs)
        status = Path("/proc", (running.state_dir / "gateway.lock").read_text().strip(), "status")
        words = (__name__, running.http_address, running.grpc_address, str(COUNT))
        with _child(*words) as crowd, Http(running.http_address) as caller:

            def measured() -> Numbers:
                return _measured(caller, QUICK_TURN_S if bench.is_quick else TURN_S, status)

            arms = [Arm(word, measured, partial(_tell, crowd, word)) for word in ("alone", "crowd")]
            bench.say(f"{COUNT} connections: measuring")
            bench.trial_loop("caller", arms, bench.rounds(8, 3))
            _tell(crowd, "end")
    p99, memory = (
        [quantile(bench.values("caller", arm, key), 0.5) for arm in ("alone", "crowd")]
        for key in ("tail_ms", "memory_mib")
    )
    bench.find("p99 beside the crowd / alone", p99[1] / p99[0], at_most=MAX_P99)
    bench.find(
        "memory beside the crowd - alone", memory[1] - memory[0], "MiB", at_most=MAX_MORE_MIB
    )
    bench.notes.append(f"the crowd: {COUNT} connections, each does something each {TICK_S} s")


def _child(module: str, *words: str) -> Child:
    command, pipe = [sys.executable, "-m", module, *words], subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)


def _tell(child: Child, word: str) -> None:
    """Returns when it is so."""
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write(f"{word}\n")
    child.stdin.flush()
    child.stdout.readline()


def _measured(caller: Http, seconds: float, status: Path) -> Numbers:
    """A turn's requests; the gateway's memory at its end."""
    request = json_request(np.ones((1, 64), np.float32))
    taken_ms, until_ms = [], now_ms() + seconds * 1000
    while now_ms() < until_ms:
        began_ms = now_ms()
        caller.ask(request)
        taken_ms.append(now_ms() - began_ms)
        time.sleep(PAUSE_S)
    resident = re.search(r"VmRSS:\s+(\d+) kB", status.read_text())
    assert resident is not None
    return {
        "median_ms": quantile(taken_ms, 0.5),
        "tail_ms": quantile(taken_ms, 0.99),
        "requests": len(taken_ms),
        "memory_mib": int(resident[1]) / 1024,
    }


# ---- tenants -----------------------------------------------------------------------------------


def _tenants(bench: Run) -> None:
    """A modest one's requests, alone and beside greedy ones of another."""
    seconds = QUICK_TURN_S if bench.is_quick else TURN_S
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pipeswitch-bench-")))
        running, modest, greedy = stack.enter_context(_two_tenants(folder))
        words = f"{__package__}.greedy", str(PROCESSES), json.dumps(dataclasses.asdict(greedy))
        crowd = [
            stack.enter_context(_child(words[0], str(number), *words[1:]))
            for number in range(PROCESSES)
        ]

        def tell(count: int) -> None:
            for child in crowd:
                _tell(child, str(count))

        def measured() -> Numbers:
            return _beside(modest, seconds, [child.pid for child in crowd], running.process.pid)

        arms = [Arm(f"beside {count}", measured, partial(tell, count)) for count in GREEDY]
        bench.say("a modest client beside greedy ones: measuring")
        bench.trial_loop("tenants", arms, bench.rounds(6, 2))
        tell(0)
    found = {
        key: [quantile(bench.values("tenants", arm.name, key), 0.5) for arm in arms]
        for key in ("answers_per_s", "tail_ms")
    }
    for arm, rate, p99_ms in zip(arms, *found.values(), strict=True):
        share, refused = (
            rate / found["answers_per_s"][0],
            bench.values("tenants", arm.name, "refused"),
        )
        bench.find(f"modest {arm.name}: answers a second, of those alone", share)
        bench.find(f"modest {arm.name}: p99", p99_ms, "ms")
        bench.find(f"modest {arm.name}: refused", sum(refused), at_most=0.0)


@contextlib.contextmanager
def _two_tenants(folder: Path) -> Iterator[tuple[RunningServer, Doors, Doors]]:
    """A server; how a modest client comes in, and how greedy ones do."""
    names, roles = ("modest", "greedy"), ("infer", "register")
    keys = KeyFolder(folder / "keys").open()
    server_key = keys.make_server().public.decode()
    secrets = {}
    for name in names:
        secrets[name], public = make_pair(name, folder)
        keys.admit(name, public, roles)
    (tokens := folder / "tokens").touch(0o600)
    tokens.write_text("".join(f"{name} {name}-{PADDING} infer\n" for name in names))
    flags = ("--auth", "keys", "--keys-dir", str(keys.path), "--gateway-tokens", str(tokens))
    with (
        server(arena="160MiB", host_store="512MiB", http=True, args=flags) as running,
        running.client() as client,
    ):
        for name in (MODEST, *MODELS):
            client.register(name, TOWER, weights="random:0", inputs={"input": (X.shape, "float32")})
        row = client.register(SMALL.name, SMALL.source, weights="random:0", inputs=SMALL.inputs)
        bundle = running.state_dir / "models" / row["digest"] / "program.bundle"
        modest, greedy = (
            Doors(running.tcp_address, running.http_address, running.grpc_address,
                  str(secrets[name]), server_key, f"{name}-{PADDING}", str(bundle))
            for name in names
        )  # fmt: skip
        yield running, modest, greedy


def _beside(doors: Doors, seconds: float, crowd: Sequence[int], controller: int) -> Numbers:
    """A turn of the modest one: a registration, then requests one after the other."""
    request = doors.json(MODEST)
    taken: dict[str, list[float]] = defaultdict(list)
    refused: Counter[str] = Counter()

    def ask(what: str, asks: Callable[[], object]) -> None:
        began_ms = now_ms()
        try:
            asks()
        except (PipeSwitchError, RuntimeError, OSError) as error:
            refused[f"{what} {type(error).__name__}: {str(error)[:100]}"] += 1
        else:
            taken[what].append(now_ms() - began_ms)

    with doors.client() as client, Http(doors.http) as caller:
        time.sleep(TICK_S)  # the crowd has begun
        ask("register", lambda: client.register("modest-small", doors.bundle))
        ask("unregister", lambda: client.unregister("modest-small"))
        began_ms, greedy_s, controller_s = now_ms(), _used_s(crowd), _used_s([controller])
        for number in itertools.count(1):
            if number % 10:
                ask("request", lambda: client.infer(MODEST, X))
            else:
                ask("request", lambda: caller.ask(request))
            if now_ms() - began_ms > seconds * 1000:
                break
            time.sleep(PAUSE_S)
    took_s = (now_ms() - began_ms) / 1000
    answers_ms = taken["request"] or [took_s * 1000]
    return {
        "answers_per_s": len(taken["request"]) / took_s,
        "median_ms": quantile(answers_ms, 0.5),
        "tail_ms": quantile(answers_ms, 0.99),
        "register_ms": max(taken["register"], default=None),
        "refused": refused.total(),
        "refusals": dict(refused),
        "greedy_cores": (_used_s(crowd) - greedy_s) / took_s,
        "controller_cores": (_used_s([controller]) - controller_s) / took_s,
    }


def _used_s(pids: Sequence[int]) -> float:
    """Processor time of these processes so far."""
    fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    return sum(int(f[11]) + int(f[12]) for f in fields) / os.sysconf("SC_CLK_TCK")


# ---- callers of one kind, each of whose requests costs much ------------------------------------

ATTACKER, INNOCENT = "127.0.0.2", "127.0.0.3"  # over HTTP; gRPC comes from 127.0.0.1
LONG_IDS: Final = 6 << 20  # 48 MiB
TEXT_MODELS: Final = 8  # of those with an endless template, and of good ones
ENDLESS: Final = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
TEMPLATE: Final = "{% for one in messages %}{{ one.content }}{% endfor %}"
SOAK_S: Final = 600.0
REST_S: Final = 20.0
MAX_TIMES: Final = 5.0  # of the innocent client's p99 alone
MAX_GROWTH: Final = 1.5  # of a process at rest


class Addresses(NamedTuple):
    """Where a server listens."""

    http: str
    grpc: str
    tcp: str


Act = Callable[[Addresses, int], Awaitable[None]]
"""One request of a caller, by its number."""


async def post(to: Addresses, path: str, body: bytes, lines: str = "") -> None:
    """Send a request from the attacker's address over a connection of its own."""
    host, _, port = to.http.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port), local_addr=(ATTACKER, 0))
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n{lines}"
    try:
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        await reader.read()
    finally:
        writer.close()


def chat(model: str, more: str = "") -> bytes:
    """Return the body of a chat; ``more``: JSON of further fields of its message."""
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
        {"name": name, "datatype": "INT64", "shape": value.shape,
         "parameters": {"binary_data_size": value.nbytes}} for name, value in values.items()
    ]  # fmt: skip
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
            await asyncio.wrap_future(client.submit(MODELS[0], X))

    with Client(to.tcp) as client:
        await asyncio.gather(*(one() for _ in range(150)))


ATTACKS: Final[dict[str, tuple[int, Act]]] = {  # how many callers, and what each does
    "JSON of many parts": (60, _many_parts),
    "unread gRPC streams": (16, _unread_stream),
    "8 long prompts": (8, _long_prompt),
    "45 long prompts": (45, _long_prompt),
    "long ids": (4, _long_ids),
    "texts of many models": (2 * TEXT_MODELS, _many_texts),
    "150 open requests": (1, _open_requests),
}


def _costly(bench: Run) -> None:
    """Measure an innocent client alone and beside each kind; then beside all for minutes."""
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
    """Register the innocent client's models, and those of one who means no good."""
    import torch
    import transformers

    owner.register(SMALL.name, SMALL.source, weights="random:0", inputs=SMALL.inputs)
    for name in (MODEST, MODELS[0]):
        owner.register(name, TOWER, weights="random:0", inputs={"input": (X.shape, "float32")})
    owner.register("echo", torch.nn.Hardtanh(), example_inputs=(torch.zeros(1, 1 << 18),))
    config = transformers.GPT2Config(vocab_size=700, n_positions=2048, n_embd=32, n_layer=1,
                                     n_head=4, bos_token_id=None, eos_token_id=None)  # fmt: skip
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
    of_texts = json.loads(head["__metadata__"][METADATA_KEY]) | {"chat_template": template}
    head["__metadata__"][METADATA_KEY] = json.dumps(of_texts)
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + bundle[8 + size :]


Asks = Mapping[str, Callable[[], object]]


@contextlib.contextmanager
def innocent(to: Addresses) -> Iterator[Asks]:
    """Yield what a client asks that has few requests, by its protocol."""
    host, _, port = to.http.rpartition(":")
    caller = http.client.HTTPConnection(host, int(port), 60, source_address=(INNOCENT, 0))

    def asked(path: str, body: bytes) -> None:
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
    tensor = json_request(x).partition(b"\r\n\r\n")[2]
    of_grpc = grpc_caller(to.grpc, SMALL.name, x, "input")
    with contextlib.closing(caller), Client(to.tcp) as client, of_grpc as ask:
        yield {
            "json": lambda: asked(f"/v2/models/{SMALL.name}/infer", tensor),
            "chat": lambda: asked("/v1/chat/completions", chat("chat")),
            "tcp": lambda: client.infer(MODEST, X),
            "grpc": ask,
        }


def turn(asks: Asks, seconds: float) -> Numbers:
    """Ask in turns, wait for each answer, and return the times and refusals."""
    taken: dict[str, list[float]] = defaultdict(list)
    refused: Counter[str] = Counter()
    until_ms = now_ms() + seconds * 1000
    while now_ms() < until_ms:
        for name, ask in asks.items():
            began_ms = now_ms()
            try:
                ask()
            except Exception as error:
                refused[f"{name} {type(error).__name__}: {str(error)[:100]}"] += 1
            taken[name].append(now_ms() - began_ms)
        time.sleep(PAUSE_S)
    tails = {f"{name}_tail_ms": quantile(times, 0.99) for name, times in taken.items()}
    return {**tails, "refused": refused.total(), "refusals": dict(refused)}


@contextlib.contextmanager
def attacked(to: Addresses, name: str) -> Iterator[None]:
    """Run an attack (or all) in a process of its own."""
    with _child(__name__, json.dumps(to), name) as child:
        assert child.stdout is not None
        assert child.stdout.readline(), "the attack did not start"
        yield
        child.kill()


async def attack(to: Addresses, wanted: str) -> None:
    """Run an attack, until the process is killed."""

    async def again(act: Act, number: int) -> None:
        while True:
            with contextlib.suppress(Exception):  # refused or cut, it comes again
                await act(to, number)
            await asyncio.sleep(PAUSE_S)

    chosen = [one for name, one in ATTACKS.items() if wanted in (name, "all")]
    sys.stdout.write("so\n")
    sys.stdout.flush()
    await asyncio.gather(*(again(act, n) for count, act in chosen for n in range(count)))


def _beside_one_kind(bench: Run, name: str, to: Addresses, asks: Asks) -> None:
    def measured(*, is_attacked: bool) -> Numbers:
        with attacked(to, name) if is_attacked else contextlib.nullcontext():
            turn(asks, TICK_S)  # what was asked before is over then, or what comes has begun
            return turn(asks, 2 * (QUICK_TURN_S if bench.is_quick else TURN_S))

    bench.say(f"{name}: measuring")
    arms = [
        Arm("alone", partial(measured, is_attacked=False)),
        Arm("beside", partial(measured, is_attacked=True)),
    ]
    bench.trial_loop(name, arms, bench.rounds(4, 1), warmup=0)
    for what in asks:
        times = [quantile(bench.values(name, arm.name, f"{what}_tail_ms"), 0.5) for arm in arms]
        bench.find(f"{name}: p99 of {what} / alone", times[1] / times[0], at_most=MAX_TIMES)
    bench.find(f"{name}: refused", sum(bench.values(name, "beside", "refused")), at_most=0.0)


def soak(bench: Run, to: Addresses, asks: Asks, server_pid: int) -> None:
    """Attack in all ways at once for minutes; compare memory at rest before and after."""
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
    """Return the private memory of a server's processes; of each kind, that of the largest.

    Shared memory (arena, pool, store, shares) has sizes of its own, and counts to a process only
    for as long as no other one has it mapped: it is left out.
    """
    found: dict[str, float] = {}
    for one in [psutil.Process(server_pid), *psutil.Process(server_pid).children(recursive=True)]:
        with contextlib.suppress(psutil.Error):  # it has ended
            kind = "controller" if one.pid == server_pid else one.name().rstrip("0123456789")
            kind = next((word for word in one.cmdline() if ".gateway." in word), kind)
            maps = [m for m in one.memory_maps() if not m.path.startswith("/memfd:")]
            private = sum(m.private_clean + m.private_dirty for m in maps)
            found[kind] = max(found.get(kind, 0.0), private / (1 << 20))
    return found


# ---- the crowd, in a process of its own -------------------------------------------------------


def _frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """One of HTTP/2."""
    return (
        struct.pack(">I", len(payload))[1:]
        + bytes([kind, flags])
        + struct.pack(">I", stream)
        + payload
    )


def _resets(first: int) -> bytes:
    """Ten calls of gRPC, each taken back at once."""
    fields = {
        b":method": b"POST", b":scheme": b"http", b":authority": b"localhost",
        b":path": b"/inference.GRPCInferenceService/ServerLive", b"te": b"trailers",
        b"content-type": b"application/grpc",
    }  # fmt: skip
    head = b"".join(
        b"\x00" + bytes([len(name)]) + name + bytes([len(value)]) + value
        for name, value in fields.items()
    )
    streams = range(first, first + 20, 2)
    return b"".join(_frame(1, 4, s, head) + _frame(3, 0, s, b"\0\0\0\x08") for s in streams)


_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(4, 0, 0)
_KINDS: Final[tuple[tuple[bytes, bytes, bool], ...]] = (  # at first, each tick, whether it reads
    (b"", b"", True),
    (_POST + b"A: ", b"x", True),
    (_POST + b"Content-Length: 60000000\r\n\r\n", b"x" * 100, True),
    (_POST + b"Content-Length: 60000000\r\n\r\n", b"x" * 65536, True),
    (_POST + b"Transfer-Encoding: chunked\r\n\r\n", b"4000\r\n" + b"x" * 0x4000 + b"\r\n", True),
    (_POST + b"A: " + b"x" * 60_000, b"x", True),
    (b"GET / HTTP/1.1\r\n\r\nGET\r\n\r\n" * 100, b"G\r\n", True),
    ((b"GET /v2 HTTP/1.1\r\n" + _HOST + b"\r\n") * 300, b"", False),
    (_PREFACE, _resets(1), True),
)


class _One:
    """A connection that comes again when it is cut; its last kind speaks to gRPC."""

    def __init__(self, number: int, http: str, grpc: str) -> None:
        self._opening, self._more, self._reads = _KINDS[number % len(_KINDS)]
        self._is_grpc = number % len(_KINDS) == len(_KINDS) - 1 and number % 2 == 0
        host, _, port = (grpc if self._is_grpc else http).rpartition(":")
        self._address = host, int(port)
        self._socket: socket.socket | None = None
        self._unsent = b""  # of the opening
        self._stream = 1

    def act(self) -> None:
        """Connect, or send on and read what there is."""
        try:
            if self._socket is None:
                self._socket, self._unsent, self._stream = socket.socket(), self._opening, 1
                self._socket.settimeout(0)
                self._socket.connect(self._address)
            if self._unsent:
                self._socket.send(self._unsent)
                self._unsent = b""
            elif self._is_grpc:
                self._more, self._stream = _resets(self._stream), self._stream + 20
                self._socket.send(self._more)
            elif self._more:
                self._socket.send(self._more)
            if self._reads and not self._socket.recv(1 << 16):
                self.end()
        except BlockingIOError:
            return
        except OSError:
            self.end()

    def end(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def crowd(http: str, grpc: str, count: int) -> None:
    """``crowd``, ``alone`` or ``end`` on standard input; answered when it is so."""
    ones = [_One(number, http, grpc) for number in range(count)]
    word, turn = "alone", 0
    while word != "end":
        waits_s = TICK_S / SLICES if word == "crowd" else None
        if select.select([sys.stdin], [], [], waits_s)[0]:
            word = sys.stdin.readline().strip() or "end"
            for one in ones:
                one.act() if word == "crowd" else one.end()
            sys.stdout.write("so\n")
            sys.stdout.flush()
        elif word == "crowd":
            turn += 1
            for one in ones[turn % SLICES :: SLICES]:
                one.act()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        if len(sys.argv) == 3:
            asyncio.run(attack(Addresses(*json.loads(sys.argv[1])), sys.argv[2]))
        else:
            crowd(sys.argv[1], sys.argv[2], int(sys.argv[3]))
