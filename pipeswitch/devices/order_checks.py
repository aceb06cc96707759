"""Checks of the memory daemon's orders before a device touches a byte."""

from __future__ import annotations

from ..base.errors import RemoteProtocolError
from ..ipc.messages.base import ByteRange
from ..ipc.messages.daemon import CopyPart, TransmitModel

FENCE_BYTES = 4
FENCE_MASK = 0xFFFF_FFFF
"""Fences are uint32 and contain the low 32 bits of the operation id."""


def check_order(
    order: TransmitModel, *, arena_bytes: int, store_bytes: int, fence_count: int
) -> None:
    """Check that a transmission stays within its region, the store and the fences.

    A copy with empty ``parts`` is valid: it only sets the fence of a group that is still resident.

    Raises:
        RemoteProtocolError: a number is wrong; the text says which.
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
        if group.rows and not 0 <= group.rows[0] <= group.rows[-1] < size // group.row_bytes:
            raise RemoteProtocolError(f"group {index}: its table does not have all the rows")
        if group.arena_offset_bytes < start or group.arena_offset_bytes + size > end:
            raise RemoteProtocolError(f"group {index} lies outside of its region {start}…{end}")
        position, whole = 0, (CopyPart(group.store_offset_bytes, 0, size),)
        for source, at, part_bytes in whole if group.parts is None else group.parts:
            begin, position = position, at + part_bytes
            if not begin <= at <= position <= size:
                raise RemoteProtocolError(
                    f"group {index} has parts that overlap, or lie outside of it"
                )
            check_range(f"group {index}", source, part_bytes, store_bytes)


def check_range(what: str, offset_bytes: int, size_bytes: int, limit_bytes: int) -> None:
    """Check that a range is within 0…limit.

    Raises:
        RemoteProtocolError: the range is outside; the text has ``what`` and the numbers.
    """
    if offset_bytes < 0 or size_bytes < 0 or offset_bytes + size_bytes > limit_bytes:
        raise RemoteProtocolError(
            f"{what} {offset_bytes}…{offset_bytes + size_bytes} is not within 0…{limit_bytes}"
        )


def check_pieces(size_bytes: int, ranges: tuple[ByteRange, ...]) -> int:
    """Return the total size of pieces of a slice that has ``size_bytes``.

    Raises:
        RemoteProtocolError: a piece is not within the slice.
    """
    for piece in ranges:
        check_range("slice piece", piece.offset_bytes, piece.size_bytes, size_bytes)
    return sum(piece.size_bytes for piece in ranges)
