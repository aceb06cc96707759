"""Where clients come in: a TCP address and the owner's ipc socket, each with its event publisher.

TCP is bound on loopback only. The ipc socket lies in a folder that is the owner's alone, so
whoever reaches it is the owner: that door accepts code.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import zmq

from ..addresses import is_live
from ..config import ServerConfig
from ..errors import ConfigError, PipeSwitchError
from ..sockets import Caps, make_publisher, make_router, watch_connections

_logger = logging.getLogger(__name__)

MAX_SOCKET_PATH: Final = 100  # sun_path has 108 bytes, ".events" and the NUL included
PORT_TRIES: Final = 50  # for port 0: the next port must be free too
_WATCHED: Final = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED


@dataclass(frozen=True, kw_only=True)
class Door:
    """One bound ROUTER with the monitor of its connections."""

    router: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]
    address: str
    events_address: str
    is_owner: bool  # whoever comes in here is the server's owner


@dataclass(kw_only=True)
class Doors:
    """All of the server's client sockets. Made and closed on the TCP thread's behalf."""

    tcp: Door
    ipc: Door
    publisher: zmq.Socket[bytes]
    _paths: list[Path] = field(default_factory=list)

    @property
    def all(self) -> tuple[Door, Door]:
        return (self.tcp, self.ipc)

    def close(self) -> None:
        """Close every socket and remove the ipc files."""
        for door in self.all:
            door.router.disable_monitor()
            door.monitor.close(0)
            door.router.close(0)
        self.publisher.close(0)
        for path in self._paths:
            path.unlink(missing_ok=True)


def parse_listen(listen: str) -> tuple[str, int]:
    """Host and port of ``tcp://host:port`` (port ``*`` or 0: any free one).

    Raises:
        ConfigError: not of that form, or not on loopback.
    """
    scheme, _, rest = listen.partition("://")
    host, _, port = rest.rpartition(":")
    host = host.strip("[]")
    if scheme != "tcp" or not host or not (port == "*" or (port.isdigit() and int(port) < 65535)):
        raise ConfigError(f"listen = {listen!r} is not of the form tcp://127.0.0.1:5555")
    try:
        is_loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_loopback = False
    if not is_loopback:
        raise ConfigError(
            f"{listen} can be reached from other machines, and clients are not authenticated yet",
            hint="listen on 127.0.0.1 and tunnel (ssh -L 5555:127.0.0.1:5555 server); "
            "CURVE keys with an allow-list of clients will open this door",
        )
    return host, 0 if port == "*" else int(port)


def private_directory(path: Path) -> Path:
    """Make or accept a folder only its owner can enter.

    Raises:
        ConfigError: it belongs to somebody else, others may enter it, or it is a link.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    facts = path.lstat()
    mode = stat.S_IMODE(facts.st_mode)
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid() or mode & 0o077:
        raise ConfigError(
            f"{path} must be a folder of user {os.getuid()} with mode 0700, "
            f"it belongs to {facts.st_uid} with mode {mode:04o}",
            hint=f"chmod 700 {path}, or set [server] runtime_dir",
        )
    return path


def open_doors(context: zmq.Context[Any], config: ServerConfig) -> Doors:
    """Bind everything or nothing.

    Raises:
        ConfigError: the address, the folder or the name cannot be used.
        PipeSwitchError: the port, the next one, or the ipc name is in use.
    """
    host, port = parse_listen(config.listen)
    caps = Caps(max_message_bytes=config.max_message_bytes)
    with contextlib.ExitStack() as undo:
        tcp, ipc = make_router(context, caps), make_router(context, caps)
        for sock in (tcp, ipc):
            undo.callback(sock.close, 0)
        publisher, port = _bind_tcp(context, tcp, host, port)
        undo.callback(publisher.close, 0)
        paths = _bind_ipc(config, ipc, publisher, port)
        undo.pop_all()
    shown = f"[{host}]" if ":" in host else host
    return Doors(
        tcp=Door(
            router=tcp,
            monitor=watch_connections(tcp, _WATCHED),
            address=f"tcp://{shown}:{port}",
            events_address=f"tcp://{shown}:{port + 1}",
            is_owner=False,
        ),
        ipc=Door(
            router=ipc,
            monitor=watch_connections(ipc, _WATCHED),
            address=f"ipc://{paths[0]}",
            events_address=f"ipc://{paths[1]}",
            is_owner=True,
        ),
        publisher=publisher,
        _paths=paths,
    )


def _bind_tcp(
    context: zmq.Context[Any], router: zmq.Socket[bytes], host: str, port: int
) -> tuple[zmq.Socket[bytes], int]:
    """Bind the router and, on the next port, the publisher; port 0 tries until a pair is free."""
    shown = host
    if ":" in host:
        router.setsockopt(zmq.IPV6, 1)
        shown = f"[{host}]"
    for tries_left in reversed(range(1 if port else PORT_TRIES)):
        publisher = make_publisher(context)
        publisher.setsockopt(zmq.IPV6, int(":" in host))
        address = f"tcp://{shown}:{port or '*'}"
        bound = ""
        try:
            router.bind(address)
            bound = router.getsockopt_string(zmq.LAST_ENDPOINT)
            first = int(bound.rpartition(":")[2])
            address = f"tcp://{shown}:{first + 1}"
            publisher.bind(address)
        except zmq.ZMQError as error:
            publisher.close(0)
            if bound:
                router.unbind(bound)
            if tries_left and error.errno == zmq.EADDRINUSE:
                continue
            raise _bind_failed(address, error) from None
        else:
            return publisher, first
    raise AssertionError("unreachable: the last try raises")


def _bind_failed(address: str, error: zmq.ZMQError) -> PipeSwitchError:
    if error.errno == zmq.EADDRINUSE:
        return PipeSwitchError(
            f"{address} is in use",
            hint="stop the other server (pipeswitch stop) or choose --listen tcp://127.0.0.1:6555; "
            "the port after it is needed too",
        )
    return ConfigError(f"cannot listen on {address}: {error.strerror}")


def _bind_ipc(
    config: ServerConfig, router: zmq.Socket[bytes], publisher: zmq.Socket[bytes], port: int
) -> list[Path]:
    """Bind ``<name>.sock`` and ``<name>.sock.events``; a dead server's files are removed."""
    directory = private_directory(Path(config.runtime_dir))
    path = directory / f"{config.name or port}.sock"
    if len(str(path).encode()) > MAX_SOCKET_PATH:
        raise ConfigError(
            f"{path} is too long for a socket ({MAX_SOCKET_PATH} bytes)",
            hint="set [server] runtime_dir to a shorter folder",
        )
    paths = [path, path.with_name(f"{path.name}.events")]
    for one in paths:
        if one.exists():
            if is_live(one):
                raise PipeSwitchError(f"{one} is in use", hint="another server has that name")
            _logger.info("socket=%s removed cause=dead_server", one)
            one.unlink()
    for sock, one in zip((router, publisher), paths, strict=True):
        try:
            sock.bind(f"ipc://{one}")
        except zmq.ZMQError as error:
            raise _bind_failed(f"ipc://{one}", error) from None
    return paths
