"""Exporting a module, from any thread, must change nothing else in the process (ADR 0017)."""

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

from pipeswitch.base.errors import RegistrationRefused
from pipeswitch.programs.compiler.export import export_module, export_module_to_bundle
from pipeswitch.programs.compiler.export_lock import one_export_at_a_time
from pipeswitch.programs.compiler.program import build
from pipeswitch.programs.running.torch_settings import TorchSettings
from pipeswitch.programs.spec import BuildSpec

X = torch.zeros(2, 4)
THREADS = 8


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.GELU())


class During(nn.Module):
    """Module that calls ``act`` when it is traced."""

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
    states: list[tuple[bool, bool]] = []

    def look() -> None:
        tracing.wait()
        with one_export_at_a_time():
            states.append((torch.backends.mkldnn.enabled, torch.compiler.is_exporting()))
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
    assert states == [(True, False)]


def test_what_an_export_leaves_switched_off_is_put_back_and_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    before = TorchSettings.now()
    export_module(During(lambda: torch.backends.mkldnn.set_flags(False)), X)
    assert TorchSettings.now() == before
    messages = [r.message for r in caplog.records if r.name == one_export_at_a_time.__module__]
    assert [" put_back=" in text for text in messages] == [True]


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
    """Run Python code in a new process; return the words of its output."""
    command = [sys.executable, "-c", source, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout.split()


class Windows(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.unfold(1, 3, 1).mean(2)


def test_windows_that_overlap_are_copied() -> None:
    """Overlapping windows must be copies: with views, attention kernels once read freed memory."""
    program = export_module(Windows(), torch.rand(2, 5))
    assert program.graph.nodes[0].target == "aten.unfold_copy.default"


class Lone(nn.Module):
    """One row takes another path; an export of one row is made with two."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 3.0 if x.shape[0] == 1 else x - x.mean(0)


@pytest.mark.parametrize("rows", [1, 2])
def test_a_path_for_one_row_fixes_the_batch(rows: int, tmp_path: Path) -> None:
    made = export_module_to_bundle(Lone(), torch.rand(rows, 4), tmp_path / "m.bundle")
    assert made["dims"] == {}
    assert any("batch is fixed" in note for note in made["notes"])


class WrittenWindows(nn.Module):
    """``order``: which of the windows and what they show is written, and which is returned."""

    def __init__(self, order: str) -> None:
        super().__init__()
        self.order = order

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shown = x if self.order == "input" else x * 1.0
        windows = shown.unfold(1, 2, 2)
        if self.order == "windows":
            windows.clamp_(max=50.0)
            return shown
        part = shown[:, 1:] if self.order == "slice" else shown
        part.clamp_(max=50.0)
        return windows.sum(2)


@pytest.mark.parametrize("order", ["windows", "shown", "slice", "input"])
def test_windows_that_a_write_reaches_are_not_copied(order: str) -> None:
    """No example shows it: nothing in it is over the limit."""
    with pytest.raises(RegistrationRefused, match="unfold") as caught:
        export_module(WrittenWindows(order), torch.rand(2, 6))
    assert caught.value.hint


def test_windows_may_be_written_if_nothing_else_sees_it() -> None:
    program = export_module(Written(), torch.rand(2, 6))
    targets = [node.target for node in program.graph.nodes]
    assert targets[-3:-1] == ["aten.unfold_copy.default", "aten.relu_.default"]


class Written(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shown = torch.zeros_like(x)
        shown[:, 1:] = x[:, 1:]
        return shown.unfold(1, 2, 2).relu_().sum(2)


def test_a_worker_imports_neither_the_exporter_nor_an_extra() -> None:
    loaded = run_python(
        "import sys, pipeswitch.workers.main\n"
        "import pipeswitch.programs.running.executor\n"
        "print(*sys.modules)"
    )
    assert "pipeswitch.programs.running.executor" in loaded
    compiler = "pipeswitch.programs.compiler"
    assert not {f"{compiler}.export", f"{compiler}.encoder"} & {*loaded}
    assert not [one for one in loaded if one.startswith("pipeswitch.extras")]


def test_a_server_is_ready_without_what_only_exports_and_scripts_import(tmp_path: Path) -> None:
    """The build of a bundle must not import them either, because each build would take longer."""
    export_module_to_bundle(layers(), X, tmp_path / "m.bundle")
    first, more, later = run_python(
        """
import pathlib, sys
from pipeswitch.launch import FIRST, LATER, import_for_children
import_for_children(FIRST)
print({*LATER} & {*sys.modules} or "light")
from pipeswitch.programs.compiler.program import BuildSpec, build
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


class Keeps(nn.Module):
    """Module whose answer depends on an earlier call, which two equal calls do not show."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.first: torch.Tensor | None = None
        self.by_name: dict[str, torch.Tensor] = {}
        self.scale = 0.0
        self.held = [torch.zeros(2, 4)]
        self.offset = nn.Parameter(torch.zeros(4))
        self.register_buffer("last", torch.zeros(2, 4))
        self.last: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first: torch.Tensor | float
        match self.way:
            case "a first input":
                first = self.first = x.mean() if self.first is None else self.first
            case "a dict":
                first = self.by_name.setdefault("mean", x.mean())
            case "a number":
                first = self.scale = self.scale or float(x.max())
            case "a tensor in a list":
                first = self.held[0].clone()
                self.held[0].copy_(x)
            case "a buffer":
                first = self.last.clone()
                self.last.copy_(x)
            case _:  # the first input sets the weights
                if not self.scale:
                    self.offset.data.copy_(x.mean(0))
                first, self.scale = self.offset, 1.0
        return x + first


@pytest.mark.parametrize(
    "way", ["a first input", "a dict", "a number", "a tensor in a list", "a buffer", "a first fit"]
)
def test_what_a_module_keeps_of_a_call_is_no_constant_of_its_graph(
    way: str, tmp_path: Path
) -> None:
    with pytest.raises(RegistrationRefused):
        export_module_to_bundle(Keeps(way), torch.rand(2, 4), tmp_path / "m.bundle")


class Remembers(nn.Module):
    """Module that caches values that depend only on shapes: a mask, and a table in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", None, persistent=False)
        self.mask: torch.Tensor | None
        self.tables: dict[int, torch.Tensor] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n = x.shape[1]
        if self.mask is None:
            self.mask = torch.ones(n, n).tril()
        return x @ self.mask + self.tables.setdefault(n, torch.arange(float(n)))


def test_what_a_module_keeps_and_would_make_again_alike_is_served(tmp_path: Path) -> None:
    export_module_to_bundle(Remembers(), torch.rand(2, 4), tmp_path / "m.bundle")


def test_what_a_module_kept_before_it_is_registered_stays(tmp_path: Path) -> None:
    module = Keeps("a first input")
    module(torch.rand(2, 4))
    first = module.first
    export_module_to_bundle(module, torch.rand(2, 4), tmp_path / "m.bundle")
    assert module.first is first


class Neighbours(nn.Linear):
    """A module that needs a second row."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("second", torch.tensor([1]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) - x[self.second]


def test_a_module_that_takes_no_single_row_is_refused_with_what_to_type(tmp_path: Path) -> None:
    path, inputs = tmp_path / "m.bundle", {"x": ((1, 4), "float32")}
    in_file = BuildSpec(name="m", source=str(path))
    source = f"{__name__}:Neighbours"
    named = BuildSpec(name="m", source=source, inputs=inputs, allow_module_mode=True)
    export_module_to_bundle(Neighbours(), torch.rand(4, 4), path)
    for spec, hint in ((in_file, 'dynamic={"x": {0: (2, 64)}}'), (named, "two rows and not one")):
        with pytest.raises(RegistrationRefused, match="raised IndexError: index 1") as caught:
            build(spec, tmp_path / "out", lambda *_: None)
        assert hint in caught.value.hint
    export_module_to_bundle(Neighbours(), torch.rand(4, 4), path, dynamic={"x": {0: (2, 64)}})
    assert build(in_file, tmp_path / "two", lambda *_: None).batch == (2, 64)
