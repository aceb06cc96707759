"""A thousand switches leave no process larger, and nothing open, than after the first ones."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from process_tools import Checked, checked_server, eager, is_bit_equal, mlp

WIDTH = 64
WARM_UP, SAMPLE_EVERY = 200, 20
# Measured over 10,000 switches: 8 KiB in the controller, 0 in the daemon; a worker takes 10 MiB
# once, when the first request reaches it.
OWNER_BYTES, WORKER_BYTES = 1 << 20, 16 << 20


def processes(checked: Checked) -> dict[str, int]:
    """Everything that must not grow, by name."""
    workers = {f"worker-{slot}": pid for slot, pid in checked.worker_pids().items()}
    return {"controller": checked.pid, "daemon": checked.daemon_pid(), **workers}


def rss_bytes(pid: int) -> int:
    return int(Path("/proc", str(pid), "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def holdings(pid: int) -> dict[str, int]:
    """Descriptors, memfds among them (mapped ones too) and threads of a process."""
    links = []
    for entry in Path("/proc", str(pid), "fd").iterdir():
        links.append(os.readlink(entry))
    return {
        "descriptors": len(links),
        "memfds": sum("memfd:" in link for link in links),
        "mapped memfds": sum(
            "memfd:" in line for line in Path("/proc", str(pid), "maps").read_text().splitlines()
        ),
        "threads": len(list(Path("/proc", str(pid), "task").iterdir())),
    }


def slope_mib(samples: list[int]) -> float:
    """Growth in MiB per 10,000 switches, by least squares."""
    count = len(samples)
    mean_x, mean_y = (count - 1) / 2, sum(samples) / count
    over = sum((x - mean_x) * (y - mean_y) for x, y in enumerate(samples))
    per_sample = over / sum((x - mean_x) ** 2 for x in range(count))
    return per_sample / SAMPLE_EVERY * 10_000 / (1 << 20)


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("switches", "max_slope"),
    [(1_000, 10.0), pytest.param(10_000, 1.0, marks=pytest.mark.soak)],
)
def test_thousands_of_switches_grow_nothing(
    switches: int, max_slope: float, record_property: Callable[[str, object], None]
) -> None:
    """``max_slope``: MiB per 10,000 switches of controller and daemon; noise weighs less over
    more."""
    # 2 MiB of words and two regions of 2 MiB: with three models every request is a switch
    with checked_server(arena="6MiB") as checked:
        modules = {name: mlp(WIDTH, 2, seed) for seed, name in enumerate("abc")}
        x = torch.linspace(-1, 1, WIDTH).reshape(1, WIDTH)
        expected = {name: eager(module, x) for name, module in modules.items()}
        for name, module in modules.items():
            checked.client.register(name, module, example_inputs=(x,))

        def switch(number: int) -> None:
            name = "abc"[number % 3]
            assert is_bit_equal(checked.client.infer(name, x)["y"], expected[name])

        for number in range(WARM_UP):
            switch(number)
        before = checked.stats()
        pids = processes(checked)
        held = {name: holdings(pid) for name, pid in pids.items()}
        rss: dict[str, list[int]] = {name: [] for name in pids}
        for number in range(switches):
            switch(WARM_UP + number)
            if number % SAMPLE_EVERY == 0:
                for name, pid in pids.items():
                    rss[name].append(rss_bytes(pid))

        after = checked.stats()
        assert processes(checked) == pids  # nobody died on the way
        assert after["transmissions"] - before["transmissions"] >= switches * 0.9
        assert after["evictions"] - before["evictions"] >= switches * 0.9
        grown = {name: samples[-1] - samples[0] for name, samples in rss.items()}
        slopes = {name: round(slope_mib(samples), 1) for name, samples in rss.items()}
        record_property("rss MiB per 10,000 switches", slopes)
        for name, pid in pids.items():
            assert holdings(pid) == held[name], name
        for name, growth in grown.items():
            is_worker = name.startswith("worker")
            assert growth < (WORKER_BYTES if is_worker else OWNER_BYTES), (grown, slopes)
            assert is_worker or slopes[name] < max_slope, slopes
        for key in ("arena_free_bytes", "store_free_bytes", "pool_free_bytes", "workers"):
            assert after[key] == before[key], key
