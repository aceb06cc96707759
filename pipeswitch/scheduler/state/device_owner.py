"""Owner of a device's turn: the task or job that may compute on it, and the next one."""

from __future__ import annotations

from ...ipc.messages.base import JobName, OpId, Slot, Turn
from . import states
from .records import RunningTask


class DeviceOwner(states.StateMachine[states.OwnerState, states.OwnerEvent]):
    """State of one device's turn, with the tasks and the job that the state refers to.

    Attributes:
        running: the inference task that has the turn.
        pending: the task that is dispatched and waits for the turn; possible in any state.
        yielded: the run of a streamed model (a pass) that gave the turn up and waits to continue.
        job: the job that has the turn.
        promised: for each worker, the turn that it must write to the control page when it parks. It
            may write that turn at any time until it has parked or is reaped.
    """

    __slots__ = ("job", "pending", "promised", "running", "yielded")

    def __init__(self) -> None:
        super().__init__("owner of the device", states.OwnerState.IDLE, states.OWNER_TRANSITIONS)
        self.running: RunningTask | None = None
        self.pending: RunningTask | None = None
        self.yielded: RunningTask | None = None
        self.job: JobName | None = None
        self.promised: dict[Slot, Turn] = {}

    @property
    def tasks(self) -> list[RunningTask]:
        """Dispatched tasks; the one that has the turn comes first."""
        tasks = (self.running, self.pending, self.yielded)
        return [task for task in tasks if task is not None]

    def task_of(self, slot: Slot, op_id: OpId) -> RunningTask | None:
        """Return the dispatched task with this operation id, if it is on this worker."""
        for task in (self.running, self.pending, self.yielded):
            if task is not None and task.op_id == op_id and task.slot == slot:
                return task
        return None

    @property
    def is_free(self) -> bool:
        """True if nobody has the turn and no task waits for it."""
        return self.state is states.OwnerState.IDLE and self.pending is None

    @property
    def next_task(self) -> RunningTask | None:
        """Task that may have the turn now; None if there is none.

        A task waits while a worker may still write another turn: 1. a worker is told to write turn
        7; 2. its script ends; 3. task 7 runs and ends; 4. the worker's termination thread sees the
        stop, and would overwrite turn 9 with 7. So task 9 waits.
        """
        if self.state not in states.OWNER_GIVES:
            return None
        takes_back = self.pending is None or self.state is states.OwnerState.RECLAIMED
        task = self.yielded if takes_back else self.pending
        if task is not None:
            for turn in self.promised.values():
                if turn != task.turn:
                    return None
        return task

    def start(self, task: RunningTask, cause: str) -> None:
        """Give the turn to the pending task, or back to the pass that stepped aside."""
        if task is self.yielded:
            self.apply(states.OwnerEvent.RESUMED, cause)
            self.yielded = None
        else:
            self.apply(states.OwnerEvent.TASK_STARTED, cause)
            self.pending = None
        self.running = task

    def step_aside(self, cause: str) -> None:
        """Take the turn from the running pass; the pending task may get it."""
        self.apply(states.OwnerEvent.STEPPED_ASIDE, cause)
        self.running, self.yielded = None, self.running

    def drop(self, task: RunningTask, cause: str) -> None:
        """Remove a dispatched task that has ended or lost its worker."""
        if task is self.running:
            self.apply(states.OwnerEvent.TASK_ENDED, cause)
            self.running = None
        elif task is self.yielded:
            self.apply(states.OwnerEvent.YIELDED_ENDED, cause)
            self.yielded = None
        elif task is self.pending:
            self.pending = None

    def lose_tasks(self, cause: str) -> None:
        """Remove all dispatched tasks."""
        self.apply(states.OwnerEvent.TASKS_LOST, cause)
        self.running = self.pending = self.yielded = None

    def train(self, job: JobName, cause: str) -> None:
        """Give the turn to a job."""
        self.apply(states.OwnerEvent.JOB_STARTED, cause)
        self.job = job

    def stop_job(self, slot: Slot, next_turn: Turn) -> None:
        """Record that the job must pass the turn on; if ``next_turn`` is 0, nobody gets it."""
        self.apply(states.OwnerEvent.STOP_REQUESTED, f"turn {next_turn}")
        self.promised.pop(slot, None)
        if next_turn:
            self.promised[slot] = next_turn

    def job_left(self, cause: str) -> None:
        """Take the turn from the job: it parked, ended or died."""
        self.apply(states.OwnerEvent.JOB_LEFT, cause)
        self.job = None

    def check(self) -> None:
        """Assert that the state agrees with its tasks and job."""
        state = self.state
        assert (self.running is not None) == (state in states.OWNER_COMPUTES), (state, self.running)
        assert (self.yielded is not None) == (state in states.OWNER_WAITED_FOR), (
            state,
            self.yielded,
        )
        assert (self.job is not None) == (state in states.OWNER_TRAINS), (state, self.job)
