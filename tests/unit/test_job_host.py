"""Requests from a training script to its worker process: commits, each with its own answer."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from pipeswitch.base.errors import PipeSwitchError
from pipeswitch.commits.progress import Life, read_life
from pipeswitch.ipc.messages.base import JobName, Message, OpId, SliceRead, StepCommitted, Turn
from pipeswitch.ipc.messages.worker import (
    CommitStep,
    JobReport,
    JobSpec,
    PublishAnswered,
    RunJob,
)
from pipeswitch.workers.training.host import JobHost

EPOCH = OpId(7)


class Sent:
    """Task channel that collects all sent messages."""

    def __init__(self) -> None:
        self.messages: list[Message] = []

    def send(self, message: Message) -> None:
        self.messages.append(message)


class View:
    """Device on which no computation is pending."""

    device = None

    def synchronize(self) -> None:
        pass


def host_of(task: Sent, **options: Any) -> JobHost:
    order = RunJob(
        op_id=EPOCH,
        turn=Turn(0),
        spec=JobSpec(JobName("j"), "a.py", (), 1),
        slot_bytes=0,
        commit_every_ms=1.0,
        **{"log_path": "", **options},
    )
    parts: Any = (order, task, View(), [])
    return JobHost(*parts)


def answer_to(commit: Any, copy_ms: float, error: str = "") -> StepCommitted:
    return StepCommitted(
        job=JobName("j"),
        op_id=commit.op_id,
        number=commit.number,
        step=commit.step,
        copy_ms=copy_ms,
        error=error,
    )


def test_commits_are_numbered_from_one_in_each_dispatch_also_those_of_one_step() -> None:
    for _ in range(2):
        task = Sent()
        host = host_of(task)
        for step in (5, 5, 9):
            host.begin_commit(step, [(0, 8)])
            (*_, commit) = task.messages
            assert isinstance(commit, CommitStep)
            host.commit_answered(answer_to(commit, 1.0))
            host.wait_commit()
        commits = [(m.op_id, m.number, m.step) for m in task.messages if isinstance(m, CommitStep)]
        assert commits == [(EPOCH, 1, 5), (EPOCH, 2, 5), (EPOCH, 3, 9)]


def test_an_answer_that_is_told_again_is_none_to_the_next_commit() -> None:
    """If a repeated answer counted, the optimizer would overwrite tensors that are still copied."""
    task = Sent()
    host = host_of(task)
    host.begin_commit(5, [(0, 8)])
    first = answer_to(task.messages[-1], 1.0)
    host.commit_answered(first)
    assert host.wait_commit() == 1.0
    host.begin_commit(5, [(0, 8)])
    host.commit_answered(answer_to(task.messages[-1], 2.0, error="no"))
    host.commit_answered(first)
    with pytest.raises(PipeSwitchError, match="commit of step 5 failed: no"):
        host.wait_commit()


def test_a_job_waits_for_the_read_of_its_slice_and_only_at_the_end_for_the_commit() -> None:
    task = Sent()
    host = host_of(task)
    for number in (1, 2):
        host.begin_commit(5, [(0, 8)])
        commit: Any = task.messages[-1]
        host.commit_answered(SliceRead(job=JobName("j"), op_id=commit.op_id, number=number))
        assert host.wait_commit(only_read=True) is None
        host.commit_answered(answer_to(commit, 3.0))
        assert host.wait_commit(only_read=True) == host.wait_commit() == 3.0


def test_steps_behind_the_last_report_of_a_killed_process_are_counted_by_the_next(
    tmp_path: Path,
) -> None:
    log_path = str(tmp_path / "job-j.log")
    host_of(Sent(), log_path=log_path).reached(30)  # killed here; the controller knows of 12 steps
    task = Sent()
    host = host_of(task, log_path=log_path, restarts=1, steps_recomputed=7, last_step=12)
    host.resumes_at(5)
    assert [(m.kind, m.values) for m in task.messages if isinstance(m, JobReport)] == [
        ("unseen", {"steps": 18})
    ]
    host.reached(6)
    assert read_life(tmp_path / "job-j.progress") == Life(True, 1, 25, 6), "for the next server"
    quiet = Sent()
    host_of(quiet, log_path=log_path).resumes_at(0)  # a new job of the same name
    assert not quiet.messages


def test_a_call_to_the_gate_ends_a_wait_for_copies_that_begins_after_it() -> None:
    host, answer = host_of(Sent()), PublishAnswered(op_id=EPOCH)
    publishing = threading.Thread(target=host.publish, args=("m", 1, "", ()), daemon=True)
    publishing.start()
    while publishing.is_alive():  # an answer that comes before the request is dropped
        host.publish_answered(answer)
        publishing.join(0.001)
    assert host.is_publishing
    host.call()
    waiting = threading.Thread(target=host.await_copy, daemon=True)
    waiting.start()
    waiting.join(30.0)
    assert not waiting.is_alive()
    assert host.is_publishing, "the caller waits again after its turn"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # never closed
def test_a_killed_life_keeps_the_rows_of_committed_steps_and_the_next_repeats_none(
    tmp_path: Path,
) -> None:
    path = tmp_path / "job-j.history"
    host = host_of(Sent(), log_path=str(tmp_path / "job-j.log"))
    host.resumes_at(0)  # no row yet
    for step in range(5):
        host.remember(step, {"loss": 0.5})
    host.begin_commit(3, [(0, 8)])  # the step after it has rows, too
    rows = path.read_text()
    assert rows.count("\n") == 5
    for cut in ("", '{"st', '{"step": 5, "loss": 1'):  # killed while it wrote a row
        path.write_text(rows + cut)
        host_of(Sent(), log_path=str(tmp_path / "job-j.log")).resumes_at(3)
        assert [json.loads(row)["step"] for row in path.read_text().splitlines()] == [0, 1, 2]
    path.write_text('{"step": 0')
    host_of(Sent(), log_path=str(tmp_path / "job-j.log")).resumes_at(0)
    assert path.read_text() == ""
