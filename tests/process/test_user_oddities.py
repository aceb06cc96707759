"""Unusual first uses: odd modules, odd arrays, odd scripts."""

from __future__ import annotations

import dataclasses
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from process_tools import Checked, checked_server, eager, finish, is_bit_equal, until, write_script
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from pipeswitch.base.errors import InvalidInput, PipeSwitchError, RegistrationRefused


@pytest.fixture(scope="module")
def running() -> Iterator[Checked]:
    with checked_server(arena="64MiB", host_store="128MiB") as checked:
        yield checked


class Calls(nn.Module):
    """A module that calls a function of its inputs."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.function(*inputs)


class TiedTable(nn.Module):
    """Embedding of ten rows whose weight is also the output layer's."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.table(ids))
        return logits


class Named(nn.Module):
    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return left - right


def made(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


IDS = torch.tensor([[1, 9, 3]])
SQUARES = made((2, 3, 8, 8))
ODD_MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[torch.Tensor, ...]]] = {
    "small-table": (lambda: nn.Embedding(10, 4), (IDS,)),
    "tied-table": (TiedTable, (IDS,)),
    "one-hot": (lambda: Calls(lambda i: F.one_hot(i, 10)), (IDS,)),
    "weight-norm": (lambda: weight_norm(nn.Linear(4, 4)), (made((2, 4)),)),
    "spectral-norm": (lambda: spectral_norm(nn.Linear(4, 4)), (made((2, 4)),)),
    "lstm-cell": (lambda: nn.LSTMCell(4, 5), (made((2, 4)),)),
    "gru-cell": (lambda: nn.GRUCell(4, 5), (made((2, 4)),)),
    "spectrum": (lambda: Calls(lambda x: torch.fft.rfft(x).abs()), (made((2, 8)),)),
    "bucketize": (
        lambda: Calls(lambda x: torch.bucketize(x, torch.tensor([0.0]))),
        (made((2, 4)),),
    ),
    "antialias": (
        lambda: Calls(lambda x: F.interpolate(x, size=(9, 9), mode="bicubic", antialias=True)),
        (SQUARES,),
    ),
    "unpool": (
        lambda: Calls(lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2)),
        (SQUARES,),
    ),
    "no-batch": (lambda: nn.Linear(4, 3), (made((4,)),)),
    "int8-weight": (
        lambda: Calls(lambda x: x @ torch.eye(4, dtype=torch.int8).float()),
        (made((2, 4)),),
    ),
}


@pytest.mark.parametrize("name", ODD_MODULES)
def test_an_odd_module_answers_bit_equal(running: Checked, name: str) -> None:
    make, inputs = ODD_MODULES[name]
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = make().eval()
        running.client.register(name, module, example_inputs=inputs)
    expected = eager(module, *(value.clone() for value in inputs))
    expected = [expected] if isinstance(expected, torch.Tensor) else list(expected)
    outputs = list(running.client.infer(name, list(inputs)).outputs.values())
    assert [is_bit_equal(a, b) for a, b in zip(outputs, expected, strict=True)] == [True] * len(
        outputs
    )


def test_inputs_are_called_what_forward_calls_them(running: Checked) -> None:
    left, right = made((2, 4)), torch.ones(2, 4)
    running.client.register("named", Named(), example_inputs=(left, right))
    assert list(running.client.show("named")["inputs"]) == ["left", "right"]
    for answer in (
        running.client.infer("named", [left, right]),
        running.client.infer("named", right=right, left=left),
    ):
        assert torch.equal(answer["y"], left - right)
    running.client.register("silent", Calls(torch.add), example_inputs=(left, right))
    assert list(running.client.show("silent")["inputs"]) == ["x0", "x1"]


@dataclasses.dataclass
class State:
    h: Any
    c: Any = None


class Nested(nn.Module):
    """Module with nested inputs and outputs; 20 MiB, so that two do not fit on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2200, 2200)

    def forward(self, x: torch.Tensor, state: Any, mask: Any = None) -> Any:
        h = torch.tanh(self.layer(x)) + state.h
        h = h if state.c is None else h + state.c
        cache = [{"key": h[:, :2], "value": h[:, 2:4]}, None]
        return {"out": h if mask is None else h * mask, "cache": cache, "state": State(h + 1)}


def test_what_nests_goes_in_and_comes_back_as_it_was_also_after_evictions() -> None:
    x, state = made((2, 2200)), State(made((2, 2200)) + 1)
    modules = {}
    with checked_server(arena="32MiB", host_store="64MiB") as checked:
        for name in ("nested-a", "nested-b"):
            modules[name] = Nested().eval()
            checked.client.register(name, modules[name], example_inputs=(x, state))
        assert list(checked.client.show("nested-a")["inputs"]) == ["x", "state.h"]
        names = ["out", "cache.0.key", "cache.0.value", "state.h"]
        assert list(checked.client.show("nested-a")["outputs"]) == names
        for name, module in [*modules.items()] * 2:
            expected = eager(module, x, state)
            for inputs in ((x, state, None), {"state": {"h": state.h}, "x": x, "mask": None}):
                answer = checked.client.infer(name, inputs)
                assert list(answer.outputs) == names
                value = answer.value
                assert is_bit_equal(value["out"], expected["out"])
                assert is_bit_equal(value["cache"][0]["key"], expected["cache"][0]["key"])
                assert is_bit_equal(value["state"]["h"], expected["state"].h)
                assert (value["cache"][1], value["state"]["c"]) == (None, None)
        assert checked.count("evictions") >= 2
        with pytest.raises(InvalidInput, match="takes 2 inputs"):
            checked.client.infer("nested-a", x=x, state=State(state.h, state.h))


class Counts(nn.Module):
    """Module whose answer depends on the number of calls, not only on its input."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return x * self.count


@pytest.mark.parametrize(
    ("source", "example", "says"),
    [
        (lambda: Counts(), made((2, 4)), "keeps state"),
        (lambda: Calls(lambda x: F.dropout(x, 0.5, True)), made((2, 4)), "random numbers"),
        (lambda: lambda x: x, made((2, 4)), "not an nn.Module"),
        (lambda: Named(), (made((2, 4)), 3), "only tensors and None are supported"),
        (lambda: Named(), 3, "neither a tensor"),
        (lambda: nn.EmbeddingBag(10, 4), IDS, "embedding_bag"),
        (lambda: Calls(lambda x: torch.as_strided(x, (4, 2), (2, 1))), made((2, 4)), "as_strided"),
        (lambda: Calls(lambda x: x if bool(x.sum() > 0) else -x), made((2, 4)), "export|data"),
        (
            lambda: Calls(torch.func.grad(lambda x: x.square().sum())),
            made((2, 4)),
            "Error|operator|traceable",
        ),
    ],
)
def test_a_module_that_cannot_be_served_is_refused_in_words(
    running: Checked, source: Callable[[], Any], example: Any, says: str
) -> None:
    with pytest.raises(RegistrationRefused, match=says):
        running.client.register("refused", source(), example_inputs=example)


def test_a_number_is_not_a_model(running: Checked) -> None:
    with pytest.raises(InvalidInput):
        running.client.register("refused", 3, example_inputs=made((2, 4)))  # type: ignore[arg-type]


def test_any_numpy_array_of_the_right_values_is_answered_alike(running: Checked) -> None:
    module, x = nn.Linear(4, 3), made((6, 4)).numpy()
    running.client.register("arrays", module, example_inputs=np.zeros((2, 4), "float32"))
    expected = eager(module, torch.from_numpy(x)).numpy()
    read_only = x.copy()
    read_only.flags.writeable = False
    for array in (x.astype(">f4"), np.asfortranarray(x), np.repeat(x, 2, 0)[::2], read_only):
        assert np.array_equal(running.client.infer("arrays", array)["y"], expected)


@pytest.mark.parametrize(
    "value",
    [
        [[1.0, 2.0], [3.0]],
        np.array([{}]),
        torch.zeros(2, 4, device="meta"),
        torch.zeros(2, 4, dtype=torch.complex64).conj(),
        torch.zeros(2, 4).to(torch.float8_e4m3fn),
    ],
    ids=["ragged", "objects", "meta", "conjugate", "float8"],
)
def test_what_is_no_array_is_an_invalid_input(running: Checked, value: Any) -> None:
    with pytest.raises(InvalidInput):
        running.client.infer("anything", value)


@pytest.mark.parametrize(
    "options",
    [
        {"inputs": {"x": (3, "float32")}},
        {"inputs": {"x": (1, 3, 64, 64)}},
        {"weights": None},
        {"source": "nothing.pt2"},
        {"source": nn.Linear(4, 4), "example_inputs": made((2, 4)), "weights": "random:0"},
    ],
    ids=["no-shape", "no-dtype", "no-weights", "no-file", "weights-for-a-module"],
)
def test_a_wrong_registration_is_one_typed_error(running: Checked, options: dict[str, Any]) -> None:
    options = {"source": "torchvision:resnet18", "weights": "random:0", **options}
    with pytest.raises(PipeSwitchError):
        running.client.register("wrong", options.pop("source"), **options)


@pytest.mark.skipif(sys.platform != "linux", reason="it forks")
def test_a_client_in_a_forked_child_says_so_and_the_parents_goes_on(running: Checked) -> None:
    with running.running.client() as client:
        client.about()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python warns about a fork of a process with threads
            pid = os.fork()
        if pid == 0:
            try:
                client.about()
            except PipeSwitchError:
                client.close()
                os._exit(42)
            finally:
                os._exit(1)
        status = 0

        def has_ended() -> bool:
            nonlocal status
            ended, status = os.waitpid(pid, os.WNOHANG)
            return ended == pid

        until(has_ended, "the child ended")
        assert os.waitstatus_to_exitcode(status) == 42
        assert client.about()["pid"] == running.pid


POOLS = """
    import multiprocessing, subprocess
    from pipeswitch import job

    def square(number):
        return number * number

    if __name__ == "__main__":
        for method in ("fork", "spawn"):
            with multiprocessing.get_context(method).Pool(2) as pool:
                print(method, pool.map(square, range(3)))
        child = subprocess.Popen(["sleep", "1000"])
        child.terminate()
        print("ended", child.wait())
"""


def test_a_scripts_own_processes_can_be_ended(running: Checked, tmp_path: Path) -> None:
    task = running.client.train(write_script(tmp_path, "pools.py", POOLS), name="pools")
    finish(task)
    log = "".join(task.logs())
    assert "fork [0, 1, 4]" in log
    assert "spawn [0, 1, 4]" in log
    assert "ended -15" in log
