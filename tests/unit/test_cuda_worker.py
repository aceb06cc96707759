"""Workers on cuda that cannot continue, and slices that are full."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipeswitch.ipc.messages.run import Run
from pipeswitch.ipc.messages.worker import InferenceDone, InferenceFailed, RunInference
from pipeswitch.workers import main as worker_main
from pipeswitch.workers.inference.task import _Groups, infer


def test_a_worker_whose_termination_thread_fails_leaves_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A broken context's stream cannot be drained, so a worker that parked would wait for ever."""

    class Left(BaseException):
        pass

    def leave(status: int) -> None:
        raise Left(status)

    def receive() -> None:
        raise RuntimeError("cudaDeviceSynchronize: cudaErrorIllegalAddress")

    monkeypatch.setattr(worker_main.os, "_exit", leave)
    worker: Any = worker_main.WorkerProcess.__new__(worker_main.WorkerProcess)
    worker._control = SimpleNamespace(receive=receive)
    with pytest.raises(Left) as caught:
        worker._listen_or_leave()
    assert caught.value.args == (70,)
    assert "cudaErrorIllegalAddress" in capsys.readouterr().err


@pytest.mark.parametrize("has_other_memory", [True, False])
def test_a_task_that_outgrows_the_slice_is_run_once_more_in_other_memory(
    has_other_memory: bool,
) -> None:
    manifest = SimpleNamespace(groups=(), total_bytes=0, mode="graph", outputs=())
    events: list[str] = []

    @contextlib.contextmanager
    def computing(_: object) -> Any:
        events.append("in")
        yield
        events.append("out")

    def run(*_: object) -> list[torch.Tensor]:
        if events.count("in") == 1:
            raise torch.OutOfMemoryError("the slice is full")
        return []

    def leave_slice(_: object) -> bool:
        events.append("left")
        return has_other_memory

    view: Any = SimpleNamespace(
        computing=computing,
        leave_slice=leave_slice,
        control_page=SimpleNamespace(write_begun=print),
        **dict.fromkeys(("enter", "unmap_inputs", "quiesce"), lambda *_: None),
        wait_first_turn=lambda *_: True,
        waited_ms=0.0,
        **dict.fromkeys(("is_lost", "can_improve"), lambda *_: False),
    )
    programs: Any = SimpleNamespace(
        runners={}, kinds={}, bound=lambda _: SimpleNamespace(manifest=manifest, run=run)
    )
    pool: Any = SimpleNamespace(write=lambda *_: (), batched_for="")
    task: Any = SimpleNamespace(send=lambda message: sent.append(type(message)))
    sent: list[type] = []
    order = RunInference(
        op_id=1,
        model="m",
        digest="d",
        directory="",
        arena_offset_bytes=4096,
        first_fence=2,
        residency_id=7,
        runs=(Run(request_id="r"),),
    )  # type: ignore[arg-type]
    infer(order, programs, pool, view, task, 0)
    assert sent == [InferenceDone if has_other_memory else InferenceFailed]
    assert events == ["in", "left", *(["in", "out"] if has_other_memory else [])]


@pytest.mark.parametrize("can_yield", [True, False])
def test_what_streams_keeps_the_device_where_others_would_compute_over_its_activations(
    can_yield: bool,
) -> None:
    control_page = SimpleNamespace(stop=lambda _: 5, write_stop=lambda *_: None, write_turn=print)
    view: Any = SimpleNamespace(
        can_yield=can_yield,
        control_page=control_page,
        **dict.fromkeys(("wait_group", "wait_turn"), lambda *_: 0.0),
        **dict.fromkeys(("report_computed", "show_landing", "quiesce"), lambda *_: None),
    )
    message: Any = SimpleNamespace(
        op_id=5, first_fence=0, residency_id=1, staging=(0,), is_timed=False
    )
    manifest: Any = SimpleNamespace(groups=(SimpleNamespace(offset_bytes=0, size_bytes=1),))
    sent: list[object] = []
    task: Any = SimpleNamespace(send=sent.append)
    _Groups(view, message, manifest, task, 0)(0)
    assert bool(sent) == can_yield


@pytest.mark.parametrize("is_timed", [True, False])
def test_a_run_that_is_timed_waits_for_the_device_after_each_group(is_timed: bool) -> None:
    waits: list[int] = []
    view: Any = SimpleNamespace(
        quiesce=lambda: waits.append(len(groups.begins_ms)),
        **dict.fromkeys(("wait_group", "show"), lambda *_: 0.0),
    )
    message: Any = SimpleNamespace(
        op_id=5, first_fence=0, residency_id=1, staging=(), is_timed=is_timed
    )
    group = SimpleNamespace(offset_bytes=0, size_bytes=1)
    groups = _Groups(view, message, SimpleNamespace(groups=(group, group)), print, 0)  # type: ignore[arg-type]
    groups(0)
    groups(1)
    if is_timed:
        groups.end()
    assert waits == ([0, 1, 2] if is_timed else [])
    assert len(groups.ends_ms) == (2 if is_timed else 1)


@pytest.mark.parametrize(("has_queue", "where"), [(True, "stream"), (False, "loader")])
def test_a_job_whose_queue_is_held_is_not_away(
    monkeypatch: pytest.MonkeyPatch, has_queue: bool, where: str
) -> None:
    """If its script waits in ``.item()``, it cannot report that it is back."""
    pacer = SimpleNamespace(holds=True, hold=lambda: True, has_queue=lambda: has_queue)
    monkeypatch.setattr(worker_main.Pacer, "current", pacer)
    sent: list[Any] = []
    worker: Any = worker_main.WorkerProcess.__new__(worker_main.WorkerProcess)
    worker._gate = SimpleNamespace(drains=False)
    worker._control = SimpleNamespace(send=sent.append)
    worker._job_op_id, worker._stop_asked_at_ms = 1, 0.0
    worker._on_parked(5, 0, "loader")
    assert [one.where for one in sent] == [where]
