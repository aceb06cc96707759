"""Which inference task computes: the one that has the device's turn."""

from __future__ import annotations

import math

from ..ipc.messages import Turn
from .core import HUNG
from .device_state import DeviceState
from .events import RaiseTurn
from .records import Activation
from .states import TaskEvent


class Turns:
    """The dispatched task becomes the current one when no other and no job computes."""

    def __init__(self, device: DeviceState) -> None:
        self._core = device.core
        self._device = device

    def give(self) -> None:
        """If no task computes any more, the dispatched one does, if there is one.

        A worker that was told to raise another turn may still write it, as long as it lives and
        has not parked: 1. it was told to raise turn 7, 2. its script ends, 3. task 7 runs and
        ends, 4. its termination thread sees the stop and writes 7 over turn 9. So 9 waits.
        """
        device = self._device
        activation = device.upcoming
        if activation is None or device.current is not None or device.training is not None:
            return
        turn = activation.turn
        for worker in device.workers.values():
            if worker.may_raise and worker.may_raise != turn:
                return
        self._starts(activation, "has the turn")
        device.emit(RaiseTurn(turn=turn, slot=activation.slot))

    def passed(self, turn: Turn) -> None:
        """The parked worker has raised the turn itself."""
        device = self._device
        if device.upcoming is not None and device.upcoming.turn == turn and device.current is None:
            self._starts(device.upcoming, "turn passed on")

    def _starts(self, activation: Activation, cause: str) -> None:
        core, device = self._core, self._device
        device.current, device.upcoming = activation, None
        activation.began_at_ms = core.now_ms
        for token in activation.tokens:
            device.requests[token].state.apply(TaskEvent.STARTED, cause)

    def hung(self) -> Activation | None:
        """The task that computes for too long, if there is one; its ``hung_why`` says what is.

        1. It still computes long after its deadline; joined requests, after the last of theirs.
        2. It has had the turn for ``max_compute_ms``: taken for an endless loop, which would hold
           the device for ever. What its model took before counts not: who sends ever larger
           requests would raise the limit for himself.
        """
        core, device = self._core, self._device
        activation = device.current
        if activation is None or activation.hung_why:
            return activation
        settings = core.settings
        last_at_ms = max([device.requests[token].due_ms for token in activation.tokens])
        late_at_ms = last_at_ms + settings.deadline_grace_ms
        endless_at_ms = activation.began_at_ms + (settings.max_compute_ms or math.inf)
        at_ms = min(late_at_ms, endless_at_ms)
        if core.now_ms < at_ms:
            # A look that comes before finds it again: many short tasks leave one, not one each.
            if at_ms < core.wakeups.first_ms(HUNG):
                core.look_again(at_ms, HUNG)
            return None
        activation.hung_why = (
            "its task did not end after the deadline"
            if late_at_ms <= endless_at_ms
            else f"its task computed for {settings.max_compute_ms:.0f} ms"
        )
        return activation
