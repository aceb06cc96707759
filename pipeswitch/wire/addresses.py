"""Addresses of servers: their default, their form, and whether a server listens there."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import socket
import stat
from collections.abc import Mapping
from pathlib import Path

from ..base.config import DEFAULT_LISTEN, default_runtime_dir
from ..base.errors import ConfigError, ServerUnavailable
from ..base.extras import SCHEMES
from .private import check_private

_SCHEMES = sorted({"tcp", *SCHEMES.names()})
_PLACE = r"(?:auto|([^:/\s\[\]]+|\[[^\]\s]+\]):([0-9]{1,5}))"
_ADDRESS = re.compile(rf"ipc://.+|(?:{'|'.join(_SCHEMES)})://{_PLACE}")
MAX_PORT = 65535
HINT = "HOST, HOST:PORT, ipc://PATH, " + ", ".join(f"{one}://HOST:PORT" for one in _SCHEMES)


def default_address(environ: Mapping[str, str]) -> str:
    """Return the address of the server to use by default: the first of these that exists.

    1. ``PIPESWITCH_HOST``, completed by ``full_address``;
    2. the owner's ipc socket of the default port, if a server listens on it;
    3. the owner's only ipc socket on which a server listens;
    4. ``tcp://127.0.0.1:5555``.

    Raises:
        ConfigError: ``PIPESWITCH_HOST`` is not an address; several servers run; or the folder of
            the sockets belongs to another user or is open to others, who could listen there.
    """
    named = environ.get("PIPESWITCH_HOST", "").strip()
    if named:
        return full_address(named)
    directory = default_runtime_dir(environ)
    if os.path.lexists(directory):
        check_private(directory, "XDG_RUNTIME_DIR or PIPESWITCH_HOST", stat.S_IFDIR)
    port = DEFAULT_LISTEN.rpartition(":")[2]
    if is_live(directory / f"{port}.sock"):
        return f"ipc://{directory / f'{port}.sock'}"
    live = [path for path in sorted(directory.glob("*.sock")) if is_live(path)]
    if len(live) > 1:
        text = f"{len(live)} servers run here: {', '.join(f'ipc://{path}' for path in live)}"
        raise ConfigError(text, hint="choose one: --host ADDRESS, or PIPESWITCH_HOST")
    return f"ipc://{live[0]}" if live else DEFAULT_LISTEN


def full_address(named: str) -> str:
    """Complete an address that a user typed: the default scheme is tcp, the default port 5555.

    >>> [full_address(text) for text in ("gpu1", "[::1]:6000", "::1", "ipc:///run/a.sock")]
    ['tcp://gpu1:5555', 'tcp://[::1]:6000', 'tcp://[::1]:5555', 'ipc:///run/a.sock']

    Raises:
        ConfigError: the text is not an address.
    """
    typed = "cluster://auto" if named == "cluster" else named  # this machine's
    scheme, _, rest = (typed if "://" in typed else f"tcp://{typed}").partition("://")
    if scheme == "tcp":
        if rest.count(":") > 1 and not rest.startswith("["):
            rest = f"[{rest}]"  # a bare IPv6 address
        has_port = re.search(r":[^:\]]*$", rest)
        rest = rest if has_port else f"{rest}:{DEFAULT_LISTEN.rpartition(':')[2]}"
    address = f"{scheme}://{rest}"
    parts = _ADDRESS.fullmatch(address)
    if parts is None or int(parts[2] or 0) > MAX_PORT:
        raise ConfigError(f"{named!r} is not an address of a server", hint=HINT)
    return address


def is_live(path: Path) -> bool:
    """Return True if a server listens on this unix socket. Blocks for up to 1 s."""
    if not path.is_socket():
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True


def is_refused(address: str) -> bool:
    """Return True if it is certain that no server listens at an address. Blocks for up to 1 s.

    Raises:
        ConfigError: the host name is unknown.
    """
    scheme, _, rest = address.partition("://")
    if scheme == "ipc":
        return not is_live(Path(rest))
    if scheme != "tcp":
        return False  # an extra's connection has been made already
    host, _, port = rest.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=0.2):
            return False
    except ConnectionRefusedError:
        return True
    except (socket.gaierror, UnicodeError) as error:
        raise ConfigError(f"there is no machine {host!r}: {error.args[-1]}", hint=HINT) from None
    except (OSError, ValueError):
        return False  # the client's own connection reports the problem


def no_server(address: str, other: str = "") -> ServerUnavailable:
    """Return the error for an address at which no server answers; ``other`` extends its hint."""
    is_usual = address == DEFAULT_LISTEN or not address.startswith("tcp://")
    command = "pipeswitch serve" if is_usual else f"pipeswitch serve --listen {address}"
    return ServerUnavailable(f"no server answers at {address}", hint=f"start one: {command}{other}")


def parse_listen(listen: str) -> tuple[str, int]:
    """Return the host and the port of ``tcp://host:port``; port ``*`` becomes 0, any free port.

    Raises:
        ConfigError: ``listen`` does not have this form.
    """
    scheme, _, rest = listen.partition("://")
    host, _, port = rest.rpartition(":")
    host = host.strip("[]")
    if scheme != "tcp" or not host or not (port == "*" or (port.isdigit() and int(port) < 65535)):
        raise ConfigError(f"listen = {listen!r} is not of the form tcp://127.0.0.1:5555")
    return host, 0 if port == "*" else int(port)


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach the address."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"
