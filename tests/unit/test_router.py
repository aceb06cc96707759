"""Router of the gateway with two small doors."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from pipeswitch.base.roles import Principal, Role
from pipeswitch.gateway.http.http_parser import Head
from pipeswitch.gateway.http.http_server import Response, answered, json_answer
from pipeswitch.gateway.router import Router
from pipeswitch.gateway.routes import Door, Request, Route, Routes
from pipeswitch.gateway.serving.auth import Authenticator

TOKEN = "0123456789abcdef"


async def names(request: Request, body: Any) -> Response:
    return json_answer(
        {"path": request.names, "query": request.query, "body": bytes(body).decode()}
    )


def route(method: str, path: str, **more: Any) -> Route:
    return Route(method=method, path=path, run=names, **more)


DOORS = (
    Door(
        prefix="/v2",
        hint="GET /v2",
        routes=(
            route("GET", "/v2/models/stats"),
            route("GET", "/v2/models/{model}/ready"),
            route("GET", "/v2/health", is_probe=True),
            route("POST", "/v2/models/{model}", role=Role.OPERATE, query={"pin": ("boolean", "")}),
        ),
    ),
    Door(
        prefix="/own",
        hint="read the manual",
        routes=(route("GET", "/own/{rest...}"), route("PUT", "/own/{name}", max_bytes=3)),
        files={"/page": json_answer("page")},
        refused=lambda error: json_answer(error.message, 418),
        advice=lambda path: "use /own" if path == "/theirs" else "",
    ),
)


def ask(method: str, path: str, body: bytes = b"", token: str = TOKEN) -> tuple[int, Any]:
    callers = Authenticator(
        roles=[Role.INFER],
        tokens={TOKEN: Principal(tenant="t", roles=frozenset({Role.OPERATE}))},
        needs_token=True,
        hosts=None,
    )
    path, _, query = path.partition("?")
    headers = {"host": "h", "authorization": token and f"Bearer {token}"}
    headers |= {"authorization": token, "x-api-key": TOKEN} if " " in token else {}
    head = Head(method=method, path=path, query=query, headers=headers, peer="p", length=len(body))
    router = Router(callers, DOORS)
    work = router(head)
    if not isinstance(work, Response):
        work = asyncio.run(answered(work, body, path, router.refuse))
    return work.status, json.loads(work.parts[0])


def test_a_name_goes_before_a_placeholder_unless_its_path_ends() -> None:
    assert ask("GET", "/v2/models/stats/") == (200, {"path": {}, "query": {}, "body": ""})
    for model in ("stats", "a%20b", ""):
        status, answer = ask("HEAD", f"/v2/models/{model}/ready")
        assert (status, answer["path"]) == (200, {"model": model.replace("%20", " ")})


def test_a_placeholder_may_take_the_rest_of_a_path() -> None:
    assert ask("GET", "/own/a/b%2Fc")[1]["path"] == {"rest": "a/b/c"}


def test_what_no_token_is_needed_for_is_answered_and_all_else_is_not_even_named() -> None:
    assert ask("GET", "/page", token="") == (200, "page")
    assert ask("GET", "/v2/health", token="")[0] == 200
    for path in ("/v2/models/stats", "/v2/nothing", "/nothing"):
        assert ask("GET", path, token="")[0] == 401


@pytest.mark.parametrize(
    ("method", "path", "status", "words"),
    [
        ("GET", "/v2/model/m/ready", 404, 'did you mean "/v2/models"'),
        ("GET", "/v2/models/m/redy", 404, 'did you mean "/v2/models/m/ready"'),
        ("GET", "/nothing", 404, "GET /v2; read the manual"),
        ("GET", "/theirs", 404, "use /own"),
        ("PUT", "/v2/models/m/ready", 405, "GET or HEAD"),
        ("POST", "/page", 405, "GET or HEAD"),
        ("POST", "/v2/models/m?pinn=true", 400, 'did you mean "pin"'),
        ("POST", "/v2/models/m?pin=1&pin=2", 400, "twice"),
    ],
)
def test_a_refusal_says_what_would_be_right(
    method: str, path: str, status: int, words: str
) -> None:
    answer = ask(method, path)
    assert answer[0] == status
    assert words in f"{answer[1]['error']} {answer[1]['hint']}"


def test_a_door_refuses_in_its_own_form_and_before_the_body() -> None:
    assert ask("PUT", "/own/a", b"1234") == (418, "4 bytes, and the limit for a request is 3")
    assert ask("PUT", "/own/a", b"123")[1]["body"] == "123"


def test_a_proxys_password_does_not_hide_the_key() -> None:
    for authorization, status in (("Basic eA==", 200), ("Bearer eA==", 401)):
        assert ask("GET", "/v2/models/stats", token=authorization)[0] == status


def test_two_doors_cannot_have_one_route() -> None:
    with pytest.raises(ValueError, match="two routes"):
        Routes([route("GET", "/a/{b}"), route("GET", "/a/{c}")])
