"""Two devices of one machine, which do not affect each other."""

# mypy: disable-error-code="arg-type"

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pipeswitch.extras.lab.programs import program_of
from pipeswitch.ipc.messages.daemon import DaemonReady, TransmitModel
from pipeswitch.ipc.messages.worker import RunInference, RunJob, StopTask, WorkerReady
from pipeswitch.scheduler.memory.allocators import HostStoreAllocator
from pipeswitch.scheduler.policies import make_policy
from pipeswitch.scheduler.policies.guard import PolicyGuard
from pipeswitch.scheduler.server.device import Device
from pipeswitch.scheduler.state import events as ev
from pipeswitch.scheduler.state.core import Core, SchedulerSettings
from pipeswitch.scheduler.state.records import DeviceModel, Model, Request
from pipeswitch.scheduler.state.states import ModelEvent, Residency, TaskState
from pipeswitch.scheduler.training.job_requests import JobRequests
from pipeswitch.scheduler.training.jobs import Jobs
from tests.unit.arrivals import request_of

MIB = 1 << 20
SETTINGS = SchedulerSettings(arena_bytes=64 * MIB, store_bytes=64 * MIB, fence_count=64)


def look(device: Device) -> None:
    for part in device.parts():
        part.ask()


class Machine:
    """Machine with two devices, and a model in the host store that both may run."""

    def __init__(self) -> None:
        self.core = Core(SETTINGS, PolicyGuard(make_policy("priority", max_wait_ms=2000.0), 2000.0))
        store, jobs = HostStoreAllocator(self.core), Jobs(self.core)
        smaller = replace(SETTINGS, arena_bytes=32 * MIB)
        self.devices = [
            Device(self.core, settings, store, jobs) for settings in (SETTINGS, smaller)
        ]
        self.model = Model("m", priority=1, want_pinned=False, registered_at_ms=0.0)
        self.model.manifest = program_of("d", 8 * MIB).manifest
        store.take(self.model)
        for event in (ModelEvent.BUILT, ModelEvent.STORED):
            self.model.state.apply(event)
        for device in self.devices:
            replica = device.state.replicas["m"] = DeviceModel(self.model)
            assert device.residents.take(replica)
            self.start(device)

    def start(self, device: Device) -> None:
        device.worker_pool.start()
        device.from_daemon(DaemonReady(pid=1))
        look(device)
        for slot in device.state.workers:
            ready = WorkerReady(slot=slot, pid=2)
            device.from_worker(ev.Received(device.state.address(slot), ready))
        self.core.out.clear()

    def ask(self, device: Device, token: int) -> Request:
        """Admit a request for the model to a device; return the request."""
        request = request_of(token, "m", self.core.now_ms)
        device.state.requests[request.token] = request
        device.state.queue.add(request)
        device.advance()
        return request

    def sent(self, kind: type) -> list[Any]:
        orders = [c for c in self.core.out if isinstance(c, ev.Send)]
        return [order.message for order in orders if isinstance(order.message, kind)]

    def check(self) -> None:
        for device in self.devices:
            device.check()


@pytest.fixture
def machine() -> Machine:
    return Machine()


def test_a_request_on_one_device_leaves_the_other_idle(machine: Machine) -> None:
    first, second = machine.devices
    request = machine.ask(second, 1)
    assert request.state.state is TaskState.RUNNING
    assert (first.state.owner.running, first.state.owner.pending, len(first.state.queue)) == (
        None,
        None,
        0,
    )
    assert first.state.replicas["m"].residency.state is Residency.HOST
    assert second.state.replicas["m"].residency.state is Residency.TRANSMITTING
    assert [len(list(device.arena.regions)) for device in machine.devices] == [1, 2]
    machine.check()


def test_both_devices_run_one_model_at_once_from_the_same_place_in_the_store(
    machine: Machine,
) -> None:
    first, second = machine.devices
    machine.ask(first, 1)
    machine.ask(second, 2)
    one, other = machine.sent(TransmitModel)
    assert one.groups[0].store_offset_bytes == other.groups[0].store_offset_bytes
    assert one.op_id != other.op_id
    assert len(machine.sent(RunInference)) == 2
    assert first.state.replicas["m"].model is second.state.replicas["m"].model
    machine.check()


def test_training_on_one_device_does_not_step_aside_for_a_request_on_the_other(
    machine: Machine,
) -> None:
    first, second = machine.devices
    request = ev.TrainRequest(token=9, spec=ev.JobSpec(name="j", entry="x.py", args=(), priority=1))
    JobRequests(machine.core, first.jobs).train(request)
    look(first)
    assert [order.job for order in machine.sent(RunJob)] == ["j"]
    machine.ask(second, 1)
    assert not machine.sent(StopTask)
    assert (first.state.owner.job, second.state.owner.job) == ("j", None)
    machine.ask(first, 2)
    assert [order.op_id for order in machine.sent(StopTask)] == [first.state.jobs["j"].op_id]
    machine.check()


def test_a_daemon_that_dies_takes_its_own_device_alone(machine: Machine) -> None:
    first, second = machine.devices
    machine.ask(first, 1)
    machine.ask(second, 2)
    first.daemon_exited(ev.Exited(first.state.daemon.address, -9))
    assert first.state.replicas["m"].residency.state is Residency.HOST
    assert second.state.replicas["m"].residency.state is Residency.TRANSMITTING
    assert second.state.owner.running is not None
    assert (first.state.is_ready, second.state.is_ready) == (False, True)
    second.check()
