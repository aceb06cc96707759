"""Seeded bugs: each removes one mechanism, and the model must find what it was there for."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import msgspec

from memory_daemon.commits import Commits
from pipeswitch.commits.area import HEADER_BYTES, CommitArea
from pipeswitch.ipc.messages import CommitCopy, StepCommitted
from pipeswitch.scheduler import events as ev
from pipeswitch.scheduler.device import Device
from pipeswitch.scheduler.device_state import DeviceState
from pipeswitch.scheduler.machine import Placing
from pipeswitch.scheduler.memory.leases import Slices
from pipeswitch.scheduler.memory.ledgers import FREE, Arena
from pipeswitch.scheduler.memory.regions import Cost, Owner
from pipeswitch.scheduler.memory.residency import Residents
from pipeswitch.scheduler.processes.fleet import Fleet
from pipeswitch.scheduler.requests import dispatch
from pipeswitch.scheduler.requests.accounts import Accounts
from pipeswitch.scheduler.requests.admission import Admission
from pipeswitch.scheduler.requests.dispatch import Dispatch, Turns
from pipeswitch.scheduler.requests.endings import Endings
from pipeswitch.scheduler.scheduler import Scheduler
from pipeswitch.scheduler.states import MoveState, Residency, TaskState
from pipeswitch.scheduler.training.commits import Commits as JobCommits
from pipeswitch.scheduler.training.jobs import Jobs
from pipeswitch.scheduler.training.moves import Moves
from pipeswitch.scheduler.training.training import Training
from pipeswitch.simulator.daemon import SimulatedDaemon
from pipeswitch.simulator.device import Image, after_step, image_of
from pipeswitch.simulator.script import SimulatedScript

from .scope import Scope

_handle = Scheduler.handle
_from_worker = Device.from_worker
_end = Endings._end
_queue_again = Endings._queue_again
_find_place = Arena.find_place
_done = Endings.done
_request_died = Endings.worker_died
_give = Turns.give
_stepped_aside = Turns.stepped_aside
_ended = Training.ended
_evict = Training.evict
_job_died = Training.worker_died
_commit = JobCommits.commit
_committed = JobCommits.committed
_hears = SimulatedScript.hears
_fetch = SimulatedScript._fetch
_price = Arena._price
_cancel_prefetches = Residents.cancel_prefetches
_work = SimulatedDaemon._work
_place = Admission._place
_daemon_exited = Scheduler._daemon_exited

FAULTLESS = Scope(name="faultless", steps=1, requests=1, models=1)
PREEMPTED = replace(FAULTLESS, steps=2, is_coarse=True)
KILLED = replace(FAULTLESS, is_coarse=True, kills=1)
LATE = replace(KILLED, late=1)
DEADLINE = replace(PREEMPTED, requests=2, deadlines=1)
CANCELLED = replace(PREEMPTED, requests=2, cancels=1)
DRAINED = replace(PREEMPTED, requests=0, drains=1)
JOINED = replace(FAULTLESS, steps=0, requests=3, batch=2, is_coarse=True)
AHEAD = Scope(name="ahead-full", steps=0, requests=4, asks="AABC", models=3, arena_mib=10,
              is_coarse=True)  # fmt: skip
HINTED = replace(PREEMPTED, models=2, groups=2, hints=1)
LOST = Scope(name="device-lost", has_job=False, requests=2, models=2, devices=2, daemon_kills=1,
             daemon_restarts=0, is_coarse=True)  # fmt: skip
ASIDE = Scope(name="aside", has_job=False, requests=3, asks="BAB", models=2, groups=4,
              model_mib=12, small_mib=2, arena_mib=12, is_coarse=True)  # fmt: skip
MOVED = Scope(name="move", steps=2, requests=0, models=1, devices=2, moves=1, kills=1,
              is_coarse=True)  # fmt: skip
PLACED = Scope(name="place", has_job=False, requests=2, asks="CB", models=3, limited="A",
               devices=2, pins=1, is_coarse=True)  # fmt: skip
TURNS = Scope(name="turns", has_job=False, requests=5, asks="AAAAB", callers="ggggm", models=2,
              arena_mib=14, is_coarse=True)  # fmt: skip
COMMITTED = replace(FAULTLESS, steps=2, requests=0)
REPEATED = replace(COMMITTED, repeats=1)


def _spare(self: Any, *_: Any) -> int:
    return 0


def _all_suspended(self: Training) -> list[Any]:
    return [
        job
        for job in self._device.jobs.values()
        if job.state.state is TaskState.SUSPENDED
        or (job.state.state is TaskState.QUEUED and not self._is_leaving(job))
    ]


def _give_upcoming(self: Turns) -> None:
    if self._device.upcoming is not None:
        _give(self)


def _let_in_at_once(self: Turns) -> None:
    device = self._device
    if device.current is not None and device.upcoming is not None:
        device.current, device.aside = None, device.current
        device.aside.lets_in = True
        _give(self)


def _stepped_aside_unused(self: Turns, worker: Any, epoch: Any) -> None:
    _stepped_aside(self, worker, epoch)
    device = self._device
    if device.aside is not None:
        device.replicas[device.aside.model].users -= 1


def _evict_whatever(self: Training, name: Any, cause: str) -> None:
    move, job = MoveState.STAYS, self._device.jobs[name]
    move, job.move.state = job.move.state, move
    _evict(self, name, cause)
    job.move.state = move


def _from_any(self: Device, event: Any) -> None:
    worker = self.state.workers[event.slot]
    _from_worker(self, msgspec.structs.replace(event, generation=worker.generation))


def _end_whatever(self: Endings, worker: Any, epoch: Any) -> Any:
    for task in (self._device.current, self._device.upcoming):
        if task is not None and task.slot == worker.slot:
            return _end(self, worker, task.epoch)
    return None


def _handle_suspects(self: Scheduler, event: Any, now_ms: float) -> Any:
    commands = _handle(self, event, now_ms)
    for command in list(commands):
        if isinstance(command, ev.KillWorker):
            gone = ev.WorkerExited(slot=command.slot, generation=command.generation, status=-9)
            commands += _handle(self, gone, now_ms)
    return commands


def _ended_and_released(self: Training, worker: Any, message: Any) -> None:
    _ended(self, worker, message)
    if worker.job is not None:
        self._slices.release(Owner("slice", worker.job))


def _one_slot(self: CommitArea, sequence: int) -> memoryview:
    return self._bytes[HEADER_BYTES : HEADER_BYTES + self.slot_bytes]


def _parameters_first(self: SimulatedScript) -> None:
    first, second, step = self._image
    self.gate.in_optimizer_step = False
    self._set(Image(first, after_step(second, step), step))
    self.phase = "fetching"
    self._begin_commit()


def _position_later(self: SimulatedScript) -> None:
    first, second, step = self._image
    if self._image == image_of(step):
        _fetch(self)
    else:
        self._set(Image(first, second, step + 1))


def _request_lost(self: Endings, worker: Any, status: int, begun_epoch: Any) -> None:
    before = {request.token for request in self._device.queue}
    _request_died(self, worker, status, begun_epoch)
    for request in list(self._device.queue):
        if request.token not in before:
            self._device.queue.discard(request)
            del self._device.requests[request.token]


def _leaked(self: Training, worker: Any, status: int) -> None:
    if self._device.jobs[worker.job].slot is None:  # its script had ended
        _job_died(self, worker, status)
        return
    with patch.object(self._slices, "release", lambda job: None):
        _job_died(self, worker, status)


def _turn_for_two(self: Turns) -> None:
    training, self._device.training = self._device.training, None
    _give(self)
    self._device.training = training


def _done_again(self: Endings, worker: Any, message: Any) -> None:
    before = len(self._core.out)
    _done(self, worker, message)
    if len(self._core.out) == before:
        token = ev.Token(int(str(message.outputs[0]).removeprefix("r")))
        self._core.emit(ev.Answer(token=token, outputs=message.outputs))


def _still_there(self: Residents) -> None:
    for model in self._device.replicas.values():
        model.users = 0


def _worth_little(self: Arena, region: Any, view: Any, *, for_request: bool) -> Cost | None:
    model = self._device.replicas.get(region.owner.name)
    if model is not None and model.residency.state is Residency.RESIDENT:
        return FREE
    return _price(self, region, view, for_request=for_request)


def _daemon_alone(self: Fleet, status: int) -> bool:
    self._device.is_daemon_ready = self.is_daemon_alive = False
    self._spawn_daemon()
    return True


def _turn_over_old_one(self: Turns) -> None:
    workers = self._device.workers.values()
    raising = {worker.slot: worker.may_raise for worker in workers}
    for worker in workers:
        worker.may_raise = 0  # type: ignore[assignment]
    _give(self)
    for worker in workers:
        worker.may_raise = raising[worker.slot]


def _said_too_early(self: SimulatedDaemon, queue: Any) -> None:
    order = queue[0]
    if isinstance(order, CommitCopy) and not self.is_half:
        self.say("out", StepCommitted(job=order.job, epoch=order.epoch, number=order.number,
                                      step=order.step, copy_ms=0.0))  # fmt: skip
    _work(self, queue)


def _any_commit(self: JobCommits, worker: Any, message: Any) -> None:
    if worker.job is not None:
        self._device.jobs[worker.job].commit_number = 0
    _commit(self, worker, message)


def _any_order(self: Commits, order: Any) -> bool:
    return False


def _any_flip(self: JobCommits, message: Any) -> None:
    job = self._device.jobs[message.job]
    if message.epoch == job.copying_epoch:
        job.copying_number = message.number
    _committed(self, message)


def _any_acknowledgement(self: SimulatedScript, message: Any) -> None:
    if isinstance(message, StepCommitted):
        message = msgspec.structs.replace(message, number=self.number)
    _hears(self, message)


def _not_zeroed(self: Slices, owner: Any) -> None:
    if self._arena.regions.get(owner) is not None:
        self._arena.regions.release(owner)


def _forgotten(self: Admission, event: Any) -> bool:
    state = self._machine.devices[0].state
    request = state.queue.get(event.token)
    if request is not None:
        state.queue.discard(request)
        del state.requests[event.token]
    return request is not None


def _cancelled_at_once(self: Residents) -> None:
    for model in self._device.replicas.values():
        if model.is_prefetch and not model.users:
            self._release_broken(model, "cancelled")
    _cancel_prefetches(self)


def _exchanged(self: Endings, worker: Any, message: Any) -> None:
    first, *others = message.outputs, *message.joined_outputs
    if others:
        message = msgspec.structs.replace(
            message, outputs=others[0], joined_outputs=(first, *others[1:])
        )
    _done(self, worker, message)


def _only_the_first(self: Endings, requests: Any, cause: str) -> None:
    _queue_again(self, requests[:1], cause)
    for request in requests[1:]:
        del self._device.requests[request.token]


def _until_it_is_full(device: Any, replica: Any, batch: Any) -> float:
    return 0.0 if batch.is_full or not replica.is_on_device else math.inf


def _place_for_request(self: Arena, replica: Any, **_: bool) -> Any:
    return _find_place(self, replica, for_request=True)


def _on_both(self: Admission, state: DeviceState, request: Any) -> None:
    _place(self, state, request)
    state.requests.setdefault(request.token, request)


def _death_of_the_first(self: Scheduler, event: Any) -> None:
    _daemon_exited(self, replace(event, device=0))


Change = tuple[Any, str, Any]


@dataclass(frozen=True)
class Mutant:
    """A name, the scope in which it is found, and what is replaced."""

    name: str
    scope: Scope
    changes: tuple[Change, ...]

    @contextlib.contextmanager
    def planted(self) -> Iterator[None]:
        """While open, the bug is in the code."""
        with contextlib.ExitStack() as stack:
            for owner, name, value in self.changes:
                stack.enter_context(patch.object(owner, name, value))
            yield


MUTANTS = (
    Mutant("no fencing: late messages of dead workers count", LATE,
           ((Device, "from_worker", _from_any), (Endings, "_end", _end_whatever))),
    Mutant("a suspect is taken for dead before it is reaped",
           replace(PREEMPTED, steps=1, suspicions=1), ((Scheduler, "handle", _handle_suspects),)),
    Mutant("a slice is used again before its worker is reaped", replace(FAULTLESS, requests=0),
           ((Training, "ended", _ended_and_released),)),
    Mutant("a commit is written in place", COMMITTED, ((CommitArea, "_slot", _one_slot),)),
    Mutant("parameters and data position are committed apart", COMMITTED,
           ((SimulatedScript, "_write", _parameters_first),
            (SimulatedScript, "_fetch", _position_later))),
    Mutant("a request is not queued again when its worker dies", KILLED,
           ((Endings, "worker_died", _request_lost),)),
    Mutant("a lease is freed only on goodbye", KILLED, ((Training, "worker_died", _leaked),)),
    Mutant("the turn is given twice", PREEMPTED, ((Turns, "give", _turn_for_two),)),
    Mutant("a repeated result is answered again", replace(FAULTLESS, repeats=1),
           ((Endings, "done", _done_again),)),
    Mutant("the stop is forgotten", PREEMPTED, ((Training, "stop", _spare),)),
    Mutant("models stay resident when the memory daemon dies",
           replace(FAULTLESS, is_coarse=True, daemon_kills=1),
           ((Residents, "device_lost", _still_there),)),
    Mutant("a model in use is evicted", replace(PREEMPTED, requests=2, models=2, steps=1),
           ((Arena, "_price", _worth_little),)),
    Mutant("workers outlive their memory daemon",
           replace(FAULTLESS, is_coarse=True, daemon_kills=1),
           ((Fleet, "daemon_died", _daemon_alone),)),
    Mutant("a turn is given over an older one on its way",
           replace(PREEMPTED, steps=1, requests=2, hears_late=True),
           ((Turns, "give", _turn_over_old_one),)),
    Mutant("a job starts beside its old process", replace(FAULTLESS, requests=0, pauses=1),
           ((Jobs, "has_process_of", lambda self, name: False),)),
    Mutant("a job starts before its last commit is copied", KILLED,
           ((Training, "_is_leaving", lambda self, job: self._jobs.has_process_of(job.name)),)),
    Mutant("a commit is acknowledged before it is flipped", COMMITTED,
           ((SimulatedDaemon, "_work", _said_too_early),)),
    Mutant("the optimizer does not wait for the commit", COMMITTED,
           ((SimulatedScript, "is_commit_over", True),)),
    Mutant("commit numbers are not compared", replace(REPEATED, is_coarse=True, pauses=1),
           ((JobCommits, "commit", _any_commit),)),
    Mutant("an order to commit is carried out twice", REPEATED,
           ((Commits, "was_accepted", _any_order),)),
    Mutant("an older flip ends the copy under way", REPEATED,
           ((JobCommits, "committed", _any_flip),)),
    Mutant("an older acknowledgement lets the optimizer write", REPEATED,
           ((SimulatedScript, "hears", _any_acknowledgement),)),
    Mutant("a request is begun after its deadline", DEADLINE, ((Dispatch, "expire", _spare),)),
    Mutant("a request that is taken back is never answered", CANCELLED,
           ((Admission, "cancel", _forgotten),)),
    Mutant("the server leaves before its jobs have", DRAINED,
           ((Jobs, "is_quiet", True), (JobCommits, "is_quiet", True))),
    Mutant("the place of a cancelled prefetch is used at once", HINTED,
           ((Residents, "cancel_prefetches", _cancelled_at_once),)),
    Mutant("joined requests read each other's answers", JOINED, ((Endings, "done", _exchanged),)),
    Mutant("a joined request is lost with its worker", replace(JOINED, kills=1),
           ((Endings, "_queue_again", _only_the_first),)),
    Mutant("a request waits for others without end", replace(JOINED, requests=2),
           ((dispatch, "begins_at_ms", _until_it_is_full),)),
    Mutant("a turn costs nothing", TURNS, ((Accounts, "charge", lambda *_: None),)),
    Mutant("a copy ahead takes the place of a model that is waited for", AHEAD,
           ((Arena, "find_place", _place_for_request),)),
    Mutant("a slice is not zeroed for its next owner", KILLED,
           ((Slices, "release", _not_zeroed),)),
    Mutant("what waits on a lost device stays there", LOST, ((Admission, "rehome", _spare),)),
    Mutant("a request goes to another device before its worker is reaped", LOST,
           ((DeviceState, "has_processes", False),)),
    Mutant("a request that went to another device stays on the first", LOST,
           ((Admission, "_place", _on_both),)),
    Mutant("a request that is dispatched goes to an idle device",
           replace(LOST, placement="spread"),
           ((DeviceState, "last_waiting",
             property(lambda self: next(iter(self.requests.values()), None))),)),
    Mutant("a device's death is taken for another one's", LOST,
           ((Scheduler, "_daemon_exited", _death_of_the_first),)),
    Mutant("a model is placed where it may not be served", replace(PLACED, pins=0, asks="AC"),
           ((Placing, "_living", lambda self, names: list(self._devices)),)),
    Mutant("a request waits where pinned models leave it no place", PLACED,
           ((Admission, "_avoid_pinned", _spare),)),
    Mutant("a job that copies its slice is given a turn", MOVED,
           ((Training, "_runnable", _all_suspended),)),
    Mutant("a job that copies its slice is evicted", replace(MOVED, pauses=1),
           ((Training, "evict", _evict_whatever),)),
    Mutant("a job's slice stays behind unzeroed when it has moved", MOVED,
           ((Slices, "release", _not_zeroed),)),
    Mutant("a job moves without its commits", MOVED, ((JobCommits, "enters", _spare),)),
    Mutant("what a dead process was copying to is not given back", MOVED,
           ((Moves, "reaped", _spare),)),
    Mutant("a job begins on another device beside its old process",
           replace(LOST, has_job=True, steps=1, requests=0, models=1),
           ((Jobs, "has_process_of", lambda self, name: False),)),
    Mutant("a pass that stepped aside does not go on", ASIDE, ((Turns, "give", _give_upcoming),)),
    Mutant("who was let in begins before the pass has stepped aside", ASIDE,
           ((Turns, "let_in", _let_in_at_once),)),
    Mutant("what a pass that stepped aside reads is given away", ASIDE,
           ((Turns, "stepped_aside", _stepped_aside_unused),)),
)  # fmt: skip
