"""Jobs with one budget for activations: in any order of turns, they keep it, and all jobs end."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from pipeswitch.extras.offload.activation_budget import TILE_BYTES, ActivationBudget
from pipeswitch.ipc.control_page import BOARD_BYTES, Board, sealed_memfd


class Script:
    """A job's steps; a step is a list of the numbers of tiles (units of memory) that it needs."""

    def __init__(self, control_page: Board, slot: int, steps: list[list[int]], total: int) -> None:
        view: Any = SimpleNamespace(control_page=control_page)
        self.tiles = ActivationBudget(view, slot, total * TILE_BYTES)
        self.steps, self.at = steps, 0
        self.measured = 0

    def goes_on(self, more: int) -> bool:
        """Go to the step's next number, during the job's turn; also take up to ``more`` free tiles.
        Return False if the job needs tiles that other jobs have."""
        tiles, needs = self.tiles, self.steps[0]
        if self.at == 0:
            if not tiles.may_begin:
                return False
            tiles.enter_step()
        need = needs[self.at]
        tiles.is_stuck = need * TILE_BYTES > tiles.free_bytes
        if tiles.is_stuck and need * TILE_BYTES > tiles.free_bytes:
            tiles.hold(tiles.held * TILE_BYTES)
            assert tiles.can_wait or not others_claim(tiles), "they wait for each other"
            return False
        tiles.hold(min(need + more, tiles.free_bytes // TILE_BYTES) * TILE_BYTES)
        tiles.is_stuck = False
        self.at += 1
        if self.at == len(needs):
            self.measured = max(self.measured, *needs)
            tiles.learn(self.measured * TILE_BYTES)
            tiles.hold(0)
            tiles.enter_step(is_in=False)
            self.steps.pop(0)
            self.at = 0
        return True

    def lets_go(self) -> None:
        """Release tiles whose copies end after the job's turn."""
        if self.at:
            self.tiles.hold(min(self.tiles.held, self.steps[0][self.at - 1]) * TILE_BYTES)


def others_claim(tiles: ActivationBudget) -> bool:
    return any(tiles._others()[0])


@given(data=st.data(), count=st.integers(2, 4))
def test_jobs_that_know_their_needs_keep_the_budget_and_never_wait_for_each_other(
    data: st.DataObject, count: int
) -> None:
    """Each job's first step is its largest. Until it is measured, no other job is in a step."""
    total = data.draw(st.integers(2, 12))
    descriptor = sealed_memfd("control_page", BOARD_BYTES)
    control_page = Board(descriptor)
    os.close(descriptor)
    jobs = []
    for slot in range(count):
        steps = st.lists(
            st.lists(st.integers(0, total), min_size=1, max_size=4), min_size=1, max_size=4
        )
        drawn = sorted(data.draw(steps), key=max, reverse=True)
        jobs.append(Script(control_page, slot, drawn, total))
    while any(job.steps for job in jobs):
        order = data.draw(st.permutations([job for job in jobs if job.steps]))
        more = data.draw(st.integers(0, total))
        assert any(job.goes_on(more) for job in order), "nobody can go on"
        assert sum(control_page.tiles()[0]) <= total
        data.draw(st.sampled_from(jobs)).lets_go()
        held_bytes = [job.tiles.held for job in jobs]
        assert sum(held_bytes) <= total
        assert all(job.tiles.most <= total for job in jobs)
    assert control_page.tiles()[0] == [0] * 64
    control_page.close()
