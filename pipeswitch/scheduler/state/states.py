"""States and transitions of all records, one table for each kind. No other module defines any.

The scheduler owns each record (a request, a job, a worker, a model). The states mean:

Task (an inference request or a training job; ``ps`` shows jobs and running requests):
  PREPROCESSING  a function of the model's owner makes the request's inputs, or will make them. The
                request does not wait for a device yet and is in a ``HelperQueue``.
  QUEUED        waits to be dispatched; also an evicted job, and a request between two runs.
  TRANSMITTING  dispatched to a worker: its model's groups are still copied, or its script starts.
  RUNNING       has the device's turn; later groups may still be copied (PipeSwitch 4.2).
  STOPPING      was told to stop and has not parked yet.
  SUSPENDED     parked in place: its worker waits inside the step, and its memory stays.
  SWAPPING_OUT  its script waits, and its slice is being copied to an image in host memory.
  SWAPPED       its script waits without memory on the device; it will continue where it stopped.
  SWAPPING_IN   its slice is being copied back.
  EVICTING      commits and unwinds, because it may not be swapped or the user ordered it.
  PAUSED        held by the user until ``resume``; holds no worker and no device memory.
  DONE, FAILED, CANCELLED, EXPIRED   final.

Worker (a slot; the process behind it changes):
  STARTING   forked, not yet ready.           STANDBY    ready, holds no task.
  ACTIVE     holds a dispatched task.         SUSPENDED  holds a parked training job.
  CLEANING   drops references to the last task while another worker may run the next task.
  RETIRING   its job's script has ended: the process exits and takes no other task.
  DOOMED     was killed and is not reaped yet: it may still write, and messages may still come.
  DEAD       exited; ``WorkerPool`` starts another process in its slot.

Owner (of a device's turn; ``device_owner.py`` records the task or job that has it):
  IDLE        nobody has the turn; a dispatched task may wait for it.
  INFERENCE   an inference task has the turn.
  YIELDED     a pass (one run of a streamed model) yielded between two groups: a dispatched task has
              the turn next, or the pass itself if none is dispatched.
  LENT        a dispatched task has the turn, and the pass waits.
  RECLAIMED   the task of LENT has ended: the pass has the turn next, before any dispatched task.
  TRAINING    a job has the turn.
  STOPPING    a job has the turn and was told to pass it on. When it has parked, IDLE follows.

Residency (a model on the device):
  HOST          only in the host store.       TRANSMITTING  groups are being copied in.
  RESIDENT      complete on the device.       PINNED        complete, and never evicted.
  PARTIAL       larger than the arena: between two passes only some of its groups stay there.
  ABANDONED     its copy was cancelled or failed; its range is free once nobody writes or reads it.

Registration (a model on the server):
  BUILDING  a builder child exports and packs it.
  STORING   the daemon loads it into the host store.
  READY     takes requests.
  LEAVING   takes no new request; removed when its queued requests have ended.
  QUARANTINED  killed too many workers in a row; its requests are refused until it is pardoned.
  FAILED    the registration was refused; its name is free again.

Version (one of several registered models that share a name):
  COMING    is being built or stored, or was just restored: requests reach it only by its number.
  CURRENT   serves the requests that use the name without a number.
  KEPT      was current: requests reach it by its number, and it may become current again.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Mapping
from typing import Final, Generic, TypeVar

from ...base.errors import InvalidTransition


class Name(enum.Enum):
    """Name of a state or an event.
    Members hash by identity, which is faster: one decision looks up about twenty of them."""

    __hash__ = object.__hash__


class TaskState(Name):
    """State of a request or a job."""

    PREPROCESSING = "preprocessing"
    QUEUED = "queued"
    TRANSMITTING = "transmitting"
    RUNNING = "running"
    STOPPING = "stopping"
    SUSPENDED = "suspended"
    EVICTING = "evicting"
    SWAPPING_OUT = "swapping_out"
    SWAPPED = "swapped"
    SWAPPING_IN = "swapping_in"
    PAUSED = "paused"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"


class TaskEvent(Name):
    """Event of a request or a job."""

    PREPARED = "prepared"
    DISPATCHED = "dispatched"
    STARTED = "started"
    STOP_REQUESTED = "stop_requested"
    PARKED = "parked"
    TURN_GIVEN = "turn_given"
    EVICT_REQUESTED = "evict_requested"
    UNWOUND = "unwound"
    SWAP_OUT = "swap_out"
    SWAPPED_OUT = "swapped_out"
    SWAP_FAILED = "swap_failed"
    SWAP_IN = "swap_in"
    SWAPPED_IN = "swapped_in"
    FINISHED = "finished"
    ERROR = "error"
    WORKER_DIED = "worker_died"
    SEPARATED = "separated"
    TAKEN_BACK = "taken_back"
    MORE = "more"
    PAUSE = "pause"
    RESUME = "resume"
    CANCEL = "cancel"
    EXPIRE = "expire"


_S, _E = TaskState, TaskEvent
TASK_FINAL: Final = frozenset({_S.DONE, _S.FAILED, _S.CANCELLED, _S.EXPIRED})
TASK_SWAPS: Final = frozenset({_S.SWAPPING_OUT, _S.SWAPPED, _S.SWAPPING_IN})
TASK_ON_WORKER: Final = TASK_SWAPS | {
    _S.TRANSMITTING,
    _S.RUNNING,
    _S.STOPPING,
    _S.SUSPENDED,
    _S.EVICTING,
}
TASK_LIVE: Final = frozenset(TaskState) - TASK_FINAL

TASK_TRANSITIONS: Final[Mapping[tuple[TaskState, TaskEvent], TaskState]] = {
    (_S.PREPROCESSING, _E.PREPARED): _S.QUEUED,
    (_S.PREPROCESSING, _E.FINISHED): _S.DONE,  # the result of its function is the answer
    (_S.PREPROCESSING, _E.WORKER_DIED): _S.PREPROCESSING,  # tried again, up to a limit
    (_S.PREPROCESSING, _E.CANCEL): _S.CANCELLED,
    (_S.PREPROCESSING, _E.EXPIRE): _S.EXPIRED,
    (_S.QUEUED, _E.DISPATCHED): _S.TRANSMITTING,
    (_S.QUEUED, _E.PAUSE): _S.PAUSED,
    (_S.QUEUED, _E.CANCEL): _S.CANCELLED,
    (_S.QUEUED, _E.EXPIRE): _S.EXPIRED,
    (_S.PAUSED, _E.RESUME): _S.QUEUED,
    (_S.FAILED, _E.RESUME): _S.QUEUED,  # a job resumes from its last commit
    (_S.PAUSED, _E.CANCEL): _S.CANCELLED,
    (_S.TRANSMITTING, _E.STARTED): _S.RUNNING,  # later groups are still copied
    (_S.TRANSMITTING, _E.FINISHED): _S.DONE,  # a short run: only its end was reported
    (_S.TRANSMITTING, _E.STOP_REQUESTED): _S.STOPPING,  # the job's script is still starting
    (_S.TRANSMITTING, _E.EVICT_REQUESTED): _S.EVICTING,
    (_S.RUNNING, _E.STOP_REQUESTED): _S.STOPPING,
    (_S.RUNNING, _E.EVICT_REQUESTED): _S.EVICTING,  # the user pauses or cancels the job
    (_S.RUNNING, _E.FINISHED): _S.DONE,
    (_S.STOPPING, _E.PARKED): _S.SUSPENDED,
    (_S.STOPPING, _E.FINISHED): _S.DONE,  # the task ended before it saw the stop
    (_S.STOPPING, _E.EVICT_REQUESTED): _S.EVICTING,
    (_S.SUSPENDED, _E.TURN_GIVEN): _S.RUNNING,  # the job continues in place
    (_S.SUSPENDED, _E.FINISHED): _S.DONE,  # the script ended while the job was parked
    (_S.SUSPENDED, _E.EVICT_REQUESTED): _S.EVICTING,
    (_S.EVICTING, _E.STOP_REQUESTED): _S.EVICTING,  # the job parks before it unwinds
    (_S.EVICTING, _E.PARKED): _S.EVICTING,  # also if it parked before the order arrived
    (_S.EVICTING, _E.UNWOUND): _S.QUEUED,  # the job will resume from its last commit
    (_S.EVICTING, _E.FINISHED): _S.DONE,
    (_S.SUSPENDED, _E.SWAP_OUT): _S.SWAPPING_OUT,
    (_S.SWAPPING_OUT, _E.SWAPPED_OUT): _S.SWAPPED,
    (_S.SWAPPING_OUT, _E.SWAP_FAILED): _S.SUSPENDED,  # its slice is intact
    (_S.SWAPPING_OUT, _E.FINISHED): _S.DONE,  # the script ended before it hid its slice
    (_S.SWAPPED, _E.FINISHED): _S.DONE,  # a process that says so although it waits
    (_S.SWAPPING_IN, _E.FINISHED): _S.DONE,
    (_S.SWAPPED, _E.SWAP_IN): _S.SWAPPING_IN,
    (_S.SWAPPING_IN, _E.SWAPPED_IN): _S.SUSPENDED,
    (_S.SWAPPING_IN, _E.SWAP_OUT): _S.SWAPPING_OUT,  # its memory is needed again: turned round
    **{(state, _E.WORKER_DIED): _S.QUEUED for state in TaskState if state in TASK_ON_WORKER},
    (_S.TRANSMITTING, _E.SEPARATED): _S.QUEUED,  # the batch failed: each request runs alone
    (_S.RUNNING, _E.SEPARATED): _S.QUEUED,
    (_S.TRANSMITTING, _E.TAKEN_BACK): _S.QUEUED,  # its deadline passed, or another goes first
    (_S.TRANSMITTING, _E.MORE): _S.QUEUED,  # a short run: only its end was reported
    (_S.RUNNING, _E.MORE): _S.QUEUED,  # the request needs another run
    **{(state, _E.ERROR): _S.FAILED for state in TaskState if state in TASK_LIVE},
}


class WorkerState(Name):
    """State of a worker."""

    STARTING = "starting"
    STANDBY = "standby"
    ACTIVE = "active"
    SUSPENDED = "suspended"
    CLEANING = "cleaning"
    RETIRING = "retiring"
    DOOMED = "doomed"
    DEAD = "dead"


WORKER_FREE: Final = (WorkerState.STANDBY, WorkerState.CLEANING)  # workers that may get a task
WORKER_LEAVES: Final = (WorkerState.DEAD, WorkerState.DOOMED, WorkerState.RETIRING)


class WorkerEvent(Name):
    """Event of a worker."""

    READY = "ready"
    ACTIVATED = "activated"
    PARKED = "parked"
    TURN_GIVEN = "turn_given"
    TASK_ENDED = "task_ended"
    CLEANED = "cleaned"
    RETIRED = "retired"
    KILLED = "killed"
    EXITED = "exited"
    RESPAWNED = "respawned"


_W, _V = WorkerState, WorkerEvent
WORKER_SERVES: Final = frozenset(WorkerState) - {_W.STARTING, _W.DOOMED, _W.DEAD}
_GONE: Final = (_W.DOOMED, _W.DEAD)
_CROSSES_A_KILL: Final = (  # events sent before the process died, or decided before it was reaped
    _V.READY,
    _V.PARKED,
    _V.TURN_GIVEN,
    _V.TASK_ENDED,
    _V.CLEANED,
    _V.RETIRED,
)
WORKER_TRANSITIONS: Final[Mapping[tuple[WorkerState, WorkerEvent], WorkerState]] = {
    (_W.STARTING, _V.READY): _W.STANDBY,
    (_W.STANDBY, _V.ACTIVATED): _W.ACTIVE,
    (_W.CLEANING, _V.ACTIVATED): _W.ACTIVE,  # the worker reads the task after cleaning
    (_W.CLEANING, _V.CLEANED): _W.STANDBY,
    (_W.ACTIVE, _V.PARKED): _W.SUSPENDED,
    (_W.ACTIVE, _V.TASK_ENDED): _W.CLEANING,
    (_W.SUSPENDED, _V.TURN_GIVEN): _W.ACTIVE,
    (_W.ACTIVE, _V.RETIRED): _W.RETIRING,
    (_W.SUSPENDED, _V.RETIRED): _W.RETIRING,  # the script ended while the job was parked
    **{(state, _V.KILLED): _W.DOOMED for state in WorkerState if state not in _GONE},
    **{(_W.DOOMED, event): _W.DOOMED for event in _CROSSES_A_KILL},
    **{(state, _V.EXITED): _W.DEAD for state in WorkerState if state is not _W.DEAD},
    (_W.DEAD, _V.RESPAWNED): _W.STARTING,
}


class OwnerState(Name):
    """State of a device's turn."""

    IDLE = "idle"
    INFERENCE = "inference"
    YIELDED = "yielded"
    LENT = "lent"
    RECLAIMED = "reclaimed"
    TRAINING = "training"
    STOPPING = "stopping"


class OwnerEvent(Name):
    """Event of a device's turn."""

    TASK_STARTED = "task_started"
    TASK_ENDED = "task_ended"
    STEPPED_ASIDE = "stepped_aside"
    RESUMED = "resumed"
    YIELDED_ENDED = "yielded_ended"
    JOB_STARTED = "job_started"
    STOP_REQUESTED = "stop_requested"
    JOB_LEFT = "job_left"
    TASKS_LOST = "tasks_lost"


_D, _H = OwnerState, OwnerEvent
OWNER_GIVES: Final = frozenset({_D.IDLE, _D.YIELDED, _D.RECLAIMED})  # a task may get the turn
OWNER_COMPUTES: Final = frozenset({_D.INFERENCE, _D.LENT})  # an inference task has the turn
OWNER_WAITED_FOR: Final = frozenset({_D.YIELDED, _D.LENT, _D.RECLAIMED})  # a pass awaits the turn
OWNER_TRAINS: Final = frozenset({_D.TRAINING, _D.STOPPING})
OWNER_TRANSITIONS: Final[Mapping[tuple[OwnerState, OwnerEvent], OwnerState]] = {
    (_D.IDLE, _H.TASK_STARTED): _D.INFERENCE,
    (_D.INFERENCE, _H.TASK_ENDED): _D.IDLE,
    (_D.INFERENCE, _H.STEPPED_ASIDE): _D.YIELDED,
    (_D.YIELDED, _H.TASK_STARTED): _D.LENT,
    (_D.YIELDED, _H.RESUMED): _D.INFERENCE,  # no other task waits
    (_D.LENT, _H.TASK_ENDED): _D.RECLAIMED,
    (_D.RECLAIMED, _H.RESUMED): _D.INFERENCE,
    (_D.YIELDED, _H.YIELDED_ENDED): _D.IDLE,  # the worker of the pass died
    (_D.LENT, _H.YIELDED_ENDED): _D.INFERENCE,
    (_D.RECLAIMED, _H.YIELDED_ENDED): _D.IDLE,
    (_D.IDLE, _H.JOB_STARTED): _D.TRAINING,
    (_D.TRAINING, _H.STOP_REQUESTED): _D.STOPPING,
    (_D.STOPPING, _H.STOP_REQUESTED): _D.STOPPING,  # first at a step's end, now at once
    (_D.TRAINING, _H.JOB_LEFT): _D.IDLE,  # the job fetches a batch, ended or died
    (_D.STOPPING, _H.JOB_LEFT): _D.IDLE,
    **{(state, _H.TASKS_LOST): state if state in OWNER_TRAINS else _D.IDLE for state in _D},
}


class Residency(Name):
    """State of a model on a device."""

    HOST = "host"
    TRANSMITTING = "transmitting"
    RESIDENT = "resident"
    PINNED = "pinned"
    PARTIAL = "partial"
    ABANDONED = "abandoned"


class ResidencyEvent(Name):
    """Event of a model on a device."""

    TRANSMIT = "transmit"
    ARRIVED = "arrived"
    ABANDONED = "abandoned"
    RELEASED = "released"
    PIN = "pin"
    UNPIN = "unpin"
    EVICTED = "evicted"
    RING_FREED = "ring_freed"
    DEVICE_LOST = "device_lost"


_R, _T = Residency, ResidencyEvent
RESIDENCY_TRANSITIONS: Final[Mapping[tuple[Residency, ResidencyEvent], Residency]] = {
    (_R.HOST, _T.TRANSMIT): _R.TRANSMITTING,
    (_R.PARTIAL, _T.TRANSMIT): _R.TRANSMITTING,
    (_R.TRANSMITTING, _T.ARRIVED): _R.RESIDENT,
    (_R.TRANSMITTING, _T.ABANDONED): _R.ABANDONED,
    (_R.ABANDONED, _T.ABANDONED): _R.ABANDONED,  # a cancelled copy failed
    (_R.ABANDONED, _T.ARRIVED): _R.RESIDENT,  # the cancel came too late
    (_R.ABANDONED, _T.RELEASED): _R.HOST,
    (_R.RESIDENT, _T.PIN): _R.PINNED,
    (_R.PINNED, _T.UNPIN): _R.RESIDENT,
    (_R.RESIDENT, _T.EVICTED): _R.HOST,
    (_R.PARTIAL, _T.EVICTED): _R.HOST,
    (_R.RESIDENT, _T.RING_FREED): _R.PARTIAL,
    **{(state, _T.DEVICE_LOST): _R.HOST for state in Residency},
}


class ModelState(Name):
    """State of a registered model."""

    BUILDING = "building"
    STORING = "storing"
    READY = "ready"
    QUARANTINED = "quarantined"
    LEAVING = "leaving"
    FAILED = "failed"


class ModelEvent(Name):
    """Event of a registered model."""

    BUILT = "built"
    STORED = "stored"
    POISONED = "poisoned"
    PARDONED = "pardoned"
    UNREGISTERED = "unregistered"
    REFUSED = "refused"
    DAMAGED = "damaged"


_M, _N = ModelState, ModelEvent
MODEL_AWAITED: Final = frozenset({_M.BUILDING, _M.STORING})  # requests for such a model wait
MODEL_TRANSITIONS: Final[Mapping[tuple[ModelState, ModelEvent], ModelState]] = {
    (_M.BUILDING, _N.BUILT): _M.STORING,
    (_M.BUILDING, _N.REFUSED): _M.FAILED,
    (_M.STORING, _N.STORED): _M.READY,
    (_M.STORING, _N.REFUSED): _M.FAILED,
    (_M.STORING, _N.DAMAGED): _M.BUILDING,  # its derived file is damaged: it is derived again
    (_M.READY, _N.POISONED): _M.QUARANTINED,
    (_M.QUARANTINED, _N.PARDONED): _M.READY,  # `load NAME` ends the quarantine
    (_M.READY, _N.UNREGISTERED): _M.LEAVING,
    (_M.QUARANTINED, _N.UNREGISTERED): _M.LEAVING,
    (_M.LEAVING, _N.POISONED): _M.LEAVING,  # the queued requests are refused
}


class VersionState(Name):
    """State of a version."""

    COMING = "coming"
    CURRENT = "current"
    KEPT = "kept"


class VersionEvent(Name):
    """Event of a version."""

    CHOSEN = "chosen"
    REPLACED = "replaced"


VERSION_TRANSITIONS: Final[Mapping[tuple[VersionState, VersionEvent], VersionState]] = {
    (VersionState.COMING, VersionEvent.CHOSEN): VersionState.CURRENT,
    (VersionState.CURRENT, VersionEvent.REPLACED): VersionState.KEPT,
    (VersionState.KEPT, VersionEvent.CHOSEN): VersionState.CURRENT,  # rolled back
}


State = TypeVar("State", bound=Name)
Event = TypeVar("Event", bound=Name)

STORY_LENGTH: Final = 12  # kept transitions: enough for a whole preemption


class StateMachine(Generic[State, Event]):
    """State of one record, its table, and the last transitions with their causes.

    ``apply`` is the only way a state changes. An event with no row raises InvalidTransition and
    changes nothing; the error prints the story.
    """

    __slots__ = ("_steps", "_table", "key", "state")

    def __init__(self, key: str, state: State, table: Mapping[tuple[State, Event], State]) -> None:
        self.key = key
        self.state = state
        self._steps: deque[tuple[State, State, Event, str]] = deque(maxlen=STORY_LENGTH)
        self._table = table

    @property
    def story(self) -> list[str]:
        """Last transitions as texts; these are made only on reading, since each request has six."""
        return [
            f"{source.value}->{target.value} {event.value} {cause}".rstrip()
            for source, target, event, cause in self._steps
        ]

    def allows(self, event: Event) -> bool:
        """Return True if the table has a row for ``event`` in the current state."""
        return (self.state, event) in self._table

    def apply(self, event: Event, cause: str = "") -> State:
        """Return the new state from the table; raise InvalidTransition if the table has none."""
        try:
            target = self._table[(self.state, event)]
        except KeyError:
            raise InvalidTransition(
                f"{self.key}: no transition for {event.value} in {self.state.value}; "
                f"story: {'; '.join(self.story) or 'none'}",
                key=self.key,
                state=self.state.value,
                event=event.value,
                story=self.story,
            ) from None
        self._steps.append((self.state, target, event, cause))
        self.state = target
        return target


def diagram(name: str, table: Mapping[tuple[State, Event], State]) -> str:
    """Return a Mermaid state diagram generated from a table (docs/states.md shows these)."""
    lines = [f"%% {name}: generated from pipeswitch/scheduler/state/states.py", "stateDiagram-v2"]
    merged: dict[tuple[str, str], list[str]] = {}
    for (source, event), target in table.items():
        merged.setdefault((source.value, target.value), []).append(event.value)
    lines += [f"    {s} --> {t}: {', '.join(events)}" for (s, t), events in merged.items()]
    return "\n".join(lines)
