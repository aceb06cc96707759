"""Trials: requests measure a model alone, and its groups change only while it does not run."""

# mypy: disable-error-code="arg-type, no-any-return"
# Names are plain strings and numbers here, because NewTypes would make tests hard to read.

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from pipeswitch.base.errors import Cancelled, DeviceBusy, ModelNotFound, ServerUnavailable
from pipeswitch.ipc.messages.base import SlabTensor
from pipeswitch.ipc.messages.worker import RunInference
from pipeswitch.planning.planned_groups import UNKNOWN_DEVICE, PlannedFile, PlannedGroups, decode
from pipeswitch.programs.interface.layout import ValueSpec
from pipeswitch.scheduler.requests.completion import batch_of
from pipeswitch.scheduler.state import events as ev
from pipeswitch.scheduler.state.regions import Owner
from pipeswitch.scheduler.state.states import Residency, TaskState
from tests.unit.fleet_model import MIB, QUIET, Faults, Profiling, World, manifest_of

BATCH = 4


class Rig:
    """Simulated server without faults, with a list of its commands."""

    def __init__(self, **options: Any) -> None:
        faults = Faults(**QUIET, persist_error=0.0)
        self.world = World(1, faults=faults, **options)
        self.core = self.world.scheduler.core
        self.state = self.world.scheduler.machine.devices[0].state
        self.said: list[ev.Command] = []
        perform = self.world.perform

        def keep(commands: list[ev.Command]) -> None:
            self.said += commands
            perform(commands)

        self.world.perform = keep

    def rest(self) -> None:
        while self.world.act():
            pass

    def until(self, is_so: Callable[[], Any]) -> None:
        while not is_so():
            assert self.world.act() or self.world.to_next_wakeup(), self.world.describe()

    def register(self, *names: str, mib: int = 7) -> None:
        for name in names:
            self.world.register(name, mib * MIB)
        self.rest()

    def commands(self, kind: type) -> list[Any]:
        return [command for command in self.said if isinstance(command, kind)]

    def sent(self, kind: type) -> list[Any]:
        messages = [command.message for command in self.said if isinstance(command, ev.Send)]
        return [message for message in messages if isinstance(message, kind)]

    def refused(self, profiling: Profiling) -> Any:
        """Run until a measurement has ended; return its error."""
        self.until(lambda: profiling.is_over)
        return profiling.error

    def profile(self, name: str = "a") -> None:
        """Measure a model to the end, then clear the list of commands."""
        assert self.refused(self.world.profile(name)) is None
        self.rest()
        self.said.clear()


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_a_measured_model_gets_the_planned_groups_and_the_profile_is_kept(rig: Rig) -> None:
    rig.register("a")
    assert rig.refused(rig.world.profile("a")) is None
    rig.rest()
    (saved,) = rig.commands(ev.SavePlanned)
    model = rig.state.replicas["a"]
    assert saved.file_name == "a.d-a.unknown.json"
    assert model.grouping.source == "planned"
    assert model.grouping.plan == decode(saved.document).plan
    assert len(model.manifest.groups) == len(model.grouping.plan)
    rig.said.clear()
    rig.world.infer("a")
    rig.rest()
    (run,) = rig.sent(RunInference)
    assert (run.plan, run.is_timed) == (model.grouping.plan, False)


def test_each_run_is_a_request_of_the_asker_and_only_those_are_timed(rig: Rig) -> None:
    rig.register("a")
    rig.world.infer("a")
    rig.rest()
    rig.world.profile("a")
    rig.rest()
    first, *runs = rig.sent(RunInference)
    replies = [a for a in rig.commands(ev.Reply) if a.more and "trial" in a.body]
    times = [a for a in rig.commands(ev.Reply) if a.more and "begins_ms" in a.body]
    assert not first.is_timed
    assert all(run.is_timed for run in runs)
    assert [f"r{token}" for token in rig.world.runs] == [run.runs[0].request_id for run in runs]
    assert len(replies) == len(times) == len(runs)
    assert {answer.body["version"] for answer in replies} == {1}
    assert ["program" in answer.body for answer in replies] == [True] + [False] * (len(runs) - 1)


def test_a_model_is_not_measured_while_a_request_or_a_job_uses_the_device(rig: Rig) -> None:
    rig.register("a", "b")
    rig.world.infer("b")
    assert isinstance(rig.refused(rig.world.profile("a")), DeviceBusy)
    rig.rest()
    rig.world.train("j")
    error = rig.refused(rig.world.profile("a"))
    assert isinstance(error, DeviceBusy)
    assert "pipeswitch jobs pause j" in error.hint
    rig.until(lambda: rig.state.jobs["j"].state.state is TaskState.DONE)
    rig.profile()
    assert rig.state.replicas["a"].grouping.source == "planned"


def test_a_paused_job_is_in_nobodys_way(rig: Rig) -> None:
    rig.register("a")
    rig.world.train("j")
    rig.until(lambda: rig.state.jobs["j"].state.state is TaskState.RUNNING)
    rig.world.clients.ask("j", "pause")
    rig.until(lambda: rig.state.jobs["j"].state.state is TaskState.PAUSED)
    rig.rest()
    rig.profile()
    assert rig.state.replicas["a"].grouping.source == "planned"


@pytest.mark.parametrize("other", ["a", "b", "job"])
def test_what_comes_to_use_the_device_ends_a_measurement_and_is_served(
    rig: Rig, other: str
) -> None:
    rig.register("a", "b")
    measurement = rig.world.profile("a")
    rig.until(lambda: len(rig.world.runs) == 3)
    if other == "job":
        rig.world.train("j")
    else:
        token = rig.world.infer(other)
    assert isinstance(rig.refused(measurement), DeviceBusy)
    rig.rest()
    if other == "job":
        assert rig.state.jobs["j"].state.state is TaskState.DONE
    else:
        assert token not in rig.world.open
    model = rig.state.replicas["a"]
    assert (model.grouping.source, model.grouping.plan) == ("buckets", ())
    assert rig.state.trial.model is None


def test_one_model_is_measured_at_a_time(rig: Rig) -> None:
    rig.register("a", "b")
    first = rig.world.profile("a")
    assert isinstance(rig.refused(rig.world.profile("b")), DeviceBusy)
    rig.rest()
    assert first.is_over
    assert rig.state.replicas["a"].grouping.source == "planned"


def test_a_measurement_whose_client_goes_leaves_the_groups_of_before(rig: Rig) -> None:
    rig.register("a")
    measurement = rig.world.profile("a")
    rig.until(lambda: len(rig.world.runs) == 3)
    assert len(rig.state.replicas["a"].grouping.plan) > 1
    rig.world.handle(ev.CancelRequest(token=measurement.token))
    assert isinstance(rig.refused(measurement), Cancelled)
    rig.rest()
    assert rig.state.replicas["a"].grouping.plan == ()
    assert not rig.commands(ev.SavePlanned)
    rig.profile()
    assert rig.state.replicas["a"].grouping.source == "planned"


def test_a_model_that_is_unregistered_or_a_drain_ends_its_measurement(rig: Rig) -> None:
    rig.register("a", "b")
    for end, error in (
        (ev.UnregisterRequest(token=rig.world.token(), model="a"), ModelNotFound),
        (ev.DrainRequest(token=None, grace_ms=1e6), ServerUnavailable),
    ):
        measurement = rig.world.profile("a" if error is ModelNotFound else "b")
        rig.until(lambda: rig.state.owner.running is not None)
        rig.world.handle(end)
        assert isinstance(rig.refused(measurement), error)
        rig.rest()


def test_a_worker_that_dies_while_it_is_measured_costs_one_run(rig: Rig) -> None:
    rig.register("a")
    rig.world.profile("a")
    rig.until(lambda: rig.state.owner.running is not None)
    rig.world.workers[rig.state.owner.running.slot].end(-9)
    rig.rest()
    assert rig.state.replicas["a"].grouping.source == "planned"


def test_of_several_devices_one_measures_and_all_alike_use_the_profile() -> None:
    rig = Rig(devices=2)
    rig.register("a")
    rig.world.profile("a")
    rig.rest()
    runs = [c for c in rig.commands(ev.Send) if isinstance(c.message, RunInference)]
    assert {command.target.device for command in runs} == {0}
    devices = rig.world.scheduler.machine.devices
    assert {one.state.replicas["a"].grouping.source for one in devices} == {"planned"}


def test_a_device_that_is_lost_ends_its_measurement_and_leaves_a_whole_server() -> None:
    rig = Rig(devices=2)
    rig.register("a")
    rig.core.settings = replace(rig.core.settings, max_daemon_restarts=0)
    measurement = rig.world.profile("a")
    rig.world.daemons[0].end(-9)
    assert isinstance(rig.refused(measurement), ServerUnavailable)
    rig.world.infer("a")
    rig.rest()
    assert (rig.world.open, rig.world.scheduler.is_whole) == (set(), True)


def test_a_profile_found_at_registration_plans_at_once_and_a_foreign_one_warns_once(
    rig: Rig,
) -> None:
    groups = measured(rig)
    rig.world.handle(ev.UnregisterRequest(token=rig.world.token(), model="a"))
    rig.rest()
    other = msgspec.structs.replace(groups, identity=identity("elsewhere"))
    for one, source, warnings in ((groups, "planned", 0), (other, "buckets", 1)):
        rig.said.clear()
        register_with(rig, (PlannedFile("a.json", one),))
        assert rig.state.replicas["a"].grouping.source == source
        assert len(rig.commands(ev.LogWarning)) == warnings
        rig.world.handle(ev.UnregisterRequest(token=rig.world.token(), model="a"))
        rig.rest()


def test_other_groups_wait_until_nobody_reads_the_model(rig: Rig) -> None:
    groups = measured(rig)
    model = rig.state.replicas["a"]
    rig.world.infer("a")
    rig.until(lambda: model.users)
    rig.world.scheduler.machine.devices[0].plans.want(model, (), "buckets", "test")
    rig.world.pass_time(0.0)
    assert model.grouping.plan == groups.plan
    rig.rest()
    assert model.grouping.plan == ()
    assert model.residency.state is Residency.HOST  # evicted, so the next request is cold


def test_a_pinned_model_is_measured_and_comes_back(rig: Rig) -> None:
    rig.register("a")
    rig.world.handle(ev.PinRequest(token=rig.world.token(), model="a", pin=True))
    rig.rest()
    rig.profile()
    model = rig.state.replicas["a"]
    assert model.residency.state is Residency.PINNED
    assert model.grouping.source == "planned"


def test_a_plan_without_arrival_words_changes_nothing(rig: Rig) -> None:
    rig.register("a")
    model, arena = rig.state.replicas["a"], rig.world.scheduler.machine.devices[0].arena
    region = arena.fences.reserve(Owner("fences"), arena.fences.largest_free_bytes)
    assert region is not None
    before = (model.first_fence, model.manifest)
    assert not rig.world.scheduler.machine.devices[0].residents.cut_anew(model, tuple(range(4)))
    assert (model.first_fence, model.manifest) == before
    assert arena.fences.get(Owner("model", "a")).size_bytes == 2
    assert "fences" in rig.refused(rig.world.profile("a")).message
    arena.fences.release(Owner("fences"))
    rig.profile()
    assert model.grouping.source == "planned"


def measured(rig: Rig) -> PlannedGroups:
    rig.register("a", "b")
    assert rig.refused(rig.world.profile("a")) is None
    rig.rest()
    groups = decode(rig.commands(ev.SavePlanned)[-1].document)
    rig.said.clear()
    return groups


def test_a_requests_batch_is_what_its_dynamic_extent_says() -> None:
    value = ValueSpec(name="x", dtype="float32", shape=("batch", 3))
    manifest = msgspec.structs.replace(manifest_of("d", 1 << 20, 2), inputs=(value,))
    slab = SlabTensor(name="x", dtype="float32", shape=(BATCH, 3), offset_bytes=0, size_bytes=48)
    assert batch_of(manifest, (slab,)) == BATCH
    fixed = msgspec.structs.replace(value, shape=(2, 3))
    assert batch_of(msgspec.structs.replace(manifest, inputs=(fixed,)), (slab,)) == 1


# -- helpers -------------------------------------------------------------------------------------


def identity(name: str) -> Any:
    return msgspec.structs.replace(UNKNOWN_DEVICE, name=name)


def register_with(rig: Rig, planned: tuple[PlannedFile, ...]) -> None:
    """Register model "a", which already has these planned groups on disk."""
    take = rig.world.scheduler.handle

    def handle(event: ev.Event, now_ms: float) -> list[ev.Command]:
        if isinstance(event, ev.Received) and event.manifest is not None:
            event = msgspec.structs.replace(event, planned=planned)
        return take(event, now_ms)

    rig.world.scheduler.handle = handle
    try:
        rig.register("a")
    finally:
        del rig.world.scheduler.handle
