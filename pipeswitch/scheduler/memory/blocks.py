"""KV caches: rows in blocks of the request pool. Equal first tokens share blocks. Pure.

The blocks of one caller, program and row size are a *space*. A full block whose tokens are known
lies in a tree under the block before it, so equal tokens are stored once. A block in the tree is
never written again: a sequence that differs within a block copies the first rows (copy on write).

Four operations: ``match`` finds the blocks of the first tokens, ``insert`` puts a block into the
tree, ``lock`` and ``unlock`` count the sequences that use a block, and ``evict`` frees the oldest
block that nobody uses.

No call frees more than PIECE blocks, except to make room for others: the rest waits for ``sweep``.
"""

from __future__ import annotations

import itertools
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Final, Protocol

import msgspec
import numpy as np

from ...base.errors import QueueFull
from ...ipc.messages.base import SlabTensor
from ...programs.interface.layout import ValueSpec, aligned
from ...wire.slabs import SLAB_ALIGN_BYTES

BLOCK_ROWS: Final = 16  # a block has this many rows, or a multiple
MOST_WASTE: Final = 32  # padding to whole pages wastes at most 1/32 of a block
BLOCK_BYTES: Final = 1024  # memory of a block outside the pool: its record and tree node
TOKEN_BYTES: Final = 4  # memory of a token outside the pool, here and again in its request
MOST_SIBLINGS: Final = 32  # newest siblings that are compared token by token
ROWS_STEP: Final = 16  # a shape grows by this many rows, so most steps have the last step's shape
PIECE: Final = 64  # blocks that one call frees; more would delay requests

Tokens = array  # array of C ints, which are large enough: no vocabulary has more than 2**21 tokens


def tokens_of(ids: Any) -> Tokens[int]:
    """Return ids, an array or a sequence, as packed tokens."""
    return array("i", np.asarray(ids).astype(np.int32).tobytes())


class BlockMemory(Protocol):
    """Memory that has the blocks: the request pool. A holder has a share of it."""

    def take_block(self, holder: str, size_bytes: int, beside_bytes: int, tenant: str) -> int:
        """Return the offset of a new block; raise QueueFull if there is no memory."""

    def free_block(self, holder: str, offset_bytes: int, beside_bytes: int, tenant: str) -> None:
        """Free a block."""


class ModelBlocks(msgspec.Struct, kw_only=True, eq=False):
    """Blocks of one model."""

    spaces: dict[Hashable, BlockNamespace] = {}
    cached: OrderedDict[Block, None] = msgspec.field(default_factory=OrderedDict)  # without locks
    size_bytes: int = 0  # bytes of all blocks
    cached_bytes: int = 0
    is_gone: bool = False  # the model was removed: nothing stays cached


class BlockNamespace(msgspec.Struct, kw_only=True, eq=False):
    """Blocks that may be shared: those of one caller, program and row size."""

    key: Hashable
    of: ModelBlocks
    holder: str  # caller whose share of the pool they count toward
    model: str
    tenant: str
    row_bytes: int
    rows: int  # rows per block
    tables: int = 0  # number of open tables
    blocks: int = 0
    children: dict[bytes, Block] = {}

    @property
    def block_bytes(self) -> int:
        """Size of a block in the pool: whole pages."""
        return aligned(self.row_bytes * self.rows, SLAB_ALIGN_BYTES)


class Block(msgspec.Struct, kw_only=True, eq=False):
    """Block of the pool, with the rows of ``BlockNamespace.rows`` tokens."""

    space: BlockNamespace
    offset_bytes: int
    locks: int = 1  # sequences that use it
    tokens: bytes = b""  # empty: it is not in the tree
    siblings: dict[bytes, Block] = {}  # the tree's dict that contains this block
    children: dict[bytes, Block] = {}
    used_at_ms: float = 0.0


class BlockTable(msgspec.Struct, kw_only=True, eq=False):
    """Blocks of one sequence, in order."""

    space: BlockNamespace
    blocks: list[Block] = []
    used: int = 0  # rows with content
    inserted: int = 0  # leading blocks that are in the tree
    tail: Tokens[int] = msgspec.field(default_factory=lambda: array("i"))  # tokens not in the tree

    @property
    def capacity(self) -> int:
        """Number of rows that fit into the blocks."""
        return len(self.blocks) * self.space.rows

    @property
    def size_bytes(self) -> int:
        """Bytes of its blocks in the pool, with shared blocks."""
        return len(self.blocks) * self.space.block_bytes

    def lent(self, spec: ValueSpec, shape: tuple[int, ...]) -> SlabTensor:
        """Return an input whose rows lie in the blocks."""
        pieces = self.pieces
        return SlabTensor(
            name=spec.name,
            dtype=spec.dtype,
            shape=shape,
            offset_bytes=pieces[0],
            size_bytes=self.space.row_bytes * self.used,
            pieces=pieces,
            piece_bytes=self.space.row_bytes * self.space.rows,
        )

    @property
    def pieces(self) -> tuple[int, ...]:
        """Offsets of the blocks in the pool."""
        return tuple([block.offset_bytes for block in self.blocks])


class BlockPool:
    """Pool of the blocks of all sequences.

    Invariants (``tests/unit/sequence_world.py``): a block has a lock for each table that contains
    it. A block without locks is in the tree, and its children are evicted before it; or it is
    *dead*, because nobody can use it.
    """

    def __init__(self, pool: BlockMemory, now_ms: Callable[[], float]) -> None:
        self._pool, self._now_ms = pool, now_ms
        self.models: dict[str, ModelBlocks] = {}
        # Cached blocks, in the order of their release. To find the first key of a plain dict takes
        # a scan over all keys that were removed before it.
        self.unlocked: OrderedDict[Block, None] = OrderedDict()
        self._dead: deque[Block] = deque()
        self._gone: deque[ModelBlocks] = deque()  # removed models with cached blocks
        self.cached_bytes = 0  # bytes of the pool that eviction would free

    # ---- the four operations -------------------------------------------------------------------

    def match(self, space: BlockNamespace, tokens: Tokens[int]) -> tuple[list[Block], int]:
        """Return the cached blocks of the longest known prefix, and the number of rows in it."""
        data, size = tokens.tobytes(), TOKEN_BYTES * space.rows
        children, matched, at = space.children, list[Block](), 0
        while at + size <= len(data) and (block := children.get(data[at : at + size])) is not None:
            matched.append(block)
            children, at = block.children, at + size
        best, most = None, 0
        for block in itertools.islice(reversed(children.values()), MOST_SIBLINGS):
            count = _common(data[at : at + size], block.tokens)
            if count > most:
                best, most = block, count
        if best is not None:
            matched.append(best)
        count = at // TOKEN_BYTES + most
        return (matched, count) if count >= BLOCK_ROWS else ([], 0)

    def insert(self, before: Block | None, block: Block, tokens: bytes) -> Block:
        """Put a locked block with these tokens into the tree, under ``before``, and return it.
        If the tree has these tokens already, unlock it, and lock and return the tree's block."""
        siblings = block.space.children if before is None else before.children
        known = siblings.get(tokens)
        if known is not None:
            self.lock([known])
            self.unlock([block])
            return known
        block.tokens, block.siblings = tokens, siblings
        siblings[tokens] = block
        return block

    def lock(self, blocks: Sequence[Block]) -> None:
        """Lock the blocks of one path in the tree."""
        for block in blocks:
            if not block.locks:
                self._count_cached(block, -1)
            block.locks += 1

    def unlock(self, blocks: Sequence[Block]) -> None:
        """Unlock a table's blocks. A block without locks is cached if in the tree, else dead."""
        for block in reversed(blocks):
            block.locks -= 1
            if not block.locks:
                block.used_at_ms = self._now_ms()
                self._count_cached(block, 1)
        self.sweep()

    def evict(self) -> bool:
        """Free a dead block, or the one that has been cached for longest. False: there is none."""
        block = self._next_dead() or next(iter(self.unlocked), None)
        if block is not None:
            self._free(block)
        return block is not None

    def sweep(self) -> bool:
        """Free up to PIECE dead blocks. Return True if there are more."""
        for _ in range(PIECE):
            if (block := self._next_dead()) is None:
                return False
            self._free(block)
        return self._next_dead() is not None

    def _next_dead(self) -> Block | None:
        """Return a block that nobody can use: it is not in the tree, or its model was removed."""
        while self._gone and not self._gone[0].cached:
            self._gone.popleft()
        return next(iter(self._dead or (self._gone[0].cached if self._gone else ())), None)

    def _count_cached(self, block: Block, change: int) -> None:
        """Note that a block has no locks from now on (``change`` 1), or that it has some (-1)."""
        model, size_bytes = block.space.of, change * block.space.block_bytes
        self.cached_bytes += size_bytes
        if not block.tokens:
            self._dead.append(block) if change > 0 else self._dead.popleft()
            return
        if model.is_gone and change > 0:
            self._gone.append(model)
        model.cached_bytes += size_bytes
        for cached in (self.unlocked, model.cached):
            if change > 0:
                cached[block] = None
            else:
                del cached[block]

    # ---- tables --------------------------------------------------------------------------------

    def open(
        self, holder: str, model: str, tenant: str, row_bytes: int, program: str
    ) -> BlockTable:
        """Return an empty table. Tables of one holder, program and row size share blocks."""
        key, rows = (holder, program, row_bytes), rows_of_block(row_bytes)
        own = self.models.setdefault(model, ModelBlocks())
        space = own.spaces.get(key)
        if space is None:
            space = own.spaces[key] = BlockNamespace(
                key=key,
                of=own,
                holder=holder,
                model=model,
                tenant=tenant,
                row_bytes=row_bytes,
                rows=rows,
            )
        space.tables += 1
        return BlockTable(space=space)

    def resize(self, table: BlockTable, rows: int) -> None:
        """Resize a table to hold ``rows`` rows, or its used rows if these are more.

        Raises:
            QueueFull: the pool has no room; the table is unchanged.
        """
        count, had = -(-max(rows, table.used) // table.space.rows), len(table.blocks)
        try:
            while len(table.blocks) < count:
                table.blocks.append(self._take(table.space))
        except QueueFull:
            count = had
            raise
        finally:
            more = table.blocks[count:]
            del table.blocks[count:]
            self.unlock(more)

    def reuse(self, table: BlockTable, tokens: Tokens[int]) -> tuple[int, int, int] | None:
        """Fill an empty table with the cached rows of the longest known prefix of ``tokens``.
        Return the copy that the caller must make at once (target, source, bytes), or None."""
        space = table.space
        blocks, count = self.match(space, tokens)
        whole, rest = divmod(count, space.rows)
        self.lock(blocks)
        copy = None
        if rest:
            try:
                own = self._take(space)
                blocks[whole:], shared = [own], blocks[whole:]
                copy = own.offset_bytes, shared[0].offset_bytes, space.row_bytes * rest
            except QueueFull:
                count, shared = count - rest, blocks[whole:]
                del blocks[whole:]
            self.unlock(shared)
        table.blocks, table.used, table.inserted = blocks, count, whole
        table.tail = tokens[whole * space.rows : count]
        return copy

    def extend(self, table: BlockTable, rows: int, tokens: Tokens[int] | None = None) -> None:
        """Count rows that were written. If their tokens are given, put full blocks in the tree."""
        table.used += rows
        if tokens is None:
            return
        table.tail.extend(tokens)
        size = table.space.rows
        for at in range(0, len(table.tail) - size + 1, size):
            self._insert(table, table.tail[at : at + size])
        del table.tail[: len(table.tail) - len(table.tail) % size]

    def close(self, table: BlockTable) -> None:
        """Release a table's blocks; those whose tokens are known stay cached."""
        if table.tail and table.used >= BLOCK_ROWS:
            self._insert(table, table.tail)
        self.unlock(table.blocks)
        table.blocks, table.used, table.tail = [], 0, array("i")
        table.space.tables -= 1
        self._forget_empty(table.space)

    # ---- eviction and removal ------------------------------------------------------------------

    def expire(self, idle_ms: float) -> float | None:
        """Evict up to PIECE blocks that had no lock for ``idle_ms``; return the milliseconds until
        the next eviction."""
        for _ in range(PIECE):
            block = next(iter(self.unlocked), None)
            if block is None:
                return None
            left_ms = block.used_at_ms + idle_ms - self._now_ms()
            if left_ms > 0:
                return left_ms
            self._free(block)
        return 0.0

    def remove(self, model: str) -> None:
        """Let a removed model's cached blocks die, and those in use when they have no lock."""
        if (gone := self.models.pop(model, None)) is not None:
            gone.is_gone = True
            self._gone.append(gone)
            self.sweep()

    def _take(self, space: BlockNamespace) -> Block:
        offset = self._pool.take_block(
            space.holder, space.block_bytes, beside_bytes(space.rows), space.tenant
        )
        space.blocks += 1
        space.of.size_bytes += space.block_bytes
        return Block(space=space, offset_bytes=offset)

    def _insert(self, table: BlockTable, tokens: Tokens[int]) -> None:
        index = table.inserted
        before = table.blocks[index - 1] if index else None
        table.blocks[index] = self.insert(before, table.blocks[index], tokens.tobytes())
        table.inserted += 1

    def _free(self, block: Block) -> None:
        space, beside = block.space, beside_bytes(block.space.rows)
        self._count_cached(block, -1)
        if block.tokens:
            del block.siblings[block.tokens]
        self._pool.free_block(space.holder, block.offset_bytes, beside, space.tenant)
        space.blocks -= 1
        space.of.size_bytes -= space.block_bytes
        self._forget_empty(space)

    def _forget_empty(self, space: BlockNamespace) -> None:
        if not space.tables and not space.blocks:
            space.of.spaces.pop(space.key, None)
            if not space.of.spaces and not space.of.is_gone:
                self.models.pop(space.model, None)


def rows_of_block(row_bytes: int) -> int:
    """Return the number of rows in a block, chosen so that whole pages waste little."""
    rows = BLOCK_ROWS
    while -rows * row_bytes % SLAB_ALIGN_BYTES * MOST_WASTE > rows * row_bytes:
        rows += BLOCK_ROWS
    return rows


def beside_bytes(rows: int) -> int:
    """Return the bytes that a block of ``rows`` rows takes outside the pool."""
    return BLOCK_BYTES + 2 * TOKEN_BYTES * rows


def _common(these: bytes, those: bytes) -> int:
    """Return the number of tokens in the common prefix of two byte strings."""
    count = min(len(these), len(those)) // TOKEN_BYTES
    if not count:
        return 0
    is_unlike = np.frombuffer(these, np.int32, count) != np.frombuffer(those, np.int32, count)
    first = int(is_unlike.argmax())
    return first if is_unlike[first] else count
