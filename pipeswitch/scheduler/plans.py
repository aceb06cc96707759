"""The groups each model is sent in: planned from a profile, byte buckets without; drift."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from ..planning.drift import Drift
from ..planning.grouping import Plan
from ..planning.planned import plan_of, predict
from ..planning.profile import Found, Profile
from ..programs.groups import layer_bytes
from .core import Core
from .events import SaveProfile, Warn
from .records import ColdSwitch, Model
from .residency import Residents
from .states import Residency

BUCKETS: Final = "buckets"
PLANNED: Final = "planned"


class Plans:
    """A new plan is in force as soon as its model is off the device."""

    def __init__(self, core: Core, residents: Residents) -> None:
        self._core = core
        self._residents = residents

    def found(self, model: Model, profiles: tuple[Found, ...]) -> None:
        """A program was built: use the first profile that is of it and of this device.

        None that fits: buckets, with one warning if there was one that might have.
        """
        assert model.built is not None
        problems: list[str] = []
        for one in profiles:
            problem = one.problem
            if one.profile is not None:
                problem = one.profile.why_unusable(
                    self._core.settings.identity, model.built.digest, layer_bytes(model.built)
                )
                if not problem and self.use(model, one.profile):
                    return
            problems.append(f"profile {one.file_name} is not used: {problem}")
        if problems:
            self._warn(model, problems[0])

    def _warn(self, model: Model, why: str) -> None:
        model.plan_why = why
        text = f'model "{model.name}": {why}; its groups are byte buckets '
        self._core.emit(Warn(text=text + f"(pipeswitch profile {model.name})"))
        self._core.publish("model.profile_unusable", model=model.name, reason=why)

    def use(self, model: Model, profile: Profile) -> bool:
        """Plan from it, and let that plan be in force as soon as the model is off the device."""
        try:
            plan, prefix = self.plan_of(profile)
        except ValueError as error:
            self._warn(model, f"no plan could be made from its profile: {error}")
            return False
        batch = profile.batches[0].batch
        model.profile, model.profile_plan, model.profile_prefix = profile, plan, prefix
        model.drift = Drift()
        model.predicted_ms = {
            one.batch: predict(profile, plan, one.batch) for one in profile.batches
        }
        check = profile.check_of(plan, batch)
        model.bias = check.bias if check is not None else 1.0
        why = f"measured {profile.measured_at} at batch {batch}"
        model.next_plan = (plan, PLANNED, why)
        return True

    def plan_of(self, profile: Profile) -> tuple[Plan, int]:
        """Its groups, and how many of them are worth keeping on the device."""
        return plan_of(profile, self._core.settings.prefix_bytes)

    def _fall_back(self, model: Model, why: str) -> None:
        """Buckets again."""
        model.profile, model.profile_plan = None, ()
        model.predicted_ms = {}
        model.next_plan = ((), BUCKETS, why)

    def apply(self, measured: Model | None) -> None:
        """Cut anew what can be; not the model that is being measured."""
        for model in self._core.models.values():
            if model.next_plan is not None and model is not measured:
                plan, source, why = model.next_plan
                prefix = model.profile_prefix if source == PLANNED else 0
                if self._cut(model, plan):
                    model.prefix_groups = prefix
                    model.plan_source, model.plan_why, model.next_plan = source, why, None
                    groups = len(model.manifest.groups) if model.manifest else 0
                    self._core.publish(
                        "model.planned", model=model.name, source=source, groups=groups, why=why
                    )

    def _cut(self, model: Model, plan: Plan) -> bool:
        """Other groups for a model; False while it cannot be: it is read, sent, or waited for.

        A model on the device is evicted first: the arrival words of the new groups have not
        risen. Its next request is cold, once.
        """
        if plan == model.plan:
            return True
        if model.users or self._core.queue.count(model.name) or model.is_being_sent:
            return False
        if model.residency.state is not Residency.HOST:
            self._residents.evict(model, "its groups are cut anew")
        if not self._residents.cut_anew(model, plan):
            model.plan_why = "no arrival words are left for its planned groups"
            model.next_plan = None
            return False
        return True

    def watch_switches(self, measured: Model | None) -> None:
        """Compare cold switches that had the device at once with what was predicted."""
        core = self._core
        left: list[ColdSwitch] = []
        for switch in core.cold_switches:
            model = core.models.get(switch.model)
            if model is None or model.residency_epoch != switch.residency_epoch:
                continue
            sent = model.transmission
            if sent is not None and sent.epoch == switch.residency_epoch:
                if model is not measured:
                    self._observe(model, switch, sent.started_at_ms, sent.group_ends_at_ms)
            elif model.is_being_sent:
                left.append(switch)
        core.cold_switches[:] = left

    def _observe(
        self, model: Model, switch: ColdSwitch, started_at_ms: float, copied: tuple[float, ...]
    ) -> None:
        predicted_ms = model.predicted_ms.get(switch.batch)
        is_planned = model.plan_source == PLANNED and model.next_plan is None
        had_turn = bool(copied) and switch.turn_at_ms <= copied[0]
        if predicted_ms is None or not is_planned or not had_turn:
            return
        measured_ms = switch.ended_at_ms - started_at_ms
        drift = model.drift.add(predicted_ms * model.bias, measured_ms)
        if drift:
            self._drifted(model, drift)

    def _drifted(self, model: Model, why: str) -> None:
        """Stale: byte buckets until the operator has it measured again."""
        core = self._core
        assert model.profile is not None
        core.emit(SaveProfile(profile=msgspec.structs.replace(model.profile, stale=why)))
        self._fall_back(model, f"its profile is stale: {why}")
        self._warn(model, f"its profile is stale: {why}")

    def row(self, model: Model) -> dict[str, Any]:
        """What ``show`` says of a model's groups."""
        profile = model.profile
        return {
            "grouping": model.plan_source,
            "grouping_why": model.plan_why,
            "plan": list(model.plan),
            "prefix_groups": model.prefix_groups,
            "profile": "" if profile is None else profile.measured_at,
            "predicted_ms": {str(batch): ms for batch, ms in model.predicted_ms.items()},
            "measured_over_predicted": model.drift.ratio,
        }
