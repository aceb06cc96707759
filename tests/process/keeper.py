"""The keeper: a process that has imported the servers' modules, so that tests' servers start fast.

The tests start hundreds of servers, and most of a start is the fork server's ``import torch``. The
keeper forks a process for each start. This process first forks a child, which waits to become the
fork server; then it executes the server's command, and so becomes a normal controller. If the fork
server dies, its successor imports the modules itself.

Imports read variables such as ``OMP_NUM_THREADS`` from the keeper's environment. So the keeper only
starts a server whose environment equals the keeper's, except for names that begin as in
``READ_LATE``. A server may have another ``PYTHONPATH`` if its folders have no module of the keeper.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NoReturn, TextIO

from pipeswitch import launch
from pipeswitch.controller.processes import Processes, open_log
from pipeswitch.launch import close_others, fork_environment, import_for_children
from pipeswitch.sandbox.environment import harmless

READ_LATE: Final = (
    "PIPESWITCH_",
    "XDG_RUNTIME_DIR",
    "PYTEST_CURRENT_TEST",
    "TORCHINDUCTOR_CACHE_DIR",
    "TMPDIR",
    "NOTIFY_SOCKET",
    "WATCHDOG_USEC",
    "HF_HOME",  # ``launch.LATER`` imports no package that reads it
)
IMPORTED: Final = frozenset({"sitecustomize", "usercustomize", "torch", "torchvision"})

ROOM: Final = "PIPESWITCH_KEEPER_ROOM"
ROOM_BYTES: Final = 8192  # space in /proc/PID/environ for a server's additional variables
MAX_ORDER_BYTES: Final = 1 << 17

CLONE: Final = {"x86_64": 56, "aarch64": 220}  # number of the system call
CLONE_PARENT: Final = 0x8000


class Kept:
    """Process of a server, forked by the keeper, but our child; it is like ``subprocess.Popen``."""

    def __init__(self, pid: int, stdout: TextIO) -> None:
        self.pid = pid
        self.stdout = stdout
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit status; None while the process runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end of the process and return its exit status.

        Raises:
            subprocess.TimeoutExpired: if the process still runs after ``timeout`` seconds.
        """
        if self.returncode is None:
            pidfd = os.pidfd_open(self.pid)
            try:
                ended, _, _ = select.select([pidfd], [], [], timeout)
            finally:
                os.close(pidfd)
            if not ended:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        status = self.poll()
        assert status is not None
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Waiting:
    """Waiting fork server, a child of the controller, which the controller uses only once."""

    def __init__(self, pid: int, descriptor: int) -> None:
        self.pid, self._descriptor = pid, descriptor
        self._ordinary = Processes._spawn
        Processes._spawn = lambda processes, channel: self._begin(processes, channel)

    def _begin(self, processes: Processes, channel: int) -> Waiting:
        Processes._spawn = self._ordinary
        order = json.dumps(fork_environment(harmless(os.environ))).encode()
        with open_log(processes._log_path) as log, socket.socket(fileno=self._descriptor) as door:
            socket.send_fds(door, [order], [channel, log.fileno()])
        return self

    def wait(self) -> int:
        """Wait for the end of the process and return its exit status."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


class Keeper:
    """Test's side of the keeper. The keeper starts with the first server, and ends at ``close``."""

    def __init__(self) -> None:
        self._environment = dict(os.environ)
        self._door, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process: subprocess.Popen[bytes] | None = None

    def serves(self, environment: Mapping[str, str]) -> bool:
        """Return True if the keeper can start a server with this environment."""
        names = {name for name, _ in environment.items() ^ self._environment.items()}
        if "PYTHONPATH" in names:
            names.remove("PYTHONPATH")
            for folder in _folders(environment):
                names |= IMPORTED & {path.stem for path in Path(folder).glob("*")}
        return os.uname().machine in CLONE and all(name.startswith(READ_LATE) for name in names)

    def start(self, command: Sequence[str], folder: str, environment: Mapping[str, str]) -> Kept:
        """Run a server's command in a fork of the keeper; its output is readable at ``stdout``."""
        if self._process is None:
            self._begin()
        reads, writes = os.pipe()
        order = json.dumps([command, folder, dict(environment)])
        try:
            socket.send_fds(self._door, [order.encode()], [writes])
        finally:
            os.close(writes)
        reply = self._door.recv(MAX_ORDER_BYTES)
        if not reply:
            os.close(reads)
            raise RuntimeError("the keeper of warm servers has ended")
        return Kept(int(reply), open(reads))

    def _begin(self) -> None:
        descriptor = self._theirs.fileno()
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__, str(descriptor)],
            pass_fds=(descriptor,),
            env=fork_environment({**self._environment, ROOM: "." * ROOM_BYTES}),
        )
        self._theirs.close()

    def close(self) -> None:
        self._theirs.close()
        self._door.close()
        if self._process is not None:
            self._process.wait()


def main(descriptor: int) -> None:
    """Run the keeper: import modules, then fork for each order until the test closes the socket."""
    door = socket.socket(fileno=descriptor)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # a suite in nohup ignores it, and servers inherit
    import_for_children((*launch.FIRST, *launch.LATER))
    while True:
        order, descriptors, _, _ = socket.recv_fds(door, MAX_ORDER_BYTES, 1)
        if not order:
            return
        pid = _clone_for_the_parent()
        if pid == 0:
            _become_a_server(*json.loads(order), *descriptors)
        os.close(descriptors[0])
        door.send(str(pid).encode())


def _clone_for_the_parent() -> int:
    """Fork like ``os.fork``, but make the child a child of our parent, which can wait for it."""
    flags = CLONE_PARENT | signal.SIGCHLD
    pid = ctypes.CDLL(None, use_errno=True).syscall(CLONE[os.uname().machine], flags, 0, 0, 0, 0)
    if pid < 0:
        raise OSError(ctypes.get_errno(), "clone")
    return int(pid)


def _become_a_server(
    command: list[str], folder: str, environment: dict[str, str], stdout: int
) -> NoReturn:
    """Become a controller: fork a fork server as our child, then execute the server's command."""
    os.chdir(folder)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        close_others([theirs.fileno()])
        _wait_to_serve(theirs)
    os.dup2(stdout, 1)
    os.dup2(stdout, 2)
    close_others([ours.fileno()])
    ours.set_inheritable(True)
    at = command.index("-c") + 1
    first = f"import sys; sys.path.append({str(Path(__file__).parent)!r}); import keeper; "
    first += f"sys.path.pop(); keeper.Waiting({pid}, {ours.fileno()}); "
    command[at] = first + command[at]
    os.execve(command[0], command, environment)


def _wait_to_serve(door: socket.socket) -> NoReturn:
    """Become the fork server when the controller sends an order; exit if the controller ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    order, descriptors, _, _ = socket.recv_fds(door, MAX_ORDER_BYTES, 2)
    if not order:
        os._exit(0)
    channel, log_file = descriptors
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, descriptor in enumerate((nothing, log_file, log_file)):
        os.dup2(descriptor, number)
    close_others([channel])
    _take_environment(json.loads(order))
    launch.main(channel)
    raise AssertionError("a fork server leaves by itself")


def _take_environment(environment: Mapping[str, str]) -> None:
    """Replace the environment, even in /proc/PID/environ, which other processes read."""
    keepers = _folders(os.environ)
    sys.path[:] = [*_folders(environment), *(path for path in sys.path if path not in keepers)]
    tempfile.tempdir = None  # so that tempfile reads the new environment
    os.environ.clear()
    os.environ.update(environment)
    stat = Path("/proc/self/stat").read_text()
    begin, end = map(int, stat.rpartition(")")[2].split()[47:49])
    text = "".join(f"{name}={value}\0" for name, value in environment.items()).encode()
    with open("/proc/self/mem", "r+b", buffering=0) as memory:
        memory.seek(begin)
        memory.write(text[: end - begin].ljust(end - begin, b"\0"))


def _folders(environment: Mapping[str, str]) -> list[str]:
    """Return the folders of ``PYTHONPATH``."""
    return [folder for folder in environment.get("PYTHONPATH", "").split(os.pathsep) if folder]


if __name__ == "__main__":
    main(int(sys.argv[1]))
