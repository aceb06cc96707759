"""Accepted requests: each gets exactly one final answer, and is counted once (invariant I1).

From its acceptance a request is pending, until its final answer becomes a message. It is counted
``ok`` or ``error`` when the kernel has taken that message, ``undeliverable`` when its client is
gone. Owned by the frontend.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Set
from typing import Final

import msgspec

from ..base import failpoints
from ..base.errors import PipeSwitchError, QueueFull, TaskFailed
from ..base.failpoints import reach
from ..ipc.messages.base import ModelName, SlabTensor
from ..programs.interface.chains import Chain
from ..scheduler.events import InferArrived, Reply, Token
from ..wire.frames import RequestHeader
from ..wire.request_timing import RequestTiming
from .request_log import RequestLog
from .request_pool import PoolAllocation, RequestPool
from .sequences.caches import Caches
from .sequences.generation_state import Generation
from .sequences.sequence_state import SequenceState
from .transport.clients import Counters, Outcome, Outgoing, Session
from .transport.replies import answer_frames, output_outside

_logger = logging.getLogger(__name__)

MAX_NAME_CHARS: Final = 64  # of what may be no model's name
INFERS: Final = ("infer", "generate")  # verbs that are counted and logged as inference


class ChainRun(msgspec.Struct, kw_only=True, eq=False):
    """Request of a chain, from its first step on (``chain_requests.py``)."""

    chain: Chain
    event: InferArrived  # as it came; each step's is made of it
    priority: int | None  # that it asked for; None: each model's own
    values: dict[str, SlabTensor]  # that later steps read
    # in the pool, each with the values that lie there
    allocations: list[tuple[PoolAllocation, Set[str]]]
    timings: dict[str, RequestTiming] = {}  # of the steps that are over


class Pending(msgspec.Struct, kw_only=True, eq=False):
    """An accepted request whose final answer is owed."""

    token: Token
    request_id: str
    op: str
    model: ModelName
    client: Session
    counts: list[Counters]  # that it is counted in
    allocation: PoolAllocation | None = None  # an inference's, in the pool
    uploads: tuple[str, ...] = ()  # a registration's, which stay until it is answered
    commit: int = -1  # a descriptor: the area that a job from elsewhere is to have
    is_copying: bool = False  # its payload is on the way into the pool
    is_cancelled: bool = False  # meanwhile
    caller: str = ""  # an inference's: who asks
    bytes_in: int = 0
    trace_id: str = ""
    after: InferArrived | None = None  # its outputs go to a function, which makes the answer
    timing: RequestTiming | None = None  # of the model, whose outputs are there
    run: ChainRun | None = None  # of a chain: how far it is
    sequence: SequenceState | None = None  # the sequence that the request continues
    generation: Generation | None = None


class Requests:
    """All and only the requests that wait for their final answer, and the counts of all."""

    def __init__(self, pool: RequestPool, log: RequestLog, sequences: Caches) -> None:
        self.pool, self._log, self.sequences = pool, log, sequences
        self._pending: dict[Token, Pending] = {}
        self._last_token = 0
        self.counts = Counters()  # every accepted request, whatever its verb
        self.inference = Counters()  # the ones of verb infer among them
        self.queue_full_count = 0  # refused or failed for want of room

    @property
    def next_token(self) -> Token:
        """Token of the request that is accepted next."""
        return Token(self._last_token + 1)

    def accept(
        self, client: Session, header: RequestHeader, allocation: PoolAllocation | None = None
    ) -> Pending:
        """Accept a request: from here on it needs exactly one final answer, and owns its room."""
        self._last_token += 1
        counts = [client.counts, self.counts]
        if header.op in INFERS:
            counts.append(self.inference)
        for one in counts:
            one.accepted += 1
        pending = Pending(
            token=Token(self._last_token),
            request_id=header.id,
            op=header.op,
            model=ModelName(header.model),
            client=client,
            counts=counts,
            allocation=allocation,
        )
        self._pending[pending.token] = pending
        client.requests[header.id] = pending.token
        if failpoints.is_on and header.op in INFERS:
            reach("frontend.accepted")
        return pending

    def reject(self, client: Session, header: RequestHeader, error: PipeSwitchError) -> None:
        """Count a request that was refused before its acceptance."""
        client.counts.rejected += 1
        self.counts.rejected += 1
        self.inference.rejected += header.op in INFERS
        self._log.note(
            Reply(token=Token(0), error=error),
            op=header.op,
            request_id=header.id,
            tenant=client.principal.tenant,
            model=header.model[:MAX_NAME_CHARS],
        )
        self.queue_full_count += isinstance(error, QueueFull)

    def find(self, token: Token) -> Pending | None:
        """Return the request; None if it had its final answer."""
        pending = self._pending.get(token)
        if pending is None:
            _logger.debug("token=%d not found cause=not_owed", token)
        return pending

    def waiting(self, token: Token) -> Pending:
        """Return the waiting request of a token."""
        return self._pending[token]

    def tokens(self) -> list[Token]:
        """Return the tokens of all waiting requests."""
        return list(self._pending)

    def clear(self, pending: Pending) -> None:
        """Release a request's room: its inputs were read, and it may get another room."""
        if pending.allocation is not None:
            self.pool.release_inputs(pending.allocation)
            self.pool.release_reply(pending.allocation)
            pending.allocation = None

    def read(self, run: ChainRun, needed: Set[str] = frozenset()) -> None:
        """Free the rooms of a chain's run that have none of the needed values."""
        for allocation, names in run.allocations:
            if needed.isdisjoint(names):
                self.pool.release_inputs(allocation)
                self.pool.release_reply(allocation)
        run.allocations = [
            (allocation, names)
            for allocation, names in run.allocations
            if not needed.isdisjoint(names)
        ]

    def progress(self, pending: Pending, answer: Reply) -> Outgoing:
        """Return the message of an answer that is not final."""
        frames = answer_frames(
            pending.request_id,
            pending.client.session,
            answer,
            self.pool.memory_of(pending.allocation),
        )
        return Outgoing(frames=frames)

    def end(self, pending: Pending, answer: Reply) -> Outgoing | None:
        """Return the message of a final answer; None: its client is gone. The request ends here.

        It is counted, and its reply's slab is free, when the message has left or is lost.
        """
        if failpoints.is_on:
            reach("frontend.reply")
        client, allocation = pending.client, pending.allocation
        del self._pending[pending.token]
        client.requests.pop(pending.request_id, None)
        if allocation is not None:
            self.pool.release_inputs(allocation)
        if client.is_gone:
            self._ended(pending, answer, is_sent=False)
            return None
        if pending.run is None:  # else it was, step by step
            answer = self.checked(pending, answer)
        if pending.sequence is not None:
            answer = pending.sequence.answered(answer)
        self.queue_full_count += isinstance(answer.error, QueueFull)
        if pending.run is not None and pending.run.allocations:  # all of one file
            allocation = pending.run.allocations[0][0]
        memory = self.pool.memory_of(allocation)
        return Outgoing(
            frames=answer_frames(pending.request_id, client.session, answer, memory),
            on_end=functools.partial(self._ended, pending, answer),
        )

    def checked(self, pending: Pending, answer: Reply) -> Reply:
        """Return the answer, or an error if it names bytes outside of its own reply."""
        allocation = pending.allocation
        at, size = (
            (allocation.reply_offset_bytes, allocation.reply_bytes)
            if allocation is not None
            else (0, 0)
        )
        if bad_output := output_outside(answer.outputs, at, size):
            _logger.error("request=%s output refused cause=%s", pending.request_id, bad_output)
            error = TaskFailed(f"{pending.model}: the worker's output is invalid: {bad_output}")
            return Reply(token=answer.token, error=error)
        return answer

    def _ended(self, pending: Pending, answer: Reply, is_sent: bool) -> None:
        """Remove a request whose answer has left, or never will: nothing refers to it any more."""
        outcome: Outcome = "ok" if answer.error is None else "error"
        name = outcome if is_sent else "undeliverable"
        for counts in pending.counts:
            setattr(counts, name, getattr(counts, name) + 1)
        if pending.sequence is not None:
            is_ok = answer.error is None
            self.sequences.ended(pending.sequence, pending.allocation, is_ok=is_ok, is_sent=is_sent)
        elif pending.allocation is not None:
            self.pool.release_reply(pending.allocation)
        if pending.run is not None:
            self.read(pending.run)
        if pending.op in INFERS and (self._log.is_on or answer.error is not None):
            self._log.note(
                answer,
                is_sent=is_sent,
                op=pending.op,
                request_id=pending.request_id,
                tenant=pending.caller,
                model=pending.model,
                trace_id=pending.trace_id,
                bytes_in=pending.bytes_in,
            )
