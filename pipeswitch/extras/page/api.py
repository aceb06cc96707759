"""``/api``, PipeSwitch's own HTTP interface: jobs, models, events, the timeline.

Each route has a role and a description (openapi.py). The gateway sends
requests as the server's owner, who may do everything, so each route must name the role it needs.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from msgspec import inspect as types

from ...base.codec import UNREADABLE, decode_json, encode_json
from ...base.errors import InvalidInput
from ...base.model_options import ModelOptions, RegisterRequest
from ...base.roles import Role
from ...base.settings import rules_of, settings
from ...client.client import FINAL_JOB_STATES
from ...frontend.permissions import Rules
from ...frontend.registration import check, check_origin, require_roles
from ...frontend.verbs import VERBS, Http
from ...gateway.doors import DoorContext
from ...gateway.http.http_server import EVENT_STREAM, Response, json_answer
from ...gateway.routes import Door, Request, Route
from ...gateway.serving.upstream import Upstream
from .event_stream import EventLog
from .openapi import document
from .ui import page_files

MAX_TRACE_S: Final = 3600.0
PREFIX: Final = "/api"
LOG_LOOK_S: Final = 0.5  # interval between reads of a followed log without events
MAX_OFFSET: Final = 1 << 50
OFFSET: Final = {"offset": ("integer", "First byte; a negative number counts from the end")}
MAX_VERSION: Final = 1 << 30
TEXT: Final = "text/plain; charset=utf-8"
BUNDLE: Final = "application/octet-stream"
KINDS: Final = {
    types.BoolType: "boolean",
    types.IntType: "integer",
    types.FloatType: "number",
    types.StrType: "string",
    types.VarTupleType: "string",
}
# What a bundle says itself, and what needs code or a folder on the server.
NOT_OF_BUNDLE: Final = {
    *("source", "weights", "adapter", "devices", "preprocess", "postprocess", "generate")
}
OF_BUNDLE: Final = {
    item.name: (KINDS[type(rules_of(item.kind).info)], f"With a bundle: {item.help}")
    for item in settings(ModelOptions).values()
    if item.name not in NOT_OF_BUNDLE and type(rules_of(item.kind).info) in KINDS
}
GUARDS: Final = (("X-Content-Type-Options", "nosniff"), ("Cache-Control", "no-store"))


class RouteRequest(Request, frozen=True, kw_only=True):
    """A whole request to one route, and its query's values."""

    body: Any  # a buffer

    def flag(self, name: str) -> bool:
        text = self.query.get(name, "false")
        if text not in ("true", "false"):
            raise InvalidInput(f"{name} must be true or false, got {text[:40]!r}")
        return text == "true"

    def number(self, name: str, default: float, high: float, *, low: float = 0) -> float:
        text = self.query.get(name)
        try:
            value = default if text is None else float(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high:
            raise InvalidInput(
                f"{name} must be a number from {low:g} to {high:g}, got {text!r:.40}"
            )
        return value

    def field(self, name: str, kind: str) -> Any:
        """Return a field of a verb's body from the query; the server checks its value."""
        if kind == "boolean":
            return self.flag(name)
        if kind == "string":
            return self.query[name]
        value = self.number(name, 0, MAX_OFFSET, low=-MAX_OFFSET)
        return int(value) if kind == "integer" and value.is_integer() else value


OPERATE, INFER, REGISTER = Role.OPERATE, Role.INFER, Role.REGISTER
Verb = Callable[[RouteRequest], Awaitable[Response]]


class Api:
    """Routes of ``/api`` to one server."""

    def __init__(
        self, upstream: Upstream, feed: EventLog, *, version: str, allow_code: Sequence[str]
    ) -> None:
        """Build the table of routes; ``allow_code`` is ``[server] allow_code``."""
        self._upstream = upstream
        self._feed = feed
        self._rules = Rules(allow_code=allow_code)
        self.routes = (
            *self._server_routes(),
            *self._job_routes(),
            *self._model_routes(),
            *(self._route(op, row.http, row.http_role) for op, row in VERBS.items() if row.http),
        )
        self._description = document(self.routes, prefix=PREFIX, version=version)

    def _server_routes(self) -> tuple[Route, ...]:
        seconds = {"seconds": ("number", "Length in seconds; default 10")}
        topics = {"topics": ("string", "Prefixes, separated by commas: switch.,job.")}
        trace = "The last part of the timeline, as a Chrome trace; now_ms is its clock"
        events = "Server-sent events; Last-Event-ID continues after one; an event named dropped "
        events += "counts missed events"
        return (
            _route("GET", "openapi.json", INFER, self._document, "This description"),
            _route("GET", "about", OPERATE, self._about, "The server: device, sizes, addresses"),
            _route("GET", "trace", OPERATE, self._trace, trace, query=seconds),
            _route(
                "GET", "events", OPERATE, self._events, events, query=topics, gives=EVENT_STREAM
            ),
        )

    def _job_routes(self) -> tuple[Route, ...]:
        follow = {**OFFSET, "follow": ("boolean", "Continue until the job ends")}
        history = "Reports of job.log, one JSON object per line"
        actions = (
            ("pause", "Commit a job and suspend it until resume"),
            ("resume", "Continue a paused job"),
            ("cancel", "End it"),
        )
        job, output, rows = "jobs/{job}", self._text("logs"), self._text("history")
        return (
            _route("GET", job, OPERATE, self._job("show"), "A job's row"),
            *(
                _route("POST", f"{job}/{action}", OPERATE, self._job(action), what)
                for action, what in actions
            ),
            _route(
                "GET", f"{job}/logs", OPERATE, output, "What it printed", query=follow, gives=TEXT
            ),
            _route("GET", f"{job}/history", OPERATE, rows, history, query=OFFSET, gives=TEXT),
        )

    def _model_routes(self) -> tuple[Route, ...]:
        version = {"version": ("integer", "0: the current version")}
        models = "One row for each model; all fields with the role operate"
        register = (
            "Register from torchvision:NAME or hf:NAME, or a bundle as the body (with like: "
            "safetensors); pinning needs operate, a factory needs code and --allow-code"
        )
        takes = {
            "application/json": RegisterRequest,
            BUNDLE: {"type": "string", "format": "binary"},
        }
        model = "models/{model}"
        return (
            _route("GET", "models", INFER, self._models, models),
            _route("GET", model, INFER, self._model, "A model's row", query=version),
            _route("POST", model, REGISTER, self._register, register, takes=takes, query=OF_BUNDLE),
        )

    def _route(self, op: str, http: Http, role: Role) -> Route:
        """Return the route of a verb whose row in ``VERBS`` has ``http``."""

        async def run(request: RouteRequest) -> Response:
            fields = {
                name: request.field(name, kind)
                for name, (kind, _) in http.query.items()
                if name in request.query
            }
            model = request.names.get("model", "")
            return _json(
                await self._upstream.ask(op, model, body=fields or None, is_safe=http.is_safe)
            )

        return _route(http.method, http.path, role, run, http.what, query=http.query)

    # ---- the server ----------------------------------------------------------------------------

    async def _document(self, request: RouteRequest) -> Response:
        return _json(self._description)

    async def _about(self, request: RouteRequest) -> Response:
        return _json(await self._upstream.ask("ping"))

    async def _trace(self, request: RouteRequest) -> Response:
        seconds = request.number("seconds", 10.0, MAX_TRACE_S)
        reply = await self._upstream.ask("trace", body={"seconds": seconds})
        trace = {**reply["trace"], "now_ms": time.monotonic() * 1000.0}
        text = await asyncio.to_thread(encode_json, trace)  # the trace of an hour has megabytes
        return Response(parts=[text], headers=GUARDS)

    async def _events(self, request: RouteRequest) -> Response:
        await self._upstream.follow(self._feed.add)
        topics = [topic for topic in request.query.get("topics", "").split(",") if topic]
        last_id = request.head.headers.get("last-event-id", "")
        reader = self._feed.read(request.head.peer, topics, last_id)
        return Response(content_type=EVENT_STREAM, headers=GUARDS, stream=reader)

    # ---- jobs ----------------------------------------------------------------------------------

    def _job(self, action: str) -> Verb:
        async def run(request: RouteRequest) -> Response:
            return _json((await self._upstream.job(request.names["job"], action))["job"])

        return run

    def _text(self, kind: str) -> Verb:
        async def run(request: RouteRequest) -> Response:
            is_followed, job = request.flag("follow"), request.names["job"]
            offset = int(request.number("offset", 0, MAX_OFFSET, low=-MAX_OFFSET))
            piece = await self._upstream.job(
                job, kind, offset_bytes=offset if offset >= 0 else MAX_OFFSET
            )
            if offset < 0:
                offset = max(0, piece["end_bytes"] + offset)
            if is_followed:
                await self._upstream.follow(self._feed.add)
            text = JobText(
                self._upstream, self._feed, job, kind, offset, request.head.peer, is_followed
            )
            return Response(content_type=TEXT, headers=GUARDS, stream=text)

        return run

    # ---- models --------------------------------------------------------------------------------

    async def _models(self, request: RouteRequest) -> Response:
        rows = (await self._upstream.ask("models"))["models"]
        return _json({"models": [request.caller.visible(row) for row in rows]})

    async def _model(self, request: RouteRequest) -> Response:
        version = int(request.number("version", 0, MAX_VERSION))
        return _json(
            request.caller.visible(await self._upstream.show(request.names["model"], version))
        )

    async def _register(self, request: RouteRequest) -> Response:
        """Check the registration, upload the bundle if there is one, and register the model."""
        caller = request.caller
        if request.head.headers.get("content-type", "").startswith(BUNDLE):
            if not len(request.body):
                raise InvalidInput("the body is empty", hint="curl --data-binary @FILE")
            is_like = "like" in request.query
            what, kind = ("weights", "safetensors") if is_like else ("source", "bundle")
            fields: dict[str, Any] = {what: "put:", **request.query}
            fields["aliases"] = [one for one in request.query.get("aliases", "").split(",") if one]
            registration = _registration(
                lambda: msgspec.convert(fields, RegisterRequest, strict=False)
            )
            require_roles(registration, caller)
            file = await self._upstream.upload(request.body, kind, caller.tenant)
            registration = msgspec.structs.replace(registration, **{what: file})
        else:
            registration = _registration(lambda: decode_json(request.body, RegisterRequest))
            check_origin(registration, caller, self._rules)
        # The model belongs to the caller, not to the server's owner.
        body = registration.body() | {"tenant": caller.tenant}
        return _json(await self._upstream.ask("register", request.names["model"], body=body))


@dataclass
class JobText:
    """Job's log or history from an offset on; a ``BodyStream`` that counts as an event reader."""

    upstream: Upstream
    feed: EventLog
    job: str
    kind: str
    offset: int
    peer: str
    is_followed: bool

    def __post_init__(self) -> None:
        self.feed.enter(self.peer)

    async def next(self) -> bytes:
        while True:
            # Check for the job's end before reading, so that no text before its end is missed.
            is_over = not self.is_followed or await self._has_ended()
            piece = await self.upstream.job(self.job, self.kind, offset_bytes=self.offset)
            self.offset = piece["offset_bytes"]
            if piece["text"] or is_over:
                return str(piece["text"]).encode()
            await self.feed.news(LOG_LOOK_S)

    async def _has_ended(self) -> bool:
        return (await self.upstream.job(self.job, "show"))["job"]["state"] in FINAL_JOB_STATES

    def close(self) -> None:
        self.feed.leave(self.peer)


def _route(method: str, path: str, role: Role, verb: Verb, what: str, **more: Any) -> Route:
    path = f"{PREFIX}/{path}"

    async def run(request: Request, body: Any) -> Response:
        if len(body) and "takes" not in more:
            raise InvalidInput(f"{method} {path} takes no body")
        return await verb(RouteRequest(body=body, **msgspec.structs.asdict(request)))

    more.setdefault("query", {})  # unknown fields are refused
    return Route(method=method, path=path, role=role, run=run, what=what, **more)


def _json(value: Any) -> Response:
    return json_answer(value, headers=GUARDS)


def _registration(decode: Callable[[], RegisterRequest]) -> RegisterRequest:
    try:
        registration = decode()
    except UNREADABLE as error:
        raise InvalidInput(
            f"invalid registration: {error}",
            hint='{"source": "torchvision:resnet18", "weights": "random:0"}; or a bundle as '
            f"{BUNDLE}",
        ) from None
    check(registration)
    return registration


def page_door(context: DoorContext) -> Door:
    """Return the door; the page needs no token, its data does."""
    api = Api(
        context.upstream, EventLog(), version=context.service.version, allow_code=context.allow_code
    )
    hint = "GET /api/openapi.json lists the paths of /api; /ui is the web page"
    return Door(prefix=PREFIX, hint=hint, routes=api.routes, files=page_files())
