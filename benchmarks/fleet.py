"""``bench fleet``: what a cluster costs a request, and Ray Serve's model multiplexing beside it.

Arms, in turns, one caller, all on loopback: *cluster* (``Client("cluster")`` of one node), *node*
(the same client at that node's own address), *alone* (the same client at a server outside of any
cluster, with the same settings), *serve-http* and *serve-handle* (Ray Serve with the same weights,
asked over a connection that is kept, and through its own Python handle). Ray Serve is installed
apart, in the folder that ``PIPESWITCH_BENCH_RIVALS`` names.

Arena and replica hold one of two twins: asking for the other one is always cold.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import json
import math
import os
import random
import secrets
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from pipeswitch.client.client import Client
from pipeswitch.cluster.actors import _keys
from pipeswitch.planning.fit import quantile
from pipeswitch.testing import server

from .gateway import RIVALS_FOLDER, SMALL, Http, _post
from .models import MODELS, BenchModel
from .serving import SLICE_ROOM_BYTES, TWINS
from .setting import Setting, end, read_line
from .trials import Numbers, Run, now_ms, paired_differences

LARGE: Final = "resnet18"
WARMUP: Final = 3
MAX_SHARE: Final = 1.05  # of the same client without a cluster
ARMS: Final = ("cluster", "node", "alone", "serve-http", "serve-handle")
Answer = tuple[Any, bool]  # the output, flat, and whether its model had to come first
ToEnd = contextlib.ExitStack


@dataclass
class Asked:
    """A server as one caller sees it: ``ask`` says what a request took, in milliseconds."""

    ask: Callable[[str], tuple[float, Answer]]
    here: list[str] = field(default_factory=lambda: [TWINS[1]])  # the twin that was asked last


def run(bench: Run, models: Any = ()) -> None:
    """Resident models, then twins of which one is always elsewhere."""
    (large,) = models or (LARGE,)
    with ToEnd() as stack:
        # Ray's sockets want a short name.
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fleet-", dir="/tmp")))
        settings = _settings(bench, MODELS[large], root)
        bench.say("starting a server, a cluster and its rival")
        asked = _ours(bench, settings, root, stack) | _rival(bench, settings, root, stack)
        _compare(bench, asked, SMALL.name, bench.rounds(400, 60), is_resident=True)
        _compare(bench, asked, large, bench.rounds(100, 15), is_resident=True)
        _compare(bench, asked, large, bench.rounds(60, 10), is_resident=False)
    bench.notes.append("cluster: one node, so that both twins are where the arena holds one")
    bench.notes.append("in a round the arms take turns by lot; each asks once before it is timed")
    bench.notes.append("both Rays ask for their token and run beside all arms, idle or not")


def _settings(bench: Run, large: BenchModel, root: Path) -> dict[str, Setting]:
    """Of each model by its name: two twins of other weights, and a small one."""
    found = {}
    for number, (name, model) in enumerate([*((twin, large) for twin in TWINS),
                                            (SMALL.name, SMALL)]):  # fmt: skip
        (root / name).mkdir()
        found[name] = Setting(model, root / name, bench.threads, bench.seed + number)
        found[name].write_files()
    return found


def _compare(
    bench: Run, asked: Mapping[str, Asked], model: str, rounds: int, *, is_resident: bool
) -> None:
    case = f"{model}, {'resident' if is_resident else 'cold'}"
    bench.say(f"{case}: measuring")
    order, rng = list(asked), random.Random(bench.seed)
    for number in range(-WARMUP, rounds):
        rng.shuffle(order)  # who follows whom costs more than what is compared
        for name in order:
            numbers = _trial(asked[name], model, is_resident=is_resident)
            if number >= 0:
                bench.record(case, name, number, numbers)
    times = {name: bench.values(case, name, "total_ms") for name in asked}
    more = quantile(paired_differences(times["cluster"], times["alone"]), 0.5)
    bench.find(f"{case}: cluster - alone, pairs' p50", more, "ms")
    for name in [name for name in asked if name != "cluster"]:
        for word, share in (("p50", 0.5), ("p99", 0.99)):
            value = quantile(times["cluster"], share) / quantile(times[name], share)
            is_target = (name, word, is_resident) == ("alone", "p50", True)
            bench.find(f"{case}: {word}, cluster / {name}", value,
                       at_most=MAX_SHARE if is_target else None)  # fmt: skip
    _check_answers(bench, case)


def _trial(one: Asked, model: str, *, is_resident: bool) -> Numbers:
    """After one that is not timed: a caller's next request finds its server awake."""
    name = model if model == SMALL.name else one.here[0]
    one.ask(name)
    if not is_resident:
        name = next(twin for twin in TWINS if twin != name)
        one.here[0] = name
    took_ms, (y, is_cold) = one.ask(name)
    if is_cold == is_resident:
        raise RuntimeError(f"{name} was {'' if is_cold else 'not '}elsewhere: no such trial")
    return {"total_ms": took_ms, "model": name, "checksum": float(np.sum(y, dtype=np.float64))}


def _check_answers(bench: Run, case: str) -> None:
    """Ours are equal, Serve's as near as another way to compute them is."""
    trials = [trial for trial in bench.trials if trial["case"] == case]
    wanted = {one["model"]: one["checksum"] for one in trials if one["arm"] == "cluster"}
    for one in trials:
        tolerance = 0.0 if one["arm"] in ARMS[:3] else 1e-4
        if not math.isclose(one["checksum"], wanted[one["model"]], rel_tol=tolerance):
            raise RuntimeError(f"{one['arm']} answers otherwise than cluster: {one}")


# ---- ours ----------------------------------------------------------------------------------------


def _ours(
    bench: Run, settings: Mapping[str, Setting], root: Path, stack: ToEnd
) -> dict[str, Asked]:
    room = settings[TWINS[0]].model.room_bytes
    store = 4 * room + 2 * SLICE_ROOM_BYTES
    threads = ("--threads", str(bench.threads), "--allow-code", "*")
    folder, secret, keys, _ = _keys(root / "alone")
    alone = stack.enter_context(server(
        arena=str(room + SLICE_ROOM_BYTES), host_store=str(store),
        args=("--auth", "keys", "--keys-dir", str(folder.path), *threads),
    ))  # fmt: skip
    address = stack.enter_context(_cluster(root, "--device", "cpu", "--arena",
                                           str(room + SLICE_ROOM_BYTES), "--host-store",
                                           str(store), *threads))  # fmt: skip
    at_node = root / "nodes" / "node-0" / "keys"
    clients = {
        "cluster": Client("cluster"),
        "node": Client(address, key=at_node / "cluster.key_secret",
                       server_key=at_node / "server.key"),
        "alone": Client(alone.tcp_address, key=secret, server_key=keys.server.decode()),
    }  # fmt: skip
    for client in clients.values():
        stack.enter_context(client)
    inputs = {}
    for name, setting in settings.items():
        with np.load(setting.order()["inputs_path"]) as arrays:
            inputs[name] = {key: arrays[key] for key in arrays.files}
        for client in (clients["cluster"], clients["alone"]):
            client.register(name, setting.model.source, weights=f"random:{setting.seed}",
                            inputs=setting.model.inputs)  # fmt: skip

    def ask(client: Client, name: str) -> tuple[float, Answer]:
        began_ms = now_ms()
        result = client.infer(name, *inputs[name].values())
        took_ms = now_ms() - began_ms
        (y,) = result.outputs.values()
        return took_ms, (y, not result.timing.resident)

    asked = {name: Asked(functools.partial(ask, client)) for name, client in clients.items()}
    asked["node"].here = asked["cluster"].here
    return asked


@contextlib.contextmanager
def _cluster(root: Path, *flags: str) -> Iterator[str]:
    """A Ray of its own; the address of its one node."""
    before = dict(os.environ)  # Ray adds to it
    (root / "token").write_text(secrets.token_hex(32))
    (root / "token").chmod(0o600)
    os.environ |= {"RAY_TMPDIR": str(root), "RAY_AUTH_TOKEN_PATH": str(root / "token")}
    pipeswitch = [sys.executable, "-P", "-c", "from pipeswitch.cli.main import main; main()"]
    process = subprocess.Popen(
        [*pipeswitch, "cluster", "up", "--local", "1", "--state-dir", str(root / "nodes"), "--",
         *flags], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        if "is ready" not in (line := process.stdout.readline()):
            raise RuntimeError(line + process.stdout.read())
        os.environ["RAY_ADDRESS"] = line.partition(" at ")[2].rpartition(": ")[0]
        status = subprocess.run([*pipeswitch, "cluster", "status", "--json"],
                                capture_output=True, check=True)  # fmt: skip
        yield json.loads(status.stdout)["nodes"][0]["address"]
    finally:
        process.terminate()
        process.communicate()
        os.environ.clear()
        os.environ.update(before)


# ---- the rival -----------------------------------------------------------------------------------


def _rival(
    bench: Run, settings: Mapping[str, Setting], root: Path, stack: ToEnd
) -> dict[str, Asked]:
    """Empty: it is not installed."""
    folder = Path(os.environ.get(RIVALS_FOLDER) or os.devnull)
    if not [*folder.glob("lib/python*/site-packages/ray/serve")]:
        why = f"{RIVALS_FOLDER} names no virtual environment that has ray[serve]"
        bench.skip(dict.fromkeys(ARMS[3:], why))
        return {}
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    (root / "serve").mkdir()
    order = {
        "port": port, "threads": bench.threads,
        "path": [str(Path(__file__).parents[1]), *sys.path[1:]],
        "models": {name: setting.order() for name, setting in settings.items()},
    }  # fmt: skip
    ours = ("PYTHONPATH", "RAY_ADDRESS")
    environment = {key: text for key, text in os.environ.items() if key not in ours}
    child = subprocess.Popen(
        [folder / "bin" / "python", "-P", Path(__file__).with_name("rival_rayserve.py"),
         json.dumps(order)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        env=environment | {"RAY_AUTH_MODE": "token", "RAY_TMPDIR": str(root / "serve"),
                           "RAY_worker_niceness": "0"},  # as "cluster up" has it
    )  # fmt: skip
    stack.callback(_end, child)
    read_line(child)
    http = stack.enter_context(Http(f"127.0.0.1:{port}"))
    requests = {}
    for name, setting in settings.items():
        with np.load(setting.order()["inputs_path"]) as arrays:
            body = arrays[arrays.files[0]].tobytes()
        requests[name] = _post("/", body, f"serve_multiplexed_model_id: {name}\r\n")

    def over_http(name: str) -> tuple[float, Answer]:
        began_ms = now_ms()
        found = http.ask(requests[name])
        return now_ms() - began_ms, _read(found)

    def by_handle(name: str) -> tuple[float, Answer]:
        assert child.stdin is not None
        child.stdin.write(f"{name}\n")
        child.stdin.flush()
        line = read_line(child)
        return line["total_ms"], _read(base64.b64decode(line["answer"]))

    here = [TWINS[1]]  # one replica
    return {"serve-http": Asked(over_http, here), "serve-handle": Asked(by_handle, here)}


def _read(answer: bytes) -> Answer:
    return np.frombuffer(answer, np.float32, offset=1), answer[0] == 1


def _end(child: subprocess.Popen[str]) -> None:
    """Its standard input is at its end: it stops Serve and Ray."""
    assert child.stdin is not None
    child.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(30.0)
    end(child)
