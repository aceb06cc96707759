"""Models trained and served on one real server: exports and published versions of a job."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import process_tools as tools
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

from pipeswitch.base import errors
from pipeswitch.cli.main import main
from pipeswitch.client.client import Client, Task
from tests.chaos.stage import free_port

TRAIN = """
    import sys
    import torch
    from pipeswitch import job

    steps, saved = int(sys.argv[1]), sys.argv[2]
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU(), torch.nn.Flatten(),
        torch.nn.Linear(4 * 6 * 6, 5),
    ).to(memory_format=torch.channels_last).to(job.device)
    optimizer = torch.optim.Adam(net.parameters(), 0.01)
    data = [torch.randn(4, 3, 8, 8) for _ in range(steps)]
    for x in job.steps(data, model=net, optimizer=optimizer):
        loss = net(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        job.log(loss=loss, even=job.step % 2)
    torch.save(net.state_dict(), saved)
"""


@pytest.fixture(scope="module")
def checked() -> Iterator[tools.Checked]:
    with tools.checked_server(environment=tools.ENVIRONMENT) as running:
        yield running


def test_an_ended_jobs_state_and_history_are_there_until_it_is_removed(
    checked: tools.Checked, tmp_path: Path
) -> None:
    script = tools.write_script(tmp_path, "train.py", TRAIN)
    task = checked.client.train(script, name="left", args=[12, tmp_path / "left.pt"])
    tools.finish(task)
    row = task.export(tmp_path / "left.safetensors")
    assert row["persisted_step"] == 12
    assert row["state"] == "done"
    expected, actual = torch.load(tmp_path / "left.pt"), load_file(tmp_path / "left.safetensors")
    assert set(actual) == set(expected)
    assert all(tools.is_bit_equal(actual[name], expected[name]) for name in expected)
    assert checked.count("store_free_bytes") == checked.count("store_capacity_bytes")

    history = task.history()
    assert [line["step"] for line in history] == list(range(12))
    assert [line["even"] for line in history] == [step % 2 for step in range(12)]
    assert all(line["loss"] > 0 for line in history)

    with pytest.raises(errors.InvalidInput):
        task.export(tmp_path / "missing" / "x.safetensors")
    task.remove()
    with pytest.raises(errors.ModelNotFound):
        task.status()
    with pytest.raises(errors.ModelNotFound):
        task.export(tmp_path / "x.safetensors")
    with pytest.raises(errors.ModelNotFound):
        list(task.logs())
    assert not list(tmp_path.glob("*x.safetensors*"))


def test_a_job_that_committed_nothing_has_no_state(checked: tools.Checked, tmp_path: Path) -> None:
    task = checked.client.train(tools.write_script(tmp_path, "short.py", "x = 1\n"), name="short")
    tools.finish(task)
    with pytest.raises(errors.InvalidInput):
        task.export(tmp_path / "x.safetensors")
    assert task.history() == []


@pytest.fixture(scope="module")
def net() -> torch.nn.Module:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(16, 4)).eval()


def other_weights(net: torch.nn.Module, seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    other = copy.deepcopy(net)
    for value in other.state_dict().values():
        if value.is_floating_point():
            value.copy_(torch.rand_like(value))
    return other


@pytest.mark.parametrize("way", ["client", "command", "http"])
def test_a_file_of_weights_becomes_the_next_version_and_the_old_one_can_come_back(
    checked: tools.Checked, net: torch.nn.Module, tmp_path: Path, way: str
) -> None:
    client, x = checked.client, torch.randn(2, 8)
    name = f"from-file-{way}"
    other, path = other_weights(net, 5), tmp_path / "other.pt"
    torch.save({f"_orig_mod.{key}": value for key, value in other.state_dict().items()}, path)
    client.register(name, net, example_inputs=x)
    with pytest.raises(errors.ModelNotFound) as refusal:
        client.register(f"{name}s", weights=path, as_version=True)
    assert refusal.value.data == {"nearest": name}
    if way == "client":
        row = client.register(name, weights=path, as_version=True)
    elif way == "command":
        result = by_hand(
            checked, "register", name, "--weights", str(path), "--as-version", "--json"
        )
        assert result.exit_code == 0, result.output
        row = json.loads(result.output)
    else:
        from safetensors.torch import save_file

        save_file(other.state_dict(), tmp_path / "other.safetensors")
        digest = client.upload(tmp_path / "other.safetensors", "safetensors")
        body = {"weights": digest, "as_version": True}
        row = client._connection.request("register", model=name, body=body).result().body
    assert row["version"] == 2
    assert tools.is_bit_equal(client.infer(name, x).value, tools.eager(other, x))
    assert tools.is_bit_equal(client.infer(name, x, version=1).value, tools.eager(net, x))
    client.rollback(name)
    assert tools.is_bit_equal(client.infer(name, x).value, tools.eager(net, x))
    client.unregister(name)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"weights": "random:3"}, errors.InvalidInput),
        ({"weights": "pretrained"}, errors.InvalidInput),
        ({"weights": ""}, errors.InvalidInput),
        ({"max_batch": 3}, errors.InvalidInput),
        ({"source": "torchvision:resnet18"}, errors.InvalidInput),
        ({"lacks": "0.weight"}, errors.RegistrationRefused),
    ],
)
def test_a_version_from_a_file_is_refused_in_words_and_changes_nothing(
    checked: tools.Checked,
    net: torch.nn.Module,
    tmp_path: Path,
    options: dict[str, Any],
    error: Any,
) -> None:
    client, x, name = checked.client, torch.randn(2, 8), "from-file"
    client.register(name, net, example_inputs=x)
    state = other_weights(net, 6).state_dict()
    state.pop(options.get("lacks", ""), None)
    options = {key: value for key, value in options.items() if key != "lacks"}
    torch.save(state, tmp_path / "it.pt")
    with pytest.raises(error):
        client.register(name, as_version=True, **{"weights": tmp_path / "it.pt", **options})
    assert tools.is_bit_equal(client.infer(name, x).value, tools.eager(net, x))
    client.unregister(name)


SMALL = """
    import sys
    import torch
    from pipeswitch import job

    width, steps = int(sys.argv[1]), int(sys.argv[2])
    torch.manual_seed(width)
    layers = [torch.nn.Linear(8, width), torch.nn.BatchNorm1d(width), torch.nn.ReLU()]
    net = torch.nn.Sequential(*layers, torch.nn.Linear(width, 4)).to(job.device)
    optimizer = torch.optim.SGD(net.parameters(), 0.05)
    data = [torch.randn(16, 8) for _ in range(steps)]
    for x in job.steps(data, model=net, optimizer=optimizer):
        (net(x) - 1).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def by_hand(checked: tools.Checked, *words: str) -> Any:
    return CliRunner().invoke(main, words, env={"PIPESWITCH_HOST": checked.running.ipc_address})


def trained_as(net: torch.nn.Module, task: Task, folder: Path) -> torch.nn.Module:
    """Return a copy of the model with the parameters that a job exports."""
    path = folder / f"{task.name}.safetensors"
    task.export(path)
    other = copy.deepcopy(net)
    other.load_state_dict(load_file(path))
    return other.eval()


def test_a_jobs_parameters_become_the_next_version_and_the_old_one_can_come_back(
    checked: tools.Checked, net: torch.nn.Module, tmp_path: Path
) -> None:
    client, x = checked.client, torch.randn(5, 8)
    client.register("small", net, example_inputs=(torch.randn(2, 8),))
    script = tools.write_script(tmp_path, "small.py", SMALL)
    plain = {1: tools.eager(net, x)}
    for version in (2, 3):
        task = client.train(script, name=f"small-{version}", args=[16, version])
        tools.finish(task)
        row = client.publish("small", task.name, step=version)
        assert row["version"] == version
        plain[version] = tools.eager(trained_as(net, task, tmp_path), x)
        result = client.infer("small", x)
        assert result.timing.version == version
        assert tools.is_bit_equal(next(iter(result.outputs.values())), plain[version])
    tools.until(lambda: len(client.models(versions=True)) == 2, "version 1 has left")
    rows = {row["version"]: row for row in client.models(versions=True)}
    assert set(rows) == {2, 3}
    assert rows[3]["source"] == "job small-3, step 3"
    (row,) = client.models()
    assert (row["name"], row["version"], row["current"]) == ("small", 3, True)
    with pytest.raises(errors.ModelNotFound, match="it has 2, 3"):
        client.infer("small", x, version=1)
    for version in (2, 3):
        answer = next(iter(client.infer("small", x, version=version).outputs.values()))
        assert tools.is_bit_equal(answer, plain[version])

    with pytest.raises(errors.ModelNotFound, match="it has 2, 3"):
        client.rollback("small", 7)
    assert client.rollback("small")["version"] == 2
    assert client.infer("small", x).timing.version == 2
    assert client.show("small", version=3)["current"] is False
    assert by_hand(checked, "models", "split", "small", "3=25%").exit_code == 0
    assert by_hand(checked, "models", "split", "small", "3=25").exit_code == 2
    counts = {2: 0, 3: 0}
    for _ in range(200):
        result = client.infer("small", x)
        counts[result.timing.version] += 1
        assert tools.is_bit_equal(next(iter(result.outputs.values())), plain[result.timing.version])
    assert abs(counts[3] - 50) <= 2
    digests = {row["digest"] for row in client.models(versions=True)}
    folders = Path(checked.running.state_dir, "models")
    tools.until(
        lambda: {p.name for p in folders.iterdir() if p.is_dir()} == digests,
        "no other program is on disk",
    )
    assert not any(Path(checked.running.state_dir, "published").glob("*"))  # empty or absent


def test_what_does_not_fit_is_refused_and_changes_nothing(
    checked: tools.Checked, net: torch.nn.Module, tmp_path: Path
) -> None:
    client = checked.client
    client.register("fits", net, example_inputs=(torch.randn(2, 8),))
    task = client.train(tools.write_script(tmp_path, "w.py", SMALL), name="wide", args=[17, 2])
    tools.finish(task)
    with pytest.raises(errors.RegistrationRefused) as refusal:
        client.publish("fits", "wide")
    reason = refusal.value.data["reason"]
    assert "0.weight: the model has float32[16,8], here it is float32[17,8]" in reason
    assert "3.bias" not in reason
    with pytest.raises(errors.InvalidInput, match="of step 2, not of step 1"):
        client.publish("fits", "wide", step=1)
    with pytest.raises(errors.ModelNotFound, match='did you mean "fits"'):
        client.publish("fit", "wide")
    with pytest.raises(errors.ModelNotFound, match='no job "side"'):
        client.publish("fits", "side")
    with pytest.raises(errors.ModelNotFound, match="before 1"):
        client.rollback("fits")
    assert [row["version"] for row in client.models() if row["name"] == "fits"] == [1]
    assert client.infer("fits", torch.randn(2, 8)).timing.version == 1


PUBLISHES = """
    import os, sys
    import torch
    from pipeswitch import job

    folder, every, steps, epochs = sys.argv[1], *map(int, sys.argv[2:])
    torch.manual_seed(1)
    layers = [torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.ReLU()]
    net = torch.nn.Sequential(*layers, torch.nn.Linear(16, 4)).to(job.device)
    optimizer = torch.optim.Adam(net.parameters(), 0.01)
    data = [torch.randn(16, 8) for _ in range(steps)]
    for epoch in job.epochs(epochs):
        for x in job.steps(data, model=net, optimizer=optimizer):
            (net(x) - torch.sin(torch.tensor(float(epoch)))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if (job.step + 1) % every == 0:
                path = os.path.join(folder, f"{job.step + 1}.pt")
                torch.save(net.state_dict(), path + ".tmp")
                os.replace(path + ".tmp", path)
                job.publish("live")
        try:
            job.publish("nothing")
        except Exception as error:
            print(type(error).__name__, error)
        if os.path.exists(os.path.join(folder, "stop")):
            break
"""


class Asker:
    """Thread that sends consecutive requests and records each answer by version.
    If it finds no server, it records the times and sends the request again."""

    def __init__(self, client: Client, model: str, x: torch.Tensor, pause_s: float = 0.0) -> None:
        self._client, self._model, self._x = client, model, x
        self._pause_s = pause_s
        self.answers: dict[int, list[torch.Tensor]] = {}
        self.without_server: list[tuple[float, float]] = []  # begin and end in s
        self.error: Exception | None = None
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Asker:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()
        self._client.close()

    def _run(self) -> None:
        try:
            while not self._is_over.wait(self._pause_s):
                self._ask()
        except Exception as error:
            self.error = error

    def _ask(self) -> None:
        began_s = time.monotonic()
        try:
            result = self._client.infer(self._model, self._x)
        except errors.ServerUnavailable:
            self.without_server.append((began_s, time.monotonic()))
            return
        (answer,) = result.outputs.values()
        self.answers.setdefault(result.timing.version, []).append(answer)


def test_each_answer_is_of_one_version_while_a_script_publishes(
    net: torch.nn.Module, tmp_path: Path
) -> None:
    x = torch.randn(5, 8)
    environment = {**tools.ENVIRONMENT, "PIPESWITCH_JOBS__KEEP_VERSIONS": "100"}
    with tools.checked_server(environment=environment) as checked:
        client = checked.client
        client.register("live", net, example_inputs=(torch.randn(2, 8),))
        script = tools.write_script(tmp_path, "publishes.py", PUBLISHES)
        with Asker(checked.running.client(), "live", x) as asker:
            task = client.train(script, name="p", args=[tmp_path, 40, 150, 2])
            tools.finish(task)
            # The first publication and the last have a build each, which may end after the job.
            tools.until(lambda: len(asker.answers) >= 3 or asker.error, "three versions")
        assert asker.error is None
        assert asker.without_server == []
        sources = {row["version"]: row["source"] for row in client.models(versions=True)}
        for version, answers in asker.answers.items():
            plain = copy.deepcopy(net)
            if version > 1:
                step = int(sources[version].removeprefix("job p, step "))
                assert step % 40 == 0
                plain.load_state_dict(torch.load(tmp_path / f"{step}.pt"))
            expected = tools.eager(plain, x)
            assert all(tools.is_bit_equal(answer, expected) for answer in answers), version
        log = "".join(task.logs())
        assert log.count("ModelNotFound") == 2, log
        assert task.status()["why"] == ""


CALLERS, EACH_S = 4, 0.04  # together a hundred requests a second


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_publications_under_load_outlive_worker_daemon_and_server(
    net: torch.nn.Module, tmp_path: Path
) -> None:
    """Publish a version every 200 steps; each answer must be of one version, whatever is killed."""
    x, state = torch.randn(5, 8), tmp_path / "state"
    options: dict[str, Any] = {
        "environment": tools.ENVIRONMENT,
        "state_dir": state,
        "args": ("--listen", f"tcp://127.0.0.1:{free_port()}"),
    }
    with contextlib.ExitStack() as stack:
        askers: list[Asker] = []

        def next_versions(count: int = 2) -> None:
            newest = max((v for asker in askers for v in asker.answers), default=0)
            for asker in askers:
                tools.until(
                    lambda: max(asker.answers, default=0) >= newest + count or asker.error,  # noqa: B023
                    "the next versions",
                    120.0,
                )
                assert asker.error is None

        with tools.checked_server(settles=False, status=-9, **options) as first:
            address = first.running.tcp_address
            first.client.register("live", net, example_inputs=(torch.randn(2, 8),))
            script = tools.write_script(tmp_path, "publishes.py", PUBLISHES)
            first.client.train(script, name="p", args=[tmp_path, 200, 200, 10**6])
            for _ in range(CALLERS):
                asker = Asker(Client(address, timeout_s=60.0), "live", x, EACH_S)
                askers.append(stack.enter_context(asker))
            next_versions()
            tools.kill(max(first.worker_pids().values()))
            next_versions()
            tools.kill(first.daemon_pid())
            next_versions()
            down_s = time.monotonic()
            tools.kill(first.pid)
        with tools.checked_server(**options) as second:
            up_s = time.monotonic()
            next_versions()
            tools.kill(max(second.worker_pids().values()))
            next_versions()
            (tmp_path / "stop").touch()
            tools.finish(second.client.task("p"), 120.0)
            stack.close()
        expected = {"before": tools.eager(net, x)}
        for path in tmp_path.glob("*.pt"):
            plain = copy.deepcopy(net)
            plain.load_state_dict(torch.load(path))
            expected[path.stem] = tools.eager(plain, x)
        steps: dict[int, str] = {}
        for asker in askers:
            assert asker.error is None
            assert all(began <= up_s and ended >= down_s for began, ended in asker.without_server)
            for version, answers in asker.answers.items():
                (step,) = (
                    step
                    for step, plain in expected.items()
                    if tools.is_bit_equal(answers[0], plain)
                )
                assert steps.setdefault(version, step) == step
                assert all(tools.is_bit_equal(answer, answers[0]) for answer in answers)
        assert len(steps) >= 8


def test_a_script_reads_why_it_cannot_publish(
    checked: tools.Checked, net: torch.nn.Module, tmp_path: Path
) -> None:
    checked.client.register("narrow", net, example_inputs=(torch.randn(2, 8),))
    source = (
        SMALL
        + """
    try:
        job.publish("narrow")
    except Exception as error:
        print(type(error).__name__, error)
    """
    )
    task = checked.client.train(
        tools.write_script(tmp_path, "n.py", source), name="too-wide", args=[17, 2]
    )
    tools.finish(task)
    log = "".join(task.logs())
    assert "RegistrationRefused" in log
    assert "0.weight: the model has float32[16,8], here it is float32[17,8]" in log
    (row,) = (row for row in checked.client.models() if row["name"] == "narrow")
    assert row["version"] == 1


PARTS = """
    import os, sys
    import torch
    from torch.optim import swa_utils
    from pipeswitch import job

    folder = sys.argv[1]
    torch.manual_seed(3)
    layers = [torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.ReLU()]
    net = torch.nn.Sequential(*layers, torch.nn.Linear(16, 4)).to(job.device)
    ema = swa_utils.AveragedModel(net, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.99))
    optimizer = torch.optim.SGD(net.parameters(), 0.001)
    data = [torch.randn(16, 8) for _ in range(20)]
    for epoch in job.epochs(10**6):
        for x in job.steps(data, model={"net": net, "ema": ema}, optimizer=optimizer):
            (net(x) - 1).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            ema.update_parameters(net)
        if os.path.exists(os.path.join(folder, "stop")):
            break
    torch.save(net.state_dict(), os.path.join(folder, "net.pt"))
    torch.save(ema.module.state_dict(), os.path.join(folder, "ema.pt"))
    for part in ("", "emma", "ema"):
        try:
            job.publish("live", part)
        except Exception as error:
            print("refused:", error)
"""
MODULE = """
    import torch

    class Branching(torch.nn.Sequential):
        def forward(self, x):
            return super().forward(x) if float(x.sum()) < 1e9 else x
    def make():
        layers = [torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.ReLU()]
        return Branching(*layers, torch.nn.Linear(16, 4))
"""


def test_an_average_is_served_by_its_name_after_a_kill_and_never_the_other_one_unasked(
    net: torch.nn.Module, tmp_path: Path
) -> None:
    x, plain = torch.randn(5, 8), {}
    tools.write_script(tmp_path, "branching.py", MODULE)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    with tools.checked_server(environment={**tools.ENVIRONMENT, "PYTHONPATH": path}) as checked:
        client = checked.client

        def answer(model: str = "live") -> torch.Tensor:
            return next(iter(client.infer(model, x).outputs.values()))

        client.register("live", net, example_inputs=(torch.randn(2, 8),))
        row = client.register("branching", "branching:make", inputs={"x": ((5, 8), "float32")})
        assert row["mode"] == "module"
        task = client.train(
            tools.write_script(tmp_path, "parts.py", PARTS), name="p", args=[tmp_path]
        )
        tools.until(lambda: task.status()["committed_step"] > 0, "a commit")
        tools.kill(tools.until(lambda: checked.row("p")["pid"], "it has a worker"))
        step = task.status()["step"]
        tools.until(lambda: task.status()["committed_step"] > step, "a commit of its next life")
        (tmp_path / "stop").touch()
        assert tools.finish(task)["restarts"] >= 1
        for part in ("net", "ema"):
            other = copy.deepcopy(net)
            other.load_state_dict(torch.load(tmp_path / f"{part}.pt"))
            plain[part] = tools.eager(other.eval(), x)
        assert not tools.is_bit_equal(plain["net"], plain["ema"])
        lines = [line for line in "".join(task.logs()).splitlines() if "refused:" in line]
        assert '"ema", "net"' in lines[0]
        assert 'no part "emma"' in lines[1], lines
        tools.until(lambda: client.show("live")["version"] == 2, "the script's version")
        assert client.show("live")["source"].endswith(", part ema")
        assert tools.is_bit_equal(answer(), plain["ema"])

        with pytest.raises(errors.InvalidInput, match='"ema", "net"') as refusal:
            client.publish("live", "p")
        assert refusal.value.hint == 'name one: --part ema, in Python part="ema"'
        with pytest.raises(errors.InvalidInput, match=r'no part .*"ema", "net"'):
            client.publish("live", "p", part="emma")
        assert client.publish("live", "p", part="ema")["version"] == 2, "the same weights"
        for part, status in (("", 1), ("net", 0)):
            lines = by_hand(checked, "register", "live", "--from-job", "p", "--part", part)
            assert (lines.exit_code, "--part ema" in lines.stderr) == (status, not part), (
                lines.output
            )
        assert tools.is_bit_equal(answer(), plain["net"])

        with pytest.raises(errors.InvalidInput, match='"ema", "net"'):
            client.publish("branching", "p")
        for part in ("ema", "net"):
            client.publish("branching", "p", part=part)
            assert tools.is_bit_equal(answer("branching"), plain[part])


def by_http(checked: tools.Checked, path: str, x: torch.Tensor | None = None) -> Any:
    """Send an HTTP request, with ``x`` as the first input if given; return the decoded answer."""
    data = None
    if x is not None:
        name = next(iter(checked.client.show("kept")["inputs"]))
        tensor = {"name": name, "datatype": "FP32", "shape": [*x.shape], "data": x.tolist()}
        data = json.dumps({"inputs": [tensor]}).encode()
    request = urllib.request.Request(f"http://{checked.running.http_address}{path}", data)
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


def test_the_next_server_serves_the_last_version_and_has_the_ended_job(
    net: torch.nn.Module, tmp_path: Path
) -> None:
    x, state = torch.randn(5, 8), tmp_path / "state"
    with tools.checked_server(environment=tools.ENVIRONMENT, state_dir=state) as first:
        first.client.register("kept", net, example_inputs=(torch.randn(2, 8),))
        task = first.client.train(
            tools.write_script(tmp_path, "s.py", SMALL), name="s", args=[16, 3]
        )
        tools.finish(task)
        assert first.client.publish("kept", "s")["version"] == 2
        expected = tools.eager(trained_as(net, task, tmp_path), x)
        first.client.split("kept", 1, 1)
    with tools.checked_server(environment=tools.ENVIRONMENT, state_dir=state, http=True) as second:
        result = second.client.infer("kept", x)
        assert result.timing.version == 2
        assert tools.is_bit_equal(next(iter(result.outputs.values())), expected)
        rows = second.client.models(versions=True)
        assert [(row["version"], row["share"]) for row in rows] == [(1, 1), (2, 99)]
        row = second.client.task("s").export(tmp_path / "again.safetensors")
        assert (row["state"], row["persisted_step"]) == ("done", 3)
        assert (tmp_path / "again.safetensors").read_bytes() == (
            tmp_path / "s.safetensors"
        ).read_bytes()
        for path, version, plain in (("", 2, expected), ("/versions/1", 1, tools.eager(net, x))):
            answer = by_http(second, f"/v2/models/kept{path}/infer", x)
            assert answer["model_version"] == str(version)
            assert tools.is_bit_equal(torch.tensor(answer["outputs"][0]["data"]), plain.reshape(-1))
        assert by_http(second, "/v2/models/kept")["versions"] == ["1", "2"]
        for path in ("/versions/3", "/versions/3/infer", "/versions/01", "/versions/x"):
            with pytest.raises(urllib.error.HTTPError, match="404"):
                by_http(second, f"/v2/models/kept{path}", x if "infer" in path else None)
        assert second.client.rollback("kept")["version"] == 1
        assert tools.is_bit_equal(
            next(iter(second.client.infer("kept", x).outputs.values())), tools.eager(net, x)
        )
        second.client.unregister("kept")
        assert second.client.models() == []
