"""Rules of swaps: a suspended job's slice is copied out for others, and back (ADR 64)."""

from __future__ import annotations

from typing import Any

import pytest

from pipeswitch.ipc.messages import worker as worker_msg
from pipeswitch.ipc.messages.daemon import (
    CancelSlice,
    CopySliceIn,
    CopySliceOut,
    DaemonFault,
    Scrub,
    Scrubbed,
    SliceCopied,
    TransmitModel,
)
from pipeswitch.scheduler.state import events as ev
from pipeswitch.scheduler.state.events import JobSpec
from pipeswitch.scheduler.state.records import Job
from pipeswitch.scheduler.state.states import TASK_SWAPS, TaskState
from tests.unit.test_scheduler_rules import MIB, Rig

STATES = sorted(TASK_SWAPS, key=str)


class SwapRig(Rig):
    """Server in whose arena the model ``big`` and a job's slice do not both fit."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.register("big", 40)
        self.register("small", 4)
        self.job = self.start_training(mib=40)

    def hide(self, job: Any = None) -> None:
        job = job or self.job
        self.worker(job.slot, worker_msg.SliceHidden(op_id=job.op_id, swap_id=job.swap.swap_id))

    def copied(self, job: Any = None, error: str = "", took_ms: float = 5.0) -> None:
        op_id = (job or self.job).swap.swap_id
        self.daemon(SliceCopied(op_id=op_id, began_at_ms=0.0, ended_at_ms=took_ms, error=error))

    def swap_out(self) -> ev.Token:
        """Send a request for the slice's memory, and swap the job out for it."""
        token = self.infer("big")
        self.park(self.job)
        self.hide()
        self.copied()
        return token

    def swap_for(self, other: Any) -> None:
        """Swap the job out for another job of its size."""
        self.tick(1000.0)
        self.park(self.job)
        self.lease(other, 40)
        assert [order.op_id for order in self.sent(worker_msg.HideSlice)] == [self.job.op_id]
        self.hide()
        self.copied()

    def serve(self) -> None:
        """Finish the request; then the model is idle, and the job's slice is copied in."""
        self.arrived("big")
        self.done()

    def reach(self, state: TaskState) -> None:
        """Put the job into a state of a swap."""
        if state is TaskState.SWAPPING_OUT:
            self.infer("big")
            self.park(self.job)
        else:
            self.swap_out()
            if state is TaskState.SWAPPING_IN:
                self.serve()
        assert self.job.state.state is state, self.job.state.story

    def restored(self) -> None:
        """End the copy in; the job has its slice."""
        self.copied()
        assert [one.op_id for one in self.sent(worker_msg.ShowSlice)] == [self.job.op_id]

    def evictions(self) -> list[Any]:
        """Return the evictions that the scheduler has decided, of which it may not have told."""
        sent = [one.message for one in self.core.out if isinstance(one, ev.Send)]
        return [message for message in sent if isinstance(message, worker_msg.EvictTask)]

    @property
    def images(self) -> dict[Any, int]:
        return self.scheduler.machine.store.images


@pytest.fixture
def rig() -> SwapRig:
    return SwapRig()


def test_a_running_job_is_stopped_then_copied_out_then_the_model_takes_its_place(
    rig: SwapRig,
) -> None:
    rig.infer("big")
    assert [order.op_id for order in rig.sent(worker_msg.StopTask)] == [rig.job.op_id]
    assert not rig.sent(worker_msg.EvictTask)
    rig.park(rig.job)
    (hide,) = rig.sent(worker_msg.HideSlice)
    assert [one.size_bytes for one in rig.commands(ev.CreateImage)] == [40 * MIB]
    assert not rig.sent(CopySliceOut), "its process still uses the slice"
    rig.hide()
    (copy,) = [one for one in rig.commands(ev.Send) if isinstance(one.message, CopySliceOut)]
    assert (copy.image_of, copy.message.op_id) == (rig.job.spec.name, hide.swap_id)
    assert not rig.sent(TransmitModel), "the copy out reads the range"
    rig.copied()
    assert rig.sent(TransmitModel)
    assert not rig.sent(Scrub), "the copy out has zeroed the range"
    assert (rig.job.progress.swaps, rig.job.progress.evictions) == (1, 0)


def test_a_swapped_job_continues_where_it_stopped_when_no_request_waits(rig: SwapRig) -> None:
    rig.swap_out()
    rig.serve()
    (copy,) = rig.sent(CopySliceIn)
    assert copy.size_bytes == 40 * MIB
    assert not rig.sent(worker_msg.GrantTurn)
    rig.copied()
    (show,) = rig.sent(worker_msg.ShowSlice)
    assert show.offset_bytes == copy.offset_bytes
    assert rig.commands(ev.DropImage)
    assert [order.turn for order in rig.sent(worker_msg.GrantTurn)] == [rig.job.turn]
    assert rig.job.state.state is TaskState.RUNNING
    assert not rig.images


# -- when a job is evicted instead ---------------------------------------------------------------


def _full_store(rig: SwapRig) -> None:
    rig.images["other"] = rig.core.settings.store_bytes


def _failed(rig: SwapRig) -> None:
    rig.job.swap.error = "its slice was not copied out: no memory"


def _asks(rig: SwapRig) -> None:
    rig.job.memory.lease_asked_bytes = 40 * MIB


def _one_is_out(rig: SwapRig) -> None:
    rig.state.jobs["other"] = other = Job(JobSpec("other", "t.py", (), 1))
    other.state.state = TaskState.SWAPPED


@pytest.mark.parametrize(
    ("settings", "prepare", "why"),
    [
        ({"max_swapped": 0}, lambda rig: None, "max_swapped is 0"),
        ({"max_swapped": 1}, _one_is_out, "max_swapped is 1"),
        ({}, _full_store, "the host store has 0.0 MiB left for its 40.0 MiB"),
        ({}, _asks, "waits for a larger slice"),
        ({}, _failed, "not copied out: no memory"),
    ],
)
def test_a_job_that_cannot_be_swapped_is_evicted_and_says_why(
    settings: dict[str, Any], prepare: Any, why: str
) -> None:
    rig = SwapRig(**settings)
    prepare(rig)
    rig.scheduler.machine.devices[0].training.free_memory("cifar", "memory for big")
    assert [order.op_id for order in rig.evictions()] == [rig.job.op_id]
    assert rig.job.progress.why.startswith("memory for big; it is not swapped: ")
    assert why in rig.job.progress.why
    assert (rig.job.progress.swaps, rig.job.progress.evictions) == (0, 1)


def test_a_copy_out_that_fails_leaves_the_job_running_and_the_next_time_it_is_evicted(
    rig: SwapRig,
) -> None:
    rig.infer("big")
    rig.park(rig.job)
    rig.hide()
    rig.daemon(DaemonFault(op_id=rig.job.swap.swap_id, reason="no memory"))
    shows = rig.sent(worker_msg.ShowSlice)
    assert [one.offset_bytes for one in shows] == [rig.job.swap.offset_bytes]
    assert rig.job.state.state is TaskState.EVICTING, "the request still waits"
    assert "no memory" in rig.job.progress.why
    assert not rig.images


@pytest.mark.parametrize("mib", [40, 50])
def test_a_request_does_not_wait_for_a_script_that_waits_for_a_slice(
    rig: SwapRig, mib: int
) -> None:
    """Such a script does not come to its gate, where it would hide the slice."""
    rig.reach(TaskState.SWAPPING_OUT)
    first = rig.job.swap.swap_id
    rig.lease(rig.job, mib)
    assert rig.sent(worker_msg.ShowSlice), "its gate must not hide the slice for the first order"
    if mib > 40:  # it has copied its state elsewhere
        assert not rig.images
        rig.scrubbed()
        assert rig.sent(TransmitModel)
    else:  # it has its slice, and comes to its gate
        assert rig.sent(worker_msg.LeaseGranted)
        assert rig.job.state.state is TaskState.SWAPPING_OUT
        assert rig.job.swap.swap_id != first


@pytest.mark.parametrize("state", [TaskState.SWAPPED, TaskState.SWAPPING_IN])
def test_a_process_that_has_hidden_its_slice_cannot_request_another_size(
    rig: SwapRig, state: TaskState
) -> None:
    """Otherwise a copy in would write past the end of its range."""
    rig.reach(state)
    asked_bytes = rig.job.memory.lease_asked_bytes
    rig.lease(rig.job, 1)
    assert rig.job.memory.lease_asked_bytes == asked_bytes
    assert rig.job.state.state is state


# -- late messages -------------------------------------------------------------------------------


def test_messages_of_an_earlier_swap_are_stale(rig: SwapRig) -> None:
    rig.swap_out()
    first = rig.job.swap.swap_id
    rig.serve()
    for message in (
        SliceCopied(op_id=first, began_at_ms=0.0, ended_at_ms=1.0),
        SliceCopied(op_id=first, began_at_ms=0.0, ended_at_ms=1.0, error="late"),
    ):
        rig.daemon(message)
    rig.worker(rig.job.slot, worker_msg.SliceHidden(op_id=rig.job.op_id, swap_id=first))
    assert rig.job.state.state is TaskState.SWAPPING_IN
    assert rig.core.counts["stale_messages"] == 3
    rig.restored()


def test_a_range_that_was_not_zeroed_is_zeroed_before_another_has_it(rig: SwapRig) -> None:
    rig.reach(TaskState.SWAPPING_OUT)
    rig.hide()
    op_id = rig.job.swap.swap_id
    rig.daemon(SliceCopied(op_id=op_id, began_at_ms=0.0, ended_at_ms=5.0, needs_scrub=True))
    (scrub,) = rig.sent(Scrub)
    assert not rig.sent(TransmitModel)
    rig.daemon(Scrubbed(op_id=scrub.op_id))
    assert rig.sent(TransmitModel)


def test_a_slice_is_copied_out_once(rig: SwapRig) -> None:
    rig.reach(TaskState.SWAPPING_OUT)
    rig.hide()
    assert rig.sent(CopySliceOut)
    rig.hide()
    assert not rig.sent(CopySliceOut)


# -- turning round -------------------------------------------------------------------------------


@pytest.mark.parametrize("error", ["cancelled", ""], ids=["in time", "too late"])
def test_a_request_during_a_copy_in_turns_it_round(rig: SwapRig, error: str) -> None:
    rig.reach(TaskState.SWAPPING_IN)
    copy = rig.job.swap.swap_id
    token = rig.infer("big")
    assert [one.op_id for one in rig.sent(CancelSlice)] == [copy]
    assert rig.job.state.state is TaskState.SWAPPING_OUT
    assert rig.images, "the image is still whole"
    rig.copied(error=error)
    assert not rig.sent(worker_msg.ShowSlice)
    assert not rig.sent(TransmitModel), "the range is not zeroed yet"
    rig.scrubbed()
    assert rig.sent(TransmitModel)
    rig.serve()
    assert rig.error(token) is None
    rig.restored()
    assert rig.job.state.state is TaskState.RUNNING


def test_a_copy_in_that_fails_ends_the_process_which_resumes_from_its_last_commit(
    rig: SwapRig,
) -> None:
    rig.reach(TaskState.SWAPPING_IN)
    rig.copied(error="no memory")
    assert "not copied back: no memory" in rig.commands(ev.Kill)[0].reason
    rig.worker_exits(rig.job.slot)
    assert rig.job.progress.deaths_without_progress == 0, "it is not to blame"
    assert not rig.images


# -- deaths --------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_hidden", [False, True])
@pytest.mark.parametrize("state", STATES)
def test_a_death_frees_the_image_and_the_range_once(
    rig: SwapRig, state: TaskState, is_hidden: bool
) -> None:
    rig.reach(state)
    if is_hidden and state is TaskState.SWAPPING_OUT:
        rig.hide()
    swap_id = rig.job.swap.swap_id
    has_range = rig.job.state.state is not TaskState.SWAPPED
    rig.worker_exits(rig.job.slot)
    assert len(rig.commands(ev.DropImage)) == 1
    assert len(rig.sent(Scrub)) == has_range
    for scrub in rig.sent(Scrub):
        rig.daemon(Scrubbed(op_id=scrub.op_id))
    rig.daemon(SliceCopied(op_id=swap_id, began_at_ms=0.0, ended_at_ms=1.0))
    assert not rig.images
    assert rig.job.state.state not in TASK_SWAPS
    assert rig.scheduler.machine.devices[0].arena.regions.get(rig.job.slice) is None


@pytest.mark.parametrize("state", STATES)
def test_the_death_of_the_daemon_ends_a_swap(rig: SwapRig, state: TaskState) -> None:
    rig.reach(state)
    rig.daemon_exits()
    rig.daemon_returns()
    assert not rig.images
    assert rig.job.state.state not in TASK_SWAPS


def test_a_process_that_does_not_hide_its_slice_is_killed_after_its_grace(rig: SwapRig) -> None:
    """The process was stopped (SIGSTOP), or its script does not return to its loop."""
    rig.reach(TaskState.SWAPPING_OUT)
    rig.tick(rig.core.settings.evict_grace_ms - 1.0)
    assert not rig.commands(ev.Kill)
    rig.tick(rig.core.settings.evict_grace_ms)
    assert [one.target.slot for one in rig.commands(ev.Kill)] == [rig.job.slot]


@pytest.mark.parametrize("outcome", ["done", "failed"])
@pytest.mark.parametrize("state", STATES)
def test_a_script_that_ends_during_a_swap_ends_the_job(
    rig: SwapRig, state: TaskState, outcome: str
) -> None:
    rig.reach(state)
    slot = rig.job_ends(rig.job, outcome)
    rig.worker_exits(slot, 0)
    assert rig.job.state.state.value == outcome
    assert not rig.images
    assert rig.scheduler.machine.devices[0].arena.regions.get(rig.job.slice) is None


# -- orders of the user --------------------------------------------------------------------------


def _finish_swap(rig: SwapRig) -> None:
    """Answer the orders of a swap until its process was told to unwind, or is killed."""
    for _ in range(4):
        state = rig.job.state.state
        if state is TaskState.SWAPPING_OUT and not rig.job.swap.is_hidden:
            rig.hide()
        elif state in (TaskState.SWAPPING_OUT, TaskState.SWAPPING_IN):
            rig.copied()
            if state is TaskState.SWAPPING_OUT and rig.residency("big").value == "transmitting":
                rig.serve()


@pytest.mark.parametrize("action", ["pause", "cancel"])
@pytest.mark.parametrize("state", STATES)
def test_a_pause_or_a_cancel_ends_a_swap(rig: SwapRig, state: TaskState, action: Any) -> None:
    rig.reach(state)
    token = rig.job_asked(rig.job.spec.name, action)
    kills = list(rig.commands(ev.Kill))
    if state is TaskState.SWAPPED and action == "pause":
        rig.serve()
    while not kills and rig.job.state.state is not TaskState.EVICTING:
        _finish_swap(rig)
        kills += rig.commands(ev.Kill)
    if kills:
        assert action == "cancel", "a pause loses no step"
        rig.worker_exits(rig.job.slot)
    else:
        slot = rig.job_ends(rig.job, "preempted")
        rig.worker_exits(slot, 0)
    assert rig.error(token) is None
    assert rig.job.state.state.value == {"pause": "paused", "cancel": "cancelled"}[action]
    assert not rig.images


def test_a_paused_job_whose_memory_stays_taken_is_killed_in_time(rig: SwapRig) -> None:
    rig.reach(TaskState.SWAPPED)
    rig.job_asked(rig.job.spec.name, "pause")
    assert not rig.commands(ev.Kill)
    rig.tick(rig.core.settings.evict_grace_ms)
    assert [one.target.slot for one in rig.commands(ev.Kill)] == [rig.job.slot]


@pytest.mark.parametrize("state", STATES)
def test_a_server_that_drains_unwinds_a_swapped_job(rig: SwapRig, state: TaskState) -> None:
    rig.reach(state)
    rig.handle(ev.DrainRequest(token=None, grace_ms=60000.0))
    if state is TaskState.SWAPPED:
        rig.serve()
    for _ in range(3):
        if rig.job.state.state is not TaskState.EVICTING:
            _finish_swap(rig)
    assert rig.job.state.state is TaskState.EVICTING
    rig.worker_exits(rig.job_ends(rig.job, "preempted"), 0)
    assert not rig.images


# -- devices on which a slice cannot move --------------------------------------------------------


def test_a_slice_that_cannot_move_waits_for_its_own_range_and_then_starts_again() -> None:
    rig = SwapRig(slices_move=False)
    rig.swap_for(rig.train("two", priority=0))
    assert rig.job.state.state is TaskState.SWAPPED
    rig.tick(rig.now_ms + rig.core.settings.evict_grace_ms - 1.0)
    assert not rig.commands(ev.Kill)
    rig.tick(rig.now_ms + 1.0)
    (kill,) = rig.commands(ev.Kill)
    assert (kill.target.slot, "is in use" in kill.reason) == (rig.job.slot, True)
    rig.worker_exits(rig.job.slot)
    assert not rig.images
    assert rig.job.state.state is TaskState.QUEUED


@pytest.mark.parametrize("slices_move", [False, True])
def test_a_slice_returns_to_its_own_range_if_it_cannot_move(slices_move: bool) -> None:
    rig = SwapRig(slices_move=slices_move)
    rig.swap_out()
    own = rig.job.swap.offset_bytes
    rig.serve()
    (copy,) = rig.sent(CopySliceIn)
    if not slices_move:
        assert copy.offset_bytes == own
    rig.restored()
    assert rig.sent(worker_msg.ShowSlice)[0].offset_bytes == copy.offset_bytes


# -- two jobs ------------------------------------------------------------------------------------


def test_two_jobs_that_do_not_fit_together_swap_each_other(rig: SwapRig) -> None:
    one = rig.job
    two = rig.train("two")
    rig.swap_for(two)
    assert [order.op_id for order in rig.sent(worker_msg.LeaseGranted)] == [two.op_id]
    assert one.state.state is TaskState.SWAPPED
    now_ms = 1000.0
    while two.state.state is not TaskState.SWAPPING_OUT:
        now_ms += 1000.0
        rig.tick(now_ms)
        if rig.sent(worker_msg.StopTask):
            rig.park(two)
    rig.hide(two)
    rig.copied(two)
    assert [copy.job for copy in rig.sent(CopySliceIn)] == [one.spec.name]
    assert sorted(rig.images) == sorted([one.spec.name, two.spec.name])
    rig.copied(one)
    assert [order.op_id for order in rig.sent(worker_msg.GrantTurn)] == [one.op_id]
    assert two.state.state is TaskState.SWAPPED
    assert one.progress.evictions == two.progress.evictions == 0


def test_a_job_that_left_comes_back_after_the_job_that_it_left_for(rig: SwapRig) -> None:
    two = rig.train("two")
    rig.tick(1000.0)
    rig.park(rig.job)
    rig.tick(2000.0)  # the turn of job two is over, although its script has only started
    rig.lease(two, 40)
    rig.park(two)
    rig.hide()
    rig.copied()
    assert [order.op_id for order in rig.sent(worker_msg.LeaseGranted)] == [two.op_id]
    assert not rig.sent(CopySliceIn)


def test_several_jobs_leave_for_a_large_one_and_none_comes_back_before_it(rig: SwapRig) -> None:
    """Otherwise each of them takes the place again that the other one leaves, for ever."""
    one = rig.job
    two = rig.train("two")
    rig.tick(1000.0)
    rig.park(one)
    rig.lease(two, 20)
    rig.tick(2000.0)
    large = rig.train("large", priority=0)
    while large.slot is None:
        rig.park(rig.state.jobs[rig.state.owner.job])
    rig.lease(large, 50)
    assert not large.memory.lease_bytes
    for job in (one, two):
        assert job.state.state is TaskState.SWAPPING_OUT
        rig.hide(job)
        rig.copied(job)
        assert not rig.sent(CopySliceIn)
    assert [order.op_id for order in rig.sent(worker_msg.LeaseGranted)] == [large.op_id]


def test_an_image_keeps_no_model_and_no_commit_out_of_the_host_store() -> None:
    rig = SwapRig(store_bytes=96 * MIB)
    rig.swap_out()
    rig.register("other", 40)
    assert sum(rig.images.values()) == 40 * MIB
    assert rig.scheduler.machine.store.free_for_images_bytes < 10 * MIB
