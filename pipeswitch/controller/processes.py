"""The controller's side of all child processes: it forks them, reads them and reaps them.

Only the scheduler's thread uses the sockets of children. Each exit reaches the scheduler as exactly
one event, however the process ended.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from ..base.errors import RemoteProtocolError
from ..base.failpoints import reach
from ..base.machine import SHORTAGES
from ..base.plain_files import open_plain
from ..ipc.channel import Channel, channel_pair, encode_message
from ..ipc.messages.base import Exit, Message
from ..ipc.messages.fork_server import ChildExited, Fork, Forked, ForkServerReady
from ..launch import command, fork_environment
from ..sandbox.environment import harmless

log = logging.getLogger(__name__)

MAX_FAILED_STARTS = 3  # failed starts of the fork server in a row that end the server
LOOK_EVERY_S = 0.5  # interval of checks for processes that a SIGSTOP has stopped
URGENT_LOOK_EVERY_S = 0.03  # interval while a request has waited for longer than this
STOPPED_LOOKS = 5  # a process that this many checks in a row find stopped (2 s or 150 ms) is killed


@dataclass
class Child:
    """One forked process and our ends of its channels."""

    kind: str
    name: str
    channels: list[Channel]
    on_message: Callable[[Message, list[int]], None]
    on_exit: Callable[[int], None]
    ticket: int = 0
    pid: int = 0
    pidfd: int = -1
    is_doomed: bool = False  # kill it as soon as its pid is known
    is_orphan: bool = False  # its fork server is gone, so its pidfd is watched for its exit
    exit_status: int | None = None
    open_channels: set[int] = field(default_factory=set)


class Processes:
    """Fork server and children, on one selector shared with the main loop."""

    def __init__(
        self,
        selector: selectors.BaseSelector,
        log_path: Path,
        on_hopeless: Callable[[str], None],
        log_bytes: int = 0,
    ) -> None:
        """``log_bytes``: size at which the log is rotated; two older files stay. 0: never."""
        self._selector = selector
        self._on_hopeless = on_hopeless
        self._failed_starts = 0
        self.is_stopping = False
        self._log_path, self._log_bytes = log_path, log_bytes
        self._server: subprocess.Popen[bytes] | None = None
        self._server_channel: Channel | None = None
        self._is_server_ready = False
        self._is_start_due = False
        self._waiting: list[tuple[Child, Message, list[int]]] = []
        self._by_ticket: dict[int, Child] = {}
        self._by_pid: dict[int, Child] = {}
        self._tickets = 0
        self._stopped = StoppedLooks()

    # -- fork server ---------------------------------------------------------------------------

    def start_server(self) -> None:
        """Start or restart the fork server; forks wait until it is ready.

        If the system refuses a descriptor, a process or memory, ``look`` tries again.
        """
        self._is_server_ready = False
        self._is_start_due = False
        try:
            ours, theirs = channel_pair()
        except OSError as error:
            self._start_failed(error)
            return
        try:
            self._server = self._spawn(theirs.fileno())
        except OSError as error:
            ours.close()
            self._start_failed(error)
            return
        finally:
            theirs.close()
        self._server_channel = ours
        self._selector.register(ours, selectors.EVENT_READ, self._from_server)

    def _spawn(self, descriptor: int) -> subprocess.Popen[bytes]:
        with open_log(self._log_path) as log_file:
            return subprocess.Popen(
                command(descriptor),
                pass_fds=(descriptor,),
                stdin=subprocess.DEVNULL,
                stdout=log_file,
                stderr=log_file,
                start_new_session=True,  # a Ctrl-C at the terminal then reaches the controller only
                env=fork_environment(harmless(os.environ)),
            )

    def _start_failed(self, error: OSError) -> None:
        """Schedule another start; do not count a shortage as a failure, because it may pass."""
        self._failed_starts += error.errno not in SHORTAGES
        log.error("fork_server=not_started failed=%d: %s", self._failed_starts, error)
        if self._failed_starts >= MAX_FAILED_STARTS:
            self._on_hopeless(f"the fork server cannot be started: {error.strerror}")
        else:
            self._is_start_due = True

    def _from_server(self) -> None:
        assert self._server_channel is not None
        received = self._server_channel.receive()
        if received is None:
            self._server_lost()
            return
        match received[0]:
            case ForkServerReady() as message:
                log.info("fork_server=ready pid=%d import_ms=%.0f", message.pid, message.import_ms)
                self._is_server_ready = True
                waiting, self._waiting = self._waiting, []
                for child, settings, descriptors in waiting:
                    self._order(child, settings, descriptors)
            case Forked(ticket=ticket, pid=0):
                self._not_forked(self._by_ticket.pop(ticket))
            case Forked(ticket=ticket, pid=pid):
                self._forked(self._by_ticket.pop(ticket), pid)
            case ChildExited(pid=pid, status=status):
                if pid in self._by_pid:
                    self._exited(self._by_pid[pid], status)
            case other:
                log.error("fork_server sent a %s", type(other).__name__)

    def _server_lost(self) -> None:
        """Restart the fork server. Its children keep running; watch them by their pidfds."""
        assert self._server_channel is not None
        assert self._server is not None
        self._selector.unregister(self._server_channel)
        self._server_channel.close()
        self._server_channel = None
        status = self._server.wait()
        if self.is_stopping:
            return
        self._failed_starts = 0 if self._is_server_ready else self._failed_starts + 1
        log.error("fork_server=lost status=%d failed_starts=%d", status, self._failed_starts)
        if self._failed_starts >= MAX_FAILED_STARTS:
            self._on_hopeless(f"the fork server does not start; see {self._log_path}")
            return
        for child in list(self._by_pid.values()):
            self._watch_orphan(child)
        never_forked = list(self._by_ticket.values())
        self._by_ticket.clear()
        for child in never_forked:
            self._not_forked(child)
        self.start_server()

    def _watch_orphan(self, child: Child) -> None:
        if child.is_orphan:
            return  # its fork server died earlier
        child.is_orphan = True
        if child.pidfd < 0:  # it exited before its pidfd could be opened
            self._exited(child, -signal.SIGKILL)
            return
        self._selector.register(
            child.pidfd, selectors.EVENT_READ, lambda: self._orphan_exited(child)
        )

    def _orphan_exited(self, child: Child) -> None:
        status = -signal.SIGKILL
        with contextlib.suppress(ChildProcessError):  # it is our child only if we are its subreaper
            status = os.waitstatus_to_exitcode(os.waitpid(child.pid, os.WNOHANG)[1])
        self._exited(child, status)

    # -- children ------------------------------------------------------------------------------

    def fork(
        self,
        kind: str,
        name: str,
        settings: Message,
        channel_count: int,
        descriptors: Sequence[int],
        on_message: Callable[[Message, list[int]], None],
        on_exit: Callable[[int], None],
    ) -> Child:
        """Request a child; it gets its ends of new channels, then copies of ``descriptors``."""
        child = Child(kind, name, [], on_message, on_exit)
        passed: list[int] = []
        try:
            for _ in range(channel_count):
                ours, theirs = channel_pair()
                ours.point = f"controller.send.{kind}"
                child.channels.append(ours)
                passed.append(theirs.detach())
            passed += [os.dup(descriptor) for descriptor in descriptors]
        except OSError as error:  # too many open files
            log.error("child=%s: %s", name, error)
            for channel in child.channels:
                channel.close()
            for descriptor in passed:
                os.close(descriptor)
            self._not_forked(child)
            return child
        for channel in child.channels:
            channel.setblocking(False)
            child.open_channels.add(channel.fileno())
            self._selector.register(
                channel, selectors.EVENT_READ, lambda c=child, ch=channel: self._read_one(c, ch)
            )
        if self._is_server_ready:
            self._order(child, settings, passed)
        else:
            self._waiting.append((child, settings, passed))
        return child

    def _order(self, child: Child, settings: Message, descriptors: list[int]) -> None:
        reach("controller.fork")
        self._tickets += 1
        child.ticket = self._tickets
        self._by_ticket[child.ticket] = child
        assert self._server_channel is not None
        order = Fork(ticket=child.ticket, name=child.name, settings=encode_message(settings))
        try:
            self._server_channel.send(order, descriptors)
        except BrokenPipeError:
            log.warning("fork_server=gone child=%s", child.name)  # the server's end of file follows
        except OSError as error:  # no memory, or too many descriptors in flight
            log.error("child=%s: %s", child.name, error)
            self._not_forked(self._by_ticket.pop(child.ticket))
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _not_forked(self, child: Child) -> None:
        """Report the exit of a child that could not be forked; its owner tries again later."""
        log.error("child=%s not forked", child.name)
        child.exit_status = -signal.SIGKILL
        self._close(child)
        child.on_exit(child.exit_status)

    def _forked(self, child: Child, pid: int) -> None:
        child.pid = pid
        self._by_pid[pid] = child
        try:
            child.pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            pass  # it was reaped; its exit follows
        except OSError as error:
            # No descriptor is left for a pidfd, so kill the child now, by its pid. The pid is most
            # likely still valid, because the fork server reports an exit after this message.
            log.error("child=%s cannot be watched, killing it: %s", child.name, error)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        log.info("child=%s pid=%d forked", child.name, pid)
        if child.is_doomed:
            self.kill(child)

    def _read(self, child: Child, channel: Channel) -> None:
        while self._read_one(child, channel):
            pass

    def _read_one(self, child: Child, channel: Channel) -> bool:
        """Handle one message, if there is one; return whether there may be more.

        One call of the selector may return a child's channel and its exit. If the exit was handled
        first, the channel is already closed, and nothing is read.
        """
        if channel.fileno() not in child.open_channels:
            return False
        try:
            received = channel.receive()
        except BlockingIOError:
            return False
        except RemoteProtocolError as error:
            log.error("child=%s sent an invalid message: %s", child.name, error)
            self.kill(child)
            return False
        if received is None:
            self._close_channel(child, channel)
            return False
        message, descriptors = received
        if child.kind != "daemon":  # only the daemon's descriptors are used
            for descriptor in descriptors:
                os.close(descriptor)
            descriptors = []
        child.on_message(message, descriptors)
        return True

    def _exited(self, child: Child, status: int) -> None:
        """Deliver a reaped child's last messages, then its exit; do nothing the second time."""
        if child.exit_status is not None:
            return
        for channel in list(child.channels):
            if channel.fileno() in child.open_channels:
                self._read(child, channel)
        log.info("child=%s pid=%d exited status=%d", child.name, child.pid, status)
        self._by_pid.pop(child.pid, None)
        reach("controller.exit")
        child.exit_status = status
        self._close(child)
        child.on_exit(status)

    def _close(self, child: Child) -> None:
        for channel in child.channels:
            if channel.fileno() in child.open_channels:
                self._close_channel(child, channel)
        if child.pidfd >= 0:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(child.pidfd)
            os.close(child.pidfd)
            child.pidfd = -1

    def _close_channel(self, child: Child, channel: Channel) -> None:
        child.open_channels.discard(channel.fileno())
        self._selector.unregister(channel)
        channel.close()

    def send(
        self, child: Child, index: int, message: Message, descriptors: Sequence[int] = ()
    ) -> None:
        """Send without ever blocking.

        Drop the message if the child has exited or was never forked; its exit event follows. Kill
        the child if its channel is full because it does not read, or if the system has no memory
        or too many descriptors in flight.
        """
        if (
            child.exit_status is not None
            or child.channels[index].fileno() not in child.open_channels
        ):
            return
        try:
            child.channels[index].send(message, descriptors)
        except BrokenPipeError:
            return
        except OSError as error:
            reason = (
                "it reads no messages" if isinstance(error, BlockingIOError) else error.strerror
            )
            log.error("child=%s takes no message, killing it: %s", child.name, reason)
            self.kill(child)

    def kill(self, child: Child) -> None:
        """Send SIGKILL, as soon as the pid is known; the exit event follows the reaping."""
        if child.exit_status is not None:
            return
        if child.pidfd < 0:
            child.is_doomed = True
            return
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(child.pidfd, signal.SIGKILL)

    # -- stopped processes ---------------------------------------------------------------------

    def seconds_to_look(self, waited_since_s: float | None) -> float:
        """Return the seconds until ``look`` must be called again."""
        return max(0.0, self._stopped.due_at_s(waited_since_s) - time.monotonic())

    def look(self, waited_since_s: float | None) -> None:
        """Check for changes that no descriptor reports, if a check is due.

        Args:
            waited_since_s: Arrival of the oldest unanswered request, on the monotonic clock; None
                if no request waits.
        """
        now_s = time.monotonic()
        if now_s < self._stopped.due_at_s(waited_since_s):
            return
        if self._is_start_due:
            self.start_server()
        self._kill_stopped(now_s)
        if self._log_bytes:
            rotate(self._log_path, self._log_bytes)

    def _kill_stopped(self, now_s: float) -> None:
        """Kill processes that a SIGSTOP has stopped for ``STOPPED_LOOKS`` checks in a row. No pidfd
        reports a stop, and the process may have the device's turn. Checks are counted, not time,
        because this process may have been stopped too. A debugger's stop ("t") is ignored."""
        watched = {pid: child.name for pid, child in self._by_pid.items()}
        if self._server is not None and self._server_channel is not None:
            watched[self._server.pid] = "fork server"
        stopped = [pid for pid in watched if _is_stopped(pid)]
        for pid in self._stopped.look(stopped, now_s):
            log.warning("child=%s pid=%d has been stopped, killing it", watched[pid], pid)
            if pid in self._by_pid:
                self.kill(self._by_pid[pid])
            elif self._server is not None:
                self._server.kill()

    def stop(self, timeout_s: float) -> None:
        """End all processes: tell the daemon to exit, kill the others, then the fork server.

        Blocks for up to ``timeout_s``. A child that is just being forked is killed after its fork.
        """
        self.is_stopping = True
        for child in [*self._by_pid.values(), *self._by_ticket.values()]:
            if child.kind == "daemon":
                self.send(child, 0, Exit())
            else:
                self.kill(child)
        deadline = time.monotonic() + timeout_s
        while (self._by_pid or self._by_ticket) and self._server_channel is not None:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                break
            for key, _ in self._selector.select(left_s):
                if callable(key.data):
                    key.data()
        for child in list(self._by_pid.values()):
            self.kill(child)
        if self._server_channel is not None and self._server is not None:
            self._selector.unregister(self._server_channel)
            self._server_channel.close()
            self._server.kill()  # its children have exited or were killed
            self._server.wait()


class StoppedLooks:
    """Schedule of checks for stopped processes, and a count for each process that was stopped."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}  # pid -> checks in a row
        self._looked_at_s = 0.0

    def due_at_s(self, waited_since_s: float | None) -> float:
        """Return the time of the next check; it is earlier if a request has waited unusually long.

        Checks take time from requests, so they are frequent only while a request is late anyway.
        """
        seldom_s = self._looked_at_s + LOOK_EVERY_S
        if waited_since_s is None:
            return seldom_s
        return min(seldom_s, max(self._looked_at_s, waited_since_s) + URGENT_LOOK_EVERY_S)

    def look(self, stopped: Iterable[int], now_s: float) -> list[int]:
        """Return pids that ``STOPPED_LOOKS`` checks in a row found stopped; reset their counts."""
        self._looked_at_s = now_s
        counts = {pid: self._counts.get(pid, 0) + 1 for pid in stopped}
        given_up = [pid for pid, count in counts.items() if count >= STOPPED_LOOKS]
        self._counts = {pid: count for pid, count in counts.items() if pid not in given_up}
        return given_up


def open_log(path: Path) -> IO[bytes]:
    """Open the fork server's log; if the disk refuses, return ``/dev/null``."""
    try:
        return open(path, "ab", opener=open_plain)
    except OSError as error:
        log.warning("%s cannot be written: %s", path, error.strerror)
        return open(os.devnull, "ab")


def rotate(path: Path, max_bytes: int) -> None:
    """Rotate a log that is larger than ``max_bytes``; keep its newest bytes, and one older file.

    Other processes have the log open, so it is copied and truncated; lines written in between are
    lost. A hole would not help: a confined worker may write only up to a fixed file position.
    """
    try:
        if path.stat().st_size <= max_bytes:
            return
        with open(path, "r+b", opener=open_plain) as file:
            with contextlib.suppress(OSError):  # on a full disk the old lines are lost
                last, older = (path.with_name(f"{path.name}.{n}") for n in (1, 2))
                if last.exists():
                    os.replace(last, older)
                file.seek(-max_bytes, os.SEEK_END)
                with open(last, "wb", opener=open_plain) as copy:
                    shutil.copyfileobj(file, copy, 1 << 20)
            file.truncate(0)
    except OSError:  # it is missing or cannot be written; ``open_log`` has logged that
        return


def _is_stopped(pid: int) -> bool:
    """Return True if a SIGSTOP holds the process; False if it is gone."""
    try:
        stat = Path("/proc", str(pid), "stat").read_bytes()
    except OSError:
        return False
    return stat.rpartition(b")")[2].split()[0] == b"T"
