"""Workers and the gateway without descriptors, memory or threads: other requests are served.

Requests that cannot be served get one clear error and succeed later.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import resource
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import process_tools as tools
import psutil
import pytest
import torch

from benchmarks.gateway import infer_message
from pipeswitch.base import errors

grpc = pytest.importorskip("grpc", reason="make installs it")

MIB = 1 << 20
SMALL = torch.linspace(-1, 1, 64).reshape(1, 64)
ONE, LARGE = np.ones((1, 64), np.float32), np.ones((1, MIB), np.float32)


WIDE = 12 * MIB  # floats: 48 MiB, more than an allocator keeps for the next request


class Wide(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.repeat(1, WIDE)


@pytest.fixture(scope="module")
def running() -> Iterator[tools.Checked]:
    options: Any = {"arena": "64MiB", "http": True, "args": ("--gateway-roles", "infer")}
    with tools.checked_server(**options) as checked:  # no failpoints, so workers are sandboxed
        checked.client.register("small", tools.mlp(64, 2, 1), example_inputs=(SMALL,))
        checked.client.register("wide", Wide(), example_inputs=(torch.zeros(1, 1),))
        checked.client.register("echo", torch.nn.Hardtanh(), example_inputs=(torch.zeros(1, MIB),))
        yield checked


@pytest.fixture(autouse=True)
def is_whole_afterwards(running: tools.Checked) -> Iterator[None]:
    yield
    running.wait_until_whole()
    assert wide(running) == WIDE
    answers(running)
    running.wait_until_whole()  # no worker still has the wide answer when the next test measures


def answers(checked: tools.Checked) -> None:
    output = checked.client.submit("small", SMALL).result(30)["y"]
    assert tools.is_bit_equal(output, tools.eager(tools.mlp(64, 2, 1), SMALL))


def wide(checked: tools.Checked) -> float:
    return float(checked.client.submit("wide", torch.ones(1, 1)).result(30)["y"].sum())


@contextlib.contextmanager
def limited(pids: Iterable[int], kind: int, more: int) -> Iterator[None]:
    """Limit resource ``kind`` of processes to their present use plus ``more``, in the block."""
    old = [(pid, resource.prlimit(pid, kind)) for pid in pids]
    for pid, (_, hard) in old:
        data = int(Path("/proc", str(pid), "statm").read_text().split()[5]) * resource.getpagesize()
        has = data if kind == resource.RLIMIT_DATA else len(os.listdir(f"/proc/{pid}/fd"))
        resource.prlimit(pid, kind, (has + more, hard))
    try:
        yield
    finally:
        for pid, limit in old:
            with contextlib.suppress(ProcessLookupError):  # the process was replaced
                resource.prlimit(pid, kind, limit)


def accepted(pid: int) -> list[Any]:
    """Return a process' TCP connections; those that only listen do not count."""
    links = psutil.Process(pid).net_connections("tcp")
    return [one for one in links if one.status != psutil.CONN_LISTEN]


def test_workers_without_descriptors_take_a_new_model(running: tools.Checked) -> None:
    """Register a model, whose files workers get as descriptors, although they may open no more."""
    with limited(running.worker_pids().values(), resource.RLIMIT_NOFILE, 0):
        running.client.register("fresh", tools.mlp(64, 3, 2), example_inputs=(SMALL,))
        output = running.client.submit("fresh", SMALL).result(60)["y"]
        assert tools.is_bit_equal(output, tools.eager(tools.mlp(64, 3, 2), SMALL))


def test_workers_without_memory_refuse_what_is_large_alone(running: tools.Checked) -> None:
    pids = running.worker_pids()
    with limited(pids.values(), resource.RLIMIT_DATA, MIB):
        for _ in range(3):
            with pytest.raises(errors.TaskFailed, match="memory"):
                wide(running)
            answers(running)
    assert running.worker_pids() == pids, "none of them died"


def test_a_worker_whose_threads_cannot_start_is_started_again(running: tools.Checked) -> None:
    """Limit the fork server, and so a new worker, to less memory than a thread's stack."""
    worker = running.worker_pids()[0]
    with limited([running.fork_server_pid()], resource.RLIMIT_DATA, 4 * MIB):
        tools.kill(worker)
        tools.until(lambda: "can't start new thread" in running.running.log(), "it cannot start")
        answers(running)
    tools.until(lambda: running.worker_pids().get(0, worker) != worker, "there is another one")


def test_a_gateway_without_descriptors_takes_later_who_waits(running: tools.Checked) -> None:
    assert status(running, "small", ONE) == 200
    pid, statuses = running.gateway_pid(), []
    # The limit counts open descriptors: that of the request above must be closed by then.
    tools.until(lambda: not accepted(pid), "the gateway has closed the connection")
    asks = threading.Thread(target=lambda: statuses.append(status(running, "small", ONE)))
    with limited([pid], resource.RLIMIT_NOFILE, 0):
        asks.start()
        tools.until(lambda: "Too many open files" in running.running.log(), "it cannot accept")
        assert not statuses
    asks.join(60)
    assert (statuses, running.gateway_pid()) == ([200], pid)
    with grpc.insecure_channel(running.running.grpc_address) as channel:
        infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        infer(infer_message("small", ONE, "x"), timeout=60)


def status(checked: tools.Checked, model: str, x: np.ndarray[Any, Any]) -> int:
    """Send a request on a new HTTP connection; return the status, or 0 if the connection broke."""
    tensor = {"name": "x", "shape": x.shape, "datatype": "FP32"}
    head = json.dumps({"inputs": [{**tensor, "parameters": {"binary_data_size": x.nbytes}}]})
    lines = {"Inference-Header-Content-Length": str(len(head))}
    caller = http.client.HTTPConnection(checked.running.http_address, timeout=60)
    with contextlib.closing(caller), contextlib.suppress(OSError):
        caller.request("POST", f"/v2/models/{model}/infer", head.encode() + x.tobytes(), lines)
        answer = caller.getresponse()
        answer.read()
        return answer.status
    return 0


def test_a_gateway_without_memory_or_threads_goes_on(running: tools.Checked) -> None:
    pid = running.gateway_pid()
    with limited([pid], resource.RLIMIT_DATA, -MIB):
        for _ in range(3):
            assert status(running, "echo", LARGE) in (0, 200, 429, 503)
        assert status(running, "small", ONE) == 200
    assert status(running, "echo", LARGE) == 200
    assert running.gateway_pid() == pid


def test_a_gateway_without_memory_refuses_long_json(running: tools.Checked) -> None:
    """Leave the gateway memory for the bytes of the JSON, but not for the decoded values."""
    pid, statuses = running.gateway_pid(), []
    tensor = {"name": "x", "shape": ONE.shape, "datatype": "FP32", "data": ONE.tolist()}
    body = json.dumps({"id": "x" * 4 * MIB, "inputs": [tensor]})
    with limited([pid], resource.RLIMIT_DATA, 9 * MIB):
        for path in ("/v2/models/small/infer", "/v2/models/small/generate"):
            caller = http.client.HTTPConnection(running.running.http_address, timeout=60)
            with contextlib.closing(caller), contextlib.suppress(OSError):
                caller.request("POST", path, body)
                statuses.append(caller.getresponse().status)
        assert status(running, "small", ONE) == 200
    assert set(statuses) <= {413, 429, 503}
    assert running.gateway_pid() == pid
