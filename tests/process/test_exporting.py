"""Exporting a module changes nothing else in its process, whatever thread asks (ADR 0017)."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import nn

from pipeswitch.programs.build.alone import one_export_at_a_time
from pipeswitch.programs.build.export import export_module, export_module_to_bundle
from pipeswitch.programs.torch_settings import TorchSettings

X = torch.zeros(2, 4)
THREADS = 8


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.GELU())


class During(nn.Module):
    """Does something when it is traced."""

    def __init__(self, act: Callable[[], object]) -> None:
        super().__init__()
        self._act = act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._act()
        return x + 1


def test_eight_threads_export_at_once_and_torch_is_as_it_was(tmp_path: Path) -> None:
    before = TorchSettings.now()
    with ThreadPoolExecutor(THREADS) as pool:
        summaries = list(
            pool.map(
                lambda n: export_module_to_bundle(layers(), X, tmp_path / f"{n}.bundle"),
                range(THREADS),
            )
        )
    assert TorchSettings.now() == before
    assert [summary["dims"]["batch"] for summary in summaries] == [[1, 64]] * THREADS


def test_who_waits_for_an_exports_end_computes_with_mkldnn() -> None:
    tracing, looked = threading.Event(), threading.Event()
    seen: list[tuple[bool, bool]] = []

    def look() -> None:
        tracing.wait()
        with one_export_at_a_time():
            seen.append((torch.backends.mkldnn.enabled, torch.compiler.is_exporting()))
            looked.set()

    def when_traced() -> None:
        if torch.compiler.is_exporting():
            tracing.set()
            assert not looked.wait(0.1), "it looked while this was traced"

    looking = threading.Thread(target=look)
    looking.start()
    try:
        export_module(During(when_traced), X)
    finally:
        tracing.set()
        looking.join()
    assert seen == [(True, False)]


def test_what_an_export_leaves_switched_off_is_put_back_and_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    before = TorchSettings.now()
    export_module(During(lambda: torch.backends.mkldnn.set_flags(False)), X)
    assert TorchSettings.now() == before
    said = [r.message for r in caplog.records if r.name == one_export_at_a_time.__module__]
    assert [" put_back=" in text for text in said] == [True]


def test_an_export_hides_no_other_threads_errors(capsys: pytest.CaptureFixture[str]) -> None:
    def complain() -> None:
        sys.stderr.write("of the tracing thread")
        thread = threading.Thread(target=lambda: sys.stderr.write("of another"))
        thread.start()
        thread.join()

    calls: list[bool] = []

    def when_traced() -> None:
        calls.append(torch.compiler.is_exporting())
        if calls[-1]:
            complain()

    export_module(During(when_traced), X)
    assert any(calls)
    assert set(capsys.readouterr().err.split("of another")) == {""}


def run_python(source: str, *arguments: object) -> list[str]:
    """The words that a process of its own prints."""
    command = [sys.executable, "-c", source, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_a_worker_does_not_import_the_exporter() -> None:
    loaded = run_python(
        "import sys, workers.main, pipeswitch.programs.executor; print(*sys.modules)"
    )
    assert "pipeswitch.programs.executor" in loaded
    assert not {"pipeswitch.programs.build.export", "pipeswitch.programs.build.encoder"} & {*loaded}


def test_a_server_is_ready_without_what_only_exports_and_scripts_import(tmp_path: Path) -> None:
    """And the build of a bundle imports nothing more: it would do so once for each model."""
    export_module_to_bundle(layers(), X, tmp_path / "m.bundle")
    first, more, later = run_python(
        """
import pathlib, sys
from pipeswitch.launch import FIRST, LATER, import_for_children
import_for_children(FIRST)
print({*LATER} & {*sys.modules} or "light")
from pipeswitch.programs.build.program import BuildSpec, build
before = {*sys.modules}
source, out = sys.argv[1:]
build(BuildSpec(name="m", source=source), pathlib.Path(out), lambda *_: None)
print({*sys.modules} - before or "nothing")
import_for_children(LATER)
print({*LATER} <= {*sys.modules})
""",
        tmp_path / "m.bundle",
        tmp_path / "m",
    )
    assert (first, more, later) == ("light", "nothing", "True")
