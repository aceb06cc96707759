"""Runs in which a worker computes several steps of a language model, compared with single steps."""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipeswitch.base.errors import InvalidInput
from pipeswitch.extras.text import decode
from pipeswitch.extras.text.decode import DecodeRunner
from pipeswitch.extras.text.decoding.sampling import Sampling, next_token
from pipeswitch.ipc.control_page import sealed_memfd
from pipeswitch.ipc.messages.base import SlabTensor
from pipeswitch.ipc.messages.run import SamplingParams
from pipeswitch.programs.interface.dims import Dim
from pipeswitch.programs.interface.layout import Batching
from pipeswitch.workers.inference.pool import MappedPool

VOCABULARY, WIDTH, CONTEXT = 11, 3, 200
NAMES = ("ids", "count", "used", "cache")


class Toy:
    """Model whose logits depend on each used row of the cache, and on nothing else."""

    def __init__(self) -> None:
        specs = [
            [SimpleNamespace(name=one) for one in names]
            for names in (NAMES, ("logits", "cache_new"))
        ]
        self.manifest: Any = SimpleNamespace(
            inputs=specs[0],
            outputs=specs[1],
            digest="d",
            batching=Batching(limit=8, delay_ms=0.0, is_exact=False),
            dims=[Dim("past", 1, CONTEXT)],
        )
        self.is_nonsense = False
        self.fixed: Any = None  # logits of each row, if they do not depend on the cache

    def run(self, inputs: Any, before_group: Any) -> list[torch.Tensor]:
        before_group(0)
        ids, count, used, cache = inputs
        assert cache.shape[1] <= CONTEXT
        rows = torch.stack([ids * 7.0 + 1, ids * 3.0, ids * 5.0 + 2], -1)
        logits = torch.zeros(len(ids), VOCABULARY)
        for row in range(len(ids)):
            assert cache[row, used[row] + 1 :].isfinite().all()
            rows_so_far = torch.cat([cache[row, : used[row]], rows[row, : count[row]]])
            at = torch.arange(1, len(rows_so_far) + 1.0)[:, None]
            logits[row] = torch.cos((rows_so_far * at).sum() * torch.arange(1.0, VOCABULARY + 1))
        if self.fixed is not None:
            logits = self.fixed.clone()
        return [logits * float("nan") if self.is_nonsense else logits, rows]


class Pool:
    """Pool in which a slab is the tensor itself, or a cache's rows."""

    def gather(self, slab: Any, into: torch.Tensor) -> None:
        into.zero_()[: len(slab.rows)] = slab.rows

    def extend(self, slab: Any, rows: torch.Tensor) -> None:
        slab.made = rows.clone()

    def own(self, slab: torch.Tensor) -> torch.Tensor:
        return slab

    def number(self, slab: torch.Tensor) -> int:
        return int(slab.item())


def padded(inputs: list[Any]) -> list[torch.Tensor]:
    """Return the inputs, with the cache as a tensor that has one more row of garbage."""
    cache = torch.full((1, len(inputs[3].rows) + 1, WIDTH), 99.0)
    cache[0, :-1] = inputs[3].rows
    return [*inputs[:3], cache]


class Worker:
    def __init__(self, toy: Toy | None = None, device: str = "cpu") -> None:
        self.toy, self.stepping, self.copies = toy or Toy(), DecodeRunner(), 0
        self.device = device
        self.op_id, self.took_ms = 0, 0.0
        self.waits: Any = lambda: False

    def rows(self, tokens: list[int]) -> torch.Tensor:
        ids = torch.tensor([tokens], dtype=torch.int64).reshape(1, -1)
        return torch.stack([ids * 7.0 + 1, ids * 3.0, ids * 5.0 + 2], -1)

    def asked(
        self,
        tokens: list[int],
        most: int,
        *,
        number: int = 0,
        after: int = 0,
        length: int = 1,
        **how: Any,
    ) -> Any:
        used = len(tokens) - length
        rows = self.rows(tokens[:used])[0]
        cache = SimpleNamespace(
            rows=rows, shape=(1, used + 1, WIDTH), dtype="float32", size_bytes=rows.nbytes
        )
        inputs = [
            torch.tensor([tokens[used:]]),
            torch.tensor([length]),
            torch.tensor([used]),
            cache,
        ]
        return SimpleNamespace(
            sampling_params=SamplingParams(steps=most, **how),
            inputs=inputs,
            model="m",
            staging=(),
            cache=number,
            after=after,
        )

    def told(self, requests: list[Any]) -> list[tuple[list[int], torch.Tensor]]:
        """Compute one run; return the tokens and the new rows of each request."""
        head = SimpleNamespace(**vars(requests[0]) | {"runs": tuple(requests)})
        self.op_id += 1
        head.op_id = self.op_id
        run = self.stepping.begin(head, self.toy, Pool(), self.device, self.waits)  # type: ignore[arg-type]
        assert run is not None
        self.run = run
        inputs = run.inputs() if run.most else padded(requests[0].inputs)
        outputs = run.run(inputs, lambda _: None)
        rows_of_all = []
        for number in range(len(requests)):
            outputs_told = run.outputs_of(number, [one[number : number + 1] for one in outputs])
            assert outputs_told == ([], [])
            rows_of_all.append(requests[number].inputs[3].made.reshape(1, -1, WIDTH))
        self.stepping.ended(head, run, self.took_ms * run.count)
        return [([*one], rows) for one, rows in zip(run.tokens(), rows_of_all, strict=True)]

    def alone(self, tokens: list[int], count: int, **how: Any) -> list[int]:
        """Return the next ``count`` tokens, each computed by a new worker."""
        tokens = list(tokens)
        for _ in range(count):
            [([token], _)] = Worker(self.toy).told([self.asked(tokens, 1, **how)])
            tokens.append(token)
        return tokens[-count:]


@pytest.fixture(autouse=True)
def no_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "RUN_MS", 1e9)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("device", ["cpu", "cpu:0"])
def test_runs_of_any_caches_in_any_order_answer_each_as_alone(seed: int, device: str) -> None:
    """End, drop or move caches at random, so that rows kept by a worker are used or stale.

    ``cpu:0`` is the cpu, too, but its caches are filled like those of a GPU.
    """
    chance, worker = random.Random(seed), Worker(device=device)
    lives: dict[int, Any] = {}
    hows = [{"temperature": 3.0, "seed": n} for n in range(3)]
    hits = 0
    for number in range(60):
        for cache in range(number * 9, number * 9 + (len(lives) < 6)):
            tokens = [chance.randrange(VOCABULARY) for _ in range(chance.randrange(1, 60))]
            lives[cache] = [tokens, 0, chance.choice([{}, *hows])]
        if not lives:
            continue
        chosen = chance.sample(sorted(lives), min(len(lives), chance.randrange(1, 6)))
        most = chance.choice([1, 2, 9])
        requests = [
            worker.asked(lives[n][0], most, number=n, after=lives[n][1], **lives[n][2])
            for n in chosen
        ]
        caches = worker.stepping.caches
        hits += sum((n, lives[n][1], len(lives[n][0]) - 1) in caches._known for n in chosen)
        for n, (tokens, rows) in zip(chosen, worker.told(requests), strict=True):
            before, _, how = lives[n]
            assert tokens == worker.alone(before, len(tokens), **how)
            assert torch.equal(rows, worker.rows([before[-1], *tokens[:-1]]))
            lives[n][:2] = [[*before, *tokens], worker.op_id]
            if chance.random() < 0.1:  # this answer is lost, and another worker computes again
                lives[n][:2] = [[*before, *chance.choices(range(VOCABULARY), k=len(tokens))], 1]
            if len(lives[n][0]) > CONTEXT - 20 or chance.random() < 0.05:
                del lives[n]
    assert hits > 40


def test_caches_are_copied_between_pool_and_gpu_without_a_copy_on_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker, targets, gather = Worker(device="cpu:0"), set[int](), Pool.gather

    def record(pool: Pool, slab: Any, into: torch.Tensor) -> None:
        targets.add(into.untyped_storage().data_ptr())
        gather(pool, slab, into)

    monkeypatch.setattr(Pool, "gather", record)
    worker.told([worker.asked([1, 2, 3], 4), worker.asked([5, 6], 4)])
    assert targets == {worker.stepping.caches._rows.untyped_storage().data_ptr()}


@pytest.mark.parametrize("seed", range(8))
def test_a_gpu_chooses_the_token_that_the_host_would_choose(seed: int) -> None:
    """Compare with ``next_token`` for equal logits, infinities and NaN."""
    chance, worker = random.Random(seed), Worker(device="cpu:0")
    for kind in (torch.float32, torch.bfloat16, torch.float16):
        values = [chance.choice([0.5, 2.0, -1.0, math.nan, -math.inf]) for _ in range(4 * 11)]
        worker.toy.fixed = torch.tensor(values, dtype=kind).view(4, VOCABULARY)
        worker.toy.fixed[3] = chance.choice([math.nan, math.inf, -math.inf, 1.0])
        hows: list[dict[str, Any]] = [{}, {"temperature": 2.0}, {}, {}]
        expected: list[Any] = []
        with contextlib.suppress(InvalidInput):
            for row, how in zip(worker.toy.fixed.float().numpy(), hows, strict=True):
                expected.append([next_token(row, Sampling(**how), 2)])
        requests = [worker.asked([1, 2], 1, **how) for how in hows]
        if len(expected) == 4:
            assert [tokens for tokens, _ in worker.told(requests)] == expected
        else:
            with pytest.raises(InvalidInput):
                worker.told(requests)


def test_only_logits_that_the_host_needs_leave_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    worker, copied = Worker(device="cpu:0"), list[int]()
    to_host = torch.Tensor.cpu

    def record(value: torch.Tensor) -> torch.Tensor:
        copied.append(value.numel())
        return to_host(value)

    monkeypatch.setattr(torch.Tensor, "cpu", record)
    plain = [worker.asked([1, 2, 3], 4), worker.asked([5, 6], 4)]
    worker.told(plain)
    worker.told([*plain, worker.asked([7], 1, length=1, is_piece=True)])
    assert not copied
    worker.told([*plain, worker.asked([7], 4, temperature=1.0)])
    assert copied == [VOCABULARY] * 4


def test_a_run_ends_with_a_last_token_with_others_that_wait_and_with_its_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker = Worker()

    def run(**how: Any) -> list[int]:
        request = worker.asked([1, 2], 9, **how)
        worker.told([request])  # measures how long a step takes
        [(tokens, _)] = worker.told([request])
        return tokens

    whole = run()
    assert len(whole) == 9
    assert run(stop=(whole[3],)) == whole[: whole.index(whole[3]) + 1]
    answers = iter([False] * 8 + [False, True])
    worker.waits = lambda: next(answers)
    assert run() == whole[:2]
    worker.waits = lambda: False
    monkeypatch.setattr(decode, "RUN_MS", 0.0)
    assert run() == whole[:1]


def test_a_prompt_is_one_step_and_so_is_the_first_and_what_takes_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker = Worker()
    monkeypatch.setattr(decode, "RUN_MS", 40.0)
    monkeypatch.setattr(decode, "now_ms", lambda: 0.0)
    counts = []
    for length, worker.took_ms in ((1, 1.0), (3, 1.0), (1, 21.0), (1, 20.0), (1, 1.0)):
        [(tokens, _)] = worker.told([worker.asked([1, 2, 3], 9, length=length)])
        counts.append(len(tokens))
    assert counts == [1, 1, 9, 1, 9]


def test_of_a_piece_of_a_prompt_no_token_is_chosen() -> None:
    """Compute a part of a prompt: its rows are returned; its logits, here NaN, are not used."""
    worker = Worker()
    worker.toy.is_nonsense = True
    [(tokens, rows)] = worker.told([worker.asked([1, 2, 3], 1, length=2, is_piece=True)])
    assert tokens == []
    assert torch.equal(rows, worker.rows([2, 3]))


def test_logits_that_are_no_numbers_are_said() -> None:
    worker = Worker()
    worker.toy.is_nonsense = True
    with pytest.raises(InvalidInput):
        worker.told([worker.asked([1, 2], 1)])


@pytest.mark.parametrize("dtype", ["uint8", "float16", "bfloat16", "float32"])
def test_rows_in_pieces_are_gathered_and_new_ones_lie_behind_them(dtype: str) -> None:
    descriptor, kind = sealed_memfd("pool", 1 << 16), getattr(torch, dtype)
    pool, memory = MappedPool(descriptor, 1 << 16), mmap.mmap(descriptor, 0)
    os.close(descriptor)
    slab = SlabTensor(
        name="cache",
        dtype=dtype,
        shape=(1, 6, 8 // kind.itemsize),
        offset_bytes=4096,
        size_bytes=24,
        pieces=(4096, 0, 8192),
        piece_bytes=16,
    )
    memory[4096:4112], memory[:8], memory[8:16] = bytes(range(16)), bytes(range(50, 58)), b"x" * 8
    before = pool.own(slab)
    assert bytes(before.view(torch.uint8).flatten().tolist()) == bytes(
        [*range(16), *range(50, 58), *[0] * 24]
    )
    pool.extend(slab, torch.arange(24, dtype=torch.uint8).view(kind).reshape(1, 3, -1))
    assert memory[8:16] + memory[8192:8208] == bytes(range(24))
    with pytest.raises(IndexError):
        pool.extend(slab, torch.zeros(1, 4, 8 // kind.itemsize, dtype=kind))
    assert torch.equal(pool.own(slab).view(torch.uint8), before.view(torch.uint8))


def test_chances_are_those_of_the_logits_in_any_batch_and_run() -> None:
    """Batch requests with and without logprobs. A bias changes the token, not its probability."""
    tokens, biased = [1, 2, 3], {"logprobs": 3, "logit_bias": {4: 50.0}}
    alone, worker = Worker(), Worker()
    alone.told([alone.asked(tokens, 1)])  # the first run of a worker has only one step
    worker.told([worker.asked(tokens, 1) for _ in range(3)])
    [(chosen, _)] = alone.told([alone.asked(tokens, 5, options={"logprobs": 11})])
    alone.run.run(alone.run.inputs(), lambda _: None)  # as after a try that ran out of memory
    assert [len(one) for one in alone.run.chances()] == [5]
    for number, (own, top) in enumerate(alone.run.chances()[0]):
        expected = torch.log_softmax(logits_after([*tokens, *chosen[:number]]).double(), -1)
        assert own == pytest.approx(float(expected[chosen[number]]), abs=1e-6)
        assert [token for token, _ in top] == torch.argsort(-expected, stable=True).tolist()
        assert own == max(chance for _, chance in top)  # greedy tokens have the exact maximum
    requests = [
        worker.asked(tokens, 5, options={"logprobs": 0}),
        worker.asked([5, 6], 5),
        worker.asked(tokens, 5, options=biased),
    ]
    outputs_told = worker.told(requests)
    plain, _, forced = worker.run.chances()
    assert (outputs_told[0][0], outputs_told[2][0]) == (chosen, [4] * 5)
    assert [own for own, _ in plain] == [own for own, _ in alone.run.chances()[0]]
    assert forced[0][0] < forced[0][1][0][1]


def test_forced_tokens_come_first_with_their_own_chances() -> None:
    worker, forced = Worker(), (7, 0, 9)
    worker.told([worker.asked([2], 1)])
    [(tokens, rows)] = worker.told(
        [worker.asked([2], 3, options={"logprobs": 1}, forced=forced, temperature=3.0)]
    )
    assert tokens == [*forced]
    assert torch.equal(rows, worker.rows([2, 7, 0]))
    for number, (own, _) in enumerate(worker.run.chances()[0]):
        expected = torch.log_softmax(logits_after([2, *forced[:number]]).double(), -1)
        assert own == pytest.approx(float(expected[forced[number]]), abs=1e-6)


def logits_after(tokens: list[int]) -> torch.Tensor:
    worker = Worker()
    return worker.toy.run(padded(worker.asked(tokens, 1).inputs), lambda _: None)[0][0]
