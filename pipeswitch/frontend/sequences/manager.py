"""Sequences: each request continues from the previous one's state (``register(…, state=…)``).

The outputs that are a sequence's state stay in the request pool, where a worker wrote them. The
next request gets them as inputs, so the scheduler sees ordinary requests. If a worker dies, its
request is computed again from the same bytes.

The state counts toward its caller's share of the pool. A sequence has one request at a time. A
failed request leaves the state unchanged. An answer that did not reach its client ends the
sequence, because its client cannot know whether the step was done.

State that grows lies in blocks (``scheduler/memory/blocks.py``).
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Protocol

import msgspec

from ...base.errors import InvalidInput, SequenceNotFound
from ...programs.interface.dims import NoExtent, Values, shape_at
from ...programs.interface.layout import ITEM_BYTES, ValueSpec, aligned
from ...scheduler.memory import blocks
from ...scheduler.memory.blocks import BlockPool, BlockTable
from ...scheduler.state.events import ModelAvailable, Token
from ...wire.frames import RequestHeader, WireTensor
from ..intake.request_pool import PoolAllocation, RequestPool
from ..intake.validation import check_brought
from ..transport.clients import Session
from .sequence_state import (
    Key,
    SequenceGroup,
    SequenceOptions,
    SequenceState,
)

IDLE_MS: Final = 300_000.0  # a sequence without a request for this long is dropped
ROWS_PIECE: Final = 256  # sequences that are listed at once
PIECE: Final = 8  # sequences that one call drops; each may have thousands of blocks
HINT: Final = "start another one: it has ended, was idle for 5 minutes, or the server was restarted"


class StateReport(Protocol):
    """State of requests of a kind (``requests.Kind``), which is reported like that of sequences."""

    def rows(self) -> Iterable[dict[str, Any]]:
        """Return a row of ``pipeswitch sequences`` for each request."""

    def find(self, name: str, caller: str) -> Token | None:
        """Return the token of a caller's request, by the id in its row; None: there is none."""

    def as_dict(self) -> Mapping[str, int]:
        """Return counters for ``stats``; those of ``Sequences.as_dict`` are added to them."""

    def by_model(self) -> Iterable[tuple[str, Mapping[str, int]]]:
        """Return numbers for ``Sequences.by_model``, which adds them."""

    def retract(self, model: str) -> None:
        """Remove the numbers of a model that was removed."""


class Sequences:
    """All sequences, in the order of their last use."""

    def __init__(self, pool: RequestPool, now_ms: Callable[[], float]) -> None:
        self._pool, self._now_ms = pool, now_ms
        self.held: dict[Key, SequenceState] = {}
        self._idle: OrderedDict[SequenceState, None] = OrderedDict()  # in the order of last use
        self._models: dict[str, SequenceGroup] = {}
        self._clients: dict[Session, SequenceGroup] = {}
        self._gone: deque[SequenceGroup] = deque()
        self.blocks = BlockPool(pool, now_ms)
        self.others: list[StateReport] = []  # state of other requests, which is reported here
        self._steps = 0
        pool.give_up = self.blocks.evict
        self._look_at_ms = 0.0  # nothing expires before this time
        self._number = 0

    def of(
        self, options: SequenceOptions, client: Session, caller: str, announced: ModelAvailable
    ) -> SequenceState:
        """Return the sequence that a request continues, or a new one; ``begin`` stores it.

        Raises:
            InvalidInput: the model has no state; the sequence has a running request.
            SequenceNotFound: no sequence has this name, or it belongs to another model.
        """
        self.expire()
        if not announced.manifest.extra.get("state"):
            raise InvalidInput(
                f'"{announced.base or announced.model}" was registered without a state',
                hint='register(…, state={"h": "h_out"})',
            )
        key = (caller, options.id)
        known = self.held.get(key)
        if known is not None and known.is_over and not known.is_busy:
            self.drop(known)
            known = None
        if known is not None and known.is_busy:
            raise InvalidInput(
                f'sequence "{options.id}" already has a running request', hint="wait for its answer"
            )
        if not options.starts:
            base = announced.base or announced.model
            if known is None or (known.announced.base or known.announced.model) != base:
                raise SequenceNotFound(f'no sequence "{options.id}" of "{base}"', hint=HINT)
            return known
        return self._made(key, client, announced)

    def _made(self, key: Key, client: Session, announced: ModelAvailable) -> SequenceState:
        self._number += 1
        return SequenceState(
            key=key,
            number=self._number,
            client=client,
            announced=announced,
            used_at_ms=self._now_ms(),
        )

    def _hold(self, sequence: SequenceState) -> None:
        """Store a sequence, which is busy now."""
        self.held[sequence.key] = self.held.pop(sequence.key, sequence)
        self._idle.pop(sequence, None)
        sequence.groups = sequence.groups or (
            self._models.setdefault(sequence.announced.model, SequenceGroup()),
            self._clients.setdefault(sequence.client, SequenceGroup()),
        )
        for group in sequence.groups:
            group.sequences[sequence.number] = sequence

    # ---- requests with a state -----------------------------------------------------------------

    def with_state(
        self,
        sequence: SequenceState,
        options: SequenceOptions,
        header: RequestHeader,
        frames: Sequence[Any],
    ) -> tuple[RequestHeader, list[Any]]:
        """Return a request's inputs and frames with the state added, as if the client had sent it.

        The first request may contain the state. A missing part begins as zeros, or without rows.

        Raises:
            InvalidInput: an input does not fit the model, a later request contains the state, or
            the state's initial shape is unknown.
        """
        manifest = sequence.announced.manifest
        brought = {one.name: one for one in header.inputs if one.name}
        if brought and len(brought) < len(header.inputs):
            raise InvalidInput(f"{header.model}: an input appears twice or has no name")
        if sequence.steps and (twice := brought.keys() & sequence.state.keys()):
            raise InvalidInput(
                f'"{min(twice)}" is the state of sequence "{sequence.key[1]}": only the request '
                "that starts the sequence may contain it"
            )
        own = [one for one in manifest.inputs if one.name not in sequence.state]
        if not brought and len(header.inputs) != len(own):
            names = ", ".join(f'"{one.name}"' for one in own)
            raise InvalidInput(f"{header.model} takes {names} in a sequence, and no other inputs")
        if not brought:
            pairs = zip(own, header.inputs, strict=True)
            brought = {
                spec.name: msgspec.structs.replace(one, name=spec.name) for spec, one in pairs
            }
        all_frames = list(frames)
        values = check_brought(header.model, brought, [*map(len, frames)], manifest)
        grows = {name for name, (_, axis) in sequence.state.items() if axis >= 0}
        first = {name: frames[brought.pop(name).frame] for name in grows & brought.keys()}
        inputs = [*brought.values()]
        for spec in manifest.inputs:
            if spec.name not in sequence.state or spec.name in brought:
                continue
            if (axis := sequence.state[spec.name][1]) >= 0:
                self._make_room(sequence, spec, axis, values, first.get(spec.name))
            value = sequence.values.get(spec.name)
            if value is not None:
                shape = value.shape
                size = ITEM_BYTES[spec.dtype] * math.prod(shape)
                memory = sequence.memory(self._pool)[value.offset_bytes :][:size]
                # for pieces, only the length of the data is used
                data: Any = range(size) if value.pieces else memory
            else:
                shape = _beginning(spec, values, sequence)
                data = bytes(ITEM_BYTES[spec.dtype] * math.prod(shape))
            inputs.append(
                WireTensor(name=spec.name, dtype=spec.dtype, shape=shape, frame=len(all_frames))
            )
            all_frames.append(data)
        return msgspec.structs.replace(header, inputs=tuple(inputs)), all_frames

    def refused(self, sequence: SequenceState) -> None:
        """Drop a sequence that a refused request would have started."""
        if self.held.get(sequence.key) is not sequence:
            self.drop(sequence)

    def begin(self, sequence: SequenceState, options: SequenceOptions) -> None:
        """Mark a sequence as busy with a request. A new one replaces another of its name."""
        known = self.held.get(sequence.key)
        if known is not None and known is not sequence:
            self.drop(known)
        sequence.is_busy, sequence.is_ending = True, options.ends
        self._hold(sequence)

    def ended(
        self,
        sequence: SequenceState,
        allocation: PoolAllocation | None,
        *,
        is_ok: bool,
        is_sent: bool,
    ) -> None:
        """Update a sequence at the end of its request, and free the reply's slab."""
        sequence.is_busy, sequence.used_at_ms = False, self._now_ms()
        outputs, sequence.made = sequence.made, {}
        is_here = self.held.get(sequence.key) is sequence
        is_last = sequence.is_left or sequence.is_over or (is_ok and sequence.is_ending)
        if is_ok and is_sent and is_here and not is_last:
            for name, grown in sequence.grown.items():
                rows = outputs.pop(name)
                self._pool.copy_rows(
                    sequence.announced.tenant,
                    sequence.values[name].places(sequence.values[name].size_bytes, rows.size_bytes),
                    sequence.memory(self._pool)[rows.offset_bytes :][: rows.size_bytes],
                )
                self.blocks.extend(grown, rows.size_bytes // grown.space.row_bytes)
            if outputs:
                allocation, sequence.allocation = sequence.allocation, allocation
                sequence.values |= outputs
                self._count(sequence, sequence.replaced_bytes)
            sequence.steps += 1
            self._steps += 1
        elif is_here and (not sequence.steps or not is_sent or is_last):
            self.drop(sequence)
        if self.held.get(sequence.key) is sequence:
            self._idle[sequence] = None
        if allocation is not None:
            self._pool.release_reply(allocation)

    @staticmethod
    def _count(sequence: SequenceState, size_bytes: int) -> None:
        for group in sequence.groups:
            group.size_bytes += size_bytes - sequence.counted_bytes
        sequence.counted_bytes = size_bytes

    def drop(self, sequence: SequenceState) -> None:
        """End a sequence. Blocks whose tokens are known stay cached."""
        if self.held.get(sequence.key) is sequence:
            del self.held[sequence.key]
            self._idle.pop(sequence, None)
            self._count(sequence, 0)
            of_model, of_client = sequence.groups
            for group in sequence.groups:
                group.sequences.pop(sequence.number, None)
            if not (of_model.sequences or of_model.is_gone):
                del self._models[sequence.announced.model]
            if not (of_client.sequences or of_client.is_gone):
                del self._clients[sequence.client]
        allocation, sequence.allocation = sequence.allocation, None
        if allocation is not None:
            self._pool.release_reply(allocation)
        tables, sequence.grown, sequence.values = sequence.grown, {}, {}
        for table in tables.values():
            self.blocks.close(table)
        if tables and self._pool.on_release is not None:  # requests may wait for memory
            self._pool.on_release()

    def as_dict(self) -> dict[str, Any]:
        """Return the sequences' part of ``stats``. Cached slabs of the pool count as free."""
        counts = Counter({"sequences": len(self.held), "sequence_steps": self._steps})
        for one in self.others:
            counts.update(one.as_dict())
        spare = len(self.blocks.unlocked)
        return {**counts, "sequences_by_model": self.by_model(), "pool_spare_slabs": spare}

    def by_model(self) -> dict[str, dict[str, int]]:
        """Return sequences, bytes and tokens by model; a shared block counts once."""
        nothing = {"sequences": 0, "sequence_bytes": 0, "spare_bytes": 0, "tokens": 0}
        rows: dict[str, dict[str, int]] = {}
        for name, group in self._models.items():
            row = rows.setdefault(name, dict(nothing))
            row |= {"sequence_bytes": group.size_bytes, "sequences": len(group.sequences)}
        for name, numbers in itertools.chain(*[one.by_model() for one in self.others]):
            row = rows.setdefault(name, dict(nothing))
            row |= {key: row[key] + count for key, count in numbers.items()}
        for name, of_model in self.blocks.models.items():
            row = rows.setdefault(name, dict(nothing))
            row["sequence_bytes"] += of_model.size_bytes - of_model.cached_bytes
            row["spare_bytes"] += of_model.cached_bytes
        return rows

    def retract(self, model: str) -> None:
        """End all sequences of a removed model and free its cached blocks."""
        for one in self.others:
            one.retract(model)
        self.blocks.remove(model)
        self._end_group(self._models.pop(model, None))

    def remove_client(self, client: Session) -> None:
        """End the sequences of a client that is gone; busy ones end with their request."""
        self._end_group(self._clients.pop(client, None))

    def _end_group(self, group: SequenceGroup | None) -> None:
        if group is not None:
            group.is_gone = True
            self._gone.append(group)
            self._sweep()

    def _sweep(self) -> bool:
        """Drop up to PIECE sequences of removed models and clients, and free a piece of the dead
        blocks. Return True if there are more."""
        for _ in range(PIECE):
            while self._gone and not self._gone[0].sequences:
                self._gone.popleft()
            if not self._gone:
                break
            _, sequence = self._gone[0].sequences.popitem()
            if not sequence.is_busy:  # otherwise it ends with its request
                self.drop(sequence)
        return self.blocks.sweep() or bool(self._gone)

    def _make_room(
        self, sequence: SequenceState, spec: ValueSpec, axis: int, values: Values, first: Any = None
    ) -> None:
        """Allocate memory for the answer's rows now, so that no shortage fails the request later.

        Args:
            first: the rows in the request that starts the sequence.

        Raises:
            QueueFull: the caller's share, or the pool, is used up.
            InvalidInput: the batch is not 1; the sequence is full; or it has no rows, and the model
                cannot distinguish zeros from rows.
        """
        manifest, (output, _) = sequence.announced.manifest, sequence.state[spec.name]
        (spec_out,) = [one for one in manifest.outputs if one.name == output]
        dim = next((one for one in manifest.dims if one.name == spec.shape[axis]), None)
        shape = [*spec.shape[:axis], dim.low if dim else spec.shape[axis], *spec.shape[axis + 1 :]]
        numbers = _beginning(msgspec.structs.replace(spec, shape=tuple(shape)), values, sequence)
        if math.prod(numbers[:axis]) != 1:
            raise InvalidInput(f'"{spec.name}" grows, so a sequence must have a batch of 1')
        row_bytes = ITEM_BYTES[spec.dtype] * math.prod(numbers[axis + 1 :])
        grown = sequence.grown.get(spec.name)
        used = grown.used if grown is not None else 0
        if first is not None:
            used = len(first) // row_bytes
        elif not (used or (dim is not None and dim.name in manifest.pads)):
            raise InvalidInput(
                f'"{spec.name}" has no rows yet, and the model needs at least {numbers[axis]}',
                hint=f'pass "{spec.name}" with the request that starts the sequence',
            )
        needed = max(used + shape_at(spec_out.shape, values)[axis], numbers[axis])
        most = dim.high if dim is not None else needed
        if needed > most:
            raise InvalidInput(
                f'"{spec.name}" would have {needed} rows; the model takes at most {most}',
                hint="start another sequence",
            )
        if grown is None:
            grown = sequence.grown[spec.name] = self._table(sequence, row_bytes, spec.name)
        self.blocks.resize(grown, needed)
        if first is not None:
            self.blocks.extend(grown, used)
        rows, is_padded = max(used, numbers[axis]), dim and dim.name in manifest.pads
        if is_padded and used:
            rows = min(aligned(rows, blocks.ROWS_STEP), most)
        lent_shape = (*numbers[:axis], rows, *numbers[axis + 1 :])
        sequence.values[spec.name] = grown.lent(spec, lent_shape)
        if first is not None:
            sequence.brought.append((spec.name, first))

    def _table(self, sequence: SequenceState, row_bytes: int, name: str) -> BlockTable:
        """Open an empty table. Tables of one caller and program share blocks."""
        announced = sequence.announced
        program = f"{announced.manifest.digest} {name}"
        return self.blocks.open(
            sequence.key[0], announced.model, announced.tenant, row_bytes, program
        )

    def expire(self) -> float:
        """Drop idle sequences and blocks; return the milliseconds until the next check is due."""
        now_ms, next_ms = self._now_ms(), IDLE_MS
        if self._sweep():
            return 0.0
        if now_ms < self._look_at_ms:
            return self._look_at_ms - now_ms
        if (due_ms := self.blocks.expire(IDLE_MS)) is not None:
            next_ms = min(next_ms, due_ms)
        for _ in range(PIECE):
            if (sequence := next(iter(self._idle), None)) is None:
                break
            left_ms = sequence.used_at_ms + IDLE_MS - now_ms
            if left_ms > 0:
                next_ms = min(next_ms, left_ms)
                break
            self.drop(sequence)
        else:
            next_ms = 0.0
        self._look_at_ms = now_ms + next_ms
        return next_ms

    def end(self, name: str, caller: str) -> Token | None:
        """End a sequence at its client's request: now, or after its running request.
        For another request, return its token: the caller must cancel it.

        Raises:
            SequenceNotFound: the caller has no sequence of this name.
        """
        sequence = self.held.get((caller, name))
        if sequence is None:
            for one in self.others:
                if (token := one.find(name, caller)) is not None:
                    return token
            raise SequenceNotFound(f'no sequence "{name[:80]}"', hint=HINT)
        if sequence.is_busy:
            sequence.is_left = True
        else:
            self.drop(sequence)
        return None

    def rows(self, caller: str | None) -> Iterator[list[dict[str, Any]]]:
        """Yield the rows of ``pipeswitch sequences``, for one caller or for all, in pieces."""
        self.expire()
        sequences = [*self.held.values()]
        rows = itertools.chain(
            (None if one.is_over else one.row(self._now_ms()) for one in sequences),
            *[one.rows() for one in self.others],
        )
        while piece := [*itertools.islice(rows, ROWS_PIECE)]:
            yield [row for row in piece if row and caller in (None, row["tenant"])]


def _beginning(spec: ValueSpec, values: Values, sequence: SequenceState) -> tuple[int, ...]:
    try:
        return shape_at(spec.shape, values)
    except NoExtent:
        raise InvalidInput(
            f'the shape of "{spec.name}" cannot be derived from the other inputs',
            hint=f'the request that starts sequence "{sequence.key[1]}" must contain it',
        ) from None
