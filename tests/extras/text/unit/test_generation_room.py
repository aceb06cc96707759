"""Generations whose caches do not all fit: each generation that began must get the right tokens.

A row of a cache depends on the row before it, and a token on all rows, so any wrong byte is found.
"""

from __future__ import annotations

import json
import os
import random
import zlib
from collections import deque
from collections.abc import Callable, Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import msgspec
import numpy as np
import pytest

from pipeswitch.base import errors
from pipeswitch.base.roles import Principal
from pipeswitch.extras.text.caches import longest
from pipeswitch.extras.text.decoding.generation_settings import (
    CACHE_NEW,
    COUNT,
    IDS,
    LOGITS,
    STATE,
    USED,
)
from pipeswitch.extras.text.decoding.sampling import Sampling
from pipeswitch.extras.text.generations import Generations
from pipeswitch.frontend.inference import Inference
from pipeswitch.frontend.intake.request_pool import RequestPool
from pipeswitch.frontend.kinds import KindContext
from pipeswitch.frontend.requests import Requests
from pipeswitch.frontend.sequences.manager import IDLE_MS, Sequences
from pipeswitch.frontend.transport.clients import Session
from pipeswitch.ipc.control_page import sealed_memfd
from pipeswitch.ipc.messages.base import ModelName, OpId, SlabTensor
from pipeswitch.ipc.messages.helper import HelperFailed, HelperReady
from pipeswitch.ipc.messages.run import Run
from pipeswitch.programs.interface.dims import Dim
from pipeswitch.programs.interface.layout import CACHE, PADS, ValueSpec
from pipeswitch.scheduler.state import events as ev
from pipeswitch.wire.frames import RequestHeader, WireTensor, decode_reply
from tests.extras.text.unit.test_answer import RANGES
from tests.unit.manifests import plain_manifest
from tests.unit.sequence_world import gathered

ROW, WORDS, CONTEXT = 512, 50, 600
MANIFEST: Final = plain_manifest(
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
    extra={
        "state": STATE,
        "pads": PADS,
        "generation": {"vocabulary": WORDS, "context": CONTEXT, "eos_ids": ()},
    },
)


def fed(cache: bytes, tokens: list[int]) -> tuple[bytes, int]:
    """Return the cache with the rows of these tokens appended, and the next token."""
    for token in tokens:
        cache += zlib.crc32(cache[-ROW:] + bytes([token])).to_bytes(4, "little") * (ROW // 4)
    return cache, zlib.crc32(cache) % WORDS


def recomputed(prompt: list[int], count: int) -> list[int]:
    cache, token = fed(b"", prompt)
    tokens = [token]
    while len(tokens) < count:
        cache, token = fed(cache, tokens[-1:])
        tokens.append(token)
    return tokens


class Talk:
    """One generation and its answer, as the client sees them."""

    def __init__(self, rig: Rig, client: Session, prompt: list[int], most: int) -> None:
        self.rig, self.client, self.prompt, self.most = rig, client, prompt, most
        self.tokens: list[int] = []
        self.chances: list[Any] = []
        self.options: dict[str, Any] | None = None
        self.reason = ""
        self.is_asked = self.is_over = False
        self.error: errors.PipeSwitchError | None = None
        rig.count += 1
        self.id = f"s{rig.count}"

    def ask(self) -> None:
        self.is_asked = True
        ids = np.array(self.prompt, np.int64)
        inputs = (WireTensor(name=IDS, dtype="int64", shape=ids.shape, frame=0),)
        body: dict[str, Any] = {"max_tokens": self.most, "options": self.options}
        if (self.options or {}).get("json_schema"):
            body["stop_ids"] = [WORDS - 1]
        header = RequestHeader(v=1, op="generate", id=self.id, model="m", inputs=inputs, body=body)
        try:
            self.rig.generations.generate(self.client, header, [ids.tobytes()])
        except errors.PipeSwitchError as error:
            self.is_over, self.error = True, error

    def heard(self, frames: list[Any]) -> None:
        header = decode_reply(frames)
        if header.error is not None:
            self.is_over = True
            self.error = errors.from_wire(header.error.type, header.error.message, "", {})
            return
        assert not self.is_over
        self.tokens += header.body.get("tokens", [])
        self.chances += header.body.get("logprobs", [])
        self.is_over, self.reason = not header.more, header.body.get("reason", "")


class Rig:
    def __init__(self, pool_bytes: int, seed: int = 0) -> None:
        descriptor = sealed_memfd("pool", pool_bytes)
        self.pool, self.now_ms, self.chance = RequestPool(descriptor), 0.0, random.Random(seed)
        self.pool.memory[:] = b"s" * pool_bytes
        os.close(descriptor)
        self.sequences = Sequences(self.pool, lambda: self.now_ms)
        log: Any = SimpleNamespace(is_on=False, note=lambda *_, **__: None)
        self.requests = Requests(self.pool, log, self.sequences)
        self.calls: deque[Callable[[], None]] = deque()
        self.events: deque[ev.Event] = deque()
        self.computing: dict[int, Run] = {}
        self.between: set[int] = set()  # requests that wait for room between two runs
        self.inference = Inference(
            self.requests,
            take=self.events.append,
            answer=self.answer,
            call_soon=self.calls.append,
            now_ms=lambda: self.now_ms,
            max_bytes=1 << 30,
            deadline_ms=None,
        )
        self.checks = list[str]()  # schemas that processes try
        nobody: Any = SimpleNamespace(reply=None)
        context = KindContext(self.inference, nobody, Path())
        context.fork = self.fork
        self.generations = Generations(context)
        self.sequences.others.append(self.generations.states)
        self.inference.models.announce(
            ev.ModelAvailable(model=ModelName("m"), manifest=MANIFEST, priority=1)
        )
        self.longest = longest(MANIFEST, self.pool.share_bytes)
        self.talks: list[Talk] = []
        self.count = self.waits = 0
        self.chances: list[Any] = []  # log probabilities that workers report with any tokens

    def fork(self, _: str, settings: Any, on_end: Callable[[Any, int], None]) -> None:
        """Take note of a schema that a process should try."""
        self.checks.append(settings.values.decode())
        self.on_tried = on_end

    def client(self, tenant: str) -> Session:
        return Session(peer=SimpleNamespace(), principal=Principal(tenant=tenant))

    def talk(self, client: Session, prompt: list[int], most: int) -> Talk:
        self.talks.append(Talk(self, client, prompt, most))
        return self.talks[-1]

    def heard(self, frames: list[Any]) -> None:
        (talk,) = [one for one in self.talks if one.id == decode_reply(frames).id]
        talk.heard(frames)

    def cancel(self, talk: Talk) -> None:
        """Cancel a request, as the frontend does for a client that cancels or disconnects."""
        if (token := talk.client.requests.get(talk.id)) is not None:
            pending = self.requests.waiting(token)
            if pending.is_copying:
                pending.is_cancelled = True
            else:
                self.events.append(ev.CancelRequest(token=token))

    def try_schema(self, error: str | None = "") -> None:
        """Answer the schema that is being tried, like its process; None: the process ends."""
        self.checks.pop()
        assert not self.checks, "two schemas are tried at once"
        ready = HelperReady(pid=1)
        failed = HelperFailed(op_id=OpId(0), reason=error or "")
        self.on_tried(None if error is None else failed if error else ready, 0)
        self.turn()

    def compute(self, tokens: Collection[int], error: errors.PipeSwitchError | None = None) -> None:
        """Compute a run of these requests with a random number of steps, like worker and scheduler.
        Each request is then answered, or needs another run."""
        runs, more = {token: self.computing.pop(token) for token in tokens}, list[Any]()
        for answer in self.answers_of(runs):
            if error is not None:
                self.answer(ev.Reply(token=answer.token, error=error))
            elif self.is_more(runs[answer.token], answer):
                more.append(self.request(answer.token))
        for token in [one for one, run in self.computing.items() if run.leader in tokens]:
            del self.computing[token]
            self.generations.renew(self.request(token))
            more.append(self.request(token))
        for request in more:
            self.wait_or_compute(request.token, self.generations.prepare(request))

    def is_more(self, run: Run, answer: ev.Reply) -> bool:
        """Pass a run's result to the generations, like the scheduler."""
        assert run.sampling_params is not None
        more = not run.sampling_params.ends_with(answer.body["tokens"])
        answer = msgspec.structs.replace(answer, more=more)
        answer = self.generations.ended(self.request(answer.token), answer)
        self.answer(msgspec.structs.replace(answer, timing=None))
        return answer.more

    @staticmethod
    def request(token: int) -> Any:
        return SimpleNamespace(token=token)

    def wait_or_compute(self, token: int, run: Run | None) -> None:
        if run is None:
            self.between.add(token)
        else:
            self.between.discard(token)
            self.computing[token] = run

    def answers_of(self, runs: dict[int, Run]) -> list[ev.Reply]:
        steps = self.chance.randint(1, min(one.sampling_params.steps for one in runs.values()))  # type: ignore[union-attr]
        return [self.computed(token, run, steps) for token, run in runs.items()]

    def computed(self, token_of: int, run: Run, steps: int) -> ev.Reply:
        memory, named = self.pool.memory, {one.name: one for one in run.inputs}
        inputs = {
            name: bytes(memory[one.offset_bytes :][: one.size_bytes]) for name, one in named.items()
        }
        lent = named[CACHE]
        own = [(one.offset_bytes, one.size_bytes) for one in run.inputs if not one.pieces]
        start, end = min(own)[0], -(-sum(max(own)) // 4096) * 4096
        pages = {*range(start, end)}.difference(*(range(at, at + size) for at, size in own))
        assert not any(memory[at] for at in pages), "a kernel can read another request's bytes"
        inputs[CACHE] = gathered(self.pool, lent)
        ids = np.frombuffer(inputs[IDS], np.int64).tolist()
        (used,) = np.frombuffer(inputs[USED], np.int64).tolist()
        assert np.frombuffer(inputs[COUNT], np.int64).tolist() == [len(ids)]
        how = run.sampling_params
        assert how is not None
        cache, token = fed(inputs[CACHE][: ROW * used], ids)
        tokens = [] if how.is_piece else [*how.forced[:1]] or [token]
        while tokens and len(tokens) < steps and not how.ends_with(tokens):
            cache, token = fed(cache, tokens[-1:])
            tokens += how.forced[len(tokens) :][:1] or [token]
        assert how.allows(tokens)
        for row in range(used, len(cache) // ROW):
            at = lent.pieces[row * ROW // lent.piece_bytes] + row * ROW % lent.piece_bytes
            memory[at : at + ROW] = cache[row * ROW : (row + 1) * ROW]
        body: dict[str, Any] = {"tokens": tokens}
        if (how.options or {}).get("logprobs") is not None:
            body["logprobs"] = self.chances or [(-1.0, ((token, -1.0),)) for token in tokens]
        return ev.Reply(token=ev.Token(token_of), outputs=(), body=body)

    def answer(self, answer: ev.Reply) -> None:
        pending = self.requests.find(answer.token)
        if pending is None:
            return
        if answer.more:
            self.heard(self.requests.progress(pending, answer).frames)
            return
        self.between.discard(answer.token)
        self.generations.drop(pending)
        outgoing = self.requests.end(pending, answer)
        if outgoing is None or outgoing.on_end is None:
            (talk,) = [one for one in self.talks if one.id == pending.request_id]
            talk.is_over = True
            return
        self.heard(outgoing.frames)
        outgoing.on_end(True)

    def turn(self) -> None:
        while self.calls or self.events:
            while self.events:
                self.take(self.events.popleft())
            if self.calls:
                self.calls.popleft()()
        self.waits += self.pool.on_release is not None
        self.pool.check()

    def take(self, event: ev.Event) -> None:
        """Handle an event like the scheduler."""
        if isinstance(event, ev.InferArrived):
            self.computing[event.token] = event.run
        elif isinstance(event, ev.PoolFreed):
            self.sequences.expire()
            for token, run in self.generations.poll({}):
                if token in self.between:
                    self.wait_or_compute(token, run)
        elif isinstance(event, ev.CancelRequest):
            if event.token in self.computing or event.token in self.between:
                self.computing.pop(event.token, None)
                self.answer(ev.Reply(token=event.token, error=errors.Cancelled("it was cancelled")))
        else:
            assert isinstance(event, ev.PrefetchHint)

    def some(self) -> list[int]:
        """Return one to four random requests for the next run."""
        return self.chance.sample(
            sorted(self.computing), self.chance.randint(1, min(4, len(self.computing)))
        )

    def run(self) -> None:
        """Run all generations to their ends, with runs in random order."""
        self.turn()
        while remaining := [one for one in self.talks if not one.is_over]:
            if self.checks:
                self.try_schema()
                continue
            ready = [one for one in remaining if not one.is_asked]
            assert ready or self.computing, "all wait, and nothing goes on"
            if ready and (not self.computing or self.chance.random() < 0.3):
                self.chance.choice(ready).ask()
            else:
                self.compute(self.some())
            self.turn()

    def close(self) -> None:
        self.sequences.retract("m")
        self.turn()
        assert self.pool.is_empty, "memory is lost"
        assert self.pool.on_release is None
        assert not self.generations._live
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
        assert (one.error, one.reason) == (None, "length")
        assert one.tokens == recomputed(one.prompt, most)
    assert rig.waits
    rig.close()


@pytest.mark.parametrize("seed", range(6))
def test_scored_prompts_come_before_their_answers_and_need_no_more_room(seed: int) -> None:
    rig = Rig(320 << 10, seed)
    talks = [rig.talk(rig.client(f"{n}"), prompt(n, 1 + 40 * n), 150) for n in range(4)]
    for one in talks[:3]:
        one.options = {"logprobs": 1, "scores_prompt": True}
        one.ask()
    rig.run()
    for one in talks:
        scored = one.prompt[1:] if one.options else []
        assert (one.error, one.reason) == (None, "length")
        assert one.tokens == [*scored, *recomputed(one.prompt, 150)]
        assert [top[0][0] for _, top in one.chances] == (one.tokens if one.options else [])
    assert rig.waits
    rig.close()


def test_a_schema_is_tried_once_and_only_a_usable_one_reaches_a_worker() -> None:
    rig = Rig(320 << 10)
    good, bad = {"json_schema": "{}"}, {"json_schema": '{"const": 1}'}
    talks = [rig.talk(rig.client(name), [1, 2], 3) for name in "aaabc"]
    for talk, options in zip(talks, (good, bad, good, good, None), strict=True):
        talk.options = options
        talk.ask()
    rig.turn()
    assert {*rig.computing} == {5}  # only the one without a schema
    rig.cancel(talks[2])
    assert rig.checks == ["{}"]
    rig.try_schema()
    assert {*rig.computing} == {1, 4, 5}
    assert isinstance(talks[2].error, errors.Cancelled)
    rig.try_schema("it is too complex")
    assert isinstance(talks[1].error, errors.InvalidInput)
    for options, error in ((good, None), (bad, errors.InvalidInput)):  # both are known now
        again = rig.talk(rig.client("d"), [1, 2], 3)
        again.options = options
        again.ask()
        assert not rig.checks
        assert error is None or isinstance(again.error, error)
    rig.run()
    assert [one.error for one in talks if one not in talks[1:3]] == [None, None, None]
    rig.close()


def test_callers_take_turns_with_their_schemas_and_a_lost_process_refuses_only_one() -> None:
    rig, sent = Rig(4 << 20), list[str]()
    owner = rig.client("a")
    for number in range(99):
        talk = rig.talk(owner, [1], 1)
        talk.options = {"json_schema": json.dumps({"const": number})}
        talk.ask()
        if isinstance(talk.error, errors.QueueFull):
            break
    assert isinstance(talk.error, errors.QueueFull)
    other = rig.talk(rig.client("b"), [1], 1)
    other.options = {"json_schema": "{}"}
    other.ask()
    assert other.error is None
    for error in ("", None, ""):
        sent.append(rig.checks[-1])
        rig.try_schema(error)
    assert "{}" in sent
    assert [type(one.error).__name__ for one in rig.talks if one.error] == [
        "ServerUnavailable",
        "QueueFull",
    ]
    rig.run()
    rig.close()


@pytest.mark.parametrize("top", [(), ((WORDS, -1.0),), ((0, -1.0), (1, -1.0))])
def test_impossible_chances_of_a_worker_end_the_answer(top: Any) -> None:
    rig = Rig(320 << 10)
    rig.chances = [(-1.0, top)] * (1 if top else 99)
    talk = rig.talk(rig.client("a"), [1, 2], 1)
    talk.options = {"logprobs": 1}
    rig.run()
    assert type(talk.error).__name__ == "TaskFailed"
    rig.close()


@pytest.mark.parametrize("length", [3, 150])
def test_the_longest_answer_alone_ends_and_a_longer_one_is_never_begun(length: int) -> None:
    rig = Rig(320 << 10)
    assert length < rig.longest[0] < CONTEXT
    talk = rig.talk(rig.client("a"), prompt(1, length), 10 * CONTEXT)
    rig.run()
    assert (talk.error, talk.reason) == (None, "length")
    assert talk.tokens == recomputed(talk.prompt, rig.longest[0] - length)
    longer = rig.talk(rig.client("a"), prompt(1, rig.longest[0]), 1)
    longer.ask()
    assert isinstance(longer.error, errors.InvalidInput)
    rig.close()


@pytest.mark.parametrize("seed", [*range(8), 38, 69, 138])
def test_whatever_happens_no_begun_answer_is_refused_room_and_every_byte_is_free(seed: int) -> None:
    """Make random moves: common prompts, errors, cancels, lost clients, hours without a request."""
    rig, chance = Rig((256 << 10) + seed % 12 * 8192, seed), random.Random(seed)
    clients = {name: rig.client(name) for name in "aab"}
    for _ in range(1200):
        move = chance.random()
        live = [one for one in rig.talks if not one.is_over]
        live_asked = [one for one in live if one.is_asked]
        if move < 0.1 and len(live) < 9:
            stem = prompt(chance.randrange(3), chance.choice([4, 40, 90]))
            rig.talk(
                clients[chance.choice("aab")],
                [*stem, chance.randrange(WORDS)],
                chance.choice([9, 150, 200]),
            )
            if chance.random() < 0.2:
                rig.talks[-1].options = {"json_schema": json.dumps({"const": chance.randrange(99)})}
        elif move < 0.3 and (ready := [one for one in live if not one.is_asked]):
            chance.choice(ready).ask()
        elif move < 0.4 and rig.checks:
            rig.try_schema(chance.choice(["", "", "it is too complex", None]))
        elif move < 0.95 and rig.computing:
            error = errors.InvalidInput("its own fault") if move > 0.945 else None
            rig.compute(rig.some(), error)
        elif move < 0.965 and live_asked:
            rig.cancel(chance.choice(live_asked))
        elif move < 0.98:
            rig.now_ms += IDLE_MS / 2
            rig.sequences.expire()
        elif move < 0.983:
            name = chance.choice("ab")
            gone, clients[name] = clients[name], rig.client(name)
            gone.is_gone = True
            rig.sequences.remove_client(gone)
            for talk in [one for one in live if one.client is gone]:
                talk.is_over = not talk.is_asked
                rig.cancel(talk)
        rig.turn()
    for number in range(5):
        rig.talk(clients["a"], prompt(number, 20), 150)
    rig.run()
    for talk in rig.talks:
        assert talk.tokens == recomputed(talk.prompt, len(talk.tokens))[: len(talk.tokens)]
        assert not (isinstance(talk.error, errors.QueueFull) and talk.tokens), "it ended midway"
    assert any(talk.reason for talk in rig.talks)
    assert rig.waits
    rig.close()


def test_a_new_answer_is_refused_while_those_that_began_wait() -> None:
    rig = Rig(320 << 10)
    client = rig.client("a")
    for number in range(3):
        rig.talk(client, prompt(number), 300).ask()
    rig.turn()
    while not rig.waits:
        rig.compute([*rig.computing])
        rig.turn()
    late = rig.talk(client, prompt(9), 1)
    late.ask()
    assert isinstance(late.error, errors.QueueFull)
    other = rig.talk(rig.client("b"), prompt(9), 1)
    other.ask()
    assert other.error is None
    rig.run()
    rig.close()


def test_a_refused_answer_has_reused_no_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(320 << 10)
    client, blocks = rig.client("a"), rig.sequences.blocks
    rig.talk(client, prompt(1, 100), 1).ask()
    rig.run()
    monkeypatch.setattr(blocks, "resize", lambda *_: rig.pool.reserve("a", 1 << 30, 0))
    talk = rig.talk(client, prompt(1, 100), 1)
    talk.ask()
    assert isinstance(talk.error, errors.QueueFull)
    assert rig.sequences.as_dict()["tokens_reused"] == 0
    rig.close()


def test_an_answer_that_another_server_began_continues_after_its_tokens() -> None:
    rig, whole = Rig(320 << 10), recomputed(prompt(1), 30)
    talk = rig.talk(rig.client("a"), prompt(1), 30)
    for count in (1, 17, 29):
        ids = np.array(prompt(1), np.int64)
        body = {"max_tokens": 30, "so_far": whole[:count]}
        inputs = (WireTensor(name=IDS, dtype="int64", shape=ids.shape, frame=0),)
        header = RequestHeader(v=1, op="generate", id=talk.id, model="m", inputs=inputs, body=body)
        talk.tokens, talk.is_over, talk.is_asked = whole[:count], False, True
        rig.generations.generate(talk.client, header, [ids.tobytes()])
        rig.turn()
        rig.run()
        assert (talk.tokens, talk.reason) == (whole, "length")
    header = msgspec.structs.replace(header, body={"max_tokens": 30, "so_far": whole})
    with pytest.raises(errors.InvalidInput):
        rig.generations.generate(talk.client, header, [ids.tobytes()])
    rig.close()


@pytest.mark.parametrize("claim", ["rows", "tokens", "no tokens", "many tokens"])
def test_what_a_worker_claims_wrongly_ends_that_answer_alone(claim: str) -> None:
    rig = Rig(320 << 10)
    first, second = (rig.talk(rig.client("a"), prompt(n), 40) for n in (1, 2))
    for one in (first, second):
        one.ask()
    rig.turn()
    runs = {token: rig.computing.pop(token) for token in sorted(rig.computing)}
    right, other = (rig.computed(token, run, 1) for token, run in runs.items())
    rows = SlabTensor(
        name=CACHE_NEW, dtype="uint8", shape=(1, 1, ROW), offset_bytes=0, size_bytes=ROW
    )
    wrong: dict[str, Any] = {
        "rows": {"outputs": (rows,)},
        "tokens": {"body": {"tokens": [WORDS]}},
        "no tokens": {"body": {"tokens": []}},
        "many tokens": {"body": {"tokens": [1] * 41}},
    }
    bad = msgspec.structs.replace(right, **wrong[claim])
    assert [rig.is_more(runs[one.token], one) for one in (bad, other)] == [False, True]
    rig.wait_or_compute(other.token, rig.generations.prepare(rig.request(other.token)))
    rig.turn()
    assert isinstance(first.error, errors.TaskFailed)
    rig.run()
    assert second.tokens == recomputed(second.prompt, 40)
    rig.close()


class Unread:
    """Frame whose bytes must not be read."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __bytes__(self) -> bytes:
        raise AssertionError("it was read")


def ids_of(*ids: int, shape: tuple[int, ...] = (), dtype: str = "int64") -> Any:
    tensor = WireTensor(name=IDS, dtype=dtype, shape=shape or (len(ids),), frame=0)
    return (tensor,), [np.array(ids, np.int64).tobytes()]


TWO = WireTensor(name=IDS, dtype="int64", shape=(2,), frame=0)
UNFIT: dict[str, tuple[Any, dict[str, Any]]] = {
    "no input": (((), []), {}),
    "two inputs": (((TWO, TWO), [Unread(16), Unread(16)]), {}),
    "two dimensions": (ids_of(1, 2, shape=(1, 2)), {}),
    "floats": (ids_of(1, 2, dtype="float64"), {}),
    "no ids": (ids_of(), {}),
    "fewer bytes": (((TWO,), [Unread(8)]), {}),
    "endless": (
        ((WireTensor(name=IDS, dtype="int64", shape=(6 << 20,), frame=0),), [Unread(48 << 20)]),
        {},
    ),
    "no such token": (ids_of(1, WORDS), {}),
    "below 0": (ids_of(1, -1), {}),
    "a large id": (ids_of(1, 1 << 40), {}),
    "no tokens wanted": (ids_of(1), {"max_tokens": 0}),
    "a text": (ids_of(1), {"max_tokens": "9"}),
    "too cold": (ids_of(1), {"temperature": -1.0}),
    "no tokens left": (ids_of(1), {"top_p": -0.1}),
    "many ends": (ids_of(1), {"stop_ids": [1] * 1000}),
    **{
        f"{name} {value!r:.20}": (
            ids_of(1, 2),
            {name: value} if name in Sampling.__struct_fields__ else {"options": {name: value}},
        )
        for name, (values, _) in RANGES.items()
        for value in values
    },
    **{f"stop id {one}": (ids_of(1), {"stop_ids": [0, one]}) for one in (-1, WORDS, 1 << 40)},
    "unknown": (ids_of(1), {"max_new_tokens": 4}),
    "too many so far": (ids_of(1), {"max_tokens": 2, "so_far": [1, 2]}),
    "no such token so far": (ids_of(1), {"so_far": [WORDS]}),
    "another version": (ids_of(1), {"version": 7}),
}


@pytest.mark.parametrize("what", UNFIT)
def test_a_request_that_does_not_fit_is_refused(what: str) -> None:
    rig, ((inputs, frames), body) = Rig(320 << 10), UNFIT[what]
    header = RequestHeader(v=1, op="generate", id="r", model="m", inputs=inputs, body=body)
    with pytest.raises(errors.ModelNotFound if "version" in what else errors.InvalidInput):
        rig.generations.generate(rig.client("a"), header, frames)
    assert not rig.requests.tokens()
    rig.close()


def test_generations_that_come_together_compute_their_common_prompt_once() -> None:
    """One generation computes the prompt, in two runs, and leads the others of the same caller."""
    rig, stem = Rig(640 << 10), prompt(1, 120)
    mine, other = rig.client("a"), rig.client("b")
    talks = [rig.talk(mine, [*stem, *prompt(number + 2, 7)], 9) for number in range(4)]
    talks += [rig.talk(other, [*stem, 1, 2], 9), rig.talk(mine, prompt(9, 120), 9)]
    for one in talks:
        one.ask()
    rig.turn()
    first, *led = [one.client.requests[one.id] for one in talks]
    for _ in range(2):  # the prompt takes two runs
        assert [rig.computing[token].leader for token in led] == [first] * 3 + [None] * 2
        rig.compute([first])
        rig.turn()
    assert {rig.computing[token].leader for token in led} == {None}
    rig.run()
    assert all(one.tokens == recomputed(one.prompt, 9) for one in talks)
    assert rig.sequences.as_dict()["tokens_reused"] == 3 * 112  # only tokens in whole blocks
    rig.close()


def test_a_cache_has_room_for_few_rows_ahead_if_steps_are_slow() -> None:
    rig = Rig(640 << 10)
    rig.answers_of = lambda runs: [rig.computed(*one, 1) for one in runs.items()]  # type: ignore[method-assign]
    talk = rig.talk(rig.client("a"), prompt(1, 60), 450)
    talk.ask()
    rig.turn()
    while len(talk.tokens) < 400:
        rig.compute([*rig.computing])
        rig.turn()
    held_bytes = rig.sequences.by_model()["m"]["sequence_bytes"]
    assert held_bytes <= 1.05 * ROW * (60 + len(talk.tokens))
    rig.run()
    rig.close()
