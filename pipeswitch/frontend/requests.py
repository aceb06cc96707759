"""Accepted requests: each gets exactly one final answer, and is counted once (invariant I1).

A request is pending from its acceptance until its final answer becomes a message. It is counted as
``ok`` or ``error`` when the kernel has taken that message, and as ``undeliverable`` when its client
is gone. Owned by the frontend.
"""

from __future__ import annotations

import functools
import logging
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

import msgspec

from ..base import failpoints
from ..base.errors import PipeSwitchError, QueueFull, TaskFailed
from ..base.failpoints import reach
from ..base.quantiles import percentile
from ..ipc.messages.base import ModelName
from ..programs.interface.layout import Manifest
from ..scheduler.state.events import InferArrived, Reply, Token
from ..scheduler.state.records import RunKind
from ..scheduler.state.versions import version_name
from ..wire.frames import RequestHeader
from ..wire.request_timing import RequestTiming
from .intake.request_log import RequestLog
from .intake.request_pool import PoolAllocation, RequestPool
from .sequences.manager import Sequences, StateReport
from .sequences.sequence_state import SequenceState
from .transport.clients import Counters, Outcome, Outgoing, Session
from .transport.replies import answer_frames, output_outside

_logger = logging.getLogger(__name__)

RECENT: Final = 200  # number of a version's requests for its latency in ``stats``
MAX_NAMES: Final = 1024  # number of versions with a latency
MAX_NAME_CHARS: Final = 64  # logged part of a refused request's model name: it may be any text
MAX_ERROR_CHARS: Final = 120  # of the last error that ``top`` shows
INFERS: Final = ("infer", "generate")  # verbs that are counted and logged as inference

Handler = Callable[[Session, RequestHeader, Sequence[Any]], None]
"""Handler of a verb: gets the client, the request, and the frames of its tensors."""


class Kind(RunKind, Protocol):
    """Requests that an extra adds, each with one run after the other (``kinds.py``)."""

    handlers: Mapping[str, Handler]  # its verbs
    states: StateReport  # what its requests keep in the request pool

    def drop(self, pending: Pending) -> None:
        """Free all that a request holds, at its end; a second call does nothing."""

    def notes(self, manifest: Manifest) -> Sequence[str]:
        """Return what the users of a model should know about this kind's requests."""


class StepRun(Protocol):
    """Progress of a request whose steps are requests to models (seam ``COMPOSITES``)."""

    @property
    def allocation(self) -> PoolAllocation | None:
        """Allocation in the file with all values of the answer."""

    def next(self) -> None: ...
    def ended(self, answer: Reply) -> Reply | None:
        """End a step; return the request's answer. None: the next step was started."""

    def free(self) -> None:
        """Free all memory of the steps."""


class Pending(msgspec.Struct, kw_only=True, eq=False):
    """An accepted request that has not had its final answer."""

    token: Token
    request_id: str
    op: str
    model: ModelName
    client: Session
    counts: list[Counters]  # counters that include this request
    allocation: PoolAllocation | None = None  # pool memory of an inference
    uploads: tuple[str, ...] = ()  # files of a registration, pinned until its answer
    commit: int = -1  # descriptor of a loaded commit's area; -1: none
    is_copying: bool = False  # its payload is being copied, or its kind does not know yet
    is_cancelled: bool = False  # cancelled during that, or during one of several steps
    caller: str = ""  # tenant for whom an inference runs
    bytes_in: int = 0
    trace_id: str = ""
    after: InferArrived | None = None  # event for postprocessing, which gets the outputs
    timing: RequestTiming | None = None  # the model's timing, during postprocessing
    run: StepRun | None = None  # progress of a request with several steps
    sequence: SequenceState | None = None  # the sequence that the request continues
    kind: Kind | None = None
    state: Any = None  # only its kind uses this


class Requests:
    """Requests that wait for their final answer, and counters of all requests."""

    def __init__(self, pool: RequestPool, log: RequestLog, sequences: Sequences) -> None:
        self.pool, self._log, self.sequences = pool, log, sequences
        self._pending: dict[Token, Pending] = {}
        self._last_token = 0
        self.counts = Counters()  # requests of all verbs
        self.inference = Counters()  # requests of the verbs in INFERS
        self.queue_full_count = 0  # requests that ended with QueueFull
        self.last_error = dict[str, str]()  # of inference: its model and text
        # Times of each version's last answered requests.
        self.recent_ms = defaultdict[tuple[ModelName, int], deque[float]](
            lambda: deque(maxlen=RECENT)
        )

    @property
    def next_token(self) -> Token:
        """Token of the request that is accepted next."""
        return Token(self._last_token + 1)

    def accept(
        self, client: Session, header: RequestHeader, allocation: PoolAllocation | None = None
    ) -> Pending:
        """Accept a request. It now owns its allocation, and needs exactly one final answer."""
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
        """Return the request of a token; None if it had its final answer."""
        pending = self._pending.get(token)
        if pending is None:
            _logger.debug("token=%d not found cause=not_owed", token)
        return pending

    def waiting(self, token: Token) -> Pending:
        """Return the waiting request of a token. KeyError: there is none."""
        return self._pending[token]

    def tokens(self) -> list[Token]:
        """Return the tokens of all waiting requests."""
        return list(self._pending)

    def clear(self, pending: Pending) -> None:
        """Free a request's allocation after its inputs were read; it may get another one."""
        if pending.allocation is not None:
            self.pool.release_inputs(pending.allocation)
            self.pool.release_reply(pending.allocation)
            pending.allocation = None

    def latencies(self) -> dict[str, dict[str, float]]:
        """Return the median and the 99th percentile of each version's recent times."""
        at = {"p50_ms": 0.5, "p99_ms": 0.99}
        return {
            version_name(*version): {name: percentile(times, part) for name, part in at.items()}
            for version, times in self.recent_ms.items()
        }

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
        """End a request; return the message of its final answer, or None if its client is gone.

        When the message has left or is lost, the request is counted and its reply's slab is freed.
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
        if pending.run is None:  # otherwise, outputs were checked at each step
            answer = self.checked(pending, answer)
        if pending.sequence is not None:
            self.pool.clear_beside(allocation, answer.outputs)
            answer = pending.sequence.answered(answer)
        self.queue_full_count += isinstance(answer.error, QueueFull)
        if pending.run is not None:
            allocation = pending.run.allocation or allocation
        memory = self.pool.memory_of(allocation)
        return Outgoing(
            frames=answer_frames(pending.request_id, client.session, answer, memory),
            on_end=functools.partial(self._ended, pending, answer),
        )

    def checked(self, pending: Pending, answer: Reply) -> Reply:
        """Return the answer, or an error answer if an output lies outside of its own slab."""
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
        """Count a request whose answer was sent or cannot be sent, and free its memory."""
        outcome: Outcome = "ok" if answer.error is None else "error"
        name = outcome if is_sent else "undeliverable"
        is_full = is_sent and answer.error is not None and isinstance(answer.error, QueueFull)
        for counts in pending.counts:
            setattr(counts, name, getattr(counts, name) + 1)
            counts.queue_full += is_full
        if pending.sequence is not None:
            is_ok = answer.error is None
            self.sequences.ended(pending.sequence, pending.allocation, is_ok=is_ok, is_sent=is_sent)
        elif pending.allocation is not None:
            self.pool.release_reply(pending.allocation)
        if pending.run is not None:
            pending.run.free()
        if pending.op in INFERS and is_sent and answer.timing is not None:
            version = pending.model, answer.timing.version
            self.recent_ms[version].append(answer.timing.total_ms)
            if len(self.recent_ms) > MAX_NAMES:  # of versions that left before their last answers
                del self.recent_ms[next(iter(self.recent_ms))]
        if pending.op in INFERS and is_sent and answer.error is not None:
            text = f"{type(answer.error).__name__}: {answer.error.message[:MAX_ERROR_CHARS]}"
            self.last_error = {"model": pending.model, "error": text}
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
