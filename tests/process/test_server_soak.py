"""A thousand switches: no process grows or keeps descriptors after its warm-up."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from process_tools import Checked, checked_server, eager, is_bit_equal, mlp, rss_bytes, until

from tests.process.figures import publishing, say

WIDTH = 64
WARM_UP, SAMPLE_EVERY = 200, 20
LONG_WARM_UP = 2_000  # switches until every worker has had requests
OWNER_MIB, WORKER_MIB = 1.0, 16.0  # limits of growth; a worker's first request takes 10 MiB


def processes(checked: Checked) -> dict[str, int]:
    """Return name -> pid of the processes that must not grow."""
    workers = {f"worker-{slot}": pid for slot, pid in checked.worker_pids().items()}
    return {"controller": checked.pid, "daemon": checked.daemon_pid(), **workers}


def holdings(pid: int) -> dict[str, int]:
    """Return the numbers of a process's descriptors, open memfds, mapped memfds and threads."""
    links = []
    for entry in Path("/proc", str(pid), "fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it has just been closed
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
    """Return the growth in MiB per 10,000 switches, by least squares."""
    count = len(samples)
    mean_x, mean_y = (count - 1) / 2, sum(samples) / count
    over = sum((x - mean_x) * (y - mean_y) for x, y in enumerate(samples))
    per_sample = over / sum((x - mean_x) ** 2 for x in range(count))
    return per_sample / SAMPLE_EVERY * 10_000 / (1 << 20)


KEPT = ("arena_free_bytes", "store_free_bytes", "pool_free_bytes", "workers")  # must not change


class Soak:
    """Three models in an arena for two: every request is a switch. All processes are monitored."""

    def __init__(self, checked: Checked) -> None:
        self.checked = checked
        self.x = torch.linspace(-1, 1, WIDTH).reshape(1, WIDTH)
        modules = {name: mlp(WIDTH, 2, seed) for seed, name in enumerate("abc")}
        self.expected = {name: eager(module, self.x) for name, module in modules.items()}
        for name, module in modules.items():
            checked.client.register(name, module, example_inputs=(self.x,))
        self.number = 0

    def switch(self, times: int) -> None:
        for _ in range(times):
            name = "abc"[self.number % 3]
            answer = self.checked.client.infer(name, self.x)["y"]
            assert is_bit_equal(answer, self.expected[name])
            self.number += 1

    def run(self, warm_up: int, switches: int, figures: dict[str, Any]) -> None:
        """Switch, sample memory and fill ``figures``; check everything that must not change."""
        self.switch(warm_up)
        before, pids = self.checked.stats(), processes(self.checked)
        held_before = {name: holdings(pid) for name, pid in pids.items()}
        rss: dict[str, list[int]] = {name: [] for name in pids}
        for number in range(0, switches, SAMPLE_EVERY):
            self.switch(SAMPLE_EVERY)
            for name, pid in pids.items():
                rss[name].append(rss_bytes(pid))
            figures["switches"] = number + SAMPLE_EVERY
            if number % 1_000 == 0:
                say(f"{number} of {switches} switches")
        after, held_after = self.checked.stats(), {n: holdings(pid) for n, pid in pids.items()}
        figures.update(
            warm_up=warm_up,
            transmissions=after["transmissions"] - before["transmissions"],
            evictions=after["evictions"] - before["evictions"],
            slope_mib_per_10000={n: round(slope_mib(each), 2) for n, each in rss.items()},
            grown_mib={n: round((each[-1] - each[0]) / (1 << 20), 2) for n, each in rss.items()},
            deltas={key: after[key] - before[key] for key in KEPT},
            held_deltas={
                kind: sum(held_after[n][kind] - held_before[n][kind] for n in pids)
                for kind in ("descriptors", "memfds", "mapped memfds", "threads")
            },
        )
        assert processes(self.checked) == pids  # no process died
        until(  # the controller looks at its children, and has a file open meanwhile
            lambda: all(
                count <= held_before[name][kind]
                for name, pid in pids.items()
                for kind, count in holdings(pid).items()
            ),
            f"no process holds more than {held_before}",
        )
        assert not any(figures["deltas"].values()), figures
        assert figures["transmissions"] >= switches * 0.9
        assert figures["evictions"] >= switches * 0.9


ARENA = "6MiB"  # 2 MiB of fences and two regions of 2 MiB


@pytest.mark.timeout(240)
def test_a_thousand_switches_grow_nothing() -> None:
    figures: dict[str, Any] = {}
    with checked_server(arena=ARENA) as checked:
        Soak(checked).run(WARM_UP, 1_000, figures)
    for name, grown_mib in figures["grown_mib"].items():
        is_worker = name.startswith("worker")
        assert grown_mib < (WORKER_MIB if is_worker else OWNER_MIB), figures
        assert is_worker or figures["slope_mib_per_10000"][name] < 10.0, figures  # noise in workers


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_twenty_thousand_switches_grow_nothing() -> None:
    with publishing("switches") as figures, checked_server(arena=ARENA) as checked:
        Soak(checked).run(LONG_WARM_UP, 20_000, figures)
        for name, slope in figures["slope_mib_per_10000"].items():
            assert slope < 1.0, f"{name}: {figures}"
