"""Layer groups of each model: planned from its profile, or byte buckets without one."""

from __future__ import annotations

from typing import Any, Final

from ...ipc.messages.base import ModelName
from ...planning.grouping import Plan
from ...planning.planned import costs_of, plan_of, predict
from ...planning.profile import Profile, ProfileFile
from ...planning.streaming import pass_ms
from ...programs.interface.groups import layer_bytes, plan_in_force
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

    def use_profiles(self, replica: DeviceModel, profiles: tuple[ProfileFile, ...]) -> None:
        """Use the first profile that fits the built program and this device.

        If none fits, the model keeps its byte buckets, and one warning names the first problem.
        """
        assert replica.model.manifest is not None
        problems: list[str] = []
        for one in profiles:
            problem = one.problem
            if one.profile is not None:
                problem = one.profile.why_unusable(
                    self._device.settings.identity,
                    replica.model.manifest.digest,
                    layer_bytes(replica.model.manifest),
                )
                if not problem and self.use(replica, one.profile):
                    return
            problems.append(f"profile {one.file_name} is not used: {problem}")
        if problems:
            self._warn(replica, problems[0])

    def _warn(self, replica: DeviceModel, why: str) -> None:
        replica.grouping.why = why
        text = f'model "{replica.name}": {why}; its groups are byte buckets '
        self._core.emit(LogWarning(text=text + f"(pipeswitch profile {replica.name})"))
        self._device.publish("model.profile_unusable", model=replica.name, reason=why)

    def use(self, replica: DeviceModel, profile: Profile) -> bool:
        """Plan from the profile; the plan takes effect as soon as the model is off the device.
        A streaming model keeps its groups; the profile only predicts its passes."""
        if replica.staging is not None:
            replica.grouping.profile = profile
            return True
        try:
            plan = plan_of(profile)
        except ValueError as error:
            self._warn(replica, f"no plan could be made from its profile: {error}")
            return False
        batch = profile.batches[0].batch
        replica.grouping.profile, replica.grouping.planned = profile, plan
        replica.predicted_ms = {
            one.batch: predict(profile, plan, one.batch) for one in profile.batches
        }
        why = f"measured {profile.measured_at} at batch {batch}"
        self.want(replica, plan, PLANNED, why)
        return True

    def want(self, replica: DeviceModel, plan: Plan, source: str, why: str) -> None:
        """Request a plan, which takes effect as soon as the groups can be cut."""
        replica.grouping.next = (plan, source, why)
        self._wanted[replica.name] = None
        self._core.dirty |= MEASURED

    def apply(self) -> int:
        """Apply the next plan of each model that can be cut now and is not being measured."""
        for name in list(self._wanted):
            replica = self._device.replicas.get(name)
            if replica is None or replica.grouping.next is None:
                del self._wanted[name]
            elif name != self._device.measurement.model:
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
    profile = replica.grouping.profile
    return {
        "grouping": replica.grouping.source,
        "grouping_why": replica.grouping.why,
        "plan": list(replica.grouping.plan),
        "profile": "" if profile is None else profile.measured_at,
        "predicted_ms": {str(batch): ms for batch, ms in replica.predicted_ms.items()},
    }


def stream_of(state: DeviceState, replica: DeviceModel) -> dict[str, Any] | None:
    """Return the cost of a pass of a model that is larger than the arena; None for other models.

    ``pass_ms`` is predicted from the model's profile. Without a profile it is the measured time of
    its passes, or before the first pass the time of the copy. It is 0 if no speed is known.
    """
    if replica.staging is None:
        return None
    known = state.predictions.predict(replica.name, max(1, replica.model.last_batch))
    says = "about {:.0f} ms a pass"
    profile = replica.grouping.profile
    if profile is not None:
        costs, plan = costs_of(profile), plan_in_force(replica.built)
        took_ms = pass_ms(plan, costs, replica.staging) + profile.overheads.wake_ms
    elif known.load_ms:
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
