"""The controller's part of the gateway: binds its sockets, starts its process, and restarts it.

The controller binds the sockets, so that it detects a port in use before it starts any process.
Connections that arrive while the gateway is dead wait until it runs again. After a server's death
its gateway may still answer callers (503); the next server of the state directory ends it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import importlib.util
import logging
import os
import select
import selectors
import signal
import socket
import ssl
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ..base.config import GatewayConfig
from ..base.errors import ConfigError, PipeSwitchError
from ..base.extras import SERVERS
from ..base.plain_files import open_plain
from ..ipc.channel import Channel, channel_pair
from ..ipc.messages.gateway import GatewaySettings, KeyedSettings
from ..wire.addresses import is_loopback
from ..wire.tokens import OWNER_FILE, owner_token, read_tokens
from .processes import open_log

log = logging.getLogger(__name__)

DEFAULTS: Final = {"http": "127.0.0.1:8000", "grpc": "127.0.0.1:8001"}
NEEDS: Final = {
    "http": ("httptools", "prometheus_client"),
    "grpc": ("grpc", "google.protobuf"),
}  # protocol -> the modules that it needs
BACKLOG: Final = 512
LIVED_BACKOFFS: Final = 5.0  # a gateway that lived this many backoffs is restarted at once
MAX_AGAIN_S: Final = 60.0  # maximum pause before a restart; it doubles after each early death
FORMER_WAIT_S: Final = 5.0
STOP_WAIT_S: Final = 3.0
LOCK_FILE: Final = "gateway.lock"


def command(descriptor: int) -> list[str]:
    """Return the command line of a gateway; ``-P`` keeps the current folder off its path."""
    return [sys.executable, "-P", "-m", "pipeswitch.gateway.main", str(descriptor)]


@dataclass(frozen=True)
class Keyed:
    """Listening socket for clients with keys: the controller opens it, the gateway accepts."""

    sock: socket.socket
    settings: KeyedSettings


class Gateway:
    """Owner of the gateway process, if there is one; used by the controller's loop only."""

    def __init__(
        self,
        config: GatewayConfig,
        selector: selectors.BaseSelector,
        root: Path,
        log_path: Path,
        allow_code: tuple[str, ...] = (),
        backoff_s: float = 1.0,
    ) -> None:
        """``backoff_s``: the first pause before a gateway that died early is started again."""
        self._config = config
        self._backoff_s = backoff_s
        self._allow_code = allow_code
        self._selector = selector
        self._root = root
        self._log_path = log_path
        self._sockets: dict[str, socket.socket] = {}  # by protocol
        self._unnamed: list[str] = []  # protocols that are off because only the other one was named
        self._keyed: Keyed | None = None  # the socket for clients with keys
        self._lock = -1
        self._server_address = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._pidfd = -1
        self._channel: Channel | None = None  # the gateway reads end of file when we die
        self._started_at_s = 0.0
        self._due_at_s: float | None = None
        self._again_s = backoff_s
        self.warnings: list[str] = []

    # ---- before anything is started ------------------------------------------------------------

    def open(self) -> None:
        """Bind the addresses and take the gateway's lock.

        Raises:
            PipeSwitchError: an address cannot be bound, for example because it is in use.
            ConfigError: modules are missing, a former gateway stays, or ``check_doors`` raises.
        """
        addresses = check_doors(self._config)
        if any(address not in ("auto", "off") for address in addresses.values()):
            self._unnamed = [name for name, address in addresses.items() if address == "auto"]
            addresses |= dict.fromkeys(self._unnamed, "off")  # an address is named: open no default
        is_off = all(address == "off" for address in addresses.values())
        if not is_off:
            owner_token(self._token_path)
        if not is_off or (self._root / LOCK_FILE).exists():  # a former gateway may have our ports
            self._lock = _take_over(self._root / LOCK_FILE)
        for name, address in addresses.items():
            if address != "off":
                self._bind(name, address)

    def serve_keyed(self, keyed: Keyed) -> None:
        """Make the gateway also accept clients with keys, on this socket."""
        self._keyed = keyed
        if self._lock < 0:
            self._lock = _take_over(self._root / LOCK_FILE)

    @property
    def _token_path(self) -> Path:
        return self._root / OWNER_FILE

    @property
    def facts(self) -> dict[str, str]:
        """The HTTP address and the token file, for the server's owner; empty without HTTP."""
        if "http" not in self._sockets:
            return {}
        return {"http": self.addresses[0], "token_file": str(self._token_path)}

    def _bind(self, name: str, address: str) -> None:
        """Bind a protocol's address. A default may become another port, or only a warning."""
        is_default = address == "auto"
        host, port = _parsed(DEFAULTS[name] if is_default else address)
        lacks = [module for module in NEEDS[name] if not _is_installed(module)]
        if name not in ("http", *SERVERS.names()):
            lacks.append(f"the extra {name}")
        if lacks and not is_default:
            raise ConfigError(
                f"[gateway] {name} needs {' and '.join(lacks)}, not installed here",
                hint="pip install 'pipeswitch[grpc]'",
            )
        if lacks:
            return
        opened = _listening if name == "http" else _held
        try:
            try:
                self._sockets[name] = opened(host, port)
            except OSError as error:
                if not is_default or error.errno != errno.EADDRINUSE:
                    raise
                self._sockets[name] = opened(host, 0)  # any free port; the ready line shows it
        except OSError as error:
            why = os.strerror(error.errno or 0)  # the error's own text repeats the address
            problem = f"{name}: cannot listen on {host}:{port}: {why}"
            if not is_default:
                hint = f"choose another --{name}, or --no-http"
                raise PipeSwitchError(problem, hint=hint) from None
            self.warnings.append(f"{problem}; without it (--{name} HOST:PORT, or --no-http)")

    @property
    def addresses(self) -> list[str]:
        """The addresses, as the ready line shows them."""
        scheme = "https" if self._config.tls_cert else "http"
        schemes = {"http": scheme, "grpc": "grpc"}
        texts = [f"{schemes[name]}://{_shown(sock)}" for name, sock in self._sockets.items()]
        return [*texts, *(f"(--{name} HOST:PORT: none)" for name in self._unnamed)]

    # ---- the process ---------------------------------------------------------------------------

    def start(self, server_address: str) -> None:
        """Start the gateway if it has a socket. It connects to ``server_address`` as the owner."""
        self._server_address = server_address
        if self._sockets or self._keyed is not None:
            self._spawn()

    def wait_s(self) -> float | None:
        """Return the seconds until ``look`` must be called; None if no start is due."""
        return None if self._due_at_s is None else max(0.0, self._due_at_s - time.monotonic())

    def look(self) -> None:
        """Start the next gateway process if its start is due."""
        if self._due_at_s is not None and time.monotonic() >= self._due_at_s:
            self._spawn()

    def _spawn(self) -> None:
        """Start the next gateway; if the system refuses, try again later."""
        self._due_at_s = None
        self._started_at_s = time.monotonic()
        with contextlib.ExitStack() as undo:
            try:
                ours, theirs = channel_pair()
                undo.callback(ours.close)
                with contextlib.closing(theirs), open_log(self._log_path) as log_file:
                    process = subprocess.Popen(
                        command(theirs.fileno()),
                        pass_fds=(theirs.fileno(),),
                        stdin=subprocess.DEVNULL,
                        stdout=log_file,
                        stderr=log_file,
                        start_new_session=True,  # a Ctrl-C then reaches the controller only
                    )
                undo.callback(process.wait)
                undo.callback(process.kill)
                self._pidfd = os.pidfd_open(process.pid)
            except OSError as error:
                log.error("gateway=not_started: %s", error)
                self._try_again()
                return
            undo.pop_all()
        self._process, self._channel = process, ours
        self._selector.register(self._pidfd, selectors.EVENT_READ, self._exited)
        with contextlib.suppress(OSError):  # full disk: the next server cannot end this gateway
            os.ftruncate(self._lock, 0)
            os.pwrite(self._lock, str(process.pid).encode(), 0)
        sockets = [self._sockets.get("http"), None if self._keyed is None else self._keyed.sock]
        numbers = [one.fileno() for one in sockets if one is not None]
        try:
            ours.send(self._settings(), [self._lock, *numbers])
        except BrokenPipeError:
            pass  # the gateway has died; its exit follows
        except OSError as error:  # no memory, or too many descriptors in flight
            log.error("gateway=killed: it cannot be sent its settings: %s", error)
            process.kill()
        log.info("gateway=started pid=%d %s", process.pid, " ".join(self.addresses))

    def _settings(self) -> GatewaySettings:
        config = self._config
        hosts = [sock.getsockname()[0] for sock in self._sockets.values()]
        is_local = all(is_loopback(host) for host in hosts) and not config.behind_proxy
        grpc = self._sockets.get("grpc")
        names = ("127.0.0.1", "localhost", "[::1]", *hosts)
        return GatewaySettings(
            address=self._server_address,
            config=config,
            http="http" in self._sockets,
            grpc=_shown(grpc) if grpc is not None else "",
            hosts=names if is_local else (),
            owner_token=str(self._token_path),
            allow_code=self._allow_code,
            needs_token=not is_local,
            keyed=None if self._keyed is None else self._keyed.settings,
        )

    def _exited(self) -> None:
        status = self._reap()
        lived_s = time.monotonic() - self._started_at_s
        log.error("gateway=lost status=%d lived_s=%.1f", status, lived_s)
        if lived_s >= LIVED_BACKOFFS * self._backoff_s:
            self._again_s, self._due_at_s = self._backoff_s, time.monotonic()
        else:
            self._try_again()

    def _try_again(self) -> None:
        self._due_at_s = time.monotonic() + self._again_s
        self._again_s = min(2 * self._again_s, MAX_AGAIN_S)

    def _reap(self) -> int:
        self._selector.unregister(self._pidfd)
        os.close(self._pidfd)
        self._pidfd = -1
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        return self._process.wait() if self._process is not None else 0

    def stop(self) -> None:
        """End the gateway, which may answer for ``STOP_WAIT_S`` more; release the addresses."""
        self._due_at_s = None
        if self._pidfd >= 0 and self._process is not None:
            self._process.terminate()
            if not select.select([self._pidfd], [], [], STOP_WAIT_S)[0]:
                self._process.kill()
            self._reap()
        for sock in self._sockets.values():
            sock.close()
        self._sockets.clear()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the parent package is not installed
        return False


def _parsed(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), 0 if port == "*" else int(port)


def _shown(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def check_doors(config: GatewayConfig) -> dict[str, str]:
    """Check the gateway's settings; return each protocol's address, or ``auto`` or ``off``.

    1. If an address is not loopback, callers need tokens, and TLS or a proxy that terminates TLS.
    2. Behind a proxy callers need tokens. 3. Files of tokens and certificates must be valid.

    Raises:
        ConfigError: the settings break one of these rules.
    """
    wanted_addresses = {name: getattr(config, name) for name in DEFAULTS}
    addresses = [one for one in wanted_addresses.values() if one not in ("auto", "off")]
    if all(one == "off" for one in wanted_addresses.values()):
        return wanted_addresses
    is_open = not all(is_loopback(_parsed(address)[0]) for address in addresses)
    if (is_open or config.behind_proxy) and not config.tokens:
        raise ConfigError(
            "[gateway] callers from other machines need tokens, but none are configured",
            hint="--gateway-tokens FILE with lines of NAME TOKEN ROLE,ROLE; or 127.0.0.1",
        )
    if is_open and not config.tls_cert and not config.behind_proxy:
        raise ConfigError(
            "[gateway] tokens would be sent unencrypted",
            hint="set tls_cert and tls_key, or behind_proxy = true if a proxy terminates TLS",
        )
    if config.tokens:
        read_tokens(Path(config.tokens))
    if bool(config.tls_cert) != bool(config.tls_key):
        raise ConfigError("[gateway] tls_cert and tls_key need each other")
    if config.tls_cert:
        try:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(config.tls_cert, config.tls_key)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                f"[gateway] {config.tls_cert} and {config.tls_key}: {error}",
                hint="both are PEM files: openssl x509 -in CERT, openssl pkey -in KEY",
            ) from None
    return wanted_addresses


def _listening(host: str, port: int) -> socket.socket:
    return socket.create_server((host, port), family=_family(host), backlog=BACKLOG)


def _held(host: str, port: int) -> socket.socket:
    """Reserve a port without listening; in the gateway, gRPC's library binds it again."""
    with socket.create_server((host, port), family=_family(host)) as probe:
        address = probe.getsockname()[:2]
    sock = socket.socket(_family(host), socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind(address)
    except OSError:
        sock.close()
        raise
    return sock


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _take_over(path: Path) -> int:
    """Return a descriptor that holds the lock of this state directory's gateway. End a gateway of
    an earlier server if it has the lock, which may block for ``2 * FORMER_WAIT_S``.
    Raises ConfigError: the lock file cannot be opened, or the earlier gateway does not exit."""
    try:
        descriptor = open_plain(path, os.O_RDWR | os.O_CREAT)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}", hint="remove it") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        _dismiss(os.pread(descriptor, 32, 0).decode("ascii", "replace").strip())
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise ConfigError(
                f"a gateway of an earlier server still holds {path}", hint="end it, or --no-http"
            ) from None
    return descriptor


def _dismiss(pid: str) -> None:
    """End the gateway of a dead server. ``pid`` is from the lock file, which its server wrote."""
    with contextlib.suppress(ProcessLookupError, ValueError):
        former = os.pidfd_open(int(pid))
        try:
            signal.pidfd_send_signal(former, signal.SIGTERM)
            if not select.select([former], [], [], FORMER_WAIT_S)[0]:
                signal.pidfd_send_signal(former, signal.SIGKILL)
                select.select([former], [], [], FORMER_WAIT_S)
        finally:
            os.close(former)
