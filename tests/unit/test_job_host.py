"""What a training session asks of its process: commits are numbered, answers belong to one."""

from __future__ import annotations

from typing import Any

import pytest

from pipeswitch.errors import PipeSwitchError
from pipeswitch.ipc.messages import CommitStep, Epoch, JobName, Message, RunJob, StepCommitted, Turn
from workers.training.host import JobHost

EPOCH = Epoch(7)


class Sent:
    """The task channel: keeps what is sent."""

    def __init__(self) -> None:
        self.messages: list[Message] = []

    def send(self, message: Message) -> None:
        self.messages.append(message)


class View:
    """The device: whatever was computed has been computed."""

    device = None

    def settle(self) -> None:
        pass


def host_of(task: Sent) -> JobHost:
    order = RunJob(
        epoch=EPOCH, turn=Turn(0), job=JobName("j"), entry="a.py", args=(), log_path="",
        slot_bytes=0, commit_every_ms=1.0,
    )  # fmt: skip
    parts: Any = (order, task, View(), [])
    return JobHost(*parts)


def answer_to(commit: Any, copy_ms: float, error: str = "") -> StepCommitted:
    return StepCommitted(
        job=JobName("j"), epoch=commit.epoch, number=commit.number, step=commit.step,
        copy_ms=copy_ms, error=error,
    )  # fmt: skip


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
        told = [(m.epoch, m.number, m.step) for m in task.messages if isinstance(m, CommitStep)]
        assert told == [(EPOCH, 1, 5), (EPOCH, 2, 5), (EPOCH, 3, 9)]


def test_an_answer_that_is_told_again_is_none_to_the_next_commit() -> None:
    """Else the optimizer would write what is being copied."""
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
