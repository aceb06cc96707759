"""The manual's code blocks, which run unchanged: those of a page in order, with one server.

Python blocks of a page share their variables. A block that begins with ``# NAME.py`` is written to
that file. In a shell block, ``pipeswitch serve …`` replaces the page's server by one with these
flags, on the test's ports. TOML blocks are read as a server's configuration.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeswitch import testing
from pipeswitch.base import config

ROOT = Path(__file__).parents[2]
GUIDE = set(ROOT.glob("docs/guide/*.md")) - {ROOT / "docs/guide/trainers.md"}  # see test_trainers
PAGES = [ROOT / "README.md", ROOT / "docs/scheduling.md", *sorted(GUIDE)]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SKIPPED = ("make ", "pip install ")  # commands that the test does not run
COMMAND = 'import sys; sys.argv[0] = "pipeswitch"; from pipeswitch.cli.main import main; main()'
BLOCK_TIMEOUT_S = 250  # below pytest's own limit; a busy machine needs minutes


def blocks_of(page: Path) -> list[tuple[int, str, str]]:
    """Return the first line number, language and text of each block."""
    text = page.read_text("utf-8")
    return [(text[: m.start()].count("\n") + 2, m[1], m[2]) for m in BLOCK.finditer(text)]


class Page:
    """Page of the manual, whose blocks run in their own folder."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        self.folder, self._outer = folder, stack
        self.names: dict[str, Any] = {"__name__": "page"}
        self._stack = stack.enter_context(contextlib.ExitStack())
        self._server: testing.RunningServer | None = None
        self.environment = {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}  # the server has it, too
        (folder / "bin").mkdir()
        for name, start in (("pipeswitch", f"-P -c {shlex.quote(COMMAND)}"), ("python", "")):
            path = folder / "bin" / name
            path.write_text(f'#!/bin/sh\nexec {sys.executable} {start} "$@"\n')
            path.chmod(0o755)

    def serve(self, flags: list[str]) -> testing.RunningServer:
        """Stop the previous server; start and return a server with these flags."""
        self._stack.close()
        self._stack = self._outer.enter_context(contextlib.ExitStack())
        pairs = list(zip(flags[::2], flags[1::2], strict=True))
        devices = [value for flag, value in pairs if flag == "--device"]
        rest = [
            one.replace(":5555", ":0") for pair in pairs if pair[0] != "--device" for one in pair
        ]
        self._server = self._stack.enter_context(
            testing.server(
                http=True,
                state_dir=self.folder / "state",
                devices=tuple(devices or ["cpu"]),
                args=("--threads", "1", *rest),
                environment=self.environment,
            )
        )
        return self._server

    @property
    def server(self) -> testing.RunningServer:
        return self._server or self.serve([])

    def run(self, line: int, language: str, text: str) -> None:
        if language != "toml" and "pipeswitch serve" not in text:
            port = self.server.tcp_address.rpartition(":")[2]
            text = text.replace("127.0.0.1:8000", self.server.http_address)
            text = text.replace("127.0.0.1:8001", self.server.grpc_address)
            text = text.replace("127.0.0.1:5555", f"127.0.0.1:{port}")
        match language:
            case "python":
                self.python(line, text)
            case "bash" | "sh":
                self.shell(text)
            case "toml":
                (self.folder / "pipeswitch.toml").write_text(text)
                config.load(self.folder / "pipeswitch.toml", environ={})
            case _:
                raise AssertionError(f"line {line}: a block of {language}")

    def python(self, line: int, text: str) -> None:
        named = re.match(r"# (\w+\.py)\n", text)
        if named:
            (self.folder / named[1]).write_text(text)
            return
        threads = torch.get_num_threads()
        with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
            warnings.simplefilter("default")
            patch.chdir(self.folder)
            patch.syspath_prepend(self.folder)
            patch.setenv("PIPESWITCH_HOST", self.server.ipc_address)
            exec(compile("\n" * (line - 1) + text, "page", "exec"), self.names)
        torch.set_num_threads(threads)
        for name in {path.stem for path in self.folder.glob("*.py")} & set(sys.modules):
            del sys.modules[name]

    def shell(self, text: str) -> None:
        lines: list[str] = []
        for line in text.replace("\\\n", "").splitlines():
            words = shlex.split(line, comments=True)
            if words[:2] == ["pipeswitch", "serve"]:
                self.bash(lines)
                lines = []
                self.serve([word for word in words[2:] if word != "&"])
            elif not line.startswith(SKIPPED):
                lines.append(line)
        self.bash(lines)

    def bash(self, lines: list[str]) -> None:
        if not lines:
            return
        ours = {
            "PATH": f"{self.folder}/bin:{os.environ['PATH']}",
            "PIPESWITCH_HOST": self.server.ipc_address,
            "PIPESWITCH_SERVER__STATE_DIR": str(self.folder / "state"),
        }
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", "\n".join(lines)],
            cwd=self.folder,
            text=True,
            env={**os.environ, **self.environment, **ours},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=BLOCK_TIMEOUT_S,
        )
        assert done.returncode == 0, f"{done.args[-1]}\n{done.stdout}"


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    with contextlib.ExitStack() as stack:
        yield Page(tmp_path, stack)


@pytest.mark.parametrize("path", [*filter(blocks_of, PAGES)], ids=lambda path: path.stem.lower())
def test_every_block_of_a_page_works_as_it_stands(path: Path, page: Page) -> None:
    for line, language, text in blocks_of(path):
        if language not in ("text", "mermaid"):
            page.run(line, language, text)
