"""The calls of one event loop, which does their I/O itself: no thread, and no switch between two.

For a server of this machine alone, at its plain socket.
"""

from __future__ import annotations

import asyncio
import select
from collections.abc import Callable
from typing import Any, Final

from ..errors import Cancelled, no_server
from .calls import AnyLink, Calls
from .links import StreamLink

INLINE_BYTES: Final = 1 << 20  # copied by the loop itself; more, by a thread meanwhile


class _Answer(asyncio.Future[Any]):
    """A future as ``Calls`` ends it, of an event loop."""

    def __init__(self, taken_back: Callable[[], None]) -> None:
        super().__init__()
        self._taken_back = taken_back

    def cancel(self, msg: Any = None) -> bool:
        is_cancelled = super().cancel(msg)
        if is_cancelled:
            self._taken_back()
        return is_cancelled

    def set_running_or_notify_cancel(self) -> bool:
        return not self.done()


class _Loop:
    """The running event loop in the place of a poller."""

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
    """One connection, many awaited calls. Used by the thread that runs the loop."""

    def __init__(self, address: str, timeout_s: float) -> None:
        """
        Args:
            address: ``ipc://path`` of a server's socket.
            timeout_s: how long it may take to answer the first hello.
        """
        super().__init__(address, timeout_s, _Loop(self._on_ready))

    async def ask(self, op: str, **options: Any) -> Any:
        """Send a request and await ``convert(reply)``; ``options`` are those of ``Calls._call``.

        To cancel this takes the request back.

        Raises:
            ServerUnavailable: at once where no server listens.
            PipeSwitchError: what the server says.
        """
        call = self._call(op, **options)
        link, request_id = self._link, call.header["id"]
        is_large = sum(map(len, call.frames)) > INLINE_BYTES
        if not (is_large and isinstance(link, StreamLink) and link.session):
            self._guard(lambda: self._begin(call))
            return await call.future
        copying = asyncio.create_task(asyncio.to_thread(link.stage(call.frames, request_id)))
        try:
            await asyncio.shield(copying)
            self._guard(lambda: self._begin(call))
            return await call.future
        finally:
            if not call.is_sent:
                copying.add_done_callback(lambda _: link.answered(request_id))

    def close(self) -> None:
        """Calls without an answer end in Cancelled."""
        self._fail_all(lambda: Cancelled("the client was closed"))
        self._shut()

    def _on_ready(self) -> None:
        link = self._link
        if link is not None:
            self._guard(lambda: self._receive(link))

    def _new_future(self, request_id: str) -> asyncio.Future[Any]:
        return _Answer(lambda: self._cancel(request_id))

    def _absent(self, hello_until_s: float) -> None:
        self._fail_all(lambda: no_server(self.address))

    def _greet(self, link: AnyLink) -> None:
        super()._greet(link)
        asyncio.get_running_loop().call_later(self._timeout_s, self._look, link)

    def _look(self, link: AnyLink) -> None:
        """The time for a hello's answer is over."""
        if self._link is link and not link.session:
            self._unavailable()
