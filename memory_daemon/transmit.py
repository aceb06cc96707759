"""Guard of transmissions: the daemon's own check of the controller's orders.

The controller leases the bytes. If it makes a mistake or a message is late, this guard refuses
orders that would break invariant I4 (at most one live writer of a range). It uses no device.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

from pipeswitch.base.errors import RemoteProtocolError
from pipeswitch.devices.order_checks import check_order
from pipeswitch.ipc.messages.base import OpId
from pipeswitch.ipc.messages.daemon import TransmitModel


class _Span(NamedTuple):
    start: int
    end: int
    op_id: int

    def overlaps(self, start: int, end: int) -> bool:
        return self.start < end and start < self.end


class TransmitGuard:
    """Live transmissions, and for every byte the newest operation id that was accepted for it.

    The control thread calls ``accept``, and the device's copy thread ``end``.
    """

    def __init__(self, *, arena_bytes: int, store_bytes: int, fence_count: int) -> None:
        self._arena_bytes = arena_bytes
        self._store_bytes = store_bytes
        self._fence_count = fence_count
        self._lock = threading.Lock()
        self._live: dict[OpId, TransmitModel] = {}
        self._accepted: list[_Span] = []  # disjoint: a new span replaces parts of old ones

    def accept(self, order: TransmitModel) -> None:
        """Record an order as live, or refuse it and change nothing.

        Raises:
            RemoteProtocolError: the order is out of bounds, overlaps a live one, or is stale.
        """
        check_order(
            order,
            arena_bytes=self._arena_bytes,
            store_bytes=self._store_bytes,
            fence_count=self._fence_count,
        )
        start, end = order.arena_offset_bytes, order.arena_offset_bytes + order.region_bytes
        with self._lock:
            self._refuse_live(order, start, end)
            for span in self._accepted:
                if span.overlaps(start, end) and span.op_id > order.op_id:
                    raise RemoteProtocolError(
                        f"operation {order.op_id} is stale: {span.op_id} was accepted "
                        f"for {span.start}…{span.end}"
                    )
            self._live[order.op_id] = order
            self._accepted = [
                piece for span in self._accepted for piece in _without(span, start, end)
            ]
            self._accepted.append(_Span(start, end, order.op_id))

    def end(self, op_id: OpId) -> None:
        """Record the end of ``op_id``, which writes no more bytes."""
        with self._lock:
            self._live.pop(op_id, None)

    def live_reads(self, store_offset_bytes: int, size_bytes: int) -> OpId | None:
        """Return the id of a live transmission that reads this part of the store, else None."""
        place = _Span(store_offset_bytes, store_offset_bytes + size_bytes, OpId(0))
        with self._lock:
            for order in self._live.values():
                for start, _, size in [one for group in order.groups for one in group.pieces()]:
                    if place.overlaps(start, start + size):
                        return order.op_id
        return None

    def _refuse_live(self, order: TransmitModel, start: int, end: int) -> None:
        if order.op_id in self._live:
            raise RemoteProtocolError(f"operation {order.op_id} is being transmitted already")
        fences = {group.fence for group in order.groups}
        if len(fences) != len(order.groups):
            raise RemoteProtocolError("two groups raise the same fence")
        for live in self._live.values():
            live_end = live.arena_offset_bytes + live.region_bytes
            if live.arena_offset_bytes < end and start < live_end:
                raise RemoteProtocolError(
                    f"{start}…{end} overlaps operation {live.op_id}, which is being transmitted "
                    f"to {live.arena_offset_bytes}…{live_end}"
                )
            if any(group.fence in fences for group in live.groups):
                raise RemoteProtocolError(f"operation {live.op_id} raises one of these fences")


def _without(span: _Span, start: int, end: int) -> list[_Span]:
    """Return the parts of ``span`` outside of start…end."""
    before, behind = min(span.end, start), max(span.start, end)
    pieces = span._replace(end=before), span._replace(start=behind)
    return [piece for piece in pieces if piece.start < piece.end]
