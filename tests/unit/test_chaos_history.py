"""Checks of a chaos run: they find each kind of lost answer, and report nothing else as lost."""

from __future__ import annotations

import os

import pytest

from tests.chaos.history import Fault, History, Outcome
from tests.chaos.run import held


def outcome(
    kind: str, at_s: float = 1.0, lane: str = "infer-1", *, may_fail: bool = False
) -> Outcome:
    return Outcome(lane, "a", at_s, at_s + 0.01, kind, may_fail)


@pytest.mark.parametrize("kind", ["wrong", "no answer", "ModelNotFound", "RemoteProtocolError"])
def test_what_nobody_may_be_told_is_a_loss(kind: str) -> None:
    history = History(outcomes=[outcome("ok"), outcome(kind)])
    assert [entry.kind for entry in history.lost()] == [kind]


@pytest.mark.parametrize("kind", ["ok", "WorkerLost", "ModelQuarantined", "QueueFull"])
def test_a_typed_answer_that_the_protocol_promises_is_none(kind: str) -> None:
    assert History(outcomes=[outcome(kind)]).lost() == []


@pytest.mark.parametrize("kind", ["ServerUnavailable", "no answer to a raw request"])
def test_no_answer_is_a_loss_unless_the_controller_was_away(kind: str) -> None:
    history = History(outcomes=[outcome(kind, 1.0)])
    assert len(history.lost()) == 1
    history.controller_downs.append((0.5, 2.0))
    assert history.lost() == []


@pytest.mark.parametrize("kind", ["DeadlineExceeded", "Cancelled", "CancelledError"])
def test_only_a_request_that_may_fail_is_told_of_a_deadline_or_cancel(kind: str) -> None:
    history = History(outcomes=[outcome(kind, may_fail=True), outcome(kind)])
    assert len(history.lost()) == 1


def test_no_more_requests_fail_in_their_model_than_errors_were_injected() -> None:
    history = History(outcomes=[outcome("TaskFailed", 1.0), outcome("TaskFailed", 2.0)])
    assert len(history.lost()) == 2
    history.faults.append(Fault("active worker", "exception", 0.9))
    assert len(history.lost()) == 1
    history.faults.append(Fault("active worker", "OOM", 1.9))
    assert history.lost() == []


def test_a_fault_without_a_good_answer_after_it_is_not_survived() -> None:
    history = History(outcomes=[outcome("ok", 0.0, "probe"), outcome("ok", 2.0, "infer-1")])
    history.faults.append(Fault("daemon", "kill -9", 1.0))
    report = history.report()
    assert (report["faults_injected"], report["faults_survived"]) == (1, 0)
    history.outcomes.append(outcome("ok", 3.0, "probe"))
    assert history.report()["faults_survived"] == 1


def test_a_kill_beside_another_fault_is_not_counted_as_alone() -> None:
    history = History(outcomes=[outcome("ok", at_s, "probe") for at_s in (1.1, 14.0, 21.2)])
    history.faults = [
        Fault("active worker", "kill -9", 1.0),
        Fault("standby worker", "hang", 11.0),
        Fault("active worker", "kill -9", 12.0),
        Fault("active worker", "exception", 20.9),  # ends at once, so the next kill is alone
        Fault("active worker", "kill -9", 21.0),
    ]
    dead = history.report()["dead_worker_recovery_ms"]
    assert (dead["all"]["count"], dead["all"]["max"]) == (3, 2010.0)
    assert (dead["alone"]["count"], dead["alone"]["max"]) == (2, 210.0)


def test_what_a_process_holds_more_than_before_is_named() -> None:
    leaked = os.memfd_create("of-job-17")  # other tests' threads may change other descriptors
    assert held(os.getpid())["memfd:of-job- (deleted)"] == 1
    os.close(leaked)
    assert "memfd:of-job- (deleted)" not in held(os.getpid())
