"""Generations with the real code of frontend and worker, on blocks of the request pool."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from pipeswitch.extras.text import decode
from pipeswitch.extras.text.decode import DecodeRunner
from pipeswitch.ipc.control_page import sealed_memfd
from pipeswitch.scheduler.state import events as ev
from pipeswitch.workers.inference.pool import MappedPool
from pipeswitch.workers.inference.task import _inputs, _write
from tests.extras.text.unit import test_generation_room as allocation

POOL_BYTES = 640 << 10


class Program:
    """Model of ``test_generation_room``, as a program that reads padded tensors."""

    manifest = allocation.MANIFEST

    def run(self, inputs: Any, before_group: Callable[[int], None]) -> list[torch.Tensor]:
        ids, count, used, caches = inputs
        logits = torch.zeros(len(ids), allocation.WORDS)
        rows = torch.zeros(len(ids), ids.shape[1], allocation.ROW, dtype=torch.uint8)
        for at, own in enumerate(ids):
            before = caches[at, : used[at]].contiguous().numpy().tobytes()
            cache, token = allocation.fed(before, own[: count[at]].tolist())
            logits[at, token] = 1.0
            new = np.frombuffer(cache[len(before) :], np.uint8).reshape(-1, allocation.ROW)
            rows[at, : count[at]] = torch.from_numpy(new.copy())
        return [logits, rows]


class Rig(allocation.Rig):
    """Rig in which a worker computes runs, and sometimes dies before its answer arrives."""

    def __init__(self, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        def shared(name: str, size: int) -> int:
            descriptor = sealed_memfd(name, size)
            self.worker_pool = MappedPool(descriptor, size)
            return descriptor

        monkeypatch.setattr(allocation, "sealed_memfd", shared)
        super().__init__(POOL_BYTES, seed)
        self.stepping, self.op_id, self.deaths, self.fed = DecodeRunner(), 0, 0, 0

    def answers_of(self, runs: dict[int, Any]) -> list[ev.Reply]:
        self.op_id += 1
        head = SimpleNamespace(
            runs=tuple(runs.values()),
            staging=(),
            is_timed=False,
            model="m",
            op_id=self.op_id,
            is_code=False,
        )
        bound: Any = Program()
        while True:
            run = self.stepping.begin(head, bound, self.worker_pool, "cpu", lambda: False)
            assert run is not None
            inputs, rows = _inputs(head, self.worker_pool, run, self.stepping)
            outputs = run.run(inputs, lambda _: None)
            assert _write(bound, outputs, head, rows, self.worker_pool, run) == [()] * len(runs)
            if self.chance.random() > 0.1:
                break
            self.stepping, self.deaths = DecodeRunner(), self.deaths + 1
        self.stepping.ended(head, run, 1.0)
        timing: Any = SimpleNamespace(op_id=self.op_id, compute_ms=1.0 * self.op_id)
        return [
            ev.Reply(token=ev.Token(token), timing=timing, body={"tokens": list(tokens)})
            for token, tokens in zip(runs, run.tokens(), strict=True)
        ]


@pytest.mark.parametrize("seed", range(6))
def test_streams_of_common_prompts_have_their_own_tokens_whatever_dies_or_is_evicted(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode, "RUN_MS", 1e9)
    rig, chance = Rig(seed, monkeypatch), random.Random(seed)
    for number in range(14):
        stem = allocation.prompt(chance.randrange(2), chance.choice([20, 47, 100]))
        ids = [*stem, *allocation.prompt(number, chance.randrange(1, 5))]
        rig.talk(rig.client(chance.choice("aab")), ids, chance.choice([5, 60, 150]))
    rig.run()
    for one in rig.talks:
        assert one.error is None or not one.tokens
        assert one.tokens == allocation.recomputed(one.prompt, one.most)[: len(one.tokens)]
    assert sum(one.reason == "length" for one in rig.talks) > 7
    assert rig.deaths
    assert rig.sequences.as_dict()["tokens_reused"]
    rig.close()
