"""Batches of a loader that jobs share equal those of a job's own loader, even after a resume."""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from pipeswitch import job
from pipeswitch.base import extras
from pipeswitch.base.errors import ConfigError, InvalidInput, SharedInputRefused
from pipeswitch.base.roles import OWNER
from pipeswitch.extras.shared_input.loader import SharedLoader
from pipeswitch.extras.shared_input.ring import HEAD_BYTES, Ring
from pipeswitch.extras.shared_input.table import SHARERS_BYTE
from pipeswitch.frontend.verbs import Rules, ask
from pipeswitch.ipc.control_page import sealed_memfd
from pipeswitch.scheduler.state.events import Token
from pipeswitch.wire.frames import RequestHeader

SAMPLES, BATCH = 40, 8
PASS = SAMPLES // BATCH


class Noisy(Dataset[tuple[torch.Tensor, int]]):
    """Dataset that draws from the three global random generators, and counts its calls."""

    def __init__(self, factor: float = 1.0) -> None:
        self.calls = 0
        self.factor = factor

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        self.calls += 1
        noise = torch.rand(100) + random.random() + float(np.random.rand())
        return noise * self.factor, index


def noisy(**options: Any) -> DataLoader[Any]:
    return DataLoader(Noisy(), **{"batch_size": BATCH, "shuffle": True, **options})


class Script:
    """A job that shares input: its loader, its ring of shared batches, and its step."""

    def __init__(self, descriptor: int, name: str, loader: Any = None, **options: Any) -> None:
        self.step = 0
        self.loader = loader or noisy()
        ring = Ring(os.dup(descriptor), name) if descriptor >= 0 else None
        options.setdefault("seed", 0)
        self.shared = SharedLoader(
            self.loader, "input", step=lambda: self.step, ring=ring, **options
        )

    def batches(self, count: int) -> Iterator[Any]:
        """Yield ``count`` batches, from one or several passes over the data."""
        while True:
            for batch in self.shared:
                yield batch
                self.step += 1
                if self.step == count:
                    return


def alone(count: int, **options: Any) -> list[Any]:
    return [[part.clone() for part in batch] for batch in Script(-1, "", **options).batches(count)]


def count(descriptor: int, jobs: int) -> None:
    """Write into the ring how many jobs share it, like the controller."""
    os.pwrite(descriptor, jobs.to_bytes(8, sys.byteorder), SHARERS_BYTE)


def equal(one: Any, other: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.fixture
def memory() -> Iterator[int]:
    descriptor = sealed_memfd("test", HEAD_BYTES + (1 << 20))
    yield descriptor
    os.close(descriptor)


def test_two_jobs_see_what_each_sees_alone_and_the_loader_runs_once(memory: int) -> None:
    a, b = Script(memory, "a"), Script(memory, "b")
    expected = alone(3 * PASS)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    for want, x, y in zip(expected, a.batches(15), b.batches(15), strict=True):
        assert equal(x, want)
        assert equal(y, want)
    assert torch.equal(torch.get_rng_state(), before)  # the script's generators are unchanged
    assert (a.shared.loaded, a.shared.found) == (15, 0)
    assert (b.shared.loaded, b.shared.found) == (1, 15)  # b loads one batch, to compare it
    assert a.loader.dataset.calls == 3 * SAMPLES


def test_a_loader_with_a_generator_of_its_own_gives_the_batches_of_its_plain_loop() -> None:
    data = TensorDataset(torch.arange(SAMPLES).float())
    plain, shared = (
        DataLoader(data, BATCH, shuffle=True, generator=torch.Generator().manual_seed(3))
        for _ in range(2)
    )
    script = Script(-1, "", shared)
    expected = [batch for _ in range(3) for batch in plain]
    for want, got in zip(expected, script.batches(3 * PASS), strict=True):
        assert equal(got, want)


def test_by_hand_the_batches_are_those_of_the_job() -> None:
    job._install(None)
    job._session.step = 0  # type: ignore[misc]
    module = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    loader = job.shared(noisy())
    batches = [
        [part.clone() for part in batch]
        for _ in job.epochs(2)
        for batch in job.steps(loader, model=module, optimizer=optimizer)
    ]
    assert all(map(equal, batches, alone(2 * PASS)))


def test_a_job_resumes_at_its_next_batch_in_a_process_that_has_loaded_nothing(memory: int) -> None:
    expected = alone(2 * PASS)
    for stop in range(1, 2 * PASS):
        first = Script(memory, "a")
        batches = first.batches(2 * PASS)
        batches_kept = [next(batches) for _ in range(stop)][-1:]
        state = first.shared.state_dict()
        second = Script(memory, "a")
        second.step = stop
        if stop % PASS:
            second.shared.load_state_dict(state)
        assert all(map(equal, second.batches(2 * PASS), expected[stop:]))
        assert equal(batches_kept[0], expected[stop - 1])


def test_a_pass_in_the_body_of_another_is_not_the_one_that_is_resumed() -> None:
    script = Script(-1, "")
    for index, _ in enumerate(script.shared):
        list(script.shared)
        assert script.shared.state_dict()["begins"] == [0, 0]
        assert script.shared.state_dict()["batches"] == index + 1


def test_other_jobs_keep_their_batches_where_one_is_killed_while_it_loads(memory: int) -> None:
    """Kill a child that has taken the first batch, while it loads the second batch."""
    expected = alone(PASS)
    reading, writing = os.pipe()

    def die(calls: Callable[[], int]) -> None:
        if calls() > BATCH:
            os.write(writing, b".")
            signal.pause()

    pid = os.fork()
    if pid == 0:
        victim = Script(memory, "a", DataLoader(Told(die), BATCH, shuffle=True))
        list(victim.shared)
        os._exit(1)
    os.read(reading, 1)
    survivor = Script(memory, "b").batches(PASS)
    got = [next(survivor)]
    os.kill(pid, signal.SIGKILL)  # otherwise the survivor would wait for the second batch
    os.waitpid(pid, 0)
    assert all(map(equal, [*got, *survivor], expected))
    os.close(reading)
    os.close(writing)


class Told(Noisy):
    def __init__(self, tell: Callable[[Callable[[], int]], None]) -> None:
        super().__init__()
        self.tell = tell

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        sample = super().__getitem__(index)
        self.tell(lambda: self.calls)
        return sample


def test_a_write_in_place_is_refused_and_reaches_no_other_job(memory: int) -> None:
    a, b = Script(memory, "a"), Script(memory, "b")
    for script in (a, b):
        batches = script.batches(PASS)
        x, _ = next(batches)
        if script is b:
            assert equal([x], [alone(1)[0][0]])
        x[0].add_(1)
        with pytest.raises(SharedInputRefused, match=r"written in place.*x = x.clone\(\)"):
            next(batches)


def test_a_batch_that_the_script_keeps_stays_as_it_was(memory: int) -> None:
    a, b = Script(memory, "a"), Script(memory, "b")
    batches_kept = []
    count = 20 * PASS  # these batches fill the ring about twenty times
    for x, _ in zip(a.batches(count), b.batches(count), strict=True):
        if a.step % 50 == 0:
            batches_kept.append(x)
    expected = alone(count)
    assert all(map(equal, batches_kept, expected[::50]))


def test_what_does_not_fit_in_the_ring_is_each_job_s_own() -> None:
    descriptor = sealed_memfd("test", HEAD_BYTES + 4096)
    a, b = Script(descriptor, "a"), Script(descriptor, "b", noisy(batch_size=20))
    assert all(map(equal, a.batches(PASS), alone(PASS)))
    assert a.shared.found == 0
    del b
    os.close(descriptor)


def test_jobs_with_another_order_batch_size_seed_or_bytes_are_refused(memory: int) -> None:
    a = Script(memory, "a")
    batches = a.batches(PASS)
    next(batches)
    for other, options, text in (
        (noisy(batch_size=4), {}, "batch_size 4 here, 8 there"),
        (noisy(shuffle=False), {}, "sampler SequentialSampler here"),
        (noisy(), {"seed": 1}, "seed 1 here, 0 there"),
        (DataLoader(Noisy(2.0), BATCH, shuffle=True), {}, 'job "a": batch 0 has other bytes'),
        (noisy(generator=torch.Generator().manual_seed(1)), {}, "the samples of batch 0"),
    ):
        with pytest.raises(SharedInputRefused, match=f'{text}.*job.shared\\(loader, "other"\\)'):
            next(Script(memory, "b", other, **options).batches(1))
    assert all(map(equal, batches, alone(PASS)[1:]))


class AtOnce:
    """Batch sampler that draws a whole pass when the pass begins."""

    def __init__(self, generator: torch.Generator | None = None) -> None:
        self.generator = generator

    def __len__(self) -> int:
        return PASS

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(SAMPLES, generator=self.generator)
        return iter([part.tolist() for part in order.split(BATCH)])


def test_an_order_that_is_drawn_at_once_is_the_same_in_every_job(memory: int) -> None:
    a, b = (Script(memory, name, DataLoader(Noisy(), batch_sampler=AtOnce())) for name in "ab")
    want = [[part.clone() for part in batch] for batch in a.batches(2 * PASS)]
    torch.manual_seed(5)  # the script's own seed must have no effect on batches
    assert all(map(equal, b.batches(2 * PASS), want))


def test_an_order_that_a_generator_of_its_own_draws_at_once_is_that_of_a_plain_loop() -> None:
    data = TensorDataset(torch.arange(SAMPLES).float())
    plain, shared = (
        DataLoader(data, batch_sampler=AtOnce(torch.Generator().manual_seed(3))) for _ in range(2)
    )
    expected = [batch for _ in range(2) for batch in plain]
    assert all(map(equal, Script(-1, "", shared).batches(2 * PASS), expected))


def test_batches_of_one_sample_nothing_and_plain_values_are_shared(memory: int) -> None:
    table = torch.arange(3.0 * SAMPLES).reshape(SAMPLES, 3)

    def column(samples: list[Any]) -> Any:
        index = samples[0][1]
        return {
            "x": table[index : index + 1, 1],
            "none": None,
            "text": ("ü", float("nan"), 1 << 60),
        }

    a, b = (Script(memory, n, noisy(collate_fn=column, batch_size=1)) for n in "ab")
    for x, y in zip(a.batches(SAMPLES), b.batches(SAMPLES), strict=True):
        assert repr(x) == repr(y)
    assert b.shared.found == SAMPLES


def test_a_pass_may_run_where_no_gradients_are_kept(memory: int) -> None:
    a, b = Script(memory, "a"), Script(memory, "b")
    with torch.inference_mode():
        for want, x, y in zip(alone(PASS), a.batches(PASS), b.batches(PASS), strict=True):
            assert equal(x, want)
            assert equal(y, want)


def test_it_tells_of_its_dataset_as_its_loader_does() -> None:
    shared = Script(-1, "").shared
    assert (len(shared.dataset), shared.batch_size, len(shared)) == (SAMPLES, BATCH, PASS)
    with pytest.raises(AttributeError, match="object has no attribute 'data_set'"):
        _ = shared.data_set


class Stateful(Noisy):
    def __init__(self) -> None:
        super().__init__()
        self.rng = np.random.default_rng(0)


class Endless(Noisy):
    __len__: Any = None


class Moved(DataLoader[Any]):
    def __iter__(self) -> Any:
        return map(list, super().__iter__())


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(9))


@pytest.mark.parametrize(
    ("loader", "text"),
    [
        ([1, 2], "a list cannot be asked.*give it a torch DataLoader"),
        (DataLoader(Stream()), "a Stream cannot be asked"),
        (noisy(num_workers=2), "num_workers=2.*num_workers=0"),
        (noisy(batch_size=None), "batch_size=None"),
        (DataLoader(Endless(), BATCH, sampler=range(9)), "a Endless cannot .*__len__"),
        (Moved(Noisy(), BATCH), "Moved has an __iter__ of its own"),
        (DataLoader(Stateful(), BATCH), r"generator of its own \(loader.rng\)"),
    ],
)
def test_what_cannot_be_shared_is_refused_at_once(loader: Any, text: str) -> None:
    with pytest.raises(SharedInputRefused, match=text):
        SharedLoader(loader, "input", seed=0, step=lambda: 0)


class Pair(NamedTuple):
    x: torch.Tensor
    y: int


class Flag(int):
    pass


def test_a_batch_may_have_named_tuples_and_paths(memory: int) -> None:
    def odd(samples: list[Any]) -> Pair:
        return Pair(torch.tensor([float(len(samples)), 0.0]), Path("a.png"))  # type: ignore[arg-type]

    for _ in range(2):  # loaded, and found
        batch = next(iter(Script(memory, "a", noisy(collate_fn=odd)).shared))
        assert type(batch) is Pair
        assert batch.y == Path("a.png")
        assert batch.x[1] == 0


@pytest.mark.parametrize("descriptor", ["ring", "alone"])
@pytest.mark.parametrize("other", [Fraction(1, 2), Flag(1)])
def test_a_batch_of_other_things_is_refused_by_its_path(
    other: Any, descriptor: str, memory: int
) -> None:
    def odd(samples: list[Any]) -> dict[str, Any]:
        return {"x": samples, "path": other}

    script = Script(memory if descriptor == "ring" else -1, "a", noisy(collate_fn=odd))
    with pytest.raises(InvalidInput, match=r"\$\['path'\]: a .* cannot be stored.*collate_fn"):
        next(iter(script.shared))


def test_the_table_survives_a_death_in_the_middle_of_a_write(memory: int) -> None:
    a = Script(memory, "a")
    batches = a.batches(PASS)
    next(batches)
    ring = a.shared._ring
    newer = ring._newer[0]
    start = os.sysconf("SC_PAGESIZE") + (newer + 1) % 2 * (256 << 10)
    ring._head[start : start + 64] = b"\xff" * 64  # an unfinished write into the idle half
    assert Script(memory, "b").shared._ring is not None
    assert all(map(equal, batches, alone(PASS)[1:]))


def test_a_pass_that_was_left_in_its_first_body_is_not_begun_again() -> None:
    first, second = Script(-1, ""), Script(-1, "")
    batches = iter(first.shared)
    next(batches)
    second.shared.pass_by(first.shared.state_dict())  # all that a job knows before its first step
    expected = next(iter(first.shared))
    assert equal(next(iter(second.shared)), expected)
    assert not equal(expected, alone(1)[0])


def test_an_installation_without_this_folder_refuses_a_job_with_a_group(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.touch()
    body = {"name": "j", "entry": str(script), "args": [], "share": "group"}
    header = RequestHeader(v=1, op="train", id="1", body=body)
    ask(header, Token(1), OWNER, Rules())
    monkeypatch.setattr(extras, "functions", lambda *_: {})
    with pytest.raises(ConfigError, match="shared_input"):
        ask(header, Token(1), OWNER, Rules())


def test_a_job_that_is_alone_in_its_group_uses_no_ring_until_another_one_comes(memory: int) -> None:
    count(memory, 1)
    first = Script(memory, "one")
    batches = first.batches(2 * PASS)
    expected = alone(2 * PASS)
    got = [[part.clone() for part in next(batches)] for _ in range(PASS)]
    assert os.fstat(memory).st_blocks * 512 <= HEAD_BYTES  # a job alone writes no batch to the ring
    count(memory, 2)
    got += [[part.clone() for part in next(batches)] for _ in range(PASS)]
    assert all(map(equal, got, expected))
    second = Script(memory, "two")
    assert all(map(equal, second.batches(2 * PASS), expected))
    assert (second.shared.loaded, second.shared.found) == (PASS + 1, PASS)  # 1 loaded to compare


def test_a_job_that_is_left_alone_finds_what_the_others_had_loaded(memory: int) -> None:
    count(memory, 2)
    first, second = Script(memory, "one"), Script(memory, "two")
    for _ in first.batches(PASS):
        pass
    count(memory, 1)
    assert all(map(equal, second.batches(2 * PASS), alone(2 * PASS)))
    assert (second.shared.loaded, second.shared.found) == (PASS + 1, PASS)  # 1 loaded to compare
