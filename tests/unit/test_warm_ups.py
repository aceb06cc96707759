"""Standbys that capture, while the device is idle, the CUDA graphs that another worker has."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipeswitch.ipc.messages.worker import JobEnded, WorkerClean
from pipeswitch.scheduler.state import events as ev
from pipeswitch.workers.inference.task import Programs
from tests.unit.test_budgets import Counted
from tests.unit.test_cuda_view import expected, made, program
from tests.unit.test_scheduler_rules import Rig

SHAPES = (("float32", (2, 4), ()),)


class WarmRig(Rig):
    """Server with the resident model "a"; ``slots`` has the workers that were told to capture."""

    def __init__(self) -> None:
        self.slots: list[int] = []
        super().__init__(arena_bytes=25 << 20)
        self.register("a")
        self.register("b", 20)
        self.make_resident("a")

    def _take(self, commands: list[ev.Command]) -> None:
        super()._take(commands)
        sent = [one for one in commands if isinstance(one, ev.Send)]
        self.slots += [one.target.slot for one in sent if getattr(one.message, "shapes", ())]

    def captured(self, slot: int = 0) -> None:
        self.worker(slot, WorkerClean(op_id=0, model="a", captured=(SHAPES,)))  # type: ignore[arg-type]


def test_each_worker_captures_once_what_another_one_has_captured() -> None:
    rig = WarmRig()
    rig.captured()
    assert rig.slots == [1, 2], "the first worker stays ready"
    rig.prepared()
    rig.captured(slot=1)
    rig.worker_restarts(1)
    rig.prepared()
    assert rig.slots == [1, 2]


def test_neither_a_task_nor_a_job_loses_time_to_a_capture() -> None:
    rig = WarmRig()
    rig.infer("a")
    rig.captured(slot=1)
    assert rig.slots == []
    rig.done()
    assert sorted(rig.slots) == [0, 2]
    rig = WarmRig()
    job = rig.train("cifar")
    rig.captured()
    rig.tick(rig.now_ms + 1e6)
    assert rig.slots == []
    slot = job.slot
    rig.worker(slot, JobEnded(op_id=job.op_id, outcome="done", step=1))
    rig.worker_restarts(slot, 0)
    assert rig.slots != []


def test_an_evicted_models_graphs_are_not_captured() -> None:
    rig = WarmRig()
    rig.infer("b")
    rig.captured()
    rig.arrived("b")
    rig.done()
    assert rig.slots == []


def test_only_so_many_graphs_are_known() -> None:
    rig, many = WarmRig(), tuple((("float32", (size, 1), ()),) for size in range(200))
    rig.worker(0, WorkerClean(op_id=0, model="a", captured=many))  # type: ignore[arg-type]
    assert {len(one.graphs) for one in rig.state.workers.values()} == {32}


def test_requests_make_no_more_calls_when_all_is_captured() -> None:
    rig, spent = Counted(), []
    for captured in ((), (SHAPES,)):
        rig.worker(0, WorkerClean(op_id=0, model="a", captured=captured))  # type: ignore[arg-type]
        rig.prepared()
        with rig.counted() as calls:
            rig.infer("a")
            rig.computed()
        spent.append(calls.calls)
    assert spent[0] == spent[1]


@pytest.mark.parametrize(("turn", "has_room"), [(4, True), (6, True), (4, False)])
def test_a_worker_captures_with_memory_of_its_own_unless_another_task_computes(
    turn: int, has_room: bool
) -> None:
    bound, weights = program()
    device, _ = made(bound)
    turns = iter([4, turn, turn])
    view = SimpleNamespace(
        device="cpu",
        control_page=type("Page", (), {"turn": property(lambda _: next(turns))})(),
        computing=lambda _: contextlib.nullcontext(),
        quiesce=lambda: None,
        is_lost=lambda _: False,
        improve=lambda one, *more: one.improve(*more),
        trim=lambda needed_bytes: has_room or needed_bytes < bound.manifest.total_bytes,
    )
    programs: Any = Programs.__new__(Programs)
    programs._view, programs.bound = view, lambda _: device
    programs._program = lambda _: bound._program
    programs.warm_up(SimpleNamespace(op_id=5, shapes=SHAPES))
    left = (0 if turn == 4 else 1) if has_room else 3
    assert len([*turns]) == left, "it stops between groups"
    x = torch.randn(2, 4)
    assert torch.equal(device.run([x], lambda _: None)[0], expected(x, weights))
    assert device.is_replaying == (turn == 4 and has_room)
