"""Caches of generations: sequences that share blocks of rows (``blocks``)."""

from __future__ import annotations

import math

from ...ipc.messages.base import OpId
from ...programs.decoding.generation import CACHE
from ...programs.interface.dims import shape_at
from ...programs.interface.layout import ITEM_BYTES, ValueSpec, aligned
from ...scheduler.events import ModelAvailable, Token
from ..transport.clients import Client
from . import manager
from .blocks import Tokens
from .manager import Sequences, lent
from .sequence import SequenceState


class Caches(Sequences):
    """Sequences, and the caches of generations among them."""

    def open(
        self, client: Client, caller: str, announced: ModelAvailable, token: Token
    ) -> SequenceState:
        """Begin the sequence of a generation, which is busy until it is dropped."""
        held = self._made((caller, f"generation-{self._number + 1}"), client, announced)
        held.token, held.is_busy = token, True
        self.held[held.key] = held
        spec, width = _cache(held)
        held.grown[CACHE] = self._table(held, ITEM_BYTES[spec.dtype] * math.prod(width), CACHE)
        return held

    def reuse(self, held: SequenceState, ids: Tokens[int], rows: int) -> int:
        """Share the rows of the longest known beginning of ``ids``, but for the last one; return
        their number.

        Args:
            rows: the number of rows that there must be room for now.

        Raises:
            QueueFull: over its caller's share of the pool.
        """
        table = held.grown[CACHE]
        if copy := self.blocks.reuse(table, ids[:-1]):
            (to, source, size), memory = copy, held.memory(self._pool)
            memory[to : to + size] = memory[source : source + size]
        self.blocks.resize(table, rows)
        self._tokens_reused += table.used
        return table.used

    def fit(self, held: SequenceState, wanted: int, steps: int = 1) -> None:
        """Make room in a language model's cache for ``wanted`` rows and no more, the last ``steps``
        of which come one by one.

        Raises:
            QueueFull: over its caller's share of the pool.
        """
        table, (spec, width) = held.grown[CACHE], _cache(held)
        self.blocks.resize(table, wanted)
        rows = max(table.used, 1)
        if table.used:
            most = next(
                dim.high for dim in held.announced.manifest.dims if dim.name == spec.shape[1]
            )
            rows = min(aligned(rows + steps - 1, manager.ROWS_STEP), most)
        held.values[CACHE] = lent(spec, (1, rows, *width), table)

    def append(self, held: SequenceState, fed: Tokens[int], op_id: OpId, tokens: int) -> None:
        """Note the rows that a run wrote of the tokens ``fed``; ``tokens`` were chosen."""
        self.blocks.extend(held.grown[CACHE], len(fed), fed)
        held.op_id, model = op_id, held.announced.model
        held.steps += 1
        self._steps += 1
        self._tokens[model] = self._tokens.get(model, 0) + tokens


def _cache(held: SequenceState) -> tuple[ValueSpec, tuple[int, ...]]:
    """Return the input that is the cache, and the shape of a row."""
    [spec] = [one for one in held.announced.manifest.inputs if one.name == CACHE]
    return spec, shape_at(spec.shape[2:], {})
