"""Settings with which the controller starts a gateway."""

from __future__ import annotations

from ...base.config import GatewayConfig
from .base import Message


class KeyedSettings(Message, frozen=True):
    """Part of GatewaySettings: the socket for clients with keys, and its limits."""

    address: str  # address of the socket
    keys_dir: str
    roles: tuple[str, ...]  # roles of every client; a key may add roles
    max_message_bytes: int
    max_connections: int
    client_bytes: int  # limit for one client's unfinished messages; all clients get twice as much


class GatewaySettings(Message, frozen=True):
    """Settings of a gateway process.

    Descriptors: the lock that keeps two gateways out of one state directory; the sockets of
    ``http`` and ``keyed`` if these are set.
    """

    address: str  # address of the server's socket for its owner
    config: GatewayConfig  # ``http`` and ``grpc`` below say what is bound
    http: bool
    grpc: str = ""  # host:port to listen on
    hosts: tuple[str, ...] = ()  # allowed host names of requests; empty: any
    owner_token: str = ""  # path of the owner's token
    allow_code: tuple[str, ...] = ()
    needs_token: bool = False
    keyed: KeyedSettings | None = None
