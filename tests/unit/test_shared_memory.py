"""The controller's memory descriptors: closing the last one frees memory outside of the loop."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import msgspec
import pytest

from pipeswitch.base.config import Config, SchedulerConfig
from pipeswitch.controller import server_memory
from pipeswitch.controller.folders import StateDir
from pipeswitch.controller.server_memory import DeviceShare, ServerMemory
from pipeswitch.controller.setup import make_scheduler, sizes_of
from pipeswitch.devices import ChosenDevice
from pipeswitch.devices.cpu.kind import CpuKind
from pipeswitch.extras.shared_input.rings import Rings
from pipeswitch.ipc.control_page import sealed_memfd
from pipeswitch.ipc.messages.base import JobName


def test_the_loop_waits_for_no_page_to_be_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Free 2 GiB outside of the loop: in the loop it took 0.3 s, while all requests waited."""
    closed: dict[int, threading.Thread] = {}
    close = os.close

    def note(descriptor: int) -> None:
        closed[descriptor] = threading.current_thread()
        close(descriptor)

    (sizes,) = sizes_of(Config(), (ChosenDevice(kind=CpuKind(), name="cpu"),))
    share, memory = DeviceShare(sizes), ServerMemory(sizes)
    memory.groups = [rings := Rings(Config())]
    arena, commits = (sealed_memfd("test", 4096) for _ in range(2))
    ring = rings.of("group", "reader")
    tenants = share.arena_of("tenant")
    share.take_arena([arena], b"")
    memory.commits[JobName("j")] = commits
    with monkeypatch.context() as patch:
        patch.setattr(server_memory.os, "close", note)
        share.drop_arenas()
        memory.drop_commits(JobName("j"))
        rings.leave("reader")
        for thread in set(threading.enumerate()) - {threading.main_thread()}:
            if thread.name == "close":
                thread.join()
    assert closed.keys() == {arena, commits, ring, *tenants}
    assert threading.main_thread() not in closed.values()
    assert share.arena == []
    share.close()
    memory.close()


@pytest.mark.parametrize("reserves_pool", [False, True])
def test_the_pages_of_a_pool_that_workers_pin_are_taken_once_and_before(
    reserves_pool: bool,
) -> None:
    (sizes,) = sizes_of(Config(), (ChosenDevice(kind=CpuKind(), name="cpu"),))
    sizes = msgspec.structs.replace(sizes, pool_bytes=1 << 20)
    memory = ServerMemory(sizes, reserves_pool=reserves_pool)
    assert os.fstat(memory.pool).st_blocks * 512 == (1 << 20 if reserves_pool else 0)
    memory.close()


def test_the_scheduler_gets_every_setting_of_its_section_that_it_knows(tmp_path: Path) -> None:
    scheduler_config = SchedulerConfig(
        training="fair", placement="spread", max_queue=7, stop_grace_ms=1.5
    )
    devices = (ChosenDevice(kind=CpuKind(), name="cpu"),)
    config = Config(scheduler=scheduler_config)
    scheduler = make_scheduler(config, devices, sizes_of(config, devices), StateDir(root=tmp_path))
    settings = scheduler.core.settings
    assert (settings.max_queue, settings.stop_grace_ms, settings.training) == (7, 1.5, "fair")
