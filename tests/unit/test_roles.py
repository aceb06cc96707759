"""Roles: which role each verb needs, and which roles a caller has."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import pipeswitch as ps
from pipeswitch.base.config import Config, load
from pipeswitch.base.roles import (
    ANYONE,
    DEFAULT_ROLES,
    MODEL_FACTS,
    OWNER,
    Principal,
    Role,
    in_order,
    parse_roles,
)
from pipeswitch.cli.server import _flag_tree, serve
from pipeswitch.extras.curve.curve_keys import AllowList, KeyFolder, make_pair
from pipeswitch.frontend.frontend import Frontend
from pipeswitch.frontend.transport.replies import redact
from pipeswitch.frontend.verbs import VERBS
from pipeswitch.ipc.control_page import sealed_memfd

ROOT = Path(__file__).parents[2]
STRANGER = Principal(tenant=ANYONE)


@pytest.fixture
def frontend(tmp_path: Path) -> Iterator[Frontend]:
    descriptor = sealed_memfd("pool", 1 << 20)
    config = load(flags={"server": {"state_dir": str(tmp_path)}}, environ={})
    frontend_made = Frontend(config, descriptor, lambda event: None)
    yield frontend_made
    frontend_made.pool.close()
    os.close(descriptor)


def test_every_verb_has_one_role_and_every_role_a_verb(frontend: Frontend) -> None:
    served = {name for name, verb in VERBS.items() if verb.parse is None}
    assert served == {*frontend._own.handlers, "hello"}
    assert {verb.role for verb in VERBS.values()} == set(Role) - {Role.URGENT}  # allows a priority


def test_the_protocol_names_every_verb_with_its_role() -> None:
    text = (ROOT / "docs/protocol.md").read_text("utf-8")
    rows = re.findall(r"^\| `(\w+)` \| ([a-z, `]+) \|", text, re.MULTILINE)
    told_of = {verb: Role(role) for role, verbs in rows for verb in re.findall(r"`(\w+)`", verbs)}
    assert told_of == {name: verb.role for name, verb in VERBS.items()}


def test_whoever_comes_in_may_infer_and_no_role_comes_from_nothing() -> None:
    assert parse_roles(()) == DEFAULT_ROLES == {Role.INFER}
    assert in_order(parse_roles(["code", "register"])) == ["infer", "register", "code"]
    with pytest.raises(ps.InvalidInput):
        parse_roles(["root"])
    assert OWNER.roles == set(Role)


def test_a_refusal_names_the_role_who_lacks_it_and_what_gives_it() -> None:
    with pytest.raises(ps.PermissionDenied) as caught:
        STRANGER.require(Role.REGISTER, "register")
    assert '"register"' in caught.value.message
    assert "a TCP client without a key has infer" in caught.value.message
    assert "--tcp-roles infer,register" in caught.value.hint
    keyed = Principal(tenant="a", roles=parse_roles(["register"]))
    with pytest.raises(ps.PermissionDenied) as caught:
        keyed.require(Role.OPERATE, "load")
    assert 'key "a" has infer, register' in caught.value.message
    command = "pipeswitch keys roles a --role infer --role register --role operate"
    assert command in caught.value.hint
    assert (caught.value.role, caught.value.client) == ("operate", "a")


# ---- keys ----------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> KeyFolder:
    return KeyFolder(tmp_path / "keys").open()


def admitted(folder: KeyFolder, name: str, *roles: str) -> bytes:
    _, public = make_pair(name, folder.path.parent)
    folder.admit(name, public, roles)
    return public


def test_a_key_has_the_roles_it_was_admitted_with(folder: KeyFolder) -> None:
    admitted(folder, "a")
    admitted(folder, "b", "register", "operate")
    clients = folder.admitted()
    assert in_order(clients["a"].roles) == ["infer"]
    assert in_order(clients["b"].roles) == ["infer", "register", "operate"]
    folder.give_roles("b", ["code"])
    assert in_order(folder.admitted()["b"].roles) == ["infer", "code"]
    with pytest.raises(ps.ModelNotFound):
        folder.give_roles("c", [])
    _, public = make_pair("d", folder.path.parent)
    with pytest.raises(ps.InvalidInput):
        folder.admit("d", public, ["root"])
    assert set(folder.admitted()) == {"a", "b"}


@pytest.mark.parametrize(
    ("metadata", "roles", "has_roles"),
    [
        ("", ["infer"], False),  # a key from a release without roles
        ('metadata\n    roles = ""\n', ["infer"], True),
        ('metadata\n    roles = "root operate"\n', ["infer", "operate"], True),  # a later release
        ("metadata\n    roles = \"operate'\n", ["infer"], False),
        ('# roles = "operate"\n', ["infer"], False),
    ],
)
def test_a_file_gives_no_role_that_it_does_not_name(
    folder: KeyFolder, metadata: str, roles: list[str], has_roles: bool
) -> None:
    public = admitted(folder, "a")
    text = f'{metadata}curve\n    public-key = "{public.decode()}"\n'
    (folder.clients_path / "a.key").write_text(text)
    client = folder.admitted()["a"]
    assert (in_order(client.roles), client.has_roles) == (roles, has_roles)


def test_a_file_that_is_called_like_clients_without_keys_admits_nobody(folder: KeyFolder) -> None:
    public = admitted(folder, "a")
    (folder.clients_path / "a.key").rename(folder.clients_path / f"{ANYONE}.key")
    assert not AllowList(folder).callback("pipeswitch", public)


def test_an_address_adds_its_roles_to_those_of_each_key(folder: KeyFolder) -> None:
    key = admitted(folder, "a", "operate")
    principal = AllowList(folder, parse_roles(["register"])).standings()[key]
    assert principal == Principal(tenant="a", roles=parse_roles(["register", "operate"]))


# ---- settings and listings -----------------------------------------------------------------------


def tcp_roles(text: str | None) -> tuple[str, ...]:
    assert "server__tcp_roles" in [param.name for param in serve.params]
    tree = _flag_tree({"server__tcp_roles": text, "server__allow_code": ()})
    config: Config = load(flags=tree, environ={})
    return config.server.tcp_roles


def test_tcp_clients_may_only_ask_unless_it_is_said() -> None:
    assert tcp_roles(None) == ("infer",)
    assert tcp_roles("infer, register") == ("infer", "register")
    with pytest.raises(
        ps.ConfigError, match="tcp_roles: 'regster' is none of infer, urgent, register"
    ):
        tcp_roles("regster")


def row(tenant: str) -> dict[str, Any]:
    facts: dict[str, Any] = dict.fromkeys(MODEL_FACTS, "fact")
    return {**facts, "tenant": tenant, "source": "/home/owner/secret.bundle", "reason": "/p"}


def test_a_listing_tells_a_client_no_paths_and_of_no_other_client() -> None:
    body = {"models": [row("a"), row("b"), row("")]}
    for principal in (
        STRANGER,
        Principal(tenant="a"),
        Principal(tenant="c", roles=parse_roles(())),
    ):
        (shown,) = {tuple(sorted(one)) for one in redact("models", body, principal, {})["models"]}
        assert shown == tuple(sorted(MODEL_FACTS))
    own = Principal(tenant="a", roles=parse_roles(["register"]))
    first, *others = redact("models", body, own, {})["models"]
    assert first == row("a")
    assert all(set(one) == MODEL_FACTS for one in others)
    assert set(redact("show", {"model": row("b")}, own, {})["model"]) == MODEL_FACTS
    assert redact("models", body, OWNER, {}) is body


def test_stats_tell_a_client_of_itself_alone() -> None:
    everyone = {"accepted": 70, "clients": 9}
    assert redact("stats", everyone, STRANGER, {"accepted": 2}) == {"accepted": 2}
    assert redact("stats", everyone, OWNER, {"accepted": 2}) is everyone
