"""Routes of ``/api`` and ``/ui``: their roles, their descriptions, and requests they refuse."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("httptools", reason="make installs it")

from pipeswitch.base.errors import ModelNotFound, PipeSwitchError
from pipeswitch.base.roles import Principal, Role
from pipeswitch.extras.page import api
from pipeswitch.extras.page.api import BUNDLE, GUARDS, Api, JobText
from pipeswitch.extras.page.event_stream import MAX_READERS_PER_ADDRESS, EventLog
from pipeswitch.extras.page.ui import FILES, POLICY, page_files
from pipeswitch.extras.text.completions import text_door
from pipeswitch.frontend.verbs import VERBS, Http, Verb
from pipeswitch.gateway.doors import DoorContext
from pipeswitch.gateway.http.http_parser import Head
from pipeswitch.gateway.http.http_server import Response, answered
from pipeswitch.gateway.http.offload import OffloadThread
from pipeswitch.gateway.rest import inference_door
from pipeswitch.gateway.router import Router
from pipeswitch.gateway.routes import Door
from pipeswitch.gateway.serving.auth import Authenticator
from pipeswitch.gateway.serving.service import Service

TOKENS = {f"token-of-{role}".ljust(16, "-"): frozenset({Role.INFER, role}) for role in Role}
OWNER = "the-owners-own-token"
ROW = {"name": "m", "state": "ready", "inputs": {}, "outputs": {}, "batch": [1, 1], "source": "x"}


class Upstream:
    """Server that records each request and answers with its content."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, Any]] = []
        self.log = "one\ntwo\nthree\n"
        self.state = "done"

    async def ask(self, op: str, model: str = "", *, body: Any = None, is_safe: bool = True) -> Any:
        self.asked.append((op, model, body))
        if op == "models":
            return {"models": [ROW]}
        if op == "trace":
            return {"trace": {"traceEvents": []}}
        return {"op": op, "model": model, "body": body}

    async def show(self, model: str, version: int = 0) -> Any:
        if model != "m":
            raise ModelNotFound(f'no model "{model[:80]}"')
        return ROW | ({"version": version} if version else {})

    async def job(self, name: str, action: str, offset_bytes: int = 0) -> Any:
        self.asked.append((action, name, offset_bytes))
        if action not in ("logs", "history"):
            return {"job": {"name": name, "state": self.state}}
        end = len(self.log)
        return {
            "text": self.log[offset_bytes:][:5],
            "end_bytes": end,
            "offset_bytes": min(offset_bytes + 5, end),
        }

    async def upload(self, data: Any, kind: str, tenant: str) -> str:
        self.asked.append(("put", kind, bytes(data), tenant))
        return "put:digest"

    async def follow(self, take: Any) -> None:
        pass


HINT = "openapi.json lists the paths"


class Rig:
    def __init__(
        self, allow_code: tuple[str, ...] = (), origins: frozenset[str] = frozenset()
    ) -> None:
        self.upstream: Any = Upstream()
        self.feed = EventLog()
        self.api = Api(self.upstream, self.feed, version="1.2", allow_code=allow_code)
        callers = Authenticator(
            roles=[Role.INFER],
            tokens={token: Principal(tenant="t", roles=roles) for token, roles in TOKENS.items()},
            needs_token=False,
            hosts=frozenset({"127.0.0.1"}),
            origins=origins,
            owner_token=OWNER,
        )
        service, aside = Service(self.upstream), OffloadThread()
        page = Door(prefix="/api", hint=HINT, routes=self.api.routes, files=page_files())
        context = DoorContext(service=service, upstream=self.upstream, aside=aside)
        doors = [inference_door(service, aside), page, text_door(context)]
        self.router = Router(callers, doors)

    def ask(
        self, method: str, path: str, body: bytes = b"", *, token: str = OWNER, **headers: str
    ) -> Response:
        path, _, query = path.partition("?")
        fields = {"host": "127.0.0.1:1", **{k.replace("_", "-"): v for k, v in headers.items()}}
        if token:
            fields["authorization"] = f"Bearer {token}"
        head = Head(
            method=method, path=path, query=query, headers=fields, peer="1.2.3.4", length=len(body)
        )
        work = self.router(head)
        return (
            work
            if isinstance(work, Response)
            else asyncio.run(answered(work, body, path, self.router.refuse))
        )

    def refused(self, *args: Any, **options: Any) -> tuple[int, str]:
        answer = self.ask(*args, **options)
        body = json.loads(answer.parts[0])
        assert set(body) - {"limit"} == {"error", "code", "hint"}
        return answer.status, f"{body['code']}: {body['error']} {body['hint']}"


@pytest.fixture
def rig() -> Rig:
    return Rig()


def told(answer: Response) -> Any:
    assert answer.status == 200, bytes(answer.parts[0])
    return json.loads(answer.parts[0])


def paths(rig: Rig) -> list[tuple[str, str, Role]]:
    return [
        (route.method, re.sub(r"\{\w+\}", "m", route.path), route.role) for route in rig.api.routes
    ]


def test_every_route_asks_for_its_role_before_a_byte_of_the_body(rig: Rig) -> None:
    for method, path, role in paths(rig):
        if role is not Role.INFER:
            for token in (
                "",
                "of-nobody",
                *(known for known, roles in TOKENS.items() if role not in roles),
            ):
                status, text = rig.refused(method, path, token=token)
                assert (status, f'needs the role "{role}"' in text) == (403, True), path
    assert rig.upstream.asked == []


def test_with_its_role_every_route_answers_and_is_guarded(rig: Rig) -> None:
    bodies = {("POST", "/api/models/m"): b'{"source": "torchvision:resnet18"}'}
    for method, path, role in paths(rig):
        for token in (OWNER, next(known for known, roles in TOKENS.items() if role in roles)):
            answer = rig.ask(method, path, bodies.get((method, path), b""), token=token)
            assert answer.status == 200, path
            assert set(GUARDS) <= set(answer.headers), path
            if answer.stream is not None:
                answer.stream.close()


def test_a_row_of_verbs_gives_a_verb_its_route(monkeypatch: pytest.MonkeyPatch) -> None:
    fields = {"share": ("integer", "Percent"), "why": ("string", "A note")}
    row = Verb(Role.REGISTER, http=Http("POST", "models/{model}/peek", "Look", fields))
    monkeypatch.setattr(api, "VERBS", {**VERBS, "peek": row})
    rig, register = Rig(), "token-of-register".ljust(16, "-")
    told(rig.ask("POST", "/api/models/m/peek", token=register))
    told(rig.ask("POST", "/api/models/m/peek?share=7&why=so", token=register))
    assert rig.upstream.asked == [("peek", "m", None), ("peek", "m", {"share": 7, "why": "so"})]
    for query in ("share=x", "share=nan", "wy=so"):
        assert rig.refused("POST", f"/api/models/m/peek?{query}", token=register)[0] == 400
    assert rig.refused("POST", "/api/models/m/peek", b"{}", token=register)[0] == 400


def test_a_verb_that_depends_on_its_client_needs_operate_over_http(rig: Rig) -> None:
    """The gateway connects as the server's owner, so the server would answer with everything."""
    roles = {(route.method, route.path): route.role for route in rig.api.routes}
    for verb in VERBS.values():
        if verb.http is not None and (verb.is_cut or verb.of_owner):
            assert roles[verb.http.method, f"/api/{verb.http.path}"] is Role.OPERATE


def test_the_guide_names_every_route(rig: Rig) -> None:
    guide = (Path(__file__).parents[4] / "docs" / "guide" / "http.md").read_text()
    names = {*re.findall(r"[a-z.]+", " ".join(re.findall(r"^- `.*/api/.*$", guide, re.MULTILINE)))}
    for route in rig.api.routes:
        assert {*re.sub(r"\{\w+\}", "", route.path).split("/")} - {""} <= names, route.path


def test_the_description_has_every_route_and_is_openapi(rig: Rig) -> None:
    document = told(rig.ask("GET", "/api/openapi.json", token=""))
    assert document["openapi"].startswith("3.1")
    assert set(document["info"]) == {"title", "version"}
    described = {(m.upper(), p) for p, methods in document["paths"].items() for m in methods}
    assert described == {(route.method, route.path) for route in rig.api.routes}
    operations = [one for methods in document["paths"].values() for one in methods.values()]
    names = [one["operationId"] for one in operations]
    assert len(set(names)) == len(names) == len(rig.api.routes)
    for path, methods in document["paths"].items():
        for one in methods.values():
            in_path = {p["name"] for p in one["parameters"] if p["in"] == "path"}
            assert in_path == set(re.findall(r"\{(\w+)\}", path))
            assert all(p["required"] for p in one["parameters"] if p["in"] == "path")
            assert all({"name", "in", "schema"} <= set(p) for p in one["parameters"])
            assert {"200", "default"} == set(one["responses"])
            assert one["summary"]
            for scheme in one["security"]:
                assert set(scheme) <= set(document["components"]["securitySchemes"])
    for reference in re.findall(r'"\$ref":\s*"#/([^"]+)"', json.dumps(document)):
        part_of: Any = document
        for part in reference.split("/"):
            part_of = part_of[part]
    body = document["paths"]["/api/models/{model}"]["post"]["requestBody"]["content"]
    assert set(body) == {"application/json", BUNDLE}


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "words"),
    [
        ("GET", "/api", b"", 404, "openapi.json"),
        ("GET", "/api/job", b"", 404, 'did you mean "/api/jobs"'),
        ("GET", "/api/jobs/a/b/c", b"", 404, "no path"),
        ("PUT", "/api/jobs", b"", 405, "use GET"),
        ("GET", "/api/models/m/load", b"", 405, "use POST"),
        ("PUT", "/api/models/m", b"", 405, "GET or HEAD or POST or DELETE"),
        ("POST", "/ui", b"", 405, "use GET"),
        ("GET", "/api/models/nlp", b"", 404, "no model"),
        ("GET", "/api/trace?seconds=many", b"", 400, "from 0 to 3600"),
        ("GET", "/api/trace?seconds=nan", b"", 400, "from 0 to 3600"),
        ("GET", "/api/trace?second=1", b"", 400, 'did you mean "seconds"'),
        ("GET", "/api/trace?seconds=1&seconds=2", b"", 400, "twice"),
        ("GET", "/api/trace?" + "&".join("a" * 20), b"", 400, "at most"),
        ("GET", "/api/jobs/j/logs?follow=yes", b"", 400, "true or false"),
        ("POST", "/api/jobs/j/pause", b"{}", 400, "takes no body"),
        ("POST", "/api/models/m", b"", 400, "invalid registration"),
        ("POST", "/api/models/m", b'{"sorce": "x"}', 400, "invalid registration"),
        ("POST", "/api/models/m", b"[" * 3000, 400, "invalid registration"),
    ],
)
def test_what_is_not_there_or_does_not_fit_says_what_would_be_right(
    rig: Rig, method: str, path: str, body: bytes, status: int, words: str
) -> None:
    answer_status, text = rig.refused(method, path, body)
    assert answer_status == status
    assert words in text
    assert not [one for one in rig.upstream.asked if one[0] in ("register", "pause", "put")]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"source": "/etc/passwd.bundle"}, "file of the server's machine"),
        ({"source": "../x.bundle"}, "file of the server's machine"),
        ({"source": "hf:/root/models"}, "file of the server's machine"),
        ({"source": "torchvision:resnet18", "weights": "/w.safetensors"}, "server's machine"),
        ({"source": "os.path:join"}, "--allow-code"),
        ({"source": "pickle:loads"}, "--allow-code"),
    ],
)
def test_nothing_of_the_servers_machine_is_named_through_http_not_by_the_owner_either(
    rig: Rig, body: Any, words: str
) -> None:
    status, text = rig.refused("POST", "/api/models/m", json.dumps(body).encode())
    assert status == 403
    assert words in text
    assert rig.upstream.asked == []


def test_code_that_is_allowed_needs_its_role_and_pinning_another() -> None:
    rig = Rig(allow_code=("models.*",))
    body = b'{"source": "models.zoo:make"}'
    register, code = (f"token-of-{role}".ljust(16, "-") for role in ("register", "code"))
    assert rig.refused("POST", "/api/models/m", body, token=register)[0] == 403
    assert rig.refused("POST", "/api/models/m", body, token=code)[0] == 403  # "register" is missing
    assert rig.ask("POST", "/api/models/m", body).status == 200
    pinned = b'{"source": "torchvision:resnet18", "pin": true}'
    assert '"operate"' in rig.refused("POST", "/api/models/m", pinned, token=register)[1]
    assert [op for op, _, _ in rig.upstream.asked] == ["register"]


def test_a_bundle_is_the_body_and_its_options_are_the_query(rig: Rig) -> None:
    told(
        rig.ask(
            "POST",
            "/api/models/m?max_batch=8&batch=4&priority=high&precision=fast",
            b"bytes",
            content_type=BUNDLE,
        )
    )
    put, (op, model, body) = rig.upstream.asked
    assert put == ("put", "bundle", b"bytes", "")
    assert (op, model) == ("register", "m")
    assert body == {
        "source": "put:digest",
        "priority": "high",
        "max_batch": 8,
        "batch": 4,
        "precision": "fast",
        "tenant": "",
    }
    for query in (
        "batch=1",
        "batch=two",
        "batch=-1",
        "pin=maybe",
        "max_error=nan",
        "max_error=2",
        "precision=fats",
        "priority=hgih",
        "batch_delay_ms=2",
        "adapter=/srv",  # the gateway sends it as the owner
        "like=m&batch=4",
    ):
        text = rig.refused("POST", f"/api/models/m?{query}", b"bytes", content_type=BUNDLE)[1]
        assert text.startswith("InvalidInput"), query
    assert len(rig.upstream.asked) == 2
    told(rig.ask("POST", "/api/models/v?like=m", b"bytes", content_type=BUNDLE))
    assert rig.upstream.asked[2:] == [
        ("put", "safetensors", b"bytes", ""),
        ("register", "v", {"like": "m", "weights": "put:digest", "tenant": ""}),
    ]
    assert "empty" in rig.refused("POST", "/api/models/m", content_type=BUNDLE)[1]


def test_http_fills_what_every_door_fills_and_the_callers_rights_hold(rig: Rig) -> None:
    """The gateway connects as the owner, so it must check each caller's rights itself."""
    fields = {
        "source": "torchvision:resnet18",
        "inputs": {"x": [[1, [1, 8]], "int64"]},
        "state": {"h": ["h_out", -1]},
        "devices": ["cpu"],
    }
    told(rig.ask("POST", "/api/models/m", json.dumps(fields).encode()))
    assert rig.upstream.asked.pop()[2]["state"] == {"h": ("h_out", -1)}
    function = {
        "source": "torchvision:resnet18",
        "preprocess": "models.zoo:read",
        "raw": {"text": [[1], "bytes"]},
    }
    body = json.dumps(function).encode()
    assert "--allow-code" in rig.refused("POST", "/api/models/m", body)[1]  # even for the owner
    allowed, token = Rig(allow_code=("models.*",)), "token-of-register".ljust(16, "-")
    assert '"code"' in allowed.refused("POST", "/api/models/m", body, token=token)[1]
    told(allowed.ask("POST", "/api/models/m", body))
    for field in ({"tenant": "alice"}, {"weights": 3}, {"max_batch": True}, {"takes": "x"}):
        bad = json.dumps({**fields, **field}).encode()
        assert rig.refused("POST", "/api/models/m", bad, token=token)[0] == 400, field
    assert rig.upstream.asked == []


def test_what_a_caller_registers_is_its_own_and_not_the_owners(rig: Rig) -> None:
    """If a registration counted as the owner's, its program would run in a process with the owner's
    models, and its uploads and programs would have no limit on disk."""
    token = "token-of-register".ljust(16, "-")
    told(rig.ask("POST", "/api/models/m", b"bytes", token=token, content_type=BUNDLE))
    told(rig.ask("POST", "/api/models/n", b'{"source": "torchvision:resnet18"}', token=token))
    put, first, second = rig.upstream.asked
    assert put[3] == first[2]["tenant"] == second[2]["tenant"] == "t"


def test_infer_is_told_of_models_what_it_may_know(rig: Rig) -> None:
    (row,) = told(rig.ask("GET", "/api/models", token=""))["models"]
    assert "source" not in row
    (row,) = told(rig.ask("GET", "/api/models"))["models"]
    assert row["source"] == "x"


def test_a_log_comes_from_where_it_is_asked_for_and_ends_with_the_job(rig: Rig) -> None:
    async def read(offset: int, *, follow: bool) -> bytes:
        log = JobText(rig.upstream, rig.feed, "j", "logs", offset, peer="a", is_followed=follow)
        got = b""
        while piece := await log.next():
            got += piece
        log.close()
        return got

    assert asyncio.run(read(0, follow=False)) == b"one\ntwo\nthree\n"
    assert asyncio.run(read(4, follow=True)) == b"two\nthree\n"
    for kind in ("logs", "history"):
        answer = rig.ask("GET", f"/api/jobs/j/{kind}?offset=-6")
        assert rig.upstream.asked[-1] == (kind, "j", 1 << 50)
        assert answer.content_type.startswith("text/plain")
        stream: Any = answer.stream
        assert asyncio.run(stream.next()) == b"three"
        assert rig.upstream.asked[-1] == (kind, "j", 8)
    assert rig.refused("GET", "/api/jobs/j/history?follow=true")[0] == 400


def test_a_followed_log_goes_on_until_the_job_is_over(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.upstream.state = "running"

    async def follow() -> list[bytes]:
        log = JobText(rig.upstream, rig.feed, "j", "logs", 0, peer="a", is_followed=True)
        pieces = [await log.next() for _ in range(3)]
        waiting = asyncio.create_task(log.next())
        await asyncio.sleep(0)
        assert not waiting.done()
        rig.upstream.log += "4\n"
        rig.feed.add("job.progress", {})
        pieces.append(await asyncio.wait_for(waiting, 5))
        rig.upstream.state = "done"
        return [*pieces, await log.next()]

    assert asyncio.run(follow()) == [b"one\nt", b"wo\nth", b"ree\n", b"4\n", b""]


def test_streams_of_one_address_are_limited(rig: Rig) -> None:
    for number in range(MAX_READERS_PER_ADDRESS):
        path = "/api/events" if number % 2 else "/api/jobs/j/logs"
        assert rig.ask("GET", path).status == 200
    status, text = rig.refused("GET", "/api/events")
    assert (status, "too many streams" in text) == (429, True)
    assert rig.refused("GET", "/api/jobs/j/logs")[0] == 429


def test_another_method_is_told_which_there_are(rig: Rig) -> None:
    for path, allow in (
        ("/v2/health/live", "GET, HEAD"),
        ("/v2/models/m/infer", "POST"),
        ("/health", "GET, HEAD"),
        ("/v1/models/m", "GET, HEAD"),
        ("/v1/completions", "POST"),
        ("/api/models/m", "GET, HEAD, POST, DELETE"),
    ):
        answer = rig.ask("OPTIONS", path)
        assert (answer.status, dict(answer.headers)["Allow"]) == (405, allow)


def test_a_probe_of_http_1_0_that_names_no_host_is_answered(rig: Rig) -> None:
    head = Head(method="GET", path="/ui", query="", headers={}, peer="1.2.3.4", length=0)
    answer = rig.router(head)
    assert isinstance(answer, Response)
    assert answer.status == 200


def test_a_step_of_a_sequence_whose_outputs_are_refused_is_not_computed(rig: Rig) -> None:
    data = {"name": "x", "shape": [1], "datatype": "FP32", "data": [1.0]}
    for parameters in ({"classification": 2}, {"binary_data": 1}):
        outputs = [{"name": "y", "parameters": parameters}]
        body = {"inputs": [data], "outputs": outputs, "parameters": {"sequence_id": 5}}
        status, _ = rig.refused("POST", "/v2/models/m/infer", json.dumps(body).encode())
        assert status == 400  # the rig's server has no ``infer``


def test_a_page_of_another_site_may_not_ask(rig: Rig) -> None:
    for path in ("/ui", "/api/ps"):
        for origin in ("http://evil.example", "http://[::1", "//[", "http://a]b", "null"):
            assert rig.refused("GET", path, origin=origin)[0] == 403
        assert rig.refused("GET", path, host="evil.example")[0] == 403


def test_a_page_of_a_site_that_the_owner_named_may_ask_and_reads_refusals_too() -> None:
    site, other = "https://app.example.com", "https://app.example.com.evil.example"
    rig = Rig(origins=frozenset({site}))
    preflight = {"origin": site, "access_control_request_method": "POST"}
    answer = rig.ask("OPTIONS", "/v2/models/m/infer", token="", **preflight)
    headers = dict(answer.headers)
    assert (answer.status, headers["Access-Control-Allow-Origin"]) == (200, site)
    assert "POST" in headers["Access-Control-Allow-Methods"]
    assert "Authorization" in headers["Access-Control-Allow-Headers"]
    wished = "authorization,content-type,x-stainless-os,x-stainless-retry-count"
    for origin, is_allowed in ((wished, True), ("x: y", False), ("a" * 9999, False)):
        answer = rig.ask(
            "OPTIONS", "/v1/models", token="", **preflight, access_control_request_headers=origin
        )
        allowed = dict(answer.headers)["Access-Control-Allow-Headers"]
        assert allowed.endswith(f", {origin}") is is_allowed
    for path, status in (("/api/models", 200), ("/api/ps", 403), ("/v2/modles", 404)):
        answer = rig.ask("GET", path, token="", origin=site)
        headers = dict(answer.headers)
        assert (answer.status, headers["Access-Control-Allow-Origin"]) == (status, site)
        assert "Server-Timing" in headers["Access-Control-Expose-Headers"]
    assert "Access-Control-Allow-Origin" not in dict(rig.ask("GET", "/api/models").headers)
    refused = rig.ask("OPTIONS", "/v2", token="", **{**preflight, "origin": other})
    assert (refused.status, "Access-Control-Allow-Origin" in dict(refused.headers)) == (403, False)


def test_the_page_is_shown_to_everyone_and_its_policy_lets_nothing_else_in(rig: Rig) -> None:
    for path in FILES:
        answer = rig.ask("GET", path, token="")
        headers = dict(answer.headers)
        assert answer.status == 200
        assert len(answer.parts[0]) > 100
        assert headers["Content-Security-Policy"] == POLICY
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert not {"Set-Cookie", "Access-Control-Allow-Origin"} & set(headers)
    assert "unsafe" not in POLICY
    assert "'none'" in POLICY.split(";")[0]


def test_a_browser_that_asks_for_nothing_is_sent_to_the_page(rig: Rig) -> None:
    answer = rig.ask("GET", "/", token="")
    assert (answer.status, dict(answer.headers)["Location"]) == (303, "/ui")
    assert rig.refused("POST", "/")[0] == 405
    assert rig.refused("GET", "/nothing")[0] == 404


def test_the_pages_files_ask_no_other_site_and_parse_no_text_as_html() -> None:
    for path in FILES:
        answer = page_files()[path]
        text = bytes(answer.parts[0]).decode()
        sites = set(re.findall(r"https?://[^\s\"'<)]+", text))
        assert sites <= {"http://www.w3.org/2000/svg"}, path  # a namespace, which is never loaded
        for word in (
            "innerHTML",
            "outerHTML",
            "insertAdjacent",
            "document.write",
            "eval(",
            "new Function",
            "document.cookie",
            " style=",
            "onclick",
            "javascript:",
        ):
            assert word not in text, f"{path}: {word}"


def test_an_error_of_the_server_is_told_as_everywhere(rig: Rig) -> None:
    async def fails(*_: Any, **__: Any) -> Any:
        raise PipeSwitchError("broken", hint="mend it")

    rig.upstream.ask = fails
    assert rig.refused("GET", "/api/ps") == (500, "PipeSwitchError: broken mend it")


def refusal(rig: Rig, path: str) -> tuple[int, str, str]:
    answer = rig.ask("GET", path)
    body = json.loads(b"".join(map(bytes, answer.parts)))
    return answer.status, body["error"], body["hint"]


def test_a_client_of_ollama_is_told_the_way_that_works() -> None:
    status, error, _ = refusal(Rig(), "/api/pull")
    assert (status, "pipeswitch run" in error) == (404, True)


@pytest.mark.parametrize(("state", "hinted"), [("failed", "[[model]]"), ("building", "again")])
def test_a_model_that_is_not_ready_says_what_would_help(
    state: str, hinted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "ROW", {**ROW, "state": state, "reason": "no file"})
    for path in ("/v2/models/m/ready", "/v2/models/m"):
        status, error, hint = refusal(Rig(), path)
        assert (status, state in error, "no file" in error, hinted in hint) == (503, *[True] * 3)
