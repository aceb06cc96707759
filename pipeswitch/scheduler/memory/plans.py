"""Layer groups of each model: planned ones from a file, or byte buckets without one."""

from __future__ import annotations

from typing import Any, Final

from ...ipc.messages.base import ModelName
from ...planning.grouping import Plan
from ...planning.planned_groups import PlannedFile, PlannedGroups
from ...programs.interface.groups import layer_bytes
from ..state.core import ALL, MEASURED
from ..state.device_state import DeviceState
from ..state.events import LogWarning
from ..state.records import DeviceModel
from ..state.states import Residency
from .allocators import gib
from .residency import Residents

PLANNED: Final = "planned"


class Plans:
    """Plans of layer groups. A new plan takes effect as soon as its model is off the device."""

    def __init__(self, device: DeviceState, residents: Residents) -> None:
        self._core = device.core
        self._device = device
        self._residents = residents
        self._wanted: dict[ModelName, None] = {}  # models with a next plan

    def use_first(self, replica: DeviceModel, files: tuple[PlannedFile, ...]) -> None:
        """Use the first planned groups that fit the built program and this device.

        If none fit, the model keeps its byte buckets, and one warning names the first problem.
        """
        problems: list[str] = []
        for file in files:
            problem = file.problem
            if file.groups is not None:
                problem = self.why_unusable(replica, file.groups)
                if not problem:
                    self.use(replica, file.groups)
                    return
            problems.append(f"profile {file.file_name} is not used: {problem}")
        if problems:
            why = replica.grouping.why = problems[0]
            text = f'model "{replica.name}": {why}; its groups are byte buckets '
            self._core.emit(LogWarning(text=text + f"(pipeswitch profile {replica.name})"))
            self._device.publish("model.profile_unusable", model=replica.name, reason=why)

    def why_unusable(self, replica: DeviceModel, groups: PlannedGroups) -> str:
        """Return why the groups cannot be used for this model on this device; empty if they can."""
        built, identity = replica.built, self._device.settings.identity
        return groups.why_unusable(identity, built.digest, layer_bytes(built))

    def use(self, replica: DeviceModel, groups: PlannedGroups) -> None:
        """Plan these groups, which take effect as soon as the model is off the device.
        A streaming model keeps its own."""
        replica.grouping.planned = groups
        if replica.staging is None:
            why = f"measured {groups.measured_at} at batch {groups.batch}"
            self.want(replica, groups.plan, PLANNED, why)

    def want(self, replica: DeviceModel, plan: Plan, source: str, why: str) -> None:
        """Request a plan, which takes effect as soon as the groups can be cut."""
        replica.grouping.next = (plan, source, why)
        self._wanted[replica.name] = None
        self._core.dirty |= MEASURED

    def apply(self) -> int:
        """Apply the next plan of each model that can be cut now and has no trial."""
        for name in list(self._wanted):
            replica = self._device.replicas.get(name)
            if replica is None or replica.grouping.next is None:
                del self._wanted[name]
            elif name != self._device.trial.model:
                grouping = replica.grouping
                plan, source, why = replica.grouping.next
                if self._cut(replica, plan):
                    grouping.source, grouping.why, grouping.next = source, why, None
                    groups = len(replica.manifest.groups) if replica.manifest else 0
                    self._device.publish(
                        "model.planned", model=replica.name, source=source, groups=groups, why=why
                    )
        return ALL if self._wanted else MEASURED

    def _cut(self, replica: DeviceModel, plan: Plan) -> bool:
        """Cut a model into other groups. Return False if it is in use, or no fences are left.

        A model on the device is evicted first, because the fences of the new groups are not set.
        Only its next request is cold.
        """
        if plan == replica.grouping.plan:
            return True
        if not self._residents.is_idle(replica):
            return False
        if replica.residency.state is not Residency.HOST:
            self._residents.evict(replica, "its groups are planned again")
        if not self._residents.cut_anew(replica, plan):
            replica.grouping.why = "no fences are left for its planned groups"
            replica.grouping.next = None
            return False
        return True


def plan_row(replica: DeviceModel) -> dict[str, Any]:
    """Return the part of ``show`` about a model's groups."""
    planned = replica.grouping.planned
    predicted = planned.predicted_ms if planned is not None and replica.staging is None else {}
    return {
        "grouping": replica.grouping.source,
        "grouping_why": replica.grouping.why,
        "plan": list(replica.grouping.plan),
        "profile": "" if planned is None else planned.measured_at,
        "predicted_ms": predicted,
    }


def stream_of(state: DeviceState, replica: DeviceModel) -> dict[str, Any] | None:
    """Return the cost of a pass of a model that is larger than the arena; None for other models.

    ``pass_ms`` is the measured time of its passes, or before the first pass the time of the copy.
    It is 0 if no speed is known.
    """
    if replica.staging is None:
        return None
    known = state.predictions.predict(replica.name, max(1, replica.model.last_batch))
    says = "about {:.0f} ms a pass"
    if known.load_ms:
        took_ms = max(known.load_ms, known.compute_ms)
    else:
        bytes_per_ms, says = _link_bytes_per_ms(state), "of which the copy alone takes {:.0f} ms"
        took_ms = replica.sent_bytes / bytes_per_ms if bytes_per_ms else 0.0
    time = f", {says.format(took_ms)}" if took_ms else ""
    return {
        "window_bytes": replica.region_bytes,
        "sent_bytes": replica.sent_bytes,
        "pass_ms": took_ms,
        "text": f"streams: {gib(replica.sent_bytes)} of {gib(replica.built.total_bytes)} come "
        f"through {gib(replica.region_bytes)} with each pass{time}",
    }


def _link_bytes_per_ms(state: DeviceState) -> float:
    """Return the link's modelled speed, else the speed of the fastest recent copy, or 0."""
    sent = [one for r in state.replicas.values() if (one := r.transfer.report) is not None]
    rates = [one.copied_bytes / max(0.01, one.ended_at_ms - one.started_at_ms) for one in sent]
    return state.settings.identity.link_bytes_per_s / 1000.0 or max(rates, default=0.0)
