"""Doors and their routes, and the tree of path parts that finds a route for a path.

A *door* is a protocol over HTTP: the paths that it adds and the form of its refusals.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import unquote

import msgspec

from ..base.errors import PipeSwitchError
from ..base.roles import Principal, Role
from ..base.units import nearest
from .http.http_parser import Head
from .http.http_server import Response, refusal

PLACEHOLDER: Final = re.compile(r"\{(\w+)(\.\.\.)?\}")


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """A request before its body. It may serve later requests with the same head."""

    caller: Principal
    head: Head
    names: Mapping[str, str]  # values of the placeholders in the route's path
    query: Mapping[str, str] = {}  # if the route lists its fields


Run = Callable[[Request, Any], Awaitable[Response]]
"""Function that answers a request, given its body."""


@dataclass(frozen=True, kw_only=True)
class Route:
    """One method of one path."""

    method: str
    path: str  # with placeholders: {name}; {name...} at the end is the rest of the path
    run: Run
    what: str = ""
    role: Role | None = None  # needed before the body is read; None: ``run`` checks the caller
    query: Mapping[str, tuple[str, str]] | None = None  # name -> type and meaning; None: ignored
    takes: Mapping[str, Any] = field(default_factory=dict)  # content type -> struct or schema
    gives: str = "application/json"
    max_bytes: int | None = None  # limit for the body, below that of the gateway
    is_probe: bool = False  # needs no token

    @property
    def names(self) -> list[str]:
        """Names of the path's placeholders."""
        return [name for name, _ in PLACEHOLDER.findall(self.path)]


@dataclass(frozen=True, kw_only=True)
class Door:
    """Protocol over HTTP."""

    prefix: str  # refusals of paths below it have this door's form
    hint: str  # where its paths are listed
    routes: Sequence[Route]
    files: Mapping[str, Response] = field(default_factory=dict)  # path -> answer for everybody
    refused: Callable[[PipeSwitchError], Response] = refusal
    advice: Callable[[str], str] = lambda path: ""  # hint for a path that no door has

    def has(self, path: str) -> bool:
        return path == self.prefix or path.startswith(f"{self.prefix}/")


class _Node:
    """Part of the paths of the tree. Names go before placeholders."""

    def __init__(self) -> None:
        self.parts: dict[str, _Node] = {}
        self.any: _Node | None = None  # placeholder
        self.rest: _Node | None = None  # placeholder for the rest of a path
        self.methods: dict[str, Route] = {}

    def child(self, part: str) -> _Node:
        """Return the node of a part of a route's path; add it if there is none."""
        placeholder = PLACEHOLDER.fullmatch(part)
        if placeholder is None:
            return self.parts.setdefault(part, _Node())
        if placeholder[2]:
            self.rest = self.rest or _Node()
            return self.rest
        self.any = self.any or _Node()
        return self.any

    def match(self, parts: list[str]) -> tuple[dict[str, Route], list[str]]:
        """Return the methods of a path and the values of its placeholders."""
        if not parts:
            return self.methods, []
        if (named := self.parts.get(parts[0])) is not None:
            methods, values = named.match(parts[1:])
            if methods:
                return methods, values
        if self.any is not None:
            methods, values = self.any.match(parts[1:])
            if methods:
                return methods, [parts[0], *values]
        return (self.rest.methods, ["/".join(parts)]) if self.rest else ({}, [])


class Routes:
    """All routes of a gateway."""

    def __init__(self, routes: Iterable[Route]) -> None:
        self._root = _Node()
        for route in routes:
            node = self._root
            for part in _parts(route.path):
                node = node.child(part)
            if node.methods.setdefault(route.method, route) is not route:
                raise ValueError(f"two routes for {route.method} {route.path}")

    def match(self, path: str) -> tuple[dict[str, Route], list[str]]:
        """Return the routes of a path by method (empty: no route has it), and the placeholders'
        values."""
        methods, values = self._root.match(_parts(path))
        return methods, [unquote(value) for value in values]

    def near(self, path: str) -> str:
        """Return ``; did you mean "/v2/models"?`` for a path that no route has."""
        node, begin, parts = self._root, "", _parts(path)
        while parts and (after := node.parts.get(parts[0], node.any)) is not None:
            begin, node, parts = f"{begin}/{parts[0]}", after, parts[1:]
        return nearest(path, [f"{begin}/{part}" for part in node.parts])


def _parts(path: str) -> list[str]:
    return path.rstrip("/").split("/")[1:]
