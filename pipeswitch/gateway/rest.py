"""HTTP paths of the Open Inference Protocol, each with its call of ``Service`` and its JSON."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, Final
from urllib.parse import unquote

import msgspec
from msgspec.structs import replace

from ..base.errors import InvalidInput, PipeSwitchError, ServerUnavailable
from ..base.roles import Principal
from ..base.units import nearest
from .admin.api import PREFIX, Api
from .admin.ui import Page
from .auth import Authenticator
from .decoding import decode_json
from .http.http_server import Head, Response, Work, answered, json_answer, refusal
from .http_errors import MethodNotAllowed, NotFound, TooLarge, WrongHost, body_of, status_of
from .offload import OffloadThread
from .openai.completions import PATHS as TEXT_PATHS
from .openai.completions import PREFIX as TEXT_PREFIX
from .openai.completions import Completions, refused
from .serving import oip
from .serving.model_stats import PHASES
from .serving.service import Service

JSON_LENGTH: Final = "Inference-Header-Content-Length"
OF_MODEL: Final = re.compile("/v2/models/([^/]*)(?:/versions/([^/]*))?(?:/([^/]*))?")
HEALTH: Final = re.compile("/v2/health/.*|/health/?")  # a probe has no token
# CORS: the rights of a page of another site that the owner has named.
ASKED: Final = "access-control-request-method"  # header of a preflight request
MAX_OBJECT_BYTES: Final = 64 << 10  # limit of JSON without tensors
HEADERS: Final = f"Authorization, Content-Type, Content-Encoding, Last-Event-ID, {JSON_LENGTH}"
WISHED: Final = "access-control-request-headers"
NAMES: Final = re.compile("[A-Za-z0-9_, -]{1,2048}")  # names of headers that a page wants to send
TOLD: Final = f"Retry-After, Server-Timing, {JSON_LENGTH}"
HINT: Final = "GET /v2 and /api/openapi.json list the paths; /ui is the web page"


class RestApi:
    """Router from paths to verbs. It is called with a request's head, as ``http_server.Admit``."""

    def __init__(
        self, service: Service, callers: Authenticator, api: Api, page: Page, aside: OffloadThread
    ) -> None:
        self._service = service
        self._completions = completions = Completions(service, aside)
        self._aside = aside
        self._callers = callers
        self._api = api
        self._page = page
        self._fixed: Mapping[str, tuple[str, Callable[..., Awaitable[Response]]]] = {
            "/health": ("GET", self._ready),  # path of vLLM's clients
            "/metrics": ("GET", self._metrics),
            "/v2": ("GET", self._about),
            "/v2/health/live": ("GET", self._live),
            "/v2/health/ready": ("GET", self._ready),
            "/v2/models": ("GET", self._models),
            "/v2/models/stats": ("GET", self._all_statistics),
            "/v2/repository/index": ("POST", self._index),
        }
        self._of_model: Mapping[str, tuple[str, Callable[..., Awaitable[Response]]]] = {
            "": ("GET", _told(service.metadata)),
            "ready": ("GET", self._model_ready),
            "config": ("GET", _told(service.config)),
            "stats": ("GET", _told(service.statistics)),
            "infer": ("POST", self._infer),
            "generate": ("POST", partial(completions.generate, is_stream=False)),
            "generate_stream": ("POST", partial(completions.generate, is_stream=True)),
        }

    def __call__(self, head: Head) -> Work | Response:
        """Return the work that answers a request with this head, or a refusal."""
        admitted, origin = self._admitted(head), head.headers.get("origin", "")
        if origin not in self._callers.origins:
            return admitted
        if isinstance(admitted, Response):
            return _shown_to(origin, admitted)

        async def work(body: Any) -> Response:
            return _shown_to(origin, await answered(admitted, body, head.path, refuse))

        return work

    def _admitted(self, head: Head) -> Work | Response:
        try:
            self._check_site(head)
            if head.method == "OPTIONS" and ASKED in head.headers and self._callers.origins:
                return _preflight(head.headers.get(WISHED, ""))
            if (shown := self._page.answers.get(head.path.rstrip("/"))) is not None:
                _check_method(head, "GET")
                return shown
            is_probe = HEALTH.fullmatch(head.path)
            token = head.headers.get("authorization", "")
            return self._work(
                head, Authenticator.PROBE if is_probe else self._callers.principal(token)
            )
        except PipeSwitchError as error:
            return refuse(head.path, error)

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

    def _work(self, head: Head, caller: Principal) -> Work:
        path = head.path.rstrip("/")
        if path == PREFIX or path.startswith(f"{PREFIX}/"):
            return self._api.find(head, caller)
        if path in self._fixed:
            method, verb = self._fixed[path]
            _check_method(head, method)
            return partial(verb, caller, head)
        if match := OF_MODEL.fullmatch(path):
            name, version, tail = (unquote(part or "") for part in match.groups())
            if tail not in self._of_model:
                near = nearest(tail, filter(None, self._of_model))
                raise NotFound(f"a model has no path {tail[:80]!r}{near}", hint=HINT)
            method, verb = self._of_model[tail]
            _check_method(head, method)
            return partial(verb, caller, name, version, head)
        match path.split("/"):
            case ["", "v1", *_]:
                return self._completions.find(head, caller)
            case ["", "v2", "repository", "models", name, "load" | "unload" as action]:
                _check_method(head, "POST")
                verb = self._load if action == "load" else self._unload
                return partial(verb, caller, unquote(name))
            case ["", "v2", "logging"]:
                return self._settings(caller, head)
            case ["", "v2", "trace", "setting"]:
                return self._settings(caller, head, "")
            case ["", "v2", "models", name, "trace", "setting"]:
                return self._settings(caller, head, unquote(name))
            case ["", "v2", "systemsharedmemory", action]:
                return self._of_regions(caller, "", action, head)
            case ["", "v2", "systemsharedmemory", "region", name, action]:
                return self._of_regions(caller, unquote(name), action, head)
            case _:
                for one in TEXT_PATHS:  # the most frequent mistake: a base URL without /v1
                    if path.endswith(one.removeprefix(TEXT_PREFIX)):
                        hint = f"POST {one}: the client's base URL ends with {TEXT_PREFIX}"
                        raise NotFound(f"no path {head.path[:200]!r}", hint=hint)
                near = nearest(path, self._fixed)
                raise NotFound(f"no path {head.path[:200]!r}{near}", hint=HINT)

    # ---- the server ----------------------------------------------------------------------------

    def _of_regions(self, caller: Principal, name: str, action: str, head: Head) -> Work:
        regions = self._service.regions

        async def status(body: Any) -> Response:
            return json_answer(regions.rows(caller, name))

        async def register(body: Any) -> Response:
            regions.register(caller, name, _object(body))
            return json_answer({})

        async def unregister(body: Any) -> Response:
            regions.unregister(caller, name)
            return json_answer({})

        verbs: dict[str, Work] = {"status": status, "unregister": unregister}
        if name:
            verbs["register"] = register
        if action not in verbs:
            raise NotFound(f"regions have no {action[:80]!r}{nearest(action, verbs)}", hint=HINT)
        _check_method(head, "GET" if action == "status" else "POST")
        return verbs[action]

    def _settings(self, caller: Principal, head: Head, model: str | None = None) -> Work:
        if head.method != "POST":
            _check_method(head, "GET")

        async def work(body: Any) -> Response:
            settings = _object(body) if head.method == "POST" else {}
            return json_answer(await self._service.settings(caller, settings, model))

        return work

    async def _about(self, caller: Principal, head: Head, body: Any) -> Response:
        return json_answer(self._service.about())

    async def _metrics(self, caller: Principal, head: Head, body: Any) -> Response:
        text, kind = await self._service.metrics(caller, head.headers.get("accept", ""))
        return Response(parts=[text], content_type=kind)

    async def _live(self, caller: Principal, head: Head, body: Any) -> Response:
        return _state({"live": await self._service.is_live()}, _soon("the server does not answer"))

    async def _ready(self, caller: Principal, head: Head, body: Any) -> Response:
        return _state({"ready": await self._service.is_ready()}, _soon("the server is not ready"))

    async def _models(self, caller: Principal, head: Head, body: Any) -> Response:
        return json_answer({"models": [row["name"] for row in await self._service.index(caller)]})

    async def _all_statistics(self, caller: Principal, head: Head, body: Any) -> Response:
        return json_answer(await self._service.statistics(caller))

    async def _index(self, caller: Principal, head: Head, body: Any) -> Response:
        ready_only = oip.flag("ready", _object(body))
        return json_answer(await self._service.index(caller, ready_only=ready_only))

    async def _load(self, caller: Principal, model: str, body: Any) -> Response:
        parameters = _object(body).get("parameters") or {}
        if not isinstance(parameters, Mapping):
            raise InvalidInput("parameters must be an object")
        await self._service.load(caller, model, parameters)
        return json_answer({})

    async def _unload(self, caller: Principal, model: str, body: Any) -> Response:
        await self._service.unload(caller, model)
        return json_answer({})

    # ---- a model -------------------------------------------------------------------------------

    async def _model_ready(
        self, caller: Principal, model: str, version: str, head: Head, body: Any
    ) -> Response:
        refusal = await self._service.why_not_ready(caller, model, version)
        return _state({"name": model, "ready": refusal is None}, refusal)

    async def _infer(
        self, caller: Principal, model: str, version: str, head: Head, body: Any
    ) -> Response:
        json_bytes = _json_length(head)
        if json_bytes == 0:
            infer_request = oip.raw_request(body, await self._service.row(caller, model))
        elif (len(body) if json_bytes is None else json_bytes) <= oip.LONG_BYTES:
            infer_request = oip.decode_request(body, json_bytes)
        else:
            infer_request = await self._aside.run(head.peer, oip.decode_request, body, json_bytes)
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


def refuse(path: str, error: PipeSwitchError) -> Response:
    """Return an error in OpenAI's form below ``/v1``, else in our own."""
    is_text = f"{path}/".startswith(f"{TEXT_PREFIX}/")
    return refused(error) if is_text else refusal(error)


def _preflight(wished: str) -> Response:
    """Return the CORS headers for a page of an allowed origin."""
    headers = f"{HEADERS}, {wished}" if NAMES.fullmatch(wished) else HEADERS
    return Response(
        headers=(
            ("Access-Control-Allow-Methods", "GET, POST, DELETE"),
            ("Access-Control-Allow-Headers", headers),
            ("Access-Control-Max-Age", "600"),
        )
    )


def _told(
    verb: Callable[[Principal, str, str], Awaitable[Any]],
) -> Callable[..., Awaitable[Response]]:
    """Return a handler whose answer is the verb's JSON for a model, unchanged."""

    async def run(caller: Principal, model: str, version: str, head: Head, body: Any) -> Response:
        return json_answer(await verb(caller, model, version))

    return run


def _shown_to(origin: str, answer: Response) -> Response:
    """Return the answer with headers that allow pages of ``origin`` to read it."""
    allow = ("Access-Control-Allow-Origin", origin), ("Access-Control-Expose-Headers", TOLD)
    return replace(answer, headers=[*answer.headers, *allow, ("Vary", "Origin")])


def _check_method(head: Head, method: str) -> None:
    if head.method != method and (head.method, method) != ("HEAD", "GET"):
        allow = "GET, HEAD" if method == "GET" else method
        raise MethodNotAllowed(head.method, head.path, allow)


def _soon(why: str) -> ServerUnavailable:
    return ServerUnavailable(why, hint="ask again in a moment")


def _state(facts: dict[str, Any], error: PipeSwitchError | None) -> Response:
    """Return a health endpoint's answer: the facts, and the error's fields if a fact is False."""
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
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
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
