"""Answers whose caches do not fit together: all that began come to their ends, with their tokens.

A row is made of the one before, and a token of all rows, so a wrong byte of a cache is seen.
"""

from __future__ import annotations

import contextlib
import os
import random
import zlib
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import pytest

from pipeswitch.base.errors import InvalidInput, PipeSwitchError, QueueFull, SequenceNotFound
from pipeswitch.base.roles import Standing
from pipeswitch.frontend.inference import Inference
from pipeswitch.frontend.request_pool import RequestPool
from pipeswitch.frontend.requests import Requests
from pipeswitch.frontend.sequences.manager import IDLE_MS, Sequences, longest
from pipeswitch.frontend.transport.clients import Client
from pipeswitch.ipc.board import sealed_memfd
from pipeswitch.ipc.messages.base import ModelName, SlabTensor
from pipeswitch.programs.decoding.answer import Ending
from pipeswitch.programs.decoding.generating import Facts, Generating
from pipeswitch.programs.decoding.generation import (
    CACHE,
    CACHE_NEW,
    IDS,
    LOGITS,
    PADS,
    STATE,
    TOKENS,
    USED,
)
from pipeswitch.programs.decoding.sampling import Sampling
from pipeswitch.programs.interface.dims import Dim
from pipeswitch.programs.interface.layout import Manifest, ValueSpec, aligned
from pipeswitch.scheduler import events as ev
from pipeswitch.wire.frames import RequestHeader, WireTensor, decode_reply

ROW, WORDS, CONTEXT = 512, 50, 600
MANIFEST: Final = Manifest(
    digest="d",
    mode="graph",
    mode_reason="",
    source="bundle",
    total_bytes=0,
    tensors=(),
    groups=(),
    dims=(Dim("batch", 1, 4), Dim("length", 1, 64), Dim("past", 1, CONTEXT)),
    inputs=(
        ValueSpec(name="ids", dtype="int64", shape=("batch", "length")),
        ValueSpec(name="count", dtype="int64", shape=("batch",)),
        ValueSpec(name="used", dtype="int64", shape=("batch",)),
        ValueSpec(name="cache", dtype="uint8", shape=("batch", "past", ROW)),
    ),
    outputs=(
        ValueSpec(name=LOGITS, dtype="float32", shape=("batch", WORDS)),
        ValueSpec(name=CACHE_NEW, dtype="uint8", shape=("batch", "length", ROW)),
    ),
    extra={"state": STATE, "pads": PADS, "generation": {"vocabulary": WORDS, "context": CONTEXT}},
)


def fed(cache: bytes, tokens: list[int]) -> tuple[bytes, int]:
    """Return the cache with the rows of these tokens too, and the token that comes next."""
    for token in tokens:
        cache += zlib.crc32(cache[-ROW:] + bytes([token])).to_bytes(4, "little") * (ROW // 4)
    return cache, zlib.crc32(cache) % WORDS


def recomputed(prompt: list[int], count: int) -> list[int]:
    cache, token = fed(b"", prompt)
    found = [token]
    while len(found) < count:
        cache, token = fed(cache, found[-1:])
        found.append(token)
    return found


class Talk:
    """One answer, as a client or the gateway drives it."""

    def __init__(self, rig: Rig, client: Client, prompt: list[int], most: int) -> None:
        self.rig, self.client, self.prompt, self.most = rig, client, prompt, most
        facts = Facts(
            version=1, digest="d", vocabulary=WORDS, context=rig.longest[0], piece=rig.longest[1]
        )
        ending = Ending(max_new_tokens=most)
        self.generating = Generating(facts, prompt, Sampling(), ending)
        self.is_asked = self.is_over = False
        self.error: PipeSwitchError | None = None
        rig.count += 1
        self.id = f"s{rig.count}"

    def ask(self) -> None:
        self.step, self.is_asked = self.generating.step(), True
        body: dict[str, Any] = {"sequence": self.id, "choose": self.step.choose}
        body |= {"start": True} if self.generating.starts else {}
        arrays = self.step.inputs()
        inputs = tuple(
            WireTensor(name=name, dtype="int64", shape=one.shape, frame=at)
            for at, (name, one) in enumerate(arrays.items())
        )
        header = RequestHeader(v=1, op="infer", id=self.id, model="m", inputs=inputs, body=body)
        try:
            self.rig.inference.infer(
                self.client, header, [one.tobytes() for one in arrays.values()]
            )
        except PipeSwitchError as error:
            self.came(error, [])

    def came(self, error: PipeSwitchError | None, tokens: list[int]) -> None:
        self.is_asked = False
        if isinstance(error, SequenceNotFound) and not self.generating.starts:
            self.rig.lost += 1
            self.generating.lost()
        elif error is not None:
            self.error, self.is_over = error, True
        else:
            self.generating.answered(tokens)
            self.is_over = self.generating.reason is not None
        if self.is_over:
            self.close()

    def close(self) -> None:
        self.is_over = True
        with contextlib.suppress(SequenceNotFound):
            self.rig.sequences.end(self.id, self.client.standing.tenant)


class Rig:
    def __init__(self, pool_bytes: int, seed: int = 0) -> None:
        descriptor = sealed_memfd("pool", pool_bytes)
        self.pool, self.now_ms, self.chance = RequestPool(descriptor), 0.0, random.Random(seed)
        os.close(descriptor)
        self.sequences = Sequences(self.pool, lambda: self.now_ms)
        log: Any = SimpleNamespace(is_on=False, note=lambda *_, **__: None)
        self.requests = Requests(self.pool, log, self.sequences)
        self.calls: deque[Callable[[], None]] = deque()
        self.computing: list[ev.InferArrived] = []
        self.inference = Inference(
            self.requests,
            take=self.take,
            answer=self.answer,
            call_soon=self.calls.append,
            now_ms=lambda: self.now_ms,
            max_bytes=1 << 30,
            deadline_ms=None,
        )
        self.inference.models.announce(
            ev.Announce(model=ModelName("m"), manifest=MANIFEST, priority=1)
        )
        self.longest = longest(MANIFEST, self.pool.share_bytes)
        self.talks: list[Talk] = []
        self.count = self.lost = self.waits = 0

    def client(self, tenant: str) -> Client:
        return Client(peer=SimpleNamespace(), standing=Standing(tenant=tenant))

    def take(self, event: ev.Event) -> None:
        if isinstance(event, ev.InferArrived):
            self.computing.append(event)
        else:
            assert isinstance(event, ev.CancelAsked | ev.PrefetchHint)

    def talk(self, client: Client, prompt: list[int], most: int) -> Talk:
        self.talks.append(Talk(self, client, prompt, most))
        return self.talks[-1]

    def compute(self, event: ev.InferArrived, error: PipeSwitchError | None = None) -> None:
        """As a worker does: some of the steps that it may go on for."""
        self.computing.remove(event)
        memory, named = self.pool.memory, {one.name: one for one in event.inputs}
        found = {
            name: bytes(memory[one.offset_bytes :][: one.size_bytes]) for name, one in named.items()
        }
        ids = np.frombuffer(found[IDS], np.int64).tolist()
        (used,) = np.frombuffer(found[USED], np.int64).tolist()
        assert event.choosing is not None
        cache, token = fed(found[CACHE][: ROW * used], ids)
        tokens = [token]
        while len(tokens) < self.chance.randint(1, event.choosing.steps):
            cache, token = fed(cache, tokens[-1:])
            tokens.append(token)
        at, outputs = event.reply_offset_bytes, list[SlabTensor]()
        rows = np.frombuffer(cache[ROW * used :], np.uint8).reshape(1, -1, ROW)
        for name, value in ((TOKENS, np.array([tokens])), (CACHE_NEW, rows)):
            memory[at : at + value.nbytes] = value.tobytes()
            outputs.append(
                SlabTensor(
                    name=name,
                    dtype=str(value.dtype),
                    shape=value.shape,
                    offset_bytes=at,
                    size_bytes=value.nbytes,
                )
            )
            at = aligned(at + value.nbytes, 512)
        given = () if error else tuple(outputs)
        self.answer(ev.Answer(token=event.token, outputs=given, error=error))

    def answer(self, answer: ev.Answer) -> None:
        pending = self.requests.find(answer.token)
        assert pending is not None
        client, name = pending.client, pending.request_id
        outgoing = self.requests.end(pending, answer)
        (talk,) = [one for one in self.talks if one.id == name]
        if outgoing is None or outgoing.on_end is None:
            talk.is_over = True
            return
        header = decode_reply(outgoing.frames)
        tokens = np.frombuffer(outgoing.frames[2], np.int64).tolist() if not header.error else []
        outgoing.on_end(True)
        assert not client.is_gone
        talk.came(answer.error, tokens)

    def turn(self) -> None:
        while self.calls:
            self.calls.popleft()()
        self.waits += self.pool.on_release is not None
        self.pool.check()

    def run(self, talks: list[Talk] | None = None) -> None:
        """All to their ends, whose requests are computed in any order."""
        while left := [one for one in self.talks if not one.is_over]:
            ready = [one for one in left if not one.is_asked]
            assert ready or self.computing, "all wait, and nothing goes on"
            move = self.chance.choice([*ready, *self.computing])
            move.ask() if isinstance(move, Talk) else self.compute(move)
            self.turn()

    def close(self) -> None:
        self.sequences.retract("m")
        self.turn()
        assert self.pool.is_empty, "memory is lost"
        assert self.pool.on_release is None
        self.inference.copier.shutdown()
        self.pool.close()


def prompt(seed: int, count: int = 5) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(WORDS) for _ in range(count)]


@pytest.mark.parametrize("callers", [("a", "a", "a"), ("a", "b", "c"), ("a", "a", "b", "b")])
@pytest.mark.parametrize("seed", range(4))
def test_answers_that_do_not_fit_together_all_end_with_their_own_tokens(
    seed: int, callers: tuple[str, ...]
) -> None:
    rig = Rig(320 << 10, seed)
    most = min(300, rig.longest[0] - 5)
    talks = [rig.talk(rig.client(one), prompt(n), most) for n, one in enumerate(callers)]
    assert len(talks) * most * ROW > rig.pool.capacity_bytes
    for one in talks:
        one.ask()
    rig.run()
    for one in talks:
        assert one.error is None
        assert one.generating.tokens == recomputed(one.prompt, most)
    assert rig.lost
    rig.close()


@pytest.mark.parametrize("length", [3, 150])
def test_the_longest_answer_alone_ends_and_a_longer_one_is_never_begun(length: int) -> None:
    rig = Rig(320 << 10)
    assert length < rig.longest[0] < CONTEXT
    talk = rig.talk(rig.client("a"), prompt(1, length), 10 * CONTEXT)
    rig.run()
    assert (talk.error, talk.generating.reason) == (None, "length")
    assert len(talk.generating.tokens) + length == rig.longest[0]
    assert talk.generating.tokens == recomputed(talk.prompt, rig.longest[0] - length)
    with pytest.raises(InvalidInput):
        rig.talk(rig.client("a"), prompt(1, rig.longest[0]), 1)
    rig.close()


@pytest.mark.parametrize("seed", [*range(8), 38, 69, 138])
def test_whatever_happens_no_begun_answer_is_refused_room_and_every_byte_is_free(seed: int) -> None:
    """Prompts in common, errors, those who hang up or are gone, hours without a request."""
    rig, chance = Rig((256 << 10) + seed % 12 * 8192, seed), random.Random(seed)
    clients = {name: rig.client(name) for name in "aab"}
    for _ in range(1200):
        move = chance.random()
        live = [one for one in rig.talks if not one.is_over]
        asking = [one for one in live if one.is_asked]
        if move < 0.1 and len(live) < 9:
            stem = prompt(chance.randrange(3), chance.choice([4, 40, 90]))
            talk = rig.talk(
                clients[chance.choice("aab")],
                [*stem, chance.randrange(WORDS)],
                chance.choice([9, 150, 200]),
            )
        elif move < 0.5 and (ready := [one for one in live if not one.is_asked]):
            chance.choice(ready).ask()
        elif move < 0.96 and rig.computing:
            error = InvalidInput("its own fault") if move > 0.955 else None
            rig.compute(chance.choice(rig.computing), error)
        elif move < 0.97 and asking:
            talk = chance.choice(asking)
            pending = rig.requests.waiting(talk.client.requests[talk.id])
            if pending.is_copying:  # as ``Frontend._take_back`` does
                pending.is_cancelled = True
                rig.inference.look_again()
        elif move < 0.975 and live:
            chance.choice(live).close() if not asking else None
        elif move < 0.98:
            rig.now_ms += IDLE_MS / 2
            rig.sequences.expire()
        elif move < 0.983:
            name = chance.choice("ab")
            gone, clients[name] = clients[name], rig.client(name)
            gone.is_gone = True
            rig.sequences.forget(gone)
            for talk in (one for one in live if one.client is gone):
                talk.is_over = not talk.is_asked
                if talk.is_asked and (found := gone.requests.get(talk.id)) is not None:
                    rig.requests.waiting(found).is_cancelled = True
            rig.inference.look_again()
        rig.turn()
    for number in range(5):
        rig.talk(clients["a"], prompt(number, 20), 150)
    rig.run()
    for talk in rig.talks:
        tokens = talk.generating.tokens
        assert tokens == recomputed(talk.prompt, len(tokens))[: len(tokens)]
        assert not (isinstance(talk.error, QueueFull) and tokens), "it ended midway"
    assert any(talk.generating.reason is not None for talk in rig.talks)
    assert rig.waits
    rig.close()


def test_a_new_answer_is_refused_while_those_that_began_wait() -> None:
    rig = Rig(320 << 10)
    client = rig.client("a")
    talks = [rig.talk(client, prompt(n), 300) for n in range(3)]
    while not rig.waits:
        for one in talks:
            if not one.is_asked:
                one.ask()
        rig.turn()
        for event in rig.computing[:]:
            rig.compute(event)
    late = rig.talk(client, prompt(9), 1)
    late.ask()
    assert isinstance(late.error, QueueFull)
    other = rig.talk(rig.client("b"), prompt(9), 1)
    other.ask()
    assert other.error is None
    rig.run()
    rig.close()
