"""A real server on the cpu device for tests: ``with pipeswitch.testing.server() as s: …``.

A user's own scheduling policy must pass ``check_policy``.

As a pytest fixture::

    @pytest.fixture
    def server():
        with pipeswitch.testing.server(arena="256MiB") as running:
            yield running
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .base.extras import CHECKS, SERVERS
from .client.client import Client

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 40.0
MAX_FOLDER = 24  # maximum length of a temporary folder's path, so that socket paths fit


def check_policy(make: Callable[..., Any], *, max_wait_ms: float = 2000.0) -> None:
    """Assert that a server can use this policy; it also runs in a simulated server.

    Args:
        make: function that ``[scheduler] policy`` would name; it is called with ``max_wait_ms``.

    Raises:
        AssertionError: the policy breaks a rule; the text names the rule and the request.
    """
    CHECKS.load("policy")(make, max_wait_ms=max_wait_ms)


@dataclass(frozen=True)
class RunningServer:
    """A server process and its addresses."""

    process: subprocess.Popen[str]
    ready_line: str
    tcp_address: str
    ipc_address: str
    http_address: str  # host:port; empty if ``http`` is False
    grpc_address: str
    state_dir: Path

    def client(self, *, tcp: bool = False, **options: Any) -> Client:
        """Return a client at the owner's socket, or with ``tcp`` at the address for other users.

        Such a user may only send requests, unless the server has more ``tcp_roles``.
        """
        return Client(self.tcp_address if tcp else self.ipc_address, **options)

    @property
    def pid(self) -> int:
        return self.process.pid

    def log(self) -> str:
        """Return the logs of all of the server's processes."""
        return "\n".join(
            f"--- {path.name}\n{path.read_text(errors='replace')}"
            for path in sorted((self.state_dir / "logs").glob("*.log"))
        )

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal to the server and wait for its end; return the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            return self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise


@contextlib.contextmanager
def server(
    *,
    arena: str = "256MiB",
    host_store: str = "1GiB",
    state_dir: str | Path | None = None,
    tcp_roles: tuple[str, ...] = ("infer",),
    http: bool = False,
    devices: tuple[str, ...] = ("cpu",),
    args: tuple[str, ...] = (),
    environment: Mapping[str, str] | None = None,
) -> Iterator[RunningServer]:
    """Start ``pipeswitch serve`` on a free port in a temporary folder; stop it at the end.

    ``tcp_roles`` are the roles of TCP clients: infer, urgent, register, operate, code. With
    ``http`` the server has a gateway, too.

    Raises:
        RuntimeError: the server did not become ready; the text has its output.
    """
    # A socket's path has at most 107 bytes, and a test runner's temporary folder may be deep.
    is_short = len(tempfile.gettempdir()) <= MAX_FOLDER or not os.path.isdir("/tmp")
    short = None if is_short else "/tmp"
    with tempfile.TemporaryDirectory(prefix="pipeswitch-", dir=short) as folder:
        root = Path(state_dir) if state_dir is not None else Path(folder) / "state"
        command = [
            sys.executable,
            "-P",
            "-c",
            "from pipeswitch.cli.main import main; main()",
            "serve",
            *(part for name in devices for part in ("--device", name)),
            "--listen",
            "tcp://127.0.0.1:0",
            "--arena",
            arena,
            "--host-store",
            host_store,
            "--state-dir",
            str(root),
            "--tcp-roles",
            ",".join(tcp_roles),
            *(_gateway() if http else ("--no-http",)),
            *args,
        ]
        process = _start(
            command, folder, {**os.environ, "XDG_RUNTIME_DIR": folder, **(environment or {})}
        )
        running = None
        try:
            running = _wait_until_ready(process, root)
            yield running
        finally:
            if running is not None:
                running.stop()
            else:
                process.kill()
                process.wait()
            assert process.stdout is not None
            process.stdout.close()


def _gateway() -> Iterator[str]:
    for name in ("http", *({"grpc"} & {*SERVERS.names()})):
        yield from (f"--{name}", "127.0.0.1:0")


def _start(
    command: list[str], folder: str, environment: Mapping[str, str]
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
        env=environment,
    )


def _wait_until_ready(process: subprocess.Popen[str], root: Path) -> RunningServer:
    """Read the server's output until it is ready; raise RuntimeError if it ends before."""
    assert process.stdout is not None
    heard = []
    for line in process.stdout:
        heard.append(line)
        if "is ready" in line:
            words = line.split()
            return RunningServer(
                process,
                line.strip(),
                next(word for word in words if word.startswith("tcp://")),
                next(word for word in words if word.startswith("ipc://")),
                _after(words, "http://") or _after(words, "https://"),
                _after(words, "grpc://"),
                root,
            )
    status = process.wait(START_TIMEOUT_S)
    raise RuntimeError(
        f"the server ended with status {status} before it was ready:\n{''.join(heard)}"
    )


def _after(words: list[str], scheme: str) -> str:
    """Return the address of this scheme; empty if there is none."""
    addresses = [word.removeprefix(scheme) for word in words if word.startswith(scheme)]
    return addresses[0] if addresses else ""
