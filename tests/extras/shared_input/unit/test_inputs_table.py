"""Table of the batches that jobs share in a ring of memory, and of the jobs that need them."""

from __future__ import annotations

import random

import pytest

from pipeswitch.base.errors import SharedInputRefused
from pipeswitch.extras.shared_input.table import READY, BatchTable, Entry, Label

FACTS = {"samples": "100", "seed": "0"}
SIZE = 10


def label(index: int, *, begins: int = 0, order: str = "") -> Label:
    return Label("input", (begins, 0), index, order or f"{begins}/{index}")


class Jobs:
    """Jobs that load batches when the table requires it; each holds its last batch."""

    def __init__(self, room: int) -> None:
        self.table = BatchTable(capacity_bytes=room * SIZE)
        self.held: dict[int, list[int]] = {}
        self.loads: list[tuple[int, int]] = []

    def take(self, job: int, index: int, **facts: str) -> Entry:
        entries = self.held.setdefault(job, [])
        return self.table.take(job, f"job-{job}", label(index), FACTS | facts, entries)

    def step(self, job: int, index: int) -> bool:
        """Take a batch, and load it if necessary; return True if it was in the ring."""
        answer = self.take(job, index)
        if answer.loading == READY:
            self.held[job] = [answer.id]
            return True
        assert answer.loading == job
        self.loads.append((job, index))
        self.held[job] = []
        if self.table.place(answer.id, SIZE) is not None:
            self.held[job] = [self.table.done(answer.id).id]
        self.check()
        return False

    def check(self) -> None:
        """Check that batches lie in the ring without overlap, and that held batches are ready."""
        placed = sorted((e.offset_bytes, e.size_bytes) for e in self.table.entries if e.size_bytes)
        ends = [offset + size for offset, size in placed]
        assert all(end <= start for end, (start, _) in zip(ends, placed[1:], strict=False))
        assert not ends or ends[-1] <= self.table.capacity_bytes
        there = {entry.id for entry in self.table.entries if entry.loading == READY}
        assert all(there.issuperset(row.held) for row in self.table.rows)


def test_what_one_job_loaded_the_other_finds() -> None:
    jobs = Jobs(room=4)
    assert [jobs.step(job, index) for index in range(10) for job in (1, 2)] == [False, True] * 10


def test_a_batch_that_is_being_loaded_is_waited_for_and_its_loader_s_death_ends_the_wait() -> None:
    jobs = Jobs(room=4)
    assert jobs.take(1, 0).loading == 1
    assert jobs.take(2, 0).loading == 1
    jobs.table.drop(1)
    assert jobs.take(2, 0).loading == 2


def test_a_load_that_fails_leaves_the_batch_to_the_other() -> None:
    jobs = Jobs(room=4)
    answer = jobs.take(1, 0)
    assert answer.loading == 1
    jobs.table.abandon(answer.id)
    assert jobs.take(2, 0).loading == 2


def test_a_job_that_is_ahead_by_more_than_the_ring_leaves_in_it_what_the_other_wants_first() -> (
    None
):
    jobs = Jobs(room=4)
    jobs.step(2, 0)
    for index in range(20):
        jobs.step(1, index)
    indices = [index for index in range(1, 20) if jobs.step(2, index)]
    assert indices[:3] == [1, 2, 3]  # the ring's fourth place has the batch that job 1 holds


def test_no_job_waits_for_one_that_is_behind_or_gone() -> None:
    jobs = Jobs(room=4)
    jobs.step(3, 0)
    for index in range(50):  # job 3 makes no progress, as if suspended, or paused and gone
        jobs.step(1, index)
        jobs.step(2, index)
    jobs.table.drop(3)
    loads = len(jobs.loads)
    assert all(jobs.step(1, index) <= jobs.step(2, index) for index in range(50, 99))
    assert len(jobs.loads) - loads == 49  # each batch is loaded once


def test_what_a_job_still_maps_is_never_overwritten() -> None:
    jobs = Jobs(room=1)
    jobs.step(1, 0)
    answer = jobs.take(2, 7)
    assert answer.loading == 2
    assert jobs.table.place(answer.id, SIZE) is None
    jobs.held[1] = []
    assert not jobs.step(1, 1)
    assert [entry.label.index for entry in jobs.table.entries] == [1]


def test_a_batch_larger_than_the_ring_is_its_loader_s_alone() -> None:
    jobs = Jobs(room=1)
    answer = jobs.take(1, 0)
    assert answer.loading == 1
    assert jobs.table.place(answer.id, 2 * SIZE) is None
    assert not jobs.table.entries


def test_other_facts_and_another_order_are_refused_by_name_until_the_other_is_gone() -> None:
    jobs = Jobs(room=4)
    jobs.step(1, 0)
    with pytest.raises(SharedInputRefused, match=r'job "job-1": seed 7 here, 0 there.*"other"'):
        jobs.take(2, 0, seed="7")
    with pytest.raises(SharedInputRefused, match="the samples of batch 0"):
        jobs.table.take(2, "job-2", label(0, order="x"), FACTS, [])
    assert jobs.table.subscribers() == {1}
    jobs.table.drop(1)
    assert jobs.take(2, 0, seed="7").loading in (READY, 2)
    assert jobs.table.take(2, "job-2", label(1, order="x"), FACTS, []).loading == 2


def test_random_lives_keep_the_ledger_whole_and_every_batch_its_own() -> None:
    for seed in range(60):
        dice = random.Random(seed)
        jobs = Jobs(room=dice.randint(1, 6))
        at = dict.fromkeys(range(3), 0)
        for _ in range(150):
            job = dice.randrange(3)
            if dice.random() < 0.05:
                jobs.table.drop(job)
                jobs.held[job] = []
                at[job] = max(0, at[job] - dice.randint(0, 5))
            jobs.step(job, at[job])
            entries = [e for e in jobs.table.entries if e.id in jobs.held[job]]
            assert all(entry.label == label(at[job]) for entry in entries)
            at[job] += 1
