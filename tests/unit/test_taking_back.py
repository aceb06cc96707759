"""A task that is dispatched ahead keeps no turn from others, and its wait is billed as queueing."""

from __future__ import annotations

from typing import Any

import pytest

from pipeswitch.base.errors import DeadlineExceeded
from pipeswitch.extras.lab.costs import Costs, Link
from pipeswitch.extras.lab.programs import program_of
from pipeswitch.extras.lab.world import World
from pipeswitch.ipc.messages.base import ModelName
from pipeswitch.scheduler.policies import MAKERS, make_policy
from pipeswitch.scheduler.scheduler import Scheduler
from pipeswitch.scheduler.state import events as ev
from pipeswitch.scheduler.state.core import SchedulerSettings

MIB = 1 << 20
COMPUTE_MS = {"long": 60.0, "short": 20.0, "other": 4.0}


class Server(World):
    """Server whose models are all resident, unless ``arena_mib`` is small."""

    def __init__(self, policy: str = "priority", arena_mib: int = 64, **settings: Any) -> None:
        self.answers: dict[ev.Token, tuple[float, ev.Reply]] = {}
        self.order: list[ev.Token] = []
        chosen = SchedulerSettings(
            arena_bytes=arena_mib * MIB, store_bytes=64 * MIB, fence_count=64, **settings
        )
        scheduler = Scheduler(chosen, make_policy(policy, max_wait_ms=2000.0))
        super().__init__(scheduler, costs=Costs(to_device=Link(bytes_per_ms=MIB / 2)))
        for name, compute_ms in COMPUTE_MS.items():
            program = program_of(name, 4 * MIB, layer_ms=compute_ms / 4)
            self.clients.register(ModelName(name), program)
        self.run()
        for name in COMPUTE_MS:
            self.ask(name)
            self.run()
        self.order.clear()
        self.began_ms = self.now_ms

    def perform(self, commands: list[ev.Command]) -> None:
        super().perform(commands)
        for command in commands:
            if isinstance(command, ev.Reply) and not command.more:
                self.answers[command.token] = (self.now_ms - getattr(self, "began_ms", 0), command)
                self.order.append(command.token)

    def ask(self, model: str, **values: Any) -> ev.Token:
        return self.clients.infer(ModelName(model), **values)

    def ends_ms(self, token: ev.Token) -> float:
        return self.answers[token][0]

    def counted(self) -> int:
        return self.scheduler.core.counts["taken_back"]


@pytest.mark.parametrize("look_ahead", [True, False])
@pytest.mark.parametrize("policy", MAKERS)
def test_a_deadline_passes_for_a_task_that_was_dispatched_ahead(
    policy: str, look_ahead: bool
) -> None:
    server = Server(policy, look_ahead=look_ahead)
    server.ask("long")
    late = server.ask("short", deadline_ms=10.0)
    server.run()
    at_ms, reply = server.answers[late]
    assert isinstance(reply.error, DeadlineExceeded)
    assert at_ms == 10.0


@pytest.mark.parametrize("policy", MAKERS)
@pytest.mark.parametrize("late_ms", [0.0, 0.005, 0.01, 0.02, 1.0])
def test_a_task_whose_time_is_unknown_is_taken_back_once(policy: str, late_ms: float) -> None:
    """Admission keeps a request slightly beyond its deadline: it must not be dispatched again."""
    server = Server(policy, admission="deadline")
    program = program_of("new", 4 * MIB, layer_ms=5.0)
    server.clients.register(ModelName("new"), program)
    server.run()
    server.ask("new")
    late = server.ask("new", deadline_ms=10.0)
    server.pass_time(10.0 + late_ms)
    assert server.counted() <= 1
    server.run()
    assert isinstance(server.answers[late][1].error, DeadlineExceeded)


def test_the_other_members_of_its_batch_are_answered() -> None:
    server = Server()
    tokens = [server.ask("long"), server.ask("short", deadline_ms=10.0), server.ask("short")]
    server.run()
    errors = [type(server.answers[token][1].error) for token in tokens]
    assert errors == [type(None), DeadlineExceeded, type(None)]


@pytest.mark.parametrize("model", ["other", "short", "long"])
def test_a_higher_priority_takes_the_place_of_a_lower_one(model: str) -> None:
    server = Server()
    server.ask("long")
    low = [server.ask("short", priority=2) for _ in range(2)]
    high = [server.ask(model, priority=0) for _ in range(2)]
    server.run()
    assert server.order[1:] == [*high, *low]
    assert server.counted() == 1


def test_a_high_priority_is_sent_at_once_although_a_low_one_was_dispatched() -> None:
    server = Server(arena_mib=10)  # room for two models; "long" was used first
    server.ask("short")
    low = server.ask("other", priority=2)
    high = server.ask("long", priority=0)
    server.run()
    assert server.order[1:] == [high, low]


def test_a_connection_that_sends_one_request_at_a_time_waits_for_one_run() -> None:
    server = Server()
    for _ in range(8):
        server.ask("long", connection="many")
    waits = []
    for _ in range(3):
        at_ms = server.now_ms
        token = server.ask("short", connection="one")
        while token not in server.answers:
            server.run(server.now_ms + 1.0)
        waits.append(server.now_ms - at_ms)
    assert max(waits) <= COMPUTE_MS["long"] + COMPUTE_MS["short"]


@pytest.mark.parametrize("by", ["connection", "caller"])
def test_two_outstanding_requests_keep_no_newcomer_waiting_for_both(by: str) -> None:
    server = Server()
    first = [server.ask("long", **{by: "two"}) for _ in range(2)]
    newcomer = server.ask("short", **{by: "one"})
    server.run()
    assert server.order == [first[0], newcomer, first[1]]


@pytest.mark.parametrize("by", ["connection", "caller"])
def test_callers_that_are_served_equally_do_not_displace_each_other(by: str) -> None:
    """In a closed loop of equal callers the next one is always the one that waited longest."""
    server = Server()
    names = ("a", "b", "c", "d")
    owners = {server.ask("short", **{by: name}): name for name in names}
    served: list[str] = []
    while len(served) < 24:
        server.run(server.now_ms + 1.0)
        for token in [one for one in owners if one in server.answers]:
            name = owners.pop(token)
            served.append(name)
            owners[server.ask("short", **{by: name})] = name
    assert all(served[at : at + 4].count(name) == 1 for at in range(4, 20, 4) for name in names)
    assert server.counted() <= 1


def test_an_earlier_deadline_of_the_same_connection_goes_first() -> None:
    server = Server("edf")
    server.ask("long")
    late, soon = server.ask("short", deadline_ms=9000.0), server.ask("other", deadline_ms=900.0)
    server.run()
    assert server.order[1:] == [soon, late]


def test_a_request_that_waited_for_max_wait_is_overtaken_by_nobody() -> None:
    server = Server(max_compute_ms=0.0)
    low = server.ask("short", priority=2)
    high = []
    while low not in server.answers and server.now_ms < server.began_ms + 10_000.0:
        if len(high) <= len([one for one in high if one in server.answers]) + 1:
            high.append(server.ask("long", priority=1))
        server.run(server.now_ms + 1.0)
    assert low in server.answers


def test_what_has_the_turn_or_is_promised_it_is_not_taken_back() -> None:
    server = Server()
    first = server.ask("long", priority=2)
    server.ask("short", priority=0)
    server.run()
    assert server.order[0] == first
    assert server.counted() == 0


def test_with_admission_by_deadline_an_accepted_request_keeps_its_place() -> None:
    server = Server("edf", admission="deadline")
    server.ask("long")
    low, high = server.ask("short", priority=2), server.ask("short", priority=0)
    server.run()
    assert server.order[1:] == [low, high]


def test_the_wait_for_another_request_is_queueing_not_switching() -> None:
    """Both models are resident; each part of the bill is what the guide says."""
    server = Server()
    first, second = server.ask("long"), server.ask("short")
    server.run()
    timings = [server.answers[token][1].timing for token in (first, second)]
    assert timings[0] is not None
    assert timings[1] is not None
    assert (timings[0].queue_ms, timings[0].switch_ms, timings[0].compute_ms) == (0.0, 0.0, 60.0)
    assert (timings[1].queue_ms, timings[1].switch_ms, timings[1].compute_ms) == (60.0, 0.0, 20.0)
    assert timings[1].resident
    assert timings[1].total_ms == 80.0


def test_a_copy_beside_another_request_is_billed_only_where_it_delays() -> None:
    server = Server(arena_mib=10)  # "long" is not resident any more
    server.ask("other")
    cold = server.ask("long")
    server.run()
    timing = server.answers[cold][1].timing
    assert timing is not None
    assert not timing.resident
    assert timing.queue_ms == COMPUTE_MS["other"]
    assert timing.copy_ms == 8.0
    assert timing.queue_ms + timing.switch_ms + timing.stall_ms + timing.compute_ms == (
        pytest.approx(timing.total_ms)
    )
