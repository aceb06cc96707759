"""Choice of a device from the output of the self-test program, which may be incomplete."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from pipeswitch.base.config import Config, DeviceConfig, SecurityConfig
from pipeswitch.base.errors import ConfigError, PipeSwitchError
from pipeswitch.controller.setup import _separates_tenants, sizes_of
from pipeswitch.devices import ChosenDevice, registry
from pipeswitch.devices.cuda import examine as cuda_examine
from pipeswitch.devices.cuda import kind as cuda_kind
from pipeswitch.devices.cuda.examine import examine
from pipeswitch.devices.cuda.kind import GIB, CudaKind
from pipeswitch.devices.cuda.ladder import TESTS
from pipeswitch.devices.registry import facts_of

GPU = ChosenDevice(kind=CudaKind(), name="cuda:0", uuid="GPU-1", title="Fake GPU")


def choose_devices(name: str) -> tuple[ChosenDevice, ...]:
    return registry.choose_devices(DeviceConfig(name=name), workers=3, available_bytes=GIB)


def without_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_examine, "has_driver_library", lambda: False)


def test_no_process_is_started_where_there_is_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    without_driver(monkeypatch)
    monkeypatch.setattr(cuda_examine.subprocess, "Popen", None)  # any call raises
    with pytest.raises(ConfigError, match="no NVIDIA driver"):
        choose_devices("cuda:0")
    (chosen,) = choose_devices("auto")
    assert chosen.name == "cpu"
    assert chosen.why.startswith("not cuda: no NVIDIA driver")
    assert choose_devices("cpu")[0].why == "asked for"


def test_several_devices_are_each_chosen_with_their_own_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    without_driver(monkeypatch)
    both = choose_devices("cpu:0,cpu:1")
    assert [(one.name, one.kind.opened) for one in both] == [("cpu:0", "cpu"), ("cpu:1", "cpu")]
    free = {0: 16 * GIB, 1: 8 * GIB}

    def examined(package: str, index: int, *, tests: Any) -> dict[str, Any]:
        device = {"name": "Fake", "uuid": f"GPU-{index}", "count": 2, "free_bytes": free[index]}
        return {"device": device} | {test: {"is_ok": True, "text": ""} for test in TESTS}

    monkeypatch.setattr(cuda_kind, "examine", examined)
    both = choose_devices("cuda:0,cuda:1")
    assert [(one.name, one.kind.opened) for one in both] == [
        ("cuda:0", "cuda:0"),
        ("cuda:1", "cuda:0"),
    ]
    larger, smaller = sizes_of(Config(), both)
    assert larger.arena_bytes > smaller.arena_bytes >= 1 * GIB
    assert larger.store_bytes == smaller.store_bytes
    assert facts_of(both)["gpu_uuid"] == "GPU-0, GPU-1"
    gpu, cpu = sizes_of(Config(), choose_devices("cuda:0,cpu"))
    assert gpu.options
    assert not cpu.options
    assert gpu.arena_bytes == larger.arena_bytes != cpu.arena_bytes
    assert gpu.is_sandboxed is cpu.is_sandboxed is False


def test_a_program_that_says_nothing_is_told_with_its_last_words(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\necho 'not json'\necho 'no such library' >&2\nexit 5\n")
    program.chmod(0o755)
    monkeypatch.setattr(cuda_examine.sys, "executable", str(program))
    with pytest.raises(ConfigError, match=r"status 5 and said nothing: no such library"):
        examine("fake_cuda", 0)


def test_what_was_said_before_a_hang_counts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "program"
    device = '{"test": "device", "is_ok": true, "text": ""}'
    memory = '{"test": "memory", "is_ok": true}'
    program.write_text(f"#!/bin/sh\necho '{device}'\necho '{memory}'\nread forever\n")
    program.chmod(0o755)
    monkeypatch.setattr(cuda_examine.sys, "executable", str(program))
    read_end, write_end = os.pipe()
    monkeypatch.setattr(cuda_examine.subprocess, "DEVNULL", read_end)  # input that never ends
    monkeypatch.setattr(cuda_examine, "SELFTEST_S", 0.3)
    findings = examine("fake_cuda", 0, tests=("memory", "ipc"))
    assert {name: row["is_ok"] for name, row in findings.items()} == {
        "device": True,
        "memory": True,
        "ipc": False,
    }
    assert findings["ipc"]["text"] == "it did not run"
    os.close(read_end)
    os.close(write_end)


def test_a_gpu_belongs_to_one_server(tmp_path: Path) -> None:
    kind = CudaKind()
    with kind.reserve(GPU, tmp_path):
        with (
            pytest.raises(PipeSwitchError, match="another pipeswitch server holds cuda:0"),
            kind.reserve(GPU, tmp_path),
        ):
            pass
        (cpu,) = choose_devices("cpu")
        with cpu.kind.reserve(cpu), cpu.kind.reserve(cpu):
            pass
    with kind.reserve(GPU, tmp_path):
        pass


def test_on_cuda_tenants_cannot_be_separate() -> None:
    config = Config(security=SecurityConfig(tenants="separate"))
    with pytest.raises(ConfigError, match="needs the cpu device"):
        _separates_tenants(config, [GPU], is_sandboxed=False)
    assert _separates_tenants(config, choose_devices("cpu"), is_sandboxed=True)
    assert not _separates_tenants(Config(), [GPU], is_sandboxed=False)
