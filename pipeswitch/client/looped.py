"""Connection whose I/O an event loop does itself, without thread switches.

It supports only the Unix socket of a server on this machine.
"""

from __future__ import annotations

import asyncio
import select
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, Final

from ..base.errors import Cancelled
from .calls import Call, Calls, logger
from .links import StreamLink

INLINE_BYTES: Final = 1 << 20  # the loop copies this much itself; a thread copies more


class CallFuture(asyncio.Future[Any]):
    """Future of a call from an event loop."""

    taken_back: Callable[[], None]
    at_once: Callable[[Any], None] | None = None
    """One of its callbacks, called before the others, in the same iteration that sets the value."""

    def cancel(self, msg: Any = None) -> bool:
        is_cancelled = super().cancel(msg)
        if is_cancelled:
            self.taken_back()
        return is_cancelled

    def set_result(self, value: Any) -> None:
        if self.at_once is not None:
            self.remove_done_callback(self.at_once)
        super().set_result(value)
        if self.at_once is not None:
            self.at_once(self)


class InlineTask:
    """Coroutine that continues in the same iteration of the loop in which its result arrives.

    An asyncio task would take two more iterations. ``asyncio.timeout`` does not work in it.
    """

    def __init__(self, work: Coroutine[Any, Any, None]) -> None:
        self._work = work
        self._awaited: asyncio.Future[Any] | None = None
        self._is_cancelled = False  # a cancellation that the work has not received yet

    def cancel(self) -> None:
        """Cancel the future that the work awaits, or else the work itself at its next step."""
        self._is_cancelled = self._awaited is None or not self._awaited.cancel()

    def step(self, _: Any = None) -> None:
        """Run the work until it waits or ends."""
        work, is_cancelled = self._work, self._is_cancelled
        self._awaited, self._is_cancelled = None, False
        try:
            awaited = work.throw(asyncio.CancelledError()) if is_cancelled else work.send(None)
        except (StopIteration, asyncio.CancelledError):
            return
        except Exception:
            logger.exception("coroutine=%s failed", work)
            return
        if awaited is None:  # the work yields to other callbacks
            asyncio.get_running_loop().call_soon(self.step)
            return
        self._awaited = awaited
        awaited._asyncio_future_blocking = False  # like a task, acknowledge the future
        if isinstance(awaited, CallFuture):
            awaited.at_once = self.step
        awaited.add_done_callback(self.step)
        if self._is_cancelled:
            self._is_cancelled = not awaited.cancel()


class _Loop:
    """Adapter that makes the running event loop usable as a ``Watcher``."""

    def __init__(self, on_ready: Callable[[], None]) -> None:
        self._on_ready = on_ready

    def register(self, socket: Any, flags: int = select.POLLIN, /) -> None:
        loop = asyncio.get_running_loop()
        loop.add_reader(socket, self._on_ready)
        if flags & select.POLLOUT:
            loop.add_writer(socket, self._on_ready)
        else:
            loop.remove_writer(socket)

    def unregister(self, socket: Any, /) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(socket)
        loop.remove_writer(socket)


class LoopConnection(Calls):
    """Connection for many awaited calls at once. Only the loop's thread may use it."""

    _waits_for_server = False

    def __init__(self, address: str, timeout_s: float) -> None:
        """Args:
        address: ``ipc://path`` of a server's socket.
        timeout_s: how long the server may take to answer the first hello.
        """
        super().__init__(address, timeout_s, _Loop(self._on_ready))

    def ask(self, op: str, **options: Any) -> Awaitable[Any]:
        """Send a request and return an awaitable for ``convert(reply)``.

        ``options`` are those of ``Calls._call``. Cancelling the awaitable cancels the request.

        Raises:
            ServerUnavailable: no server listens; the awaitable raises it without waiting.
            PipeSwitchError: the server's error.
        """
        call = self._call(op, **options)
        future = call.future = CallFuture()
        future.taken_back = partial(self._cancel, call.header["id"])
        link, is_large = self._link, op == "infer" and sum(map(len, call.frames)) > INLINE_BYTES
        if is_large and isinstance(link, StreamLink) and link.session:
            return self._ask_large(call, link)
        self._guard(self._begin, call)
        return future

    async def _ask_large(self, call: Call, link: StreamLink) -> Any:
        request_id = call.header["id"]
        copying = asyncio.create_task(asyncio.to_thread(link.stage(call.frames, request_id)))
        try:
            await asyncio.shield(copying)
            self._guard(self._begin, call)
            return await call.future
        finally:
            if not call.is_sent:
                copying.add_done_callback(lambda _: link.answered(request_id))

    def close(self) -> None:
        """Close the connection; calls without a reply end in Cancelled."""
        self._fail_all(Cancelled("the client was closed"))

    def _on_ready(self) -> None:
        link = self._link
        if link is not None:
            self._guard(self._receive, link)

    def _end(self, call: Call, value: Any = None, error: Exception | None = None) -> None:
        if call.future.done():
            return
        if error is None:
            call.future.set_result(value)
        else:
            call.future.set_exception(error)

    def _due(self, at_s: float) -> None:
        super()._due(at_s)
        asyncio.get_running_loop().call_at(at_s, self._on_time, at_s)

    def _on_time(self, at_s: float) -> None:
        if self._poll_at_s == at_s:  # otherwise the search has ended or has a new time
            self._guard(self._poll)
