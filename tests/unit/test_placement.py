"""Placement: the chosen device for each request and job, and the reason for the choice."""

from __future__ import annotations

import itertools
from collections.abc import Sequence, ValuesView
from dataclasses import replace
from typing import Any

import pytest

from pipeswitch.base.config import PLACEMENTS as CONFIGURED
from pipeswitch.extras.lab.costs import Costs, Link, Training
from pipeswitch.extras.lab.programs import program_of
from pipeswitch.extras.lab.world import World
from pipeswitch.ipc.messages.base import JobName, ModelName
from pipeswitch.scheduler.policies.placement import PLACEMENTS, Place
from pipeswitch.scheduler.scheduler import Scheduler
from pipeswitch.scheduler.state import events as ev
from pipeswitch.scheduler.state.core import SchedulerSettings
from pipeswitch.scheduler.state.records import Model
from pipeswitch.scheduler.state.states import ModelEvent, TaskState

MIB = 1 << 20
IDLE = Place(
    device=0,
    is_resident=False,
    is_busy=False,
    waiting=0,
    queue_ms=0.0,
    switch_ms=10.0,
    free_bytes=100,
    size_bytes=10,
)


def places(*changes: dict[str, Any]) -> list[Place]:
    return [IDLE._replace(device=index, **one) for index, one in enumerate(changes)]


RESIDENT = {"is_resident": True, "switch_ms": 0.0}
BUSY = {"is_busy": True, "waiting": 1, "queue_ms": 5.0}


def chosen(placement: str, *changes: dict[str, Any]) -> tuple[int, str]:
    choice = min(places(*changes), key=PLACEMENTS[placement])
    return choice.device, choice.reason


def test_the_settings_are_the_policies_that_are_there() -> None:
    assert tuple(PLACEMENTS) == CONFIGURED


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (({}, RESIDENT), (1, "resident")),
        # A queue of 5 ms is shorter than a copy of 10 ms; a queue of 15 ms is longer.
        (({}, {**RESIDENT, **BUSY}), (1, "resident")),
        (({}, {**RESIDENT, **BUSY, "queue_ms": 15.0}), (0, "free")),
        # The copy evicts a model, which must be copied back later, so the copy counts twice.
        (({"free_bytes": 5}, {**RESIDENT, **BUSY, "queue_ms": 15.0}), (1, "resident")),
        (({"switch_ms": 7.0}, {"switch_ms": 3.0}), (1, "free")),
        ((BUSY, {**BUSY, "queue_ms": 4.0}), (1, "shortest")),
        # Without measurements, prefer a device with the model, then a free device, then most room.
        (({"switch_ms": 0.0}, {**RESIDENT, "is_busy": True, "waiting": 3}), (1, "resident")),
        (({**BUSY, "queue_ms": 0.0, "switch_ms": 0.0}, {"switch_ms": 0.0}), (1, "free")),
        (({"switch_ms": 0.0}, {"switch_ms": 0.0, "free_bytes": 200}), (1, "free")),
        (({}, {}), (0, "free")),
    ],
)
def test_least_finish_goes_where_it_would_compute_first(
    changes: tuple[dict[str, Any], ...], expected: tuple[int, str]
) -> None:
    assert chosen("least-finish", *changes) == expected


def test_spread_has_as_many_everywhere_and_pack_fills_one_first() -> None:
    assert chosen("spread", {**RESIDENT, **BUSY}, {}) == (1, "free")
    assert chosen("spread", {}, RESIDENT) == (1, "resident")
    assert chosen("pack", BUSY, {}) == (0, "shortest")
    assert chosen("pack", {"free_bytes": 5}, {}) == (1, "free")
    assert chosen("pack", {}, {**RESIDENT, **BUSY}) == (1, "resident")


COSTS = Costs(to_device=Link(bytes_per_ms=MIB), reap_ms=5.0)


class Server:
    """Server that collects answers' timings; it has several devices, with links of 1 MiB/ms."""

    def __init__(self, names: Sequence[str] = ("cpu:0", "cpu:1"), **settings: Any) -> None:
        all_settings = SchedulerSettings(
            arena_bytes=24 * MIB, store_bytes=256 * MIB, fence_count=64, standby=1, **settings
        )
        each = [replace(all_settings, device=name) for name in names]
        self.scheduler = Scheduler(all_settings, devices=each)
        self.world = World(self.scheduler, costs=COSTS)
        self.timings: list[tuple[str, str]] = []
        perform = self.world.perform

        def note(commands: list[ev.Command]) -> None:
            for one in commands:
                if isinstance(one, ev.Reply) and one.timing:
                    self.timings.append((one.timing.device, one.timing.placed))
            perform(commands)

        self.world.perform = note  # type: ignore[method-assign]
        for name in "abcd":
            program = program_of(f"d{name}", 8 * MIB, groups=2, layer_ms=2.0)
            self.world.clients.register(ModelName(name), program)
        self.world.run()

    def ask(self, names: str) -> None:
        for name in names:
            self.world.clients.infer(ModelName(name))

    def placed(self, names: str) -> list[tuple[str, str]]:
        """Send these requests at once; return the device and the reason in each answer's timing."""
        del self.timings[:]
        self.ask(names)
        self.world.run()
        return sorted(self.timings)

    def move(self, job: str, to: str) -> str:
        """Request a job's move; return the outcome, which must arrive within 20 ms."""
        outcomes = self.world.clients.outcomes.copy()
        request = ev.JobRequest(
            token=self.world.clients.token(), job=JobName(job), action="move", to=to
        )
        self.world.handle(request)
        self.world.run(self.world.now_ms + 20.0)
        (outcome,) = self.world.clients.outcomes - outcomes
        return outcome

    def kill(self, device: int) -> None:
        self.world.daemons[device].end(-9)


def test_two_models_compute_at_once_and_stay_where_they_are() -> None:
    server = Server()
    assert server.placed("ab") == [("cpu:0", "free"), ("cpu:1", "free")]
    began_ms = server.world.now_ms
    assert server.placed("ab") == [("cpu:0", "resident"), ("cpu:1", "resident")]
    both_ms = server.world.now_ms - began_ms
    server.placed("a")
    one_ms = server.world.now_ms - began_ms - both_ms
    assert both_ms == pytest.approx(one_ms, rel=0.2)


def test_a_hot_model_comes_to_the_other_device_when_its_queue_is_longer_than_its_copy() -> None:
    server = Server()
    server.placed("a")
    assert {device for device, _ in server.placed("a" * 8)} == {"cpu:0", "cpu:1"}


def test_what_waits_goes_to_a_device_that_has_nothing_to_do() -> None:
    """Without measurements, all requests go to the device that copies the model; two move later."""
    server = Server()
    slow = program_of("dslow", 8 * MIB, groups=2, layer_ms=50.0)
    server.world.clients.register(ModelName("slow"), slow)
    server.world.run()
    began_ms = server.world.now_ms
    for _ in range(6):
        server.world.clients.infer(ModelName("slow"))
    counts = [len(device.state.requests) for device in server.scheduler.machine.devices]
    assert counts == [6, 0]
    server.world.run(began_ms + 5 * 200.0)  # one device alone would need 6 x 200 ms
    assert not server.world.clients.open
    assert [device for device, _ in server.timings].count("cpu:1") == 2


@pytest.mark.parametrize("is_pinned_first", [True, False])
def test_a_request_goes_where_pinned_models_leave_it_a_place(is_pinned_first: bool) -> None:
    """Fill the idle device with a pinned model: a request that does not fit goes elsewhere."""
    server = Server()
    large = program_of("dlarge", 20 * MIB)
    server.world.clients.register(
        ModelName("large"), large, pin=is_pinned_first, devices=("cpu:1",)
    )
    server.world.run()
    server.ask("a")
    if not is_pinned_first:
        server.world.handle(
            ev.PinRequest(token=server.world.clients.token(), model=ModelName("large"), pin=True)
        )
    server.ask("b")
    server.world.run()
    assert "OutOfDeviceMemory" not in server.world.clients.outcomes
    assert [device for device, _ in server.timings] == ["cpu:0", "cpu:0"]


def test_what_waits_where_a_daemon_dies_is_answered_by_the_other_device() -> None:
    server = Server(restart_backoff_ms=1e6, max_daemon_restarts=0)
    server.placed("abab")
    server.ask("abababab")
    server.kill(1)
    server.world.run()
    assert server.world.left is None
    assert not server.world.clients.open
    assert server.world.clients.outcomes["ok"] == 4 + 4 + 8
    assert server.scheduler.machine.devices[1].state.daemon.is_given_up
    assert {device for device, _ in server.placed("abcd")} == {"cpu:0"}


def test_the_server_leaves_when_the_last_device_is_given_up() -> None:
    server = Server(max_daemon_restarts=0)
    for device in (0, 1):
        server.kill(device)
        server.world.run()
    assert server.world.left == 70


def test_jobs_are_spread_and_one_whose_device_is_lost_goes_on_elsewhere() -> None:
    server = Server(restart_backoff_ms=1e6, max_daemon_restarts=0)
    training = Training(steps=6, slice_bytes=4 * MIB, state_bytes=MIB, step_ms=100.0)
    for name in "jk":
        server.world.clients.train(name, training)  # type: ignore[arg-type]
    homes = [list(device.state.jobs) for device in server.scheduler.machine.devices]
    assert homes == [["j"], ["k"]]
    server.world.run(server.world.now_ms + 250.0)
    server.kill(1)
    server.world.run()
    assert [row["state"] for row in server.scheduler.listing.jobs()] == ["done", "done"]


def test_a_job_goes_to_a_free_device_when_its_process_is_gone_and_not_before() -> None:
    """Resume a job while its old process still ends; the simulator forbids two processes."""
    server = Server()
    training = Training(steps=6, slice_bytes=4 * MIB, state_bytes=MIB, step_ms=100.0)
    for name, steps in (("j", 60), ("k", 15), ("l", 60)):
        server.world.clients.train(name, replace(training, steps=steps))  # type: ignore[arg-type]
    first, second = (device.state for device in server.scheduler.machine.devices)
    assert (list(first.jobs), list(second.jobs)) == (["j", "l"], ["k"])
    server.world.run(server.world.now_ms + 1600.0)  # j and l have begun, and k is over
    server.world.clients.ask(JobName("j"), "pause")
    job = first.jobs[JobName("j")]
    while job.state.state is not TaskState.PAUSED:
        server.world.run(server.world.now_ms + 1.0)
    server.world.clients.ask(JobName("j"), "resume")
    assert any(worker.job == "j" for worker in first.workers.values())
    server.world.run()
    assert list(second.jobs) == ["k", "j"]
    assert (job.state.state, job.progress.step) == (TaskState.DONE, 60)


def test_a_job_of_a_name_begins_when_the_process_of_the_one_before_is_gone_from_any_device() -> (
    None
):
    server = Server()
    training = Training(steps=6, slice_bytes=4 * MIB, state_bytes=MIB, step_ms=100.0)
    for name, steps in (("j", 60), ("k", 15), ("l", 60)):
        server.world.clients.train(name, replace(training, steps=steps))  # type: ignore[arg-type]
    first, second = (device.state for device in server.scheduler.machine.devices)
    server.world.run(server.world.now_ms + 1600.0)  # j and l have begun, and k is over
    server.world.clients.ask(JobName("j"), "cancel")
    while first.jobs[JobName("j")].state.state is not TaskState.CANCELLED:
        server.world.run(server.world.now_ms + 1.0)
    server.world.clients.train(JobName("j"), training)
    job = second.jobs[JobName("j")]
    while any(worker.job == "j" for worker in first.workers.values()):
        assert job.state.state is TaskState.QUEUED
        server.world.run(server.world.now_ms + 0.1)
    server.world.run()
    assert job.state.state is TaskState.DONE


def test_a_job_moves_where_it_is_told_without_a_step_lost() -> None:
    server = Server()
    server.world.clients.train(
        JobName("j"), Training(steps=60, slice_bytes=4 * MIB, state_bytes=MIB, step_ms=100.0)
    )
    first, second = (device.state for device in server.scheduler.machine.devices)
    server.world.run(server.world.now_ms + 250.0)
    assert server.move("j", "cpu:0") == "ok"  # the job is already there
    began_ms = server.world.now_ms
    assert server.move("j", "cpu:1") == "ok"
    assert (list(first.jobs), list(second.jobs)) == ([], ["j"])
    server.world.clients.ask(JobName("j"), "pause")
    server.world.run(server.world.now_ms + 20.0)
    assert server.move("j", "cpu:0") == "ok"  # a paused job moves, too
    assert list(first.jobs) == ["j"]
    assert server.move("j", "cpu:7") == "InvalidInput"
    server.world.clients.ask(JobName("j"), "resume")
    server.world.run()
    job = first.jobs[JobName("j")]
    assert (job.state.state, job.progress.step, job.progress.steps_recomputed) == (
        TaskState.DONE,
        60,
        0,
    )
    assert job.timing.ended_at_ms - began_ms < 60 * 100.0 + 200.0  # each move may interrupt a step
    assert server.move("j", "cpu:1") == "InvalidInput"  # the job is over


def test_a_model_is_served_where_it_was_registered_for_and_nowhere_else() -> None:
    server = Server()
    program = program_of("de", 8 * MIB, groups=2, layer_ms=2.0)
    server.world.clients.register(ModelName("e"), program, pin=True, devices=("cpu:1",))
    server.world.run()
    assert [*server.scheduler.listing.models()][-1]["on"] == ["cpu:1"]  # the only allowed device
    assert {device for device, _ in server.placed("eeeeeeee")} == {"cpu:1"}
    before = server.world.clients.outcomes["InvalidInput"]
    server.world.clients.register(ModelName("f"), program, devices=("cpu:0", "cpu:7"))
    assert server.world.clients.outcomes["InvalidInput"] == before + 1


def test_a_model_quarantined_on_one_device_is_refused_where_it_waits_on_another() -> None:
    server = Server()
    server.placed("a")
    server.ask("a" * 8)
    waiting = [len(device.state.queue) for device in server.scheduler.machine.devices]
    assert all(waiting)
    model = server.scheduler.machine.models[ModelName("a")]
    model.state.apply(ModelEvent.POISONED, "as a worker's death would")
    server.world.run()
    assert server.world.clients.outcomes["ModelQuarantined"] == sum(waiting)
    assert not server.world.clients.open


def test_a_job_that_was_moved_to_a_device_that_is_lost_goes_on_elsewhere() -> None:
    server = Server(restart_backoff_ms=1e6, max_daemon_restarts=0)
    server.world.clients.train(
        JobName("j"), Training(steps=60, slice_bytes=4 * MIB, state_bytes=MIB, step_ms=100.0)
    )
    server.world.run(server.world.now_ms + 250.0)
    assert server.move("j", "cpu:1") == "ok"
    server.kill(1)
    server.world.run(server.world.now_ms + 1000.0)
    assert server.move("j", "cpu:1") == "InvalidInput"
    server.world.run()
    assert [row["state"] for row in server.scheduler.listing.jobs()] == ["done"]


def test_requests_of_a_model_whose_only_device_is_lost_are_refused() -> None:
    server = Server(restart_backoff_ms=1e6, max_daemon_restarts=0)
    program = program_of("e", 8 * MIB, groups=2, layer_ms=20.0)
    server.world.clients.register(ModelName("e"), program, devices=("cpu:1",))
    server.world.run()
    outcomes = server.world.clients.outcomes.copy()
    for _ in range(3):
        server.world.clients.infer(ModelName("e"))
    server.world.run(server.world.now_ms + 10.0)
    server.kill(1)
    server.world.run()
    server.world.clients.infer(ModelName("e"))
    server.world.run()
    assert server.world.clients.outcomes - outcomes == {"ServerUnavailable": 4}


def test_rows_and_events_name_the_device() -> None:
    server = Server()
    server.placed("ab")
    rows = [*server.scheduler.listing.ps()]
    assert [name for name, _ in itertools.groupby(row["on"] for row in rows)] == ["cpu:0", "cpu:1"]
    assert [row["on"] for row in server.scheduler.listing.models()] == [
        ["cpu:0"],
        ["cpu:1"],
        [],
        [],
    ]
    stats = server.scheduler.listing.stats()
    assert [(row["device"], row["inferences"]) for row in stats["devices"]] == [
        ("cpu:0", 1),
        ("cpu:1", 1),
    ]
    commands: list[Any] = []
    server.scheduler.core.out = commands
    server.scheduler.machine.devices[1].state.publish("worker.ready", worker=0)
    server.scheduler.machine.devices[1].state.span("copy", "a group 0", 1.0, 2.0)
    assert (commands[0].body["device"], commands[1].spans[0].track) == ("cpu:1", "cpu:1 copy")


OF_TWO_KINDS = ("cuda:0", "cpu:0", "cpu:1")


def test_devices_of_two_kinds_serve_one_model_on_purpose_only() -> None:
    server, program = Server(OF_TWO_KINDS), program_of("e", 8 * MIB, groups=2, layer_ms=20.0)
    devices_by_name = {
        "e": ("cpu",),
        "f": ("cuda", "cpu"),
        "g": ("cpu:1", "cuda:0"),
        "h": ("cuda:1",),
    }
    for name, devices in devices_by_name.items():
        server.world.clients.register(ModelName(name), program, devices=devices)
    assert server.world.clients.outcomes["InvalidInput"] == 1
    server.world.run()
    placed = {name: {on for on, _ in server.placed(name * 8)} for name in "aefg"}
    assert placed == {
        "a": {"cuda:0"},
        "e": {"cpu:0", "cpu:1"},
        "f": set(OF_TWO_KINDS),
        "g": {"cuda:0", "cpu:1"},
    }


def test_a_job_stays_on_devices_of_one_kind_whatever_is_lost() -> None:
    server = Server(OF_TWO_KINDS, restart_backoff_ms=1e6, max_daemon_restarts=0)
    training = Training(steps=60, slice_bytes=4 * MIB, state_bytes=MIB, step_ms=100.0)
    devices_by_name = {"on-gpu": (), "either": ("cuda", "cpu"), "on-cpu": ("cpu",)}
    for name, devices in devices_by_name.items():
        server.world.clients.train(JobName(name), training, devices=devices)
    assert server.world.clients.outcomes["InvalidInput"] == 1
    server.world.run(server.world.now_ms + 250.0)
    homes = [list(device.state.jobs) for device in server.scheduler.machine.devices]
    assert homes == [["on-gpu"], ["on-cpu"], []]
    assert server.move("on-gpu", "cpu:1") == server.move("on-cpu", "cuda:0") == "InvalidInput"
    assert server.move("on-cpu", "cpu:1") == "ok"
    for device in (0, 2):
        server.kill(device)
    server.world.run()
    states = {row["name"]: row["state"] for row in server.scheduler.listing.jobs()}
    assert states == {"on-gpu": "queued", "on-cpu": "done"}


def test_a_listing_looks_through_the_models_once_however_many_there_are() -> None:
    """Looking at all models for each listed model blocked the loop for 160 ms with 1,000 models."""
    passes: list[int] = []

    class Counted(dict[ModelName, Model]):
        def values(self) -> ValuesView[Model]:  # type: ignore[override]
            passes.append(1)
            return super().values()

    server = Server()
    machine = server.scheduler.machine
    machine.models = server.scheduler.versions.models = Counted(machine.models)
    assert [row["versions"] for row in server.scheduler.listing.models()] == [[1]] * 4
    assert len(passes) == 1
