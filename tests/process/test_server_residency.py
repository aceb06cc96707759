"""What stays on the device is not sent again, and no client gets another's answer."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from process_tools import (
    Checked,
    checked_server,
    eager,
    is_bit_equal,
    mlp,
    start_endless_job,
    until,
)

from pipeswitch.wire.frames import (
    RequestHeader,
    WireTensor,
    encode_header,
)
from tests.raw_peer import RawPeer, ask, raw_peer

WIDTH = 512
DEPTH = 5  # 5 MiB of weights and some: regions of 6 MiB


@pytest.fixture(scope="module")
def modules() -> dict[str, torch.nn.Module]:
    return {name: mlp(WIDTH, DEPTH, seed) for seed, name in enumerate("abcd")}


@pytest.fixture(scope="module")
def running(modules: dict[str, torch.nn.Module]) -> Iterator[Checked]:
    """Room for three of the four models, or two and a training slice."""
    with checked_server(arena="22MiB") as checked:
        for name, module in modules.items():
            checked.client.register(name, module, example_inputs=(torch.zeros(1, WIDTH),))
        yield checked


@pytest.fixture(autouse=True)
def _settled(running: Checked) -> Iterator[None]:
    yield
    running.settle()


def still(checked: Checked) -> dict[str, Any]:
    """Counters when no copy is on its way: its end is told after the answer that it carried."""
    until(
        lambda: all(m["residency"] != "transmitting" for m in checked.client.models()),
        "no model is on its way",
    )
    return checked.stats()


def value(number: float) -> torch.Tensor:
    return torch.full((1, WIDTH), number)


def test_a_cold_request_transmits_the_model_once_and_the_bill_says_so(running: Checked) -> None:
    for name in "abc":
        running.client.infer(name, value(0.0))
    before = still(running)
    result = running.client.infer("d", value(0.0))
    after = still(running)
    assert not result.timing.resident
    assert result.timing.total_ms > 0
    size = running.client.show("d")["bytes"]
    assert after["transmitted_bytes"] - before["transmitted_bytes"] == size
    assert after["transmissions"] - before["transmissions"] == 1
    assert after["evictions"] - before["evictions"] == 1  # one of the three had to go
    assert sum(m["residency"] == "resident" for m in running.client.models()) == 3


def test_a_pinned_model_is_never_evicted_and_an_unpinned_one_may_be(running: Checked) -> None:
    client = running.client
    client.load("a")
    until(lambda: client.show("a")["residency"] == "pinned", "it is there without a request")
    for name in "bcdbcd":
        client.infer(name, value(0.0))
    assert client.show("a")["pinned"]
    before = still(running)["transmitted_bytes"]
    assert client.infer("a", value(0.0)).timing.resident
    assert still(running)["transmitted_bytes"] == before
    client.unload("a")
    assert not client.show("a")["pinned"]
    for name in "bcdbcd":
        client.infer(name, value(0.0))
    assert client.show("a")["residency"] == "host"


def test_training_that_is_suspended_in_place_loses_no_step(
    running: Checked, tmp_path: Path
) -> None:
    running.client.infer("a", value(0.0))
    task = start_endless_job(running, tmp_path)
    worker = task.status()["worker"]
    before = still(running)
    for number in range(25):
        step = task.status()["step"]
        result = running.client.infer("a", value(float(number)))
        assert result.timing.worker != worker
        assert task.status()["step"] >= step
    row = until(
        lambda: (lambda r: r if r["suspensions"] >= 10 else None)(task.status()),
        "it was suspended",
    )
    assert (row["restarts"], row["evictions"], row["steps_recomputed"]) == (0, 0, 0)
    assert row["worker"] == worker  # the same process all the time
    assert row["lease_bytes"] > 0
    after = still(running)
    assert after["preemptions"] - before["preemptions"] >= row["suspensions"]
    assert after["transmitted_bytes"] == before["transmitted_bytes"]


def test_two_clients_at_once_get_their_own_answers(
    running: Checked, modules: dict[str, torch.nn.Module]
) -> None:
    expected = {
        (name, number): eager(module, value(number / 100))
        for name, module in modules.items()
        for number in range(30)
    }
    wrong: list[tuple[str, int]] = []

    def ask(start: int) -> None:
        with running.running.client(tcp=bool(start)) as client:
            sent = [
                ("abcd"[(number + start) % 4], (number * 7 + start * 15) % 30)
                for number in range(60)
            ]
            futures = [(key, client.submit(key[0], value(key[1] / 100))) for key in sent]
            for key, future in futures:
                if not is_bit_equal(future.result(30)["y"], expected[key]):
                    wrong.append(key)

    threads = [threading.Thread(target=ask, args=(start,)) for start in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert wrong == []


def test_a_client_that_never_reads_holds_nobody_up(
    running: Checked, modules: dict[str, torch.nn.Module]
) -> None:
    """It sends requests with large answers and receives nothing but the first hello."""
    expected = eager(modules["a"], value(0.5))
    batch = 64  # 128 KiB in and out
    before = running.stats()["inference"]["accepted"]
    with deaf_client(running) as (deaf, session):
        x = WireTensor(name="x", dtype="float32", shape=(batch, WIDTH), frame=0)
        for number in range(100):
            header = RequestHeader(
                v=1, id=str(number), op="infer", model="a", session=session, inputs=(x,)
            )
            deaf.send(encode_header(header), bytes(4 * batch * WIDTH))
        until(lambda: running.stats()["inference"]["accepted"] >= before + 100, "all were accepted")
        for _ in range(20):
            assert is_bit_equal(running.client.infer("a", value(0.5))["y"], expected)
    until(lambda: running.stats()["inference"]["in_flight"] == 0, "all were ended")


@contextlib.contextmanager
def deaf_client(running: Checked) -> Iterator[tuple[RawPeer, str]]:
    """One that has said hello and reads no more, and its session."""
    with raw_peer(running.running.tcp_address, receive_bytes=4096) as peer:
        yield peer, ask(peer, op="hello").session


def test_a_client_in_the_middle_of_a_large_upload_holds_nobody_up(
    running: Checked, modules: dict[str, torch.nn.Module]
) -> None:
    expected = {n: eager(modules[n], value(0.25)) for n in "ab"}
    is_over = threading.Event()
    problems: list[Exception] = []

    def upload() -> None:
        try:
            with running.running.client(tcp=True) as slow:
                x = torch.zeros(1, 1024)
                slow.register("large", mlp(1024, 24, 9), example_inputs=(x,))  # 96 MiB
        except Exception as error:
            problems.append(error)
        finally:
            is_over.set()

    thread = threading.Thread(target=upload)
    thread.start()
    answered = 0
    while not is_over.is_set():
        name = "ab"[answered % 2]
        assert is_bit_equal(running.client.infer(name, value(0.25))["y"], expected[name])
        answered += 1
    thread.join(30)
    assert answered > 20
    # larger than the arena: refused when it has arrived, and the reason says both sizes
    assert [type(p).__name__ for p in problems] == ["OutOfDeviceMemory"]


def test_events_tell_of_every_switch(running: Checked) -> None:
    records: list[str] = []
    is_listening = threading.Event()

    def listen() -> None:
        events = running.client.events("switch.", timeout_s=5)
        is_listening.set()
        for event in events:
            records.append(event["topic"])
            if len(records) >= 2:
                return

    thread = threading.Thread(target=listen)
    thread.start()
    assert is_listening.wait(10)

    def look() -> bool:
        for name in "cdab":
            running.client.infer(name, value(0.0))
        return not thread.is_alive()

    until(look, "two switches were told")
    assert len(records) >= 2
