"""Listeners for clients: a TCP address and the owner's unix socket.

Both are plain streams. The frontend accepts TCP connections on loopback. If other machines can
reach the address, or if the owner configures it, each client needs a CURVE key, and the gateway
accepts instead (``extras/curve``). The unix socket lies in a folder that only the
owner can enter, so its clients are the owner's: they have every role, and need no key.
"""

from __future__ import annotations

import errno
import logging
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ...base.config import ServerConfig
from ...base.errors import ConfigError, PipeSwitchError
from ...base.extras import CHECKS
from ...base.roles import ANYONE, OWNER, Principal, Role, address_roles, in_order, parse_roles
from ...ipc.messages.gateway import KeyedSettings
from ...wire.addresses import is_live, is_loopback, parse_listen
from ...wire.private import private_directory

_logger = logging.getLogger(__name__)

MAX_SOCKET_PATH: Final = 107  # sun_path has 108 bytes, with the NUL
BACKLOG_CONNECTIONS: Final = 512


@dataclass(frozen=True, kw_only=True)
class Listener:
    """Listening socket, and the tenant and roles of its clients."""

    sock: socket.socket
    address: str
    principal: Principal
    needs_keys: bool = False  # the gateway accepts its connections


@dataclass(frozen=True, kw_only=True)
class Listeners:
    """Both listeners of the frontend."""

    tcp: Listener
    ipc: Listener
    warnings: tuple[str, ...] = ()  # to be shown when the server starts

    def keyed(self, config: ServerConfig) -> KeyedSettings | None:
        """Return the gateway's settings if it accepts the TCP connections, else None."""
        if not self.tcp.needs_keys:
            return None
        return KeyedSettings(
            address=self.tcp.address,
            keys_dir=str(_keys_path(config)),
            roles=config.tcp_roles,
            max_message_bytes=config.max_message_bytes,
            max_connections=config.max_connections,
            client_bytes=config.pool_bytes,
        )

    @property
    def ours(self) -> list[Listener]:
        """Listeners at which the frontend accepts."""
        return [one for one in (self.tcp, self.ipc) if not one.needs_keys]

    def close(self) -> None:
        """Close both listeners, and remove the unix socket's file."""
        self.tcp.sock.close()
        self.ipc.sock.close()
        Path(self.ipc.address.removeprefix("ipc://")).unlink(missing_ok=True)


def _keys_path(config: ServerConfig) -> Path:
    return Path(config.keys_dir or Path(config.state_dir, "keys"))


def check_access(config: ServerConfig, host: str) -> tuple[bool, list[str]]:
    """Return whether clients at this TCP address must prove a key, and warnings for the owner.

    Raises:
        ConfigError: keys are needed, but the server has none.
    """
    if config.auth == "auto" and is_loopback(host):
        if not config.allow_code or Role.CODE in config.tcp_roles:
            return False, []
        roles = ",".join(in_order({*parse_roles(config.tcp_roles), Role.REGISTER, Role.CODE}))
        return False, [
            "--allow-code lets nothing in: TCP clients have not the role code; "
            f"give it to them with: --tcp-roles {roles}"
        ]
    warnings: list[str] = CHECKS.load("keys")(config, host, _keys_path(config))
    return True, warnings


def open_listeners(config: ServerConfig) -> Listeners:
    """Bind both listeners, or none.

    Raises:
        ConfigError: the address, the folder or the name cannot be used.
        PipeSwitchError: the port or the name is in use.
    """
    host, port = parse_listen(config.listen)
    needs_keys, warnings = check_access(config, host)
    shown = f"[{host}]" if ":" in host else host
    address = f"tcp://{shown}:{port or '*'}"
    try:
        tcp = socket.create_server(
            ("" if host == "*" else host, port),
            family=socket.AF_INET6 if ":" in host else socket.AF_INET,
            backlog=BACKLOG_CONNECTIONS,
        )
    except OSError as error:
        raise _bind_failed(address, error) from None
    tcp.setblocking(False)
    port = tcp.getsockname()[1]
    try:
        path = _owners_path(config, port)
        ipc = _bind_unix(path)
    except PipeSwitchError:
        tcp.close()
        raise
    roles = Principal(tenant=ANYONE, roles=address_roles(config.tcp_roles))
    address = f"tcp://{shown}:{port}"
    return Listeners(
        tcp=Listener(sock=tcp, address=address, principal=roles, needs_keys=needs_keys),
        ipc=Listener(sock=ipc, address=f"ipc://{path}", principal=OWNER),
        warnings=tuple(warnings),
    )


def _bind_failed(address: str, error: OSError) -> PipeSwitchError:
    if error.errno == errno.EADDRINUSE:
        return PipeSwitchError(
            f"{address} is in use",
            hint="stop the other server (pipeswitch stop) or choose --listen tcp://127.0.0.1:6555",
        )
    return ConfigError(f"cannot listen on {address}: {error.strerror}")


def _owners_path(config: ServerConfig, port: int) -> Path:
    directory = private_directory(Path(config.runtime_dir), "[server] runtime_dir")
    path = directory / f"{config.name or port}.sock"
    if len(str(path).encode()) > MAX_SOCKET_PATH:
        raise ConfigError(
            f"{path} is too long for a socket ({MAX_SOCKET_PATH} bytes)",
            hint="set [server] runtime_dir to a shorter folder",
        )
    return path


def _bind_unix(path: Path) -> socket.socket:
    """Return a socket that listens at the path; a dead server's file is removed."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.exists():
            if is_live(path):
                raise PipeSwitchError(f"{path} is in use", hint="another server has that name")
            _logger.info("socket=%s removed cause=dead_server", path)
            path.unlink()
        sock.setblocking(False)
        sock.bind(str(path))
        sock.listen(BACKLOG_CONNECTIONS)
    except OSError as error:
        sock.close()
        raise _bind_failed(f"ipc://{path}", error) from None
    except PipeSwitchError:
        sock.close()
        raise
    return sock
