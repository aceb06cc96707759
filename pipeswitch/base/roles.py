"""Callers and their roles: five sets of rights. ``frontend/verbs.py`` says which role a verb needs,
``frontend/permissions.py`` which files and code a caller may name. A key, a token or the owner's
socket only proves who calls.

Every client has ``infer``, unless its address gives no role (``[server] tcp_roles``). The address
and the client's key may add roles. The owner's socket has all roles (docs/adr/0021-roles.md).
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from .errors import InvalidInput, PermissionDenied

ANYONE: Final = "*"  # tenant of clients without a key; a key's name cannot contain this character


class Role(enum.StrEnum):
    """Roles, ordered by how much harm they allow."""

    INFER = "infer"  # send requests to models, and list models
    URGENT = "urgent"  # requests and models with priority high
    REGISTER = "register"  # register models, and unregister the client's own
    OPERATE = "operate"  # control the device, jobs, all models and the server
    CODE = "code"  # name code, such as scripts and factories, that runs as the server's user


ALL_ROLES: Final = frozenset(Role)
DEFAULT_ROLES: Final = frozenset({Role.INFER})

URGENT_PRIORITY: Final = "high"  # this priority requires ``urgent``
OWNERS_WAY: Final = (
    "as the server's user connect after it is ready (pipeswitch ping --wait 1m), without "
    "PIPESWITCH_HOST and --host (if it then lists several servers: --host ipc://PATH), or "
)

_NAMES: Final = frozenset({"name", "aliases", "version", "current", "versions", "state"})
MODEL_FACTS: Final = _NAMES | {"inputs", "outputs", "batch", "batching", "dims", "embeds", "steps"}
"""Keys of a model's row that a client with only ``infer`` gets."""


@dataclass(frozen=True, kw_only=True)
class Principal:
    """Identity and roles of a client."""

    tenant: str  # name of its key or token; ANYONE without one; empty for the server's owner
    roles: frozenset[Role] = DEFAULT_ROLES
    has_token: bool = field(default=False, compare=False)  # it calls the gateway, over HTTP or gRPC

    @property
    def is_owner(self) -> bool:
        return not self.tenant and not self.has_token

    @property
    def may_operate(self) -> bool:
        return Role.OPERATE in self.roles

    def visible(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return a model's row without the facts for operators and, over TCP, for its owner."""
        is_own = row.get("tenant") == self.tenant and Role.REGISTER in self.roles
        is_whole = self.may_operate or (is_own and not self.has_token)
        return {key: value for key, value in row.items() if is_whole or key in MODEL_FACTS}

    def require(self, role: Role, what: str) -> None:
        """Raise PermissionDenied if this client lacks a role that ``what`` requires."""
        if role not in self.roles:
            raise self.refusal(role, what)

    def refusal(self, role: Role, what: str) -> PermissionDenied:
        """Return the error that names the missing role, the client and the command to grant it."""
        roles = in_order({*self.roles, role})
        if self.has_token:
            is_anyone = self.tenant == ANYONE
            who = "a caller without a known token" if is_anyone else f'token "{self.tenant}"'
            hint = f"a line of the file of [gateway] tokens: NAME TOKEN {','.join(roles)}"
        elif self.tenant == ANYONE:
            who = "a TCP client without a key"
            hint = f"{OWNERS_WAY}start it with --tcp-roles {','.join(roles)}"
        else:
            who = f'key "{self.tenant}"'
            options = " ".join(f"--role {one}" for one in roles)
            hint = f"{OWNERS_WAY}on its machine: pipeswitch keys roles {self.tenant} {options}"
        has = ", ".join(in_order(self.roles)) or "none"
        return PermissionDenied(
            f'{what} needs the role "{role}", and {who} has {has}',
            hint=hint,
            role=role.value,
            client=self.tenant,
        )


class CallerRegistry:
    """Callers by their proof, a token's digest or a key. All have the roles of the address."""

    def __init__(self, roles: Iterable[Role], *, has_token: bool = False) -> None:
        self.anyone = Principal(tenant=ANYONE, roles=frozenset(roles), has_token=has_token)
        self.known: Mapping[bytes, Principal] = {}

    def learn(self, own: Mapping[bytes, Principal]) -> None:
        """Replace all callers; ``own`` has their own roles."""
        anyone = self.anyone
        self.known = {
            proof: replace(anyone, tenant=one.tenant, roles=one.roles | anyone.roles)
            for proof, one in own.items()
        }


OWNER: Final = Principal(tenant="", roles=ALL_ROLES)


def parse_roles(names: Iterable[str]) -> frozenset[Role]:
    """Return the roles with these names; each role implies ``infer``.

    Raises:
        InvalidInput: a name is not a role.
    """
    try:
        return DEFAULT_ROLES.union(Role(name) for name in names)
    except ValueError as error:
        raise InvalidInput(f"{error}: roles are {', '.join(Role)}") from None


def address_roles(names: Sequence[str]) -> frozenset[Role]:
    """Return the roles that an address gives to everyone; an empty list gives no roles."""
    return parse_roles(names) if names else frozenset()


def in_order(roles: Iterable[Role]) -> list[str]:
    """Return the names of the roles, in the order of ``Role``."""
    roles_set = set(roles)
    return [role.value for role in Role if role in roles_set]
