"""Models whose inputs a function of the owner preprocesses: bits, blocking, deaths, a restart."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import process_tools as tools
import pytest
import torch

from pipeswitch.base import errors
from pipeswitch.programs.compiler.export import export_module_to_bundle

WIDTH = 64
RAW = {"text": (((1, 4 * WIDTH),), "uint8")}
FUNCTIONS = f"""
import os, subprocess, sys
import numpy as np

def rows(text):
    found = np.zeros((1, {WIDTH}), np.float32)
    found[0, : len(text) % {WIDTH}] = np.sqrt(text[: len(text) % {WIDTH}].astype(np.float32))
    return {{"x": found}}

def _own(): pass

def none(): return None

def lone(text): return rows(text)["x"]

def blocks(text):
    with open(bytes(text).decode()) as pipe: pipe.read()
    return rows(text)

def dies(text): os.kill(os.getpid(), 9)

def starts(text):
    with open(bytes(text).decode(), "a") as file:
        print(subprocess.Popen(["sleep", "3600"]).pid, file=file, flush=True)
    dies(text)

def read(text):
    found = np.zeros((len(text), {WIDTH}), np.float32)
    for row, one in zip(found, text):
        row[: len(one)] = list(one)
    return {{"x": found}}

def label(y):
    return {{"label": np.array([f"no. {{n}}" for n in y.argmax(1)]), "score": y.max(1)}}

def labels_oddly(y): return ["a", "b"]

def dies_behind(y): os.kill(os.getpid(), 9)

def odd(text):
    match bytes(text):
        case b"dtype": return np.zeros((1, {WIDTH}))
        case b"shape": return np.zeros((1, {WIDTH} + 1), np.float32)
        case b"name": return {{"y": np.zeros((1, {WIDTH}), np.float32)}}
        case b"list": return [1.0]
        case b"many": return dict.fromkeys(map(str, range(65)), np.zeros(0))
        case b"lone": return {{"\\udc80": np.zeros(1)}}
        case b"long": return {{"n" * 129: np.zeros(1)}}
        case b"secret": raise ValueError(os.environ["SECRET_OF_THE_OWNER"])
        case b"raise": raise ValueError("no picture")
        case b"exit": sys.exit(3)
        case b"surrogate": raise ValueError("no \\udc80")
        case b"large": return np.broadcast_to(np.float32(0), (1 << 40,))
    return rows(text)
"""
ODD = {
    "dtype": "got float64",
    "shape": r"got float32\[1,65\]",
    "name": 'no input "y"',
    "list": "returned a list",
    "raise": "raised ValueError: no picture",
    "exit": "SystemExit",
    "secret": "raised ValueError: told",
    "surrogate": r"raised ValueError: no \?",
    "large": "max_message",
    "many": "returned 65 arrays",
    "lone": "a dict with",
    "long": "a dict with",
}


@pytest.fixture(scope="module")
def functions(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    folder = tmp_path_factory.mktemp("stages")
    tools.write_script(folder, "staged.py", FUNCTIONS)
    sys.path.insert(0, str(folder))
    yield importlib.import_module("staged")
    sys.path.remove(str(folder))


@pytest.fixture(scope="module")
def options(functions: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = Path(str(functions.__file__)).parent
    return {
        "arena": "16MiB",
        "host_store": "64MiB",
        "state_dir": tmp_path_factory.mktemp("state"),
        "tcp_roles": ("infer", "register"),
        "environment": {
            "PYTHONPATH": os.pathsep.join((str(folder), os.environ.get("PYTHONPATH", ""))),
            "PIPESWITCH_SERVER__ALLOW_CODE": "staged",
            "SECRET_OF_THE_OWNER": "told",
        },
    }


@pytest.fixture(scope="module")
def running(options: dict[str, Any]) -> Iterator[tools.Checked]:
    with tools.checked_server(settles=False, **options) as checked:  # the last test ends it
        module = tools.mlp(WIDTH, 2, 0)
        checked.client.register("plain", module, example_inputs=torch.zeros(1, WIDTH))
        for name in ("rows", "lone", "blocks", "dies", "starts", "odd"):
            checked.client.register(
                name,
                module,
                example_inputs=torch.zeros(1, WIDTH),
                preprocess=f"staged:{name}",
                raw=RAW,
            )
        yield checked


def text(value: str) -> Any:
    return np.frombuffer(value.encode(), np.uint8)


TEXTS = {"text": (((1, 8),), "bytes")}
LABELS = {"label": (((1, 8),), "bytes"), "score": (((1, 8),), "float32")}


def test_texts_go_in_and_labels_come_out(running: tools.Checked, functions: ModuleType) -> None:
    module, client = tools.mlp(WIDTH, 2, 0), running.client
    options: dict[str, Any] = {"example_inputs": torch.zeros(2, WIDTH), "returns": LABELS}
    client.register(
        "labels", module, preprocess="staged:read", raw=TEXTS, postprocess="staged:label", **options
    )
    client.register("behind", module, postprocess="staged:label", **options)
    texts = ["a text", "größer", ""]
    rows = functions.read([one.encode() for one in texts])["x"]
    plain = client.infer("plain", rows)["y"]
    expected = functions.label(plain)
    for answer in (
        client.infer("labels", {"text": texts}),
        client.infer("labels", np.array(texts, dtype=object)),
        client.infer("behind", rows),
    ):
        assert answer["label"].tolist() == [one.encode() for one in expected["label"]]
        assert tools.is_bit_equal(
            torch.as_tensor(answer["score"]), torch.as_tensor(expected["score"])
        )
        assert 0.0 < answer.timing.postprocess_ms < answer.timing.total_ms
    assert client.infer("labels", "one text")["label"].shape == (1,)
    row = client.show("labels")
    assert (row["preprocess"], row["postprocess"]) == ("staged:read", "staged:label")
    assert row["outputs"]["label"] == [["label.0"], "bytes"]
    assert row["dims"]["label.0"] == [1, 8]
    for wrong in (["x"] * 9, [1.0], np.zeros((1, WIDTH), np.float32)):
        with pytest.raises(errors.InvalidInput, match=r'"text" expects bytes\[1\.\.8\]'):
            client.infer("labels", wrong)


def test_a_function_behind_a_model_fails_alone(running: tools.Checked) -> None:
    module, client = tools.mlp(WIDTH, 2, 0), running.client
    example = torch.zeros(2, WIDTH)
    for name, function in (("oddly", "labels_oddly"), ("deadly", "dies_behind")):
        client.register(
            name, module, example_inputs=example, returns=LABELS, postprocess=f"staged:{function}"
        )
    x = np.ones((1, WIDTH), np.float32)
    with pytest.raises(errors.TaskFailed, match=r"postprocess staged:labels_oddly.*--returns"):
        client.infer("oddly", x)
    with pytest.raises(errors.WorkerLost, match=r"postprocess staged:dies_behind.*died 3 times"):
        client.infer("deadly", x)
    assert client.infer("plain", x)["y"].shape == (1, WIDTH)
    with pytest.raises(errors.InvalidInput):
        client.register("n", module, example_inputs=example, postprocess="staged:label")


def stage_pid(running: tools.Checked, state: str) -> int:
    rows = [row for row in running.rows("stage") if row["state"] == state]
    return int(rows[0]["pid"]) if rows else 0


def test_an_answer_is_that_of_the_function_here_and_the_plain_model(
    running: tools.Checked, functions: ModuleType
) -> None:
    for value in ("a", "some longer text", "w" * 4 * WIDTH):
        expected = running.client.infer("plain", functions.rows(text(value))["x"])
        for name in ("rows", "lone"):
            answer = running.client.infer(name, {"text": text(value)})
            assert tools.is_bit_equal(torch.as_tensor(answer["y"]), torch.as_tensor(expected["y"]))
            timing = answer.timing
            assert 0.0 < timing.preprocess_ms <= timing.total_ms - timing.compute_ms
        assert expected.timing.preprocess_ms == 0.0
    with pytest.raises(errors.InvalidInput, match=r"expects uint8\[1\.\.256\], got float32"):
        running.client.infer("rows", np.zeros((1, WIDTH), np.float32))


def test_what_a_client_sends_is_told_everywhere(running: tools.Checked) -> None:
    row = running.client.show("rows")
    assert row["preprocess"] == "staged:rows"
    assert row["inputs"] == {"text": [["text.0"], "uint8"]}
    assert row["dims"]["text.0"] == [1, 4 * WIDTH]
    (planned,) = (one for one in running.client.plan()["models"] if one["name"] == "rows")
    assert planned["preprocess"] == "staged:rows"
    inputs = running.client.signature("rows").random(seed=1)
    assert running.client.infer("rows", inputs)["y"].shape == (1, WIDTH)


def test_while_a_function_blocks_other_models_compute_and_a_request_can_be_taken_back(
    running: tools.Checked, tmp_path: Path
) -> None:
    pipes = [tmp_path / "one", tmp_path / "two"]
    for pipe in pipes:
        os.mkfifo(pipe)
    slow = running.client.submit("blocks", {"text": text(str(pipes[0]))})
    tools.until(lambda: stage_pid(running, "active"), "it is called")
    behind = running.client.submit("rows", {"text": text("it waits for the process")})
    late = running.client.submit("rows", {"text": text("late")}, deadline_ms=1.0)
    assert running.client.infer("plain", np.ones((1, WIDTH), np.float32))["y"].shape == (1, WIDTH)
    with pytest.raises(errors.DeadlineExceeded, match="staged:rows"):
        late.result(30)
    tools.until(lambda: running.count("preprocessing") == 2, "only the two are left")
    assert running.row("blocks")["why"] == "1 preprocessing"
    assert not slow.done()
    assert not behind.done()
    pipes[0].write_text("go on")
    assert slow.result(30).timing.preprocess_ms > 0.0
    assert behind.result(30)["y"].shape == (1, WIDTH)

    taken_back = running.client.submit("blocks", {"text": text(str(pipes[1]))})
    tools.until(lambda: stage_pid(running, "active"), "it is called")
    assert taken_back.cancel() or isinstance(taken_back.exception(30), errors.Cancelled)
    tools.until(
        lambda: running.count("preprocessing") == 0, "it is taken back while its function runs"
    )
    pipes[1].write_text("go on")


def test_a_killed_process_costs_no_request_and_a_deadly_one_costs_its_own(
    running: tools.Checked, tmp_path: Path
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    slow = running.client.submit("blocks", {"text": text(str(pipe))})
    others = [running.client.submit("rows", {"text": text(f"{n}")}) for n in range(8)]
    killed = tools.until(lambda: stage_pid(running, "active"), "it is called")
    assert int(Path(f"/proc/{killed}/oom_score_adj").read_text()) == 1000  # killed first
    tools.kill(killed)
    tools.until(lambda: stage_pid(running, "active") not in (0, killed), "it is called again")
    pipe.write_text("go on")
    for one in (slow, *others):
        assert one.result(30)["y"].shape == (1, WIDTH)
    deadly = running.client.submit("dies", {"text": text("x")})
    others = [running.client.submit("rows", {"text": text(f"{n}")}) for n in range(4)]
    with pytest.raises(errors.WorkerLost, match=r"staged:dies.*died 3 times"):
        deadly.result(30)
    assert all(one.result(30)["y"].shape == (1, WIDTH) for one in others)


def test_what_a_function_returns_in_vain_is_one_error_that_names_it(running: tools.Checked) -> None:
    before = running.count("stage_restarts")
    for value, reason in ODD.items():
        with pytest.raises(errors.TaskFailed, match=rf"(?s)staged:odd.*{reason}"):
            running.client.infer("odd", {"text": text(value)})
    assert running.client.infer("odd", {"text": text("fine")})["y"].shape == (1, WIDTH)
    assert running.count("stage_restarts") == before


def test_what_a_function_has_started_ends_with_its_process(
    running: tools.Checked, tmp_path: Path
) -> None:
    """Check that processes end which the function started; they would keep their memory."""
    file = tmp_path / "pids"
    with pytest.raises(errors.WorkerLost, match=r"staged:starts.*died 3 times"):
        running.client.infer("starts", {"text": text(str(file))})
    pids = [int(line) for line in file.read_text().split()]
    assert len(pids) == 3
    tools.until(lambda: not any(map(tools.command_of, pids)), "they are gone")


def test_a_function_that_cannot_be_called_is_refused_when_it_is_registered(
    running: tools.Checked, functions: ModuleType
) -> None:
    tools.write_script(
        Path(str(functions.__file__)).parent, "staged_badly.py", "import os; os._exit(3)"
    )
    for function, reason in (
        ("nowhere:rows", "No module named 'nowhere'.*PYTHONPATH=FOLDER pipeswitch serve"),
        ("staged:missing", "staged has no missing; it has rows, none, lone, blocks$"),
        ("staged:row", 'no row; did you mean "rows"'),
        ("staged:os.name", "not callable"),
        ("staged:none", "--raw names: .*'text'"),
        ("staged_badly:rows", "status 3"),
    ):
        with pytest.raises(
            errors.RegistrationRefused, match=rf"preprocess: {function}: .*{reason}"
        ):
            running.client.register(
                "refused",
                tools.mlp(WIDTH, 2, 0),
                example_inputs=torch.zeros(1, WIDTH),
                preprocess=function,
                raw=RAW,
            )
    assert "refused" not in {row["name"] for row in running.client.models()}


def test_a_client_without_the_role_code_names_no_function(running: tools.Checked) -> None:
    options: dict[str, Any] = {"weights": "random:1", "raw": RAW}
    with running.running.client(tcp=True) as client:
        for function, words in (("staged:rows", 'role "code"'), ("other:rows", "--allow-code")):
            with pytest.raises(errors.PermissionDenied) as caught:
                client.register("n", "torchvision:resnet18", preprocess=function, **options)
            assert words in f"{caught.value.message} {caught.value.hint}"
        row = client.show("rows")
        assert row["inputs"] == {"text": [["text.0"], "uint8"]}
        assert "preprocess" not in row  # ``preprocess`` names a file of the server


def test_after_a_restart_a_model_has_its_function_and_one_of_the_configuration_its_own(
    options: dict[str, Any], functions: ModuleType, running: tools.Checked, tmp_path: Path
) -> None:
    value = text("once more")
    expected = running.client.infer("rows", {"text": value})
    running.settle()
    running.client.close()
    assert running.running.stop() == 0
    bundle = tmp_path / "m.bundle"
    export_module_to_bundle(tools.mlp(WIDTH, 2, 0), (torch.zeros(1, WIDTH),), bundle)
    config = tmp_path / "pipeswitch.toml"
    config.write_text(f"""
        [[model]]
        name = "configured"
        source = "{bundle}"
        preprocess = "staged:rows"
        raw = ["text=1..{4 * WIDTH}:uint8"]
    """)
    with tools.checked_server(args=("--config", str(config)), **options) as again:
        tools.until(lambda: again.client.show("configured")["state"] == "ready", "it is built")
        answer = again.client.infer("configured", {"text": value})
        assert tools.is_bit_equal(torch.as_tensor(answer["y"]), torch.as_tensor(expected["y"]))
        answer = again.client.infer("rows", {"text": value})
        assert tools.is_bit_equal(torch.as_tensor(answer["y"]), torch.as_tensor(expected["y"]))
        assert again.client.show("rows")["preprocess"] == "staged:rows"
