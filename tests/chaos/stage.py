"""The tested server, which can be killed and started again with the same state and address."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from pipeswitch.base.failpoints import VARIABLE
from pipeswitch.client.client import Client
from pipeswitch.testing import RunningServer, server

from ..process.tools import MARK, Checked, gone, kill, marked_pids
from .history import History

ENVIRONMENT = {
    "PIPESWITCH_SCHEDULER__COMMIT_EVERY": "100ms",
    "PIPESWITCH_WORKERS__RESTART_BACKOFF": "50ms",
}
ARENA = "24MiB"  # room, per device, for two of the load's three large models and the small models
DEVICES = ("cpu:0", "cpu:1")


def free_port() -> int:
    """Return a port that is free now; the next port is free, too."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = int(first.getsockname()[1])
            with contextlib.suppress(OSError):
                second.bind(("127.0.0.1", port + 1))
                return port


class Stage:
    """Owner of the server process; ``revive`` starts the server again after its death."""

    def __init__(self, folder: Path, history: History, policy: str = "priority") -> None:
        self.folder, self.policy = folder, policy
        self.points = folder / "points"
        self.points.mkdir()
        self.history = history
        self.address = f"tcp://127.0.0.1:{free_port()}"
        self.http_address = f"127.0.0.1:{free_port()}"
        self.mark = uuid.uuid4().hex
        self._stack = contextlib.ExitStack()
        self._lock = threading.RLock()
        self.checked = self._start()

    def _start(self) -> Checked:
        doors = ("--listen", self.address, "--http", self.http_address, "--grpc", "off")
        environment = {**ENVIRONMENT, MARK: self.mark, VARIABLE: str(self.points)}
        running = self._stack.enter_context(
            server(
                devices=DEVICES,
                arena=ARENA,
                state_dir=self.folder / "state",
                http=True,
                args=("--threads", "1", "--policy", self.policy, *doors),
                tcp_roles=("infer", "register", "operate"),
                environment=environment,
            )
        )
        return Checked(running, self.mark)

    @property
    def gateway_pid(self) -> int:
        """Process id of the present or last gateway; 0 while its lock file is being written."""
        return int((self.folder / "state" / "gateway.lock").read_text() or 0)

    @property
    def running(self) -> RunningServer:
        return self.checked.running

    @property
    def is_up(self) -> bool:
        return self.running.process.poll() is None

    def client(self) -> Client:
        """Return a client over TCP, because the next server has the same TCP address."""
        return Client(self.address, timeout_s=30.0)

    def revive(self, down_at_s: float) -> None:
        """Start the server again on the same state after the controller has died. Only the old
        gateway may still run: it answers with errors until the next server ends it."""
        with self._lock:
            self.running.process.wait(30)
            gone(self.mark, but=frozenset({self.gateway_pid}))
            self.checked.client.close()
            self._stack.close()
            self._stack = contextlib.ExitStack()
            self.checked = self._start()
            self.history.controller_downs.append((down_at_s, time.monotonic()))

    def arm(self, point: str, action: str) -> Path:
        """Arm a failpoint. The rename makes the whole file visible at once."""
        path = self.points / point
        draft = self.points / f".{point}"
        draft.write_text(action)
        os.rename(draft, path)
        return path

    def end(self, number: int = signal.SIGTERM) -> int:
        """Stop the server for good; return its exit status."""
        with self._lock:
            self.checked.client.close()
            status = self.running.stop(number)
            self._stack.close()
            gone(self.mark)
            return status

    def kill_all(self) -> None:
        """Kill all processes of the server, because the chaos run itself has failed."""
        for pid in marked_pids(self.mark):
            kill(pid)


@contextlib.contextmanager
def staged(folder: Path, history: History, policy: str) -> Iterator[Stage]:
    stage = Stage(folder, history, policy)
    try:
        yield stage
    finally:
        stage.kill_all()
