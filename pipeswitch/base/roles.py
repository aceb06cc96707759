"""Roles of clients: five sets of rights. ``frontend/verbs.py`` says which one a verb needs.

Every client has ``infer``, unless its address (``[server] tcp_roles``) gives none. The address and
the client's key (``pipeswitch keys``) may add others. The owner's socket has all
(docs/adr/0021-roles.md).
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from .errors import InvalidInput, PermissionDenied

ANYONE: Final = "*"  # the tenant of clients without a key: no key's name has this character


class Role(enum.StrEnum):
    """Roles, in the order of the rights that they give away."""

    INFER = "infer"  # send requests to models, and list models
    URGENT = "urgent"  # requests and models with priority high
    REGISTER = "register"  # register models, and unregister one's own
    OPERATE = "operate"  # control the device, jobs, all models and the server
    CODE = "code"  # name code that runs as the server's user: scripts and factories


ALL_ROLES: Final = frozenset(Role)
DEFAULT_ROLES: Final = frozenset({Role.INFER})

URGENT_PRIORITY: Final = "high"  # priority that needs ``urgent``

MODEL_FACTS: Final = frozenset(
    {
        "name",
        "aliases",
        "version",
        "current",
        "versions",
        "state",
        "inputs",
        "outputs",
        "batch",
        "batching",
        "dims",
        "steps",
    }
)
"""What ``infer`` is told of a model."""


@dataclass(frozen=True, kw_only=True)
class Principal:
    """Identity and roles of a client."""

    tenant: str  # its key's name; ANYONE without a key; empty: the server's owner
    roles: frozenset[Role] = DEFAULT_ROLES

    @property
    def is_owner(self) -> bool:
        return not self.tenant

    @property
    def may_operate(self) -> bool:
        return Role.OPERATE in self.roles

    def require(self, role: Role, what: str) -> None:
        """Raise PermissionDenied if ``what`` needs a role that this client lacks."""
        if role not in self.roles:
            raise self.refusal(role, what)

    def refusal(self, role: Role, what: str) -> PermissionDenied:
        """Return the error that names the missing role, the client, and the granting command."""
        roles = in_order({*self.roles, role})
        if self.tenant == ANYONE:
            who = "a TCP client without a key"
            hint = f"start it with --tcp-roles {','.join(roles)}"
        else:
            who = f'key "{self.tenant}"'
            options = " ".join(f"--role {one}" for one in roles)
            hint = f"on its machine: pipeswitch keys roles {self.tenant} {options}"
        has = ", ".join(in_order(self.roles)) or "none"
        return PermissionDenied(
            f'{what} needs the role "{role}", and {who} has {has}',
            hint="as the server's user connect after it is ready (pipeswitch ping --wait 1m), "
            f"without PIPESWITCH_HOST and --host, or {hint}",
            role=role.value,
            client=self.tenant,
        )


OWNER: Final = Principal(tenant="", roles=ALL_ROLES)


def parse_roles(names: Iterable[str]) -> frozenset[Role]:
    """Return the roles of these names; any role implies ``infer``.

    Raises:
        InvalidInput: a name is not a role.
    """
    try:
        return DEFAULT_ROLES.union(Role(name) for name in names)
    except ValueError as error:
        raise InvalidInput(f"{error}: roles are {', '.join(Role)}") from None


def address_roles(names: Sequence[str]) -> frozenset[Role]:
    """Return the roles that an address gives to everyone; no names give no roles."""
    return parse_roles(names) if names else frozenset()


def in_order(roles: Iterable[Role]) -> list[str]:
    """Return the names in the usual order."""
    roles_set = set(roles)
    return [role.value for role in Role if role in roles_set]
