"""Preprocessing processes, which compute requests' inputs: order, deaths, deadlines, cancels."""

# mypy: disable-error-code="arg-type"

from __future__ import annotations

import functools
from typing import Any

import pytest

from pipeswitch.base import errors, extras
from pipeswitch.base.config import Config, PreprocessConfig
from pipeswitch.base.roles import ANYONE, OWNER, Principal
from pipeswitch.extras.stages.queue import StageQueue
from pipeswitch.extras.stages.wrapper import stages_of
from pipeswitch.frontend.permissions import Rules, check_function
from pipeswitch.ipc.messages.base import SlabTensor
from pipeswitch.ipc.messages.helper import HelperCall, HelperDone, HelperFailed, HelperReady
from pipeswitch.programs.interface.dims import Dim
from pipeswitch.programs.spec import BuildSpec, wrapper_of
from pipeswitch.scheduler.scheduler import Scheduler
from pipeswitch.scheduler.state import events as ev
from pipeswitch.scheduler.state.core import Core, SchedulerSettings
from pipeswitch.scheduler.state.records import Request, Steps
from pipeswitch.scheduler.state.states import TaskState
from tests.unit.arrivals import arrival, request_of
from tests.unit.test_scheduler_rules import Rig

SPEC = BuildSpec(name="m", source="s", preprocess="pkg:fn", raw={"image": (((1, 9), 3), "uint8")})
STAGE = stages_of(SPEC)
RAW = (SlabTensor(name="image", dtype="uint8", shape=(4, 3), offset_bytes=0, size_bytes=12),)
LIMIT_MS = 1000.0
QUEUES = {"stage": functools.partial(StageQueue, Config())}


class Pool(StageQueue):
    """Pool of preprocessing processes; the test sends the processes' messages."""

    def __init__(self, stages: int = 1) -> None:
        options = PreprocessConfig(processes=stages, max_time_ms=LIMIT_MS)
        self.core = Core(SchedulerSettings(max_deaths=2), None)
        self.born = self.core.next_op_id()
        super().__init__(Config(preprocess=options), self.core)

    def ask(self, token: int, *, priority: int = 1, deadline_at_ms: float | None = None) -> Request:
        fields = {"priority": priority, "deadline_at_ms": deadline_at_ms, "inputs": RAW}
        request = request_of(token, "m", self.core.now_ms, **fields, steps=Steps(is_raw=True))
        self.take(request, STAGE, self.born, "")
        return request

    def out(self, kind: type[Any]) -> list[Any]:
        """Return the commands of a kind, and clear the list of all commands."""
        commands = [command for command in self.core.out if isinstance(command, kind)]
        self.core.out.clear()
        self.check()
        return commands

    def is_current_generation(self, message: Any, slot: int = 0) -> None:
        self.received(ev.Received(self.processes[slot].address, message))

    def starts(self, slot: int = 0) -> None:
        self.is_current_generation(HelperReady(pid=7), slot)

    def calls(self) -> list[int]:
        """Return the tokens of the requests whose inputs are being computed."""
        assert all(
            isinstance(one.message, HelperCall) for one in self.core.out if isinstance(one, ev.Send)
        )
        return [process.token for process in self.processes if process.op_id]  # type: ignore[misc]

    def returns(self, slot: int = 0) -> None:
        self.is_current_generation(HelperDone(op_id=self.processes[slot].op_id, outputs=()), slot)

    def dies(self, slot: int = 0) -> None:
        self.exited(ev.Exited(self.processes[slot].address, -9))

    def error(self) -> str:
        (answer,) = self.out(ev.Reply)
        return type(answer.error).__name__


@pytest.fixture
def pool() -> Pool:
    return Pool()


def test_a_process_comes_with_the_first_request_and_makes_each_ones_inputs_once(pool: Pool) -> None:
    assert not pool.out(ev.Spawn)
    first, second, urgent = pool.ask(1), pool.ask(2), pool.ask(3, priority=0)
    assert len(pool.out(ev.Spawn)) == 1
    assert first.state.state is TaskState.PREPROCESSING
    pool.starts()
    for request in (urgent, first, second):
        assert len(pool.out(ev.Send)) == 1
        pool.core.now_ms += 5.0
        pool.returns()
        (command,) = pool.out(ev.TakeResult)
        assert (command.token, command.function) == (request.token, "pkg:fn")
        assert not pool.calls()  # the process waits while its memory is read
        assert (
            pool.prepared(
                ev.Prepared(token=request.token, source=ev.Address("stage"), run=request.run)
            )
            is request
        )
        assert (request.state.state, request.steps.preprocess_ms) == (TaskState.QUEUED, 5.0)
    assert not len(pool)
    assert not pool.out(ev.Send)


def test_a_death_is_blamed_on_the_request_whose_function_ran(pool: Pool) -> None:
    deadly = pool.ask(1)
    for _ in range(2):
        assert len(pool.out(ev.Spawn)) == 1
        pool.starts()
        assert pool.calls() == [1]
        pool.core.out.clear()
        if not deadly.batching.deaths:
            pool.ask(2)
        pool.dies()
    answers = [c for c in pool.core.out if isinstance(c, ev.Reply)]
    assert [type(a.error).__name__ for a in answers] == ["WorkerLost"]
    assert "pkg:fn" in answers[0].error.message  # type: ignore[union-attr]
    pool.starts()
    assert (pool.calls(), deadly.state.state) == ([2], TaskState.FAILED)


def test_one_that_dies_by_itself_is_started_again_after_a_pause(pool: Pool) -> None:
    pool.ask(1)
    pool.out(ev.Spawn)
    pool.dies()
    assert not pool.out(ev.Spawn)
    pool.core.now_ms = pool.core.settings.restart_backoff_ms
    pool.advance()
    assert len(pool.out(ev.Spawn)) == 1
    assert len(pool) == 1


def test_a_deadline_counts_from_arrival_and_a_call_that_hangs_is_killed(pool: Pool) -> None:
    pool.ask(1)
    pool.starts()
    pool.ask(2, deadline_at_ms=9.0)
    assert pool.core.wakeups.heap[0][0] == 9.0
    pool.core.now_ms = 9.0
    pool.advance()
    assert pool.error() == "DeadlineExceeded"
    pool.core.now_ms = LIMIT_MS
    pool.advance()
    kinds = [type(command).__name__ for command in pool.core.out]
    assert kinds == ["Kill", "Reply"]
    assert not len(pool)
    assert "[preprocess] max_time" in pool.core.out[1].error.hint  # type: ignore[union-attr]
    pool.advance()
    pool.core.out.clear()
    pool.ask(3)
    assert not pool.out(ev.Spawn)  # the old process is not reaped yet
    pool.dies()
    assert len(pool.out(ev.Spawn)) == 1


def test_what_is_taken_back_is_answered_at_once_but_while_its_room_is_written(pool: Pool) -> None:
    pool.ask(1)
    pool.starts()
    assert pool.cancel(1)
    assert not pool.cancel(1)
    assert pool.error() == "Cancelled"
    pool.returns()  # the result of a cancelled request
    assert not pool.out(ev.TakeResult)
    late = pool.ask(2, deadline_at_ms=9.0)
    pool.returns()
    pool.core.now_ms = 10.0
    pool.advance()
    assert pool.cancel(2)
    assert not pool.out(ev.Reply)
    pool.refuse_all(errors.ServerUnavailable("the server has stopped"))
    assert not pool.out(ev.Reply)
    assert pool.prepared(ev.Prepared(token=2, source=ev.Address("stage"))) is None
    assert (pool.error(), late.state.state) == ("Cancelled", TaskState.CANCELLED)


def test_an_error_names_the_function_and_the_process_goes_on(pool: Pool) -> None:
    pool.ask(1)
    pool.ask(2)
    pool.starts()
    pool.is_current_generation(
        HelperFailed(op_id=pool.processes[0].op_id, reason="it raised ValueError: no")
    )
    assert pool.calls() == [2]
    (answer,) = pool.out(ev.Reply)
    assert answer.error.message == 'preprocess pkg:fn of "m": it raised ValueError: no'
    pool.is_current_generation(HelperFailed(op_id=1, reason="of an older call"))
    assert pool.calls() == [2]
    assert not pool.out(ev.Reply)


def test_a_process_older_than_a_registration_makes_none_of_its_inputs(pool: Pool) -> None:
    pool.ask(1)
    pool.starts()
    pool.returns()
    pool.prepared(ev.Prepared(token=1, source=ev.Address("stage")))
    pool.born = pool.core.next_op_id()
    pool.core.out.clear()
    pool.ask(2)
    assert len(pool.out(ev.Kill)) == 1
    assert not pool.calls()
    pool.dies()
    pool.starts()
    assert pool.calls() == [2]


def test_several_processes_have_a_request_each() -> None:
    pool = Pool(2)
    for token in (1, 2, 3):
        pool.ask(token)
    for slot in (0, 1):
        pool.starts(slot)
    assert pool.calls() == [1, 2]


def test_a_range_is_a_dimension_that_a_request_chooses() -> None:
    assert (STAGE.inputs[0].shape, STAGE.dims) == (("image.0", 3), (Dim("image.0", 1, 9),))
    assert wrapper_of(SPEC) == STAGE
    assert wrapper_of(BuildSpec(name="m", source="s")) is None


def test_an_installation_without_this_folder_refuses_functions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(extras, "functions", lambda *_: {})
    with pytest.raises(errors.RegistrationRefused, match="preprocess"):
        wrapper_of(SPEC)
    assert wrapper_of(BuildSpec(name="m", source="s")) is None


@pytest.mark.parametrize(
    ("function", "raw", "error", "words"),
    [
        (
            "rows",
            {"x": [[1], "uint8"]},
            errors.InvalidInput,
            "not of the form package.module:function",
        ),
        ("pkg:fn", {}, errors.InvalidInput, "need each other"),
        ("pkg:fn", {"x": [[1], "bfloat16"]}, errors.InvalidInput, "bfloat16"),
        (
            "other:fn",
            {"x": [[1], "uint8"]},
            errors.PermissionDenied,
            "not accepted at this address",
        ),
    ],
)
def test_what_a_registration_may_not_name(
    function: str, raw: Any, error: type[Exception], words: str
) -> None:
    anyone, rules = Principal(tenant=ANYONE), Rules(allow_code=("pkg",))
    with pytest.raises(error, match=words):
        check_function("preprocess", function, raw, anyone, rules)
    check_function("postprocess", "pkg:fn", {"x": [[1], "uint8"]}, anyone, rules)
    check_function("preprocess", "other:fn", {"x": [[1], "uint8"]}, OWNER, Rules())


def test_a_deadline_that_passes_as_something_else_happens_is_not_forgotten() -> None:
    """Send another event at the time for which the scheduler requested a wake-up."""
    scheduler = Scheduler(
        SchedulerSettings(arena_bytes=1 << 22, store_bytes=1 << 22, fence_count=64), queues=QUEUES
    )
    scheduler.start(0.0)
    late = request_of(1, deadline_at_ms=9.0, inputs=RAW, steps=Steps(is_raw=True))
    scheduler.admission.helpers["stage"].take(late, STAGE, scheduler.core.next_op_id(), "")
    assert scheduler.next_wakeup_ms() == 9.0
    commands = scheduler.handle(ev.PrefetchHint(model="other"), 10.0)
    (answer,) = (command for command in commands if isinstance(command, ev.Reply))
    assert isinstance(answer.error, errors.DeadlineExceeded)


def test_a_server_that_leaves_waits_for_the_function_behind_a_model() -> None:
    """Drain between the model's answer and the event with which the frontend continues."""
    rig = Rig(queues=QUEUES)
    rig.register("a")
    rig.state.replicas["a"].model.wrapper = stages_of(
        BuildSpec(name="a", source="s", postprocess="pkg:fn", returns={"label": ([1], "bytes")})
    )
    token = rig.infer("a", follows=True)
    rig.handle(ev.DrainRequest(token=None, grace_ms=1000.0))
    rig.arrived("a")
    rig.done()
    assert rig.answers.pop(token).error is None  # the frontend does not send this answer yet
    assert not rig.commands(ev.Shutdown)
    rig.handle(arrival(token, "a", rig.now_ms, is_computed=True))
    assert not rig.commands(ev.Shutdown)
    rig.handle(ev.CancelRequest(token=token))
    assert isinstance(rig.error(token), errors.Cancelled)
    assert rig.commands(ev.Shutdown)


def test_a_server_that_leaves_finishes_a_chain_that_it_has_begun() -> None:
    rig = Rig()
    rig.register("a")
    first = rig.infer("a", follows=True)
    rig.handle(ev.DrainRequest(token=None, grace_ms=1000.0))
    rig.arrived("a")
    rig.done()
    assert rig.answers.pop(first).error is None
    assert not rig.commands(ev.Shutdown)
    late, last = rig.infer("a"), rig.infer("a", continues=True)
    assert isinstance(rig.error(late), errors.ServerUnavailable)
    rig.handle(ev.CancelRequest(token=first))  # the frontend gives up the first request
    assert not rig.commands(ev.Shutdown)
    rig.done()
    assert rig.error(last) is None
    assert rig.commands(ev.Shutdown)
