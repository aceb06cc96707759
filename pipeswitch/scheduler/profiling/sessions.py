"""The book of measurements, and the trials that fill it: a model computes once, measured.

A *trial* is dispatched like a request: it takes a worker and a turn, suspends a running job in
place, and its model is leased and sent like any other. It differs in three ways. It begins only
when no request waits; it takes no memory from a job and none from a model that a request waits
for; and it leaves the device between two groups as soon as a request arrives.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

import msgspec

from ... import errors
from ...ipc.messages import InferenceDone, ModelName
from ...planning.measuring import Measurement, Program, Run, Trial
from ...planning.planned import predict
from ...programs.groups import cut, layer_bytes, plan_in_force
from ...programs.layout import Manifest
from ..core import ALL, MEASURED
from ..device_state import DeviceState
from ..events import Answer, Interrupt, ProfileAsked, SaveProfile, Token
from ..memory.ledgers import Arena
from ..memory.residency import Residents
from ..records import Activation, Replica, Request
from ..requests.dispatch import Dispatch
from ..states import WORKER_FREE, ModelState, Residency, WorkerState
from .plans import Plans

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
            window = self._arena.find_place(replica, for_request=False, moves_pinned=True)
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
        if device.current is not None or device.upcoming is not None or device.aside is not None:
            return False
        quiet = (WorkerState.STANDBY, WorkerState.DEAD, WorkerState.SUSPENDED)
        return any(worker.state.state in WORKER_FREE for worker in device.workers.values()) and all(
            worker.job is not None or (worker.state.state in quiet and worker.preparing is None)
            for worker in device.workers.values()
        )

    def make_way(self, wanted: Activation | None) -> None:
        """A request waits: the running trial leaves between two groups; one that does not is
        killed, since a model's code may do anything. So leaves one that is not ``wanted``."""
        core, device = self._core, self._device
        tasks = device.tasks
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
                self._device.emit(Interrupt(slot=trial.slot, epoch=trial.epoch))
        elif core.now_ms >= trial.trial_stop_at_ms:
            device.kill(device.workers[trial.slot], "its trial did not stop", blame=False)
        else:
            core.look_again(trial.trial_stop_at_ms, MEASURED)

    def check(self, running: Activation | None) -> None:
        """At most one trial runs, and it is the one that is waited for."""
        trials = [task for task in self._device.tasks if task.is_trial]
        assert len(trials) <= 1, "two trials"
        assert running is None or trials == [running], "a trial is lost"


def _no_words(replica: Replica, trial: Trial) -> errors.OutOfDeviceMemory:
    return errors.OutOfDeviceMemory(
        f'"{replica.name}" needs {len(trial.plan)} arrival words to be measured layer by layer',
        hint="unregister models that are not needed",
        requested_bytes=4 * len(trial.plan),
        largest_free_bytes=0,
    )


def _no_room(replica: Replica) -> errors.OutOfDeviceMemory:
    size = replica.manifest.total_bytes if replica.manifest is not None else 0
    return errors.OutOfDeviceMemory(
        f'"{replica.name}" cannot be measured now: its {size} bytes are free only when a job or a '
        "model that others wait for leaves",
        hint="pause the job, or unload a pinned model, then try again",
        requested_bytes=size,
        largest_free_bytes=0,
    )


MAX_BATCHES: Final = 8
MAX_RETRIES: Final = 20  # of one trial in a row, without a request that made it leave


@dataclass
class Session:
    """One model being measured."""

    replica: Replica
    measurement: Measurement
    tokens: list[Token]
    running: Activation | None = None
    ended: tuple[Activation, InferenceDone] | None = None  # waits for the end of its copy
    retries: int = 0


class Profiling:
    """At most one measurement at a time; the others wait."""

    def __init__(self, device: DeviceState, plans: Plans, trials: Trials) -> None:
        self._core = device.core
        self._device = device
        self._plans = plans
        self._trials = trials
        self._session: Session | None = None
        self._waiting: list[tuple[ModelName, tuple[int, ...], list[Token]]] = []

    def asked(self, event: ProfileAsked) -> None:
        """Measure it next; progress and one final answer follow."""
        replica = self._measurable(event)
        batches = event.batches or (usual_batch(replica),)
        for name, others, tokens in self._waiting:
            if (name, others) == (event.model, batches):
                tokens.append(event.token)
                return
        self._waiting.append((event.model, batches, [event.token]))

    def _measurable(self, event: ProfileAsked) -> Replica:
        """
        Raises:
            ServerUnavailable, ModelNotFound, InvalidInput, RegistrationRefused, OutOfDeviceMemory.
        """
        replica = self._device.replicas.get(event.model)
        if self._core.is_draining:
            raise errors.ServerUnavailable("the server is draining")
        if replica is None or replica.model.state.state is ModelState.LEAVING:
            raise errors.ModelNotFound(f'no model "{event.model}"', hint="pipeswitch models")
        if replica.model.manifest is None or replica.model.state.state is not ModelState.READY:
            raise errors.InvalidInput(
                f'"{replica.name}" is {replica.model.state.state.value}, it must be ready'
            )
        if not layer_bytes(replica.model.manifest):
            raise errors.RegistrationRefused(
                replica.name,
                "it was built by a release that did not keep its layers",
                hint=f"unregister and register {replica.name}",
            )
        if replica.landings is not None:
            raise errors.OutOfDeviceMemory(
                f'"{replica.name}" is larger than the arena: it is never all there to be measured',
                hint="measure it on a server with a larger --arena, and copy the profile",
                requested_bytes=replica.model.manifest.total_bytes,
                largest_free_bytes=replica.region_bytes,
            )
        low, high = replica.model.manifest.batch
        if len(event.batches) > MAX_BATCHES or not all(low <= b <= high for b in event.batches):
            raise errors.InvalidInput(
                f"{replica.name} takes batches from {low} to {high}, at most {MAX_BATCHES} of them"
            )
        return replica

    def cancel(self, token: Token) -> None:
        """The client that asked has gone."""
        for name, batches, tokens in list(self._waiting):
            if token in tokens:
                tokens.remove(token)
                self._core.refuse(token, errors.Cancelled("cancelled by the caller"))
                if not tokens:
                    self._waiting.remove((name, batches, tokens))
        session = self._session
        if session is not None and token in session.tokens:
            session.tokens.remove(token)
            self._core.refuse(token, errors.Cancelled("cancelled by the caller"))
            if not session.tokens:
                self._end(session)

    def refuse_all(self, error: errors.PipeSwitchError) -> None:
        """The server leaves: every client that waits is answered."""
        self._core.refuse_all(error, *(tokens for _, _, tokens in self._waiting))
        self._waiting.clear()
        if self._session is not None:
            self._fail(self._session, error)

    def pump(self) -> int:
        """Take results, make room for requests, begin the next trial when nothing else waits."""
        self._plans.watch_switches(self._measured)
        self._take_ended_trial()
        session = self._session
        self._trials.make_way(session.running if session is not None else None)
        while True:  # a session that ends here may be followed by the next one at once
            if self._session is None:
                self._next_session()
            session = self._session
            if session is not None:
                self._advance(session)
            if self._session is session:
                break
        self._plans.apply(self._measured)
        before, session = self._device.measuring, self._session
        self._device.measuring = session.replica.name if session is not None else None
        if before != self._device.measuring:
            self._core.touched |= MEASURED
        is_busy = session or self._waiting or self._plans.is_busy
        return ALL if is_busy else MEASURED

    @property
    def _measured(self) -> Replica | None:
        return self._session.replica if self._session is not None else None

    def _next_session(self) -> None:
        core, device = self._core, self._device
        if core.is_draining:
            return
        while self._waiting and self._session is None:
            name, batches, tokens = self._waiting.pop(0)
            replica = device.replicas.get(name)
            if replica is None or replica.model.state.state is not ModelState.READY:
                core.refuse_all(_gone(name), tokens)
                continue
            self._begin(replica, batches, tokens)

    def _begin(self, replica: Replica, batches: tuple[int, ...], tokens: list[Token]) -> None:
        assert replica.model.manifest is not None
        measurement = Measurement(
            program_of(replica.name, replica.model.manifest),
            batches,
            self._device.settings.identity,
            lambda profile: self._plans.plan_of(profile)[0],
            predict,
        )
        self._session = Session(replica, measurement, tokens)
        self._device.publish("model.profiling", model=replica.name, batches=list(batches))

    def _advance(self, session: Session) -> None:
        """1. It cannot go on. 2. A run is under way. 3. A copy's times are awaited. 4. The
        profile is complete. 5. The next trial begins when the device is idle."""
        device, replica = self._device, session.replica
        if (
            device.replicas.get(replica.name) is not replica
            or replica.model.state.state is ModelState.LEAVING
        ):
            if session.running is None:
                self._fail(session, _gone(replica.name))
            return  # 1.
        if replica.model.state.state is not ModelState.READY:
            if session.running is None:
                self._fail(
                    session, errors.ServerUnavailable(f'"{replica.name}": {replica.model.reason}')
                )
            return  # 1.
        if session.running is not None:
            return  # 2.
        if session.ended is not None and not self._take_run(session, *session.ended):
            return  # 3.
        trial = session.measurement.next
        if trial is None:
            self._finish(session)  # 4.
        elif self._trials.is_possible():
            self._start(session, trial)  # 5.

    def _start(self, session: Session, trial: Trial) -> None:
        try:
            session.running = self._trials.start(session.replica, trial)
        except errors.OutOfDeviceMemory as error:
            self._fail(session, error)

    def _take_ended_trial(self) -> None:
        """The run is over, one way or another."""
        device, session = self._device, self._session
        ended, device.ended_trial = device.ended_trial, None
        if ended is None or session is None or session.running is not ended.activation:
            return
        session.running = None
        if ended.message is not None:
            session.ended = (ended.activation, ended.message)
        elif ended.error is not None and not isinstance(ended.error, errors.Cancelled):
            self._fail(session, ended.error)
        elif ended.activation.trial_stop_at_ms is None:
            self._again(session)

    def _again(self, session: Session) -> None:
        session.retries += 1
        if session.retries > MAX_RETRIES:
            error = errors.ServerUnavailable(
                f'"{session.replica.name}" could not be measured: none of its trials ends'
            )
            self._fail(session, error)

    def _take_run(self, session: Session, activation: Activation, done: InferenceDone) -> bool:
        """Hand a run to the measurement; False while the end of its copy was not told yet."""
        replica, trial = session.replica, session.measurement.next
        assert trial is not None
        run: Run | None = None
        if trial.is_cold != activation.was_resident:
            sent = replica.transmission
            has_ended = sent is not None and sent.epoch == activation.residency_epoch
            if trial.is_cold and not has_ended:
                if replica.is_being_sent and replica.residency_epoch == activation.residency_epoch:
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
        core, replica = self._core, session.replica
        at = datetime.fromtimestamp((core.now_ms + core.settings.unix_offset_ms) / 1000.0, UTC)
        profile = session.measurement.profile(at.isoformat(timespec="seconds"))
        core.emit(SaveProfile(profile=profile))
        self._end(session)
        self._plans.use(replica, profile)
        self._device.measured.append((replica.name, profile))
        core.touched |= MEASURED
        self._device.publish("model.profiled", model=replica.name, digest=profile.digest)
        core.answer_all(session.tokens, profile=msgspec.to_builtins(profile))

    def _fail(self, session: Session, error: errors.PipeSwitchError) -> None:
        self._end(session)
        self._core.refuse_all(error, session.tokens)

    def _end(self, session: Session) -> None:
        """The model gets the groups again that it had before."""
        replica = session.replica
        self._session = None
        if replica.next_plan is None:
            plan, why = replica.profile_plan, replica.plan_why
            self._plans.want(replica, plan, replica.plan_source, why)

    def check(self) -> None:
        self._trials.check(self._session.running if self._session is not None else None)


def usual_batch(replica: Replica) -> int:
    """The batch requests came with last; before the first, the smallest."""
    assert replica.model.manifest is not None
    return replica.model.last_batch or replica.model.manifest.batch[0]


def program_of(name: str, built: Manifest) -> Program:
    """A manifest as a measurement sees it."""
    layers, sizes = built.layers, layer_bytes(built)
    finest = cut(layers, built.tensors, built.total_bytes, tuple(range(len(layers))))
    return Program(
        model=name,
        digest=built.digest,
        layer_bytes=sizes,
        labels=tuple(group.label for group in finest),
        built_plan=plan_in_force(built),
    )


def _gone(name: ModelName) -> errors.ModelNotFound:
    return errors.ModelNotFound(f'"{name}" is no longer there', hint="pipeswitch models")
