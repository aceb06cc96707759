"""Tenants with separate processes: what a hostile one reaches, and service of others (ADR 23)."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import process_tools as tools
import pytest
import torch
from torch import nn

from pipeswitch.base.errors import TaskFailed
from pipeswitch.client.client import Client
from pipeswitch.sandbox.confine import missing
from pipeswitch.testing import server

ROOT = Path(__file__).parents[2]
MIB = 1 << 20
FENCES_BYTES = 64 << 10  # at the start of each tenant's file
BLOCK_BYTES = 512

pytestmark = pytest.mark.skipif(
    bool(missing()), reason="without the sandbox tenants cannot be kept apart"
)

# The fork server imports this code, so it controls Python in workers that run model "hostile".
HOSTILE = """
import importlib.util, sys

def can_write(windows, descriptor, size):
    import ctypes, mmap, os
    both = mmap.PROT_READ | mmap.PROT_WRITE
    def reopened():
        os.close(os.open(f"/proc/self/fd/{{descriptor}}", os.O_RDWR))
    def changed():
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        place = libc.mmap(None, ctypes.c_size_t(size), 1, mmap.MAP_SHARED, descriptor, 0)
        windows._kernel("mprotect", place, size, both)
    for attempt in (
        lambda: windows._kernel("mmap", 0, size, both, mmap.MAP_SHARED, descriptor, 0),
        lambda: os.pwrite(descriptor, b"x", size - 1), changed, reopened,
    ):
        try:
            attempt()
        except OSError:
            continue
        return True
    return False

def infer(message, programs, pool, view, task, slot):
    import ctypes, json, mmap, os, struct
    from pipeswitch.devices.cpu import page_protection as windows
    from pipeswitch.ipc.messages.worker import InferenceFailed
    if not message.model.startswith("hostile"):
        return REAL[0](message, programs, pool, view, task, slot)
    programs.bound(message)
    for index in range(len(message.plan) or 1):
        view.wait_group(message.first_fence + index, message.residency_id)
    view.wait_turn(message.op_id)
    view.control_page.write_begun(slot, message.op_id)
    wanted = {{name: struct.pack("<4f", *[value] * 4) for name, value in {values!r}.items()}}
    found = set()
    while "stop" not in found:  # by then the victim's request waits too
        for descriptor in range(3, 256):
            try:
                data = os.pread(descriptor, {largest}, 0)
            except OSError:
                continue
            found |= {{name for name, pattern in wanted.items() if pattern in data}}
    mapped = set()  # size, whether it can be written
    for descriptor in range(3, 256):
        try:
            size = os.lseek(descriptor, 0, os.SEEK_END)
            windows._kernel("mmap", 0, size, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
        except OSError:
            continue
        mapped.add((size, can_write(windows, descriptor, size)))
    text = json.dumps([sorted(found), sorted(mapped)])
    task.send(InferenceFailed(op_id=message.op_id, error="TaskFailed", message=text, data={{}}))
    return False

REAL = []

class Finder:
    def find_spec(self, name, path, target=None):
        if name != "pipeswitch.workers.main" or REAL:
            return None
        REAL.append(None)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module
        def exec_module(module):
            execute(module)
            REAL[0], module.infer = module.infer, infer
        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Finder())
"""
WEIGHT, REQUEST = 42.125, 7.5
VALUES = {
    "another's weights": WEIGHT,
    "another's request": REQUEST,
    "another's answer": 4 * WEIGHT * REQUEST,
    "own weights": 3.375,
    "own request": 5.25,
    "stop": 9.0625,
}
ARENA_BYTES, POOL_BYTES = 32 * MIB, 8 * MIB


def constant(value: float) -> nn.Module:
    layer = nn.Linear(4, 4)
    nn.init.constant_(layer.weight, value)
    nn.init.zeros_(layer.bias)
    return layer


def row(value: float) -> torch.Tensor:
    return torch.full((1, 4), value)


def separate(**more: str) -> dict[str, str]:
    return {"PIPESWITCH_SECURITY__TENANTS": "separate", **more}


def output(answer: Any) -> torch.Tensor:
    [value] = answer.outputs.values()
    return torch.as_tensor(value)


@pytest.mark.parametrize("mode", ["shared", "separate"])
def test_a_workers_hostile_python_reads_and_maps_nothing_of_another_tenant(
    tmp_path: Path, mode: str
) -> None:
    """Search a worker for others' values. In shared workers, the search must find all of them."""
    code = HOSTILE.format(values=VALUES, largest=2 * ARENA_BYTES)
    (tmp_path / "sitecustomize.py").write_text(code)
    environment = {
        "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)]),
        "PIPESWITCH_SECURITY__TENANTS": mode,
        "PIPESWITCH_SERVER__POOL": str(POOL_BYTES),
    }
    with tools.checked_server(arena=str(ARENA_BYTES), environment=environment) as checked:
        running = checked.running
        with (
            running.client(tcp=True) as enemy,
            running.client(tcp=True) as again,
            running.client() as other,
            ThreadPoolExecutor(3) as threads,
        ):
            checked.client.register("victim", constant(WEIGHT), example_inputs=row(0.0))
            enemy.register("hostile", constant(3.375), example_inputs=row(0.0))
            answer = output(other.infer("victim", row(REQUEST)))
            first = threads.submit(enemy.infer, "hostile", row(5.25))
            tools.until(
                lambda: checked.row("hostile")["worker"] is not None, "the hostile one computes"
            )
            waiting = threads.submit(other.infer, "victim", row(REQUEST))
            tools.until(lambda: checked.stats()["pool_slabs"] == 4, "the victim's request waits")
            second = threads.submit(again.infer, "hostile", row(9.0625))
            values, mapped = report(first)
            report(second)
            assert tools.is_bit_equal(output(waiting.result()), answer)
            assert answer.tolist() == [[VALUES["another's answer"]] * 4]
    control_page, pool, models, work = (
        (4096, True),
        (POOL_BYTES, True),
        (ARENA_BYTES, False),
        (ARENA_BYTES, True),
    )
    if mode == "shared":
        assert set(values) == set(VALUES)
        assert mapped == [control_page, pool, models, work]
    else:
        assert set(values) == {"own weights", "own request", "stop"}
        assert mapped == [control_page, pool, models]


def report(ended: Future[Any]) -> tuple[list[str], list[tuple[int, bool]]]:
    """Return the values that a hostile run found, and (size, writable) of each mapped file."""
    with pytest.raises(TaskFailed) as caught:
        ended.result()
    values, mapped = json.loads(caught.value.message)
    return values, [(size, can_write) for size, can_write in mapped]


# -- service beside a hostile tenant -------------------------------------------------------------


class Pair:
    """Two tenants with one model each, in an arena with room for one model."""

    def __init__(self, checked: tools.Checked, stranger: Client) -> None:
        self.checked = checked
        self.clients = {"mine": checked.client, "theirs": stranger}
        self.nets = {"mine": tools.mlp(512, 6, 1), "theirs": tools.mlp(512, 6, 2)}
        self.x = torch.randn(2, 512, generator=torch.Generator().manual_seed(5))
        self.expected = {name: tools.eager(net, self.x) for name, net in self.nets.items()}
        for name, client in self.clients.items():
            client.register(name, self.nets[name], example_inputs=self.x)

    def ask(self, name: str) -> Any:
        answer = self.clients[name].infer(name, self.x)
        assert tools.is_bit_equal(output(answer), self.expected[name]), f"{name} answered wrongly"
        return answer

    def tenants_files(self, what: str, pid: int) -> dict[int, int]:
        """Return inode -> allocated bytes of the memfds ``pipeswitch-WHAT`` of a process."""
        bytes_by_file = {}
        for entry in Path("/proc", str(pid), "fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # it has just been closed
                if os.readlink(entry).startswith(f"/memfd:pipeswitch-{what}"):
                    facts = entry.stat()
                    bytes_by_file[facts.st_ino] = facts.st_blocks * BLOCK_BYTES
        return bytes_by_file

    def wait_until_arena_is_bounded(self) -> None:
        """Wait until the pages of evicted models are freed, which happens right after a copy."""

        def is_bounded() -> bool:
            models = self.tenants_files("models", self.checked.daemon_pid())
            return sum(models.values()) <= 12 * MIB + len(models) * FENCES_BYTES

        tools.until(is_bounded, "both tenants' models take no more than the arena")
        assert len(self.tenants_files("models", self.checked.daemon_pid())) == 2


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with (
        tools.checked_server(arena="12MiB", environment=separate()) as checked,
        checked.running.client(tcp=True) as stranger,
    ):
        yield Pair(checked, stranger)


def test_tenants_in_turns_answer_bit_for_bit_and_take_no_more_than_the_arena(pair: Pair) -> None:
    pids = pair.checked.worker_pids()
    for turn in range(100):
        answer = pair.ask(("mine", "theirs")[turn % 2])
        assert not answer.timing.resident, "the arena holds both: nothing is switched"
        if turn % 10 == 9:
            pair.wait_until_arena_is_bounded()
    assert pair.checked.worker_pids().keys() == pids.keys()
    pools = tools.until(
        lambda: (
            (bytes_by_file := pair.tenants_files("pool", pair.checked.pid))
            and not sum(bytes_by_file.values())
            and bytes_by_file
        ),
        "slabs are given back",
    )
    assert len(pools) == 2


def test_a_tenants_variant_is_copied_over_its_own_model_only(pair: Pair, tmp_path: Path) -> None:
    expected = dict(pair.expected)
    for seed, (name, client) in enumerate(pair.clients.items(), 1):
        module = tools.mlp(512, 6, seed)
        module[10] = tools.mlp(512, 6, 9)[10]  # equal for both tenants, like the models' biases
        torch.save(module.state_dict(), tmp_path / "own.pt")
        client.register(f"{name}-2", like=name, weights=tmp_path / "own.pt")
        expected[f"{name}-2"] = tools.eager(module, pair.x)
    before = "theirs"
    pair.ask(before)
    for name in ("mine", "mine-2", "mine", "theirs-2", "theirs", "theirs-2") * 3:
        answer = pair.clients[name.removesuffix("-2")].infer(name, pair.x)
        assert tools.is_bit_equal(output(answer), expected[name]), name
        pair.wait_until_arena_is_bounded()
        assert bool(answer.timing.resident_bytes) == (name[0] == before[0])
        before = name


def test_each_tenant_keeps_its_process_and_a_third_waits(pair: Pair) -> None:
    pair.ask("mine")
    pair.ask("theirs")
    pair.checked.wait_until_whole()
    pids = pair.checked.worker_pids()
    for name in ("mine", "theirs") * 3:
        pair.ask(name)
    assert pair.checked.worker_pids() == pids
    assert len(pids) == 3


@pytest.mark.parametrize("which", ["worker", "daemon"])
def test_after_a_kill_both_tenants_are_served_again(pair: Pair, which: str) -> None:
    pair.ask("mine")
    pair.ask("theirs")
    checked = pair.checked
    before = checked.daemon_pid()
    victims = [before] if which == "daemon" else list(checked.worker_pids().values())
    with ThreadPoolExecutor(2) as threads:
        futures = [threads.submit(pair.ask, name) for name in ("mine", "theirs")]
        for pid in victims:
            tools.kill(pid, signal.SIGKILL)
        for one in futures:
            one.result()
    checked.wait_until_whole()
    for name in ("mine", "theirs") * 2:
        pair.ask(name)
    assert (checked.daemon_pid() != before) == (which == "daemon")
    pair.wait_until_arena_is_bounded()


SCRIPT = """
    import torch
    from pipeswitch import job

    net = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    for x in job.steps([torch.ones(8, 64)] * 40, model=net, optimizer=optimizer):
        net(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def test_a_job_trains_between_the_requests_of_two_tenants(pair: Pair, tmp_path: Path) -> None:
    job = pair.checked.client.train(tools.write_script(tmp_path, "between.py", SCRIPT))
    for name in ("mine", "theirs") * 5:
        pair.ask(name)
    assert tools.finish(job)["step"] == 40


def test_the_owners_own_module_is_served_outside_of_the_sandbox(tmp_path: Path) -> None:
    source = """
        import torch
        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = torch.nn.Linear(4, 4)
            def forward(self, x):
                number = float(x[0, 0])  # this is no graph
                return self.layer(x) * (len(open(__file__).read()) if number == 1.0 else 2.0)
    """
    tools.write_script(tmp_path, "own_module.py", source)
    environment = separate(PYTHONPATH=os.pathsep.join([str(tmp_path), str(ROOT)]))
    sys.path.insert(0, str(tmp_path))
    try:
        with tools.checked_server(environment=environment) as checked:
            checked.client.register(
                "own", "own_module:Net", weights="random:5", inputs={"x": ((1, 4), "float32")}
            )
            assert checked.client.show("own")["mode"] == "module"
            with checked.running.client(tcp=True) as stranger:
                stranger.register("theirs", constant(2.0), example_inputs=row(0.0))
                for _ in range(3):
                    assert output(stranger.infer("theirs", row(1.0))).tolist() == [[8.0] * 4]
                    read, other = (checked.client.infer("own", row(x)) for x in (1.0, 2.0))
                    assert output(read).abs().max() > 50 * output(other).abs().max()
    finally:
        sys.path.remove(str(tmp_path))


def test_without_the_sandbox_tenants_cannot_be_separate() -> None:
    environment = separate(PIPESWITCH_SECURITY__SANDBOX="off")
    with (
        pytest.raises(
            RuntimeError, match=r"status 2 .*\n.*tenants.*separate.*needs all of the sandbox"
        ),
        server(environment=environment),
    ):
        pass
