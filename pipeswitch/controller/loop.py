"""The controller's loop: turns input into events, and performs the scheduler's commands.

Runs on one thread, which blocks only in the selector (docs/adr/0009).
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import os
import select
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Final

from ..base import failpoints
from ..base.failpoints import reach
from ..base.machine import FreedMemory
from ..ipc.channel import cause
from ..scheduler.state.events import DrainRequest, Event, Query, Tick
from ..watchdog import LoopWatchdog, Notifier
from .processes import URGENT_LOOK_EVERY_S
from .server import Server

log = logging.getLogger(__name__)

EXTEND_EVERY_S: Final = 15  # while it restores models, a manager gets an extension so often
TELL_EVERY_S: Final = 2.0  # interval of the lines about a start that takes longer
EXACT_BELOW_S: Final = 0.01  # epoll rounds up to milliseconds, too coarse for shorter waits


class Loop:
    """Controller's loop. Its thread alone owns the scheduler's state."""

    def __init__(self, server: Server, ready_line: Callable[[], str]) -> None:
        """``ready_line``: returns the line to print when everything is ready."""
        self._server, self._ready_line = server, ready_line
        self._scheduler, self._effects = server.scheduler, server.effects
        self._is_announced = False
        self._extend_at_s = self._tell_at_s = time.monotonic() + TELL_EVERY_S
        self._progress = ""  # the last report of the start
        self._notifier = Notifier(os.environ)
        self._freed = FreedMemory()
        self._numbers = itertools.count(1)
        self._signals = 0  # SIGINT and SIGTERM
        self._is_hung_up = False  # SIGHUP came
        self._signals_seen = 0
        self._wake_read, self._wake_write = socket.socketpair()
        for end in (self._wake_read, self._wake_write):
            end.setblocking(False)
        server.selector.register(self._wake_read, selectors.EVENT_READ, self._drain_wakes)

    def run(self, watchdog: LoopWatchdog) -> int:
        """Run until ``Shutdown`` is performed; return the exit status."""
        selector, look_at_s = self._server.selector, 0.0
        while self._effects.left is None:
            timeout_s = self._timeout_s(look_at_s)
            if 0.0 < timeout_s < EXACT_BELOW_S:
                select.select([selector], (), (), timeout_s)
                timeout_s = 0.0
            events = selector.select(timeout_s)
            for key, _ in events:
                key.data()
            self._server.frontend.step()
            self.handle_inbox()
            watchdog.turned()
            now_s = time.monotonic()
            if now_s >= look_at_s:
                look_at_s = now_s + self._poll(now_s)
            elif events:  # a new request may need an earlier check for stopped processes
                look_at_s = min(look_at_s, now_s + URGENT_LOOK_EVERY_S)
        exit_order = self._effects.left
        self._notifier.notify(STOPPING=1, STATUS=exit_order.reason)
        log.info("leaving status=%d: %s", exit_order.status, exit_order.reason)
        if exit_order.status == os.EX_IOERR:
            with contextlib.suppress(OSError):  # the terminal was closed
                sys.stderr.write(f"Error: {exit_order.reason}\n")
        return exit_order.status

    def _timeout_s(self, look_at_s: float) -> float:
        """Return the maximum seconds to wait: a client, the scheduler or ``_poll`` is due then."""
        clients_s = self._server.frontend.wait_s()
        if self._server.inbox or clients_s == 0.0:
            return 0.0
        wakeup_ms = self._scheduler.next_wakeup_ms()
        at_s = look_at_s if wakeup_ms is None else min(look_at_s, wakeup_ms / 1000.0)
        wait_s = max(0.0, at_s - time.monotonic())
        return wait_s if clients_s is None else min(wait_s, clients_s)

    def _poll(self, now_s: float) -> float:
        """Check for changes that no descriptor reports; return the seconds until the next check."""
        processes, gateway = self._server.processes, self._server.gateway
        since_ms = self._scheduler.waited_since_ms
        since_s = since_ms / 1000.0 if since_ms is not None else None
        processes.look(since_s)
        gateway.look()
        if since_s is None:  # no request waits
            self._freed.give_back(now_s)
        self._notifier.beat(now_s)
        if not self._is_announced and now_s >= self._tell_at_s:
            self._tell_progress(now_s)
        look_s, gateway_s = processes.seconds_to_look(since_s), gateway.wait_s()
        return look_s if gateway_s is None else min(look_s, gateway_s)

    def _tell_progress(self, now_s: float) -> None:
        """Report what the start waits for, to a manager and on stderr, when that changes; else
        only extend the manager's timeout."""
        status = self._server.why_not_ready
        progress = status.rpartition(",")[0]  # without the seconds
        is_other, self._tell_at_s = progress != self._progress, now_s + TELL_EVERY_S
        if is_other or now_s >= self._extend_at_s:
            self._notifier.notify(EXTEND_TIMEOUT_USEC=4_000_000 * EXTEND_EVERY_S, STATUS=status)
            self._progress, self._extend_at_s = progress, now_s + EXTEND_EVERY_S
        if is_other:
            with contextlib.suppress(OSError):  # the terminal was closed
                sys.stderr.write(f"{status}\n")

    def handle_inbox(self) -> None:
        """Handle all queued events in order, then a drain for each signal, then a Tick if due."""
        inbox = self._server.inbox
        while inbox:
            self._handle(inbox.popleft())
        while self._signals_seen < (self._signals or self._is_hung_up):
            self._signals_seen += 1
            self._notifier.notify(STOPPING=1, STATUS="draining")
            self._handle(
                DrainRequest(token=None, grace_ms=self._server.config.server.drain_grace_ms)
            )
        wakeup_ms = self._scheduler.next_wakeup_ms()
        if wakeup_ms is not None and wakeup_ms <= _now_ms():
            self._handle(Tick())

    def _handle(self, event: Event) -> None:
        if isinstance(event, Query) and event.what == "trace":
            self._server.tracer.ask(event.token, _now_ms() - event.seconds * 1000.0)
            return
        cause.event = self._scheduler.core.event = next(self._numbers)
        if failpoints.is_on:
            reach("controller.event")
        for command in self._scheduler.decide(event, _now_ms()):
            self._effects.perform(command)
        for command in self._scheduler.run_deferred():
            self._effects.perform(command)
        while self._effects.refused_models and not self._server.inbox:  # after restored models
            self._scheduler.registry.names.mark_refused(*self._effects.refused_models.pop(0))
            for command in self._scheduler.run_deferred():
                self._effects.perform(command)
        if not self._is_announced and self._scheduler.is_whole and not self._server.why_not_ready:
            self._is_announced = True
            gc.collect()
            gc.freeze()  # these objects stay; a full collection during a request skips them
            line = self._ready_line()
            self._server.journal.drop_notes()
            self._notifier.notify(READY=1, STATUS=line)
            with contextlib.suppress(OSError):  # the terminal was closed
                sys.stdout.write(line + "\n")
                sys.stdout.flush()

    # -- signals -------------------------------------------------------------------------------

    def catch_signals(self) -> None:
        """Handle signals: the first one drains, the second one ends the server at once."""
        signal.set_wakeup_fd(self._wake_write.fileno(), warn_on_full_buffer=False)
        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup ignores it
            numbers.append(signal.SIGHUP)
        for number in numbers:
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, _: object) -> None:
        # SIGHUP counts once, because several come: from a closed terminal's shell, from the kernel
        # when that shell exits, and from systemd with SIGTERM at the end of a user's session.
        if number == signal.SIGHUP:
            self._is_hung_up = True
        else:
            self._signals += 1

    def _drain_wakes(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._wake_read.recv(4096):
                pass

    def close(self) -> None:
        self._notifier.close()
        self._freed.close()
        self._wake_read.close()
        self._wake_write.close()


def _now_ms() -> float:
    return time.monotonic() * 1000.0
