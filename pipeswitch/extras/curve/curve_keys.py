"""CURVE keys: the server's pair, the public keys of admitted clients, and a client's pair.

A folder (0700) has ``server.key_secret``, and for each admitted client a file ``clients/NAME.key``
with its public key and roles. The files are pyzmq certificates. CURVE only proves that a peer *has*
a key; the allow-list decides whether the key is admitted (ZAP). Removing a client's file revokes
its key.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from ...base.config import ServerConfig
from ...base.errors import AlreadyExists, ConfigError, InvalidInput, ModelNotFound
from ...base.plain_files import open_regular, read_plain, write_whole
from ...base.roles import DEFAULT_ROLES, CallerRegistry, Principal, Role, in_order, parse_roles
from ...base.settings import NAME_PATTERN
from ...wire.addresses import is_loopback
from ...wire.private import check_private, check_secret, check_trusted, private_directory

KEY_CHARACTERS: Final = 40  # 32 bytes in Z85
MAX_KEY_BYTES: Final = 64 << 10  # a key's file has comments
_Z85_KEY: Final = re.compile(rb"[0-9a-zA-Z.:+=^!/*?&<>()\[\]{}@%$#-]{40}")
_KEY_LINE: Final = re.compile(rb'^\s*(public|secret)-key\s*=\s*"([^"]*)"', re.MULTILINE)
SETTING: Final = "[server] keys_dir"
SERVER_NAME: Final = "server"
GATEWAY_KEY: Final = "cluster-gateway"  # client name of the gateways of a cluster's other nodes
ROLES_LINE: Final = re.compile(r'^\s*roles = "([a-z ]*)"$', re.MULTILINE)
SETTLED_NS: Final = 100_000_000  # a second change within this time may leave the mtime unchanged


@dataclass(frozen=True)
class ClientKeys:
    """Keys of a client, and the server's key that it expects; Z85 text of 40 bytes each."""

    public: bytes
    secret: bytes = field(repr=False)
    server: bytes


@dataclass(frozen=True, kw_only=True)
class Admitted:
    """Public key and roles of an admitted client."""

    key: bytes
    roles: frozenset[Role] = DEFAULT_ROLES
    has_roles: bool = True  # False: the file is from a release without roles


@dataclass(frozen=True)
class ServerKeys:
    """The server's pair of keys; Z85 text of 40 bytes each."""

    public: bytes
    secret: bytes = field(repr=False)


def read_public(text_or_path: str) -> bytes:
    """Read a public key, given as its 40 characters or as a certificate file.

    Raises:
        InvalidInput: the text is neither.
    """
    if Path(text_or_path).is_file():
        return _read(Path(text_or_path))[0]
    return _checked(text_or_path.encode(), text_or_path)


def client_keys(key: str, server_key: str) -> ClientKeys:
    """Return the keys of a client's secret certificate file and of its server.

    Raises:
        ConfigError: only one of both is given; the file has no secret key, or others may read it.
        InvalidInput: a file or text is not a key.
    """
    if not key or not server_key:
        missing = "its own (.key_secret)" if server_key else "the server's public one"
        raise ConfigError(
            f"a client needs two keys; {missing} is missing",
            hint="key= and server_key=, PIPESWITCH_KEY and PIPESWITCH_SERVER_KEY, "
            "or --key and --server-key",
        )
    public, secret = _read(Path(key))
    if secret is None:
        raise ConfigError(f"{key} has no secret key", hint="name the .key_secret file")
    check_secret(Path(key))
    return ClientKeys(public, secret, read_public(server_key))


def _checked(key: bytes, shown: object) -> bytes:
    if _Z85_KEY.fullmatch(key):
        return key
    text = f"{shown} is neither a key of {KEY_CHARACTERS} characters nor a key file"
    raise InvalidInput(text, hint="pipeswitch keys pair NAME writes NAME.key")


def _read(path: Path) -> tuple[bytes, bytes | None]:
    """Return the public and the secret key of a ``zmq.auth`` certificate; None: no secret key.
    Raises InvalidInput: the file cannot be read, or has no valid key."""
    try:
        with open(path, "rb", opener=open_regular) as file:  # a client's key may be a link
            entries = dict(_KEY_LINE.findall(file.read(MAX_KEY_BYTES)))
    except OSError as error:
        hint = "NAME.key_secret of pipeswitch keys client NAME"
        text = f"{path} cannot be read as a key file: {error.strerror}"
        raise InvalidInput(text, hint=hint) from None
    if b"public" not in entries:
        raise InvalidInput(f"{path} is not a key file: it has no public key")
    secret = entries.get(b"secret")
    return (_checked(entries[b"public"], path), None if secret is None else _checked(secret, path))


class KeyFolder:
    """The server's folder of keys: its own pair, and the admitted clients."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.clients_path = path / "clients"

    def open(self) -> KeyFolder:
        """Create the folders; raise ConfigError if another user can access or change them."""
        private_directory(self.path, SETTING)
        private_directory(self.clients_path, SETTING)
        check_trusted(self.path, SETTING)
        return self

    def make_server(self) -> ServerKeys:
        """Create the server's pair.

        Raises:
            AlreadyExists: the server has a pair, and a new one would lock out all its clients.
        """
        if self._server_file.exists():
            raise AlreadyExists(
                f"{self._server_file} exists, and clients know its public key",
                hint="pipeswitch keys server --show prints it",
            )
        make_pair(SERVER_NAME, self.path)
        pair = self.server()
        if pair is None:
            raise ConfigError(f"{self.path}: the server's new key has disappeared")
        return pair

    def server(self) -> ServerKeys | None:
        """Return the server's pair; None if it was not created yet.

        Raises:
            ConfigError: others may read its file, or the file is damaged.
        """
        if not self._server_file.exists():
            return None
        check_private(self._server_file, SETTING)
        try:
            public, secret = _read(self._server_file)
        except InvalidInput as error:
            raise ConfigError(error.message) from None
        if secret is None:
            raise ConfigError(f"{self._server_file} has no secret key")
        return ServerKeys(public, secret)

    def admit(self, name: str, public: bytes, roles: Iterable[str] = ()) -> None:
        """Admit a client by its public key; ``roles`` replace the client's earlier roles.

        Raises:
            AlreadyExists: the name has another key, or the key has another name.
            InvalidInput: the name is invalid, or a role does not exist.
        """
        _check_name(name)
        for other, key in self.clients().items():
            if other == name and key != public:
                raise AlreadyExists(
                    f"{name} has another key", hint=f"pipeswitch keys revoke {name}"
                )
            if key == public and other != name:
                raise AlreadyExists(f"{other} has this key already")
        named = " ".join(in_order(parse_roles(roles)))
        text = (
            f'# admitted client\nmetadata\n    roles = "{named}"\n'
            f'curve\n    public-key = "{public.decode()}"\n'
        )
        write_whole(self._client_file(name), text.encode())

    def give_roles(self, name: str, roles: Iterable[str]) -> None:
        """Replace the roles of a client that is admitted already.

        Raises:
            ModelNotFound: no client has this name.
            InvalidInput: one of the roles does not exist.
        """
        _check_name(name)
        public = self.clients().get(name)
        if public is None:
            raise _no_client(name)
        self.admit(name, public, roles)

    def revoke(self, name: str) -> None:
        """Remove a client's key, so that it is no longer admitted.

        Raises:
            ModelNotFound: no client has this name.
        """
        _check_name(name)
        try:
            self._client_file(name).unlink()
        except FileNotFoundError:
            raise _no_client(name) from None

    def clients(self) -> dict[str, bytes]:
        """Return the admitted public keys by client name."""
        return {name: admitted.key for name, admitted in self.admitted().items()}

    def admitted(self) -> dict[str, Admitted]:
        """Return the admitted clients by name; ignore files that are not certificates."""
        keys = {}
        with contextlib.suppress(FileNotFoundError):
            for path in sorted(self.clients_path.glob("*.key")):
                with contextlib.suppress(InvalidInput, OSError, UnicodeDecodeError):
                    keys[path.stem] = _read_admitted(path)
        return keys

    @property
    def _server_file(self) -> Path:
        return self.path / f"{SERVER_NAME}.key_secret"

    def _client_file(self, name: str) -> Path:
        return self.clients_path / f"{name}.key"


def _read_admitted(path: Path) -> Admitted:
    """Read the file of one client; ignore unknown roles in it."""
    _check_name(path.stem)
    key = _read(path)[0]
    line = ROLES_LINE.search(read_plain(path, MAX_KEY_BYTES).decode())
    if line is None:
        return Admitted(key=key, has_roles=False)
    return Admitted(key=key, roles=parse_roles(set(line[1].split()) & set(Role)))


def _no_client(name: str) -> ModelNotFound:
    return ModelNotFound(f'no client "{name}"', hint="pipeswitch keys ls")


def _check_name(name: str) -> None:
    if not NAME_PATTERN.fullmatch(name):
        raise InvalidInput(f"{name!r} is not a name: {NAME_PATTERN.pattern}")


def make_pair(name: str, folder: Path) -> tuple[Path, bytes]:
    """Create a pair for a client or the server: ``NAME.key`` and ``NAME.key_secret`` (0600).

    Returns:
        The secret's file and the public key.

    Raises:
        AlreadyExists: one of the files exists.
    """
    from zmq.auth import create_certificates

    _check_name(name)
    targets = [folder / f"{name}.key", folder / f"{name}.key_secret"]
    for path in targets:
        if path.exists():
            raise AlreadyExists(f"{path} exists already and is not overwritten")
    with tempfile.TemporaryDirectory(dir=folder, prefix=".making-") as private:  # 0700
        for path_made, path in zip(create_certificates(private, name), targets, strict=True):
            os.chmod(path_made, 0o600)
            os.rename(path_made, path)
    return targets[1], _read(targets[0])[0]


class AllowList:
    """Admitted clients' keys and roles, read again whenever the folder has changed.

    libzmq's authentication thread uses it at each handshake, and the gateway's loop for connected
    clients.
    """

    def __init__(self, folder: KeyFolder, roles: frozenset[Role] = DEFAULT_ROLES) -> None:
        """``roles``: roles that each client has in addition to its own."""
        self._folder = folder
        self._callers = CallerRegistry(roles)
        self._lock = threading.Lock()
        self._seen: tuple[int, int] | None = None  # the folder's inode and mtime_ns when read

    def callback(self, domain: str, key: bytes) -> bool:
        """Return whether this public key (Z85) is admitted, for pyzmq. Never raises."""
        return key in self.standings()

    def standings(self) -> Mapping[bytes, Principal]:
        """Return each client's name and roles by its key; empty if the folder cannot be read."""
        with self._lock:
            try:
                facts = os.stat(self._folder.clients_path)
                stamp = (facts.st_ino, facts.st_mtime_ns)
                if stamp != self._seen:
                    self._callers.learn(
                        {
                            admitted.key: Principal(tenant=name, roles=admitted.roles)
                            for name, admitted in self._folder.admitted().items()
                        }
                    )
                    # A change within the same tick of the file system's clock keeps the mtime.
                    is_settled = abs(time.time_ns() - facts.st_mtime_ns) > SETTLED_NS
                    self._seen = stamp if is_settled else None
            except OSError:
                self._callers.learn({})
                self._seen = None
            return self._callers.known


def check_keys(config: ServerConfig, host: str, path: Path) -> list[str]:
    """Return warnings for the owner of a server whose clients at this address need keys.

    ``path`` is the folder of keys.

    Raises:
        ConfigError: the server has no key.
    """
    folder = KeyFolder(path).open()
    command = f"pipeswitch keys --keys-dir {path}"
    if folder.server() is None:
        raise ConfigError(
            f"{config.listen} needs keys of clients"
            + ("" if is_loopback(host) else ", other machines can reach it")
            + ": the server has no key",
            hint=f"{command} server; then, for each client: {command} client NAME. Or "
            + ('[server] auth = "auto"' if is_loopback(host) else "listen on 127.0.0.1"),
        )
    admitted = folder.admitted()
    if not admitted:  # the last key may have been revoked
        return [f"no client is admitted at {config.listen}; admit one with: {command} client NAME"]
    silent = [name for name, one in admitted.items() if not one.has_roles]
    if not silent:
        return []
    return [
        f"keys without a role have infer alone: {', '.join(silent)}; give them others with: "
        f"{command} roles NAME --role register"
    ]
