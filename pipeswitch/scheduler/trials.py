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
from .core import Core
from .dispatch import Dispatch
from .events import StopTrial, Token
from .records import Activation, Model, Request
from .residency import Residents
from .states import ModelState, Residency, WorkerState

TRIAL_TOKENS: Final = -(1 << 61)  # counted down from here: no client's, none is answered


class Trials:
    """Begins them, and has them make way."""

    def __init__(self, core: Core, arena: Arena, residents: Residents, dispatch: Dispatch) -> None:
        self._core = core
        self._arena = arena
        self._residents = residents
        self._dispatch = dispatch
        self._started = 0

    def start(self, model: Model, trial: Trial) -> Activation | None:
        """Bring the model where the trial wants it, and run it in the same breath.

        Returns:
            None when it must wait: for a copy that was stopped, or for a place soon free.

        Raises:
            OutOfDeviceMemory: no place or no arrival words are left for it.
        """
        core = self._core
        if model.is_being_sent:
            return None  # the copy of a trial that was stopped
        has_other_groups = model.plan != trial.plan
        is_partial = model.residency.state is Residency.PARTIAL
        is_there = model.residency.state is not Residency.HOST
        if is_partial or (is_there and (trial.is_cold or has_other_groups)):
            self._residents.evict(model, "profile")
        model.prefix_groups = 0
        if has_other_groups and not self._residents.cut_anew(model, trial.plan):
            raise _no_words(model, trial)
        is_sent = model.residency.state is Residency.HOST
        if is_sent:
            window = self._arena.find_place(model, for_request=False)
            if window is None:
                raise _no_room(model)
            if self._arena.obstacles(window):
                return None  # soon free; that event comes here again
            self._residents.transmit(model, window, "profile")
        self._started += 1
        request = Request(
            token=Token(TRIAL_TOKENS - self._started),
            request_id=f"trial {self._started}",
            model=model.name,
            priority=1 << 30,
            deadline_at_ms=None,
            inputs=(),
            reply_offset_bytes=0,
            reply_bytes=0,
            arrived_at_ms=core.now_ms,
            trial_batch=trial.batch,
        )
        core.requests[request.token] = request
        return self._dispatch.activate(request, model, is_sent=is_sent)

    def is_possible(self) -> bool:
        """No request waits, nothing computes but a job, and no worker is busy otherwise."""
        core = self._core
        if not core.is_daemon_ready or core.is_draining or core.queue:
            return False
        if core.current is not None or core.upcoming is not None:
            return False
        quiet = (WorkerState.STANDBY, WorkerState.DEAD, WorkerState.SUSPENDED)
        return any(worker.is_free for worker in core.workers.values()) and all(
            worker.job is not None or (worker.state.state in quiet and worker.preparing is None)
            for worker in core.workers.values()
        )

    def make_way(self, wanted: Activation | None) -> None:
        """A request waits: the running trial leaves between two groups; one that does not is
        killed, since a model's code may do anything. So leaves one that is not ``wanted``."""
        core = self._core
        is_awaited = bool(core.queue) or any(a and not a.is_trial for a in self._tasks)
        trial = next((a for a in self._tasks if a is not None and a.is_trial), None)
        if trial is None:
            return
        if trial.trial_stop_at_ms is None:
            if (
                is_awaited
                or trial is not wanted
                or core.is_draining
                or core.models[trial.model].state.state is ModelState.LEAVING
            ):
                trial.trial_stop_at_ms = core.now_ms + core.settings.deadline_grace_ms
                core.look_again(trial.trial_stop_at_ms)
                core.emit(StopTrial(slot=trial.slot, epoch=trial.epoch))
        elif core.now_ms >= trial.trial_stop_at_ms:
            core.kill(core.workers[trial.slot], "its trial did not stop", blame=False)
        else:
            core.look_again(trial.trial_stop_at_ms)

    @property
    def _tasks(self) -> tuple[Activation | None, Activation | None]:
        return (self._core.current, self._core.upcoming)

    def check(self, running: Activation | None) -> None:
        """At most one trial runs, and it is the one that is waited for."""
        trials = [a for a in self._tasks if a is not None and a.is_trial]
        assert len(trials) <= 1, "two trials"
        assert running is None or trials == [running], "a trial is lost"


def _no_words(model: Model, trial: Trial) -> OutOfDeviceMemory:
    return OutOfDeviceMemory(
        f'"{model.name}" needs {len(trial.plan)} arrival words to be measured layer by layer',
        hint="unregister models that are not needed",
        requested_bytes=4 * len(trial.plan),
        largest_free_bytes=0,
    )


def _no_room(model: Model) -> OutOfDeviceMemory:
    size = model.manifest.total_bytes if model.manifest is not None else 0
    return OutOfDeviceMemory(
        f'"{model.name}" cannot be measured now: its {size} bytes are free only when a job or a '
        "model that others wait for leaves",
        hint="pause the job, or unload a pinned model, then try again",
        requested_bytes=size,
        largest_free_bytes=0,
    )
