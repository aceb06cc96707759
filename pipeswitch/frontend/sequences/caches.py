"""Caches of generations: sequences that share blocks of rows (``blocks``)."""

from __future__ import annotations

import math

from ...ipc.messages.base import OpId
from ...programs.decoding.generation_settings import CACHE
from ...programs.interface.dims import shape_at
from ...programs.interface.layout import ITEM_BYTES, ValueSpec, aligned
from ...scheduler.state.events import ModelAvailable, Token
from ..transport.clients import Session
from . import manager
from .blocks import Tokens
from .manager import Sequences, lent
from .sequence_state import SequenceState


class Caches(Sequences):
    """Sequences, and the caches of generations among them."""

    def open(
        self, client: Session, caller: str, announced: ModelAvailable, token: Token
    ) -> SequenceState:
        """Begin the sequence of a generation, which is busy until it is dropped."""
        while (key := (caller, f"generation-{self._number + 1}")) in self.held:
            self._number += 1  # its caller named a sequence so
        sequence = self._made(key, client, announced)
        sequence.token, sequence.is_busy = token, True
        self._hold(sequence)
        spec, width = _cache(sequence)
        sequence.grown[CACHE] = self._table(
            sequence, ITEM_BYTES[spec.dtype] * math.prod(width), CACHE
        )
        return sequence

    def reuse(self, sequence: SequenceState, ids: Tokens[int], rows: int) -> int:
        """Start a cache with the rows of the longest known prefix of ``ids``; return their number.
        The prefix is never all of ``ids``: the last id is always computed.

        Args:
            rows: the number of rows to allocate memory for.

        Raises:
            QueueFull: the caller's share, or the pool, is used up.
        """
        table = sequence.grown[CACHE]
        if copy := self.blocks.reuse(table, ids[:-1]):
            (to, source, size), memory = copy, sequence.memory(self._pool)
            memory[to : to + size] = memory[source : source + size]
        self.blocks.resize(table, rows)
        self.tokens_reused += table.used
        return table.used

    def fit(self, sequence: SequenceState, row_count: int, steps: int = 1) -> None:
        """Resize a language model's cache to ``row_count`` rows.
        The next run writes the last ``steps`` of them one by one.

        Raises:
            QueueFull: the caller's share, or the pool, is used up.
        """
        table, (spec, width) = sequence.grown[CACHE], _cache(sequence)
        self.blocks.resize(table, row_count)
        rows = max(table.used, 1)
        if table.used:
            most = next(
                dim.high for dim in sequence.announced.manifest.dims if dim.name == spec.shape[1]
            )
            rows = min(aligned(rows + steps - 1, manager.ROWS_STEP), most)
        sequence.values[CACHE] = lent(spec, (1, rows, *width), table)

    def append(self, sequence: SequenceState, fed: Tokens[int], op_id: OpId, tokens: int) -> None:
        """Count the rows that a run wrote for the tokens ``fed``, and the tokens that it chose."""
        self.blocks.extend(sequence.grown[CACHE], len(fed), fed)
        sequence.op_id, model = op_id, sequence.announced.model
        sequence.steps += 1
        self._steps += 1
        self._tokens[model] = self._tokens.get(model, 0) + tokens


def _cache(sequence: SequenceState) -> tuple[ValueSpec, tuple[int, ...]]:
    """Return the spec of the model's cache input, and the shape of one row."""
    [spec] = [one for one in sequence.announced.manifest.inputs if one.name == CACHE]
    return spec, shape_at(spec.shape[2:], {})
