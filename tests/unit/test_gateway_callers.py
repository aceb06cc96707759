"""Rights of callers over HTTP, and the form of every error."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeswitch.base.errors import (
    ERRORS_BY_NAME,
    ConfigError,
    ModelNotFound,
    PermissionDenied,
    PipeSwitchError,
)
from pipeswitch.base.roles import ALL_ROLES, ANYONE, DEFAULT_ROLES, Principal, Role
from pipeswitch.frontend.verbs import VERBS, require
from pipeswitch.gateway.http.http_errors import (
    Unauthenticated,
    WrongHost,
    as_ours,
    body_of,
    status_of,
)
from pipeswitch.gateway.serving.auth import Authenticator
from pipeswitch.wire.tokens import read_tokens

TOKEN = "0123456789abcdef"


def callers(
    *,
    needs_token: bool = False,
    hosts: frozenset[str] | None = None,
    roles: frozenset[Role] = DEFAULT_ROLES,
) -> Authenticator:
    tokens = {TOKEN: Principal(tenant="ops", roles=frozenset({Role.INFER, Role.OPERATE}))}
    return Authenticator(roles=roles, tokens=tokens, needs_token=needs_token, hosts=hosts)


def test_without_a_token_a_caller_has_infer_alone() -> None:
    anyone = callers().principal("")
    assert anyone == Principal(tenant=ANYONE, roles=DEFAULT_ROLES)
    for verb, row in VERBS.items():
        if row.role is Role.INFER:
            require(anyone, verb)
        else:
            with pytest.raises(PermissionDenied, match=f'needs the role "{row.role}"') as caught:
                require(anyone, verb)
            assert caught.value.role == row.role


def test_a_token_adds_its_roles() -> None:
    for scheme in ("Bearer", "bearer", "BEARER"):
        assert callers().principal(f"{scheme} {TOKEN}").may_operate
        assert callers(needs_token=True).principal(f"{scheme}  {TOKEN} ").may_operate


NO_KEYS = ("", "Bearer", "Bearer ", "bearer EMPTY", "BEARER  EMPTY ")
PLACEHOLDERS = ("Bearer ollama", "bearer sk-1", "Basic abc", TOKEN, "Bearer \udcff", "Bearer empty")


@pytest.mark.parametrize("shown", [*NO_KEYS, *PLACEHOLDERS])
def test_an_open_address_takes_any_key_as_nobodys(shown: str) -> None:
    assert callers().principal(shown) == Principal(tenant=ANYONE, roles=DEFAULT_ROLES)


def test_where_a_token_is_needed_an_unknown_one_is_refused() -> None:
    closed = callers(needs_token=True)
    for shown in NO_KEYS:
        with pytest.raises(Unauthenticated, match="needs a token"):
            closed.principal(shown)
    for shown in PLACEHOLDERS:
        with pytest.raises(Unauthenticated, match="unknown token"):
            closed.principal(shown)


def test_without_roles_for_everybody_an_unknown_key_is_refused_and_no_key_has_no_role() -> None:
    closed = callers(roles=frozenset())
    for shown in PLACEHOLDERS:
        with pytest.raises(Unauthenticated) as caught:
            closed.principal(shown)
        assert "EMPTY" not in caught.value.hint
    for shown in NO_KEYS:
        assert not closed.principal(shown).roles
    assert closed.principal(f"Bearer {TOKEN}").may_operate


def test_a_token_that_is_taken_away_is_known_no_more() -> None:
    known = callers(needs_token=True)
    known.learn({"another-token-of-ops": Principal(tenant="ops")})
    assert known.principal("Bearer another-token-of-ops").tenant == "ops"
    with pytest.raises(Unauthenticated):
        known.principal(f"Bearer {TOKEN}")


@pytest.mark.parametrize("host", ["127.0.0.1:8000", "localhost:1", "LOCALHOST", "[::1]:8000"])
def test_this_address_may_be_asked_under_its_own_names(host: str) -> None:
    callers(hosts=frozenset({"127.0.0.1", "localhost", "[::1]"})).check_host(host)


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8000",
        "",
        "127.0.0.1.evil:80",
        "127.0.0.1:80.evil.example",
        "127.0.0.1:",
        ":80",
    ],
)
def test_another_host_is_refused(host: str) -> None:
    with pytest.raises(WrongHost):
        callers(hosts=frozenset({"127.0.0.1", "localhost", "[::1]"})).check_host(host)
    callers().check_host(host)  # without a list, every host is accepted, for use behind a proxy


def test_a_row_is_cut_to_what_infer_is_told() -> None:
    row = {"name": "m", "state": "ready", "source": "/home/me/m.bundle", "tenant": "alice"}
    assert Principal(tenant=ANYONE).visible(row) == {"name": "m", "state": "ready"}
    assert Principal(tenant="ops", roles=ALL_ROLES).visible(row) == row


def written(folder: Path, text: str, mode: int = 0o600) -> Path:
    path = folder / "tokens"
    path.write_text(text)
    path.chmod(mode)
    return path


def test_a_file_of_tokens_is_read(tmp_path: Path) -> None:
    path = written(tmp_path, f"# ours\nops {TOKEN} infer,operate  # the dashboard\n\nci {'x' * 16}")
    principals = read_tokens(path)
    assert principals[TOKEN] == Principal(tenant="ops", roles=frozenset({Role.INFER, Role.OPERATE}))
    assert principals["x" * 16].roles == DEFAULT_ROLES


@pytest.mark.parametrize(
    ("text", "mode", "words"),
    [
        (f"ops {TOKEN}", 0o644, "mode 0644"),
        ("ops short", 0o600, "can be guessed"),
        (f"ops {TOKEN} root", 0o600, "roles are"),
        (f"OPS! {TOKEN}", 0o600, "not of the form"),
        (f"ops {TOKEN} infer extra", 0o600, "not of the form"),
        (f"a {TOKEN}\nb {TOKEN}", 0o600, "twice"),
        ("# nothing", 0o600, "has no token"),
    ],
)
def test_a_file_that_is_wrong_is_refused_in_words(
    tmp_path: Path, text: str, mode: int, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        read_tokens(written(tmp_path, text, mode))


def test_every_error_has_a_status_and_what_may_be_sent_again_says_so() -> None:
    ours = {cls.__name__: cls for cls in PipeSwitchError.__subclasses__()}  # and gateway errors
    statuses = {name: status_of(cls.__new__(cls)) for name, cls in (ERRORS_BY_NAME | ours).items()}
    assert {name: s.http for name, s in statuses.items() if s.http != 500} == {
        "InvalidInput": 400,
        "SharedInputRefused": 400,
        "RegistrationRefused": 400,
        "Unauthenticated": 401,
        "PermissionDenied": 403,
        "WrongHost": 403,
        "ModelNotFound": 404,
        "NotFound": 404,
        "SequenceNotFound": 404,
        "MethodNotAllowed": 405,
        "RequestTimeout": 408,
        "AlreadyExists": 409,
        "DeviceBusy": 409,
        "TooLarge": 413,
        "UnknownCoding": 415,
        "QueueFull": 429,
        "HeadTooLarge": 431,
        "Cancelled": 499,
        "ServerUnavailable": 503,
        "ModelQuarantined": 503,
        "DeadlineExceeded": 504,
        "OutOfDeviceMemory": 507,
        "HostStoreFull": 507,
    }
    assert {name for name, s in statuses.items() if s.may_retry} == {
        "QueueFull",
        "ServerUnavailable",
    }


def test_a_refusal_has_text_code_and_hint_and_a_bug_keeps_its_insides() -> None:
    error = ModelNotFound('no model "m"', hint="pipeswitch models")
    body = {"error": 'no model "m"', "code": "ModelNotFound", "hint": "pipeswitch models"}
    assert body_of(error) == body
    assert "secret" not in body_of(as_ours(ValueError("secret")))["error"]
