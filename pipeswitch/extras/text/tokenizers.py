"""Text processes, which run tokenizers: which models have one, and the connection to each.

A model's template and tokenizer are in a confined process of their own (``tokenizer_worker.py``),
so their time and memory are charged only to that model's callers.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Coroutine, Mapping
from typing import Any, Final

import msgspec

from ...base.codec import UNREADABLE, encode_msgpack
from ...base.errors import InvalidInput, ServerUnavailable
from ...base.quotas import TurnQueue
from ...base.roles import Principal
from ...gateway.serving.service import Service
from ...sandbox.environment import harmless
from . import tokenizer_worker
from .decoding.model_config import LanguageModelConfig
from .tokenizer_worker import (
    LENGTH_BYTES,
    Abort,
    DecodedText,
    Hello,
    InvalidPrompt,
    StartGeneration,
    TokenizerRequest,
    framed,
)

TEXT_S: Final = 10.0  # time limit of a reply, from the sending of its request
LEAST_SHARE: Final = 0.2  # share of a processor; with less, the machine is busy
START_S: Final = 60.0  # time limit of the start, and of a reply on a busy machine
TURN_S: Final = 10.0  # minimum time of a busy model's process while other models wait
END_S: Final = 0.005  # interval between checks of a killed process; a waiting thread may not start
LOOK_S: Final = 0.25  # interval between checks of turns
MAX_REPLY_BYTES: Final = 16 << 20
AGAIN: Final = "send again in a moment"
COMMAND: Final = (sys.executable, "-P", "-m", "pipeswitch.extras.text.tokenizer_worker")
PROCESS_CLOCK: Final = 2  # Linux' clock of the processor time of a process: ~pid << 3 | this
_reply = msgspec.msgpack.Decoder(Hello | DecodedText | InvalidPrompt)
_Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class ProcessLost(ServerUnavailable):
    """A text process ended before it replied; another one may do the work."""

    was_computing = False  # the process ended during this request


class TokenizerSlot(msgspec.Struct, frozen=True, kw_only=True):
    """One model's text process, or its pending request for one."""

    owner: str  # tenant that registered the model
    caller: str = ""  # caller that waits for the process
    since_s: float  # start of the process, or of the wait for it
    idle_since_s: float | None = None  # None: it has answers under way
    is_starting: bool = False


def next_place(
    slots: Mapping[str, TokenizerSlot],
    waiting: Mapping[str, TokenizerSlot],
    most: int,
    now_s: float,
) -> tuple[str, str] | None:
    """Return the model whose process starts next, and the model whose process ends before that.
    The second is empty if none must end. The result is None if all must wait.

    A model of the owner with the fewest processes comes first, then one of the caller that waits
    for the fewest. An idle process may end for a model of the same owner, or of an owner with fewer
    processes; a busy one may do so after TURN_S. A busy process may end at once if its owner has
    two more than the other owner. A process that was idle for TURN_S may end for any model.
    """
    has = Counter(one.owner for one in slots.values())
    wishes = Counter(one.caller for one in waiting.values())

    def may_end(one: TokenizerSlot, owner: str) -> bool:
        if one.is_starting:  # it has no process yet
            return False
        is_fair = one.owner == owner or has[one.owner] > has[owner]
        if one.idle_since_s is not None:
            return is_fair or now_s - one.idle_since_s >= TURN_S
        is_over_share = has[one.owner] > has[owner] + 1
        return is_over_share or (is_fair and now_s - one.since_s >= TURN_S)

    def order(name: str) -> tuple[bool, int, float]:
        one = slots[name]
        is_busy = one.idle_since_s is None
        return is_busy, -has[one.owner], one.idle_since_s or one.since_s

    def urgency(name: str) -> tuple[int, int, float]:
        return has[waiting[name].owner], wishes[waiting[name].caller], waiting[name].since_s

    for name in sorted(waiting, key=urgency):
        if len(slots) < most:
            return name, ""
        if ending := [key for key, one in slots.items() if may_end(one, waiting[name].owner)]:
            return name, min(ending, key=order)
    return None


class _Request:
    """One request to a text process."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.reply: asyncio.Future[Hello | DecodedText | InvalidPrompt]
        self.reply = asyncio.get_running_loop().create_future()


class TokenizerClient:
    """Connection to the text process of one model.

    The process has one request at a time; the others wait here, and callers take turns.
    """

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        stream: _Stream,
        facts: LanguageModelConfig,
        owner: str = "",
    ) -> None:
        self._process, (self._reader, self._writer) = process, stream
        self._turns: TurnQueue[_Request] = TurnQueue()
        self._owner, self._since_s = owner, time.monotonic()
        self.idle_since_s = self._since_s
        self.answers = 0  # number of answers under way
        self.is_over = self._is_late = self._is_started = False
        self._begin(_Request(encode_msgpack(facts)), START_S)
        self._reading = asyncio.create_task(self._read())

    @staticmethod
    async def open(facts: LanguageModelConfig, owner: str = "") -> TokenizerClient:
        """Start a process; requests may be queued before it is ready."""
        with contextlib.ExitStack() as undo:
            try:
                ours, theirs = map(undo.enter_context, socket.socketpair())
                process = subprocess.Popen(
                    COMMAND,
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env={**harmless(os.environ), "OPENBLAS_NUM_THREADS": "1"},
                )
            except OSError as error:
                raise ServerUnavailable(
                    f"the text process cannot start: {error}", hint=AGAIN
                ) from error
            undo.pop_all()
        theirs.close()
        return TokenizerClient(process, await asyncio.open_connection(sock=ours), facts, owner)

    @property
    def place(self) -> TokenizerSlot:
        idle_since_s = None if self.answers else self.idle_since_s
        return TokenizerSlot(owner=self._owner, since_s=self._since_s, idle_since_s=idle_since_s)

    async def ask(self, message: TokenizerRequest, caller: str = "") -> DecodedText:
        """Send a request and wait for its reply; callers take turns.

        Raises:
            InvalidInput: the prompt or a setting does not fit.
            ProcessLost: the process ended before the reply.
            ServerUnavailable: the process took too long for this request.
        """
        if self.is_over:
            raise _lost()
        request = _Request(_encoded(message))
        is_new = isinstance(message, StartGeneration) and not message.so_far
        self._turns.put(caller, request, is_urgent=not is_new)
        self._next()
        try:
            return _step(await request.reply)
        finally:
            request.data = b""  # free it: if the caller hung up, the request stays in the queue

    def send(self, message: Abort) -> None:
        if not self.is_over:
            self._writer.write(framed(_encoded(message)))

    async def close(self) -> None:
        """End the process. Requests without a reply end in ProcessLost."""
        self.is_over = True
        self._process.kill()
        await self._reading

    def _next(self) -> None:
        while self._computing is None and not self.is_over and (request := self._turns.take()):
            if not request.reply.done():  # its caller is still there
                self._begin(request, TEXT_S)

    def _begin(self, request: _Request, limit_s: float) -> None:
        self._computing: _Request | None = request
        self._writer.write(framed(request.data))
        self._began_s, self._began_cpu_s = time.monotonic(), self._cpu_s()
        self._clock = asyncio.get_running_loop().call_later(limit_s, self._late)

    def _late(self) -> None:
        """End the process if its time is over, unless the machine was busy with other work."""
        has_computed = self._cpu_s() - self._began_cpu_s >= LEAST_SHARE * TEXT_S
        if not has_computed and time.monotonic() - self._began_s < START_S:
            self._clock = asyncio.get_running_loop().call_later(LOOK_S, self._late)
            return
        self._is_late = True
        self._process.kill()

    def _cpu_s(self) -> float:
        with contextlib.suppress(OSError):  # the process has ended
            return time.clock_gettime(~self._process.pid << 3 | PROCESS_CLOCK)
        return 0.0

    async def _read(self) -> None:
        try:
            while True:
                size = int.from_bytes(await self._reader.readexactly(LENGTH_BYTES), "big")
                if size > MAX_REPLY_BYTES:
                    return
                message = _reply.decode(await self._reader.readexactly(size))
                request = self._computing
                if request is None or isinstance(message, Hello) is self._is_started:
                    return
                self._clock.cancel()
                self._computing, self._is_started = None, True
                if not request.reply.done():
                    request.reply.set_result(message)
                self._next()
        except (EOFError, OSError, *UNREADABLE):
            pass  # the process died, or sent invalid data
        finally:
            self.is_over = True
            self._clock.cancel()
            self._process.kill()
            self._writer.close()
            for request in filter(None, (self._computing, *self._turns.clear())):
                self._fail(request)
            while self._process.poll() is None:  # it was killed
                await asyncio.sleep(END_S)

    def _fail(self, request: _Request) -> None:
        """Fail a request: ServerUnavailable if it took too long, else ProcessLost, for a retry."""
        error = _lost()
        error.was_computing = request is self._computing or not self._is_started
        is_for_good = error.was_computing and self._is_late
        if not request.reply.done():
            request.reply.set_exception(
                ServerUnavailable(error.message, hint=error.hint) if is_for_good else error
            )
            request.reply.exception()  # nobody waits for a hello


class Inline:
    """Replacement for the text process of a model without a tokenizer, and so without texts."""

    is_over = False

    def __init__(self, facts: LanguageModelConfig) -> None:
        self._texts = tokenizer_worker.TokenizerWorker(facts)

    async def ask(self, message: TokenizerRequest, caller: str = "") -> DecodedText:
        return _step(self._texts.handle(message))

    def send(self, message: Abort) -> None:
        self._texts.handle(message)


class TokenizerPool:
    """The text processes of all models."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._talks: dict[str, TokenizerClient] = {}  # key: program digest, as in the next three
        self._opening: dict[str, _Opening] = {}
        self._wanted: dict[str, TokenizerSlot] = {}
        self._starting: dict[str, TokenizerSlot] = {}
        self._news = asyncio.Event()  # set when a process may be free

    async def enter(
        self, caller: Principal, turn: str, model: str, facts: LanguageModelConfig
    ) -> TokenizerClient | Inline:
        """Return the model's process, and count one more answer there. Start it first if needed."""
        if not facts.has_tokenizer:
            return Inline(facts)
        talk, name = self._talks.get(facts.digest), facts.digest
        if talk is None or talk.is_over:
            opening = self._opening.get(name)
            if opening is None or opening.task.done():  # the opened process has ended
                opening = self._opening[name] = _Opening(self._open(caller, turn, model, facts))
            opening.waiting += 1
            try:
                talk = await asyncio.shield(opening.task)
            finally:
                opening.waiting -= 1
                if not opening.waiting:
                    opening.task.cancel()
                    if self._opening.get(name) is opening:
                        del self._opening[name]
        talk.answers += 1
        return talk

    def leave(self, talk: TokenizerClient) -> None:
        talk.answers -= 1
        if not talk.answers:
            talk.idle_since_s = time.monotonic()
            self._news.set()

    async def _open(
        self, caller: Principal, turn: str, model: str, facts: LanguageModelConfig
    ) -> TokenizerClient:
        name, version = facts.digest, str(facts.version)
        owner = await self._service.owner(model, version)
        place = TokenizerSlot(owner=owner, caller=turn, since_s=time.monotonic())
        try:
            self._wanted[name] = place
            while (next_slot := self._next_place()) is None or next_slot[0] != name:
                self._news.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._news.wait(), LOOK_S)
            del self._wanted[name]
            self._starting[name] = place = msgspec.structs.replace(place, is_starting=True)
            if next_slot[1]:
                await self._talks.pop(next_slot[1]).close()
            embeds = bool(facts.pooling)
            facts = await config_of(
                self._service, caller, model, version, tokenizer=True, embedding=embeds
            )
            talk = self._talks[name] = await TokenizerClient.open(facts, owner)
            return talk
        finally:
            for places in (self._wanted, self._starting):
                if places.get(name) is place:  # not the entry of a later call
                    del places[name]
            self._news.set()

    def _next_place(self) -> tuple[str, str] | None:
        self._talks = {name: one for name, one in self._talks.items() if not one.is_over}
        slots = self._starting | {name: one.place for name, one in self._talks.items()}
        return next_place(slots, self._wanted, self._service.text_processes, time.monotonic())


class _Opening:
    """A process that will start, and the number of requests that wait for it."""

    def __init__(self, work: Coroutine[Any, Any, TokenizerClient]) -> None:
        self.task, self.waiting = asyncio.create_task(work), 0


def _lost() -> ProcessLost:
    return ProcessLost(
        "the model's text process died or took too long",
        hint="check the model's chat template and tokenizer; a new process starts",
    )


def _step(message: Hello | DecodedText | InvalidPrompt | None) -> DecodedText:
    """Return a reply's text, or raise the error that the process reported."""
    if isinstance(message, InvalidPrompt):
        named: dict[str, Any] = {"param": message.param or None}
        named |= {"code": message.code} if message.code else {}
        raise InvalidInput(message.message, hint=message.hint, **named)
    if not isinstance(message, DecodedText):
        raise _lost()
    return message


def _encoded(message: TokenizerRequest) -> bytes:
    """Encode a request; raise InvalidInput if a value cannot be sent."""
    try:
        return encode_msgpack(message)
    except (ValueError, OverflowError, RecursionError) as error:
        raise InvalidInput(f"a value of this request is not valid: {error}") from None


async def config_of(
    service: Service, caller: Principal, model: str, version: str, **fields: bool
) -> LanguageModelConfig:
    """Return the facts of a language model; ``fields`` are those of the verb ``generation``."""
    reply = await service.ask(caller, "generation", model, version, **fields)
    return msgspec.convert(reply, LanguageModelConfig)
