"""Walk over the values that a script can reach, each with the expression that leads to it.

The walk begins at the variables of the script's frames, outermost frame first. It follows
attributes (of any class), containers, closures, and the globals that the script's functions name. A
*path* is an expression as plain data: ``((0, "args"), ("attr", "lr"))`` for ``args.lr`` in the
script's outermost frame. A later run of the script resolves it to its own object.
"""

from __future__ import annotations

import contextlib
import functools
import re
import sys
import sysconfig
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any, Final, TypeAlias

import torch
from torch import nn

from .liveness import names_in
from .randomness import GENERATORS

Path: TypeAlias = tuple[tuple[Any, Any], ...]
"""Frame and variable, or "module" and module; then steps: ("attr" | "item" | "cell", key)."""

MAX_DEPTH: Final = 7
MAX_VALUES: Final = 20_000
MAX_PARTS: Final = 64  # a longer container is one value
PLAIN: Final = (type(None), bool, int, float, complex, str, bytes)
KEYS: Final = (str, int, float, bool, type(None), tuple)  # of dicts; others have no path
LIBRARIES: Final = tuple(sysconfig.get_paths()[name] + "/" for name in ("stdlib", "platstdlib"))
ATOMS: Final = (*PLAIN, torch.Tensor, *GENERATORS, BuiltinFunctionType, CodeType, FrameType)
HIDDEN: Final = frozenset(vars(nn.Module()))
# Output, and what ``job`` itself restores: objects of these packages are not followed.
NOT_FOLLOWED: Final = re.compile(
    r"(pipeswitch|tqdm|logging|tensorboardX?|wandb|mlflow|rich|accelerate|matplotlib|_?io|_?weakref|"
    r"_?threading|_thread|concurrent|multiprocessing|asyncio|subprocess|socket)(\.|$)|torch\._|"
    r"torch\.(cuda|distributed|nn\.parallel|utils\.tensorboard)(\.|$)"
)


_outside: set[tuple[int, CodeType]] = set()  # frames that run the script


def begin(frame: FrameType | None) -> None:
    """Record that ``frame`` and its callers, which run the script, are not the script's own."""
    _outside.clear()
    while frame is not None:
        _outside.add((id(frame), frame.f_code))
        frame = frame.f_back


def script_frames(frame: FrameType | None) -> list[FrameType]:
    """Return the script's frames from the outermost one to ``frame`` or its next caller."""
    frames: list[FrameType] = []
    while frame is not None:
        code, name = frame.f_code, str(frame.f_globals.get("__name__"))
        is_outside = name.startswith("pipeswitch.") or (id(frame), code) in _outside
        if is_own(code.co_filename) and not is_outside:
            frames.append(frame)
        frame = frame.f_back
    return frames[::-1]


def expressions(frame: FrameType, ids: Collection[int]) -> dict[int, Path]:
    """Return the paths of the objects with these ids, as far as the script's frames reach them."""
    paths: dict[int, Path] = {}
    for path, value in walk(script_frames(frame), is_private=True):
        if id(value) in ids and id(value) not in paths:
            paths[id(value)] = path
            if len(paths) == len(ids):
                break
    return paths


def resolve(frame: FrameType, path: Path) -> Any:
    """Return the value at ``path`` now.

    Raises:
        LookupError: the script has no such value.
    """
    (root, name), *steps = path
    try:
        if root == "module":
            value: Any = sys.modules[name]
        else:
            value = script_frames(frame)[root].f_locals[name]
        for kind, key in steps:
            value = _READ[kind](value, key)
    except Exception as error:  # an attribute may run the script's own code
        raise LookupError(text(path)) from error
    return value


def text(path: Path) -> str:
    """Return the expression as a user writes it."""
    (root, name), *steps = path
    if root == "module" and name == "__main__" and steps:
        name = steps.pop(0)[1]
    out = str(name)
    for kind, key in steps:
        out += f"[{key!r}]" if kind == "item" else f".{key}"
    return out


def walk(
    frames: Iterable[FrameType],
    names: Callable[[FrameType], Iterable[str]] | None = None,
    *,
    known: Collection[int] = (),
    more: Mapping[str, Any] | None = None,
    is_private: bool = False,
) -> Iterator[tuple[Path, Any]]:
    """Yield the path and value of each thing that the script reaches; the parts of each once.

    Args:
        names: the variables of a frame at which to begin; all by default.
        known: ids of objects that are yielded, but not followed.
        more: objects without a variable, by name; they come last.
        is_private: follow attributes of libraries' objects that begin with an underscore, too.
    """
    visited: dict[int, Any] = {}  # keeps them alive, so that no id is used twice
    begins: list[list[tuple[Path, Any, int]]] = []
    modules: dict[Any, int] = {}  # whose code is a frame
    for index, frame in enumerate(frames):
        variables = frame.f_locals
        if variables is frame.f_globals:
            modules["module", str(variables.get("__name__"))] = index
        begins.append(
            [
                (((index, name),), variables[name], 0)
                for name in ([*variables] if names is None else names(frame))
                if name in variables and name != "_" and not is_dunder(name)
            ]
        )
        if variables is not frame.f_globals:
            named = _globals_of(frame.f_code, frame.f_globals)
            begins[-1] += [(path, one, 1) for path, one in named]
    begins.append([((("argument", name),), one, 0) for name, one in (more or {}).items()])
    for first in begins:
        todo = deque(first)
        while todo and len(visited) < MAX_VALUES:
            path, value, depth = todo.popleft()
            if path[0] in modules:
                path = ((modules[path[0]], path[1][1]), *path[2:])
            is_first = id(value) not in visited
            visited[id(value)] = value
            yield path, value
            if is_first and depth < MAX_DEPTH and id(value) not in known:
                with contextlib.suppress(Exception):  # what a library's object raises when asked
                    deeper = depth + (not isinstance(value, nn.Module))
                    todo += [
                        (one_path if kind == "" else (*path, (kind, one_path)), one, deeper)
                        for kind, one_path, one in parts(value, is_private)
                    ]


def parts(value: Any, is_private: bool = False) -> Iterator[tuple[str, Any, Any]]:
    """Yield kind, key and value of each part; for a global that a function names: "" and a path."""
    if isinstance(value, ATOMS) or not _is_followed(type(value)):  # type: ignore[arg-type]
        return
    if isinstance(value, (dict, list, tuple, deque)):
        if len(value) <= MAX_PARTS:
            yield from _entries(value)
    elif isinstance(value, (FunctionType, type, ModuleType)):
        yield from _parts_of_code(value, is_private)
    elif isinstance(value, MethodType):
        yield "attr", "__self__", value.__self__
        yield "attr", "__func__", value.__func__
    elif isinstance(value, functools.partial):
        for name in ("func", "args", "keywords"):
            yield "attr", name, getattr(value, name)
    else:
        if isinstance(value, nn.Module):
            is_list = isinstance(value, (nn.Sequential, nn.ModuleList))
            kind = "item" if is_list or isinstance(value, nn.ModuleDict) else "attr"
            for name, module in value.named_children():
                yield kind, int(name) if is_list and name.isdecimal() else name, module
        is_shown = is_private or is_own(file_of(type(value)))
        for name, one in attributes(value):
            is_hidden = name.startswith("_") and not (is_shown and name not in HIDDEN)
            if not is_hidden or isinstance(one, GENERATORS):
                yield "attr", name, one
        yield "attr", "__class__", type(value)


def _entries(value: Any) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(value, dict):
        for key, one in [*dict.items(value)]:
            if isinstance(key, KEYS) and key != "__builtins__":
                yield "item", key, one
    elif hasattr(value, "_fields"):  # a namedtuple
        for name in value._fields:
            yield "attr", name, getattr(value, name)
    else:
        for index, one in enumerate([*value]):
            yield "item", index, one


def _parts_of_code(value: Any, is_private: bool) -> Iterator[tuple[str, Any, Any]]:
    """Yield parts of a function, class or module of the script's own files."""
    if isinstance(value, FunctionType):
        code = value.__code__
        if not is_own(code.co_filename):
            return
        for name, cell in zip(code.co_freevars, value.__closure__ or (), strict=True):
            try:
                yield "cell", name, cell.cell_contents
            except ValueError:  # not assigned yet
                continue
        yield "attr", "__defaults__", value.__defaults__ or ()
        yield "attr", "__kwdefaults__", value.__kwdefaults__ or {}
        for path, one in _globals_of(code, value.__globals__):
            yield "", path, one
    elif not is_own(file_of(value)):
        return
    for name, one in [*vars(value).items()]:
        if is_private or not is_dunder(name):
            yield "attr", name, getattr(one, "__func__", one)  # of a classmethod
        elif isinstance(one, FunctionType):
            yield "attr", name, one


def is_dunder(name: str) -> bool:
    """Return True for a name that Python itself sets, such as ``__name__``."""
    return name.startswith("__") and name.endswith("__")


def _globals_of(code: CodeType, variables: dict[str, Any]) -> Iterator[tuple[Path, Any]]:
    module = ("module", str(variables.get("__name__")))
    for name in names_in(code):
        if name in variables and not is_dunder(name):
            yield (module, ("attr", name)), variables[name]


def attributes(value: Any) -> list[tuple[str, Any]]:
    """Return an object's own attributes; properties are not called."""
    try:
        pairs = [*vars(value).items()]
    except TypeError:  # no __dict__
        pairs = []
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                pairs.append((name, getattr(value, name)))
    return [(name, one) for name, one in pairs if isinstance(name, str)]


@functools.cache
def is_own(file: str) -> bool:
    """Return True for a file of the script's project: not Python's, no package's, and no text
    that a program runs (``python -c``), such as the one that starts this process."""
    return bool(file) and not (
        file.startswith((*LIBRARIES, "<")) or "site-packages" in file or "dist-packages" in file
    )


def file_of(value: Any) -> str:
    """Return the file of a class or module; empty if it is built in, or defined by ``exec``."""
    module = sys.modules.get(value.__module__) if isinstance(value, type) else value
    name = getattr(module, "__name__", "") or ""
    return "" if name.startswith("pipeswitch.") else getattr(module, "__file__", None) or ""


@functools.cache
def _is_followed(kind: type) -> bool:
    return not NOT_FOLLOWED.match(str(kind.__module__))


def _cell(owner: Any, name: str) -> Any:
    return owner.__closure__[owner.__code__.co_freevars.index(name)]


_READ: Final[dict[str, Callable[[Any, Any], Any]]] = {
    "attr": getattr,
    "item": lambda owner, key: owner[key],
    "cell": lambda owner, name: _cell(owner, name).cell_contents,
}
