"""Trials on the device: a model computes once, measured, when no request does.

A *trial* is dispatched like a request: it takes a worker and a turn, suspends a running job in
place, and its model is leased and sent like any other. It differs in three ways. It begins only
when no request waits; it takes no memory from a job and none from a model that a request waits
for; and it leaves the device between two groups as soon as a request arrives.
"""

from __future__ import annotations

from typing import Final

from ..errors import OutOfDeviceMemory
from ..planning.measuring import Trial
from .arena import Arena
from .core import MEASURED
from .device_state import DeviceState
from .dispatch import Dispatch
from .events import StopTrial, Token
from .records import Activation, Replica, Request
from .residency import Residents
from .states import ModelState, Residency, WorkerState

TRIAL_TOKENS: Final = -(1 << 61)  # counted down from here: no client's, none is answered


class Trials:
    """Begins them, and has them make way."""

    def __init__(
        self, device: DeviceState, arena: Arena, residents: Residents, dispatch: Dispatch
    ) -> None:
        self._core = device.core
        self._device = device
        self._arena = arena
        self._residents = residents
        self._dispatch = dispatch
        self._started = 0

    def start(self, replica: Replica, trial: Trial) -> Activation | None:
        """Bring the model where the trial wants it, and run it in the same breath.

        Returns:
            None when it must wait: for a copy that was stopped, or for a place soon free.

        Raises:
            OutOfDeviceMemory: no place or no arrival words are left for it.
        """
        core, device = self._core, self._device
        if replica.is_being_sent:
            return None  # the copy of a trial that was stopped
        has_other_groups = replica.plan != trial.plan
        is_partial = replica.residency.state is Residency.PARTIAL
        is_there = replica.residency.state is not Residency.HOST
        if is_partial or (is_there and (trial.is_cold or has_other_groups)):
            self._residents.evict(replica, "profile")
        replica.prefix_groups = 0
        if has_other_groups and not self._residents.cut_anew(replica, trial.plan):
            raise _no_words(replica, trial)
        is_sent = replica.residency.state is Residency.HOST
        if is_sent:
            window = self._arena.find_place(replica, for_request=False)
            if window is None:
                raise _no_room(replica)
            if self._arena.obstacles(window):
                return None  # soon free; that event comes here again
            self._residents.transmit(replica, window, "profile")
        self._started += 1
        request = Request(
            token=Token(TRIAL_TOKENS - (device.index << 32) - self._started),
            request_id=f"trial {self._started}",
            model=replica.name,
            priority=1 << 30,
            deadline_at_ms=None,
            inputs=(),
            reply_offset_bytes=0,
            reply_bytes=0,
            arrived_at_ms=core.now_ms,
            trial_batch=trial.batch,
            is_alone=True,
        )
        device.requests[request.token] = request
        return self._dispatch.activate(request, replica, is_sent=is_sent)

    def is_possible(self) -> bool:
        """No request waits, nothing computes but a job, and no worker is busy otherwise."""
        core, device = self._core, self._device
        if not device.is_daemon_ready or core.is_draining or device.queue:
            return False
        if device.current is not None or device.upcoming is not None:
            return False
        quiet = (WorkerState.STANDBY, WorkerState.DEAD, WorkerState.SUSPENDED)
        return any(worker.is_free for worker in device.workers.values()) and all(
            worker.job is not None or (worker.state.state in quiet and worker.preparing is None)
            for worker in device.workers.values()
        )

    def make_way(self, wanted: Activation | None) -> None:
        """A request waits: the running trial leaves between two groups; one that does not is
        killed, since a model's code may do anything. So leaves one that is not ``wanted``."""
        core, device = self._core, self._device
        tasks = [task for task in self._tasks if task is not None]
        trials = [task for task in tasks if task.is_trial]
        if not trials:
            return
        trial, is_awaited = trials[0], bool(device.queue) or len(tasks) > len(trials)
        if trial.trial_stop_at_ms is None:
            if (
                is_awaited
                or trial is not wanted
                or core.is_draining
                or device.replicas[trial.model].model.state.state is ModelState.LEAVING
            ):
                trial.trial_stop_at_ms = core.now_ms + core.settings.deadline_grace_ms
                core.look_again(trial.trial_stop_at_ms, MEASURED)
                self._device.emit(StopTrial(slot=trial.slot, epoch=trial.epoch))
        elif core.now_ms >= trial.trial_stop_at_ms:
            device.kill(device.workers[trial.slot], "its trial did not stop", blame=False)
        else:
            core.look_again(trial.trial_stop_at_ms, MEASURED)

    @property
    def _tasks(self) -> tuple[Activation | None, Activation | None]:
        return (self._device.current, self._device.upcoming)

    def check(self, running: Activation | None) -> None:
        """At most one trial runs, and it is the one that is waited for."""
        trials = [a for a in self._tasks if a is not None and a.is_trial]
        assert len(trials) <= 1, "two trials"
        assert running is None or trials == [running], "a trial is lost"


def _no_words(replica: Replica, trial: Trial) -> OutOfDeviceMemory:
    return OutOfDeviceMemory(
        f'"{replica.name}" needs {len(trial.plan)} arrival words to be measured layer by layer',
        hint="unregister models that are not needed",
        requested_bytes=4 * len(trial.plan),
        largest_free_bytes=0,
    )


def _no_room(replica: Replica) -> OutOfDeviceMemory:
    size = replica.manifest.total_bytes if replica.manifest is not None else 0
    return OutOfDeviceMemory(
        f'"{replica.name}" cannot be measured now: its {size} bytes are free only when a job or a '
        "model that others wait for leaves",
        hint="pause the job, or unload a pinned model, then try again",
        requested_bytes=size,
        largest_free_bytes=0,
    )
