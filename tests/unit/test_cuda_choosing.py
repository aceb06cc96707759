"""Choosing a device: what the self-test program says, and what it leaves unsaid."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from pipeswitch.config import Config, DeviceConfig, SecurityConfig
from pipeswitch.controller.main import _separates_tenants, _sizes
from pipeswitch.devices import choosing
from pipeswitch.devices.choosing import (
    GIB,
    ChosenDevice,
    choose_device,
    choose_devices,
    examine,
    facts_of,
    only_server_on,
)
from pipeswitch.errors import ConfigError, PipeSwitchError
from pipeswitch.ipc.messages import CudaOptions

GPU = ChosenDevice("cuda:0", "", uuid="GPU-1", title="Fake GPU", options=CudaOptions())


def without_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choosing, "has_driver_library", lambda: False)


def test_no_process_is_started_where_there_is_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    without_driver(monkeypatch)
    monkeypatch.setattr(choosing.subprocess, "Popen", None)  # a call of it fails
    with pytest.raises(ConfigError, match="no NVIDIA driver"):
        choose_device(DeviceConfig(name="cuda:0"), workers=3)
    chosen = choose_device(DeviceConfig(name="auto"), workers=3)
    assert (chosen.name, chosen.options) == ("cpu", None)
    assert "no NVIDIA driver" in chosen.why
    assert choose_device(DeviceConfig(name="cpu"), workers=3).why == "asked for"


def test_several_devices_are_each_chosen_with_their_own_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    without_driver(monkeypatch)
    both = choose_devices(DeviceConfig(name="cpu:0,cpu:1"), workers=3)
    assert [(one.name, one.opened) for one in both] == [("cpu:0", "cpu"), ("cpu:1", "cpu")]
    free = {0: 8 * GIB, 1: 4 * GIB}

    def examined(config: DeviceConfig, index: int, workers: int) -> ChosenDevice:
        return replace(GPU, name=config.name, uuid=f"GPU-{index}", free_bytes=free[index])

    monkeypatch.setattr(choosing, "_cuda", examined)
    both = choose_devices(DeviceConfig(name="cuda:0,cuda:1"), workers=3)
    assert [(one.name, one.opened) for one in both] == [("cuda:0", "cuda:0"), ("cuda:1", "cuda:0")]
    larger, smaller = _sizes(Config(), both)
    assert larger.arena_bytes > smaller.arena_bytes >= 1 * GIB
    assert larger.store_bytes == smaller.store_bytes
    assert facts_of(both)["gpu_uuid"] == "GPU-0, GPU-1"
    gpu, cpu = _sizes(Config(), choose_devices(DeviceConfig(name="cuda:0,cpu"), workers=3))
    assert gpu.cuda is not None
    assert cpu.cuda is None
    assert gpu.arena_bytes == larger.arena_bytes != cpu.arena_bytes
    assert gpu.is_sandboxed is cpu.is_sandboxed is False


def test_a_program_that_says_nothing_is_told_with_its_last_words(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\necho 'not json'\necho 'no such library' >&2\nexit 5\n")
    program.chmod(0o755)
    monkeypatch.setattr(choosing.sys, "executable", str(program))
    with pytest.raises(ConfigError, match=r"status 5 and said nothing: no such library"):
        examine("fake_cuda", 0, with_tests=False)


def test_what_was_said_before_a_hang_counts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "program"
    device = '{"test": "device", "is_ok": true, "text": ""}'
    program.write_text(
        f"#!/bin/sh\necho '{device}'\necho '{{\"test\": \"memory\"}}'\nread forever\n"
    )
    program.chmod(0o755)
    monkeypatch.setattr(choosing.sys, "executable", str(program))
    read_end, write_end = os.pipe()
    monkeypatch.setattr(choosing.subprocess, "DEVNULL", read_end)  # its input never ends
    found = examine("fake_cuda", 0, with_tests=True, timeout_s=0.3)
    assert sorted(found) == ["device", "memory"]
    os.close(read_end)
    os.close(write_end)


def test_a_gpu_belongs_to_one_server(tmp_path: Path) -> None:
    with only_server_on(GPU, tmp_path):
        with (
            pytest.raises(PipeSwitchError, match="another pipeswitch server holds cuda:0"),
            only_server_on(GPU, tmp_path),
        ):
            pass
        with only_server_on(ChosenDevice("cpu", ""), tmp_path):
            pass
    with only_server_on(GPU, tmp_path):
        pass


def test_on_cuda_tenants_cannot_be_separate() -> None:
    config = Config(security=SecurityConfig(tenants="separate"))
    with pytest.raises(ConfigError, match="needs the cpu device"):
        _separates_tenants(config, [GPU], is_sandboxed=False)
    assert _separates_tenants(config, [ChosenDevice(name="cpu", why="")], is_sandboxed=True)
    assert not _separates_tenants(Config(), [GPU], is_sandboxed=False)
