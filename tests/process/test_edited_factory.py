"""Edits of an operator's code while the server runs: the code that was registered must answer."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import pipeswitch as ps
from pipeswitch.base.errors import RegistrationRefused
from pipeswitch.programs.compiler.program import build
from pipeswitch.programs.interface.layout import Manifest
from pipeswitch.programs.running import factories
from pipeswitch.programs.spec import BuildSpec
from pipeswitch.testing import server
from pipeswitch.workers.inference.task import make_program

NET = """
    import torch
    from torch import nn
    from helping import scaled

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.register_buffer("space", torch.zeros(2, 4))

        def forward(self, x):
            y = self.layer(x)
            return scaled(y.relu()) if x.sum() > -1e9 else y

    class WritesPastTorch(Net):
        def forward(self, x):
            self.space.numpy()[:] = 0.0
            return super().forward(x + self.space)
"""
HELPING = """
    def scaled(y):
        from late import TIMES
        return y * TIMES
"""
LATE = "TIMES = 2"
FILES = {"editing.py": NET, "helping.py": HELPING, "late.py": LATE}
EDITS = [
    ("editing.py", "y.relu()", "y.tanh() * 3"),
    ("helping.py", "y * TIMES", "y * TIMES + 1"),
    ("late.py", "TIMES = 2", "TIMES = -2"),
]
X = {"x": ((2, 4), "float32")}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # bytecode may miss edits within a second
    for name, text in FILES.items():
        (tmp_path / name).write_text(textwrap.dedent(text))
    yield tmp_path
    forget()


def forget() -> None:
    """Unload the edited modules, so that this process is like one that has not imported them."""
    for name in FILES:
        sys.modules.pop(name.removesuffix(".py"), None)
    factories._imported.clear()


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def built(folder: Path, out: str) -> Manifest:
    forget()  # a builder is a new fork, which has not imported the modules
    spec = BuildSpec(name="net", source="editing:Net", weights="random:7", inputs=X)
    manifest = build(spec, folder / out, lambda stage, done: None)
    assert manifest.mode == "module"
    assert set(manifest.extra["code"]) >= {"editing", "helping", "late"}
    return manifest


@pytest.mark.parametrize(("name", "old", "new"), EDITS)
def test_a_program_runs_with_the_code_that_it_was_checked_with_or_not_at_all(
    folder: Path, name: str, old: str, new: str
) -> None:
    before = built(folder, "before")
    forget()
    make_program(before, None, "cpu")
    edit(folder / name, old, new)
    make_program(before, None, "cpu")  # imports the old code, like a worker before the edit
    imported = {name: sys.modules[name] for name in ("editing", "helping")}
    saved = dict(factories._imported)
    after = built(folder, "after")
    assert after.digest != before.digest
    sys.modules |= imported
    factories._imported |= saved
    program = make_program(after, None, "cpu")
    assert type(program.module) is sys.modules["editing"].Net  # type: ignore[attr-defined]
    assert sys.modules["editing"] is not imported["editing"]
    forget()  # a worker that starts after the edit has not imported the modules
    with pytest.raises(RegistrationRefused, match=name.removesuffix(".py")):
        make_program(before, None, "cpu")
    make_program(after, None, "cpu")


@pytest.mark.parametrize("when", ["between import and check", "to code that raises"])
def test_an_edit_during_the_import_leaves_no_old_code(
    folder: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    before = built(folder, "before")
    forget()
    if when == "to code that raises":  # `helping` is imported by then, and has not been checked
        edit(folder / "editing.py", "class Net(nn.Module)", "class Net(nn.Missing)")
        with pytest.raises(RegistrationRefused, match="Missing"):
            make_program(before, None, "cpu")
        edit(folder / "editing.py", "nn.Missing", "nn.Module")
        edit(folder / "helping.py", "y * TIMES", "y * TIMES + 1")
    else:
        imported = factories.factory

        def edit_after_import(source: str) -> Callable[[], torch.nn.Module]:
            make = imported(source)
            edit(folder / "helping.py", "y * TIMES", "y * TIMES + 1")
            return make

        monkeypatch.setattr(factories, "factory", edit_after_import)
        with pytest.raises(RegistrationRefused, match="the code of helping has changed"):
            make_program(before, None, "cpu")
        monkeypatch.undo()
        monkeypatch.syspath_prepend(folder)
    old = {name: sys.modules.get(name) for name in ("editing", "helping", "late")}
    saved = dict(factories._imported)
    after = built(folder, "after")
    forget()
    sys.modules |= {name: module for name, module in old.items() if module}
    factories._imported |= saved
    make_program(after, None, "cpu")
    assert sys.modules["helping"].scaled(torch.ones(1)).item() == 3


def test_a_module_that_the_first_call_imports_is_imported_with_the_check(folder: Path) -> None:
    manifest = built(folder, "before")
    forget()
    make_program(manifest, None, "cpu")
    edit(folder / "late.py", "TIMES = 2", "TIMES = -2")
    assert sys.modules["helping"].scaled(torch.ones(1)).item() == 2


def test_an_edited_factory_that_is_registered_again_computes(folder: Path) -> None:
    environment = {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    options = {"weights": "random:7", "inputs": X}
    x = torch.randn(2, 4)
    with server(arena="64MiB", environment=environment) as running, running.client() as client:
        answers = []
        for name, old, new in [("", "", ""), *EDITS]:
            if name:
                edit(folder / name, old, new)
                client.unregister("net")
            client.register("net", "editing:Net", **options)
            forget()
            torch.manual_seed(7)
            module = factories.factory("editing:Net")().eval().requires_grad_(False)
            answers.append(client.infer("net", x).value)
            assert torch.allclose(answers[-1], module(x))
        assert len({tuple(answer.flatten().tolist()) for answer in answers}) == len(answers)
        with pytest.raises(ps.RegistrationRefused, match="without torch"):
            client.register("writes", "editing:WritesPastTorch", **options)
        assert client.infer("net", x).value.equal(answers[-1])
