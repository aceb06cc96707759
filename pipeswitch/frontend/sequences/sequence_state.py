"""One sequence: its state between requests, and the fields of a request about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import msgspec

from ...base.errors import InvalidInput, TaskFailed
from ...base.units import escape_control_chars
from ...ipc.messages.base import SlabTensor
from ...programs.interface.layout import TENSOR_ALIGN_BYTES, aligned
from ...scheduler.memory.blocks import BlockTable
from ...scheduler.state.events import ModelAvailable, Reply
from ..intake.request_pool import PoolAllocation, RequestPool
from ..intake.validation import Body, ValidatedRequest
from ..transport.clients import Session

MAX_ID: Final = 64

Key = tuple[str, str]  # caller, and the caller's name for the sequence


class SequenceGroup(msgspec.Struct, kw_only=True, eq=False):
    """Sequences of one model or of one client, which end with it."""

    sequences: dict[int, SequenceState] = {}  # by number
    size_bytes: int = 0  # bytes of the states that each answer replaces
    is_gone: bool = False  # all its sequences have ended, and those that are left must be dropped


class SequenceState(msgspec.Struct, kw_only=True, eq=False):
    """State of one sequence between its requests, and during one."""

    key: Key
    number: int  # order of its start
    client: Session
    announced: ModelAvailable  # the version that it began with
    used_at_ms: float
    groups: tuple[SequenceGroup, ...] = ()  # its model's and its client's, while it is stored
    values: dict[str, SlabTensor] = {}  # input -> its current value
    counted_bytes: int = 0  # bytes that count toward its groups
    allocation: PoolAllocation | None = None  # slab of the values that each answer replaces
    grown: dict[str, BlockTable] = {}  # input -> blocks of its value, if it grows
    made: dict[str, SlabTensor] = {}  # input -> its next value, from the request being answered
    steps: int = 0  # number of answered requests
    is_busy: bool = False
    is_ending: bool = False  # it ends when its current request succeeds
    is_left: bool = False  # it ends after its current request in any case
    brought: list[tuple[str, Any]] = []  # (input, rows) pairs of the first request

    @property
    def copy_bytes(self) -> int:
        """Bytes of ``brought``, to be copied before the first request is computed."""
        return sum(len(rows) for _, rows in self.brought)

    @property
    def is_over(self) -> bool:
        """True if its model or its client is gone."""
        return any(group.is_gone for group in self.groups)

    @property
    def state(self) -> Mapping[str, tuple[str, int]]:
        """State inputs, each with its output and the dimension that grows (below 0: none)."""
        states: Mapping[str, tuple[str, int]] = self.announced.manifest.extra["state"]
        return states

    @property
    def size_bytes(self) -> int:
        """Bytes of the pool that the sequence holds, including shared blocks."""
        return self.replaced_bytes + sum(one.size_bytes for one in self.grown.values())

    @property
    def replaced_bytes(self) -> int:
        """Bytes of the state that each answer replaces."""
        replaced = [one for name, one in self.values.items() if name not in self.grown]
        return sum(one.size_bytes for one in replaced)

    def row(self, now_ms: float) -> dict[str, Any]:
        """Return the sequence's row of ``pipeswitch sequences``."""
        return {
            "id": self.key[1],
            "model": self.announced.base or self.announced.model,
            "version": self.announced.version,
            "tenant": self.key[0],
            "steps": self.steps,
            "bytes": self.size_bytes,
            "idle_ms": 0.0 if self.is_busy else now_ms - self.used_at_ms,
        }

    def memory(self, pool: RequestPool) -> memoryview:
        """Return the memory of the pool file with the sequence's values."""
        return pool.memory_of_tenant(self.announced.tenant)

    def copy(self, pool: RequestPool) -> None:
        """Copy the first request's rows into their blocks. Any thread may call this."""
        for name, rows in self.brought:
            pool.copy_rows(self.announced.tenant, self.values[name].places(0, len(rows)), rows)
        self.brought = []

    def apart(self, admitted: ValidatedRequest) -> ValidatedRequest:
        """Return the request with only the inputs that are copied to its slab.
        State is copied only if a ``module`` may write to it; a worker copies the ``grown`` part."""
        is_module = self.announced.manifest.mode == "module"
        stays, inputs, offset = self.grown if is_module else self.values, [], 0
        for one in admitted.inputs:
            if one.name not in stays:
                inputs.append(replace(one, offset_bytes=offset))
                offset += aligned(one.size_bytes, TENSOR_ALIGN_BYTES)
        return replace(admitted, inputs=tuple(inputs), input_bytes=offset)

    def among(self, placed: Sequence[SlabTensor]) -> tuple[SlabTensor, ...]:
        """Return all inputs in call order: those in the request's slab, and the state elsewhere."""
        known = self.values | {one.name: one for one in placed}
        return tuple(known[one.name] for one in self.announced.manifest.inputs)

    def check_outputs(self, names: Sequence[str]) -> None:
        """Raise InvalidInput if the model has no such output, or if it is a state, which stays."""
        states = {output for output, _ in self.state.values()}
        sent = [one.name for one in self.announced.manifest.outputs if one.name not in states]
        if unknown := {*names}.difference(sent):
            hint = f"outputs: {', '.join(sent)}"
            raise InvalidInput(f'no output "{min(unknown)[:80]}"', hint=hint)

    def answered(self, answer: Reply) -> Reply:
        """Return the client's answer, without the state.
        If the worker's claims are wrong, the sequence is unchanged, and the answer is an error."""
        if answer.error is not None:
            return answer
        by_output = {output: name for name, (output, _) in self.state.items()}
        outputs = {by_output[one.name]: one for one in answer.outputs if one.name in by_output}
        fits = all(has_room_for(one, outputs.get(name)) for name, one in self.grown.items())
        if outputs.keys() != self.state.keys() or not fits:
            error = TaskFailed(f'sequence "{self.key[1]}": the worker left an invalid state')
            return Reply(token=answer.token, error=error)
        self.made = outputs
        visible = tuple(one for one in answer.outputs if one.name not in by_output)
        body = {key: value for key, value in answer.body.items() if key != "returns"}
        return msgspec.structs.replace(answer, outputs=visible, body=body)


def has_room_for(table: BlockTable, output: SlabTensor | None) -> bool:
    """Return True if an output has whole rows that fit into the table's free capacity."""
    size, row_bytes = -1 if output is None else output.size_bytes, table.space.row_bytes
    return 0 <= size <= (table.capacity - table.used) * row_bytes and size % row_bytes == 0


class SequenceOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of a request about its sequence."""

    id: str
    starts: bool
    ends: bool
    outputs: tuple[str, ...] = ()  # names of the requested outputs; empty: all


def sequence_options(body: Body) -> SequenceOptions | None:
    """Return the request's fields about its sequence; None: it has none. Raises InvalidInput."""
    name = body.text("sequence", "")
    starts, ends = body.flag("start"), body.flag("end")
    if not name:
        if starts or ends:
            raise InvalidInput("infer: start and end need a sequence", hint="name its sequence")
        return None
    if len(name) > MAX_ID or escape_control_chars(name, keep="") != name:
        raise InvalidInput(f"infer: a sequence has a name of at most {MAX_ID} printable characters")
    return SequenceOptions(id=name, starts=starts, ends=ends, outputs=body.texts("outputs"))
