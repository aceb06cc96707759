"""Callers over HTTP or gRPC and their roles (docs/adr/0021-roles.md).

The gateway itself connects to the owner's socket, which permits everything, so roles are enforced
here. A caller has the roles of the address, and the roles that its bearer token adds.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Final

from ...base.roles import OWNER, CallerRegistry, Principal, Role
from ..http.http_errors import Unauthenticated, WrongHost

NO_KEYS: Final = ("", "EMPTY")  # what clients send as the key if they have none


class Authenticator:
    """The known tokens, and the roles of a caller without a token."""

    def __init__(
        self,
        *,
        roles: Iterable[Role],
        tokens: Mapping[str, Principal],
        needs_token: bool,
        hosts: frozenset[str] | None,
        origins: frozenset[str] = frozenset(),
        owner_token: str = "",
    ) -> None:
        """Set the roles, the tokens and the sites.

        Args:
            roles: roles that every caller has.
            tokens: each token's principal.
            needs_token: refuse callers without a token.
            hosts: names that ``Host`` may have; None: any.
            origins: other sites whose pages may send requests.
            owner_token: token of the server's owner, in addition to ``tokens``.
        """
        self._callers = CallerRegistry(roles, has_token=True)
        self._needs_token = needs_token
        no_roles = replace(self._callers.anyone, roles=frozenset())
        self.probe = no_roles if needs_token else self._callers.anyone  # it never has a token
        self._hosts = hosts
        self.origins = origins
        self._owner = {owner_token: OWNER} if owner_token else {}
        self.learn(tokens)

    def learn(self, tokens: Mapping[str, Principal]) -> None:
        """Replace all tokens but the owner's."""
        # Digests: the time of comparing them reveals nothing about a token, not even its length.
        self._callers.learn(
            {_digest(token): one for token, one in {**tokens, **self._owner}.items()}
        )

    def principal(self, authorization: str) -> Principal:
        """Return the caller of an ``Authorization`` header; empty: an anonymous caller.

        Where callers without a token have roles, an unknown token is that of an anonymous caller.

        Raises:
            Unauthenticated: a token is required and missing or unknown.
        """
        scheme, _, key = authorization.partition(" ")
        is_bearer = scheme.lower() == "bearer"
        if is_bearer and key.strip() not in NO_KEYS:
            digest_given, match = _digest(key.strip()), None
            # Compare all, so that the time reveals nothing.
            for digest, principal in self._callers.known.items():
                if hmac.compare_digest(digest, digest_given):
                    match = principal
            if match is not None:
                return match
        elif is_bearer or not scheme:
            if self._needs_token:
                raise Unauthenticated(
                    "this address needs a token", hint="Authorization: Bearer TOKEN"
                )
            return self._callers.anyone
        if self._needs_token or not self._callers.anyone.roles:
            raise Unauthenticated(
                "unknown token", hint="the file of [gateway] tokens has the valid ones"
            )
        return self._callers.anyone  # many clients send a placeholder to a server that needs none

    def check_host(self, host: str) -> None:
        """Refuse an unknown ``Host``: a page of another site cannot forge this header.

        Raises:
            WrongHost: ``Host`` is not a name of this address.
        """
        name = re.sub(":[0-9]+$", "", host.lower())
        if self._hosts is not None and name not in self._hosts:
            raise WrongHost(
                f"the name of this server is not {host[:80]!r}",
                hint=f"use {', '.join(sorted(self._hosts))}",
            )


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()
