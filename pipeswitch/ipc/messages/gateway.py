"""Settings with which the controller starts a gateway."""

from __future__ import annotations

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
    http: bool
    max_body_bytes: int
    max_connections: int
    grpc: str = ""  # host:port to listen on
    hosts: tuple[str, ...] = ()  # allowed host names of requests; empty: any
    origins: tuple[str, ...] = ()  # other sites whose pages may send requests
    roles: tuple[str, ...] = ()  # roles of every caller; a token may add roles
    tokens: str = ""  # path of the callers' tokens
    owner_token: str = ""  # path of the owner's token
    allow_code: tuple[str, ...] = ()
    needs_token: bool = False
    nv_metrics: bool = False
    text_processes: int = 8
    aliases: tuple[str, ...] = ()  # each is ALIAS=MODEL
    tls_cert: str = ""  # path of a PEM file
    tls_key: str = ""  # path of a PEM file
    cluster: str = ""  # path of a cluster's table; empty: no cluster
    keyed: KeyedSettings | None = None
