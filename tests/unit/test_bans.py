"""Bans on unsafe calls for external data: each ban finds an example, and nothing in our code."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "lint" / "bans.toml"
CODE = [ROOT / name for name in ("pipeswitch", "workers", "memory_daemon")]
SETTINGS = tomllib.loads(CONFIG.read_text("utf-8"))["lint"]
RULES = [rule for rule in SETTINGS["select"] if rule != "TID251"]
BANNED = SETTINGS["flake8-tidy-imports"]["banned-api"]


def ruff(*arguments: str, text: str | None = None) -> list[dict[str, Any]]:
    """Return ruff's findings with only the bans enabled."""
    program = shutil.which("ruff", path=str(Path(sys.executable).parent)) or shutil.which("ruff")
    if program is None:
        pytest.skip("ruff is not installed")
    command = [program, "check", "--no-cache", "--output-format", "json", "--config", str(CONFIG)]
    done = subprocess.run(
        [*command, *arguments], input=text, capture_output=True, text=True, check=False, cwd=ROOT
    )
    findings: list[dict[str, Any]] = json.loads(done.stdout)
    return findings


def test_our_code_has_none_of_it() -> None:
    assert ruff(*map(str, CODE)) == []


@pytest.fixture(scope="module")
def planted() -> set[str]:
    return {finding["code"] for finding in ruff("lint/planted")}


@pytest.mark.parametrize("rule", RULES)
def test_each_ban_finds_its_planted_example(rule: str, planted: set[str]) -> None:
    assert rule in planted


def test_each_banned_name_is_found_where_it_is_used() -> None:
    lines = []
    for name in BANNED:
        module, _, last = name.rpartition(".")
        lines += [f"from {module} import {last}"] if module else [f"import {name}"]
    findings = ruff("--stdin-filename", "pipeswitch/x.py", "-", text="\n".join(lines) + "\n")
    messages = " ".join(finding["message"] for finding in findings if finding["code"] == "TID251")
    assert [name for name in BANNED if f"`{name}`" not in messages] == []


@pytest.mark.parametrize(
    ("path", "is_found"),
    [
        ("pipeswitch/frontend/new.py", True),
        ("pipeswitch/wire/new/new.py", True),
        ("pipeswitch/new.py", True),
        ("memory_daemon/new.py", True),
        ("pipeswitch/scheduler/requests/new.py", False),
    ],
)
def test_an_assert_is_found_wherever_outside_input_may_come(path: str, is_found: bool) -> None:
    findings = ruff("--stdin-filename", path, "-", text="def f(x):\n    assert x\n")
    assert [one["code"] for one in findings] == ["S101"] * is_found


# ---- methods that are banned by name, which ruff cannot do -------------------------------------

METHODS = {
    "recv_pyobj": "a pickle inside",
    "send_pyobj": "a pickle inside",
    "recv_serialized": "decodes with whatever it is given: wire.py",
}
KEYWORDS = {("allow_pickle", True), ("weights_only", False), ("trust_remote_code", True)}
SOCKETS = "pipeswitch/extras/curve/sockets.py"  # the only file that may create ZeroMQ sockets


def offences(tree: ast.AST, path: str) -> Iterator[str]:
    """Yield the place and name of each banned call in a module."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        for keyword in node.keywords:
            value = keyword.value.value if isinstance(keyword.value, ast.Constant) else None
            if (keyword.arg, value) in KEYWORDS:
                yield f"{path}:{node.lineno} {keyword.arg}"
        if not isinstance(node.func, ast.Attribute):
            continue
        if node.func.attr in METHODS:
            yield f"{path}:{node.lineno} {node.func.attr}"
        makes_socket = node.func.attr == "socket" and ast.unparse(node.func.value) != "socket"
        if makes_socket and path != SOCKETS:
            yield f"{path}:{node.lineno} Context.socket"
        if node.func.attr == "bind" and "'tcp://*" in ast.unparse(node):
            yield f"{path}:{node.lineno} every interface"


def test_no_socket_is_made_elsewhere_and_no_pickling_method_is_called() -> None:
    paths = [path for folder in CODE for path in folder.rglob("*.py")]
    assert len(paths) > 50
    findings = [
        offence
        for path in paths
        for offence in offences(ast.parse(path.read_text("utf-8")), str(path.relative_to(ROOT)))
    ]
    assert findings == []


@pytest.mark.parametrize(
    "line",
    [
        "context.socket(zmq.ROUTER)",
        "zmq.Context().socket(1)",
        "self._sock.recv_pyobj()",
        "sock.send_pyobj(1)",
        "sock.recv_serialized(f)",
        "np.load(path, allow_pickle=True)",
        "torch.load(path, weights_only=False)",
        "AutoModel.from_pretrained(name, trust_remote_code=True)",
        "sock.bind('tcp://*:5555')",
    ],
)
def test_each_banned_call_is_found(line: str) -> None:
    assert list(offences(ast.parse(line), "pipeswitch/x.py"))
