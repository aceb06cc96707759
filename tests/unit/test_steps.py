"""A worker's run of several steps of a language model: as if each had been asked for alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipeswitch.errors import InvalidInput
from pipeswitch.ipc.messages import Choosing, SlabTensor
from pipeswitch.programs.layout import Batching
from workers.inference import steps
from workers.inference.steps import CHOSEN, Steps, StepTimes

VOCABULARY, WIDTH, END = 11, 3, 10
NAMES = ("ids", "count", "used", "cache")


class Toy:
    """Its logits depend on every row that is used, and on nothing else."""

    def __init__(self, eos: tuple[int, ...] = ()) -> None:
        specs = [[SimpleNamespace(name=one) for one in names]
                 for names in (NAMES, ("logits", "cache_new"))]  # fmt: skip
        self.manifest: Any = SimpleNamespace(
            inputs=specs[0], outputs=specs[1], extra={"generation": {"eos_ids": eos}},
            batching=Batching(limit=8, delay_ms=0.0, is_exact=False),
        )  # fmt: skip
        self.is_nonsense = False

    def run(self, inputs: Any, before_group: Any) -> list[torch.Tensor]:
        before_group(0)
        ids, count, used, cache = inputs
        made = torch.stack([ids * 7.0 + 1, ids * 3.0, ids * 5.0 + 2], -1)
        logits = torch.zeros(len(ids), VOCABULARY)
        for row in range(len(ids)):
            seen = torch.cat([cache[row, : used[row]], made[row, : count[row]]])
            at = torch.arange(1, len(seen) + 1.0)[:, None]
            logits[row] = torch.cos((seen * at).sum() * torch.arange(1.0, VOCABULARY + 1))
        return [logits * float("nan") if self.is_nonsense else logits, made]


def asked(steps: int, *, seed: int = 0, temperature: float = 0.0, length: int = 1) -> Any:
    choosing = Choosing(steps=steps, seed=seed, temperature=temperature)
    slab = SlabTensor(name="", dtype="int64", shape=(1, length), offset_bytes=0, size_bytes=8)
    return SimpleNamespace(choosing=choosing, inputs=[slab] * 4, model="m", landings=(), joined=())


def told(toy: Toy, requests: list[Any], rows: list[list[int]], most: int, **how: Any) -> Any:
    """What each gets of a run: its tokens and its new rows. ``rows``: the tokens before."""
    longest = max(map(len, rows)) + most
    cache = torch.full((len(rows), longest, WIDTH), 99.0)
    for row, tokens in enumerate(rows):
        given = toy.run([torch.tensor([tokens]), [0], [0], cache[:1, :0]], lambda _: None)[1]
        cache[row, : len(tokens) - 1] = given[0, :-1]
    inputs = [torch.tensor([[one[-1]] for one in rows]), torch.ones(len(rows), dtype=torch.int64),
              torch.tensor([len(one) - 1 for one in rows]), cache]  # fmt: skip
    run = Steps(toy, requests, most, "cpu", how.get("is_over", lambda: False))
    outputs = run.run(inputs, lambda _: None)
    found = []
    for row in range(len(rows)):
        values, own = run.told(row, [one[row : row + 1] for one in outputs])
        assert values[0] is CHOSEN
        assert [one.name for one in values] == ["tokens", "cache_new"]
        found.append((own[0][0].tolist(), own[1].clone()))
    return found


@pytest.mark.parametrize("temperature", [0.0, 3.0])
def test_several_steps_are_as_one_after_the_other_in_every_row(
    monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    monkeypatch.setattr(steps, "RUN_MS", 1e9)
    toy, rows = Toy(), [[1, 2, 3], [4], [5, 6, 7, 8, 9, 1]]
    requests = [asked(9, seed=n, temperature=temperature) for n in range(3)]
    together = told(toy, requests, rows, 9)
    for request, tokens, (chosen, made) in zip(requests, rows, together, strict=True):
        alone, alone_rows = list(tokens), []
        for _ in range(9):
            [([token], new)] = told(toy, [request], [alone], 0)
            alone.append(token)
            alone_rows.append(new[:, 0])
        assert chosen == alone[len(tokens) :]
        assert torch.equal(made[0], torch.cat(alone_rows))
    assert len({tuple(chosen) for chosen, _ in together}) == 3


def test_a_run_ends_with_a_last_token_with_others_that_wait_and_with_its_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(steps, "RUN_MS", 1e9)
    [(whole, _)] = told(Toy(), [asked(9)], [[1, 2]], 9)
    [(upto_end, rows)] = told(Toy(eos=(whole[3],)), [asked(9)], [[1, 2]], 9)
    assert upto_end == whole[: whole.index(whole[3]) + 1]
    assert rows.shape[1] == len(upto_end)
    waits = iter([False, True])
    [(upto_others, _)] = told(Toy(), [asked(9)], [[1, 2]], 9, is_over=lambda: next(waits))
    assert upto_others == whole[:2]
    monkeypatch.setattr(steps, "RUN_MS", 0.0)
    assert told(Toy(), [asked(9)], [[1, 2]], 9)[0][0] == whole[:1]


def test_logits_that_are_no_numbers_are_said() -> None:
    toy = Toy()
    toy.is_nonsense = True
    with pytest.raises(InvalidInput, match="largest logit at position 2"):
        told(toy, [asked(1)], [[1, 2]], 0)


def test_steps_follow_where_they_are_known_to_be_short_and_all_take_one_token() -> None:
    times, manifest, request = StepTimes(), Toy().manifest, asked(9)
    plain = SimpleNamespace(choosing=None, inputs=request.inputs)
    assert times.most(request, [request], manifest) == 0  # not known yet
    times.took(request, 3.0)
    assert times.most(request, [request], manifest) == 9
    assert times.most(request, [plain], manifest) is None
    assert times.most(request, [request, plain], manifest) == 0
    long = asked(9, length=2)
    assert times.most(long, [long], manifest) == 0
    times.took(request, 21.0)
    assert times.most(request, [request], manifest) == 0
