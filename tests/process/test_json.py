"""``--json`` of all commands: numbers are numbers, and texts are texts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from click.testing import CliRunner
from process_tools import LOOP, Checked, checked_server, until, write_script

from pipeswitch.cli.main import main

OTHERS = {
    *("cluster up", "cluster status", "cluster down", "cluster drain"),  # they need Ray
    *("demo", "ui", "doctor"),  # minutes, a browser, and a second server
    "stop",  # it ends the server
    *(
        "chain",
        "generate",
        "jobs move",
        "jobs export",
        "models split",
        "restore",
    ),  # they need more than is here
}
NUMBERS = re.compile(r".*(_ms|_s|_bytes|_count|steps?|_gbps)|(bytes|pid|worker|groups)")
SIZES = ("ps[].device", "ps[].host")  # elsewhere these are names
TEXTS = {"pipeswitch", "torch"}  # versions, which may read as numbers
KEY = "rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7"  # the example of ZeroMQ's specification


def commands(group: click.Group, before: str = "") -> Iterator[str]:
    """Yield the name of each command that has ``--json``."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if any("--json" in one.opts for one in command.params):
            yield before + name
        if isinstance(command, click.Group):
            yield from commands(command, f"{before}{name} ")


def wrong(value: Any, key: str, path: str) -> Iterator[str]:
    """Yield each place where a number is a text, or where a number should be."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield from wrong(item, name, f"{path}.{name}")
    elif isinstance(value, list):
        for item in value:
            yield from wrong(item, key, f"{path}[]")
    elif isinstance(value, str) and key not in TEXTS:
        if re.fullmatch(r"[+-]?[0-9.]+(e[+-]?[0-9]+)?", value):
            yield f"{path}: {value!r} is a text"
        elif NUMBERS.fullmatch(key) or path in SIZES:
            yield f"{path}: {value!r} should be a number"


@pytest.fixture(scope="module")
def checked() -> Iterator[Checked]:
    with checked_server(http=True) as checked:
        yield checked


def test_each_command_prints_numbers_as_numbers(checked: Checked, tmp_path: Path) -> None:
    script = write_script(tmp_path, "busy.py", LOOP)
    np.savez(tmp_path / "x.npz", x=np.zeros((1, 3, 32, 32), np.float32))
    state = ("--state-dir", str(checked.running.state_dir))
    source = ("torchvision:squeezenet1_1", "--weights", "random:0", "--input", "1x3x32x32:float32")
    calls: dict[str, tuple[str, ...]] = {
        "config check": (),
        "keys server": (),
        "keys client": ("alice", "--out", str(tmp_path)),
        "keys pair": ("bob", "--out", str(tmp_path)),
        "keys admit": ("carol", KEY),
        "keys roles": ("alice", "--role", "infer"),
        "keys ls": (),
        "keys revoke": ("alice",),
        "register": ("m", *source, "--precision", "bf16"),
        "train": (str(script), "--name", "busy"),
        "infer": ("m", "--input", str(tmp_path / "x.npz")),
        "simulate": ("poisson:50", "--requests", "20"),
        "plan": (),
        "load": ("m",),
        "models": (),
        "show": ("m",),
        "ps": (),
        "top": (),
        "stats": (),
        "ping": ("--deep",),
        "sequences": (),
        "jobs": (),
        "jobs ls": (),
        "jobs show": ("busy",),
        "jobs logs": ("busy",),
        "jobs pause": ("busy",),
        "jobs resume": ("busy",),
        "jobs cancel": ("busy",),
        "jobs wait": ("busy",),
        "jobs rm": ("busy",),
        "profile": ("m",),
        "models rollback": ("m", "1"),
        "unload": ("m",),
        "backup": (str(tmp_path / "copy"), *state),
        "unregister": ("m",),
    }
    assert {*calls} | OTHERS == {*commands(main)}
    faults: list[str] = []
    for name, args in calls.items():
        words = ["--host", checked.running.ipc_address, *name.split()]
        if name.startswith("keys"):
            words[3:3] = ["--keys-dir", str(tmp_path / "keys")]
        invoke = partial(CliRunner().invoke, main, [*words, *args, "--json"])
        if name == "jobs rm":  # the job's last commit is written to disk first
            until(lambda run=invoke: run().exit_code == 0, "the job is removed")
            continue
        done = invoke()
        assert done.exit_code == 0, f"{name}: {done.output}"
        assert done.stdout, f"{name}: {done.output}"
        faults += wrong(json.loads(done.stdout), "", name)
    assert not faults
