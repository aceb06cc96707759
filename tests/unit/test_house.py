"""Which room may import which: the table below is the order of the house.

A room is a folder, or a file that stands beside the folders of ``pipeswitch/``. All imports count:
the ones inside functions and under ``TYPE_CHECKING`` too.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterable, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CODE = ("pipeswitch", "workers", "memory_daemon")
TOPS = (*CODE, "benchmarks")

# From the ground up: a room imports only rooms that stand above its own line, of these the ones
# it names. Folders of pipeswitch/ go without their first part.
MAY_IMPORT: Mapping[str, str] = {
    # What everything else speaks of.
    "base": "",
    "errors": "base",
    "sandbox": "",
    "planning": "",
    "wire": "base",
    "ipc": "base wire",
    "programs": "base planning",
    "commits": "base ipc",
    "inputs": "base",
    "job": "base inputs",
    # The decisions.
    "scheduler/policies": "planning",
    "scheduler": "base ipc planning programs scheduler/policies wire",
    "simulator": "base ipc planning programs scheduler scheduler/policies",
    "policies": "base scheduler/policies",
    "watchdog": "policies",
    # The device, and the processes that touch it.
    "devices": "base ipc programs",
    "programs/build": "base commits devices ipc programs sandbox",
    "memory_daemon/": "base commits devices ipc programs",
    "workers/inference/": "base devices ipc programs",
    "workers/training/": "base commits devices inputs ipc job planning programs",
    "workers/": "base devices ipc programs sandbox workers/inference/ workers/training/",
    "launch": "base ipc memory_daemon/ programs/build sandbox workers/",
    # The server: clients' bytes to events, commands to deeds.
    "frontend": "base commits ipc job programs scheduler wire",
    "controller": "base commits devices frontend inputs ipc launch planning policies programs "
    "programs/build sandbox scheduler watchdog wire",
    # Its users.
    "client": "base commits programs programs/build wire",
    "__init__": "base client job wire",
    "cluster": "base client commits controller ipc scheduler/policies simulator wire",
    "testing": "client simulator",
    "gateway": "base client frontend ipc programs sandbox wire",
    "cli": "__init__ base client cluster devices ipc job launch planning policies programs "
    "sandbox scheduler simulator watchdog wire",
    "demo": "__init__ base cli client job planning programs programs/build testing",
    "benchmarks/": "base cli client devices ipc job planning programs programs/build testing wire",
}

# The same inside the scheduler: what it remembers lies below what decides. Files beside the folders
# that the table does not name are the top room, "".
IN_SCHEDULER: Mapping[str, str] = {
    "events": "",
    "policies": "",
    "core": "events policies",
    "state": "core events policies",
    "memory": "core events policies state",
    "training": "core events memory policies state",
    "processes": "core events state training",
    "requests": "core events memory policies processes state training",
    "device": "core events memory processes requests state training",
    "server_state": "core device memory state training",
    "models": "core events server_state memory requests state",
    "profiling": "core device events server_state state",
    "": "core device events server_state memory models policies processes profiling requests state "
    "training",
}

# The same inside other folders.
IN_GATEWAY: Mapping[str, str] = {
    "http_errors": "",
    "offload": "",
    "auth": "http_errors",
    "decoding": "",
    "serving": "auth decoding http_errors",
    "http": "decoding http_errors offload",
    "kserve": "auth http_errors serving offload",
    "admin": "auth decoding http http_errors serving",
    "openai": "decoding http http_errors serving offload",
    "": "admin auth decoding http kserve openai http_errors serving offload",
}
IN_FRONTEND: Mapping[str, str] = {
    "validation": "",
    "permissions": "",
    "request_log": "",
    "request_pool": "validation",
    "transport": "validation request_log",
    "sequences": "validation request_pool transport",
    "": "validation permissions request_log request_pool sequences transport",
}
IN_PROGRAMS: Mapping[str, str] = {
    "interface": "",
    "decoding": "interface",
    "graphs": "decoding interface",
    "running": "graphs interface",
    "spec": "graphs interface",
    "build": "decoding graphs interface running spec",
    "": "",
}
TABLES: Mapping[str, Mapping[str, str]] = {
    "": MAY_IMPORT,
    "scheduler": IN_SCHEDULER,
    "gateway": IN_GATEWAY,
    "frontend": IN_FRONTEND,
    "programs": IN_PROGRAMS,
}

# What a pure module may take from outside of the project: nothing here opens a file or a socket,
# starts a thread or a process, or touches a device.
PURE = (
    "__future__",
    "abc",
    "array",
    "bisect",
    "collections",
    "contextlib",
    "dataclasses",
    "datetime",
    "enum",
    "functools",
    "heapq",
    "itertools",
    "math",
    "msgspec",
    "numpy",
    "operator",
    "os.EX_IOERR",
    "os.EX_SOFTWARE",
    "random.Random",
    "re",
    "statistics",
    "struct",
    "threading.Condition",
    "threading.RLock",
    "typing",
)
IMPURE_BUILTINS = {"open", "__import__", "exec", "eval", "input", "print", "breakpoint"}


def module_of(path: Path) -> str:
    """The name under which a file is imported: the product's folders are all in ``pipeswitch``."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    inside = ("pipeswitch",) if parts[0] in CODE[1:] else ()
    return ".".join([*inside, *parts]).removesuffix(".__init__")


FILES = {module_of(path): path for top in TOPS for path in (ROOT / top).rglob("*.py")}


def imported(tree: ast.Module, module: str, is_package: bool) -> set[str]:
    """Full names, ``package.module.name``, of everything that a module imports."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parts = module.split(".")
            up = len(parts) - node.level + is_package
            start = [*(parts[:up] if node.level else []), *([node.module] if node.module else [])]
            names |= {".".join([*start, alias.name]) for alias in node.names}
    return names


def file_of(name: str) -> str | None:
    """The module of ours that a full name lies in; None: it is not ours."""
    while name and name not in FILES:
        name = name.rpartition(".")[0]
    return name or None


@cache  # not as the file is collected, which each process does that runs tests
def parsed(module: str) -> ast.Module:
    return ast.parse(FILES[module].read_text("utf-8"))


@cache
def names_in(module: str) -> frozenset[str]:
    """What it imports."""
    is_package = FILES[module].name == "__init__.py"
    return frozenset(imported(parsed(module), module, is_package))


@cache
def arrows() -> dict[str, set[str]]:
    """Of ours, which each module imports."""
    return {
        module: {target for name in names_in(module) if (target := file_of(name))} - {module}
        for module in FILES
    }


def room_of(module: str, inside: str = "") -> str | None:
    """The longest line of a table that a module lies in; None: it lies outside of that folder."""
    path, table = FILES[module].relative_to(ROOT), TABLES[inside]
    outside = path.parts[0] != "pipeswitch"
    place = "/".join(path.with_suffix("").parts[0 if outside else 1 :])
    if inside:
        if not place.startswith(f"{inside}/"):
            return None
        place = place.removeprefix(f"{inside}/")
    while place and (place + "/" if outside else place) not in table:
        place = place.rpartition("/")[0]
    return place + "/" if outside and place else place


def found_arrows(inside: str = "") -> dict[str, set[str]]:
    """For each room the other rooms of its table that its modules import."""
    arrows_seen: dict[str, set[str]] = {room: set() for room in TABLES[inside]}
    for module, others in arrows().items():
        room = room_of(module, inside)
        if room is not None:
            rooms = {room_of(other, inside) for other in others}
            arrows_seen[room] |= {other for other in rooms if other is not None} - {room}
    return arrows_seen


def reachable(modules: Iterable[str]) -> set[str]:
    visited: set[str] = set()
    todo = list(modules)
    while todo:
        module = todo.pop()
        if module not in visited:
            visited.add(module)
            todo += arrows()[module]
    return visited


def test_every_file_lies_in_a_room() -> None:
    assert not [module for module in FILES if not room_of(module)]
    assert set(MAY_IMPORT) == {room_of(module) for module in FILES}
    folders = {path.parent.name for path in (ROOT / "pipeswitch/scheduler").glob("*/__init__.py")}
    assert folders < set(IN_SCHEDULER)


def test_every_package_is_installed() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = {
        module_of(path.parent) for top in CODE for path in (ROOT / top).rglob("__init__.py")
    }
    assert {*settings["tool"]["setuptools"]["packages"]} == packages


@pytest.mark.parametrize("inside", TABLES)
def test_no_arrow_of_the_table_runs_up(inside: str) -> None:
    rooms = list(TABLES[inside])
    for room, below in TABLES[inside].items():
        for other in below.split():
            assert rooms.index(other) < rooms.index(room), f"{room} -> {other}"


@pytest.mark.parametrize("inside", TABLES)
def test_a_room_imports_exactly_what_the_table_says(inside: str) -> None:
    arrows_seen = found_arrows(inside)
    table = {room: set(below.split()) for room, below in TABLES[inside].items()}
    new = [f"{a} -> {b}" for a, others in arrows_seen.items() for b in sorted(others - table[a])]
    assert not new, "arrows that the table does not have"
    unused = [f"{a} -> {b}" for a, others in table.items() for b in sorted(others - arrows_seen[a])]
    assert not unused, "no import needs these any more: take them out of the table"


def test_no_files_import_each_other_in_a_circle() -> None:
    try:
        TopologicalSorter(arrows()).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


@pytest.mark.parametrize("room", ["scheduler", "simulator"])
def test_a_pure_room_reaches_nothing_that_acts(room: str) -> None:
    ours = [module for module in FILES if re.match(rf"pipeswitch\.{room}\b", module)]
    for module in sorted(reachable(ours)):
        for name in names_in(module):
            known = any(f"{name}.".startswith(f"{pure}.") for pure in PURE)
            assert known or file_of(name), f"{module} imports {name}"
        for node in ast.walk(parsed(module)):
            if isinstance(node, ast.Name):
                assert node.id not in IMPURE_BUILTINS, f"{module}:{node.lineno} names {node.id}"


def test_imports_are_found_wherever_they_stand() -> None:
    source = """
import a.b
from . import c
from .d import e
from ..f import g
def later():
    from h import i
    if TYPE_CHECKING:
        import j
"""
    names = {"a.b", "top.room.c", "top.room.d.e", "top.f.g", "h.i", "j"}
    assert imported(ast.parse(source), "top.room.file", is_package=False) == names
    assert imported(ast.parse("from .d import e"), "top.room", is_package=True) == {"top.room.d.e"}
