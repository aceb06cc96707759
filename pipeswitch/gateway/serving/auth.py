"""Callers over HTTP or gRPC and their roles (docs/adr/0021-roles.md).

The gateway itself connects to the owner's socket, which permits everything, so roles are enforced
here. A caller has the roles of the address, and the roles that its bearer token adds.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable, Mapping
from typing import ClassVar, Final

from ...base.roles import ANYONE, OWNER, CallerRegistry, Principal, Role
from ..http.http_errors import Unauthenticated, WrongHost

SCHEME: Final = "bearer "
NO_TOKEN: Final = ("", "Bearer EMPTY")  # OpenAI's clients always send a token: EMPTY means none


class Authenticator:
    """The known tokens, and the roles of a caller without a token."""

    PROBE: ClassVar[Principal] = Principal(tenant=ANYONE)  # health probes have no token

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

        Raises:
            Unauthenticated: a token is required, or this one is unknown.
        """
        if authorization in NO_TOKEN:
            if self._needs_token:
                raise Unauthenticated(
                    "this address needs a token", hint="Authorization: Bearer TOKEN"
                )
            return self._callers.anyone
        match = None
        if authorization[: len(SCHEME)].lower() == SCHEME:
            digest_given = _digest(authorization[len(SCHEME) :].strip())
            # Compare all, so that the time reveals nothing.
            for digest, principal in self._callers.known.items():
                if hmac.compare_digest(digest, digest_given):
                    match = principal
        if match is None:
            raise Unauthenticated(
                "unknown token",
                hint="the file of [gateway] tokens has the valid ones"
                if self._needs_token
                else "this address needs no token: give EMPTY as the key; the file of [gateway] "
                "tokens has the valid ones",
            )
        return match

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
