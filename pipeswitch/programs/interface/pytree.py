"""Nesting of a model's inputs and outputs: containers around named tensors. Pure.

On the wire tensors are a flat list, named by their path in the nested value: ``cache.0.key``. A
tree describes the nesting in dicts, lists, tuples and None. It is JSON data: a text is a tensor's
name, ``null`` is None, and a container is ``{"list": [tree, …]}``, ``{"tuple": [tree, …]}`` or
``{"dict": [[key, tree], …]}``. Dataclasses and results of transformers become dicts. A client can
send any tree in a bundle or registration, so ``check_tree`` checks it before any other use.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NoReturn

from ...base.errors import RegistrationRefused
from ...base.units import escape_control_chars

Tree = Any
"""A text, None, or an object with one key; see above."""

MAX_DEPTH: Final = 16
MAX_PARTS: Final = 1024  # of one tree, with its Nones and empty lists
MAX_KEY_CHARS: Final = 128  # so that each tree fits in an answer's header of at most 1 MiB


def items_of(value: Any) -> tuple[str, list[tuple[Any, Any]]] | None:
    """Return a container's kind and items, or None for anything else."""
    if isinstance(value, Mapping):
        return "dict", list(value.items())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return "dict", [(field.name, getattr(value, field.name)) for field in fields]
    if isinstance(value, list | tuple):
        return "list" if isinstance(value, list) else "tuple", list(enumerate(value))
    return None


def flatten(value: Any, part: str, is_leaf: Callable[[Any], bool]) -> tuple[Tree, dict[str, Any]]:
    """Return a value's tree, and its leaves by name: ``y``, ``y0``, ``y1``…, or a dict's keys.

    Raises:
        RegistrationRefused: an item is neither a leaf nor a container, two leaves share a name, or
            the value is too deep or too large. The error names the value by ``part``.
    """
    leaves: dict[str, Any] = {}

    def visit(one: Any, name: str, depth: int) -> Tree:
        if one is None:
            return None
        if is_leaf(one):
            if name in leaves:
                raise RegistrationRefused(f"{part}s", f"two have the name {name!r}")
            leaves[name] = one
            return name
        inner = items_of(one)
        if inner is None:
            raise RegistrationRefused(
                f"{part} {name or 'y'!r}",
                f"it is a {type(one).__name__}, not a tensor",
                hint="only tensors and None are supported, in dicts, lists, tuples and "
                "dataclasses: wrap the module in one that sets the other arguments",
            )
        if depth == 0:
            raise RegistrationRefused(f"{part} {name[:80]!r}", f"over {MAX_DEPTH} levels deep")
        kind, items = inner
        root = "" if kind == "dict" else "y"
        parts = [
            (key, visit(item, f"{name}.{key}" if name else f"{root}{key}", depth - 1))
            for key, item in items
        ]
        return {kind: [list(pair) for pair in parts] if kind == "dict" else [t for _, t in parts]}

    tree = visit(value, "y" if is_leaf(value) else "", MAX_DEPTH)
    check_tree(tree, part, leaves)
    return tree, leaves


def check_tree(tree: Tree, part: str, names: Iterable[str]) -> None:
    """Refuse a tree that is too large or too deep, or does not contain each of ``names`` once.

    Raises:
        RegistrationRefused: the tree is invalid; the error names it by ``part``.
    """
    remaining = set(names)
    count = 0

    def check(one: Tree, depth: int) -> None:
        nonlocal count
        count += 1
        if depth > MAX_DEPTH or count > MAX_PARTS:
            _refuse(part, f"more than {MAX_DEPTH} levels or {MAX_PARTS} parts")
        if isinstance(one, str):
            if one not in remaining:
                _refuse(part, f"{one[:80]!r} is not the name of one, or comes twice")
            remaining.remove(one)
        elif one is not None:
            for item in _children(one, part):
                check(item, depth + 1)

    check(tree, 0)
    if remaining:
        _refuse(part, f"{min(remaining)[:80]!r} is missing")


def check_takes(takes: Tree, names: Iterable[str]) -> None:
    """Refuse a tree of arguments that is not a dict with text keys over exactly these inputs.

    Raises:
        RegistrationRefused: the tree is invalid.
    """
    if takes is None:
        return
    check_tree(takes, "input", names)
    match takes:
        case {"dict": pairs} if all(isinstance(key, str) for key, _ in pairs):
            return
    _refuse("input", "its arguments have no names")


def _children(tree: Tree, part: str) -> Sequence[Tree]:
    match tree:
        case {"list": [*items], **more} | {"tuple": [*items], **more} if not more:
            return items
        case {"dict": [*pairs], **more} if not more and all(map(_is_pair, pairs[: MAX_PARTS + 1])):
            if len(pairs) > MAX_PARTS:
                _refuse(part, f"a dict of more than {MAX_PARTS} parts")
            if len({key for key, _ in pairs}) != len(pairs):
                _refuse(part, "a dict has a key twice")
            return [item for _, item in pairs]
        case _:
            _refuse(part, "a part is neither a name, nothing, nor one list, tuple or dict of parts")


def _is_pair(pair: Any) -> bool:
    match pair:
        case [str(key), _]:
            return len(key) <= MAX_KEY_CHARS and escape_control_chars(key, keep="") == key
        case [int(key), _]:
            return type(key) is int and -(1 << 63) <= key < 1 << 63
        case _:
            return False


def _refuse(part: str, reason: str) -> NoReturn:
    raise RegistrationRefused(f"the tree of {part}s", reason)


def unflatten(tree: Tree, values: Mapping[str, Any]) -> Any:
    """Return the nested value of a checked tree, with leaves from ``values``."""
    match tree:
        case None:
            return None
        case str():
            return values[tree]
        case {"dict": pairs}:
            return {key: unflatten(item, values) for key, item in pairs}
        case {"tuple": items}:
            return tuple(unflatten(item, values) for item in items)
        case _:
            return [unflatten(item, values) for item in tree["list"]]


def arguments(takes: Tree, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model's arguments by name; without a tree, each input is one argument."""
    return dict(values) if takes is None else unflatten(takes, values)


def argument_names(takes: Tree, inputs: Iterable[str]) -> list[str]:
    """Return the names of a model's arguments, in the order of a call."""
    return list(inputs) if takes is None else [key for key, _ in takes["dict"]]
