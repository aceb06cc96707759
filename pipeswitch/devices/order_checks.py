"""Checks of the memory daemon's orders before a device touches a byte."""

from __future__ import annotations

from ..base.errors import RemoteProtocolError
from ..ipc.messages.base import ByteRange
from ..ipc.messages.daemon import TransmitModel

FENCE_BYTES = 4
FENCE_MASK = 0xFFFF_FFFF
"""Arrival words are uint32 and carry the low 32 bits of the operation id."""


def check_order(
    order: TransmitModel, *, arena_bytes: int, store_bytes: int, fence_count: int
) -> None:
    """Refuse a transmission that would read or write outside of what it may.

    A copy of 0 bytes is fine: it only raises its word (a prefix that is still resident).

    Raises:
        RemoteProtocolError: says which number is wrong.
    """
    start, end = order.arena_offset_bytes, order.arena_offset_bytes + order.region_bytes
    if order.op_id < 1:
        raise RemoteProtocolError(f"operation {order.op_id} names no transmission")
    if order.region_bytes < 0 or start < fence_count * FENCE_BYTES or end > arena_bytes:
        raise RemoteProtocolError(
            f"region {start}…{end} is not within {fence_count * FENCE_BYTES}…{arena_bytes}"
        )
    if order.waits and len(order.waits) != len(order.groups):
        raise RemoteProtocolError(f"{len(order.waits)} waits for {len(order.groups)} groups")
    if any(not 0 <= count <= index for index, count in enumerate(order.waits)):
        raise RemoteProtocolError("a group waits for itself, or for one behind it")
    for index, group in enumerate(order.groups):
        size = group.size_bytes
        if size < 0:
            raise RemoteProtocolError(f"group {index} has a size of {size} bytes")
        if not 0 <= group.fence < fence_count:
            raise RemoteProtocolError(
                f"group {index}: fence {group.fence} is not below {fence_count}"
            )
        if group.arena_offset_bytes < start or group.arena_offset_bytes + size > end:
            raise RemoteProtocolError(f"group {index} lies outside of its region {start}…{end}")
        if group.store_offset_bytes < 0 or group.store_offset_bytes + size > store_bytes:
            raise RemoteProtocolError(f"group {index} lies outside of the store of {store_bytes}")


def check_range(what: str, offset_bytes: int, size_bytes: int, limit_bytes: int) -> None:
    """Refuse a range that is not within 0…limit.

    Raises:
        RemoteProtocolError: names ``what`` and the numbers.
    """
    if offset_bytes < 0 or size_bytes < 0 or offset_bytes + size_bytes > limit_bytes:
        raise RemoteProtocolError(
            f"{what} {offset_bytes}…{offset_bytes + size_bytes} is not within 0…{limit_bytes}"
        )


def check_pieces(size_bytes: int, ranges: tuple[ByteRange, ...]) -> int:
    """Return the bytes of all pieces of a slice of that size; each must lie within it.

    Raises:
        RemoteProtocolError: a piece sticks out.
    """
    for piece in ranges:
        check_range("slice piece", piece.offset_bytes, piece.size_bytes, size_bytes)
    return sum(piece.size_bytes for piece in ranges)
