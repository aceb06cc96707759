"""Sequences: requests that go on from what the one before left (``register(…, state=…)``).

A sequence keeps the outputs that are its state where its worker wrote them, in the request pool,
and its next request brings them along as inputs. So the scheduler sees ordinary requests, and
a worker that dies costs nothing: the request is computed again from the same bytes. What a
sequence holds is of its caller's share of the pool.

It has one request at a time. One that fails leaves the state as it was. An answer that did not
reach its client ends the sequence: nobody could say which step it is at.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import msgspec

from ..errors import InvalidInput, SequenceNotFound, TaskFailed
from ..ipc.messages import SlabTensor
from ..programs.dims import NoExtent, Values, match, shape_at
from ..programs.layout import ITEM_BYTES, TENSOR_ALIGN_BYTES, ValueSpec, aligned
from ..scheduler.events import Announce, Answer
from ..units import printable
from ..wire.frames import RequestHeader, WireTensor
from .admission import Admitted, Body
from .clients import Client
from .request_pool import RequestPool, Room

MAX_ID: Final = 64
LEAST_ROWS: Final = 64  # of what grows
ROWS_STEP: Final = 32  # what may be padded grows by so many: most steps have the last one's shape
IDLE_MS: Final = 300_000.0  # one that nobody asks so long is abandoned
HINT: Final = "start another one: it ended, was idle for 5 minutes, or the server began again"

Key = tuple[str, str]  # who asks, and what it calls the sequence


class Grown(msgspec.Struct, kw_only=True, eq=False):
    """State that grows along one dimension, such as a cache: rows after rows."""

    room: Room  # its inputs' slab
    row_bytes: int
    capacity: int  # rows
    least: int  # that its input has: of zeros, until there are as many
    used: int = 0

    def has_room_for(self, made: SlabTensor | None) -> bool:
        """Whether these are whole rows, no more than were foreseen."""
        if made is None:
            return False
        left_bytes = (self.capacity - self.used) * self.row_bytes
        return made.size_bytes <= left_bytes and made.size_bytes % self.row_bytes == 0


class Held(msgspec.Struct, kw_only=True, eq=False):
    """One sequence."""

    key: Key
    number: int  # the scheduler's name for it
    client: Client
    announced: Announce  # the version that it began with
    used_at_ms: float
    values: dict[str, SlabTensor] = {}  # by the input that each will be
    room: Room | None = None  # where those that are replaced lie
    grown: dict[str, Grown] = {}  # where those lie that grow
    made: dict[str, SlabTensor] = {}  # by the request that is being answered
    steps: int = 0  # that were answered
    is_busy: bool = False
    is_ending: bool = False  # with the request that it has

    @property
    def state(self) -> Mapping[str, tuple[str, int]]:
        """Its inputs, the outputs that they come from, and the dimension that grows by those."""
        found: Mapping[str, tuple[str, int]] = self.announced.manifest.extra["state"]
        return found

    def apart(self, admitted: Admitted) -> Admitted:
        """Less what is not copied into the request's own room. An operator's module may write to
        its inputs, so it has copies."""
        if self.announced.manifest.mode == "module":
            return admitted
        inputs, offset = [], 0
        for one in admitted.inputs:
            if one.name not in self.values:
                inputs.append(replace(one, offset_bytes=offset))
                offset += aligned(one.size_bytes, TENSOR_ALIGN_BYTES)
        return replace(admitted, inputs=tuple(inputs), input_bytes=offset)

    def among(self, placed: Sequence[SlabTensor]) -> tuple[SlabTensor, ...]:
        """All inputs in order: those that were placed, and the state where it lies."""
        known = self.values | {one.name: one for one in placed}
        return tuple(known[one.name] for one in self.announced.manifest.inputs)

    def answered(self, answer: Answer) -> Answer:
        """What its client gets: the state stays. What a worker claims may be wrong: then it is as
        before, and the answer says so."""
        if answer.error is not None:
            return answer
        by_output = {output: name for name, (output, _) in self.state.items()}
        made = {by_output[one.name]: one for one in answer.outputs if one.name in by_output}
        fits = all(grown.has_room_for(made.get(name)) for name, grown in self.grown.items())
        if made.keys() != self.state.keys() or not fits:
            error = TaskFailed(f'sequence "{self.key[1]}": the worker left no such state')
            return Answer(token=answer.token, error=error)
        self.made = made
        told = tuple(one for one in answer.outputs if one.name not in by_output)
        body = {key: value for key, value in answer.body.items() if key != "returns"}
        return msgspec.structs.replace(answer, outputs=told, body=body)


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What a request says of its sequence."""

    id: str
    starts: bool
    ends: bool


def asked_of(body: Body) -> Asked | None:
    """None: it stands alone. Raises InvalidInput."""
    name = body.text("sequence", "")
    starts, ends = body.flag("start"), body.flag("end")
    if not name:
        if starts or ends:
            raise InvalidInput("infer: start and end are of a sequence", hint="name its sequence")
        return None
    if len(name) > MAX_ID or printable(name, keep="") != name:
        raise InvalidInput(f"infer: a sequence has a name of at most {MAX_ID} printable characters")
    return Asked(id=name, starts=starts, ends=ends)


class Sequences:
    """All of them, in the order in which they were used."""

    def __init__(self, pool: RequestPool, now_ms: Callable[[], float]) -> None:
        self._pool, self._now_ms = pool, now_ms
        self.held: dict[Key, Held] = {}
        self._look_at_ms = 0.0  # none is abandoned before
        self._number = 0

    def of(self, asked: Asked, client: Client, caller: str, announced: Announce) -> Held:
        """The sequence that a request goes on with, or a new one, which ``begin`` will keep.

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
        self._number += 1
        return Held(key=key, number=self._number, client=client, announced=announced,
                    used_at_ms=self._now_ms())  # fmt: skip

    def given(
        self, held: Held, header: RequestHeader, frames: Sequence[Any]
    ) -> tuple[RequestHeader, list[Any]]:
        """A request's inputs and frames with the state among them, as if its client had sent it.

        The first request may bring it; what it does not bring begins as zeros.

        Raises:
            InvalidInput: a later one brings it too, or the shape that it begins with is unknown.
        """
        manifest = held.announced.manifest
        brought = {one.name: one for one in header.inputs if one.name}
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
        all_frames, inputs = list(frames), [*brought.values()]
        values = _values(own, brought)
        for spec in manifest.inputs:
            axis = held.state[spec.name][1] if spec.name in held.state else -1
            if axis >= 0 and spec.name in brought:
                raise InvalidInput(f'"{spec.name}" grows from nothing', hint="leave it out")
            if spec.name not in held.state or spec.name in brought:
                continue
            if axis >= 0:
                self._make_room(held, spec, axis, values)
            kept = held.values.get(spec.name)
            if kept is not None:
                shape = kept.shape
                data: Any = self._memory(held)[kept.offset_bytes :][: kept.size_bytes]
            else:
                shape = _beginning(spec, values, held)
                data = bytes(ITEM_BYTES[spec.dtype] * math.prod(shape))
            inputs.append(
                WireTensor(name=spec.name, dtype=spec.dtype, shape=shape, frame=len(all_frames))
            )
            all_frames.append(data)
        return msgspec.structs.replace(header, inputs=tuple(inputs)), all_frames

    def refused(self, held: Held) -> None:
        """The request was not accepted: one that it would have started holds nothing."""
        if self.held.get(held.key) is not held:
            self.drop(held)

    def begin(self, held: Held, asked: Asked) -> None:
        """Its request was accepted. One that starts replaces another of this name."""
        known = self.held.get(held.key)
        if known is not None and known is not held:
            self.drop(known)
        held.is_busy, held.is_ending = True, asked.ends
        self.held[held.key] = self.held.pop(held.key, held)

    def ended(self, held: Held, room: Room | None, *, is_ok: bool, is_sent: bool) -> None:
        """Its request is over, and the room of the reply is this one's to give back."""
        held.is_busy, held.used_at_ms = False, self._now_ms()
        made, held.made = held.made, {}
        is_here = self.held.get(held.key) is held
        if is_ok and is_sent and is_here and not held.is_ending:
            for name, grown in held.grown.items():
                self._append(held, name, grown, made.pop(name))
            if made:
                room, held.room = held.room, room
                held.values |= made
            held.steps += 1
        elif is_here and (not held.steps or not is_sent or (is_ok and held.is_ending)):
            self.drop(held)
        if room is not None:
            self._pool.release_reply(room)

    def drop(self, held: Held) -> None:
        """It is over; what it holds is free."""
        if self.held.get(held.key) is held:
            del self.held[held.key]
        room, held.room = held.room, None
        if room is not None:
            self._pool.release_reply(room)
        for grown in held.grown.values():
            self._give(grown.room)
        held.grown = {}

    def _give(self, room: Room) -> None:
        self._pool.release_inputs(room)
        self._pool.release_reply(room)

    def _memory(self, held: Held) -> memoryview:
        return self._pool.memory_of_tenant(held.announced.tenant)

    def _make_room(self, held: Held, spec: ValueSpec, axis: int, values: Values) -> None:
        """For the rows of the answer to come, so that it cannot fail then; they double.

        Raises:
            QueueFull: over its caller's share of the pool.
            InvalidInput: it is of several rows, which would grow side by side; or it is full.
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
        wanted = max(used + shape_at(made.shape, values)[axis], numbers[axis])
        if dim is not None and wanted > dim.high:
            raise InvalidInput(
                f'"{spec.name}" would have {wanted} rows, the model takes {dim.high}',
                hint="start another sequence",
            )
        if grown is None or wanted > grown.capacity:
            most = dim.high if dim is not None else wanted
            capacity = min(max(2 * wanted, LEAST_ROWS), most)
            room = self._pool.reserve(held.key[0], row_bytes * capacity, 0, held.announced.tenant)
            at, memory = room.input_offset_bytes, self._memory(held)
            memory[at : at + row_bytes * capacity] = bytes(row_bytes * capacity)
            if grown is not None:
                old, size = grown.room.input_offset_bytes, row_bytes * used
                memory[at : at + size] = memory[old : old + size]
                self._give(grown.room)
            grown = Grown(
                room=room, row_bytes=row_bytes, capacity=capacity, least=numbers[axis], used=used
            )
            held.grown[spec.name] = grown
        rows = max(grown.used, grown.least)
        if grown.used and dim is not None and dim.name in manifest.pads:
            rows = min(aligned(rows, ROWS_STEP), grown.capacity)
        held.values[spec.name] = SlabTensor(
            name=spec.name, dtype=spec.dtype,
            shape=(*numbers[:axis], rows, *numbers[axis + 1 :]),
            offset_bytes=grown.room.input_offset_bytes, size_bytes=row_bytes * rows,
        )  # fmt: skip

    def _append(self, held: Held, name: str, grown: Grown, made: SlabTensor) -> None:
        memory = self._memory(held)
        at = grown.room.input_offset_bytes + grown.row_bytes * grown.used
        rows = memory[made.offset_bytes : made.offset_bytes + made.size_bytes]
        memory[at : at + made.size_bytes] = rows
        grown.used += made.size_bytes // grown.row_bytes

    def forget(self, client: Client) -> None:
        """Of a client that is gone: those without a request; the others end with it."""
        for held in [one for one in self.held.values() if one.client is client]:
            if not held.is_busy:
                self.drop(held)

    def expire(self) -> float:
        """Drop those that were abandoned; milliseconds until the next one may be."""
        now_ms, next_ms = self._now_ms(), IDLE_MS
        if now_ms < self._look_at_ms:
            return self._look_at_ms - now_ms
        for held in list(self.held.values()):
            left_ms = held.used_at_ms + IDLE_MS - now_ms
            if held.is_busy:
                continue
            if left_ms <= 0:
                self.drop(held)
            else:
                next_ms = min(next_ms, left_ms)
        self._look_at_ms = now_ms + next_ms
        return next_ms

    def end(self, name: str, caller: str) -> None:
        """As its client asks, without a request.

        Raises:
            SequenceNotFound, InvalidInput.
        """
        held = self.held.get((caller, name))
        if held is None:
            raise SequenceNotFound(f'no sequence "{name[:80]}"', hint=HINT)
        if held.is_busy:
            raise InvalidInput(f'sequence "{name}" has a request under way', hint="cancel it first")
        self.drop(held)

    def rows(self, caller: str | None) -> list[dict[str, Any]]:
        """As ``pipeswitch sequences`` shows them; of one caller, or all."""
        self.expire()
        now_ms = self._now_ms()
        return [
            {
                "id": held.key[1],
                "model": held.announced.base or held.announced.model,
                "version": held.announced.version,
                "tenant": held.key[0],
                "steps": held.steps,
                "bytes": _bytes(held),
                "idle_ms": 0.0 if held.is_busy else now_ms - held.used_at_ms,
            }
            for held in self.held.values()
            if caller is None or held.key[0] == caller
        ]


def _bytes(held: Held) -> int:
    """Of the pool."""
    grown = sum(one.room.held_bytes for one in held.grown.values())
    replaced = [one for name, one in held.values.items() if name not in held.grown]
    return grown + sum(one.size_bytes for one in replaced)


def _values(own: Sequence[ValueSpec], brought: Mapping[str, WireTensor]) -> Values:
    """What the open dimensions are, as far as the client's own inputs say; all that fit."""
    values: dict[str, int] = {}
    for spec in own:
        one = brought.get(spec.name)
        if one is not None:
            match(spec.shape, one.shape, values)
    return values


def _beginning(spec: ValueSpec, values: Values, held: Held) -> tuple[int, ...]:
    try:
        return shape_at(spec.shape, values)
    except NoExtent:
        raise InvalidInput(
            f'the shape of "{spec.name}" does not follow from the other inputs',
            hint=f'the request that starts sequence "{held.key[1]}" must bring it',
        ) from None
