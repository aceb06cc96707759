"""HTTP door of the Open Inference Protocol, with Triton's extensions: calls of ``Service``."""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

from ..base.codec import UNREADABLE, decode_json
from ..base.errors import InvalidInput, PipeSwitchError, ServerUnavailable
from ..base.roles import Principal
from .http.http_errors import TooLarge, body_of, status_of
from .http.http_parser import Head
from .http.http_server import Response, json_answer
from .http.offload import OffloadThread
from .router import JSON_LENGTH
from .routes import Door, Request, Route, Run
from .serving import oip
from .serving.model_stats import PHASES
from .serving.service import Service

MAX_OBJECT_BYTES: Final = 64 << 10  # limit of JSON without tensors
MODEL: Final = "/v2/models/{model}"
OF_OTHERS: Final = re.compile(
    "/v1/models/([^/:]+):predict|/predictions/([^/]+)|/(?:predict|invocations|infer)"
)
REGIONS: Final = "/v2/systemsharedmemory"


def inference_door(service: Service, aside: OffloadThread) -> Door:
    """Return the door; the verbs of ``Service`` check the callers' roles."""
    verbs = OpenInference(service, aside)

    def route(method: str, path: str, run: Run, *, is_probe: bool = False) -> Route:
        return Route(method=method, path=path, run=run, is_probe=is_probe)

    of_model = (
        ("GET", "", _row_of(service.metadata)),
        ("GET", "/ready", verbs.model_ready),
        ("GET", "/config", _row_of(service.config)),
        ("GET", "/stats", _row_of(service.statistics)),
        ("POST", "/infer", verbs.infer),
    )
    routes = (
        route("GET", "/health", verbs.ready, is_probe=True),  # path of vLLM's clients
        route("GET", "/metrics", verbs.metrics),
        route("GET", "/v2", verbs.about),
        route("GET", "/v2/health/live", verbs.live, is_probe=True),
        route("GET", "/v2/health/ready", verbs.ready, is_probe=True),
        route("GET", "/v2/models", verbs.models),
        route("GET", "/v2/models/stats", verbs.all_statistics),
        route("POST", "/v2/repository/index", verbs.index),
        route("POST", "/v2/repository/models/{model}/load", verbs.load),
        route("POST", "/v2/repository/models/{model}/unload", verbs.unload),
        *(
            route(method, f"{MODEL}{version}{tail}", run)
            for version in ("", "/versions/{version}")
            for method, tail, run in of_model
        ),
        *(
            route(method, path, verbs.settings)
            for path in ("/v2/logging", "/v2/trace/setting", f"{MODEL}/trace/setting")
            for method in ("GET", "POST")
        ),
        route("GET", f"{REGIONS}/status", verbs.regions),
        route("POST", f"{REGIONS}/unregister", verbs.unregister_region),
        route("GET", f"{REGIONS}/region/{{region}}/status", verbs.regions),
        route("POST", f"{REGIONS}/region/{{region}}/register", verbs.register_region),
        route("POST", f"{REGIONS}/region/{{region}}/unregister", verbs.unregister_region),
    )
    hint = "GET /v2 names the extensions"
    return Door(prefix="/v2", hint=hint, routes=routes, advice=_advice)


def _advice(path: str) -> str:
    match = OF_OTHERS.fullmatch(path)
    return f"use POST /v2/models/{match[1] or match[2] or 'MODEL'}/infer" if match else ""


class OpenInference:
    """Handlers of the routes."""

    def __init__(self, service: Service, aside: OffloadThread) -> None:
        self._service, self._aside = service, aside

    # ---- the server ----------------------------------------------------------------------------

    async def about(self, request: Request, body: Any) -> Response:
        return json_answer(self._service.about())

    async def metrics(self, request: Request, body: Any) -> Response:
        accept = request.head.headers.get("accept", "")
        text, kind = await self._service.metrics(request.caller, accept)
        return Response(parts=[text], content_type=kind)

    async def live(self, request: Request, body: Any) -> Response:
        return _state({"live": await self._service.is_live()}, _soon("the server does not answer"))

    async def ready(self, request: Request, body: Any) -> Response:
        why = await self._service.why_unready(request.caller)
        return _state({"ready": not why}, _soon(f"the server is not ready: {why}"))

    async def models(self, request: Request, body: Any) -> Response:
        rows = await self._service.index(request.caller)
        return json_answer({"models": [row["name"] for row in rows]})

    async def all_statistics(self, request: Request, body: Any) -> Response:
        return json_answer(await self._service.statistics(request.caller))

    async def index(self, request: Request, body: Any) -> Response:
        ready_only = oip.flag("ready", _object(body))
        return json_answer(await self._service.index(request.caller, ready_only=ready_only))

    async def load(self, request: Request, body: Any) -> Response:
        parameters = _object(body).get("parameters") or {}
        if not isinstance(parameters, Mapping):
            raise InvalidInput("parameters must be an object")
        await self._service.load(request.caller, request.names["model"], parameters)
        return json_answer({})

    async def unload(self, request: Request, body: Any) -> Response:
        await self._service.unload(request.caller, request.names["model"])
        return json_answer({})

    async def settings(self, request: Request, body: Any) -> Response:
        """Answer for the log, or for the traces of a model or ("") of all models."""
        changes = _object(body) if request.head.method == "POST" else {}
        is_log = request.head.path.startswith("/v2/logging")
        model = None if is_log else request.names.get("model", "")
        return json_answer(await self._service.settings(request.caller, changes, model))

    async def regions(self, request: Request, body: Any) -> Response:
        name = request.names.get("region", "")
        return json_answer(self._service.regions.rows(request.caller, name))

    async def register_region(self, request: Request, body: Any) -> Response:
        self._service.regions.register(request.caller, request.names["region"], _object(body))
        return json_answer({})

    async def unregister_region(self, request: Request, body: Any) -> Response:
        self._service.regions.unregister(request.caller, request.names.get("region", ""))
        return json_answer({})

    # ---- a model -------------------------------------------------------------------------------

    async def model_ready(self, request: Request, body: Any) -> Response:
        model, version = _model_of(request)
        why_not = await self._service.why_not_ready(request.caller, model, version)
        return _state({"name": model, "ready": why_not is None}, why_not)

    async def infer(self, request: Request, body: Any) -> Response:
        caller, head, names = request.caller, request.head, request.names
        model, version = names["model"], names.get("version", "")
        json_bytes = _json_length(head)
        try:
            if json_bytes == 0:
                infer_request = oip.raw_request(body, await self._service.row(caller, model))
            elif (len(body) if json_bytes is None else json_bytes) <= oip.LONG_BYTES:
                infer_request = oip.decode_request(body, json_bytes)
            else:
                work = oip.decode_request, body, json_bytes
                infer_request = await self._aside.run(head.peer, *work)
        except InvalidInput as error:  # perhaps the name is wrong, too: say which are right
            inputs = oip.metadata(await self._service.row(caller, model))["inputs"]
            texts = [f"{one['name']} {one['datatype']}{one['shape']}" for one in inputs]
            if error.hint.startswith('{"inputs"'):  # an example of another model
                more = {"data": ["…"]}
                rows = [one | {"shape": [max(1, n) for n in one["shape"]]} | more for one in inputs]
                error.hint = json.dumps({"inputs": rows}, ensure_ascii=False)
            error.message += f"; {model} takes {', '.join(texts)}"
            raise
        outputs, timing = await self._service.infer(
            caller, model, version, infer_request, head.headers, head.peer
        )
        answer = (model, infer_request, outputs, timing)
        if oip.is_long(infer_request, outputs):
            parts, json_bytes = await self._aside.run(head.peer, oip.encode_answer, *answer)
        else:
            parts, json_bytes = oip.encode_answer(*answer)
        headers = [("Server-Timing", _server_timing(timing))]
        if json_bytes is None:
            return Response(parts=parts, headers=headers)
        headers.append((JSON_LENGTH, str(json_bytes)))
        return Response(parts=parts, content_type=oip.BINARY_TYPE, headers=headers)


def _row_of(verb: Callable[[Principal, str, str], Awaitable[Any]]) -> Run:
    """Return a handler whose answer is the verb's JSON for a model, unchanged."""

    async def run(request: Request, body: Any) -> Response:
        return json_answer(await verb(request.caller, *_model_of(request)))

    return run


def _model_of(request: Request) -> tuple[str, str]:
    return request.names["model"], request.names.get("version", "")


def _soon(why: str) -> ServerUnavailable:
    return ServerUnavailable(why, hint="ask again in a moment")


def _state(facts: dict[str, Any], error: PipeSwitchError | None) -> Response:
    if error is None or all(facts.values()):
        return json_answer(facts)
    return json_answer({**facts, **body_of(error)}, status_of(error).http)


def _object(body: Any) -> dict[str, Any]:
    if not len(body):
        return {}
    if len(body) > MAX_OBJECT_BYTES:
        raise TooLarge(f"{len(body)} bytes of JSON, the limit is {MAX_OBJECT_BYTES}")
    try:
        return decode_json(body, dict[str, Any])
    except UNREADABLE as error:
        raise InvalidInput(f"the body is not a JSON object: {error}") from None


def _json_length(head: Head) -> int | None:
    text = head.headers.get(JSON_LENGTH.lower())
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 16):
        raise InvalidInput(f"{JSON_LENGTH} is not a number: {text[:40]!r}")
    return int(text)


def _server_timing(timing: Mapping[str, Any]) -> str:
    return ", ".join(
        [f"{name};dur={timing[f'{name}_ms']:.3f}" for name in PHASES if f"{name}_ms" in timing]
    )
