"""Where clients come in: a TCP address and the owner's sockets.

TCP is a plain stream on loopback; where other machines can reach it, or the owner says so, it is
ZeroMQ, and each client needs a CURVE key that is on the allow-list. What it may do there is said by
the listener and its key. The owner's sockets lie in a folder that is the owner's alone, so what
reaches them is the owner's: that listener gives every role, and asks for no key.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import zmq
from zmq.auth.thread import ThreadAuthenticator

from ..config import ServerConfig
from ..errors import ConfigError, PipeSwitchError
from ..roles import ANYONE, OWNER, Role, Standing, in_order, parse_roles
from ..wire.addresses import is_live, is_loopback, parse_listen
from ..wire.keys import AllowList, KeyFolder, ServerKeys
from ..wire.private import private_directory
from ..wire.sockets import (
    BACKLOG_CONNECTIONS,
    ZAP_DOMAIN,
    Caps,
    make_router,
    require_keys,
    watch_connections,
)
from ..wire.stream import local_path

_logger = logging.getLogger(__name__)

MAX_SOCKET_PATH: Final = 100  # sun_path has 108 bytes, ".local" and the NUL included
ACCEPTED: Final = int(zmq.EVENT_ACCEPTED)
_WATCHED: Final = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED


@dataclass(frozen=True, kw_only=True)
class Listener:
    """An address, and the monitor of libzmq's connections."""

    stream: socket.socket | None = None  # listens; its clients come without libzmq
    router: zmq.Socket[bytes] | None = None
    monitor: zmq.Socket[bytes] | None = None
    address: str
    is_owner: bool  # every client that comes in here is the server's owner
    roles: frozenset[Role]  # of clients without a key
    allowed: AllowList | None = None  # the keys that may come in; None: no key is asked for

    def standing(self, user_id: str) -> Standing:
        """Of the client that proved to have this key; of one that proved none."""
        if self.is_owner:
            return OWNER
        if self.allowed is None:
            return Standing(tenant=ANYONE, roles=self.roles)
        revoked = Standing(tenant="?", roles=frozenset())
        return self.allowed.standings().get(user_id.encode(), revoked)

    @functools.cached_property
    def local(self) -> int | str:
        """The router's own end as its connections name it: TCP port or path."""
        return _local(self.address)


def _local(address: str) -> int | str:
    scheme, _, rest = address.partition("://")
    return int(rest.rpartition(":")[2]) if scheme == "tcp" else rest


@dataclass(frozen=True, kw_only=True)
class Access:
    """What the TCP listeners ask for: the server proves itself, and each client is on a list."""

    keys: ServerKeys
    allowed: AllowList
    warning: str = ""


@dataclass(kw_only=True)
class Listeners:
    """All of the server's client sockets. Made and closed on the frontend's behalf."""

    tcp: Listener
    ipc: Listener
    warnings: tuple[str, ...] = ()  # for who starts the server
    _authenticator: ThreadAuthenticator | None = None
    _paths: list[Path] = field(default_factory=list)

    @property
    def all(self) -> tuple[Listener, Listener]:
        return (self.tcp, self.ipc)

    @property
    def sockets(self) -> list[zmq.Socket[bytes]]:
        """Those of libzmq that can become readable."""
        return [
            sock
            for listener in self.all
            for sock in (listener.router, listener.monitor)
            if sock is not None
        ]

    def close(self) -> None:
        """Close every socket and remove the ipc files."""
        for listener in self.all:
            if listener.stream is not None:
                listener.stream.close()
            if listener.router is not None and listener.monitor is not None:
                listener.router.disable_monitor()
                listener.monitor.close(0)
                listener.router.close(0)
        if self._authenticator is not None:
            self._authenticator.stop()
        for path in self._paths:
            path.unlink(missing_ok=True)


def find_access(config: ServerConfig, host: str) -> Access | None:
    """What clients at this TCP address must prove; None: nothing, only this machine reaches it.

    Raises:
        ConfigError: keys are needed and there is none of the server's, or no client is admitted.
    """
    if config.auth == "auto" and is_loopback(host):
        return None
    path = Path(config.keys_dir or Path(config.state_dir, "keys"))
    folder = KeyFolder(path).open()
    keys = folder.server()
    missing = "the server has no key" if keys is None else "no client is admitted"
    if keys is None or not folder.clients():
        where = f"--keys-dir {path}"
        raise ConfigError(
            f"{config.listen} needs clients' keys"
            + ("" if is_loopback(host) else ", other machines can reach it")
            + f": {missing}",
            hint=f"pipeswitch keys {where} server; then, for each client: "
            f"pipeswitch keys {where} client NAME. Or listen on 127.0.0.1",
        )
    silent = [name for name, admitted in folder.admitted().items() if not admitted.has_roles]
    warning = f"keys without a role have infer alone: {', '.join(silent)}; give them others with: "
    return Access(
        keys=keys,
        allowed=AllowList(folder, parse_roles(config.tcp_roles)),
        warning=f"{warning}pipeswitch keys --keys-dir {path} roles NAME --role register"
        if silent
        else "",
    )


def _warnings(config: ServerConfig, access: Access | None) -> tuple[str, ...]:
    """What was asked for and has no effect, or has another one than before there were roles."""
    found = [access.warning] if access is not None and access.warning else []
    if config.allow_code and access is None and Role.CODE not in config.tcp_roles:
        wanted = ",".join(in_order({*parse_roles(config.tcp_roles), Role.REGISTER, Role.CODE}))
        found.append(
            "--allow-code lets nothing in: TCP clients have not the role code; "
            f"give it to them with: --tcp-roles {wanted}"
        )
    return tuple(found)


def open_listeners(context: zmq.Context[Any], config: ServerConfig) -> Listeners:
    """Bind everything or nothing.

    Raises:
        ConfigError: the address, the folder or the name cannot be used.
        PipeSwitchError: the port, the next one, or the ipc name is in use.
    """
    host, port = parse_listen(config.listen)
    access = find_access(config, host)
    caps = Caps(max_message_bytes=config.max_message_bytes)
    with contextlib.ExitStack() as undo:
        authenticator = None
        if access is not None:  # it must answer before a client can ask
            authenticator = _start_authenticator(context, access)
            undo.callback(authenticator.stop)
        ipc = make_router(context, caps)
        undo.callback(ipc.close, 0)
        tcp, port = _bind_tcp(context, caps, host, port, access)
        undo.callback(tcp.close)
        path = _bind_ipc(config, ipc, port)
        local = local_path(str(path))
        stream = _unix(local)
        undo.pop_all()
    shown = f"[{host}]" if ":" in host else host
    return Listeners(
        tcp=_listener(
            tcp if isinstance(tcp, zmq.Socket) else None,
            f"tcp://{shown}:{port}",
            stream=tcp if isinstance(tcp, socket.socket) else None,
            is_owner=False,
            roles=parse_roles(config.tcp_roles),
            allowed=access.allowed if access is not None else None,
        ),
        ipc=_listener(
            ipc,
            f"ipc://{path}",
            stream=stream,
            is_owner=True,
            roles=OWNER.roles,
        ),
        warnings=_warnings(config, access),
        _authenticator=authenticator,
        _paths=[path, local],
    )


def _listener(
    router: zmq.Socket[bytes] | None,
    address: str,
    *,
    stream: socket.socket | None,
    is_owner: bool,
    roles: frozenset[Role],
    allowed: AllowList | None = None,
) -> Listener:
    return Listener(
        stream=stream,
        router=router,
        monitor=watch_connections(router, _WATCHED) if router is not None else None,
        address=address,
        is_owner=is_owner,
        roles=roles,
        allowed=allowed,
    )


def _start_authenticator(context: zmq.Context[Any], access: Access) -> ThreadAuthenticator:
    authenticator = ThreadAuthenticator(context, log=logging.getLogger(f"{__name__}.zap"))
    authenticator.configure_curve_callback(ZAP_DOMAIN, access.allowed)
    authenticator.start()
    return authenticator


def _bind_tcp(
    context: zmq.Context[Any], caps: Caps, host: str, port: int, access: Access | None
) -> tuple[socket.socket | zmq.Socket[bytes], int]:
    """What listens, and the port."""
    address = f"tcp://{f'[{host}]' if ':' in host else host}:{port or '*'}"
    try:
        if access is None:
            return _stream(host, port)
        return _router(context, caps, host, address, access)
    except (OSError, zmq.ZMQError) as error:
        raise _bind_failed(address, error) from None


def _stream(host: str, port: int) -> tuple[socket.socket, int]:
    """Listens; raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    address = ("" if host == "*" else host, port)
    sock = socket.create_server(address, family=family, backlog=BACKLOG_CONNECTIONS)
    sock.setblocking(False)
    return sock, sock.getsockname()[1]


def _unix(path: Path) -> socket.socket:
    """The same, at a path that no server has; a dead one's file is removed.

    Raises:
        PipeSwitchError: another server listens there, or it cannot be bound.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if is_live(path):
            raise PipeSwitchError(f"{path} is in use", hint="another server has it")
        path.unlink(missing_ok=True)
        sock.setblocking(False)
        sock.bind(str(path))
        sock.listen(BACKLOG_CONNECTIONS)
    except OSError as error:
        sock.close()
        raise PipeSwitchError(f"cannot listen on {path}: {error.strerror}") from None
    except PipeSwitchError:
        sock.close()
        raise
    return sock


def _router(
    context: zmq.Context[Any], caps: Caps, host: str, address: str, access: Access
) -> tuple[zmq.Socket[bytes], int]:
    """The same of libzmq's, where keys are asked for; raises zmq.ZMQError."""
    router = make_router(context, caps)
    router.setsockopt(zmq.IPV6, int(":" in host))
    require_keys(router, access.keys)
    try:
        router.bind(address)
    except zmq.ZMQError:
        router.close(0)
        raise
    return router, int(router.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])


def _bind_failed(address: str, error: OSError | zmq.ZMQError) -> PipeSwitchError:
    if error.errno == errno.EADDRINUSE:
        return PipeSwitchError(
            f"{address} is in use",
            hint="stop the other server (pipeswitch stop) or choose --listen tcp://127.0.0.1:6555",
        )
    return ConfigError(f"cannot listen on {address}: {error.strerror}")


def _bind_ipc(config: ServerConfig, router: zmq.Socket[bytes], port: int) -> Path:
    """Bind ``<name>.sock``; a dead server's file is removed."""
    directory = private_directory(Path(config.runtime_dir), "[server] runtime_dir")
    path = directory / f"{config.name or port}.sock"
    if len(str(path).encode()) > MAX_SOCKET_PATH:
        raise ConfigError(
            f"{path} is too long for a socket ({MAX_SOCKET_PATH} bytes)",
            hint="set [server] runtime_dir to a shorter folder",
        )
    if path.exists():
        if is_live(path):
            raise PipeSwitchError(f"{path} is in use", hint="another server has that name")
        _logger.info("socket=%s removed cause=dead_server", path)
        path.unlink()
    try:
        router.bind(f"ipc://{path}")
    except zmq.ZMQError as error:
        raise _bind_failed(f"ipc://{path}", error) from None
    return path
