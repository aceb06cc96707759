"""Rooms, and which other rooms each may import, by the tables below.

A room is a folder of code, or a file directly in ``pipeswitch/``. All imports count, including
imports inside functions and under ``TYPE_CHECKING``.
"""

from __future__ import annotations

import ast
import re
import runpy
from collections.abc import Iterable, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

import pytest

from pipeswitch.base import extras

ROOT = Path(__file__).parents[2]
CODE = ("pipeswitch", "workers", "memory_daemon")
TOPS = (*CODE, "benchmarks")

# Room -> the rooms that it may import, all of which have earlier lines. Names of folders in
# pipeswitch/ omit this first part.
MAY_IMPORT: Mapping[str, str] = {
    # Basic types.
    "base": "",
    "errors": "base",
    "sandbox": "",
    "planning": "",
    "wire": "base",
    "ipc": "base wire",
    "programs": "base planning",
    "commits": "base ipc",
    "job": "base",
    # Decisions.
    "scheduler/policies": "",
    "scheduler": "base ipc planning programs scheduler/policies wire",
    "policies": "base scheduler/policies",
    "watchdog": "policies",
    # The device, and the processes that touch it.
    "devices": "base ipc programs",
    "programs/compiler": "base commits devices ipc programs sandbox",
    "memory_daemon/": "base commits devices ipc programs",
    "workers/inference/": "base devices ipc programs",
    "workers/training/": "base commits devices ipc job programs",
    "workers/": "base devices ipc sandbox workers/inference/ workers/training/",
    "launch": "base ipc memory_daemon/ programs/compiler sandbox workers/",
    # The server, which turns clients' bytes into events and performs commands.
    "frontend": "base commits ipc job programs scheduler wire",
    "controller": "base commits devices frontend ipc launch planning policies programs "
    "programs/compiler sandbox scheduler watchdog wire",
    # Users of the server.
    "client": "base commits programs programs/compiler wire",
    "__init__": "base client job wire",
    "testing": "base client",
    "gateway": "base client frontend ipc programs wire",
    "cli": "__init__ base client devices ipc job sandbox testing wire",
    # Extras, which no room above them may import.
    "extras": "",
    "extras/folder": "base cli client controller ipc programs scheduler wire",
    "extras/curve": "base cli client frontend gateway ipc wire",
    "extras/cluster": "base cli client commits controller extras/curve scheduler/policies wire",
    "extras/page": "base cli client frontend gateway",
    "extras/demo": "__init__ base cli client extras/page job programs programs/compiler testing",
    "extras/grpc": "base gateway ipc wire",
    "extras/trainers": "base workers/training/",
    "extras/shared_input": "base controller ipc workers/training/",
    "extras/stages": "base cli controller frontend ipc programs sandbox scheduler wire",
    "extras/offload": "base cli devices ipc job workers/training/",
    "extras/lab": "base cli client extras/cluster extras/offload ipc planning policies programs "
    "scheduler scheduler/policies watchdog",
    "extras/text": "base cli client devices frontend gateway ipc programs programs/compiler "
    "sandbox scheduler wire workers/inference/",
    "benchmarks/": "base cli client devices extras/lab ipc job planning programs programs/compiler "
    "scheduler/policies testing wire",
}

# The same for folders of the scheduler, in which stored state may not import decisions. The room ""
# has all files that are not in a named folder; no other room may import it.
IN_SCHEDULER: Mapping[str, str] = {
    "policies": "",
    "state": "policies",
    "memory": "policies state",
    "training": "memory policies state",
    "processes": "state training",
    "requests": "memory policies state training",
    "server": "memory processes requests state training",
    "models": "memory requests server state",
    "": "memory models policies processes requests server state training",
}

# The same for folders of other rooms.
IN_GATEWAY: Mapping[str, str] = {
    "http": "",
    "serving": "http",
    "routes": "http",
    "": "http routes serving",
}
IN_FRONTEND: Mapping[str, str] = {
    "intake": "",
    "permissions": "",
    "transport": "intake",
    "sequences": "intake transport",
    "": "intake permissions sequences transport",
}
IN_PROGRAMS: Mapping[str, str] = {
    "interface": "",
    "graphs": "interface",
    "running": "graphs interface",
    "spec": "graphs interface",
    "compiler": "graphs interface running spec",
    "": "",
}
TABLES: Mapping[str, Mapping[str, str]] = {
    "": MAY_IMPORT,
    "scheduler": IN_SCHEDULER,
    "gateway": IN_GATEWAY,
    "frontend": IN_FRONTEND,
    "programs": IN_PROGRAMS,
}

# Modules outside of the project that a pure module may import. They open no files or sockets,
# start no threads or processes, and use no device.
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
    "httptools",
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
    """Return a file's import name, which begins with ``pipeswitch`` for all product folders."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    inside = ("pipeswitch",) if parts[0] in CODE[1:] else ()
    return ".".join([*inside, *parts]).removesuffix(".__init__")


FILES = {module_of(path): path for top in TOPS for path in (ROOT / top).rglob("*.py")}


def imported(tree: ast.Module, module: str, is_package: bool) -> set[str]:
    """Return the full names, ``package.module.name``, of everything that a module imports."""
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
    """Return the project's module that defines a full name; None for a name from elsewhere."""
    while name and name not in FILES:
        name = name.rpartition(".")[0]
    return name or None


@cache  # called in tests only: code at import would run in every test process
def parsed(module: str) -> ast.Module:
    return ast.parse(FILES[module].read_text("utf-8"))


@cache
def names_in(module: str) -> frozenset[str]:
    """Return the full names that a module imports."""
    is_package = FILES[module].name == "__init__.py"
    return frozenset(imported(parsed(module), module, is_package))


@cache
def arrows() -> dict[str, set[str]]:
    """Return the project's modules that each module imports."""
    return {
        module: {target for name in names_in(module) if (target := file_of(name))} - {module}
        for module in FILES
    }


def room_of(module: str, inside: str = "") -> str | None:
    """Return the most specific room of a table that has the module; None if no room has it."""
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
    """Return, for each room, the other rooms of its table that its modules import."""
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


def test_every_package_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {}
    monkeypatch.setattr("setuptools.setup", options.update)
    monkeypatch.chdir(ROOT)
    runpy.run_path("setup.py")
    packages = {
        module_of(path.parent) for top in CODE for path in (ROOT / top).rglob("__init__.py")
    }
    assert sorted(options["packages"]) == sorted(packages)


def test_the_engine_imports_no_extra() -> None:
    rooms = list(MAY_IMPORT)
    engine = rooms[: rooms.index("extras")]
    assert not [
        f"{room} -> {other}"
        for room in engine
        for other in found_arrows()[room]
        if other.startswith("extras")
    ]


@pytest.mark.parametrize("extra", sorted((ROOT / "pipeswitch/extras").glob("*/__init__.py")))
def test_an_extra_says_what_it_adds_and_imports_nothing_for_it(extra: Path) -> None:
    assert not names_in(module_of(extra.parent))
    for seam in (value for value in vars(extras).values() if isinstance(value, extras.Seam)):
        for name in seam.names():
            assert callable(seam.load(name))


def test_no_folder_and_its_own_child_import_each_other() -> None:
    def folder(module: str) -> Path:
        return FILES[module].parent

    seen = {(folder(one), folder(other)) for one, others in arrows().items() for other in others}
    both = {(one, other) for one, other in seen if one in other.parents and (other, one) in seen}
    # ``pipeswitch/__init__.py`` has the SDK's names; a room's own is its plain interface.
    assert not [pair for pair in both if pair[0] != ROOT / "pipeswitch"]


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


@pytest.mark.parametrize("room", ["scheduler", r"extras\.lab\.(world|replay|arrivals|contract)"])
def test_a_pure_room_reaches_nothing_that_acts(room: str) -> None:
    ours = [module for module in FILES if re.match(rf"pipeswitch\.{room}\b", module)]
    assert ours
    for module in sorted(reachable(ours)):
        check_pure(module)


def test_the_http_parser_acts_on_nothing() -> None:
    check_pure("pipeswitch.gateway.http.http_parser")


def check_pure(module: str) -> None:
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
