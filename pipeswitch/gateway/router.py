"""The way of a request from its head to a route: its site, its caller, its path."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final
from urllib.parse import parse_qsl

from msgspec.structs import replace

from ..base.errors import InvalidInput, PipeSwitchError
from ..base.units import nearest
from .http.http_errors import MethodNotAllowed, NotFound, TooLarge, WrongHost
from .http.http_parser import Head
from .http.http_server import Response, Work, answered, refusal
from .routes import Door, Request, Routes
from .serving.auth import Authenticator

JSON_LENGTH: Final = "Inference-Header-Content-Length"
MAX_QUERY_FIELDS: Final = 16
# CORS: the rights of a page of another site that the owner has named.
PREFLIGHT: Final = "access-control-request-method"
PREFLIGHT_HEADERS: Final = "access-control-request-headers"
HEADERS: Final = f"Authorization, Content-Type, Content-Encoding, Last-Event-ID, {JSON_LENGTH}"
NAMES: Final = re.compile("[A-Za-z0-9_, -]{1,2048}")  # names of headers that a page wants to send
EXPOSED: Final = f"Retry-After, Server-Timing, {JSON_LENGTH}"


class Router:
    """Router from paths to doors. It is called with a request's head, as ``http_server.Admit``."""

    def __init__(self, callers: Authenticator, doors: Sequence[Door]) -> None:
        self._callers, self._doors = callers, doors
        self._routes = Routes(route for door in doors for route in door.routes)
        self._files = {path: file for door in doors for path, file in door.files.items()}

    def __call__(self, head: Head) -> Work | Response:
        """Return the work that answers a request with this head, or a refusal."""
        admitted, origin = self._admitted(head), head.headers.get("origin", "")
        if origin not in self._callers.origins:
            return admitted
        if isinstance(admitted, Response):
            return _shown_to(origin, admitted)

        async def work(body: Any) -> Response:
            return _shown_to(origin, await answered(admitted, body, head.path, self.refuse))

        return work

    def refuse(self, path: str, error: PipeSwitchError) -> Response:
        """Return an error in the form of the path's door."""
        for door in self._doors:
            if door.has(path):
                return door.refused(error)
        return refusal(error)

    def _admitted(self, head: Head) -> Work | Response:
        try:
            self._check_site(head)
            if head.method == "OPTIONS" and PREFLIGHT in head.headers and self._callers.origins:
                return _preflight(head.headers.get(PREFLIGHT_HEADERS, ""))
            path = head.path.rstrip("/")
            if (file := self._files.get(path)) is not None:
                if head.method not in ("GET", "HEAD"):
                    raise MethodNotAllowed(head.method, head.path, "GET, HEAD")
                return file
            return self._work(head, path)
        except PipeSwitchError as error:
            return self.refuse(head.path, error)

    def _check_site(self, head: Head) -> None:
        """Refuse a browser's request from another site's page."""
        host = head.headers.get("host")
        if host is None:
            return  # HTTP/1.0, which no browser speaks
        self._callers.check_host(host)
        origin = head.headers.get("origin")
        if origin is None or origin in self._callers.origins:
            return
        if origin.partition("://")[2].lower() != host.lower():
            allow = f'to allow it: [gateway] origins = ["{origin[:80]}"]'
            raise WrongHost(f"a page of {origin[:80]!r} may not send requests here", hint=allow)

    def _work(self, head: Head, path: str) -> Work:
        methods, values = self._routes.match(path)
        route = methods.get("GET" if head.method == "HEAD" else head.method)
        if route is not None and route.is_probe:
            caller = self._callers.probe
        else:
            credentials, key = head.headers.get("authorization", ""), head.headers.get("x-api-key")
            if key and credentials.partition(" ")[0].lower() != "bearer":  # Anthropic's clients
                credentials = f"Bearer {key}"
            caller = self._callers.principal(credentials)
        if not methods or (route is None and path.endswith(":predict")):  # KServe's V1 protocol
            raise self._not_found(path)
        if route is None:
            allow = ", ".join("GET, HEAD" if one == "GET" else one for one in methods)
            raise MethodNotAllowed(head.method, head.path, allow)
        if route.role is not None:
            caller.require(route.role, f"{route.method} {route.path}")
        if route.max_bytes is not None:
            check_size(head.length or 0, route.max_bytes)
        names = dict(zip(route.names, values, strict=True))
        query = {} if route.query is None else _query(head, route.query)
        return partial(route.run, Request(caller=caller, head=head, names=names, query=query))

    def _not_found(self, path: str) -> NotFound:
        advice = next(filter(None, (door.advice(path) for door in self._doors)), "")
        hints = [door.hint for door in self._doors if door.has(path)]
        hint = "; ".join(hints or (door.hint for door in self._doors))
        near = f"; {advice}" if advice else self._routes.near(path)  # some clients show no hints
        return NotFound(f"no path {path[:200]!r}{near}", hint=hint)


def check_size(size: int, max_bytes: int) -> None:
    """Raise TooLarge if a body exceeds the limit of its route."""
    if size > max_bytes:
        text = f"{size} bytes, and the limit for a request is {max_bytes}"
        raise TooLarge(text, hint="send parts")


def _query(head: Head, known: Mapping[str, Any]) -> dict[str, str]:
    """Return the query. InvalidInput: a field is unknown to the route, or appears twice."""
    try:
        pairs = parse_qsl(head.query, keep_blank_values=True, max_num_fields=MAX_QUERY_FIELDS)
    except ValueError:
        raise InvalidInput(f"a query has at most {MAX_QUERY_FIELDS} fields") from None
    for name, _ in pairs:
        if name not in known:
            raise InvalidInput(
                f"no query field {name[:80]!r}{nearest(name, known)}",
                hint=f"fields: {', '.join(known) or 'none'}",
            )
    query = dict(pairs)
    if len(query) != len(pairs):
        raise InvalidInput("a query field appears twice")
    return query


def _preflight(names: str) -> Response:
    """Return the CORS headers for a page of an allowed origin."""
    headers = f"{HEADERS}, {names}" if NAMES.fullmatch(names) else HEADERS
    return Response(
        headers=(
            ("Access-Control-Allow-Methods", "GET, POST, DELETE"),
            ("Access-Control-Allow-Headers", headers),
            ("Access-Control-Max-Age", "600"),
        )
    )


def _shown_to(origin: str, answer: Response) -> Response:
    allow = ("Access-Control-Allow-Origin", origin), ("Access-Control-Expose-Headers", EXPOSED)
    return replace(answer, headers=[*answer.headers, *allow, ("Vary", "Origin")])
