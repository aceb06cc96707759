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

    INFER = "infer"  # ask models, and list what can be asked
    URGENT = "urgent"  # ask with priority high, before others' requests; or register such models
    REGISTER = "register"  # bring models, and take one's own away
    OPERATE = "operate"  # the device, the jobs, everybody's models, the server's end
    CODE = "code"  # name code that runs as the server's user: scripts and factories


ALL_ROLES: Final = frozenset(Role)
LEAST: Final = frozenset({Role.INFER})

URGENT_PRIORITY: Final = "high"  # what ``urgent`` is for

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
    roles: frozenset[Role] = LEAST

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
        wanted = in_order({*self.roles, role})
        if self.tenant == ANYONE:
            who = "a TCP client without a key"
            hint = f"start it with --tcp-roles {','.join(wanted)}"
        else:
            who = f'key "{self.tenant}"'
            options = " ".join(f"--role {one}" for one in wanted)
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
    """Roles by their names; ``infer`` comes with any.

    Raises:
        InvalidInput: one is no role.
    """
    try:
        return LEAST.union(Role(name) for name in names)
    except ValueError as error:
        raise InvalidInput(f"{error}: roles are {', '.join(Role)}") from None


def address_roles(names: Sequence[str]) -> frozenset[Role]:
    """Return the roles that an address gives to everybody; none of none, not even ``infer``."""
    return parse_roles(names) if names else frozenset()


def in_order(roles: Iterable[Role]) -> list[str]:
    """Their names, as they are listed everywhere."""
    found = set(roles)
    return [role.value for role in Role if role in found]
