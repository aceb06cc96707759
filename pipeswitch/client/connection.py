"""Connection of the SDK for many concurrent calls, and the threads that do its I/O.

Only the holder of the *role*, which is a lock, may use the link and the table of calls (``calls``).
The background thread holds the role while calls are under way. If the role is free, a thread that
waits for its own call (``call``) takes it and does the I/O itself, which saves two thread switches
for each request.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any, Final

from ..base import errors
from .calls import Call, Calls

CLOSE_FLUSH_MS: Final = 200


class _CancellableFuture(Future[Any]):
    """Future that raises an error if the thread that reads the replies waits for it.

    That wait would never end, because no other thread could read the reply. Callbacks run in the
    thread that reads the replies, as in any executor.
    """

    def __init__(self, check_thread: Callable[[], None], on_cancel: Callable[[], None]) -> None:
        super().__init__()
        self._check_thread = check_thread
        self._on_cancel = on_cancel

    def cancel(self) -> bool:
        is_cancelled = super().cancel()
        if is_cancelled:
            self._on_cancel()
        return is_cancelled

    def result(self, timeout: float | None = None) -> Any:
        if not self.done():
            self._check_thread()
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        if not self.done():
            self._check_thread()
        return super().exception(timeout)


class Connection(Calls):
    """One client's connection. ``request`` and ``call`` may be called from any thread."""

    def __init__(
        self,
        address: str,
        timeout_s: float,
        *,
        poller: Any = None,
        shared_memory: bool = True,
        return_s: float = 0.0,
    ) -> None:
        """Start the background thread, which connects. ``Calls`` explains the arguments.

        ``poller`` is like ``select.poll()``, the default.
        """
        self._poller: Any = poller or select.poll()
        super().__init__(
            address, timeout_s, self._poller, shared_memory=shared_memory, return_s=return_s
        )
        self._pid = os.getpid()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._posts: deque[Callable[[], None]] = deque()
        self._poller.register(self._wake, select.POLLIN)
        self._is_closing = False
        # Prevents posts after ``_is_closing`` is set. Reentrant: while a thread holds the lock,
        # the garbage collector may delete a stream there, which posts a cancellation.
        self._lock = threading.RLock()
        self._role = threading.Lock()  # its holder may use socket, link, poller and calls
        self._holder = 0  # ident of the thread that holds the role; 0: none
        self._needed = threading.Event()  # set when the background thread must take the role
        self._thread = threading.Thread(target=self._run, name="pipeswitch-client", daemon=True)
        try:
            self._thread.start()
        except BaseException:  # the machine has no more threads: the caller may try again
            os.close(self._wake)
            raise

    def another(self) -> Connection:
        """Return a connection to the same server, without shared memory."""
        return Connection(
            self.address, self._timeout_s, shared_memory=False, return_s=self._return_s
        )

    # ---- any thread ----------------------------------------------------------------------------

    def request(self, op: str, **options: Any) -> Future[Any]:
        """Send a request and return a future for ``convert(reply)``.

        ``options`` are those of ``Calls._call``. The future's callbacks run in the I/O thread.
        """
        self._check_process()
        call = self._call(op, **options)
        future = call.future = _CancellableFuture(
            self._check_thread, partial(self._send_cancel, call.header["id"])
        )
        self._post(partial(self._begin, call))
        return future

    def call(self, op: str, **options: Any) -> Any:
        """Send a request and return its result; this thread does the I/O if no other does.

        Raises:
            PipeSwitchError: the same error as the future of ``request``.
        """
        self._check_process()
        self._check_thread()
        if not self._role.acquire(blocking=False):
            return self.request(op, **options).result()
        self._holder = threading.get_ident()
        try:
            call = self._call(op, **options)
            self._posts.append(partial(self._begin, call))
            while not call.is_over:
                if self._is_closing:
                    raise errors.Cancelled("this client is closed")
                self._guard(self._turn)
        finally:
            self._holder = 0
            self._role.release()
            if not self._is_idle or self._is_closing:
                self._needed.set()  # the background thread continues
        if call.error is None:
            return call.value
        try:
            raise call.error
        finally:
            call.error = None  # break the cycle: the error's traceback refers to this frame

    def _check_process(self) -> None:
        """Raise ServerUnavailable in a forked process: no thread there would read a reply."""
        if os.getpid() != self._pid:
            raise errors.ServerUnavailable(
                "this client belongs to the process that created it",
                hint="create a new pipeswitch.Client() after the fork",
            )

    def _check_thread(self) -> None:
        """Raise InvalidInput in the thread that reads the replies: it must not wait for a reply."""
        if self._holder == threading.get_ident():
            raise errors.InvalidInput(
                "a callback runs in the thread that reads this client's answers: it cannot wait "
                "for one",
                hint="submit there and wait elsewhere, or use another Client",
            )

    def notify(self, op: str, *, model: str = "") -> None:
        """Send a message that gets no reply; drop it if there is no connection."""
        self._check_process()
        self._post(partial(self._tell, self._header(op, model, None)))

    def close(self) -> None:
        """Stop the background thread; calls without a reply end in Cancelled. Idempotent.

        If a future's callback calls it, it does not wait for the thread to stop.
        """
        if os.getpid() != self._pid:
            return  # the socket and the thread belong to the parent
        with self._lock:
            if self._is_closing:
                return
            self._is_closing = True
            self._wake_reader()
        if self._holder == threading.get_ident():
            return
        self._thread.join()

    def _post(self, action: Callable[[], None]) -> None:
        with self._lock:
            if self._is_closing:
                raise errors.Cancelled("this client is closed")
            self._posts.append(action)
            self._wake_reader()

    def _wake_reader(self) -> None:
        """Wake the thread that polls, or the background thread if no thread polls."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_write(self._wake, 1)
        self._needed.set()

    def _send_cancel(self, request_id: str) -> None:
        with contextlib.suppress(errors.Cancelled):
            self._post(partial(self._cancel, request_id))

    def _end(self, call: Call, value: Any = None, error: Exception | None = None) -> None:
        if call.future is None:
            call.value, call.error, call.is_over = value, error, True
        elif call.future.set_running_or_notify_cancel():
            if error is None:
                call.future.set_result(value)
            else:
                call.future.set_exception(error)

    # ---- the holder of the role ----------------------------------------------------------------

    def _run(self) -> None:
        """Run the background thread: send hello at once, then do I/O while calls are under way."""
        with self._holding():
            if self._link is None and self._poll_at_s == math.inf:  # no caller has opened a link
                self._guard(self._open)
        while True:
            with self._holding():
                while not self._is_idle and not (self._is_closing and not self._posts):
                    self._guard(self._turn)
                if self._is_closing:
                    break
            self._needed.wait()
            self._needed.clear()
        with self._holding():
            self._fail_all(errors.Cancelled("the client was closed"), CLOSE_FLUSH_MS)
        with self._lock:  # ``close`` writes to the eventfd under the lock
            os.close(self._wake)

    @contextlib.contextmanager
    def _holding(self) -> Iterator[None]:
        with self._role:
            self._holder = threading.get_ident()
            try:
                yield
            finally:
                self._holder = 0

    @property
    def _is_idle(self) -> bool:
        return self._poll_at_s == math.inf and not self._calls and not self._posts

    def _turn(self) -> None:
        """Do one round of I/O as the role's holder; block until something happens.

        The order is: receive, check the connection, send. So no reply is lost, and no call is sent
        over a connection that is known to be broken.
        """
        if self._posts:
            wait_ms: int | None = 0
        elif self._poll_at_s == math.inf:
            wait_ms = None
        else:
            wait_ms = max(0, round((self._poll_at_s - time.monotonic()) * 1000)) + 1
        ready = dict(self._poller.poll(wait_ms))
        if ready.pop(self._wake, 0):
            os.eventfd_read(self._wake)
        if ready and self._link is not None:
            self._receive(self._link)
        if time.monotonic() >= self._poll_at_s:
            self._poll()
        while self._posts:
            self._posts.popleft()()
