"""Profiles and plans in the scheduler: measure when idle, cut groups anew, notice drift.

A *trial* is dispatched like a request: it takes a worker and a turn, suspends a running job in
place, and its model is leased and sent like any other. It differs in three ways. It begins only
when no request waits; it takes no memory from a job and none from a model that a request waits
for; and it leaves the device between two groups as soon as a request arrives.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from ..errors import (
    Cancelled,
    InvalidInput,
    ModelNotFound,
    OutOfDeviceMemory,
    PipeSwitchError,
    RegistrationRefused,
    ServerUnavailable,
)
from ..ipc.messages import InferenceDone, ModelName
from ..planning.drift import Drift
from ..planning.grouping import Plan
from ..planning.measuring import Measurement, Program, Run, Trial
from ..planning.planned import plan_of, predict
from ..planning.profile import Found, Profile
from ..programs.groups import cut, layer_bytes
from ..programs.layout import Manifest
from .arena import Arena
from .core import Core
from .events import Answer, ProfileAsked, SaveProfile, StopTrial, Token, Warn
from .inference import Inference
from .records import Activation, ColdSwitch, Model, Request
from .residency import Residents
from .states import ModelState, Residency, WorkerState

TRIAL_TOKENS: Final = -(1 << 61)  # counted down from here: no client's, none is answered
MAX_BATCHES: Final = 8
MAX_RETRIES: Final = 20  # of one trial in a row, without a request that made it leave
BUCKETS: Final = "buckets"
PLANNED: Final = "planned"


@dataclass
class Session:
    """One model being measured."""

    model: Model
    measurement: Measurement
    tokens: list[Token]
    running: Activation | None = None
    ended: tuple[Activation, InferenceDone] | None = None  # waits for the end of its copy
    retries: int = 0


class Profiling:
    """At most one measurement at a time; the others wait."""

    def __init__(
        self, core: Core, arena: Arena, residents: Residents, inference: Inference
    ) -> None:
        self._core = core
        self._arena = arena
        self._residents = residents
        self._inference = inference
        self._session: Session | None = None
        self._waiting: list[tuple[ModelName, tuple[int, ...], list[Token]]] = []
        self._trials = 0

    # -- clients ------------------------------------------------------------------------------

    def asked(self, event: ProfileAsked) -> None:
        """Measure it next; progress and one final answer follow."""
        core = self._core
        model = core.models.get(event.model)
        refusal = self._refusal(model, event)
        if refusal is not None:
            core.refuse(event.token, refusal)
            return
        assert model is not None
        batches = event.batches or (usual_batch(model),)
        for name, others, tokens in self._waiting:
            if (name, others) == (event.model, batches):
                tokens.append(event.token)
                return
        self._waiting.append((event.model, batches, [event.token]))

    def _refusal(self, model: Model | None, event: ProfileAsked) -> PipeSwitchError | None:
        if self._core.is_draining:
            return ServerUnavailable("the server is draining")
        if model is None or model.state.state is ModelState.LEAVING:
            return ModelNotFound(f'no model "{event.model}"', hint="pipeswitch models")
        if model.built is None or model.state.state is not ModelState.READY:
            return InvalidInput(f'"{model.name}" is {model.state.state.value}, it must be ready')
        if not layer_bytes(model.built):
            return RegistrationRefused(
                model.name,
                "it was built by a release that did not keep its layers",
                hint=f"unregister and register {model.name}",
            )
        low, high = model.built.batch_min, model.built.batch_max
        if len(event.batches) > MAX_BATCHES or not all(low <= b <= high for b in event.batches):
            return InvalidInput(
                f"{model.name} takes batches from {low} to {high}, at most {MAX_BATCHES} of them"
            )
        return None

    def cancel(self, token: Token) -> None:
        """The client that asked has gone."""
        for name, batches, tokens in list(self._waiting):
            if token in tokens:
                tokens.remove(token)
                self._core.refuse(token, Cancelled("cancelled by the caller"))
                if not tokens:
                    self._waiting.remove((name, batches, tokens))
        session = self._session
        if session is not None and token in session.tokens:
            session.tokens.remove(token)
            self._core.refuse(token, Cancelled("cancelled by the caller"))
            if not session.tokens:
                self._end(session)

    def refuse_all(self, error: PipeSwitchError) -> None:
        """The server leaves: every client that waits is answered."""
        for _, _, tokens in self._waiting:
            for token in tokens:
                self._core.refuse(token, error)
        self._waiting.clear()
        if self._session is not None:
            self._fail(self._session, error)

    # -- plans --------------------------------------------------------------------------------

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
                if not problem and self._use(model, one.profile):
                    return
            problems.append(f"profile {one.file_name} is not used: {problem}")
        if problems:
            self._warn(model, problems[0])

    def _warn(self, model: Model, why: str) -> None:
        model.plan_why = why
        text = f'model "{model.name}": {why}; its groups are byte buckets '
        self._core.emit(Warn(text=text + f"(pipeswitch profile {model.name})"))
        self._core.publish("model.profile_unusable", model=model.name, reason=why)

    def _use(self, model: Model, profile: Profile) -> bool:
        """Plan from it, and let that plan be in force as soon as the model is off the device."""
        try:
            plan, prefix = self._plan_of(profile)
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

    def _plan_of(self, profile: Profile) -> tuple[Plan, int]:
        return plan_of(profile, self._core.settings.prefix_bytes)

    def _fall_back(self, model: Model, why: str) -> None:
        """Buckets again."""
        model.profile, model.profile_plan = None, ()
        model.predicted_ms = {}
        model.next_plan = ((), BUCKETS, why)

    def _apply_plans(self) -> None:
        for model in self._core.models.values():
            if model.next_plan is not None and model is not self._measured:
                plan, source, why = model.next_plan
                prefix = model.profile_prefix if source == PLANNED else 0
                if self._cut(model, plan):
                    model.prefix_groups = prefix
                    model.plan_source, model.plan_why, model.next_plan = source, why, None
                    groups = len(model.manifest.groups) if model.manifest else 0
                    self._core.publish(
                        "model.planned", model=model.name, source=source, groups=groups, why=why
                    )

    @property
    def _measured(self) -> Model | None:
        return self._session.model if self._session is not None else None

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

    # -- after every event --------------------------------------------------------------------

    def pump(self) -> None:
        """Take results, make room for requests, begin the next trial when nothing else waits."""
        self._watch_switches()
        self._take_ended_trial()
        self._yield()
        while True:  # a session that ends here may be followed by the next one at once
            if self._session is None:
                self._next_session()
            session = self._session
            if session is not None:
                self._advance(session)
            if self._session is session:
                break
        self._apply_plans()
        self._core.measuring = self._session.model.name if self._session is not None else None

    def _yield(self) -> None:
        """A request waits: the running trial leaves between two groups; one that does not is
        killed, since a model's code may do anything."""
        core, session = self._core, self._session
        is_wanted = bool(core.queue) or any(a and not a.is_trial for a in self._tasks)
        trial = next((a for a in self._tasks if a is not None and a.is_trial), None)
        if trial is None:
            return
        if trial.trial_stop_at_ms is None:
            is_orphan = session is None or session.running is not trial
            if (
                is_wanted
                or is_orphan
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

    def _next_session(self) -> None:
        core = self._core
        if core.is_draining:
            return
        while self._waiting and self._session is None:
            name, batches, tokens = self._waiting.pop(0)
            model = core.models.get(name)
            if model is None or model.state.state is not ModelState.READY:
                for token in tokens:
                    core.refuse(token, _gone(name))
                continue
            self._begin(model, batches, tokens)

    def _begin(self, model: Model, batches: tuple[int, ...], tokens: list[Token]) -> None:
        assert model.built is not None
        measurement = Measurement(
            program_of(model.name, model.built),
            batches,
            self._core.settings.identity,
            lambda profile: self._plan_of(profile)[0],
            predict,
        )
        self._session = Session(model, measurement, tokens)
        self._core.publish("model.profiling", model=model.name, batches=list(batches))

    # -- one session --------------------------------------------------------------------------

    def _advance(self, session: Session) -> None:
        """1. It cannot go on. 2. A run is under way. 3. A copy's times are awaited. 4. The
        profile is complete. 5. The next trial begins when the device is idle."""
        core, model = self._core, session.model
        if core.models.get(model.name) is not model or model.state.state is ModelState.LEAVING:
            if session.running is None:
                self._fail(session, _gone(model.name))
            return  # 1.
        if model.state.state is not ModelState.READY:
            if session.running is None:
                self._fail(session, ServerUnavailable(f'"{model.name}": {model.reason}'))
            return  # 1.
        if session.running is not None:
            return  # 2.
        if session.ended is not None and not self._take_run(session, *session.ended):
            return  # 3.
        trial = session.measurement.next
        if trial is None:
            self._finish(session)  # 4.
        elif self._is_idle():
            self._start(session, trial)  # 5.

    def _is_idle(self) -> bool:
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

    def _start(self, session: Session, trial: Trial) -> None:
        """Bring the model where the trial wants it, and run it in the same breath."""
        core, model = self._core, session.model
        if model.is_being_sent:
            return  # the copy of a trial that was stopped
        has_other_groups = model.plan != trial.plan
        is_partial = model.residency.state is Residency.PARTIAL
        is_there = model.residency.state is not Residency.HOST
        if is_partial or (is_there and (trial.is_cold or has_other_groups)):
            self._residents.evict(model, "profile")
        model.prefix_groups = 0
        if has_other_groups and not self._residents.cut_anew(model, trial.plan):
            self._fail(session, _no_words(model, trial))
            return
        is_sent = model.residency.state is Residency.HOST
        if is_sent:
            window = self._arena.find_place(model, for_request=False)
            if window is None:
                self._fail(session, _no_room(model))
                return
            if self._arena.obstacles(window):
                return  # soon free; that event comes here again
            self._residents.transmit(model, window, "profile")
        self._trials += 1
        request = Request(
            token=Token(TRIAL_TOKENS - self._trials),
            request_id=f"trial {self._trials}",
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
        session.running = self._inference.activate(request, model, is_sent=is_sent)

    def _take_ended_trial(self) -> None:
        """The run is over, one way or another."""
        core, session = self._core, self._session
        ended, core.ended_trial = core.ended_trial, None
        if ended is None or session is None or session.running is not ended.activation:
            return
        session.running = None
        if ended.message is not None:
            session.ended = (ended.activation, ended.message)
        elif ended.error is not None and not isinstance(ended.error, Cancelled):
            self._fail(session, ended.error)
        elif ended.activation.trial_stop_at_ms is None:
            self._again(session)

    def _again(self, session: Session) -> None:
        session.retries += 1
        if session.retries > MAX_RETRIES:
            error = ServerUnavailable(
                f'"{session.model.name}" could not be measured: no trial of it comes to its end'
            )
            self._fail(session, error)

    def _take_run(self, session: Session, activation: Activation, done: InferenceDone) -> bool:
        """Hand a run to the measurement; False while the end of its copy was not told yet."""
        model, trial = session.model, session.measurement.next
        assert trial is not None
        run: Run | None = None
        if trial.is_cold != activation.was_resident:
            sent = model.transmission
            has_ended = sent is not None and sent.epoch == activation.residency_epoch
            if trial.is_cold and not has_ended:
                if model.is_being_sent and model.residency_epoch == activation.residency_epoch:
                    return False
            elif trial.is_cold and sent is not None:
                run = Run(
                    sent.started_at_ms,
                    sent.group_ends_at_ms,
                    done.group_begins_at_ms,
                    done.group_ends_at_ms,
                )
            else:
                run = Run(done.turn_at_ms, (), done.group_begins_at_ms, done.group_ends_at_ms)
        session.ended = None
        if not session.measurement.take(run):
            self._again(session)
            return self._session is session
        session.retries = 0
        self._progress(session, trial)
        return True

    def _progress(self, session: Session, trial: Trial) -> None:
        kind = "cold" if trial.is_cold else "resident"
        stage = f"batch {trial.batch}, {len(trial.plan)} groups, {kind}"
        body = {"stage": stage, "fraction": session.measurement.fraction}
        for token in session.tokens:
            self._core.emit(Answer(token=token, more=True, body=body))

    def _finish(self, session: Session) -> None:
        core, model = self._core, session.model
        at = datetime.fromtimestamp((core.now_ms + core.settings.unix_offset_ms) / 1000.0, UTC)
        profile = session.measurement.profile(at.isoformat(timespec="seconds"))
        core.emit(SaveProfile(profile=profile))
        self._end(session)
        self._use(model, profile)
        core.publish("model.profiled", model=model.name, digest=profile.digest)
        for token in session.tokens:
            core.answer(token, profile=msgspec.to_builtins(profile))

    def _fail(self, session: Session, error: PipeSwitchError) -> None:
        self._end(session)
        for token in session.tokens:
            self._core.refuse(token, error)

    def _end(self, session: Session) -> None:
        """The model gets the groups again that it had before."""
        model = session.model
        self._session = None
        if model.next_plan is None:
            model.next_plan = (model.profile_plan, model.plan_source, model.plan_why)

    # -- drift --------------------------------------------------------------------------------

    def _watch_switches(self) -> None:
        """Compare cold switches that had the device at once with what was predicted."""
        core = self._core
        left: list[ColdSwitch] = []
        for switch in core.cold_switches:
            model = core.models.get(switch.model)
            if model is None or model.residency_epoch != switch.residency_epoch:
                continue
            sent = model.transmission
            if sent is not None and sent.epoch == switch.residency_epoch:
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
        if predicted_ms is None or not is_planned or not had_turn or model is self._measured:
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

    # -- invariants ---------------------------------------------------------------------------

    def check(self) -> None:
        """At most one trial runs, and it is this session's."""
        trials = [a for a in self._tasks if a is not None and a.is_trial]
        assert len(trials) <= 1, "two trials"
        session = self._session
        if session is not None and session.running is not None:
            assert trials == [session.running], "a trial is lost"

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


def usual_batch(model: Model) -> int:
    """The batch requests came with last; before the first, the smallest."""
    assert model.built is not None
    return model.last_batch or max(1, model.built.batch_min)


def program_of(name: str, built: Manifest) -> Program:
    """A manifest as a measurement sees it."""
    layers, sizes = built.layers, layer_bytes(built)
    finest = cut(layers, built.tensors, built.total_bytes, tuple(range(len(layers))))
    starts = {layer.first_node: index for index, layer in reversed(list(enumerate(layers)))}
    return Program(
        model=name,
        digest=built.digest,
        layer_bytes=sizes,
        labels=tuple(group.label for group in finest),
        built_plan=tuple(starts[group.first_node] for group in built.groups),
    )


def _gone(name: ModelName) -> ModelNotFound:
    return ModelNotFound(f'"{name}" is there no more', hint="pipeswitch models")


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
