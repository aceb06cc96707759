"""Tenant of a registration: only the owner (or the gateway for it) may name another tenant."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeswitch.base.errors import InvalidInput, PermissionDenied
from pipeswitch.base.roles import ALL_ROLES, ANYONE, OWNER, Principal
from pipeswitch.frontend.verbs import Rules, ask
from pipeswitch.scheduler.state.events import RegisterModelRequest, Token
from pipeswitch.wire.frames import VERSION, RequestHeader


def registered(folder: Path, principal: Principal, **more: Any) -> RegisterModelRequest:
    body = {"source": "torchvision:resnet18", "weights": "random:0", **more}
    header = RequestHeader(v=VERSION, id="1", op="register", model="m", body=body)
    rules = Rules(allow_code=(), uploads_dir=str(folder))
    event = ask(header, Token(1), principal, rules)
    assert isinstance(event, RegisterModelRequest)
    return event


@pytest.mark.parametrize("tenant", ["alice", ANYONE])
def test_the_owner_registers_for_a_client(tenant: str, tmp_path: Path) -> None:
    assert registered(tmp_path, OWNER, tenant=tenant).tenant == tenant
    assert registered(tmp_path, OWNER, tenant="").tenant == ""
    assert registered(tmp_path, OWNER).tenant == ""


def test_what_is_for_a_client_is_held_to_what_a_client_may_name(tmp_path: Path) -> None:
    (tmp_path / "x.bundle").touch()
    path = {"source": str(tmp_path / "x.bundle"), "weights": ""}
    assert registered(tmp_path, OWNER, **path).tenant == ""
    with pytest.raises(PermissionDenied):
        registered(tmp_path, OWNER, tenant="alice", **path)


@pytest.mark.parametrize("own", ["bob", ANYONE])
def test_no_other_client_asks_for_another_client(own: str, tmp_path: Path) -> None:
    principal = Principal(tenant=own, roles=ALL_ROLES)
    assert registered(tmp_path, principal).tenant == own
    with pytest.raises(PermissionDenied):
        registered(tmp_path, principal, tenant="alice")


@pytest.mark.parametrize("tenant", ["../x", "a b", "A" * 65, "\x1b[2J"])
def test_a_tenant_has_a_clients_name(tenant: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput):
        registered(tmp_path, OWNER, tenant=tenant)
