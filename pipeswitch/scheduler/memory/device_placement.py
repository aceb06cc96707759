"""Choice of the device for a request or a job, among those that its user allows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ...base.errors import InvalidInput, PipeSwitchError
from ...ipc.messages.base import ModelName
from ..policies import Prediction
from ..policies.placement import PLACEMENTS, Place
from ..state.device_state import DeviceState
from ..state.records import Job, Model, Request
from ..state.states import TASK_FINAL
from .allocators import ArenaAllocator


class DevicePlacement:
    """Choice of a device for each request and each job.

    A request is placed on arrival, and again when it waits while another device is idle. A job is
    placed on arrival and after it has left its device. A device without a running memory daemon,
    or without room because of pinned models, is chosen only if all others have this problem, too.
    """

    def __init__(
        self, states: Sequence[DeviceState], arenas: Sequence[ArenaAllocator], placement: str
    ) -> None:
        self.states = states
        self._arenas = arenas
        self._rank = PLACEMENTS[placement]

    def request(self, model: Model, request: Request) -> tuple[DeviceState, str]:
        """Return the device and the reason, which is empty for a single device."""
        if len(self.states) == 1:
            return self.states[0], ""
        for state in self.states:
            if state.trial.model == model.name:
                return state, "it is measured there"
        living = self._living(model.devices)
        able = [state for state in living if self.has_place(state, model.name, request.size_bytes)]
        places = [self._place(state, model, request) for state in _ready(able or living)]
        choice = min(places, key=self._rank)
        return self.states[choice.device], choice.reason

    def has_place(self, state: DeviceState, name: ModelName, size_bytes: int) -> bool:
        """Return True if the model is on that device, or could fit if only pinned models stayed."""
        return self._arenas[state.index].may_take(state.replicas[name], size_bytes)

    def job(self, job: Job, home: int | None, counts: Sequence[int]) -> int:
        """Return the index of the device with the fewest other jobs; prefer ``home`` among equals.

        Args:
            counts: number of unfinished jobs on each device.
        """
        is_counted = home is not None and job.state.state not in TASK_FINAL

        def order(state: DeviceState) -> tuple[int, bool, int]:
            others = counts[state.index] - (is_counted and state.index == home)
            return others, state.index != home, state.index

        places = _ready(self._living(job.allowed))
        if all(state.daemon.is_given_up for state in places):  # others of its kind can continue it
            names = [state.settings.device for state in self.states]
            places = _ready(self._living(limit(kinds_of(job.allowed), names)))
        return min(places, key=order).index

    def _living(self, names: tuple[str, ...]) -> list[DeviceState]:
        allowed = [one for one in self.states if not names or one.settings.device in names]
        return [one for one in allowed if not one.daemon.is_given_up] or allowed

    def _place(self, state: DeviceState, model: Model, request: Request) -> Place:
        replica = state.replicas[model.name]
        waiting, switch_ms = len(state.queue) + len(state.awaiting_model), 0.0
        if not replica.is_on_device:
            switch_ms = self._predict(state, model.name, request.batch).load_ms
        return Place(
            device=state.index,
            is_resident=replica.is_on_device,
            is_busy=state.is_busy,
            waiting=len(state.owner.tasks) + waiting - (request.token in state.queue),
            queue_ms=self._queue_ms(state, request),
            switch_ms=switch_ms,
            free_bytes=self._arenas[state.index].regions.largest_free_bytes,
            size_bytes=request.size_bytes,
        )

    def _queue_ms(self, state: DeviceState, request: Request) -> float:
        """Return the predicted time of the device's requests, without this one."""
        now_ms, total_ms = state.core.now_ms, 0.0
        for task in state.owner.tasks:
            compute_ms = self._of_last(state, state.replicas[task.model].model).compute_ms
            spent_ms = now_ms - task.began_at_ms if task is state.owner.running else 0.0
            total_ms += max(0.0, compute_ms - spent_ms)
        own = request.model if request.token in state.queue else None
        for name in state.queue.models():
            replica, count = state.replicas[name], state.queue.count(name) - (name == own)
            one = self._of_last(state, replica.model)
            total_ms += count * one.compute_ms
            total_ms += 0.0 if replica.is_on_device or not count else one.load_ms
        return total_ms

    def _of_last(self, state: DeviceState, model: Model) -> Prediction:
        return self._predict(state, model.name, max(1, model.last_batch))

    def _predict(self, state: DeviceState, name: str, batch: int) -> Prediction:
        """Predict from measurements on this device, else on the slowest other one."""
        own = state.predictions.predict(name, batch)
        if own.compute_ms and own.load_ms:
            return own
        others = [one.predictions.predict(name, batch) for one in self.states]
        return Prediction(
            own.load_ms or max(one.load_ms for one in others),
            own.compute_ms or max(one.compute_ms for one in others),
            own.p95_ms or max(one.p95_ms for one in others),
        )


def _ready(states: list[DeviceState]) -> list[DeviceState]:
    return [one for one in states if one.daemon.is_ready] or states


def kind_of(name: str) -> str:
    """Return the kind of a device, such as ``cuda`` for ``cuda:1``."""
    return name.partition(":")[0]


def kinds_of(names: Iterable[str]) -> list[str]:
    """Return each kind once, in the order of the names."""
    return list(dict.fromkeys(map(kind_of, names)))


def limit(wishes: Sequence[str], names: Sequence[str]) -> tuple[str, ...]:
    """Return the devices of ``names`` that are requested; empty: all of them.

    ``cuda`` means each cuda device; unknown devices are left out. Results of different kinds of
    devices differ in the last bits, so without ``wishes`` only the first device's kind is used.
    """
    choices = tuple(name for name in names if name in wishes or kind_of(name) in wishes)
    if choices or len(kinds_of(names)) == 1:
        return choices
    return tuple(name for name in names if kind_of(name) == kind_of(names[0]))


def refusal(wishes: Sequence[str], names: Sequence[str]) -> PipeSwitchError | None:
    """Return the error for a device that this server does not have."""
    kinds = kinds_of(names)
    unknown = next((name for name in wishes if name not in names and name not in kinds), None)
    if unknown is None:
        return None
    also = f"; {' or '.join(kinds)} for all of a kind" if len(names) > 1 else ""
    return InvalidInput(f'no device "{unknown}" here', hint=f"one of {', '.join(names)}{also}")
