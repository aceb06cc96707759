"""The model checker catches what it is there for: each seeded bug breaks some random life."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from msgspec.structs import replace

from pipeswitch.scheduler import events as ev
from pipeswitch.scheduler.admission import Admission
from pipeswitch.scheduler.arena import FREE, WHOLE, Arena
from pipeswitch.scheduler.commits import Commits
from pipeswitch.scheduler.device import Device
from pipeswitch.scheduler.device_state import DeviceState
from pipeswitch.scheduler.endings import Endings
from pipeswitch.scheduler.fleet import Fleet
from pipeswitch.scheduler.jobs import Jobs
from pipeswitch.scheduler.records import Replica
from pipeswitch.scheduler.regions import Cost, Owner
from pipeswitch.scheduler.registry import Registry
from pipeswitch.scheduler.slices import Slices
from pipeswitch.scheduler.states import ModelState, Residency
from pipeswitch.scheduler.training import Training
from pipeswitch.scheduler.turns import Turns

Patch = pytest.MonkeyPatch
MOST_LIVES = 400

_original_price = Arena._price
_original_from_worker = Device.from_worker
_original_ended = Training.ended
_original_died = Endings.worker_died
_original_free = Turns.give
_original_rehome = Admission.rehome
_original_store_again = Registry._store_again
_original_on_device = Replica.is_on_device


def turn_given_before_parked(patch: Patch) -> None:
    def give(self: Turns) -> None:
        training, self._device.training = self._device.training, None
        _original_free(self)
        self._device.training = training

    patch.setattr(Turns, "give", give)


def slice_released_before_the_reap(patch: Patch) -> None:
    def ended(self: Training, worker: Any, message: Any) -> None:
        _original_ended(self, worker, message)
        if worker.job is not None:
            self._slices.release(Owner("slice", worker.job))

    patch.setattr(Training, "ended", ended)


def slice_not_zeroed(patch: Patch) -> None:
    def release(self: Slices, owner: Any) -> None:
        if self._arena.regions.get(owner) is not None:
            self._arena.regions.release(owner)

    patch.setattr(Slices, "release", release)


def request_forgotten_when_its_worker_dies(patch: Patch) -> None:
    def worker_died(self: Endings, worker: Any, *how: Any) -> None:
        before = {request.token for request in self._device.queue}
        _original_died(self, worker, *how)
        for request in list(self._device.queue):
            if request.token not in before:
                self._device.queue.discard(request)
                del self._device.requests[request.token]

    patch.setattr(Endings, "worker_died", worker_died)


def upcoming_kept_when_its_worker_dies(patch: Patch) -> None:
    def worker_died(self: Endings, worker: Any, *how: Any) -> None:
        upcoming = self._device.upcoming
        if upcoming is None or upcoming.slot != worker.slot:
            _original_died(self, worker, *how)

    patch.setattr(Endings, "worker_died", worker_died)


def generation_not_checked(patch: Patch) -> None:
    def from_worker(self: Device, event: ev.FromWorker) -> None:
        worker = self.state.workers[event.slot]
        _original_from_worker(self, replace(event, generation=worker.generation))

    patch.setattr(Device, "from_worker", from_worker)


def model_in_use_evicted(patch: Patch) -> None:
    def price(self: Arena, region: Any, view: Any, *, for_request: bool) -> Cost | None:
        model = self._device.replicas.get(region.owner.name)
        if model is not None and model.residency.state is Residency.RESIDENT:
            return FREE
        return _original_price(self, region, view, for_request=for_request)

    patch.setattr(Arena, "_price", price)


def job_started_beside_its_old_process(patch: Patch) -> None:
    patch.setattr(Jobs, "has_process_of", lambda self, name: False)


def cancelled_copy_used(patch: Patch) -> None:
    patch.setattr(Replica, "is_on_device", property(lambda model: model.residency.state in WHOLE))


def daemon_told_before_it_is_ready(patch: Patch) -> None:
    def tell_daemon(self: DeviceState, message: Any, commits_of: Any = None) -> None:
        self.core.emit(ev.ToDaemon(message=message, commits_of=commits_of))

    patch.setattr(DeviceState, "tell_daemon", tell_daemon)


def stubborn_script_never_killed(patch: Patch) -> None:
    patch.setattr(Training, "_kill_after", lambda *args: None)


def workers_kept_when_the_daemon_dies(patch: Patch) -> None:
    def daemon_died(self: Fleet, status: int) -> bool:
        self._device.is_daemon_ready = self.is_daemon_alive = False
        self._spawn_daemon()
        return True

    patch.setattr(Fleet, "daemon_died", daemon_died)


MUTANTS: list[Callable[[Patch], None]] = [
    turn_given_before_parked,
    slice_released_before_the_reap,
    slice_not_zeroed,
    request_forgotten_when_its_worker_dies,
    upcoming_kept_when_its_worker_dies,
    generation_not_checked,
    model_in_use_evicted,
    job_started_beside_its_old_process,
    cancelled_copy_used,
    daemon_told_before_it_is_ready,
    stubborn_script_never_killed,
    workers_kept_when_the_daemon_dies,
]


SHOWN_BY = {  # a life that did is tried before all others
    job_started_beside_its_old_process: [24],
    cancelled_copy_used: [39],
    daemon_told_before_it_is_ready: [45],
    stubborn_script_never_killed: [21],
}


def request_placed_anew_before_the_reap(patch: Patch) -> None:
    def rehome(self: Admission) -> int:
        with patch.context() as while_it_looks:
            while_it_looks.setattr(DeviceState, "has_processes", False)
            return _original_rehome(self)

    patch.setattr(Admission, "rehome", rehome)


def model_stored_by_two_daemons(patch: Patch) -> None:
    def daemon_ready(self: Registry) -> None:
        for model in self._machine.models.values():
            if model.state.state is ModelState.STORING:
                self._store_again(model)

    def last_ready(self: Registry, model: Any) -> None:
        devices = self._machine.devices
        self._machine.devices = devices[::-1]
        _original_store_again(self, model)
        self._machine.devices = devices

    patch.setattr(Registry, "daemon_ready", daemon_ready)
    patch.setattr(Registry, "_store_again", last_ready)


def commits_left_open_where_a_job_was(patch: Patch) -> None:
    patch.setattr(Commits, "leaves", lambda self, job: None)


def command_for_another_device(patch: Patch) -> None:
    patch.setattr(DeviceState, "emit", lambda self, command: self.core.emit(command))


OF_TWO_DEVICES: list[Callable[[Patch], None]] = [
    request_placed_anew_before_the_reap,
    model_stored_by_two_daemons,
    commits_left_open_where_a_job_was,
    command_for_another_device,
]


@pytest.mark.parametrize("mutant", OF_TWO_DEVICES, ids=lambda mutant: mutant.__name__)
def test_the_model_checker_catches_on_two_devices(
    mutant: Callable[[Patch], None], fleet_model: ModuleType, monkeypatch: Patch
) -> None:
    mutant(monkeypatch)
    for seed in range(MOST_LIVES):
        try:
            fleet_model.live(fleet_model.random_world(seed, devices=2), 400)
        except (TypeError, NameError):
            raise  # a mutant that no longer fits the code it replaces is caught for nothing
        except Exception:
            return
    pytest.fail(f"{MOST_LIVES} random lives passed with {mutant.__name__}")


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_the_model_checker_catches(
    mutant: Callable[[Patch], None], fleet_model: ModuleType, monkeypatch: Patch
) -> None:
    mutant(monkeypatch)
    for seed in (*SHOWN_BY.get(mutant, ()), *range(MOST_LIVES)):
        world = fleet_model.random_world(seed)
        try:
            fleet_model.live(world, 400)
        except (TypeError, NameError):
            raise  # a mutant that no longer fits the code it replaces is caught for nothing
        except Exception:
            return
    pytest.fail(f"{MOST_LIVES} random lives passed with {mutant.__name__}")
