"""Generations: requests for text, each computed in one or more runs (docs/adr/0062).

When a run ends, the scheduler requests the next one here at once (``requests.Kind``). Token ids and
caches (blocks of the request pool, which workers write to) are here.

A generation whose cache needs more memory than is free waits. If none can continue, the youngest
gives up its cache and computes it again later, from its ids.
"""

from __future__ import annotations

import functools
import math
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

from msgspec.structs import replace

from ...base.errors import Cancelled, PipeSwitchError, QueueFull, TaskFailed
from ...frontend.intake.request_pool import PoolAllocation
from ...frontend.kinds import KindContext
from ...frontend.requests import Handler, Pending
from ...frontend.sequences.manager import StateReport
from ...frontend.transport.clients import Session
from ...ipc.messages.base import OpId, SlabTensor
from ...ipc.messages.run import Run
from ...programs.interface.layout import CACHE, ITEM_BYTES, TENSOR_ALIGN_BYTES, Manifest, aligned
from ...scheduler.memory.blocks import BlockTable, tokens_of
from ...scheduler.state.events import InferArrived, PoolFreed, Reply, Token
from ...scheduler.state.records import Request
from ...wire.frames import RequestHeader
from .caches import Cache, Caches, longest
from .decoding.generation_settings import COUNT, IDS, MOST_STEPS, USED
from .generation_state import Generation, answer_facts, generation_of
from .schemas import SchemaChecks

AGAIN: Final = "wait for answers, or raise [server] pool"
PIECE_MS: Final = 100.0  # limit of a prompt's piece; a running answer then gets one step
LEAST_PIECE: Final = 64  # ids; with fewer, copying the cache takes longer than reading the ids
MAX_SPARE: Final = 4  # a run reuses an allocation of up to this many times its needs


class Generations:
    """State of all generations (``requests.Kind``). Only the loop's thread uses it."""

    def __init__(self, context: KindContext) -> None:
        self._context, self._pool = context, context.pool
        self._schemas = SchemaChecks(context)
        self._caches = Caches(context.blocks, context.sequence_keys)
        self.states: StateReport = self._caches
        self._take, self._answer, self._call_soon = context.take, context.answer, context.call_soon
        self._live: dict[int, Pending] = {}  # token -> generation that has not ended
        self._waiting: dict[int, Pending] = {}  # token -> generation that waits for memory
        self._pieces: dict[str, int] = {}  # program digest -> ids that it reads in ``PIECE_MS``
        self._reading: set[int] = set()  # tokens of generations whose next run reads a piece
        self._is_looking = False  # ``PoolFreed`` is on its way, or ``poll`` runs
        show = functools.partial(answer_facts, context)
        self.handlers: Mapping[str, Handler] = {"generate": self.generate, "generation": show}

    def generate(self, client: Session, header: RequestHeader, tensors: Sequence[Any]) -> None:
        """Accept a request of verb ``generate``, and answer that it was accepted."""
        request = self._context.read(client, header, tensors)
        generation = generation_of(request, self._pool.share_bytes)
        if any(one.caller == generation.caller for one in self._waiting.values()):
            raise QueueFull("running answers wait for memory in the pool", hint=AGAIN, limit="pool")
        options, where = generation.sampling.options, request.arrival.origin.connection
        schema = "" if options is None else options.json_schema
        is_usable = not schema or self._schemas.admit(schema, where)
        run = self._prepared(generation, self._context.next_token, header.id)
        pending, event = self._context.accept(self, request, run, generation)
        self._live[pending.token] = pending
        body = {"prompt_tokens": generation.prompt_count, "max_tokens": generation.most}
        accepted = functools.partial(self._answer, Reply(token=pending.token, body=body, more=True))
        self._call_soon(accepted)
        if is_usable:
            self._take(event)
        else:
            begin = functools.partial(self._begin, pending, event)
            self._schemas.ask(schema, (pending, where, begin))

    def _begin(self, pending: Pending, event: InferArrived, error: PipeSwitchError | None) -> None:
        """Send the event of an accepted generation, or answer with the error of its schema."""
        if pending.token not in self._live:  # the server is stopping
            return
        pending.is_copying = False
        if pending.is_cancelled:
            error = Cancelled(f"request {pending.request_id} was cancelled")
        if error is None:
            self._take(event)
        else:
            self._answer(Reply(token=pending.token, error=error))

    # ---- one run after the other ---------------------------------------------------------------

    def ended(self, request: Request, answer: Reply) -> Reply:
        """Record a run's rows and tokens (``RunKind.ended``); the last run frees all memory."""
        pending = self._live[request.token]
        generation, error = _of(pending), self._keep(pending, answer)
        if answer.more and error is None:
            return replace(answer, outputs=(), timing=None)
        self.drop(pending)
        if error is not None:
            return Reply(token=answer.token, error=error)
        sums = {
            "reason": generation.sampling_params.ends_with(answer.body["tokens"]),
            "prompt_tokens": generation.prompt_count,
            "completion_tokens": generation.token_count,
            "reused_tokens": generation.reused,
            "first_token_ms": generation.first_token_ms,
        }
        return replace(answer, body={**answer.body, **sums})

    def renew(self, request: Request) -> None:
        generation = _of(self._live[request.token])
        self._caches.tokens_reused -= generation.reused  # ``reuse`` counts them again
        self._drop_cache(generation)

    def prepare(self, request: Request) -> Run | None:
        pending = self._live[request.token]
        generation = _of(pending)
        try:
            return self._prepared(generation, pending.token, pending.request_id)
        except QueueFull:
            self._give_room_back(generation)
            if generation.cache is not None:
                self._caches.fit(generation.cache, 0)  # free the unused blocks
            self._waiting[pending.token] = pending
            self._pool.on_release = self.wake_at
            self.wake_at()
            return None

    def _prepared(self, generation: Generation, token: Token, request_id: str) -> Run:
        """Allocate memory for the next run, write its inputs, return the run. The memory is
        for the inputs, and for the rows that a worker adds to the cache.
        Raises QueueFull: the pool has no memory for the cache or for the inputs."""
        cache, announced = generation.cache, generation.announced
        is_new = cache is None
        if cache is None:
            cache = self._caches.open(generation.caller, announced, token)
        try:
            if is_new:
                self._reuse(generation, cache)
            used = cache.table.used
            most = generation.piece  # if it is alone; a smaller piece would only cost time
            if len(self._live) > 1:
                most = self._pieces.get(announced.manifest.digest, LEAST_PIECE)
            sampling_params = generation.next(used, most, is_short=bool(self._reading - {token}))
            (self._reading.add if sampling_params.is_piece else self._reading.discard)(token)
            steps = sampling_params.steps
            value = self._caches.fit(cache, used + generation.new_rows(steps), steps)
            allocation = self._fit_room(generation)
        except PipeSwitchError:
            if is_new:
                self._caches.close(cache)
                self.wake_at()
            raise
        generation.cache, generation.number = cache, generation.number or cache.number
        count, at = generation.count, allocation.input_offset_bytes
        values = (
            (IDS, (1, count), generation.ids[used : used + count]),
            (COUNT, (1,), (count,)),
            (USED, (1,), (used,)),
        )
        placed, payload = list[SlabTensor](), [array("q", one).tobytes() for _, _, one in values]
        for (name, shape, _), data in zip(values, payload, strict=True):
            size = len(data)
            placed.append(
                SlabTensor(name=name, dtype="int64", shape=shape, offset_bytes=at, size_bytes=size)
            )
            at += aligned(size, TENSOR_ALIGN_BYTES)
        self._pool.fill(placed, payload, announced.tenant)  # a kernel may read whole pages
        inputs = {CACHE: value} | {one.name: one for one in placed}
        return Run(
            request_id=request_id,
            inputs=tuple([inputs[one.name] for one in announced.manifest.inputs]),
            reply_offset_bytes=allocation.reply_offset_bytes,
            reply_bytes=allocation.reply_bytes,
            sampling_params=sampling_params,
            cache=cache.number,
            after=cache.op_id,
            leader=self._leader(generation, cache.table) if count > 1 else None,
        )

    def _reuse(self, generation: Generation, cache: Cache) -> None:
        """Start a cache with the known rows of its prompt. Raises QueueFull, like ``fit``."""
        if (copy := self._caches.reuse(cache, generation.ids)) is not None:
            to, source, size = copy
            memory = self._pool.memory_of_tenant(generation.announced.tenant)
            memory[to : to + size] = memory[source : source + size]
        self._caches.fit(cache, generation.rows)
        generation.reused = cache.table.used
        self._caches.tokens_reused += generation.reused

    def _leader(self, generation: Generation, table: BlockTable) -> int | None:
        """Return an earlier generation that will compute the next block of this prompt, or None."""
        end = table.used + table.space.rows
        start = generation.ids[:end] if end < len(generation.ids) else None
        for token, pending in self._live.items():
            if (other := _of(pending)) is generation:
                break
            own = None if other.cache is None else other.cache.table
            if pending.is_copying:  # it waits for its schema
                continue
            if own and own.space is table.space and own.used < end and other.ids[:end] == start:
                return token
        return None

    def _fit_room(self, generation: Generation) -> PoolAllocation:
        """Return pool memory for the next run's inputs: the last run's, if its size fits."""
        input_bytes = 2 * TENSOR_ALIGN_BYTES
        input_bytes += aligned(ITEM_BYTES["int64"] * generation.count, TENSOR_ALIGN_BYTES)
        allocation = generation.allocation
        if allocation is not None:
            if input_bytes <= allocation.held_bytes <= MAX_SPARE * input_bytes:
                return allocation
            self._give_room_back(generation)
        tenant = generation.announced.tenant
        allocation = generation.allocation = self._pool.reserve(
            generation.caller, input_bytes, 0, tenant
        )
        return allocation

    def _give_room_back(self, generation: Generation) -> None:
        allocation, generation.allocation = generation.allocation, None
        if allocation is not None:
            self._pool.release_inputs(allocation)
            self._pool.release_reply(allocation)

    def _keep(self, pending: Pending, answer: Reply) -> PipeSwitchError | None:
        """Record a run's rows and tokens; return an error if the worker's reply is impossible."""
        generation, tokens = _of(pending), answer.body["tokens"]
        cache = generation.cache
        vocabulary = generation.announced.manifest.extra["generation"]["vocabulary"]
        if (
            cache is None
            or answer.outputs
            or not generation.sampling_params.allows(tokens)
            or not all(0 <= one < vocabulary for one in tokens)
            or not generation.has_chances(answer.body)
        ):
            return TaskFailed(f'"{pending.model}": the worker reported invalid rows or tokens')
        used = cache.table.used
        fed = generation.ids[used : used + generation.count] + tokens_of(tokens[:-1])
        if (timing := answer.timing) is not None and generation.count > 1:
            ms = max(timing.compute_ms - generation.compute_ms, 1e-3) / generation.count
            piece = 1 << int(PIECE_MS / ms).bit_length() >> 1  # so that shapes seldom change
            self._pieces[generation.announced.manifest.digest] = max(LEAST_PIECE, piece)
        generation.compute_ms = 0.0 if timing is None else timing.compute_ms
        op_id = OpId(timing.op_id if timing is not None else 0)
        self._caches.append(cache, fed, op_id, len(tokens))
        if tokens and not generation.token_count:
            generation.first_token_ms = self._context.now_ms() - generation.began_at_ms
        generation.ids.extend(tokens)
        if generation.count == 1:
            generation.ahead = min(2 * len(tokens), MOST_STEPS)
        return None

    def drop(self, pending: Pending) -> None:
        generation = _of(pending)
        self._live.pop(pending.token, None)
        self._waiting.pop(pending.token, None)
        self._reading.discard(pending.token)
        self._give_room_back(generation)
        self._drop_cache(generation)
        self.wake_at()

    def notes(self, manifest: Manifest) -> Sequence[str]:
        facts = manifest.extra.get("generation")
        count = longest(manifest, self._pool.share_bytes)[0] if facts else 0
        if not facts or count >= facts["context"]:
            return ()
        most = f"{count} tokens with its prompt, of {facts['context']}"
        return (f"an answer has at most {most}: [server] pool has room for no more",)

    # ---- waiting for memory --------------------------------------------------------------------

    def wake_at(self) -> None:
        """Send ``PoolFreed`` after memory was freed, if generations wait for it."""
        if not self._waiting:
            self._pool.on_release = None
        elif not self._is_looking:
            self._is_looking = True
            self._take(PoolFreed())

    def poll(self, _: Mapping[Token, Request]) -> list[tuple[Token, Run]]:
        """Return the next runs for which there is memory now (``RunKind.poll``).
        Each caller's generations continue in the order in which they began. If one has no memory,
        the youngest that waits gives up its cache and computes it again later. The oldest always
        continues, so all of them end."""
        behind, count, free_bytes = set[str](), len(self._waiting), self._free_bytes
        runs: list[tuple[Token, Run]] = []
        for one in sorted(self._waiting.values(), key=_began):
            while one.token in self._waiting and one.caller not in behind:
                run = self._retried(one)
                if run is not None:
                    runs.append((one.token, run))
                elif not self._give_up_for(one):
                    behind.add(one.caller)
        self._is_looking = False
        # If the loop freed memory, such as a cache, earlier generations may fit now.
        if len(self._waiting) < count or self._free_bytes > free_bytes or not self._waiting:
            self.wake_at()
        return runs

    @property
    def _free_bytes(self) -> int:
        return self._pool.free_bytes + self._context.blocks.cached_bytes

    def _retried(self, one: Pending) -> Run | None:
        """Return a waiting generation's next run; None: there is still no memory for it."""
        try:
            run = self._prepared(_of(one), one.token, one.request_id)
        except QueueFull:
            return None
        del self._waiting[one.token]
        return run

    def _give_up_for(self, one: Pending) -> bool:
        """Drop the cache of the youngest waiting generation, or of ``one``. False: none dropped."""
        began = _began(one)[0]
        waiting = self._waiting.values()
        younger = [two for two in waiting if began < _began(two)[0] < math.inf]
        if younger:
            one = max(younger, key=_began)
        elif began == math.inf or any(
            two.caller == one.caller and two.token not in self._waiting
            for two in self._live.values()
        ):
            return False
        self._drop_cache(generation := _of(one))
        generation.number = 0
        return True

    def _drop_cache(self, generation: Generation) -> None:
        cache, generation.cache = generation.cache, None
        if cache is not None:
            self._caches.close(cache)
            self.wake_at()


def _of(pending: Pending) -> Generation:
    return cast(Generation, pending.state)


def _began(one: Pending) -> tuple[float, int]:
    generation = _of(one)
    return (math.inf if generation.cache is None else generation.number), one.token
