"""KV caches of generations: rows in blocks of the request pool (``blocks``). Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any, Final

import msgspec

from ...ipc.messages.base import OpId, SlabTensor
from ...programs.interface.dims import shape_at
from ...programs.interface.layout import CACHE, ITEM_BYTES, Manifest, ValueSpec, aligned
from ...scheduler.memory import blocks
from ...scheduler.memory.blocks import BlockPool, BlockTable, Tokens, beside_bytes, rows_of_block
from ...scheduler.state.events import ModelAvailable, Token
from ...wire.slabs import SLAB_ALIGN_BYTES

PIECES: Final = 8  # a step has at most 1/8 of the longest cache's rows
SMALL_BYTES: Final = 64 << 10  # limit of a step's request without its ids
MAX_STEP_TOKENS: Final = 1 << 16  # limit of one request; reading it takes the loop 1 ms
Copy = tuple[int, int, int]  # target, source, bytes


class Cache(msgspec.Struct, kw_only=True, eq=False):
    """Cache of one generation."""

    number: int  # names it for workers, and for its caller
    caller: str
    token: Token
    announced: ModelAvailable  # the version that its generation began with
    table: BlockTable
    op_id: OpId = OpId(0)  # the run that computed its newest rows
    steps: int = 0  # number of its runs

    @property
    def name(self) -> str:
        return f"generation-{self.number}"

    @property
    def row(self) -> dict[str, Any]:
        return {
            "id": self.name,
            "model": self.announced.base or self.announced.model,
            "version": self.announced.version,
            "tenant": self.caller,
            "steps": self.steps,
            "bytes": self.table.size_bytes,
            "idle_ms": 0.0,
        }


class Caches:
    """Caches of all generations. Those of one caller that begin with the same tokens share blocks;
    after their end, the blocks stay cached until their memory is needed."""

    def __init__(self, pool: BlockPool, others: Container[tuple[str, str]] = ()) -> None:
        """``others``: names of other sequences, each with its caller."""
        self.blocks, self._others = pool, others
        self.held: dict[str, Cache] = {}  # by name
        self.counts = Counter[str]()  # model -> number of its caches
        self.steps = self.tokens_reused = 0
        self.tokens: dict[str, int] = {}  # language model -> number of tokens in answers
        self._number = 0

    def open(self, caller: str, announced: ModelAvailable, token: Token) -> Cache:
        self._number += 1
        while (caller, f"generation-{self._number}") in self._others:
            self._number += 1
        spec, width = _spec(announced.manifest)
        row_bytes = ITEM_BYTES[spec.dtype] * math.prod(width)
        program = f"{announced.manifest.digest} {CACHE}"
        table = self.blocks.open(caller, announced.model, announced.tenant, row_bytes, program)
        cache = Cache(
            number=self._number, caller=caller, token=token, announced=announced, table=table
        )
        self.held[cache.name] = cache
        self.counts[announced.model] += 1
        return cache

    def reuse(self, cache: Cache, ids: Tokens[int]) -> Copy | None:
        """Start a cache with the rows of the longest known prefix of ``ids``, which is never all of
        them: the last id is always computed. Return the copy that the caller must make at once."""
        return self.blocks.reuse(cache.table, ids[:-1])

    def fit(self, cache: Cache, row_count: int, steps: int = 1) -> SlabTensor:
        """Resize a cache to ``row_count`` rows, and return it as the input of the next run.
        That run writes the last ``steps`` of them one by one.

        Raises:
            QueueFull: the caller's share, or the pool, is used up.
        """
        table, (spec, width) = cache.table, _spec(cache.announced.manifest)
        self.blocks.resize(table, row_count)
        rows = max(table.used, 1)
        if table.used:
            dims = cache.announced.manifest.dims
            most = next(dim.high for dim in dims if dim.name == spec.shape[1])
            rows = min(aligned(rows + steps - 1, blocks.ROWS_STEP), most)
        return table.lent(spec, (1, rows, *width))

    def append(self, cache: Cache, fed: Tokens[int], op_id: OpId, tokens: int) -> None:
        """Count the rows that a run wrote for the tokens ``fed``, and the tokens that it chose."""
        self.blocks.extend(cache.table, len(fed), fed)
        cache.op_id, model = op_id, cache.announced.model
        cache.steps += 1
        self.steps += 1
        self.tokens[model] = self.tokens.get(model, 0) + tokens

    def close(self, cache: Cache) -> None:
        """End a cache. Blocks whose tokens are known stay cached."""
        del self.held[cache.name]
        self.counts[cache.announced.model] -= 1
        self.counts += Counter()  # removes models without caches
        self.blocks.close(cache.table)

    # ---- ``StateReport`` -----------------------------------------------------------------------

    def rows(self) -> Iterator[dict[str, Any]]:
        return (one.row for one in [*self.held.values()])

    def find(self, name: str, caller: str) -> Token | None:
        cache = self.held.get(name)
        return cache.token if cache is not None and cache.caller == caller else None

    def as_dict(self) -> Mapping[str, int]:
        return {
            "sequences": len(self.held),
            "sequence_steps": self.steps,
            "tokens_reused": self.tokens_reused,
        }

    def by_model(self) -> Iterable[tuple[str, Mapping[str, int]]]:
        for model, count in self.tokens.items():
            yield model, {"tokens": count}
        for model, count in self.counts.items():
            yield model, {"sequences": count}

    def retract(self, model: str) -> None:
        self.tokens.pop(model, None)


def longest(manifest: Manifest, share_bytes: int) -> tuple[int, int]:
    """Return the maximum number of tokens of a prompt with its answer, and of one step.
    Within these limits, a cache and a request fit into a caller's share of the pool."""
    high = {dim.name: dim.high for dim in manifest.dims}
    spec, width = _spec(manifest)
    row_bytes = ITEM_BYTES[spec.dtype] * math.prod(width)
    block = rows_of_block(row_bytes)
    block_bytes = aligned(row_bytes * block, SLAB_ALIGN_BYTES) + beside_bytes(block)
    left_bytes = share_bytes - SMALL_BYTES
    piece = max(blocks.ROWS_STEP, left_bytes // block_bytes * block // PIECES)
    piece = min(high["length"], MAX_STEP_TOKENS, piece)
    left_bytes -= ITEM_BYTES["int64"] * piece
    return min(high["past"], max(0, left_bytes // block_bytes * block)), piece


def _spec(manifest: Manifest) -> tuple[ValueSpec, tuple[int, ...]]:
    """Return the spec of the model's cache input, and the shape of one row."""
    [spec] = [one for one in manifest.inputs if one.name == CACHE]
    return spec, shape_at(spec.shape[2:], {})
