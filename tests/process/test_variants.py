"""Variants on a real server: a switch copies only what differs, and each answer has its bits."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import process_tools as tools
import pytest
import torch

WIDTH, DEPTH = 512, 6  # 1 MiB in each layer
X = torch.randn(1, WIDTH)
THEIRS = ("theirs-exact", "theirs-bf16")  # models of another tenant, which never share
CHANGED = {"last": (10,), "two": (8, 10), "first": (0,), "all": tuple(range(0, 12, 2))}


def variant(name: str) -> Any:
    """Return the base with other weights in the layers of ``CHANGED``."""
    module, other = tools.mlp(WIDTH, DEPTH, 1), tools.mlp(WIDTH, DEPTH, 7 + len(name))
    for index in CHANGED.get(name, ()):
        module[index] = other[index]
    return module


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tools.Checked]:
    """Start a server with room for one variant, on which a layer's copy takes 0.2 s."""
    folder = tmp_path_factory.mktemp("variants")
    options: dict[str, Any] = {"environment": tools.ENVIRONMENT, "state_dir": folder / "state"}
    args = ("--link-gbps", "0.005")
    with tools.checked_server(arena="12MiB", args=args, **options) as checked:
        register(checked.client, folder, "exact")
        yield checked


@pytest.mark.parametrize("victim", ["worker", "daemon"])
@pytest.mark.parametrize("name", ["first-exact", "two-exact"])
def test_a_death_in_the_middle_of_a_partial_copy_leaves_nobodys_bytes(
    slow: tools.Checked, name: str, victim: str
) -> None:
    client, right = slow.client, tools.eager(variant(name.removesuffix("-exact")), X)
    client.infer("exact", X)
    future = client.submit(name, X)
    tools.until(lambda: client.show(name)["residency"] == "transmitting", "its copy runs")
    for pid in [*slow.worker_pids().values()] if victim == "worker" else [slow.daemon_pid()]:
        tools.kill(pid)
    assert tools.is_bit_equal(future.result(60).value, right)
    slow.wait_until_whole()
    for other, module in ((name, name.removesuffix("-exact")), ("exact", "base")):
        assert tools.is_bit_equal(client.infer(other, X).value, tools.eager(variant(module), X))


def test_after_the_servers_death_in_a_partial_copy_no_model_is_on_the_device(
    tmp_path: Path,
) -> None:
    options: dict[str, Any] = {"environment": tools.ENVIRONMENT, "state_dir": tmp_path / "state"}
    options |= {"arena": "12MiB", "args": ("--link-gbps", "0.005")}
    with tools.checked_server(settles=False, status=-signal.SIGKILL, **options) as checked:
        client, names = checked.client, register(checked.client, tmp_path, "exact")
        client.infer("exact", X)
        client.submit("two-exact", X)
        tools.until(lambda: client.show("two-exact")["residency"] == "transmitting", "it copies")
        tools.kill(checked.pid)
    with tools.checked_server(**options) as checked:
        client = checked.client
        assert {client.show(name)["residency"] for name in names} == {"host"}
        for name in ("two", "first"):
            right = tools.eager(variant(name), X)
            assert tools.is_bit_equal(client.infer(f"{name}-exact", X).value, right)


def test_a_cancelled_partial_copy_leaves_nobodys_bytes(slow: tools.Checked) -> None:
    client = slow.client
    client.infer("exact", X)
    client.prefetch("all-exact")
    tools.until(lambda: client.show("all-exact")["residency"] == "transmitting", "its copy runs")
    for name in ("two", "last", "all"):  # a request needs the link
        right = tools.eager(variant(name), X)
        assert tools.is_bit_equal(client.infer(f"{name}-exact", X).value, right)


TRAIN = """
    import torch
    from pipeswitch import job

    net = torch.nn.Sequential(
        *[layer for _ in range(6) for layer in (torch.nn.Linear(512, 512), torch.nn.Tanh())]
    ).to(job.device)
    optimizer = torch.optim.SGD(net[-2:].parameters(), 0.01)
    for step, x in enumerate(job.steps(torch.randn(8, 1, 512), model=net, optimizer=optimizer)):
        net(x).square().mean().backward()
        optimizer.step()
        if step % 2:
            job.publish("net")
"""


def test_a_published_version_is_copied_over_its_predecessor(tmp_path: Path) -> None:
    with tools.checked_server(environment=tools.ENVIRONMENT) as checked:
        client = checked.client
        client.register("net", variant("base"), example_inputs=X)
        task = client.train(tools.write_script(tmp_path, "train.py", TRAIN), name="job")
        tools.finish(task)
        tools.until(lambda: client.show("net")["version"] == 5, "it is published")
        newest = client.infer("net", X)
        before = checked.count("transmitted_bytes")
        client.rollback("net")  # which also copies it
        older = client.infer("net", X)
        assert checked.count("transmitted_bytes") - before == (1 << 20) + 2048
        assert not torch.equal(newest.value, older.value)


def register(client: Any, folder: Path, precision: str) -> list[str]:
    """Register the base, and variants of it; return their names."""
    client.register(precision, variant("base"), example_inputs=X, precision=precision)
    for name in CHANGED:
        torch.save(variant(name).state_dict(), folder / f"{name}.pt")
        client.register(f"{name}-{precision}", like=precision, weights=folder / f"{name}.pt")
    return [precision, *[f"{name}-{precision}" for name in CHANGED]]


@pytest.mark.parametrize(
    ("device", "count"),
    [("cpu", 60), ("cuda:0", 60), pytest.param("cpu", 200, marks=pytest.mark.slow)],
)
def test_under_evictions_kills_and_rollbacks_each_answer_is_its_own_models(
    tmp_path: Path, device: str, count: int
) -> None:
    """A first server, with room for all models, computes the expected answers of packed models. The
    models of another tenant have equal bytes, and a second server is killed while it copies."""
    environment = tools.fake_gpu(tmp_path) | tools.ENVIRONMENT
    options: dict[str, Any] = {
        "devices": (device,),
        "environment": environment,
        "state_dir": tmp_path / "state",
    }
    with (
        tools.checked_server(arena="256MiB", **options) as checked,
        checked.running.client(tcp=True) as stranger,
    ):
        client = checked.client
        names = [name for one in ("exact", "bf16") for name in register(client, tmp_path, one)]
        client.register("exact", weights=tmp_path / "two.pt", as_version=True)
        expected = {name: client.infer(name, X).value for name in names}
        stranger.register("theirs-exact", variant("two"), example_inputs=X)
        its = {"like": "theirs-exact", "weights": tmp_path / "two.pt", "precision": "bf16"}
        stranger.register("theirs-bf16", **its)
        for name in THEIRS:
            own, before = f"two-{name.removeprefix('theirs-')}", checked.count("transmitted_bytes")
            expected[name] = stranger.infer(name, X).value
            assert tools.is_bit_equal(expected[name], expected[own]), name
            row = client.show(name)
            assert checked.count("transmitted_bytes") - before == row["bytes"]
            assert "shared_bytes" not in row, "another tenant has these bytes"
    for name, module in {"exact": "two", "two-exact": "two", "last-exact": "last"}.items():
        assert tools.is_bit_equal(expected[name], tools.eager(variant(module), X))
    rng, options = random.Random(4), options | {"arena": "20MiB"}
    with tools.checked_server(settles=False, status=-signal.SIGKILL, **options) as checked:
        kept = soak(checked, rng, expected, range(count // 2))
        for name in rng.sample(names, 3):
            checked.client.submit(name, X)
        tools.kill(checked.pid)
    with tools.checked_server(**options) as checked:
        kept += soak(checked, rng, expected, range(count // 2, count))
    assert kept > count / 5


def soak(checked: Any, rng: random.Random, expected: dict[str, Any], indices: range) -> int:
    """Check each answer; return how many found bytes of a variant on the device, but not all."""
    client, kept = checked.client, 0
    with checked.running.client(tcp=True) as stranger:
        for index in indices:
            if index % 20 == 19:  # in the middle of a copy or of a computation
                futures = [(name, client.submit(name, X)) for name in rng.sample([*expected], 3)]
                pids = checked.worker_pids().values() if index % 40 == 19 else ()
                for pid in pids or [checked.daemon_pid()]:
                    tools.kill(pid)
                for name, future in futures:
                    assert tools.is_bit_equal(future.result(60).value, expected[name]), name
                checked.wait_until_whole()
            if index % 10 == 9:
                version = 1 + index // 10 % 2
                client.rollback("exact", version=version)
                expected["exact"] = tools.eager(variant(("base", "two")[version - 1]), X)
            name = rng.choice([*expected])
            result = (stranger if name in THEIRS else client).infer(name, X)
            assert tools.is_bit_equal(result.value, expected[name]), name
            assert not (name in THEIRS and result.timing.resident_bytes), name
            kept += result.timing.resident_bytes > 0
    return kept
