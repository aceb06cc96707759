"""Sequences: requests that continue from the state of the one before (``register(…, state=…)``).

A sequence keeps the outputs that are its state where its worker wrote them, in the request pool,
and its next request gets them as inputs. So the scheduler sees ordinary requests, and a worker that
dies costs nothing: the request is computed again from the same bytes.

The state counts toward its caller's share of the pool. A sequence has one request at a time. A
failed request leaves the state as it was. An answer that did not reach its client ends the
sequence: its client could not know its step.

A generation's cache is a sequence too (``open``, ``fit``, ``append``). When it has ended it stays
as a *spare* until its memory is needed: a generation of the same caller that begins with the same
tokens takes it over, or copies the rows of one that still runs (``reuse``). Large copies are made
by another thread (``copy``), before the request is computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from ...base.errors import InvalidInput, SequenceNotFound
from ...ipc.messages.base import SlabTensor
from ...programs.decoding.generation import CACHE, MOST_STEPS
from ...programs.interface.dims import NoExtent, Values, shape_at
from ...programs.interface.layout import ITEM_BYTES, Manifest, ValueSpec, aligned
from ...scheduler.events import Announce, Token
from ...wire.frames import RequestHeader, WireTensor
from ..admission import check_brought
from ..request_pool import RequestPool, Room
from ..transport.clients import Client
from .held import MAX_STEP_TOKENS, NO_TOKENS, Asked, Grown, Held, Key
from .prefixes import BLOCK, TOKEN_BYTES, Prefixes

ROWS_STEP: Final = 16  # what grows does by so many: most steps have the last one's shape
SPARE_SHARE: Final = 16  # or by such a part: each row is moved 16 times at most, half of it unused
MOST_SPARES: Final = 128
PIECES: Final = 8  # a step's rows are such a part of the longest cache at most
SMALL_BYTES: Final = 64 << 10  # limit of a step's request without its ids and rows
IDLE_MS: Final = 300_000.0  # one that nobody asks so long is abandoned
HINT: Final = "start another one: it ended, was idle for 5 minutes, or the server began again"


class Sequences:
    """All sequences, in the order of their last use."""

    def __init__(self, pool: RequestPool, now_ms: Callable[[], float]) -> None:
        self._pool, self._now_ms = pool, now_ms
        self.held: dict[Key, Held] = {}
        self.spare: dict[int, Held] = {}  # by identity; the one that ended first is first
        self._prefixes = Prefixes()
        self._steps = self._tokens_reused = 0
        self._tokens: dict[str, int] = {}  # that were answered, by language model
        pool.give_up = self._give_up
        self._look_at_ms = 0.0  # none is abandoned before
        self._number = 0

    def of(self, asked: Asked, client: Client, caller: str, announced: Announce) -> Held:
        """Return the sequence that a request continues, or a new one, which ``begin`` will keep.

        Raises:
            InvalidInput: the model has no state; another request is under way.
            SequenceNotFound: there is none of this name, or it is another model's.
        """
        self.expire()
        if not announced.manifest.extra.get("state"):
            raise InvalidInput(
                f'"{announced.base or announced.model}" was registered without a state',
                hint='register(…, state={"h": "h_out"})',
            )
        key = (caller, asked.id)
        known = self.held.get(key)
        if known is not None and known.is_busy:
            raise InvalidInput(
                f'sequence "{asked.id}" has a request under way', hint="wait for its answer"
            )
        if not asked.starts:
            base = announced.base or announced.model
            if known is None or (known.announced.base or known.announced.model) != base:
                raise SequenceNotFound(f'no sequence "{asked.id}" of "{base}"', hint=HINT)
            return known
        return self._made(key, client, announced)

    def _made(self, key: Key, client: Client, announced: Announce) -> Held:
        self._number += 1
        return Held(
            key=key,
            number=self._number,
            client=client,
            announced=announced,
            used_at_ms=self._now_ms(),
        )

    # ---- requests with a state -----------------------------------------------------------------

    def given(
        self, held: Held, asked: Asked, header: RequestHeader, frames: Sequence[Any]
    ) -> tuple[RequestHeader, list[Any]]:
        """Return a request's inputs and frames with the state added, as if the client had sent it.

        The first request may contain the state. The rest begins as zeros, or without rows.

        Raises:
            InvalidInput: an input does not fit the model, a later request contains the state, or
            the state's initial shape is unknown.
        """
        manifest = held.announced.manifest
        brought = {one.name: one for one in header.inputs if one.name}
        if brought and len(brought) < len(header.inputs):
            raise InvalidInput(f"{header.model}: an input appears twice or has no name")
        if held.steps and (twice := brought.keys() & held.state.keys()):
            raise InvalidInput(
                f'"{min(twice)}" is the state of sequence "{held.key[1]}": only the request that '
                "starts it may bring that"
            )
        own = [one for one in manifest.inputs if one.name not in held.state]
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
        grows = {name for name, (_, axis) in held.state.items() if axis >= 0}
        first = {name: frames[brought.pop(name).frame] for name in grows & brought.keys()}
        inputs = [*brought.values()]
        for spec in manifest.inputs:
            if spec.name not in held.state or spec.name in brought:
                continue
            if (axis := held.state[spec.name][1]) >= 0:
                self._make_room(held, spec, axis, values, first.get(spec.name))
            kept = held.values.get(spec.name)
            if kept is not None:
                shape = kept.shape
                data: Any = held.memory(self._pool)[kept.offset_bytes :][: kept.size_bytes]
            else:
                shape = _beginning(spec, values, held)
                data = bytes(ITEM_BYTES[spec.dtype] * math.prod(shape))
            inputs.append(
                WireTensor(name=spec.name, dtype=spec.dtype, shape=shape, frame=len(all_frames))
            )
            all_frames.append(data)
        return msgspec.structs.replace(header, inputs=tuple(inputs)), all_frames

    def _forget_tokens(self, held: Held) -> None:
        """Drop a sequence's token history: the content of its rows is unknown from now on."""
        if held.history is not None:
            self._prefixes.remove(held.history)
        held.history = None

    def copied(self, held: Held) -> None:
        """Release the donors of a finished copy."""
        donors, held.donors, held.copies = held.donors, [], []
        for donor in donors:
            donor.pins -= 1
        for one in (held, *donors):
            self._let_go(one)

    def _let_go(self, held: Held) -> None:
        """Release rooms that are no longer copied from: all rooms if the sequence is over."""
        if held.pins or held.copies:
            return
        rooms, held.leaving = held.leaving, []
        if self.held.get(held.key) is not held and id(held) not in self.spare:
            rooms += [grown.room for grown in held.grown.values()]
            held.grown = {}
        for room in rooms:
            self._pool.release_inputs(room)
            self._pool.release_reply(room)

    def refused(self, held: Held) -> None:
        """Drop a sequence that a refused request would have started."""
        if self.held.get(held.key) is not held:
            self.drop(held)

    def begin(self, held: Held, asked: Asked) -> None:
        """Note the accepted request. A starting sequence replaces another one of its name."""
        known = self.held.get(held.key)
        if known is not None and known is not held:
            self.drop(known)
        held.is_busy, held.is_ending = True, asked.ends
        self.held[held.key] = self.held.pop(held.key, held)

    def ended(self, held: Held, room: Room | None, *, is_ok: bool, is_sent: bool) -> None:
        """Note the end of its request, and release the reply's room."""
        held.is_busy, held.used_at_ms = False, self._now_ms()
        made, held.made = held.made, {}
        is_here = self.held.get(held.key) is held
        is_last = held.is_left or (is_ok and held.is_ending)
        if is_ok and is_sent and is_here and not is_last:
            for name, grown in held.grown.items():
                grown.append(held.memory(self._pool), made.pop(name))
            if made:
                room, held.room = held.room, room
                held.values |= made
            held.epoch = held.run
            held.steps += 1
            self._steps += 1
        elif is_here and (not held.steps or not is_sent or is_last):
            self.drop(held)
        if room is not None:
            self._pool.release_reply(room)

    def drop(self, held: Held) -> None:
        """End a sequence; its memory is free as soon as it is not copied from any more."""
        if self.held.get(held.key) is held:
            del self.held[held.key]
        self.spare.pop(id(held), None)
        self._forget_tokens(held)
        room, held.room = held.room, None
        if room is not None:
            self._pool.release_reply(room)
        self.copied(held)

    def retire(self, held: Held) -> None:
        """End a sequence. A generation's becomes a spare, if its tokens are known."""
        tokens = held.history.tokens if held.history is not None else NO_TOKENS
        is_whole = not held.copies and all(one.used == len(tokens) for one in held.grown.values())
        if len(tokens) < BLOCK or not is_whole:
            self.drop(held)
            return
        self.held.pop(held.key, None)
        held.used_at_ms = self._now_ms()
        self.spare[id(held)] = held
        if self._pool.on_release is not None:
            self._pool.on_release()
        if len(self.spare) > MOST_SPARES:
            self._give_up()

    def _give_up(self) -> bool:
        """Drop the oldest spare to free its memory. False: there is none."""
        held = next(iter(self.spare.values()), None)
        if held is not None:
            self.drop(held)
        return held is not None

    def as_dict(self) -> dict[str, Any]:
        """Return the sequences' part of ``stats``. Spares' slabs of the pool count as free."""
        return {
            "sequences": len(self.held),
            "sequences_by_model": self.by_model(),
            "sequence_steps": self._steps,
            "tokens_reused": self._tokens_reused,
            "pool_spare_slabs": sum(2 * len(one.grown) for one in self.spare.values()),
        }

    def by_model(self) -> dict[str, dict[str, int]]:
        """Return live sequences, bytes of them and of spares, and tokens so far, by model."""
        nothing = {"sequences": 0, "sequence_bytes": 0, "spare_bytes": 0, "tokens": 0}
        found = {name: nothing | {"tokens": count} for name, count in self._tokens.items()}
        for held in (*self.held.values(), *self.spare.values()):
            row = found.setdefault(held.announced.model, dict(nothing))
            is_spare = id(held) in self.spare
            row["spare_bytes" if is_spare else "sequence_bytes"] += held.size_bytes
            row["sequences"] += not is_spare
        return found

    def retract(self, model: str) -> None:
        """End all sequences and spares of a removed model: a later model may have its name."""
        self._tokens.pop(model, None)
        for held in (*self.held.values(), *self.spare.values()):
            if held.announced.model == model:
                self._forget_tokens(held)  # it leaves no spare
                held.is_left = True
                if not held.is_busy:
                    self.drop(held)

    def _make_room(
        self, held: Held, spec: ValueSpec, axis: int, values: Values, first: Any = None
    ) -> None:
        """Make room for the rows of the answer to come, so that it cannot fail then.

        Args:
            first: the rows in the request that starts the sequence.

        Raises:
            QueueFull: over its caller's share of the pool.
            InvalidInput: the sequence has several rows, which would grow side by side; it is full;
            or it has no rows, and the model cannot distinguish zeros from rows.
        """
        manifest, (output, _) = held.announced.manifest, held.state[spec.name]
        (made,) = [one for one in manifest.outputs if one.name == output]
        dim = next((one for one in manifest.dims if one.name == spec.shape[axis]), None)
        shape = [*spec.shape[:axis], dim.low if dim else spec.shape[axis], *spec.shape[axis + 1 :]]
        numbers = _beginning(msgspec.structs.replace(spec, shape=tuple(shape)), values, held)
        if math.prod(numbers[:axis]) != 1:
            raise InvalidInput(f'"{spec.name}" grows: a sequence of it has a batch of 1')
        row_bytes = ITEM_BYTES[spec.dtype] * math.prod(numbers[axis + 1 :])
        grown = held.grown.get(spec.name)
        used = grown.used if grown is not None else 0
        if first is not None:
            used = len(first) // row_bytes
        elif not (used or (dim is not None and dim.name in manifest.pads)):
            raise InvalidInput(
                f'"{spec.name}" has no rows yet, and the model takes {numbers[axis]} at least',
                hint=f'pass "{spec.name}" with the request that starts the sequence',
            )
        wanted = max(used + shape_at(made.shape, values)[axis], numbers[axis])
        most = dim.high if dim is not None else wanted
        if wanted > most:
            raise InvalidInput(
                f'"{spec.name}" would have {wanted} rows, the model takes {most}',
                hint="start another sequence",
            )
        if grown is None or wanted > grown.capacity:
            grown = self._larger(held, grown, row_bytes, wanted, most, first)
            held.grown[spec.name] = grown
            grown.least, grown.used = numbers[axis], used
        rows, is_padded = max(grown.used, grown.least), dim and dim.name in manifest.pads
        if is_padded and grown.used:  # zeros
            rows = min(aligned(rows, ROWS_STEP), grown.capacity)
        held.values[spec.name] = SlabTensor(
            name=spec.name, dtype=spec.dtype,
            shape=(*numbers[:axis], rows, *numbers[axis + 1 :]),
            offset_bytes=grown.room.input_offset_bytes, size_bytes=row_bytes * rows,
        )  # fmt: skip

    def _larger(
        self, held: Held, grown: Grown | None, row_bytes: int, wanted: int, most: int, first: Any
    ) -> Grown:
        """Return room for ``wanted`` rows and some more, at most ``most``, and record the copies
        that it needs. Raises like ``_make_room``."""
        manifest, tenant, token_bytes = held.announced.manifest, held.announced.tenant, 0
        if manifest.extra.get("generation"):
            token_bytes = 2 * TOKEN_BYTES  # of its history, and of the ids so far
            most = max(wanted, longest(manifest, self._pool.share_bytes)[0])
        rows_more = max(ROWS_STEP, aligned(wanted // SPARE_SHARE, ROWS_STEP))
        capacity = min(aligned(wanted, rows_more), most)
        size = 0 if grown is None else row_bytes * grown.capacity
        beside = token_bytes * capacity
        if grown is not None and self._pool.grow(grown.room, row_bytes * capacity, beside):
            room = grown.room
        else:
            room = self._pool.reserve(held.key[0], row_bytes * capacity, 0, tenant, beside)
        at = room.input_offset_bytes
        if grown is not None and room is not grown.room:  # with what lies ahead
            held.copies.append((at, grown.room.input_offset_bytes, size))
            held.leaving.append(grown.room)
        held.copies.append((at + size, None, row_bytes * capacity - size))
        if first is not None:
            held.copies.append((at, first, len(first)))
        stale = grown.stale if grown is not None else 0
        return Grown(room=room, row_bytes=row_bytes, capacity=capacity, least=0, stale=stale)

    def forget(self, client: Client) -> None:
        """Retire the idle sequences of a client that is gone; busy ones end with their request."""
        for held in [one for one in self.held.values() if one.client is client]:
            if not held.is_busy:
                self.retire(held)

    def expire(self) -> float:
        """Drop abandoned sequences; return the milliseconds until the next one may be dropped."""
        now_ms, next_ms = self._now_ms(), IDLE_MS
        if now_ms < self._look_at_ms:
            return self._look_at_ms - now_ms
        for held in (*self.held.values(), *self.spare.values()):
            left_ms = held.used_at_ms + IDLE_MS - now_ms
            if held.is_busy:
                continue
            if left_ms <= 0:
                self.drop(held)
            else:
                next_ms = min(next_ms, left_ms)
        self._look_at_ms = now_ms + next_ms
        return next_ms

    def end(self, name: str, caller: str) -> Token | None:
        """End a sequence at its client's request, after a request that is under way; for a
        generation, return the request that must be cancelled.

        Raises:
            SequenceNotFound: there is none.
        """
        held = self.held.get((caller, name))
        if held is None:
            raise SequenceNotFound(f'no sequence "{name[:80]}"', hint=HINT)
        if held.is_busy:
            held.is_left = True
        else:
            self.retire(held)
        return held.token

    def rows(self, caller: str | None) -> list[dict[str, Any]]:
        """Return the rows of ``pipeswitch sequences``, for one caller or for all."""
        self.expire()
        now_ms = self._now_ms()
        return [
            held.row(now_ms)
            for held in self.held.values()
            if caller is None or held.key[0] == caller
        ]


def longest(manifest: Manifest, share_bytes: int) -> tuple[int, int]:
    """Return the maximum number of tokens of a language model's answer with its prompt, and of
    a step, such that its cache and request fit a caller's share of the pool."""
    high = {dim.name: dim.high for dim in manifest.dims}
    (cache,) = [one for one in manifest.inputs if one.name == CACHE]
    row_bytes = ITEM_BYTES[cache.dtype] * shape_at(cache.shape[2:], {})[0]
    rows = (share_bytes - SMALL_BYTES) // (row_bytes + 2 * TOKEN_BYTES)
    piece = min(high["length"], MAX_STEP_TOKENS, max(ROWS_STEP, rows // PIECES))
    beside = max(piece, MOST_STEPS) + piece * ITEM_BYTES["int64"] // row_bytes
    return min(high["past"], max(0, rows - beside)), piece


def _beginning(spec: ValueSpec, values: Values, held: Held) -> tuple[int, ...]:
    try:
        return shape_at(spec.shape, values)
    except NoExtent:
        raise InvalidInput(
            f'the shape of "{spec.name}" does not follow from the other inputs',
            hint=f'the request that starts sequence "{held.key[1]}" must bring it',
        ) from None
