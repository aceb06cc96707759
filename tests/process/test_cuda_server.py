"""The whole server on the cuda device, with fake CUDA bindings.

Processes, self-test, daemon, workers, graphs and training are real. Only the device is fake: its
memory is host memory, and it computes at once (``tests/fakes/fake_cuda``).
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import process_tools as tools
import pytest
import torch

from pipeswitch.base.errors import InvalidInput, TaskFailed
from pipeswitch.client.client import FINAL_JOB_STATES

ON_CUDA = ("cuda:0",)
STREAM = "WAITS=gpu WORDS=write ACTIVATIONS=private GRAPHS=on HOLDS=stream"
MARKED = """
    from pipeswitch.devices.cuda import stream_gate
    stream_gate.LOOKS_PER_GROUP = 1  # held, the fake GPU waits in the script's next layer
"""
STEPS = """
    import hashlib, sys
    import torch
    from pipeswitch import job

    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Linear(32, 64), torch.nn.BatchNorm1d(64), torch.nn.ReLU(), torch.nn.Linear(64, 4)
    ).to(job.device)
    optimizer = torch.optim.Adam(net.parameters(), 0.01)
    x, y = torch.randn(64, 32), torch.arange(64) % 4
    for batch in job.steps([(x, y)] * 800, model=net, optimizer=optimizer):
        torch.nn.functional.cross_entropy(net(batch[0]), batch[1]).backward()
        optimizer.step()
        optimizer.zero_grad()
    digest = hashlib.sha256()
    for value in net.state_dict().values():
        digest.update(value.numpy().tobytes())
    print(digest.hexdigest())
    open(sys.argv[1], "w").write(digest.hexdigest())
"""


@pytest.fixture(scope="module")
def first_gpu(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the environment of a fake machine with its own temporary folder for GPU locks."""
    return tools.fake_gpu(tmp_path_factory.mktemp("first"))


@pytest.fixture
def own_gpu(tmp_path: Path) -> dict[str, str]:
    """Return the environment of another machine, for a test that starts its own server."""
    return tools.fake_gpu(tmp_path)


@pytest.fixture(scope="module")
def server(first_gpu: dict[str, str]) -> Iterator[tools.Checked]:
    """Start a server, with all mechanisms that its self-test finds, for tests that share it."""
    with tools.checked_server(devices=ON_CUDA, environment=first_gpu) as checked:
        yield checked


def register(checked: tools.Checked, name: str, seed: int) -> tuple[Any, torch.Tensor]:
    module = tools.mlp(64, 4, seed)
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(seed))
    checked.client.register(name, module, example_inputs=(x,))
    return module, x


def answer(checked: tools.Checked, name: str, x: torch.Tensor) -> Any:
    return torch.from_numpy(next(iter(checked.client.infer(name, x.numpy()).outputs.values())))


def test_the_ready_line_says_which_rungs_serve(server: tools.Checked) -> None:
    line = server.running.ready_line
    assert "device cuda:0," in line
    assert "Fake GPU, waits=gpu words=write activations=slice graphs=on holds=stream" in line


def test_eager_runs_and_replays_give_the_plain_models_bits(server: tools.Checked) -> None:
    module, x = register(server, "replayed", 1)
    expected = tools.eager(module, x)
    assert tools.is_bit_equal(answer(server, "replayed", x), expected)
    workers = server.worker_pids()
    tools.until(  # the others capture while the device is idle
        lambda: server.running.log().count("graphs=captured") == len(workers), "each captures"
    )
    for _ in range(8):
        assert tools.is_bit_equal(answer(server, "replayed", x), expected)
    again = torch.randn_like(x)
    assert tools.is_bit_equal(answer(server, "replayed", again), tools.eager(module, again))


def test_models_that_take_turns_on_the_device_do_not_see_each_others_bytes(
    own_gpu: dict[str, str],
) -> None:
    with tools.checked_server(arena="6MiB", devices=ON_CUDA, environment=own_gpu) as checked:
        models = {name: register(checked, name, seed) for seed, name in enumerate("abc")}
        for round_number in range(5):
            for name, (module, x) in models.items():
                fresh = x + round_number
                assert tools.is_bit_equal(answer(checked, name, fresh), tools.eager(module, fresh))


@pytest.mark.parametrize(
    "rungs",
    [
        {"WAITS": "cpu", "WORDS": "copy", "ACTIVATIONS": "private", "GRAPHS": "off"},
        {"WAITS": "gpu", "WORDS": "write", "ACTIVATIONS": "private", "GRAPHS": "on"},
    ],
    ids=["lowest", "middle"],
)
def test_named_rungs_serve_without_a_self_test(
    own_gpu: dict[str, str], rungs: dict[str, str]
) -> None:
    named = {f"PIPESWITCH_DEVICE__{key}": value for key, value in rungs.items()}
    with tools.checked_server(devices=ON_CUDA, environment=own_gpu | named) as checked:
        line = checked.running.ready_line
        assert f"waits={rungs['WAITS']} words={rungs['WORDS']}" in line
        module, x = register(checked, "model", 2)
        for _ in range(4):
            assert tools.is_bit_equal(answer(checked, "model", x), tools.eager(module, x))
        has_captured = "graphs=captured" in checked.running.log()
        assert has_captured == (rungs["GRAPHS"] == "on")


def test_killed_workers_and_a_killed_daemon_come_back_with_a_new_handle(
    server: tools.Checked,
) -> None:
    module, x = register(server, "survivor", 3)
    expected = tools.eager(module, x)
    assert tools.is_bit_equal(answer(server, "survivor", x), expected)
    for pid in server.worker_pids().values():
        tools.kill(pid)
    assert tools.is_bit_equal(answer(server, "survivor", x), expected)
    server.wait_until_whole()
    tools.kill(server.daemon_pid())
    assert tools.is_bit_equal(answer(server, "survivor", x), expected)
    server.wait_until_whole()


def test_a_job_beside_requests_ends_with_the_plain_runs_bits(
    server: tools.Checked, tmp_path: Path
) -> None:
    script = tools.write_script(tmp_path, "train.py", STEPS)
    plain = tools.run_plain(script, str(tmp_path / "plain"))
    module, x = register(server, "visitor", 4)
    expected = tools.eager(module, x)
    task = server.client.train(str(script), name="steps", args=[str(tmp_path / "out")])
    tools.until(lambda: task.status()["step"] > 0, "the job runs")
    while task.status()["state"] not in FINAL_JOB_STATES:
        assert tools.is_bit_equal(answer(server, "visitor", x), expected)
    assert tools.finish(task)["state"] == "done"
    assert (tmp_path / "out").read_text() == (tmp_path / "plain").read_text()
    assert plain.split()[-1] == (tmp_path / "out").read_text()


def test_a_held_job_that_is_killed_or_evicted_ends_with_the_plain_runs_bits(
    own_gpu: dict[str, str], tmp_path: Path
) -> None:
    """Kill the job right after it was held; then evict it while a process that waits at a point,
    whose action it reads from a pipe, has the turn."""
    points, script = tmp_path / "points", tools.write_script(tmp_path, "train.py", MARKED + STEPS)
    points.mkdir()
    plain = tools.run_plain(script, str(tmp_path / "plain"))
    named = dict(f"PIPESWITCH_DEVICE__{part}".split("=") for part in STREAM.split())
    own_gpu |= named | {"PIPESWITCH_FAILPOINTS": str(points)}
    with tools.checked_server(devices=ON_CUDA, environment=own_gpu) as checked:
        assert "holds=stream" in checked.running.ready_line
        module, x = register(checked, "visitor", 4)
        expected = tools.eager(module, x)
        events = checked.client.events("job.suspended", timeout_s=5)
        task = checked.client.train(str(script), name="held", args=[str(tmp_path / "out")])
        tools.until(lambda: task.status()["committed_step"] > 0, "the job trains")
        (points / "job.parked").write_text("crash")
        while not task.status()["restarts"]:
            assert tools.is_bit_equal(answer(checked, "visitor", x), expected)
        step = task.status()["committed_step"]
        tools.until(lambda: task.status()["committed_step"] > step, "it trains again")
        os.mkfifo(points / "worker.infer.turn")
        request = checked.client.submit("visitor", x.numpy())
        turns = "worker.infer.turn.*"
        (pipe,) = tools.until(lambda: [*points.glob(turns)], "the request has the device")
        task.pause()
        tools.until(lambda: task.status()["state"] == "paused", "the held job leaves")
        assert not request.done()
        pipe.write_text("delay 0")
        request.result(30)
        task.resume()
        while task.status()["state"] not in FINAL_JOB_STATES:
            assert tools.is_bit_equal(answer(checked, "visitor", x), expected)
        assert tools.finish(task)["state"] == "done"
        assert any(event["where"] == "stream" for event in events)
        assert "did not" not in checked.running.log(), "the evicted job was killed"
    assert (tmp_path / "out").read_text() == plain.split()[-1]


def test_two_gpus_serve_and_a_daemon_that_dies_is_nothing_to_the_other(
    own_gpu: dict[str, str],
) -> None:
    """Use two GPUs: a worker that opened the other GPU's arena would fail or give wrong answers."""
    rungs = {"WAITS": "cpu", "WORDS": "copy", "ACTIVATIONS": "private", "GRAPHS": "off"}
    named = {f"PIPESWITCH_DEVICE__{key}": value for key, value in rungs.items()}
    with tools.checked_server(
        devices=("cuda:0", "cuda:1"),
        args=("--standby", "1"),
        environment=own_gpu | named | {"CUDA_FAKE_DEVICES": "2"},
    ) as checked:
        assert "device cuda:0,cuda:1, arena " in checked.running.ready_line
        client = checked.client
        module, x = tools.mlp(64, 4, 7), torch.randn(3, 64)
        expected = tools.eager(module, x)
        for name, device in (("first", "cuda:0"), ("second", "cuda:1")):
            client.register(name, module, example_inputs=(x,), devices=[device])

        def daemons() -> dict[str, int]:
            rows = [row for row in client.ps() if row["kind"] == "daemon"]
            return {row["on"]: row["pid"] for row in rows}

        def answers() -> list[str]:
            results = [client.infer(name, x.numpy()) for name in ("first", "second")]
            for result in results:
                output = torch.from_numpy(next(iter(result.outputs.values())))
                assert tools.is_bit_equal(output, expected)
            return [result.timing.device for result in results]

        assert answers() == ["cuda:0", "cuda:1"]
        before = daemons()
        tools.kill(before["cuda:1"])
        tools.until(
            lambda: daemons().get("cuda:1", 0) not in (0, before["cuda:1"]), "another daemon"
        )
        assert answers() == ["cuda:0", "cuda:1"]
        assert daemons()["cuda:0"] == before["cuda:0"]


def test_doctor_examines_each_gpu(own_gpu: dict[str, str]) -> None:
    environment = {"PIPESWITCH_DEVICE__NAME": "cuda:0,cuda:1", "CUDA_FAKE_DEVICES": "2"}
    done = tools.command("doctor", "--json", environment={**own_gpu, **environment})
    statuses = {row["name"]: row["status"] for row in json.loads(done.stdout)}
    assert [statuses[f"cuda:{index} ipc"] for index in (0, 1)] == ["ok", "ok"]


def test_a_cpu_device_beside_a_gpu_serves_what_asks_for_it(
    own_gpu: dict[str, str], tmp_path: Path
) -> None:
    with tools.checked_server(
        devices=("cuda:0", "cpu"), args=("--standby", "1"), environment=own_gpu
    ) as checked:
        client, module, x = checked.client, tools.mlp(64, 4, 8), torch.randn(3, 64)
        expected = tools.eager(module, x)
        devices_by_name = {"by-itself": [], "on-cpu": ["cpu"], "on-both": ["cuda", "cpu"]}
        for name, devices in devices_by_name.items():
            client.register(name, module, example_inputs=(x,), devices=devices)
        limits = {row["name"]: row["devices"] for row in client.models()}
        assert limits == {
            "by-itself": ["cuda:0"],
            "on-cpu": ["cpu:0"],
            "on-both": ["cuda:0", "cpu:0"],
        }

        def used(name: str) -> set[str]:
            calls = [client.submit(name, x.numpy()) for _ in range(16)]
            results = [call.result(60) for call in calls]
            for result in results:
                output = torch.from_numpy(next(iter(result.outputs.values())))
                assert tools.is_bit_equal(output, expected)
            return {result.timing.device for result in results}

        assert used("by-itself") == {"cuda:0"}
        assert used("on-cpu") == {"cpu:0"}
        tools.until(lambda: used("on-both") == {"cuda:0", "cpu:0"}, "both serve it")
        script = tools.write_script(tmp_path, "train.py", STEPS)
        outs = {device: tmp_path / device for device in ("cuda", "cpu")}
        with pytest.raises(InvalidInput):
            client.train(str(script), devices=list(outs))
        tools.run_plain(script, str(tmp_path / "plain"))
        for device, out in outs.items():
            task = client.train(str(script), name=device, args=[str(out)], devices=[device])
            with pytest.raises(InvalidInput):
                task.move("cpu:0" if device == "cuda" else "cuda:0")
            assert tools.finish(task)["state"] == "done"
            assert out.read_text() == (tmp_path / "plain").read_text()


# ---- no GPU ---------------------------------------------------------------------------------


def serve(tmp_path: Path, *args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return tools.command(
        "serve",
        *args,
        "--listen",
        "tcp://127.0.0.1:0",
        "--state-dir",
        str(tmp_path / "state"),
        environment={"XDG_RUNTIME_DIR": str(tmp_path), **environment},
    )


@pytest.mark.parametrize(
    ("form", "sentence"),
    [
        ("no-driver", "no NVIDIA driver on this machine"),
        ("no-device", "the NVIDIA driver is loaded, but shows this process no GPU"),
    ],
)
def test_serve_without_a_gpu_fails_with_a_sentence_that_helps(
    tmp_path: Path, form: str, sentence: str
) -> None:
    done = serve(tmp_path, "--device", "cuda:0", **tools.fake_gpu(tmp_path), CUDA_FAKE=form)
    assert done.returncode == 2
    assert sentence in done.stderr
    assert "--device cpu" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "state").exists(), "nothing was begun"


def test_serve_names_the_devices_there_are(tmp_path: Path) -> None:
    done = serve(tmp_path, "--device", "cuda:7", **tools.fake_gpu(tmp_path))
    assert done.returncode == 2
    assert "there is no cuda:7, only cuda:0" in done.stderr


@pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="this machine has a GPU")
def test_the_real_bindings_say_the_same(tmp_path: Path) -> None:
    done = serve(tmp_path, "--device", "cuda:0")
    assert done.returncode == 2
    assert "no NVIDIA driver" in done.stderr


def test_auto_takes_the_cpu_and_says_why_not_cuda(own_gpu: dict[str, str]) -> None:
    environment = own_gpu | {"CUDA_FAKE": "no-device"}
    with tools.checked_server(devices=("auto",), environment=environment) as checked:
        line = checked.running.ready_line
        assert "device cpu," in line
        assert "(not cuda: the NVIDIA driver is loaded, but shows this process no GPU)" in line
        module, x = register(checked, "model", 5)
        assert tools.is_bit_equal(answer(checked, "model", x), tools.eager(module, x))


def test_a_second_server_on_the_same_gpu_is_refused(
    server: tools.Checked, first_gpu: dict[str, str], tmp_path: Path
) -> None:
    assert server.running.pid
    done = serve(tmp_path, "--device", "cuda:0", **first_gpu)
    assert done.returncode == 1
    assert "another pipeswitch server holds cuda:0" in done.stderr


class Lookup(torch.nn.Module):
    """Module that looks rows up in a table of ten. With ``is_hidden`` it computes the indices, so
    that the server cannot check them before the run."""

    def __init__(self, is_hidden: bool) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(10, 4)
        self.is_hidden = is_hidden

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = self.table(ids * 2 - ids if self.is_hidden else ids)
        return rows


@pytest.mark.parametrize("is_hidden", [False, True], ids=["input", "computed"])
def test_an_index_out_of_range_is_answered_and_costs_one_worker_at_most(
    server: tools.Checked, is_hidden: bool
) -> None:
    """Cause an assertion in a kernel: later requests must not fail."""
    server.wait_until_whole()
    module = Lookup(is_hidden).eval()
    good, bad = torch.tensor([[1, 9]]), np.array([[1, 99]])
    name = "computed" if is_hidden else "looked-up"
    server.client.register(name, module, example_inputs=(good,))
    expected = tools.eager(module, good)
    assert tools.is_bit_equal(answer(server, name, good), expected)
    before = server.worker_pids()

    def replaced() -> int:
        now = server.worker_pids()
        return sum(before[slot] != now.get(slot) for slot in before)

    with pytest.raises(TaskFailed if is_hidden else InvalidInput) as caught:
        server.client.infer(name, bad)
    assert ("assertion failed" if is_hidden else "has the index 99") in str(caught.value)
    assert tools.is_bit_equal(answer(server, name, good), expected), "the model is still served"
    if is_hidden:
        tools.until(lambda: replaced() > 0, "the broken worker is replaced")
    server.wait_until_whole()
    assert replaced() == is_hidden, "workers that were replaced"
    row = next(row for row in server.client.ps() if row.get("name") == name)
    assert "quarantined" not in str(row)


def test_inputs_are_arrays_of_the_host(server: tools.Checked) -> None:
    module, _ = register(server, "arrays", 6)
    x = np.random.default_rng(0).standard_normal((3, 64), dtype=np.float32)
    output = next(iter(server.client.infer("arrays", x).outputs.values()))
    assert tools.is_bit_equal(torch.from_numpy(output), tools.eager(module, torch.from_numpy(x)))
