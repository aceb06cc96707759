"""Caches of generations: sequences whose rows later generations can reuse.

A prompt's rows are searched in the same caller's generations (``prefixes``): a spare that begins
with the same tokens is taken over, and the rows of a running one are copied.
"""

from __future__ import annotations

import math

from ...ipc.messages.base import Epoch, SlabTensor
from ...programs.decoding.generation import CACHE
from ...programs.interface.dims import shape_at
from ...programs.interface.layout import ITEM_BYTES, aligned
from ...scheduler.events import Announce, Token
from ..transport.clients import Client
from . import manager
from .held import Held
from .manager import Sequences
from .prefixes import BLOCK, History, Tokens


class Caches(Sequences):
    """Sequences, and the caches of generations among them."""

    def open(self, client: Client, caller: str, announced: Announce, token: Token) -> Held:
        """Begin the sequence of a generation, which is busy until it is retired or dropped."""
        held = self._made((caller, f"generation-{self._number + 1}"), client, announced)
        held.history = History((caller, announced.model, announced.manifest.digest), of=held)
        held.token, held.is_busy = token, True
        self.held[held.key] = held
        return held

    def reuse(self, held: Held, ids: Tokens[int], rows: int) -> int:
        """Take the rows of the longest known beginning of ``ids``, but for the last one; return
        their number.

        Args:
            rows: the number of rows to make room for.

        Raises:
            QueueFull: over its caller's share of the pool.
        """
        history, found = held.history, None
        if history is None:
            return 0
        if len(ids) > BLOCK:
            found = self._prefixes.find(history, ids[:-1])
        donor: Held | None = found[0].of if found is not None else None
        if found is None or donor is None or (donor.copies and not donor.is_busy):
            return 0  # nobody makes the copies of one whose own request was refused
        count = found[1]
        is_whole = count == len(ids) - 1 or 2 * count >= len(found[0].tokens)
        if id(donor) in self.spare and not donor.pins and is_whole:
            self._take_over(held, donor)
        else:
            self._copy_rows(held, donor, count, rows)
        held.grown[CACHE].used = count
        self._prefixes.extend(history, ids[:count])
        self._tokens_reused += count
        return count

    def fit(self, held: Held, wanted: int, steps: int = 1) -> None:
        """Make room in a language model's cache for ``wanted`` rows, the last ``steps`` of which
        come one by one.

        Raises:
            QueueFull: over its caller's share of the pool.
        """
        manifest, grown = held.announced.manifest, held.grown.get(CACHE)
        [spec] = [one for one in manifest.inputs if one.name == CACHE]
        width = shape_at(spec.shape[2:], {})
        if grown is None or wanted > grown.capacity:
            row_bytes, used = ITEM_BYTES[spec.dtype] * math.prod(width), held.used
            most = next(dim.high for dim in manifest.dims if dim.name == spec.shape[1])
            grown = self._larger(held, grown, row_bytes, wanted, most, None)
            held.grown[CACHE] = grown
            grown.least, grown.used = 1, used
        rows = max(grown.used, grown.least)
        if grown.used and grown.used >= grown.stale:  # zeros, finite at least
            rows = min(aligned(rows + steps - 1, manager.ROWS_STEP), grown.capacity)
        held.values[CACHE] = SlabTensor(
            name=CACHE,
            dtype=spec.dtype,
            shape=(1, rows, *width),
            offset_bytes=grown.room.input_offset_bytes,
            size_bytes=grown.row_bytes * rows,
        )

    def append(
        self, held: Held, rows: SlabTensor, fed: Tokens[int], epoch: Epoch, tokens: int
    ) -> None:
        """Append the rows of a generation's run, of the tokens ``fed``; ``tokens`` were chosen."""
        held.grown[CACHE].append(held.memory(self._pool), rows)
        if held.history is not None:
            self._prefixes.extend(held.history, fed)
        held.epoch, model = epoch, held.announced.model
        held.steps += 1
        self._steps += 1
        self._tokens[model] = self._tokens.get(model, 0) + tokens

    def _take_over(self, held: Held, donor: Held) -> None:
        """Take all that a spare has."""
        held.grown, donor.grown = donor.grown, {}
        for grown in held.grown.values():
            grown.stale, grown.used = max(grown.stale, grown.used), 0
        self.drop(donor)

    def _copy_rows(self, held: Held, donor: Held, count: int, rows: int) -> None:
        """Copy rows of one that others may need: it stays as it is."""
        donor.pins += 1  # before room is made, which a spare may be given up for
        held.donors.append(donor)
        self.fit(held, max(count + 1, rows))
        mine, theirs = held.grown[CACHE].room, donor.grown[CACHE]
        ends = mine.input_offset_bytes, theirs.room.input_offset_bytes
        held.copies.append((*ends, theirs.row_bytes * count))
