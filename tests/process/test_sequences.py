"""Sequences with state on the server: bit-equal to a plain loop, without leftovers."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from process_tools import Checked, checked_server, eager, is_bit_equal, kill, mlp, until

from pipeswitch.base.errors import InvalidInput, RegistrationRefused, SequenceNotFound
from tests.models.sequences import CELL, RECALLS, WIDTH, Cell, Recalls, seeded

STEPS = 40


class Sliding(torch.nn.Module):
    """Causal convolution that gets a sound piece by piece."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv1d(2, 3, kernel_size=9)

    def forward(self, x: torch.Tensor, past: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        whole = torch.cat((past, x), -1)
        return torch.tanh(self.conv(whole)), whole[..., -8:].clone()


def cell_inputs(batch: int) -> tuple[torch.Tensor, ...]:
    return torch.zeros(batch, 8), torch.zeros(batch, WIDTH), torch.zeros(batch, WIDTH)


@pytest.fixture(scope="module")
def running() -> Iterator[Checked]:
    with checked_server(
        arena="16MiB", host_store="64MiB", http=True, tcp_roles=("infer",)
    ) as checked:
        client = checked.client
        client.register("cell", seeded(Cell), example_inputs=cell_inputs(2), state=CELL)
        example = (torch.zeros(1, 2, 16), torch.zeros(1, 2, 8))
        dynamic = {"x": {2: (1, 64)}}
        client.register(
            "sliding",
            seeded(Sliding),
            example_inputs=example,
            dynamic=dynamic,
            state={"past": "y1"},
        )
        example = (torch.zeros(1, 3, 8), torch.zeros(1, 5, 8))
        dynamic = {"x": {1: ("length", 1, 64)}, "past": {1: ("past", 1, 400)}}
        client.register(
            "recalls", seeded(Recalls), example_inputs=example, dynamic=dynamic, state=RECALLS
        )
        client.register("plain", mlp(8, 2, 0), example_inputs=torch.zeros(2, 8))
        yield checked


@pytest.fixture(autouse=True)
def nothing_is_left(running: Checked) -> Iterator[None]:
    yield
    until(lambda: running.stats()["pool_slabs"] == 0, "the pool is empty")
    assert running.client.sequences() == []


def pieces(batch: int, seed: int, count: int = STEPS) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(batch, 8, generator=generator) for _ in range(count)]


def plain_loop(inputs: list[torch.Tensor], h: torch.Tensor, c: torch.Tensor) -> list[torch.Tensor]:
    cell, outputs = seeded(Cell), []
    with torch.inference_mode():
        for x in inputs:
            out = eager(cell, x, h, c)
            h, c = out["h_out"], out["c_out"]
            outputs.append(out["y"])
    return outputs


def strike(running: Checked, are_over: threading.Event) -> None:
    """Kill a worker every 0.15 s, but none again before an answer: a request has three tries."""
    while not are_over.wait(0.15):
        for pid in list(running.worker_pids().values())[:1]:
            kill(pid)
        answered = running.stats()["inference"]["ok"]
        while running.stats()["inference"]["ok"] == answered and not are_over.wait(0.01):
            pass


def test_many_at_once_equal_plain_loops_while_workers_are_killed(running: Checked) -> None:
    """Run sequences of different batch sizes at once; one begins with an explicit state."""
    client = running.client
    inputs = [pieces(1 + seed % 3, seed) for seed in range(6)]
    starts = [cell_inputs(len(one[0]))[1:] for one in inputs]
    starts[0] = tuple(torch.randn(s.shape) for s in starts[0])
    expected = [plain_loop(one, *start) for one, start in zip(inputs, starts, strict=True)]
    open_ones = [client.sequence("cell") for _ in inputs]
    strikes = threading.Event()
    striking = threading.Thread(target=strike, args=(running, strikes))
    striking.start()
    for step in range(STEPS):
        for number, one in enumerate(open_ones):
            x = inputs[number][step]
            brought = dict(zip("hc", starts[0], strict=True)) if step == number == 0 else {}
            answer = one.infer(x=x, **brought)
            assert [*answer] == ["y"]
            assert is_bit_equal(torch.as_tensor(answer["y"]), expected[number][step])
    strikes.set()
    striking.join()
    rows = {row["id"]: row for row in client.sequences()}
    assert {row["steps"] for row in rows.values()} == {STEPS}
    assert rows[open_ones[2].id]["bytes"] == 2 * 3 * WIDTH * 4
    for one in open_ones:
        one.close()


def test_pieces_of_any_length(running: Checked) -> None:
    sliding, past = seeded(Sliding), torch.zeros(1, 2, 8)
    with running.client.sequence("sliding") as one, torch.inference_mode():
        for length in (1, 16, 64, 3, 1, 1, 40):
            x = torch.randn(1, 2, length)
            expected, past = eager(sliding, x, past)
            assert is_bit_equal(torch.as_tensor(one.infer(x).outputs["y0"]), expected)


def test_a_state_that_grows_is_appended_where_it_lies(running: Checked) -> None:
    client, recalls, strikes = running.client, seeded(Recalls), threading.Event()
    striking = threading.Thread(target=strike, args=(running, strikes))
    striking.start()
    with client.sequence("recalls") as one, torch.inference_mode():
        past = torch.randn(1, 7, 8)
        for length in (33, *[1] * 150, 64, 64, 64, 10, 8):
            x = torch.randn(1, length, 8)
            expected = eager(recalls, x, past)
            first = {"past": past} if past.shape[1] == 7 else {}
            assert is_bit_equal(torch.as_tensor(one.infer(x=x, **first)["y"]), expected["y"])
            past = torch.cat((past, expected["rows"]), 1)
        strikes.set()
        striking.join()
        assert past.shape[1] == 400
        with pytest.raises(InvalidInput, match="would have 401 rows; the model takes at most 400"):
            one.infer(torch.zeros(1, 1, 8))
        assert client.sequences()[0]["bytes"] == 4 * 128 * 8 * 4  # 4 pages of 128 rows
        with pytest.raises(InvalidInput, match='"past" is the state'):
            one.infer(x=torch.zeros(1, 1, 8), past=past)
    with pytest.raises(InvalidInput):  # a growing state has no default
        client.sequence("recalls").infer(x=torch.zeros(1, 1, 8))
    for wrong in (torch.zeros(1, 401, 8), torch.zeros(1, 0, 8), torch.zeros(1, 1, 7)):
        with pytest.raises(InvalidInput, match='input "past" expects'):
            client.sequence("recalls").infer(x=torch.zeros(1, 1, 8), past=wrong)


def test_what_fails_leaves_the_state_and_what_is_over_is_said(running: Checked) -> None:
    client, (x, y) = running.client, pieces(2, 7, 2)
    expected = plain_loop([x, y], *cell_inputs(2)[1:])
    with client.sequence("cell") as one:
        one.infer(x)
        with pytest.raises(InvalidInput, match="expects float32"):
            one.infer(x.double())
        with pytest.raises(InvalidInput, match='"h" is the state'):
            one.infer(x=x, h=torch.zeros(2, WIDTH))
        with pytest.raises(InvalidInput, match="batch=3"):
            one.infer(torch.zeros(3, 8))
        assert is_bit_equal(torch.as_tensor(one.infer(y)["y"]), expected[1])
        client.end_sequence(one.id)
        with pytest.raises(SequenceNotFound):
            one.infer(y)
    with pytest.raises(InvalidInput):
        one.infer(y)
    with pytest.raises(InvalidInput):
        client.sequence("plain").infer(x)
    with pytest.raises(SequenceNotFound):
        client.end_sequence("nothing")
    with pytest.raises(RegistrationRefused, match='no output "h_uot"'):
        client.register("wrong", seeded(Cell), example_inputs=cell_inputs(2), state={"h": "h_uot"})
    with pytest.raises(RegistrationRefused, match="appended along dimension 5"):
        client.register(
            "wrong", seeded(Cell), example_inputs=cell_inputs(2), state={"h": ("h_out", 5)}
        )
    example = (torch.zeros(1, 3, 8), torch.zeros(1, 5, 8))
    with pytest.raises(RegistrationRefused, match="dynamic="):  # the state needs it to grow
        client.register("wrong", seeded(Recalls), example_inputs=example, state=RECALLS)
    for odd in ({"h": 5}, {"h": ("h_out", -2)}):
        with pytest.raises(InvalidInput, match="register: state"):
            client.register("wrong", seeded(Cell), example_inputs=cell_inputs(2), state=odd)


def test_a_client_that_is_gone_leaves_nothing_and_another_cannot_go_on(running: Checked) -> None:
    (x,) = pieces(1, 3, 1)
    with running.running.client() as gone:
        mine = gone.sequence("cell", id="shared-name")
        mine.infer(x)
        with running.running.client(tcp=True) as other:
            theirs = other.sequence("cell", id="shared-name")
            theirs._is_started = True  # the request claims to continue the sequence
            with pytest.raises(SequenceNotFound):
                theirs.infer(x)


def test_sequences_over_http(running: Checked) -> None:
    inputs = pieces(1, 5, 3)
    expected = plain_loop(inputs, *cell_inputs(1)[1:])
    url = f"http://{running.running.http_address}/v2/models/cell/infer"

    def ask(x: torch.Tensor, name: str = "y", **parameters: Any) -> dict[str, Any]:
        tensor = {"name": "x", "datatype": "FP32", "shape": list(x.shape), "data": x.tolist()}
        wanted = {"outputs": [{"name": name}], "parameters": parameters}
        body = json.dumps({"inputs": [tensor], **wanted}).encode()
        with urllib.request.urlopen(url, body) as answer:
            return json.load(answer)

    for step, x in enumerate(inputs):
        flags = {"sequence_start": step == 0, "sequence_end": step == 2}
        for name in ("h_out", "typo"):  # a state is not sent; the step is not computed
            with pytest.raises(urllib.error.HTTPError, match="400") as wrong:
                ask(x, name, sequence_id=42, **flags)
            wrong.value.close()
        (row,) = ask(x, sequence_id=42, **flags)["outputs"]
        assert np.array_equal(np.float32(row["data"]), expected[step].numpy().ravel())
    with pytest.raises(urllib.error.HTTPError) as refused:
        ask(inputs[0], sequence_id=42)
    with refused.value as answer:
        assert answer.code == 404
