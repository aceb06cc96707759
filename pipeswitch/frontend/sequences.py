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
from typing import Any, Final

import msgspec

from ..errors import InvalidInput, SequenceNotFound
from ..ipc.messages import SlabTensor
from ..programs.dims import NoExtent, Values, match, shape_at
from ..programs.layout import ITEM_BYTES, ValueSpec
from ..scheduler.events import Announce, Answer
from ..units import printable
from ..wire.frames import RequestHeader, WireTensor
from .admission import Body
from .clients import Client
from .request_pool import RequestPool, Room

MAX_ID: Final = 64
IDLE_MS: Final = 300_000.0  # one that nobody asks so long is abandoned
HINT: Final = "start another one: it ended, was idle for 5 minutes, or the server began again"

Key = tuple[str, str]  # who asks, and what it calls the sequence


class Held(msgspec.Struct, kw_only=True, eq=False):
    """One sequence."""

    key: Key
    client: Client
    announced: Announce  # the version that it began with
    used_at_ms: float
    values: dict[str, SlabTensor] = {}  # by the input that each will be
    room: Room | None = None  # where they lie; None: it has had no answer yet
    made: dict[str, SlabTensor] = {}  # by the request that is being answered
    steps: int = 0  # that were answered
    is_busy: bool = False
    is_ending: bool = False  # with the request that it has

    @property
    def state(self) -> Mapping[str, str]:
        """Its inputs, and the outputs that they come from."""
        found: Mapping[str, str] = self.announced.manifest.extra["state"]
        return found

    def answered(self, answer: Answer) -> Answer:
        """What its client gets: the state stays."""
        if answer.error is not None:
            return answer
        by_output = {output: name for name, output in self.state.items()}
        self.made = {by_output[one.name]: one for one in answer.outputs if one.name in by_output}
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
        return Held(key=key, client=client, announced=announced, used_at_ms=self._now_ms())

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
        if held.room is not None and (twice := brought.keys() & held.state.keys()):
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
        memory = self._pool.memory_of(held.room)
        values = _values(own, brought)
        for spec in manifest.inputs:
            if spec.name not in held.state or spec.name in brought:
                continue
            kept = held.values.get(spec.name)
            if kept is not None:
                shape = kept.shape
                data: Any = memory[kept.offset_bytes :][: kept.size_bytes]
            else:
                shape = _beginning(spec, values, held)
                data = bytes(ITEM_BYTES[spec.dtype] * math.prod(shape))
            inputs.append(
                WireTensor(name=spec.name, dtype=spec.dtype, shape=shape, frame=len(all_frames))
            )
            all_frames.append(data)
        return msgspec.structs.replace(header, inputs=tuple(inputs)), all_frames

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
            room, held.room = held.room, room
            held.values = made
            held.steps += 1
        elif is_here and (held.room is None or not is_sent or (is_ok and held.is_ending)):
            self.drop(held)
        if room is not None:
            self._pool.release_reply(room)

    def drop(self, held: Held) -> None:
        """It is over; what it holds is free."""
        del self.held[held.key]
        room, held.room = held.room, None
        if room is not None:
            self._pool.release_reply(room)

    def forget(self, client: Client) -> None:
        """Of a client that is gone: those without a request; the others end with it."""
        for held in [one for one in self.held.values() if one.client is client]:
            if not held.is_busy:
                self.drop(held)

    def expire(self) -> float:
        """Drop those that were abandoned; milliseconds until the next one may be."""
        now_ms, next_ms = self._now_ms(), IDLE_MS
        for held in list(self.held.values()):
            left_ms = held.used_at_ms + IDLE_MS - now_ms
            if held.is_busy:
                continue
            if left_ms <= 0:
                self.drop(held)
            else:
                next_ms = min(next_ms, left_ms)
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
                "bytes": sum(one.size_bytes for one in held.values.values()),
                "idle_ms": 0.0 if held.is_busy else now_ms - held.used_at_ms,
            }
            for held in self.held.values()
            if caller is None or held.key[0] == caller
        ]


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
