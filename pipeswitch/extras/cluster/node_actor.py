"""Actor of one node: it runs an ordinary server as its child process.

Ray pickles the messages between actors. They have data of the servers' clients only as bytes: a
program is sent as its bundle file, and the receiving server parses it like an untrusted client's.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from ...base.errors import ConfigError, PipeSwitchError, ServerUnavailable
from ...base.plain_files import write_whole
from ...base.roles import Role
from ...client.client import FINAL_JOB_STATES, Client
from ..curve.curve_keys import GATEWAY_KEY, ClientKeys, KeyFolder, client_keys, make_pair
from .cluster_client import connect_ray, why_of
from .node_jobs import NodeJobs

log = logging.getLogger(__name__)
LEASE_S: Final = 6.0  # a node's jobs may run this long after its last answer that placement got
START_S: Final = 60.0  # length of the first lease, which includes the server's start
CHILD: Final = """\
import pathlib, sys, threading
from pipeswitch.extras.cluster.node_lease import watch
threading.Thread(target=watch, args=(pathlib.Path(sys.argv.pop(1)),), daemon=True).start()
from pipeswitch.cli.main import main
main()
"""


@contextlib.contextmanager
def starts_again(*, is_tried: bool = True) -> Iterator[None]:
    """Exit this process on an error in an actor's constructor, because Ray restarts an actor whose
    process exits, but not one whose constructor raises. If not ``is_tried``, raise the error."""
    try:
        yield
    except Exception as error:
        if not is_tried:
            raise
        log.exception("it is started again: %s", why_of(error))
        os._exit(1)


class NodeActor(NodeJobs):
    """Owner of one node's server. If the server ends, this process exits, and Ray starts both
    again; the server then restores its models and jobs from its journal."""

    def __init__(self, name: str, folder: str, host: str, flags: tuple[str, ...]) -> None:
        if os.environ.get("RAY_AUTH_MODE") != "token":  # then Ray accepts anyone
            raise ConfigError(
                "this Ray accepts everyone who can connect: it was started without a token",
                hint="ray get-auth-token --generate; RAY_AUTH_MODE=token ray start …",
            )
        super().__init__(name, Path(folder) / name)
        started = self._state / "started"
        with starts_again(is_tried=started.exists()):  # an error of the first start is raised
            self._start(host, flags)
            started.touch()

    def _start(self, host: str, flags: tuple[str, ...]) -> None:
        """Start the server, and block until it is ready.
        Raises ServerUnavailable, OSError, RuntimeError: the server or its watcher does not
        start."""
        name = self._name
        folder_of_keys, secret, self._keys, self._gateway_keys = _keys(self._state)
        _wait_for_the_one_before(self._state)
        until_s = self._claim(connect_ray()) + START_S - LEASE_S
        command = [
            sys.executable,
            "-P",
            "-c",
            CHILD,
            str(self._jobs),
            "serve",
            "--listen",
            f"tcp://{host}:0",
            "--name",
            f"cluster-{name}",
            "--state-dir",
            str(self._state),
            "--auth",
            "keys",
            "--keys-dir",
            str(folder_of_keys.path),
            "--allow-code",
            "*",
            *self._same_ports(flags),
            *flags,
        ]
        self._table = self._state / "table.json"  # has the old server's table until ``learn``
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={**os.environ, "PIPESWITCH_GATEWAY__CLUSTER": str(self._table)},
        )
        self._lease(until_s, "-")  # the server's address is not known yet
        self._address, self._owners, self._gateways = self._addresses()
        self._client = Client(self._owners)
        server_key = self._keys.server.decode()
        # Copied models get the same tenant as models that the cluster's clients register.
        self._tenant = Client(self._address, key=secret, server_key=server_key)
        self._lock = threading.Lock()  # guards ``cluster.json``, the lease and the answers
        self._is_leaving = False
        self._learned = 0  # number of the table that was written last
        self._answered = int(time.time() * 1000)  # larger than the previous process's numbers
        self._answered_s: dict[int, float] = {}  # number of an answer to placement -> its time
        threading.Thread(target=self._leave_with_it, daemon=True).start()

    @property
    def _ports(self) -> Path:
        return self._state / "gateways.json"

    def _same_ports(self, flags: tuple[str, ...]) -> list[str]:
        """Return flags with the gateway's last addresses, so that its clients find it again. They
        are used only once, because after a failed start another program may have the ports."""
        if any(flag.partition("=")[0] in ("--http", "--grpc", "--no-http") for flag in flags):
            return []
        try:
            known = dict(json.loads(self._ports.read_text("utf-8")))
        except (OSError, ValueError):
            return []
        self._ports.unlink()
        return [word for name, at in known.items() for word in (f"--{name}", str(at))]

    def _addresses(self) -> tuple[str, str, dict[str, str]]:
        """Wait until the server is ready; return the addresses of clients, owner and gateway."""
        assert self._process.stdout is not None
        heard = []
        for line in self._process.stdout:
            heard.append(line)
            if "is ready" in line:
                at = dict(word.split("://") for word in line.split() if "://" in word)
                gateways = {
                    scheme.removesuffix("s"): host
                    for scheme, host in at.items()
                    if scheme in ("http", "https", "grpc")
                }
                write_whole(self._ports, json.dumps(gateways).encode())
                return f"tcp://{at['tcp']}", f"ipc://{at['ipc']}", gateways
        raise ServerUnavailable(f"the server of {self._name} did not start: {''.join(heard)}")

    def _leave_with_it(self) -> None:
        """Read the server's output until it ends, then exit this process too. Runs in a thread."""
        assert self._process.stdout is not None
        try:
            for _ in self._process.stdout:
                pass
        finally:
            if not self._is_leaving:
                os._exit(1)

    def _lease(self, until_s: float, address: str) -> None:
        """Send the server the end of its lease (monotonic clock) and its owner's address."""
        self._until_s = until_s
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the server is gone; this process exits soon
            self._process.stdin.write(f"{until_s} {address}\n")
            self._process.stdin.flush()

    def summary(self, heard: int = 0) -> dict[str, Any]:
        """Return this node's state for placement. ``heard``: number of the last answer that
        placement has got; it renews the lease from the time of that answer."""
        with self._lock:
            if heard in self._answered_s:
                self._lease(self._answered_s[heard] + LEASE_S, self._owners)
                self._answered_s.clear()
        answer = self._summary()
        with self._lock:
            number = self._answered = self._answered + 1
            self._answered_s[number] = time.monotonic()
        return {**answer, "number": number}

    def _summary(self) -> dict[str, Any]:
        stats, served = self._client.stats(), self._client.models()
        copies, jobs = self._copies()
        runs, requests = stats["inferences"], stats["inference"]["in_flight"]
        each_ms = stats["device_s"]["infer"] * 1000.0 / runs if runs else 0.0
        return {
            "name": self._name,
            "address": self._address,
            "owners": self._owners,
            "keys": (self._keys.public, self._keys.secret, self._keys.server),
            "gateway_keys": self._gateway_keys,
            "learned": self._learned,
            **self._gateways,
            "pid": self._process.pid,
            "free_bytes": stats["arena_free_bytes"],
            "queue_ms": requests * each_ms,
            "each_ms": each_ms,
            "waiting": requests,
            "jobs": sum(row["state"] not in FINAL_JOB_STATES for row in jobs),
            "copies": copies,
            "models": {
                row["name"]: (_program(row), row["bytes"])
                for row in served
                if row["state"] == "ready"
            },
            "aliases": {alias: row["name"] for row in served for alias in row["aliases"]},
            "bodies": self._bodies(),
        }

    def learn(self, table: dict[str, Any]) -> None:
        """Write placement's table to the file that this node's gateway reads."""
        with self._lock:
            text = json.dumps({**table, "here": self._name})
            write_whole(self._table, text.encode(), is_synced=False)
            self._learned = table["number"]

    def remember(self, model: str, body: dict[str, Any] | None) -> None:
        """Store a model's registration, with which other nodes can copy it; None removes it."""
        with self._lock:
            bodies = {**self._bodies(), model: body}
            for one in filter(None, bodies.values() if body is None else ()):  # drop aliases, too
                one["aliases"] = [alias for alias in one.get("aliases", ()) if alias != model]
            text = json.dumps({name: one for name, one in bodies.items() if one is not None})
            write_whole(self._state / "cluster.json", text.encode())

    def _bodies(self) -> dict[str, Any]:
        try:
            return dict(json.loads((self._state / "cluster.json").read_text("utf-8")))
        except FileNotFoundError:
            return {}

    def bundle(self, program: str) -> bytes:
        """Return a program's bundle file; empty if the program is code, which nodes build again."""
        rows = self._client.models()
        digest = next((row["digest"] for row in rows if _program(row) == program), program)
        with contextlib.suppress(FileNotFoundError):
            return (self._state / "models" / digest / "program.bundle").read_bytes()
        return b""

    def adopt(self, model: str, body: dict[str, Any], digest: str, bundle: bytes) -> str:
        """Register another node's model; return its id. Raise PipeSwitchError if the id differs."""
        if bundle:
            with tempfile.NamedTemporaryFile(suffix=".bundle") as file:
                file.write(bundle)
                file.flush()
                source = self._tenant.upload(file.name, "bundle")
            body = {**body, "source": source, "weights": "", "inputs": {}}
            body.pop("takes", None)
            body.pop("example", None)
        made_digest = _program(self._tenant._ask("register", model=model, body=body))
        if made_digest != digest:  # a node with another release of the code, or of PipeSwitch
            self._tenant.unregister(model)
            raise PipeSwitchError(f"{self._name} built another program of {model}: {made_digest}")
        self.remember(model, body)
        return str(made_digest)

    def unregister(self, model: str) -> None:
        self._tenant.unregister(model)

    def stop(self, drain_s: float) -> None:
        """Stop the server: it finishes accepted requests and commits its jobs. Blocks."""
        self._is_leaving = True
        with contextlib.suppress(PipeSwitchError):
            self._client.stop_server(drain_s)
        self._process.wait(drain_s + 30.0)


def _program(row: Mapping[str, Any]) -> str:
    return str(row.get("program", row["digest"]))


def _wait_for_the_one_before(state: Path) -> None:
    """Wait until the killed node's server, which first commits its jobs, has exited."""
    with open(state / "lock", "a") as lock:
        os.chmod(state / "lock", 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)


def _keys(state: Path) -> tuple[KeyFolder, Path, ClientKeys, tuple[str, ...]]:
    """Return the key folder, the file and the keys of the cluster's clients, and the gateways'
    keys. Create whatever is missing."""
    state.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder = KeyFolder(state / "keys").open()
    if folder.server() is None:
        folder.make_server()
    pairs = []
    for name, roles in (("cluster", [role.value for role in Role]), (GATEWAY_KEY, [])):
        secret = folder.path / f"{name}.key_secret"
        if not secret.exists():
            make_pair(name, folder.path)
        keys = client_keys(str(secret), str(folder.path / "server.key"))
        assert keys is not None
        folder.admit(name, keys.public, roles)
        pairs.append(keys)
    clients, gateways = pairs
    texts = (gateways.public.decode(), gateways.secret.decode(), gateways.server.decode())
    return folder, folder.path / "cluster.key_secret", clients, texts
