"""Settings with which the controller starts a gateway."""

from __future__ import annotations

from .base import Message


class KeyedSettings(Message, frozen=True):
    """inside GatewaySettings: where clients with keys come in."""

    address: str  # that its socket has
    keys_dir: str
    roles: tuple[str, ...]  # of every key
    max_message_bytes: int
    max_connections: int
    client_bytes: int  # held of one client's unfinished messages; twice as much of all


class GatewaySettings(Message, frozen=True):
    """Settings of a gateway process.

    Descriptors: the lock that keeps two gateways out of one state directory; the sockets of
    ``http`` and ``keyed`` if these are set.
    """

    address: str  # of the owner's socket
    http: bool
    max_body_bytes: int
    max_connections: int
    grpc: str = ""  # host:port to listen on
    hosts: tuple[str, ...] = ()  # names it may be asked under; none: any
    origins: tuple[str, ...] = ()  # other sites whose pages may ask
    roles: tuple[str, ...] = ()  # of every caller
    tokens: str = ""  # file
    owner_token: str = ""  # file
    allow_code: tuple[str, ...] = ()
    needs_token: bool = False
    nv_metrics: bool = False
    text_processes: int = 8
    aliases: tuple[str, ...] = ()  # ALIAS=MODEL
    tls_cert: str = ""  # file
    tls_key: str = ""  # file
    cluster: str = ""  # file of a cluster's table; empty: the server is alone
    keyed: KeyedSettings | None = None
