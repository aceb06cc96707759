"""Runs in which a worker computes several steps of a language model, compared with single steps."""

from __future__ import annotations

import math
import mmap
import os
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_cuda.host_torch import Tape, TapeRecorder

from pipeswitch.base.errors import InvalidInput
from pipeswitch.devices.cuda.graphs import DeviceProgram, GraphBudget
from pipeswitch.extras.text import decode
from pipeswitch.extras.text.decode import DecodeRunner
from pipeswitch.extras.text.decoding.sampling import Sampling, next_token
from pipeswitch.ipc.control_page import sealed_memfd
from pipeswitch.ipc.messages.base import SlabTensor
from pipeswitch.ipc.messages.run import SamplingParams
from pipeswitch.programs.interface.dims import Dim
from pipeswitch.programs.interface.layout import Batching
from pipeswitch.programs.running.executor import BoundGraph
from pipeswitch.workers.inference.pool import MappedPool

VOCABULARY, WIDTH, CONTEXT = 11, 3, 200
NAMES = ("ids", "count", "used", "cache")


class Toy(BoundGraph):
    """Model whose logits depend on each used row of the cache, and on nothing else.

    Logits are integers, and often equal. It has two groups, which a fake GPU can capture.
    """

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
            groups=(0, 1),
            tensors=(),
        )
        self.graph: Any = SimpleNamespace(inputs=(), nodes=(), first_node_value=0)
        self.fixed: Any = None  # logits of each row, if they do not depend on the cache

    def is_tried(self, shapes: Any) -> bool:
        return True

    def start(self, inputs: Any) -> Any:
        return {"inputs": inputs}

    def run_group(self, index: int, environment: Any) -> None:
        ids, count, used, cache = environment["inputs"]
        if index == 0:
            environment["rows"] = torch.stack([ids * 7.0 + 1, ids * 3.0, ids * 5.0 + 2], -1)
            return
        past, length = (torch.arange(one.shape[1]) for one in (cache, ids))
        used = used[:, None]
        at = torch.cat(
            [(past + 1) * (past < used), (used + length + 1) * (length < count[:, None])], 1
        )
        sums = (torch.cat([cache, environment["rows"]], 1) * at[:, :, None]).sum((1, 2))
        logits = (sums % 97)[:, None] * torch.arange(1, VOCABULARY + 1) % 13
        environment["logits"] = logits if self.fixed is None else self.fixed.clone()

    def finish(self, environment: Any) -> list[torch.Tensor]:
        return [environment["logits"], environment["rows"]]

    def run(self, inputs: Any, before_group: Any) -> list[torch.Tensor]:
        environment = self.start(inputs)
        assert inputs[3].shape[1] <= CONTEXT
        assert inputs[3].isfinite().all()
        for index in range(2):
            before_group(index)
            self.run_group(index, environment)
        return self.finish(environment)


class Pool:
    """Pool in which a slab is the tensor itself, or a cache's rows."""

    def gather(self, slab: Any, into: torch.Tensor) -> None:
        self.target = into.untyped_storage().data_ptr()  # no copy on the host is between
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
        self.toy, self.stepping, self.device = toy or Toy(), DecodeRunner(), device
        self.bound: Any = self.toy
        if device != "cpu":
            self.bound = DeviceProgram(self.bound, "cpu", TapeRecorder(), GraphBudget(1 << 30))
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
            is_timed=False,
            cache=number,
            after=after,
        )

    def told(self, requests: list[Any]) -> list[tuple[list[int], torch.Tensor]]:
        """Compute one run; return the tokens and the new rows of each request."""
        head = SimpleNamespace(**vars(requests[0]) | {"runs": tuple(requests)})
        self.op_id += 1
        head.op_id = self.op_id
        self.pool = Pool()
        run = self.stepping.begin(head, self.bound, self.pool, self.device, self.waits)  # type: ignore[arg-type]
        assert run is not None
        self.run = run
        self.inputs = run.inputs() if run.most else padded(requests[0].inputs)
        outputs = run.run(self.inputs, lambda _: None)
        rows_of_all = []
        for number in range(len(requests)):
            outputs_told = run.outputs_of(number, [one[number : number + 1] for one in outputs])
            assert outputs_told == ([], [])
            rows_of_all.append(requests[number].inputs[3].made.reshape(1, -1, WIDTH))
        self.stepping.ended(head, run, self.took_ms * run.count)
        if self.bound is not self.toy:
            self.bound.improve()
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

    ``cpu:0`` is the cpu, too, but computes like a GPU.
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
        hits += sum((n, lives[n][1], len(lives[n][0]) - 1) in caches.known for n in chosen)
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


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_a_gpu_chooses_the_token_that_the_host_would_choose(seed: int, kind: Any) -> None:
    """Compare with ``next_token`` for equal logits, infinities and NaN."""
    chance, worker = random.Random(seed), Worker(device="cpu:0")
    values = [chance.choice([0.5, 2.0, -1.0, math.nan, -math.inf]) for _ in range(4 * 11)]
    fixed = worker.toy.fixed = torch.tensor(values, dtype=kind).view(4, VOCABULARY)
    fixed[3] = chance.choice([math.nan, math.inf, -math.inf, 1.0])
    hows: list[dict[str, Any]] = [{}, {"temperature": 2.0}, {}, {}]
    requests = [worker.asked([1, 2], 1, **how) for how in hows]
    rows = [*zip(fixed.float().numpy(), hows, strict=True)]
    for _ in range(2):  # eager, then in a graph
        if not fixed[3].isfinite().all():
            with pytest.raises(InvalidInput):
                worker.told(requests)
        else:
            tokens = [[next_token(row, Sampling(**how), 2)] for row, how in rows]
            assert [own for own, _ in worker.told(requests)] == tokens


def test_a_step_is_one_replay_that_copies_no_cache_whatever_fails_in_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker, fails = Worker(device="cpu:0"), set[int]()
    copied, calls, to_host = list[int](), list[int](), list[int]()
    requests = [worker.asked([1, 2, 3], 9), worker.asked([5, 6], 9, temperature=1.0)]
    expected = [worker.alone([1, 2, 3], 9), worker.alone([5, 6], 9, temperature=1.0)]
    worker.told(requests)  # eager, with one step
    copy, replay = torch.Tensor.copy_, Tape.replay

    def record(value: torch.Tensor, source: torch.Tensor, **how: Any) -> torch.Tensor:
        copied.append(source.data_ptr())
        return copy(value, source, **how)

    def fail_once(tape: Tape) -> None:
        calls.append(1)
        if len(calls) in fails:
            fails.clear()
            raise torch.OutOfMemoryError("in the middle of a run")
        replay(tape)

    monkeypatch.setattr(Tape, "replay", fail_once)
    for number in range(1, 10):
        calls.clear()
        fails.add(number)
        with pytest.raises(torch.OutOfMemoryError):
            worker.told(requests)
        run, inputs = worker.run, worker.inputs
        run.run(inputs, lambda _: None)
        assert [list(one) for one in run.tokens()] == expected
    calls.clear()
    monkeypatch.setattr(torch.Tensor, "copy_", record)
    monkeypatch.setattr(torch.Tensor, "cpu", lambda one: to_host.append(one.numel()) or one)
    run.run(inputs, lambda _: None)
    assert (len(calls), [list(one) for one in run.tokens()]) == (9, expected)
    assert run._cache.data_ptr() not in copied
    assert to_host == [VOCABULARY] * 9, "only the sampled row is needed on the host"
    assert worker.pool.target == run._cache.data_ptr()


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


def test_on_a_gpu_a_step_is_single_if_groups_are_timed_or_a_token_may_lack_a_row() -> None:
    worker = Worker(device="cpu:0")
    worker.toy.manifest.extra = {"generation": {"vocabulary": VOCABULARY}}
    for rows, is_timed, most in ((VOCABULARY, False, 1), (VOCABULARY - 1, False, 0), (99, True, 0)):
        worker.bound.limits = {0: rows, 2: 9}
        request = worker.asked([1, 2], 1)
        request.is_timed = is_timed
        worker.told([request])
        assert worker.run.most == most


def test_of_a_piece_of_a_prompt_no_token_is_chosen() -> None:
    """Compute a part of a prompt: its rows are returned; its logits, here NaN, are not used."""
    worker = Worker()
    worker.toy.fixed = torch.full((1, VOCABULARY), math.nan)
    [(tokens, rows)] = worker.told([worker.asked([1, 2, 3], 1, length=2, is_piece=True)])
    assert tokens == []
    assert torch.equal(rows, worker.rows([2, 3]))


def test_logits_that_are_no_numbers_are_said() -> None:
    worker = Worker()
    worker.toy.fixed = torch.full((1, VOCABULARY), math.nan)
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
