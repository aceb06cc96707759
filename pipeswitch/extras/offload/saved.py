"""Storages that a step saves for backward, and the plan that moves some of them to the host."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import groupby
from typing import Any, Final

import torch

from pipeswitch.base.errors import OutOfDeviceMemory
from pipeswitch.base.units import format_bytes
from pipeswitch.devices.worker_device import now_ms
from pipeswitch.extras.offload.swaps import Event, Forecast, LinkQueue, Step, What, min_bytes, plan
from pipeswitch.ipc.gate import Gate

from .activation_budget import ActivationBudget
from .copy_streams import Copy, CopyStreams

STEPS_MEASURED: Final = 2  # steps measured at a loop's start; the first one has cold caches
UNLIMITED: Final = 1 << 62
LOOK_AGAIN_S: Final = 0.01  # interval of polling for memory that other jobs release


class StoragePlace(Enum):
    """Place of a storage's bytes; all except HOST and REFUSED count as device memory."""

    DEVICE = "device"
    LEAVING = "leaving"
    HOST = "host"
    COMING = "coming"
    REFUSED = "refused"  # there was no room; counted only for the error's text
    GONE = "gone"  # autograd dropped it, but its copy is still running


@dataclass(eq=False, slots=True)
class Saved:
    """A storage that autograd keeps."""

    number: int  # index in its step
    size_bytes: int
    layer: int
    may_leave: bool
    place: StoragePlace = StoragePlace.DEVICE
    device: torch.Tensor | None = None  # view of all its bytes
    host: torch.Tensor | None = None
    copy: Copy | None = None  # the copy under way
    roots: list[tuple[weakref.ref[torch.Tensor], int]] = field(default_factory=list)
    """Base tensors whose views were saved, each with its version at that time."""
    handles: int = 0
    is_used: bool = False
    end: weakref.finalize[..., Any] | None = None  # reports when autograd no longer uses the bytes


class StepPlan:
    """Measured step of a loop (``offload="auto"``), and the plan made from it."""

    def __init__(self, offload: str, streams: CopyStreams) -> None:
        self._is_auto, self._streams = offload == "auto", streams
        self.forecast: Forecast | None = None
        self.planned = 0  # number of storages in the measured step
        self.rank: Mapping[int, int] = {}  # storage's number -> rank of its use when measured
        self.measuring = STEPS_MEASURED if self._is_auto else 0
        self.of_step: list[Saved] = []
        self._events: list[Event] = []
        self._began_ms = self._event_at_ms = self._event_waited_ms = 0.0
        self.compute_ms = 0.0  # time of the measured body, without waits
        self.measured: Step | None = None

    def begin(self) -> None:
        """Reset the records at the start of a body."""
        self.of_step, self._events, self._event_waited_ms = [], [], 0.0
        self._event_at_ms = self._began_ms = now_ms()

    def note(self, what: What, saved: Saved, waited_ms: float) -> None:
        """Record an event if the step is measured and ``saved`` belongs to it."""
        of_step = self.of_step
        if self.measuring and saved.number < len(of_step) and of_step[saved.number] is saved:
            at_ms, waited_ms_since = now_ms(), waited_ms - self._event_waited_ms
            compute_ms = max(0.0, at_ms - self._event_at_ms - waited_ms_since)
            self._events.append(Event(what, saved.number, compute_ms))
            self._event_at_ms, self._event_waited_ms = at_ms, waited_ms

    def end(self, memory: ActivationMemory) -> dict[str, Any]:
        """End a body: return its figures; after a measured body, plan the next ones."""
        took_ms, planned = now_ms() - self._began_ms, self.forecast
        figures = {
            "saved_bytes": sum(one.size_bytes for one in self.of_step),
            "planned_wait_ms": None if planned is None else round(planned.wait_ms, 3),
            "step_ms": round(took_ms, 3),
            "planned_step_ms": planned and round(self.compute_ms + planned.wait_ms, 3),
        }
        if self._is_auto and not self.measuring and len(self.of_step) > self.planned:
            self.measuring = STEPS_MEASURED  # more storages: this is another model's loop
        elif self.measuring and self.of_step:
            self.measuring -= 1
            self.compute_ms = took_ms - memory.waited_ms
            self._make(memory.budget)
        if (tiles := memory.tiles) is not None:  # set the tiles that a step needs
            if not self._is_auto:
                tiles.learn(memory.peak_bytes)
            elif self.measuring or self.measured is None:
                tiles.remove()  # while it is measured, a step has the device alone
            elif not tiles.is_known:
                tiles.learn(min_bytes(self.measured))
            tiles.enter_step(is_in=False)
        return figures

    def _make(self, budget_bytes: int) -> None:
        sizes = [one.size_bytes for one in self.of_step]
        self.planned = len(sizes)
        self.measured = step = Step(sizes_bytes=sizes, events=self._events)
        uses = [event.storage for event in self._events if event.what == "use"]
        self.rank = {storage: rank for rank, storage in enumerate(uses)}
        out, back = (
            LinkQueue(bytes_per_ms=self._streams.bytes_per_ms(to_host=w)) for w in (True, False)
        )
        self.forecast = plan(step, budget_bytes, (out, back))


class ActivationMemory:
    """Device memory that a job's saved storages hold, within its budget and the device's tiles."""

    def __init__(
        self, budget_bytes: int | None, tiles: ActivationBudget | None, gate: Gate
    ) -> None:
        self.is_limited = budget_bytes is not None or tiles is not None
        self.budget = UNLIMITED if budget_bytes is None else budget_bytes
        if tiles is not None:
            self.budget = min(self.budget, tiles.total_bytes)
        self.tiles, self._gate = tiles, gate
        self.held = self.refused = self.needed = self.peak_bytes = 0
        self.waited_ms = 0.0  # waits in the current body

    def begin(self) -> None:
        """Wait until a body is certain to finish within the tiles; then mark it as begun."""
        if self.tiles is not None:
            self._await(lambda tiles: tiles.may_begin)
            self.tiles.enter_step()
        self.waited_ms, self.needed = 0.0, 0

    def fits(self, size_bytes: int) -> bool:
        """Return True if ``size_bytes`` more may be held now."""
        tiles = self.tiles
        most = self.budget if tiles is None else min(self.budget, tiles.free_bytes)
        return self.held + size_bytes <= most

    def hold(self, size_bytes: int) -> None:
        """Hold ``size_bytes`` more, and record the peak."""
        self.change(size_bytes)
        self.peak_bytes = max(self.peak_bytes, self.held)
        assert self.held <= self.budget

    def change(self, size_bytes: int) -> None:
        """Change the held bytes by ``size_bytes``, which may be negative."""
        self.held += size_bytes
        if self.tiles is not None:
            self.tiles.hold(self.held)

    def _await(self, is_there: Callable[[ActivationBudget], bool]) -> None:
        """Leave the device until ``is_there`` returns True; poll, because jobs send no signal."""
        tiles, began_ms = self.tiles, now_ms()
        assert tiles is not None
        while not is_there(tiles):
            self._gate.leave("copies")
            self._gate.pause(LOOK_AGAIN_S)
            self._gate.enter()
        self.waited_ms += now_ms() - began_ms

    def outlast_others(self, size_bytes: int, plan: StepPlan) -> bool:
        """Wait for other jobs' steps to end, because this step needs more than the measured steps.
        Return False if the bytes cannot fit, or if the others wait for this step."""
        tiles, needed = self.tiles, self.held + size_bytes
        if tiles is None or needed > self.budget or self._gate.in_optimizer_step:
            return False
        tiles.is_stuck = True
        tiles.hold(self.held)
        self._await(lambda tiles: needed <= tiles.free_bytes or not tiles.can_wait)
        is_there = needed <= tiles.free_bytes
        plan.planned = 0  # measure again
        tiles.is_stuck = False
        return is_there

    def over_budget(self, offload: str, of_step: Sequence[Saved]) -> OutOfDeviceMemory:
        """Return the error of a step over its budget; the hint names a sufficient budget."""
        needed = self.needed
        if offload in ("none", "conv"):  # nothing more could be offloaded
            needed = max(needed, self.held + self.refused)
        else:
            needed = max(needed, least_for(of_step))
        more = "" if offload == "auto" else ' or offload="auto"'
        return OutOfDeviceMemory(
            f"the step's activations take {format_bytes(needed)} of the device at once and may "
            f"take {format_bytes(self.budget)}: {format_bytes(needed - self.budget)} too much",
            hint=f'activation_memory="{-(-needed >> 10)}KiB"{more}; or a smaller batch',
            requested_bytes=needed,
            largest_free_bytes=self.budget,
        )


def least_for(of_step: Sequence[Saved]) -> int:
    """Return a budget in bytes that is enough for a step with these storages, without a plan.
    Backward uses them layer by layer, last layer first, and all storages of a layer together."""
    events = [Event("save", one.number, 0.0) for one in of_step]
    for _, layer in groupby(sorted(of_step, key=lambda one: -one.layer), lambda one: one.layer):
        numbers = [one.number for one in layer][::-1]
        events += [Event("use", number, 0.0) for number in numbers]
        events += [Event("release", number, 0.0) for number in numbers]
    sizes = [one.size_bytes for one in of_step]
    return min_bytes(Step(sizes_bytes=sizes, events=events))
